"The package's own shape: layers, imports, names, and facts that stand in two places."

import ast
import configparser
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from places import ROOT

NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("[0-9]*.ipynb") if ".ipynb_checkpoints" not in p.parts)


def cells(path):
    "Sources of the code cells of a notebook"
    return ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


def module_of(path):
    "The module that a notebook exports"
    return next(
        line.split()[-1] for o in cells(path) for line in o.splitlines() if line.startswith("#| default_exp")
    )


MODULES = {f"isaac_loop.{module_of(p)}": p for p in NOTEBOOKS}


def test_a_module_lies_where_its_notebook_lies():
    "`nbs/loop/20_trainer.ipynb` is `isaac_loop/loop/trainer.py`; no two in a folder have one number"
    for name, path in MODULES.items():
        folders = path.parent.relative_to(ROOT / "nbs").parts
        assert name.split(".")[1:] == [*folders, path.stem.partition("_")[2]]
    places = [(p.parent, p.stem.partition("_")[0]) for p in NOTEBOOKS]
    assert len(set(places)) == len(places)


def test_imports_go_downhill():
    "The contracts in `pyproject.toml`: folders stand one above the other, and nothing goes in a circle"
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout


def test_each_mutant_finds_its_place():
    "What `make mutants` breaks, and the tests that must notice, are there; code that moves takes them along"
    command = [sys.executable, ROOT / "tools/mutants.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_star_stands_only_in_all():
    for path in (ROOT / "isaac_loop").rglob("*.py"):
        stars = [
            n
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.ImportFrom) and any(o.name == "*" for o in n.names)
        ]
        assert bool(stars) == (path.name == "all.py"), path


def test_every_name_that_a_face_lists_is_there():
    "The lists themselves are in `test_faces.py`"
    importlib.import_module("isaac_loop.all")


@pytest.mark.parametrize(
    "module, unwanted",
    [
        ("isaac_loop.loop.events", {"torch"}),
        ("isaac_loop.loop.trainer", {"matplotlib", "pandas", "datasets"}),
        ("isaac_loop.all", {"matplotlib", "pandas", "datasets", "torcheval", "torch._dynamo", "safetensors"}),
        ("isaac_loop.all", {"sqlite3", "smtplib", "html.entities", "sysconfig"}),
        ("isaac_loop.all", {f"isaac_loop.inspection.{o}" for o in ("checks", "script", "tried_promises")}),
        ("isaac_loop.all", {f"isaac_loop.interop.{o}" for o in ("aitoolbox", "pytorch_accelerated", "nemo")}),
    ],
)
def test_importing_stays_light(module, unwanted):
    "What a method, a file or a service needs is loaded by whoever asks for it"
    code = f"import sys, {module}; print({unwanted} & set(sys.modules) or 'nothing heavy')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "nothing heavy\n", done.stderr


def test_public_functions_and_classes_say_what_they_do():
    for name in MODULES:
        module = importlib.import_module(name)
        for public in module.__all__:
            obj = getattr(module, public.split(".")[0])
            if callable(obj):
                assert obj.__doc__, f"{name}.{public} has no docstring"


def _breaches(path):
    "Lines of a module that assign more than three targets, or use `o` outside of a short comprehension"
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        n_targets = sum(len(t.elts) if isinstance(t, ast.Tuple) else 1 for t in targets)
        loops = [node] if isinstance(node, ast.For) else getattr(node, "generators", [])
        names = {n.id for o in loops for n in ast.walk(o.target) if isinstance(n, ast.Name)}
        too_long = isinstance(node, ast.For) or len(loops) > 1
        if n_targets > 3 or ("o" in names and too_long):
            yield f"{path.name}:{node.lineno}: {lines[node.lineno - 1].strip()}"


def test_lines_are_short_in_what_they_do():
    "At most three targets; `o` only in comprehensions with one `for`; cells at most 110 wide"
    modules = [p for p in (ROOT / "isaac_loop").rglob("*.py") if p.name != "_modidx.py"]
    found = [line for path in modules for line in _breaches(path)]
    for path in NOTEBOOKS:
        found += [f"{path.name}: {line}" for o in cells(path) for line in o.splitlines() if len(line) > 110]
    assert not found


def test_settings_ini_says_the_same_as_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parser = configparser.ConfigParser()
    parser.read(ROOT / "settings.ini")
    settings = parser["DEFAULT"]
    version = importlib.import_module("isaac_loop").__version__
    assert settings["version"] == version
    assert settings["lib_name"] == project["name"]
    assert settings["description"] == project["description"]
    assert project["requires-python"] == f">={settings['min_python']}"
    assert settings["requirements"].split() == project["dependencies"]
    assert settings["dev_requirements"].split() == project["optional-dependencies"]["dev"]
    assert [o.strip() for o in settings["keywords"].split(",")] == project["keywords"]
    assert settings["author"] == project["authors"][0]["name"]


def test_saved_outputs_hold_no_paths_and_no_warnings():
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        if ".ipynb_checkpoints" in path.parts:
            continue
        outputs = json.dumps([c.get("outputs") for c in json.loads(path.read_text())["cells"]])
        for bad in (str(ROOT), "site-packages", "Warning:", " at 0x", "Traceback"):
            assert bad not in outputs, f"{path.name} shows {bad}"


def test_every_cell_of_every_notebook_can_be_run():
    "`eval: false` is obeyed by nbdev alone: *Run All* in Jupyter would fail. What cannot run is text"
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        assert not any(re.search(r"^#\|\s*eval\s*:\s*false", o, re.M) for o in cells(path)), path.name
