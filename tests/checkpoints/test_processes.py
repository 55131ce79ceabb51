"Several processes save one checkpoint, and any number of them goes on from it."

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.checkpoints.exports import ExportCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.device.distributed import DistributedCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.state.checkpoint_files import Checkpoint
from isaac_loop.state.errors import CheckpointWriteFailed, RankFailed, StateOwnerMissing
from isaac_loop.state.store import CheckpointStore
from isaac_loop.stop.interrupts import InterruptCB
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.averaging import EMACB
from several import TIMEOUT, in_processes, loaders, net, outcome, rank, rows, trainer

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:The run was saved by"),
]


class GoneCB:
    "A process that is gone without a word"

    order = 45  # After the checkpoint of this batch was written, or not

    def __init__(self, epoch, batch, event="before_backward", ranks=(0, 1, 2)):
        self.place, self.ranks = (epoch, batch), ranks
        setattr(self, event, self.look)

    def look(self, trainer):
        if (trainer.epoch, trainer.batch_num) == self.place and rank() in self.ranks:
            os._exit(9)


class RowsCB:
    "The rows of every training batch, as all processes together have them"

    stateless = True

    def __init__(self):
        self.seen = []

    def after_batch(self, trainer):
        if trainer.training:
            parts = trainer.ranks.gather(trainer.batch[0][:, 0].clone())
            self.seen.append((trainer.epoch, trainer.batch_num, torch.cat(parts).tolist()))


class EachBatchCB(CheckpointCB):
    "Saves after every batch, also in the middle of a window"

    name = "CheckpointCB"

    def _between_batches(self, trainer):
        self._save(trainer, trainer.epoch, self._batches)


def dropout_net():
    torch.manual_seed(1)
    parts = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*parts).double()


def mae(preds, targets):
    return F.l1_loss(preds, targets)


def run(folder=None, gone=None, model=net, accumulate=None):
    "Train for two epochs; returns weights, average, rows of the history and rows of the data"
    seen, average = RowsCB(), EMACB(0.9)
    more = [AccumulationCB(accumulate)] if accumulate else []
    if folder:
        more.append(EachBatchCB(folder))
    t = trainer(average, seen, InterruptCB(), *more, model=model())
    t.fit(2, lr=0.01, callbacks=gone)
    weights, history = outcome(t)
    kept = torch.cat([p.detach().reshape(-1) for p in average.average.parameters()])
    return weights, kept, history, seen.seen


def broken_off(n, *args):
    "A run of `n` processes that end without tidying up"
    with pytest.raises(RuntimeError):
        in_processes(n, run, *args)


def largest(a, b):
    return (a - b).abs().max().item()


def same_rows(whole, rest):
    "The rows of the data that came again are those of the whole run, in the same order"
    seen = {place[:2]: place[2] for place in whole}
    assert rest and all(seen[epoch, batch] == rows for epoch, batch, rows in rest)
    assert rest[-1][:2] == whole[-1][:2]


def equal_histories(a, b, within=0.0):
    assert len(a) == len(b)
    for one, other in zip(a, b):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == other[name] or abs(value - other[name]) <= within * max(1, abs(value)), name


PLACES = {
    "in a window": (0, 4, "after_batch"),
    "in a step": (1, 2, "before_step"),
    "at an end": (0, 6, "after_batch"),
}


def check_same_size(n, place, tmp_path, accumulate=None, model=dropout_net):
    whole = in_processes(n, run, tmp_path / "whole", None, model, accumulate)
    broken_off(n, tmp_path / "cut", GoneCB(*PLACES[place]), model, accumulate)
    for again, then in zip(in_processes(n, run, tmp_path / "cut", None, model, accumulate), whole):
        assert torch.equal(again[0], then[0]) and torch.equal(again[1], then[1])
        equal_histories(again[2], then[2])
        same_rows(then[3], again[3])


def check_other_size(was, now, place, tmp_path, accumulate=None):
    (whole,) = in_processes(1, run, tmp_path / "whole", None, net, accumulate)
    broken_off(was, tmp_path / "cut", GoneCB(*PLACES[place]), net, accumulate)
    found, first = in_processes(now, run, tmp_path / "cut", None, net, accumulate), PLACES[place][0]
    for again in found:
        assert largest(again[0], whole[0]) <= 1e-12 and largest(again[1], whole[1]) <= 1e-12
        if found[0][2] == found[-1][2]:  # Each has what all have measured
            equal_histories(again[2][first:], whole[2][first:], 1e-12)
        same_rows(whole[3], again[3])


@pytest.mark.parametrize("place,accumulate", [("in a window", 3), ("in a step", None)])
def test_two_processes_go_on_bit_for_bit(place, accumulate, tmp_path):
    check_same_size(2, place, tmp_path, accumulate)


@pytest.mark.parametrize("was,now,place", [(2, 1, "in a window"), (1, 2, "in a window"), (2, 3, "in a step")])
def test_another_number_of_processes_goes_on_with_the_same_rows_and_numbers(was, now, place, tmp_path):
    check_other_size(was, now, place, tmp_path, 3)
