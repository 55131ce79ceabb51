"A signal to one of several processes that train together ends all of them after the same batch."

import signal

import pytest
import torch

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.state.errors import RankFailed
from isaac_loop.state.store import CheckpointStore
from isaac_loop.stop.interrupts import InterruptCB
from isaac_loop.train.accumulation import AccumulationCB
from several import in_processes, outcome, rank, trainer

pytestmark = pytest.mark.processes


def signalling(event, when, *signums, ranks=(1,)):
    "As if signals came to some of the processes at an event"

    def handler(trainer):
        if rank() in ranks and when(trainer):
            for signum in signums:
                trainer.InterruptCB._note(signum)

    handler.__name__, handler.order = event, 60
    return handler


def made(folder, accumulate=1):
    return trainer(AccumulationCB(accumulate), InterruptCB(), *([CheckpointCB(folder)] if folder else []))


def fit_and_go_on(folder, moment, accumulate):
    "What an interrupted fit was left with, and where it stood; and what the run ends with that goes on"
    first, again = made(folder, accumulate), made(folder, accumulate)
    try:
        first.fit(2, lr=0.01, callbacks=moment)
    except (KeyboardInterrupt, SystemExit) as error:
        left = type(error), getattr(error, "code", None), first.n_updates, len(first.history)
        left += (str(error), [*getattr(error, "__notes__", []), ""])
    saved = CheckpointStore(folder, read_only=True).latest().step
    again.fit(2, lr=0.01)
    return left, saved, outcome(again)


def whole_fit(accumulate):
    t = made(None, accumulate)
    t.fit(2, lr=0.01)
    return outcome(t)


def at(epoch, batch, training=True):
    return lambda t: (t.epoch, t.batch_num, t.training) == (epoch, batch, training)


MOMENTS = {
    "in the first batch": ("after_predict", at(0, 0)),
    "in a window": ("after_backward", at(0, 3)),
    "in a step": ("after_step", lambda t: t.n_updates == t.updates_per_epoch + 1),
    "in the last batch": ("after_predict", at(0, 6)),
    "at the end of a pass": ("after_epoch", lambda t: t.training and t.epoch == 1),
    "in validation": ("after_predict", at(0, 1, False)),
    "in the last batch of validation": ("after_predict", at(1, 2, False)),
    "when a row is complete": ("log", lambda t: t.epoch == 0),
    "after everything": ("after_fit", lambda t: True),
}


def check_moment(name, signum, ranks, tmp_path, accumulate=2):
    "All leave alike, everything is saved, and the run goes on bit for bit"
    moment = signalling(*MOMENTS[name], signum, ranks=ranks)
    whole = in_processes(2, whole_fit, accumulate)
    found = in_processes(2, fit_and_go_on, tmp_path, moment, accumulate)
    (kind, code, updates, *_), saved, _ = found[0]
    assert all(left[:5] == found[0][0][:5] for left, _, _ in found)
    assert (kind, code) == ((SystemExit, 143) if signum == signal.SIGTERM else (KeyboardInterrupt, None))
    assert saved == updates
    told, quiet = found[0][0], found[1][0]
    assert "The newest checkpoint is" in "".join(told[5]) or "the fit was at its end" in told[4] + told[5][0]
    assert "The newest checkpoint is" not in "".join(quiet[5])
    for (_, _, (weights, rows)), (then, rows_then) in zip(found, whole):
        assert torch.equal(weights, then) and rows == rows_then


@pytest.mark.parametrize(
    "moment,signum,ranks",
    [
        ("in a window", signal.SIGINT, (1,)),
        ("in validation", signal.SIGTERM, (1,)),
        ("when a row is complete", signal.SIGINT, (0, 1)),
        ("after everything", signal.SIGTERM, (0,)),
    ],
)
def test_all_processes_leave_together_and_go_on_bit_for_bit(moment, signum, ranks, tmp_path):
    check_moment(moment, signum, ranks, tmp_path)


def hurried(folder):
    both = signalling("before_backward", at(1, 1), signal.SIGINT, signal.SIGINT)
    t = trainer(InterruptCB(), CheckpointCB(folder, every=1))
    try:
        t.fit(2, lr=0.01, callbacks=both)
    except (KeyboardInterrupt, RankFailed) as error:
        return type(error), str(error), t.n_updates


def test_a_second_ctrl_c_is_for_one_process_and_the_others_are_told(tmp_path):
    (kind, text, _), (other_kind, other_text, updates) = in_processes(2, hurried, tmp_path)
    assert other_kind is KeyboardInterrupt and "second Ctrl-C" in other_text
    assert kind is RankFailed and "Process 1 failed with KeyboardInterrupt: the second Ctrl-C" in text
    assert CheckpointStore(tmp_path, read_only=True).latest().step == updates
