"""What callbacks share with the loss, the model and the data, in a script and with the trainer.

A plain loop has one model and one of each object, as the trainer has: what changes on one side is seen on
the other, or the script is refused with words on what to do.
"""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop import Trainer, set_seed
from isaac_loop.callbacks import BasicTrainCB
from isaac_loop.data import DataLoaders
from test_script import both

SETTINGS = {"beta": 0.0}


class SetsBetaCB:
    def before_epoch(self, trainer):
        SETTINGS["beta"] = trainer.epoch * 1.0


class Holder:
    settings = SETTINGS


class SetsByClassCB:
    def before_epoch(self, trainer):
        Holder.settings["beta"] = trainer.epoch * 1.0


def loss_by_variable(preds, y):
    return F.cross_entropy(preds, y) + SETTINGS["beta"] * preds.pow(2).mean()


def beta():
    return SETTINGS["beta"]


def loss_by_helper(preds, y):
    return F.cross_entropy(preds, y) + beta() * preds.pow(2).mean()


def loss_by_closure():
    held = SETTINGS
    return lambda preds, y: F.cross_entropy(preds, y) + held["beta"] * preds.pow(2).mean()


class LossOfLambda(nn.Module):
    def __init__(self):
        super().__init__()
        self.further = lambda preds: SETTINGS["beta"] * preds.pow(2).mean()

    def forward(self, preds, y):
        return F.cross_entropy(preds, y) + self.further(preds)


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) / (1 + SETTINGS["beta"])


class Scaled:
    def __init__(self, batches):
        self.batches, self.transform = batches, lambda x: x * (1 + SETTINGS["beta"])

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return ((self.transform(x), y) for x, y in self.batches)


def batches(n=3):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(n)]


def trainer_of(callbacks, loss=F.cross_entropy, model=None, train=None, opt_func=optim.SGD, valid=True):
    set_seed(0)
    SETTINGS["beta"] = 0.0
    dls = DataLoaders(train or batches(), batches(2) if valid else None)
    return Trainer(dls, loss, opt_func, model or nn.Linear(4, 3), [BasicTrainCB(), *callbacks])


SHARING = {
    "the loss, by a variable": lambda kind: trainer_of([kind()], loss_by_variable),
    "the loss, by a helper": lambda kind: trainer_of([kind()], loss_by_helper),
    "the loss, by a closure": lambda kind: trainer_of([kind()], loss_by_closure()),
    "a lambda of the loss": lambda kind: trainer_of([kind()], LossOfLambda()),
    "the model": lambda kind: trainer_of([kind()], model=Tempered()),
    "the data": lambda kind: trainer_of([kind()], train=Scaled(batches())),
}


@pytest.mark.parametrize("kind", [SetsBetaCB, SetsByClassCB])
@pytest.mark.parametrize("name", SHARING)
def test_what_a_function_reads_and_a_callback_changes_stays_one_thing(name, kind, monkeypatch):
    both(lambda: SHARING[name](kind), monkeypatch)


class LossCB:
    "Its own loss, whose weight grows"

    beta = 0.0

    def loss(self, preds, y):
        return F.cross_entropy(preds, y) + self.beta * preds.pow(2).mean()

    def before_epoch(self, trainer):
        self.beta = trainer.epoch * 1.0


LOSSES = {
    "its method": lambda cb: cb.loss,
    "a function around it": lambda cb: lambda preds, y: cb.loss(preds, y),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_leads_to_a_callback_is_refused(name):
    cb = LossCB()
    trainer = trainer_of([cb], LOSSES[name](cb))
    with pytest.raises(ValueError, match="`trainer.loss_func` leads to `LossCB`.*Keep what both need in an"):
        trainer.to_script()
    assert "loss_func: it leads to `LossCB`" in trainer.to_script(partial=True).not_written[0]


def test_a_loss_that_reads_the_trainer_is_refused():
    def loss(preds, y):
        return F.cross_entropy(preds, y) * (1 + trainer.epoch)

    trainer = trainer_of([], loss)
    with pytest.raises(ValueError, match="`trainer.loss_func` leads to the trainer"):
        trainer.to_script()


def scaled(x):
    return x * getattr(scaled, "by", 1)


class SetsOnFunctionCB:
    def before_epoch(self, trainer):
        scaled.by = trainer.epoch


def test_who_sets_an_attribute_of_a_function_is_refused():
    trainer = trainer_of([SetsOnFunctionCB()], lambda preds, y: F.cross_entropy(scaled(preds), y))
    with pytest.raises(ValueError, match="sets an attribute of the function `scaled`"):
        trainer.to_script()
