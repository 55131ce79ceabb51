"""Optimizers made around others, whose state is theirs: a run that is cut goes on as the one that was not"""

import copy
from collections import OrderedDict, defaultdict
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR

from cutting import stopped_and_not
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.trainer import Trainer
from isaac_loop.schedule.schedulers import EpochSchedulerCB
from isaac_loop.state.loaded_optimizers import load_opt
from isaac_loop.train.training import BasicTrainCB

HOOKS = [
    f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]


class Wrapper(optim.Optimizer):
    "Follows the weights slowly, and keeps these beside the state of the other; it is no `super().__init__`"

    def __init__(self, base, every=3):
        for name in HOOKS:
            setattr(self, name, OrderedDict())
        self.base, self.state, self.defaults = base, defaultdict(dict), base.defaults
        self.param_groups = base.param_groups
        for group in base.param_groups:
            group.setdefault("done", 0)
            group.setdefault("every", every)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.base.step(closure)
        for group in self.base.param_groups:
            group["done"] += 1
            if group["done"] % group["every"]:
                continue
            for p in group["params"]:
                held = self.base.state[p]
                slow = held.setdefault("slow", p.detach().clone())
                slow.lerp_(p, 0.5)
                p.copy_(slow)
        return loss

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)
        self.param_groups = self.base.param_groups


class SharedState(Wrapper):
    "Its state is that of the other, too"

    def __init__(self, base):
        super().__init__(base)
        self.state = base.state

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.state = self.base.state


class Deeper(Wrapper):
    "The other lies in a dict, and is itself such a one"

    def __init__(self, base):
        super().__init__(Wrapper(base, every=2))

    @property
    def base(self):
        return self.parts["base"]

    @base.setter
    def base(self, opt):
        self.parts = {"base": opt}

    def step(self, closure=None):
        return self.base.step(closure)


class NoOptimizer:
    "An own class around one of PyTorch's, which nobody can know"

    def __init__(self, opt):
        self.held = lambda: opt
        self.link()

    def link(self):
        opt = self.held()
        self.param_groups, self.state, self.defaults = opt.param_groups, opt.state, opt.defaults

    def step(self, closure):
        return self.held().step(closure)


class Unfollowed(Wrapper):
    def __init__(self, base):
        super().__init__(NoOptimizer(base))

    def state_dict(self):
        return self.base.held().state_dict()

    def load_state_dict(self, state):
        self.base.held().load_state_dict(state)
        self.base.link()
        self.param_groups = self.base.param_groups


BASES = [
    optim.Adam,
    optim.RMSprop,
    optim.Adagrad,
    partial(optim.SGD, momentum=0.9),
    partial(optim.Adam, amsgrad=True),
]


def make_run(wrapper, base):
    torch.manual_seed(1)
    x = torch.randn(56, 4)
    rows = list(zip(x, x.sum(1, keepdim=True)))
    dls = DataLoaders(exact_loader(rows, 8, seed=5), exact_loader(rows, 8, shuffle=False))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    cbs = [BasicTrainCB(), EpochSchedulerCB(partial(StepLR, step_size=1, gamma=0.5))]
    make = lambda params, lr: wrapper(base(params, lr))
    return Trainer(dls, nn.functional.mse_loss, make, model, cbs)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("wrapper", [Wrapper, SharedState, Deeper])
def test_a_wrapped_optimizer_goes_on(wrapper, base, tmp_path):
    trainer = stopped_and_not(tmp_path, partial(make_run, wrapper, base), (3, 7, 12))
    assert trainer.opt.param_groups is trainer.opt.base.param_groups


def test_who_holds_the_state_of_the_inner_one_holds_it_still():
    model = nn.Linear(2, 1)
    opt = Wrapper(optim.Adam(model.parameters()), every=1)
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    held, saved = opt.base.state[model.weight]["exp_avg"], copy.deepcopy(opt.state_dict())
    group = opt.param_groups[0]
    opt.step()
    load_opt(opt, saved)
    assert opt.base.state[model.weight]["exp_avg"] is held
    assert group is opt.param_groups[0] and group is opt.base.param_groups[0]
    assert torch.equal(held, saved["state"][0]["exp_avg"])


def test_types_of_the_inner_one_stay():
    half = nn.Linear(1, 1, dtype=torch.bfloat16)
    opt = Wrapper(optim.SGD(half.parameters(), momentum=0.9))
    saved = opt.state_dict() | dict(state={0: dict(momentum_buffer=torch.ones(1, 1, dtype=torch.float64))})
    load_opt(opt, saved)
    assert opt.base.state[half.weight]["momentum_buffer"].dtype == torch.float64


def test_the_load_of_one_that_cannot_be_followed_is_trusted():
    model = nn.Linear(2, 1)
    opt = Unfollowed(optim.Adam(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    opt.step()
    load_opt(opt, saved)
    assert opt.param_groups is opt.base.held().param_groups
    assert torch.equal(opt.base.held().state[model.weight]["exp_avg"], saved["state"][0]["exp_avg"])
