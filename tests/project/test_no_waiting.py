"""Within batches nobody waits for the device.

What turns a tensor into a number is counted, by the names of methods and by the operations below them.
With all that a careful person attaches nobody waits within batches but the bar, as often as its clock allows.
Between batches as many do in a long epoch as in a short one.
"""

import datetime
import sys
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import isaac_loop.show.progress as progress_module
from isaac_loop.all import CheckpointCB, ClipGradCB, CoreCBs, DataLoaders, EMACB, InterruptCB, NonFiniteStopCB
from isaac_loop.all import OneCycleSchedulerCB, Order, ProgressCB, RecorderCB, TimesCB, Trainer
from isaac_loop.inspection.device_waits import what_waits
from waiting import InsideCB

UNSEEN_BELOW = {"cpu", "tolist", "numpy", "__array__"}  # On the CPU these run no operation


class Names(TorchFunctionMode):
    "Counts methods that run no operation"

    def __init__(self, waits):
        self.waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in UNSEEN_BELOW:
            self.waits.note(name)
        return func(*args, **kwargs or {})


class Operations(TorchDispatchMode):
    "Counts operations, also those that PyTorch itself runs"

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        what = what_waits(func, args, kwargs or {})
        if what:
            self.waits.note(what)
        return func(*args, **kwargs or {})


def asked_on_the_cpu():
    "Whether it is PyTorch's `AveragedModel` that asks its own counter, which stays on the CPU"
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") != "torch.optim.swa_utils":
        frame = frame.f_back
    return frame is not None


def place():
    "Whose state is copied, or the module of the library that asks"
    frame, whose = sys._getframe(2), None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.endswith(".plain_state"):
            whose = whose or getattr(frame.f_locals.get("self"), "where", None)
        elif module.startswith("isaac_loop.") and not module.endswith(
            (".device_waits", ".numbers_on_device", ".pass_numbers")
        ):
            return whose or module.rpartition(".")[2]
        frame = frame.f_back


class Waits:
    "What has waited, within batches and between the first and the last of an epoch"

    inside = in_pass = False

    def __init__(self):
        self.within, self.between, self.places = Counter(), Counter(), Counter()
        self.modes = ExitStack()

    def note(self, what):
        if asked_on_the_cpu():
            return
        if self.inside:
            self.within[what] += 1
        elif self.in_pass:
            self.between[what] += 1
            self.places[what, place()] += 1

    def __enter__(self):
        for mode in (Names(self), Operations(self)):
            self.modes.enter_context(mode)
        return self

    def __exit__(self, *args):
        self.modes.close()


class PassCB:
    "Tells when a pass begins and ends, and lets `seconds` go by in each batch"

    order = Order.FIRST - 1

    def __init__(self, waits, clock, seconds):
        self.waits, self.clock, self.seconds = waits, clock, seconds

    def before_epoch(self, trainer):
        self.waits.in_pass = True

    def before_batch(self, trainer):
        self.clock.now += self.seconds

    def cleanup_epoch(self, trainer):
        self.waits.in_pass = trainer.training  # What comes between the two passes counts as well


def accuracy(preds, targets):
    return preds.argmax(1) == targets


def careful(place, folder):
    "What a careful person attaches"
    return [
        CoreCBs("cpu", progress=False, accuracy=accuracy, train_metrics=True, show=False),
        ProgressCB(place),
        ClipGradCB(1.0),
        OneCycleSchedulerCB(),
        EMACB(0.99),
        CheckpointCB(folder, every=datetime.timedelta(hours=1)),
        InterruptCB(),
        RecorderCB(),
        TimesCB(),
    ]


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def waits_of(callbacks, clock, n_batches, seconds=0.0):
    "What waits in an epoch of training and one of validation"
    batch = torch.randn(8, 4), torch.randint(3, (8,))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    waits = Waits()
    callbacks = [*callbacks, InsideCB(waits), PassCB(waits, clock, seconds)]
    dls = DataLoaders([batch] * n_batches, [batch] * (n_batches // 2))
    trainer = Trainer(dls, F.cross_entropy, lambda p, lr: optim.SGD(p, lr, momentum=0.9), model, callbacks)
    with waits:
        trainer.fit(1, lr=0.01)
    assert trainer.n_updates == n_batches
    return waits


def test_within_batches_nobody_waits_and_between_them_no_more_in_a_long_epoch(clock, tmp_path):
    "Numbers of more than 256 batches come in blocks, which are read once a column"
    few, more, many, most = (
        waits_of(careful("plain", tmp_path / str(n)), clock, n) for n in (30, 250, 300, 500)
    )
    assert not any(waits.within for waits in (few, more, many, most))
    assert (more.between, most.between) == (few.between, many.between)
    assert many.between - few.between == Counter(tolist=2) and not few.between - many.between


ALWAYS_ON_THE_CPU = {
    ("cpu", "state"): 9,  # Random numbers and rows of the history
    ("cpu", "RecorderCB.state_dict()"): 2,
    ("item", "averaging"): 1,  # How many updates are in the average
}
ON_THE_DEVICE = {
    ("tolist", "metrics"): 2,  # Losses in each pass
    ("item", "any_metric"): 2,
    ("tolist", "clipping"): 1,
    # In case of an interrupt while validating: with what the pass has gathered, part of it on the CPU
    ("cpu", "MetricsCB.state_dict()"): 1,
    ("cpu", "ClipGradCB.state_dict()"): 5,
    # Whether what a metric holds has changed since the fit began
    ("cpu", "change_marks"): 1,
    ("numpy", "change_marks"): 1,
}


def test_who_waits_between_batches_is_known_by_name(clock, tmp_path):
    "An average of the weights is not among them, however many tensors it has"
    waits = waits_of(careful("plain", tmp_path), clock, 30)
    assert waits.places == ALWAYS_ON_THE_CPU | ON_THE_DEVICE


def test_a_guard_reads_its_flags_after_every_so_many_batches(clock):
    "It is one of those that wait, and says so: as often as its `every` says, and at the end of a pass"
    waits = waits_of([CoreCBs("cpu", progress=False, show=False), NonFiniteStopCB(every=50)], clock, 200)
    assert waits.within == {"tolist": 6}  # 200 batches of training, 100 of validation


@pytest.mark.parametrize("place", ["terminal", "notebook"])
@pytest.mark.parametrize("seconds", [0.001, 0.1, 1.0])
def test_a_bar_reads_a_loss_so_many_times_a_second_and_no_more(place, seconds, clock, tmp_path, capsys):
    "With four redraws a second, whatever a batch takes; a batch longer than that is shown once"
    n_batches = 200
    waits = waits_of(careful(place, tmp_path), clock, n_batches, seconds)
    passed = 1.5 * n_batches * seconds
    assert (
        set(waits.within) <= {"tolist"} and waits.within["tolist"] <= min(passed / 0.25, 1.5 * n_batches) + 1
    )


@pytest.mark.parametrize(
    "way", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, bool, torch.nonzero]
)
def test_whoever_waits_is_noticed(way, clock):
    "The tests above could not fail otherwise"

    class WaitCB:
        def after_batch(self, trainer):
            way(trainer.loss.detach())

    waits = waits_of([CoreCBs("cpu", progress=False, show=False), WaitCB()], clock, 4)
    assert sum(waits.within.values()) == 6
