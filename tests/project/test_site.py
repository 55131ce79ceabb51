"The pages of the site, as far as they can be told without building it: text in, text out."

import ast
import importlib.util
import inspect
import json

import pytest

from isaac_loop.all import EMACB, Trainer
from places import ROOT

TUTORIALS = sorted((ROOT / "nbs/tutorials").glob("*.ipynb"))
spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs/pages.py")
pages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pages)

PLACES = {"EMACB": "train.ema.md#train-ema-emacb", "trainer.fit": "loop.trainer.md#loop-trainer-trainer-fit"}


@pytest.mark.parametrize(
    "text, shown",
    [
        ("Use `EMACB` here", "Use [`EMACB`](../api/train.ema.md#train-ema-emacb) here"),
        ("`EMACB(0.9)`", "[`EMACB(0.9)`](../api/train.ema.md#train-ema-emacb)"),
        ("`EMACB.decay`", "[`EMACB.decay`](../api/train.ema.md#train-ema-emacb)"),
        ("`trainer.fit(3)`", "[`trainer.fit(3)`](../api/loop.trainer.md#loop-trainer-trainer-fit)"),
        ("`trainer.opt`", "`trainer.opt`"),
        ("[`EMACB`](elsewhere.md)", "[`EMACB`](elsewhere.md)"),
        ("# About `EMACB`\n`EMACB`", "# About `EMACB`\n[`EMACB`](../api/train.ema.md#train-ema-emacb)"),
        ("```\n`EMACB`\n```", "```\n`EMACB`\n```"),
    ],
)
def test_a_name_in_backticks_leads_to_its_place_in_the_api(text, shown):
    assert pages.linked(text, PLACES, 1) == shown


def test_links_to_files_lead_to_the_repository_and_links_to_pages_stay():
    assert pages.outward("[a](Makefile)", ".") == f"[a]({pages.SOURCE}Makefile)"
    assert (
        pages.outward("[a](../../tests/project#top)", "nbs/loop") == f"[a]({pages.SOURCE}tests/project#top)"
    )
    for link in (
        "[a](CONTRIBUTING.md)",
        "[a](nbs/loop/20_trainer.ipynb)",
        "[a](https://pytorch.org)",
        "[a](#b)",
    ):
        assert pages.outward(link, ".") == link


@pytest.mark.parametrize(
    "source, tags",
    [
        ("x = 1", []),
        ("#| export\nx = 1", ["exported"]),
        ("#| exporti\nx = 1", ["exported"]),
        ("#| echo: false\nx = 1", ["remove-input"]),
        ("#| output: false\nx = 1", ["remove-output"]),
    ],
)
def test_directives_of_nbdev_are_honoured(source, tags):
    shown = pages.shown_cell(dict(cell_type="code", source=source, outputs=[]), str)
    assert shown["source"] == "x = 1" and shown["metadata"]["tags"] == tags


def test_hidden_cells_are_not_shown():
    for source in ("#| hide\nx = 1", "#| default_exp loop.trainer", "#| export\n"):
        assert pages.shown_cell(dict(cell_type="code", source=source, outputs=[]), str) is None


def test_a_signature_is_shown_as_one_would_call_it():
    assert pages.signature(Trainer.split, "Trainer.split") == "Trainer.split(batch)"
    assert pages.signature(Trainer, "Trainer").startswith(
        "Trainer(dls, loss_func, opt_func, model, callbacks"
    )

    def named(a, kind=dict, *, b=print):
        pass

    assert pages.signature(named, "named") == "named(a, kind=dict, *, b=print)"


def test_parameters_have_type_default_and_meaning():
    shown = pages.parameters(EMACB, {})
    for name in list(inspect.signature(EMACB).parameters)[:1]:
        assert f"`{name}" in shown
    assert shown.startswith("| parameter | default | meaning |")


def test_every_tutorial_is_in_the_contents_once_and_in_the_order_of_the_readme():
    found = [p.stem for p in pages.tutorials((ROOT / "README.md").read_text())]
    assert sorted(found) == sorted(p.stem for p in (ROOT / "nbs/tutorials").glob("*.ipynb"))
    assert found[0] == "callbacks" and found.index("coming_from_nemo") > found.index("reliability")


def test_every_folder_is_a_chapter():
    folders = {p.parts[0] for p in pages.notebooks()} - {"tutorials"}
    assert set(pages.folders()) == folders


def imported(code):
    "Names that the imports of some code give"
    nodes = [o for o in ast.walk(ast.parse(code)) if isinstance(o, (ast.Import, ast.ImportFrom))]
    return {(alias.asname or alias.name).split(".")[0] for node in nodes for alias in node.names}


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_no_shown_cell_of_a_tutorial_needs_a_hidden_import(path):
    cells = [o for o in json.loads(path.read_text())["cells"] if o["cell_type"] == "code"]
    hidden = [pages.text(o) for o in cells if pages.shown_cell(o, str) is None]
    shown = "\n".join(pages.text(o) for o in cells if pages.shown_cell(o, str) is not None)
    read = {o.id for o in ast.walk(ast.parse(shown)) if isinstance(o, ast.Name)}
    missing = {name for code in hidden for name in imported(code)} - imported(shown)
    assert not missing & read
