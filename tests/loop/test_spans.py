"""Spans × positions × outcomes, checked against a second, naive interpreter of the rules.

The rules: `before_x`, body, `after_x`, and always `cleanup_x` in reverse order; an exception ends the
innermost open span that it belongs to; an error beats a cancel, an outer cancel an inner one, the first a
later one. The interpreter below knows them as plain recursion over a table of ranks, and nothing of plans,
bound methods or reach.
"""

import itertools

import pytest

from isaac_loop.loop.events import (
    EVENTS,
    SPANS,
    STEPS,
    CancelBatchException,
    CancelEpochException,
    CancelException,
    CancelFitException,
    CancelStepException,
)
from isaac_loop.loop.spans import close_span
from isaac_loop.loop.trainer import Trainer

OWN_CANCEL = {
    "fit": CancelFitException,
    "epoch": CancelEpochException,
    "batch": CancelBatchException,
    **dict.fromkeys(STEPS, CancelStepException),
}
RANK = {CancelFitException: 1, CancelEpochException: 2, CancelBatchException: 3, CancelStepException: 4}
NAMES = ("first", "middle", "last")


class Loaders:
    train = valid = (0, 1)


class Model:
    training = True

    def train(self, mode):
        self.training = mode


IN_EVERY_RUN = [o for o in EVENTS if o != "measured"]  # That one waits for somebody who measures


def _handler(event):
    def handler(self, trainer):
        self.diary.append((event, self.name))
        error = self.raises.pop((event, self.name), None)
        if error is not None:
            raise error

    return handler


def recorder(name, diary, raises):
    """Answers every event: writes it down, and raises what the test has prepared for it, once.

    Each has a class of its own, since callbacks that share a step by inheritance are refused.
    """
    methods = {o: _handler(o) for o in EVENTS}
    return type("Recorder", (), dict(methods, name=name, diary=diary, raises=raises))()


class Expected:
    "The naive interpreter: what ought to be called, and what ought to come out"

    def __init__(self, raises):
        self.raises, self.diary, self.open = dict(raises), [], []

    def call(self, event, names=NAMES):
        for name in names:
            self.diary.append((event, name))
            error = self.raises.pop((event, name), None)
            if error is not None:
                raise error

    def rank(self, error):
        "0 for what nobody catches"
        return RANK.get(type(error), 0) if any(OWN_CANCEL[o] is type(error) for o in self.open) else 0

    def span(self, name, body):
        self.open.append(name)
        ended = None
        try:
            self.call(f"before_{name}")
            body()
            self.call(f"after_{name}")
        except BaseException as e:
            ended = e
        caught = type(ended) is OWN_CANCEL[name]
        winner, rank = ended, self.rank(ended) if ended is not None else 99
        self.open.pop()
        for o in reversed(NAMES):
            try:
                self.call(f"cleanup_{name}", [o])
            except BaseException as e:
                if self.rank(e) < rank:
                    winner, rank = e, self.rank(e)
        if winner is not None and not (winner is ended and caught):
            raise winner

    def step(self, name):
        self.span(name, lambda: self.call(name))

    def batch(self, training):
        for name in ("predict", "get_loss", *(("backward", "step", "zero_grad") if training else ())):
            self.step(name)

    def epoch(self, training):
        for _ in range(2):
            self.span("batch", lambda: self.batch(training))

    def fit(self):
        for training in (True, False):
            self.span("epoch", lambda: self.epoch(training))
        self.call("log")

    def run(self):
        "The diary and what came out"
        try:
            self.span("fit", self.fit)
        except BaseException as e:
            return self.diary, e
        return self.diary, None


def span_of(event):
    "The name of the span that `event` belongs to"
    return "fit" if event == "log" else event if event in STEPS else event.partition("_")[2]


def run(raises):
    "The real thing, and the same trainer a second time with nothing prepared"
    diary, pending = [], dict(raises)
    trainer = Trainer(Loaders(), None, None, Model(), None)
    error = None
    callbacks = [recorder(o, diary, pending) for o in NAMES]
    try:
        trainer.fit(1, callbacks=callbacks)
    except BaseException as e:
        error = e
    assert trainer.callbacks == [] and not any(o in dir(trainer) for o in NAMES), (
        "callbacks given to `fit` are gone"
    )
    assert trainer.exception is None and trainer.plan.spans == []
    first = list(diary)
    diary.clear()
    pending.clear()
    trainer.fit(1, callbacks=callbacks)
    assert diary == CLEAN, "after any failure the same trainer fits again"
    return first, error


CLEAN = Expected({}).run()[0]
OUTCOMES = [
    ValueError,
    KeyboardInterrupt,
    SystemExit,
    CancelStepException,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
]


@pytest.mark.shows("ISA-24 to ISA-29")
@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda o: o.__name__)
@pytest.mark.parametrize("event", IN_EVERY_RUN)
def test_right_things_run_in_the_right_order_and_the_right_error_comes_out(event, outcome):
    "Every event × position × outcome × none, one or two failing cleanups"
    cleanup = f"cleanup_{span_of(event)}"
    failures = itertools.product((1, 2), (RuntimeError, CancelFitException, CancelStepException))
    for position, (n_failing, other) in itertools.product(NAMES, [(0, None), *failures]):
        failing = [o for o in NAMES if (cleanup, o) != (event, position)][:n_failing]
        raises = {
            (event, position): outcome("prepared"),
            **{(cleanup, o): other(f"cleanup of {o}") for o in failing},
        }
        diary, error = run(raises)
        expected_diary, expected_error = Expected(raises).run()
        assert diary == expected_diary, (event, position, failing)
        assert error is expected_error, (event, position, failing)


@pytest.mark.shows("F012")
@pytest.mark.parametrize("event", IN_EVERY_RUN)
def test_an_error_keeps_type_and_text_and_says_whose_it_was(event):
    "The exception itself is unchanged; its note names callback, event, epoch and batch"
    prepared = ValueError("prepared")
    _, error = run({(event, "middle"): prepared})
    assert error is prepared and str(error) == "prepared" and error.args == ("prepared",)
    assert error.__notes__[0].startswith(f"raised by `middle.{event}`")
    if span_of(event) not in ("fit", "epoch"):
        assert error.__notes__[0].endswith("at epoch 0, batch 0 (training)")


@pytest.mark.parametrize(
    "cancel, expected",
    [
        (CancelStepException, [(o, i) for i in (0, 1) for o in STEPS]),
        (CancelBatchException, [("predict", 0), *((o, 1) for o in STEPS)]),
        (CancelEpochException, [("predict", 0)]),
        (CancelFitException, [("predict", 0)]),
    ],
)
def test_a_cancel_in_a_step_without_neighbours_ends_what_it_says(cancel, expected):
    "Where nobody answers the events around a step, it is run by a shorter way; what ends is the same"
    seen = []

    def step(name):
        def handler(self, trainer):
            seen.append((name, trainer.batch_num))
            if len(seen) == 1:
                raise cancel("prepared")

        return handler

    Trainer(Loaders(), None, None, Model(), type("BareCB", (), {o: step(o) for o in STEPS})()).fit(
        1, valid=False
    )
    assert seen == expected


@pytest.mark.parametrize("leaves", ["low", "middle", "high"])
def test_who_leaves_in_a_span_gets_its_cleanup_in_its_turn(leaves):
    "From the highest order down, wherever the one that leaves has stood"
    seen = []

    def cleaner(name, order):
        def cleanup_batch(trainer):
            seen.append(name)

        cleanup_batch.name, cleanup_batch.order = name, order
        return cleanup_batch

    def before_batch(trainer):
        if trainer.batch_num == 0:
            trainer.remove_callback(leaves)

    Trainer(
        Loaders(),
        None,
        None,
        Model(),
        [cleaner("middle", 2), cleaner("high", 3), cleaner("low", 1), before_batch],
    ).fit(1, valid=False)
    everybody = ["high", "middle", "low"]
    assert seen == everybody + [o for o in everybody if o != leaves]


def test_the_losers_become_notes_on_the_winner():
    raises = {
        ("before_batch", "first"): ValueError("the first thing"),
        ("cleanup_batch", "middle"): RuntimeError("another"),
        ("cleanup_batch", "last"): KeyError("a third"),
    }
    _, error = run(raises)
    assert isinstance(error, ValueError)
    notes = "\n".join(error.__notes__)
    assert "besides: RuntimeError: another" in notes and "besides: KeyError: 'a third'" in notes
    assert "raised by `middle.cleanup_batch`" in notes


def test_an_error_in_a_cleanup_beats_the_cancel_that_ended_the_span():
    raises = {
        ("before_batch", "first"): CancelBatchException("skip"),
        ("cleanup_batch", "middle"): RuntimeError("worse"),
    }
    _, error = run(raises)
    assert isinstance(error, RuntimeError) and any(
        "besides: CancelBatchException: skip" in o for o in error.__notes__
    )


@pytest.mark.shows("ISA-27", "ISA-30")
@pytest.mark.parametrize(
    "event, cancel",
    [
        ("before_epoch", CancelBatchException),
        ("before_fit", CancelEpochException),
        ("log", CancelStepException),
        ("cleanup_batch", CancelBatchException),
        ("cleanup_fit", CancelFitException),
        ("before_batch", CancelStepException),
    ],
)
def test_a_cancel_for_which_nothing_is_open_is_an_error_that_says_so(event, cancel):
    _, error = run({(event, "first"): cancel("too early")})
    assert type(error) is cancel
    assert any("was not open here" in o for o in error.__notes__)


def test_cleanups_know_how_their_span_ended():
    "`trainer.exception` is None, the cancel or the error; it is None again for outer spans that ended well"
    seen = []

    class LookCB:
        def before_batch(self, trainer):
            assert trainer.exception is None  # The next span knows nothing of how the last one ended
            if trainer.batch_num == 0:
                raise CancelBatchException("skip")

        def cleanup_batch(self, trainer):
            seen.append(("batch", type(trainer.exception)))

        def cleanup_epoch(self, trainer):
            seen.append(("epoch", type(trainer.exception)))

        def cleanup_fit(self, trainer):
            seen.append(("fit", type(trainer.exception)))

    Trainer(Loaders(), None, None, Model(), LookCB()).fit(1, valid=False)
    assert seen == [
        ("batch", CancelBatchException),
        ("batch", type(None)),
        ("epoch", type(None)),
        ("fit", type(None)),
    ]


def test_no_exception_is_kept_alive_by_the_trainer():
    import gc
    import weakref

    class Big:
        pass

    class FailCB:
        def before_batch(self, trainer):
            trainer.big = Big()
            refs.append(weakref.ref(trainer.big))
            del trainer.big
            here = Big()
            refs.append(weakref.ref(here))
            raise ValueError

        def cleanup_batch(self, trainer):
            raise RuntimeError

    refs = []
    trainer = Trainer(Loaders(), None, None, Model(), FailCB())
    gc.disable()
    try:
        try:
            trainer.fit(1)
        except ValueError:
            pass
        assert all(o() is None for o in refs), "frames of the failed fit are held by a reference cycle"
    finally:
        gc.enable()


@pytest.mark.shows("F006")
def test_own_spans_and_events_of_a_subclass():
    "Four new events for a wrapped method, one for a declared name, with extra arguments"
    from isaac_loop.loop.spans import with_cbs

    seen = []

    class Verified(Trainer):
        events = ("checked",)

        @with_cbs("verify", LookupError)
        def verify(self, limit):
            seen.append("body")
            self.run_callbacks("checked", limit=limit)
            if limit < 0:
                raise LookupError
            return limit

        def one_batch(self):
            self.verify(self.batch)

    class VerifyCB:
        def before_verify(self, trainer):
            seen.append("before_verify")

        def checked(self, trainer, limit):
            seen.append(limit)

        def verify(self, trainer):
            seen.append("verify")

        def after_verify(self, trainer):
            seen.append("after_verify")

        def cleanup_verify(self, trainer):
            seen.append("cleanup_verify")

    trainer = Verified(Loaders(), None, None, Model(), VerifyCB())
    assert trainer.verify(3) == 3
    assert seen == ["before_verify", "body", 3, "verify", "after_verify", "cleanup_verify"]
    seen.clear()
    assert trainer.verify(-1) is None
    assert seen == ["before_verify", "body", -1, "cleanup_verify"]
    seen.clear()
    trainer.run_callbacks("verify", limit=2)
    assert seen == ["before_verify", "body", 2, "verify", "after_verify", "cleanup_verify"]
    with pytest.raises(ValueError, match="not an event"):
        Trainer(Loaders(), None, None, Model(), VerifyCB())


def test_stopping_is_not_cancelling():
    "`request_stop`: this pass ends after its batch, then everything closes as usual"
    seen = []

    class Stop:
        def after_batch(self, trainer):
            seen.append((trainer.epoch, trainer.training, trainer.batch_num))
            if trainer.epoch == 1 and trainer.training:
                trainer.request_stop("enough")

        def after_epoch(self, trainer):
            seen.append(("after_epoch", trainer.training))

        def log(self, trainer):
            seen.append("log")

        def after_fit(self, trainer):
            seen.append("after_fit")

    trainer = Trainer(Loaders(), None, None, Model(), Stop())
    trainer.fit(5)
    whole = [
        (0, True, 0),
        (0, True, 1),
        ("after_epoch", True),
        (0, False, 0),
        (0, False, 1),
        ("after_epoch", False),
        "log",
    ]
    assert seen == [
        *whole,
        (1, True, 0),
        ("after_epoch", True),
        (1, False, 0),
        (1, False, 1),
        ("after_epoch", False),
        "log",
        "after_fit",
    ]
    assert trainer.stop_reason == "enough"
    seen.clear()
    trainer.fit(1)
    assert seen == [*whole, "after_fit"] and trainer.stop_reason is None


@pytest.mark.parametrize("event, n_epochs_begun", [("before_fit", 0), ("before_epoch", 1), ("log", 1)])
def test_stop_may_be_requested_at_any_event(event, n_epochs_begun):
    from types import SimpleNamespace

    begun, ended = [], []
    watch = SimpleNamespace(
        name="watch", before_epoch=lambda t: begun.append(t.epoch), after_fit=lambda t: ended.append(True)
    )
    Trainer(
        Loaders(), None, None, Model(), [watch, SimpleNamespace(**{event: lambda t: t.request_stop("now")})]
    ).fit(3, valid=False)
    assert len(begun) == n_epochs_begun and ended == [True]


@pytest.mark.parametrize("n_epochs", [0, 1, 3])
def test_fit_runs_its_frame_for_any_number_of_epochs(n_epochs):
    diary = []
    Trainer(Loaders(), None, None, Model(), recorder("only", diary, {})).fit(n_epochs)
    events = [o for o, _ in diary]
    assert events[0] == "before_fit" and events[-2:] == ["after_fit", "cleanup_fit"]
    assert events.count("log") == n_epochs and events.count("before_epoch") == 2 * n_epochs


def test_updates_are_counted_between_step_and_after_step():
    "n_updates counts what really happened: not a cancelled step, and not steps that nobody does"
    seen = []

    class StepCB:
        def step(self, trainer):
            seen.append(("step", trainer.n_updates))

        def after_step(self, trainer):
            seen.append(("after_step", trainer.n_updates))

    class SkipSecond:
        def before_step(self, trainer):
            if trainer.batch_num == 1:
                raise CancelStepException

    class BackwardCB:
        def backward(self, trainer):
            pass

    with pytest.warns(UserWarning, match="No callback does"):
        Trainer(Loaders(), None, None, Model(), [StepCB(), SkipSecond()]).fit(2, valid=False)
    assert seen == [("step", 0), ("after_step", 1), ("step", 1), ("after_step", 2)]
    with pytest.warns(UserWarning, match="No callback does"):
        (trainer := Trainer(Loaders(), None, None, Model(), BackwardCB())).fit(1, valid=False)
    assert trainer.n_updates == 0


@pytest.mark.shows("ISA-23")
def test_all_cancels_are_cancel_exceptions():
    assert all(issubclass(o, CancelException) for o in OWN_CANCEL.values())


def test_a_step_may_be_given_arguments_and_counts_as_an_update():
    "An optimizer that wants a closure"

    class ClosureCB:
        def step(self, trainer, closure=None):
            self.seen = closure

    class Closing(Trainer):
        def one_batch(self):
            self.run_callbacks("step", closure=self.batch)

    trainer = Closing(Loaders(), None, None, Model(), cb := ClosureCB())
    trainer.fit(1, valid=False)
    assert (cb.seen, trainer.n_updates) == (1, 2)


def test_what_a_leaver_is_owed_in_a_span_that_an_interrupt_skipped_does_not_come_later():
    "It was kept for a step; the next step of another batch is not the one it left"
    trainer = Trainer(Loaders(), None, None, Model(), None)
    plan, cleaned = trainer.plan, []
    plan.spans = [SPANS["fit"], SPANS["epoch"], SPANS["batch"], SPANS["step"]]
    plan.leaving = {3: [(object(), cleaned.append)]}
    close_span(trainer, SPANS["batch"])
    plan.spans += [SPANS["batch"], SPANS["step"]]
    close_span(trainer, SPANS["step"])
    assert (cleaned, plan.leaving) == ([], {})
