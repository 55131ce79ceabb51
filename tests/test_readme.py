"The README's code blocks run, and print what it says (but for the time an epoch took)."
import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def without_times(text):
    "Seconds depend on the machine"
    return re.sub(r"'elapsed': '[\d:]+'", "'elapsed': ''", text).strip()


def test_code_blocks_run_and_print_what_the_readme_says():
    blocks = re.findall(r"```(python|text)\n(.*?)```", README, flags=re.S)
    assert [kind for kind, _ in blocks] == ["python", "text", "python"]
    namespace, printed = {}, []
    for kind, block in blocks:
        if kind == "text":
            assert without_times(printed[-1]) == without_times(block)
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block, "README.md", "exec"), namespace)
        printed.append(out.getvalue())
    assert namespace["trainer"].stop_reason == "good enough"
