"What `adapt` takes, whichever library it comes from, and what it leaves as it was."

from types import SimpleNamespace

import pytest
from torch import optim

from waiting import InsideCB, RefuseToWait
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import Order
from isaac_loop.inspection.loop_tables import summarize_callbacks  # noqa: F401  A method of the trainer
from isaac_loop.interop.adapters import adapt
from isaac_loop.state.store import CheckpointStore
from foreign import BATCHES, Nemo010, ours, Plain, same_weights, silent


# pytorch-accelerated


@pytest.fixture(scope="module")
def pta():
    return pytest.importorskip("pytorch_accelerated", reason="pytorch-accelerated is not installed")


# What `adapt` takes, and what it leaves as it was


class MistypedAccelerated:
    def on_training_run_start(self, trainer, **kwargs):
        "Nothing"

    def on_train_step_ends(self, trainer, **kwargs):
        "Never"


class Keras:
    def on_predict_begin(self, logs=None):
        "Never"


def test_what_follows_no_protocol_is_refused_with_those_that_there_are():
    class Near:
        def on_train_loop_registraton(self):
            "Never"

    with pytest.raises(
        TypeError,
        match="`Near` follows no protocol.*Did you mean `on_train_loop_registration`.*"
        "pytorch-accelerated.*plain callables",
    ):
        adapt(Near())
    with pytest.raises(
        TypeError, match=r"`Keras` follows no protocol.*\['on_predict_begin'\].*Known are AIToolbox"
    ):
        adapt(Keras())
    for wrong in (3, "abc", None, object()):
        with pytest.raises(TypeError, match="follows no protocol"):
            adapt(wrong)
    with pytest.raises(TypeError, match="`MetricsCB` answers our own events"):
        adapt(MetricsCB())

    def after_batch(trainer):
        "Ours"

    with pytest.raises(TypeError, match="`after_batch` answers our own events"):
        adapt(after_batch)
    with pytest.raises(TypeError, match="has been adapted already"):
        adapt(adapt(Plain()))


def test_a_foreign_callback_that_was_not_adapted_is_told_about_it(pta):
    "Those of pytorch-accelerated answer any question with an error of their own, which has no text"
    from pytorch_accelerated.callbacks import TrainerCallback

    with pytest.raises(Exception) as e:
        ours(TrainerCallback())
    assert any("`isaac_loop.interop.adapt" in o for o in e.value.__notes__)
    with pytest.raises(ValueError, match="has no method named after an event.*`isaac_loop.interop.adapt"):
        ours(ToolboxNotes())
    with pytest.raises(ValueError) as e:
        ours(SimpleNamespace(on_train=True))
    assert "adapt" not in str(e.value)


def test_a_method_that_is_nearly_an_event_is_named():
    with pytest.warns(
        UserWarning,
        match="`MistypedAccelerated.on_train_step_ends` is no event of pytorch-accelerated.*"
        "Did you mean `on_train_step_end`",
    ):
        adapt(MistypedAccelerated())


def test_foreign_callbacks_stay_out_of_runs_on_the_side():
    "Their order is above that of what records; predictions in between wake nobody"
    plain, nemo = Plain(), Nemo010()
    trainer = ours(adapt(plain), adapt(nemo), n_epochs=1)
    before = len(plain.calls), len(nemo.seen)
    trainer.get_preds()
    assert before == (len(plain.calls), len(nemo.seen)) and all(
        o.order > Order.RECORD for o in trainer.callbacks[1:]
    )
    with trainer.snapshot():
        silent(trainer.fit, 1)
    assert "Plain" in str(trainer.summarize_callbacks())


@pytest.mark.shows("PTA-15")
def test_callbacks_may_come_and_go_while_training_runs():
    "One that comes is told that the run starts, and one that goes leaves the others at work"

    class Accelerated:
        def __init__(self):
            self.seen = []

        def on_training_run_start(self, trainer):
            self.seen.append("start")

        def on_train_step_end(self, trainer, batch_output, batch, step):
            self.seen.append(step)

    a, b = Accelerated(), Accelerated()

    class ChangesCB:
        on_valid = False

        def after_batch(self, trainer):
            if trainer.batch_num == 1:
                trainer.add_callback(adapt(b, name="b"))
            if trainer.batch_num == 3:
                trainer.remove_callback("a")

    mine = ours(adapt(a, name="a"), ChangesCB(), n_epochs=1)
    assert a.seen == ["start", 0, 1, 2, 3] and b.seen == ["start", 2, 3, 4]
    assert len(mine.b.facade.run_history.get_metric_values("train_loss_epoch")) == 1


def test_adapters_wait_for_nothing_in_a_batch():
    "Losses stay on the device until an epoch ends"

    class Accelerated:
        def on_train_step_end(self, trainer, batch_output, batch, step):
            "Nothing"

        def on_eval_step_end(self, trainer, batch_output, batch):
            "Nothing"

    class Toolbox(ToolboxNotes):
        def on_batch_end(self):
            "Nothing"

        def on_after_gradient_update(self, optimizer_idx):
            "Nothing"

    nemo = Nemo010()
    mode = RefuseToWait()
    with mode:
        mine = ours(adapt(Accelerated()), adapt(Toolbox()), adapt(nemo), InsideCB(mode))
    assert len(nemo.seen) > 30 and same_weights(mine.model, ours().model)


def test_toolbox_callbacks_sleep_in_a_fit_that_only_validates():
    "Their loop has no such run, so they are not even registered; the next fit that trains is one"
    seen = []

    class Toolbox(ToolboxNotes):
        def on_train_begin(self):
            seen.append("begin")

        def on_epoch_end(self):
            seen.append("epoch")

        def on_train_end(self):
            seen.append("end")

    callback = Toolbox()
    ours(adapt(callback), train=False, n_epochs=1)
    assert seen == [] and not hasattr(callback, "train_loop_obj")
    trainer = ours(adapt(callback), train=False, n_epochs=1)
    silent(trainer.fit, 2)
    assert seen == ["begin", "epoch", "epoch", "end"] and callback.train_loop_obj.epoch == 1


def test_a_scheduler_of_the_toolbox_sleeps_in_a_fit_that_only_validates():
    "It wants an optimizer when it is registered, and there is none"

    class Scheduler(ToolboxNotes):
        def register_train_loop_object(self, loop):
            self.scheduler = optim.lr_scheduler.StepLR(loop.optimizer, 1)
            return super().register_train_loop_object(loop)

    scheduler = Scheduler()
    trainer = ours(adapt(scheduler), train=False, n_epochs=1)
    silent(trainer.fit, 1)
    assert scheduler.scheduler.optimizer is trainer.opt


def test_what_is_not_there_yet_is_not_said_to_be_unknown():
    def ask(trainer):
        return trainer.optimizer

    with pytest.raises(
        AttributeError, match="asked its trainer for `optimizer`, which is not there now"
    ) as e:
        ours(adapt(SimpleNamespace(on_evaluation_run_start=ask)), train=False, n_epochs=1)
    assert "Did you mean" not in str(e.value)


def test_an_error_in_a_foreign_callback_says_whose_it_is_and_where():
    class Fails:
        def on_train_step_end(self, trainer, **kwargs):
            raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError) as e:
        ours(adapt(Fails()))
    assert any("`Fails.after_get_loss` at epoch 0, batch 0" in o for o in e.value.__notes__)


@pytest.mark.shows("NEMO-07")
def test_functions_may_stand_for_the_events_of_nemo():
    "There a decorator makes a callback of a function; here a namespace does"
    steps = []
    ours(adapt(SimpleNamespace(on_step_end=lambda state: steps.append(state.step)), name="steps"), n_epochs=1)
    assert steps == list(range(5))


def test_an_own_order_and_a_class_are_taken():
    assert adapt(Plain, order=77).order == 77 and adapt(Plain).foreign.calls == []


class AcceleratedStops:
    def __init__(self, patience):
        self.patience, self.best, self.n_bad, self.steps = patience, None, 0, []

    def on_train_step_end(self, trainer, batch_output, batch, step):
        self.steps.append(step)

    def on_training_run_epoch_end(self, trainer):
        loss = trainer.run_history.get_latest_metric("eval_loss_epoch")
        self.n_bad = 0 if self.best is None or loss < self.best - 0.1 else self.n_bad + 1
        self.best = loss if self.n_bad == 0 else self.best
        if self.n_bad >= self.patience:
            raise type("StopTrainingError", (Exception,), {})("enough")


class ToolboxNotes:
    execution_order, callback_name = 99, "notes"

    def register_train_loop_object(self, loop):
        self.train_loop_obj = loop
        return self

    def on_epoch_end(self):
        self.notes = (
            *getattr(self, "notes", ()),
            self.train_loop_obj.total_iteration_idx,
            *self.train_loop_obj.train_history["accumulated_loss"],
        )


class PlainNotes:
    def __init__(self):
        self.seen = []

    def __call__(self, epoch, step, measures, trainer):
        self.seen.append([epoch, step, measures["loss"], measures["gradient_norm"]])


class NemoNotes:
    def __init__(self):
        self.seen = []

    def on_iteration_start(self, state):
        self.seen.append(state.step)


def test_a_run_with_foreign_callbacks_goes_on_at_any_batch_as_if_it_had_not_stopped(tmp_path):
    "What they have counted is saved with ours; settings are not"

    def make(*extra):
        foreign = AcceleratedStops(2), ToolboxNotes(), PlainNotes(), NemoNotes()
        trainer = ours(
            *(adapt(o, test_step=2) for o in foreign), *extra, dls=DataLoaders(*BATCHES), n_epochs=9
        )
        return trainer, [
            {k: v for k, v in vars(o).items() if k not in ("train_loop_obj", "action", "_registered_tensors")}
            for o in foreign
        ]

    whole, notes = make()
    assert whole.stop_reason == "enough" and whole.n_updates % 5 == 0 and 5 < whole.n_updates < 45
    make(CheckpointCB(tmp_path / "all", every=1, keep_last=None))
    found = CheckpointStore(tmp_path / "all", read_only=True).list()
    assert len(found) == whole.n_updates > 8
    for o in found[3:9:2]:
        again, after = make(CheckpointCB(tmp_path / f"from {o.step}", every=1000, resume=o.path))
        assert same_weights(whole.model, again.model) and after == notes


class Logger010:
    "In the manner of 0.10's own loggers: the action fills `_registered_tensors` and `learning_rate`"

    def __init__(self):
        self._registered_tensors, self.rows = {}, []

    @property
    def registered_tensors(self):
        return self._registered_tensors

    def on_iteration_end(self):
        self.rows.append(
            (self.registered_tensors["loss"].item(), self.learning_rate, "input_0" in self.registered_tensors)
        )


@pytest.mark.shows("NEMO-02", "NEMO-04")
def test_nemo_loggers_get_their_tensors_and_the_rate():
    nemo, losses = Logger010(), []

    class LossCB:
        on_valid = False

        def after_step(self, trainer):
            losses.append((trainer.loss.item(), 0.5, True))

    trainer = ours(adapt(nemo), LossCB(), n_epochs=2)
    assert nemo.rows == losses and len(losses) == 10
    assert "registered" not in str(trainer.Logger010.state_dict()["foreign"])
    with pytest.raises(KeyError, match="no tensor `los`.*Did you mean `loss`") as e:
        nemo.registered_tensors["los"]
    assert not str(e.value).startswith('"')

    class OwnRate(Logger010):
        learning_rate = 7

    own = OwnRate()
    ours(adapt(own), n_epochs=1)
    assert {o[1] for o in own.rows} == {7}


@pytest.mark.shows("NEMO-07")
def test_few_events_and_functions_are_enough_for_nemo():
    class Few:
        seen = []

        def on_train_start(self, state):
            self.seen.append("start")

        def on_batch_end(self, state):
            self.seen.append(state.step)

    ours(adapt(Few()), n_epochs=1)
    assert Few.seen == ["start", 0, 1, 2, 3, 4]
    steps, ends = [], []

    def on_step_end(state):
        steps.append(state.step)

    def on_epoch_end(state):
        ends.append(state.epoch)

    trainer = ours(adapt(on_step_end), adapt(on_epoch_end), n_epochs=2)
    assert steps == list(range(10)) and ends == [0, 1] and trainer.on_step_end.name == "on_step_end"
    calls = []

    def on_batch_end(epoch, step, measures, trainer):
        calls.append(step)

    ours(adapt(on_batch_end), n_epochs=1)
    assert calls == list(range(5))

    class TwoArguments:
        def on_epoch_end(self, epoch, logs=None):
            "Another library's"

    with pytest.raises(TypeError, match="follows no protocol"):
        adapt(TwoArguments())


def test_measures_have_get_like_any_dict():
    "Sonosco's callbacks ask for `val_loss` at every batch, and it is there only at the last"
    found = []

    def ask(epoch, step, measures, trainer):
        found.append((measures.get("val_loss"), measures.get("x", 3)))

    ours(adapt(ask), n_epochs=1)
    assert [o[0] is None for o in found] == [True] * 4 + [False] and {o[1] for o in found} == {3}
