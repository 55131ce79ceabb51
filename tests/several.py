"Small trainings in one process and in several, for tests that compare them"

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.device.distributed import DistributedCB
from isaac_loop.device.launching import launch
from isaac_loop.loop.trainer import Trainer
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.train.training import BasicTrainCB

LIMIT = 60  # Seconds for a test's processes, so that one that hangs fails
TIMEOUT = 15  # Seconds to wait for another process


def in_processes(n, f, *args):
    "What `f` returns in each of `n` processes"
    return launch(f, n, *args, timeout=LIMIT)


def rank():
    "Number of this process"
    return int(os.environ.get("RANK", 0))


def rows(n, seed=0, dtype=torch.float64):
    "A regression: `n` rows of four numbers, and what is to be predicted"
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * x[:, :1] ** 2)


def loaders(n=53, n_valid=21, batch_size=8, dtype=torch.float64, **kwargs):
    "Exact loaders of rows for training and validation"
    train = exact_loader(rows(n, dtype=dtype), batch_size, seed=3, **kwargs)
    return DataLoaders(train, exact_loader(rows(n_valid, 1, dtype), batch_size, shuffle=False))


def net(dtype=torch.float64):
    "A small network that begins with the same weights every time"
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def trainer(*callbacks, dls=None, model=None, loss_func=F.mse_loss, opt_func=torch.optim.Adam, **kwargs):
    "A trainer for one process or several"
    usual = [BasicTrainCB(), MetricsCB(show=False), DistributedCB(timeout=TIMEOUT, **kwargs)]
    dls, model = dls or loaders(), model or net()
    return Trainer(dls, loss_func, opt_func, model, [*usual, *callbacks])


def outcome(t):
    "What a fit has led to: weights, and rows without times"
    weights = torch.cat([p.detach().reshape(-1) for p in t.model.parameters()])
    drop = ("elapsed",)
    return weights, [{k: v for k, v in row.items() if k not in drop} for row in t.history]
