"""Our own callbacks are tried as those of users are: they keep every promise, but for what is meant to be so.

Several are tried at once, as a group, so that the time allows it; the calls in the report have their names.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torcheval.metrics import MulticlassAccuracy

import isaac_loop.callbacks as library
from isaac_loop.inspection import try_callback


def f(*args, **kwargs):
    "Stands for any function of a user"
    return 0.0


def noisy(x):
    return x + torch.randn_like(x)


def slower(opt):
    return LambdaLR(opt, lambda i: 0.9**i)


BASIC, METRICS = library.BasicTrainCB, lambda: library.MetricsCB(MulticlassAccuracy(), show=False)
GROUPS = {  # Each callback of the library in one of them
    "data": lambda: [
        library.DeviceCB("cpu"),
        library.BatchTransformCB(lambda batch: batch),
        library.BatchAugmentationCB([noisy]),
        library.MixUpCB(0.2),
        library.ProgressiveResizeCB(1.0),
        library.NBatchCB(2),
    ],
    "other data": lambda: [library.CutMixCB(0.5), library.MixedPrecisionCB("bfloat16")],
    "steps": lambda: [
        BASIC(),
        library.AccumulationCB(2),
        library.ClipGradCB(1.0, column="norm"),
        library.DistributedCB(),
    ],
    "momentum": lambda: [library.MomentumTrainCB(0.9), METRICS(), library.BatchNormEvalCB()],
    "weights": lambda: [
        library.EMACB(0.9),
        library.FreezeCB("1", until=1),
        library.KeepBestCB(),
        library.StepSchedulerCB(1, factor=0.5),
    ],
    "other weights": lambda: [library.SWACB(0.5), library.WSDSchedulerCB(0.2)],
    "schedules": lambda: [
        library.BatchSchedulerCB(slower),
        library.AttributeSchedulerCB({"opt.weight_decay": lambda x: 0.1 * (1 - x)}),
    ],
    "other schedules": lambda: [
        library.OneCycleSchedulerCB(),
        library.AttributeSchedulerCB({"model.4.p": lambda x: 0.1 * x}),
    ],
    "more schedules": lambda: [
        library.PlateauSchedulerCB(patience=0),
        library.AttributeSchedulerCB({"opt.momentum": lambda x: 0.1 * (1 - x)}),
    ],
    "per epoch": lambda: [library.EpochSchedulerCB(slower), library.DropoutOnCB(), library.RewindCB(2)],
    "warm-up": lambda: [library.WarmupSchedulerCB("linear", warmup=2), library.InterruptCB()],
    "stopping": lambda: [
        library.EarlyStoppingCB(patience=1),
        library.LimitCB(4),
        library.NonFiniteStopCB(),
        library.LossSpikeCB(9.0),
        library.SamePredictionsCB(),
    ],
    "one batch": lambda: [library.OneBatchCB()],
    "watching": lambda: [
        library.ActivationStatsCB(nn.ReLU),
        library.GradientStatsCB(),
        library.UpdateRatioCB(),
        library.NonFiniteCB(3),
        library.RecorderCB(size=lambda trainer: trainer.loss),
    ],
    "evaluating": lambda: [library.CapturePredsCB(with_inputs=True), library.EvaluatorCB(updates=2)],
    "reporting": lambda: [
        library.ReportCB(score=f),
        library.ProgressCB(),
        library.DerivedColumnsCB(strict=False, double=lambda row: 2 * row["train_loss"]),
        library.RenameColumnsCB(dict(train_loss="loss"), strict=False),
        library.PrintColumnsCB("valid_loss"),
        library.LoggerCB(f, every=50),
    ],
}
ON_DISK = {  # Those that wait for the disk in every run
    "files": lambda: [
        library.HistoryFilesCB("out", plot=None),
        library.PredictionsCSVCB("preds.csv"),
        library.ExportCB("exported"),
    ],
    "checkpoints": lambda: [library.CheckpointCB("runs", every=2, keep_last=2)],
    "an experiment": lambda: [library.ExperimentCB("runs", "digits")],
}
COMPILER_FILES = "TORCHINDUCTOR_CACHE_DIR"  # In the environment, once something was compiled
MEANT = {  # The promise that each breaks because of what it is for
    "CompileCB": (lambda: library.CompileCB(backend="eager"), "process"),  # PyTorch sets `COMPILER_FILES`
    "EpochTimeCB": (lambda: library.EpochTimeCB(2), "two_fits"),  # It leaves when it has said its word
    "LRFinderCB": (lambda: library.LRFinderCB(n_batches=9, show=False), "waits"),  # Until a loss explodes
    "TrackingCB": (lambda: library.TrackingCB("runs.sqlite"), "state_dict"),  # It goes on as another run
}
FEW = {  # Those that take seconds for every run: a few promises
    "AccelerateCB": lambda: library.AccelerateCB(),
    "GradientPlotCB": lambda: library.GradientPlotCB("grads"),
    "LivePlotCB": lambda: library.LivePlotCB("loss.png"),
    "NotifyCB": lambda: library.NotifyCB(f),
    "ProfilerCB": lambda: library.ProfilerCB(active=2),
    "BlackBoxCB": lambda: library.BlackBoxCB(3),
    "TimesCB": lambda: library.TimesCB(),
}
OF_THE_DISK = ["cleanup", "cancels", "two_fits", "resume", "state_dict", "files"]
ELSEWHERE = {"TextComparisonCB": "needs a model of texts", "UploadCB": "needs a place to upload to"}


def test_every_callback_of_the_library_is_here():
    tried = {type(cb).__name__ for make in (GROUPS | ON_DISK).values() for cb in make()}
    assert tried | MEANT.keys() | FEW.keys() | ELSEWHERE.keys() == {
        name for name in dir(library) if name.endswith("CB")
    }


def group(make, name):
    return lambda: SimpleNamespace(callbacks=make(), name=name)


@pytest.mark.parametrize("name", ON_DISK)
def test_those_that_write_files_keep_the_promises_about_them(name):
    try_callback(group(ON_DISK[name], name), promises=OF_THE_DISK, seconds=0).check()


@pytest.mark.parametrize("name", GROUPS)
def test_our_callbacks_keep_every_promise(name):
    report = try_callback(group(GROUPS[name], name), seconds=0)
    report.check()
    assert sum(tried.verdict == "kept" for tried in report.promises.values()) >= 7


@pytest.mark.parametrize("name", MEANT)
def test_what_is_meant_to_be_so_breaks_one_promise(name, monkeypatch):
    monkeypatch.delenv(COMPILER_FILES, raising=False)
    make, promise = MEANT[name]
    report = try_callback(make(), promises=["two_fits", "state_dict", "process", "waits", "files"])
    assert report.broken == [promise]
    report.check(ignore=promise)


@pytest.mark.parametrize("name", FEW)
def test_those_that_take_long_keep_a_few(name):
    try_callback(FEW[name](), promises=["hooks", "modes", "process"]).check()
