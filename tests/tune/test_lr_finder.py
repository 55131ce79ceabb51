"""The finders of learning rates and batch sizes (`tune/lr_finder.py`).

A fit after `lr_find` or `find_batch_size` is the fit without, bit for bit, whatever callbacks and optimizer
the trainer has; nothing the trainer leads to has changed, and no file was written. What they find is
compared with curves, rates and limits that are known.
"""

import copy
import functools
import itertools
import math
import os
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observing import bits, observe, random_states, unchanged
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torcheval.metrics import MulticlassAccuracy

from isaac_loop.all import (
    BasicTrainCB,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    DataLoaders,
    DeviceCB,
    LRFinderCB,
    MetricsCB,
    MomentumTrainCB,
    NBatchCB,
    OneBatchCB,
    Order,
    ProgressCB,
    TrackingCB,
    Trainer,
    set_seed,
    with_cbs,
)
from isaac_loop.train.freezing import discriminative_rates
from isaac_loop.tune.lr_finder import smooth, suggest_rates

OPTIMIZERS = {
    "sgd": optim.SGD,
    "sgd with momentum": functools.partial(optim.SGD, momentum=0.9, weight_decay=1e-2),
    "adam": optim.Adam,
    "adamw amsgrad": functools.partial(optim.AdamW, amsgrad=True),
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
}
CALLBACKS = {
    "device": lambda: DeviceCB("cpu"),
    "metrics": lambda: MetricsCB(accuracy=MulticlassAccuracy(), train_metrics=True),
    "progress": lambda: ProgressCB("plain"),
    "tracking": TrackingCB,
    "limit": lambda: NBatchCB(2),
}


def make_rows(n=40):
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (n,), generator=g)
    return F.one_hot(y, 4).float() + 0.5 * torch.randn(n, 4, generator=g), y


def make_trainer(
    callbacks=(),
    steps=None,
    opt_func=optim.Adam,
    model=None,
    train=None,
    valid=None,
    loss_func=F.cross_entropy,
    generator=None,
):
    set_seed(0)
    rows = TensorDataset(*make_rows())
    model = model or nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.ReLU(), nn.Linear(6, 3)
    )
    train = DataLoader(rows, 8, shuffle=True, generator=generator) if train is None else train
    return Trainer(
        DataLoaders(train, DataLoader(rows, 20) if valid is None else valid),
        loss_func,
        opt_func,
        model,
        [steps or BasicTrainCB(), *callbacks],
    )


def outcome(trainer, **kwargs):
    "All that a fit leaves behind"
    trainer.fit(2, lr=0.01, **kwargs)
    rows = [{k: v for k, v in o.items() if k != "elapsed"} for o in trainer.history]
    state = [bits(v) for s in trainer.opt.state.values() for v in s.values() if torch.is_tensor(v)]
    return (
        [bits(o) for o in trainer.model.state_dict().values()],
        state,
        rows,
        list(trainer.history.batches),
        trainer.n_updates,
        random_states(),
    )


class SeenCB:
    "Notes something at an event, where no snapshot finds it"

    order = Order.STEP - 1

    def __init__(self, event, look):
        seen = []
        self._notes = lambda: seen
        setattr(self, event, lambda trainer: seen.append(look(trainer)))

    @property
    def seen(self):
        return self._notes()


def rate(trainer):
    return trainer.opt.param_groups[0]["lr"]


# No trace


@pytest.mark.shows("ISA-68", "F026", "F040")
@pytest.mark.parametrize(
    "name, steps",
    [*((o, BasicTrainCB) for o in OPTIMIZERS), ("sgd", MomentumTrainCB), ("adam", MomentumTrainCB)],
)
@pytest.mark.parametrize("search", ["lr_find", "find_batch_size"])
def test_the_fit_after_it_is_the_fit_without_it(search, name, steps):
    "Also after a fit, with its gradients and its optimizer, and with every built-in callback"
    results = []
    for find in (False, True):
        trainer = make_trainer(
            [o() for o in CALLBACKS.values()],
            steps(),
            OPTIMIZERS[name],
            generator=torch.Generator().manual_seed(5),
        )
        if find:
            _search(trainer, search)
        first = outcome(trainer)
        if find:
            _search(trainer, search)
        results.append((first, outcome(trainer, keep_opt=True)))
    assert results[0] == results[1]


def _search(trainer, search):
    if search == "lr_find":
        trainer.lr_find(start_lr=1e-3, lr_mult=2.0)
    else:
        trainer.find_batch_size(max_size=16)


@pytest.mark.shows("ISA-68")
@settings(max_examples=15, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(CALLBACKS)), unique=True),
    fits=st.integers(0, 2),
    n=st.integers(2, 12),
    start=st.sampled_from([1e-6, 1e-2, 1.0]),
    repeat=st.integers(1, 2),
)
def test_nothing_that_can_be_reached_has_changed(names, fits, n, start, repeat):
    "The trainer's `vars`, every callback's `__dict__`, deeply, with identities"
    trainer = make_trainer([CALLBACKS[o]() for o in names], generator=torch.Generator())
    if fits:
        trainer.fit(fits)
    before, numbers = observe(trainer), random_states()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(repeat):
            trainer.lr_find(start, n_batches=n)
        trainer.find_batch_size(max_size=8)
    unchanged(trainer, before)
    assert random_states() == numbers


@pytest.mark.shows("ISA-69")
def test_no_file_is_written(tmp_path, monkeypatch):
    "And the variable of the caller is the same trainer, weight by weight"
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer([CALLBACKS[o]() for o in CALLBACKS])
    same, weights = trainer, list(map(id, trainer.model.parameters()))
    trainer.lr_find()
    trainer.find_batch_size(max_size=8)
    trainer.fit(1, callbacks=LRFinderCB())
    assert (
        os.listdir(tmp_path) == []
        and trainer is same
        and list(map(id, trainer.model.parameters())) == weights
    )


@pytest.mark.shows("ISA-69")
def test_it_can_be_asked_by_somebody_who_cannot_be_pickled():
    "The original pickled the trainer; lambdas, locals and open files are no hindrance"

    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.act = nn.Linear(4, 3), lambda x: x

        def forward(self, x):
            return self.act(self.layer(x))

    note = SeenCB("log", lambda t: 1)
    with open(os.devnull, "w") as f:
        note.file = f
        assert (
            len(
                make_trainer([note], model=Local(), loss_func=lambda p, t: F.cross_entropy(p, t))
                .lr_find()
                .lrs
            )
            > 5
        )


@pytest.mark.parametrize("options", [{}, dict(n_batches=2)])
def test_what_was_found_is_no_rate_and_the_error_says_how_to_take_one(options):
    "To pass it as `callbacks`, as it was told, runs a second search in the place of the training"
    trainer = make_trainer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        finder = trainer.lr_find(**options)
    with pytest.raises(TypeError, match=r"one number.*lr=finder.suggestions\(\)\['valley'\]") as caught:
        trainer.fit(1, lr=finder)
    assert "callbacks" not in str(caught.value)
    with pytest.raises(TypeError, match=r"Pass it as `fit\(3, callbacks=...\)`"):
        trainer.fit(1, LRFinderCB())


def test_the_finder_is_offered_where_there_is_one():
    trainer = make_trainer()
    assert trainer.lr_finder is None and trainer.interrupted is None
    assert not {"lr_finder", "interrupted"} & {*dir(trainer)} and {"lr_find", "lr"} & {*dir(trainer)}
    trainer.fit(1, callbacks=LRFinderCB(n_batches=3))
    assert "lr_finder" in dir(trainer) and "interrupted" not in dir(trainer)


def test_two_searches_find_the_same():
    trainer = make_trainer(generator=torch.Generator().manual_seed(1))
    first, second = trainer.lr_find(), trainer.lr_find()
    assert (first.lrs, first.losses) == (second.lrs, second.losses) and first is not second
    trainer.fit(1)
    assert trainer.lr_find().losses != first.losses


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, SystemExit])
@pytest.mark.parametrize(
    "event", ["before_fit", "before_batch", "after_backward", "after_step", "cleanup_fit"]
)
def test_an_interrupt_in_the_middle_leaves_no_trace(event, error):
    trainer = make_trainer([MetricsCB()])
    trainer.fit(1)
    before, numbers = observe(trainer), random_states()

    def look(trainer):
        if event.endswith("fit") or trainer.batch_num == 3:
            raise error("stop")

    look.__name__ = event
    for search in (trainer.lr_find, trainer.find_batch_size):
        if search == trainer.find_batch_size and not event.endswith("fit"):
            continue
        with pytest.raises(error, match="stop"):
            search(callbacks=look)
        unchanged(trainer, before)
    assert random_states() == numbers


def test_within_a_fit():
    "A callback may look for a rate, and the fit goes on as if it had not"

    def log(trainer):
        if found is not None:
            found.append(trainer.lr_find(n_batches=20).lrs)

    log.order = Order.DECIDE
    found = None
    plain = outcome(make_trainer([log, MetricsCB()]))
    found = []
    assert outcome(make_trainer([log, MetricsCB()])) == plain
    assert len(found) == 2 and len(found[0]) > 5


def test_within_a_validation_pass():
    class LookCB:
        order = Order.DECIDE

        def after_epoch(self, trainer):
            trainer.lr_find(n_batches=3)

    make_trainer([LookCB()]).fit(1, train=False)


# What is tried


@pytest.mark.shows("ISA-67", "MIN-07")
@pytest.mark.parametrize("start, mult", [(1e-5, 1.3), (1e-3, 2.0), (0.5, 1.01)])
@pytest.mark.filterwarnings("ignore:No rate")
def test_the_rate_begins_where_one_says_and_is_multiplied_after_every_batch(start, mult):
    seen = SeenCB("after_step", rate)
    finder = make_trainer().lr_find(start, mult, n_batches=9, callbacks=seen)
    assert (
        finder.lrs == pytest.approx([start * mult**i for i in range(len(finder.lrs))]) and len(finder.lrs) > 2
    )
    assert seen.seen == finder.lrs[: len(seen.seen)] and len(seen.seen) >= len(finder.lrs) - 1, (
        "these are the rates with which the optimizer steps"
    )
    assert len(finder.losses) == len(finder.lrs) and all(type(o) is float for o in finder.losses)


@pytest.mark.shows("ISA-67", "MIN-07")
def test_the_defaults_are_those_of_the_original():
    "A factor of 1.3, three times the best loss"
    assert (LRFinderCB().lr_mult, LRFinderCB().max_mult) == (1.3, 3.0)
    assert make_trainer().lr_find(n_batches=3, start_lr=0.01).lrs == pytest.approx([0.01, 0.013, 0.0169])


@pytest.mark.shows("ISA-67")
def test_losses_are_those_of_a_loop_by_hand():
    x, y = make_rows()
    batches = list(zip(x.split(8), y.split(8)))
    model = nn.Linear(4, 3)
    by_hand = copy.deepcopy(model)
    finder = make_trainer(model=model, opt_func=optim.SGD, train=batches).lr_find(0.01, 1.5, n_batches=12)
    opt, losses = optim.SGD(by_hand.parameters(), 0.01), []
    for x, y in itertools.islice(itertools.cycle(batches), 12):
        loss = F.cross_entropy(by_hand(x), y)
        losses.append(loss.item())
        loss.backward()
        opt.step()
        opt.zero_grad()
        opt.param_groups[0]["lr"] *= 1.5
    assert finder.losses == losses[: len(finder.losses)] and len(finder.losses) > 6


@pytest.mark.shows("ISA-67")
def test_validation_is_skipped():
    seen = SeenCB("before_batch", lambda t: t.training)
    make_trainer(valid=[]).lr_find(callbacks=seen)
    assert set(seen.seen) == {True}


def test_groups_of_parameters_keep_the_ratio_of_their_rates():
    def two_rates(params, lr):
        return optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": lr * 10}], lr)

    seen = SeenCB("after_step", lambda t: [o["lr"] for o in t.opt.param_groups])
    finder = make_trainer(opt_func=two_rates).lr_find(1e-4, 2.0, n_batches=8, callbacks=seen)
    assert finder.lrs[0] == 1e-4
    assert all(b == pytest.approx(10 * a) for a, b in seen.seen) and len(seen.seen) >= 7


def in_groups(first, second):
    "An `opt_func` of two groups, which have such parts of the rate"

    def opt_func(params, lr):
        groups = [dict(params=params[:2], lr=lr * first), dict(params=params[2:], lr=lr * second)]
        return optim.SGD(groups, lr)

    return opt_func


@pytest.mark.parametrize("parts", [(1, 0.1), (0.1, 1), (1, 10), (0.5, 0.1), (0, 1)])
def test_a_rate_that_was_found_is_one_for_fit(parts):
    "A fit with it begins at the rates that the search has tried, whichever group comes first"
    seen = SeenCB("before_step", lambda t: [o["lr"] for o in t.opt.param_groups])
    finder = make_trainer(opt_func=in_groups(*parts)).lr_find(1e-4, 2.0, n_batches=8, callbacks=seen)
    assert finder.lrs[0] == 1e-4 and len(seen.seen) >= 7
    for lr, tried in zip(finder.lrs, seen.seen):
        again = SeenCB("before_step", lambda t: [o["lr"] for o in t.opt.param_groups])
        make_trainer([again], opt_func=in_groups(*parts)).fit(1, lr=lr, valid=False)
        assert again.seen[0] == pytest.approx(tried)


def test_layers_with_lower_rates_do_not_lower_the_axis():
    "Of `discriminative_rates` the last group has the full rate"
    trainer = make_trainer()
    trainer.opt_func = discriminative_rates(optim.SGD, trainer.model, {"0": 0.1})
    seen = SeenCB("before_step", lambda t: max(o["lr"] for o in t.opt.param_groups))
    finder = trainer.lr_find(1e-3, n_batches=6, callbacks=seen)
    assert finder.lrs[0] == 1e-3 and seen.seen == pytest.approx(finder.lrs[: len(seen.seen)])


def test_an_optimizer_of_ones_own_begins_at_the_given_rate():
    trainer = make_trainer(opt_func=None)
    trainer.opt = optim.SGD(trainer.model.parameters(), 0.5)
    assert trainer.lr_find(start_lr=1e-4, n_batches=3).lrs[0] == pytest.approx(1e-4)


class TwoOptimizersCB:
    "Does the steps with two optimizers, one for the first layer and one for the rest"

    def predict(self, trainer):
        trainer.preds = trainer.model(trainer.batch[0])

    def get_loss(self, trainer):
        trainer.loss = trainer.loss_func(trainer.preds, trainer.batch[1])

    def backward(self, trainer):
        trainer.loss.backward()

    def step(self, trainer):
        trainer.opt_g.step()
        trainer.opt_d.step()

    def zero_grad(self, trainer):
        trainer.model.zero_grad()


@pytest.mark.filterwarnings("ignore:No rate")
def test_of_several_optimizers_one_is_searched_for_at_a_time():
    trainer = make_trainer(opt_func=None)
    trainer.callbacks = [TwoOptimizersCB()]
    with pytest.raises(AttributeError, match="has an optimizer as an attribute. Set `trainer.opt`"):
        trainer.lr_find()
    first, *_, last = trainer.model.parameters()
    trainer.opt_d, trainer.opt_g = optim.SGD([first], 0.1), optim.SGD([last], 0.2)
    with pytest.raises(AttributeError, match="are `trainer.opt_d`, `trainer.opt_g`. Lend one of them"):
        trainer.lr_find()
    trainer.opt = trainer.opt_g
    rates = SeenCB("after_step", lambda t: (t.opt_g.param_groups[0]["lr"], t.opt_d.param_groups[0]["lr"]))
    trainer.lr_find(1e-4, 2.0, n_batches=3, callbacks=rates)
    del trainer.opt
    assert rates.seen[:2] == [(pytest.approx(1e-4), 0.1), (pytest.approx(2e-4), 0.1)]
    assert (trainer.opt_g.param_groups[0]["lr"], trainer.opt_d.param_groups[0]["lr"]) == (0.2, 0.1)


class MakesTwoCB(TwoOptimizersCB):
    "Makes them anew in each fit"

    def before_fit(self, trainer):
        first, *_, last = trainer.model.parameters()
        trainer.opt_d, trainer.opt_g = optim.SGD([first], trainer.lr), optim.SGD([last], trainer.lr)


@pytest.mark.filterwarnings("ignore:No rate")
def test_an_optimizer_that_a_fit_makes_is_lent_when_it_has_been_made():
    "One of an earlier fit would not step, and the search would say nothing of its rate"
    trainer = make_trainer(opt_func=None)
    trainer.callbacks = [MakesTwoCB()]
    trainer.fit(1, lr=0.1)
    trainer.opt = trainer.opt_g
    with pytest.raises(RuntimeError, match="has not stepped.*in `before_epoch`"):
        trainer.lr_find(1e-4, 2.0, n_batches=3)
    del trainer.opt

    def before_epoch(trainer):
        trainer.opt = trainer.opt_g

    rates = SeenCB("after_step", lambda t: (t.opt_g.param_groups[0]["lr"], t.opt_d.param_groups[0]["lr"]))
    trainer.lr_find(1e-4, 2.0, n_batches=3, callbacks=[before_epoch, rates])
    assert rates.seen[:2] == [
        (pytest.approx(1e-4), pytest.approx(1e-4)),
        (pytest.approx(2e-4), pytest.approx(1e-4)),
    ]
    assert not hasattr(trainer, "opt")
    assert len(trainer.lr_find(n_batches=1, callbacks=before_epoch).lrs) == 1, (
        "and so it may end before a step"
    )


class Players(Trainer):
    "Two players with a loss each, of which the second may play in every other batch only"

    every, weight = 1, 1.0

    def before_fit(self):
        first, last = self.model[0], self.model[-1]
        self.opt_d, self.opt_g = (optim.SGD(o.parameters(), self.lr) for o in (first, last))
        self.seen = []

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        for self.turn in ("d", "g"):
            if self.turn == "g" and self.batch_num % self.every:
                continue
            self.run_callbacks("predict", "get_loss", "backward", "step", "zero_grad")

    def predict(self):
        self.preds = self.model(self.batch[0])

    def get_loss(self):
        loss = F.cross_entropy(self.preds, self.batch[1])
        self.loss = loss if self.turn == "d" else self.weight * loss

    def backward(self):
        self.loss.backward()

    def step(self):
        opt = self.opt_d if self.turn == "d" else self.opt_g
        self.seen.append((self.turn, self.loss.item(), opt.param_groups[0]["lr"]))
        opt.step()

    def zero_grad(self):
        self.model.zero_grad()


class NotesCB:
    "Keeps what the trainer has seen, where no snapshot finds it"

    stateless = True

    def __init__(self):
        kept = []
        self._kept = lambda: kept

    def cleanup_fit(self, trainer):
        self._kept().extend(trainer.seen)


@pytest.mark.parametrize("weight", [1.0, 100.0])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("player", ["d", "g"])
@pytest.mark.filterwarnings("ignore:No rate")
def test_of_two_players_the_losses_of_the_one_whose_rate_rises_are_noted(player, every, weight):
    "They took turns in the curve, and a weighted one ended the search after two rates"

    def before_epoch(trainer):
        trainer.opt = getattr(trainer, f"opt_{player}")

    trainer, notes = make_trainer(opt_func=None), NotesCB()
    trainer = Players(trainer.dls, None, None, trainer.model, [])
    trainer.every, trainer.weight = every, weight
    finder = trainer.lr_find(1e-4, 2.0, n_batches=8, callbacks=[before_epoch, notes])
    seen = [(loss, lr) for turn, loss, lr in notes._kept() if turn == player]
    assert finder.lrs == pytest.approx([1e-4 * 2**i for i in range(8)])
    assert finder.losses == [loss for loss, _ in seen] and finder.lrs == [lr for _, lr in seen]
    others = {lr for turn, _, lr in notes._kept() if turn != player}
    assert others == {1e-4}, "the other keeps its rate"


def test_a_lent_optimizer_that_never_steps_ends_the_search_soon():
    trainer = make_trainer(opt_func=None)
    trainer = Players(trainer.dls, None, None, trainer.model, [])
    trainer.opt = optim.SGD(trainer.model.parameters(), 0.1)
    batches = []

    def after_batch(trainer):
        batches.append(trainer.batch_num)

    with pytest.raises(RuntimeError, match="that optimizer has not stepped"):
        trainer.lr_find(n_batches=7, callbacks=after_batch)
    assert len(batches) < 7


def test_a_rate_that_is_a_tensor_is_noted_as_a_number():
    "As optimizers have it that are compiled or captured in a graph"
    finder = make_trainer(opt_func=lambda params, lr: optim.Adam(params, torch.tensor(lr))).lr_find(
        0.01, 2.0, n_batches=4
    )
    assert [float(o) for o in finder.lrs] == pytest.approx([0.01, 0.02, 0.04, 0.08])


class WholeBatch(Trainer):
    "Computes its loss without any event"

    note = staticmethod(lambda loss: loss)

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        loss = self.loss_func(self.model(x), y)
        self.loss = self.note(loss)
        if self.training:
            loss.backward()
            self.run_callbacks("step", "zero_grad")


class LossAsNumber(WholeBatch):
    note = staticmethod(lambda loss: loss.item())


class CountsByHand(WholeBatch):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.loss = self.loss_func(self.model(self.batch[0]), self.batch[1])
        if self.training:
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.n_updates += 1


class OutsideOfBatches(Trainer):
    def one_batch(self):
        self.run_callbacks("predict", "get_loss", "backward", "step", "zero_grad")


class WithoutLoss(WholeBatch):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.loss_func(self.model(self.batch[0]), self.batch[1]).backward()
        self.run_callbacks("step", "zero_grad")


def trainer_of(cls):
    set_seed(1)
    rows = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(4)]
    return cls(DataLoaders(rows, rows), F.mse_loss, optim.SGD, nn.Linear(3, 1), [BasicTrainCB()])


@pytest.mark.parametrize("cls", [WholeBatch, LossAsNumber, CountsByHand])
@pytest.mark.parametrize("options", [dict(max_mult=30.0), dict(n_batches=3)])
def test_a_batch_written_whole_is_judged_like_the_usual_one(cls, options):
    "It never was, until a rate was too large for any number"
    usual, own = (trainer_of(one).lr_find(**options) for one in (Trainer, cls))
    assert len(usual.losses) > 2 and (own.lrs, own.losses) == (usual.lrs, usual.losses)


@pytest.mark.parametrize(
    ("cls", "error", "told"),
    [
        (OutsideOfBatches, RuntimeError, "`OutsideOfBatches.one_batch` tells nobody when one is over"),
        (WithoutLoss, AttributeError, "`WithoutLoss.one_batch` has left none(.|\n)*Let it set `self.loss`"),
    ],
)
@pytest.mark.filterwarnings("ignore:`OutsideOfBatches.one_batch` replaces the span of a batch")
def test_a_batch_of_ones_own_that_cannot_be_judged_is_refused(cls, error, told):
    with pytest.raises(error, match=told):
        trainer_of(cls).lr_find()


@pytest.mark.filterwarnings("ignore:No rate")
def test_an_optimizer_of_ones_own_is_as_before():
    trainer = make_trainer(opt_func=None)
    trainer.opt = optim.Adam(trainer.model.parameters(), 1e-3)
    trainer.fit(1)
    before = observe(trainer)
    trainer.lr_find()
    unchanged(trainer, before)
    assert rate(trainer) == 1e-3


# When it ends


def losses_from(values):
    "A loss function with known values, which the model cannot change"
    values = iter(values)
    return lambda preds, targets: preds.sum() * 0 + next(values)


@pytest.mark.shows("ISA-67", "MIN-07")
@pytest.mark.parametrize(
    "max_mult, losses, n",
    [
        (3.0, [4, 2, 1, 2.9, 3.0, 3.01, 1, 1], 6),
        (2.0, [4, 2, 1, 1.9, 2.1, 1], 5),
        (1.5, [1, 1.4, 1.6, 1], 3),
        (3.0, [1, 10, 1], 2),
        (100.0, [1, 50, 99, 101, 1], 4),
    ],
)
@pytest.mark.filterwarnings("ignore:No rate")
def test_it_ends_when_the_loss_exceeds_a_multiple_of_the_best(max_mult, losses, n):
    finder = make_trainer(loss_func=losses_from(losses + [0.5] * 99)).lr_find(max_mult=max_mult)
    assert finder.losses == pytest.approx(losses[:n])


@pytest.mark.shows("MIN-07")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_it_ends_when_the_loss_is_no_number(bad):
    finder = make_trainer(loss_func=losses_from([3, 2, 1, bad, 1])).lr_find()
    assert finder.losses == [3, 2, 1] and len(finder.lrs) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_first_loss_that_is_no_number_is_an_error_without_a_trace(bad):
    trainer = make_trainer(loss_func=lambda preds, targets: preds.sum() * 0 + bad)
    before = observe(trainer)
    with pytest.raises(ValueError, match=f"very first loss is {bad}"):
        trainer.lr_find()
    unchanged(trainer, before)


@pytest.mark.filterwarnings("ignore:No rate")
def test_losses_below_zero_do_not_end_it():
    values = [-1.0, 2.0, -5.0, 50.0, -9.0, 3.0]
    assert make_trainer(loss_func=losses_from(values * 9)).lr_find(n_batches=6).losses == values


@pytest.mark.parametrize("n", [1, 2, 5, 11])
@pytest.mark.filterwarnings("ignore:No rate")
def test_it_ends_after_so_many_batches(n):
    "Also beyond one epoch, which has 5"
    finder = make_trainer(loss_func=losses_from([1.0] * 99)).lr_find(n_batches=n)
    assert len(finder.losses) == n


@pytest.mark.filterwarnings("ignore:No rate")
def test_by_default_it_ends_when_the_rate_would_exceed_100():
    lrs = make_trainer(loss_func=losses_from([1.0] * 999)).lr_find(1e-3, 1.5).lrs
    assert lrs[-1] < 100 <= lrs[-1] * 1.5


@pytest.mark.parametrize("limits", [[NBatchCB(1)], [OneBatchCB()]])
def test_limits_of_the_trainer_do_not_limit_the_search_for_long(limits):
    "A limit of the pass makes more passes; what only watches or decides takes no part"
    assert len(make_trainer(limits).lr_find(n_batches=6).lrs) == 6


class Stream:
    "A loader that nobody knows the length of"

    def __init__(self, n=None):
        self.n = n

    def __iter__(self):
        x, y = make_rows()
        return itertools.islice(itertools.cycle(zip(x.split(8), y.split(8))), self.n)


@pytest.mark.parametrize("n", [None, 3])
@pytest.mark.filterwarnings("ignore:No rate")
def test_a_stream_without_length(n):
    trainer = make_trainer(train=Stream(n))
    before = observe(trainer)
    assert len(trainer.lr_find(n_batches=20, start_lr=1e-4).lrs) == 20
    assert trainer.find_batch_size(max_size=4) == 4
    unchanged(trainer, before)


def test_further_callbacks_take_part_and_leave():
    cb = SeenCB("after_batch", lambda t: t.SeenCB is cb and t.n_epochs)
    trainer = make_trainer()
    for form in (cb, [cb], (cb, None), {cb}):
        trainer.lr_find(0.01, n_batches=3, callbacks=form)
        assert cb.seen == [3, 3] and not hasattr(trainer, "SeenCB"), "the last batch is cut short"
        cb.seen.clear()
    with pytest.raises(ValueError, match="LRFinderCB"):
        trainer.lr_find(callbacks=LRFinderCB())


@pytest.mark.parametrize("search", ["lr_find", "find_batch_size"])
def test_further_callbacks_keep_what_they_have_noted(search):
    "As those of `side_run` do"

    class NoteCB:
        def __init__(self):
            self.losses = []

        def after_get_loss(self, trainer):
            self.losses.append(trainer.loss.detach())

    cb = NoteCB()
    getattr(make_trainer(), search)(callbacks=cb)
    assert len(cb.losses) > 5


def test_watchers_hear_nothing(capsys):
    seen = SeenCB("after_batch", lambda t: 1)
    seen.order = Order.RECORD
    trainer = make_trainer([seen, MetricsCB(), ProgressCB("plain"), TrackingCB()])
    trainer.lr_find()
    assert (
        seen.seen == []
        and len(trainer.history) == len(trainer.history.batches) == 0
        and trainer.history.fit == -1
    )
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("cancel", [CancelFitException, CancelEpochException])
def test_a_search_that_another_callback_ends_at_once_says_so(cancel):
    def before_batch(trainer):
        raise cancel("not today")

    with pytest.raises(Exception) as e:
        make_trainer().lr_find(callbacks=before_batch)
    assert "rate" in str(e.value)


def test_a_warning_says_when_no_rate_helps():
    with pytest.warns(UserWarning, match="No rate from 1e-05 on"):
        make_trainer(loss_func=losses_from([1.0, 2, 2, 9])).lr_find()


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(start_lr=0), "`start_lr` is 0"),
        (dict(start_lr=-1), "`start_lr`"),
        (dict(start_lr=math.nan), "`start_lr` is nan"),
        (dict(lr_mult=1), "`lr_mult` is 1"),
        (dict(lr_mult=0.5), "`lr_mult`"),
        (dict(lr_mult=math.nan), "`lr_mult`"),
        (dict(max_mult=1), "`max_mult` is 1"),
        (dict(max_mult=math.nan), "`max_mult`"),
        (dict(n_batches=-1), "-1"),
        (dict(start_lr=math.inf), "start_lr|`lr`"),
        (dict(lr_mult=math.inf), "lr_mult"),
        (dict(n_batches=0), "n_batches"),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_was_typed(wrong, message):
    trainer = make_trainer()
    before = observe(trainer)
    with pytest.raises(ValueError, match=message):
        trainer.lr_find(**wrong)
    unchanged(trainer, before)


# The callback alone


@pytest.mark.shows("ISA-67", "ISA-68")
@pytest.mark.parametrize("fits", [0, 1])
def test_the_callback_alone_takes_back_weights_records_and_random_numbers(fits, capsys):
    "Begins at `fit`'s rate; others take part, and forget it"
    metrics, tracking = MetricsCB(accuracy=MulticlassAccuracy()), TrackingCB()
    trainer = make_trainer([metrics, ProgressCB("plain"), tracking])
    if fits:
        trainer.fit(1)
    rows, stats = (
        copy.deepcopy((trainer.history.rows, trainer.history.batches.columns)),
        copy.deepcopy(vars(tracking)),
    )
    weights, numbers = [bits(o) for o in trainer.model.state_dict().values()], random_states()
    finder = LRFinderCB(lr_mult=2.0)
    trainer.fit(9, lr=1e-4, callbacks=finder)
    assert finder.lrs[:3] == pytest.approx([1e-4, 2e-4, 4e-4]) and finder.lrs == sorted(finder.lrs)
    assert [bits(o) for o in trainer.model.state_dict().values()] == weights and random_states() == numbers
    assert (trainer.history.rows, trainer.history.batches.columns) == rows and vars(tracking) == stats
    assert "train_loss" in capsys.readouterr().out, "progress was shown while it ran"
    assert not hasattr(trainer, "LRFinderCB") and finder.plot(suggest=False)


@pytest.mark.shows("ISA-67")
def test_the_callback_alone_learns_nothing_from_validation():
    finder = LRFinderCB(n_batches=8)
    trainer = make_trainer(
        loss_func=lambda preds, targets: (
            F.cross_entropy(preds, targets) if torch.is_grad_enabled() else preds.sum() * math.nan
        )
    )
    trainer.fit(2, lr=1e-4, callbacks=finder)
    assert finder.lrs == pytest.approx([1e-4 * 1.3**i for i in range(8)])


def test_the_callback_can_be_used_twice():
    finder, trainer = LRFinderCB(n_batches=4), make_trainer()
    found = []
    for _ in range(2):
        trainer.fit(1, lr=1e-3, valid=False, callbacks=finder)
        found.append((finder.lrs, finder.losses))
    assert found[0] == found[1] and len(found[0][0]) == 4


@pytest.mark.shows("ISA-68")
def test_after_the_callback_alone_stays_what_the_fit_has_written_before():
    "The optimizer, fresh, the rate and the number of the fit; everything else is as before"
    trainer = make_trainer([MetricsCB()])
    trainer.fit(1, lr=1e-3)
    before, opt = observe(trainer.model), trainer.opt
    trainer.fit(1, lr=1e-5, callbacks=LRFinderCB())
    assert (trainer.lr, rate(trainer), trainer.history.fit, len(trainer.history)) == (1e-5, 1e-5, 1, 1)
    assert trainer.opt is not opt and not trainer.opt.state
    unchanged(trainer.model, before)
    trainer.fit(1, lr=1e-3)
    assert trainer.history.fit == 2


def test_an_error_before_the_finder_begins_is_the_only_one():
    first = SeenCB("before_fit", lambda t: 1 / 0)
    first.order = Order.FIRST - 1
    with pytest.raises(ZeroDivisionError) as e:
        make_trainer([first]).fit(1, callbacks=LRFinderCB())
    assert not any("besides" in o for o in e.value.__notes__)


# What it suggests

RATES = [10 ** (-5 + i / 20) for i in range(141)]


def curve(best):
    return [2 - 1.5 / (1 + (best / 10 / lr) ** 2) + (lr / best / 3) ** 4 for lr in RATES]


@pytest.mark.shows("F040", "MIN-07")
@pytest.mark.parametrize("best", [0.01, 0.1, 1.0])
def test_suggestions_on_a_known_curve(best):
    "Where it falls fastest, a tenth of the lowest, and two thirds along the fall"
    found = suggest_rates(RATES, curve(best))
    lowest = min(range(141), key=smooth(curve(best)).__getitem__)
    assert list(found) == ["valley", "steepest", "minimum/10"]
    assert found["minimum/10"] == RATES[lowest] / 10
    assert best / 30 < found["steepest"] < best / 2, "smoothing comes a little late"
    assert found["valley"] == RATES[lowest * 2 // 3], "the curve falls all the way"


@settings(max_examples=60, deadline=None)
@given(
    losses=st.lists(st.floats(-100, 100), min_size=5, max_size=60),
    scale=st.sampled_from([1.0, 7.0]),
    shift=st.floats(-5, 5),
)
def test_suggestions_lie_among_the_rates_and_ignore_trouble(losses, scale, shift):
    lrs = RATES[: len(losses)]
    found = suggest_rates(lrs, losses)
    assert (
        found["valley"] in lrs
        and found["steepest"] in lrs
        and found["minimum/10"] * 10 == pytest.approx(lrs[smooth(losses).index(min(smooth(losses)))])
    )
    assert found["valley"] <= found["minimum/10"] * 10 * 1.001


@pytest.mark.parametrize(
    "losses", [[1.0] * 5, [1.0, 2, 3, 4, 5], [5.0, 4, 3, 2, 1], [1e-300] * 9, [1.0, 1, 1, 1, 1, 0.5]]
)
def test_suggestions_on_odd_curves(losses):
    found = suggest_rates(RATES[: len(losses)], losses)
    assert all(math.isfinite(o) and o > 0 for o in found.values())


@pytest.mark.parametrize("n", [0, 1, 4])
def test_too_few_rates_are_an_error(n):
    with pytest.raises(ValueError, match=f"tried {n} rates"):
        suggest_rates(RATES[:n], [1.0] * n)
    finder = LRFinderCB()
    finder.lrs, finder.losses = RATES[:n], [1.0] * n
    with pytest.raises(ValueError, match=f"tried {n} rates"):
        finder.suggestions()


@given(values=st.lists(st.floats(-1e6, 1e6), max_size=30), beta=st.floats(0, 0.99))
def test_smoothing_stays_within_what_it_smooths(values, beta):
    smoothed = smooth(values, beta)
    assert len(smoothed) == len(values)
    for i, v in enumerate(smoothed, 1):
        assert min(values[:i]) - 1e-3 <= v <= max(values[:i]) + 1e-3
    assert smooth(values, 0) == values


@pytest.mark.shows("F040")
def test_the_suggested_rates_train():
    "All three rules lead to a lower loss than the smallest rate"
    trainer = make_trainer([MetricsCB()], opt_func=optim.SGD)
    finder = trainer.lr_find(1e-4)
    reached = {}
    for name, lr in [("smallest", 1e-4), *finder.suggestions().items()]:
        with trainer.snapshot():
            trainer.fit(3, lr=lr)
            reached[name] = trainer.history.latest("valid_loss")
    assert all(reached[o] < reached["smallest"] for o in finder.suggestions())


# The plot


@pytest.mark.shows("ISA-67")
def test_the_plot_has_a_logarithmic_axis_with_labels():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    finder = make_trainer().lr_find()
    n = len(plt.get_fignums())
    ax = finder.plot()
    assert isinstance(ax, plt.Axes) and (ax.get_xscale(), ax.get_yscale()) == ("log", "linear")
    assert "rate" in ax.get_xlabel() and "loss" in ax.get_ylabel()
    assert list(ax.lines[0].get_xdata()) == finder.lrs and list(ax.lines[0].get_ydata()) == finder.losses
    rules = [o.get_text().partition(":")[0] for o in ax.get_legend().get_texts()]
    assert rules == ["raw loss", "smoothed", "valley", "steepest", "minimum/10"]
    looks = {(o.get_linestyle(), o.get_marker()) for o in ax.lines if ":" in str(o.get_label())}
    assert len({style for style, _ in looks}) == len({mark for _, mark in looks}) == 3, "without colours"
    _, mine = plt.subplots()
    assert finder.plot(mine, suggest=False) is mine and len(mine.lines) == 2
    assert [o.get_text() for o in mine.get_legend().get_texts()] == ["raw loss", "smoothed"]
    assert len(plt.get_fignums()) == n + 2
    plt.close("all")
    with pytest.raises(ValueError, match="not tried any rate"):
        LRFinderCB().plot()


def test_a_notebook_shows_the_curve_of_a_finder_and_the_text_where_there_is_none():
    finder = make_trainer().lr_find()
    assert finder._repr_png_().startswith(b"\x89PNG")
    assert LRFinderCB()._repr_png_() is None
    short = LRFinderCB()
    short.lrs, short.losses = [0.001, 0.0013, 0.00169], [0.5, 0.4, 0.9]
    assert short._repr_png_() is None


def test_less_than_a_decade_has_ticks_at_its_ends():
    "Those of a logarithmic axis would run into one another"
    finder = LRFinderCB()
    finder.lrs, finder.losses = [0.001, 0.0013, 0.00169], [0.5, 0.4, 0.9]
    ax = finder.plot(suggest=False)
    assert [o.get_text() for o in ax.get_xticklabels()] == ["0.001", "0.0017"]
    assert not ax.xaxis.get_minorticklocs().size


def test_an_explosion_at_the_end_leaves_the_curve_in_sight():
    import matplotlib.pyplot as plt

    finder = LRFinderCB()
    finder.lrs, finder.losses = RATES[:9], [2.0, 2, 1.9, 1.7, 1.5, 1.2, 1.0, 1.1, 5000.0]
    bottom, top = finder.plot().get_ylim()
    assert 0.9 < bottom < 1 and 2 < top < 2.1
    plt.close("all")


@pytest.mark.shows("ISA-67")
@pytest.mark.parametrize("interactive", [False, True])
def test_in_a_fit_it_shows_what_it_found_and_stays_in_reach(interactive, capsys, monkeypatch):
    "Drawn where figures are shown as they are made; else nothing is drawn that nobody would see"
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "isinteractive", lambda: interactive)
    trainer = make_trainer()
    assert trainer.lr_finder is None
    n = len(plt.get_fignums())
    trainer.fit(callbacks=[finder := LRFinderCB()])
    assert capsys.readouterr().out == f"{finder}\n" and "steepest" in str(finder)
    assert trainer.lr_finder is finder and finder not in trainer.callbacks
    assert len(plt.get_fignums()) == n + interactive
    trainer.lr_find()
    trainer.fit(callbacks=[LRFinderCB(show=False)])
    assert capsys.readouterr().out == "" and trainer.lr_finder is not finder
    plt.close("all")


def test_a_search_that_ends_in_an_error_shows_nothing(capsys):
    trainer = make_trainer([SeenCB("after_batch", lambda t: 1 / 0)])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(callbacks=LRFinderCB())
    assert capsys.readouterr().out == ""


# Batch sizes


class Limited(nn.Module):
    "Has room for so many rows"

    def __init__(self, room, error=torch.OutOfMemoryError, message="out of memory"):
        super().__init__()
        self.norm, self.layer, self.room, self.error, self.message = (
            nn.BatchNorm1d(4),
            nn.Linear(4, 3),
            room,
            error,
            message,
        )

    def forward(self, x):
        sizes.append(len(x))
        if len(x) > self.room:
            raise self.error(self.message)
        return self.layer(self.norm(x))


sizes = []  # Outside of everything that is put back


@pytest.mark.shows("F026")
@pytest.mark.parametrize(
    "room, start, max_size, found, tried",
    [
        (300, 2, 65536, 256, [2, 4, 8, 16, 32, 64, 128, 256, 512]),
        (256, 2, 65536, 256, [2, 4, 8, 16, 32, 64, 128, 256, 512]),
        (255, 16, 65536, 128, [16, 32, 64, 128, 256]),
        (20, 3, 65536, 12, [3, 6, 12, 24]),
        (10**9, 2, 64, 64, [2, 4, 8, 16, 32, 64]),
        (10**9, 2, 63, 32, [2, 4, 8, 16, 32]),
        (5, 5, 5, 5, [5]),
        (2, 2, 99, 2, [2, 4]),
    ],
)
def test_the_largest_size_that_fits(room, start, max_size, found, tried):
    "Doubling from `start`, one batch each, also larger than the loader's"
    sizes.clear()
    trainer = make_trainer(model=Limited(room))
    before, numbers = observe(trainer), random_states()
    assert trainer.find_batch_size(start, max_size) == found
    assert sizes == tried
    unchanged(trainer, before)
    assert random_states() == numbers


@pytest.mark.parametrize(
    "error, message",
    [
        (torch.OutOfMemoryError, ""),
        (MemoryError, ""),
        (RuntimeError, "CUDA out of memory. Tried to allocate"),
        (RuntimeError, "MPS backend out of memory"),
        (
            RuntimeError,
            "[enforce fail at alloc_cpu.cpp:117] err == 0. "
            "DefaultCPUAllocator: can't allocate memory: you tried",
        ),
        (RuntimeError, "DefaultCPUAllocator: not enough memory: you tried"),
    ],
)
def test_memory_runs_out_in_many_words(error, message):
    assert make_trainer(model=Limited(16, error, message)).find_batch_size() == 16


@pytest.mark.parametrize(
    "error",
    [
        ValueError("shapes do not fit"),
        RuntimeError("no kernel"),
        IndexError("target 7 is out of bounds"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_come_out_unchanged_and_leave_no_trace(error):
    def fail(message):
        return error

    trainer = make_trainer(model=Limited(16, fail, ""))
    before, args = observe(trainer), error.args
    with pytest.raises(type(error)) as e:
        trainer.find_batch_size()
    assert e.value is error and error.args == args
    unchanged(trainer, before)
    trainer.model.room = 99
    trainer.fit(1)


@pytest.mark.parametrize("step", ["predict", "backward", "step"])
def test_memory_may_run_out_in_any_step(step):
    "After the weights have moved, too"

    class FullCB:
        order = 1

        def full(self, trainer):
            if len(trainer.batch[0]) > 32:
                raise torch.OutOfMemoryError("full")

    cb = FullCB()
    setattr(cb, f"after_{step}", cb.full)
    trainer = make_trainer([cb, MetricsCB()])
    trainer.fit(1)
    before = observe(trainer)
    assert trainer.find_batch_size() == 32
    unchanged(trainer, before)


@pytest.mark.parametrize("start", [1, 2, 9])
def test_nothing_fits(start):
    trainer = make_trainer(model=Limited(0))
    before = observe(trainer)
    with pytest.raises(RuntimeError, match=f"Not even a batch of {start} fits") as e:
        trainer.find_batch_size(start)
    assert isinstance(e.value.__cause__, torch.OutOfMemoryError)
    unchanged(trainer, before)


def test_the_tensors_that_did_not_fit_are_let_go():
    "Neither the trainer nor the error that is raised from holds them"
    import gc, weakref

    held = []

    class Holding(Limited):
        def forward(self, x):
            held.append(weakref.ref(x))
            return super().forward(x)

    with pytest.raises(RuntimeError) as e:
        make_trainer(model=Holding(0)).find_batch_size()
    cause = e.value.__cause__
    assert cause.__traceback__ is None
    del e
    gc.collect()
    assert all(o() is None for o in held)


def as_dicts(x, y):
    return [{"image": a, "label": b} for a, b in zip(x.split(8), y.split(8))]


def as_lists(x, y):
    return [[a, b] for a, b in zip(x.split(8), y.split(8))]


def nested(x, y):
    return [((a,), b) for a, b in zip(x.split(8), y.split(8))]


class Unwrapping(nn.Linear):
    def forward(self, x):
        return super().forward(x[0] if isinstance(x, tuple) else x)


@pytest.mark.shows("F026")
@pytest.mark.parametrize("make", [as_dicts, as_lists, nested])
def test_batches_of_any_kind_are_repeated(make):
    batches = make(*make_rows())
    before = copy.deepcopy(batches)
    seen = SeenCB("after_predict", lambda t: len(t.preds))
    assert make_trainer(model=Unwrapping(4, 3), train=batches).find_batch_size(3, 30, callbacks=seen) == 24
    assert seen.seen == [3, 6, 12, 24]
    assert str(batches) == str(before), "the loader's own batches are as they were"


def test_rows_are_repeated_in_order_and_scalars_left_alone():
    seen = SeenCB("before_predict", lambda t: (t.batch[0].tolist(), t.batch[1].tolist(), t.batch[2]))

    class Firsts(nn.Linear):
        def forward(self, x):
            return super().forward(x[:, None].float())

    trainer = make_trainer(
        model=Firsts(1, 1),
        train=[(torch.arange(3), torch.tensor(5.0), "text")],
        loss_func=lambda preds, *targets: preds.mean(),
    )
    trainer.find_batch_size(2, 8, callbacks=seen)
    assert [o[0] for o in seen.seen] == [[0, 1], [0, 1, 2, 0], [0, 1, 2, 0, 1, 2, 0, 1]]
    assert {o[1:] for o in seen.seen} == {(5.0, "text")}


@pytest.mark.parametrize("start, max_size", [(0, 8), (-2, 8), (100, 64)])
def test_a_size_that_cannot_be_meant_is_refused(start, max_size):
    with pytest.raises(ValueError, match="`start`|max_size"):
        make_trainer().find_batch_size(start, max_size)


@pytest.mark.parametrize(
    "given",
    [lambda cb: cb, lambda cb: [cb], lambda cb: (None, cb), lambda cb: None, lambda cb: {cb}],
    ids=["one", "list", "tuple", "none", "set"],
)
def test_callbacks_for_the_trials_in_any_form(given):
    cb = SeenCB("after_step", rate)
    assert make_trainer().find_batch_size(2, 8, callbacks=given(cb)) == 8
    assert len(cb.seen) == (0 if given(cb) is None else 3)


@pytest.mark.parametrize("search", ["lr_find", "find_batch_size"])
def test_a_trainer_with_a_group_of_callbacks_can_search(search):
    class Group:
        def __init__(self):
            self.callbacks = [DeviceCB("cpu")]

    _search(make_trainer([Group()]), search)


def test_a_search_of_too_few_batches_is_told_to_take_more():
    batches = [(torch.randn(8, 2), torch.randn(8, 1)) for _ in range(2)]
    callbacks = [BasicTrainCB(), LRFinderCB(n_batches=3, show=False)]
    trainer = Trainer(DataLoaders(batches), F.mse_loss, optim.SGD, nn.Linear(2, 1), callbacks)
    trainer.fit(9, lr=1e-5, valid=False)
    with pytest.raises(ValueError, match=r"tried 3 rates.*needs 5.*more batches \(`n_batches`\)"):
        trainer.lr_finder.suggestions()


def test_a_finder_says_what_it_found():
    "The last line of a cell showed an address"
    assert repr(LRFinderCB(1.5)) == "LRFinderCB(1.5): no rate tried yet"
    finder = LRFinderCB()
    finder.lrs, finder.losses = [1e-5 * 1.3**i for i in range(3)], [1.0, 1.0, 9.0]
    few = (
        "LRFinderCB(3 rates from 1e-05 to 1.7e-05; too few for suggestions; .plot(suggest=False) draws them)"
    )
    assert repr(finder) == few
    finder.lrs, finder.losses = [1e-5 * 1.3**i for i in range(30)], [2 - i / 20 for i in range(30)]
    assert repr(finder).startswith("LRFinderCB(30 rates from 1e-05 to 0.02; ") and all(
        f"{rule} {lr:.2g}" in repr(finder) for rule, lr in finder.suggestions().items()
    )
    assert repr(finder).endswith("; .plot() draws them)")


def test_rates_are_found_for_a_model_that_has_no_shape_yet():
    batches = [(torch.randn(8, 4), torch.zeros(8).long())] * 8
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    trainer = Trainer(DataLoaders(batches), F.cross_entropy, optim.SGD, model, [BasicTrainCB()])
    trainer.lr_find()
    trainer.fit(1, valid=False)
    assert model[1].num_batches_tracked == len(batches)


def test_a_keyword_to_show_the_curve_is_refused_with_the_method_that_does():
    trainer = Trainer(DataLoaders([1]), None, optim.SGD, nn.Linear(1, 1), [BasicTrainCB()])
    with pytest.raises(TypeError, match="keyword `show`, which it does not have.*plot"):
        trainer.lr_find(show=False)
