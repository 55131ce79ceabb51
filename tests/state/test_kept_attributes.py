"""An evaluation in the middle of a fit leaves weights, and all that the training goes on with, as they were.

Each test trains once without and once with evaluations: the weights are the same, bit for bit, whatever the
model, its loss function, a hook, a callback or a trainer of one's own keeps from one batch to the next.
"""

import collections
import copy
import functools
import warnings

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from isaac_loop.all import (
    BasicTrainCB,
    DataLoaders,
    EvaluatorCB,
    Order,
    Trainer,
    exact_loader,
    set_seed,
)
from isaac_loop.state.snapshot import put_all_back

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class LookCB:
    order = Order.DECIDE

    def __init__(self, look):
        self.look = look

    def after_batch(self, trainer):
        if trainer.training:
            self.look(trainer)


LOOKS = {
    "validate": lambda: LookCB(lambda trainer: trainer.validate()),
    "get_preds": lambda: LookCB(lambda trainer: trainer.get_preds(with_loss=True)),
    "EvaluatorCB": lambda: EvaluatorCB(updates=1),
}


def make_trainer(model, *callbacks, loss_func=F.cross_entropy, opt_func=optim.SGD, kind=Trainer):
    set_seed(0)
    rows = TensorDataset(X, Y)
    dls = DataLoaders(exact_loader(rows, 8, seed=3), exact_loader(rows, 12, shuffle=False))
    return kind(dls, loss_func, opt_func, model, [BasicTrainCB(), *callbacks])


def trained(*args, **kwargs):
    "A trainer after two epochs"
    trainer = make_trainer(*args, **kwargs)
    trainer.fit(2, lr=0.1, valid=False)
    return trainer


def stays_the_same(make_model, *makers, make_loss=lambda: F.cross_entropy, kind=Trainer, looks=LOOKS):
    "Whether an evaluation after each batch changes no weight"

    def weights(*more):
        set_seed(0)
        callbacks = [make() for make in makers]
        model = trained(make_model(), *callbacks, *more, loss_func=make_loss(), kind=kind).model
        return {k: x.tolist() for k, x in model.state_dict().items()}

    plain = weights()
    return all(weights(LOOKS[name]()) == plain for name in looks)


def linear():
    return nn.Linear(4, 2)


class LoRA(nn.Module):
    "Around a layer that is not trained, as in `peft`"

    def __init__(self):
        super().__init__()
        self.base, self.merged = linear().requires_grad_(False), False
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.ones(2, 2))

    def train(self, mode=True):
        if self.merged is mode:
            self.base.weight.data += (self.b @ self.a) * (-1 if mode else 1)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return self.base(x) if self.merged else self.base(x) + x @ self.a.T @ self.b.T


class Swapping(nn.Module):
    "Is evaluated with an average of its own"

    def __init__(self):
        super().__init__()
        self.out, self.own = linear(), None
        self.average = copy.deepcopy(self.out.state_dict())

    def train(self, mode=True):
        if not mode and self.own is None:
            self.own = copy.deepcopy(self.out.state_dict())
            self.out.load_state_dict(self.average)
        if mode and self.own is not None:
            self.out.load_state_dict(self.own)
            self.own = None
        return super().train(mode)

    def forward(self, x):
        if self.training:
            for k, v in self.out.state_dict().items():
                self.average[k].lerp_(v, 0.1)
        return self.out(x)


@pytest.mark.parametrize("model", [LoRA, Swapping, lambda: nn.Sequential(LoRA(), nn.Dropout(0.1))])
def test_weights_below_a_module_that_merges_or_swaps_them_stay(model):
    assert stays_the_same(model)


@pytest.mark.parametrize("model", [LoRA, Swapping])
def test_such_a_module_is_told_of_its_mode_after_any_run_on_the_side(model):
    trainer = trained(model())
    weights = [p.clone() for p in trainer.model.parameters()]
    trainer.model.train()
    with trainer.side_run() as side:
        side.fit(1, train=False)
    assert trainer.model.training
    for was, now in zip(weights, trainer.model.parameters()):
        torch.testing.assert_close(was, now)


class Meter:
    def __init__(self):
        self.sum, self.n = 0.0, 0

    def update(self, x):
        self.sum, self.n = self.sum + x.mean().item(), self.n + 1
        return self.sum / self.n


class Slots:
    __slots__ = ("n",)

    def update(self, x):
        self.n = getattr(self, "n", 0) + 1
        return 1 / self.n


class Ring:
    "Leads to itself, and to a list deep inside"

    n = 0

    def __init__(self):
        self.me, self.deep = self, {"a": [(Meter(),)]}

    @property
    def fails(self):
        raise ZeroDivisionError

    def update(self, x):
        type(self).n += 1
        return self.deep["a"][0][0].update(x) + type(self).n / 10


class Keeping(nn.Module):
    "Adds what it has met to its outputs"

    seen = []

    def __init__(self, kind):
        super().__init__()
        self.out, self.kind = linear(), kind
        self.register_buffer("mean", None if kind == "none" else torch.zeros(2), persistent=kind != "unsaved")
        self.array, self.held = np.zeros(2), HELD.get(kind, lambda: None)()
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        Ring.n = 0
        Keeping.seen.clear()

    def forward(self, x):
        y = self.out(x)
        return y + self.met(y.detach())

    def met(self, y):
        if self.kind in ("buffer", "unsaved", "none"):
            self.mean = 0.9 * (0 if self.mean is None else self.mean) + y.mean(0)
            return self.mean
        if self.kind == "array":
            self.array += y.numpy().mean(0)
            return torch.tensor(self.array).float()
        if self.kind == "class":
            self.seen.append(y.mean(0))
            return sum(self.seen)
        if self.kind == "parameter":
            with torch.no_grad():
                self.frozen.mul_(0.9).add_(y.mean(0))
            return self.frozen.clone()
        return (self.held[0] if self.kind == "list" else self.held).update(y)


HELD = {"object": Meter, "list": lambda: [Meter()], "slots": Slots, "ring": Ring}
KINDS = ["buffer", "unsaved", "none", "array", "class", "parameter", *HELD]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_model_keeps_in_whatever_it_holds_stays(kind):
    assert stays_the_same(lambda: Keeping(kind))


class KeepingLoss(Keeping):
    def forward(self, preds, targets):
        return F.cross_entropy(preds + self.met(preds.detach()), targets)


class PlainLoss:
    def __init__(self, held):
        self.held = held

    def __call__(self, preds, targets):
        return F.cross_entropy(preds * (1 + self.held.update(preds.detach())), targets)


def annealed():
    n, seen = 0, []

    def loss(preds, targets):
        nonlocal n
        n += 1
        seen.append(n)
        return F.cross_entropy(preds, targets) / (n + len(seen))

    return loss


LOSSES = {
    **{kind: functools.partial(KeepingLoss, kind) for kind in KINDS},
    "plain": lambda: PlainLoss(Ring()),
    "method": lambda: PlainLoss(Meter()).__call__,
    "names around it": annealed,
    "partial": lambda: functools.partial(annealed()),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_loss_function_keeps_in_whatever_it_holds_stays(loss):
    def make():
        Ring.n = 0
        return LOSSES[loss]()

    assert stays_the_same(linear, make_loss=make)


class Centre:
    "A hook that centres outputs"

    def __init__(self):
        self.mean = torch.zeros(2)

    def __call__(self, module, args, out):
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return out - self.mean


class SeenOutputs:
    "A hook that only looks"

    def __init__(self):
        self.n = 0

    def __call__(self, module, args, out):
        self.n += 1


def test_a_hook_that_changes_outputs_keeps_its_state_and_one_that_looks_keeps_what_it_saw():
    def model():
        made = linear()
        made.register_forward_hook(Centre())
        return made

    assert stays_the_same(model)
    looks = SeenOutputs()
    layer = linear()
    layer.register_forward_hook(looks)
    trained(layer, EvaluatorCB(updates=1))
    assert looks.n == 6 + 6 * 2


class OwnTrainer(Trainer):
    n = 0

    def __init__(self, *args):
        super().__init__(*args)
        self.mean, self.seen, self.meter = torch.zeros(2), [], Meter()
        OwnTrainer.n = 0

    def after_predict(self):
        OwnTrainer.n += 1
        self.mean.mul_(0.9).add_(self.preds.detach().mean(0), alpha=0.1)
        self.seen.append(1)
        scale = 1 + (len(self.seen) + self.meter.update(self.mean) + self.n) / 100
        self.preds = (self.preds - self.mean.clone()) * scale


def test_what_a_trainer_of_ones_own_changes_in_place_stays():
    assert stays_the_same(linear, kind=OwnTrainer)


class TopCB:
    "Uses a second network that the trainer has"

    def before_epoch(self, trainer):
        trainer.top[0].train(trainer.training)

    def after_predict(self, trainer):
        trainer.preds = trainer.preds + trainer.top[0](trainer.preds)


class Topped(Trainer):
    def __init__(self, *args):
        super().__init__(*args)
        self.top = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.3))]


def test_a_second_network_of_the_trainer_stays_in_its_mode():
    assert stays_the_same(linear, TopCB, kind=Topped)


class AloneCB:
    "Leaves a second network in its mode"

    def after_predict(self, trainer):
        trainer.preds = trainer.preds + trainer.top(trainer.preds)


class Counting(Trainer):
    def __init__(self, *args):
        super().__init__(*args)
        self.top = nn.BatchNorm1d(2)


def test_a_second_network_that_stays_in_training_counts_no_batches_of_an_evaluation():
    def counted(*looks):
        return trained(linear(), AloneCB(), *looks, kind=Counting).top.num_batches_tracked

    assert counted(EvaluatorCB(updates=1)) == counted() == 6


def test_after_any_run_on_the_side_a_second_network_is_in_its_mode():
    trainer = trained(linear(), TopCB(), kind=Topped)
    with trainer.side_run() as side:
        side.fit(1, train=False)
    assert all(m.training for m in trainer.top[0].modules())


class CountingCB:
    "Counts in its class"

    seen, n = [], 0

    def __init__(self):
        self.seen.clear()
        CountingCB.n = 0

    def after_get_loss(self, trainer):
        self.seen.append(1)
        CountingCB.n += 1
        trainer.loss = trainer.loss / (len(self.seen) + self.n)


def test_what_stands_in_the_class_of_a_callback_stays():
    assert stays_the_same(linear, CountingCB)


class UnlabelledCB:
    "Takes a batch of other rows for each batch, as semi-supervised training does"

    def __init__(self, again=True):
        self.again, self.it = again, None
        self.unlabelled = exact_loader(TensorDataset(X.flip(0)), 3, seed=9)

    def before_epoch(self, trainer):
        if self.again or self.it is None:
            self.it = iter(self.unlabelled)

    def before_batch(self, trainer):
        if (other := next(self.it, None)) is None:
            self.it = iter(self.unlabelled)
            other = next(self.it)
        x, y = trainer.batch
        trainer.batch = x + other[0].mean(0), y


class Semi(Trainer):
    "The same in a trainer"

    def __init__(self, *args):
        super().__init__(*args)
        self.unlabelled, self.it = exact_loader(TensorDataset(X.flip(0)), 3, seed=9), None

    def before_epoch(self):
        self.it = iter(self.unlabelled)

    def before_batch(self):
        x, y = self.batch
        self.batch = x + next(self.it)[0].mean(0), y


def test_a_loader_that_a_trainer_reads_beside_the_training_stands_where_it_stood():
    assert stays_the_same(linear, kind=Semi)


@pytest.mark.parametrize("again", [True, False])
def test_a_loader_that_a_callback_reads_beside_the_training_stands_where_it_stood(again):
    assert stays_the_same(linear, lambda: UnlabelledCB(again))


def test_a_model_that_builds_itself_with_buffers_in_an_evaluation_keeps_them():
    class Growing(nn.Module):
        built = False

        def forward(self, x):
            if not self.built:
                self.out, self.built = linear(), True
                self.register_buffer("scale", torch.ones(1))
            return self.out(x) * self.scale

    def before_fit(trainer):
        trainer.validate()
        trainer.opt = optim.SGD(trainer.model.parameters(), 0.1)

    before_fit.order = Order.DECIDE
    trainer = make_trainer(Growing(), before_fit, opt_func=None)
    trainer.fit(1)
    assert "scale" in trainer.model.state_dict()


def test_objects_without_end_do_not_hinder_an_evaluation():
    class Node:
        def __init__(self):
            self.next = None

    first = node = Node()
    for _ in range(50_000):
        node.next = node = Node()
    model = Keeping("object")
    model.chain = first
    trained(model, EvaluatorCB(updates=1))
    assert model.chain is first


def counting_like_cross_entropy():
    n = 0

    @functools.wraps(F.cross_entropy)
    def loss(preds, targets):
        nonlocal n
        n += 1
        return F.cross_entropy(preds, targets) * (1 + n / 10)

    return loss


class Around:
    "Counts, and otherwise passes for what it holds, also for the object of a method"

    def __init__(self, held):
        self.held, self.n = held, 0

    def __getattr__(self, name):
        return getattr(self.held, name)

    def __call__(self, preds, targets):
        self.n += 1
        return self.held(preds, targets) * (1 + self.n / 10)


@pytest.mark.parametrize("loss", [counting_like_cross_entropy, lambda: Around(nn.CrossEntropyLoss().forward)])
def test_a_loss_that_passes_for_another_keeps_its_count(loss):
    set_seed(0)
    alone = trained(nn.Linear(4, 2), loss_func=loss())
    set_seed(0)
    beside = make_trainer(nn.Linear(4, 2), EvaluatorCB(updates=1), loss_func=loss())
    beside.fit(2, lr=0.1, valid=False)
    assert all(map(torch.equal, alone.model.parameters(), beside.model.parameters()))


class Shift:
    "Has hooks that shift outputs by what they have seen"

    def __init__(self):
        self.n, self.counts = 0, collections.UserDict(n=0)

    def method(self, module, args, out):
        self.n += 1
        self.counts["n"] += 1
        return out * (1 + (self.n + self.counts["n"]) / 10)


def shifted(counts, module, args, out):
    counts.append(1)
    return out * (1 + len(counts) / 10)


def closure():
    n = 0

    def hook(module, args, out):
        nonlocal n
        n += 1
        return out * (1 + n / 10)

    return hook


class Normed:
    "Divides outputs by their mean size so far"

    def __init__(self):
        self.size = torch.ones(())

    def update(self, out):
        self.size = 0.9 * self.size + 0.1 * out.detach().abs().mean()
        return out / self.size

    def through(self, module, args, out):
        return self.update(out)

    @torch.no_grad()
    def no_gradients(self, module, args):
        return (self.update(args[0]),)


HOOKS = {
    "method": lambda: Shift().method,
    "partial": lambda: functools.partial(shifted, []),
    "closure": closure,
}
HOOKS["method that updates"] = lambda: Normed().through
HOOKS["partial of a closure"] = lambda: functools.partial(closure())


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_changes_outputs_keeps_its_state_whatever_it_is(kind):
    def model():
        made = linear()
        made.register_forward_hook(HOOKS[kind]())
        return made

    assert stays_the_same(model)


def test_a_hook_on_inputs_that_computes_no_gradients_keeps_its_state():
    def model():
        made = linear()
        made.register_forward_pre_hook(Normed().no_gradients)
        return made

    assert stays_the_same(model)


def test_a_function_that_only_looks_keeps_what_it_saw():
    seen, layer = [], linear()
    layer.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    trained(layer, EvaluatorCB(updates=1))
    assert len(seen) == 6 + 6 * 2


class Clipped(nn.Module):
    "Takes words, whose vectors PyTorch shortens in place"

    def __init__(self, norm=0.1):
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4, max_norm=norm), linear()

    def forward(self, x):
        return self.out(self.words((x.abs() * 4).long().clamp(max=8)[:, 0]))


class Teacher(nn.Module):
    "Has a second layer follow the first, also when it is evaluated"

    def __init__(self):
        super().__init__()
        self.out, self.teacher = linear(), linear().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.out.parameters()):
                p.lerp_(q, 0.1)
        return self.out(x) + self.teacher(x)


class Restless(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), linear()

    def forward(self, x):
        return self.out(self.norm.train()(x))


WRITERS = {Clipped: "words.weight", Teacher: "teacher.weight", Restless: "norm.num_batches_tracked"}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("look", LOOKS)
def test_an_evaluation_that_writes_to_weights_says_so(kind, look):
    with pytest.warns(UserWarning, match=f"An evaluation wrote to `model.{WRITERS[kind]}`"):
        trained(kind(), LOOKS[look]())


def test_what_lies_behind_very_many_objects_is_not_looked_at_and_the_user_hears_it():
    class Crowded(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.many = [[[i] for i in range(200)] for _ in range(60)]

    with pytest.warns(UserWarning, match="more than 10,000 objects"):
        trained(Crowded(), EvaluatorCB(updates=3))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_ctrl_c_while_things_are_put_back_leaves_nothing_undone(at):
    done, waits = [], [True]

    def step(i):
        if i == at and waits and waits.pop():
            raise KeyboardInterrupt
        if i == 1:
            done.append(i)
            raise ValueError
        done.append(i)

    errors = put_all_back([functools.partial(step, i) for i in range(3)])
    assert done == [0, 1, 2] and [type(e) for e in errors] == [KeyboardInterrupt, ValueError]


def with_hook(make_hook):
    layer = linear()
    layer.register_forward_hook(make_hook())
    return trained(layer, EvaluatorCB(updates=1))


def gatherers():
    "Hooks that gather what they see, each with what it gathers in"
    seen, some = [], []
    store = SeenOutputs()

    def returns(module, args, out):
        seen.append(1)
        return out

    def calls(module, args, out, name="a"):
        seen.append(name)

    yield seen, returns
    yield some, lambda module, args, out: some.append(dict(
        mean=out.mean().item(),
        std=out.std().item()))  # fmt: skip
    more = []
    yield more, lambda module, args, out: (lambda o: more.append(o))(len(out))
    yield store, lambda module, args, out: store(module, args, out)


@pytest.mark.parametrize("i", range(4))
def test_what_a_hook_gathers_in_an_evaluation_stays_however_it_is_written(i):
    held, hook = list(gatherers())[i]
    with_hook(lambda: hook)
    assert (held.n if isinstance(held, SeenOutputs) else len(held)) == 6 + 6 * 2


class ActsCB:
    "Looks at outputs, also in evaluations, by a function around its own method"

    order = Order.RECORD

    def before_fit(self, trainer):
        self.seen = []
        self.hook = trainer.model.register_forward_hook(lambda m, i, o: self.note(o) or o * 1)

    def note(self, out):
        self.seen.append(out.mean().item())

    def cleanup_fit(self, trainer):
        self.hook.remove()


@pytest.mark.parametrize("look", LOOKS)
def test_a_callback_of_the_training_keeps_what_its_hook_gathers(look):
    acts = ActsCB()
    trained(linear(), acts, LOOKS[look]())
    assert len(acts.seen) > 6


class CentreModule(nn.Module):
    "A module as a hook"

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, module, args, out):
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return out - self.mean


def test_a_module_as_a_hook_keeps_its_state():
    def model():
        made = linear()
        made.register_forward_hook(CentreModule())
        return made

    assert stays_the_same(model)


class OwnEMA:
    "Is evaluated with an average, and puts the weights back"

    def before_fit(self, trainer):
        self.average, self.own = copy.deepcopy(trainer.model.state_dict()), None

    def after_step(self, trainer):
        for k, v in trainer.model.state_dict().items():
            self.average[k].lerp_(v, 0.1)

    def before_epoch(self, trainer):
        if not trainer.training:
            self.own = copy.deepcopy(trainer.model.state_dict())
            trainer.model.load_state_dict(self.average)

    def cleanup_epoch(self, trainer):
        if self.own is not None:
            trainer.model.load_state_dict(self.own)
        self.own = None


def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 2))


@pytest.mark.parametrize("make, more", [(linear, [OwnEMA]), (lazy, []), (lambda: Clipped(100.0), [])])
def test_who_writes_the_values_that_were_there_is_not_told_of(make, more):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "An evaluation wrote")
        trained(make(), *[cb() for cb in more], EvaluatorCB(updates=1, at_start=True))


class ByData(Teacher):
    def forward(self, x):
        for p, q in zip(self.teacher.parameters(), self.out.parameters()):
            p.data = p.data * 0.9 + q.data * 0.1
        return self.out(x) + self.teacher(x)


def test_other_memory_for_a_weight_is_told_of():
    with pytest.warns(UserWarning, match="An evaluation wrote to `model.teacher.weight`"):
        trained(ByData(), EvaluatorCB(updates=1))


class Unbound:
    "Such as a proxy that stands for nothing yet"

    @property
    def __class__(self):
        raise RuntimeError("nothing is bound")


class Closed:
    @property
    def __dict__(self):
        raise OSError("closed")


class Holder(nn.Linear):
    def __init__(self, held):
        super().__init__(4, 2)
        self.held, self.n_calls = [held], 0

    def forward(self, x):
        self.n_calls += 1
        return super().forward(x) / self.n_calls


def test_what_cannot_be_kept_is_named_and_the_rest_is_kept():
    alone = trained(Holder(0))
    with pytest.warns(UserWarning, match="class Unbound.*nothing is bound"):
        evaluated = trained(Holder(Unbound()), EvaluatorCB(updates=1))
    assert torch.equal(alone.model.weight, evaluated.model.weight)


def test_what_does_not_show_its_attributes_hinders_nothing():
    class OwnCB:
        held = [Closed()]

        def after_batch(self, trainer):
            pass

    alone = trained(Holder(0))
    evaluated = trained(Holder(Closed()), OwnCB(), EvaluatorCB(updates=1))
    assert torch.equal(alone.model.weight, evaluated.model.weight)
