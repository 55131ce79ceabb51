"""Kill and interrupt real processes at random moments, start them again, and compare what they end with.

A server process imports everything once, and forks a process for each attempt; each is killed by SIGKILL,
or interrupted by SIGINT or SIGTERM, at a random moment. It is started again until the run is complete; then
the next run begins in a new folder. Every run must end bit for bit like one that was never stopped, and no
checkpoint may be lost that was reported as saved. In a folder that a kill left without a checkpoint the
next attempt begins anew, and nothing half written stays behind. Three batches make an update, and the
gradients are clipped; the number of workers of the loader changes from attempt to attempt. Half of the runs
save in the background, so a kill or a signal strikes while a thread is writing.

    python tools/torture.py                       200 kills and 100 signals
    python tools/torture.py --kills 20 --signals 20
"""

import argparse
import collections
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from tqdm.std import tqdm  # noqa: E402

import runs  # noqa: E402
from isaac_loop.checkpoints.background_writes import BackgroundWrites  # noqa: E402
from isaac_loop.checkpoints.checkpoint import CheckpointCB  # noqa: E402
from isaac_loop.loop.history import updates_of_run  # noqa: E402
from isaac_loop.stop.interrupts import InterruptCB  # noqa: E402

N_EPOCHS = 3
PATIENCE = 60  # Seconds until an attempt that has come no further is said to stand still
AT_ONCE = timedelta(0)  # A checkpoint in the background after every batch, if none is being written
SAFE = "saved", "written"
tqdm.set_lock(threading.RLock())  # Before the first bar, so that all classes of bars have what is set here


class Diary:
    "Lines in a file, each with its time; they survive a kill"

    def __init__(self, path):
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what, **about):
        os.write(self.fd, (json.dumps({"what": what, "time": time.monotonic(), **about}) + "\n").encode())


class DiaryCB:
    "Notes what the run is about to do"

    order = 200

    def __init__(self, diary):
        self.diary = diary

    def before_batch(self, trainer):
        self.diary.write(
            "train" if trainer.training else "valid", epoch=trainer.epoch, batch=trainer.batch_num
        )

    def cleanup_batch(self, trainer):
        self.diary.write("batch over")

    def log(self, trainer):
        self.diary.write("between epochs")


def step_of(path):
    return int(Path(path).name.split("-")[1])


class NotedWrites(BackgroundWrites):
    "Notes when a thread begins to write, and what it has written"

    def __init__(self, diary):
        self.diary = diary

    def begin(self, write, noted, where=""):
        def noted_write():
            self.diary.write("writing")
            path, run_id = write()
            self.diary.write("written", step=step_of(path))
            return path, run_id

        super().begin(noted_write, noted, where)


class NotedCheckpointCB(CheckpointCB):
    "Notes when it begins to save, and what is safely saved"

    name = "CheckpointCB"

    def __init__(self, folder, every, diary):
        super().__init__(folder, every=every)
        self.diary, self._writes = diary, NotedWrites(diary)

    def _save(self, trainer, *args, **kwargs):
        self.diary.write("save")
        super()._save(trainer, *args, **kwargs)
        self.diary.write("save over")

    def _note_saved(self, trainer, path, run_id):
        super()._note_saved(trainer, path, run_id)
        self.diary.write("saved", step=step_of(path))

    def _restore(self, trainer):
        state = super()._restore(trainer)
        self.diary.write("restored", step=updates_of_run(trainer))
        return state


def make(num_workers=0):
    return runs.make_trainer(runs.everything(), runs.make_loaders(72, num_workers=num_workers))


def train(folder, num_workers, every, slow=0.0):
    "One attempt, in a process of its own; leaves the result when it comes to the end"
    diary = Diary(folder / "diary")
    checkpoint = NotedCheckpointCB(folder / "run", every, diary)
    trainer = make(num_workers)
    trainer.add_callbacks([InterruptCB(), checkpoint, DiaryCB(diary)])
    if slow:
        trainer.add_callbacks(slow_batch(slow))
    before = [signal.getsignal(o) for o in (signal.SIGINT, signal.SIGTERM)]
    diary.write("begin")
    try:
        runs.fit(trainer, N_EPOCHS)
    finally:
        diary.write("end", handlers=before == [signal.getsignal(o) for o in (signal.SIGINT, signal.SIGTERM)])
    found = runs.result(trainer)
    (folder / "result.json").write_text(json.dumps(found))


def slow_batch(seconds):
    def after_predict(trainer):
        time.sleep(seconds)

    return after_predict


groups = []  # Of processes, one for each attempt: the trainer and the workers of its loader


def left_behind(seconds):
    "How many attempts have workers that still live after `seconds`; ends them"
    end = time.monotonic() + seconds
    living = list(groups)
    while living and time.monotonic() < end:
        living = [o for o in living if group_lives(o, 0)]
        time.sleep(0.1)
    return sum(group_lives(o, signal.SIGKILL) for o in living)


def group_lives(group, signum):
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    return True


def child(*args, run=None):
    "Fork a process that trains; returns its number"
    pid = os.fork()
    if pid:
        groups.append(pid)
        return pid
    code = 1
    try:
        gc.freeze()  # What the parent has thrown away is not to be tidied up here
        os.setpgid(0, 0)
        tqdm.set_lock(threading.RLock())  # A thread of the parent may hold that one
        faulthandler.enable()  # So that an attempt that stands still can say where
        sys.stdout = sys.stderr
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(143)
        )  # One that comes before or after `fit` ends the process as Ctrl-C would
        (run or train)(*args)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except SystemExit as e:
        code = e.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def wait(pid, seconds):
    "The exit status after `seconds` at most, None while it runs"
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(min(0.001, max(0, end - time.monotonic())))


def wait_until(pid, folder, moments, known=0):
    "Wait until one of `moments` stands in the diary, behind those that are `known`"

    def happened():
        return any(o["what"] in moments for o in entries(folder)[known:])

    end = time.monotonic() + PATIENCE
    while not happened():
        over = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if over and not happened():
            raise Failed("an attempt ended before it had begun")
        if time.monotonic() >= end:
            stands_still(pid)
        time.sleep(0.002)


def wait_for_end(pid):
    "The exit status"
    code = wait(pid, PATIENCE)
    return stands_still(pid) if code is None else code


def stands_still(pid):
    "Have an attempt print where it stands"
    os.kill(pid, signal.SIGABRT)
    wait(pid, 5)
    raise Failed(f"an attempt came no further for {PATIENCE} s, at the place printed above")


def entries(folder):
    path = folder / "diary"
    return [json.loads(o) for o in path.read_text().splitlines()] if path.exists() else []


def where(diary, moment):
    "What the process was doing at `moment`"
    past = [o["what"] for o in diary if o["time"] <= moment]
    if [o for o in past if o in THREAD][-1:] == ["writing"]:
        return "write in the background"
    past = [o for o in past if o not in THREAD]
    if not past or past[-1] == "begin":
        return "start or resume"
    return OTHERWISE.get(past[-1], past[-1])


THREAD = "writing", "written"
OTHERWISE = dict.fromkeys(["batch over", "save over"], "between batches") | {
    "restored": "start or resume",
    "saved": "save",
}


class Failed(Exception):
    pass


def compare(folder, expected):
    found = runs.differences(expected, json.loads((folder / "result.json").read_text()))
    if found:
        raise Failed("the run ended otherwise:\n" + "\n".join(found[:10]))


def kill_runs(n, expected, place, duration):
    "Kill `n` times at random moments; returns what was struck how often"
    struck, attempts, n_runs, unfinished, empty = collections.Counter(), 0, 0, 0, 0
    while sum(struck.values()) < n:
        folder = Path(tempfile.mkdtemp(dir=place))
        n_runs += 1
        every = random.choice(
            [1, AT_ONCE, AT_ONCE, "epoch"]
        )  # Once an epoch, so that many an attempt leaves a folder without a checkpoint
        while True:
            safe = max((o["step"] for o in entries(folder) if o["what"] in SAFE), default=0)
            n_before, workers = len(entries(folder)), random.choice([0, 0, 2])
            attempts += 1
            empty += (folder / "run").exists() and not list((folder / "run").glob("step-*"))
            pid = child(folder, workers, every)
            late = (
                random.random() < 0.6
            )  # The other moments are early ones, so that resuming itself is struck as well
            if sum(struck.values()) < n:
                code = wait(pid, random.uniform(0, 0.6 * duration if late else 0.1 * duration))
            else:
                code = wait_for_end(pid)
            if code is None:
                moment = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                new = entries(folder)[n_before:]
                restored = [o["step"] for o in new if o["what"] == "restored"]
                struck[where(new, moment)] += 1
                unfinished += (
                    any(o.name.startswith(".tmp-") for o in (folder / "run").glob(".*"))
                    if (folder / "run").exists()
                    else 0
                )
            elif code != 0:
                raise Failed(f"an attempt ended with {code}")
            else:
                restored = [o["step"] for o in entries(folder)[n_before:] if o["what"] == "restored"]
            if restored and restored[0] < safe:
                raise Failed(f"lost: step {safe} was saved, and the run went on from {restored[0]}")
            if safe and not restored and code == 0:
                raise Failed(f"lost: step {safe} was saved, and the run began anew")
            if code == 0:
                break
        compare(folder, expected)
        left = [
            o.name for o in (folder / "run").iterdir() if o.name.startswith((".tmp-", ".old-", ".trash-"))
        ]
        if left:
            raise Failed(f"after the end of the run these were left: {left}")
    return struck, attempts, n_runs, unfinished, empty


def signal_runs(n, expected, place):
    "Interrupt `n` times at random moments; returns what was struck how often, and the longest way to the end"
    struck, most, n_runs = collections.Counter(), 0, 0
    while sum(struck.values()) < n:
        folder = Path(tempfile.mkdtemp(dir=place))
        n_runs += 1
        code = None
        while code != 0:
            n_before = len(entries(folder))
            which = random.choice([signal.SIGINT, signal.SIGTERM])
            pid = child(folder, random.choice([0, 0, 2]), random.choice(["epoch", AT_ONCE]), 0.01)
            wait_until(pid, folder, ("train", "valid", "restored", "end"), n_before)
            code = wait(pid, random.uniform(0, 0.15)) if sum(struck.values()) < n else wait_for_end(pid)
            if code is None:
                moment = time.monotonic()
                os.kill(pid, which)
                code = wait_for_end(pid)
                new = entries(folder)[n_before:]
                if code == 0:
                    continue  # It came after the end
                if code != 128 + which:
                    raise Failed(f"{which.name} ended a run with {code}")
                begun = sum(o["what"] in ("train", "valid") and o["time"] > moment for o in new)
                if begun > 1:
                    raise Failed(f"{begun} batches were begun after {which.name}")
                if not new[-1]["handlers"]:
                    raise Failed("the signal handlers were not put back")
                most = max(most, begun)
                struck[where(new, moment)] += 1
                saved = [i for i, o in enumerate(new) if o["what"] == "saved"]
                trained = [i for i, o in enumerate(new) if o["what"] == "train"]
                if trained and not (saved and saved[-1] > trained[-1]):
                    raise Failed(
                        f"a batch was trained, and not saved when {which.name} came ({where(new, moment)})"
                    )
            elif code != 0:
                raise Failed(f"an attempt ended with {code}")
        compare(folder, expected)
    return struck, n_runs, most


def twice(place):
    "Seconds from the first of two quick SIGINTs, in a batch that takes long, to the end"
    folder = Path(tempfile.mkdtemp(dir=place))
    pid = child(folder, 0, 1, 20.0)
    wait_until(pid, folder, ["train"])
    start = time.monotonic()
    os.kill(pid, signal.SIGINT)
    time.sleep(0.5)
    os.kill(pid, signal.SIGINT)
    code = wait(pid, 10)
    if code != 130:
        raise Failed(f"two SIGINTs ended a run with {code}")
    if any(o["what"] == "save" for o in entries(folder)):
        raise Failed("something was saved after the second SIGINT")
    if not entries(folder)[-1]["handlers"]:
        raise Failed("the signal handlers were not put back after two SIGINTs")
    return time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the moments; default: another one each time"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        pid = child(Path(place), 0, 1)
        start = time.monotonic()
        if wait_for_end(pid) != 0:
            raise Failed("not even an undisturbed run works")
        duration = time.monotonic() - start
        expected = json.loads(
            json.dumps(runs.result(runs.fit(make(), N_EPOCHS)))
        )  # Never saved, never stopped
        compare(Path(place), expected)
        random.seed(args.seed)  # The trainer has seeded it
        start = time.monotonic()
        if args.kills:
            struck, attempts, n_runs, unfinished, empty = kill_runs(args.kills, expected, place, duration)
            took = f"{n_runs} of {n_runs} bit-identical, in {time.monotonic() - start:.0f} s"
            print(f"{sum(struck.values())} kills in {attempts} attempts at {n_runs} runs: 0 lost, {took}")
            left = f"{unfinished} left a checkpoint half written, {empty} a folder without any"
            print(f"  struck: {dict(struck.most_common())}; {left}")
        start = time.monotonic()
        if args.signals:
            struck, n_runs, most = signal_runs(args.signals, expected, place)
            seconds = max(twice(place) for _ in range(3))
            if seconds > 2:
                raise Failed(f"two SIGINTs took {seconds:.1f} s")
            took = f"at most {most} batch begun after the signal, in {time.monotonic() - start:.0f} s"
            print(
                f"{sum(struck.values())} signals in {n_runs} runs: {n_runs} of {n_runs} bit-identical, {took}"
            )
            print(f"  struck: {dict(struck.most_common())}; two SIGINTs: {seconds:.2f} s")


if __name__ == "__main__":
    try:
        main()
    except Failed as e:
        sys.exit(f"FAILED: {e}")
    finally:
        orphans = left_behind(8 if len(groups) > 100 else 0)
        if len(groups) > 100:
            print(f"{orphans} of {len(groups)} attempts left workers behind for more than 8 s")
