"Fits in which whoever turns a tensor into a number while a batch is being worked on gets an error."

from contextlib import nullcontext

import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.trainer import Trainer
from waiting import InsideCB, RefuseToWait, refuse

mode = RefuseToWait()


class Guarded(torch.Tensor):
    "A tensor that, inside a batch, will not become a number; what is computed from it will not either"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if mode.inside:
            refuse(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def make_batches(n=3):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=g), torch.randn(4, 1, generator=g)) for _ in range(n)]


def run_guarded(callbacks, everything, n_batches=4):
    "Two epochs; inside a batch, waiting is an error: for what comes from the batch, or for all tensors"
    batches = [tuple(o.as_subclass(Guarded) for o in batch) for batch in make_batches(n_batches)]
    callbacks = [*callbacks, InsideCB(mode)]
    trainer = Trainer(DataLoaders(batches, batches[:2]), F.mse_loss, optim.SGD, nn.Linear(3, 1), callbacks)
    try:
        with mode if everything else nullcontext():
            trainer.fit(2, lr=0.01)
    finally:
        mode.inside = False
    return trainer
