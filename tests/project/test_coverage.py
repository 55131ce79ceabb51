"""The page that says where each feature is shown, and `tools/coverage.py`, which makes it.

The parser is checked on a small list of its own, whose family `TST` no other test can show by accident.
"""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from places import ROOT

spec = importlib.util.spec_from_file_location("coverage_tool", ROOT / "tools/coverage.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

KNOWN = {f"TST-{i:02}": None for i in range(1, 13)} | {f"OTH-{i:02}": None for i in range(1, 4)}


# The repository's own page


def test_the_page_is_up_to_date_and_every_marker_names_a_feature():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/coverage.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_page_links_to_files_tests_and_headings_that_are_there():
    page = (ROOT / tool.PAGE).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)(?: (`[^|<]+`))?", page)
    assert links
    for href, names in links:
        path, _, wanted = href.partition("#")
        file = (ROOT / "nbs" / path).resolve()
        assert file.is_file() and file.is_relative_to(ROOT), href
        source = file.read_text(encoding="utf-8")
        for name in re.findall("`([^`]+)`", names):
            assert f"def {name}(" in source
        if path.endswith(".ipynb"):
            assert wanted in [
                tool.anchor(o)
                for c in json.loads(source)["cells"]
                for o in re.findall(r"(?m)^#+\s+(.+)$", "".join(c["source"]))
            ], href


def test_the_list_has_each_number_once_in_our_own_short_words():
    features = tool.read_features(ROOT / "tools/features.csv")
    numbers = {}
    for o in features.values():
        family, _, number = o.id.partition("-")
        numbers.setdefault(family, []).append(int(number))
        assert re.fullmatch("[SXE]?!?", o.kind) and o.kind and 1 <= len(o.title.split()) <= 10, o
    for family, found in numbers.items():
        assert found == list(range(1, len(found) + 1)), family
    assert {family: len(found) for family, found in numbers.items()} == dict(
        ISA=119, MIN=16, NEMO=62, PTA=63, AIT=79, SON=34
    )


# Markers


@pytest.mark.parametrize(
    "text, found",
    [
        ("TST-01", ["TST-01"]),
        ("as in (TST-03, OTH-01): done", ["TST-03", "OTH-01"]),
        ("TST-02 to TST-04", ["TST-02", "TST-03", "TST-04"]),
        ("TST-02..04 and TST-09..TST-11", ["TST-02", "TST-03", "TST-04", "TST-09", "TST-10", "TST-11"]),
        ("TST-09..12", ["TST-09", "TST-10", "TST-11", "TST-12"]),
        ("TST-01, TST-01..02", ["TST-01", "TST-02"]),
        ("TST-05 to 3 digits, over two\nlines TST-06 to\n    TST-07", ["TST-05", "TST-06", "TST-07"]),
        ("TST-05 12 rows, UTF-8, SHA-256, XTST-01, QRS-55", ["TST-05"]),
        ("", []),
    ],
)
def test_numbers_and_ranges_are_found(text, found):
    assert tool.parse(text, KNOWN, "here") == found


@pytest.mark.parametrize(
    "text, words",
    [
        ("TST-13", "no feature `TST-13`.*Did you mean `TST-1"),
        ("TST-1", "no feature `TST-1`.*Did you mean"),
        ("TST-001", "no feature `TST-001`"),
        ("TST-10 to TST-14", "no feature `TST-13`"),
        ("TST-04..02", "runs backwards"),
        ("TST-01 to OTH-02", "from one family to another"),
    ],
)
def test_a_marker_that_names_nothing_is_an_error(text, words):
    with pytest.raises(tool.MarkerError, match=f"here: .*{words}"):
        tool.parse(text, KNOWN, "here")


@pytest.mark.parametrize(
    "text, found",
    [
        (" TST-01 TST-02", ["TST-01", "TST-02"]),
        (" TST-01, TST-03..04", ["TST-01", "TST-03", "TST-04"]),
        (" TST-01 F012 U03", ["TST-01"]),
        (" OTH-01..03 TST-02", ["OTH-01", "OTH-02", "OTH-03", "TST-02"]),
    ],
)
def test_a_marker_is_a_list(text, found):
    assert tool.parse_list(text, KNOWN, "here") == found


@pytest.mark.parametrize("text", ["", " TST01", " TST-01 and more", " TTS-01", " tst-01", " TST-01 QRS-55"])
def test_a_marker_has_nothing_else(text):
    with pytest.raises(tool.MarkerError, match="should name features"):
        tool.parse_list(text, KNOWN, "here")


# A repository in small

TESTS = """
"TST-09 in the docstring of the module is about no test"
import pytest

def helper(): "TST-09"

@pytest.mark.shows("TST-01")
@pytest.mark.parametrize("x", [pytest.param(1, id="TST-09")])
def test_one(x): assert x

@pytest.mark.shows("TST-02 to TST-03", "TST-02")
def test_range():
    "TST-09 in the docstring is only told"

class TestClass:
    @pytest.mark.shows("TST-04")
    def test_in_class(self): assert "TST-09"
"""
CELLS = [
    ("markdown", "# Title\n\n> words"),
    ("code", "#| shows: TST-01\n1+1"),
    ("markdown", "some text"),
    ("markdown", "## The `second` part, 2|3\n\ntext"),
    ("code", "#| export\n#| shows: TST-05..06\ndef f(): pass"),
    ("markdown", "#| shows: TST-12"),
    ("code", "# TST-11 without a directive"),
]


def marked(feature):
    return f"\n@pytest.mark.shows('{feature}')\ndef test_more(): pass\n"


@pytest.fixture
def small(tmp_path):
    "A repository with one file of tests and one notebook"
    for o in ("tools", "tests", "nbs/sub/.ipynb_checkpoints"):
        (tmp_path / o).mkdir(parents=True)
    (tmp_path / "tools/features.csv").write_text(
        "id,kind,title\n"
        + "".join(f'TST-{i:02},{"!" if i == 2 else "X"},"Title, {i}"\n' for i in range(1, 13))
    )
    (tmp_path / "tests/test_small.py").write_text(TESTS)
    write_notebook(tmp_path / "nbs/sub/10_small.ipynb", CELLS)
    write_notebook(tmp_path / "nbs/sub/.ipynb_checkpoints/10_small.ipynb", [("code", "#| shows: TST-10")])
    return tmp_path


def write_notebook(path, cells):
    path.write_text(
        json.dumps(
            {"cells": [dict(cell_type=kind, source=source.splitlines(True)) for kind, source in cells]}
        )
    )


def test_places_are_tests_and_headings(small):
    places = tool.find_places(tool.read_features(small / "tools/features.csv"), small)
    notebook, tests = "nbs/sub/10_small.ipynb", "tests/test_small.py"
    second = "The `second` part, 2|3"
    assert {k: [tuple(o) for o in v] for k, v in places.items() if v} == {
        "TST-01": [(notebook, "Title"), (tests, "test_one")],
        "TST-02": [(tests, "test_range")],
        "TST-03": [(tests, "test_range")],
        "TST-04": [(tests, "test_in_class")],
        "TST-05": [(notebook, second)],
        "TST-06": [(notebook, second)],
    }


def test_the_page_is_written_checked_and_noticed_when_old(small, capsys):
    assert "out of date" in tool.main(["--check"], small), "there is none yet"
    assert tool.main([], small) == 0 == tool.main(["--check"], small)
    page = (small / tool.PAGE).read_text()
    assert "| TST-02 | ! | Title, 2 | [test_small.py](../tests/test_small.py) `test_range` |" in page
    link = "[10_small: The `second` part, 2\\|3](sub/10_small.ipynb#the-second-part-23)"
    assert f"| TST-05 |  | Title, 5 | {link} |" in page
    assert "| TST-07 |  | Title, 7 | – |" in page and "## TST: 6 of 12" in page
    (small / "tests/test_small.py").write_text(TESTS + marked("TST-07"))
    assert "Write it anew with" in tool.main(["--check"], small)
    assert (small / tool.PAGE).read_text() == page, "`--check` writes nothing"


def test_what_is_shown_nowhere_is_an_error_only_on_request(small):
    assert tool.main([], small) == 0
    assert tool.main(["--check", "--complete"], small).startswith(
        "6 features are shown nowhere: TST-07, TST-08, TST-09, TST-10, TST-11, TST-12."
    )
    (small / "tests/test_small.py").write_text(TESTS + marked("TST-07..12"))
    assert tool.main([], small) == 0 == tool.main(["--check", "--complete"], small)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda o: (o / "tests/test_small.py").write_text(marked("TST-99")),
            "tests/test_small.py::test_more: there is no feature `TST-99`",
        ),
        (
            lambda o: write_notebook(
                o / "nbs/sub/10_small.ipynb", [("markdown", "# Hooks"), ("code", "#| shows: TST-99")]
            ),
            "nbs/sub/10_small.ipynb in the part Hooks: there is no feature `TST-99`",
        ),
        (
            lambda o: write_notebook(
                o / "nbs/sub/10_small.ipynb",
                [("markdown", "# Hub"), ("code", "#| eval: false\n#| shows: TST-01")],
            ),
            "nbs/sub/10_small.ipynb in the part Hub: a cell that is never run shows nothing",
        ),
        (
            lambda o: (o / "tests/test_small.py").write_text(marked("TST-01 and more")),
            "tests/test_small.py::test_more: `TST-01 and more` should name features",
        ),
        (
            lambda o: (o / "tests/test_small.py").write_text(
                "@pytest.mark.shows(FEATURE)\ndef test_more(): pass"
            ),
            "`pytest.mark.shows(FEATURE)` should name features by plain texts",
        ),
    ],
)
@pytest.mark.parametrize("option", [[], ["--check"]])
def test_an_unknown_number_fails_with_its_place(change, words, option, small):
    change(small)
    assert words in tool.main(option, small)


def test_a_feature_listed_twice_is_an_error(small):
    with open(small / "tools/features.csv", "a") as f:
        f.write("TST-03,X,again\n")
    with pytest.raises(ValueError, match="TST-03 more than once"):
        tool.main([], small)


def test_a_new_family_needs_only_its_lines(small):
    "Until it is listed a marker of it is an error"
    (small / "tests/test_small.py").write_text(TESTS + marked("QRS-01"))
    assert "`QRS-01` should name features" in tool.main([], small)
    with open(small / "tools/features.csv", "a") as f:
        f.write("QRS-01,S,Something\n")
    assert (
        tool.main([], small) == 0
        and "| QRS-01 |  | Something | [test_small.py](../tests/test_small.py) `test_more` |"
        in (small / tool.PAGE).read_text()
    )


def test_what_comes_later_is_said_and_need_not_be_shown(small):
    "A feature that comes `later` as a whole may be shown nowhere; one of which a part does may not"

    def write(later):
        (small / "tools/features.csv").write_text(
            "id,kind,title,later\n"
            + "".join(f"TST-{i:02},X,Title,{later.get(i, '')}\n" for i in range(1, 10))
        )

    write({7: "all", 8: "part", 6: "part"})
    assert (
        tool.main(["--complete"], small)
        == "2 features are shown nowhere: TST-08, TST-09. Mark what shows them."
    )
    page = (small / tool.PAGE).read_text()
    assert "1 features come with it, and of 2 others a part." in page
    assert (
        "| TST-07 |  | Title | *comes with multi-process training* |" in page
        and "| TST-08 |  | Title | *across processes: later* |" in page
    )
    assert "(sub/10_small.ipynb#the-second-part-23)<br>*across processes: later* |" in page
    write({7: "soon"})
    with pytest.raises(ValueError, match="TST-07 has 'soon'. Write `all`, `part` or nothing"):
        tool.main([], small)


def test_what_is_otherwise_is_said_beside_what_is_shown(small):
    rows = [f"TST-{i:02},X,Title,,{'only on Sundays' if i == 1 else ''}\n" for i in range(1, 10)]
    (small / "tools/features.csv").write_text("id,kind,title,later,otherwise\n" + "".join(rows))
    assert tool.main([], small) == 0
    assert "`test_one`<br>*only on Sundays* |" in (small / tool.PAGE).read_text()


@pytest.mark.parametrize(
    "heading, found",
    [
        ("Reading without this library", "reading-without-this-library"),
        ("`run_callbacks`", "run_callbacks"),
        ("2. What's new, in 3.0?", "whats-new-in-3.0"),
    ],
)
def test_links_to_headings_are_those_of_pandoc(heading, found):
    assert tool.anchor(heading) == found
