"""Callbacks that gather a tensor in each batch: thousands are put back together, each exactly as it was."""

import math

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import BasicTrainCB, DataLoaders, EvaluatorCB, Trainer
from isaac_loop.state.snapshot import Snapshot


LAST = torch.channels_last


class Holder:
    def __init__(self, kept):
        self.kept = kept


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8).tolist()


KINDS = {
    "losses": lambda: [torch.tensor(float(i)) for i in range(9)],
    "odd numbers": lambda: [torch.tensor(o) for o in (math.nan, -0.0, 0.0, math.inf, 1e-45)],
    "rows": lambda: [torch.randn(3, 2) for _ in range(9)],
    "counts": lambda: [torch.tensor(i) for i in range(9)],
    "marks": lambda: [torch.tensor(i % 2 == 0) for i in range(9)],
    "half": lambda: [torch.randn(2, dtype=torch.bfloat16) for _ in range(9)],
    "complex": lambda: [torch.randn(2, dtype=torch.complex64) for _ in range(9)],
    "parts of one": lambda: list(torch.randn(9, 2)),
    "channels last": lambda: [torch.randn(2, 3, 2, 2).to(memory_format=LAST) for _ in range(9)],
    "pixels": lambda: [torch.randn(2, 3, 1, 1).to(memory_format=LAST) for _ in range(9)],
    "transposed": lambda: [torch.randn(2, 3).T for _ in range(9)],
    "columns": lambda: [torch.randn(3, 4)[:, ::2] for _ in range(9)],
    "overlapping": lambda: [torch.ones(4).as_strided((3, 2), (1, 1)) for _ in range(9)],
    "one, many times": lambda: [torch.randn(1).expand(4) for _ in range(9)],
    "nothing": lambda: [torch.empty(0) for _ in range(9)],
    "weights": lambda: [nn.Parameter(torch.randn(2)) for _ in range(9)],
    "all at once": lambda: [*list(torch.randn(9, 2)), *(torch.tensor(i) for i in range(9)), torch.ones(1)],
}


@pytest.mark.parametrize("within", [list, tuple, lambda xs: [dict(loss=x) for x in xs], lambda xs: {1: xs}])
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_were_written_to_are_as_they_were_bit_for_bit(kind, within):
    xs = KINDS[kind]()
    before, places = [bits(x.detach()) for x in xs], [x.data_ptr() for x in xs]
    snapshot = Snapshot(Holder(within(xs)))
    with torch.no_grad():
        for x in xs[1::2]:
            x.data.fill_(1)
    for _ in range(2):
        snapshot.restore()
        assert [bits(x.detach()) for x in xs] == before and [x.data_ptr() for x in xs] == places


def give_gradient(x):
    x.requires_grad_()
    x.grad = torch.ones_like(x)


def give_hook(x):
    x.requires_grad_().register_hook(lambda g: g)
    x.requires_grad_(False)


def give_memory(x):
    x.data = torch.zeros(5)


def give_shape(x):
    x.resize_(3)


def make_weight(x):
    x.__class__ = nn.Parameter


def give_attribute(x):
    x.note = "seen"


@pytest.mark.parametrize(
    "change", [give_gradient, give_hook, give_memory, give_shape, make_weight, give_attribute]
)
def test_one_that_has_become_another_is_what_it_was(change):
    xs = [torch.tensor([float(i), 0.5]) for i in range(9)]
    same = [x.view(2) for x in xs]
    snapshot = Snapshot(Holder(xs))
    change(xs[4])
    snapshot.restore()
    for i, (x, view) in enumerate(zip(xs, same)):
        assert type(x) is torch.Tensor and x.tolist() == [float(i), 0.5] and x.data_ptr() == view.data_ptr()
        assert not x.requires_grad and x.grad is None and not x._backward_hooks and not vars(x)


def test_one_that_was_turned_in_its_memory_is_turned_back():
    xs = [torch.arange(9.0).view(3, 3) + i for i in range(5)]
    snapshot = Snapshot(Holder(xs))
    xs[0].t_()
    snapshot.restore()
    assert xs[0].stride() == (3, 1) and xs[0][0].tolist() == [0.0, 1.0, 2.0]


def test_attributes_of_tensors_stay_and_go_as_they_were():
    xs = [torch.tensor(float(i)) for i in range(9)]
    xs[2].note = ["first"]
    snapshot = Snapshot(Holder(xs))
    xs[2].note.append("second")
    xs[3].note = "new"
    snapshot.restore()
    assert xs[2].note == ["first"] and not hasattr(xs[3], "note")


def test_negated_views_of_complex_numbers_are_put_back():
    xs = [torch.fft.rfft(torch.arange(6.0)).conj().imag for _ in range(5)]
    before = [x.tolist() for x in xs]
    snapshot = Snapshot(Holder(xs))
    xs[0] += 1
    snapshot.restore()
    assert [x.tolist() for x in xs] == before


def test_hooks_and_gradients_that_were_there_are_there_again():
    xs = [torch.tensor([float(i)], requires_grad=i == 4) for i in range(9)]
    xs[4].sum().backward()
    seen = []
    xs[4].register_hook(seen.append)
    snapshot = Snapshot(Holder(xs))
    xs[4].grad, xs[4]._backward_hooks = None, None
    snapshot.restore()
    assert xs[4].grad.tolist() == [1.0]
    (xs[4] * 2).sum().backward()
    assert len(seen) == 1


def test_values_whose_memory_was_freed_are_refused_among_others():
    rows = torch.randn(9, 2)
    xs = [torch.randn(2) for _ in range(5)] + [rows[4]]
    rows.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="cannot be put back"):
        Snapshot(Holder(xs))


def test_images_that_lie_otherwise_in_memory_are_put_back_where_they_lie():
    xs = [torch.randn(2, 3, 2, 2).to(memory_format=LAST) for _ in range(5)]
    snapshot, steps = Snapshot(Holder(xs)), xs[0].stride()
    xs[3].data = xs[3].contiguous()
    snapshot.restore()
    assert [x.stride() for x in xs] == [steps] * 5


class LossesCB:
    "Keeps the loss of each batch, and writes to the first of them in validation"

    def __init__(self):
        self.losses = []

    def after_batch(self, trainer):
        if trainer.training:
            self.losses.append(trainer.loss.detach())
        else:
            self.losses[0].fill_(7)
            self.losses[-1].requires_grad_()


def test_an_evaluation_leaves_what_a_callback_has_gathered_as_it_was():
    def fitted(*more):
        torch.manual_seed(0)
        batches = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(12)]
        losses, dls = LossesCB(), DataLoaders(batches, batches[:1])
        callbacks = [BasicTrainCB(), losses, *more]
        Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(4, 2), callbacks).fit(1, lr=0.1, valid=False)
        return losses.losses

    seen = fitted(EvaluatorCB(updates=5, at_end=False))
    assert torch.equal(torch.stack(seen), torch.stack(fitted())) and not any(x.requires_grad for x in seen)


def test_images_in_channels_last_may_be_kept_through_an_evaluation():
    class ImagesCB:
        def before_fit(self, trainer):
            self.images = []

        def after_batch(self, trainer):
            if trainer.training:
                self.images.append(trainer.batch[0].clone())

    batches = [(torch.randn(2, 3, 4, 4).to(memory_format=LAST), torch.randint(2, (2,))) for _ in range(6)]
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=LAST)
    callbacks = [BasicTrainCB(), ImagesCB()]
    trainer = Trainer(DataLoaders(batches, batches), F.cross_entropy, optim.SGD, model, callbacks)
    trainer.fit(1, lr=0.1)
    images = [x.clone() for x in trainer.ImagesCB.images]
    trainer.validate(batches)
    assert len(images) == 6 and all(map(torch.equal, trainer.ImagesCB.images, images))
