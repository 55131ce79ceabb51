"""Write the page that says where each feature is shown: `nbs/coverage.md`.

The features stand in `tools/features.csv`, and their families (`ISA`, `NEMO`, ...) are those of its
numbers. A test shows a feature by the marker `@pytest.mark.shows("ISA-70", "ISA-71")`, a notebook's cell by
a line `#| shows: ISA-70 ISA-71`. Ranges are written `ISA-31 to ISA-37` or `ISA-31..37`. What else a test
says is not read.

The column `later` says what comes with multi-process training: `all` of a feature, which may then be shown
nowhere, or a `part` of it. The column `otherwise` says what is not as the feature's own words have it.

    python tools/coverage.py              write the page
    python tools/coverage.py --check      fail if the page is out of date, or a marker names no feature
    python tools/coverage.py --complete   fail, besides, if a feature is shown nowhere
"""

import argparse
import ast
import csv
import difflib
import json
import re
import sys
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path("nbs/coverage.md")
LATER = {
    "": "",
    "part": "*across processes: later*",
    "all": "*comes with multi-process training*",
}  # What the page says
DIRECTIVE = re.compile(r"^#\|\s*shows\b\s*:?(.*)$", re.M)

NEVER_RUN = re.compile(r"^#\|\s*eval\s*:\s*false", re.M)

Feature = namedtuple("Feature", "id kind title later otherwise", defaults=["", ""])
Place = namedtuple("Place", "path name")  # A test and its name, or a notebook and the heading above the cell


class MarkerError(ValueError):
    "A marker that means nothing; the text says which, where, and what was perhaps meant"


def read_features(path):
    "Features by their number, in the order of the list"
    with open(path, newline="", encoding="utf-8") as f:
        rows = [Feature(**row) for row in csv.DictReader(f)]
    features = {o.id: o for o in rows}
    if len(features) < len(rows):
        twice = sorted({o.id for o in rows if [p.id for p in rows].count(o.id) > 1})
        raise ValueError(f"{path.name} has {', '.join(twice)} more than once. Give each feature one line.")
    odd = [f"{o.id} has {o.later!r}" for o in rows if o.later not in LATER]
    if odd:
        raise ValueError(
            f"In the column `later` of {path.name}, {', '.join(odd)}. Write `all`, `part` or nothing."
        )
    return features


def parse(text, known, where):
    "The features of the list that `text` names, ranges filled in"
    families = {o.partition("-")[0] for o in known}
    name = "|".join(sorted(map(re.escape, families)))
    pattern = rf"\b({name})-(\d+)\b(?:\s+to\s+({name})-(\d+)\b|\.\.(?:({name})-)?(\d+)\b)?"
    found = []
    for family, first, *ends in re.findall(pattern, text):
        other, last = ends[0] or ends[2], ends[1] or ends[3]
        if other and other != family:
            span = f"{family}-{first} to {other}-{last}"
            raise MarkerError(f"{where}: `{span}` goes from one family to another. Name two ranges.")
        found += _numbers(family, first, last or first, known, where)
    return list(dict.fromkeys(found))


def _numbers(family, first, last, known, where):
    "All features of `family` from `first` to `last`"
    if int(first) > int(last):
        raise MarkerError(f"{where}: the range `{family}-{first} to {last}` runs backwards.")
    ids = [f"{family}-{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    for o in ids:
        if o not in known:
            near = difflib.get_close_matches(o, known, n=1)
            raise MarkerError(
                f"{where}: there is no feature `{o}`.{f' Did you mean `{near[0]}`?' if near else ''}"
            )
    return ids


def parse_list(text, known, where):
    "The features of a marker, which has nothing but numbers and ranges"
    found = parse(text, known, where)
    families = "|".join(sorted({o.partition("-")[0] for o in known}))
    bare = re.sub(
        rf"\b(?:({families})-\d+(\s+to\s+({families})-\d+|\.\.(({families})-)?\d+)?|[FU]\d+)(?!\S*\w)",
        "",
        text,
    )
    odd = bare.replace(",", " ").split()
    if odd or not text.strip():
        but = f", but has `{odd[0]}`" if odd else ""
        example = next(iter(known))
        raise MarkerError(f"{where}: `{text.strip()}` should name features, such as `{example}`{but}.")
    return found


def shown_by(decorator, where):
    "What the decorator `pytest.mark.shows(...)` names, or nothing if it is another one"
    if not isinstance(decorator, ast.Call) or ast.unparse(decorator.func) != "pytest.mark.shows":
        return None
    if (
        not all(isinstance(o, ast.Constant) and isinstance(o.value, str) for o in decorator.args)
        or decorator.keywords
    ):
        raise MarkerError(f"{where}: `{ast.unparse(decorator)}` should name features by plain texts.")
    return ", ".join(o.value for o in decorator.args)


def test_markers(path, known, root):
    "Pairs of feature and place in a file of tests"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not node.name.startswith("test"):
            continue
        place = Place(path.relative_to(root).as_posix(), node.name)
        where = "::".join(place)
        markers = [shown_by(o, where) for o in node.decorator_list]
        for text in [o for o in markers if o is not None]:
            for feature in parse_list(text, known, where):
                yield feature, place


def notebook_markers(path, known, root):
    "Pairs of feature and place in a notebook"
    heading = ""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"^#+\s+(.+)$", source, re.M) or [heading])[-1]
        if cell["cell_type"] != "code":
            continue
        place = Place(path.relative_to(root).as_posix(), heading.strip())
        where = " in the part ".join(place)
        if DIRECTIVE.search(source) and NEVER_RUN.search(source):
            raise MarkerError(f"{where}: a cell that is never run shows nothing. Take its `#| shows:` away.")
        for text in DIRECTIVE.findall(source):
            for feature in parse_list(text, known, where):
                yield feature, place


def find_places(known, root=ROOT):
    "Where each feature is shown"
    places = {o: [] for o in known}
    tests = [m for p in sorted((root / "tests").rglob("test_*.py")) for m in test_markers(p, known, root)]
    notebooks = [
        p
        for p in sorted((root / "nbs").rglob("*.ipynb"))
        if not any(o.startswith((".", "_")) for o in p.parts)
    ]
    for o, place in [*(m for p in notebooks for m in notebook_markers(p, known, root)), *tests]:
        if place not in places[o]:
            places[o].append(place)
    return places


def anchor(heading):
    "What Pandoc calls a heading in a link"
    text = re.sub(r"[^\w\s.-]", "", heading.lower())
    return re.sub(r"^[^a-z]+", "", re.sub(r"\s+", "-", text.strip()))


def link(path, names):
    "Markdown for all places in one file"
    href = Path(path).relative_to("nbs").as_posix() if path.startswith("nbs/") else f"../{path}"
    if path.endswith(".ipynb"):
        return ", ".join(
            f"[{Path(path).stem}: {o.replace('|', chr(92) + '|')}]({href}#{anchor(o)})" for o in names
        )
    return f"[{Path(path).name}]({href}) " + ", ".join(f"`{o}`" for o in names)


HEAD = """---
title: What is shown where
---

<!-- Written by tools/coverage.py from markers in tests and notebooks; do not edit -->

Of {all} features, {shown} are shown by a test or by an executed cell of a notebook.
An exclamation mark stands for something that is easily got wrong, so that a test has to show it right."""


def make_page(features, places):
    "The page as Markdown"
    shown = [o for o in features if places[o]]
    lines = [HEAD.format(all=len(features), shown=len(shown)), *_outlook(features, places), ""]
    for family in dict.fromkeys(o.partition("-")[0] for o in features):
        ids = [o for o in features if o.startswith(family + "-")]
        lines += [f"## {family}: {len([o for o in ids if places[o]])} of {len(ids)}", ""]
        lines += ["| | | Feature | Shown in |", "|---|---|---|---|"]
        lines += [_row(features[o], places[o]) for o in ids] + [""]
    return "\n".join(lines)


def _row(feature, places):
    mark = "!" if "!" in feature.kind else ""
    return f"| {feature.id} | {mark} | {feature.title} | {_cell(places, feature)} |"


def _outlook(features, places):
    "What is still to come, as a sentence in a list, or nothing"
    whole = [o for o in features if features[o].later == "all" and not places[o]]
    part = [o for o in features if features[o].later == "part"]
    if not whole and not part:
        return ["Nothing of the list waits for a later version."]
    text = f"{len(whole)} features come with it, and of {len(part)} others a part."
    return [f"Training in several processes is not there yet: {text}"]


def _cell(places, feature):
    "Links to the places, then what comes later, and what is otherwise"
    by_file = {}
    for o in places:
        by_file.setdefault(o.path, []).append(o.name)
    shown = [link(path, names) for path, names in by_file.items()]
    told = [LATER[feature.later]] * bool(feature.later) + [f"*{feature.otherwise}*"] * bool(feature.otherwise)
    return "<br>".join(shown + told) or "–"


def main(argv=None, root=ROOT):
    "Write the page, or say what is wrong; returns the exit status"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    parser.add_argument("--complete", action="store_true", help="fail if a feature is shown nowhere")
    args = parser.parse_args(argv)
    features = read_features(root / "tools/features.csv")
    try:
        places = find_places(features, root)
    except MarkerError as e:
        return f"A marker names what is not there. {e}"
    page, file = make_page(features, places), root / PAGE
    if not args.check:
        file.write_text(page, encoding="utf-8")
    elif not file.exists() or file.read_text(encoding="utf-8") != page:
        return f"{PAGE} is out of date. Write it anew with `python tools/coverage.py`."
    missing = [o for o in features if not places[o] and features[o].later != "all"]
    if args.complete and missing:
        return f"{len(missing)} features are shown nowhere: {', '.join(missing)}. Mark what shows them."
    print(f"{len([o for o in features if places[o]])} of {len(features)} features are shown")
    return 0


if __name__ == "__main__":
    sys.exit(main())
