"""Modes undone, conditions that always hold, data behind a split, padding, hooks: wrong and right.

Each planted one is found by name when some batches are run; in the right ones nothing is found.
"""

import random
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from isaac_loop import Trainer
from isaac_loop.callbacks import BasicTrainCB, BatchNormEvalCB, BatchSchedulerCB, EpochSchedulerCB
from isaac_loop.data import DataLoaders
from isaac_loop.all import CancelBatchException, with_cbs
from marked import Marked, Planted
from working import found_in

planted, right = Planted(), Marked()


def rows(n=97):
    torch.manual_seed(n)
    return TensorDataset(torch.randn(n, 4), torch.randint(3, (n,)))


def loaders(train=None, valid=None, **options):
    made = [DataLoader(data, 8, **options) for data in (train or rows(), valid or rows(40))]
    return DataLoaders(*made)


def net(norm=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(4, 8), norm(8), nn.ReLU(), nn.Linear(8, 3))


def fitting(*cbs, dls=None, model=None, opt_func=optim.SGD, loss_func=F.cross_entropy, cls=Trainer):
    torch.manual_seed(0)
    return cls(dls or loaders(), loss_func, opt_func, model or net(), [BasicTrainCB(), *cbs])


# Modes


@planted("undone_mode")
class FreezesNormsOnce:
    def before_fit(self, trainer):
        for layer in trainer.model.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval()


@planted("undone_mode")
class AppliesOnce:
    def before_fit(self, trainer):
        trainer.model.apply(lambda m: m.train(False) if isinstance(m, nn.BatchNorm1d) else None)


@planted("undone_mode")
def norms_put_to_sleep_by_hand():
    model = net()
    model[1].eval()
    return fitting(model=model)


@right
class FreezesNormsInEachEpoch(FreezesNormsOnce):
    def before_epoch(self, trainer):
        super().before_fit(trainer)


@right
class LooksBefore:
    def before_fit(self, trainer):
        with torch.no_grad():
            self.dark = trainer.model.eval()(torch.zeros(2, 4))


@right
def norms_kept_asleep():
    model = net()
    model[1].eval()
    return fitting(BatchNormEvalCB(), model=model)


# Optimizers


def adamw(is_kept):
    def make(params, lr):
        small = [p for n, p in model.named_parameters() if is_kept(n, p)]
        ids = {id(p) for p in small}
        large = [p for p in model.parameters() if id(p) not in ids]
        return optim.AdamW([dict(params=large, weight_decay=0.1), dict(params=small, weight_decay=0)], lr)

    model = net()
    return fitting(model=model, opt_func=make)


@planted("empty_group")
def everything_is_kept():
    return adamw(lambda n, p: "bias" or p.ndim < 2)


@planted("always_true", "empty_group")
def a_text_beside_a_condition():
    def make(params, lr):
        kept = [p for n, p in model.named_parameters() if "bias" or "norm" in n]
        return optim.AdamW([dict(params=[], weight_decay=0.1), dict(params=kept, weight_decay=0)], lr)

    model = net()
    return fitting(model=model, opt_func=make)


@right
def small_ones_are_kept():
    return adamw(lambda n, p: "bias" in n or p.ndim < 2)


@planted("always_true")
class AsksForWords:
    def after_get_loss(self, trainer):
        if trainer.epoch == 3 or 4:
            trainer.seen = True


@right
class AsksForNumbers:
    def after_get_loss(self, trainer):
        name = getattr(trainer, "name", None) or "nobody"
        if trainer.epoch == 3 or trainer.epoch == 4:
            trainer.seen = name


# Schedules


@planted("low_rate")
def a_rate_for_a_factor_with_a_warm_up():
    return fitting(BatchSchedulerCB(partial(LambdaLR, lr_lambda=lambda i: 1e-3 * min(1, (i + 1) / 5))))


@right
def a_long_warm_up():
    return fitting(BatchSchedulerCB(partial(LambdaLR, lr_lambda=lambda i: min(1, (i + 1) / 20000))))


@planted("schedule_pace")
def a_decay_of_epochs_in_updates():
    return fitting(BatchSchedulerCB(partial(ExponentialLR, gamma=0.7)))


@right
def a_decay_of_updates():
    return fitting(BatchSchedulerCB(partial(ExponentialLR, gamma=0.99)))


@right
def a_decay_of_epochs():
    return fitting(EpochSchedulerCB(partial(ExponentialLR, gamma=0.7)))


# Data


class Pictures(Dataset):
    transform = None

    def __init__(self, transform=None):
        self.rows, self.transform = rows(80), transform

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        x, y = self.rows[i]
        return (self.transform(x) if self.transform else x), y


def plain(x):
    return x / 2


@planted("one_transform")
def one_dataset_behind_both():
    train, valid = random_split(Pictures(lambda x: x + torch.randn(4)), [60, 20])
    valid.dataset.transform = plain
    return fitting(dls=loaders(train, valid))


@right
def a_dataset_for_each():
    order = torch.randperm(80).tolist()
    parts = Subset(Pictures(lambda x: x + torch.randn(4)), order[:60]), Subset(Pictures(plain), order[60:])
    return fitting(dls=loaders(*parts))


class Named(Dataset):
    "Classes by name; the order of the names says which number each has"

    def __init__(self, names, n):
        self.number = {name: i for i, name in enumerate(names)}
        self.rows, self.names = rows(n), names

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i][0], self.number[self.names[i % 3]]


@planted("other_labels")
def numbers_in_the_order_of_appearance():
    return fitting(dls=loaders(Named(["ant", "bee", "cat"], 80), Named(["cat", "ant", "bee"], 20)))


@right
def numbers_of_all_names():
    return fitting(dls=loaders(Named(["ant", "bee", "cat"], 80), Named(["ant", "bee", "cat"], 20)))


def turned_by_chance(batch):
    x, y = torch.utils.data.default_collate(batch)
    return (x.flip(-1) if random.random() < 0.5 else x), y


@planted("random_validation")
def chance_in_a_collate_function():
    return fitting(dls=loaders(collate_fn=turned_by_chance))


@right
def chance_in_training_alone():
    loader = DataLoader(rows(), 8, collate_fn=turned_by_chance)
    return fitting(dls=DataLoaders(loader, DataLoader(rows(40), 8)))


# Models


class Reader(nn.Module):
    def __init__(self, at_end=False):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(9, 8, padding_idx=0), nn.GRU(8, 8, batch_first=True)
        self.head, self.at_end = nn.Linear(8, 3), at_end

    def forward(self, x):
        out, _ = self.rnn(self.embed(x))
        last = (x != 0).sum(1) - 1 if self.at_end else torch.full((len(x),), -1)
        return self.head(out[torch.arange(len(x)), last])


def texts(n):
    torch.manual_seed(n)
    x = torch.randint(1, 9, (n, 6))
    x[::2, 4:] = 0
    return TensorDataset(x, torch.randint(3, (n,)))


@planted("padding_read")
def the_state_of_the_padding():
    return fitting(dls=loaders(texts(80), texts(20)), model=Reader())


@right
def the_state_of_the_last_word():
    return fitting(dls=loaders(texts(80), texts(20)), model=Reader(at_end=True))


class Scaled(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.place = (
            nn.Parameter(torch.randn(4) * 0.02) if whole else nn.Parameter(torch.randn(4)).unsqueeze(0)
        )
        self.body = net(nn.LayerNorm)

    def forward(self, x):
        return self.body(x + self.place)


@planted("no_parameter", "no_optimizer")
def a_part_of_a_parameter():
    return fitting(model=Scaled(whole=False))


@right
def a_whole_parameter():
    return fitting(model=Scaled(whole=True))


def test_an_error_of_the_run_is_told_with_what_the_source_tells():
    model = Scaled(whole=False)
    model.place = nn.Parameter(torch.randn(4)) * 0.02  # Its graph is gone after one backward pass
    with pytest.raises(RuntimeError, match="second time") as caught:
        fitting(model=model).check(batches=2)
    assert any("nn.Parameter(" in note and "no_parameter" in note for note in caught.value.__notes__)


# Hooks


@planted("hooks_pile_up")
class HooksInEachEpoch:
    def before_epoch(self, trainer):
        trainer.model[0].register_forward_hook(self.save)

    def save(self, layer, x, y):
        self.mean = y.detach().mean()


@right
class TakesHooksOff(HooksInEachEpoch):
    handle = None

    def before_epoch(self, trainer):
        self.handle = trainer.model[0].register_forward_hook(self.save)

    def cleanup_epoch(self, trainer):
        if self.handle is not None:
            self.handle.remove()


# Own batches


class SoftTargets(Trainer):
    detached = False

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.preds = self.model(x)
        self.loss = self.loss_func(self.preds, y)
        if self.training:
            soft = (self.preds / 0.5).softmax(1)
            soft = soft.detach() if self.detached else soft
            self.loss = self.loss + F.cross_entropy(self.model(x + 0.1 * torch.randn_like(x)), soft)
            self.loss.backward()
            self.run_callbacks("step", "zero_grad")


class Detached(SoftTargets):
    detached = True


@planted("target_gradient")
def soft_labels_that_follow():
    return fitting(cls=SoftTargets)


@right
def soft_labels_that_stay():
    return fitting(cls=Detached)


def made(make):
    return fitting(make()) if isinstance(make, type) else make()


@pytest.mark.parametrize("make, names", planted, ids=lambda o: getattr(o, "__name__", " "))
def test_what_is_planted_is_found_by_name(make, names):
    assert {*found_in(made(make), batches=2)} == {*names}


@pytest.mark.parametrize("make", right, ids=lambda o: getattr(o, "__name__", " "))
def test_nothing_is_found_where_all_is_right(make):
    assert found_in(made(make), batches=2) == []


def test_a_number_of_batches_in_the_wrong_place_and_a_trainer_without_data_are_told():
    with pytest.raises(TypeError, match=r"`ignore` is 3.*check\(batches=3\)"):
        fitting().check(3)
    trainer = fitting()
    trainer.dls = None
    with pytest.raises(ValueError, match="no loader for training or validation"):
        trainer.check(batches=3)
