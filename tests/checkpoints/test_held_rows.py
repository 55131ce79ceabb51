"""Rows in a list that a callback holds and changes: a checkpoint has them."""

import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.trainer import Trainer
from isaac_loop.train.training import BasicTrainCB
from runs import Cut, CutCB, fit

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def hardest(model):
    with torch.no_grad():
        return (model(X) - Y).flatten().abs().topk(12).indices.tolist()


def run_of(dl, callback):
    torch.manual_seed(1)
    return Trainer(DataLoaders(dl), F.mse_loss, optim.SGD, nn.Linear(4, 1), [BasicTrainCB(), callback])


def broken(run, folder, at=6, every=2):
    cut = CutCB("before_batch", lambda t: t.n_updates == at)
    with warnings.catch_warnings(record=True) as told, pytest.raises(Cut):
        warnings.simplefilter("always")
        fit(run, 4, valid=False, callbacks=[CheckpointCB(folder, every=every), cut])
    return [str(o.message) for o in told]


class ReplacesCB:
    "Writes into the rows that it holds"

    def before_fit(self, trainer):
        self.kept = trainer.dls.train.dataset

    def after_epoch(self, trainer):
        with torch.no_grad():
            found = trainer.model(X)
        for i in range(12):
            self.kept[i] = X[i], found[i]


class GrowsCB(ReplacesCB):
    def after_epoch(self, trainer):
        self.kept += [(X[i] + 0.1, Y[i]) for i in hardest(trainer.model)[:4]]


class GrowsAndMakesCB(GrowsCB):
    def before_epoch(self, trainer):
        trainer.dl = exact_loader(self.kept, 4, seed=trainer.epoch)


HELD_ROWS = [
    (ReplacesCB, "exact"),
    (ReplacesCB, "plain"),
    (GrowsCB, "plain"),
    (GrowsAndMakesCB, "exact"),
    (GrowsAndMakesCB, "plain"),
]


@pytest.mark.parametrize(("kind", "loader"), HELD_ROWS)
@pytest.mark.parametrize("same", [False, True])
def test_rows_in_a_list_that_is_held_are_saved(tmp_path, kind, loader, same):
    def run():
        rows = list(zip(X, Y, strict=True))
        dl = exact_loader(rows, 4, seed=1) if loader == "exact" else DataLoader(rows, 4, shuffle=True)
        return run_of(dl, kind())

    whole, first = fit(run(), 4, valid=False), run()
    told = broken(first, tmp_path, 15, "epoch")
    with warnings.catch_warnings(record=True) as more:
        warnings.simplefilter("always")
        again = fit(first if same else run(), 4, valid=False, callbacks=CheckpointCB(tmp_path, every="epoch"))
    assert torch.equal(whole.model.weight, again.model.weight)
    assert not [o for o in [*told, *(str(o.message) for o in more)] if "dls.train" in o]
