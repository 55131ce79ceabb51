"""The pages "Coming from ...": what stands in the right column is there, and takes these arguments."""

import json
import re

import pytest

from named import wrong
from places import TUTORIALS

PAGES = sorted(TUTORIALS.glob("coming_from_*.ipynb"))


def codes(page):
    "Every piece of code in the right column of a table"
    for cell in json.loads(page.read_text())["cells"]:
        for line in "".join(cell["source"]).splitlines() if cell["cell_type"] == "markdown" else ():
            if line.startswith("|"):
                yield from re.findall("`([^`]+)`", line.strip("|").split(" | ")[-1])


@pytest.mark.parametrize("page", PAGES, ids=lambda o: o.stem)
def test_what_the_tables_name_is_there_and_takes_these_arguments(page):
    found = list(codes(page))
    assert len(found) > 30
    assert {code: why for code in found if (why := wrong(code))} == {}


@pytest.mark.parametrize(
    "code, why",
    [
        ("NoSuchCB()", "there is no"),
        ("EMACB(0.9, decays=1)", "decays"),
        ("trainer.bach", "has no `bach`"),
        ("Order.SAFE", "there is no"),
        ("ExperimentCB(folder)", "project"),
        ("trainer.request_stop(lr=1)", "lr"),
        ("validate(dl, dl, dl, dl, dl)", "too many"),
        ("values={a: b c}", "no Python"),
    ],
)
def test_a_false_line_would_be_noticed(code, why):
    assert why in wrong(code)


@pytest.mark.parametrize(
    "code",
    [
        "EMACB(decay)",
        "CheckpointCB(folder, every=...)",
        "trainer.history",
        "def log(trainer): ...",
        "before_fit",
        "keep_best=3",
    ],
)
def test_a_true_line_passes(code):
    assert wrong(code) is None
