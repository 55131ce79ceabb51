"""What holds the memory of a weight, or of an optimizer's tensors, holds it again when a run goes on: who
writes there reaches the optimizer. Against the same run that was never stopped.
"""

import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.trainer import Trainer
from isaac_loop.train.training import BasicTrainCB
from runs import fit


def momenta(opt):
    return [held["momentum_buffer"] for held in opt.state.values()]


class TakesCB:
    "Takes something once, after the first step, and damps it before each of the others"

    held = None

    def after_step(self, trainer):
        if self.held is None:
            self.held = self.take(trainer)

    @torch.no_grad()
    def before_step(self, trainer):
        for x in self.parts([] if self.held is None else self.held):
            x *= 0.5

    def take(self, trainer):
        return momenta(trainer.opt)

    def parts(self, held):
        return held


class Single(TakesCB):
    def take(self, trainer):
        return momenta(trainer.opt)[0]

    def parts(self, held):
        return [held] if torch.is_tensor(held) else []


class Rows(TakesCB):
    def take(self, trainer):
        first = momenta(trainer.opt)[0]
        return dict(rows=list(first), turned=first.T, some=first.view(-1)[2:7])

    def parts(self, held):
        return [*held["rows"], held["turned"], held["some"]] if held else []


class States(TakesCB):
    def take(self, trainer):
        return trainer.opt.state

    def parts(self, held):
        return [part["momentum_buffer"] for part in held.values()] if held else []


class Arrays(TakesCB):
    def take(self, trainer):
        return [x.numpy() for x in momenta(trainer.opt)]


class Weights(TakesCB):
    def take(self, trainer):
        return [trainer.model[0].weight.data[1], trainer.model[2].bias]


class OnModel(TakesCB):
    def after_step(self, trainer):
        if not hasattr(trainer.model, "momenta"):
            trainer.model.momenta = trainer.momenta = momenta(trainer.opt)

    def before_step(self, trainer):
        for x in getattr(trainer.model, "momenta", []):
            x.mul_(0.7)


class Head:
    "Has optimizers of its own in a list, made for each fit"

    def before_fit(self, trainer):
        self.opts = [optim.SGD(trainer.model[2].parameters(), 0.05, momentum=0.9)]

    def after_step(self, trainer):
        self.opts[0].step()


class OfHead(TakesCB):
    def take(self, trainer):
        return momenta(trainer.Head.opts[0])


class Tied:
    "Lets an optimizer of the trainer have the momentum of another one"

    def before_fit(self, trainer):
        trainer.tail = optim.SGD(trainer.model[2].parameters(), 0.01, momentum=0.9)

    def after_step(self, trainer):
        trainer.tail.step()
        w = trainer.model[2].weight
        trainer.tail.state[w]["momentum_buffer"] = trainer.opt.state[w]["momentum_buffer"]


class RateCB:
    "Holds a rate that is a tensor, from the beginning"

    def before_fit(self, trainer):
        self.lr = trainer.opt.param_groups[0]["lr"]

    def after_step(self, trainer):
        self.lr.mul_(0.9)


class FlatCB:
    "Has one memory for the momentum of all weights, which it makes"

    def before_fit(self, trainer):
        params = list(trainer.model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in params))
        for p, part in zip(params, self.flat.split([p.numel() for p in params])):
            trainer.opt.state[p]["momentum_buffer"] = part.view_as(p)

    def before_step(self, trainer):
        self.flat.mul_(0.5)


class OneCount(optim.SGD):
    "Counts the steps of all weights in one tensor"

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        params = self.param_groups[0]["params"]
        count = self.state[params[0]].setdefault("n", torch.zeros(()))
        for p in params:
            self.state[p].setdefault("n", count).add_(1)
            p.mul_(1 - 0.001 * self.state[p]["n"])


def sgd(params, lr):
    return optim.SGD(params, lr, momentum=0.9)


def sgd_with_a_rate(params, lr):
    lr = torch.tensor(lr)
    return optim.SGD([dict(params=params[:2]), dict(params=params[2:])], lr, momentum=0.9)


def make(callbacks, opt_func, folder):
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    dls = DataLoaders(exact_loader([(row, row[:1]) for row in x], 4, seed=1))
    callbacks = [BasicTrainCB(), *[kind() for kind in callbacks], CheckpointCB(folder, every=1)]
    return Trainer(dls, F.mse_loss, opt_func, model, callbacks)


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def cut_once(trainer, n=3, **kwargs):
    def before_batch(trainer):
        if trainer.n_updates == n:
            raise KeyboardInterrupt

    before_batch.stateless = True
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, callbacks=before_batch, **kwargs)


CASES = {
    "a list": ([TakesCB], sgd),
    "a tensor": ([Single], sgd),
    "views": ([Rows], sgd),
    "the state itself": ([States], sgd),
    "arrays": ([Arrays], sgd),
    "weights": ([Weights], sgd),
    "model and trainer": ([OnModel], sgd),
    "a callback's optimizer": ([OfHead, Head], sgd),
    "two optimizers": ([Tied], sgd),
    "a rate": ([RateCB], sgd_with_a_rate),
    "one memory": ([FlatCB], sgd),
    "one counter": ([], OneCount),
}


@pytest.mark.parametrize("in_same_process", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_who_holds_memory_of_weights_and_optimizers_holds_it_when_a_run_goes_on(
    case, in_same_process, tmp_path
):
    whole = fit(make(*CASES[case], tmp_path / "whole"), valid=False)
    cut = make(*CASES[case], tmp_path / "cut")
    cut_once(cut, valid=False)
    if not in_same_process:
        cut = make(*CASES[case], tmp_path / "cut")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(cut, valid=False)
    assert torch.equal(weights(cut), weights(whole))


def test_who_took_the_momentum_of_the_fit_before_holds_it_too(tmp_path):
    class Before(TakesCB):
        def before_fit(self, trainer):
            self.held = [o for part in trainer.opt.state.values() for o in part.values()] or None

    def run(folder, is_cut):
        trainer = make([Before], sgd, folder)
        fit(trainer, valid=False)
        if is_cut:
            cut_once(trainer, valid=False, keep_opt=True)
        return weights(fit(trainer, valid=False, keep_opt=True))

    assert torch.equal(run(tmp_path / "cut", True), run(tmp_path / "whole", False))


def test_memory_around_the_tensors_of_an_optimizer_is_named_when_it_is_saved(tmp_path):
    class Flattens(TakesCB):
        def take(self, trainer):
            flat = torch.cat([x.flatten() for x in momenta(trainer.opt)])
            parts = flat.split([x.numel() for x in momenta(trainer.opt)])
            for held, part in zip(trainer.opt.state.values(), parts):
                held["momentum_buffer"] = part.view_as(held["momentum_buffer"])
            return flat

        def parts(self, held):
            return [held] if torch.is_tensor(held) else []

    told = r"`Flattens.held` is memory in which `trainer.opt.state\[0\]\['momentum_buffer'\]` lies, too"
    with pytest.warns(UserWarning, match=told):
        fit(make([Flattens], sgd, tmp_path), valid=False)


@pytest.mark.parametrize("case", ["a list", "views", "a callback's optimizer"])
def test_after_a_rewind_it_is_held_too(case, tmp_path):
    trainer = make(*CASES[case], tmp_path)
    trainer.remove_callback("CheckpointCB")
    trainer.add_callbacks(RewindCB())
    fit(trainer, 2, valid=False)
    whole = weights(trainer)
    trainer.rewind(1)
    assert torch.equal(weights(fit(trainer, 2, valid=False)), whole)
