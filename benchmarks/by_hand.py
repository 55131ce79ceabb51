"The loops as one writes them by hand: what everybody else is measured against"

import datetime
import json
import os
import signal
import tempfile
import time
from pathlib import Path

import torch
from torch import nn, optim
from torch.nn import functional as F

from .workloads import CLIP, DECAY, with_loaders

NAME, IMPORT, PACKAGE = "by hand", "import torch", "torch"


def bare(work, model, hooks=0):
    "Forward, backward, step"
    opt = optim.SGD(model.parameters(), work.lr)

    def run():
        for _ in range(work.epochs):
            model.train()
            for x, y in work.train:
                preds = loss = None  # Their memory is free before the next needs it
                preds = model(x)
                loss = F.cross_entropy(preds, y)
                loss.backward()
                opt.step()
                opt.zero_grad()

    return run


class Sums:
    "Sums of losses and of right answers, kept as tensors until the pass is over"

    def __init__(self):
        self.loss, self.right, self.n = 0.0, 0, 0

    def add(self, loss, preds, y):
        self.loss += loss.detach() * len(y)
        self.right += (preds.detach().argmax(1) == y).sum()
        self.n += len(y)

    def means(self):
        return float(self.loss) / self.n, float(self.right) / self.n


@torch.no_grad()
def validated(model, batches):
    "Sums over the batches of validation"
    model.eval()
    sums = Sums()
    for x, y in batches:
        preds = model(x)
        sums.add(F.cross_entropy(preds, y), preds, y)
    return sums


def measured(work, model):
    "With validation, means of both passes, a history and a line for each epoch"
    opt = optim.SGD(model.parameters(), work.lr)

    def run():
        history = []
        for epoch in range(work.epochs):
            start = time.perf_counter()
            model.train()
            train = Sums()
            for x, y in work.train:
                preds = loss = None
                preds = model(x)
                loss = F.cross_entropy(preds, y)
                loss.backward()
                opt.step()
                opt.zero_grad()
                train.add(loss, preds, y)
            history.append(row_of(epoch, train, validated(model, work.valid), start))
            print(*history[-1].values(), flush=True)
        return history[-1]

    return run


def row_of(epoch, train, valid, start):
    "A row of the history"
    (train_loss, train_accuracy), (valid_loss, accuracy) = train.means(), valid.means()
    return dict(
        epoch=epoch,
        train_loss=train_loss,
        train_accuracy=train_accuracy,
        valid_loss=valid_loss,
        accuracy=accuracy,
        elapsed=time.perf_counter() - start,
    )


def guarded(work, model):
    "With clipping, one-cycle and an average of the weights, checkpoints by time, and a stop by Ctrl-C"
    opt = optim.SGD(model.parameters(), work.lr)
    total = work.epochs * len(work.train)
    schedule = optim.lr_scheduler.OneCycleLR(opt, work.lr, total_steps=total, cycle_momentum=False)
    average = optim.swa_utils.AveragedModel(model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(DECAY))
    every = datetime.timedelta(minutes=5).total_seconds()

    def run():
        history, rates = [], []
        asked, saved_at = [], time.monotonic()
        before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
        folder = tempfile.TemporaryDirectory()
        path = Path(folder.name) / "checkpoint.pt"
        for epoch in range(work.epochs):
            start = time.perf_counter()
            model.train()
            train, norms = Sums(), []
            for i, (x, y) in enumerate(work.train):
                preds = loss = None
                preds = model(x)
                loss = F.cross_entropy(preds, y)
                loss.backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
                rates.append(opt.param_groups[0]["lr"])
                opt.step()
                average.update_parameters(model)
                opt.zero_grad()
                if len(rates) < total:
                    schedule.step()
                train.add(loss, preds, y)
                if time.monotonic() - saved_at > every:
                    save(path, model, opt, average, schedule, epoch, i)
                    saved_at = time.monotonic()
                if asked:
                    break
            history.append(row_of(epoch, train, validated(average.module, work.valid), start))
            history[-1]["grad_norm"] = float(torch.stack(norms).mean())
            print(json.dumps(history[-1]), flush=True)
        save(path, model, opt, average, schedule, work.epochs, 0)
        signal.signal(signal.SIGINT, before)
        folder.cleanup()
        return history[-1]

    return run


def save(path, *state):
    "Write whole or not at all"
    states = [o.state_dict() if hasattr(o, "state_dict") else o for o in state]
    with open(path.with_suffix(".new"), "wb") as file:
        torch.save(states, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".new"), path)


def tutorial(work, model):
    "The digits: loaders, training and measuring"
    return lambda: measured(with_loaders(work), model)()


WORKS = dict(tiny=bare, typical=measured, cnn=bare, tutorial=tutorial, guarded=guarded)
VARIANTS = {NAME: WORKS}
