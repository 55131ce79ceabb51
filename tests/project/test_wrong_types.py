"""An argument of a wrong type is refused in words of ours, never in one of Python's own: those name neither
the argument nor what to do. The law holds for every callback and each of its parameters.
"""

import contextlib
import inspect
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import isaac_loop.all as library
from isaac_loop.all import (
    BasicTrainCB,
    CancelException,
    ClipGradCB,
    DataLoaders,
    EarlyStoppingCB,
    EMACB,
    KeepBestCB,
    LossSpikeCB,
    LRFinderCB,
    MetricsCB,
    MixUpCB,
    MomentumTrainCB,
    OneCycleSchedulerCB,
    PlateauSchedulerCB,
    StepSchedulerCB,
    SWACB,
    Trainer,
    WarmupSchedulerCB,
    WSDSchedulerCB,
)

RAW = (
    "not supported between",
    "unsupported operand",
    "object is not",
    "has no attribute",
    "can't multiply",
    "can only concatenate",
    "not iterable",
    "must be real number",
    "must be a string",
    "could not convert",
    "expected string",
    "unhashable",
)
WRONG = "0.1", object(), {"a": 1}

# What callbacks need beside the argument that is wrong
NEEDED = {
    "AttributeSchedulerCB": dict(functions={"opt.lr": lambda progress: 0.1}),
    "BatchAugmentationCB": dict(tfms=lambda x: x),
    "BatchSchedulerCB": dict(scheduler_func=partial(optim.lr_scheduler.StepLR, step_size=2)),
    "BatchTransformCB": dict(tfm=lambda batch: batch),
    "BlackBoxCB": dict(folder="box"),
    "CheckpointCB": dict(folder="run"),
    "ClipGradCB": dict(max_norm=1.0),
    "DerivedColumnsCB": dict(one=lambda row: 1),
    "EpochSchedulerCB": dict(scheduler_func=partial(optim.lr_scheduler.StepLR, step_size=2)),
    "ExperimentCB": dict(root="all", project="one"),
    "ExportCB": dict(folder="weights"),
    "FreezeCB": dict(parts=["bias"]),
    "GradientPlotCB": dict(folder="plots"),
    "HistoryFilesCB": dict(folder="files", plot=None),
    "HooksCallback": dict(hookfunc=lambda *args: None),
    "LimitCB": dict(updates=100),
    "LivePlotCB": dict(path="loss.png", seconds=100),
    "LoggerCB": dict(to=[]),
    "LossSpikeCB": dict(start_batch=0),
    "NotifyCB": dict(send=lambda subject, text, files: None),
    "PredictionsCSVCB": dict(path="preds.csv"),
    "RecorderCB": dict(one=lambda trainer: 1.0),
    "RenameColumnsCB": dict(valid_loss="loss"),
    "ReportCB": dict(one=lambda preds, targets: 1.0),
    "StepSchedulerCB": dict(epochs=1),
    "TextComparisonCB": dict(decode=str),
    "TrackingCB": dict(path="runs"),
    "UploadCB": dict(url="memory://run", folder="."),
}


def callbacks():
    "Names of everything public that is, or makes, callbacks"
    return [o for o in dir(library) if o.endswith(("CB", "CBs", "Callback")) and o != "Callback"]


def parameters(cls):
    "Names of the parameters that are given by name"
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [o.name for o in inspect.signature(cls).parameters.values() if o.kind in named]


def fit(callback):
    "Two epochs of a tiny model"
    batches = [(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))]
    steps = [] if isinstance(callback, (list, BasicTrainCB, MomentumTrainCB)) else [BasicTrainCB()]
    metrics = [] if isinstance(callback, list) else [MetricsCB(show=False)]
    dls = DataLoaders(batches, batches)
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(2, 2), [*steps, *metrics, callback])
    with contextlib.suppress(CancelException):
        trainer.fit(2, lr=0.1)
    return trainer


def error_of(name, argument, value):
    "What is said when `argument` is `value`: at once, or in a fit"
    try:
        fit(getattr(library, name)(**{**NEEDED.get(name, {}), argument: value}))
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", callbacks())
def test_a_wrong_type_never_ends_in_words_of_python(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = {(o, repr(x)): error_of(name, o, x) for o in parameters(getattr(library, name)) for x in WRONG}
    assert not {given: text for given, text in said.items() if any(o in text for o in RAW)}


def refused(cls, **given):
    "What is said at once when a callback is made so"
    with pytest.raises((TypeError, ValueError)) as caught:
        getattr(library, cls)(**{**NEEDED.get(cls, {}), **given})
    return str(caught.value)


def flags():
    "Each parameter of a callback whose default is True or False"
    found = [(name, getattr(library, name)) for name in callbacks()]
    return [
        (name, o.name)
        for name, cls in found
        for o in inspect.signature(cls).parameters.values()
        if isinstance(o.default, bool) and o.annotation in (bool, "bool")
    ]


@pytest.mark.parametrize("name, flag", flags())
def test_a_flag_is_true_or_false(name, flag):
    "A text such as 'no' would count as True"
    assert f"`{flag}` is 'no'" in refused(name, **{flag: "no"})


@pytest.mark.parametrize(
    "name, argument, value",
    [
        ("DropoutOnCB", "kinds", "zz"),
        ("MixedPrecisionCB", "init_scale", "zz"),
        ("ExportCB", "keep_last", "zz"),
        ("ExportCB", "keep_last", 1),
        ("CheckpointCB", "mode", "zz"),
        ("EvaluatorCB", "callbacks", 3.7),
        *((o, "name", 3) for o in ("EvaluatorCB", "ReportCB", "RenameColumnsCB", "TextComparisonCB")),
        *(
            (o, "module_filter", "zz")
            for o in (
                "ActivationStatsCB",
                "GradientStatsCB",
                "GradientPlotCB",
                "NonFiniteCB",
                "UpdateRatioCB",
            )
        ),
        *(
            (o, "opt", 3)
            for o in ("BatchSchedulerCB", "EpochSchedulerCB", "OneCycleSchedulerCB", "PlateauSchedulerCB")
        ),
        *(
            (o, "opt", 3)
            for o in ("WarmupSchedulerCB", "WSDSchedulerCB", "StepSchedulerCB", "MixedPrecisionCB")
        ),
        ("ClipGradCB", "opt", 3),
        ("TrackingCB", "experiment", 3),
    ],
)
def test_what_cannot_work_is_refused_where_it_is_given(name, argument, value, tmp_path, monkeypatch):
    "By its name and value"
    monkeypatch.chdir(tmp_path)
    said = refused(name, **{argument: value})
    assert f"`{argument}`" in said and repr(value) in said


@pytest.mark.parametrize("name", ["FreezeCB", "BatchNormEvalCB"])
def test_what_is_no_part_of_a_model_is_refused_where_it_is_given(name):
    assert "3.7 names no part of a model" in refused(name, parts=3.7)
    assert "3.7 names no part of a model" in refused(name, parts=["bias", 3.7])


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5)], ids=str)
def test_a_number_of_numpy_or_in_a_tensor_is_a_number(number):
    EMACB(number)
    SWACB(number)
    KeepBestCB(min_delta=number)
    MixUpCB(number, number)
    LossSpikeCB(number + 2, decay=number, min_delta=number)
    LRFinderCB(number + 1, number + 1)
    EarlyStoppingCB(min_delta=number, threshold=number, baseline=number)
    PlateauSchedulerCB(factor=number, threshold=number)
    StepSchedulerCB(1, number, min_lr=number)
    WarmupSchedulerCB(start_factor=number, end_factor=number, k=number, cycle_mult=number)
    WSDSchedulerCB(spacing=number + 1, end_factor=number)
    OneCycleSchedulerCB(div_factor=number + 1, base_momentum=number, max_momentum=number)


def test_what_nobody_reads_or_torch_understands_is_legal():
    ClipGradCB(1.0, norm_type="inf")
    OneCycleSchedulerCB(cycle_momentum=False, base_momentum=None)
    PlateauSchedulerCB(patience=float("inf"), min_lr=[0.1, 0.2])
    LossSpikeCB(report=None)


def test_epochs_of_numpy_and_of_a_generator_are_epochs():
    assert StepSchedulerCB(np.int64(2)).epochs == 2
    assert StepSchedulerCB(n for n in (4, 2, 2)).epochs == [2, 4]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: library.PlateauSchedulerCB(factor=0), "`factor` is 0, and nothing would be learnt"),
        (lambda: library.PlateauSchedulerCB(factor=-0.5), "`factor` is -0.5, and nothing would be learnt"),
        (lambda: library.StepSchedulerCB([]), "`epochs` is empty"),
        (lambda: library.WarmupSchedulerCB(k=0), "`k` is 0.*Use a number above 0"),
        (lambda: library.WarmupSchedulerCB(cycles=2, cycle_mult=-1), "`cycle_mult` is -1.*above 0"),
        (lambda: library.WarmupSchedulerCB("inverse_sqrt", timescale=-1), "`timescale` is -1.*above 0"),
        (lambda: library.LimitCB(1000, count=lambda batch: 3), "no limit on those"),
        (lambda: library.LimitCB(samples=10, count="numel"), "`count` is 'numel', which cannot be called"),
        (lambda: library.CSV("logs/a.csv"), "`folder` is 'logs/a.csv', the name of a file.*`CSV.'logs/a'.`"),
    ],
)
def test_a_number_that_would_have_no_effect_or_a_wrong_one_is_refused(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()


ROWS = torch.utils.data.TensorDataset(torch.ones(8, 2))


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: library.ReportCB(lambda preds: {}),
            r"is called with \(preds, targets\), and does not take that",
        ),
        (lambda: library.ReportCB(score=lambda preds: 3), "`score` is called with"),
        (lambda: library.exact_loader(ROWS, 4, num_workers="2"), "`num_workers` is '2'.* of 0 or more"),
        (lambda: library.exact_loader(ROWS, 4, shufle=True), "keyword `shufle`.*Did you mean `shuffle`"),
        (lambda: library.exact_loader(type(ROWS), 4), "the class `TensorDataset`.*Make one"),
    ],
)
def test_what_failed_later_or_in_words_of_python_is_refused_when_it_is_made(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()


def test_an_optimizer_by_name_is_refused_before_anything_calls_it():
    with pytest.raises(TypeError, match="`opt_func` is 'SGD'.*such as `torch.optim.SGD`"):
        Trainer(DataLoaders([]), F.mse_loss, "SGD", nn.Linear(1, 1), None)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            dict(loss_func="cross_entropy"),
            "`loss_func` is 'cross_entropy'.*`torch.nn.functional.cross_entropy`",
        ),
        (dict(loss_func="mse_loss"), "`loss_func` is 'mse_loss'.*`torch.nn.functional.mse_loss`"),
        (dict(loss_func="MSE"), "`loss_func` is 'MSE'.*such as `torch.nn.functional.cross_entropy`"),
        (dict(loss_func=0.1), "`loss_func` is 0.1, and each batch calls it"),
        (dict(opt_func=0.1), "`opt_func` is 0.1.*such as `torch.optim.SGD`"),
        (dict(model="resnet18"), "`model` is 'resnet18'.*The order is"),
    ],
)
def test_a_name_or_a_number_in_the_place_of_a_function_or_a_model_is_refused(change, words):
    "A loss by its name failed in the first batch, since a text cannot be called"
    right = dict(dls=DataLoaders([]), loss_func=F.mse_loss, opt_func=optim.SGD, model=nn.Linear(1, 1))
    with pytest.raises(TypeError, match=words):
        Trainer(**(right | change), callbacks=None)
    Trainer(**(right | dict(loss_func=None, opt_func=None)), callbacks=None)


@pytest.mark.parametrize("events", [("after_draw", 3), 3])
def test_events_that_are_no_names_are_refused(events):
    cls = type("DrawTrainer", (Trainer,), dict(events=events))
    with pytest.raises(TypeError, match="`DrawTrainer.events` is .*3.*called by their names"):
        cls(DataLoaders([]), F.mse_loss, optim.SGD, nn.Linear(1, 1), None)


@pytest.mark.parametrize("target", ["opt.5.lr", "opt.param_groups.5.lr", "opt.first.lr", "opt.0.1.lr"])
def test_a_parameter_group_that_is_not_there_is_told(target):
    with pytest.raises(LookupError, match=f"`{target}` means no parameter group .* has 1"):
        fit(library.AttributeSchedulerCB({target: lambda progress: 0.1}))


@pytest.mark.parametrize("target", ["opt.param_groups.0.lr", "opt.-1.lr"])
def test_a_parameter_group_is_found_by_its_path_in_pytorch_and_from_the_end(target):
    seen = []

    def before_step(trainer):
        seen.append(trainer.opt.param_groups[0]["lr"])

    cb = library.AttributeSchedulerCB({target: lambda progress: 0.25})
    fit([BasicTrainCB(), cb, before_step])
    assert seen == [0.25, 0.25]
