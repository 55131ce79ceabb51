"""Predictions, losses and metrics on the side (`evaluation.py`), checked against loops written by hand.

Two laws carry the rest: whatever the loader does, results come in the order of the dataset; and a fit that
was looked at in between ends with the same weights, random numbers and history, bit for bit, as one that
was not.
"""

import copy
import sys
import threading
import warnings
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torcheval.metrics import MulticlassAccuracy

from isaac_loop.device.device import DeviceCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.evaluate.capturing import CapturePredsCB, Predictions
from isaac_loop.data.dataset_order import in_order
from isaac_loop.train.example_losses import loss_per_example
from isaac_loop.evaluate.join_batches import join_batches
from isaac_loop.train.averaging import EMACB
from isaac_loop.train.training import BasicTrainCB, NBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.evaluate.evaluation import DropoutOnCB
from isaac_loop.loop.events import CancelBatchException, CancelEpochException, CancelFitException
from isaac_loop.loop.events import CancelStepException, Order
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.spans import with_cbs
from isaac_loop.loop.trainer import Trainer


def make_data(n=22, n_classes=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 4, generator=g), torch.randint(0, n_classes, (n,), generator=g))


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def make_trainer(callbacks=(), data=None, loss_func=F.cross_entropy, model=None, cls=Trainer, **loader):
    data = make_data() if data is None else data
    dls = DataLoaders(DataLoader(data, 8, shuffle=True), DataLoader(data, 8, **loader))
    return cls(
        dls, loss_func, optim.Adam, make_model() if model is None else model, [BasicTrainCB(), *callbacks]
    )


def predict_by_hand(model, data, batch_size=8):
    "What every tutorial writes"
    was_training = model.training
    model.eval()
    with torch.no_grad():
        preds = torch.cat([model(x) for x, _ in DataLoader(data, batch_size)])
    model.train(was_training)
    return preds


# The order of the data


@pytest.mark.shows("U14", "F127")
def test_predictions_are_those_of_the_loop_written_by_hand():
    "Also for a trainer that was never fit"
    data = make_data()
    trainer = make_trainer([MetricsCB(show=False)], data)
    for was_training in (True, False):
        assert trainer.model.training == was_training
        preds, targets = trainer.get_preds()
        assert torch.equal(preds, predict_by_hand(trainer.model, data))
        assert torch.equal(targets, data.tensors[1])
        assert not preds.requires_grad and trainer.model.training == was_training
        trainer.fit(1, lr=0.01)


class Backwards:
    "A sampler of one's own, without a length"

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows[::-1])


class Buckets:
    "A batch sampler of one's own"

    def __init__(self, rows):
        self.batches = [rows[1::2], rows[::2]]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return 2


LOADERS = {
    "shuffled": (lambda ds, rows: DataLoader(ds, 5, shuffle=True), False),
    "shuffled with a generator": (
        lambda ds, rows: DataLoader(ds, 5, shuffle=True, generator=torch.Generator().manual_seed(3)),
        False,
    ),
    "last batch dropped": (lambda ds, rows: DataLoader(ds, 5, shuffle=True, drop_last=True), False),
    "smaller than a batch": (lambda ds, rows: DataLoader(ds, 100, drop_last=True), False),
    "with replacement": (
        lambda ds, rows: DataLoader(ds, 5, sampler=RandomSampler(ds, replacement=True, num_samples=7)),
        False,
    ),
    "weighted": (
        lambda ds, rows: DataLoader(ds, 5, sampler=WeightedRandomSampler([0.1] * len(ds), 4)),
        False,
    ),
    "subset": (lambda ds, rows: DataLoader(ds, 5, sampler=SubsetRandomSampler(rows)), True),
    "own sampler": (lambda ds, rows: DataLoader(ds, 5, sampler=Backwards(rows)), True),
    "batch sampler": (
        lambda ds, rows: DataLoader(
            ds, batch_sampler=BatchSampler(SubsetRandomSampler(rows), 3, drop_last=True)
        ),
        True,
    ),
    "own batch sampler": (lambda ds, rows: DataLoader(ds, batch_sampler=Buckets(rows)), True),
    "single rows": (lambda ds, rows: DataLoader(ds, 1, shuffle=True), False),
}


@pytest.mark.shows("U14")
@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(sorted(LOADERS)), n=st.integers(4, 23), seed=st.integers(0, 99))
def test_whatever_the_loader_does_results_come_in_the_order_of_the_dataset(kind, n, seed):
    "Each row once, none left out, and a subset stays a subset"
    data = make_data(n, seed=seed)
    set_seed(seed)
    make, is_subset = LOADERS[kind]
    subset = torch.randperm(n)[: n // 2].tolist()
    rows = sorted(subset) if is_subset else list(range(n))
    trainer = make_trainer(data=data)
    found = trainer.get_preds(make(data, subset), with_inputs=True)
    assert found.indices == rows
    assert torch.equal(found.inputs, data.tensors[0][rows]) and torch.equal(
        found.targets, data.tensors[1][rows]
    )
    torch.testing.assert_close(found.preds, predict_by_hand(trainer.model, data)[rows])


@pytest.mark.shows("U14")
@pytest.mark.parametrize(
    "options",
    [{}, {"persistent_workers": True}, {"in_order": False}],
    ids=["plain", "persistent", "unordered"],
)
def test_workers_keep_the_order(options):
    data = make_data(40)
    trainer = make_trainer(data=data)
    found = trainer.get_preds(DataLoader(data, 3, shuffle=True, num_workers=2, **options))
    assert found.indices == list(range(40)) and torch.equal(found.targets, data.tensors[1])


def test_a_loader_whose_pass_is_running_goes_on_undisturbed():
    "Persistent workers have one iterator, which a second walk would set back to its start"
    data = make_data(12)
    seen = {}
    for look in (False, True):
        trainer = make_trainer(data=data)
        trainer.dls.train = DataLoader(
            data,
            3,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
            generator=torch.Generator().manual_seed(0),
        )
        seen[look] = []

        def after_batch(trainer):
            seen[look].append(trainer.batch[1].tolist())
            if look and trainer.batch_num == 1:
                assert len(trainer.get_preds("train")) == 12

        after_batch.order = Order.DECIDE
        trainer.fit(2, lr=0, valid=False, callbacks=after_batch)
    assert len(seen[True]) == 8 and seen[True] == seen[False]


@pytest.mark.shows("U14")
def test_asking_a_sampler_for_its_rows_leaves_its_random_numbers_alone():
    data, generator = make_data(), torch.Generator().manual_seed(2)
    state = generator.get_state()
    trainer = make_trainer(data=data)
    for options in (
        {"sampler": SubsetRandomSampler(range(9), generator)},
        {"batch_sampler": BatchSampler(SubsetRandomSampler(range(9), generator), 3, False)},
    ):
        assert trainer.get_preds(DataLoader(data, **options)).indices == list(range(9))
        assert torch.equal(generator.get_state(), state)


def test_a_loader_of_ones_own_class_keeps_what_it_adds():
    class Doubling(DataLoader):
        factor = 1

        def __iter__(self):
            return ((x * self.factor, y) for x, y in super().__iter__())

    data = make_data()
    loader = Doubling(data, 5, shuffle=True)
    loader.factor = 2
    ordered, _ = in_order(loader)
    assert torch.equal(torch.cat([x for x, _ in ordered]), data.tensors[0] * 2)


def test_a_dataset_of_whole_batches_is_walked_in_its_order():
    batches = [(torch.full((n, 4), float(i)), torch.full((n,), i)) for i, n in enumerate((3, 1, 2))]
    found = make_trainer().get_preds(DataLoader(batches, batch_size=None, shuffle=True), with_inputs=True)
    assert found.targets.tolist() == [0, 0, 0, 1, 2, 2] and found.indices == list(range(6))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(make_data(11))


@pytest.mark.shows("U14")
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Stream(), 4, drop_last=True),
        lambda: list(DataLoader(make_data(11), 4)),
        lambda: iter(DataLoader(make_data(11), 4)),
    ],
    ids=["stream", "list", "iterator"],
)
def test_any_other_iterable_keeps_its_order(make):
    "And a stream loses no rows to `drop_last`"
    found = make_trainer().get_preds(make())
    assert found.targets.tolist() == make_data(11).tensors[1].tolist() and found.indices == list(range(11))


def test_names_say_which_loader():
    trainer = make_trainer()
    trainer.dls.train = DataLoader(make_data(9, seed=5), 4, shuffle=True)
    assert torch.equal(trainer.get_preds("train").targets, make_data(9, seed=5).tensors[1])
    assert torch.equal(trainer.get_preds("valid").preds, trainer.get_preds().preds)


def test_a_loader_that_fills_the_same_tensor_again_does_no_harm():
    class Reusing:
        def __iter__(self):
            x, y = torch.empty(2, 4), torch.empty(2, dtype=torch.long)
            for i in range(3):
                yield x.fill_(i), y.fill_(i)

    found = make_trainer(model=nn.Identity()).get_preds(Reusing(), with_inputs=True)
    assert found.targets.tolist() == [0, 0, 1, 1, 2, 2] and found.preds[:, 0].tolist() == found.inputs[
        :, 0
    ].tolist() == [0, 0, 1, 1, 2, 2]


# Structures


class Two(nn.Module):
    "Two inputs, and an answer made of several parts"

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, x, z):
        out = self.a(x) + self.b(z)
        return out, OrderedDict(hidden=x * 2, penalty=out.square().mean())


@pytest.mark.shows("F127")
@pytest.mark.parametrize("as_dict", [False, True])
def test_several_inputs_dict_batches_and_nested_outputs(as_dict):
    "`n_inp=2`, a model that returns a tuple with a dict in it, on a device"
    g = torch.Generator().manual_seed(0)
    x, z, y = (
        torch.randn(7, 4, generator=g),
        torch.randn(7, 2, generator=g),
        torch.randint(0, 3, (7,), generator=g),
    )
    data = [dict(x=x[i], z=z[i], y=y[i]) if as_dict else (x[i], z[i], y[i]) for i in range(7)]
    dls = DataLoaders(DataLoader(data, 3, shuffle=True), DataLoader(data, 3), n_inp=2)
    trainer = Trainer(
        dls,
        lambda preds, y: F.cross_entropy(preds[0], y),
        optim.SGD,
        Two(),
        [BasicTrainCB(), DeviceCB("cpu")],
    )
    found = trainer.get_preds("train", with_inputs=True, with_loss=True)
    with torch.no_grad():
        logits, parts = trainer.model(x, z)
    torch.testing.assert_close(found.preds[0], logits)
    assert isinstance(found.preds[1], OrderedDict) and torch.equal(found.preds[1]["hidden"], x * 2)
    assert found.preds[1]["penalty"].shape == (3,), "what has no rows is there once for each batch"
    assert (
        torch.equal(found.inputs[0], x) and torch.equal(found.inputs[1], z) and torch.equal(found.targets, y)
    )
    torch.testing.assert_close(found.losses, F.cross_entropy(logits, y, reduction="none"))
    assert repr(found).startswith(
        "Predictions of 7 examples: preds ((7, 3), {hidden: (7, 4), penalty: (3,)})"
    )


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), depth=st.integers(0, 3), seed=st.integers(0, 9)
)
def test_joining_is_the_inverse_of_splitting(sizes, depth, seed):
    whole = {
        "x": torch.randn(sum(sizes), 2, generator=torch.Generator().manual_seed(seed)),
        "names": [str(i) for i in range(sum(sizes))],
        "none": None,
    }
    ends = np.cumsum(sizes)
    parts = [
        {"x": whole["x"][e - n : e], "names": whole["names"][e - n : e], "none": None}
        for e, n in zip(ends, sizes)
    ]
    for _ in range(depth):
        whole, parts = (whole, [whole]), [(o, [o]) for o in parts]
    joined = join_batches(parts)
    for _ in range(depth):
        joined = joined[0]
    while isinstance(whole, tuple):
        whole = whole[0]
    assert (
        torch.equal(joined["x"], whole["x"]) and joined["names"] == whole["names"] and joined["none"] is None
    )


def test_rows_of_different_shapes_and_dicts_for_each_example_become_lists():
    joined = join_batches([torch.ones(2, 5), torch.ones(1, 7)])
    assert [o.shape for o in joined] == [(5,), (5,), (7,)]
    boxes = [[dict(box=torch.zeros(i, 4)) for i in (1, 2)], [dict(box=torch.zeros(3, 4))]]
    assert [len(o["box"]) for o in join_batches(boxes)] == [1, 2, 3]


def test_batches_that_hold_different_things_are_refused():
    with pytest.raises(ValueError, match="between 1 and 2 values each, so they cannot be put together"):
        join_batches([(torch.ones(1),), (torch.ones(1), torch.ones(1))])


def test_dicts_are_joined_by_key_wherever_they_are():
    zeros, ones = torch.zeros(2), torch.ones(2)
    first, second = dict(a=zeros, b=[ones]), dict(b=[ones[:1]], a=zeros[:1])
    joined = join_batches([first, second])
    assert (
        list(joined) == ["a", "b"] and joined["a"].tolist() == [0] * 3 and joined["b"][0].tolist() == [1] * 3
    )
    joined = join_batches([(zeros, first), (zeros, second)])[1]
    assert joined["a"].tolist() == [0] * 3 and joined["b"][0].tolist() == [1] * 3


def test_batches_with_other_keys_are_refused():
    with pytest.raises(ValueError, match=r"Batch 2 has \['b'\], and the first batch has \['a'\]"):
        join_batches([dict(a=torch.ones(1)), dict(a=torch.ones(1)), dict(b=torch.ones(1))])


def test_predictions_of_a_model_that_fills_its_dict_in_another_order_are_right():
    class Odd(nn.Module):
        def forward(self, x):
            zero, one = x.new_zeros(len(x)), x.new_ones(len(x))
            return dict(zero=zero, one=one) if len(x) == 4 else dict(one=one, zero=zero)

    dl = DataLoader(TensorDataset(torch.randn(10, 3), torch.randn(10)), 4)
    trainer = Trainer(DataLoaders(dl, dl), None, None, Odd(), [BasicTrainCB()])
    preds = trainer.get_preds().preds
    assert list(preds) == ["zero", "one"]
    assert preds["zero"].tolist() == [0] * 10 and preds["one"].tolist() == [1] * 10


@pytest.mark.shows("MIN-11")
def test_half_precision_comes_back_as_float():
    data = make_data()
    data = TensorDataset(data.tensors[0].bfloat16(), data.tensors[1])
    trainer = make_trainer(data=data, model=make_model().bfloat16())
    assert trainer.get_preds(with_loss=True).preds.dtype == torch.float32


@pytest.mark.shows("F127")
def test_data_without_targets_can_be_predicted():
    "A loss could not be computed"
    data = make_data()
    trainer = make_trainer(data=data)
    found = trainer.get_preds(DataLoader(TensorDataset(data.tensors[0]), 5))
    assert found.targets is None and torch.equal(found.preds, predict_by_hand(trainer.model, data, 5))


# Captured and written


@pytest.mark.shows("MIN-11")
def test_the_callback_holds_the_last_validation_pass_and_adds_nothing_up():
    "Targets as well as predictions, and each epoch starts anew"
    data = make_data()
    trainer = make_trainer([capture := CapturePredsCB(with_inputs=True)], data)
    trainer.fit(3, lr=0.01)
    found = capture.result()
    assert len(found) == 22 and torch.equal(found.targets, data.tensors[1])
    assert torch.equal(found.preds, predict_by_hand(trainer.model, data))


@pytest.mark.shows("MIN-11")
def test_capture_preds_gives_a_plain_tuple():
    data = make_data()
    trainer = make_trainer(data=data)
    preds, targets, inputs = trainer.capture_preds(inps=True)
    assert torch.equal(inputs, data.tensors[0]) and torch.equal(preds, predict_by_hand(trainer.model, data))
    assert isinstance(trainer.capture_preds(), tuple) and len(trainer.capture_preds()) == 2


def test_asking_before_a_pass_is_an_error():
    with pytest.raises(ValueError, match="No batch was captured"):
        CapturePredsCB().result()


@pytest.mark.shows("F128")
def test_what_is_written_batch_by_batch_is_what_is_kept():
    "In the same order, one call for each batch"
    trainer = make_trainer()
    parts = []
    assert trainer.write_preds(parts.append, "train", with_loss=True) is None
    whole = trainer.get_preds("train", with_loss=True)
    assert [len(o) for o in parts] == [8, 8, 6]
    assert torch.equal(torch.cat([o.preds for o in parts]), whole.preds) and torch.equal(
        torch.cat([o.losses for o in parts]), whole.losses
    )
    assert [i for o in parts for i in o.indices] == whole.indices
    with pytest.raises(TypeError, match="`write` is 'preds.csv'"):
        trainer.write_preds("preds.csv")


class NoWaiting(TorchFunctionMode):
    "Between `before_batch` and `cleanup_batch` no tensor may become a number"

    inside = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if NoWaiting.inside and name in {
            "item",
            "cpu",
            "tolist",
            "numpy",
            "__bool__",
            "__float__",
            "__int__",
            "__index__",
            "equal",
            "allclose",
            "nonzero",
        }:
            raise AssertionError(f"waited in `{name}`")
        return func(*args, **kwargs or {})


class InsideCB:
    order = -10_000

    def before_batch(self, trainer):
        NoWaiting.inside = True

    def cleanup_batch(self, trainer):
        NoWaiting.inside = False


@pytest.mark.parametrize(
    "loss_func", [F.cross_entropy, lambda p, t: F.cross_entropy(p, t)], ids=["whole", "one by one"]
)
def test_nobody_waits_for_the_device_in_a_batch(loss_func):
    trainer = make_trainer([MetricsCB(show=False)], loss_func=loss_func)
    with NoWaiting():
        trainer.get_preds(with_inputs=True, with_loss=True, callbacks=InsideCB())
        trainer.validate(callbacks=InsideCB())
        trainer.sample_preds(2, callbacks=[DropoutOnCB(), InsideCB()])

        class WaitCB:
            def after_batch(self, trainer):
                trainer.preds.sum().item()

        with pytest.raises(AssertionError, match="waited in `item`"):
            trainer.get_preds(callbacks=[InsideCB(), WaitCB()])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
def test_a_gpu_gives_the_same_in_the_same_order():
    data = make_data(4000)
    trainer = make_trainer([DeviceCB("cuda")], data)
    found = trainer.get_preds("train", with_inputs=True, with_loss=True)
    assert {o.device.type for o in (found.preds, found.targets, found.losses, found.inputs)} == {"cpu"}
    assert torch.equal(found.targets, data.tensors[1]) and torch.equal(found.inputs, data.tensors[0])
    torch.testing.assert_close(found.preds, predict_by_hand(trainer.model.cpu(), data), rtol=1e-3, atol=1e-4)


# One loss for each example

IMAGES = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
MASKS = torch.randint(0, 3, (6, 4, 4), generator=torch.Generator().manual_seed(1))
LOGITS, CLASSES = IMAGES[:, :, 0, 0], MASKS[:, 0, 0]
LOSSES = {
    "cross entropy": (F.cross_entropy, LOGITS, CLASSES),
    "smoothed by partial": (partial(F.cross_entropy, label_smoothing=0.2), LOGITS, CLASSES),
    "module": (nn.CrossEntropyLoss(), LOGITS, CLASSES),
    "mean squared error of many numbers": (nn.MSELoss(), IMAGES, IMAGES.flip(0)),
    "sum": (nn.L1Loss(reduction="sum"), IMAGES, IMAGES.flip(0)),
    "sum by partial": (partial(F.mse_loss, reduction="sum"), IMAGES, IMAGES.flip(0)),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), LOGITS.log_softmax(1), LOGITS.flip(0).softmax(1)),
    "pixels": (F.cross_entropy, IMAGES, MASKS),
    "own function": (lambda p, t: (p - t).abs().mean(), IMAGES, IMAGES.flip(0)),
    "own function of a tuple": (
        lambda p, t: F.cross_entropy(p[0], t) + p[1].mean(),
        (LOGITS, IMAGES[:, 0]),
        CLASSES,
    ),
}


@pytest.mark.shows("F127")
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_an_example_is_the_loss_of_a_batch_of_one(name):
    loss_func, preds, targets = LOSSES[name]
    row = lambda x, i: tuple(o[i : i + 1] for o in x) if isinstance(x, tuple) else x[i : i + 1]
    losses = loss_per_example(loss_func, preds, targets)
    expected = torch.stack([loss_func(row(preds, i), targets[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(losses, expected)
    whole = loss_func(preds, targets)
    torch.testing.assert_close(losses.sum() if "sum" in name else losses.mean(), whole)


@pytest.mark.parametrize(
    "make",
    [lambda w: nn.CrossEntropyLoss(weight=w), lambda w: partial(F.cross_entropy, weight=w)],
    ids=["module", "function"],
)
def test_with_class_weights_the_batch_is_a_weighted_mean_of_its_examples(make):
    weight = torch.tensor([1.0, 4.0, 0.5])
    losses = loss_per_example(make(weight), LOGITS, CLASSES)
    torch.testing.assert_close(losses, weight[CLASSES] * F.cross_entropy(LOGITS, CLASSES, reduction="none"))
    torch.testing.assert_close(losses.sum() / weight[CLASSES].sum(), make(weight)(LOGITS, CLASSES))


def test_the_loss_itself_stays_as_it_was():
    loss = nn.CrossEntropyLoss()
    make_trainer(loss_func=loss).get_preds(with_loss=True)
    assert loss.reduction == "mean"


class CentredLoss(nn.Module):
    """As DINO's: a moving center of what it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(3))

    def forward(self, preds, targets):
        self.center.lerp_(preds.detach().mean(0), 0.1)
        return F.cross_entropy(preds - self.center, targets)


class CountingLoss:
    """Its weight changes at each call, and it can leave the mean out."""

    def __init__(self):
        self.calls = []

    def __call__(self, preds, targets, reduction="mean"):
        self.calls.append(len(preds))
        return F.cross_entropy(preds, targets, reduction=reduction) * len(self.calls)


def noisy_loss(preds, targets):
    return F.cross_entropy(preds + 0.1 * torch.randn_like(preds), targets)


def noisy_loss_of_rows(preds, targets, reduction="mean"):
    return F.cross_entropy(preds + torch.randn_like(preds), targets, reduction=reduction)


class LossWithDice:
    """Draws from a generator of its own."""

    def __init__(self, dice):
        self.dice = dice

    def __call__(self, preds, targets):
        if isinstance(self.dice, torch.Generator):
            return F.cross_entropy(preds + torch.randn(preds.shape, generator=self.dice), targets)
        return F.cross_entropy(preds, targets) * self.dice.random()


def weights_with(make_loss, *watchers):
    set_seed(1)
    trainer = make_trainer(watchers, loss_func=make_loss())
    trainer.fit(2, lr=0.3)
    return [*trainer.model.parameters(), torch.rand(1)]


@pytest.mark.filterwarnings("ignore:The loss of a batch is")
@pytest.mark.parametrize(
    "make_loss",
    [
        CentredLoss,
        CountingLoss,
        lambda: noisy_loss,
        lambda: noisy_loss_of_rows,
        lambda: LossWithDice(torch.Generator().manual_seed(3)),
        lambda: LossWithDice(np.random.default_rng(3)),
    ],
)
def test_who_captures_losses_changes_nothing_for_a_loss_with_a_state_or_with_random_numbers(make_loss):
    alone, watched = weights_with(make_loss), weights_with(make_loss, CapturePredsCB(with_loss=True))
    assert all(map(torch.equal, alone, watched))


@pytest.mark.parametrize("loss_func", [CountingLoss(), noisy_loss_of_rows])
def test_captured_losses_are_those_of_the_loss_as_the_batch_found_it(loss_func):
    losses = []

    class NoteCB:
        def after_batch(self, trainer):
            losses.append(trainer.loss)

    found = make_trainer([NoteCB()], loss_func=loss_func).get_preds(with_loss=True)
    torch.testing.assert_close([part.mean() for part in found.losses.split(8)], losses)


def test_each_example_meets_the_loss_as_the_batch_found_it():
    loss_func = CentredLoss()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        preds, targets, losses = make_trainer(loss_func=loss_func).get_preds(with_loss=True)
    first = preds[:8]
    alone = F.cross_entropy(0.9 * first, targets[:8], reduction="none")  # Its own tenth is the center
    torch.testing.assert_close(losses[:8], alone)


def test_a_batch_whose_loss_is_left_out_does_not_get_the_losses_of_the_batch_before():
    class LeavesOutCB:
        order, on_train = Order.STEP - 1, False

        def before_get_loss(self, trainer):
            if trainer.batch_num == 1:
                trainer.loss = torch.tensor(0.0)
                raise CancelStepException("none here")

    trainer = make_trainer([LeavesOutCB(), CapturePredsCB(with_loss=True)])
    told = "no losses for the examples of batch 1(.|\n)*`LeavesOutCB.before_get_loss` has left the step out"
    with pytest.raises(RuntimeError, match=told):
        trainer.fit(1)
    trainer = make_trainer([LeavesOutCB(), capture := CapturePredsCB()])
    trainer.fit(1)
    assert len(capture.result()) == 22


def test_a_batch_of_ones_own_that_computes_the_loss_without_its_event_is_told_how():
    class OwnBatch(Trainer):
        runs_event = False

        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            self.run_callbacks("predict")
            if self.runs_event:
                self.run_callbacks("get_loss")
            else:
                self.loss = self.loss_func(self.preds, self.batch[-1])

    trainer = make_trainer(cls=OwnBatch)
    told = r"of batch 0, so(.|\n)*`OwnBatch.one_batch`(.|\n)*`self.run_callbacks\('get_loss'\)`"
    with pytest.raises(RuntimeError, match=told):
        trainer.get_preds(with_loss=True)
    trainer.runs_event = True
    assert len(trainer.get_preds(with_loss=True).losses) == 22


def test_losses_that_cannot_be_taken_apart_say_so():
    def needs_two(preds, targets):
        if len(preds) < 2:
            raise RuntimeError("two or more, please")
        return preds.std()

    with pytest.raises(ValueError, match="called with a single example it failed: two or more, please"):
        loss_per_example(needs_two, LOGITS, CLASSES)
    with pytest.raises(ValueError, match=r"gave \(1, 3\) for a single example"):
        loss_per_example(lambda p, t: p, LOGITS, CLASSES)
    with pytest.raises(ValueError, match=r"losses of shape \(18,\) for 6 examples"):
        loss_per_example(lambda p, t, reduction="mean": p.flatten(), LOGITS, CLASSES)
    with pytest.raises(ValueError, match="There is no `loss_func`"):
        make_trainer(loss_func=None).get_preds(with_loss=True)
    with pytest.raises(ValueError, match="called with a single example it failed"):
        make_trainer(loss_func=needs_two).get_preds(with_loss=True)


def test_a_loss_that_compares_examples_is_noticed():
    "Single rows give a number each, but those are no parts of the loss"

    def contrast(preds, targets):
        return (preds - preds.mean(0)).square().mean()

    with pytest.warns(UserWarning, match="compares them with each other") as caught:
        make_trainer(loss_func=contrast).get_preds(with_loss=True)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer(loss_func=lambda p, t: F.cross_entropy(p, t)).get_preds(with_loss=True)
        make_trainer(loss_func=lambda p, t: F.cross_entropy(p, t, reduction="sum")).get_preds(with_loss=True)


# Validate


@pytest.mark.shows("NEMO-08", "F127")
@pytest.mark.parametrize("n", [5, 16, 22])
def test_validate_is_the_row_that_the_history_would_get(n):
    "True means, batches of unequal size, equal to the last bit"
    trainer = make_trainer([MetricsCB(accuracy=MulticlassAccuracy(), show=False)], make_data(n))
    trainer.fit(2, lr=0.01)
    row = trainer.validate()
    assert row == {o: trainer.history[-1][o] for o in ("valid_loss", "accuracy")}
    whole = F.cross_entropy(predict_by_hand(trainer.model, make_data(n)), make_data(n).tensors[1]).item()
    assert row["valid_loss"] == pytest.approx(whole, rel=1e-5)


@pytest.mark.shows("F068")
def test_validate_works_without_metrics_and_takes_others(capsys):
    "Other data, other metrics, and nothing is printed"
    data = make_data(9, seed=4)
    trainer = make_trainer([MetricsCB(accuracy=MulticlassAccuracy())])
    row = trainer.validate(
        DataLoader(data, 4), top2=MulticlassAccuracy(k=2), accuracy=MulticlassAccuracy(k=3)
    )
    assert set(row) == {"valid_loss", "top2", "accuracy"} and row["accuracy"] == 1.0, (
        "a metric given here stands for one of the same name"
    )
    assert trainer.MetricsCB.metrics["accuracy"].k == 1
    assert set(make_trainer().validate()) == {"valid_loss"}
    assert len(trainer.history) == 0 and capsys.readouterr().out == ""


def test_a_metrics_callback_of_ones_own_measures_in_its_own_way():
    class Halved(MetricsCB):
        def cleanup_epoch(self, trainer):
            super().cleanup_epoch(trainer)
            trainer.history.write(half=trainer.history[-1]["valid_loss"] / 2)

    row = make_trainer([Halved()]).validate()
    assert row["half"] == row["valid_loss"] / 2


def test_rows_that_the_loader_drops_are_measured_too():
    trainer = make_trainer(drop_last=True)
    whole = F.cross_entropy(predict_by_hand(trainer.model, make_data()), make_data().tensors[1]).item()
    assert trainer.validate()["valid_loss"] == pytest.approx(whole, rel=1e-5)


# No trace


def everything(trainer):
    "Weights, optimizer, random numbers, and the history without its clock"
    rows = [{k: v for k, v in row.items() if k != "elapsed"} for row in trainer.history]
    return (
        {k: v.tolist() for k, v in trainer.model.state_dict().items()},
        str(trainer.opt.state_dict()["state"]),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),
        rows,
        trainer.history.batches["loss"],
        trainer.n_updates,
    )


LOOKS = {
    "get_preds": lambda t: t.get_preds(with_inputs=True, with_loss=True),
    "get_preds of the training data": lambda t: t.get_preds("train"),
    "validate": lambda t: t.validate(),
    "validate the training data": lambda t: t.validate("train", top2=MulticlassAccuracy(k=2)),
    "sample_preds": lambda t: t.sample_preds(2, "train"),
    "write_preds": lambda t: t.write_preds(lambda found: None),
    "cancelled batches": lambda t: t.get_preds(callbacks=RaiseCB(CancelBatchException("skip"))),
    "cancelled pass": lambda t: t.get_preds(callbacks=RaiseCB(CancelEpochException("enough"))),
    "cancelled fit": lambda t: t.validate(callbacks=RaiseCB(CancelFitException("enough"))),
    "error": lambda t: pytest.raises(RuntimeError, t.get_preds, callbacks=RaiseCB(RuntimeError("broken"))),
}


class RaiseCB:
    "Raises in its second batch"

    def __init__(self, error):
        self.error = error

    def before_predict(self, trainer):
        if trainer.batch_num == 1:
            raise self.error


class LookCB:
    "Looks at one event"

    order = Order.DECIDE

    def __init__(self, event, look):
        self.look, self.n = look, 0
        setattr(self, event, self.run)

    def run(self, trainer):
        self.n += 1
        self.look(trainer)


def trained(callbacks):
    set_seed(3)
    data = make_data()
    dls = DataLoaders(
        DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(1)),
        DataLoader(data, 8, shuffle=True),
    )
    trainer = Trainer(
        dls,
        F.cross_entropy,
        partial(optim.SGD, momentum=0.9),
        make_model(),
        [BasicTrainCB(), MetricsCB(accuracy=MulticlassAccuracy(), show=False), *callbacks],
    )
    trainer.fit(2, lr=0.05)
    return everything(trainer)


@pytest.fixture(scope="module")
def without():
    return trained([])


@pytest.mark.shows("U14")
@pytest.mark.filterwarnings("ignore:The pass was not complete")
@pytest.mark.parametrize("event", ["after_batch", "after_backward", "log", "after_predict"])
@pytest.mark.parametrize("look", LOOKS)
def test_a_fit_that_is_looked_at_is_the_same_fit(look, event, without):
    "In the middle of any pass, between gradients and step, and after a cancel or an error inside"
    callback = LookCB(event, LOOKS[look])
    assert trained([callback]) == without
    assert callback.n == {"after_batch": 12, "after_predict": 12, "after_backward": 6, "log": 2}[event]


@pytest.mark.parametrize(
    "error",
    [
        CancelBatchException("skip"),
        CancelEpochException("enough"),
        CancelFitException("enough"),
        RuntimeError("broken"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_what_ends_a_pass_early_is_told_and_leaves_everything_usable(error):
    data = make_data()
    trainer = make_trainer([MetricsCB(show=False)], data)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="broken"):
            trainer.get_preds(callbacks=RaiseCB(error))
    else:
        with pytest.warns(
            UserWarning,
            match=rf"not complete \({type(error).__name__}: {error}\), so (1 batch is|\d batches are) all",
        ) as caught:
            found = trainer.get_preds(callbacks=RaiseCB(error))
        assert caught[0].filename == __file__
        assert found.indices == (
            [*range(8), *range(16, 22)] if isinstance(error, CancelBatchException) else [*range(8)]
        )
        assert torch.equal(found.targets, data.tensors[1][found.indices])
    assert [type(o) for o in trainer.callbacks] == [BasicTrainCB, MetricsCB]
    assert torch.equal(trainer.get_preds().preds, predict_by_hand(trainer.model, data))
    trainer.fit(1)


def test_a_limit_on_batches_is_not_passed_over_in_silence():
    trainer = make_trainer([NBatchCB(2)])
    with pytest.warns(UserWarning, match="2 batches are enough"):
        assert len(trainer.get_preds()) == 16
    with pytest.warns(UserWarning, match="2 batches are enough"):
        trainer.validate()
    trainer = make_trainer([NBatchCB(3)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(trainer.get_preds()) == 22


def test_a_stop_on_the_way_is_noticed_and_a_stop_at_the_end_is_none():
    class StopCB:
        def __init__(self, at):
            self.at = at

        def after_batch(self, trainer):
            if trainer.batch_num == self.at:
                trainer.request_stop("seen enough")

    with pytest.warns(UserWarning, match="seen enough"):
        assert len(make_trainer().get_preds(callbacks=StopCB(0))) == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(make_trainer().get_preds(callbacks=StopCB(2))) == 22


@pytest.mark.parametrize(
    ("ask", "event"),
    [
        (Trainer.get_preds, "before_fit"),
        (Trainer.get_preds, "before_epoch"),
        (Trainer.get_preds, "before_batch"),
        (Trainer.validate, "before_fit"),
        (Trainer.validate, "before_batch"),
    ],
)
def test_a_pass_without_any_batch_is_an_error_with_its_reason(ask, event):
    def handler(trainer):
        raise CancelFitException("not today")

    handler.__name__ = event
    with pytest.raises(ValueError, match="No batch") as caught:
        ask(make_trainer(), callbacks=handler)
    assert "The pass was left early (CancelFitException: not today)." in caught.value.__notes__


# Mistakes


def test_loaders_that_are_none_are_refused():
    trainer = make_trainer()
    with pytest.raises(LookupError, match="no loader 'vaild'.*Did you mean `valid`"):
        trainer.get_preds("vaild")
    with pytest.raises(TypeError, match="`dl` is a TensorDataset, which gives single rows"):
        trainer.get_preds(make_data())
    with pytest.raises(TypeError, match="`dl` is a Tensor, which gives single rows"):
        trainer.validate(torch.randn(3, 4))
    with pytest.raises(TypeError, match="`dl` is a DataLoaders, which cannot be iterated"):
        trainer.get_preds(trainer.dls)
    with pytest.raises(TypeError, match="`dl` is a int"):
        trainer.validate(3)
    for several in ([trainer.dls.valid] * 2, dict(a=trainer.dls.valid, b=trainer.dls.train)):
        with pytest.raises(TypeError, match="of loaders, and here only one.*takes several as a dict"):
            trainer.validate(several)
    with pytest.raises(ValueError, match="The loader has no batches"):
        trainer.get_preds([])
    with pytest.raises(ValueError, match="The loader has no batches"):
        trainer.validate(DataLoader(make_data(0), 4))
    with pytest.raises(ValueError, match="gave no batch.*It is an iterator"):
        trainer.get_preds(iter([]))
    trainer.dls.valid = None
    with pytest.raises(ValueError, match="`dls.valid` is None"):
        trainer.get_preds()
    assert [type(o) for o in trainer.callbacks] == [BasicTrainCB]


def test_without_steps_the_error_says_who_predicts():
    trainer = Trainer(make_trainer().dls, F.cross_entropy, optim.SGD, make_model(), None)
    with pytest.raises(AttributeError, match="the step `predict`, which `BasicTrainCB` provides"):
        trainer.get_preds()


# Dropout


@pytest.mark.shows("MIN-11", "F129")
def test_dropout_is_on_and_everything_else_as_in_validation():
    trainer = make_trainer([DropoutOnCB()])
    modes = []

    def after_predict(trainer):
        modes.append((trainer.training, [m.training for m in trainer.model]))

    trainer.fit(1, callbacks=after_predict)
    assert modes == [(True, [True] * 5)] * 3 + [(False, [False, False, False, True, False])] * 3
    assert not any(m.training for m in trainer.model), "put back"


@pytest.mark.shows("MIN-11")
@pytest.mark.parametrize(
    "error",
    [CancelEpochException("enough"), CancelFitException("enough"), RuntimeError("broken")],
    ids=lambda e: type(e).__name__,
)
def test_dropout_is_put_back_whatever_happens(error):
    trainer = make_trainer([DropoutOnCB(), RaiseCB(error)])
    try:
        trainer.fit(1, train=False)
    except RuntimeError:
        assert isinstance(error, RuntimeError)
    assert not trainer.model[3].training


@pytest.mark.shows("F129")
def test_passes_differ_by_dropout_alone_and_leave_the_random_numbers_alone():
    "The same seed gives the same passes, and with dropout of 0 they are all the prediction"
    trainer = make_trainer()
    set_seed(3)
    state = torch.get_rng_state()
    samples = trainer.sample_preds(4)
    assert torch.equal(torch.get_rng_state(), state)
    assert samples.shape == (4, 22, 3) and len({str(o.tolist()) for o in samples}) == 4
    assert not torch.equal(samples, trainer.sample_preds(4))
    set_seed(3)
    assert torch.equal(samples, trainer.sample_preds(4))
    trainer.model[3].p = 0.0
    assert torch.equal(trainer.sample_preds(2), trainer.get_preds().preds.expand(2, -1, -1))


@pytest.mark.shows("F129")
def test_the_mean_over_many_masks_of_a_linear_model_is_its_prediction():
    "What dropout leaves is scaled so that its expectation stays"
    trainer = make_trainer(model=nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 3)))
    torch.testing.assert_close(
        trainer.sample_preds(500).mean(0), trainer.get_preds().preds, atol=0.15, rtol=0
    )


def test_other_kinds_of_modules_can_be_switched_on():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x) if self.training else x

    trainer = make_trainer(model=nn.Sequential(Noise(), nn.Linear(4, 3)))
    with pytest.raises(ValueError, match="`Sequential` has no dropout module"):
        trainer.sample_preds()
    first, second = trainer.sample_preds(2, callbacks=DropoutOnCB(kinds=Noise))
    assert not torch.equal(first, second)
    for n in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="passes are counted"):
            trainer.sample_preds(n)


# Top losses


@pytest.mark.shows("F127")
def test_top_losses_are_the_highest_and_know_their_rows():
    "With rows numbered as in the dataset, although the loader draws a subset and shuffles"
    data = make_data(30)
    trainer = make_trainer(data=data)
    found = trainer.get_preds(DataLoader(data, 4, sampler=SubsetRandomSampler(range(9, 30))), with_loss=True)
    losses = F.cross_entropy(predict_by_hand(trainer.model, data), data.tensors[1], reduction="none")
    worst = found.top_losses(5, classes=["ant", "bee", "cat"])
    expected = (losses[9:].argsort(descending=True)[:5] + 9).tolist()
    assert [o["index"] for o in worst.rows] == expected
    assert [o["loss"] for o in worst.rows] == pytest.approx(losses[expected].tolist(), rel=1e-5)
    assert [o["target"] for o in worst.rows] == [["ant", "bee", "cat"][i] for i in data.tensors[1][expected]]


def test_more_top_losses_than_examples_are_all_of_them():
    found = make_trainer().get_preds(with_loss=True)
    assert len(found.top_losses(1000)) == 22
    for k in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="Use a whole number of 1 or more"):
            found.top_losses(k)
    with pytest.raises(ValueError, match=r"get_preds\(with_loss=True\)"):
        make_trainer().get_preds().top_losses()
    with pytest.raises(ValueError, match="`classes` names 1"):
        found.top_losses(classes=["ant"])


def test_a_loss_that_is_no_number_comes_first():
    found = Predictions(
        torch.zeros(3, 2),
        torch.zeros(3, dtype=torch.long),
        torch.tensor([1.0, float("nan"), 2.0]),
        None,
        [0, 1, 2],
    )
    assert [o["index"] for o in found.top_losses().rows] == [1, 2, 0]


def test_numbers_and_single_logits_can_be_shown():
    losses = torch.tensor([0.1, 0.9])
    regression = Predictions(torch.tensor([[0.5], [2.0]]), torch.tensor([[1.0], [3.0]]), losses, None, [0, 1])
    assert regression.top_losses(1).rows[0] == dict(
        index=1, loss=pytest.approx(0.9), prediction=2.0, target=3.0
    )
    binary = Predictions(torch.tensor([-1.0, 2.0]), torch.tensor([0, 0]), losses, None, [0, 1])
    with pytest.raises(TypeError, match="Pass `decode`"):
        binary.top_losses()
    assert binary.top_losses(1, decode=lambda p: (p > 0).long()).rows[0]["prediction"] == 1


def images_found(shape=(5, 1, 4, 4), **changes):
    n = shape[0]
    parts = dict(
        preds=torch.eye(3)[torch.arange(n) % 3],
        targets=torch.zeros(n, dtype=torch.long),
        losses=torch.arange(n).float(),
        inputs=torch.randn(shape),
        indices=list(range(n)),
    )
    return Predictions(**parts | changes)


@pytest.fixture(autouse=True)
def no_figures_left():
    import matplotlib

    matplotlib.use("Agg")
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.mark.shows("ISA-119")
@pytest.mark.parametrize("shape", [(5, 1, 4, 4), (5, 3, 4, 4), (5, 4, 4)])
def test_top_losses_are_drawn_worst_first(shape):
    found = images_found(shape)
    axes = found.plot_top_losses(3, classes=["ant", "bee", "cat"])
    titles = [ax.get_title() for ax in axes.flat if ax.get_images()]
    assert titles == ["bee, not ant\nloss 4.00", "ant\nloss 3.00", "cat, not ant\nloss 2.00"]
    image = found.inputs[4] if len(shape) == 3 else found.inputs[4].permute(1, 2, 0).squeeze(-1)
    drawn = torch.as_tensor(np.asarray(axes.flat[0].get_images()[0].get_array()))
    torch.testing.assert_close(drawn, (image - image.min()) / (image.max() - image.min()))


def test_what_is_no_image_is_not_drawn():
    with pytest.raises(ValueError, match="with_inputs=True"):
        images_found(inputs=None).plot_top_losses()
    with pytest.raises(TypeError, match=r"The inputs are \(5, 7\), which are no images"):
        images_found((5, 7)).plot_top_losses()
    with pytest.raises(TypeError, match="no images"):
        images_found((5, 8, 4, 4)).plot_top_losses()


# Confusion


@pytest.mark.shows("ISA-119")
@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(2, 40),
    n_classes=st.integers(2, 6),
    seed=st.integers(0, 99),
    normalize=st.sampled_from([None, "true", "pred", "all"]),
)
def test_the_confusion_matrix_is_that_of_scikit_learn(n, n_classes, seed, normalize):
    from sklearn.metrics import confusion_matrix

    g = torch.Generator().manual_seed(seed)
    preds, targets = torch.randn(n, n_classes, generator=g), torch.randint(0, n_classes, (n,), generator=g)
    found = Predictions(preds, targets, indices=list(range(n)))
    expected = confusion_matrix(targets, preds.argmax(1), labels=range(n_classes), normalize=normalize)
    np.testing.assert_allclose(found.confusion_matrix(normalize).numpy(), np.nan_to_num(expected), rtol=1e-5)


def test_the_most_confused_pairs_are_the_largest_off_the_diagonal():
    said, targets = torch.tensor([1, 1, 1, 2, 0, 0, 0, 2, 2]), torch.tensor([0, 0, 0, 0, 1, 1, 0, 2, 1])
    found = Predictions(F.one_hot(said, 3).float(), targets, indices=list(range(9)))
    assert [tuple(o.values()) for o in found.most_confused().rows] == [(0, 1, 3), (1, 0, 2)]
    assert [tuple(o.values()) for o in found.most_confused(1, classes="abc").rows] == [
        ("a", "b", 3),
        ("b", "a", 2),
        ("a", "c", 1),
        ("b", "c", 1),
    ]
    assert len(found.most_confused(4)) == 0 and str(found.most_confused(4)).split() == [
        "target",
        "prediction",
        "count",
    ]


def test_masks_are_counted_by_the_pixel_and_single_logits_by_their_decoder():
    masks = Predictions(IMAGES, MASKS, indices=list(range(6)))
    assert masks.confusion_matrix().sum() == MASKS.numel()
    binary = Predictions(
        torch.tensor([[-1.0], [2.0], [3.0]]), torch.tensor([[0], [0], [1]]), indices=[0, 1, 2]
    )
    decode = lambda preds: (preds > 0).long()
    assert binary.confusion_matrix(decode=decode).tolist() == [[1, 1], [0, 1]]
    assert binary.most_confused(1, decode=decode).rows == [dict(target=0, prediction=1, count=1)]
    with pytest.raises(TypeError, match="Pass `decode`"):
        binary.confusion_matrix()


def test_confusion_of_what_is_no_class_is_refused():
    found = make_trainer().get_preds()
    with pytest.raises(ValueError, match="`normalize` is 'rows'"):
        found.confusion_matrix("rows")
    with pytest.raises(ValueError, match="Class 2 occurs, but there are 2 classes"):
        found.confusion_matrix(n_classes=2)
    with pytest.raises(TypeError, match="not one class number for each prediction"):
        Predictions(LOGITS, LOGITS).confusion_matrix()
    with pytest.raises(TypeError, match="Targets None are not"):
        Predictions(LOGITS, None).confusion_matrix()


def test_targets_that_do_not_count_are_left_out_of_the_matrix():
    unsure = MASKS.clone()
    unsure[:, 0] = 255
    masks = Predictions(IMAGES, unsure, indices=list(range(6)))
    with pytest.raises(ValueError, match="`ignore_index=255` if 255 is no class"):
        masks.confusion_matrix()
    matrix = masks.confusion_matrix(ignore_index=255)
    assert matrix.sum() == (unsure != 255).sum()
    known = Predictions(IMAGES[:, :, 1:], MASKS[:, 1:])
    assert torch.equal(matrix, known.confusion_matrix())
    assert masks.most_confused(1, ignore_index=255).rows == known.most_confused(1).rows
    names = ["a", "b", "c", "d", "e"][: len(matrix)]
    assert len(masks.plot_confusion_matrix(names, ignore_index=255).get_xticklabels()) == len(matrix)


def test_a_drawn_class_without_a_name_is_refused():
    found = Predictions(F.one_hot(torch.tensor([1, 0, 2]), 3).float(), torch.tensor([1, 0, 0]))
    with pytest.raises(ValueError, match="of class 2, but `classes` names 2. Give a name to each"):
        found.plot_confusion_matrix(classes=["ant", "bee"])


@pytest.mark.shows("ISA-119")
def test_the_matrix_is_drawn_with_names_and_numbers():
    said, targets = torch.tensor([1, 1, 0, 2]), torch.tensor([0, 0, 0, 2])
    found = Predictions(F.one_hot(said, 3).float(), targets, indices=list(range(4)))
    ax = found.plot_confusion_matrix(classes=["ant", "bee", "cat"])
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == (
        "prediction",
        "target",
        "number of examples",
    )
    assert [o.get_text() for o in ax.get_xticklabels()] == ["ant", "bee", "cat"]
    assert {(o.get_position(), o.get_text()) for o in ax.texts} == {
        ((0, 0), "1"),
        ((1, 0), "2"),
        ((2, 2), "1"),
    }
    import matplotlib.pyplot as plt

    own = plt.subplots()[1]
    assert (
        found.plot_confusion_matrix(normalize="true", ax=own) is own
        and own.get_title() == "share of examples"
    )
    assert {o.get_text() for o in own.texts} == {"0.33", "0.67", "1.00"}


@pytest.mark.shows("U14")
def test_a_copy_of_the_trainer_state_is_the_same_before_and_after():
    "Between fits as well, callbacks' attributes included"
    trainer = make_trainer([MetricsCB(accuracy=MulticlassAccuracy(), show=False)])
    trainer.fit(1)
    before = {k: v for k, v in vars(trainer).items() if k != "plan"}
    metrics = copy.deepcopy(trainer.MetricsCB.state_dict()["losses"])
    rows = list(trainer.history)
    for look in LOOKS.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            look(trainer)
    after = {k: v for k, v in vars(trainer).items() if k != "plan"}
    assert before.keys() == after.keys() and all(
        before[k] is after[k] or before[k] == after[k] for k in before
    )
    assert list(trainer.history) == rows and trainer.MetricsCB.state_dict()["losses"] == metrics


def test_in_a_fit_an_average_is_evaluated_as_the_validation_pass_evaluates_it():
    class AsksInLog:
        def log(self, trainer):
            row = trainer.validate()
            preds = trainer.epoch_preds(with_loss=True)
            self.found = row["valid_loss"], preds.losses.mean().item()

    asks = AsksInLog()
    trainer = make_trainer([MetricsCB(show=False), EMACB(0.9, warmup=False), asks])
    trainer.fit(2, lr=0.5)
    expected = trainer.history[-1]["valid_loss"]
    assert asks.found == pytest.approx((expected, expected), rel=1e-6)


class LockedMetric:
    def __init__(self):
        self.lock, self.n = threading.Lock(), 0

    def reset(self):
        self.n = 0

    def update(self, preds, targets):
        self.n += len(preds)

    def compute(self):
        return self.n


def test_a_metric_that_cannot_be_copied_is_told_by_its_name():
    trainer = make_trainer([MetricsCB(show=False, seen=LockedMetric())])
    with pytest.raises(TypeError) as error:
        trainer.validate()
    assert "`seen` cannot be copied, and `validate` needs a copy" in error.value.__notes__[0]
    again = make_trainer([MetricsCB(show=False, train_metrics=True, seen=LockedMetric())])
    with pytest.raises(TypeError) as error:
        again.fit(1)
    assert "`train_metrics=True` needs a copy" in error.value.__notes__[0]


@pytest.mark.parametrize("ignored", [-100, 0])
@pytest.mark.parametrize("made", ["module", "partial", "function"])
def test_padding_that_is_ignored_does_not_count_in_the_loss_of_an_example(made, ignored):
    scores, words = torch.randn(3, 4, 6), torch.randint(1, 4, (3, 6))
    words[0, 2:] = words[1, 5:] = ignored
    module = torch.nn.CrossEntropyLoss(ignore_index=ignored)
    kinds = dict(
        module=module, partial=partial(F.cross_entropy, ignore_index=ignored), function=F.cross_entropy
    )
    if made == "function" and ignored != -100:
        pytest.skip("Its usual value is -100")
    alone = [module(scores[i : i + 1], words[i : i + 1]) for i in range(3)]
    assert torch.allclose(loss_per_example(kinds[made], scores, words), torch.stack(alone))


def test_a_callback_that_reads_the_loss_is_told_how_predictions_have_one():
    class SeesCB:
        def after_batch(self, trainer):
            self.last = trainer.loss.item()

    trainer = make_trainer([SeesCB()])
    with pytest.raises(AttributeError, match="`get_preds.with_loss=True.`.*`order = Order.RECORD`") as failed:
        trainer.get_preds()
    assert "NoLossCB" not in str(failed.value)
    assert len(trainer.get_preds(with_loss=True)) == len(trainer.dls.valid.dataset)
