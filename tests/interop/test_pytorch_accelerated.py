"""Callbacks of pytorch-accelerated through `adapt`, against the trainer they were written for.

The same callback classes run in its loop and in ours, on the same weights and batches: the same calls in the
same order, and the same weights bit for bit. What cannot be the same is said in the test that shows it.
"""

import io
from contextlib import redirect_stderr, redirect_stdout
from functools import partial

import pytest
import torch
from torch import optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torcheval.metrics import MulticlassAccuracy

from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.device.precision import MixedPrecisionCB
from isaac_loop.schedule.schedulers import BatchSchedulerCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import Order
from isaac_loop.inspection.loop_tables import summarize_callbacks  # noqa: F401  A method of the trainer
from isaac_loop.interop.adapters import adapt
from isaac_loop.loop.trainer import Trainer
from foreign import TRAIN, VALID, X, Y, loaders, make_model, ours, same_weights, silent


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

    The loss of each step is compared, so that a callback must come after the trainer's own part of the
    moment."""
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
    "Their example reads the configuration with brackets, which their record refuses; ours has both ways"
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
        match="`Asks.on_training_run_end` asks its trainer for `run_historie`, which nobody has so far.*"
        "Did you mean `run_history`",
    ):
        with pytest.raises(
            AttributeError,
            match="`Asks` asked its trainer for `run_historie`.*"
            "Did you mean `run_history`.*Offered are .*'run_config'",
        ):
            trainer.fit(1)


def test_training_states_in_their_layout_are_refused_before_any_training(pta, tmp_path):
    "Their two callbacks would fail after hours; the error names what serves here"
    from pytorch_accelerated.callbacks import SaveTrainingStateCallback, WSDCheckpointCallback

    for cls in (SaveTrainingStateCallback, WSDCheckpointCallback):
        with pytest.raises(
            TypeError,
            match=f"`{cls.__name__}._save.*` asks for `save_training_state`.*"
            "`CheckpointCB.folder, every=.*`WSDSchedulerCB`.*`ExportCB",
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
    "From the first epoch on, and in their files; before that, and where it is set, there is an error"
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
        match="`Early` asked its trainer for `scheduler`, which is not there.*from `on_train_epoch_start` on",
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
