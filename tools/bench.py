"""What the loop costs over one written by hand: microseconds per batch and ratio, measured side by side in
one run.

The variants alternate in random order within each round; of each the 20th percentile over the rounds is
compared, which is steady on a noisy machine. "by hand, early" is the hand-written loop with one more line,
`preds = loss = None` before the forward pass, which the trainer does as well: it frees the memory of the
last batch before the next needs it.

The second table leaves PyTorch out: model, loss and optimizer are stand-ins that do nothing, so what
remains is the loop itself, with the processor's caches to itself. Beside real tensors the same instructions
cost more, since they come in cold.

Then come two costs of never losing work: a checkpoint against `torch.save` and `fsync` of the same state
(at most twice as long), and the exact loader against a plain `DataLoader`: with workers, what the training
process does for each batch.
"""

import copy
import os
import pickle
import random
import tempfile
import time
from pathlib import Path

import torch
from torch import nn, optim
from torch.nn import functional as F

from torch.utils.data import DataLoader, TensorDataset

from isaac_loop.all import (
    BasicTrainCB,
    CheckpointStore,
    DataLoaders,
    MetricsCB,
    ProgressCB,
    Table,
    TimesCB,
    Trainer,
    exact_loader,
)
from isaac_loop.state.run_state import take_state

N_BATCHES, ROUNDS = 300, 60


class Nothing:
    "A callback that answers two events and does nothing"

    def __init__(self, i):
        self.name = f"nothing{i}"

    def before_batch(self, trainer):
        pass

    def after_batch(self, trainer):
        pass


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


class StandIn:
    "A model, a loss and an optimizer that do nothing"

    def __call__(self, *args):
        return self

    def train(self, mode):
        pass

    def backward(self):
        pass

    def step(self):
        pass

    def zero_grad(self):
        pass


def loop_alone(n=20_000):
    "Microseconds per batch without any tensor work"
    it, data = StandIn(), [(0, 0)] * n

    def by_hand():
        for x, y in data:
            loss = it(it(x), y)
            loss.backward()
            it.step()
            it.zero_grad()

    def ours(*callbacks):
        trainer = Trainer(DataLoaders(data), it, None, it, [BasicTrainCB(), *callbacks])
        trainer.opt = it
        return lambda: trainer.fit(1, 0.01, valid=False)

    variants = {
        "by hand": by_hand,
        "BasicTrainCB": ours(),
        "... + 10 that do nothing": ours(*map(Nothing, range(10))),
    }
    return measure(variants, n, rounds=15)


def measure(variants, n_batches, rounds):
    "Microseconds per batch for each variant, alternating in random order"
    times = {name: [] for name in variants}
    for _ in range(rounds):
        for name in random.sample(list(variants), len(variants)):
            start = time.perf_counter()
            variants[name]()
            times[name].append((time.perf_counter() - start) / n_batches * 1e6)
    return {name: sorted(o)[rounds // 5] for name, o in times.items()}


def main():
    "Measure and print two tables"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = [(torch.randn(64, 64), torch.randint(0, 10, (64,))) for _ in range(N_BATCHES)]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def ours(*callbacks):
        trainer = Trainer(
            DataLoaders(data), F.cross_entropy, optim.SGD, copy.deepcopy(model), [BasicTrainCB(), *callbacks]
        )
        return lambda n=1: trainer.fit(n, 0.01, valid=False)

    bare = ours()
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    variants = {
        "by hand": lambda: by_hand(first, data),
        "by hand, early": lambda: by_hand(second, data, True),
        "BasicTrainCB": bare,
        "... + 10 that do nothing": ours(*map(Nothing, range(10))),
        "... + MetricsCB": ours(MetricsCB(), ProgressCB("plain")),
        "... + TimesCB": ours(TimesCB()),
        "start-up of fit": lambda: bare(0),
    }
    variants["... + MetricsCB"] = quiet(variants["... + MetricsCB"])
    best = measure(variants, N_BATCHES, ROUNDS)
    print(
        Table(
            [
                {
                    "variant": name,
                    "us per batch": us,
                    "over by hand": us - best["by hand"],
                    "ratio": us / best["by hand"],
                }
                for name, us in best.items()
            ]
        )
    )
    hook = (best["... + 10 that do nothing"] - best["BasicTrainCB"]) / 20
    start = best["start-up of fit"] * N_BATCHES / 1000
    print(f"\none do-nothing hook: {hook:.3f} us")
    print(f"fit starts in {start:.2f} ms (shared by {N_BATCHES} batches above)")
    alone = loop_alone()
    print("\nWithout tensors\n")
    print(
        Table(
            [
                {"variant": name, "us per batch": us, "over by hand": us - alone["by hand"]}
                for name, us in alone.items()
            ]
        )
    )
    print("\nA checkpoint with Adam's state\n")
    both = {n: saving(n) for n in (100_000, 5_000_000)}
    print(
        Table(
            [
                {
                    "parameters": n,
                    **{k: f"{v:.1f} ms" for k, v in o.items()},
                    "ratio": o["checkpoint"] / o["torch.save + fsync"],
                }
                for n, o in both.items()
            ]
        )
    )
    print("\nMicroseconds per batch of 32 rows\n")
    loads = {"none": loading(), "two; work of the training process": handing_out()}
    print(
        Table(
            [
                {"workers": n, **o, "over DataLoader": o["exact_loader"] - o["DataLoader"]}
                for n, o in loads.items()
            ]
        )
    )


def saving(n_parameters):
    "Milliseconds for a checkpoint, and for `torch.save` and `fsync` of the same, of a model with Adam"
    width = int((n_parameters / 2) ** 0.5)
    trainer = Trainer(
        DataLoaders([(torch.randn(4, width),)]),
        None,
        optim.Adam,
        nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)),
        [BasicTrainCB()],
    )
    trainer.loss_func = lambda preds: preds.square().mean()
    trainer.fit(1, valid=False)
    with tempfile.TemporaryDirectory(dir=".") as place, CheckpointStore(Path(place) / "ours") as store:

        def raw():
            weights, state = take_state(trainer, 1, copy=False)
            path = Path(place) / "raw.pt"
            with open(path, "wb") as file:
                torch.save((weights, state), file)
                file.flush()
                os.fsync(file.fileno())

        def ours():
            ours.step += 1
            store.save(*take_state(trainer, 1, copy=False), ours.step)

        ours.step = 0
        return measure({"torch.save + fsync": raw, "checkpoint": ours}, 1000, rounds=15)


def loading(n=20_000, batch_size=32):
    "Microseconds per batch for the exact loader and a plain one, without workers"
    loaders = two_loaders(n, batch_size, 0)
    return measure(
        {name: lambda o=o: [None for _ in o] for name, o in loaders.items()}, n // batch_size, rounds=9
    )


def handing_out(n=20_000, batch_size=32):
    """Microseconds per batch of what the training process does for workers: choose rows, pickle their
    numbers, note the position.

    Waiting for a batch and unpacking it is the same for both, and varies by 100 us and more, so it is left
    out.
    """
    plain, exact = two_loaders(n, batch_size, 2).values()
    exact._begin = lambda: iter(range(n))  # Batches that are there at once

    def choose(loader):
        return lambda: [pickle.dumps((0, o)) for o in loader.batch_sampler]

    def note():
        for _ in exact:
            pass

    found = measure(
        {"DataLoader": choose(plain), "exact_loader": choose(exact), "position": note},
        n // batch_size,
        rounds=15,
    )
    return {"DataLoader": found["DataLoader"], "exact_loader": found["exact_loader"] + found["position"]}


def two_loaders(n, batch_size, num_workers):
    data = TensorDataset(torch.randn(n, 16), torch.randint(3, (n,)))
    return {
        "DataLoader": DataLoader(data, batch_size, shuffle=True, num_workers=num_workers),
        "exact_loader": exact_loader(data, batch_size, num_workers=num_workers),
    }


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
