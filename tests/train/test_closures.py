"""Optimizers that evaluate the loss several times for one step, against the loop by hand, bit for bit."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from isaac_loop.all import (
    AccelerateCB,
    AccumulationCB,
    BasicTrainCB,
    CancelBatchException,
    CheckpointCB,
    ClipGradCB,
    DataLoaders,
    EpochSchedulerCB,
    MetricsCB,
    MixedPrecisionCB,
    MomentumTrainCB,
    NonFiniteStopCB,
    RecorderCB,
    Trainer,
)
from isaac_loop.train.closures import needs_closure

LBFGS = partial(optim.LBFGS, max_iter=4)


def make_data(n=5):
    g = torch.Generator().manual_seed(0)
    return [(x, x.sin().sum(1, keepdim=True)) for x in torch.randn(n, 8, 4, generator=g)]


def make_model(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def by_hand(model, batches, n_epochs, lr, clip=None, opt_func=LBFGS, step_size=None):
    opt = opt_func(model.parameters(), lr=lr)
    schedule = StepLR(opt, step_size, 0.5) if step_size else None
    losses, model = [], model.train()
    for _ in range(n_epochs):
        for x, y in batches:

            def closure():
                opt.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                return loss

            losses.append(opt.step(closure).item())
        if schedule:
            schedule.step()
    return losses


def equal(a, b):
    return all(p.equal(q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("step_size", [None, 1])
def test_weights_and_losses_are_those_of_the_loop_by_hand(clip, dropout, search, step_size):
    opt_func = partial(LBFGS, line_search_fn=search)
    ours = make_model(dropout)
    theirs = copy.deepcopy(ours)
    recorder = RecorderCB(seen=lambda trainer: trainer.loss)
    cbs = [BasicTrainCB(), MetricsCB(), recorder]
    cbs += [ClipGradCB(clip)] if clip else []
    cbs += [EpochSchedulerCB(partial(StepLR, step_size=step_size, gamma=0.5))] if step_size else []
    trainer = Trainer(DataLoaders(make_data()), F.mse_loss, opt_func, ours, cbs)
    torch.manual_seed(1)
    trainer.fit(3, lr=0.3, valid=False)
    torch.manual_seed(1)
    losses = by_hand(theirs, make_data(), 3, 0.3, clip, opt_func, step_size)
    assert equal(ours, theirs)
    assert trainer.history.batches["seen"] == losses
    assert trainer.n_updates == 15
    assert trainer.history["train_loss"][-1] == pytest.approx(sum(losses[-5:]) / 5)


def test_callbacks_see_each_evaluation_as_steps_and_one_batch_and_one_update():
    seen = []
    names = ["zero_grad", "predict", "get_loss", "backward", "before_step", "after_step", "after_batch"]
    watch = SimpleNamespace(**{o: (lambda trainer, o=o: seen.append(o)) for o in names})
    trainer = Trainer(DataLoaders(make_data(1)), F.mse_loss, LBFGS, make_model(), [BasicTrainCB(), watch])
    trainer.fit(1, lr=0.1, valid=False)
    again = ["zero_grad", "predict", "get_loss", "backward"]
    n = (len(seen) - len(["predict", "get_loss", "backward", "before_step"]) - 3) // 4
    assert n >= 2
    assert seen == [*again[1:], "before_step", *again * n, "after_step", "zero_grad", "after_batch"]


def test_a_run_that_goes_on_is_the_run_that_was_never_stopped(tmp_path):
    def run(n_epochs, folder, resume="never"):
        cbs = [BasicTrainCB(), MetricsCB(), ClipGradCB(1.0), CheckpointCB(folder, resume=resume)]
        trainer = Trainer(DataLoaders(make_data()), F.mse_loss, LBFGS, make_model(), cbs)
        trainer.fit(n_epochs, lr=0.3, valid=False)
        return trainer

    whole = run(4, tmp_path / "a")
    run(2, tmp_path / "b")
    assert equal(run(4, tmp_path / "b", "auto").model, whole.model)


@pytest.mark.parametrize("cb", [MixedPrecisionCB("float16"), AccumulationCB(2)], ids=["scaler", "gathering"])
def test_what_cannot_be_combined_is_refused(cb):
    trainer = Trainer(DataLoaders(make_data()), F.mse_loss, LBFGS, make_model(), [BasicTrainCB(), cb])
    with pytest.raises(TypeError, match=f"`{type(cb).__name__}` and `LBFGS` do not go together"):
        trainer.fit(1, valid=False)


def test_a_batch_of_ones_own_calls_the_optimizer_itself():
    class Own(Trainer):
        def one_batch(self):
            self.run_callbacks("predict", "get_loss", "backward", "step")

    trainer = Own(DataLoaders(make_data()), F.mse_loss, LBFGS, make_model(), BasicTrainCB())
    with pytest.raises(TypeError, match=r"`Own.one_batch` is your own.*`self.opt.step\(closure\)`"):
        trainer.fit(1, valid=False)


def test_only_a_closure_without_default_is_needed():
    class Optional(optim.SGD):
        def step(self, closure=None): ...

    class Needed(optim.SGD):
        def step(self, closure): ...

    assert [needs_closure(o) for o in (optim.Adam, Optional, Needed, SimpleNamespace)] == [0, 0, 1, 0]


def test_half_precision_trains_too():
    callbacks = [BasicTrainCB(), MixedPrecisionCB("bfloat16"), MetricsCB()]
    trainer = Trainer(DataLoaders(make_data()), F.mse_loss, LBFGS, make_model(), callbacks)
    trainer.fit(2, lr=0.1, valid=False)
    assert trainer.n_updates == 10 and trainer.history["train_loss"][1] < trainer.history["train_loss"][0]


class Players(Trainer):
    "Two optimizers, and one name for each"

    def before_fit(self):
        self.opt_d = optim.SGD(self.model[0].parameters(), 0.1)
        self.opt_g = optim.SGD(self.model[4].parameters(), 0.1)

    def one_batch(self):
        self.run_callbacks("predict", "get_loss", "backward", "step", "zero_grad")

    def step(self):
        self.opt_d.step()
        self.opt_g.step()

    def zero_grad(self):
        self.opt_d.zero_grad()
        self.opt_g.zero_grad()

    def predict(self):
        self.preds = self.model(self.batch[0])

    def get_loss(self):
        self.loss = F.mse_loss(self.preds, self.batch[1])

    def backward(self):
        self.loss.backward()


def test_clipping_and_half_precision_with_several_optimizers():
    def fit(*cbs):
        trainer = Players(DataLoaders(make_data()), None, None, make_model(), list(cbs))
        trainer.fit(1, valid=False)
        return trainer

    named = ClipGradCB(1.0, opt="opt_d", column="d")
    named.name = "clip_d"
    both = fit(named, ClipGradCB(1.0, opt="opt_g", column="g"))
    assert {"d", "d_clipped_share", "g"} <= set(both.history[-1])
    fit(MixedPrecisionCB("bfloat16"))
    with pytest.raises(AttributeError, match=r"no such optimizer. There are \['opt_d', 'opt_g'\]"):
        fit(ClipGradCB(1.0))


def test_clipping_adds_in_the_order_of_the_model():
    "The norm of a sum depends on the order of its parts, bit for bit"
    ours = make_model()
    theirs = copy.deepcopy(ours)

    def backwards(params, lr):
        return optim.SGD(list(params)[::-1], lr)

    ours[0].bias.requires_grad_(False)
    theirs[0].bias.requires_grad_(False)
    norms = []
    trainer = Trainer(
        DataLoaders(make_data()), F.mse_loss, backwards, ours, [BasicTrainCB(), ClipGradCB(0.05)]
    )
    trainer.fit(2, lr=0.1, valid=False)
    opt = backwards(theirs.parameters(), 0.1)
    for _ in range(2):
        for x, y in make_data():
            F.mse_loss(theirs(x), y).backward()
            norms.append(nn.utils.clip_grad_norm_(theirs.parameters(), 0.05).item())
            opt.step()
            opt.zero_grad()
    assert equal(ours, theirs)
    assert trainer.history.batches["grad_norm"] == norms


class SAM(optim.SGD):
    "Climbs along the gradient, asks there, and steps from where it was (Foret et al., 2021)"

    @torch.no_grad()
    def step(self, closure):
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad, alpha=0.5)
        with torch.enable_grad():
            loss = closure()
        for p, old in zip(parameters, before):
            p.copy_(old)
        super().step()
        return loss


def test_an_optimizer_that_moves_before_it_asks_is_answered_at_the_place_where_it_stands():
    data, ours, theirs = make_data(), make_model(), make_model()
    Trainer(DataLoaders(data), F.mse_loss, SAM, ours, BasicTrainCB()).fit(2, lr=0.1, valid=False)
    opt = SAM(theirs.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in data:

            def closure():
                opt.zero_grad()
                loss = F.mse_loss(theirs(x), y)
                loss.backward()
                return loss

            closure()
            opt.step(closure)
            opt.zero_grad()
    assert equal(ours, theirs)
    plain = make_model()
    Trainer(DataLoaders(data), F.mse_loss, optim.SGD, plain, BasicTrainCB()).fit(2, lr=0.1, valid=False)
    assert not equal(ours, plain)


@pytest.mark.parametrize("event", ["before_backward", "before_predict", "after_get_loss"])
def test_a_batch_left_in_the_middle_of_a_search_leaves_no_trace(event):
    "The weights are those before the step, and the optimizer begins anew at the next batch"

    def leave(trainer):
        if trainer.batch_num == 0 and trainer._again:
            raise CancelBatchException("not this one")

    leave.__name__ = event
    data, ours = make_data(), make_model()
    trainer = Trainer(DataLoaders(data), F.mse_loss, LBFGS, ours, [BasicTrainCB(), leave])
    trainer.fit(1, lr=0.1, valid=False)
    assert trainer.n_updates == len(data) - 1 and all(p.isfinite().all() for p in ours.parameters())


def test_whoever_cannot_go_together_with_a_search_says_so():
    for callback in (MomentumTrainCB(0.5), AccelerateCB("no")):
        with pytest.raises(TypeError, match=f"`{type(callback).__name__}` and `LBFGS` do not go together"):
            Trainer(DataLoaders(make_data()), F.mse_loss, optim.LBFGS, make_model(), callback).fit(
                1, valid=False
            )


def test_a_number_that_is_not_finite_within_the_step_stays_out_of_the_weights():
    n = [0]

    def loss_func(preds, target):
        n[0] += 1
        return F.mse_loss(preds, target) * (float("nan") if n[0] == 3 else 1)

    model = make_model()
    callbacks = [BasicTrainCB(), NonFiniteStopCB()]
    trainer = Trainer(DataLoaders(make_data()), loss_func, LBFGS, model, callbacks)
    trainer.fit(1, lr=0.1, valid=False)
    assert all(p.isfinite().all() for p in model.parameters()) and "NaN or infinite" in trainer.stop_reason


class PublishedSAM(SAM):
    "As it is published: its signature says that it does without"

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(torch.enable_grad()(closure))


class AskingSAM(SAM):
    def step(self, closure=None):
        assert closure is not None, "it requires a closure"
        return super().step(closure)


class OwnPublishedSAM(PublishedSAM):
    def step(self, closure):
        return super().step(closure)


@pytest.mark.parametrize("opt_func", [PublishedSAM, AskingSAM])
def test_an_optimizer_that_fails_without_a_closure_is_told_how_to_get_one(opt_func):
    trainer = Trainer(DataLoaders(make_data()), F.mse_loss, opt_func, make_model(), BasicTrainCB())
    with pytest.raises((TypeError, AssertionError)) as told:
        trainer.fit(1, lr=0.1, valid=False)
    name = opt_func.__name__
    assert any(f"`class Own{name}({name}):` with `def step(self, closure)" in o for o in told.value.__notes__)


def test_with_the_signature_that_is_advised_it_trains():
    models = []
    for opt_func in (OwnPublishedSAM, SAM):
        models.append(make_model())
        trainer = Trainer(DataLoaders(make_data()), F.mse_loss, opt_func, models[-1], BasicTrainCB())
        trainer.fit(2, lr=0.1, valid=False)
    assert equal(*models)


class BrokenSGD(optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("another reason")


def test_an_optimizer_that_fails_for_another_reason_is_not_told_of_closures():
    trainer = Trainer(DataLoaders(make_data()), F.mse_loss, BrokenSGD, make_model(), BasicTrainCB())
    with pytest.raises(RuntimeError) as told:
        trainer.fit(1, lr=0.1, valid=False)
    assert not any("closure" in o for o in told.value.__notes__)
