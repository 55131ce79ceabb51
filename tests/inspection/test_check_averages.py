"""Averages as `trainer.check()` sees them: of gradients, of weights before the step, and without buffers.

An average of gradients is none of the weights. One that is asked in the batch in which it moves, as the key
encoder of MoCo, has to move then; and a model that is asked in training measures its own statistics.
"""

import copy
import math
import warnings

import pytest
import torch

from inspected import make_trainer
from isaac_loop.train.averaging import EMACB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.inspection import CheckFailed


def found_in(callback, *others):
    trainer = make_trainer([callback, *others])
    if isinstance(callback, BasicTrainCB):
        trainer.callbacks = [callback]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [o.name for o in trainer.check()]
        except CheckFailed as error:
            return [o.name for o in error.findings]


class OfGradients:
    def before_fit(self, trainer):
        self.m = [torch.zeros_like(p) for p in trainer.model.parameters()]
        self.norm = 0.0

    def pairs(self, trainer):
        return zip(self.m, trainer.model.parameters())


class Momentum(OfGradients):
    def after_backward(self, trainer):
        for m, p in self.pairs(trainer):
            m.mul_(0.9).add_(p.grad)
            p.grad.copy_(m)


class Mean(OfGradients):
    def after_backward(self, trainer):
        for m, p in self.pairs(trainer):
            m.lerp_(p.grad.detach(), 0.1)
            p.grad.copy_(m)


class MeanAsSum(OfGradients):
    def after_backward(self, trainer):
        for i, p in enumerate(trainer.model.parameters()):
            self.m[i] = 0.9 * self.m[i] + 0.1 * p.grad
            p.grad.copy_(self.m[i])


class AllAtOnce(OfGradients):
    def after_backward(self, trainer):
        grads = [p.grad for p in trainer.model.parameters()]
        torch._foreach_lerp_(self.m, grads, 0.1)
        torch._foreach_copy_(grads, self.m)


class SumOfNorms(OfGradients):
    def before_step(self, trainer):
        for p in trainer.model.parameters():
            self.norm = self.norm + p.detach().norm().item()


class Keys(BasicTrainCB):
    "Two encoders, of which one follows the other"

    def before_fit(self, trainer):
        self.key = copy.deepcopy(trainer.model)

    @torch.no_grad()
    def follow(self, trainer):
        for k, p in zip(self.key.parameters(), trainer.model.parameters()):
            k.mul_(0.9).add_(p, alpha=0.1)


class MoCo(Keys):
    "In the published order"

    def predict(self, trainer):
        x = trainer.batch[0]
        query = trainer.model(x)
        with torch.no_grad():
            self.follow(trainer)
            key = self.key(x)
        trainer.preds = query + key


class MoCoByData(Keys):
    def predict(self, trainer):
        query = trainer.model(trainer.batch[0])
        for k, p in zip(self.key.parameters(), trainer.model.parameters()):
            k.data = k.data * 0.9 + p.data * 0.1
        trainer.preds = query + self.key.forward(trainer.batch[0]).detach()


class MoCoInTwoEvents(Keys):
    def before_batch(self, trainer):
        self.follow(trainer)

    def after_predict(self, trainer):
        trainer.preds = trainer.preds + self.key(trainer.batch[0]).detach()


class AskedBeforeItMoves(Keys):
    "So the next batch gets the average without this batch's step"

    def predict(self, trainer):
        key = self.key(trainer.batch[0]).detach()
        trainer.preds = trainer.model(trainer.batch[0]) + key
        self.follow(trainer)


class NeverAsked(Keys):
    def before_step(self, trainer):
        self.follow(trainer)


class Target(Keys):
    "BYOL: the target is asked as it is, and moves behind the step"

    def after_predict(self, trainer):
        trainer.preds = trainer.preds + self.key(trainer.batch[0]).detach()

    def after_step(self, trainer):
        self.follow(trainer)


class TargetInEvaluation(Target):
    def before_fit(self, trainer):
        self.key = copy.deepcopy(trainer.model).eval()


EARLY, BARE = "average_before_step", "average_without_buffers"


@pytest.mark.parametrize("kind", [Momentum, Mean, MeanAsSum, AllAtOnce, SumOfNorms])
def test_an_average_of_gradients_or_a_sum_of_norms_is_no_average_of_weights(kind):
    assert found_in(kind()) == []


@pytest.mark.parametrize("kind", [MoCo, MoCoByData, MoCoInTwoEvents, Target])
def test_an_average_that_is_asked_in_the_same_batch_is_right(kind):
    assert found_in(kind()) == []


def test_other_averages_are_found_as_before():
    assert found_in(AskedBeforeItMoves()) == [EARLY]
    assert found_in(NeverAsked()) == [EARLY, BARE]
    assert found_in(TargetInEvaluation()) == [BARE]


def test_a_target_in_training_measures_its_own_statistics():
    "So that nothing is said is true"
    callback = Target()
    trainer = make_trainer([])
    trainer.callbacks = [callback]
    trainer.fit(1, 0.1, valid=False)
    assert callback.key[1].num_batches_tracked == trainer.n_updates > 0


class KeepsTrainedWeights:
    "Of the epoch whose validation was best"

    best = math.inf

    def log(self, trainer):
        loss = trainer.history.latest("valid_loss")
        if loss < self.best:
            self.best, self.weights = loss, copy.deepcopy(trainer.model.state_dict())

    def after_fit(self, trainer):
        trainer.model.load_state_dict(self.weights)


class KeepsByTrainingLoss(KeepsTrainedWeights):
    def log(self, trainer):
        loss = trainer.history.latest("train_loss")
        if loss < self.best:
            self.best, self.weights = loss, copy.deepcopy(trainer.model.state_dict())


class KeepsMeasuredWeights(KeepsTrainedWeights):
    def log(self, trainer):
        loss = trainer.history.latest("valid_loss")
        if loss < self.best:
            self.best, self.weights = loss, copy.deepcopy(trainer.EMACB.evaluated.state_dict())


def test_weights_that_are_kept_beside_an_average_are_to_be_those_that_were_measured():
    others = lambda: (MetricsCB(show=False), EMACB(0.9))  # noqa: E731
    assert found_in(KeepsTrainedWeights(), *others()) == ["wrong_best"]
    assert found_in(KeepsTrainedWeights(), MetricsCB(show=False)) == []
    assert found_in(KeepsByTrainingLoss(), *others()) == []
    assert found_in(KeepsMeasuredWeights(), *others()) == []
