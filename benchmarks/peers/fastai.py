"fastai"

from functools import partial

import torch
from fastai.callback.core import Callback, TrainEvalCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastai.optimizer import OptimWrapper
from torch.nn import functional as F

from ..workloads import ready_loader, with_loaders

NAME, IMPORT, PACKAGE = "fastai", "from fastai.learner import Learner", "fastai"


class Nothing(Callback):
    def before_batch(self):
        pass

    def after_batch(self):
        pass


def learner(work, model, **kwargs):
    loaders = DataLoaders(as_loader(work.train), as_loader(work.valid))
    opt_func = partial(OptimWrapper, opt=torch.optim.SGD)
    return Learner(loaders, model, F.cross_entropy, opt_func=opt_func, lr=work.lr, **kwargs)


def as_loader(pairs):
    return ready_loader(pairs) if isinstance(pairs, list) else pairs


def bare(work, model, hooks=0):
    callbacks = [TrainEvalCallback(), *(Nothing() for _ in range(hooks))]
    learn = learner(work, model, default_cbs=False, cbs=callbacks)
    return lambda: learn.fit(work.epochs)


def measured(work, model):
    "Accuracy on validation alone"
    learn = learner(work, model, metrics=accuracy)

    def run():
        learn.fit(work.epochs)
        train_loss, valid_loss, right = learn.recorder.values[-1]
        return dict(valid_loss=valid_loss, accuracy=right)

    return run


def tutorial(work, model):
    return lambda: measured(with_loaders(work), model)()


VARIANTS = {NAME: dict(tiny=bare, typical=measured, cnn=bare, tutorial=tutorial)}
