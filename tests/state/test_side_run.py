"""`Trainer.side_run`, at every event and in every kind of trouble.

Lending the trainer to another run leaves the loop where it was: a fit with looks at the validation set in
between gives the same weights, the same history and the same random numbers, bit for bit, as the fit
without. What happens inside, a cancel, an error, a request to stop, ends what happens inside.
"""

import collections
import copy
import functools
import gc
import pickle
import random
import sys
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observing import bits, observe, random_states, unchanged
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from isaac_loop.all import (
    BasicTrainCB,
    CancelBatchException,
    CancelEpochException,
    CancelException,
    CancelFitException,
    CancelStepException,
    DataLoaders,
    DeviceCB,
    EvaluatorCB,
    LRFinderCB,
    MetricsCB,
    MomentumTrainCB,
    NBatchCB,
    Order,
    ProgressCB,
    TrackingCB,
    Trainer,
    set_seed,
    with_cbs,
)
from isaac_loop.loop.events import EVENTS

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(20, 4, generator=G), torch.randint(0, 3, (20,), generator=G)
INNER = [o for o in EVENTS if o not in ("before_fit", "measured", "log", "after_fit", "cleanup_fit")]


SGD = functools.partial(optim.SGD, momentum=0.9)


def make_model():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))


def make_trainer(
    callbacks=(), shuffle=False, cls=Trainer, steps=None, generator=None, opt_func=SGD, **kwargs
):
    set_seed(0)
    rows = TensorDataset(X, Y)
    dls = DataLoaders(
        DataLoader(rows, 8, shuffle=shuffle, generator=generator),
        DataLoader(rows, 10, shuffle=shuffle, generator=generator),
    )
    return cls(dls, F.cross_entropy, opt_func, make_model(), [steps or BasicTrainCB(), *callbacks], **kwargs)


def function(name, action, order=Order.DECIDE):
    "A callback that does `action` at the event `name`"
    cb = type("DoCB", (), {"order": order, "__init__": lambda self: None})()
    setattr(cb, name, action)
    return cb


def validate(trainer, *callbacks, **kwargs):
    with trainer.side_run(callbacks, **kwargs) as side:
        side.fit(1, train=False)


class MeasureCB:
    "Measures something after each training batch"

    order = Order.RECORD

    def after_batch(self, trainer):
        if trainer.training:
            trainer.write_measured(score=trainer.batch_num)


class CountCB:
    order = Order.REPORT

    def __init__(self, name="CountCB"):
        self.name, self.n = name, 0

    def after_batch(self, trainer):
        self.n += 1


def outcome(trainer, n_epochs=2, **kwargs):
    "All that a fit leaves behind"
    trainer.fit(n_epochs, lr=0.05, **kwargs)
    rows = [{k: v for k, v in o.items() if k != "elapsed"} for o in trainer.history]
    state = [bits(v) for s in trainer.opt.state.values() for v in s.values() if torch.is_tensor(v)]
    return (
        [bits(o) for o in trainer.model.state_dict().values()],
        state,
        rows,
        list(trainer.history.batches),
        trainer.n_updates,
        random_states(),
    )


# The law


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("event", EVENTS)
def test_validating_on_the_side_at_any_event_changes_nothing(event, shuffle):
    "Weights, optimizer, history and random numbers are those of the fit without"
    looks = CountCB()
    plain = outcome(make_trainer([MetricsCB(), MeasureCB()], shuffle))
    assert (
        outcome(
            make_trainer([MetricsCB(), MeasureCB(), function(event, lambda t: validate(t, looks))], shuffle)
        )
        == plain
    )
    assert looks.n > 0 and looks.n % 2 == 0


@settings(max_examples=15, deadline=None)
@given(
    events=st.lists(st.sampled_from(EVENTS), min_size=1, max_size=3, unique=True),
    steps=st.sampled_from([BasicTrainCB, MomentumTrainCB]),
    depth=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_any_side_runs_change_nothing(events, steps, depth, seed):
    def look(trainer, depth=depth):
        with trainer.side_run() as side:
            side.fit(1, train=False)
            if depth > 1:
                look(side, depth - 1)

    results = []
    for with_looks in (False, True):
        cbs = [function(o, look) for o in events] if with_looks else []
        for i, cb in enumerate(cbs):
            cb.name = f"look{i}"
        trainer = make_trainer(
            [MetricsCB(), DeviceCB("cpu"), ProgressCB("plain"), *cbs], shuffle=True, steps=steps()
        )
        set_seed(seed)
        results.append(outcome(trainer))
    assert results[0] == results[1]


def test_a_generator_that_both_loaders_share_goes_on_where_it_was():
    plain = outcome(make_trainer(shuffle=True, generator=torch.Generator().manual_seed(1)))
    assert (
        outcome(
            make_trainer(
                [function("log", validate)], shuffle=True, generator=torch.Generator().manual_seed(1)
            )
        )
        == plain
    )


@pytest.mark.parametrize("event", EVENTS)
def test_the_loop_is_where_it_was(event):
    "Every attribute of the trainer, its plan and its callbacks; and they are the same objects"
    seen = []

    def look(trainer):
        before, numbers, grad = observe(trainer), random_states(), torch.is_grad_enabled()
        with trainer.side_run(CountCB()) as side:
            side.fit(1, train=False)
            side.new, side.lr = 1, 99
            side.model.train()
        unchanged(trainer, before)
        assert (random_states(), torch.is_grad_enabled()) == (numbers, grad)
        seen.append(1)

    make_trainer([MetricsCB(), MeasureCB(), TrackingCB(), ProgressCB("plain"), function(event, look)]).fit(1)
    assert seen


def test_between_fits_it_leaves_no_trace_but_what_it_trained():
    trainer = make_trainer([MetricsCB()])
    trainer.fit(1)
    before, weight = observe(trainer, skip=[trainer.model, trainer.opt]), trainer.model[0].weight.clone()
    validate(trainer)
    unchanged(trainer, before, skip=[trainer.model, trainer.opt])
    assert torch.equal(trainer.model[0].weight, weight)
    opt = trainer.opt
    with trainer.side_run() as side:
        side.fit(1, valid=False)
    assert (
        not torch.equal(trainer.model[0].weight, weight) and trainer.opt is opt and len(trainer.history) == 1
    )


def test_before_the_first_fit():
    trainer = make_trainer()
    before = observe(trainer)
    validate(trainer, CountCB())
    unchanged(trainer, before)
    assert not hasattr(trainer, "epoch") and not hasattr(trainer, "dl")


class DropoutCB:
    "Dropout in evaluation, the way the course does it"

    def before_epoch(self, trainer):
        trainer.model.apply(lambda m: m.train() if isinstance(m, nn.Dropout) else None)


def looks(trainer, n=3):
    "Results of `n` evaluations with dropout"
    found = []
    for _ in range(n):
        validate(trainer, DropoutCB(), function("after_predict", lambda t: found.append(t.preds.clone())))
    return [torch.cat(found[2 * i : 2 * i + 2]) for i in range(n)]


def test_between_fits_the_random_numbers_on_the_side_go_on_and_those_of_training_do_not_notice():
    alone = make_trainer()
    alone.fit(1)
    expected = outcome(alone)
    trainer = make_trainer()
    trainer.fit(1)
    a, b, c = looks(trainer)
    assert not torch.equal(a, b) and not torch.equal(b, c)
    assert outcome(trainer) == expected
    set_seed(5)
    first = looks(trainer, 2)
    set_seed(5)
    assert all(map(torch.equal, first, looks(trainer, 2)))
    torch.rand(1)
    assert not torch.equal(first[0], looks(trainer, 1)[0])


@pytest.mark.parametrize("draw", [random.random, np.random.randn, lambda: torch.rand(1).item()])
def test_what_one_library_draws_on_the_side_is_put_back_and_gone_on_with(draw):
    "Also the second of NumPy's pairs of normal numbers, which leaves its position where it is"
    trainer, found = make_trainer(), []
    trainer.fit(1)
    np.random.randn()
    with trainer.snapshot():
        expected = draw()
    looking = function("after_epoch", lambda t: found.append(draw()))
    for callbacks in (looking, (), looking, looking):
        validate(trainer, callbacks)
    assert expected == draw() and len(set(found)) == 3


def test_within_a_fit_each_look_begins_where_training_stands():
    "So that a run that goes on, and knows of no look before, sees the same"
    found = []

    def after_fit(trainer):
        found.extend(looks(trainer, 2))

    make_trainer([function("after_fit", after_fit)]).fit(1)
    assert torch.equal(*found)


# Which callbacks take part


def test_callbacks_below_record_are_kept_and_the_others_are_not():
    below, at, above = (CountCB(o) for o in ("below", "at", "above"))
    below.order, at.order = Order.RECORD - 0.5, Order.RECORD
    trainer = make_trainer([below, at, above])
    watch = []
    with trainer.side_run(
        function("after_batch", lambda t: watch.append([getattr(o, "name", "") for o in t.callbacks]))
    ) as side:
        assert side is trainer and [o.name for o in side.callbacks[1:-1]] == ["below"]
        assert not hasattr(side, "at") and side.below is below
        side.fit(1, train=False)
    assert len(watch) == 2 and (at.n, above.n) == (0, 0)
    assert [o for o in trainer.callbacks[1:]] == [below, at, above] and trainer.at is at
    validate(trainer, below=Order.LAST)
    assert below.n == 0, "a kept callback is as before"


@pytest.mark.parametrize("below, kept", [(-1000, 0), (0.5, 1), (float("inf"), 2)])
def test_the_limit_may_be_any_number(below, kept):
    trainer = make_trainer([CountCB()])
    with trainer.side_run(below=below):
        assert len(trainer.callbacks) == kept


class BestSoFarCB:
    "As in the tutorials: state of a fit, and a look at each row"

    def __init__(self):
        self.fits, self.told = 0, []

    def before_fit(self, trainer):
        self.fits, self.best = self.fits + 1, float("inf")

    def log(self, trainer):
        self.best = min(self.best, trainer.history.latest("valid_loss"))

    def after_fit(self, trainer):
        self.told.append(self.best)

    def cleanup_fit(self, trainer):
        del self.best


def test_a_callback_with_state_of_a_fit_is_not_told_of_rows_there():
    "There was no row to read: `LookupError`"
    cb = BestSoFarCB()
    trainer = make_trainer([MetricsCB(), cb])
    trainer.lr_find(n_batches=4)
    trainer.get_preds()
    assert (cb.fits, cb.told) == (0, [])
    evaluator = EvaluatorCB(updates=1)
    trainer.fit(2, callbacks=evaluator)
    assert cb.fits == 1 and cb.told == [min(trainer.history["valid_loss"])]


def test_what_one_does_beside_reading_rows_counts_there():
    "In the rate finder and in evaluations, as without the `log`"

    class DoublesCB:
        def before_fit(self, trainer):
            trainer.factor = 2

        def before_batch(self, trainer):
            trainer.batch = trainer.batch[0] * trainer.factor, *trainer.batch[1:]

    class DoublesAndTellsCB(DoublesCB):
        def __init__(self):
            self.n = 0

        def after_batch(self, trainer):
            self.n += 1

        def log(self, trainer):
            self.text = f"{trainer.history[-1]['valid_loss']:.3f} {self.n}"

        def after_fit(self, trainer):
            self.last = trainer.history[-1]

    found = []
    for cb in (DoublesCB(), DoublesAndTellsCB()):
        trainer = make_trainer([MetricsCB(show=False), cb])
        losses = trainer.lr_find(n_batches=4).losses
        found.append((losses, trainer.validate(), trainer.get_preds().preds.tolist()))
    assert found[0] == found[1] and found[0][0]


def test_a_log_of_the_trainers_own_is_not_told_of_rows_there():
    class Tells(Trainer):
        def log(self):
            self.text = f"{self.history[-1]['valid_loss']:.3f}"

    trainer = make_trainer([MetricsCB(show=False)], cls=Tells)
    trainer.get_preds()
    assert not hasattr(trainer, "text")
    trainer.fit(1)
    assert trainer.text


class AskedInBatchCB(BestSoFarCB):
    def before_step(self, trainer):
        pass


class AsksToStayCB(BestSoFarCB):
    in_side_runs = True


class PhaseTooCB(BestSoFarCB):
    def before_phase(self, trainer):
        pass


@pytest.mark.parametrize(
    ("make", "options"),
    [(AskedInBatchCB, {}), (AsksToStayCB, {}), (PhaseTooCB, {}), (BestSoFarCB, dict(below=Order.DECIDE))],
)
def test_who_does_more_than_read_rows_or_asks_for_it_or_has_rows_to_read_stays_in(make, options):
    cb = make()
    cb.log = lambda trainer: None
    trainer = make_trainer([MetricsCB(), cb], cls=Phased, note=[])
    with trainer.side_run(**options) as side:
        assert cb in list(side.callbacks)


def test_a_name_that_left_with_its_callback_is_free():
    mine, other = CountCB(), CountCB()
    trainer = make_trainer([mine])
    validate(trainer, other)
    assert (mine.n, other.n) == (0, 2) and trainer.CountCB is mine


def test_a_name_that_is_kept_is_taken():
    mine = CountCB()
    mine.order = 0
    trainer = make_trainer([mine])
    before = observe(trainer)
    with pytest.raises(ValueError, match="CountCB"), trainer.side_run(CountCB()):
        pass
    with pytest.raises(ValueError, match="added already"), trainer.side_run(mine):
        pass
    with pytest.raises(TypeError, match="class"), trainer.side_run(CountCB):
        pass
    unchanged(trainer, before)
    trainer.fit(1)
    assert mine.n == 5


@pytest.mark.parametrize(
    "given",
    [
        lambda cb: cb,
        lambda cb: [cb],
        lambda cb: (cb,),
        lambda cb: {cb},
        lambda cb: iter([cb]),
        lambda cb: [None, cb],
    ],
    ids=["one", "list", "tuple", "set", "iterator", "with None"],
)
def test_callbacks_in_any_form(given):
    cb = CountCB()
    trainer = make_trainer()
    with trainer.side_run(given(cb)):
        trainer.fit(1, train=False)
    assert cb.n == 2 and cb not in trainer.callbacks


class Group:
    "Brings two callbacks along"

    def __init__(self, *callbacks):
        self.callbacks = list(callbacks)


def test_a_trainer_with_a_group_can_be_lent():
    limit, count = NBatchCB(1), CountCB()
    trainer = make_trainer([Group(limit, count)])
    validate(trainer)
    assert count.n == 0, "a member that only watches takes no part"


def test_a_group_can_be_added():
    count = CountCB()
    validate(make_trainer(), Group(NBatchCB(1), count))
    assert count.n == 1


def test_callbacks_may_come_and_go_inside():
    trainer = make_trainer([NBatchCB(1), CountCB()])
    before = observe(trainer)
    count = CountCB()
    with trainer.side_run() as side:
        side.remove_callback("NBatchCB", delete=True)
        side.add_callback(count)
        side.fit(1, train=False)
    assert count.n == 2
    unchanged(trainer, before)


def test_watchers_of_a_kept_group_stay_out():
    "Also when the group itself answers an event"

    class Both(Group):
        def before_fit(self, trainer):
            pass

    watcher, limit = CountCB(), NBatchCB(1)
    trainer = make_trainer([Both(watcher, limit)])
    with trainer.side_run(CountCB("other")) as side:
        assert watcher not in side.callbacks and limit in side.callbacks
        side.fit(1, train=False)
        assert side.other.n == 1
    assert watcher in trainer.callbacks and watcher.n == 0


def test_what_it_trains_stays_trained_though_callbacks_lead_there():
    class HoldCB:
        def before_fit(self, trainer):
            self.params, self.opt, self.trainer = list(trainer.model.parameters()), trainer.opt, trainer

    trainer = make_trainer([HoldCB()])
    trainer.fit(1)

    def look():
        return [
            bits(o)
            for o in (
                trainer.model[0].weight,
                trainer.model[1].running_mean,
                trainer.opt.state[trainer.model[0].weight]["momentum_buffer"],
            )
        ]

    before = look()
    with trainer.side_run() as side:
        side.fit(1, valid=False, keep_opt=True)
    assert all(a != b for a, b in zip(before, look()))
    assert trainer.n_updates == 3


def test_a_callers_no_grad_holds_inside():
    trainer, wanted = make_trainer(), []

    def look(trainer):
        with (
            trainer.side_run(
                function("after_predict", lambda t: wanted.append(t.preds.requires_grad))
            ) as side,
            torch.no_grad(),
        ):
            side.fit(1, train=False)

    trainer.fit(1, callbacks=function("after_epoch", look))
    assert wanted and not any(wanted)


@pytest.mark.parametrize("event", ["before_epoch", "after_batch", "after_epoch", "cleanup_epoch"])
def test_a_run_on_the_side_trains_at_any_event_of_a_validation_pass(event):
    def train(trainer):
        if not trainer.training:
            with trainer.side_run() as side:
                side.fit(1, valid=False)
            trained.append(torch.is_grad_enabled())

    trainer, trained = make_trainer(), []
    callback = function(event, train)
    callback.order = Order.RECORD
    trainer.fit(1, callbacks=callback)
    assert trained and not any(trained)


def test_a_callers_no_grad_holds_after_a_validation_pass():
    def look(trainer):
        with torch.no_grad(), trainer.side_run():
            seen.append(torch.is_grad_enabled())

    seen = []
    make_trainer().fit(1, callbacks=function("log", look))
    assert seen == [False]


def test_a_loader_is_not_told_its_position_in_the_middle_of_a_pass():
    "It would begin its next pass there"

    class Told:
        def __init__(self):
            self.told = 0

        def __iter__(self):
            return iter([(X, Y)] * 3)

        def __len__(self):
            return 3

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            self.told += 1

    trainer = make_trainer([function("after_batch", validate)])
    trainer.dls.train = loader = Told()
    trainer.fit(1)
    assert loader.told == 0 and trainer.n_updates == 3


# States of callbacks and modules


class StateCB:
    "Counts in a number, in a list, and on an attribute of its own"

    def __init__(self):
        self.n, self.seen = 0, []

    def before_fit(self, trainer):
        self.fresh = True

    def after_batch(self, trainer):
        self.n += 1
        self.seen = [*self.seen, trainer.batch_num]


class ListCB:
    def __init__(self):
        self.seen = []

    def after_batch(self, trainer):
        self.seen.append(trainer.batch_num)


class SlotCB:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0

    def after_batch(self, trainer):
        self.n += 1


def test_a_kept_callback_is_as_before():
    cb, extra = StateCB(), CountCB()
    trainer = make_trainer([cb])
    validate(trainer, extra)
    assert vars(cb) == {"n": 0, "seen": []} and extra.n == 2, "what was added keeps what it has counted"


@pytest.mark.parametrize("make", [ListCB, SlotCB])
def test_a_kept_callback_is_as_before_however_it_counts(make):
    cb = make()
    trainer = make_trainer([cb])
    before = observe(cb)
    validate(trainer)
    unchanged(cb, before)


@pytest.mark.parametrize("inside", ["validate", "train", "nothing", "fail"])
@pytest.mark.parametrize(
    "prepare",
    [lambda m: m.train(), lambda m: m.eval(), lambda m: m[1].eval(), lambda m: (m.eval(), m[2].train())],
    ids=["train", "eval", "one in eval", "one in train"],
)
def test_each_module_is_in_the_mode_it_was_in(prepare, inside):
    trainer = make_trainer()
    prepare(trainer.model)
    modes = [o.training for o in trainer.model.modules()]
    try:
        with trainer.side_run() as side:
            if inside in ("validate", "train"):
                side.fit(1, train=inside == "train", valid=inside != "train")
            if inside == "fail":
                side.model.train(not side.model.training)
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert [o.training for o in trainer.model.modules()] == modes


def test_a_model_that_is_no_module():
    trainer = Trainer(
        DataLoaders([(X, Y)], [(X, Y)]), F.cross_entropy, None, lambda x: x[:, :3], BasicTrainCB()
    )
    validate(trainer, count := CountCB())
    assert count.n == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_the_gradient_mode_is_that_of_the_caller(mode):
    trainer = make_trainer()
    with mode():
        before = torch.is_grad_enabled()
        validate(trainer)
        assert torch.is_grad_enabled() == before


def train_aside(trainer):
    with trainer.side_run() as side:
        side.fit(1, valid=False)


@pytest.mark.parametrize(
    "event, passes",
    [
        ("before_epoch", True),
        ("after_batch", True),
        ("log", None),
        ("before_fit", None),
        ("after_epoch", False),
    ],
)
def test_one_can_train_on_the_side(event, passes):
    done = []

    def look(trainer):
        if passes is None or trainer.training == passes:
            done.append(train_aside(trainer))

    make_trainer([function(event, look)]).fit(1)
    assert done


# Trouble inside


@pytest.mark.parametrize(
    "error",
    [
        ValueError,
        KeyboardInterrupt,
        SystemExit,
        StopIteration,
        GeneratorExit,
        CancelFitException,
        CancelEpochException,
        CancelBatchException,
    ],
)
@pytest.mark.parametrize("where", ["callback", "body"])
def test_an_error_inside_comes_out_and_the_loop_is_where_it_was(where, error):
    "But a cancel that a callback of the side run raises ends no more than that"
    trainer = make_trainer([MetricsCB()])
    trainer.fit(1)
    before, numbers = observe(trainer, skip=[trainer.model]), random_states()

    def after_batch(trainer):
        raise error("trouble")

    caught = where == "callback" and issubclass(error, CancelException)
    try:
        with trainer.side_run() as side:
            if where == "callback":
                side.fit(1, train=False, callbacks=after_batch)
            else:
                raise error("trouble")
    except error as e:
        assert not caught and str(e) == "trouble"
    else:
        assert caught
    unchanged(trainer, before, skip=[trainer.model])
    assert random_states() == numbers
    trainer.fit(1)


@pytest.mark.parametrize(
    "error", [CancelFitException, CancelEpochException, CancelBatchException, CancelStepException]
)
def test_a_cancel_in_the_side_fit_does_not_reach_the_outer_fit(error):
    def cancel(trainer):
        raise error("inner")

    def look(trainer):
        with trainer.side_run(function("after_predict", cancel)) as side:
            side.fit(1, train=False)

    assert outcome(make_trainer([MetricsCB(), function("after_step", look)])) == outcome(
        make_trainer([MetricsCB()])
    )


@pytest.mark.parametrize(
    "error, batches", [(CancelFitException, 1), (CancelEpochException, 2), (CancelBatchException, 6)]
)
def test_a_cancel_between_side_fits_ends_the_outer_part_that_it_names(error, batches):
    "Raised in the block and outside the side run's own fit, it belongs to the outer one"
    seen = []

    def look(trainer):
        with trainer.side_run() as side:
            side.fit(1, train=False)
            seen.append(1)
            raise error("outer")

    trainer = make_trainer([function("before_predict", look)])
    trainer.fit(2, valid=False)
    assert len(seen) == batches and trainer.n_updates == 0
    trainer.fit(1, train=False)


def test_a_request_to_stop_inside_stops_only_what_is_inside():
    stopped = []

    def stop(trainer):
        trainer.request_stop("inner")

    def look(trainer):
        with trainer.side_run([function("after_batch", stop), count := CountCB()]) as side:
            side.fit(3, train=False)
            stopped.append((side.stop_reason, count.n))
        assert trainer.stop_reason is None

    assert outcome(make_trainer([MetricsCB(), function("after_batch", look)])) == outcome(
        make_trainer([MetricsCB()])
    )
    assert set(stopped) == {("inner", 1)}


def test_a_request_to_stop_before_it_is_still_there_after_it():
    def look(trainer):
        trainer.request_stop("outer")
        validate(trainer, count := CountCB())
        assert count.n == 2 and trainer.stop_reason == "outer"

    trainer = make_trainer([function("after_batch", look)])
    trainer.fit(3)
    assert trainer.n_updates == 1 and trainer.stop_reason == "outer"


def test_a_request_to_stop_in_the_block_outside_its_fit_is_refused():
    def look(trainer):
        with trainer.side_run() as side:
            side.request_stop("whom?")

    with pytest.raises(RuntimeError, match="nothing is training"):
        make_trainer([function("after_batch", look)]).fit(1)


def test_fit_inside_fit_is_refused_also_inside():
    def again(trainer):
        trainer.fit(1)

    trainer = make_trainer()
    with pytest.raises(RuntimeError, match="inside"), trainer.side_run(function("log", again)) as side:
        side.fit(1)
    trainer.fit(1)


def test_an_error_in_a_side_run_names_the_inner_and_the_outer_callback():
    def fail(trainer):
        raise ValueError("no")

    def look(trainer):
        validate(trainer, inner)

    inner, outer = function("after_predict", fail), function("after_step", look)
    inner.name, outer.name = "inner", "outer"
    with pytest.raises(ValueError) as e:
        make_trainer([outer]).fit(1)
    assert any("`inner.after_predict`" in o for o in e.value.__notes__) and any(
        "`outer.after_step`" in o for o in e.value.__notes__
    )


def test_cleanups_of_a_failed_side_fit_have_run():
    ended = []

    def look(trainer):
        cleanup = function("cleanup_fit", lambda t: ended.append(type(t.exception)))
        cleanup.name = "cleanup"

        def fail(trainer):
            raise ZeroDivisionError

        with trainer.side_run([cleanup, function("after_get_loss", fail)]) as side:
            side.fit(1)

    with pytest.raises(ZeroDivisionError):
        make_trainer([function("after_batch", look)]).fit(1)
    assert ended == [ZeroDivisionError]


def test_a_callback_that_is_always_part_of_its_own_side_run_is_the_users_mistake_but_no_endless_loop():
    trainer = make_trainer([function("after_batch", validate, order=Order.STEP)])
    with pytest.raises(RuntimeError, match="evaluates again. Give it `order = Order.RECORD`"):
        trainer.fit(1)
    validate_only = make_trainer()
    validate(validate_only)
    trainer.remove_callback("DoCB")
    trainer.fit(1)


BEGIN_RUNS = {
    "lr_find": (lambda trainer: trainer.lr_find(n_batches=2), Order.RECORD),
    "find_batch_size": (lambda trainer: trainer.find_batch_size(max_size=2), Order.RECORD),
    "trace": (lambda trainer: trainer.trace(), Order.SAVE),
    "times": (lambda trainer: trainer.times(), Order.SAVE),
    "as of check": (lambda trainer: validate(trainer, below=Order.SAVE), Order.SAVE),
}


@pytest.mark.parametrize("name", BEGIN_RUNS)
@pytest.mark.filterwarnings("ignore:No rate from")
def test_a_callback_that_is_part_of_the_run_that_it_begins_is_told_the_order_that_keeps_it_out(name):
    begin, order = BEGIN_RUNS[name]
    with pytest.raises(RuntimeError, match=f"Give it `order = Order.{order.name}`"):
        make_trainer([function("before_fit", begin, order=order - 1)]).fit(1)
    weights = []
    for callbacks in ([], [function("before_fit", begin, order=order)]):
        trainer = make_trainer(callbacks)
        trainer.fit(1)
        weights.append(trainer.model[0].weight)
    assert torch.equal(*weights), "the order that it is told helps"


def test_a_search_beside_the_finder_of_the_fit_is_not_taken_for_one_within_itself():
    trainer = make_trainer([function("before_fit", BEGIN_RUNS["lr_find"][0], order=Order.RECORD)])
    with pytest.raises(ValueError, match="a callback called `LRFinderCB` already"):
        trainer.fit(1, callbacks=LRFinderCB())


# Subclasses


class Phased(Trainer):
    "With a span, an event, a method named after an event, and attributes of its own"

    events = ("halfway",)

    def subclassing_method(self, note):
        self.note, self.phases, self.own_batches = note, 0, 0

    @with_cbs("phase", CancelBatchException)
    def phase(self):
        self.phases = self.phases + 1

    def one_batch(self):
        self.phase()
        super().one_batch()
        self.run_callbacks("halfway")

    def after_batch(self):
        self.own_batches = self.own_batches + 1


class PhaseCB:
    order = Order.RECORD

    def __init__(self):
        self.seen = []

    def before_phase(self, trainer):
        self.seen.append("before")

    def phase(self, trainer):
        self.seen.append("phase")

    def cleanup_phase(self, trainer):
        self.seen.append("cleanup")

    def halfway(self, trainer):
        self.seen.append("halfway")


@pytest.mark.parametrize(
    "event", ["before_phase", "phase", "after_phase", "cleanup_phase", "halfway", "after_predict", "log"]
)
def test_a_subclass_has_its_spans_and_events_on_the_side_too(event):
    aside, mine = PhaseCB(), PhaseCB()

    def look(trainer):
        attributes = dict(vars(trainer))
        validate(trainer, aside)
        assert vars(trainer) == attributes and trainer.note == ["mine"]

    trainer = make_trainer([mine, function(event, look)], cls=Phased, note=["mine"])
    trainer.fit(1)
    assert (
        mine.seen == ["before", "phase", "cleanup", "halfway"] * 5
        and trainer.phases == trainer.own_batches == 5
    )
    assert aside.seen[:4] == mine.seen[:4] and len(aside.seen) % 8 == 0


def test_a_subclass_may_have_slots():
    class Slotted(Trainer):
        __slots__ = ("extra",)

    def look(trainer):
        preds = trainer.preds
        validate(trainer)
        assert trainer.preds is preds

    make_trainer([function("after_predict", look)], cls=Slotted).fit(1, valid=False)


def test_preds_and_loss_are_there_if_they_were():
    trainer = make_trainer()
    trainer.fit(1)
    preds, loss = trainer.preds, trainer.loss
    validate(trainer)
    assert trainer.preds is preds and trainer.loss is loss
    del trainer.preds
    validate(trainer)
    assert not hasattr(trainer, "preds") and trainer.loss is loss


def test_a_side_run_in_a_snapshot_in_a_side_run_in_a_snapshot():
    trainer = make_trainer([MetricsCB()])
    before = observe(trainer)
    with trainer.snapshot(), trainer.side_run(), trainer.snapshot():
        inner = observe(trainer)
        with trainer.side_run(MetricsCB()) as side:
            side.fit(1)
            assert len(side.history) == 1
        with trainer.snapshot():
            trainer.fit(1)
        assert len(trainer.history) == 0 and inner.keys()
    unchanged(trainer, before)


def test_a_trainer_is_never_without_its_attributes_whenever_an_interrupt_comes():
    "At each line on the way out of a run on the side; before one of them, that gives all back, it is lent"
    n, lent = lines_on_the_way_out(make_trainer()), []
    assert n > 10
    for i in range(n):
        trainer = make_trainer([MetricsCB(show=False)])
        trainer.fit(1)
        model, callbacks, dls = trainer.model, list(trainer.callbacks), trainer.dls
        assert lines_on_the_way_out(trainer, stop_at=i) == i + 1
        assert trainer.model is model and trainer.dls is dls
        if trainer._side_runs:
            lent.append(i)
        else:
            assert list(trainer.callbacks) == callbacks
            trainer.fit(1)
            assert trainer.validate()["valid_loss"] == trainer.history.latest("valid_loss")
    assert len(lent) <= 1


def lines_on_the_way_out(trainer, stop_at=None):
    "How many lines `side_run` has once its block is left; a KeyboardInterrupt before one of them"
    count, left = 0, False

    def trace(frame, event, arg):
        if frame.f_code.co_name == "side_run" and frame.f_code.co_filename.endswith("side_runs.py"):
            return trace_lines
        return None

    def trace_lines(frame, event, arg):
        nonlocal count
        if event == "line" and left:
            count += 1
            if count - 1 == stop_at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace_lines

    sys.settrace(trace)
    try:
        with trainer.side_run() as side:
            side.fit(1, train=False)
            left = True
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return count


# What a model keeps beside its tensors


class Recurrent(nn.Module):
    "Goes on from its last hidden state, and counts"

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 6), nn.Linear(6, 3)
        self.hidden, self.n_calls = None, 0

    def forward(self, x):
        if self.hidden is not None and len(self.hidden) == len(x):
            hidden = self.cell(x, self.hidden)
        else:
            hidden = self.cell(x)
        self.hidden, self.n_calls = hidden.detach(), self.n_calls + 1
        return self.out(hidden)


class LouderLoss:
    n_calls = 0

    def __call__(self, preds, targets):
        self.n_calls += 1
        return F.cross_entropy(preds, targets) * (1 + self.n_calls / 10)


def recurrent(*callbacks):
    trainer = make_trainer(callbacks)
    set_seed(0)
    trainer.model, trainer.loss_func = Recurrent(), LouderLoss()
    return trainer


class BoundLoss:
    n_calls = 0

    def compare(self, preds, targets):
        self.n_calls += 1
        return F.cross_entropy(preds, targets) * (1 + self.n_calls / 10)


LOOKS = {
    "validate": lambda: function("after_batch", lambda t: t.validate() if t.training else None),
    "get_preds": lambda: function(
        "after_batch", lambda t: t.get_preds(with_loss=True) if t.training else None
    ),
    "EvaluatorCB": lambda: EvaluatorCB(updates=1),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_an_evaluation_in_a_fit_leaves_hidden_state_and_counters_alone(look):
    "Weights, optimizer and random numbers are the same; an evaluator writes columns of its own"
    plain = recurrent()
    weights, state, *_, n_updates, numbers = outcome(plain)
    looking = recurrent(look())
    found = outcome(looking)
    assert found[:2] == (weights, state) and found[-2:] == (n_updates, numbers)
    assert (
        plain.model.n_calls == looking.model.n_calls and plain.loss_func.n_calls == looking.loss_func.n_calls
    )
    assert torch.equal(plain.model.hidden, looking.model.hidden)


class Bank(nn.Module):
    "Remembers means of its batches in what it holds, and adds them"

    def __init__(self, kind):
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.kind, self.held = kind, KEPT[kind]()
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, x):
        y = self.out(x)
        mean = y.detach().mean(0)
        if self.kind == "buffer":
            self.mean.lerp_(mean, 0.1)
            return y + self.mean
        if self.kind == "dict":
            self.held["mean"] = self.held.get("mean", 0) * 0.9 + mean
            return y + self.held["mean"]
        if self.kind == "tensor":
            return y + self.held.lerp_(mean, 0.1)
        held = self.held[0] if self.kind == "nested" else self.held
        held.append(mean)
        return y + sum(held)


KEPT = {
    "list": list,
    "queue": lambda: collections.deque(maxlen=3),
    "dict": dict,
    "tensor": lambda: torch.zeros(3),
    "nested": lambda: [[]],
    "buffer": lambda: None,
}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_an_evaluation_in_a_fit_leaves_alone_what_the_model_holds(look, kind):
    "Lists, tensors that are changed in place, and buffers as well"

    def weights(*callbacks):
        trainer = make_trainer(callbacks)
        set_seed(0)
        trainer.model = Bank(kind)
        trainer.fit(2)
        return [p.tolist() for p in trainer.model.parameters()], repr(trainer.model.held), trainer.model.mean

    assert repr(weights(look())) == repr(weights())


class Merging(nn.Linear):
    "Adds its change to the weight while it is evaluated, as LoRA does"

    merged = False

    def __init__(self):
        super().__init__(4, 3)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2, 4))

    def train(self, mode=True):
        super().train(mode)
        if self.merged is mode:
            self.weight.data += (self.a @ self.b) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x):
        y = super().forward(x)
        return y if self.merged else y + x @ (self.a @ self.b).T


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_weights_that_are_merged_for_an_evaluation_come_apart(look):
    def weights(*callbacks):
        trainer = make_trainer(callbacks)
        set_seed(0)
        trainer.model = Merging()
        trainer.fit(2, valid=False)
        return [p.tolist() for p in trainer.model.parameters()]

    assert weights(look()) == weights()


def test_what_cannot_be_copied_and_what_is_long_does_not_hinder_an_evaluation():
    class Odd(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.nested = [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
            self.table = [[i] for i in range(2000)]

        def forward(self, x):
            self.table.append([0])
            return super().forward(x)

    trainer = make_trainer([EvaluatorCB(updates=1)])
    set_seed(0)
    trainer.model = Odd()
    trainer.fit(1, valid=False)
    assert len(trainer.model.table) == 2000 + trainer.n_updates


def test_between_fits_one_can_look_at_what_the_last_batch_has_left():
    trainer = recurrent()
    trainer.fit(1)
    n = trainer.model.n_calls
    trainer.validate()
    assert trainer.model.n_calls == n + 2


def test_a_loss_of_a_method_is_left_alone_with_its_object():
    def losses(*callbacks):
        trainer = recurrent(*callbacks)
        trainer.loss_func = BoundLoss().compare
        return outcome(trainer), trainer.loss_func.__self__.n_calls

    assert losses(LOOKS["validate"]()) == losses()


def test_what_functions_gather_in_an_evaluation_stays_also_if_a_callback_holds_it():
    "In what they close over: that is not looked into"
    gathered, hits = [], []

    def after_batch(trainer):
        if trainer.training and len(hits) > 9999:
            print("many")

    def after_predict(trainer):
        if not trainer.training:
            gathered.append(trainer.batch_num)

    def look(tensors, store):
        hits.append(1)

    def done(store):
        n = sum(hits)
        hits.clear()
        return {"n": n}

    evaluator = EvaluatorCB(updates=1, user_iter_callback=look, user_epochs_done_callback=done)
    trainer = recurrent(after_batch, after_predict, evaluator)
    outcome(trainer)
    assert gathered and min(row["eval_n"] for row in trainer.history) > 0


@pytest.mark.parametrize("key", [False, True])
def test_a_loss_may_count_in_a_default_value(key):
    def losses(*callbacks):
        def loss(preds, targets, n=[0]):  # noqa: B006
            n[0] += 1
            return F.cross_entropy(preds, targets) * (1 + n[0] / 10)

        def by_key(preds, targets, *, n=[0]):  # noqa: B006
            return loss(preds, targets, n)

        trainer = recurrent(*callbacks)
        trainer.loss_func = by_key if key else loss
        return outcome(trainer)

    assert losses(LOOKS["validate"]()) == losses()


class Span(tuple):
    "Whose length nobody can tell while its end is open"

    def __len__(self):
        raise TypeError("open")


def test_a_tuple_with_a_length_of_its_own_does_not_hinder_an_evaluation():
    class SpanCB:
        def __init__(self):
            self.span = Span((3, None))

        def before_batch(self, trainer):
            pass

    trainer = recurrent(SpanCB(), LOOKS["EvaluatorCB"]())
    trainer.fit(1, 0.01)
    assert tuple.__len__(trainer.SpanCB.span) == 2


def test_a_run_on_the_side_that_trains_leaves_what_the_model_has_counted():
    def log(trainer):
        seen.append(trainer.model.n_calls)
        with trainer.side_run() as side:
            side.fit(1, valid=False)
        seen.append(trainer.model.n_calls)

    seen = []
    recurrent(function("log", log)).fit(1)
    assert seen[1] == seen[0] + 3


def test_a_model_that_builds_itself_in_an_evaluation_stays_built():
    class Growing(nn.Module):
        built = False

        def forward(self, x):
            if not self.built:
                self.out, self.built = nn.Linear(4, 3), True
            return self.out(x)

    def before_fit(trainer):
        trainer.validate()
        trainer.opt = SGD(trainer.model.parameters(), 0.1)
        layers.append(trainer.model.out)

    layers = []
    trainer = make_trainer([function("before_fit", before_fit)])
    trainer.model, trainer.opt_func = Growing(), None
    trainer.fit(1)
    assert trainer.model.out is layers[0]


def test_a_lazy_module_keeps_the_shape_that_an_evaluation_has_given_it():
    trainer = make_trainer([function("before_fit", lambda t: t.validate())])
    trainer.model = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3))
    with torch.no_grad():
        trainer.fit(1, train=False)
    assert type(trainer.model[0]) is nn.Linear and trainer.model[0].in_features == 4


@pytest.mark.parametrize(
    "event", ["before_fit", "before_epoch", "before_batch", "after_predict", "after_batch"]
)
def test_who_comes_and_goes_in_a_run_on_the_side_comes_and_goes_in_each(event):
    "Chains of calls that such runs take over from one another are made anew where the callbacks change"

    def visit(trainer):
        heard.append(f"{event} {trainer.n_visits}")
        if trainer.n_visits % 2 and not hasattr(trainer, "VisitorCB"):
            trainer.add_callback(VisitorCB())
        if trainer.n_visits % 4 == 3 and event != "before_fit":
            trainer.remove_callback("VisitorCB", delete=True)

    class VisitorCB:
        def after_get_loss(self, trainer):
            heard.append("visitor: loss")

        def after_batch(self, trainer):
            heard.append("visitor: batch")

    class ManyCB:
        order = Order.DECIDE

        def after_batch(self, trainer):
            if trainer.training and not trainer._side_runs:
                self.n += 1
                trainer.n_visits = self.n
                fresh(trainer) if self.fresh else None
                validate(trainer, visitor)

    def fresh(trainer):
        "No run on the side knows anything of the one before"
        trainer._aside_known.clear()

    found = []
    for clears in (False, True):
        heard, visitor, many = [], function(event, visit, Order.RECORD), ManyCB()
        many.n, many.fresh = 0, clears
        make_trainer([many]).fit(3)
        found.append(heard)
    assert found[0] == found[1] and "visitor: batch" in found[0]


class ScaleCB:
    "Comes in for evaluations, or stays out of them, from the fourth update on"

    def __init__(self, order, change):
        self.order, self.change = order, change

    def before_batch(self, trainer):
        trainer.batch = trainer.batch[0] * 3, trainer.batch[1]
        if trainer.training and trainer.n_updates == 4:
            self.change(self)

    @property
    def on_valid(self):
        return not hasattr(self, "stays_out")


def set_handler(cb):
    cb.before_batch = lambda trainer: None


@pytest.mark.parametrize("evaluate", [{}, {"n_batches": 5}])
@pytest.mark.parametrize(
    "order, change",
    [
        (Order.DATA, lambda cb: setattr(cb, "order", Order.REPORT)),
        (Order.REPORT, lambda cb: setattr(cb, "in_side_runs", True)),
        (Order.DATA, lambda cb: setattr(cb, "on_ranks", 1)),
        (Order.DATA, lambda cb: setattr(cb, "stays_out", True)),
        (Order.DATA, set_handler),
    ],
)
def test_who_changes_in_a_fit_where_it_takes_part_does_so_in_the_next_evaluation(order, change, evaluate):
    "By whatever way one evaluates; a run that knows nothing of the one before says what is right"

    class ForgetCB:
        order = Order.SCHEDULE

        def after_step(self, trainer):
            trainer._aside_known.clear()
            trainer._aside_known.seen.clear()

    def evaluated(change, *callbacks):
        evaluator = EvaluatorCB(updates=1, at_end=False, **evaluate)
        trainer = make_trainer([ScaleCB(order, change), evaluator, *callbacks])
        trainer.fit(3, valid=False)
        return [loss for loss in trainer.history.batches["eval_loss"] if loss == loss]

    found, without = evaluated(change), evaluated(lambda cb: None)
    assert found == evaluated(change, ForgetCB()) and found[:3] == without[:3] and found[5:] != without[5:]


def test_callbacks_of_one_evaluation_are_free_after_it():
    class CollectCB:
        def __init__(self):
            self.found = []

        def after_predict(self, trainer):
            self.found.append(trainer.preds)

    class LookCB:
        order = Order.DECIDE

        def after_batch(self, trainer):
            if trainer.training:
                collect = CollectCB()
                trainer.validate(callbacks=collect)
                kept.append(weakref.ref(collect.found[0]))
                gc.collect()
                alive.append(sum(ref() is not None for ref in kept))

    kept, alive = [], []
    make_trainer([LookCB()]).fit(2)
    assert max(alive[1:]) <= 1  # The last, which `collect` holds itself


COPIES = []


class CopyCB:
    "Copies the trainer at an event"

    order = Order.DECIDE

    def __init__(self, event, copied):
        self.copied, self.seen = copied, 0
        setattr(self, event, self.keep)

    def before_batch(self, trainer):
        self.seen += not trainer.training

    def keep(self, trainer):
        if trainer._side_runs == 0 and not COPIES:
            for name in ("preds", "loss"):
                if hasattr(trainer, name):
                    setattr(trainer, name, getattr(trainer, name).detach())
            trainer.validate()
            COPIES.append(self.copied(trainer))


def pickled(x):
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("event", ["before_fit", "after_batch", "log"])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_that_is_made_in_a_fit_is_in_none(event, copied):
    "It evaluates and trains like any trainer, with the callbacks that it has by then"
    COPIES.clear()
    make_trainer([CopyCB(event, copied)]).fit(2)
    again = COPIES[0]
    assert not again._fitting and not again.plan.spans and again._aside_known is None
    before, again.CopyCB.order = again.CopyCB.seen, Order.DATA
    assert again.validate() == again.validate()
    assert again.CopyCB.seen == before  # Put back, as after each evaluation
    again.fit(1)
    assert again.CopyCB.seen == before + 2


def test_an_order_that_is_no_number_any_more_is_named_in_the_next_evaluation():
    class LateCB:
        def before_fit(self, trainer):
            self.order = "late"

        def after_batch(self, trainer):
            pass

    with pytest.raises(TypeError, match="`LateCB.order` is 'late', but callbacks are sorted by it"):
        make_trainer([LateCB(), EvaluatorCB(updates=1)]).fit(1)
