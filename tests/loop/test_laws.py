"""Laws of training, checked against loops written by hand.

Callbacks may organise training and never change it: the weights are those of a plain loop, bit for bit,
whatever the optimizer, the model and the seed; and callbacks that only watch leave every number and every
random state alone.
"""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

import isaac_loop.all as library
from isaac_loop.all import (
    BasicTrainCB,
    DataLoaders,
    DeviceCB,
    History,
    MetricsCB,
    MomentumTrainCB,
    Order,
    ProgressCB,
    TrackingCB,
    Trainer,
    set_seed,
)

OPTIMIZERS = {
    "sgd": optim.SGD,
    "sgd with momentum": partial(optim.SGD, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
}
MODELS = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
    "mlp with dropout": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    ),
    "conv with batch norm": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    ),
}


def make_loaders(seed, n=22, batch_size=8):
    "Images of 4 by 4 in batches of 8, 8 and 6"
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 1, 4, 4, generator=g), torch.randint(0, 3, (n,), generator=g)
    batches = list(zip(x.split(batch_size), y.split(batch_size)))
    return DataLoaders(batches, batches[:2])


def train_by_hand(model, dls, opt_func, n_epochs, lr, validate=True):
    "What every tutorial writes"
    opt = opt_func(model.parameters(), lr)
    for _ in range(n_epochs):
        model.train()
        for x, y in dls.train:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
        if not validate:
            continue
        model.eval()
        with torch.no_grad():
            for x, y in dls.valid:
                F.cross_entropy(model(x), y)


def same(a, b):
    "Whether two models agree in every parameter and buffer, bit for bit"
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("opt_func", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_weights_are_those_of_the_loop_written_by_hand(opt_func, make_model, seed):
    dls = make_loaders(seed)
    set_seed(seed)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    set_seed(seed)
    Trainer(dls, F.cross_entropy, opt_func, ours, BasicTrainCB()).fit(3, lr=0.01)
    after_ours = torch.get_rng_state()
    set_seed(seed)
    train_by_hand(theirs, dls, opt_func, 3, 0.01)
    assert same(ours, theirs)
    assert torch.equal(after_ours, torch.get_rng_state()), "the loop used random numbers of its own"


def test_weights_are_those_of_the_loop_by_hand_with_a_shuffling_loader_and_workers():
    data = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(30)]
    loader = torch.utils.data.DataLoader(data, 7, shuffle=True, num_workers=2)
    dls = DataLoaders(loader, loader)
    set_seed(0)
    ours = nn.Linear(4, 3)
    theirs = copy.deepcopy(ours)
    set_seed(1)
    Trainer(dls, F.cross_entropy, optim.Adam, ours, [BasicTrainCB(), MetricsCB(), ProgressCB("plain")]).fit(
        2, lr=0.01
    )
    set_seed(1)
    train_by_hand(theirs, dls, optim.Adam, 2, 0.01)
    assert same(ours, theirs)


@pytest.mark.shows("ISA-04")
def test_a_second_fit_starts_with_a_fresh_optimizer_and_can_keep_the_old_one():
    "Fresh by default, as by hand; `keep_opt=True` is one long run by hand"
    dls = make_loaders(0)
    for keep in (False, True):
        ours = MODELS["linear"]()
        theirs = copy.deepcopy(ours)
        trainer = Trainer(dls, F.cross_entropy, optim.Adam, ours, BasicTrainCB())
        trainer.fit(1, lr=0.1)
        opt = trainer.opt
        trainer.fit(1, lr=0.1, keep_opt=keep)
        assert (trainer.opt is opt) == keep
        if keep:
            train_by_hand(theirs, dls, optim.Adam, 2, 0.1)
        else:
            for _ in range(2):
                train_by_hand(theirs, dls, optim.Adam, 1, 0.1)
        assert same(ours, theirs)


class Watcher:
    "Answers every event that a watcher may answer, and looks at everything"

    order = Order.RECORD

    def __init__(self, name, order):
        self.name, self.order = name, order

    def _look(self, trainer):
        _ = repr(trainer), dict(vars(trainer)), trainer.training, len(trainer.history)

    before_fit = after_fit = cleanup_fit = before_epoch = after_epoch = cleanup_epoch = before_batch = (
        after_batch
    ) = _look
    cleanup_batch = before_predict = after_predict = cleanup_predict = after_get_loss = before_backward = (
        after_backward
    ) = _look
    before_step = after_step = cleanup_step = before_zero_grad = after_zero_grad = log = _look


class EvenMetric:
    "A metric that needs no library"

    def reset(self):
        self.n = 0

    def update(self, preds, targs):
        self.n = self.n + (preds.argmax(1) == targs).sum()

    def compute(self):
        return self.n


WATCHERS = {
    "metrics": lambda: MetricsCB(EvenMetric(), train_metrics=True),
    "progress": lambda: ProgressCB("plain"),
    "tracking": lambda: TrackingCB(),
    "early watcher": lambda: Watcher("early", Order.RECORD),
    "late watcher": lambda: Watcher("late", Order.LAST),
    "device": lambda: DeviceCB("cpu"),
    "recorder": lambda: library.RecorderCB(),
    "activations": lambda: library.ActivationStatsCB(torch.nn.Linear),
    "gradients": lambda: library.GradientStatsCB(),
    "update ratios": lambda: library.UpdateRatioCB(),
    "not finite": lambda: library.NonFiniteCB(every=1),
    "rewind": lambda: library.RewindCB(every=3),
    "interrupt": lambda: library.InterruptCB(),
    "profiler": lambda: library.ProfilerCB(),
    "times": lambda: library.TimesCB(),
    "limit": lambda: library.LimitCB(updates=10**6),
    "logger": lambda: library.LoggerCB(
        lambda values, step: None,
        every=2,
        values=dict(size=lambda t: t.preds.abs().mean()),
        media=lambda t: t.history.write_media("x", "text", "x"),
    ),
}


@settings(max_examples=40, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(WATCHERS)), unique=True, max_size=6),
    seed=st.integers(0, 100),
    opt=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_any_bundle_of_watchers_changes_nothing(names, seed, opt):
    dls = make_loaders(seed)
    set_seed(seed)
    plain = MODELS["mlp with dropout"]()
    watched = copy.deepcopy(plain)
    states = []
    for model, extra in ((plain, []), (watched, [WATCHERS[o]() for o in names])):
        set_seed(seed)
        trainer = Trainer(dls, F.cross_entropy, OPTIMIZERS[opt], model, [*extra, BasicTrainCB()])
        trainer.fit(2, lr=0.01)
        states.append(
            (trainer.opt.state_dict()["state"], torch.get_rng_state(), trainer.loss.item(), trainer.n_updates)
        )
    assert same(plain, watched)
    for a, b in zip(states[0][0].values(), states[1][0].values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)
    assert torch.equal(states[0][1], states[1][1])
    assert states[0][2:] == states[1][2:]


@pytest.mark.shows("ISA-58")
@settings(max_examples=25, deadline=None)
@given(momentum=st.floats(0, 0.95), lr=st.floats(1e-4, 0.05), seed=st.integers(0, 50))
def test_momentum_is_the_momentum_of_sgd(momentum, lr, seed):
    "Scaling old gradients equals PyTorch's own momentum, up to rounding"
    dls = make_loaders(seed)
    ours = MODELS["linear"]().double()
    theirs = copy.deepcopy(ours)
    dls = DataLoaders([(x.double(), y) for x, y in dls.train])
    Trainer(dls, F.cross_entropy, optim.SGD, ours, MomentumTrainCB(momentum)).fit(3, lr=lr, valid=False)
    train_by_hand(theirs, dls, partial(optim.SGD, momentum=momentum), 3, lr, validate=False)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b)


@pytest.mark.shows("ISA-05", "ISA-06", "ISA-21")
def test_epochs_validate_without_gradients_and_in_the_right_mode():
    "The pass decides mode and gradients, and epoch events come once for each pass"
    seen = []

    class ModeCB:
        def before_epoch(self, trainer):
            seen.append(("before_epoch", trainer.training))

        def after_predict(self, trainer):
            seen.append((trainer.training, trainer.model.training, trainer.preds.requires_grad))

        def after_epoch(self, trainer):
            seen.append(("after_epoch", trainer.training))

    trainer = Trainer(
        make_loaders(0), F.cross_entropy, optim.SGD, MODELS["linear"](), [BasicTrainCB(), ModeCB()]
    )
    trainer.fit(1)
    assert seen == [
        ("before_epoch", True),
        *[(True, True, True)] * 3,
        ("after_epoch", True),
        ("before_epoch", False),
        *[(False, False, False)] * 2,
        ("after_epoch", False),
    ]
    with pytest.raises(AttributeError):
        trainer.training = True
    trainer.model.train()
    assert trainer.training is True, "between fits it tells the model's mode"


@pytest.mark.shows("ISA-03")
@pytest.mark.parametrize("train, valid", [(True, False), (False, True)])
def test_fit_can_leave_out_a_pass(train, valid):
    seen = set()

    def before_epoch(trainer):
        seen.add(trainer.training)

    model = MODELS["linear"]()
    before = copy.deepcopy(model)
    Trainer(make_loaders(0), F.cross_entropy, optim.SGD, model, [BasicTrainCB(), before_epoch]).fit(
        2, train=train, valid=valid
    )
    assert seen == {train}
    assert same(model, before) == (not train)


def test_validating_leaves_the_optimizer_alone():
    trainer = Trainer(make_loaders(0), F.cross_entropy, optim.Adam, MODELS["linear"](), BasicTrainCB())
    trainer.fit(1)
    opt = trainer.opt
    trainer.fit(1, train=False)
    assert trainer.opt is opt


@pytest.mark.shows("MIN-04")
def test_the_user_may_bring_an_optimizer():
    "`opt_func=None`"
    dls = make_loaders(0)
    ours = MODELS["linear"]()
    theirs = copy.deepcopy(ours)
    trainer = Trainer(dls, F.cross_entropy, None, ours, BasicTrainCB())
    trainer.opt = optim.Adam(ours.parameters(), 0.02)
    trainer.fit(1)
    train_by_hand(theirs, dls, optim.Adam, 1, 0.02)
    assert same(ours, theirs)


@pytest.mark.shows("MIN-04")
def test_a_subclass_can_have_a_rate_of_its_own():
    "A default rate on the trainer"

    class Fast(Trainer):
        def fit(self, n_epochs=3, lr=0.5, **kwargs):
            super().fit(n_epochs, lr, **kwargs)

    trainer = Fast(make_loaders(0), F.cross_entropy, optim.SGD, MODELS["linear"](), BasicTrainCB())
    trainer.fit(1)
    assert trainer.opt.param_groups[0]["lr"] == trainer.lr == 0.5


@pytest.mark.shows("ISA-02")
def test_no_callback_means_that_nothing_is_trained():
    "Every action comes from a callback"
    model = MODELS["conv with batch norm"]()
    before = copy.deepcopy(model)
    trainer = Trainer(make_loaders(0), F.cross_entropy, optim.SGD, model, None)
    trainer.fit(2)
    assert same(model, before)
    assert trainer.n_updates == 0 and isinstance(trainer.history, History) and len(trainer.history) == 0
