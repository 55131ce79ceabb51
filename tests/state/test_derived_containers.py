"""Classes that are derived from a container, in a callback: their entries and attributes go on.

So does the class, no matter how its objects are made."""

import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import pytest
import torch

from cutting import cut_once, small_trainer
from isaac_loop.state.change_marks import Marker
from isaac_loop.state.changed_values import Keeper
from isaac_loop.state.put_values import Putter
from isaac_loop.state.filled_objects import Knower


class Losses(list):
    total = 0.0

    def add(self, loss):
        self.append(loss)
        self.total += loss


class Recent(deque):
    def __init__(self, size):
        super().__init__(maxlen=size)
        self.n = 0

    def add(self, loss):
        self.append(loss)
        self.n += 1


class Named(OrderedDict):
    def add(self, loss):
        self[len(self)] = loss
        self.last = torch.tensor(loss)


class Slotted(dict):
    __slots__ = ("n",)

    def add(self, loss):
        self[len(self) % 2] = loss
        self.n = getattr(self, "n", 0) + 1


class Seen(set):
    def __init__(self, first):
        super().__init__()
        self.first = [first]

    def add(self, loss):
        super().add(len(self))
        self.first.append(loss)


class Pair(tuple):
    def with_one(self, loss):
        made = Pair((*self, loss)[-2:])
        made.n = getattr(self, "n", 0) + 1
        return made


class Point(namedtuple("Point", "x y")):
    def __new__(cls, x):
        return super().__new__(cls, x, -x)


class GatherCB:
    def __init__(self):
        self.plain, self.counts = OrderedDict(), Counter()
        self.held = [Losses(), Recent(3), Named(), Slotted(), Seen(1.0)]
        self.alone, self.also = Recent(2), self.held[0]
        self.pair, self.point, self.some = Pair(), Point(0.0), frozenset()

    def after_batch(self, trainer):
        loss = trainer.loss.item()
        for some in [*self.held, self.alone]:
            some.add(loss)
        self.plain.n = self.counts.n = trainer.n_updates
        self.pair, self.point = self.pair.with_one(loss), Point(loss)

    def before_backward(self, trainer):
        trainer.loss = trainer.loss * (1 + len(self.held[1])) / (1 + self.held[0].total + len(self.pair))


def look(trainer):
    cb = trainer.GatherCB
    every = [*cb.held, cb.alone, cb.plain, cb.counts, cb.pair, cb.point]
    own = [(type(x), x, getattr(x, "__dict__", None), getattr(x, "maxlen", None)) for x in every]
    return own, cb.held[3].n, cb.also is cb.held[0]


def test_entries_and_attributes_of_derived_containers_go_on(tmp_path):
    cut_once(tmp_path, lambda: small_trainer(GatherCB()), look)


class Smooth(list):
    "Its entries are not what it was given"

    def append(self, loss):
        super().append(0.5 * loss + 0.5 * self[-1] if self else loss)

    def extend(self, losses):
        for loss in losses:
            self.append(loss)

    def clear(self):
        raise RuntimeError("nothing is forgotten")


class SmoothDeque(deque):
    extend = Smooth.extend

    def append(self, loss):
        super().append(0.5 * loss + 0.5 * self[-1] if self else loss)


class Halved(OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value / 2)


class Sums(defaultdict):
    def __init__(self):
        super().__init__(float)


class Even(set):
    def add(self, n):
        super().add(2 * n)

    def update(self, some):
        for n in some:
            self.add(n)


class OwnWaysCB:
    def __init__(self):
        self.smooth, self.last, self.halves, self.sums, self.even = self.new()

    def new(self):
        return Smooth(), SmoothDeque(maxlen=2), Halved(), Sums(), Even()

    def after_batch(self, trainer):
        loss = trainer.loss.item()
        self.smooth.append(loss)
        self.last.append(loss)
        self.halves[trainer.n_updates % 3] = self.sums[trainer.n_updates % 3] + loss
        self.sums[trainer.n_updates % 2] += loss
        self.even.add(trainer.n_updates)


class OwnWaysAnewCB(OwnWaysCB):
    "The containers of a fit are not those of the beginning"

    def after_batch(self, trainer):
        if trainer.n_updates == 1:
            self.smooth, self.last, self.halves, self.sums, self.even = self.new()
        super().after_batch(trainer)


@pytest.mark.parametrize("make", [OwnWaysCB, OwnWaysAnewCB])
def test_what_a_class_does_with_new_entries_is_not_done_again(make, tmp_path):
    def look(trainer):
        cb = trainer.callbacks[1]
        return cb.smooth, cb.last, list(cb.halves.items()), cb.sums, sorted(cb.even), cb.sums["new"]

    cut_once(tmp_path, lambda: small_trainer(make()), look)


def test_a_sum_beside_entries_that_stay_counts_as_a_change():
    losses = Losses([1.0])
    before = Marker(()).mark(losses)
    assert Marker(()).mark(losses) == before
    losses.total += 1
    assert Marker(()).mark(losses) != before


@pytest.mark.parametrize("make", [lambda: Pair((1, 2)), lambda: time.gmtime(0), lambda: Recent(2)])
def test_a_container_is_made_again_by_one_of_its_class(make):
    x = make()
    mark = Knower(()).mark(make())
    made = Putter(torch.device("cpu")).put(make(), Keeper(()).keep(x, mark, mark), "x")
    assert type(made) is type(x) and made == x


class StrideCB:
    def __init__(self):
        self.sums = torch.zeros(1).expand(3)
        self.rows = torch.zeros(1, 2).expand(4, 2)

    def after_batch(self, trainer):
        self.sums[:1] += 1
        self.rows[1, 0] += 1


def test_a_tensor_of_one_number_seen_many_times_stays_one(tmp_path):
    "As `expand` gives it: an update of one place is one of all"

    def look(trainer):
        cb = trainer.StrideCB
        return cb.sums.tolist(), cb.sums.stride(), cb.rows.tolist(), cb.rows.stride()

    cut_once(tmp_path, lambda: small_trainer(StrideCB()), look)


class RowCB:
    "A row, and a table that shows it many times: what is written to the one is in the other"

    def __init__(self, names=("row", "table")):
        row = torch.zeros(3)
        made = dict(row=row, table=row.expand(4, 3), column=row[:1].expand(2))
        vars(self).update({name: made[name] for name in names})

    def before_backward(self, trainer):
        self.row += 1
        trainer.loss = trainer.loss * (1 + self.table.sum())


@pytest.mark.parametrize("names", [("row", "table"), ("table", "row"), ("column", "table", "row")])
def test_a_row_and_the_table_that_repeats_it_stay_one(names, tmp_path):
    def look(trainer):
        cb = trainer.RowCB
        cb.row += 0.5
        return cb.row.tolist(), cb.table.tolist(), cb.table.stride()

    cut_once(tmp_path, lambda: small_trainer(RowCB(names)), look)


class AnewCB(RowCB):
    "Makes both anew in the middle"

    def after_batch(self, trainer):
        if trainer.n_updates in (1, 4):
            RowCB.__init__(self)


class TableAnewCB(RowCB):
    "Makes the table anew, of the row that is there"

    def after_batch(self, trainer):
        if trainer.n_updates in (1, 4):
            self.table = self.row.expand(4, 3)


@pytest.mark.parametrize("make", [AnewCB, TableAnewCB])
def test_a_table_that_is_made_on_the_way_shows_its_row(make, tmp_path):
    def look(trainer):
        cb = trainer.callbacks[1]
        return cb.row.tolist(), cb.table.tolist()

    cut_once(tmp_path, lambda: small_trainer(make()), look)
