"A list of rows that is itself the data is in no checkpoint, whoever holds it; that is said when rows change."

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

from isaac_loop.basics.tensors import set_seed
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.trainer import Trainer
from isaac_loop.train.training import BasicTrainCB

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


class RelabelsCB:
    "Holds the list, and exchanges rows in it"

    def before_fit(self, trainer):
        self.kept = trainer.dls.train.dataset

    def after_epoch(self, trainer):
        for i in range(4):
            self.kept[i] = X[i], torch.tensor(trainer.epoch)


class OnlyHoldsCB:
    "Holds the list, and looks at it"

    def before_fit(self, trainer):
        self.kept = trainer.dls.train.dataset

    def after_epoch(self, trainer):
        self.first = self.kept[0][0].sum().item()


LOADERS = {"plain": lambda rows: DataLoader(rows, 8), "exact": lambda rows: exact_loader(rows, 8)}


def told_by(callback, loader, folder, recwarn):
    set_seed(1)
    rows = [(x, torch.tensor(0)) for x in X]
    callbacks = [BasicTrainCB(), CheckpointCB(folder, every="epoch"), callback]
    dls = DataLoaders(LOADERS[loader](rows))
    Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(4, 3), callbacks).fit(2, lr=0.1, valid=False)
    return [str(w.message) for w in recwarn if "changed during this fit" in str(w.message)]


@pytest.mark.parametrize("loader", LOADERS)
def test_rows_that_are_exchanged_in_a_held_list_are_named(loader, tmp_path, recwarn):
    (text,) = told_by(RelabelsCB(), loader, tmp_path, recwarn)
    assert "saved with nobody, also if a callback holds it" in text and "self.kept = " not in text


@pytest.mark.parametrize("loader", LOADERS)
def test_a_list_that_is_only_held_is_not_named(loader, tmp_path, recwarn):
    assert not told_by(OnlyHoldsCB(), loader, tmp_path, recwarn)
