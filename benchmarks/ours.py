"`isaac_loop`, and what callbacks add to it"

import copy
import datetime
import tempfile
from dataclasses import replace

import torch
from torch import optim
from torch.nn import functional as F

from isaac_loop import DataLoaders, Trainer
from isaac_loop.callbacks import BasicTrainCB, CheckpointCB, ClipGradCB, CompileCB, EMACB
from isaac_loop.callbacks import InterruptCB, MetricsCB, OneCycleSchedulerCB, ProgressCB, RecorderCB, TimesCB
from isaac_loop.recipes import CoreCBs

from .workloads import CLIP, DECAY, SEED, digits

NAME, IMPORT, PACKAGE = "isaac_loop", "from isaac_loop.all import *", "isaac_loop"


class Nothing:
    "A callback that answers two events of a batch and does nothing"

    def __init__(self, i):
        self.name = f"nothing{i}"

    def before_batch(self, trainer):
        pass

    def after_batch(self, trainer):
        pass


def accuracy(preds, targets):
    "Which rows are right"
    return preds.argmax(1) == targets


def fit_with(work, model, *callbacks, dls=None):
    "A function that fits"
    dls = dls or DataLoaders(work.train, work.valid or None)
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, model, callbacks)

    def run():
        trainer.fit(work.epochs, lr=work.lr, valid=dls.valid is not None)
        return dict(trainer.history[-1]) if len(trainer.history) else None

    return run


def bare(work, model, hooks=0):
    return fit_with(work, model, BasicTrainCB(), *map(Nothing, range(hooks)))


def with_metrics(work, model):
    return fit_with(work, model, BasicTrainCB(), MetricsCB(show=False))


def with_times(work, model):
    return fit_with(work, model, BasicTrainCB(), TimesCB())


def with_core(work, model):
    return fit_with(work, model, CoreCBs("cpu", progress=False, show=False))


def measured(work, model):
    metrics = MetricsCB(accuracy=accuracy, train_metrics=True)
    return fit_with(work, model, BasicTrainCB(), metrics, ProgressCB("plain"))


def with_torcheval(work, model):
    from torcheval.metrics import MulticlassAccuracy

    metrics = MetricsCB(accuracy=MulticlassAccuracy(), train_metrics=True)
    return fit_with(work, model, BasicTrainCB(), metrics, ProgressCB("plain"))


def guarded(work, model):
    folder = tempfile.TemporaryDirectory()
    fit = fit_with(
        work,
        model,
        BasicTrainCB(),
        MetricsCB(accuracy=accuracy, train_metrics=True),
        ProgressCB("plain"),
        ClipGradCB(CLIP),
        OneCycleSchedulerCB(cycle_momentum=False),
        EMACB(DECAY, warmup=False),
        CheckpointCB(folder.name, every=datetime.timedelta(minutes=5)),
        InterruptCB(),
        RecorderCB(),
    )

    def run():
        row = fit()
        folder.cleanup()
        return row

    return run


def compiled(work, model):
    "By `torch.compile`, which has done its work on another model of the same kind before"
    short = replace(work, train=work.train[:2], epochs=1)
    fit_with(short, copy.deepcopy(model), BasicTrainCB(), CompileCB())()
    fit, before = fit_with(work, model, BasicTrainCB(), CompileCB()), n_graphs()

    def run():
        fit()
        if n_graphs() != before:
            raise RuntimeError(f"{n_graphs() - before} graphs were compiled in what is timed")

    return run


def n_graphs():
    "How many graphs have been compiled in this process"
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def tutorial(work, model):
    def run():
        dls = DataLoaders.from_dataset_dict(digits(), 64, seed=SEED)
        metrics = MetricsCB(accuracy=accuracy, train_metrics=True)
        return fit_with(work, model, BasicTrainCB(), metrics, ProgressCB("plain"), dls=dls)()

    return run


VARIANTS = {
    NAME: dict(tiny=bare, typical=measured, cnn=bare, tutorial=tutorial, guarded=guarded),
    "isaac_loop with MetricsCB": dict(tiny=with_metrics),
    "isaac_loop with CoreCBs": dict(tiny=with_core),
    "isaac_loop with TimesCB": dict(tiny=with_times),
    "isaac_loop compiled": dict(cnn=compiled),
    "isaac_loop with torcheval": dict(typical=with_torcheval),
}
