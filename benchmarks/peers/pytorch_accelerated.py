"pytorch-accelerated"

import torch
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from ..workloads import with_loaders

NAME, IMPORT, PACKAGE = "pytorch-accelerated", "import pytorch_accelerated", "pytorch-accelerated"


def first(rows):
    "Its loaders must have a batch sampler; here a batch of it is one ready batch"
    return rows[0]


class Ready(Trainer):
    "Takes its batches as they are"

    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        return self.loader(self.train_dataset)

    def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
        return self.loader(self.eval_dataset)

    def loader(self, pairs):
        return pairs if isinstance(pairs, DataLoader) else DataLoader(pairs, batch_size=1, collate_fn=first)


class Accuracy(TrainerCallback):
    "On validation alone"

    def __init__(self):
        self.metric = MulticlassAccuracy(10, average="micro")

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        self.metric.update(batch_output["model_outputs"], batch[1])

    def on_eval_epoch_end(self, trainer, **kwargs):
        trainer.run_history.update_metric("accuracy", self.metric.compute().item())
        self.metric.reset()


class Nothing(TrainerCallback):
    def on_train_step_begin(self, trainer, **kwargs):
        pass

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        pass


def made(work, model, **kwargs):
    opt = torch.optim.SGD(model.parameters(), work.lr)
    return Ready(model=model, loss_func=F.cross_entropy, optimizer=opt, **kwargs)


def kinds(n):
    "It wants each callback to have a class of its own"
    return [type(f"Nothing{i}", (Nothing,), {})() for i in range(n)]


def bare(work, model, hooks=0):
    trainer = made(work, model, callbacks=kinds(hooks))
    return lambda: trainer.train(train_dataset=work.train, num_epochs=work.epochs, per_device_batch_size=1)


def measured(work, model):
    from pytorch_accelerated.trainer import DEFAULT_CALLBACKS

    trainer = made(work, model, callbacks=[*DEFAULT_CALLBACKS, Accuracy()])
    data = dict(train_dataset=work.train, eval_dataset=work.valid)

    def run():
        trainer.train(num_epochs=work.epochs, per_device_batch_size=1, **data)
        return dict(accuracy=trainer.run_history.get_latest_metric("accuracy"))

    return run


def tutorial(work, model):
    return lambda: measured(with_loaders(work), model)()


VARIANTS = {NAME: dict(tiny=bare, typical=measured, cnn=bare, tutorial=tutorial)}
