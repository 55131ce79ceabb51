"Snapshots of what callbacks keep: values of all kinds, loaders and data, and things of the world outside."

import collections
import contextlib
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
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)
from tqdm.std import tqdm

from observing import bits, observe, unchanged
from isaac_loop.all import DataLoaders, History
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
)


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


class Doubling(collections.deque):
    "Puts in something else than it is given"

    def append(self, value):
        super().append(2 * value)

    def extend(self, values):
        for value in values:
            self.append(value)


class DoublingSet(set):
    def update(self, values):
        super().update(2 * value for value in values)


class DoublingDict(collections.OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, 2 * value)


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
    named("deque with an `extend` of its own", lambda: Doubling([1, 2], 3), append),
    named("set with an `update` of its own", lambda: DoublingSet([1, 2]), lambda x: x.add(3)),
    named("ordered dict that changes values", lambda: DoublingDict(a=1, b=2), lambda x: x.update(c=3)),
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


class Wrapped:
    "A loader around a loader"

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)


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
