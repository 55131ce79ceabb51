"""Schedules by a count of all batches, each beside what is like it and right.

Each planted one is found by the name of its rule; in the right ones nothing is found.
"""

import math

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop import Trainer
from isaac_loop.callbacks import BasicTrainCB
from isaac_loop.data import DataLoaders
from marked import Marked
from working import found_in

planted, right = Marked(), Marked()


def trainer_with(*cbs, valid=True):
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(2)]
    dls = DataLoaders(batches, batches if valid else None)
    return Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(4, 3), [BasicTrainCB(), *cbs])


class Counting:
    def __init__(self, warmup=100):
        self.warmup, self.n = warmup, 0


@planted
def counted_behind_the_loss():
    class AnnealCB(Counting):
        def after_get_loss(self, trainer):
            beta = min(1.0, self.n / self.warmup)
            trainer.loss = trainer.loss + beta * trainer.preds.pow(2).mean()
            self.n += 1

    return trainer_with(AnnealCB())


@planted
def counted_in_another_event():
    class AnnealCB(Counting):
        def before_batch(self, trainer):
            self.n = self.n + 1

        def after_get_loss(self, trainer):
            trainer.loss = trainer.loss + min(self.n, self.warmup) / self.warmup * trainer.preds.pow(2).mean()

    return trainer_with(AnnealCB())


@planted
def a_method_for_the_weight():
    class AnnealCB(Counting):
        def weight(self):
            return 1 - math.exp(-5 * (1 - self.n / self.warmup) ** 2)

        def after_get_loss(self, trainer):
            trainer.loss = trainer.loss + self.weight() * trainer.preds.pow(2).mean()
            self.n += 1

    return trainer_with(AnnealCB())


@planted
def a_rate():
    class AnnealCB(Counting):
        def before_fit(self, trainer):
            self.n = 0

        def before_batch(self, trainer):
            self.n += 1
            for group in trainer.opt.param_groups:
                group["lr"] = trainer.lr * min(1, self.n / 500)

    return trainer_with(AnnealCB())


@planted
def a_weight_on_the_trainer():
    class AnnealCB(Counting):
        def before_batch(self, trainer):
            self.n += 1
            trainer.kl_weight = float(self.n) / self.warmup

    return trainer_with(AnnealCB())


@right
def without_validation():
    class AnnealCB(Counting):
        def after_get_loss(self, trainer):
            trainer.loss = trainer.loss + min(1.0, self.n / self.warmup) * trainer.preds.pow(2).mean()
            self.n += 1

    return trainer_with(AnnealCB(), valid=False)


@right
def not_in_validation():
    class AnnealCB(Counting):
        on_valid = False

        def after_get_loss(self, trainer):
            trainer.loss = trainer.loss + min(1.0, self.n / self.warmup) * trainer.preds.pow(2).mean()
            self.n += 1

    return trainer_with(AnnealCB())


@right
def counted_in_training():
    class AnnealCB(Counting):
        def after_get_loss(self, trainer):
            trainer.loss = trainer.loss + min(1.0, self.n / self.warmup) * trainer.preds.pow(2).mean()
            if trainer.training:
                self.n += 1

    return trainer_with(AnnealCB())


@right
def counted_by_updates():
    class AnnealCB(Counting):
        def after_get_loss(self, trainer):
            trainer.loss = trainer.loss + min(1.0, self.n / self.warmup) * trainer.preds.pow(2).mean()

        def after_step(self, trainer):
            self.n += 1

    return trainer_with(AnnealCB())


@right
def counted_anew_in_each_pass():
    class AnnealCB(Counting):
        def before_epoch(self, trainer):
            self.n = 0

        def after_get_loss(self, trainer):
            trainer.loss = trainer.loss + min(1.0, self.n / self.warmup) * trainer.preds.pow(2).mean()
            self.n += 1

    return trainer_with(AnnealCB())


@right
def a_share_that_is_printed():
    class AnnealCB(Counting):
        def after_batch(self, trainer):
            self.n += 1
            print(self.n / self.warmup)

    return trainer_with(AnnealCB())


@right
def every_so_many_batches():
    class AnnealCB(Counting):
        def after_batch(self, trainer):
            self.n += 1
            if self.n % self.warmup == 0:
                print(self.n)

    return trainer_with(AnnealCB())


@pytest.mark.parametrize("make", planted, ids=lambda o: o.__name__)
def test_a_planted_mistake_is_found(make):
    assert "counts_validation" in found_in(make())


@pytest.mark.parametrize("make", right, ids=lambda o: o.__name__)
def test_what_is_like_it_and_right_is_left_alone(make):
    assert found_in(make()) == []
