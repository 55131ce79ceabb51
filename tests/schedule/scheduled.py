"A small trainer whose rates are noted."

from functools import partial

import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.trainer import Trainer


MOMENTUM = partial(optim.SGD, momentum=0.9)


def make_batches(n=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, generator=g), torch.randn(4, 1, generator=g)) for _ in range(n)]


def make_model():
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))


def still_model():
    "Without dropout, so that no random numbers are needed"
    model = make_model()
    model[1].p = 0.0
    return model


def lr_of(group):
    return lambda trainer: trainer.opt.param_groups[group]["lr"]


def make_trainer(*callbacks, n=5, opt_func=MOMENTUM, model=None, batches=None, valid=None):
    torch.manual_seed(0)
    return Trainer(
        DataLoaders(make_batches(n) if batches is None else batches, valid),
        F.mse_loss,
        opt_func,
        model or make_model(),
        [BasicTrainCB(), RecorderCB(), *callbacks],
    )


def same(a, b):
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


class RecorderCBNamed(RecorderCB):
    name = "second_recorder"


class WriteCB:
    "Writes a column from a list"

    def __init__(self, values, name="score", declare=True):
        self.values, self.column = values, name
        if declare:
            self.columns = [name]

    def cleanup_epoch(self, trainer):
        if self.values[trainer.epoch] is not None:
            trainer.history.write(**{self.column: self.values[trainer.epoch]})
