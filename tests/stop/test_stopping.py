"""Stopping (`stop/early_stopping.py`, `limits.py`, `bad_numbers.py`, `spikes.py`, `collapse.py`): early
stopping against an oracle of ten lines, limits by counting, bad numbers by looking at weights and optimizer
state bit for bit.

Every stop is checked for leaving the loop in order: the last row is complete, `after_fit` runs, the reason
is told.
"""

import copy
import math
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

import isaac_loop.stop.limits as limits
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.schedule.schedules import WarmupSchedulerCB
from isaac_loop.inspection.first_nonfinite import NonFiniteCB
from isaac_loop.stop.nonfinite_stop import NonFiniteStopCB
from isaac_loop.stop.same_predictions import SamePredictionsCB
from isaac_loop.stop.limits import LimitCB
from isaac_loop.stop.loss_spikes import LossSpikeCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.train.training import BasicTrainCB, MomentumTrainCB, NBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelBatchException, Order
from isaac_loop.loop.trainer import Trainer
from waiting import InsideCB, RefuseToWait

nan, inf = math.nan, math.inf


def make_batches(n=8, rows=4):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, 3, generator=g), torch.randn(rows, 1, generator=g)) for _ in range(n)]


def make_trainer(
    *callbacks, batches=None, valid=None, opt_func=optim.SGD, loss_func=F.mse_loss, steps=None, model=None
):
    torch.manual_seed(0)
    batches = batches or make_batches()
    return Trainer(
        DataLoaders(batches, valid or batches[:2]),
        loss_func,
        opt_func,
        model or nn.Linear(3, 1),
        [steps or BasicTrainCB(), MetricsCB(show=False), *callbacks],
    )


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


class ValuesCB:
    "Writes given values into the history, one per epoch; `...` stands for no value"

    columns = ["score"]

    def __init__(self, values):
        self.values = values

    def cleanup_epoch(self, trainer):
        value = self.values[trainer.epoch]
        trainer.history.write(**{} if value is ... else {"score": value})


class EndCB:
    "Knows whether the fit ended in order, and which rows were logged"

    order = Order.REPORT

    def before_fit(self, trainer):
        self.ended, self.logged = False, 0

    def log(self, trainer):
        self.logged += 1

    def after_fit(self, trainer):
        self.ended = True


def epochs_of(values, **options):
    "After how many epochs a fit over `values` ends, and its trainer"
    trainer = Trainer(
        DataLoaders([1]),
        None,
        None,
        nn.Identity(),
        [ValuesCB(values), EarlyStoppingCB("score", **options), end := EndCB()],
    )
    trainer.fit(len(values), valid=False)
    assert end.ended and end.logged == len(trainer.history)
    return end.logged, trainer


# Early stopping


def oracle(
    values,
    mode="min",
    patience=3,
    min_delta=0.0,
    or_equal=False,
    start_epoch=0,
    threshold=None,
    baseline=None,
    divergence=None,
):
    "The epochs that are run, written down from the description"
    sign, best, bad = (1 if mode == "min" else -1), baseline, 0
    for n, value in enumerate(values, 1):
        if value is ... or n <= start_epoch:
            continue
        gain = None if best is None else (best - value) * sign
        better = not math.isnan(value) and (
            gain is None or gain > min_delta or (or_equal and gain == min_delta)
        )
        best, bad = (value, 0) if better else (best, bad + 1)
        if divergence is not None and (math.isnan(value) or value * sign >= divergence * sign):
            return n
        if threshold is not None and value * sign <= threshold * sign:
            return n
        if patience is not None and bad >= patience:
            return n
    return len(values)


level = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 2.0])


@pytest.mark.shows("AIT-24", "PTA-28", "SON-09", "F100", "F101")
@pytest.mark.filterwarnings("ignore:.*had no value")
@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(
        st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 2.0, nan, inf, -inf, ...]), min_size=1, max_size=10
    ),
    mode=st.sampled_from(["min", "max"]),
    patience=st.integers(1, 3),
    min_delta=st.sampled_from([0.0, 0.25]),
    or_equal=st.booleans(),
    start_epoch=st.integers(0, 3),
    threshold=st.none() | level,
    baseline=st.none() | level,
)
def test_it_stops_where_the_description_says(
    values, mode, patience, min_delta, or_equal, start_epoch, threshold, baseline
):
    "Equal is not better, or is if asked for, NaN never is, epochs without a value count for nothing"
    options = dict(
        mode=mode,
        patience=patience,
        min_delta=min_delta,
        or_equal=or_equal,
        start_epoch=start_epoch,
        threshold=threshold,
        baseline=baseline,
    )
    assert epochs_of(values, **options)[0] == oracle(values, **options)


@pytest.mark.shows("F101", "AIT-25", "AIT-24", "PTA-28", "SON-09")
@pytest.mark.parametrize(
    "values, options, n, reason",
    [
        ([3.0, 2.0, 2.0, 2.0, 1.0], dict(patience=2), 4, "has not improved for 2 epochs; the best is 2"),
        ([nan, nan, 1.0], dict(patience=2), 2, "has not improved for 2 epochs; the best is none"),
        ([3.0, 2.0, 2.0, 2.0, 3.0, 3.0], dict(patience=2, or_equal=True), 6, "the best is 2"),
        ([nan, 2.0, nan, 1.0, 1.5, 1.5], dict(patience=2), 6, "the best is 1"),
        ([1.0, 0.995, 0.991, 0.5], dict(patience=2, min_delta=0.01), 3, "the best is 1"),
        ([1.0, 2.0, 3.0], dict(patience=1), 2, "has not improved for 1 epoch;"),
        ([5.0, 0.4, 0.1], dict(patience=None, threshold=0.4), 2, "has reached 0.4"),
        ([0.1, 0.9, 0.95], dict(patience=None, threshold=0.9, mode="max"), 2, "has reached 0.9"),
        ([0.1, 0.2, 0.3, 0.4], dict(patience=3, baseline=0.5, mode="max"), 3, "the best is 0.5"),
        (
            [1.0, 2.0, 50.0, 1.0],
            dict(divergence=10.0),
            3,
            "is 50, no better than 10.0: this run has diverged",
        ),
        ([1.0, nan, 1.0], dict(divergence=10.0), 2, "is nan, no better than"),
        ([0.5, 0.1, 0.6], dict(divergence=0.1, mode="max"), 2, "diverged"),
        ([50.0, 1.0, 1.0, 1.0], dict(divergence=10.0, start_epoch=1, patience=2), 4, "the best is 1"),
    ],
)
def test_each_reason_is_told(values, options, n, reason):
    "An equal value is no progress, unless `or_equal` says so"
    found, trainer = epochs_of(values, **dict(mode="min") | options)
    assert found == n and reason in trainer.stop_reason and trainer.stop_reason.startswith("`score` ")


def test_validations_are_counted_and_not_epochs():
    "Validated every third epoch, patience 2 means two validations"
    values = [..., ..., 1.0] + [..., ..., 1.0] * 3
    assert epochs_of(values, mode="min", patience=2)[0] == 9


def test_the_name_is_looked_up_before_the_first_batch():
    class NoBatchCB:
        def before_batch(self, trainer):
            raise AssertionError("too late")

    trainer = make_trainer(EarlyStoppingCB("val_loss"), NoBatchCB())
    with pytest.raises(LookupError, match="`EarlyStoppingCB` watches `val_loss`.*Did you mean `valid_loss`"):
        trainer.fit(1)


def test_a_name_that_an_undeclared_writer_might_bring_is_looked_up_after_the_first_epoch():
    class WriterCB:
        def cleanup_epoch(self, trainer):
            trainer.history.write(other=1.0)

    trainer = make_trainer(EarlyStoppingCB("score", mode="max"), WriterCB())
    with pytest.raises(LookupError, match="no `score`"):
        trainer.fit(3)
    assert trainer.epoch == 0


def test_a_column_that_never_has_a_value_is_told_of():
    with pytest.warns(UserWarning, match="had no value in any epoch"):
        make_trainer(EarlyStoppingCB()).fit(2, valid=False)


@pytest.mark.shows("AIT-74")
@pytest.mark.parametrize("name", ["accuracy", "val_error", "error_free", "f1", "lossless"])
def test_the_direction_is_never_guessed(name):
    with pytest.raises(ValueError, match="Say `mode='max'` or `mode='min'`"):
        EarlyStoppingCB(name)
    assert EarlyStoppingCB(name, mode="max").mode == "max" and EarlyStoppingCB("my_loss").mode == "min"


@pytest.mark.shows("PTA-28")
def test_a_second_fit_begins_anew_unless_told_otherwise():
    "`reset_on_train`"
    for reset, expected in ((True, 2), (False, 1)):
        values, cb = ValuesCB([1.0, 2.0, 2.0, 2.0]), EarlyStoppingCB("score", 3, mode="min", reset=reset)
        trainer = Trainer(DataLoaders([1]), None, None, nn.Identity(), [values, cb])
        trainer.fit(3, valid=False)
        assert cb.n_bad == 2 and trainer.stop_reason is None
        values.values = [1.0, 0.5, 2.0, 2.0] if reset else [1.0] * 4
        trainer.fit(2 if reset else 4, valid=False)
        assert len(trainer.history) == 3 + expected


def test_two_can_watch_one_run():
    first, second = (
        EarlyStoppingCB("score", 5, mode="min"),
        EarlyStoppingCB("score", None, mode="min", threshold=0.0),
    )
    second.name = "threshold"
    trainer = Trainer(
        DataLoaders([1]), None, None, nn.Identity(), [ValuesCB([3.0, 2.0, 0.0, 0.0]), first, second]
    )
    trainer.fit(4, valid=False)
    assert len(trainer.history) == 3 and trainer.threshold is second and first.best == 0.0


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(patience=0), "whole number of 1 or more"),
        (dict(patience=1.5), "whole number"),
        (dict(patience=None), "would never stop"),
        (dict(min_delta=-1.0), "`min_delta`"),
        (dict(start_epoch=-1), "epochs are numbered from 0"),
        (dict(mode="up"), "'min' or 'max'"),
        (dict(threshold=2.0, divergence=1.0), "swapped"),
        (dict(threshold=1.0, divergence=2.0, mode="max"), "swapped"),
        (dict(min_delta=nan), "`min_delta`"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        EarlyStoppingCB(**options)


# Limits


@pytest.mark.shows("F105", "NEMO-57", "PTA-45", "AIT-65")
@pytest.mark.parametrize("n", [1, 5, 8, 9, 20])
@pytest.mark.parametrize("gather", [1, 3])
def test_updates_are_counted_and_not_batches(n, gather):
    trainer = make_trainer(LimitCB(n), AccumulationCB(gather), end := EndCB())
    trainer.fit(30)
    assert (
        trainer.n_updates == n
        and end.ended
        and end.logged == len(trainer.history) == math.ceil(n / math.ceil(8 / gather))
    )
    assert trainer.stop_reason == f"{n} updates are enough" and all(
        "valid_loss" in row for row in trainer.history
    )


@pytest.mark.shows("F105")
@pytest.mark.parametrize(
    "options, n",
    [
        (dict(samples=1), 1),
        (dict(samples=9), 3),
        (dict(samples=33), 9),
        (dict(samples=30, count=lambda batch: batch[0].numel()), 3),
        (dict(epochs=2), 16),
    ],
)
def test_samples_and_epochs_are_counted(options, n):
    trainer = make_trainer(LimitCB(**options))
    trainer.fit(5)
    assert trainer.n_updates == n and "enough" in trainer.stop_reason


def test_a_limit_that_was_set_anew_is_the_length_of_the_schedule():
    "The fit went by the new one, and the schedule by the old"
    limit = LimitCB(10)
    trainer = make_trainer(limit, WarmupSchedulerCB("linear", warmup=0), RecorderCB())
    trainer.fit(5, lr=1.0, valid=False)
    limit.updates = 20
    trainer.fit(5, lr=1.0, valid=False)
    rates = [row["lr"] for row in trainer.history.batches if row["fit"] == 1]
    assert trainer.n_updates == trainer.total_updates == len(rates) == 20
    assert rates == pytest.approx([1 - i / 20 for i in range(20)])
    limit.updates = None
    trainer.fit(1, lr=1.0, valid=False)
    assert trainer.n_updates == trainer.total_updates == 8


def test_cancelled_batches_and_validation_are_no_samples():
    class CancelCB:
        order = Order.FIRST

        def before_batch(self, trainer):
            if trainer.training and trainer.batch_num % 2:
                raise CancelBatchException("every other one")

    trainer = make_trainer(LimitCB(samples=20), CancelCB())
    trainer.fit(5)
    assert trainer.n_updates == 5 and len(trainer.history) == 2


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    return clock


class TakesTimeCB:
    def __init__(self, clock, train, valid):
        self.clock, self.seconds = clock, {True: train, False: valid}

    def predict(self, trainer):
        self.clock.now += self.seconds[trainer.training]


@pytest.mark.shows("F105")
@pytest.mark.parametrize("limit", [25, 25.0, timedelta(seconds=25)])
def test_the_clock_is_looked_at_after_each_batch(clock, limit):
    trainer = make_trainer(LimitCB(seconds=limit), TakesTimeCB(clock, 10, 0), steps=BasicTrainCB())
    trainer.fit(5)
    assert trainer.n_updates == 3 and trainer.stop_reason == "30 seconds are enough"


def test_a_validation_is_never_cut_short_but_its_time_counts(clock):
    trainer = make_trainer(LimitCB(seconds=100), TakesTimeCB(clock, 1, 60))
    trainer.fit(5)
    assert len(trainer.history) == 1 and trainer.n_updates == 8 and clock.now == 1128


def test_time_before_a_kill_counts_and_time_in_between_does_not(clock):
    cb = LimitCB(seconds=100)
    make_trainer(cb, TakesTimeCB(clock, 5, 0)).fit(1)
    state = cb.state_dict()
    assert state == dict(n_samples=0, elapsed=40.0)
    clock.now += 10_000
    cb = LimitCB(seconds=100)
    cb.load_state_dict(state)
    trainer = make_trainer(cb, TakesTimeCB(clock, 5, 0))
    trainer.fit(5)
    assert trainer.n_updates == 12


def test_an_evaluation_is_not_limited_in_samples():
    trainer = make_trainer(LimitCB(5, samples=1))
    trainer.fit(1, train=False)
    assert trainer.stop_reason is None


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "no limit"),
        (dict(updates=0), "`updates` is 0"),
        (dict(samples=1.5), "`samples`"),
        (dict(epochs=True), "`epochs`"),
        (dict(seconds=0), "`seconds`"),
        (dict(seconds=timedelta(0)), "`seconds`"),
        (dict(seconds="10"), "`seconds`"),
        (dict(seconds=nan), "`seconds`"),
    ],
)
def test_limits_that_make_no_sense_are_refused_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        LimitCB(**options)


@pytest.mark.parametrize("count", [lambda batch: batch[0].sum(), lambda batch: None])
def test_a_count_that_would_wait_is_refused(count):
    with pytest.raises(TypeError, match="cannot count samples"):
        make_trainer(LimitCB(samples=3, count=count)).fit(1)


@pytest.mark.shows("PTA-30", "PTA-37", "AIT-30", "AIT-73")
def test_a_limit_in_batches_is_undone_with_its_callback_and_takes_no_data_away():
    "Counted, in both passes, in a block and after it"

    class SeenCB:
        def before_fit(self, trainer):
            self.seen = []

        def after_batch(self, trainer):
            self.seen.append((trainer.training, trainer.batch_num))

    trainer = make_trainer(SeenCB(), valid=make_batches(4))
    limit = NBatchCB(2)
    limit.on_train = False
    with trainer.added_callbacks(limit):
        trainer.fit(1)
    assert trainer.SeenCB.seen == [(True, i) for i in range(8)] + [(False, 0), (False, 1)]
    with trainer.added_callbacks(NBatchCB(1)):
        trainer.fit(1)
    assert trainer.SeenCB.seen == [(True, 0), (False, 0)]
    trainer.fit(1)
    assert len(trainer.SeenCB.seen) == 12


# NaN and infinity


def spoilt(batches, i, value=nan, where=1):
    "A copy of `batches` with one bad number in batch `i`"
    batches = copy.deepcopy(batches)
    batches[i][where][0, 0] = value
    return batches


OPTIMIZERS = [optim.SGD, lambda ps, lr: optim.SGD(ps, lr, momentum=0.9, weight_decay=0.1), optim.AdamW]


def opt_state(trainer):
    return [v for s in trainer.opt.state.values() for v in s.values() if torch.is_tensor(v)]


@pytest.mark.shows("PTA-20", "AIT-26", "AIT-72", "F102", "NEMO-57")
@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("i", [0, 3, 7])
@pytest.mark.parametrize("opt_func", OPTIMIZERS, ids=["sgd", "momentum", "adamw"])
def test_with_every_batch_read_the_bad_step_does_not_happen(value, i, opt_func):
    "Weights and optimizer are those after the last good batch, bit for bit"
    trainer = make_trainer(
        NonFiniteStopCB(every=1),
        end := EndCB(),
        batches=spoilt(make_batches(), i, value),
        valid=make_batches(2),
        opt_func=opt_func,
    )
    trainer.fit(4, lr=0.05)
    good = make_trainer(batches=make_batches()[: max(i, 1)], opt_func=opt_func)
    if i:
        good.fit(1, lr=0.05)
    assert torch.equal(weights(trainer), weights(good))
    if i:
        assert all(torch.equal(*o) for o in zip(opt_state(trainer), opt_state(good), strict=True))
    assert trainer.n_updates == i and len(trainer.history) == 1 and end.ended and end.logged == 1
    assert trainer.stop_reason == f"the loss was NaN or infinite at epoch 0, batch {i} (training)"
    assert math.isfinite(trainer.history["valid_loss"][0]) and (
        not i or math.isfinite(trainer.history["train_loss"][0])
    )


@pytest.mark.shows("PTA-20", "AIT-72", "F102")
@pytest.mark.parametrize("every", [2, 3, 100])
@pytest.mark.parametrize("opt_func", OPTIMIZERS, ids=["sgd", "momentum", "adamw"])
@pytest.mark.parametrize(
    "extra",
    [(), (lambda: AccumulationCB(2),), (lambda: ClipGradCB(1.0),), (lambda: ClipGradCB(max_value=0.1),)],
    ids=["alone", "accumulated", "clipped", "clipped by value"],
)
def test_without_waiting_nothing_bad_gets_into_weights_or_optimizer(every, opt_func, extra):
    "Whichever way the gradients go"
    for value in (nan, inf):
        trainer = make_trainer(
            NonFiniteStopCB(every),
            *[o() for o in extra],
            batches=spoilt(make_batches(), 4, value),
            opt_func=opt_func,
        )
        trainer.fit(5, lr=0.05)
        assert all(torch.isfinite(o).all() for o in [weights(trainer), *opt_state(trainer)])
        assert trainer.NonFiniteStopCB.found[0] == dict(what="loss", fit=0, epoch=0, training=True, batch=4)
        assert trainer.batch_num < 8 and len(trainer.history) == 1
        if opt_func is optim.SGD and not extra:
            good = make_trainer(batches=make_batches()[:4])
            good.fit(1, lr=0.05)
            assert torch.equal(weights(trainer), weights(good))
            assert trainer.n_updates == min(8, math.ceil(5 / every) * every)


class SqrtAtZero(nn.Module):
    "Its output is finite, and its gradient is not, when the input is zero"

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return self.linear(x).abs().sqrt()


@pytest.mark.shows("F102")
@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("steps", [BasicTrainCB, MomentumTrainCB])
def test_gradients_are_looked_at_too(every, steps):
    "A finite loss with an infinite gradient"
    batches = make_batches()
    batches[3] = torch.zeros_like(batches[3][0]), batches[3][1]
    trainer = make_trainer(
        NonFiniteStopCB(every), batches=batches, model=SqrtAtZero(), valid=make_batches(2), steps=steps()
    )
    trainer.fit(3, lr=0.01)
    assert (
        trainer.NonFiniteStopCB.found[0]["what"] == "gradient"
        and trainer.NonFiniteStopCB.found[0]["batch"] == 3
    )
    assert torch.isfinite(weights(trainer)).all() and len(trainer.history) == 1
    if every == 1:
        assert trainer.n_updates == 3 and all(p.grad is None for p in trainer.model.parameters())
    trainer = make_trainer(
        NonFiniteStopCB(every, gradients=False), batches=batches, model=SqrtAtZero(), valid=make_batches(2)
    )
    trainer.fit(1, lr=0.01)
    assert trainer.NonFiniteStopCB.found == [] or trainer.NonFiniteStopCB.found[0]["batch"] > 3, (
        "left to a loss scaler"
    )


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("first", [True, False])
def test_an_infinite_gradient_is_seen_before_clipping_makes_it_look_finite(every, first):
    "Clipping by value turns infinity into an ordinary number, so whoever looks must look before"

    class InfiniteCB:
        def after_backward(self, trainer):
            if trainer.batch_num == 2:
                trainer.model.weight.grad[0, 0] = inf

    pair = [NonFiniteStopCB(every), ClipGradCB(max_value=0.1)]
    trainer = make_trainer(InfiniteCB(), *(pair if first else pair[::-1]))
    trainer.fit(2)
    assert trainer.NonFiniteStopCB.found[0] == dict(what="gradient", fit=0, epoch=0, training=True, batch=2)
    good = make_trainer(ClipGradCB(max_value=0.1), batches=make_batches()[:2])
    good.fit(1)
    assert torch.equal(weights(trainer), weights(good))


@pytest.mark.shows("PTA-20")
@pytest.mark.parametrize("every", [1, 100])
def test_validation_is_looked_at_too(every):
    trainer = make_trainer(NonFiniteStopCB(every), valid=spoilt(make_batches(3), 1))
    trainer.fit(3)
    assert (
        trainer.stop_reason == "the loss was NaN or infinite at epoch 0, batch 1 (validation)"
        and len(trainer.history) == 1
    )


@pytest.mark.shows("F104")
def test_the_layer_is_named_by_another_callback_in_the_same_run():
    "They meet through the trainer, and a stop leaves both time to read"
    for every in (1, 100):
        heard = []
        model = nn.Sequential(nn.Linear(3, 4), nn.Threshold(0.0, nan), nn.Linear(4, 1))
        trainer = make_trainer(NonFiniteStopCB(every), NonFiniteCB(report=heard.append), model=model)
        trainer.fit(3)
        assert (
            len(heard) == 1
            and "output of `1` (Threshold)" in heard[0]
            and len(trainer.history) == 1
            and "loss" in trainer.stop_reason
        )


@pytest.mark.parametrize(
    "cb",
    [
        lambda: NonFiniteStopCB(1),
        lambda: NonFiniteStopCB(3),
        lambda: LossSpikeCB(1000.0),
        lambda: EarlyStoppingCB(patience=90),
        lambda: LimitCB(10**6, samples=10**6, seconds=1e6, epochs=99),
        lambda: SamePredictionsCB(),
    ],
)
@pytest.mark.parametrize("opt_func", OPTIMIZERS, ids=["sgd", "momentum", "adamw"])
def test_a_healthy_run_is_left_alone_bit_for_bit(cb, opt_func):
    plain, watched = make_trainer(opt_func=opt_func), make_trainer(cb(), opt_func=opt_func)
    for o in (plain, watched):
        o.fit(3, lr=0.01)
    assert torch.equal(weights(plain), weights(watched)) and watched.stop_reason is None
    assert plain.history["valid_loss"] == watched.history["valid_loss"]


def test_a_second_fit_knows_nothing_of_the_first():
    trainer = make_trainer(NonFiniteStopCB(), batches=spoilt(make_batches(), 2), valid=make_batches(2))
    trainer.fit(1)
    trainer.dls = DataLoaders(make_batches(), make_batches(2))
    before = weights(trainer)
    trainer.fit(2)
    assert (
        trainer.stop_reason is None and trainer.n_updates == 16 and not torch.equal(weights(trainer), before)
    )


def test_sparse_gradients_are_looked_at():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Flatten(), nn.Linear(4, 1))
    batches = [
        (torch.tensor([[0, 1], [1, 2]]), torch.tensor([[1.0], [nan if i == 2 else 2.0]])) for i in range(4)
    ]
    trainer = make_trainer(NonFiniteStopCB(), batches=batches, valid=batches[:1], model=model)
    trainer.fit(2)
    assert torch.isfinite(weights(trainer)).all() and trainer.NonFiniteStopCB.found[0]["batch"] == 2


# Spikes


def spiky(places, size=100.0):
    return [(x, y * size) if i in places else (x, y) for i, (x, y) in enumerate(make_batches(12))]


@pytest.mark.shows("F103")
def test_a_spike_is_found_and_does_not_enter_the_mean():
    "Two in a row are both found, and the mean stays"
    cb = LossSpikeCB(5.0, start_batch=3, stop=False, report=(heard := []).append)
    trainer = make_trainer(cb, batches=spiky({5, 6}), opt_func=lambda ps, lr: optim.SGD(ps, 0.0))
    trainer.fit(1)
    assert (
        [o["batch"] for o in cb.found] == [5, 6]
        and len(heard) == 1
        and "batch 5 (training)" in heard[0]
        and trainer.stop_reason is None
    )
    losses = [o for i, o in enumerate(trainer.history.batches["loss"][:12]) if i not in (5, 6)]
    mean = losses[0]
    for n, loss in enumerate(losses[1:5], 1):
        mean += (loss - mean) / (n + 1)
    for n, loss in enumerate(losses[5:], 7):
        mean += (loss - mean) * max(0.02, 1 / (n + 1))
    assert cb.state_dict()["mean"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("value", [nan, inf])
def test_nan_is_a_spike_and_never_spoils_the_mean(value):
    cb = LossSpikeCB(50.0, start_batch=2, stop=False, report=lambda text: None)
    trainer = make_trainer(
        cb, NonFiniteStopCB(1), batches=spoilt(make_batches(), 0, value), valid=make_batches(2)
    )
    trainer.fit(1)
    assert [o["batch"] for o in cb.found] == [0] and math.isfinite(cb.state_dict()["mean"])


@pytest.mark.shows("F103")
def test_read_at_once_a_spike_is_not_learnt_from_and_can_be_skipped_next_time():
    trainer = make_trainer(LossSpikeCB(5.0, start_batch=3, every=1), end := EndCB(), batches=spiky({7}))
    trainer.fit(2, lr=0.01)
    good = make_trainer(batches=make_batches(7))
    good.fit(1, lr=0.01)
    assert (
        torch.equal(weights(trainer), weights(good))
        and end.ended
        and "5 times its running mean at epoch 0, batch 7" in trainer.stop_reason
    )
    skip = [(o["epoch"], o["batch"]) for o in trainer.LossSpikeCB.found]
    trainer = make_trainer(LossSpikeCB(5.0, start_batch=3, skip=skip), batches=spiky({7}))
    trainer.fit(1, lr=0.01)
    assert trainer.n_updates == 11 and trainer.stop_reason is None


def test_small_changes_of_a_small_loss_are_no_spikes_with_a_least_size():
    options = dict(start_batch=3, stop=False, report=lambda text: None)
    often, never = LossSpikeCB(1.1, **options), LossSpikeCB(1.1, min_delta=100.0, **options)
    for o in (often, never):
        make_trainer(o).fit(1)
    assert often.found and not never.found


@pytest.mark.parametrize(
    "options",
    [
        dict(factor=1.0),
        dict(factor=nan),
        dict(decay=1.0),
        dict(decay=-0.1),
        dict(every=0),
        dict(start_batch=-5),
        dict(start_batch=2.5),
        dict(min_delta=-1),
        dict(min_delta=nan),
    ],
)
def test_a_spike_needs_sensible_settings(options):
    with pytest.raises(ValueError):
        LossSpikeCB(**options)


# The same prediction for everything


class Answers(nn.Module):
    "Gives the outputs it was told to, by the number of the epoch"

    def __init__(self, outputs):
        super().__init__()
        self.w, self.outputs, self.epoch = nn.Parameter(torch.zeros(())), outputs, 0

    def forward(self, x):
        return self.outputs[self.epoch] * 1.0 + self.w * 0


class EpochCB:
    order = Order.FIRST

    def before_epoch(self, trainer):
        trainer.model.epoch = trainer.epoch


def answer(*classes):
    return F.one_hot(torch.tensor(classes), 3)


SAME, OTHER, VARIED = answer(1, 1, 1, 1), answer(2, 2, 2, 2), answer(0, 1, 1, 2)


@pytest.mark.shows("AIT-27")
@pytest.mark.parametrize(
    "outputs, options, n",
    [
        ([VARIED, SAME, VARIED], {}, 2),
        ([VARIED] * 3, {}, 3),
        ([SAME, SAME], dict(value=2), 2),
        ([SAME, OTHER, SAME], dict(value=2), 2),
        ([SAME, VARIED, SAME, OTHER, SAME], dict(patience=2), 4),
        ([SAME, SAME, VARIED], dict(start_epoch=1), 2),
        ([torch.tensor([[1.0], [2.0], [3.0], [4.0]])] * 2, {}, 2),
        ([torch.ones(4, 1)] * 2, {}, 1),
        ([torch.tensor([[1.0], [2.0], [3.0], [4.0]])] * 2, dict(labels=lambda preds: preds > 0), 1),
        ([torch.full((4, 1), nan)] * 2, {}, 2),
    ],
)
def test_it_stops_when_all_predictions_of_a_validation_are_one(outputs, options, n):
    loss = lambda preds, targets: preds.float().mean()
    trainer = make_trainer(
        EpochCB(), SamePredictionsCB(**options), end := EndCB(), model=Answers(outputs), loss_func=loss
    )
    trainer.fit(len(outputs))
    assert (
        len(trainer.history) == n
        and end.ended
        and (n == len(outputs) or "predictions of the validation pass are" in trainer.stop_reason)
    )


@pytest.mark.shows("AIT-27")
def test_batches_of_one_class_each_are_not_all_the_same_and_a_warning_may_do():
    class PerBatchCB:
        def before_predict(self, trainer):
            trainer.model.epoch = trainer.batch_num % 2

    heard = []
    loss = lambda preds, targets: preds.float().mean()
    trainer = make_trainer(
        PerBatchCB(),
        SamePredictionsCB(stop=False, report=heard.append),
        model=Answers([SAME, OTHER]),
        loss_func=loss,
    )
    trainer.fit(2)
    assert heard == [] and len(trainer.history) == 2
    trainer.model.outputs = [SAME, SAME]
    trainer.fit(2)
    assert (
        len(heard) == 2
        and "all 8 predictions of the validation pass are 1. Has the model collapsed" in heard[0]
        and trainer.stop_reason is None
    )


def test_one_prediction_alone_is_no_sign_and_an_output_of_many_parts_is_an_error():
    loss = lambda preds, targets: preds.float().mean()
    trainer = make_trainer(
        SamePredictionsCB(), model=Answers([answer(1)]), valid=make_batches(1), loss_func=loss
    )
    trainer.fit(1)
    assert trainer.stop_reason is None

    class Parts(Answers):
        def forward(self, x):
            return dict(logits=super().forward(x))

    trainer = make_trainer(
        SamePredictionsCB(), model=Parts([SAME]), loss_func=lambda preds, targets: preds["logits"].sum()
    )
    with pytest.raises(TypeError, match="Pass `labels`"):
        trainer.fit(1)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(patience=0), "passes are counted"),
        (dict(start_epoch=-3), "epochs are numbered from 0"),
        (dict(start_epoch=True), "`start_epoch` is True"),
    ],
)
def test_when_it_counts_is_said_in_whole_numbers(options, words):
    with pytest.raises(ValueError, match=words):
        SamePredictionsCB(**options)
    with pytest.raises(TypeError):
        SamePredictionsCB(2)  # A number alone could be a patience as well


# All together


@pytest.mark.shows("AIT-75", "AIT-17", "PTA-14")
def test_several_reasons_in_one_run():
    "The first reason stops, and everybody hears of the end"
    trainer = make_trainer(
        EarlyStoppingCB(patience=50),
        NonFiniteStopCB(every=1),
        SamePredictionsCB(),
        LimitCB(12),
        end := EndCB(),
    )
    trainer.fit(9, lr=0.01)
    assert trainer.stop_reason == "12 updates are enough" and end.ended and end.logged == 2


@pytest.mark.shows("SON-06")
def test_the_first_reason_is_why_it_stops():
    "Later ones change nothing"

    def after_batch(trainer):
        trainer.request_stop(f"after batch {trainer.batch_num}")

    def log(trainer):
        trainer.request_stop("the epoch is over")

    trainer = make_trainer(after_batch, log)
    trainer.fit(2)
    assert trainer.stop_reason == "after batch 0" and trainer.n_updates == 1


@pytest.mark.shows("SON-06", "AIT-17", "PTA-14")
@pytest.mark.parametrize(
    "event, n_updates, n_rows",
    [("after_step", 3, 1), ("after_batch", 3, 1), ("after_epoch", 8, 1), ("log", 8, 1)],
)
def test_a_stop_waits_for_the_end_of_what_is_open(event, n_updates, n_rows):
    "The pass ends after its batch, the epoch closes with validation and its row, and `after_fit` runs"

    class StopCB:
        def __init__(self):
            setattr(self, event, self.ask)

        def ask(self, trainer):
            if trainer.n_updates >= 3:
                trainer.request_stop("enough")

    trainer = make_trainer(StopCB(), end := EndCB())
    trainer.fit(4)
    assert (trainer.n_updates, len(trainer.history), end.logged, end.ended) == (
        n_updates,
        n_rows,
        n_rows,
        True,
    )
    assert "valid_loss" in trainer.history[-1]


@pytest.mark.shows("AIT-72")
@pytest.mark.parametrize(
    "cb",
    [
        lambda: NonFiniteStopCB(),
        lambda: LossSpikeCB(),
        lambda: EarlyStoppingCB(),
        lambda: LimitCB(99, samples=999, seconds=99),
        lambda: SamePredictionsCB(),
    ],
)
def test_nothing_waits_inside_a_batch(cb):
    "Cheaply"
    with RefuseToWait() as mode:
        make_trainer(InsideCB(mode), cb()).fit(2, lr=0.01)


class StopAndGoCB:
    "Saves after one training batch; before the next makes a mess and restores"

    order = Order.SAVE

    def __init__(self, name, epoch, batch):
        self.callback_name, self.at = name, (epoch, batch)

    def after_batch(self, trainer):
        if trainer.training and (trainer.epoch, trainer.batch_num) == self.at:
            self.state = copy.deepcopy(getattr(trainer, self.callback_name).state_dict())

    def before_batch(self, trainer):
        if not trainer.training or (trainer.epoch, trainer.batch_num) != (self.at[0], self.at[1] + 1):
            return
        cb = getattr(trainer, self.callback_name)
        cb._start(trainer)
        for name in cb._kept:
            setattr(cb, name, getattr(type(cb), name, None) if name not in ("n_bad", "n_seen") else 99)
        cb.load_state_dict(self.state)


@pytest.mark.parametrize("at", [(0, 0), (0, 4), (1, 2)])
@pytest.mark.parametrize(
    "make, batches",
    [
        (lambda: EarlyStoppingCB("train_loss", 2, min_delta=0.5), make_batches()),
        (lambda: LimitCB(samples=75), make_batches()),
        (lambda: NonFiniteStopCB(6), spoilt(make_batches(), 4)),
        (lambda: NonFiniteStopCB(100), spoilt(make_batches(), 0)),
        (lambda: LossSpikeCB(2.0, start_batch=6, every=5), spiky({9})),
        (lambda: LossSpikeCB(2.0, start_batch=6, every=1, stop=False, report=str), spiky({9})),
        (lambda: SamePredictionsCB(patience=3, labels=lambda preds: preds * 0), make_batches()),
    ],
    ids=["early", "samples", "nan", "nan at once", "spike", "spikes", "same"],
)
def test_going_on_from_a_saved_state_is_never_having_stopped(make, batches, at):
    ends = []
    for stop_and_go in (False, True):
        cb = make()
        trainer = make_trainer(
            cb, *[StopAndGoCB(type(cb).__name__, *at)] * stop_and_go, batches=batches, valid=make_batches(2)
        )
        trainer.fit(5, lr=0.02)
        ends.append(
            (
                trainer.stop_reason,
                trainer.n_updates,
                len(trainer.history),
                weights(trainer).tolist(),
                {k: v for k, v in cb.state_dict().items() if k != "elapsed"},
            )
        )
    assert ends[0] == ends[1]
    assert ends[0][0] or not getattr(cb, "stop", True), "otherwise nothing would be shown"
