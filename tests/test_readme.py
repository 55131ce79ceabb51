"The README's code blocks run, and print what it says (but for the time an epoch took)."
import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def without_times(text):
    "Seconds depend on the machine"
    return re.sub(r"'elapsed': '[\d:]+'", "'elapsed': ''", text).strip()


def test_code_blocks_run_and_print_what_the_readme_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # One of them keeps checkpoints
    blocks = re.findall(r"```(python|text)\n(.*?)```", README, flags=re.S)
    assert [kind for kind, _ in blocks] == ["python", "text", "python", "python"]
    namespace, printed, stops = {}, [], []
    for kind, block in blocks:
        if kind == "text":
            assert without_times(printed[-1]) == without_times(block)
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block, "README.md", "exec"), namespace)
        printed.append(out.getvalue())
        stops.append(namespace["trainer"].stop_reason)
    assert stops == [None, "good enough", None]
    assert namespace["trainer"].history.latest("accuracy") > 0.8 and (tmp_path / "runs/digits").exists()
