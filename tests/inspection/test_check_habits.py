"""Habits of plain loops that come out wrong in callbacks, each beside what is like it and right.

Each planted one is found by the name of its rule; in the right ones nothing is found.
"""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop import replaces
from isaac_loop.callbacks import BasicTrainCB
from marked import Marked, Planted
from working import Images, found_in, images_trainer


planted, right = Planted(), Marked()
IMAGES = [(x[None], torch.tensor([y])) for x, y in zip(Images(4).x, Images(4).y)]


class OfTraining:
    on_valid = False


# Optimizers that are made again and again


@planted("new_optimizer")
class NewInEachEpoch:
    def before_epoch(self, trainer):
        if not trainer.training:
            return
        rate = 0.1 * 0.9**trainer.epoch
        trainer.opt = optim.Adam(trainer.model.parameters(), lr=rate)


@planted("new_optimizer")
class NewUnderIf:
    def before_epoch(self, trainer):
        if trainer.training:
            opt = optim.Adam(trainer.model.parameters(), lr=0.01)
            trainer.opt = opt


@planted("new_optimizer")
class NewAfterTheFirst(OfTraining):
    def after_epoch(self, trainer):
        if trainer.epoch > 0:
            trainer.opt = trainer.opt_func(trainer.model.parameters(), 0.01)


@planted("new_optimizer")
class NewInAHelper(OfTraining):
    def begin(self, trainer):
        trainer.opt = trainer.opt_func(trainer.model.parameters(), lr=0.01)

    def before_batch(self, trainer):
        self.begin(trainer)


@right
class NewOnce(OfTraining):
    def before_epoch(self, trainer):
        if trainer.epoch == 1:
            trainer.opt = optim.Adam(trainer.model.parameters(), lr=0.01)
        if trainer.epoch != 1:
            return
        trainer.opt = optim.Adam(trainer.model.parameters(), lr=0.01)


@right
class NewWithTheOldState(OfTraining):
    def before_epoch(self, trainer):
        opt = optim.AdamW(trainer.model.parameters(), lr=0.01)
        opt.load_state_dict(trainer.opt.state_dict())
        trainer.opt = opt


# Measured in training mode


class OnImages(OfTraining):
    def __init__(self):
        self.test_loader = IMAGES


@planted("left_in_training")
class OwnLoader(OnImages):
    @torch.no_grad()
    def after_epoch(self, trainer):
        hits = [(trainer.model(x).argmax(1) == y).float().mean() for x, y in self.test_loader]
        self.accuracy = torch.stack(hits).mean()


@planted("left_in_training")
class OwnLoaderNow(OnImages):
    def after_batch(self, trainer):
        if trainer.batch_num % 2:
            return
        net, total = trainer.model, 0.0
        with torch.no_grad():
            for _, (x, y) in enumerate(self.test_loader):
                total += F.cross_entropy(net(x), y).item()
        self.mean = total / len(self.test_loader)


def accuracy_of(model, loader):
    right = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item()
    return right


@planted("left_in_training")
class ByAFunction(OnImages):
    def after_epoch(self, trainer):
        self.right = accuracy_of(trainer.model, self.test_loader)


@planted("left_in_training")
class ByAMethod(OnImages):
    def measure(self, trainer):
        self.losses = [F.cross_entropy(trainer.model(x), y).item() for x, y in self.test_loader]

    def before_epoch(self, trainer):
        self.measure(trainer)


@right
class InEvaluation(OnImages):
    def after_epoch(self, trainer):
        trainer.model.train(False)
        self.right = accuracy_of(trainer.model, self.test_loader)
        trainer.model.train()


@right
class InValidation(OnImages):
    on_valid, on_train = True, False

    def after_epoch(self, trainer):
        self.right = accuracy_of(trainer.model, self.test_loader)


@right
class Scatter(OnImages):
    "How much dropout lets the predictions of one batch differ; statistics that settle"

    def after_epoch(self, trainer):
        x = trainer.batch[0]
        with torch.no_grad():
            self.scatter = torch.stack([trainer.model(x) for _ in range(5)]).std(0).mean()
            for x, _ in self.test_loader:
                trainer.model(x.expand(2, -1, -1, -1))


@right
class TrainsOnMore(OnImages):
    def after_backward(self, trainer):
        for x, y in self.test_loader:
            loss = F.cross_entropy(trainer.model(x.repeat(2, 1, 1, 1)), y.repeat(2))
            loss.backward()


# Rates that pile up


@planted("rate_compounds")
class Powers(OfTraining):
    def before_epoch(self, trainer):
        for group in trainer.opt.param_groups:
            group["lr"] *= 0.95**trainer.epoch


@planted("rate_compounds")
class PowersInLog:
    def log(self, trainer):
        factor = 0.5 ** (trainer.epoch // 2)
        for group in trainer.opt.param_groups:
            lr = group["lr"]
            group["lr"] = lr * factor


@planted("rate_compounds")
class Shares(OfTraining):
    def after_epoch(self, trainer):
        group = trainer.opt.param_groups[0]
        group["lr"] = (1 - trainer.epoch / trainer.n_epochs) * group["lr"]


@planted("schedule_twice", "rate_compounds")
class PowersInBothPasses:
    def before_epoch(self, trainer):
        for group in trainer.opt.param_groups:
            group["lr"] *= 0.95**trainer.epoch


@right
class StepsDown(OfTraining):
    table = {1: 0.5}

    def after_epoch(self, trainer):
        for group in trainer.opt.param_groups:
            group["lr"] *= 0.1 if trainer.epoch in (30, 60) else 1
            group["lr"] *= 0.1 ** (trainer.epoch in (30, 60))
            group["lr"] *= self.table.get(trainer.epoch, 1)
            group["lr"] *= (trainer.epoch + 1) / (trainer.epoch + 2)
            group["lr"] *= 0.95


@right
class FromTheFirst(OfTraining):
    def before_fit(self, trainer):
        self.first = [group["lr"] for group in trainer.opt.param_groups]

    def before_epoch(self, trainer):
        for lr, group in zip(self.first, trainer.opt.param_groups):
            group["lr"] = lr
            group["lr"] *= 0.95**trainer.epoch


# Names that are given to something new


@planted("no_effect")
class ClampsAName:
    def after_step(self, trainer):
        with torch.no_grad():
            for p in trainer.model.parameters():
                p = p.clamp(-1, 1)


@planted("no_effect")
class ClampsKept:
    def before_fit(self, trainer):
        self.weights = list(trainer.model.parameters())

    def after_step(self, trainer):
        for p in self.weights:
            p = torch.clamp(p, -1, 1)


@planted("no_effect")
class ClampsData:
    def after_step(self, trainer):
        for _, p in trainer.model.named_parameters():
            p.data.clamp(-1, 1)


@planted("no_effect")
class ClampsByTorch:
    def before_step(self, trainer):
        for p in trainer.model.parameters():
            torch.clamp(p.grad, -1, 1)


@planted("no_effect")
class DoublesGradients:
    def before_step(self, trainer):
        for p in trainer.model.parameters():
            grad = p.grad
            grad = grad * 2


@planted("no_effect", "no_effect")
class MovesNames(OfTraining):
    def before_batch(self, trainer):
        x, y = trainer.batch
        x, y = x.to("cpu"), y.to("cpu")


@planted("no_effect")
class NormalizesAName(OfTraining):
    def before_batch(self, trainer):
        x, _ = trainer.batch
        x = F.normalize(x)


@planted("no_effect")
class AddsToTheLossInVain:
    def after_get_loss(self, trainer):
        if trainer.training:
            trainer.loss + 0.01 * sum(p.abs().sum() for p in trainer.model.parameters())


@planted("no_effect")
class ScalesABatchInVain:
    def before_batch(self, trainer):
        trainer.batch[0] * 2


@planted("no_effect")
class DividesGradientsInVain:
    def before_step(self, trainer):
        for p in trainer.model.parameters():
            p.grad / 10


@planted("no_effect")
class ComparesWhatItWantsToSet:
    def after_get_loss(self, trainer):
        trainer.loss == trainer.loss.clamp(max=10)  # noqa: B015


@right
class SendsWithAnOperator:
    "What `<<` does to a thing of one's own only that thing knows"

    def before_fit(self, trainer):
        self.pipe = Pipe()

    def after_batch(self, trainer):
        self.pipe << trainer.loss.detach()


class Pipe:
    def __init__(self):
        self.sent = []

    def __lshift__(self, thing):
        self.sent.append(thing)


@right
class ChangesWhatIsThere(OfTraining):
    def before_batch(self, trainer):
        x, y = trainer.batch
        x, y = x.to("cpu"), y.to("cpu")
        x = F.normalize(x)
        trainer.batch = x, y

    def before_step(self, trainer):
        for p in trainer.model.parameters():
            grad = p.grad
            grad *= 2
            torch.clamp(p.grad, -1, 1, out=p.grad)

    @torch.no_grad()
    def after_step(self, trainer):
        norm = 0.0
        for p in trainer.model.parameters():
            p.clamp_(-1, 1)
            p = p.detach().square()
            norm = norm + p.sum()
        self.norm = norm.sqrt()


# Mixed inputs with labels that are not


@planted("labels_not_mixed")
class MixesInputs(OfTraining):
    def before_batch(self, trainer):
        x, y = trainer.batch
        self.lam, self.perm = 0.7, torch.randperm(len(x))
        trainer.batch = (self.lam * x + (1 - self.lam) * x[self.perm], y)


@planted("labels_not_mixed")
class MixesByNames(OfTraining):
    def before_batch(self, trainer):
        x, y = trainer.batch
        order = torch.randperm(x.size(0), device=x.device)
        other = x[order]
        mixed = x.mul(0.6) + other.mul(0.4)
        trainer.batch = [mixed, y]


@planted("labels_not_mixed")
class MixesTurned(OfTraining):
    def before_batch(self, trainer):
        (x,), (y,) = trainer.split(trainer.batch)
        trainer.batch = torch.lerp(x, x.flip(0), 0.5), y


@planted("labels_not_mixed")
class PastesInputs(OfTraining):
    def before_batch(self, trainer):
        images, labels = trainer.batch
        order = torch.randperm(len(images))
        pasted = images.clone()
        pasted[:, :, 2:6, 2:6] = images[order, :, 2:6, 2:6]
        trainer.batch = pasted, labels


@planted("labels_not_mixed")
class PastesInPlace(OfTraining):
    def before_batch(self, trainer):
        x = trainer.batch[0]
        x[:, :, 2:6, 2:6] = x[torch.randperm(len(x))][:, :, 2:6, 2:6]


@right
class MixesLosses(MixesInputs):
    @replaces
    def get_loss(self, trainer):
        y = trainer.batch[1]
        one, two = F.cross_entropy(trainer.preds, y), F.cross_entropy(trainer.preds, y[self.perm])
        trainer.loss = self.lam * one + (1 - self.lam) * two if trainer.training else one


@right
class MixesTargets(OfTraining):
    def before_batch(self, trainer):
        x, y = trainer.batch
        y, order = F.one_hot(y, 3).float(), torch.randperm(len(x))
        trainer.batch = 0.7 * x + 0.3 * x[order], 0.7 * y + 0.3 * y[order]


@right
class AddsNoise(OfTraining):
    def before_batch(self, trainer):
        x, y = trainer.batch
        x = x + 0.1 * torch.randn_like(x) + 0.05 * x[torch.randperm(len(x))]
        trainer.batch = torch.lerp(x, x.flip(-1), 0.5), y


@right
class Shuffles(OfTraining):
    def before_batch(self, trainer):
        x, y = trainer.batch
        order = torch.randperm(len(x))
        trainer.batch = x[order], y[order]


# Weight decay by hand


class OwnDecay:
    def __init__(self, wd=0.05):
        self.wd = self.weight_decay = wd


@planted("decay_without_rate")
class DecaysInPlace(OwnDecay):
    @torch.no_grad()
    def after_step(self, trainer):
        for p in trainer.model.parameters():
            p.mul_(1 - self.weight_decay)


@planted("decay_without_rate")
class DecaysData(OwnDecay):
    def before_step(self, trainer):
        keep = 1.0 - self.wd
        for group in trainer.opt.param_groups:
            for p in group["params"]:
                p.data *= keep


@planted("decay_without_rate")
class DecaysBySum(OwnDecay):
    @torch.no_grad()
    def before_step(self, trainer):
        for _, param in trainer.model.named_parameters():
            if param.ndim > 1:
                param.data.add_(param.data, alpha=-self.wd)


@planted("decay_without_rate")
class DecaysByItself(OwnDecay):
    @torch.no_grad()
    def before_step(self, trainer):
        for p in trainer.model.parameters():
            p -= self.wd * p


@planted("decay_without_rate")
class MyWeightDecay:
    def __init__(self, lam=0.05):
        self.lam = lam

    def after_batch(self, trainer):
        if trainer.training:
            for p in trainer.model.parameters():
                p.data.mul_(1 - self.lam)


@right
class DecaysByRate(OwnDecay):
    def __init__(self, wd=0.05, lr=0.01):
        super().__init__(wd)
        self.share_wd = lr * wd

    @torch.no_grad()
    def before_step(self, trainer):
        for group in trainer.opt.param_groups:
            share = group["lr"] * self.wd
            for p in group["params"]:
                p.mul_(1 - group["lr"] * self.wd)
                p.mul_(1 - share)
                p.mul_(1 - self.share_wd)


@right
class AddsToGradients(OwnDecay):
    @torch.no_grad()
    def before_step(self, trainer):
        for p in trainer.model.parameters():
            p.grad.add_(p, alpha=self.wd)
            p.grad += self.wd * p


@right
class TinyDecay(OwnDecay):
    def __init__(self):
        super().__init__(1e-5)

    @torch.no_grad()
    def after_step(self, trainer):
        for p in trainer.model.parameters():
            p.mul_(1 - self.wd)


@right
class Averages(OwnDecay):
    def before_fit(self, trainer):
        self.average = [p.detach().clone() for p in trainer.model.parameters()]

    def after_step(self, trainer):
        for a, p in zip(self.average, trainer.model.parameters()):
            a.mul_(1 - self.wd).add_(p.detach(), alpha=self.wd)


# Penalties without a gradient


@planted("constant_term")
class AddsUpItems(OfTraining):
    def after_get_loss(self, trainer):
        penalty = 0.0
        for p in trainer.model.parameters():
            penalty += p.square().sum().item()
        trainer.loss = trainer.loss + 0.01 * penalty


@planted("constant_term")
class AddsWithoutGraph(OfTraining):
    def after_get_loss(self, trainer):
        with torch.no_grad():
            penalty = sum(p.abs().sum() for p in trainer.model.parameters())
        trainer.loss += 0.01 * penalty


@right
class AddsUp(OfTraining):
    def after_get_loss(self, trainer):
        penalty = 0.0
        for p in trainer.model.parameters():
            penalty = penalty + p.square().sum()
        size = penalty.detach()
        trainer.loss = trainer.loss + 0.01 * penalty / (1 + size)


class Penalized:
    "A loss with a penalty, to be made by `penalty`"

    def __init__(self, model):
        self.model, self.lam = model, 0.01

    def __call__(self, preds, y):
        return F.cross_entropy(preds, y) + self.lam * self.penalty()


class ItemsOfAList(Penalized):
    def penalty(self):
        return sum([p.norm().item() for p in self.model.parameters()])


class FloatsInALine(Penalized):
    def __call__(self, preds, y):
        loss = F.cross_entropy(preds, y)
        for p in self.model.parameters():
            loss += self.lam * float(p.abs().sum())
        return loss


class DetachedNorm(Penalized):
    def __call__(self, preds, y):
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        reg = self.lam * weights.abs().mean()
        loss = reg + F.cross_entropy(preds, y)
        return loss


class Undecorated(Penalized):
    @torch.no_grad()
    def penalty(self):
        return torch.stack([p.norm() for p in self.model.parameters()]).sum()


class InTensors(Penalized):
    def __call__(self, preds, y):
        norms = torch.tensor([p.norm() for p in self.model.parameters()])
        return F.cross_entropy(preds, y).add(0) + self.lam * norms.sum()


class WithGradient(Penalized):
    def penalty(self):
        n = float(sum(p.numel() for p in self.model.parameters()))
        scale = max(p.detach().abs().max() for p in self.model.parameters())
        return sum(p.norm() for p in self.model.parameters()) / n / scale


class ModuleWithGradient(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.of, self.log_var = [model], nn.Parameter(torch.zeros(()))

    def forward(self, preds, y):
        size = sum(p.abs().sum().item() for p in self.of[0].parameters())
        return F.cross_entropy(preds, y) + 0.01 * size * self.log_var + len(y) * 0.0


CUT = [ItemsOfAList, FloatsInALine, DetachedNorm, Undecorated, InTensors]


@pytest.mark.parametrize("kind", [*CUT, WithGradient, ModuleWithGradient])
def test_penalties_in_a_loss_of_ones_own(kind):
    trainer = images_trainer([BasicTrainCB()])
    trainer.loss_func = kind(trainer.model)
    assert found_in(trainer) == ["constant_term"] * (kind in CUT)


def test_a_penalty_in_a_function_and_in_a_method_of_the_model():
    trainer = images_trainer([BasicTrainCB()])

    def loss_with_l2(preds, y, lam=1e-3):
        l2 = torch.tensor(0.0)
        for name, p in trainer.model.named_parameters():
            if "bias" not in name:
                l2 = l2 + p.data.square().sum()
        return F.cross_entropy(preds, y) + lam * l2

    trainer.loss_func = loss_with_l2
    assert found_in(trainer) == ["constant_term"]
    trainer.loss_func = Undecorated(trainer.model).__call__
    assert found_in(trainer) == ["constant_term"]


# Decisions about an epoch by its last batch


class KeepsBest:
    order = 30

    def before_fit(self, trainer):
        self.best, self.n_bad, self.val_losses = float("inf"), 0, []


@planted("last_batch")
class BestByTheLast(KeepsBest):
    on_train = False

    def after_epoch(self, trainer):
        val_loss = trainer.loss.item()
        if val_loss < self.best:
            self.best = val_loss


@planted("last_batch")
class LeastByTheLast(KeepsBest):
    def log(self, trainer):
        self.best = min(self.best, float(trainer.loss))


@planted("last_batch")
class AccuracyOfTheLast(KeepsBest):
    def before_fit(self, trainer):
        self.top = 0.0

    def after_epoch(self, trainer):
        y = trainer.batch[1]
        acc = (trainer.preds.argmax(1) == y).float().mean().item()
        if trainer.training or acc <= self.top:
            return
        self.top = acc


@planted("last_batch")
class StopsByTheLast(KeepsBest):
    def log(self, trainer):
        if trainer.loss.item() < 0.01:
            trainer.request_stop("good enough")


@planted("last_batch")
class PlateauByTheLast(KeepsBest):
    def before_fit(self, trainer):
        self.plateau = optim.lr_scheduler.ReduceLROnPlateau(trainer.opt)

    def log(self, trainer):
        self.plateau.step(trainer.loss.detach())


@planted("last_batch")
class RecordsTheLast(KeepsBest):
    def log(self, trainer):
        self.val_losses.append(trainer.loss.item())


@right
class KeepsTheLast(KeepsBest):
    def after_epoch(self, trainer):
        self.last_loss, n = trainer.loss.item(), len(trainer.preds)
        self.latest_losses = [trainer.loss.item()]
        if n < 3 or not torch.isfinite(trainer.loss) or trainer.loss > 1e6:
            print("odd", trainer.loss.item())


@right
class BestByTheMean(KeepsBest):
    on_train = False

    def before_epoch(self, trainer):
        self.total = self.n = 0

    def after_batch(self, trainer):
        self.total += trainer.loss.item() * len(trainer.batch[0])
        self.n += len(trainer.batch[0])

    def after_epoch(self, trainer):
        loss = self.total / self.n
        if loss < self.best:
            self.best = loss


# Counters that are not saved


class SavesBest(KeepsBest):
    on_train = False

    def log(self, trainer):
        loss = trainer.history.latest("train_loss") if trainer.history else 1.0
        if loss < self.best:
            self.best, self.n_bad = loss, 0
        else:
            self.n_bad += 1
        if self.n_bad > 3:
            trainer.request_stop("no progress")

    def state_dict(self):
        return dict(best=self.best, n_bad=self.n_bad)

    def load_state_dict(self, state):
        self.best, self.n_bad = state["best"], state["n_bad"]


@planted("state_left_out")
class LeavesOutTheCounter(SavesBest):
    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]


@planted("state_left_out")
class LeavesOutTheBest(SavesBest):
    def state_dict(self):
        return {"n_bad": self.n_bad}

    def load_state_dict(self, state):
        self.n_bad = state["n_bad"]


@planted("state_left_out")
class LeavesOutTheSteps(SavesBest):
    def before_fit(self, trainer):
        super().before_fit(trainer)
        self.n_steps = 0

    def after_step(self, trainer):
        self.n_steps = self.n_steps + 1
        if self.n_steps < 100:
            trainer.opt.param_groups[0]["lr"] = 0.01 * self.n_steps / 100


@planted("state_left_out")
class LeavesOutOfAList(LeavesOutTheSteps):
    def state_dict(self):
        return {name: getattr(self, name) for name in ("best", "n_bad")}

    def load_state_dict(self, state):
        for name in ("best", "n_bad"):
            setattr(self, name, state[name])


@right
class SavesAll(SavesBest):
    def after_batch(self, trainer):
        self.seen += len(trainer.batch[0])
        self.n_shown += 1
        if self.n_shown % 10 == 0:
            print(self.n_shown)

    def before_fit(self, trainer):
        super().before_fit(trainer)
        self.n_shown = 0

    def before_epoch(self, trainer):
        self.seen = 0

    def after_epoch(self, trainer):
        self.few = self.seen < 10


@right
class SavesByName(SavesBest):
    kept = ("best", "n_bad")

    def state_dict(self):
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state):
        vars(self).update(state)


@pytest.mark.parametrize("kind, names", planted, ids=lambda o: getattr(o, "__name__", ""))
def test_a_planted_mistake_is_found_by_its_name(kind, names):
    assert found_in(images_trainer([BasicTrainCB(), kind()])) == list(names)


@pytest.mark.parametrize("kind", right)
def test_nothing_is_found_in_what_is_like_it_and_right(kind):
    trainer = images_trainer([BasicTrainCB(), kind()])
    assert found_in(trainer) == []
    trainer.fit(2, 0.01)
    assert found_in(trainer) == [], "nor after a fit"
