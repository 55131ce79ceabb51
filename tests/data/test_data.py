"""From datasets to loaders, checked against the datasets' own rows, and the stored digits.

A dataset here is a Hugging Face `DatasetDict` whose rows are numbered, so that one can see which rows come,
how often and in which order. The digits in the package are compared pixel by pixel with the copy that
scikit-learn ships, and `tools/make_digits.py` is run to show that it makes the same files.
"""

import runpy
import socket
import subprocess
import sys
from collections import Counter

import matplotlib
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Array2D, ClassLabel, Dataset, DatasetDict, Features, Image, IterableDatasetDict, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from sklearn import datasets as sklearn_datasets
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, get_worker_info

from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders, collate_rows, get_dataloaders
from isaac_loop.data.small_data import image_to_tensor, load_digits, sample_dataset_dict
from isaac_loop.models.small_models import SimpleNet
from isaac_loop.basics.tensors import inplace, set_seed
from isaac_loop.loop.trainer import Trainer

from places import ROOT

matplotlib.use("Agg")


def numbered(n, first=0):
    "A Hugging Face dataset of `n` rows; row i has x = (i, i) and y = i"
    ids = list(range(first, first + n))
    return Dataset.from_dict({"x": [[float(i), float(i)] for i in ids], "y": ids}).with_format("torch")


def splits(train=40, valid=30, names=("train", "test")):
    "A `DatasetDict` of two splits, the second numbered from 1000"
    return DatasetDict({names[0]: numbered(train), names[1]: numbered(valid, 1000)})


def rows_of(dl):
    "The numbers of the rows that a loader gives, in order"
    return [int(o) for _, y in dl for o in y]


@inplace
def to_tensors(batch):
    batch["image"] = [image_to_tensor(o) for o in batch["image"]]


# `DataLoaders.from_dataset_dict`


@pytest.mark.shows("ISA-96")
def test_a_dataset_dict_becomes_two_loaders():
    "Every row once, as tuples of stacked columns in the order of the dataset"
    dls = DataLoaders.from_dataset_dict(splits(), 16)
    assert sorted(rows_of(dls.train)) == list(range(40)) and rows_of(dls.valid) == list(range(1000, 1030))
    for x, y in (*dls.train, *dls.valid):
        assert x.shape == (len(y), 2) and torch.equal(x[:, 0], y.float())
    assert all(type(batch) is tuple for batch in dls.train) and dls.n_inp == 1
    assert repr(dls) == "DataLoaders(train: 3 batches, valid: 1 batches, n_inp: 1)"


@pytest.mark.shows("ISA-100")
def test_the_training_rows_are_shuffled_anew_and_the_others_are_not():
    "And the seed says in which order"
    set_seed(0)
    dls = DataLoaders.from_dataset_dict(splits(), 16)
    first, second = rows_of(dls.train), rows_of(dls.train)
    assert first != sorted(first) and second != sorted(second) and first != second
    assert rows_of(dls.valid) == rows_of(dls.valid) == list(range(1000, 1030))
    set_seed(0)
    assert rows_of(dls.train) == first


@pytest.mark.shows("ISA-100")
@pytest.mark.parametrize("batch_size", [1, 7, 16, 100])
def test_a_batch_for_validation_is_twice_as_large(batch_size):
    "It keeps no gradients"
    dls = DataLoaders.from_dataset_dict(splits(), batch_size)
    assert [len(y) for _, y in dls.train] == [len(o) for o in torch.arange(40).split(batch_size)]
    assert [len(y) for _, y in dls.valid] == [len(o) for o in torch.arange(30).split(batch_size * 2)]


@pytest.mark.shows("ISA-97")
def test_arguments_for_loaders_reach_both_loaders():
    "Each of them, by name"
    generator, start = torch.Generator(), (lambda worker: None)
    options = dict(
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=True,
        drop_last=True,
        timeout=60,
        worker_init_fn=start,
        generator=generator,
    )
    dls = DataLoaders.from_dataset_dict(splits(), 16, **options)
    for dl in (dls.train, dls.valid):
        for name, value in options.items():
            assert getattr(dl, name) is value or getattr(dl, name) == value, name


@pytest.mark.shows("ISA-97")
def test_arguments_for_loaders_have_their_effect():
    "Rows come from worker processes, incomplete batches are dropped, and the order may be kept"

    class WhoLoads:
        def __len__(self):
            return 5

        def __getitem__(self, i):
            return i, -1 if get_worker_info() is None else get_worker_info().id

    for n, expected in ((0, {-1}), (2, {0, 1})):
        dls = DataLoaders.from_dataset_dict(
            {"train": WhoLoads(), "test": WhoLoads()}, 1, num_workers=n, shuffle=False
        )
        assert rows_of((i, i) for i, _ in dls.train) == list(range(5))
        assert set(rows_of(dls.train)) == set(rows_of(dls.valid)) == expected
    dls = DataLoaders.from_dataset_dict(splits(), 16, drop_last=True, shuffle=False)
    assert rows_of(dls.train) == list(range(32)) and rows_of(dls.valid) == []


@pytest.mark.shows("ISA-97")
def test_a_misspelt_argument_for_loaders_is_an_error():
    "Nothing is dropped in silence"
    with pytest.raises(TypeError, match="num_worker"):
        DataLoaders.from_dataset_dict(splits(), 16, num_worker=2)


@pytest.mark.shows("ISA-97")
def test_a_collate_fn_of_ones_own_has_the_last_word():
    "For both loaders; `columns` then has nobody to listen to it"
    dls = DataLoaders.from_dataset_dict(splits(), 16, collate_fn=len)
    assert list(dls.train) == [16, 16, 8] and list(dls.valid) == [30]


# Which splits


@pytest.mark.shows("ISA-96")
@pytest.mark.parametrize(
    "names, said, expected",
    [
        (("train", "test"), {}, ("train", "test")),
        (("test", "train"), {}, ("train", "test")),
        (("train", "validation"), {}, ("train", "validation")),
        (("train", "test", "extra"), dict(valid="extra"), ("train", "extra")),
        (("train", "test", "extra"), dict(train="extra", valid="test"), ("extra", "test")),
        (("a", "b"), dict(train="b"), ("b", "a")),
        (("train", "test"), dict(train="test"), ("test", "train")),
        (("a", "b", "c"), dict(train="c", valid="a"), ("c", "a")),
        (("train",), dict(valid="train"), None),
        (("train",), {}, None),
        (("train", "test", "extra"), {}, None),
        (("train", "test", "extra"), dict(train="train"), None),
        (("a", "b"), {}, None),
    ],
)
def test_the_splits_are_chosen_only_when_the_choice_is_clear(names, said, expected):
    "`train` and one other, or what was said; otherwise an error that lists the splits"
    dataset_dict = DatasetDict({name: numbered(3, 100 * i) for i, name in enumerate(names)})
    if expected is None:
        with pytest.raises(ValueError) as caught:
            DataLoaders.from_dataset_dict(dataset_dict, 2, **said)
        assert str(list(names)) in str(caught.value) and "train='train', valid='test'" in str(caught.value)
    else:
        dls = DataLoaders.from_dataset_dict(dataset_dict, 2, **said)
        assert [sorted(rows_of(dl)) for dl in (dls.train, dls.valid)] == [
            [100 * names.index(o) + i for i in range(3)] for o in expected
        ]


@pytest.mark.shows("ISA-96")
def test_a_split_that_is_not_there_is_answered_with_the_near_one():
    for said in (dict(train="trian"), dict(valid="tset")):
        with pytest.raises(LookupError) as caught:
            DataLoaders.from_dataset_dict(splits(), 2, **said)
        assert f"`{[*said.values()][0]}`" in str(caught.value) and "Did you mean `t" in str(caught.value)


# Rows of many kinds


@pytest.mark.shows("ISA-100")
def test_rows_may_be_tuples():
    "Any dict of datasets will do"
    data = [(torch.full((3,), float(i)), i) for i in range(8)]
    dls = DataLoaders.from_dataset_dict({"train": data, "valid": data}, 4, shuffle=False)
    for x, y in dls.train:
        assert torch.equal(x, y[:, None].float().expand(-1, 3)) and len(y) == 4
    assert rows_of(dls.train) == rows_of(dls.valid) == list(range(8))


@pytest.mark.shows("ISA-100")
@pytest.mark.parametrize("columns", [("b", "a", "y"), ("y",), ("a", "a")])
def test_columns_come_in_the_order_asked_for(columns):
    "Of rows that are dicts; some may be left out and some be taken twice"
    rows = [dict(a=i, b=10 * i, y=100 * i) for i in range(5)]
    batch = collate_rows(columns)(rows)
    assert type(batch) is tuple and [o.tolist() for o in batch] == [[row[o] for row in rows] for o in columns]


@pytest.mark.shows("ISA-100")
def test_without_columns_all_come_in_the_order_of_the_rows():
    rows = [dict(y=i, a=2 * i) for i in range(3)]
    assert [o.tolist() for o in collate_rows()(rows)] == [[0, 1, 2], [0, 2, 4]]


@pytest.mark.shows("ISA-100")
def test_a_wrong_column_is_an_error_with_the_near_one():
    with pytest.raises(LookupError) as caught:
        collate_rows(["image", "labl"])([dict(image=1, label=2)])
    assert not isinstance(caught.value, KeyError)
    assert (
        "`labl`" in str(caught.value)
        and "['image', 'label']" in str(caught.value)
        and "Did you mean `label`?" in str(caught.value)
    )


@pytest.mark.parametrize("columns", [None, ["x", "y"]])
@pytest.mark.parametrize("place", [0, 2])
def test_a_row_that_lacks_a_column_is_named(columns, place):
    rows = [dict(x=i, y=i) for i in range(4)]
    del rows[place]["y"]
    with pytest.raises(
        LookupError, match=rf"Row {place} of the 4 .* no column `y`.* it has \['x'\]"
    ) as caught:
        collate_rows(columns)(rows)
    assert not isinstance(caught.value, KeyError)


def test_rows_without_names_have_no_columns_to_choose():
    rows = [(torch.ones(2), 1)] * 4
    for seed in (None, 1):
        splits = dict(train=rows, test=rows)
        dls = DataLoaders.from_dataset_dict(splits, 2, columns=["nonsense"], seed=seed)
        with pytest.raises(TypeError, match=r"`columns` is \['nonsense'\], and the rows are of type tuple"):
            next(iter(dls.train))


def test_a_word_is_one_column():
    digits = load_digits()
    by_word, by_list = (DataLoaders.from_dataset_dict(digits, 4, columns=o) for o in ("label", ["label"]))
    (a,), (b,) = next(iter(by_word.valid)), next(iter(by_list.valid))
    assert torch.equal(a, b) and len(collate_rows("x")([dict(x=1, y=2)])) == 1


@pytest.mark.parametrize(
    "do, error, words",
    [
        (lambda: collate_rows(3), TypeError, "`columns` is 3"),
        (lambda: collate_rows([]), ValueError, r"`columns` is \[\], which names no column"),
        (lambda: collate_rows()([]), ValueError, "no rows"),
        (lambda: get_dataloaders([1], None, None), ValueError, "`batch_size` is None, but rows are counted"),
        (lambda: get_dataloaders([1], None, "3"), ValueError, "`batch_size` is '3'"),
        (lambda: get_dataloaders([1], None, 2, collate_fn=3), TypeError, "`collate_fn` is 3"),
        (lambda: get_dataloaders([1], [1], 2, sampler=[0]), TypeError, "`sampler` picks rows of one"),
        (lambda: get_dataloaders([1], [1], 2, False, sampler=[0]), TypeError, "`sampler` picks rows of one"),
        (lambda: get_dataloaders([1], None, 2, batch_sampler=[[0]]), TypeError, "`batch_sampler` picks"),
        (lambda: get_dataloaders([1], [1], 2, seed=1, sampler=[0]), TypeError, "order comes from `seed`"),
    ],
)
def test_what_makes_no_loaders_is_refused_in_words(do, error, words):
    with pytest.raises(error, match=words):
        do()


def test_a_sampler_for_one_dataset_holds():
    train, _ = get_dataloaders(numbered(4), None, 2, shuffle=False, sampler=[3, 1])
    assert [batch["y"].tolist() for batch in train] == [[3, 1]]


@pytest.mark.shows("ISA-99", "ISA-96")
@pytest.mark.parametrize("as_dicts", [False, True])
def test_two_inputs_reach_the_model_as_two_arguments(as_dicts):
    "`n_inp=2`, with rows as tuples and as dicts whose columns are put in order"

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))
            self.seen = []

        def forward(self, left, right):
            self.seen.append((left.tolist(), right.tolist()))
            return (left + right) * self.w

    numbers = [(float(i), 10.0 * i, 11.0 * i) for i in range(4)]
    data = [dict(zip(("left", "y", "right"), (a, y, b))) for a, b, y in numbers] if as_dicts else numbers
    columns = ["left", "right", "y"] if as_dicts else None
    dls = DataLoaders.from_dataset_dict(
        {"train": data, "valid": data}, 4, columns=columns, n_inp=2, shuffle=False
    )
    model = Sum()
    trainer = Trainer(dls, F.mse_loss, torch.optim.SGD, model, BasicTrainCB())
    inputs, targets = trainer.split(next(iter(dls.train)))
    assert (len(inputs), len(targets)) == (2, 1) and targets[0].tolist() == [0, 11, 22, 33]
    trainer.fit(1, lr=1e-3)
    assert model.seen == [([0, 1, 2, 3], [0, 10, 20, 30])] * 2 and model.w.item() > 0


@pytest.mark.shows("ISA-99")
@pytest.mark.parametrize("n_inp", [0, -1, 1.0, True, "1"])
def test_the_number_of_inputs_is_a_whole_number_of_one_or_more(n_inp):
    with pytest.raises(ValueError, match="`n_inp` is"):
        DataLoaders([], n_inp=n_inp)


@pytest.mark.shows("ISA-99")
def test_a_loader_that_cannot_be_iterated_is_refused():
    "And one for validation may be missing"
    with pytest.raises(TypeError, match="`train` is a int"):
        DataLoaders(3)
    with pytest.raises(TypeError, match="`valid` is a int"):
        DataLoaders([], 3)
    dls = DataLoaders([1, 2])
    assert (
        dls.valid is None
        and dls.n_inp == 1
        and repr(dls) == "DataLoaders(train: 2 batches, valid: none, n_inp: 1)"
    )


class Batches(torch.utils.data.Dataset):
    "A dataset that walks over batches by itself"

    def __iter__(self):
        return iter([(torch.ones(2, 1), torch.ones(2, 1))])


@pytest.mark.parametrize(
    "dataset",
    [
        torch.utils.data.TensorDataset(torch.ones(4, 1)),
        numbered(4),
        numbered(4).to_iterable_dataset(),
        splits(),
    ],
)
def test_a_dataset_is_no_loader(dataset):
    "It would train row by row; a list of batches, a loader, and what gives batches by itself are taken"
    with pytest.raises(TypeError, match="`train` is a .*get_dataloaders|`train` is a .*from_dataset_dict"):
        DataLoaders(dataset)
    with pytest.raises(TypeError, match="`valid` is a"):
        DataLoaders([1], dataset)
    for o in (Batches(), Stream(4), iter([1]), torch.utils.data.DataLoader([1])):
        assert DataLoaders(o, o).train is o


# `get_dataloaders`


def test_a_text_is_no_answer_to_whether_to_shuffle():
    with pytest.raises(TypeError, match="`shuffle` is 'no'"):
        get_dataloaders(numbered(4), None, 2, shuffle="no")


def test_one_exact_loader_does_not_serve_two_passes():
    "It would lose its place in each validation; a plain loader has none"
    from isaac_loop.train.training import BasicTrainCB
    from isaac_loop.loop.trainer import Trainer

    rows = [(torch.ones(1), torch.ones(1))] * 4

    def make_trainer(dl):
        return Trainer(
            DataLoaders(dl, dl),
            torch.nn.functional.mse_loss,
            torch.optim.SGD,
            torch.nn.Linear(1, 1),
            BasicTrainCB(),
        )

    exact = get_dataloaders(rows, None, 2, seed=1)[0]
    with pytest.raises(ValueError, match="are one loader"):
        make_trainer(exact).fit(1)
    make_trainer(exact).fit(1, valid=False)
    make_trainer(get_dataloaders(rows, None, 2)[0]).fit(1)


@pytest.mark.shows("ISA-100")
def test_a_missing_dataset_has_no_loader():
    "Training or validation alone"
    train, valid = get_dataloaders(numbered(4), None, 2)
    assert len(train) == 2 and valid is None
    train, valid = get_dataloaders(None, numbered(4), 2)
    assert train is None and len(valid) == 1


@pytest.mark.shows("ISA-100")
def test_the_training_rows_may_be_left_in_order():
    "`shuffle=False`"
    train, valid = get_dataloaders(
        numbered(10), numbered(10), 3, shuffle=False, collate_fn=collate_rows(["x", "y"])
    )
    assert rows_of(train) == rows_of(valid) == list(range(10))


# Streams


class Stream(IterableDataset):
    "Rows that come one after the other, with no length"

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return ((torch.full((2,), float(i)), i) for i in range(self.n))


@pytest.mark.shows("ISA-96", "ISA-100")
def test_a_stream_comes_in_its_own_order():
    "A PyTorch stream cannot be shuffled, and begins anew at each pass"
    dls = DataLoaders.from_dataset_dict({"train": Stream(10), "valid": Stream(7)}, 4)
    for _ in range(2):
        assert [len(y) for _, y in dls.train] == [4, 4, 2] and rows_of(dls.train) == list(range(10))
    assert [len(y) for _, y in dls.valid] == [7]
    assert repr(dls) == "DataLoaders(train: a stream, valid: a stream, n_inp: 1)"


@pytest.mark.shows("ISA-96")
def test_a_stream_from_hugging_face_trains():
    "An `IterableDatasetDict` goes the same way as a `DatasetDict`"
    streams = IterableDatasetDict({name: ds.to_iterable_dataset() for name, ds in splits().items()})
    dls = DataLoaders.from_dataset_dict(streams, 16)
    assert rows_of(dls.train) == list(range(40)) and rows_of(dls.valid) == list(range(1000, 1030))
    model = nn.Linear(2, 1)
    before = model.weight.clone()
    Trainer(
        dls, lambda preds, y: F.mse_loss(preds[:, 0], y.float()), torch.optim.SGD, model, BasicTrainCB()
    ).fit(1, lr=1e-4)
    assert not torch.equal(model.weight, before)


# `sample_dataset_dict`


@pytest.mark.shows("ISA-98")
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 12), st.integers(0, 9), st.booleans())
def test_a_sample_has_its_size_and_no_row_twice(n_train, n_test, by_name):
    "Sizes in the order of the splits, or by name"
    whole = splits(12, 9)
    sizes = dict(test=n_test, train=n_train) if by_name else (n_train, n_test)
    sample = sample_dataset_dict(whole, sizes)
    assert type(sample) is DatasetDict and list(sample) == list(whole)
    for name, n in (("train", n_train), ("test", n_test)):
        rows = [int(o) for o in sample[name]["y"]]
        assert len(rows) == n == len(set(rows)) and set(rows) <= {int(o) for o in whole[name]["y"]}
        assert sample[name].features == whole[name].features


@pytest.mark.shows("ISA-98", "ISA-94")
def test_a_sample_is_random_and_repeatable():
    "The seed says which rows, and every row has its chance"
    whole = splits(30, 30)
    draw = lambda seed: (
        set_seed(seed),
        [[int(o) for o in ds["y"]] for ds in sample_dataset_dict(whole, (10, 10)).values()],
    )[1]
    assert draw(0) == draw(0) != draw(1)
    train, test = draw(0)
    assert [o + 1000 for o in train] != test  # One split does not copy the other's choice
    assert {o for seed in range(30) for o in draw(seed)[0]} == set(range(30))


@pytest.mark.shows("ISA-98")
def test_a_sample_may_have_all_rows_and_no_more():
    "One more is an error which names the split and its size"
    whole = splits(5, 4)
    assert sorted(int(o) for o in sample_dataset_dict(whole, (5, 4))["train"]["y"]) == list(range(5))
    for sizes, name, n in (
        ((6, 4), "train", 5),
        ((5, 5), "test", 4),
        (dict(train=5, test=99), "test", 4),
    ):
        with pytest.raises(ValueError, match=f"split `{name}`, which has {n}"):
            sample_dataset_dict(whole, sizes)


@pytest.mark.shows("ISA-98")
@pytest.mark.parametrize("sizes", [(5,), (5, 4, 3), (), 5, dict(train=5), dict(train=5, tset=4)])
def test_a_sample_needs_a_size_for_each_split(sizes):
    with pytest.raises(ValueError, match="There are 2 splits, .*not one size for each"):
        sample_dataset_dict(splits(5, 4), sizes)


@pytest.mark.shows("ISA-98")
@pytest.mark.parametrize("size", [-1, 0.5, "5"])
def test_the_size_of_a_sample_is_a_number_of_rows(size):
    with pytest.raises(ValueError, match=r"`sample_sizes\['train'\]` is .*rows are counted"):
        sample_dataset_dict(splits(5, 4), (size, 4))


@pytest.mark.parametrize("data", [numbered(3), None, [1, 2], (1,)], ids=["dataset", "none", "list", "tuple"])
def test_a_sample_is_drawn_from_splits(data):
    with pytest.raises(TypeError, match="`dataset_dict` is a .*no splits by name") as caught:
        sample_dataset_dict(data, (1, 1))
    assert len(str(caught.value)) < 300


def test_a_split_of_a_sample_has_rows_to_select():
    with pytest.raises(TypeError, match="The split `test` is a list, of which no rows can be selected"):
        sample_dataset_dict(dict(train=numbered(3), test=[1, 2]), (1, 1))


@pytest.mark.shows("ISA-98")
def test_a_sample_draws_500_rows_when_no_size_is_said():
    "From each of two splits"
    assert sample_dataset_dict(splits(600, 501)).num_rows == {"train": 500, "test": 500}


@pytest.mark.shows("ISA-98")
def test_a_sample_keeps_the_transform():
    "And so goes straight to the loaders"
    digits = sample_dataset_dict(load_digits().with_transform(to_tensors), (20, 10))
    x, y = next(iter(DataLoaders.from_dataset_dict(digits, 20).train))
    assert x.shape == (20, 1, 8, 8) and x.dtype == torch.float32 and y.shape == (20,)


# `show_batch`


@pytest.fixture
def plt():
    "matplotlib, with its figures closed afterwards"
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def shown(axes):
    "The images that were drawn, and the titles above them"
    drawn = [ax for ax in axes.flat if ax.get_images()]
    return [np.asarray(ax.get_images()[0].get_array()) for ax in drawn], [ax.get_title() for ax in drawn]


images = {
    "gray": torch.rand(12, 1, 8, 6),
    "colour": torch.rand(12, 3, 8, 6),
    "without channels": torch.rand(12, 8, 6),
}


@pytest.mark.shows("ISA-99")
@pytest.mark.parametrize("kind", images)
@pytest.mark.parametrize("n, expected", [(1, 1), (4, 4), (5, 5), (9, 9), (50, 12)])
def test_show_batch_draws_the_first_images_with_their_targets(plt, kind, n, expected):
    "At most `n` of them"
    x, y = images[kind], torch.arange(100, 112)
    pictures, titles = shown(DataLoaders([(x, y)]).show_batch(n))
    assert titles == [str(100 + i) for i in range(expected)]
    for picture, image in zip(pictures, x):
        np.testing.assert_array_equal(
            picture, (image if image.ndim == 2 else image.permute(1, 2, 0).squeeze(-1)).numpy()
        )


@pytest.mark.shows("ISA-99")
def test_show_batch_draws_nine_training_images_unless_told(plt):
    "Three by three; or those for validation"
    dls = DataLoaders(
        [(images["gray"], torch.zeros(12, dtype=int))], [(images["gray"], torch.ones(12, dtype=int))]
    )
    axes = dls.show_batch()
    assert axes.shape == (3, 3) and shown(axes)[1] == ["0"] * 9
    assert shown(dls.show_batch(train_dataset=False))[1] == ["1"] * 9


@pytest.mark.shows("ISA-99")
def test_show_batch_takes_mappings_and_batches_without_labels(plt):
    "The first entry are the images; targets that are more than a number or a word are not shown"
    x = images["gray"]
    assert shown(DataLoaders([dict(image=x, label=torch.arange(12))]).show_batch(2))[1] == ["0", "1"]
    for batch in ((x,), (x, torch.rand(12, 4)), (x, [["a", "b"]] * 12)):
        pictures, titles = shown(DataLoaders([batch]).show_batch(2))
        assert len(pictures) == 2 and titles == ["", ""]
    column = torch.arange(12)[:, None]
    numbers = [0, 1] * 6
    words = ["cat", "dog"] * 6
    for target, expected in ((words, ["cat", "dog"]), (column, ["0", "1"]), (numbers, ["0", "1"])):
        assert shown(DataLoaders([(x, target)]).show_batch(2))[1] == expected
    with pytest.raises(TypeError, match="`classes` has names for targets"):
        DataLoaders([(x, torch.rand(12, 4))]).show_batch(2, classes=["cat", "dog"])


@pytest.mark.shows("ISA-99")
def test_show_batch_draws_the_digits(plt):
    "From the dataset in the package to the picture"
    dls = DataLoaders.from_dataset_dict(load_digits().with_transform(to_tensors), 16, shuffle=False)
    pictures, titles = shown(dls.show_batch(n=4))
    for i, row in enumerate(load_digits()["train"].select(range(4))):
        assert titles[i] == str(row["label"])
        np.testing.assert_array_equal(np.rint(pictures[i] * 255), np.array(row["image"]))


@pytest.mark.shows("ISA-99")
@pytest.mark.parametrize(
    "n, nrows, shape",
    [
        (1, None, (1, 1)),
        (2, None, (1, 2)),
        (3, None, (1, 3)),
        (8, None, (2, 4)),
        (6, 1, (1, 6)),
        (5, 3, (3, 2)),
    ],
)
def test_show_batch_has_the_rows_and_the_size_asked_for(plt, n, nrows, shape):
    "Three images stand side by side"
    axes = DataLoaders([(images["gray"], torch.arange(12))]).show_batch(n, nrows=nrows, imsize=2)
    width, height = axes.flat[0].figure.get_size_inches()
    assert axes.shape == shape and len(shown(axes)[0]) == n
    assert width == 2 * shape[1] and 2 * shape[0] < height < 2.4 * shape[0]


@pytest.mark.shows("ISA-99")
def test_show_batch_names_the_classes(plt):
    "From a list, by target, or from the `ClassLabel` of the data; a class without a name is an error"
    dls = DataLoaders([(images["gray"], torch.tensor([0, 1] * 6))])
    for classes in (["cat", "dog"], ("cat", "dog"), {0: "cat", 1: "dog", 7: "cow"}):
        assert shown(dls.show_batch(2, classes=classes))[1] == ["cat", "dog"]
        listed = DataLoaders([(images["gray"], [0, 1] * 6)])
        assert shown(listed.show_batch(2, classes=classes))[1] == ["cat", "dog"]
    for classes in (3, "cat"):
        with pytest.raises(TypeError, match=f"`classes` is {classes!r}, which has no names"):
            dls.show_batch(classes=classes)
    with pytest.raises(LookupError, match="is 1, for which `classes` has no name"):
        dls.show_batch(classes=["cat"])
    half = DataLoaders([(images["gray"], torch.full((12,), 0.5))])
    assert shown(half.show_batch(1, classes={0.5: "half"}))[1] == ["half"]
    assert shown(half.show_batch(1))[1] == ["0.500"]


@pytest.mark.shows("ISA-99")
@pytest.mark.parametrize("options", [{}, dict(columns=["image", "label"]), dict(seed=1)], ids=str)
def test_show_batch_takes_the_names_that_the_data_have(plt, options):
    "Also where `columns` puts the label elsewhere; data without targets have -1, which nobody has named"
    names = ["zero", "one"]
    features = Features(
        label=ClassLabel(names=names), image=Array2D((8, 6), "float32"), weight=Value("float32")
    )
    if not options.get("columns"):
        features = Features({k: features[k] for k in ("image", "label", "weight")})
    rows = dict(image=images["without channels"].tolist(), label=[1, 0, -1] * 4, weight=[0.5] * 12)
    data = Dataset.from_dict({k: rows[k] for k in features}, features).with_format("torch")
    dls = DataLoaders.from_dataset_dict(dict(train=data, valid=data), 12, shuffle=False, **options)
    assert shown(dls.show_batch(3))[1] == ["one", "zero", "-1"]
    assert shown(dls.show_batch(3, train_dataset=False))[1] == ["one", "zero", "-1"]
    assert shown(dls.show_batch(3, classes={1: "b", 0: "a", -1: "?"}))[1] == ["b", "a", "?"]


@pytest.mark.shows("ISA-99")
@pytest.mark.parametrize(
    "batch, what", [((torch.rand(4, 7), torch.arange(4)), r"torch.Size\(\[4, 7\]\)"), ((["a", "b"],), "list")]
)
def test_show_batch_says_when_there_are_no_images(plt, batch, what):
    with pytest.raises(TypeError, match=f"{what}, which is no batch of images"):
        DataLoaders([batch]).show_batch()


# Images as tensors


@pytest.mark.parametrize(
    "image",
    [
        PILImage.fromarray(np.array([[0, 255], [255, 0]], dtype=np.uint8)).convert("1"),
        PILImage.fromarray(np.array([[0, 65535], [65535, 0]], dtype=np.uint16)),
        PILImage.fromarray(np.array([[0, 255], [255, 0]], dtype=np.uint8)).convert("P"),
        np.array([[False, True], [True, False]]),
        np.array([[0, 65535], [65535, 0]], dtype=np.uint16),
    ],
    ids=["1 bit", "16 bits", "a palette", "bool", "uint16"],
)
def test_white_is_one_and_black_is_nothing_whatever_a_pixel_is_made_of(image):
    "They were divided by 255 whatever they were, and the numbers of a palette taken for colours"
    assert image_to_tensor(image)[0].tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("pixels", [np.ones((2, 2)), np.ones((2, 2), dtype=np.int32)])
def test_pixels_that_do_not_say_what_white_is_are_refused(pixels):
    with pytest.raises(TypeError, match="does not say what white is"):
        image_to_tensor(pixels)


@pytest.mark.parametrize("image", ["digit.png", None, np.zeros(4, dtype=np.uint8)], ids=str)
def test_what_is_no_image_is_refused(image):
    with pytest.raises(TypeError, match="which is no image"):
        image_to_tensor(image)


def test_images_that_were_not_made_tensors_are_told_how_to_become_some():
    dls = DataLoaders.from_dataset_dict(load_digits(), 64)
    with pytest.raises(TypeError) as caught:
        next(iter(dls.train))
    assert any("`image_to_tensor`" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("mode, channels", [("L", 1), ("RGB", 3), ("RGBA", 4)])
def test_an_image_becomes_floats_and_can_be_taken_back(mode, channels):
    "Channels first, 0 to 1, and every byte is recovered"
    pixels = np.random.RandomState(0).randint(0, 256, (5, 4, channels)).astype("uint8").squeeze()
    picture = PILImage.fromarray(pixels)
    assert picture.mode == mode
    for image in (pixels, picture):
        x = image_to_tensor(image)
        assert x.shape == (channels, 5, 4) and x.dtype == torch.float32 and 0 <= x.min() and x.max() <= 1
        np.testing.assert_array_equal(x.mul(255).round().byte().permute(1, 2, 0).squeeze(-1).numpy(), pixels)
    assert image_to_tensor(np.array([[0, 255]], dtype="uint8")).tolist() == [[[0, 1]]]


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (4, 8, 5), (8, 8, 7)])
@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_channels_that_come_first_are_refused(make, shape):
    image = make(shape, dtype=torch.uint8 if make is torch.zeros else "uint8")
    with pytest.raises(ValueError, match=r"channels should come last.*`image.permute\(1, 2, 0\)`"):
        image_to_tensor(image)


def test_bytes_of_a_tensor_with_channels_last_become_floats():
    image = torch.randint(0, 256, (5, 6, 3), dtype=torch.uint8)
    assert torch.equal(image_to_tensor(image).mul(255).round().byte(), image.permute(2, 0, 1))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "LAB"])
def test_pictures_whose_numbers_are_no_colours_are_refused(mode):
    with pytest.raises(ValueError, match=rf"the mode {mode}.*`image.convert\('RGB'\)`"):
        image_to_tensor(PILImage.new(mode, (4, 5)))


@pytest.mark.parametrize("mode, channels", [("P", 3), ("PA", 3), ("LA", 2), ("RGBA", 4)])
def test_a_palette_loses_its_alpha_and_the_others_keep_it_last(mode, channels):
    picture = PILImage.new("RGBA", (4, 5), (200, 200, 200, 100))
    picture = picture.convert("P") if mode == "P" else PILImage.new(mode, (4, 5)) if mode == "PA" else picture
    x = image_to_tensor(picture if mode in ("P", "PA") else picture.convert(mode))
    assert x.shape == (channels, 5, 4)
    if channels % 2 == 0:
        assert x[-1].mul(255).round().unique().tolist() == [100] and x[0, 0, 0].mul(255).round() == 200


# `SimpleNet`


@pytest.mark.shows("ISA-101")
def test_simple_net_is_flatten_linear_relu_linear():
    "Against the formula written by hand"
    torch.manual_seed(0)
    model = SimpleNet(12, 7, 5)
    assert [type(o) for o in model] == [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear]
    w1, b1, w2, b2 = model.parameters()
    assert [tuple(o.shape) for o in (w1, b1, w2, b2)] == [(7, 12), (7,), (5, 7), (5,)]
    x = torch.randn(6, 1, 3, 4)
    torch.testing.assert_close(model(x), (x.reshape(6, 12) @ w1.T + b1).clamp(min=0) @ w2.T + b2)
    assert torch.equal(model(x), model(x.reshape(6, 12)))


@pytest.mark.shows("ISA-101", "ISA-96")
def test_simple_net_learns_the_digits():
    "Most of the 360 that it has not seen"
    set_seed(0)
    dls = DataLoaders.from_dataset_dict(load_digits().with_transform(to_tensors), 64)
    dls.train, dls.valid = list(dls.train), list(dls.valid)  # Decoded once
    model = SimpleNet(64, 50, 10)
    Trainer(dls, F.cross_entropy, torch.optim.Adam, model, BasicTrainCB()).fit(8, lr=1e-2)
    right = [model(x).argmax(1) == y for x, y in dls.valid]
    assert torch.cat(right).float().mean() > 0.9


# The digits


@pytest.fixture(scope="module")
def digits():
    return load_digits()


def as_arrays(dataset):
    "All pixels, (rows, 8, 8), and all labels of a split"
    return np.stack([np.array(o) for o in dataset["image"]]), np.array(dataset["label"])


def test_the_digits_have_two_splits_of_images_and_labels(digits):
    "1,437 and 360 rows, with the features that Hugging Face's own image sets have"
    assert type(digits) is DatasetDict and digits.num_rows == {"train": 1437, "test": 360}
    for ds in digits.values():
        assert list(ds.features) == ["image", "label"]
        assert isinstance(ds.features["image"], Image) and isinstance(ds.features["label"], ClassLabel)
        assert ds.features["label"].names == list("0123456789")
        assert (ds[0]["image"].size, ds[0]["image"].mode) == ((8, 8), "L") and type(ds[0]["label"]) is int


def test_the_digits_are_those_of_scikit_learn(digits):
    "Every pixel is rint(p*255/16), every label is the same, and no row is there twice or missing"
    theirs = sklearn_datasets.load_digits()
    stretched = np.rint(theirs.images * 255 / 16).astype("uint8")
    expected = Counter((image.tobytes(), int(label)) for image, label in zip(stretched, theirs.target))
    pixels, labels = (np.concatenate(o) for o in zip(*map(as_arrays, digits.values())))
    assert pixels.shape == (1797, 8, 8) and pixels.dtype == np.uint8
    assert Counter((image.tobytes(), int(label)) for image, label in zip(pixels, labels)) == expected
    grey = np.rint(pixels.astype(float) * 16 / 255)  # And the grey values can be taken back exactly
    assert Counter(o.tobytes() for o in grey) == Counter(o.tobytes() for o in theirs.images)


def test_both_splits_of_the_digits_have_every_class(digits):
    "The split is random and not by class"
    for ds in digits.values():
        shares = np.bincount(ds["label"], minlength=10) / len(ds)
        assert len(shares) == 10 and shares.min() > 0.06 and shares.max() < 0.15


def test_the_digits_need_no_network_and_no_particular_folder(monkeypatch, tmp_path):
    "They are inside the package"

    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    assert load_digits().num_rows == {"train": 1437, "test": 360}


def test_the_tool_makes_the_same_digits(digits, monkeypatch, tmp_path):
    "`tools/make_digits.py`, run into another folder: same images and labels in the same order, same features"
    tool = ROOT / "tools/make_digits.py"
    monkeypatch.setattr(sys, "argv", [str(tool), str(tmp_path)])
    runpy.run_path(str(tool), run_name="__main__")
    assert sorted(o.name for o in tmp_path.iterdir()) == ["digits-test.parquet", "digits-train.parquet"]
    made = {name: Dataset(pq.read_table(tmp_path / f"digits-{name}.parquet")) for name in digits}
    for name, ds in digits.items():
        assert made[name].features == ds.features
        for ours, theirs in zip(as_arrays(ds), as_arrays(made[name])):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.shows("PTA-56")
def test_loaders_have_sensible_options_by_themselves(monkeypatch):
    "Training rows shuffled, no workers unless asked for, memory pinned where there is CUDA"
    rows = list(range(8))
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        for seed in (None, 1):
            train, valid = get_dataloaders(rows, rows, 2, seed=seed)
            assert (train.pin_memory, valid.pin_memory, train.num_workers, valid.batch_size) == (
                there,
                there,
                0,
                4,
            )
            assert get_dataloaders(rows, None, 2, seed=seed, pin_memory=not there)[0].pin_memory is not there
    assert isinstance(get_dataloaders(rows, None, 2)[0].sampler, torch.utils.data.RandomSampler)


def test_the_first_cell_of_a_notebook_that_loads_the_digits_has_no_warning():
    "The libraries below ask for a package of widgets, which nothing here needs"
    code = """
import sys
import ipykernel.zmqshell  # As in the kernel of a notebook
sys.modules["ipywidgets"] = None
from isaac_loop.data import load_digits
load_digits()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
