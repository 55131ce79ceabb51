"Checkpoints by time are written by a thread while the loop goes on, with all that holds for the others."

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
import torch

import runs
from isaac_loop.checkpoints.background_writes import BackgroundWrites
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.state import store as stores
from isaac_loop.state.errors import CheckpointWriteFailed
from isaac_loop.state.store import CheckpointStore
from isaac_loop.stop.interrupts import InterruptCB
from places import PATHS
from runs import Cut, CutCB, fit, make_trainer, same, tree

AT_ONCE = timedelta(0)


def saved_in(folder):
    return CheckpointStore(folder, read_only=True).list()


def writers():
    return [o for o in threading.enumerate() if o is not threading.main_thread() and "isaac_loop" in o.name]


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert not writers()


@contextmanager
def disk(monkeypatch, before=lambda: None, after=lambda: None):
    "A disk on which something happens before and after a checkpoint is written by a thread"
    real = stores.put_whole

    def put_whole(*args):
        in_thread = threading.current_thread() is not threading.main_thread()
        if in_thread:
            before()
        real(*args)
        if in_thread:
            after()

    with monkeypatch.context() as patch:
        patch.setattr(stores, "put_whole", put_whole)
        yield


class SeenCB:
    "Counts training batches and keeps the weights after each; can let a slow disk go on"

    order = 200

    def __init__(self, release=None, at=None):
        self.n, self.weights, self.release, self.at = 0, [], release, at

    def after_batch(self, trainer):
        if not trainer.training:
            return
        self.n += 1
        self.weights.append(copy.deepcopy(trainer.model.state_dict()))
        if self.n == self.at:
            self.release.set()


def test_the_loop_is_not_held_up_and_the_file_has_the_state_of_the_moment(tmp_path, monkeypatch):
    "The first write ends only after six more batches, whose steps change the weights in place"
    free, counts = threading.Event(), []
    seen = SeenCB(free, at=7)
    cb = CheckpointCB(tmp_path, every=AT_ONCE, keep_last=None)

    real = CheckpointStore._write

    def write(*args):
        assert threading.current_thread() is threading.main_thread() or free.wait(20)
        counts.append(seen.n)
        return real(*args)

    monkeypatch.setattr(CheckpointStore, "_write", write)
    fit(make_trainer([*runs.callbacks(), cb, seen]), 2)
    assert counts[0] >= 7
    first = saved_in(tmp_path)[0]
    assert first.step == 1
    weights, state, _ = first.read()
    assert state["position"]["batches"] == 1 and not any(
        o["exp_avg"].isnan().any() for o in state["opts"]["opt"]["state"].values()
    )
    assert all(torch.equal(weights[k], v) for k, v in seen.weights[0].items())
    assert not all(torch.equal(weights[k], v) for k, v in seen.weights[1].items())


class WaitsCB:
    "Has each checkpoint written before the next batch"

    order = -200

    def before_batch(self, trainer):
        trainer.CheckpointCB._writes.wait()


def test_the_files_are_those_of_a_save_that_is_waited_for(tmp_path):
    "After every batch of a run with everything in it: weights bit for bit, and the state but for seconds"
    found = {}
    for name, options in {"here": dict(every=1), "there": dict(every=AT_ONCE)}.items():
        cb = CheckpointCB(tmp_path / name, keep_last=None, **options)
        fit(make_trainer([*runs.callbacks(), cb, WaitsCB()]), 1)
        found[name] = saved_in(tmp_path / name)
    assert [o.step for o in found["here"]][:7] == [o.step for o in found["there"]][:7] == list(range(1, 8))
    for here, there in zip(found["here"][:6], found["there"]):
        assert (here.path / "model.safetensors").read_bytes() == (
            there.path / "model.safetensors"
        ).read_bytes()
        states = [without_seconds(tree(o.read()[1])) for o in (here, there)]
        assert not runs.differences(*states)


def without_seconds(x):
    if isinstance(x, dict):
        return {
            k: without_seconds(v)
            for k, v in x.items()
            if k not in ("elapsed", "data") and not k.endswith("seconds")
        }
    return [without_seconds(o) for o in x] if isinstance(x, list) else x


def test_a_run_goes_on_from_each_and_old_ones_are_dropped(tmp_path):
    whole = fit(make_trainer(), 2)
    for n in range(1, 14, 3):
        cut = CutCB("before_predict", lambda t, n=n: t.training and t.n_updates == n)
        saving = lambda n=n: CheckpointCB(tmp_path / str(n), every=AT_ONCE)  # noqa: E731
        with pytest.raises(Cut):
            fit(make_trainer([*runs.callbacks(), saving(), cut]), 2)
        assert 1 <= len(saved_in(tmp_path / str(n))) <= 2
        same(whole, fit(make_trainer([*runs.callbacks(), saving()]), 2))
        assert not [o for o in os.listdir(tmp_path / str(n)) if o.startswith((".tmp", ".old", ".trash"))]


def test_the_best_is_saved_with_its_numbers_also_while_another_is_being_written(tmp_path, monkeypatch):
    "Saved after each epoch that is better, and after the last; the times are far apart"
    cb = CheckpointCB(tmp_path, every=timedelta(hours=1), monitor="valid_loss", keep_last=None)
    trainer = fit(make_trainer([*runs.callbacks(), cb]), 3)
    losses = trainer.history["valid_loss"]
    better = [o for i, o in enumerate(losses) if o == min(losses[: i + 1])]
    assert [o.metrics["valid_loss"] for o in saved_in(tmp_path)][: len(better)] == better
    store = CheckpointStore(tmp_path, monitor="valid_loss", read_only=True)
    assert store.best().metrics["valid_loss"] == min(losses)


# ---- errors


def full():
    raise OSError(28, "No space left on device")


def test_an_error_while_writing_comes_out_at_the_next_batch(tmp_path, monkeypatch):
    "Named, and once; what was saved before is whole, and the run can go on"
    tries = []

    def second_fails():
        tries.append(1)
        if len(tries) == 2:
            full()

    callbacks = [*runs.callbacks(), CheckpointCB(tmp_path, every=AT_ONCE), WaitsNotCB(seen := SeenCB())]
    with disk(monkeypatch, second_fails), pytest.raises(CheckpointWriteFailed) as caught:
        fit(make_trainer(callbacks), 2)
    notes = "\n".join(caught.value.__notes__)
    assert "`CheckpointCB` between two batches" in notes and "in the background" in notes
    assert "epoch 0, batch 1 (training)" in notes
    assert seen.n == 3
    assert [o.step for o in saved_in(tmp_path)] == [1]
    same(fit(make_trainer(), 2), fit(make_trainer([*runs.callbacks(), CheckpointCB(tmp_path)]), 2))


class WaitsNotCB:
    "Lets each write come to its end within a batch, without asking what came of it"

    order = 201

    def __init__(self, seen):
        self.seen = seen

    def after_batch(self, trainer):
        for thread in writers():
            thread.join()
        self.seen.after_batch(trainer)


@pytest.mark.parametrize("ends", ["well", "by an error", "by a cancel"])
def test_an_error_in_the_last_write_comes_out_in_the_end(ends, tmp_path, monkeypatch):
    "Also beside another error, which stays the one that is seen"
    free = threading.Event()

    def fail_late():
        assert free.wait(20)
        full()

    def before_predict(trainer):
        if trainer.training and trainer.n_updates == 3:
            free.set()
            if ends == "by an error":
                raise Cut
            if ends == "by a cancel":
                raise runs_cancel()

    cb = CheckpointCB(tmp_path, every=timedelta(hours=1) if ends == "well" else AT_ONCE)
    if ends == "well":
        cb._when.after_epoch = lambda trainer: free.set() or True
    with (
        disk(monkeypatch, fail_late),
        pytest.raises(Cut if ends == "by an error" else CheckpointWriteFailed) as caught,
    ):
        fit(make_trainer([*runs.callbacks(), cb, before_predict]), 1)
    notes = "\n".join(caught.value.__notes__)
    if ends == "by an error":
        assert "besides: CheckpointWriteFailed" in notes
    else:
        assert "CheckpointCB" in notes and "in the background" in notes
    CheckpointStore(tmp_path).close()  # The folder is free


def runs_cancel():
    from isaac_loop.loop.events import CancelFitException

    return CancelFitException("enough")


def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path):
    "Not by the thread: the loop still stands at the batch that it is about"

    class OddCB:
        def before_fit(self, trainer):
            pass

        def state_dict(self):
            return {"path": tmp_path}

        def load_state_dict(self, state):
            pass

    with pytest.raises(TypeError, match="OddCB") as caught:
        fit(make_trainer([*runs.callbacks(), CheckpointCB(tmp_path, every=AT_ONCE), OddCB()]), 1)
    assert "in the background" not in "".join(caught.value.__notes__)


# ---- interrupts, kills, copies


@pytest.mark.parametrize("signum,error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_interrupt_waits_for_the_write_and_saves_its_own(signum, error, tmp_path, monkeypatch):
    free = threading.Event()

    def before_backward(trainer):
        if trainer.n_updates == 3:
            signal.raise_signal(signum)
            threading.Timer(0.2, free.set).start()  # By then the loop waits

    trained = make_trainer(
        [*runs.callbacks(), InterruptCB(), CheckpointCB(tmp_path, every=AT_ONCE), before_backward]
    )
    with disk(monkeypatch, lambda: free.wait(20)), pytest.raises(error):
        fit(trained, 2)
    assert [o.step for o in saved_in(tmp_path)] == [1, 4]
    same(fit(make_trainer(), 2), fit(make_trainer([*runs.callbacks(), CheckpointCB(tmp_path)]), 2))


def is_waiting(thread):
    "Whether a thread waits for one that writes"
    frame = sys._current_frames()[thread.ident]
    while frame is not None and frame.f_code is not BackgroundWrites.wait.__code__:
        frame = frame.f_back
    return frame is not None


def test_a_break_without_a_watcher_waits_too(tmp_path, monkeypatch):
    "Ctrl-C while the fit waits in its end for the thread: what was begun becomes whole"
    free, handler = threading.Event(), signal.signal(signal.SIGINT, signal.default_int_handler)

    def before_backward(trainer):
        if trainer.n_updates == 2:
            threading.Thread(target=break_the_wait).start()
            raise Cut

    def break_the_wait():
        while not is_waiting(threading.main_thread()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        free.set()

    try:  # A shell may have begun us with Ctrl-C ignored
        with disk(monkeypatch, lambda: free.wait(20)), pytest.raises(Cut) as caught:
            fit(make_trainer([*runs.callbacks(), CheckpointCB(tmp_path, every=AT_ONCE), before_backward]), 2)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "besides: KeyboardInterrupt" in "\n".join(caught.value.__notes__)
    assert [o.step for o in saved_in(tmp_path)] == [1]
    CheckpointStore(tmp_path).close()


KILLED = """
import os, signal, sys, threading
sys.path[:0] = {paths}
from datetime import timedelta
import runs
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.state import atomic_folders
real,n = os.fsync,[0]
def fsync(fd):
    if threading.current_thread() is not threading.main_thread(): n[0] += 1
    if n[0] == {at}: os.kill(os.getpid(), signal.SIGKILL)
    real(fd)
os.fsync = fsync
class WaitsCB:  # However slow the disk is, there are two checkpoints
    order = -200
    def before_batch(self, trainer): cb._writes.wait()
cb = CheckpointCB({folder!r}, every=timedelta(0))
runs.fit(runs.make_trainer([*runs.callbacks(), cb, WaitsCB()]), 2)
"""


@pytest.mark.parametrize("at", [8, 10])
def test_a_kill_during_a_write_loses_nothing(at, tmp_path):
    "Before the second checkpoint has its name, and just after: five `fsync` make one"
    script = KILLED.format(paths=PATHS, at=at, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    n_whole = 1 if at == 8 else 2
    assert len(saved_in(tmp_path)) == n_whole
    same(fit(make_trainer(), 2), fit(make_trainer([*runs.callbacks(), CheckpointCB(tmp_path)]), 2))
    assert not [o for o in os.listdir(tmp_path) if o.startswith((".tmp", ".old", ".trash"))]


def test_a_trainer_is_copied_pickled_and_forked_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    "The thread stays with the one that began it"
    free, found = threading.Event(), []

    def before_backward(trainer):
        if trainer.n_updates != 3:
            return
        assert trainer.CheckpointCB._writes.is_busy
        copies = copy.deepcopy(trainer.CheckpointCB), pickle.loads(pickle.dumps(trainer.CheckpointCB))
        found.extend(o._writes.is_busy for o in copies)
        child = os.fork()
        if not child:
            code = 1
            with suppress(BaseException):
                trainer.CheckpointCB._writes.wait()
                trainer.CheckpointCB._writes.look()
                code = 7 if trainer.CheckpointCB.path is None else 2
            os._exit(code)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        free.set()

    with disk(monkeypatch, lambda: free.wait(20)):
        trainer = fit(
            make_trainer([*runs.callbacks(), CheckpointCB(tmp_path, every=AT_ONCE), before_backward]), 1
        )
    assert found == [False, False, 7]
    assert saved_in(tmp_path)[-1].path == trainer.CheckpointCB.path


def test_going_back_in_time_does_not_lose_sight_of_a_write(tmp_path, monkeypatch):
    "A run on the side puts everything back that it finds, but for the thread"
    from isaac_loop.state.snapshot import Snapshot

    free, snapshots = threading.Event(), []

    def before_batch(trainer):
        if not trainer.training:
            return
        if trainer.n_updates == 0 and not snapshots:
            snapshots.append(Snapshot(trainer.CheckpointCB))
        if trainer.n_updates == 2:
            snapshots[0].restore()
            assert trainer.CheckpointCB._writes.is_busy
            free.set()

    with disk(monkeypatch, lambda: free.wait(20)):
        fit(make_trainer([*runs.callbacks(), CheckpointCB(tmp_path, every=AT_ONCE), before_batch]), 1)
    assert saved_in(tmp_path)
