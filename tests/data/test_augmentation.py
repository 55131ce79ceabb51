"""Augmentation (`data/augmentation.py`) against loops written by hand, bit for bit.

Every callback is also run on tuples, lists, named tuples, dicts and batches with two inputs, with
validation watched, and inside a guard that makes it an error to turn a tensor into a number while a batch
is being worked on.
"""

import copy
import dataclasses
import warnings
from collections import OrderedDict, namedtuple
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.data.augmentation import (
    BatchAugmentationCB,
    BatchTransformCB,
    ProgressiveResizeCB,
    albumentations_transform,
    each_image,
)
from isaac_loop.data.mixtures import CutMixCB, MixUpCB
from isaac_loop.data.random_patches import RandCopy, RandErase
from isaac_loop.device.device import DeviceCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.models.small_models import SimpleNet
from isaac_loop.recipes.demo import digit_loaders
from isaac_loop.train.averaging import SWACB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.replay_loaders import ReplayLoader
from isaac_loop.loop.events import Order
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer
from waiting import InsideCB, RefuseToWait, Waited

N_CLASSES = 3


def make_batches(n_batches=3, size=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 1, 6, 6, generator=g), torch.randint(N_CLASSES, (size,), generator=g))
        for _ in range(n_batches)
    ]


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, N_CLASSES))


class SeenCB:
    "Keeps what the model sees"

    order = Order.RECORD

    def before_fit(self, trainer):
        self.train, self.valid = [], []

    def before_batch(self, trainer):
        (self.train if trainer.training else self.valid).append(trainer.batch)


def run(
    callbacks, batches=None, loss_func=F.cross_entropy, trainer_class=Trainer, n_inp=1, n_epochs=1, model=None
):
    "Train from one seed; the loaders' own batches must stay as they were"
    batches = make_batches() if batches is None else batches
    before = copy.deepcopy(batches)
    set_seed(7)
    trainer = trainer_class(
        DataLoaders(batches, batches, n_inp=n_inp),
        loss_func,
        optim.SGD,
        make_model() if model is None else model,
        [BasicTrainCB(), SeenCB(), *callbacks],
    )
    trainer.fit(n_epochs, lr=0.1)
    assert all(equal(a, b) for a, b in zip(batches, before)), "the loader's own data was changed"
    return trainer


def equal(a, b):
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(equal, a, b))


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def by_hand(change, loss_of, n_epochs=1):
    "The loop anyone would write; `change` gets the inputs, and what else it returns goes to `loss_of`"
    set_seed(7)
    model = make_model()
    opt = optim.SGD(model.parameters(), 0.1)
    for _ in range(n_epochs):
        for x, y in make_batches():
            x, *more = change(x)
            loss = loss_of(model(x), y, *more)
            loss.backward()
            opt.step()
            opt.zero_grad()
    return model


# Transforms of items and batches


@pytest.mark.shows("ISA-79", "MIN-09", "MIN-13")
@pytest.mark.parametrize(
    "tfm",
    [RandErase(), RandCopy(), RandErase(per_image=False), lambda x: x + torch.randn_like(x)],
    ids=["erase", "copy", "per batch", "noise"],
)
@pytest.mark.parametrize(
    "how",
    [
        lambda t: BatchAugmentationCB([t]),
        lambda t: BatchAugmentationCB(t),
        lambda t: BatchTransformCB(lambda b: (t(b[0]), b[1]), on_valid=False),
    ],
    ids=["list", "alone", "batch"],
)
def test_training_with_a_transform_is_the_loop_written_by_hand(tfm, how):
    "Bit for bit, from the same seed"
    trainer = run([how(tfm)], n_epochs=2)
    assert same(trainer.model, by_hand(lambda x: (tfm(x),), F.cross_entropy, n_epochs=2))


@pytest.mark.shows("ISA-80", "MIN-09")
@pytest.mark.parametrize("on_train", [True, False])
@pytest.mark.parametrize("on_valid", [True, False])
@pytest.mark.parametrize("kind", [BatchAugmentationCB, BatchTransformCB])
def test_each_kind_of_pass_can_be_switched(kind, on_train, on_valid):
    tfm = (lambda x: x + 1) if kind is BatchAugmentationCB else (lambda batch: (batch[0] + 1, batch[1]))
    seen = run([kind(tfm, on_train=on_train, on_valid=on_valid)]).SeenCB
    for (x, _), (train, _), (valid, _) in zip(make_batches(), seen.train, seen.valid):
        assert torch.equal(train, x + on_train) and torch.equal(valid, x + on_valid)


@pytest.mark.shows("ISA-80")
@pytest.mark.parametrize(
    "callback",
    [
        BatchAugmentationCB(RandErase(p=1)),
        MixUpCB(),
        CutMixCB(),
        ProgressiveResizeCB(),
        BatchAugmentationCB([RandCopy(p=1)]),
    ],
    ids=["erase", "mixup", "cutmix", "resize", "copy"],
)
def test_validation_is_left_alone_by_default(callback):
    "Pixels, targets and losses"
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, N_CLASSES))
    trainer = run([callback, MetricsCB(show=False)], model=model)
    assert all(equal(a, b) for a, b in zip(trainer.SeenCB.valid, make_batches()))
    assert not all(equal(a, b) for a, b in zip(trainer.SeenCB.train, make_batches()))
    with torch.no_grad():
        losses = [F.cross_entropy(trainer.model(x), y).item() for x, y in make_batches()]
    assert trainer.history.latest("valid_loss") == pytest.approx(sum(losses) / 3, rel=1e-6)


@pytest.mark.shows("ISA-79")
def test_transform_i_is_for_item_i_and_missing_ones_do_nothing():
    batches = [(x, y, y * 2) for x, y in make_batches()]
    loss = lambda preds, y, z: F.cross_entropy(preds, y)
    for tfms in ([None, None, lambda z: z + 1], {2: lambda z: z + 1}):
        for (x, y, z), seen in zip(
            batches, run([BatchAugmentationCB(tfms, on_valid=False)], batches, loss).SeenCB.train
        ):
            assert seen[0] is x and seen[1] is y and torch.equal(seen[2], z + 1)


Pair = namedtuple("Pair", "image label")
CONTAINERS = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "named tuple": Pair,
    "dict": lambda x, y: {"image": x, "label": y},
    "ordered dict": lambda x, y: OrderedDict(image=x, label=y),
}


@pytest.mark.shows("ISA-79")
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_batch_comes_back_as_what_it_was(kind):
    batches = [CONTAINERS[kind](*o) for o in make_batches()]
    callbacks = [[BatchAugmentationCB([RandErase(p=1)])], [MixUpCB()], [CutMixCB()]]
    if kind in ("named tuple", "dict", "ordered dict"):
        callbacks.append([BatchAugmentationCB({"image": RandErase(p=1)})])
    for cbs in callbacks:
        seen = run(cbs, batches).SeenCB.train[0]
        assert type(seen) is type(batches[0])
        image, label = seen.values() if isinstance(seen, dict) else seen
        assert torch.equal(label, make_batches()[0][1]) and not torch.equal(image, make_batches()[0][0])


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(72, N_CLASSES)

    def forward(self, a, b):
        return self.layer(torch.cat([a.flatten(1), b.flatten(1)], 1))


@pytest.mark.shows("F060")
@pytest.mark.parametrize("callback", [MixUpCB(), CutMixCB()])
def test_two_inputs_are_mixed_alike(callback):
    batches = [(x, x * 2, y) for x, y in make_batches()]
    a, b, y = run([callback], batches, n_inp=2, model=TwoInputs()).SeenCB.train[0]
    assert torch.allclose(a * 2, b) and torch.equal(y, batches[0][2]) and not torch.equal(a, batches[0][0])


@pytest.mark.shows("F060")
def test_a_split_of_ones_own_is_respected_however_deep_the_inputs_are():
    "The input is deep in the batch, and is put back there"

    class Deep(Trainer):
        def split(self, batch):
            return (batch["deep"]["x"],), (batch["y"],)

    batches = [{"deep": {"x": x, "other": x.clone()}, "y": y} for x, y in make_batches()]
    seen = run([MixUpCB()], batches, trainer_class=Deep).SeenCB.train[0]
    assert not torch.equal(seen["deep"]["x"], batches[0]["deep"]["x"])
    assert torch.equal(seen["deep"]["other"], batches[0]["deep"]["other"])


def test_a_split_that_computes_cannot_be_mixed_and_says_so():
    class Computes(Trainer):
        def split(self, batch):
            return (batch[0] * 2,), batch[1:]

    with pytest.raises(ValueError, match="`Computes.split` gives inputs that are not in the batch"):
        run([MixUpCB()], trainer_class=Computes)


# What goes wrong


def halve(x):
    return x[::2]


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: BatchAugmentationCB(halve), "`halve` of item 0"),
        (lambda: BatchAugmentationCB([None, halve], on_valid=False), "`halve` of item 1"),
        (lambda: BatchAugmentationCB(partial(halve)), "`halve` of item 0"),
        (lambda: BatchTransformCB(lambda b: tuple(map(halve, b))), "`<lambda>` of the batch"),
        (lambda: BatchTransformCB(lambda b: (halve(b[0]), b[1])), "`<lambda>` of the batch"),
    ],
)
def test_a_transform_that_changes_the_length_is_named_with_both_lengths(make, name):
    with pytest.raises(ValueError, match=f"The transform {name} made a length of 4 out of 8") as caught:
        run([make()])
    assert "at epoch 0, batch 0 (training)" in caught.value.__notes__[0]


def test_a_transform_that_forgets_to_return_is_an_error():
    with pytest.raises(TypeError, match="`<lambda>` of item 0 returned None.*inplace"):
        run([BatchAugmentationCB(lambda x: None)])
    with pytest.raises(TypeError, match="of the batch returned None"):
        run([BatchTransformCB(lambda b: None)])


def test_too_many_transforms_and_unknown_names_are_errors():
    with pytest.raises(LookupError, match="item 2, but the batch has 2 items"):
        run([BatchAugmentationCB([None, None, halve])])
    batches = [CONTAINERS["dict"](*o) for o in make_batches()]
    with pytest.raises(LookupError, match=r"item 'images'.*\['image', 'label'\].*Did you mean `image`"):
        run([BatchAugmentationCB({"images": halve})], batches)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BatchAugmentationCB([3]),
        lambda: BatchAugmentationCB("flip"),
        lambda: BatchTransformCB([halve]),
    ],
)
def test_what_cannot_be_called_is_refused_where_it_was_typed(make):
    with pytest.raises(TypeError, match="cannot be called"):
        make()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RandErase(p=1.1), "no probability"),
        (lambda: RandErase(pct=0), "`pct` is 0"),
        (lambda: RandCopy(pct=2), "`pct` is 2"),
        (lambda: RandErase(max_n=0), "`max_n` is 0"),
        (lambda: RandErase(max_n=1.5), "`max_n` is 1.5"),
        (lambda: MixUpCB(alpha=0), "`alpha` is 0"),
        (lambda: CutMixCB(alpha=-1), "`alpha` is -1"),
        (lambda: MixUpCB(p=-0.1), "no probability"),
        (lambda: ProgressiveResizeCB(start=0), "`start` is 0"),
        (lambda: ProgressiveResizeCB(until=1.5), "`until` is 1.5"),
        (lambda: ProgressiveResizeCB(multiple=0), "`multiple` is 0"),
        (lambda: RandErase()(torch.zeros(4, 5)), r"The shape \(4, 5\) is no batch of images"),
    ],
)
def test_settings_out_of_range_are_refused_where_they_were_typed(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Random patches

PATCHES = [RandErase, RandCopy]


@pytest.mark.shows("MIN-13", "F062")
@pytest.mark.parametrize("kind", PATCHES)
@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    pct=st.floats(0.05, 1),
    max_n=st.integers(1, 5),
    per_image=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_pixel_comes_from_its_own_image_with_all_its_channels(kind, shape, pct, max_n, per_image, seed):
    set_seed(seed)
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    before = x.clone()
    new = kind(p=1, pct=pct, max_n=max_n, per_image=per_image)(x)
    assert torch.equal(x, before) and new.shape == x.shape and new.dtype == x.dtype
    for old, image in zip(x, new):
        pixels = {tuple(o.tolist()) for o in old.flatten(1).T}
        assert {tuple(o.tolist()) for o in image.flatten(1).T} <= pixels


@pytest.mark.shows("MIN-13")
@pytest.mark.parametrize("kind", PATCHES)
def test_probability_0_is_the_identity_and_1_changes_every_image(kind):
    x = torch.rand(64, 3, 16, 16)
    assert torch.equal(kind(p=0)(x), x)
    changed = (kind(p=1)(x) != x).flatten(1).any(1)
    assert changed.float().mean() > 0.9  # A copy may fall onto itself


@pytest.mark.parametrize("kind", PATCHES)
def test_the_chance_is_that_of_an_image(kind):
    x = torch.rand(2000, 1, 12, 12)
    changed = (kind(p=0.3)(x) != x).flatten(1).any(1).float().mean().item()
    assert changed == pytest.approx(0.3, abs=0.05)


@pytest.mark.shows("MIN-13")
def test_erasing_keeps_mean_and_deviation():
    "Normalised images, and dark ones with few bright spots, which noise cut at black would make brighter"
    set_seed(0)
    for x in (torch.randn(200, 3, 32, 32), (torch.rand(200, 3, 32, 32) ** 8)):
        new = RandErase(p=1, pct=0.4)(x)
        assert (new != x).float().mean() > 0.2
        assert new.mean() == pytest.approx(x.mean().item(), abs=0.005)
        assert new.std() == pytest.approx(x.std().item(), rel=0.01)


@pytest.mark.parametrize("kind", PATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
def test_dtype_device_and_shape_are_kept(kind, dtype):
    for shape in ((4, 3, 8, 8), (4, 8, 8), (4, 2, 3, 8, 8)):
        new = kind()(torch.zeros(shape, dtype=dtype))
        assert new.dtype == dtype and new.shape == shape
        assert kind()(torch.zeros(shape, dtype=dtype, device="meta")).is_meta


@pytest.mark.parametrize("kind", PATCHES)
def test_one_draw_per_batch_changes_all_images_alike(kind):
    x = torch.arange(100.0).view(1, 1, 10, 10).repeat(8, 1, 1, 1)
    alike, apart = kind(p=1, per_image=False)(x), kind(p=1)(x)
    assert (alike == alike[:1]).all() and not (apart == apart[:1]).all()


@pytest.mark.shows("MIN-13")
def test_a_copied_rectangle_is_one_that_stood_elsewhere():
    "With one rectangle, all changed pixels are shifted by the same way"
    x = torch.arange(400).view(1, 1, 20, 20)
    shifts = {(new - old).item() for new, old in zip(RandCopy(p=1, max_n=1)(x).flatten(), x.flatten())} - {0}
    assert len(shifts) <= 1


# Mixtures


def mixup_by_hand(alpha, n=8):
    def change(x):
        partner = torch.randperm(n)
        share = torch.distributions.Beta(float(alpha), float(alpha)).sample()
        return share * x + (1 - share) * x[partner], partner, share

    return change


def mixed_loss(preds, y, partner, share, loss=F.cross_entropy):
    return share * loss(preds, y) + (1 - share) * loss(preds, y[partner])


@pytest.mark.shows("F060")
@pytest.mark.parametrize("alpha", [0.1, 0.4, 1.0, 3.0, np.float32(0.5), np.int64(1), torch.tensor(0.5)])
def test_mixup_is_the_loop_written_by_hand(alpha):
    "Bit for bit, over two epochs"
    assert same(
        run([MixUpCB(alpha)], n_epochs=2).model, by_hand(mixup_by_hand(alpha), mixed_loss, n_epochs=2)
    )


@pytest.mark.shows("F060")
@pytest.mark.parametrize("callback", [MixUpCB, CutMixCB])
def test_the_mixed_loss_is_that_of_mixed_probabilities(callback):
    "So it does what mixing targets would do"

    class SoftCB:
        order, on_valid = Order.RECORD, False

        def after_get_loss(self, trainer):
            mixer = getattr(trainer, callback.__name__)
            y = F.one_hot(trainer.batch[1], N_CLASSES).float()
            soft = mixer._share * y + (1 - mixer._share) * y[mixer._partner]
            assert torch.allclose(F.cross_entropy(trainer.preds, soft), trainer.loss, atol=1e-6)
            self.done = True

    assert run([callback(), SoftCB()]).SoftCB.done


@pytest.mark.shows("F060", "F061")
def test_mixup_works_with_other_losses_and_smooth_labels():
    "The loss stays the user's own"
    smooth = partial(F.cross_entropy, label_smoothing=0.1)
    assert same(
        run([MixUpCB()], loss_func=smooth).model,
        by_hand(mixup_by_hand(0.4), partial(mixed_loss, loss=smooth)),
    )
    batches = [(x, x.flatten(1)[:, :3]) for x, _ in make_batches()]
    assert run([MixUpCB()], batches, F.mse_loss).n_updates == 3


@pytest.mark.shows("F060")
def test_cutmix_pastes_one_rectangle_and_weighs_it_by_its_area():
    "Over many batches, every pixel is its own or the partner's, and the share is the area that is left"

    class CheckCB:
        order = Order.RECORD

        def before_fit(self, trainer):
            self.shares = []

        def before_batch(self, trainer):
            if not trainer.training:
                return
            mixer, (old, _), new = trainer.CutMixCB, trainer.dls.train[trainer.batch_num], trainer.batch[0]
            inside = mixer._inside
            assert torch.equal(new, torch.where(inside, old[mixer._partner], old))
            rows, columns = inside.any(1), inside.any(0)
            assert torch.equal(inside, rows[:, None] & columns[None])
            assert mixer._share.item() == pytest.approx(1 - inside.float().mean().item(), abs=1e-6)
            self.shares.append(mixer._share.item())

    shares = run([CutMixCB(), CheckCB()], make_batches(60)).CheckCB.shares
    assert min(shares) < 0.3 and max(shares) > 0.9


class HeldCB:
    "Keeps what a training batch came to"

    order = Order.RECORD

    def before_batch(self, trainer):
        if trainer.training:
            mixer, self.batch = trainer.CutMixCB, trainer.batch
            self.share, self.partner = mixer._share, mixer._partner

    def before_backward(self, trainer):
        self.loss, self.preds = trainer.loss.detach(), trainer.preds.detach()


def masks_of(x, channels):
    mask = (x[:, 0] > 0).long()
    return mask[:, None].float() if channels else mask


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("form", [list, dict])
def test_cutmix_pastes_the_masks_with_the_images(channels, form):
    "The image had the rectangle and the mask did not, so most pixels in it had wrong targets"
    x = torch.randn(16, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    y = masks_of(x, channels)
    batch = (x, y) if form is list else dict(image=x, mask=y)
    dls = DataLoaders([batch], None)
    if form is dict:
        dls.split = lambda batch: ((batch["image"],), (batch["mask"],))
    loss_func = F.binary_cross_entropy_with_logits if channels else F.cross_entropy
    model = nn.Conv2d(1, 1 if channels else 2, 1)
    held = HeldCB()
    Trainer(dls, loss_func, optim.SGD, model, [BasicTrainCB(), CutMixCB(), held]).fit(1, valid=False)
    images, masks = held.batch.values() if form is dict else held.batch
    assert 0 < held.share < 1 and not torch.equal(images, x)
    assert torch.equal(masks, masks_of(images, channels)) and masks.dtype == y.dtype
    assert torch.equal(held.loss, loss_func(held.preds, masks)), "and the loss is mixed already"


def test_cutmix_mixes_the_loss_of_what_is_no_mask():
    "A batch may have both: each example has a class beside its mask"
    x = torch.randn(16, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    y, label = masks_of(x, False), torch.arange(16) % 2

    def loss_func(preds, mask, label):
        return F.cross_entropy(preds, mask) + F.cross_entropy(preds.mean((2, 3)), label)

    held = HeldCB()
    dls = DataLoaders([(x, y, label)], None, n_inp=1)
    Trainer(dls, loss_func, optim.SGD, nn.Conv2d(1, 2, 1), [BasicTrainCB(), CutMixCB(), held]).fit(
        1, valid=False
    )
    images, masks, labels = held.batch
    assert torch.equal(masks, masks_of(images, False)) and torch.equal(labels, label)
    pooled = held.preds.mean((2, 3))
    classes = [F.cross_entropy(pooled, o) for o in (label, label[held.partner])]
    expected = F.cross_entropy(held.preds, masks) + held.share * classes[0] + (1 - held.share) * classes[1]
    assert held.loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.shows("F060")
def test_cutmix_takes_bytes_and_mixup_says_why_it_cannot():
    batches = [((x * 50).byte(), y) for x, y in make_batches()]
    model = nn.Sequential(nn.Flatten(), ToFloat(), nn.Linear(36, N_CLASSES))
    assert run([CutMixCB()], batches, model=model).SeenCB.train[0][0].dtype == torch.uint8
    with pytest.raises(TypeError, match="torch.uint8.*`CutMixCB`"):
        run([MixUpCB()], batches, model=model)


class ToFloat(nn.Module):
    def forward(self, x):
        return x.float()


@pytest.mark.shows("F060")
@pytest.mark.parametrize("callback", [MixUpCB, CutMixCB])
def test_probability_0_mixes_nothing_and_a_half_mixes_half(callback):
    assert same(run([callback(p=0)]).model, run([]).model)
    batches = make_batches(200)
    trainer = run([callback(p=0.5)], batches)
    untouched = sum(torch.equal(seen[0], x) for seen, (x, _) in zip(trainer.SeenCB.train, batches))
    assert 70 < untouched < 150


@pytest.mark.parametrize("callback", [MixUpCB, CutMixCB])
def test_dtype_and_device_are_kept_when_mixing(callback):
    for dtype in (torch.bfloat16, torch.float64):
        batches = [(x.to(dtype), y) for x, y in make_batches()]
        assert run([callback()], batches, model=make_model().to(dtype)).SeenCB.train[0][0].dtype == dtype
    trainer = run([DeviceCB("meta"), callback()])
    assert trainer.SeenCB.train[0][0].is_meta and trainer.loss.is_meta


@pytest.mark.shows("F060")
def test_metrics_see_the_targets_as_they_are():
    "Class numbers, although the loss is mixed"

    class TargetsMetric:
        def reset(self):
            self.seen = []

        def update(self, preds, targets):
            self.seen.append(targets)

        def compute(self):
            return all(torch.equal(a, y) for a, (_, y) in zip(self.seen, make_batches()))

    trainer = run([MixUpCB(), MetricsCB(same=TargetsMetric(), train_metrics=True, show=False)])
    assert trainer.history.latest("train_same") is True


def test_two_mixers_or_no_targets_are_errors():
    with pytest.raises(ValueError, match="`MixUpCB` and `CutMixCB` would both mix"):
        run([MixUpCB(), CutMixCB()])
    with pytest.raises(ValueError, match="the batch has no targets"):
        run([MixUpCB()], n_inp=2, model=TwoInputs(), loss_func=lambda p: p.sum())
    with pytest.raises(ValueError, match="is no batch of images"):
        run([CutMixCB()], [(x.flatten(1), y) for x, y in make_batches()])


@pytest.mark.parametrize("mixer", [MixUpCB, CutMixCB])
def test_a_mixer_beside_a_get_loss_of_ones_own_says_in_the_first_batch_that_it_needs_a_loss(mixer):
    "It was a TypeError about None; one that mixes nothing needs none"

    class OwnCB(BasicTrainCB):
        def get_loss(self, trainer):
            trainer.loss = F.cross_entropy(trainer.preds, trainer.batch[1])

    def fit(loss_func, p=1.0):
        batches = make_batches()
        trainer = Trainer(DataLoaders(batches), loss_func, optim.SGD, make_model(), [OwnCB(), mixer(p=p)])
        seen.append(trainer)
        trainer.fit(1, valid=False)
        return trainer.n_updates

    seen = []
    with pytest.raises(ValueError, match=f"`{mixer.__name__}` computes a second loss.*Give the trainer"):
        fit(None)
    assert seen[0].n_updates == 0 == seen[0].batch_num
    assert fit(F.cross_entropy) == 3 == fit(None, p=0)


@pytest.mark.parametrize("mixer", [MixUpCB, CutMixCB])
def test_a_mixer_asks_for_a_loss_only_where_it_mixes(mixer):
    "Predictions need none, and another callback may set one after the mixer's `before_fit`"

    class PredictCB:
        def predict(self, trainer):
            trainer.preds = trainer.model(trainer.batch[0])

    class LossCB:
        order = Order.DATA + 1

        def before_fit(self, trainer):
            trainer.loss_func = F.cross_entropy

    def make_trainer(*cbs):
        batches = make_batches()
        return Trainer(DataLoaders(batches, batches), None, optim.SGD, make_model(), [mixer(), *cbs])

    assert len(make_trainer(BasicTrainCB()).get_preds().preds) == 24
    trainer = make_trainer(PredictCB())
    trainer.fit(1, train=False)
    assert len(trainer.preds) == 8
    trainer = make_trainer(BasicTrainCB(), LossCB())
    trainer.fit(1)
    assert trainer.n_updates == 3


def test_a_mixer_serves_again_after_an_error_and_in_another_trainer():
    mixer = MixUpCB()
    with pytest.raises(ZeroDivisionError):
        run([mixer], loss_func=lambda p, y: 1 / 0)
    assert mixer._partner is None
    assert same(run([mixer]).model, run([MixUpCB()]).model)


# Growing images


@pytest.mark.shows("F063")
@pytest.mark.parametrize(
    "start, until, multiple, sizes",
    [
        (0.5, 0.75, 1, [3, 4, 5, 6]),
        (0.5, 1.0, 1, [3, 4, 4, 5]),
        (1.0, 1.0, 1, [6] * 4),
        (0.1, 0.5, 2, [2, 4, 6, 6]),
    ],
)
def test_images_grow_and_reach_their_full_size(start, until, multiple, sizes):
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, N_CLASSES))
    trainer = run([ProgressiveResizeCB(start, until, multiple)], n_epochs=4, model=model)
    assert [tuple(o[0].shape[-2:]) for o in trainer.SeenCB.train[::3]] == [(o, o) for o in sizes]
    assert {o[0].shape[-1] for o in trainer.SeenCB.valid} == {6}


@pytest.mark.parametrize("n_epochs, sizes", [(2, [3, 6]), (3, [3, 4, 6]), (5, [3, 4, 5, 5, 6])])
def test_images_have_their_full_size_in_the_last_epoch_however_few_there_are(n_epochs, sizes):
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, N_CLASSES))
    trainer = run([ProgressiveResizeCB()], n_epochs=n_epochs, model=model)
    assert [o[0].shape[-1] for o in trainer.SeenCB.train[::3]] == sizes


@pytest.mark.parametrize(
    "until, n_epochs, told", [(0.75, 1, "two epochs or more"), (1.0, 4, "`until` below 1")]
)
def test_images_that_never_have_their_full_size_are_told_of(until, n_epochs, told):
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, N_CLASSES))
    with pytest.warns(UserWarning, match=f"`ProgressiveResizeCB` gives this fit no images of full.*{told}"):
        run([ProgressiveResizeCB(until=until)], n_epochs=n_epochs, model=model)


@pytest.mark.parametrize(
    "until, n_epochs, multiple, side, told",
    [
        (1.0, 8, 1, 32, "30×30 pixels instead of the 32×32"),
        (1.0, 8, 16, 32, None),
        (0.75, 1, 16, 32, "16×16 pixels instead of the 32×32"),
        (0.75, 1, 8, 8, None),
    ],
)
def test_images_that_multiples_make_full_are_not_told_of(until, n_epochs, multiple, side, told):
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, N_CLASSES))
    batches = [(torch.zeros(2, 1, side, side), torch.zeros(2, dtype=torch.long))] * 2
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        resize = ProgressiveResizeCB(until=until, multiple=multiple)
        trainer = run([resize], batches, n_epochs=n_epochs, model=model)
    assert (trainer.SeenCB.train[-1][0].shape[-1] == side) == (not told)
    assert [told in str(o.message) for o in found] == [True] * bool(told)


def test_a_run_on_the_side_before_a_fit_has_the_smallest_images():
    trainer = Trainer(
        digit_loaders(seed=1),
        F.cross_entropy,
        optim.Adam,
        SimpleNet(64, 16, 10),
        [BasicTrainCB(), ProgressiveResizeCB(0.5)],
    )
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.check(batches=3)


def test_a_run_on_the_side_after_a_fit_has_images_of_the_size_that_the_fit_has_come_to():
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, N_CLASSES))
    with pytest.warns(UserWarning, match="`until` below 1"):
        trainer = run([ProgressiveResizeCB(until=1.0)], n_epochs=4, model=model)
    seen = SeenCB()
    with trainer.side_run(callbacks=[seen]):
        trainer.fit(1, valid=False)
    assert {o[0].shape[-1] for o in seen.train} == {5}


def test_an_average_is_measured_on_images_of_the_size_that_the_last_epoch_had():
    "Measuring is a run on the side, of one epoch, which is no first one"
    sides = []
    seen = SimpleNamespace(
        order=Order.DATA + 1, on_valid=False, before_batch=lambda t: sides.append(t.batch[0].shape[-1])
    )
    layers = [nn.BatchNorm2d(1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, N_CLASSES)]
    run([ProgressiveResizeCB(), SWACB(0.5), seen], n_epochs=2, model=nn.Sequential(*layers))
    assert sides == [3] * 3 + [6] * 6


@pytest.mark.shows("F063")
def test_full_size_is_the_identity():
    assert same(run([ProgressiveResizeCB(start=1)]).model, run([]).model)


# Other libraries


class Albumentations:
    "The calling convention of albumentations: by name, channels last, on arrays, a dict back"

    def __init__(self, f):
        self.f = f

    def __call__(self, *args, image):
        assert not args and type(image).__module__ == "numpy" and image.shape[-1] == 3
        return {"image": self.f(image), "more": None}


@pytest.mark.shows("ISA-118")
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_transforms_of_albumentations_take_and_return_tensors(dtype):
    "On single images, and with `each_image` on a batch"
    x = (torch.rand(4, 3, 5, 7) * 255).to(dtype)
    tfm = albumentations_transform(Albumentations(lambda image: image[:, ::-1]))
    assert torch.equal(tfm(x[0]), x[0].flip(-1)) and tfm(x[0]).dtype == dtype
    assert torch.equal(each_image(tfm)(x), x.flip(-1))
    to_tensor = albumentations_transform(
        Albumentations(lambda image: torch.from_numpy(image).permute(2, 0, 1))
    )
    assert torch.equal(to_tensor(x[0]), x[0])


@pytest.mark.shows("ISA-118", "F062")
def test_modules_called_with_a_tensor_need_nothing():
    "As torchvision's are"

    class Flip(nn.Module):
        def forward(self, *inputs):
            return inputs[0].flip(-1)

    seen = run([BatchAugmentationCB([Flip()])]).SeenCB.train
    assert torch.equal(seen[0][0], make_batches()[0][0].flip(-1))


# Nobody waits


@pytest.mark.parametrize(
    "callback",
    [
        BatchAugmentationCB(RandErase()),
        BatchAugmentationCB([RandCopy()], on_valid=True),
        BatchTransformCB(lambda b: (b[0] / 2, b[1])),
        MixUpCB(),
        MixUpCB(p=0.5),
        CutMixCB(),
        CutMixCB(p=0.5),
        BatchAugmentationCB(each_image(torch.sin)),
    ],
    ids=["erase", "copy", "whole", "mixup", "mixup half", "cutmix", "cutmix half", "each"],
)
def test_nobody_waits_for_the_device(callback):
    mode = RefuseToWait()
    batches = make_batches()
    trainer = Trainer(
        DataLoaders(batches, batches),
        F.cross_entropy,
        optim.SGD,
        make_model(),
        [BasicTrainCB(), callback, InsideCB(mode)],
    )
    with mode:
        trainer.fit(1)
    assert trainer.n_updates == 3


def test_the_guard_notices_who_waits():
    mode = RefuseToWait()
    trainer = Trainer(
        DataLoaders(make_batches(), make_batches()),
        F.cross_entropy,
        optim.SGD,
        make_model(),
        [BasicTrainCB(), BatchAugmentationCB(lambda x: x * x.max().item()), InsideCB(mode)],
    )
    with pytest.raises(Waited), mode:
        trainer.fit(1)


def test_callbacks_run_after_the_device_whatever_the_order_of_adding():
    class DeviceOfCB:
        order = Order.DATA

        def before_batch(self, trainer):
            self.seen = trainer.batch[0].device.type

    for callbacks in (
        [BatchAugmentationCB(lambda x: x if x.is_meta else 1 / 0), DeviceCB("meta")],
        [DeviceCB("meta"), BatchAugmentationCB(lambda x: x if x.is_meta else 1 / 0)],
    ):
        assert run([*callbacks, DeviceOfCB()]).DeviceOfCB.seen == "meta"


# A transform that writes to what it is given


def in_place(batch):
    if isinstance(batch, torch.Tensor):
        return batch.mul_(1.1)
    batch["x"] = batch["x"].mul_(1.1)
    return batch


@pytest.mark.parametrize("kind", ["item", "tuple", "dict"])
def test_the_loaders_own_batches_stay_as_they_are_whatever_a_transform_writes_to(kind):
    batches = make_batches()
    if kind == "dict":
        batches = [dict(x=x, y=y) for x, y in batches]
    values = lambda: [x for b in batches for x in (b.values() if kind == "dict" else b)]
    before = [x.clone() for x in values()]
    dls = DataLoaders(batches, batches[:1], split=lambda b: (b["x"], b["y"]) if kind == "dict" else b)
    written = {
        "item": lambda: BatchAugmentationCB(in_place, on_valid=True),
        "tuple": lambda: BatchTransformCB(lambda b: (b[0].mul_(1.1), b[1])),
        "dict": lambda: BatchTransformCB(in_place),
    }[kind]()
    by_hand = {
        "item": lambda: BatchAugmentationCB(lambda x: x * 1.1, on_valid=True),
        "tuple": lambda: BatchTransformCB(lambda b: (b[0] * 1.1, b[1])),
        "dict": lambda: BatchTransformCB(lambda b: {**b, "x": b["x"] * 1.1}),
    }[kind]()
    losses = []
    for cb in (written, by_hand):
        set_seed(1)
        callbacks = [BasicTrainCB(), MetricsCB(show=False), cb]
        trainer = Trainer(dls, F.cross_entropy, optim.SGD, make_model(), callbacks)
        trainer.fit(3, lr=0.1)
        losses.append(trainer.history["valid_loss"])
    assert losses[0] == losses[1]
    assert all(map(torch.equal, values(), before))


Named = namedtuple("Named", "x y")
DEEP = {
    "a dict in a tuple": lambda x, y: (dict(x=x), y),
    "a tuple in a list": lambda x, y: [(x,), y],
    "a named tuple": Named,
    "an ordered dict": lambda x, y: OrderedDict(x=[[x]], y=y),
}


def tensors_of(batch):
    if torch.is_tensor(batch):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch
    return [x for part in parts for x in tensors_of(part)]


def doubled_in_place(batch):
    tensors_of(batch)[0].mul_(2)
    return batch


@pytest.mark.parametrize("loader", [list, ReplayLoader, lambda batches: ReplayLoader(ReplayLoader(batches))])
@pytest.mark.parametrize("kind", DEEP.values(), ids=DEEP)
def test_the_loaders_own_batches_stay_as_they_are_however_deep_their_tensors_lie(kind, loader):
    batches, seen = [kind(*o) for o in make_batches()], []
    before = [x.clone() for x in tensors_of(batches)]
    split = lambda batch: (tensors_of(batch)[0], tensors_of(batch)[1])
    dls = DataLoaders(loader(batches), split=split)

    class Kinds:
        order = Order.RECORD

        def before_batch(self, trainer):
            seen.append((type(trainer.batch), tensors_of(trainer.batch)[0]))

    callbacks = [BasicTrainCB(), BatchTransformCB(doubled_in_place), Kinds()]
    Trainer(dls, F.cross_entropy, optim.SGD, make_model(), callbacks).fit(2, lr=0.1, valid=False)
    assert all(map(torch.equal, tensors_of(batches), before))
    assert [kind for kind, _ in seen] == [type(batches[0])] * 6
    assert all(torch.equal(x, 2 * was) for (_, x), was in zip(seen, 2 * before[::2], strict=True))


@pytest.mark.parametrize("loader", [list, ReplayLoader])
def test_an_item_that_is_a_dict_is_copied_too(loader):
    batches = [(dict(x=x), y) for x, y in make_batches()]
    before = [x.clone() for x in tensors_of(batches)]
    dls = DataLoaders(loader(batches), split=lambda batch: (batch[0]["x"], batch[1]))
    callbacks = [BasicTrainCB(), BatchAugmentationCB(doubled_in_place)]
    Trainer(dls, F.cross_entropy, optim.SGD, make_model(), callbacks).fit(2, lr=0.1, valid=False)
    assert all(map(torch.equal, tensors_of(batches), before))


def fitted(callback, batches, cls=Trainer, model=None):
    set_seed(1)
    dls = SimpleNamespace(train=batches, valid=batches)
    return cls(dls, F.cross_entropy, optim.SGD, model or make_model(), [BasicTrainCB(), SeenCB(), callback])


def test_a_transform_that_writes_only_now_and_then_gets_copies_as_well(recwarn):
    batches, n = make_batches(4), []
    before = [x.clone() for x, _ in batches]

    def later(x):
        n.append(1)
        return x.add_(1) if len(n) > 2 else x + 1

    fitted(BatchAugmentationCB(later, on_valid=True), batches).fit(2, lr=0.1)
    with torch.inference_mode():
        fitted(BatchAugmentationCB(later, on_valid=True), batches).fit(1, train=False)
    assert all(torch.equal(x, o) for (x, _), o in zip(batches, before)) and not recwarn.list


@dataclasses.dataclass
class Kept:
    x: torch.Tensor
    y: torch.Tensor

    def __post_init__(self):
        self.x = self.x / 255


class SplitsKept(Trainer):
    def split(self, batch):
        return (batch.x,), (batch.y,)


class Noise(BatchTransformCB):
    "With a set-up of its own"

    def __init__(self):
        self.on_train, self.on_valid = True, False

    def tfm(self, batch):
        return [batch[0] + 1, batch[1]]


def test_batches_of_other_kinds_are_handed_over_as_they_are(recwarn):
    kept = [Kept(x * 255, y) for x, y in make_batches()]
    seen = []

    def look(batch):
        seen.append(batch)
        return batch

    fitted(BatchTransformCB(look), kept, SplitsKept).fit(1, valid=False)
    assert all(a is b for a, b in zip(seen, kept))
    named = [(x, y, "a path ") for x, y in make_batches()]
    trainer = fitted(BatchAugmentationCB({2: str.strip}, on_valid=False), named)
    trainer.dls.split = lambda batch: (batch[:1], batch[1:2])
    trainer.fit(1, lr=0.1, valid=False)
    assert trainer.SeenCB.train[0][2] == "a path"
    fitted(Noise(), make_batches()).fit(1, lr=0.1)
    assert not recwarn.list


def test_a_tensor_that_is_there_twice_stays_one_and_leaves_keep_their_gradients():
    def scaled(batch):
        batch[0].mul_(2)
        return batch

    class Same:
        order = Order.RECORD

        def before_batch(self, trainer):
            assert trainer.batch[0] is trainer.batch[1]

    twice = [[x, x] for x, _ in make_batches()]
    callbacks = [BasicTrainCB(), BatchTransformCB(scaled), Same()]
    dls = SimpleNamespace(train=twice, valid=None)
    trainer = Trainer(dls, F.mse_loss, optim.SGD, nn.Conv2d(1, 1, 1), callbacks)
    trainer.fit(1, lr=0.01, valid=False)
    leaves, found = [(x.requires_grad_(), y) for x, y in make_batches()], []

    class Saliency:
        def after_backward(self, trainer):
            found.append(trainer.batch[0].grad is not None)

    trainer = fitted(BatchAugmentationCB(lambda x: x), leaves)
    trainer.fit(1, lr=0.1, valid=False, callbacks=Saliency())
    assert found == [True] * 3
