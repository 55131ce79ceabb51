"""More mistakes that people make in training loops and callbacks, each beside what is like it and right.

Each planted one is found by the name of its rule; in the right ones nothing is found.
"""

import copy
import random
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop import Trainer, replaces, with_cbs
from isaac_loop.callbacks import BasicTrainCB, BatchSchedulerCB, EpochSchedulerCB, MetricsCB
from isaac_loop.inspection import CheckFailed, try_callback
from isaac_loop.loop.events import CancelBatchException, CancelEpochException, CancelFitException
from isaac_loop.loop.events import CancelStepException
from isaac_loop.loop.plan_checks import Finding
from working import found_in, images_trainer


# What is wrong


class Best:
    order = 30

    def before_fit(self, trainer):
        self.best_loss = float("inf")


class BestAlias(Best):
    def log(self, trainer):
        loss = trainer.history[-1]["valid_loss"]
        if loss < self.best_loss:
            self.best_loss = loss
            self.best = trainer.model.state_dict()

    def after_fit(self, trainer):
        trainer.model.load_state_dict(self.best)


class BestShallow(BestAlias):
    def log(self, trainer):
        self.best = trainer.model.state_dict().copy()


class BestDict(Best):
    def log(self, trainer):
        if trainer.history[-1]["valid_loss"] < self.best_loss:
            self.best = dict(trainer.model.named_parameters())


class BestList(Best):
    def after_step(self, trainer):
        self.best = list(trainer.model.parameters())

    def after_fit(self, trainer):
        for p, b in zip(trainer.model.parameters(), self.best):
            p.data.copy_(b)


class BestComp(Best):
    def log(self, trainer):
        self.best = {k: v for k, v in trainer.model.state_dict().items()}


class BestCpu(Best):
    def log(self, trainer):
        self.best = {k: v.cpu() for k, v in trainer.model.state_dict().items()}


class BestOpt(Best):
    def log(self, trainer):
        self.best = trainer.opt.state_dict()

    def after_fit(self, trainer):
        trainer.opt.load_state_dict(self.best)


class BestBoth(Best):
    def log(self, trainer):
        self.best = {
            "model": trainer.model.state_dict(),
            "opt": trainer.opt.state_dict(),
            "epoch": trainer.epoch,
        }


class BestModel(Best):
    def log(self, trainer):
        if trainer.history[-1]["valid_loss"] < self.best_loss:
            self.best_model = trainer.model

    def after_fit(self, trainer):
        trainer.model = self.best_model


class BestHistory(Best):
    def before_fit(self, trainer):
        self.snaps = []

    def log(self, trainer):
        self.snaps.append(trainer.model.state_dict())


class InitialWeights:
    def before_fit(self, trainer):
        self.init = [p.data for p in trainer.model.parameters()]

    def after_fit(self, trainer):
        self.moved = sum(((p - q).norm().item() for p, q in zip(trainer.model.parameters(), self.init)))


class BestViaLocal(Best):
    def log(self, trainer):
        sd = trainer.model.state_dict()
        self.best = sd


class EmaAlias:
    def before_fit(self, trainer):
        self.ema = trainer.model.state_dict()

    def after_step(self, trainer):
        for k, v in trainer.model.state_dict().items():
            self.ema[k] = 0.9 * self.ema[k] + 0.1 * v


class SkipStepEveryTwoClears:
    def before_step(self, trainer):
        if (trainer.batch_num + 1) % 4 != 0:
            raise CancelStepException()


class AccumFirst:
    def before_backward(self, trainer):
        self.l, trainer.loss = (trainer.loss, trainer.loss / 4)

    def cleanup_backward(self, trainer):
        trainer.loss = self.l

    def before_step(self, trainer):
        if trainer.batch_num % 4 != 0:
            raise CancelStepException()

    def before_zero_grad(self, trainer):
        if trainer.batch_num % 4 != 3:
            raise CancelStepException()


class SkipZeroNeverSkipStep:
    def before_zero_grad(self, trainer):
        if (trainer.batch_num + 1) % 4 != 0:
            raise CancelStepException()


class CancelBatchAfterBackwardKeepsGrads:
    def after_backward(self, trainer):
        norm = sum((p.grad.norm() for p in trainer.model.parameters()))
        if not torch.isfinite(norm):
            raise CancelBatchException()


class SkipBadGradsBatch:
    def before_step(self, trainer):
        for p in trainer.model.parameters():
            if torch.isnan(p.grad).any():
                raise CancelBatchException("bad")


class SkipBadBatchWithEpoch:
    def after_get_loss(self, trainer):
        if torch.isnan(trainer.loss):
            raise CancelEpochException()


class SkipShortBatchWithEpoch:
    def before_batch(self, trainer):
        if len(trainer.batch[0]) < 4:
            raise CancelEpochException("skip")


class SkipSpikeFit:
    def after_get_loss(self, trainer):
        if trainer.loss.item() > 100:
            raise CancelEpochException("skip this batch")


class CancelStepInLog:
    def log(self, trainer):
        raise CancelStepException()


class CancelBatchInEpoch:
    def after_epoch(self, trainer):
        raise CancelBatchException("x")


class StopByEpoch:
    def before_fit(self, trainer):
        self.best, self.bad = (float("inf"), 0)

    def log(self, trainer):
        if trainer.history[-1]["valid_loss"] > self.best:
            raise CancelEpochException("no better")
        self.best = trainer.history[-1]["valid_loss"]


class NotRaised:
    def log(self, trainer):
        if trainer.history[-1]["valid_loss"] < 100:
            CancelFitException("enough")


class ReturnedExc:
    def log(self, trainer):
        if trainer.history[-1]["valid_loss"] < 100:
            return CancelFitException("enough")


class Swallow:
    def after_get_loss(self, trainer):
        try:
            if trainer.batch_num > 2:
                raise CancelBatchException()
        except Exception:
            pass


class SwallowErrors:
    def log(self, trainer):
        try:
            trainer.history.write(x=self.nothing)
        except:  # noqa: E722
            pass


class ScaleLossGet:
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss / 4


class ScaleLossGetMul:
    def after_get_loss(self, trainer):
        trainer.loss *= 1024


class ScaleReplaceBackward:
    @replaces
    def backward(self, trainer):
        trainer.loss = trainer.loss / 4
        trainer.loss.backward()


class StepLRPerBatch:
    def before_fit(self, trainer):
        self.s = optim.lr_scheduler.StepLR(trainer.opt, 2)

    def after_batch(self, trainer):
        if trainer.training:
            self.s.step()


class CosinePerBatch:
    def before_fit(self, trainer):
        self.s = optim.lr_scheduler.CosineAnnealingLR(trainer.opt, T_max=trainer.n_epochs)

    def after_step(self, trainer):
        self.s.step()


class OneCyclePerEpoch:
    def before_fit(self, trainer):
        self.s = optim.lr_scheduler.OneCycleLR(trainer.opt, 0.1, total_steps=trainer.total_updates)

    def log(self, trainer):
        self.s.step()


class TwoEventsBatch:
    def before_fit(self, trainer):
        self.s = optim.lr_scheduler.LinearLR(trainer.opt)

    def after_step(self, trainer):
        self.s.step()

    def after_batch(self, trainer):
        if trainer.training:
            self.s.step()


class EpochSchedInValidToo:
    def before_fit(self, trainer):
        self.s = optim.lr_scheduler.LinearLR(trainer.opt)

    def after_batch(self, trainer):
        self.s.step()


class EpochEventsTwice:
    def before_fit(self, trainer):
        self.s = optim.lr_scheduler.StepLR(trainer.opt, 2)

    def after_epoch(self, trainer):
        if trainer.training:
            self.s.step()

    def log(self, trainer):
        self.s.step()


class MeanIfElse:
    def before_fit(self, trainer):
        self.mean = None

    def after_batch(self, trainer):
        if self.mean is None:
            self.mean = trainer.loss
        else:
            self.mean = 0.9 * self.mean + 0.1 * trainer.loss


class MeanIfElse2:
    def before_epoch(self, trainer):
        self.n = 0

    def after_batch(self, trainer):
        if self.n == 0:
            self.avg = trainer.loss
        else:
            self.avg = self.avg * 0.98 + trainer.loss * 0.02
        self.n += 1


class MeanIfOnly:
    def before_epoch(self, trainer):
        self.total = 0.0

    def after_batch(self, trainer):
        if trainer.training:
            self.total += trainer.loss


class MeanLocal:
    def before_epoch(self, trainer):
        self.total = 0.0

    def after_batch(self, trainer):
        loss = trainer.loss * trainer.batch[0].shape[0]
        self.total += loss


class MeanDict:
    def before_epoch(self, trainer):
        self.logs = {"loss": 0.0}

    def after_batch(self, trainer):
        self.logs["loss"] += trainer.loss


class NNotReset:
    def before_fit(self, trainer):
        self.total, self.n = (0.0, 0)

    def after_batch(self, trainer):
        self.total += trainer.loss.item()
        self.n += 1

    def log(self, trainer):
        print(self.total / self.n)


class NHalfReset:
    def before_fit(self, trainer):
        self.n = 0

    def before_epoch(self, trainer):
        self.total = 0.0

    def after_batch(self, trainer):
        self.total += trainer.loss.item()
        self.n += 1

    def log(self, trainer):
        print(self.total / self.n)


class SoftmaxAfterPredict:
    def after_predict(self, trainer):
        trainer.preds = trainer.preds.softmax(-1)


class ReplaceHead:
    def before_epoch(self, trainer):
        if trainer.training and trainer.epoch == 1:
            trainer.model[1] = nn.Linear(8, 3)


class FreezeBN:
    def before_fit(self, trainer):
        trainer.model[0][3].eval()


class TrainInValid:
    def before_batch(self, trainer):
        trainer.model.train()


class FreezeModule:
    def before_fit(self, trainer):
        trainer.model[0].requires_grad = False


class ClipNoOp:
    def before_step(self, trainer):
        for p in trainer.model.parameters():
            p.grad.clamp(-1, 1)


class ClipNoOp2:
    def before_step(self, trainer):
        for p in trainer.model.parameters():
            g = p.grad
            g = g / g.norm()


class LRLocal:
    def log(self, trainer):
        for g in trainer.opt.param_groups:
            lr = g["lr"] * 0.5  # noqa: F841


class BatchLocal:
    def before_batch(self, trainer):
        x, y = trainer.batch
        x = x * 2


class LossLocal:
    def after_get_loss(self, trainer):
        loss = trainer.loss + 0.1 * sum((p.square().sum() for p in trainer.model.parameters()))  # noqa: F841


class NotCalled:
    def after_step(self, trainer):
        trainer.opt.zero_grad  # noqa: B018


class Defaults:
    def log(self, trainer):
        trainer.opt.defaults["lr"] *= 0.5


class OptLR:
    def log(self, trainer):
        trainer.opt.lr = trainer.opt.param_groups[0]["lr"] * 0.5


class OrderTypo:
    orders = 5

    def after_batch(self, trainer):
        pass


class OnVal:
    on_val = False

    def after_batch(self, trainer):
        self.x = 1


class SeedEpoch:
    def before_epoch(self, trainer):
        torch.manual_seed(42)


class SeedBatch:
    def before_batch(self, trainer):
        random.seed(0)
        np.random.seed(0)


class PenaltyDetached:
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss + 0.1 * sum(
            (p.detach().square().sum() for p in trainer.model.parameters())
        )


class PenaltyItem:
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss + 0.1 * sum((p.square().sum().item() for p in trainer.model.parameters()))


class WrongDir:
    def before_fit(self, trainer):
        self.best = float("inf")

    def log(self, trainer):
        acc = trainer.history[-1]["valid_accuracy"]
        if acc < self.best:
            self.best = acc
        else:
            raise CancelFitException()


class WrongDirLoss:
    def before_fit(self, trainer):
        self.best = 0.0

    def log(self, trainer):
        if trainer.history[-1]["valid_loss"] > self.best:
            self.best = trainer.history[-1]["valid_loss"]
            self.state = copy.deepcopy(trainer.model.state_dict())


class BestZeroLoss:
    def before_fit(self, trainer):
        self.best = 0.0

    def log(self, trainer):
        loss = trainer.history[-1]["valid_loss"]
        if loss < self.best:
            self.best = loss
            self.state = copy.deepcopy(trainer.model.state_dict())


class BestNotUpdated:
    def before_fit(self, trainer):
        self.best = float("inf")

    def log(self, trainer):
        loss = trainer.history[-1]["valid_loss"]
        if loss < self.best:
            self.state = copy.deepcopy(trainer.model.state_dict())


class BestSetFirst:
    def before_fit(self, trainer):
        self.best = float("inf")

    def log(self, trainer):
        loss = trainer.history[-1]["valid_loss"]
        self.best = min(self.best, loss)
        if loss < self.best:
            self.state = copy.deepcopy(trainer.model.state_dict())


class NoZero(BasicTrainCB):
    def zero_grad(self, trainer):
        pass


class ZeroInStep(BasicTrainCB):
    def step(self, trainer):
        trainer.opt.zero_grad()
        trainer.opt.step()


class ZeroInBackward(BasicTrainCB):
    def backward(self, trainer):
        trainer.loss.backward()
        trainer.opt.zero_grad()


class StepBeforeBackward(BasicTrainCB):
    def backward(self, trainer):
        trainer.opt.step()
        trainer.loss.backward()

    def step(self, trainer):
        pass


class NoStep(BasicTrainCB):
    def step(self, trainer):
        pass


class NoBackward(BasicTrainCB):
    def backward(self, trainer):
        pass


class AddsGradients:
    def before_step(self, trainer):
        if trainer.batch_num % 4 != 3:
            raise CancelStepException()

    def before_zero_grad(self, trainer):
        if trainer.batch_num % 4 != 3:
            raise CancelStepException()


class AverageOfParameters:
    def before_fit(self, trainer):
        self.ema = copy.deepcopy(trainer.model)

    def after_step(self, trainer):
        for mean, p in zip(self.ema.parameters(), trainer.model.parameters()):
            mean.data.lerp_(p.data, 0.1)


class Impatient:
    def before_fit(self, trainer):
        self.best, self.bad = float("inf"), 0

    def log(self, trainer):
        loss = trainer.history[-1]["valid_loss"]
        if loss < self.best:
            self.best = loss
        else:
            self.bad += 1
            if self.bad > 2:
                raise CancelFitException("no better")


class OwnBatch(Trainer):
    "A batch of a plain loop, which clears its gradients or does not"

    clears = False

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.preds = self.model(x)
        self.loss = self.loss_func(self.preds, y)
        if self.training:
            self.loss.backward()
            self.opt.step()


class ClearingBatch(OwnBatch):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.preds = self.model(x)
        self.loss = self.loss_func(self.preds, y)
        if self.training:
            self.opt.zero_grad()
            self.loss.backward()
            self.opt.step()


class ThrowsAway:
    n = 0

    def before_step(self, trainer):
        self.n += 1
        if self.n % 2:
            trainer.opt.zero_grad()
            raise CancelStepException()


class ThrowsAwayByHand:
    def before_step(self, trainer):
        if trainer.batch_num % 4 != 3:
            for p in trainer.model.parameters():
                p.grad = None
            raise CancelStepException()


FAULTS = {
    "ThrowsAway": "gradients_lost",
    "ThrowsAwayByHand": "gradients_lost",
    "BestAlias": "kept_alias",
    "BestShallow": "kept_alias",
    "BestDict": "kept_alias",
    "BestList": "kept_alias",
    "BestComp": "kept_alias",
    "BestCpu": "kept_alias",
    "BestOpt": "kept_alias",
    "BestBoth": "kept_alias",
    "BestModel": "kept_alias",
    "BestHistory": "kept_alias",
    "InitialWeights": "kept_alias",
    "BestViaLocal": "kept_alias",
    "EmaAlias": "kept_alias",
    "SkipStepEveryTwoClears": "gradients_lost",
    "AccumFirst": "gradients_lost",
    "SkipZeroNeverSkipStep": "gradients_kept",
    "CancelBatchAfterBackwardKeepsGrads": "gradients_kept",
    "SkipBadGradsBatch": "gradients_kept",
    "SkipBadBatchWithEpoch": "cancels_too_much",
    "SkipShortBatchWithEpoch": "cancels_too_much",
    "SkipSpikeFit": "cancels_too_much",
    "CancelStepInLog": "cancels_nothing",
    "CancelBatchInEpoch": "cancels_nothing",
    "StopByEpoch": "cancels_nothing",
    "NotRaised": "never_raised",
    "ReturnedExc": "never_raised",
    "Swallow": "caught_cancel",
    "SwallowErrors": "caught_cancel",
    "ScaleLossGet": "scaled_loss",
    "ScaleLossGetMul": "scaled_loss",
    "ScaleReplaceBackward": "scaled_loss",
    "StepLRPerBatch": "schedule_pace",
    "CosinePerBatch": "schedule_pace",
    "OneCyclePerEpoch": "schedule_pace",
    "TwoEventsBatch": "schedule_twice",
    "EpochSchedInValidToo": "schedule_twice",
    "EpochEventsTwice": "schedule_twice",
    "MeanIfElse": "keeps_graph",
    "MeanIfElse2": "keeps_graph",
    "MeanIfOnly": "keeps_graph",
    "MeanLocal": "keeps_graph",
    "MeanDict": "keeps_graph",
    "NNotReset": "mixed_mean",
    "NHalfReset": "mixed_mean",
    "SoftmaxAfterPredict": "softmax_twice",
    "ReplaceHead": "new_parameters",
    "FreezeBN": "undone_mode",
    "TrainInValid": "trains_in_validation",
    "FreezeModule": "freezes_nothing",
    "ClipNoOp": "no_effect",
    "ClipNoOp2": "no_effect",
    "LRLocal": "no_effect",
    "BatchLocal": "no_effect",
    "LossLocal": "no_effect",
    "NotCalled": "no_effect",
    "Defaults": "unread_setting",
    "OptLR": "unread_setting",
    "OrderTypo": "unread_setting",
    "OnVal": "unread_setting",
    "SeedEpoch": "seeded_again",
    "SeedBatch": "seeded_again",
    "PenaltyDetached": "constant_term",
    "PenaltyItem": "constant_term",
    "WrongDir": "wrong_best",
    "WrongDirLoss": "wrong_best",
    "BestZeroLoss": "wrong_best",
    "BestNotUpdated": "wrong_best",
    "BestSetFirst": "wrong_best",
    "AverageOfParameters": "average_without_buffers",
    "Impatient": "impatient",
}
STEPS = {
    "NoZero": "never_cleared",
    "ZeroInStep": "cleared_before_step",
    "ZeroInBackward": "cleared_before_step",
    "StepBeforeBackward": "cleared_before_step",
    "NoStep": "never_stepped",
    "NoBackward": "never_backward",
}


def made(name):
    return getattr(sys.modules[__name__], name)()


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_is_found_by_the_name_of_its_rule(name):
    assert FAULTS[name] in found_in(images_trainer([BasicTrainCB(), MetricsCB(), made(name)]))


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_training_that_are_missing_or_turned_round_are_found(name):
    assert STEPS[name] in found_in(images_trainer([made(name), MetricsCB()]))


def test_gradients_that_are_added_up_are_found_where_their_size_matters():
    assert found_in(images_trainer([BasicTrainCB(), AddsGradients()], opt_func=optim.SGD)) == ["gathered_sum"]
    assert found_in(images_trainer([BasicTrainCB(), AddsGradients()], opt_func=optim.AdamW)) == []


def test_a_batch_of_ones_own_that_never_clears_is_found():
    parts = vars(images_trainer([]))
    for kind, found in ((OwnBatch, ["never_cleared"]), (ClearingBatch, [])):
        trainer = kind(parts["dls"], F.cross_entropy, optim.SGD, parts["model"], [MetricsCB()])
        assert found_in(trainer) == found
        if not found:
            assert "one_batch" in str(trainer.trace()), "and a trace shows it"


def test_a_softmax_at_the_end_of_a_model_is_found():
    trainer = images_trainer([BasicTrainCB()])
    trainer.model = nn.Sequential(trainer.model, nn.Softmax(1))
    assert found_in(trainer) == ["softmax_twice"]
    trainer.loss_func = F.nll_loss
    assert found_in(trainer) == ["needs_log"]
    trainer.model[1] = nn.LogSoftmax(1)
    assert found_in(trainer) == []


def test_an_optimizer_made_by_hand_without_a_new_part_is_found():
    trainer = images_trainer([BasicTrainCB()], opt_func=None)
    trainer.opt = optim.SGD(trainer.model.parameters(), 0.1)
    assert found_in(trainer) == []
    trainer.model[1] = nn.Linear(8, 3)
    assert found_in(trainer) == ["new_parameters"]


def test_a_finding_says_who_where_and_what_to_do():
    trainer = images_trainer([BasicTrainCB(), MetricsCB(), BestAlias()])
    with pytest.raises(CheckFailed) as failed:
        trainer.check()
    [finding] = failed.value.findings
    assert isinstance(finding, Finding) and finding.spoils
    for text in (
        "`BestAlias.log` keeps",
        "(test_check_more.py:",
        "copy.deepcopy(trainer.model.state_dict())",
    ):
        assert text in str(finding)


# What is right


class Kept(Best):
    "Copies, references that are meant, and tensors that are exchanged"

    def before_fit(self, trainer):
        self.parameters = list(trainer.model.parameters())
        self.best_loss = float("inf")

    def before_step(self, trainer):
        self.old = [p.detach().clone() for p in trainer.model.parameters()]

    def log(self, trainer):
        loss = trainer.history[-1]["valid_loss"]
        if loss < self.best_loss:
            self.best_loss = loss
            self.best = {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}
            self.states = copy.deepcopy([trainer.model.state_dict(), trainer.opt.state_dict()])


class Swaps:
    def before_epoch(self, trainer):
        if not trainer.training:
            self.backup = [p.data for p in trainer.model.parameters()]
            for p in trainer.model.parameters():
                p.data = p.data * 0.9

    def cleanup_epoch(self, trainer):
        if not trainer.training:
            for p, data in zip(trainer.model.parameters(), self.backup):
                p.data = data


class Leaves:
    "Each cancel where it belongs"

    def before_fit(self, trainer):
        self.n_bad = 0

    def before_batch(self, trainer):
        if trainer.batch_num == 3:
            raise CancelEpochException("enough")

    def after_get_loss(self, trainer):
        if torch.isnan(trainer.loss):
            raise CancelBatchException("not a number")

    def before_step(self, trainer):
        if any(p.grad.isnan().any() for p in trainer.model.parameters()):
            self.n_bad += 1
            if self.n_bad > 3:
                raise CancelFitException("too often")
            raise CancelStepException("cleared by `zero_grad`")

    def log(self, trainer):
        try:
            self.last = trainer.history[-1]["other"]
        except (KeyError, CancelFitException):
            self.last = None


class Gathers:
    def __init__(self, n=4):
        self.n = n

    def waits(self, trainer):
        return (trainer.batch_num + 1) % self.n != 0

    def before_backward(self, trainer):
        self.loss, trainer.loss = trainer.loss, trainer.loss / self.n

    def cleanup_backward(self, trainer):
        trainer.loss = self.loss

    def before_step(self, trainer):
        if self.waits(trainer):
            raise CancelStepException()

    def before_zero_grad(self, trainer):
        if self.waits(trainer):
            raise CancelStepException()


class Rates:
    "A schedule for updates, and one for epochs"

    order = 20

    def before_fit(self, trainer):
        self.updates = optim.lr_scheduler.CosineAnnealingLR(trainer.opt, trainer.total_updates)
        self.epochs = optim.lr_scheduler.StepLR(trainer.opt, 2)

    def after_batch(self, trainer):
        if trainer.training:
            self.updates.step()

    def log(self, trainer):
        self.epochs.step()


class Means:
    def before_epoch(self, trainer):
        self.total, self.n, self.mean = 0.0, 0, None

    def after_batch(self, trainer):
        loss = trainer.loss.detach() * len(trainer.batch[0])
        self.total += loss
        self.n += len(trainer.batch[0])
        if self.mean is None:
            self.mean = trainer.loss.detach()
        else:
            self.mean = 0.9 * self.mean + 0.1 * trainer.loss.detach()

    def log(self, trainer):
        trainer.history.write(mean=(self.total / self.n).item())


class Effects:
    "New values that somebody takes, and changes in place"

    def before_fit(self, trainer):
        self.seed, self.generator = 3, torch.Generator().manual_seed(3)

    def before_epoch(self, trainer):
        torch.manual_seed(self.seed + trainer.epoch)

    def before_batch(self, trainer):
        x, y = trainer.batch
        x = x * 2
        trainer.batch = x, y

    def after_get_loss(self, trainer):
        penalty = sum(p.square().sum() for p in trainer.model.parameters())
        trainer.loss = trainer.loss + 0.1 * penalty

    def before_step(self, trainer):
        for p in trainer.model.parameters():
            p.grad.clamp_(-1, 1)
            norm = p.grad.norm()
            p.grad.mul_(1 / (norm + 1))

    def log(self, trainer):
        for group in trainer.opt.param_groups:
            group["lr"] *= 0.5


class Patient(Best):
    def before_fit(self, trainer):
        self.best, self.bad, self.least = float("inf"), 0, -float("inf")

    def log(self, trainer):
        loss, score = trainer.history[-1]["valid_loss"], -trainer.history[-1]["valid_loss"]
        if score > self.least:
            self.least = score
        if loss < self.best:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
            if self.bad > 2:
                raise CancelFitException("no better")


class WeighedLoss:
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss / len(trainer.batch[0])


class PartInTraining:
    def before_batch(self, trainer):
        trainer.model[0][3].eval()

    def before_epoch(self, trainer):
        trainer.model.train(trainer.training)


class ThrowsBadAway:
    "Gradients that are no numbers, or too large"

    def before_step(self, trainer):
        norm = nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()])
        if not torch.isfinite(norm) or norm > 1e6:
            trainer.opt.zero_grad()
            raise CancelStepException()


class StepsItself:
    "Uses the gradients, and leaves out the step of others"

    def before_step(self, trainer):
        if trainer.batch_num % 4 == 3:
            trainer.opt.step()
            trainer.opt.zero_grad()
            raise CancelStepException()


class ClearsAnother:
    "Every second batch is for the head alone"

    def before_fit(self, trainer):
        trainer.opt_head = optim.SGD(trainer.model[1].parameters(), 0.01)

    def before_step(self, trainer):
        if trainer.batch_num % 2:
            trainer.opt_head.step()
            trainer.opt_head.zero_grad()
            trainer.opt.zero_grad()
            raise CancelStepException()


class GathersItself:
    "Adds gradients up in double precision"

    order = -10

    def before_fit(self, trainer):
        params = list(trainer.model.parameters())
        self.sums = [torch.zeros_like(p, dtype=torch.float64) for p in params]

    def before_step(self, trainer):
        for total, p in zip(self.sums, trainer.model.parameters()):
            total += p.grad
        if (trainer.batch_num + 1) % 2:
            trainer.opt.zero_grad()
            raise CancelStepException
        for total, p in zip(self.sums, trainer.model.parameters()):
            p.grad.copy_(total)
            total.zero_()


@pytest.mark.parametrize("kind", [ThrowsBadAway, StepsItself, ClearsAnother, GathersItself])
def test_gradients_that_are_used_or_bad_may_be_cleared(kind):
    assert "gradients_lost" not in found_in(images_trainer([BasicTrainCB(), kind()]))


RIGHT = [Kept, Swaps, Leaves, Gathers, Rates, Means, Effects, Patient, WeighedLoss, PartInTraining]


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("opt_func", [optim.AdamW, optim.SGD])
def test_nothing_is_found_in_what_is_like_it_and_right(kind, opt_func):
    assert found_in(images_trainer([BasicTrainCB(), MetricsCB(), kind()], opt_func=opt_func)) == []


# Used in two fits


class BestFromTheDayItWasMade:
    def __init__(self):
        self.best = float("inf")

    def log(self, trainer):
        self.best = min(self.best, trainer.history[-1]["valid_loss"])


class BestOfAFit(BestFromTheDayItWasMade):
    def before_fit(self, trainer):
        self.best = float("inf")


def test_a_best_value_of_the_fit_before_is_found():
    report = try_callback(BestFromTheDayItWasMade, promises=["two_fits"], seconds=0)
    assert report.broken == ["two_fits"] and "`BestFromTheDayItWasMade.best`" in str(report["two_fits"])
    assert try_callback(BestOfAFit, promises=["two_fits"], seconds=0).broken == []


# Several optimizers


class TwoOptimizers(Trainer):
    def before_fit(self):
        self.body = optim.SGD(self.model[:-1].parameters(), 0.1)
        self.opt_head = optim.SGD(self.model[-1].parameters(), 0.1)

    def predict(self):
        self.preds = self.model(self.batch[0])

    def get_loss(self):
        self.loss = self.loss_func(self.preds, self.batch[1])

    def backward(self):
        self.loss.backward()

    def step(self):
        self.body.step()
        self.opt_head.step()

    def zero_grad(self):
        for opt in (self.body, self.opt_head):
            opt.zero_grad()


class ForgetsHead(TwoOptimizers):
    def zero_grad(self):
        self.body.zero_grad()


class ForgetsBody(TwoOptimizers):
    def zero_grad(self):
        self.opt_head.zero_grad()


class ClearsAll(TwoOptimizers):
    def zero_grad(self):
        self.model.zero_grad()


class OddNames(TwoOptimizers):
    def before_fit(self):
        self.body, self.head = (
            optim.SGD(part.parameters(), 0.1) for part in (self.model[:-1], self.model[-1])
        )

    def step(self):
        self.body.step()
        self.head.step()

    def zero_grad(self):
        self.body.zero_grad()
        self.head.zero_grad()


class NoStepAtAll(TwoOptimizers):
    def step(self):
        pass


def of_class(kind):
    parts = vars(images_trainer([]))
    return kind(parts["dls"], F.cross_entropy, None, parts["model"], [MetricsCB()])


@pytest.mark.parametrize("kind, name", [(ForgetsHead, "trainer.opt_head"), (ForgetsBody, "trainer.body")])
def test_an_optimizer_of_several_that_is_never_cleared_is_named(kind, name):
    with pytest.raises(CheckFailed, match=f"step of `{name}`.*{name}.zero_grad") as failed:
        of_class(kind).check()
    assert [o.name for o in failed.value.findings] == ["never_cleared"]


@pytest.mark.parametrize("kind", [TwoOptimizers, ClearsAll, OddNames])
def test_several_optimizers_that_are_all_stepped_and_cleared_are_right(kind):
    assert found_in(of_class(kind)) == []


class Mine(BasicTrainCB):
    def before_fit(self, trainer):
        self.opt1 = optim.SGD(trainer.model[:-1].parameters(), 0.1)
        self.opt2 = optim.SGD(trainer.model[-1].parameters(), 0.1)

    def step(self, trainer):
        self.opt1.step()
        self.opt2.step()

    def zero_grad(self, trainer):
        self.opt1.zero_grad()
        self.opt2.zero_grad()


class MineForgotten(Mine):
    def zero_grad(self, trainer):
        self.opt1.zero_grad()


class MineWhole(MineForgotten):
    def before_fit(self, trainer):
        self.opt1 = optim.SGD(trainer.model.parameters(), 0.1)
        self.opt2 = optim.SGD(trainer.model[-1].parameters(), 0.1)


class MineSchedule(Mine):
    "Steps a schedule alone"

    def before_fit(self, trainer):
        self.sched = optim.lr_scheduler.StepLR(trainer.opt, 1000)

    def step(self, trainer):
        self.sched.step()

    def zero_grad(self, trainer):
        pass


@pytest.mark.parametrize("kind, found", [(Mine, []), (MineForgotten, ["never_cleared"]), (MineWhole, [])])
def test_optimizers_that_a_callback_keeps_make_steps(kind, found):
    assert found_in(images_trainer([kind(), MetricsCB()], opt_func=None)) == found


def test_nobody_steps_where_only_a_schedule_is_stepped():
    assert "never_stepped" in found_in(images_trainer([MineSchedule(), MetricsCB()], opt_func=optim.SGD))
    assert "never_stepped" in found_in(of_class(NoStepAtAll))


# Schedules whose length is a number of epochs


class ByLength:
    "Counts epochs by their range, and steps once for each"

    order = 20

    def before_fit(self, trainer):
        self.s = optim.lr_scheduler.CosineAnnealingLR(trainer.opt, T_max=len(trainer.epochs))

    def log(self, trainer):
        self.s.step()


class ByLengthPerBatch(ByLength):
    log = None

    def after_step(self, trainer):
        self.s.step()


class BySettingPerBatch(ByLengthPerBatch):
    def __init__(self):
        self.every = 1

    def before_fit(self, trainer):
        self.s = optim.lr_scheduler.StepLR(trainer.opt, step_size=self.every)


class ByUpdates(ByLengthPerBatch):
    def before_fit(self, trainer):
        n = len(trainer.epochs) * len(trainer.dls.train)
        self.s = optim.lr_scheduler.CosineAnnealingLR(trainer.opt, T_max=n)


class ByProduct(ByLengthPerBatch):
    def before_fit(self, trainer):
        self.s = optim.lr_scheduler.CosineAnnealingLR(
            trainer.opt, T_max=len(trainer.epochs) * len(trainer.dls.train)
        )


class ByProductOfNumbers(ByLengthPerBatch):
    def before_fit(self, trainer):
        n = len(trainer.dls.train)
        self.s = optim.lr_scheduler.CosineAnnealingLR(trainer.opt, T_max=n * trainer.n_epochs)


class SlowlyByOne(ByLengthPerBatch):
    def before_fit(self, trainer):
        self.s = optim.lr_scheduler.StepLR(trainer.opt, step_size=2, gamma=0.99)


PACES = [ByLength, ByUpdates, ByProduct, ByProductOfNumbers, SlowlyByOne]


@pytest.mark.parametrize("kind", [ByLengthPerBatch, BySettingPerBatch, *PACES])
def test_a_number_of_epochs_is_told_from_one_of_batches(kind):
    found = found_in(images_trainer([BasicTrainCB(), MetricsCB(), kind()]))
    assert found == ([] if kind in PACES else ["schedule_pace"])


@pytest.mark.parametrize(
    "kind, length, n_found",
    [
        (optim.lr_scheduler.CosineAnnealingLR, dict(T_max=2), 1),
        (optim.lr_scheduler.StepLR, dict(step_size=2), 1),
        (optim.lr_scheduler.MultiStepLR, dict(milestones=[1, 2]), 1),
        (optim.lr_scheduler.CosineAnnealingLR, dict(T_max=40), 0),
        (optim.lr_scheduler.MultiStepLR, dict(milestones=[2, 30]), 0),
        (optim.lr_scheduler.LinearLR, dict(total_iters=2), 0),
        (optim.lr_scheduler.StepLR, dict(step_size=1, gamma=0.99), 0),
    ],
)
def test_a_built_in_schedule_for_updates_of_few_steps_is_found(kind, length, n_found):
    for scheduler, n in ((BatchSchedulerCB, n_found), (EpochSchedulerCB, 0)):
        trainer = images_trainer([BasicTrainCB(), scheduler(partial(kind, **length))], batch_size=3)
        assert found_in(trainer) == ["schedule_pace"] * n


# A softmax in the loss


def of_softmax(preds, y):
    return F.cross_entropy(preds.softmax(1), y, label_smoothing=0.1)


def of_a_name(preds, y):
    probabilities = F.softmax(preds, dim=1)
    return F.cross_entropy(input=probabilities, target=y)


def of_sigmoid(preds, y):
    y = F.one_hot(y, preds.shape[1]).float()
    return F.binary_cross_entropy_with_logits(torch.sigmoid(preds), y)


def made_by_module(preds, y):
    return nn.CrossEntropyLoss()(preds.softmax(1), y)


class LossModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.CrossEntropyLoss()

    def forward(self, preds, y):
        return self.inner(preds.softmax(1), y)


def of_logits(preds, y):
    loss = F.cross_entropy(preds, y)
    preds = preds.softmax(1)
    return loss + 0.1 * preds.square().mean()


def distilled(preds, y):
    return F.cross_entropy(preds, preds.detach().softmax(1)) + F.cross_entropy(preds.log_softmax(1), y)


def of_probabilities(preds, y):
    return F.nll_loss(preds.softmax(1).log(), y)


class RightModule(LossModule):
    def forward(self, preds, y):
        return self.inner(preds, y)


TWICE = [of_softmax, of_a_name, of_sigmoid, made_by_module, LossModule()]
ONCE = [of_logits, distilled, of_probabilities, RightModule(), partial(of_logits)]


@pytest.mark.parametrize("loss_func", [*TWICE, *ONCE, partial(of_softmax)])
def test_a_softmax_in_the_loss_function_itself_is_found(loss_func):
    trainer = images_trainer([BasicTrainCB()])
    trainer.loss_func = loss_func
    assert found_in(trainer) == ([] if loss_func in ONCE else ["softmax_twice"])


class GetsLoss(BasicTrainCB):
    def get_loss(self, trainer):
        trainer.loss = F.cross_entropy(trainer.preds.softmax(1), trainer.batch[1])


class GetsLossOfTrainer(BasicTrainCB):
    def get_loss(self, trainer):
        p = trainer.preds.softmax(dim=1)
        trainer.loss = trainer.loss_func(p, trainer.batch[1])


class GetsRightLoss(BasicTrainCB):
    def get_loss(self, trainer):
        trainer.loss = trainer.loss_func(trainer.preds, trainer.batch[1])
        trainer.probabilities = trainer.preds.softmax(1)


@pytest.mark.parametrize("kind", [GetsLoss, GetsLossOfTrainer, GetsRightLoss])
def test_a_softmax_in_the_step_of_the_loss_is_found(kind):
    found = found_in(images_trainer([kind(), MetricsCB()]))
    assert found == ([] if kind is GetsRightLoss else ["softmax_twice"])


# Gradients gathered by a condition


class GathersByIf(BasicTrainCB):
    n = 4

    def step(self, trainer):
        if (trainer.batch_num + 1) % self.n == 0:
            trainer.opt.step()

    def zero_grad(self, trainer):
        if (trainer.batch_num + 1) % self.n == 0:
            trainer.opt.zero_grad()


class GathersAMean(GathersByIf):
    def backward(self, trainer):
        (trainer.loss / self.n).backward()


class GathersClipped(GathersByIf):
    def step(self, trainer):
        if (trainer.batch_num + 1) % self.n == 0:
            nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            trainer.opt.step()


class OwnBatchGathers(OwnBatch):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.preds = self.model(x)
        self.loss = self.loss_func(self.preds, y)
        if self.training:
            self.loss.backward()
            if (self.batch_num + 1) % 3 == 0:
                self.opt.step()
                self.opt.zero_grad()


class OwnBatchGathersAMean(OwnBatch):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.preds = self.model(x)
        self.loss = self.loss_func(self.preds, y)
        if self.training:
            (self.loss / 3).backward()
            if (self.batch_num + 1) % 3 == 0:
                self.opt.step()
                self.opt.zero_grad()


@pytest.mark.parametrize("kind, n", [(GathersByIf, 1), (GathersAMean, 0), (GathersClipped, 0)])
def test_gradients_that_are_gathered_by_a_condition_are_divided(kind, n):
    trainer = images_trainer([kind(), MetricsCB()], opt_func=optim.SGD)
    assert found_in(trainer) == ["gathered_sum"] * n
    assert found_in(images_trainer([kind(), MetricsCB()])) == [], "Adam does not mind the size"
    if n:
        with pytest.warns(UserWarning, match=r"each step is 4 times too large.*trainer.loss/self.n"):
            trainer.check()


@pytest.mark.parametrize("kind, n", [(OwnBatchGathers, 1), (OwnBatchGathersAMean, 0)])
def test_gradients_that_a_batch_of_ones_own_gathers_are_divided(kind, n):
    parts = vars(images_trainer([]))
    trainer = kind(parts["dls"], F.cross_entropy, optim.SGD, parts["model"], [MetricsCB()])
    assert found_in(trainer) == ["gathered_sum"] * n
