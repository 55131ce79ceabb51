"""Kill and interrupt runs of two processes at random moments, and end as many in peace.

    python tools/torture_two.py                                what `make torture` does
    python tools/torture_two.py --kills 10 --signals 6 --ends 10 --laws 0

A process that is killed is one of two that train together. The other must notice and end by itself, both are
begun again, and in the end every process has the weights, the averages and the history of a run that nobody
disturbed, bit for bit. No run may wait longer than its limit.
"""

import argparse
import collections
import contextlib
import faulthandler
import io
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torture
from torture import ROOT, Diary, DiaryCB, Failed, NotedCheckpointCB, make, slow_batch, wait

sys.path[:0] = [str(ROOT / "tests" / name) for name in ("checkpoints", "stop")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import runs  # noqa: E402
from isaac_loop.device.distributed import DistributedCB  # noqa: E402
from isaac_loop.stop.interrupts import InterruptCB  # noqa: E402

N_EPOCHS, SIZE = 2, 2
LIMIT = 60  # Seconds after which a run counts as one that hangs
TIMEOUT = 30  # Of `DistributedCB`


def train(folder, rank, port, workers, every, slow):
    "One of two processes; leaves its result when it comes to the end"
    where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=SIZE)
    os.environ.update({k: str(v) for k, v in where.items()})
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    faulthandler.register(signal.SIGUSR1)
    diary = Diary(folder / f"diary-{rank}")
    trainer = make(workers)
    more = [InterruptCB(), DiaryCB(diary), DistributedCB(timeout=TIMEOUT)]
    if every:
        more.append(NotedCheckpointCB(folder / "run", every, diary))
    trainer.add_callbacks(more)
    if slow:
        trainer.add_callbacks(slow_batch(slow))
    diary.write("begin")
    try:
        runs.fit(trainer, N_EPOCHS)
    finally:
        diary.write("end")
    (folder / f"result-{rank}.json").write_text(json.dumps(runs.result(trainer)))


class Two:
    "Two processes that train together, begun at once"

    def __init__(self, folder, every=1, slow=0.0, workers=0):
        self.folder = folder
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        about = self.store.port, workers, every, slow
        self.begun = [len(self.entries(rank)) for rank in range(SIZE)]
        self.pids = {rank: torture.child(folder, rank, *about, run=train) for rank in range(SIZE)}
        self.codes = {}

    def entries(self, rank, new=False):
        path = self.folder / f"diary-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(o) for o in lines[self.begun[rank] if new else 0 :]]

    def look(self):
        "Note who has ended"
        for rank, pid in self.pids.items():
            if rank not in self.codes and (code := wait(pid, 0)) is not None:
                self.codes[rank] = code
        return len(self.codes) == SIZE

    def end(self, seconds, what):
        "The exit codes of both, within some seconds"
        limit = time.monotonic() + seconds
        while not self.look():
            if time.monotonic() > limit:
                late = [rank for rank in self.pids if rank not in self.codes]
                for rank in late:
                    os.kill(self.pids[rank], signal.SIGUSR1)  # It prints where it is
                    time.sleep(0.5)
                    os.kill(self.pids[rank], signal.SIGKILL)
                    wait(self.pids[rank], 5)
                raise Failed(f"process {late} still ran {seconds:g} s after {what}")
            time.sleep(0.005)
        return [self.codes[rank] for rank in range(SIZE)]

    def have_met(self):
        "Have they joined, as far as their diaries tell?"
        return all(any(o["what"] != "begin" for o in self.entries(rank, True)) for rank in range(SIZE))

    def end_as_a_launcher_does(self):
        "End who waits for a process that never came"
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.end(5, "all were killed")

    def until_it_trains(self):
        "Wait until both have begun a batch, or have ended"
        ready = {"train", "valid", "restored", "end"}
        limit = time.monotonic() + LIMIT
        while not all(any(o["what"] in ready for o in self.entries(r, True)) for r in range(SIZE)):
            if self.look() or time.monotonic() > limit:
                return
            time.sleep(0.002)

    def where(self, rank, moment):
        return torture.where(self.entries(rank, True), moment)


def compare(folder, expected):
    for rank in range(SIZE):
        found = json.loads((folder / f"result-{rank}.json").read_text())
        differing = runs.differences(expected[rank], found)
        if differing:
            raise Failed(f"process {rank} ended otherwise:\n" + "\n".join(differing[:10]))


def check_nothing_lost(two, safe):
    "What was saved before is what the run goes on from"
    restored = [o["step"] for rank in range(SIZE) for o in two.entries(rank, True) if o["what"] == "restored"]
    if restored and min(restored) < safe:
        raise Failed(f"lost: step {safe} was saved, and the run went on from {min(restored)}")
    if safe and not restored and set(two.codes.values()) == {0}:
        raise Failed(f"lost: step {safe} was saved, and the run began anew")


def saved_so_far(folder):
    path = folder / "diary-0"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return max((o["step"] for o in lines if o["what"] == "saved"), default=0)


def killed(n, expected, place, duration):
    "Kill one of two, `n` times; what was struck how often, and the longest that the other took to end"
    struck, attempts, n_runs, longest = collections.Counter(), 0, 0, 0.0
    while sum(struck.values()) < n:
        folder, n_runs = Path(tempfile.mkdtemp(dir=place)), n_runs + 1
        every = random.choice([1, 1, "epoch"])
        while True:
            safe, attempts = saved_so_far(folder), attempts + 1
            two, victim = Two(folder, every, workers=random.choice([0, 0, 2])), random.randrange(SIZE)
            more = sum(struck.values()) < n
            if random.random() < 0.7:
                two.until_it_trains()
            if more and wait_for(two, random.uniform(0.02, 0.7 * duration)):
                moment = time.monotonic()
                os.kill(two.pids[victim], signal.SIGKILL)
                struck[two.where(victim, moment)] += 1
                if two.have_met():
                    two.end(20, "the other was killed")
                    longest = max(longest, time.monotonic() - moment)
                else:
                    two.end_as_a_launcher_does()
            codes = two.end(LIMIT, "its beginning")
            check_nothing_lost(two, safe)
            if codes == [0, 0]:
                break
            if -signal.SIGKILL not in codes:
                raise Failed(f"the processes ended with {codes}, and none was killed")
        compare(folder, expected)
    return struck, attempts, n_runs, longest


def wait_for(two, seconds):
    "Wait, and say whether both still run"
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and not two.look() and not two.codes:
        time.sleep(0.005)
    two.look()
    return not two.codes


def interrupted(n, expected, place):
    "Send a signal to one of two, or to both, `n` times; what was struck how often"
    struck, n_runs, most = collections.Counter(), 0, 0
    while sum(struck.values()) < n:
        folder, n_runs, codes = Path(tempfile.mkdtemp(dir=place)), n_runs + 1, None
        while codes != [0, 0]:
            two, which = Two(folder, "epoch", 0.01), random.choice([signal.SIGINT, signal.SIGTERM])
            to = random.choice([[0], [1], [0, 1]])
            more = sum(struck.values()) < n and saved_so_far(folder) < int(expected[0]["n_updates"])
            two.until_it_trains()
            if more and wait_for(two, random.uniform(0, 0.25)):
                moment = time.monotonic()
                for rank in to:
                    os.kill(two.pids[rank], which)
                codes = two.end(30, which.name)
                complete = saved_so_far(folder) == int(expected[0]["n_updates"])
                most = max(most, check_interrupt(two, codes, which, moment, complete))
                struck[two.where(to[0], moment)] += codes != [0, 0]
            else:
                codes = two.end(LIMIT, "its beginning")
                if codes != [0, 0]:
                    raise Failed(f"an attempt ended with {codes}")
        compare(folder, expected)
    return struck, n_runs, most


def check_interrupt(two, codes, which, moment, complete):
    "All have left after the same batch, with the code of the signal; how many batches were begun after it"
    if codes == [0, 0]:
        return 0  # It came after the end
    if complete and set(codes) <= {0, 1, 128 + which}:
        return 0  # It came while they parted: the run is complete, and one may have missed the other
    if codes != [128 + which] * SIZE:
        raise Failed(f"{which.name} ended the processes with {codes} ({two.where(0, moment)})")
    new = [two.entries(rank, True) for rank in range(SIZE)]
    batches = [[o for o in one if o["what"] in ("train", "valid")] for one in new]
    last = [[(o["what"], o["epoch"], o["batch"]) for o in one[-1:]] for one in batches]
    if last[0] != last[1]:
        raise Failed(f"the processes left at different places: {last}")
    saved = [i for i, o in enumerate(new[0]) if o["what"] == "saved"]
    trained = [i for i, o in enumerate(new[0]) if o["what"] == "train"]
    if trained and not (saved and saved[-1] > trained[-1]):
        raise Failed(f"a batch was trained, and not saved when {which.name} came")
    return max(sum(o["what"] == "train" and o["time"] > moment for o in one) for one in new)


def ended(n, expected, place):
    "As many runs that nobody disturbs: no process is aborted at its exit, and none is left"
    for _ in range(n):
        folder = Path(tempfile.mkdtemp(dir=place))
        codes = Two(folder, None).end(LIMIT, "its beginning")
        if codes != [0, 0]:
            raise Failed(f"an undisturbed run ended with {codes}")
        compare(folder, expected)


def laws(place):
    "Going on after an end without tidying up, with as many processes, more and fewer; interrupts everywhere"
    import test_interrupted_processes as interrupts
    import test_saved_by_processes as saves

    n = 0
    sizes = [(1, 1), (2, 2), (2, 1), (2, 3), (1, 2), (3, 2)]
    for name, (was, now), accumulate in itertools.product(saves.PLACES, sizes, (None, 3)):
        folder, n = Path(tempfile.mkdtemp(dir=place)), n + 1
        if was == now:
            saves.check_same_size(was, name, folder, accumulate)
        else:
            saves.check_other_size(was, now, name, folder, accumulate)
    for name, signum in itertools.product(interrupts.MOMENTS, (signal.SIGINT, signal.SIGTERM)):
        for ranks in ((0,), (1,), (0, 1)):
            folder, n = Path(tempfile.mkdtemp(dir=place)), n + 1
            interrupts.check_moment(name, signum, ranks, folder, random.choice([1, 2, 3]))
    return n


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--signals", type=int, default=30)
    parser.add_argument("--ends", type=int, default=50)
    parser.add_argument("--laws", type=int, default=1, help="1: also the laws of going on, in all cases")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; default: a new one each time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # It imports much, once for all children
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        undisturbed, start = Path(tempfile.mkdtemp(dir=place)), time.monotonic()
        if Two(undisturbed, None).end(LIMIT, "its beginning") != [0, 0]:
            raise Failed("not even an undisturbed run works")
        duration = time.monotonic() - start
        expected = [json.loads((undisturbed / f"result-{rank}.json").read_text()) for rank in range(SIZE)]
        random.seed(args.seed)
        start = time.monotonic()
        if args.kills:
            struck, attempts, n, longest = killed(args.kills, expected, place, duration)
            took = f"{n} of {n} bit-identical, in {time.monotonic() - start:.0f} s"
            kills = f"{sum(struck.values())} kills of one of two in {attempts} attempts at {n} runs"
            print(f"{kills}: 0 lost, 0 hang, {took}")
            print(f"  struck: {dict(struck.most_common())}; the other ended within {longest:.1f} s")
        start = time.monotonic()
        if args.signals:
            struck, n, most = interrupted(args.signals, expected, place)
            told = f"{n} of {n} bit-identical, in {time.monotonic() - start:.0f} s"
            print(f"{sum(struck.values())} signals to one of two or both in {n} runs: {told}")
            print(f"  struck: {dict(struck.most_common())}; at most {most} batches begun after the signal")
        start = time.monotonic()
        ended(args.ends, expected, place)
        print(f"{args.ends} plain ends of two processes: all with 0, in {time.monotonic() - start:.0f} s")
        if args.laws:
            start = time.monotonic()
            with contextlib.redirect_stdout(io.StringIO()):
                n = laws(place)
            print(
                f"{n} cases of going on with other processes: all hold, in {time.monotonic() - start:.0f} s"
            )


if __name__ == "__main__":
    try:
        main()
    except Failed as e:
        sys.exit(f"FAILED: {e}")
    finally:
        torture.left_behind(0)
