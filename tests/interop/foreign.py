"A small task, and fits of ours with callbacks that were written for other libraries."

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
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


BATCHES = list(zip(X[:40].split(8), Y[:40].split(8))), list(zip(X[40:].split(8), Y[40:].split(8)))


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
