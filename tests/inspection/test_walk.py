"""A walk against `fit`: the same weights, the same history, whatever the callbacks; and what a moment tells.

Walking is checked over runs of all kinds: everything that counts batches, two optimizers, an optimizer with a
closure, steps as methods of the trainer, streams, own spans, own events, own `one_batch`, cancels in between.
"""

import copy
import gc
import io
import weakref
from contextlib import redirect_stdout
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import runs
from isaac_loop.all import (
    AccumulationCB,
    BasicTrainCB,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    DataLoaders,
    EMACB,
    MetricsCB,
    MixedPrecisionCB,
    NBatchCB,
    Order,
    Trainer,
    with_cbs,
)
from isaac_loop.basics.tensors import set_seed
from isaac_loop.inspection.moments import Moment, Moments
from isaac_loop.inspection.copies import Copies
from isaac_loop.loop.events import EVENTS
from small import StepsAsMethods, trainer_with


class Phases(Trainer):
    "A span and an event of its own, and two passes over each batch"

    events = ("verify_batch",)

    @with_cbs("phase", CancelEpochException)
    def phase(self):
        super().one_batch()

    def one_batch(self):
        self.phase()
        self.run_callbacks("verify_batch", extra=3)
        self.phase()


class TwoNetsCB:
    "Two nets with an optimizer each, as in adversarial training; state from batch to batch"

    def before_fit(self, trainer):
        self.other = nn.Linear(8, 1)
        trainer.opt_d = optim.Adam(self.other.parameters(), 1e-2)
        self.sums = []

    def predict(self, trainer):
        x = trainer.batch[0]
        trainer.preds = trainer.model(x)
        trainer.loss_d = self.other(x + torch.randn_like(x)).square().mean()

    def get_loss(self, trainer):
        trainer.loss = F.cross_entropy(trainer.preds, trainer.batch[1]) + trainer.loss_d.detach()

    def backward(self, trainer):
        trainer.loss.backward()
        trainer.loss_d.backward()
        self.sums.append(trainer.loss.detach())

    def step(self, trainer):
        trainer.opt.step()
        trainer.opt_d.step()

    def zero_grad(self, trainer):
        trainer.opt.zero_grad()
        trainer.opt_d.zero_grad()


class CancelsCB:
    "Cancels now and then, at each level"

    order = Order.FIRST

    def before_backward(self, trainer):
        if trainer.batch_num == 1:
            raise CancelStepException("no gradient here")

    def after_get_loss(self, trainer):
        if trainer.batch_num == 2:
            raise CancelBatchException("nor here")

    def after_batch(self, trainer):
        if trainer.batch_num == 4:
            raise CancelEpochException("enough")


class ComesAndGoes:
    "Adds a callback in the middle of a batch, and takes it out in another"

    def before_fit(self, trainer):
        self.guest, self.seen = (
            SimpleNamespace(name="guest", after_step=self._see, cleanup_batch=self._see),
            [],
        )

    def _see(self, trainer):
        self.seen.append(trainer.n_updates)

    def before_predict(self, trainer):
        if trainer.training and trainer.batch_num == 1:
            trainer.add_callback(self.guest)
        if trainer.training and trainer.batch_num == 3:
            trainer.remove_callback("guest")


class Stream:
    "Rows that have no length"

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        for _ in range(4):
            yield torch.randn(8, 8, generator=generator), torch.randint(3, (8,), generator=generator)


def _stream(**kwargs):
    return runs.make_trainer([BasicTrainCB(), MetricsCB()], DataLoaders(Stream(), Stream()), **kwargs)


def _own(cls, cbs):
    set_seed(42)
    return cls(runs.make_loaders(), F.cross_entropy, optim.AdamW, runs.make_model(), cbs)


class Rows(StepsAsMethods):
    "Steps of the trainer itself"


RUNS = {
    "everything": lambda: runs.make_trainer(runs.everything()),
    "usual": lambda: runs.make_trainer(),
    "half precision": lambda: runs.make_trainer([*runs.callbacks(), MixedPrecisionCB()]),
    "two nets": lambda: runs.make_trainer([TwoNetsCB()]),
    "closure": lambda: runs.make_trainer([BasicTrainCB()], opt_func=partial(optim.LBFGS, max_iter=3)),
    "cancels": lambda: runs.make_trainer([*runs.callbacks(), CancelsCB()]),
    "come and go": lambda: runs.make_trainer([*runs.callbacks(), ComesAndGoes()]),
    "stream": _stream,
    "steps as methods": lambda: _own(Rows, [MetricsCB()]),
    "phases": lambda: _own(
        Phases, [BasicTrainCB(), SimpleNamespace(name="v", verify_batch=lambda t, extra: None)]
    ),
    "accumulation": lambda: runs.make_trainer([*runs.callbacks(), AccumulationCB(3), NBatchCB(5)]),
}


def walked(trainer, *args, at=None, **kwargs):
    "`trainer` after a walk to the end, and the moments"
    with redirect_stdout(io.StringIO()):
        moments = list(trainer.walk(*args, at=at, **kwargs))
    assert all(isinstance(o, Moment) for o in moments)
    assert trainer.plan.changes == ()
    return trainer, moments


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(
    "at",
    [None, "after_batch", "cleanup_epoch", lambda moment: False],
    ids=lambda at: getattr(at, "__name__", str(at)).strip("<>"),
)
def test_a_walk_without_a_change_is_a_fit_bit_for_bit(name, at):
    fitted = runs.fit(RUNS[name](), 2)
    after_fit = torch.get_rng_state()
    trainer, moments = walked(RUNS[name](), 2, 0.02, at=at)
    runs.same(fitted, trainer)
    assert torch.equal(torch.get_rng_state(), after_fit)
    assert bool(moments) == (not callable(at))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["everything", "two nets", "half precision", "cancels"])
def test_looking_at_everything_and_running_on_the_side_changes_nothing(name):
    fitted, trainer = runs.fit(RUNS[name](), 1), RUNS[name]()
    with redirect_stdout(io.StringIO()):
        for moment in trainer.walk(1, 0.02):
            str(moment), moment._repr_markdown_(), str(trainer), trainer.summarize_callbacks()
            if moment.event == "after_step" and trainer.batch_num == 3:
                trainer.validate()
    runs.same(fitted, trainer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["everything", "usual", "cancels", "half precision", "accumulation"])
def test_what_comes_next_is_what_came_next(name):
    _, moments = walked(RUNS[name](), 2, 0.02)
    told = 0
    for now, then in zip(moments, moments[1:]):
        inside = "measured" in (now.event, then.event)  # In the middle of a call
        if inside or now.raised or now.event.startswith("cleanup_") or " " in now.next or not now.next:
            continue
        told += 1
        if "CancelsCB" not in (then.name, now.name) and not then.raised:
            assert now.next == (then.event if then.callback is None else f"{then.name}.{then.event}")
    assert told > 50
    assert moments[-1].next == "nothing more"


def test_each_moment_names_who_was_called_and_what_was_written():
    "Against a callback that notes each event, and what the five steps are known to write"
    _, moments = walked(trainer_with(), 1, 0.1, valid=False)
    batch = [o for o in moments if o.batch_num == 1]
    assert [o.event for o in batch] == [
        "before_batch",
        "predict",
        "get_loss",
        "backward",
        "step",
        "zero_grad",
    ]
    assert [list(o.wrote) for o in batch] == [
        ["batch_num", "batch", "preds", "loss"],
        ["preds"],
        ["loss"],
        ["model"],
        ["model"],
        ["model"],
    ]
    assert batch[0].wrote["preds"] == "removed" and batch[0].callback is None
    changes = [o.wrote["model"].partition(" (by up to")[0] for o in batch[3:]]
    assert changes == ["gradients", "weights", "gradients removed"]
    assert batch[5].meanwhile == {"n_updates": "2"}
    assert [o.number for o in moments] == list(range(len(moments)))
    assert batch[1].does == "Run the model on the inputs" and batch[1].training is True


def test_what_the_user_writes_is_not_put_down_to_a_callback():
    trainer = trainer_with()
    walk = trainer.walk(1, valid=False)
    walk.to("get_loss")
    trainer.mine, trainer.loss = 3, trainer.loss * 2
    moment = next(walk)
    assert (moment.wrote, moment.meanwhile) == ({"model": "gradients"}, {})
    walk.close()


def test_a_cancel_is_a_moment_and_goes_on_from_there():
    _, moments = walked(trainer_with(AccumulationCB(3)), 1, 0.1, valid=False)
    raised = [o for o in moments if o.raised]
    assert {(o.name, o.event) for o in raised} == {
        ("AccumulationCB", "before_step"),
        ("AccumulationCB", "before_zero_grad"),
    }
    assert raised[0].raised.startswith("CancelStepException") and raised[0].next == ""


@pytest.mark.parametrize(
    "event, name, value",
    [
        ("before_batch", "batch", lambda t: (t.batch[0] * 0, t.batch[1])),
        ("get_loss", "loss", lambda t: t.loss * 3),
    ]
    + [("predict", "preds", lambda t: t.preds * 0)],
)
def test_what_is_set_at_a_moment_counts(event, name, value):
    "Against a callback that sets the same at the end of the event"
    setter = SimpleNamespace(order=Order.LAST, name="setter")
    setattr(
        setter, event if event == "before_batch" else f"after_{event}", lambda t: setattr(t, name, value(t))
    )
    torch.manual_seed(0)
    expected = trainer_with(setter)
    expected.fit(1, 0.1)
    torch.manual_seed(0)
    trainer = trainer_with()
    for _ in trainer.walk(1, 0.1, at=event):
        setattr(trainer, name, value(trainer))
    assert torch.equal(expected.model.weight, trainer.model.weight)


def test_an_event_stops_once_and_also_where_nobody_answers():
    first, second = (SimpleNamespace(name=o, after_batch=lambda t: None) for o in "ab")
    trainer = trainer_with(first, second)
    assert [o.name for o in trainer.walk(1, at="after_batch")] == ["b"] * 5
    assert [o.name for o in trainer_with().walk(1, at="after_predict")] == ["the loop"] * 5
    assert [o.event for o in trainer.walk(1, at=["log", "cleanup_fit"])] == ["log", "cleanup_fit"]


def test_callbacks_are_meant_by_object_by_name_by_class_and_by_method():
    cb = SimpleNamespace(name="mine", before_predict=lambda t: None, after_step=lambda t: None)
    for at in (cb, "mine", ["mine.before_predict", "mine.after_step"]):
        assert [o.event for o in trainer_with(cb, n=1).walk(1, at=at, valid=False)] == [
            "before_predict",
            "after_step",
        ]
    assert [o.event for o in trainer_with(n=1).walk(1, callbacks=cb, at="mine", valid=False)] == [
        "before_predict",
        "after_step",
    ]
    assert len(list(trainer_with(n=2).walk(1, at=BasicTrainCB, valid=False))) == 10
    assert len(list(trainer_with(n=2).walk(1, at="BasicTrainCB.step"))) == 2


def test_to_and_take_go_on_from_where_the_walk_stands():
    trainer = trainer_with(n=4)
    walk = trainer.walk(2, at="after_batch", valid=False)
    assert next(walk).batch_num == 0
    assert walk.to("BasicTrainCB.backward").batch_num == 1
    assert walk.to(lambda moment: moment.batch_num == 3).event == "before_batch"
    assert [o.event for o in walk.take("log")] == ["after_batch", "log"]
    assert [o.batch_num for o in walk.take(2)] == [0, 1]
    assert walk.to("cleanup_fit").event == "cleanup_fit"
    assert walk.to("predict") is None and walk.over and len(walk.take(3)) == 0


@pytest.mark.parametrize(
    "at, kind, words",
    [
        ("after_bach", LookupError, "Did you mean `after_batch`"),
        ("BasicTrainCB.stepp", LookupError, "Did you mean `step`"),
        (["log", 7], TypeError, "no place to stop"),
        ("Nobody", LookupError, "neither an event nor a callback"),
    ],
)
def test_a_wrong_place_is_refused_before_anything_runs(at, kind, words):
    trainer = trainer_with()
    with pytest.raises(kind, match=words):
        trainer.walk(1, at=at)
    assert len(trainer.history) == 0 and trainer.plan.changes == ()


def test_arguments_of_fit_are_refused_as_fit_does():
    trainer = trainer_with()
    with pytest.raises(TypeError, match="epochs are counted"):
        next(trainer.walk("three"))
    with pytest.raises(TypeError, match="which it does not have"):
        next(trainer.walk(1, epochs=3))
    assert trainer.plan.changes == ()
    trainer.fit(1)


def test_callbacks_may_come_and_go_and_steps_be_swapped_at_a_pause():
    trainer, seen = trainer_with(), []
    guest = SimpleNamespace(
        name="guest", before_batch=lambda t: seen.append("before"), after_step=lambda t: None
    )
    walk = trainer.walk(1, valid=False)
    walk.to("get_loss")
    trainer.add_callback(guest)
    assert seen == ["before"]  # At once, and without a pause: nobody walks there
    assert walk.to("guest").event == "after_step"
    trainer.remove_callback(guest)
    swap = trainer.swap("backward", lambda t: t.loss.mul(0).backward())
    walk.to("backward")
    assert all(p.grad.abs().sum() == 0 for p in trainer.model.parameters())
    swap.undo()
    assert all(o.name != "guest" for o in walk)
    assert trainer.plan.changes == ()


def test_a_copy_of_the_trainer_is_not_walked():
    trainer = trainer_with()
    walk = trainer.walk(1)
    walk.to("before_batch")
    other = copy.deepcopy(trainer)
    walk.close()
    other._fitting = False
    other.plan.spans.clear()
    other.fit(1)
    assert other.n_updates == 3


def test_a_hook_within_backward_does_not_stop_the_loop():
    class Hooked(Trainer):
        events = ("in_backward",)

    class HookCB:
        def after_get_loss(self, trainer):
            trainer.loss.register_hook(lambda grad: trainer.run_callbacks("in_backward"))

        def in_backward(self, trainer):
            self.came = True

    cb = HookCB()
    trainer = trainer_with(cb, cls=Hooked)
    events = [o.event for o in trainer.walk(1, 0.1, valid=False)]
    assert cb.came and "in_backward" not in events


def test_a_walk_in_a_run_on_the_side():
    trainer = trainer_with()
    trainer.fit(1)
    before = torch.get_rng_state()
    with trainer.side_run() as side:
        assert [o.event for o in side.walk(1, train=False, at="after_batch")] == ["after_batch"] * 2
    assert torch.equal(before, torch.get_rng_state()) and len(trainer.history) == 0


def test_going_on_within_a_run_on_the_side_is_refused():
    trainer = trainer_with()
    walk = trainer.walk(1)
    walk.to("predict")
    with trainer.side_run(), pytest.raises(RuntimeError, match="lent to a run on the side"):
        next(walk)
    assert next(walk).event == "get_loss"
    walk.close()


def test_without_greenlet_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "greenlet", None)
    with pytest.raises(ImportError, match=r'pip install "isaac_loop\[walk\]"'):
        trainer_with().walk(1)


class KeepsWeakly:
    "Weak references to each batch, prediction and loss"

    def __init__(self):
        self.kept = []

    def after_get_loss(self, trainer):
        self.kept += [weakref.ref(o) for o in (*trainer.batch, trainer.preds, trainer.loss)]


def fresh_batches(n=4):
    class Loader:
        def __len__(self):
            return n

        def __iter__(self):
            return ((torch.randn(4, 1), torch.randn(4, 1)) for _ in range(n))

    return DataLoaders(Loader(), Loader())


def test_moments_hold_no_batch_and_nothing_waits_for_the_garbage_collector():
    keeps = KeepsWeakly()
    trainer = Trainer(fresh_batches(), F.mse_loss, optim.SGD, nn.Linear(1, 1), [BasicTrainCB(), keeps])
    gc.collect()
    gc.disable()
    try:
        moments = []
        for moment in trainer.walk(1, 0.1):
            moments.append(moment)
            alive = sum(o() is not None for o in keeps.kept)
            assert alive <= 8  # This batch and at most the one before it, as in `fit`
            if moment.event == "predict":
                assert sum(o() is not None for o in keeps.kept[2::4]) == 0
        del moment
        assert sum(o() is not None for o in keeps.kept) <= 4
        for leave in ("break", "error", "close"):
            try:
                for moment in trainer.walk(1, 0.1):
                    if moment.event == "get_loss" and leave == "break":
                        break
                    if moment.event == "get_loss" and leave == "error":
                        raise runs.Cut
                    if moment.event == "get_loss":
                        walk = trainer.walk(1)
                        walk.close()
                        break
            except runs.Cut:
                pass
            left = [weakref.ref(o) for o in (trainer.preds, trainer.loss, trainer.opt)]
            del trainer.preds, trainer.loss, trainer.opt
            trainer._last_opt = (None, 0)
            assert [o() for o in left] == [None] * 3
        import greenlet

        paused = [o for o in gc.get_objects() if type(o) is greenlet.greenlet and not o.dead]
        assert paused == [greenlet.getcurrent()] or not paused
    finally:
        gc.enable()


def test_nobody_keeps_the_trainer_of_a_walk_that_is_over():
    trainer = trainer_with()
    for moment in trainer.walk(1):
        if moment.event == "step":
            break
    list(trainer.walk(1))
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


def test_an_error_that_came_out_of_a_walk_holds_nothing():
    "When the error is forgotten, so are the frames that it went through, without the garbage collector"
    keeps = KeepsWeakly()

    def backward(trainer):
        raise runs.Cut

    trainer = Trainer(fresh_batches(), F.mse_loss, optim.SGD, nn.Linear(1, 1), [BasicTrainCB(), keeps])
    gc.collect()
    gc.disable()
    try:
        with trainer.swap("backward", backward):
            try:
                list(trainer.walk(1))
            except runs.Cut as error:
                gone = weakref.ref(error)
        del trainer.preds, trainer.loss
        assert gone() is None and [o() for o in keeps.kept[2:4]] == [None, None]
    finally:
        gc.enable()


# Which call wrote what, and whether it is another value


def test_an_event_tells_its_call_apart_from_what_came_before():
    walk = trainer_with().walk(1, 0.1, valid=False)
    moment = walk.to("backward")
    assert moment.wrote == {"model": "gradients"}
    assert {"preds", "loss", "dl", "lr"} <= set(moment.meanwhile) and float(moment.meanwhile["loss"]) > 0
    walk.close()
    walk = trainer_with().walk(1, 0.1, valid=False, at=["step", "before_batch"])
    moments = walk.take(3)
    assert [o.name for o in moments] == ["the loop", "BasicTrainCB", "the loop"]
    assert set(moments[0].wrote) == {"batch_num", "batch"} and "opt" in moments[0].meanwhile
    assert set(moments[2].wrote) == {"batch_num", "batch", "preds", "loss"}
    assert set(moments[2].meanwhile) == {"model", "n_updates"}
    walk.close()


def test_a_number_written_in_between_is_told_although_the_call_rewrites_it():
    double = SimpleNamespace(name="double", before_backward=lambda t: setattr(t, "loss", t.loss * 2))
    with trainer_with(double).walk(1, 0.1) as walk:
        moment = walk.to("double.before_backward")
        assert float(moment.wrote["loss"]) == pytest.approx(2 * float(moment.meanwhile["loss"]), abs=2e-3)


def test_what_the_loop_wrote_stands_in_a_row_of_its_own():
    _, moments = walked(trainer_with(), 1, 0.1, valid=False)
    table = Moments(o for o in moments if o.batch_num == 0).table()
    rows = [(row["event"], row["callback"], row["wrote"]) for row in table.rows]
    assert ("", "(the loop)", "n_updates: 1") in rows and not any("(n_updates" in row[2] for row in rows)


def test_the_first_moment_of_another_walk_tells_what_it_wrote_alone():
    trainer, _ = walked(trainer_with(), 1)
    with trainer.walk(1) as walk:
        assert "removed" not in next(walk).wrote.values()


@pytest.mark.parametrize("at", [None, "before_epoch"])
def test_weights_that_are_exchanged_are_told(at):
    trainer = trainer_with(EMACB(0.5, warmup=False))
    _, moments = walked(trainer, 1, 0.1, at=at)
    told = [o.wrote.get("model", "") for o in moments if o.name == "EMACB" and o.event == "before_epoch"]
    assert told[0] == "" and told[1].startswith("weights exchanged (by up to 0.")
    if at is None:
        [back] = [o for o in moments if o.name == "EMACB" and o.event == "cleanup_epoch" and not o.training]
        assert back.wrote["model"].startswith("weights exchanged")


def test_values_that_stay_equal_are_said_to():
    def touch(trainer):
        for p in trainer.model.parameters():
            p.grad.mul_(1)

    with trainer_with(SimpleNamespace(name="touch", before_step=touch)).walk(1, at="touch") as walk:
        assert next(walk).wrote == {"model": "gradients (values equal)"}


def test_large_models_are_not_copied():
    trainer = runs.make_trainer([BasicTrainCB()], model=nn.Sequential(nn.Flatten(), nn.Linear(8, 200_000)))
    assert not any(name.startswith("model.") for name in Copies(trainer).kept)


# Leaving here


def test_a_moment_says_what_leaving_would_do():
    tidy = SimpleNamespace(
        name="tidy", cleanup_batch=lambda t: None, after_step=lambda t: None, after_fit=print
    )
    with trainer_with(tidy).walk(1, 0.1) as walk:
        moment = walk.to("backward")
        assert moment.if_left("batch") == (
            "cleanups that run: tidy.cleanup_batch; left out: BasicTrainCB.step, tidy.after_step, "
            "BasicTrainCB.zero_grad; the gradients that are there stay, and the next backward pass adds to "
            "them"
        )
        assert moment.if_left().endswith("BasicTrainCB.zero_grad, tidy.after_fit")
        assert moment.if_left("step") == moment.if_left("backward")
        assert "gradients" not in moment.if_left("step")
        with pytest.raises(LookupError, match="open at this moment are"):
            moment.if_left("predict")
        told, updates = moment.if_left("step"), walk.trainer.n_updates
        assert told == "cleanups that run: none; left out: none"
        walk.throw(CancelStepException("now"))
        walk.to("after_step")
        assert walk.trainer.n_updates == updates + 1, "the steps that follow are made"


@pytest.mark.parametrize("event", ["before_batch", "predict", "after_step", "after_batch", "cleanup_batch"])
@pytest.mark.parametrize("error", [CancelBatchException, CancelEpochException, CancelFitException])
def test_what_is_said_about_leaving_is_what_happens(event, error):
    "Somebody notes each event: after the cancel come the cleanups that were told, and nothing left out"

    class NoteCB:
        name = "note"

        def __init__(self):
            self.seen = []

        def __getattr__(self, name):
            if name not in EVENTS:
                raise AttributeError(name)
            return lambda trainer: self.seen.append(name)

    note = NoteCB()
    trainer = trainer_with(note, n=1)
    with trainer.walk(1, 0.1, valid=False) as walk:
        walk.to(f"note.{event}" if event == "before_batch" else event)
        span = error.__name__.removeprefix("Cancel").removesuffix("Exception").lower()
        told = walk.moment._ways.get(span)
        if told is None:  # The batch is over
            return
        note.seen.clear()
        try:
            walk.throw(error("now"))
        except StopIteration:
            pass
        for _ in walk:
            pass
    left = [o.partition(".")[2] for o in told.left_out if o.startswith("note.")]
    run = [o.partition(".")[2] for o in told.cleanups if o.startswith("note.")]
    assert note.seen[: len(run)] == run and not set(left) & set(note.seen)
    assert {"fit": "after_fit", "epoch": "after_epoch", "batch": "after_batch"}[
        span
    ] in left or event == "after_batch"
