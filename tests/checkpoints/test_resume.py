"""A run that was stopped anywhere and goes on, against the same run that was never stopped.

Everything is compared bit for bit: weights, optimizer, average, best weights, rows of the history and
losses of all batches.
"""

import random
import shutil
import warnings
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import optim
from torch.utils.data import DataLoader

from isaac_loop.data.mixtures import MixUpCB
from isaac_loop.train.averaging import EMACB, SWACB
from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.log.loggers import LoggerCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.show.progress import ProgressCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.schedule.attribute_schedule import AttributeSchedulerCB
from isaac_loop.schedule.plateau import PlateauSchedulerCB
from isaac_loop.schedule.schedules import OneCycleSchedulerCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.train.training import BasicTrainCB, MomentumTrainCB, NBatchCB
from isaac_loop.state.checkpoint_files import load_weights
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.trainer import Trainer
from isaac_loop.loop.events import Order
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.data.replay_loaders import ReplayLoader
from isaac_loop.state.errors import CheckpointFolderBusy, NoValidCheckpoint, ResumeMismatch, UnsaveableState
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
    same,
    tree,
)
from resumed import broken_off, cut_at, plain_loaders, SeenCB, Stream


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
        first = saving()

        def before_batch(trainer):
            first._writes.wait()  # Otherwise those after some batches are left out

        with pytest.raises(Cut):
            fit(make_trainer([*runs.everything(), first, cut, before_batch]), 2)
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


def lasting(n, batch_size, **options):
    "Plain, with a worker that stays for the next pass"
    return DataLoader(Rows(n, False), batch_size, num_workers=1, persistent_workers=True, **options)


def lasting_with_generator():
    generator = torch.Generator().manual_seed(3)
    return DataLoaders(lasting(40, 8, shuffle=True, generator=generator), lasting(24, 12))


LASTING = {
    "of validation": lambda: DataLoaders(exact_loader(Rows(40), 8, seed=1), lasting(24, 12)),
    "of both": lambda: DataLoaders(lasting(40, 8, shuffle=True), lasting(24, 12, shuffle=True)),
    "with a generator": lasting_with_generator,
}


@pytest.mark.filterwarnings("ignore:The training loader has persistent workers")
@pytest.mark.parametrize("make_dls", LASTING.values(), ids=LASTING)
def test_the_number_that_lasting_workers_begin_with_is_drawn_once_in_a_run(make_dls, tmp_path):
    "Saved at every batch, and gone on with from some places of each epoch, its ends too"
    whole = fit(make_trainer(dls=make_dls()))
    saving = CheckpointCB(tmp_path / "all", every=1, keep_last=None)
    same(whole, fit(make_trainer([*callbacks(), saving], make_dls())))
    found = CheckpointStore(tmp_path / "all", read_only=True).list()
    for o in [*found[1::3], found[9]]:
        again = CheckpointCB(tmp_path / f"from {o.step}", every=1000, resume=o.path)
        same(whole, fit(make_trainer([*callbacks(), again], make_dls())))


def test_lasting_workers_begin_again_if_the_run_goes_back_to_before_they_began(tmp_path):
    "The same trainer goes on after its power was lost in validation"
    whole = fit(make_trainer(dls=LASTING["of validation"]()))
    trainer = make_trainer(callbacks(tmp_path, every=3), LASTING["of validation"]())
    with pytest.raises(Cut):
        fit(trainer, callbacks=CutCB("after_predict", lambda t: not t.training))
    same(whole, fit(trainer))


def test_a_run_of_lasting_workers_may_be_cut_again_before_they_have_begun(tmp_path):
    whole = fit(make_trainer(dls=LASTING["of validation"]()))
    for n in (7, 8, 11):
        with pytest.raises(Cut):
            again = make_trainer(callbacks(tmp_path, every=1), LASTING["of validation"]())
            fit(again, callbacks=cut_at(n))
    same(whole, fit(make_trainer(callbacks(tmp_path, every=1), LASTING["of validation"]())))


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


def test_a_shorter_fit_says_that_its_curve_is_cut_off(tmp_path):
    "And nothing of steps after its end, which never come"
    broken_off(tmp_path / "run", n=9, every=4)
    with pytest.warns(
        UserWarning, match="this fit has 14.*`total_steps` of 21 steps, so it is cut off"
    ) as told:
        fit(make_trainer(callbacks(tmp_path / "run", every=4)), 2)
    assert not [o for o in told if "last rate" in str(o.message)]


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


class HalvesCB:
    "Holds a group of the optimizer, as it found it in the beginning"

    def before_fit(self, trainer):
        self.group = trainer.opt.param_groups[0]

    def after_step(self, trainer):
        self.group["lr"] *= 0.9


@pytest.mark.parametrize(
    "make", [HalvesCB, lambda: AttributeSchedulerCB({"opt.lr": lambda x: 0.1 * (1 - x)})]
)
def test_who_holds_a_group_of_the_optimizer_holds_it_still_when_the_run_goes_on(tmp_path, make):
    def cbs(*more):
        return [BasicTrainCB(), MetricsCB(show=False), RecorderCB(), make(), *more]

    whole = fit(make_trainer(cbs()))
    cut = CutCB("before_batch", lambda trainer: trainer.training and trainer.n_updates == 10)
    with pytest.raises(Cut):
        fit(make_trainer(cbs(CheckpointCB(tmp_path, every=1), cut)))
    resumed = fit(make_trainer(cbs(CheckpointCB(tmp_path, every=1))))
    same(whole, resumed)
    assert len(set(resumed.history.batches["lr"])) > 10


# ---- epochs that somebody else walks over, too


class EpochsCB:
    "Counts the epochs that it passes on, before and after each"

    def __init__(self, order):
        self.order, self.begun, self.over = order, 0, 0

    def before_fit(self, trainer):
        trainer.epochs = self.counted(trainer.epochs)

    def counted(self, epochs):
        for epoch in epochs:
            self.begun += 1
            yield epoch
            self.over += 1


class TellingEpochsCB(EpochsCB):
    def state_dict(self):
        return dict(begun=self.begun, over=self.over)

    def load_state_dict(self, state):
        self.begun, self.over = state["begun"], state["over"]


@pytest.mark.parametrize("n", [5, 8, 17, 20])
@pytest.mark.parametrize("order", [Order.DATA, Order.REPORT])
@pytest.mark.parametrize("kind", [EpochsCB, TellingEpochsCB])
def test_who_counts_the_epochs_counts_none_twice(tmp_path, kind, order, n):
    make = lambda: [BasicTrainCB(), kind(order)]
    broken_off(tmp_path, n, make)
    trainer = fit(make_trainer([*make(), CheckpointCB(tmp_path)]))
    counted = next(cb for cb in trainer.callbacks if isinstance(cb, EpochsCB))
    assert (counted.begun, counted.over) == (3, 3) and trainer.n_updates == 21


@pytest.mark.parametrize("dl", [range(5), list(range(5)), tuple(range(5))], ids=type)
def test_batches_that_are_there_are_read_again_without_a_word(dl, tmp_path):
    "A `range` is the loader of a loop that makes its own batches, and costs nothing to count through"

    class Noise(BasicTrainCB):
        def predict(self, trainer):
            trainer.preds = trainer.model(torch.randn(4, 1))

        def get_loss(self, trainer):
            trainer.loss = trainer.preds.square().mean()

    def run(*callbacks):
        torch.manual_seed(0)
        callbacks = [Noise(), *callbacks]
        return Trainer(DataLoaders(dl), None, optim.SGD, torch.nn.Linear(1, 1), callbacks)

    whole = fit(run(), 2, valid=False)
    with pytest.raises(Cut):
        fit(
            run(CutCB("before_step", lambda t: t.n_updates == 7), CheckpointCB(tmp_path, every=1)),
            2,
            valid=False,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = fit(run(CheckpointCB(tmp_path, every=1)), 2, valid=False)
    assert again.model.weight.equal(whole.model.weight)
