"""`trainer.check()` against mistakes that people have made, and against loops that are right.

Every planted fault is found by name; nothing is found in any callback of the library, nor in a group of them.
"""

import copy
import io
import pickle
import warnings
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torcheval.metrics import MulticlassAccuracy

import runs
from isaac_loop import Trainer, replaces, with_cbs
from isaac_loop.basics import map_tensors
from isaac_loop.callbacks import AccumulationCB, BasicTrainCB, BatchTransformCB, ClipGradCB
from isaac_loop.callbacks import DeviceCB, EMACB, MetricsCB, MixedPrecisionCB, ProgressCB
from isaac_loop.data import DataLoaders
from isaac_loop.inspection import CheckFailed, Findings
from isaac_loop.loop.events import CancelBatchException, CancelStepException, Order
from isaac_loop.loop.numbers_on_device import DeviceNumbers
from isaac_loop.loop.plan_checks import Finding, plan_findings
from isaac_loop.recipes import CoreCBs
from working import WORKING, images_trainer, working

clip = nn.utils.clip_grad_norm_


def found_in(trainer, **options):
    "The names of all findings"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            findings = trainer.check(**options)
        except CheckFailed as error:
            return [o.name for o in error.findings]
    assert len(told) == len(findings), "each is warned of once"
    return [o.name for o in findings]


# Real reports, and mistakes of the same kind


class OptimizerCB:
    "catalyst 507: the optimizer callback came before the criterion, and read a loss that was not there"

    order = -5

    def after_predict(self, trainer):
        trainer.loss.backward()


class ScaledStepCB:
    "A scaler of one's own"

    def before_backward(self, trainer):
        trainer.loss = trainer.loss * self.scaler.get_scale()

    def before_fit(self, trainer):
        self.scaler = torch.amp.GradScaler("cpu")

    def before_step(self, trainer):
        self.scaler.unscale_(trainer.opt)


class ClipAfterBackwardCB:
    "allennlp 5426, TorchSSL 59: gradients were clipped before they were un-scaled"

    def after_backward(self, trainer):
        clip(trainer.model.parameters(), 1.0)


class ClampCB:
    def after_backward(self, trainer):
        for p in trainer.model.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.1, 0.1)


class GatherCB:
    "Accumulation of one's own"

    order = 5

    def before_step(self, trainer):
        if trainer.batch_num % 2 == 0:
            raise CancelStepException()

    def before_zero_grad(self, trainer):
        if trainer.batch_num % 2 == 0:
            raise CancelStepException()


class ClipFirstCB:
    "diffusers 721, lingua 59: each small batch was clipped, not the sum"

    order = -200

    def before_step(self, trainer):
        clip(trainer.model.parameters(), 1.0)


class MeanWeightsCB:
    def before_fit(self, trainer):
        self.mean = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    def before_step(self, trainer):
        for name, p in trainer.model.named_parameters():
            self.mean[name].mul_(0.9).add_(p.detach(), alpha=0.1)


class TorchAverageCB:
    def before_fit(self, trainer):
        self.average = optim.swa_utils.AveragedModel(trainer.model)

    def after_backward(self, trainer):
        self.average.update_parameters(trainer.model)


class EarlyPrintCB:
    "Prints the row of an epoch before the metrics are in it"

    def after_epoch(self, trainer):
        print(trainer.history[-1])


class LateColumnCB:
    order = Order.LAST

    def log(self, trainer):
        trainer.history.write(gap=trainer.history[-1]["valid_loss"])


class ToDeviceCB:
    "Moves the batch in the order of the steps, after everybody who changes data"

    def before_batch(self, trainer):
        trainer.batch = [x.to("cpu", non_blocking=True) for x in trainer.batch]


class EarlyClipCB(ClipGradCB):
    order = Order.DEVICE


class NeedsTeacherCB:
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss + F.mse_loss(trainer.preds, trainer.teacher_preds)


class TeacherCB:
    order = 9

    def after_get_loss(self, trainer):
        trainer.teacher_preds = trainer.preds.detach()


class SecondStepCB:
    def after_backward(self, trainer):
        trainer.opt.step()


class LossA:
    def after_get_loss(self, trainer):
        trainer.target_rate = 0.1


class LossB(LossA):
    name = "LossB"

    def after_get_loss(self, trainer):
        trainer.target_rate = 0.2


class ReturnsCB:
    "As in other libraries"

    def before_batch(self, trainer):
        x, y = trainer.batch
        x = x.flip(-1)
        return x, y


class SumsCB:
    def before_epoch(self, trainer):
        self.total = 0.0

    def after_batch(self, trainer):
        self.total += trainer.loss


class ValidationOnlyCB:
    on_train = False

    def after_step(self, trainer):
        self.n = 1


# What people plant in loops that work


class ClipAfter:
    def after_step(self, trainer):
        clip(trainer.model.parameters(), 1.0)


class ClampAfter:
    def after_batch(self, trainer):
        if trainer.training:
            nn.utils.clip_grad_value_(trainer.model.parameters(), 1.0)


class ZeroEarly:
    def after_backward(self, trainer):
        trainer.opt.zero_grad()


class NoGradients:
    def before_step(self, trainer):
        for p in trainer.model.parameters():
            p.grad = None


class ScaleLoss:
    def before_backward(self, trainer):
        trainer.loss = trainer.loss / 4

    def before_step(self, trainer):
        if trainer.batch_num % 4 != 3:
            raise CancelStepException()


class DivideLoss:
    def before_backward(self, trainer):
        trainer.loss /= 4


class CountTwice:
    def __init__(self):
        self.accuracy = MulticlassAccuracy()

    def after_predict(self, trainer):
        self.accuracy.update(trainer.preds, trainer.batch[1])

    def after_batch(self, trainer):
        self.accuracy.update(trainer.preds, trainer.batch[1])

    def cleanup_epoch(self, trainer):
        trainer.history.write(right=self.accuracy.compute().item())


class Schedules:
    def before_fit(self, trainer):
        self.schedule = optim.lr_scheduler.ExponentialLR(trainer.opt, 0.9)


class StepAndEpoch(Schedules):
    def after_batch(self, trainer):
        if trainer.training:
            self.schedule.step()

    def log(self, trainer):
        self.schedule.step()


class EachPass(Schedules):
    def after_epoch(self, trainer):
        self.schedule.step()


class Overwrite:
    def after_get_loss(self, trainer):
        trainer.loss = F.cross_entropy(trainer.preds, trainer.batch[1]) + 0.01 * trainer.preds.square().mean()


class Penalty:
    order = -1

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss + 0.01 * sum(p.square().sum() for p in trainer.model.parameters())


class Aug:
    def before_batch(self, trainer):
        x, y = trainer.batch
        if torch.rand(1) < 0.5:
            x = x.flip(-1)
        trainer.batch = x, y


class Slip:
    def before_batch(self, trainer):
        trainer.batchs = [x[:2] for x in trainer.batch]


class Average:
    def before_fit(self, trainer):
        self.ema = copy.deepcopy(trainer.model)


class LerpEarly(Average):
    def before_step(self, trainer):
        for mean, p in zip(self.ema.parameters(), trainer.model.parameters()):
            mean.lerp_(p.detach(), 0.1)


class MixEarly(Average):
    @torch.no_grad()
    def after_backward(self, trainer):
        for mean, p in zip(self.ema.parameters(), trainer.model.parameters()):
            mean.copy_(0.9 * mean + 0.1 * p)


class Graph:
    def before_epoch(self, trainer):
        self.total = 0.0

    def after_batch(self, trainer):
        self.total = self.total + trainer.loss * len(trainer.batch[0])


class RunningMean:
    def before_fit(self, trainer):
        self.mean = None

    def after_batch(self, trainer):
        self.mean = trainer.loss if self.mean is None else 0.9 * self.mean + 0.1 * trainer.loss


class MeanOfPreds:
    def before_fit(self, trainer):
        self.mean = 0.0

    def after_batch(self, trainer):
        self.mean = 0.9 * self.mean + 0.1 * trainer.preds.mean()


class DecayRate:
    def log(self, trainer):
        trainer.lr *= 0.5


class LookInEval:
    def after_step(self, trainer):
        if trainer.batch_num == 0:
            trainer.model.eval()
            self.spread = trainer.model(trainer.batch[0]).std().item()


class TrainFalse:
    def before_predict(self, trainer):
        trainer.model.train(False)


class LatePenalty:
    def after_backward(self, trainer):
        trainer.loss = trainer.loss + 0.01 * trainer.preds.square().mean()


class LateScale:
    def before_step(self, trainer):
        trainer.loss *= 2


class CountsOn:
    def before_fit(self, trainer):
        self.accuracy = MulticlassAccuracy()
        self.accuracy.reset()

    def after_batch(self, trainer):
        self.accuracy.update(trainer.preds, trainer.batch[1])

    def log(self, trainer):
        print(self.accuracy.compute())


class CountsOnInValidation(CountsOn):
    on_train = False


FAULTS = {
    "a rate that nobody reads": ([DecayRate()], "unread_rate"),
    "a model that stays in evaluation": ([LookInEval()], "left_in_eval"),
    "a model that is not in training": ([TrainFalse()], "left_in_eval"),
    "a term that comes after the gradients": ([LatePenalty()], "late_loss"),
    "a factor that comes after the gradients": ([LateScale()], "late_loss"),
    "a metric that is reset for a fit alone": ([CountsOn()], "never_reset"),
    "a metric of validation that is never reset": ([CountsOnInValidation()], "never_reset"),
    "a running mean keeps graphs": ([RunningMean()], "keeps_graph"),
    "a mean of predictions keeps graphs": ([MeanOfPreds()], "keeps_graph"),
    "clipped after the step": ([ClipAfter()], "clip_after_step"),
    "clamped when the batch is over": ([ClampAfter()], "clip_after_step"),
    "cleared before the step": ([ZeroEarly()], "cleared_before_step"),
    "no gradients at the step": ([NoGradients()], "cleared_before_step"),
    "a loss that stays divided": ([ScaleLoss()], "scaled_loss"),
    "a loss that is divided in place": ([DivideLoss()], "scaled_loss"),
    "a metric counts twice": ([CountTwice()], "counted_twice"),
    "a schedule for batches and epochs": ([StepAndEpoch()], "schedule_twice"),
    "a schedule in both passes": ([EachPass()], "schedule_twice"),
    "a term of the loss is lost": ([Overwrite(), Penalty()], "overwritten"),
    "validation is augmented": ([Aug()], "random_validation"),
    "a slip of the pen": ([Slip()], "misspelt"),
    "an average of a copied model before the step": ([LerpEarly()], "average_before_step"),
    "a mixed average before the step": ([MixEarly()], "average_before_step"),
    "a sum that is written out": ([Graph()], "keeps_graph"),
    "catalyst 507: the loss is read before it exists": ([OptimizerCB()], "read_before_written"),
    "allennlp 5426: clipped while scaled": ([ScaledStepCB(), ClipAfterBackwardCB()], "clip_before_unscale"),
    "TorchSSL 59: clamped while scaled": ([MixedPrecisionCB("float16"), ClampCB()], "clip_before_unscale"),
    "a subclass comes before un-scaling": (
        [MixedPrecisionCB("float16"), EarlyClipCB(1.0)],
        "clip_before_unscale",
    ),
    "diffusers 721: clipped in each small batch": (
        [AccumulationCB(2), ClipAfterBackwardCB()],
        "clip_every_micro_batch",
    ),
    "lingua 59: clipped before a gatherer of one's own": (
        [GatherCB(), ClipFirstCB()],
        "clip_every_micro_batch",
    ),
    "an average before the step": ([MeanWeightsCB()], "average_before_step"),
    "torch's average before the step": ([TorchAverageCB()], "average_before_step"),
    "a row is printed before the metrics are in it": ([MetricsCB(), EarlyPrintCB()], "metrics_after_report"),
    "a column comes after the bar": (
        [MetricsCB(), ProgressCB("plain"), LateColumnCB()],
        "metrics_after_report",
    ),
    "the batch moves after it was augmented": (
        [BatchTransformCB(lambda batch: batch), ToDeviceCB()],
        "device_after_augment",
    ),
    "a subclass turns an order round": ([MixedPrecisionCB("float16"), EarlyClipCB(1.0)], "order_turned"),
    "nobody provides it": ([NeedsTeacherCB()], "no_provider"),
    "it is provided too late": ([NeedsTeacherCB(), TeacherCB()], "read_before_written"),
    "two steps": ([SecondStepCB()], "double_step"),
    "two writers": ([LossA(), LossB()], "writers_without_order"),
    "what is returned is lost": ([ReturnsCB()], "return_ignored"),
    "the graph of every batch is kept": ([SumsCB()], "keeps_graph"),
    "it never runs": ([ValidationOnlyCB()], "waits_in_vain"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_planted_fault_is_found_by_name(case):
    callbacks, name = FAULTS[case]
    trainer = images_trainer([BasicTrainCB(), *callbacks])
    assert name in found_in(trainer)


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_that_is_meant_is_silent_by_its_name(case):
    callbacks, name = FAULTS[case]
    trainer = images_trainer([BasicTrainCB(), *callbacks])
    assert name not in found_in(trainer, ignore=name)
    callbacks[-1].silent = (name,)
    try:
        assert name not in found_in(trainer)
    finally:
        del callbacks[-1].silent


class ReturnsLossCB(BasicTrainCB):
    def get_loss(self, trainer):
        return F.cross_entropy(trainer.preds, trainer.batch[1], label_smoothing=0.1)


class ReturnsHalfLossCB(BasicTrainCB):
    def __init__(self):
        self.criterion = nn.CrossEntropyLoss()

    def get_loss(self, trainer):
        loss = self.criterion(trainer.preds, trainer.batch[1])
        return loss / 2


class ReturnsOwnLossCB(BasicTrainCB):
    def get_loss(self, trainer):
        return self.own(trainer)

    def own(self, trainer):
        return F.cross_entropy(trainer.preds, trainer.batch[1])


class ReturnsPredsCB(BasicTrainCB):
    def predict(self, trainer):
        x, _ = trainer.batch
        return trainer.model(x)


class SetsInBaseCB(BasicTrainCB):
    def get_loss(self, trainer):
        return super().get_loss(trainer)


class SetsInMethodCB(ReturnsOwnLossCB):
    def own(self, trainer):
        trainer.loss = F.cross_entropy(trainer.preds, trainer.batch[1])
        return trainer.loss


class SetsAndReturnsCB(BasicTrainCB):
    def predict(self, trainer):
        preds = trainer.model(trainer.batch[0])
        trainer.preds = preds
        return preds


class SetsInFunctionCB(BasicTrainCB):
    def get_loss(self, trainer):
        return set_loss(trainer)


def set_loss(trainer):
    trainer.loss = F.cross_entropy(trainer.preds, trainer.batch[1])


@pytest.mark.parametrize(
    "callback,name",
    [
        (ReturnsLossCB, "loss"),
        (ReturnsHalfLossCB, "loss"),
        (ReturnsOwnLossCB, "loss"),
        (ReturnsPredsCB, "preds"),
    ],
)
def test_a_step_that_returns_what_it_is_to_set_is_found(callback, name):
    "The loop said only that there is no loss, or trained with another one"
    with pytest.warns(UserWarning, match=rf"as in `trainer.{name} = ...`\. \(return_ignored\)"):
        images_trainer([callback()]).check()


@pytest.mark.parametrize("callback", [SetsInBaseCB, SetsInMethodCB, SetsAndReturnsCB, SetsInFunctionCB])
def test_a_step_that_sets_what_it_also_returns_is_let_alone(callback):
    assert "return_ignored" not in found_in(images_trainer([callback()]))


def test_a_finding_names_everybody_and_its_own_name():
    trainer = images_trainer([BasicTrainCB(), SecondStepCB()])
    with pytest.raises(CheckFailed, match="double_step") as failed:
        trainer.check()
    text = str(failed.value)
    assert "`SecondStepCB.after_backward`" in text and "`BasicTrainCB.step`" in text and "ignore=" in text
    assert failed.value.findings[0].spoils


# What is right


@pytest.mark.parametrize("name", WORKING)
def test_nothing_is_found_in_a_callback_of_the_library(name, tmp_path):
    trainer, _ = working(name, tmp_path)
    assert found_in(trainer) == []


def test_nothing_is_found_in_a_run_with_everything():
    assert found_in(runs.make_trainer(runs.everything())) == []
    cbs = [BasicTrainCB(), DeviceCB("cpu"), MixedPrecisionCB("float16"), AccumulationCB(2), ClipGradCB(1.0)]
    assert found_in(images_trainer([*cbs, EMACB(0.9), MetricsCB()])) == []
    assert found_in(images_trainer([CoreCBs(accuracy=MulticlassAccuracy())])) == []


class RightCB:
    "State, guards, helpers, a second optimizer, a value from the last batch: all of it meant"

    def before_fit(self, trainer):
        self.losses, trainer.margin = [], 0.0

    def before_batch(self, trainer):
        self.last = getattr(trainer, "preds_before", None)
        self.first = trainer.margin

    def after_batch(self, trainer):
        trainer.preds_before = trainer.preds.detach()
        self.losses.append(trainer.loss.item())
        if trainer.batch_num > 0:
            self.n = trainer.seen_before
        trainer.seen_before = True

    def helper(self, trainer):
        return trainer.loss

    def after_get_loss(self, trainer):
        self.value = self.helper(trainer).detach()


class TwoOptimizersTrainer(Trainer):
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")


class StepHeadCB:
    def after_step(self, trainer):
        trainer.opt_head.step()
        trainer.opt_head.zero_grad()


class OwnStepCB:
    @replaces
    def step(self, trainer):
        trainer.opt.step()


class CastCB:
    def before_batch(self, trainer):
        trainer.batch = [x.to(torch.float32) if x.is_floating_point() else x for x in trainer.batch]


class SometimesCB:
    "A second step in every second batch, which may well be meant"

    def after_batch(self, trainer):
        if trainer.batch_num % 2:
            trainer.opt.step()


class Late(Average):
    "What the planted ones do, at the right moment"

    def before_backward(self, trainer):
        self.loss, trainer.loss = trainer.loss, trainer.loss / 4

    def cleanup_backward(self, trainer):
        trainer.loss = self.loss

    def before_step(self, trainer):
        clip(trainer.model.parameters(), 1.0)
        for name, p in trainer.model.named_parameters():
            if name.endswith("bias"):
                p.grad = None

    def after_step(self, trainer):
        trainer.opt.zero_grad()
        for mean, p in zip(self.ema.parameters(), trainer.model.parameters()):
            mean.lerp_(p.detach(), 0.1)
        for mean, p in zip(self.ema.buffers(), trainer.model.buffers()):
            mean.copy_(p)


class EitherSchedule(Schedules):
    "One for batches or for epochs, as was asked for"

    def __init__(self, each_batch=False):
        self.each_batch = each_batch

    def after_step(self, trainer):
        if self.each_batch:
            self.schedule.step()

    def after_epoch(self, trainer):
        if trainer.training and not self.each_batch:
            self.schedule.step()


class CountOnce(CountTwice):
    def before_epoch(self, trainer):
        self.accuracy.reset()

    def after_predict(self, trainer):
        if trainer.training:
            self.accuracy.update(trainer.preds, trainer.batch[1])

    def after_batch(self, trainer):
        if not trainer.training:
            self.accuracy.update(trainer.preds, trainer.batch[1])


class SecondGradient:
    "Sharpness-aware: the gradient is taken again, elsewhere"

    def after_backward(self, trainer):
        trainer.opt.zero_grad()
        F.cross_entropy(trainer.model(trainer.batch[0]), trainer.batch[1]).backward()


class SecondNet:
    "Another net, trained when the batch is over"

    def before_fit(self, trainer):
        self.net = nn.Linear(64, 3)
        self.opt = optim.SGD(self.net.parameters(), 0.1)

    def after_batch(self, trainer):
        F.cross_entropy(self.net(trainer.batch[0].flatten(1)), trainer.batch[1]).backward()
        clip(self.net.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad()


class TrainingAug(Aug):
    on_valid = False


class AskingAug:
    def before_batch(self, trainer):
        if not trainer.training:
            return
        x, y = trainer.batch
        trainer.batch = x + torch.randn_like(x), y


class Denoise:
    def before_batch(self, trainer):
        x, _ = trainer.batch
        trainer.batch = x + torch.randn_like(x), x


class OwnNames:
    def before_fit(self, trainer):
        trainer.mode, trainer.losses, trainer.loss_ = "slow", [], 0.0

    def after_batch(self, trainer):
        trainer.losses.append(trainer.loss.detach())


class SumWithoutGraph(Graph):
    @torch.no_grad()
    def after_batch(self, trainer):
        self.total = self.total + trainer.loss * 2


class Detached:
    "Without a graph, or with one only under a condition"

    def before_fit(self, trainer):
        self.losses, self.preds, self.mean, self.right = [], [], 0.0, 0.0
        self.numbers = DeviceNumbers()

    def after_batch(self, trainer):
        loss, preds = trainer.loss, trainer.preds
        self.losses.append(loss.detach() if torch.is_tensor(loss) else loss)
        self.losses.append(loss.item() if torch.is_tensor(loss) else loss)
        if torch.is_tensor(preds):
            preds = preds.detach()
        self.preds.append(preds)
        self.numbers.add(trainer.loss)
        self.mean = 0.9 * self.mean + 0.1 * trainer.loss.item()
        self.right = self.right + (trainer.preds.argmax(1) == trainer.batch[1]).float().mean()


class RatesInTime:
    def before_fit(self, trainer):
        trainer.lr = 0.1

    def log(self, trainer):
        trainer.lr *= 0.5
        for group in trainer.opt.param_groups:
            group["lr"] = trainer.lr


class LookAndTrain:
    def after_step(self, trainer):
        trainer.model.eval()
        self.spread = trainer.model(trainer.batch[0]).std().item()
        trainer.model.train()


class EvalInValidation:
    def before_batch(self, trainer):
        if not trainer.training:
            trainer.model.eval()


class EvalOfAPart:
    def before_batch(self, trainer):
        trainer.model[0].eval()


class ScaledAndBack:
    def before_backward(self, trainer):
        trainer.loss = trainer.loss / 4

    def after_backward(self, trainer):
        trainer.loss = trainer.loss * 4


class FreesGraph:
    def after_backward(self, trainer):
        trainer.loss = trainer.loss.detach()


class CountsAnew(CountsOn):
    def before_epoch(self, trainer):
        self.accuracy = MulticlassAccuracy()


class ResetsAll(CountsOn):
    def log(self, trainer):
        print(self.accuracy.compute())
        for metric in [self.accuracy]:
            metric.reset()


class ClearBad:
    bad = False

    def after_get_loss(self, trainer):
        self.bad = bool(trainer.loss > 5)

    def before_step(self, trainer):
        if self.bad is True:
            trainer.opt.zero_grad()


RIGHT = {
    "gradients of a bad batch are cleared": [ClearBad()],
    "a rate that is written in time, or for the optimizer as well": [RatesInTime()],
    "a model that trains again": [LookAndTrain()],
    "a model in evaluation in validation": [EvalInValidation()],
    "a part of a model in evaluation": [EvalOfAPart()],
    "a loss that is scaled and put back": [ScaledAndBack()],
    "a loss without its graph": [FreesGraph()],
    "a metric that is made anew": [CountsAnew()],
    "a metric that is reset in a loop": [ResetsAll()],
    "what is detached, perhaps under a condition": [Detached()],
    "clipping, clearing, scaling and averaging at the right moment": [Late()],
    "a schedule for batches or for epochs": [EitherSchedule()],
    "a metric that is updated elsewhere in each pass": [CountOnce()],
    "a second gradient": [SecondGradient()],
    "a second net": [SecondNet()],
    "augmentation of training alone": [TrainingAug()],
    "augmentation that asks": [AskingAug()],
    "a task that makes its targets": [Denoise()],
    "names of one's own": [OwnNames()],
    "a sum without its graph": [SumWithoutGraph()],
    "a term on top of another loss": [
        SimpleNamespace(after_get_loss=Overwrite().after_get_loss, order=-2),
        Penalty(),
    ],
    "a step under a condition": [SometimesCB()],
    "state and guards": [RightCB()],
    "a step of one's own instead": [OwnStepCB()],
    "a cast after a transform": [BatchTransformCB(lambda batch: batch), CastCB()],
    "a lambda that returns": [SimpleNamespace(after_batch=lambda trainer: trainer.loss)],
    "clipping in its place": [AccumulationCB(2), MixedPrecisionCB("float16"), ClipGradCB(1.0)],
    "clipping of half precision that has no scale": [MixedPrecisionCB("bfloat16"), ClipAfterBackwardCB()],
}


@pytest.mark.parametrize("case", RIGHT)
def test_nothing_is_found_in_what_is_right(case):
    assert found_in(images_trainer([BasicTrainCB(), *RIGHT[case]])) == []


def test_a_second_optimizer_makes_no_double_step():
    trainer = images_trainer([BasicTrainCB(), StepHeadCB()])
    trainer.opt_head = optim.SGD(trainer.model[1].parameters(), 0.1)
    assert found_in(trainer) == []


class PredictTrainer(Trainer):
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")


class HelpedTrainer(Trainer):
    "Its batch runs steps by a helper, and some under a condition"

    def one_batch(self):
        self.forward()
        if self.training:
            self.learn(["backward", "step"])
            self.run_callbacks("zero_grad")

    def forward(self):
        self.run_callbacks("predict", "get_loss")

    def learn(self, steps):
        self.run_callbacks(*steps)


def test_who_waits_for_steps_that_a_batch_of_ones_own_does_not_run_is_told():
    parts = DataLoaders([(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))]), F.cross_entropy, optim.SGD
    callbacks = [BasicTrainCB(), ClipGradCB(1.0)]
    assert found_in(PredictTrainer(*parts, nn.Linear(3, 2), callbacks)) == ["waits_in_vain"]
    assert found_in(HelpedTrainer(*parts, nn.Linear(3, 2), callbacks)) == []


class NoSpanTrainer(Trainer):
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")


class SpanTrainer(Trainer):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")


class BordersTrainer(NoSpanTrainer):
    def one_batch(self):
        self.run_callbacks("before_batch")
        super().one_batch()
        self.run_callbacks("after_batch", "cleanup_batch")


class WrapsTrainer(Trainer):
    def one_batch(self):
        self.n_seen = 0
        super().one_batch()


@pytest.mark.parametrize("batches", [0, 3])
def test_a_batch_of_ones_own_that_is_no_span_is_run_and_told_where_somebody_waits_for_its_borders(batches):
    def small(cls, *cbs):
        data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        parts = DataLoaders(data, data[:2]), F.cross_entropy, optim.SGD
        return cls(*parts, nn.Linear(3, 2), [BasicTrainCB(), *cbs])

    assert found_in(small(NoSpanTrainer), batches=batches) == []
    trainer = small(NoSpanTrainer, MetricsCB())
    assert found_in(trainer, batches=batches) == ["waits_in_vain"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "`NoSpanTrainer.one_batch` is your own and no span" in str(trainer.check())
    for cls in (SpanTrainer, BordersTrainer, WrapsTrainer):
        assert found_in(small(cls, MetricsCB(), ClipGradCB(1.0)), batches=batches) == [], cls


class TwoPhases(Trainer):
    "Goes over the data twice, and says which time it is"

    def one_epoch(self, training):
        for self.phase in ("wake", "sleep") if training else ("wake",):
            super().one_epoch(training)


class Weighted(Trainer):
    def fit(self, *args, **settings):
        self.phase = "wake"
        return super().fit(*args, **settings)


class InnerDone(Exception):
    "Ends the span `inner`"


class Inner(Trainer):
    "Learns in a span of its own"

    @with_cbs("inner", InnerDone)
    def inner_step(self):
        self.phase = "sleep"
        self.run_callbacks("predict", "get_loss", "backward", "step", "zero_grad")

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        for self.i in range(2):
            self.inner_step()


class InnerClears(Trainer):
    "Clears the gradients in a span of its own"

    @with_cbs("inner", InnerDone)
    def clear(self):
        self.run_callbacks("zero_grad")

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.phase = "wake"
        self.run_callbacks("predict", "get_loss", "backward", "step")
        self.clear()


class OfPhase:
    def after_get_loss(self, trainer):
        self.factor = 1 if trainer.phase == "wake" else 0.5


@pytest.mark.parametrize("cls", [TwoPhases, Weighted, Inner, InnerClears])
def test_a_loop_of_ones_own_is_read_with_its_spans(cls):
    data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(2)]
    trainer = cls(DataLoaders(data), F.cross_entropy, optim.SGD, nn.Linear(3, 2), [BasicTrainCB(), OfPhase()])
    assert found_in(trainer) == []
    assert "phase" in [name for entry in trainer.map().entries for name in entry.found.writes]
    trainer.fit(1, lr=0.1, valid=False)


class ByHand(Trainer):
    "Its steps are methods of its own"

    def before_fit(self):
        self.opt_a = optim.SGD(self.model.parameters(), self.lr)

    def predict(self):
        self.preds = self.model(self.batch[0])

    def get_loss(self):
        self.loss = self.loss_func(self.preds, self.batch[1])

    def backward(self):
        self.loss.backward()

    def step(self):
        self.opt_a.step()

    def zero_grad(self):
        self.opt_a.zero_grad()


class ByHandToo(ByHand):
    def before_fit(self):
        super().before_fit()

    def get_loss(self):
        super().get_loss()
        self.loss = self.loss + 0.01 * self.preds.square().mean()

    def step(self):
        super().step()


class OfOptA:
    def before_epoch(self, trainer):
        self.rate = trainer.opt_a.param_groups[0]["lr"]


def test_what_a_trainers_method_leaves_to_its_parent_is_read_there():
    data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(2)]
    trainer = ByHandToo(DataLoaders(data), F.cross_entropy, None, nn.Linear(3, 2), OfOptA())
    assert found_in(trainer) == []
    assert ("step", "ByHandToo") in [(o["event"], o["callback"]) for o in trainer.who_writes("model").rows]


class ClearsLater(TwoPhases):
    "Gathers the gradients of a whole pass"

    def one_epoch(self, training):
        super().one_epoch(training)
        if training:
            self.opt.step()
            self.opt.zero_grad()


class OnlyBackward(BasicTrainCB):
    def step(self, trainer):
        "One step for a whole pass, which the trainer makes"

    def zero_grad(self, trainer):
        "After that step"


def test_what_a_pass_of_ones_own_does_is_not_said_to_be_done_by_nobody():
    data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(2)]
    parts = DataLoaders(data), F.cross_entropy, optim.SGD, nn.Linear(3, 2)
    assert found_in(ClearsLater(*parts, [OnlyBackward(), OfPhase()])) == []
    assert found_in(Trainer(*parts, OnlyBackward())) == ["never_stepped"]


def test_what_batches_tell_is_also_told_of_a_batch_that_is_no_span():
    class Halves:
        def before_predict(self, trainer):
            trainer.batch[0].mul_(0.5)

    data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
    parts = DataLoaders(data, data[:2]), F.cross_entropy, optim.SGD
    names = found_in(NoSpanTrainer(*parts, nn.Linear(3, 2), [BasicTrainCB(), Halves()]), batches=3)
    assert names == found_in(SpanTrainer(*parts, nn.Linear(3, 2), [BasicTrainCB(), Halves()]), batches=3)
    assert names


# At every fit


def test_a_turned_order_is_told_once_by_every_trainer_that_trains_with_it():
    trainer = images_trainer([BasicTrainCB(), MixedPrecisionCB("bfloat16"), EarlyClipCB(1.0)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(1)
        trainer.fit(1)
    assert [str(o.message).rpartition(" ")[2] for o in told] == ["(order_turned)"]
    EarlyClipCB.silent = "order_turned"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            images_trainer([BasicTrainCB(), MixedPrecisionCB("bfloat16"), EarlyClipCB(1.0)]).fit(1)
    finally:
        del EarlyClipCB.silent


class WholeLoopCB:
    "A second training loop"

    def predict(self, trainer):
        trainer.preds = trainer.model(trainer.batch[0])

    def get_loss(self, trainer):
        trainer.loss = F.cross_entropy(trainer.preds, trainer.batch[1])

    def backward(self, trainer):
        trainer.loss.backward()

    def step(self, trainer):
        trainer.opt.step()


@pytest.mark.filterwarnings("ignore:`BasicTrainCB")
def test_a_second_backward_that_fails_names_both_callbacks():
    trainer = images_trainer([BasicTrainCB(), WholeLoopCB()])
    with pytest.raises(RuntimeError, match="second time") as failed:
        trainer.fit(1)
    notes = " ".join(failed.value.__notes__)
    assert "`BasicTrainCB.backward` has run before `WholeLoopCB.backward`" in notes and "@replaces" in notes


def test_the_checks_of_a_fit_find_nothing_in_a_run_with_everything():
    trainer = runs.make_trainer(runs.everything())
    trainer.plan.build(trainer.callbacks)
    assert plan_findings(trainer) == []


def test_a_check_changes_nothing():
    plain = runs.fit(runs.make_trainer(runs.everything()))
    checked = runs.make_trainer(runs.everything())
    with redirect_stdout(io.StringIO()) as said:
        checked.check()
    assert not said.getvalue()
    runs.same(plain, runs.fit(checked))


def test_a_name_that_is_no_check_is_refused():
    with pytest.raises(LookupError, match="Did you mean `double_step`"):
        images_trainer([BasicTrainCB()]).check(ignore="doublestep")


class CancelledCB:
    def after_backward(self, trainer):
        if trainer.batch_num % 2:
            raise CancelBatchException()


def test_gathering_by_cancelled_batches_beside_mixed_precision_is_no_fault_here():
    "fastai 3048: there the cancelled batch was not un-scaled. Here un-scaling is a part of the step"
    weights = []
    for precision in ([], [MixedPrecisionCB("float16")]):
        trainer = images_trainer([BasicTrainCB(), CancelledCB(), *precision], opt_func=optim.SGD)
        assert found_in(trainer) == []
        trainer.fit(1, 0.1)
        assert trainer.n_updates == 2
        weights.append(trainer.model[1].weight.detach())
    assert torch.allclose(*weights, atol=0.02)


def test_a_loop_without_steps_is_told():
    dls = DataLoaders([(torch.randn(4, 2), torch.randn(4, 1))])
    trainer = Trainer(dls, F.mse_loss, torch.optim.SGD, torch.nn.Linear(2, 1), MetricsCB(show=False))
    with pytest.warns(UserWarning, match="No callback does any of the steps(.|\n)*learns nothing"):
        assert "no_provider" in [o.name for o in trainer.check()]
    trainer.add_callbacks(BasicTrainCB())
    assert trainer.check() == []


def test_a_class_that_was_made_by_exec_has_no_module_and_is_checked_as_far_as_it_goes():
    space = {}
    exec("class FirstCB:\n    def before_fit(self, trainer): self.n = trainer.nothing\n", space)
    dls = DataLoaders([(torch.randn(4, 2), torch.randn(4, 1))])
    net = torch.nn.Linear(2, 1)
    trainer = Trainer(dls, F.mse_loss, torch.optim.SGD, net, [BasicTrainCB(), space["FirstCB"]()])
    with pytest.warns(UserWarning, match="no source of all that `FirstCB.before_fit`"):
        assert trainer.check() == []
    assert str(trainer.map()) and trainer.to_script(partial=True).not_written


@pytest.mark.parametrize("batches", [0, 2])
def test_what_has_no_source_is_no_all_clear(batches):
    space = {}
    exec("class TwiceCB:\n    def after_backward(self, trainer): trainer.opt.step()\n", space)
    trainer = images_trainer([BasicTrainCB(), space["TwiceCB"](), MeetsItself()])
    with pytest.warns(UserWarning, match="`TwiceCB.after_backward` would run, so no rule has read it"):
        findings = trainer.check(batches=batches)
    assert findings == [] and findings.unread == ["TwiceCB.after_backward"]
    assert "But Python has no source of all that `TwiceCB.after_backward`" in str(findings)


class MeetsItself:
    "Has a source, and does nothing wrong"

    def after_batch(self, trainer):
        self.last = trainer.batch_num


class TrainsAnother:
    "Has a network and an optimizer of its own, which it clears, and trains after the batch"

    on_valid = False

    def before_fit(self, trainer):
        self.net = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
        self.net(next(iter(trainer.dls.train))[0])
        self.other = optim.SGD(self.net.parameters(), lr=0.1)

    def after_batch(self, trainer):
        loss = F.cross_entropy(self.net(trainer.batch[0]), trainer.batch[1])
        self.other.zero_grad()
        loss.backward()
        self.other.step()


def test_an_optimizer_of_a_callback_is_no_step_of_the_trainers():
    trainer = images_trainer([BasicTrainCB(), TrainsAnother()])
    assert "never_cleared" not in found_in(trainer) + found_in(trainer, batches=3)


def test_what_was_found_comes_back_from_another_process():
    "An error that cannot be read again would break a pool of processes"
    found = Findings([Finding("double_step", "Two steps.", spoils=True)], batches=3)
    error = pickle.loads(pickle.dumps(CheckFailed(found)))
    assert str(error) == str(CheckFailed(found)) and [o.name for o in error.findings] == ["double_step"]
    assert str(copy.deepcopy(error)) == str(error)


class KeepsCB:
    "Keeps the weights of the best epoch, by a function for each tensor"

    def __init__(self, keep):
        self.keep = keep

    def log(self, trainer):
        self.weights = map_tensors(self.keep, trainer.model.state_dict())


def test_what_is_kept_by_a_function_for_each_tensor_is_what_that_gives():
    make = lambda keep: images_trainer([BasicTrainCB(), KeepsCB(keep)])
    for copies in (torch.clone, lambda o: o.detach().clone()):
        assert found_in(make(copies)) == []
    assert found_in(make(lambda o: o.detach())) != []


class NearlyTrainCB(BasicTrainCB):
    def get_los(self, trainer):
        trainer.loss = F.cross_entropy(trainer.preds, trainer.batch[1], label_smoothing=0.5)


class NearlyLog:
    def before_fit(self, trainer):
        self.bad = 0

    def logs(self, trainer):
        self.bad += 1


class MeantLog(NearlyLog):
    silent = "nearly_event"


class HelpersOfItsOwn:
    "Has methods that are called nearly like events, and calls them, or cannot be meant"

    def before_fit(self, trainer):
        self.steps(trainer)
        for name in "measure", "zero_grads":
            getattr(self, name)(trainer)

    def steps(self, trainer):
        pass

    def measure(self, trainer):
        pass

    def zero_grads(self, trainer):
        pass

    def backwards(self):
        "Takes no trainer"

    def stop(self, trainer):
        pass

    def log(self, trainer):
        pass

    def logs(self, trainer):
        "Beside a `log` of its own"

    def predicts(self, trainer):
        pass


def use(callback, trainer):
    return callback.predicts(trainer)


class NearlyTrainer(Trainer):
    def one_bach(self):
        pass


def test_a_step_or_a_log_that_is_misspelt_and_never_called_is_found():
    trainer = images_trainer([NearlyTrainCB()])
    with pytest.raises(
        CheckFailed, match="`NearlyTrainCB.get_los` is nearly `get_loss`, and nobody calls it"
    ):
        trainer.check()
    assert "nearly_event" in found_in(images_trainer([BasicTrainCB(), NearlyLog()]))
    for helper in (MeantLog(), HelpersOfItsOwn()):
        assert "nearly_event" not in found_in(images_trainer([BasicTrainCB(), helper]))
    parts = trainer.dls, trainer.loss_func, trainer.opt_func, trainer.model
    with pytest.raises(CheckFailed, match="`NearlyTrainer.one_bach` is nearly `one_batch`"):
        NearlyTrainer(*parts, BasicTrainCB()).check()
