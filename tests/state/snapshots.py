"A small trainer with a callback that holds anything, for tests of snapshots."

import dataclasses

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from isaac_loop.all import BasicTrainCB, DataLoaders, Trainer


def named(name, *values):
    "A case with a name of its own"
    return pytest.param(*values, id=name)


def make_batches(n=20, size=8):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 4, generator=g), torch.randint(0, 3, (n,), generator=g)
    return list(zip(x.split(size), y.split(size)))


def make_trainer(callbacks=(), train=None, valid=None, model=None, opt_func=optim.Adam):
    batches = make_batches()
    return Trainer(
        DataLoaders(batches if train is None else train, batches[:2] if valid is None else valid),
        F.cross_entropy,
        opt_func,
        model or nn.Linear(4, 3),
        [BasicTrainCB(), *callbacks],
    )


def tag(x):
    x.tag = "mine"


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = [1]


@dataclasses.dataclass
class Plain:
    a: list = dataclasses.field(default_factory=lambda: [1])


def rows():
    return TensorDataset(*(torch.cat(o) for o in zip(*make_batches())))


def seeded():
    return torch.Generator().manual_seed(7)


class Resuming:
    "Goes on where it stopped"

    def __init__(self):
        self.position = 0

    def __iter__(self):
        self.position += 1
        return iter(make_batches()[self.position % 3 :])


def sampled(sampler):
    return DataLoader(rows(), 8, sampler=sampler)


class HoldCB:
    "Holds what users hold: the data"

    def __init__(self, *held):
        self.held = held

    def log(self, trainer):
        pass
