"""Mistakes in one line, and in how long things last, each beside what is like it and right.

Each planted one is found by the name of its rule; in the right ones nothing is found.
"""

import math
import copy
import warnings
from collections import deque

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop import Trainer, with_cbs
from isaac_loop.callbacks import BasicTrainCB, MetricsCB, OneCycleSchedulerCB
from isaac_loop.inspection import CheckFailed
from isaac_loop.loop.events import CancelBatchException
from marked import Marked, Planted
from working import found_in, images_trainer


planted, right = Planted(), Marked()


class Keeps:
    "A copy of the weights, and what an average needs"

    def __init__(self, decay=0.98):
        self.decay = decay

    def before_fit(self, trainer):
        self.average = [p.detach().clone() for p in trainer.model.parameters()]

    def pairs(self, trainer):
        return zip(self.average, trainer.model.parameters())


@planted("average_turned")
class TurnedChain(Keeps):
    def after_step(self, trainer):
        for a, p in zip(self.average, trainer.model.parameters()):
            a.mul_(1 - self.decay).add_(p.detach(), alpha=self.decay)


@planted("average_turned")
class TurnedProduct(Keeps):
    def after_step(self, trainer):
        for a, p in zip(self.average, trainer.model.parameters()):
            a.mul_(1 - self.decay).add_(self.decay * p.detach())


@planted("average_turned")
class TurnedLerp(Keeps):
    def after_step(self, trainer):
        for a, p in zip(self.average, trainer.model.parameters()):
            a.lerp_(p.detach(), self.decay)


@planted("average_turned")
class TurnedList(Keeps):
    def after_step(self, trainer):
        with torch.no_grad():
            for i, p in enumerate(trainer.model.parameters()):
                self.average[i] = (1 - self.decay) * self.average[i] + self.decay * p


@right
class Average(TurnedList):
    def after_step(self, trainer):
        with torch.no_grad():
            for i, p in enumerate(trainer.model.parameters()):
                self.average[i] = self.decay * self.average[i] + (1 - self.decay) * p
                self.average[i].mul_(self.decay).add_(p, alpha=1 - self.decay)
                self.average[i].lerp_(p, 1 - self.decay)


@planted("needs_log")
class DivergenceOfProbabilities:
    def after_get_loss(self, trainer):
        soft = F.softmax(trainer.preds, dim=1)
        trainer.loss = trainer.loss + F.kl_div(soft, soft.detach().flip(1), reduction="batchmean")


@right
class Divergence:
    def after_get_loss(self, trainer):
        soft = F.log_softmax(trainer.preds, dim=1)
        trainer.loss = trainer.loss + F.kl_div(soft, soft.detach().flip(1).exp(), reduction="batchmean")


@planted("over_rows")
class SoftmaxOverRows:
    def after_predict(self, trainer):
        preds = trainer.preds
        self.shares = F.softmax(preds, dim=0)


@right
class SoftmaxOfARow:
    def after_predict(self, trainer):
        self.shares = trainer.preds[0].softmax(0), trainer.preds.softmax(1)


@planted("constant_term")
class PenaltyWithoutGraph:
    def after_get_loss(self, trainer):
        first = next(trainer.model.parameters())
        (slope,) = torch.autograd.grad(trainer.loss, first, retain_graph=True)
        penalty = slope.square().sum()
        trainer.loss = trainer.loss + 0.1 * penalty


@right
class Penalty:
    def after_get_loss(self, trainer):
        if not trainer.training:
            return
        first = next(trainer.model.parameters())
        (slope,) = torch.autograd.grad(trainer.loss, first, create_graph=True)
        trainer.loss = trainer.loss + 0.1 * slope.square().sum()


@right
class AttacksInTheLoss:
    "The gradient changes the input, and the loss comes from the model again"

    on_valid = False

    def after_get_loss(self, trainer):
        x, y = trainer.batch
        net, x = trainer.model, x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(net(x), y), x)
        harder = x.detach() + 0.1 * slope.sign()
        trainer.loss = trainer.loss + F.cross_entropy(net(harder), y)


class Sums:
    def before_epoch(self, trainer):
        self.total = 0.0


@planted("wrong_count")
class PerExample(Sums):
    def after_batch(self, trainer):
        self.total += trainer.loss.item()

    def after_epoch(self, trainer):
        self.mean = self.total / len(trainer.dls.train.dataset)


@planted("wrong_count")
class PerBatch(Sums):
    def after_batch(self, trainer):
        self.total += trainer.loss.item() * len(trainer.batch[0])

    def after_epoch(self, trainer):
        self.mean = self.total / len(trainer.dls.train)


@right
class PerExampleOfSums(PerBatch):
    def after_epoch(self, trainer):
        self.mean = self.total / len(trainer.dls.train.dataset)


@planted("used_up")
class ClipsOnce:
    def before_fit(self, trainer):
        self.params = trainer.model.parameters()

    def before_step(self, trainer):
        nn.utils.clip_grad_norm_(self.params, 1.0)


@planted("used_up")
class LoopsOnce:
    def before_fit(self, trainer):
        self.wide = (p for p in trainer.model.parameters() if p.ndim > 1)

    def before_step(self, trainer):
        for p in self.wide:
            p.grad.clamp_(-1, 1)


@right
class ClipsAlways:
    def before_fit(self, trainer):
        self.params, self.numbers = list(trainer.model.parameters()), iter(range(1000))
        self.weights = (p for p in trainer.model.parameters())

    def before_step(self, trainer):
        next(self.numbers)
        nn.utils.clip_grad_norm_(self.params, 1.0)

    def before_epoch(self, trainer):
        self.weights = trainer.model.parameters()

    def after_epoch(self, trainer):
        self.norms = [p.norm() for p in self.weights]


@planted("clip_before_backward")
class ClipsTooEarly:
    def before_backward(self, trainer):
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)


@planted("unknown_column")
class AsksForVal:
    def log(self, trainer):
        self.last = trainer.history[-1].get("val_loss", 0.0)


@right
class AsksForValid:
    def log(self, trainer):
        if not trainer.history:
            return
        row = trainer.history[-1]
        row["val_share"] = 0.5
        self.last = row.get("valid_loss", 0.0) * row["val_share"]


@planted("rate_compounds")
class RisesByWhatIsThere:
    def before_fit(self, trainer):
        self.n = 0

    def before_step(self, trainer):
        self.n += 1
        if self.n < 10:
            for group in trainer.opt.param_groups:
                group["lr"] *= self.n / 10


@planted("rate_compounds")
class RisesByItself:
    def before_batch(self, trainer):
        for group in trainer.opt.param_groups:
            group["lr"] = group["lr"] * (trainer.n_updates + 1) / 100


@right
class Decays:
    def after_step(self, trainer):
        for group in trainer.opt.param_groups:
            group["lr"] *= 0.99

    def log(self, trainer):
        trainer.opt.param_groups[0]["lr"] *= 0.5


@planted("schedule_twice")
class DecaysInBothPasses:
    def after_epoch(self, trainer):
        for group in trainer.opt.param_groups:
            group["lr"] *= 0.5


@planted("two_permutations")
class MixesApart:
    on_valid = False

    def before_batch(self, trainer):
        x, y = trainer.batch
        trainer.batch = x[torch.randperm(len(x))], y[torch.randperm(len(y))]


@right
class Shuffles(MixesApart):
    def before_batch(self, trainer):
        x, y = trainer.batch
        order = torch.randperm(len(x))
        trainer.batch = x[order], y[order]


@planted("two_permutations")
class MixesApartByName(MixesApart):
    def before_batch(self, trainer):
        x, y = trainer.batch
        one = torch.randperm(len(x))
        two = torch.randperm(len(x))
        trainer.batch = x[one], y[two]


@planted("two_permutations")
class MixesApartInTwoMethods(MixesApart):
    def before_batch(self, trainer):
        x, y = trainer.batch
        order = torch.randperm(len(x), device=x.device)
        trainer.batch = 0.7 * x + 0.3 * x[order], y

    def after_get_loss(self, trainer):
        _, (y,) = trainer.split(trainer.batch)
        order = torch.randperm(len(y), device=y.device)
        f = trainer.loss_func
        trainer.loss = 0.7 * f(trainer.preds, y) + 0.3 * f(trainer.preds, y[order])


@right
class MixesTogether(MixesApart):
    def before_batch(self, trainer):
        x, y = trainer.batch
        self.mixed = torch.randperm(len(x))
        trainer.batch = 0.7 * x + 0.3 * x[self.mixed], y

    def after_get_loss(self, trainer):
        _, (y,) = trainer.split(trainer.batch)
        f = trainer.loss_func
        trainer.loss = 0.7 * f(trainer.preds, y) + 0.3 * f(trainer.preds, y[self.mixed])


@planted("two_permutations")
class MixesApartByOneName(MixesApart):
    def before_batch(self, trainer):
        x, y = trainer.batch
        order = torch.randperm(len(x))
        x = x[order]
        order = torch.randperm(len(y))
        trainer.batch = x, y[order]


@right
class MixesTwoInputs(MixesApart):
    def before_batch(self, trainer):
        (x,), (y,) = trainer.split(trainer.batch)
        one = torch.randperm(len(x))
        two = torch.randperm(len(x))
        trainer.batch = x + x[one] + x[two], y


@right
class MixesByWhatItKeeps(MixesTogether):
    def before_epoch(self, trainer):
        self.mixed = torch.randperm(1)

    def after_get_loss(self, trainer):
        _, (y,) = trainer.split(trainer.batch)
        if len(self.mixed) != len(y):
            self.mixed = torch.randperm(len(y))
        f = trainer.loss_func
        trainer.loss = 0.7 * f(trainer.preds, y) + 0.3 * f(trainer.preds, y[self.mixed])


@right
class MixesThree(MixesApart):
    def before_batch(self, trainer):
        x, y = trainer.batch
        one = torch.randperm(len(x))
        two = torch.randperm(len(x))
        trainer.batch = torch.cat([x, x[one], x[two]]), torch.cat([y, y[one], y[two]])


@planted("advantage_gradient")
class Policy:
    def after_get_loss(self, trainer):
        values = trainer.preds.max(1)[0]
        adv = trainer.batch[1] - values
        logp = trainer.preds.log_softmax(1)[:, 0]
        trainer.loss = trainer.loss + (adv**2).mean() - (logp * adv).mean()


@planted("advantage_gradient")
class PolicyWithAHelper(Policy):
    def advantage(self, returns, values):
        return returns - values

    def after_get_loss(self, trainer):
        advantage = self.advantage(trainer.batch[1], trainer.preds.max(1)[0])
        log_prob = trainer.preds.log_softmax(1)[:, 0]
        trainer.loss = trainer.loss - (advantage * log_prob).mean()


@right
class PolicyWithAHelperThatDetaches(PolicyWithAHelper):
    def advantage(self, returns, values):
        return (returns - values).detach()


@right
class PolicyThatDetaches(Policy):
    def after_get_loss(self, trainer):
        adv = trainer.batch[1] - trainer.preds.max(1)[0].detach()
        trainer.loss = trainer.loss - (trainer.preds.log_softmax(1)[:, 0] * adv).mean()


class Lists:
    def before_epoch(self, trainer):
        self.accs = []

    def after_batch(self, trainer):
        self.accs.append((trainer.preds.argmax(1) == trainer.batch[1]).float().mean().item())


@planted("mixed_mean")
class ItemsOfCountersThatGoOn:
    def before_fit(self, trainer):
        self.right, self.n = torch.tensor(0.0), 0

    def after_batch(self, trainer):
        self.right += (trainer.preds.argmax(1) == trainer.batch[1]).sum()
        self.n += len(trainer.batch[1])

    def cleanup_epoch(self, trainer):
        if self.n:
            trainer.history.write(hits=self.right.item() / max(self.n, 1))


@right
class ItemsOfCounters(ItemsOfCountersThatGoOn):
    def before_epoch(self, trainer):
        self.right, self.n = torch.tensor(0.0), 0


@planted("mixed_mean")
class CountersOfMeThatGoOn:
    "Its methods call their object otherwise than most do"

    def before_fit(me, trainer):
        me.right = me.n = 0

    def after_batch(me, trainer):
        me.right += (trainer.preds.argmax(1) == trainer.batch[1]).sum().item()
        me.n += len(trainer.batch[1])

    def cleanup_epoch(me, trainer):
        if me.n:
            trainer.history.write(hits=me.right / me.n)


@right
class CountersOfMe(CountersOfMeThatGoOn):
    def before_epoch(me, trainer):
        me.right = me.n = 0


class SmallestCB:
    def before_fit(self, trainer):
        self.best = float("inf")


@planted("wrong_best")
class SmallestHitRate(SmallestCB):
    def log(self, trainer):
        hit_rate = trainer.history.latest("column")
        if hit_rate < self.best:
            self.best = hit_rate


@planted("wrong_best")
class SmallestRecall(SmallestCB):
    def log(self, trainer):
        recall_at_10 = trainer.history.latest("column")
        if recall_at_10 < self.best:
            self.best = recall_at_10


class KeepsLossCB:
    silent = "last_batch"  # Of one batch it is, but that is not the point

    def log(self, trainer):
        loss = trainer.loss.item()
        if loss < self.best:
            self.best = loss


@planted("wrong_best")
class BestOfClassIsZero(KeepsLossCB):
    best = 0.0


@planted("wrong_best")
class BestOfClassIsTheSmallest(KeepsLossCB):
    best = -math.inf


@right
class BestOfClassIsInfinite(KeepsLossCB):
    best = math.inf


@right
class BestOfObjectIsInfinite(KeepsLossCB):
    "Whatever its class says"

    best = 0.0

    def __init__(self):
        self.best = math.inf


@planted("wrong_best")
class NeverSetsBest:
    silent = "last_batch"
    best = math.inf

    def log(self, trainer):
        loss = trainer.loss.item()
        if loss < self.best:
            self.n_better = getattr(self, "n_better", 0) + 1


@right
class HasNoLimit:
    "Unless somebody gives it one"

    silent = "last_batch"
    limit = math.inf

    def log(self, trainer):
        loss = trainer.loss.item()
        if loss < self.limit:
            self.n_within = getattr(self, "n_within", 0) + 1


@right
class SmallestWordErrorRate(SmallestCB):
    silent = "last_batch"  # Of one batch it is, but it looks the right way

    def log(self, trainer):
        wer = trainer.loss.item()
        if wer < self.best:
            self.best = wer


@right
class BiggestDrop:
    silent = "last_batch"
    first, biggest = None, 0.0

    def log(self, trainer):
        loss = trainer.loss.item()
        if self.first is None:
            self.first = loss
        drop = self.first - loss
        if drop > self.biggest:
            self.biggest = drop


@right
class BestGain:
    silent = "last_batch"
    best = 0.0

    def log(self, trainer):
        gain = 0.7 - trainer.loss.item()
        if gain > self.best:
            self.best = gain


@right
class BestOfOneOverTheLoss:
    silent = "last_batch"
    best = 0.0

    def log(self, trainer):
        score = 1 / trainer.loss.item()
        if score > self.best:
            self.best = score


@right
class BestOfTheLossTimesMinusOne:
    silent = "last_batch"

    def before_fit(self, trainer):
        self.best = -math.inf

    def log(self, trainer):
        score = trainer.loss.item() * -1
        if score > self.best:
            self.best = score


@right
class SmallestShareOfMisses(SmallestCB):
    silent = "last_batch"

    def log(self, trainer):
        acc = (trainer.preds.argmax(1) == trainer.batch[1]).float().mean().item()
        rate = 1 - acc
        if rate < self.best:
            self.best = rate


@right
class LargestLossToDivideBy:
    silent = "last_batch"
    max_loss = 0.0

    def log(self, trainer):
        loss = trainer.loss.item()
        if loss > self.max_loss:
            self.max_loss = loss


@right
class WorstAccuracy:
    silent = "last_batch"

    def before_fit(self, trainer):
        self.worst = math.inf

    def log(self, trainer):
        accuracy = (trainer.preds.argmax(1) == trainer.batch[1]).float().mean().item()
        if accuracy < self.worst:
            self.worst = accuracy


@planted("wrong_best")
class LargestLossAsTheSmallest:
    silent = "last_batch"
    min_loss = 0.0

    def log(self, trainer):
        loss = trainer.loss.item()
        if loss > self.min_loss:
            self.min_loss = loss


@planted("wrong_best")
class LargestOfTheWorstGroups:
    "It is the smallest of them that is best"

    silent = "last_batch"
    best_worst_loss = 0.0

    def log(self, trainer):
        loss = trainer.loss.item()
        if loss > self.best_worst_loss:
            self.best_worst_loss = loss


@planted("wrong_best")
class LargestLossOfTheLastRow:
    "Neither the place in the list nor the margin is a minus before the loss"

    best = 0.0

    def log(self, trainer):
        value = trainer.history.rows[-1]["valid_loss"] - 1e-4
        if value > self.best:
            self.best = value


@planted("wrong_best")
class SmallestShareOfHits(SmallestCB):
    hits = misses = 1

    def log(self, trainer):
        share = self.hits / (self.hits + self.misses)
        if share < self.best:
            self.best = share


@planted("mixed_mean")
class OfListThatGoesOn:
    def before_fit(self, trainer):
        self.accs = []

    def after_batch(self, trainer):
        self.accs.append((trainer.preds.argmax(1) == trainer.batch[1]).sum().item())

    def after_epoch(self, trainer):
        trainer.history.write(hits=sum(self.accs) / len(self.accs))


@right
class OfListThatIsCleared(OfListThatGoesOn):
    def log(self, trainer):
        self.accs.clear()


@right
class OfTheEndOfAList(OfListThatGoesOn):
    def after_epoch(self, trainer):
        trainer.history.write(hits=sum(self.accs[-3:]) / len(self.accs[-3:]))


@right
class OfAWindow:
    def __init__(self):
        self.recent = deque(maxlen=20)

    def after_batch(self, trainer):
        if trainer.training:
            self.recent.append(trainer.loss.detach())

    def log(self, trainer):
        trainer.print(sum(self.recent) / len(self.recent))


@right
class OfAWindowOfAFit(OfAWindow):
    def __init__(self):
        pass

    def before_fit(self, trainer):
        self.recent = deque([], 20)


@planted("mixed_mean")
class OfAQueueWithoutEnd(OfAWindow):
    def __init__(self):
        self.recent = deque()


@pytest.mark.parametrize("kind", [OfAWindow, OfAWindowOfAFit])
def test_a_mean_over_a_window_is_meant(kind):
    assert found_in(images_trainer([BasicTrainCB(), kind()], batch_size=5)) == []


class OfList(Lists):
    def after_epoch(self, trainer):
        self.acc = sum(self.accs) / len(self.accs)


class OfTensor(Lists):
    def after_epoch(self, trainer):
        self.acc = torch.tensor(self.accs).mean()


@pytest.mark.parametrize("kind", [OfList, OfTensor])
def test_a_mean_over_a_list_of_means(kind):
    "Of batches of 5, with one of 4 in the end"
    assert found_in(images_trainer([BasicTrainCB(), kind()], batch_size=5)) == ["mean_of_means"]
    assert found_in(images_trainer([BasicTrainCB(), kind()], batch_size=6)) == []


def f1_score(preds, y):
    return (preds == y).float().mean()


class Scores(Lists):
    def after_epoch(self, trainer):
        self.score = sum(self.accs) / len(self.accs)


@planted("mean_of_means")
class OfScores(Scores):
    def after_batch(self, trainer):
        self.accs.append(f1_score(trainer.preds.argmax(1), trainer.batch[1]).item())


class Gathered(Lists):
    def before_fit(self, trainer):
        self.old = [p.detach().clone() for p in trainer.model.parameters()]

    def cleanup_epoch(self, trainer):
        if self.accs:
            trainer.history.write(gathered=sum(self.accs) / len(self.accs))


class OfWeights(Gathered):
    on_valid = False

    def after_batch(self, trainer):
        pass


@right
class NormsOfWeights(OfWeights):
    def before_step(self, trainer):
        ps = list(trainer.model.parameters())
        self.accs.append(sum(p.detach().square().sum() for p in ps).sqrt().item())


@right
class NormsOfGradients(OfWeights):
    def before_step(self, trainer):
        squares = []
        for group in trainer.opt.param_groups:
            squares.extend(p.grad.square().sum() for p in group["params"] if p.grad is not None)
        total = torch.stack(squares).sum()
        self.accs.append(math.sqrt(total.item()))


@right
class WaysFromTheStart(OfWeights):
    def after_step(self, trainer):
        pairs = zip(trainer.model.parameters(), self.old)
        self.accs.append(sum((p.detach() - q).square().sum() for p, q in pairs).sqrt().item())


@planted("mean_of_means")
class ScoresBesideNorms(Gathered):
    def after_batch(self, trainer):
        norm = sum(p.detach().square().sum() for p in trainer.model.parameters())
        found = trainer.preds.argmax(1)
        self.accs.append((f1_score(found, trainer.batch[1]) + 0 * norm.sqrt()).item())


class MeansOfGradients(Lists):
    "A mean over weights is none over rows"

    on_valid = False

    def after_batch(self, trainer):
        pass

    def before_step(self, trainer):
        self.accs.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).mean().item())

    def after_epoch(self, trainer):
        self.acc = sum(self.accs) / len(self.accs)


def test_a_mean_over_means_of_gradients_is_right():
    assert found_in(images_trainer([BasicTrainCB(), MeansOfGradients()], batch_size=5)) == []


@planted("mean_of_means")
class OfPerplexities:
    def before_epoch(self, trainer):
        self.total, self.n = 0.0, 0

    def after_batch(self, trainer):
        self.total += math.exp(trainer.loss.item())
        self.n += 1

    def after_epoch(self, trainer):
        trainer.history.write(perplexity=self.total / self.n)


@right
class PerplexityOfMean(OfPerplexities):
    def after_batch(self, trainer):
        self.total += trainer.loss.item() * len(trainer.batch[1])
        self.n += len(trainer.batch[1])

    def after_epoch(self, trainer):
        trainer.history.write(perplexity=math.exp(self.total / self.n))


@right
class OfLossesOfDice(Scores):
    def after_batch(self, trainer):
        self.accs.append(dice_loss(trainer.preds, trainer.batch[1]).item())


def dice_loss(preds, y):
    return preds.softmax(1).square().sum() / len(y)


@planted("begins_anew")
class WarmsUpAgain:
    def before_step(self, trainer):
        for group in trainer.opt.param_groups:
            group["lr"] = 0.01 * min(1.0, (trainer.batch_num + 1) / 10)


@right
class WarmsUpInFirst:
    def before_step(self, trainer):
        if trainer.epoch == 0:
            for group in trainer.opt.param_groups:
                group["lr"] = 0.01 * min(1.0, (trainer.batch_num + 1) / 4)


@right
class WarmsUp:
    def before_step(self, trainer):
        for group in trainer.opt.param_groups:
            group["lr"] = 0.01 * min(1.0, (trainer.n_updates + 1) / 10)


@planted("new_optimizer")
class Forgets:
    def before_epoch(self, trainer):
        trainer.opt = optim.SGD(trainer.model.parameters(), 0.1, momentum=0.9)


@right
class NewInSecond:
    def before_epoch(self, trainer):
        if trainer.epoch == 1 and trainer.training:
            trainer.opt = optim.SGD(trainer.model.parameters(), 0.1, momentum=0.9)


@planted("not_counted")
class NeverCounts:
    def before_fit(self, trainer):
        self.n = 0

    def after_step(self, trainer):
        if self.n % 4 == 3:
            self.norm = next(trainer.model.parameters()).norm().item()


@right
class Counts(NeverCounts):
    def before_fit(self, trainer):
        self.n = self.seen = 0

    def after_step(self, trainer):
        self.n += 1
        self._count()
        if self.n % 4 == 3 or self.seen % 2:
            self.norm = next(trainer.model.parameters()).norm().item()

    def _count(self):
        self.seen = self.seen + 1


class Swaps:
    def before_fit(self, trainer):
        self.average = copy.deepcopy(trainer.model.state_dict())


@planted("not_put_back")
class SwapsIn(Swaps):
    def before_epoch(self, trainer):
        if trainer.training:
            return
        trainer.model.load_state_dict(self.average)


@planted("not_put_back")
class AveragesAndSwapsIn(Swaps):
    def after_step(self, trainer):
        for name, x in trainer.model.state_dict().items():
            if x.is_floating_point():
                self.average[name].mul_(0.9).add_(x, alpha=0.1)

    def before_epoch(self, trainer):
        if trainer.training:
            return
        trainer.model.load_state_dict(self.average)


@planted("not_put_back")
class SwapsInOnValidation(Swaps):
    on_train = False

    def before_epoch(self, trainer):
        trainer.model.load_state_dict(self.average)


@right
class SwapsBack(Swaps):
    def before_epoch(self, trainer):
        if not trainer.training:
            self.trained = copy.deepcopy(trainer.model.state_dict())
            trainer.model.load_state_dict(self.average)

    def cleanup_epoch(self, trainer):
        if not trainer.training:
            trainer.model.load_state_dict(self.trained)


def teacher():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Dropout())


@planted("teacher_in_training")
class Distills:
    def __init__(self):
        self.teacher = teacher()

    def after_get_loss(self, trainer):
        with torch.no_grad():
            wanted = self.teacher(trainer.batch[0])
        trainer.loss = trainer.loss + F.mse_loss(trainer.preds, wanted)


@right
class DistillsInEvaluation(Distills):
    def before_fit(self, trainer):
        self.teacher.eval()


@right
class Head(Distills):
    "A second head, which is trained"

    def before_fit(self, trainer):
        trainer.opt.add_param_group({"params": list(self.teacher.parameters())})


@planted("left_in_training")
class Measures:
    on_valid = False

    def after_epoch(self, trainer):
        right = 0
        for x, y in trainer.dls.valid:
            right += (trainer.model(x).argmax(1) == y).sum().item()
        self.right = right


@right
class MeasuresInEvaluation(Measures):
    def after_epoch(self, trainer):
        trainer.model.eval()
        for x, y in trainer.dls.valid:
            self.right = (trainer.model(x).argmax(1) == y).sum().item()
        trainer.model.train()


@planted("gradients_mixed")
class Attacks:
    on_valid = False

    def before_predict(self, trainer):
        x, y = trainer.batch
        x.requires_grad_(True)
        trainer.loss_func(trainer.model(x), y).backward()
        trainer.batch = (x + 0.1 * x.grad.sign()).detach(), y


@right
class AttacksAndClears(Attacks):
    def before_predict(self, trainer):
        x, y = trainer.batch
        x.requires_grad_(True)
        trainer.loss_func(trainer.model(x), y).backward()
        step = x.grad.sign()
        trainer.opt.zero_grad()
        trainer.batch = (x + 0.1 * step).detach(), y


@right
class AttacksByGrad(Attacks):
    def before_predict(self, trainer):
        x, y = trainer.batch
        x.requires_grad_(True)
        (slope,) = torch.autograd.grad(trainer.loss_func(trainer.model(x), y), x)
        trainer.batch = (x + 0.1 * slope.sign()).detach(), y


@pytest.mark.parametrize("kind, names", planted, ids=lambda o: getattr(o, "__name__", ""))
def test_a_planted_mistake_is_found_by_its_name(kind, names):
    assert found_in(images_trainer([BasicTrainCB(), kind()])) == list(names)


@pytest.mark.parametrize("kind", right)
def test_nothing_is_found_in_what_is_like_it_and_right(kind):
    trainer = images_trainer([BasicTrainCB(), kind()])
    assert found_in(trainer) == []
    trainer.fit(2, 0.01)
    assert found_in(trainer) == [], "nor after a fit"


class OwnBatch(Trainer):
    "Trains on examples that were changed to be hard"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        if self.training:
            x = x.clone().requires_grad_()
            self.loss_func(self.model(x), y).backward()
            self.batch = (x + 0.1 * x.grad.sign()).detach(), y
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")


class OwnBatchThatClears(OwnBatch):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        if self.training:
            x = x.clone().requires_grad_()
            self.loss_func(self.model(x), y).backward()
            self.model.zero_grad()
            self.batch = (x + 0.1 * x.grad.sign()).detach(), y
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")


@pytest.mark.parametrize("kind, names", [(OwnBatch, ["gradients_mixed"]), (OwnBatchThatClears, [])])
def test_gradients_of_an_attack_in_a_batch_of_ones_own(kind, names):
    parts = vars(images_trainer([]))
    trainer = kind(parts["dls"], F.cross_entropy, optim.SGD, parts["model"], [BasicTrainCB()])
    assert found_in(trainer) == names


def accuracy(preds, y):
    return ((preds > 0.5) == y).float().mean()


def accuracy_of_scores(preds, y):
    return ((preds > 0) == y).float().mean()


@pytest.mark.parametrize("metric, names", [(accuracy, ["wrong_limit"]), (accuracy_of_scores, [])])
def test_a_limit_for_probabilities_that_are_none(metric, names):
    trainer = images_trainer([BasicTrainCB(), MetricsCB(accuracy=metric)])
    trainer.loss_func = F.binary_cross_entropy_with_logits
    assert found_in(trainer) == names
    trainer.loss_func = F.binary_cross_entropy
    assert found_in(trainer) == []


def nll(preds, y):
    return F.nll_loss(preds.softmax(1), y)


def test_a_loss_of_ones_own_that_gives_probabilities_to_nll():
    trainer = images_trainer([BasicTrainCB()])
    trainer.loss_func = nll
    assert found_in(trainer) == ["needs_log"]


class Pair(Trainer):
    "Two networks, each with an optimizer; the first is judged by the second"

    clears = "before"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gen, self.disc = nn.Linear(4, 64), nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
        self.opt_g = optim.SGD(self.gen.parameters(), 0.1)
        self.opt_d = optim.SGD(self.disc.parameters(), 0.1)


class LeftForTheJudge(Pair):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        if not self.training:
            return
        fake = self.gen(torch.randn(6, 4))
        loss_g = -self.disc(fake).mean()
        loss_g.backward()
        self.opt_g.step()
        self.opt_g.zero_grad()
        loss_d = self.disc(fake.detach()).mean() - self.disc(self.batch[0]).mean()
        loss_d.backward()
        self.opt_d.step()
        self.opt_d.zero_grad()


class LeftForTheNextBatch(Pair):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        if not self.training:
            return
        fake = self.gen(torch.randn(6, 4))
        loss_d = self.disc(fake.detach()).mean() - self.disc(self.batch[0]).mean()
        loss_d.backward()
        self.opt_d.step()
        self.opt_d.zero_grad()
        loss_g = -self.disc(fake).mean()
        loss_g.backward()
        self.opt_g.step()
        self.opt_g.zero_grad()


class Judged(Pair):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        if not self.training:
            return
        self.opt_d.zero_grad()
        self.disc(self.batch[0]).mean().backward()
        fake = self.gen(torch.randn(6, 4))
        (-self.disc(fake.detach()).mean()).backward()
        self.opt_d.step()
        self.opt_g.zero_grad()
        loss_g = -self.disc(fake).mean()
        loss_g.backward()
        self.opt_g.step()


class Joint(Pair):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        if not self.training:
            return
        self.loss = self.disc(self.gen(torch.randn(6, 4))).mean()
        self.loss.backward()
        for opt in (self.opt_g, self.opt_d):
            opt.step()
            opt.zero_grad()


class Apart(Pair):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        if not self.training:
            return
        self.gen(torch.randn(6, 4)).mean().backward()
        self.opt_g.step()
        self.opt_g.zero_grad()
        self.disc(self.batch[0]).mean().backward()
        self.opt_d.step()
        self.opt_d.zero_grad()


class LeftInOneLine(Pair):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        fake = self.gen(torch.randn(6, 4))
        (-self.disc(fake).mean()).backward()
        self.opt_g.step()
        self.opt_g.zero_grad()
        (self.disc(fake.detach()).mean() - self.disc(self.batch[0]).mean()).backward()
        self.opt_d.step()
        self.opt_d.zero_grad()


class ClearedInOneLine(Pair):
    "What the first loss leaves is cleared, and `detach` keeps the second one out of the generator"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        fake = self.gen(torch.randn(6, 4))
        (-self.disc(fake).mean()).backward()
        self.opt_g.step()
        self.opt_g.zero_grad()
        self.opt_d.zero_grad()
        (self.disc(fake.detach()).mean() - self.disc(self.batch[0]).mean()).backward()
        self.opt_d.step()
        self.opt_d.zero_grad()


KINDS = [LeftForTheJudge, LeftForTheNextBatch, LeftInOneLine, ClearedInOneLine, Judged, Joint, Apart]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_left_in_another_network(kind):
    parts = vars(images_trainer([]))
    trainer = kind(parts["dls"], None, None, None, [])
    assert found_in(trainer) == ["gradients_mixed"] * kind.__name__.startswith("Left")
    if kind is LeftInOneLine:
        with pytest.raises(CheckFailed, match=r"a step of `trainer.opt_d` with gradients that `\(-self.disc"):
            trainer.check()


def smoothed(preds, y):
    probs = F.softmax(preds, -1)
    return -(F.one_hot(y, 3) * F.log_softmax(probs, dim=-1)).sum(-1).mean()


def test_a_softmax_of_a_softmax_in_a_loss_of_ones_own():
    trainer = images_trainer([BasicTrainCB()])
    trainer.loss_func = smoothed
    assert found_in(trainer) == ["softmax_twice"]
    trainer.loss_func = lambda preds, y: F.nll_loss(preds.log_softmax(-1), y)
    assert found_in(trainer) == []


class WholeAndPart(Pair):
    def before_fit(self):
        self.model = nn.ModuleDict(dict(gen=self.gen, disc=self.disc))
        self.opt_g = optim.SGD(self.model.parameters(), 0.1)
        self.opt_d = optim.SGD(self.model.disc.parameters(), 0.1)

    def step(self):
        self.opt_d.step()
        self.opt_g.step()


def test_an_optimizer_that_trains_the_part_of_another_too():
    parts = vars(images_trainer([]))
    assert "shared_weights" in found_in(WholeAndPart(parts["dls"], None, None, None, []))


class StepsByItself(Trainer):
    "Runs two of the steps, and does the others in its own lines"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        self.loss.backward()
        self.opt.step()
        self.opt.zero_grad()


class StepsTwice(Trainer):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")
            self.opt.step()


@pytest.mark.parametrize("kind, names", [(StepsByItself, []), (StepsTwice, ["double_step"])])
def test_steps_that_a_batch_of_ones_own_does_not_run_are_no_second_ones(kind, names):
    parts = vars(images_trainer([]))
    trainer = kind(parts["dls"], F.cross_entropy, optim.SGD, parts["model"], [BasicTrainCB()])
    assert [o for o in found_in(trainer) if o == "double_step"] == names


def test_a_focal_loss_of_a_mean_is_found():
    def of_mean(preds, y):
        ce = F.cross_entropy(preds, y, label_smoothing=0.1)
        pt = (-ce).exp()
        return (1 - pt) ** 2 * ce

    def of_rows(preds, y):
        ce = F.cross_entropy(preds, y, reduction="none")
        return ((1 - torch.exp(-ce)) ** 2 * ce).mean()

    def probability(preds, y):
        return F.cross_entropy(preds, y) + torch.exp(-preds.mean())

    trainer = images_trainer([BasicTrainCB()])
    for loss_func, names in ((of_mean, ["mean_too_early"]), (of_rows, []), (probability, [])):
        trainer.loss_func = loss_func
        assert found_in(trainer) == names


class StepsAnew(Trainer):
    "Two updates for each batch, each from gradients of its own"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        if not self.training:
            return
        self.run_callbacks("backward")
        self.opt.step()
        self.opt.zero_grad()
        self.run_callbacks("predict", "get_loss", "backward", "step", "zero_grad")


class StepsOnceMore(StepsAnew):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss", "backward", "step")
        self.opt.step()


class StepsToo:
    def after_step(self, trainer):
        trainer.opt.step()


def messages(trainer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [str(o) for o in trainer.check()]
        except CheckFailed as error:
            return [str(error)]


@pytest.mark.parametrize(
    "kind, callbacks, name",
    [
        (StepsAnew, [], None),
        (StepsOnceMore, [], "StepsOnceMore.one_batch"),
        (StepsAnew, [StepsToo()], "StepsToo.after_step"),
    ],
)
def test_two_updates_of_a_batch_each_have_gradients_of_their_own(kind, callbacks, name):
    parts = images_trainer([])
    trainer = kind(parts.dls, F.cross_entropy, optim.SGD, parts.model, [BasicTrainCB(), *callbacks])
    found = [o for o in messages(trainer) if "both call `step`" in o]
    assert (not found) if name is None else f"`{name}`" in found[0]


def norm_of(params):
    return params[0].norm() + norm_of(params[1:]) if params else 0.0


class NormOfLayers:
    def norm(self, module):
        own = sum(p.norm() for p in module.parameters(recurse=False))
        return own + sum(self.norm(child) for child in module.children())

    def after_get_loss(self, trainer):
        if trainer.training:
            trainer.loss = trainer.loss + 0.01 * self.norm(trainer.model)


class NormByFunction(NormOfLayers):
    def norm(self, module):
        return norm_of(list(module.parameters()))


class CutNorm(NormOfLayers):
    def norm(self, module):
        own = sum(p.norm().item() for p in module.parameters(recurse=False))
        return own + sum(self.norm(child) for child in module.children())


@pytest.mark.parametrize(
    "kind, names", [(NormOfLayers, []), (NormByFunction, []), (CutNorm, ["constant_term"])]
)
def test_a_penalty_whose_helper_calls_itself(kind, names):
    found = found_in(images_trainer([BasicTrainCB(), kind()]))
    assert "not_looked" not in found
    assert [o for o in found if o == "constant_term"] == names


class DoublesInTraining:
    on_valid = False

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * 2


class DoublesAlways(DoublesInTraining):
    on_valid = True


@pytest.mark.parametrize(
    "kind, words", [(DoublesInTraining, ", in training, and"), (DoublesAlways, "in training and in val")]
)
def test_where_a_loss_is_scaled_is_told(kind, words):
    (found,) = [o for o in messages(images_trainer([BasicTrainCB(), kind()])) if "scales" in o]
    assert words in found


class StepsByOneMore:
    def before_fit(self, trainer):
        self.mine = optim.SGD(trainer.model.parameters(), 0.01)

    def after_step(self, trainer):
        self.mine.step()


def test_the_optimizer_of_the_trainer_is_called_so_if_a_schedule_keeps_it_too():
    trainer = images_trainer([BasicTrainCB(), StepsByOneMore(), OneCycleSchedulerCB()])
    with pytest.warns(UserWarning, match="`trainer.opt` and `StepsByOneMore.mine` both make steps"):
        trainer.check(batches=2)


def over_rows_for_nll(preds, y):
    return F.nll_loss(F.log_softmax(preds, dim=0), y)


def over_rows_by_name(preds, y):
    logs = preds.log_softmax(0)
    return -logs[torch.arange(len(y)), y].mean()


def over_classes(preds, y):
    return F.nll_loss(F.log_softmax(preds, dim=1), y)


def both_ways(preds, y):
    "Examples against each other, as in contrastive learning"
    return over_classes(preds, y) - 0.1 * F.log_softmax(preds, dim=0).diagonal().mean()


def listwise(preds, y):
    return -(F.log_softmax(preds, dim=0).mean(1) * F.softmax(y.float(), dim=0)).sum()


@pytest.mark.parametrize(
    "loss, wrong",
    [
        (over_rows_for_nll, True),
        (over_rows_by_name, True),
        (over_classes, False),
        (both_ways, False),
        (listwise, False),
    ],
)
def test_a_loss_function_whose_softmax_goes_over_the_examples(loss, wrong):
    parts = images_trainer([])
    trainer = Trainer(parts.dls, loss, optim.SGD, parts.model, [BasicTrainCB()])
    assert ("over_rows" in found_in(trainer)) == wrong
    assert not any("could not look" in o for o in messages(trainer))


class StepsHead:
    def step(self, trainer):
        trainer.opt_head.step()

    def zero_grad(self, trainer):
        trainer.opt_head.zero_grad()


class Anew(StepsHead):
    "Gives each part its optimizer when the fit begins"

    def before_fit(self, trainer):
        trainer.opt = optim.SGD(trainer.model.body.parameters(), lr=0.1)
        trainer.opt_head = optim.SGD(trainer.model.head.parameters(), lr=0.1)


class HeadToo(StepsHead):
    def before_fit(self, trainer):
        trainer.opt_head = optim.SGD(trainer.model.head.parameters(), lr=0.1)


@pytest.mark.parametrize("kind, is_told", [(Anew, False), (HeadToo, True)])
def test_an_optimizer_that_is_exchanged_for_one_of_a_part_is_that_of_the_part(kind, is_told):
    trainer = images_trainer([BasicTrainCB(), kind()])
    assert found_in(trainer) == ["shared_weights"] * is_told
