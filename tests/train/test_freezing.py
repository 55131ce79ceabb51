"Freezing: what moves in each epoch, under every optimizer, and what is put back after every kind of end."

import copy
import math

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.freezing import BatchNormEvalCB, FreezeCB, discriminative_rates, layer_groups
from isaac_loop.schedule.schedulers import BatchSchedulerCB
from isaac_loop.train.training import BasicTrainCB, MomentumTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelEpochException, CancelFitException, Order
from isaac_loop.loop.trainer import Trainer


def make_model():
    torch.manual_seed(0)
    model = nn.Module()
    model.body = nn.Sequential(
        nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4, bias=False)
    )  # A bias before a batch norm would not move
    model.norm, model.act, model.head = nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)
    model.forward = lambda x: model.head(model.act(model.norm(model.body(x))))
    return model


def make_batches(n=3):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 3, generator=g), torch.randn(6, 1, generator=g)) for _ in range(n)]


class MovedCB:
    "Which parameters each training pass has changed"

    order = Order.LAST

    def before_fit(self, trainer):
        self.moved = []

    def before_epoch(self, trainer):
        self.old = copy.deepcopy(dict(trainer.model.named_parameters()))

    def after_epoch(self, trainer):
        if trainer.training:
            self.moved.append(
                {n for n, p in trainer.model.named_parameters() if not torch.equal(p, self.old[n])}
            )


def fit(*callbacks, n_epochs=3, model=None, steps=None, opt_func=optim.SGD, **kwargs):
    batches = make_batches()
    trainer = Trainer(
        DataLoaders(batches, batches[:1]),
        F.mse_loss,
        opt_func,
        model or make_model(),
        [steps or BasicTrainCB(), MovedCB(), *callbacks],
    )
    trainer.fit(n_epochs, lr=0.1, **kwargs)
    return trainer


ALL = {n for n, _ in make_model().named_parameters()}
BODY = {"body.0.weight", "body.3.weight"}
BODY_NORM = {"body.1.weight", "body.1.bias"}
HEAD = {"head.weight", "head.bias"}
OPTIMIZERS = [
    optim.SGD,
    lambda ps, lr: optim.SGD(ps, lr, momentum=0.9, weight_decay=0.1),
    optim.AdamW,
    optim.RMSprop,
]


def all_learn(trainer):
    return all(p.requires_grad for p in trainer.model.parameters())


# Freezing


@pytest.mark.shows("NEMO-56", "PTA-49", "F049")
@pytest.mark.parametrize("opt_func", OPTIMIZERS, ids=["sgd", "momentum and decay", "adamw", "rmsprop"])
@pytest.mark.parametrize("steps", [BasicTrainCB, MomentumTrainCB])
@pytest.mark.parametrize("accumulate", [False, True])
def test_what_is_frozen_stays_bit_for_bit_whatever_the_optimizer_remembers(opt_func, steps, accumulate):
    "No momentum and no weight decay moves it, nor a gradient from before"
    trainer = fit(
        FreezeCB("body", until=3, start=1),
        *[AccumulationCB(2)] * accumulate,
        n_epochs=4,
        opt_func=opt_func,
        steps=steps(),
    )
    assert trainer.MovedCB.moved == [ALL, ALL - BODY, ALL - BODY, ALL]
    assert all_learn(trainer)
    assert sum(len(o["params"]) for o in trainer.opt.param_groups) == len(ALL), (
        "the optimizer has all of them from the beginning"
    )


def test_training_after_a_freeze_equals_training_with_the_flags_set_by_hand():
    by_hand, model = make_model(), make_model()
    opt = optim.SGD(by_hand.parameters(), 0.1, momentum=0.9)
    for epoch in range(3):
        for name, p in by_hand.named_parameters():
            p.requires_grad_(epoch > 0 or name not in BODY)
        for x, y in make_batches():
            F.mse_loss(by_hand(x), y).backward()
            opt.step()
            opt.zero_grad()
    fit(
        FreezeCB("body", until=1),
        model=model,
        opt_func=lambda ps, lr: optim.SGD(ps, lr, momentum=0.9),
        valid=False,
    )
    assert all(torch.equal(*o) for o in zip(model.parameters(), by_hand.parameters()))


@pytest.mark.shows("PTA-49")
@pytest.mark.parametrize(
    "parts, frozen",
    [
        ("body", BODY),
        ("body.*", BODY),
        ("body.[03]", BODY),
        (["body.0", "body.3"], BODY),
        ("*.bias", {"head.bias"}),
        ("body.0.weight", {"body.0.weight"}),
        (nn.Linear, BODY | HEAD),
        ({"body": None}, BODY),
        ({"body.0": 9, "head": (0, None)}, {"body.0.weight"} | HEAD),
    ],
)
def test_parts_are_named_in_many_ways(parts, frozen):
    assert fit(FreezeCB(parts)).MovedCB.moved == [ALL - frozen] * 3


def test_a_module_itself_can_be_named():
    model = make_model()
    assert fit(FreezeCB(model.body), model=model).MovedCB.moved == [ALL - BODY] * 3


@pytest.mark.shows("PTA-49")
def test_batch_norms_are_left_alone_unless_asked_for():
    assert fit(FreezeCB("body", batch_norms=True)).MovedCB.moved == [ALL - BODY - BODY_NORM] * 3


@pytest.mark.shows("PTA-49")
def test_each_part_has_its_own_range():
    "Gradual unfreezing"
    trainer = fit(FreezeCB({"body.0": 2, "body.3": 1, "head": (2, 3)}))
    assert trainer.MovedCB.moved == [ALL - BODY, ALL - {"body.0.weight"}, ALL - HEAD]


@pytest.mark.parametrize("swap", [1, -1])
def test_two_that_overlap_freeze_while_one_of_them_does(swap):
    first, second = FreezeCB("body", until=1), FreezeCB("body.0", until=2)
    second.name = "second"
    trainer = fit(*[first, second][::swap])
    assert trainer.MovedCB.moved == [ALL - BODY, ALL - {"body.0.weight"}, ALL] and all_learn(trainer)


def test_what_the_user_froze_stays_frozen():
    model = make_model()
    model.body[0].requires_grad_(False)
    trainer = fit(FreezeCB("body", until=1), model=model)
    assert trainer.MovedCB.moved[2] == ALL - {"body.0.weight"} and not model.body[0].weight.requires_grad


class RaiseCB:
    def __init__(self, exception):
        self.exception = exception

    def after_backward(self, trainer):
        raise self.exception("on purpose")


@pytest.mark.parametrize(
    "exception", [CancelEpochException, CancelFitException, ZeroDivisionError, KeyboardInterrupt]
)
def test_flags_and_modes_are_put_back_after_every_kind_of_end(exception):
    model, freeze, norm = make_model(), FreezeCB("body"), BatchNormEvalCB()
    try:
        fit(freeze, norm, RaiseCB(exception), model=model, valid=False)
    except (ZeroDivisionError, KeyboardInterrupt):
        pass
    assert all(p.requires_grad for p in model.parameters()) and all(o.training for o in model.modules())


def test_going_on_in_a_later_epoch_needs_no_state():
    "Which epoch it is says all"

    class LaterCB:
        def before_fit(self, trainer):
            trainer.epochs = range(1, 3)

    assert fit(FreezeCB("body", until=2), LaterCB()).MovedCB.moved == [ALL - BODY, ALL]


@pytest.mark.parametrize(
    "parts, error, words",
    [
        ("boddy", LookupError, "Did you mean `body`"),
        ("act", LookupError, "nothing of that kind"),
        (nn.Conv2d, LookupError, "nothing of that kind"),
        (nn.Linear(1, 1), LookupError, "nothing of that kind"),
        (3, TypeError, "names no part.*named by their numbers, as text: '3'"),
        ([None], TypeError, "None names no part"),
        ("*", ValueError, "every parameter"),
        ([], ValueError, r"`parts` is \[\].*nothing would be frozen"),
        ({}, ValueError, "nothing would be frozen"),
        ("", ValueError, "nothing would be frozen"),
        (["body", ""], LookupError, "nothing of that kind"),
    ],
)
def test_parts_that_cannot_be_frozen_are_an_error_before_the_first_batch(parts, error, words):
    class NoBatchCB:
        def before_batch(self, trainer):
            raise AssertionError("too late")

    model = make_model()
    with pytest.raises(error, match=words):
        fit(FreezeCB(parts, batch_norms=True), NoBatchCB(), model=model)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    "options",
    [
        dict(until=0),
        dict(until=1, start=1),
        dict(start=-1),
        dict(until=1.5),
        dict(until=True),
        dict(start="1"),
    ],
)
def test_a_range_of_epochs_is_two_numbers_in_order(options):
    with pytest.raises(ValueError, match="no range of epochs"):
        FreezeCB("body", **options)


def test_a_model_of_one_layer_has_parameters_and_no_parts():
    from isaac_loop.train.freezing import _parameters_of

    model = nn.Linear(2, 1)
    assert list(_parameters_of(model, "bias", "FreezeCB")) == ["bias"]
    with pytest.raises(LookupError, match=r"one layer, Linear.*\['weight', 'bias'\]. Did you mean `weight`"):
        _parameters_of(model, "weigth", "FreezeCB")


# Batch norms


def stats(model):
    return [
        o.clone()
        for m in model.modules()
        if isinstance(m, nn.BatchNorm1d)
        for o in (m.running_mean, m.running_var, m.num_batches_tracked)
    ]


@pytest.mark.shows("F049", "PTA-49")
@pytest.mark.parametrize(
    "parts, still",
    [
        (None, [0, 1, 2, 3, 4, 5]),
        ("body", [0, 1, 2]),
        ("body.1", [0, 1, 2]),
        (["norm"], [3, 4, 5]),
        (nn.BatchNorm1d, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_running_statistics_stay(parts, still):
    model = make_model()
    before = stats(model)
    trainer = fit(BatchNormEvalCB(parts), model=model)
    assert [i for i, o in enumerate(zip(before, stats(model))) if torch.equal(*o)] == still
    assert trainer.MovedCB.moved == [ALL] * 3, "scale and shift are parameters, and go on learning"


def test_only_frozen_batch_norms_follow_the_freeze():
    model = make_model()

    class StatsCB:
        def before_fit(self, trainer):
            self.all = [stats(model)]

        def after_epoch(self, trainer):
            self.all += [stats(model)] * trainer.training

    trainer = fit(
        FreezeCB("body", until=2, batch_norms=True), BatchNormEvalCB(only_frozen=True), StatsCB(), model=model
    )
    same = [
        [torch.equal(*o) for o in zip(a, b)] for a, b in zip(trainer.StatsCB.all, trainer.StatsCB.all[1:])
    ]
    assert same == [[True] * 3 + [False] * 3] * 2 + [[False] * 6]


def test_modes_are_those_of_the_trainer_outside_training_passes():
    class ModesCB:
        order = Order.LAST

        def before_fit(self, trainer):
            self.seen = []

        def before_batch(self, trainer):
            self.seen.append((trainer.training, trainer.model.norm.training, trainer.model.body.training))

    trainer = fit(BatchNormEvalCB(), ModesCB(), n_epochs=1)
    assert trainer.ModesCB.seen == [(True, False, True)] * 3 + [(False, False, False)]


@pytest.mark.parametrize("parts", ["head", "none", nn.Linear(1, 1)])
def test_a_part_without_batch_norms_is_an_error(parts):
    with pytest.raises(LookupError, match="finds no batch norm"):
        fit(BatchNormEvalCB(parts))


# Groups and rates


@pytest.mark.shows("PTA-49", "F048")
def test_layer_groups_are_the_children_with_parameters():
    model = make_model()
    assert list(layer_groups(model)) == ["body", "norm", "head"] and layer_groups(model)["head"] is model.head
    with pytest.raises(TypeError, match="has no parts"):
        layer_groups(lambda x: x)


@pytest.mark.shows("F048")
def test_rates_fall_from_group_to_group_and_schedules_keep_the_ratio():
    model = make_model()
    scheduler = BatchSchedulerCB(lambda opt: optim.lr_scheduler.ExponentialLR(opt, 0.5))
    seen = []

    class LrCB:
        order = Order.LAST

        def after_step(self, trainer):
            seen.append([o["lr"] for o in trainer.opt.param_groups])

    trainer = fit(scheduler, LrCB(), model=model, opt_func=discriminative_rates(optim.SGD, model), n_epochs=1)
    assert [len(o["params"]) for o in trainer.opt.param_groups] == [4, 2, 2]
    for rates in seen:
        assert [o / rates[-1] for o in rates] == pytest.approx([2.6**-2, 2.6**-1, 1])
    assert seen[0][-1] == pytest.approx(0.05)


def test_a_factor_of_one_is_no_discrimination_bit_for_bit():
    a, b = make_model(), make_model()
    fit(model=a, opt_func=discriminative_rates(optim.SGD, a, 1.0))
    fit(model=b)
    assert all(torch.equal(*o) for o in zip(a.parameters(), b.parameters()))


@pytest.mark.shows("F048")
def test_parts_have_the_rates_they_are_given_and_the_last_word_counts():
    model = make_model()
    trainer = fit(
        model=model,
        opt_func=discriminative_rates(optim.Adam, model, {"body": 0.1, "*.bias": 0.5}),
        n_epochs=1,
    )
    found = {id(p): o["lr"] for o in trainer.opt.param_groups for p in o["params"]}
    named = {n: round(found[id(p)], 6) for n, p in model.named_parameters()}
    assert named == {n: 0.05 if n.endswith("bias") else 0.01 if n.startswith("body") else 0.1 for n in ALL}


@pytest.mark.parametrize(
    "factors, error, words",
    [
        ({"bodi": 0.1}, LookupError, "Did you mean `body`"),
        ({"body": 0}, ValueError, "FreezeCB"),
        ({"body": math.nan}, ValueError, "number above 0"),
        (-1.0, ValueError, "number above 0"),
    ],
)
def test_rates_that_make_no_sense_are_refused_at_once(factors, error, words):
    with pytest.raises(error, match=words):
        discriminative_rates(optim.SGD, make_model(), factors)


def test_rates_for_another_model_are_an_error():
    with pytest.raises(ValueError, match="made for another model"):
        fit(opt_func=discriminative_rates(optim.SGD, make_model()))
