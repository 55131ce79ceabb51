"""A check of what is odd: it says what it could not look at, raises nothing of its own, and accuses nobody"""

import copy
from unittest import mock

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset
from torch.utils.data import TensorDataset, WeightedRandomSampler

from isaac_loop import Trainer
from isaac_loop.callbacks import BasicTrainCB
from isaac_loop.data import DataLoaders
from isaac_loop.inspection.seen_run.seen_origins import AttentionAxes
from working import found_in


def rows(n=64):
    torch.manual_seed(n)
    return TensorDataset(torch.randn(n, 4), torch.randint(3, (n,)))


def fitting(*cbs, model=None, dls=None, loss_func=F.cross_entropy, opt_func=optim.SGD):
    torch.manual_seed(0)
    dls = dls or DataLoaders(DataLoader(rows(), 8, shuffle=True), DataLoader(rows(40), 8))
    return Trainer(dls, loss_func, opt_func, model or nn.Linear(4, 3), [BasicTrainCB(), *cbs])


class DotDict(dict):
    __getattr__ = dict.get


class Holds:
    def __init__(self, x):
        self.x = x

    def after_batch(self, trainer):
        pass


class Refuses:
    def __getattr__(self, name):
        raise RuntimeError(name)


def circular():
    held = []
    held.append(held)
    return held


@pytest.mark.parametrize("held", [DotDict(a=1), mock.Mock(), [torch.zeros(2)], list(range(300_000))])
def test_a_callback_may_hold_anything(held):
    assert found_in(fitting(Holds(held)), batches=2) == []


@pytest.mark.parametrize("make", [Refuses, circular])
def test_what_cannot_be_looked_at_is_said_and_no_error(make):
    "The fit itself does not mind"
    trainer = fitting(Holds(make()))
    assert set(found_in(trainer, batches=2)) <= {"not_looked"}
    trainer.fit(1)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x.abs())


class Trims(nn.Module):
    "As many places as the longest row has"

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)

    def forward(self, x):
        return self.embed(x[:, : int((x != 0).sum(1).max())])[:, 0]


def loaded(x, y):
    return DataLoaders(DataLoader(TensorDataset(x, y), 16, shuffle=True))


def test_inputs_and_outputs_of_any_kind():
    y = torch.arange(64) % 3
    waves = torch.randn(64, 4, dtype=torch.complex64)
    assert found_in(fitting(model=Complex(), dls=loaded(waves, y)), batches=3) == []
    words = torch.randint(1, 5, (64, 9)) * (torch.arange(9) < torch.randint(1, 10, (64, 1)))
    assert "not_looked" not in found_in(fitting(model=Trims(), dls=loaded(words, y)), batches=3)


class LoadsOn(nn.Linear):
    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict(state, strict, assign)


class Reloads:
    def before_fit(self, trainer):
        trainer.model.load_state_dict(copy.deepcopy(trainer.model.state_dict()))


def test_weights_may_be_loaded_by_place():
    assert found_in(fitting(Reloads(), model=LoadsOn(4, 3)), batches=2) == []


class ByName(Dataset):
    def __getitem__(self, name):
        return torch.full((4,), float(name[1:])), int(name[1:]) % 3

    def __len__(self):
        return 64


def test_rows_may_have_names():
    names = [f"k{i}" for i in range(64)]
    dls = DataLoaders(
        DataLoader(Subset(ByName(), names[:48]), 8), DataLoader(Subset(ByName(), names[48:]), 8)
    )
    assert "not_looked" not in found_in(fitting(dls=dls), batches=3)


class Generated(BasicTrainCB):
    def backward(self, trainer):
        torch.autograd.backward(loss for loss in [trainer.loss])


def test_losses_may_be_a_generator():
    trainer = fitting()
    trainer.callbacks = Generated()
    assert found_in(trainer, batches=2) == []


def by_class():
    "Rows of each class in turn, drawn by a sampler of classes"
    data = rows(64)

    class Drawn(torch.utils.data.Sampler):
        def __init__(self):
            self.sampler = WeightedRandomSampler(torch.ones(3), 8)

        def __iter__(self):
            where = [(data.tensors[1] == i).nonzero()[:, 0].tolist() for i in range(3)]
            for _ in range(4):
                yield [where[i][n % len(where[i])] for n, i in enumerate(self.sampler)]

        def __len__(self):
            return 4

    return DataLoaders(DataLoader(data, batch_sampler=Drawn()))


def in_order(n=64):
    x, y = rows(n).tensors
    return TensorDataset(x[y.argsort()], y.sort().values)


def drawn_in_batches():
    return DataLoaders(DataLoader(in_order(), batch_sampler=BatchSampler(RandomSampler(range(64)), 8, False)))


def all_at_once():
    return DataLoaders([in_order().tensors])


class Draws(IterableDataset):
    def __iter__(self):
        for i in range(32):
            yield torch.randn(4), i % 3


def drawn_by_each_worker():
    return DataLoaders(DataLoader(Draws(), 8, num_workers=2))


def scaled_one_by_one():
    x = torch.randn(64, 30)
    x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
    data = TensorDataset(x, torch.arange(64) % 3)
    return DataLoaders(
        DataLoader(data, 8, shuffle=True), DataLoader(TensorDataset(x[:40], data.tensors[1][:40]), 8)
    )


class Named(Dataset):
    "Each part looks its rows up by a name of its own"

    def __init__(self, names):
        self.row_of = {name: i for i, name in enumerate(names)}
        self.x = torch.randn(len(names), 4)

    def __len__(self):
        return len(self.row_of)

    def __getitem__(self, i):
        return self.x[i], i % 3


def looked_up_by_name():
    return DataLoaders(DataLoader(Named("abcdefgh"), 4), DataLoader(Named("hgfi"), 4))


@pytest.mark.parametrize(
    "make", [by_class, drawn_in_batches, all_at_once, drawn_by_each_worker, looked_up_by_name]
)
def test_loaders_that_are_odd_and_right(make):
    assert found_in(fitting(dls=make()), batches=3) == []


def test_rows_that_are_scaled_one_by_one():
    assert "own_scale" not in found_in(fitting(dls=scaled_one_by_one(), model=nn.Linear(30, 3)), batches=3)


class Nodes(nn.Module):
    "Looks at all nodes, in a batch of all of them"

    def __init__(self):
        super().__init__()
        self.register_buffer("beside", torch.rand(64, 64))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.beside @ x)


class OwnNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.head = torch.Generator(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x + torch.randn(x.shape, generator=self.generator))


def test_models_that_are_odd_and_right():
    assert found_in(fitting(model=Nodes(), dls=DataLoaders([rows().tensors])), batches=3) == []
    assert "carries_over" not in found_in(fitting(model=OwnNoise()), batches=3)


class Slow:
    def __init__(self, factor):
        self.factor = factor

    def before_fit(self, trainer):
        self.schedule = LambdaLR(trainer.opt, self.factor)

    def after_step(self, trainer):
        self.schedule.step()


def stops(i):
    if i > 200:
        raise SystemExit
    return 1.0


@pytest.mark.parametrize("factor", [lambda i: min(1.0, (i + 1) / 10_000), stops])
def test_schedules_that_are_odd_and_right(factor):
    assert found_in(fitting(Slow(factor)), batches=3) == []


class Scaled(nn.Module):
    "A number comes first in `einsum`"

    def __init__(self):
        super().__init__()
        self.factor, self.head = nn.Parameter(torch.ones(())), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.einsum(",bi->bi", self.factor, x))


def test_any_equation_may_be_given_to_einsum():
    assert found_in(fitting(model=Scaled()), batches=2) == []


def test_a_look_that_fails_in_a_call_is_told(monkeypatch):
    monkeypatch.setattr(AttentionAxes, "look", lambda self, call: call.nothing)
    assert set(found_in(fitting(), batches=2)) == {"not_looked"}


def test_what_a_check_refuses():
    "What happened, and what there is instead"
    trainer = fitting()
    with pytest.raises(LookupError, match="no check called 'same_row'.*same_rows"):
        trainer.check(ignore="same_row")
    for batches in (-1, 1.5, "3"):
        with pytest.raises((TypeError, ValueError), match="batches"):
            trainer.check(batches=batches)
