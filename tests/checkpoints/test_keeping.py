"""Callbacks that keep weights or states, against what they should have kept.

Laws over all callbacks of the library with a state, several fits in one script, failures of the disk,
rewinding, averages and best weights.
"""

import copy
import gc
import io
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import isaac_loop.all as library
from isaac_loop.evaluate import one_evaluation
from isaac_loop.train.averaging import EMACB, SWACB
from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.device.precision import MixedPrecisionCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.stop.interrupts import InterruptCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.schedule.plateau import PlateauSchedulerCB, StepSchedulerCB
from isaac_loop.schedule.schedulers import BatchSchedulerCB, EpochSchedulerCB
from isaac_loop.schedule.schedules import OneCycleSchedulerCB, WarmupSchedulerCB, WSDSchedulerCB
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import EVENTS, CancelFitException, CancelStepException
from isaac_loop.state.run_state import take_state
from isaac_loop.state.told_states import stateful_callbacks
from isaac_loop.state.errors import CheckpointWriteFailed, UnsaveableState
from isaac_loop.state.plain_state import plain
from isaac_loop.state.store import CheckpointStore
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer
from runs import (
    Cut,
    CutCB,
    Rows,
    callbacks,
    differences,
    fit,
    make_loaders,
    make_model,
    make_trainer,
    result,
    same,
    tree,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The training loader does not know", "ignore:Reading", "ignore:The loss was more than"
)


# ---- every callback with a state

STATEFUL = {
    "MetricsCB": lambda: MetricsCB(train_metrics=True, mean=Mean()),
    "RecorderCB": RecorderCB,
    "TrackingCB": TrackingCB,
    "KeepBestCB": KeepBestCB,
    "EMACB": lambda: EMACB(0.8),
    "SWACB": lambda: SWACB(0.2),
    "OneCycleSchedulerCB": OneCycleSchedulerCB,
    "BatchSchedulerCB": lambda: BatchSchedulerCB(lambda opt: optim.lr_scheduler.ExponentialLR(opt, 0.9)),
    "EpochSchedulerCB": lambda: EpochSchedulerCB(lambda opt: optim.lr_scheduler.ExponentialLR(opt, 0.9)),
    "WarmupSchedulerCB": WarmupSchedulerCB,
    "WSDSchedulerCB": WSDSchedulerCB,
    "StepSchedulerCB": lambda: StepSchedulerCB(1),
    "PlateauSchedulerCB": lambda: PlateauSchedulerCB(patience=0),
    "AccumulationCB": lambda: library.AccumulationCB(2),
    "ClipGradCB": lambda: library.ClipGradCB(max_norm=0.1),
    "MixedPrecisionCB": lambda: library.MixedPrecisionCB("float16"),
    "EarlyStoppingCB": lambda: library.EarlyStoppingCB(patience=1),
    "LimitCB": lambda: library.LimitCB(updates=9, samples=10**6),
    "LossSpikeCB": lambda: library.LossSpikeCB(1.05, start_batch=1, stop=False),
    "EvaluatorCB": lambda: library.EvaluatorCB("valid", updates=3, epochs=2, at_start=True),
    "LoggerCB": lambda: library.LoggerCB(lambda values, step: None, every=3),
    "NonFiniteCB": lambda: library.NonFiniteCB(every=3),
    "NonFiniteStopCB": lambda: library.NonFiniteStopCB(every=3),
    "SamePredictionsCB": lambda: library.SamePredictionsCB(stop=False),
    "GradientStatsCB": lambda: library.GradientStatsCB(),
}
OTHERWISE = {
    "AttributeSchedulerCB",  # Needs an attribute to change, see its own tests
    "GradientPlotCB",  # The same state as `GradientStatsCB`, and pictures
    "AccelerateCB",  # The scale of float16, on a GPU
}
STATELESS = {  # They must need none
    "BasicTrainCB": None,
    "MomentumTrainCB": None,
    "NBatchCB": lambda: library.NBatchCB(6),
    "FreezeCB": lambda: library.FreezeCB("0", until=2),
    "BatchNormEvalCB": library.BatchNormEvalCB,
    "DeviceCB": lambda: library.DeviceCB("cpu"),
    "CompileCB": lambda: library.CompileCB(backend="eager"),
    "DistributedCB": library.DistributedCB,  # In one process, which has nothing to put together
    "ProgressCB": lambda: library.ProgressCB("plain"),
    "LivePlotCB": None,
    "CapturePredsCB": library.CapturePredsCB,
    "DerivedColumnsCB": lambda: library.DerivedColumnsCB(double=lambda row: 2 * row["train_loss"]),
    "RenameColumnsCB": lambda: library.RenameColumnsCB(train_loss="training"),
    "PrintColumnsCB": lambda: library.PrintColumnsCB("train_loss"),
    "EpochTimeCB": library.EpochTimeCB,
    "BatchTransformCB": lambda: library.BatchTransformCB(
        lambda batch: (batch[0] + torch.randn(()), batch[1])
    ),
    "MixUpCB": library.MixUpCB,
    "ReportCB": lambda: library.ReportCB(
        accuracy=lambda preds, targets: (preds.argmax(1) == targets).float().mean()
    ),
    "ActivationStatsCB": library.ActivationStatsCB,
    "BlackBoxCB": lambda: library.BlackBoxCB(4),
    "TimesCB": library.TimesCB,
    "UpdateRatioCB": library.UpdateRatioCB,
    "RewindCB": library.RewindCB,
    "DropoutOnCB": library.DropoutOnCB,
    "BatchAugmentationCB": None,
    "CutMixCB": None,
    "ProgressiveResizeCB": None,
    "PredictionsCSVCB": None,
    "TextComparisonCB": None,  # For images and text; a pass of their own
    "OneBatchCB": None,
    "LRFinderCB": None,
    "ProfilerCB": None,
    "InterruptCB": None,
    "CheckpointCB": None,
    "ExperimentCB": None,
    "UploadCB": None,
    "NotifyCB": None,
    "ExportCB": None,
    "HistoryFilesCB": None,
}


class Mean:
    "A metric of one's own"

    def __init__(self):
        self.total, self.n = torch.zeros(()), 0

    def update(self, preds, targets):
        self.total += preds.sum()
        self.n += len(preds)

    def compute(self):
        return self.total / self.n

    def reset(self):
        self.total.zero_()
        self.n = 0


def test_no_callback_with_a_state_was_forgotten():
    found = {
        name
        for name, o in vars(library).items()
        if isinstance(o, type)
        and name.endswith("CB")
        and hasattr(o, "state_dict")
        and hasattr(o, "load_state_dict")
    }
    assert found - OTHERWISE == set(STATEFUL)
    everybody = {name for name, o in vars(library).items() if isinstance(o, type) and name.endswith("CB")}
    assert everybody - found == set(STATELESS)


def with_one(name):
    return [BasicTrainCB(), *([] if name == "MetricsCB" else [MetricsCB()]), (STATEFUL | STATELESS)[name]()]


@pytest.mark.parametrize("name", [name for name, make in STATELESS.items() if make])
def test_what_has_no_state_needs_none(name, tmp_path, monkeypatch):
    "A run that was cut in the middle of a pass is one that was not, so what a pass gathers has to be saved"
    whole = fit(make_trainer(with_one(name)))
    with pytest.raises(Cut):
        fit(
            make_trainer([*with_one(name), CheckpointCB(tmp_path / "run", every=1)]),
            callbacks=CutCB("after_backward", lambda t: t.n_updates == 10),
        )
    again = fit(make_trainer([*with_one(name), CheckpointCB(tmp_path / "run", every=1)]))
    same(*(without_times(result(o)) for o in (whole, again)))


def without_times(found):
    return found | {
        "rows": [{k: v for k, v in row.items() if not k.endswith("time")} for row in found["rows"]]
    }


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("n", [4, 6])
def test_a_state_goes_through_a_file_and_back_in_the_middle_of_a_run(name, n, tmp_path, monkeypatch):
    "Saved at any batch, read by the safe reader, saved again the same; and the run ends as if never stopped"
    monkeypatch.setattr(one_evaluation, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    whole, states = fit(make_trainer(with_one(name))), []

    def keep(trainer):
        states.append(
            plain({k: o.state_dict() for k, o in stateful_callbacks(trainer).items() if k != "TrackingCB"})
        )

    class NoteCB(CheckpointCB):
        name = "CheckpointCB"

        def _save(self, trainer, *args, **kwargs):
            keep(trainer)
            super()._save(trainer, *args, **kwargs)

    with pytest.raises(Cut):
        fit(
            make_trainer([*with_one(name), NoteCB(tmp_path / "run", every=1)]),
            callbacks=CutCB("after_backward", lambda t: t.n_updates == n + 1),
        )
    file = io.BytesIO()
    torch.save(states[-1], file)
    file.seek(0)
    assert without_seconds(torch.load(file, weights_only=True)) == without_seconds(states[-1])

    def before_predict(trainer):
        if trainer.training and trainer.n_updates == n + 1 and len(states) < 99:
            loaded.append(
                plain(
                    {k: o.state_dict() for k, o in stateful_callbacks(trainer).items() if k != "TrackingCB"}
                )
            )

    loaded = []
    again = fit(
        make_trainer([*with_one(name), CheckpointCB(tmp_path / "run", every=1)]), callbacks=before_predict
    )
    if (n + 1) % 7:
        assert without_seconds(loaded[0]) == without_seconds(states[-1])
    same(whole, again)


def without_seconds(states):
    return tree(
        {
            k: {a: b for a, b in o.items() if a not in ("elapsed", "seconds", "epoch_seconds")}
            for k, o in states.items()
        }
    )


def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path):
    "The path to the value is named"

    class OddCB:
        def after_batch(self, trainer):
            pass

        def state_dict(self):
            return {"where": [tmp_path]}

        def load_state_dict(self, state):
            pass

    with pytest.raises(
        UnsaveableState, match=r"OddCB.state_dict\(\)\['where'\]\[0\] is a pathlib.Path; use str"
    ):
        fit(make_trainer([*callbacks(tmp_path / "run"), OddCB()]))

    class HalfCB:
        def after_batch(self, trainer):
            pass

        def state_dict(self):
            return {}

    with pytest.raises(TypeError, match="only one of"):
        fit(make_trainer([*callbacks(tmp_path / "run"), HalfCB()]))


# ---- several fits, cancels, stops


def script(folder=None, cut=None):
    "A new head first, and then everything, with another optimizer and another callback"
    trainer = make_trainer(
        [BasicTrainCB(), MetricsCB(), *([CheckpointCB(folder, every=2)] if folder else [])]
    )
    if cut is not None:
        trainer.add_callback(CutCB("after_backward", lambda t: (t.history.fit, t.n_updates) == cut))
    trainer.model[0].requires_grad_(False)
    fit(trainer, 1)
    assert len(trainer.history) >= 1
    trainer.model[0].requires_grad_(True)
    trainer.opt_func = optim.SGD
    return fit(trainer, 2, callbacks=OneCycleSchedulerCB(cycle_momentum=False))


@pytest.mark.parametrize("cut", [(0, 1), (0, 4), (1, 0), (1, 5), (1, 9)])
def test_two_fits_in_one_script(cut, tmp_path):
    "Killed in either; the first is not trained again when the second has begun"
    for _ in range(2):
        with pytest.raises(Cut):
            script(tmp_path / "run", cut)
    same(script(), script(tmp_path / "run"))
    steps = [o.step for o in CheckpointStore(tmp_path / "run", read_only=True).list()]
    assert steps[-1] == 21 and steps == sorted(set(steps))


@pytest.mark.parametrize("way", ["stop", "cancel"])
def test_a_run_that_ended_early_by_itself_is_complete(way, tmp_path, capsys):
    def before_step(trainer):
        if trainer.n_updates == 9:
            if way == "stop":
                trainer.request_stop("good enough")
            else:
                raise CancelFitException("good enough")

    first = fit(make_trainer(callbacks(tmp_path / "run")), callbacks=before_step)
    again = make_trainer(callbacks(tmp_path / "run"))
    again.fit(3, 0.02, callbacks=before_step)
    assert "complete already" in capsys.readouterr().out
    same(first, again)


# ---- the disk


def test_a_save_that_fails_is_an_error_and_training_can_go_on(tmp_path, monkeypatch):
    "Deleted folder, full disk; what was saved before is whole, and the trainer still trains"

    def before_batch(trainer):
        if trainer.epoch == 1:
            shutil.rmtree(tmp_path / "run", ignore_errors=True)

    trainer = make_trainer([*callbacks(tmp_path / "run"), InterruptCB()])
    with pytest.raises(CheckpointWriteFailed, match="deleted or replaced"):
        fit(trainer, callbacks=before_batch)
    assert trainer.n_updates == 14
    fit(trainer, 1)

    import os

    real, full = os.write, []

    def write(fd, data):
        if full and len(data) > 2000:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)

    def after_epoch(trainer):
        full.extend([1] * (trainer.epoch == 1))

    trainer = make_trainer(callbacks(tmp_path / "other"))
    with pytest.raises(CheckpointWriteFailed, match="No space left"):
        fit(trainer, callbacks=after_epoch)
    full.clear()
    assert CheckpointStore(tmp_path / "other", read_only=True).latest().step == 7
    same(fit(make_trainer()), fit(make_trainer(callbacks(tmp_path / "other"))))


class TwoUpdates(Trainer):
    "Two updates in each batch"

    def one_batch(self):
        for self.turn in "ab":
            self.run_callbacks("predict", "get_loss")
            if self.training:
                self.run_callbacks("backward", "step", "zero_grad")


def test_batches_with_several_updates_do_not_jump_over_the_time_to_save(tmp_path):
    "One step is left out, so updates are odd from then on and meet no multiple of four"

    def before_step(trainer):
        if trainer.turn == "b" and trainer.n_updates == 1:
            raise CancelStepException("left out once")

    kept = RewindCB(every=4, keep=30)
    extra = [before_step, CheckpointCB(tmp_path, every=4, keep_last=None), kept]
    trainer = TwoUpdates(make_loaders(), F.cross_entropy, optim.SGD, make_model(), [BasicTrainCB(), *extra])
    trainer.fit(1, lr=1e-3, valid=False)
    assert trainer.n_updates == 13
    assert [o.step for o in CheckpointStore(tmp_path, read_only=True).list()] == [5, 9, 13]
    assert [state[1]["position"]["n_updates"] for state in kept.states.values()] == [5, 9, 13]


def test_a_rule_that_was_set_anew_counts_in_the_next_fit(tmp_path):
    saving = CheckpointCB(tmp_path, every=4, keep_last=None, resume="never")
    trainer = Trainer(make_loaders(), F.cross_entropy, optim.SGD, make_model(), [BasicTrainCB(), saving])
    trainer.fit(1, lr=1e-3, valid=False)
    n, before = trainer.n_updates, len(CheckpointStore(tmp_path, read_only=True).list())
    saving.every = 1
    trainer.fit(1, lr=1e-3, valid=False)
    assert len(CheckpointStore(tmp_path, read_only=True).list()) - before >= n > 4
    saving.every = "sometimes"
    with pytest.raises(ValueError, match="`every` is 'sometimes'"):
        trainer.fit(1)


@pytest.mark.shows("NEMO-26", "NEMO-35", "AIT-39", "AIT-40", "PTA-25", "PTA-27", "SON-16")
def test_the_best_is_kept_and_never_a_wrong_one_deleted(tmp_path):
    "The original's own list of accuracies, .5 .9 .6 .7 .4 and two kept, and NaN is never best"
    for values, best in [
        ([0.5, 0.9, 0.6, 0.7, 0.4], [0.9, 0.7]),
        ([0.5, float("nan"), 0.6, 0.7, float("nan")], [0.7, 0.6]),
    ]:
        folder = tmp_path / str(best)

        def after_epoch(trainer, values=values):
            if trainer.training:
                trainer.history.write(score=values[trainer.epoch])

        after_epoch.columns = ["score"]
        fit(
            make_trainer(
                [
                    BasicTrainCB(),
                    MetricsCB(),
                    after_epoch,
                    CheckpointCB(folder, monitor="score", mode="max", keep_best=2),
                ]
            ),
            5,
        )
        store = CheckpointStore(folder, read_only=True, monitor="score", mode="max")
        assert [o.metrics["score"] for o in store.ranked()][:2] == best
        assert [o.step for o in store.list()][-2:] == [28, 35]
        assert (
            store.best().metrics.keys()
            == store.latest().metrics.keys()
            >= {"train_loss", "valid_loss", "score"}
        )  # Stored alike, first and later


@pytest.mark.shows("SON-16", "NEMO-30")
def test_best_only_saves_at_the_best_and_at_the_end(tmp_path):
    "Also after a resume the old best counts"
    saved = []

    class NotesCB(CheckpointCB):
        name = "CheckpointCB"

        def _save(self, trainer, *args, **kwargs):
            super()._save(trainer, *args, **kwargs)
            saved.append(trainer.n_updates)

    values = [3, 2, 4, 2.5, 1, 5]

    def after_epoch(trainer):
        if trainer.training:
            trainer.history.write(score=values[trainer.epoch])

    after_epoch.columns = ["score"]

    def run(*more):
        return fit(
            make_trainer(
                [
                    BasicTrainCB(),
                    MetricsCB(),
                    after_epoch,
                    NotesCB(tmp_path / "run", every="best", monitor="score", mode="min"),
                    *more,
                ]
            ),
            6,
        )

    with pytest.raises(Cut):
        run(CutCB("before_batch", lambda t: t.epoch == 3))
    assert saved == [7, 14]
    run()
    assert saved == [7, 14, 35, 42]


# ---- several networks


class GanCB:
    "Two networks, two optimizers, one after the other"

    def predict(self, trainer):
        trainer.preds = trainer.model(trainer.batch[0])

    def get_loss(self, trainer):
        trainer.loss = (
            F.cross_entropy(trainer.preds, trainer.batch[1])
            + trainer.critic(trainer.batch[0]).square().mean()
        )

    def backward(self, trainer):
        trainer.loss.backward()

    def step(self, trainer):
        trainer.opt.step()
        trainer.opt_critic.step()

    def zero_grad(self, trainer):
        trainer.opt.zero_grad()
        trainer.opt_critic.zero_grad()


@pytest.mark.shows("NEMO-28", "NEMO-33", "NEMO-54", "PTA-38")
def test_every_network_and_optimizer_of_the_trainer_is_saved(tmp_path):
    "All in one checkpoint of one step"

    def make(folder=None):
        trainer = make_trainer([GanCB(), MetricsCB(), *([CheckpointCB(folder, every=3)] if folder else [])])
        trainer.critic = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        trainer.opt_critic = optim.Adam(trainer.critic.parameters(), 0.01)
        return trainer

    with pytest.raises(Cut):
        fit(make(tmp_path / "run"), callbacks=CutCB("before_step", lambda t: t.n_updates == 10))
    same(fit(make()), fit(make(tmp_path / "run")))


# ---- best weights and averages


@pytest.mark.shows("PTA-26")
@pytest.mark.parametrize("end", [None, CancelFitException, KeyboardInterrupt, SystemExit, ValueError])
def test_the_best_weights_come_back_after_every_end_but_an_error(end):
    kept = {}

    def after_fit(trainer):
        kept["last"] = copy.deepcopy(trainer.model.state_dict())

    values = [2, 1, 3]

    def after_epoch(trainer):
        if not trainer.training:
            trainer.history.write(score=values[trainer.epoch])
            if trainer.epoch == 1:
                kept["best"] = copy.deepcopy(trainer.model.state_dict())

    after_epoch.columns = ["score"]

    def log(trainer):
        kept["now"] = copy.deepcopy(trainer.model.state_dict())
        if end and trainer.epoch == 2:
            raise end()

    log.order = 60
    trainer = make_trainer([BasicTrainCB(), MetricsCB(), KeepBestCB("score", "min"), after_epoch])
    try:
        fit(trainer, callbacks=log)
    except (KeyboardInterrupt, SystemExit, ValueError):
        pass
    assert tree(trainer.model.state_dict()) == tree(kept["now" if end is ValueError else "best"])


@pytest.mark.parametrize("cb", [lambda: EMACB(0.8), lambda: SWACB(0.3), lambda: SWACB(0.0, every="update")])
def test_averages_change_nothing_about_training(cb):
    "The trained weights, a second fit, the loader and the gradients are bit for bit as without"
    with_it, without = (
        fit(fit(make_trainer([BasicTrainCB(), MetricsCB(), *more]), 2), 2, keep_opt=True)
        for more in ([cb()], [])
    )
    assert (
        tree(with_it.model.state_dict()) == tree(without.model.state_dict())
        and with_it.history["train_loss"] == without.history["train_loss"]
    )
    assert with_it.history["valid_loss"] != without.history["valid_loss"]
    assert with_it.dls.train.state_dict() == without.dls.train.state_dict()
    assert all(o.training for o in with_it.model.modules()) == all(
        o.training for o in without.model.modules()
    )


@pytest.mark.shows("PTA-32", "PTA-33")
def test_an_average_is_that_of_the_hand_written_loop():
    "After every update, and not once per epoch; with the decay rising at first unless told otherwise"
    seen = []

    def after_step(trainer):
        seen.append([p.detach().clone() for p in trainer.model.parameters()])

    trainer = fit(make_trainer([BasicTrainCB(), EMACB(0.7, warmup=False)]), 1, callbacks=after_step)
    mean = seen[0]
    for now in seen[1:]:
        mean = [torch.lerp(a, b, 0.3) for a, b in zip(mean, now)]
    assert len(seen) == 7
    assert all(
        torch.allclose(a, b, atol=1e-7) for a, b in zip(mean, trainer.EMACB.average.module.parameters())
    )
    seen.clear()
    trainer = fit(make_trainer([BasicTrainCB(), EMACB(0.35)]), 1, callbacks=after_step)
    mean = seen[0]
    for n, now in enumerate(seen[1:], 1):
        mean = [
            a * o + b * (1 - o)
            for a, b, o in ((a, b, min(0.35, (1 + n) / (10 + n))) for a, b in zip(mean, now))
        ]
    assert trainer.EMACB.decay_at(3) < 0.35 == trainer.EMACB.decay_at(4)
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(mean, trainer.EMACB.average.module.parameters())
    )
    seen.clear()
    trainer = fit(make_trainer([BasicTrainCB(), SWACB(0.0, every="update")]), 1, callbacks=after_step)
    mean = [torch.stack(o).mean(0) for o in zip(*seen)]
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(mean, trainer.SWACB.average.module.parameters())
    )


@pytest.mark.shows("PTA-32")
@pytest.mark.parametrize(
    "average",
    [lambda: EMACB(0.6, warmup=False), lambda: EMACB(0.6), lambda: SWACB(0.0, every="update")],
    ids=["EMA", "rising", "SWA"],
)
@pytest.mark.parametrize("half", [False, True], ids=["left out", "overflowed"])
def test_a_step_that_was_left_out_is_not_averaged(average, half):
    "Left out by a callback, or by gradients that overflowed; the weights of each update count once"
    seen, watched = [], [nn.Linear(2, 1), average()]

    def cleanup_step(trainer):
        seen.append([p.detach().clone() for p in trainer.model.parameters()])

    def before_step(trainer):
        if trainer.batch_num % 2:
            raise CancelStepException("not this one")

    set_seed(0)
    batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(8)]
    if half:
        batches[0] = torch.full((4, 2), 1e4), torch.zeros(4, 1)  # Overflows once, then the scale is lower
    skip = MixedPrecisionCB("float16", init_scale=2.0**13) if half else before_step
    trainer = Trainer(
        DataLoaders(batches),
        F.mse_loss,
        optim.SGD,
        watched[0],
        [BasicTrainCB(), skip, watched[1], cleanup_step],
    )
    seen.append([p.detach().clone() for p in watched[0].parameters()])
    trainer.fit(1, lr=0.01, valid=False)
    real = [now for before, now in zip(seen, seen[1:]) if not torch.equal(before[0], now[0])]
    assert 0 < len(real) == trainer.n_updates == watched[1].n_averaged < 8
    mean = real[0]
    for n, now in enumerate(real[1:], 1):
        kept = watched[1].decay_at(n) if isinstance(watched[1], EMACB) else n / (n + 1)
        mean = [a * kept + b * (1 - kept) for a, b in zip(mean, now)]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mean, watched[1].average.module.parameters()))


@pytest.mark.parametrize("error", [CancelFitException, ValueError, KeyboardInterrupt])
def test_the_average_is_taken_back_after_any_end_of_validation(error):
    trained = {}

    def before_epoch(trainer):
        if not trainer.training:
            trained.update(copy.deepcopy(trainer.model.state_dict()))

    before_epoch.order = -50
    trainer = make_trainer([BasicTrainCB(), EMACB(0.8), before_epoch])
    try:
        fit(trainer, callbacks=CutCB("after_predict", lambda t: not t.training, error))
    except (ValueError, KeyboardInterrupt):
        pass
    assert tree(trainer.model.state_dict()) == tree(trained) and not trainer.EMACB.weights_swapped


def test_the_average_is_never_saved_as_the_weights(tmp_path):
    """Saving in validation by hand is refused.

    `keep` leaves the average in the model only when the checkpoint is written, so more epochs go on from the
    training weights."""

    def after_predict(trainer):
        if not trainer.training:
            take_state(trainer, 0)

    with pytest.raises(RuntimeError, match="`EMACB` has its own weights"):
        fit(make_trainer([BasicTrainCB(), EMACB(0.8)]), callbacks=after_predict)

    def cbs():
        return [BasicTrainCB(), MetricsCB(), EMACB(0.8, keep=True), CheckpointCB(tmp_path / "run")]

    short = fit(make_trainer(cbs()), 2)
    assert tree(short.model.state_dict()) == tree(short.EMACB.average.module.state_dict())
    rerun = fit(make_trainer(cbs()), 2)
    assert tree(rerun.model.state_dict()) == tree(short.model.state_dict())
    same(fit(make_trainer(cbs()[:3]), 4), fit(make_trainer(cbs()), 4))


def test_an_average_is_lent_at_any_time_of_a_fit_and_taken_back_after_an_error():
    "Never twice at once: in a validation pass it is in the model already"
    seen = []

    class LookCB:
        def after_batch(self, trainer):
            average = (
                trainer.EMACB.evaluated[0].weight.clone()
                if trainer.training
                else trainer.model[0].weight.clone()
            )
            weights = trainer.model[0].weight.clone()
            try:
                with trainer.EMACB.lent(trainer.model), trainer.EMACB.lent(trainer.model):
                    seen.append(
                        trainer.EMACB.weights_swapped and torch.equal(trainer.model[0].weight, average)
                    )
                    raise ZeroDivisionError
            except ZeroDivisionError:
                seen.append(torch.equal(trainer.model[0].weight, weights))

    trainer = fit(make_trainer([BasicTrainCB(), EMACB(0.8), LookCB()]), 1)
    assert seen == [True] * 2 * 9 and trainer.EMACB.n_averaged == 7
    unused = EMACB()
    with unused.lent(trainer.model):
        assert unused.n_averaged == 0


# ---- back in time

LOADERS = {
    "exact": make_loaders,
    "a list": lambda: DataLoaders(
        [o for o in DataLoader(Rows(40, False), 8)], list(DataLoader(Rows(24, False), 12))
    ),
    "plain": lambda: DataLoaders(DataLoader(Rows(40), 8, shuffle=True), DataLoader(Rows(24), 12)),
}


@pytest.mark.shows("U10")
@pytest.mark.parametrize("loaders", LOADERS)
@pytest.mark.parametrize("every", [None, 2])
def test_rewinding_to_any_kept_state_and_going_on_is_never_having_gone(loaders, every):
    whole = fit(make_trainer(dls=LOADERS[loaders]()))
    trainer = make_trainer([*callbacks(), RewindCB(every, keep=30)], LOADERS[loaders]())
    same(whole, fit(trainer))
    for place in sorted(trainer.RewindCB.states, reverse=True):
        trainer.rewind(place)
        same(whole, fit(trainer))


@pytest.mark.shows("U10")
def test_two_futures_from_one_point():
    "What comes after the point is forgotten, the point itself stays"
    trainer = make_trainer([*callbacks(), RewindCB(4)])
    one = result(fit(trainer))

    def before_step(trainer):
        trainer.opt.param_groups[0]["weight_decay"] = 0.5

    trainer.rewind(to=(1, 1))
    other = result(fit(trainer, callbacks=before_step))
    assert differences(one, other)
    trainer.rewind(to=(1, 1))
    same(other, result(fit(trainer, callbacks=before_step)))
    with pytest.raises(LookupError, match="kept are"):
        trainer.rewind(to=(1, 2))


@pytest.mark.shows("U10")
def test_rewinding_after_an_interrupt_and_beside_a_checkpoint(tmp_path):
    "A checkpoint that is written after going back holds what really happened"
    whole = fit(make_trainer())

    def make():
        return make_trainer([*callbacks(tmp_path / "run", every=3), RewindCB(2, keep=30)])

    trainer = make()
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, callbacks=CutCB("after_step", lambda t: t.n_updates == 12, KeyboardInterrupt))
    trainer.rewind(to=(0, 4))
    with pytest.raises(Cut):
        fit(trainer, callbacks=CutCB("after_backward", lambda t: t.n_updates == 10))
    same(whole, fit(make()))


# ---- what is left in memory


def test_many_failing_fits_leave_no_tensors_behind(tmp_path):
    "Also with `sys.last_value`, as in a notebook, where only the newest error is held"
    import sys

    def live():
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    trainer, counts = make_trainer([*callbacks(tmp_path / "run"), InterruptCB(), RewindCB()]), []
    for n in range(31):
        try:
            fit(trainer, 1, callbacks=CutCB("after_backward", lambda t: t.batch_num == 1))
        except Cut as e:
            sys.last_value = e
        if n % 10 == 0:
            gc.collect()
            counts.append(live())
    del sys.last_value
    assert len(set(counts[1:])) == 1, counts


# ---- after any failure, at any event

EVENTS_TO_FAIL = [o for o in EVENTS if o not in ("cleanup_fit",)]


@pytest.mark.parametrize("error", [ValueError, CancelFitException, KeyboardInterrupt])
@pytest.mark.parametrize("order", [-60, 25, 60])
def test_after_a_failure_at_any_event_everything_is_as_it_was(error, order):
    "Signal handlers, modes, gradients, training weights; and the next fit is that of a fresh trainer"

    def cbs():
        return [
            BasicTrainCB(),
            MetricsCB(),
            OneCycleSchedulerCB(),
            EMACB(0.8),
            RecorderCB(),
            InterruptCB(),
            RewindCB(),
        ]

    def start(trainer):
        trainer.model.load_state_dict(weights)
        trainer.dls.train.set_epoch(0)
        trainer.dls.valid.set_epoch(0)
        set_seed(3)
        return fit(trainer, 2)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    weights = make_model().state_dict()
    fresh = start(make_trainer(cbs()))
    for event in EVENTS_TO_FAIL:
        trainer, failing = (
            make_trainer(cbs()),
            CutCB(event, lambda t: t.n_updates >= 3 or event == "before_fit", error),
        )
        failing.order = order
        try:
            fit(trainer, 2, callbacks=failing)
        except (ValueError, KeyboardInterrupt):
            pass
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers, event
        assert (
            torch.is_grad_enabled() and not trainer.EMACB.weights_swapped and failing not in trainer.callbacks
        ), event
        start(trainer)
        assert tree(trainer.model.state_dict()) == tree(fresh.model.state_dict()), event
        assert trainer.history["valid_loss"][-2:] == fresh.history["valid_loss"], event


def test_a_model_that_has_no_shape_yet_is_taken_back_to_a_batch():
    batches = [(torch.randn(8, 4), torch.zeros(8).long())] * 4
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    trainer = Trainer(DataLoaders(batches), F.cross_entropy, optim.SGD, model, [BasicTrainCB(), RewindCB()])
    trainer.fit(2, valid=False)
    assert (1, 0) in trainer.RewindCB.states and (0, 0) not in trainer.RewindCB.states


# ---- what is watched is no number, or never comes


class Gives:
    "A metric that computes what it was given"

    def __init__(self, value):
        self.value = value

    def reset(self):
        pass

    def update(self, *args):
        pass

    def compute(self):
        return self.value


def watchers(folder, name="score"):
    watched = dict(monitor=name, mode="max")
    best = CheckpointCB(folder, every="best", **watched)
    return KeepBestCB(**watched), EarlyStoppingCB(**watched), PlateauSchedulerCB(**watched), best


@pytest.mark.parametrize("i", range(4))
@pytest.mark.parametrize("value", [[1.0, 2.0], torch.tensor([1.0, 2.0])])
def test_who_watches_a_column_of_lists_is_told_that_none_is_better(i, value, tmp_path):
    trainer = make_trainer([BasicTrainCB(), MetricsCB(score=Gives(value)), watchers(tmp_path)[i]])
    with pytest.raises(TypeError, match=r"`score` is \[1.0, 2.0\] in the history.*only be said of a number"):
        trainer.fit(2, lr=0.1)


@pytest.mark.parametrize("i", range(4))
@pytest.mark.parametrize("value, valid", [(dict(a=1.0), True), (1.0, False)])
def test_who_has_never_seen_a_value_says_so_in_the_end(i, value, valid, tmp_path):
    trainer = make_trainer([BasicTrainCB(), MetricsCB(score=Gives(value)), watchers(tmp_path)[i]])
    with pytest.warns(UserWarning, match="watched `score`, which had no value in any epoch"):
        trainer.fit(2, lr=0.1, valid=valid)


def test_a_run_that_is_asked_to_stop_says_nothing_of_the_best(tmp_path, recwarn):
    def after_batch(trainer):
        trainer.request_stop("enough")

    trainer = make_trainer([BasicTrainCB(), MetricsCB(score=Gives(1.0)), watchers(tmp_path)[3], after_batch])
    trainer.fit(2, lr=0.1, valid=False)
    assert not [o for o in recwarn if "had no value" in str(o.message)]
