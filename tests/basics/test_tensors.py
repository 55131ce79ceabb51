"""Walks through batches, counts, moves between devices, and seeds, checked against a list of paths.

The batches are drawn at random from lists, tuples, named tuples, mappings, dataclasses, tensors and things
that are none of these. PyTorch's `meta` device stands for an accelerator, so that a move can be seen on any
machine.
"""

import dataclasses
import os
import random
from collections import OrderedDict, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from fastcore.foundation import L
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from isaac_loop.basics import tensors
from isaac_loop.basics.tensors import (
    batch_size,
    default_device,
    examples_at,
    inplace,
    map_tensors,
    n_examples,
    set_seed,
    to_cpu,
    to_device,
)

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Example:
    "A batch as a dataclass"

    image: object
    label: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    "A batch that cannot be changed in place"

    image: object


class Alike(Pair):
    "A named tuple that looks at what it is made of, and computes more"

    def __new__(cls, x, y):
        assert len(x) == len(y)
        return super().__new__(cls, x, y)

    def __init__(self, x, y):
        self.n, self.both = len(x), torch.stack([x, y])


@dataclasses.dataclass(frozen=True)
class AlikeFields:
    "The same as a dataclass"

    x: object
    y: object

    def __post_init__(self):
        assert len(self.x) == len(self.y)
        object.__setattr__(self, "n", len(self.x))


class Movable:
    "No tensor, but with a method `to`, like a tokenizer's batch"

    def __init__(self, device="cpu"):
        self.device = torch.device(device)

    def to(self, device):
        return Movable(device)


class Opaque:
    "Nothing that anybody can walk through; its `to` is no method"

    to = "somewhere"


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
]
a_tensor = st.builds(
    lambda shape, dtype: torch.ones(shape, dtype=dtype),
    st.sampled_from([(), (1,), (4,), (2, 3), (0, 2)]),
    st.sampled_from(DTYPES),
)
other = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.builds(Opaque),
    st.just({1, 2}),
    st.just(Example),
)
keys = st.text("abc", min_size=1, max_size=2)


def nests(leaves):
    "Batches of any shape with `leaves` in them"
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(Pair, inner, inner),
            st.builds(Example, inner, inner),
            st.builds(Frozen, inner),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
            st.dictionaries(keys, inner, max_size=3).map(MappingProxyType),
        ),
        max_leaves=8,
    )


batches = nests(a_tensor | other)


def paths(x, here=()):
    "Every leaf of `x` with the types and places on the way to it; what has no leaves counts as one"
    if type(x) in (dict, OrderedDict, MappingProxyType):
        inner = list(x.items())
    elif type(x) in (list, tuple, Pair):
        inner = list(enumerate(x))
    elif type(x) in (Example, Frozen):
        inner = list(vars(x).items())
    else:
        return [(here, x)]
    return [o for k, v in inner for o in paths(v, (*here, type(x), k))] or [((*here, type(x)), None)]


# The walk


@pytest.mark.shows("ISA-104")
@settings(max_examples=200, deadline=None)
@given(batches)
def test_a_walk_that_changes_nothing_keeps_structure_and_every_object(x):
    "Same types, same places, the very same tensors and other things"
    before, after = paths(x), paths(map_tensors(lambda o: o, x))
    assert [p for p, _ in after] == [p for p, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(after, before))


@pytest.mark.shows("ISA-104")
@settings(max_examples=200, deadline=None)
@given(batches)
def test_the_function_meets_each_tensor_once_and_nothing_else(x):
    "In order, and its results stand where the tensors stood"
    met = []

    def number(o):
        met.append(o)
        return f"number {len(met)}"

    before = paths(x)
    after = paths(map_tensors(number, x))
    places = [i for i, (_, o) in enumerate(before) if isinstance(o, torch.Tensor)]
    assert len(met) == len(places) and all(o is before[i][1] for o, i in zip(met, places))
    assert [after[i][1] for i in places] == [f"number {n + 1}" for n in range(len(places))]
    assert all(a is b for i, ((_, a), (_, b)) in enumerate(zip(after, before)) if i not in places)
    assert all(a is b for (_, a), (_, b) in zip(paths(x), before))  # The batch itself is as it was


@pytest.mark.shows("ISA-104")
def test_another_leaf_may_be_asked_for():
    "`is_leaf` says where the walk stops"
    x = {"a": [1, 2.5], "b": Pair("text", 3)}
    assert map_tensors(lambda o: o + 1, x, lambda o: isinstance(o, int)) == {
        "a": [2, 2.5],
        "b": Pair("text", 4),
    }
    assert map_tensors(len, x, lambda o: isinstance(o, list)) == {"a": 2, "b": Pair("text", 3)}


def test_what_pytorch_returns_keeps_its_names():
    "The results of `torch.max` and `Tensor.shape` are tuples of a kind of their own"
    x = torch.arange(6.0).reshape(2, 3).max(0)
    doubled = map_tensors(lambda o: o * 2, x)
    assert (
        type(doubled) is type(x)
        and doubled.values.tolist() == [6, 8, 10]
        and doubled.indices.tolist() == [2, 2, 2]
    )
    assert type(map_tensors(lambda o: o, torch.Size([2, 3]))) is torch.Size


def test_a_mapping_that_cannot_be_remade_becomes_a_dict():
    "A mapping with a constructor of its own still has its tensors walked"

    class Named(dict):
        def __init__(self, name, items):
            super().__init__(items)

    moved = map_tensors(lambda o: o + 1, Named("x", {"a": torch.zeros(2)}))
    assert type(moved) is dict and moved["a"].tolist() == [1, 1]


@settings(max_examples=200, deadline=None)
@given(batches)
def test_the_size_of_a_batch_is_the_length_of_its_first_tensor_with_rows(x):
    "Against the list of paths; None when there is no such tensor"
    sizes = [o.shape[0] for _, o in paths(x) if isinstance(o, torch.Tensor) and o.ndim > 0]
    assert batch_size(x) == (sizes[0] if sizes else None)


# Examples


def zeros(*shape):
    return torch.zeros(shape)


def ids(*shape):
    return torch.zeros(shape, dtype=torch.long)


BOXES = [{"boxes": zeros(k, 4)} for k in (7, 1, 1, 1)]
IMAGES = [zeros(3, 5 + i, 5) for i in range(4)]
SEQUENCES = [zeros(k, 2) for k in (7, 2, 3, 5)]


@pytest.mark.parametrize(
    "entry",
    [
        BOXES,
        tuple(BOXES),
        IMAGES,
        tuple(IMAGES),
        SEQUENCES,
        tuple(SEQUENCES),
        L(IMAGES),
        [Example(zeros(k), "a text") for k in (7, 1, 1, 1)],
        [[o["boxes"], zeros(3)] for o in BOXES],
        {"images": IMAGES, "boxes": BOXES},
        Pair(BOXES, "a text"),
    ],
)
@pytest.mark.parametrize("beside", [zeros(4), [0, 1, 1, 0], ["a", "b", "c", "d"], tuple(BOXES)])
def test_a_list_of_examples_has_as_many_as_it_is_long(entry, beside):
    assert n_examples((entry,), (beside,)) == n_examples((beside,), (entry,)) == 4


@pytest.mark.parametrize("n", [1, 2, 5])
def test_images_are_counted_in_small_batches_as_in_large_ones(n):
    images = [zeros(3, 5 + i, 5) for i in range(n)]
    assert n_examples((images,), (zeros(n),)) == n_examples((images,), (BOXES[:1] * n,)) == n


@pytest.mark.parametrize("kind", [list, tuple, L])
def test_a_list_of_inputs_has_the_rows_of_each(kind):
    "As PyTorch's loaders make it, also if the targets have other rows"
    inputs = kind([zeros(8, 3), zeros(8, 2)])
    for targets in ([zeros(8)], [kind([zeros(8), zeros(8)])], [zeros(40)], []):
        assert n_examples((inputs,), targets) == 8
    assert n_examples((kind([zeros(2, 3), zeros(2, 2)]),), (zeros(2),)) == 2


def test_a_batch_is_a_list_of_entries_and_not_of_examples():
    for x, y in ((zeros(8, 3), zeros(8)), ([zeros(8, 3), zeros(8)], zeros(8)), (zeros(8), [zeros(8)] * 3)):
        assert n_examples([x, y]) == n_examples((x, y)) == n_examples((x,), (y,)) == 8


UNALIKE = {
    "a state": ((zeros(8, 5, 3), zeros(1, 8, 4)), zeros(8)),
    "nodes and edges": ((zeros(9, 4), ids(2, 12)), zeros(2)),
    "nodes, edges and graphs": ((zeros(9, 4), ids(2, 12), ids(9)), zeros(3)),
}


@pytest.mark.parametrize("name", UNALIKE)
def test_a_tuple_of_different_things_is_no_list_of_examples(name):
    inputs, targets = UNALIKE[name]
    assert n_examples((inputs,), (targets,)) == n_examples((inputs,)) == len(inputs[0])


def test_an_entry_alone_with_its_number_gives_way_to_one_on_which_both_sides_agree():
    weights, labels, preds = zeros(2), zeros(8), zeros(8, 2)
    assert n_examples((weights, labels), (preds,)) == n_examples((weights, preds), (labels,)) == 8
    assert n_examples((weights,), (preds,)) == 2
    assert n_examples((zeros(9, 4), ids(12), ids(12)), (zeros(3),)) == 9  # Both are inputs
    assert n_examples((zeros(2, 3), zeros(8)), (ids(2), preds)) == 2


@pytest.mark.parametrize("text", [["a", "b", "c"], [["a", "b"], ["c"]], [1, 2, 3], [], None, "abc", [None]])
def test_what_holds_no_tensor_never_counts_by_itself(text):
    assert n_examples((text,), ()) is n_examples((text, text), (text,)) is None
    assert n_examples((text,), (zeros(8),)) == n_examples((text, zeros(8)), ()) == 8


@settings(max_examples=200, deadline=None)
@given(batches)
def test_examples_are_counted_in_whatever_has_tensors_with_rows(x):
    "And of records without lists they are the rows of the first"
    n = n_examples((x,))
    assert (n is None) is (batch_size(x) is None)
    if not any(kind in (list, tuple) for place, _ in paths(x) for kind in place):
        assert n == batch_size(x)


def test_single_examples_are_taken_out_of_lists_and_tensors():
    targets = {"boxes": BOXES, "labels": torch.arange(4), "weights": zeros(2), "name": "a text"}
    found = examples_at(targets, slice(1, 3), 4)
    assert found["boxes"] == BOXES[1:3] and found["labels"].tolist() == [1, 2]
    assert found["weights"] is targets["weights"] and found["name"] == "a text"
    assert examples_at(tuple(IMAGES), slice(3, 4), 4) == tuple(IMAGES[3:])
    columns = examples_at([torch.arange(2), torch.arange(2)], slice(1, 2), 2)
    assert [o.tolist() for o in columns] == [[1], [1]]


# Devices


@pytest.mark.shows("ISA-104")
def test_the_default_device_is_the_accelerator_or_the_cpu(monkeypatch):
    "Asked anew at each call"
    expected = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    )
    assert default_device() == expected
    for found, device in ((torch.device("cuda"), "cuda"), (torch.device("mps"), "mps"), (None, "cpu")):
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False, found=found: found
        )
        assert default_device() == torch.device(device)


@pytest.mark.shows("ISA-104")
@settings(max_examples=200, deadline=None)
@given(nests(a_tensor | other | st.builds(Movable)), st.sampled_from(["meta", torch.device("meta")]))
def test_everything_that_can_be_moved_is_moved_however_deep(x, device):
    "Nested mappings, named tuples, dataclasses and objects with `to`; the rest stays the very same"
    before, after = paths(x), paths(to_device(x, device))
    assert [p for p, _ in after] == [p for p, _ in before]
    for (_, a), (_, b) in zip(after, before):
        if isinstance(b, (torch.Tensor, Movable)):
            assert type(a) is type(b) and a.device.type == "meta" and b.device.type == "cpu"
            if isinstance(b, torch.Tensor):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
        else:
            assert a is b


@pytest.mark.parametrize("kind", [Alike, AlikeFields])
def test_what_looks_at_its_tensors_is_made_of_anything_else_unasked(kind):
    x = kind(torch.ones(2), torch.zeros(2))
    met = []
    counts = map_tensors(lambda o: met.append(o) or o.ndim, {"x": x})["x"]
    assert type(counts) is kind and (counts.x, counts.y, counts.n) == (1, 1, 2)
    assert met[0] is x.x and met[1] is x.y
    assert map_tensors(lambda o: None, x).x is None and batch_size(x) == 2


@pytest.mark.parametrize("kind", [Alike, AlikeFields])
def test_what_looks_at_its_tensors_is_asked_about_other_tensors(kind):
    x = kind(torch.ones(2), torch.zeros(2))
    more = map_tensors(lambda o: torch.cat([o, o]), x)
    assert type(more) is kind and more.n == 4 and len(more.x) == len(more.y) == 4
    assert not hasattr(more, "both") or more.both.shape == (2, 4)
    with pytest.raises(AssertionError):
        map_tensors(lambda o: o[: int(o.sum())], x)


def test_a_packed_sequence_has_as_many_rows_as_sequences():
    sequences = [torch.ones(n, 3) for n in (2, 5, 1)]
    x = nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    assert batch_size(x) == batch_size([x, torch.ones(7)]) == batch_size({"x": x}) == 3
    assert map_tensors(lambda o: o.numel(), x).data == 24


@pytest.mark.shows("ISA-104")
def test_a_packed_sequence_moves_itself():
    "It is a named tuple too, but its own `to` comes first"
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device({"x": packed}, "meta")["x"]
    assert (
        type(moved) is type(packed)
        and moved.data.device.type == "meta"
        and moved.batch_sizes.device.type == "cpu"
    )


@pytest.mark.shows("ISA-104")
def test_without_a_device_the_default_is_asked(monkeypatch):
    monkeypatch.setattr(tensors, "default_device", lambda: torch.device("meta"))
    assert to_device([torch.ones(1)])[0].device.type == "meta"
    assert to_device([torch.ones(1)], "cpu")[0].device.type == "cpu"


@pytest.mark.shows("ISA-104")
def test_what_is_on_the_device_already_is_not_copied():
    "A second move costs nothing"
    x = {"a": torch.ones(2)}
    assert to_device(x, "cpu")["a"] is x["a"]


@pytest.mark.shows("ISA-104")
@settings(max_examples=200, deadline=None)
@given(nests(a_tensor | other | st.builds(Movable, st.just("meta"))))
def test_on_the_cpu_everything_is_detached_and_in_full_precision(x):
    "Values are kept, half precision becomes float, other types stay"
    attached = map_tensors(lambda o: o.clone().requires_grad_() if o.is_floating_point() else o, x)
    before, after = paths(attached), paths(to_cpu(attached))
    assert [p for p, _ in after] == [p for p, _ in before]
    for (_, a), (_, b) in zip(after, before):
        if isinstance(b, torch.Tensor):
            assert not a.requires_grad and a.device.type == "cpu"
            assert a.dtype == (torch.float32 if b.dtype in (torch.float16, torch.bfloat16) else b.dtype)
            assert torch.equal(a, b.detach().to(a.dtype))
            np.asarray(a)  # NumPy understands it
        elif isinstance(b, Movable):
            assert a.device.type == "cpu"
        else:
            assert a is b


# Random numbers


@pytest.fixture
def global_state(monkeypatch):
    "Puts back what `set_seed` changes: generators, flags and the environment"
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    flags = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "to be put back")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])
    torch.use_deterministic_algorithms(flags[0])
    torch.backends.cudnn.benchmark = flags[1]


def draw():
    "Some numbers from each generator"
    return random.random(), float(np.random.rand()), torch.rand(3).tolist(), torch.randperm(20).tolist()


@pytest.mark.shows("ISA-94")
@pytest.mark.parametrize("seed", [0, 42, 2**32 - 1, 2**32 + 42, 2**60])
def test_the_same_seed_gives_the_same_numbers(global_state, seed):
    "Python, NumPy and PyTorch, also with seeds that NumPy alone would refuse"
    set_seed(seed)
    first = draw()
    second = draw()
    set_seed(seed)
    assert draw() == first
    assert all(a != b for a, b in zip(first, second))


@pytest.mark.parametrize("seed", ["42", 1.5, None])
def test_a_seed_is_a_whole_number(global_state, seed):
    "And nothing is seeded by halves"
    before = random.getstate()
    with pytest.raises(TypeError, match="`seed` is"):
        set_seed(seed)
    assert random.getstate() == before


@pytest.mark.shows("ISA-94")
def test_another_seed_gives_other_numbers(global_state):
    "From every generator"
    set_seed(1)
    first = draw()
    set_seed(2)
    assert all(a != b for a, b in zip(first, draw()))


@pytest.mark.shows("ISA-94")
def test_the_numbers_are_those_of_each_librarys_own_seed(global_state):
    "Nothing is hidden behind the seed"
    set_seed(7)
    ours = draw()
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert draw() == ours


@pytest.mark.shows("ISA-94")
def test_determinism_comes_only_on_request(global_state):
    "And a setting of cuBLAS that the user made is left alone"
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = True
    set_seed(0)
    assert (
        not torch.are_deterministic_algorithms_enabled()
        and torch.backends.cudnn.benchmark
        and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    )
    set_seed(0, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    set_seed(0, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


# Transforms in place


@pytest.mark.shows("ISA-95")
def test_an_inplace_function_returns_the_very_argument_it_changed():
    "Whatever it returns itself, and with all further arguments"

    @inplace
    def scale(batch, by, shift=0):
        "Scale the batch"
        batch["x"] = batch["x"] * by + shift
        return "not this"

    batch = {"x": 3}
    assert scale(batch, 2, shift=1) is batch and batch == {"x": 7}
    assert (scale.__name__, scale.__doc__) == ("scale", "Scale the batch")


@pytest.mark.shows("ISA-95")
def test_an_inplace_function_does_not_hide_an_error():
    with pytest.raises(KeyError, match="missing"):
        inplace(lambda batch: batch["missing"])({})
