"""Batches in pieces whose gradients are thrown away, each beside what is like it and right.

Each planted one is found by the name of its rule; in the right ones nothing is found.
"""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop import Trainer
from isaac_loop.callbacks import BasicTrainCB
from isaac_loop.data import DataLoaders
from isaac_loop.loop import CancelBatchException, with_cbs
from marked import Marked
from working import found_in

planted, right = Marked(), Marked()


def trainer_of(kind, *cbs):
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(2)]
    return kind(DataLoaders(batches), F.cross_entropy, optim.SGD, nn.Linear(4, 3), [*cbs])


class Pieces(Trainer):
    def pieces(self):
        return zip(*[o.chunk(2) for o in self.batch])

    def learn(self, x, y):
        self.preds = self.model(x)
        self.loss = self.loss_func(self.preds, y) / 2
        self.loss.backward()


@planted
def cleared_in_each_turn():
    class Own(Pieces):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            for x, y in self.pieces():
                self.opt.zero_grad()
                loss = self.loss_func(self.model(x), y) / 2
                loss.backward()
            self.opt.step()

    return trainer_of(Own)


@planted
def cleared_by_the_model():
    class Own(Pieces):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            opt, pieces = self.opt, list(self.pieces())
            for i in range(len(pieces)):
                x, y = pieces[i]
                self.model.zero_grad(set_to_none=True)
                self.loss = self.loss_func(self.model(x), y) / 2
                self.loss.backward()
            opt.step()

    return trainer_of(Own)


@planted
def by_steps_that_are_run():
    class Own(Pieces):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            for self.batch in list(self.pieces()):
                self.run_callbacks("zero_grad")
                self.loss = self.loss_func(self.model(self.batch[0]), self.batch[1])
                self.run_callbacks("backward")
            self.run_callbacks("step")

        def backward(self):
            self.loss.backward()

        def zero_grad(self):
            self.opt.zero_grad()

        def step(self):
            self.opt.step()

    return trainer_of(Own)


@planted
def in_a_callback():
    class PiecesCB(BasicTrainCB):
        def backward(self, trainer):
            for x, y in zip(*[o.chunk(2) for o in trainer.batch]):
                trainer.opt.zero_grad()
                trainer.loss_func(trainer.model(x), y).backward()

        def step(self, trainer):
            trainer.opt.step()

    return trainer_of(Trainer, PiecesCB())


@right
def cleared_before():
    class Own(Pieces):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            self.opt.zero_grad()
            for x, y in self.pieces():
                self.loss = self.loss_func(self.model(x), y) / 2
                self.loss.backward()
            self.opt.step()

    return trainer_of(Own)


@right
def a_step_in_each_turn():
    class Own(Pieces):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            for x, y in self.pieces():
                self.opt.zero_grad()
                self.loss = self.loss_func(self.model(x), y) / 2
                self.loss.backward()
                self.opt.step()

    return trainer_of(Own)


@right
def gradients_that_are_kept():
    class Own(Pieces):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            kept = []
            for x, y in self.pieces():
                self.opt.zero_grad()
                self.loss = self.loss_func(self.model(x), y) / 2
                self.loss.backward()
                kept.append([o.grad.clone() for o in self.model.parameters()])
            for p, *grads in zip(self.model.parameters(), *kept):
                p.grad = sum(grads)
            self.opt.step()

    return trainer_of(Own)


@right
def cleared_in_the_first_turn():
    class Own(Pieces):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            for i, (x, y) in enumerate(self.pieces()):
                if i == 0:
                    self.opt.zero_grad()
                self.loss = self.loss_func(self.model(x), y) / 2
                self.loss.backward()
            self.opt.step()

    return trainer_of(Own)


@right
def two_optimizers_cleared_in_a_loop():
    class Two(Pieces):
        def before_fit(self):
            self.opt_a = optim.SGD([self.model.weight], self.lr)
            self.opt_b = optim.SGD([self.model.bias], self.lr)

        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            x, y = self.batch
            self.preds = self.model(x)
            self.loss = self.loss_func(self.preds, y)
            if self.training:
                self.run_callbacks("backward", "step", "zero_grad")

        def backward(self):
            self.loss.backward()

        def step(self):
            (self.opt_a if self.n_updates % 2 else self.opt_b).step()

        def zero_grad(self):
            for opt in (self.opt_a, self.opt_b):
                opt.zero_grad()

    return trainer_of(Two)


@pytest.mark.parametrize("make", planted, ids=lambda o: o.__name__)
def test_a_planted_mistake_is_found(make):
    assert "gradients_lost" in found_in(make())


@pytest.mark.parametrize("make", right, ids=lambda o: o.__name__)
def test_what_is_like_it_and_right_is_left_alone(make):
    assert found_in(make()) == []
