"What a trainer refuses, and how it says so."

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import MethodType, SimpleNamespace

import pandas as pd
import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.all import (
    AccumulationCB,
    BasicTrainCB,
    BatchSchedulerCB,
    CancelBatchException,
    CancelStepException,
    DataLoaders,
    DeviceCB,
    EMACB,
    EarlyStoppingCB,
    EvaluatorCB,
    LimitCB,
    MetricsCB,
    NBatchCB,
    OneCycleSchedulerCB,
    Order,
    ProgressCB,
    Trainer,
    get_dataloaders,
    replaces,
    with_cbs,
)
from isaac_loop.loop.callback_checks import _is_in_order, check_callback
from small import StepsAsMethods, data, trainer_with


def test_a_dict_of_callbacks_is_refused_by_its_name_and_lists_are_not():
    "Its keys were taken for the callbacks: nothing ran of an empty one, and of others `str` was to blame"
    match = r"given as `dict` with the keys \['mine'\].*list\(callbacks.values\(\)\)"
    t = trainer_with()
    for add in (
        lambda o: trainer_with(o),
        lambda o: t.add_callbacks(o),
        lambda o: t.add_callbacks([[o]]),
        lambda o: t.fit(1, callbacks=o),
        lambda o: setattr(t, "callbacks", o),
        lambda o: t.check(callbacks=o),
    ):
        with pytest.raises(TypeError, match=match):
            add(dict(mine=MetricsCB(show=False)))
        with pytest.raises(TypeError, match=r"given as `dict` with the keys \[\]"):
            add({})
    with pytest.raises(TypeError, match="`mappingproxy`"):
        t.add_callbacks(vars(MetricsCB))

    class OnesOwn(dict):
        def before_fit(self, trainer):
            self["begun"] = True

    mine = OnesOwn(a=1)
    t = trainer_with(mine, (EMACB(), [MetricsCB(show=False)]))
    t.fit(1)
    assert mine["begun"] and [type(o) for o in t.callbacks[-3:]] == [OnesOwn, EMACB, MetricsCB]


@pytest.mark.shows("ISA-44")
def test_a_step_of_the_trainer_and_one_of_a_callback_are_refused_together_unless_one_replaces():
    "Never two providers by accident"

    class OwnStep(Trainer):
        def step(self):
            self.opt.step()

    class OwnStepAlone(Trainer):
        @replaces
        def step(self):
            self.opt.step()

    with pytest.raises(
        ValueError, match="`OwnStep.step`, a method of the trainer itself, and `BasicTrainCB.step`"
    ):
        trainer_with(cls=OwnStep).fit(1)
    t = trainer_with(cls=OwnStepAlone)
    seen = []
    t.opt_func = lambda params, lr: SimpleNamespace(
        step=lambda: seen.append(1), zero_grad=lambda: None, param_groups=[]
    )
    t.fit(1, valid=False)
    assert len(seen) == t.n_updates == 3


def bad_classes():
    class Misspelt(Trainer):
        def before_bach(self): ...

    class Argument(Trainer):
        def predict(self, x): ...

    class Log(Trainer):
        def log(self, message): ...

    class Decorated(Trainer):
        @with_cbs("predict", CancelStepException)
        def predict(self): ...

    return [
        (Misspelt, "Did you mean `before_batch`"),
        (Argument, "named after an event"),
        (Log, "named after an event"),
        (Decorated, "Leave the decorator out"),
    ]


@pytest.mark.parametrize("cls, message", bad_classes(), ids=lambda o: getattr(o, "__name__", None))
def test_methods_of_a_trainer_that_could_not_work_are_refused(cls, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Trainer.__init__(cls.__new__(cls), DataLoaders(data()), F.mse_loss, optim.SGD, nn.Linear(1, 1), None)


async def _later(trainer): ...


def _yielding(trainer):
    yield


def _too_many(trainer, more): ...


@pytest.mark.parametrize(
    "handler, message",
    [(_later, "coroutine"), (_yielding, "generator"), (_too_many, "with the trainer alone")],
)
def test_handlers_that_would_do_nothing_or_fail_are_refused(handler, message):
    with pytest.raises(TypeError, match=message):
        trainer_with(SimpleNamespace(name="odd", after_batch=handler))


def test_an_error_inside_a_property_comes_out():
    class PropertyCB:
        @property
        def after_batch(self):
            return self.missing

        def before_fit(self, trainer): ...

    with pytest.raises(AttributeError, match="missing"):
        trainer_with(PropertyCB())

    class PropertyTrainer(Trainer):
        @property
        def n_params(self):
            return self.model.params()

    with pytest.raises(AttributeError, match="object has no attribute 'params'"):
        _ = trainer_with(cls=PropertyTrainer).n_params


@pytest.mark.parametrize("lr", ["0.1", True, None, float("nan"), -1.0])
def test_what_is_no_rate_is_refused(lr):
    with pytest.raises((TypeError, ValueError), match="`lr` is"):
        trainer_with().fit(1, lr=lr)


def test_an_exception_used_again_gathers_no_notes():
    skip = CancelStepException("skip")

    def before_step(trainer):
        raise skip

    trainer_with(n=50).fit(1, callbacks=before_step)
    assert not getattr(skip, "__notes__", ())


def test_notes_do_not_name_the_place_of_an_earlier_fit():
    def before_fit(trainer):
        raise ValueError("early")

    t = trainer_with()
    t.fit(2)
    with pytest.raises(ValueError) as e:
        t.fit(1, callbacks=before_fit)
    assert e.value.__notes__ == ["raised by `before_fit.before_fit`"]


def test_a_loader_that_fails_is_said_to_fail_after_the_batch_before():
    def broken():
        yield from data(1)
        error = OSError("disk")
        error.add_note("file 17")
        raise error

    t = Trainer(DataLoaders(broken()), F.mse_loss, optim.SGD, nn.Linear(1, 1), BasicTrainCB())
    with pytest.raises(OSError) as e:
        t.fit(1, valid=False)
    assert e.value.__notes__[0] == "file 17" and "after batch 0" in e.value.__notes__[1]


def test_a_table_of_columns_as_dataset_is_told_what_rows_are():
    table = pd.DataFrame(dict(a=[1.0, 2.0], b=[3.0, 4.0]))
    t = Trainer(DataLoaders(DataLoader(table, 2)), F.mse_loss, optim.SGD, nn.Linear(1, 1), BasicTrainCB())
    with pytest.raises(KeyError) as e:
        t.fit(1, valid=False)
    assert "`df[i]` is one of its columns" in e.value.__notes__[0]


def test_a_function_that_makes_the_model_is_to_be_called():
    def net():
        return nn.Linear(1, 1)

    with pytest.raises(ValueError, match=r"Then call it: .*net\(\)"):
        Trainer(DataLoaders(data()), F.mse_loss, optim.SGD, net, BasicTrainCB()).fit(1, valid=False)


def test_a_log_that_misses_a_row_in_a_run_on_the_side_is_told_which_run_this_is():
    class BestCB:
        def before_fit(self, trainer):
            self.best = float("inf")

        def log(self, trainer):
            self.best = min(self.best, trainer.history.latest("valid_loss"))

    trainer = Trainer(
        DataLoaders(data(), data()),
        F.mse_loss,
        optim.SGD,
        nn.Linear(1, 1),
        [BasicTrainCB(), MetricsCB(show=False), BestCB()],
    )
    trainer.fit(1)
    best, trainer.BestCB.in_side_runs = trainer.BestCB.best, True
    with pytest.raises(LookupError) as e:
        trainer.get_preds()
    trainer.BestCB.in_side_runs = False
    trainer.get_preds()
    assert trainer.BestCB.best == best
    assert "This is a run on the side" in e.value.__notes__[0] and "Order.RECORD" in e.value.__notes__[0]


def test_who_reads_what_no_callback_writes_is_told_to_add_one():
    def trainer(*callbacks, cls=Trainer):
        return cls(DataLoaders(data()), F.mse_loss, optim.SGD, nn.Linear(1, 1), callbacks)

    with pytest.raises(AttributeError, match="Nobody does `get_loss` here: add `BasicTrainCB`"):
        trainer(MetricsCB(show=False)).fit(1, valid=False)
    early = SimpleNamespace(before_batch=lambda trainer: trainer.loss)
    for one in (trainer(BasicTrainCB(), early), trainer(early, cls=Decorated)):
        with pytest.raises(AttributeError) as e:
            one.fit(1, valid=False)
        assert "has not happened" in str(e.value) and "Nobody" not in str(e.value)


def test_the_warning_about_missing_steps_points_at_the_line_with_fit():
    t = Trainer(
        DataLoaders(data()),
        F.mse_loss,
        optim.SGD,
        nn.Linear(1, 1),
        SimpleNamespace(predict=lambda trainer: None),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t.fit(1, valid=False)
    assert caught[0].filename == __file__


def test_a_trainer_is_copied_with_all_that_a_fit_changes_or_not_at_all():
    trainer = trainer_with(MetricsCB(show=False))
    trainer.fit(1)
    with pytest.raises(TypeError, match="(?s)A shallow copy of this `Trainer`.*`copy.deepcopy"):
        copy.copy(trainer)
    other, before = copy.deepcopy(trainer), trainer.model.weight.clone()
    other.fit(1, keep_opt=True)
    assert torch.equal(trainer.model.weight, before) and not torch.equal(other.model.weight, before)
    assert (len(trainer.history), len(other.history)) == (1, 2)
    assert other.MetricsCB is not trainer.MetricsCB


def test_a_trainer_is_no_callback():
    with pytest.raises(TypeError, match="other.callbacks"):
        trainer_with(trainer_with())


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(dls=nn.Linear(1, 1)), "`dls` is a module, Linear"),
        (dict(model=0.1), "`model` is 0.1"),
        (dict(model=F.cross_entropy, loss_func=nn.Linear(1, 1)), "`model` is the function `cross_entropy`"),
    ],
)
def test_what_stands_in_the_place_of_another_argument_is_named(change, told):
    right = dict(dls=DataLoaders(data()), loss_func=F.mse_loss, opt_func=optim.Adam, model=nn.Linear(1, 1))
    with pytest.raises(TypeError, match=told + ".*The order is"):
        Trainer(**(right | change), callbacks=None)


def test_a_missing_loader_is_asked_for_by_a_call_that_runs():
    with pytest.raises(ValueError, match=r"`DataLoaders\(train, valid\)`.*`fit\(valid=False\)`"):
        Trainer(DataLoaders(data()), F.mse_loss, optim.Adam, nn.Linear(1, 1), None).fit(1)


def test_arguments_in_the_order_of_another_library_are_recognised():
    with pytest.raises(TypeError, match="The order is"):
        Trainer(DataLoaders(data()), nn.Linear(1, 1), F.mse_loss, optim.Adam, None)
    with pytest.raises(TypeError, match="The order is"):
        Trainer(DataLoaders(data()), F.mse_loss, nn.Linear(1, 1), optim.Adam, None)


def test_forgotten_arguments_have_a_hint():
    class TwoInputs(nn.Linear):
        def forward(self, a, b):
            return super().forward(a + b)

    t = Trainer(DataLoaders(data()), F.mse_loss, optim.SGD, TwoInputs(1, 1), BasicTrainCB())
    with pytest.raises(TypeError) as e:
        t.fit(1, valid=False)
    assert "n_inp" in e.value.__notes__[0]
    t = Trainer(DataLoaders(data()), None, optim.SGD, nn.Linear(1, 1), BasicTrainCB())
    with pytest.raises(TypeError) as e:
        t.fit(1, valid=False)
    assert "loss_func=None" in e.value.__notes__[0]


def test_a_vector_loss_in_validation_says_what_is_wrong():
    t = Trainer(
        DataLoaders(data(), data()),
        lambda preds, targets: (preds - targets) ** 2,
        optim.SGD,
        nn.Linear(1, 1),
        [BasicTrainCB(), MetricsCB()],
    )
    with pytest.raises(ValueError, match="mean or a sum"):
        t.fit(1, train=False)


def test_a_loss_class_is_refused_where_it_is_typed():
    with pytest.raises(TypeError, match=r"Make one: `MSELoss\(\)`"):
        Trainer(DataLoaders(data()), nn.MSELoss, optim.SGD, nn.Linear(1, 1), None)


def test_a_callback_that_evaluates_itself_without_end_is_told_how_to_mend_it():
    def after_epoch(trainer):
        trainer.validate()

    for callbacks in ([after_epoch], []):
        with pytest.raises(RuntimeError, match="order = Order.RECORD"):
            trainer_with(*callbacks).fit(1, callbacks=None if callbacks else after_epoch)
    after_epoch.order = Order.RECORD
    trainer_with().fit(1, callbacks=after_epoch)


def test_steps_that_somebody_waits_for_and_nobody_does_are_missed():
    def trainer(*callbacks):
        return Trainer(DataLoaders(data(), data()), F.mse_loss, optim.SGD, nn.Linear(1, 1), callbacks)

    with pytest.warns(UserWarning, match="`EMACB.after_step` waits in vain.*Add `BasicTrainCB`"):
        trainer(EMACB()).fit(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer().fit(1)  # An empty loop is fine


@pytest.mark.parametrize("trains", [False, True])
def test_a_checkpoint_of_a_loop_that_trains_nothing_is_told_of(trains, tmp_path):
    "Which is fine where a callback trains in another event"

    def after_batch(trainer):
        if trains and trainer.training:
            F.mse_loss(trainer.model(trainer.batch[0]), trainer.batch[1]).backward()
            trainer.opt.step()

    callbacks = [after_batch, CheckpointCB(tmp_path)]
    trainer = Trainer(DataLoaders(data(), data()), F.mse_loss, optim.SGD, nn.Linear(1, 1), callbacks)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(2)
    assert ["Add `BasicTrainCB`" in str(o.message) for o in told] == [True] * (not trains)


class ByHand(Trainer):
    "A batch as somebody would write it first"

    def one_batch(self):
        self.preds = self.model(self.batch[0])
        self.loss = self.loss_func(self.preds, self.batch[1])
        if self.training:
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()


class Decorated(ByHand):
    one_batch = with_cbs("batch", CancelBatchException)(ByHand.one_batch)


class Counted(Decorated):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        ByHand.one_batch(self)
        self.n_updates += self.training


def test_a_batch_written_by_hand_is_told_what_it_leaves_out():
    "Losses, schedules, averages and checkpoints stood still in silence"
    with pytest.warns(UserWarning) as told:
        trainer_with(MetricsCB(), cls=ByHand).fit(2)
    spans = [o for o in told if "`ByHand.one_batch` replaces the span of a batch" in str(o.message)]
    assert len(spans) == 1  # Not again in every pass
    assert spans[0].filename == __file__
    t = trainer_with(MetricsCB(), cls=Decorated)
    with pytest.warns(UserWarning, match=r"epoch 0 ended without an update.*self.run_callbacks\('step'\)"):
        t.fit(1)
    assert t.history.latest("train_loss") > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        t = trainer_with(MetricsCB(), cls=Counted)
        t.fit(1)
    assert t.n_updates == 3


class Divides(Trainer):
    def one_batch(self):
        if self.batch_num == 1:
            self.half()

    def half(self):
        raise ZeroDivisionError


class DividesInSpan(Divides):
    one_batch = with_cbs("batch", CancelBatchException)(Divides.one_batch)


class WalksItself(Trainer):
    def one_epoch(self, training):
        super().one_epoch(training)


class AnswersAnything:
    "Whatever it is asked for, it has another such object"

    def __getattr__(self, name):
        return AnswersAnything()

    def __call__(self):
        pass


class HoldsAnything(Divides):
    service = AnswersAnything()


class Breaks(list):
    def __iter__(self):
        yield from list.__iter__(self)
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "cls, train, told",
    [
        (Divides, data(), "`epoch` at epoch 0, batch 1, by `Divides.half`"),
        (DividesInSpan, data(), "`batch` at epoch 0, batch 1 (training), by `Divides.half`"),
        (HoldsAnything, data(), "`epoch` at epoch 0, batch 1, by `Divides.half`"),
        (WalksItself, Breaks(data()), "`epoch` at epoch 0, after batch 2, by the loop or its loader"),
    ],
)
def test_an_error_in_a_method_of_a_subclass_is_not_put_down_to_the_loop(cls, train, told):
    with pytest.raises(ZeroDivisionError) as raised:
        cls(DataLoaders(train), None, None, nn.Linear(1, 1), None).fit(1, valid=False)
    assert raised.value.__notes__ == [f"raised in the body of {told}"]


class Adversaries(Trainer):
    "Two nets and two optimizers, which step where no callback could know of it"

    def one_batch(self):
        for opt, net in ((self.opt_d, self.critic), (self.opt_g, self.model)):
            net(self.batch[0]).mean().backward()
            if self.steps:
                opt.step()
            opt.zero_grad()


class Averages(Trainer):
    "Writes to weights, and no optimizer steps"

    def one_batch(self):
        self.model(self.batch[0])
        if not hasattr(self, "average"):
            self.average = copy.deepcopy(self.model)
        self.average.load_state_dict(self.model.state_dict())


def adversaries(steps):
    model, critic = nn.Linear(1, 1), nn.Linear(1, 1)
    trainer = Adversaries(DataLoaders(data()), None, None, model, None)
    trainer.critic, trainer.steps = critic, steps
    trainer.opt_g, trainer.opt_d = optim.SGD(model.parameters(), 0.1), optim.Adam(critic.parameters())
    return trainer


def test_updates_that_nobody_counts_are_noticed_by_the_optimizers():
    with pytest.warns(UserWarning, match="epoch 0 ended without an update") as told:
        adversaries(steps=True).fit(2, valid=False)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adversaries(steps=False).fit(1, valid=False)  # It may look, and train nothing
        Averages(DataLoaders(data()), None, None, nn.LazyLinear(1), None).fit(1, valid=False)


class Twice(Trainer):
    "Two updates in every batch"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        for _ in range(2 if self.training else 0):
            self.run_callbacks("predict", "get_loss", "backward", "step", "zero_grad")


class TwiceAsPlanned(Twice):
    def before_fit(self):
        self.updates_per_epoch *= 2


def test_more_updates_than_were_planned_are_told_of_once():
    "The schedule had come to its end in the middle of the fit, and the rest trained at a rate of nearly 0"
    with pytest.warns(
        UserWarning, match="12 updates so far, and `total_updates` had said.* would have 9"
    ) as told:
        trainer_with(OneCycleSchedulerCB(), cls=Twice).fit(3)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_with(cls=Twice).fit(3)  # Nobody has asked
        trainer_with(OneCycleSchedulerCB(), cls=TwiceAsPlanned).fit(3)
        trainer_with(OneCycleSchedulerCB(), NBatchCB(1), cls=TwiceAsPlanned).fit(3)
        trainer_with(OneCycleSchedulerCB(), LimitCB(updates=3), cls=Twice).fit(3)  # Stops within a batch


def pairs(n):
    return TensorDataset(torch.randn(n, 1), torch.randn(n, 1))


DROPS = {
    "both": lambda: get_dataloaders(pairs(16), pairs(13), 4, drop_last=True),
    "exact": lambda: get_dataloaders(pairs(16), pairs(13), 4, seed=1, drop_last=True),
    "random": lambda: (None, DataLoader(pairs(13), 8, shuffle=True, drop_last=True)),
    "some": lambda: (None, DataLoader(pairs(20), 8, sampler=range(13), drop_last=True)),
    "sampler": lambda: (None, DataLoader(pairs(13), batch_sampler=BatchSampler(range(13), 8, True))),
}


@pytest.mark.parametrize("make", DROPS.values(), ids=DROPS)
def test_rows_that_no_validation_pass_reads_are_told_of_once(make):
    t = trainer_with(MetricsCB(show=False))
    t.dls = DataLoaders(*make())
    t.dls.train = data()
    with pytest.warns(
        UserWarning, match=r"`dls.valid` leaves out 5 of 13 rows.* without `drop_last`"
    ) as told:
        for _ in range(2):
            t.fit(1)
    assert len(told) == 1


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(pairs(13))


def test_who_reads_all_rows_or_does_not_validate_is_told_nothing():
    full = DataLoader(pairs(16), 8, drop_last=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for valid in (full, DataLoader(pairs(13), 8), DataLoader(Streamed(), 8, drop_last=True), data()):
            t = trainer_with(MetricsCB(show=False))
            t.dls = DataLoaders(DataLoader(pairs(13), 8, drop_last=True), valid)
            t.fit(1)
        t.dls.valid = DataLoader(pairs(13), 8, drop_last=True)
        t.fit(1, valid=False)
        t.validate()


class AroundAnother(optim.Optimizer):
    "Wraps an optimizer, and makes nothing of its own"

    def __init__(self, opt):
        self.opt, self.param_groups, self.state, self.defaults = opt, opt.param_groups, opt.state, {}

    def step(self, closure=None):
        self.opt.step(closure)

    def zero_grad(self, set_to_none=True):
        self.opt.zero_grad()


class Copies:
    "Gives another list each time"

    def __init__(self):
        vars(self).update(train=data(), valid=data())

    train = property(lambda self: list(vars(self)["train"]))
    valid = property(lambda self: list(vars(self)["valid"]))


def wrapped(trainer, batches):
    for batch in batches:
        yield batch
        raise ZeroDivisionError


@pytest.mark.filterwarnings("error::UserWarning")
def test_what_is_no_misuse_is_not_told_of():
    def opt_func(params, lr):
        return AroundAnother(optim.SGD(params, lr))

    trainer = TwiceAsPlanned(DataLoaders(data()), F.mse_loss, opt_func, nn.Linear(1, 1), BasicTrainCB())
    trainer.fit(1, valid=False)
    assert trainer.n_updates == 6
    Trainer(Copies(), F.mse_loss, optim.SGD, nn.Linear(1, 1), BasicTrainCB()).fit(1)
    exponential = partial(optim.lr_scheduler.ExponentialLR, gamma=0.9)
    trainer_with(BatchSchedulerCB(exponential), cls=Twice).fit(2)  # Has no end that could come too early


def test_an_error_of_wrapped_batches_is_one_of_the_loader():
    def before_epoch(trainer):
        trainer.batches = wrapped(trainer, trainer.batches)

    with pytest.raises(ZeroDivisionError) as raised:
        trainer_with().fit(1, callbacks=before_epoch)
    assert "after batch 0, by the loop or its loader" in raised.value.__notes__[0]


def test_two_backwards_in_a_batch_count_as_two_batches_and_that_is_said():
    "In a GAN one player would learn from the gradients of both, and the other never"
    with pytest.warns(
        UserWarning, match=r"In batch 0 .* more than one `backward`.*`AccumulationCB\(2\)`"
    ) as told:
        trainer_with(AccumulationCB(2), cls=Twice).fit(2)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_with(AccumulationCB(2)).fit(2)


def test_a_loader_that_comes_too_late_for_its_pass_is_told_of():
    def before_epoch(trainer):
        trainer.dls.train = data()[: trainer.epoch + 1]

    def log(trainer):
        before_epoch(trainer)

    with pytest.warns(UserWarning, match=r"`dls.train` was exchanged after this pass.*set `trainer.dl`"):
        trainer_with().fit(2, callbacks=before_epoch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_with().fit(2, callbacks=log)


def test_a_span_ends_by_an_exception():
    with pytest.raises(TypeError, match=r"`with_cbs\('inner', 'Cancel'\)`.*Pass a class such as"):
        with_cbs("inner", "Cancel")


def test_a_step_of_ones_own_is_told_what_lbfgs_needs():
    class Own(Trainer):
        @replaces
        def step(self):
            self.opt.step()

    trainer = Own(DataLoaders(data()), F.mse_loss, optim.LBFGS, nn.Linear(1, 1), BasicTrainCB())
    with pytest.raises(TypeError, match="closure") as raised:
        trainer.fit(1, valid=False)
    assert "evaluates the loss several times" in raised.value.__notes__[0]


# What callbacks set and change


@pytest.mark.parametrize(
    "opt_func, message",
    [
        (lambda params, lr: None, "returned None"),
        (lambda params, lr: "sgd", "class str, which has no `step`"),
        (lambda params, lr: optim.SGD(nn.Linear(1, 1).parameters(), lr), "no parameter of `Linear`"),
    ],
)
def test_what_opt_func_makes_must_change_the_model(opt_func, message):
    t = trainer_with()
    t.opt_func = opt_func
    with pytest.raises((TypeError, ValueError), match=message):
        t.fit(1)


def test_an_optimizer_of_other_modules_of_the_run_is_fine():
    "The second net of a GAN, a loss with parameters, a head that a callback has, several optimizers"

    class HeadCB:
        def __init__(self):
            self.head = nn.Linear(1, 1)

        def before_fit(self, trainer): ...

    t, head = trainer_with(HeadCB()), HeadCB()
    t.critic, t.loss_func = nn.Linear(1, 1), nn.PReLU()
    for module in (t.critic, t.loss_func, t.HeadCB.head):
        t.opt_func = lambda params, lr, module=module: optim.SGD(module.parameters(), lr)
        t.fit(0)
    t.opt_func = lambda params, lr: [optim.SGD(params, lr), optim.SGD(head.head.parameters(), lr)]
    t.fit(0)


@pytest.mark.parametrize(
    "name, meant",
    [
        ("epochs", "Here it is `n_epochs`"),
        ("learning_rate", "Here it is `lr`"),
        ("callback", "Did you mean `callbacks`"),
    ],
)
def test_an_argument_called_as_elsewhere_is_answered_with_its_name_here(name, meant):
    with pytest.raises(TypeError, match=f"keyword `{name}`.*{meant}"):
        trainer_with().fit(**{name: 1})


@pytest.mark.parametrize(
    "event, name, value, message",
    [
        ("before_fit", "epochs", 5, r"Use `range\(5\)`"),
        ("before_epoch", "batches", 5, r"Use `range\(5\)`"),
        ("before_epoch", "dl", None, "set to None"),
        ("before_epoch", "batches", range(2, 5), "begins with its first batch"),
        ("before_batch", "dl", [], "in a batch, which has no effect"),
        ("after_batch", "batches", range(2), "in a batch, which has no effect"),
        ("before_fit", "dl", [], "before any pass has begun, which has no effect"),
    ],
)
def test_what_the_loop_could_not_walk_over_or_would_not_see_is_refused(event, name, value, message):
    cb = type("SetCB", (), {event: lambda self, trainer: setattr(trainer, name, value)})()
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message) as e:
        trainer_with(cb).fit(1)
    assert f"`SetCB.{event}`" in e.value.__notes__[0]


class Quiet(Trainer):
    def one_batch(self):
        self.model(self.batch[0])


@pytest.mark.filterwarnings("default")
def test_that_nothing_was_learnt_is_said_once_for_each_trainer():
    for _ in range(2):
        t = trainer_with(cls=Quiet)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            t.fit(3, valid=False)
        assert sum("update" in str(o.message) for o in caught) == 1


def test_a_handler_that_does_not_take_what_an_own_event_passes_on_is_told():
    class Asks(Trainer):
        events = "ask"

        def one_batch(self):
            self.run_callbacks("ask", question="why")

    t = trainer_with(SimpleNamespace(ask=lambda trainer: None), cls=Asks)
    with pytest.raises(TypeError, match="unexpected keyword") as error:
        t.fit(1)
    assert "passes question on to every callback" in error.value.__notes__[0]


def test_who_reads_what_a_run_on_the_side_does_not_write_is_told():
    class Asks(Trainer):
        events = "ask"

    t = trainer_with(SimpleNamespace(ask=lambda trainer: trainer.preds), cls=Asks)
    with pytest.raises(AttributeError, match="run on the side.*`order = Order.RECORD`"), t.side_run():
        t.run_callbacks("ask")


def test_an_event_of_another_library_beside_ours_is_warned_of():
    class Both:
        def after_batch(self, trainer):
            pass

        def on_batch_end(self, trainer):
            pass

    class Meant(Both):
        silent = "foreign_event"

    with pytest.warns(
        UserWarning, match="`Both.on_batch_end` is an event of other.*Here it is `after_batch`"
    ):
        check_callback(Both())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_callback(Meant())


def test_who_has_left_out_a_step_is_named_to_whoever_misses_its_result():
    class Leaves:
        def before_predict(self, trainer):
            raise CancelStepException("not this one")

    trainer = trainer_with(Leaves())
    with pytest.raises(AttributeError, match="`Leaves.before_predict` has left.*`CancelBatchException`"):
        trainer.fit(1)


def test_a_row_that_is_read_too_early_says_who_begins_it():
    class Early:
        order = Order.REPORT

        def cleanup_epoch(self, trainer):
            self.row = trainer.history[-1]

    with pytest.raises(IndexError, match="`MetricsCB.cleanup_epoch`, and cleanups run in reverse"):
        trainer_with(MetricsCB(show=False), Early()).fit(1)


def test_an_object_of_a_known_class_is_looked_at_itself_if_it_holds_what_could_be_an_event():
    "One check holds for all objects of a class of this library, but not for what somebody puts on them"
    trainer_with([MetricsCB(show=False)])
    for wrong in ("after_bach", "befor_epoch", "log"):
        recorder = MetricsCB(show=False)
        setattr(recorder, wrong, lambda: None)
        with pytest.raises((TypeError, ValueError), match=wrong):
            trainer_with([recorder])
    recorder = MetricsCB(show=False)
    recorder.order = "first"
    with pytest.raises(TypeError, match="order"):
        trainer_with([recorder])


def test_a_batch_by_hand_is_no_pass_to_measure():
    t = trainer_with(MetricsCB(show=False))
    t.fit(1)
    t.batch, t.batch_num = data(1)[0], 0
    with pytest.raises(
        RuntimeError, match="`MetricsCB` measures whole passes, and this batch belongs to none"
    ):
        t.one_batch()
    t.remove_callbacks(MetricsCB)
    t.one_batch()
    assert t.loss is not None


def test_a_batch_of_ones_own_that_trains_in_validation_says_what_is_missing():
    class TrainsAlways(Trainer):
        def one_batch(self):
            x, y = self.batch
            self.preds = self.model(x)
            self.loss = F.mse_loss(self.preds, y)
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()

    with pytest.raises(RuntimeError) as e:
        trainer_with(cls=TrainsAlways).fit(1)
    assert any("only `if self.training`" in note for note in e.value.__notes__)


def told_by(fit):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit()
    return [str(o.message) for o in told]


@pytest.mark.parametrize("event", ["before_fit", "before_epoch", "log"])
def test_a_model_that_comes_too_late_for_its_optimizer_is_named(event):
    def replace(trainer):
        if trainer.model.weight.shape == (1, 1):
            trainer.model = nn.Linear(1, 2)

    replace.__name__ = event
    trainer = trainer_with(replace)
    told = told_by(lambda: trainer.fit(3, valid=False))
    assert len([o for o in told if "2 are in no optimizer" in o]) == 1


def test_a_new_model_with_an_optimizer_or_with_the_same_parameters_is_fine():
    def log(trainer):
        trainer.model = nn.Linear(1, 1)
        trainer.opt = optim.SGD(trainer.model.parameters(), 0.1)

    def before_fit(trainer):
        trainer.model = nn.Sequential(trainer.model)

    assert not told_by(lambda: trainer_with(log).fit(3))
    assert not told_by(lambda: trainer_with(before_fit).fit(2))


def test_a_new_head_that_is_not_trained_is_named():
    def before_fit(trainer):
        trainer.model = nn.Sequential(trainer.model, nn.Linear(1, 1))

    (told,) = told_by(lambda: trainer_with(before_fit).fit(2))
    assert "of the 4 parameters of the new one that want gradients 2 are in no optimizer" in told


def smaller(trainer):
    trainer.dls = DataLoaders(data(1), data(2))


smaller.__name__ = "log"


def test_a_fit_that_is_shorter_than_a_schedule_was_told_says_so():
    (told,) = told_by(lambda: trainer_with(OneCycleSchedulerCB(), smaller).fit(3))
    assert "ended after 5 updates" in told and "would have 9" in told
    assert not told_by(lambda: trainer_with(smaller).fit(3)), "nobody has asked"


@pytest.mark.parametrize("cancel", [CancelBatchException, CancelStepException])
def test_a_fit_that_somebody_made_shorter_on_purpose_says_nothing(cancel):
    def before_step(trainer):
        if trainer.batch_num == 1:
            raise cancel

    def after_batch(trainer):
        if trainer.epoch == 2:
            trainer.request_stop("enough")

    for shorter in (before_step, after_batch, LimitCB(updates=4), NBatchCB(2)):
        assert not told_by(lambda: trainer_with(OneCycleSchedulerCB(), shorter).fit(3))


def test_parameters_that_were_not_to_be_trained_need_not_be_after_a_wrap():
    class WrapCB:
        def before_epoch(self, trainer):
            trainer.model = nn.Sequential(trainer.model)

        def cleanup_epoch(self, trainer):
            trainer.model = trainer.model[0]

    trainer = trainer_with(WrapCB())
    trainer.opt_func = lambda params, lr: optim.SGD(params[1:], lr)
    assert not told_by(lambda: trainer.fit(2))


@pytest.mark.parametrize("where", ["trainer", "callback"])
def test_an_optimizer_in_a_dict_or_of_a_callback_trains_a_new_model(where):
    class OwnCB:
        def before_fit(self, trainer):
            trainer.model = nn.Linear(1, 1)
            opt = optim.SGD(trainer.model.parameters(), 0.1)
            if where == "trainer":
                trainer.opts = dict(a=opt)
            else:
                self.own = opt

    assert not told_by(lambda: trainer_with(OwnCB()).fit(2))


def test_passes_by_hand_speak_of_no_fit():
    trainer = trainer_with()
    trainer.opt_func = None
    trainer.opt = optim.SGD([trainer.model.weight], 0.1)
    assert not told_by(lambda: trainer.one_epoch(True))


class SkipsOne(Trainer):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        if self.training and self.batch_num == 1:
            raise CancelBatchException
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")


def stream(n):
    for _ in range(n):
        yield data(1)[0]


class Stream:
    def __iter__(self):
        return stream(3)


@pytest.mark.parametrize("limit", [LimitCB(updates=100), NBatchCB(9)])
def test_caps_that_a_stream_does_not_reach_say_nothing_of_a_schedule(limit):
    trainer = trainer_with(OneCycleSchedulerCB(), limit)
    trainer.dls = DataLoaders(Stream(), data(2))
    assert not told_by(lambda: trainer.fit(3))


def test_a_batch_that_a_method_of_ones_own_leaves_out_says_nothing():
    assert not told_by(lambda: trainer_with(OneCycleSchedulerCB(), cls=SkipsOne).fit(2))


class Pair(tuple):
    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


def around_itself(preds):
    held = [preds]
    held.append(held)
    return held


@pytest.mark.parametrize(
    "pack", [lambda o: Pair(o, o), around_itself, lambda o: (o, "a"), lambda o: dict(o=o)]
)
def test_predictions_of_any_kind_survive_the_end_of_a_fit(pack):
    class Packing(nn.Linear):
        def forward(self, x):
            return pack(super().forward(x))

    trainer = trainer_with()
    trainer.model = Packing(1, 1)
    trainer.loss_func = lambda preds, y: F.mse_loss(preds["o"] if type(preds) is dict else preds[0], y)
    trainer.fit(1)
    assert type(trainer.preds) is type(pack(1))


def test_after_a_fit_nothing_holds_the_graph_of_its_last_batch():
    trainer = trainer_with()
    trainer.fit(1, valid=False)
    assert trainer.loss.grad_fn is None and not trainer.preds.requires_grad
    copied = copy.deepcopy(trainer)
    assert copied.loss == trainer.loss


_ARGUMENTS = "|t|t u|t u=1|t=1 u=2|*a|t *a|t u *a|* n|* n=1|t * n|t * n=1|t /|t / u|**k|t **k"


@pytest.mark.parametrize("is_method", [False, True])
@pytest.mark.parametrize("arguments", _ARGUMENTS.split("|"))
def test_a_handler_is_judged_as_python_would_judge_its_call(arguments, is_method):
    handler = eval(f"lambda {', '.join([*['self'] * is_method, *arguments.split()])}: 1")
    bound = MethodType(handler, "anything") if is_method else handler
    try:
        takes_one = bool(bound(None))
    except TypeError:
        takes_one = False
    assert _is_in_order(bound) == takes_one


# ---- what is told of trainers, lengths and limits


def own_batch(name="batch"):
    class Own(Trainer):
        @with_cbs(name, CancelBatchException)
        def one_batch(self):
            x, y = self.batch
            self.preds = self.model(x)
            self.loss = self.loss_func(self.preds, y)
            if self.training:
                self.run_callbacks("backward", "step", "zero_grad")

        backward, step = StepsAsMethods.backward, StepsAsMethods.step
        zero_grad = StepsAsMethods.zero_grad

    return Own


def trainer_of(cls, *callbacks):
    return cls(DataLoaders(data(4), data(2)), F.mse_loss, optim.SGD, nn.Linear(1, 1), list(callbacks))


@pytest.mark.parametrize("event", ["before_predict", "after_predict", "before_get_loss", "after_get_loss"])
def test_a_batch_of_ones_own_that_leaves_out_predict_or_loss_names_who_waits(event):
    waiting = SimpleNamespace(name="waiting", **{event: lambda trainer: None})
    told = told_by(lambda: trainer_of(own_batch(), waiting).fit(1))
    assert len(told) == 1 and f"`waiting.{event}` waits in vain" in told[0]
    assert not told_by(lambda: trainer_of(own_batch(), MetricsCB(show=False)).fit(1))


@pytest.mark.parametrize("name", ["bacth", "epoch"])
def test_a_batch_that_is_decorated_as_something_else_is_told(name):
    told = told_by(lambda: trainer_of(own_batch(name), MetricsCB(show=False)).fit(1))
    assert any("replaces the span of a batch" in o for o in told)


class SaysTen(list):
    def __len__(self):
        return 10


def shorter_from_the_second_epoch(trainer):
    if trainer.epoch:
        trainer.dl = data(2)


@pytest.mark.parametrize("how", ["range", "loader", "later", "len", "filter"])
def test_passes_that_are_shorter_than_was_said_are_told_of(how):
    "A schedule has planned for what the loader said"

    def before_epoch(trainer):
        if how == "range":
            trainer.batches = range(2)
        if how == "loader":
            trainer.dl = data(2)
        if how == "later":
            shorter_from_the_second_epoch(trainer)
        if how == "filter":
            trainer.batches = (b for i, b in enumerate(trainer.batches) if i % 2)

    train = SaysTen(data(3)) if how == "len" else data(4)
    trainer = trainer_with(OneCycleSchedulerCB(), before_epoch)
    trainer.dls = DataLoaders(train)
    told = told_by(lambda: trainer.fit(3, valid=False))
    assert sum("has not come to its end" in o for o in told) == 1


@pytest.mark.parametrize("n", [6, 6.0, np.int64(6), torch.tensor(6).numpy()[()]])
def test_a_limit_may_be_any_whole_number(n):
    trainer = trainer_with(SimpleNamespace(max_updates=n, log=lambda trainer: None), n=4)
    trainer.fit(3)
    assert trainer.total_updates == 6
    trainer.callbacks[-1].max_updates = float("inf")
    trainer.fit(3)
    assert trainer.total_updates == 12


@pytest.mark.parametrize("n", [6.5, "6", float("nan")])
def test_a_limit_that_is_no_whole_number_is_refused(n):
    trainer = trainer_with(SimpleNamespace(name="odd", max_updates=n, log=lambda trainer: None))
    with pytest.raises(TypeError, match="`odd.max_updates` is .*no number of updates"):
        trainer.fit(1, callbacks=OneCycleSchedulerCB())


@pytest.mark.parametrize("name", ["stop_training", "should_stop", "stop"])
def test_a_flag_that_stops_other_loops_is_told_once_when_the_fit_goes_on(name):
    def after_batch(trainer):
        setattr(trainer, name, True)

    trainer = trainer_with(after_batch)
    told = told_by(lambda: trainer.fit(4))
    assert [f"`trainer.{name}` is True" in o and "request_stop" in o for o in told] == [True]
    assert not told_by(lambda: trainer.fit(2))


def test_a_flag_that_somebody_reads_himself_is_not_told():
    class Stops(Trainer):
        should_stop = False

    def log(trainer):
        trainer.should_stop = trainer.stop_training = True
        trainer.request_stop("by itself")

    def own(trainer):
        trainer.should_stop = True

    assert not told_by(lambda: trainer_with(log).fit(4))
    own.__name__ = "after_batch"
    assert not told_by(lambda: trainer_with(own, cls=Stops).fit(3))


@pytest.mark.parametrize("loss_func", [optim.SGD, optim.SGD([torch.zeros(1, requires_grad=True)])])
def test_an_optimizer_in_the_place_of_the_loss_is_refused(loss_func):
    with pytest.raises(TypeError, match="`loss_func` is an optimizer.*The order is"):
        Trainer(DataLoaders(data(2)), loss_func, F.mse_loss, nn.Linear(1, 1), BasicTrainCB())


def test_a_flag_that_is_an_option_or_is_read_by_its_owner_is_not_told():
    class Option(Trainer):
        def subclassing_method(self, early_stop=True):
            self.early_stop = early_stop

    class Stops:
        def log(self, trainer):
            trainer.should_stop = trainer.epoch == 1

        def before_epoch(self, trainer):
            if getattr(trainer, "should_stop", False):
                trainer.request_stop("enough")

    assert not told_by(lambda: trainer_with(cls=Option).fit(3))
    assert not told_by(lambda: trainer_with(Stops()).fit(4))


class Waits:
    "Has the fit wait in its first batch until somebody lets it go on"

    def __init__(self):
        self.here, self.free = threading.Event(), threading.Event()

    def before_batch(self, trainer):
        self.here.set()
        self.free.wait(10)


@contextmanager
def fit_in_a_thread(trainer):
    thread = threading.Thread(target=trainer.fit, args=(1,), name="other")
    thread.start()
    assert trainer.Waits.here.wait(10)
    try:
        yield
    finally:
        trainer.Waits.free.set()
        thread.join()


def test_a_fit_beside_one_of_another_thread_says_that_they_disturb_each_other():
    first = trainer_with(Waits())
    with fit_in_a_thread(first):
        with pytest.warns(UserWarning, match="runs in the thread `other`.*disturb each other") as caught:
            trainer_with().fit(1)
        assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_with().fit(1)


class FitsInside:
    def log(self, trainer):
        trainer_with().fit(1)
        with trainer.side_run() as side:
            side.fit(1, train=False)


def test_fits_one_after_the_other_or_one_inside_the_other_are_told_nothing_of_threads():
    def fail(trainer):
        raise RuntimeError("no more")

    fail.__name__ = "before_batch"

    def failing():
        with pytest.raises(RuntimeError, match="no more"):
            trainer_with().fit(1, callbacks=[fail])

    with warnings.catch_warnings(record=True) as told, ThreadPoolExecutor(1, "mine") as threads:
        warnings.simplefilter("always")
        threads.submit(failing).result()  # Its thread lives on
        trainer_with(FitsInside()).fit(1)
    assert not [o for o in map(str, told) if "`mine" in o or "`MainThread" in o]  # Other tests have others


class Camel:
    def before_fit(self, trainer):
        pass

    def afterBatch(self, trainer):
        pass

    def zeroGrad(self, trainer):
        pass

    def beforeLong(self, trainer):
        "A name of its own"


class CamelTrainer(Trainer):
    def getLoss(self):
        pass


def test_an_event_with_capitals_is_refused():
    with pytest.raises(ValueError, match="Did you mean `after_batch`(.|\n)*Did you mean `zero_grad`") as told:
        Trainer([], F.mse_loss, optim.SGD, nn.Linear(1, 1), [BasicTrainCB(), Camel()])
    assert "beforeLong" not in str(told.value)
    with pytest.raises(ValueError, match="`CamelTrainer.getLoss` is not an event.*`get_loss`"):
        CamelTrainer([], F.mse_loss, optim.SGD, nn.Linear(1, 1), BasicTrainCB())


def callback_with(*names):
    return type("OwnCB", (), {name: lambda self, trainer: None for name in (*names, "before_step")})()


MISSPELT = {
    "Before_fit": "before_fit",
    "After_batch": "after_batch",
    "Log": "log",
    "bofore_batch": "before_batch",
    "atfer_epoch": "after_epoch",
}


@pytest.mark.parametrize("name", MISSPELT)
def test_an_event_with_a_slip_at_its_beginning_is_refused_beside_a_real_one(name):
    with pytest.raises(ValueError, match=f"`OwnCB.{name}` is not an event.*Did you mean `{MISSPELT[name]}`"):
        trainer_with(callback_with(name))


def test_an_event_behind_on_is_told_of_and_so_it_is_called_here():
    with pytest.warns(UserWarning, match="`OwnCB.on_after_batch` is an event of.*Here it is `after_batch`"):
        trainer_with(callback_with("on_after_batch"))


def test_helpers_of_ones_own_may_be_called_as_they_like():
    helpers = "alter_batch", "clean_batch", "clear_epoch", "bore", "border_step", "on_batch", "Logs", "Tell"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback = callback_with(*helpers)
        type(callback).Log = type("Log", (), {})  # A class
        trainer_with(callback)


class ForgetsToBeMade(Trainer):
    def __init__(self):
        self.mine = 1


def test_a_trainer_that_forgot_to_be_made_says_so():
    with pytest.raises(AttributeError, match=r"`super\(\).__init__\(dls"):
        ForgetsToBeMade().fit(1)


UNMADE = [MetricsCB, EvaluatorCB, EarlyStoppingCB, ProgressCB, OneCycleSchedulerCB]


@pytest.mark.parametrize("base", UNMADE, ids=lambda base: base.__name__)
def test_an_init_that_leaves_out_that_of_its_base_is_named(base):
    class Mine(base):
        def __init__(self):
            self.seen = []

    with pytest.raises(AttributeError) as caught:
        trainer_with(Mine()).fit(1)
    assert any(
        note.startswith("`Mine.__init__` does not call `super().__init__(...)`, so what `")
        for note in caught.value.__notes__
    )


def test_whoever_calls_it_and_misses_something_else_is_told_nothing_of_it():
    class Mine(MetricsCB):
        def __init__(self):
            super().__init__(show=False)

        def before_batch(self, trainer):
            self.seen.append(trainer.batch)

    class Bare(MetricsCB):
        def __init__(self):
            self.seen = []

        def before_fit(self, trainer):
            self.unseen.clear()

    for callback in (Mine(), Bare()):
        with pytest.raises(AttributeError, match="seen") as caught:
            trainer_with(callback).fit(1)
        first = caught.value.__notes__[0]
        assert first.startswith("raised by"), first


class Holds:
    "A model that is no module and holds some"

    def __init__(self, **parts):
        self.parts = parts

    def parameters(self):
        return [p for o in self.parts.values() for p in o.parameters()]

    def __call__(self, x):
        return self.parts["head"](self.parts["body"](x))


class Told(Holds):
    def train(self, mode=True):
        for part in self.parts.values():
            part.train(mode)


def of_dict(**parts):
    return parts


class DictCB(BasicTrainCB):
    def before_fit(self, trainer):
        model = trainer.model
        parts = list(model.values()) if isinstance(model, dict) else list(model)
        trainer.opt = optim.SGD([p for o in parts for p in o.parameters()], trainer.lr)

    def predict(self, trainer):
        model = trainer.model
        parts = model.values() if isinstance(model, dict) else model
        x = trainer.batch[0]
        for part in parts:
            x = part(x)
        trainer.preds = x


def validations_of(make, *cbs, layer=nn.BatchNorm1d, fit=True):
    "What is warned of while a model of two parts trains, validates, is evaluated and predicts"
    x = torch.randn(12, 4)
    dls = DataLoaders([(x, torch.zeros(12, 2))] * 2, [(x, torch.zeros(12, 2))])
    model = make(body=nn.Sequential(nn.Linear(4, 6), layer(6)), head=nn.Linear(6, 2))
    basic, opt_func = (BasicTrainCB(), optim.SGD) if callable(model) else (DictCB(), None)
    trainer = Trainer(dls, F.mse_loss, opt_func, model, [basic, MetricsCB(show=False), *cbs])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if fit:
            trainer.fit(2, lr=0.1)
        else:
            trainer.fit(1, lr=0.1, valid=False)
            trainer.get_preds()
    return [str(o.message) for o in caught]


@pytest.mark.parametrize("make", [of_dict, Holds, lambda **parts: list(parts.values())])
@pytest.mark.parametrize("fit", [True, False])
def test_layers_of_a_model_that_has_no_mode_are_named_when_they_validate_as_in_training(make, fit):
    kind = type(make(body=nn.ReLU(), head=nn.ReLU())).__name__
    (said,) = validations_of(make, fit=fit)
    assert f"`trainer.model` is a {kind}, which has no method `train`, so `BatchNorm1d`" in said


def test_models_whose_mode_is_set_are_not():
    class ModesCB:
        def before_epoch(self, trainer):
            for part in trainer.model.values():
                part.train(trainer.training)

    class BetweenCB:
        def before_epoch(self, trainer):
            for part in [] if trainer.training else trainer.model.values():
                part.eval()

        def after_epoch(self, trainer):
            for part in [] if trainer.training else trainer.model.values():
                part.train()

    assert not validations_of(of_dict, BetweenCB())
    assert not validations_of(of_dict, layer=lambda n: nn.BatchNorm1d(n, track_running_stats=False))
    assert not validations_of(of_dict, layer=lambda n: nn.Dropout(0.0))
    module = lambda **parts: nn.Sequential(*parts.values())
    assert not validations_of(module) and not validations_of(Told)
    assert not validations_of(of_dict, ModesCB())
    assert not validations_of(of_dict, layer=nn.LayerNorm) and not validations_of(Holds, layer=nn.LayerNorm)


def test_a_forgotten_loop_is_named():
    "Loss and optimizer are there, and nobody does a step: a fit of nothing was silent"
    dls, model = DataLoaders([(torch.zeros(2, 1), torch.zeros(2, 1))]), nn.Linear(1, 1)

    def said_of(callbacks, loss_func=F.mse_loss, opt_func=optim.SGD, kind=Trainer):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kind(dls, loss_func, opt_func, model, callbacks).fit(1, valid=False)
        return [str(o.message) for o in caught]

    class OwnEpoch(Trainer):
        def one_epoch(self, training):
            "Trains in a way of its own"

    class NamedCB:
        def after_batch(self, trainer):
            "May train"

    for callbacks in (DeviceCB("cpu"), [DeviceCB("cpu"), NBatchCB(1)]):
        (said,) = said_of(callbacks)
        assert "walks over its batches and trains nothing" in said and "Add `BasicTrainCB`" in said
    device = DeviceCB("cpu")
    assert not said_of([]) and not said_of(device, loss_func=None) and not said_of(device, opt_func=None)
    assert not said_of([device, SimpleNamespace(before_epoch=print)], loss_func=None)
    assert not said_of([device, NamedCB()]) and not said_of(device, kind=OwnEpoch)
