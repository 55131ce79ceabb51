"Callbacks that join and leave, of every kind and at any moment."

import signal
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from fastcore.foundation import L
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import BasicTrainCB, CancelBatchException, DataLoaders, MetricsCB, Trainer
from small import data, trainer_with


async def _later(trainer): ...


def test_an_interrupt_while_callbacks_come_leaves_none_of_them():
    t = trainer_with()
    extra, build = SimpleNamespace(name="extra", after_batch=lambda trainer: None), t.plan.build
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        build(*args, **kwargs)

    t.plan.build = interrupted
    with pytest.raises(KeyboardInterrupt):
        t.fit(1, callbacks=extra)
    t.plan.build = build
    assert extra not in t.callbacks and not hasattr(t, "extra")
    t.fit(1, callbacks=extra)


def test_an_alarm_at_any_moment_leaves_a_trainer_that_fits_again():
    "Real signals, each a little later; a callback that an interrupt leaves behind is gone at the next fit"
    armed = [False]

    def alarm(*args):
        if armed[0]:
            raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, alarm)
    t = trainer_with()
    try:
        for i in range(300):
            try:
                armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (i + 1))
                t.fit(1, callbacks=SimpleNamespace(name="extra", after_batch=lambda trainer: None))
                armed[0] = False
            except KeyboardInterrupt:
                armed[0] = False
            t.fit(0)
            assert len(t.callbacks) == len(t._named) == 1
            assert not t._fitting and torch.is_grad_enabled() and t.exception is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_a_newcomer_that_fails_does_not_stay():
    def before_fit(trainer):
        raise ValueError("no")

    bad = SimpleNamespace(name="bad", before_fit=before_fit)

    def after_batch(trainer):
        with pytest.raises(ValueError), trainer.added_callbacks(bad):
            pass
        with pytest.raises(ValueError, match="no"):
            trainer.add_callback(bad)

    t = trainer_with()
    t.fit(1, callbacks=after_batch)
    assert bad not in t.callbacks and not hasattr(t, "bad")


class CountsCB:
    "Counts how often a batch begins and is cleaned up, and does something at its beginning"

    def __init__(self, name, act=lambda trainer: None):
        self.name, self.act, self.begun, self.cleaned = name, act, 0, 0

    def before_batch(self, trainer):
        self.begun += 1
        self.act(trainer)

    def cleanup_batch(self, trainer):
        self.cleaned += 1


def test_who_was_brought_by_a_newcomer_is_cleaned_up_if_another_newcomer_cancels():
    def cancel(trainer):
        raise CancelBatchException("no")

    def begin(trainer):
        if trainer.batch_num == 0:
            trainer.add_callbacks([bringing, CountsCB("cancelling", cancel)])

    brought = CountsCB("brought")
    bringing = CountsCB("bringing", lambda trainer: trainer.add_callback(brought))
    t = trainer_with(CountsCB("first", begin))
    t.fit(1, valid=False)
    assert (bringing.begun, bringing.cleaned, brought.begun, brought.cleaned) == (1, 1, 1, 1)
    assert len(t.callbacks) == 2


def test_a_callback_that_is_deleted_in_a_fit_stays_away():
    t = trainer_with(MetricsCB())
    deletes = SimpleNamespace(
        name="deletes", after_fit=lambda trainer: trainer.remove_callback(MetricsCB, delete=True)
    )
    t.fit(1, callbacks=deletes)
    assert not hasattr(t, "MetricsCB") and not hasattr(t, "deletes") and len(t.callbacks) == 1


def test_a_callback_of_one_fit_gives_the_name_back_that_one_outside_the_loop_had():
    t = trainer_with(old := CountsCB("counts"))
    t.remove_callback(old)
    t.fit(1, callbacks=CountsCB("counts"))
    assert t.counts is old


def test_a_callback_of_one_fit_that_removes_or_renames_itself_leaves_no_name():
    class OnceCB:
        def after_batch(self, trainer):
            trainer.remove_callback(self)

    t = trainer_with()
    t.fit(1, callbacks=OnceCB())
    assert not hasattr(t, "OnceCB")
    t.add_callback(cb := OnceCB())
    cb.name = "another"
    t.remove_callback(cb, delete=True)
    assert not hasattr(t, "OnceCB") and not hasattr(t, "another")


def test_a_mock_can_be_a_callback():
    t = trainer_with(mock := Mock(spec=["after_batch"]))
    t.fit(1, valid=False)
    assert mock.after_batch.call_count == 3


@pytest.mark.shows("NEMO-07", "AIT-31")
def test_bound_methods_and_partials_are_functions():
    class Helper:
        def __init__(self):
            self.n = 0

        def after_batch(self, trainer):
            self.n += 1

    def after_epoch(seen, trainer):
        seen.append(trainer.training)

    helper, seen = Helper(), []
    trainer_with(helper.after_batch, partial(after_epoch, seen)).fit(1)
    assert (helper.n, seen) == (5, [True, False])


@pytest.mark.parametrize(
    "several",
    [
        lambda o: L(o),
        lambda o: {i: x for i, x in enumerate(o)}.values(),
        lambda o: [o[:1], [o[1:]]],
        lambda o: iter(o),
    ],
)
def test_callbacks_come_in_any_container(several):
    t = Trainer(
        DataLoaders(data()), F.mse_loss, optim.SGD, nn.Linear(1, 1), several([BasicTrainCB(), MetricsCB()])
    )
    assert [type(o) for o in t.callbacks] == [BasicTrainCB, MetricsCB]


def test_a_callback_can_be_removed_by_its_class():
    t = trainer_with(MetricsCB())
    t.remove_callback(MetricsCB)
    assert len(t.callbacks) == 1
    with pytest.raises(LookupError, match="`MetricsCB`"):
        t.remove_callback(MetricsCB)


def test_what_is_appended_to_the_list_is_checked_and_named_when_a_fit_begins():
    t = trainer_with()
    t.callbacks.append(MetricsCB())
    t.fit(1)
    assert t.MetricsCB in t.callbacks
    t.callbacks.append(MetricsCB)
    with pytest.raises(TypeError, match="only an object can be a callback"):
        t.fit(1)


class ComesCB:
    "Notes what it is told"

    def __init__(self, name="ComesCB", order=0):
        self.name, self.order, self.seen = name, order, []

    def before_fit(self, trainer):
        self.seen.append("fit")

    def before_batch(self, trainer):
        self.seen.append("batch")

    def before_predict(self, trainer):
        self.seen.append("predict")

    def after_backward(self, trainer):
        self.seen.append("backward")

    def cleanup_batch(self, trainer):
        self.seen.append("cleanup")


@pytest.mark.parametrize(
    "come",
    [
        lambda t, cb: t.callbacks.append(cb),
        lambda t, cb: t.callbacks.insert(0, cb),
        lambda t, cb: t.callbacks.extend([cb]),
        lambda t, cb: setattr(t, "callbacks", [*t.callbacks, cb]),
        lambda t, cb: t.callbacks.append(SimpleNamespace(callbacks=[cb])),
    ],
)
def test_a_callback_that_is_put_into_the_list_joins_from_the_next_step_on(come):
    "And is told of the spans that are open"
    cb = ComesCB()

    def after_predict(trainer):
        if trainer.batch_num == 1 and cb not in trainer.callbacks:
            come(trainer, cb)

    t = trainer_with()
    t.fit(1, valid=False, callbacks=after_predict)
    assert cb.seen == ["fit", "batch", "predict", "backward", "cleanup"] + [
        "batch",
        "predict",
        "backward",
        "cleanup",
    ]
    assert t.ComesCB is cb and cb in t.callbacks


@pytest.mark.parametrize(
    "go",
    [
        lambda t, cb: t.callbacks.remove(cb),
        lambda t, cb: t.callbacks.pop(),
        lambda t, cb: t.callbacks.__delitem__(-1),
        lambda t, cb: setattr(t, "callbacks", [o for o in t.callbacks if o is not cb]),
    ],
)
def test_a_callback_that_is_taken_from_the_list_leaves_with_its_cleanup(go):
    cb = ComesCB()

    def after_predict(trainer):
        if trainer.batch_num == 1 and cb in trainer.callbacks:
            go(trainer, cb)

    t = trainer_with(SimpleNamespace(name="first", after_predict=after_predict), cb)
    t.fit(1, valid=False)
    assert cb.seen == ["fit", "batch", "predict", "backward", "cleanup", "batch", "predict", "cleanup"]


def test_the_list_is_checked_when_it_changes_and_stays_as_it_was():
    def before_epoch(trainer):
        for wrong in (MetricsCB, trainer.BasicTrainCB, BasicTrainCB()):
            with pytest.raises((TypeError, ValueError)):
                trainer.callbacks.append(wrong)
            assert trainer.callbacks == before
        trainer.callbacks[0] = BasicTrainCB()

    t = trainer_with()
    t.add_callback(before_epoch)
    before = list(t.callbacks)
    t.fit(1, train=False)
    assert t.BasicTrainCB is not before[0] and t.callbacks[0] is t.BasicTrainCB
    t.callbacks += [t.BasicTrainCB]
    with pytest.raises(ValueError, match="was added already"):
        t.fit(1)


def test_an_interrupt_on_the_way_out_of_a_fit_leaves_the_trainer_free(monkeypatch):
    "Before the manager that makes ready and tidies up could tidy"
    import isaac_loop.loop.trainer as chapter

    one_fit = chapter.one_fit

    class Interrupted:
        def __init__(self, *args):
            self.manager = one_fit(*args)

        def __enter__(self):
            return self.manager.__enter__()

        def __exit__(self, *args):
            raise KeyboardInterrupt

    t = trainer_with()
    monkeypatch.setattr(chapter, "one_fit", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        t.fit(1)
    monkeypatch.undo()
    t.fit(1)
    assert t.n_updates == 3
