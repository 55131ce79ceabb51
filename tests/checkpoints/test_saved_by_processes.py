"Several processes save one checkpoint, and any number of them goes on from it."

import os
import shutil
import signal
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.checkpoints.exports import ExportCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.device.distributed import DistributedCB
from isaac_loop.device.processes import _next_name
from isaac_loop.loop.events import Order
from isaac_loop.state.checkpoint_files import MANIFEST_FILE, Checkpoint, manifest_bytes
from isaac_loop.state.errors import CheckpointCorrupt, CheckpointWriteFailed, RankFailed, ResumeMismatch
from isaac_loop.state.errors import StateOwnerMissing
from isaac_loop.state.run_checks import check_is_run
from isaac_loop.state.store import CheckpointStore
from isaac_loop.stop.interrupts import InterruptCB
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.averaging import EMACB
from several import in_processes, net, outcome, rank, rows, trainer

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:The run was saved by"),
]


class GoneCB:
    "A process that is gone without a word"

    order = 45  # After the checkpoint of this batch was written, or not

    def __init__(self, epoch, batch, event="before_backward", ranks=(0, 1, 2)):
        self.place, self.ranks = (epoch, batch), ranks
        setattr(self, event, self.look)

    def look(self, trainer):
        if (trainer.epoch, trainer.batch_num) == self.place and rank() in self.ranks:
            os._exit(9)


class RowsCB:
    "The rows of every training batch, as all processes together have them"

    stateless = True

    def __init__(self):
        self.seen = []

    def after_batch(self, trainer):
        if trainer.training:
            parts = trainer.ranks.gather(trainer.batch[0][:, 0].clone())
            self.seen.append((trainer.epoch, trainer.batch_num, torch.cat(parts).tolist()))


class EachBatchCB(CheckpointCB):
    "Saves after every batch, also in the middle of a window"

    name = "CheckpointCB"

    def _between_batches(self, trainer):
        self._save(trainer, trainer.epoch, self._batches)


def dropout_net():
    torch.manual_seed(1)
    parts = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*parts).double()


def mae(preds, targets):
    return F.l1_loss(preds, targets)


def run(folder=None, gone=None, model=net, accumulate=None):
    "Train for two epochs; returns weights, average, rows of the history and rows of the data"
    seen, average = RowsCB(), EMACB(0.9)
    more = [AccumulationCB(accumulate)] if accumulate else []
    if folder:
        more.append(EachBatchCB(folder))
    t = trainer(average, seen, InterruptCB(), *more, model=model())
    t.fit(2, lr=0.01, callbacks=gone)
    weights, history = outcome(t)
    kept = torch.cat([p.detach().reshape(-1) for p in average.average.parameters()])
    return weights, kept, history, seen.seen


def broken_off(n, *args):
    "A run of `n` processes that end without tidying up"
    with pytest.raises(RuntimeError):
        in_processes(n, run, *args)


def largest(a, b):
    return (a - b).abs().max().item()


def same_rows(whole, rest):
    "The rows of the data that came again are those of the whole run, in the same order"
    seen = {place[:2]: place[2] for place in whole}
    assert rest and all(seen[epoch, batch] == x for epoch, batch, x in rest)
    assert rest[-1][:2] == whole[-1][:2]


def equal_histories(a, b, within=0.0):
    assert len(a) == len(b)
    for one, other in zip(a, b):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == other[name] or abs(value - other[name]) <= within * max(1, abs(value)), name


PLACES = {
    "in a window": (0, 4, "after_batch"),
    "in a step": (1, 2, "before_step"),
    "at an end": (0, 6, "after_batch"),
    "behind the last batch": (0, 6, "after_epoch"),
}


def check_same_size(n, place, tmp_path, accumulate=None, model=dropout_net):
    whole = in_processes(n, run, tmp_path / "whole", None, model, accumulate)
    broken_off(n, tmp_path / "cut", GoneCB(*PLACES[place]), model, accumulate)
    for again, then in zip(in_processes(n, run, tmp_path / "cut", None, model, accumulate), whole):
        assert torch.equal(again[0], then[0]) and torch.equal(again[1], then[1])
        equal_histories(again[2], then[2])
        same_rows(then[3], again[3])


def check_other_size(was, now, place, tmp_path, accumulate=None):
    (whole,) = in_processes(1, run, tmp_path / "whole", None, net, accumulate)
    broken_off(was, tmp_path / "cut", GoneCB(*PLACES[place]), net, accumulate)
    found, first = in_processes(now, run, tmp_path / "cut", None, net, accumulate), PLACES[place][0]
    for again in found:
        assert largest(again[0], whole[0]) <= 1e-12 and largest(again[1], whole[1]) <= 1e-12
        if found[0][2] == found[-1][2]:  # Each has what all have measured
            equal_histories(again[2][first:], whole[2][first:], 1e-12)
        same_rows(whole[3], again[3])


@pytest.mark.parametrize(
    "place,accumulate", [("in a window", 3), ("in a step", None), ("behind the last batch", 3)]
)
def test_two_processes_go_on_bit_for_bit(place, accumulate, tmp_path):
    check_same_size(2, place, tmp_path, accumulate)


@pytest.mark.parametrize("was,now,place", [(2, 1, "in a window"), (1, 2, "in a window"), (2, 3, "in a step")])
def test_another_number_of_processes_goes_on_with_the_same_rows_and_numbers(was, now, place, tmp_path):
    check_other_size(was, now, place, tmp_path, 3)


class UnknownEndCB:
    "Nobody knows how many batches a pass has"

    order = Order.JOIN - 1

    def before_epoch(self, trainer):
        trainer.n_batches = None


class LowersCB:
    "Halves the rate when a training pass is over"

    on_valid = False

    def after_epoch(self, trainer):
        trainer.opt.param_groups[0]["lr"] *= 0.5


def run_windows(folder, window, *more):
    "Two epochs of seven batches, with a window that is open at their end"
    callbacks = AccumulationCB(window), UnknownEndCB(), LowersCB(), InterruptCB(), EachBatchCB(folder)
    t = trainer(*callbacks, model=dropout_net())
    with suppress(KeyboardInterrupt):
        t.fit(2, lr=0.01, callbacks=more)
    return *outcome(t), t.opt.param_groups[0]["lr"]


@pytest.mark.parametrize("window", [2, 4])
def test_a_window_that_was_open_behind_the_last_batch_is_closed_by_all_processes(window, tmp_path):
    "Its update was left out"
    whole = in_processes(2, run_windows, tmp_path / "whole", window)
    with pytest.raises(RuntimeError):
        in_processes(2, run_windows, tmp_path / "cut", window, GoneCB(0, 6, "after_epoch"))
    for again, then in zip(in_processes(2, run_windows, tmp_path / "cut", window), whole):
        assert torch.equal(again[0], then[0]) and again[2] == then[2]
        equal_histories(again[1], then[1])


class CtrlCCB:
    "Comes to one process in the last batch, and is known to all when the window has been closed"

    def after_backward(self, trainer):
        if (trainer.epoch, trainer.batch_num, rank()) == (0, 6, 1):
            trainer.InterruptCB._note(signal.SIGINT)


def test_what_the_end_of_a_pass_does_is_done_once_in_two_processes_too(tmp_path):
    "They leave in the first validation batch, and go on there"
    whole = in_processes(2, run_windows, tmp_path / "whole", 2)
    in_processes(2, run_windows, tmp_path / "cut", 2, CtrlCCB())
    position = CheckpointStore(tmp_path / "cut", read_only=True).load()[1]["position"]
    assert (position["epoch"], position["batches"], position["n_updates"]) == (0, 7, 4)
    for again, then in zip(in_processes(2, run_windows, tmp_path / "cut", 2), whole):
        assert torch.equal(again[0], then[0]) and again[2] == then[2]
        equal_histories(again[1], then[1])


# ---- who writes, and when


def saved_where(folder, rule):
    "Updates at which each process saved, and what it found in its folder"
    folder = Path(folder) / str(rank())  # The machines share no disk
    t = trainer(CheckpointCB(folder, every=rule(), keep_last=None), loss_func=F.mse_loss)
    saves, save = [], t.CheckpointCB._run.save

    def noted(trainer, *args):
        saves.append(trainer.n_updates)
        return save(trainer, *args)

    t.CheckpointCB._run.save = noted
    t.fit(1, lr=0.01)
    return saves, sorted(o.name for o in folder.glob("step*")), t.CheckpointCB.path is not None


def differing():
    "A rule that says another thing in each process: main's counts"
    return lambda t: t.n_updates == 3 + 2 * t.ranks.rank


@pytest.mark.parametrize("rule,at", [(differing, [4, 7]), (lambda: timedelta(0), [2, 4, 6, 7, 7])])
def test_main_says_when_to_save_and_alone_writes(rule, at, tmp_path):
    "It says so with the next update, so a rule of one's own is followed one batch later"
    (saves, files, has_path), (others, none, also) = in_processes(2, saved_where, tmp_path, rule)
    assert saves == others and has_path and also
    assert saves == at
    assert files == [f"step-{n:08}" for n in dict.fromkeys(saves)] and none == []


def resumed_elsewhere(folder):
    "Each process has a folder of its own; only main's has anything in it"
    folder = Path(folder) / str(rank())
    first, again = (trainer(InterruptCB(), CheckpointCB(folder, every=1)) for _ in range(2))

    def before_backward(t):
        if t.n_updates == 4:
            t.InterruptCB._note(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        first.fit(1, lr=0.01, callbacks=before_backward)
    again.fit(1, lr=0.01)
    return first.n_updates, again.n_updates, outcome(again)[0]


def test_machines_need_not_share_a_folder(tmp_path):
    (stopped, updates, weights), other = in_processes(2, resumed_elsewhere, tmp_path)
    assert (stopped, updates) == (5, 7) == other[:2] and torch.equal(weights, other[2])
    assert os.listdir(tmp_path) == ["0"]


def cannot_write(folder):
    t = trainer(CheckpointCB(folder, every=1))

    def after_step(trainer):
        if trainer.n_updates == 2 and trainer.ranks.is_main:
            os.rename(folder, f"{folder} is gone")

    try:
        t.fit(1, lr=0.01, callbacks=after_step)
    except (CheckpointWriteFailed, RankFailed) as error:
        return type(error), str(error), t.n_updates


def test_a_checkpoint_that_cannot_be_written_is_an_error_in_all_processes(tmp_path):
    (kind, text, updates), (other, told, also) = in_processes(2, cannot_write, tmp_path / "run")
    assert (kind, other, updates, also) == (CheckpointWriteFailed, RankFailed, 2, 2)
    assert "deleted or replaced" in text and "Main, process 0, failed with CheckpointWriteFailed" in told
    assert len(list((tmp_path / "run is gone").glob("step*"))) == 1


def fails_in_one(folder):
    def before_backward(t):
        if t.n_updates == 3 and rank() == 1:
            raise ValueError("a bad row")

    trainer(CheckpointCB(folder, every=1), InterruptCB()).fit(1, lr=0.01, callbacks=before_backward)


def test_nothing_is_saved_after_an_error(tmp_path):
    with pytest.raises(ValueError, match="a bad row"):
        in_processes(2, fails_in_one, tmp_path)
    assert CheckpointStore(tmp_path, read_only=True).latest().step == 3


# ---- what else keeps states


def best_and_exported(folder):
    t = trainer(KeepBestCB("valid_loss"), ExportCB(folder / "exports", every=3), model=dropout_net())
    t.fit(2, lr=0.3)
    path = t.save(folder / "saved")
    return (
        outcome(t)[0],
        t.KeepBestCB.best_epoch,
        path,
        sorted(os.listdir(folder / "exports")) if rank() == 0 else 0,
    )


def test_best_weights_exports_and_saves_by_hand_are_main_s(tmp_path):
    (weights, best, path, exports), (others, also, none, _) = in_processes(2, best_and_exported, tmp_path)
    assert torch.equal(weights, others) and best == also and none is None
    assert [o for o in exports if o.startswith("step")] == [f"step-{n:08}" for n in (3, 6, 9, 12, 14)][-4:]
    alone = trainer(model=dropout_net())
    alone.load(path)
    assert torch.equal(outcome(alone)[0], weights) and len(alone.history) == 2


def rewound():
    "Go back into an open window, where each process had other gradients"
    t = trainer(RewindCB(every=1), AccumulationCB(3), model=dropout_net())
    t.fit(2, lr=0.01)
    first = outcome(t)
    places = sorted(t.RewindCB.states)
    t.rewind(places[-3])
    t.fit(2, lr=0.01)
    return first, outcome(t)


def test_each_process_goes_back_in_its_own_memory():
    for (weights, history), (again, history_again) in in_processes(2, rewound):
        assert torch.equal(weights, again)
        equal_histories(history, history_again)


# ---- what was saved by one process, or with other callbacks


def test_a_checkpoint_of_one_process_tells_nothing_of_processes(tmp_path):
    t = trainer(CheckpointCB(tmp_path))
    t.fit(1, lr=0.01)
    found = Checkpoint(t.CheckpointCB.path)
    assert found.manifest["world_size"] == 1 and "ranks" not in found.read()[1]


class CountCB:
    "Has something to lose"

    def __init__(self):
        self.n = 0

    def after_batch(self, trainer):
        self.n += trainer.ranks.rank + 1

    def state_dict(self):
        return dict(n=self.n)

    def load_state_dict(self, state):
        self.n = state["n"]


def counting(folder, gone=None):
    t = trainer(CheckpointCB(folder, every=2), CountCB())
    t.fit(1, lr=0.01, callbacks=gone)
    return t.CountCB.n


def test_a_state_that_nobody_can_divide_is_main_s_and_named(tmp_path):
    broken = pytest.raises(RuntimeError)
    with broken:
        in_processes(2, counting, tmp_path, GoneCB(0, 5))
    assert [one.read()[1]["world_size"] for one in CheckpointStore(tmp_path, read_only=True).list()] == [2, 2]
    with pytest.warns(
        UserWarning, match="by 2 processes and goes on with 1 process: .* Of `CountCB` all go on"
    ):
        assert counting(tmp_path) == 7 + 3  # And three batches of validation


class SeenCB:
    "Counts the rows of its own process, and tells nobody of a state"

    def before_fit(self, trainer):
        self.n = 0

    def after_batch(self, trainer):
        self.n += len(trainer.batch[0])


def counting_rows(folder, gone=None):
    trainer(CheckpointCB(folder, every=2), SeenCB()).fit(1, lr=0.01, callbacks=gone)


@pytest.mark.parametrize("was,now", [(1, 2), (2, 1)])
def test_a_users_count_that_may_be_wrong_with_another_number_of_processes_is_named(was, now, tmp_path):
    def told():
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            counting_rows(tmp_path)
        return [str(o.message) for o in found if "goes on with" in str(o.message)]

    with pytest.raises(RuntimeError):
        in_processes(was, counting_rows, tmp_path, GoneCB(0, 5))
    (main, *_) = in_processes(now, told)
    assert len(main) == 1 and "Of `SeenCB` all go on with what main had, so what each" in main[0]


def test_the_exchange_has_no_state_between_two_updates_so_it_may_be_added(tmp_path):
    t = trainer(CheckpointCB(tmp_path, every=2), AccumulationCB(2))
    without = [
        cb
        for cb in t.callbacks
        if not isinstance(cb, DistributedCB) and "Distributed" not in type(cb).__name__
    ]
    t.callbacks = without

    def after_step(trainer):
        if trainer.n_updates == 3:
            raise ValueError

    with pytest.raises(ValueError):
        t.fit(1, lr=0.01, callbacks=after_step)
    again = trainer(CheckpointCB(tmp_path, every=2), AccumulationCB(2))
    again.fit(1, lr=0.01)
    more = trainer(CheckpointCB(tmp_path, every=2), AccumulationCB(2), CountCB())
    with pytest.raises(StateOwnerMissing, match="CountCB"):
        more.fit(2, lr=0.01)


def test_the_format_before_is_one_process(tmp_path):
    first = trainer(CheckpointCB(tmp_path / "run", every=2))
    first.fit(1, lr=0.01, valid=False)
    whole = outcome(first)[0]
    path = CheckpointStore(tmp_path / "run", read_only=True).list()[0].path
    fields = Checkpoint(path).manifest | dict(format=1)
    (path / MANIFEST_FILE).write_bytes(manifest_bytes(fields))
    again = trainer(CheckpointCB(tmp_path / "again", resume=path))
    again.fit(1, lr=0.01, valid=False)
    assert torch.equal(outcome(again)[0], whole)


def test_what_other_processes_have_left_is_checked():
    state = dict(world_size=3, ranks=[dict(parts=[], without=[]), dict(parts=None)])
    with pytest.raises(CheckpointCorrupt, match=r"\['ranks'\]\[1\]\['without'\] is missing"):
        check_is_run(state | dict(position={}, opts={}, callbacks={}), "here")
    with pytest.raises(CheckpointCorrupt, match="has 0 entries for 3 processes"):
        check_is_run(state | dict(ranks=[], position={}, opts={}, callbacks={}), "here")


# ---- begun again by a launcher


def plain_loader_run(folder, gone=None, epochs=1, every=1):
    "The order of a plain loader comes from a seed that is drawn anew in each start"
    dls = DataLoaders(DataLoader(rows(53), 8, shuffle=True))
    seen = RowsCB()
    t = trainer(CheckpointCB(folder, every=every, keep_last=None), seen, dls=dls)
    plain = dls.train
    t.fit(epochs, lr=0.01, valid=False, callbacks=gone)
    assert t.dls.train is plain
    return outcome(t)[0], seen.seen


def forget_after(folder, step):
    for old in CheckpointStore(folder, read_only=True).list():
        if old.step > step:
            shutil.rmtree(old.path)


def test_a_plain_loader_goes_on_with_the_order_that_was_drawn(tmp_path):
    (_, whole), _ = in_processes(2, plain_loader_run, tmp_path)
    for old in CheckpointStore(tmp_path, read_only=True).list()[4:]:
        shutil.rmtree(old.path)
    (_, again), _ = in_processes(2, plain_loader_run, tmp_path)
    assert [place[:2] for place in again] == [(0, 4), (0, 5), (0, 6)]
    same_rows(whole, again)


def test_one_process_goes_on_with_the_order_that_several_have_drawn_for_a_plain_loader(tmp_path):
    (weights, whole), _ = in_processes(2, plain_loader_run, tmp_path, None, 2)
    for step in (4, 7, 9):  # In an epoch, between two, and in the one that it has begun itself
        forget_after(tmp_path, step)
        again, rest = plain_loader_run(tmp_path, None, 2)
        assert rest[0][:2] == divmod(step, 7) and largest(again, weights) <= 1e-12
        same_rows(whole, rest)
        forget_after(tmp_path, 11)
        ((again, rest), _) = in_processes(2, plain_loader_run, tmp_path, None, 2)
        assert largest(again, weights) <= 1e-12
        same_rows(whole, rest)
        plain_loader_run(tmp_path, None, 2)  # Nothing is left to do


def test_several_processes_that_cannot_go_on_with_the_order_of_a_plain_loader_say_so(tmp_path):
    plain_loader_run(tmp_path / "epochs", None, 2, "epoch")

    def words(folder):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plain_loader_run(folder, None, 2)
        return [str(o.message) for o in caught]

    forget_after(tmp_path / "epochs", 7)
    told = in_processes(2, words, tmp_path / "epochs")[0]
    assert any("each row comes once, but in another order than the plain loader" in o for o in told)
    plain_loader_run(tmp_path, None, 2)
    forget_after(tmp_path, 4)
    with pytest.raises(
        ResumeMismatch, match="1 saved the run, and there are 2 now. Make it with `exact_loader`"
    ):
        in_processes(2, words, tmp_path)


def test_processes_that_are_begun_again_meet_under_another_name(monkeypatch):
    "torchrun keeps its store, in which the addresses of the former ones still stand"
    names = set()
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        monkeypatch.setattr("isaac_loop.device.processes._n_groups", [0])
        names.add(_next_name())
    assert len(names) == 2
