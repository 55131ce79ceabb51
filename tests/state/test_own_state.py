"""The state of callbacks that tell none: a run that was stopped and goes on, against the same run that was
never stopped.

Whatever changes during a fit in attributes of a callback, or of a subclass of the trainer, is kept or named.
"""

import collections
import dataclasses
import pickle
import random
import math
import warnings
from collections import namedtuple
from pathlib import Path
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastcore.nbio import read_nb
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import isaac_loop.all as library
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelBatchException
from isaac_loop.loop.spans import with_cbs
from isaac_loop.loop.trainer import Trainer
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.state.own_state import OwnState
from runs import Cut, CutCB, fit, make_loaders, make_trainer
from cutting import stopped_and_not, with_loss
import runs
from small import trainer_with
from places import TUTORIALS


def classes_of(tutorial):
    "The classes that a tutorial defines, made by its own cells"
    names = dict(vars(library))
    for cell in read_nb(TUTORIALS / f"{tutorial}.ipynb").cells:
        if cell.cell_type == "code" and (
            cell.source.startswith(("import", "class", "def ")) or "\nclass " in cell.source
        ):
            try:
                exec(cell.source, names)
            except Exception:
                pass  # A cell that goes on to use them
    return SimpleNamespace(**names)


# ---- the callbacks of the tutorial

OWN = classes_of("own_callbacks")


def worse(trainer):
    trainer.history.write(spoilt=float(len(trainer.history)))


worse.__name__ = "after_epoch"
TAUGHT = {
    "PatienceCB": (lambda: [OWN.PatienceCB("spoilt", patience=4), worse], lambda t: vars(t.PatienceCB.watch)),
    "AccumulateCB": (lambda: [OWN.AccumulateCB(3)], lambda t: (t.AccumulateCB.rows, t.AccumulateCB.n_seen)),
    "TriangleCB": (lambda: [OWN.TriangleCB()], lambda t: t.TriangleCB.tops),
    "ClipCB": (lambda: [OWN.ClipCB()], lambda t: None),
    "GainCB": (
        lambda: [OWN.GainCB()],
        lambda t: {k: (o.read(), o.places()) for k, o in t.GainCB.record.items()},
    ),
}


@pytest.mark.parametrize("name", TAUGHT)
def test_callbacks_of_the_tutorial_go_on_where_they_were(name, tmp_path):
    make_cbs, attributes = TAUGHT[name]
    trainer = stopped_and_not(
        tmp_path,
        lambda: make_trainer([BasicTrainCB(), MetricsCB(show=False), *make_cbs()]),
        [4, 10, 14],
        9 if name == "PatienceCB" else 3,
        attributes,
    )
    if name == "PatienceCB":
        assert len(trainer.history) == 5


# ---- states of all kinds


class Meter:
    "What everybody has written once"

    def __init__(self):
        self.sum, self.n = 0.0, 0

    def add(self, x):
        self.sum, self.n = self.sum + x, self.n + 1


class ManyCB:
    "Holds state of many kinds, and lets all of it decide how the weights change"

    order = 5
    unset = 0
    __slots__ = ("slot", "__dict__")

    def __init__(self):
        self.n, self.tensor, self.numpy, self.drawn = (
            0,
            torch.zeros(3),
            np.zeros(2, "float32"),
            torch.Generator().manual_seed(3),
        )

    def before_fit(self, trainer):
        self.left, self.meter, self.window, self.counts, self.best = (
            30,
            Meter(),
            collections.deque(maxlen=3),
            collections.defaultdict(int),
            None,
        )
        self.places, self.order = collections.Counter(), collections.OrderedDict(a=0)
        self.average, self.rng, self.python, self.slot = (
            nn.BatchNorm1d(3),
            np.random.default_rng(0),
            random.Random(0),
            0.0,
        )
        self.sources = [np.random.SFC64(1), np.random.Philox(1), np.random.MT19937(1)]
        self.trainer, self.weights = trainer, list(trainer.model.parameters())
        self.meters = {"a": Meter(), "b": [Meter()]}

    def after_step(self, trainer):
        self.n, self.left, self.unset, self.slot = self.n + 1, self.left - 1, self.unset + 1, self.slot + 0.5
        self.tensor += trainer.loss.detach()
        self.row = self.tensor[1:]
        self.numpy *= np.float32(1.1)
        self.numpy += np.float32(0.1)
        self.best = trainer.loss if self.best is None else torch.minimum(self.best, trainer.loss)
        self.window.append(float(self.drawn_number()))
        self.counts[trainer.batch_num] += 1
        self.places.update("ab")
        self.order[trainer.batch_num] = self.n
        for o in (self.meter, self.meters["a"], self.meters["b"][0]):
            o.add(self.window[-1])
        self.average(torch.randn(4, 3, generator=self.drawn))
        with torch.no_grad():
            for w in self.weights:
                w += 1e-3 * (
                    self.meter.sum / self.meter.n
                    + self.numpy[0]
                    + self.average.running_mean.sum()
                    + len(self.window)
                    + self.left
                    + self.best
                    + self.slot
                    + self.unset
                )

    def drawn_number(self):
        raw = sum(o.random_raw() % 1000 for o in self.sources) / 1000
        return self.rng.random() + self.python.random() + torch.rand((), generator=self.drawn) + raw


def test_every_kind_of_attribute_goes_on(tmp_path):
    kept = lambda t: (
        {k: getattr(t.ManyCB, k) for k in ("n", "left", "unset", "slot", "tensor", "row", "numpy", "best")}
        | dict(
            meter=vars(t.ManyCB.meters["b"][0]),
            counts=t.ManyCB.counts,
            places=t.ManyCB.places,
            order=t.ManyCB.order,
        )
    )
    trainer = stopped_and_not(
        tmp_path, lambda: make_trainer([BasicTrainCB(), ManyCB()]), [3, 8, 9, 14, 20], attributes=kept
    )
    cb = trainer.ManyCB
    assert (
        cb.numpy.dtype == np.float32
        and cb.window.maxlen == 3
        and cb.counts["new"] == 0
        and cb.trainer is trainer
    )
    before = cb.row[0].item()
    cb.tensor += 1
    assert cb.row[0].item() == before + 1, "a view is a view again"


def after_step(trainer):
    "A function that counts, and acts on it"
    after_step.n += 1
    trainer.opt.param_groups[0]["lr"] = 0.01 / after_step.n


def test_functions_and_namespaces_and_methods_have_state_too(tmp_path):
    class Owner:
        def __init__(self):
            self.n = 0

        def after_step(self, trainer):
            self.n += 1
            trainer.opt.param_groups[0]["weight_decay"] = 0.01 * self.n

    def make():
        after_step.n, space = 0, SimpleNamespace(name="space", total=0.0)
        space.after_batch = lambda trainer: setattr(space, "total", space.total + 1)
        owner = Owner()
        method = owner.after_step
        trainer = make_trainer(
            [
                BasicTrainCB(),
                after_step,
                space,
                SimpleNamespace(name="holder", after_epoch=lambda t: None, method=method),
            ]
        )
        trainer.owner = owner
        return trainer

    trainer = stopped_and_not(tmp_path, make, [3, 10], attributes=lambda t: t.space.total)
    assert after_step.n == 21 and trainer.space.total == 3 * (7 + 2)


class Carrying(Trainer):
    "Carries the state of an LSTM from batch to batch, and counts"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.carried, self.seen = None, 0

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        out, (h, c) = self.model.rnn(x[:, None], self.carried if self.training else None)
        self.preds = self.model.out(out[:, -1])
        self.loss = F.cross_entropy(self.preds, y)
        if self.training:
            self.carried, self.seen = (h.detach(), c.detach()), self.seen + len(x)
            self.loss.backward()
            self.run_callbacks("step")
            self.opt.zero_grad()


def test_a_trainer_that_carries_a_state_goes_on_with_it(tmp_path):
    def make():
        library.set_seed(3)
        model = nn.ModuleDict(dict(rnn=nn.LSTM(8, 5, batch_first=True), out=nn.Linear(5, 3)))
        step = SimpleNamespace(name="step_cb", step=lambda t: t.opt.step())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Carrying(make_loaders(), F.cross_entropy, optim.Adam, model, [step, MetricsCB(show=False)])

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No callback does")
        trainer = stopped_and_not(tmp_path, make, [4, 10, 14], attributes=lambda t: (t.carried, t.seen))
    assert trainer.seen == 3 * 56


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("piece", [0, 4, 5, 9, 11])
def test_wrapped_batches_that_are_read_again_do_not_undo_it(exact, piece, tmp_path):
    "The run is not where its loader is: that is read again through all wrappers, which change their state"
    odd = classes_of("odd_loops")

    def make():
        torch.manual_seed(1)
        phases = 6.3 * torch.rand(4, 8, 1, 1)
        waves = torch.sin(phases + 0.3 * torch.arange(61).view(1, 1, -1, 1))
        batches = [(o[:, :-1], o[:, 1:]) for o in waves]
        dl = exact_loader([row for batch in batches for row in zip(*batch)], 8, seed=3) if exact else batches
        return Trainer(DataLoaders(dl), F.mse_loss, optim.Adam, odd.NextNumber(), [odd.PiecesCB(3)])

    whole = fit(make(), 2, valid=False)
    first, second = make(), make()
    for o in (first, second):
        o.add_callbacks(CheckpointCB(tmp_path / "run", every=1))
    with pytest.raises(Cut):
        fit(
            first,
            2,
            valid=False,
            callbacks=CutCB("before_predict", lambda t: t.epoch == 1 and t.batch_num == piece),
        )
    fit(second, 2, valid=False)
    runs.same(whole, second)


class HalvesCB:
    order = -5

    def before_epoch(self, trainer):
        if trainer.training:
            trainer.batches = self.walk(trainer.batches)

    def walk(self, batches):
        for x, y in batches:
            yield from ((x[:4], y[:4]), (x[4:], y[4:]))


class TwiceCB(HalvesCB):
    def walk(self, batches):
        for batch in batches:
            yield from (batch, batch)


def plain_loaders():
    "Whose rows are the same when they are read again; what is kept back of random ones is not found again"
    return DataLoaders(DataLoader(runs.Rows(56, augment=False), 8, shuffle=True))


@pytest.mark.filterwarnings("ignore:.*read again")
@pytest.mark.parametrize("loaders", [make_loaders, plain_loaders])
@pytest.mark.parametrize("cls, cuts", [(HalvesCB, [1, 2, 7, 13, 14, 21]), (TwiceCB, [3, 7, 13])])
def test_a_run_that_is_elsewhere_than_its_loader_goes_on(cls, cuts, loaders, tmp_path):
    "Split or repeated, also where both have counted as far, or the run as far as the loader is long"
    make = lambda: make_trainer([BasicTrainCB(), cls()], loaders())
    whole = fit(make(), 2, valid=False)
    for n in cuts:
        first, second = make(), make()
        for o in (first, second):
            o.add_callbacks(CheckpointCB(tmp_path / f"{n}", every=1))
        with pytest.raises(Cut):
            fit(first, 2, valid=False, callbacks=CutCB("before_predict", lambda t: t.n_updates == n))
        runs.same(whole, fit(second, 2, valid=False))


def test_what_may_be_forgotten_is_said_by_name():
    class CountCB:
        stateless = 3

        def after_step(self, trainer):
            self.n = trainer.n_updates

    with pytest.raises(TypeError, match="`CountCB.stateless` is 3, .* the name of an attribute"):
        fit(make_trainer([BasicTrainCB(), CountCB()]), 1)


def test_whoever_splits_batches_behind_the_back_of_what_is_saved_is_told(tmp_path):
    "With a higher order than `CheckpointCB` nobody knows which pieces were trained"
    late = HalvesCB()
    late.order = 60
    with pytest.warns(
        UserWarning, match="`CheckpointCB` has handed on 2 batches, but 4 were trained.*`order` below 40"
    ):
        fit(make_trainer([BasicTrainCB(), late, CheckpointCB(tmp_path / "run")]), 1, valid=False)


def test_a_rewind_takes_own_states_back():
    class CountCB:
        def __init__(self):
            self.n = 0

        def after_step(self, trainer):
            self.n += 1

    trainer = fit(make_trainer([BasicTrainCB(), CountCB(), RewindCB()]))
    for epoch in (2, 1, 0):
        trainer.rewind(epoch)
        fit(trainer)
        assert trainer.CountCB.n == 21


def test_a_value_that_came_back_to_where_it_began_is_state_all_the_same(tmp_path):
    class LivesCB:
        "Begins at 0, has 5 lives in a fit, and loses one in each epoch"

        def __init__(self):
            self.left = 0

        def before_fit(self, trainer):
            self.left = 2

        def log(self, trainer):
            self.left -= 1
            if self.left < 0:
                trainer.request_stop("no life left")

    stopped_and_not(tmp_path, lambda: make_trainer([BasicTrainCB(), LivesCB()]), [14], 6)


def test_a_container_may_have_become_one_of_another_kind(tmp_path):
    class BestCB:
        "A list until the first batch, and a dict with a list in it afterwards"

        def __init__(self):
            self.best = []

        def after_batch(self, trainer):
            if not self.best or trainer.loss < self.best["loss"]:
                self.best = {"loss": trainer.loss.item(), "rows": [trainer.batch_num]}

    make = lambda: make_trainer([BasicTrainCB(), BestCB()])
    stopped_and_not(tmp_path, make, [4], 2, lambda t: t.BestCB.best)


# ---- settings, and what is told


class RateCB:
    def __init__(self, rate=0.1):
        self.rate, self.n = rate, 0

    def after_step(self, trainer):
        self.n += 1


def saved_and_again(tmp_path, first, *second):
    "What is told when a run goes on with other callbacks, and its trainer"
    with pytest.raises(Cut):
        fit(
            make_trainer(
                [
                    BasicTrainCB(),
                    first,
                    CheckpointCB(tmp_path / "run", every=2),
                    CutCB("before_step", lambda t: t.n_updates == 9),
                ]
            )
        )
    trainer = make_trainer([BasicTrainCB(), *second, CheckpointCB(tmp_path / "run", every=2)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(trainer)
    return trainer, " ".join(str(o.message) for o in told if issubclass(o.category, UserWarning))


def test_settings_are_those_of_the_script_and_a_difference_is_told(tmp_path):
    trainer, told = saved_and_again(tmp_path / "a", RateCB(), RateCB(0.2))
    assert (trainer.RateCB.rate, trainer.RateCB.n) == (0.2, 21) and "`RateCB.rate=0.2` (saved: 0.1)" in told
    assert not saved_and_again(tmp_path / "b", RateCB(), RateCB())[1]
    gone = saved_and_again(tmp_path / "c", RateCB())[1]
    assert "saved of `RateCB` has no callback or module any more" in gone


class ListCB(RateCB):
    def __init__(self):
        self.n = []

    def after_step(self, trainer):
        self.n.append(1)


ListCB.__qualname__ = ListCB.__name__ = "RateCB"


def test_an_attribute_of_another_kind_than_in_the_saved_run_begins_anew_and_is_told(tmp_path):
    trainer, told = saved_and_again(tmp_path / "a", RateCB(), ListCB())
    assert "`RateCB.n` was a number when that run began, and is a list now" in told
    assert trainer.RateCB.n == [1] * 13 and "the names and kinds that they had" in told
    trainer, told = saved_and_again(tmp_path / "b", ListCB(), RateCB())
    assert "`RateCB.n` was a list when that run began, and is a number now" in told
    assert trainer.RateCB.n == 13


class RenamedCB(RateCB):
    def __init__(self):
        self.steps = 0

    def after_step(self, trainer):
        self.steps += 1


RenamedCB.__qualname__ = RenamedCB.__name__ = "RateCB"


class NamedLateCB(RenamedCB):
    "Comes to the old name by other means"

    def before_epoch(self, trainer):
        self.n = getattr(self, "n", 0)


NamedLateCB.__qualname__ = NamedLateCB.__name__ = "RateCB"


def test_an_attribute_that_has_another_name_begins_anew_and_is_told(tmp_path):
    trainer, told = saved_and_again(tmp_path / "a", RateCB(), RenamedCB())
    assert "`RateCB.n` has gone, and `steps` is new" in told and vars(trainer.RateCB) == {"steps": 13}
    trainer, told = saved_and_again(tmp_path / "b", RateCB(), NamedLateCB())
    assert trainer.RateCB.n == 8 and "has gone" not in told


@pytest.mark.parametrize("wrap", [float, lambda x: [1.0, x], lambda x: (x, None), lambda x: [[x], {"a": x}]])
def test_a_setting_that_is_no_number_is_still_the_same(wrap, tmp_path):
    assert not saved_and_again(tmp_path, *(RateCB(wrap(float("nan"))) for _ in range(2)))[1]


def test_a_setting_that_has_become_a_number_is_told(tmp_path):
    told = saved_and_again(tmp_path, RateCB([float("nan"), 1.0]), RateCB([0.5, 1.0]))[1]
    assert "`RateCB.rate=[0.5, 1.0]` (saved: [nan, 1.0])" in told


@pytest.mark.parametrize(
    "wrap", [torch.tensor, np.array, lambda x: [torch.tensor(x), 3], lambda x: {"a": np.array(x)}]
)
def test_a_setting_of_tensors_or_arrays_is_told_too(wrap, tmp_path):
    first, again, other = (RateCB(wrap(o)) for o in ([1.0, 2.0], [1.0, 2.0], [1.0, 3.0]))
    assert not saved_and_again(tmp_path / "a", first, again)[1]
    trainer, told = saved_and_again(tmp_path / "b", first, other)
    assert "`RateCB.rate` (saved: other numbers)" in told and trainer.RateCB.rate is other.rate


OTHERS = {
    "one of many": lambda n: torch.arange(5000) == n,
    "a small one beside a large": lambda n: torch.tensor([0.001 * (n + 1), 1000.0]),
    "none": lambda n: torch.tensor([1.0, math.nan if n else 0.1]),
    "a number of NumPy": lambda n: np.float64(n + 0.5),
    "a dict of numbers": lambda n: {"a": n + 0.5},
    "one of many fractions": lambda n: torch.linspace(0, 1, 5000).index_fill(0, torch.tensor([17]), n + 2.0),
    "names": lambda n: {"ab"[n]: torch.ones(2)},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_setting_of_tensors_is_told_however_little_differs(kind, tmp_path):
    one, other = OTHERS[kind](0), OTHERS[kind](1)
    assert not saved_and_again(tmp_path / "a", RateCB(one), RateCB(OTHERS[kind](0)))[1]
    assert "`RateCB.rate" in saved_and_again(tmp_path / "b", RateCB(one), RateCB(other))[1]


def test_a_setting_that_another_machine_has_worked_out_is_the_same(tmp_path):
    fractions = torch.rand(5000)
    near = fractions * (1 + 1e-7)
    assert not saved_and_again(tmp_path, RateCB(fractions), RateCB(near))[1]


def test_what_a_callback_holds_of_the_model_is_no_setting(tmp_path):
    held = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    first, other = (RateCB([torch.nn.Parameter(o.weight * 0 + i)]) for i, o in enumerate(held))
    assert "`RateCB.rate`" in saved_and_again(tmp_path / "a", first, other)[1]

    class HoldsCB(RateCB):
        def __init__(self, trainer):
            super().__init__(list(trainer.model.parameters()))

    def make():
        trainer = make_trainer([BasicTrainCB(), CheckpointCB(tmp_path / "b", every=2)])
        trainer.add_callback(HoldsCB(trainer))
        return trainer

    fit(make())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().fit(4, lr=0.02, valid=False)


class StreamCB:
    "Has another stream of data, which no checkpoint can hold"

    def before_fit(self, trainer):
        self.rows = iter(range(100))

    def after_step(self, trainer):
        self.row = next(self.rows)


class LazyCB:
    "Makes an object in the middle of a fit"

    meter = None

    def after_step(self, trainer):
        self.meter = self.meter or Meter()


class KeyedCB:
    def before_fit(self, trainer):
        self.norms = {}

    def after_step(self, trainer):
        self.norms |= {p: p.norm().item() for p in trainer.model.parameters()}


@pytest.mark.parametrize(
    "make, path", [(StreamCB, "StreamCB.rows"), (LazyCB, "LazyCB.meter"), (KeyedCB, "KeyedCB.norms")]
)
def test_what_cannot_be_kept_is_named_once_and_may_be_said_to_go(make, path, tmp_path):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(make_trainer([BasicTrainCB(), make(), CheckpointCB(tmp_path / "run", every=2)]))
    assert [f"`{path}` changed during this fit and cannot be kept" in str(o.message) for o in told] == [True]
    may_go = type(make.__name__, (make,), dict(stateless=path.partition(".")[2]))
    fit(make_trainer([BasicTrainCB(), may_go(), CheckpointCB(tmp_path / "again", every=2)]))


class AppendCB:
    def before_fit(self, trainer):
        self.add = [].append

    def after_step(self, trainer):
        self.add(trainer.batch_num)


class PartialCB(AppendCB):
    def before_fit(self, trainer):
        self.add = partial(lambda seen, n: seen.append(n), [])


class ClosureCB(AppendCB):
    def before_fit(self, trainer):
        seen = []
        self.add = lambda n: seen.append(n)


class KnownCB(AppendCB):
    "The list is kept, and is another one than that of the method"

    stateless = "seen"

    def before_fit(self, trainer):
        self.seen = []
        self.add = partial(self.seen.append)


class ViewCB:
    def before_fit(self, trainer):
        self.sums = np.zeros(3)
        self.view = self.look(self.sums)

    def look(self, x):
        return x[:1]

    def after_step(self, trainer):
        self.sums += 1


class MemoryCB(ViewCB):
    def look(self, x):
        return torch.from_numpy(x)


class OtherWayCB(ViewCB):
    def before_fit(self, trainer):
        self.sums = torch.zeros(3)
        self.view = [self.sums.numpy()]


class InsideCB(ViewCB):
    def look(self, x):
        return [x, torch.from_numpy(x[:1])]


@pytest.mark.parametrize(
    "make, name",
    [
        (AppendCB, "add"),
        (PartialCB, "add"),
        (ClosureCB, "add"),
        (KnownCB, "add"),
        (ViewCB, "view"),
        (MemoryCB, "view"),
        (OtherWayCB, "view"),
        (InsideCB, "view"),
    ],
)
def test_what_a_callable_holds_and_memory_of_arrays_is_named(make, name):
    trainer, cb = make_trainer(), make()
    trainer.add_callbacks(cb)
    own = OwnState(trainer)
    cb.before_fit(trainer)
    own.note(trainer, ready=True)
    trainer.batch_num = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.take(trainer)
    cb.after_step(trainer)
    with pytest.warns(
        UserWarning, match=f"^`{make.__name__}.{name}` changed during this fit and cannot be kept"
    ):
        taken = own.take(trainer)
    assert name not in taken.get(make.__name__, dict(state=()))["state"]


class PieceCB:
    "Looks at pieces of data that stay as they are, and has functions that do"

    def before_fit(self, trainer):
        seen = [1]
        self.rows, self.many, self.functions = (
            np.arange(4.0),
            torch.arange(4.0),
            [print, self.after_step, partial(max, [1]), lambda: seen],
        )

    def after_step(self, trainer):
        self.row, self.one, self.now = self.rows[1:2], self.many[:2].numpy(), [].append


class TwoNamesCB:
    "A list with two names, also inside others"

    def before_fit(self, trainer):
        self.seen = []
        self.places = dict(seen=self.seen, pair=([], self.seen), meter=Meter())
        self.places["meter"].seen, self.again = self.seen, self.places["pair"]
        self.bytes = self.more = bytearray(b"a")

    def after_step(self, trainer):
        self.seen.append(len(self.places["meter"].seen))
        self.again[0].append(len(self.places["seen"]))
        self.more += b"b"


@pytest.mark.parametrize("make", [PieceCB, TwoNamesCB])
def test_what_has_two_names_goes_on_as_one_and_pieces_are_not_named(make, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = stopped_and_not(
            tmp_path,
            lambda: make_trainer([BasicTrainCB(), make()]),
            [4, 10],
            2,
            lambda t: (
                (t.TwoNamesCB.seen, t.TwoNamesCB.again, t.TwoNamesCB.bytes)
                if make is TwoNamesCB
                else (t.PieceCB.row, t.PieceCB.one)
            ),
        )
    if make is TwoNamesCB:
        cb = trainer.TwoNamesCB
        assert (
            cb.seen is cb.places["seen"] is cb.places["pair"][1] is cb.places["meter"].seen
            and cb.again is cb.places["pair"]
            and cb.bytes is cb.more
        )


class ShowingCB:
    "Holds what callbacks hold that draw, print and look"

    def before_fit(self, trainer):
        self.trainer, self.model, self.file, self.hooks = trainer, trainer.model, open("/dev/null", "w"), []

    def before_epoch(self, trainer):
        from tqdm import tqdm

        self.bar, self.show, self.params = (
            tqdm(disable=True),
            lambda x: x,
            dict(trainer.model.named_parameters()),
        )
        self.handle = trainer.model[0].register_forward_hook(lambda *args: None)

    def after_batch(self, trainer):
        (self.x, self.y), self.batch, self.loss, self.groups = (
            trainer.batch,
            trainer.batch,
            trainer.loss,
            trainer.opt.param_groups,
        )

    def cleanup_epoch(self, trainer):
        self.handle.remove()

    def cleanup_fit(self, trainer):
        self.file.close()


def test_what_callbacks_hold_to_look_and_show_is_not_named(tmp_path):
    fit(make_trainer([BasicTrainCB(), ShowingCB(), CheckpointCB(tmp_path / "run", every=2)]))


def everybody(folder):
    "Callbacks of the library that hold something during a fit and have no `state_dict`"
    accuracy = lambda preds, targs: (preds.argmax(1) == targs).float().mean().item()
    return [
        library.MixUpCB(),
        library.DeviceCB("cpu"),
        library.FreezeCB("0", until=1),
        library.BatchNormEvalCB(),
        library.ActivationStatsCB(nn.Linear),
        library.GradientStatsCB(),
        library.UpdateRatioCB(),
        library.EpochTimeCB(show=False),
        library.PrintColumnsCB("epoch"),
        library.ProfilerCB(),
        library.TimesCB(),
        library.InterruptCB(),
        library.LivePlotCB(folder / "plot.png"),
        library.ReportCB(accuracy=accuracy),
        library.PredictionsCSVCB(folder / "{epoch}.csv"),
        library.HistoryFilesCB(folder, plot=None),
        library.NotifyCB(lambda *args: None),
        library.RewindCB(),
        library.ExportCB(folder / "export"),
        library.CapturePredsCB(),
        library.RenameColumnsCB(train_loss="loss"),
        library.DerivedColumnsCB(twice=lambda row: 2 * row["valid_loss"]),
        library.BatchTransformCB(lambda batch: batch),
        library.DropoutOnCB(),
        library.ProgressCB("plain"),
        library.NBatchCB(5),
        library.TextComparisonCB(decode=str, truth=lambda batch: [[1]] * len(batch[1])),
    ]


def test_no_callback_of_the_library_holds_what_cannot_be_kept(tmp_path, capsys):
    "A save in the middle of a pass, and one after each epoch"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = fit(
            make_trainer(
                [BasicTrainCB(), MetricsCB(), *everybody(tmp_path), CheckpointCB(tmp_path / "run", every=2)]
            ),
            2,
        )
    assert not [str(o.message) for o in told if "cannot be kept" in str(o.message)]
    assert not {k: v for k, v in trainer._own_state.take(trainer).items() if v["state"]}, (
        "each has a `state_dict`, or says what may go"
    )


def test_what_is_kept_stands_in_the_order_of_the_attributes():
    "The same run writes the same checkpoint, whatever Python hashes names to"
    trainer = make_trainer()
    trainer.add_callbacks(
        SimpleNamespace(name="many", before_batch=lambda t: None, **dict.fromkeys("heapqyzx", 0))
    )
    own = OwnState(trainer)
    for o in "heapqyzx":
        setattr(trainer.many, o, 1)
    assert list(own.take(trainer)["many"]["state"]) == list("heapqyzx")


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_went_on_can_be_pickled(tmp_path):
    "What is remembered of who owns what is by identity, and stays behind"
    trainer_with(CheckpointCB(tmp_path)).fit(1)
    t = trainer_with()
    t.load(tmp_path)
    t.fit(2)
    assert pickle.loads(pickle.dumps(t)).model.weight.equal(t.model.weight)


# What a callback keeps of each batch


class GatherCB:
    "Keeps something of each batch, the newest by itself as well"

    def __init__(self, take):
        self.take, self.last, self.all = take, None, []

    def after_batch(self, trainer):
        if trainer.training:
            self.last = self.take(trainer)
            self.all.append(self.last)


class SharedCB:
    "Adds to what its class holds, as one does by mistake"

    def __init__(self):
        type(self).seen = []

    def after_step(self, trainer):
        self.seen.append(trainer.n_updates)


def test_a_list_of_the_class_is_state_too(tmp_path):
    trainer, told = saved_and_again(tmp_path, SharedCB(), SharedCB())
    assert len(trainer.SharedCB.seen) == 21 and not told


class OnceCB:
    "Has an attribute until the first batch"

    def __init__(self):
        self.first, self.n = True, 0

    def after_batch(self, trainer):
        if hasattr(self, "first"):
            del self.first
            self.n += 1


def test_what_a_callback_has_deleted_does_not_come_back(tmp_path):
    trainer, told = saved_and_again(tmp_path, OnceCB(), OnceCB())
    assert trainer.OnceCB.n == 1 and not hasattr(trainer.OnceCB, "first") and not told


Pair = namedtuple("Pair", "a b")
Nameless = namedtuple("OfAnotherName", "a")  # Nobody finds it again
GATHERED = {
    "the loss": lambda t: t.loss,
    "predictions": lambda t: t.preds,
    "a part of the batch": lambda t: t.batch[1],
    "the batch": lambda t: t.batch,
    "a dict": lambda t: {"loss": t.loss, "y": t.batch[1]},
    "a shape": lambda t: t.preds.shape,
    "a tuple with names": lambda t: Pair(1, t.preds.shape),
    "a device": lambda t: t.preds.device,
    "a path": lambda t: Path("here") / str(t.n_updates),
}


@pytest.mark.parametrize("what", GATHERED)
def test_what_is_kept_of_each_batch_goes_on(what, tmp_path):
    "Also if it is the trainer's at the moment of saving"
    take = GATHERED[what]
    trainer, told = saved_and_again(tmp_path, GatherCB(take), GatherCB(take))
    other = make_trainer([BasicTrainCB(), GatherCB(take)])
    fit(other)
    mine, theirs = trainer.GatherCB, other.GatherCB
    assert not told and len(mine.all) == len(theirs.all)
    for a, b in zip([mine.last, *mine.all], [theirs.last, *theirs.all]):
        assert tree_equal(a, b)


def tree_equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(tree_equal(a[k], b[k]) for k in a)
    if type(a) in (list, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(tree_equal, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(
    "take",
    [lambda t: Nameless(t.loss), lambda t: ValueError(t.n_updates), lambda t: t.loss.reshape(1).max(0)],
)
def test_what_cannot_be_made_again_is_named_when_it_is_saved(take, tmp_path):
    "And no placeholder comes back"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer, _ = saved_and_again(tmp_path, GatherCB(take), GatherCB(take))
    assert any("`GatherCB.all`" in str(o.message) and "cannot be kept" in str(o.message) for o in told)
    assert {type(o) for o in trainer.GatherCB.all} == {type(trainer.GatherCB.last)}


# ---- what the loss function and the data keep


class GrowingLoss:
    "Weighs a loss by the mean of those before it"

    mean = 0.0

    def __call__(self, preds, targets):
        loss = F.cross_entropy(preds, targets)
        if torch.is_grad_enabled():
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss * (1 + self.mean)


class CountingLoss(nn.Module):
    "A module with a number that is no buffer"

    def __init__(self):
        super().__init__()
        self.n_calls = 0

    def forward(self, preds, targets):
        self.n_calls += torch.is_grad_enabled()
        return F.cross_entropy(preds, targets) / (1 + self.n_calls)


class RestingLoss(GrowingLoss):
    stateless = "mean"


class HarderRows(runs.Rows):
    level = 0.0

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + self.level, y


class HarderCB:
    "Makes the data harder after each epoch"

    def log(self, trainer):
        trainer.dls.train.dataset.level += 0.3


@pytest.mark.parametrize("make", [GrowingLoss, CountingLoss])
def test_a_loss_function_goes_on_with_what_it_keeps(make, tmp_path):
    stopped_and_not(tmp_path, lambda: with_loss(make()), [4, 10, 14], attributes=lambda t: vars(t.loss_func))


def test_a_loss_of_a_method_is_the_state_of_its_object(tmp_path):
    class Judge:
        n = 0

        def judge(self, preds, targets):
            self.n += torch.is_grad_enabled()
            return F.cross_entropy(preds, targets) * (1 + self.n / 10)

    stopped_and_not(tmp_path, lambda: with_loss(Judge().judge), [4, 10])


def test_a_loss_may_say_that_nothing_is_to_be_kept():
    trainer = with_loss(RestingLoss())
    fit(trainer, 1)
    assert "loss_func" not in trainer._own_state.take(trainer)


def test_a_dataset_that_gets_harder_goes_on_as_hard_as_it_was(tmp_path):
    def make():
        dls = DataLoaders(exact_loader(HarderRows(56), 8, seed=7), make_loaders().valid)
        return make_trainer([BasicTrainCB(), MetricsCB(show=False), HarderCB()], dls)

    trainer = stopped_and_not(tmp_path, make, [4, 10, 15], attributes=lambda t: t.dls.train.dataset.level)
    assert trainer.dls.train.dataset.level == pytest.approx(0.9)


def test_a_dataset_inside_a_subset_is_found_and_where_its_files_lie_is_no_setting():
    rows = type("OwnRows", (torch.utils.data.Dataset,), dict(__len__=lambda self: 8))()
    rows.folder, rows.level = "/here", 0
    rows.__class__.__getitem__ = lambda self, i: (torch.zeros(8), 0)
    dls = DataLoaders(exact_loader(torch.utils.data.Subset(rows, range(8)), 4, in_memory=False))

    def log(trainer):
        rows.level += 1

    trainer = make_trainer([BasicTrainCB(), log], dls)
    trainer.fit(1, valid=False)
    assert trainer._own_state.take(trainer)["dls.train.dataset"] == dict(state=dict(level=1), settings={})


def test_a_frozen_dataclass_gets_back_what_it_held(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class KeepCB:
        losses: list = dataclasses.field(default_factory=list)

        def after_batch(self, trainer):
            self.losses.append(trainer.loss.item())

    stopped_and_not(
        tmp_path,
        lambda: make_trainer([BasicTrainCB(), MetricsCB(show=False), KeepCB()]),
        [4, 10],
        attributes=lambda t: t.KeepCB.losses,
    )


def test_what_is_kept_by_the_identity_of_parameters_is_named():
    "The `id`s of the process that goes on are others"

    class SlowWeightsCB:
        def before_fit(self, trainer):
            self.slow = {id(p): p.detach().clone() for p in trainer.model.parameters()}

        def after_step(self, trainer):
            for p in trainer.model.parameters():
                self.slow[id(p)].lerp_(p.detach(), 0.5)

    trainer = make_trainer([BasicTrainCB(), SlowWeightsCB()])
    fit(trainer, 1)
    with pytest.warns(UserWarning, match="`SlowWeightsCB.slow` changed during this fit and cannot be kept"):
        assert "slow" not in trainer._own_state.take(trainer).get("SlowWeightsCB", {}).get("state", {})


class ReadOnlyLoss:
    "Counts where a property reads, which has no setter"

    @property
    def n(self):
        return vars(self).get("n", 0)

    def __call__(self, preds, targets):
        vars(self)["n"] = self.n + torch.is_grad_enabled()
        return F.cross_entropy(preds, targets) / (1 + self.n)


class TellingLoss:
    "Has the two methods of a state, which nobody asks a loss for"

    k = 0

    def state_dict(self):
        return dict(k=self.k)

    def load_state_dict(self, state):
        self.k = state["k"]

    def __call__(self, preds, targets):
        self.k += torch.is_grad_enabled()
        return F.cross_entropy(preds, targets) / (1 + self.k)


@pytest.mark.parametrize("make", [ReadOnlyLoss, TellingLoss])
def test_a_loss_of_an_odd_kind_goes_on_too(make, tmp_path):
    stopped_and_not(tmp_path, lambda: with_loss(make()), [4, 10], attributes=lambda t: vars(t.loss_func))


def test_what_a_loss_cannot_keep_is_named_without_the_ways_of_callbacks():
    class DrawnLoss:
        def __init__(self):
            self.rows = iter(range(99))

        def __call__(self, preds, targets):
            next(self.rows)
            return F.cross_entropy(preds, targets)

    trainer = fit(with_loss(DrawnLoss()), 1)
    with pytest.warns(UserWarning, match="`loss_func.rows` changed") as told:
        trainer._own_state.take(trainer)
    assert "before_fit" not in str(told[0].message) and "stateless = ('rows',)" in str(told[0].message)


def warming(outside=True, **attributes):
    "A function that counts batches: outside of itself, or in an attribute"
    n = 0

    def before_batch(trainer):
        nonlocal n
        if outside:
            n += 1
        else:
            before_batch.n += 1
        for group in trainer.opt.param_groups:
            group["lr"] = 0.1 * min(1, (n if outside else before_batch.n) / 12)

    vars(before_batch).update(attributes)
    return before_batch


def warmed(callback, folder, cut=None):
    torch.manual_seed(1)
    x = torch.randn(96, 4)

    def before_backward(trainer):
        if trainer.n_updates == cut:
            raise KeyboardInterrupt

    dls = DataLoaders(exact_loader(list(zip(x, x.sum(1, keepdim=True))), 16, seed=1))
    callbacks = [BasicTrainCB(), callback, CheckpointCB(folder, every=1), before_backward]
    trainer = Trainer(dls, F.mse_loss, optim.SGD, nn.Linear(4, 1), callbacks)
    try:
        trainer.fit(2, lr=0.1, valid=False)
    except KeyboardInterrupt:
        pass
    return trainer.model.weight.tolist()


def test_what_a_function_writes_outside_is_named_once(tmp_path):
    with pytest.warns(UserWarning, match=r"`before_batch.n` changed .* by `nonlocal`") as told:
        warmed(warming(), tmp_path)
    assert len(told) == 1


def test_in_an_attribute_it_goes_on(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = warmed(warming(False, n=0), tmp_path / "whole")
        warmed(warming(False, n=0), tmp_path / "cut", 6)
        assert warmed(warming(False, n=0), tmp_path / "cut") == whole


def test_who_says_that_nothing_is_lost_hears_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warmed(warming(stateless="n"), tmp_path)
