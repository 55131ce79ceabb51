"Looks at data that change do not stumble over what users hold, and are taken once."

import functools

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from isaac_loop.basics.tensors import set_seed
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.trainer import Trainer
from isaac_loop.state.changed_data import changes_of, writes_at_beginning
from isaac_loop.train.training import BasicTrainCB


class Config(dict):
    "Gives its entries as attributes, and fails with a `KeyError`"

    __getattr__ = dict.__getitem__


@functools.wraps(functools.partial(print, "labels"))
def tells():
    pass


class RelabelsCB:
    def __init__(self, held):
        self.held = held

    def after_epoch(self, trainer):
        trainer.dls.train.dataset.tensors[1][:4] = 1


def trained(folder, *callbacks, model=None):
    set_seed(1)
    data = TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.long))
    cbs = [BasicTrainCB(), CheckpointCB(folder, every="epoch"), *callbacks]
    trainer = Trainer(
        DataLoaders(DataLoader(data, 8)), F.cross_entropy, optim.SGD, model or nn.Linear(4, 2), cbs
    )
    trainer.fit(2, lr=0.1, valid=False)
    return trainer


@pytest.mark.parametrize("held", [Config(rate=1), tells], ids=["config", "wrapped partial"])
def test_what_a_callback_holds_does_not_stop_a_save(held, tmp_path):
    with pytest.warns(UserWarning, match="changed during this fit"):
        trained(tmp_path, RelabelsCB(held))


class SetsLabelsCB:
    "Writes labels when an epoch begins"

    def before_fit(self, trainer):
        self.seen = []

    def before_epoch(self, trainer):
        trainer.dls.train.dataset.tensors[1][: trainer.epoch + 1] = 1

    def before_batch(self, trainer):
        self.seen.append(changes_of(trainer).touched)


@pytest.mark.parametrize("others", [[], [RewindCB]])
def test_two_who_save_know_alike_that_the_beginning_has_written(others, tmp_path):
    trainer = trained(tmp_path, SetsLabelsCB(), *(cb(1) for cb in others))
    alone = trained(tmp_path / "alone", SetsLabelsCB())
    assert trainer.SetsLabelsCB.seen == alone.SetsLabelsCB.seen


class Deletes:
    def before_epoch(self, trainer):
        del self.rows[self.n :]
        self.rows.extend(self.new)


def before_epoch(trainer):
    trainer.rows[3] = 1


def after_epoch(trainer):
    trainer.rows[3] = 1


def test_who_writes_the_rows_anew_is_known():
    assert writes_at_beginning(Deletes()) and writes_at_beginning(before_epoch)
    assert not writes_at_beginning(after_epoch)
