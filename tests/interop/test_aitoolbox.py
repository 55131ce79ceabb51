"""Callbacks of AIToolbox through `adapt`, against the train loop they were written for.

The same callback classes run in its loop and in ours, on the same weights and batches: the same calls in the
same order, and the same weights bit for bit. What cannot be the same is said in the test that shows it.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torcheval.metrics import MulticlassAccuracy

from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.log.experiment import ExperimentCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import Order
from isaac_loop.interop.aitoolbox import AIToolboxCB
from isaac_loop.interop.foreign_callback import uses
from isaac_loop.inspection.loop_tables import summarize_callbacks  # noqa: F401  A method of the trainer
from isaac_loop.interop.adapters import adapt
from isaac_loop.loop.trainer import Trainer
from foreign import BATCHES, make_model, ours, same_weights, silent


# AIToolbox


@pytest.fixture(scope="module")
def ait():
    pytest.importorskip("aitoolbox", reason="AIToolbox is not installed")
    try:
        return silent(__import__, "aitoolbox.torchtrain.train_loop", fromlist=["TrainLoop"])[0]
    except ImportError as e:
        pytest.skip(f"AIToolbox cannot be imported: {e}")


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

    With two batches to an update, the gradient event comes for each batch, that of the optimizer for each
    update; with ours a gradient that only accumulates has not been divided yet, and a window that is not
    full is divided by its own length, so the number of batches is even here. Neither side calls
    `on_multiprocess_start` in a single process."""
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
    # In each epoch: training and validation, predictions and two forced passes, one over the training set
    assert len(passes) == 3 * (2 + 3 + 1) + 1  # Predictions once more at the end


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
    "After each epoch, or after every so many batches, with the hyper-parameters beside them"
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
    "Their loop with checkpoints is `ExperimentCB` and the two callbacks here; all lies in one folder"
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


def test_a_toolbox_callback_that_cannot_work_says_so_at_once(ait):
    "Their checkpoints would train all epochs again"
    from aitoolbox.torchtrain.callbacks.model_load import ModelLoadContinueTraining

    with pytest.raises(
        TypeError, match="`ModelLoadContinueTraining.on_train_loop_registration` sets `epoch`.*`CheckpointCB"
    ):
        adapt(ModelLoadContinueTraining("2020-01-01_00-00-00"))


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
