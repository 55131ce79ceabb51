"Small models and trainers to look into."

import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer


def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


def make_batches(n=4, rows=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(rows, 6, generator=g), torch.randn(rows, 1, generator=g)) for _ in range(n)]


def make_trainer(callbacks, model=None, batches=None, opt_func=optim.SGD, loss_func=F.mse_loss):
    set_seed(0)
    batches = make_batches() if batches is None else batches
    return Trainer(
        DataLoaders(batches, batches[:2]),
        loss_func,
        opt_func,
        make_model() if model is None else model,
        [BasicTrainCB(), *callbacks],
    )


def n_hooks(model):
    return sum(
        len(o._forward_hooks) + len(o._forward_pre_hooks) + len(o._backward_hooks) for o in model.modules()
    )
