"A small trainer, and what its run has written."

import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer


def small(*cbs, model=None):
    "A trainer that is done in a moment"
    set_seed(0)
    data = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(3)]
    return Trainer(
        DataLoaders(data, data[:1]),
        F.mse_loss,
        optim.Adam,
        model or nn.Linear(3, 1),
        [BasicTrainCB(), MetricsCB(show=False), *cbs],
    )


def files(folder):
    return sorted(o.relative_to(folder).as_posix() for o in folder.rglob("*") if o.is_file())
