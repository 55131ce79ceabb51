"""What became faster or slower since another commit: both are measured in turn, and compared pair by pair.

    make bench AGAINST=HEAD~5
    python tools/bench_commits.py main --rounds 20

The other commit is checked out into a folder of its own for as long as this runs. Each round starts one
process for either commit, in random order, on the same work; a ratio is that of two neighbours in time.
What is printed is the median of these ratios and the middle half of them; more than 1.03 is marked as
slower. Work that one of the commits cannot do leaves its line out.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SLOWER = 1.03

WORK = """
import copy, json, sys, tempfile, time
import torch
from torch import nn, optim
from torch.nn import functional as F
import isaac_loop.all as il

torch.set_num_threads(1)
torch.manual_seed(0)
N = 200
DATA = [(torch.randn(64, 64), torch.randint(0, 10, (64,))) for _ in range(N)]
MODEL = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

class StandIn:
    def __call__(self, *args): return self
    def train(self, mode): pass
    def backward(self): pass
    def step(self): pass
    def zero_grad(self): pass

class Nothing:
    def __init__(self, i): self.name = f"nothing{i}"
    def before_batch(self, trainer): pass
    def after_batch(self, trainer): pass

def make(data, opt_func, *callbacks):
    callbacks = [il.BasicTrainCB(), *callbacks]
    return il.Trainer(il.DataLoaders(data), F.cross_entropy, opt_func, copy.deepcopy(MODEL), callbacks)

def tensors(*callbacks):
    trainer = make(DATA, optim.SGD, *callbacks)
    return lambda: trainer.fit(1, 0.01, valid=False)

def alone(*callbacks):
    it = StandIn()
    trainer = il.Trainer(il.DataLoaders([(0, 0)] * N * 20), it, None, it, [il.BasicTrainCB(), *callbacks])
    trainer.opt = it
    return lambda: trainer.fit(1, 0.01, valid=False)

def start():
    trainer = make(DATA, optim.SGD, il.MetricsCB())
    return lambda: trainer.fit(0, valid=False)

def saving():
    trainer = make(DATA[:1], optim.Adam, il.CheckpointCB(tempfile.mkdtemp(), resume='never'))
    return lambda: trainer.fit(3, valid=False)

def guarded():
    return tensors(il.ClipGradCB(1.), il.RecorderCB(), il.OneCycleSchedulerCB(cycle_momentum=False))

VARIANTS = {
    "BasicTrainCB": lambda: tensors(),
    "with 10 that do nothing": lambda: tensors(*map(Nothing, range(10))),
    "with MetricsCB": lambda: tensors(il.MetricsCB(), il.ProgressCB("plain")),
    "clipping, recorder, one-cycle": guarded,
    "the loop alone": lambda: alone(),
    "the loop alone, 10 that do nothing": lambda: alone(*map(Nothing, range(10))),
    "start of a fit": start,
    "three epochs with checkpoints": saving,
}

def measure(prepare):
    import contextlib, io
    with contextlib.redirect_stdout(io.StringIO()):
        run, times = prepare(), []
        run()
        for _ in range(7):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return sorted(times)[1]

found = {}
for name, prepare in VARIANTS.items():
    try: found[name] = measure(prepare)
    except (AttributeError, TypeError) as error: print(name, error, file=sys.stderr)
print(json.dumps(found))
"""


def measure(root):
    "Seconds for each kind of work, with the library that lies in `root`, in a process of its own"
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", WORK], cwd=root, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"The work failed with the library in {root}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(here, there, rounds):
    "For each kind of work the ratios of neighbours in time, `here` over `there`"
    ratios = {}
    for i in range(rounds):
        both = {root: measure(root) for root in random.sample([here, there], 2)}
        for name in both[here].keys() & both[there].keys():
            ratios.setdefault(name, []).append(both[here][name] / both[there][name])
        print(f"round {i + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
    return ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", help="the one to compare with, as git names it")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short", args.commit], capture_output=True, text=True)
    if name.returncode:
        raise SystemExit(f"git knows no commit `{args.commit}`, so there is nothing to compare with.")
    with tempfile.TemporaryDirectory() as place:
        other = Path(place) / "other"
        subprocess.run([*git, "worktree", "add", "-q", "--detach", str(other), args.commit], check=True)
        try:
            ratios = compare(ROOT, other, args.rounds)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(other)], check=True)
    print(f"\nThis tree over {name.stdout.strip()}, {args.rounds} pairs\n")
    print("| work | ratio | middle half | |\n|---|---|---|---|")
    for work, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        print(f"| {work} | {middle:.3f} | {low:.3f} to {high:.3f} | {'slower' if middle > SLOWER else ''} |")


if __name__ == "__main__":
    main()
