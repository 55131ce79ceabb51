"""What is printed while nobody reads, and where warnings point: in processes whose output really is gone."""

import io
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from isaac_loop.all import MetricsCB
from isaac_loop.basics.checks import warn
from isaac_loop.basics.output import say
from places import PATHS, ROOT
from small import trainer_with

PROGRAM = """
import sys
sys.path[:0] = {paths}
from small import trainer_with
from isaac_loop.all import CheckpointCB, MetricsCB, ProgressCB, LoggerCB
from isaac_loop.log import Screen
callbacks = [MetricsCB(), CheckpointCB({folder!r}), {more}]
trainer_with(*callbacks).fit(12)
print('the end')
"""
SHOWN = ["", "ProgressCB()", "LoggerCB(Screen())"]


def run(tmp_path, more="", shell="{}"):
    "Exit status and errors of a training, started by a shell in this way; and whether it came to its end"
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(paths=PATHS, folder=str(tmp_path / "run"), more=more))
    command = shell.format(f"{sys.executable} {program}")
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    return done.returncode, done.stderr, (tmp_path / "run/step-00000036").is_dir()


@pytest.mark.parametrize("more", SHOWN)
def test_a_broken_pipe_silences_the_display_and_not_the_run(more, tmp_path):
    status, errors, ended = run(tmp_path, more, "{} | head -1")
    assert ended and status == 0 and "Traceback" not in errors
    assert errors.count("Nobody reads what is printed any more") == 1


def test_a_pipe_that_has_both_outputs_may_break_too(tmp_path):
    assert run(tmp_path, "ProgressCB()", "{} 2>&1 | head -2") == (0, "", True)


@pytest.mark.parametrize("how", [">&-", "2>&-", ">&- 2>&-", "> /dev/full"])
def test_an_output_that_is_closed_or_full_does_not_end_the_run(how, tmp_path):
    status, errors, ended = run(tmp_path, "ProgressCB()", "{} " + how)
    assert ended and status == 0 and "Traceback" not in errors


def test_a_closed_file_is_no_reason_to_stop(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    trainer = trainer_with(MetricsCB())
    trainer.fit(2)
    assert trainer.n_updates == 6


def test_letters_that_a_place_does_not_know_are_written_by_their_number(tmp_path):
    "The name of a metric is no reason for a run to end"
    with open(tmp_path / "out", "w", encoding="ascii") as file:
        say("größe ─", file=file)
    assert (tmp_path / "out").read_text() == "gr\\xf6\\xdfe \\u2500\n"


def test_no_module_prints_or_warns_by_itself():
    "Those are `say` and `warn`; what is left is a demo, a command, or what other libraries call"
    allowed = {
        "basics/checks.py": "warnings.warn(",
        "basics/output.py": "print(",
        "recipes/demo.py": "print(",
    }
    for path in (ROOT / "isaac_loop").rglob("*.py"):
        name = str(path.relative_to(ROOT / "isaac_loop"))
        if name.startswith("interop/") or name == "_modidx.py":
            continue
        code = re.sub(r'"[^"\n]*"|\'[^\'\n]*\'', "", path.read_text())
        found = set(re.findall(r"(?<![\w.])(?<!def )print\(|warnings\.warn\(", code))
        assert found <= {allowed.get(name)}, f"{name}: {found}"


class Hooked(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def test_a_warning_points_at_the_first_line_of_the_user_also_through_torch():
    "Here the library is called by a hook of a module"
    library = {"__name__": "isaac_loop.some.module", "warn": warn}
    exec("def hook(module, args, output): warn('here')", library)
    model = Hooked(1, 1)
    model.register_forward_hook(library["hook"])
    with pytest.warns(UserWarning, match="here") as told:
        model(torch.zeros(1, 1))
    assert told[0].filename == __file__


def test_a_warning_without_any_line_of_a_user_is_told_all_the_same():
    code = "import sys\nfrom threading import Thread\nsys.path[:0] = {}\n"
    code += "from isaac_loop.basics.checks import warn\n"
    code += "t = Thread(target=warn, args=('from a thread',)); t.start(); t.join()"
    done = subprocess.run([sys.executable, "-c", code.format(PATHS)], capture_output=True, text=True)
    assert "from a thread" in done.stderr


def test_a_line_waits_for_no_lock_of_tqdm_while_no_bar_is_open():
    "Processes forked from one program share it, so who is killed with it in hand would stop all others"
    code = "from tqdm.std import tqdm; tqdm.get_lock().acquire(); from threading import Thread; " + (
        "from isaac_loop.basics.output import say; t = Thread(target=say, args=['said'], daemon=True); "
        "t.start(); t.join(20)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "said\n", done.stderr
