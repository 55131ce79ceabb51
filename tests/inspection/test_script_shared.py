"""What callbacks share with the loss, the model and the data, in a script and with the trainer.

A plain loop has one model and one of each object, as the trainer has: what changes on one side is seen on
the other, or the script is refused with words on what to do.
"""

import functools
import types

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop import CancelBatchException, CancelEpochException, CancelFitException
from isaac_loop import Trainer, set_seed, with_cbs
from isaac_loop.callbacks import AccumulationCB, BasicTrainCB, ClipGradCB, OneCycleSchedulerCB
from isaac_loop.callbacks import EMACB, KeepBestCB, MetricsCB, SWACB
from isaac_loop.data import DataLoaders
from test_script import both

SETTINGS = {"beta": 0.0}


class SetsBetaCB:
    def before_epoch(self, trainer):
        SETTINGS["beta"] = trainer.epoch * 1.0


class Holder:
    settings = SETTINGS


class SetsByClassCB:
    def before_epoch(self, trainer):
        Holder.settings["beta"] = trainer.epoch * 1.0


def loss_by_variable(preds, y):
    return F.cross_entropy(preds, y) + SETTINGS["beta"] * preds.pow(2).mean()


def beta():
    return SETTINGS["beta"]


def loss_by_helper(preds, y):
    return F.cross_entropy(preds, y) + beta() * preds.pow(2).mean()


def loss_by_closure():
    held = SETTINGS
    return lambda preds, y: F.cross_entropy(preds, y) + held["beta"] * preds.pow(2).mean()


class LossOfLambda(nn.Module):
    def __init__(self):
        super().__init__()
        self.further = lambda preds: SETTINGS["beta"] * preds.pow(2).mean()

    def forward(self, preds, y):
        return F.cross_entropy(preds, y) + self.further(preds)


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) / (1 + SETTINGS["beta"])


class Scaled:
    def __init__(self, batches):
        self.batches, self.transform = batches, lambda x: x * (1 + SETTINGS["beta"])

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return ((self.transform(x), y) for x, y in self.batches)


def batches(n=3):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(n)]


def trainer_of(callbacks, loss=F.cross_entropy, model=None, train=None, opt_func=optim.SGD, valid=True):
    set_seed(0)
    SETTINGS["beta"] = 0.0
    dls = DataLoaders(train or batches(), batches(2) if valid else None)
    return Trainer(dls, loss, opt_func, model or nn.Linear(4, 3), [BasicTrainCB(), *callbacks])


SHARING = {
    "the loss, by a variable": lambda kind: trainer_of([kind()], loss_by_variable),
    "the loss, by a helper": lambda kind: trainer_of([kind()], loss_by_helper),
    "the loss, by a closure": lambda kind: trainer_of([kind()], loss_by_closure()),
    "a lambda of the loss": lambda kind: trainer_of([kind()], LossOfLambda()),
    "the model": lambda kind: trainer_of([kind()], model=Tempered()),
    "the data": lambda kind: trainer_of([kind()], train=Scaled(batches())),
}


@pytest.mark.parametrize("kind", [SetsBetaCB, SetsByClassCB])
@pytest.mark.parametrize("name", SHARING)
def test_what_a_function_reads_and_a_callback_changes_stays_one_thing(name, kind, monkeypatch):
    both(lambda: SHARING[name](kind), monkeypatch)


class LossCB:
    "Its own loss, whose weight grows"

    beta = 0.0

    def loss(self, preds, y):
        return F.cross_entropy(preds, y) + self.beta * preds.pow(2).mean()

    def before_epoch(self, trainer):
        self.beta = trainer.epoch * 1.0


LOSSES = {
    "its method": lambda cb: cb.loss,
    "a function around it": lambda cb: lambda preds, y: cb.loss(preds, y),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_leads_to_a_callback_is_refused(name):
    cb = LossCB()
    trainer = trainer_of([cb], LOSSES[name](cb))
    with pytest.raises(ValueError, match="`trainer.loss_func` leads to `LossCB`.*Keep what both need in an"):
        trainer.to_script()
    assert "loss_func: it leads to `LossCB`" in trainer.to_script(partial=True).not_written[0]


def test_a_loss_that_reads_the_trainer_is_refused():
    def loss(preds, y):
        return F.cross_entropy(preds, y) * (1 + trainer.epoch)

    trainer = trainer_of([], loss)
    with pytest.raises(ValueError, match="`trainer.loss_func` leads to the trainer"):
        trainer.to_script()


class HookCB:
    "A factor that grows, which a hook reads"

    factor = 1.0

    def __init__(self, model, way):
        WAYS[way](model, self)

    def scale(self, *seen):
        return seen[-1] * self.factor

    def before_epoch(self, trainer):
        self.factor = 1.0 + trainer.epoch


WAYS = {
    "after the forward pass": lambda model, cb: model.register_forward_hook(cb.scale),
    "before it": lambda model, cb: model.register_forward_pre_hook(lambda m, x: (cb.scale(x[0]),)),
    "after the backward pass": lambda model, cb: model.register_full_backward_hook(
        lambda m, of_x, of_y: tuple(x if x is None else cb.scale(x) for x in of_x)
    ),
    "of a weight": lambda model, cb: model.weight.register_hook(cb.scale),
    "of a weight whose gradient is summed": lambda model, cb: model.bias.register_post_accumulate_grad_hook(
        lambda p: p.grad.mul_(cb.factor)
    ),
    "a private attribute": lambda model, cb: setattr(model, "_holder", [cb]),
    "an attribute of a weight": lambda model, cb: setattr(model.weight, "holder", cb),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_leads_to_a_callback_is_refused(way):
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match="`trainer.model` leads to `HookCB`.*Keep what both need in an"):
        trainer_of([HookCB(model, way)], model=model).to_script()


class Slotted:
    __slots__ = ("held", "unset")

    def __init__(self, held):
        self.held = held

    def __call__(self, preds, y):
        return self.held.loss(preds, y)


def loss_in_disguise(cb):
    @functools.wraps(F.cross_entropy)
    def loss(preds, y):
        return cb.loss(preds, y)

    return loss


@pytest.mark.parametrize("make", [Slotted, loss_in_disguise])
def test_a_loss_that_hides_that_it_leads_to_a_callback_is_refused(make):
    cb = LossCB()
    with pytest.raises(ValueError, match="`trainer.loss_func` leads to `LossCB`"):
        trainer_of([cb], make(cb)).to_script()


class Configured(nn.Linear):
    def __init__(self, settings):
        super().__init__(4, 3)
        self._settings = settings

    def forward(self, x):
        return super().forward(x) * (1 + self._settings["beta"])


class SetsOwnCB:
    def __init__(self, settings):
        self.settings = settings

    def before_epoch(self, trainer):
        self.settings["beta"] = trainer.epoch * 1.0


def test_what_a_model_holds_privately_and_a_callback_changes_stays_one_thing(monkeypatch):
    def make():
        settings = {"beta": 0.0}
        return trainer_of([SetsOwnCB(settings)], model=Configured(settings))

    assert "settings" in both(make, monkeypatch).needs


def scaled(x):
    return x * getattr(scaled, "by", 1)


class SetsOnFunctionCB:
    def before_epoch(self, trainer):
        scaled.by = trainer.epoch


def test_who_sets_an_attribute_of_a_function_is_refused():
    trainer = trainer_of([SetsOnFunctionCB()], lambda preds, y: F.cross_entropy(scaled(preds), y))
    with pytest.raises(ValueError, match="sets an attribute of the function `scaled`"):
        trainer.to_script()


# Parameters that a callback gives the optimizer


class AddsCB:
    "A weight of its own for each class, given to the optimizer"

    def before_fit(self, trainer):
        self.w = nn.Parameter(torch.zeros(3))
        self.give(trainer)

    def give(self, trainer):
        trainer.opt.add_param_group({"params": [self.w]})

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss + (trainer.preds * self.w.exp()).mean() - self.w.mean()


class AppendsCB(AddsCB):
    def give(self, trainer):
        trainer.opt.param_groups[0]["params"].append(self.w)


class ReplacesCB(AddsCB):
    def give(self, trainer):
        trainer.opt = optim.SGD([*trainer.model.parameters(), self.w], lr=0.1, momentum=0.5)


class OnlyBiasCB(AddsCB):
    def give(self, trainer):
        trainer.opt = optim.SGD([trainer.model.bias, self.w], lr=0.1)


@pytest.mark.parametrize("kind", [AddsCB, AppendsCB, ReplacesCB, OnlyBiasCB])
@pytest.mark.parametrize(
    "other", [lambda: ClipGradCB(0.1), lambda: AccumulationCB(2), lambda: OneCycleSchedulerCB()]
)
def test_what_a_callback_gives_the_optimizer_is_clipped_and_divided_as_well(other, kind, monkeypatch):
    both(lambda: trainer_of([kind(), other()], train=batches(4)), monkeypatch)


class AllOfGroupCB(AddsCB):
    def give(self, trainer):
        for value in trainer.opt.param_groups[0].values():
            if isinstance(value, list):
                value.append(self.w)


def test_who_goes_through_a_whole_group_may_give_parameters(monkeypatch):
    both(lambda: trainer_of([AllOfGroupCB(), ClipGradCB(0.1)], train=batches(4)), monkeypatch)


class BesideCB(AddsCB):
    "Trains its weight by an optimizer of its own"

    def give(self, trainer):
        self.opt = optim.SGD([self.w], lr=0.1)

    def after_step(self, trainer):
        self.opt.step()
        self.opt.zero_grad()


class HeldCB(BesideCB):
    def __init__(self):
        self.w = torch.zeros(3).requires_grad_()
        self.opt = optim.SGD([self.w], lr=0.1)

    def before_fit(self, trainer):
        pass


class ByHandCB(AddsCB):
    "Trains its weight without an optimizer"

    def before_fit(self, trainer):
        self.w = torch.zeros(3, requires_grad=True)

    def after_step(self, trainer):
        self.w.data -= 0.1 * self.w.grad
        self.w.grad = None


class LateCB(AddsCB):
    def give(self, trainer):
        pass

    def before_epoch(self, trainer):
        if trainer.training and trainer.epoch == 1:
            trainer.opt.add_param_group({"params": [self.w]})


@pytest.mark.parametrize("kind", [BesideCB, HeldCB, ByHandCB, LateCB])
def test_accumulation_is_refused_where_gradients_may_gather_beside_the_optimizer(kind, monkeypatch):
    with pytest.raises(ValueError, match=f"`{kind.__name__}` may train parameters.*`trainer.opt.add_param_"):
        trainer_of([kind(), AccumulationCB(2)], train=batches(4)).to_script()
    both(lambda: trainer_of([kind(), ClipGradCB(0.1)], train=batches(4)), monkeypatch)


class ThawsCB:
    "Freezes a weight of the model for an epoch, and has a model of its own that nobody trains"

    def __init__(self):
        self.teacher = nn.Linear(4, 3)

    def before_epoch(self, trainer):
        for p in trainer.model.parameters():
            p.requires_grad_(trainer.epoch > 0 or p.ndim > 1)
        trainer.model.weight.requires_grad = True


def test_accumulation_is_written_where_only_the_model_is_trained(monkeypatch):
    both(lambda: trainer_of([ThawsCB(), AccumulationCB(2)], train=batches(4)), monkeypatch)


# What is in a row stays as it was written


class TotalCB:
    "The loss grows with what the last epoch had"

    def before_fit(self, trainer):
        self.total = torch.zeros(())

    def after_get_loss(self, trainer):
        if trainer.training:
            self.total += trainer.loss.detach()
            if trainer.epoch > 1:
                trainer.loss = trainer.loss * (trainer.history[-1]["total"] - trainer.history[-2]["total"])

    def after_epoch(self, trainer):
        trainer.history.write(total=self.total)


class ListedCB(TotalCB):
    def before_fit(self, trainer):
        self.total = []

    def after_get_loss(self, trainer):
        if trainer.training:
            self.total.append(trainer.loss.item())
            if trainer.epoch > 1:
                earlier = trainer.history[-2]["total"], trainer.history[-1]["total"]
                trainer.loss = trainer.loss * (len(earlier[1]) - len(earlier[0]))


class ListedByNameCB(ListedCB):
    def after_epoch(self, trainer):
        trainer.history.write(**{"total": {"a": (self.total,)}["a"][0]})


@pytest.mark.parametrize("kind", [TotalCB, ListedCB, ListedByNameCB])
def test_a_row_keeps_what_was_written(kind, monkeypatch):
    both(lambda: trainer_of([kind()]), monkeypatch)


# Validation with an average of the weights, in the model itself


class Counting(Tempered):
    "Counts its calls, and has a temperature that callbacks set"

    def __init__(self):
        super().__init__()
        self.n, self.tau = 0, 1.0

    def forward(self, x):
        self.n += 1
        return super().forward(x) / (self.tau + self.n)


class TauCB:
    def before_epoch(self, trainer):
        trainer.model.tau = 1.0 + trainer.epoch + trainer.training


class PullCB:
    "Reads the weights, which it keeps, in validation"

    def before_fit(self, trainer):
        self.params = list(trainer.model.parameters())

    def before_batch(self, trainer):
        if not trainer.training:
            self.size = sum(p.pow(2).sum() for p in self.params).item()

    def after_get_loss(self, trainer):
        if trainer.training and trainer.epoch:
            trainer.loss = trainer.loss + self.size * trainer.preds.pow(2).mean()


class SkipsValidCB:
    "Leaves some validation passes before they begin, some in the middle, and the last fit"

    order = -1000

    def before_epoch(self, trainer):
        if not trainer.training and trainer.epoch == 1:
            raise CancelEpochException
        if not trainer.training and trainer.epoch == 3:
            raise CancelFitException

    def after_batch(self, trainer):
        if not trainer.training and trainer.epoch == 2:
            raise CancelEpochException


def penalty_trainer(average):
    model = Counting()
    trainer = trainer_of([average()], model=model)
    trainer.loss_func = lambda preds, y: F.cross_entropy(preds, y) + model.layer.weight.square().mean()
    return trainer


def best(monitor="valid_loss"):
    return [MetricsCB(), KeepBestCB(monitor)]


AVERAGED = {
    "attributes of the model": lambda ema: trainer_of([TauCB(), ema(), *best()], model=Counting()),
    "weights that are held": lambda ema: trainer_of([PullCB(), ema()]),
    "a loss that holds the model": penalty_trainer,
    "passes that are left": lambda ema: trainer_of([SkipsValidCB(), ema(), MetricsCB()], model=Counting()),
    "norms": lambda ema: trainer_of(
        [ema(), *best()], model=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    ),
}
AVERAGES = {
    "moving": lambda: EMACB(0.5),
    "mean": lambda: SWACB(0.5, every="update", update_bn=False),
    "kept": lambda: SWACB(0.25, update_bn=False, keep=True),
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", AVERAGED)
def test_an_average_is_measured_in_the_model_itself(name, average, monkeypatch):
    both(lambda: AVERAGED[name](AVERAGES[average]), monkeypatch, n_epochs=4, lr=0.5)


class SkipsFirstCB:
    "Leaves the first pass that trains before it begins"

    order = -1000

    def before_epoch(self, trainer):
        if trainer.training and trainer.epoch == 0:
            raise CancelEpochException


@pytest.mark.parametrize("others", [[], [ClipGradCB(0.1)]])
def test_the_clock_of_an_epoch_starts_with_the_first_pass_that_is_not_left(others, monkeypatch):
    both(lambda: trainer_of([SkipsFirstCB(), MetricsCB(), *others]), monkeypatch)


# A batch of one's own, with or without the usual events


class OwnBatch(Trainer):
    "Steps by itself, without an event"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.preds = self.model(x)
        self.loss = self.loss_func(self.preds, y)
        if self.training:
            self.learn()

    def learn(self):
        self.loss.backward()
        self.opt.step()
        self.opt.zero_grad()


class SometimesBatch(OwnBatch):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        if self.training and self.epoch:
            self.run_callbacks("backward")
            if self.batch_num % 2:
                self.run_callbacks("step", "zero_grad")


class NoBackwardBatch(OwnBatch):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.preds = self.model(x)
        self.loss = self.loss_func(self.preds, y)
        if self.training:
            self.loss.backward()
            self.run_callbacks("step", "zero_grad")


def own_batch_trainer(cls, callbacks):
    set_seed(0)
    dls = DataLoaders(batches(5), batches(2))
    return cls(dls, F.cross_entropy, optim.SGD, nn.Linear(4, 3), [BasicTrainCB(), *callbacks, MetricsCB()])


COUNTING = {
    "accumulation": lambda: [AccumulationCB(2)],
    "clipping": lambda: [ClipGradCB(0.1)],
    "average": lambda: [EMACB(0.5, keep=True)],
    "mean": lambda: [SWACB(0.0, every="update", update_bn=False)],
    "best average": lambda: [EMACB(0.5), KeepBestCB()],
    "accumulated average": lambda: [AccumulationCB(2), EMACB(0.5)],
}


@pytest.mark.parametrize("cls", [OwnBatch, SometimesBatch])
@pytest.mark.parametrize("name", COUNTING)
def test_who_counts_steps_is_written_for_a_batch_that_may_have_none(name, cls, monkeypatch):
    both(lambda: own_batch_trainer(cls, COUNTING[name]()), monkeypatch, lr=0.5)


def test_accumulation_is_refused_where_no_event_counts_its_batches():
    with pytest.raises(ValueError, match="event `backward`, which `NoBackwardBatch.one_batch` never runs"):
        own_batch_trainer(NoBackwardBatch, [AccumulationCB(2)]).to_script()


# Words


class OfLibrary(Trainer):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        super().one_batch()


def test_who_calls_the_batch_of_the_library_is_told_to_write_it_out():
    trainer = OfLibrary(DataLoaders(batches()), F.cross_entropy, optim.SGD, nn.Linear(4, 3), BasicTrainCB())
    with pytest.raises(ValueError, match="calls the `one_batch` of `Trainer`. Write out what that does"):
        trainer.to_script()


class LeavesBatchCB:
    def before_step(self, trainer):
        if trainer.batch_num == 1:
            raise CancelBatchException


def test_who_may_leave_a_batch_after_the_last_one_is_told_what_to_do():
    stream = (batch for batch in batches())
    trainer = trainer_of([AccumulationCB(2), LeavesBatchCB()], train=stream, valid=False)
    with pytest.raises(
        ValueError, match="`LeavesBatchCB.before_step` may leave a `batch`.*give `dls.train` a"
    ):
        trainer.to_script()


# Streams whose copy counts where they count


class CountingStream:
    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return self.numbers()


def by_closure():
    n = [0]

    def numbers():
        for batch in batches(2):
            n[0] += 1
            yield batch[0] * n[0], batch[1]

    return numbers


def by_default(n):
    n["n"] += 1
    for x, y in batches(2):
        yield x * n["n"], y


class Count:
    n = 0


def by_object():
    count = Count()

    def numbers():
        for x, y in batches(2):
            count.n += 1
            yield x * count.n, y

    return numbers


STREAMS = {"a closure": by_closure, "an object": by_object, "a default": lambda: copied(by_default)}


def copied(f):
    return types.FunctionType(f.__code__, f.__globals__, "numbers", ({"n": 0},))


@pytest.mark.parametrize("state", STREAMS)
def test_writing_a_script_does_not_count_where_a_stream_counts(state, monkeypatch):
    both(lambda: trainer_of([], train=CountingStream(STREAMS[state]())), monkeypatch)
