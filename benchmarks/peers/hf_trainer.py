"Hugging Face Trainer"

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..workloads import ready_loader, with_loaders

NAME, IMPORT, PACKAGE = "Hugging Face Trainer", "from transformers import Trainer", "transformers"


class WithLoss(nn.Module):
    "A model as it wants one: it computes its loss"

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        logits = self.model(x)
        return dict(loss=F.cross_entropy(logits, labels), logits=logits)


class Named:
    "Ready batches as dicts, which are what it reads"

    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __iter__(self):
        return (dict(x=x, labels=y) for x, y in self.pairs)


class Ready(Trainer):
    def get_train_dataloader(self):
        return self.train_dataset

    def get_eval_dataloader(self, eval_dataset=None):
        return self.eval_dataset


class Nothing(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        pass

    def on_step_end(self, args, state, control, **kwargs):
        pass


def as_loader(pairs):
    "A `DataLoader` of dicts"
    if isinstance(pairs, list):
        return ready_loader(list(Named(pairs)))
    return Named(pairs)


def made(work, model, callbacks=(), **kwargs):
    opt = torch.optim.SGD(model.parameters(), work.lr)
    options = dict(num_train_epochs=work.epochs, learning_rate=work.lr, lr_scheduler_type="constant")
    options |= dict(
        max_grad_norm=0, save_strategy="no", report_to=[], use_cpu=True, remove_unused_columns=False
    )
    arguments = TrainingArguments("out", **options, **kwargs)
    data = dict(
        train_dataset=as_loader(work.train), eval_dataset=as_loader(work.valid) if work.valid else None
    )
    return Ready(
        WithLoss(model),
        arguments,
        optimizers=(opt, None),
        callbacks=list(callbacks),
        compute_metrics=accuracy,
        **data,
    )


def accuracy(found):
    return dict(accuracy=float(np.mean(found.predictions.argmax(1) == found.label_ids)))


def bare(work, model, hooks=0):
    names = [type(f"Nothing{i}", (Nothing,), {})() for i in range(hooks)]
    trainer = made(work, model, names, logging_strategy="no", disable_tqdm=True)
    return lambda: finished(trainer)


def finished(trainer):
    trainer.train()


def measured(work, model):
    "Accuracy on validation alone"
    trainer = made(work, model, logging_strategy="epoch", eval_strategy="epoch")

    def run():
        trainer.train()
        found = [row for row in trainer.state.log_history if "eval_loss" in row][-1]
        return dict(accuracy=found["eval_accuracy"])

    return run


def tutorial(work, model):
    return lambda: measured(with_loaders(work), model)()


VARIANTS = {NAME: dict(tiny=bare, typical=measured, cnn=bare, tutorial=tutorial)}
