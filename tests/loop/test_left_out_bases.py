"A `before_fit` of one's own that leaves out that of the library: who is told, and who has no need to be."

import warnings

import pytest

from isaac_loop.all import (
    AccumulationCB,
    CheckpointCB,
    DeviceCB,
    EMACB,
    EarlyStoppingCB,
    LimitCB,
    MetricsCB,
    MomentumTrainCB,
    OneCycleSchedulerCB,
    StepSchedulerCB,
    WarmupSchedulerCB,
)
from isaac_loop.loop.left_out_bases import left_out
from small import trainer_with

BASES = [
    AccumulationCB,
    CheckpointCB,
    DeviceCB,
    EMACB,
    EarlyStoppingCB,
    LimitCB,
    MetricsCB,
    OneCycleSchedulerCB,
    StepSchedulerCB,
    WarmupSchedulerCB,
]


@pytest.mark.parametrize("base", BASES, ids=lambda o: o.__name__)
def test_whoever_forgets_the_base_is_found(base):
    own = type("OwnCB", (base,), dict(before_fit=lambda self, trainer: None))
    cls, missed, names = left_out(own)
    assert (cls, missed) == (own, base) and names


def told_in_a_fit(callback):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = trainer_with(callback)
        trainer.fit(1)
        trainer.fit(1)
    return [str(o.message) for o in told]


class ForgetsCB(OneCycleSchedulerCB):
    def before_fit(self, trainer):
        self.seen = []


class Forgets:
    def before_fit(self, trainer):
        self.seen = []


class MixedCB(Forgets, OneCycleSchedulerCB):
    pass


class BelowCB(ForgetsCB):
    def before_fit(self, trainer):
        super().before_fit(trainer)


@pytest.mark.parametrize("cls, who", [(ForgetsCB, "ForgetsCB"), (MixedCB, "Forgets"), (BelowCB, "ForgetsCB")])
def test_a_fit_tells_of_it_once_and_names_class_and_line(cls, who):
    "The rate stayed what it was, and nobody said so"
    (message,) = told_in_a_fit(cls())
    assert message.startswith(f"`{who}.before_fit` does not call `super().before_fit(trainer)`")
    assert "`OneCycleSchedulerCB`" in message and message.endswith("(base_left_out)")
    assert [o.name for o in trainer_with(cls()).check(batches=0)] == ["base_left_out"]


def begin(callback, trainer):
    OneCycleSchedulerCB.before_fit(callback, trainer)


def first(f):
    def wrapped(self, trainer):
        super(type(self), self).before_fit(trainer)
        return f(self, trainer)

    return wrapped


class ByNameCB(ForgetsCB):
    def before_fit(self, trainer):
        OneCycleSchedulerCB.before_fit(self, trainer)


class ByFunctionCB(OneCycleSchedulerCB):
    def before_fit(self, trainer):
        begin(self, trainer)


class ByMethodCB(OneCycleSchedulerCB):
    def before_fit(self, trainer):
        self.begin(trainer)

    def begin(self, trainer):
        super().before_fit(trainer)


class ByTextCB(OneCycleSchedulerCB):
    def before_fit(self, trainer):
        for event in ["before_fit"]:
            getattr(super(), event)(trainer)


class ByDecoratorCB(OneCycleSchedulerCB):
    @first
    def before_fit(self, trainer):
        self.seen = []


class PassesOn:
    def before_fit(self, trainer):
        self.seen = []
        super().before_fit(trainer)


class ByMixinCB(PassesOn, OneCycleSchedulerCB):
    pass


class OnPurposeCB(ForgetsCB):
    silent = "base_left_out"


class NothingToMissCB(MomentumTrainCB):
    "The method of the base refuses an optimizer, and makes nothing ready"

    def before_fit(self, trainer):
        self.seen = []


CALLS = [ByNameCB, ByFunctionCB, ByMethodCB, ByTextCB, ByDecoratorCB, ByMixinCB]


@pytest.mark.parametrize("cls", [*CALLS, OnPurposeCB], ids=lambda o: o.__name__)
def test_whoever_comes_to_the_base_or_means_it_is_told_nothing(cls):
    assert told_in_a_fit(cls()) == []


def test_whoever_makes_all_of_it_ready_himself_is_told_nothing():
    class OwnDeviceCB(DeviceCB):
        def before_fit(self, trainer):
            self._device = self._chosen()

    assert left_out(OwnDeviceCB) is None
    assert left_out(NothingToMissCB) is None
