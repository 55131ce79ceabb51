"""A run that was stopped anywhere and goes on, against the same run that was never stopped.

Everything is compared bit for bit: weights, optimizer, average, best weights, rows of the history and
losses of all batches.
"""

import random
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

from isaac_loop.data.augmentation import MixUpCB
from isaac_loop.train.averaging import EMACB, SWACB
from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.stop.interrupts import InterruptCB
from isaac_loop.log.loggers import LoggerCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.show.progress import ProgressCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.schedule.plateau import PlateauSchedulerCB
from isaac_loop.schedule.schedules import OneCycleSchedulerCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.train.training import BasicTrainCB, MomentumTrainCB, NBatchCB
from isaac_loop.state.checkpoint_files import load_weights
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelEpochException, CancelFitException, Order
from isaac_loop.data.exact_loaders import ReplayLoader, exact_loader
from isaac_loop.state.plain_state import (
    CheckpointFolderBusy,
    NoValidCheckpoint,
    ResumeMismatch,
    StateOwnerMissing,
    UnsaveableState,
)
from isaac_loop.state.store import CheckpointStore
import runs
from runs import (
    Cut,
    CutCB,
    Rows,
    callbacks,
    fit,
    make_loaders,
    make_model,
    make_trainer,
    momentum_sgd,
    result,
    same,
    tree,
)
from places import PATHS, ROOT

pytestmark = pytest.mark.filterwarnings("ignore:The training loader does not know", "ignore:Reading")


# ---- save at every batch, go on from each


def everything():
    "As many callbacks as fit into one run"
    import torcheval.metrics
    import torchmetrics

    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    return [
        BasicTrainCB(),
        MetricsCB(torcheval.metrics.MulticlassAccuracy(), train_metrics=True, accuracy=accuracy),
        OneCycleSchedulerCB(),
        EMACB(0.9),
        KeepBestCB(),
        RecorderCB(rate=lambda t: t.opt.param_groups[0]["lr"], loss=lambda t: t.loss),
        TrackingCB(),
        LoggerCB(lambda values, step: None, every=3),
        ProgressCB("plain"),
    ]


def plain_loaders(num_workers=0):
    train = DataLoader(Rows(40), 8, shuffle=True, num_workers=num_workers)
    return DataLoaders(train, DataLoader(Rows(24), 12))


class ThreeCB:
    "Has the first three batches of each pass only"

    def before_epoch(self, trainer):
        trainer.batches = range(3)


class OtherLoaderCB:
    "Trains on two other batches in every second epoch"

    def before_epoch(self, trainer):
        if trainer.training and trainer.epoch % 2:
            trainer.dl = list(DataLoader(Rows(16, False), 8))


VARIANTS = {
    "everything": (everything, make_loaders, optim.AdamW),
    "momentum in the gradients": (lambda: callbacks(train=MomentumTrainCB(0.5)), make_loaders, momentum_sgd),
    "swa, mixup, plateau": (
        lambda: [
            BasicTrainCB(),
            MetricsCB(),
            MixUpCB(),
            SWACB(0.3, every="update", keep=True),
            PlateauSchedulerCB(patience=0),
        ],
        make_loaders,
        optim.Adam,
    ),
    "swa by epoch, limited": (
        lambda: [BasicTrainCB(), MetricsCB(), NBatchCB(3), SWACB(0.3)],
        make_loaders,
        optim.Adam,
    ),
    "plain loaders": (callbacks, plain_loaders, optim.Adam),
    "a list": (
        callbacks,
        lambda: DataLoaders(
            [o for o in DataLoader(Rows(40, False), 8)], list(DataLoader(Rows(24, False), 12))
        ),
        optim.Adam,
    ),
    "cut short": (lambda: [BasicTrainCB(), MetricsCB(), ThreeCB()], make_loaders, optim.Adam),
    "another loader": (lambda: [BasicTrainCB(), MetricsCB(), OtherLoaderCB()], plain_loaders, optim.Adam),
    "replayed": (
        callbacks,
        lambda: DataLoaders(ReplayLoader(DataLoader(Rows(40), 8, shuffle=True), 3), DataLoader(Rows(24), 12)),
        optim.Adam,
    ),
}


@pytest.mark.shows("AIT-45", "AIT-64", "NEMO-23", "NEMO-25", "NEMO-34", "PTA-38", "PTA-51")
@pytest.mark.parametrize("variant", VARIANTS)
def test_going_on_from_every_batch_is_the_same_run(variant, tmp_path):
    "Three epochs, saved at every batch; one run from each of the checkpoints"
    make_cbs, make_dls, opt_func = VARIANTS[variant]
    whole = fit(make_trainer(make_cbs(), make_dls(), opt_func))
    saved = fit(
        make_trainer(
            [*make_cbs(), CheckpointCB(tmp_path / "all", every=1, keep_last=None)], make_dls(), opt_func
        )
    )
    same(whole, saved)
    found = CheckpointStore(tmp_path / "all", read_only=True).list()
    assert len(found) == whole.n_updates
    for o in found:
        again = fit(
            make_trainer(
                [*make_cbs(), CheckpointCB(tmp_path / f"from {o.step}", every=1000, resume=o.path)],
                make_dls(),
                opt_func,
            )
        )
        same(whole, again)
        if hasattr(again, "TrackingCB"):
            same_tables(whole.TrackingCB, again.TrackingCB)


def same_tables(a, b):
    for name in ("epoch_stats", "batch_stats"):
        found, expected = (
            [{k: v for k, v in row.items() if k not in ("run", "elapsed")} for row in getattr(o, name)]
            for o in (a, b)
        )
        assert tree(found) == tree(expected)


@pytest.mark.shows("NEMO-59")
def test_going_on_in_the_middle_of_a_window(tmp_path):
    "Saved after every batch and broken off after each, also within the three batches of an update"
    whole = fit(make_trainer(runs.everything()), 2)
    assert whole.n_updates == 2 * 3
    for n in range(1, 14):
        cut = CutCB("before_predict", lambda t: t.training and t.epoch * 7 + t.batch_num == n)
        saving = lambda: CheckpointCB(tmp_path / f"cut {n}", every=timedelta(0))
        with pytest.raises(Cut):
            fit(make_trainer([*runs.everything(), saving(), cut]), 2)
        same(whole, fit(make_trainer([*runs.everything(), saving()]), 2))


WORKERS = {
    "none": dict(),
    "one": dict(num_workers=1),
    "two": dict(num_workers=2),
    "persistent": dict(num_workers=2, persistent_workers=True),
}


@pytest.mark.parametrize(
    "first,then",
    [("two", "two"), ("none", "persistent"), ("persistent", "one"), ("persistent", "persistent")],
)
def test_the_number_of_workers_may_change(first, then, tmp_path):
    "One run from each place of the second epoch"
    whole = fit(make_trainer(dls=make_loaders(24)), 2)
    saved = fit(
        make_trainer(
            callbacks(tmp_path / "all", every=1, keep_last=None), make_loaders(24, **WORKERS[first])
        ),
        2,
    )
    same(whole, saved)
    for o in CheckpointStore(tmp_path / "all", read_only=True).list()[1:5]:
        same(
            whole,
            fit(
                make_trainer(
                    callbacks(tmp_path / f"from {o.step}", resume=o.path), make_loaders(24, **WORKERS[then])
                ),
                2,
            ),
        )


class Stream(IterableDataset):
    "The rows through a shuffle buffer, each worker every n-th"

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        info, buffer = get_worker_info(), []
        for i in range(info.id if info else 0, len(self.rows), info.num_workers if info else 1):
            buffer.append(self.rows[i])
            if len(buffer) > 5:
                yield buffer.pop(random.randrange(6))
        yield from buffer


def stream_loaders(**options):
    return DataLoaders(
        exact_loader(Stream(Rows(40)), 8, seed=5, **options), exact_loader(Rows(24), 12, shuffle=False)
    )


@pytest.mark.parametrize("workers", ["none", "two", "persistent"])
def test_a_run_over_a_stream_goes_on_by_replay(workers, tmp_path):
    "Saved after every batch of two epochs, and one run from each"
    steps = lambda: [BasicTrainCB(), MetricsCB(), RecorderCB(), EMACB(0.9)]
    whole = fit(make_trainer(steps(), stream_loaders(**WORKERS[workers])), 2)
    same(
        whole,
        fit(
            make_trainer(
                [*steps(), CheckpointCB(tmp_path / "all", every=1, keep_last=None)],
                stream_loaders(**WORKERS[workers]),
            ),
            2,
        ),
    )
    found = CheckpointStore(tmp_path / "all", read_only=True).list()
    assert len(found) == whole.n_updates and whole.n_updates in (
        10,
        12,
    )  # Two workers share the rows, and each ends with a batch that is not full
    for o in found[::3]:
        same(
            whole,
            fit(
                make_trainer(
                    [*steps(), CheckpointCB(tmp_path / f"from {o.step}", every=1000, resume=o.path)],
                    stream_loaders(**WORKERS[workers]),
                ),
                2,
            ),
        )


# ---- killed and interrupted from outside


class Placed(IterableDataset):
    "An endless stream that knows its place, and how many rows were read"

    start = at = read = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]

    def __iter__(self):
        rows = Rows(64)
        for self.at in count(self.start + 1):
            self.read += 1
            yield rows[(self.at - 1) % 64]


class Honoured:
    "A loader of somebody else's that keeps its place: the contract of torchdata's"

    def __init__(self):
        self.rows, self.at, self.start = Rows(40, False), 0, 0

    def state_dict(self):
        return {"_num_yielded": self.at}

    def load_state_dict(self, state):
        self.start = self.at = state["_num_yielded"]

    def __len__(self):
        return 5

    def __iter__(self):
        first, self.start = self.start, 0
        for k in range(first, 5):
            self.at = k + 1
            yield self.rows.x[8 * k : 8 * k + 8], self.rows.y[8 * k : 8 * k + 8]
        self.at = 0


@pytest.mark.parametrize("make", [lambda: exact_loader(Placed(), 8, seed=5), Honoured])
def test_what_knows_its_place_is_not_read_again(make, tmp_path):
    "Two epochs of five batches, also where one ends; a run from every second batch"

    def make_run(folder, **options):
        return make_trainer(
            [
                BasicTrainCB(),
                MetricsCB(),
                NBatchCB(5),
                RecorderCB(),
                CheckpointCB(folder, every=1, keep_last=None, **options),
            ],
            DataLoaders(make()),
            optim.SGD,
        )

    whole = fit(make_run(tmp_path / "all"), 2, valid=False)
    for o in CheckpointStore(tmp_path / "all", read_only=True).list()[::2]:
        again = fit(make_run(tmp_path / f"from {o.step}", resume=o.path), 2, valid=False)
        same(whole, again)
        if make is not Honoured:
            assert again.dls.train.dataset.read <= 8 * (
                10 - o.step + 2
            )  # `NBatchCB` reads one more in each epoch


@pytest.mark.shows("SON-34", "SON-27", "U10")
def test_killed_and_interrupted_processes_end_as_if_nothing_had_happened():
    "20 kills and 20 signals, also while resuming, saving and validating (`make torture` has more)"
    tool = ROOT / "tools/torture.py"
    done = subprocess.run(
        [sys.executable, tool, "--kills", "20", "--signals", "20"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 lost" in done.stdout


SCRIPT = """
import os, signal, sys, warnings
sys.path[:0] = {paths}
import runs
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.stop.interrupts import InterruptCB
def before_backward(trainer):
    if trainer.epoch == 1: {kill}(os.getpid(), signal.{name})
callbacks = [*runs.callbacks({folder!r}), InterruptCB(), before_backward]
trainer = runs.make_trainer(callbacks, runs.make_loaders(num_workers={workers}))
runs.fit(trainer)
"""


@pytest.mark.shows("SON-27")
@pytest.mark.parametrize(
    "name,code,kill,workers", [("SIGINT", -signal.SIGINT, "os.kill", 0), ("SIGTERM", 143, "os.killpg", 2)]
)
def test_a_script_that_is_interrupted_ends_as_the_system_expects(name, code, kill, workers, tmp_path):
    """A shell sees 130 (a process that ended by SIGINT) and 143, also if SIGTERM comes to the workers.

    Every batch that was done is saved."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            SCRIPT.format(paths=PATHS, name=name, kill=kill, workers=workers, folder=str(tmp_path / "run")),
        ],
        capture_output=True,
        timeout=60,
        start_new_session=True,
    )
    assert done.returncode == code, done.stderr
    assert CheckpointStore(tmp_path / "run", read_only=True).latest().step == 8
    same(fit(make_trainer()), fit(make_trainer(callbacks(tmp_path / "run"))))


def press(trainer, signum=signal.SIGINT):
    "As if a signal came now"
    trainer.InterruptCB._note(signum)


def pressing(event, when, signum=signal.SIGINT):
    def handler(trainer):
        if when(trainer):
            press(trainer, signum)

    handler.__name__, handler.order = event, 60
    return handler


MOMENTS = {
    "in the first batch": pressing("after_predict", lambda t: (t.epoch, t.batch_num) == (0, 0)),
    "in the last batch of an epoch": pressing(
        "before_step", lambda t: (t.epoch, t.batch_num) == (1, t.n_batches - 1)
    ),
    "at the end of a training pass": pressing("after_epoch", lambda t: t.training and t.epoch == 1),
    "in validation": pressing("after_predict", lambda t: not t.training and t.epoch == 1),
    "in the last batch of validation": pressing(
        "after_predict", lambda t: not t.training and t.batch_num == 1
    ),
    "when a row is complete": pressing("log", lambda t: t.epoch == 1),
    "in the last validation of all": pressing("after_predict", lambda t: not t.training and t.epoch == 2),
    "in the last log": pressing("log", lambda t: t.epoch == 2),
    "after everything": pressing("after_fit", lambda t: True),
    "before anything": pressing("before_fit", lambda t: True),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("loaders", [make_loaders, plain_loaders])
def test_nothing_is_lost_whenever_an_interrupt_comes(moment, loaders, tmp_path):
    "At most one more batch, everything saved, and the next fit, in this process or another, goes on"
    whole = fit(make_trainer(dls=loaders()))
    for again_here in (True, False):
        folder = tmp_path / str(again_here)
        first = make_trainer([*callbacks(folder), InterruptCB()], loaders())
        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            fit(first, callbacks=MOMENTS[moment])
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
        latest = CheckpointStore(folder, read_only=True).latest()
        assert latest.step == first.n_updates  # So no batch is done twice
        same(
            whole, fit(first if again_here else make_trainer([*callbacks(folder), InterruptCB()], loaders()))
        )


@pytest.mark.parametrize("event", ["log", "after_fit", "cleanup_fit"])
@pytest.mark.parametrize("with_callback", [True, False])
def test_a_fit_that_was_interrupted_at_its_very_end_is_not_trained_twice(event, with_callback, tmp_path):
    "The cell is run again, and ends as one fit; the one after that trains"

    def cbs(folder=None):
        return [
            BasicTrainCB(),
            MetricsCB(show=False),
            SWACB(0.5, keep=True),
            *([CheckpointCB(folder)] if folder else []),
        ]

    whole = fit(make_trainer(cbs()), 2)
    one_fit, two_fits = result(whole), result(fit(whole, 2))
    for order in (5, 35, 45):

        def last(trainer):
            if trainer.epoch != 1:
                return
            if not with_callback:
                raise KeyboardInterrupt
            press(trainer)

        last.__name__, last.order = (
            event,
            order if event != "cleanup_fit" else order + 10,
        )  # While handlers are still there
        trainer = make_trainer(cbs(tmp_path / str(order)) + [InterruptCB()] * with_callback)
        with pytest.raises(KeyboardInterrupt):
            fit(trainer, 2, callbacks=last)
        same(one_fit, fit(trainer, 2))
    same(two_fits, fit(trainer, 2))


def test_a_run_that_somebody_else_has_finished_meanwhile_is_not_trained_again(tmp_path, capsys):
    "A notebook was interrupted, a script went on in its folder, and then the cells are run once more"

    def cbs():
        return [*callbacks(tmp_path / "run"), InterruptCB()]

    for n_fits in (1, 2):
        trainer = make_trainer(cbs())
        with pytest.raises(KeyboardInterrupt):
            fit(trainer, callbacks=CutCB("before_step", lambda t: t.n_updates == 16 and press(t)))
        script = make_trainer(cbs())
        for _ in range(n_fits):
            fit(script)
        trainer.fit(3, 0.02)
        assert "complete already" in capsys.readouterr().out
        if n_fits == 2:
            fit(trainer)
        same(script, trainer)
        same(fit(script), fit(trainer))
        shutil.rmtree(tmp_path / "run")


def test_callbacks_of_one_fit_go_on_with_it_when_it_was_interrupted(tmp_path):
    whole, trainer = fit(make_trainer()), make_trainer([])
    for n in (9, 16):
        with pytest.raises(KeyboardInterrupt):
            fit(
                trainer,
                callbacks=[
                    *callbacks(tmp_path / "run"),
                    InterruptCB(),
                    CutCB("before_step", lambda t: t.n_updates == n and press(t)),
                ],
            )
    fit(trainer, callbacks=callbacks(tmp_path / "run"))
    assert torch.equal(whole.model[0].weight, trainer.model[0].weight) and len(trainer.history) == 3


def test_a_fit_after_loading_is_a_new_one_though_the_last_was_interrupted(tmp_path):
    "It went on with the newest checkpoint, and what had been loaded was gone"
    trainer = make_trainer(
        [BasicTrainCB(), MetricsCB(), InterruptCB(), CheckpointCB(tmp_path / "run", keep_last=None)]
    )
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, callbacks=CutCB("after_fit", press))
    trainer.load(tmp_path / "run" / "step-00000007")
    assert len(trainer.history) == 1 and len(fit(trainer, 1).history) == 2 and trainer.n_updates == 7


def test_a_fit_after_loading_from_mid_epoch_says_that_its_first_epoch_is_not_whole(tmp_path):
    "A schedule for 14 updates had 12"
    whole = fit(make_trainer([BasicTrainCB(), CheckpointCB(tmp_path / "run", every=9, keep_last=None)]))
    n, trainer = whole.n_updates, make_trainer([BasicTrainCB()])
    with pytest.warns(UserWarning, match=r"only the rest of its batches.*set_epoch\(2\)"):
        trainer.load(tmp_path / "run" / "step-00000009")
    assert fit(trainer, 1).n_updates == 2 * 7 - 9
    with pytest.warns(UserWarning, match="rest"):
        trainer.load(tmp_path / "run" / "step-00000009")
    trainer.dls.train.set_epoch(2)
    assert fit(trainer, 1).n_updates == 7
    trainer.load(tmp_path / "run" / f"step-{n:08}")
    assert fit(trainer, 1).n_updates == 7


def test_a_second_interrupt_in_validation_saves_nothing_either(tmp_path):
    def predict(trainer):
        if not trainer.training:
            press(trainer), press(trainer)

    trainer = make_trainer([*callbacks(tmp_path / "run"), InterruptCB()])
    with pytest.raises(KeyboardInterrupt, match="second"):
        fit(trainer, callbacks=predict)
    assert trainer.n_updates == 7 and not CheckpointStore(tmp_path / "run", read_only=True).list()


def test_an_interrupt_is_not_swallowed_by_a_stop_or_a_cancel(tmp_path):
    def log(trainer):
        press(trainer)
        trainer.request_stop("enough")

    trainer = make_trainer([*callbacks(tmp_path / "run"), InterruptCB()])
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, callbacks=log)
    position = CheckpointStore(tmp_path / "run", read_only=True).load()[1]["position"]
    assert position["finished"] and position["stop_reason"] == "enough" and trainer.n_updates == 7

    def before_backward(trainer):
        press(trainer, signal.SIGTERM)
        raise CancelFitException("no more")

    with pytest.raises(SystemExit):
        fit(make_trainer([*callbacks(), InterruptCB()]), callbacks=before_backward)


@pytest.mark.parametrize("error", [CancelFitException, CancelEpochException])
def test_the_epoch_after_a_cancelled_one_is_whole(error, tmp_path):
    "The loader was saved in the middle of the cancelled pass, so the next one had only the rest"

    class LeaveCB:
        seen = 0

        def after_batch(self, trainer):
            self.seen += 1
            if self.seen == 2:
                raise error

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    def run(folder, cut=False):
        trainer = make_trainer(
            [
                BasicTrainCB(),
                MetricsCB(),
                OneCycleSchedulerCB(),
                CheckpointCB(folder),
                LeaveCB(),
                CutCB("before_step", lambda t: cut and t.LeaveCB.seen == 2),
            ]
        )
        with suppress(Cut):
            for _ in range(2):
                fit(trainer, 2, valid=False)
        return trainer

    whole = run(tmp_path / "whole")
    run(tmp_path / "cut", cut=True)
    same(whole, run(tmp_path / "cut"))


def test_a_second_interrupt_is_immediate_and_saves_nothing(tmp_path):
    def before_backward(trainer):
        press(trainer)
        press(trainer)

    trainer = make_trainer([*callbacks(tmp_path / "run"), InterruptCB()])
    with pytest.raises(KeyboardInterrupt, match="second"):
        fit(trainer, callbacks=before_backward)
    assert trainer.n_updates == 0 and not CheckpointStore(tmp_path / "run", read_only=True).list()


def test_outside_of_the_main_thread_no_handlers_are_touched():
    before, errors = signal.getsignal(signal.SIGINT), []

    def work():
        try:
            fit(
                make_trainer([*callbacks(), InterruptCB()]),
                1,
                callbacks=CutCB("before_fit", lambda t: signal.getsignal(signal.SIGINT) is not before),
            )
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors and signal.getsignal(signal.SIGINT) is before


def test_nested_fits_put_back_the_handlers_of_the_outer_one():
    seen = []

    def after_batch(trainer):
        if not trainer.training:
            return
        outer = signal.getsignal(signal.SIGTERM)
        fit(make_trainer([*callbacks(), InterruptCB()]), 1)
        seen.append(signal.getsignal(signal.SIGTERM) == outer == trainer.InterruptCB._note)

    before = signal.getsignal(signal.SIGTERM)
    fit(make_trainer([*callbacks(), InterruptCB()]), 1, callbacks=after_batch)
    assert all(seen) and len(seen) == 7 and signal.getsignal(signal.SIGTERM) == before


class Asks(Rows):
    "Each item says whether a signal ends the worker that reads it, and what Ctrl-C does there"

    def __getitem__(self, i):
        signal.raise_signal(signal.SIGINT)  # Left to the main process
        return super().__getitem__(i)


def test_workers_leave_an_interrupt_to_the_main_process():
    dls = make_loaders()
    dls.train = exact_loader(Asks(16), 8, num_workers=2)
    trainer = fit(make_trainer([*callbacks(), InterruptCB()], dls), 1)
    assert trainer.n_updates == 2 and trainer.interrupted is None


# ---- one folder, many starts


def cut_at(n):
    return CutCB("after_backward", lambda t: t.n_updates == n)


def broken_off(folder, n=10, cbs=None, **options):
    "A run that lost its power after `n` updates"
    trainer = make_trainer(cbs() + [CheckpointCB(folder, **options)] if cbs else callbacks(folder, **options))
    with pytest.raises(Cut):
        fit(trainer, callbacks=cut_at(n))
    return trainer


def test_the_same_checkpoint_can_be_gone_on_from_again_and_again(tmp_path):
    "Cut at the same batch several times, each time before anything new is saved"
    for _ in range(4):
        broken_off(tmp_path / "run", every=4)
    assert len(CheckpointStore(tmp_path / "run", read_only=True).list()) == 2
    same(fit(make_trainer()), fit(make_trainer(callbacks(tmp_path / "run", every=4))))


def test_two_runs_at_a_time_in_one_folder_are_refused(tmp_path):
    "The second one says so before it trains, and the first goes on"

    def before_batch(trainer):
        if trainer.batch_num:
            return
        with pytest.raises(CheckpointFolderBusy):
            fit(second)

    second = make_trainer(callbacks(tmp_path / "run"))
    same(fit(make_trainer()), fit(make_trainer(callbacks(tmp_path / "run")), callbacks=before_batch))


@pytest.mark.shows("PTA-50")
def test_a_run_may_be_moved_or_copied(tmp_path):
    "A moved folder and a copied one go on alike, and a single checkpoint can be named by its path"
    whole = fit(make_trainer())
    broken_off(tmp_path / "run", every=4)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "run").rename(tmp_path / "moved")
    one = sorted((tmp_path / "copy").glob("step-*"))[0]
    shutil.copytree(one, tmp_path / "elsewhere" / "one")
    for cb in (
        CheckpointCB(tmp_path / "moved", resume="must"),
        CheckpointCB(tmp_path / "copy", resume="must"),
        CheckpointCB(tmp_path / "new", resume=tmp_path / "elsewhere" / "one"),
    ):
        same(whole, fit(make_trainer([*callbacks(), cb])))
    model = make_model()
    model.load_state_dict(
        load_weights(CheckpointStore(tmp_path / "copy", read_only=True).latest().path)
    )  # Plain PyTorch


# ---- where to go on


@pytest.mark.shows("NEMO-24", "NEMO-27", "NEMO-36")
def test_must_insists_and_never_begins_anew(tmp_path):
    "Nothing is ever replaced by random weights in silence"
    with pytest.raises(NoValidCheckpoint, match="Is it the right folder"):
        fit(make_trainer(callbacks(tmp_path / "run", resume="must")))
    with pytest.raises(NoValidCheckpoint):
        fit(make_trainer(callbacks(tmp_path / "run", resume=tmp_path / "run" / "step-7")))
    broken_off(tmp_path / "run", every=4)
    kept = {o.name for o in (tmp_path / "run").glob("step-*")}
    fresh = make_trainer([*callbacks(tmp_path / "run", resume="never")])
    fit(fresh, 1)
    fit(fresh, 1)  # A second fit of the same run
    found = CheckpointStore(tmp_path / "run", read_only=True)
    assert kept <= {o.path.name for o in found.list()} and len({o.run_id for o in found.list()}) == 2
    assert found.latest().step == 14


@pytest.mark.shows("NEMO-36")
def test_a_damaged_folder_is_no_fresh_start(tmp_path):
    broken_off(tmp_path / "run", every=4)
    for o in (tmp_path / "run").glob("step-*/state.pt"):
        o.write_bytes(b"damaged")
    with pytest.raises(NoValidCheckpoint, match="state.pt"):
        fit(make_trainer(callbacks(tmp_path / "run")))


def only_weights(run):
    for o in [*run.glob("step-*/state.pt"), *run.glob("step-*/manifest.json")]:
        o.unlink()


def moved_away(run):
    (run / "old").mkdir()
    for o in run.glob("step-*"):
        o.rename(run / "old" / o.name)


def linked(run):
    for o in run.glob("step-*"):
        o.rename(run.parent / o.name)
        o.symlink_to(run.parent / o.name)


@pytest.mark.parametrize(
    "change, trace",
    [
        (only_weights, "step-00000004"),
        (moved_away, "old"),
        (linked, "is a link"),
        (lambda run: [shutil.rmtree(o) for o in run.glob("step-*")], "last.json"),
    ],
)
def test_what_is_left_of_a_run_is_no_fresh_start(change, trace, tmp_path, capsys):
    "A copy without all files began anew, and nobody was told"
    broken_off(tmp_path / "run", every=4)
    change(tmp_path / "run")
    with pytest.raises(NoValidCheckpoint, match=f"(?s)traces of a run.*{trace}.*resume='never'"):
        fit(make_trainer(callbacks(tmp_path / "run")))
    make_trainer(callbacks(tmp_path / "run", resume="never")).fit(1, 0.02)
    assert f"beginning anew in {tmp_path / 'run'}\n" in capsys.readouterr().out
    if change is moved_away:
        same(
            fit(make_trainer()),
            fit(make_trainer(callbacks(tmp_path / "new", resume=tmp_path / "run" / "old"))),
        )


def test_one_line_says_where_the_run_begins(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def told(folder, n_epochs=3, cut=(), **options):
        trainer = make_trainer(
            [BasicTrainCB(), MetricsCB(show=False), CheckpointCB(folder, every=4, **options)]
        )
        with suppress(Cut):
            trainer.fit(n_epochs, 0.02, callbacks=cut)
        return capsys.readouterr().out.splitlines()

    assert told("runs/a", cut=cut_at(11)) == ["beginning anew in runs/a"]
    assert told("runs/b", resume="runs/a/step-00000008") == [
        "continuing from runs/a/step-00000008 (epoch 1, batch 1)"
    ]
    assert told("runs/a") == ["continuing from step-00000008 (epoch 1, batch 1)"]
    assert [o.partition(":")[0] for o in told("runs/a")] == [
        "This fit is complete already (3 epochs are done)"
    ]
    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), CheckpointCB("runs/c")])
    for _ in range(2):
        trainer.fit(1, 0.02)
    now = "with the weights that the model has now"
    assert capsys.readouterr().out.splitlines() == [
        "beginning anew in runs/c",
        f"beginning anew in runs/c (fit 1 of this run, the first is 0), {now}",
    ]
    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), CheckpointCB("runs/d")])
    with pytest.raises(Cut):
        trainer.fit(1, 0.02, callbacks=cut_at(2))
    trainer.fit(1, 0.02)
    assert capsys.readouterr().out.splitlines() == [
        "beginning anew in runs/d",
        f"beginning anew in runs/d, {now} (the fit before broke off)",
    ]


def test_a_relative_folder_is_the_same_one_in_every_fit(tmp_path, monkeypatch):
    "Interrupted, gone elsewhere, and run again: it began at epoch 0"
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    trainer = make_trainer(callbacks("run", every=4))
    with pytest.raises(Cut):
        fit(trainer, callbacks=cut_at(11))
    monkeypatch.chdir(tmp_path / "there")
    fit(trainer)
    assert (
        list((tmp_path / "there").iterdir()) == []
        and CheckpointStore(tmp_path / "here" / "run", read_only=True).latest().step == 21
    )


def test_whose_checkpoint_goes_on_is_not_guessed(tmp_path):
    "One of another run with the same model, copied in with a higher number, was taken over"
    broken_off(tmp_path / "run", every=4)
    fit(make_trainer(callbacks(tmp_path / "other", every=1)), 1)
    ours, other = (CheckpointStore(tmp_path / o, read_only=True).latest() for o in ("run", "other"))
    shutil.copytree(other.path, tmp_path / "run" / "a better one")
    for resume in ("auto", "must", tmp_path / "run"):
        with pytest.raises(ResumeMismatch, match="(?s)2 runs") as caught:
            fit(make_trainer(callbacks(tmp_path / "run", every=4, resume=resume)))
        assert all(
            o in str(caught.value) for o in (ours.run_id, ours.path.name, other.run_id, "a better one")
        )
    same(fit(make_trainer()), fit(make_trainer(callbacks(tmp_path / "run", every=4, resume=ours.path))))


def test_what_was_saved_by_hand_beside_a_run_is_no_other_run(tmp_path):
    def trained(n_epochs, *cbs):
        return fit(make_trainer([BasicTrainCB(), MetricsCB(), *cbs]), n_epochs)

    trainer = trained(1, CheckpointCB(tmp_path / "run"))
    for _ in range(2):
        trainer.save(tmp_path / "run", accuracy=0.5)
    same(trained(2), trained(2, CheckpointCB(tmp_path / "run")))


@pytest.mark.shows("PTA-26")
def test_a_finished_run_is_not_run_again_and_gives_its_result(tmp_path, capsys):
    "Also the best weights are in the model"
    whole = fit(make_trainer(callbacks(tmp_path / "run")))
    again = make_trainer(callbacks(tmp_path / "run"))
    before = sorted(o.name for o in (tmp_path / "run").iterdir())
    again.fit(3, 0.02)
    assert "complete already (3 epochs are done)" in capsys.readouterr().out
    same(whole, again)
    assert sorted(o.name for o in (tmp_path / "run").iterdir()) == before


def test_more_epochs_than_before_go_on_and_fewer_do_not(tmp_path):
    fit(make_trainer([BasicTrainCB(), MetricsCB(), CheckpointCB(tmp_path / "run")]), 2)
    longer = fit(make_trainer([BasicTrainCB(), MetricsCB(), CheckpointCB(tmp_path / "run")]), 4)
    same(fit(make_trainer([BasicTrainCB(), MetricsCB()]), 4), longer)
    shorter = fit(make_trainer([BasicTrainCB(), MetricsCB(), CheckpointCB(tmp_path / "run")]), 3)
    same(longer, shorter)


def test_an_epoch_that_is_already_behind_is_not_saved_anew(tmp_path):
    "Cut in epoch 2, and then asked for two epochs only"
    broken_off(tmp_path / "run", n=17, every=4)
    before = sorted(o.name for o in (tmp_path / "run").iterdir())
    with pytest.warns(UserWarning, match="goes on with a schedule"):
        trainer = fit(make_trainer(callbacks(tmp_path / "run", every=4)), 2)
    assert trainer.n_updates == 16 and sorted(o.name for o in (tmp_path / "run").iterdir()) == before


def test_a_longer_schedule_says_what_follows(tmp_path):
    fit(make_trainer(callbacks(tmp_path / "run")), 2)
    with pytest.warns(UserWarning, match="saved in a fit of 14 steps, but this fit has 28"):
        fit(make_trainer(callbacks(tmp_path / "run")), 4)


class SeenCB:
    "Which rows were seen in which epoch"

    def __init__(self):
        self.rows = {}

    def after_batch(self, trainer):
        if trainer.training:
            self.rows.setdefault(trainer.epoch, []).extend(trainer.batch[0][:, 0].tolist())

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


@pytest.mark.parametrize("size", [4, 14, 16, 28, 40])
def test_another_batch_size_uses_every_sample_once(size, tmp_path):
    "16 samples of an epoch were used in batches of 8, and the rest comes in others; said to be inexact"

    def make(size, folder):
        rows = Rows(56, augment=False)
        return make_trainer(
            [BasicTrainCB(), MetricsCB(), SeenCB(), CheckpointCB(folder, every=1)],
            DataLoaders(exact_loader(rows, size)),
            optim.SGD,
        )

    with pytest.raises(Cut):
        fit(
            make(8, tmp_path / "run"),
            2,
            callbacks=CutCB("before_batch", lambda t: t.n_updates == 2),
            valid=False,
        )
    again = make(size, tmp_path / "run")
    with pytest.warns(UserWarning, match="not be the same bit for bit"):
        fit(again, 2, valid=False)
    everybody = sorted(Rows(56).x[:, 0].tolist())
    assert [sorted(o) for o in again.SeenCB.rows.values()] == [everybody, everybody]


def test_another_batch_size_between_two_epochs_is_told(tmp_path):
    def make(size):
        return make_trainer(
            [BasicTrainCB(), CheckpointCB(tmp_path / "run")],
            DataLoaders(exact_loader(Rows(56), size)),
            optim.SGD,
        )

    fit(make(8), 1, valid=False)
    with pytest.warns(UserWarning, match="`batch_size=8`, and the loader has `batch_size=14`"):
        fit(make(14), 2, valid=False)


def test_a_batch_size_that_ends_the_epoch_at_once_does_not_lose_the_next_one(tmp_path):
    "6 of 7 batches of 8 are done; with batches of 16 and `drop_last` nothing is left of this epoch"

    def make(size):
        return make_trainer(
            [BasicTrainCB(), MetricsCB(), SeenCB(), CheckpointCB(tmp_path / "run", every=1)],
            DataLoaders(exact_loader(Rows(56, False), size, drop_last=True)),
            optim.SGD,
        )

    with pytest.raises(Cut):
        fit(make(8), 2, callbacks=CutCB("before_batch", lambda t: t.n_updates == 6), valid=False)
    again = make(16)
    with pytest.warns(UserWarning, match="bit for bit"):
        fit(again, 2, valid=False)
    assert [len(o) for o in again.SeenCB.rows.values()] == [48, 48]


# ---- what no longer fits


@pytest.mark.shows("NEMO-29", "NEMO-36")
def test_what_would_give_a_wrong_result_is_refused_with_both_sides(tmp_path):
    "Strict by default, before the first batch, and nothing in the folder changes"
    broken_off(tmp_path / "run", every=4)

    def wider():
        return nn.Sequential(
            nn.Linear(8, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 3)
        )

    with pytest.raises(ResumeMismatch, match=r"`0.weight` was \(16, 8\), and is \(20, 8\)"):
        fit(make_trainer(callbacks(tmp_path / "run"), model=wider()))

    def halves(params, lr):
        return optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr)

    with pytest.raises(ResumeMismatch, match=r"groups had \[6\] parameters, and have \[2, 4\]"):
        fit(make_trainer(callbacks(tmp_path / "run"), opt_func=halves))
    with pytest.raises(StateOwnerMissing, match="EMACB"):
        fit(make_trainer([BasicTrainCB(), MetricsCB(), CheckpointCB(tmp_path / "run")]))
    with pytest.raises(StateOwnerMissing, match="SeenCB"):
        fit(make_trainer([*callbacks(tmp_path / "run"), SeenCB()]))
    relaxed = fit(make_trainer([*callbacks(tmp_path / "run", strict=False), SeenCB()]))
    assert relaxed.n_updates == 21
    with pytest.raises(ValueError, match="samples would be left out"):
        broken_off(tmp_path / "other", every=4)
        fit(make_trainer(callbacks(tmp_path / "other"), make_loaders(seed=8)))


def test_random_numbers_of_a_device_that_is_not_here_are_an_error_unless_told_otherwise(
    tmp_path, monkeypatch
):
    from isaac_loop.state import run_state

    real = run_state.plain_random_state
    monkeypatch.setattr(
        run_state, "plain_random_state", lambda: real() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 64}
    )
    broken_off(tmp_path / "run", every=4)
    with pytest.raises(ResumeMismatch, match="cuda"):
        fit(make_trainer(callbacks(tmp_path / "run")))
    fit(make_trainer(callbacks(tmp_path / "run", strict=False)))


@pytest.mark.shows("NEMO-25", "NEMO-26", "NEMO-30", "NEMO-32", "NEMO-37", "AIT-41", "NEMO-24")
def test_the_seeds_example_with_its_six_arguments(tmp_path):
    "Folder, how often, how many, another folder to load from, and insisting on it; the end is always saved"
    fit(make_trainer(callbacks(tmp_path / "run", every=4, keep_last=4)))
    assert [o.step for o in CheckpointStore(tmp_path / "run", read_only=True).list()] == [12, 16, 20, 21]
    found = CheckpointStore(tmp_path / "run", read_only=True).list()[0]
    same(
        fit(make_trainer()),
        fit(make_trainer(callbacks(tmp_path / "other", every="epoch", keep_last=2, resume=found.path))),
    )
    assert [o.step for o in CheckpointStore(tmp_path / "other", read_only=True).list()] == [14, 21]
    for every in (0, -1, 1.5, "batch", None, True):
        with pytest.raises(ValueError, match="`every` is"):
            CheckpointCB(tmp_path / "run", every=every)
    with pytest.raises(ValueError, match="`resume` is"):
        CheckpointCB(tmp_path / "run", resume="yes")
    with pytest.raises(ValueError, match="what is best"):
        CheckpointCB(tmp_path / "run", every="best")


@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.parametrize("loaders", [make_loaders, plain_loaders])
@pytest.mark.parametrize("every", [1, "epoch"])
def test_an_interrupt_after_a_request_to_stop_loses_nothing(at, loaders, every, tmp_path):
    "A time limit, then Ctrl-C in the validation: the next run validates and ends; so for a second fit"

    def after_batch(trainer):
        if trainer.training and trainer.epoch == 1 and trainer.batch_num == min(at, trainer.n_batches - 1):
            trainer.request_stop("enough")

    whole = fit(fit(make_trainer([*callbacks(), after_batch], loaders())), 1)
    cbs = lambda: [*callbacks(tmp_path / "run", every=every), InterruptCB()]
    first = make_trainer(cbs(), loaders())
    with pytest.raises(KeyboardInterrupt):
        fit(first, callbacks=[after_batch, MOMENTS["in validation"]])
    assert CheckpointStore(tmp_path / "run", read_only=True).latest().step == first.n_updates
    again = fit(make_trainer(cbs(), loaders()))  # Who has asked to stop need not be there any more
    assert again.stop_reason == "enough" and len(again.history) == 2
    same(whole, fit(again, 1))


# ---- other data, though as many


class Points:
    "Rows by number; `read` counts them"

    read = 0

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.read += 1
        return self.x[i], self.y[i]


def points(n=40, order=slice(None), seed=1):
    rows = Rows(n, False)
    return Points((rows.x + 0.01 * seed)[order], rows.y[order])


class Tokens(Points):
    "Only the labels are the same whenever they are read"

    def __getitem__(self, i):
        return self.x[i] + torch.randn(8) + random.random() + torch.randn((), generator=self.own), self.y[i]

    own = torch.Generator()


def hugging_face(order=range(40)):
    from datasets import Dataset

    rows = Rows(40, False)
    return (
        Dataset.from_dict({"x": rows.x.tolist(), "y": rows.y.tolist()})
        .select(order)
        .with_transform(lambda o: {"x": torch.tensor(o["x"]) + torch.randn(8), "y": o["y"]})
    )


def batches_of(dataset, **options):
    return DataLoader(
        dataset,
        **{
            "batch_size": 8,
            "collate_fn": lambda rows: tuple(
                torch.stack([torch.as_tensor(v) for v in o])
                for o in zip(*(tuple(r.values()) if isinstance(r, dict) else r for r in rows))
            ),
        }
        | options,
    )


BACK = list(reversed(range(40)))
OTHERS = {
    "reordered": (lambda: batches_of(points()), lambda: batches_of(points(order=BACK)), "other rows"),
    "two rows changed places": (
        lambda: batches_of(points(10)),
        lambda: batches_of(points(10, [0, 1, 5, 3, 4, 2, 6, 7, 8, 9])),
        "2 differ, the first of them row 2",
    ),
    "replaced": (lambda: batches_of(points()), lambda: batches_of(points(seed=2)), "other rows"),
    "longer": (lambda: batches_of(points()), lambda: batches_of(points(48)), "it had 40 rows, and has 48"),
    "augmented": (
        lambda: batches_of(Tokens(*vars(points()).values())),
        lambda: batches_of(Tokens(*vars(points(order=BACK)).values())),
        "other rows",
    ),
    "a subset": (
        lambda: batches_of(Subset(points(), range(32))),
        lambda: batches_of(Subset(points(), range(8, 40))),
        "other rows",
    ),
    "Hugging Face": (
        lambda: batches_of(hugging_face()),
        lambda: batches_of(hugging_face(BACK)),
        "other rows",
    ),
    "exact": (lambda: exact_loader(points(), 8), lambda: exact_loader(points(seed=2), 8), "other rows"),
    "a list": (lambda: list(batches_of(points())), lambda: list(batches_of(points()))[::-1], "other rows"),
    "batch size": (
        lambda: batches_of(points()),
        lambda: batches_of(points(), batch_size=9),
        "`batch_size` was 8, and is 9",
    ),
    "shuffled": (
        lambda: batches_of(points()),
        lambda: batches_of(points(), shuffle=True),
        "`sampler` was SequentialSampler",
    ),
    "its own fingerprint": (
        lambda: batches_of(own_print("a")),
        lambda: batches_of(own_print("b")),
        "`fingerprint` was 'a', and is 'b'",
    ),
}


def own_print(text):
    dataset = points()
    dataset.fingerprint = text
    return dataset


@pytest.mark.parametrize("what", OTHERS)
def test_other_data_are_refused_before_anything_is_put_back(what, tmp_path):
    "Between two epochs, where nothing but the rows tells; the same data, made anew, go on"
    make, other, words = OTHERS[what]

    def make_run(train, **options):
        return make_trainer(
            [BasicTrainCB(), MetricsCB(), CheckpointCB(tmp_path / "run", **options)],
            DataLoaders(train),
            optim.SGD,
        )

    fit(make_run(make()), 1, valid=False)
    again = make_run(other())
    before = tree(again.model.state_dict())
    with pytest.raises(ResumeMismatch, match=words):
        fit(again, 2, valid=False)
    assert tree(again.model.state_dict()) == before
    relaxed = make_run(other(), strict=False, resume=tmp_path / "run")
    relaxed.CheckpointCB.folder = tmp_path / "other"
    with pytest.warns(UserWarning, match=words):
        fit(relaxed, 2, valid=False)
    assert [o["epoch"] for o in fit(make_run(make()), 2, valid=False).history] == [0, 1]


def test_other_rows_for_validation_are_refused(tmp_path):
    def make_run(rows):
        return make_trainer(
            [BasicTrainCB(), MetricsCB(), CheckpointCB(tmp_path / "run")],
            DataLoaders(exact_loader(points(), 8), exact_loader(rows, 8, shuffle=False)),
        )

    fit(make_run(points(16)), 1)
    with pytest.raises(ResumeMismatch, match="`dls.valid`: it has other rows"):
        fit(make_run(points(16, seed=2)), 2)
    fit(make_run(points(16)), 2)


def test_another_order_in_the_middle_of_an_epoch_is_refused_even_if_it_need_not_be_strict(tmp_path):
    "The weights are still those of the script"

    def make_run(loader):
        return make_trainer(
            [BasicTrainCB(), MetricsCB(), CheckpointCB(tmp_path / "run", every=3, strict=False)],
            DataLoaders(loader),
            optim.SGD,
        )

    for first, then, words in [
        (exact_loader(points(), 8, seed=1), exact_loader(points(), 8, seed=2), "`seed` was 1, and is 2"),
        (batches_of(points()), batches_of(points(), batch_size=9), "`batch_size` was 8"),
    ]:
        with pytest.raises(Cut):
            fit(make_run(first), 1, valid=False, callbacks=CutCB("before_batch", lambda t: t.n_updates == 3))
        again = make_run(then)
        before = tree(again.model.state_dict())
        with pytest.raises(ResumeMismatch, match=words):
            fit(again, 1, valid=False)
        assert tree(again.model.state_dict()) == before
        shutil.rmtree(tmp_path / "run")


def test_a_look_at_the_data_is_no_part_of_the_run(tmp_path):
    "No row is counted as read, no generator moves, and no file is opened before workers start"

    class Lazy(Points):
        file, numbers = None, random.Random(1)

        def __getitem__(self, i):
            self.file = self.file or open(__file__)
            return super().__getitem__(i)[0] + self.numbers.random(), self.y[i]

    dataset = Lazy(*vars(points()).values())
    dataset.numbers = random.Random(1)
    seen = []

    def before_epoch(trainer):
        seen.append(
            (
                dataset.read,
                dataset.file,
                dataset.numbers.getstate() == random.Random(1).getstate(),
                torch.get_rng_state(),
                random.getstate(),
            )
        )

    for folder in (None, tmp_path / "run"):
        fit(
            make_trainer(
                [BasicTrainCB(), *([CheckpointCB(folder)] * bool(folder)), before_epoch],
                DataLoaders(batches_of(dataset)),
                optim.SGD,
            ),
            1,
            valid=False,
        )
        dataset.read, dataset.file, dataset.numbers = 0, None, random.Random(1)
    assert seen[0][:3] == seen[1][:3] == (0, None, True)
    assert torch.equal(seen[0][3], seen[1][3]) and seen[0][4] == seen[1][4]


def test_what_is_seldom_drawn_by_numbers_of_ones_own_is_no_other_row(tmp_path):
    "A flip comes up twice alike in one row, so it is taken for random only because it is not in others"

    class Flipped(Points):
        def __init__(self, *flips):
            self.flips, self.ticks, (self.x, self.y) = flips, count(), vars(points()).values()

        def __getitem__(self, i):
            return self.x[i] * self.flips[next(self.ticks) % 4], self.y[i]

    def make_run(*flips):
        return make_trainer(
            [BasicTrainCB(), CheckpointCB(tmp_path / "run")],
            DataLoaders(batches_of(Flipped(*flips))),
            optim.SGD,
        )

    fit(make_run(1, 1, 1, -1), 1, valid=False)
    fit(make_run(-1, -1, 1, -1), 2, valid=False)


def test_data_that_grow_in_the_course_of_a_fit_go_on_in_the_same_program(tmp_path):
    "What counts is what they were when the run began"
    batches = list(batches_of(points()))
    trainer = make_trainer([BasicTrainCB(), CheckpointCB(tmp_path / "run")], DataLoaders(batches), optim.SGD)
    with pytest.raises(Cut):
        fit(
            trainer,
            2,
            valid=False,
            callbacks=[
                CutCB("before_batch", lambda t: t.epoch == 1),
                type("GrowCB", (), {"after_epoch": lambda self, trainer: batches.append(batches[0])})(),
            ],
        )
    with pytest.raises(ResumeMismatch, match="had 5 rows, and has 6"):
        fit(
            make_trainer(
                [BasicTrainCB(), CheckpointCB(tmp_path / "run")], DataLoaders(list(batches)), optim.SGD
            ),
            2,
            valid=False,
        )
    assert fit(trainer, 2, valid=False).n_updates == 11


def test_data_that_nobody_can_compare_are_named_and_go_on(tmp_path, capsys):
    "A stream, and a run that was saved before there were fingerprints"

    def make_run(train):
        return make_trainer([BasicTrainCB(), CheckpointCB(tmp_path / "run")], DataLoaders(train), optim.SGD)

    make_run(exact_loader(Stream(Rows(40, False)), 8)).fit(1, valid=False)
    make_run(exact_loader(Stream(Rows(40, False)), 8)).fit(2, valid=False)
    assert "cannot be told: `dls.train` is a stream." in capsys.readouterr().out
    saved = make_run(exact_loader(points(), 8))
    weights, state = runs_state(saved)
    with CheckpointStore(tmp_path / "old") as store:
        path = store.save(weights, {k: v for k, v in state.items() if k not in ("data", "loss_func")}, 5)
    again = make_run(exact_loader(points(), 8))
    again.CheckpointCB.folder, again.CheckpointCB.resume = tmp_path / "new", str(path)
    again.fit(2, lr=0.02, valid=False)
    assert "`dls.train` had no fingerprint when it was saved" in capsys.readouterr().out


def runs_state(trainer):
    from isaac_loop.state.run_state import take_state

    trainer.remove_callbacks("CheckpointCB")
    fit(trainer, 1, valid=False)
    return take_state(trainer, 1)


def weighed(preds, targs, weight=0.5):
    return weight * F.cross_entropy(preds, targs)


@pytest.mark.parametrize(
    "first,then,words",
    [
        (F.cross_entropy, nn.CrossEntropyLoss(), "`cross_entropy.*` with `CrossEntropyLoss"),
        (weighed, partial(weighed, weight=2.0), "weight=2"),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), "label_smoothing=0.1"),
        (lambda p, t: 0.5 * weighed(p, t), lambda p, t: 0.25 * weighed(p, t), "lambda"),
    ],
)
def test_another_loss_is_told(first, then, words, tmp_path, recwarn):
    def make_run(loss_func):
        trainer = make_trainer(
            [BasicTrainCB(), CheckpointCB(tmp_path / "run", strict=False)],
            DataLoaders(exact_loader(points(), 8)),
            optim.SGD,
        )
        trainer.loss_func = loss_func
        return trainer

    fit(make_run(first), 1, valid=False)
    fit(make_run(first), 2, valid=False)
    assert not recwarn.list
    if isinstance(first, nn.Module) == isinstance(then, nn.Module):
        with pytest.warns(UserWarning, match="had the loss"):
            fit(make_run(then), 3, valid=False)
    else:
        with pytest.raises(ResumeMismatch, match="loss_func"):
            fit(make_run(then), 3, valid=False)


# ---- states of all kinds


class AverageCB:
    "Its state draws a random number, shares memory, and holds NumPy's numbers"

    def __init__(self):
        self.total, self.table = np.float32(0.1), torch.zeros(2, 3)

    def after_step(self, trainer):
        self.total = self.total * np.float32(1.1)
        self.row = self.table[1]
        self.row += trainer.loss.detach()
        with torch.no_grad():
            trainer.model[0].bias += float(self.total) * 1e-3 + 1e-3 * self.table.sum() * torch.rand(())

    def state_dict(self):
        return dict(
            total=self.total,
            table=self.table,
            row=getattr(self, "row", None),
            salt=random.random() + torch.rand(()).item(),
        )

    def load_state_dict(self, state):
        self.total, self.table, self.row = state["total"], state["table"], state["row"]


def test_a_state_that_draws_shares_memory_and_counts_in_numpy_goes_on(tmp_path):
    "Saving changes no random number; `float32` stays `float32`; a view stays a view"
    make = lambda: [BasicTrainCB(), AverageCB()]
    whole = fit(make_trainer(make(), plain_loaders()))
    same(
        whole,
        fit(
            make_trainer([*make(), CheckpointCB(tmp_path / "run", every=1, keep_last=None)], plain_loaders())
        ),
    )
    for o in CheckpointStore(tmp_path / "run", read_only=True).list()[1::4]:
        again = fit(
            make_trainer([*make(), CheckpointCB(tmp_path / f"from {o.step}", resume=o.path)], plain_loaders())
        )
        same(whole, again)
        assert type(again.AverageCB.total) is np.float32 and torch.equal(
            again.AverageCB.table, whole.AverageCB.table
        )


def test_a_state_that_could_not_come_back_is_refused_by_name(tmp_path):
    class HoldingCB:
        def after_step(self, trainer):
            self.weight, self.loss = trainer.model[0].weight, trainer.loss

        def load_state_dict(self, state):
            "Never"

    class WeightCB(HoldingCB):
        def state_dict(self):
            return dict(held=self.weight)

    class LossCB(HoldingCB):
        def state_dict(self):
            return dict(held=self.loss)

    for cb, words in (
        (
            WeightCB(),
            r"WeightCB.state_dict\(\)\['held'\] is the parameter `0.weight` of the model.*Leave it out",
        ),
        (LossCB(), r"LossCB.state_dict\(\)\['held'\] .* Save `x.detach\(\)`"),
    ):
        with pytest.raises(UnsaveableState, match=words):
            fit(make_trainer([BasicTrainCB(), cb, CheckpointCB(tmp_path / cb.__class__.__name__)]))


def test_a_state_dict_that_wants_an_argument_is_refused_before_the_first_batch(tmp_path):
    class WantingCB:
        def after_step(self, trainer):
            "Nothing"

        def state_dict(self, trainer):
            return {}

        def load_state_dict(self, state):
            "Nothing"

    trainer = make_trainer([BasicTrainCB(), WantingCB(), CheckpointCB(tmp_path / "run")])
    with pytest.raises(
        TypeError,
        match=r"`WantingCB.state_dict` cannot be called as `state_dict\(self\)`: "
        "missing a required argument: 'trainer'",
    ):
        fit(trainer)
    assert trainer.n_updates == 0


def test_early_stopping_goes_on_with_its_count(tmp_path):
    "Stopped and started again after each epoch, it stops in the same one"

    def log(trainer):
        trainer.history.write(spoilt=float(trainer.epoch))

    log.order = Order.RECORD
    make = lambda: [
        BasicTrainCB(),
        MetricsCB(show=False),
        log,
        EarlyStoppingCB("spoilt", patience=3, mode="min"),
    ]
    whole = fit(make_trainer(make()), 9)
    assert len(whole.history) == 4
    for epoch in (2, 3):
        with pytest.raises(Cut):
            fit(
                make_trainer(
                    [
                        *make(),
                        CheckpointCB(tmp_path / "run"),
                        CutCB("before_predict", lambda t: t.epoch == epoch),
                    ]
                ),
                9,
            )
    again = fit(make_trainer([*make(), CheckpointCB(tmp_path / "run")]), 9)
    assert (
        again.EarlyStoppingCB.state_dict() == whole.EarlyStoppingCB.state_dict()
        and again.stop_reason == whole.stop_reason
    )
    same(whole, again)
