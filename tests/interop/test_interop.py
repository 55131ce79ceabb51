"""Callbacks of other libraries through `adapt`, against the trainers they were written for.

The same callback classes run in the loop of pytorch-accelerated and of AIToolbox and in ours, on the same weights and batches: the same
calls in the same order, and the same weights bit for bit. What cannot be the same is said in the test that shows it. NeMo 0.x and Sonosco
cannot be installed beside this library; their callbacks are written from their documentation.
"""

import io
import re
import warnings
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torcheval.metrics import MulticlassAccuracy
from waiting import InsideCB, RefuseToWait

from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.log.experiment import ExperimentCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.stop.limits import LimitCB
from isaac_loop.device.precision import MixedPrecisionCB
from isaac_loop.schedule.schedulers import BatchSchedulerCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import Order
from isaac_loop.interop.aitoolbox import AIToolboxCB
from isaac_loop.interop.base import uses
from isaac_loop.inspection.loop_tables import summarize_callbacks  # noqa: F401  A method of the trainer
from isaac_loop.interop.adapters import adapt
from isaac_loop.state.store import CheckpointStore
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer

generator = torch.Generator().manual_seed(3)
X = torch.randn(56, 4, generator=generator)
Y = (X.sum(1) > 0).long()
TRAIN, VALID = TensorDataset(X[:40], Y[:40]), TensorDataset(X[40:], Y[40:])


def make_model():
    set_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def loaders():
    return DataLoaders(DataLoader(TRAIN, 8), DataLoader(VALID, 8))


def silent(f, *args, **kwargs):
    "What `f` gives, and what it printed"
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = f(*args, **kwargs)
    return result, [o for o in out.getvalue().splitlines() if o.strip()]


def ours(*callbacks, n_epochs=3, lr=0.5, loss=F.cross_entropy, dls=None, model=None, opt=optim.SGD, **fit):
    "A trainer of ours after a fit with foreign callbacks"
    trainer = Trainer(
        dls or loaders(), loss, opt, make_model() if model is None else model, [BasicTrainCB(), *callbacks]
    )
    trainer.printed = silent(trainer.fit, n_epochs, lr, **fit)[1]
    return trainer


def same_weights(a, b):
    return all(
        torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


# pytorch-accelerated


@pytest.fixture(scope="module")
def pta():
    return pytest.importorskip("pytorch_accelerated", reason="pytorch-accelerated is not installed")


def theirs_pta(pta, *callbacks, n_epochs=3, lr=0.5, loss=F.cross_entropy, evaluate=True, **train):
    "Their trainer after the same run"
    model = make_model()
    trainer = pta.Trainer(model, loss, optim.SGD(model.parameters(), lr), callbacks=callbacks)
    options = dict(num_workers=0, shuffle=False)
    trainer.printed = silent(
        trainer.train,
        TRAIN,
        n_epochs,
        VALID if evaluate else None,
        per_device_batch_size=8,
        train_dataloader_kwargs=options,
        eval_dataloader_kwargs=options,
        **train,
    )[1]
    return trainer


def pta_recorder(pta, seen, name, stop_at=None):
    "A new class of callback that notes each of its calls, and may stop the run"
    from pytorch_accelerated.callbacks import StopTrainingError, TrainerCallback

    def method(event):
        def told(self, trainer, **kwargs):
            history = trainer.run_history
            note = (
                name,
                event,
                history.current_epoch,
                kwargs.get("step"),
                kwargs.get("is_intermediate"),
                tuple(sorted(history.get_metric_names())),
            )
            if "batch_output" in kwargs:
                output = kwargs["batch_output"]
                note += (
                    output["loss"].item(),
                    output["batch_size"],
                    tuple(output["model_outputs"].shape),
                    kwargs["batch"][0].sum().item(),
                    bool(next(trainer.model.parameters()).grad is None),
                )
            seen.append(note)
            if stop_at and stop_at(event, history.current_epoch, kwargs.get("step")):
                raise StopTrainingError("enough")

        return told

    events = [o for o in vars(TrainerCallback) if o.startswith("on_")]
    return type(name, (TrainerCallback,), {o: method(o) for o in events})


def both_pta(pta, make, **options):
    "Both trainers after a run with the callbacks that `make` gives, and what their recorder has seen"
    runs = []
    for run in (
        lambda *cbs: theirs_pta(pta, *cbs, **options),
        lambda *cbs: ours(*map(adapt, cbs), **options),
    ):
        seen = []
        runs.append((run(*make(seen)), seen))
    return runs


@pytest.mark.shows("PTA-01", "PTA-03 to PTA-09", "PTA-11", "PTA-12", "PTA-02")
def test_accelerated_callbacks_get_the_same_calls_in_the_same_order_and_the_weights_are_the_same(pta):
    """Every event, its epoch, step, loss, batch and the metrics known by then

    The loss of each step is compared, so that a callback must come after the trainer's own part of the moment."""
    (theirs, seen), (mine, found) = both_pta(
        pta, lambda seen: [pta_recorder(pta, seen, "A"), pta_recorder(pta, seen, "B")]
    )
    assert {o[1] for o in seen} >= {
        "on_init_end",
        "on_training_run_start",
        "on_train_step_end",
        "on_eval_step_end",
        "on_training_run_epoch_end",
        "on_training_run_end",
    }
    first = [o for o in seen if o[1] != "on_init_end"]
    assert [o for o in found if o[1] != "on_init_end"] == first
    assert (
        [o[:2] for o in found if o[1] == "on_init_end"]
        == [("A", "on_init_end"), ("B", "on_init_end")]
        == [o[:2] for o in seen][:2]
    )
    assert same_weights(theirs.model, mine.model)


@pytest.mark.shows("PTA-13")
def test_their_step_ends_after_the_forward_pass_and_before_backward(pta):
    "Gradients are never there at `on_train_step_end`, with both trainers"
    for _, seen in both_pta(pta, lambda seen: [pta_recorder(pta, seen, "A")]):
        ends = [o for o in seen if o[1] == "on_train_step_end"]
        assert len(ends) == 15 and all(o[-1] for o in ends)


@pytest.mark.shows("PTA-10", "PTA-14")
@pytest.mark.parametrize(
    "event, step",
    [
        ("on_train_epoch_start", None),
        ("on_train_step_start", None),
        ("on_train_step_end", 2),
        ("on_train_epoch_end", None),
        ("on_eval_step_end", None),
        ("on_eval_epoch_end", None),
        ("on_training_run_epoch_end", None),
    ],
)
def test_a_stop_skips_the_rest_of_the_epoch_wherever_it_is_raised(pta, event, step):
    "The message is printed, everybody hears of it, the end of the run still comes; weights as theirs"
    stop = lambda e, epoch, s: e == event and epoch == 2 and s == step
    (theirs, seen), (mine, found) = both_pta(
        pta, lambda seen: [pta_recorder(pta, seen, "A", stop), pta_recorder(pta, seen, "B")]
    )
    assert [o[:4] for o in found] == [o[:4] for o in seen]
    assert [o[1] for o in found][-4:] == ["on_stop_training_error"] * 2 + ["on_training_run_end"] * 2
    assert same_weights(theirs.model, mine.model)
    assert theirs.printed == mine.printed == ["enough"]
    assert mine.stop_reason == "enough"


@pytest.mark.shows("PTA-14")
def test_our_callbacks_get_their_last_row_after_a_foreign_stop(pta):
    "In their loop the epoch that is stopped has no end; with ours `log` and `after_fit` still come"
    heard = []

    def log(trainer):
        heard.append(dict(trainer.history[-1]))

    def after_fit(trainer):
        heard.append("after_fit")

    log.order = after_fit.order = Order.REPORT
    stop = lambda e, epoch, s: e == "on_train_step_end" and epoch == 2 and s == 2
    ours(adapt(pta_recorder(pta, [], "A", stop)), MetricsCB(), log, after_fit)
    assert (
        len(heard) == 3
        and heard[-1] == "after_fit"
        and "train_loss" in heard[1]
        and "valid_loss" not in heard[1]
    )


@pytest.mark.shows("PTA-14")
def test_a_stop_before_or_after_the_run_is_an_error_with_both(pta):
    for event in ("on_training_run_start", "on_training_run_end"):
        for run in (lambda cb: theirs_pta(pta, cb), lambda cb: ours(adapt(cb))):
            with pytest.raises(Exception, match="enough") as e:
                run(pta_recorder(pta, [], "A", lambda o, *_: o == event))
            assert type(e.value).__name__ == "StopTrainingError"


@pytest.mark.shows("PTA-08", "PTA-09")
def test_without_validation_its_events_do_not_come(pta):
    seen, found = [], []
    theirs = theirs_pta(pta, pta_recorder(pta, seen, "A"), evaluate=False)
    mine = ours(adapt(pta_recorder(pta, found, "A")), valid=False)
    assert found == seen and not any("eval" in o[1] for o in found) and same_weights(theirs.model, mine.model)


@pytest.mark.shows("PTA-11")
def test_validation_alone_is_their_evaluation_run(pta):
    seen, found = [], []
    model = make_model()
    theirs = pta.Trainer(
        model, F.cross_entropy, optim.SGD(model.parameters(), 0.1), callbacks=[pta_recorder(pta, seen, "A")]
    )
    silent(theirs.evaluate, VALID, per_device_batch_size=8, dataloader_kwargs=dict(num_workers=0))
    mine = ours(adapt(pta_recorder(pta, found, "A")), n_epochs=1, train=False)
    assert found == seen and found[-1][1] == "on_evaluation_run_end"
    assert mine.A.facade.run_history.get_latest_metric(
        "evaluation_loss"
    ) == theirs.run_history.get_latest_metric("evaluation_loss")


@pytest.mark.shows("PTA-14", "PTA-28", "PTA-40")
@pytest.mark.parametrize("patience, threshold", [(1, 0.0), (2, 0.05), (1, 0.2)])
def test_their_early_stopping_stops_at_the_same_epoch(pta, patience, threshold):
    "Same counter, same words, same weights"
    from pytorch_accelerated.callbacks import EarlyStoppingCallback

    make = lambda seen: [EarlyStoppingCallback(patience, threshold), pta_recorder(pta, seen, "A")]
    (theirs, seen), (mine, found) = both_pta(pta, make, n_epochs=12, lr=0.9)
    assert found == seen and 12 > len(mine.A.facade.run_history.get_metric_values("eval_loss_epoch")) > 1
    assert theirs.printed == mine.printed and same_weights(theirs.model, mine.model)


@pytest.mark.shows("PTA-40")
def test_a_foreign_early_stopping_watches_a_metric_of_ours(pta):
    "A name that no foreign callback records is looked up in our history"
    from pytorch_accelerated.callbacks import EarlyStoppingCallback

    mine = ours(
        adapt(EarlyStoppingCallback(1, 1.1, watch_metric="accuracy", greater_is_better=True)),
        MetricsCB(accuracy=MulticlassAccuracy()),
        n_epochs=9,
    )
    assert len(mine.history) == 2 and "no improvement" in mine.stop_reason
    with pytest.raises(
        ValueError, match=r"No values have been recorded for the metric `acuracy`.*Did you mean `accuracy`"
    ):
        ours(adapt(EarlyStoppingCallback(watch_metric="acuracy")), MetricsCB(accuracy=MulticlassAccuracy()))


def nan_from(batch):
    "A loss that is NaN from a batch on"
    calls = []

    def loss(preds, targets):
        calls.append(0)
        return F.cross_entropy(preds, targets) * (float("nan") if len(calls) > batch else 1.0)

    return loss


@pytest.mark.shows("PTA-13", "PTA-14", "PTA-20")
def test_their_nan_callback_stops_before_the_weights_are_spoilt_and_ends_the_process(pta):
    from pytorch_accelerated.callbacks import TerminateOnNaNCallback

    models = []
    for run in (
        lambda cb: theirs_pta(pta, cb, loss=nan_from(3)),
        lambda cb: ours(adapt(cb), loss=nan_from(3)),
    ):

        class KeepModel(TerminateOnNaNCallback):
            def on_training_run_start(self, trainer, **kwargs):
                models.append(trainer.model)

        with pytest.raises(SystemExit):
            run(KeepModel)
    assert same_weights(*models) and not any(o.isnan().any() for o in models[1].state_dict().values())
    assert not same_weights(models[1], make_model())


@pytest.mark.shows("PTA-25", "PTA-26", "PTA-40")
def test_their_best_model_is_the_same_file_and_is_loaded_at_the_end(pta, tmp_path):
    "Either side reads the other's checkpoint"
    from pytorch_accelerated.callbacks import SaveBestModelCallback

    files = [tmp_path / "theirs.pt", tmp_path / "ours.pt"]
    theirs = theirs_pta(pta, SaveBestModelCallback(files[0]), n_epochs=6, lr=2.0)
    mine = ours(adapt(SaveBestModelCallback(files[1])), n_epochs=6, lr=2.0)
    saved = [torch.load(o, weights_only=True) for o in files]
    assert (
        saved[0].keys() == saved[1].keys() and theirs.printed[0].replace("theirs", "ours") == mine.printed[0]
    )
    assert same_weights(theirs.model, mine.model)
    theirs.load_checkpoint(files[1])
    mine.SaveBestModelCallback.facade.load_checkpoint(files[0])
    assert same_weights(theirs.model, mine.model)


@pytest.mark.shows("PTA-30")
def test_their_limit_of_batches_limits_both_passes(pta):
    "Schedules of ours learn of it, too"
    from pytorch_accelerated.callbacks import LimitBatchesCallback

    (theirs, seen), (mine, found) = both_pta(
        pta, lambda seen: [LimitBatchesCallback(2), pta_recorder(pta, seen, "A")]
    )
    assert found == seen and len([o for o in found if o[1] == "on_eval_step_end"]) == 6
    assert same_weights(theirs.model, mine.model) and (mine.n_updates, mine.updates_per_epoch) == (6, 2)
    assert ours(adapt(LimitBatchesCallback(99))).updates_per_epoch == 5


@pytest.mark.shows("PTA-15", "PTA-31", "PTA-33", "PTA-40")
def test_their_averaged_model_is_evaluated_and_saved_alike(pta, tmp_path):
    "An evaluation with other callbacks and a prefix, inside the epoch"
    from pytorch_accelerated.callbacks import ModelEmaCallback

    def make(name):
        return lambda seen: [
            ModelEmaCallback(
                0.5,
                save_path=tmp_path / f"{name}{len(list(tmp_path.iterdir()))}.pt",
                callbacks=[pta_recorder(pta, seen, "Inner")],
            ),
            pta_recorder(pta, seen, "A"),
        ]

    (theirs, seen), (mine, found) = both_pta(pta, make("ema"))
    assert found == seen and any(o[0] == "Inner" and o[1] == "on_eval_step_end" for o in found)
    files = [torch.load(o, weights_only=True) for o in sorted(tmp_path.iterdir())]
    assert len(files) == 2 and all(
        torch.equal(a, b) for a, b in zip(*(o["model_state_dict"].values() for o in files), strict=True)
    )
    assert same_weights(theirs.model, mine.model)
    assert mine.history["ema_model_eval_loss_epoch"] == theirs.run_history.get_metric_values(
        "ema_model_eval_loss_epoch"
    )


@pytest.mark.shows("PTA-35", "PTA-36")
def test_an_evaluation_between_steps_leaves_the_model_in_training_mode(pta):
    """Same calls as theirs; but their model is in eval mode for the rest of the epoch, and ours trains on

    So weights are compared with a run without the evaluation."""
    from pytorch_accelerated.callbacks import StepBasedEvaluationCallback, TrainerCallback

    modes = []

    class Modes(TrainerCallback):
        def on_train_step_start(self, trainer, **kwargs):
            modes.append(trainer.model.training)

    make = lambda seen: [StepBasedEvaluationCallback(2), Modes, pta_recorder(pta, seen, "A")]
    (theirs, seen), (mine, found) = both_pta(pta, make)
    assert [o[:5] for o in found] == [o[:5] for o in seen] and any(o[4] for o in found)
    assert not all(modes[:15]) and all(modes[15:])
    assert same_weights(mine.model, ours().model)
    assert "intermediate_eval_loss" not in mine.history.names()


@pytest.mark.shows("PTA-37")
def test_their_limit_of_evaluation_steps_works_with_ours(pta):
    "They replace a loader that their running pass no longer looks at; ours looks again when the pass begins"
    from pytorch_accelerated.callbacks import LimitEvalStepsCallback

    counts = []
    for _, seen in both_pta(
        pta,
        lambda seen: [LimitEvalStepsCallback(1, limit_intermediate_only=False), pta_recorder(pta, seen, "A")],
    ):
        counts.append(len([o for o in seen if o[1] == "on_eval_step_end"]))
    assert counts == [6, 3]


@pytest.mark.shows("PTA-16", "PTA-18", "PTA-21", "PTA-23", "PTA-24", "PTA-29", "PTA-43")
def test_their_default_callbacks_run_as_they_are(pta):
    "Classes are taken; the words on the screen are theirs"
    from pytorch_accelerated.callbacks import get_default_callbacks

    theirs = theirs_pta(pta, *get_default_callbacks())
    mine = ours(*map(adapt, get_default_callbacks()))
    assert (
        sorted(theirs.printed) == sorted(mine.printed)
        and len(mine.printed) == 14
        and same_weights(theirs.model, mine.model)
    )  # The metrics come from a set, in any order
    assert [type(o).__name__ for o in mine.MoveModulesToDeviceCallback.facade.callback_handler] == [
        o.__name__ for o in get_default_callbacks()
    ]


@pytest.mark.shows("PTA-16")
def test_a_second_callback_of_one_class_is_refused_with_those_that_are_there(pta):
    "Unless it gets another name"
    from pytorch_accelerated.callbacks import LimitBatchesCallback

    with pytest.raises(ValueError, match="There is a callback called `LimitBatchesCallback` already"):
        ours(adapt(LimitBatchesCallback(2)), adapt(LimitBatchesCallback(3)))
    assert ours(adapt(LimitBatchesCallback(3)), adapt(LimitBatchesCallback(2), name="second")).n_updates == 6
    with pytest.raises(TypeError, match="cannot be made without arguments.*num_batches"):
        adapt(LimitBatchesCallback)


@pytest.mark.shows("PTA-15", "PTA-17")
def test_the_handler_adds_clears_lists_and_calls_any_event(pta):
    "Callbacks without the event are skipped, although they answer any name with an error"
    from pytorch_accelerated.callbacks import TrainerCallback

    heard = []

    class Listens(TrainerCallback):
        def verify_batch(self, shape):
            heard.append(shape)

    class Manages(TrainerCallback):
        def on_training_run_start(self, trainer, **kwargs):
            trainer.callback_handler.add_callbacks([Listens])

        def on_train_step_start(self, trainer, **kwargs):
            handler = trainer.callback_handler
            handler.call_event("verify_batch", 4)
            heard.append([handler.callback_list, [type(o) for o in handler] == [Manages, Listens]])

        def on_train_epoch_end(self, trainer, **kwargs):
            trainer.callback_handler.clear_callbacks()

    mine = ours(adapt(Manages), n_epochs=2)
    assert heard == [4, [["Manages", "Listens"], True]] * 5 and [type(o) for o in mine.callbacks] == [
        BasicTrainCB
    ]


@pytest.mark.shows("PTA-17", "PTA-41", "PTA-62")
def test_a_batch_is_verified_by_an_event_of_ones_own(pta):
    "Their example reads the configuration with brackets, which their frozen record refuses; ours has both ways"
    from pytorch_accelerated.callbacks import TrainerCallback

    class VerifyBatch(TrainerCallback):
        def on_training_run_start(self, trainer, **kwargs):
            self.n = 0

        def verify_train_batch(self, trainer, xb, yb):
            assert xb.shape[0] == yb.shape[0] == trainer.run_config["train_per_device_batch_size"]
            self.n += 1

    class VerifyingTrainer(Trainer):
        def predict(self):
            self.VerifyBatch.facade.callback_handler.call_event(
                "verify_train_batch", trainer=self.VerifyBatch.facade, xb=self.batch[0], yb=self.batch[1]
            )
            self.preds = self.model(self.batch[0])

    class LossAndStepCB:
        get_loss, backward, step, zero_grad = (
            BasicTrainCB.get_loss,
            BasicTrainCB.backward,
            BasicTrainCB.step,
            BasicTrainCB.zero_grad,
        )

    trainer = VerifyingTrainer(
        loaders(), F.cross_entropy, optim.SGD, make_model(), [LossAndStepCB(), adapt(VerifyBatch)]
    )
    trainer.fit(2)
    assert trainer.VerifyBatch.foreign.n == 14
    theirs = theirs_pta(pta, n_epochs=1)
    with pytest.raises(TypeError, match="not subscriptable"):
        theirs.run_config["train_per_device_batch_size"]
    config = trainer.VerifyBatch.facade.run_config
    same = [
        "num_update_steps_per_epoch",
        "train_per_device_batch_size",
        "eval_per_device_batch_size",
        "train_total_batch_size",
        "gradient_accumulation_steps",
        "is_world_process_zero",
        "num_processes",
        "mixed_precision",
        "is_distributed",
        "gradient_clip_value",
    ]
    assert {o: config.to_dict()[o] for o in same} == {
        o: theirs.run_config.to_dict()[o] for o in same
    } and config["num_epochs"] == config.num_epochs == 2
    with pytest.raises(AttributeError):
        config.num_epochs = 5


@pytest.mark.shows("PTA-42", "PTA-43")
def test_in_one_process_gathering_changes_nothing(pta, capsys):
    "Theirs drops rows that equal the padding value even then; ours keeps them"
    from pytorch_accelerated.callbacks import TrainerCallback

    got = []

    class Gathers(TrainerCallback):
        def on_eval_step_end(self, trainer, batch, **kwargs):
            got.append(
                (
                    torch.equal(trainer.gather(batch[1]), batch[1]),
                    len(trainer.gather(batch[1], padding_value=0)),
                    trainer.device,
                    trainer._accelerator.is_main_process,
                )
            )

        def on_training_run_end(self, trainer, **kwargs):
            trainer.print("done", end="!")

    theirs = theirs_pta(pta, Gathers, n_epochs=1)
    n = len(got)
    mine = ours(adapt(Gathers), n_epochs=1)
    assert theirs.printed == mine.printed == ["done!"]
    assert [o[0] for o in got] == [True] * 4 and [o[2:] for o in got[:n]] == [o[2:] for o in got[n:]] == [
        (torch.device("cpu"), True)
    ] * 2
    assert [o[1] for o in got[n:]] == [8, 8] and min(o[1] for o in got[:n]) < 8


@pytest.mark.shows("PTA-40")
def test_foreign_metrics_reach_our_loggers_and_monitors(pta):
    "What is written to the run history in an epoch stands in our row, also as a tensor"
    from pytorch_accelerated.callbacks import TrainerCallback

    class Writes(TrainerCallback):
        def on_eval_epoch_end(self, trainer, **kwargs):
            trainer.run_history.update_metric("score", torch.tensor(0.5))

    rows = []

    def log(trainer):
        rows.append(trainer.history.latest("score"))

    mine = ours(adapt(Writes), MetricsCB(), log, EarlyStoppingCB("score", mode="max", patience=2), n_epochs=9)
    assert rows == [0.5] * 3 and mine.stop_reason and "train_loss_epoch" not in mine.history.names()
    history = mine.Writes.facade.run_history
    assert history.get_metric_values("score") == [torch.tensor(0.5)] * 3 and history.current_epoch == 4
    history.delete_metric("score")
    assert history.get_metric_values("score") == [0.5] * 3  # Those of our rows


@pytest.mark.shows("PTA-12", "PTA-13")
def test_a_foreign_callback_may_change_the_loss_before_backward(pta):
    from pytorch_accelerated.callbacks import TrainerCallback

    class Doubles(TrainerCallback):
        def on_train_step_end(self, trainer, batch_output, **kwargs):
            batch_output["loss"] = batch_output["loss"] * 2

    (theirs, _), (mine, _) = both_pta(pta, lambda seen: [Doubles])
    assert same_weights(theirs.model, mine.model) and not same_weights(mine.model, ours().model)


@pytest.mark.shows("PTA-07")
def test_with_two_batches_to_an_update_the_calls_and_the_weights_are_the_same(pta):
    """Step events come for each batch with both

    The losses that callbacks see are divided by two with theirs, and as they are with ours."""
    seen, found, losses = [], [], [[], []]
    data = TensorDataset(X[:32], Y[:32])
    model = make_model()
    theirs = pta.Trainer(
        model, F.cross_entropy, optim.SGD(model.parameters(), 0.5), callbacks=[pta_recorder(pta, seen, "A")]
    )
    silent(
        theirs.train,
        data,
        3,
        per_device_batch_size=8,
        gradient_accumulation_steps=2,
        train_dataloader_kwargs=dict(num_workers=0, shuffle=False),
    )
    callback = adapt(pta_recorder(pta, found, "A"))
    mine = ours(callback, AccumulationCB(2, "mean"), dls=DataLoaders(DataLoader(data, 8)), valid=False)
    assert [o[:6] for o in found] == [o[:6] for o in seen] and same_weights(theirs.model, mine.model)
    losses = [[o[6] for o in log if o[1] == "on_train_step_end"] for log in (found, seen)]
    assert losses[0] == [2 * o for o in losses[1]]
    assert (
        callback.facade.run_config.gradient_accumulation_steps
        == 2
        == theirs.run_config.gradient_accumulation_steps
    )
    assert (
        callback.facade.run_config.num_update_steps_per_epoch
        == theirs.run_config.num_update_steps_per_epoch
        == 2
    )


@pytest.mark.shows("PTA-03")
def test_what_their_trainer_has_and_ours_has_not_is_named(pta):
    "The error says who asked, and what there is; a warning says so when the run begins"
    from pytorch_accelerated.callbacks import TrainerCallback

    class Asks(TrainerCallback):
        def on_training_run_end(self, trainer, **kwargs):
            return trainer.run_historie

    trainer = Trainer(loaders(), F.cross_entropy, optim.SGD, make_model(), [BasicTrainCB(), adapt(Asks)])
    with pytest.warns(
        UserWarning,
        match="`Asks.on_training_run_end` asks its trainer for `run_historie`, which nobody has so far.*Did you mean `run_history`",
    ):
        with pytest.raises(
            AttributeError,
            match=r"`Asks` asked its trainer for `run_historie`.*Did you mean `run_history`.*Offered are .*'run_config'",
        ):
            trainer.fit(1)


def test_training_states_in_their_layout_are_refused_before_any_training(pta, tmp_path):
    "Their two callbacks would fail after hours; the error names what serves here"
    from pytorch_accelerated.callbacks import SaveTrainingStateCallback, WSDCheckpointCallback

    for cls in (SaveTrainingStateCallback, WSDCheckpointCallback):
        with pytest.raises(
            TypeError,
            match=f"`{cls.__name__}._save.*` asks for `save_training_state`.*`CheckpointCB.folder, every=.*`WSDSchedulerCB`.*`ExportCB",
        ):
            adapt(cls(tmp_path / "states"))

    class Overridden(SaveTrainingStateCallback):
        def _save(self, trainer, name):
            trainer.save_checkpoint(self.save_dir / f"{name}.pt")

    ours(adapt(Overridden(tmp_path / "mine", save_every_n_epochs=2)))
    assert sorted(o.name for o in (tmp_path / "mine").iterdir()) == ["epoch_2.pt", "final.pt"]


def test_all_their_other_callbacks_are_taken_without_a_word(pta, tmp_path, recwarn):
    "Nothing in them asks for what is not there"
    from pytorch_accelerated import callbacks

    given = dict(
        LimitBatchesCallback=(2,),
        LimitEvalStepsCallback=(1,),
        StepBasedEvaluationCallback=(2,),
        ModelEmaCallback=(0.9, True, tmp_path / "ema.pt"),
        SaveBestModelCallback=(tmp_path / "best.pt",),
    )
    refused = ("TrainerCallback", "SaveTrainingStateCallback", "WSDCheckpointCallback")
    classes = [
        o
        for o in vars(callbacks).values()
        if isinstance(o, type) and issubclass(o, callbacks.TrainerCallback) and o.__name__ not in refused
    ]
    trainer = Trainer(
        loaders(),
        F.cross_entropy,
        optim.SGD,
        make_model(),
        [BasicTrainCB(), *(adapt(o(*given.get(o.__name__, ()))) for o in classes)],
    )
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        trainer.fit(1)
    assert (
        len(classes) == 12
        and trainer.n_updates == 2
        and not [o for o in recwarn if issubclass(o.category, UserWarning)]
    )


def test_the_scheduler_of_their_trainer_is_ours(pta, tmp_path):
    "It is there from the first epoch on, and in their files; before that, and where it is set, there is an error and no None"
    from pytorch_accelerated.callbacks import SaveBestModelCallback, TrainerCallback

    make = partial(optim.lr_scheduler.MultiStepLR, milestones=[1, 8], gamma=0.5)

    class Rates(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_train_epoch_start(self, trainer, **kwargs):
            self.seen.append((trainer.create_scheduler_fn is make, trainer.scheduler.get_last_lr()))

    class Early(TrainerCallback):
        def on_training_run_start(self, trainer, **kwargs):
            self.rate = trainer.scheduler.get_last_lr()

    class Sets(TrainerCallback):
        def on_training_run_start(self, trainer, **kwargs):
            trainer.scheduler = None

    files, seen = [], []
    for name, run in (
        ("theirs", lambda *cbs: theirs_pta(pta, *cbs, create_scheduler_fn=make)),
        ("ours", lambda *cbs: ours(BatchSchedulerCB(make), *map(adapt, cbs))),
    ):
        rates = Rates()
        run(rates, SaveBestModelCallback(tmp_path / name))
        seen.append(rates.seen)
        files.append(torch.load(tmp_path / name, weights_only=True))
    assert seen[0] == seen[1] and seen[1][-1][0]
    assert (
        files[0]["scheduler_state_dict"] == files[1]["scheduler_state_dict"]
        and files[1]["scheduler_state_dict"]["last_epoch"] == 15
    )
    with pytest.raises(
        AttributeError,
        match="`Early` asked its trainer for `scheduler`, which is not there now.*from `on_train_epoch_start` on",
    ):
        ours(BatchSchedulerCB(make), adapt(Early))
    with pytest.raises(TypeError, match="`Sets.on_training_run_start` sets `scheduler`.*BatchSchedulerCB"):
        adapt(Sets)


@pytest.mark.shows("PTA-41")
def test_their_configuration_tells_of_clipping_and_half_precision(pta):
    "What ours do is not hidden from theirs"

    class Config:
        def on_training_run_start(self, trainer):
            self.seen = (
                trainer.run_config.gradient_clip_value,
                trainer.run_config.mixed_precision,
                trainer._accelerator.mixed_precision,
            )

    plain, told = Config(), Config()
    ours(adapt(plain), n_epochs=1)
    ours(adapt(told), ClipGradCB(max_value=0.5), MixedPrecisionCB(), n_epochs=1)
    assert (plain.seen, told.seen) == ((None, "no", "no"), (0.5, "bf16", "bf16"))


def test_several_processes_are_told_of(monkeypatch):
    "Foreign callbacks believe that they are alone"
    monkeypatch.setattr("isaac_loop.interop.base.processes", lambda: (0, 2))
    trainer = Trainer(loaders(), F.cross_entropy, optim.SGD, make_model(), [BasicTrainCB(), adapt(Nemo010)])
    with pytest.warns(UserWarning, match="there is one process, but several train together"):
        trainer.fit(1)


@pytest.mark.shows("PTA-04")
def test_a_facade_is_kept_for_the_next_fit_and_its_history_begins_anew(pta):
    "`on_init_end` comes once for a trainer"
    seen = []
    callback = adapt(pta_recorder(pta, seen, "A"))
    trainer = ours(callback, n_epochs=1)
    facade = callback.facade
    silent(trainer.fit, 1)
    assert [o[1] for o in seen].count("on_init_end") == 1 and callback.facade is facade
    assert len(facade.run_history.get_metric_values("train_loss_epoch")) == 1
    other = ours(callback, n_epochs=1)
    assert (
        [o[1] for o in seen].count("on_init_end") == 2
        and callback.facade is not facade
        and other.n_updates == 5
    )


@pytest.mark.shows("PTA-19")
def test_a_subclass_hook_and_a_callback_do_the_same_job():
    "Their two ways of putting code at a moment are ours as well: a method of the trainer, or a callback"

    class CountingTrainer(Trainer):
        n = 0

        def after_batch(self):
            self.n += 1

    class CountCB:
        n = 0

        def after_batch(self, trainer):
            self.n += 1

    trainer = CountingTrainer(
        loaders(), F.cross_entropy, optim.SGD, make_model(), [BasicTrainCB(), CountCB()]
    )
    trainer.fit(2)
    assert trainer.n == trainer.CountCB.n == 14


# AIToolbox


@pytest.fixture(scope="module")
def ait():
    pytest.importorskip("aitoolbox", reason="AIToolbox is not installed")
    try:
        return silent(__import__, "aitoolbox.torchtrain.train_loop", fromlist=["TrainLoop"])[0]
    except ImportError as e:
        pytest.skip(f"AIToolbox cannot be imported: {e}")


BATCHES = list(zip(X[:40].split(8), Y[:40].split(8))), list(zip(X[40:].split(8), Y[40:].split(8)))


STAMP = re.compile(r"\d{4}(-\d\d){2}_\d\d(-\d\d){2}")


def ait_model():
    from aitoolbox.torchtrain.model import TTBasicModel

    class Net(TTBasicModel):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def forward(self, x):
            return self.net(x)

    return Net()


def theirs_ait(
    ait,
    *callbacks,
    n_epochs=3,
    lr=0.5,
    loss=None,
    accumulation=1,
    batches=BATCHES,
    opt=optim.SGD,
    model=None,
    **options,
):
    "Their train loop after a run"
    model = ait_model() if model is None else model
    loop = ait.TrainLoop(
        model, *batches, None, opt(model.parameters(), lr), loss or nn.CrossEntropyLoss(), **options
    )
    loop.device = torch.device("cpu")
    loop.printed = silent(loop.fit, n_epochs, callbacks=list(callbacks), grad_accumulation=accumulation)[1]
    return loop


def ours_ait(*callbacks, dls=None, **options):
    "The same with our trainer, which gets them with `fit` as theirs does"
    return ours(
        callbacks=[adapt(o) for o in callbacks],
        dls=dls or DataLoaders(*BATCHES),
        **dict(model=ait_model()) | options,
    )


def ait_recorder(seen, name, order=0, at=None):
    "A new callback that notes each of its calls, and may do something"
    from aitoolbox.torchtrain.callbacks.abstract import AbstractCallback

    def method(event):
        def told(self, *args):
            loop = self.train_loop_obj
            p = next(loop.model.parameters())
            seen.append(
                (
                    name,
                    event,
                    args,
                    loop.epoch,
                    loop.iteration,
                    loop.total_iteration_idx,
                    loop.should_execute_optimizer_update() if "on_epoch" not in event else None,
                    p.grad is None,
                    p.sum().item(),
                    tuple(loop.train_history["accumulated_loss"]) if event == "on_epoch_end" else None,
                )
            )
            if event == "on_train_loop_registration":
                loop.grad_cb_used = True
            if at:
                at(self, event)

        return told

    events = [
        o
        for o in vars(AbstractCallback)
        if o.startswith("on_") and o not in ("on_after_batch_prediction", "on_multiprocess_start")
    ]
    cls = type(name, (AbstractCallback,), {o: method(o) for o in events})
    return cls(name, execution_order=order)


@pytest.mark.shows("AIT-01 to AIT-07", "AIT-12 to AIT-14")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_toolbox_callbacks_get_the_same_calls_in_the_same_order_and_the_weights_are_the_same(
    ait, accumulation
):
    """Every event with its epoch, iteration, gradients and weights; the orders are theirs

    With two batches to an update, the gradient event comes for each batch, that of the optimizer for each update; with ours
    a gradient that only accumulates has not been divided yet, and a window that is not full is divided by its own length, so the number of
    batches is even here. Neither side calls `on_multiprocess_start` in a single process."""
    batches = BATCHES if accumulation == 1 else (BATCHES[0][:4], BATCHES[1])
    seen, found = [], []
    make = lambda log: [
        ait_recorder(log, "Late", 99),
        ait_recorder(log, "A"),
        ait_recorder(log, "B"),
        ait_recorder(log, "Early", -100),
    ]
    theirs = theirs_ait(ait, *make(seen), accumulation=accumulation, batches=batches)
    mine = ours(
        *map(adapt, make(found)),
        *([AccumulationCB(2, "mean")] if accumulation == 2 else []),
        dls=DataLoaders(*batches),
        model=ait_model(),
    )
    assert (
        {o[1] for o in found}
        == {o[1] for o in seen}
        >= {"on_after_gradient_update", "on_after_optimizer_step", "on_train_end"}
    )
    assert "on_multiprocess_start" not in {o[1] for o in found}
    if accumulation == 1:
        assert found == seen
    assert [o[:7] for o in found] == [o[:7] for o in seen] and same_weights(theirs.model, mine.model)
    n = [
        len([o for o in found if o[:2] == ("A", event)])
        for event in ("on_after_gradient_update", "on_after_optimizer_step")
    ]
    assert n == ([15, 15] if accumulation == 1 else [12, 6])


@pytest.mark.shows("AIT-11")
def test_the_gradient_events_need_no_switch(ait):
    "Theirs stay silent until a callback asks for them at registration"
    from aitoolbox.torchtrain.callbacks.abstract import AbstractCallback

    class Counts(AbstractCallback):
        n = 0

        def __init__(self):
            AbstractCallback.__init__(self, "counts")

        def on_after_optimizer_step(self):
            self.n += 1

    theirs, mine = Counts(), Counts()
    theirs_ait(ait, theirs)
    ours_ait(mine)
    assert (theirs.n, mine.n) == (0, 15)


@pytest.mark.shows("AIT-10")
def test_a_callback_that_overrides_nothing_has_no_effect(ait):
    from aitoolbox.torchtrain.callbacks.abstract import AbstractCallback

    idle = AbstractCallback("idle")
    assert same_weights(ours_ait(idle).model, ours_ait().model) and "idle" not in str(
        idle.train_loop_obj.callbacks_handler
    )


@pytest.mark.shows("AIT-12", "AIT-14", "AIT-17", "AIT-20", "AIT-24")
@pytest.mark.parametrize(
    "patience, min_delta, monitor",
    [(0, 0.0, "val_loss"), (1, 0.05, "val_loss"), (0, 0.0, "accumulated_loss"), (0, 0.05, "loss")],
)
def test_toolbox_early_stopping_stops_at_the_same_epoch(ait, patience, min_delta, monitor):
    "Same losses bit for bit, same epoch, same weights"
    from aitoolbox.torchtrain.callbacks.basic import EarlyStopping

    theirs = theirs_ait(ait, EarlyStopping(monitor, min_delta, patience), n_epochs=12, lr=0.9)
    callback = EarlyStopping(monitor, min_delta, patience)
    mine = ours_ait(callback, n_epochs=12, lr=0.9)
    losses = callback.train_loop_obj.train_history[monitor]
    assert losses == theirs.train_history[monitor] and len(mine.history) == 0 and 1 < len(losses) < 12
    assert same_weights(theirs.model, mine.model) and mine.printed[-1] == next(
        o for o in theirs.printed if o.startswith("Early stopping")
    )


@pytest.mark.shows("AIT-17", "AIT-25")
@pytest.mark.parametrize("threshold", [0.1, 10.0])
def test_toolbox_threshold_stopping_stops_at_the_same_epoch(ait, threshold):
    from aitoolbox.torchtrain.callbacks.basic import ThresholdEarlyStopping

    theirs, mine = (
        theirs_ait(ait, ThresholdEarlyStopping("val_loss", threshold, 1), n_epochs=6),
        ours_ait(ThresholdEarlyStopping("val_loss", threshold, 1), n_epochs=6),
    )
    assert same_weights(theirs.model, mine.model) and (mine.stop_reason is None) == (threshold == 10.0)


@pytest.mark.shows("AIT-17", "AIT-26")
def test_toolbox_nan_stopping_stops_at_the_end_of_the_epoch(ait):
    "With both"
    from aitoolbox.torchtrain.callbacks.basic import TerminateOnNaN

    class Loss(nn.Module):
        def forward(self, preds, targets):
            return F.cross_entropy(preds, targets) * float("inf")

    theirs, callback = theirs_ait(ait, TerminateOnNaN(), loss=Loss()), TerminateOnNaN()
    mine = ours_ait(callback, loss=Loss())
    assert mine.n_updates == theirs.total_iteration_idx + 1 == 5 and "Terminating on loss" in mine.printed[-1]


@pytest.mark.shows("AIT-19", "AIT-27")
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_toolbox_sees_that_all_predictions_are_the_same(ait, value):
    from aitoolbox.torchtrain.callbacks.basic import AllPredictionsSame
    from aitoolbox.torchtrain.model import TTBasicModel

    class Zero(TTBasicModel):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return (x[:, 0] * 0) * self.w

    loss = nn.MSELoss()
    batches = [(x, y.float()) for x, y in BATCHES[0]]
    loop = ait.TrainLoop(Zero(), batches, batches, None, optim.SGD([torch.zeros(1)], 0.1), loss)
    loop.device = torch.device("cpu")
    printed = silent(loop.fit, 3, callbacks=[AllPredictionsSame(value, stop_training=True)])[1]
    mine = ours(
        adapt(AllPredictionsSame(value, stop_training=True)),
        dls=DataLoaders(batches, batches),
        model=Zero(),
        loss=loss,
    )
    assert mine.epoch == loop.epoch == (0 if value == 0 else 2)
    assert [o for o in printed if "All the predicted" in o or "Executing" in o] == mine.printed


@pytest.mark.shows("AIT-05", "AIT-20", "AIT-52", "AIT-53")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["GradNormClip", "GradValueClip"])
def test_toolbox_clipping_clips_the_gradients_of_the_update(ait, kind, accumulation):
    "Also when two batches make an update"
    from aitoolbox.torchtrain.callbacks import gradient

    clip = getattr(gradient, kind)
    batches = BATCHES if accumulation == 1 else (BATCHES[0][:4], BATCHES[1])
    theirs = theirs_ait(ait, clip(0.05), accumulation=accumulation, batches=batches)
    extra = [AccumulationCB(2, "mean")] if accumulation == 2 else []
    mine, free = [
        ours(*cbs, *extra, dls=DataLoaders(*batches), model=ait_model()) for cbs in ([adapt(clip(0.05))], [])
    ]
    assert same_weights(theirs.model, mine.model) and not same_weights(mine.model, free.model)


@pytest.mark.shows("AIT-20", "AIT-46 to AIT-50")
def test_toolbox_schedules_set_the_same_rates(ait):
    "Stepped at the end of epochs, or of batches that update; on the validation loss, or on any metric"
    from aitoolbox.torchtrain.schedulers import basic

    made = [
        lambda: basic.StepLRScheduler(1, gamma=0.5),
        lambda: basic.MultiStepLRScheduler([1, 2], gamma=0.1),
        lambda: basic.LambdaLRScheduler(lambda n: 0.9**n, execute_epoch_end=False, execute_batch_end=True),
        lambda: basic.ReduceLROnPlateauScheduler(patience=0, threshold=0.5),
        lambda: basic.ReduceLROnPlateauMetricScheduler("val_loss", patience=0, threshold=0.5),
        lambda: basic.GeneralLRSchedulerCallback(optim.lr_scheduler.ExponentialLR, gamma=0.7),
    ]
    for make in made:
        theirs, callback = theirs_ait(ait, make()), make()
        mine = ours_ait(callback)
        assert mine.opt.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"] != 0.5, type(callback)
        assert same_weights(theirs.model, mine.model) and callback.train_loop_obj.get_schedulers() == [
            callback
        ]


@pytest.mark.shows("AIT-07", "AIT-31")
def test_toolbox_functions_run_at_the_moments_they_were_given(ait):
    "Several of one class live together under names of their own"
    from aitoolbox.torchtrain.callbacks.basic import FunctionOnTrainLoop

    switches = [
        "tl_registration",
        "train_begin",
        "epoch_begin",
        "batch_begin",
        "after_gradient_update",
        "after_optimizer_step",
        "batch_end",
        "epoch_end",
        "train_end",
    ]
    logs = [], []

    def make(log):
        return [
            FunctionOnTrainLoop(
                lambda loop, o=o: log.append((o, loop.epoch, loop.total_iteration_idx)), **{o: True}
            )
            for o in switches
        ]

    theirs = theirs_ait(ait, *make(logs[0]))
    mine = ours(
        *(adapt(o, name=f"f{i}") for i, o in enumerate(make(logs[1]))),
        dls=DataLoaders(*BATCHES),
        model=ait_model(),
    )
    assert (
        logs[0] == logs[1]
        and {o for o, *_ in logs[1]} == set(switches)
        and same_weights(theirs.model, mine.model)
    )


@pytest.mark.shows("AIT-16", "AIT-23")
def test_the_toolbox_handler_lists_its_callbacks(ait):
    "Event by event, by name or class, with `+=`; callbacks may also register others"
    from aitoolbox.torchtrain.callbacks.basic import (
        EarlyStopping,
        ListRegisteredCallbacks,
        TerminateOnNaN,
        ThresholdEarlyStopping,
    )

    stop, listing = EarlyStopping(), ListRegisteredCallbacks()

    def add(self, event):
        handler = self.train_loop_obj.callbacks_handler
        if event == "on_train_begin":
            handler += [TerminateOnNaN()]
            handler + [ThresholdEarlyStopping("val_loss", 9.0)]

    mine = ours_ait(listing, ait_recorder([], "A", 200, add), stop)
    theirs = theirs_ait(ait, ListRegisteredCallbacks(), ait_recorder([], "A", 200), EarlyStopping())
    wanted = [o for o in theirs.printed if "execution_order" in o]
    assert [o for o in mine.printed if "execution_order" in o] == wanted and len(wanted) > 5
    handler = stop.train_loop_obj.callbacks_handler
    assert (
        len(handler) == 5
        and EarlyStopping in handler
        and "TerminateOnNaN" in handler
        and "none" not in handler
        and AccumulationCB not in handler
    )


@pytest.mark.shows("AIT-09", "AIT-19")
def test_one_validation_pass_serves_all_who_ask(ait):
    "Their store and ours: one pass per update, unless forced; batch by batch with callbacks"
    got = []
    passes = []

    def ask(self, event):
        if event != "on_epoch_end":
            return
        loop = self.train_loop_obj
        got.append(
            [
                loop.predict_on_validation_set()[0],
                loop.predict_on_validation_set()[1],
                loop.predict_on_validation_set(force_prediction=True)[0],
                loop.evaluate_loss_on_validation_set(),
                loop.evaluate_loss_on_train_set(float_dict_format=True),
            ]
        )

    def with_batches(log):
        callback = ait_recorder([], "A", 5, ask)
        type(callback).on_after_batch_prediction = lambda self, y_pred, y_true, metadata, info: log.append(
            (y_pred.shape, y_true.sum().item(), metadata, info)
        )
        type(callback).on_train_end = lambda self: self.train_loop_obj.predict_on_validation_set(
            force_prediction=True, execute_callbacks=True
        )
        return callback

    class CountsCB:
        order = Order.STEP

        def before_epoch(self, trainer):
            passes.append(trainer.training)

    logs = [], []
    theirs_ait(ait, with_batches(logs[0]))
    n = len(got)
    ours(
        adapt(with_batches(logs[1])),
        adapt(ait_recorder([], "B", 6, ask)),
        CountsCB(),
        dls=DataLoaders(*BATCHES),
        model=ait_model(),
    )
    for mine, theirs in zip(got[n::2], got[:n], strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(mine, theirs))
    assert logs[0] == logs[1] and len(logs[1]) == 2
    # In each epoch a training and a validation pass, a pass for predictions and two forced ones, one over the training set; predictions once more at the end
    assert len(passes) == 3 * (2 + 3 + 1) + 1


@pytest.mark.shows("AIT-19", "AIT-20")
def test_a_loss_that_nobody_reads_costs_no_pass(ait):
    "Theirs runs over the whole training set after each epoch"
    passes = []

    class CountsCB:
        order = Order.STEP

        def before_epoch(self, trainer):
            passes.append(trainer.training)

    recorder = ait_recorder([], "A")
    ours(adapt(recorder), CountsCB(), dls=DataLoaders(*BATCHES), model=ait_model())
    history = recorder.train_loop_obj.train_history
    assert passes == [True, False] * 3 and len(history["val_loss"]) == len(history["accumulated_loss"]) == 3
    assert history["loss"][:2] == [None, None] and len(history["loss"]) == 3 and len(passes) == 7


@pytest.mark.shows("AIT-18")
def test_messages_between_toolbox_callbacks(ait):
    "Kept for ever, until read, until the end of the epoch, or overwritten"
    from aitoolbox.torchtrain.train_loop.components.message_passing import MessageHandling

    def talk(log):
        def at(self, event):
            service = self.message_service
            if event == "on_epoch_begin":
                for o in MessageHandling:
                    service.write_message(o.value, self.train_loop_obj.epoch, o)
                service.write_message("two", 1, [MessageHandling.UNTIL_READ, MessageHandling.OVERWRITE])
                service.write_message("default", 1)
            if event in ("on_epoch_begin", "on_epoch_end", "on_train_end"):
                log.append(
                    [
                        service.read_messages(o)
                        for o in (*(o.value for o in MessageHandling), "two", "default", "none")
                    ]
                )

        return at

    logs = [], []
    theirs_ait(ait, ait_recorder([], "A", 0, talk(logs[0])))
    callback = ait_recorder([], "A", 0, talk(logs[1]))
    ours_ait(callback)
    assert logs[0] == logs[1] and logs[1][-1][0] == [0, 1, 2]
    with pytest.raises(TypeError, match="cannot be kept 'until_red'.*Did you mean `until_read`"):
        callback.message_service.write_message("a", 1, "until_red")
    with pytest.raises(ValueError, match="cannot be kept in two ways"):
        callback.message_service.write_message("a", 1, list(MessageHandling)[:2])


@pytest.mark.shows("AIT-20")
def test_the_toolbox_history_takes_and_shows_metrics(ait):
    "What is inserted stands in our row; our columns can be read; a missing one is named"

    def insert(self, event):
        if event == "on_epoch_end":
            self.train_loop_obj.insert_metric_result_into_history(
                "val_score", 0.25 * self.train_loop_obj.epoch
            )

    recorder = ait_recorder([], "A", 0, insert)
    mine = ours(
        adapt(recorder),
        MetricsCB(accuracy=MulticlassAccuracy()),
        dls=DataLoaders(*BATCHES),
        model=ait_model(),
    )
    history = recorder.train_loop_obj.train_history
    assert mine.history["val_score"] == history["val_score"] == [0.0, 0.25, 0.5]
    assert history["accuracy"] == mine.history["accuracy"] and history.train_history["val_score"] == [
        0.0,
        0.25,
        0.5,
    ]
    assert {"accumulated_loss", "loss", "val_loss", "accuracy", "val_score"} <= set(
        history.keys()
    ) and "acuracy" not in history
    with pytest.raises(KeyError, match="has no `acuracy`.*Did you mean `accuracy`"):
        history["acuracy"]


@pytest.mark.shows("AIT-12", "AIT-20")
def test_an_error_names_the_toolbox_callback_and_the_attribute(ait):
    def ask(self, event):
        if event == "on_epoch_begin":
            return self.train_loop_obj.batch_preds

    with pytest.raises(AttributeError, match="`A` asked its trainer for `batch_preds`.*Offered are"):
        ours_ait(ait_recorder([], "A", 0, ask))

    def test_set(self, event):
        if event == "on_train_end":
            self.train_loop_obj.predict_on_test_set()

    with pytest.raises(ValueError, match="`A` asked for the test set, but there is no `dls.test`"):
        ours_ait(ait_recorder([], "A", 0, test_set))


@pytest.mark.shows("AIT-20")
def test_a_test_set_of_the_loaders_is_evaluated_when_asked_for(ait):
    def ask(self, event):
        if event == "on_train_end":
            self.result = (
                self.train_loop_obj.train_history["train_end_test_loss"][-1],
                len(self.train_loop_obj.predict_on_test_set()[0]),
            )

    dls = DataLoaders(*BATCHES)
    dls.test = BATCHES[1][:1]
    recorder = ait_recorder([], "A", 0, ask)
    mine = ours_ait(recorder, dls=dls)
    mine.model.eval()
    assert recorder.result == (
        pytest.approx(F.cross_entropy(mine.model(dls.test[0][0]), dls.test[0][1]).item()),
        8,
    )


def ait_classes():
    "A model as in their first example: it answers with class numbers, and with the numbers of rows"

    class Net(type(ait_model())):
        def get_predictions(self, batch_data, device):
            return (
                self(batch_data[0]).argmax(1),
                batch_data[1],
                dict(first=batch_data[0][:, 0], rows=list(range(len(batch_data[1])))),
            )

    return Net()


@pytest.mark.shows("AIT-19")
def test_the_toolbox_model_predicts_in_its_own_way(ait):
    "Class numbers and further data, as at home; batch by batch for those who listen"
    from aitoolbox.torchtrain.callbacks.abstract import AbstractCallback

    class Looks(AbstractCallback):
        def __init__(self):
            super().__init__("looks")
            self.seen = []

        def on_after_batch_prediction(self, *batch):
            self.batches.append(batch)

        def on_epoch_end(self):
            self.batches = []
            found = self.train_loop_obj.predict_on_validation_set(execute_callbacks=True)
            self.seen.append((found, self.batches))

    looks = Looks(), Looks()
    theirs = theirs_ait(ait, looks[0], model=ait_classes())
    mine = ours_ait(looks[1], model=ait_classes())
    for ((*tensors, further), batches), ((*our_tensors, our_further), our_batches) in zip(
        *(o.seen for o in looks), strict=True
    ):
        assert all(torch.equal(*o) for o in zip(tensors, our_tensors, strict=True)) and tensors[0].shape == (
            16,
        )
        assert torch.equal(further["first"], our_further["first"]) and further["rows"] == our_further[
            "rows"
        ] == [*range(8), *range(8)]
        assert (
            [(len(o[0]), o[3]) for o in batches]
            == [(len(o[0]), o[3]) for o in our_batches]
            == [(8, {"type": "validation"})] * 2
        )
    assert same_weights(theirs.model, mine.model)


@pytest.mark.shows("AIT-32", "AIT-33")
def test_the_first_toolbox_example_reports_the_same_numbers(ait):
    "Results of class numbers after each epoch, printed and watched"
    from aitoolbox.experiment.result_package.basic_packages import ClassificationResultPackage
    from aitoolbox.torchtrain.callbacks.basic import AllPredictionsSame
    from aitoolbox.torchtrain.callbacks.performance_eval import (
        ModelPerformanceEvaluation,
        ModelPerformancePrintReport,
    )

    def made():
        return [
            ModelPerformanceEvaluation(ClassificationResultPackage(), {}, on_train_data=True),
            ModelPerformancePrintReport(["train_Accuracy", "val_Accuracy"]),
            AllPredictionsSame(0.0, stop_training=True),
        ]

    theirs, mine = theirs_ait(ait, *made(), model=ait_classes()), ours_ait(*made(), model=ait_classes())
    for name in ("train_Accuracy", "val_Accuracy"):
        assert mine.history[name] == theirs.train_history[name]

    def reported(printed):
        return [o for o in printed if "Accuracy:" in o]

    assert reported(mine.printed) == reported(theirs.printed) and len(reported(mine.printed)) == 8


@pytest.mark.shows("AIT-30")
@pytest.mark.parametrize("n_train,n_valid", [(2, 1), (1, 0)])
def test_toolbox_subsets_are_what_is_trained_and_measured(ait, n_train, n_valid):
    "Its loaders are replaced for the run; ours stay as they are"
    from aitoolbox.torchtrain.callbacks.basic import DataSubsetTestRun

    theirs = theirs_ait(ait, DataSubsetTestRun(n_train, n_valid))
    seen = []
    mine = ours_ait(
        DataSubsetTestRun(n_train, n_valid),
        ait_recorder(
            seen,
            "notes",
            at=lambda cb, event: (
                seen.append(dict(cb.train_loop_obj.train_history)) if event == "on_epoch_end" else None
            ),
        ),
    )
    assert (
        same_weights(theirs.model, mine.model)
        and mine.n_updates == 3 * n_train
        and mine.updates_per_epoch == n_train
    )
    assert len(mine.dls.train) == 5 and all(
        seen[-2][name] == theirs.train_history[name] for name in ("loss", "val_loss", "accumulated_loss")
    )
    with pytest.raises(ValueError, match="Test loader was not provided"):
        ours_ait(DataSubsetTestRun(1, 1, 1))


@pytest.mark.shows("AIT-39", "AIT-41", "AIT-43")
@pytest.mark.parametrize("every", [None, 2])
def test_toolbox_checkpoints_are_the_same_files(ait, tmp_path, every):
    "`ModelCheckpoint` after each epoch, `ModelIterationCheckpoint` after each `every` batches, with the hyper-parameters beside them"
    from aitoolbox.torchtrain.callbacks.model_save import ModelCheckpoint, ModelIterationCheckpoint

    found = []
    for name, run in (("theirs", lambda cb: theirs_ait(ait, cb)), ("ours", ours_ait)):
        (tmp_path / name).mkdir()
        options = ("digits", "wide", tmp_path / name, dict(lr=0.5, experiment_file_path=__file__), "local")
        run(ModelCheckpoint(*options) if every is None else ModelIterationCheckpoint(every, *options))
        (folder,) = (tmp_path / name / "digits").iterdir()
        saved = sorted((folder / "checkpoint_model").iterdir())
        found.append(
            (
                [STAMP.sub("", o.name) for o in saved],
                [torch.load(o, weights_only=False) for o in saved],
                (folder / "hyperparams_list.txt").read_text(),
            )
        )
    (names, theirs, about), (our_names, mine, our_about) = found
    assert names == our_names and about == our_about and len(mine) == (3 if every is None else 7 + 3)
    for a, b in zip(theirs, mine):
        assert (a["epoch"], a["iteration_idx"]) == (b["epoch"], b["iteration_idx"]) and all(
            torch.equal(*o) for o in zip(a["model_state_dict"].values(), b["model_state_dict"].values())
        )


@pytest.mark.shows("AIT-21", "AIT-22")
def test_toolbox_callbacks_infer_the_experiment_from_ours(ait, tmp_path):
    "`ExperimentCB` names project, experiment and folder; without it their error comes with our remedy"
    from aitoolbox.torchtrain.callbacks.performance_eval import ModelTrainHistoryFileWriter

    experiment = ExperimentCB(tmp_path, "digits", "wide", hyper=dict(lr=0.5))
    callback = ModelTrainHistoryFileWriter(file_format="csv")
    trainer = ours(experiment, callbacks=[adapt(callback)], dls=DataLoaders(*BATCHES), model=ait_model())
    assert (callback.project_name, callback.experiment_name, callback.local_model_result_folder_path) == (
        "digits",
        "wide",
        str(tmp_path),
    )
    assert callback.train_loop_obj.hyperparams == dict(lr=0.5) and callback.cloud_save_mode == "local"
    assert len((trainer.experiment.folder / "results" / "results.csv").read_text().splitlines()) == 4
    with pytest.raises(AttributeError, match="does not support automatic project folder") as found:
        ours_ait(ModelTrainHistoryFileWriter())
    assert "Give the trainer `ExperimentCB(root, project, name)`" in found.value.__notes__[0]


@pytest.mark.shows("AIT-42", "AIT-78")
def test_the_fully_tracked_toolbox_example_leaves_the_same_files(ait, tmp_path):
    "Their loop with checkpoints and a save at the end is `ExperimentCB` and the two callbacks here; all lies in one folder"
    from aitoolbox.experiment.result_package.basic_packages import ClassificationResultPackage
    from aitoolbox.torchtrain.callbacks.basic import EarlyStopping
    from aitoolbox.torchtrain.callbacks.model_save import ModelCheckpoint, ModelTrainEndSave
    from aitoolbox.torchtrain.callbacks.performance_eval import (
        ModelPerformanceEvaluation,
        ModelTrainHistoryFileWriter,
    )

    class Loop(ait.TrainLoop):
        project_name, experiment_name, local_model_result_folder_path = (
            "digits",
            "wide",
            str(tmp_path / "theirs"),
        )
        cloud_save_mode = bucket_name = cloud_dir_prefix = None

    def made(name):
        where = "digits", "wide", tmp_path / name, dict(experiment_file_path=__file__)
        (tmp_path / name).mkdir()
        return [
            ModelPerformanceEvaluation(ClassificationResultPackage(), {}),
            ModelTrainHistoryFileWriter(),
            EarlyStopping(patience=5),
            ModelCheckpoint(*where, "local", rm_subopt_local_models=True),
            ModelTrainEndSave(*where, ClassificationResultPackage(), cloud_save_mode="local"),
        ]

    theirs_ait(SimpleNamespace(TrainLoop=Loop), *made("theirs"), model=ait_classes())
    callbacks = made("ours")
    mine = ours(
        ExperimentCB(tmp_path / "ours", "digits", "wide"),
        callbacks=[adapt(o) for o in callbacks],
        dls=DataLoaders(*BATCHES),
        model=ait_classes(),
    )
    (folder,) = (tmp_path / "theirs" / "digits").iterdir()

    def names(folder):
        return {STAMP.sub("", str(o.relative_to(folder))) for o in folder.rglob("*") if o.is_file()}

    assert names(folder) <= names(mine.experiment.folder) and len(names(folder)) > 6
    assert sorted((folder / "results" / "results.txt").open()) == sorted(
        (mine.experiment.folder / "results" / "results.txt").open()
    )


def test_toolbox_callbacks_that_cannot_work_say_so_at_once(ait):
    "Going on from their checkpoints would train all epochs again; loaders made in further processes would never be made"
    from aitoolbox.torchtrain.callbacks.ddp import InMultiProcessDataLoad
    from aitoolbox.torchtrain.callbacks.model_load import ModelLoadContinueTraining

    with pytest.raises(
        TypeError, match="`ModelLoadContinueTraining.on_train_loop_registration` sets `epoch`.*`CheckpointCB"
    ):
        adapt(ModelLoadContinueTraining("2020-01-01_00-00-00"))
    with pytest.warns(UserWarning, match="`InMultiProcessDataLoad.on_multiprocess_start` will not be called"):
        adapt(InMultiProcessDataLoad(list))


@pytest.mark.shows("AIT-20")
def test_all_other_toolbox_callbacks_ask_for_what_is_there(ait):
    "Their code, read without running it"
    from importlib import import_module

    modules = [
        import_module(f"aitoolbox.torchtrain.{o}")
        for o in (
            "callbacks.abstract",
            "callbacks.basic",
            "callbacks.ddp",
            "callbacks.gradient",
            "callbacks.model_save",
            "callbacks.performance_eval",
            "callbacks.tensorboard",
            "callbacks.wandb",
            "schedulers.basic",
            "schedulers.warmup",
        )
    ]
    classes = {
        o
        for m in modules
        for o in vars(m).values()
        if isinstance(o, type) and hasattr(o, "register_train_loop_object")
    }
    loop = AIToolboxCB.facade_class(
        Trainer(DataLoaders(*BATCHES), F.cross_entropy, optim.SGD, make_model(), [])
    )
    asked = {
        name
        for cls in classes
        for _, name, _ in uses(cls.__new__(cls), AIToolboxCB.variables, AIToolboxCB.attributes)
    }
    assert len(classes) > 30 and {"predict_on_validation_set", "early_stop", "parse_loss"} <= asked
    assert not [o for o in asked if o not in vars(loop) and not hasattr(type(loop), o)]


@pytest.mark.shows("AIT-01", "AIT-12", "AIT-20")
def test_what_toolbox_callbacks_use_most_is_there(ait):
    recorder = ait_recorder([], "A")
    recorder.device_idx_execution = 0  # With one device it always runs
    mine = ours_ait(recorder)
    loop = recorder.train_loop_obj
    assert (
        loop.epoch == 2
        and loop.iteration == 4
        and loop.total_iteration_idx == 14
        and loop.num_epochs == 3
        and loop.get_num_training_steps() == 15
        and loop.is_main_process()
    )
    assert (
        loop.model is mine.model
        and loop.optimizer is mine.opt
        and loop.criterion is mine.loss_func
        and loop.callbacks == [recorder]
    )
    assert (
        not loop.ddp_training_mode
        and loop.device == torch.device("cpu")
        and len(loop.experiment_timestamp) == 19
        and loop.train_loader is mine.dls.train
    )


# Sonosco: written from its documentation


class Plain:
    "A callback in the manner of Sonosco's base class"

    def __init__(self, at=None):
        self.calls, self.closed, self.at = [], 0, at

    def __call__(self, epoch, step, performance_measures, context, validation=False):
        self.calls.append(
            (
                epoch,
                step,
                torch.is_grad_enabled(),
                next(context.model.parameters()).sum().item(),
                next(context.model.parameters()).grad is None,
            )
        )
        if self.at:
            self.at(epoch, step, performance_measures, context)

    def close(self):
        self.closed += 1


@pytest.mark.shows("SON-01", "SON-02", "SON-03", "SON-05", "SON-08", "SON-32")
def test_a_plain_callback_is_called_after_every_update_without_gradients_and_closed():
    "Epochs from 1, steps from 0; not in validation passes"
    plain, weights = Plain(), []

    class WeightsCB:
        on_valid = False

        def after_step(self, trainer):
            weights.append(next(trainer.model.parameters()).sum().item())

    mine = ours(adapt(plain), WeightsCB())
    assert [o[:2] for o in plain.calls] == [(epoch, step) for epoch in (1, 2, 3) for step in range(5)]
    assert (
        not any(o[2] for o in plain.calls)
        and [o[3] for o in plain.calls] == weights
        and all(o[4] for o in plain.calls)
    )
    assert plain.closed == 1 and mine.Plain.foreign is plain and same_weights(mine.model, ours().model)


@pytest.mark.shows("SON-02")
def test_a_plain_callback_is_closed_after_a_stop_and_after_an_error():
    "Theirs was not closed after an error"
    plain = Plain()
    ours(adapt(plain), LimitCB(updates=2))
    assert plain.closed == 1 and len(plain.calls) == 2

    def fail(*args):
        raise RuntimeError("broken")

    for broken in (Plain(fail), Plain()):

        def after_batch(trainer):
            raise RuntimeError("broken")

        with pytest.raises(RuntimeError, match="broken"):
            ours(adapt(broken), after_batch)
        assert broken.closed == 1


@pytest.mark.shows("SON-04")
def test_measures_are_means_since_the_last_refresh_and_the_validation_joins_at_the_end():
    "Differs: the first batch has measures, too; metrics are those of the validation, since ours are not measured while training unless asked for."
    seen, losses, norms = [], [], []

    class WatchCB:
        on_valid, order = False, Order.REPORT

        def before_step(self, trainer):
            norms.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).norm().item())

        def after_batch(self, trainer):
            losses.append(trainer.loss.item())

    mine = ours(
        adapt(Plain(lambda e, s, m, c: seen.append(dict(m))), test_step=2),
        MetricsCB(accuracy=MulticlassAccuracy()),
        WatchCB(),
        n_epochs=2,
    )
    mean = lambda x, *i: pytest.approx(sum(x[o] for o in i) / len(i))
    assert [o["loss"] for o in seen[:5]] == [
        mean(losses, 0),
        mean(losses, 0, 1),
        mean(losses, 0, 1),
        mean(losses, 2, 3),
        mean(losses, 4),
    ]
    assert [o["gradient_norm"] for o in seen[:5]] == [
        mean(norms, 0),
        mean(norms, 0, 1),
        mean(norms, 0, 1),
        mean(norms, 2, 3),
        mean(norms, 4),
    ]
    assert [set(o) for o in seen[:5]] == [{"loss", "gradient_norm"}] * 4 + [
        {"loss", "gradient_norm", "val_loss", "val_accuracy"}
    ]
    assert [seen[o]["val_loss"] for o in (4, 9)] == [
        pytest.approx(o) for o in mine.history["valid_loss"]
    ] and seen[9]["val_accuracy"] == mine.history["accuracy"][-1]


@pytest.mark.shows("SON-04")
def test_measures_that_nobody_reads_wait_for_nothing():
    "No number is asked from the device, and no validation pass is run"
    passes = []

    class CountsCB:
        order = Order.STEP

        def before_epoch(self, trainer):
            passes.append(trainer.training)

    mode = RefuseToWait()
    with mode:
        ours(
            adapt(lambda epoch, step, measures, trainer: "val_loss" in measures, name="plain", test_step=2),
            CountsCB(),
            InsideCB(mode),
        )
    assert passes == [True, False] * 3

    def read(epoch, step, measures, trainer):
        return measures["loss"]

    with pytest.raises(AssertionError), mode:
        ours(adapt(read), InsideCB(mode))
    mode.inside = False


@pytest.mark.shows("SON-04")
def test_a_validation_on_the_last_batch_changes_nothing():
    assert same_weights(ours(adapt(lambda e, s, m, c: dict(m), name="plain")).model, ours().model)


@pytest.mark.shows("SON-06")
def test_stop_training_takes_effect_at_the_end_of_the_epoch():
    plain = Plain(
        lambda epoch, step, measures, trainer: trainer.stop_training() if (epoch, step) == (2, 1) else None
    )
    mine = ours(adapt(plain), n_epochs=5)
    assert plain.calls[-1][:2] == (2, 4) and mine.n_updates == 10 and "asked to stop" in mine.stop_reason
    silent(mine.fit, 1)
    assert mine.stop_reason is None and plain.closed == 2


@pytest.mark.shows("SON-08")
def test_the_context_is_the_trainer():
    "Every member can be read and set"

    def use(epoch, step, measures, trainer):
        assert (
            trainer.n_updates == 5 * (epoch - 1) + step + 1
            and trainer.loss is mine.loss
            and trainer.optimizer is mine.opt
        )
        trainer.note = step
        trainer.optimizer.param_groups[0]["lr"] = 0.25

    mine = Trainer(loaders(), F.cross_entropy, optim.SGD, make_model(), [BasicTrainCB(), adapt(use)])
    mine.fit(1)
    assert mine.note == 4 and mine.opt.param_groups[0]["lr"] == 0.25

    def ask(epoch, step, measures, trainer):
        return trainer.modle

    with pytest.raises(AttributeError, match="asked its trainer for `modle`"):
        ours(adapt(ask))


@pytest.mark.shows("SON-03", "SON-05")
def test_a_fifth_argument_is_served_and_fewer_than_four_are_refused():
    got = []
    ours(
        adapt(lambda epoch, step, measures, trainer, validation: got.append(validation), name="five"),
        n_epochs=1,
    )
    assert got == [False] * 5
    for wrong in (lambda loss: 0, lambda a, b, c, d, e, f: 0):
        with pytest.raises(TypeError, match=r"cannot be called as `cb\(epoch, step, measures, trainer\)`"):
            adapt(wrong)
    with pytest.raises(ValueError, match="`test_step` is 0"):
        adapt(lambda a, b, c, d: 0, test_step=0)


@pytest.mark.shows("SON-05")
def test_plain_callbacks_are_added_like_any_other():
    "Theirs: `set_callbacks`, `add_callback`"
    calls = []
    trainer = Trainer(loaders(), F.cross_entropy, optim.SGD, make_model(), [BasicTrainCB()])
    trainer.add_callback(adapt(lambda *args: calls.append(args[1]), name="plain"))
    trainer.fit(1)
    trainer.remove_callback("plain")
    trainer.fit(1)
    assert calls == list(range(5))


# NeMo 0.x: cannot be installed beside this library (it wants torch 1.x), so these callbacks are written from its documentation


class Nemo010:
    "In the manner of 0.10: methods take nothing and look at `self.action`"

    def __init__(self):
        self.seen = []

    def on_action_start(self):
        self._note("action_start")

    def on_epoch_start(self):
        self._note("epoch_start")

    def on_iteration_start(self):
        self._note("iteration_start")

    def on_iteration_end(self):
        self._note("iteration_end")

    def on_epoch_end(self):
        self._note("epoch_end")

    def on_action_end(self):
        self._note("action_end")

    def _note(self, what):
        self.seen.append(
            (
                what,
                self.action.step,
                self.action.learning_rate,
                self.action.local_rank,
                self.action.global_rank,
            )
        )


class Nemo011:
    "In the manner of 0.11: methods take a state"

    def __init__(self):
        self.seen = []

    def on_train_start(self, state):
        self.seen.append(("train_start", state["step"]))

    def on_batch_start(self, state):
        self.seen.append(("batch_start", state["step"]))

    def on_batch_end(self, state):
        self.seen.append(("batch_end", state["step"]))

    def on_step_start(self, state):
        self.seen.append(("step_start", state["step"]))

    def on_step_end(self, state):
        self.seen.append(
            (
                "step_end",
                state["step"],
                state["epoch"],
                state["tensors"]["loss"].item(),
                tuple(state.get_tensor("preds").shape),
            )
        )

    def on_train_end(self, state):
        self.seen.append(("train_end", state["step"]))


@pytest.mark.shows("NEMO-01 to NEMO-05")
def test_nemo_callbacks_get_their_events_once_per_update():
    "A batch that only accumulates is no iteration; the rate and the ranks are known"
    nemo, other = Nemo010(), Nemo010()
    ours(adapt(nemo), adapt(other, name="other"), AccumulationCB(2), n_epochs=1)
    rows = [
        ("action_start", 0),
        ("epoch_start", 0),
        *((f"iteration_{o}", n) for n in range(3) for o in ("start", "end")),
        ("epoch_end", 3),
        ("action_end", 3),
    ]
    assert (
        [o[:2] for o in nemo.seen] == rows
        and all(o[2:] == (0.5, 0, 0) for o in nemo.seen)
        and other.seen == nemo.seen
    )


@pytest.mark.shows("NEMO-02", "NEMO-03", "NEMO-07")
def test_nemo_states_give_batches_steps_and_tensors_by_name():
    nemo, losses = Nemo011(), []

    class LossCB:
        on_valid = False

        def after_step(self, trainer):
            losses.append(trainer.loss.item())

    mine = ours(adapt(nemo), LossCB(), AccumulationCB(2), n_epochs=1)
    assert [o[0] for o in nemo.seen] == [
        "train_start",
        *["step_start", "batch_start", "batch_end", "batch_start", "step_end", "batch_end"] * 2,
        "step_start",
        "batch_start",
        "step_end",
        "batch_end",
        "train_end",
    ]
    ends = [o for o in nemo.seen if o[0] == "step_end"]
    assert (
        [o[1:3] for o in ends] == [(0, 0), (1, 0), (2, 0)]
        and [o[3] for o in ends] == losses
        and ends[0][4] == (8, 2)
    )
    facade = mine.Nemo011.facade
    assert {"input_0", "target_0"} <= set(facade.tensors)
    with pytest.raises(LookupError, match="no tensor `inputs`.*Did you mean `input_0`"):
        facade.get_tensor("inputs")


@pytest.mark.shows("NEMO-06")
def test_any_object_is_a_callback_and_there_may_be_several_of_a_kind():
    "NeMo takes only its own base class, and one loss logger at a time"

    class Ducks:
        def on_iteration_end(self, state):
            self.n = state.step

    ducks = Ducks(), Ducks()
    ours(*(adapt(o, name=f"duck{i}") for i, o in enumerate(ducks)))
    assert [o.n for o in ducks] == [14, 14]


# What `adapt` takes, and what it leaves as it was


class MistypedAccelerated:
    def on_training_run_start(self, trainer, **kwargs):
        "Nothing"

    def on_train_step_ends(self, trainer, **kwargs):
        "Never"


class Keras:
    def on_predict_begin(self, logs=None):
        "Never"


def test_what_follows_no_protocol_is_refused_with_those_that_there_are():
    class Near:
        def on_train_loop_registraton(self):
            "Never"

    with pytest.raises(
        TypeError,
        match="`Near` follows no protocol.*Did you mean `on_train_loop_registration`.*pytorch-accelerated.*plain callables",
    ):
        adapt(Near())
    with pytest.raises(
        TypeError, match=r"`Keras` follows no protocol.*\['on_predict_begin'\].*Known are AIToolbox"
    ):
        adapt(Keras())
    for wrong in (3, "abc", None, object()):
        with pytest.raises(TypeError, match="follows no protocol"):
            adapt(wrong)
    with pytest.raises(TypeError, match="`MetricsCB` answers our own events"):
        adapt(MetricsCB())

    def after_batch(trainer):
        "Ours"

    with pytest.raises(TypeError, match="`after_batch` answers our own events"):
        adapt(after_batch)
    with pytest.raises(TypeError, match="has been adapted already"):
        adapt(adapt(Plain()))


def test_a_foreign_callback_that_was_not_adapted_is_told_about_it(pta):
    "Those of pytorch-accelerated answer any question with an error of their own, which has no text"
    from pytorch_accelerated.callbacks import TrainerCallback

    with pytest.raises(Exception) as e:
        ours(TrainerCallback())
    assert any("`isaac_loop.interop.adapt" in o for o in e.value.__notes__)
    with pytest.raises(ValueError, match="has no method named after an event.*`isaac_loop.interop.adapt"):
        ours(ToolboxNotes())
    with pytest.raises(ValueError) as e:
        ours(SimpleNamespace(on_train=True))
    assert "adapt" not in str(e.value)


def test_a_method_that_is_nearly_an_event_is_named():
    with pytest.warns(
        UserWarning,
        match="`MistypedAccelerated.on_train_step_ends` is no event of pytorch-accelerated.*Did you mean `on_train_step_end`",
    ):
        adapt(MistypedAccelerated())


def test_foreign_callbacks_stay_out_of_runs_on_the_side():
    "Their order is above that of what records; predictions in between wake nobody, and nothing of the facade is lost"
    plain, nemo = Plain(), Nemo010()
    trainer = ours(adapt(plain), adapt(nemo), n_epochs=1)
    before = len(plain.calls), len(nemo.seen)
    trainer.get_preds()
    assert before == (len(plain.calls), len(nemo.seen)) and all(
        o.order > Order.RECORD for o in trainer.callbacks[1:]
    )
    with trainer.snapshot():
        silent(trainer.fit, 1)
    assert "Plain" in str(trainer.summarize_callbacks())


@pytest.mark.shows("PTA-15")
def test_callbacks_may_come_and_go_while_training_runs():
    "One that comes is told that the run starts, and one that goes leaves the others at work"

    class Accelerated:
        def __init__(self):
            self.seen = []

        def on_training_run_start(self, trainer):
            self.seen.append("start")

        def on_train_step_end(self, trainer, batch_output, batch, step):
            self.seen.append(step)

    a, b = Accelerated(), Accelerated()

    class ChangesCB:
        on_valid = False

        def after_batch(self, trainer):
            if trainer.batch_num == 1:
                trainer.add_callback(adapt(b, name="b"))
            if trainer.batch_num == 3:
                trainer.remove_callback("a")

    mine = ours(adapt(a, name="a"), ChangesCB(), n_epochs=1)
    assert a.seen == ["start", 0, 1, 2, 3] and b.seen == ["start", 2, 3, 4]
    assert len(mine.b.facade.run_history.get_metric_values("train_loss_epoch")) == 1


def test_adapters_wait_for_nothing_in_a_batch():
    "Losses stay on the device until an epoch ends"

    class Accelerated:
        def on_train_step_end(self, trainer, batch_output, batch, step):
            "Nothing"

        def on_eval_step_end(self, trainer, batch_output, batch):
            "Nothing"

    class Toolbox(ToolboxNotes):
        def on_batch_end(self):
            "Nothing"

        def on_after_gradient_update(self, optimizer_idx):
            "Nothing"

    nemo = Nemo010()
    mode = RefuseToWait()
    with mode:
        mine = ours(adapt(Accelerated()), adapt(Toolbox()), adapt(nemo), InsideCB(mode))
    assert len(nemo.seen) > 30 and same_weights(mine.model, ours().model)


def test_toolbox_callbacks_sleep_in_a_fit_that_only_validates():
    "Their loop has no such run; they are registered, and that is all"
    seen = []

    class Toolbox(ToolboxNotes):
        def on_train_begin(self):
            seen.append("begin")

        def on_epoch_end(self):
            seen.append("epoch")

        def on_train_end(self):
            seen.append("end")

    callback = Toolbox()
    ours(adapt(callback), train=False, n_epochs=1)
    assert seen == [] and callback.train_loop_obj.epoch == 0


def test_an_error_in_a_foreign_callback_says_whose_it_is_and_where():
    class Fails:
        def on_train_step_end(self, trainer, **kwargs):
            raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError) as e:
        ours(adapt(Fails()))
    assert any("`Fails.after_get_loss` at epoch 0, batch 0" in o for o in e.value.__notes__)


@pytest.mark.shows("NEMO-07")
def test_functions_may_stand_for_the_events_of_nemo():
    "There a decorator makes a callback of a function; here a namespace does"
    steps = []
    ours(adapt(SimpleNamespace(on_step_end=lambda state: steps.append(state.step)), name="steps"), n_epochs=1)
    assert steps == list(range(5))


def test_an_own_order_and_a_class_are_taken():
    assert adapt(Plain, order=77).order == 77 and adapt(Plain).foreign.calls == []


class AcceleratedStops:
    def __init__(self, patience):
        self.patience, self.best, self.n_bad, self.steps = patience, None, 0, []

    def on_train_step_end(self, trainer, batch_output, batch, step):
        self.steps.append(step)

    def on_training_run_epoch_end(self, trainer):
        loss = trainer.run_history.get_latest_metric("eval_loss_epoch")
        self.n_bad = 0 if self.best is None or loss < self.best - 0.1 else self.n_bad + 1
        self.best = loss if self.n_bad == 0 else self.best
        if self.n_bad >= self.patience:
            raise type("StopTrainingError", (Exception,), {})("enough")


class ToolboxNotes:
    execution_order, callback_name = 99, "notes"

    def register_train_loop_object(self, loop):
        self.train_loop_obj = loop
        return self

    def on_epoch_end(self):
        self.notes = (
            *getattr(self, "notes", ()),
            self.train_loop_obj.total_iteration_idx,
            *self.train_loop_obj.train_history["accumulated_loss"],
        )


class PlainNotes:
    def __init__(self):
        self.seen = []

    def __call__(self, epoch, step, measures, trainer):
        self.seen.append([epoch, step, measures["loss"], measures["gradient_norm"]])


class NemoNotes:
    def __init__(self):
        self.seen = []

    def on_iteration_start(self, state):
        self.seen.append(state.step)


def test_a_run_with_foreign_callbacks_goes_on_at_any_batch_as_if_it_had_not_stopped(tmp_path):
    "What they have counted is saved with ours; settings are not"

    def make(*extra):
        foreign = AcceleratedStops(2), ToolboxNotes(), PlainNotes(), NemoNotes()
        trainer = ours(
            *(adapt(o, test_step=2) for o in foreign), *extra, dls=DataLoaders(*BATCHES), n_epochs=9
        )
        return trainer, [
            {k: v for k, v in vars(o).items() if k not in ("train_loop_obj", "action", "_registered_tensors")}
            for o in foreign
        ]

    whole, notes = make()
    assert whole.stop_reason == "enough" and whole.n_updates % 5 == 0 and 5 < whole.n_updates < 45
    make(CheckpointCB(tmp_path / "all", every=1, keep_last=None))
    found = CheckpointStore(tmp_path / "all", read_only=True).list()
    assert len(found) == whole.n_updates > 8
    for o in found[3:9:2]:
        again, after = make(CheckpointCB(tmp_path / f"from {o.step}", every=1000, resume=o.path))
        assert same_weights(whole.model, again.model) and after == notes


class Logger010:
    "In the manner of 0.10's own loggers: the action fills `_registered_tensors` and `learning_rate`"

    def __init__(self):
        self._registered_tensors, self.rows = {}, []

    @property
    def registered_tensors(self):
        return self._registered_tensors

    def on_iteration_end(self):
        self.rows.append(
            (self.registered_tensors["loss"].item(), self.learning_rate, "input_0" in self.registered_tensors)
        )


@pytest.mark.shows("NEMO-02", "NEMO-04")
def test_nemo_loggers_get_their_tensors_and_the_rate():
    nemo, losses = Logger010(), []

    class LossCB:
        on_valid = False

        def after_step(self, trainer):
            losses.append((trainer.loss.item(), 0.5, True))

    trainer = ours(adapt(nemo), LossCB(), n_epochs=2)
    assert nemo.rows == losses and len(losses) == 10
    assert "registered" not in str(trainer.Logger010.state_dict()["foreign"])
    with pytest.raises(KeyError, match="no tensor `los`.*Did you mean `loss`") as e:
        nemo.registered_tensors["los"]
    assert not str(e.value).startswith('"')

    class OwnRate(Logger010):
        learning_rate = 7

    own = OwnRate()
    ours(adapt(own), n_epochs=1)
    assert {o[1] for o in own.rows} == {7}


@pytest.mark.shows("NEMO-07")
def test_few_events_and_functions_are_enough_for_nemo():
    class Few:
        seen = []

        def on_train_start(self, state):
            self.seen.append("start")

        def on_batch_end(self, state):
            self.seen.append(state.step)

    ours(adapt(Few()), n_epochs=1)
    assert Few.seen == ["start", 1, 2, 3, 4, 5]
    steps, ends = [], []

    def on_step_end(state):
        steps.append(state.step)

    def on_epoch_end(state):
        ends.append(state.epoch)

    trainer = ours(adapt(on_step_end), adapt(on_epoch_end), n_epochs=2)
    assert steps == list(range(10)) and ends == [0, 1] and trainer.on_step_end.name == "on_step_end"
    calls = []

    def on_batch_end(epoch, step, measures, trainer):
        calls.append(step)

    ours(adapt(on_batch_end), n_epochs=1)
    assert calls == list(range(5))

    class TwoArguments:
        def on_epoch_end(self, epoch, logs=None):
            "Another library's"

    with pytest.raises(TypeError, match="follows no protocol"):
        adapt(TwoArguments())


def test_measures_have_get_like_any_dict():
    "Sonosco's callbacks ask `performance_measures.get('val_loss')` at every batch, and it is there only at the last"
    found = []

    def ask(epoch, step, measures, trainer):
        found.append((measures.get("val_loss"), measures.get("x", 3)))

    ours(adapt(ask), n_epochs=1)
    assert [o[0] is None for o in found] == [True] * 4 + [False] and {o[1] for o in found} == {3}
