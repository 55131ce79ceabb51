"""Data that `before_epoch` sets anew from what a callback keeps: a run goes on in the middle of the epoch."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.trainer import Trainer
from isaac_loop.train.training import BasicTrainCB
from runs import Cut, CutCB, fit

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class LabelledData(Dataset):
    def __init__(self):
        self.labels = Y.flatten().tolist()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return X[i], torch.tensor([self.labels[i]])

    def relabel(self, new):
        self.labels = list(new)


class LabelsCB:
    "Improves labels after an epoch, and gives them to the data before the next one"

    def __init__(self):
        self.new = Y.flatten().tolist()

    def before_epoch(self, trainer):
        if trainer.training:
            self.give(trainer.dls.train.dataset)

    def give(self, data):
        data.labels = list(self.new)

    def after_epoch(self, trainer):
        with torch.no_grad():
            self.new[:12] = trainer.model(X[:12]).flatten().tolist()


class ByMethodCB(LabelsCB):
    def give(self, data):
        data.relabel(self.new)


class InPlaceCB(LabelsCB):
    def give(self, data):
        data.labels[:] = self.new


class PacedCB:
    def __init__(self):
        self.losses = torch.arange(24.0)

    def before_epoch(self, trainer):
        if trainer.training:
            trainer.dls.train.dataset.indices = self.losses.argsort()[:16].tolist()

    def log(self, trainer):
        with torch.no_grad():
            self.losses = (trainer.model(X) - Y).flatten().abs()


def labelled():
    return LabelledData()


def part():
    return Subset(TensorDataset(X, Y), list(range(16)))


WAYS = {
    "labels": (labelled, LabelsCB),
    "method": (labelled, ByMethodCB),
    "in place": (labelled, InPlaceCB),
    "indices": (part, PacedCB),
}
LOADERS = {
    "exact": lambda data: exact_loader(data, 4, seed=1),
    "plain": lambda data: DataLoader(data, 4, shuffle=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_what_before_epoch_sets_is_as_it_was_in_the_middle_of_the_epoch(tmp_path, way, loader, same):
    data, callback = WAYS[way]

    def run():
        torch.manual_seed(1)
        dls = DataLoaders(LOADERS[loader](data()))
        return Trainer(dls, F.mse_loss, optim.SGD, nn.Linear(4, 1), [BasicTrainCB(), callback()])

    whole, first = fit(run(), 4, valid=False), run()
    cut = CutCB("before_batch", lambda t: t.n_updates == 10)
    with pytest.raises(Cut):
        fit(first, 4, valid=False, callbacks=[CheckpointCB(tmp_path, every=2), cut])
    again = fit(first if same else run(), 4, valid=False, callbacks=CheckpointCB(tmp_path, every=2))
    assert torch.equal(whole.model.weight, again.model.weight)
