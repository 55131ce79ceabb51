"Trainers that are done in a moment, or made otherwise."

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


class StepsAsMethods(Trainer):
    "The five steps without any callback"

    def predict(self):
        self.preds = self.model(*self.split(self.batch)[0])

    def get_loss(self):
        self.loss = self.loss_func(self.preds, *self.split(self.batch)[1])

    def backward(self):
        self.loss.backward()

    def step(self):
        self.opt.step()

    def zero_grad(self):
        self.opt.zero_grad()
