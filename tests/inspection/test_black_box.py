"""A run that fails is run again from what a black box kept: every number at every moment, until the failure, is
compared with what a witness saw in the run itself, and a run with a box with one that had none."""

import os
import random
import subprocess
import sys
import warnings
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import (
    BasicTrainCB,
    BlackBoxCB,
    CheckpointCB,
    DataLoaders,
    EMACB,
    InterruptCB,
    MetricsCB,
    MomentumTrainCB,
    NonFiniteStopCB,
    ProgressCB,
    RewindCB,
    Trainer,
    set_seed,
)
from isaac_loop.loop.events import CancelBatchException, CancelEpochException, CancelFitException, Order
from isaac_loop.state.errors import CheckpointCorrupt, ResumeMismatch
from observing import random_states
from places import ROOT
from runs import Cut, CutCB, Rows, callbacks, differences, everything, fit, make_loaders, make_model, make_trainer, same, tree

MOMENTS = (
    "after_predict after_get_loss after_backward before_step after_step after_batch cleanup_batch "
    "before_epoch after_epoch log".split()
)


class Witness:
    "Notes at every moment all that a run is made of"

    name, order, stateless = "witness", Order.LAST, True

    def __init__(self):
        self.seen = {}
        for event in MOMENTS:
            setattr(self, event, lambda trainer, event=event: self.note(trainer, event))

    def note(self, trainer, event):
        grads = [p.grad for p in trainer.model.parameters()] if hasattr(trainer.model, "parameters") else []
        opts = {k: o.state_dict() for k, o in vars(trainer).items() if isinstance(o, optim.Optimizer)}
        timed = "elapsed", "eval_seconds"
        rows = [{k: v for k, v in row.items() if k not in timed} for row in trainer.history]
        found = dict(weights=trainer.model.state_dict(), grads=grads, opts=opts, random=hash(str(random_states())))
        found |= dict(rows=rows, n_updates=trainer.n_updates, lr=trainer.lr)
        if "batch" in event and event != "before_epoch" or event in MOMENTS[:5]:
            found |= dict(preds=getattr(trainer, "preds", None), loss=getattr(trainer, "loss", None))
        place = trainer.epoch, trainer.training, vars(trainer).get("batch_num"), event
        self.seen[place] = tree(found)


def run(trainer, box, n_epochs=3, lr=0.02, **kwargs):
    "Let a run end as it will; what the witness saw"
    witness = Witness()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fit(trainer, n_epochs, lr, callbacks=[box, witness], **kwargs)
        except (Cut, ValueError, KeyboardInterrupt):
            pass
    return witness.seen


def replayed(trainer, **kwargs):
    "The replay, and what a new witness saw in it"
    witness = Witness()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer.replay(witness, below=Order.LAST, **kwargs), witness.seen


def check(trainer, seen, **kwargs):
    "Assert that a replay sees what was seen"
    replay, again = replayed(trainer, **kwargs)
    assert replay.same, str(replay)
    assert again and set(again) <= set(seen)
    if trainer._black_box.kept.batch is not None:
        again.pop(next(iter(again)))  # The beginning of a pass that was begun in its middle
    for place, found in again.items():
        assert not differences(seen[place], found), (place, differences(seen[place], found))
    return replay, again


class Fails:
    "Fails in a batch of an epoch, at an event"

    def __init__(self, event, epoch, batch, training=True):
        self.place = epoch, batch, training
        setattr(self, event, self._look)

    def _look(self, trainer):
        if (trainer.epoch, trainer.batch_num, trainer.training) == self.place:
            raise Cut("as planned")


class Spoils:
    "Makes the loss NaN in a batch of an epoch"

    def __init__(self, epoch, batch, training=True):
        self.place = epoch, batch, training

    def before_predict(self, trainer):
        if (trainer.epoch, trainer.batch_num, trainer.training) == self.place:
            trainer.batch[0][0, 0] = float("nan")


class HidesState:
    "Counts, draws and scales in place without telling anybody"

    def before_fit(self, trainer):
        self.n, self.own = 0, random.Random(3)
        self.memory = torch.zeros(8)

    def before_batch(self, trainer):
        self.n += 1
        x = trainer.batch[0]
        x.mul_(1 + 0.01 * self.n * self.own.random()).add_(torch.rand(()))
        self.memory = self.memory * 0.9 + x.mean(0)
        x.add_(self.memory * 0.01)


class TellsState:
    "The same with a state"

    def before_fit(self, trainer):
        self.shift = 0.0

    def state_dict(self):
        return dict(shift=self.shift)

    def load_state_dict(self, state):
        self.shift = state["shift"]

    def after_get_loss(self, trainer):
        self.shift += float(np.random.normal(0, 0.1)) + random.gauss(0, 0.1)
        trainer.loss = trainer.loss * (1 + 0.1 * abs(self.shift))


def whole():
    return [*everything(), HidesState(), TellsState()]


# ---- the law


@pytest.mark.shows("U06")
@pytest.mark.parametrize("n", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("place", [(0, 0), (0, 2), (1, 0), (1, 4), (2, 6)])
def test_a_run_that_failed_in_any_batch_is_run_again_bit_for_bit(n, place):
    trainer, box = make_trainer([*whole(), Fails("after_backward", *place)]), BlackBoxCB(n)
    seen = run(trainer, box)
    replay, again = check(trainer, seen)
    assert isinstance(replay.error, Cut)
    assert len(again) > 1 and len(box.batches) <= 2 * n
    last = [o for o in seen if o[2] is not None][-1]
    assert last in again


@pytest.mark.parametrize("n", [1, 4, 100])
@pytest.mark.parametrize("place", [(0, 1), (1, 3), (2, 0)])
def test_a_nan_is_met_again_before_the_step(n, place):
    trainer, box = make_trainer([*whole(), Spoils(*place)]), BlackBoxCB(n)
    seen = run(trainer, box)
    replay, again = check(trainer, seen)
    assert (trainer.epoch, trainer.batch_num) == place and trainer.loss.isnan()
    assert (*place[:1], True, place[1], "after_backward") in again
    assert not any(o[:3] == (place[0], True, place[1]) and o[3] == "after_step" for o in again)
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@pytest.mark.parametrize("event", "before_batch predict after_get_loss step after_batch cleanup_batch".split())
@pytest.mark.parametrize("training", [True, False])
def test_an_error_at_any_event_of_either_pass_comes_again(event, training):
    if event == "step" and not training:
        return
    trainer = make_trainer([*whole(), Fails(event, 1, 2 if event == "step" else 1, training)])
    seen = run(trainer, BlackBoxCB(3))
    replay, _ = check(trainer, seen)
    assert isinstance(replay.error, Cut)


class FailsBetween:
    "Fails at an event of the second epoch's validation, or behind it"

    def __init__(self, event):
        setattr(self, event, self._look)

    def _look(self, trainer):
        if trainer.epoch == 1 and not trainer.plan.training:
            raise Cut("as planned")


@pytest.mark.parametrize("n", [3, 100])
@pytest.mark.parametrize("event", ["before_epoch", "after_epoch", "cleanup_epoch", "log", "after_fit"])
def test_an_error_between_passes_comes_again(event, n):
    trainer = make_trainer([*whole(), FailsBetween(event)])
    seen = run(trainer, BlackBoxCB(n), 2)
    replay, again = check(trainer, seen)
    assert isinstance(replay.error, Cut)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_validation_is_replayed_from_its_middle_with_an_average_in_the_model(n):
    dls = DataLoaders(make_loaders().train, [(x, y) for x, y in make_loaders(72, 8).train])
    cbs = [BasicTrainCB(), MetricsCB(), EMACB(0.5), HidesState(), Fails("after_predict", 1, 7, False)]
    trainer, box = make_trainer(cbs, dls), BlackBoxCB(n)
    seen = run(trainer, box)
    kept = [o.number for o in box.kept.passes[-1].batches]
    assert kept[-1] == 7 and len(kept) <= n
    check(trainer, seen)


def test_a_later_batch_than_the_failure_is_not_kept_and_an_earlier_one_can_be_chosen():
    trainer, box = make_trainer([*whole(), Spoils(1, 4)]), BlackBoxCB(100)
    seen = run(trainer, box)
    replay, again = check(trainer, seen, to=2)
    assert (trainer.epoch, trainer.batch_num) == (1, 2)
    check(trainer, seen, to=(0, 3))
    assert (trainer.epoch, trainer.batch_num) == (0, 3)
    check(trainer, seen, to=(0, "validation", 1))
    check(trainer, seen, to=(1, 1), stop="after_predict")
    with pytest.raises(LookupError, match="kept are epoch 0"):
        trainer.replay(to=5)


def test_a_replay_can_be_repeated_and_leaves_what_was_kept():
    trainer = make_trainer([*whole(), Fails("after_step", 1, 5)])
    seen = run(trainer, BlackBoxCB(4))
    for _ in range(3):
        check(trainer, seen)


def test_the_trainer_is_left_as_the_failed_run_had_left_it():
    trainer = make_trainer([*whole(), Fails("after_backward", 1, 5)])
    run(trainer, BlackBoxCB(4))
    then, loss, preds = tree([trainer.model.state_dict(), trainer.opt.state_dict()]), trainer.loss, trainer.preds
    replay, _ = replayed(trainer)
    assert tree([trainer.model.state_dict(), trainer.opt.state_dict()]) == then
    assert tree([trainer.loss, trainer.preds]) == tree([loss, preds])
    assert (trainer.epoch, trainer.batch_num) == (1, 5)


def test_a_snapshot_around_a_replay_puts_everything_back():
    trainer = make_trainer([*whole()])
    run(trainer, BlackBoxCB(4))
    then, rows, dice = tree(trainer.model.state_dict()), list(trainer.history), random_states()
    with trainer.snapshot():
        replayed(trainer, to=(2, 5))
    assert tree(trainer.model.state_dict()) == then
    assert list(trainer.history) == rows and random_states() == dice
    assert len(trainer.callbacks) == len(whole())


# ---- a box changes nothing


@pytest.mark.parametrize("n", [1, 3, 50])
def test_a_black_box_changes_no_number_of_the_run(n):
    def noise():
        return random_states()

    without = fit(make_trainer(callbacks()), 2)
    dice = noise()
    with_box = fit(make_trainer([*callbacks(), BlackBoxCB(n)]), 2)
    assert noise() == dice
    same(without, with_box)


def test_neither_does_it_with_accumulation_evaluations_and_everything():
    without = fit(make_trainer(whole()), 2)
    same(without, fit(make_trainer([*whole(), BlackBoxCB(2)]), 2))


def test_a_box_stays_out_of_checkpoints_and_a_run_goes_on_with_or_without_one(tmp_path):
    cut = CutCB("after_batch", lambda trainer: trainer.n_updates == 11)
    expected = fit(make_trainer(callbacks(tmp_path / "a", every=3)), 2)
    with pytest.raises(Cut):
        fit(make_trainer([*callbacks(tmp_path / "b", every=3), cut, BlackBoxCB(2)]), 2)
    resumed = fit(make_trainer([*callbacks(tmp_path / "b", every=3), BlackBoxCB(2)]), 2)
    same(expected, resumed)


def test_a_run_that_was_resumed_in_mid_epoch_is_replayed_from_there(tmp_path):
    cut = CutCB("after_batch", lambda trainer: trainer.n_updates == 11)
    with pytest.raises(Cut):
        fit(make_trainer([*callbacks(tmp_path, every=3), cut]), 3)
    trainer = make_trainer([*callbacks(tmp_path, every=3), Fails("after_step", 1, 4)])
    seen = run(trainer, box := BlackBoxCB(100))
    assert box.kept.batch == 2
    files = sorted(os.listdir(tmp_path))
    replay, again = check(trainer, seen)
    assert isinstance(replay.error, Cut)
    assert sorted(os.listdir(tmp_path)) == files, "no checkpoint is written, and none is read"


def test_after_a_rewind_too():
    trainer = make_trainer([*callbacks(), RewindCB(every=3)])
    fit(trainer, 2)
    trainer.rewind(to=(1, 2) if (1, 2) in trainer.RewindCB.states else sorted(trainer.RewindCB.states)[-1])
    trainer.add_callback(Fails("after_backward", 1, 5))
    seen = run(trainer, BlackBoxCB(3), 2)
    check(trainer, seen)


# ---- ways to end


@pytest.mark.parametrize("cancel", [CancelBatchException, CancelEpochException])
def test_cancels_within_the_batches_are_made_again(cancel):
    class Leaves:
        def after_predict(self, trainer):
            if trainer.training and trainer.batch_num == 2:
                raise cancel("enough")

    trainer = make_trainer([*whole(), Leaves(), Fails("after_backward", 1, 1)])
    seen = run(trainer, BlackBoxCB(100))
    check(trainer, seen)
    trainer = make_trainer([*whole(), Leaves(), Fails("log", 1, 1, False)])
    seen = run(trainer, BlackBoxCB(2))
    check(trainer, seen)


def test_a_cancelled_fit_and_a_requested_stop_are_replayed_to_their_last_batch():
    def leave(trainer):
        if (trainer.epoch, trainer.batch_num) == (1, 2) and trainer.training:
            raise CancelFitException("enough")

    class Leaves:
        after_step = staticmethod(leave)

    trainer = make_trainer([*whole(), Leaves()])
    seen = run(trainer, BlackBoxCB(4))
    check(trainer, seen)

    class Stops:
        def after_step(self, trainer):
            if trainer.n_updates == 4:
                trainer.request_stop("enough")

    trainer = make_trainer([*whole(), Stops()])
    seen = run(trainer, BlackBoxCB(4))
    check(trainer, seen)


def test_ctrl_c_leaves_a_box_that_can_be_replayed_to_the_last_batch():
    pressed = []

    class Presses:
        def after_backward(self, trainer):
            if trainer.n_updates == 3 and not pressed:
                pressed.append(1)
                raise KeyboardInterrupt

    trainer = make_trainer([*whole(), Presses(), InterruptCB()])
    seen = run(trainer, BlackBoxCB(4))
    assert pressed and trainer._black_box.kept.failure is None
    replay, again = replayed(trainer)
    assert (trainer.epoch, trainer.batch_num) == list(o[::2] for o in seen if o[2] is not None)[-1][:2]
    for place, found in list(again.items())[1:]:
        if place in seen and "cleanup" not in place[-1]:
            assert not differences(seen[place], found), place


def test_an_error_of_the_loader_is_told_as_such_and_the_batches_before_it_are_replayed():
    class Stream:
        def __iter__(self):
            for i in range(5):
                yield torch.randn(4, 8), torch.randint(3, (4,))
            raise ValueError("the disk is gone")

    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False)], DataLoaders(Stream(), Stream()))
    seen = run(trainer, BlackBoxCB(3))
    replay, again = check(trainer, seen)
    assert "came from the loader" in replay.end and "disk is gone" in replay.end
    assert max(o[2] for o in again if o[2] is not None) == 4


def test_two_fits_and_the_box_knows_the_last():
    trainer = make_trainer([*whole(), BlackBoxCB(5)])
    fit(trainer, 1)
    first = trainer.BlackBoxCB.kept
    trainer.add_callback(Fails("after_get_loss", 0, 3))
    witness = Witness()
    with pytest.raises(Cut):
        fit(trainer, 2, callbacks=witness, keep_opt=True)
    assert trainer.BlackBoxCB.kept is not first
    replay, again = check(trainer, witness.seen)
    assert [row["fit"] for row in trainer.history][:1] == [0]


def test_a_fit_that_ended_well_and_one_without_training_can_be_replayed():
    trainer = make_trainer(whole())
    seen = run(trainer, BlackBoxCB(6))
    check(trainer, seen)
    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), HidesState(), Fails("after_predict", 2, 1, False)])
    seen = run(trainer, BlackBoxCB(3), 4, train=False)
    replay, _ = check(trainer, seen)
    assert isinstance(replay.error, Cut)
    trainer = make_trainer([*whole(), Fails("after_predict", 1, 0)])
    seen = run(trainer, BlackBoxCB(3), 4, valid=False)
    check(trainer, seen)
