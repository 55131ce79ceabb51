"""A run that fails is run again from what a black box kept: every number at every moment, until the failure,
is compared with what a witness saw in the run itself, and a run with a box with one that had none."""

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
from runs import (
    Cut,
    CutCB,
    callbacks,
    differences,
    everything,
    fit,
    make_loaders,
    make_model,
    make_trainer,
    same,
    tree,
)

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
        found = dict(
            weights=trainer.model.state_dict(), grads=grads, opts=opts, random=hash(str(random_states()))
        )
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
    if " at `" in replay.end:
        again = dict(list(again.items())[:-1])  # The end of a batch that was left in its middle
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
    cbs = [*whole(), Spoils(*place)] if n != 4 else [BasicTrainCB(), HidesState(), Spoils(*place)]
    trainer, box = make_trainer(cbs), BlackBoxCB(n)
    seen = run(trainer, box)
    replay, again = check(trainer, seen)
    assert (trainer.epoch, trainer.batch_num) == place and trainer.loss.isnan()
    assert (*place[:1], True, place[1], "after_backward") in again
    assert not any(o[:3] == (place[0], True, place[1]) and o[3] == "after_step" for o in again)
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@pytest.mark.parametrize(
    "event", "before_batch predict after_get_loss step after_batch cleanup_batch".split()
)
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
        trainer.replay(to=9)


def test_a_replay_can_be_repeated_and_leaves_what_was_kept():
    trainer = make_trainer([*whole(), Fails("after_step", 1, 5)])
    seen = run(trainer, BlackBoxCB(4))
    for _ in range(3):
        check(trainer, seen)


def test_the_trainer_is_left_as_the_failed_run_had_left_it():
    trainer = make_trainer([*whole(), Fails("after_backward", 1, 5)])
    run(trainer, BlackBoxCB(4))
    then, loss, preds = (
        tree([trainer.model.state_dict(), trainer.opt.state_dict()]),
        trainer.loss,
        trainer.preds,
    )
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
            for _ in range(5):
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
    trainer = make_trainer(
        [BasicTrainCB(), MetricsCB(show=False), HidesState(), Fails("after_predict", 2, 1, False)]
    )
    seen = run(trainer, BlackBoxCB(3), 4, train=False)
    replay, _ = check(trainer, seen)
    assert isinstance(replay.error, Cut)
    trainer = make_trainer([*whole(), Fails("after_predict", 1, 0)])
    seen = run(trainer, BlackBoxCB(3), 4, valid=False)
    check(trainer, seen)


# ---- all kinds of loops and batches

Pair = namedtuple("Pair", "x y")


@dataclass
class Held:
    x: torch.Tensor
    y: torch.Tensor


class Own:
    def __init__(self, x, y):
        self.x, self.y = x, y


KINDS = {
    "dict": (lambda x, y: dict(x=x, y=y, names=["a"]), lambda b: (b["x"], b["y"])),
    "namedtuple": (Pair, lambda b: (b.x, b.y)),
    "dataclass": (Held, lambda b: (b.x, b.y)),
    "own": (Own, lambda b: (b.x, b.y)),
    "numpy": (lambda x, y: dict(x=x.numpy(), y=y), lambda b: (torch.from_numpy(b["x"]), b["y"])),
}


class Stream:
    "Batches without a length, drawn from the random numbers of everybody"

    def __init__(self, make, n=7):
        self.make, self.n = make, n

    def __iter__(self):
        for _ in range(self.n):
            noise = random.random() + float(np.random.rand())
            yield self.make(torch.randn(4, 8) + noise, torch.randint(3, (4,)))


class Mangles:
    "Changes a batch in every way a callback can"

    def before_batch(self, trainer):
        x, _ = trainer.dls.split(trainer.batch)
        x.mul_(1.5)
        if "names" in getattr(trainer.batch, "keys", list)():
            trainer.batch["names"].append("b")
            trainer.batch["more"] = 1


def strange_trainer(kind, *cbs, cls=Trainer, n=7):
    set_seed(5)
    make, split = KINDS[kind]
    dls = DataLoaders(Stream(make, n), Stream(make, 2))
    dls.split = split
    return cls(
        dls, F.cross_entropy, optim.AdamW, make_model(), [BasicTrainCB(), HidesNothing(), Mangles(), *cbs]
    )


class HidesNothing:
    def before_fit(self, trainer):
        self.n = 0

    def after_get_loss(self, trainer):
        self.n += 1
        trainer.loss = trainer.loss * (1 + self.n / 100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [(0, 5), (1, 1)])
def test_batches_of_all_kinds_from_a_stream_without_length(kind, place):
    trainer = strange_trainer(kind, Fails("after_backward", *place))
    seen = run(trainer, BlackBoxCB(3), 2)
    replay, _ = check(trainer, seen)
    assert isinstance(replay.error, Cut)


class Duel(Trainer):
    "Two modules, two optimizers, and a batch of its own"

    events = ("judge",)

    def subclassing_method(self):
        self.critic = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.opt_c = optim.RMSprop(self.critic.parameters(), 1e-2, momentum=0.5)
        self.balance = 1.0

    def one_batch(self):
        x = self.batch[0]
        self.preds = self.model(x)
        self.loss = (self.critic(self.preds).mean() * self.balance).exp()
        self.run_callbacks("judge")
        if not self.training:
            return
        self.loss.backward()
        self.opt.step(), self.opt_c.step()
        self.opt.zero_grad(), self.opt_c.zero_grad()
        self.balance = 0.9 * self.balance + 0.1 * random.random()


class Judges:
    def __init__(self):
        self.seen = []

    def judge(self, trainer):
        self.seen.append(
            tree([trainer.preds, trainer.loss, trainer.model.state_dict(), trainer.critic.state_dict()])
        )
        if self.fails and trainer.training and (trainer.epoch, trainer.batch_num) == (1, 3):
            raise Cut("as planned")

    fails = True
    stateless = True


@pytest.mark.parametrize("n", [1, 3, 50])
def test_several_optimizers_and_a_batch_of_ones_own_without_any_event(n):
    set_seed(3)
    rows = [(torch.randn(4, 8),) for _ in range(6)]
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
    judge, box = Judges(), BlackBoxCB(n)
    trainer = Duel(DataLoaders(rows, rows[:2]), None, optim.Adam, model, [judge])
    run(trainer, box, 2)
    seen, judge.seen = judge.seen, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replay = trainer.replay()
    assert replay.same and isinstance(replay.error, Cut), str(replay)
    assert judge.seen == seen[-len(judge.seen) :] and len(judge.seen) == len(replay.rows)


def test_momentum_and_an_optimizer_of_ones_own():
    set_seed(2)
    model = make_model()
    trainer = Trainer(
        make_loaders(), F.cross_entropy, None, model, [MomentumTrainCB(), Fails("after_step", 1, 2)]
    )
    trainer.opt = optim.SGD(model.parameters(), 0.05, momentum=0.9)
    seen = run(trainer, BlackBoxCB(4))
    check(trainer, seen)


def test_callbacks_of_that_fit_alone_take_part_again():
    class Shifts:
        def before_batch(self, trainer):
            trainer.batch[0].add_(torch.rand(()))

    trainer = make_trainer([BasicTrainCB()])
    witness, box = Witness(), BlackBoxCB(5)
    with pytest.raises(Cut):
        trainer.fit(2, 0.01, callbacks=[Shifts(), HidesState(), Fails("after_step", 1, 1), witness, box])
    check(trainer, witness.seen)
    assert [type(cb).__name__ for cb in trainer.callbacks] == ["BasicTrainCB"]


def test_who_saves_and_reports_is_left_out_unless_it_raised_the_error(capsys):
    class Reports:
        order = Order.REPORT

        def after_batch(self, trainer):
            print("here I am")
            if self.fails and trainer.batch_num == 3:
                raise Cut("in the report")

    reports = Reports()
    reports.fails = True
    trainer = make_trainer([BasicTrainCB(), ProgressCB("plain"), reports])
    with pytest.raises(Cut):
        trainer.fit(1, callbacks=BlackBoxCB(2))
    assert isinstance(trainer.replay().error, Cut)
    reports.fails = False
    trainer.fit(1)
    capsys.readouterr()
    with pytest.raises(Cut):
        trainer.fit(1, callbacks=[BlackBoxCB(2), Fails("after_batch", 0, 5)])
    capsys.readouterr()
    trainer.replay()
    assert capsys.readouterr().out == ""
    trainer.replay(below=Order.LAST)
    assert "here I am" in capsys.readouterr().out


# ---- the file


def test_a_file_is_written_only_for_a_failure_and_only_where_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "box"
    run(make_trainer(whole()), BlackBoxCB(3, folder), 1)
    assert not folder.exists()
    run(make_trainer([*whole(), Fails("predict", 0, 2)]), BlackBoxCB(3), 1)
    assert os.listdir(tmp_path) == []
    run(make_trainer([*whole(), Fails("predict", 0, 2)]), BlackBoxCB(3, folder), 1)
    assert os.listdir(folder) == ["black_box.pt"]
    torch.load(folder / "black_box.pt", weights_only=True)


SCRIPT = """
import sys, warnings
sys.path[:0] = {paths!r}
warnings.simplefilter("ignore")
from test_black_box import *

for number, failing in enumerate(FAILING):
    trainer = make_trainer([*whole(), failing(), BlackBoxCB(3, f"{folder}/{{number}}")])
    replay, seen = replayed(trainer)
    print("seen:", replay.same, type(replay.error).__name__, hash_of(seen))
"""
FAILING = (
    lambda: Fails("after_backward", 1, 4),
    lambda: Spoils(1, 4),
    lambda: Fails("predict", 1, 1, False),
)


def hash_of(seen):
    "The same in every process"
    import hashlib

    plain = {str(k): {n: o for n, o in v.items() if n != "random"} for k, v in list(seen.items())[1:]}
    return hashlib.sha256(str(plain).encode()).hexdigest()


def test_another_process_replays_the_file(tmp_path):
    here = []
    for number, failing in enumerate(FAILING):
        trainer = make_trainer([*whole(), failing(), BlackBoxCB(3, tmp_path / str(number))])
        run(trainer, Witness0())
        replay, seen = replayed(trainer)
        here.append(f"seen: True {type(replay.error).__name__} {hash_of(seen)}")
    paths = [str(ROOT / "tests"), str(ROOT / "tests/inspection"), str(ROOT)]
    code = SCRIPT.format(paths=paths, folder=tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line for line in done.stdout.splitlines() if "seen" in line] == here


class Witness0:
    "Stands where a box would"

    def before_fit(self, trainer):
        "Nothing"


def test_a_damaged_file_another_model_and_nothing_at_all_are_refused_in_words(tmp_path):
    box = BlackBoxCB(3, tmp_path)
    run(make_trainer([*whole(), Fails("predict", 0, 2)]), box, 1)
    other = make_trainer([BasicTrainCB(), BlackBoxCB(3, tmp_path)], model=nn.Linear(8, 3))
    with pytest.raises(ResumeMismatch, match="does not fit this trainer"):
        other.replay()
    (tmp_path / "black_box.pt").write_bytes(b"no")
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        make_trainer([BasicTrainCB(), BlackBoxCB(3, tmp_path)]).replay()
    with pytest.raises(LookupError, match="A black box writes it"):
        make_trainer([BasicTrainCB(), BlackBoxCB(3, tmp_path / "no")]).replay()
    with pytest.raises(LookupError, match="there is no|There is no `BlackBoxCB`"):
        make_trainer([BasicTrainCB()]).replay()
    for wrong in (dict(n=0), dict(n=1.5), dict(folder=3), dict(nonfinite="no")):
        with pytest.raises((ValueError, TypeError)):
            BlackBoxCB(**wrong)


def test_a_batch_that_no_file_can_hold_is_named_and_stays_in_memory(tmp_path):
    trainer = strange_trainer("own", Fails("after_backward", 0, 4))
    witness = Witness()
    with pytest.warns(UserWarning, match=r"batch \d of epoch 0 is a test_black_box.Own"), pytest.raises(Cut):
        trainer.fit(1, callbacks=[BlackBoxCB(2, tmp_path), witness])
    assert os.listdir(tmp_path) == []
    check(trainer, witness.seen)


# ---- what cannot be kept is named


def test_a_state_that_cannot_be_copied_is_named_and_the_run_goes_on():
    class Odd:
        def before_fit(self, trainer):
            self.n = 0

        def after_batch(self, trainer):
            self.n += 1

        def state_dict(self):
            return dict(f=lambda: 1)

        def load_state_dict(self, state):
            "Nothing"

    trainer = make_trainer([BasicTrainCB(), Odd(), BlackBoxCB(3)])
    with pytest.warns(UserWarning, match="could not copy the run.*Odd.state_dict"):
        trainer.fit(1)
    assert trainer.Odd.n == 9
    with pytest.raises(LookupError, match="has kept no batch"):
        trainer.replay()


def test_a_copy_that_failed_is_tried_again():
    class Late:
        n = 0

        def after_batch(self, trainer):
            self.n += 1

        def state_dict(self):
            return dict(n=self.n, x=object() if self.n < 3 else 1)

        def load_state_dict(self, state):
            self.n = state["n"]

    trainer = make_trainer([BasicTrainCB(), Late(), Fails("after_step", 1, 5)])
    with pytest.warns(UserWarning, match="could not copy"), pytest.raises(Cut):
        trainer.fit(2, callbacks=BlackBoxCB(2))
    assert trainer.replay().same


def test_what_a_callback_holds_and_nobody_can_keep_is_named():
    class Holds:
        def before_fit(self, trainer):
            self.numbers = iter(range(100))

        def after_batch(self, trainer):
            next(self.numbers)

    trainer = make_trainer([BasicTrainCB(), Holds(), BlackBoxCB(3)])
    with pytest.warns(UserWarning, match="`Holds.numbers` changed during this fit and cannot be kept"):
        trainer.fit(1)


def test_a_replay_that_is_another_run_says_so():
    class Dice:
        stateless = True

        def __init__(self):
            self.own = random.Random(1)

        def after_get_loss(self, trainer):
            trainer.loss = trainer.loss * self.own.random()

    trainer = make_trainer([BasicTrainCB(), Dice(), Fails("after_step", 0, 5)])
    with pytest.raises(Cut):
        trainer.fit(1, callbacks=BlackBoxCB(3))
    replay = trainer.replay()
    assert not replay.same and "differs first in epoch 0, batch 3" in str(replay)


def test_an_error_of_an_added_callback_comes_out_with_a_note():
    trainer = make_trainer([BasicTrainCB(), Fails("after_step", 0, 5)])
    with pytest.raises(Cut):
        trainer.fit(1, callbacks=BlackBoxCB(3))
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.replay(CutCB("after_batch", lambda trainer: 1 / 0))
    assert any("raised in a replay" in note for note in caught.value.__notes__)
    assert trainer.replay().same


def test_memory_is_bounded():
    batches = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(40)]
    sizes = []

    class Counts:
        def after_batch(self, trainer):
            sizes.append(len(trainer.BlackBoxCB.batches))

    trainer = make_trainer([BasicTrainCB(), Counts(), BlackBoxCB(5)], DataLoaders(batches, batches))
    trainer.fit(2)
    assert max(sizes) <= 10 and len(trainer.BlackBoxCB.batches) <= 10


def test_guards_that_end_the_fit_do_not_hide_the_nan():
    trainer = make_trainer([BasicTrainCB(), Spoils(0, 3), NonFiniteStopCB(every=1)])
    seen = run(trainer, BlackBoxCB(2))
    replay, _ = check(trainer, seen)
    assert trainer.batch_num == 3 and trainer.loss.isnan()
    trainer = make_trainer([BasicTrainCB(), Spoils(0, 3)])
    seen = run(trainer, BlackBoxCB(2, nonfinite=False), 1)
    assert trainer._black_box.kept.passes[-1].training is False
