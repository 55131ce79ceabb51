"A loader of the user's own that reads several loaders, each of which knows its place"

import random

import pytest
import torch
from torch import nn, optim

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.data.replay_loaders import ReplayLoader
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer
from isaac_loop.train.training import BasicTrainCB

ROWS = [(torch.tensor([i / 100.0]),) for i in range(48)]


class Both:
    "Labelled and unlabelled rows side by side"

    def __init__(self, n=48):
        self.a, self.b = exact_loader(ROWS[:n], 4, seed=1), exact_loader(ROWS[:n], 4, seed=2)

    def __len__(self):
        return 6

    def __iter__(self):
        for (x,), (u,), _ in zip(self.a, self.b, range(6)):
            yield x, u


class Again(Both):
    "The labelled rows are few, and come several times in a pass"

    def __init__(self):
        self.a, self.b = exact_loader(ROWS[:12], 4, seed=1), exact_loader(ROWS, 4, seed=2)

    def again(self):
        while True:
            yield from self.a

    def __iter__(self):
        for (x,), (u,), _ in zip(self.again(), self.b, range(6)):
            yield x, u


class Shuffled:
    "Its order comes from a generator of its own"

    def __init__(self):
        self.rng = random.Random(7)

    def __iter__(self):
        rows = torch.arange(24.0).view(24, 1) / 24
        for _ in range(6):
            yield tuple(rows[self.rng.sample(range(24), 4)] for _ in range(2))


class SemiCB(BasicTrainCB):
    def predict(self, trainer):
        trainer.preds = trainer.model(trainer.batch[0])
        self.seen.append((trainer.epoch, trainer.batch_num, *torch.cat(trainer.batch).flatten().tolist()))

    def get_loss(self, trainer):
        trainer.loss = (trainer.preds - trainer.batch[1]).square().mean()


def run(make, folder, cut=None, every=1):
    "Weights in the end, and every batch"
    set_seed(0)
    semi = SemiCB()
    semi.seen = []

    def before_backward(trainer):
        if trainer.n_updates == cut:
            raise KeyboardInterrupt

    net = nn.Sequential(nn.Linear(1, 9), nn.Dropout(0.5), nn.Linear(9, 1))
    callbacks = [semi, CheckpointCB(folder, every=every), before_backward]
    trainer = Trainer(DataLoaders(make()), None, optim.SGD, net, callbacks)
    try:
        trainer.fit(3, lr=0.1, valid=False)
    except KeyboardInterrupt:
        pass
    return list(map(torch.Tensor.tolist, net.parameters())), semi.seen


MAKE = {
    "both": Both,
    "as long as a pass": lambda: Both(24),
    "cycled": Again,
    "replayed": lambda: ReplayLoader(Both(), seed=3),
    "cycled and replayed": lambda: ReplayLoader(Again(), seed=3),
    "shuffled and replayed": lambda: ReplayLoader(Shuffled(), seed=3),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("every", [1, 4, "epoch"])
@pytest.mark.filterwarnings("ignore")
def test_a_run_goes_on_exactly(make, every, tmp_path):
    whole, batches = run(make, tmp_path / "whole", every=every)
    known = {batch[:2]: batch for batch in batches}
    for cut in (3, 5, 9, 14):
        run(make, tmp_path / f"{cut}", cut, every)
        again, rest = run(make, tmp_path / f"{cut}", every=every)
        assert rest == [known[batch[:2]] for batch in rest], cut
        assert again == whole, cut


class Buffered:
    "What is left in its buffer depends on draws from where dropout draws as well"

    def __len__(self):
        return 6

    def __iter__(self):
        left = list(torch.arange(24.0).view(6, 4, 1) / 24)
        while left:
            x = left.pop(int(torch.randint(len(left), ())))
            yield x, x


def test_a_loader_that_draws_where_the_model_does_is_not_read_again_exactly_and_that_is_said(tmp_path):
    whole, _ = run(Buffered, tmp_path / "whole")
    run(Buffered, tmp_path / "cut", cut=3)
    with pytest.warns(UserWarning, match="the loader draws while it is read.*as dropout does"):
        again, _ = run(Buffered, tmp_path / "cut")
    assert again != whole
