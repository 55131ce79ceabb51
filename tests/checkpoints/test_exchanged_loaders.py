"A loader that was exchanged in the course of a fit is told of before it is too late."

import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.trainer import Trainer
from isaac_loop.train.training import BasicTrainCB

FURTHER = [(torch.ones(2), torch.zeros(1)) for _ in range(12)]


class HarderCB:
    "Takes other rows from the third epoch on"

    def __init__(self, place):
        self.place, self.harder = place, exact_loader(FURTHER, 2, seed=2)

    def log(self, trainer):
        if trainer.epoch == 1 and self.place == "log":
            trainer.dls.train = self.harder

    def before_epoch(self, trainer):
        if trainer.training and trainer.epoch > 1 and self.place == "before_epoch":
            trainer.dl = self.harder


def trained(folder, place, *callbacks):
    torch.manual_seed(0)
    rows = [(torch.randn(2), torch.randn(1)) for _ in range(12)]
    cbs = [BasicTrainCB(), HarderCB(place), CheckpointCB(folder, every=4)]
    trainer = Trainer(DataLoaders(exact_loader(rows, 2, seed=1)), F.mse_loss, optim.SGD, nn.Linear(2, 1), cbs)
    trainer.fit(4, lr=0.1, valid=False, callbacks=callbacks)
    return trainer


def test_an_exchanged_loader_is_told_of_once_at_the_next_save(tmp_path):
    with pytest.warns(UserWarning, match="`dls.train` was exchanged in the course of this fit") as told:
        trainer = trained(tmp_path / "run", "log")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(1, lr=0.1, valid=False)  # Which begins with that loader


def test_what_is_advised_instead_goes_on_exactly(tmp_path):
    def before_step(trainer):
        if trainer.n_updates == 17:
            raise RuntimeError("power cut")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = trained(tmp_path / "whole", "before_epoch")
        with pytest.raises(RuntimeError, match="power cut"):
            trained(tmp_path / "cut", "before_epoch", before_step)
        assert torch.equal(trained(tmp_path / "cut", "before_epoch").model.weight, whole.model.weight)
