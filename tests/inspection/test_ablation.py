"""What an ablation finds is compared with what was planted: callbacks that change one thing at one event,
callbacks that only watch, and a trainer of which nothing may have changed afterwards."""

import random

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import (
    AccumulationCB,
    BasicTrainCB,
    ClipGradCB,
    CoreCBs,
    DataLoaders,
    EMACB,
    GradientStatsCB,
    LimitCB,
    MetricsCB,
    MixUpCB,
    NBatchCB,
    NonFiniteCB,
    OneCycleSchedulerCB,
    ProgressCB,
    RecorderCB,
    Trainer,
    replaces,
    set_seed,
)
from isaac_loop.loop.events import CancelBatchException, CancelFitException
from observing import observe, random_states, unchanged
from runs import everything, fit, make_trainer
from test_black_box import Duel, Stream, HidesState


def small_trainer(*cbs, n=3, cls=Trainer):
    set_seed(4)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(n)]
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2))
    return cls(DataLoaders(batches, batches[:2]), F.mse_loss, optim.Adam, model, [BasicTrainCB(), *cbs])


@torch.no_grad()
def scale(x):
    x.mul_(1.001)


CHANGES = {
    "weights": lambda t: scale(t.model[0].weight),
    "buffers": lambda t: scale(t.model[1].running_var),
    "gradients": lambda t: scale(t.model[0].bias.grad),
    "predictions": lambda t: setattr(t, "preds", t.preds * 1.001),
    "loss": lambda t: setattr(t, "loss", t.loss * 1.001),
    "batch": lambda t: scale(t.batch[0]),
    "optimizer": lambda t: t.opt.param_groups[0].update(lr=0.02),
    "random numbers": lambda t: torch.rand(1),
    "model settings": lambda t: t.model[2].eval(),
    "attributes": lambda t: setattr(t, "mine", 3),
    "history": lambda t: t.history.write(mine=1),
}
AT = {
    "weights": "before_fit before_predict after_step cleanup_batch",
    "buffers": "before_batch after_epoch",
    "gradients": "after_backward before_step",
    "predictions": "after_predict before_get_loss",
    "loss": "after_get_loss before_backward",
    "batch": "before_batch",
    "optimizer": "before_fit before_step after_batch",
    "random numbers": "before_fit before_epoch before_predict after_batch",
    "model settings": "before_batch",
    "attributes": "before_epoch cleanup_step",
    "history": "after_batch",
}
PLANTED = [(kind, event) for kind, events in AT.items() for event in events.split()]


class Planted:
    "Changes one thing at one event, in the second training batch if the event is one of a batch"

    def __init__(self, kind, event):
        self.kind, self.in_batch = kind, not event.endswith(("_fit", "_epoch"))
        setattr(self, event, self.act)

    def act(self, trainer):
        if not self.in_batch or (trainer.training and trainer.batch_num == 1):
            CHANGES[self.kind](trainer)


@pytest.mark.parametrize("kind, event", PLANTED)
def test_the_first_difference_is_what_was_planted_where_it_was_planted(kind, event):
    found = small_trainer(Planted(kind, event)).ablate("Planted", 3)
    first = found.first
    of = {"_fit": "", "poch": " of epoch 0"}.get(event[-4:], " of batch 1")
    assert (first["kind"], first["first at"]) == (kind, f"`{event}`{of}")
    assert str(found).startswith("Without `Planted` the first difference is in `" + event)
    assert first["others"] in (0, 1, 2)


def test_the_amount_is_the_largest_difference_and_its_tensor_is_named():
    class Shifts:
        @torch.no_grad()
        def after_step(self, trainer):
            trainer.model[0].weight[1, 2] += 0.25
            trainer.model[3].bias += 0.125

    found = small_trainer(Shifts()).ablate(Shifts, 2)
    assert found.first["value"] == "model.0.weight" and found.first["apart"] == "0.25"
    assert found.first["others"] == 1
    assert "by up to 0.25" in str(found)


WATCHERS = [
    lambda: ProgressCB("plain"),
    lambda: NonFiniteCB(),
    lambda: GradientStatsCB(),
    lambda: LimitCB(updates=1000),
]


@pytest.mark.parametrize("make", WATCHERS)
def test_who_only_watches_shows_no_difference(make):
    callback = make()
    found = small_trainer(MetricsCB(show=False), callback).ablate(callback, 3)
    assert found.first is None or found.trains_the_same
    if isinstance(callback, (ProgressCB, NonFiniteCB, LimitCB)):
        name = type(callback).__name__
        assert str(found).startswith(f"No difference in these 3 batches: in them `{name}` only watches.")


@pytest.mark.parametrize("make", [lambda: MetricsCB(show=False), RecorderCB])
def test_who_records_trains_the_same(make):
    callback = make()
    found = small_trainer(callback).ablate(callback, 3)
    assert found.trains_the_same and found.first["kind"] == "history"
    assert "What is trained is the same in these 3 batches" in str(found)
    assert "is there only with it" in str(found)


def test_ours_that_train_otherwise_are_found_where_they_begin_to():
    trainer = small_trainer(
        ClipGradCB(max_norm=0.01), AccumulationCB(2), EMACB(0.5), OneCycleSchedulerCB(), n=4
    )
    firsts = {name: trainer.ablate(name, 4).first for name in ("ClipGradCB", "AccumulationCB", "EMACB")}
    assert firsts["ClipGradCB"]["first at"] == "`before_step` of batch 1"
    assert (firsts["AccumulationCB"]["kind"], firsts["AccumulationCB"]["value"]) == (
        "attributes",
        "updates_per_epoch",
    )
    assert firsts["EMACB"]["first at"] == "`before_epoch` of epoch 0 (validation)"
    found = trainer.ablate("OneCycleSchedulerCB", 2)
    assert "opt.param_groups" in found.first["value"]
    kinds = [row["kind"] for row in trainer.ablate("AccumulationCB", 4).rows.rows]
    assert "events" in kinds, "a step is cancelled only with it"
    assert small_trainer().ablate(MixUpCB, 2, callbacks=MixUpCB()).first["kind"] in (
        "batch",
        "random numbers",
    )


@pytest.mark.parametrize("name", ["AccumulationCB", "EvaluatorCB", "HidesState", "ProgressCB", "KeepBestCB"])
def test_everything_is_put_back_bit_for_bit(name):
    trainer = fit(make_trainer([*everything(), HidesState()]), 1)
    loaders = (
        trainer.dls.train,
        trainer.dls.valid,
    )  # They are where they were; what they are made of inside may be anew
    before, dice, places = observe(trainer, loaders), random_states(), [dl.state_dict() for dl in loaders]
    trainer.ablate(name, 2)
    unchanged(trainer, before, loaders)
    assert random_states() == dice and [dl.state_dict() for dl in loaders] == places


def test_also_when_a_run_fails_or_is_interrupted():
    class Fails:
        error = None

        def after_backward(self, trainer):
            if trainer.batch_num == 1:
                raise self.error

    trainer = small_trainer(EMACB(), Fails())
    for error in (ValueError("as planned"), KeyboardInterrupt()):
        trainer.Fails.error = error
        before = observe(trainer, skip=[error])
        with pytest.raises(type(error)):
            trainer.ablate("EMACB", 3)
        unchanged(trainer, before, skip=[error])


def test_a_run_that_fails_without_it_says_so():
    class Makes:
        def before_batch(self, trainer):
            trainer.scale = 2.0

    class Uses:
        def after_predict(self, trainer):
            trainer.preds = trainer.preds * trainer.scale

    found = small_trainer(Makes(), Uses()).ablate("Makes", 3)
    assert found.error.startswith("AttributeError") and "Without `Makes` the run fails" in str(found)
    assert "Uses.after_predict" in found.error
    assert "scale" in [row["value"] for row in found.rows.rows]


def test_an_event_that_is_cancelled_only_with_it_is_a_difference():
    class Leaves:
        def after_predict(self, trainer):
            if trainer.batch_num == 1:
                raise CancelBatchException("not this one")

    found = small_trainer(Leaves()).ablate("Leaves", 3)
    assert found.first["kind"] == "events" and "comes to its end only without it" in str(found)
    assert found.first["first at"] == "`after_predict` of batch 1"


def test_a_group_a_class_an_object_a_function_and_a_guest_can_be_named():
    group = CoreCBs(train=BasicTrainCB())
    trainer = small_trainer(EMACB())
    for callback in ("EMACB", EMACB, trainer.EMACB):
        assert trainer.ablate(callback, 1).names == ["EMACB"]

    def before_step(trainer):
        "Nothing"

    assert trainer.ablate(before_step, 1, callbacks=before_step).first is None

    class Two:
        def __init__(self):
            self.callbacks = [NonFiniteCB(), MetricsCB(show=False)]

    found = trainer.ablate("Two", 1, callbacks=[two := Two()])
    assert found.names == ["Two", "NonFiniteCB", "MetricsCB"] and found.trains_the_same
    assert group is not two


def test_what_cannot_be_done_is_refused_in_words():
    trainer = small_trainer(EMACB())
    for callback, error, words in (
        (
            "BasicTrainCB",
            ValueError,
            "alone does `predict`, `get_loss`, `backward`, `step`, `zero_grad` here",
        ),
        ("EMA", LookupError, "Did you mean `EMACB`"),
        (ProgressCB(), LookupError, "no callback `ProgressCB`"),
    ):
        with pytest.raises(error, match=words):
            trainer.ablate(callback)
    for n in (0, 1.5, "many"):
        with pytest.raises((ValueError, TypeError), match="n_batches"):
            trainer.ablate("EMACB", n)

    class OwnStep:
        @replaces
        def step(self, trainer):
            trainer.opt.step()

    assert small_trainer(OwnStep()).ablate("OwnStep", 2).first is None, "another one does the step without it"


def test_what_differs_between_two_equal_runs_is_not_taken_for_its_work():
    class Clock:
        ticks = 0

        def after_batch(self, trainer):
            trainer.now = id(object()) + random.SystemRandom().random()

    found = small_trainer(Clock(), EMACB()).ablate("EMACB", 2)
    assert "now" in found.unsteady and all(row["value"] != "now" for row in found.rows.rows)
    assert "Not compared is what differs between two equal runs: `now`" in str(found)


def test_batches_that_are_changed_in_place_stay_as_they_were():
    class Grows:
        def before_batch(self, trainer):
            trainer.batch[0].mul_(2)

    trainer = small_trainer(Grows(), MetricsCB(show=False))
    before = [x.clone() for x, _ in trainer.dls.train]
    assert trainer.ablate("MetricsCB", 3).trains_the_same
    assert all(torch.equal(x, was) for (x, _), was in zip(trainer.dls.train, before))


def test_more_batches_than_an_epoch_has_go_on_in_the_next():
    seen = []

    class Late:
        def after_step(self, trainer):
            seen.append((trainer.epoch, trainer.batch_num))
            if trainer.epoch == 1:
                CHANGES["weights"](trainer)

    found = small_trainer(Late()).ablate("Late", 5)
    assert found.first["first at"] == "`after_step` of epoch 1, batch 0"
    assert max(seen) == (1, 1) and found.n_batches == 5
    assert small_trainer(Late()).ablate("Late", 3).first is None
    assert small_trainer(Late()).ablate("Late", 50, n_epochs=1).n_batches == 3


def test_streams_own_batches_and_several_optimizers():
    set_seed(5)
    stream = Stream(lambda x, y: (x, y), 6)
    trainer = Trainer(
        DataLoaders(stream, stream),
        F.cross_entropy,
        optim.SGD,
        nn.Linear(8, 3),
        [BasicTrainCB(), HidesState()],
    )
    assert trainer.ablate("HidesState", 4).first["first at"] == "`before_batch` of batch 0"

    class Judge:
        def judge(self, trainer):
            if trainer.batch_num == 2 and trainer.training:
                scale(trainer.critic[0].bias)

    set_seed(3)
    rows = [(torch.randn(4, 8),) for _ in range(6)]
    trainer = Duel(
        DataLoaders(rows, rows[:2]), None, optim.Adam, nn.Linear(8, 8), [Judge(), MetricsCB(show=False)]
    )
    found = trainer.ablate("Judge", 4)
    assert (found.first["value"], found.first["first at"]) == ("critic.0.bias", "`judge` of batch 2")


def test_it_takes_the_arguments_of_fit():
    trainer = small_trainer(Planted("weights", "after_step"))
    assert trainer.ablate("Planted", 2, train=False).first is None
    found = trainer.ablate("Planted", 2, 1, 0.5, valid=False)
    assert found.first["first at"] == "`after_step` of batch 1"
    fit(trainer, 1)
    assert trainer.ablate("Planted", 2, keep_opt=True).first["kind"] == "weights"
    assert trainer.ablate(NBatchCB, 3, callbacks=NBatchCB(1)).n_batches == 3


def test_tables_are_shown_as_text_and_as_markdown():
    found = small_trainer(Planted("weights", "after_step")).ablate("Planted", 2)
    assert "| kind | first at | value | with | without | apart | others |" in found._repr_markdown_()
    assert "model.0.weight" in str(found) and repr(found) == str(found)


class Doubles:
    def before_step(self, trainer):
        trainer.model[0].weight.grad.mul_(2)


def test_where_nothing_was_compared_nobody_is_said_to_watch():
    trainer = small_trainer(Doubles())
    with pytest.raises(ValueError, match="nothing was compared.*n_epochs"):
        trainer.ablate("Doubles", 3, n_epochs=0)

    def before_fit(trainer):
        raise CancelFitException("not today")

    with pytest.raises(ValueError, match="nothing was compared"):
        trainer.ablate("Doubles", 3, callbacks=before_fit)
    for nobody in (None, [], [None]):
        with pytest.raises(ValueError, match="nobody is left out"):
            trainer.ablate(nobody)


def test_what_is_said_is_said_of_the_batches_that_were_run():
    trainer = small_trainer(Doubles(), NonFiniteCB())
    found = trainer.ablate("Doubles", 3, train=False)
    assert found.n_batches == 2
    assert str(found) == "No difference in these 2 batches of validation: in them `Doubles` only watches."
    assert "No difference in this batch: in it `NonFiniteCB` only" in str(trainer.ablate("NonFiniteCB", 1))

    class Late:
        def after_step(self, trainer):
            if trainer.batch_num == 2:
                CHANGES["weights"](trainer)

    assert str(small_trainer(Late()).ablate("Late", 2)).startswith(
        "No difference in these 2 batches: in them"
    )


def test_another_object_of_the_same_name_is_told_from_the_one_that_is_there():
    trainer = small_trainer(ClipGradCB(0.1))
    for leave_out in (trainer.ablate, trainer.remove_callbacks):
        with pytest.raises(LookupError, match="This `ClipGradCB` is not in the loop.*`trainer.ClipGradCB`"):
            leave_out(ClipGradCB(0.1))


def test_rows_of_validation_are_no_nan_in_what_an_ablation_shows():
    def before_step(trainer):
        scale(trainer.model[0].bias.grad)

    trainer = small_trainer(MetricsCB(show=False), before_step, GradientStatsCB())
    trainer.fit(1, 0.01)
    rows = [
        row
        for row in trainer.ablate("before_step", 2).rows.rows
        if row["value"].startswith("history.batches")
    ]
    assert len(rows) == 1 and "nan" not in rows[0]["with"] + rows[0]["without"]
    assert float(rows[0]["apart"]) > 0


class PhasesTrainer(Trainer):
    "Two training passes in each epoch"

    def one_epoch(self, training):
        for self.phase in ("wake", "sleep") if training else ("wake",):
            super().one_epoch(training)


class SleepCB:
    def after_get_loss(self, trainer):
        if trainer.phase == "sleep":
            trainer.loss = trainer.loss * 0.5


@pytest.mark.parametrize("n, differs", [(2, False), (3, False), (4, True), (6, True), (7, True), (9, True)])
def test_an_epoch_of_several_training_passes_is_compared_as_far_as_the_batches_go(n, differs):
    found = small_trainer(SleepCB(), cls=PhasesTrainer).ablate("SleepCB", n)
    assert bool(found.first) == differs and found.n_batches == n
    assert not differs or "`loss`" in str(found)
