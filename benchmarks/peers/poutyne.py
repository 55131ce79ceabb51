"poutyne"

import torch
from poutyne import Callback, Model
from torch.nn import functional as F

from ..workloads import with_loaders

NAME, IMPORT, PACKAGE = "poutyne", "import poutyne", "poutyne"


class Nothing(Callback):
    def on_train_batch_begin(self, batch_number, logs):
        pass

    def on_train_batch_end(self, batch_number, logs):
        pass


def made(work, model, **kwargs):
    return Model(model, torch.optim.SGD(model.parameters(), work.lr), F.cross_entropy, **kwargs)


def bare(work, model, hooks=0):
    net, callbacks = made(work, model), [Nothing() for _ in range(hooks)]
    return lambda: finished(net, work, callbacks)


def finished(net, work, callbacks):
    net.fit_generator(work.train, epochs=work.epochs, verbose=False, callbacks=callbacks)


def measured(work, model):
    net = made(work, model, batch_metrics=["accuracy"])

    def run():
        last = net.fit_generator(
            work.train, work.valid, epochs=work.epochs, progress_options=dict(coloring=False)
        )[-1]
        return dict(train_loss=last["loss"], valid_loss=last["val_loss"], accuracy=last["val_acc"] / 100)

    return run


def tutorial(work, model):
    return lambda: measured(with_loaders(work), model)()


VARIANTS = {NAME: dict(tiny=bare, typical=measured, cnn=bare, tutorial=tutorial)}
