"A small run with everything in it that could be lost, and its result, for tests that stop and go on."

import hashlib
import io
import random
from contextlib import redirect_stdout
from functools import partial

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.averaging import EMACB
from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.evaluate.evaluator import EvaluatorCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.show.progress import ProgressCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.schedule.schedules import OneCycleSchedulerCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer


class Rows:
    "Points in three classes; with `augment` each is moved by the random numbers of PyTorch, NumPy and Python"

    def __init__(self, n, augment=True):
        generator = torch.Generator().manual_seed(n)
        self.y = torch.randint(3, (n,), generator=generator)
        self.x = torch.randn(n, 8, generator=generator) + self.y[:, None]
        self.augment = augment

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if not self.augment:
            return self.x[i], self.y[i]
        return self.x[i] + 0.1 * torch.randn(8) + float(np.random.normal(0, 0.1)) + random.gauss(
            0, 0.1
        ), self.y[i]


def make_model():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def make_loaders(n=56, batch_size=8, seed=7, **options):
    return DataLoaders(
        exact_loader(Rows(n), batch_size, seed=seed, **options),
        exact_loader(Rows(24), 12, seed=seed, shuffle=False),
    )


def callbacks(folder=None, train=None, **options):
    "The callbacks of the run; with `folder` it is saved there"
    cbs = [
        train or BasicTrainCB(),
        MetricsCB(),
        OneCycleSchedulerCB(),
        EMACB(0.9),
        KeepBestCB(),
        RecorderCB(),
        ProgressCB("plain"),
    ]
    return cbs + ([CheckpointCB(folder, **options)] if folder else [])


def everything():
    "Callbacks of all kinds, which count batches, updates or epochs; three batches make an update"
    return [
        BasicTrainCB(),
        MetricsCB(),
        AccumulationCB(3),
        ClipGradCB(max_norm=0.5),
        OneCycleSchedulerCB(),
        EMACB(0.9),
        EarlyStoppingCB(patience=9),
        KeepBestCB(),
        RecorderCB(),
        EvaluatorCB(updates=2),
        ProgressCB("plain"),
    ]


def make_trainer(cbs=None, dls=None, opt_func=optim.AdamW, model=None, seed=42):
    "The same trainer for the same seed"
    set_seed(seed)
    model = model or make_model()
    return Trainer(
        dls or make_loaders(), F.cross_entropy, opt_func, model, callbacks() if cbs is None else cbs
    )


def fit(trainer, n_epochs=3, lr=0.02, **kwargs):
    "`trainer`, when it has trained without a word"
    with redirect_stdout(io.StringIO()):
        trainer.fit(n_epochs, lr, **kwargs)
    return trainer


def tree(x):
    "`x` with tensors as text, so that two such trees can be compared bit for bit"
    if torch.is_tensor(x):
        x = x.detach().cpu().contiguous()
        numbers = x.reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{x.dtype} {tuple(x.shape)} {hashlib.sha256(numbers).hexdigest()[:16]}"
    if isinstance(x, dict):
        return {str(k): tree(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [tree(o) for o in x]
    return repr(x)


def result(trainer):
    "All that a run leaves, but for seconds"
    rows = [
        {k: v for k, v in o.items() if k != "elapsed" and not k.endswith("seconds")} for o in trainer.history
    ]
    batches = {k: v.tolist() for k, v in trainer.history.batches.columns.items() if not k.endswith("seconds")}
    found = dict(model=trainer.model.state_dict(), rows=rows, batches=batches, n_updates=trainer.n_updates)
    found |= {
        name: o.state_dict()
        for name, o in vars(trainer).items()
        if isinstance(o, (optim.Optimizer, nn.Module)) and name != "model"
    }
    for cb in trainer.callbacks:
        if getattr(cb, "average", None) is not None:
            found[type(cb).__name__] = cb.average.state_dict()
        if hasattr(cb, "best_epoch"):
            found["best"] = cb.best_epoch, cb.best, cb.weights
    return tree(found)


def differences(a, b, path=""):
    "Where two results differ; empty if they are the same"
    if type(a) is not type(b):
        return [f"{path}: {a!r:.80} and {b!r:.80}"]
    if isinstance(a, dict):
        missing = [f"{path}.{k} is in one only" for k in a.keys() ^ b.keys()]
        return missing + [o for k in a.keys() & b.keys() for o in differences(a[k], b[k], f"{path}.{k}")]
    if isinstance(a, list):
        if len(a) != len(b):
            return [f"{path}: {len(a)} and {len(b)} entries"]
        return [o for i, (x, y) in enumerate(zip(a, b)) for o in differences(x, y, f"{path}[{i}]")]
    return [] if a == b else [f"{path}: {a!r:.80} and {b!r:.80}"]


def same(a, b):
    "Fail, and say where, unless both trainers ended alike"
    found = differences(a if isinstance(a, dict) else result(a), b if isinstance(b, dict) else result(b))
    assert not found, "\n".join(found[:10])


class Cut(Exception):
    "Somebody pulls the plug"


class CutCB:
    "Breaks off at an event when a condition holds"

    def __init__(self, event, when, error=Cut):
        self.when, self.error, self.name = when, error, f"Cut at {event}"
        setattr(self, event, self._look)

    def _look(self, trainer):
        if self.when(trainer):
            raise self.error


momentum_sgd = partial(optim.SGD, momentum=0.9, nesterov=True)
