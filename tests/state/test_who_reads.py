"""Who makes batches of rows and splits them may count, or get harder with time: a run that was stopped and
goes on, against the same run that was never stopped, with loaders that know their place.
"""

import warnings
from functools import partial

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from cutting import ROWS, cut_once, small_trainer, stopped_and_not
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.train.training import BasicTrainCB
from runs import Rows, fit, make_loaders, make_trainer


class Level:
    "Scales what it is given, more each time"

    n, level = 0, 0.0

    def moved(self, x):
        return x * (1 + self.level)

    def __call__(self, x):
        return self.moved(x)

    def counted(self, x):
        self.n += torch.is_grad_enabled()
        return self.moved(x) * (1 + self.n / 10)


class Collate(Level):
    def __call__(self, rows):
        x, y = default_collate(rows)
        return self.counted(x), y

    def added(self, rows, more):
        x, y = self(rows)
        return x + more, y


class Through(Dataset):
    "Changes the rows of another dataset"

    def __init__(self, inner, tfm=lambda x: x):
        self.inner, self.tfm = inner, tfm

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        x, y = self.inner[i]
        return self.tfm(x), y


class Compose:
    def __init__(self, *tfms):
        self.tfms = tfms

    def __call__(self, x):
        for tfm in self.tfms:
            x = tfm(x)
        return x


def harder(level, n=56):
    return Through(Rows(n, augment=False), level)


def chained(level):
    return ConcatDataset([harder(level, 28), Subset(harder(Level(), 56), range(28))])


PLACES = {
    "two deep": lambda level: dict(dataset=Through(Through(harder(level)))),
    "in a transform": lambda level: dict(dataset=harder(Compose(Compose(level)))),
    "by a method": lambda level: dict(dataset=harder(level.moved)),
    "in a chain": lambda level: dict(dataset=chained(level)),
    "in a chain, deeper": lambda level: dict(dataset=Through(Subset(chained(level), range(56)))),
}


def run_with(dls, level):
    def log(trainer):
        level.level += 0.3

    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), log], dls)
    trainer.level_of = lambda: level
    return trainer


def loaders(dl, cls=DataLoaders, **kwargs):
    return cls(dl, make_loaders().valid, **kwargs)


def goes_on(tmp_path, make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = stopped_and_not(tmp_path, make, [4, 10, 15], attributes=lambda t: vars(t.level_of()))
    assert trainer.level_of().level == pytest.approx(0.9)


@pytest.mark.parametrize("place", PLACES)
def test_what_a_dataset_holds_goes_on_however_deep_it_lies(place, tmp_path):
    def make():
        level = Level()
        return run_with(loaders(exact_loader(**PLACES[place](level), batch_size=8, seed=7)), level)

    goes_on(tmp_path, make)


@pytest.mark.parametrize("as_given", [lambda o: o, lambda o: partial(o.added, more=1.0)])
def test_who_makes_batches_of_rows_goes_on(as_given, tmp_path):
    def make():
        collate = Collate()
        dl = exact_loader(Rows(56, augment=False), 8, seed=7, collate_fn=as_given(collate))
        return run_with(loaders(dl), collate)

    goes_on(tmp_path, make)


def as_collate():
    def collate(rows):
        collate.n += 1
        x, y = default_collate(rows)
        return x * (1 + collate.n / 10), y

    collate.n = 0
    return dict(dataset=ROWS, collate_fn=collate)


def as_transform():
    def counted(x):
        counted.seen.append(1)
        return x * (1 + len(counted.seen) / 100)

    def tfm(x):
        return counted(x)

    counted.seen = []
    data = Through(ROWS, tfm)
    data.fingerprint = "rows"
    return dict(dataset=data)


@pytest.mark.parametrize("parts", [as_collate, as_transform])
def test_functions_that_read_go_on_with_their_attributes(parts, tmp_path):
    cut_once(tmp_path, lambda: small_trainer(dl=exact_loader(**parts(), batch_size=8, seed=7)))


def test_what_a_function_that_reads_writes_outside_of_it_is_named(tmp_path):
    n = 0

    def collate(rows):
        nonlocal n
        n += 1
        return default_collate(rows)

    trainer = run_with(loaders(exact_loader(Rows(56, augment=False), 8, seed=7, collate_fn=collate)), Level())
    with pytest.warns(UserWarning, match=r"`dls.train.collate_fn.n` changed during this fit, by `nonlocal`"):
        fit(trainer, 1, callbacks=CheckpointCB(tmp_path))


class Split(Level):
    "Keeps the mean of what it has split, also in a tensor"

    mean = torch.zeros(8)

    def __call__(self, batch):
        x, y = batch
        if torch.is_grad_enabled():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return (self.counted(x) - self.mean,), (y,)


class OwnLoaders(DataLoaders):
    "Splits batches itself"

    n, level = 0, 0.0

    def split(self, batch):
        self.n += torch.is_grad_enabled()
        return (batch[0] * (1 + self.level + self.n / 10),), (batch[1],)


@pytest.mark.parametrize("of_method", [False, True])
def test_who_splits_batches_goes_on(of_method, tmp_path):
    def make():
        split = Split()
        given = split.__call__ if of_method else split
        return run_with(loaders(exact_loader(Rows(56), 8, seed=7), split=given), split)

    goes_on(tmp_path, make)


def test_loaders_that_split_batches_themselves_go_on(tmp_path):
    def make():
        dls = loaders(exact_loader(Rows(56), 8, seed=7), OwnLoaders)
        return run_with(dls, dls)

    def kept(trainer):
        return trainer.level_of().n, trainer.level_of().level

    stopped_and_not(tmp_path, make, [4, 10, 15], attributes=kept)


def test_who_splits_goes_on_in_a_pass_that_is_read_again(tmp_path):
    "Batches that are read again are not split again"

    def make():
        split = Split()
        data = Rows(56, augment=False)
        return run_with(loaders(DataLoader(data, 8), split=split), split)

    with pytest.warns(UserWarning, match="does not know its position"):
        stopped_and_not(tmp_path, make, [4, 10], attributes=lambda t: vars(t.dls.split))


def test_random_numbers_of_a_split_go_on(tmp_path):
    def make():
        rng = torch.Generator().manual_seed(3)

        def split(batch):
            x, y = batch
            return (x + torch.randn(x.shape, generator=rng),), (y,)

        return make_trainer([BasicTrainCB()], loaders(exact_loader(Rows(56), 8), split=split))

    stopped_and_not(tmp_path, make, [4, 10])
