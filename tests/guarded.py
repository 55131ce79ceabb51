"Fits in which whoever turns a tensor into a number while a batch is being worked on gets an error."

from types import SimpleNamespace

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.trainer import Trainer

WAITING = {
    "item",
    "cpu",
    "tolist",
    "numpy",
    "is_nonzero",
    "nonzero",
    "equal",
    "allclose",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__complex__",
    "__array__",
    "__format__",
    "__repr__",
    "__contains__",
}
inside = SimpleNamespace(batch=False)


class Waited(Exception):
    "Somebody turned a tensor into a number while a batch was being worked on"


def refuse_to_wait(func):
    name = getattr(func, "__name__", "")
    if inside.batch and name in WAITING:
        raise Waited(name)


class Guarded(torch.Tensor):
    "A tensor that, inside a batch, will not become a number; what is computed from it will not either"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        refuse_to_wait(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class GuardEverything(TorchFunctionMode):
    "The same for all tensors there are: parameters, gradients, whatever a callback makes for itself"

    def __torch_function__(self, func, types, args=(), kwargs=None):
        refuse_to_wait(func)
        return func(*args, **kwargs or {})


class InsideCB:
    "Knows whether a batch is being worked on: first at its beginning, last at its end"

    order = -10_000

    def before_batch(self, trainer):
        inside.batch = True

    def cleanup_batch(self, trainer):
        inside.batch = False


def make_batches(n=3):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=g), torch.randn(4, 1, generator=g)) for _ in range(n)]


def run_guarded(callbacks, everything, n_batches=4):
    "Two epochs in which waiting inside a batch is an error"
    batches = [tuple(o.as_subclass(Guarded) for o in batch) for batch in make_batches(n_batches)]
    trainer = Trainer(
        DataLoaders(batches, batches[:2]), F.mse_loss, optim.SGD, nn.Linear(3, 1), [*callbacks, InsideCB()]
    )
    try:
        if everything:
            with GuardEverything():
                trainer.fit(2, lr=0.01)
        else:
            trainer.fit(2, lr=0.01)
    finally:
        inside.batch = False
    return trainer
