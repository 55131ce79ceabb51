"""Data order, checked against the uninterrupted run.

The datasets here give their row number together with random numbers from Python, NumPy and PyTorch, so that
one can see which rows come, in which order, and whether they are augmented as they would have been. "The
same" always means equal in every bit. A position is saved at every batch, batch size and number of
processes change, workers fail, and data are streams.
"""

import copy
import ctypes
import gc
import multiprocessing
import os
import pickle
import random
import signal
import time
import warnings

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, get_worker_info

from isaac_loop.train.training import BasicTrainCB, NBatchCB
from isaac_loop.data import exact_loaders, replay_loaders
from isaac_loop.data.dataloaders import DataLoaders, collate_rows, get_dataloaders
from isaac_loop.data.exact_loaders import ExactLoader, exact_loader
from isaac_loop.data.replay_loaders import ReplayLoader
from isaac_loop.data.resumable_loaders import WorkerCrashed
from isaac_loop.data.sampling import SeededBatchSampler
from isaac_loop.state.random_numbers import random_state
from isaac_loop.loop.trainer import Trainer


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    "PyTorch waits 5 seconds for each worker that does not end at once"
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


MODES = {
    "no workers": {},
    "two workers": dict(num_workers=2),
    "persistent": dict(num_workers=2, persistent_workers=True),
}


def draw():
    return [random.random(), np.random.rand(), torch.rand(()).item()]


class Noisy:
    "Row i is i and three random numbers"

    def __init__(self, n=22):
        self.n, self.reads = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.reads.append(i)
        return torch.tensor([i, *draw()], dtype=torch.float64)


class NoisyBatches(Noisy):
    "The same, read many at a time"

    def __getitems__(self, rows):
        return [self[i] for i in rows]


def mixed(rows):
    "A `collate_fn` that draws as well"
    return torch.stack(rows) + torch.tensor([0.0, *draw()], dtype=torch.float64)


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def rows_of(batches):
    return [int(row) for batch in batches for row in batch[:, 0]]


def same_random_state(a, b):
    return (
        a["python"] == b["python"]
        and torch.equal(a["torch"], b["torch"])
        and all(np.array_equal(x, y) for x, y in zip(a["numpy"], b["numpy"]))
    )


# The order

sizes = dict(
    n=st.integers(0, 60),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(-5, 2**70),
    epoch=st.integers(0, 10**6),
)


def all_ranks(epoch, start=0, **kwargs):
    "The batches of every process"
    samplers = [SeededBatchSampler(rank=rank, **kwargs) for rank in range(kwargs["world_size"])]
    for o in samplers:
        o.set_epoch(epoch)
        o.start_at(start)
    return [list(o) for o in samplers], len(samplers[0])


def possible(n, world_size, drop_last, **_):
    return drop_last or n == 0 or n >= world_size


@pytest.mark.shows("F141")
@settings(max_examples=150, deadline=None)
@given(**sizes)
def test_every_sample_comes_once_in_an_epoch(epoch, **kwargs):
    "Whatever the sizes, all processes have the same number of batches, none is empty"
    if not possible(**kwargs):
        return
    ranks, length = all_ranks(epoch, **kwargs)
    given_rows = [row for batches in ranks for batch in batches for row in batch]
    full = kwargs["batch_size"] * kwargs["world_size"]
    assert (
        len(set(given_rows))
        == len(given_rows)
        == (kwargs["n"] // full * full if kwargs["drop_last"] else kwargs["n"])
    )
    assert {len(batches) for batches in ranks} == {length}
    assert all(batch for batches in ranks for batch in batches)
    assert all(len(batch) <= kwargs["batch_size"] + 1 for batches in ranks for batch in batches)
    keys = [batch.key for batches in ranks for batch in batches]
    assert len(set(keys)) == len(keys)


@pytest.mark.shows("F085")
@settings(max_examples=150, deadline=None)
@given(start=st.integers(0, 60), **sizes)
def test_going_on_gives_the_tail_of_the_order(start, epoch, **kwargs):
    "From any sample the rows are those that an uninterrupted epoch would have given after it"
    kwargs |= dict(world_size=1)
    start = min(start, kwargs["n"])
    [whole], _ = all_ranks(epoch, **kwargs | dict(drop_last=False))
    [tail], _ = all_ranks(epoch, start, **kwargs)
    order = [row for batch in whole for row in batch]
    rest = order[start:]
    if kwargs["drop_last"]:
        rest = rest[: len(rest) // kwargs["batch_size"] * kwargs["batch_size"]]
    assert [row for batch in tail for row in batch] == rest
    if start % kwargs["batch_size"] == 0:  # Then also the same batches with the same random numbers
        skipped = whole[start // kwargs["batch_size"] :][: len(tail)]
        assert tail == skipped and [o.key for o in tail] == [o.key for o in skipped]


@settings(max_examples=50, deadline=None)
@given(**sizes)
def test_processes_deal_out_the_batches_of_one(epoch, **kwargs):
    "Full batches of several processes are those of a single one, with the same random numbers"
    if not possible(**kwargs):
        return
    ranks, _ = all_ranks(epoch, **kwargs)
    [one], _ = all_ranks(epoch, **kwargs | dict(world_size=1))
    full = kwargs["n"] // (kwargs["batch_size"] * kwargs["world_size"])
    if full and 0 < kwargs["n"] % (kwargs["batch_size"] * kwargs["world_size"]) < kwargs["world_size"]:
        full -= 1  # The rest joins the last
    dealt = [batch for step in list(zip(*ranks))[:full] for batch in step]
    assert dealt == one[: len(dealt)] and [o.key for o in dealt] == [o.key for o in one[: len(dealt)]]


def test_orders_differ_between_seeds_and_epochs_and_stay_the_same():
    "An order is written down here, since it must not change from one version to the next"
    orders = {}
    for seed in range(4):
        for epoch in range(4):
            sampler = SeededBatchSampler(30, 30, seed)
            sampler.set_epoch(epoch)
            orders[seed, epoch] = tuple(next(iter(sampler)))
    assert len(set(orders.values())) == 16
    sampler = SeededBatchSampler(10, 4, seed=42)
    assert list(sampler) == [[8, 1, 7, 0], [6, 9, 4, 3], [2, 5]]


def test_all_places_are_equally_likely():
    "Over 2,000 epochs of 5 rows each row stands in each place about 400 times; 5 standard deviations are 90"
    counts = torch.zeros(5, 5)
    sampler = SeededBatchSampler(5, 5)
    for epoch in range(2000):
        sampler.set_epoch(epoch)
        counts[torch.arange(5), next(iter(sampler))] += 1
    assert (counts - 400).abs().max() < 90


def test_the_sampler_serves_a_plain_loader_too():
    loader = DataLoader(torch.arange(10), batch_sampler=SeededBatchSampler(10, 4, seed=42))
    assert [o.tolist() for o in loader] == [[8, 1, 7, 0], [6, 9, 4, 3], [2, 5]]


@pytest.mark.parametrize("drops", [False, True])
def test_it_is_told_what_becomes_of_the_rest_if_an_epoch_is_finished_with_another_drop_last(drops):
    first, second = (ExactLoader(Noisy(21), 4, seed=1, drop_last=o) for o in (not drops, drops))
    batches = iter(first)
    seen = rows_of([next(batches), next(batches)])
    words = "the rest that does not fill a batch is left out now" if drops else "also the rest that does not"
    with pytest.warns(UserWarning, match=words) as caught:
        second.load_state_dict(first.state_dict())
    assert "still comes once" not in str(caught[0].message)
    seen += rows_of(second)
    assert len(set(seen)) == len(seen) == (20 if drops else 21)


@pytest.mark.shows("F141")
@pytest.mark.parametrize(
    "before, after",
    [((16, 4), o) for o in ((32, 2), (16, 2), (8, 8), (64, 1), (16, 3))]
    + [((5, 1), (7, 3)), ((7, 3), (5, 1)), ((1, 1), (64, 4)), ((64, 1), (3, 5)), ((8, 2), (8, 2))],
)
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_can_be_finished_with_other_sizes(before, after, drop_last):
    "Batch size and number of processes change in the middle; every sample comes once, but for a dropped tail"
    dataset = Noisy(1000)
    loaders = [
        [
            ExactLoader(dataset, size, seed=1, drop_last=drop_last, rank=rank, world_size=world)
            for rank in range(world)
        ]
        for size, world in (before, after)
    ]
    first = [iter(o) for o in loaders[0]]
    seen = [row for _ in range(3) for one in first for row in rows_of([next(one)])]
    state = loaders[0][0].state_dict()
    assert state["samples"] == len(seen) and all(o.state_dict() == state for o in loaders[0])
    for one in loaders[1]:
        if before == after:
            one.load_state_dict(state)
        else:
            with pytest.warns(UserWarning, match="every sample still comes once"):
                one.load_state_dict(state)
    rest = [list(one) for one in loaders[1]]
    seen += [row for batches in rest for row in rows_of(batches)]
    assert len({len(o) for o in rest}) == 1
    lost = 1000 - len(seen)
    assert len(set(seen)) == len(seen) and (0 <= lost < after[0] * after[1] if drop_last else lost == 0)
    again = [row for one in loaders[1] for row in rows_of(one)]  # The next epoch is whole
    assert len(set(again)) == len(again) and 1000 - len(again) == (
        1000 % (after[0] * after[1]) if drop_last else 0
    )


def test_a_rest_that_cannot_be_shared_is_not_lost_in_silence():
    sampler = SeededBatchSampler(10, 2, world_size=3)
    with pytest.warns(UserWarning, match="last 2 samples"):
        sampler.start_at(8)
    assert list(sampler) == []


# The loader: the same batches in every way of reading


def reference(n_epochs=3, **kwargs):
    "Batches of an uninterrupted run, by epoch"
    loader = ExactLoader(Noisy(), 5, seed=3, collate_fn=mixed, **kwargs)
    return [list(loader) for _ in range(n_epochs)]


@pytest.mark.shows("F085", "F141", "NEMO-34", "PTA-51")
@pytest.mark.parametrize("mode", MODES)
def test_a_position_saved_at_any_batch_leads_to_the_same_run(mode):
    "Saved at every batch, in each mode, resumed in another one: rows and random numbers are the same"
    epochs = reference()
    assert len({tuple(rows_of(o)) for o in epochs}) == 3 and all(
        sorted(rows_of(o)) == list(range(22)) for o in epochs
    )
    loader = ExactLoader(Noisy(), 5, seed=3, collate_fn=mixed, **MODES[mode])
    states = []
    for epoch in epochs:
        states.append(loader.state_dict())
        for i, batch in enumerate(loader):
            assert torch.equal(batch, epoch[i])
            states.append(loader.state_dict())
    assert [(o["epoch"], o["samples"]) for o in states] == [
        (e, s) if s < 22 else (e + 1, 0) for e in range(3) for s in (0, 5, 10, 15, 20, 22)
    ]
    other = {
        "no workers": ["no workers", "two workers"],
        "two workers": ["no workers", "persistent"],
        "persistent": ["no workers", "two workers"],
    }[mode]
    for number, state in enumerate(states):
        later = ExactLoader(Noisy(), 5, seed=3, collate_fn=mixed, **MODES[other[number % 2]])
        later.load_state_dict(pickle.loads(pickle.dumps(state)))
        epoch, batch = state["epoch"], state["samples"] // 5
        for e in range(epoch, min(3, epoch + 2)):
            assert equal(list(later), epochs[e][batch if e == epoch else 0 :])


@pytest.mark.shows("ISA-100")
@pytest.mark.parametrize(
    "dataset",
    [NoisyBatches(), Subset(NoisyBatches(), range(22)), Subset(Noisy(), range(22))],
    ids=["getitems", "subset", "subset of items"],
)
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_every_kind_of_dataset_gives_the_same(dataset, workers):
    "`__getitems__` or not, in any number of workers, one of them idle at times"
    assert equal(
        list(ExactLoader(dataset, 5, seed=3, collate_fn=mixed, num_workers=workers)), reference(1)[0]
    )


def test_spawned_workers_give_the_same():
    "Nothing has to be inherited by fork, also not the `collate_fn` of `collate_rows`"
    loader = ExactLoader(Noisy(), 5, seed=3, collate_fn=mixed, num_workers=1, multiprocessing_context="spawn")
    assert equal(list(loader), reference(1)[0])
    assert pickle.loads(pickle.dumps(collate_rows(["x"])))([{"x": 1, "y": 2}])[0].tolist() == [1]


def test_the_three_generators_give_unrelated_numbers():
    "NumPy and PyTorch share an algorithm, and with one seed would share the numbers"
    noise = torch.cat(list(ExactLoader(Noisy(2000), 1)))[:, 1:]
    assert noise.T.corrcoef().fill_diagonal_(0).abs().max() < 0.1
    assert all(len(set(column.tolist())) == 2000 for column in noise.T)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["exact", "stream"])
def test_loading_leaves_the_random_numbers_alone(kind, mode):
    "Whole epochs, passes left early, and a row that cannot be read"
    loader = exact_loader(Noisy() if kind == "exact" else Stream(), 5, **MODES[mode])
    before = random_state()
    list(loader)
    for _ in loader:
        break
    list(loader)
    assert same_random_state(before, random_state())
    if kind == "stream":
        return
    with pytest.raises(IndexError):
        list(
            ExactLoader([1, 2, 3][:2] + [Noisy()], 3, collate_fn=lambda rows: [draw(), [][0]], **MODES[mode])
        )
    assert same_random_state(before, random_state())
    gc.collect()  # The workers of the loader that failed end here, and not in another test


@pytest.mark.shows("F085")
def test_nothing_is_read_to_reach_the_end_of_a_million_rows():
    "Going on at row 992,000 reads the 8,000 that are left"
    dataset = Noisy(1_000_000)
    loader = ExactLoader(dataset, 500, seed=7)
    loader.start_at(992_000)
    rows = rows_of(loader)
    assert dataset.reads == rows and len(set(rows)) == 8000
    sampler = SeededBatchSampler(1_000_000, 1_000_000, seed=7)
    assert rows == next(iter(sampler))[992_000:]
    assert len(loader) == 2000 and loader.state_dict()["epoch"] == 1


# Positions


def test_a_pass_left_early_is_followed_by_the_next_epoch():
    loader, epochs = ExactLoader(Noisy(), 5, seed=3, collate_fn=mixed), reference()
    for batch in loader:
        assert (
            torch.equal(batch, epochs[0][0]) and loader.samples == 5 and loader.state_dict()["samples"] == 5
        )
        break
    assert (loader.samples, loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (0, 1, 0)
    assert equal(list(loader), epochs[1]) and equal(list(loader), epochs[2])


def test_set_epoch_and_start_at_count_for_one_pass():
    loader, epochs = ExactLoader(Noisy(), 5, seed=3, collate_fn=mixed), reference()
    loader.set_epoch(1)
    loader.start_at(10)
    assert loader.state_dict() | dict(epoch=1, samples=10) == loader.state_dict()
    assert equal(list(loader), epochs[1][2:]) and equal(list(loader), epochs[2])
    loader.set_epoch(0)
    loader.start_at(22)
    assert equal(list(loader), epochs[1])
    loader.set_epoch(0)
    iter(loader)  # Nothing was taken, so nothing has passed
    assert equal(list(loader), epochs[0])


def test_two_passes_at_once_do_not_disturb_each_other():
    "As a run on the side reads in the middle of a pass; workers that persist can serve only one, and say so"
    loader, epochs = ExactLoader(Noisy(), 5, seed=3, collate_fn=mixed), reference()
    outer = iter(loader)
    start = [next(outer), next(outer)]
    assert equal(list(loader), epochs[1])
    assert equal(start + list(outer), epochs[0]) and equal(list(loader), epochs[1])
    assert list(outer) == [] and loader.state_dict()["epoch"] == 2
    loader = ExactLoader(Noisy(), 5, seed=3, **MODES["persistent"])
    outer = iter(loader)
    next(outer)
    for _ in loader:
        break
    with pytest.raises(RuntimeError, match="Another pass"):
        next(outer)
    assert len(list(loader)) == 5


@pytest.mark.shows("ISA-97")
def test_a_loader_is_a_data_loader_with_all_its_attributes():
    "And the dataset is the user's own, also where workers begin"
    dataset = Noisy()
    loader = ExactLoader(
        dataset, 5, num_workers=2, collate_fn=mixed, timeout=50, prefetch_factor=3, drop_last=True
    )
    assert isinstance(loader, DataLoader) and loader.dataset is dataset and loader.collate_fn is mixed
    assert (
        len(loader),
        loader.batch_size,
        loader.num_workers,
        loader.timeout,
        loader.prefetch_factor,
        loader.drop_last,
    ) == (4, 5, 2, 50, 3, True)

    def begin(worker):
        get_worker_info().dataset.n = -1 - worker

    class Marked(Noisy):
        def __getitem__(self, i):
            return torch.tensor([self.n, get_worker_info().dataset is self])

    assert {
        tuple(o)
        for batch in ExactLoader(Marked(4), 1, num_workers=2, worker_init_fn=begin)
        for o in batch.tolist()
    } == {(-1, 1), (-2, 1)}


def test_a_copy_goes_on_from_the_same_place():
    loader = ExactLoader(Noisy(), 5, seed=3, **MODES["persistent"])
    rest = []
    for i, batch in enumerate(loader):
        if i == 1:
            copies = [copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
        if i > 1:
            rest.append(batch)
    for o in copies:
        o.start_at(10)
    assert all(equal(list(o), rest) for o in copies)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: SeededBatchSampler(10, 0), ValueError, "`batch_size` is 0"),
        (lambda: SeededBatchSampler(10, 2.5), TypeError, "`batch_size` is 2.5"),
        (lambda: SeededBatchSampler(10, 2, seed="a"), TypeError, "`seed` is 'a'"),
        (lambda: SeededBatchSampler(10, 2, rank=2, world_size=2), ValueError, "numbers 0 to 1"),
        (lambda: SeededBatchSampler(2, 2, world_size=3), ValueError, "cannot be shared"),
        (lambda: SeededBatchSampler(10, 2).start_at(11), ValueError, "an epoch has only 10"),
        (lambda: SeededBatchSampler(10, 2).set_epoch(-1), ValueError, "`epoch` is -1"),
        (lambda: ExactLoader(Noisy(), None), TypeError, "`batch_size` is None"),
        (lambda: exact_loader(Noisy(), 2, shuffle="no"), TypeError, "`shuffle` is 'no'"),
        (lambda: exact_loader(Stream(), 2, shuffle="no"), TypeError, "`shuffle` is 'no'"),
        (lambda: exact_loader(Noisy(), 2, drop_last="no"), TypeError, "`drop_last` is 'no'"),
        (lambda: exact_loader(DataLoader(Noisy(), 2), 2), TypeError, "Pass the dataset itself"),
        (lambda: exact_loader(iter([1, 2]), 2), TypeError, "Pass the dataset itself"),
        (lambda: exact_loader(None, 3), TypeError, "`dataset` is None, which has neither rows"),
        (lambda: exact_loader(3, 3), TypeError, "nothing to load"),
        (lambda: exact_loader(Noisy(), 3, collate_fn=3), TypeError, "`collate_fn` is 3"),
        (lambda: exact_loader(Noisy(), 3, shuffle=1), TypeError, "`shuffle` is 1, which is neither"),
        (lambda: exact_loader(Noisy(), 3, drop_last=0.0), TypeError, "`drop_last` is 0.0, which is neither"),
        (lambda: ExactLoader(Noisy(), 2, sampler=[1, 2]), TypeError, "`sampler` was given"),
        (lambda: ExactLoader(Noisy(), 2, generator=torch.Generator()), TypeError, "`generator` was given"),
        (lambda: ExactLoader(Noisy(), 2, in_order=False), ValueError, "fastest worker"),
        (lambda: ExactLoader(Noisy(), 2, num_worker=2), TypeError, "num_worker"),
        (lambda: ReplayLoader(3), TypeError, "cannot be iterated more than once"),
        (lambda: ReplayLoader(x for x in "ab"), TypeError, "cannot be iterated more than once"),
        (lambda: ReplayLoader(DataLoader(Noisy(), 2, **MODES["persistent"])), ValueError, "exact_loader"),
    ],
)
def test_bad_arguments_are_refused_where_they_were_typed(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_state_of_another_order_is_refused_in_the_middle_of_an_epoch():
    "At its beginning it is only a warning, since every epoch to come is whole"
    loader = ExactLoader(Noisy(), 5, seed=3)
    for _ in loader:
        middle = loader.state_dict()
        break
    for other in (
        ExactLoader(Noisy(), 5, seed=4),
        ExactLoader(Noisy(23), 5, seed=3),
        ExactLoader(Noisy(), 5, seed=3, shuffle=False),
    ):
        with pytest.raises(ValueError, match="come twice"):
            other.load_state_dict(middle)
        with pytest.warns(UserWarning, match="not be those of the saved run"):
            other.load_state_dict(middle | dict(samples=0))
        assert other.state_dict()["samples"] == 0
    stream = ReplayLoader(DataLoader(Stream(), 4), seed=1)
    with pytest.raises(ValueError, match="`batch_size=5`"):
        stream.load_state_dict(dict(epoch=0, batches=1, seed=1, batch_size=5))


def test_a_dataset_that_changes_its_length_is_noticed():
    dataset = Noisy()
    loader = ExactLoader(dataset, 5)
    dataset.n = 30
    with pytest.raises(ValueError, match="30 rows now, and had 22"):
        list(loader)


# Trainers


def numbered(n):
    return Dataset.from_dict(
        {"x": [[float(i)] for i in range(n)], "y": [[float(i)] for i in range(n)]}
    ).with_format("torch")


def make_trainer(*callbacks, dls=None, **kwargs):
    dls = dls or DataLoaders.from_dataset_dict(
        DatasetDict(train=numbered(40), test=numbered(30)), 8, seed=42, **kwargs
    )
    torch.manual_seed(0)
    return Trainer(dls, F.mse_loss, optim.SGD, nn.Linear(1, 1), [BasicTrainCB(), *callbacks])


class Seen:
    "Remembers which rows were trained on"

    def __init__(self):
        self.rows = []

    def after_batch(self, trainer):
        if trainer.training:
            self.rows += trainer.batch[0][:, 0].int().tolist()


@pytest.mark.shows("ISA-100", "F141")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_seed_makes_both_loaders_exact(workers):
    "`seed` is enough, whatever was drawn before; validation keeps its order"

    def epochs():
        dls = DataLoaders.from_dataset_dict(
            DatasetDict(train=numbered(40), test=numbered(30)), 16, seed=42, num_workers=workers
        )
        assert type(dls.train) is type(dls.valid) is ExactLoader and (
            dls.train.batch_size,
            dls.valid.batch_size,
        ) == (16, 32)
        return [[int(i) for _, y in dl for i in y] for dl in (dls.train, dls.train, dls.valid, dls.valid)]

    torch.manual_seed(1)
    first = epochs()
    torch.manual_seed(2)
    assert (
        epochs() == first
        and first[0] != first[1]
        and sorted(first[0]) == sorted(first[1]) == list(range(40))
        and first[2] == first[3] == list(range(30))
    )


def test_a_seed_works_for_streams_and_single_datasets():
    train, valid = get_dataloaders(Stream(), None, 4, seed=1)
    assert type(train) is ReplayLoader and valid is None and len(list(train)) == 6
    assert DataLoaders(train, None).train is train and "a stream" in repr(DataLoaders(train))


@pytest.mark.shows("F141")
def test_a_snapshot_takes_the_order_back_too():
    "What is tried out between two fits leaves no trace in the data of the next"
    rows = []
    for tries in (False, True):
        trainer = make_trainer(Seen())
        trainer.fit(1, 0.0)
        trainer.add_callbacks(short := NBatchCB(2))
        trainer.fit(1, 0.0)
        trainer.remove_callbacks(short)
        if tries:
            with trainer.snapshot():
                trainer.fit(2, 0.0)
        trainer.fit(2, 0.0)
        rows.append(trainer.Seen.rows)
    assert rows[0] == rows[1] and len(rows[0]) == 40 + 16 + 80


@pytest.mark.shows("F085", "NEMO-34")
def test_the_position_after_a_batch_goes_on_with_the_next():
    "Saved by a callback in `after_batch`, while workers have read ahead"

    class Saves:
        def __init__(self):
            self.states = []

        def after_batch(self, trainer):
            if trainer.training:
                self.states.append(trainer.dls.train.state_dict())

    whole = make_trainer(Saves(), Seen(), num_workers=2)
    whole.fit(2, 0.0)
    for i, state in enumerate(whole.Saves.states):
        part = make_trainer(Seen())
        part.dls.train.load_state_dict(state)
        part.fit(2, 0.0, valid=False)
        rest = whole.Seen.rows[8 * (i + 1) :]
        assert part.Seen.rows[: len(rest)] == rest


# Workers that fail


class Failing(Noisy):
    "Row 7 fails in its own way as long as a file is there"

    def __init__(self, how, flag):
        super().__init__(16)
        self.how, self.flag = how, str(flag)

    def __getitem__(self, i):
        if i == 7 and os.path.exists(self.flag):
            getattr(self, self.how)()
        return torch.full((1,), float(i)), torch.zeros(1)

    def raises(self):
        raise ValueError("spoilt")

    def exits(self):
        os._exit(3)

    def is_killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(self):
        time.sleep(60)


def no_children(seconds=10):
    "Whether all worker processes are gone in time"
    gc.collect()
    end = time.monotonic() + seconds
    while multiprocessing.active_children() and time.monotonic() < end:
        time.sleep(0.02)
    return not multiprocessing.active_children()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "how, error, words",
    [
        ("raises", ValueError, "while reading item 7 of the dataset, in epoch 0"),
        ("exits", WorkerCrashed, "worker process of the loader died"),
        ("is_killed", WorkerCrashed, "worker process of the loader died"),
        ("hangs", WorkerCrashed, "timed out"),
    ],
)
def test_a_failing_worker_is_named_and_the_next_fit_works(how, error, words, persistent, tmp_path):
    "Raise, exit, SIGKILL, hang; nothing hangs, and no process is left behind"
    flag = tmp_path / "flag"
    flag.touch()
    train = ExactLoader(
        Failing(how, flag),
        16,
        seed=1,
        num_workers=1,
        persistent_workers=persistent,
        timeout=1.5 if how == "hangs" else 20,
    )
    trainer = make_trainer(Seen(), dls=DataLoaders(train))
    with pytest.raises(error, match=words):
        trainer.fit(1, 0.1, valid=False)
    assert no_children()
    flag.unlink()
    trainer.fit(2, 0.1, valid=False)
    assert sorted(trainer.Seen.rows) == sorted([*range(16)] * 2)
    del train, trainer
    assert no_children()


def test_workers_that_die_between_two_passes_are_replaced():
    loader = ExactLoader(Noisy(), 5, seed=3, collate_fn=mixed, **MODES["persistent"])
    epochs = [list(loader)]
    with pytest.raises(
        RuntimeError, match="killed by signal"
    ):  # PyTorch's own signal handler speaks up wherever the program is
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        time.sleep(5)
    epochs += [list(loader), list(loader)]
    assert all(equal(a, b) for a, b in zip(epochs, reference()))


def test_an_interrupt_while_reading_leaves_a_loader_that_works():
    class Interrupted(Noisy):
        def __getitem__(self, i):
            if i == 3 and not self.reads:
                raise KeyboardInterrupt
            return super().__getitem__(i)

    loader = ExactLoader(Interrupted(4), 1, shuffle=False)
    loader.start_at(3)
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    loader.dataset.reads.append(0)
    assert rows_of(loader) == [3] and rows_of(loader) == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("cls, words", [(Noisy, "item 2 of"), (NoisyBatches, r"the items \[2, 3\] of")])
def test_an_error_names_the_item_and_stop_iteration_is_one(workers, cls, words):
    class Broken(cls):
        def __getitem__(self, i):
            if i == 2:
                raise self.error
            return super().__getitem__(i)

    dataset = Broken(4)
    for dataset.error, seen_as in (
        (KeyError("x"), KeyError),
        (StopIteration(), RuntimeError),
        (UnicodeDecodeError("utf8", b"", 0, 1, "y"), (UnicodeDecodeError, RuntimeError)),
    ):
        with pytest.raises(seen_as) as caught:
            list(ExactLoader(dataset, 2, shuffle=False, num_workers=workers))
        told = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
        assert all(o in told for o in words.replace("\\", "").split())


# Streams


class Stream(IterableDataset):
    "Rows through a shuffle buffer, with random numbers; workers take every n-th"

    def __init__(self, n=24):
        self.n = n

    def __iter__(self):
        info, buffer = get_worker_info(), []
        for i in range(info.id if info else 0, self.n, info.num_workers if info else 1):
            buffer.append(torch.tensor([i, *draw()], dtype=torch.float64))
            if len(buffer) > 4:
                yield buffer.pop(random.randrange(5))
        yield from buffer


def noisy_row(row):
    return {"row": [float(row["i"]), *draw()]}


def hub_stream():
    "A stream of Hugging Face with a shuffle buffer and random augmentation"
    rows = (
        Dataset.from_dict({"i": list(range(24))})
        .to_iterable_dataset(num_shards=2)
        .shuffle(seed=5, buffer_size=6)
        .map(noisy_row, remove_columns=["i"])
    )
    return rows.map(lambda row: {"row": torch.tensor(row["row"], dtype=torch.float64)})


def first_column(rows):
    return (
        torch.stack([torch.as_tensor(o["row"]) for o in rows])
        if isinstance(rows[0], dict)
        else torch.stack(rows)
    )


@pytest.mark.shows("F066", "F085")
@pytest.mark.parametrize("place", ["in the first epoch", "in the second epoch"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [Stream, hub_stream])
def test_a_stream_goes_on_by_replay(make, mode, place):
    "Exact with shuffle buffer and augmentation, in each mode; the epoch after it is whole"
    make_loader = lambda: exact_loader(make(), 4, seed=9, collate_fn=first_column, **MODES[mode])
    loader = make_loader()
    epochs = [list(loader) for _ in range(3)]
    assert (
        all(sorted(rows_of(o)) == list(range(24)) for o in epochs)
        and len({tuple(rows_of(o)) for o in epochs}) == 3
    )
    assert len({o.item() for epoch in epochs for batch in epoch for o in batch[:, 1]}) == 72
    e, loader = (0 if place == "in the first epoch" else 1), make_loader()
    loader.set_epoch(e)
    for i, batch in enumerate(loader):
        assert torch.equal(batch, epochs[e][i])
        state = loader.state_dict()
        if i == 2:
            break
    workers = MODES[mode].get("num_workers", 0)
    assert state == dict(epoch=e, batches=3, seed=9, batch_size=4, num_workers=workers)
    later = make_loader()
    later.load_state_dict(state)
    assert later.state_dict() == state and loader.state_dict() == state | dict(epoch=e + 1, batches=0)
    with pytest.warns(UserWarning, match="Reading 3 batches of epoch"):
        assert equal(list(later), epochs[e][3:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal(list(later), epochs[e + 1])


@pytest.mark.parametrize("was, now", [(0, 2), (2, 0), (1, 2)])
def test_a_stream_goes_on_with_other_workers_only_at_the_beginning_of_an_epoch(was, now):
    "They share its rows among them, so within one some would be left out and others come twice"
    loader, other = (exact_loader(Stream(), 4, num_workers=n) for n in (was, now))
    loader.start_at(3)
    state = loader.state_dict()
    with pytest.raises(ValueError, match=f"`num_workers={was}`, but the loader has `num_workers={now}`"):
        other.load_state_dict(state)
    loader.set_epoch(1)
    with pytest.warns(UserWarning, match="the epochs to come"):
        other.load_state_dict(loader.state_dict())
    assert (other.epoch, other.batches) == (1, 0)
    del state["num_workers"]  # As earlier versions have saved it
    other.load_state_dict(state)
    assert (other.epoch, other.batches) == (0, 3)


@pytest.mark.parametrize("was, now", [(0, 1), (1, 0)])
def test_one_worker_of_a_stream_for_none_is_said_to_draw_other_numbers(was, now):
    "Its rows are shared out among nobody else"
    loader, other = (exact_loader(Stream(), 4, num_workers=n) for n in (was, now))
    loader.start_at(3)
    with pytest.raises(ValueError, match="draws random numbers would draw others") as failed:
        other.load_state_dict(loader.state_dict())
    assert "left out" not in str(failed.value)
    loader.set_epoch(1)
    with pytest.warns(UserWarning, match="of the saved run if the stream draws random numbers"):
        other.load_state_dict(loader.state_dict())


def test_rows_with_numbers_are_the_same_for_any_number_of_workers_so_it_is_not_asked_for():
    loader, other = (ReplayLoader(DataLoader(range(8), 4, num_workers=n)) for n in (0, 2))
    loader.start_at(1)
    other.load_state_dict(loader.state_dict())
    assert other.batches == 1


class Placed(IterableDataset):
    "Rows with random numbers; knows its place, and how many rows were read"

    def __init__(self, n=24):
        self.n, self.i, self.read = n, 0, 0

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.start = state["i"]

    start = 0

    def __iter__(self):
        for self.i in range(self.start + 1, self.n + 1):
            self.read += 1
            yield torch.tensor([self.i - 1, *draw()], dtype=torch.float64)


def counted_stream():
    "A stream of Hugging Face without a buffer, whose rows are counted by the last `map`"
    stream = (
        Dataset.from_dict({"i": list(range(24))})
        .to_iterable_dataset(num_shards=2)
        .map(noisy_row, remove_columns=["i"])
        .filter(lambda row: True)
    )
    return stream.map(lambda row: {"row": torch.tensor(row["row"], dtype=torch.float64)})


@pytest.mark.parametrize("make", [Placed, counted_stream])
def test_a_stream_that_knows_its_place_goes_on_there(make):
    "At every batch of two epochs; nothing is read again, nothing warned of, and the epoch after it is whole"
    make_loader = lambda: exact_loader(make(), 5, seed=9, collate_fn=first_column)
    loader, states = make_loader(), []
    epochs = [[states.append(loader.state_dict()) or batch for batch in loader] for _ in range(2)] + [
        list(loader)
    ]
    assert [sorted(rows_of(o)) for o in epochs] == [list(range(24))] * 3
    for k, state in enumerate(states):
        later = make_loader()
        later.load_state_dict(state)
        assert later.state_dict() == state
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert equal(list(later), epochs[k // 5][k % 5 + 1 :])
            if make is Placed:
                assert later.dataset.read == max(24 - 5 * (k % 5 + 1), 0)
            assert equal(list(later), epochs[k // 5 + 1])
    later.load_state_dict(states[1])  # Once more by the same loader, and another pass broken off
    assert torch.equal(next(iter(later)), epochs[0][2]) and equal(list(later), epochs[1])


def test_a_stream_whose_state_lacks_rows_is_read_again():
    "A shuffle buffer of Hugging Face is lost, and a worker's state is out of reach"
    for loader in (
        exact_loader(hub_stream(), 4, collate_fn=first_column),
        exact_loader(Placed(), 4, num_workers=1),
    ):
        for _ in loader:
            assert "stream" not in loader.state_dict()
            break


def test_workers_of_a_stream_that_fail_are_replaced(tmp_path):
    "Persistent workers too"
    flag = tmp_path / "flag"

    class Fails(Stream):
        def __iter__(self):
            for row in super().__iter__():
                if row[0] > 10 and flag.exists():
                    self.fail()
                yield row

    def spoilt():
        raise ValueError("spoilt")

    for fail, error in ((lambda: os._exit(3), WorkerCrashed), (spoilt, ValueError)):
        for options in (dict(num_workers=1), dict(num_workers=1, persistent_workers=True)):
            stream = Fails()
            stream.fail = fail
            check_recovery(exact_loader(stream, 4, seed=9, **options), error, flag)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_a_death_that_is_told_twice_has_one_error(tmp_path, monkeypatch, kind, persistent):
    "PyTorch's signal handler may tell of it while the workers are being dismissed"
    flag = tmp_path / "flag"
    told = []

    class DiesAsStream(Stream):
        def __iter__(self):
            for row in super().__iter__():
                if row[0] > 10 and flag.exists():
                    os._exit(3)
                yield row

    class DiesAsRows(Noisy):
        def __getitem__(self, i):
            if flag.exists():
                os._exit(3)
            return super().__getitem__(i)

    def interrupted(dismiss):
        def dismiss_once_told(batches):
            if len(told) < 1:
                told.append(batches)
                raise RuntimeError("DataLoader worker (pid 42) exited unexpectedly with exit code 3.")
            dismiss(batches)

        return dismiss_once_told

    for module in (exact_loaders, replay_loaders):
        monkeypatch.setattr(module, "dismiss", interrupted(module.dismiss))
    data = DiesAsRows(24) if kind == "rows" else DiesAsStream()
    check_recovery(
        exact_loader(data, 4, seed=9, num_workers=1, persistent_workers=persistent), WorkerCrashed, flag
    )
    assert told


def check_recovery(loader, error, flag):
    "An error while the flag is there, no workers after it, and then a whole epoch"
    flag.touch()
    with pytest.raises(error):
        list(loader)
    assert no_children()
    flag.unlink()
    assert sorted(rows_of(loader)) == list(range(24))


@pytest.mark.parametrize("mode", ["no workers", "two workers"])
def test_any_other_loader_is_replayed_too(mode):
    "A shuffling `DataLoader`, one with its own generator, and a function that makes one for each pass"
    kinds = [
        lambda: DataLoader(Noisy(), 5, shuffle=True, **MODES[mode]),
        lambda: DataLoader(Noisy(), 5, shuffle=True, generator=torch.Generator(), **MODES[mode]),
        lambda: (
            lambda: DataLoader(
                Noisy(), 5, shuffle=True, **MODES["persistent"] if mode == "two workers" else {}
            )
        ),
    ]
    for kind in kinds:
        loader = ReplayLoader(kind(), seed=2)
        epochs = [list(loader), list(loader)]
        assert rows_of(epochs[0]) != rows_of(epochs[1]) and sorted(rows_of(epochs[0])) == list(range(22))
        torch.manual_seed(77)
        later = ReplayLoader(kind(), seed=2)
        later.start_at(4)
        with pytest.warns(UserWarning, match="Reading 4 batches"):
            assert equal(list(later), epochs[0][4:])
        assert equal(list(later), epochs[1])


def drawn_by(rng, n):
    "A number below `n` from any generator"
    if isinstance(rng, torch.Generator):
        return int(torch.randint(n, (), generator=rng))
    return rng.randrange(n) if isinstance(rng, random.Random) else int(rng.random(1)[0] * n)


class Shuffles:
    "A loader, or a sampler, that moves numbers about while it gives them"

    def __init__(self, rng):
        self.own = [rng]

    def __iter__(self):
        left = list(range(24))
        while left:
            yield left.pop(drawn_by(self.own[0], len(left)))

    def __len__(self):
        return 24


class ShufflingLoader(DataLoader):
    "One that keeps a generator beside PyTorch's"

    def __init__(self, rng):
        super().__init__(list(range(24)), batch_size=None)
        self.order = Shuffles(rng)

    def __iter__(self):
        return iter(self.order)


class Around:
    def __init__(self, dl):
        self.dl = dl

    def __iter__(self):
        return iter(self.dl)


GENERATORS = {
    "python": lambda: random.Random(7),
    "numpy": lambda: np.random.default_rng(7),
    "numpy, of old": lambda: np.random.RandomState(7),
    "numpy, of old with another source": lambda: np.random.RandomState(np.random.PCG64(7)),
    "torch": lambda: torch.Generator().manual_seed(7),
}
rows_24 = [torch.tensor(i) for i in range(24)]
DRAWING = {
    "loader": Shuffles,
    "kind of loader": ShufflingLoader,
    "sampler": lambda rng: DataLoader(rows_24, 1, sampler=Shuffles(rng)),
    "batch sampler": lambda rng: DataLoader(rows_24, batch_sampler=BatchSampler(Shuffles(rng), 1, False)),
    "sampler within": lambda rng: Around(DataLoader(rows_24, 1, sampler=Shuffles(rng))),
    "sampler, two workers": lambda rng: DataLoader(rows_24, 1, sampler=Shuffles(rng), num_workers=2),
    "made": lambda rng: lambda: Shuffles(rng),
}


DRAWN = [(make, rng) for make in DRAWING for rng in GENERATORS if "workers" not in make or rng == "python"]


@pytest.mark.parametrize("make, rng", DRAWN)
def test_what_a_loader_or_its_sampler_draws_from_generators_of_its_own_is_repeated(make, rng):
    "Whoever else draws from them, or looks at the loader, and nobody else is disturbed"
    make, rng = DRAWING[make], GENERATORS[rng]
    mine, other = rng(), rng()
    loader = ReplayLoader(make(mine), seed=2)
    epochs = [list(map(int, loader)) for _ in range(2)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == list(range(24))
    assert drawn_by(mine, 10**6) == drawn_by(other, 10**6)
    loader.set_epoch(0)
    again = []
    for i, row in enumerate(loader):
        again.append(int(row))
        drawn_by(mine, 3)
        if i == 4 and not getattr(loader, "num_workers", 0):
            next(iter(ReplayLoader(loader.loader or loader.make, seed=5)))
    assert again == epochs[0]
    later = ReplayLoader(make(mine), seed=2)
    later.start_at(6)
    with pytest.warns(UserWarning, match="Reading 6 batches"):
        assert list(map(int, later)) == epochs[0][6:]


def test_generators_of_the_rows_are_not_lent():
    "They are named when a run goes on, since workers have copies of them"

    class Rows(list):
        rng = random.Random(7)

        def __getitem__(self, i):
            return self.rng.random()

    class Sampler(Shuffles):
        def __init__(self, rows):
            self.rows, self.own = rows, [random.Random(1)]

    rows = Rows([0] * 24)
    loader = ReplayLoader(DataLoader(rows, 4, sampler=Sampler(rows)))
    state = rows.rng.getstate()
    list(loader)
    assert rows.rng.getstate() != state


def test_a_stream_that_is_too_short_is_not_taken_for_finished():
    loader = ReplayLoader([1, 2, 3])
    loader.start_at(5)
    with (
        pytest.warns(UserWarning, match="Reading 5"),
        pytest.raises(ValueError, match="ended after 3 batches"),
    ):
        list(loader)
    loader.set_epoch(0)
    assert list(loader) == [1, 2, 3] and len(loader) == 3


def test_a_stream_saved_behind_its_last_batch_has_nothing_left():
    "Without a length nobody knows that it was the last, so the pass is empty, and the next one is whole"
    loader, made = ReplayLoader(lambda: made.append(1) or [1, 2, 3]), []
    one_pass = iter(loader)
    assert [next(one_pass) for _ in range(3)] == [1, 2, 3] and loader.batches == 3
    state = loader.state_dict()
    assert list(one_pass) == [] and loader.state_dict() == state | dict(epoch=1, batches=0)
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match="Reading 3"):
        assert list(loader) == []
    assert list(loader) == [1, 2, 3] and loader.epoch == 2 and len(made) == 3


@pytest.mark.shows("PTA-55")
def test_no_two_workers_draw_the_same_numbers():
    "Neither in one epoch nor in the next, from none of the three generators"
    loader = ExactLoader(Noisy(40), 5, num_workers=2)
    noise = torch.cat([batch[:, 1:] for _ in range(2) for batch in loader])
    assert noise.shape == (80, 3) and len(set(noise.flatten().tolist())) == 240


# --- NumPy's own numbers, while a batch is read in the training process


class Drawing:
    "Rows draw from NumPy, and sometimes read from another such loader or replace NumPy's generator"

    def __init__(self, inner=None, mischief=None):
        self.inner, self.mischief = inner, mischief

    def __len__(self):
        return 4

    def __getitem__(self, i):
        if self.inner is not None:
            next(iter(self.inner))
        if self.mischief:
            self.mischief()
        return np.random.normal(size=3)


def draws(kinds, between):
    "What NumPy gives for a series of calls, with `between` done before each"
    found = []
    for kind in kinds:
        between()
        found.append(getattr(np.random, kind)())
    return found


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(["normal", "random", "standard_normal"]), max_size=8),
    st.sampled_from(["MT19937", "PCG64"]),
    st.booleans(),
)
def test_reading_a_batch_leaves_numpys_numbers_alone_also_the_kept_half_of_a_pair(kinds, generator, nested):
    dataset = Drawing(ExactLoader(Drawing(), 2) if nested else None)
    loader = ExactLoader(dataset, 2)
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, generator)(3))
        expected = draws(kinds, lambda: None)
        np.random.set_bit_generator(getattr(np.random, generator)(3))
        assert draws(kinds, lambda: next(iter(loader))) == expected
    finally:
        np.random.set_bit_generator(before)


def test_a_batch_read_within_a_batch_has_its_own_numpy_numbers():
    plain, nested = (
        next(iter(ExactLoader(Drawing(inner), 2))) for inner in (None, ExactLoader(Drawing(), 2, seed=1))
    )
    assert torch.equal(plain, nested)


def test_numpys_generator_comes_back_after_an_error_and_after_the_dataset_replaced_it():
    own = np.random.get_bit_generator()
    next(iter(ExactLoader(Drawing(mischief=lambda: np.random.set_bit_generator(np.random.PCG64(1))), 2)))
    assert np.random.get_bit_generator() is own
    with pytest.raises(ZeroDivisionError):
        next(iter(ExactLoader(Drawing(mischief=lambda: 1 / 0), 2)))
    assert np.random.get_bit_generator() is own


def test_numpys_numbers_lie_in_memory_as_the_loader_takes_for_granted():
    "The loader compares them there, since `get_state` takes as long as all the rest of its work"
    np.random.seed(5)
    generator, state = np.random.get_bit_generator(), np.random.get_state(legacy=False)["state"]
    memory = (ctypes.c_uint32 * 625).from_address(generator.ctypes.state_address)
    assert list(memory) == [*state["key"], state["pos"]]


@pytest.mark.parametrize("factor", [1, 3])
def test_workers_read_ahead_as_far_as_asked_and_a_run_goes_on_at_the_next_batch_that_was_not_given(factor):
    "What was read and not given is read again by the loader that goes on"
    n_read = multiprocessing.Value("i", 0)

    class CountedRows(Noisy):
        def __getitem__(self, i):
            with n_read.get_lock():
                n_read.value += 1
            return super().__getitem__(i)

    def make():
        return exact_loader(
            CountedRows(40), 4, seed=3, num_workers=1, prefetch_factor=factor, in_memory=False
        )

    whole = list(make())
    n_read.value = 0
    loader = make()
    batches = iter(loader)
    for ahead in range(2):  # Nothing is read before it is asked for; then so many more than were given
        next(batches)
        expected = 4 * (1 + ahead + factor)
        give_up = time.monotonic() + 30
        while n_read.value < expected and time.monotonic() < give_up:
            time.sleep(0.01)
        assert n_read.value == expected
    later = make()
    later.load_state_dict(loader.state_dict())
    assert equal(list(later), whole[2:])


@pytest.mark.parametrize("argument", ["generator", "sampler", "batch_sampler"])
def test_none_says_that_there_is_none(argument):
    rows = list(range(20))
    one, other = exact_loader(rows, 4, seed=3, **{argument: None}), exact_loader(rows, 4, seed=3)
    assert [o.tolist() for o in one] == [o.tolist() for o in other]
