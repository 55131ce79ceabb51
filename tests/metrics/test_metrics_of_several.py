"""Losses and metrics where several processes share the rows, checked against one process over all of them.

Data are in double precision, batches and shares uneven, and there is a process without a row at the end of
a pass. Every process must have the same history to the last bit.
"""

import math
from functools import partial

import pytest
import torch
import torchmetrics
from torch.nn import functional as F
from torcheval.metrics import MeanSquaredError, R2Score

import several
from results import check, fitted
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.events import CancelBatchException, CancelEpochException, Order
from isaac_loop.metrics.any_metric import MetricOn
from isaac_loop.metrics.epoch_time import EpochTimeCB
from isaac_loop.metrics.metrics import MetricsCB

pytestmark = pytest.mark.processes


class Kept:
    "A metric of the user's own that knows how to be put together"

    def __init__(self):
        self.reset()

    def reset(self):
        self.rows = []

    def update(self, preds, targets):
        self.rows += (preds - targets).flatten().tolist()

    def compute(self):
        rows = sorted(self.rows)
        return {"lowest": rows[0], "rows": len(rows)} if rows else {}

    def merge_state(self, metrics):
        for metric in metrics:
            self.rows += metric.rows


class Leave:
    "Leaves a batch, or a pass, in the process that it is told"

    def __init__(self, who, batch, error, training):
        self.who, self.batch, self.error = who, batch, error
        self.on_train, self.on_valid, self.order = training, not training, Order.DATA

    def before_batch(self, trainer):
        if self.who in (None, trainer.ranks.rank) and trainer.batch_num == self.batch:
            raise self.error("on purpose")


class Stop:
    "Wishes to stop, in one process"

    def after_batch(self, trainer):
        if trainer.ranks.rank == trainer.ranks.size - 1 and trainer.n_updates == 3:
            trainer.request_stop("enough")


def mae(preds, targets):
    return (preds - targets).abs()


def metrics():
    "One of each kind, with the options of a `MetricsCB`"
    both = torchmetrics.MetricCollection(
        [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()]
    ).set_dtype(torch.float64)
    return dict(
        mae=mae,
        mse=MeanSquaredError(),
        on=MetricOn(Kept(), lambda preds, targets: (preds, targets)),
        kept=Kept(),
        both=both,
        pearson=MetricOn(
            torchmetrics.PearsonCorrCoef().set_dtype(torch.float64), lambda p, t: (p[:, 0], t[:, 0])
        ),
        spread=MetricOn(R2Score(), lambda p, t: (p, t)),
    )


def test_metrics_of_every_kind_are_those_of_all_rows():
    "21 rows in batches of 8: shares are uneven, and with three processes a last batch of 5 gives 2, 2 and 1"
    rows = check(lambda: [MetricsCB(train_metrics=True, show=False, **metrics())])[-1:]
    assert rows[0]["kept_rows"] == 21 and rows[0]["train_kept_rows"] == 53


def test_a_process_without_a_single_row_counts_nothing():
    def make():
        return [
            MetricsCB(show=False, **{k: m for k, m in metrics().items() if k not in ("pearson", "spread")})
        ]

    dls = partial(several.loaders, n_valid=1)
    assert check(make, (2, 3), dls=dls)[-1]["kept_rows"] == 1


@pytest.mark.parametrize("weigh", ["samples", "mean", "function", "sum"])
def test_losses_are_weighed_as_in_one_process(weigh):
    loss = F.mse_loss if weigh != "sum" else partial(F.mse_loss, reduction="sum")
    how = (lambda batch: (batch[0][:, 0] > 0).sum()) if weigh == "function" else weigh

    def weighed_loss(preds, targets):
        return loss(preds, targets)

    def make():
        return [MetricsCB(weigh=how, show=False)]

    if weigh == "function":  # Then the loss must be a mean over what is counted, and that of a row is 0 or 1
        where = several.rows(53).tensors[0][:, 0] > 0
        assert 10 < where.sum() < 43
        check(make, (2,), dls=counted_loaders, loss_func=counted_loss)
    else:
        check(make, (2, 3), loss_func=weighed_loss if weigh == "mean" else loss)


def counted_loaders():
    "Targets that say by a NaN which rows do not count"
    dls = several.loaders()
    for dl in (dls.train, dls.valid):
        x, y = dl.dataset.tensors
        y[x[:, 0] <= 0] = math.nan
    return dls


def counted_loss(preds, targets):
    "The mean over rows that count; of none of them 0"
    counts = ~targets.isnan()
    errors = (preds - targets.nan_to_num()).square() * counts
    return errors.sum() / counts.sum().clamp(min=1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("error", [CancelBatchException, CancelEpochException])
def test_a_batch_or_a_pass_that_all_leave_is_left_out_as_in_one_process(error, training):
    check(lambda: [MetricsCB(mae=mae, show=False), Leave(None, 1, error, training)], (2,))


def test_what_one_process_leaves_in_training_all_leave_and_history_is_the_same():
    found = several.in_processes(
        2, fitted, lambda: [MetricsCB(mae=mae, show=False), Leave(1, 2, CancelBatchException, True)]
    )
    assert repr(found[0]) == repr(found[1])
    _, batches, _ = found[0]
    assert 2 not in [b for b, t in zip(batches["batch"], batches["training"]) if t]


def test_a_stop_wished_by_one_process_leaves_one_history():
    found = several.in_processes(2, fitted, lambda: [MetricsCB(mae=mae, show=False), Stop()])
    assert repr(found[0]) == repr(found[1])
    assert len(found[0][0]) == 1


def test_several_recorders_and_uneven_batches_agree_with_one_process():
    "Batches that cannot be shared evenly give the same numbers, so there is nothing to warn of"

    def make():
        again = MetricsCB(second=mae, show=False)
        again.name = "again"
        return [MetricsCB(first=mae, show=False), again]

    def dls():
        train = exact_loader(several.rows(47), 7, seed=3)
        return DataLoaders(train, exact_loader(several.rows(23, 1), 5, shuffle=False))

    rows = check(make, (2, 3), dls=dls)
    assert rows[-1]["first"] == rows[-1]["second"]


class Counts:
    "Counts rows, and nobody knows how to put two of them together"

    def reset(self):
        self.n = 0

    def update(self, preds, targets):
        self.n += len(targets)

    def compute(self):
        return self.n


def test_a_metric_that_cannot_be_put_together_is_refused_before_training_and_only_in_several_processes():
    assert fitted(lambda: [MetricsCB(seen=Counts(), show=False)], 1)[0][0]["seen"] == 21
    with pytest.raises(TypeError, match="`seen` is a Counts.*merge_state.*torchmetrics.*function"):
        several.in_processes(2, fitted, lambda: [MetricsCB(seen=Counts(), show=False)], 1)


class OwnData:
    "Has a validation pass read a loader that is not shared"

    order = Order.FIRST

    def before_epoch(self, trainer):
        if not trainer.training:
            trainer.dl = self.dl = exact_loader(several.rows(11, 5), 4, shuffle=False)


def test_a_pass_over_a_loader_that_is_not_shared_counts_its_rows_once():
    "Metrics of torchmetrics would otherwise ask the other processes themselves"

    def make():
        summed = MetricOn(torchmetrics.SumMetric().set_dtype(torch.float64), lambda p, t: ((p - t).abs(),))
        return [MetricsCB(sum=summed, show=False), OwnData()]

    check(make, (2,), n_epochs=1)


def test_rows_are_printed_by_main_alone(capfd):
    def make():
        return [MetricsCB(mae=mae), EpochTimeCB(n_batches=2)]

    several.in_processes(2, fitted, make, 1)
    out = capfd.readouterr().out
    assert out.count("train_loss") == 1
    assert out.count("for a training batch") == 1
