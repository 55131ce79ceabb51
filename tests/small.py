"A trainer that is done in a moment."

import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import BasicTrainCB, DataLoaders, Trainer


def data(n=3):
    return [(torch.randn(4, 1), torch.randn(4, 1)) for _ in range(n)]


def trainer_with(*callbacks, n=3, cls=Trainer, **kwargs):
    return cls(
        DataLoaders(data(n), data(2)),
        F.mse_loss,
        optim.SGD,
        nn.Linear(1, 1),
        [BasicTrainCB(), *callbacks],
        **kwargs,
    )
