"""What somebody reads who has pressed Ctrl-C, or whose job was ended: where it stopped, and how to go on."""

import os
import pty
import signal
import subprocess
import sys
import traceback

import pytest
import torch

from isaac_loop.all import CheckpointCB, DataLoaders, InterruptCB, exact_loader
from places import PATHS
from small import trainer_with


def pressing(*signums, batch=1, training=True):
    "A function as a callback, which does what the signals would do"

    def before_get_loss(trainer):
        if (trainer.batch_num, trainer.training) == (batch, training):
            for signum in signums:
                trainer.InterruptCB._note(signum)

    return before_get_loss


def left(*callbacks, error=KeyboardInterrupt, **options):
    "What left the fit of a trainer with these callbacks"
    with pytest.raises(error) as raised:
        trainer_with(InterruptCB(), *callbacks).fit(2, **options)
    return raised.value


def lines_of(error):
    return "".join(traceback.format_exception(error)).splitlines()


@pytest.mark.parametrize(
    "training,words", [(True, "after batch 1 of epoch 0"), (False, "after batch 1 of epoch 0 (validation)")]
)
def test_ctrl_c_says_after_which_batch_training_stopped(training, words):
    error = left(pressing(signal.SIGINT, training=training))
    assert str(error) == f"Ctrl-C: training stopped {words}" and not hasattr(error, "__notes__")


def test_ctrl_c_between_two_epochs_names_the_epoch():
    def log(trainer):
        trainer.InterruptCB._note(signal.SIGINT)

    log.order = -1
    assert str(left(log)) == "Ctrl-C: training stopped after epoch 0"


def test_the_traceback_is_the_line_of_the_fit():
    lines = lines_of(left(pressing(signal.SIGINT)))
    assert len(lines) < 8 and "fit(2" in "".join(lines) and "isaac_loop" not in "".join(lines)


@pytest.mark.parametrize("training", [True, False])
def test_the_checkpoint_is_named_and_the_same_fit_goes_on_from_there(training, tmp_path, capsys):
    "In the same trainer, too"
    trainer = trainer_with(InterruptCB(), CheckpointCB(tmp_path))
    with pytest.raises(KeyboardInterrupt) as raised:
        trainer.fit(2, callbacks=pressing(signal.SIGINT, training=training))
    (note,) = raised.value.__notes__
    newest = trainer.CheckpointCB.path
    assert f"{newest}. The same `fit` goes on from there" in note and newest.is_dir()
    trainer.fit(2)
    assert f"continuing from {newest.name}" in capsys.readouterr().out


def test_a_run_that_never_resumes_is_told_how(tmp_path):
    error = left(CheckpointCB(tmp_path, resume="never"), pressing(signal.SIGINT))
    assert "pass it as `resume`" in error.__notes__[0]


def test_the_second_ctrl_c_names_the_checkpoint_before(tmp_path):
    error = left(CheckpointCB(tmp_path, every=1), pressing(signal.SIGINT, signal.SIGINT, batch=2))
    assert "broke off inside a batch" in str(error)
    assert "step-00000002. The same `fit`" in error.__notes__[-1]


def test_before_the_first_checkpoint_nothing_is_promised(tmp_path):
    error = left(CheckpointCB(tmp_path), pressing(signal.SIGINT, signal.SIGINT))
    assert "Nothing is saved yet" in error.__notes__[-1]


@pytest.mark.parametrize("n_before", [0, 1])
def test_a_fit_of_which_nothing_is_saved_begins_anew_only_in_another_process(n_before, tmp_path):
    trainer = trainer_with(InterruptCB(), CheckpointCB(tmp_path))
    for _ in range(n_before):
        trainer.fit(1)
    with pytest.raises(KeyboardInterrupt) as raised:
        trainer.fit(2, callbacks=pressing(signal.SIGINT, signal.SIGINT))
    note = raised.value.__notes__[-1]
    assert "begins anew" in note and "in this process the model has been trained meanwhile" in note
    assert ("The newest checkpoint is" in note) == bool(n_before) and "goes on from there" not in note


def test_without_an_interrupt_callback_the_checkpoint_is_named_too(tmp_path):
    def before_get_loss(trainer):
        if trainer.n_updates == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        trainer_with(CheckpointCB(tmp_path), before_get_loss).fit(2)
    assert "step-00000003. The same `fit`" in raised.value.__notes__[-1]


def test_sigterm_says_the_same_on_stderr(tmp_path, capsys):
    error = left(CheckpointCB(tmp_path), pressing(signal.SIGTERM), error=SystemExit)
    said = capsys.readouterr().err.splitlines()
    assert error.code == 143 and said[0] == "SIGTERM: training stopped after batch 1 of epoch 0"
    assert "step-00000002. The same `fit`" in said[1] and len(said) == 2


def test_an_exit_of_somebody_else_is_not_spoken_of(capsys):
    def before_get_loss(trainer):
        raise SystemExit("mine")

    left(before_get_loss, error=SystemExit)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("signum,error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_at_the_very_end_says_that_nothing_is_missing(signum, error, capsys):
    def after_fit(trainer):
        trainer.InterruptCB._note(signum)

    raised = left(after_fit, error=error)
    assert "nothing is missing" in f"{raised}{capsys.readouterr().err}"


# torch may import `tabulate` at exit, and Python then forgets that an interrupt has ended the program
SCRIPT = """
import contextlib
with contextlib.suppress(ImportError): import tabulate
import os, signal, sys
sys.path[:0] = {paths}
from small import trainer_with
from isaac_loop.all import InterruptCB
def before_backward(trainer): os.kill(os.getpid(), signal.SIGINT)
trainer_with(InterruptCB(), before_backward).fit(2)
"""


def test_a_terminal_is_told_at_once():
    "The batch may be a long one"
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(paths=PATHS)], stderr=theirs, stdout=theirs)
    os.close(theirs)
    said = os.read(ours, 10_000).decode()
    assert done.returncode == -signal.SIGINT
    assert said.index("stops after this batch") < said.index("training stopped after batch 0")


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.randn(1), torch.randn(1)


def test_sigterm_to_a_worker_that_is_just_beginning_does_not_end_the_pass(monkeypatch):
    "As a cluster sends it to all processes at once: between PyTorch's handler and ours"
    main, begun = os.getpid(), torch.set_num_threads

    def set_num_threads(n):
        if os.getpid() != main:
            os.kill(os.getpid(), signal.SIGTERM)
        begun(n)

    monkeypatch.setattr(torch, "set_num_threads", set_num_threads)
    trainer = trainer_with(InterruptCB())
    trainer.dls = DataLoaders(exact_loader(Numbers(), 4, seed=1, num_workers=2, in_memory=False))
    trainer.fit(2, valid=False)
    assert trainer.n_updates == 6
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
