"""What is called in a run may count: schedules, functions given to callbacks of the library, losses, hooks. A
run that was stopped goes on with it, or it is named when it is saved.
"""

import random
import warnings
from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from cutting import stopped_and_not, with_loss
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.evaluate.evaluator import EvaluatorCB
from isaac_loop.loop.events import CancelFitException
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.schedule.schedulers import BatchSchedulerCB
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.training import BasicTrainCB
from runs import fit, make_trainer


def goes_on(tmp_path, make, places=(4, 10, 15)):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return stopped_and_not(tmp_path, make, places)


def with_callback(*cbs):
    return make_trainer([BasicTrainCB(), MetricsCB(show=False), *cbs])


class Warm:
    "Counts, and gives more each time"

    n = 0

    def factor(self, *args, **kwargs):
        self.n += 1
        return self.n / 10

    __call__ = factor

    def scale(self, trainer):
        trainer.loss = trainer.loss * self.factor()

    def hook(self, module, *args):
        return args[-1] * (1 + self.factor()) if module.training else None


class Windowed(LRScheduler):
    def __init__(self, opt):
        self.last, self.rng, self.warm = deque(maxlen=4), random.Random(0), Warm()
        super().__init__(opt)

    def get_lr(self):
        self.last.append(self.last_epoch)
        return [o * (1 + 0.1 * sum(self.last) + self.rng.random() + self.warm()) for o in self.base_lrs]


def noisy(opt):
    rng = random.Random(0)
    return LambdaLR(opt, lambda n: 0.5 + rng.random())


@pytest.mark.parametrize("scheduler", [Windowed, noisy])
def test_a_schedule_goes_on_with_what_it_holds(scheduler, tmp_path):
    goes_on(tmp_path, lambda: with_callback(BatchSchedulerCB(scheduler)))


class Patience(Warm):
    def __call__(self, store):
        self.n += 1
        if self.n == 5:
            raise CancelFitException("enough")


def test_who_stops_a_fit_by_counting_evaluations_goes_on(tmp_path):
    def make():
        return with_callback(EvaluatorCB(updates=2, user_epochs_done_callback=Patience()))

    assert goes_on(tmp_path, make, [4, 8]).n_updates == 10


@pytest.mark.parametrize("weigh", [Warm, lambda: Warm().factor])
def test_who_weighs_batches_goes_on(weigh, tmp_path):
    goes_on(tmp_path, lambda: with_callback(AccumulationCB(2, weigh=weigh())))


def counting_loss(preds, targets, memory):
    memory["n"] += torch.is_grad_enabled()
    return F.cross_entropy(preds, targets) * memory["n"] / 10


def test_a_loss_goes_on_with_what_a_partial_adds(tmp_path):
    goes_on(tmp_path, lambda: with_loss(partial(counting_loss, memory=dict(n=0))))


class HoldsCB:
    "Holds a method, and a function that counts in an attribute"

    def __init__(self):
        def more():
            more.n += 1
            return more.n

        more.n = 0
        self.factor, self.more = Warm().factor, more

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * (self.factor() + self.more())


@pytest.mark.parametrize("cb", [HoldsCB, lambda: SimpleNamespace(after_get_loss=Warm().scale)])
def test_what_a_callback_only_calls_goes_on(cb, tmp_path):
    goes_on(tmp_path, lambda: with_callback(cb()))


def test_a_hook_of_the_model_goes_on(tmp_path):
    def make():
        trainer = with_callback()
        trainer.model[0].register_forward_hook(Warm().hook)
        return trainer

    goes_on(tmp_path, make)


def counts(made):
    "A function that counts outside of itself, in the place where `made` puts it"
    n = 0

    def scaled(loss):
        nonlocal n
        n += 1
        return loss * min(1.0, n / 10)

    return made(scaled)


class FactorCB:
    def __init__(self, f):
        self.f = f

    def after_get_loss(self, trainer):
        trainer.loss = self.f(trainer.loss)


def as_loss(f):
    def loss_func(preds, targets):
        return f(F.cross_entropy(preds, targets))

    return with_loss(loss_func)


def as_hook(f):
    trainer = with_callback()
    trainer.model[0].register_forward_hook(lambda module, args, out: f(out))
    return trainer


PLACES = {
    "loss_func.f.n": as_loss,
    "FactorCB.f.n": lambda f: with_callback(FactorCB(f)),
    "BatchSchedulerCB.scheduler_func.f.n": lambda f: with_callback(
        BatchSchedulerCB(lambda opt: LambdaLR(opt, lambda n: f(1.0)))
    ),
    "model.0._forward_hooks[0].f.n": as_hook,
}


@pytest.mark.parametrize("path", PLACES)
def test_a_function_that_counts_outside_of_itself_is_named_wherever_it_is(path, tmp_path):
    trainer = counts(PLACES[path])
    trainer.add_callbacks(CheckpointCB(tmp_path))
    with pytest.warns(UserWarning, match="by `nonlocal`") as told:
        fit(trainer, 2)
    assert [str(o.message).partition(" ")[0] for o in told] == [f"`{path}`"]
