"Gradients are cleared as `opt.zero_grad()` clears them, and whoever has another `zero_grad` is called"

import subprocess
import sys

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.profiler import profile

from isaac_loop import DataLoaders, Trainer
from isaac_loop.callbacks import BasicTrainCB
from isaac_loop.train.clearing import only_forgets

N_BATCHES = 3


def trainer_with(*callbacks, opt_func=optim.SGD):
    torch.manual_seed(0)
    batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(N_BATCHES)]
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return Trainer(DataLoaders(batches), F.mse_loss, opt_func, net, [BasicTrainCB(), *callbacks])


class After:
    "Keeps what gradients each batch leaves"

    def __init__(self):
        self.left = []

    def after_zero_grad(self, trainer):
        self.left.append([p.grad for p in trainer.model.parameters()])


def test_nothing_is_left_of_a_gradient():
    after = After()
    trainer_with(after).fit(2, lr=0.1, valid=False)
    assert after.left == [[None] * 4] * 2 * N_BATCHES


def test_parameters_of_all_groups_and_those_without_a_gradient():
    def two_groups(params, lr):
        *first, last = params
        last.requires_grad_(False)
        return optim.SGD([dict(params=first), dict(params=[last], lr=0.0)], lr=lr)

    after = After()
    trainer_with(after, opt_func=two_groups).fit(1, lr=0.1, valid=False)
    assert after.left == [[None] * 4] * N_BATCHES


def test_what_the_optimizer_does_not_have_keeps_its_gradient():
    class OnlyLast:
        def __init__(self, params, lr):
            self.opt = optim.SGD(list(params)[-1:], lr=lr)

    after = After()
    trainer_with(after, opt_func=lambda params, lr: OnlyLast(params, lr).opt).fit(1, lr=0.1, valid=False)
    assert all(last is None and all(o is not None for o in others) for *others, last in after.left)


class Keeps(optim.SGD):
    "Leaves zeros instead of None"

    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none)


def test_a_class_of_ones_own_is_called():
    after = After()
    trainer_with(after, opt_func=Keeps).fit(1, lr=0.1, valid=False)
    assert all(not grad.any() for grads in after.left for grad in grads)


class Puts:
    "Puts another function in the place of `zero_grad`"

    def __init__(self):
        self.calls = []

    def before_fit(self, trainer):
        trainer.opt.zero_grad = lambda: self.calls.append(trainer.batch_num)


def test_another_function_on_the_object_is_called():
    puts = Puts()
    trainer_with(puts).fit(1, lr=0.1, valid=False)
    assert puts.calls == [*range(N_BATCHES)]


def test_another_function_in_the_middle_of_a_fit_is_called():
    class Later(Puts):
        before_fit = None

        def after_batch(self, trainer):
            if trainer.batch_num == 0:
                Puts.before_fit(self, trainer)

    later = Later()
    trainer_with(later).fit(1, lr=0.1, valid=False)
    assert later.calls == [1, 2]


def test_the_method_of_another_optimizer_is_called():
    class Foreign:
        def before_fit(self, trainer):
            other = optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
            trainer.opt.zero_grad = other.zero_grad

    after = After()
    trainer_with(Foreign(), after).fit(1, lr=0.1, valid=False)
    assert all(grad is not None for grads in after.left for grad in grads)


@pytest.mark.parametrize("owner", [optim.SGD, optim.Optimizer], ids=["class", "base"])
def test_another_function_on_a_class_is_called(owner, monkeypatch):
    calls = []
    monkeypatch.setattr(owner, "zero_grad", lambda self: calls.append(type(self)), raising=False)
    trainer_with().fit(1, lr=0.1, valid=False)
    assert calls == [optim.SGD] * N_BATCHES


class Slots:
    "An optimizer by its methods alone"

    __slots__ = ("params", "lr", "n_cleared", "param_groups")

    def __init__(self, params, lr):
        self.params, self.lr, self.n_cleared = [*params], lr, 0
        self.param_groups = [dict(params=self.params, lr=lr)]

    def step(self):
        with torch.no_grad():
            for p in self.params:
                p -= self.lr * p.grad

    def zero_grad(self):
        self.n_cleared += 1
        for p in self.params:
            p.grad = None


def test_an_optimizer_without_a_dict_is_called():
    trainer = trainer_with(opt_func=None)
    trainer.opt = Slots(trainer.model.parameters(), 0.1)
    trainer.fit(1, valid=False)
    assert trainer.opt.n_cleared == N_BATCHES


def test_a_profiler_sees_each_batch_and_only_while_it_runs():
    trainer = trainer_with()
    trainer.fit(1, lr=0.1, valid=False)
    with profile() as seen:
        assert not only_forgets(trainer.opt)
        trainer.fit(1, lr=0.1, valid=False)
    counts = {o.key: o.count for o in seen.key_averages()}
    assert counts["Optimizer.zero_grad#SGD.zero_grad"] == N_BATCHES
    assert only_forgets(trainer.opt)


def test_a_function_that_was_put_there_before_the_library_came_is_called():
    program = """
import torch
from torch import nn, optim
calls, pytorchs = [], optim.Optimizer.zero_grad
def zero_grad(self, set_to_none=False):
    calls.append(1)
    pytorchs(self, set_to_none=False)
optim.Optimizer.zero_grad = zero_grad
from isaac_loop.all import *
data, model = [(torch.ones(2, 1), torch.ones(2, 1))] * 3, nn.Linear(1, 1)
Trainer(DataLoaders(data), nn.MSELoss(), optim.Adam, model, BasicTrainCB()).fit(1, valid=False)
print(len(calls), model.weight.grad.item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["3", "0.0"], done.stderr


def test_slots_may_borrow_the_function_of_pytorch():
    class Borrowing(Slots):
        __slots__ = ("defaults", "_zero_grad_profile_name")

        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.defaults, self._zero_grad_profile_name = {}, "zero_grad"

        zero_grad = optim.Optimizer.zero_grad

    after = After()
    trainer = trainer_with(after, opt_func=None)
    trainer.opt = Borrowing(trainer.model.parameters(), 0.1)
    trainer.fit(1, valid=False)
    assert after.left == [[None] * 4] * N_BATCHES


def test_an_answer_of_getattribute_is_called():
    class Answers(optim.SGD):
        def __getattribute__(self, name):
            return (lambda: None) if name == "zero_grad" else super().__getattribute__(name)

    after = After()
    trainer_with(after, opt_func=Answers).fit(1, lr=0.1, valid=False)
    assert all(grad is not None for grads in after.left for grad in grads)
