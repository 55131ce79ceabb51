"The estimate against a clock that we set, and the callbacks behind one that leaves."

from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.metrics import epoch_time
from isaac_loop.metrics.epoch_time import EpochTimeCB
from isaac_loop.train.training import BasicTrainCB, NBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import Order
from isaac_loop.loop.trainer import Trainer

BATCH = torch.ones(4, 2), torch.ones(4, 1)


class Stream:
    "A loader without a length"

    def __iter__(self):
        return iter([BATCH] * 6)


@pytest.fixture
def clock(monkeypatch):
    "A clock that goes on by two seconds at each batch"
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(epoch_time.time, "perf_counter", lambda: now.seconds)

    def before_predict(trainer):
        now.seconds += 100 if trainer.batch_num == 0 else 2  # The first batch does not count

    return before_predict


def run(cb, clock, *others, batches=6, n_epochs=3):
    dl = [BATCH] * batches if batches else Stream()
    trainer = Trainer(
        DataLoaders(dl, [BATCH]), F.mse_loss, optim.SGD, nn.Linear(2, 1), [BasicTrainCB(), clock, cb, *others]
    )
    trainer.fit(n_epochs)
    return trainer


@pytest.mark.shows("SON-18")
@pytest.mark.parametrize("n", [1, 3, 5, 100])
def test_an_estimate_after_so_many_batches(n, clock, capsys):
    "Also if the pass has fewer"
    cb = EpochTimeCB(n)
    trainer = run(cb, clock)
    assert cb.estimate == dict(batch=2, epoch=12, fit=36) and cb not in trainer.callbacks
    times = "about 00:12 for the training pass of an epoch, 00:36 for those of all 3"
    assert capsys.readouterr().out == f"2.000 s for a training batch, so {times}\n"


def test_a_stream_has_no_known_epoch(clock, capsys):
    cb = EpochTimeCB(2)
    run(cb, clock, batches=None)
    assert cb.estimate == dict(batch=2, epoch=None, fit=None) and "not known" in capsys.readouterr().out


def test_a_limited_pass_is_as_short_as_it_is(clock):
    cb = EpochTimeCB(show=False)
    run(cb, clock, NBatchCB(4))
    assert cb.estimate["epoch"] == 8


def test_one_batch_is_never_enough(clock, capsys):
    cb = EpochTimeCB(2)
    assert cb in run(cb, clock, batches=1).callbacks and cb.estimate is None and not capsys.readouterr().out


class Counter:
    def __init__(self, name, order):
        self.name, self.order, self.seen = name, order, []

    def after_batch(self, trainer):
        self.seen.append((trainer.training, trainer.batch_num))


@pytest.mark.shows("SON-18")
def test_nobody_is_skipped_when_it_leaves(clock):
    "The original took itself out of the list that was being walked, and the next callback missed that batch"
    counters = [
        Counter("before", Order.REPORT - 1),
        Counter("next", Order.REPORT),
        Counter("last", Order.LAST),
    ]
    run(EpochTimeCB(2, show=False), clock, *counters)
    for o in counters:
        assert o.seen == 3 * ([(True, i) for i in range(6)] + [(False, 0)]), o.name


def test_the_weights_are_those_of_a_run_without_it(clock):
    weights = []
    for cb in (EpochTimeCB(2, show=False), Counter("nothing", 0)):
        torch.manual_seed(0)
        weights.append([o.clone() for o in run(cb, clock).model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))


def test_it_can_be_given_to_one_fit_and_used_again(clock):
    cb = EpochTimeCB(2, show=False)
    trainer = Trainer(
        DataLoaders([BATCH] * 6), F.mse_loss, optim.SGD, nn.Linear(2, 1), [BasicTrainCB(), clock]
    )
    for n_epochs in (2, 5):
        trainer.fit(n_epochs, callbacks=cb, valid=False)
        assert cb.estimate["fit"] == 12 * n_epochs and cb not in trainer.callbacks


@pytest.mark.parametrize("n", [0, -1, 2.5, True, "20"])
def test_what_is_no_number_of_batches_is_refused(n):
    with pytest.raises(ValueError, match="nothing to measure"):
        EpochTimeCB(n)
