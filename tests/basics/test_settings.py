"""What callbacks and trainers show of themselves, against what they were given.

A callback shows every setting that a user gave, nothing of the defaults, nothing long and nothing secret.
"""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torcheval.metrics import MulticlassAccuracy

import isaac_loop.callbacks as library
from isaac_loop.basics.settings import brief, show_settings
from isaac_loop.checkpoints import CheckpointCB
from isaac_loop.loop.events import callback_name
from isaac_loop.loop.trainer import Trainer
from isaac_loop.train import BasicTrainCB


def f(*args, **kwargs):
    "Stands for any function"
    return 0.0


def made(*args, **kwargs):
    return args, kwargs


MADE = {  # Arguments, and what is shown of them
    "AccelerateCB": (made("fp16"), "'fp16'"),
    "AccumulationCB": (made(4), "4"),
    "ActivationStatsCB": (made(nn.ReLU, every=5), "ReLU, every=5"),
    "AttributeSchedulerCB": (made({"opt.lr": f}, unit="epoch"), "{'opt.lr': f}, unit='epoch'"),
    "BasicTrainCB": (made(), ""),
    "BatchAugmentationCB": (made([f], on_valid=True), "{0: f}, on_valid=True"),
    "BatchNormEvalCB": (made("body"), "'body'"),
    "BatchSchedulerCB": (made(f, opt="opt_d"), "f, opt='opt_d'"),
    "BatchTransformCB": (made(f, on_valid=False), "f, on_valid=False"),
    "BlackBoxCB": (made(4), "4"),
    "CapturePredsCB": (made(with_inputs=True), "with_inputs=True"),
    "CheckpointCB": (made("runs", every=100, keep_last=3), "'runs', every=100, keep_last=3"),
    "ClipGradCB": (made(1.0, column="norm"), "1.0, column='norm'"),
    "CompileCB": (made(loss=False, fused=True), "loss=False, fused=True"),
    "CutMixCB": (made(0.5), "0.5"),
    "DerivedColumnsCB": (made(double=f), "double=f"),
    "DeviceCB": (made("cpu"), "'cpu'"),
    "DistributedCB": (made("each", timeout=5), "'each', timeout=5.0"),
    "DropoutOnCB": (made(nn.Dropout), "Dropout"),
    "EMACB": (made(0.99, warmup=False), "0.99, warmup=False"),
    "EarlyStoppingCB": (made("loss", patience=5, mode="max"), "'loss', patience=5, mode='max'"),
    "EpochSchedulerCB": (made(f), "f"),
    "EpochTimeCB": (made(5), "5"),
    "EvaluatorCB": (made("train", updates=9, mean=f), "'train', updates=9, mean=f"),
    "ExperimentCB": (
        made("runs", "digits", hyper=dict(lr=1, api_key="pa55"), url="s3://me:pa55@host/x"),
        "'runs', 'digits', hyper={'lr': 1, 'api_key': '***'}, url='s3://***@host/x'",
    ),
    "ExportCB": (made("out", every=2), "'out', every=2"),
    "FreezeCB": (made("0", until=2), "'0', until=2"),
    "GradientPlotCB": (made("grads", every=3), "'grads', every=3"),
    "GradientStatsCB": (made(every=3), "every=3"),
    "HistoryFilesCB": (made("out", plot="pdf"), "'out', plot='pdf'"),
    "InterruptCB": (made(), ""),
    "KeepBestCB": (made("accuracy", "max"), "'accuracy', mode='max'"),
    "LRFinderCB": (made(1.5, n_batches=9), "1.5, n_batches=9"),
    "LimitCB": (made(100, seconds=60), "100, seconds=60"),
    "LivePlotCB": (made("loss.png"), "'loss.png'"),
    "LoggerCB": (made(f, every=3, alerts=("loss", ">", 2.0)), "[f], every=3, alerts=('loss', '>', 2.0)"),
    "LossSpikeCB": (made(2.0, stop=False), "2.0, stop=False"),
    "MetricsCB": (made(train_metrics=True, mean=f), "train_metrics=True, mean="),
    "MixUpCB": (made(0.2), "0.2"),
    "MixedPrecisionCB": (made("float16"), "'float16'"),
    "MomentumTrainCB": (made(0.9), "0.9"),
    "NBatchCB": (made(3), "3"),
    "NonFiniteCB": (made(3, report=f), "3, report=f"),
    "NonFiniteStopCB": (made(3, gradients=False), "3, gradients=False"),
    "NotifyCB": (made(f, every=3), "f, every=3"),
    "OneBatchCB": (made(), ""),
    "OneCycleSchedulerCB": (made(pct_start=0.2), "pct_start=0.2"),
    "PlateauSchedulerCB": (made("loss", mode="max", patience=2), "'loss', mode='max', patience=2"),
    "PredictionsCSVCB": (made("preds.csv", dl="train"), "'preds.csv', dl='train'"),
    "PrintColumnsCB": (made("a", "b", every=2), "'a', 'b', every=2"),
    "ProfilerCB": (made(active=2, with_stack=True), "active=2, with_stack=True"),
    "ProgressCB": (made("plain"), "'plain'"),
    "ProgressiveResizeCB": (made(0.25), "0.25"),
    "RecorderCB": (made(norm=f), "norm=f"),
    "RenameColumnsCB": (made(dict(a="b"), strict=False), "{'a': 'b'}, strict=False"),
    "ReportCB": (made(f, every=2, mean=f), "f, every=2, mean=f"),
    "RewindCB": (made(5, keep=3), "5, keep=3"),
    "SWACB": (made(0.5), "0.5"),
    "SamePredictionsCB": (made(value=1, stop=False), "value=1, stop=False"),
    "StepSchedulerCB": (made(2, factor=0.5), "2, factor=0.5"),
    "TextComparisonCB": (made(f, n_samples=2, tokens=f), "f, n_samples=2, tokens=f"),
    "TimesCB": (made(0, n_traced=10), "0, n_traced=10"),
    "TrackingCB": (made("runs.sqlite", experiment="a"), "'runs.sqlite', experiment='a'"),
    "UpdateRatioCB": (made(every=2), "every=2"),
    "UploadCB": (
        made("memory://me:pa55@x", retries=1, secret="pa55"),
        "'memory://***@x', retries=1, secret='***'",
    ),
    "WSDSchedulerCB": (made(0.1, n_decays=2), "0.1, n_decays=2"),
    "WarmupSchedulerCB": (made("linear", warmup=3), "'linear', warmup=3"),
}


def test_every_callback_of_the_library_is_here():
    assert set(MADE) == {o for o in vars(library) if o.endswith("CB")} | {
        o for o in dir(library) if o.endswith("CB")
    }


@pytest.mark.parametrize("name", MADE)
def test_a_callback_shows_what_it_was_given(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (args, kwargs), wanted = MADE[name]
    callback = getattr(library, name)(*args, **kwargs)
    shown = repr(callback)
    assert shown.removesuffix(": no rate tried yet").startswith(f"{name}({wanted}") and ")" in shown
    assert "pa55" not in shown and " at 0x" not in shown
    assert callback_name(callback) in (name, "texts"), "messages name it shortly"


def test_what_was_not_given_is_not_shown():
    for name in MADE:
        kind = getattr(library, name)
        try:
            callback = kind()
        except (TypeError, ValueError):
            continue
        worked_out = (
            "",
            "mode='min'",
            "epochs=1",
            "lr=_first_lr",
        )  # What the callback does without being told
        assert repr(callback).partition(":")[0] in [f"{name}({o})" for o in worked_out]


@pytest.mark.parametrize(
    "value, text",
    [
        (torch.zeros(10**6), "Tensor(...)"),
        (np.zeros(10**6), "ndarray(...)"),
        (list(range(10**6)), "[0, 1, 2, 3, ...]"),
        ({i: [i] for i in range(9)}, "{0: [0], 1: [1], 2: [2], 3: [3], ...}"),
        ("x" * 999, "'" + "x" * 19 + "..." + "x" * 19 + "'"),
        (nn.Linear(2, 2), "Linear(...)"),
        (partial(nn.Linear, bias=False, token="s"), "Linear(bias=False, token='***')"),
        (partial(nn.Linear, 2, 2), "Linear(...)"),
        (partial(nn.Linear, 2, bias=np.zeros(3)), "Linear(..., bias=ndarray(...))"),
        (MulticlassAccuracy(), "MulticlassAccuracy(...)"),
        (np.float64(0.5), "0.5"),
        (True, "True"),
        ((1,), "(1,)"),
        (Path("/elsewhere/runs"), "'/elsewhere/runs'"),
        (lambda row: row, "<lambda>"),
        (dict(password="pa55", user="me", tokens=3), "{'password': '***', 'user': 'me', 'tokens': 3}"),
        ("https://host/x?sig=pa55&b=1", "'https://host/x?***'"),
    ],
    ids=lambda o: str(o)[:20] if isinstance(o, str) else type(o).__name__,
)
def test_a_value_is_told_in_a_few_characters(value, text):
    assert brief(value) == text and len(brief(value)) < 80


def test_a_value_is_never_asked_for_its_own_text():
    class Loud:
        def __repr__(self):
            raise RuntimeError("asked")

        __str__ = __eq__ = __bool__ = __len__ = __repr__

    assert show_settings(library.BatchTransformCB(Loud.__repr__)) == "BatchTransformCB(__repr__)"
    callback = library.MetricsCB()
    callback.weigh = Loud()
    assert repr(callback) == "MetricsCB(weigh=Loud(...))"


def test_classes_of_a_user_are_theirs():
    "A subclass shows its own arguments; an own line stays; what has no base shows what Python shows"

    class Stronger(library.ClipGradCB):
        def __init__(self, strength, max_norm=2.0):
            super().__init__(max_norm)
            self.strength = strength

    class Named(library.BasicTrainCB):
        def __repr__(self):
            return "mine"

    class Free:
        def before_fit(self, trainer):
            "Do nothing"

    assert repr(Stronger(3)) == "Stronger(3)" and repr(Stronger(3, 1.0)) == "Stronger(3, max_norm=1.0)"
    assert repr(Named()) == "mine" and " at 0x" in repr(Free())


# The trainer


def small(*callbacks):
    torch.manual_seed(0)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]
    dls = SimpleNamespace(train=batches, valid=batches[:1])
    return Trainer(dls, F.mse_loss, optim.SGD, nn.Linear(3, 1), [BasicTrainCB(), *callbacks])


def far(trainer):
    return re.search(r"; (.*)\)$", repr(trainer))[1]


def test_a_trainer_says_how_far_all_its_fits_have_come():
    "Passes that were broken off are no epochs, and neither side runs nor validation count"
    trainer = small()
    assert repr(trainer) == "Trainer(Linear, callbacks: BasicTrainCB; not trained yet)"
    trainer.fit(2)
    assert far(trainer) == "trained for 2 epochs, 10 updates"
    trainer.fit(1, train=False)
    trainer.lr_find(n_batches=3)
    trainer.fit(1, callbacks=library.LRFinderCB(n_batches=3, show=False))
    trainer.get_preds()
    assert far(trainer) == "trained for 2 epochs, 10 updates"
    trainer.fit(3, callbacks=library.LimitCB(updates=6))
    assert far(trainer) == "trained for 4 epochs, 16 updates", "a pass that was asked to stop has an end"
    trainer.fit(1, callbacks=library.OneBatchCB())
    assert far(trainer) == "trained for 4 epochs, 17 updates"
    with trainer.snapshot():
        trainer.fit(1)
        assert far(trainer) == "trained for 5 epochs, 22 updates"
    assert far(trainer) == "trained for 4 epochs, 17 updates"


def test_it_says_so_in_the_middle_of_a_fit_and_after_an_error():
    seen = []

    def after_batch(trainer):
        seen.append(far(trainer))
        if len(seen) == 7:
            raise ValueError("enough")

    trainer = small()
    with pytest.raises(ValueError, match="enough"):
        trainer.fit(2, valid=False, callbacks=after_batch)
    assert seen[0] == "trained for 1 update" and seen[4] == "trained for 5 updates"
    assert seen[5] == "trained for 1 epoch, 6 updates" and far(trainer) == "trained for 1 epoch, 7 updates"


@pytest.mark.filterwarnings("ignore:The training loader does not know", "ignore:Reading")
def test_a_run_that_goes_on_has_come_as_far_as_one_that_never_stopped(tmp_path):
    def two_fits(folder, until=99):
        def after_batch(trainer):
            if trainer.n_updates == until and trainer.history.fit == 1:
                raise KeyboardInterrupt

        trainer = small(CheckpointCB(folder, every=2), after_batch)
        trainer.fit(2)
        trainer.fit(2)
        return far(trainer)

    whole = two_fits(tmp_path / "whole")
    assert whole == "trained for 4 epochs, 20 updates"
    with pytest.raises(KeyboardInterrupt):
        two_fits(tmp_path / "broken", until=7)
    assert two_fits(tmp_path / "broken") == whole
    assert two_fits(tmp_path / "broken") == whole, "when nothing is left to do"
