"A small working training for every callback of the library, for tests that ask something of all of them."

import warnings

import torch
from torch import nn, optim
from torch.nn import functional as F
from torcheval.metrics import MulticlassAccuracy

import isaac_loop.callbacks as library
from isaac_loop.basics.tensors import set_seed
from isaac_loop.data import DataLoaders, exact_loader
from isaac_loop.inspection import CheckFailed
from isaac_loop.loop.trainer import Trainer

c = library


class Images:
    "Small images of three classes"

    def __init__(self, n=24):
        generator = torch.Generator().manual_seed(n)
        self.y = torch.randint(3, (n,), generator=generator)
        self.x = torch.rand(n, 1, 8, 8, generator=generator) + self.y[:, None, None, None] / 3

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def images_model():
    "A small net with all that callbacks look for: batch norm, dropout, named parts"
    body = nn.Sequential(
        nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)
    )
    return nn.Sequential(body, nn.Linear(8, 3))


def images_trainer(cbs, opt_func=optim.AdamW, batch_size=6, seed=3, **options):
    "A trainer for `Images`"
    set_seed(seed)
    dls = DataLoaders(exact_loader(Images(), batch_size), exact_loader(Images(12), 6, shuffle=False))
    return Trainer(dls, F.cross_entropy, opt_func, images_model(), cbs, **options)


def constant(opt):
    "A schedule that changes nothing"
    return optim.lr_scheduler.ConstantLR(opt, 1.0)


def basic(*cbs):
    return [c.BasicTrainCB(), *cbs]


def measured(*cbs):
    return [c.BasicTrainCB(), c.MetricsCB(accuracy=MulticlassAccuracy()), *cbs]


def twice(x):
    return x * 1.01


def n_classes(trainer):
    return 3.0


def quiet(*args, **kwargs):
    return 0.0


WORKING = {  # By name a function of an empty folder, which gives callbacks of a training
    "AccelerateCB": lambda f: [c.BasicTrainCB(), c.AccelerateCB(cpu=True)],
    "AccumulationCB": lambda f: measured(c.AccumulationCB(2)),
    "ActivationStatsCB": lambda f: basic(c.ActivationStatsCB(nn.ReLU)),
    "AttributeSchedulerCB": lambda f: basic(c.AttributeSchedulerCB({"opt.lr": lambda t: 0.1 * (1 - t)})),
    "BasicTrainCB": lambda f: basic(),
    "BatchAugmentationCB": lambda f: basic(c.BatchAugmentationCB([twice])),
    "BatchNormEvalCB": lambda f: basic(c.BatchNormEvalCB("0")),
    "BatchSchedulerCB": lambda f: basic(c.BatchSchedulerCB(constant)),
    "BatchTransformCB": lambda f: basic(c.BatchTransformCB(twice_images)),
    "BlackBoxCB": lambda f: measured(c.BlackBoxCB(2)),
    "CapturePredsCB": lambda f: basic(c.CapturePredsCB(with_inputs=True, with_loss=True)),
    "CheckpointCB": lambda f: measured(c.CheckpointCB(f, every=2)),
    "ClipGradCB": lambda f: basic(c.RecorderCB(), c.ClipGradCB(1.0)),
    "CutMixCB": lambda f: basic(c.CutMixCB()),
    "DerivedColumnsCB": lambda f: measured(c.DerivedColumnsCB(double=lambda row: 2 * row["valid_loss"])),
    "DeviceCB": lambda f: basic(c.DeviceCB("cpu")),
    "DropoutOnCB": lambda f: measured(c.DropoutOnCB(nn.Dropout)),
    "EMACB": lambda f: measured(c.EMACB(0.9)),
    "EarlyStoppingCB": lambda f: measured(c.EarlyStoppingCB(patience=1)),
    "EpochSchedulerCB": lambda f: measured(c.EpochSchedulerCB(constant)),
    "EpochTimeCB": lambda f: measured(c.EpochTimeCB(show=False)),
    "EvaluatorCB": lambda f: measured(c.EvaluatorCB("valid", updates=2)),
    "ExperimentCB": lambda f: measured(c.ExperimentCB(f, "digits"), c.HistoryFilesCB()),
    "ExportCB": lambda f: measured(c.ExportCB(f)),
    "FreezeCB": lambda f: measured(c.FreezeCB("0", until=1)),
    "GradientPlotCB": lambda f: basic(c.GradientPlotCB(f)),
    "GradientStatsCB": lambda f: basic(c.GradientStatsCB()),
    "HistoryFilesCB": lambda f: measured(c.HistoryFilesCB(f)),
    "InterruptCB": lambda f: measured(c.InterruptCB()),
    "KeepBestCB": lambda f: measured(c.KeepBestCB()),
    "LRFinderCB": lambda f: basic(c.LRFinderCB(n_batches=4, show=False)),
    "LimitCB": lambda f: measured(c.LimitCB(5)),
    "LivePlotCB": lambda f: measured(c.RecorderCB(), c.LivePlotCB(f / "loss.png")),
    "LoggerCB": lambda f: measured(c.RecorderCB(), c.LoggerCB(quiet_log, every=2)),
    "LossSpikeCB": lambda f: basic(c.LossSpikeCB(2.0, start_batch=1)),
    "MetricsCB": lambda f: basic(c.MetricsCB(train_metrics=True, accuracy=MulticlassAccuracy())),
    "MixUpCB": lambda f: basic(c.MixUpCB()),
    "MixedPrecisionCB": lambda f: measured(c.MixedPrecisionCB("bfloat16")),
    "MomentumTrainCB": lambda f: [c.MomentumTrainCB()],
    "NBatchCB": lambda f: measured(c.NBatchCB(2)),
    "NonFiniteCB": lambda f: basic(c.NonFiniteCB(2)),
    "NonFiniteStopCB": lambda f: basic(c.NonFiniteStopCB(2)),
    "NotifyCB": lambda f: measured(c.NotifyCB(quiet)),
    "OneBatchCB": lambda f: measured(c.OneBatchCB()),
    "OneCycleSchedulerCB": lambda f: basic(c.OneCycleSchedulerCB()),
    "PlateauSchedulerCB": lambda f: measured(c.PlateauSchedulerCB(patience=1)),
    "PredictionsCSVCB": lambda f: measured(c.PredictionsCSVCB(f / "preds.csv")),
    "PrintColumnsCB": lambda f: measured(c.PrintColumnsCB("valid_loss", report=quiet)),
    "ProfilerCB": lambda f: basic(c.ProfilerCB(0, 1, 1, on_trace_ready=quiet)),
    "ProgressCB": lambda f: measured(c.ProgressCB("plain")),
    "ProgressiveResizeCB": lambda f: basic(c.ProgressiveResizeCB()),
    "RecorderCB": lambda f: basic(c.RecorderCB(classes=n_classes)),
    "RenameColumnsCB": lambda f: measured(c.RenameColumnsCB(dict(valid_loss="loss"))),
    "ReportCB": lambda f: measured(c.ReportCB(classes=quiet)),
    "RewindCB": lambda f: measured(c.RewindCB(2)),
    "SWACB": lambda f: measured(c.SWACB(0.5)),
    "SamePredictionsCB": lambda f: measured(c.SamePredictionsCB(report=quiet)),
    "StepSchedulerCB": lambda f: basic(c.StepSchedulerCB(1)),
    "TextComparisonCB": lambda f: measured(c.TextComparisonCB(quiet_text, show=False)),
    "TimesCB": lambda f: measured(c.TimesCB()),
    "TrackingCB": lambda f: measured(c.TrackingCB(f / "runs.sqlite", experiment="a")),
    "UpdateRatioCB": lambda f: basic(c.UpdateRatioCB()),
    "UploadCB": lambda f: measured(c.CheckpointCB(f), c.UploadCB(f"memory://{f.name}", f, wait=0.0)),
    "WSDSchedulerCB": lambda f: basic(c.WSDSchedulerCB(2)),
    "WarmupSchedulerCB": lambda f: basic(c.WarmupSchedulerCB("linear", warmup=1)),
}


def twice_images(batch):
    return (batch[0] * 1.01, *batch[1:])


def quiet_text(row):
    return str(row)


class quiet_log:
    def row(self, values, step):
        pass


quiet_log = quiet_log()


def working(name, folder):
    "A trainer in which the callback of this name works, and that callback"
    trainer = images_trainer(WORKING[name](folder))
    return trainer, next(cb for cb in trainer.callbacks[::-1] if type(cb).__name__ == name)


def found_in(trainer, **options):
    "The names of all findings; options are those of `check`"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [o.name for o in trainer.check(**options)]
        except CheckFailed as error:
            return [o.name for o in error.findings]
