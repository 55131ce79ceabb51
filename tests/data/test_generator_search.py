"""The search for generators that remembers what it has met: it finds whatever a new search would find

The law: a fit with evaluations trains the same weights as one without, though a generator that it draws from
gives way to another one between two evaluations.
"""

import contextlib
import copy
import functools
import importlib
import io
import pickle
import random
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

from isaac_loop.all import BasicTrainCB, DataLoaders, EvaluatorCB, MetricsCB, Order, Trainer, each_image
from isaac_loop.data import generator_search
from isaac_loop.data.generator_search import GeneratorSearch
from isaac_loop.data.generators import data_generators, found_from, own_generators
from isaac_loop.data.ways import ways_from

AT_TOP = random.Random(1)


class Attribute:
    def __init__(self):
        self.rng = random.Random(1)

    def draw(self):
        return self.rng.random()

    def swap(self, rng):
        self.rng = rng


class Nested(Attribute):
    def __init__(self):
        self.held = {"deep": [SimpleNamespace(rng=random.Random(1))]}

    def draw(self):
        return self.held["deep"][0].rng.random()

    def swap(self, rng):
        self.held["deep"][0].rng = rng


class InList(Nested):
    def swap(self, rng):
        self.held["deep"][0] = SimpleNamespace(rng=rng)


class Added(Attribute):
    "Has no generator at all at first, only a container that leads nowhere"

    def __init__(self):
        self.held = {"n": 1}

    def draw(self):
        return self.held["rng"].random() if "rng" in self.held else 0.5

    def swap(self, rng):
        self.held["rng"] = rng


class AddedDeep(Added):
    "A container in one of containers, which leads nowhere at first"

    def __init__(self):
        self.outer = {"seen": [[], {}], "held": {"n": 1}}

    @property
    def held(self):
        return self.outer["held"]


class AddedAnew(Added):
    "The container is another one each time"

    def draw(self):
        self.held = dict(self.held)
        return super().draw()


class Later:
    "What `OfAnotherClass` becomes; its class has the generator"

    def draw(self):
        return self.dice.random()


class OfAnotherClass(Attribute):
    "The object is of another class later"

    def __init__(self):
        pass

    def draw(self):
        return 0.5

    def swap(self, rng):
        self.__class__ = type("Drawing", (Later,), dict(dice=rng, __module__=__name__))


class EmptyDefault(Attribute):
    "A default value that is filled later"

    def __init__(self):
        def draw(dice=[]):  # noqa: B006 - As people write a cache
            return sum(o.random() for o in dice)

        self.draw = draw

    def swap(self, rng):
        self.draw.__defaults__[0].append(rng)


class DressedAsTorchs(Attribute):
    "A function around one of PyTorch, whose module `wraps` copies"

    def __init__(self):
        self.held = [random.Random(1)]

        @functools.wraps(F.mse_loss)
        def draw():
            return self.held[0].random()

        self.draw = draw

    def swap(self, rng):
        self.held[0] = rng


class ByProperty(Attribute):
    "A property gives it, and another one later"

    def __init__(self):
        first = random.Random(1)
        type(self).rng = property(lambda self: first)

    def swap(self, rng):
        type(self).rng = property(lambda self: rng)


class Shared(Attribute):
    rng = random.Random(1)

    def __init__(self):
        type(self).rng = random.Random(1)

    def swap(self, rng):
        type(self).rng = rng


class Slot:
    __slots__ = ("rng",)


class Slotted(Attribute):
    def __init__(self):
        self.slot = Slot()
        self.slot.rng = random.Random(1)

    def draw(self):
        return self.slot.rng.random()

    def swap(self, rng):
        self.slot.rng = rng


class Closure(Attribute):
    def __init__(self):
        rng = random.Random(1)

        def draw():
            return rng.random()

        def swap(other):
            nonlocal rng
            rng = other

        self.draw, self.swap = draw, swap


class Global(Attribute):
    def __init__(self):
        self.swap(random.Random(1))

    def draw(self):
        return AT_TOP.random()

    def swap(self, rng):
        globals()["AT_TOP"] = rng


class Default(Attribute):
    def __init__(self):
        first = random.Random(1)

        def draw(rng=first):
            return rng.random()

        self.draw = draw

    def swap(self, rng):
        self.draw.__defaults__ = (rng,)


class Keyword(Default):
    def __init__(self):
        first = random.Random(1)

        def draw(*, rng=first):
            return rng.random()

        self.draw = draw

    def swap(self, rng):
        self.draw.__kwdefaults__["rng"] = rng


class OfFunction(Default):
    def __init__(self):
        def draw():
            return draw.rng.random()

        draw.rng, self.draw = random.Random(1), draw

    def swap(self, rng):
        self.draw.rng = rng


class Partial(Attribute):
    def __init__(self):
        self.swap(random.Random(1))

    def swap(self, rng):
        self.draw = functools.partial(lambda rng: rng.random(), rng)


class Dressed(Attribute):
    "A whole method is exchanged in the class"

    def __init__(self):
        self.swap(random.Random(1))

    def swap(self, rng):
        type(self).draw = lambda self, rng=rng: rng.random()


class NewDict(Attribute):
    def swap(self, rng):
        self.__dict__ = {**vars(self), "rng": rng}


WAYS = [
    ByProperty,
    EmptyDefault,
    DressedAsTorchs,
    Attribute,
    Nested,
    InList,
    Added,
    AddedAnew,
    Shared,
    Slotted,
    Closure,
    Global,
    Default,
    Keyword,
    OfAnotherClass,
]
WAYS += [OfFunction, Partial, Dressed, NewDict, AddedDeep]


class NoiseCB:
    "Draws for every batch, and draws from another generator from the fourth training batch on"

    order = Order.FIRST

    def __init__(self, source, at=3):
        self.source, self.at = source, at

    def before_batch(self, trainer):
        if trainer.training and trainer.n_updates == self.at:
            self.source.swap(random.Random(2))
        x, y = trainer.batch
        trainer.batch = x + self.source.draw(), y


def batches(n=8):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=g), torch.randint(2, (4,), generator=g)) for _ in range(n)]


def weights(source, *callbacks, evaluates=True, at=3):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    more = [EvaluatorCB(updates=1)] if evaluates else []
    callbacks = [BasicTrainCB(), MetricsCB(show=False), NoiseCB(source, at), *more, *callbacks]
    trainer = Trainer(DataLoaders(batches(), batches(2)), F.cross_entropy, optim.SGD, model, callbacks)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(2, 0.1, valid=False)
    return model.weight.detach().clone()


@pytest.mark.parametrize("way", WAYS)
def test_a_generator_that_comes_between_two_evaluations_is_put_back_as_well(way):
    assert torch.equal(weights(way()), weights(way(), evaluates=False))


@pytest.mark.parametrize("way", WAYS)
def test_the_swap_makes_a_difference(way):
    assert not torch.equal(weights(way()), weights(way(), at=100))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)


class Noise(nn.Module):
    def __init__(self, rng):
        super().__init__()
        self.rng = rng

    def forward(self, x):
        return x + self.rng.random()


def _new_part(model):
    model.linear = nn.Sequential(model.linear, Noise(random.Random(4)))


def _new_hook(model):
    rng = random.Random(4)
    model.linear.register_forward_hook(lambda m, args, out: out + rng.random())


def _new_pre_hook(model):
    rng = random.Random(4)
    model.linear.register_forward_pre_hook(lambda m, args: (args[0] + rng.random(),))


@pytest.mark.parametrize("change", [_new_part, _new_hook, _new_pre_hook])
def test_a_layer_or_hook_that_comes_in_a_fit_is_seen(change):
    class ChangeCB:
        def after_batch(self, trainer):
            if trainer.training and trainer.n_updates == 3:
                change(trainer.model)

    def trained(*more):
        torch.manual_seed(0)
        model = Layer()
        callbacks = [BasicTrainCB(), ChangeCB(), *more]
        dls = DataLoaders(batches(), batches(2))
        with contextlib.redirect_stdout(io.StringIO()):
            Trainer(dls, F.cross_entropy, optim.SGD, model, callbacks).fit(2, 0.1, valid=False)
        return next(iter(model.parameters())).detach().clone()

    assert torch.equal(trained(), trained(EvaluatorCB(updates=1)))


def searches(monkeypatch, *callbacks, n=2):
    "How often is there a new search, in a fit with an evaluation after each of 16 updates?"
    found, usual = [], generator_search.found_from

    def counting(roots, read=None, met=None):
        found.append(met is not None)
        return usual(roots, read, met)

    monkeypatch.setattr(generator_search, "found_from", counting)
    weights(Attribute(), *callbacks)
    return sum(found)


class CountCB:
    "What many callbacks of users do: numbers, lists and dicts that grow"

    def before_fit(self, trainer):
        self.n, self.losses, self.by_name, self.last = 0, [], {}, None

    def after_batch(self, trainer):
        self.n += 1
        self.losses.append(float(trainer.loss.detach()))
        self.by_name[f"{self.n}"] = self.losses[-1]
        self.last = {"loss": self.losses[-1]}
        self.tensor = trainer.loss.detach()


class StoreCB:
    "Empties a dict of lists and fills it again, as functions of `EvaluatorCB` do with theirs"

    def before_fit(self, trainer):
        self.store = {}

    def after_batch(self, trainer):
        if trainer.batch_num % 2:
            self.store.clear()

    def after_get_loss(self, trainer):
        self.store.setdefault("losses", []).append(trainer.loss.detach())
        self.store.setdefault("names", {})["last"] = ["a", 1]


def test_what_counts_needs_no_new_search(monkeypatch):
    assert searches(monkeypatch) <= 3  # One, and one where the generator is another
    assert searches(monkeypatch, CountCB()) <= 4
    assert searches(monkeypatch, StoreCB()) <= 4


@pytest.mark.parametrize("way", [Attribute, Nested, Closure, Default, OfAnotherClass])
def test_a_search_finds_what_a_new_one_finds(way):
    source = way()
    callbacks = [BasicTrainCB(), NoiseCB(source)]
    trainer = Trainer(DataLoaders(batches()), F.cross_entropy, optim.SGD, nn.Linear(3, 2), callbacks)
    search = GeneratorSearch()
    assert search(trainer) is search(trainer)
    other = random.Random(7)
    source.swap(other)
    assert any(x is other for x in search(trainer))
    assert list(map(id, search(trainer))) == list(map(id, own_generators(trainer)))


class Mapped:
    "A loader of a user's own, whose function closes over a generator"

    def __init__(self, loader, f):
        self.loader, self.f = loader, f

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return ((self.f(x), y) for x, y in self.loader)


class NoisyLoader(DataLoader):
    "A loader of PyTorch to which a user has added a function"

    def __init__(self, rows, f):
        self.f = f
        super().__init__(rows, batch_size=None)

    def __iter__(self):
        return ((self.f(x), y) for x, y in super().__iter__())


class OfScript(Mapped):
    def __iter__(self):
        return ((x + AT_TOP.random(), y) for x, y in self.loader)


class DrawingTrainer(Trainer):
    def before_batch(self):
        self.batch = self.batch[0] + AT_TOP.random(), self.batch[1]


class RngTrainer(Trainer):
    rng = random.Random(1)

    def before_batch(self):
        self.batch = self.batch[0] + self.rng.random(), self.batch[1]


@pytest.mark.parametrize("kind", [Mapped, NoisyLoader, OfScript, DrawingTrainer, RngTrainer])
def test_what_loaders_and_trainers_of_a_users_own_class_draw_from_is_put_back(kind):
    def trained(*more):
        torch.manual_seed(0)
        dice, model = random.Random(1), nn.Linear(3, 2)
        AT_TOP.seed(1), RngTrainer.rng.seed(1)
        trains = issubclass(kind, Trainer)
        make = (lambda n: batches(n)) if trains else (lambda n: kind(batches(n), lambda x: x + dice.random()))
        of = kind if trains else Trainer
        trainer = of(
            DataLoaders(make(8), make(2)), F.cross_entropy, optim.SGD, model, [BasicTrainCB(), *more]
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(2, 0.1, valid=False)
        return model.weight.detach().clone()

    assert torch.equal(trained(), trained(EvaluatorCB(updates=1)))


def _by_property(draw):
    class Source:
        @property
        @torch.no_grad()
        def value(self):
            return draw()

    source = Source()
    return lambda: source.value


def _by_context(draw):
    @contextlib.contextmanager
    def drawn():
        yield draw()

    def enter(*_):
        with drawn() as value:
            return value

    return enter


def _by_image(draw):
    images = each_image(lambda x: x + draw())
    return lambda *_: images(torch.zeros(4, 3))


DRESSES = {
    "no_grad": lambda draw: torch.no_grad()(draw),
    "twice": lambda draw: torch.enable_grad()(torch.inference_mode()(draw)),
    "autocast": lambda draw: torch.autocast("cpu", enabled=False)(draw),
    "disable": lambda draw: torch.compiler.disable(draw),
    "property": _by_property,
    "contextmanager": _by_context,
    "singledispatch": lambda draw: functools.partial(functools.singledispatch(lambda x: draw()), None),
    "vectorize": lambda draw: functools.partial(lambda f: float(f(0.0)), np.vectorize(lambda x: draw())),
    "each_image": _by_image,
}


@pytest.mark.parametrize("dress", DRESSES)
def test_what_a_decorated_function_draws_in_an_evaluation_does_not_count(dress):
    def dressed():
        rng = random.Random(1)
        return SimpleNamespace(draw=DRESSES[dress](lambda: rng.random()), swap=lambda rng: None)

    assert torch.equal(weights(dressed()), weights(dressed(), evaluates=False))


def test_what_a_function_of_pytorch_reads_is_no_way():
    assert ways_from(F.mse_loss) == ways_from(torch.nn.init.kaiming_uniform_) == []
    assert [o for _, o in ways_from(torch.no_grad()(batches))][-1] is batches


def test_the_generator_of_a_sampler_that_a_loader_holds_once_more_is_of_the_order():
    dl = NoisyLoader(batches(), None)
    dl.generator = dl.once_more = torch.Generator()
    assert data_generators(dl, [""]) == {}
    dl.noise = torch.Generator()
    assert data_generators(dl, [""]) == {"noise": dl.noise}


READERS = {
    "through the package": "import proj.noise\ndef draw(): return proj.noise.rng.random()",
    "through a function there": "import proj.noise\ndef draw(): return proj.noise.drawn()",
    "imported inside": "def draw():\n    import proj.noise\n    return proj.noise.rng.random()",
    "one name imported inside": "def draw():\n    from proj.noise import drawn\n    return drawn()",
    "another name inside": "def draw():\n    import proj.noise as other\n    return other.drawn()",
    "from here": "def draw():\n    from . import noise\n    return noise.drawn()",
    "from further up": "def draw():\n    from ..noise import drawn\n    return drawn()",
}


@pytest.mark.parametrize("reader", READERS)
def test_a_generator_in_a_package_is_found_however_its_module_is_reached(reader, tmp_path, monkeypatch):
    folder = tmp_path / "proj" / "deep"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "proj" / "__init__.py").touch(), (folder / "__init__.py").touch()
    noise = "import random\nrng = random.Random(1)\ndef drawn(): return rng.random()"
    (tmp_path / "proj" / "noise.py").write_text(noise)
    place = folder / "reads.py" if reader == "from further up" else tmp_path / "proj" / "reads.py"
    place.write_text(READERS[reader])
    try:
        importlib.import_module("proj.noise")
        name = "proj.deep.reads" if reader == "from further up" else "proj.reads"
        module = importlib.import_module(name)
        found = found_from([("draw", module.draw)])
        assert list(found.values()) == [sys.modules["proj.noise"].rng]
    finally:
        for known in [o for o in sys.modules if o.partition(".")[0] == "proj"]:
            del sys.modules[known]


class SplitsItself(DataLoaders):
    def split(self, batch):
        return batch[0] + AT_TOP.random(), batch[1]


@pytest.mark.parametrize("of", ["function", "class"])
def test_what_splitting_a_batch_draws_in_an_evaluation_does_not_count(of):
    def trained(*more):
        dice = random.Random(1)
        AT_TOP.seed(1), torch.manual_seed(0)
        both, model = (batches(), batches(2)), nn.Linear(3, 2)
        dls = (
            SplitsItself(*both)
            if of == "class"
            else DataLoaders(*both, split=lambda b: (b[0] + dice.random(), b[1]))
        )
        Trainer(dls, F.cross_entropy, optim.SGD, model, [BasicTrainCB(), *more]).fit(2, 0.1, valid=False)
        return model.weight.detach().clone()

    assert torch.equal(trained(), trained(EvaluatorCB(updates=1)))


class CopyCB:
    order = Order.RECORD

    def __init__(self, copied):
        self.copied = copied

    def after_batch(self, trainer):
        if trainer.n_updates == 5:
            self.copied(trainer)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_trainer_can_be_copied_between_evaluations(copied):
    weights(Attribute(), CopyCB(lambda trainer: copied(trainer._aside_known)))


def test_what_is_known_of_runs_on_the_side_is_gone_after_a_fit():
    trainer = Trainer(
        DataLoaders(batches(), batches(2)),
        F.cross_entropy,
        optim.SGD,
        nn.Linear(3, 2),
        [BasicTrainCB(), EvaluatorCB(updates=1)],
    )
    kept = []
    trainer.fit(1, callbacks=CopyCB(lambda trainer: kept.append((trainer.snapshot(), trainer._aside_known))))
    assert trainer._aside_known is None and kept[0][1]
    kept[0][0].restore()
    assert trainer._aside_known is None


@pytest.mark.parametrize(
    "place", [lambda held: (held, 1), lambda held: held.append, lambda held: {"a": held}]
)
def test_a_list_that_leads_nowhere_yet_is_asked_again(place):
    held = [1]
    callback = NoiseCB(Attribute())
    callback.placed = place(held)
    callbacks = [BasicTrainCB(), callback]
    trainer = Trainer(DataLoaders(batches()), F.cross_entropy, optim.SGD, nn.Linear(3, 2), callbacks)
    search = GeneratorSearch()
    search(trainer)
    held.append(random.Random(7))
    assert any(x is held[1] for x in search(trainer))


@pytest.mark.parametrize("keep", [lambda x: x, lambda x: [x], lambda x: {"preds": x}])
@pytest.mark.parametrize("owner", ["callback", "trainer"])
def test_a_search_holds_nothing_that_leads_nowhere(keep, owner):
    "What a callback has replaced is free, though there was an evaluation while it was there"

    class KeepsCB:
        order = Order.DECIDE

        def after_batch(self, trainer):
            if trainer.training:
                (self if owner == "callback" else trainer).seen = keep(trainer.preds)
                given.append(weakref.ref(trainer.preds))
                alive.append(sum(ref() is not None for ref in given))
                if trainer.n_updates == 2:
                    trainer.validate()

    given, alive = [], []
    dls = DataLoaders(batches(), batches(2))
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(3, 2), [BasicTrainCB(), KeepsCB()])
    trainer.fit(1, valid=False)
    assert len(set(alive)) == 1


class RemoteObject:
    def __getattribute__(self, name):
        raise ConnectionError("not connected")


def test_a_callback_that_watches_may_hold_an_object_that_fails_whenever_it_is_asked():
    callback = CopyCB(lambda trainer: None)
    callback.held, callback.pair = RemoteObject(), (RemoteObject(), [RemoteObject()])
    callbacks = [BasicTrainCB(), MetricsCB(show=False), callback, EvaluatorCB(updates=2)]
    dls = DataLoaders(batches(), batches(2))
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(3, 2), callbacks)
    trainer.fit(1)
    assert trainer.n_updates == 8
