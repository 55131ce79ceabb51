"""Clipping against PyTorch's functions in a loop by hand, and against a unit-by-unit oracle.

When it happens is checked with an accumulation and with a loss scale that stand in its way; that nobody
waits, by making it impossible.
"""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.clipping import ClipGradCB, _clip_adaptive, _clip_norm, _with_entries
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.train.training import BasicTrainCB, MomentumTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelStepException, Order
from isaac_loop.loop.monitor import check_monitored
from isaac_loop.loop.trainer import Trainer
from waiting import InsideCB, RefuseToWait


def make_batches(n=6, rows=4):
    g = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, 3, generator=g), torch.randn(rows, 1, generator=g) * (1 + 5 * (i % 3 == 1)))
        for i in range(n)
    ]


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def make_trainer(*callbacks, steps=None, batches=None, opt_func=optim.SGD, model=None):
    batches = batches or make_batches()
    return Trainer(
        DataLoaders(batches, batches[:2]),
        F.mse_loss,
        opt_func,
        model or make_model(),
        [steps or BasicTrainCB(), *callbacks],
    )


def train_by_hand(model, clip, n_epochs=2, lr=0.1):
    "The same loop in plain PyTorch, and the norms before clipping"
    opt, norms = optim.SGD(model.parameters(), lr), []
    for _ in range(n_epochs):
        for x, y in make_batches():
            F.mse_loss(model(x), y).backward()
            norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
            clip(list(model.parameters()))
            opt.step()
            opt.zero_grad()
    return norms


def same(a, b):
    return all(torch.equal(*o) for o in zip(a.parameters(), b.parameters()))


def agc(params, share=0.05):
    "Adaptive clipping as the paper writes it, one unit at a time"
    for p in params:
        for g, w in [(p.grad, p.data)] if p.ndim < 2 else zip(p.grad, p.data):
            limit = share * max(w.norm().item(), 1e-3)
            if g.norm().item() > limit:
                g *= limit / g.norm()


# The three ways


@pytest.mark.shows("F025", "AIT-52", "AIT-53", "PTA-45", "SON-30")
@pytest.mark.parametrize(
    "cb, clip",
    [
        (lambda: ClipGradCB(0.5), lambda ps: clip_grad_norm_(ps, 0.5)),
        (lambda: ClipGradCB(0.5, norm_type=math.inf), lambda ps: clip_grad_norm_(ps, 0.5, math.inf)),
        (lambda: ClipGradCB(max_value=0.1), lambda ps: clip_grad_value_(ps, 0.1)),
    ],
    ids=["norm", "inf norm", "value"],
)
def test_weights_are_those_of_the_loop_by_hand(cb, clip):
    theirs = make_model()
    norms = train_by_hand(theirs, clip)
    trainer = make_trainer(cb())
    trainer.fit(2, lr=0.1, valid=False)
    assert same(trainer.model, theirs)
    if trainer.ClipGradCB.norm_type == 2:
        assert trainer.history.batches["grad_norm"] == pytest.approx(norms, rel=1e-5)


@pytest.mark.shows("F025")
def test_adaptive_clipping_is_that_of_the_paper():
    theirs = make_model()
    train_by_hand(theirs, agc)
    trainer = make_trainer(ClipGradCB(adaptive=0.05))
    trainer.fit(2, lr=0.1, valid=False)
    for a, b in zip(trainer.model.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b)


@settings(max_examples=50, deadline=None)
@given(
    shape=st.sampled_from([(3,), (1,), (), (2, 3), (4, 2, 3, 3)]),
    share=st.sampled_from([0.01, 0.5, 3.0]),
    size=st.sampled_from([0.0, 1e-6, 1.0]),
    seed=st.integers(0, 20),
)
def test_each_unit_is_below_its_limit_and_keeps_its_direction(shape, share, size, seed):
    torch.manual_seed(seed)
    p = nn.Parameter(torch.randn(shape) * size)
    p.grad = torch.randn(shape) * torch.rand(())
    before = p.grad.clone()
    reached = _clip_adaptive([p], share, 2.0)[1]
    units = (
        [(p.grad.reshape(1, -1), before.reshape(1, -1), p.data.reshape(1, -1))]
        if p.ndim < 2
        else [(p.grad.flatten(1), before.flatten(1), p.data.flatten(1))]
    )
    any_reached = False
    for new, old, weight in ((a, b, c) for x in units for a, b, c in zip(*x)):
        limit = share * max(weight.norm().item(), 1e-3)
        any_reached |= old.norm().item() > limit
        assert new.norm().item() <= limit * (1 + 1e-5) or torch.equal(new, old)
        torch.testing.assert_close(
            new, old * min(1, limit / max(old.norm().item(), 1e-30)), rtol=1e-4, atol=1e-8
        )
    assert bool(reached) == any_reached


def test_a_gradient_of_zeros_stays():
    "No division by its norm"
    for cb in (ClipGradCB(1.0), ClipGradCB(max_value=1.0), ClipGradCB(adaptive=0.1), ClipGradCB(math.inf)):

        class ZeroCB:
            order = Order.FIRST

            def before_step(self, trainer):
                for p in trainer.model.parameters():
                    p.grad.zero_()

        trainer = make_trainer(ZeroCB(), cb)
        trainer.fit(1, valid=False)
        assert same(trainer.model, make_model()) and trainer.history["grad_norm"] == [0.0]


@pytest.mark.shows("SON-30")
@pytest.mark.parametrize("steps", [BasicTrainCB, MomentumTrainCB])
def test_an_infinite_limit_only_measures(steps):
    "The norm is always measured; weights bit for bit the same"
    plain, measured = make_trainer(steps=steps()), make_trainer(ClipGradCB(math.inf), steps=steps())
    for o in (plain, measured):
        o.fit(2, lr=0.05, valid=False)
    assert same(plain.model, measured.model)
    assert (
        measured.history["grad_norm_clipped_share"] == [0.0, 0.0]
        and len(measured.history.batches["grad_norm"]) == 12
    )


def test_only_the_chosen_parameters_are_clipped():
    model = make_model()
    theirs = copy.deepcopy(model)
    train_by_hand(theirs, lambda ps: clip_grad_norm_(ps[:2], 0.1))
    trainer = make_trainer(ClipGradCB(0.1, params=lambda trainer: trainer.model[0].parameters()), model=model)
    trainer.fit(2, lr=0.1, valid=False)
    assert same(model, theirs)


def test_frozen_parameters_and_a_model_without_gradients_are_no_trouble():
    model = make_model()
    model[0].requires_grad_(False)
    make_trainer(ClipGradCB(0.1), model=model).fit(1)
    trainer = make_trainer(ClipGradCB(0.1, params=lambda trainer: trainer.model[0].parameters()), model=model)
    trainer.fit(1)
    assert trainer.ClipGradCB.norm is None and len(trainer.history) == 0


# When


@pytest.mark.shows("PTA-52", "NEMO-05")
def test_it_clips_once_per_update_and_the_whole_sum():
    "The pieces of an accumulation are not clipped, and the norm is that of the sum"
    big = [tuple(map(torch.cat, zip(*make_batches()[i : i + 3]))) for i in (0, 3)]
    a, b = make_trainer(AccumulationCB(3), ClipGradCB(0.5)), make_trainer(ClipGradCB(0.5), batches=big)
    for o in (a, b):
        o.fit(2, lr=0.1, valid=False)
    for p, q in zip(a.model.parameters(), b.model.parameters()):
        torch.testing.assert_close(p, q)
    assert a.history["grad_norm"] == pytest.approx(b.history["grad_norm"], rel=1e-4)
    norms = a.history.batches["grad_norm"]
    assert a.history.batches["batch"] == [2, 5] * 2 and len(norms) == 4


class ScaleCB:
    "Scales the loss, and divides the gradients again before the step, as a precision callback does"

    order = Order.PRECISION

    def before_backward(self, trainer):
        self.loss, trainer.loss = trainer.loss, trainer.loss * 1024.0

    def cleanup_backward(self, trainer):
        trainer.loss = self.loss

    def before_step(self, trainer):
        for p in trainer.model.parameters():
            p.grad /= 1024.0


@pytest.mark.shows("PTA-52", "AIT-52", "AIT-53", "F021")
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("accumulate", [False, True])
def test_it_comes_after_un_scaling_wherever_it_stands(position, accumulate):
    callbacks = [ClipGradCB(0.5), *[AccumulationCB(2)] * accumulate]
    plain = make_trainer(*callbacks)
    scaled = make_trainer(
        *[ClipGradCB(0.5), ScaleCB()][:: 1 if position else -1], *[AccumulationCB(2)] * accumulate
    )
    for o in (plain, scaled):
        o.fit(2, lr=0.1, valid=False)
    assert same(plain.model, scaled.model), "powers of two change nothing"


def test_a_step_that_is_refused_leaves_no_norm():
    class RefuseCB:
        order = Order.STEP + 1

        def before_step(self, trainer):
            if trainer.batch_num != 2:
                raise CancelStepException("no")

    trainer = make_trainer(ClipGradCB(0.5), RefuseCB())
    trainer.fit(1, valid=False)
    assert trainer.history.batches["batch"] == [2]


@pytest.mark.parametrize(
    "limit", [dict(max_norm=0.1), dict(max_norm=math.inf), dict(max_value=0.1), dict(adaptive=0.1)]
)
def test_nothing_waits_inside_a_batch(limit):
    with RefuseToWait() as mode:
        make_trainer(InsideCB(mode), ClipGradCB(**limit)).fit(1)


# The history


def test_the_columns_are_declared_and_can_be_renamed_or_left_out():
    trainer = make_trainer(MetricsCB(show=False), ClipGradCB(0.5, column="length"))
    assert check_monitored(trainer, "length", "me") and check_monitored(trainer, "length_clipped_share", "me")
    trainer.fit(1)
    assert {"length", "length_clipped_share", "train_loss", "valid_loss"} <= set(trainer.history.names())
    trainer = make_trainer(MetricsCB(show=False), ClipGradCB(0.5, column=None))
    trainer.fit(1)
    assert (
        trainer.history.names() == ["fit", "epoch", "train_loss", "valid_loss", "elapsed"]
        and trainer.ClipGradCB.norm > 0
    )


def test_two_ways_in_one_run_are_two_callbacks():
    first, second = ClipGradCB(max_value=0.1), ClipGradCB(0.1, column="after")
    second.name = "second"
    trainer = make_trainer(first, second)
    trainer.fit(1, valid=False)
    assert trainer.history["after"][0] < trainer.history["grad_norm"][0]


@pytest.mark.parametrize("at", range(5))
def test_going_on_from_a_saved_state_is_never_having_stopped(at):
    class StopAndGoCB:
        def after_batch(self, trainer):
            if trainer.training and trainer.batch_num == at:
                self.state = trainer.ClipGradCB.state_dict()

        def before_batch(self, trainer):
            if trainer.training and trainer.batch_num == at + 1:
                trainer.ClipGradCB._record = None
                trainer.ClipGradCB.load_state_dict(self.state)

    rows = []
    for callbacks in ([], [StopAndGoCB()]):
        trainer = make_trainer(AccumulationCB(2), ClipGradCB(0.5), *callbacks)
        trainer.fit(2, lr=0.1)
        rows.append((list(trainer.history), list(trainer.history.batches["grad_norm"])))
    assert rows[0] == rows[1]


def test_a_state_loaded_before_the_pass_begins_is_kept_for_it():
    cb = ClipGradCB(math.inf)

    class LoadCB:
        order = Order.SAVE

        def before_fit(self, trainer):
            cb.load_state_dict(dict(values=[[8.0, 1.0]], places=[[0, 0, 1, 0]]))

        def before_epoch(self, trainer):
            trainer.start_batch, trainer.batches = 1, make_batches()[1:3]

    trainer = make_trainer(cb, LoadCB())
    trainer.fit(1, valid=False)
    assert trainer.history.batches["batch"] == [0, 1, 2] and trainer.history.batches["grad_norm"][0] == 8
    assert trainer.history["grad_norm_clipped_share"] == pytest.approx([1 / 3])


# Bad input


@pytest.mark.parametrize("limits", [{}, dict(max_norm=1.0, max_value=1.0), dict(max_value=1.0, adaptive=0.1)])
def test_exactly_one_limit_is_given(limits):
    with pytest.raises(ValueError, match="Give it one of `max_norm`"):
        ClipGradCB(**limits)


@pytest.mark.parametrize("limit", [0, -1.0, math.nan, True, "1", torch.tensor(1.0)])
@pytest.mark.parametrize("kind", ["max_norm", "max_value", "adaptive"])
def test_a_limit_is_a_number_above_zero(kind, limit):
    with pytest.raises(ValueError, match=f"`{kind}` is"):
        ClipGradCB(**{kind: limit})


@pytest.mark.parametrize("norm_type", [math.nan, 0, -1, True, "nan"])
def test_what_is_no_exponent_of_a_norm_is_refused(norm_type):
    "With NaN all weights were NaN after one epoch"
    with pytest.raises(ValueError, match=f"`norm_type` is {norm_type!r}.*above 0"):
        ClipGradCB(0.5, norm_type=norm_type)


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 1)
        self.words.weight.data[3] = 0  # Its norm counts as a little

    def forward(self, x):
        return self.head(self.words(x).mean(1))


@pytest.mark.parametrize(
    "limit",
    [
        dict(max_norm=0.05),
        dict(max_value=0.005),
        dict(adaptive=0.01),
        dict(max_norm=math.inf),
        dict(max_norm=0.05, norm_type=math.inf),
        dict(max_norm=1e6),
    ],
)
def test_sparse_gradients_are_clipped_like_the_same_ones_with_all_their_zeros(limit):
    "Words that come twice in a batch, and words that never come; PyTorch raised a NotImplementedError"
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randint(6, (4, 3), generator=g), torch.randn(4, 1, generator=g)) for _ in range(5)]

    def trained(sparse):
        trainer = Trainer(
            DataLoaders(batches, batches),
            F.mse_loss,
            optim.SGD,
            Words(sparse),
            [BasicTrainCB(), MetricsCB(show=False), ClipGradCB(**limit)],
        )
        trainer.fit(2, lr=0.5)
        return trainer

    sparse, dense = trained(True), trained(False)
    for a, b in zip(sparse.model.parameters(), dense.model.parameters()):
        assert torch.allclose(a, b, atol=1e-6)
    assert (
        sparse.history["grad_norm"] == pytest.approx(dense.history["grad_norm"], rel=1e-5)
        and sparse.history["grad_norm_clipped_share"] == dense.history["grad_norm_clipped_share"]
    )


def test_a_sparse_gradient_without_entries_or_without_rows():
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 2), (3, 2), check_invariants=True
    )
    assert _with_entries([p]) == []
    p.grad = torch.sparse_coo_tensor([[0, 2], [1, 1]], [3.0, 4.0], (3, 2), check_invariants=True)
    with pytest.raises(ValueError, match="Use `max_norm` or `max_value`"):
        _clip_adaptive(_with_entries([p]), 0.1, 2.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtypes", [("float32",), ("float64",), ("bfloat16",), ("float32", "float64")])
def test_gradients_are_clipped_as_by_torch_digit_for_digit(norm_type, dtypes):
    torch.manual_seed(1)
    for scale in (1e-3, 1.0, 1e3, math.nan):
        mine, theirs = [], []
        for dtype in dtypes:
            grad = torch.randn(7, 3).to(getattr(torch, dtype)) * scale
            for params in (mine, theirs):
                params.append(nn.Parameter(torch.zeros_like(grad)))
                params[-1].grad = grad.clone()
        norm, _ = _clip_norm(mine, 0.7, norm_type)
        expected = clip_grad_norm_(theirs, 0.7, norm_type)
        assert torch.equal(norm.nan_to_num(), expected.nan_to_num())
        for p, q in zip(mine, theirs):
            assert torch.equal(p.grad.nan_to_num(), q.grad.nan_to_num())


@pytest.mark.parametrize("nothing", [None, ()])
def test_where_nothing_is_to_be_clipped_nothing_is_recorded(nothing):
    "As in the turn of another player; here in every second batch"
    clip = ClipGradCB(1e-3, params=lambda t: t.model.parameters() if t.batch_num % 2 else nothing)
    norms = []

    def after_step(trainer):
        grads = [p.grad for p in trainer.model.parameters()]
        norms.append(nn.utils.get_total_norm(grads).item())

    trainer = make_trainer(clip, after_step)
    trainer.fit(1, lr=0.1, valid=False)
    assert [norm > 1e-3 + 1e-6 for norm in norms] == [True, False] * 3
    assert trainer.history.batches["batch"] == [1, 3, 5]
