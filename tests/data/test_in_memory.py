"""Rows in memory, checked against the loader that reads them one by one.

"The same" always means equal in every bit: batches, their order, the random numbers that are left afterwards,
and the positions to go on from. What cannot be kept without a difference is refused, or read as ever if
nobody asked.
"""

import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from isaac_loop.data import in_memory as chapter
from isaac_loop.data import stacked_rows
from isaac_loop.data.dataloaders import DataLoaders, collate_rows, get_dataloaders
from isaac_loop.data.dataset_order import in_order
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.data.fingerprint import data_of, differences, unchecked
from isaac_loop.data.in_memory import MemoryLoader, NotInMemory, plain_loader
from isaac_loop.data.shared_loaders import exact_instead, rows_given, share_exact
from isaac_loop.data.stacked_rows import named_parts, same_bits
from isaac_loop.device.device import DeviceCB
from isaac_loop.loop.trainer import Trainer
from isaac_loop.state.random_numbers import random_state
from isaac_loop.train.training import BasicTrainCB


class Rows:
    "Row i is an image of a size of its own kind and a label; it counts how often it is read"

    def __init__(self, n=22):
        self.n, self.reads = n, 0

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.reads += 1
        return torch.arange(6.0).view(2, 3) + i, i


def hub_rows(n=22):
    columns = dict(x=torch.arange(3.0 * n).view(n, 3).tolist(), y=list(range(n)))
    return Dataset.from_dict(columns).with_format("torch")


def leaves(batch):
    return [leaf for _, leaf in named_parts(batch)]


def same(a, b):
    a, b = list(a), list(b)
    pairs = [(leaves(one), leaves(other)) for one, other in zip(a, b, strict=True)]
    alike = all(type(one) is type(other) for one, other in zip(a, b))
    return alike and all(
        x.dtype == y.dtype and torch.equal(x, y)
        for one, other in pairs
        for x, y in zip(one, other, strict=True)
    )


# The same batches

sizes = dict(
    n=st.integers(1, 40), batch_size=st.integers(1, 9), shuffle=st.booleans(), drop_last=st.booleans()
)


@given(**sizes, seed=st.integers(0, 2**40), start=st.integers(0, 40), epoch=st.integers(0, 50))
def test_exact_batches_are_the_same_from_any_place_on(n, start, epoch, **options):
    one, other = (exact_loader(Rows(n), in_memory=o, **options) for o in (False, True))
    for loader in (one, other):
        loader.set_epoch(epoch)
        loader.start_at(min(start, n))
    assert same(one, other)
    assert same(one, other) and one.state_dict() == other.state_dict()


@given(**sizes, world_size=st.integers(1, 5), whole=st.booleans())
def test_several_processes_share_the_same_batches(n, world_size, whole, **options):
    if not whole and n < world_size:
        return
    one, other = (exact_loader(Rows(n), in_memory=o, **options) for o in (False, True))
    for rank in range(world_size):
        give_back = [share_exact(dl, rank, world_size, "whole" if whole else "each") for dl in (one, other)]
        for a, b in zip(one, other, strict=True):
            assert same([a], [b]) and one.given == other.given and rows_given(one) == rows_given(other)
        for give in give_back:
            give()
        one.set_epoch(0), other.set_epoch(0)


@given(**sizes)
def test_plain_batches_and_the_random_numbers_left_are_the_same(n, **options):
    found = []
    for in_memory in (False, True):
        torch.manual_seed(3)
        loader = plain_loader(Rows(n), in_memory=in_memory, **options)
        found.append(([*loader, *loader], torch.rand(())))
    assert same(found[0][0], found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.parametrize("options", [{}, dict(num_workers=2)], ids=["no workers", "two workers"])
@pytest.mark.parametrize("seed", [None, 4])
def test_a_generator_a_sampler_and_workers_change_nothing(options, seed):
    def batches(in_memory):
        torch.manual_seed(0)
        rows, mine = Rows(), dict(generator=torch.Generator().manual_seed(5)) if seed is None else {}
        loaders = get_dataloaders(rows, rows, 4, seed=seed, in_memory=in_memory, **mine, **options)
        return [*loaders[0], *loaders[1], *loaders[0]]

    assert same(batches(False), batches(True))


def test_a_sampler_of_ones_own_is_asked_as_ever():
    found = []
    for in_memory in (False, True):
        torch.manual_seed(1)
        sampler = RandomSampler(Rows(), replacement=True, num_samples=31)
        found.append(list(plain_loader(Rows(), 4, in_memory, sampler=sampler)))
    assert same(*found)


Pair = namedtuple("Pair", "image label")
COLLATES = {
    "usual": default_collate,
    "tuple": collate_rows(),
    "named": lambda rows: Pair(*default_collate(rows)),
    "dict": lambda rows: dict(zip("xy", default_collate(rows))),
    "nested": lambda rows: (default_collate(rows), dict(again=default_collate(rows)[0])),
    "one tensor": lambda rows: default_collate(rows)[0],
    "transposed": lambda rows: default_collate(rows)[0].transpose(1, 2),
}


@pytest.mark.parametrize("name", COLLATES)
def test_a_batch_has_the_structure_that_its_function_makes(name):
    one, other = (exact_loader(Rows(), 4, collate_fn=COLLATES[name], in_memory=o) for o in (False, True))
    assert same(one, other)


def test_numbers_of_every_kind_keep_their_bits():
    columns = torch.tensor([0.0, -0.0, float("nan"), float("inf")]), torch.tensor([True, False, True, True])
    columns = *columns, columns[0].half(), columns[0].bfloat16(), torch.rand(4, 2, dtype=torch.complex64)
    rows = list(zip(*columns))
    a, b = (next(iter(exact_loader(rows, 4, in_memory=o))) for o in (False, True))
    for x, y in zip(a, b, strict=True):
        assert same_bits(x, y)


def test_every_row_is_read_a_few_times_and_never_again():
    rows = Rows(600)
    loader = exact_loader(rows, 32, in_memory=True)
    before = rows.reads
    assert 600 <= before <= 620
    list(loader), list(loader)
    assert rows.reads == before


def test_reading_into_memory_draws_no_random_numbers():
    before = random_state()
    exact_loader(Rows(), 4, in_memory=True)
    list(exact_loader(hub_rows(), 4))
    after = random_state()
    assert before["python"] == after["python"] and torch.equal(before["torch"], after["torch"])
    assert all(np.array_equal(x, y) for x, y in zip(before["numpy"], after["numpy"]))


def test_a_batch_can_be_written_to():
    loader = exact_loader(TensorDataset(torch.ones(8)), 4, shuffle=False)
    for (x,) in loader:
        x.zero_()
    assert all(x.eq(1).all() for (x,) in loader)


# Going on


@pytest.mark.parametrize("first", [False, True])
def test_a_position_goes_on_in_the_other_kind_of_loader(first):
    one, other, whole = (exact_loader(Rows(), 4, seed=2, in_memory=o) for o in (first, not first, False))
    batches = []
    for batch in one:
        batches.append(batch)
        if len(batches) == 2:
            other.load_state_dict(one.state_dict())
            break
    assert same([*batches, *other, *other], [*whole, *whole])


def test_another_process_count_takes_over_from_memory():
    loader, usual = (exact_loader(Rows(), 5, seed=2, in_memory=o) for o in (True, False))
    iter_ = iter(usual)
    next(iter_), next(iter_)
    loader.load_state_dict(usual.state_dict())
    share_exact(loader, 1, 2)
    rest = [x[x.shape[0] - len(y) :] for (x, _), (y, _) in zip(iter_, loader)]
    loader.load_state_dict(usual.state_dict() | dict(epoch=0, samples=10))
    assert same(rest, [y for y, _ in loader])


def trained(dls):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    trainer = Trainer(
        dls,
        lambda preds, y: F.cross_entropy(preds, y % 3),
        optim.SGD,
        model,
        [BasicTrainCB(), DeviceCB("cpu")],
    )
    trainer.fit(2, lr=0.01)
    return trainer


@pytest.mark.parametrize("seed", [None, 1])
def test_a_run_ends_with_the_same_weights_and_its_data_look_the_same(seed):
    splits = dict(train=Rows(), valid=Rows(9))
    ours, usual = (
        trained(DataLoaders.from_dataset_dict(splits, 4, seed=seed, in_memory=o)) for o in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), usual.model.parameters()))
    for name, then in data_of(usual).items():
        now = data_of(ours)[name]
        assert not [*differences(then, now)] and unchecked(then, now) is None
        assert {**then, "rows": 0} == {**now, "rows": 0}


def test_loaders_made_of_one_in_memory_are_in_memory_too():
    rows = Rows()
    exact, plain = exact_loader(rows, 4, in_memory=True), plain_loader(rows, 4, True, shuffle=True)
    before = rows.reads
    for loader in (exact, plain):
        ordered, _ = in_order(loader)
        assert torch.cat([y for _, y in ordered]).tolist() == list(range(22))
    instead = exact_instead(plain, 7, 2)
    list(instead)
    assert rows.reads == before
    assert (
        same(instead, exact_instead(plain_loader(Rows(), 4, False, shuffle=True), 7, 2)) is False
    )  # Another epoch
    instead.set_epoch(0)
    assert same(instead, exact_instead(plain_loader(Rows(), 4, False, shuffle=True), 7, 2))


# Where batches are


def test_rows_are_moved_once_and_again_when_they_were_changed():
    data = TensorDataset(torch.arange(8.0))
    loader = exact_loader(data, 4, shuffle=False)
    loader.to("meta")
    (x,) = next(iter(loader))
    there = loader.held.columns()[0]
    assert x.device.type == "meta" and loader.held.columns()[0] is there
    data.tensors[0].zero_()
    assert loader.held.columns()[0] is not there
    loader.to("cpu")
    assert [x.sum().item() for (x,) in loader] == [0, 0]


def test_the_trainers_device_is_told_to_the_loader():
    dls = DataLoaders(exact_loader(Rows(), 4, in_memory=True), [(torch.ones(1, 6), torch.ones(1).long())])
    assert trained(dls).dls.train.held.device == torch.device("cpu")


def test_rows_without_room_on_the_device_stay_where_they_are(monkeypatch):
    loader = exact_loader(Rows(), 4, in_memory=True)
    monkeypatch.setattr(chapter, "_has_room", lambda *_: False)
    loader.to("meta")
    assert next(iter(loader))[0].device.type == "cpu"


# Unasked


def test_plain_columns_are_kept_unasked_and_the_rest_is_not():
    hub, tensors = hub_rows(), TensorDataset(torch.arange(9))
    changed = hub.with_transform(lambda rows: rows)
    kept = [get_dataloaders(o, None, 4, seed=seed)[0] for o in (hub, tensors) for seed in (None, 1)]
    assert all(loader.held.columns() is not None for loader in kept)
    others = changed, Subset(tensors, [1, 2]), Rows(), [torch.ones(1)]
    assert all(
        getattr(get_dataloaders(o, None, 4, seed=s)[0], "held", None) is None
        for o in others
        for s in (None, 1)
    )
    assert exact_loader(tensors, 4, collate_fn=lambda rows: default_collate(rows)).held is None


@pytest.mark.parametrize("seed", [None, 1])
def test_what_is_kept_unasked_gives_the_same_batches(seed):
    hub = hub_rows()
    for splits in (DatasetDict(train=hub, test=hub), dict(train=TensorDataset(torch.rand(9, 2)), valid=hub)):
        found = []
        for in_memory in (None, False):
            torch.manual_seed(2)
            dls = DataLoaders.from_dataset_dict(splits, 4, seed=seed, in_memory=in_memory)
            found.append([*dls.train, *dls.valid, *dls.train])
        assert same(*found)


def zeros(rows):
    return dict(x=[torch.zeros(3) for _ in rows["x"]], y=rows["y"])


def noise(rows):
    return dict(x=[torch.rand(3) for _ in rows["x"]], y=rows["y"])


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("in_memory", [None, True])
def test_a_transform_or_format_set_later_is_followed_from_the_next_pass_on(seed, in_memory):
    data = hub_rows()
    loader, _ = get_dataloaders(data, None, 4, seed=seed, in_memory=in_memory)
    before = list(loader)
    batches = iter(loader)
    next(batches)
    data.set_transform(zeros)
    assert all(batch["x"].any() for batch in batches)  # The pass under way keeps what it began with
    assert all(not batch["x"].any() for batch in loader)
    data.set_format("torch", columns=["y"])
    assert all(list(batch) == ["y"] for batch in loader)
    assert loader.held.columns() is not None
    data.set_format("torch")
    assert [list(batch) for batch in loader] == [list(batch) for batch in before]


def test_a_transform_that_is_set_later_is_read_as_usual_unasked_and_checked_if_asked_for():
    data = hub_rows()
    unasked, asked = (get_dataloaders(data, None, 4, in_memory=o)[0] for o in (None, True))
    assert list(unasked)
    data.set_transform(noise)
    first, second = ([batch["x"] for batch in unasked] for _ in range(2))
    assert unasked.held.columns() is None and "a function makes them" in str(unasked.held.why_not)
    assert not torch.equal(torch.cat(first).sort(0)[0], torch.cat(second).sort(0)[0])
    for _ in range(2):
        with pytest.raises(NotInMemory, match="`x` is random"):
            list(asked)
    data.reset_format()
    data.set_format("torch")
    assert list(asked) and unasked.held.columns() is not None


def test_a_look_at_the_format_is_one_for_each_pass(monkeypatch):
    loader, looks = get_dataloaders(hub_rows(), None, 4)[0], []
    list(loader)
    is_source = chapter._is_source
    monkeypatch.setattr(chapter, "_is_source", lambda *args: looks.append(1) or is_source(*args))
    assert len(list(loader)) == 6 and len(looks) == 1


def test_too_much_is_not_kept_unasked(monkeypatch):
    monkeypatch.setattr(chapter, "UNASKED", 100)
    loader = exact_loader(hub_rows(), 4, seed=1)
    assert same(loader, exact_loader(hub_rows(), 4, seed=1, in_memory=False))
    assert "kept without being asked" in str(loader.held.why_not)


def test_rows_that_cannot_be_stacked_are_read_as_ever_unasked():
    texts = Dataset.from_dict(dict(x=["a", "bc"]))
    assert list(exact_loader(texts, 2, shuffle=False)) == [dict(x=["a", "bc"])]
    ragged = Dataset.from_dict(dict(x=[[1], [1, 2]])).with_format("torch")
    assert len(list(exact_loader(ragged, 1))) == 2
    with pytest.raises(RuntimeError, match="stack expects"):
        list(exact_loader(ragged, 2))


def test_a_tensor_dataset_is_not_copied_and_its_changes_are_seen():
    data = TensorDataset(torch.arange(8))
    for loader in (exact_loader(data, 8, shuffle=False), plain_loader(data, 8)):
        list(loader)
        assert loader.held.columns()[0] is data.tensors[0]
        data.tensors[0].add_(1)
        assert list(loader)[0][0].tolist() == data.tensors[0].tolist()
        data.tensors = (torch.arange(8) * 10,)
        assert list(loader)[0][0].tolist() == data.tensors[0].tolist()


# Refusals


def test_tensors_with_gradients_are_refused_for_that_reason():
    learnt = TensorDataset(torch.ones(5, requires_grad=True))
    with pytest.raises(NotInMemory, match="requires a gradient.*`detach` the tensor"):
        get_dataloaders(learnt, None, 2, in_memory=True)


class Moved(Rows):
    "Random numbers of the generators that are known, for some rows only"

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return (x + torch.rand(())) if i == 17 else x, y


class Shaken(Rows):
    "The same with Python's numbers"

    def __getitem__(self, i):
        return random.random() if i == 20 else 0.0, i


class Own(Rows):
    "Random numbers of a generator of its own"

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, i):
        return i, self.rng.random()


class Ragged(Rows):
    def __getitem__(self, i):
        return torch.zeros(3 if i == 17 else 2), i


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def padded(rows):
    "A batch as wide as its widest row"
    return nn.utils.rnn.pad_sequence([torch.ones(i % 5 + 1) for _, i in rows], batch_first=True)


def with_neighbours(rows):
    "Rows less their mean"
    x = default_collate(rows)[1].float()
    return x - x.mean()


REFUSED = {
    "random rows": (Moved(), None, "entry 0 is random"),
    "random in Python": (Shaken(), None, "entry 0 is random"),
    "a generator of its own": (Own(), None, "entry 1 of row 0 is another one"),
    "random columns with names": (
        hub_rows().with_transform(lambda rows: dict(y=rows["y"], x=[torch.rand(2) for _ in rows["y"]])),
        collate_rows(["x", "y"]),
        "`x` is random",
    ),
    "random collate": (
        Rows(),
        lambda rows: default_collate(rows)[0] + torch.rand(()),
        "the only part is random",
    ),
    "ragged rows": (Ragged(), None, "cannot be stacked"),
    "padded rows": (Rows(), padded, "has another shape"),
    "rows that know their neighbours": (Rows(), with_neighbours, "beside other rows"),
    "texts": ([(torch.ones(2), "a")] * 4, None, "entry 1 of a batch is a str"),
    "one number for all": (
        Rows(),
        lambda rows: (default_collate(rows)[0], len(rows)),
        "entry 1 of a batch is a int",
    ),
    "no row for each": (Rows(), lambda rows: default_collate(rows)[0].sum(0), "shape"),
    "nothing": (Rows(), lambda rows: (), "nothing in it"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("seed", [None, 1])
def test_what_would_differ_in_memory_is_refused_by_name(name, seed):
    dataset, collate_fn, words = REFUSED[name]
    with pytest.raises(NotInMemory, match=words) as e:
        get_dataloaders(dataset, None, 4, seed=seed, collate_fn=collate_fn, in_memory=True)
    assert "leave `in_memory` out" in str(e.value)


def test_a_random_row_is_found_in_a_worker_too():
    with pytest.raises(NotInMemory, match="entry 0 is random"):
        exact_loader(Moved(), 4, num_workers=2, in_memory=True)


def test_rows_that_seed_themselves_are_not_random():
    class Seeded(Rows):
        def __getitem__(self, i):
            torch.manual_seed(i)
            return torch.rand(2)

    one, other = (exact_loader(Seeded(), 4, in_memory=o) for o in (False, True))
    assert same(one, other)


def test_too_large_data_are_refused_with_what_there_is(monkeypatch):
    monkeypatch.setattr(stacked_rows, "_free_memory", lambda: 500)
    with pytest.raises(NotInMemory, match="22 rows cannot be kept .* are free"):
        exact_loader(Rows(), 4, in_memory=True)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_stream_and_odd_words_are_refused(seed):
    with pytest.raises(TypeError, match="a Stream, a stream"):
        get_dataloaders(Stream(), None, 4, seed=seed, in_memory=True)
    with pytest.raises(TypeError, match="`in_memory` is 'yes'"):
        get_dataloaders(Rows(), None, 4, seed=seed, in_memory="yes")
    assert len(list(get_dataloaders(Stream(), None, 4, seed=seed)[0])) == 2


@pytest.mark.parametrize("seed", [None, 1])
def test_an_error_in_a_row_stays_what_it_is(seed):
    class Broken(Rows):
        def __getitem__(self, i):
            raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        get_dataloaders(Broken(), None, 4, seed=seed, in_memory=True)


def test_a_dataset_that_has_grown_is_refused():
    rows = Rows()
    loader = plain_loader(rows, 4, True)
    rows.n += 1
    with pytest.raises(ValueError, match="has 23 rows now, and had 22"):
        list(loader)


def test_no_rows_are_no_matter():
    assert list(exact_loader(Rows(0), 4, in_memory=True)) == []
    assert type(plain_loader(Rows(0), 4, True)) is DataLoader and isinstance(
        plain_loader(Rows(), 4, True), MemoryLoader
    )
