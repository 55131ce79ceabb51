"""Another optimizer than the one whose gradients `MixedPrecisionCB` scales (`device/other_optimizers.py`),
and steps by hand of that one (`device/steps_by_hand.py`)."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.device.precision import MixedPrecisionCB
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelBatchException, CancelStepException
from isaac_loop.loop.spans import with_cbs
from isaac_loop.loop.trainer import Trainer


def batches():
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=g), torch.randn(8, 1, generator=g)) for _ in range(4)]


def two_parts():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


class HeadCB:
    "The head has an optimizer of its own, which steps at one event"

    def __init__(self, at=None, first=lambda trainer: None):
        self.first = first
        if at:
            setattr(self, at, self.learn)

    def before_fit(self, trainer):
        trainer.opt = optim.SGD(trainer.model[0].parameters(), lr=0.001)
        trainer.opt_head = optim.SGD(trainer.model[2].parameters(), lr=0.001)

    def learn(self, trainer):
        self.first(trainer)
        trainer.opt_head.step()
        trainer.opt_head.zero_grad()


def divide(trainer):
    for p in trainer.model[2].parameters():
        p.grad /= trainer.MixedPrecisionCB.scaler.get_scale()


def divide_elsewhere(trainer):
    for p in trainer.model[2].parameters():
        p.grad = p.grad / trainer.MixedPrecisionCB.scaler.get_scale()


def unscale(trainer):
    trainer.MixedPrecisionCB.scaler.unscale_(trainer.opt_head)


class AheadTrainer(Trainer):
    "Steps the head itself, before the events of the other step"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward")
            self.HeadCB.learn(self)
            self.run_callbacks("step", "zero_grad")


def told_in(callback, *others, cls=Trainer, half="float16", scale=64.0):
    "What is warned of in a fit, and the model afterwards"
    model, scaler = two_parts(), MixedPrecisionCB(half, init_scale=scale)
    basic = [] if isinstance(callback, BasicTrainCB) else [BasicTrainCB()]
    callbacks = [*basic, callback, scaler, *others]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cls(DataLoaders(batches()), F.mse_loss, optim.SGD, model, callbacks).fit(2, lr=0.001, valid=False)
    return [str(o.message) for o in told], model


SCALED = "`trainer.model.2.weight` has got a gradient through `trainer.loss`, which `MixedPrecisionCB` scales"


@pytest.mark.parametrize("at", ["after_backward", "before_zero_grad", "after_step", "after_batch"])
def test_a_part_of_the_model_that_would_step_with_scaled_gradients_is_named_once(at):
    told, _ = told_in(HeadCB(at))
    assert len(told) == 1 and told[0].startswith(SCALED)
    assert told_in(HeadCB(at), half="bfloat16")[0] == []


@pytest.mark.parametrize("first", [divide, divide_elsewhere, unscale])
@pytest.mark.parametrize("at", ["after_backward", "after_step"])
def test_who_divides_them_first_is_left_in_peace(first, at):
    assert told_in(HeadCB(at, first))[0] == []


def test_a_step_in_a_batch_of_ones_own_is_seen_before_it_is_made():
    assert [o[: len(SCALED)] for o in told_in(HeadCB(), cls=AheadTrainer)[0]] == [SCALED]
    head = two_parts()[2].weight.detach().clone()
    model, callbacks = two_parts(), [BasicTrainCB(), HeadCB(), MixedPrecisionCB("float16")]
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="`trainer.model.2.weight` has got"):
        warnings.simplefilter("error")
        AheadTrainer(DataLoaders(batches()), F.mse_loss, optim.SGD, model, callbacks).fit(1, valid=False)
    assert torch.equal(model[2].weight, head)


@pytest.mark.parametrize("scale", [64.0, 2.0**120])
def test_it_may_have_hooks_of_others_that_came_later(scale):
    steps = []

    def hook_once(trainer):
        if not steps:
            trainer.opt_head.register_step_pre_hook(lambda *args: steps.append(1))

    told, _ = told_in(HeadCB("after_backward", hook_once), scale=scale)
    assert len([o for o in told if "in every one of" not in o]) == 1 and len(steps) == 8


def test_gathered_gradients_are_seen_as_well():
    assert [o[: len(SCALED)] for o in told_in(HeadCB("after_step"), AccumulationCB(2))[0]] == [SCALED]
    assert told_in(HeadCB("after_step", divide), AccumulationCB(2))[0] == []


def test_an_optimizer_that_does_not_step_is_no_fault():
    "And none is looked at when the fit is over"
    told, model = told_in(HeadCB())
    assert told == []
    callback = HeadCB("after_step", divide)
    told_in(callback)
    opt = optim.SGD(model.parameters(), lr=0.001)
    trainer = Trainer(
        DataLoaders(batches()), F.mse_loss, None, model, [BasicTrainCB(), MixedPrecisionCB("float16")]
    )
    trainer.opt, trainer.idle = opt, optim.SGD(model[2].parameters(), lr=0.001)
    trainer.fit(1, valid=False)
    assert not trainer.idle._optimizer_step_pre_hooks


def clip(trainer, max_norm=1.0):
    nn.utils.clip_grad_norm_(trainer.model[2].parameters(), max_norm)


def leave_out(trainer):
    if not all(o.grad.isfinite().all() for o in trainer.model[2].parameters()):
        trainer.opt_head.zero_grad()
    else:
        divide(trainer)


def by_scaler(trainer):
    trainer.MixedPrecisionCB.scaler.step(trainer.opt_head)
    trainer.opt_head.zero_grad()


@pytest.mark.parametrize("at", ["after_backward", "after_batch"])
@pytest.mark.parametrize("first", [lambda trainer: None, divide, clip])
def test_a_step_with_a_gradient_that_has_overflowed_is_named_once(first, at):
    told, _ = told_in(HeadCB(at, first), scale=2.0**120)
    told = [o for o in told if "in every one of" not in o]
    assert [o[:56] for o in told] == ["`trainer.model.2.weight` has got a gradient that is not "]


def test_clipping_does_not_hide_an_overflow_of_a_later_step():
    class GrowsCB:
        def before_backward(self, trainer):
            if trainer.batch_num == 3:
                trainer.loss = trainer.loss * 1e30

    for first, n in ((partial(clip, max_norm=16.0), 1), (divide, 1)):
        told, _ = told_in(HeadCB("after_backward", first), GrowsCB(), scale=2.0**10)
        assert sum("not finite" in o for o in told) == n


@pytest.mark.parametrize("first", [lambda trainer: None, unscale])
def test_a_fused_one_in_the_hands_of_the_scaler_leaves_steps_out_by_itself(first):
    class FusedCB(HeadCB):
        def before_fit(self, trainer):
            super().before_fit(trainer)
            trainer.opt_head = optim.SGD(trainer.model[2].parameters(), lr=0.001, fused=True)

        def learn(self, trainer):
            first(trainer)
            by_scaler(trainer)

    for scale in (64.0, 2.0**120):
        told, model = told_in(FusedCB("after_backward"), scale=scale)
        assert [o for o in told if "in every one of" not in o] == []
        assert model[2].weight.isfinite().all()


class GrowsLateCB:
    "Lets the gradients of one late batch overflow"

    def before_backward(self, trainer):
        if (trainer.epoch, trainer.batch_num) == (1, 2):
            trainer.loss = trainer.loss * 1e30


@pytest.mark.parametrize("at", ["after_backward", "after_batch"])
@pytest.mark.parametrize("first", [divide, divide_elsewhere, unscale])
def test_an_overflow_of_any_step_is_named(first, at):
    told, _ = told_in(HeadCB(at, first), GrowsLateCB(), scale=2.0**10)
    assert [o[:56] for o in told] == ["`trainer.model.2.weight` has got a gradient that is not "]


def test_an_overflow_is_named_before_the_step_is_made():
    model, seen = two_parts(), []

    def first(trainer):
        divide(trainer)
        seen.append(model[2].weight.detach().clone())

    callbacks = [BasicTrainCB(), HeadCB("after_backward", first), GrowsLateCB()]
    trainer = Trainer(DataLoaders(batches()), F.mse_loss, optim.SGD, model, callbacks)
    trainer.add_callbacks(MixedPrecisionCB("float16", init_scale=2.0**10))
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="`trainer.model.2.weight` has got"):
        warnings.simplefilter("error")
        trainer.fit(2, lr=0.001, valid=False)
    assert torch.equal(model[2].weight, seen[-1])


class OwnLossCB(HeadCB):
    "The head learns from a loss of its own, which nobody scales"

    def __init__(self, closure):
        super().__init__("after_batch")
        self.closure = closure

    def learn(self, trainer):
        def closure():
            trainer.opt_head.zero_grad()
            loss = trainer.model[2](torch.ones(8, 6)).square().mean()
            loss.backward()
            return loss

        if self.closure:
            trainer.opt_head.step(closure)
        else:
            closure()
            trainer.opt_head.step()


class SmallCB(BasicTrainCB):
    def get_loss(self, trainer):
        trainer.loss = 1e-5 * F.mse_loss(trainer.preds, trainer.batch[1])


@pytest.mark.parametrize("closure, scale", [(False, 2.0**10), (True, 2.0**10), (True, 2.0**120)])
def test_who_clears_and_goes_backward_alone_is_left_in_peace(closure, scale):
    "However small the loss of the others is, and also in the closure of a step"
    told, _ = told_in(SmallCB(), OwnLossCB(closure), scale=scale)
    assert [o for o in told if "in every one of" not in o] == []


@pytest.mark.parametrize("first", [leave_out, by_scaler])
def test_a_later_overflow_that_is_left_out_is_no_fault(first):
    assert told_in(HeadCB("after_backward", first), GrowsLateCB(), scale=2.0**10)[0] == []


@pytest.mark.parametrize("first", [leave_out, by_scaler])
def test_who_leaves_such_a_step_out_is_left_in_peace(first):
    told, _ = told_in(HeadCB("after_backward", first), scale=2.0**120)
    assert [o for o in told if "in every one of" not in o] == []


# Steps that are left out


class CountsCB:
    def step(self, trainer):
        "Its own step, and more"
        trainer.opt.step()
        self.n = getattr(self, "n", 0) + 1


class PlainCB:
    def step(self, trainer):
        "Like that of `BasicTrainCB`"
        trainer.opt.step()


class NamedCB:
    def step(self, trainer):
        opt = trainer.opt
        opt.step()


class LateCB:
    def step(self, trainer):
        if trainer.batch_num >= 2:
            trainer.opt.step()


class DecayCB:
    def step(self, trainer):
        for group in trainer.opt.param_groups:
            group["lr"] *= 0.5
        trainer.opt.step()


class SetsCB:
    def step(self, trainer):
        trainer.opt.step()
        trainer.last = trainer.batch_num


class RefusesCB:
    def step(self, trainer):
        if trainer.batch_num > 99:
            raise RuntimeError
        trainer.opt.step()


class EarlyCB:
    def step(self, trainer):
        if trainer.batch_num < 2:
            return
        trainer.opt.step()


class TwiceCB:
    def step(self, trainer):
        trainer.opt.step()
        trainer.opt.step()


class LaterCB(LateCB):
    def step(self, trainer):
        super().step(trainer)


class WithoutGradCB:
    def step(self, trainer):
        with torch.no_grad():
            trainer.opt.step()


class MarkedCB:
    @torch.no_grad()
    def step(self, trainer):
        return trainer.opt.step()


class CallsBaseCB(BasicTrainCB):
    def step(self, trainer):
        super().step(trainer)


class CallsBaseTwiceRemovedCB(CallsBaseCB):
    def step(self, trainer):
        "Only that"
        CallsBaseCB.step(self, trainer)


class WhileTrainingCB:
    def step(self, trainer, scale=1):
        if trainer.training:
            trainer.opt.step()


class OwnStep(Trainer):
    def step(self):
        self.opt.step()
        self.n_steps = getattr(self, "n_steps", 0) + 1


@pytest.mark.parametrize(
    "callback",
    [HeadCB("step"), CountsCB(), LateCB(), DecayCB(), SetsCB(), RefusesCB(), EarlyCB(), TwiceCB(), LaterCB()],
)
def test_who_does_more_in_a_step_that_is_left_out_is_named(callback):
    name = type(callback).__name__
    told, _ = told_in(callback)
    assert len(told) == 1 and told[0].startswith(f"`{name}.step` does not run")
    assert told_in(callback, half="bfloat16")[0] == []


PLAIN = PlainCB, NamedCB, WithoutGradCB, MarkedCB, CallsBaseCB, CallsBaseTwiceRemovedCB, WhileTrainingCB


@pytest.mark.parametrize("callback", [cls() for cls in PLAIN], ids=lambda o: type(o).__name__)
def test_a_plain_step_that_is_left_out_is_not_missed(callback):
    assert told_in(callback)[0] == []


def test_a_step_of_the_trainer_that_is_left_out_is_named():
    class Rest:
        predict, get_loss = BasicTrainCB.predict, BasicTrainCB.get_loss
        backward, zero_grad = BasicTrainCB.backward, BasicTrainCB.zero_grad

    parts = DataLoaders(batches()), F.mse_loss, optim.SGD, two_parts(), [Rest(), MixedPrecisionCB("float16")]
    with pytest.warns(UserWarning, match="`OwnStep.step` does not run: with 'float16'"):
        OwnStep(*parts).fit(1, valid=False)


# Steps by hand


class StepsItself(Trainer):
    "Leaves only the step to itself"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward")
            self.make_ready()
            self.update()
            self.n_updates += 1
            self.run_callbacks("zero_grad")

    def make_ready(self):
        pass

    def update(self):
        self.opt.step()


class Divides(StepsItself):
    def make_ready(self):
        for p in self.model.parameters():
            p.grad /= self.MixedPrecisionCB.scaler.get_scale()


class DividesElsewhere(StepsItself):
    def make_ready(self):
        for p in self.model.parameters():
            p.grad = p.grad / self.MixedPrecisionCB.scaler.get_scale()


class Unscales(StepsItself):
    def make_ready(self):
        self.MixedPrecisionCB.scaler.unscale_(self.opt)

    def update(self):
        self.opt.step()
        self.MixedPrecisionCB.scaler.update()


class StepsByScaler(StepsItself):
    def update(self):
        self.MixedPrecisionCB.scaler.step(self.opt)
        self.MixedPrecisionCB.scaler.update()


class BackwardAnew(StepsItself):
    "The scaled gradients only for a look at them"

    def make_ready(self):
        self.opt.zero_grad()
        self.run_callbacks("predict", "get_loss")
        self.loss.backward()


class StepsInSpan(StepsItself):
    @with_cbs("step", CancelStepException)
    def update(self):
        self.opt.step()


class StepsByEvent(StepsItself):
    def update(self):
        self.run_callbacks("step")


def fitted(cls, scale=64.0, n_epochs=2, **options):
    model, callbacks = two_parts(), [BasicTrainCB(), MixedPrecisionCB("float16", init_scale=scale)]
    trainer = cls(DataLoaders(batches()), F.mse_loss, partial(optim.SGD, **options), model, callbacks)
    trainer.fit(n_epochs, lr=0.001, valid=False)
    return trainer


@pytest.mark.parametrize("scale", [64.0, 2.0**40])
@pytest.mark.parametrize("options", [{}, dict(fused=True)], ids=str)
def test_a_step_by_hand_with_scaled_gradients_is_refused_before_it_is_made(scale, options):
    "Also with gradients that have overflowed"
    seen = []

    class Watched(StepsItself):
        def make_ready(self):
            seen.append([p.detach().clone() for p in self.model.parameters()])

        def update(self):
            try:
                self.opt.step()
            finally:
                assert all(map(torch.equal, seen[0], self.model.parameters()))

    with pytest.raises(
        RuntimeError, match=r"outside the event `step`.*times as large.*run_callbacks\('step'\)"
    ):
        fitted(Watched, scale, **options)
    assert len(seen) == 1


RIGHT = Divides, DividesElsewhere, Unscales, StepsByScaler, BackwardAnew, StepsInSpan, StepsByEvent


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", [{}, dict(fused=True)], ids=str)
@pytest.mark.parametrize("cls", RIGHT)
def test_a_step_by_hand_with_gradients_that_were_divided_is_right(cls, options):
    trainer = fitted(cls, **options)
    usual = fitted(Trainer, **options)
    assert trainer.opt._optimizer_step_pre_hooks == {}
    for ours, theirs in zip(trainer.model.parameters(), usual.model.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_a_factor_of_one_scales_nothing():
    assert fitted(StepsItself, 1.0).n_updates == 8


def test_a_step_after_a_backward_by_hand_says_what_is_missing():
    class BackwardByHand(StepsItself):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            self.run_callbacks("predict", "get_loss")
            self.loss.backward()
            self.run_callbacks("step", "zero_grad")

    with pytest.raises(RuntimeError, match=r"no loss was scaled before it.*run_callbacks\('backward'\)"):
        fitted(BackwardByHand)

    class ScalesItself(StepsItself):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            self.run_callbacks("predict", "get_loss")
            self.MixedPrecisionCB.scaler.scale(self.loss).backward()
            self.run_callbacks("step", "zero_grad")

    assert fitted(ScalesItself).n_updates == 8


class AddsATerm(StepsItself):
    "A second, small term goes backward by itself"

    def make_ready(self):
        (1e-3 * sum(p.square().sum() for p in self.model.parameters())).backward()


class AddsNoise(StepsItself):
    def make_ready(self):
        for p in self.model.parameters():
            p.grad += 1e-3 * torch.randn_like(p)


class OnlyTheTop(StepsItself):
    def make_ready(self):
        self.model[0].zero_grad()


class ClipsWide(StepsItself):
    "So that nothing is clipped"

    def make_ready(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)


class MasksAll(StepsItself):
    "By another tensor in the place of each gradient"

    def make_ready(self):
        for p in self.model.parameters():
            p.grad = p.grad * torch.ones_like(p)


class StepsLater(StepsItself):
    "By the event at first"

    def update(self):
        if self.epoch < 3:
            self.run_callbacks("step")
        else:
            self.opt.step()


@pytest.mark.parametrize("cls", [AddsATerm, AddsNoise, OnlyTheTop, ClipsWide, MasksAll, StepsLater])
def test_scaled_gradients_that_were_touched_are_refused_as_well(cls):
    seen = []

    class Watched(cls):
        def update(self):
            before = [p.detach().clone() for p in self.model.parameters()]
            try:
                super().update()
            except RuntimeError:
                seen.append(all(map(torch.equal, before, self.model.parameters())))
                raise

    with pytest.raises(RuntimeError, match="with gradients that `MixedPrecisionCB` has scaled: 8192 times"):
        fitted(Watched, 2.0**13, n_epochs=4)
    assert seen == [True]


def told_by(cls, scale):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fitted(cls, scale)
    return [str(o.message) for o in told]


class Clips(StepsItself):
    def make_ready(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 50.0)


class ClipsValues(StepsItself):
    def make_ready(self):
        nn.utils.clip_grad_value_(self.model.parameters(), 5.0)


@pytest.mark.parametrize("cls", [Clips, ClipsValues])
def test_clipping_before_anybody_has_divided_is_named_once(cls):
    (said,) = told_by(cls, 1024.0)
    assert said.startswith("`trainer.opt` was about to step outside the event `step`")
    assert "changed before anybody divided them, as by clipping" in said and "in `before_step`" in said


@pytest.mark.parametrize("cls", [AddsATerm, AddsNoise])
def test_a_smaller_scale_that_shows_is_only_a_warning(cls):
    assert "changed before anybody divided them" in told_by(cls, 1024.0)[0]


@pytest.mark.parametrize("cls", [Divides, DividesElsewhere, Unscales, AddsATerm, Clips])
def test_a_step_by_hand_with_a_gradient_that_has_overflowed_is_named_once(cls):
    (said,) = [o for o in told_by(cls, 2.0**120) if "in every one of" not in o]
    assert "a gradient of `trainer.model.0.weight` that is not finite" in said


def test_an_overflow_is_named_at_any_later_step_and_before_it_is_made():
    class Grows(Divides):
        def make_ready(self):
            super().make_ready()
            if self.n_updates == 14:
                self.model[2].bias.grad += float("inf")

    with (
        warnings.catch_warnings(),
        pytest.raises(UserWarning, match="gradient of `trainer.model.2.bias` that"),
    ):
        warnings.simplefilter("error")
        fitted(Grows, n_epochs=4)


class DividesMemory(StepsItself):
    "So that no version of a gradient is counted up"

    def make_ready(self):
        for p in self.model.parameters():
            p.grad.data.div_(self.MixedPrecisionCB.scaler.get_scale())


class DividesMemoryAndAdds(DividesMemory):
    def make_ready(self):
        super().make_ready()
        (10 * sum(p.square().sum() for p in self.model.parameters())).backward()


class DividesTogether(StepsItself):
    def make_ready(self):
        torch._foreach_div_(
            [p.grad for p in self.model.parameters()], self.MixedPrecisionCB.scaler.get_scale()
        )


class DividesAndClips(Divides):
    def make_ready(self):
        super().make_ready()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class DividesAndAdds(Divides):
    "Noise and a term that are larger than the gradient"

    def make_ready(self):
        super().make_ready()
        (10 * sum(p.square().sum() for p in self.model.parameters())).backward()
        for p in self.model.parameters():
            p.grad += 3 * torch.randn_like(p)


class DividesAndAddsMuch(Divides):
    "As whoever samples by noise does"

    def make_ready(self):
        super().make_ready()
        for p in self.model.parameters():
            p.grad += 20 * torch.randn_like(p)


class DividesAPart(Divides):
    "The rest learns nothing"

    def make_ready(self):
        super().make_ready()
        self.model[0].zero_grad()


class DividesNothing(DividesMemory):
    "Where a part of the model has no influence"

    def make_ready(self):
        super().make_ready()
        with torch.no_grad():
            self.model[2].weight.zero_()


class StepsEachSecond(Divides):
    "Gathers the gradients of two batches"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss", "backward")
        if self.batch_num % 2:
            self.make_ready()
            self.update()
            self.n_updates += 1
            self.run_callbacks("zero_grad")


class LeavesOut(Divides):
    def update(self):
        if all(p.grad.isfinite().all() for p in self.model.parameters()):
            self.opt.step()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [256.0, 2.0**14])
@pytest.mark.parametrize(
    "cls",
    [
        DividesMemory,
        DividesMemoryAndAdds,
        DividesTogether,
        DividesAndClips,
        DividesAndAdds,
        DividesAndAddsMuch,
        DividesAPart,
        DividesNothing,
        StepsEachSecond,
        LeavesOut,
    ],
)
def test_whoever_divides_may_do_with_gradients_what_he_likes(cls, scale):
    assert fitted(cls, scale, n_epochs=4).n_updates == (8 if cls is StepsEachSecond else 16)


@pytest.mark.filterwarnings("error")
def test_whoever_leaves_out_steps_that_have_overflowed_is_left_in_peace():
    fitted(LeavesOut, 2.0**120)
