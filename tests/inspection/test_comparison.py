"""What `compare` tells of loss functions that differ in what is around them, and of the last fits."""

import pytest
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop import Trainer
from isaac_loop.data import DataLoaders
from isaac_loop.inspection import compare


def weighed(held, key):
    return lambda preds, y: F.cross_entropy(preds, y) * held[key]


def by_default(held):
    def loss(preds, y, weights=held):
        return F.cross_entropy(preds, y) * weights["w"]

    return loss


def trainer_of(loss):
    return Trainer(DataLoaders([1]), loss, optim.SGD, nn.Linear(4, 3), None)


LOSSES = {
    "a dict": lambda n: weighed({"w": n}, "w"),
    "a list": lambda n: weighed([n], 0),
    "a list in a dict": lambda n: weighed({"w": [n]}, "w"),
    "a long list": lambda n: weighed([*range(100), n], 100),
    "a default": lambda n: by_default({"w": n}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_holds_is_compared(name):
    a, b, c = (trainer_of(LOSSES[name](n)) for n in (1.0, 2.0, 1.0))
    assert list(compare(a, b).differences) == ["loss_func"]
    assert not compare(a, c).differences


def test_a_list_that_holds_itself_is_compared():
    held = [1.0]
    held.append(held)
    assert not compare(trainer_of(weighed(held, 0)), trainer_of(weighed(held, 0))).differences


def test_the_rate_and_the_epochs_of_the_last_fits_are_compared():
    a, b, c = (trainer_of(F.cross_entropy) for _ in range(3))
    a.fit(1, lr=0.01, valid=False)
    assert not compare(a, b).differences, "one of them has not trained yet"
    b.fit(2, lr=0.1, valid=False)
    c.fit(2, lr=0.01, valid=False)
    assert list(compare(a, b).differences) == ["last fit, n_epochs", "last fit, lr"]
    assert compare(a, c).differences == {"last fit, n_epochs": ("1", "2")}


def test_a_rate_that_nobody_was_given_is_not_compared():
    a, b = (trainer_of(F.cross_entropy) for _ in range(2))
    for trainer, lr in ((a, 0.01), (b, 0.1)):
        trainer.opt_func, trainer.opt = None, optim.SGD(trainer.model.parameters(), lr=1.0)
        trainer.fit(1, lr=lr, valid=False)
    assert not compare(a, b).differences
