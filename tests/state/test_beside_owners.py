"What lies in no attribute of a callback: a number in its class, a default value, an optimizer in a closure"

import functools
import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from cutting import ROWS, cut_once, small_trainer
from isaac_loop.data.exact_loaders import exact_loader
from runs import fit


class Base:
    n = 0


class CountCB(Base):
    seen, mean = 0, torch.zeros(1)

    def scale(self):
        return 1 + 0.1 * self.seen

    def after_get_loss(self, trainer):
        type(self).seen += 1
        trainer.loss = trainer.loss * self.scale()


class BaseCB(CountCB):
    def scale(self):
        Base.n += 1
        return 1 + 0.1 * Base.n


class MeanCB(CountCB):
    def scale(self):
        self.mean.add_(0.1)
        return 1 + self.mean


class CountingModel(nn.Linear):
    seen = 0

    def forward(self, x):
        type(self).seen += self.training
        return super().forward(x) * (1 + 0.1 * self.seen)


def anew():
    "As in a script that is begun anew"
    for kind in (CountCB, BaseCB, MeanCB, CountingModel):
        kind.seen = 0
    Base.n = 0
    CountCB.mean.zero_()


def in_class(kind):
    anew()
    return small_trainer(kind())


def in_model():
    anew()
    torch.manual_seed(1)
    return small_trainer(model=CountingModel(4, 1))


def by_default():
    def after_get_loss(trainer, seen=[]):  # noqa: B006
        seen.append(len(seen))
        trainer.loss = trainer.loss * (1 + 0.1 * len(seen))

    return small_trainer(after_get_loss)


def by_keyword():
    class KeywordCB:
        def after_get_loss(self, trainer, *, seen=torch.zeros(1)):  # noqa: B008
            trainer.loss = trainer.loss * (1 + seen.add_(0.1))

    KeywordCB.after_get_loss.__kwdefaults__["seen"].zero_()
    return small_trainer(KeywordCB())


def stepping(shift, opt):
    def step(loss):
        loss.backward(retain_graph=True)
        opt.step()
        opt.zero_grad()

    return step


class StepCB:
    def after_get_loss(self, trainer):
        preds = trainer.preds + trainer.shift
        trainer.step_shift(F.mse_loss(preds, trainer.batch[1]))
        trainer.loss = F.mse_loss(trainer.preds + trainer.shift.detach(), trainer.batch[1])


def in_closure():
    trainer = small_trainer(StepCB())
    trainer.shift = torch.zeros(1, requires_grad=True)
    trainer.step_shift = stepping(trainer.shift, optim.Adam([trainer.shift], lr=0.1))
    return trainer


class MovingCB:
    "Holds a partial with an optimizer that nobody else has"

    def __init__(self, add):
        self.shift = torch.zeros(1, requires_grad=True)
        self.move = add(optim.Adam([self.shift], lr=0.1))

    def after_get_loss(self, trainer):
        self.move(loss=F.mse_loss(trainer.preds.detach() + self.shift, trainer.batch[1]))
        trainer.loss = F.mse_loss(trainer.preds + self.shift.detach(), trainer.batch[1])


def move(opt, loss):
    loss.backward()
    opt.step()
    opt.zero_grad()


def in_defaults_of_data():
    class CountingRows:
        fingerprint = "rows"

        def __len__(self):
            return len(ROWS)

        def __getitem__(self, i, seen=[]):  # noqa: B006
            seen.append(i)
            return ROWS[i][0] * (1 + 0.01 * len(seen)), ROWS[i][1]

    return small_trainer(dl=exact_loader(CountingRows(), 8, seed=7))


KINDS = {
    "a number in its class": lambda: in_class(CountCB),
    "in a class below": lambda: in_class(BaseCB),
    "a tensor in its class": lambda: in_class(MeanCB),
    "a number in the class of the model": in_model,
    "a list by default": by_default,
    "a tensor by default": by_keyword,
    "an optimizer in a closure": in_closure,
    "an optimizer in a partial": lambda: small_trainer(MovingCB(lambda opt: functools.partial(move, opt))),
    "an optimizer there by name": lambda: small_trainer(
        MovingCB(lambda opt: functools.partial(move, opt=opt))
    ),
    "a list by default, in a dataset": in_defaults_of_data,
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on(kind, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut_once(tmp_path, KINDS[kind])


def test_what_a_class_says_need_not_be_kept_is_not():
    class ForgottenCB(CountCB):
        stateless = "seen"

    trainer = fit(in_class(ForgottenCB), 1, valid=False)
    assert "seen" not in str(trainer._own_state.take(trainer))
