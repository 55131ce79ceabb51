"""The work that every library does: the same batches, the same model to begin with, the same optimizer.

| work | what it is |
|---|---|
| tiny | an MLP 64-64-10 on batches of 64 held in memory, and nothing besides: only the frame costs |
| typical | the same, with validation, accuracy and mean loss of both passes, a history, progress to a file |
| cnn | four convolutions with batch norm on 28 by 28 pixels |
| tutorial | the digits as a user would write it, loaders and measuring included |
| guarded | typical with what a careful person attaches: bar, clipping, one-cycle, EMA, checkpoints, Ctrl-C |
"""

import copy
import functools
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.data import DataLoader

LR, CLIP, DECAY, SEED = 0.01, 1.0, 0.99, 42


@dataclass
class Work:
    "One kind of work: batches, a model, and how often to go through the batches"

    name: str
    train: list  # Pairs of inputs and targets
    valid: list
    net: nn.Module = field(repr=False)
    epochs: int = 2
    lr: float = LR

    def model(self):
        "A model that begins with the same weights every time"
        return copy.deepcopy(self.net)

    @property
    def n_batches(self):
        "Batches of a whole run, those of validation included"
        return self.epochs * (len(self.train) + len(self.valid))


def mlp():
    "64-64-10"
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutions(widths=(1, 8, 16, 32, 32)):
    "Four convolutions with batch norm"
    layers = []
    for before, after in zip(widths, widths[1:]):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def batches(n, *shape):
    "`n` batches of 64 random inputs and targets"
    return [(torch.randn(64, *shape), torch.randint(0, 10, (64,))) for _ in range(n)]


class InOrder:
    "Row numbers of the batches of one epoch after the other, in the order of the library's loaders"

    def __init__(self, n, batch_size):
        from isaac_loop.data.sampling import SeededBatchSampler

        self.sampler = SeededBatchSampler(n, batch_size, seed=SEED)
        self.batch_size, self.drop_last = batch_size, False
        self.epoch = 0

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        self.sampler.set_epoch(self.epoch)
        *others, last = map(list, self.sampler)
        yield from others
        self.epoch += 1  # With the last: some look at the first before they begin, some never ask for the end
        yield last


def digits():
    "The digits as a dataset for each split, whose rows are tensors when they are asked for"
    from isaac_loop.data.small_data import image_to_tensor, load_digits

    def to_tensors(rows):
        return {**rows, "image": [image_to_tensor(image) for image in rows["image"]]}

    return load_digits().with_transform(to_tensors)


def stacked(rows):
    "A batch from rows"
    return torch.stack([row["image"] for row in rows]), torch.tensor([row["label"] for row in rows])


def digit_loaders():
    "The digits in plain loaders: the rows in the same order in every library"
    data = digits()
    train = DataLoader(data["train"], batch_sampler=InOrder(len(data["train"]), 64), collate_fn=stacked)
    return train, DataLoader(data["test"], 128, collate_fn=stacked)


def tiny(n=300):
    return Work("tiny", batches(n, 64), [], mlp())


def typical(n=300):
    return Work("typical", batches(n, 64), batches(max(n // 5, 1), 64), mlp())


def cnn(n=60):
    return Work("cnn", batches(n, 1, 28, 28), [], convolutions(), epochs=1)


def tutorial(n=3):
    "The batches are not here: the variants read them themselves, in `n` epochs"
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return Work("tutorial", range(23), range(3), net, epochs=n, lr=0.1)


def guarded(n=300):
    return Work("guarded", batches(n, 64), batches(max(n // 5, 1), 64), mlp())


WORKS = {work.__name__: work for work in (tiny, typical, cnn, tutorial, guarded)}


@functools.cache
def make(name, n=None):
    "The work called `name`, the same in every process; `n` makes it shorter"
    torch.manual_seed(SEED)
    return WORKS[name](*([] if n is None else [n]))


def ready_loader(pairs):
    "Ready batches as a `DataLoader` that hands them on, for libraries that want one"
    return DataLoader(pairs, batch_size=None)


def with_loaders(work):
    "The tutorial's work, its loaders made now"
    train, valid = digit_loaders()
    return Work(work.name, train, valid, work.net, work.epochs, work.lr)
