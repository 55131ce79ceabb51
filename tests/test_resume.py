"""A run that was stopped anywhere and goes on, against the same run that was never stopped.

Everything is compared bit for bit: weights, optimizer, average, best weights, rows of the history and losses of all batches.
"""
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

from isaac_loop.callbacks.augmentation import MixUpCB
from isaac_loop.callbacks.averaging import EMACB, SWACB
from isaac_loop.callbacks.best import KeepBestCB
from isaac_loop.callbacks.checkpoint import CheckpointCB, RewindCB
from isaac_loop.callbacks.interrupts import InterruptCB
from isaac_loop.callbacks.metrics import MetricsCB
from isaac_loop.callbacks.progress import ProgressCB
from isaac_loop.callbacks.recorder import RecorderCB
from isaac_loop.callbacks.schedules import OneCycleSchedulerCB, PlateauSchedulerCB
from isaac_loop.callbacks.tracking import TrackingCB
from isaac_loop.callbacks.training import BasicTrainCB, MomentumTrainCB, NBatchCB
from isaac_loop.data import DataLoaders
from isaac_loop.events import CancelFitException
from isaac_loop.sampling import ReplayLoader, exact_loader
from isaac_loop.store import CheckpointStore, load_weights
from runs import Cut, CutCB, Rows, callbacks, fit, make_loaders, make_model, make_trainer, momentum_sgd, result, same, tree

pytestmark = pytest.mark.filterwarnings("ignore:The training loader does not know", "ignore:Reading")


# ---- T3: save at every batch, go on from each

def everything():
    "As many callbacks as fit into one run"
    import torcheval.metrics
    import torchmetrics
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    return [BasicTrainCB(), MetricsCB(torcheval.metrics.MulticlassAccuracy(), train_metrics=True, accuracy=accuracy), OneCycleSchedulerCB(), EMACB(0.9),
            KeepBestCB(), RecorderCB(rate=lambda t: t.opt.param_groups[0]["lr"], loss=lambda t: t.loss), TrackingCB(), ProgressCB("plain")]


def plain_loaders(num_workers=0):
    train = DataLoader(Rows(40), 8, shuffle=True, num_workers=num_workers)
    return DataLoaders(train, DataLoader(Rows(24), 12))


VARIANTS = {
    "everything": (everything, make_loaders, optim.AdamW),
    "momentum in the gradients": (lambda: callbacks(train=MomentumTrainCB(0.5)), make_loaders, momentum_sgd),
    "swa, mixup, plateau": (lambda: [BasicTrainCB(), MetricsCB(), MixUpCB(), SWACB(0.3, each="update", keep=True), PlateauSchedulerCB(patience=0)], make_loaders, optim.Adam),
    "swa by epoch, limited": (lambda: [BasicTrainCB(), MetricsCB(), NBatchCB(3), SWACB(0.3)], make_loaders, optim.Adam),
    "plain loaders": (callbacks, plain_loaders, optim.Adam),
    "a list": (callbacks, lambda: DataLoaders([o for o in DataLoader(Rows(40, False), 8)], list(DataLoader(Rows(24, False), 12))), optim.Adam),
    "replayed": (callbacks, lambda: DataLoaders(ReplayLoader(DataLoader(Rows(40), 8, shuffle=True), 3), DataLoader(Rows(24), 12)), optim.Adam),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_going_on_from_every_batch_is_the_same_run(variant, tmp_path):
    "T3; NEMO-23, NEMO-25, NEMO-34, PTA-38, PTA-51: three epochs, saved at every batch; one run from each of the checkpoints"
    make_cbs, make_dls, opt_func = VARIANTS[variant]
    whole = fit(make_trainer(make_cbs(), make_dls(), opt_func))
    saved = fit(make_trainer([*make_cbs(), CheckpointCB(tmp_path/"all", every=1, keep_last=None)], make_dls(), opt_func))
    same(whole, saved)
    found = CheckpointStore(tmp_path/"all", read_only=True).list()
    assert len(found) == whole.n_updates
    for o in found:
        again = fit(make_trainer([*make_cbs(), CheckpointCB(tmp_path/f"from {o.step}", every=1000, resume=o.path)], make_dls(), opt_func))
        same(whole, again)
        if hasattr(again, "TrackingCB"): same_tables(whole.TrackingCB, again.TrackingCB)


def same_tables(a, b):
    for name in ("epoch_stats", "batch_stats"):
        found, expected = ([{k: v for k, v in row.items() if k not in ("run", "elapsed")} for row in getattr(o, name)] for o in (a, b))
        assert tree(found) == tree(expected)


@pytest.mark.parametrize("first,then", [(2, 2), (0, 2), (2, 1)])
def test_the_number_of_workers_may_change(first, then, tmp_path):
    "T3 with workers: one run from each place of the second epoch"
    whole = fit(make_trainer(dls=make_loaders(24)), 2)
    saved = fit(make_trainer(callbacks(tmp_path/"all", every=1, keep_last=None), make_loaders(24, num_workers=first)), 2)
    same(whole, saved)
    for o in CheckpointStore(tmp_path/"all", read_only=True).list()[1:5]:
        same(whole, fit(make_trainer(callbacks(tmp_path/f"from {o.step}", resume=o.path), make_loaders(24, num_workers=then)), 2))


# ---- T2, T4, T13: killed and interrupted from outside

def test_killed_and_interrupted_processes_end_as_if_nothing_had_happened():
    "T2, T4, T13; SON-34, SON-27, U10: 20 kills and 20 signals at random moments, also while resuming, saving and validating (`make torture` has more)"
    tool = Path(__file__).parents[1]/"tools"/"torture.py"
    done = subprocess.run([sys.executable, tool, "--kills", "20", "--signals", "20"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 lost" in done.stdout


SCRIPT = """
import os, signal, sys, warnings
sys.path[:0] = {paths}
import runs
from isaac_loop.callbacks.checkpoint import CheckpointCB
from isaac_loop.callbacks.interrupts import InterruptCB
def before_backward(trainer):
    if trainer.epoch == 1: os.kill(os.getpid(), signal.{name})
trainer = runs.make_trainer(runs.callbacks({folder!r}) + [InterruptCB(), before_backward])
runs.fit(trainer)
"""


@pytest.mark.parametrize("name,code", [("SIGINT", -signal.SIGINT), ("SIGTERM", 143)])
def test_a_script_that_is_interrupted_ends_as_the_system_expects(name, code, tmp_path):
    "T13; SON-27: a shell sees 130 (a process that ended by SIGINT) and 143; every batch that was done is saved"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(paths=paths, name=name, folder=str(tmp_path/"run"))], capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert CheckpointStore(tmp_path/"run", read_only=True).latest().step == 8
    same(fit(make_trainer()), fit(make_trainer(callbacks(tmp_path/"run"))))


def press(trainer, signum=signal.SIGINT):
    "As if a signal came now"
    trainer.InterruptCB._note(signum)


def pressing(event, when, signum=signal.SIGINT):
    def handler(trainer):
        if when(trainer): press(trainer, signum)
    handler.__name__ = event
    return handler


MOMENTS = {
    "in the first batch": pressing("after_predict", lambda t: (t.epoch, t.batch_num) == (0, 0)),
    "in the last batch of an epoch": pressing("before_step", lambda t: (t.epoch, t.batch_num) == (1, 6)),
    "at the end of a training pass": pressing("after_epoch", lambda t: t.training and t.epoch == 1),
    "in validation": pressing("after_predict", lambda t: not t.training and t.epoch == 1),
    "in the last batch of validation": pressing("after_predict", lambda t: not t.training and t.batch_num == 1),
    "when a row is complete": pressing("log", lambda t: t.epoch == 1),
    "in the last validation of all": pressing("after_predict", lambda t: not t.training and t.epoch == 2),
    "in the last log": pressing("log", lambda t: t.epoch == 2),
    "after everything": pressing("after_fit", lambda t: True),
    "before anything": pressing("before_fit", lambda t: True),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("loaders", [make_loaders, plain_loaders])
def test_nothing_is_lost_whenever_an_interrupt_comes(moment, loaders, tmp_path):
    "T13 in one process: at most one more batch, everything saved, and the next fit, in this process or another, goes on"
    whole = fit(make_trainer(dls=loaders()))
    for again_here in (True, False):
        folder = tmp_path/str(again_here)
        first = make_trainer([*callbacks(folder), InterruptCB()], loaders())
        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            fit(first, callbacks=MOMENTS[moment])
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
        latest = CheckpointStore(folder, read_only=True).latest()
        assert latest.step == first.n_updates  # So no batch is done twice
        same(whole, fit(first if again_here else make_trainer([*callbacks(folder), InterruptCB()], loaders())))


def test_an_interrupt_is_not_swallowed_by_a_stop_or_a_cancel(tmp_path):
    def before_step(trainer):
        press(trainer)
        trainer.request_stop("enough")
    trainer = make_trainer([*callbacks(tmp_path/"run"), InterruptCB()])
    with pytest.raises(KeyboardInterrupt): fit(trainer, callbacks=before_step)
    position = CheckpointStore(tmp_path/"run", read_only=True).load()[1]["position"]
    assert position["finished"] and position["stop_reason"] == "enough" and trainer.n_updates == 1

    def before_backward(trainer):
        press(trainer, signal.SIGTERM)
        raise CancelFitException("no more")
    with pytest.raises(SystemExit): fit(make_trainer([*callbacks(), InterruptCB()]), callbacks=before_backward)


def test_a_second_interrupt_is_immediate_and_saves_nothing(tmp_path):
    def before_backward(trainer):
        press(trainer)
        press(trainer)
    trainer = make_trainer([*callbacks(tmp_path/"run"), InterruptCB()])
    with pytest.raises(KeyboardInterrupt, match="second"): fit(trainer, callbacks=before_backward)
    assert trainer.n_updates == 0 and not CheckpointStore(tmp_path/"run", read_only=True).list()


def test_outside_of_the_main_thread_no_handlers_are_touched():
    before, errors = signal.getsignal(signal.SIGINT), []

    def work():
        try: fit(make_trainer([*callbacks(), InterruptCB()]), 1, callbacks=CutCB("before_fit", lambda t: signal.getsignal(signal.SIGINT) is not before))
        except BaseException as e: errors.append(e)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors and signal.getsignal(signal.SIGINT) is before


def test_nested_fits_put_back_the_handlers_of_the_outer_one():
    seen = []

    def after_batch(trainer):
        outer = signal.getsignal(signal.SIGTERM)
        fit(make_trainer([*callbacks(), InterruptCB()]), 1)
        seen.append(signal.getsignal(signal.SIGTERM) == outer == trainer.InterruptCB._note)
    before = signal.getsignal(signal.SIGTERM)
    fit(make_trainer([*callbacks(), InterruptCB()]), 1, callbacks=after_batch)
    assert all(seen) and len(seen) == 9 and signal.getsignal(signal.SIGTERM) == before


class Asks(Rows):
    "Each item says whether a signal ends the worker that reads it, and what Ctrl-C does there"
    def __getitem__(self, i):
        signal.raise_signal(signal.SIGINT)  # Left to the main process
        return super().__getitem__(i)


def test_workers_leave_an_interrupt_to_the_main_process():
    dls = make_loaders()
    dls.train = exact_loader(Asks(16), 8, num_workers=2)
    trainer = fit(make_trainer([*callbacks(), InterruptCB()], dls), 1)
    assert trainer.n_updates == 2 and trainer.InterruptCB.interrupted is None
