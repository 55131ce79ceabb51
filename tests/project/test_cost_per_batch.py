"""What a batch costs does not grow, and a callback costs by the events that it answers.

Counted are calls of functions and objects, not seconds.
"""

import datetime
import gc
import sys
from collections import Counter

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import BasicTrainCB, CheckpointCB, ClipGradCB, DataLoaders, DeviceCB, EMACB, InterruptCB
from isaac_loop.all import MetricsCB, OneCycleSchedulerCB, Order, ProgressCB, RecorderCB, Trainer
from isaac_loop.loop.events import EVENTS, STEPS

AROUND_BATCHES = {o for o in EVENTS if o.endswith(("_fit", "_epoch"))} | {"log", "measured"}
IN_BATCH = [o for o in EVENTS if o not in AROUND_BATCHES and o not in STEPS]  # Steps are not for nothing


class Repeated:
    "One batch, `n` times"

    def __init__(self, n):
        self.n, self.batch = n, (torch.randn(4, 2), torch.randn(4, 1))

    def __len__(self):
        return self.n

    def __iter__(self):
        return (self.batch for _ in range(self.n))


class CountCB:
    "Counts calls of functions from the beginning of a batch to the next, and objects at its beginning"

    order = Order.FIRST - 1

    def __init__(self, *batches):
        self.batches, self.calls, self.objects = batches, {}, {}

    def before_batch(self, trainer):
        sys.setprofile(None)
        if trainer.batch_num in self.batches:
            gc.collect()
            self.objects[trainer.batch_num] = len(gc.get_objects())
            calls = self.calls[trainer.batch_num] = Counter()
            sys.setprofile(lambda frame, event, arg: count(calls, name_of(frame, event, arg)))

    def cleanup_fit(self, trainer):
        sys.setprofile(None)


def count(calls, name):
    "How often the bar looks at the clock depends on the clock"
    if not name.endswith(" time"):
        calls[name] += 1


def name_of(frame, event, arg):
    "What is called, or returned from, as text"
    what = frame.f_code.co_qualname if event in ("call", "return") else getattr(arg, "__qualname__", arg)
    return f"{event} {what}"


class NothingToLearn(BasicTrainCB):
    "Leaves out what PyTorch would spend its time on"

    def backward(self, trainer):
        pass


def counted(n, batches, callbacks, steps=None):
    "Calls and objects at some of `n` batches"
    counts, net = CountCB(*batches), nn.Linear(2, 1)
    callbacks = [steps or NothingToLearn(), *callbacks, counts]
    trainer = Trainer(DataLoaders(Repeated(n)), F.mse_loss, optim.SGD, net, callbacks)
    gc.collect()  # What other tests have left would be finalized in the middle of a batch
    try:
        trainer.fit(1, lr=0.01, valid=False)
    finally:
        sys.setprofile(None)
    return counts


# The bar is drawn by the clock: on a slow machine in the counted batch, if the clock did not wait for an hour
SETS = {
    "bare": lambda folder: [],
    "metrics, recorder, bar": lambda folder: [
        MetricsCB(show=False),
        RecorderCB(),
        ProgressCB("plain", seconds=3600),
    ],
    "careful": lambda folder: [
        DeviceCB("cpu"),
        MetricsCB(mae=F.l1_loss, train_metrics=True, show=False),
        ProgressCB("plain", seconds=3600),
        ClipGradCB(1.0),
        OneCycleSchedulerCB(),
        EMACB(0.99),
        CheckpointCB(folder, every=datetime.timedelta(hours=1)),
        InterruptCB(),
        RecorderCB(),
    ],
}
PLACE = 10  # In the blocks of 64 and 256 in which numbers are gathered, after the first of each


@pytest.mark.parametrize("name", SETS)
def test_a_late_batch_calls_what_an_early_one_calls_and_there_are_no_more_objects(name, tmp_path):
    "The careful fit is shorter, and both of its batches are in the second phase of the rate"
    careful = name == "careful"
    early, late = (64 * block + PLACE for block in ((9, 29) if careful else (5, 305)))
    counts = counted(late + 2, (early, late), SETS[name](tmp_path), BasicTrainCB() if careful else None)
    assert counts.calls[early] and counts.calls[late] == counts.calls[early]
    assert abs(counts.objects[late] - counts.objects[early]) <= 100


def answering(n_events):
    "A callback that answers the first `n_events` of a batch and does nothing"
    handlers = {event: lambda self, trainer: None for event in IN_BATCH[:n_events]}
    return type("Answers", (), handlers | {"before_fit": lambda self, trainer: None})()


@pytest.mark.parametrize("n_events", [0, 1, 2, 8, len(IN_BATCH)])
def test_a_callback_costs_by_the_events_that_it_answers(n_events):
    "Nine more cost nine calls for each event and nothing else, and those that answer none cost nothing"
    several = [answering(n_events) for _ in range(10)]
    for i, cb in enumerate(several):
        cb.name = f"cb{i}"
    none, one, ten = (counted(12, (5,), several[:n]).calls[5] for n in (0, 1, 10))
    if not n_events:
        assert none == one == ten
    assert not one - ten and (ten - one).total() == 2 * 9 * n_events  # Each is called, and returns
    assert (one - none).total() <= 60 * n_events  # The first to stand around a step opens its span
