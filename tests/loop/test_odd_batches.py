"""Batches that are no tuples: numbers, tensors, dicts, objects, lists of fastcore, packed sequences.

Nobody takes them apart while the steps do not ask for inputs and targets and nothing is measured. What a loss
weighs is then counted in the batch itself, or has to be said.
"""

import copy
import dataclasses

import pytest
import torch
from fastcore.foundation import L
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_sequence, unpack_sequence

from isaac_loop.all import (
    AccumulationCB,
    BasicTrainCB,
    BatchTransformCB,
    CancelBatchException,
    DataLoaders,
    DeviceCB,
    LimitCB,
    MetricsCB,
    NBatchCB,
    Trainer,
    with_cbs,
)
from isaac_loop.basics.tensors import batch_size, map_tensors, to_device


@dataclasses.dataclass
class Game:
    moves: torch.Tensor


class Opaque:
    "An object of which nobody knows anything"


def states(batch):
    "What the model sees of a batch"
    if isinstance(batch, int):
        return torch.full((2, 3), float(batch))
    if isinstance(batch, Game):
        return batch.moves
    if isinstance(batch, dict):
        return batch["moves"]
    if isinstance(batch, Opaque):
        return torch.ones(2, 3)
    return batch


class OwnStepsCB(BasicTrainCB):
    def predict(self, trainer):
        trainer.preds = trainer.model(states(trainer.batch))

    def get_loss(self, trainer):
        trainer.loss = trainer.preds.square().mean()


class OwnBatch(Trainer):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.preds = self.model(states(self.batch))
        self.loss = self.preds.square().mean()
        if self.training:
            self.loss.backward()
            self.run_callbacks("step", "zero_grad")


KINDS = {
    "numbers": lambda: range(4),
    "tensors": lambda: list(torch.randn(4, 5, 3)),
    "objects": lambda: [Game(o) for o in torch.randn(4, 5, 3)],
    "objects of which nothing is known": lambda: [Opaque() for _ in range(4)],
    "dicts": lambda: [{"moves": o} for o in torch.randn(4, 5, 3)],
}
WITH_ROWS = "tensors", "objects", "dicts"


def make(batches, *callbacks, own_batch=False, valid=True):
    torch.manual_seed(0)
    cls, steps = (OwnBatch, BasicTrainCB()) if own_batch else (Trainer, OwnStepsCB())
    dls = DataLoaders(batches, batches if valid else None)
    return cls(dls, None, optim.SGD, nn.Linear(3, 1), [steps, *callbacks])


@pytest.mark.parametrize("own_batch", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_own_steps_take_any_batch_and_train_as_by_hand(kind, own_batch):
    batches = KINDS[kind]()
    trainer = make(batches, MetricsCB(weigh="mean", show=False), NBatchCB(4), own_batch=own_batch)
    theirs = copy.deepcopy(trainer.model)
    opt = optim.SGD(theirs.parameters(), 0.1)
    for batch in [*batches] * 2:
        theirs(states(batch)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    trainer.fit(2, lr=0.1)
    assert all(map(torch.equal, trainer.model.parameters(), theirs.parameters()))
    losses = trainer.history.batches["loss"][-4:]
    assert trainer.history[-1]["valid_loss"] == pytest.approx(sum(losses) / 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_weighs_the_rows_of_the_batch_or_somebody_says_what(kind):
    trainer = make(KINDS[kind](), MetricsCB(show=False))
    if kind in WITH_ROWS:
        trainer.fit(1)
        return
    with pytest.raises(TypeError, match="cannot tell how much its loss weighs.*`weigh='mean'`"):
        trainer.fit(1)
    trainer = make(KINDS[kind](), MetricsCB(weigh=lambda batch: 2, show=False))
    trainer.fit(1)
    assert trainer.history[-1]["train_loss"] > 0


def test_tensors_of_different_lengths_weigh_what_they_hold():
    batches = [torch.ones(4, 3), torch.zeros(1, 3)]
    trainer = make(batches, MetricsCB(show=False), valid=False)
    trainer.fit(1, lr=0, valid=False)
    one, other = trainer.history.batches["loss"]
    assert trainer.history[-1]["train_loss"] == pytest.approx((4 * one + other) / 5)


@pytest.mark.parametrize("kind", ["numbers", "tensors", "objects"])
def test_a_metric_wants_targets_and_says_how_to_name_them(kind):
    metric = MetricsCB(weigh="mean", show=False, gap=lambda preds, targets: 0.0)
    with pytest.raises(TypeError, match=r"does not say what is input.*`DataLoaders\(\.\.\., split=f\)`"):
        make(KINDS[kind](), metric).fit(1)
    assert issubclass(TypeError, TypeError)


def test_a_split_makes_metrics_and_predictions_of_any_batch():
    dls = DataLoaders(range(4), range(4), split=lambda i: (states(i), torch.full((2, 1), float(i))))
    metric = MetricsCB(show=False, gap=lambda preds, targets: (preds - targets).abs().mean())
    trainer = Trainer(dls, nn.MSELoss(), optim.SGD, nn.Linear(3, 1), [BasicTrainCB(), metric])
    trainer.fit(1, lr=0)
    found = trainer.get_preds()
    assert found.targets.flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and len(found) == 8
    assert trainer.history[-1]["gap"] == pytest.approx((found.preds - found.targets).abs().mean().item())


def test_predictions_of_a_split_without_targets_have_none():
    x = torch.randn(4, 5, 3)
    trainer = Trainer(DataLoaders(x, x, split=lambda x: (x, ())), None, None, nn.Linear(3, 1), BasicTrainCB())
    preds, targets = trainer.get_preds()
    assert targets is None and torch.equal(preds, trainer.model(x.flatten(0, 1)).detach())


def test_samples_are_counted_in_any_batch_with_rows():
    trainer = make(KINDS["tensors"](), LimitCB(samples=10), valid=False)
    trainer.fit(2, valid=False)
    assert trainer.n_updates == 2
    with pytest.raises(TypeError, match="cannot count samples"):
        make(range(4), LimitCB(samples=10), valid=False).fit(1, valid=False)


def test_gradients_are_gathered_over_any_batch_with_rows():
    trainer = make(KINDS["objects"](), AccumulationCB(2), valid=False)
    trainer.fit(1, valid=False)
    assert trainer.n_updates == 2
    with pytest.raises(TypeError, match="`weigh='mean'`"):
        make(range(4), AccumulationCB(2), valid=False).fit(1, valid=False)
    trainer = make(range(4), AccumulationCB(2, weigh="mean"), valid=False)
    trainer.fit(1, valid=False)
    assert trainer.n_updates == 2


def test_an_error_of_ones_own_split_is_not_taken_for_a_batch_without_one():
    def split(batch):
        raise TypeError("mine")

    trainer = make(KINDS["tensors"](), MetricsCB(show=False), valid=False)
    trainer.dls.split = split
    with pytest.raises(TypeError, match="mine"):
        trainer.fit(1, valid=False)


# Lists of fastcore


def test_a_list_of_fastcore_is_walked_through_and_stays_one():
    batch = L(torch.ones(2), [L(torch.zeros(1), "text")])
    doubled = map_tensors(lambda x: x + 1, batch)
    assert isinstance(doubled, L) and isinstance(doubled[1][0], L) and doubled[0].tolist() == [2, 2]
    assert batch_size(batch) == 2
    assert to_device(batch, "meta")[0].device.type == "meta"


def test_a_list_of_fastcore_trains_like_a_list():
    x, y = torch.randn(3, 4, 3), torch.randn(3, 4, 1)

    def weights(kind):
        torch.manual_seed(0)
        batches = [kind([a, b]) for a, b in zip(x, y)]
        shift = BatchTransformCB(lambda batch: map_tensors(lambda t: t + 1, batch))
        callbacks = [BasicTrainCB(), DeviceCB("cpu"), shift, MetricsCB(mae=nn.L1Loss(), show=False)]
        trainer = Trainer(DataLoaders(batches, batches), nn.MSELoss(), optim.SGD, nn.Linear(3, 1), callbacks)
        trainer.fit(2, lr=0.1)
        assert isinstance(trainer.batch, kind)
        return trainer.model.weight

    assert torch.equal(weights(L), weights(list))


# Packed sequences, and others that look at what they are made of


class Reader(nn.Module):
    "A recurrent net that takes sequences packed, or padded and with their lengths"

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(2, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.rnn(x if isinstance(x, PackedSequence) else packed(x))[1][0])


def packed(x):
    return pack_padded_sequence(x["rows"], x["lengths"], enforce_sorted=False)


def sequences(is_packed):
    "The same batches of 3, 3 and 2 sequences, packed or not"
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(n, 2, generator=generator) for n in (4, 1, 6, 3, 5, 2, 1, 7)]
    batches = []
    for i in (0, 3, 6):
        lengths = torch.tensor([len(o) for o in rows[i : i + 3]])
        x = {"lengths": lengths, "rows": pad_sequence(rows[i : i + 3])}
        batches.append((packed(x) if is_packed else x, lengths % 2))
    return batches


def accuracy(preds, targets):
    return (preds.argmax(1) == targets).float()


WITH_PACKED = {
    "none": lambda: [],
    "metrics": lambda: [MetricsCB(acc=accuracy, show=False)],
    "a device": lambda: [DeviceCB("cpu"), MetricsCB(acc=accuracy, show=False)],
    "accumulation": lambda: [AccumulationCB(2), MetricsCB(acc=accuracy, show=False)],
    "samples": lambda: [LimitCB(samples=12), MetricsCB(acc=accuracy, show=False)],
}


@pytest.mark.parametrize("callbacks", WITH_PACKED.values(), ids=WITH_PACKED)
def test_packed_sequences_give_the_numbers_of_those_that_the_model_packs(callbacks):
    def results(is_packed):
        torch.manual_seed(0)
        batches = sequences(is_packed)
        trainer = Trainer(
            DataLoaders(batches, batches),
            F.cross_entropy,
            optim.SGD,
            Reader(),
            [BasicTrainCB(), *callbacks()],
        )
        trainer.fit(2, lr=0.5)
        rows = [
            {k: v for k, v in row.items() if k not in ("elapsed", "time")} for row in trainer.history.rows
        ]
        preds = trainer.get_preds()
        told = rows, trainer.n_updates, trainer.validate(), preds.targets.tolist()
        return told, [*trainer.model.parameters(), preds.preds]

    (one, ours), (other, theirs) = results(True), results(False)
    assert one == other and all(map(torch.equal, ours, theirs))


def test_what_a_model_gave_packed_comes_back_sequence_by_sequence():
    class OfEach(nn.Linear):
        def forward(self, x):
            return x._replace(data=super().forward(x.data))

    batches = [x for x, _ in sequences(True)]
    linear = OfEach(2, 2)
    trainer = Trainer(DataLoaders(batches, batches), None, optim.SGD, linear, BasicTrainCB())
    trainer.dls.split = lambda batch: ((batch,), ())
    found = trainer.get_preds(with_inputs=True)
    rows = [row for x in batches for row in unpack_sequence(x)]
    assert len(found) == len(found.preds) == 8
    assert all(map(torch.equal, found.inputs, rows))
    assert all(torch.allclose(a, F.linear(b, linear.weight, linear.bias)) for a, b in zip(found.preds, rows))


# Lists of examples, and targets that are not for each of them


class OfImages(nn.Module):
    "Takes a list of images of any size"

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, images):
        return self.linear(torch.stack([o.mean((1, 2)) for o in images]))


def mean_distance(preds, targets):
    "Of what is predicted for an image and the mean of its boxes"
    return torch.stack([(p - o["boxes"].mean(0)).square().mean() for p, o in zip(preds, targets)]).mean()


def of_boxes():
    batches = [
        (torch.randn(len(n), 6), [{"boxes": torch.rand(k, 4)} for k in n]) for n in ([7, 1, 1, 1], [1, 1])
    ]
    return batches, mean_distance, nn.Linear(6, 4)


def of_images():
    images = [[torch.randn(3, 5 + i, 5) for i in range(n)] for n in (4, 2)]
    return [(o, torch.randint(0, 2, (len(o),))) for o in images], F.cross_entropy, OfImages()


def weighted(preds, weights, labels):
    return F.cross_entropy(preds, labels)


def with_weights():
    xs = torch.randn(6, 3).split(4)
    return [(x, torch.ones(2), torch.randint(0, 2, (len(x),))) for x in xs], weighted, nn.Linear(3, 2)


LISTS = {"boxes": of_boxes, "images": of_images, "weights of classes": with_weights}


def listed(name, *callbacks):
    "A trainer of six examples in batches of four and two, and the mean loss of both"
    torch.manual_seed(0)
    batches, loss_func, model = LISTS[name]()
    one, other = (loss_func(model(x), *targets).item() for x, *targets in batches)
    dls = DataLoaders(batches, batches)
    return Trainer(dls, loss_func, optim.SGD, model, [BasicTrainCB(), *callbacks]), (4 * one + 2 * other) / 6


@pytest.mark.parametrize("name", LISTS)
def test_losses_and_metrics_are_means_over_examples_that_stand_in_lists(name):
    trainer, mean = listed(name)
    trainer.add_callbacks(MetricsCB(same=trainer.loss_func, show=False))
    trainer.fit(1, lr=0)
    row = trainer.history[-1]
    assert [row[o] for o in ("train_loss", "valid_loss", "same")] == pytest.approx([mean] * 3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["boxes", "images"])
def test_each_example_in_a_list_has_a_loss(name):
    trainer, mean = listed(name)
    found = trainer.get_preds(with_loss=True)
    assert len(found) == len(found.losses) == 6 and found.losses.mean().item() == pytest.approx(mean)


@pytest.mark.parametrize("name", LISTS)
def test_examples_in_lists_are_counted_towards_a_limit(name):
    trainer, _ = listed(name, LimitCB(samples=10))
    trainer.fit(3, valid=False)
    assert trainer.n_updates == 3 and trainer.stop_reason == "10 samples are enough"


@pytest.mark.parametrize("name", LISTS)
def test_gathered_gradients_weigh_examples_in_lists(name):
    trainer, _ = listed(name, AccumulationCB(2))
    theirs = copy.deepcopy(trainer.model)
    for n, (x, *targets) in zip((4, 2), trainer.dls.train):
        (trainer.loss_func(theirs(x), *targets) * n / 6).backward()
    optim.SGD(theirs.parameters(), 0.1).step()
    trainer.fit(1, lr=0.1, valid=False)
    assert all(map(torch.allclose, trainer.model.parameters(), theirs.parameters()))


class OfNodes(nn.Linear):
    "Takes nodes and edges"

    def forward(self, nodes, edges):
        return super().forward(nodes).mean(0)


@pytest.mark.parametrize("n", [2, 3])
def test_two_graphs_are_not_counted_by_the_two_rows_of_their_edges(n):
    batches = [(torch.randn(9, 3), torch.zeros(2, 12, dtype=torch.long), torch.randn(n))]
    steps, limit = BasicTrainCB(), LimitCB(samples=9)
    trainer = Trainer(DataLoaders(batches, n_inp=2), squares, optim.SGD, OfNodes(3, 1), [steps, limit])
    trainer.fit(2, valid=False)
    assert trainer.stop_reason == "9 samples are enough"


def squares(preds, targets):
    return (preds - targets).square().mean()
