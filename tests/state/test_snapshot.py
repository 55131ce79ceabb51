"""Snapshots (`snapshot.py`), checked with a walk through all objects that shares no code with them
(`observing.py`).

Whatever happens inside `with trainer.snapshot()` did not happen: every value, every identity and every
random number is as before, over optimizers, models, containers, loaders and whatever users keep on their
callbacks. Data is never copied, and what belongs to the world outside is left alone.
"""

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import logging
import random
import re
import sqlite3
import sys
import threading
import types
import uuid
import weakref
from array import array
from types import SimpleNamespace as NS

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observing import bits, differences, observe, random_states, unchanged
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from tqdm.std import tqdm

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
from isaac_loop.state.snapshot import Snapshot, random_state, set_random_state


def named(name, *values):
    "A case with a name of its own"
    return pytest.param(*values, id=name)


def make_batches(n=20, size=8):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 4, generator=g), torch.randint(0, 3, (n,), generator=g)
    return list(zip(x.split(size), y.split(size)))


def make_trainer(callbacks=(), train=None, valid=None, model=None, opt_func=optim.Adam):
    batches = make_batches()
    return Trainer(
        DataLoaders(batches if train is None else train, batches[:2] if valid is None else valid),
        F.cross_entropy,
        opt_func,
        model or nn.Linear(4, 3),
        [BasicTrainCB(), *callbacks],
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


def tag(x):
    x.tag = "mine"


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


# Values that callbacks keep


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = [1]


class SlottedChild(Slotted):
    __slots__ = ("c", "__dict__", "__weakref__")

    def __init__(self):
        super().__init__()
        self.c, self.free = 1, 2


class OneSlot:
    __slots__ = "only"

    def __init__(self):
        self.only = 1


class Private:
    __slots__ = ("__secret",)

    def __init__(self):
        self.__secret = 1

    def set(self, value):
        self.__secret = value

    def get(self):
        return self.__secret


@dataclasses.dataclass
class Plain:
    a: list = dataclasses.field(default_factory=lambda: [1])


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: list = dataclasses.field(default_factory=lambda: [1])


@dataclasses.dataclass(slots=True)
class PlainSlots:
    b: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    a: list = dataclasses.field(default_factory=lambda: [1])


class TaggedList(list):
    tag = None


class TaggedDict(dict):
    tag = None


class TaggedArray(np.ndarray):
    pass


class SelfDict(dict):
    "Attributes and items are one"

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Raising:
    "Nothing may be asked of it"

    def __init__(self):
        self.a = [1]

    @property
    def value(self):
        raise RuntimeError("not now")

    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")

    def __eq__(self, other):
        raise RuntimeError("incomparable")

    __hash__ = None

    def __bool__(self):
        raise RuntimeError("undecided")

    def __len__(self):
        raise RuntimeError("uncounted")

    def __iter__(self):
        raise RuntimeError("not a sequence")

    def __setattr__(self, name, value):
        if name != "a":
            raise RuntimeError("locked")
        super().__setattr__(name, value)


class RaisingSlots:
    __slots__ = ("a",)

    def __init__(self):
        self.a = [1]

    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")


class Answering:
    "Has every attribute one asks for"

    def __init__(self):
        self.a = [1]

    def __getattr__(self, name):
        return lambda *args: None


class Level(enum.Enum):
    LOW = 1


Pair = collections.namedtuple("Pair", "a b")


def obj(**attributes):
    return NS(**attributes)


def append(x):
    x.append(99)


def fill_a(x):
    x.a.append(99)


def frozen_array():
    a = np.arange(3.0)
    a.flags.writeable = False
    return a


def cycle():
    x = [1]
    x.append(x)
    return x


def mutual():
    a, b = NS(n=1), NS(n=2)
    a.other, b.other = b, a
    return a


def default_dict():
    d = collections.defaultdict(list)
    d["a"].append(1)
    return d


def set_slots(x):
    x.a, x.b = [2], 5
    del x.a


def set_attribute(name, value):
    return lambda x: setattr(x, name, value)


def grow(x):
    x["new"] = 1


def new_dict(x):
    x.__dict__ = {"a": 5}


def change_key(x):
    next(iter(x)).n = 9


def new_class(x):
    x.__class__ = Answering


def in_tuple(x):
    x[0].append(1)


def use_module(x):
    x.pi = 3


class Key:
    def __init__(self):
        self.n = 1


KINDS = [
    named("list", lambda: [1, [2]], append),
    named("list cleared", lambda: [1, [2]], lambda x: x.clear()),
    named("list sorted", lambda: [3, 1, 2], lambda x: x.sort()),
    named("dict", lambda: {"a": 1, "b": [2]}, grow),
    named("order of a dict", lambda: {"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a"))),
    named("ordered dict", lambda: collections.OrderedDict(a=1, b=2), lambda x: x.move_to_end("a")),
    named("default dict", default_dict, lambda x: x["b"].append(2)),
    named("counter", lambda: collections.Counter("aab"), lambda x: x.update("c")),
    named("counter untouched", lambda: collections.Counter("aab"), lambda x: None),
    named("chain map", lambda: collections.ChainMap({"a": 1}, {"b": 2}), grow),
    named("dict whose keys change", lambda: {Key(): 1}, change_key),
    named("set", lambda: {1, 2}, lambda x: x.add(3)),
    named("set of objects", lambda: {Key()}, change_key),
    named("frozenset of objects", lambda: frozenset([Key()]), change_key),
    named("deque", lambda: collections.deque([1, 2], maxlen=2), append),
    named("rotated deque", lambda: collections.deque([1, 2, 3]), lambda x: x.rotate()),
    named("tuple", lambda: ([1], 2), in_tuple),
    named("named tuple", lambda: Pair([1], 2), in_tuple),
    named("array", lambda: array("d", [1, 2]), append),
    named("array shortened", lambda: array("q", [1, 2]), lambda x: x.pop()),
    named("bytearray", lambda: bytearray(b"ab"), append),
    named("numpy", lambda: np.arange(3.0), lambda x: x.__iadd__(1)),
    named(
        "numpy in Fortran order",
        lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        lambda x: x.__imul__(2),
    ),
    named("numpy records", lambda: np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]), lambda x: x["a"].fill(1)),
    named("numpy text", lambda: np.array(["a", "bc"]), lambda x: x.fill("z")),
    named("empty numpy", lambda: np.zeros((0, 3)), lambda x: None),
    named("numpy scalar array", lambda: np.array(3.0), lambda x: x.__iadd__(1)),
    named("read-only numpy", frozen_array, lambda x: None),
    named("numpy of objects", lambda: np.array([[1], None], dtype=object), in_tuple),
    named("numpy subclass", lambda: np.arange(3.0).view(TaggedArray), lambda x: x.__iadd__(1)),
    named("masked numpy", lambda: np.ma.array([1.0, 2.0]), lambda x: x.__setitem__(0, 9.0)),
    named("numpy number", lambda: np.float32(1), lambda x: None),
    named("attributes", lambda: obj(a=[1], b=2), set_attribute("a", None)),
    named("attribute added", lambda: obj(a=[1]), set_attribute("b", 1)),
    named("attribute deleted", lambda: obj(a=[1]), lambda x: delattr(x, "a")),
    named("another `__dict__`", Key, new_dict),
    named("another class", Plain, new_class),
    named("slots", Slotted, set_slots),
    named("slot filled in the block", Slotted, set_attribute("b", 1)),
    named("slots and `__dict__`", SlottedChild, set_attribute("free", 9)),
    named("slot of a parent", SlottedChild, fill_a),
    named("one slot as text", OneSlot, set_attribute("only", 9)),
    named("dataclass", Plain, fill_a),
    named("frozen dataclass", Frozen, fill_a),
    named("dataclass with slots", PlainSlots, set_attribute("b", 9)),
    named("frozen dataclass with slots", FrozenSlots, fill_a),
    named("uuid", uuid.uuid4, lambda x: None),
    named("attribute dict", lambda: SelfDict(a=[1]), grow),
    named("attribute of a list", lambda: TaggedList([1]), set_attribute("tag", 1)),
    named("attribute of a dict", lambda: TaggedDict(a=1), set_attribute("tag", 1)),
    named("everything raises", Raising, fill_a),
    named("everything raises, with slots", RaisingSlots, fill_a),
    named("everything answers", Answering, fill_a),
    named("enum member", lambda: Level.LOW, lambda x: None),
    named("bound method", lambda: Plain().__eq__.__self__.__init__, lambda x: x.__self__.a.append(1)),
    named("partial", lambda: functools.partial(print, [1], sep=[2]), lambda x: x.args[0].append(1)),
    named("method of a list", lambda: NS(keep=[1]).keep.append, lambda x: None),
    named("weak reference", lambda: weakref.ref(Level.LOW), lambda x: None),
    named("weak values", weakref.WeakValueDictionary, lambda x: None),
    named("function with attributes", lambda: types.FunctionType(fill_a.__code__, {}), set_attribute("n", 1)),
    named("itself", cycle, append),
    named("each other", mutual, lambda x: setattr(x.other, "n", 9)),
    named("pattern", lambda: re.compile("a"), lambda x: None),
    named("python generator", lambda: (o for o in range(3)), lambda x: None),
    named("exception", lambda: ValueError("a"), lambda x: None),
    named("big number", lambda: 10**400, lambda x: None),
    named("random", lambda: random.Random(1), lambda x: x.random()),
    named("torch generator", lambda: torch.Generator().manual_seed(1), lambda x: torch.rand(1, generator=x)),
    named("numpy generator", lambda: np.random.default_rng(1), lambda x: x.random()),
    named("history", History, lambda x: (x.start_fit(), x.start_epoch(0), x.write(a=1))),
]


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("make, change", KINDS)
def test_what_a_callback_keeps_is_put_back(make, change, twice):
    x = make()
    root = NS(x=x, before=[x], more={"x": x})
    before = observe(root)
    snapshot = Snapshot(root)
    for _ in range(1 + twice):
        change(x)
        root.x = root.before = None
        root.more.clear()
        snapshot.restore()
        assert root.x is x
        unchanged(root, before)


@pytest.mark.parametrize(
    "make, draw",
    [
        named(
            "numpy generator on another algorithm",
            lambda: np.random.Generator(np.random.Philox(1)),
            lambda x: x.random(),
        ),
        named(
            "numpy after half a pair of normals",
            lambda: np.random.default_rng(1),
            lambda x: x.standard_normal(),
        ),
        named("python after half a pair of normals", lambda: random.Random(1), lambda x: x.gauss(0, 1)),
        named("old numpy state", lambda: np.random.RandomState(1), lambda x: x.rand()),
        named("bare bit generator", lambda: np.random.PCG64(1), lambda x: x.random_raw()),
        named("private slot", Private, lambda x: (x.get(), x.set(9))[0]),
    ],
)
def test_drawing_again_gives_the_same(make, draw):
    x = make()
    with Snapshot(NS(x=x)):
        first = draw(x)
    assert draw(x) == first


@pytest.mark.parametrize(
    "nest",
    [lambda x: [x], lambda x: {"a": x}, lambda x: (x,), lambda x: NS(a=x)],
    ids=["list", "dict", "tuple", "object"],
)
def test_ten_thousand_levels_are_no_recursion(nest):
    inner = [1]
    x = inner
    for _ in range(10_000):
        x = nest(x)
    with Snapshot(NS(x=x)):
        inner.append(2)
    assert inner == [1]


def test_an_object_that_is_met_often_is_remembered_once():
    big, calls = torch.zeros(10), []
    clone = torch.Tensor.clone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", lambda x: calls.append(x) or clone(x))
        Snapshot(NS(a=big, b=[big] * 50, c={i: big for i in range(9)}))
    assert len(calls) == 1


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


# Loaders and data


def rows():
    return TensorDataset(*(torch.cat(o) for o in zip(*make_batches())))


def seeded():
    return torch.Generator().manual_seed(7)


class Wrapped:
    "A loader around a loader"

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)


class Resuming:
    "Goes on where it stopped"

    def __init__(self):
        self.position = 0

    def __iter__(self):
        self.position += 1
        return iter(make_batches()[self.position % 3 :])


class Talking(Resuming):
    "Tells its state when asked, and has its position where nobody else finds it"

    def __init__(self):
        self.here, self.source = [0], iter(())

    position = property(lambda self: self.here[0], lambda self, value: self.here.__setitem__(0, value))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Sharing(Talking):
    "Its state is the one it works with"

    def __init__(self):
        self.state = {"position": 0}

    position = property(
        lambda self: self.state["position"], lambda self, value: self.state.__setitem__("position", value)
    )

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Drawing:
    "Draws its batches with a generator of its own"

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        draw = self.generator.random()
        return iter([(x * draw, y) for x, y in make_batches()])


class Buffered:
    "Keeps count in a list"

    def __init__(self):
        self.seen = []

    def __iter__(self):
        self.seen.append(1)
        return iter([(x * len(self.seen), y) for x, y in make_batches()])


class EpochSampler(torch.utils.data.Sampler):
    "Another order in each epoch"

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter([(o * self.epoch) % 19 for o in range(19)])

    def __len__(self):
        return 19


def sampled(sampler):
    return DataLoader(rows(), 8, sampler=sampler)


@pytest.mark.parametrize("after_a_fit", [False, True], ids=["never used", "used before"])
@pytest.mark.parametrize(
    "make",
    [
        named("shuffled", lambda: DataLoader(rows(), 8, shuffle=True)),
        named("shuffled by a generator", lambda: DataLoader(rows(), 8, shuffle=True, generator=seeded())),
        named("random sampler", lambda: sampled(RandomSampler(rows(), generator=seeded()))),
        named("weighted sampler", lambda: sampled(WeightedRandomSampler([1.0] * 20, 16, generator=seeded()))),
        named("resuming", Resuming),
        named("state dict", Talking),
        named("numpy generator", lambda: Drawing(np.random.default_rng(3))),
        named("python generator", lambda: Drawing(random.Random(3))),
    ],
)
def test_a_loader_goes_on_where_it_was(make, after_a_fit):
    _loader_goes_on(make(), after_a_fit)


@pytest.mark.parametrize(
    "make",
    [
        named(
            "batch sampler",
            lambda: DataLoader(
                rows(), batch_sampler=BatchSampler(RandomSampler(rows(), generator=seeded()), 8, False)
            ),
        ),
        named("wrapped", lambda: Wrapped(DataLoader(rows(), 8, shuffle=True, generator=seeded()))),
        named("epoch of a sampler", lambda: sampled(EpochSampler())),
        named("live state dict", Sharing),
        named("count in a list", Buffered),
    ],
)
def test_a_loader_with_a_hidden_position_goes_on_where_it_was(make):
    _loader_goes_on(make(), False)


def _loader_goes_on(loader, after_a_fit):
    trainer = make_trainer(train=loader)
    if after_a_fit:
        trainer.fit(1, valid=False)
    seen = []

    def before_predict(trainer):
        seen.append(bits(trainer.batch[0]))

    futures = []
    for _ in range(2):
        with trainer.snapshot():
            trainer.fit(2, valid=False, callbacks=before_predict)
        futures.append(seen[:])
        seen.clear()
    assert futures[0] == futures[1] and len(set(futures[0])) > 1


class Images(Dataset):
    def __init__(self, n=64):
        self.pixels, self.numbers, self.listed = (
            torch.zeros(n, 1000),
            np.zeros((n, 1000)),
            [torch.zeros(1000)],
        )

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, i):
        return self.pixels[i, :4], 1


class Stream(IterableDataset):
    def __init__(self):
        self.pixels = torch.zeros(64, 1000)

    def __iter__(self):
        return iter([(torch.zeros(4), 1)] * 16)


class Rows:
    "A loader with its data as an attribute"

    def __init__(self):
        self.pixels = torch.zeros(64, 1000)

    def __iter__(self):
        return iter([(self.pixels[:8, :4], torch.ones(8, dtype=torch.long))])


class HoldCB:
    "Holds what users hold: the data"

    def __init__(self, *held):
        self.held = held

    def log(self, trainer):
        pass


@contextlib.contextmanager
def nothing_large_is_copied(limit=1000):
    "Refuse copies of more than `limit` numbers"
    clone, copies = torch.Tensor.clone, []

    def watched(x, *args, **kwargs):
        if x.numel() >= limit:
            copies.append(tuple(x.shape))
        return clone(x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", watched)
        yield
    assert copies == []


@pytest.mark.parametrize(
    "make, after_a_fit",
    [
        named("data loader", lambda: DataLoader(Images(), 8), False),
        named("data loader after a fit", lambda: DataLoader(Images(), 8), True),
        named("stream", lambda: DataLoader(Stream(), 8), True),
        named("list of batches", lambda: [(torch.zeros(300, 4), torch.ones(300, dtype=torch.long))], False),
        named(
            "list of batches after a fit",
            lambda: [(torch.zeros(300, 4), torch.ones(300, dtype=torch.long))],
            True,
        ),
        named("custom loader", Rows, False),
        named("custom loader after a fit", Rows, True),
    ],
)
def test_data_is_never_copied(make, after_a_fit):
    trainer = make_trainer(train=make())
    if after_a_fit:
        trainer.fit(1, valid=False)
    trainer.batch = None  # The present batch may be copied
    with nothing_large_is_copied():
        trainer.snapshot()


@pytest.mark.parametrize(
    "hold",
    [
        named("dataset", Images),
        named("subset", lambda: torch.utils.data.Subset(Images(), [1])),
        named("concatenated", lambda: Images() + Images()),
        named("loader", lambda: DataLoader(Images(), 8)),
        named("loaders", lambda: DataLoaders(DataLoader(Images(), 8), DataLoader(Images(), 8))),
        named("sampler", lambda: RandomSampler(Images())),
        named("bar over a list", lambda: ProgressBar([torch.zeros(2000)])),
    ],
)
def test_data_that_a_callback_holds_is_never_copied(hold):
    trainer = make_trainer([HoldCB(hold())])
    with nothing_large_is_copied():
        trainer.snapshot()


class ProgressBar(tqdm):
    "A bar as this library makes them"

    def __init__(self, iterable):
        super().__init__(iterable, disable=True)


def test_another_loader_in_the_block_is_taken_out():
    trainer = make_trainer()
    dls = trainer.dls
    with trainer.snapshot():
        trainer.dls = DataLoaders([])
    assert trainer.dls is dls


def test_another_loader_within_the_loaders_is_taken_out():
    trainer = make_trainer()
    train, valid = trainer.dls.train, trainer.dls.valid
    with trainer.snapshot():
        trainer.dls.valid, trainer.dls.n_inp = None, 2
    assert (trainer.dls.train, trainer.dls.valid, trainer.dls.n_inp) == (train, valid, 1)


# The world outside


class Worker(threading.Thread):
    "A thread as users write them"

    def run(self):
        pass


def figure():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    plt.close(fig)
    return ax, fig


def written(f):
    f.write("more")
    f.flush()


def test_an_open_file_stays_where_it_is(tmp_path):
    with open(tmp_path / "log.txt", "w") as f:
        with Snapshot(NS(f=f)):
            written(f)
        written(f)
    assert (tmp_path / "log.txt").read_text() == "moremore"


@pytest.mark.parametrize(
    "make, use",
    [
        named("lock", threading.Lock, lambda x: x.acquire()),
        named("condition", threading.Condition, lambda x: None),
        named("event", threading.Event, lambda x: x.set()),
        named("local", threading.local, lambda x: setattr(x, "a", 1)),
        named("thread", lambda: threading.Thread(target=print, args=("",)), lambda x: (x.start(), x.join())),
        named("own thread", Worker, lambda x: (x.start(), x.join())),
        named("logger", lambda: logging.getLogger("a"), lambda x: x.info("hello")),
        named("database", lambda: sqlite3.connect(":memory:"), lambda x: x.execute("create table a (b)")),
        named("figure", figure, lambda x: x[0].plot([1, 2])),
        named("bar", lambda: tqdm(range(3), disable=False, file=sys.stderr), lambda x: x.update()),
        named("module", lambda: types.ModuleType("mine"), use_module),
        named("system random", random.SystemRandom, lambda x: None),
        named("class", lambda: Plain, lambda x: None),
        named("function", lambda: lambda: None, lambda x: None),
        named("device", lambda: torch.device("cpu"), lambda x: None),
        named("dtype", lambda: torch.float32, lambda x: None),
        named("size", lambda: torch.Size([1]), lambda x: None),
        named("frame", sys._getframe, lambda x: None),
        named("traceback", lambda: pytest.raises(ZeroDivisionError, lambda: 1 / 0).tb, lambda x: None),
        named("exit stack", contextlib.ExitStack, lambda x: x.callback(print)),
        named("generic type", lambda: list[int], lambda x: None),
    ],
)
def test_the_world_outside_does_no_harm(make, use):
    x = make()
    other = [1]
    with Snapshot(NS(x=x, other=other)):
        use(x)
        other.append(2)
    assert other == [1]
    if isinstance(x, threading.Thread):
        assert not x.is_alive() and x.ident


def module_of(**names):
    "A module with what a file has that imports something"
    module = types.ModuleType("mine")
    vars(module).update(names)
    return module


@pytest.mark.parametrize(
    "make",
    [
        named("held", lambda module: HoldCB(module)),
        named("a callback itself", lambda module: module_of(log=lambda trainer: None, imported=module)),
    ],
)
def test_modules_are_no_part_of_a_run(make):
    "What somebody imports in the block stays imported"
    imported = module_of(cache={})
    trainer = make_trainer([make(imported)])
    with trainer.snapshot():
        imported.cache["seen"] = imported.new = 1
    assert imported.cache == {"seen": 1} and imported.new == 1


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


def test_the_plan_is_that_of_the_same_kind_of_pass():
    cb = HoldCB()
    cb.on_valid, cb.before_epoch = False, lambda trainer: None
    trainer = make_trainer([cb])
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
