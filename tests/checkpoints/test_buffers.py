"Buffers that no `state_dict` has, where weights are kept, averaged and found again."

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import (
    BasicTrainCB,
    CheckpointCB,
    DataLoaders,
    EMACB,
    EvaluatorCB,
    InterruptCB,
    KeepBestCB,
    MetricsCB,
    SWACB,
    Trainer,
    exact_loader,
    set_seed,
)
from resumed import press


class Scaled(nn.Module):
    "Computes with a running mean and a count, the one in a buffer that has come with the first batch"

    def __init__(self, persistent):
        super().__init__()
        self.line = nn.Linear(4, 1)
        self.register_buffer("mean", None, persistent)
        self.register_buffer("n", torch.zeros(()), persistent)

    def forward(self, x):
        if self.training:
            now = x.detach().abs().mean(0)
            self.mean = now if self.mean is None else self.mean.lerp(now, 0.5)
            self.n += 1
        return self.line(x * (1 + self.mean)) + 0.1 * self.n


def made(persistent, *callbacks):
    set_seed(1)
    x = torch.randn(60, 4)
    y = x.sum(1, keepdim=True)
    dls = DataLoaders(exact_loader(list(zip(x, y)), 20, seed=7), [(x, y)])
    steps = BasicTrainCB(), MetricsCB(show=False)
    return Trainer(dls, F.mse_loss, optim.SGD, Scaled(persistent), [*steps, *callbacks])


class PressCB:
    "Ctrl-C in a batch of the second epoch"

    def __init__(self, training, batch):
        self.when = training, 1, batch

    def before_batch(self, trainer):
        if (trainer.training, trainer.epoch, trainer.batch_num) == self.when:
            press(trainer)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(
    "make, when, column",
    [
        (lambda: [EMACB(0.9)], (False, 0), "valid_loss"),
        (lambda: [SWACB(0.0), EvaluatorCB(updates=1)], (True, 0), "eval_loss"),
    ],
)
def test_an_average_goes_on_with_the_buffers_that_it_had(make, when, column, persistent, tmp_path):
    def run(folder, *others):
        t = made(persistent, *make(), InterruptCB(), CheckpointCB(folder))
        t.fit(3, lr=0.05, callbacks=others)
        return str((t.history[column], t.history.batches.columns.get(column)))

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", PressCB(*when))
    assert run(tmp_path / "cut") == whole


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("average", [[], [lambda: EMACB(0.5)]])
def test_the_best_model_is_the_one_that_was_measured(average, persistent):
    def before_epoch(trainer):
        if trainer.training and trainer.epoch == 2:
            trainer.opt.param_groups[0]["lr"] = 0.5

    t = made(persistent, *[make() for make in average], KeepBestCB(), before_epoch)
    t.fit(4, lr=0.02)
    assert t.KeepBestCB.best_epoch < 3
    assert t.validate()["valid_loss"] == t.KeepBestCB.best


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("cb", [lambda: EMACB(0.5), lambda: SWACB(0.5), lambda: SWACB(0.0, every="update")])
def test_an_average_takes_over_buffers_that_come_with_the_first_batch(cb, persistent):
    t, alone = made(persistent, cb()), made(persistent)
    t.fit(3, lr=0.05)
    alone.fit(3, lr=0.05)
    assert all(map(torch.equal, t.model.parameters(), alone.model.parameters()))
    assert torch.equal(t.model.mean, alone.model.mean) and t.model.n == alone.model.n
    average = t.callbacks[-1].average.module
    assert torch.equal(average.mean, t.model.mean) and average.n == t.model.n
    x, y = t.dls.valid[0]
    assert F.mse_loss(average(x), y).item() == t.history.latest("valid_loss")
