"""Mistakes in the rows that loaders give, each beside what is like it and right.

Each planted one is found by name when some batches are run; in the right ones nothing is found.
"""

import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset, TensorDataset
from torch.utils.data import WeightedRandomSampler, random_split

from isaac_loop import Trainer
from isaac_loop.callbacks import BasicTrainCB
from isaac_loop.data import DataLoaders
from isaac_loop.inspection import CheckFailed

WRONG, RIGHT = [], []


def planted(name):
    "A function that gives loaders, and perhaps a callback, in which something is wrong"

    def mark(make):
        WRONG.append((make, name))
        return make

    return mark


def right(make):
    "One that is like it and right"
    RIGHT.append(make)
    return make


def rows(n=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator), torch.randint(4, (n,), generator=generator)


def valid(**options):
    return DataLoader(TensorDataset(*rows(48, 1)), 16, **options)


def found_in(*loaders_and_callbacks):
    train, other, *cbs = loaders_and_callbacks
    torch.manual_seed(0)
    dls = DataLoaders(train, other)
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(6, 4), [BasicTrainCB(), *cbs])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [o.name for o in trainer.check(batches=3)]
        except CheckFailed as error:
            return [o.name for o in error.findings]


def by_class(n=96):
    x, y = rows(n)
    order = y.argsort()
    return TensorDataset(x[order], y[order])


class Rows(Dataset):
    "Rows of tensors, by a class of one's own"

    def __init__(self, x, y, transform=None):
        self.x, self.y, self.transform = x, y, transform

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.transform(self.x[i]) if self.transform else self.x[i], self.y[i]


# Rows sorted by class


@planted("sorted_rows")
def tensors_sorted_by_class():
    return DataLoader(by_class(), 16), valid()


@planted("sorted_rows")
def a_dataset_sorted_by_class():
    return DataLoader(Rows(*by_class(160).tensors), 16), valid()


@planted("sorted_rows")
def pairs_sorted_by_class():
    return DataLoader(list(zip(*by_class().tensors)), 16), valid()


@planted("sorted_rows")
def batches_sorted_by_class():
    return list(DataLoader(by_class(), 16)), valid()


@planted("sorted_rows")
def a_sampler_that_sorts():
    class Sorted(Sampler):
        def __init__(self, y):
            self.order = y.argsort().tolist()

        def __iter__(self):
            return iter(self.order)

        def __len__(self):
            return len(self.order)

    x, y = rows(96)
    y = y // 2
    return DataLoader(TensorDataset(x, y), 25, sampler=Sorted(y)), valid()


@right
def rows_that_are_shuffled():
    return DataLoader(by_class(), 16, shuffle=True), valid()


@right
def rows_in_no_order():
    return DataLoader(TensorDataset(*rows()), 16), valid()


@right
def one_class_above_all():
    x, _ = rows(96)
    y = torch.zeros(96, dtype=torch.long)
    y[70] = 1
    return DataLoader(TensorDataset(x, y), 16), valid()


# Other labels in validation


class Animals(Dataset):
    def __init__(self, names, known=None):
        self.names = names
        self.keep(known or {name: i for i, name in enumerate(sorted({*names}))})

    def keep(self, known):
        self.class_to_idx = known

    def number(self, name):
        return self.class_to_idx[name]

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        return torch.full((6,), float(i % 5)) + torch.arange(6), self.number(self.names[i])


ALL, SOME = ["cat", "cow", "dog", "owl"] * 12, ["dog", "cow", "owl"] * 12


@planted("other_labels")
def labels_made_of_each_dataset():
    return DataLoader(Animals(ALL), 16, shuffle=True), DataLoader(Animals(SOME), 16)


@planted("other_labels")
def labels_below_subsets():
    train = ConcatDataset([Animals(ALL), Animals(ALL[::-1])])
    return DataLoader(train, 16, shuffle=True), DataLoader(Subset(Animals(SOME), range(30)), 16)


@planted("other_labels")
def a_list_of_classes():
    class Listed(Animals):
        def keep(self, known):
            self.classes = list(known)

        def number(self, name):
            return self.classes.index(name)

    return DataLoader(Listed(ALL), 16, shuffle=True), DataLoader(Listed(SOME), 16)


@planted("other_labels")
def a_vocabulary():
    class Vocab:
        def __init__(self, known):
            self.stoi = known

    class Words(Animals):
        def keep(self, known):
            self.vocab = Vocab(known)

        def number(self, name):
            return self.vocab.stoi[name]

    return DataLoader(Words(ALL), 16, shuffle=True), DataLoader(Words(SOME), 16)


@right
def one_map_for_both():
    train = Animals(ALL)
    return DataLoader(train, 16, shuffle=True), DataLoader(Animals(SOME, train.class_to_idx), 16)


@right
def counts_and_places_that_differ():
    class Counted(Animals):
        def keep(self, known):
            super().keep({name: i for i, name in enumerate(["cat", "cow", "dog", "owl"])})
            self.class_counts = {name: 7 * len(self.names) + i for i, name in enumerate(known)}
            self.row_of = {i: 3 * i + len(self.names) for i in range(len(self.names))}
            self.files = [f"{len(self.names)}_{i}" for i in range(len(self.names))]

    return DataLoader(Counted(ALL), 16, shuffle=True), DataLoader(Counted(SOME), 16)


# Weights for too few rows


@planted("few_weights")
def a_weight_for_each_class():
    x, y = rows()
    weights = 1 / torch.bincount(y)
    return DataLoader(TensorDataset(x, y), 16, sampler=WeightedRandomSampler(weights, len(y))), valid()


@right
def a_weight_for_each_row():
    x, y = rows()
    weights = 1 / torch.bincount(y)
    return DataLoader(TensorDataset(x, y), 16, sampler=WeightedRandomSampler(weights[y], 32)), valid()


# Another scale in validation


@planted("other_scale")
def only_training_is_normalised():
    def normalize(x):
        return (x - 0.3) / 0.05

    return DataLoader(Rows(*rows(), normalize), 16, shuffle=True), valid()


@planted("other_scale")
def bytes_against_parts_of_one():
    x, y = rows(48, 1)
    other = TensorDataset((x.sigmoid() * 255).floor(), y)
    x, y = rows()
    return DataLoader(TensorDataset(x.sigmoid(), y), 16, shuffle=True), DataLoader(other, 16)


class NormalizeCB:
    def before_batch(self, trainer):
        x, y = trainer.batch
        trainer.batch = ((x - 0.5) / 0.6, y)


class NormalizeTrainingCB(NormalizeCB):
    on_valid = False


@planted("other_scale")
def a_callback_that_leaves_out_validation():
    return DataLoader(TensorDataset(*rows()), 16, shuffle=True), valid(), NormalizeTrainingCB()


@planted("other_scale")
def a_callback_that_asks_whether_it_trains():
    class AskingCB(NormalizeCB):
        def before_batch(self, trainer):
            if trainer.training:
                super().before_batch(trainer)

    return DataLoader(TensorDataset(*rows()), 16, shuffle=True), valid(), AskingCB()


@right
def a_callback_for_both():
    return DataLoader(TensorDataset(*rows()), 16, shuffle=True), valid(), NormalizeCB()


@right
def augmentation():
    class AugmentCB:
        on_valid = False

        def before_batch(self, trainer):
            x, y = trainer.batch
            trainer.batch = (x * (0.7 + 0.6 * torch.rand(1)) + 0.3 * torch.randn_like(x), y)

    return DataLoader(TensorDataset(*rows()), 16, shuffle=True), valid(), AugmentCB()


@right
def columns_of_their_own_scale():
    scale = torch.tensor([1.0, 10.0, 100.0, 1.0, 1.0, 50.0])
    (x, y), (x2, y2) = rows(), rows(48, 1)
    train = DataLoader(TensorDataset(x * scale, y), 16, shuffle=True)
    return train, DataLoader(TensorDataset(x2 * scale, y2), 16)


# The same rows


@planted("shared_rows")
def both_loaders_for_one_dataset():
    data = TensorDataset(*rows(600))
    return DataLoader(data, 16, shuffle=True), DataLoader(data, 32)


@planted("shared_rows")
def a_copy_of_the_dataset():
    train = DataLoader(TensorDataset(*rows(600)), 16, shuffle=True)
    return train, DataLoader(TensorDataset(*rows(600)), 16)


@right
def a_split():
    train, other = random_split(TensorDataset(*rows(1200)), [600, 600])
    return DataLoader(train, 16, shuffle=True), DataLoader(other, 16)


@right
def one_loader_for_both():
    train = DataLoader(TensorDataset(*rows()), 16, shuffle=True)
    return train, train


@right
def a_few_rows_to_try_a_loop():
    data = TensorDataset(*rows(64))
    return DataLoader(data, 16, shuffle=True), DataLoader(data, 16)


@pytest.mark.parametrize(("make", "name"), WRONG, ids=lambda o: getattr(o, "__name__", ""))
def test_a_planted_mistake_is_found(make, name):
    assert name in found_in(*make())


@pytest.mark.parametrize("make", RIGHT, ids=lambda o: o.__name__)
def test_what_is_like_it_and_right_is_left_alone(make):
    assert found_in(*make()) == []


def test_reading_rows_draws_no_random_numbers():
    state = torch.get_rng_state()
    dls = DataLoaders(DataLoader(Rows(*by_class(160).tensors, torch.rand_like), 16), valid())
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(6, 4), BasicTrainCB())
    torch.set_rng_state(state)
    with pytest.warns(match="sorted_rows"):
        trainer.check(batches=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_taking_batches_of_a_list_apart_draws_no_random_numbers():
    def noisy(batch):
        return (batch[0] + 0.1 * torch.randn_like(batch[0]),), (batch[1],)

    batches = [tuple(o.split(16)) for o in rows(48)]
    dls = DataLoaders(list(zip(*batches)), split=noisy)
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(6, 4), BasicTrainCB())
    state = torch.get_rng_state()
    trainer.check(batches=2)
    assert torch.equal(torch.get_rng_state(), state)
