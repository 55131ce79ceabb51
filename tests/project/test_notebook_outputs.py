"""What notebooks print is what is saved in them: `tools/test_notebooks.py`, which compares them."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("notebook_tool", ROOT / "tools/test_notebooks.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def printed(text):
    return [{"output_type": "stream", "name": "stdout", "text": text}]


def given(text):
    return [{"output_type": "execute_result", "data": {"text/plain": text}}]


@pytest.mark.parametrize(
    "saved, now",
    [
        ("loss 0.4321", "loss 0.4322"),
        ("1.2e-08", "-3e-09"),
        ("<function f at 0x7f1a>", "<function f>"),
        ("saved in .../run", "saved in /tmp/tmpab_12/run"),
        ("run_2026-11-27_23-38-04", "run_2026-11-28_06-01-25"),
        ("epoch  time\n0      00:01", "epoch  time\n0      00:02"),
        ("loss     step\n1.5      3", "loss  step\n11.25  3"),
        ("100 %", "10 %\r100 %"),
        ("2 processes share each batch\ndone", "done"),
    ],
)
def test_what_differs_from_run_to_run_is_left_out(saved, now):
    assert tool.words(printed(saved)) == tool.words(printed(now))


@pytest.mark.parametrize(
    "saved, now",
    [
        ("training.py:29", "training.py:27"),
        ("batch 3", "batch 4"),
        ("writes loss", "reads loss"),
        ("one", "one\ntwo"),
        ("lr loss", "loss lr"),
        ("v1.2", "v2.2"),
    ],
)
def test_other_words_are_found(saved, now):
    cell = SimpleNamespace(id="a", get=lambda name, _: given(now))
    (found,) = tool.differences([cell], [tool.words(given(saved))])
    assert found.startswith("Cell 0 prints otherwise than is saved:")
    assert "-" + saved.splitlines()[-1] in found or "+two" in found


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    "A function that writes a notebook of one cell, in which `old` is saved"
    from fastcore.nbio import mk_cell, new_nb, write_nb

    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["test_notebooks.py"])
    path = tmp_path / "nbs/old.ipynb"
    path.parent.mkdir()

    def write(source):
        cell = mk_cell(source, "code")
        cell.outputs, cell.metadata, cell.execution_count = printed("old\n"), {}, None
        write_nb(new_nb([cell]), path)
        return path

    return write


def test_a_notebook_that_prints_something_else_fails(notebook, capfd):
    ((_, code, _),) = tool.run_all([notebook("print('new')")], 1)
    assert code == tool.OTHERWISE
    told = capfd.readouterr().err
    assert "-old\n+new" in told and "tools/save_outputs.py old.ipynb" in told
    assert tool.main() == "nbs/old.ipynb"


def test_a_notebook_that_fails_is_not_executed_again(notebook, capfd):
    notebook("open('count', 'a').write('x'); print('new'); 1/0")
    assert tool.main() == "nbs/old.ipynb" and "ZeroDivisionError" in capfd.readouterr().err
    assert (tool.ROOT / "nbs/count").read_text() == "x"


def test_what_a_busy_machine_printed_once_is_told_and_no_failure(notebook, capfd):
    notebook("from pathlib import Path; p = Path('been'); print('old' if p.exists() else 'new'); p.touch()")
    assert tool.main() is None
    told = capfd.readouterr()
    assert "-old\n+new" in told.err
    assert "printed something else, but not when it was executed again" in told.out


def test_cells_that_vary_are_there():
    notebooks = "".join(o.read_text() for o in (ROOT / "nbs/tutorials").glob("*.ipynb"))
    assert all(f'"id": "{o}"' in notebooks for o in tool.VARY)
