"""What the loop costs over one written by hand: microseconds per batch and ratio, measured side by side in one run.

The variants alternate in random order within each round; of each the 20th percentile over the rounds is compared, which
is steady on a noisy machine. "by hand, early" is the hand-written loop with one more line, `preds = loss = None` before
the forward pass, which the trainer does as well: it frees the memory of the last batch before the next needs it.
"""
import copy
import random
import time

import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import BasicTrainCB, DataLoaders, MetricsCB, ProgressCB, Table, Trainer

N_BATCHES, ROUNDS = 300, 60


class Nothing:
    "A callback that answers two events and does nothing"
    def __init__(self, i): self.name = f"nothing{i}"
    def before_batch(self, trainer): pass
    def after_batch(self, trainer): pass


def by_hand(model, data, early=False):
    "The loop as everybody writes it"
    opt = optim.SGD(model.parameters(), 0.01)
    model.train()
    for x, y in data:
        if early:
            preds = loss = None
        preds = model(x)
        loss = F.cross_entropy(preds, y)
        loss.backward()
        opt.step()
        opt.zero_grad()


def main():
    "Measure and print one table"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = [(torch.randn(64, 64), torch.randint(0, 10, (64,))) for _ in range(N_BATCHES)]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def ours(*callbacks):
        trainer = Trainer(DataLoaders(data), F.cross_entropy, optim.SGD, copy.deepcopy(model), [BasicTrainCB(), *callbacks])
        return lambda n=1: trainer.fit(n, 0.01, valid=False)

    bare = ours()
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    variants = {"by hand": lambda: by_hand(first, data), "by hand, early": lambda: by_hand(second, data, True), "BasicTrainCB": bare,
                "... + 10 that do nothing": ours(*map(Nothing, range(10))), "... + MetricsCB": ours(MetricsCB(), ProgressCB("plain")),
                "start-up of fit": lambda: bare(0)}
    variants["... + MetricsCB"] = quiet(variants["... + MetricsCB"])
    times = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name in random.sample(list(variants), len(variants)):
            start = time.perf_counter()
            variants[name]()
            times[name].append((time.perf_counter() - start) / N_BATCHES * 1e6)
    best = {name: sorted(o)[ROUNDS // 5] for name, o in times.items()}
    print(Table([{"variant": name, "us per batch": us, "over by hand": us - best["by hand"], "ratio": us / best["by hand"]} for name, us in best.items()]))
    hook = (best["... + 10 that do nothing"] - best["BasicTrainCB"]) / 20
    print(f"\none do-nothing hook: {hook:.3f} us; fit starts in {best['start-up of fit'] * N_BATCHES / 1000:.2f} ms (shared by {N_BATCHES} batches above)")


def quiet(f):
    "`f` with its output thrown away"
    import contextlib
    import io

    def run():
        with contextlib.redirect_stdout(io.StringIO()):
            f()
    return run


if __name__ == "__main__":
    main()
