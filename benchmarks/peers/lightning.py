"Lightning"

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from ..workloads import with_loaders

NAME, IMPORT, PACKAGE = "Lightning", "import lightning", "lightning"


class Batches:
    "Ready batches, which are no list: a list would be loaders to read side by side"

    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __iter__(self):
        return iter(self.pairs)


def as_loader(pairs):
    return Batches(pairs) if isinstance(pairs, list) else pairs


class Plain(L.LightningModule):
    def __init__(self, model, lr):
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch, i):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), self.lr)


class Measured(Plain):
    def __init__(self, model, lr):
        super().__init__(model, lr)
        self.accuracy = torch.nn.ModuleDict(
            {o: MulticlassAccuracy(10, average="micro") for o in ("fit", "valid")}
        )

    def both(self, batch, which):
        x, y = batch
        preds = self.model(x)
        loss = F.cross_entropy(preds, y)
        self.accuracy[which](preds, y)
        options = dict(on_step=False, on_epoch=True, batch_size=len(y))
        self.log(f"{which}_loss", loss, **options)
        self.log(f"{which}_accuracy", self.accuracy[which], **options)
        return loss

    def training_step(self, batch, i):
        return self.both(batch, "fit")

    def validation_step(self, batch, i):
        self.both(batch, "valid")


class Nothing(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, i):
        pass

    def on_train_batch_end(self, trainer, module, outputs, batch, i):
        pass


def bare(work, model, hooks=0):
    options = dict(barebones=True, accelerator="cpu", max_epochs=work.epochs)
    trainer = L.Trainer(callbacks=[Nothing() for _ in range(hooks)], **options)
    module = Plain(model, work.lr)
    return lambda: trainer.fit(module, as_loader(work.train))


def measured(work, model):
    module = Measured(model, work.lr)
    options = dict(enable_checkpointing=False, num_sanity_val_steps=0, enable_model_summary=False)
    trainer = L.Trainer(accelerator="cpu", max_epochs=work.epochs, logger=CSVLogger("logs"), **options)

    def run():
        trainer.fit(module, as_loader(work.train), as_loader(work.valid))
        found = {k: v.item() for k, v in trainer.callback_metrics.items()}
        return dict(valid_loss=found["valid_loss"], accuracy=found["valid_accuracy"])

    return run


def tutorial(work, model):
    return lambda: measured(with_loaders(work), model)()


VARIANTS = {NAME: dict(tiny=bare, typical=measured, cnn=bare, tutorial=tutorial)}
