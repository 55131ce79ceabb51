"Type checkers and editors know the public names, their arguments and their types."

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from places import ROOT

SCRIPT = ROOT / "tests/project/typed_use.py"
MISTAKES = {
    "a name that is not there": "from isaac_loop.callbacks import EarlyStopingCB",
    "an argument that is not there": "from isaac_loop.callbacks import EMACB\nEMACB(decai=0.9)",
    "an argument that is missing": "from isaac_loop import Trainer\nTrainer()",
    "an argument that a method brought later has not": "from isaac_loop import Trainer\n"
    "def look(trainer: Trainer): trainer.check(batchs=3)",
    "an argument that `fit` refuses": "from isaac_loop import Trainer\n"
    "def look(trainer: Trainer): trainer.fit(calbacks=None)",
    "an attribute that is not there": "from isaac_loop import Table\nTable([]).to_markdwon()",
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    "Which files have errors, and which, in one run over the script and each mistake"
    folder = tmp_path_factory.mktemp("typed")
    files = {name: folder / f"mistake_{i}.py" for i, name in enumerate(MISTAKES)}
    for name, path in files.items():
        path.write_text(MISTAKES[name])
    settings = dict(
        include=[str(SCRIPT), *map(str, files.values())], extraPaths=[str(ROOT)], typeCheckingMode="standard"
    )
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [Path(sys.executable).parent / "basedpyright", "-p", folder, "--outputjson"]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    found = [o for o in json.loads(done.stdout)["generalDiagnostics"] if o["severity"] == "error"]
    return {
        name: [o["message"] for o in found if Path(o["file"]) == path]
        for name, path in {"script": SCRIPT, **files}.items()
    }


def test_a_script_with_fifty_public_names_has_no_error(errors):
    names = {o for line in SCRIPT.read_text().splitlines() if "from isaac_loop" in line for o in line.split()}
    assert len([o for o in names if o not in ("from", "import")]) > 55
    assert errors["script"] == []


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(errors, name):
    assert errors[name]


def test_what_is_known_of_the_trainer_is_what_it_has():
    "Run `tools/write_stubs.py` after one of its methods has changed; editors show what each argument means"
    spec = importlib.util.spec_from_file_location("write_stubs", ROOT / "tools" / "write_stubs.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.STUB.read_text()
    assert text == tool.stub()
    assert "        callbacks: Callbacks for this fit only\n" in text and "batches: Also run so many" in text


def test_the_package_says_that_it_has_types():
    assert (ROOT / "isaac_loop/py.typed").exists()
