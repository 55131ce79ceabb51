"""What functions carry along and no checkpoint keeps: iterators that have begun, and frozen weights."""

import functools
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from cutting import ROWS, cut_once, small_trainer
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.train.training import BasicTrainCB
from runs import fit


def endless(dl):
    while True:
        yield from dl


def said(folder, make, every=2):
    "What is said of a run while it is saved"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(make(), 2, valid=False, callbacks=CheckpointCB(folder, every=every))
    return [str(o.message) for o in told]


class ReadCB:
    "Reads on in what a function carries along"

    def __init__(self, more):
        self.more = more

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * next(iter(self.more()))


def closed():
    numbers = endless([1.0, 2.0, 3.0])
    return lambda: [next(numbers)]


def given():
    def f(numbers=None):
        return [next(numbers)]

    f.__defaults__ = (itertools.cycle([1.0, 2.0]),)
    return f


def nested():
    inner = closed()
    return lambda: inner()


def added():
    return functools.partial(lambda it: [next(it)], iter([1.0] * 100))


@pytest.mark.parametrize("make", [closed, given, nested, added])
def test_an_iterator_that_a_function_carries_along_is_named_once(tmp_path, make):
    told = said(tmp_path, lambda: small_trainer(ReadCB(make())))
    assert len(told) == 1 and "`ReadCB.more" in told[0] and "make it anew" in told[0]


def test_a_callback_that_is_a_function_is_asked_too(tmp_path):
    numbers = endless([1.0, 2.0])

    def after_get_loss(trainer):
        trainer.loss = trainer.loss * next(numbers)

    assert "`after_get_loss.numbers` changed" in said(tmp_path, lambda: small_trainer(after_get_loss))[0]


def test_an_iterator_that_begins_with_each_epoch_is_named_in_the_middle_alone(tmp_path):
    class AnewCB(ReadCB):
        def __init__(self):
            pass

        def before_epoch(self, trainer):
            self.more = closed()

    assert said(tmp_path / "epoch", lambda: small_trainer(AnewCB()), every="epoch") == []
    assert len(said(tmp_path / "batches", lambda: small_trainer(AnewCB()))) == 1


def test_a_generator_that_has_not_begun_is_no_alarm(tmp_path):
    waiting = endless([1.0])

    class WaitCB(ReadCB):
        def before_fit(self, trainer):
            self.later = lambda: next(waiting)

    assert said(tmp_path, lambda: small_trainer(WaitCB(lambda: [2.0]))) == []


# ---- a second loader


class SecondCB(BasicTrainCB):
    def __init__(self):
        self.other = exact_loader(ROWS, 5, seed=3)

    def before_fit(self, trainer):
        self.it = endless(self.other)

    def get_loss(self, trainer):
        x, y = next(self.it)
        super().get_loss(trainer)
        trainer.loss = trainer.loss + F.mse_loss(trainer.model(x), y)


class ZipCB(SecondCB):
    "The way that is told"

    def before_fit(self, trainer):
        pass

    def before_epoch(self, trainer):
        if trainer.training:
            trainer.batches = zip(trainer.batches, endless(self.other))

    def predict(self, trainer):
        (x, _), _ = trainer.batch
        trainer.preds = trainer.model(x)

    def get_loss(self, trainer):
        (_, y), (x2, y2) = trainer.batch
        trainer.loss = F.mse_loss(trainer.preds, y) + F.mse_loss(trainer.model(x2), y2)


def with_second(cb):
    trainer = small_trainer()
    trainer.callbacks = [cb]
    return trainer


def test_for_an_iterator_over_a_loader_the_way_is_told_that_works(tmp_path):
    told = said(tmp_path, lambda: with_second(SecondCB()))
    assert len(told) == 1 and "`SecondCB.it`" in told[0]
    assert "trainer.batches = zip(trainer.batches, endless(loader))" in told[0]
    assert "make objects in `before_fit`" not in told[0]


def test_that_way_goes_on_exactly_and_without_a_word(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut_once(tmp_path, lambda: with_second(ZipCB()))


# ---- weights of the beginning of an epoch


class FrozenCB:
    "The model of the beginning of the epoch teaches"

    def after_get_loss(self, trainer):
        with torch.no_grad():
            target = self.teacher(trainer.batch[0])
        trainer.loss = trainer.loss + F.mse_loss(trainer.preds, target)


def weights_of(model):
    return {k: x.detach().clone() for k, x in model.state_dict().items()}


class PartialCB(FrozenCB):
    def before_epoch(self, trainer):
        self.teacher = functools.partial(functional_call, trainer.model, weights_of(trainer.model))


class LambdaCB(FrozenCB):
    def before_epoch(self, trainer):
        weights = weights_of(trainer.model)
        self.teacher = lambda x: functional_call(trainer.model, weights, x)


class CopyCB(FrozenCB):
    def before_epoch(self, trainer):
        frozen = nn.Linear(4, 1)
        frozen.load_state_dict(trainer.model.state_dict())
        self.teacher = lambda x: frozen(x)


class ToldCB(FrozenCB):
    "The way that is told"

    def before_fit(self, trainer):
        self.weights = weights_of(trainer.model)

    def after_epoch(self, trainer):
        self.weights = weights_of(trainer.model)

    def before_epoch(self, trainer):
        self.teacher = lambda x: functional_call(trainer.model, self.weights, x)


@pytest.mark.parametrize("kind", [PartialCB, LambdaCB, CopyCB])
def test_weights_that_before_epoch_freezes_in_a_function_are_named_in_the_middle_of_an_epoch(tmp_path, kind):
    (told,) = said(tmp_path, lambda: small_trainer(kind()))
    assert f"`{kind.__name__}.teacher` was made in `before_epoch` of weights" in told


@pytest.mark.parametrize("kind", [PartialCB, LambdaCB, CopyCB])
def test_between_epochs_they_come_again(tmp_path, kind):
    assert said(tmp_path, lambda: small_trainer(kind()), every="epoch") == []


def test_the_way_that_is_told_goes_on_exactly_and_without_a_word(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut_once(tmp_path, lambda: small_trainer(ToldCB()))


def test_a_function_of_what_comes_again_is_no_alarm(tmp_path):
    class ScaleCB(FrozenCB):
        def before_epoch(self, trainer):
            scale = torch.tensor(0.1 * trainer.epoch)
            self.teacher = lambda x: x.sum(1, keepdim=True) * scale

    class ModelCB(FrozenCB):
        def before_epoch(self, trainer):
            model = trainer.model
            self.teacher = lambda x: model(x)

    assert said(tmp_path / "scale", lambda: small_trainer(ScaleCB())) == []
    assert said(tmp_path / "model", lambda: small_trainer(ModelCB())) == []
