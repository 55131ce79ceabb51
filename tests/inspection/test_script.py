"""A trainer written out as plain PyTorch, against the trainer itself.

The script trains to the same weights, bit for bit, with the same rows of history, in a module where this
library is not at hand; and what it cannot write is refused by name.
"""

import ast
import builtins
import dataclasses
import enum
import io
import functools
import random
import subprocess
import sys
import warnings
from collections import OrderedDict, UserDict, defaultdict
from contextlib import redirect_stdout, suppress
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from torcheval.metrics import MulticlassAccuracy

import isaac_loop.callbacks as library
from isaac_loop import CancelBatchException, CancelEpochException, CancelFitException, CancelStepException
from isaac_loop import Trainer, set_seed, with_cbs
from isaac_loop.callbacks import (
    AccumulationCB,
    BasicTrainCB,
    BatchAugmentationCB,
    BatchTransformCB,
    ClipGradCB,
    DeviceCB,
    EMACB,
)
from isaac_loop.callbacks import (
    EarlyStoppingCB,
    FreezeCB,
    GradientStatsCB,
    LimitCB,
    MetricsCB,
    MixedPrecisionCB,
)
from isaac_loop.callbacks import MomentumTrainCB, OneCycleSchedulerCB, ProgressCB, RewindCB, StepSchedulerCB
from isaac_loop.callbacks import WarmupSchedulerCB
from isaac_loop.data import DataLoaders, ReplayLoader, exact_loader
from isaac_loop.inspection.plain_script.known_callbacks import LEFT_OUT, MEMBERS, REFUSED, WRITTEN
from runs import Rows
from working import Images, images_model


def accuracy():
    return MetricsCB(accuracy=MulticlassAccuracy())


def make_trainer(callbacks, opt_func=optim.AdamW, seed=5, cls=Trainer):
    set_seed(seed)
    dls = DataLoaders(exact_loader(Images(26), 4), exact_loader(Images(11), 6, shuffle=False))
    return cls(dls, F.cross_entropy, opt_func, images_model(), callbacks)


def plain_rows(rows):
    return [{k: v for k, v in row.items() if k != "elapsed"} for row in rows]


def without_us(name, *args, **kwargs):
    assert not name.startswith("isaac_loop"), "a script must not need this library"
    return real_import(name, *args, **kwargs)


real_import = builtins.__import__


def run(script, trainer, n_epochs, lr):
    "Train the parts of a trainer by the script"
    space = {"__name__": "written"}
    exec(compile(str(script), "written", "exec"), space)
    parts = trainer.model, trainer.dls.train, trainer.dls.valid, trainer.loss_func, trainer.opt_func
    return space["train"](*parts, n_epochs, lr, **script.needs) or []


def both(make, monkeypatch, n_epochs=3, lr=0.02, **options):
    "Train by the trainer and by its script, and compare"
    trainer = make()
    script = trainer.to_script()
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(n_epochs, lr)
        other = make()
        script = other.to_script() if script.needs else script  # What the first one needs has been used
        monkeypatch.setattr(builtins, "__import__", without_us)
        try:
            rows = run(script, other, n_epochs, lr)
        finally:
            monkeypatch.undo()
    ours, theirs = trainer.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), str(script)
    if any(isinstance(cb, MetricsCB) for cb in trainer.callbacks):
        written = {name for row in rows for name in row}  # Who only watches is left out, and its columns too
        ours = [{k: v for k, v in row.items() if k in written} for row in trainer.history]
        assert plain_rows(rows) == plain_rows(ours), str(script)
    assert "isaac_loop" not in str(script)
    return script


PARTS = {
    "metrics": accuracy,
    "accumulation": lambda: AccumulationCB(3),
    "clipping": lambda: ClipGradCB(0.5),
    "one cycle": lambda: OneCycleSchedulerCB(),
    "average": lambda: EMACB(0.9),
    "half precision": lambda: MixedPrecisionCB("bfloat16"),
    "early stopping": lambda: EarlyStoppingCB(patience=1),
}
NEEDS = {"early stopping": "metrics"}
PAIRS = [o for n in (0, 1, 2) for o in combinations(PARTS, n)]
PAIRS = [o for o in PAIRS if all(NEEDS.get(name, name) in o or name not in NEEDS for name in o)]


@pytest.mark.parametrize("names", [*PAIRS, tuple(PARTS)], ids=" + ".join)
def test_the_script_trains_to_the_same_weights_and_rows(names, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), *(PARTS[name]() for name in names)]), monkeypatch)


@pytest.mark.parametrize("share, n_gather", [(0.0, 1), (1.0, 1), (1.0, 1000), (0.25, 1)])
def test_a_cycle_is_written_for_each_share_and_length(share, n_gather, monkeypatch):
    callbacks = lambda: [BasicTrainCB(), AccumulationCB(n_gather), OneCycleSchedulerCB(pct_start=share)]
    both(lambda: make_trainer(callbacks()), monkeypatch, n_epochs=1)


@pytest.mark.parametrize(
    "names", [("metrics",), ("clipping", "one cycle"), ("average", "metrics")], ids=" + ".join
)
def test_momentum_is_written_too(names, monkeypatch):
    both(lambda: make_trainer([MomentumTrainCB(0.7), *(PARTS[name]() for name in names)]), monkeypatch)


MORE = {
    "device": lambda: [DeviceCB("cpu")],
    "warm-up": lambda: [WarmupSchedulerCB(warmup=2)],
    "steps": lambda: [StepSchedulerCB(1)],
    "frozen": lambda: [FreezeCB("0", until=1)],
    "frozen one after the other": lambda: [FreezeCB({"1": 1, "0.2": 2})],
    "limit": lambda: [LimitCB(7), accuracy()],
    "values clipped": lambda: [ClipGradCB(max_value=0.01)],
    "watchers": lambda: [accuracy(), ProgressCB("plain"), GradientStatsCB()],
}


@pytest.mark.parametrize("name", MORE)
def test_other_callbacks_are_written_or_left_out_or_refused(name, monkeypatch):
    try:
        make_trainer([BasicTrainCB(), *MORE[name]()]).to_script()
    except ValueError as error:
        assert "cannot be written as plain PyTorch" in str(error)
        return
    both(lambda: make_trainer([BasicTrainCB(), *MORE[name]()]), monkeypatch)


# What users write


class SmoothCB:
    "Settings, a helper, and state that lasts"

    def __init__(self, share=0.1):
        self.share = share

    def before_fit(self, trainer):
        self.mean = 0.0

    def uniform(self, preds):
        return -F.log_softmax(preds, dim=-1).mean()

    def after_get_loss(self, trainer):
        if trainer.training:
            trainer.loss = trainer.loss.lerp(self.uniform(trainer.preds), self.share)
            self.mean = 0.9 * self.mean + 0.1 * trainer.loss.detach()


class NoiseCB:
    def after_backward(self, trainer):
        for p in trainer.model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.ones_like(p), alpha=0.01 / (1 + trainer.epoch))


class SkipCB:
    "Leaves out every third step"

    def before_step(self, trainer):
        if trainer.batch_num % 3 == 2:
            raise CancelStepException()


class HalvedCB(BasicTrainCB):
    "A subclass of a built-in"

    def get_loss(self, trainer):
        super().get_loss(trainer)
        trainer.loss = trainer.loss / 2


def double(batch):
    x, y = batch
    return x * 2, y


USERS = {
    "a callback with state and a helper": lambda: [BasicTrainCB(), SmoothCB(0.2), accuracy()],
    "noise in the gradients": lambda: [BasicTrainCB(), NoiseCB(), ClipGradCB(1.0)],
    "steps left out": lambda: [BasicTrainCB(), SkipCB(), accuracy()],
    "a subclass of a built-in": lambda: [HalvedCB(), accuracy()],
}


@pytest.mark.parametrize("name", USERS)
def test_a_users_callback_is_inlined(name, monkeypatch):
    script = both(lambda: make_trainer(USERS[name]()), monkeypatch)
    assert "self." not in str(script)


class ReadsFilesCB:
    def after_batch(self, trainer):
        trainer.rewind(1)


class OwnBatchTrainer(Trainer):
    "A batch of one's own"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")
            self.run_callbacks("predict")


def test_a_batch_of_ones_own_is_written_or_refused(monkeypatch):
    def make():
        return make_trainer([BasicTrainCB(), accuracy()], cls=OwnBatchTrainer)

    try:
        make().to_script()
    except ValueError as error:
        assert "OwnBatchTrainer.one_batch" in str(error)
    else:
        both(make, monkeypatch)


class LeavesAfterBackwardCB:
    on_valid = False

    def after_backward(self, trainer):
        if trainer.batch_num == 2:
            raise CancelBatchException


class SkipsFirstCB:
    order, on_valid = -100, False

    def before_step(self, trainer):
        if trainer.batch_num == 2:
            raise CancelStepException


class LeavesAfterStepCB:
    on_valid = False

    def after_step(self, trainer):
        if trainer.batch_num == 2:
            raise CancelEpochException


class LeavesBeforeStepCB:
    "With a gradient that is complete, and goes undivided into the next window"

    on_valid = False

    def before_step(self, trainer):
        if trainer.epoch == 1 and trainer.batch_num == 2:
            raise CancelEpochException


@pytest.mark.parametrize("kind", [LeavesAfterBackwardCB, SkipsFirstCB, LeavesAfterStepCB, LeavesBeforeStepCB])
def test_a_window_of_gradients_that_somebody_cuts_into_is_written(kind, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), AccumulationCB(3), kind()]), monkeypatch)


def shift(trainer, by):
    "What shows in the weights whether it was done, and how often"
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(by)


class TidiesCB:
    def cleanup_step(self, trainer):
        shift(trainer, 1.01)

    def cleanup_batch(self, trainer):
        shift(trainer, 1.02)

    def cleanup_epoch(self, trainer):
        shift(trainer, 1.03)

    def cleanup_fit(self, trainer):
        shift(trainer, 1.04)


class LeavesFitInCleanupOfBatchCB:
    "Before the cleanup of who came earlier"

    def cleanup_batch(self, trainer):
        if trainer.n_updates == 10:
            raise CancelFitException


class LeavesBatchInCleanupOfStepCB:
    order = 100

    def cleanup_step(self, trainer):
        if trainer.batch_num == 2:
            raise CancelBatchException


class LeavesPassInCleanupOfStepCB:
    order = 100

    def cleanup_step(self, trainer):
        if trainer.epoch == 1 and trainer.batch_num == 2:
            raise CancelEpochException


class LeavesFitInCleanupOfPassCB:
    "Before the row of the pass is written"

    order = 100

    def cleanup_epoch(self, trainer):
        if trainer.epoch == 1:
            raise CancelFitException


@pytest.mark.parametrize(
    "kind",
    [
        LeavesFitInCleanupOfBatchCB,
        LeavesBatchInCleanupOfStepCB,
        LeavesPassInCleanupOfStepCB,
        LeavesFitInCleanupOfPassCB,
    ],
)
def test_cleanups_after_one_that_leaves_are_done_all_the_same(kind, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), MetricsCB(show=False), TidiesCB(), kind()]), monkeypatch)


class MayLeaveFitCB:
    def before_step(self, trainer):
        if trainer.n_updates == 5:
            raise CancelFitException


class LeavesBatchInCleanupOfBatchCB:
    def cleanup_batch(self, trainer):
        if trainer.batch_num == 2:
            raise CancelBatchException


class LeavesFitInCleanupOfFitCB:
    def cleanup_fit(self, trainer):
        raise CancelFitException


@pytest.mark.parametrize(
    "kinds, words",
    [
        ([MayLeaveFitCB, LeavesBatchInCleanupOfStepCB], "leaves the batch, perhaps where the fit is being"),
        ([LeavesBatchInCleanupOfBatchCB], "leaves the batch when that is over"),
        ([LeavesFitInCleanupOfFitCB], "leaves the fit when that is over"),
    ],
    ids=["two ways that meet", "a batch that is over", "a fit that is over"],
)
def test_a_cleanup_that_python_would_leave_otherwise_is_refused(kinds, words):
    with pytest.raises(ValueError, match=f"`{kinds[-1].__name__}.cleanup_.*{words}"):
        make_trainer([BasicTrainCB(), *(kind() for kind in kinds)]).to_script()


class StopsBeforeFitCB:
    def before_fit(self, trainer):
        if trainer.lr > 0:
            trainer.request_stop("not at this rate")

    def after_fit(self, trainer):
        shift(trainer, 2)

    def cleanup_fit(self, trainer):
        shift(trainer, 3)


class StopsBeforePassCB:
    def before_epoch(self, trainer):
        if trainer.epoch == 1:
            trainer.request_stop("enough")


class StopsBeforeLatePassCB:
    def before_epoch(self, trainer):
        if trainer.n_updates >= 7 and not trainer.training:
            trainer.request_stop("enough")


@pytest.mark.parametrize("kind", [StopsBeforeFitCB, StopsBeforePassCB, StopsBeforeLatePassCB])
@pytest.mark.parametrize("others", [[], [lambda: MetricsCB(show=False)]], ids=["alone", "with rows"])
def test_a_stop_that_is_asked_for_before_fit_or_pass_is_written(kind, others, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), *(other() for other in others), kind()]), monkeypatch)


class WeighedLoss(nn.Module):
    "Two losses, weighed by parameters that are trained too (Kendall et al. 2018)"

    def __init__(self):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, preds, targs):
        losses = torch.stack([F.cross_entropy(preds, targs), preds.square().mean()])
        return (losses * torch.exp(-self.log_vars) + self.log_vars).sum()


@pytest.mark.parametrize(
    "cb",
    [
        lambda: AccumulationCB(2),
        lambda: ClipGradCB(0.05),
        lambda: ClipGradCB(max_value=0.01),
        lambda: ClipGradCB(adaptive=0.01),
    ],
    ids=["gathered", "by norm", "by value", "adaptive"],
)
def test_parameters_beside_those_of_the_model_are_divided_and_clipped_in_the_script_too(cb, monkeypatch):
    def make():
        loss = WeighedLoss()

        def opt_func(params, lr):
            return optim.SGD([{"params": loss.parameters(), "lr": 10 * lr}, {"params": params}], lr)

        trainer = make_trainer([BasicTrainCB(), cb()], opt_func)
        trainer.loss_func = loss
        made.append(trainer)
        return trainer

    made = []
    both(make, monkeypatch)
    ours, theirs = (trainer.loss_func.log_vars for trainer in made[:2])
    assert torch.equal(ours, theirs) and ours.abs().sum() > 0


def lbfgs(params, lr):
    return optim.LBFGS(params, lr)


@pytest.mark.parametrize("opt_func", [optim.LBFGS, lbfgs, functools.partial(lbfgs)])
def test_an_optimizer_that_needs_a_closure_is_refused_however_it_is_made(opt_func):
    with pytest.raises(ValueError, match="`LBFGS` evaluates the loss several times"):
        make_trainer([BasicTrainCB()], opt_func).to_script()


def test_a_function_that_may_make_another_optimizer_is_written():
    def opt_func(params, lr):
        return optim.LBFGS(params, lr) if lr > 1 else optim.SGD(params, lr)

    assert "opt.step()" in str(make_trainer([BasicTrainCB()], opt_func).to_script())


class TooSteepCB:
    on_valid = False

    @torch.no_grad()
    def before_step(self, trainer):
        norm = sum(p.grad.square().sum() for p in trainer.model.parameters())
        if norm > 1:
            raise CancelStepException("too steep")


class UnderTwoConditionsCB:
    on_valid = False

    def before_step(self, trainer):
        if trainer.epoch:
            if trainer.batch_num == 2:
                raise CancelStepException
            trainer.model.zero_grad()


class InWithCB:
    on_valid = False

    def before_backward(self, trainer):
        with torch.no_grad():
            if trainer.epoch:
                with torch.enable_grad():
                    if trainer.batch_num == 3:
                        raise CancelStepException
                    trainer.loss = trainer.loss * 2
            if trainer.batch_num == 1:
                raise CancelStepException
        trainer.loss = trainer.loss * 3


class PassInWithCB:
    @torch.no_grad()
    def before_epoch(self, trainer):
        if trainer.training and trainer.epoch == 1:
            raise CancelEpochException


@pytest.mark.parametrize("kind", [TooSteepCB, UnderTwoConditionsCB, InWithCB, PassInWithCB])
def test_a_way_out_that_no_if_can_stand_for_is_written(kind, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), kind(), ClipGradCB(0.5)]), monkeypatch)
    both(lambda: make_trainer([BasicTrainCB(), AccumulationCB(2), kind(), accuracy()]), monkeypatch)


class SplitByEpochTrainer(Trainer):
    def split(self, batch):
        x, y = batch
        return (x * (1 + self.epoch),), (y,)


def test_a_split_that_needs_a_fit_is_refused_in_words():
    trainer = make_trainer([BasicTrainCB()], cls=SplitByEpochTrainer)
    with pytest.raises(ValueError, match="`BasicTrainCB.predict` cannot be written"):
        trainer.to_script()
    assert trainer.to_script(partial=True).not_written


class InnerDone(Exception):
    "Ends the span `inner`"


class InnerTrainer(Trainer):
    "Two updates for each batch, each in a span of its own"

    @with_cbs("inner", InnerDone)
    def inner_step(self):
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        for self.i in range(2):
            self.inner_step()


class BatchTwiceTrainer(OwnBatchTrainer):
    def one_batch(self):
        super().one_batch()
        super().one_batch()


class BeforeInnerCB:
    def before_inner(self, trainer):
        for group in trainer.opt.param_groups:
            group["lr"] = 0.1 / (1 + trainer.i)


class InnerDoneCB:
    def before_step(self, trainer):
        if trainer.i == 1:
            raise InnerDone


class BeforeBatchCB:
    def before_batch(self, trainer):
        x, y = trainer.batch
        trainer.batch = 2 * x, y


@pytest.mark.parametrize(
    "kind, cb, why",
    [
        (InnerTrainer, BeforeInnerCB, "`BeforeInnerCB` answers `before_inner`"),
        (InnerTrainer, InnerDoneCB, "`InnerDoneCB` may end it by `InnerDone`"),
        (BatchTwiceTrainer, BeforeBatchCB, "`BeforeBatchCB` answers `before_batch`"),
    ],
)
def test_a_span_in_which_callbacks_have_something_to_do_is_refused(kind, cb, why):
    trainer = make_trainer([BasicTrainCB(), cb()], cls=kind)
    with pytest.raises(ValueError, match=why):
        trainer.to_script(valid=False)
    assert any(why in told for told in trainer.to_script(valid=False, partial=True).not_written)


def test_a_span_in_which_nobody_has_something_to_do_is_written(monkeypatch):
    both(lambda: make_trainer([BasicTrainCB()], cls=InnerTrainer), monkeypatch)


@pytest.mark.parametrize(
    "callbacks", [lambda: [BasicTrainCB(), ReadsFilesCB()], lambda: [BasicTrainCB(), RewindCB(2)]]
)
def test_what_cannot_be_written_is_refused_by_name(callbacks):
    trainer = make_trainer(callbacks())
    name = type(trainer.callbacks[-1]).__name__
    with pytest.raises(ValueError, match=name):
        trainer.to_script()
    script = trainer.to_script(partial=True)
    assert "NOT WRITTEN" in str(script) and script.not_written
    ast.parse(str(script))


def test_every_callback_of_the_library_is_written_or_left_out_or_refused():
    groups = [set(WRITTEN), set(LEFT_OUT), set(REFUSED)]
    known = {*(o for o in dir(library) if o.endswith("CB")), *MEMBERS}
    assert set().union(*groups) == known and sum(map(len, groups)) == len(known)


def test_the_script_is_a_file_that_runs_alone(tmp_path):
    trainer = make_trainer([BasicTrainCB(), accuracy(), ProgressCB("plain"), EMACB(0.9)])
    script = trainer.to_script()
    path = script.save(tmp_path / "train.py")
    assert list(script.left_out) == ["ProgressCB"] and "ProgressCB" in str(script)
    code = (
        "import sys, torch; sys.modules['isaac_loop'] = None; import train\n"
        "from torch.nn import functional as F\n"
        "dl = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)]\n"
        "rows = train.train(torch.nn.Linear(8, 3), dl, dl, F.cross_entropy, torch.optim.SGD, 2, 0.1)\n"
        "print(len(rows), sorted(rows[0]))"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=tmp_path)
    assert said.startswith("2 ['accuracy', 'elapsed', 'epoch'") and path.exists()


def test_the_script_is_clean(tmp_path):
    trainer = make_trainer([BasicTrainCB(), *(make() for make in PARTS.values()), SmoothCB()])
    path = trainer.to_script().save(tmp_path / "train.py")
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "E,F",
        "--line-length",
        "110",
        str(path),
    ]
    assert subprocess.run(ruff, capture_output=True, text=True).returncode == 0


def test_writing_a_script_changes_nothing():
    plain, written = (make_trainer([BasicTrainCB(), accuracy(), EMACB(0.9)]) for _ in range(2))
    written.to_script()
    with redirect_stdout(io.StringIO()):
        plain = make_trainer([BasicTrainCB(), accuracy(), EMACB(0.9)])
        plain.fit(2, 0.01)
        written = make_trainer([BasicTrainCB(), accuracy(), EMACB(0.9)])
        written.to_script()
        written.fit(2, 0.01)
    assert all(map(torch.equal, plain.model.state_dict().values(), written.model.state_dict().values()))


def test_transforms_and_rows_of_other_shapes_are_written_or_refused(monkeypatch):
    def make():
        set_seed(1)
        dls = DataLoaders(exact_loader(Rows(20, augment=False), 8), exact_loader(Rows(9, augment=False), 4))
        return Trainer(
            dls, F.cross_entropy, optim.SGD, nn.Linear(8, 3), [BasicTrainCB(), BatchTransformCB(double)]
        )

    try:
        make().to_script()
    except ValueError as error:
        assert "BatchTransformCB" in str(error)
    else:
        both(make, monkeypatch)


class NamedPreds(nn.Module):
    "Gives its predictions by name, of which one is no tensor"

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return {"logits": self.linear(x), "kind": "linear"}


def loss_of_named(preds, *targets):
    return F.cross_entropy(preds["logits"], targets[-1])


def right_of_named(preds, *targets):
    assert not preds["logits"].requires_grad
    return (preds["logits"].argmax(1) == targets[-1]).double().mean()


def named_trainer(first):
    "Batches of 5, 5 and 3 with a first target that is made by a function"
    set_seed(3)
    batches = [(torch.randn(n, 4), *first(n), torch.randint(2, (n,))) for n in (5, 5, 3)]
    metrics = MetricsCB(right=right_of_named, train_metrics=True)
    callbacks = [BasicTrainCB(), metrics]
    return Trainer(DataLoaders(batches, batches), loss_of_named, optim.SGD, NamedPreds(), callbacks)


@pytest.mark.parametrize(
    "first",
    [
        lambda n: (),
        lambda n: (torch.zeros(n, 2),),
        lambda n: (torch.tensor(1.0),),
        lambda n: (2.0,),
        lambda n: ({"a": torch.zeros(n), "b": torch.zeros(n)},),
    ],
    ids="one alike scalar number dict".split(),
)
def test_metrics_of_named_predictions_and_of_several_targets_are_those_of_the_trainer(first, monkeypatch):
    both(lambda: named_trainer(first), monkeypatch)


@dataclasses.dataclass(frozen=True)
class Logits:
    logits: torch.Tensor
    n_seen: int
    largest: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "largest", self.logits.amax(1))

    def __getitem__(self, name):
        return getattr(self, name)


def held_in(kind, logits):
    "Predictions in a mapping or a dataclass"
    if kind is Logits:
        return Logits(logits, len(logits))
    return kind(list, logits=logits) if kind is defaultdict else kind(logits=logits)


class HeldPreds(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 2), kind

    def forward(self, x):
        return held_in(self.kind, self.linear(x))


def right_in_numpy(preds, targets):
    return (preds["logits"].numpy().argmax(1) == targets.numpy()).mean()


@pytest.mark.parametrize("kind", [dict, OrderedDict, defaultdict, UserDict, Logits])
def test_predictions_of_any_structure_are_measured_without_their_graph(kind, monkeypatch):
    def make():
        set_seed(3)
        batches = [(torch.randn(n, 4), torch.randint(2, (n,))) for n in (5, 3)]
        callbacks = [BasicTrainCB(), MetricsCB(right=right_in_numpy, train_metrics=True)]
        model = HeldPreds(kind)
        return Trainer(DataLoaders(batches, batches), loss_of_named, optim.SGD, model, callbacks)

    both(make, monkeypatch)


def without_graph(preds, targets):
    return right_in_numpy(preds, targets)


def Mapping(preds, targets):
    return 0.5


def test_metrics_may_be_called_as_what_a_script_defines_and_imports(monkeypatch):
    def make():
        set_seed(3)
        batches = [(torch.randn(n, 4), torch.randint(2, (n,))) for n in (5, 3)]
        callbacks = [BasicTrainCB(), MetricsCB(right=without_graph, half=Mapping, train_metrics=True)]
        model = HeldPreds(dict)
        return Trainer(DataLoaders(batches, batches), loss_of_named, optim.SGD, model, callbacks)

    both(make, monkeypatch)


def test_targets_that_leave_open_how_many_examples_there_are_are_refused():
    with pytest.raises(ValueError, match="have 3 and 5 rows, and how many examples `right` counts depends"):
        named_trainer(lambda n: (torch.zeros(3),)).to_script()
    trainer = named_trainer(lambda n: (torch.zeros(5),))
    with pytest.raises(ValueError, match=r"The batch has \[3, 5\] rows"):
        run(trainer.to_script(), trainer, 1, 0.1)


def no_rows_or_numpy(preds, targets):
    assert len(targets), "the trainer does not ask"
    return (preds.argmax(1) == targets).numpy()


def test_a_metric_in_numpy_and_a_batch_without_rows_are_measured_as_by_the_trainer(monkeypatch):
    def make():
        set_seed(3)
        batches = [(torch.randn(n, 4), torch.randint(2, (n,))) for n in (4, 0, 3)]
        metrics = MetricsCB(right=no_rows_or_numpy)
        dls = DataLoaders(batches[:1], batches)
        return Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(4, 2), [BasicTrainCB(), metrics])

    both(make, monkeypatch)


def written_in_place(x):
    return x.mul_(1.1)


def written_in_place_as_a_whole(batch):
    return batch[0].mul_(1.1), batch[1]


@pytest.mark.parametrize(
    "make_cb",
    [
        lambda: BatchAugmentationCB(written_in_place),
        lambda: BatchTransformCB(written_in_place_as_a_whole),
        lambda: BatchAugmentationCB(functools.partial(written_in_place)),
    ],
)
def test_a_transform_that_writes_to_its_batch_gets_a_copy_in_the_script_too(make_cb):
    def make():
        set_seed(1)
        batches = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(3)]
        callbacks = [BasicTrainCB(), make_cb()]
        return Trainer(DataLoaders(batches), F.cross_entropy, optim.SGD, nn.Linear(4, 2), callbacks)

    a, b, space = make(), make(), {}
    a.fit(3, lr=0.1, valid=False)
    script = b.to_script()
    exec(str(script), space)
    space["train"](b.model, b.dls.train, None, b.loss_func, b.opt_func, 3, 0.1, **script.needs)
    assert torch.equal(a.model.weight, b.model.weight)


def deeply_written_in_place(batch):
    batch["deep"][0].mul_(1.1)
    return batch


def first_written_in_place(item):
    item[0].mul_(1.1)
    return item


def deep_pair(batch):
    return batch["deep"][0], batch["y"]


@dataclasses.dataclass
class Picture:
    pixels: torch.Tensor


def test_copies_of_what_lies_deep_or_in_a_replay_loader_are_made_in_the_script_too():
    def make(loader, callback):
        set_seed(1)
        pairs = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(3)]
        batches = [dict(deep=[x], y=y) for x, y in pairs]
        dls = DataLoaders(loader(batches), split=deep_pair)
        return Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(4, 2), [BasicTrainCB(), callback])

    whole, item = (
        BatchTransformCB(deeply_written_in_place),
        BatchAugmentationCB({"deep": first_written_in_place}),
    )
    for loader, callback in [(list, whole), (list, item), (ReplayLoader, whole), (ReplayLoader, item)]:
        a, b = make(loader, callback), make(loader, callback)
        a.fit(3, lr=0.1, valid=False)
        script = b.to_script()
        assert "deepcopy" in str(script)
        run(script, b, 3, 0.1)
        assert torch.equal(a.model.weight, b.model.weight)


def pixels_written_in_place(batch):
    batch[0].pixels.mul_(1.1)
    return batch


def test_a_transform_that_may_write_to_what_is_not_copied_is_refused():
    batches = [(Picture(torch.randn(8, 4)), torch.randint(0, 2, (8,))) for _ in range(3)]
    callbacks = [BasicTrainCB(), BatchTransformCB(pixels_written_in_place)]
    dls = DataLoaders(batches, split=lambda batch: (batch[0].pixels, batch[1]))
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(4, 2), callbacks)
    with pytest.raises(ValueError, match="an object of class `Picture`, of which it gets no copy"):
        trainer.to_script()


def test_batches_of_validation_are_copied_if_its_loader_keeps_them():
    def make():
        set_seed(1)
        valid = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(2)]
        train = exact_loader(list(zip(torch.randn(16, 4), torch.arange(16) % 2)), 8)
        callbacks = [BasicTrainCB(), MetricsCB(show=False), BatchTransformCB(written_in_place_as_a_whole)]
        return Trainer(DataLoaders(train, valid), F.cross_entropy, optim.SGD, nn.Linear(4, 2), callbacks)

    a, b = make(), make()
    a.fit(3, lr=0.1)
    rows = run(b.to_script(), b, 3, 0.1)
    assert plain_rows(rows) == plain_rows(a.history.rows)


# What is swapped


def by_sign(trainer):
    with torch.no_grad():
        for p in trainer.model.parameters():
            p -= 0.1 * p.grad.sign()


class HalfStep:
    def step(self, trainer):
        for p in trainer.model.parameters():
            p.grad /= 2
        trainer.opt.step()


def fewer(trainer):
    for p in trainer.model.parameters():
        p.grad /= 3


def odd(trainer):
    return trainer.batch_num % 2


SWAPS = {
    "a step": ("step", by_sign),
    "a step by a method": ("BasicTrainCB.step", HalfStep()),
    "what is cleared": ("zero_grad", fewer),
    "a callback of one's own": ("NoiseCB.after_backward", fewer),
}


def swapped(*swap, **options):
    trainer = make_trainer([BasicTrainCB(), NoiseCB(), ClipGradCB(0.5), EMACB(0.9)])
    trainer.swap(*swap, **options)
    return trainer


@pytest.mark.parametrize("name", SWAPS)
def test_what_is_swapped_is_written(name, monkeypatch):
    both(lambda: swapped(*SWAPS[name]), monkeypatch)


def test_a_swap_that_cannot_be_written_is_refused():
    for swap in [("ClipGradCB.before_step", fewer), ("before_step", fewer), ("step", by_sign, odd)]:
        with pytest.raises(ValueError, match="`swap` has .*[Uu]ndo|`swap` has .*Name the method"):
            swapped(*swap).to_script()
        assert "`swap`" in str(swapped(*swap).to_script(partial=True).not_written)
    trainer = swapped("step", by_sign, odd)
    for change in trainer.plan.changes:
        change.undo()
    assert "sign" not in str(trainer.to_script())


# What is not what it seems


def scale(trainer, factor):
    for p in trainer.model.parameters():
        p.grad *= factor


class CachedCB:
    total = 0

    def before_fit(self, trainer):
        self.total = 5

    @functools.cached_property
    def k(self):
        return 1 / (1 + self.total)

    def after_backward(self, trainer):
        scale(trainer, self.k)


class DrawsLateCB:
    def __getattr__(self, name):
        if name != "k":
            raise AttributeError(name)
        self.k = torch.rand(()).item()
        return self.k

    def after_backward(self, trainer):
        scale(trainer, self.k)


class Drawn:
    "Draws numbers when it is made"

    def __init__(self):
        self.values = [random.random(), torch.rand(()).item()]


class HoldsDrawnCB:
    def __init__(self):
        self.drawn = Drawn()

    def after_backward(self, trainer):
        scale(trainer, self.drawn.values[0])


class Counted:
    "Counts what was asked of it"

    def __get__(self, callback, cls):
        callback.n += 1
        return callback.n


class CountedCB:
    k, n = Counted(), 0

    def after_backward(self, trainer):
        scale(trainer, self.k)


COMPUTED = {CachedCB, DrawsLateCB, CountedCB}


def drawn():
    return random.getstate(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("kind", [CachedCB, DrawsLateCB, CountedCB, HoldsDrawnCB])
def test_nothing_is_computed_and_nothing_drawn_while_a_script_is_written(kind, monkeypatch):
    trainer = make_trainer([BasicTrainCB(), kind()])
    held, before = dict(vars(trainer.callbacks[-1])), drawn()
    if kind in COMPUTED:
        with pytest.raises(ValueError, match="its `k` is computed .*Compute it in the method of an event"):
            trainer.to_script()
    trainer.to_script(partial=True)
    assert vars(trainer.callbacks[-1]) == held and drawn() == before
    if kind not in COMPUTED:
        both(lambda: make_trainer([BasicTrainCB(), kind()]), monkeypatch)


class DoubledCB:
    n = 0

    def __setattr__(self, name, value):
        super().__setattr__(name, 2 * value)

    def after_backward(self, trainer):
        self.n += 1
        scale(trainer, self.n)


class SetterCB:
    def __init__(self):
        self._k = 1

    @property
    def k(self):
        return self._k

    @k.setter
    def k(self, value):
        self._k = 2 * value

    def after_backward(self, trainer):
        self.k = self.k + 1
        scale(trainer, self.k)


@pytest.mark.parametrize(
    "kind, why", [(DoubledCB, "a `__setattr__` of its own"), (SetterCB, "sets `k`, a prop")]
)
def test_what_runs_something_when_it_is_set_is_refused(kind, why):
    with pytest.raises(ValueError, match=f"{why}.*Keep what is set in a plain attribute"):
        make_trainer([BasicTrainCB(), kind()]).to_script()
    assert make_trainer([BasicTrainCB(), kind()]).to_script(partial=True).not_written


class SlotsCB:
    __slots__ = ("n", "later")

    def __init__(self):
        self.n = 3

    def after_backward(self, trainer):
        self.later = self.n
        scale(trainer, self.later)


class HeldCB:
    "Has a function, a class and a number from its class"

    act, kind, k = torch.tanh, nn.Tanh, 2

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss + self.k * self.act(self.kind()(trainer.preds)).mean()


class OnTrainerCB:
    def before_batch(self, trainer):
        trainer.share = 1 / (1 + trainer.batch_num)

    def after_backward(self, trainer):
        scale(trainer, trainer.share)


class LaterCB(EMACB):
    "Sets what its class does not have, and that class knows old names"

    def after_backward(self, trainer):
        self.share = 0.5
        scale(trainer, self.share)


@pytest.mark.parametrize("kind", [SlotsCB, HeldCB, OnTrainerCB, LaterCB])
def test_attributes_that_are_only_held_are_written(kind, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), kind()]), monkeypatch)


class DiceCB:
    def __init__(self):
        self.dice = random.Random(3)
        self.dice.random()

    def after_backward(self, trainer):
        scale(trainer, self.dice.random())


class Holder:
    def __init__(self, seed=3):
        self.dice = random.Random(seed)


class HoldsDiceCB:
    def __init__(self):
        self.holder = Holder()
        self.holder.dice.random()

    def after_backward(self, trainer):
        scale(trainer, self.holder.dice.random())


class Asked:
    "Counts how often somebody asks for `k`, an argument of its own"

    def __init__(self, k=1):
        self.first, self.n = k, 0

    @property
    def k(self):
        self.n += 1
        return self.n


class AsksCB:
    def __init__(self):
        self.asked = Asked()

    def after_backward(self, trainer):
        scale(trainer, self.asked.k)


@pytest.mark.parametrize("kind", [DiceCB, HoldsDiceCB, AsksCB])
def test_objects_go_on_from_where_they_are(kind, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), kind()]), monkeypatch)


def test_an_object_of_a_callback_is_not_asked_for_what_it_computes():
    callback = AsksCB()
    make_trainer([BasicTrainCB(), callback]).to_script()
    assert callback.asked.n == 0


# What several hold


class CountCB:
    n = 0

    def before_batch(self, trainer):
        self.n += trainer.training

    def total(self):
        return self.n


class Box:
    def __init__(self, held):
        self.held = held

    @property
    def n(self):
        return self.held.n


class UsesCB:
    def __init__(self, other):
        self.other = other

    def after_backward(self, trainer):
        scale(trainer, 1 / self.other.n)


class CallsCB(UsesCB):
    def after_backward(self, trainer):
        scale(trainer, 1 / self.other())


class ReadsNamedCB:
    def after_backward(self, trainer):
        scale(trainer, 1 / trainer.CountCB.n)


HOLDING = {
    "a callback": UsesCB,
    "in a box": lambda count: UsesCB(Box(count)),
    "in a list": lambda count: UsesCB([{"count": count}]),
    "its method": lambda count: CallsCB(count.total),
    "a partial of its method": lambda count: CallsCB(functools.partial(count.total)),
}


@pytest.mark.parametrize("name", HOLDING)
def test_who_holds_a_callback_of_the_trainer_is_refused(name):
    count = CountCB()
    trainer = make_trainer([BasicTrainCB(), count, HOLDING[name](count)])
    with pytest.raises(
        ValueError, match="holds the callback `CountCB`. Ask .* attribute of `trainer.CountCB`"
    ):
        trainer.to_script()
    assert trainer.to_script(partial=True).not_written


def test_a_function_that_reads_a_callback_by_a_variable_is_refused():
    count = CountCB()

    def after_backward(trainer):
        scale(trainer, 1 / count.n)

    with pytest.raises(ValueError, match="holds the callback `CountCB`"):
        make_trainer([BasicTrainCB(), count, after_backward]).to_script()


def test_who_asks_the_trainer_for_a_callback_is_written(monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), CountCB(), ReadsNamedCB()]), monkeypatch)


class AliasCB:
    def __init__(self):
        self.counts = [1]
        self.held = {"counts": (self.counts,)}

    def after_backward(self, trainer):
        self.counts[0] += 1
        scale(trainer, 1 / self.held["counts"][0][0])


class TwiceCB:
    def __init__(self):
        self.rows = [[1]] * 2

    def after_backward(self, trainer):
        self.rows[0][0] += 1
        scale(trainer, 1 / self.rows[1][0])


LOG = []


def logged():
    return 1 + len(LOG)


class LogsCB:
    def __init__(self):
        LOG.clear()
        self.kept = LOG

    def after_backward(self, trainer):
        self.kept.append(1)
        scale(trainer, 1 / logged())


class HarderCB:
    "Changes the data of the loader"

    def __init__(self, rows):
        self.rows = rows

    def after_batch(self, trainer):
        if trainer.training:
            self.rows.shift += 1


class ShiftedRows:
    def __init__(self):
        self.shift = 0

    def __len__(self):
        return 26

    def __getitem__(self, i):
        x, y = Images(26)[i]
        return x + self.shift, y


class ReadsMetricCB:
    def __init__(self, metric):
        self.metric = metric

    def after_backward(self, trainer):
        scale(trainer, 1 / (1 + self.metric.num_total))


def metric_trainer():
    metric = MulticlassAccuracy()
    return make_trainer(
        [BasicTrainCB(), MetricsCB(accuracy=metric, train_metrics=True), ReadsMetricCB(metric)]
    )


def harder_trainer():
    rows = ShiftedRows()
    trainer = make_trainer([BasicTrainCB(), HarderCB(rows)])
    trainer.dls = DataLoaders(exact_loader(rows, 4), trainer.dls.valid)
    return trainer


class ApartLaterCB:
    "Two names for one list, until a fit begins"

    def __init__(self):
        self.first = [1]
        self.second = self.first

    def before_fit(self, trainer):
        self.first = [5]

    def after_backward(self, trainer):
        scale(trainer, 1 / (self.first[0] + self.second[0]))


SHARED = {
    "a list under two names": lambda: make_trainer([BasicTrainCB(), ApartLaterCB()]),
    "a list in a tuple": lambda: make_trainer([BasicTrainCB(), AliasCB()]),
    "a list that is there twice": lambda: make_trainer([BasicTrainCB(), TwiceCB()]),
    "a list of the module": lambda: make_trainer([BasicTrainCB(), LogsCB()]),
    "the data": harder_trainer,
    "a metric": metric_trainer,
}


@pytest.mark.parametrize("name", SHARED)
def test_what_several_hold_stays_one_thing(name, monkeypatch):
    both(SHARED[name], monkeypatch)


# Methods of a base class


class FactorsCB:
    n = k = 1

    def factor(self, trainer, k=1):
        self.n += 1
        return k / (self.n + trainer.batch_num)

    def set_factor(self, k=2):
        self.k = k

    @property
    def share(self):
        return 0.5


class InHelperCB(FactorsCB):
    def factor(self, trainer, k=1):
        return super().factor(trainer, k=k) + 1

    def after_backward(self, trainer):
        scale(trainer, self.factor(trainer, k=2))


class FurtherCB(InHelperCB):
    def factor(self, trainer, k=1):
        return super().factor(trainer, k) / 2


class ByNameCB(FactorsCB):
    def after_backward(self, trainer):
        scale(trainer, FactorsCB.factor(self, trainer) + super(ByNameCB, self).factor(trainer))


class SkipsCB(InHelperCB):
    def after_backward(self, trainer):
        scale(trainer, super(InHelperCB, self).factor(trainer))


class SetsCB(FactorsCB):
    def after_backward(self, trainer):
        super().set_factor(k=3)
        scale(trainer, self.k)


class AsksBaseCB(FactorsCB):
    @property
    def share(self):
        return super().share / 2

    def after_backward(self, trainer):
        scale(trainer, self.share)


@pytest.mark.parametrize("kind", [InHelperCB, FurtherCB, ByNameCB, SkipsCB, SetsCB])
def test_methods_of_a_base_class_are_written(kind, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), kind()]), monkeypatch)


def test_a_property_of_a_base_class_is_refused():
    with pytest.raises(ValueError, match="AsksBaseCB.*base class.*Write out what is meant"):
        make_trainer([BasicTrainCB(), AsksBaseCB()]).to_script()


# After a fit


class LooksBackCB:
    def after_backward(self, trainer):
        n = len(trainer.history["train_loss"]) if trainer.epoch else 1
        scale(trainer, 1 / (1 + n))


class CountsRowsCB:
    def after_backward(self, trainer):
        scale(trainer, 1 / (1 + len(trainer.history)))


class ReadsRowsCB:
    def before_epoch(self, trainer):
        self.n = len(trainer.history.rows)

    def after_backward(self, trainer):
        scale(trainer, 1 / (1 + self.n))


def fitted(kind):
    trainer = make_trainer([BasicTrainCB(), MetricsCB(), kind()])
    with redirect_stdout(io.StringIO()):
        trainer.fit(1, 0.01)
    return trainer


@pytest.mark.parametrize("kind", [LooksBackCB, CountsRowsCB, ReadsRowsCB])
def test_who_reads_the_history_of_an_earlier_fit_is_refused(kind, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), MetricsCB(), kind()]), monkeypatch)
    with pytest.raises(ValueError, match="rows of an earlier fit.*that has not been fitted"):
        fitted(kind).to_script()


class WritesCB:
    def after_epoch(self, trainer):
        trainer.history.write(seen=trainer.epoch)


def test_who_only_writes_to_the_history_is_written_after_a_fit_as_well():
    trainer = fitted(WritesCB)
    assert {"fit": 1, "epoch": 0, "seen": 0}.items() <= run(trainer.to_script(), trainer, 1, 0.01)[0].items()


class DiaryCB:
    def before_fit(self, trainer):
        self.lines = []

    def after_batch(self, trainer):
        self.lines.append(trainer.loss.detach())


class PassCB:
    def before_epoch(self, trainer):
        self.lines = []

    def after_batch(self, trainer):
        self.lines.append(trainer.loss.detach())


class LongDiaryCB:
    def __init__(self):
        self.lines = []

    def after_batch(self, trainer):
        self.lines.append(trainer.loss.detach())


@pytest.mark.parametrize("kind, needs", [(DiaryCB, []), (PassCB, []), (LongDiaryCB, ["lines"])])
def test_after_a_fit_only_what_the_script_reads_of_it_has_to_be_given(kind, needs):
    trainer = fitted(kind)
    script = trainer.to_script()
    assert list(script.needs) == needs and ("To be given" in str(script)) == bool(needs)
    assert ("lines = lines" in str(script)) == bool(needs)
    assert len(run(script, trainer, 2, 0.01)) == 2


# Variables around a function


def counting_callback():
    n = 0

    def after_backward(trainer):
        nonlocal n
        n += 1
        scale(trainer, 1 / n)

    return after_backward


def counter():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count


N_CALLS = 0


def counted():
    global N_CALLS
    N_CALLS += 1
    return N_CALLS


class CounterCB:
    def __init__(self):
        self.count = counter()

    def after_backward(self, trainer):
        scale(trainer, 1 / self.count())


class OfModuleCB:
    def after_backward(self, trainer):
        scale(trainer, 1 / counted())


class OfClassCB:
    n = 0

    def after_backward(self, trainer):
        OfClassCB.n += 1
        scale(trainer, 1 / self.n)


CHANGING = {
    "a callback": (counting_callback, "it changes `n`, a variable of the function around it. Keep it"),
    "a function that a callback holds": (CounterCB, "`count` changes `n`, a variable around it"),
    "a function of the module": (OfModuleCB, "`counted` changes `N_CALLS`, a variable around it"),
    "an attribute of the class": (
        OfClassCB,
        "sets an attribute of the class `OfClassCB`. Set that of `self`",
    ),
}


@pytest.mark.parametrize("name", CHANGING)
def test_who_changes_a_variable_of_others_is_refused(name):
    make, why = CHANGING[name]
    with pytest.raises(ValueError, match=why):
        make_trainer([BasicTrainCB(), make()]).to_script()
    assert make_trainer([BasicTrainCB(), make()]).to_script(partial=True).not_written


class CountsInsideCB:
    def after_backward(self, trainer):
        batch = 0

        def count():
            nonlocal batch
            batch += 1
            return batch

        count()
        scale(trainer, 1 / count())


def test_a_variable_of_the_method_itself_is_written(monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), CountsInsideCB()]), monkeypatch)


# Streams


class Stream(IterableDataset):
    def __init__(self, n=7):
        self.n = n

    def __iter__(self):
        yield from ((torch.ones(4, 8) * i / 7, torch.tensor([0, 1, 2, i % 3])) for i in range(self.n))


class UsedUp(Stream):
    "Goes on from where somebody stopped"

    def __init__(self):
        super().__init__(40)
        self.batches = super().__iter__()

    def __iter__(self):
        for _ in range(5):
            yield next(self.batches)


def stream_trainer(stream, *callbacks):
    set_seed(3)
    dls = DataLoaders(DataLoader(stream(), None), DataLoader(stream(), None))
    return Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(8, 3), [BasicTrainCB(), *callbacks])


@pytest.mark.parametrize("stream", [Stream, UsedUp])
@pytest.mark.parametrize("callbacks", [[], [PARTS["accumulation"], accuracy]], ids=["plain", "gathered"])
def test_a_stream_is_written_and_loses_no_batch(stream, callbacks, monkeypatch):
    both(lambda: stream_trainer(stream, *(make() for make in callbacks)), monkeypatch)


class Dicts:
    "Has only `__iter__`, and goes on where somebody stopped"

    def __init__(self):
        self.batches = iter(
            [dict(x=torch.ones(4, 8) * i, y=torch.tensor([0, 1, 2, i % 3])) for i in range(40)]
        )

    def __iter__(self):
        for _ in range(5):
            yield next(self.batches)


class Triples(Dicts):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch["x"], torch.randn(4, 8), batch["y"]


class TwoLinear(nn.Linear):
    def forward(self, x, noise):
        return super().forward(x + noise)


def test_a_stream_of_dicts_without_a_loader_is_written(monkeypatch):
    "It may have only `__iter__`"

    def make():
        set_seed(3)
        return Trainer(
            DataLoaders(Dicts(), Dicts()), F.cross_entropy, optim.SGD, nn.Linear(8, 3), [BasicTrainCB()]
        )

    script = both(make, monkeypatch)
    assert "xb, yb = batch['x'], batch['y']" in str(script)


def test_a_stream_with_two_inputs_is_written(monkeypatch):
    def make():
        set_seed(3)
        dls = DataLoaders(Triples(), Triples(), n_inp=2)
        return Trainer(dls, F.cross_entropy, optim.SGD, TwoLinear(8, 3), [BasicTrainCB(), accuracy()])

    both(make, monkeypatch)


class ReadsGlobal:
    def __iter__(self):
        return iterator


class ReadsClosure:
    def __init__(self, batches):
        self.batches = lambda: batches

    def __iter__(self):
        return self.batches()


class IsItsOwnCopy(Dicts):
    def __deepcopy__(self, memo):
        return self


iterator = iter([])


@pytest.mark.parametrize("kind", [ReadsGlobal, ReadsClosure, IsItsOwnCopy])
def test_looking_at_a_stream_takes_no_batch_from_where_copies_draw_too(kind, monkeypatch):
    batches = iter([(torch.ones(4, 8), torch.tensor([0, 1, 2, 0]))] * 3)
    monkeypatch.setitem(globals(), "iterator", batches)
    stream = kind(batches) if kind is ReadsClosure else kind()
    trainer = Trainer(DataLoaders(stream), F.cross_entropy, optim.SGD, nn.Linear(8, 3), [BasicTrainCB()])
    assert "for xb, *yb in train_dl" in str(trainer.to_script())
    assert len(list(stream)) == (5 if kind is IsItsOwnCopy else 3)
    if kind is IsItsOwnCopy:
        assert len(list(stream.batches)) == 35


# Callbacks of the library that others ask, and functions that are given to them


class SetsLimitCB:
    def before_fit(self, trainer):
        trainer.ClipGradCB.limit = 0.01


class GathersMoreCB:
    def before_epoch(self, trainer):
        trainer.AccumulationCB.n_batches = 1 + trainer.epoch


class LowersLimitCB(ClipGradCB):
    def before_fit(self, trainer):
        self.limit = 0.01


class AsksProgressCB:
    def after_backward(self, trainer):
        scale(trainer, 1 + len(trainer.ProgressCB._lines))


class AsksModelCB:
    def after_backward(self, trainer):
        scale(trainer, trainer.GradientStatsCB.share)


class OwnStatsCB(GradientStatsCB):
    name = "GradientStatsCB"

    def after_predict(self, trainer):
        self.share = 0.5


ASKING = {
    "a limit that is set": (lambda: [ClipGradCB(1.0), SetsLimitCB()], "uses `limit` of `ClipGradCB`"),
    "a limit of one's own": (lambda: [LowersLimitCB(1.0)], "uses `limit` of `ClipGradCB`"),
    "a number that is set": (lambda: [AccumulationCB(2), GathersMoreCB()], "sets `n_batches` of `Accumulat"),
    "lines of a report": (lambda: [ProgressCB("plain"), AsksProgressCB()], "uses `_lines` of `ProgressCB`"),
}


@pytest.mark.parametrize("name", ASKING)
def test_who_asks_a_callback_of_the_library_for_more_than_its_script_has_is_refused(name):
    make, why = ASKING[name]
    with pytest.raises(ValueError, match=why):
        make_trainer([BasicTrainCB(), *make()]).to_script()


def test_an_attribute_of_ones_own_on_a_callback_of_the_library_is_written(monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), OwnStatsCB(), AsksModelCB()]), monkeypatch)


def louder(seen, batch):
    seen.append(1)
    return batch[0] * (1 + len(seen) / 10), batch[1]


class Weighs:
    n = 0

    def __call__(self, batch):
        self.n += 1
        return self.n


class Louder(Weighs):
    def __call__(self, batch):
        self.n += 1
        return batch[0] * self.n, batch[1]


class LouderYetCB:
    def __init__(self, transform):
        self.transform = transform

    def after_batch(self, trainer):
        self.transform.n += 0.5


def with_louder():
    transform = Louder()
    return [BatchTransformCB(transform), LouderYetCB(transform)]


COUNTING = {
    "a partial with a list": lambda: [BatchTransformCB(functools.partial(louder, []))],
    "a weight": lambda: [AccumulationCB(2, weigh=Weighs())],
    "a transform of two": with_louder,
}


@pytest.mark.parametrize("name", COUNTING)
def test_functions_that_count_their_calls_are_called_as_often(name, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), *COUNTING[name]()]), monkeypatch)


def test_no_function_is_called_while_a_script_is_written():
    weigh = Weighs()
    make_trainer([BasicTrainCB(), AccumulationCB(2, weigh=weigh)]).to_script()
    assert weigh.n == 0


# What is added to in place


class InPlaceCB:
    def after_backward(self, trainer):
        for p in trainer.model.parameters():
            grad = p.grad
            grad *= 0.5


class FirstInPlaceCB:
    def after_backward(self, trainer):
        grad = next(trainer.model.parameters()).grad
        grad += 1


class ListInPlaceCB:
    def __init__(self):
        self.seen = [0]

    def after_backward(self, trainer):
        seen = self.seen
        seen += [1]
        scale(trainer, 1 / len(self.seen))


class ViewCB:
    def __init__(self):
        self.counts = torch.ones(3)
        self.first = self.counts[:1]

    def after_backward(self, trainer):
        self.counts += 1
        scale(trainer, 1 / self.first.item())


class TakesCB:
    "Takes numbers out of an iterator that it does not look at"

    def __init__(self):
        self.numbers = iter(range(1, 100))

    def after_backward(self, trainer):
        taken = list(self.numbers) if trainer.batch_num == 5 else []  # noqa: F841 - That is what is tested
        scale(trainer, 1 / next(self.numbers, 7))


@pytest.mark.parametrize("kind", [TakesCB, InPlaceCB, FirstInPlaceCB, ListInPlaceCB, ViewCB])
def test_what_is_added_to_in_place_stays_in_the_script(kind, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), kind()]), monkeypatch)


class TotalCB:
    def before_fit(self, trainer):
        self.total = 0.0

    def after_get_loss(self, trainer):
        self.total += 0.5


def test_a_number_that_nobody_reads_is_left_out():
    assert "total" not in str(make_trainer([BasicTrainCB(), TotalCB()]).to_script())


# Classes and functions of one's own


class Block(nn.Linear):
    pass


def is_block(module):
    return isinstance(module, Block)


class BlocksCB:
    def after_backward(self, trainer):
        for module in trainer.model.modules():
            if isinstance(module, Block):
                module.weight.grad *= 0.5


class BlocksToldCB:
    def after_backward(self, trainer):
        for module in trainer.model.modules():
            if is_block(module):
                module.weight.grad *= 0.5


class Kind(enum.Enum):
    HALF, WHOLE = 0.5, 1.0


class KindCB:
    def __init__(self):
        self.kind = Kind.HALF

    def after_backward(self, trainer):
        scale(trainer, 0.5 if self.kind is Kind.HALF else 1.0)


def counted_by_itself():
    counted_by_itself.n += 1
    return counted_by_itself.n


class CountsBySelfCB:
    def __init__(self):
        counted_by_itself.n = 0

    def after_backward(self, trainer):
        scale(trainer, 1 / counted_by_itself())


def blocks_trainer(kind):
    set_seed(2)
    dls = DataLoaders(exact_loader(Rows(20, augment=False), 8), exact_loader(Rows(9, augment=False), 4))
    return Trainer(dls, F.cross_entropy, optim.SGD, Block(8, 3), [BasicTrainCB(), kind()])


@pytest.mark.parametrize("kind", [BlocksCB, BlocksToldCB, KindCB, CountsBySelfCB])
def test_classes_and_functions_are_the_same_in_a_script(kind, monkeypatch):
    both(lambda: blocks_trainer(kind), monkeypatch)


class GrowsCB:
    def counted(self, seen=[]):  # noqa: B006 - That is what is tested
        seen.append(1)
        return len(seen)

    def after_backward(self, trainer):
        scale(trainer, 1 / self.counted())


def test_a_default_that_has_grown_is_refused():
    trainer = make_trainer([BasicTrainCB(), GrowsCB()])
    trainer.to_script()
    trainer.fit(1, 0.01)
    with pytest.raises(ValueError, match="has a default that has changed. Keep what changes as an attribute"):
        trainer.to_script()


def test_a_trainer_with_several_optimizers_is_told_that_its_loop_is_to_be_written_by_hand():
    trainer = make_trainer([BasicTrainCB()], opt_func=None)
    with pytest.raises(ValueError, match="has no `opt`, and as optimizers of its own: none"):
        trainer.to_script()
    trainer.opt_d = trainer.opt_g = optim.SGD(trainer.model.parameters(), 0.1)
    with pytest.raises(ValueError, match="of its own: `opt_d`, `opt_g`(.|\n)*by hand"):
        trainer.to_script()
    trainer.opt = trainer.opt_d
    with pytest.raises(ValueError, match="lambda params, lr: trainer.opt"):
        trainer.to_script()


# A batch that becomes another one


class OnHarderBatch:
    "Once more, on a shifted batch"

    def before_step(self, trainer):
        x, y = trainer.batch
        trainer.batch = x + 1, y
        trainer.run_callbacks("predict", "get_loss", "backward")


class HalvesTrainer(Trainer):
    "One half of a batch after the other"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.batch = x[:2], y[:2]
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")
        self.batch = x[2:], y[2:]
        self.run_callbacks("predict", "get_loss")


class PredictsInPlace:
    "Predicts itself in some batches"

    order = -1

    def before_predict(self, trainer):
        if trainer.batch_num % 2:
            trainer.preds = trainer.model(trainer.batch[0] * 2)
            raise CancelStepException


class CountsRows:
    "Takes the batch apart before others change it"

    def before_batch(self, trainer):
        self.n = len(trainer.split(trainer.batch)[0][0])


class ScalesByHelper:
    "Changes the batch in a function with arguments"

    def before_predict(self, trainer):
        self.put(trainer, 2.0)

    def put(self, trainer, factor):
        x, y = trainer.batch
        trainer.batch = x * factor, y


class ReadsAfterHelper:
    "Changes the batch by a method, and takes it apart then"

    def before_batch(self, trainer):
        self.shift(trainer)
        (x,), _ = trainer.split(trainer.batch)
        self.mean = x.mean()

    def shift(self, trainer):
        x, y = trainer.batch
        trainer.batch = x + 1, y

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * self.mean


class WarmsUpBatch:
    "Predicts beforehand in later epochs"

    def before_batch(self, trainer):
        if trainer.epoch > 0:
            trainer.run_callbacks("predict")
            self.known = trainer.preds.mean().detach() + len(trainer.batch)

    def after_get_loss(self, trainer):
        if trainer.epoch > 0:
            trainer.loss = trainer.loss * self.known


OTHER_BATCHES = {
    "steps run again": (OnHarderBatch,),
    "halves": (HalvesTrainer,),
    "a step left in some batches": (PredictsInPlace,),
    "a helper with arguments": (CountsRows, ScalesByHelper),
    "read after a helper": (ReadsAfterHelper,),
    "a step under a condition": (WarmsUpBatch,),
}


@pytest.mark.parametrize("name", OTHER_BATCHES)
def test_steps_find_the_parts_of_the_present_batch(name, monkeypatch):
    kinds = OTHER_BATCHES[name]
    cls = next((kind for kind in kinds if issubclass(kind, Trainer)), Trainer)
    both(
        lambda: make_trainer([BasicTrainCB(), *(kind() for kind in kinds if kind is not cls)], cls=cls),
        monkeypatch,
    )


def noisy_parts(batch):
    return batch[0] + torch.randn_like(batch[0]), batch[1]


def first_two_parts(batch):
    return batch[0], batch[1]


class HandsBatchOn:
    "May change the batch, as far as one can see"

    def before_predict(self, trainer):
        self.seen = [trainer.batch]


def split_trainer(split, *callbacks):
    trainer = make_trainer([BasicTrainCB(), *callbacks])
    trainer.dls.split = split
    return trainer


class NoisyTrainer(Trainer):
    "Its own `split` is asked for the inputs, and again for the targets"

    def split(self, batch):
        x, y = batch
        return (x + torch.randn_like(x),), (y,)


def test_a_split_of_a_subclass_is_called_as_often_as_by_the_trainer(monkeypatch):
    both(lambda: make_trainer([BasicTrainCB()], cls=NoisyTrainer), monkeypatch)


def test_a_function_that_takes_batches_apart_is_not_called_twice_for_one(monkeypatch):
    both(lambda: split_trainer(noisy_parts, CountsRows()), monkeypatch)
    both(lambda: split_trainer(noisy_parts, HandsBatchOn()), monkeypatch)
    both(lambda: split_trainer(first_two_parts, CountsRows(), HandsBatchOn()), monkeypatch)
    with pytest.raises(ValueError, match="`noisy_parts` takes the batches apart.*once for each batch"):
        split_trainer(noisy_parts, CountsRows(), HandsBatchOn()).to_script()


# What is made simpler, and what is not


class LaterWeight:
    "The value of an `and` is its last one"

    def after_get_loss(self, trainer):
        weight = trainer.epoch and 0.5
        both_values = trainer.training and trainer.epoch and True
        trainer.loss = trainer.loss * (1 + weight + both_values)


class SomeRows:
    "All rows, if there is no number"

    def __init__(self, n_rows=0):
        self.n_rows = n_rows

    def before_batch(self, trainer):
        x, y = trainer.batch
        n = self.n_rows or None
        trainer.batch = x[:n], y[:n]


@pytest.mark.parametrize("kind", [LaterWeight, SomeRows])
def test_the_value_of_and_and_or_stays(kind, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), kind()]), monkeypatch)


class FlipsSometimes:
    "One draw"

    def before_batch(self, trainer):
        if torch.rand(()) < 0.5:
            return
        x, y = trainer.batch
        trainer.batch = x.flip(1), y


class ShiftsSometimes:
    "Another draw"

    def before_batch(self, trainer):
        if torch.rand(()) < 0.5:
            return
        x, y = trainer.batch
        trainer.batch = x + 1, y


class SameNoise:
    "Two views with one and the same noise"

    def after_get_loss(self, trainer):
        x = trainer.batch[0]
        with torch.random.fork_rng():
            a = trainer.model(x + torch.randn_like(x))
        with torch.random.fork_rng():
            b = trainer.model(2 * x + torch.randn_like(x))
        trainer.loss = trainer.loss + F.mse_loss(a, b)


class ScalesOnce:
    "A helper that changes what is asked"

    def __init__(self):
        self.fresh = True

    def before_batch(self, trainer):
        if self.fresh:
            self.scale(trainer, 0.5)
        if self.fresh:
            self.scale(trainer, 0.5)

    def scale(self, trainer, factor):
        for p in trainer.model.parameters():
            p.data.mul_(factor)
        self.fresh = False


class UsesUp:
    "A list that is used up"

    def __init__(self):
        self.left = [0.5]

    def after_get_loss(self, trainer):
        if self.left:
            trainer.loss = trainer.loss * self.left.pop()
        if self.left:
            trainer.loss = trainer.loss * self.left[0]


@pytest.mark.parametrize(
    "kinds",
    [(FlipsSometimes, ShiftsSometimes), (SameNoise,), (ScalesOnce,), (UsesUp,)],
    ids=lambda kinds: kinds[0].__name__,
)
def test_what_is_asked_twice_is_asked_twice_in_the_script(kinds, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), *(kind() for kind in kinds)]), monkeypatch)


# Names that several have


def weighed(share):
    def after_backward(trainer):
        for p in trainer.model.parameters():
            p.grad.mul_(share)

    return after_backward


class Penalty:
    "A local variable with the name of a constant of others"

    def after_get_loss(self, trainer):
        share = min(1, 0.1 * (trainer.epoch + 1))
        trainer.loss = trainer.loss + share * trainer.preds.square().mean()


factor, lr = 3.0, 7.0


def scaled(x, factor=factor):
    return x * factor


def scaled_within(x):
    scales = [lambda y, i=i: y * i for i in (2.0, 3.0)]
    return scales[0](x) + scales[1](x)


class ScalesByDefault:
    "A function with a default called as its argument"

    def after_get_loss(self, trainer):
        trainer.loss = scaled(trainer.loss) + scaled_within(trainer.loss)


class ScalesByLambda:
    "A default called as an argument of the script"

    def __init__(self):
        self.f = lambda x, lr=lr: x * lr

    def after_get_loss(self, trainer):
        trainer.loss = self.f(trainer.loss)


SAME_NAMES = {
    "a constant and a local variable": lambda: [Penalty(), weighed(0.5)],
    "a default and its argument": lambda: [ScalesByDefault()],
    "a default and an argument of the script": lambda: [ScalesByLambda()],
}


@pytest.mark.parametrize("name", SAME_NAMES)
def test_names_of_several_stay_apart(name, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), *SAME_NAMES[name]()]), monkeypatch)


def by_default(trainer, factor=factor):
    trainer.loss = trainer.loss * factor


def test_a_default_called_as_a_variable_of_the_method_is_refused():
    by_default.__name__ = "after_get_loss"
    with pytest.raises(ValueError, match="the default `factor` is called as a variable of its"):
        make_trainer([BasicTrainCB(), by_default]).to_script()


# Ways out, and errors that are waited for


class MatchedPhases:
    "Leaves by `match`"

    def before_batch(self, trainer):
        match trainer.epoch % 2:
            case 0:
                return
            case 1:
                x, y = trainer.batch
                trainer.batch = 2 * x, y


class MatchedCancel:
    "Cancels in a `match`"

    def before_batch(self, trainer):
        match trainer.batch_num:
            case 1:
                raise CancelBatchException


@pytest.mark.parametrize("kind", [MatchedPhases, MatchedCancel])
def test_a_match_is_refused(kind):
    with pytest.raises(
        ValueError, match=f"`{kind.__name__}.before_batch` cannot be written.*it has a `match`"
    ):
        make_trainer([BasicTrainCB(), kind()]).to_script()


class TriesToRead:
    "A name in a `try` that nobody reads"

    def before_fit(self, trainer):
        self.known = {}

    def after_get_loss(self, trainer):
        try:
            first = self.known[trainer.batch_num]  # noqa: F841 - It may fail
            trainer.loss = trainer.loss * 3
        except KeyError:
            self.known[trainer.batch_num] = True


class TriesToReturn(TriesToRead):
    "A value that nobody takes"

    def after_get_loss(self, trainer):
        try:
            return self.known[trainer.batch_num]
        except KeyError:
            self.known[trainer.batch_num] = True
            trainer.loss = trainer.loss * 3


class TriesInHelper(TriesToRead):
    "The error comes from a function"

    def after_get_loss(self, trainer):
        try:
            self.look(trainer, 0)
            trainer.loss = trainer.loss * 3
        except KeyError:
            self.known[trainer.batch_num] = True

    def look(self, trainer, add):
        first = self.known[trainer.batch_num + add]  # noqa: F841 - It may fail


class SuppressesError(TriesToRead):
    "A context ends the error"

    def after_get_loss(self, trainer):
        with suppress(KeyError):
            first = self.known[trainer.batch_num]  # noqa: F841 - It may fail
            trainer.loss = trainer.loss * 3
        self.known[trainer.batch_num] = True


@pytest.mark.parametrize("kind", [TriesToRead, TriesToReturn, TriesInHelper, SuppressesError])
def test_what_may_fail_stays_where_an_error_is_waited_for(kind, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), kind()]), monkeypatch)


# Inner functions whose arguments are named like something of the loop


class InnerByKeyword:
    k = 0.5

    def before_backward(self, trainer):
        def scaled(x, k=1.0):
            return x * k

        trainer.loss = scaled(trainer.loss, k=2.0) * self.k


class InnerLambdaByKeyword:
    k = 0.5

    def before_backward(self, trainer):
        scaled = lambda x, *, k=1.0: x * k  # noqa: E731
        trainer.loss = scaled(trainer.loss, k=(lambda k: k + 1)(k=1.0)) * self.k


class InnerLossByKeyword:
    def before_backward(self, trainer):
        def halved(loss, by=2):
            return loss / by

        trainer.loss = halved(by=4, loss=trainer.loss) + halved(loss=trainer.loss)


class InnerInHelper:
    def before_backward(self, trainer):
        trainer.loss = self.scaled(trainer.loss, lr=3.0)

    def scaled(self, x, lr):
        def times(x, lr=1.0):
            return x * lr

        return times(x, lr=lr) + times(lr=2.0, x=x)


class InnerBesideTheirs:
    "The keyword of another function stays as it is"

    lr = label_smoothing = 0.1

    def before_backward(self, trainer):
        def smooth(preds, label_smoothing):
            return F.cross_entropy(preds, trainer.batch[1], label_smoothing=label_smoothing)

        trainer.loss = smooth(trainer.preds, label_smoothing=self.label_smoothing)


class InnerHandedOn:
    "Nobody calls it by keyword"

    k = 0.5

    def before_backward(self, trainer):
        by_two = lambda k: k * 2  # noqa: E731
        trainer.loss = sum(map(by_two, [trainer.loss, self.k * trainer.loss]))


INNER = [
    InnerByKeyword,
    InnerLambdaByKeyword,
    InnerLossByKeyword,
    InnerInHelper,
    InnerBesideTheirs,
    InnerHandedOn,
]


@pytest.mark.parametrize("kind", INNER)
def test_arguments_of_inner_functions_are_given_by_keyword(kind, monkeypatch):
    both(lambda: make_trainer([BasicTrainCB(), kind()]), monkeypatch)


class InnerInPartial(InnerByKeyword):
    def before_backward(self, trainer):
        def scaled(x, k=1.0):
            return x * k

        trainer.loss = functools.partial(scaled, k=2.0)(trainer.loss) * self.k


class InnerByAnotherName(InnerByKeyword):
    def before_backward(self, trainer):
        def scaled(x, k=1.0):
            return x * k

        other = scaled
        trainer.loss = other(trainer.loss, k=2.0) * self.k


class InnerByDict(InnerByKeyword):
    def before_backward(self, trainer):
        def scaled(x, k=1.0):
            return x * k

        trainer.loss = scaled(trainer.loss, **{"k": 2.0}) * self.k


class InnerOfTwo(InnerByKeyword):
    def before_backward(self, trainer):
        if trainer.batch_num % 2:

            def scaled(x, k=1.0):
                return x * k
        else:

            def scaled(x, **options):
                return x * options["k"]

        trainer.loss = scaled(trainer.loss, k=2.0) * self.k


@pytest.mark.parametrize("kind", [InnerInPartial, InnerByAnotherName, InnerByDict, InnerOfTwo])
def test_an_inner_function_that_nobody_knows_at_its_call_is_refused(kind):
    with pytest.raises(ValueError, match=f"`{kind.__name__}.before_backward` cannot .*give `k` by name"):
        make_trainer([BasicTrainCB(), kind()]).to_script()


# Loaders that are exchanged

set_seed(9)
harder_batches = [(torch.randn(4, 1, 8, 8), torch.randint(2, (4,))) for _ in range(3)]


class ExchangesInHelper:
    "Other batches from the second epoch on, and another rate"

    def log(self, trainer):
        if trainer.epoch == 0:
            self.walk_over(trainer, harder_batches)

    def walk_over(self, trainer, dl):
        trainer.dls.train = dl
        trainer.lr = trainer.lr / 2
        for group in trainer.opt.param_groups:
            group["lr"] = trainer.lr


class ExchangesTooLate:
    "The pass that begins goes on with the old one"

    def before_epoch(self, trainer):
        if trainer.epoch == 1:
            trainer.dls.train = harder_batches


def test_a_loader_is_exchanged_between_passes_or_not_at_all(monkeypatch):
    script = both(lambda: make_trainer([BasicTrainCB(), ExchangesInHelper()]), monkeypatch)
    assert "nonlocal lr, train_dl" in str(script)
    with pytest.raises(ValueError, match="it sets `trainer.dls.train` where a pass may be under way"):
        make_trainer([BasicTrainCB(), ExchangesTooLate()]).to_script()


# Weights of losses that are tensors


def tokens(batch):
    return (batch[1] != 1).sum()


def of_one_entry(batch):
    return (batch[1] != 1).float().sum(0, keepdim=True) / 3


def of_numpy(batch):
    return (batch[1] != 1).numpy().sum() / np.float32(3)


class Total:
    "Gives the same tensor each time, which it writes to"

    def __init__(self):
        self.n = torch.zeros(())

    def __call__(self, batch):
        self.n += batch[1].sum() / 3
        return self.n


def summed_loss(preds, targets):
    return F.cross_entropy(preds, targets, reduction="sum")


class RateOfLossCB:
    "Lets the rate follow the loss, which has to be a number of Python"

    def log(self, trainer):
        for group in trainer.opt.param_groups:
            group["lr"] = 0.01 * round(trainer.history.latest("train_loss"), 6)


@pytest.mark.parametrize("weigh", [lambda: tokens, lambda: of_one_entry, lambda: of_numpy, Total])
@pytest.mark.parametrize("loss_func", [F.cross_entropy, summed_loss])
def test_losses_weighed_by_tensors_are_the_same_numbers_in_the_script(weigh, loss_func, monkeypatch):
    def make():
        trainer = make_trainer([BasicTrainCB(), MetricsCB(weigh=weigh(), show=False), RateOfLossCB()])
        trainer.loss_func = loss_func
        return trainer

    both(make, monkeypatch)


def test_a_row_of_the_script_has_numbers_of_python_where_losses_are_weighed_by_tensors():
    trainer = make_trainer([BasicTrainCB(), MetricsCB(weigh=tokens, show=False)])
    rows = run(trainer.to_script(), trainer, 1, 0.02)
    assert {type(rows[-1][name]) for name in ("train_loss", "valid_loss")} == {float}
