"""One object with several holders is one object again when a run goes on: an optimizer and a callback hold
the same tensor, a sampler and a callback the same weights. Against the same run that was never stopped.
"""

from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, WeightedRandomSampler

from cutting import ROWS, cut_once, small_trainer
from isaac_loop.checkpoints.rewind import RewindCB
from runs import fit


def leaf(x=0.0):
    return torch.tensor([x], requires_grad=True)


HOLDERS = {
    "an attribute": lambda: (leaf(), lambda held: [held]),
    "a list": lambda: ([leaf(), leaf(0.1)], lambda held: held),
    "a tuple": lambda: ((leaf(), leaf(0.1)), lambda held: held),
    "a dict of parameters": lambda: ({"a": nn.Parameter(torch.zeros(1))}, lambda held: held.values()),
    "a list in a dict": lambda: ({"all": [leaf()]}, lambda held: held["all"]),
}


class TemperatureCB:
    "Learns a factor of the loss with an optimizer of its own, as soft actor-critic does"

    on_valid = False

    def __init__(self, holder):
        self.make = HOLDERS[holder]

    def before_fit(self, trainer):
        self.held, self.each = self.make()
        self.opt = optim.SGD(self.each(self.held), 0.05)

    def after_get_loss(self, trainer):
        for alpha in self.each(self.held):
            trainer.loss = (trainer.loss * alpha.exp() - alpha).sum()

    def after_step(self, trainer):
        self.opt.step()
        self.opt.zero_grad()


@pytest.mark.parametrize("holder", HOLDERS)
def test_an_optimizer_goes_on_with_the_tensors_that_it_trains(holder, tmp_path):
    values = lambda t: [x.item() for x in t.TemperatureCB.each(t.TemperatureCB.held)]
    trainer = cut_once(tmp_path, lambda: small_trainer(TemperatureCB(holder)), values)
    cb = trainer.TemperatureCB
    assert all(a is b for a, b in zip(cb.each(cb.held), cb.opt.param_groups[0]["params"]))


class UncertainLoss:
    "Learns how uncertain it is, with the optimizer of the run"

    def __init__(self):
        self.log_var = leaf()

    def __call__(self, preds, targets):
        return (F.mse_loss(preds, targets) * torch.exp(-self.log_var) + self.log_var).sum()


def test_what_a_loss_learns_goes_on_to_be_learned(tmp_path):
    def make():
        loss = UncertainLoss()
        return small_trainer(loss=loss, opt=lambda params, lr: optim.SGD([*params, loss.log_var], lr))

    cut_once(tmp_path, make, lambda t: t.loss_func.log_var.tolist())


def test_after_a_rewind_an_optimizer_has_its_tensors_too():
    trainer = fit(small_trainer(TemperatureCB("a list"), RewindCB()), 2, valid=False)
    whole = [x.item() for x in trainer.TemperatureCB.held]
    trainer.rewind(1)
    fit(trainer, 2, valid=False)
    assert [x.item() for x in trainer.TemperatureCB.held] == whole


# ---- of two holders, one of which changes it


class FactorLoss:
    def __init__(self, held):
        self.held = held

    def __call__(self, preds, targets):
        values = self.held.values() if isinstance(self.held, dict) else self.held
        return F.mse_loss(preds, targets) * float(sum(values))


class ReweightCB:
    def __init__(self, held, change):
        self.held, self.change = held, change

    def after_step(self, trainer):
        self.change(self.held)


def times(x):
    x *= 1.1


SHARED = {
    "a tensor": (lambda: torch.ones(2), times),
    "an array": (lambda: np.ones(2), times),
    "a list": (lambda: [1.0, 2.0], lambda x: x.append(0.1)),
    "a dict": (lambda: {"a": 1.0}, lambda x: x.update(a=1.1 * x["a"])),
    "a set": (lambda: {1}, lambda x: x.add(len(x) + 1)),
    "a deque": (lambda: deque([1.0], maxlen=3), lambda x: x.append(1.1 * x[-1])),
}


@pytest.mark.parametrize("what", SHARED)
@pytest.mark.parametrize("closed", [False, True])
def test_what_callback_and_loss_hold_stays_one_object(what, closed, tmp_path):
    "The loss holds it as an attribute, or as a variable around a function"
    new, change = SHARED[what]

    def make():
        held = new()
        loss = FactorLoss(held)
        loss_func = (lambda preds, targets: loss(preds, targets)) if closed else loss
        other = SimpleNamespace(name="other", before_fit=lambda trainer: None, held=held)
        return small_trainer(ReweightCB(held, change), other, loss=loss_func)

    trainer = cut_once(tmp_path, make, lambda t: t.ReweightCB.held)
    assert trainer.other.held is trainer.ReweightCB.held


@pytest.mark.filterwarnings("ignore:.*read again")
@pytest.mark.parametrize("new", [partial(torch.ones, dtype=torch.double), np.ones])
def test_a_sampler_draws_by_the_weights_that_a_callback_changes(new, tmp_path):
    def make():
        weights = new(24)
        sampler = WeightedRandomSampler(weights, 24)

        def harder(trainer):
            weights[trainer.epoch :: 3] *= 9

        holder = SimpleNamespace(name="holder", weights=weights, after_epoch=harder)
        return small_trainer(holder, dl=DataLoader(ROWS, 8, sampler=sampler))

    cut_once(tmp_path, make, lambda t: t.dls.train.sampler.weights.tolist())


# ---- objects that took the place of others


class MeanCB:
    "Begins with values that others hold, and sets its own anew"

    def __init__(self, start):
        self.low = self.high = start

    def after_step(self, trainer):
        self.low, self.high = self.low * 0.9, self.high * 1.1
        trainer.opt.param_groups[0]["weight_decay"] = float(self.high.sum() - self.low.sum()) / 100


@pytest.mark.parametrize("new", [torch.ones, np.ones])
def test_what_was_set_anew_leaves_the_object_of_the_beginning_alone(new, tmp_path):
    def make():
        start = new(2)
        return small_trainer(MeanCB(start), loss=FactorLoss(start))

    trainer = cut_once(tmp_path, make, lambda t: (t.MeanCB.low, t.MeanCB.high))
    assert trainer.loss_func.held.tolist() == [1, 1]


class LatestCB:
    "Of two names for one tensor, one is set anew"

    def __init__(self):
        self.total = self.latest = torch.zeros(2)

    def after_step(self, trainer):
        self.latest = trainer.loss.detach() * torch.ones(2)
        self.total += self.latest
        self.first = self.total[:1]


def test_names_that_have_parted_stay_apart_and_a_view_is_one(tmp_path):
    cb = cut_once(tmp_path, lambda: small_trainer(LatestCB()), lambda t: vars(t.LatestCB)).LatestCB
    assert cb.first.data_ptr() == cb.total.data_ptr() != cb.latest.data_ptr()
