"""Batches that are copied to a GPU one ahead: in order, each once, errors in their turn, and the position of
the loader stays behind the batch that was given. A list of what is done stands for the streams of the GPU."""

import contextlib
import io

import pytest
import torch
from torch import optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from isaac_loop.all import BasicTrainCB, CheckpointCB, DataLoaders, DeviceCB, MetricsCB, Trainer, exact_loader
from isaac_loop.all import set_seed
from isaac_loop.data import copied_ahead as module
from isaac_loop.data.copied_ahead import copied_ahead, one_ahead
from runs import Cut, CutCB, Rows, make_model, same


class Streams:
    "What is done in which stream, as a list"

    def __init__(self, monkeypatch):
        self.done, self.here = [], "main"
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, "second"))
        monkeypatch.setattr(torch.cuda, "stream", self.inside)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, self.here))
        monkeypatch.setattr(module, "to_device", self.copy)

    @contextlib.contextmanager
    def inside(self, stream):
        before, self.here = self.here, stream.name
        yield
        self.here = before

    def copy(self, batch, device):
        self.done.append(("copy", self.here, int(batch[0])))
        return [Copied(o, self.done) for o in batch]


class Stream:
    def __init__(self, streams, name):
        self.streams, self.name = streams, name

    def record_event(self):
        event = self.streams.done[-1][2]
        self.streams.done.append(("event", self.name, event))
        return event

    def wait_event(self, event):
        self.streams.done.append(("wait", self.name, event))


def Copied(x, done):
    "A copy that notes that its memory is used in another stream"
    x = x.clone()
    x.record_stream = lambda stream: done.append(("used", stream.name, int(x)))
    return x


def test_each_is_copied_in_the_second_stream_while_the_one_before_it_is_used(monkeypatch):
    streams = Streams(monkeypatch)
    for (x,) in copied_ahead([[torch.tensor(i)] for i in range(3)], "cuda"):
        streams.done.append(("compute", "main", int(x)))
    each = lambda i: [("copy", "second", i), ("event", "second", i)]  # noqa: E731
    use = lambda i: [("wait", "main", i), ("used", "main", i)]  # noqa: E731
    compute = lambda i: [("compute", "main", i)]  # noqa: E731
    expected = [
        *each(0),
        *use(0),
        *each(1),
        *compute(0),
        *use(1),
        *each(2),
        *compute(1),
        *use(2),
        *compute(2),
    ]
    assert streams.done == expected


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_all_come_once_and_in_order(n):
    assert list(one_ahead(range(n), str, int)) == list(range(n))


def test_no_more_than_two_batches_are_held():
    "The one that is used, and the next; also while the one after that is read"
    alive, most = set(), [0]

    class Batch:
        def __init__(self, i):
            self.i = i
            alive.add(i)
            most[0] = max(most[0], len(alive))

        def __del__(self):
            alive.discard(self.i)

    batches = one_ahead((Batch(i) for i in range(6)), lambda x: x, lambda x: x)
    for batch in batches:
        assert len(alive) <= 2
        del batch
    assert most[0] == 2 and not alive


def test_an_error_comes_after_the_batch_before_it_and_an_interrupt_at_once():
    def failing(error):
        yield "a"
        raise error

    for error, expected in ((OSError, ["a"]), (KeyboardInterrupt, [])):
        given = []
        with pytest.raises(error):
            for o in one_ahead(failing(error), str, str):
                given.append(o)
        assert given == expected


# In a loader: asked to copy to a device that is none, in the place of a GPU


@pytest.fixture
def ahead(monkeypatch):
    "Loaders read one ahead, without a GPU to copy to; the list has the devices they were asked for"
    asked = []

    def copied(batches, device):
        asked.append(device)
        return one_ahead(batches, lambda x: x, lambda x: x)

    monkeypatch.setattr("isaac_loop.data.exact_loaders.copied_ahead", copied)

    def copy_ahead(self, device):
        self._gpu = device

    monkeypatch.setattr("isaac_loop.data.exact_loaders.ExactLoader.copy_ahead", copy_ahead)
    return asked


def loader(n=40, **options):
    return exact_loader(Rows(n), 8, seed=3, **options)


def trainer_of(*callbacks, **options):
    set_seed(0)
    dls = DataLoaders(loader(**options), loader(16))
    cbs = [BasicTrainCB(), DeviceCB("cpu"), MetricsCB(show=False), *callbacks]
    return Trainer(dls, F.cross_entropy, optim.AdamW, make_model(), cbs)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fit_is_the_same_as_with_batches_copied_in_their_turn(request, workers):
    "Rows that draw random numbers included, as each batch has its own"
    plain = trainer_of(num_workers=workers)
    plain.fit(2, lr=0.01)
    asked = request.getfixturevalue("ahead")
    other = trainer_of(num_workers=workers)
    other.fit(2, lr=0.01)
    assert asked == [torch.device("cpu")] * 4
    same(plain, other)


def test_a_fit_goes_on_at_the_next_batch_though_that_was_read_before(ahead, tmp_path):
    whole = trainer_of(CheckpointCB(tmp_path / "whole", every=1))
    whole.fit(2, lr=0.01)
    cut = CutCB("after_batch", lambda t: t.training and (t.epoch, t.batch_num) == (1, 2))
    with pytest.raises(Cut):
        trainer_of(CheckpointCB(tmp_path / "cut", every=1), cut).fit(2, lr=0.01)
    again = trainer_of(CheckpointCB(tmp_path / "cut", every=1))
    with contextlib.redirect_stdout(io.StringIO()):
        again.fit(2, lr=0.01)
    same(whole, again)


def test_the_position_is_behind_the_batch_that_was_given(ahead):
    dl = loader()
    dl.copy_ahead("there")
    seen = []
    for _ in dl:
        seen.append((dl.epoch, dl.samples))
    assert seen == [(0, 8), (0, 16), (0, 24), (0, 32), (0, 40)]


def test_after_the_pass_the_loader_gives_batches_as_they_are_read(ahead):
    trainer = trainer_of()
    trainer.fit(1, lr=0.01)
    asked = len(ahead)
    next(iter(trainer.dls.train))
    assert asked and len(ahead) == asked


def test_a_loader_that_was_replaced_in_its_pass_is_not_left_waiting(ahead):
    def before_epoch(trainer):
        trainer.dl = trainer.batches = loader()

    trainer = trainer_of(before_epoch)
    trainer.fit(1, lr=0.01)
    assert trainer.dls.train._gpu is None


def test_only_a_gpu_and_pinned_memory_are_copied_ahead():
    for pins, device, expected in [
        (True, "cuda:1", torch.device("cuda:1")),
        (True, "cpu", None),
        (True, None, None),
        (False, "cuda", None),
    ]:
        dl = exact_loader(TensorDataset(torch.arange(4)), 2, pin_memory=pins)
        dl.copy_ahead(device)
        assert dl._gpu == expected
