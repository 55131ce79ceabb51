"""What several processes cost, beside loops written by hand that sum their gradients.

    python -m benchmarks.several

prints Markdown. Times are those of the batches of a pass, in main; finding together and parting are left out.
Two processes on two cores leave none for anybody else, so processor time stands beside wall time.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from isaac_loop.all import BasicTrainCB, CheckpointCB, DataLoaders, DistributedCB, Trainer, exact_loader
from isaac_loop.device.launching import launch

from .report import markdown, middle
from .workloads import SEED, batches, mlp

LR, WIDTH, LIMIT, N_SAVES = 0.01, 384, 300, 5


def net():
    "The same model in every process"
    torch.manual_seed(SEED)
    layers = [nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
    return nn.Sequential(*layers)


def rows(n, rank=0):
    "Random rows, others in each process"
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(n, 256, generator=generator), torch.randint(0, 10, (n,), generator=generator)


class Clock:
    "Notes how long the batches of a pass have taken"

    on_valid = False

    def before_epoch(self, trainer):
        self.start()

    def after_epoch(self, trainer):
        self.stop()

    def start(self):
        self._began = time.perf_counter(), time.process_time()

    def stop(self):
        began = self._began
        self.wall, self.cpu = time.perf_counter() - began[0], time.process_time() - began[1]


def bare(model, data):
    "No other process"
    opt, clock = optim.SGD(model.parameters(), LR), Clock()
    clock.start()
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    clock.stop()
    return clock


def flat_sum(model, data):
    "All gradients as one tensor, summed by hand"
    opt, clock = optim.SGD(model.parameters(), LR), Clock()
    params, size = list(model.parameters()), dist.get_world_size()
    clock.start()
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        flat = torch.cat([p.grad.view(-1) for p in params])
        dist.all_reduce(flat)
        flat /= size
        parts = flat.split([p.numel() for p in params])
        torch._foreach_copy_([p.grad for p in params], [part.view(p.shape) for part, p in zip(parts, params)])
        opt.step()
        opt.zero_grad()
    clock.stop()
    return clock


def by_ddp(model, data):
    "PyTorch's own way, as one writes it"
    return bare(DistributedDataParallel(model), data)


def ours(model, data, *callbacks):
    "A trainer whose processes have their own batches"
    clock = Clock()
    callbacks = [BasicTrainCB(), DistributedCB(share=False, timeout=60), clock, *callbacks]
    trainer = Trainer(DataLoaders(data), F.cross_entropy, optim.SGD, model, callbacks)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(1, LR, valid=False)
    return clock


WAYS = {"a flat sum by hand": flat_sum, "DDP by hand": by_ddp, "DistributedCB": ours}


def begin():
    "Begin a group for the loops by hand; the trainer forms one of its own in it"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def in_turn(n_rows, n, rounds):
    "Runs in one of several processes: seconds by way, and the largest difference of the weights"
    begin()
    data = [rows(n_rows, dist.get_rank() * n + i) for i in range(n)]
    found, weights = {name: [] for name in WAYS}, {}
    for n_round in range(-1, rounds):
        for name in list(WAYS)[:: 1 if n_round % 2 else -1]:
            model = net()
            dist.barrier()
            clock = WAYS[name](model, data)
            weights[name] = torch.cat([p.detach().view(-1) for p in model.parameters()])
            if n_round >= 0:
                found[name].append((clock.wall, clock.cpu))
    dist.destroy_process_group()
    return found, max((o - weights["DistributedCB"]).abs().max().item() for o in weights.values())


def rows_for(seconds):
    "How many rows make a step of about that many seconds, in one process"
    torch.set_num_threads(1)
    data = [rows(64)] * 20
    bare(net(), data)
    each = bare(net(), data).wall / len(data)
    return max(int(64 * seconds / each), 1)


def sums(n, rounds):
    "Our exchange against a flat sum by hand and against DDP by hand, in two processes"
    (n_rows,) = launch(rows_for, 1, 0.003, timeout=LIMIT)
    (found, differ), *_ = launch(in_turn, 2, n_rows, n, rounds, timeout=LIMIT)
    for other in list(WAYS)[:-1]:
        yield compared(f"DistributedCB over {other}", found[other], found["DistributedCB"], n)
    yield {"what": f"largest difference of the weights: {differ:.1g}"} | dict.fromkeys(COLUMNS[1:], "")


COLUMNS = ["what", "ratio", "middle half", "by processor time", "ms per batch"]


def compared(what, base, other, n):
    "A row of the table, from pairs of wall and processor seconds"
    low, median, high = middle([b[0] / a[0] for a, b in zip(base, other)])
    cpu = statistics.median(b[1] / a[1] for a, b in zip(base, other))
    each = [statistics.median(wall for wall, _ in o) / n * 1000 for o in (base, other)]
    values = [
        what,
        f"{median:.2f}",
        f"{low:.2f}–{high:.2f}",
        f"{cpu:.2f}",
        f"{each[1]:.2f} over {each[0]:.2f}",
    ]
    return dict(zip(COLUMNS, values))


def shared_fit(n_rows, n, folder=None, every=None):
    "A fit whose batches all processes share; wall and processor seconds"
    torch.set_num_threads(1)
    loader = exact_loader(TensorDataset(*rows(n_rows * n)), n_rows, seed=SEED)
    clock, callbacks = Clock(), []
    if folder is not None:
        callbacks = [CheckpointCB(folder, every=every, resume="never")]
    callbacks += [BasicTrainCB(), DistributedCB(timeout=60), clock]
    trainer = Trainer(DataLoaders(loader), F.cross_entropy, optim.Adam, net(), callbacks)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(1, LR, valid=False)
    return clock.wall, clock.cpu


def one_and_two(n, rounds):
    "The same batches of 5 ms in one process and in two"
    (n_rows,) = launch(rows_for, 1, 0.005, timeout=LIMIT)
    found = {1: [], 2: []}
    for _ in range(rounds):
        for size in found:
            found[size].append(launch(shared_fit, size, n_rows, n, timeout=LIMIT)[0])
    yield compared("two processes over one, batches shared", found[1], found[2], n)


def saves(n_rows, n, place, rounds):
    "Seconds of a checkpoint in one of several processes: a fit with some over a fit with none"
    found = []
    for n_round in range(-1, rounds):
        without = shared_fit(n_rows, n)
        with_some = shared_fit(n_rows, n, f"{place}/{n_round}", every=n // N_SAVES)
        if n_round >= 0:
            found.append(tuple((b - a) / N_SAVES for a, b in zip(without, with_some)))
    return found


def saving(n, rounds):
    "A checkpoint in two processes over one in one"
    found = {}
    for size in (1, 2):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            found[size] = launch(saves, size, 32, n, Path(folder).absolute(), rounds, timeout=LIMIT)[0]
    each = {size: [statistics.median(o) for o in zip(*pairs)] for size, pairs in found.items()}
    (wall, cpu), (wall_of_two, cpu_of_two) = each[1], each[2]
    ms = f"{wall_of_two * 1000:.1f} over {wall * 1000:.1f} for each"
    values = [
        "a checkpoint in two processes over one",
        f"{wall_of_two / wall:.2f}",
        "",
        f"{cpu_of_two / cpu:.2f}",
        ms,
    ]
    yield dict(zip(COLUMNS, values))


def rows_of(part, n, rounds):
    "Rows of the table; one that says why, if that part fails"
    try:
        return list(part(n, rounds))
    except Exception as error:
        return [
            {"what": f"`{part.__name__}` failed: {type(error).__name__}"} | dict.fromkeys(COLUMNS[1:], "")
        ]


def in_one_process(n, rounds):
    "Microseconds per batch of `DistributedCB` where there is nothing to exchange"
    data, found = batches(n, 64), []

    def fit(*callbacks):
        clock = Clock()
        trainer = Trainer(
            DataLoaders(data), F.cross_entropy, optim.SGD, mlp(), [BasicTrainCB(), clock, *callbacks]
        )
        trainer.fit(1, LR, valid=False)
        return clock.wall

    for n_round in range(-1, rounds):
        without, alone = fit(), fit(DistributedCB())
        if n_round >= 0:
            found.append((alone - without) / n * 1e6)
    return f"`DistributedCB` in one process: {statistics.median(found):+.1f} µs per batch.\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    n, rounds = (20, 2) if quick else (100, 11)
    torch.set_num_threads(1)
    parts = [(sums, rounds), (one_and_two, 1 if quick else 5), (saving, rounds)]
    table = [row for part, rounds in parts for row in rows_of(part, n, rounds)]
    print(f"## Several processes\n\n{markdown(table)}\n{in_one_process(5 * n, rounds)}")


if __name__ == "__main__":
    main()
