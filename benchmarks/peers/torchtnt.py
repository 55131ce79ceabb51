"torchtnt"

import torch
from torch.nn import functional as F
from torcheval.metrics import Mean, MulticlassAccuracy
from torchtnt.framework import fit, train
from torchtnt.framework.callback import Callback
from torchtnt.framework.callbacks import TQDMProgressBar
from torchtnt.framework.unit import EvalUnit, TrainUnit

from ..workloads import with_loaders

NAME, IMPORT, PACKAGE = "torchtnt", "import torchtnt.framework", "torchtnt"


class Plain(TrainUnit):
    def __init__(self, model, lr):
        super().__init__()
        self.model = model
        self.opt = torch.optim.SGD(model.parameters(), lr)

    def train_step(self, state, batch):
        x, y = batch
        preds = self.model(x)
        loss = F.cross_entropy(preds, y)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss, preds


class Measured(Plain, EvalUnit):
    def __init__(self, model, lr):
        super().__init__(model, lr)
        self.loss, self.accuracy, self.history = Mean(), MulticlassAccuracy(), []

    def add(self, loss, preds, y):
        self.loss.update(loss.detach(), weight=len(y))
        self.accuracy.update(preds.detach(), y)

    def note(self):
        self.history.append((self.loss.compute().item(), self.accuracy.compute().item()))
        self.loss.reset()
        self.accuracy.reset()

    def train_step(self, state, batch):
        self.add(*super().train_step(state, batch), batch[1])

    def eval_step(self, state, batch):
        preds = self.model(batch[0])
        self.add(F.cross_entropy(preds, batch[1]), preds, batch[1])

    def on_train_epoch_end(self, state):
        self.note()

    def on_eval_epoch_end(self, state):
        self.note()


class Nothing(Callback):
    def on_train_step_start(self, state, unit):
        pass

    def on_train_step_end(self, state, unit):
        pass


def bare(work, model, hooks=0):
    unit = Plain(model, work.lr)
    callbacks = [Nothing() for _ in range(hooks)]
    return lambda: train(unit, work.train, max_epochs=work.epochs, callbacks=callbacks)


def measured(work, model):
    unit = Measured(model, work.lr)

    def run():
        bar = TQDMProgressBar()
        fit(unit, work.train, work.valid, max_epochs=work.epochs, callbacks=[bar])
        (train_loss, _), (valid_loss, right) = unit.history[-2:]
        return dict(train_loss=train_loss, valid_loss=valid_loss, accuracy=right)

    return run


def tutorial(work, model):
    return lambda: measured(with_loaders(work), model)()


VARIANTS = {NAME: dict(tiny=bare, typical=measured, cnn=bare, tutorial=tutorial)}
