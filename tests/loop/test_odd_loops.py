"""The loops and callbacks of three tutorials, held against loops written by hand, bit for bit.

Classes and functions are taken from the pages themselves (`tutorials/own_callbacks`, `odd_loops`,
`diffusion`), so what is tested is what a reader sees; the data and the loops by hand are those of this
file.
"""

import copy
import math
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import isaac_loop.evaluate.evaluation  # noqa: F401  (brings `get_preds` and `validate`)
from isaac_loop.device.accelerated import AccelerateCB
from isaac_loop.data.augmentation import BatchAugmentationCB
from isaac_loop.device.device import DeviceCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.show.progress import ProgressCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.schedule.schedules import OneCycleSchedulerCB
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.train.training import BasicTrainCB, NBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import EVENTS, CancelBatchException, Order
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer

from pages import page

own, odd, diffusion = (
    partial(lambda name, thing: page(name)[thing], o) for o in ("own_callbacks", "odd_loops", "diffusion")
)


def make_rows(seed, sizes=(8, 8, 6), shape=(1, 4, 4)):
    "Batches of images and class numbers"
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, *shape, generator=g), torch.randint(0, 3, (n,), generator=g)) for n in sizes]


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def conv():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


OPTIMIZERS = {
    "sgd": optim.SGD,
    "momentum": partial(optim.SGD, momentum=0.9, nesterov=True),
    "adamw": optim.AdamW,
}
over_seeds = pytest.mark.parametrize("seed", [0, 1, 2])


def twins(make, seed):
    set_seed(seed)
    model = make()
    return model, copy.deepcopy(model)


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def watchers():
    return [MetricsCB(), ProgressCB("plain"), TrackingCB(), RecorderCB(loss=lambda trainer: trainer.loss)]


def both(seed, ours, theirs):
    "Run two loops from the same random state; both must leave the same one"
    ends = []
    for run in (ours, theirs):
        set_seed(seed)
        run()
        ends.append(torch.get_rng_state())
    assert torch.equal(*ends), "one of the loops used more random numbers"


# Several inputs, dicts, models with a loss of their own


class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, scale):
        return self.net(x * scale[:, None, None, None])


@pytest.mark.shows("MIN-03")
@over_seeds
@pytest.mark.parametrize("opt_func", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_several_inputs_and_targets_train_as_by_hand(seed, opt_func):
    rows = [(x, torch.rand(len(x)), y, torch.rand(len(x))) for x, y in make_rows(seed)]
    ours, theirs = twins(Weighed, seed)

    def loss_func(preds, y, weight):
        return (F.cross_entropy(preds, y, reduction="none") * weight).mean()

    def by_hand():
        opt = opt_func(theirs.parameters(), 0.05)
        for _ in range(3):
            for x, scale, y, weight in rows:
                loss_func(theirs(x, scale), y, weight).backward()
                opt.step()
                opt.zero_grad()

    trainer = Trainer(DataLoaders(rows, n_inp=2), loss_func, opt_func, ours, [BasicTrainCB(), *watchers()])
    both(seed, lambda: trainer.fit(3, lr=0.05, valid=False), by_hand)
    assert same(ours, theirs)


class ByName(Trainer):
    def split(self, batch):
        return (batch["image"],), (batch["label"],)


@pytest.mark.shows("ISA-17")
@over_seeds
@pytest.mark.parametrize("style", ["mapping", "split", "subclass"])
def test_batches_of_dicts_train_as_by_hand(seed, style):
    "The order of a mapping, names in the loaders' `split`, or in that of a trainer"
    rows = make_rows(seed)
    dicts = [
        dict(image=x, label=y) if style == "mapping" else dict(label=y, other="text", image=x)
        for x, y in rows
    ]
    ours, theirs = twins(mlp, seed)

    def by_hand():
        opt = optim.AdamW(theirs.parameters(), 0.05)
        for _ in range(2):
            for x, y in rows:
                F.cross_entropy(theirs(x), y).backward()
                opt.step()
                opt.zero_grad()

    cls = ByName if style == "subclass" else Trainer
    trainer = cls(
        DataLoaders(dicts, dicts, split=odd("by_name") if style == "split" else None),
        F.cross_entropy,
        optim.AdamW,
        ours,
        [BasicTrainCB(), DeviceCB("cpu"), *watchers()],
    )
    both(seed, lambda: trainer.fit(2, lr=0.05, valid=False), by_hand)
    assert same(ours, theirs)
    trainer.fit(1, train=False)
    theirs.eval()
    with torch.no_grad():
        losses = [F.cross_entropy(theirs(x), y).item() for x, y in rows]
    sizes = [len(y) for _, y in rows]
    assert trainer.history.latest("valid_loss") == pytest.approx(
        sum(a * b for a, b in zip(losses, sizes)) / sum(sizes)
    )


class Output(dict):
    "Attributes and keys alike, as outputs of Hugging Face models have them"

    __getattr__ = dict.__getitem__


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, pixel_values, labels=None):
        logits = self.net(pixel_values)
        return Output(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


class Hits:
    def reset(self):
        self.hits, self.n = 0, 0

    def update(self, preds, *targets):
        self.hits, self.n = self.hits + (preds.argmax(1) == targets[-1]).sum(), self.n + len(preds)

    def compute(self):
        return self.hits / self.n


@pytest.mark.shows("ISA-118", "AIT-68", "SON-30")
@over_seeds
@pytest.mark.parametrize("opt_func", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_model_that_returns_its_loss_trains_as_by_hand_and_can_be_measured_and_asked(seed, opt_func):
    "As models of Hugging Face do"
    rows = [dict(pixel_values=x, labels=y) for x, y in make_rows(seed)]
    ours, theirs = twins(OwnLoss, seed)

    def by_hand():
        opt = opt_func(theirs.parameters(), 0.05)
        for _ in range(3):
            for batch in rows:
                theirs(**batch).loss.backward()
                opt.step()
                opt.zero_grad()

    trainer = Trainer(
        DataLoaders(rows, rows), None, opt_func, ours, [odd("OwnLossCB")(), MetricsCB(hits=Hits())]
    )
    both(seed, lambda: trainer.fit(3, lr=0.05, valid=False), by_hand)
    assert same(ours, theirs)
    trainer.fit(1, train=False)
    theirs.eval()
    with torch.no_grad():
        logits = torch.cat([theirs(**o).logits for o in rows])
    assert trainer.history.latest("hits") == pytest.approx(
        (logits.argmax(1) == torch.cat([o["labels"] for o in rows])).float().mean().item()
    )
    assert torch.equal(trainer.get_preds(rows).preds, logits)


def test_a_model_that_got_no_labels_says_why_there_is_no_gradient():
    rows = [dict(pixel_values=x) for x, _ in make_rows(0)]
    trainer = Trainer(DataLoaders(rows), None, optim.SGD, OwnLoss(), odd("OwnLossCB")())
    with pytest.raises(AttributeError) as e:
        trainer.fit(1, valid=False)
    assert any("The loss is a NoneType" in o for o in e.value.__notes__)


# SAM


def sam_by_hand(model, rows, opt_func, n_epochs, lr, rho, weight=0.0):
    opt = opt_func(model.parameters(), lr)
    first = []

    def loss_of(x, y):
        x = x.clone().requires_grad_(bool(weight))
        loss = F.cross_entropy(model(x), y)
        if weight:
            loss = loss + weight * torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        return loss

    for _ in range(n_epochs):
        for x, y in rows:
            loss = loss_of(x, y)
            loss.backward()
            first.append(loss.item())
            params = list(model.parameters())
            old = [p.detach().clone() for p in params]
            norm = torch.stack([p.grad.norm() for p in params]).norm()
            with torch.no_grad():
                for p in params:
                    p.add_(p.grad * (rho / (norm + 1e-12)))
            opt.zero_grad()
            loss_of(x, y).backward()
            with torch.no_grad():
                for p, o in zip(params, old):
                    p.copy_(o)
            opt.step()
            opt.zero_grad()
    return first


@pytest.mark.shows("F052")
@over_seeds
@pytest.mark.parametrize("make", [mlp, conv])
@pytest.mark.parametrize("opt_func", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("weight", [0.0, 0.1], ids=["alone", "with a gradient penalty"])
def test_sam_is_the_loop_by_hand_also_with_dropout_batch_norm_and_a_penalty(seed, make, opt_func, weight):
    "And what is recorded is the loss of the first round"
    rows = make_rows(seed)
    ours, theirs = twins(make, seed)
    extra, first = [odd("GradientPenaltyCB")(weight)] if weight else [], []
    trainer = Trainer(
        DataLoaders(rows),
        F.cross_entropy,
        opt_func,
        ours,
        [BasicTrainCB(), odd("SAMCB")(0.1), *extra, MetricsCB()],
    )
    both(
        seed,
        lambda: trainer.fit(2, lr=0.05, valid=False),
        lambda: first.extend(sam_by_hand(theirs, rows, opt_func, 2, 0.05, 0.1, weight)),
    )
    assert same(ours, theirs)
    assert trainer.history.batches["loss"] == first
    assert trainer.n_updates == 6


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_in_the_second_round_leaves_the_weights_where_they_were(error):
    ours, before = twins(mlp, 0)
    n = 0

    def after_predict(trainer):
        nonlocal n
        n += 1
        if n == 2:
            raise error

    with pytest.raises(error):
        Trainer(
            DataLoaders(make_rows(0)),
            F.cross_entropy,
            optim.SGD,
            ours,
            [BasicTrainCB(), odd("SAMCB")(), after_predict],
        ).fit(1, valid=False)
    assert n == 2 and same(ours, before)


# GAN


class Players(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Unflatten(1, (1, 4, 4)))
        self.d = nn.Sequential(
            nn.Flatten(), nn.Linear(16, 8), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(8, 1)
        )


def gan_by_hand(model, rows, n_epochs, lr, n_batches=None):
    d, g = model.d, model.g
    opt_d, opt_g = (optim.Adam(o.parameters(), lr, betas=(0.5, 0.99)) for o in (d, g))
    bce, done = F.binary_cross_entropy_with_logits, 0
    for _ in range(n_epochs):
        for real, _ in rows:
            if done == n_batches:
                return
            one, zero = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = g(torch.randn(len(real), 8))
            opt_d.zero_grad()
            (bce(d(real), one) + bce(d(fake.detach()), zero)).backward()
            opt_d.step()
            opt_g.zero_grad()
            bce(d(fake), one).backward()
            opt_g.step()
            done += 1


@pytest.mark.shows("MIN-02", "MIN-04", "F053")
@over_seeds
@pytest.mark.parametrize("watched", [False, True])
def test_a_gan_with_two_named_optimizers_is_the_loop_by_hand(seed, watched):
    rows = make_rows(seed)
    ours, theirs = twins(Players, seed)
    trainer = odd("GANTrainer")(DataLoaders(rows), None, None, ours, watchers() if watched else None)
    both(seed, lambda: trainer.fit(4, lr=0.01, valid=False), lambda: gan_by_hand(theirs, rows, 4, 0.01))
    assert same(ours, theirs)
    assert trainer.n_updates == trainer.total_updates == 24
    assert {id(p) for o in trainer.opt_d.param_groups for p in o["params"]} == {
        id(p) for p in ours.d.parameters()
    }
    assert "opt" not in vars(trainer)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_gan_that_is_stopped_has_finished_both_turns(n):
    rows = make_rows(0)
    ours, theirs = twins(Players, 0)

    def after_batch(trainer):
        if trainer.n_updates == 2 * n:
            trainer.request_stop()

    trainer = odd("GANTrainer")(DataLoaders(rows), None, None, ours, after_batch)
    both(
        0,
        lambda: trainer.fit(4, lr=0.01, valid=False),
        lambda: gan_by_hand(theirs, rows, 4, 0.01, n_batches=n),
    )
    assert same(ours, theirs)


@pytest.mark.parametrize("turn", ["d", "g"])
def test_after_an_interrupt_in_either_turn_a_gan_begins_anew(turn):
    rows = make_rows(0)
    ours, theirs = twins(Players, 0)

    def before_step(trainer):
        if trainer.turn == turn:
            raise KeyboardInterrupt

    trainer = odd("GANTrainer")(DataLoaders(rows), None, None, ours, None)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(1, lr=0.01, valid=False, callbacks=before_step)
    theirs.load_state_dict(ours.state_dict())
    both(0, lambda: trainer.fit(2, lr=0.01, valid=False), lambda: gan_by_hand(theirs, rows, 2, 0.01))
    assert same(ours, theirs)


def test_a_gan_can_be_validated_which_changes_nothing():
    rows = make_rows(0)
    ours, before = twins(Players, 0)
    trainer = odd("GANTrainer")(DataLoaders(rows, rows), None, None, ours, MetricsCB())
    trainer.fit(1, train=False)
    assert same(ours, before) and math.isfinite(trainer.history.latest("valid_loss"))


# Accumulation


def accumulated_by_hand(model, rows, n, n_epochs, lr):
    opt = optim.SGD(model.parameters(), lr, momentum=0.9)
    for _ in range(n_epochs):
        for start in range(0, len(rows), n):
            window = rows[start : start + n]
            for x, y in window:
                (F.cross_entropy(model(x), y) * len(x)).backward()
            for p in model.parameters():
                p.grad /= sum(len(x) for x, _ in window)
            opt.step()
            opt.zero_grad()


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def accumulating(model, rows, n, *callbacks, **kwargs):
    opt_func = partial(optim.SGD, momentum=0.9)
    return Trainer(
        DataLoaders(rows),
        F.cross_entropy,
        opt_func,
        model,
        [*callbacks, BasicTrainCB(), own("AccumulateCB")(n)],
        **kwargs,
    )


@pytest.mark.shows("F023", "F024")
@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=7), n=st.integers(1, 5), seed=st.integers(0, 50)
)
def test_accumulation_is_the_loop_by_hand_and_the_big_batch(sizes, n, seed):
    "Whatever the sizes of batches and of the last window"
    rows = [(x.double(), y) for x, y in make_rows(seed, sizes)]
    ours, theirs = twins(lambda: linear().double(), seed)
    big = copy.deepcopy(ours)
    trainer = accumulating(ours, rows, n, RecorderCB(loss=lambda trainer: trainer.loss))
    trainer.fit(2, lr=0.1, valid=False)
    accumulated_by_hand(theirs, rows, n, 2, 0.1)
    assert same(ours, theirs)
    assert trainer.n_updates == trainer.total_updates == 2 * math.ceil(len(rows) / n)

    windows = [rows[i : i + n] for i in range(0, len(rows), n)]
    whole = [(torch.cat([x for x, _ in o]), torch.cat([y for _, y in o])) for o in windows]
    accumulated_by_hand(big, whole, 1, 2, 0.1)
    for a, b in zip(ours.parameters(), big.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@over_seeds
def test_watchers_see_the_true_loss_and_change_nothing_while_gradients_are_accumulated(seed):
    rows = make_rows(seed)
    ours, theirs = twins(linear, seed)
    trainer = accumulating(ours, rows, 2, *watchers())
    trainer.fit(2, lr=0.0, valid=False)
    losses = [F.cross_entropy(theirs(x), y).item() for x, y in rows]
    assert trainer.history.batches["loss"] == losses * 2
    watched, plain = accumulating(ours, rows, 2, *watchers()), accumulating(theirs, rows, 2)
    for o in (watched, plain):
        o.fit(2, lr=0.1, valid=False)
    assert same(ours, theirs)


@pytest.mark.parametrize("first", [True, False], ids=["limit added first", "limit added last"])
def test_a_limit_counts_batches_and_accumulation_divides_them(first):
    rows = make_rows(0, [4] * 8)
    ours, theirs = twins(linear, 0)
    trainer = accumulating(ours, rows, 2, *[NBatchCB(5)] * first)
    if not first:
        trainer.add_callback(NBatchCB(5))
    trainer.fit(2, lr=0.1, valid=False)
    accumulated_by_hand(theirs, rows[:5], 2, 2, 0.1)
    assert same(ours, theirs) and trainer.n_updates == trainer.total_updates == 6


def test_a_skipped_batch_is_missing_from_its_window_and_nothing_else():
    rows = make_rows(0, [4] * 6)

    def before_batch(trainer):
        if trainer.batch_num == 1:
            raise CancelBatchException("skip")

    ours, theirs = twins(linear, 0)
    accumulating(ours, rows, 2, before_batch).fit(1, lr=0.1, valid=False)
    accumulated_by_hand(theirs, [rows[0], *rows[2:]], 2, 1, 0.1)
    assert same(ours, theirs)


def test_a_stream_carries_its_open_window_into_the_next_epoch():
    rows = make_rows(0, [4] * 3)

    class Stream:
        def __iter__(self):
            return iter(rows)

    ours, theirs = twins(linear, 0)
    trainer = accumulating(ours, rows, 2)
    trainer.dls = DataLoaders(Stream())
    trainer.fit(2, lr=0.1, valid=False)
    accumulated_by_hand(theirs, rows * 2, 2, 1, 0.1)
    assert same(ours, theirs) and trainer.n_updates == 3


# The other callbacks of the first page


@pytest.mark.shows("ISA-39")
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100), opt=st.sampled_from(sorted(OPTIMIZERS)))
def test_the_watcher_changes_nothing(seed, opt):
    "A callback without any base class"
    rows = make_rows(seed)
    plain, watched = twins(mlp, seed)
    watcher = own("GainCB")()
    assert type(watcher).__bases__ == (object,)

    def run(model, *callbacks):
        Trainer(
            DataLoaders(rows, rows), F.cross_entropy, OPTIMIZERS[opt], model, [BasicTrainCB(), *callbacks]
        ).fit(2, lr=0.05)

    both(seed, lambda: run(plain), lambda: run(watched, watcher))
    assert same(plain, watched)
    assert [len(o) for o in watcher.record.values()] == [6, 6]
    assert not any(o._forward_hooks for o in watched.modules())


@pytest.mark.parametrize("rise", [0.1, 0.25, 0.7])
def test_the_triangle_is_a_lambda_schedule_by_hand(rise):
    rows = make_rows(0)
    ours, theirs = twins(linear, 0)
    trainer = Trainer(
        DataLoaders(rows),
        F.cross_entropy,
        optim.SGD,
        ours,
        [BasicTrainCB(), own("TriangleCB")(rise), RecorderCB()],
    )
    trainer.fit(4, lr=0.5, valid=False)
    opt = optim.SGD(theirs.parameters(), 0.5)
    schedule = LambdaLR(opt, lambda i: min((i + 1) / 13 / rise, (1 - (i + 1) / 13) / (1 - rise)))
    rates = []
    for _ in range(4):
        for x, y in rows:
            rates.append(schedule.get_last_lr()[0])
            F.cross_entropy(theirs(x), y).backward()
            opt.step()
            opt.zero_grad()
            schedule.step()
    assert same(ours, theirs) and trainer.history.batches["lr"] == rates
    assert trainer.opt.param_groups[0]["lr"] == 0.5


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.sampled_from([1.0, 2.0, 3.0, math.nan]), min_size=1, max_size=12),
    patience=st.integers(1, 4),
)
def test_patience_stops_where_a_count_by_hand_does_and_the_last_row_is_written(values, patience):
    class ScriptCB:
        order, columns = Order.RECORD, ["score"]

        def cleanup_epoch(self, trainer):
            trainer.history.write(score=values[trainer.epoch])

    best, bad, expected = math.inf, 0, 0
    for value in values:
        expected += 1
        best, bad = (value, 0) if value < best else (best, bad + 1)
        if bad >= patience:
            break
    trainer = Trainer(
        DataLoaders(make_rows(0)),
        F.cross_entropy,
        optim.SGD,
        linear(),
        [own("PatienceCB")("score", patience), BasicTrainCB(), ScriptCB()],
    )
    for fits in (1, 2):  # The object can be used twice
        trainer.fit(len(values), valid=False)
        assert len(trainer.history) == fits * expected


# Teacher, top layer first, pieces


@pytest.mark.shows("F055")
@over_seeds
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_mean_teacher_is_the_loop_by_hand_and_validates_with_the_teacher(seed, decay):
    "And who records the loss records all of it, wherever it was added"
    rows, recorded = make_rows(seed), []
    ours, theirs = twins(linear, seed)
    first = RecorderCB(whole=lambda trainer: trainer.loss)
    trainer = Trainer(
        DataLoaders(rows, rows),
        F.cross_entropy,
        optim.SGD,
        ours,
        [first, BasicTrainCB(), odd("MeanTeacherCB")(decay, 2.0), MetricsCB()],
    )
    trainer.fit(2, lr=0.1)
    opt, teacher, n = optim.SGD(theirs.parameters(), 0.1), copy.deepcopy(theirs), 0
    for _ in range(2):
        for x, y in rows:
            preds = theirs(x)
            with torch.no_grad():
                target = teacher(x).softmax(1)
            loss = F.cross_entropy(preds, y) + 2.0 * F.mse_loss(preds.softmax(1), target)
            recorded.append(loss.item())
            loss.backward()
            opt.step()
            with torch.no_grad():
                for p, q in zip(teacher.parameters(), theirs.parameters()):
                    if n:
                        p.lerp_(q, 1 - decay)
                    else:
                        p.copy_(q)  # The average begins with the first update
            n += 1
            opt.zero_grad()
    assert same(ours, theirs) and same(trainer.MeanTeacherCB.average.module, teacher)
    assert [o["whole"] for o in trainer.history.batches if o["training"]] == recorded
    with torch.no_grad():
        losses = [F.cross_entropy(teacher(x), y).item() * len(x) for x, y in rows]
    assert trainer.history.latest("valid_loss") == pytest.approx(sum(losses) / 22)


@pytest.mark.shows("ISA-118", "F049")
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_after_the_top_layer_was_trained_first_nothing_stays_frozen(error):
    model, before = twins(mlp, 0)
    seen = []

    def after_batch(trainer):
        seen.append([p.grad is not None or not p.requires_grad for p in trainer.model.parameters()])
        if error and trainer.epoch == 0:
            raise error

    trainer = Trainer(
        DataLoaders(make_rows(0)),
        F.cross_entropy,
        optim.SGD,
        model,
        [BasicTrainCB(), odd("TopFirstCB")(2), after_batch],
    )
    if error:
        with pytest.raises(error):
            trainer.fit(2, lr=0.1, valid=False)
    else:
        trainer.fit(2, lr=0.1, valid=False)
    assert torch.equal(model[1].weight, before[1].weight) and not torch.equal(
        model[4].weight, before[4].weight
    )
    assert all(p.requires_grad for p in model.parameters())


# Diffusion


@pytest.mark.shows("ISA-116")
def test_dreambooth_is_one_subclass_with_six_methods():
    cls = diffusion("DreamBoothCB")
    assert cls.__bases__[0].__name__ == "BasicTrainCB"
    assert {o for o in vars(cls) if o in EVENTS} == {
        "before_fit",
        "before_batch",
        "predict",
        "get_loss",
        "backward",
        "zero_grad",
    }


@pytest.mark.shows("ISA-116")
@over_seeds
@pytest.mark.parametrize("prior_weight", [0.0, 0.5])
def test_dreambooth_is_the_loop_by_hand(seed, prior_weight):
    g = torch.Generator().manual_seed(seed)
    rows = [
        (
            torch.randn(4, 1, 8, 8, generator=g),
            torch.randint(0, 12, (4, 2), generator=g),
            torch.randn(4, 1, 8, 8, generator=g),
            torch.randint(0, 12, (4, 2), generator=g),
        )
        for _ in range(3)
    ]
    ours, theirs = twins(diffusion("Denoiser"), seed)
    trainer = Trainer(
        DataLoaders(rows, n_inp=3),
        F.mse_loss,
        optim.AdamW,
        ours,
        [diffusion("DreamBoothCB")(prior_weight, 0.5), *watchers()],
    )

    def by_hand():
        opt = optim.AdamW(theirs.parameters(), 0.01)
        left = torch.cos((torch.arange(1, 51) / 50 + 0.008) / 1.008 * math.pi / 2).square().clamp(min=1e-4)
        for _ in range(3):
            for subject, words, prior, prior_words in rows:
                clean = torch.cat([subject, prior])
                noise, level = torch.randn(8, 1, 8, 8), torch.randint(50, (8,))
                share = left[level].reshape(8, 1, 1, 1)
                guess = theirs(
                    share.sqrt() * clean + (1 - share).sqrt() * noise, level, torch.cat([words, prior_words])
                )
                loss = F.mse_loss(guess[:4], subject) + prior_weight * F.mse_loss(guess[4:], prior)
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
                opt.step()

    both(seed, lambda: trainer.fit(3, lr=0.01, valid=False), by_hand)
    assert same(ours, theirs)


# Nobody waits for the device

META = {
    "accumulation": lambda: (
        Trainer,
        F.cross_entropy,
        optim.SGD,
        linear(),
        [BasicTrainCB(), own("AccumulateCB")(2), own("ClipCB")(), own("GainCB")(), own("TriangleCB")()],
    ),
    "sam": lambda: (
        Trainer,
        F.cross_entropy,
        optim.SGD,
        mlp(),
        [BasicTrainCB(), odd("SAMCB")(), odd("GradientPenaltyCB")(0.1)],
    ),
    "gan": lambda: (odd("GANTrainer"), None, None, Players(), []),
    "spsa": lambda: (Trainer, F.cross_entropy, optim.SGD, linear(), [BasicTrainCB(), odd("SPSACB")()]),
    "top first": lambda: (Trainer, F.cross_entropy, optim.SGD, mlp(), [BasicTrainCB(), odd("TopFirstCB")()]),
}


@pytest.mark.parametrize("name", META)
def test_none_of_them_reads_a_tensor(name):
    "On the `meta` device there is nothing to read"
    cls, loss_func, opt_func, model, callbacks = META[name]()
    trainer = cls(DataLoaders(make_rows(0)), loss_func, opt_func, model, [*callbacks, DeviceCB("meta")])
    trainer.fit(2, valid=False)
    assert trainer.loss.is_meta


class SeedDreamBoothCB(AccelerateCB):
    "A class of the old library: an accelerator, its own `__init__` and `before_fit`, and no `step`"

    def __init__(self, mixed_precision="no", class_image_weight=0.5):
        self.class_image_weight = class_image_weight
        self.acc = Accelerator(mixed_precision=mixed_precision, cpu=True)

    def before_fit(self, trainer):
        trainer.model, trainer.opt, trainer.dls.train, trainer.dls.valid = self.acc.prepare(
            trainer.model, trainer.opt, trainer.dls.train, trainer.dls.valid
        )

    def before_batch(self, trainer):
        trainer.batch.append(trainer.batch[0] + torch.randn_like(trainer.batch[0]))

    def predict(self, trainer):
        trainer.preds = trainer.model(trainer.batch[2] + trainer.batch[1])  # Words are numbers by now

    def get_loss(self, trainer):
        (guess, prior_guess), (truth, prior_truth) = trainer.preds.chunk(2), trainer.batch[0].chunk(2)
        loss, prior_loss = trainer.loss_func(guess, truth), trainer.loss_func(prior_guess, prior_truth)
        trainer.loss = (1 - self.class_image_weight) * loss + self.class_image_weight * prior_loss

    def backward(self, trainer):
        self.acc.backward(trainer.loss)
        if self.acc.sync_gradients:
            self.acc.clip_grad_norm_(trainer.model.parameters(), 1.0)

    def zero_grad(self, trainer):
        trainer.opt.zero_grad(set_to_none=True)


@pytest.mark.shows("ISA-78", "ISA-80", "ISA-116")
def test_the_dreambooth_class_of_the_old_library_trains_as_the_loop_by_hand():
    "Alone it does all steps, after the transforms of images and words, and its cleanup finds nothing to undo"
    from accelerate.state import AcceleratorState

    words = {"a dog": 1.0, "my dog": 2.0}

    def to_number(given):
        return torch.tensor([words[o] for o in given]).reshape(-1, 1)

    rows = [(torch.randn(2, 3), ("my dog", "a dog")) for _ in range(4)]
    ours, theirs = twins(lambda: nn.Linear(3, 3), 0)
    callbacks = [
        SeedDreamBoothCB(class_image_weight=0.25),
        OneCycleSchedulerCB(),
        BatchAugmentationCB((torch.neg, to_number), on_valid=True),
        DeviceCB("cpu"),
        MetricsCB(show=False),
        ProgressCB(),
    ]
    trainer = Trainer(
        DataLoaders(*(DataLoader(rows, batch_size=None) for _ in range(2))),
        F.mse_loss,
        optim.AdamW,
        ours,
        callbacks,
    )
    torch.manual_seed(1)
    try:
        trainer.fit(2, lr=0.01)
    finally:
        AcceleratorState._reset_state(True)
    assert trainer.n_updates == 8 and set(trainer.history[-1]) >= {"train_loss", "valid_loss"}

    opt = optim.AdamW(theirs.parameters(), 0.01)
    schedule = optim.lr_scheduler.OneCycleLR(opt, 0.01, total_steps=8)
    torch.manual_seed(1)
    for _ in range(2):
        for x, w in DataLoader(rows, batch_size=None):
            parts = (theirs(-x + torch.randn_like(x) + to_number(w)) + x).square().mean(1)  # The truth is -x
            (0.75 * parts[0] + 0.25 * parts[1]).backward()
            nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            opt.step()
            schedule.step()
            opt.zero_grad()
        for x, _ in DataLoader(rows, batch_size=None):
            torch.randn_like(x)
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)
