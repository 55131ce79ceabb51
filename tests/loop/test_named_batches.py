"Batches that are mappings: their order decides what is input, and names that say otherwise are told of."

import warnings
from collections import OrderedDict, UserDict

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import BasicTrainCB, DataLoaders, MetricsCB, Trainer

A = torch.randn(6, 3)


def batches(*names, kind=dict):
    return [kind((name, A * (i + 1)) for i, name in enumerate(names)) for _ in range(3)]


def trainer_of(data, *cbs, **options):
    loaders = DataLoaders(data, data, **options)
    cbs = [*cbs, MetricsCB(show=False)] if cbs else [BasicTrainCB(), MetricsCB(show=False)]
    return Trainer(loaders, F.mse_loss, optim.SGD, nn.Linear(3, 3), cbs)


def told(f):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        f()
    return [str(o.message) for o in found]


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
@pytest.mark.parametrize(
    "names", [("target", "input"), ("Label", "image"), ("labels", "input_ids"), ("y", "x")]
)
def test_a_target_before_the_input_is_told_once_with_the_cure(names, kind):
    trainer = trainer_of(batches(*names, kind=kind))
    first, second = told(lambda: trainer.fit(2)), told(lambda: trainer.fit(1))
    assert len(first) == 1 and second == []
    assert f"split=lambda batch: (batch['{names[1]}'], batch['{names[0]}'])" in first[0]


def test_it_is_told_in_the_first_batch():
    trainer = trainer_of(batches("target", "input"))

    def after_predict(trainer):
        seen.append(set(trainer.plan.told))

    seen = []
    told(lambda: trainer.fit(1, callbacks=after_predict))
    assert any("names" in str(o) for o in seen[0])


@pytest.mark.parametrize(
    "names, options",
    [
        (("input", "target"), {}),
        (("image", "label", "mask"), {}),
        (("x", "y", "value"), {}),
        (("y", "value"), {}),  # A coordinate
        (("target", "input"), dict(split=lambda batch: (batch["input"], batch["target"]))),
        ((1, 2), {}),
    ],
)
def test_what_is_in_order_is_let_alone(names, options):
    loss_func = (lambda preds, y, *rest: F.mse_loss(preds, y)) if len(names) > 2 else F.mse_loss
    trainer = trainer_of(batches(*names), **options)
    trainer.loss_func = loss_func
    assert told(lambda: trainer.fit(1)) == []


def test_labels_that_the_model_gets_too_are_meant():
    class Own(nn.Linear):
        def forward(self, labels, x):
            return (super().forward(x) - labels).square().mean()

    trainer = Trainer(
        DataLoaders(batches("labels", "x"), None, n_inp=2),
        lambda loss: loss,
        optim.SGD,
        Own(3, 3),
        BasicTrainCB(),
    )
    assert told(lambda: trainer.fit(1, valid=False)) == []


def test_who_reads_by_name_hears_nothing():
    class Named(BasicTrainCB):
        def predict(self, trainer):
            trainer.preds = trainer.model(trainer.batch["input"])

        def get_loss(self, trainer):
            trainer.loss = F.mse_loss(trainer.preds, trainer.batch["target"])

    class Splits(Trainer):
        def split(self, batch):
            return (batch["input"],), (batch["target"],)

    data = batches("target", "input")
    assert told(lambda: trainer_of(data, Named()).fit(1)) == []
    splits = Splits(DataLoaders(data, data), F.mse_loss, optim.SGD, nn.Linear(3, 3), BasicTrainCB())
    assert told(lambda: splits.fit(1)) == []


def test_a_check_tells_it():
    trainer = trainer_of(batches("target", "input"))
    found = []
    told(lambda: found.extend(trainer.check(batches=2)))
    assert "targets_first" in [o.name for o in found]
