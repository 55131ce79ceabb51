"A script of a user, for a type checker: more than fifty public names, none of them unknown to it or misused."

from pathlib import Path

import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop import CancelBatchException, CancelFitException, DataLoaders, History, Order, Table, Trainer
from isaac_loop import replaces, set_seed, with_cbs
from isaac_loop.callbacks import AccumulationCB, ActivationStatsCB, BasicTrainCB, BatchSchedulerCB
from isaac_loop.callbacks import BatchTransformCB, CheckpointCB, ClipGradCB, DeviceCB, EarlyStoppingCB, EMACB
from isaac_loop.callbacks import (
    EvaluatorCB,
    ExperimentCB,
    FreezeCB,
    KeepBestCB,
    LimitCB,
    LoggerCB,
    LRFinderCB,
)
from isaac_loop.callbacks import LossSpikeCB, MetricsCB, MixedPrecisionCB, MixUpCB, MomentumTrainCB, NBatchCB
from isaac_loop.callbacks import NonFiniteStopCB, OneBatchCB, OneCycleSchedulerCB, PlateauSchedulerCB
from isaac_loop.callbacks import ProgressCB, RecorderCB, SWACB, TrackingCB, WarmupSchedulerCB
from isaac_loop.basics import def_device
from isaac_loop.data import get_dataloaders, image_to_tensor, load_digits, sample_dataset_dict
from isaac_loop.evaluate import Predictions
from isaac_loop.inspection import summarize_model
from isaac_loop.loop import init_delegates
from isaac_loop.models import Hook, Hooks, SimpleNet, conv, get_model_conv, get_model_fc, lsuv_init
from isaac_loop.recipes import CoreCBs, digit_loaders
from isaac_loop.show import plot_history


class PenaltyCB:
    order = Order.LAST

    def __init__(self, weight: float = 0.1):
        self.weight = weight

    def after_get_loss(self, trainer: Trainer):
        trainer.loss = trainer.loss + self.weight * trainer.preds.square().mean()

    def after_batch(self, trainer: Trainer):
        if trainer.n_updates > 100:
            raise CancelFitException()


class OwnStepsCB(BasicTrainCB):
    @replaces
    def predict(self, trainer: Trainer):
        trainer.preds = trainer.model(trainer.batch[0])


@init_delegates()
class OwnTrainer(Trainer):
    def subclassing_method(self, momentum: float = 0.9):
        self.add_callbacks([MomentumTrainCB(momentum)])

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")


class PlainTrainer(Trainer):
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")


def data() -> DataLoaders:
    small = sample_dataset_dict(load_digits(), (100, 50))
    train, valid = get_dataloaders(small["train"], small["test"], 32)
    return DataLoaders(train, valid, split=lambda batch: (batch[0], batch[1]))


def plain(folder: Path) -> tuple[History, Predictions]:
    set_seed(42)
    model = SimpleNet(64, 32, 10)
    callbacks = [BasicTrainCB(), MetricsCB(), DeviceCB(def_device), ProgressCB(), PenaltyCB(0.2)]
    trainer = Trainer(digit_loaders(batch_size=64), F.cross_entropy, optim.Adam, model, callbacks)
    trainer.fit(
        3, lr=1e-3, callbacks=[OneCycleSchedulerCB(), ClipGradCB(1.0), EMACB(0.9), CheckpointCB(folder)]
    )
    trainer.fit(1, callbacks=[AccumulationCB(2), MixUpCB(), NBatchCB(2), LimitCB(updates=5), OneBatchCB()])
    trainer.add_callback(EarlyStoppingCB(monitor="valid_loss", patience=2))
    trainer.add_callbacks([KeepBestCB(), NonFiniteStopCB(), LossSpikeCB(), RecorderCB(), TrackingCB()])
    finder = trainer.lr_find()
    finder.plot()
    print(trainer.summarize_callbacks(), trainer.summarize_model(), summarize_model(model, torch.ones(1, 64)))
    plot_history(trainer.history)
    rows: list[dict] = list(trainer.history)
    print(Table(rows), trainer.n_updates + 1)
    return trainer.history, trainer.get_preds()


def other(model: nn.Module) -> nn.Module:
    core = CoreCBs("cpu")
    extra = [
        MixedPrecisionCB(),
        FreezeCB("0"),
        SWACB(),
        WarmupSchedulerCB(),
        PlateauSchedulerCB(),
        LRFinderCB(),
    ]
    more = [ActivationStatsCB(nn.ReLU), BatchSchedulerCB(lambda opt: optim.lr_scheduler.StepLR(opt, 1))]
    logs = [
        LoggerCB(print),
        ExperimentCB("runs", "digits"),
        EvaluatorCB({"a": "train"}),
        BatchTransformCB(lambda batch: batch),
    ]
    trainer = OwnTrainer(
        data(), F.cross_entropy, optim.SGD, model, [core, *extra, *more, *logs], momentum=0.8
    )
    trainer.fit(n_epochs=1, lr=0.1, train=True, valid=False)
    trainer.dls.show_batch()
    DataLoaders([]).show_batch()
    with Hooks(list(model.children()), print), Hook(model, print):
        model(torch.ones(1, 1, 8, 8))
    print(lsuv_init(model, nn.Linear(2, 2), torch.ones(2, 1, 8, 8)))
    print(trainer.opt, trainer.epoch, trainer.batch_num, trainer.lr, trainer.model, trainer.history[-1])
    return nn.Sequential(conv(1, 8), get_model_conv(), get_model_fc(64, 10, 10))


print(image_to_tensor, OwnStepsCB)
