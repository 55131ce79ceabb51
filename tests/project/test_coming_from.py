"""The pages "Coming from ...": what stands in the right column is there, and takes these arguments."""

import ast
import inspect
import json
import re

import pytest

import isaac_loop.all as everything
from isaac_loop.loop.events import EVENTS
from isaac_loop.loop.shared_attributes import STATE

from places import TUTORIALS

PAGES = sorted(TUTORIALS.glob("coming_from_*.ipynb"))
KNOWN = {*vars(everything), "SimpleNamespace"}


def codes(page):
    "Every piece of code in the right column of a table"
    for cell in json.loads(page.read_text())["cells"]:
        for line in "".join(cell["source"]).splitlines() if cell["cell_type"] == "markdown" else ():
            if line.startswith("|"):
                yield from re.findall("`([^`]+)`", line.strip("|").split(" | ")[-1])


def wrong(code):
    "What is not true of a piece of code, or None"
    if code == "def log(trainer): ..." or code == "def after_batch(trainer): ...":
        return None
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except SyntaxError:
        return "is no Python"
    return next((why for o in nodes if (why := wrong_name(o) or wrong_call(o))), None)


def wrong_name(node):
    "What is not true of a name or an attribute, or None"
    if isinstance(node, ast.Name) and node.id[0].isupper() and node.id not in KNOWN:
        return f"there is no `{node.id}`"
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
        return None
    if node.value.id == "trainer" and not (hasattr(everything.Trainer, node.attr) or node.attr in STATE):
        return f"the trainer has no `{node.attr}`"
    if node.value.id == "Order" and not hasattr(everything.Order, node.attr):
        return f"there is no `Order.{node.attr}`"


def wrong_call(node):
    "Why a class, a function or a method of the trainer does not take these arguments, or None"
    if not isinstance(node, ast.Call):
        return None
    bare = node.func.id if isinstance(node.func, ast.Name) else None
    of_trainer = (
        node.func.attr
        if isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", None) == "trainer"
        else bare
    )
    known, method = vars(everything).get(bare), getattr(everything.Trainer, of_trainer or "", None)
    if known is None and (method is None or of_trainer in EVENTS):
        return None
    given = [object()] * (len(node.args) + (known is None))
    signature, some = (
        inspect.signature(known or method),
        any(
            isinstance(o, ast.Constant) and o.value is ...
            for o in [*node.args, *(k.value for k in node.keywords)]
        ),
    )
    try:
        (signature.bind_partial if some else signature.bind)(*given, **{k.arg: None for k in node.keywords})
    except TypeError as e:
        return str(e)


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
