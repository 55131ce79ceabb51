"""Samples per second of a loader that reads row by row, and of the same loader from memory.

    python -m benchmarks.data [--quick]

For each kind of data both loaders give the same samples in the same order, which is checked first. They run
in turn; the least time of all rounds counts. Without workers it is processor time, with workers time on the
clock.
"""

import argparse
import time

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from isaac_loop.basics.tensors import inplace, set_seed
from isaac_loop.data.dataloaders import collate_rows, get_dataloaders
from isaac_loop.data.small_data import image_to_tensor, load_digits
from isaac_loop.data.exact_loaders import exact_loader


@inplace
def to_tensors(rows):
    rows["image"] = [image_to_tensor(image) for image in rows["image"]]


class Images(Dataset):
    "Images of 28 by 28 bytes, each turned into floats when it is read"

    def __init__(self, n):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, (n, 28, 28), dtype=torch.uint8, generator=generator).numpy()
        self.labels = torch.randint(10, (n,), generator=generator).tolist()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return image_to_tensor(self.images[i]), self.labels[i]


def stacked(dataset):
    "The same rows as tensors: the least work that a loader that reads row by row can have"
    batches = list(DataLoader(dataset, 1000))
    return TensorDataset(*(torch.cat(column) for column in zip(*batches)))


def pair(dataset, seed, workers):
    "The loader that reads and the one from memory, with batches of 64"
    options = dict(num_workers=workers, collate_fn=collate_rows(), pin_memory=False)
    makes = [dict(in_memory=False), dict(in_memory=True)]
    return [get_dataloaders(dataset, None, 64, seed=seed, **options, **o)[0] for o in makes]


def same_batches(a, b):
    "Whether two loaders give the same, bit for bit"
    set_seed(1)
    first = list(a)
    set_seed(1)
    second = list(b)
    pairs = zip(first, second, strict=True)
    return all(torch.equal(x, y) for one, other in pairs for x, y in zip(one, other, strict=True))


def seconds(loader, clock):
    "Time of one pass"
    start = clock()
    for _ in loader:
        pass
    return clock() - start


def compare(name, dataset, seed, workers, rounds):
    "One line of the table"
    usual, kept = pair(dataset, seed, workers)
    assert same_batches(usual, kept), name
    clock = time.perf_counter if workers else time.process_time
    times = [(seconds(usual, clock), seconds(kept, clock)) for _ in range(rounds)]
    slow, fast = (min(column) for column in zip(*times))
    kind = "plain" if seed is None else "exact"
    n = len(dataset)
    return f"| {name} | {kind} | {workers} | {n / slow:,.0f} | {n / fast:,.0f} | {slow / fast:.1f} |"


def exact_overhead(rounds):
    "Microseconds that an exact loader adds to a batch of 32 rows, without workers"

    class Rows(Dataset):
        data = TensorDataset(torch.rand(6400, 8), torch.arange(6400))
        __len__ = lambda self: len(self.data)
        __getitem__ = lambda self, i: self.data[i]

    plain, exact = DataLoader(Rows(), 32, shuffle=True), exact_loader(Rows(), 32)
    clock = time.process_time
    times = [(seconds(plain, clock), seconds(exact, clock)) for _ in range(3 * rounds)]
    return (min(b for _, b in times) - min(a for a, _ in times)) / len(plain) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, n = (1, 500) if quick else (5, 20_000)  # Passes of each loader, and images
    torch.set_num_threads(1)
    digits = load_digits()["train"]
    images = Images(n)
    kinds = {
        "digits, from images": digits.with_transform(to_tensors),
        "digits, tensors": stacked([*map(tuple, map(dict.values, digits.with_transform(to_tensors)))]),
        f"{n:,} images of 28x28, from bytes": images,
        f"{n:,} images of 28x28, tensors": stacked(images),
    }
    print("## Rows from memory, batches of 64\n")
    print("| data | loader | workers | row by row, samples/s | in memory, samples/s | ratio |")
    print("|---|---|---|---|---|---|")
    for name, dataset in kinds.items():
        for seed in (None, 1):
            for workers in (0, 2):
                print(compare(name, dataset, seed, workers, rounds), flush=True)
    over = exact_overhead(rounds)
    print(f"\n`exact_loader` over `DataLoader`, batches of 32, no workers: {over:+.0f} µs a batch.\n")


if __name__ == "__main__":
    main()
