"""Faults that people found in checkpoints and resuming; each test fails without the mend that followed."""

import copy
import csv
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, MultiStepLR, StepLR
from torch.utils.data import DataLoader, IterableDataset

import isaac_loop.checkpoints.save_and_load  # noqa: F401  `trainer.load`
from isaac_loop.device.accelerated import AccelerateCB
from isaac_loop.train.averaging import EMACB
from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.stop.interrupts import InterruptCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.schedule.plateau import PlateauSchedulerCB, StepSchedulerCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.schedule.schedulers import BatchSchedulerCB, EpochSchedulerCB
from isaac_loop.schedule.schedules import OneCycleSchedulerCB, WarmupSchedulerCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.state.checkpoint_files import load_weights
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelFitException
from isaac_loop.loop.trainer import Trainer
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.state.errors import CheckpointCorrupt, NoValidCheckpoint, ResumeMismatch, StateOwnerMissing
from isaac_loop.state.store import CheckpointStore
from runs import Cut, CutCB, Rows, fit, make_loaders, make_model, make_trainer, same
from places import PATHS

pytestmark = pytest.mark.filterwarnings("ignore:The training loader does not know")


def simple(folder=None, *more, **options):
    return [BasicTrainCB(), MetricsCB(), *more] + ([CheckpointCB(folder, **options)] if folder else [])


def cut_at(n):
    return CutCB("before_step", lambda t: t.n_updates == n)


def broken_off(n, cbs, dls=None, **kwargs):
    trainer = make_trainer(cbs, dls, **kwargs)
    with pytest.raises(Cut):
        fit(trainer, callbacks=cut_at(n))
    return trainer


def steps(folder):
    return [o.step for o in CheckpointStore(folder, read_only=True).list()]


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return (self.rows[i] for i in range(len(self.rows)))


LOADERS = {
    "plain": lambda: DataLoader(Rows(40), 8, shuffle=True),
    "exact": lambda: exact_loader(Rows(40), 8),
    "stream": lambda: exact_loader(Stream(Rows(40)), 8),
}


@pytest.mark.parametrize(
    "first, then", [("plain", "exact"), ("exact", "plain"), ("exact", "stream"), ("stream", "exact")]
)
def test_another_kind_of_loader_is_refused_in_the_middle_of_an_epoch(first, then, tmp_path):
    "The rest of the epoch was left out in silence, or an error said nothing"
    dls = lambda kind: DataLoaders(LOADERS[kind](), DataLoader(Rows(24), 12))
    broken_off(3, simple(tmp_path / "run", every=1), dls(first))
    with pytest.raises(ResumeMismatch, match="`dls.train`: it was one that"):
        fit(make_trainer(simple(tmp_path / "run", every=1), dls(then)))


SCRIPT = """
import sys, time
sys.path[:0] = {paths}
import runs
from isaac_loop.stop.interrupts import InterruptCB
from torch.utils.data import DataLoader
from isaac_loop.data.dataloaders import DataLoaders
def after_batch(trainer):
    every_worker_is_at_work = trainer.epoch == 1 and trainer.batch_num >= 2
    if every_worker_is_at_work: print("here", file=sys.__stdout__, flush=True)
    time.sleep(0.02)
loaders = DataLoaders({loader}, DataLoader(runs.Rows(24), 12))
runs.fit(runs.make_trainer([*runs.callbacks({folder!r}), InterruptCB(), after_batch], loaders))
"""


@pytest.mark.parametrize(
    "loader",
    [
        "runs.exact_loader(runs.Rows(56), 8, seed=7, num_workers=2)",
        "DataLoader(runs.Rows(56), 8, num_workers=2)",
    ],
)
def test_sigterm_from_outside_to_all_processes_of_a_job(loader, tmp_path):
    "PyTorch's own handler ended the workers, and with them the run, with exit code 1 and nothing saved"
    job = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(paths=PATHS, loader=loader, folder=str(tmp_path / "run"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert job.stdout.readline().strip() == "here"
        os.killpg(job.pid, signal.SIGTERM)
        _, errors = job.communicate(timeout=60)
        assert job.returncode == 143, errors
        assert steps(tmp_path / "run")[-1] > 7
    finally:
        job.kill()


ORPHANS = """
import os, sys, time
sys.path[:0] = {paths}
import runs
class Slow(runs.Rows):
    def __getitem__(self, i):
        print(os.getpid(), flush=True)
        time.sleep(600)
next(iter(runs.exact_loader(Slow(8), 4, num_workers=1)))
"""


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_busy_worker_ends_with_a_parent_that_was_killed():
    "It went on for as long as it was busy, and some for ever"
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANS.format(paths=PATHS)], stdout=subprocess.PIPE, text=True
    )
    worker = int(parent.stdout.readline())
    assert lives(worker)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 60
    while lives(worker) and time.monotonic() < end:
        time.sleep(0.05)
    assert not lives(worker)


def test_a_fit_that_failed_before_its_first_checkpoint_does_not_count(tmp_path):
    "A script that was started again thought that its first fit was complete, and kept untrained weights"
    whole = fit(make_trainer(simple()))
    trainer = broken_off(2, simple(tmp_path / "run", every=4))
    for p in trainer.model.parameters():
        nn.init.zeros_(p)
    with pytest.raises(Cut):
        fit(trainer, callbacks=cut_at(6))
    assert steps(tmp_path / "run") == [2 + 4]
    again = fit(make_trainer(simple(tmp_path / "run", every=4)))
    assert again.n_updates == whole.n_updates and len(again.history) == 3


def test_an_interrupted_fit_that_went_on_in_another_is_one(tmp_path):
    "Stopped in a notebook, gone on with in the next fit, and then the kernel was started anew"
    whole = fit(make_trainer(simple()))
    first = make_trainer(simple(tmp_path / "run", InterruptCB()))
    with pytest.raises(KeyboardInterrupt):
        fit(first, callbacks=CutCB("before_step", lambda t: t.n_updates == 8, KeyboardInterrupt))
    with pytest.raises(Cut):
        fit(first, callbacks=cut_at(16))
    same(whole, fit(make_trainer(simple(tmp_path / "run", InterruptCB()))))


def test_a_fit_that_is_behind_leaves_the_weights_of_the_run_in_the_model(tmp_path, capsys):
    "After Run all, the model of a second fit was untrained, and the message said that all was there"
    trainer = fit(make_trainer(simple(tmp_path / "run")), 1)
    fit(trainer, 1)
    again = make_trainer(simple(tmp_path / "run"))
    again.fit(1, 0.02)
    assert (
        torch.equal(again.model[0].weight, trainer.model[0].weight)
        and "its weights are in the model" in capsys.readouterr().out
    )
    other = make_trainer(simple(tmp_path / "run"), model=nn.Sequential(nn.Linear(8, 3)))
    before = other.model[0].weight.clone()
    other.fit(1, 0.02)
    assert torch.equal(other.model[0].weight, before) and "with another model" in capsys.readouterr().out


def test_saving_by_hand_never_calls_a_fit_finished_that_is_not(tmp_path):
    trainer = broken_off(3, simple())
    trainer.save(tmp_path / "hand")
    with pytest.raises(ResumeMismatch, match="saved by hand after a fit that did not end"):
        fit(make_trainer(simple(tmp_path / "hand")))
    other = make_trainer(simple())
    other.load(tmp_path / "hand")
    assert torch.equal(other.model[0].weight, trainer.model[0].weight)

    def after_batch(trainer):
        trainer.save(tmp_path / "inside")

    with pytest.raises(RuntimeError, match="inside a fit"):
        fit(make_trainer(simple()), callbacks=after_batch)


def test_loading_in_the_middle_of_a_fit_is_refused(tmp_path):
    trainer = fit(make_trainer(simple()), 1)
    trainer.save(tmp_path / "hand")

    def after_batch(trainer):
        trainer.load(tmp_path / "hand")

    with pytest.raises(RuntimeError, match="Load between two fits"):
        fit(trainer, callbacks=after_batch)
    assert len(trainer.history) == 1


def test_a_name_with_a_column_does_not_stop_an_interrupt_from_saving(tmp_path):
    name = "e{epoch}-{valid_loss:.2f}"
    trainer = make_trainer(simple(tmp_path / "run", InterruptCB(), pattern=name))
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, callbacks=press_at(9))
    names = [o.path.name for o in CheckpointStore(tmp_path / "run", read_only=True).list()]
    assert names[0].startswith("e1-") and names[1] == "step-00000010"
    with pytest.raises(LookupError, match="valid_loss"):
        fit(make_trainer(simple(tmp_path / "other", pattern="{valid_los}")))


def press_at(n):
    def before_step(trainer):
        if trainer.n_updates == n:
            trainer.InterruptCB._note(signal.SIGINT)

    return before_step


def test_a_branch_leaves_the_run_alone_and_goes_on_by_itself(tmp_path):
    "Going on from a path deleted what came after it, and began at the path each time"
    fit(make_trainer(simple(tmp_path / "run", every=5, keep_last=None)))
    assert steps(tmp_path / "run") == [5, 10, 15, 20, 21]
    before = steps(tmp_path / "run")
    branch = lambda: simple(tmp_path / "run", every=5, resume=tmp_path / "run" / "step-00000010")
    broken_off(18, branch())
    found = CheckpointStore(tmp_path / "run", read_only=True).list()
    assert (
        [o.step for o in found][: len(before)] == before
        and found[-1].step == 15
        and found[-1].run_id != found[0].run_id
    )
    again = make_trainer(branch())
    seen = []

    def before_step(trainer):
        seen.append(trainer.n_updates)

    fit(again, callbacks=before_step)
    assert seen == [15, 16, 17, 18, 19, 20]
    same(fit(make_trainer(simple())), again)


def test_a_branch_knows_where_it_began_however_it_goes_on(tmp_path):
    "Later checkpoints forgot it, or named where the other run was by then; and a new run took it over"
    broken_off(8, simple(tmp_path / "a", every=5))
    options = dict(every=5, keep_last=None)

    def origins():
        return [
            o.manifest["info"].get("branch") for o in CheckpointStore(tmp_path / "b", read_only=True).list()
        ]

    broken_off(8, simple(tmp_path / "b", resume=tmp_path / "a", every=2, keep_last=None))
    began = origins()[-1]
    assert began and set(origins()) == {began}
    broken_off(14, simple(tmp_path / "a", every=5))
    broken_off(11, simple(tmp_path / "b", resume=tmp_path / "a", **options))
    assert set(origins()) == {began}
    broken_off(16, simple(tmp_path / "b", **options))
    assert set(origins()) == {began}
    callbacks = simple(tmp_path / "b", resume=tmp_path / "a", **options)
    fit(make_trainer(callbacks))
    assert set(origins()) == {began}
    (checkpoint,) = [cb for cb in callbacks if isinstance(cb, CheckpointCB)]
    checkpoint.resume = "never"
    fit(make_trainer(callbacks))
    assert origins()[-1] is None and origins()[0] == began


def test_the_last_epoch_is_safe_before_anything_else_happens(tmp_path):
    "A failing plot after training cost the last epoch"

    def after_fit(trainer):
        raise Cut

    with pytest.raises(Cut):
        fit(make_trainer(simple(tmp_path / "run")), callbacks=after_fit)
    assert steps(tmp_path / "run")[-1] == 21
    again = make_trainer(simple(tmp_path / "run"))
    same(fit(make_trainer(simple())), fit(again))


def test_the_best_epoch_is_kept_whatever_the_rule(tmp_path):
    scores = [0.3, 0.1, 0.2, 0.4, 0.6]

    def cleanup_epoch(trainer):
        if not trainer.training:
            trainer.history.write(m=scores[trainer.epoch])

    cleanup_epoch.columns = ["m"]
    for every in (4, timedelta(hours=1)):
        folder = tmp_path / str(every)
        fit(make_trainer(simple(folder, monitor="m", mode="min", every=every)), 5, callbacks=cleanup_epoch)
        store = CheckpointStore(folder, read_only=True)
        assert store.best().metrics["m"] == 0.1 and store.best().step == 14
        trainer = make_trainer(simple())
        trainer.load(folder, best=True)
        assert trainer.history.rows[-1]["m"] == 0.1
        one = make_trainer(simple())
        one.load(store.best().path)
        assert torch.equal(one.model[0].weight, trainer.model[0].weight)
    with pytest.raises(LookupError, match="Nobody has said what is best"):
        fit(make_trainer(simple(tmp_path / "none")))
        CheckpointStore(tmp_path / "none", read_only=True).best()


@pytest.mark.parametrize("every", [1, "epoch"])
def test_a_plain_loader_with_a_generator_of_its_own_goes_on_exactly(every, tmp_path):
    "After a resume it gave the order of the first epoch once more"

    def dls():
        return DataLoaders(
            DataLoader(Rows(40), 8, shuffle=True, generator=torch.Generator().manual_seed(3)),
            DataLoader(Rows(24), 12),
        )

    whole = fit(make_trainer(simple(), dls()))
    broken_off(8, simple(tmp_path / "run", every=every), dls())
    same(whole, fit(make_trainer(simple(tmp_path / "run", every=every), dls())))


def test_what_has_no_effect_is_said(tmp_path):
    broken_off(8, simple(tmp_path / "run", OneCycleSchedulerCB()), opt_func=optim.AdamW)
    with pytest.warns(UserWarning, match="`weight_decay=0.5` .saved: 0.01. has no effect"):
        fit(
            make_trainer(
                simple(tmp_path / "run", OneCycleSchedulerCB()),
                opt_func=partial(optim.AdamW, weight_decay=0.5),
            )
        )
    with pytest.warns(UserWarning, match="train at its last rate, which is close to 0"):
        fit(make_trainer(simple(tmp_path / "run", OneCycleSchedulerCB()), opt_func=optim.AdamW), 4)
    with pytest.raises(ResumeMismatch, match="`MetricsCB` measured"):
        import torchmetrics

        cbs = simple(tmp_path / "run", OneCycleSchedulerCB())
        cbs[1] = MetricsCB(accuracy=torchmetrics.Accuracy(task="multiclass", num_classes=3))
        fit(make_trainer(cbs, opt_func=optim.AdamW), 5)


def test_lazy_layers_go_on(tmp_path):
    def model():
        return nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(3))

    def lazy(*cbs):
        return make_trainer(simple(*cbs), model=model(), opt_func=optim.SGD)

    whole = fit(lazy())
    with pytest.raises(Cut):
        fit(lazy(tmp_path / "run"), callbacks=cut_at(9))
    same(whole, fit(lazy(tmp_path / "run")))


def test_what_was_not_written_by_a_run_is_named(tmp_path):
    with CheckpointStore(tmp_path / "run") as store:
        store.save(make_model().state_dict(), {"mine": 1}, step=3)
    with pytest.raises(ResumeMismatch, match="holds no run"):
        fit(make_trainer(simple(tmp_path / "run")))


@pytest.mark.parametrize(
    "options, error",
    [
        (dict(verify="md5"), ValueError),
        (dict(every=timedelta(-1)), ValueError),
        (dict(keep_best=1.5), TypeError),
        (dict(keep_last=1), ValueError),
        (dict(keep_best=3), ValueError),
    ],
)
def test_bad_options_are_refused_where_they_were_typed(options, error, tmp_path):
    with pytest.raises(error):
        CheckpointCB(tmp_path / "run", **options)


@pytest.mark.parametrize("store", [False, True])
def test_none_switches_off_what_the_message_says_it_does(store, tmp_path):
    "The comparison with None was a bare TypeError"
    make = (
        (lambda **o: CheckpointStore(tmp_path / "run", monitor="loss", **o))
        if store
        else (lambda **o: CheckpointCB(tmp_path / "run", monitor="loss", **o))
    )
    make(keep_best=None, keep_last=None)
    for bad in (-1, True, 1.5):
        with pytest.raises((ValueError, TypeError), match="counted"):
            make(keep_best=bad)


def test_without_a_best_one_only_the_newest_stay(tmp_path):
    with CheckpointStore(tmp_path, monitor="loss", keep_best=None) as store:
        for step in (1, 2, 3, 4):
            store.save({}, step=step, metrics={"loss": step})
        assert [o.step for o in store.list()] == [3, 4]


def test_counts_may_come_from_numpy(tmp_path):
    "A period that was computed by numpy was refused"
    fit(
        make_trainer(simple(tmp_path / "run", every=np.int64(5), keep_last=np.int32(3), keep_best=np.int8(0)))
    )
    assert steps(tmp_path / "run") == [15, 20, 21]


def test_never_means_never(tmp_path):
    trainer = broken_off(8, simple(tmp_path / "run", resume="never"))
    fit(trainer)
    assert trainer.n_updates == 21 and len([o for o in trainer.history if o["fit"] == 1]) == 3


def test_a_folder_stands_for_its_newest_checkpoint(tmp_path):
    "Started again, the branch goes on from its own checkpoints, even if the other run has gone on"
    broken_off(8, simple(tmp_path / "a", every=5))

    def run(n=None):
        seen = []

        def before_step(trainer):
            seen.append(trainer.n_updates)
            if n is not None and trainer.n_updates == n:
                raise Cut

        trainer = make_trainer(simple(tmp_path / "b", every=2, resume=tmp_path / "a"))
        try:
            fit(trainer, callbacks=before_step)
        except Cut:
            pass
        return trainer, seen

    assert run(13)[1][0] == steps(tmp_path / "a")[-1] == 5
    broken_off(18, simple(tmp_path / "a", every=5))
    again, seen = run()
    assert seen[0] == 12 and steps(tmp_path / "a")[-1] == 15
    same(fit(make_trainer(simple())), again)
    trainer = make_trainer(simple())
    weights = CheckpointStore(tmp_path / "a", read_only=True).latest().path
    for resume in (tmp_path / "a", tmp_path / "a" / weights.name):
        loaded = CheckpointStore(tmp_path / "c", read_only=True).load(resume)[2]
        assert loaded["step"] == 15
    trainer.load(tmp_path / "a")
    with pytest.raises(NoValidCheckpoint, match="no such folder"):
        CheckpointStore(tmp_path / "c", read_only=True).load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointCorrupt, match="no `manifest.json`"):
        CheckpointStore(tmp_path / "c", read_only=True).load(tmp_path / "empty")


def test_the_own_folder_as_resume_goes_on_there(tmp_path):
    broken_off(8, simple(tmp_path / "a", every=5))
    again = make_trainer(simple(tmp_path / "a", every=5, resume=tmp_path / "a"))
    seen = []

    def before_step(trainer):
        seen.append(trainer.n_updates)

    same(fit(make_trainer(simple())), fit(again, callbacks=before_step))
    assert (
        seen[0] == 5 and len({o.run_id for o in CheckpointStore(tmp_path / "a", read_only=True).all()}) == 1
    )


def test_a_damaged_newest_of_another_folder_is_skipped_with_a_warning(tmp_path):
    fit(make_trainer(simple(tmp_path / "a", every=5)))
    newest = CheckpointStore(tmp_path / "a", read_only=True).latest()
    (newest.path / "state.pt").write_bytes(b"x")
    with pytest.warns(UserWarning, match=f"Skipped the checkpoint `{newest.path.name}`"):
        assert (
            CheckpointStore(tmp_path / "c", read_only=True).load(tmp_path / "a")[2]["step"]
            == steps(tmp_path / "a")[-1]
            < newest.step
        )


# --- Found by the next who attacked it


def updates_of(*fits, folder):
    "Updates in each of several fits of one trainer"
    trainer, found = make_trainer(simple(folder)), []
    for kwargs in fits:
        fit(trainer, **kwargs)
        found.append(trainer.n_updates)
    return found


@pytest.mark.parametrize(
    "idle",
    [
        dict(n_epochs=1, train=False),
        dict(n_epochs=1, callbacks=CutCB("before_step", lambda t: True, CancelFitException)),
    ],
    ids=["validation", "cancelled"],
)
def test_a_fit_without_an_update_is_a_fit_like_any_other(idle, tmp_path):
    "The one after it was taken for complete, and trained nothing"
    assert updates_of(dict(n_epochs=1), idle, dict(n_epochs=2), folder=tmp_path / "run") == [7, 0, 14]


WAYS = {
    "in place": lambda p: p.data.sub_(0.1),
    "by a function": lambda p: nn.utils.vector_to_parameters(p.detach().flatten() - 0.1, [p]),
    "anew": lambda p: setattr(p, "data", p.detach() - 0.1),
}


@pytest.mark.parametrize("way", [*WAYS, None])
def test_weights_that_nobody_trains_are_told_of_however_others_are_trained(way, tmp_path):
    "Nobody counts what is written to `.data`"

    def after_batch(trainer):
        if way:
            WAYS[way](trainer.model[-1].bias)

    trainer = make_trainer([CheckpointCB(tmp_path), after_batch])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(trainer, 1, valid=False)
    assert any("nothing has written to the weights" in str(o.message) for o in found) == (way is None)


def test_a_fit_that_is_left_before_it_has_begun_saves_nothing(tmp_path):
    class FirstCB:
        order = -200

        def before_fit(self, trainer):
            if trainer.history.fit == 1:
                raise CancelFitException("not now")

    trainer = make_trainer(simple(tmp_path / "run", FirstCB()))
    assert [fit(trainer, 1).n_updates for _ in range(3)] == [7, 0, 7] and steps(tmp_path / "run") == [7, 14]


def test_two_validations_before_the_first_training_are_no_obstacle(tmp_path):
    assert updates_of(
        dict(n_epochs=1, train=False),
        dict(n_epochs=1, train=False),
        dict(n_epochs=1),
        folder=tmp_path / "run",
    ) == [0, 0, 7]


def with_generator(n):
    "A plain loader that draws its order from a generator of its own"
    return DataLoaders(
        DataLoader(Rows(n, augment=False), 8, shuffle=True, generator=torch.Generator().manual_seed(3)),
        DataLoader(Rows(24, augment=False), 12),
    )


@pytest.mark.parametrize("n", [24, 29])
@pytest.mark.parametrize("place", ["before_batch", "after_batch"])
def test_a_plain_loader_with_a_generator_goes_on_exactly_after_a_stop_in_validation(n, place, tmp_path):
    "A sampler draws once more after the last batch; that was left out, and the next epoch had another order"
    whole = fit(make_trainer(simple(), with_generator(n)))
    trainer = make_trainer(simple(tmp_path / "run", every=1), with_generator(n))
    with pytest.raises(Cut):
        fit(trainer, callbacks=CutCB(place, lambda t: t.epoch == 1 and not t.training))
    same(whole, fit(make_trainer(simple(tmp_path / "run", every=1), with_generator(n))))


def test_a_complete_run_leaves_the_model_in_the_mode_that_it_had(tmp_path):
    "It was left training, so predictions changed from call to call"
    for valid in (True, False):
        folder = tmp_path / str(valid)
        assert [fit(make_trainer(simple(folder)), 1, valid=valid).model.training for _ in range(2)] == [
            not valid
        ] * 2


class Counting(optim.SGD):
    "An optimizer with a counter and a sum in more digits than the weights"

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", torch.zeros((), dtype=torch.int64)) + 1
                state["total"] = (
                    state.get("total", torch.zeros_like(p, dtype=torch.float64)) + p.detach().double() / 3
                )


def test_the_state_of_an_optimizer_keeps_its_types(tmp_path):
    "PyTorch makes everything floating of the weights' type when it loads"

    def trainer(folder=None):
        return make_trainer(simple(folder, every=1), opt_func=Counting)

    whole = fit(trainer())
    with pytest.raises(Cut):
        fit(trainer(tmp_path / "run"), callbacks=cut_at(9))
    again = fit(trainer(tmp_path / "run"))
    for mine, theirs in zip(again.opt.state.values(), whole.opt.state.values()):
        for name in ("count", "total"):
            assert mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name])


class WrongLen:
    "A loader that says it has six batches, and has ten"

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(batches_of(10))


def batches_of(n):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(n)
    ]


def test_a_loader_that_has_more_than_its_len_loses_nothing(tmp_path):
    dls = lambda: DataLoaders(WrongLen(), DataLoader(Rows(24), 12))
    with pytest.raises(Cut):
        fit(make_trainer(simple(tmp_path / "run", every=1), dls()), 2, callbacks=cut_at(6))
    assert fit(make_trainer(simple(tmp_path / "run", every=1), dls()), 2).n_updates == 20


def test_a_copy_of_a_store_does_not_take_the_folder_away(tmp_path):
    "The copy closed the file that holds the lock, and the next save said the folder had been deleted"

    def log(trainer):
        copy.deepcopy(trainer.CheckpointCB)

    trainer = fit(make_trainer(simple(tmp_path / "run", every=1)), callbacks=log)
    copy.deepcopy(trainer)
    assert len(steps(tmp_path / "run")) == 2


def test_states_are_kept_in_every_fit_and_again_after_going_back():
    trainer = make_trainer(simple(None, RewindCB(every=5)))
    fit(trainer, 2)
    assert sorted(trainer.RewindCB.states) == [(0, 5), (1, 3)]
    trainer.rewind(to=(0, 5))
    fit(trainer, 2)
    assert sorted(trainer.RewindCB.states) == [(0, 5), (1, 3)]


def test_going_back_says_what_has_no_effect_and_refuses_what_would_not_fit():
    trainer = make_trainer(simple(None, RewindCB()))
    fit(trainer, 2)
    trainer.rewind(to=1)
    with pytest.warns(UserWarning, match=r"`lr=0.5` \(saved: 0.02\) has no effect"):
        fit(trainer, 2, lr=0.5)
    trainer.rewind(to=1)
    with pytest.raises(StateOwnerMissing, match="OneCycleSchedulerCB"):
        fit(trainer, 2, callbacks=OneCycleSchedulerCB())
    trainer.rewind(to=1)
    trainer.opt_func = optim.SGD
    with pytest.raises(ResumeMismatch, match="its class was `AdamW`, and is `SGD`"):
        fit(trainer, 2)


class Unready:
    "A callback whose state cannot be taken"

    def before_fit(self, trainer): ...
    def state_dict(self):
        raise OSError("the disk of the state is gone")

    def load_state_dict(self, state): ...


def test_an_error_while_saving_names_who_saved_and_whose_state_it_was(tmp_path):
    with pytest.raises(OSError) as e:
        fit(make_trainer(simple(tmp_path / "run", Unready(), every=1)))
    notes = " ".join(e.value.__notes__)
    assert "`CheckpointCB`" in notes and "`Unready.state_dict`" in notes and "its loader" not in notes


@pytest.mark.parametrize("first, then", [(True, False), (False, True)])
def test_a_compiled_model_and_a_plain_one_have_the_same_names(first, then, tmp_path):
    def trainer(compiled):
        model = make_model()
        return make_trainer(
            simple(tmp_path / "run", every=1),
            model=torch.compile(model, backend="eager") if compiled else model,
        )

    with pytest.raises(Cut):
        fit(trainer(first), callbacks=cut_at(9))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fit(trainer(then)).n_updates == 21
    assert "0.weight" in load_weights(CheckpointStore(tmp_path / "run", read_only=True).latest().path)


def test_more_epochs_than_then_go_on_with_a_run_that_stopped_itself(tmp_path):
    "The message advised to ask for more epochs, and that changed nothing"
    trainer = lambda patience: make_trainer(
        simple(tmp_path / "run", EarlyStoppingCB(patience=patience, min_delta=9.0))
    )
    stopped = fit(trainer(1), 4)
    assert len(stopped.history) == 2 and "not improved" in stopped.stop_reason
    again = fit(trainer(1), 4)
    assert len(again.history) == 2 and again.stop_reason == stopped.stop_reason
    assert len(fit(trainer(9), 6).history) == 6


def test_loading_says_that_the_numbers_are_those_of_an_average(tmp_path):
    fit(make_trainer(simple(tmp_path / "run", EMACB(0.5), monitor="valid_loss")), 2)
    with pytest.warns(UserWarning, match="measured with the average of weights in `EMACB`"):
        make_trainer(simple()).load(tmp_path / "run", best=True)


def watching(cb):
    return [BasicTrainCB(), MetricsCB(), cb]


@pytest.mark.parametrize(
    "first, then",
    [
        (
            lambda: BatchSchedulerCB(partial(ExponentialLR, gamma=0.9)),
            lambda: BatchSchedulerCB(partial(StepLR, step_size=2)),
        ),
        (lambda: StepSchedulerCB(2), lambda: StepSchedulerCB([2, 3])),
        (lambda: KeepBestCB("valid_loss"), lambda: KeepBestCB("train_loss", mode="max")),
        (lambda: KeepBestCB("valid_loss"), lambda: KeepBestCB("valid_loss", mode="max")),
        (lambda: PlateauSchedulerCB("valid_loss"), lambda: PlateauSchedulerCB("train_loss")),
        (lambda: PlateauSchedulerCB("valid_loss"), lambda: PlateauSchedulerCB("valid_loss", mode="max")),
    ],
)
def test_the_state_of_another_schedule_or_column_is_refused(first, then, tmp_path):
    "The two were mixed in silence"
    with pytest.raises(Cut):
        fit(make_trainer([*watching(first()), CheckpointCB(tmp_path, every=1)]), callbacks=cut_at(9))
    with pytest.raises(ResumeMismatch, match="was saved|saved the state"):
        fit(make_trainer([*watching(then()), CheckpointCB(tmp_path, every=1)]))
    fit(make_trainer([*watching(first()), CheckpointCB(tmp_path, every=1)]))


@pytest.mark.parametrize(
    "schedule, warned",
    [
        (lambda: StepSchedulerCB(2), False),
        (lambda: StepSchedulerCB([1, 2]), False),
        (lambda: EpochSchedulerCB(partial(ExponentialLR, gamma=0.9)), False),
        (lambda: EpochSchedulerCB(partial(MultiStepLR, milestones=[1])), False),
        (lambda: BatchSchedulerCB(partial(CosineAnnealingLR, T_max=14)), "rise again"),
        (lambda: OneCycleSchedulerCB(), "ends after 14 steps"),
        (lambda: WarmupSchedulerCB(), "follows the new length"),
        (
            lambda: BatchSchedulerCB(lambda opt, trainer: CosineAnnealingLR(opt, trainer.total_updates)),
            "keeps its `T_max`",
        ),
    ],
)
def test_more_epochs_are_a_warning_only_for_a_schedule_that_has_the_length_in_it(schedule, warned, tmp_path):
    fit(make_trainer([*watching(schedule()), CheckpointCB(tmp_path)]), 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        fit(make_trainer([*watching(schedule()), CheckpointCB(tmp_path)]), 4)
    told = [str(o.message) for o in told if "torch.jit" not in str(o.message)]
    assert len(told) == bool(warned) and all(
        warned in o and ("goes on with" in o) == (warned != "rise again") for o in told
    )


def test_the_best_of_a_column_without_a_value_is_told_of_also_in_a_run_that_goes_on(tmp_path):
    class NothingCB:
        columns = ["score"]

        def after_epoch(self, trainer):
            trainer.history.write(score=1.0 if self.value and trainer.epoch == 0 else None)

    def make(value):
        nothing = NothingCB()
        nothing.value = value
        return make_trainer(
            [*watching(KeepBestCB("score", "max")), nothing, CheckpointCB(tmp_path / str(value), every=1)]
        )

    for value in (False, True):
        with pytest.raises(Cut):
            fit(make(value), callbacks=cut_at(9))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", UserWarning)
            fit(make(value))
        assert ["`KeepBestCB` watched `score`, which had no value" in str(o.message) for o in told] == (
            [] if value else [True]
        )


def tables_of(path):
    "All rows that a `TrackingCB` has written, by table, seconds apart"
    if path.suffix == ".db":
        with closing(sqlite3.connect(path)) as db:
            db.row_factory = sqlite3.Row
            found = {
                name: [dict(o) for o in db.execute(f"select * from {name}")]
                for name in ("fit_stats", "epoch_stats", "batch_stats", "fit_ends")
            }
    elif path.suffix == ".jsonl":
        rows = [json.loads(o) for o in path.read_text().splitlines()]
        found = {
            name: [o for o in rows if o["table"] == name]
            for name in ("fit_stats", "epoch_stats", "batch_stats", "fit_ends")
        }
    else:
        found = {
            name: [
                o
                for file in sorted(path.glob(f"*/{name}.csv"))
                for o in csv.DictReader(file.open(newline=""))
            ]
            for name in ("fit_stats", "epoch_stats", "batch_stats", "fit_ends")
        }
    return {
        name: [
            {
                k: v
                for k, v in o.items()
                if v not in (None, "")
                and k not in ("elapsed", "started", "ended", "seconds", "table", "model_source", "callbacks")
                and not k.startswith("CheckpointCB")
            }
            for o in rows
        ]
        for name, rows in found.items()
    }


@pytest.mark.parametrize("name", ["log.db", "log.jsonl", "log"])
@pytest.mark.parametrize("n", [3, 10, 14])
def test_a_tracked_run_that_was_cut_is_one_run_without_repetitions(name, n, tmp_path):
    "It was a second run, which repeated the rows of the first; other runs and an earlier fit keep theirs"

    def run(path, *more):
        return make_trainer(
            simple(tmp_path / "store", TrackingCB(path / name), *more, every=2, keep_last=None)
        )

    fit(fit(make_trainer(simple(None, TrackingCB(tmp_path / "whole" / name))), 1))
    fit(make_trainer(simple(None, TrackingCB(tmp_path / name))), 2)
    beside = tables_of(tmp_path / name)
    first = fit(run(tmp_path), 1)
    with pytest.raises(Cut):
        fit(first, callbacks=cut_at(n))
    with pytest.raises(Cut):
        fit(fit(run(tmp_path), 1), callbacks=cut_at(n + 2))  # And once more
    again = fit(fit(run(tmp_path), 1))
    found = tables_of(tmp_path / name)
    expected = tables_of(tmp_path / "whole" / name)
    mine = again.TrackingCB.run
    assert mine == first.TrackingCB.run and {o["run"] for o in found["batch_stats"]} == {
        mine,
        beside["fit_stats"][0]["run"],
    }
    for table, rows in expected.items():
        ours = [{k: v for k, v in o.items() if k != "run"} for o in found[table] if o["run"] == mine]
        assert len(ours) == len(rows) and [o for o in found[table] if o["run"] != mine] == beside[table]
        if table.endswith("_stats") and table != "fit_stats":
            assert ours == [{k: v for k, v in o.items() if k != "run"} for o in rows]
    assert [o["outcome"] for o in found["fit_ends"] if o["run"] == mine] == ["finished", "finished"]


@pytest.mark.parametrize("name", ["log.db", "log.jsonl", "log"])
def test_a_branch_of_a_tracked_run_that_is_complete_leaves_it_alone(name, tmp_path):
    run = lambda store, **options: make_trainer(
        simple(tmp_path / store, TrackingCB(tmp_path / name), every=5, keep_last=None, **options)
    )
    first = fit(run("a"))
    before = tables_of(tmp_path / name)
    branch = fit(run("b", resume=tmp_path / "a" / "step-00000010"))
    found = tables_of(tmp_path / name)
    for table, rows in before.items():
        assert [
            {k: v for k, v in o.items() if k in rows[0]}
            for o in found[table]
            if o["run"] == first.TrackingCB.run
        ] == rows
        assert len([o for o in found[table] if o["run"] == branch.TrackingCB.run]) == len(rows)
    assert [o["resumed"] for o in found["fit_ends"] if o["run"] == branch.TrackingCB.run] == [
        first.TrackingCB.run
    ]


@pytest.mark.parametrize("name", ["log.db", "log.jsonl", "log"])
@pytest.mark.parametrize("n_fits", [1, 2])
def test_a_tracked_run_that_is_complete_is_not_written_again_when_it_is_started(name, n_fits, tmp_path):
    "Each start added the whole run once more, under another id"

    def run():
        trainer = make_trainer(simple(tmp_path / "store", TrackingCB(tmp_path / name)))
        for _ in range(n_fits):
            fit(trainer, 2)
        return trainer

    fit(make_trainer(simple(None, TrackingCB(tmp_path / name))), 1)  # Another run in the same place
    whole = run()
    before = tables_of(tmp_path / name)
    assert [len(o) for o in before.values()] == [1 + n_fits, 1 + 2 * n_fits, 9 + 18 * n_fits, 1 + n_fits]
    for _ in range(2):
        again = run()
        assert tables_of(tmp_path / name) == before
        assert [len(o) for o in again.TrackingCB.frames()] == [len(o) for o in whole.TrackingCB.frames()]
    fit(again, 1)
    found, mine = tables_of(tmp_path / name), again.TrackingCB.run
    for table, rows in before.items():
        assert [o for o in found[table] if o["run"] != mine] == rows
        n = {"epoch_stats": 2 * n_fits + 1, "batch_stats": 18 * n_fits + 9}.get(table, n_fits + 1)
        ours = [o for o in found[table] if o["run"] == mine]
        assert len(ours) == n and [int(o["fit"]) for o in ours] == sorted(int(o["fit"]) for o in ours)
    (resumed,) = {o["resumed"] for o in found["fit_ends"] if o["run"] == mine and int(o["fit"]) == n_fits}
    assert resumed == whole.TrackingCB.run


def test_loading_the_best_says_why_there_is_none(tmp_path):
    "It was an AttributeError about None, and asked for a parameter that did not exist"
    trainer = make_trainer(simple())
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(NoValidCheckpoint, match="Is it the right folder?"):
            trainer.load(folder, best=True)
        with pytest.raises(NoValidCheckpoint, match="Is it the right folder?"):
            trainer.load(folder, best=True, monitor="loss")
    fit(trainer, 1)
    path = trainer.save(tmp_path / "run", accuracy=0.9, loss=float("nan"))
    with pytest.raises(NoValidCheckpoint, match="is one checkpoint"):
        trainer.load(path, best=True)
    with pytest.raises(LookupError, match="Pass `monitor`"):
        trainer.load(tmp_path / "run", best=True)
    with pytest.raises(ValueError, match="Say `mode='max'`"):
        trainer.load(tmp_path / "run", best=True, monitor="accuracy")
    with pytest.raises(ValueError, match="Use 'min' or 'max'"):
        trainer.load(tmp_path / "run", best=True, monitor="accuracy", mode="auto")
    with pytest.raises(NoValidCheckpoint, match="has a finite `loss`, so none is the best"):
        trainer.load(tmp_path / "run", best=True, monitor="loss")
    with pytest.raises(NoValidCheckpoint, match="Did you mean `accuracy`"):
        trainer.load(tmp_path / "run", best=True, monitor="accurcy", mode="max")
    with CheckpointStore(tmp_path / "monitored") as store:
        store.save({}, metrics={"m": float("nan")}, info={"monitor": "m", "mode": "min"})
    with pytest.raises(NoValidCheckpoint, match="has a finite `m`, so none"):
        trainer.load(tmp_path / "monitored", best=True)
    for wrong in (dict(monitor="loss"), dict(mode="min"), dict(best=True, mode="min")):
        with pytest.raises(ValueError, match="or leave it out"):
            trainer.load(tmp_path / "run", **wrong)


@pytest.mark.parametrize("mode, best", [("max", 0.9), ("min", 0.7)])
def test_the_best_of_what_was_saved_by_hand_can_be_loaded(mode, best, tmp_path):
    trainer, kept = make_trainer(simple()), {}
    for score in (0.7, 0.9, 0.9, float("nan"), 0.8):
        fit(trainer, 1)
        trainer.save(tmp_path, score=score)
        kept.setdefault(score, trainer.model[0].weight.detach().clone())
    again = make_trainer(simple())
    again.load(tmp_path, best=True, monitor="score", mode=mode)
    assert torch.equal(again.model[0].weight, kept[best])


@pytest.mark.parametrize(
    "loaders",
    [
        make_loaders,
        lambda: DataLoaders(
            DataLoader(Rows(56, augment=False), 8, shuffle=True), DataLoader(Rows(24, augment=False), 12)
        ),
    ],
    ids=["exact", "plain"],
)
def test_a_run_with_accelerate_goes_on_in_the_middle_of_an_epoch(loaders, tmp_path):
    "Its loaders say that they know their position, and do not: the first save failed"
    pytest.importorskip("accelerate")

    def run(*more):
        return make_trainer([BasicTrainCB(), MetricsCB(), AccelerateCB("no", cpu=True), *more], loaders())

    whole = fit(make_trainer([BasicTrainCB(), MetricsCB()], loaders()), 2)
    with pytest.raises(Cut):
        fit(
            run(CheckpointCB(tmp_path / "run", every=2), CutCB("before_step", lambda t: t.n_updates == 11)), 2
        )
    same(whole, fit(run(CheckpointCB(tmp_path / "run", every=2)), 2))


def test_the_scale_of_the_loss_in_fp16_with_accelerate_is_kept():
    first, then = AccelerateCB(), AccelerateCB()
    first.accelerator, then.accelerator = (
        SimpleNamespace(scaler=torch.amp.GradScaler("cpu", init_scale=o)) for o in (8.0, 2.0)
    )
    then.load_state_dict(first.state_dict())
    assert then.accelerator.scaler.state_dict()["scale"] == 8.0 and AccelerateCB().state_dict() == {}


def test_a_checkpoint_without_a_run_is_not_loaded_into_a_trainer(tmp_path):
    "It was a KeyError about `opts`"
    with CheckpointStore(tmp_path) as store:
        for state in (None, {"opts": 1}, {"mine": 1}):
            path = store.save({"w": torch.ones(2)}, state)
            for place in (tmp_path, path):
                with pytest.raises(ResumeMismatch, match="holds no run that"):
                    make_trainer(simple()).load(place)


CHANGES = {
    "['position']['fit'] is missing": lambda o: o["position"].pop("fit"),
    "['position']['epoch'] is 'two'": lambda o: o["position"].update(epoch="two"),
    "['history']['rows'] is missing": lambda o: o["history"].pop("rows"),
    "['history'] is missing": lambda o: o.pop("history"),
    "['position'] is None": lambda o: o.update(position=None),
    "['opts']['opt'] is 3": lambda o: o["opts"].update(opt=3),
    "['pass_start']['generators'] is missing": lambda o: o["pass_start"].pop("generators"),
    "['random']['torch'] is missing": lambda o: o["random"].pop("torch"),
}


@pytest.mark.parametrize("line", CHANGES)
def test_a_state_without_a_part_is_named_before_anything_is_put_back(line, tmp_path):
    "It was a KeyError about `fit`, with half of the run put back"
    broken_off(8, simple(tmp_path / "run", every=5))
    weights, state, _ = CheckpointStore(tmp_path / "run", read_only=True).load()
    CHANGES[line](state)
    with CheckpointStore(tmp_path / "changed") as store:
        store.save(weights, state)
    for go_on in (lambda o: fit(o), lambda o: o.load(tmp_path / "changed")):
        trainer = make_trainer(simple(tmp_path / "changed"))
        before = trainer.model[0].weight.clone()
        with pytest.raises(CheckpointCorrupt) as caught:
            go_on(trainer)
        assert f"- state{line}" in str(caught.value) and torch.equal(trainer.model[0].weight, before)


def test_a_file_is_no_run(tmp_path):
    "The message was about a folder without checkpoints"
    trainer = fit(make_trainer(simple(tmp_path / "run")), 1)
    for name in ("model.safetensors", "manifest.json"):
        with pytest.raises(NoValidCheckpoint, match="is a file.*load_weights"):
            trainer.load(trainer.CheckpointCB.path / name)


# ---- batches that are made for one pass


class MoreRowsCB:
    "Trains on more rows in every epoch, with a loader of its own for each"

    on_valid = False

    def before_epoch(self, trainer):
        trainer.dl = exact_loader(Rows(24 * (trainer.epoch + 1)), 8, seed=trainer.epoch)


def goes_on_from_each(make, cuts, tmp_path):
    "A run that is cut after some updates goes on as if it had not been"
    whole = fit(make())
    for n in cuts:
        first, second = make(), make()
        for o in (first, second):
            o.add_callbacks(CheckpointCB(tmp_path / f"{n}", every=1))
        with pytest.raises(Cut):
            fit(first, callbacks=CutCB("before_predict", lambda t: t.training and t.n_updates == n))
        same(whole, fit(second))


def test_a_loader_that_is_set_for_a_pass_goes_on_where_it_stood(tmp_path):
    "The new loader was at its beginning, which was read as the end of the pass: its rest was lost"
    goes_on_from_each(
        lambda: make_trainer([BasicTrainCB(), MetricsCB(), MoreRowsCB()]), (1, 3, 4, 8, 9, 14), tmp_path
    )


class OrderCB:
    "Batches in an order drawn at random"

    on_valid = False

    def before_epoch(self, trainer):
        batches = list(trainer.batches)
        trainer.batches = [batches[i] for i in torch.randperm(len(batches))]


class LevelCB:
    "More batches with every epoch"

    def __init__(self):
        self.level = 0

    def before_epoch(self, trainer):
        if trainer.training:
            self.level += 1
            trainer.batches = self.choose(trainer.batches)

    def choose(self, batches):
        return list(batches)[: 2 * self.level]


class LimitedCB(LevelCB):
    def choose(self, batches):
        return range(2 * self.level)


class LazyCB(LevelCB):
    "Made when the pass is under way, from what is left of the level"

    def choose(self, batches):
        for batch in batches:
            self.level += 0.25
            yield from (batch,) * round(self.level)


class ToldLevelCB(LevelCB):
    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]


class ByUpdatesCB(LevelCB):
    def before_epoch(self, trainer):
        if trainer.training:
            losses = trainer.history.column("train_loss") if trainer.history else [3]
            trainer.batches = list(trainer.batches)[: 2 + trainer.n_updates // 2 + int(10 * losses[-1]) % 3]


class OwnTrainer(Trainer):
    rounds = 0

    def before_epoch(self):
        if self.training:
            self.rounds += 1
            self.batches = list(self.batches)[self.rounds :]


class NewRowsCB:
    "A loader over some rows drawn at random"

    on_valid = False

    def before_epoch(self, trainer):
        rows = Rows(56, augment=False)
        trainer.dl = exact_loader([rows[i] for i in torch.randperm(56)[:24]], 8, seed=trainer.epoch)


MAKERS = OrderCB, LevelCB, LimitedCB, LazyCB, ToldLevelCB, ByUpdatesCB, NewRowsCB


def fixed(n, size):
    return list(DataLoader(Rows(n, augment=False), size))


LISTS = lambda: DataLoaders(fixed(40, 8), fixed(24, 12))
SHUFFLED = lambda: DataLoaders(DataLoader(Rows(40, augment=False), 8, shuffle=True), fixed(24, 12))


@pytest.mark.parametrize("loaders", [LISTS, SHUFFLED, make_loaders])
@pytest.mark.parametrize("cls", MAKERS)
def test_batches_that_before_epoch_makes_are_made_again(cls, loaders, tmp_path):
    "It ran with fresh attributes, other random numbers, and loaders at their beginning"
    goes_on_from_each(
        lambda: make_trainer([BasicTrainCB(), MetricsCB(), cls()], loaders()), (1, 3, 7), tmp_path
    )


def test_batches_that_a_trainer_makes_itself_are_made_again(tmp_path):
    def make():
        torch.manual_seed(1)
        dls = LISTS()
        return OwnTrainer(dls, nn.functional.cross_entropy, optim.Adam, make_model(), [BasicTrainCB()])

    goes_on_from_each(make, (1, 5, 8), tmp_path)


@pytest.mark.parametrize("cls", MAKERS)
def test_a_rewind_makes_batches_again_too(cls, tmp_path):
    "Also with a checkpoint around it, from which another run goes on afterwards"
    make = lambda *more: make_trainer([BasicTrainCB(), MetricsCB(), cls(), *more], LISTS())
    whole = fit(make())
    again = fit(make(RewindCB(every=1, keep=100), CheckpointCB(tmp_path, every=1, keep_last=None)))
    same(whole, again)
    for n in (5, 3):
        place = [o for o in again.RewindCB.states if o[1]][n]
        again.rewind(place)
        fit(again)
        assert all(map(torch.equal, whole.model.parameters(), again.model.parameters()))


class HardestCB:
    "The hardest rows first, by the weights that the model has when the epoch begins"

    def choose(self, trainer):
        rows = Rows(40, augment=False)
        losses = nn.functional.cross_entropy(trainer.model(rows.x), rows.y, reduction="none")
        return [(rows.x[i], rows.y[i]) for i in losses.argsort(descending=True).split(8)]

    def before_epoch(self, trainer):
        if trainer.training:
            trainer.batches = self.choose(trainer)


class HardestInGeneratorCB(HardestCB):
    def choose(self, trainer):
        yield from HardestCB.choose(self, trainer)


class HardestLoaderCB(HardestCB):
    def before_epoch(self, trainer):
        if trainer.training:
            rows = [row for batch in self.choose(trainer) for row in zip(*batch)]
            trainer.dl = exact_loader(rows, 8, shuffle=False)


class HardestKeptCB(HardestCB):
    def before_fit(self, trainer):
        self.chosen = HardestCB.choose(self, trainer)

    def choose(self, trainer):
        return self.chosen

    log = before_fit


@pytest.mark.parametrize("cls", [HardestCB, HardestInGeneratorCB, HardestLoaderCB])
def test_batches_that_cannot_be_made_again_are_refused(cls, tmp_path):
    "They were others without a word"
    make = lambda **options: make_trainer(
        [BasicTrainCB(), cls(), CheckpointCB(tmp_path / "run", every=1, **options)], LISTS()
    )
    with pytest.raises(Cut):
        fit(make(), callbacks=CutCB("before_predict", lambda t: t.training and t.n_updates == 8))
    with pytest.raises(ResumeMismatch, match=f"Batch 2 of epoch 1 .*`{cls.__name__}`.*`log`"):
        fit(make())
    with pytest.warns(UserWarning, match="Batch 2 of epoch 1"):
        fit(make(strict=False))


def test_hardest_rows_that_were_chosen_in_log_are_kept(tmp_path):
    goes_on_from_each(
        lambda: make_trainer([BasicTrainCB(), MetricsCB(), HardestKeptCB()], LISTS()), (2, 7, 13), tmp_path
    )


class ChangedInPlaceCB(OrderCB):
    "Adds noise to the batch where it lies, and takes another entry in it"

    def before_epoch(self, trainer):
        trainer.batches = ([x.clone(), y] for x, y in list(trainer.batches))

    def before_batch(self, trainer):
        if trainer.training:
            trainer.batch[0].add_(torch.randn(8))


def test_a_batch_that_was_changed_where_it_lies_is_not_taken_for_another(tmp_path):
    make = lambda: make_trainer([BasicTrainCB(), MetricsCB(), ChangedInPlaceCB()], LISTS())
    goes_on_from_each(make, (3, 8), tmp_path)


class CountsEpochsCB:
    "Holds much, and makes no batches"

    def before_epoch(self, trainer):
        self.much = torch.randn(10_000)


def test_what_batches_are_made_from_is_saved_only_with_batches_that_were_made(tmp_path):
    def saved(*cbs):
        trainer = make_trainer(
            [BasicTrainCB(), *cbs, InterruptCB(), CheckpointCB(tmp_path / f"{len(cbs)}", every=1)]
        )
        with pytest.raises(Cut):
            fit(trainer, callbacks=CutCB("before_predict", lambda t: t.n_updates == 9))
        return CheckpointStore(trainer.CheckpointCB.folder, read_only=True).load()[1]["pass_start"]

    assert not {"before", "last"} & saved(CountsEpochsCB()).keys()
    made = saved(CountsEpochsCB(), OrderCB())
    assert made["last"] and set(made["before"]["own"]) <= {"CountsEpochsCB", "OrderCB", ""}


class SomeCB:
    "Only the first batches of each pass, and each louder than the one before"

    def before_epoch(self, trainer):
        if trainer.training:
            trainer.batches = self.some(itertools.islice(trainer.batches, 4))

    def some(self, batches):
        for i, batch in enumerate(batches):
            batch[0].mul_(1 + i / 10)
            yield batch  # The loader's own, as if nobody had counted


@pytest.mark.parametrize("n", [2, 4, 5, 9])
def test_wrappers_that_count_go_on_over_a_loader_that_knows_its_place(n, tmp_path):
    make = lambda *cbs: make_trainer([BasicTrainCB(), SomeCB(), InterruptCB(), *cbs])
    whole = fit(make())
    with pytest.raises(Cut):
        fit(
            make(CheckpointCB(tmp_path, every=1)),
            callbacks=CutCB("before_predict", lambda t: t.n_updates == n),
        )
    again = fit(make(CheckpointCB(tmp_path, every=1)))
    assert again.n_updates == whole.n_updates == 12
    same(whole, again)


def test_a_checkpoint_without_what_batches_were_made_from_goes_on(tmp_path):
    "As earlier versions have written it"
    make = lambda folder: make_trainer([BasicTrainCB(), OrderCB(), CheckpointCB(folder, every=1)], LISTS())
    with pytest.raises(Cut):
        fit(make(tmp_path / "run"), callbacks=CutCB("before_predict", lambda t: t.n_updates == 3))
    weights, state, _ = CheckpointStore(tmp_path / "run", read_only=True).load()
    for name in ("before", "last"):
        state["pass_start"].pop(name)
    with CheckpointStore(tmp_path / "old") as store:
        store.save(weights, state)
    assert fit(make(tmp_path / "old")).n_updates == 15


class SecondCB:
    "A batch of other rows beside each batch"

    order = -5

    def __init__(self):
        self.other = exact_loader(Rows(56, augment=False), 8, seed=3)

    def before_epoch(self, trainer):
        if trainer.training:
            trainer.batches = self.pairs(trainer.batches)

    def pairs(self, batches):
        for (x, y), (u, v) in zip(batches, self.other):
            yield torch.cat([x, u]), torch.cat([y, v])


class SecondAtOnceCB(SecondCB):
    def pairs(self, batches):
        return ((torch.cat([x, u]), torch.cat([y, v])) for (x, y), (u, v) in zip(batches, self.other))


class SecondAnewCB(SecondCB):
    def before_epoch(self, trainer):
        self.other = exact_loader(Rows(56, augment=False), 8, seed=3 + trainer.epoch // 2)
        SecondCB.before_epoch(self, trainer)


class SecondInTurnCB:
    "Another loader in every second epoch, which goes on where it stood"

    on_valid = False

    def __init__(self):
        self.other = exact_loader(Rows(40, augment=False), 8, seed=3)

    def before_epoch(self, trainer):
        if trainer.epoch % 2 == 0:
            trainer.dl = self.other


@pytest.mark.parametrize("loaders", [LISTS, SHUFFLED, make_loaders])
@pytest.mark.parametrize("cls", [SecondCB, SecondAtOnceCB, SecondAnewCB, SecondInTurnCB])
def test_a_loader_that_a_callback_holds_goes_on(cls, loaders, tmp_path):
    "It was at its first epoch again, also where a plain loader went on exactly"
    make = lambda: make_trainer([BasicTrainCB(), MetricsCB(), cls()], loaders())
    goes_on_from_each(make, (3, 8, 13), tmp_path)


def test_a_loader_that_a_callback_holds_goes_on_between_two_epochs(tmp_path):
    make = lambda *more: make_trainer([BasicTrainCB(), MetricsCB(), SecondCB(), *more])
    whole = fit(make())
    with pytest.raises(Cut):
        fit(make(CheckpointCB(tmp_path)), callbacks=CutCB("before_predict", lambda t: t.epoch == 2))
    same(whole, fit(make(CheckpointCB(tmp_path))))
