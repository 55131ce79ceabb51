"Ignite"

import torch
from ignite.contrib.handlers import ProgressBar
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from torch.nn import functional as F

from ..workloads import with_loaders

NAME, IMPORT, PACKAGE = "Ignite", "import ignite.engine", "pytorch-ignite"


def trainer_of(work, model, **kwargs):
    opt = torch.optim.SGD(model.parameters(), work.lr)
    return create_supervised_trainer(model, opt, F.cross_entropy, **kwargs)


def nothing(engine):
    pass


def bare(work, model, hooks=0):
    trainer = trainer_of(work, model, output_transform=lambda *_: None)
    for _ in range(hooks):
        trainer.add_event_handler(Events.ITERATION_STARTED, nothing)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, nothing)
    return lambda: finished(trainer, work)


def finished(trainer, work):
    trainer.run(work.train, max_epochs=work.epochs)


def metrics():
    return dict(accuracy=Accuracy(), loss=Loss(F.cross_entropy))


def measured(work, model):
    trainer = trainer_of(work, model, output_transform=lambda x, y, preds, loss: (preds.detach(), y))
    evaluator = create_supervised_evaluator(model, metrics())
    for name, metric in metrics().items():
        metric.attach(trainer, name)
    ProgressBar().attach(trainer)
    history = []

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        found = evaluator.run(work.valid).metrics
        history.append(
            dict(
                train_loss=engine.state.metrics["loss"], valid_loss=found["loss"], accuracy=found["accuracy"]
            )
        )

    def run():
        finished(trainer, work)
        return history[-1]

    return run


def tutorial(work, model):
    return lambda: measured(with_loaders(work), model)()


VARIANTS = {NAME: dict(tiny=bare, typical=measured, cnn=bare, tutorial=tutorial)}
