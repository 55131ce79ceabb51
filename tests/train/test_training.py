"""The steps of training and the limits (`train/training.py`), checked against loops written by hand.

`BasicTrainCB` is compared with the plain loop for every kind of batch, and with a trainer that has the
steps as its own methods; `MomentumTrainCB` with the momentum of `torch.optim.SGD`; `NBatchCB` and
`OneBatchCB` with counting on fingers.
"""

import copy
import warnings
from collections import OrderedDict, namedtuple
from itertools import count

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.train.training import BasicTrainCB, MomentumTrainCB, NBatchCB, OneBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelFitException, CancelStepException, Order, replaces
from isaac_loop.loop.trainer import Trainer
from small import StepsAsMethods

Pair = namedtuple("Pair", "x y")
AS_BATCH = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"image": x, "label": y},
    "ordered dict": lambda x, y: OrderedDict(first=x, second=y),
    "named tuple": Pair,
}


class Stream:
    "A loader that nobody knows the length of"

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class CountCB:
    "Counts finished batches by kind of pass"

    order = Order.RECORD

    def before_fit(self, trainer):
        self.train = self.valid = 0

    def after_batch(self, trainer):
        if trainer.training:
            self.train += 1
        else:
            self.valid += 1


def make_batches(n=22, size=8, seed=0):
    "Pairs of 3 features and 1 target, in batches of 8, 8 and 6"
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 3, generator=g), torch.randn(n, 1, generator=g)
    return list(zip(x.split(size), y.split(size)))


def make_trainer(batches, callbacks, model=None, valid=None, **kwargs):
    torch.manual_seed(1)
    return Trainer(
        DataLoaders(batches, valid, **kwargs), F.mse_loss, optim.SGD, model or nn.Linear(3, 1), callbacks
    )


def train_by_hand(model, batches, loss_of, n_epochs, lr, **kwargs):
    "Each batch goes whole to `loss_of`"
    opt = optim.SGD(model.parameters(), lr, **kwargs)
    for _ in range(n_epochs):
        for batch in batches:
            loss_of(batch).backward()
            opt.step()
            opt.zero_grad()


def same_weights(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# BasicTrainCB


@pytest.mark.shows("ISA-45")
@pytest.mark.parametrize("kind", AS_BATCH)
def test_any_kind_of_batch_trains_like_the_loop_by_hand(kind):
    batches, theirs = make_batches(), nn.Linear(3, 1)
    ours = copy.deepcopy(theirs)
    train_by_hand(theirs, batches, lambda b: F.mse_loss(theirs(b[0]), b[1]), 3, 0.1)
    made = [AS_BATCH[kind](x, y) for x, y in batches]
    make_trainer(made, BasicTrainCB(), ours, valid=made[:1]).fit(3, lr=0.1)
    assert same_weights(ours, theirs)


class TwoInTwoOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 1)

    def forward(self, first, second):
        return self.a(first), self.b(second * first)


def two_losses(preds, target_a, target_b):
    return F.mse_loss(preds[0], target_a) + 2 * F.l1_loss(preds[1], target_b)


@pytest.mark.shows("MIN-03", "ISA-45")
@pytest.mark.parametrize("as_dict", [False, True])
def test_several_inputs_and_several_targets_go_where_they_belong(as_dict):
    "The first `n_inp` entries to the model, all others to the loss"
    g = torch.Generator().manual_seed(3)
    batches = [tuple(torch.randn(5, n, generator=g) for n in (3, 3, 2, 1)) for _ in range(4)]
    theirs = TwoInTwoOut()
    ours = copy.deepcopy(theirs)
    train_by_hand(theirs, batches, lambda b: two_losses(theirs(b[0], b[1]), b[2], b[3]), 2, 0.05)
    made = [dict(zip("abcd", b)) for b in batches] if as_dict else batches
    Trainer(DataLoaders(made, n_inp=2), two_losses, optim.SGD, ours, BasicTrainCB()).fit(
        2, lr=0.05, valid=False
    )
    assert same_weights(ours, theirs)


def test_a_loss_without_targets_gets_the_predictions_alone():
    batches, theirs = [(x,) for x, _ in make_batches()], nn.Linear(3, 1)
    ours = copy.deepcopy(theirs)
    train_by_hand(theirs, batches, lambda b: theirs(b[0]).square().mean(), 2, 0.1)
    Trainer(DataLoaders(batches), lambda preds: preds.square().mean(), optim.SGD, ours, BasicTrainCB()).fit(
        2, lr=0.1, valid=False
    )
    assert same_weights(ours, theirs)


@pytest.mark.shows("ISA-45")
def test_a_trainer_with_its_own_split_decides_what_is_input_and_what_is_target():
    class TargetFirst(Trainer):
        def split(self, batch):
            return (batch[1],), (batch[0],)

    batches, theirs = make_batches(), nn.Linear(3, 1)
    ours = copy.deepcopy(theirs)
    train_by_hand(theirs, batches, lambda b: F.mse_loss(theirs(b[0]), b[1]), 2, 0.1)
    TargetFirst(DataLoaders([(y, x) for x, y in batches]), F.mse_loss, optim.SGD, ours, BasicTrainCB()).fit(
        2, lr=0.1, valid=False
    )
    assert same_weights(ours, theirs)


def test_fewer_entries_than_inputs_are_refused():
    with pytest.raises(
        ValueError, match="The batch has 2 entries, but `dls.n_inp` says that the first 3 are inputs"
    ):
        make_trainer(make_batches(), BasicTrainCB(), n_inp=3).fit(1, valid=False)


def test_a_bare_tensor_as_batch_is_refused():
    with pytest.raises(TypeError, match="The batch is a Tensor, which does not say what is input"):
        make_trainer([torch.ones(4, 3)], BasicTrainCB()).fit(1, valid=False)


class MomentumAsMethod(StepsAsMethods):
    def subclassing_method(self, mom=0.85):
        self.mom = mom

    def zero_grad(self):
        for p in self.model.parameters():
            p.grad *= self.mom


@pytest.mark.shows("MIN-02", "PTA-19")
def test_steps_may_be_methods_of_the_trainer():
    "The same loop in either style, bit for bit"
    batches, start = make_batches(), nn.Linear(3, 1)
    pairs = [
        (StepsAsMethods, {}, None),
        (Trainer, {}, BasicTrainCB()),
        (MomentumAsMethod, {"mom": 0.7}, None),
        (Trainer, {}, MomentumTrainCB(0.7)),
    ]
    plain, plain_cb, momentum, momentum_cb = models = [copy.deepcopy(start) for _ in pairs]
    for (cls, kwargs, cb), model in zip(pairs, models):
        trainer = cls(DataLoaders(batches, batches[:1]), F.mse_loss, optim.SGD, model, cb, **kwargs)
        trainer.fit(3, lr=0.05)
        assert trainer.n_updates == 9
    assert same_weights(plain, plain_cb) and same_weights(momentum, momentum_cb)
    assert not same_weights(plain, momentum) and not same_weights(plain, start)


@pytest.mark.shows("ISA-45")
def test_validation_changes_neither_weights_nor_gradients():
    "Only prediction and loss happen there"
    trainer = make_trainer(make_batches(), BasicTrainCB(), valid=make_batches(seed=5))
    before = copy.deepcopy(trainer.model)
    trainer.fit(2, train=False)
    assert same_weights(trainer.model, before)
    assert all(p.grad is None for p in trainer.model.parameters())
    assert not trainer.loss.requires_grad


@pytest.mark.parametrize(
    ("loss_func", "kind", "note"),
    [
        (lambda p, t: F.mse_loss(p, t).item(), AttributeError, "The loss is a float"),
        (lambda p, t: (p - t).square(), RuntimeError, "The loss has shape (8, 1)"),
        (lambda p, t: F.mse_loss(p.detach(), t), RuntimeError, "does not depend on any parameter"),
    ],
    ids=["a number", "one per row", "detached"],
)
def test_a_loss_that_cannot_be_differentiated_is_explained(loss_func, kind, note):
    trainer = make_trainer(make_batches(), BasicTrainCB())
    trainer.loss_func = loss_func
    with pytest.raises(kind) as caught:
        trainer.fit(1, valid=False)
    notes = "\n".join(caught.value.__notes__)
    assert note in notes
    assert "`BasicTrainCB.backward` at epoch 0, batch 0" in notes


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda trainer: setattr(trainer, "loss_func", None), "The trainer was made with `loss_func=None`"),
        (lambda trainer: setattr(trainer.dls, "n_inp", 2), "is said by `n_inp`"),
    ],
    ids=["no loss", "two inputs"],
)
def test_a_step_that_is_called_wrongly_is_explained(change, note):
    trainer = make_trainer(make_batches(), BasicTrainCB())
    change(trainer)
    with pytest.raises(TypeError) as caught:
        trainer.fit(1, valid=False)
    assert sum(note in o for o in caught.value.__notes__) == 1


@pytest.mark.parametrize(
    ("batch", "inputs", "targets"),
    [
        (
            (torch.ones(4, 3), torch.ones(4, 1), torch.ones(4)),
            "a tensor (4, 3)",
            "a tensor (4, 1), a tensor (4,)",
        ),
        ((torch.ones(4, 3),), "a tensor (4, 3)", "nothing"),
        (((torch.ones(4, 3), torch.ones(4, 3)), torch.ones(4, 1)), "a tuple", "a tensor (4, 1)"),
        (dict(y=torch.ones(4, 1), x=torch.ones(4, 3)), "a tensor (4, 1)", "a tensor (4, 3)"),
    ],
    ids=["three parts", "one part", "nested", "a dict in another order"],
)
def test_a_step_that_fails_says_which_part_of_an_odd_batch_went_where(batch, inputs, targets):
    trainer = make_trainer([batch], BasicTrainCB())
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        trainer.fit(1, valid=False)
    told = f"Of this batch the model got {inputs}, and the loss function {targets}."
    assert sum(o.startswith(told) and "`n_inp`" in o for o in caught.value.__notes__) == 1


XS, YS = np.ones((4, 3), dtype=np.float32), np.ones((4, 1), dtype=np.float32)


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ((XS, YS), r"the model got an array \(4, 3\).*Make tensors of these arrays"),
        ((XS.tolist(), YS.tolist()), "Make tensors of these lists"),
        (([*XS], torch.ones(4, 1)), "Make tensors of these lists"),
        ((torch.ones(4, 3), YS), r"and an array \(4, 1\) from the batch.*Make tensors of these arrays"),
        ((torch.ones(4, 3), YS.tolist()), "Make tensors of these lists"),
        (dict(x=XS, y=torch.ones(4, 1)), "Make tensors of these arrays"),
    ],
    ids=["arrays", "lists", "list of arrays", "array for the loss", "list for the loss", "mapping"],
)
def test_numbers_that_are_no_tensors_are_to_become_some(batch, told):
    trainer = make_trainer([batch], BasicTrainCB())
    with pytest.raises((TypeError, AttributeError)) as caught:
        trainer.fit(1, valid=False)
    assert sum(bool(re.search(told, o)) for o in caught.value.__notes__) == 1
    assert not any("`n_inp`" in o for o in caught.value.__notes__)


@pytest.mark.parametrize(
    "batch", [(["a", "b"], YS), ([torch.ones(2)], torch.ones(1)), (torch.ones(4, 2), YS, YS)]
)
def test_what_cannot_be_the_fault_of_arrays_is_not_put_on_them(batch):
    trainer = make_trainer([batch], BasicTrainCB())
    with pytest.raises((TypeError, AttributeError, RuntimeError)) as caught:
        trainer.fit(1, valid=False)
    assert not any("Make tensors" in o for o in caught.value.__notes__)


@pytest.mark.parametrize(
    ("x", "y", "loss_func", "told"),
    [
        (torch.ones(4, 3).double(), torch.ones(4, 1).double(), F.mse_loss, "got float64, and the"),
        (torch.ones(4, 3), torch.ones(4).int(), F.cross_entropy, "the targets are int32; .*long"),
        (
            torch.ones(4, 3),
            torch.ones(4, 1).long(),
            F.binary_cross_entropy_with_logits,
            "the targets are int64; ",
        ),
    ],
    ids=["doubles", "small integers", "integers for a loss of numbers"],
)
def test_types_of_numbers_that_do_not_fit_stand_side_by_side(x, y, loss_func, told):
    trainer = make_trainer([(x, y)], BasicTrainCB())
    trainer.loss_func = loss_func
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(1, valid=False)
    assert sum(bool(re.search(told, o)) for o in caught.value.__notes__) == 1


X, Y = torch.ones(4, 3), torch.ones(4).long()
ELSEWHERE = dict(device="meta")


@pytest.mark.parametrize(
    ("x", "y", "model", "loss_func", "told"),
    [
        (X, Y, nn.Linear(3, 2, **ELSEWHERE), F.cross_entropy, "the model on meta, the inputs on cpu"),
        (X.to("meta"), Y, nn.Linear(3, 2), F.cross_entropy, "the model on cpu, the inputs on meta"),
        (X, Y.to("meta"), nn.Linear(3, 2), F.cross_entropy, "the predictions on cpu, the targets on meta"),
        (
            X,
            Y,
            nn.Linear(3, 2),
            nn.CrossEntropyLoss(weight=torch.ones(2, **ELSEWHERE)),
            "the targets on cpu, the weights of the loss function on meta",
        ),
    ],
    ids=["model", "inputs", "targets", "weights of the loss"],
)
def test_what_is_on_another_device_is_named_with_the_cure(x, y, model, loss_func, told):
    trainer = make_trainer([(x, y)], BasicTrainCB())
    trainer.model, trainer.loss_func = model, loss_func
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(1, valid=False)
    assert sum(told in o and "Add `DeviceCB()`" in o for o in caught.value.__notes__) == 1


def words_trainer(model, ids):
    trainer = make_trainer([(torch.tensor(ids), torch.ones(2, 1))], BasicTrainCB())
    trainer.model = nn.Sequential(model, nn.Flatten(), nn.Linear(6, 1))
    return trainer


@pytest.mark.parametrize(
    ("ids", "told"),
    [([[1, 2], [3, 12]], "from 1 to 12, and `0` has 10"), ([[1, 2], [3, -1]], "from -1 to 3")],
)
def test_an_id_that_an_embedding_has_no_row_for_is_told_with_the_size_of_the_table(ids, told):
    with pytest.raises(IndexError) as caught:
        words_trainer(nn.Embedding(10, 3), ids).fit(1, valid=False)
    assert sum(told in o for o in caught.value.__notes__) == 1


class ListOfWords(nn.Embedding):
    def forward(self, x):
        return [x][1]


def test_an_index_of_a_list_is_not_taken_for_an_id():
    with pytest.raises(IndexError) as caught:
        words_trainer(ListOfWords(3, 3), [[1, 2], [3, 12]]).fit(1, valid=False)
    assert not any("The ids" in o for o in caught.value.__notes__)


def test_several_optimizers_or_models_in_one_place_are_explained():
    trainer = make_trainer(make_batches(), BasicTrainCB())
    trainer.opt_func, trainer.opt = None, [optim.SGD(trainer.model.parameters(), 0.1)]
    with pytest.raises(AttributeError) as caught:
        trainer.fit(1, valid=False)
    assert any(o.startswith("`trainer.opt` is a list") for o in caught.value.__notes__)
    trainer.model = (nn.Linear(3, 1), nn.Linear(3, 1))
    with pytest.raises((AttributeError, TypeError)):
        trainer.fit(1, valid=False)


def test_an_optimizer_set_by_hand_that_would_not_be_used_is_noticed():
    "It is used without `opt_func`; what fits and loads have left behind is no news"
    trainer = make_trainer(make_batches(), BasicTrainCB())
    trainer.opt = optim.SGD(trainer.model.parameters(), 0.1)
    trainer.dls.valid = trainer.dls.train
    trainer.fit(1, train=False)
    with pytest.warns(UserWarning, match="`trainer.opt` was set by hand"):
        trainer.fit(1, valid=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*set by hand")
        trainer.fit(1, valid=False)
        trainer.fit(1, valid=False, keep_opt=True)
        trainer.lr_find(n_batches=3)
        trainer.get_preds(trainer.dls.train)
        trainer.fit(1, valid=False)
        trainer.opt = None
        trainer.fit(1, valid=False)
        trainer.opt_func = None
        trainer.opt = mine = optim.SGD(trainer.model.parameters(), 0.1)
        trainer.fit(1, valid=False)
    assert trainer.opt is mine


def test_a_callback_is_asked_once_to_explain_its_own_error_and_never_a_cancel():
    asked = []

    class FailingCB:
        def __init__(self, event, error):
            self.error = error
            setattr(self, event, self.fail)

        def fail(self, trainer):
            raise self.error

        def explain(self, trainer, event, error):
            asked.append((event, error))

    class BystanderCB:
        def after_fit(self, trainer):
            pass

        def explain(self, trainer, event, error):
            raise AssertionError("the error is not mine")

    def fit(event, error):
        make_trainer(make_batches(), [BasicTrainCB(), BystanderCB(), FailingCB(event, error)]).fit(
            1, valid=False
        )

    for event in ("before_fit", "predict", "after_step", "cleanup_epoch"):
        error = ValueError(event)
        with pytest.raises(ValueError):
            fit(event, error)
        assert asked == [(event, error)]
        asked.clear()
    fit("before_batch", CancelFitException("enough"))
    with pytest.raises(CancelStepException):
        fit("before_batch", CancelStepException("no step is open"))
    assert not asked


# MomentumTrainCB


@pytest.mark.shows("ISA-58")
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.85, 1.0])
def test_momentum_is_that_of_sgd(momentum):
    batches = [(x.double(), y.double()) for x, y in make_batches()]
    theirs = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    ours = copy.deepcopy(theirs)
    start = copy.deepcopy(theirs)
    train_by_hand(theirs, batches, lambda b: F.mse_loss(theirs(b[0]), b[1]), 3, 0.02, momentum=momentum)
    make_trainer(batches, MomentumTrainCB(momentum), ours, valid=batches[:2]).fit(3, lr=0.02)
    for p, q, old in zip(ours.parameters(), theirs.parameters(), start.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
        assert not torch.equal(p, old)


class HalfUsed(nn.Module):
    "One layer is frozen and one never takes part"

    def __init__(self):
        super().__init__()
        self.frozen, self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.used(self.frozen(x))


@pytest.mark.shows("ISA-59")
def test_momentum_leaves_frozen_and_idle_parameters_alone():
    batches, ours = make_batches(), HalfUsed()
    theirs, start = copy.deepcopy(ours), copy.deepcopy(ours)
    train_by_hand(theirs, batches, lambda b: F.mse_loss(theirs(b[0]), b[1]), 2, 0.02, momentum=0.9)
    make_trainer(batches, MomentumTrainCB(0.9), ours).fit(2, lr=0.02, valid=False)
    torch.testing.assert_close(ours.used.weight, theirs.used.weight)
    assert not same_weights(ours.used, start.used)
    for name in ("frozen", "idle"):
        assert same_weights(getattr(ours, name), getattr(start, name))
        assert getattr(ours, name).weight.grad is None


@pytest.mark.shows("ISA-58")
def test_momentum_takes_its_other_steps_from_plain_training():
    "One method differs, and 0.85 is the default"
    own = [o for o in ("predict", "get_loss", "backward", "step", "zero_grad") if o in vars(MomentumTrainCB)]
    assert own == ["zero_grad"] and issubclass(MomentumTrainCB, BasicTrainCB)
    assert MomentumTrainCB().momentum == 0.85


@pytest.mark.parametrize("momentum", [-0.1, 1.01, float("nan")])
def test_a_momentum_beyond_0_to_1_is_refused(momentum):
    with pytest.raises(ValueError, match="`momentum` is .*such as 0.85"):
        MomentumTrainCB(momentum)


@pytest.mark.shows("ISA-44")
def test_training_twice_in_one_loop_is_refused():
    with pytest.raises(ValueError, match="every batch would do it twice"):
        make_trainer(make_batches(), [BasicTrainCB(), MomentumTrainCB()]).fit(1, valid=False)


class OtherStepCB:
    @replaces
    def step(self, trainer):
        trainer.opt.step()


class OtherTrainCB(BasicTrainCB):
    @replaces
    def step(self, trainer):
        trainer.opt.step()


def test_the_mends_for_training_twice_lead_to_a_loop_that_runs():
    "A subclass has the other steps as well, so `@replaces` helps only where there is no such base"
    mends = "Leave out `BasicTrainCB`.*`@replaces` in a class that is no subclass of `BasicTrainCB`"
    with pytest.raises(ValueError, match=mends):
        make_trainer(make_batches(), [BasicTrainCB(), OtherTrainCB()]).fit(1, valid=False)
    for callbacks in ([OtherTrainCB()], [BasicTrainCB(), OtherStepCB()]):
        trainer = make_trainer(make_batches(), callbacks)
        trainer.fit(1, valid=False)
        assert trainer.n_updates == len(make_batches())


# NBatchCB


@pytest.mark.shows("ISA-60")
@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 6),
    n_train=st.integers(1, 5),
    n_valid=st.integers(1, 5),
    n_epochs=st.integers(0, 3),
    stream=st.booleans(),
)
def test_each_pass_ends_after_its_batches(n, n_train, n_valid, n_epochs, stream):
    batches, counter = [(torch.ones(2, 3), torch.ones(2, 1))] * 5, CountCB()
    loaders = [batches[:n_train], batches[:n_valid]]
    if stream:
        loaders = [Stream(o) for o in loaders]
    trainer = make_trainer(loaders[0], [BasicTrainCB(), NBatchCB(n), counter], valid=loaders[1])
    trainer.fit(n_epochs)
    assert (counter.train, counter.valid) == (n_epochs * min(n, n_train), n_epochs * min(n, n_valid))
    assert trainer.n_updates == counter.train
    if not stream:
        assert trainer.total_updates == trainer.n_updates


@pytest.mark.shows("ISA-60")
def test_a_limit_makes_an_endless_stream_countable():
    "Without one, nobody can say how many updates there will be"

    class Endless:
        def __iter__(self):
            return ((torch.ones(2, 3), torch.ones(2, 1)) for _ in count())

    class AskCB:
        def before_fit(self, trainer):
            self.total = trainer.total_updates

        def before_epoch(self, trainer):
            self.n_batches = trainer.n_batches

    trainer = make_trainer(Endless(), [BasicTrainCB(), AskCB()], valid=Endless())
    with pytest.raises(ValueError, match="Limit it with `NBatchCB` or `LimitCB.updates.`"):
        trainer.fit(2)
    trainer.fit(2, callbacks=NBatchCB(4))
    assert (trainer.n_updates, trainer.AskCB.total, trainer.AskCB.n_batches) == (8, 8, 4)


@pytest.mark.shows("ISA-60")
def test_the_limit_is_gone_when_its_callback_is():
    trainer = make_trainer(make_batches(), [BasicTrainCB()])
    trainer.fit(2, callbacks=NBatchCB(2), valid=False)
    limited = trainer.n_updates, trainer.total_updates
    trainer.fit(2, valid=False)
    assert limited == (4, 4)
    assert (trainer.n_updates, trainer.total_updates) == (6, 6)


@pytest.mark.shows("ISA-60")
def test_one_batch_in_each_pass_is_the_default():
    counter = CountCB()
    make_trainer(make_batches(), [NBatchCB(), BasicTrainCB(), counter], valid=make_batches()).fit(3)
    assert (counter.train, counter.valid) == (3, 3)


@pytest.mark.shows("ISA-60")
def test_the_limit_comes_before_anybody_works_on_the_batch():
    "Whoever prepares batches never sees the one too many"
    seen = []

    class LookCB:
        order = Order.DEVICE

        def before_batch(self, trainer):
            seen.append(trainer.batch_num)

    make_trainer(make_batches(), [LookCB(), BasicTrainCB(), NBatchCB(2)]).fit(1, valid=False)
    assert seen == [0, 1]


@pytest.mark.parametrize("n", [0, -1, 1.5, True, None, "3"])
def test_a_limit_that_is_no_number_of_batches_is_refused(n):
    with pytest.raises(ValueError, match="`n_batches` is .*whole number of 1 or more"):
        NBatchCB(n)


# OneBatchCB


@pytest.mark.shows("ISA-61")
@pytest.mark.parametrize("stream", [False, True])
def test_the_fit_ends_after_one_batch(stream):
    "For everybody, whatever stands around it in the list"
    batches, counter = make_batches(), CountCB()
    trainer = make_trainer(
        Stream(batches) if stream else batches, [OneBatchCB(), BasicTrainCB(), counter], valid=batches
    )
    trainer.fit(5)
    assert (counter.train, counter.valid, trainer.n_updates, trainer.epoch, trainer.batch_num) == (
        1,
        0,
        1,
        0,
        0,
    )


@pytest.mark.shows("ISA-61")
def test_one_batch_of_validation_is_one_batch_too():
    counter = CountCB()
    trainer = make_trainer(make_batches(), [OneBatchCB(), BasicTrainCB(), counter], valid=make_batches())
    trainer.fit(5, train=False)
    assert (counter.train, counter.valid, trainer.n_updates) == (0, 1, 0)


@pytest.mark.shows("ISA-61")
def test_everybody_else_finishes_the_one_batch_first():
    "Its order is the last, and cleanups come as always"
    seen = []

    class WatchCB:
        order = Order.REPORT

        def after_batch(self, trainer):
            seen.append("after_batch")

        def cleanup_batch(self, trainer):
            seen.append("cleanup_batch")

        def after_epoch(self, trainer):
            seen.append("after_epoch")

        def cleanup_epoch(self, trainer):
            seen.append("cleanup_epoch")

        def log(self, trainer):
            seen.append("log")

        def after_fit(self, trainer):
            seen.append("after_fit")

        def cleanup_fit(self, trainer):
            seen.append("cleanup_fit")

    make_trainer(make_batches(), [OneBatchCB(), BasicTrainCB(), WatchCB()]).fit(2, valid=False)
    assert OneBatchCB.order == 100
    assert seen == ["after_batch", "cleanup_batch", "cleanup_epoch", "cleanup_fit"]


@pytest.mark.shows("ISA-61")
def test_a_trainer_is_as_good_as_new_after_one_batch():
    batches, theirs = make_batches(), nn.Linear(3, 1)
    ours = copy.deepcopy(theirs)
    train_by_hand(theirs, batches[:1], lambda b: F.mse_loss(theirs(b[0]), b[1]), 1, 0.1)
    train_by_hand(theirs, batches, lambda b: F.mse_loss(theirs(b[0]), b[1]), 2, 0.1)
    trainer = make_trainer(batches, [BasicTrainCB()], ours)
    trainer.fit(5, lr=0.1, callbacks=OneBatchCB(), valid=False)
    trainer.fit(2, lr=0.1, valid=False)
    assert same_weights(ours, theirs)
