"The README's code blocks run, and print what it says; its tutorials are all there, and links lead somewhere."

import contextlib
import io
import json
import linecache
import re

from isaac_loop.inspection.map_diagram import diagram
from places import ROOT, TUTORIALS

README = (ROOT / "README.md").read_text()
PICTURE = ROOT / "docs" / "pictures" / "first_loop.svg"


def without_times(text):
    "Seconds depend on the machine"
    return re.sub(r"\d\d:\d\d$", "00:00", text, flags=re.M).strip()


def test_code_blocks_run_and_print_what_the_readme_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # One of them keeps checkpoints
    blocks = re.findall(r"```(python|text)\n(.*?)```", README, flags=re.S)
    assert [kind for kind, _ in blocks] == ["python", "text", *["python"] * 4, "text", "python"]
    namespace, printed, stops = {"__name__": "readme"}, [], []
    for kind, block in blocks:
        if kind == "text":
            assert without_times(printed[-1]) == without_times(block)
            continue
        # So that the source of its classes can be read
        linecache.cache["README.md"] = len(block), None, block.splitlines(keepends=True), "README.md"
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block, "README.md", "exec"), namespace)
        printed.append(out.getvalue())
        if len(printed) == 1:
            picture = diagram(namespace["trainer"].map().entries, "loss", alone=True)
            assert PICTURE.read_text().strip() == picture, "draw it anew by tools/draw_loop.py"
        stops.append(namespace["trainer"].stop_reason)
    assert stops[:2] == [None, "good enough"] and stops[3:] == [None, None, None]
    assert stops[2].startswith("`valid_loss`")  # Long before the fifty epochs are over
    assert namespace["trainer"].history.latest("accuracy") > 0.8 and (tmp_path / "runs/digits").exists()


def local_links(text):
    return [
        o for o in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in o and not o.endswith(".html")
    ]  # Pages are made of notebooks later


def prose(path):
    return "\n".join(
        "".join(o["source"]) for o in json.loads(path.read_text())["cells"] if o["cell_type"] == "markdown"
    )


def test_every_tutorial_is_listed_once_and_leads_to_the_next():
    first, listed = (re.findall(r"\(nbs/tutorials/(\w+)\.ipynb\)", o) for o in README.split("this order:"))
    assert first == ["callbacks", "own_callbacks", "reliability"]
    assert sorted(listed) == sorted(o.stem for o in TUTORIALS.glob("*.ipynb"))
    for name, following in zip(listed, listed[1:]):
        assert re.findall(
            r"^Next: \[.+\]\((\w+)\.ipynb\)", prose(TUTORIALS / f"{name}.ipynb"), flags=re.M
        ) == [following], name


def test_links_lead_somewhere():
    texts = {o: o.read_text() for o in (ROOT / "README.md", ROOT / "CONTRIBUTING.md")}
    texts |= {o: prose(o) for o in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in o.parts}
    assert [
        (str(path), o)
        for path, text in texts.items()
        for o in local_links(text)
        if not (path.parent / o).exists()
    ] == []
