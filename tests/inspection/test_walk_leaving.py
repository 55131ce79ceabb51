"""Leaving a walk, at every moment, against a fit in which a `CancelFitException` is raised at that place.

The same cleanups run, in the same order, the same errors come out, and the trainer trains on.
"""

import gc
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import runs
from isaac_loop.all import (
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    Trainer,
    with_cbs,
)
from isaac_loop.inspection.moments import OPENINGS
from isaac_loop.inspection.watched_calls import Call, changed_plan
from isaac_loop.loop.events import EVENTS
from isaac_loop.loop.handlers import TrainersOwn
from small import data, trainer_with


class NotesAll:
    "Notes each event that comes, and how the span ended where one is cleaned up"

    def __init__(self, name, order, seen, events=EVENTS):
        self.name, self.order, self.seen = name, order, seen
        for event in events:
            setattr(self, event, self._noting(event))

    def _noting(self, event):
        def note(trainer):
            how = type(trainer.exception).__name__ if event.startswith("cleanup_") else ""
            self.seen.append((self.name, event, how))

        return note


class Phases(Trainer):
    "Each batch twice, in a span of its own"

    @with_cbs("phase", CancelEpochException)
    def phase(self):
        super().one_batch()

    def one_batch(self):
        self.phase()


class TwoFits(Trainer):
    "A `fit` that trains twice"

    def fit(self, n_epochs=1, lr=0.1, **kwargs):
        super().fit(n_epochs, lr, **kwargs)
        super().fit(n_epochs, lr, **kwargs)


def few_events():
    return [o for o in EVENTS if not o.endswith(("get_loss", "zero_grad")) or o in ("get_loss", "zero_grad")]


def noted(cls=Trainer):
    seen = []
    torch.manual_seed(0)
    extra = [f"{kind}phase" for kind in ("before_", "", "after_", "cleanup_")] if cls is Phases else []
    cbs = [
        NotesAll("a", 5, seen, [*few_events(), *extra]),
        NotesAll("b", -5, seen, ["before_epoch", "cleanup_epoch"]),
    ]
    return trainer_with(*cbs, n=2, cls=cls), seen


def cancelled_after(trainer, n, **kwargs):
    "Fit, and raise a `CancelFitException` after the `n`-th call, counting the loop where it opens a span"
    count, leave = [0], []

    def counted(call, trainer, run):
        if leave and call.event.startswith("before_"):
            raise leave[0]
        run()
        if leave:
            return
        count[0] += 1
        if count[0] == n and any(o.name == "fit" for o in trainer.plan.spans):
            leave.append(CancelFitException("the walk was left"))
            raise leave[0]

    class Nothing(TrainersOwn):
        def __init__(self):
            super().__init__(object)
            self.name = "the loop"

    def change(event, pairs):
        found = [(cb, Call(event, cb, handler, counted)) for cb, handler in pairs]
        loop = (Nothing(), Call(event, None, lambda trainer: None, counted))
        return [loop, *found] if event in OPENINGS else found

    with changed_plan(trainer, change):
        trainer.fit(1, 0.1, **kwargs)


def left(how, trainer, n, **kwargs):
    "Walk, and leave at the `n`-th moment"
    if how == "close":
        walk = trainer.walk(1, 0.1, **kwargs)
        for _ in range(n):
            next(walk)
        walk.close()
    elif how == "break":
        for moment in trainer.walk(1, 0.1, **kwargs):
            if moment.number == n - 1:
                break
    elif how == "error":
        with pytest.raises(runs.Cut):
            for moment in trainer.walk(1, 0.1, **kwargs):
                if moment.number == n - 1:
                    raise runs.Cut
    else:
        with trainer.walk(1, 0.1, **kwargs) as walk:
            walk.take(n)


@pytest.mark.parametrize("cls", [Trainer, Phases])
def test_leaving_at_any_moment_is_a_cancel_there(cls):
    trainer, _ = noted(cls)
    total = len(list(trainer.walk(1, 0.1)))
    assert total > 80
    for n in range(1, total + 1, 1 if cls is Trainer else 3):
        expected, seen = noted(cls)
        cancelled_after(expected, n)
        trainer, walked = noted(cls)
        left(("close", "break", "error", "with")[n % 4], trainer, n)
        assert walked == seen, n
        assert trainer.plan.changes == () and trainer.exception is None and not trainer.plan.spans
        if n % 10 == 1:
            for o in (expected, trainer):
                o.fit(1, 0.1)
            assert walked == seen
            runs.same(expected, trainer)


def test_every_open_span_is_cleaned_up_once_and_the_innermost_first():
    trainer, _ = noted()
    total = len(list(trainer.walk(1, 0.1)))
    for n in range(1, total):
        trainer, seen = noted()
        left("close", trainer, n)
        open_spans = []
        for name, event, _ in seen:
            kind, _, span = event.partition("_")
            if name == "a" and kind == "before":
                open_spans.append(span)
            if name == "a" and kind == "cleanup":
                if span in open_spans:  # Or else the walk was left before `a` was told of it
                    assert open_spans.pop() == span
        assert open_spans == [], n


def test_a_fit_that_trains_twice_is_left_altogether():
    trainer, seen = noted(TwoFits)
    walk = trainer.walk(1)
    walk.to("before_epoch")
    walk.close()
    assert [o for o in seen if o[1] in ("before_fit", "cleanup_fit", "predict") and o[0] == "a"] == [
        ("a", "before_fit", ""),
        ("a", "cleanup_fit", "CancelFitException"),
        ("a", "cleanup_fit", "CancelFitException"),
    ]


def test_an_error_of_the_loop_comes_out_of_the_for_and_says_where():
    class Fails:
        def after_step(self, trainer):
            if trainer.n_updates == 2:
                raise runs.Cut("pulled")

    trainer, seen = noted()
    with pytest.raises(runs.Cut, match="pulled") as caught:
        for _ in trainer.walk(1, 0.1, callbacks=Fails()):
            pass
    assert caught.value.__notes__ == ["raised by `Fails.after_step` at epoch 0, batch 1 (training)"]
    assert ("a", "cleanup_fit", "Cut") in seen
    trainer.fit(1)


def test_an_error_in_a_cleanup_comes_out_of_close_and_of_with():
    cb = SimpleNamespace(cleanup_batch=lambda trainer: 1 / 0, name="divides")
    for leave in ("close", "with"):
        with pytest.raises(ZeroDivisionError):
            left(leave, trainer_with(cb), 4)


def test_an_error_in_a_cleanup_that_nobody_waits_for_is_printed(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    monkeypatch.setattr(sys, "excepthook", lambda *args: told.append(args))
    trainer = trainer_with(SimpleNamespace(cleanup_batch=lambda trainer: 1 / 0, name="divides"))
    left("break", trainer, 4)
    assert len(told) == 1 and "ZeroDivisionError" in repr(told)
    told.clear()
    assert trainer.plan.changes == () and not trainer._fitting


def test_a_stop_iteration_of_the_loop_does_not_end_the_for_in_silence():
    def predict(trainer):
        raise StopIteration("by mistake")

    with pytest.raises(RuntimeError, match="The loop raised `StopIteration`"):
        list(trainer_with(predict).walk(1))


def test_throw_is_what_a_callback_would_raise():
    trainer, seen = noted()
    walk = trainer.walk(1, 0.1)
    walk.to("a.before_backward")
    assert walk.throw(CancelStepException("no gradient")).event == "cleanup_backward"
    walk.to("a.predict")
    assert walk.throw(CancelBatchException("skip")).event == "cleanup_predict"
    walk.to("a.before_batch")
    assert walk.throw(ValueError("mine")).event == "cleanup_batch"  # The cleanups are walked through as well
    with pytest.raises(ValueError, match="mine") as caught:
        list(walk)
    assert "a.before_batch" in caught.value.__notes__[0]
    assert walk.over and next(walk, None) is None and ("a", "cleanup_fit", "ValueError") in seen
    with pytest.raises(ValueError, match="mine"):
        walk.throw(ValueError("mine"))
    trainer.fit(1)


def test_a_walk_behaves_as_a_generator_does():
    trainer, seen = noted()
    walk = trainer.walk(1)
    assert iter(walk) is walk and seen == [] and "not begun" in repr(walk)
    walk.close()
    assert next(walk, None) is None and seen == []
    walk = trainer.walk(1)
    for _ in walk:
        break
    assert not walk.over and "paused" in repr(walk)
    for moment in walk:  # It has a name, so it goes on
        if moment.event == "step":
            break
    walk.close()
    walk.close()
    assert walk.over and list(walk) == [] and "over" in repr(walk)


def test_a_callback_cannot_tell_its_own_loop_to_go_on():
    holder = SimpleNamespace(name="eager")
    holder.predict = lambda trainer: next(holder.walk)
    trainer = trainer_with(holder)
    holder.walk = trainer.walk(1)
    with pytest.raises(ValueError, match="running already"):
        holder.walk.to("log")
    assert trainer.plan.changes == ()


def test_a_fit_or_another_walk_of_the_same_trainer_is_refused_at_a_pause():
    trainer, seen = noted()
    walk = trainer.walk(1)
    walk.to("a.predict")
    for begin in (lambda: trainer.fit(1), lambda: next(trainer.walk(1))):
        with pytest.raises(RuntimeError, match="a walk of this trainer that is paused"):
            begin()
    assert next(walk).event == "after_predict"
    walk.close()
    assert trainer.plan.changes == ()


def test_walks_of_two_trainers_go_on_in_turn():
    (one, _), (two, _) = noted(), noted()
    for pair in zip(one.walk(1, 0.1), two.walk(1, 0.1)):
        assert len({(o.event, o.name) for o in pair}) == 1
    expected, _ = noted()
    expected.fit(1, 0.1)
    runs.same(expected, one)
    runs.same(expected, two)


def test_a_walk_in_the_body_of_a_walk_and_in_a_callback_of_one():
    (one, _), (two, _), (three, _) = noted(), noted(), noted()
    inner = []

    def after_step(trainer):
        inner.append(len(list(three.walk(1, at="after_batch"))))

    for _ in one.walk(1, 0.1, callbacks=after_step, at="cleanup_batch"):
        inner.append(sum(1 for _ in two.walk(1, 0.1, at="step")))
    assert inner == [4, 2, 4, 2, 2, 2]  # The callback's, and then the body's; validation has no step
    expected, _ = noted()
    expected.fit(1, 0.1)
    runs.same(expected, one)


def test_a_walk_left_inside_a_callback_of_another_walk():
    (one, _), (two, seen) = noted(), noted()

    def after_predict(trainer):
        for moment in two.walk(1):
            if moment.event == "predict":
                break

    moments = list(one.walk(1, callbacks=after_predict))
    assert moments[-1].event == "cleanup_fit"
    assert seen.count(("a", "cleanup_fit", "CancelFitException")) == 4


def in_thread(function):
    "What `function` gives in another thread, or the error it raises there"
    found = []

    def run():
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    return found[0]


def test_another_thread_can_neither_go_on_nor_leave():
    trainer, seen = noted()
    walk = trainer.walk(1)
    next(walk)
    for use in (lambda: next(walk), walk.close):
        error = in_thread(use)
        assert isinstance(error, RuntimeError) and "waits in the thread `MainThread`" in str(error)
    walk.close()
    assert seen[-1] == ("a", "cleanup_fit", "CancelFitException")


def test_a_whole_walk_in_another_thread():
    trainer, _ = noted()
    assert in_thread(lambda: len(list(trainer.walk(1, at="after_batch")))) == 4
    trainer.fit(1)


def test_a_walk_dropped_in_another_thread_is_left_when_its_own_walks_again():
    trainer, seen = noted()
    held = [trainer.walk(1)]
    next(held[0])
    with pytest.warns(UserWarning, match="dropped in another thread than `MainThread`"):
        assert in_thread(held.clear) is None
    assert "cleanup_fit" not in str(seen)
    list(noted()[0].walk(1, at="log"))
    assert seen[-1] == ("a", "cleanup_fit", "CancelFitException")
    trainer.fit(1)


def test_a_walk_whose_thread_has_ended_says_so():
    trainer, seen = noted()
    walk = trainer.walk(1)
    in_thread(walk.__next__)
    with pytest.raises(RuntimeError, match="That thread has ended"):
        walk.close()
    with pytest.warns(UserWarning, match="after the thread `other` had ended"):
        del walk
        gc.collect()


SCRIPT = """
import signal
from small import trainer_with
from isaac_loop.all import InterruptCB

class Tells:
    def cleanup_batch(self, trainer): print('batch', type(trainer.exception).__name__)
    def cleanup_fit(self, trainer): print('fit', type(trainer.exception).__name__)

signal.signal(signal.SIGINT, signal.default_int_handler) # Of a process in the background it is ignored
trainer = trainer_with(Tells(), InterruptCB())
mine = signal.getsignal(signal.SIGINT)
try:
    for moment in trainer.walk(1):
        if moment.event == 'backward':
            assert signal.getsignal(signal.SIGINT) is mine
            signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt: print('mine')
assert signal.getsignal(signal.SIGINT) is mine

def after_step(trainer): signal.raise_signal(signal.SIGINT)
try:
    for moment in trainer.walk(1, callbacks=after_step): last = moment
except KeyboardInterrupt as error: print(str(error)[:30], '-', last.event)
assert signal.getsignal(signal.SIGINT) is mine

walk = trainer.walk(1)
print(walk.to('predict').event)
"""


def test_ctrl_c_is_for_whose_turn_it_is_and_the_end_of_python_leaves_a_walk():
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=runs.__file__.rpartition("/")[0]
    )
    assert found.stderr == ""
    assert found.stdout.split("\n") == [
        "batch CancelFitException",
        "fit CancelFitException",
        "mine",
        "batch NoneType",
        "fit KeyboardInterrupt",
        "Ctrl-C: training stopped after - cleanup_fit",
        "predict",
        "batch CancelFitException",
        "fit CancelFitException",
        "",
    ]


def test_an_interrupt_in_the_loop_is_one_of_the_loop():
    trainer, seen = noted()

    def step(trainer):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(trainer.walk(1, callbacks=step))
    assert seen[-1] == ("a", "cleanup_fit", "KeyboardInterrupt")
    trainer.fit(1)


def test_no_data_is_lost_to_a_walk_that_is_left():
    "A loader is asked for as many batches as were trained on"
    given = []

    class Loader(list):
        def __iter__(self):
            for o in data(4):
                given.append(1)
                yield o

    trainer = trainer_with()
    trainer.dls.train = Loader(range(4))
    walk = trainer.walk(1, at="after_batch")
    walk.take(2)
    walk.close()
    assert len(given) == 2
