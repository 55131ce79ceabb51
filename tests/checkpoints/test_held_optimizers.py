"""`load` brings back optimizers that callbacks hold, so that `fit(keep_opt=True)` goes on with them; and what
an optimizer has made of the weights in the place of an argument comes back with it.
"""

import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.trainer import Trainer
from isaac_loop.train.training import BasicTrainCB
from runs import Cut, CutCB, fit


class HeadCB:
    "Trains the head with an optimizer of its own"

    def __init__(self, head):
        self.opt, self.n = optim.Adam(head.parameters(), 0.02), 0

    def before_fit(self, trainer):
        self.n = 0

    def after_step(self, trainer):
        self.n += 1
        self.opt.step()

    def zero_grad(self, trainer):
        self.opt.zero_grad()


class ListCB(HeadCB):
    "Has them in a list"

    def __init__(self, head):
        super().__init__(head)
        self.opts = [self.opt, optim.SGD(head.parameters(), 0.01, momentum=0.9)]

    def after_step(self, trainer):
        for opt in self.opts:
            opt.step()


class Stepper:
    "Not for the callback alone"

    def __init__(self, opt):
        self.opt = opt


class TwiceCB(HeadCB):
    "Has it in an object as well, and deep in a dict"

    def __init__(self, head):
        super().__init__(head)
        self.stepper, self.by_name = Stepper(self.opt), {"a": {"b": self.opt}}


class AnewCB(HeadCB):
    "Makes one for each fit"

    def __init__(self, head):
        pass

    def before_fit(self, trainer):
        super().__init__(trainer.model[2])


class OnceCB(HeadCB):
    "Makes one when the first fit begins"

    def __init__(self, head):
        self.opt = None

    def before_fit(self, trainer):
        if self.opt is None:
            super().__init__(trainer.model[2])
        super().before_fit(trainer)


class TellsCB(HeadCB):
    "Tells its state itself"

    def state_dict(self):
        return dict(opt=self.opt.state_dict())

    def load_state_dict(self, state):
        self.opt.load_state_dict(state["opt"])


def make(kind):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(4)]
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))

    def body(params, lr):
        return optim.SGD(model[0].parameters(), lr, momentum=0.9)

    return Trainer(DataLoaders(batches), F.mse_loss, body, model, [BasicTrainCB(), kind(model[2])])


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def saved(kind, folder):
    "A trainer that was saved after one fit"
    trainer = fit(make(kind), 1, valid=False)
    trainer.save(folder)
    return trainer


@pytest.mark.parametrize("kind", [HeadCB, ListCB, TwiceCB, AnewCB])
def test_optimizers_that_callbacks_hold_go_on_after_a_load(kind, tmp_path):
    whole, other = saved(kind, tmp_path), make(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load(tmp_path)
        for trainer in (whole, other):
            fit(trainer, 1, valid=False, keep_opt=True)
    assert torch.equal(weights(other), weights(whole))


def test_nothing_else_of_a_callback_is_loaded(tmp_path):
    saved(HeadCB, tmp_path)
    other = make(HeadCB)
    other.load(tmp_path)
    assert other.HeadCB.n == 0 and other.HeadCB.opt.state


@pytest.mark.parametrize("kind", [OnceCB, TellsCB])
def test_who_cannot_be_loaded_is_named_when_optimizers_are_to_go_on(kind, tmp_path):
    saved(kind, tmp_path)
    other = make(kind)
    other.load(tmp_path)
    with pytest.warns(UserWarning, match=f"could not bring back `{kind.__name__}.opt`"):
        fit(other, 1, valid=False, keep_opt=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(other, 1, valid=False, keep_opt=True)
        other.load(tmp_path)
        fit(other, 1, valid=False)  # Makes new ones, as always


def test_an_optimizer_over_other_parameters_is_left_alone_and_named(tmp_path):
    wide = True

    class SomeCB(HeadCB):
        def __init__(self, head):
            self.opt, self.n = optim.Adam([*head.parameters()][: 2 if wide else 1], 0.02), 0

    saved(SomeCB, tmp_path)
    wide = False
    other = make(SomeCB)
    other.load(tmp_path)
    with pytest.warns(UserWarning, match="could not bring back `SomeCB.opt`"):
        fit(other, 1, valid=False, keep_opt=True)


class Proximal(optim.SGD):
    "Pulls to what it is given, or to the weights that it was made with"

    def __init__(self, params, lr, start=()):
        params = list(params)
        super().__init__(params, lr)
        self.start = list(start) or [p.detach().clone() for p in params]

    @torch.no_grad()
    def step(self):
        super().step()
        for p, start in zip(self.param_groups[0]["params"], self.start):
            p.sub_(0.1 * (p - start))


class Flagged(Proximal):
    def __init__(self, params, lr, start=True):
        super().__init__(params, lr)


class OfNone(Proximal):
    def __init__(self, params, lr, start=None):
        super().__init__(params, lr, start or ())


@pytest.mark.parametrize("opt_func", [Proximal, Flagged, OfNone])
def test_what_an_optimizer_made_in_the_place_of_an_argument_comes_back_in_a_second_fit(opt_func, tmp_path):
    def run(folder, *more):
        torch.manual_seed(0)
        batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(4)]
        callbacks = [BasicTrainCB(), CheckpointCB(folder, every=2), *more]
        trainer = Trainer(DataLoaders(batches), F.mse_loss, opt_func, nn.Linear(4, 1), callbacks)
        for _ in range(2):
            fit(trainer, 2, valid=False)
        return weights(trainer)

    whole = run(tmp_path / "whole")
    with pytest.raises(Cut):
        run(tmp_path / "cut", CutCB("before_batch", lambda t: t.history.fit == 1 and t.n_updates == 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(tmp_path / "cut"), whole)
