"""Snapshots of models, optimizers and trainers, checked with a walk through all objects (`observing.py`).

Whatever happens inside `with trainer.snapshot()` did not happen: every value, every identity and every
random number is as before. Data is never copied, and what belongs to the world outside is left alone.
"""

import collections
import contextlib
import copy
import functools
import io
import random
import sys
import types
from types import SimpleNamespace as NS
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from observing import bits, differences, observe, random_states, unchanged
from isaac_loop.all import (
    BasicTrainCB,
    CancelFitException,
    DataLoaders,
    History,
    MetricsCB,
    MomentumTrainCB,
    NBatchCB,
    Order,
    ProgressCB,
    TrackingCB,
    Trainer,
    set_seed,
)
from isaac_loop.state.random_numbers import random_state, set_random_state
from isaac_loop.state.snapshot import Snapshot
from snapshots import (
    HoldCB,
    make_batches,
    make_trainer,
    named,
    Plain,
    Resuming,
    rows,
    sampled,
    seeded,
    Slotted,
    tag,
)


# Models and optimizers


class Tied(nn.Module):
    "The last layer shares its weight with the first"

    def __init__(self):
        super().__init__()
        self.first, self.last, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.head(self.last(torch.relu(self.first(x))))


class Counting(nn.Module):
    "Replaces its buffer at every call, and keeps a plain tensor, a list and a number"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.plain, self.shapes, self.n = torch.zeros(3), [], 0

    def forward(self, x):
        self.calls = self.calls + 1
        self.hidden += 1
        out = self.layer(x)
        self.plain = out.detach().mean(0)
        self.shapes.append(x.shape)
        self.n += 1
        return out


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head, self.state = nn.LSTM(1, 5), nn.Linear(5, 3), None

    def forward(self, x):
        out, self.state = self.rnn(x.T[..., None])
        return self.head(out[-1])


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4, max_norm=1.0), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.embedding((x.abs() * 3).long().clamp(max=9)).mean(1))


def frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    return model


MODELS = {
    "linear": lambda: nn.Linear(4, 3),
    "batch norm and dropout": lambda: nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)
    ),
    "tied": Tied,
    "buffers replaced": Counting,
    "recurrent": Recurrent,
    "embedding": Embedded,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    "frozen": frozen,
    "double": lambda: nn.Sequential(Doubled(), nn.Linear(4, 3).double()),
}


class Doubled(nn.Module):
    def forward(self, x):
        return x.double()


OPTIMIZERS = {
    "sgd with momentum": functools.partial(optim.SGD, momentum=0.9, nesterov=True),
    "adam": optim.Adam,
    "adamw amsgrad": functools.partial(optim.AdamW, amsgrad=True),
    "rmsprop": functools.partial(optim.RMSprop, centered=True, momentum=0.5),
    "lbfgs": functools.partial(optim.LBFGS, max_iter=2),
}


class ClosureCB:
    "Steps with a closure, which every optimizer takes"

    def predict(self, trainer):
        pass

    def get_loss(self, trainer):
        pass

    def backward(self, trainer):
        pass

    def zero_grad(self, trainer):
        pass

    def step(self, trainer):
        def closure():
            trainer.opt.zero_grad()
            trainer.loss = trainer.loss_func(trainer.model(trainer.batch[0]), trainer.batch[1])
            trainer.loss.backward()
            return trainer.loss

        trainer.opt.step(closure)


@pytest.mark.shows("ISA-68")
@pytest.mark.parametrize("fresh", [True, False], ids=["never trained", "trained"])
@pytest.mark.parametrize("opt_func", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_training_in_the_block_did_not_happen(make_model, opt_func, fresh):
    "Every value and identity is as before, and the future is the same"
    trainer = Trainer(DataLoaders(make_batches()), F.cross_entropy, opt_func, make_model(), ClosureCB())
    if not fresh:
        trainer.fit(1, lr=0.01, valid=False)
    before, numbers = observe(trainer), random_states()
    with trainer.snapshot() as snapshot:
        trainer.fit(2, lr=0.02, valid=False)
        trainer.model.eval()
        random.random(), torch.rand(1), np.random.rand()
    unchanged(trainer, before)
    assert random_states() == numbers
    futures = []
    for _ in range(2):
        trainer.fit(1, lr=0.02, valid=False, keep_opt=not fresh)
        futures.append([bits(o) for o in trainer.model.state_dict().values()])
        snapshot.restore()
    assert futures[0] == futures[1]
    unchanged(trainer, before)


def test_the_observer_sees_training():
    "The walk these tests rely on notices each kind of change"
    trainer = make_trainer([MetricsCB()], model=MODELS["batch norm and dropout"]())
    before = observe(trainer)
    trainer.fit(1)
    changed = differences(before, observe(trainer))
    for name in ("weight", "running_mean", "training", "opt", "rows", "n_updates"):
        assert any(name in o for o in changed), name


# Single tensors and gradients


def leaf():
    return nn.Parameter(torch.arange(6.0).reshape(2, 3))


def with_grad():
    p = leaf()
    p.grad = torch.ones_like(p)
    return p


def half_free():
    p = leaf()
    p.data = torch.zeros(2, 3)
    return p


def accumulate(x):
    x.add_(torch.ones((), requires_grad=True) * 2)


def set_grad(x):
    x.grad = torch.full_like(x, 7)


def backward(x):
    (x * 2).sum().backward()


def drop_grad(x):
    x.grad = None


def scale_grad(x):
    x.grad.mul_(3)


def replace_data(x):
    x.data = torch.full((2, 3), 9.0)


def cut_data(x):
    x.data = x.data[:1]


def turn_data(x):
    x.data = x.data.t()


def halve(x):
    x.data = x.data.half()


def resize(x):
    x.resize_(4, 4).fill_(1)


def embed_sparse():
    layer = nn.Embedding(5, 2, sparse=True)
    layer(torch.tensor([1, 2])).sum().backward()
    return layer.weight


def inferred():
    with torch.inference_mode():
        return torch.zeros(3)


def reached_by_graph():
    x = torch.ones(3, requires_grad=True)
    return x * 2


@pytest.mark.parametrize(
    "make, change",
    [
        named("in place", leaf, lambda x: x.data.add_(1)),
        named("in place without grad", lambda: torch.zeros(3), lambda x: x.add_(1)),
        named("whole numbers", lambda: torch.arange(3), lambda x: x.add_(1)),
        named("bool", lambda: torch.tensor([True, False]), lambda x: x.logical_not_()),
        named("bfloat16", lambda: torch.zeros(3, dtype=torch.bfloat16), lambda x: x.add_(1)),
        named("complex", lambda: torch.zeros(3, dtype=torch.complex64), lambda x: x.add_(1j)),
        named("scalar", lambda: torch.tensor(1.0), lambda x: x.add_(1)),
        named("empty", lambda: torch.empty(0, 3), lambda x: None),
        named(
            "nan and infinity", lambda: torch.tensor([float("nan"), float("inf"), -0.0]), lambda x: x.zero_()
        ),
        named("transposed", lambda: torch.arange(6.0).reshape(2, 3).t(), lambda x: x.add_(1)),
        named(
            "channels last",
            lambda: torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last),
            lambda x: x.add_(1),
        ),
        named("result of a computation", reached_by_graph, lambda x: x.data.add_(1)),
        named("inference tensor", inferred, lambda x: None),
        named("meta", lambda: torch.zeros(3, device="meta"), lambda x: None),
        named("gradient made", leaf, backward),
        named("gradient set", leaf, set_grad),
        named("gradient dropped", with_grad, drop_grad),
        named("gradient scaled", with_grad, scale_grad),
        named("gradient added to", with_grad, backward),
        named("gradient replaced", with_grad, set_grad),
        named("frozen", leaf, lambda x: x.requires_grad_(False)),
        named("thawed", lambda: leaf().requires_grad_(False), lambda x: x.requires_grad_(True)),
        named("data replaced", leaf, replace_data),
        named("data replaced before", half_free, replace_data),
        named("half precision", leaf, halve),
        named("data cut", leaf, cut_data),
        named("data turned", leaf, turn_data),
        named("resized", lambda: torch.zeros(2), resize),
        named("became part of a graph", lambda: torch.zeros(()), accumulate),
        named("expanded", lambda: torch.zeros(1).expand(5), lambda x: None),
        named("sparse gradient", embed_sparse, lambda x: None),
        named("sparse", lambda: torch.eye(3).to_sparse(), lambda x: None),
        named("attribute", leaf, tag),
    ],
)
def test_a_tensor_is_put_back(make, change):
    "Values, gradient, `requires_grad`, shape and type are as before"
    x = make()

    def describe():
        return (
            None if x.is_meta else bits(x),
            x.stride() if not x.is_sparse else None,
            x.requires_grad,
            x.is_leaf,
            x.is_leaf and x.grad,
            x.is_leaf and x.grad is not None and bits(x.grad),
            getattr(x, "tag", None),
        )

    before = describe()
    root = NS(x=x)
    with Snapshot(root):
        change(x)
    assert root.x is x
    after = describe()
    assert after[4] is before[4], "another gradient"
    assert after[:4] + after[5:] == before[:4] + before[5:]


def test_views_of_one_memory_stay_views():
    flat = torch.arange(6.0)
    root = NS(view=flat[:3], flat=flat, again=flat[::2])
    with Snapshot(root):
        flat.add_(10)
        root.view = None
    assert flat.tolist() == list(range(6))
    flat[0] = 42
    assert root.view[0] == root.again[0] == 42


def test_a_hook_on_a_parameter_is_taken_away():
    p, hits = leaf(), []
    with Snapshot(NS(p=p)):
        p.register_hook(lambda grad: hits.append(1))
    backward(p)
    assert not hits


# Models that are rebuilt in the block


def add_module(m):
    m.add_module("new", nn.Linear(2, 2))


def remove_module(m):
    del m[1]


def replace_module(m):
    m[0] = nn.Linear(4, 4)


def replace_parameter(m):
    m[0].weight = nn.Parameter(torch.zeros(4, 4))


def add_buffer(m):
    m.register_buffer("new", torch.zeros(2))


def to_half(m):
    m.half()


def remove_parameter(m):
    m[0].register_parameter("bias", None)


def hook(m):
    m.register_forward_hook(lambda *a: torch.zeros(1, 3))


def load(m):
    m.load_state_dict({k: torch.zeros_like(v) for k, v in m.state_dict().items()})


def load_assigned(m):
    m.load_state_dict({k: torch.zeros_like(v) for k, v in m.state_dict().items()}, assign=True)


def patch_forward(m):
    m.forward = lambda x: None


def one_to_eval(m):
    m[1].eval()


def weight_norm(m):
    nn.utils.parametrizations.weight_norm(m[0])


def prune_some(m):
    prune.random_unstructured(m[0], "weight", 0.5)


def share(m):
    m.share_memory()


@pytest.mark.parametrize(
    "change",
    [
        add_module,
        remove_module,
        replace_module,
        replace_parameter,
        add_buffer,
        remove_parameter,
        hook,
        load,
        load_assigned,
        patch_forward,
        one_to_eval,
        prune_some,
        share,
        to_half,
        weight_norm,
    ],
)
def test_a_model_that_is_rebuilt_in_the_block_is_the_old_one(change):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    root = NS(model=model, opt=optim.Adam(model.parameters()))
    x = make_batches()[0][0]
    for _ in range(2):
        model(x).sum().backward() or root.opt.step()
    before = observe(root)
    with Snapshot(root):
        expected = model(x)
        change(model)
    unchanged(root, before)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    "make",
    [
        named("lazy", lambda: nn.LazyLinear(3)),
        named("compiled", lambda: torch.compile(nn.Linear(4, 3), backend="eager")),
        named("old weight norm", lambda: nn.utils.weight_norm(nn.Linear(4, 3))),
        named("list and dict", lambda: nn.Sequential(nn.Linear(4, 3), NotCalled())),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_unusual_modules_can_be_put_back(make):
    model = make()
    with Snapshot(NS(model=model)):
        pass
    x = make_batches()[0][0]
    with Snapshot(NS(model=model)) as snapshot:
        expected = model(x).detach().clone()
        model.eval()
        for p in model.parameters():
            p.data.add_(1)
    assert all(o.training for o in model.modules())
    assert torch.equal(model(x), expected)
    snapshot.restore()


class NotCalled(nn.Module):
    "Has its parts in lists and dicts"

    def __init__(self):
        super().__init__()
        self.parts, self.by_name, self.free = (
            nn.ModuleList([nn.Linear(2, 2)]),
            nn.ParameterDict({"a": torch.zeros(2)}),
            nn.ParameterList([torch.ones(1)]),
        )

    def forward(self, x):
        return x


# Schedulers, scalers, averages

SCHEDULERS = {
    "step": lambda opt: optim.lr_scheduler.StepLR(opt, 1),
    "one cycle": lambda opt: optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=50),
    "cosine": lambda opt: optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "plateau": lambda opt: optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "lambda": lambda opt: optim.lr_scheduler.LambdaLR(opt, lambda n: 0.9**n),
    "chain": lambda opt: optim.lr_scheduler.SequentialLR(
        opt, [optim.lr_scheduler.ConstantLR(opt), optim.lr_scheduler.ExponentialLR(opt, 0.5)], [2]
    ),
}


class ScheduleCB:
    "A scheduler over the whole life of an optimizer"

    order = Order.SCHEDULE

    def __init__(self, make):
        self.make, self.scheduler = make, None

    def before_fit(self, trainer):
        self.scheduler = self.scheduler or self.make(trainer.opt)

    def after_batch(self, trainer):
        if isinstance(self.scheduler, optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(5)
        else:
            self.scheduler.step()


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_goes_on_where_it_was(make):
    trainer = make_trainer([ScheduleCB(make)], opt_func=functools.partial(optim.SGD, momentum=0.9))
    trainer.fit(1, valid=False)
    before = observe(trainer)
    lrs = []
    for _ in range(2):
        with trainer.snapshot():
            trainer.fit(2, valid=False, keep_opt=True, callbacks=(rates := RatesCB()))
        lrs.append(rates.lrs)
        unchanged(trainer, before)
    assert lrs[0] == lrs[1] and len(set(lrs[0])) > 1


class RatesCB:
    order = Order.LAST

    def __init__(self):
        self.lrs = []

    def after_batch(self, trainer):
        self.lrs.append(trainer.opt.param_groups[0]["lr"])


class ScaledCB(BasicTrainCB):
    "Loss scaling and an average of the weights, as users write them"

    def __init__(self, model):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        self.ema = optim.swa_utils.AveragedModel(
            model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.best, self.values = copy.deepcopy(model.state_dict()), collections.deque(maxlen=3)

    def backward(self, trainer):
        self.scaler.scale(trainer.loss).backward()

    def step(self, trainer):
        self.scaler.step(trainer.opt)
        self.scaler.update()
        self.ema.update_parameters(trainer.model)
        self.best = {k: v.clone() for k, v in trainer.model.state_dict().items()}
        self.values.append(trainer.loss.detach())


def test_scalers_and_averages_go_on_where_they_were():
    model = MODELS["batch norm and dropout"]()
    cb = ScaledCB(model)
    trainer = Trainer(DataLoaders(make_batches()), F.cross_entropy, optim.Adam, model, cb)
    trainer.fit(1, valid=False)
    before, scale = observe(trainer), cb.scaler.get_scale()
    with trainer.snapshot():
        trainer.fit(2, valid=False)
        assert cb.scaler.get_scale() != scale
    unchanged(trainer, before)
    assert cb.scaler.get_scale() == scale


# Random numbers


def test_the_random_numbers_of_everybody_go_on():
    drawn = []
    with Snapshot(NS()) as snapshot:
        for _ in range(2):
            drawn.append(
                [
                    random.random(),
                    random.gauss(0, 1),
                    torch.rand(2).tolist(),
                    torch.randn(1).item(),
                    np.random.rand(),
                    np.random.randn(),
                ]
            )
            snapshot.restore()
    assert drawn[0] == drawn[1]


def test_random_state_is_a_copy():
    state = random_state()
    before = random_states()
    torch.rand(5), random.random(), np.random.rand()
    set_random_state(state)
    assert random_states() == before
    torch.rand(5)
    set_random_state(state)
    assert random_states() == before


def test_random_numbers_without_numpy(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    state = random_state()
    assert "numpy" not in state
    drawn = torch.rand(2)
    set_random_state(state)
    assert torch.equal(torch.rand(2), drawn)


def test_seeding_in_the_block_is_taken_back():
    trainer = make_trainer()
    torch.rand(3)
    before = random_states()
    with trainer.snapshot():
        set_seed(5)
    assert random_states() == before


# Snapshots of trainers


def test_what_is_kept_is_not_put_back():
    kept, lost = HoldCB(), HoldCB()
    lost.name = "lost"
    trainer = make_trainer([kept, lost])
    with trainer.snapshot(keep=[kept]):
        kept.n = lost.n = 5
    assert kept.n == 5 and not hasattr(lost, "n")


@pytest.mark.parametrize(
    "error", [ValueError, KeyboardInterrupt, SystemExit, CancelFitException, StopIteration, GeneratorExit]
)
def test_an_error_in_the_block_comes_out_and_everything_is_put_back(error):
    trainer = make_trainer([MetricsCB(), ProgressCB("plain")])
    before, numbers = observe(trainer), random_states()

    def after_epoch(trainer):
        raise error("enough")

    with pytest.raises(error, match="enough"), trainer.snapshot():
        trainer.fit(1)
        trainer.fit(1, callbacks=after_epoch)
        raise error("enough")
    unchanged(trainer, before)
    assert random_states() == numbers


def test_an_exception_is_put_back_without_a_word_of_its_own():
    error = ValueError("mine")
    with pytest.raises(ValueError) as e, Snapshot(NS(error=error)):
        raise error
    assert e.value is error and not hasattr(error, "__notes__")


def test_snapshots_nest():
    trainer = make_trainer([MetricsCB()])
    trainer.fit(1)
    states = [observe(trainer)]
    with trainer.snapshot():
        trainer.fit(1)
        states.append(observe(trainer))
        with trainer.snapshot():
            trainer.fit(1, lr=5.0)
            trainer.remove_callbacks("MetricsCB", delete=True)
        unchanged(trainer, states[1])
    unchanged(trainer, states[0])


def test_snapshots_may_be_restored_in_any_order():
    trainer = make_trainer([MetricsCB()])
    snapshots, states = [], []
    for _ in range(3):
        snapshots.append(trainer.snapshot())
        states.append(observe(trainer))
        trainer.fit(1)
    for i in (1, 2, 0, 2, 1, 1, 0):
        snapshots[i].restore()
        unchanged(trainer, states[i])


def test_the_history_is_put_back():
    trainer = make_trainer([MetricsCB(), TrackingCB()])
    trainer.fit(2)
    history, batches = trainer.history, trainer.history.batches
    rows, columns = [dict(o) for o in history], {k: list(v) for k, v in batches.columns.items()}
    with trainer.snapshot():
        trainer.fit(2)
        history.write(more=1)
        trainer.history = History()
    assert trainer.history is history and history.batches is batches and history.fit == 0
    assert list(history) == rows and {k: list(v) for k, v in batches.columns.items()} == columns
    trainer.fit(1)
    assert [o["fit"] for o in history] == [0, 0, 1] and len(batches) == len(columns["fit"]) * 3 // 2


def test_callbacks_come_and_go_and_are_back():
    kept, gone = HoldCB(), RatesCB()
    trainer = make_trainer([kept, gone])
    with trainer.snapshot():
        trainer.remove_callback(gone, delete=True)
        trainer.add_callback(NBatchCB())
        trainer.add_callback(type("HoldCB", (), {"log": lambda self, trainer: None})(), force=True)
        assert trainer.HoldCB is not kept
    assert trainer.HoldCB is kept and trainer.RatesCB is gone and not hasattr(trainer, "NBatchCB")
    trainer.fit(1)
    assert len(gone.lrs) == 5


@pytest.mark.parametrize(
    "event",
    [
        "before_fit",
        "before_epoch",
        "before_batch",
        "after_predict",
        "after_backward",
        "after_batch",
        "log",
        "cleanup_fit",
    ],
)
def test_a_snapshot_within_a_fit_puts_back_that_moment(event):
    "Taken and restored in one event, with training in between, it changes nothing"
    results = []
    for trial in (False, True):
        set_seed(3)
        trainer = make_trainer(
            [MetricsCB()], train=DataLoader(rows(), 8, shuffle=True), model=MODELS["batch norm and dropout"]()
        )

        def look(trainer):
            if not trial:
                return
            before = observe(trainer)
            with trainer.snapshot():
                for p in trainer.model.parameters():
                    p.data.add_(1)
                trainer.batch_num, trainer.new = 9, 1
                trainer.history.start_fit()
                torch.rand(1)
                trainer.request_stop()
            unchanged(trainer, before)

        look.__name__ = event
        trainer.fit(2, callbacks=look)
        for row in trainer.history.rows:
            row.pop("elapsed")
        results.append(
            (
                [bits(o) for o in trainer.model.state_dict().values()],
                trainer.history.rows,
                list(trainer.history.batches),
                torch.rand(1),
            )
        )
    assert results[0] == results[1]


def test_a_snapshot_within_a_fit_puts_the_weights_back_after_it():
    taken = []

    def after_epoch(trainer):
        if trainer.training and trainer.epoch == 0:
            taken.append((trainer.snapshot(), [bits(p) for p in trainer.model.parameters()]))

    trainer = make_trainer()
    trainer.fit(3, callbacks=after_epoch)
    taken[0][0].restore()
    assert [bits(p) for p in trainer.model.parameters()] == taken[0][1]


def fit_on_the_side(trainer):
    with trainer.snapshot():
        trainer.fit(1, lr=0.1)


TRIES = {
    "search": lambda trainer: trainer.lr_find(n_batches=2),
    "check": lambda trainer: trainer.check(batches=2),
    "block": fit_on_the_side,
}


def with_lasting_workers():
    make = functools.partial(DataLoader, rows(), 8, num_workers=1, persistent_workers=True)
    set_seed(3)
    return make_trainer([MetricsCB(show=False)], make(shuffle=True), make(), opt_func=optim.SGD)


def fitted(before=lambda trainer: None):
    trainer = with_lasting_workers()
    before(trainer)
    trainer.fit(2, lr=0.1)
    return trainer.history["train_loss"], trainer.history["valid_loss"], random_states()


@pytest.mark.filterwarnings("ignore:No rate")
@pytest.mark.parametrize("tried", TRIES)
def test_workers_that_persist_begin_when_they_would_have_without_what_was_tried(tried):
    "They begin with a number drawn at random, so those of the try may not stay"
    assert fitted(TRIES[tried]) == fitted()


def test_workers_that_persist_stay_if_they_were_there():
    trainer = with_lasting_workers()
    trainer.fit(1, lr=0.1)
    workers = trainer.dls.train._iterator
    fit_on_the_side(trainer)
    assert workers is trainer.dls.train._iterator is not None
    with trainer.snapshot():
        trainer.dls.train._iterator = None
    assert trainer.dls.train._iterator is workers
    trainer.fit(1, lr=0.1)


def test_one_can_fit_after_restoring_a_snapshot_that_was_taken_within_a_fit():
    taken = []

    def after_epoch(trainer):
        taken.append(trainer.snapshot())

    trainer = make_trainer()
    trainer.fit(1, callbacks=after_epoch)
    taken[0].restore()
    trainer.fit(1)


def test_a_snapshot_from_before_the_fit_can_be_restored_within_it():
    "As a callback does that takes back a bad epoch"
    trainer = make_trainer()
    trainer.fit(1)
    snapshot = trainer.snapshot()

    def log(trainer):
        snapshot.restore()
        with pytest.raises(RuntimeError, match="inside"):
            trainer.fit(1)
        trainer.request_stop("enough")

    trainer.fit(2, callbacks=log)
    assert trainer.stop_reason == "enough"


def test_a_stop_that_was_asked_for_in_another_fit_does_not_end_this_one():
    "The epoch, too, is that of the fit that runs"
    taken = []

    def log(trainer):
        if not taken:
            trainer.request_stop("first")
            taken.append(trainer.snapshot())
        elif trainer.epoch == 1:
            weights = taken[0]
            trainer.model.weight.data.zero_()
            weights.restore()
            assert trainer.model.weight.any() and (trainer.epoch, trainer.n_epochs, trainer.stop_reason) == (
                1,
                4,
                None,
            )
        epochs.append(trainer.epoch)

    epochs = []
    trainer = make_trainer([log])
    trainer.fit(2)
    trainer.fit(4)
    assert epochs == [0, 0, 1, 2, 3] and trainer.stop_reason is None


def test_a_snapshot_of_the_training_pass_does_not_make_a_validation_pass_train():
    taken = []

    def before_batch(trainer):
        if trainer.training and trainer.batch_num == 1:
            taken.append(trainer.snapshot())
        if not trainer.training:
            taken[-1].restore()
            assert not trainer.training
            seen.append([bits(p) for p in trainer.model.parameters()])

    seen = []
    make_trainer([before_batch]).fit(1)
    assert len(seen) == 2 and seen[0] == seen[1]


def test_one_object_can_be_kept_without_a_list():
    kept, lost = HoldCB(), HoldCB()
    lost.name = "lost"
    trainer = make_trainer([kept, lost])
    for keep in (kept, [kept], {kept}):
        with trainer.snapshot(keep=keep):
            kept.n = lost.n = 5
        assert kept.n == 5 and not hasattr(lost, "n")


class OwnSource:
    "A loader that leads to the model"

    def __init__(self, model):
        self.model, self.batches = model, make_batches()

    def __iter__(self):
        return iter(self.batches)


class OwnSampler(torch.utils.data.Sampler):
    def __init__(self, model):
        self.model = model

    def __iter__(self):
        return iter(range(19))

    def __len__(self):
        return 19


@pytest.mark.parametrize(
    "make", [OwnSource, lambda model: sampled(OwnSampler(model))], ids=["loader", "sampler"]
)
@pytest.mark.parametrize("held", [False, True])
def test_a_model_that_a_loader_leads_to_is_put_back(make, held):
    "Data is what nobody else holds"
    model = nn.Linear(4, 3)
    loader = make(model)
    trainer = make_trainer([HoldCB(loader)] if held else [], train=loader, model=model)
    before = observe(model)
    with trainer.snapshot():
        trainer.fit(1)
    unchanged(model, before)


@pytest.mark.parametrize("odd", [lambda x: x, lambda x: (x,), lambda x: {"x": x}, lambda x: [(x, x)]])
def test_what_is_no_data_is_put_back_wherever_it_lies_among_batches(odd):
    "A list of nothing but batches is not looked through"
    for at in (0, 1, 3):
        counts = []
        batches = make_batches()
        batches.insert(at, (*batches[0], odd(counts)))
        with make_trainer([], train=batches).snapshot():
            counts.append(1)
        assert counts == []


def test_the_plan_is_that_of_the_same_kind_of_pass():
    cb = HoldCB()
    cb.on_valid, cb.before_epoch = False, lambda trainer: None
    trainer = make_trainer([cb])
    assert trainer.plan.entries  # Worked out when somebody asks
    handlers = dict(trainer.plan)
    with trainer.snapshot():
        trainer.fit(1)
    assert dict(trainer.plan) == handlers


def test_what_cannot_be_put_back_does_not_keep_the_rest_from_it():
    class Stubborn(Resuming):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise RuntimeError("never")

    trainer = make_trainer(train=Stubborn())
    before, numbers = observe(trainer.model), random_states()
    with pytest.raises(RuntimeError, match="never"), trainer.snapshot():
        trainer.fit(1)
    unchanged(trainer.model, before)
    assert random_states() == numbers


@pytest.mark.parametrize(
    "root",
    [
        named("module", lambda: nn.Linear(2, 2)),
        named("object", Plain),
        named("list", lambda: [1]),
        named("slots", Slotted),
        named("object with a plan", lambda: NS(plan="tomorrow")),
    ],
)
def test_any_object_can_be_remembered(root):
    x = root()
    before = observe(x)
    with Snapshot(x):
        if isinstance(x, list):
            x.append(1)
        elif isinstance(x, nn.Module):
            x.weight.data.add_(1)
        else:
            x.a = x.b = 5
    unchanged(x, before)


# The law

OPERATIONS = {
    "fit": lambda t: t.fit(1, lr=0.1),
    "fit on": lambda t: t.fit(1, lr=0.1, keep_opt=_fits(t), valid=False),
    "validate": lambda t: t.fit(1, train=False),
    "fit with a stop": lambda t: t.fit(2, callbacks=_stop()),
    "fit that fails": lambda t: pytest.raises(ZeroDivisionError, t.fit, 1, callbacks=_fail()),
    "on the side": lambda t: _aside(t),
    "attribute": lambda t: setattr(t, "mine", [1]),
    "append": lambda t: t.note.append(len(t.note)),
    "nested note": lambda t: t.note[0].add(len(t.note[0])),
    "eval": lambda t: t.model.eval(),
    "one in eval": lambda t: t.model[0].eval(),
    "train": lambda t: t.model.train(),
    "freeze": lambda t: t.model[0].requires_grad_(False),
    "zero": lambda t: t.model.zero_grad(),
    "weights": lambda t: nn.init.normal_(t.model[0].weight),
    "new weight": lambda t: setattr(t.model[0], "weight", nn.Parameter(torch.zeros(6, 4))),
    "add callback": lambda t: t.add_callback(_named_hold(len(t.callbacks))),
    "remove metrics": lambda t: (
        hasattr(t, "MetricsCB") and t.MetricsCB in t.callbacks and t.remove_callback("MetricsCB", delete=True)
    ),
    "another model": lambda t: setattr(t, "model", MODELS["batch norm and dropout"]()),
    "seed": lambda t: set_seed(9),
    "draw": lambda t: (torch.rand(1), random.random(), np.random.rand()),
    "new history": lambda t: setattr(t, "history", History()),
    "loss function": lambda t: setattr(t, "loss_func", lambda preds, targets: preds.square().mean()),
    "settings of a callback": lambda t: setattr(t.callbacks[0], "mine", {"a": torch.zeros(2)}),
}


def _stop():
    def after_batch(trainer):
        trainer.request_stop()

    return after_batch


def _fail():
    def after_backward(trainer):
        raise ZeroDivisionError

    return after_backward


def _fits(trainer):
    "Whether there is an optimizer, and for this model"
    mine = {id(p) for p in trainer.model.parameters()}
    return "opt" in vars(trainer) and any(
        id(p) in mine for group in trainer.opt.param_groups for p in group["params"]
    )


def _aside(trainer):
    with trainer.side_run():
        trainer.fit(1, valid=False)


def _named_hold(n):
    cb = HoldCB([n])
    cb.name = f"hold{n}"
    return cb


@pytest.mark.shows("ISA-68")
@settings(max_examples=25, deadline=None)
@given(
    first=st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=3),
    inside=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=6),
    opt=st.sampled_from([optim.Adam, functools.partial(optim.SGD, momentum=0.9)]),
    momentum=st.booleans(),
)
def test_whatever_is_done_in_the_block_changes_nothing(first, inside, opt, momentum):
    "Any operations in any order leave no trace"
    batches = make_batches()
    steps = MomentumTrainCB() if momentum else BasicTrainCB()
    loader = DataLoader(rows(), 8, shuffle=True, generator=seeded())
    trainer = Trainer(
        DataLoaders(loader, batches[:2]),
        F.cross_entropy,
        opt,
        MODELS["batch norm and dropout"](),
        [steps, MetricsCB(), ProgressCB("plain"), TrackingCB()],
    )
    trainer.note = [set(), 1]
    with contextlib.redirect_stdout(None):
        for name in first:
            OPERATIONS[name](trainer)
        before, numbers = observe(trainer), random_states()
        with trainer.snapshot():
            for name in inside:
                OPERATIONS[name](trainer)
    unchanged(trainer, before)
    assert random_states() == numbers


@pytest.mark.parametrize("kind", [io.StringIO, torch.utils.data.Dataset, types.ModuleType, ValueError])
def test_what_stands_for_something_outside_is_left_alone_as_that_is(kind):
    "A stand-in of a test counts its calls, and goes on counting"

    class WritesCB:
        def __init__(self):
            self.out = mock.MagicMock(spec=kind)

        def before_batch(self, trainer):
            self.out()

    data = [(torch.zeros(2, 1), torch.zeros(2, 1))]
    callbacks = [BasicTrainCB(), WritesCB()]
    trainer = Trainer(DataLoaders(data, data), F.mse_loss, optim.SGD, nn.Linear(1, 1), callbacks)
    trainer.validate()
    assert trainer.WritesCB.out.call_count > 0
