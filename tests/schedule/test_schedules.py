"""Schedules (`schedule/schedulers.py`, `schedules.py`, `reductions.py` and `attributes.py`) checked against
loops written by hand with PyTorch's own schedulers, and against formulas.

The law: with a schedule callback the weights are those of the loop by hand with the same scheduler, bit for
bit. Curves are compared with formulas written down here from their papers, not with the code that makes
them.
"""

import copy
import inspect
import json
import math
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler as lrs

from guarded import run_guarded
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.schedule.annealing import piecewise
from isaac_loop.schedule.attribute_schedule import AttributeSchedulerCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.schedule.plateau import PlateauSchedulerCB, StepSchedulerCB
from isaac_loop.schedule.schedulers import BatchSchedulerCB, EpochSchedulerCB, SchedulerCB
from isaac_loop.schedule.schedules import OneCycleSchedulerCB, WarmupSchedulerCB, WSDSchedulerCB
from isaac_loop.stop.limits import LimitCB
from isaac_loop.train.freezing import discriminative_rates
from isaac_loop.train.training import BasicTrainCB, NBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import (
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    Order,
)
from isaac_loop.inspection.loop_tables import callback_table
from isaac_loop.schedule.scheduler_checks import check_rates
from isaac_loop.state.errors import UnsaveableState
from isaac_loop.state.store import CheckpointStore
from isaac_loop.loop.trainer import Trainer
from scheduled import (
    MOMENTUM,
    lr_of,
    make_batches,
    make_model,
    make_trainer,
    RecorderCBNamed,
    same,
    still_model,
    WriteCB,
)


@pytest.fixture(autouse=True)
def warnings_are_errors():
    "So nobody warns unasked, PyTorch about the order of steps least of all"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def rates(cb, n_epochs=2, lr=0.1, **kwargs):
    trainer = make_trainer(cb, **kwargs)
    trainer.fit(n_epochs, lr=lr, valid=False)
    return trainer.history.batches["lr"]


def train_by_hand(model, batches, opt, n_epochs, after_batch=None, after_epoch=None):
    for _ in range(n_epochs):
        for x, y in batches:
            F.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            if after_batch:
                after_batch.step()
        if after_epoch:
            after_epoch.step()


class AccumulateCB:
    "Steps only after every `n`-th batch"

    order = Order.FIRST

    def __init__(self, n):
        self.n = n

    def before_fit(self, trainer):
        trainer.updates_per_epoch //= self.n

    def before_step(self, trainer):
        if (trainer.batch_num + 1) % self.n:
            raise CancelStepException("gathering")

    before_zero_grad = before_step


# The law

PER_BATCH = {
    "ExponentialLR": lambda opt, n: lrs.ExponentialLR(opt, 0.9),
    "CosineAnnealingLR": lambda opt, n: lrs.CosineAnnealingLR(opt, n),
    "CosineAnnealingWarmRestarts": lambda opt, n: lrs.CosineAnnealingWarmRestarts(opt, 3, 2),
    "OneCycleLR": lambda opt, n: lrs.OneCycleLR(opt, 0.1, n),
    "LambdaLR": lambda opt, n: lrs.LambdaLR(opt, lambda i: 1 / (1 + i)),
    "CyclicLR": lambda opt, n: lrs.CyclicLR(opt, 0.01, 0.1, step_size_up=4),
    "SequentialLR": lambda opt, n: lrs.SequentialLR(
        opt, [lrs.LinearLR(opt, 0.1, total_iters=4), lrs.CosineAnnealingLR(opt, n - 4)], [4]
    ),
    "ChainedScheduler": lambda opt, n: lrs.ChainedScheduler(
        [lrs.LinearLR(opt, 0.1, total_iters=4), lrs.ExponentialLR(opt, 0.9)]
    ),
    "PolynomialLR": lambda opt, n: lrs.PolynomialLR(opt, n, 2),
}


@pytest.mark.shows("ISA-76", "AIT-46", "AIT-49", "F041")
@pytest.mark.parametrize("opt_func", [MOMENTUM, optim.AdamW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("make", PER_BATCH.values(), ids=PER_BATCH)
def test_weights_are_those_of_the_loop_by_hand_with_the_same_scheduler(make, opt_func):
    "Stepped after every update"
    ours = still_model()
    theirs = copy.deepcopy(ours)
    make_trainer(
        BatchSchedulerCB(lambda opt, trainer: make(opt, trainer.total_updates)), model=ours, opt_func=opt_func
    ).fit(3, lr=0.1, valid=False)
    opt = opt_func(theirs.parameters(), 0.1)
    train_by_hand(theirs, make_batches(), opt, 3, after_batch=make(opt, 15))
    assert same(ours, theirs)


PER_EPOCH = {
    "StepLR": lambda opt: lrs.StepLR(opt, 2, 0.5),
    "MultiStepLR": lambda opt: lrs.MultiStepLR(opt, [1, 3], 0.5),
    "ExponentialLR": lambda opt: lrs.ExponentialLR(opt, 0.5),
    "CosineAnnealingLR": lambda opt: lrs.CosineAnnealingLR(opt, 4),
    "MultiplicativeLR": lambda opt: lrs.MultiplicativeLR(opt, lambda i: 0.9),
}


@pytest.mark.shows("ISA-76", "AIT-46", "AIT-50")
@pytest.mark.parametrize("make", PER_EPOCH.values(), ids=PER_EPOCH)
def test_weights_are_those_of_the_loop_by_hand_stepped_after_each_epoch(make):
    ours = still_model()
    theirs = copy.deepcopy(ours)
    make_trainer(EpochSchedulerCB(make), model=ours).fit(4, lr=0.1, valid=False)
    opt = MOMENTUM(theirs.parameters(), 0.1)
    train_by_hand(theirs, make_batches(), opt, 4, after_epoch=make(opt))
    assert same(ours, theirs)


@pytest.mark.shows("SON-12", "SON-13", "AIT-50")
@pytest.mark.parametrize(
    "cb, by_hand",
    [
        (lambda: StepSchedulerCB(2, 0.5), lambda opt: lrs.StepLR(opt, 2, 0.5)),
        (lambda: StepSchedulerCB([3, 1], 0.5), lambda opt: lrs.MultiStepLR(opt, [1, 3], 0.5)),
    ],
    ids=["every", "listed"],
)
def test_reductions_train_like_those_of_torch(cb, by_hand):
    ours = still_model()
    theirs = copy.deepcopy(ours)
    make_trainer(cb(), model=ours).fit(5, lr=0.1, valid=False)
    opt = MOMENTUM(theirs.parameters(), 0.1)
    train_by_hand(theirs, make_batches(), opt, 5, after_epoch=by_hand(opt))
    assert same(ours, theirs)


# How many steps


@pytest.mark.shows("PTA-47", "ISA-76")
@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 7),
    n_epochs=st.integers(1, 4),
    n_gather=st.integers(1, 3),
    limit=st.one_of(st.none(), st.integers(1, 9)),
)
def test_a_cosine_ends_with_the_run_whatever_makes_up_its_length(n, n_epochs, n_gather, limit):
    "Epochs, batches, accumulation and limits; updates alone move the schedule"
    cb = BatchSchedulerCB(lambda opt, trainer: lrs.CosineAnnealingLR(opt, max(trainer.total_updates, 1)))
    callbacks = [cb] + ([NBatchCB(limit)] if limit else []) + [AccumulateCB(n_gather)]
    trainer = make_trainer(*callbacks, n=n)
    trainer.fit(n_epochs, lr=1.0, valid=False)
    total = n_epochs * (min(n, limit or n) // n_gather)
    assert trainer.n_updates == total
    assert (cb.scheduler is None) == (total == 0)
    if total:
        assert cb.scheduler.last_epoch == total and trainer.opt.param_groups[0]["lr"] == pytest.approx(
            0, abs=1e-7
        )


@pytest.mark.shows("ISA-77")
@pytest.mark.parametrize(
    "n, limit, n_gather, total", [(5, None, 1, 10), (5, 3, 1, 6), (6, None, 2, 6), (6, 4, 2, 4)]
)
def test_one_cycle_counts_updates(n, limit, n_gather, total):
    "Total steps = epochs x training batches, in updates"
    cb = OneCycleSchedulerCB()
    trainer = make_trainer(*([NBatchCB(limit)] if limit else []), AccumulateCB(n_gather), cb, n=n)
    trainer.fit(2, lr=0.5, valid=False)
    assert cb.scheduler.total_steps == total == trainer.n_updates
    assert trainer.opt.param_groups[0]["lr"] == pytest.approx(0.5 / 25 / 1e4), (
        "it arrives at its end with the run"
    )


@pytest.mark.shows("ISA-76")
def test_epochs_cut_short_and_of_unequal_length_are_epochs():
    class Unequal:
        def __init__(self):
            self.n = 0

        def __iter__(self):
            self.n += 1
            return iter(make_batches(self.n))

    cb = EpochSchedulerCB(partial(lrs.ExponentialLR, gamma=0.5))
    assert rates(cb, 3, batches=Unequal()) == [0.1, *[0.05] * 2, *[0.025] * 3]
    trainer = make_trainer(cb, NBatchCB(2))
    trainer.fit(3, lr=0.1, valid=False)
    assert trainer.history.batches["lr"] == [0.1] * 2 + [0.05] * 2 + [0.025] * 2


@pytest.mark.shows("ISA-76")
@pytest.mark.parametrize(
    "exception, n_steps, n_epochs_stepped",
    [(CancelBatchException, 4 * 3, 3), (CancelEpochException, 2 * 3, 3), (CancelFitException, 2, 0)],
)
def test_what_is_cancelled_does_not_move_the_schedule(exception, n_steps, n_epochs_stepped):
    "In the third batch before its step; the fit is left at once, so no epoch was completed"

    class CancelCB:
        def before_step(self, trainer):
            if trainer.batch_num == 2:
                raise exception("enough")

    batch, epoch = (
        BatchSchedulerCB(partial(lrs.ExponentialLR, gamma=0.9)),
        EpochSchedulerCB(partial(lrs.ExponentialLR, gamma=0.5)),
    )
    trainer = make_trainer(batch, epoch, CancelCB())
    trainer.fit(3, lr=0.1, valid=False)
    assert (batch.scheduler.last_epoch, epoch.scheduler.last_epoch) == (
        n_steps,
        n_epochs_stepped,
    ) and trainer.n_updates == n_steps
    assert "initial_lr" not in trainer.opt.param_groups[0]


@pytest.mark.shows("ISA-76")
def test_after_a_stop_in_good_order_the_epoch_counts():
    class StopCB:
        def after_batch(self, trainer):
            trainer.request_stop("enough")

    cb = EpochSchedulerCB(partial(lrs.ExponentialLR, gamma=0.5))
    make_trainer(cb, StopCB()).fit(3, valid=False)
    assert cb.scheduler.last_epoch == 1


ALL = {
    "batch": lambda: BatchSchedulerCB(partial(lrs.ExponentialLR, gamma=0.9)),
    "epoch": lambda: EpochSchedulerCB(partial(lrs.ExponentialLR, gamma=0.9)),
    "one cycle": lambda: OneCycleSchedulerCB(),
    "warm-up": lambda: WarmupSchedulerCB(),
    "wsd": lambda: WSDSchedulerCB(),
    "steps": lambda: StepSchedulerCB(1),
    "plateau": lambda: PlateauSchedulerCB("train_loss", patience=0),
    "attribute": lambda: AttributeSchedulerCB(
        {"opt.momentum": lambda p: 0.5 + p / 4, "model.*.p": lambda p: p / 2}
    ),
}


@pytest.mark.shows("ISA-76")
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_a_fit_without_training_needs_no_schedule(make):
    "`train=False` and `fit(0)`, also before there is any optimizer"
    trainer = make_trainer(make(), MetricsCB(show=False), valid=make_batches(2))
    trainer.fit(1, train=False)
    trainer.fit(0)
    assert trainer.n_updates == 0
    trainer.fit(1)
    trainer.fit(1, train=False)
    assert trainer.history.fit == 3


@pytest.mark.shows("ISA-76", "ISA-77")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_a_second_fit_schedules_anew(make, keep):
    "Twice the epochs, twice the rate, and the notes that torch leaves in a kept optimizer"
    trainer = make_trainer(make(), MetricsCB(show=False))
    trainer.fit(2, lr=0.1, valid=False)
    n = len(trainer.history.batches)
    trainer.fit(4, lr=0.2, valid=False, keep_opt=keep)
    again = make_trainer(make(), MetricsCB(show=False))
    again.fit(4, lr=0.2, valid=False)
    ours, fresh = trainer.history.batches["lr"][n:], again.history.batches["lr"]
    if "Plateau" not in repr(trainer):
        assert ours == fresh
    assert ours[0] == fresh[0] and len(ours) == 20
    assert trainer.opt.param_groups[0]["momentum"] == 0.9


@pytest.mark.shows("ISA-76", "NEMO-55")
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_the_optimizer_is_left_without_notes_and_an_own_one_with_its_rate(make):
    "However the fit ends"

    class FailCB:
        order = Order.LAST

        def __init__(self, error):
            self.error = error

        def after_batch(self, trainer):
            if trainer.epoch == 1 and trainer.batch_num == 2:
                raise self.error("now")

    for error in (CancelFitException, RuntimeError, KeyboardInterrupt):
        trainer = make_trainer(make(), MetricsCB(show=False), FailCB(error), opt_func=None)
        trainer.opt = MOMENTUM(trainer.model.parameters(), 0.1)
        before = copy.deepcopy({k: v for k, v in trainer.opt.param_groups[0].items() if k != "params"})
        if error is CancelFitException:
            trainer.fit(3, lr=0.1, valid=False)
        else:
            with pytest.raises(error):
                trainer.fit(3, lr=0.1, valid=False)
        assert {k: v for k, v in trainer.opt.param_groups[0].items() if k != "params"} == before
        assert "step" not in vars(trainer.opt) and trainer.model[1].p == 0.1


def test_the_rate_stays_where_it_ended_as_by_hand():
    trainer = make_trainer(BatchSchedulerCB(partial(lrs.ExponentialLR, gamma=0.5)), n=3)
    trainer.fit(1, lr=0.8, valid=False)
    assert trainer.opt.param_groups[0]["lr"] == 0.1


@pytest.mark.shows("F046")
def test_nobody_waits_for_the_device():
    "Inside a batch no schedule turns a tensor into a number"
    for everything in (False, True):
        assert (
            run_guarded(
                [
                    BasicTrainCB(),
                    RecorderCB(loss=lambda t: t.loss),
                    OneCycleSchedulerCB(cycle_momentum=False),
                    AttributeSchedulerCB({"opt.weight_decay": lambda p: p}),
                ],
                everything,
            ).n_updates
            == 8
        )
        run_guarded([BasicTrainCB(), WarmupSchedulerCB()], everything)
        run_guarded([BasicTrainCB(), WSDSchedulerCB()], everything)
        run_guarded([BasicTrainCB(), StepSchedulerCB(1, min_lr=1e-9)], everything)


def test_a_rate_that_is_a_tensor_is_scheduled_in_place():
    def opt_func(params, lr):
        return optim.Adam(params, lr=torch.tensor(lr), capturable=False, foreach=False)

    trainer = make_trainer(WarmupSchedulerCB(warmup=4), opt_func=opt_func)
    trainer.fit(2, lr=0.1, valid=False)
    assert torch.is_tensor(trainer.opt.param_groups[0]["lr"])
    assert trainer.history.batches["lr"] == pytest.approx(rates(WarmupSchedulerCB(warmup=4)))


@pytest.mark.shows("AIT-46", "ISA-77")
def test_two_groups_and_two_optimizers_each_follow_their_own_rate():
    "An optimizer is named; tops in proportion"

    def two_groups(params, lr):
        params = list(params)
        return MOMENTUM([dict(params=params[:2], lr=lr / 10), dict(params=params[2:])], lr)

    for cb in (
        WarmupSchedulerCB(warmup=2),
        OneCycleSchedulerCB(),
        StepSchedulerCB(1),
        BatchSchedulerCB(partial(lrs.ExponentialLR, gamma=0.9)),
    ):
        trainer = make_trainer(cb, RecorderCBNamed(body=lr_of(0), head=lr_of(1)), opt_func=two_groups)
        trainer.fit(2, lr=0.1, valid=False)
        body, head = (trainer.history.batches[o] for o in ("body", "head"))
        assert [10 * o for o in body] == pytest.approx(head) and len(set(head)) > 1
    seen = RecorderCBNamed(other=lambda t: t.other.param_groups[0]["lr"])
    for cb, expected in (
        (EpochSchedulerCB(partial(lrs.ExponentialLR, gamma=0.5), opt="other"), [1.0] * 5 + [0.5] * 5),
        (OneCycleSchedulerCB(pct_start=0.5, opt="other"), None),
    ):
        trainer = make_trainer(cb, seen)
        trainer.other = optim.SGD([torch.zeros(1)], 1.0)
        trainer.fit(2, lr=0.1, valid=False)
        found = trainer.history.batches["other"]
        assert found == expected if expected else max(found) == 1
        assert set(trainer.history.batches["lr"]) == {0.1}
        assert trainer.other.param_groups[0]["lr"] == 1, "no fit would set it anew"


@pytest.mark.shows("ISA-77")
def test_an_own_optimizer_gets_the_top_from_fit():
    "The highest group at `lr`, the others in proportion"
    trainer = make_trainer(
        OneCycleSchedulerCB(pct_start=0.5), RecorderCBNamed(a=lr_of(0), b=lr_of(1)), opt_func=None
    )
    params = list(trainer.model.parameters())
    trainer.opt = MOMENTUM([dict(params=params[:2], lr=0.01), dict(params=params[2:], lr=0.04)], 0.04)
    trainer.fit(2, lr=0.8, valid=False)
    assert (max(trainer.history.batches["a"]), max(trainer.history.batches["b"])) == pytest.approx((0.2, 0.8))


# One cycle


@pytest.mark.shows("ISA-77")
def test_one_cycle_shows_and_passes_on_the_arguments_of_torch():
    shown = set(inspect.signature(OneCycleSchedulerCB).parameters)
    torchs = set(inspect.signature(lrs.OneCycleLR).parameters)
    assert shown == torchs - {
        "optimizer",
        "max_lr",
        "total_steps",
        "epochs",
        "steps_per_epoch",
        "last_epoch",
    } | {"opt"}
    options = dict(
        pct_start=0.4,
        anneal_strategy="linear",
        div_factor=10.0,
        final_div_factor=100.0,
        base_momentum=0.8,
        max_momentum=0.9,
        three_phase=True,
    )
    opt = MOMENTUM([torch.zeros(1)], 0.1)
    scheduler, theirs = lrs.OneCycleLR(opt, 0.1, total_steps=10, **options), []
    for _ in range(10):
        theirs.append(opt.param_groups[0]["lr"])
        opt.step()
        scheduler.step()
    assert rates(OneCycleSchedulerCB(**options)) == theirs


@pytest.mark.shows("ISA-77", "SON-15")
@pytest.mark.parametrize("cls", [OneCycleSchedulerCB, PlateauSchedulerCB])
def test_a_misspelt_or_impossible_option_is_refused_where_it_is_typed(cls):
    wrong = {OneCycleSchedulerCB: ("div_facter", "div_factor"), PlateauSchedulerCB: ("patiance", "patience")}[
        cls
    ]
    with pytest.raises(TypeError, match=f"`{wrong[0]}`.*Did you mean `{wrong[1]}`"):
        cls(**{wrong[0]: 3})
    with pytest.raises(ValueError):
        cls(**({"pct_start": 2.0} if cls is OneCycleSchedulerCB else {"factor": 1.0}))
    with pytest.raises(TypeError, match="`total_steps`"):
        OneCycleSchedulerCB(total_steps=10)


class MyCycle(OneCycleSchedulerCB):
    def __init__(self, rise=0.2):
        super().__init__(pct_start=rise)


class MyPlateau(PlateauSchedulerCB):
    def __init__(self):
        super().__init__(monitor="train_loss", patience=1)


class WithMore(OneCycleSchedulerCB):
    def __init__(self, **options):
        super().__init__(pct_start=0.2, **options)


@pytest.mark.shows("ISA-77")
@pytest.mark.parametrize("make", [MyCycle, MyPlateau, lambda: WithMore(div_factor=10.0)])
def test_a_subclass_may_have_arguments_of_its_own(make):
    callback = make()
    make_trainer(callback, MetricsCB(show=False)).fit(1, valid=False)
    assert callback.options.get("pct_start") == 0.2 or callback.options["patience"] == 1
    with pytest.raises(TypeError, match="`OneCycleSchedulerCB` got the keyword `div_facter`.*`div_factor`"):
        WithMore(div_facter=10.0)


@pytest.mark.shows("ISA-77")
def test_the_share_of_a_cycle_in_which_the_rate_rises_may_be_any_number_from_0_to_1():
    for rise, share in [(np.float32(0.5), 0.5), (torch.tensor(0.25), 0.25), (1, 1.0), (0, 0.0)]:
        assert rates(OneCycleSchedulerCB(pct_start=rise)) == rates(OneCycleSchedulerCB(pct_start=share))
    for wrong in (1.5, -0.1, 30, "0.3", None, True, float("nan")):
        with pytest.raises(ValueError, match=f"`pct_start` is {wrong!r}, but it is the share of the run"):
            OneCycleSchedulerCB(pct_start=wrong)


@pytest.mark.shows("ISA-77", "F041")
def test_one_cycle_says_what_to_do_without_momentum():
    trainer = make_trainer(OneCycleSchedulerCB(), opt_func=optim.Adagrad)
    with pytest.raises(ValueError) as caught:
        trainer.fit(1, valid=False)
    assert any("cycle_momentum=False" in o for o in caught.value.__notes__)
    assert "initial_lr" not in trainer.opt.param_groups[0]
    make_trainer(OneCycleSchedulerCB(cycle_momentum=False), opt_func=optim.Adagrad).fit(1, valid=False)


@pytest.mark.shows("ISA-77", "F041")
@pytest.mark.parametrize(
    "n, share, three",
    [(1, 0.3, False), (2, 0.5, False), (4, 0.25, False), (4, 0.25, True), (5, 1.0, False), (5, 0.0, False)]
    + [(10, 0.1, False), (10, 0.1, True), (1, 1.0, False), (1, 1.0, True)],
)
def test_one_cycle_manages_runs_on_which_torch_divides_by_zero(n, share, three):
    found = rates(OneCycleSchedulerCB(pct_start=share, three_phase=three), n_epochs=1, n=n)
    assert len(found) == n and all(0 < o <= 0.1 + 1e-9 for o in found)


@pytest.mark.shows("ISA-77")
def test_the_arguments_come_up_on_completion():
    completer = pytest.importorskip("jedi").Interpreter(
        "OneCycleSchedulerCB(pct_", [{"OneCycleSchedulerCB": OneCycleSchedulerCB}]
    )
    assert "pct_start=" in [o.name for o in completer.complete()]


def test_a_summary_shows_what_a_schedule_does():
    table = str(callback_table(make_trainer(OneCycleSchedulerCB(), PlateauSchedulerCB("train_loss"))))
    assert (
        "Step the schedule, as the optimizer has made an update" in table
        and "Tell the schedule the newest value" in table
    )


def test_a_stream_needs_a_length():
    class Stream:
        def __iter__(self):
            return iter(make_batches(3))

    for cb in (
        OneCycleSchedulerCB(),
        WarmupSchedulerCB(),
        AttributeSchedulerCB({"opt.momentum": lambda p: p}),
    ):
        with pytest.raises(ValueError, match="has no `len`"):
            make_trainer(cb, batches=Stream()).fit(1, valid=False)
        trainer = make_trainer(cb, NBatchCB(2), batches=Stream())
        trainer.fit(1, valid=False)
        assert trainer.n_updates == 2
    assert rates(BatchSchedulerCB(partial(lrs.ExponentialLR, gamma=0.5)), 1, batches=Stream()) == [
        0.1,
        0.05,
        0.025,
    ]
    assert rates(AttributeSchedulerCB({"opt.lr": lambda n: n / 10}, unit="update"), 1, batches=Stream()) == [
        0,
        0.1,
        0.2,
    ]


# The family of warm-ups, against formulas


def curve(cb, total):
    return [cb.factor(i, total) for i in range(total)]


def up(i, n):
    return (i + 1) / (n + 1)


FORMULAS = {
    "constant": lambda t: 1,
    "linear": lambda t: 1 - t,
    "cosine": lambda t: math.cos(math.pi / 2 * t) ** 2,
    "square": lambda t: (1 - t) ** 2,
    "square root": lambda t: math.sqrt(1 - t),
    "sqrt": lambda t: 1 - t**0.5,
}
OPTIONS = {"square": dict(decay="polynomial", power=2), "square root": dict(decay="polynomial", power=0.5)}


@pytest.mark.shows("NEMO-62", "F043", "PTA-48")
@pytest.mark.parametrize("end", [0, 0.1])
@pytest.mark.parametrize("name", FORMULAS)
def test_warm_up_hold_decay_and_cool_down_follow_their_formulas(name, end):
    cb = WarmupSchedulerCB(
        **OPTIONS.get(name, dict(decay=name)), warmup=10, hold=0.05, cooldown=0.1, end_factor=end
    )
    expected = [up(i, 10) for i in range(10)] + [1] * 5
    expected += [end + (1 - end) * FORMULAS[name](j / 75) for j in range(75)] + [
        end + (1 - end) * FORMULAS[name](1)
    ] * 10
    assert curve(cb, 100) == pytest.approx(expected, abs=1e-12)


@pytest.mark.shows("F043")
def test_what_is_trained_with_is_the_curve_times_the_rate():
    cb = WarmupSchedulerCB("linear", warmup=0.2)
    assert rates(cb, 2, lr=0.3) == pytest.approx([0.3 * o for o in curve(cb, 10)])


@pytest.mark.shows("AIT-51", "NEMO-62")
def test_policies_of_other_libraries_are_members_of_the_family():
    "The four of Hugging Face, which begin at zero; NeMo's, which begin at the first step up"
    W, T = 10, 50
    for i in range(T):
        t = (i - W) / (T - W)
        huggingface = {
            ("constant", 1): 1,
            ("linear", 1): (T - i) / (T - W),
            ("cosine", 1): 0.5 * (1 + math.cos(math.pi * t)),
            ("cosine", 4): 0.5 * (1 + math.cos(math.pi * ((4 * t) % 1))),
        }
        for (decay, cycles), value in huggingface.items():
            cb = WarmupSchedulerCB(decay, warmup=W, start_factor=0.0, cycles=cycles)
            assert cb.factor(i, T) == pytest.approx(i / W if i < W else value, abs=1e-12)
        cb = WarmupSchedulerCB("inverse_sqrt", warmup=W)
        assert cb.factor(i, T) == pytest.approx((i + 1) / (W + 1) if i < W else math.sqrt(W / i))
        assert WarmupSchedulerCB("inverse_sqrt", warmup=0, timescale=100).factor(i, T) == pytest.approx(
            1 / math.sqrt((i + 100) / 100)
        )


@pytest.mark.shows("F043", "F042")
def test_the_curves_are_those_of_torch_where_it_has_them():
    "LinearLR, CosineAnnealingLR, PolynomialLR, CosineAnnealingWarmRestarts"

    def torchs(make, n):
        opt = optim.SGD([torch.zeros(1)], 1.0)
        scheduler, found = make(opt), []
        for _ in range(n):
            found.append(opt.param_groups[0]["lr"])
            opt.step()
            scheduler.step()
        return found

    assert curve(WarmupSchedulerCB(warmup=0), 40) == pytest.approx(
        torchs(lambda o: lrs.CosineAnnealingLR(o, 40), 40), abs=1e-9
    )
    assert curve(WarmupSchedulerCB("polynomial", warmup=0, power=3), 40) == pytest.approx(
        torchs(lambda o: lrs.PolynomialLR(o, 40, 3), 40), abs=1e-9
    )
    assert curve(WarmupSchedulerCB("constant", warmup=9), 40) == pytest.approx(
        torchs(lambda o: lrs.LinearLR(o, 0.1, total_iters=9), 40)
    )
    restarts = torchs(lambda o: lrs.CosineAnnealingWarmRestarts(o, 10, 2), 70)
    assert curve(WarmupSchedulerCB(warmup=0, cycles=3, cycle_mult=2), 70) == pytest.approx(restarts, abs=1e-9)


@pytest.mark.shows("PTA-48")
def test_k_decay_is_that_of_its_paper():
    assert curve(WarmupSchedulerCB(warmup=0, k=2.5, end_factor=0.1), 30) == pytest.approx(
        [0.1 + 0.9 / 2 * (1 + math.cos(math.pi * i**2.5 / 30**2.5)) for i in range(30)]
    )


@pytest.mark.shows("F044", "PTA-48")
def test_several_decays_end_in_geometric_spacing():
    "At 100, 200 and 400, each over the last fifth of the way to it"
    found = curve(WSDSchedulerCB(warmup=20, n_decays=3, end_factor=0.1), 400)
    for i, value in enumerate(found):
        end = next(o for o in (100, 200, 400) if i < o)
        left = (end - i) / (end / 5)
        expected = up(i, 20) if i < 20 else 1 if left >= 1 else 0.1 + 0.9 * left
        assert value == pytest.approx(expected), i
    assert curve(WSDSchedulerCB(warmup=0.1, decay_length=0.3, decay="sqrt"), 50) == pytest.approx(
        curve(WarmupSchedulerCB("sqrt", warmup=0.1, hold=0.6), 50)
    )
    assert curve(WSDSchedulerCB(warmup=0, decay_length=10, n_decays=2, spacing=5), 50)[
        9::40
    ] == pytest.approx([0.1, 0.1])


@settings(max_examples=60, deadline=None)
@given(
    decay=st.sampled_from(["constant", "linear", "cosine", "polynomial", "sqrt", "inverse_sqrt"]),
    total=st.integers(1, 60),
    warmup=st.one_of(st.floats(0, 1), st.integers(1, 70)),
    hold=st.floats(0, 1),
    cooldown=st.integers(0, 70),
    cycles=st.integers(1, 4),
    end=st.floats(0, 1),
)
def test_factors_stay_between_bottom_and_top(decay, total, warmup, hold, cooldown, cycles, end):
    if decay == "inverse_sqrt" and not warmup:
        warmup = 0.1
    cb = WarmupSchedulerCB(decay, warmup, hold, cooldown, cycles=cycles, end_factor=end)
    assert all(-1e-12 <= o <= 1 + 1e-12 for o in curve(cb, total))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: WarmupSchedulerCB("cosin"), "Did you mean `cosine`"),
        (lambda: WarmupSchedulerCB(warmup=1.5), "`warmup` is 1.5"),
        (lambda: WarmupSchedulerCB(hold=-1), "`hold` is -1"),
        (lambda: WarmupSchedulerCB(warmup=True), "`warmup` is True"),
        (lambda: WarmupSchedulerCB(cycles=0), "at least once"),
        (lambda: WarmupSchedulerCB(end_factor=1.5), "`end_factor` is 1.5"),
        (lambda: WarmupSchedulerCB("inverse_sqrt", warmup=0), "timescale"),
        (lambda: WSDSchedulerCB(decay="inverse_sqrt"), "`decay` is 'inverse_sqrt'"),
        (lambda: WSDSchedulerCB(spacing=1), "`spacing` is 1"),
        (lambda: StepSchedulerCB(0), "whole number of epochs"),
        (lambda: StepSchedulerCB([1, 2.5]), "whole number of epochs"),
        (lambda: StepSchedulerCB(1, factor=0), "`factor` is 0"),
        (lambda: AttributeSchedulerCB({"momentum": lambda p: p}), "`opt.momentum`"),
        (lambda: AttributeSchedulerCB({"opt.momentum": lambda p: p}, unit="batch"), "`unit` is 'batch'"),
        (lambda: piecewise((1, 0), (0, 1)), "not in order"),
        (lambda: OneCycleSchedulerCB(max_momentum=2.0), "`max_momentum` is 2.0.* of 0 or more and below 1"),
        (lambda: OneCycleSchedulerCB(base_momentum=[0.9, 1.5]), "`base_momentum` is 1.5"),
        (lambda: OneCycleSchedulerCB(div_factor=0), "`div_factor` is 0.*above 0"),
        (lambda: OneCycleSchedulerCB(final_div_factor=0), "`final_div_factor` is 0.*above 0"),
        (lambda: PlateauSchedulerCB(patience=-1), "`patience` is -1.*waited for"),
        (lambda: PlateauSchedulerCB(patience=1.5), "`patience` is 1.5.*whole number of 0 or more"),
        (lambda: PlateauSchedulerCB(cooldown=-1), "`cooldown` is -1"),
        (lambda: PlateauSchedulerCB(min_lr=-1), "`min_lr` is -1.*0 or more"),
        (lambda: PlateauSchedulerCB(min_lr=[0.1, -1]), "`min_lr` is -1"),
    ],
)
def test_mistakes_are_told_where_they_are_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Longer or shorter


@pytest.mark.parametrize(
    "cb, message",
    [
        (
            BatchSchedulerCB(partial(lrs.CosineAnnealingLR, T_max=20)),
            "takes 10 steps of `CosineAnnealingLR`.*`T_max` is 20.*cut off",
        ),
        (BatchSchedulerCB(partial(lrs.CosineAnnealingLR, T_max=8)), "`T_max` is 8.*rise again"),
        (
            BatchSchedulerCB(partial(lrs.OneCycleLR, max_lr=0.1, total_steps=6)),
            "`total_steps` is 6.*stay where it ends",
        ),
        (BatchSchedulerCB(partial(lrs.PolynomialLR, total_iters=5)), "`total_iters` is 5.*stay at zero"),
        (EpochSchedulerCB(partial(lrs.LinearLR, total_iters=5)), "one for each epoch.*cut off"),
        (EpochSchedulerCB(partial(lrs.StepLR, step_size=3)), "changes after 3. That will never come"),
        (StepSchedulerCB([7, 2, 1]), "changes after 7. That will never come"),
        (
            BatchSchedulerCB(
                lambda opt: lrs.SequentialLR(opt, [lrs.ConstantLR(opt), lrs.ExponentialLR(opt, 0.9)], [30])
            ),
            "changes after 30",
        ),
        (WarmupSchedulerCB(warmup=50), "take 50 updates, but this fit has only 10.*at 0.196 times"),
        (WSDSchedulerCB(warmup=6, decay_length=6), "take 12 updates, but the first decay is to end after 10"),
    ],
    ids=lambda o: o if isinstance(o, str) else type(o).__name__,
)
def test_a_length_that_does_not_fit_is_told_before_the_first_batch(cb, message):
    trainer = make_trainer(cb)
    with pytest.raises(UserWarning, match=message):
        trainer.fit(2, valid=False)  # The fixture makes errors of warnings
    assert trainer.n_updates == 0
    with pytest.warns(UserWarning, match=message):
        trainer.fit(2, lr=0.1, valid=False)
    assert trainer.n_updates == 10


def test_a_cycle_that_is_too_short_stays_where_it_ends():
    with pytest.warns(UserWarning):
        found = rates(BatchSchedulerCB(partial(lrs.OneCycleLR, max_lr=0.1, total_steps=6)))
    assert found[5:] == pytest.approx([0.1 / 25 / 1e4] * 5)


def test_one_less_than_the_run_counts_as_fitting():
    rates(BatchSchedulerCB(partial(lrs.CosineAnnealingLR, T_max=9)))
    rates(BatchSchedulerCB(partial(lrs.LinearLR, total_iters=3)))


# What makes a scheduler


@pytest.mark.parametrize(
    "func, error, message",
    [
        (lambda opt: None, TypeError, "gave None"),
        (lambda opt: lrs.ReduceLROnPlateau(opt), TypeError, "PlateauSchedulerCB"),
        (lambda opt: lrs.StepLR(optim.SGD([torch.zeros(1)], 1.0), 1), ValueError, "another optimizer"),
    ],
)
def test_a_function_that_makes_no_usable_scheduler_is_an_error(func, error, message):
    for cls in (BatchSchedulerCB, EpochSchedulerCB):
        with pytest.raises(error, match=message):
            make_trainer(cls(func)).fit(1, valid=False)


def test_a_step_that_does_not_call_the_optimizer_brings_no_warning():
    "The order is right whoever does the step"

    class OwnStepCB(BasicTrainCB):
        def step(self, trainer):
            with torch.no_grad():
                for p, g in zip(trainer.model.parameters(), [p.grad for p in trainer.model.parameters()]):
                    p -= trainer.opt.param_groups[0]["lr"] * g

    for cb in (
        BatchSchedulerCB(partial(lrs.ExponentialLR, gamma=0.9)),
        EpochSchedulerCB(partial(lrs.ExponentialLR, gamma=0.9)),
    ):
        trainer = Trainer(DataLoaders(make_batches()), F.mse_loss, optim.SGD, make_model(), [OwnStepCB(), cb])
        trainer.fit(2, valid=False)
        assert cb.scheduler.last_epoch in (2, 10)


class TimmLike:
    "A stand-in with the interface of timm's schedulers"

    def __init__(self, optimizer):
        self.optimizer, self.calls = optimizer, []

    def step(self, epoch, metric=None):
        self.calls.append(("epoch", epoch))

    def step_update(self, num_updates, metric=None):
        self.calls.append(("update", num_updates))


@pytest.mark.shows("PTA-48")
def test_schedulers_of_timm_are_told_the_number():
    batch, epoch = BatchSchedulerCB(TimmLike), EpochSchedulerCB(TimmLike)
    make_trainer(batch, epoch, n=2).fit(2, valid=False)
    assert batch.scheduler.calls == [("update", i) for i in (1, 2, 3, 4)] and epoch.scheduler.calls == [
        ("epoch", 1),
        ("epoch", 2),
    ]


# A rate that is none


def _broken(bad, good=1.0):
    return lambda o: bad if o == 2 else good


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(
    "make, n_updates, where",
    [
        (
            lambda bad: BatchSchedulerCB(partial(lrs.LambdaLR, lr_lambda=[lambda n: 1.0, _broken(bad)])),
            2,
            "parameter group 1 to .* after 2 updates",
        ),
        (
            lambda bad: EpochSchedulerCB(partial(lrs.LambdaLR, lr_lambda=_broken(bad))),
            10,
            "parameter group 0 to .* after 2 epochs",
        ),
        (
            lambda bad: WarmupSchedulerCB(lambda t: bad, warmup=3),
            3,
            "parameter group 0 to .* after 3 updates",
        ),
        (
            lambda bad: BatchSchedulerCB(partial(lrs.LambdaLR, lr_lambda=lambda n: bad)),
            0,
            "parameter group 0 to .* before the first update",
        ),
        (
            lambda bad: AttributeSchedulerCB({"opt.lr": _broken(bad)}, "update"),
            2,
            "`opt.lr` gives .* at update 2",
        ),
    ],
    ids=["batch", "epoch", "decay", "first", "attribute"],
)
def test_a_schedule_that_gives_no_rate_is_an_error_before_anything_is_spoilt_or_saved(
    make, n_updates, where, bad, tmp_path
):
    "The message names callback, parameter group and step; no checkpoint and no weight has seen the rate"

    def opt_func(params, lr):
        first, *rest = params
        return optim.SGD([dict(params=[first]), dict(params=rest)], lr)

    trainer = make_trainer(cb := make(bad), CheckpointCB(tmp_path, 1), opt_func=opt_func)
    with pytest.raises(ValueError, match=f"`{type(cb).__name__}`.*{where}"):
        trainer.fit(3, lr=0.1, valid=False)
    assert trainer.n_updates == n_updates and all(torch.isfinite(o).all() for o in trainer.model.parameters())
    store = CheckpointStore(tmp_path, read_only=True)
    for o in store.list():
        assert all(0 < g["lr"] <= 1 for g in store.load(o.path)[1]["opts"]["opt"]["param_groups"])


def test_a_function_that_gives_nothing_is_refused_by_name_and_none_may_be_meant_elsewhere():
    "`bad operand type for unary -` came out of the step"
    forgets = make_trainer(AttributeSchedulerCB({"opt.lr": lambda p: None}), n=4)
    with pytest.raises(ValueError, match="for `opt.lr` gives None at progress 0.*lack a `return`"):
        forgets.fit(1, valid=False)
    means = {"opt.foreach": lambda p: None, "BasicTrainCB.mine": lambda p: None}
    trainer = make_trainer(AttributeSchedulerCB(means), n=4)
    trainer.BasicTrainCB.mine = 1
    trainer.fit(1, valid=False)


def test_a_value_of_nan_is_refused_for_any_attribute_and_a_rate_that_is_a_tensor_as_well():
    with pytest.raises(
        ValueError, match=r"`AttributeSchedulerCB` has for `model.1.p` gives nan at progress 0.5"
    ):
        make_trainer(AttributeSchedulerCB({"model.1.p": lambda p: math.nan if p == 0.5 else 0.1}), n=4).fit(
            1, valid=False
        )

    def tensor_rate(params, lr):
        return optim.Adam(params, lr=torch.tensor(lr), foreach=False)

    trainer = make_trainer(
        BatchSchedulerCB(partial(lrs.LambdaLR, lr_lambda=_broken(math.nan))), n=2, opt_func=tensor_rate
    )
    with pytest.raises(ValueError, match="to nan after 2 updates"):
        trainer.fit(1, valid=False)
    elsewhere = SimpleNamespace(
        param_groups=[dict(lr=torch.tensor(math.nan, device="meta"))]
    )  # Whose value nobody can ask for
    check_rates(elsewhere, trainer.BatchSchedulerCB, wait=False)


# State


class StateCB:
    "Takes the state after some epochs and leaves"

    order = Order.SAVE

    def __init__(self, n, cb, state):
        self.n, self.cb, self.state = n, cb, state

    def log(self, trainer):
        if trainer.epoch + 1 == self.n:
            self.state["json"] = json.dumps(self.cb.state_dict())
            raise CancelFitException("half-way")


RESUMABLE = {
    **{
        f"batch {k}": partial(
            lambda make: BatchSchedulerCB(lambda opt, trainer: make(opt, trainer.total_updates)), v
        )
        for k, v in PER_BATCH.items()
    },
    **{f"epoch {k}": partial(EpochSchedulerCB, v) for k, v in PER_EPOCH.items()},
    **ALL,
}


@pytest.mark.shows("AIT-46")
@pytest.mark.parametrize("when", ["before the fit", "in the fit"])
@pytest.mark.parametrize("make", RESUMABLE.values(), ids=RESUMABLE)
def test_a_schedule_goes_on_where_its_state_says(make, when):
    "State in plain types, through JSON; rates and momentum of the second half as if never stopped"

    def make_run(cb, *callbacks):
        notes = RecorderCBNamed(m=lambda t: t.opt.param_groups[0]["momentum"], p=lambda t: t.model[1].p)
        return make_trainer(cb, WriteCB([3.0, 3.0, 2.0, 2.0], "train_loss"), notes, *callbacks)

    whole = make_run(make())
    whole.fit(4, lr=0.1, valid=False)
    cb, state = make(), {}
    make_run(cb, StateCB(2, cb, state)).fit(4, lr=0.1, valid=False)
    again = make()

    class ResumeCB:
        order = Order.SAVE

        def before_fit(self, trainer):
            trainer.epochs = range(2, 4)
            if when == "in the fit":
                again.load_state_dict(json.loads(state["json"]))

    if when == "before the fit":
        again.load_state_dict(json.loads(state["json"]))
    resumed = make_run(again, ResumeCB())
    resumed.fit(4, lr=0.1, valid=False)
    for column in ("lr", "m", "p"):
        assert resumed.history.batches[column] == whole.history.batches[column][10:], column


def test_a_state_of_a_run_of_another_length_is_told():
    cb = WarmupSchedulerCB()
    make_trainer(cb).fit(2, valid=False)
    state = cb.state_dict()
    again = WarmupSchedulerCB()
    again.load_state_dict(state)
    with pytest.warns(UserWarning, match="saved in a fit of 10 steps, but this fit has 20"):
        make_trainer(again).fit(4, valid=False)


class OwnSchedule:
    "Halves the rate every other step, and knows nothing of PyTorch's schedulers"

    def __init__(self, opt):
        self.opt, self.steps = opt, 0

    def step(self):
        self.steps += 1
        for group in self.opt.param_groups:
            group["lr"] *= 0.5 ** (self.steps % 2)

    def state_dict(self):
        return dict(steps=self.steps)

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_a_schedule_of_ones_own_is_saved_and_goes_on(tmp_path):
    def fit(n_epochs, *more, batches=5, schedule=OwnSchedule):
        trainer = make_trainer(BatchSchedulerCB(schedule), *more, n=batches)
        trainer.fit(n_epochs, lr=0.1, valid=False)
        return trainer

    fit(1, CheckpointCB(tmp_path / "run"))
    assert same(fit(2).model, fit(2, CheckpointCB(tmp_path / "run")).model)
    without = type("Without", (), dict(__init__=OwnSchedule.__init__, step=OwnSchedule.step))
    with pytest.raises(UnsaveableState, match="of `BatchSchedulerCB`, a Without, has no `state_dict"):
        fit(1, CheckpointCB(tmp_path / "without"), schedule=without)


@pytest.mark.parametrize(
    "make, before, now",
    [
        (lambda gamma: EpochSchedulerCB(partial(lrs.StepLR, step_size=1, gamma=gamma)), 0.5, 0.9),
        (lambda factor: StepSchedulerCB(1, factor), 0.5, 0.9),
        (lambda size: EpochSchedulerCB(partial(lrs.StepLR, step_size=size)), 1, 2),
    ],
)
def test_settings_of_a_scheduler_are_those_of_the_script_and_a_warning_says_so(make, before, now, tmp_path):
    make_trainer(make(before), CheckpointCB(tmp_path)).fit(2, lr=0.1, valid=False)
    trainer = make_trainer(make(now), CheckpointCB(tmp_path))
    with pytest.warns(UserWarning, match="goes on otherwise than it was saved") as told:
        trainer.fit(4, lr=0.1, valid=False)
    assert str(now) in str(told[0].message) and str(before) in str(told[0].message)
    options = vars(next(o.scheduler for o in trainer.callbacks if isinstance(o, SchedulerCB)))
    assert now in (options["gamma"], options["step_size"])


def test_a_length_of_a_scheduler_stays_and_a_warning_says_so(tmp_path):
    def cosine(n):
        return BatchSchedulerCB(partial(lrs.CosineAnnealingLR, T_max=n))

    make_trainer(cosine(5), CheckpointCB(tmp_path)).fit(1, lr=0.1, valid=False)
    trainer = make_trainer(cosine(10), CheckpointCB(tmp_path))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(2, lr=0.1, valid=False)
    assert any("goes on with `T_max=5`, as it was saved, and not with 10" in str(o.message) for o in told)
    assert trainer.BatchSchedulerCB.scheduler.T_max == 5


def test_a_state_counts_for_one_fit_only():
    cb = WarmupSchedulerCB()
    first = rates(cb)
    cb.load_state_dict(cb.state_dict())
    assert rates(cb)[0] != first[0]
    assert rates(cb) == first


# Preview


@pytest.mark.shows("F047")
@pytest.mark.parametrize("make", [v for k, v in ALL.items() if k not in ("plateau", "attribute")])
def test_a_preview_is_what_a_fit_does_and_leaves_no_trace(make):
    cb = make()
    before, state = dict(vars(cb)), torch.get_rng_state()
    seen = cb.preview(n_epochs=2, updates_per_epoch=5, lr=0.1)
    assert vars(cb) == before and torch.equal(state, torch.get_rng_state())
    assert seen["lr"] == rates(cb)


@pytest.mark.shows("F047")
def test_a_preview_in_the_middle_of_a_fit_touches_nothing():
    class LookCB:
        def after_batch(self, trainer):
            trainer.OneCycleSchedulerCB.preview(1, 3)

    plain, looked = make_trainer(OneCycleSchedulerCB()), make_trainer(OneCycleSchedulerCB(), LookCB())
    for o in (plain, looked):
        torch.manual_seed(1)
        o.fit(2, lr=0.1, valid=False)
    assert same(plain.model, looked.model)


@pytest.mark.shows("F047")
def test_a_plot_has_axes_with_names():
    ax = OneCycleSchedulerCB().plot(n_epochs=2, updates_per_epoch=5, lr=0.1)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("optimizer update", "learning rate") and len(
        ax.get_lines()[0].get_ydata()
    ) == 10
    assert "updates_per_epoch" in inspect.signature(OneCycleSchedulerCB().plot).parameters
    with pytest.raises(ValueError, match="follows `valid_loss`"):
        PlateauSchedulerCB().plot()


# Two schedules of one optimizer

ALONE = {
    "OneCycleSchedulerCB": lambda: OneCycleSchedulerCB(),
    "WarmupSchedulerCB": WarmupSchedulerCB,
    "WSDSchedulerCB": WSDSchedulerCB,
    "BatchSchedulerCB": lambda: BatchSchedulerCB(lambda opt: lrs.CyclicLR(opt, 0.01, 0.1)),
    "AttributeSchedulerCB": lambda: AttributeSchedulerCB({"opt.lr": lambda progress: 0.1 * (1 - progress)}),
}
IDLE = {
    "PlateauSchedulerCB": lambda: PlateauSchedulerCB("train_loss", patience=0),
    "StepSchedulerCB": lambda: StepSchedulerCB(1),
    "EpochSchedulerCB": lambda: EpochSchedulerCB(partial(lrs.ExponentialLR, gamma=0.5)),
}


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("idle", IDLE)
@pytest.mark.parametrize("alone", ALONE)
def test_a_schedule_that_would_have_no_effect_is_refused(alone, idle, first):
    "Before the first batch, with both names, and the optimizer has its rate again"
    cbs = [ALONE[alone](), IDLE[idle]()]
    trainer = make_trainer(MetricsCB(), *(cbs if first else cbs[::-1]))
    with pytest.raises(
        ValueError, match=f"`{alone}` sets the rate anew at every update, so whatever `{idle}` does"
    ):
        trainer.fit(2, lr=0.1, valid=False)
    assert trainer.n_updates == 0 and "initial_lr" not in trainer.opt.param_groups[0]
    make_trainer(MetricsCB(), IDLE[idle]()).fit(2, lr=0.1, valid=False)


def test_schedules_that_multiply_what_they_find_may_stand_together():
    "Two that multiply; two optimizers; and one that ended with an error is no company for the next fit"
    first, second = EpochSchedulerCB(partial(lrs.ExponentialLR, gamma=0.5)), StepSchedulerCB(1, factor=0.1)
    second.name = "second"
    trainer = make_trainer(first, second, n=1)
    trainer.fit(3, lr=1.0, valid=False)
    assert trainer.history.batches["lr"] == pytest.approx([1, 0.05, 0.0025])
    trainer = make_trainer(OneCycleSchedulerCB(), StepSchedulerCB(1, opt="other"))
    trainer.other = optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    trainer.fit(2, valid=False)
    assert trainer.other.param_groups[0]["lr"] == 1.0
    trainer = make_trainer(OneCycleSchedulerCB(), StepSchedulerCB(1))
    with pytest.raises(ValueError):
        trainer.fit(1, valid=False)
    trainer.remove_callback("OneCycleSchedulerCB")
    trainer.fit(1, valid=False)


# Limits


@pytest.mark.shows("AIT-65", "PTA-45")
def test_a_limit_on_updates_shortens_the_schedule():
    "The curve is that of a run of so many updates, in epochs or in a stream of unknown length"
    limited = make_trainer(LimitCB(8), WarmupSchedulerCB("linear", warmup=2))
    limited.fit(10, lr=0.1, valid=False)
    assert limited.n_updates == 8 == limited.total_updates
    assert limited.history.batches["lr"] == pytest.approx(
        rates(WarmupSchedulerCB("linear", warmup=2), 2, n=4)
    )
    stream = make_trainer(
        LimitCB(8), WarmupSchedulerCB("linear", warmup=2), batches=Stream(make_batches(100))
    )
    stream.fit(1, lr=0.1, valid=False)
    assert stream.history.batches["lr"] == limited.history.batches["lr"]
    longer = make_trainer(LimitCB(80))
    longer.fit(2, valid=False)
    assert longer.total_updates == 10, "a limit that is never reached is none"


class Stream:
    "Batches of which nobody knows the number"

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.shows("PTA-39")
def test_where_decays_begin_and_end_is_known():
    "The first decaying rate comes after `decay_begins`, the lowest before `decay_ends`"
    for options in (dict(), dict(n_decays=3), dict(n_decays=2, spacing=3.0, decay_length=4)):
        wsd, total = WSDSchedulerCB(warmup=2, **options), 60
        curve = [wsd.factor(i, total) for i in range(total)]
        for start, end in wsd.decays(total):
            assert (
                curve[start - 1] == 1 == curve[start]
                and curve[start + 1] < 1
                and curve[end - 1] == min(curve[start:end])
            )
            assert end == total or curve[end] == 1
        assert wsd.factor(total, total) == 0, "and after the last one it stays there"


@pytest.mark.parametrize("warmup", [5, 0.1])
def test_a_length_in_the_place_of_the_decay_is_told_where_it_belongs(warmup):
    with pytest.raises(
        ValueError, match=f"`decay` is {warmup}.*The length of the warm-up is `warmup={warmup}`"
    ):
        WarmupSchedulerCB(warmup)


def test_a_list_of_optimizers_is_refused_by_name():
    class Two(BasicTrainCB):
        def before_fit(self, trainer):
            trainer.opts = [trainer.opt, trainer.opt]

    batches = [(torch.zeros(2, 1), torch.zeros(2, 1))]
    schedule = EpochSchedulerCB(partial(lrs.StepLR, step_size=1), opt="opts")
    t = Trainer(DataLoaders(batches), F.mse_loss, optim.SGD, torch.nn.Linear(1, 1), [Two(), schedule])
    with pytest.raises(TypeError, match="`EpochSchedulerCB` is to work with `trainer.opts`, which is a list"):
        t.fit(1, valid=False)


def test_a_scheduler_that_needs_more_than_the_optimizer_is_explained():
    trainer = make_trainer(EpochSchedulerCB(optim.lr_scheduler.StepLR))
    with pytest.raises(TypeError, match="step_size") as caught:
        trainer.fit(1, valid=False)
    assert any("`partial(StepLR, step_size=2)`" in o for o in caught.value.__notes__)
    with pytest.raises(TypeError, match="an argument of the scheduler"):
        EpochSchedulerCB(optim.lr_scheduler.StepLR, step_size=2)


def grouped_trainer(*callbacks, tensors=False):
    "Two groups, the second at ten times the rate of the first"
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]

    def opt_func(params, lr):
        groups = [
            dict(params=layer.parameters(), lr=torch.tensor(r * lr) if tensors else r * lr)
            for layer, r in zip(model, (1, 10))
        ]
        return optim.Adam(groups)

    return Trainer(DataLoaders(batches), F.mse_loss, opt_func, model, [BasicTrainCB(), *callbacks])


SCHEDULES = {
    "none": lambda: None,
    "one cycle": lambda: OneCycleSchedulerCB(cycle_momentum=False),
    "warm-up": lambda: WarmupSchedulerCB(),
    "linear": lambda: WarmupSchedulerCB("linear"),
    "stable": lambda: WSDSchedulerCB(),
    "cosine": lambda: BatchSchedulerCB(
        lambda opt, trainer: lrs.CosineAnnealingLR(opt, trainer.total_updates, eta_min=0.001)
    ),
    "polynomial": lambda: EpochSchedulerCB(lambda opt, trainer: lrs.PolynomialLR(opt, trainer.n_epochs)),
    "steps to a floor": lambda: StepSchedulerCB(1, 0.1, min_lr=5e-3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_groups_keep_their_ratio_after_a_schedule_has_brought_them_to_one_rate(name):
    trainer, seen = grouped_trainer(), []

    def before_batch(trainer):
        seen.append([group["lr"] for group in trainer.opt.param_groups])

    trainer.fit(1, lr=0.01, valid=False, callbacks=SCHEDULES[name]())
    for lr in (0.02, 0.03):  # Again without a schedule, and then once more
        trainer.fit(1, lr=lr, valid=False, keep_opt=True, callbacks=before_batch)
        assert seen[-1] == pytest.approx([lr, 10 * lr])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_ratio_that_somebody_has_set_after_the_fit_counts(name):
    trainer, seen = grouped_trainer(), []
    trainer.fit(1, lr=0.01, valid=False, callbacks=SCHEDULES[name]())
    for group, lr in zip(trainer.opt.param_groups, (0.5, 1.0)):
        group["lr"] = lr

    def before_batch(trainer):
        seen.append([group["lr"] for group in trainer.opt.param_groups])

    trainer.fit(1, lr=0.02, valid=False, keep_opt=True, callbacks=before_batch)
    assert seen[0] == pytest.approx([0.02, 0.04])


def test_an_optimizer_in_the_place_of_its_name_is_refused():
    trainer = grouped_trainer(OneCycleSchedulerCB(opt=optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)))
    with pytest.raises(TypeError, match="got SGD as `opt`, and wants the name of the attribute"):
        trainer.fit(1, valid=False)


def layered_trainer():
    model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    opt_func = discriminative_rates(optim.Adam, model, 10.0)
    batches = [(torch.ones(2, 1), torch.ones(2, 1))] * 4
    return Trainer(DataLoaders(batches), F.mse_loss, opt_func, model, [BasicTrainCB()])


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_of_layers_are_as_before_when_an_optimizer_is_kept_at_the_same_rate(name):
    "The groups of `discriminative_rates` begin with the lowest rate; the last has that of the fit"
    seen = []

    def before_batch(trainer):
        seen.append([group["lr"] for group in trainer.opt.param_groups])

    trainer = layered_trainer()
    trainer.fit(1, lr=0.01, valid=False, callbacks=before_batch)
    assert seen[0] == pytest.approx([0.001, 0.01])
    trainer.fit(1, lr=0.01, valid=False, keep_opt=True, callbacks=SCHEDULES[name]())
    trainer.fit(1, lr=0.01, valid=False, keep_opt=True, callbacks=before_batch)
    assert seen[-1] == pytest.approx([0.001, 0.01])
    trainer.fit(1, lr=0.05, valid=False, keep_opt=True, callbacks=before_batch)
    assert seen[-1] == pytest.approx([0.005, 0.05])


def test_rates_of_layers_are_those_of_the_fit_after_a_checkpoint_was_loaded(tmp_path):
    first, other = layered_trainer(), layered_trainer()
    first.fit(1, lr=0.01, valid=False)
    first.save(tmp_path)
    other.load(tmp_path)
    other.fit(1, lr=0.02, valid=False, keep_opt=True)
    assert [group["lr"] for group in other.opt.param_groups] == pytest.approx([0.002, 0.02])
