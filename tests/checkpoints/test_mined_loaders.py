"""Loaders that `before_epoch` makes for the pass."""

import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.trainer import Trainer
from isaac_loop.state.errors import ResumeMismatch
from isaac_loop.train.training import BasicTrainCB
from runs import Cut, CutCB, fit

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def hardest(model):
    with torch.no_grad():
        return (model(X) - Y).flatten().abs().topk(12).indices.tolist()


class MinedCB:
    "Reads the rows that are hardest for the model when an epoch begins"

    def before_epoch(self, trainer):
        if trainer.training:
            trainer.dl = DataLoader(Subset(TensorDataset(X, Y), self.mined(trainer)), 3, shuffle=True)

    def mined(self, trainer):
        with torch.no_grad():
            return (trainer.model(X) - Y).flatten().abs().topk(12).indices.tolist()


class MinedByFunctionCB(MinedCB):
    def mined(self, trainer):
        return hardest(trainer.model)


class KeptCB(MinedCB):
    "Chooses in `after_epoch`, and keeps the choice"

    def __init__(self):
        self.chosen = list(range(12))

    def mined(self, trainer):
        return self.chosen

    def after_epoch(self, trainer):
        if trainer.training:
            self.chosen = hardest(trainer.model)


class DrawnCB(MinedCB):
    "Rows that draw from a generator that nobody saves"

    numbers = iter(torch.rand(1000).tolist())

    def mined(self, trainer):
        return [int(24 * next(self.numbers)) for _ in range(12)]


def run_of(dl, callback):
    torch.manual_seed(1)
    return Trainer(DataLoaders(dl), F.mse_loss, optim.SGD, nn.Linear(4, 1), [BasicTrainCB(), callback])


def broken(run, folder, at=6, every=2):
    cut = CutCB("before_batch", lambda t: t.n_updates == at)
    with warnings.catch_warnings(record=True) as told, pytest.raises(Cut):
        warnings.simplefilter("always")
        fit(run, 4, valid=False, callbacks=[CheckpointCB(folder, every=every), cut])
    return [str(o.message) for o in told]


def mined_run(kind):
    return run_of(exact_loader(TensorDataset(X, Y), 4, seed=1), kind())


@pytest.mark.parametrize("kind", [MinedCB, MinedByFunctionCB])
def test_a_plain_loader_made_with_the_model_is_named_and_refused_within_the_pass(tmp_path, kind):
    (said,) = [o for o in broken(mined_run(kind), tmp_path) if "lies in the middle of an epoch" in o]
    assert f"`{kind.__name__}` made in `before_epoch`" in said
    with pytest.warns(UserWarning), pytest.raises(ResumeMismatch, match="is another one"):
        fit(mined_run(kind), 4, valid=False, callbacks=CheckpointCB(tmp_path, every=2))


def test_a_plain_loader_made_of_what_is_kept_goes_on_exactly(tmp_path):
    whole = fit(mined_run(KeptCB), 4, valid=False)
    assert not [o for o in broken(mined_run(KeptCB), tmp_path) if "middle of an epoch" in o]
    with pytest.warns(UserWarning, match="does not know its position") as told:
        again = fit(mined_run(KeptCB), 4, valid=False, callbacks=CheckpointCB(tmp_path, every=2))
    assert torch.equal(whole.model.weight, again.model.weight)
    assert not [o for o in told if "came out otherwise" in str(o.message)]


def test_a_plain_loader_that_comes_out_otherwise_without_the_model_is_named(tmp_path):
    broken(mined_run(DrawnCB), tmp_path)
    with pytest.warns(UserWarning, match="came out otherwise when it was read again"):
        fit(mined_run(DrawnCB), 4, valid=False, callbacks=CheckpointCB(tmp_path, every=2))
