"""What in a batch is input and what is target: said by the loaders or the trainer, and asked by everybody.

The law: batches with the same tensors at odd places, and a `split` that finds them, give what plain batches
`(x, y)` give, bit for bit, in training, metrics, predictions, evaluations, finders, summaries and pictures.
"""

import copy
import pickle
from collections import namedtuple
from collections.abc import Mapping
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch
from fastcore.basics import patch
from fastcore.foundation import L
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

from isaac_loop.all import (
    AccumulationCB,
    ActivationStatsCB,
    BasicTrainCB,
    BatchAugmentationCB,
    CutMixCB,
    DataLoaders,
    DeviceCB,
    EvaluatorCB,
    LimitCB,
    MetricsCB,
    MixUpCB,
    ProgressiveResizeCB,
    SWACB,
    TextComparisonCB,
    Trainer,
    exact_loader,
    set_seed,
)
from isaac_loop.interop.adapters import adapt

N_CLASSES = 3


def plain_batches(n=4, size=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 1, 6, 6, generator=g), torch.randint(N_CLASSES, (size,), generator=g))
        for _ in range(n)
    ]


def odd(batch):
    "The same tensors, behind others of another length"
    x, y = batch
    return {"edges": torch.ones(2, 5), "deep": {"y": y}, "x": x, "last": "text"}


def take_apart(batch):
    return batch["x"], batch["deep"]["y"]


class Method(DataLoaders):
    def split(self, batch):
        return (batch["x"],), [batch["deep"]["y"]]


class Override(Trainer):
    def split(self, batch):
        return (batch["x"],), (batch["deep"]["y"],)


class Parent(Override):
    def split(self, batch):
        return super().split({"x": batch["x"], "deep": batch["deep"]})


class Setup(Trainer):
    def subclassing_method(self, split=None):
        self.split = lambda batch: ((batch["x"],), (batch["deep"]["y"],)) if split is None else split(batch)


class Patched(Trainer):
    pass


@patch
def split(self: Patched, batch):
    return (batch["x"],), (batch["deep"]["y"],)


def loaders(train, valid):
    return SimpleNamespace(train=train, valid=valid)


WAYS = {
    "of the loaders": (Trainer, lambda *o: DataLoaders(*o, split=take_apart), odd),
    "a method of the loaders": (Trainer, Method, odd),
    "of any object with loaders": (
        Trainer,
        lambda *o: SimpleNamespace(**vars(loaders(*o)), split=take_apart),
        odd,
    ),
    "of a subclass": (Override, DataLoaders, odd),
    "of a subclass, over another `split`": (Override, lambda *o: DataLoaders(*o, split=len), odd),
    "of a subclass of that": (Parent, DataLoaders, odd),
    "set in `subclassing_method`": (Setup, DataLoaders, odd),
    "patched in a notebook": (Patched, loaders, odd),
    "a list of fastcore": (Trainer, DataLoaders, L),
    "a list": (Trainer, DataLoaders, list),
    "by number in a list of fastcore": (
        Trainer,
        lambda *o: DataLoaders(*o, split=lambda b: (b[1:2], b[0])),
        lambda batch: L(batch[1], batch[0]),
    ),
}


class Texts:
    "As many tokens as classes"

    def __call__(self, tokens):
        return " ".join(map(str, tokens))


def model():
    set_seed(3)
    first = nn.Conv2d(1, 4, 3)
    return nn.Sequential(
        first, nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, N_CLASSES)
    )


def accuracy(preds, targets):
    return (preds.argmax(-1) == targets).float().mean()


def make(trainer_class, dls, *callbacks):
    return trainer_class(dls, F.cross_entropy, optim.SGD, model(), [BasicTrainCB(), *callbacks])


def everything(trainer_class, make_dls, changed):
    "What everybody who asks for inputs or targets has to say"
    batches = [changed(o) for o in plain_batches()]
    dls, told = make_dls(batches, batches[:2]), {}
    metrics = MetricsCB(acc=accuracy, train_metrics=True, show=False)
    stats = ActivationStatsCB(nn.Conv2d)
    trainer = make(trainer_class, dls, metrics, DeviceCB("cpu"), stats)
    evaluator = EvaluatorCB(
        {"a": "train"},
        updates=3,
        acc=accuracy,
        eval_tensors=["inputs", "targets"],
        user_iter_callback=lambda tensors, store: store.setdefault("seen", []).append(tensors),
    )
    trainer.fit(2, lr=0.1, callbacks=evaluator)
    told["weights"] = list(trainer.model.state_dict().values())
    told["rows"] = [
        {k: v for k, v in row.items() if k != "elapsed" and "seconds" not in k} for row in trainer.history
    ]
    told["evaluated"] = [[o["inputs"], o["targets"]] for o in evaluator.store["seen"]]
    told["activations"] = [o.mean for o in stats.stats.values()]
    found = trainer.get_preds(with_inputs=True, with_loss=True)
    told["predictions"] = [found.preds, found.targets, found.losses, found.inputs, list(found.indices)]
    told["validated"] = trainer.validate("train")
    told["summary"] = trainer.summarize_model().rows
    axes = trainer.show_image_batch(max_n=4)
    told["picture"] = [torch.as_tensor(ax.images[0].get_array().copy()) for ax in axes.flat if ax.images]
    told["titles"] = [ax.get_title() for ax in axes.flat]
    plt.close("all")
    told["rates"] = trainer.lr_find(n_batches=8).losses
    for name, callbacks in {
        "mixup": [MixUpCB()],
        "cutmix": [CutMixCB()],
        "resize": [ProgressiveResizeCB()],
        "swa": [SWACB(start=0.5, keep=True)],
        "accumulation": [AccumulationCB(2)],
        "limit": [LimitCB(samples=15)],
        "texts": [
            TextComparisonCB(
                Texts(),
                tokens=lambda preds: preds.argmax(-1, keepdim=True),
                truth=lambda batch: torch.ones(6, 1).long(),
                show=False,
            )
        ],
        "texts by the model": [
            TextComparisonCB(
                Texts(),
                generate=lambda model, inputs: inputs[0].flatten(1)[:, :2].long(),
                truth=lambda batch: torch.ones(6, 1).long(),
                show=False,
            )
        ],
    }.items():
        other = make(trainer_class, dls, MetricsCB(show=False), *callbacks)
        set_seed(1)
        other.fit(2, lr=0.1)
        told[name] = [*other.model.state_dict().values(), other.n_updates, other.history[-1]["train_loss"]]
        told[name] += [o for k, o in other.history[-1].items() if k.startswith("texts")]
    told["show_batch"] = []
    if isinstance(dls, DataLoaders) and trainer_class is Trainer:
        axes = dls.show_batch(n=4)
        told["show_batch"] = [ax.get_title() for ax in axes.flat]
        plt.close("all")
    return told


def flat(x):
    if isinstance(x, dict):
        return [o for k, v in x.items() for o in (k, *flat(v))]
    if isinstance(x, (list, tuple)):
        return [o for part in x for o in flat(part)]
    return [x]


def same(a, b):
    if torch.is_tensor(a) and torch.is_tensor(b):
        return torch.equal(a, b)
    return a == b or (a != a and b != b)


@pytest.fixture(scope="module")
def plainly():
    return everything(Trainer, DataLoaders, tuple)


@pytest.mark.parametrize("way", WAYS)
def test_everybody_asks_the_same_split(plainly, way):
    told = everything(*WAYS[way])
    for name in plainly:
        if name == "show_batch" and not told[name]:
            continue
        ours, theirs = flat(told[name]), flat(plainly[name])
        assert len(ours) == len(theirs) and all(map(same, ours, theirs)), name
        assert ours, name


@pytest.mark.parametrize("way", ["of the loaders", "of a subclass"])
def test_callbacks_of_other_libraries_are_shown_the_same(way):
    class Theirs:
        def __init__(self):
            self.seen = []

        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            self.seen.append(batch_output["batch_size"])

    trainer_class, make_dls, changed = WAYS[way]
    theirs = Theirs()
    trainer = make(trainer_class, make_dls([changed(o) for o in plain_batches()], None), adapt(theirs))
    trainer.fit(1, lr=0.1, valid=False)
    assert theirs.seen == [6] * 4


# What `split` may give


@pytest.mark.parametrize(
    "given, inputs, targets",
    [
        ((1, 2), (1,), (2,)),
        ([1, 2], (1,), (2,)),
        (L(1, 2), (1,), (2,)),
        (((1, 2), 3), (1, 2), (3,)),
        (([1, 2], L(3, 4)), (1, 2), (3, 4)),
        (({"a": 1}, {"b": 2}), ({"a": 1},), ({"b": 2},)),
        ((1, ()), (1,), ()),
        (((), 1), (), (1,)),
        ((1, None), (1,), (None,)),
        ((1, "text"), (1,), ("text",)),
    ],
)
def test_a_tuple_or_list_is_several_things_and_anything_else_is_one(given, inputs, targets):
    trainer = Trainer(DataLoaders([], split=lambda batch: given), None, None, None, None)
    assert trainer.split("any batch") == (inputs, targets)


@pytest.mark.parametrize(
    "given, said",
    [
        (torch.ones(2, 3), r"gave a Tensor of shape \(2, 3\)"),
        ((1,), "gave a tuple of 1,"),
        ([1, 2, 3], "gave a list of 3,"),
        ({"x": 1, "y": 2}, "gave a dict of 2,"),
        (None, "gave a NoneType,"),
        ("xy", "gave a str,"),
    ],
)
def test_what_is_no_pair_is_refused(given, said):
    trainer = make(Trainer, DataLoaders(plain_batches(), split=lambda batch: given))
    with pytest.raises(TypeError, match=f"`split` {said}.* Let it return a pair `\\(inputs, targets\\)`"):
        trainer.fit(1, valid=False)


def test_a_number_and_a_function_contradict_each_other():
    for n_inp in (1, 2):
        with pytest.raises(ValueError, match="`n_inp` and `split` both say"):
            DataLoaders([], n_inp=n_inp, split=take_apart)
        with pytest.raises(ValueError, match="`n_inp` and `split` both say"):
            Method([], n_inp=n_inp)
    with pytest.raises(ValueError, match="at least one input"):
        DataLoaders([], n_inp=0, split=take_apart)


@pytest.mark.parametrize("split", ["train", 0.2, lambda: (), lambda a, b: (a, b)])
def test_a_split_that_takes_no_batch_is_refused(split):
    with pytest.raises(TypeError, match="Pass a function"):
        DataLoaders([], split=split)


def test_loaders_say_what_they_go_by():
    assert "n_inp: 1" in repr(DataLoaders([])) and DataLoaders([]).n_inp == 1
    assert "split: take_apart" in repr(DataLoaders([], split=take_apart))
    assert "split: split" in repr(Method([]))


def test_splits_of_a_dataset_take_it_too():
    rows = [{"x": torch.ones(2), "y": 1}] * 4
    dls = DataLoaders.from_dataset_dict(
        {"train": rows, "test": rows}, 2, columns=["y", "x"], split=lambda batch: (batch[1], batch[0])
    )
    inputs, targets = Trainer(dls, None, None, None, None).split(next(iter(dls.train)))
    assert inputs[0].shape == (2, 2) and targets[0].tolist() == [1, 1]
    with pytest.raises(ValueError, match="both say"):
        DataLoaders.from_dataset_dict({"train": rows, "test": rows}, 2, n_inp=1, split=take_apart)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("options", [dict(split=take_apart), dict(n_inp=2), {}])
def test_copies_and_pickles_keep_it(copied, options):
    dls = DataLoaders(exact_loader([1, 2, 3], 2), **options)
    new = copied(dls)
    assert (new.n_inp, new.split) == (dls.n_inp, dls.split)


# What a split is for


def test_an_autoencoder_is_trained_as_by_hand():
    batches = [x.flatten(1) for x, _ in plain_batches()]
    theirs = nn.Sequential(nn.Linear(36, 4), nn.Linear(4, 36))
    ours = copy.deepcopy(theirs)
    opt = optim.SGD(theirs.parameters(), 0.1)
    for x in batches * 2:
        F.mse_loss(theirs(x), x).backward()
        opt.step()
        opt.zero_grad()
    dls = DataLoaders(batches, batches, split=lambda batch: (batch, batch))
    trainer = Trainer(
        dls, F.mse_loss, optim.SGD, ours, [BasicTrainCB(), MetricsCB(mae=F.l1_loss, show=False)]
    )
    trainer.fit(2, lr=0.1)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    found = trainer.get_preds(with_inputs=True)
    assert torch.equal(found.inputs, found.targets)
    assert trainer.history[-1]["mae"] == pytest.approx((found.preds - found.inputs).abs().mean().item())


def test_a_loss_that_wants_the_input_as_well_gets_it():
    "As in contrastive learning: two views go in, and the loss wants views and labels"
    Views = namedtuple("Views", "a b label")
    batches = [Views(x.flatten(1), -x.flatten(1), y) for x, y in plain_batches()]

    def loss_func(preds, a, b, label):
        assert torch.equal(a, -b) and len(label) == len(a)
        return preds.mean()

    class Two(nn.Linear):
        def forward(self, a, b):
            return super().forward(a) + super().forward(b)

    dls = DataLoaders(batches, batches, split=lambda o: ((o.a, o.b), (o.a, o.b, o.label)))
    trainer = Trainer(dls, loss_func, optim.SGD, Two(36, 2), [BasicTrainCB(), MetricsCB(show=False)])
    trainer.fit(1)
    assert trainer.get_preds().targets[2].shape == (24,)


def twice(x):
    return x, x


def test_what_is_input_and_target_at_once_cannot_be_mixed():
    x = [x for x, _ in plain_batches()]
    for mixer in (MixUpCB(), CutMixCB()):
        trainer = Trainer(
            DataLoaders(x, split=twice), F.mse_loss, optim.SGD, nn.Conv2d(1, 1, 1), [BasicTrainCB(), mixer]
        )
        with pytest.raises(ValueError, match="`Trainer.split` gives one tensor as input and as target"):
            trainer.fit(1, valid=False)
        trainer.dls = DataLoaders(list(map(twice, x)))
        trainer.fit(1, valid=False)


def test_what_is_input_and_target_at_once_is_made_smaller_as_one():
    x = [x for x, _ in plain_batches()]
    seen = []
    look = SimpleNamespace(
        order=1000, before_predict=lambda trainer: seen.append(trainer.split(trainer.batch))
    )
    callbacks = [BasicTrainCB(), ProgressiveResizeCB(0.5), look]
    trainer = Trainer(DataLoaders(x, split=twice), F.mse_loss, optim.SGD, nn.Conv2d(1, 1, 1), callbacks)
    trainer.fit(1, valid=False)
    assert all(inputs[0] is targets[0] and inputs[0].shape[-1] == 3 for inputs, targets in seen)


def test_whether_an_item_is_a_target_is_asked_of_the_split():
    batches = [(y, x) for x, y in plain_batches()]
    dls = DataLoaders(batches, batches, split=lambda batch: (batch[1], batch[0]))

    def fit(tfms, dls=dls, **options):
        make(Trainer, dls, BatchAugmentationCB(tfms, **options)).fit(1, lr=0.1)

    fit([None, lambda x: x.flip(-1)])
    for both in (dls, DataLoaders(batches, batches, split=lambda batch: (batch[1], batch))):
        with pytest.raises(ValueError, match="item 0, a target"):
            fit([lambda y: y], both)
    fit([lambda y: y], on_valid=True)


def test_an_override_that_forgets_the_tuples_is_told_so():
    class Bare(Trainer):
        def split(self, batch):
            return batch[0], batch[1]

    with pytest.raises(TypeError) as caught:
        make(Bare, DataLoaders(plain_batches())).fit(1, valid=False)
    assert any("`Bare.split` gave a Tensor as inputs" in note for note in caught.value.__notes__)
    assert any("`Bare.split` gave a Tensor as targets" in note for note in caught.value.__notes__)


def test_a_loader_of_pytorch_with_workers_brings_what_the_split_finds():
    rows = [{"x": torch.full((2,), float(i)), "deep": {"y": i % 3}} for i in range(8)]
    dls = DataLoaders(DataLoader(rows, 4, num_workers=1), split=take_apart)
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(2, 3), BasicTrainCB())
    trainer.fit(1, valid=False)
    assert trainer.split(trainer.batch)[0][0].shape == (4, 2)


# Asked once


def noisy(batch):
    noise = torch.randn_like(batch["x"])
    return batch["x"] + noise, noise


def popped(batch):
    return batch.pop("x"), batch["deep"]["y"]


class CountingCB:
    "Asks once more, like a callback that measures"

    def after_batch(self, trainer):
        self.parts = trainer.split(trainer.batch)


@pytest.mark.parametrize("split", [noisy, popped])
def test_a_function_is_asked_once_for_a_batch_so_that_targets_belong_to_inputs(split):
    "Also if it draws random numbers, or takes the batch apart in place"
    asked = []

    def asking(batch):
        asked.append(split(batch))
        return asked[-1]

    def loss_func(preds, target):
        assert target is asked[-1][1]
        return preds.float().square().mean()

    batches = [odd(o) for o in plain_batches()]
    model = nn.Conv2d(1, 1, 3, padding=1)
    callbacks = [BasicTrainCB(), MetricsCB(show=False), CountingCB()]
    trainer = Trainer(DataLoaders(batches, split=asking), loss_func, optim.SGD, model, callbacks)
    trainer.fit(1, valid=False)
    assert len(asked) == len(batches) and trainer.CountingCB.parts[1][0] is asked[-1][1]


def test_a_batch_that_a_callback_changes_is_taken_apart_anew():
    def before_backward(trainer):
        trainer.batch["x"] = trainer.batch["x"] + 1

    asked = []

    def split(batch):
        asked.append(batch["x"])
        return take_apart(batch)

    model, batches = nn.Sequential(nn.Flatten(), nn.Linear(36, N_CLASSES)), [odd(plain_batches(1)[0])]
    callbacks = [BasicTrainCB(), before_backward, MetricsCB(show=False, f=lambda preds, y: preds.mean())]
    trainer = Trainer(DataLoaders(batches, split=split), F.cross_entropy, optim.SGD, model, callbacks)
    trainer.fit(1, valid=False)
    assert len(asked) == 2 and torch.equal(asked[1], asked[0] + 1)


def test_a_function_that_is_taken_away_leaves_the_first_part_as_input():
    loaders = DataLoaders(plain_batches(), split=lambda batch: batch)
    loaders.split = None
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, N_CLASSES))
    trainer = Trainer(loaders, F.cross_entropy, optim.SGD, model, BasicTrainCB())
    trainer.fit(1, valid=False)
    assert trainer.n_updates == 4


class Lazy(Mapping):
    "Gives its values one by one, as a mapping of one's own may"

    def __init__(self, **held):
        self.held = held

    def __getitem__(self, name):
        return self.held[name]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)

    def values(self):
        yield from self.held.values()


def test_a_mapping_whose_values_come_one_by_one_is_a_batch_like_any():
    def trained(batches):
        set_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, N_CLASSES))
        callbacks = [BasicTrainCB(), MetricsCB(show=False, f=lambda preds, y: preds.mean())]
        trainer = Trainer(DataLoaders(batches, batches), F.cross_entropy, optim.SGD, model, callbacks)
        trainer.fit(1)
        return [*map(torch.Tensor.tolist, model.parameters())]

    plain = plain_batches(3)
    assert trained([Lazy(x=x, y=y) for x, y in plain]) == trained(plain)
