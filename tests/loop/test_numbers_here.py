"""Numbers on the CPU are read at once, and are those that a device would give, bit for bit

The law: a fit under a mode that watches what is done with tensors, where everything is kept as on a device,
has the same history, the same records and the same state as one that nobody watches; also if the mode comes
and goes in the middle.
"""

import contextlib
import io
import sys
import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from isaac_loop.all import BasicTrainCB, ClipGradCB, DataLoaders, LoggerCB, LossSpikeCB, MetricsCB, Order
from isaac_loop.all import MeanOf, RecorderCB, Trainer
from isaac_loop.loop.numbers_on_device import DeviceMean, DeviceNumbers, number_here
from isaac_loop.loop.pass_numbers import PassNumbers

X = torch.randn(90, 5, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


class SomeCB:
    "Is the mode on? In batches whose number is no multiple of three"

    order = Order.FIRST - 1

    def __init__(self, mode):
        self.mode, self.stack = mode, contextlib.ExitStack()

    def before_batch(self, trainer):
        if trainer.batch_num % 3:
            self.stack.enter_context(self.mode())

    def cleanup_batch(self, trainer):
        self.stack.close()


class Rows:
    "A log that keeps what it is given"

    def __init__(self):
        self.rows = []

    def row(self, step, values, *args, **kwargs):
        self.rows.append((step, values))


def accuracy(preds, targets):
    return preds.argmax(1) == targets


def distance(preds, targets):
    return (preds.softmax(1)[:, 1] - targets).abs()


def run(mode=None, some=False, dtype=torch.float32, loss_func=F.cross_entropy):
    "History, records, what was logged, and the state of each callback in the middle of the last epoch"
    torch.manual_seed(1)
    states, log = [], Rows()

    class StateCB:
        order = Order.LAST

        def after_batch(self, trainer):
            if trainer.training and trainer.epoch == 1 and trainer.batch_num == 77:
                states.extend(cb.state_dict() for cb in trainer.callbacks if hasattr(cb, "state_dict"))

    batches = [(X[i : i + 1].repeat(3, 1).to(dtype), Y[i : i + 1].repeat(3)) for i in range(90)]
    metrics = dict(accuracy=accuracy, distance=distance)
    callbacks = [
        BasicTrainCB(),
        MetricsCB(train_metrics=True, show=False, **metrics),
        RecorderCB(loss=lambda t: t.loss, lr=lambda t: t.opt.param_groups[0]["lr"]),
        ClipGradCB(0.1),
        LoggerCB(log, every=7),
        LossSpikeCB(),
        StateCB(),
        *([SomeCB(mode)] if some else []),
    ]
    dls = DataLoaders(batches, batches[:20])
    trainer = Trainer(dls, loss_func, optim.SGD, nn.Linear(5, 2, dtype=dtype), callbacks)
    with mode() if mode and not some else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(2, lr=0.1)
    rows = [{k: v for k, v in row.items() if k != "elapsed"} for row in trainer.history]
    record = {k: trainer.history.batches[k] for k in trainer.history.batches.keys()}
    return rows, record, log.rows, states


def numbers_in(x):
    "All numbers, as Python has them, but for times"
    if isinstance(x, torch.Tensor):
        return x.double().flatten().tolist()
    if isinstance(x, dict):
        timed = "elapsed", "second", "time"
        kept = [part for k, part in x.items() if not any(word in str(k) for word in timed)]
        return [o for part in kept for o in numbers_in(part)]
    if isinstance(x, (list, tuple)):
        return [o for part in x for o in numbers_in(part)]
    return [x] if isinstance(x, (int, float)) else []


@pytest.mark.parametrize(
    "some, dtype", [(False, torch.float32), (True, torch.float64), (True, torch.bfloat16)]
)
@pytest.mark.parametrize("mode", [Function, Dispatch])
def test_watched_or_not_the_numbers_are_the_same(mode, some, dtype, monkeypatch):
    def close(a, b):
        return a == b or (a != a and b != b)

    monkeypatch.setattr(PassNumbers, "block", 32)
    monkeypatch.setattr(DeviceMean, "block", 4)
    plain, watched = run(dtype=dtype), run(mode, some, dtype)
    for what, a, b in zip(("history", "records", "log", "states"), plain, watched, strict=True):
        a, b = numbers_in(a), numbers_in(b)
        assert len(a) == len(b) and a and all(map(close, a, b)), what


@pytest.mark.parametrize("mode", [Function, Dispatch])
def test_a_number_is_read_where_nobody_watches(mode):
    x = torch.tensor(0.1)
    assert number_here(x) == x.item() and type(number_here(x)) is float
    assert number_here(torch.tensor(3)) == 3 and number_here(torch.tensor(True)) is None
    assert number_here(torch.zeros((), device="meta")) is None
    with mode():
        assert number_here(x) is None
    assert number_here(x.as_subclass(type("Mine", (torch.Tensor,), {}))) is None


def test_numbers_come_back_in_their_type():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        numbers = DeviceNumbers()
        for i in range(100):
            numbers.add(torch.tensor(i / 3).to(dtype))
        assert numbers.tensor().dtype is dtype
        assert torch.equal(numbers.tensor(), (torch.arange(100) / 3).to(dtype))


def test_a_mean_goes_on_as_it_would_on_a_device():
    "Also from a state, and if some numbers came as tensors"
    values = torch.rand(1500, generator=torch.Generator().manual_seed(2))

    def total(watched):
        mean = DeviceMean()
        for i, x in enumerate(values):
            with Function() if watched(i) else contextlib.nullcontext():
                mean.add(x)
            if i == 700:
                state, mean = mean.state_dict(), DeviceMean()
                mean.load_state_dict(state)
        return float(mean.take())

    assert total(lambda i: False) == total(lambda i: True) == total(lambda i: i % 5 == 0)


def interrupted_at(f, n):
    "Call `f` and raise what Ctrl-C raises before the `n`th line or step of Python; whether `f` got so far"
    left = [n]

    def trace(frame, event, arg):
        frame.f_trace_opcodes = True
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        f()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("block", [2, 256])
def test_a_row_that_ctrl_c_has_cut_does_not_count(block, monkeypatch):
    monkeypatch.setattr(PassNumbers, "block", block)
    rows, n, was_cut = [(0, 0.5, 3.0), (1, 0.25, 4.0), (2, 0.125, 5.0)], 0, True
    while was_cut:
        numbers, n = PassNumbers("loss", "size"), n + 1
        numbers.add(*rows[0])
        was_cut = interrupted_at(lambda: numbers.add(*rows[1]), n)
        there = rows[: len(numbers)]
        assert there in (rows[:1], rows[:2])
        numbers.add(*rows[2])
        batches, losses, sizes = map(list, zip(*there, rows[2]))
        assert numbers.read() == {"loss": losses, "size": sizes} and list(numbers.batches) == batches
    assert n > 10 and len(there) == 2


def test_a_loss_that_is_written_to_later_is_kept_as_it_was():
    class WriteCB:
        order = Order.LAST

        def after_batch(self, trainer):
            trainer.loss.detach().fill_(100)

    def losses(*more):
        torch.manual_seed(1)
        callbacks = [BasicTrainCB(), MetricsCB(show=False), *more]
        trainer = Trainer(DataLoaders([(X, Y)] * 5), F.cross_entropy, optim.SGD, nn.Linear(5, 2), callbacks)
        trainer.fit(1, lr=0.1, valid=False)
        return trainer.history.batches["loss"]

    assert losses() == losses(WriteCB())


def test_numbers_stay_on_the_cpu_whatever_device_is_the_default_when_they_are_read():
    correct, numbers, mean = MeanOf(accuracy), DeviceNumbers(), DeviceMean()
    correct.update(torch.eye(4, 2), torch.tensor([0, 1, 0, 1]))
    for i in range(3):
        numbers.add(torch.tensor(float(i)))
        mean.add(torch.tensor(float(i)))
    with torch.device("meta"):
        found = correct.compute(), numbers.read(), mean.take()
    assert [x.tolist() for x in found] == [0.75, [0, 1, 2], 1]
