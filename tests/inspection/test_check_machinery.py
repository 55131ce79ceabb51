"""Optimizers, schedules, averages, early stopping and hooks, wrong and right.

Each planted one is found by name when some batches are run; in the right ones nothing is found.
"""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

from isaac_loop import Trainer
from isaac_loop.callbacks import (
    AccumulationCB,
    BasicTrainCB,
    BatchSchedulerCB,
    EpochSchedulerCB,
    MetricsCB,
    OneCycleSchedulerCB,
)
from isaac_loop.data import DataLoaders
from marked import Marked, Planted
from working import found_in

planted, right = Planted(), Marked()


def loaders(n=97):
    torch.manual_seed(n)
    data = [TensorDataset(torch.randn(m, 4), torch.randint(3, (m,))) for m in (n, 40)]
    return DataLoaders(DataLoader(data[0], 8, shuffle=True), DataLoader(data[1], 8))


class Net(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), norm(8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x))


def fitting(*cbs, model=None, opt_func=optim.SGD, loss_func=F.cross_entropy, dls=None):
    torch.manual_seed(0)
    return Trainer(dls or loaders(), loss_func, opt_func, model or Net(), [BasicTrainCB(), *cbs])


def with_groups(make_groups, kind=optim.AdamW):
    model = Net()
    return fitting(model=model, opt_func=lambda params, lr: kind(make_groups(model), lr=lr))


def split_by(is_small):
    def groups(model):
        named = [(n, p, n in inside_norms(model)) for n, p in model.named_parameters()]
        small = [p for n, p, inside in named if is_small(n, p, inside)]
        large = [p for n, p, inside in named if not is_small(n, p, inside)]
        return [dict(params=large, weight_decay=0.1), dict(params=small, weight_decay=0.0)]

    return groups


def inside_norms(model):
    norms = {k for k, m in model.named_modules() if isinstance(m, nn.LayerNorm)}
    return {n for n, _ in model.named_parameters() if n.rpartition(".")[0] in norms}


@planted("decayed_norms")
def norms_by_a_name_that_they_do_not_have():
    return with_groups(split_by(lambda n, p, inside: "bias" in n or "norm" in n))


@planted("decayed_norms")
def norms_by_the_name_of_a_class():
    names = ["bias", "LayerNorm.weight"]
    return with_groups(split_by(lambda n, p, inside: any(name in n for name in names)), optim.SGD)


@right
def norms_by_their_kind():
    return with_groups(split_by(lambda n, p, inside: n.endswith("bias") or inside))


@right
def norms_by_their_size():
    return with_groups(split_by(lambda n, p, inside: p.ndim < 2))


@right
def a_head_without_decay():
    return with_groups(split_by(lambda n, p, inside: n.startswith("head")))


@right
def biases_of_norms_only():
    return with_groups(split_by(lambda n, p, inside: inside))


@planted("coupled_decay")
def adam_with_much_decay():
    return fitting(opt_func=partial(optim.Adam, weight_decay=0.05))


@planted("coupled_decay")
def a_group_of_nadam_with_much_decay():
    return with_groups(lambda model: [dict(params=model.parameters(), weight_decay=0.1)], optim.NAdam)


@right
def adam_with_little_decay():
    return fitting(opt_func=partial(optim.Adam, weight_decay=5e-4))


@right
def nadam_that_is_decoupled():
    return fitting(opt_func=partial(optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True))


def by_depth(rates):
    def groups(model):
        layers = [model.body[0], model.body[1], model.body[3], model.head]
        return [dict(params=m.parameters(), lr=rate) for m, rate in zip(layers, rates)]

    return groups


@planted("rates_turned")
def rates_that_fall_with_depth():
    return with_groups(by_depth([1e-3 * 0.5**i for i in range(4)]))


@planted("rates_turned")
def rates_that_fall_under_a_schedule():
    trainer = with_groups(by_depth([1e-3, 1e-3, 3e-4, 1e-5]))
    trainer.add_callbacks(BatchSchedulerCB(partial(LambdaLR, lr_lambda=lambda i: min(1, (i + 1) / 4))))
    return trainer


@right
def rates_that_rise_with_depth():
    return with_groups(by_depth([1e-5, 1e-4, 3e-4, 1e-3]))


@right
def a_fast_body():
    return with_groups(by_depth([1e-3, 1e-3, 1e-3, 1e-4]))


def penalised(penalty):
    model = Net()

    def loss_func(preds, targs):
        return F.cross_entropy(preds, targs) + 1e-3 * penalty(model)

    return fitting(model=model, loss_func=loss_func)


@planted("signed_penalty")
def a_sum_without_abs():
    return penalised(lambda m: sum(p.sum() for p in m.parameters()))


@planted("signed_penalty")
def a_mean_of_flat_weights():
    return penalised(lambda m: torch.cat([p.flatten() for p in m.parameters() if p.ndim > 1]).mean())


class AddsSum:
    on_valid = False

    def after_get_loss(self, trainer):
        trainer.loss += 0.01 * trainer.model.head.weight.sum()


planted("signed_penalty")(lambda: fitting(AddsSum()))


@right
def a_sum_with_abs():
    return penalised(lambda m: sum(p.abs().sum() for p in m.parameters()))


@right
def a_square_of_sums():
    return penalised(lambda m: m.head.weight.sum().pow(2) + (m.head.weight.sum(1) ** 2).sum())


@right
def rows_that_are_to_be_unlike():
    return penalised(lambda m: (m.head.weight @ m.head.weight.T).sum())


class Flow(nn.Module):
    "Its log-determinant is the sum of a parameter"

    def __init__(self):
        super().__init__()
        self.log_scale, self.head = nn.Parameter(torch.zeros(1, 4)), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x * self.log_scale.exp())


@right
def a_sum_of_log_scales():
    model = Flow()
    loss = lambda preds, targs: F.cross_entropy(preds, targs) - 0.1 * model.log_scale.sum()  # noqa: E731
    return fitting(model=model, loss_func=loss)


class PlainSGD:
    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class Rebinds(PlainSGD):
    def step(self):
        for p in self.params:
            p = p - self.lr * p.grad


class InPlace(PlainSGD):
    @torch.no_grad()
    def step(self):
        for p in self.params:
            p -= self.lr * p.grad


class Data(PlainSGD):
    def step(self):
        for p in self.params:
            p.data = p.data - self.lr * p.grad


planted("step_moves_nothing")(lambda: fitting(opt_func=Rebinds))
for kind in (InPlace, Data):
    right(partial(fitting, opt_func=kind))


def warm_up(step, n=10):
    return min(1.0, (step + 1) / n)


def noam(step, width=16, warmup=40):
    step = max(step, 1)
    return width**-0.5 * min(step**-0.5, step * warmup**-1.5)


def by_epochs(epoch):
    return min(1.0, (epoch + 1) / 10)


def halves(step):
    return 0.5**step


class ByLog:
    def before_fit(self, trainer):
        self.schedule = LambdaLR(trainer.opt, partial(warm_up, n=20))

    def log(self, trainer):
        self.schedule.step()


planted("schedule_pace")(lambda: fitting(EpochSchedulerCB(partial(LambdaLR, lr_lambda=warm_up))))
planted("schedule_pace")(
    lambda: fitting(
        EpochSchedulerCB(partial(LambdaLR, lr_lambda=noam)), opt_func=lambda ps, lr: optim.Adam(ps, lr=1.0)
    )
)
planted("schedule_pace")(lambda: fitting(ByLog()))
right(lambda: fitting(BatchSchedulerCB(partial(LambdaLR, lr_lambda=warm_up))))
right(lambda: fitting(EpochSchedulerCB(partial(LambdaLR, lr_lambda=by_epochs))))
right(lambda: fitting(EpochSchedulerCB(partial(LambdaLR, lr_lambda=halves))))


class Cosine:
    "Steps a cosine for each update; `length` says how long it is"

    on_valid = False

    def before_fit(self, trainer):
        self.schedule = CosineAnnealingLR(trainer.opt, T_max=self.length(trainer))

    def after_step(self, trainer):
        self.schedule.step()


@planted("schedule_pace")
class OverRows(Cosine):
    def length(self, trainer):
        return trainer.n_epochs * len(trainer.dls.train.dataset)


class OverBatches(Cosine):
    def length(self, trainer):
        return trainer.n_epochs * len(trainer.dls.train)


class OverUpdates(Cosine):
    def length(self, trainer):
        return trainer.total_updates


@planted("schedule_pace")
class RateByRows:
    def before_fit(self, trainer):
        self.total_steps = len(trainer.dls.train.dataset) * trainer.n_epochs

    def before_step(self, trainer):
        done = trainer.n_updates / self.total_steps
        trainer.opt.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * done)) / 2


@planted("schedule_pace")
class EpochsBySteps:
    warmup_steps = 100

    def before_epoch(self, trainer):
        if trainer.training:
            trainer.opt.param_groups[0]["lr"] = 0.1 * min(1, (trainer.epoch + 1) / self.warmup_steps)


@planted("schedule_pace")
def one_cycle_over_rows():
    dls = loaders()
    total = 5 * len(dls.train.dataset)
    return fitting(BatchSchedulerCB(lambda opt: OneCycleLR(opt, 0.1, total_steps=total)), dls=dls)


@planted("schedule_pace")
def batches_of_which_two_make_an_update():
    return fitting(AccumulationCB(2), OverBatches())


@planted("schedule_pace")
def a_cosine_of_epochs_for_batches():
    return fitting(BatchSchedulerCB(lambda opt: CosineAnnealingLR(opt, T_max=10)))


right(lambda: fitting(OverBatches()))
right(lambda: fitting(AccumulationCB(2), OverUpdates()))
right(lambda: fitting(EpochSchedulerCB(lambda opt: CosineAnnealingLR(opt, T_max=10))))
right(lambda: fitting(BatchSchedulerCB(lambda opt: CosineAnnealingLR(opt, T_max=1000))))


class SetsRate:
    "Warms up, in an optimizer that it was given or that of the trainer"

    def __init__(self, opt=None):
        self.mine = opt

    def before_batch(self, trainer):
        for group in (self.mine or trainer.opt).param_groups:
            group["lr"] = 0.01 * min(1, (trainer.n_updates + 1) / 5)


@planted("other_optimizer")
def rates_of_an_optimizer_at_rest():
    model = Net()
    return fitting(SetsRate(optim.SGD(model.parameters(), lr=0.1)), model=model)


@right
def rates_of_the_one_that_works():
    model = Net()
    opt = optim.SGD(model.parameters(), lr=0.1)
    trainer = fitting(SetsRate(opt), model=model, opt_func=None)
    trainer.opt = opt
    return trainer


class Swaps:
    "Measures with half of the weights now and then, and puts back what was kept"

    each = 1

    @torch.no_grad()
    def after_step(self, trainer):
        if trainer.n_updates % self.each:
            return
        kept = self.kept(trainer.model)
        for p in trainer.model.parameters():
            p.mul_(0.5)
        for p, x in zip(trainer.model.parameters(), kept):
            p.copy_(x)


@planted("kept_alias")
class KeepsData(Swaps):
    def kept(self, model):
        return [p.data for p in model.parameters()]


@planted("kept_alias")
class KeepsDetachedLater(Swaps):
    each = 100

    def kept(self, model):
        return [p.detach() for p in model.parameters()]


@planted("kept_alias")
class LoadsItsOwnState:
    def after_step(self, trainer):
        state = trainer.model.state_dict()
        with torch.no_grad():
            trainer.model.head.weight.mul_(0.5)
        trainer.model.load_state_dict(state)


@right
class KeepsCopies(Swaps):
    def kept(self, model):
        return [p.detach().clone() for p in model.parameters()]


@right
class LoadsACopy:
    on_train = False

    def before_epoch(self, trainer):
        self.state = copy.deepcopy(trainer.model.state_dict())
        with torch.no_grad():
            trainer.model.head.weight.mul_(0.5)

    def cleanup_epoch(self, trainer):
        trainer.model.load_state_dict(self.state)


@right
class PutsOthersBehind:
    "Other tensors take the place of the weights for a while"

    on_train = False

    def before_epoch(self, trainer):
        self.kept = {n: p.data for n, p in trainer.model.named_parameters()}
        for p in trainer.model.parameters():
            p.data = p.data * 0.5

    def cleanup_epoch(self, trainer):
        for n, p in trainer.model.named_parameters():
            p.data = self.kept[n]


class SWA:
    def before_fit(self, trainer):
        self.average = AveragedModel(trainer.model)

    def after_step(self, trainer):
        self.average.update_parameters(trainer.model)


class AsksSWA(SWA):
    @torch.no_grad()
    def after_fit(self, trainer):
        self.average.eval()
        self.hits = [(self.average(x).argmax(1) == y).float().mean() for x, y in trainer.dls.valid]


class EvaluatesSWA(SWA):
    def log(self, trainer):
        self.accuracy = self.evaluate(self.average.eval(), trainer.dls.valid)

    def evaluate(self, model, dl):
        with torch.no_grad():
            return sum((model(x).argmax(1) == y).float().mean() for x, y in dl)


class MeasuresSWA(AsksSWA):
    def after_fit(self, trainer):
        update_bn(trainer.dls.train, self.average)
        super().after_fit(trainer)


class AsksEMA(AsksSWA):
    def before_fit(self, trainer):
        self.average = AveragedModel(trainer.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def normed(cb):
    return fitting(cb(), model=Net(nn.BatchNorm1d))


planted("norms_not_measured")(lambda: normed(AsksSWA))
planted("norms_not_measured")(lambda: normed(EvaluatesSWA))
right(lambda: normed(MeasuresSWA))
right(lambda: normed(AsksEMA))
right(lambda: normed(SWA))
right(lambda: fitting(AsksSWA()))


@planted("best_is_last", "impatient")
class AgainstTheLast:
    def before_fit(self, trainer):
        self.best, self.counter = math.inf, 0

    def log(self, trainer):
        loss = trainer.history.latest("valid_loss")
        if loss > self.best:
            self.counter += 1
        self.best = loss
        if self.counter >= 5:
            trainer.request_stop("early stopping")


@planted("impatient")
class NeverPatientAgain:
    best_accuracy, bad = 0.0, 0

    def after_epoch(self, trainer):
        if trainer.training:
            return
        value = -trainer.history.latest("train_loss")
        if value <= self.best_accuracy:
            self.bad += 1
            if self.bad > 3:
                trainer.request_stop("no better")
        self.best_accuracy = max(value, self.best_accuracy)


@right
class Patient:
    order = 30
    best, bad = math.inf, 0

    def log(self, trainer):
        loss = trainer.history.latest("valid_loss")
        if loss >= self.best:
            self.bad += 1
            if self.bad >= 5:
                trainer.request_stop("early stopping")
            return
        self.best, self.bad = loss, 0


@right
class CountsSpikes:
    "So many spikes in all are too many"

    smoothed, spikes = math.inf, 0

    def after_batch(self, trainer):
        loss = trainer.loss.item()
        if loss > self.smoothed:
            self.spikes += 1
        self.smoothed = 2 * loss
        if self.spikes > 10:
            trainer.request_stop("unsteady")


def hooked(hook, at="weight"):
    model = Net()
    if at == "weight":
        model.head.weight.register_hook(hook)
    if at == "layer":
        model.body[0].register_forward_hook(hook)
    return fitting(model=model)


@planted("hook_returns_nothing")
def a_gradient_that_goes_nowhere():
    mask = torch.ones(3, 8)

    def hook(grad):
        grad = grad * mask

    return hooked(hook)


@planted("hook_returns_nothing")
def a_layer_that_is_not_damped():
    def hook(module, args, out):
        damped = out.clamp(-1, 1)  # noqa: F841

    return hooked(hook, "layer")


@planted("hook_returns_nothing")
class Registers:
    def before_fit(self, trainer):
        self.handle = trainer.model.head.weight.register_hook(self.clip)

    def clip(self, grad):
        grad = torch.clamp(grad, -1, 1)

    def cleanup_fit(self, trainer):
        self.handle.remove()


@right
def a_gradient_that_is_returned():
    return hooked(lambda grad: grad * 0.5)


@right
def a_gradient_that_is_changed_in_place():
    def hook(grad):
        part = grad.detach()
        part[0] *= 0.5

    return hooked(hook)


@right
def sizes_that_are_noted():
    sizes = []

    def hook(grad):
        size = grad.norm() * 2
        sizes.append(size.item())

    return hooked(hook)


class Ramp:
    "Adds a term whose weight rises"

    on_valid, rampup = False, 200

    def rise(self, now):
        return math.exp(-5 * (1 - min(now, self.rampup) / self.rampup) ** 2)

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss + self.weight(trainer) * trainer.preds.pow(2).mean()


@planted("begins_anew")
class ByBatch(Ramp):
    def weight(self, trainer):
        return self.rise(trainer.batch_num)


@planted("begins_anew")
class ByBatchInLine(Ramp):
    def weight(self, trainer):
        return min(trainer.batch_num, self.rampup) / self.rampup


@right
class ByUpdate(Ramp):
    def weight(self, trainer):
        return self.rise(trainer.n_updates)


@right
class WithinAnEpoch(Ramp):
    def before_epoch(self, trainer):
        self.rampup = trainer.n_batches

    def weight(self, trainer):
        return self.rise(trainer.batch_num)


class Checkpoints:
    path = "last.pt"

    def before_fit(self, trainer):
        self.take(trainer, {})

    def after_fit(self, trainer):
        if trainer.n_epochs > 10:
            torch.save(dict(model=trainer.model.state_dict(), opt=trainer.opt.state_dict()), self.path)


@planted("optimizer_left_out")
class TakesWeights(Checkpoints):
    def before_fit(self, trainer):
        state = dict(model=trainer.model.state_dict())
        if trainer.n_epochs > 10:
            trainer.model.load_state_dict(state["model"])


@right
class TakesAll(Checkpoints):
    def before_fit(self, trainer):
        if trainer.n_epochs > 10:
            state = torch.load(self.path)
            trainer.model.load_state_dict(state["model"])
            trainer.opt.load_state_dict(state["opt"])


@right
class FreezesByNone:
    "No gradient, no step; also of weight decay"

    on_valid = False

    def before_step(self, trainer):
        if trainer.epoch < 5:
            for p in trainer.model.body.parameters():
                p.grad = None


def made(make):
    measured = [MetricsCB()] if make in (AgainstTheLast, NeverPatientAgain, Patient) else []
    return fitting(*measured, make()) if isinstance(make, type) else make()


@pytest.mark.parametrize("make, names", planted, ids=lambda o: getattr(o, "__name__", " "))
def test_what_is_planted_is_found_by_name(make, names):
    n = 3 if make is batches_of_which_two_make_an_update else 2
    assert {*found_in(made(make), batches=n)} == {*names}


@pytest.mark.parametrize("make", right, ids=lambda o: getattr(o, "__name__", " "))
def test_nothing_is_found_where_all_is_right(make):
    assert found_in(made(make), batches=2) == []


@pytest.mark.parametrize("n_rows, cbs", [(32, [AccumulationCB(2)]), (6, []), (6, [OverBatches()])])
def test_a_schedule_of_all_updates_is_right_even_if_as_many_batches_or_rows_are_there(n_rows, cbs):
    "Three batches make as many updates in the two epochs of a check as the loader has batches, or rows"
    data = TensorDataset(torch.randn(n_rows, 4), torch.randint(3, (n_rows,)))
    dls = DataLoaders(DataLoader(data, 8 if n_rows > 6 else 2))
    cycle = [OneCycleSchedulerCB(cycle_momentum=False)] if not cbs or n_rows > 6 else []
    assert "schedule_pace" not in found_in(fitting(*cbs, *cycle, dls=dls), batches=3)
