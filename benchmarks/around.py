"""What is around the loop costs: evaluations, checkpoints, loaders, long runs, callbacks with many events.

    python -m benchmarks.around

prints Markdown. The variants of each table alternate in random order. What is compared are medians of pairs,
or of times the 20th percentile; processor time stands beside wall time where a disk is waited for.
"""

import argparse
import contextlib
import datetime
import io
import pickle
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from isaac_loop.all import (
    BasicTrainCB,
    CheckpointCB,
    DataLoaders,
    EvaluatorCB,
    MetricsCB,
    RecorderCB,
    Trainer,
)
from isaac_loop.all import exact_loader
from isaac_loop.data.exact_loaders import ExactLoader
from isaac_loop.loop.events import EVENTS
from isaac_loop.state.run_state import take_state
from isaac_loop.state.store import CheckpointStore

from .by_hand import save, validated
from .report import markdown
from .workloads import batches, mlp

AROUND_BATCHES = (
    "before_fit",
    "after_fit",
    "cleanup_fit",
    "before_epoch",
    "after_epoch",
    "cleanup_epoch",
    "log",
    "measured",
)
IN_BATCH = [event for event in EVENTS if event not in AROUND_BATCHES]


def timed(variants, rounds, clock=time.perf_counter):
    "Seconds of each variant by name, all rounds, in random order within each"
    times = {name: [] for name in variants}
    for n_round in range(-1, rounds):  # The first warms up
        for name in random.sample(list(variants), len(variants)):
            start = clock()
            variants[name]()
            if n_round >= 0:
                times[name].append(clock() - start)
    return times


def typical(times):
    "The 20th percentile of each, which is steady on a noisy machine"
    return {name: sorted(values)[len(values) // 5] for name, values in times.items()}


def difference(times, one, other):
    "The median of the differences of pairs, in seconds"
    return statistics.median(b - a for a, b in zip(times[one], times[other]))


def quiet(f):
    "`f` with its output thrown away"

    def run():
        with contextlib.redirect_stdout(io.StringIO()):
            f()

    return run


# Evaluations


def trainer_of(data, *callbacks, valid=None, opt_func=optim.SGD, model=None):
    dls = DataLoaders(data, valid)
    return Trainer(dls, F.cross_entropy, opt_func, model or mlp(), [BasicTrainCB(), *callbacks])


def evaluations(rounds):
    "Milliseconds of one evaluation beside its batches, which the loop by hand evaluates as well"
    data, valid, rounds = batches(20, 64), batches(10, 64), 5 * rounds  # Some of them meet noise
    model = mlp()
    trainer = trainer_of(data, MetricsCB(show=False), valid=valid, model=model)
    trainer.fit(1)
    variants = {"by hand": lambda: validated(model, valid).means(), "validate": quiet(trainer.validate)}
    times = timed(variants, rounds)
    yield {"one evaluation": "validate", **beside(difference(times, "by hand", "validate"), times["by hand"])}

    def fit_with(*callbacks):
        trainer = trainer_of(data, MetricsCB(show=False), *callbacks, valid=valid)
        return quiet(lambda: trainer.fit(1, valid=False))

    def after_batch(trainer):
        "The same after every fourth update, by hand: there it meets the caches as an update has left them"
        if (trainer.batch_num + 1) % 4 == 0:
            validated(trainer.model, valid).means()

    evaluator = EvaluatorCB(updates=4, at_end=False)
    fits = timed({"by hand": fit_with(after_batch), "ours": fit_with(evaluator)}, rounds)
    over = difference(fits, "by hand", "ours") / evaluator.n_evaluations
    yield {"one evaluation": "EvaluatorCB", **beside(over, times["by hand"])}


@contextlib.contextmanager
def timed_evaluations(model, valid):
    """Processor time of evaluations, one by `EvaluatorCB` after an update and one by hand after the next.

    Both find the caches as an update has left them. The library's class is timed from outside: a subclass
    would lead to more objects, and be searched for generators as any class of a user.
    """
    times, evaluate = {"by hand": [], "ours": []}, EvaluatorCB.after_batch

    def after_batch(self, trainer):
        name = "by hand" if trainer.batch_num % 2 else "ours"
        start = time.process_time()
        validated(model, valid).means() if name == "by hand" else evaluate(self, trainer)
        times[name].append(time.process_time() - start)

    EvaluatorCB.after_batch = after_batch
    try:
        yield times
    finally:
        EvaluatorCB.after_batch = evaluate


def evaluations_within(rounds):
    "The same after the updates of a fit, by processor time: one batch or ten, in a list or a `DataLoader`"
    for kind, n in [("list", 1), ("list", 10), ("DataLoader", 1)]:
        data, valid, model = batches(20, 64), batches(n, 64), mlp()
        if kind == "DataLoader":
            data, valid = (DataLoader(TensorDataset(*map(torch.cat, zip(*o))), 64) for o in (data, valid))
        evaluator = EvaluatorCB(updates=1, at_end=False)
        trainer = trainer_of(data, MetricsCB(show=False), evaluator, valid=valid, model=model)
        with timed_evaluations(model, valid) as times:
            trainer.fit(rounds, valid=False)
        over = difference(times, "by hand", "ours")
        what = f"{kind}, {n} batch" + "es" * (n > 1)
        yield {"one evaluation": what, **beside(over, times["by hand"])}


def beside(over, by_hand):
    return {
        "its batches by hand": f"{statistics.median(by_hand) * 1000:.2f} ms",
        "besides": f"{over * 1000:.2f} ms",
    }


# Checkpoints


def fitted(width, *callbacks, n=1):
    "A trainer of a model with two square layers, whose Adam has a state"
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    trainer = Trainer(
        DataLoaders([(torch.randn(4, width),)] * n), None, optim.Adam, model, [BasicTrainCB(), *callbacks]
    )
    trainer.loss_func = lambda preds: preds.square().mean()
    trainer.fit(1, valid=False)
    return trainer


def checkpoints(rounds):
    "A checkpoint against `torch.save` and `fsync` of the same"
    for n_parameters in (1_000, 100_000, 5_000_000):
        trainer = fitted(int((n_parameters / 2) ** 0.5))
        with tempfile.TemporaryDirectory(dir=".") as place, CheckpointStore(Path(place) / "ours") as store:
            variants = two_ways_to_save(trainer, store, Path(place))
            wall = typical(timed(variants, rounds))
            cpu = typical(timed(variants, rounds, time.process_time))
        yield {"parameters": f"{n_parameters:,}", **compared("wall", wall), **compared("processor", cpu)}


def two_ways_to_save(trainer, store, place):
    "`torch.save` with `fsync`, and a checkpoint, of the state as it is"
    steps = iter(range(1, 10**6))

    def raw():
        save(place / "raw.pt", *take_state(trainer, 1, copy=False))

    def ours():
        store.save(*take_state(trainer, 1, copy=False), next(steps))

    return {"torch.save + fsync": raw, "checkpoint": ours}


def checkpoints_of_the_mlp(rounds):
    "A checkpoint of the MLP 64-64-10 with Adam, against the same state and against model and optimizer alone"
    trainer = trainer_of(batches(20, 64), MetricsCB(show=False), opt_func=optim.Adam)
    trainer.fit(1, valid=False)
    with tempfile.TemporaryDirectory(dir=".") as place, CheckpointStore(Path(place) / "ours") as store:
        variants = two_ways_to_save(trainer, store, Path(place))
        alone = {"model and optimizer alone": lambda: save(Path(place) / "b.pt", trainer.model, trainer.opt)}
        wall = typical(timed(alone | variants, 5 * rounds))
        cpu = typical(timed(alone | variants, 5 * rounds, time.process_time))
    for name in wall:
        ratio = cpu["checkpoint"] / cpu[name]
        row = {"what is written": name, "wall": f"{wall[name] * 1e3:.2f} ms"}
        yield row | {"processor": f"{cpu[name] * 1e3:.2f} ms", "checkpoint is": f"{ratio:.2f} times"}


class TimedCheckpointCB(CheckpointCB):
    "Takes the time for which each save in the middle of a pass holds up the loop"

    def __init__(self, folder, every, n):
        super().__init__(folder, every=every, resume="never")
        self.times, self.n = [], n

    def _between_batches(self, trainer):
        start, last = time.perf_counter(), self._when.saves
        super()._between_batches(trainer)
        if self._when.saves != last:
            self.times.append(time.perf_counter() - start)
        if len(self.times) == self.n:
            trainer.request_stop("enough")


def saves_in_the_background(rounds):
    "How long one save holds up the loop: at every update, or by time, when it is written in the background"
    sizes = {"MLP 64-64-10": None, "2,000,000 parameters": 1_000, "9,680,000 parameters": 2_200}
    for name, width in sizes.items():
        found = {}
        for kind, every in {"foreground": 1, "background": datetime.timedelta(0)}.items():
            with tempfile.TemporaryDirectory(dir=".") as place:
                saving = TimedCheckpointCB(place, every, rounds)
                quiet(partial(fit_with_saves, saving, width))()
            found[kind] = statistics.median(saving.times)
        held_up = {kind: f"{o * 1e3:.2f} ms" for kind, o in found.items()}
        share = found["background"] / found["foreground"]
        yield {"held up per save": name, **held_up, "share": f"{share:.2f}"}


def fit_with_saves(saving, width, n=100_000):
    if width is not None:
        return fitted(width, saving, n=n)
    trainer_of(batches(20, 64) * (n // 20), saving, opt_func=optim.Adam).fit(1, valid=False)


def compared(kind, found):
    ratio = found["checkpoint"] / found["torch.save + fsync"]
    return {f"{name}, {kind}": f"{o * 1000:.1f} ms" for name, o in found.items()} | {
        f"ratio, {kind}": f"{ratio:.2f}"
    }


def checkpoints_of_a_fit(rounds):
    "Processor time of one checkpoint of a tiny model within a fit, with what `CheckpointCB` does besides"
    data = batches(20, 64)
    with tempfile.TemporaryDirectory(dir=".") as place:
        numbers = iter(range(10**6))

        def run(*callbacks):
            trainer_of(data, *callbacks, opt_func=optim.Adam).fit(1, valid=False)

        def with_checkpoints(every):
            return quiet(lambda: run(CheckpointCB(f"{place}/{next(numbers)}", every=every, resume="never")))

        times = timed({"2": with_checkpoints(10), "10": with_checkpoints(2)}, rounds, time.process_time)
    each = difference(times, "2", "10") / 8
    return f"One checkpoint of the MLP with Adam within a fit: {each * 1000:.1f} ms of processor time.\n"


# Loaders


def loaders(rounds, n=20_000, size=32):
    "Microseconds per batch of 32 rows, for the exact loader and a plain one"
    for workers, found in {"none": loading(n, size, rounds), "two": handing_out(n, size, rounds)}.items():
        found = {name: o / (n // size) * 1e6 for name, o in found.items()}
        over = found["exact_loader"] - found["DataLoader"]
        yield {"workers": workers, **{k: f"{v:.0f} µs" for k, v in found.items()}, "over": f"{over:+.0f} µs"}


def two_loaders(n, size, num_workers):
    data = TensorDataset(torch.randn(n, 16), torch.randint(3, (n,)))
    return {
        "DataLoader": DataLoader(data, size, shuffle=True, num_workers=num_workers),
        "exact_loader": exact_loader(data, size, num_workers=num_workers),
    }


def loading(n, size, rounds):
    "Without workers"
    variants = {name: lambda dl=dl: [None for _ in dl] for name, dl in two_loaders(n, size, 0).items()}
    return typical(timed(variants, rounds))


def handing_out(n, size, rounds):
    """What the training process does for workers: choose rows, pickle their numbers, note the position.

    Waiting for a batch and unpacking it is the same for both, and varies by 100 us and more, so it is
    left out.
    """
    plain, exact = two_loaders(n, size, 2).values()
    exact._begin = lambda: iter(range(n))  # Batches that are there at once
    assert isinstance(exact, ExactLoader)

    def choose(loader):
        return lambda: [pickle.dumps((0, o)) for o in loader.batch_sampler]

    variants = {
        "DataLoader": choose(plain),
        "exact": choose(exact),
        "position": lambda: [None for _ in exact],
    }
    found = typical(timed(variants, rounds))
    return {"DataLoader": found["DataLoader"], "exact_loader": found["exact"] + found["position"]}


# The frame itself


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


class Repeated:
    "`n` batches without a tensor"

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter([(0, 0)] * self.n)


def alone(n, *callbacks):
    "A fit of `n` batches without tensors"
    it = StandIn()
    trainer = Trainer(DataLoaders(Repeated(n)), it, None, it, [BasicTrainCB(), *callbacks])
    trainer.opt = it
    return lambda: trainer.fit(1, 0.01, valid=False)


def one(trainer):
    return 1.0


def lengths(longest):
    "Microseconds per batch of the frame, as runs get longer"
    for n in [n for n in (10, 100, 1_000, 10_000, 100_000, 1_000_000) if n <= longest]:
        row = {"batches": f"{n:,}"}
        for name, callbacks in {"BasicTrainCB": [], "and RecorderCB": [RecorderCB(one=one)]}.items():
            fit = alone(n, *callbacks)
            best = min(timed({"fit": fit}, 1 if n >= 10**5 else min(20, 2 * 10**4 // n))["fit"])
            row[name] = f"{best / n * 1e6:.2f} µs"
        yield row


def with_events(n):
    "A callback that answers the first `n` events of a batch and does nothing"
    handlers = {event: lambda self, trainer: None for event in IN_BATCH[:n]}
    return type(f"Answers{n}", (), handlers or {"before_fit": lambda self, trainer: None})()


def events(rounds, n=5_000):
    "Microseconds per batch that a callback costs, by how many events it answers"
    counts = [0, 1, 2, 4, 8, 16, len(IN_BATCH)]
    variants = {"none": alone(n)} | {count: alone(n, with_events(count)) for count in counts}
    times = timed(variants, rounds)
    for count in counts:
        cost = difference(times, "none", count) / n * 1e6
        each = f"{cost / count:.2f} µs" if count else ""
        yield {"events": count, "cost per batch": f"{cost:.2f} µs", "for each": each}


SECTIONS = {
    "Evaluations beside their batches": evaluations,
    "Evaluations in the middle of a fit, processor time": evaluations_within,
    "A checkpoint with Adam's state against `torch.save` and `fsync`": checkpoints,
    "A checkpoint of the MLP 64-64-10 with Adam": checkpoints_of_the_mlp,
    "Saves in the middle of a pass": saves_in_the_background,
    "Loaders, microseconds per batch of 32 rows": loaders,
}
FRAME = "Model, loss and optimizer are stand-ins. Beside real tensors the same instructions come in cold."


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds = 3 if quick else 21
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("## Around the loop\n")
    for title, measure in SECTIONS.items():
        print(f"### {title}\n\n{markdown(measure(rounds))}")
    print(checkpoints_of_a_fit(rounds))
    print(f"### The frame itself\n\n{FRAME}\n\n{markdown(lengths(10**4 if quick else 10**6))}")
    print(f"What a callback costs by the events of a batch that it answers:\n\n{markdown(events(rounds))}")


if __name__ == "__main__":
    main()
