"""Mistakes that only batches show, each beside what is like it and right.

Each planted one is found by name when some batches are run; in the right ones nothing is found, and the
trainer is afterwards as it was.
"""

import copy
import random
import warnings
from collections import namedtuple

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from isaac_loop import Trainer, with_cbs
from isaac_loop.callbacks import AccumulationCB, BasicTrainCB, BatchNormEvalCB, DropoutOnCB, EMACB
from isaac_loop.callbacks import ClipGradCB, FreezeCB, MetricsCB, MixedPrecisionCB, OneCycleSchedulerCB
from isaac_loop.data import DataLoaders
from isaac_loop.inspection import CheckFailed
from isaac_loop.loop.events import CancelBatchException, CancelFitException, CancelStepException
from marked import Marked, Planted
from working import found_in

planted, right = Planted(), Marked()


def rows(n=45, n_out=3):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 6, generator=generator)
    return TensorDataset(x, torch.randint(n_out, (n,), generator=generator))


def dls(**options):
    return DataLoaders(DataLoader(rows(), 8, shuffle=True, **options), DataLoader(rows(28), 8))


def net(n_out=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, n_out))


def trainer_with(*cbs, model=None, loss_func=F.cross_entropy, opt_func=optim.SGD, loaders=None, cls=Trainer):
    with_steps = cls.one_batch is Trainer.one_batch
    return cls(loaders or dls(), loss_func, opt_func, model or net(), [*[BasicTrainCB()] * with_steps, *cbs])


def a_number(y):
    return y.float()


@planted("spread_rows")
def column_minus_row():
    return trainer_with(model=net(1), loss_func=lambda preds, y: (preds - a_number(y)).pow(2).mean())


@planted("spread_rows")
def row_minus_viewed_column():
    def loss_func(preds, y):
        return (preds.squeeze() - a_number(y).view(-1, 1)).abs().mean()

    return trainer_with(model=net(1), loss_func=loss_func)


@planted("spread_rows")
def kept_dimension_in_accuracy():
    class Right:
        def before_epoch(self, trainer):
            self.right = 0

        def after_predict(self, trainer):
            _, (y,) = trainer.split(trainer.batch)
            self.right += (trainer.preds.argmax(1, keepdim=True) == y).sum()

    return trainer_with(Right())


@right
def squeezed():
    return trainer_with(model=net(1), loss_func=lambda preds, y: F.mse_loss(preds.squeeze(1), a_number(y)))


@right
def all_pairs():
    def loss_func(preds, y):
        score, value = preds.squeeze(1), a_number(y)
        wanted = (value[:, None] - value).sign()
        return F.relu(1 - wanted * (score[:, None] - score)).mean()

    return trainer_with(model=net(1), loss_func=loss_func)


@planted("masked_mean")
def mean_over_mask():
    def loss_func(preds, y):
        losses, mask = F.cross_entropy(preds, y, reduction="none"), y != 0
        return (losses * mask).mean()

    return trainer_with(loss_func=loss_func)


@right
def hinges_on_both_sides():
    def loss_func(preds, y):
        score = preds.squeeze(1)
        return (F.relu(1 - score) * (y > 0)).mean() + (F.relu(1 + score) * (y == 0)).mean()

    return trainer_with(model=net(1), loss_func=loss_func)


@right
def features_as_many_as_rows():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.last = nn.Parameter(torch.ones(8)), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(x[:, :1] * self.scale.exp())

    torch.manual_seed(1)
    return trainer_with(model=Features())


@right
def distances_by_their_formula():
    def loss_func(preds, y):
        squares = preds.pow(2)
        apart = squares.sum(1, keepdim=True) + squares.sum(1) - 2 * preds @ preds.T
        return (apart * (y.view(-1, 1) == y)).sum() / 64 + F.cross_entropy(preds, y)

    return trainer_with(loss_func=loss_func)


@right
def counts_and_caches():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(6, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.last(x)

    torch.manual_seed(1)
    return trainer_with(model=Counts())


@right
def freezes_norms_later():
    class Later:
        def before_epoch(self, trainer):
            if trainer.epoch:
                trainer.model[1].eval()

    return trainer_with(Later())


@right
def named_rows():
    def collate(rows):
        x, y = zip(*rows)
        return torch.stack(x), torch.stack(y), [f"row {i}" for i in range(len(x))]

    loader = DataLoader(rows(), 8, collate_fn=collate)

    def split(batch):
        assert len(batch[0]) == len(batch[2])
        return batch[:1], batch[1:2]

    return trainer_with(loaders=DataLoaders(loader, loader, split=split))


@right
def rows_in_a_named_tuple():
    Rows = namedtuple("Rows", "x y")
    loader = DataLoader(rows(), 8, collate_fn=lambda given: Rows(*map(torch.stack, zip(*given))))
    return trainer_with(loaders=DataLoaders(loader, loader))


@right
def share_of_mask():
    def loss_func(preds, y):
        mask = (y != 0).float()
        return (F.cross_entropy(preds, y, reduction="none") * mask).sum() / mask.sum().clamp(min=1)

    return trainer_with(loss_func=loss_func)


class Uncertain:
    "Weighs the loss by a number that is learnt"

    def __init__(self):
        self.log_var = nn.Parameter(torch.zeros(()))

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * torch.exp(-self.log_var) + self.log_var


@planted("no_optimizer")
def weight_of_a_callback():
    return trainer_with(Uncertain())


@planted("no_optimizer")
def centres_of_a_loss():
    class CentreLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.centres = nn.Parameter(torch.randn(3, 3))

        def forward(self, preds, y):
            return F.cross_entropy(preds, y) + (preds - self.centres[y]).pow(2).mean()

    return trainer_with(loss_func=CentreLoss())


@planted("no_optimizer")
def head_in_a_closure():
    head = nn.Linear(3, 3)
    return trainer_with(loss_func=lambda preds, y: F.cross_entropy(head(preds), y))


@right
def weight_in_the_optimizer():
    class Learnt(Uncertain):
        def before_fit(self, trainer):
            trainer.opt.add_param_group(dict(params=[self.log_var]))

    return trainer_with(Learnt())


@right
def teacher_without_gradient():
    class Distil:
        def __init__(self):
            self.teacher = net().eval()

        def after_get_loss(self, trainer):
            (x,), _ = trainer.split(trainer.batch)
            with torch.no_grad():
                said = self.teacher(x)
            trainer.loss = trainer.loss + F.mse_loss(trainer.preds, said)

    return trainer_with(Distil())


@planted("no_gradient")
def another_model():
    class Compiled:
        def before_fit(self, trainer):
            trainer.model = copy.deepcopy(trainer.model)

    return trainer_with(Compiled())


class Parts(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.body, self.head, self.cut = nn.Linear(6, 8), nn.Linear(8, 3), cut

    def forward(self, x):
        h = self.body(x)
        return self.head(h.detach() if self.cut else h)


@planted("no_gradient")
def detached_body():
    return trainer_with(model=Parts(True))


@right
def frozen_body():
    model = Parts(True)
    model.body.requires_grad_(False)
    return trainer_with(model=model, opt_func=lambda params, lr: optim.SGD(params, lr, momentum=0.9))


@planted("never_moved")
def rate_of_zero():
    class Rate:
        def before_step(self, trainer):
            trainer.opt.param_groups[0]["lr"] = 0.1 * (trainer.epoch // 10)

    return trainer_with(Rate())


@right
def warm_up():
    class Rate:
        def before_step(self, trainer):
            trainer.opt.param_groups[0]["lr"] = 0.1 * trainer.n_updates / 100

    return trainer_with(Rate())


@planted("never_cleared")
def clears_another():
    class Clears:
        def before_fit(self, trainer):
            trainer.opt.zero_grad = optim.SGD(net().parameters(), lr=0.1).zero_grad

    return trainer_with(Clears())


class Deceives(Trainer):
    "A net that deceives a critic"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        (x,), _ = self.split(self.batch)
        fake = self.model(x)
        self.critic_step(x, fake)
        self.net_step(fake)

    def critic_step(self, x, fake):
        self.opt_critic.zero_grad()
        (self.critic(fake.detach()).mean() - self.critic(x[:, :3]).mean()).backward()
        self.opt_critic.step()

    def net_step(self, fake):
        self.opt.zero_grad()
        self.loss = -self.critic(fake).mean()
        self.loss.backward()
        self.opt.step()


def gan(cls):
    trainer = trainer_with(cls=cls, loaders=DataLoaders(dls().train))
    trainer.critic = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    trainer.opt_critic = optim.SGD(trainer.critic.parameters(), lr=0.1)
    return trainer


@right
def deceives():
    return gan(Deceives)


@planted("gradients_mixed")
def clears_behind_each_step():
    class ClearsLate(Deceives):
        def critic_step(self, x, fake):
            (self.critic(fake.detach()).mean() - self.critic(x[:, :3]).mean()).backward()
            self.opt_critic.step()
            self.opt_critic.zero_grad()

        def net_step(self, fake):
            super().net_step(fake)
            self.opt.zero_grad()

    return gan(ClearsLate)


@planted("gradients_mixed")
def fake_with_its_graph():
    class Whole(Deceives):
        def critic_step(self, x, fake):
            self.opt.zero_grad()
            self.opt_critic.zero_grad()
            (self.critic(fake).mean() - self.critic(x[:, :3]).mean()).backward(retain_graph=True)
            self.opt_critic.step()

        def net_step(self, fake):
            self.loss = -self.critic(self.model(self.batch[0])).mean()
            self.loss.backward()
            self.opt.step()

    return gan(Whole)


@planted("no_gradient")
def net_that_is_never_told():
    class Cut(Deceives):
        def net_step(self, fake):
            super().net_step(fake.detach())

    return gan(Cut)


@right
def two_paces():
    class Slow(Trainer):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            (x,), (y,) = self.split(self.batch)
            self.loss = F.cross_entropy(self.model(x), y)
            if not self.training:
                return
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            if self.batch_num % 2:
                self.opt_slow.step()
                self.opt_slow.zero_grad()

    model = net()
    trainer = trainer_with(cls=Slow, model=model, opt_func=lambda _, lr: optim.SGD(model[4].parameters(), lr))
    trainer.opt_slow = optim.SGD(model[:2].parameters(), lr=0.01)
    return trainer


def frozen_norms():
    model = net()
    for layer in model[:2]:
        layer.requires_grad_(False)
    return model


@planted("frozen_measures")
def frozen_and_measuring():
    return trainer_with(model=frozen_norms())


@right
def frozen_and_still():
    return trainer_with(BatchNormEvalCB(only_frozen=True), model=frozen_norms())


def held_dls():
    whole = rows()
    batches = list(zip(*(x.split(8) for x in whole.tensors)))
    return DataLoaders(batches, batches[:2])


class Scales:
    def __init__(self, in_place):
        self.in_place = in_place

    def before_batch(self, trainer):
        x, y = trainer.batch
        trainer.batch = (x.mul_(1.1) if self.in_place else x * 1.1), y


@planted("changes_data")
def scales_the_data():
    return trainer_with(Scales(True), loaders=held_dls())


@right
def scales_a_copy():
    return trainer_with(Scales(False), loaders=held_dls())


@right
def scales_what_was_loaded():
    return trainer_with(Scales(True))


@planted("changed_in_validation")
def updates_in_validation():
    class Drift:
        def after_batch(self, trainer):
            if not trainer.training:
                trainer.model[1].running_mean.mul_(0.9)

    return trainer_with(Drift())


@planted("not_finite")
def logarithm_of_nothing():
    return trainer_with(loss_func=lambda preds, y: preds.relu().log().mean())


@planted("seeded_again")
def seeds_in_a_function():
    def seed():
        torch.manual_seed(3)

    class Augments:
        def before_batch(self, trainer):
            seed()
            x, y = trainer.batch
            trainer.batch = x + 0.1 * torch.randn_like(x), y

    return trainer_with(Augments())


class Dropped:
    "Does something when validation begins"

    def __init__(self, before):
        self.before = before

    def before_epoch(self, trainer):
        if not trainer.training:
            self.before(self)


def dropping(before):
    return trainer_with(Dropped(before))


@planted("seeded_again")
def the_same_seed_for_each_validation():
    return dropping(lambda cb: torch.manual_seed(0))


@right
def another_seed_for_each_validation():
    def seed(cb):
        cb.n = getattr(cb, "n", 0) + 1
        torch.manual_seed(cb.n)

    return dropping(seed)


@right
def a_seed_that_is_put_back():
    class Restores(Dropped):
        def __init__(self):
            super().__init__(lambda cb: torch.manual_seed(0))

        def before_epoch(self, trainer):
            self.state = torch.get_rng_state()
            super().before_epoch(trainer)

        def cleanup_epoch(self, trainer):
            if not trainer.training:
                torch.set_rng_state(self.state)

    return trainer_with(Restores())


def body_and_head(params, lr, rates=(1, 1)):
    *body, head = params
    groups = [dict(params=body, lr=lr * rates[0]), dict(params=[head], lr=lr * rates[1])]
    return optim.SGD(groups, lr)


def warming_up(rates=(1, 1), n=1):
    class First:
        def before_step(self, trainer):
            trainer.opt.param_groups[0]["lr"] = 0.1 * (trainer.n_updates + 1) / 100

    class All:
        def before_step(self, trainer):
            for group in trainer.opt.param_groups:
                group["lr"] = 0.1 * (trainer.n_updates + 1) / 100

    return trainer_with(
        First() if n == 1 else All(), opt_func=lambda params, lr: body_and_head(params, lr, rates)
    )


@planted("some_rates")
def the_first_rate_alone():
    return warming_up()


@planted("some_rates")
def the_first_rate_alone_by_epoch():
    class Rate:
        def before_epoch(self, trainer):
            trainer.opt.param_groups[0]["lr"] *= 0.9

    return trainer_with(Rate(), opt_func=body_and_head)


@right
def all_rates():
    return warming_up(n=2)


@right
def a_group_that_is_not_to_learn():
    return warming_up(rates=(1, 0))


@right
def the_rate_of_the_body_set_once():
    class Rate:
        def before_fit(self, trainer):
            trainer.opt.param_groups[0]["lr"] = trainer.lr / 10

    return trainer_with(Rate(), opt_func=body_and_head)


@planted("some_rates")
def all_set_at_first_and_one_scheduled():
    class Rate:
        def before_fit(self, trainer):
            for group in trainer.opt.param_groups:
                group["lr"] = trainer.lr / 10

        def before_step(self, trainer):
            trainer.opt.param_groups[0]["lr"] *= 0.9

    return trainer_with(Rate(), opt_func=body_and_head)


@right
def the_head_warms_up_alone():
    class Rate:
        def before_step(self, trainer):
            trainer.opt.param_groups[-1]["lr"] = 0.1 * (trainer.n_updates + 1) / 100

    return trainer_with(Rate(), opt_func=body_and_head)


@right
def a_frozen_group():
    trainer = warming_up()
    trainer.model[-1].requires_grad_(False)
    trainer.opt_func = lambda params, lr: optim.SGD(
        [
            dict(params=list(trainer.model[:-1].parameters())),
            dict(params=list(trainer.model[-1].parameters())),
        ],
        lr,
    )
    return trainer


@right
def a_rate_for_each_group_by_a_schedule():
    class Rate:
        def before_fit(self, trainer):
            factors = [lambda n: 0.9**n, lambda n: 1.0]
            self.schedule = optim.lr_scheduler.LambdaLR(trainer.opt, factors)

        def after_step(self, trainer):
            self.schedule.step()

    return trainer_with(Rate(), opt_func=body_and_head)


class NoRate(optim.Optimizer):
    "Without a rate, as some that adapt have none"

    def __init__(self, params, lr=None):
        super().__init__(params, dict(lr=None))

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.01)


@right
def no_rate():
    return trainer_with(opt_func=NoRate)


class OwnClosure(BasicTrainCB):
    "Gives the optimizer a function that computes the gradients, and clears them first"

    def step(self, trainer):
        x, y = trainer.batch

        def closure():
            trainer.opt.zero_grad()
            loss = trainer.loss_func(trainer.model(x), y)
            loss.backward()
            return loss

        trainer.opt.step(closure)

    def backward(self, trainer):
        "The closure does it"

    def zero_grad(self, trainer):
        "And this"


@right
def closure_that_clears():
    def opt_func(params, lr):
        return optim.LBFGS(params, lr, max_iter=3)

    return Trainer(dls(), F.cross_entropy, opt_func, nn.Linear(6, 3), OwnClosure())


class OfAnotherMake:
    "Has groups, and is no optimizer of PyTorch"

    def __init__(self, params, lr):
        self.param_groups = [dict(params=list(params), lr=lr)]

    def step(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.01)

    def zero_grad(self):
        for p in self.param_groups[0]["params"]:
            p.grad = None


@right
def an_optimizer_of_another_make():
    return trainer_with(opt_func=OfAnotherMake)


@right
def training_that_seeds_itself():
    class Seeds:
        def before_epoch(self, trainer):
            torch.manual_seed(100 + trainer.epoch if trainer.training else 0)

    return trainer_with(Seeds())


@right
def a_seed_that_is_put_back_in_the_next_epoch():
    class Restores(Dropped):
        state = None

        def __init__(self):
            super().__init__(lambda cb: torch.manual_seed(0))

        def before_epoch(self, trainer):
            if trainer.training and self.state is not None:
                torch.set_rng_state(self.state)
            self.state = torch.get_rng_state()
            super().before_epoch(trainer)

    return trainer_with(Restores())


@planted("seeded_again")
def a_seed_for_validation_and_augmented_batches():
    class Augments:
        on_valid = False

        def before_batch(self, trainer):
            x, y = trainer.batch
            trainer.batch = x + torch.randn_like(x), y

    return trainer_with(Augments(), Dropped(lambda cb: torch.manual_seed(0)), model=nn.Linear(6, 3))


@right
def a_callback_for_each_group():
    class Rate:
        def __init__(self, i):
            self.i, self.name = i, f"rate{i}"

        def before_step(self, trainer):
            trainer.opt.param_groups[self.i]["lr"] *= 0.9

    return trainer_with(Rate(0), Rate(1), opt_func=body_and_head)


@right
def schedules_of_the_library():
    return trainer_with(OneCycleSchedulerCB(), opt_func=body_and_head)


# Data


class Jittered(torch.utils.data.Dataset):
    "Images with a transform, if one is given"

    def __init__(self, transform=None):
        self.rows, self.transform = rows(), transform or (lambda x: x)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        x, y = self.rows[i]
        return self.transform(x), y


def split_of(data, sizes=(0.8, 0.2)):
    parts = torch.utils.data.random_split(data, sizes, torch.Generator().manual_seed(2))
    return DataLoaders(*(DataLoader(o, 8, shuffle=i == 0) for i, o in enumerate(parts)))


def repeated(data, times=6):
    order = torch.cat([torch.arange(len(data)), torch.arange(9).repeat(times)])
    return TensorDataset(*(x[order] for x in data.tensors))


@planted("random_validation")
def a_transform_for_both_sides():
    return trainer_with(loaders=split_of(Jittered(lambda x: x + 0.1 * torch.randn(6))))


@planted("random_validation")
def flips_for_both_sides():
    return trainer_with(loaders=split_of(Jittered(lambda x: x.flip(0) if torch.rand(1) < 0.5 else x)))


class WithoutLength(Jittered):
    def __len__(self):
        raise TypeError("nobody knows")


@right
def rows_whose_number_nobody_knows():
    loaders = (DataLoader(WithoutLength(), 8, sampler=range(*o)) for o in ((32,), (32, 45)))
    return trainer_with(loaders=DataLoaders(*loaders))


@right
def a_first_row_that_cannot_be_read():
    class Broken(Jittered):
        def __getitem__(self, i):
            assert i, "the first row is broken"
            return super().__getitem__(i)

    return trainer_with(
        loaders=DataLoaders(DataLoader(rows(), 8), DataLoader(Broken(), 8, sampler=range(1, 17)))
    )


@right
def a_transform_that_draws_nothing():
    return trainer_with(loaders=split_of(Jittered(lambda x: x / 2)))


@right
def a_transform_for_training():
    train = split_of(Jittered(lambda x: x + 0.1 * torch.randn(6))).train
    return trainer_with(loaders=DataLoaders(train, split_of(Jittered()).valid))


@planted("shared_rows")
def a_part_of_what_was_trained_with():
    data = rows()
    valid = torch.utils.data.Subset(data, range(30, 45))
    return trainer_with(loaders=DataLoaders(DataLoader(data, 8, shuffle=True), DataLoader(valid, 8)))


@planted("shared_rows")
def subsets_that_overlap():
    data = rows()
    parts = (torch.utils.data.Subset(data, range(*o)) for o in ((0, 32), (30, 45)))
    return trainer_with(loaders=DataLoaders(*(DataLoader(o, 8) for o in parts)))


@planted("shared_rows")
def repeated_before_the_split():
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(45, 8, generator=generator), torch.arange(45) % 3)
    model = nn.Sequential(nn.Linear(8, 3))
    return trainer_with(loaders=split_of(repeated(data)), model=model)


@right
def repeated_behind_the_split():
    train, valid = torch.utils.data.random_split(rows(), [0.8, 0.2])
    more = torch.utils.data.Subset(train, [*range(36), *[0, 1, 2] * 5])
    return trainer_with(loaders=DataLoaders(DataLoader(more, 8, shuffle=True), DataLoader(valid, 8)))


@right
def few_kinds_of_rows():
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randint(2, (64, 6), generator=generator).float(), torch.arange(64) % 3)
    return trainer_with(loaders=split_of(data))


def joined(parts):
    return torch.utils.data.ConcatDataset(parts)


@planted("shared_rows")
def joined_before_the_split():
    data = rows()
    return trainer_with(loaders=split_of(joined([data, *[torch.utils.data.Subset(data, range(9))] * 6])))


@right
def joined_behind_the_split():
    train, valid = torch.utils.data.random_split(rows(), [0.8, 0.2])
    more = joined([train, *[torch.utils.data.Subset(train, range(5))] * 6])
    return trainer_with(loaders=DataLoaders(DataLoader(more, 8, shuffle=True), DataLoader(valid, 8)))


@planted("shared_rows")
def arrays_that_overlap():
    x, y = rows().tensors
    parts = TensorDataset(x[:32], y[:32]), TensorDataset(x[30:], y[30:])
    return trainer_with(loaders=DataLoaders(*(DataLoader(o, 8) for o in parts)))


@right
def arrays_cut_in_two():
    x, y = rows().tensors
    parts = TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:])
    return trainer_with(loaders=DataLoaders(*(DataLoader(o, 8) for o in parts)))


# Views


class Tagger(nn.Module):
    "Classes for each of seven places"

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 5)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def tagging(loss_func, places=7):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randint(0, n, (45, places), generator=generator) for n in (20, 5)))
    torch.manual_seed(1)
    return trainer_with(loaders=split_of(data), model=Tagger(), loss_func=loss_func)


@planted("view_for_transpose")
def logits_viewed():
    return tagging(lambda preds, y: F.cross_entropy(preds.view(len(y), 5, 7), y))


@planted("view_for_transpose")
def logits_reshaped():
    return tagging(lambda preds, y: F.cross_entropy(preds.reshape(-1, preds.shape[2], preds.shape[1]), y))


@right
def logits_transposed():
    return tagging(lambda preds, y: F.cross_entropy(preds.transpose(1, 2), y))


@right
def logits_flattened():
    return tagging(lambda preds, y: F.cross_entropy(preds.view(-1, 5), y.reshape(-1)))


@right
def a_dimension_of_one_moved():
    return tagging(lambda preds, y: F.cross_entropy(preds[:, :1].view(len(y), 5, 1), y[:, :1]))


@right
def heads_taken_apart():
    "As many rows as places in the one, and not in the other"

    def loss_func(preds, y):
        return F.cross_entropy(preds.view(-1, 5).view(7, -1, 5).transpose(0, 1).reshape(-1, 5), y.reshape(-1))

    return tagging(loss_func)


# Functions that are no mean


def f1(preds, y):
    "Macro, as of a batch"
    found = preds.argmax(1)
    scores = []
    for i in range(3):
        hits = ((found == i) & (y == i)).sum()
        scores.append(2 * hits / ((found == i).sum() + (y == i).sum()).clamp(min=1))
    return torch.stack(scores).mean()


@planted("mean_of_means")
def an_f1_of_batches():
    return trainer_with(MetricsCB(f1=f1, show=False))


@planted("mean_of_means")
def a_root_of_batches():
    return trainer_with(
        MetricsCB(root=lambda p, y: (p.softmax(1)[:, 0] - y).square().mean().sqrt().item(), show=False)
    )


@right
def means_over_examples():
    hit = dict(hit=lambda p, y: p.argmax(1) == y, share=lambda p, y: (p.argmax(1) == y).float().mean())
    return trainer_with(MetricsCB(**hit, loss=lambda p, y: F.cross_entropy(p, y).item(), show=False))


@right
def a_function_that_cannot_be_asked_twice():
    def f(preds, y):
        assert len(y) <= 8
        return float(preds.max())

    return trainer_with(MetricsCB(f=f, show=False))


@right
def a_head_that_takes_the_place_of_another():
    class NewHead:
        def before_fit(self, trainer):
            trainer.model[-1] = nn.Linear(8, 3)
            trainer.opt.add_param_group(dict(params=list(trainer.model[-1].parameters())))

    return trainer_with(NewHead())


class Listed(nn.Module):
    "Layers in a list"

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.head = kind([nn.Linear(6, 6) for _ in range(3)]), nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


@planted("no_optimizer")
def layers_in_a_plain_list():
    return trainer_with(model=Listed(list))


@planted("no_optimizer")
def a_parameter_that_opt_func_leaves_out():
    def opt_func(params, lr):
        return optim.SGD([p for p in params if p.ndim > 1], lr)

    return trainer_with(opt_func=opt_func)


@right
def layers_in_a_module_list():
    return trainer_with(model=Listed(nn.ModuleList))


@right
def a_teacher_that_hides():
    class Taught(Listed):
        def forward(self, x):
            with torch.no_grad():
                x = x + self.layers[0](x)
            return self.head(x)

    return trainer_with(model=Taught(list))


@planted("no_gradient")
def a_loss_made_anew():
    def loss_func(preds, y):
        return torch.tensor(F.cross_entropy(preds, y).item(), requires_grad=True)

    return trainer_with(loss_func=loss_func)


class InPlace(Jittered):
    def __getitem__(self, i):
        x, y = self.rows[i]
        x /= 2
        return x, y


@planted("changes_data")
def a_dataset_that_is_changed_by_reading():
    return trainer_with(loaders=split_of(InPlace()))


class OwnDice(Jittered):
    "Draws from a generator of its own, into a buffer or not, and may change what it holds"

    def __init__(self, in_place=False, buffered=False):
        super().__init__()
        self.dice, self.in_place = random.Random(4), in_place
        self.buffer = torch.zeros(6) if buffered else None

    def __getitem__(self, i):
        x, y = self.rows[i]
        if self.in_place:
            x /= 2
        noise = torch.full((6,), self.dice.random())
        return x + (noise if self.buffer is None else self.buffer.copy_(noise)), y


@planted("random_validation")
def rows_that_draw_from_a_generator_of_their_own():
    return trainer_with(loaders=split_of(OwnDice()))


@planted("random_validation")
def rows_that_are_drawn_into_a_buffer():
    return trainer_with(loaders=split_of(OwnDice(buffered=True)))


@planted("changes_data")
def rows_that_draw_and_change_what_they_are_made_of():
    return trainer_with(loaders=split_of(OwnDice(in_place=True)))


class FreshDice(Jittered):
    def __getitem__(self, i):
        x, y = self.rows[i]
        return x + random.SystemRandom().random(), y


@planted("random_validation")
def rows_that_nobody_can_repeat():
    return trainer_with(loaders=split_of(FreshDice()))


class Listing(Jittered):
    "Rows in a list, of which reading one puts another there"

    def __init__(self):
        super().__init__()
        self.listed = list(self.rows.tensors[0])

    def __getitem__(self, i):
        self.listed[i] = self.listed[i] / 2
        return self.listed[i], self.rows[i][1]


@planted("changes_data")
def rows_that_are_replaced_by_reading():
    return trainer_with(loaders=split_of(Listing()))


@planted("changes_data")
def rows_of_a_class_that_speaks_of_what_has_no_value_yet():
    class Unfinished(Listing):
        def __getitem__(self, i):
            row = super().__getitem__(i)
            return row if i < 1000 else scaled(row)

    data = Unfinished()
    if len(data) > 1000:
        scaled = torch.relu
    return trainer_with(loaders=split_of(data))


class Sequences(nn.Module):
    "Two steps of three numbers for each row"

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.head = layer(), nn.Linear(3, 3)

    def forward(self, x):
        x = self.layer(x.view(-1, 2, 3))
        return self.head((x[0] if isinstance(x, tuple) else x)[:, -1])


@planted("rows_mixed")
def a_recurrent_net_over_rows():
    return trainer_with(model=Sequences(lambda: nn.LSTM(3, 3)))


@planted("rows_mixed")
def attention_over_rows():
    return trainer_with(model=Sequences(lambda: nn.TransformerEncoderLayer(3, 1, 4)))


@right
def a_recurrent_net_over_steps():
    return trainer_with(model=Sequences(lambda: nn.LSTM(3, 3, batch_first=True)))


@right
def attention_over_steps():
    return trainer_with(model=Sequences(lambda: nn.TransformerEncoderLayer(3, 1, 4, batch_first=True)))


class Drops(nn.Module):
    def __init__(self, told):
        super().__init__()
        torch.manual_seed(1)
        self.told, self.body, self.head = told, nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.body(x).relu()
        return self.head(F.dropout(x, 0.5, training=self.training) if self.told else F.dropout(x, 0.5))


@planted("drops_in_validation")
def dropout_that_is_not_told():
    return trainer_with(model=Drops(False))


@right
def dropout_that_is_told():
    return trainer_with(model=Drops(True))


# The next token


class Writer(nn.Module):
    "Says what comes next"

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.body, self.head = nn.Embedding(12, 8), body(), nn.Linear(8, 12)

    def forward(self, tokens):
        x = self.body(self.embed(tokens))
        return self.head(x[0] if isinstance(x, tuple) else x)


class Layer(nn.TransformerEncoderLayer):
    "With a causal mask or without"

    def __init__(self, causal):
        super().__init__(8, 2, 16, batch_first=True)
        self.causal = causal

    def forward(self, x):
        n = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n) if self.causal else None
        return super().forward(x, src_mask=mask)


def writing(body, shift=1):
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(12, (45, 9 + shift), generator=generator)
    data = TensorDataset(text[:, :9], text[:, shift:])
    loss_func = lambda preds, y: F.cross_entropy(preds.transpose(1, 2), y)  # noqa: E731
    return trainer_with(loaders=split_of(data), model=Writer(body), loss_func=loss_func)


@planted("sees_future")
def attention_without_a_mask():
    return writing(lambda: Layer(causal=False))


@planted("sees_future")
def a_recurrent_net_of_both_directions():
    return writing(lambda: nn.GRU(8, 4, bidirectional=True, batch_first=True))


@right
def attention_with_a_causal_mask():
    return writing(lambda: Layer(causal=True))


@right
def a_recurrent_net():
    return writing(lambda: nn.GRU(8, 8, batch_first=True))


@right
def a_tagger_of_the_same_places():
    return writing(lambda: Layer(causal=False), shift=0)


# Masks


class Reader(nn.Module):
    "Attention over tokens, of which 0 is padding"

    def __init__(self, mask, layers=0):
        super().__init__()
        self.mask, self.embed = mask, nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers) if layers else None
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True) if not layers else None
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        x, mask = self.embed(tokens), self.mask(tokens)
        if self.encoder is not None:
            return self.head(self.encoder(x, src_key_padding_mask=mask)[:, 0])
        return self.head(self.attention(x, x, x, key_padding_mask=mask)[0][:, 0])


def reading(mask, layers=0):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 20, (45, 7), generator=generator)
    for i, row in enumerate(tokens):
        row[3 + i % 5 :] = 0
    data = TensorDataset(tokens, torch.arange(45) % 3)
    torch.manual_seed(1)
    return trainer_with(loaders=split_of(data), model=Reader(mask, layers))


@planted("mask_turned")
def a_mask_of_what_is_there():
    return reading(lambda tokens: tokens != 0)


@planted("mask_turned")
def a_mask_of_what_is_there_through_layers():
    return reading(lambda tokens: tokens != 0, layers=2)


@right
def a_mask_of_padding():
    return reading(lambda tokens: tokens == 0)


@right
def a_mask_of_padding_through_layers():
    return reading(lambda tokens: tokens == 0, layers=2)


@right
def no_mask():
    return reading(lambda tokens: None)


@planted("left_in_eval")
def looks_through_a_helper():
    def look(model):
        for part in model.children():
            part.eval()

    class Looks:
        def after_batch(self, trainer):
            if trainer.training:
                look(trainer.model)

    return trainer_with(Looks())


@right
def looks_up_a_batch_of_the_list():
    class Sample:
        def before_epoch(self, trainer):
            self.x = trainer.dls.train[0][0]

    return trainer_with(Sample(), loaders=DataLoaders(list(dls().train), list(dls().valid)))


@right
def dropout_in_validation():
    return trainer_with(DropoutOnCB())


class Share:
    "Reports an accuracy"

    def before_epoch(self, trainer):
        self.right, self.rows, self.means = 0, 0, []

    def after_predict(self, trainer):
        _, (y,) = trainer.split(trainer.batch)
        hits = trainer.preds.argmax(1) == y
        self.right, self.rows = self.right + hits.sum(), self.rows + len(y)
        self.means.append(hits.float().mean().item())

    def after_epoch(self, trainer):
        trainer.history.write(**{f"{'train' if trainer.training else 'valid'}_accuracy": self.value()})

    def value(self):
        return float(self.right / self.rows)


@right
def share():
    return trainer_with(MetricsCB(), Share())


@planted("wrong_column")
def mean_of_shares():
    class Means(Share):
        def value(self):
            return torch.tensor(self.means).mean().item()

    return trainer_with(MetricsCB(), Means())


@planted("wrong_column")
def share_of_all_epochs():
    class Always(Share):
        def before_epoch(self, trainer):
            if not hasattr(self, "means"):
                super().before_epoch(trainer)

    return trainer_with(MetricsCB(), Always())


@right
def smoothed_loss():
    class Smooth:
        def before_fit(self, trainer):
            self.value = None

        def after_get_loss(self, trainer):
            loss = trainer.loss.item()
            self.value = loss if self.value is None else 0.9 * self.value + 0.1 * loss

        def after_epoch(self, trainer):
            if trainer.training:
                trainer.history.write(train_loss=self.value)

    return trainer_with(Smooth())


@right
def what_the_library_does():
    return trainer_with(MetricsCB(), AccumulationCB(2), ClipGradCB(1.0), EMACB(), OneCycleSchedulerCB())


@right
def own_gathering():
    class Gathers:
        def __init__(self):
            self.n = 2

        def before_backward(self, trainer):
            trainer.loss = trainer.loss / self.n

        def cleanup_backward(self, trainer):
            trainer.loss = trainer.loss * self.n

        def before_step(self, trainer):
            if (trainer.batch_num + 1) % self.n:
                raise CancelStepException()

        def before_zero_grad(self, trainer):
            if (trainer.batch_num + 1) % self.n:
                raise CancelStepException()

    return trainer_with(Gathers())


class KeepsSmall:
    "A penalty on what a layer gives"

    def __init__(self, detached):
        self.detached = detached

    def before_fit(self, trainer):
        self.hook = trainer.model[0].register_forward_hook(self.keep)

    def keep(self, module, args, out):
        self.out = out.detach() if self.detached else out

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss + 0.1 * self.out.abs().mean()

    def cleanup_fit(self, trainer):
        self.hook.remove()


@planted("constant_term")
def penalty_of_what_was_detached():
    return trainer_with(KeepsSmall(True))


@right
def penalty():
    return trainer_with(KeepsSmall(False))


@right
def constant_that_is_one():
    class Floods:
        def after_get_loss(self, trainer):
            trainer.loss = (trainer.loss - 0.1).abs() + torch.tensor(0.1)

    return trainer_with(Floods())


@planted("gradients_lost")
def clears_in_a_window():
    class Gathers(BasicTrainCB):
        def backward(self, trainer):
            (trainer.loss / 4).backward()

        def step(self, trainer):
            if (trainer.batch_num + 1) % 4 == 0:
                trainer.opt.step()

    return Trainer(dls(), F.cross_entropy, optim.SGD, net(), [Gathers()])


@right
def clears_behind_a_window():
    class Gathers(BasicTrainCB):
        def backward(self, trainer):
            (trainer.loss / 2).backward()

        def step(self, trainer):
            self.full = trainer.batch_num % 2 or trainer.batch_num + 1 == trainer.n_batches
            if self.full:
                trainer.opt.step()

        def zero_grad(self, trainer):
            if self.full:
                trainer.opt.zero_grad()

    return Trainer(dls(), F.cross_entropy, optim.SGD, net(), [Gathers()])


@right
def leaves_out_what_is_no_number():
    class Guards(BasicTrainCB):
        def step(self, trainer):
            if all(p.grad.isfinite().all() for p in trainer.model.parameters()):
                trainer.opt.step()

        def get_loss(self, trainer):
            super().get_loss(trainer)
            if trainer.batch_num == 1 and trainer.training:
                trainer.loss = trainer.loss + (trainer.preds * 0).abs().sqrt().sum()

    return Trainer(dls(), F.cross_entropy, optim.SGD, net(), [Guards()])


@right
def attacks_and_learns():
    class Attack:
        def before_predict(self, trainer):
            if not trainer.training:
                return
            x, y = trainer.batch
            x = x.clone().requires_grad_()
            F.cross_entropy(trainer.model(x), y).backward()
            trainer.opt.zero_grad()
            trainer.batch = (x + 0.01 * x.grad.sign()).detach(), y

    return trainer_with(Attack())


@right
def sharpness_aware():
    class Sharp(BasicTrainCB):
        def step(self, trainer):
            (x,), (y,) = trainer.split(trainer.batch)
            moved = [(p, 0.01 * p.grad / p.grad.norm().clamp(min=1e-6)) for p in trainer.model.parameters()]
            with torch.no_grad():
                for p, by in moved:
                    p.add_(by)
            trainer.opt.zero_grad()
            F.cross_entropy(trainer.model(x), y).backward()
            with torch.no_grad():
                for p, by in moved:
                    p.sub_(by)
            trainer.opt.step()

    return Trainer(dls(), F.cross_entropy, optim.SGD, net(), [Sharp()])


class Scaled(BasicTrainCB):
    "Scales the loss, and clips"

    def __init__(self, unscales):
        self.unscales = unscales

    def before_fit(self, trainer):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def backward(self, trainer):
        self.scaler.scale(trainer.loss).backward()

    def step(self, trainer):
        if self.unscales:
            self.scaler.unscale_(trainer.opt)
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        self.scaler.step(trainer.opt)
        self.scaler.update()


@planted("clip_before_unscale")
def clips_what_is_scaled():
    return Trainer(dls(), F.cross_entropy, optim.SGD, net(), [Scaled(False)])


@right
def clips_what_was_unscaled():
    return Trainer(dls(), F.cross_entropy, optim.SGD, net(), [Scaled(True)])


@right
def mixed_precision_with_clipping():
    return trainer_with(MixedPrecisionCB("float16"), ClipGradCB(1.0))


@right
def gathers_with_mixed_precision():
    return trainer_with(MixedPrecisionCB("float16"), AccumulationCB(2), ClipGradCB(1.0))


def clips_by_itself(trainer):
    nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)


@planted("clip_before_unscale")
def clips_before_gathered_gradients_are_divided():
    class Clips:
        after_backward = staticmethod(clips_by_itself)

    return trainer_with(MixedPrecisionCB("float16"), AccumulationCB(2), Clips())


@planted("clip_before_unscale")
def clips_behind_what_divides_gathered_gradients():
    class Clips:
        order = AccumulationCB.order + 1
        before_step = staticmethod(clips_by_itself)

    return trainer_with(MixedPrecisionCB("float16"), AccumulationCB(2), Clips())


@planted("clip_before_unscale")
def clips_where_gathered_gradients_are_divided():
    class Clips(AccumulationCB):
        def before_step(self, trainer):
            super().before_step(trainer)
            clips_by_itself(trainer)

    return trainer_with(MixedPrecisionCB("float16"), Clips(2))


@right
def freezes_for_a_fit():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.body(x).relu())

    torch.manual_seed(1)
    return trainer_with(FreezeCB("body"), model=Linear())


def names_found(trainer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = trainer.check(batches=3)
        except CheckFailed as error:
            found = error.findings
    return {o.name for o in found}


@pytest.mark.parametrize(("make", "names"), planted, ids=lambda o: getattr(o, "__name__", ""))
def test_batches_show_a_planted_mistake(make, names):
    assert names_found(make()) >= set(names)


@pytest.mark.parametrize("make", right, ids=lambda o: o.__name__)
def test_batches_show_nothing_in_what_is_right(make):
    assert names_found(make()) == set()


@pytest.mark.parametrize("make", [*right, weight_of_a_callback, scales_the_data], ids=lambda o: o.__name__)
def test_a_fit_after_a_check_is_as_without_one(make):
    "A fit after a check gives what it gives without one, bit for bit"

    def weights(check):
        torch.manual_seed(5)
        trainer = make()
        if check:
            names_found(trainer)
        trainer.fit(1, 0.1, valid=trainer.dls.valid is not None)
        return [*trainer.model.state_dict().values(), torch.get_rng_state(), trainer.history.rows]

    checked, plain = weights(True), weights(False)
    assert all(torch.equal(a, b) for a, b in zip(checked[:-1], plain[:-1]))
    times = ("elapsed", "time")
    bare = [[{k: v for k, v in row.items() if k not in times} for row in o[-1]] for o in (checked, plain)]
    assert bare[0] == bare[1]


def test_arrays_of_a_user_stay_as_they_are():
    "As tensors do"

    class Halves:
        def before_batch(self, trainer):
            x, y = trainer.batch
            x[:] *= 0.5
            trainer.batch = torch.from_numpy(x), torch.from_numpy(y)

    batches = [tuple(x.numpy() for x in batch) for batch in DataLoader(rows(), 8)]
    before = copy.deepcopy(batches)
    names_found(trainer_with(Halves(), loaders=DataLoaders(batches, batches)))
    assert all((a == b).all() for old, new in zip(before, batches) for a, b in zip(old, new))


def test_the_mend_is_that_of_the_mistake():
    with pytest.warns(UserWarning, match="`layers` of the model is a plain list(.|\\n)*nn.ModuleList"):
        layers_in_a_plain_list().check(batches=3)
    with pytest.raises(CheckFailed, match="the loss has nothing behind it"):
        a_loss_made_anew().check(batches=3)


def test_a_fit_that_is_left_at_once_says_that_nothing_was_run():
    def before_fit(trainer):
        raise CancelFitException("not today")

    with pytest.warns(UserWarning, match="No batch was run"):
        trainer_with(before_fit).check(batches=2)


def test_functions_of_torch_and_other_kinds_of_tensors_do_as_they_do():
    "A look at what is computed must not stand in its way"

    def loss_func(preds, y):
        rows = torch.func.vmap(lambda p, t: (p * F.one_hot(t, 3)).sum())(preds.softmax(1), y)
        sparse = (preds * (preds > 0)).to_sparse()
        return -rows.log().mean() + 0 * (sparse * sparse).sum()

    assert names_found(trainer_with(loss_func=loss_func)) == set()
    scripted = torch.jit.script(nn.Linear(6, 3))
    assert names_found(trainer_with(model=scripted)) == set()
    lazy = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
    assert names_found(trainer_with(model=lazy)) == set()
    assert len(trainer_with(model=nn.LazyLinear(3)).trace().steps)


def test_the_source_is_asked_first():
    "What reading finds and spoils the result needs no run, and would perhaps not survive one"

    class Twice:
        def after_batch(self, trainer):
            trainer.opt.step()

    ran = []
    trainer = trainer_with(Twice(), loss_func=lambda *args: ran.append(1) or F.cross_entropy(*args))
    with pytest.raises(CheckFailed, match="double_step"):
        trainer.check(batches=3)
    assert not ran


def test_an_error_in_the_run_says_where_it_comes_from():
    trainer = trainer_with(loss_func=lambda preds, y: preds.nothing)
    with pytest.raises(AttributeError) as caught:
        trainer.check(batches=1)
    assert any("ran batches on the side" in note for note in caught.value.__notes__)


def test_batches_that_come_only_once_are_not_lost():
    trainer = trainer_with(loaders=DataLoaders(iter(list(dls().train))))
    with pytest.raises(ValueError, match="only once"):
        trainer.check(batches=1)


@pytest.mark.parametrize("batches", [-1, 1.5, "three"])
def test_what_is_no_number_of_batches(batches):
    with pytest.raises(ValueError, match="`batches`"):
        trainer_with().check(batches=batches)


def test_names_of_both_kinds_can_be_ignored():
    trainer = column_minus_row()
    assert trainer.check(batches=1, ignore="spread_rows") == []
    assert found_in(trainer) == []


class ReadsStopsCB:
    "Reads what nobody writes"

    def after_batch(self, trainer):
        "Read a name"
        trainer.stops_at + 1


@pytest.mark.parametrize("batches", [0, 1])
def test_what_fit_will_be_given_is_checked_and_leaves_again(batches):
    trainer = trainer_with(MetricsCB(show=False))
    before, guest = list(trainer.callbacks), ReadsStopsCB()
    for given in (guest, [guest]):
        with pytest.raises(CheckFailed, match="no_provider"):
            trainer.check(batches=batches, callbacks=given)
    assert trainer.callbacks == before and "ReadsStopsCB" not in dir(trainer)
    assert trainer.check(batches=batches) == []
    with pytest.raises(ValueError, match="added already"):
        trainer.check(callbacks=before[0])
    assert trainer.callbacks == before


def test_who_mends_a_loop_may_come_with_fit():
    "A norm that is frozen measures, unless somebody puts it into evaluation"
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    model[1].requires_grad_(False)
    trainer = trainer_with(model=model)
    assert names_found(trainer) == {"frozen_measures"}
    assert trainer.check(batches=2, callbacks=BatchNormEvalCB(only_frozen=True)) == []


class CountsFitsCB:
    "Counts its fits"

    def __init__(self):
        self.n = 0

    def before_fit(self, trainer):
        "One more"
        self.n += 1


@pytest.mark.parametrize("batches", [0, 1])
def test_what_fit_will_be_given_keeps_its_state_and_in_a_fit_it_is_refused(batches):
    trainer, guest, refused = trainer_with(), CountsFitsCB(), []

    class AsksInFitCB:
        def after_epoch(self, trainer):
            with pytest.raises(RuntimeError, match="for a fit that is to come"):
                trainer.check(batches=batches, callbacks=guest)
            refused.append(trainer.training)

    assert trainer.check(batches=batches, callbacks=guest) == [] and guest.n == 0
    trainer.fit(1, callbacks=AsksInFitCB())
    assert refused == [True, False] and guest.n == 0
