"""What data and callbacks do that no number tells: windows, scales, streams, rates, weights that fit nowhere.

Each planted one is found by name when some batches are run; in the right ones nothing is found.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info
from torch.utils.data import random_split

from isaac_loop import CancelBatchException, Trainer, with_cbs
from isaac_loop.callbacks import BasicTrainCB, BatchSchedulerCB, EpochSchedulerCB, MixUpCB
from isaac_loop.data import DataLoaders
from marked import Marked, Planted
from working import found_in

planted, right = Planted(), Marked()


def net(n_in=4, n_out=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(n_in, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, n_out))


def rows(n=48):
    return TensorDataset(torch.randn(n, 4), torch.arange(n) % 3)


def loaders(train=None, valid=None, **options):
    torch.manual_seed(1)
    return DataLoaders(DataLoader(train or rows(), 8, **options), DataLoader(valid or rows(), 8))


def fitting(*cbs, model=None, dls=None, loss_func=F.cross_entropy, opt_func=optim.Adam):
    return Trainer(dls or loaders(), loss_func, opt_func, model or net(), [BasicTrainCB(), *cbs])


class Windows(Dataset):
    "Numbers of a series and the one after them; a copy of them if it is told to"

    def __init__(self, series, n=16, copied=False):
        self.series, self.n, self.copied = series, n, copied

    def __len__(self):
        return len(self.series) - self.n

    def __getitem__(self, i):
        window = self.series[i : i + self.n]
        return window.clone() if self.copied else window, self.series[i + self.n]


def forecasting(train, valid):
    model = nn.Sequential(nn.Linear(16, 1), nn.Flatten(0))
    return fitting(model=model, dls=loaders(train, valid), loss_func=F.mse_loss)


def series(n=316):
    torch.manual_seed(2)
    return torch.randn(n) + torch.sin(torch.arange(n) / 5)


@planted("overlapping_rows")
def windows_split_by_chance():
    windows = Windows(series())
    return forecasting(*random_split(windows, [240, 60], torch.Generator().manual_seed(0)))


@planted("overlapping_rows")
def copied_windows_split_by_chance():
    windows = Windows(series(), copied=True)
    return forecasting(*random_split(windows, [240, 60], torch.Generator().manual_seed(0)))


@right
def windows_split_in_time():
    windows = Windows(series())
    return forecasting(Subset(windows, range(220)), Subset(windows, range(240, 300)))


@right
def windows_of_a_series_that_drifts():
    "Validation has other numbers, and nobody has scaled anything"
    drifting = series(600) + torch.arange(600) / 20
    return forecasting(Windows(drifting[:400]), Windows(drifting[400:]))


@right
def windows_of_two_parts():
    return forecasting(Windows(series()[:250]), Windows(series()[250:]))


def tables():
    torch.manual_seed(3)
    x = 5 + 3 * torch.randn(120, 4)
    return x[:80], x[80:]


def as_rows(x):
    return TensorDataset(x, torch.arange(len(x)) % 3)


@planted("own_scale")
def validation_scaled_by_itself():
    train, valid = ((x - x.mean(0)) / x.std(0) for x in tables())
    return fitting(dls=loaders(as_rows(train), as_rows(valid)))


@planted("own_scale")
def validation_scaled_by_all_of_its_numbers():
    train, valid = ((x - x.mean()) / x.std(correction=0) for x in tables())
    return fitting(dls=loaders(as_rows(train), as_rows(valid)))


@right
def validation_scaled_as_training():
    train, valid = tables()
    mean, std = train.mean(0), train.std(0)
    return fitting(dls=loaders(as_rows((train - mean) / std), as_rows((valid - mean) / std)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows())


class Shared(Stream):
    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (row for i, row in enumerate(rows()) if i % step == first)


@planted("read_by_each")
def a_stream_for_each_worker():
    return fitting(dls=DataLoaders(DataLoader(Stream(), 8, num_workers=2), DataLoader(rows(), 8)))


@right
def a_stream_that_workers_share():
    return fitting(dls=DataLoaders(DataLoader(Shared(), 8, num_workers=2), DataLoader(rows(), 8)))


@right
def a_stream_for_one_worker():
    return fitting(dls=DataLoaders(DataLoader(Stream(), 8, num_workers=1), DataLoader(rows(), 8)))


def noam(i):
    return 48**-0.5 * min((i + 1) ** -0.5, (i + 1) * 20**-1.5)


def warm_up(i):
    return min(1.0, (i + 1) / 100)


def adam_of_one(params, lr):
    return optim.Adam(params, lr=0.9)


class OwnSchedule:
    def __init__(self, factor):
        self.factor = factor

    def before_fit(self, trainer):
        self.schedule = LambdaLR(trainer.opt, lambda i: self.factor(i, trainer.total_updates))

    def after_step(self, trainer):
        self.schedule.step()


@planted("low_rate")
def a_schedule_that_is_for_a_rate_of_one():
    return fitting(BatchSchedulerCB(partial(LambdaLR, lr_lambda=noam)))


@right
def that_schedule_with_a_rate_of_one():
    return fitting(BatchSchedulerCB(partial(LambdaLR, lr_lambda=noam)), opt_func=adam_of_one)


@planted("low_rate")
def a_warm_up_by_epochs():
    return fitting(EpochSchedulerCB(partial(LambdaLR, lr_lambda=warm_up)))


@right
def a_warm_up_by_updates():
    return fitting(BatchSchedulerCB(partial(LambdaLR, lr_lambda=warm_up)))


@planted("low_rate")
def a_rate_for_a_factor():
    return fitting(OwnSchedule(lambda i, n: 0.01 * (1 - i / n)))


@right
def a_factor_that_falls():
    return fitting(OwnSchedule(lambda i, n: max(0.0, 1 - i / n)))


class WarmStart:
    def __init__(self, prefix):
        self.prefix = prefix

    def before_fit(self, trainer):
        saved = {self.prefix + name: x for name, x in net().state_dict().items()}
        trainer.model.load_state_dict(saved, strict=False)


@planted("nothing_loaded")
def weights_of_a_parallel_model():
    return fitting(WarmStart("module."))


@right
def weights_that_fit():
    return fitting(WarmStart(""))


class Noise:
    def before_batch(self, trainer):
        x, y = trainer.batch
        trainer.batch = x + self.drawn(x), y

    def drawn(self, x):
        return torch.randn_like(x)


class NoiseInTraining(Noise):
    on_valid = False


@planted("random_validation")
def noise_in_validation_too():
    return fitting(Noise())


@right
def noise_in_training_alone():
    return fitting(NoiseInTraining())


@right
def our_own_mixing():
    return fitting(MixUpCB())


class Distil:
    def __init__(self, teacher):
        self.teacher = teacher.requires_grad_(False)

    def after_get_loss(self, trainer):
        with torch.no_grad():
            says = self.teacher(trainer.batch[0])
        trainer.loss = trainer.loss + F.mse_loss(trainer.preds, says)


@planted("teacher_in_training")
def a_teacher_that_goes_on_measuring():
    return fitting(Distil(net()))


@right
def a_teacher_at_rest():
    return fitting(Distil(net().eval()))


def words(n=48):
    return torch.randint(9, (n, 7))


class NextWord(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(9, 4), nn.GRU(4, 9, batch_first=True)

    def forward(self, x):
        return self.rnn(self.embed(x))[0]


def of_next(preds, y):
    return F.cross_entropy(preds.flatten(0, 1), y.flatten())


def of_next_but_one(preds, y):
    return F.cross_entropy(preds[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def reading(loss_func, shifted):
    torch.manual_seed(4)
    data = [words() for _ in range(2)]
    data = [TensorDataset(x[:, :-1], x[:, 1:]) if shifted else TensorDataset(x, x.clone()) for x in data]
    return fitting(model=NextWord(), loss_func=loss_func, dls=loaders(*data))


@planted("shifted_twice")
def words_shifted_twice():
    return reading(of_next_but_one, shifted=True)


@right
def words_shifted_in_the_data():
    return reading(of_next, shifted=True)


@right
def words_shifted_in_the_loss():
    return reading(of_next_but_one, shifted=False)


def coded(last, low):
    "A model that gives back what it gets, which lies between `low` and 1"
    torch.manual_seed(5)
    x = low + (1 - low) * torch.rand(48, 8)
    model = nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 8), last, nn.Unflatten(1, (2, 4)))
    data = TensorDataset(x, x.view(48, 2, 4))
    return fitting(model=model, dls=loaders(data, data), loss_func=F.mse_loss)


@planted("out_of_reach")
def a_sigmoid_for_numbers_below_zero():
    return coded(nn.Sigmoid(), -1.0)


@right
def a_sigmoid_for_shares():
    return coded(nn.Sigmoid(), 0.0)


@right
def a_tanh_for_numbers_below_zero():
    return coded(nn.Tanh(), -1.0)


class MixesApart(Trainer):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        mixed = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
        other = y[torch.randperm(len(y))]
        preds = self.model(mixed)
        self.loss = 0.7 * self.loss_func(preds, y) + 0.3 * self.loss_func(preds, other)
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")


class MixesTogether(Trainer):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        order = torch.randperm(len(x))
        mixed, other = 0.7 * x + 0.3 * x[order], y[order]
        preds = self.model(mixed)
        self.loss = 0.7 * self.loss_func(preds, y) + 0.3 * self.loss_func(preds, other)
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")


def mixing(cls):
    dls = DataLoaders(loaders().train)
    return cls(dls, F.cross_entropy, optim.SGD, nn.Linear(4, 3), BasicTrainCB())


@planted("two_permutations")
def mixed_apart_in_an_own_batch():
    return mixing(MixesApart)


@right
def mixed_together_in_an_own_batch():
    return mixing(MixesTogether)


@pytest.mark.parametrize("make, names", planted, ids=lambda o: getattr(o, "__name__", " "))
def test_it_is_found_by_name(make, names):
    assert set(names) <= {*found_in(make(), batches=3)}


@pytest.mark.parametrize("make", right, ids=lambda o: o.__name__)
def test_nothing_is_found_where_all_is_right(make):
    assert found_in(make(), batches=3) == []


def test_a_check_leaves_nothing_behind():
    "No hook, no other `load_state_dict`, and a callback as it was"
    load, cb = nn.Module.load_state_dict, Distil(net())
    before = copy.deepcopy(cb.teacher.state_dict())
    found_in(fitting(cb), batches=3)
    assert nn.Module.load_state_dict is load
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert all(torch.equal(x, before[k]) for k, x in cb.teacher.state_dict().items())
