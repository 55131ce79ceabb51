"A model that is no `nn.Module`, as lessons write it, goes on by its own state, or is refused in words."

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.checkpoints.exports import ExportCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.trainer import Trainer
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.train.averaging import EMACB, SWACB
from isaac_loop.train.freezing import BatchNormEvalCB, FreezeCB
from isaac_loop.train.training import BasicTrainCB
from runs import Cut, CutCB


class PlainModel:
    def __init__(self):
        self.layers = [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def parameters(self):
        return [p for layer in self.layers for p in layer.parameters()]


class Told(PlainModel):
    def state_dict(self):
        return {f"layer {i}": layer.state_dict() for i, layer in enumerate(self.layers)}

    def load_state_dict(self, state):
        for layer, saved in zip(self.layers, state.values()):
            layer.load_state_dict(saved)


def make(model, *callbacks):
    torch.manual_seed(0)
    rows = torch.randn(12, 3)
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    dls = DataLoaders(exact_loader(data, 4, seed=1), exact_loader(data, 4, seed=1, shuffle=False))
    return Trainer(dls, F.mse_loss, optim.Adam, model(), [BasicTrainCB(), *callbacks])


@pytest.mark.parametrize("every", ["epoch", 1])
def test_a_plain_model_goes_on_by_its_own_state(every, tmp_path):
    whole = make(Told)
    whole.fit(3, lr=0.1)
    with pytest.raises(Cut):
        cut = CutCB("after_batch", lambda trainer: trainer.n_updates == 5)
        make(Told, CheckpointCB(tmp_path, every=every), cut).fit(3, lr=0.1)
    resumed = make(Told, CheckpointCB(tmp_path, every=every))
    resumed.fit(3, lr=0.1)
    for p, q in zip(resumed.model.parameters(), whole.model.parameters()):
        assert torch.equal(p, q)


def after_step(trainer):
    raise AssertionError("It has trained")


def test_a_model_whose_weights_nobody_can_save_is_refused_before_it_trains(tmp_path):
    for callback in (CheckpointCB(tmp_path), ExportCB(tmp_path / "exports"), RewindCB()):
        with pytest.raises(TypeError, match=r"is a `PlainModel`, which has no `state_dict`.* `nn.Module`"):
            make(PlainModel, callback, after_step).fit(1)


@pytest.mark.parametrize("callback", [EMACB, SWACB, KeepBestCB, BatchNormEvalCB, lambda: FreezeCB("0")])
def test_who_needs_names_refuses_a_plain_model_before_it_trains(callback):
    with pytest.raises(TypeError, match=r"CB` works with the named .* a `Told` has none. Derive `Told`"):
        make(Told, MetricsCB(), callback(), after_step).fit(1)
