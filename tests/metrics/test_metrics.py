"""Losses, metrics and times of `metrics/metrics.py`, checked against numpy over all rows at once.

Batches are unequal everywhere, so that a mean of means would be wrong. Where the numbers of a training pass
are compared, the learning rate is 0: then the loss of every batch is that of the final model.
"""

import ast
import math
import warnings
import re
import sys
import time
from fractions import Fraction
from fnmatch import fnmatchcase
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F
from torcheval.metrics import Max, Mean, MeanSquaredError, MulticlassAccuracy

import isaac_loop.evaluate.evaluation  # noqa: F401 (more methods of the trainer)
import runs
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.evaluate.evaluator import EvaluatorCB
from isaac_loop.basics.tables import clock
from isaac_loop.basics.tensors import map_tensors
from isaac_loop.metrics.any_metric import MeanOf, MetricOn
from isaac_loop.metrics.metrics import MetricsCB, as_text
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.loop import pass_numbers
from isaac_loop.loop.numbers_on_device import Sent
from isaac_loop.loop.pass_numbers import PassNumbers
from isaac_loop.show.progress import ProgressCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelBatchException, CancelEpochException, CancelFitException, Order
from isaac_loop.state.errors import UnsaveableState
from isaac_loop.loop.trainer import Trainer


class CountLogCB:
    "Counts how often the event `log` came"

    def __init__(self):
        self.n = 0

    def log(self, trainer):
        self.n += 1


class RowsMetric:
    "Counts the rows it has seen, and keeps what it got"

    def __init__(self):
        self.resets, self.updates = 0, []

    def reset(self):
        self.resets += 1
        self.rows = 0

    def update(self, preds, targets):
        self.updates.append((preds, targets))
        self.rows += len(targets)

    def compute(self):
        return self.rows


def make_batches(sizes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 2, generator=g), torch.randn(n, 1, generator=g)) for n in sizes]


def make_trainer(callbacks, train=(8, 8, 4), valid=(13, 7), model=None, loss_func=F.mse_loss):
    torch.manual_seed(0)
    dls = DataLoaders(make_batches(train), make_batches(valid, seed=1))
    return Trainer(
        dls, loss_func, optim.SGD, nn.Linear(2, 1) if model is None else model, [BasicTrainCB(), *callbacks]
    )


def squared_errors(model, batches):
    "All of them, as float64 of numpy"
    weight, bias = (p.detach().double().numpy() for p in model.parameters())
    x, y = (np.concatenate([o.double().numpy() for o in column]) for column in zip(*batches))
    return np.square(x @ weight.T + bias - y)


# Losses

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@pytest.mark.shows("ISA-50", "PTA-55")
@settings(max_examples=30, deadline=None)
@given(train=sizes, valid=sizes)
def test_losses_are_means_over_all_rows_however_they_are_batched(train, valid):
    trainer = make_trainer([MetricsCB(show=False)], train, valid)
    trainer.fit(1, lr=0)
    row = trainer.history[-1]
    assert row["train_loss"] == pytest.approx(
        squared_errors(trainer.model, trainer.dls.train).mean(), rel=1e-5
    )
    assert row["valid_loss"] == pytest.approx(
        squared_errors(trainer.model, trainer.dls.valid).mean(), rel=1e-5
    )


@pytest.mark.shows("ISA-49")
def test_training_losses_are_those_before_each_step():
    "Weights move during a pass, and each batch counts as it was met"
    trainer = make_trainer([MetricsCB(show=False)])
    model = nn.Linear(2, 1)
    model.load_state_dict(trainer.model.state_dict())
    opt, losses = optim.SGD(model.parameters(), 0.1), []
    for x, y in trainer.dls.train:
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        loss.backward()
        opt.step()
        opt.zero_grad()
    trainer.fit(1, lr=0.1)
    assert trainer.history[-1]["train_loss"] == pytest.approx(np.average(losses, weights=[8, 8, 4]), rel=1e-6)
    assert trainer.history.batches["loss"][:3] == losses


@pytest.mark.shows("ISA-56")
def test_many_batches_are_averaged_like_few():
    "Losses are gathered on the device in stacks, and none is lost or counted twice at their borders"
    for n in (511, 512, 513, 1025):
        trainer = make_trainer([MetricsCB(show=False)], train=[1] * n, valid=[3, 1])
        trainer.fit(1, lr=0)
        assert len(trainer.history.batches) == n + 2
        assert trainer.history[-1]["train_loss"] == pytest.approx(
            squared_errors(trainer.model, trainer.dls.train).mean(), rel=1e-5
        )


@pytest.mark.shows("ISA-56")
def test_losses_in_bfloat16_are_averaged_in_full_precision():
    "In bfloat16 the sum of a thousand ones would stop at 256"
    trainer = make_trainer(
        [MetricsCB(show=False)],
        train=[1] * 1000,
        valid=[3, 2, 1],
        model=nn.Linear(2, 1).bfloat16(),
        loss_func=lambda p, t: p.sum() * 0 + (1.0 if len(t) == 1 else 0.5),
    )
    for loader in (trainer.dls.train, trainer.dls.valid):
        loader[:] = [(x.bfloat16(), y.bfloat16()) for x, y in loader]
    trainer.fit(1, lr=0)
    assert trainer.loss.dtype == torch.bfloat16
    assert trainer.history[-1]["train_loss"] == 1.0
    assert trainer.history[-1]["valid_loss"] == pytest.approx((3 * 0.5 + 2 * 0.5 + 1) / 6)


def test_rows_are_counted_on_the_inputs_of_a_dict():
    class Dicts(Trainer):
        def split(self, batch):
            return (batch["deep"]["x"],), (batch["y"],)

    batches = [{"deep": {"x": x}, "y": y} for x, y in make_batches([6, 1])]
    trainer = Dicts(
        DataLoaders(batches, batches),
        F.mse_loss,
        optim.SGD,
        nn.Linear(2, 1),
        [BasicTrainCB(), MetricsCB(show=False)],
    )
    trainer.fit(1, lr=0)
    whole = squared_errors(trainer.model, make_batches([6, 1])).mean()
    assert trainer.history[-1]["train_loss"] == pytest.approx(whole, rel=1e-5)


def test_a_batch_without_rows_to_count_is_an_error():
    class Numbers(Trainer):
        def split(self, batch):
            return batch, ()

    trainer = Numbers(
        DataLoaders([(1.5,)]),
        lambda preds: preds,
        optim.SGD,
        lambda x: torch.tensor(x),
        [BasicTrainCB(), MetricsCB(show=False)],
    )
    trainer.dls.valid = trainer.dls.train
    with pytest.raises(TypeError, match="`MetricsCB` cannot tell how much its loss weighs"):
        trainer.fit(1, train=False)


# Rows


@pytest.mark.shows("ISA-54", "ISA-53", "SON-11")
def test_three_epochs_leave_three_rows_and_one_row_for_each_batch():
    "Two losses and one metric in each row"
    trainer = make_trainer([MetricsCB(mse=MeanSquaredError(), show=False)])
    trainer.fit(3)
    assert len(trainer.history) == 3 and len(trainer.history.batches) == 3 * (3 + 2)
    assert [set(row) for row in trainer.history] == [
        {"fit", "epoch", "train_loss", "valid_loss", "mse", "elapsed"}
    ] * 3
    assert trainer.history["epoch"] == [0, 1, 2]
    assert [row["batch"] for row in trainer.history.batches] == [0, 1, 2, 0, 1] * 3
    assert [row["training"] for row in trainer.history.batches] == [True, True, True, False, False] * 3
    assert [row["epoch"] for row in trainer.history.batches] == [e for e in range(3) for _ in range(5)]


@pytest.mark.shows("ISA-57")
def test_without_validation_the_training_loss_is_logged():
    metric = RowsMetric()
    trainer = make_trainer([MetricsCB(metric, show=False), CountLogCB()])
    trainer.fit(2, valid=False)
    assert [set(row) for row in trainer.history] == [{"fit", "epoch", "train_loss", "elapsed"}] * 2
    assert trainer.CountLogCB.n == 2 and metric.updates == []


@pytest.mark.shows("ISA-57")
def test_without_training_the_validation_loss_is_logged():
    trainer = make_trainer([MetricsCB(RowsMetric(), show=False), CountLogCB()])
    trainer.fit(2, train=False)
    assert [set(row) for row in trainer.history] == [
        {"fit", "epoch", "valid_loss", "RowsMetric", "elapsed"}
    ] * 2
    assert trainer.CountLogCB.n == 2


class CancelCB:
    "Raises once, at the given event, epoch, kind of pass and batch"

    def __init__(self, event, error, epoch=1, training=True, batch=1, order=Order.DECIDE):
        self.order, self.error, self.at = order, error, (epoch, training, batch)
        setattr(self, event, self.cancel)

    def cancel(self, trainer):
        if (trainer.epoch, trainer.training, trainer.batch_num) == self.at:
            raise self.error


@pytest.mark.shows("ISA-50")
@pytest.mark.parametrize("event", ["before_batch", "before_predict", "before_backward", "after_batch"])
def test_a_skipped_batch_is_counted_nowhere(event):
    "Only batches that really happened count"
    cancel = CancelCB(event, CancelBatchException("skipped"), epoch=0, order=Order.DATA)
    trainer = make_trainer([MetricsCB(RowsMetric(), train_metrics=True, show=False), cancel])
    trainer.fit(1, lr=0)
    first, _, last = trainer.dls.train
    row = trainer.history[-1]
    assert row["train_loss"] == pytest.approx(squared_errors(trainer.model, [first, last]).mean(), rel=1e-5)
    assert (row["train_RowsMetric"], row["RowsMetric"]) == (12, 20)
    assert [r["batch"] for r in trainer.history.batches if r["training"]] == [0, 2]


@pytest.mark.shows("ISA-50")
def test_a_batch_that_is_cancelled_after_it_was_recorded_counts():
    "Whoever comes later in `after_batch` cannot undo it"
    trainer = make_trainer(
        [MetricsCB(show=False), CancelCB("after_batch", CancelBatchException("too late"), epoch=0)]
    )
    trainer.fit(1, lr=0)
    assert len(trainer.history.batches) == 5


@pytest.mark.shows("ISA-53")
@pytest.mark.parametrize("training", [True, False])
def test_a_cancelled_epoch_leaves_its_row_and_the_log_comes(training):
    "With the batches it had, and the passes after it as usual"
    cancel = CancelCB("after_batch", CancelEpochException("enough"), training=training, batch=0)
    trainer = make_trainer([MetricsCB(RowsMetric(), show=False), CountLogCB(), cancel])
    trainer.fit(3, lr=0)
    assert len(trainer.history) == trainer.CountLogCB.n == 3
    whole = {
        kind: squared_errors(trainer.model, loader).mean()
        for kind, loader in (("train_loss", trainer.dls.train), ("valid_loss", trainer.dls.valid))
    }
    part = squared_errors(trainer.model, (trainer.dls.train if training else trainer.dls.valid)[:1]).mean()
    cut = "train_loss" if training else "valid_loss"
    for row in trainer.history:
        expected = whole | ({cut: part} if row["epoch"] == 1 else {})
        assert {o: row[o] for o in whole} == pytest.approx(expected, rel=1e-5)
    assert trainer.history["RowsMetric"] == [20, 20 if training else 13, 20]


def test_a_pass_of_which_every_batch_was_skipped_leaves_no_loss():
    "A mean over nothing is no number"

    class SkipCB:
        def before_batch(self, trainer):
            if trainer.training:
                raise CancelBatchException("all of them")

    trainer = make_trainer([MetricsCB(RowsMetric(), show=False), SkipCB()])
    trainer.fit(2)
    assert [set(row) for row in trainer.history] == [
        {"fit", "epoch", "valid_loss", "RowsMetric", "elapsed"}
    ] * 2
    assert not any(o["training"] for o in trainer.history.batches)


@pytest.mark.shows("ISA-53")
@pytest.mark.parametrize(
    ("error", "training"),
    [
        (CancelFitException("enough"), True),
        (CancelFitException("enough"), False),
        (KeyboardInterrupt(), True),
    ],
    ids=["cancelled in training", "cancelled in validation", "interrupted"],
)
def test_a_fit_that_is_cut_short_leaves_a_partial_row_and_no_log(error, training):
    trainer = make_trainer(
        [MetricsCB(show=False), CountLogCB(), CancelCB("after_batch", error, training=training, batch=0)]
    )
    try:
        trainer.fit(3, lr=0)
    except KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt)
    assert len(trainer.history) == 2 and trainer.CountLogCB.n == 1
    row = trainer.history[-1]
    assert row["epoch"] == 1 and ("valid_loss" in row) == (not training)
    part = squared_errors(trainer.model, trainer.dls.train[:1] if training else trainer.dls.train).mean()
    assert row["train_loss"] == pytest.approx(part, rel=1e-5)


def test_two_fits_with_one_object_do_not_mix():
    metric = RowsMetric()
    trainer = make_trainer([MetricsCB(metric, train_metrics=True, show=False)])
    trainer.fit(2, lr=0)
    trainer.fit(1, lr=0)
    assert [(row["fit"], row["epoch"]) for row in trainer.history] == [(0, 0), (0, 1), (1, 0)]
    assert trainer.history["RowsMetric"] == trainer.history["train_RowsMetric"] == [20, 20, 20]
    assert (
        len({row["train_loss"] for row in trainer.history})
        == len({row["valid_loss"] for row in trainer.history})
        == 1
    )
    assert [row["fit"] for row in trainer.history.batches] == [0] * 10 + [1] * 5


def test_the_callback_may_come_for_one_fit_only():
    trainer = make_trainer([])
    trainer.fit(1, callbacks=MetricsCB(show=False))
    trainer.fit(1)
    assert len(trainer.history) == 1


# Time


class Slow(list):
    "A loader that takes its time"

    seconds = 0.0

    def __iter__(self):
        time.sleep(self.seconds)
        yield from list.__iter__(self)


@pytest.mark.shows("ISA-55")
def test_elapsed_covers_training_and_validation_together():
    "And no more than the fit really took"
    trainer = make_trainer([MetricsCB(show=False)])
    trainer.dls = DataLoaders(Slow(trainer.dls.train), Slow(trainer.dls.valid))
    trainer.dls.train.seconds, trainer.dls.valid.seconds = 0.12, 0.03
    start = time.perf_counter()
    trainer.fit(2)
    total = time.perf_counter() - start
    assert all(o >= 0.15 for o in trainer.history["elapsed"])
    assert sum(trainer.history["elapsed"]) <= total


@pytest.mark.shows("ISA-55")
def test_the_clock_starts_anew_in_every_epoch_and_every_fit():
    "Also where both fits have one epoch of the same number"
    trainer = make_trainer([MetricsCB(show=False)])
    trainer.dls = DataLoaders(Slow(trainer.dls.train), Slow(trainer.dls.valid))
    trainer.dls.train.seconds = 0.05
    spans = []
    for n in (1, 2):
        start = time.perf_counter()
        trainer.fit(n)
        spans.append(time.perf_counter() - start)
    assert trainer.history[0]["elapsed"] <= spans[0]
    assert sum(trainer.history["elapsed"][1:]) <= spans[1]
    assert min(trainer.history["elapsed"]) >= 0.05


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "00:00"), (59.99, "00:59"), (60, "01:00"), (3599, "59:59"), (3600, "1:00:00"), (90061, "25:01:01")],
)
def test_durations_are_written_as_on_a_clock(seconds, text):
    assert clock(seconds) == text


# Metrics


def make_classifier(callbacks, sizes=(7, 7, 3)):
    g = torch.Generator().manual_seed(2)
    batches = [(torch.randn(n, 2, generator=g), torch.randint(0, 3, (n,), generator=g)) for n in sizes]
    torch.manual_seed(0)
    return Trainer(
        DataLoaders(batches, batches),
        F.cross_entropy,
        optim.SGD,
        nn.Linear(2, 3),
        [BasicTrainCB(), *callbacks],
    )


def accuracy_of_all(trainer):
    with torch.no_grad():
        hits = [(trainer.model(x).argmax(1) == y).numpy() for x, y in trainer.dls.valid]
    return np.concatenate(hits).mean()


@pytest.mark.shows("ISA-48")
def test_metrics_of_torcheval_agree_with_all_rows_at_once():
    trainer = make_classifier([MetricsCB(accuracy=MulticlassAccuracy(), show=False)])
    trainer.fit(3, lr=0.1)
    assert trainer.history.latest("accuracy") == pytest.approx(accuracy_of_all(trainer))
    assert isinstance(trainer.history.latest("accuracy"), float)


@pytest.mark.shows("ISA-48")
def test_metrics_of_torchmetrics_agree_with_all_rows_at_once():
    from torchmetrics.classification import MulticlassAccuracy as TorchmetricsAccuracy

    trainer = make_classifier([MetricsCB(accuracy=TorchmetricsAccuracy(3, average="micro"), show=False)])
    trainer.fit(3, lr=0.1)
    assert trainer.history.latest("accuracy") == pytest.approx(accuracy_of_all(trainer))
    assert isinstance(trainer.history.latest("accuracy"), float)


@pytest.mark.shows("ISA-48", "MIN-05")
def test_metrics_of_different_make_stand_side_by_side():
    "Three for the mean squared error, which is the loss as well"
    import torchmetrics

    class OwnError:
        def reset(self):
            self.total, self.n = 0.0, 0

        def update(self, preds, targets):
            self.total = self.total + (preds - targets).square().sum()
            self.n += len(targets)

        def compute(self):
            return self.total / self.n

    trainer = make_trainer(
        [
            MetricsCB(
                MeanSquaredError(),
                OwnError(),
                theirs=torchmetrics.MeanSquaredError(),
                train_metrics=True,
                show=False,
            )
        ]
    )
    trainer.fit(2, lr=0)
    train, valid = (squared_errors(trainer.model, o).mean() for o in (trainer.dls.train, trainer.dls.valid))
    names = ("MeanSquaredError", "OwnError", "theirs")
    expected = (
        {"train_loss": train, "valid_loss": valid}
        | {o: valid for o in names}
        | {f"train_{o}": train for o in names}
    )
    for row in trainer.history:
        assert {o: v for o, v in row.items() if o in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.shows("ISA-50")
def test_metrics_look_at_validation_only():
    "They start anew in each pass, and get every batch once"
    metric = RowsMetric()
    trainer = make_trainer([MetricsCB(metric, show=False)])
    trainer.fit(3)
    assert trainer.history["RowsMetric"] == [20, 20, 20]
    assert [len(t) for _, t in metric.updates] == [13, 7] * 3
    assert all(t is y for (_, t), (_, y) in zip(metric.updates, trainer.dls.valid * 3))
    assert metric.resets == 3


def test_training_metrics_are_copies_that_see_no_gradients():
    metric = RowsMetric()
    trainer = make_trainer([MetricsCB(metric, train_metrics=True, show=False)], valid=(5,))
    trainer.fit(1)
    assert (trainer.history.latest("train_RowsMetric"), trainer.history.latest("RowsMetric")) == (20, 5)
    assert [len(t) for _, t in metric.updates] == [5]

    class NoGradMetric(RowsMetric):
        def update(self, preds, targets):
            super().update(preds, targets)
            assert not preds.requires_grad

    make_trainer([MetricsCB(NoGradMetric(), train_metrics=True, show=False)]).fit(1)


@pytest.mark.parametrize(
    "wrap", [lambda y: dict(out=y, more=[y * 2]), lambda y: (y, None), lambda y: [y, [y]]]
)
def test_predictions_in_a_structure_come_to_a_metric_without_their_graph(wrap):
    class InStructure(nn.Linear):
        def forward(self, x):
            return wrap(super().forward(x))

    def first(preds):
        return preds["out"] if isinstance(preds, dict) else preds[0]

    class KeepMetric(RowsMetric):
        def update(self, preds, targets):
            super().update(preds, targets)
            tensors = []
            map_tensors(tensors.append, preds)
            assert tensors and not any(t.requires_grad for t in tensors)
            assert type(preds) is type(wrap(targets))

    keep = MetricsCB(KeepMetric(), train_metrics=True, show=False)
    trainer = make_trainer([keep], model=InStructure(2, 1), loss_func=lambda p, y: F.mse_loss(first(p), y))
    trainer.fit(1)
    assert trainer.history.latest("train_KeepMetric") == 20


@pytest.mark.shows("ISA-48")
def test_a_metric_gets_all_targets():
    "As many as there are, in their order"

    class TwoTargets:
        def reset(self):
            self.shapes = []

        def update(self, preds, first, second):
            self.shapes.append((tuple(first.shape), tuple(second.shape)))

        def compute(self):
            return len(self.shapes)

    metric, batches = TwoTargets(), [(torch.ones(4, 2), torch.ones(4, 1), torch.ones(4, 3))]
    trainer = Trainer(
        DataLoaders(batches, batches),
        lambda p, a, b: F.mse_loss(p, a),
        optim.SGD,
        nn.Linear(2, 1),
        [BasicTrainCB(), MetricsCB(metric, show=False)],
    )
    trainer.fit(1)
    assert metric.shapes == [((4, 1), (4, 3))]


def test_a_metric_goes_where_the_model_is():
    class MovableMetric(RowsMetric):
        device = None

        def to(self, device):
            self.device = device

    metric = MovableMetric()
    make_trainer([MetricsCB(metric, show=False)]).fit(1)
    assert metric.device == torch.device("cpu")


@pytest.mark.shows("MIN-05")
def test_unnamed_metrics_are_called_like_their_class():
    trainer = make_trainer([MetricsCB(RowsMetric(), MeanSquaredError(), named=RowsMetric(), show=False)])
    trainer.fit(1)
    assert list(trainer.MetricsCB.metrics) == ["RowsMetric", "MeanSquaredError", "named"]
    assert {"RowsMetric", "MeanSquaredError", "named"} < set(trainer.history[-1])


def test_one_metric_object_has_one_name_and_one_owner():
    "It would be updated twice for each batch; a function, a copy, or evaluators who take turns are all right"
    m = RowsMetric()
    with pytest.raises(
        ValueError, match="`a` and `b` are one RowsMetric object, which would count every batch twice"
    ):
        MetricsCB(a=m, b=m)
    with pytest.raises(ValueError, match="`a` and `b` are one"):
        MetricsCB(a=m, b=MetricOn(m, lambda preds, targets: (preds, targets)))
    two, loader = [MetricsCB(a=m), MetricsCB(a=m)], make_batches([4])
    two[1].name = "Second"
    with pytest.raises(ValueError, match="`MetricsCB.a` and `Second.a` are one"):
        make_trainer(two).fit(1)
    with pytest.raises(ValueError, match="`MetricsCB.a` and `EvaluatorCB.a` are one"):
        make_trainer([MetricsCB(a=m), EvaluatorCB({"other": loader}, epochs=1, a=m)]).fit(1)
    f = lambda preds, targets: (preds - targets).abs().mean()
    make_trainer(
        [
            MetricsCB(show=False, a=f, b=f, c=RowsMetric()),
            EvaluatorCB({"x": loader}, epochs=1, a=m),
            EvaluatorCB({"y": loader}, epochs=1, name="y", a=m),
        ]
    ).fit(1)


@pytest.mark.shows("AIT-70")
def test_results_in_a_dict_become_columns():
    class F1:
        def reset(self):
            pass

        def update(self, preds, targets):
            pass

        def compute(self):
            return {
                "cat": torch.tensor(0.5),
                "dog": 1.0,
                "by_size": {"big": torch.tensor([0.25])},
                "curve": torch.tensor([1.0, 2.0]),
            }

    trainer = make_trainer([MetricsCB(f1=F1(), show=False)])
    trainer.fit(1)
    row = trainer.history[-1]
    assert {o: v for o, v in row.items() if o.startswith("f1")} == {
        "f1_cat": 0.5,
        "f1_dog": 1.0,
        "f1_by_size_big": 0.25,
        "f1_curve": [1.0, 2.0],
    }


def test_a_collection_of_torchmetrics_becomes_columns():
    import torchmetrics

    collection = torchmetrics.MetricCollection(
        [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()]
    )
    trainer = make_trainer([MetricsCB(err=collection, show=False)])
    trainer.fit(2, lr=0)
    errors = squared_errors(trainer.model, trainer.dls.valid)
    assert trainer.history.latest("err_MeanSquaredError") == pytest.approx(errors.mean(), rel=1e-5)
    assert trainer.history.latest("err_MeanAbsoluteError") == pytest.approx(np.sqrt(errors).mean(), rel=1e-5)


@pytest.mark.shows("ISA-48")
@pytest.mark.parametrize("missing", [("update",), ("compute",), ("update", "compute", "reset")])
def test_a_metric_that_cannot_count_is_refused(missing):
    half = type(
        "Half", (), {o: lambda self, *args: 0 for o in ("update", "compute", "reset") if o not in missing}
    )
    with pytest.raises(
        TypeError,
        match=f"The metric `Half` has no method `{'`, `'.join(missing)}`.*torcheval or torchmetrics",
    ):
        MetricsCB(half())
    with pytest.raises(TypeError, match="The metric `mine` has no method"):
        MetricsCB(mine=half())


def test_a_class_is_no_metric():
    with pytest.raises(TypeError, match=r"The metric `Mean` is a class.*Make one: `Mean\(\)`"):
        MetricsCB(Mean)


@pytest.mark.parametrize("name", ["train_loss", "valid_loss", "epoch", "elapsed", "time", "fit"])
def test_a_metric_may_not_hide_another_column(name):
    with pytest.raises(ValueError, match=f"There are two columns called `{name}`"):
        MetricsCB(**{name: RowsMetric()})


def test_two_unnamed_metrics_of_one_class_are_refused():
    with pytest.raises(ValueError, match="There are two columns called `RowsMetric`.*name of its own"):
        MetricsCB(RowsMetric(), RowsMetric())


# What is printed


@pytest.mark.shows("ISA-51", "MIN-05")
def test_a_row_is_printed_after_each_epoch_below_one_header(capsys):
    "Aligned, epoch first and time last, as `ProgressCB` and the history have them; anew for each fit"
    metrics = MetricsCB(mse=MeanSquaredError())
    trainer = make_trainer([metrics])
    trainer.fit(2)
    printed = capsys.readouterr().out.splitlines()
    names = ["epoch", "train_loss", "valid_loss", "mse", "time"]
    assert [line.split()[:4] for line in printed] == [
        names[:4],
        *([str(o["epoch"]), *(f"{o[name]:.3f}" for name in names[1:4])] for o in trainer.history),
    ]
    starts = [[found.start() for found in re.finditer(r"\S+", line)] for line in printed]
    assert starts[0] == starts[1] == starts[2] and printed[0].split() == names
    assert trainer.history.names() == ["fit", *names[:-1], "elapsed"]
    trainer.fit(1, lr=0, callbacks=ProgressCB("plain"))
    by_progress = capsys.readouterr().out.splitlines()
    trainer.fit(1, lr=0)
    by_metrics = capsys.readouterr().out.splitlines()
    assert [o[: o.rindex(" ")] for o in by_progress] == [o[: o.rindex(" ")] for o in by_metrics]


def test_rows_wider_than_their_header_stay_aligned_from_then_on(capsys):
    metrics = MetricsCB(a=lambda preds, targets: torch.tensor(12345678.0), show=True)
    make_trainer([metrics]).fit(3)
    header, *rows = capsys.readouterr().out.splitlines()
    assert len({row.rindex(" ") for row in rows}) == 1


def test_what_to_show_is_yes_or_no_or_dicts():
    with pytest.raises(ValueError, match="`show` is 'dicts'.*Use 'dict' or a bool. Did you mean `dict`"):
        MetricsCB(show="dicts")
    assert MetricsCB(show=np.bool_(False)).show is False and MetricsCB(show=np.bool_(True)).show is True


@pytest.mark.shows("ISA-51")
def test_a_dict_is_printed_after_each_epoch_if_one_likes(capsys):
    "Values are text with three digits"
    trainer = make_trainer([MetricsCB(mse=MeanSquaredError(), show="dict")])
    trainer.fit(2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line, row in zip(lines, trainer.history):
        shown = ast.literal_eval(line)
        assert list(shown) == ["mse", "train_loss", "valid_loss", "epoch", "elapsed"]
        assert shown["epoch"] == row["epoch"]
        assert {o: shown[o] for o in ("mse", "train_loss", "valid_loss")} == {
            o: f"{row[o]:.3f}" for o in ("mse", "train_loss", "valid_loss")
        }
        assert shown["elapsed"] == clock(row["elapsed"])


@pytest.mark.shows("ISA-51")
def test_nothing_is_printed_when_another_callback_shows_the_rows(capsys):
    class TableCB:
        shows_rows = True

        def log(self, trainer):
            self.row = trainer.history[-1]

    trainer = make_trainer([MetricsCB(), TableCB()])
    trainer.fit(1)
    assert capsys.readouterr().out == ""
    trainer.remove_callback("TableCB")
    trainer.fit(1)
    assert "valid_loss" in capsys.readouterr().out


@pytest.mark.shows("ISA-52")
def test_the_output_can_be_replaced(capsys):
    "By a subclass, or on one object; it gets the row"
    rows = []

    class IntoListCB(MetricsCB):
        def _log(self, row):
            rows.append(row)

    trainer = make_trainer([IntoListCB()])
    trainer.fit(2)
    assert rows == list(trainer.history)
    cb = MetricsCB()
    cb._log = rows.append
    trainer = make_trainer([cb])
    trainer.fit(1)
    assert rows[2:] == list(trainer.history)
    assert capsys.readouterr().out == ""


def test_text_of_a_row_keeps_unknown_columns_and_leaves_out_missing_ones():
    assert as_text({"fit": 0, "epoch": 3, "lr": 0.00012, "train_loss": 2.0}) == {
        "lr": "0.00012",
        "train_loss": "2.000",
        "epoch": 3,
    }


@pytest.mark.shows("ISA-48")
def test_watching_changes_no_weight():
    "The same numbers with and without"
    watched, alone = (
        make_trainer([MetricsCB(MeanSquaredError(), train_metrics=True, show=False)]),
        make_trainer([]),
    )
    for trainer in (watched, alone):
        trainer.fit(3, lr=0.1)
    assert all(torch.equal(p, q) for p, q in zip(watched.model.parameters(), alone.model.parameters()))


class DictMetric(RowsMetric):
    def compute(self):
        return {"cat": 1.0, "dog": 2.0}


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("train_metrics", [True, False])
def test_the_declared_columns_are_those_that_are_written(train_metrics, valid):
    "With `f1_*` for a metric that gives several"
    trainer = make_trainer(
        [MetricsCB(rows=RowsMetric(), f1=DictMetric(), train_metrics=train_metrics, show=False)]
    )
    if not valid:
        trainer.dls.valid = None
    trainer.fit(1, lr=0, valid=valid)
    declared = trainer.MetricsCB.columns(trainer)
    written = [o for o in trainer.history.names() if o not in ("fit", "epoch")]
    assert all(any(fnmatchcase(o, pattern) for pattern in declared) for o in written)
    families = ["rows", "f1_*"] if valid else []
    assert {
        "train_loss",
        "elapsed",
        *families,
        *(["train_rows", "train_f1_*"] if train_metrics else []),
    } <= set(declared)
    assert ("valid_loss" in declared) == valid == ("rows" in declared)


# What a loss weighs


def rows_of_zeros(*sizes, target=2.0):
    "Batches whose loss under a model that gives 0 is `target` squared for each row"
    return [(torch.zeros(n, 2), torch.full((n, 1), target)) for n in sizes]


def zero_model():
    model = nn.Linear(2, 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def losses_by(loss_func, batches, **options):
    "The validation loss by `MetricsCB`, by `validate` and by `EvaluatorCB`"
    trainer = Trainer(
        DataLoaders(batches, batches),
        loss_func,
        optim.SGD,
        zero_model(),
        [BasicTrainCB(), MetricsCB(show=False, **options), EvaluatorCB("valid")],
    )
    trainer.fit(1, lr=0)
    row = trainer.history[-1]
    bare = Trainer(DataLoaders(batches, batches), loss_func, optim.SGD, zero_model(), BasicTrainCB())
    found = {
        row["train_loss"],
        row["valid_loss"],
        row["eval_loss"],
        trainer.validate()["valid_loss"],
        trainer.validate(mae=F.l1_loss)["valid_loss"],
        bare.validate(**options)["valid_loss"],
        EvaluatorCB("valid", **options).evaluate(bare)["eval_loss"],
    }
    assert len(found) == 1, found
    return found.pop()


def mse_sum(preds, targets):
    return F.mse_loss(preds, targets, reduction="sum")


class Both(nn.Module):
    reduction = "sum"

    def forward(self, preds, targets):
        return mse_sum(preds, targets)


@pytest.mark.parametrize(
    "loss_func, options",
    [
        (nn.MSELoss(reduction="sum"), {}),
        (partial(F.mse_loss, reduction="sum"), {}),
        (partial(nn.MSELoss(reduction="sum")), {}),
        (Both(), {}),
        (mse_sum, dict(weigh="sum")),
        (nn.MSELoss(reduction="sum"), dict(weigh=lambda batch: len(batch[1]))),
        (nn.MSELoss(), {}),
        (F.mse_loss, dict(weigh="samples")),
    ],
)
def test_sums_and_means_give_the_mean_of_an_example(loss_func, options):
    "Sums of 32 and 8 over 8 and 2 rows gave 27.2"
    assert losses_by(loss_func, rows_of_zeros(8, 2), **options) == 4


@pytest.mark.parametrize(
    "loss_func, weigh, told",
    [
        (nn.MSELoss(reduction="sum"), "samples", True),
        (partial(F.mse_loss, reduction="sum"), "samples", True),
        (nn.MSELoss(), "sum", True),
        (F.mse_loss, "sum", True),
        (nn.MSELoss(reduction="sum"), "mean", False),  # The mean of the sums of batches, as with a VAE
        (nn.MSELoss(reduction="sum"), "sum", False),
        (nn.MSELoss(), "samples", False),
        (nn.MSELoss(reduction="sum"), None, False),
        (mse_sum, "sum", False),
        (mse_sum, "samples", False),  # It says nothing
    ],
)
def test_a_weight_that_contradicts_the_loss_is_told(loss_func, weigh, told):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        losses_by(loss_func, rows_of_zeros(8, 2), weigh=weigh)
    assert len({str(o.message) for o in seen if "`weigh=" in str(o.message)}) == told


def test_all_batches_alike_is_the_mean_of_their_means():
    assert losses_by(F.mse_loss, rows_of_zeros(8) + rows_of_zeros(2, target=1.0), weigh="mean") == 2.5
    assert losses_by(F.mse_loss, rows_of_zeros(8) + rows_of_zeros(2, target=1.0)) == 3.4


def uneven_targets():
    "Class numbers, many of which are to be ignored in one batch and few in the other"
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randn(n, 2, generator=g), torch.randint(3, (n,), generator=g)) for n in (8, 6)]
    batches[0][1][1:] = -100
    return batches


CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.1])


@pytest.mark.parametrize(
    "loss_func, weigh",
    [
        (nn.CrossEntropyLoss(), lambda batch: (batch[1] != -100).sum()),
        (nn.CrossEntropyLoss(), lambda batch: int((batch[1] != -100).sum())),
        (nn.CrossEntropyLoss(reduction="sum"), lambda batch: (batch[1] != -100).sum()),
        (nn.CrossEntropyLoss(CLASS_WEIGHTS), lambda batch: CLASS_WEIGHTS[batch[1][batch[1] != -100]].sum()),
    ],
    ids=["ignored", "ignored, as a number", "a sum", "class weights"],
)
def test_a_function_that_counts_makes_the_mean_exact(loss_func, weigh):
    batches = uneven_targets()
    torch.manual_seed(0)
    trainer = Trainer(
        DataLoaders(batches, batches),
        loss_func,
        optim.SGD,
        nn.Linear(2, 3),
        [BasicTrainCB(), MetricsCB(weigh=weigh, show=False)],
    )
    trainer.fit(1, lr=0)
    x, y = map(torch.cat, zip(*batches))
    whole = nn.CrossEntropyLoss(loss_func.weight)(trainer.model(x), y).item()
    assert trainer.history[-1]["train_loss"] == pytest.approx(whole, rel=1e-5) and trainer.history[-1][
        "valid_loss"
    ] == pytest.approx(whole, rel=1e-5)
    trainer.MetricsCB.weigh = "samples"
    assert abs(trainer.validate()["valid_loss"] - whole) > 1e-2, "rows are the wrong weight here"


def test_many_counts_on_the_device_keep_their_places():
    "Over the borders of the stacks, with numbers among them"
    counted = [0]

    def count(batch):
        counted[0] += 1
        return torch.tensor(float(len(batch[1]))) if counted[0] % 700 else len(batch[1])

    trainer = make_trainer([MetricsCB(weigh=count, show=False)], train=[1, 2] * 600)
    trainer.fit(1, lr=0)
    assert trainer.history[-1]["train_loss"] == pytest.approx(
        squared_errors(trainer.model, trainer.dls.train).mean(), rel=1e-5
    )


@pytest.mark.parametrize("weigh", ["rows", 3, True, ("sum",)])
def test_a_weight_that_is_none_is_refused_where_it_is_typed(weigh):
    for make in (lambda: MetricsCB(weigh=weigh), lambda: EvaluatorCB(weigh=weigh)):
        with pytest.raises(ValueError, match="it weighs the loss of a batch"):
            make()


@pytest.mark.parametrize("count", [-1, math.nan, "8", None, True, torch.ones(2)])
def test_a_count_that_is_none_is_refused(count):
    with pytest.raises(ValueError, match="`weigh` gave"):
        make_trainer([MetricsCB(weigh=lambda batch: count)]).fit(1)


def test_batches_without_rows_that_are_all_alike_need_none():
    class Numbers(Trainer):
        def split(self, batch):
            return batch, ()

    trainer = Numbers(
        DataLoaders([(1.5,), (2.5,)]),
        lambda preds: preds,
        optim.SGD,
        lambda x: torch.tensor(x),
        [BasicTrainCB(), MetricsCB(weigh="mean", show=False)],
    )
    trainer.dls.valid = trainer.dls.train
    trainer.fit(1, train=False)
    assert trainer.history[-1]["valid_loss"] == 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(weigh="samples"),
        dict(weigh="mean"),
        dict(weigh="sum"),
        dict(weigh=lambda batch: len(batch[1])),
    ],
)
def test_an_empty_batch_counts_for_nothing(options):
    "Its mean loss is NaN, and made NaN of the whole epoch"
    means = nn.MSELoss(reduction="sum" if options.get("weigh") == "sum" else "mean")
    assert losses_by(means, rows_of_zeros(8, 0, 2), **options) == 4
    metric = RowsMetric()
    trainer = Trainer(
        DataLoaders(rows_of_zeros(3, 0, 2), rows_of_zeros(3, 0, 2)),
        F.mse_loss,
        optim.SGD,
        zero_model(),
        [BasicTrainCB(), MetricsCB(metric, mae=F.l1_loss, mse=MeanSquaredError(), show=False)],
    )
    trainer.fit(1, lr=0)
    assert len(metric.updates) == 2 and (trainer.history[-1]["mae"], trainer.history[-1]["mse"]) == (2, 4)
    assert len(trainer.history.batches) == 6


# Functions, options, and what a metric sees


def test_a_function_is_averaged_over_all_examples():
    "As in `EvaluatorCB`, by name or by its own"

    def absolute(preds, targets):
        return (preds - targets).abs().squeeze(1)

    trainer = make_trainer(
        [
            MetricsCB(F.l1_loss, nn.MSELoss(), mae=absolute, train_metrics=True, show=False),
            EvaluatorCB("valid", mae=absolute),
        ]
    )
    trainer.fit(1, lr=0)
    row, errors = trainer.history[-1], np.sqrt(squared_errors(trainer.model, trainer.dls.valid))
    assert (
        row["mae"] == row["eval_mae"]
        and row["mae"] == pytest.approx(errors.mean(), rel=1e-5)
        and row["l1_loss"] == pytest.approx(errors.mean(), rel=1e-5)
    )
    assert row["MSELoss"] == pytest.approx((errors**2).mean(), rel=1e-5)
    assert row["train_mae"] == pytest.approx(
        np.sqrt(squared_errors(trainer.model, trainer.dls.train)).mean(), rel=1e-5
    )


def test_a_function_without_a_name_needs_one():
    with pytest.raises(ValueError, match="A lambda has no name"):
        MetricsCB(lambda preds, targets: 0)
    assert list(MetricsCB(partial(F.l1_loss, reduction="mean")).metrics) == ["l1_loss"]


@pytest.mark.parametrize(
    "options, words",
    [
        (
            dict(average="macro"),
            "`average='macro'` is no metric, and `MetricsCB` has no option `average`.*"
            "Its options are `train_metrics`, `weigh`, `show`.*given to the metric itself",
        ),
        (dict(train_metric=True), "Did you mean `train_metrics`"),
        (dict(weight="mean"), "Did you mean `weigh`"),
        (dict(accuracy=None), "`accuracy=None` is no metric"),
        (dict(every=2.5), "no option `every`"),
    ],
)
def test_an_option_that_there_is_not_is_no_metric(options, words):
    with pytest.raises(TypeError, match=words):
        MetricsCB(**options)


def test_a_metric_that_wants_other_arguments_is_told_how_to_get_them():
    "A third part of the batch, the weights of the examples, goes to every metric"
    batches = [(x, y, torch.rand(len(y))) for x, y in make_batches([6, 3])]

    def trainer(**metrics):
        torch.manual_seed(0)
        return Trainer(
            DataLoaders(batches, batches, n_inp=1),
            lambda preds, targets, weights: F.mse_loss(preds, targets),
            optim.SGD,
            nn.Linear(2, 1),
            [BasicTrainCB(), MetricsCB(show=False, **metrics)],
        )

    import torchmetrics

    with pytest.raises(TypeError) as e:
        trainer(mae=torchmetrics.MeanAbsoluteError()).fit(1)
    assert any(
        "`mae` was updated with predictions (6, 1) and targets (6, 1), (6,)" in o and "MetricOn(" in o
        for o in e.value.__notes__
    )
    t = trainer(
        mae=MetricOn(torchmetrics.MeanAbsoluteError(), lambda preds, targets, weights: (preds, targets)),
        weighted=MetricOn(
            MeanSquaredError(),
            lambda preds, targets, weights: dict(input=preds, target=targets, sample_weight=weights),
        ),
        heaviest=MetricOn(Max(), lambda preds, targets, weights: weights),
    )
    t.fit(1, lr=0)
    errors = squared_errors(t.model, [o[:2] for o in batches]).squeeze(1)
    weights = torch.cat([o[2] for o in batches]).numpy()
    row = t.history[-1]
    assert row["mae"] == pytest.approx(np.sqrt(errors).mean(), rel=1e-5)
    assert row["weighted"] == pytest.approx(np.average(errors, weights=weights), rel=1e-5) and row[
        "heaviest"
    ] == pytest.approx(weights.max())


def test_tokens_are_told_apart_for_a_metric():
    "Scores of shape (B, L, V) and class numbers of shape (B, L)"
    batches = [(torch.randn(2, 5, 4), torch.randint(3, (2, 5))) for _ in range(2)]
    flat = MetricOn(MulticlassAccuracy(), lambda preds, targets: (preds.flatten(0, 1), targets.flatten()))
    trainer = Trainer(
        DataLoaders(batches, batches),
        lambda preds, targets: F.cross_entropy(preds.flatten(0, 1), targets.flatten()),
        optim.SGD,
        nn.Linear(4, 3),
        [BasicTrainCB(), MetricsCB(flat, show=False)],
    )
    trainer.fit(1, lr=0)
    right = [trainer.model(x).argmax(-1) == y for x, y in batches]
    assert trainer.history.latest("MulticlassAccuracy") == pytest.approx(
        torch.cat(right).float().mean().item()
    )


def test_a_wrapped_metric_has_to_be_one():
    with pytest.raises(TypeError, match=r"Make one: `MeanSquaredError\(\)`"):
        MetricOn(MeanSquaredError, lambda *batch: batch)
    with pytest.raises(TypeError, match="cannot be called"):
        MetricOn(MeanSquaredError(), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_type_that_pytorch_makes_by_default_does_not_matter(dtype):
    right = torch.arange(70_000) >= 700
    metric = MeanOf(lambda preds, targets: preds == targets)
    torch.set_default_dtype(dtype)
    try:
        metric.update(right, torch.ones_like(right))
        assert float(metric.compute()) == pytest.approx(0.99)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", [lambda rows: rows.to_sparse(), lambda rows: Fraction(3, 4), np.array])
def test_what_a_function_gives_may_be_odd(kind):
    metric = MeanOf(lambda preds, targets: kind(preds == targets))
    metric.update(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 0]))
    assert float(metric.compute()) == 0.75 and not isinstance(metric.total, Fraction)


def test_right_answers_are_counted_exactly():
    "In single precision 16,777,216 and one more are 16,777,216"
    metric, n = MeanOf(lambda preds, targets: preds == targets), 2**24 + 2
    for size in (n - 1, 1):
        metric.update(torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8))
    assert int(metric.total) == metric.n == n and metric.compute() == 1


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda rows: torch.tensor(rows)[:, None]])
def test_rows_that_are_right_may_come_in_any_form(kind):
    metric = MeanOf(lambda preds, targets: kind((preds == targets).tolist()))
    metric.update(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0]))
    metric.update(torch.tensor([3]), torch.tensor([3]))
    assert float(metric.compute()) == 0.75


def test_nothing_is_printed_if_nothing_is_to_be_shown(capsys):
    trainer = make_trainer([MetricsCB(show=False)])
    trainer.fit(1)
    assert capsys.readouterr().out == "" and len(trainer.history) == 1


# Going on in the middle


class PrivateMetric:
    "Counts in attributes that nobody is to see, and in a module and a list of other metrics"

    def __init__(self):
        self.parts, self._by_name, self.score = (
            [MeanSquaredError(), RowsCount()],
            {"mae": MeanOf(F.l1_loss)},
            torch.nn.functional.mse_loss,
        )
        self.reset()

    def reset(self):
        self._n, self._seen = 0, []
        for o in (*self.parts, *self._by_name.values()):
            o.reset()

    def update(self, preds, targets):
        self._n += len(targets)
        self._seen.append(targets.sum())
        scores = preds[torch.arange(len(targets)), targets]
        for o in (*self.parts, *self._by_name.values()):
            o.update(scores, targets.float())

    def compute(self):
        return {
            "n": self._n,
            "seen": torch.stack(self._seen).sum(),
            "mse": self.parts[0].compute(),
            "rows": self.parts[1].compute(),
            "mae": self._by_name["mae"].compute(),
        }


class RowsCount(nn.Module):
    "A module with a count of its own, and one in a buffer"

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self._net = nn.Linear(1, 1)
        self.reset()

    def reset(self):
        self._rows = 0
        self.calls = torch.zeros(())

    def update(self, preds, targets):
        self._rows += len(targets)
        self.calls = self.calls + 1

    def compute(self):
        return self._rows + 1000 * self.calls


class InSlots:
    "Keeps its count in a slot"

    __slots__ = ("n",)

    def reset(self):
        self.n = 0

    def update(self, preds, targets):
        self.n += len(targets)

    def compute(self):
        return self.n


class Drawing(RowsCount):
    "Draws a number for each batch, from a generator that it makes for each pass"

    def reset(self):
        super().reset()
        self._generator, self._drawn = torch.Generator().manual_seed(0), 0

    def update(self, preds, targets):
        super().update(preds, targets)
        self._drawn += torch.rand((), generator=self._generator)

    def compute(self):
        return super().compute() + self._drawn


def several_metrics():
    import torchmetrics
    from torchmetrics.classification import (
        MulticlassAccuracy as Accuracy,
        MulticlassConfusionMatrix,
        MulticlassF1Score,
        MulticlassPrecision,
    )
    from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, Running

    return {
        "private": PrivateMetric(),
        "function": lambda preds, targets: preds.argmax(1) == targets,
        "module": RowsCount(),
        "slots": InSlots(),
        "drawing": Drawing(),
        "chosen": MetricOn(PrivateMetric(), lambda preds, targets: (preds, targets)),
        "collection": torchmetrics.MetricCollection(
            [Accuracy(3), MulticlassPrecision(3), MulticlassF1Score(3), MulticlassConfusionMatrix(3)]
        ),
        "min_max": MinMaxMetric(Accuracy(3)),
        "sum": Accuracy(3) + 1.0,
        "product": Accuracy(3) * MulticlassF1Score(3),
        "by_class": ClasswiseWrapper(Accuracy(3, average=None)),
        "running": Running(Accuracy(3), window=3),
        "torcheval": MulticlassAccuracy(num_classes=3, average=None),
    }


@pytest.mark.parametrize("name", list(several_metrics()))
@pytest.mark.parametrize("at", [4, 11])
def test_metrics_of_every_make_go_on_in_the_middle_of_a_pass(name, at, tmp_path):
    "Cut at a batch of the first or the second epoch: the numbers are those of a run that was never stopped"

    def make(*more):
        return runs.make_trainer(
            [BasicTrainCB(), MetricsCB(train_metrics=True, show=False, m=several_metrics()[name]), *more]
        )

    whole = runs.fit(make(), 2)
    with pytest.raises(runs.Cut):
        runs.fit(
            make(CheckpointCB(tmp_path / "run", every=1)),
            2,
            callbacks=runs.CutCB("before_batch", lambda t: t.training and t.epoch * 7 + t.batch_num == at),
        )
    runs.same(whole, runs.fit(make(CheckpointCB(tmp_path / "run", every=1)), 2))


def secret():
    "Keeps its count where nobody finds it"
    n = []

    def update(preds, targets):
        n.extend(targets)

    return SimpleNamespace(reset=n.clear, update=update, compute=lambda: len(n))


def test_a_metric_that_cannot_be_saved_in_the_middle_says_so(tmp_path):
    metrics = MetricsCB(show=False, m=secret())
    trainer = runs.make_trainer([BasicTrainCB(), metrics, CheckpointCB(tmp_path / "run")])
    assert runs.fit(trainer, 1).history.latest("m") == 24  # Between epochs there is nothing to lose
    with pytest.raises(
        UnsaveableState, match="The metric `m` has no attribute and no `state_dict`.*save only between epochs"
    ):
        runs.fit(trainer, 1, callbacks=runs.CutCB("after_batch", lambda t: metrics.state_dict() and False))


class InterruptedAt:
    "A trace function that raises Ctrl-C at one line of the code that keeps numbers, in one batch"

    functions = (PassNumbers.add, PassNumbers._columns, PassNumbers._blocks, PassNumbers._begin)
    watched = {f.__code__ for f in (*functions, pass_numbers._pieces, Sent.__init__)}

    def __init__(self, batch, place=None):
        self.batch, self.place, self.seen = batch, place, []

    def __call__(self, frame, event, arg):
        if frame.f_code not in self.watched:
            return None
        if event == "line" and vars(self.trainer).get("batch_num") == self.batch:
            self.seen.append((frame.f_code.co_name, frame.f_lineno))
            if len(self.seen) - 1 == self.place:
                raise KeyboardInterrupt
        return self


def fit_interrupted(tracer, cbs):
    torch.manual_seed(0)
    batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(70)]
    trainer = Trainer(DataLoaders(batches), F.mse_loss, optim.SGD, nn.Linear(2, 1), [BasicTrainCB(), *cbs()])
    tracer.trainer = trainer
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        trainer.fit(1, lr=0.01, valid=False)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return trainer.history


@pytest.mark.parametrize("batch", [10, 63])
@pytest.mark.parametrize(
    "cbs", [lambda: [MetricsCB(show=False)], lambda: [RecorderCB(loss=lambda t: t.loss, twice=lambda t: 2)]]
)
def test_an_interrupt_at_any_line_leaves_rows_that_belong_together(batch, cbs, monkeypatch):
    "In the middle of a block, and where one is made of 64 rows"
    monkeypatch.setattr(PassNumbers, "block", 64)
    whole, tracer = fit_interrupted(InterruptedAt(None), cbs), InterruptedAt(batch)
    fit_interrupted(tracer, cbs)
    places = {name: i for i, name in enumerate(tracer.seen)}.values()  # The last time at each line
    assert len(places) >= (8 if batch == 63 else 3)
    for place in places:
        history = fit_interrupted(InterruptedAt(batch, place), cbs)
        n = len(history.batches)
        assert n in (batch, batch + 1) and history.batches["loss"] == whole.batches["loss"][:n]
        if history.rows:
            mean = sum(history.batches["loss"]) / n
            assert history.rows[-1]["train_loss"] == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("kind", ["buffer", "parameter", "inference"])
def test_a_loss_in_memory_that_is_written_to_later_is_what_it_was(kind):
    class Same:
        order = 5

        def before_fit(self, trainer):
            self.buffer, self.seen = torch.zeros(()), []

        def after_backward(self, trainer):
            if kind == "buffer":
                trainer.loss = self.buffer.copy_(trainer.loss.detach())
            if kind == "parameter":
                trainer.loss = trainer.model.scale
            if kind == "inference":
                with torch.inference_mode():
                    trainer.loss = self.buffer = torch.zeros(()).add_(trainer.batch_num)
            self.seen.append(trainer.loss.item())

        def after_step(self, trainer):
            with torch.no_grad():
                trainer.model.scale.add_(1)

    model = nn.Linear(2, 1)
    model.scale = nn.Parameter(torch.tensor(1.0))
    batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(5)]
    same = Same()
    trainer = Trainer(DataLoaders(batches), F.mse_loss, optim.SGD, model, [BasicTrainCB(), MetricsCB(), same])
    trainer.fit(1, lr=0.01, valid=False)
    before_step = [value + (kind == "parameter") for value in same.seen]  # It is written down after the step
    assert trainer.history.batches["loss"] == before_step


def test_a_weight_may_be_one_tensor_that_is_written_anew_for_each_batch():
    total = torch.zeros(())

    def rewritten(batch):
        return total.fill_(len(batch[1]))

    trainer = make_trainer([MetricsCB(weigh=rewritten, show=False)])
    assert trainer.validate() == trainer.validate(weigh=lambda batch: torch.tensor(len(batch[1])))


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("n", [16, 17])
def test_of_complex_losses_the_real_part_counts_however_many_batches_there_are(n):
    def complex_loss(preds, targets):
        return F.mse_loss(preds, targets) * (1 + 0.2j)

    trainer = make_trainer([MetricsCB(show=False)], valid=[2] * n, loss_func=complex_loss)
    real = make_trainer([MetricsCB(show=False)], valid=[2] * n)
    assert trainer.validate()["valid_loss"] == pytest.approx(real.validate()["valid_loss"])


@pytest.mark.parametrize("gives", ["a mean", "a number for each", "several for each"])
def test_the_mean_of_a_function_is_added_up_in_double_precision(gives):
    shape = {"a mean": (), "a number for each": (2,), "several for each": (2, 3)}[gives]
    metric, x = MeanOf(lambda preds, targets: torch.full(shape, 0.1)), torch.zeros(2, 1)
    for _ in range(5000):
        metric.update(x, x)
    assert abs(float(metric.compute()) - float(torch.tensor(0.1))) < 1e-12


def test_inputs_may_be_nested_tensors():
    class Means(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x):
            return torch.stack([self.linear(row).mean(0) for row in x.unbind()])

    rows = lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(5, 3)])
    dls = DataLoaders([(rows(), torch.randn(2, 1)) for _ in range(3)])
    trainer = Trainer(dls, F.mse_loss, optim.SGD, Means(), [BasicTrainCB(), MetricsCB(show=False)])
    trainer.fit(1, valid=False)
    assert trainer.history["train_loss"][-1] > 0


def test_a_column_of_predictions_for_a_metric_that_wants_none_gets_a_mend_that_helps():
    from torcheval.metrics import R2Score

    def trainer(metric):
        parts = DataLoaders(batches, batches), lambda preds, y: F.mse_loss(preds[:, 0], y), optim.SGD
        return Trainer(*parts, nn.Linear(2, 1), [BasicTrainCB(), MetricsCB(show=False, r2=metric)])

    batches = [(torch.randn(6, 2), torch.randn(6)) for _ in range(2)]
    with pytest.raises(ValueError) as e:
        trainer(R2Score()).fit(1)
    told = next(o for o in e.value.__notes__ if "was updated with predictions (6, 1) and targets (6,)" in o)
    mend = told.partition("say which: `")[2].removesuffix("`.")
    t = trainer(eval(mend, {"MetricOn": MetricOn, "metric": R2Score()}))
    t.fit(1)
    assert "r2" in t.history[-1]
