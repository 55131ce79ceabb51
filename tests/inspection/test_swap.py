"""A swapped step against the same step written as a callback, and the plan after it against the plan before.

Undone in any order, with callbacks that come and go in between, after errors and cancels, in runs on the
side, and in the middle of a batch.
"""

import copy
import itertools
import pickle
import random
from types import SimpleNamespace

import pytest
import torch

import runs
from isaac_loop.all import (
    BasicTrainCB,
    CancelBatchException,
    CancelStepException,
    MetricsCB,
    MixedPrecisionCB,
    MomentumTrainCB,
    Order,
    Trainer,
    replaces,
)
from isaac_loop.inspection.swap import Swap
from small import StepsAsMethods, trainer_with


def described(trainer):
    "The plan: for each kind of pass and event, whose handler stands where"
    return [
        (kind, event, [(id(cb), type(h).__name__, getattr(h, "__qualname__", None)) for cb, h in pairs])
        for kind, entries in trainer.plan.entries.items()
        for event, pairs in entries.items()
    ], trainer.plan.changes


def double_loss(trainer):
    "Twice the gradient"
    (2 * trainer.loss).backward()


class DoubleCB:
    @replaces
    def backward(self, trainer):
        double_loss(trainer)


def make(*cbs, cls=Trainer, n=3):
    torch.manual_seed(0)
    return trainer_with(*cbs, cls=cls, n=n)


def fitted(trainer, *args, **kwargs):
    trainer.fit(*args, **kwargs)
    return trainer.model.weight.detach().clone()


@pytest.mark.parametrize("what", ["backward", "BasicTrainCB.backward", "method"])
def test_a_swapped_step_is_the_step_of_a_callback_that_replaces_it(what):
    expected = fitted(make(DoubleCB()), 2, 0.1)
    trainer = make()
    with trainer.swap(trainer.BasicTrainCB.backward if what == "method" else what, double_loss):
        assert torch.equal(fitted(trainer, 2, 0.1), expected)


def test_a_condition_is_asked_once_in_each_batch():
    asked = []

    def odd(trainer):
        asked.append(trainer.batch_num)
        return trainer.batch_num % 2

    class Odd:
        def before_backward(self, trainer):
            if trainer.batch_num % 2:
                trainer.loss = 2 * trainer.loss

    trainer = make(n=4)
    with trainer.swap("backward", double_loss, when=odd):
        walked = fitted(trainer, 1, 0.1, valid=False)
    assert asked == [0, 1, 2, 3]
    assert torch.equal(walked, fitted(make(Odd(), n=4), 1, 0.1, valid=False))


def test_several_that_answer_are_replaced_by_one_and_each_comes_back():
    seen = []
    cbs = [SimpleNamespace(name=o, after_batch=lambda t, o=o: seen.append(o)) for o in "abc"]
    trainer = make(*cbs, n=3)
    with trainer.swap("after_batch", lambda t: seen.append("other"), when=lambda t: t.batch_num == 1):
        trainer.fit(1, valid=False)
    assert "".join(seen) == "abc" + "other" + "abc"
    seen.clear()
    with trainer.swap("after_batch", lambda t: seen.append("other")):
        trainer.fit(1, valid=False)
    assert seen == ["other"] * 3
    seen.clear()
    with trainer.swap("b.after_batch", lambda t: seen.append("other")):
        trainer.fit(1, valid=False)
    assert seen == ["a", "other", "c"] * 3


def test_swaps_stand_on_one_another_and_are_undone_in_any_order():
    rng = random.Random(0)
    for trial in range(30):
        trainer = make(
            MetricsCB(show=False), MixedPrecisionCB("float16") if trial % 2 else MixedPrecisionCB()
        )
        before = described(trainer)
        places = [
            "backward",
            "BasicTrainCB.step",
            "step",
            "predict",
            "before_predict",
            "MixedPrecisionCB.cleanup_predict",
        ]
        swaps = []
        for what in rng.choices(places, k=5):
            if what == "BasicTrainCB.step" and trial % 2:  # The scaler steps instead
                continue
            swaps.append(trainer.swap(what, lambda t: None, when=rng.choice([None, lambda t: False])))
        rng.shuffle(swaps)
        guest = SimpleNamespace(name="guest", after_batch=lambda t: None)
        for i, swap in enumerate(swaps):
            if i == 1:
                trainer.add_callback(guest)
            if i == 2:
                trainer.remove_callback(guest, delete=True)
            swap.undo()
            swap.undo()
        if len(swaps) == 2:
            trainer.remove_callback(guest, delete=True)
        assert described(trainer) == before


def test_the_uppermost_swap_runs_and_then_the_one_below():
    seen = []
    trainer = make(n=1)

    def run():
        trainer.fit(1, valid=False)
        return seen.pop() if seen else None

    a = trainer.swap("zero_grad", lambda t: seen.append("a"))
    b = trainer.swap("zero_grad", lambda t: seen.append("b"))
    assert run() == "b"
    a.undo()
    assert run() == "b"
    a = trainer.swap("zero_grad", lambda t: seen.append("a"))
    assert run() == "a"
    a.undo()
    assert run() == "b"
    b.undo()
    assert run() is None


@pytest.mark.parametrize("error", [runs.Cut, CancelBatchException, CancelStepException, KeyboardInterrupt])
def test_an_error_or_a_cancel_inside_leaves_the_plan_as_it_was(error):
    def raises(trainer):
        raise error("inside")

    trainer = make()
    before = described(trainer)
    try:
        with trainer.swap("backward", raises) as swap:
            trainer.fit(1)
    except (runs.Cut, KeyboardInterrupt) as caught:
        assert type(caught) is error
    assert described(trainer) == before and not swap.active
    trainer.fit(1)


def test_an_error_names_the_function_and_whose_place_it_has():
    def mine(trainer):
        raise runs.Cut

    trainer = make()
    with trainer.swap("backward", mine), pytest.raises(runs.Cut) as caught:
        trainer.fit(1)
    assert caught.value.__notes__ == [
        "raised in `mine`, which `swap` has put in the place of `BasicTrainCB.backward`",
        "raised by `BasicTrainCB.backward` at epoch 0, batch 0 (training)",
    ]

    def cancel(trainer):
        raise CancelStepException("not now")

    seen = []
    with trainer.swap("backward", cancel):
        trainer.fit(
            1, callbacks=SimpleNamespace(name="x", cleanup_backward=lambda t: seen.append(t.exception))
        )
    assert len(seen) == 3 and not hasattr(seen[0], "__notes__")


def test_in_the_middle_of_a_fit_it_counts_from_the_next_event_on():
    seen = []

    class Swaps:
        def before_backward(self, trainer):
            if trainer.batch_num == 1:
                self.swap = trainer.swap("backward", lambda t: seen.append(t.batch_num))

        def after_backward(self, trainer):
            if trainer.batch_num == 2:
                self.swap.undo()

    trainer = make(Swaps(), n=5)
    before = described(trainer)
    trainer.fit(1, valid=False)
    assert seen == [1, 2] and described(trainer) == before


def test_a_swapped_cleanup_is_owed_to_a_callback_that_leaves():
    for when in (None, lambda t: True, lambda t: False):
        seen = []
        cb = SimpleNamespace(
            name="leaves",
            cleanup_batch=lambda t: seen.append("own"),
            after_predict=lambda t: t.remove_callback("leaves"),
        )
        trainer = make(cb, n=2)
        with trainer.swap("leaves.cleanup_batch", lambda t: seen.append("other"), when=when):
            trainer.fit(1, valid=False)
        assert seen == (["own"] if when and not when(0) else ["other"])


def test_a_callback_that_leaves_and_comes_back_is_still_replaced():
    seen = []
    cb = SimpleNamespace(name="mine", after_batch=lambda t: seen.append("own"))
    trainer = make(cb, n=1)
    with trainer.swap("mine.after_batch", lambda t: seen.append("other")):
        trainer.remove_callback(cb)
        trainer.fit(1, valid=False)
        trainer.add_callback(cb)
        trainer.fit(1, valid=False)
    trainer.fit(1, valid=False)
    assert seen == ["other", "own"]


def test_it_counts_in_runs_on_the_side_and_one_made_there_ends_there():
    trainer = make()
    trainer.fit(1)
    plain = trainer.validate()
    with trainer.swap("predict", lambda t: setattr(t, "preds", t.batch[1])):
        assert trainer.validate()["valid_loss"] == 0.0
    assert trainer.validate() == plain
    with trainer.side_run() as side:
        swap = side.swap("predict", lambda t: setattr(t, "preds", t.batch[1]))
    assert trainer.plan.changes == () and trainer.validate() == plain
    swap.undo()
    assert trainer.validate() == plain


def test_undone_in_a_run_on_the_side_it_is_undone_afterwards_too():
    trainer = make()
    before = described(trainer)
    swap = trainer.swap("predict", lambda t: setattr(t, "preds", t.batch[1]))
    with trainer.side_run(), trainer.side_run():
        swap.undo()
    assert described(trainer) == before


def test_the_summary_shows_who_stands_where():
    trainer = make()
    with trainer.swap("backward", double_loss):
        rows = {row["step"]: row["does"] for row in trainer.summarize_callbacks().rows}
        assert rows["backward"] == "`double_loss` instead: Twice the gradient"
    with trainer.swap("step", MomentumTrainCB(), when=lambda t: False) as swap:
        rows = {row["step"]: row["does"] for row in trainer.summarize_callbacks().rows}
        assert (
            rows["step"].startswith("`MomentumTrainCB.step` instead")
            and "on a condition, else: Let the" in rows["step"]
        )
        assert str(swap) == "Swap(MomentumTrainCB.step in the place of step, on a condition)"
    assert "instead" not in str(trainer.summarize_callbacks())


def test_a_method_of_the_trainer_and_an_event_of_its_own_can_be_replaced():
    class Own(StepsAsMethods):
        events = ("verify",)

        def one_batch(self):
            super().one_batch()
            self.run_callbacks("verify", times=2)

    seen, other = [], make()
    trainer = Own(other.dls, other.loss_func, other.opt_func, other.model, None)
    trainer.add_callback(SimpleNamespace(name="v", verify=lambda trainer, times: None))
    with (
        trainer.swap("verify", lambda trainer, times: seen.append(times)),
        trainer.swap("Own.backward", double_loss),
    ):
        trainer.fit(1, valid=False)
    assert seen == [2, 2, 2]


@pytest.mark.parametrize(
    "what, other, kind, words",
    [
        ("bacward", double_loss, LookupError, "Did you mean `backward`"),
        ("BasicTrain.step", double_loss, LookupError, "Did you mean `BasicTrainCB`"),
        ("BasicTrainCB.stepp", double_loss, LookupError, "Did you mean `step`"),
        (
            "BasicTrainCB.log",
            double_loss,
            LookupError,
            r"has no `log`.*BasicTrainCB` has no|it has \['predict'",
        ),
        ("BasicTrainCB", double_loss, LookupError, "Say which"),
        ("after_step", double_loss, LookupError, r"nobody does anything there.*'predict'"),
        (len, double_loss, LookupError, "not what any callback"),
        (3, double_loss, LookupError, "not what any callback"),
        ("step", None, TypeError, "lambda trainer: None"),
        ("step", 7, TypeError, "cannot be called"),
        ("step", BasicTrainCB, TypeError, r"Make one: `BasicTrainCB\(\)`"),
        ("step", torch.nn.Linear(1, 1), TypeError, "module of class Linear"),
        ("step", lambda: None, TypeError, "does not take that"),
    ],
)
def test_what_cannot_work_is_refused_and_changes_nothing(what, other, kind, words):
    trainer = make()
    before = described(trainer)
    with pytest.raises(kind, match=words):
        trainer.swap(what, other)
    assert described(trainer) == before


def test_a_generator_and_a_condition_that_takes_nothing_are_refused():
    def lazily(trainer):
        yield

    async def later(trainer):
        pass

    trainer = make()
    for other in (lazily, later):
        with pytest.raises(TypeError, match="would do nothing"):
            trainer.swap("step", other)
    with pytest.raises(TypeError, match="`when`"):
        trainer.swap("step", double_loss, when=lambda: True)
    with pytest.raises(TypeError, match="`when`"):
        trainer.swap("step", double_loss, when=3)
    assert trainer.plan.changes == ()


def test_a_condition_that_fails_says_where_and_cleanups_go_on():
    seen = []
    cb = SimpleNamespace(name="mine", cleanup_batch=lambda t: seen.append("own"))
    trainer = make(cb, n=1)
    with (
        trainer.swap("mine.cleanup_batch", double_loss, when=lambda t: 1 / 0),
        pytest.raises(ZeroDivisionError) as caught,
    ):
        trainer.fit(1)
    assert any("in the place of `mine.cleanup_batch`" in o for o in caught.value.__notes__)
    assert described(trainer)[1] == ()


def test_a_trainer_can_be_copied_with_its_swaps():
    trainer = make()
    expected = fitted(make(DoubleCB()), 1, 0.1)
    trainer.swap("backward", double_loss)
    for other in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert torch.equal(fitted(other, 1, 0.1), expected)
        (swap,) = other.plan.changes
        swap.undo()
        assert other.plan.changes == () and len(trainer.plan.changes) == 1


def test_a_swap_in_the_last_batch_does_not_make_the_loop_forget_that_there_was_one():
    "Nobody is told that `before_batch` does not run, where it did"

    class Own(Trainer):
        def one_batch(self):
            super().one_batch()

    trainer = make(MetricsCB(show=False), cls=Own)
    swap = []

    def after_step(trainer):
        swap.append(trainer.swap("zero_grad", lambda t: None))

    trainer.fit(1, callbacks=after_step)
    assert "batch" not in trainer.plan.told


def test_the_place_in_the_order_is_that_of_the_callback():
    seen = []
    early = SimpleNamespace(name="early", order=Order.FIRST, before_step=lambda t: seen.append("early"))
    late = SimpleNamespace(name="late", order=Order.LAST, before_step=lambda t: seen.append("late"))
    trainer = make(late, early, n=1)
    with trainer.swap("early.before_step", lambda t: seen.append("other")):
        trainer.fit(1)
    assert seen == ["other", "late"]
    assert isinstance(trainer.swap("step", double_loss), Swap)


def test_all_pairs_of_steps_can_be_swapped_at_once():
    names = ["predict", "get_loss", "backward", "step", "zero_grad"]
    for a, b in itertools.combinations(names, 2):
        trainer = make(n=1)
        seen = []
        basic = trainer.BasicTrainCB

        def noted(name, seen=seen, basic=basic):
            return lambda t: (seen.append(name), getattr(basic, name)(t))

        with trainer.swap(a, noted(a)), trainer.swap(f"BasicTrainCB.{b}", noted(b)):
            trainer.fit(1, valid=False)
        assert seen == [a, b]
