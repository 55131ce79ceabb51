"""Accumulation (`train/accumulation.py`) against the big batch and against a loop written by hand.

Arithmetic is in double precision, so that "equal" leaves no room; where every operation is the same it is
bit for bit. Whatever makes a window odd is tried: unequal batches, cancelled ones, a pass that ends early,
gradients that were there before.
"""

import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.basics.tensors import set_seed
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.device.precision import MixedPrecisionCB
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.schedule.schedulers import BatchSchedulerCB
from isaac_loop.train.training import BasicTrainCB, MomentumTrainCB, NBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import (
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    Order,
)
from isaac_loop.loop.spans import with_cbs
from isaac_loop.loop.trainer import Trainer
from small import StepsAsMethods
from waiting import RefuseToWait


def make_data(n=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=g, dtype=torch.float64), torch.randn(
        n, 1, generator=g, dtype=torch.float64
    )


def cut(data, sizes):
    return list(zip(*(o.split(list(sizes)) for o in data)))


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def train(
    batches, *callbacks, steps=None, loss_func=F.mse_loss, opt_func=optim.SGD, n_epochs=2, lr=0.1, model=None
):
    "A trainer that has trained"
    callbacks = [MetricsCB(show=False) if o is MetricsCB else o for o in callbacks]
    trainer = Trainer(
        DataLoaders(batches),
        loss_func,
        opt_func,
        model or make_model(),
        [steps or BasicTrainCB(), *callbacks],
    )
    trainer.fit(n_epochs, lr=lr, valid=False)
    return trainer


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def grouped(sizes, n):
    "The big batches that belong to windows of n"
    return [sum(sizes[i : i + n]) for i in range(0, len(sizes), n)]


# It equals the big batch


@pytest.mark.shows("F023", "F024", "NEMO-59", "AIT-65")
@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=7),
    n=st.integers(1, 5),
    opt=st.sampled_from(
        [optim.SGD, optim.Adam, lambda params, lr: optim.SGD(params, lr, momentum=0.9, weight_decay=0.1)]
    ),
)
def test_windows_equal_big_batches(sizes, n, opt):
    "Unequal batches, a shorter last window, any optimizer"
    data = make_data(sum(sizes))
    small = train(cut(data, sizes), AccumulationCB(n), opt_func=opt)
    big = train(cut(data, grouped(sizes, n)), opt_func=opt)
    assert small.n_updates == big.n_updates == 2 * math.ceil(len(sizes) / n) == small.total_updates
    torch.testing.assert_close(weights(small), weights(big), rtol=1e-9, atol=1e-11)


def test_weighed_alike_a_short_last_window_is_the_mean_of_the_batches_it_has():
    data = make_data(8)
    small, big = train(cut(data, [2] * 4), AccumulationCB(3, "mean")), train(cut(data, [6, 2]))
    torch.testing.assert_close(weights(small), weights(big), rtol=1e-9, atol=1e-11)


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    n=st.integers(1, 4),
    momentum=st.sampled_from([0.0, 0.5, 0.85]),
)
def test_gradients_from_before_the_window_are_not_divided(sizes, n, momentum):
    "With `MomentumTrainCB` a part of the old gradients is there when a window begins"
    data = make_data(sum(sizes))
    small = train(cut(data, sizes), AccumulationCB(n), steps=MomentumTrainCB(momentum), n_epochs=3)
    big = train(cut(data, grouped(sizes, n)), steps=MomentumTrainCB(momentum), n_epochs=3)
    torch.testing.assert_close(weights(small), weights(big), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("weigh", ["samples", "mean", "sum"])
@pytest.mark.parametrize("steps", [BasicTrainCB, MomentumTrainCB])
def test_one_batch_to_an_update_is_no_accumulation_bit_for_bit(weigh, steps):
    data = cut(make_data(), [5, 5, 5, 5, 4])
    assert torch.equal(
        weights(train(data, AccumulationCB(1, weigh), steps=steps())), weights(train(data, steps=steps()))
    )


@pytest.mark.shows("F023")
def test_equal_batches_are_the_loop_by_hand_bit_for_bit():
    "Losses are untouched, and the sum of gradients is divided once"
    data, model = cut(make_data(), [6] * 4), make_model()
    opt = optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for i, (x, y) in enumerate(data):
            F.mse_loss(model(x), y).backward()
            if i % 2:
                for p in model.parameters():
                    p.grad /= 2
                opt.step()
                opt.zero_grad()
    assert torch.equal(
        weights(train(data, AccumulationCB(2))), torch.cat([p.detach().flatten() for p in model.parameters()])
    )


def test_a_sum_is_neither_weighed_nor_divided():
    data, loss = make_data(10), lambda preds, targets: F.mse_loss(preds, targets, reduction="sum")
    small, big = (
        train(o, *cbs, loss_func=loss, lr=0.01)
        for o, cbs in ((cut(data, [4, 3, 3]), [AccumulationCB(3, "sum")]), ([data], []))
    )
    torch.testing.assert_close(weights(small), weights(big), rtol=1e-12, atol=0)


@pytest.mark.shows("PTA-53", "F024")
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=6), n=st.integers(2, 4), as_tensor=st.booleans()
)
def test_tokens_are_the_weight_of_a_mean_over_tokens(lengths, n, as_tensor):
    "The count is a number or stays a tensor on the device, and is not known beforehand"
    g = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(len(lengths), 6, 3, generator=g, dtype=torch.float64),
        torch.randint(4, (len(lengths), 6), generator=g),
    )
    for row, length in zip(y, lengths):
        row[length:] = -100
    loss = lambda preds, targets: F.cross_entropy(preds.flatten(0, 1), targets.flatten(), ignore_index=-100)
    count = lambda batch: (batch[1] != -100).sum() if as_tensor else int((batch[1] != -100).sum())
    model = nn.Linear(3, 4).double()
    data = list(zip(x.split(1), y.split(1)))
    big = list(zip(x.split(n), y.split(n)))
    small = train(data, AccumulationCB(n, count), loss_func=loss, model=copy.deepcopy(model))
    torch.testing.assert_close(
        weights(small), weights(train(big, loss_func=loss, model=copy.deepcopy(model))), rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("counts", [[0, 2, 1], [2, 0, 0], [0, 0, 3]])
def test_a_batch_that_counts_nothing_adds_nothing(counts, as_tensor):
    data = cut(make_data(6), [2, 2, 2])
    data = [(x, y, torch.tensor(c)) for (x, y), c in zip(data, counts)]
    loss = lambda preds, targets, c: F.mse_loss(preds, targets)
    small = train(
        data,
        AccumulationCB(3, lambda batch: batch[2] if as_tensor else batch[2].item()),
        loss_func=loss,
        n_epochs=1,
    )
    model, total = make_model(), sum(counts)
    sum(F.mse_loss(model(x), y) * c / total for x, y, c in data).backward()
    ours, theirs = (
        weights(small),
        torch.cat([(p - 0.1 * p.grad).detach().flatten() for p in model.parameters()]),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


# Windows and the rest of the loop


@pytest.mark.shows("F023", "PTA-47", "NEMO-05")
def test_schedules_step_once_per_update_and_end_with_the_run():
    class LrCB:
        order = Order.LAST

        def before_fit(self, trainer):
            self.seen = []

        def after_step(self, trainer):
            self.seen.append((trainer.n_updates, trainer.opt.param_groups[0]["lr"]))

    scheduler = BatchSchedulerCB(
        lambda opt, trainer: optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=trainer.total_updates)
    )
    trainer = train(
        cut(make_data(10), [2] * 5), AccumulationCB(2), scheduler, cb := LrCB(), n_epochs=2, lr=0.6
    )
    assert [n for n, _ in cb.seen] == [1, 2, 3, 4, 5, 6]
    assert [lr for _, lr in cb.seen] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    assert trainer.updates_per_epoch == 3


@pytest.mark.parametrize("first", [True, False])
def test_a_limit_on_batches_comes_first_whatever_the_order_of_adding(first):
    pair = [NBatchCB(5), AccumulationCB(2)]
    trainer = train(cut(make_data(), [3] * 8), *(pair if first else pair[::-1]), n_epochs=2)
    assert trainer.updates_per_epoch == 3 and trainer.n_updates == 6
    big = train(cut(make_data(), [6, 6, 3, 9])[:3])
    torch.testing.assert_close(weights(trainer), weights(big), rtol=1e-10, atol=1e-12)


@pytest.mark.shows("NEMO-59")
@pytest.mark.parametrize("length", [None, 3, 8, 4])
def test_a_loader_with_no_length_or_a_wrong_one_loses_nothing(length):
    data = cut(make_data(12), [3] * 4 if length == 4 else [3, 3, 3, 3])[:3]

    class Loader:
        def __iter__(self):
            return iter(data)

    if length:
        Loader.__len__ = lambda self: length
    trainer = train(Loader(), AccumulationCB(2))
    torch.testing.assert_close(
        weights(trainer),
        weights(train(cut(make_data(12)[0:1] + make_data(12)[1:], [6, 3, 3])[:2])),
        rtol=1e-10,
        atol=1e-12,
    )
    assert trainer.n_updates == 4


class CancelCB:
    "Raises at one event of one batch"

    def __init__(self, event, batch, exception, order=0):
        self.order, self.batch, self.exception = order, batch, exception
        setattr(self, event, self._raise)

    def _raise(self, trainer):
        if trainer.batch_num == self.batch and trainer.training:
            raise self.exception("on purpose")


@pytest.mark.parametrize("event", ["before_batch", "before_predict", "after_get_loss", "before_backward"])
@pytest.mark.parametrize("batch", [0, 1, 2, 4])
def test_a_batch_cancelled_before_backward_is_not_in_the_window(event, batch):
    "The window waits for another one; the last window is stepped even if its last batch was cancelled"
    sizes = [2, 3, 4, 1, 5]
    pieces = cut(make_data(15), sizes)
    trainer = train(pieces, AccumulationCB(2), CancelCB(event, batch, CancelBatchException))
    kept = [o for i, o in enumerate(pieces) if i != batch]
    big = [tuple(map(torch.cat, zip(*kept[i : i + 2]))) for i in (0, 2)]
    torch.testing.assert_close(weights(trainer), weights(train(big)), rtol=1e-10, atol=1e-12)
    assert trainer.n_updates == 4


@pytest.mark.parametrize("order", [Order.FIRST, 0])
def test_a_backward_that_was_left_out_is_not_counted(order):
    trainer = train(
        cut(make_data(12), [3] * 4),
        AccumulationCB(2),
        CancelCB("before_backward", 1, CancelStepException, order),
        n_epochs=1,
    )
    pieces = cut(make_data(12), [3] * 4)
    big = [tuple(map(torch.cat, zip(pieces[0], pieces[2]))), pieces[3]]
    torch.testing.assert_close(weights(trainer), weights(train(big, n_epochs=1)), rtol=1e-10, atol=1e-12)


def test_a_step_that_another_callback_refuses_ends_the_window_all_the_same():
    trainer = train(
        cut(make_data(12), [3] * 4),
        AccumulationCB(2),
        CancelCB("before_step", 1, CancelStepException),
        n_epochs=1,
    )
    assert trainer.n_updates == 1
    torch.testing.assert_close(
        weights(trainer), weights(train(cut(make_data(12), [6, 6])[1:], n_epochs=1)), rtol=1e-10, atol=1e-12
    )


@pytest.mark.shows("AIT-65")
@pytest.mark.parametrize("at", [0, 2])
def test_a_stop_in_the_middle_of_a_window_steps_with_the_rest(at):
    class StopCB:
        def after_batch(self, trainer):
            if trainer.batch_num == at:
                trainer.request_stop("enough")

    trainer = train(cut(make_data(12), [3] * 4), AccumulationCB(2), StopCB(), n_epochs=5)
    assert trainer.n_updates == at // 2 + 1
    torch.testing.assert_close(
        weights(trainer),
        weights(train(cut(make_data(12), {0: [3, 9], 2: [6, 3, 3]}[at])[: at // 2 + 1], n_epochs=1)),
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize(
    "exception", [CancelEpochException, CancelFitException, ZeroDivisionError, KeyboardInterrupt]
)
def test_a_pass_that_breaks_off_leaves_no_half_window(exception):
    "Nothing is stepped, and nothing of it reaches a later fit"
    trainer = Trainer(
        DataLoaders(cut(make_data(12), [3] * 4)),
        F.mse_loss,
        optim.SGD,
        make_model(),
        [BasicTrainCB(), AccumulationCB(4)],
    )
    before = weights(trainer)
    cancel = CancelCB("after_batch", 1, exception)
    try:
        trainer.fit(1, valid=False, callbacks=cancel)
    except (ZeroDivisionError, KeyboardInterrupt):
        pass
    assert trainer.n_updates == 0 and torch.equal(weights(trainer), before)
    assert all(p.grad is None for p in trainer.model.parameters())
    trainer.fit(1, lr=0.1, valid=False, keep_opt=True)
    assert trainer.n_updates == 1
    torch.testing.assert_close(
        weights(trainer), weights(train([make_data(12)], n_epochs=1)), rtol=1e-10, atol=1e-12
    )


def test_a_cancelled_batch_in_the_closing_step_does_not_end_the_fit():
    class RefuseCB:
        def before_step(self, trainer):
            raise CancelBatchException("not this one")

    class Stream:
        def __iter__(self):
            return iter(cut(make_data(9), [3] * 3))

    trainer = train(Stream(), AccumulationCB(2), RefuseCB(), n_epochs=2)
    assert trainer.n_updates == 0 and trainer.epoch == 1


def test_losses_and_gradients_are_given_back_and_recorded_as_they_are():
    "What is weighed for backward is nobody else's business"

    class SeeCB:
        order = Order.LAST

        def before_fit(self, trainer):
            self.weighed, self.after = [], []

        def before_backward(self, trainer):
            self.weighed.append(trainer.loss.item())

        def after_batch(self, trainer):
            self.after.append(trainer.loss.item())

    pieces, model = cut(make_data(10), [4, 4, 2]), make_model()
    plain = [F.mse_loss(model(x), y).item() for x, y in pieces]
    trainer = train(pieces, AccumulationCB(3), MetricsCB, see := SeeCB(), n_epochs=1)
    assert see.after == plain and see.weighed == [*plain[:2], plain[2] / 2]
    assert trainer.history["train_loss"][0] == pytest.approx(
        sum(o * n for o, n in zip(plain, (4, 4, 2))) / 10
    )


def with_penalty(trainer):
    return trainer.loss + 0.5 * sum(p.square().sum() for p in trainer.model.parameters())


class PenaltyCB:
    def __init__(self, event):
        setattr(self, event, self.add)

    on_valid = False

    def add(self, trainer):
        trainer.loss = with_penalty(trainer)


@pytest.mark.parametrize("event", ["after_get_loss", "before_backward"])
def test_a_term_that_another_adds_to_the_loss_is_weighed_with_it(event):
    "The pieces are of unequal size, so it would count too much or too little alone"
    data = make_data(10)
    big = train([data], PenaltyCB(event))
    small = train(cut(data, [4, 4, 2]), AccumulationCB(3), PenaltyCB(event))
    torch.testing.assert_close(weights(small), weights(big), rtol=1e-10, atol=1e-12)


def test_who_looks_around_backward_sees_the_loss_as_it_was():
    seen = {"before_backward": [], "after_backward": [], "cleanup_backward": []}
    see = SimpleNamespace(
        **{event: lambda t, found=found: found.append(t.loss.item()) for event, found in seen.items()}
    )
    pieces, model = cut(make_data(10), [4, 4, 2]), make_model()
    train(pieces, AccumulationCB(3), see, n_epochs=1)
    plain = [F.mse_loss(model(x), y).item() for x, y in pieces]
    assert list(seen.values()) == [plain] * 3


@pytest.mark.parametrize("event", ["before_backward", "backward"])
def test_who_leaves_backward_out_leaves_the_window_and_the_loss_as_they_are(event):
    seen = []

    def leave(trainer):
        if trainer.batch_num == 3:
            raise CancelStepException("not this one")

    def look(trainer):
        seen.append(trainer.loss.item())

    pieces, steps = cut(make_data(12), [3, 3, 3, 1, 2]), BasicTrainCB()
    if event == "backward":
        steps.backward = lambda trainer: leave(trainer) or trainer.loss.backward()
        leaves = SimpleNamespace(after_batch=look)
    else:
        leaves = SimpleNamespace(before_backward=leave, after_batch=look)
    trainer = train(pieces, AccumulationCB(3), leaves, steps=steps, n_epochs=1)
    other = train([*pieces[:3], pieces[4]], AccumulationCB(3), n_epochs=1)
    assert trainer.n_updates == 2 and torch.equal(weights(trainer), weights(other))
    after = train(pieces[:3], AccumulationCB(3), n_epochs=1).model
    assert seen[3] == F.mse_loss(after(pieces[3][0]), pieces[3][1]).item()


def test_validation_is_left_alone():
    trainer = Trainer(
        DataLoaders(*[cut(make_data(9), [3] * 3)] * 2),
        F.mse_loss,
        optim.SGD,
        make_model(),
        [BasicTrainCB(), AccumulationCB(2)],
    )
    trainer.fit(2)
    assert trainer.n_updates == 4


@pytest.mark.parametrize("weigh", ["samples", lambda batch: (batch[1] > 0).sum()])
def test_nothing_waits(weigh):
    mode = RefuseToWait()
    mode.inside = True
    with mode:
        train(cut(make_data(), [5] * 4 + [4]), AccumulationCB(2, weigh), n_epochs=1)


# State


@pytest.mark.parametrize("steps", [BasicTrainCB, MomentumTrainCB])
@pytest.mark.parametrize("weigh", ["samples", lambda batch: torch.tensor(len(batch[0]))])
@pytest.mark.parametrize("at", range(5))
def test_going_on_from_a_saved_state_is_never_having_stopped(at, weigh, steps):
    class StopAndGoCB:
        order = Order.SAVE

        def after_batch(self, trainer):
            if trainer.batch_num == at:
                self.saved, self.grads = (
                    copy.deepcopy(trainer.AccumulationCB.state_dict()),
                    [None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()],
                )

    class RestoreCB:
        order = Order.FIRST - 1

        def before_batch(self, trainer):
            if trainer.batch_num != at + 1:
                return
            cb, see = trainer.AccumulationCB, trainer.StopAndGoCB
            cb._forget()
            cb.n, cb.total = 7, 99
            for p, g in zip(trainer.model.parameters(), see.grads):
                p.grad = None if see.saved["n"] else g
            cb.load_state_dict(see.saved)

    pieces = cut(make_data(14), [3, 2, 4, 1, 4])
    resumed = train(pieces, AccumulationCB(3, weigh), StopAndGoCB(), RestoreCB(), steps=steps())
    assert torch.equal(weights(resumed), weights(train(pieces, AccumulationCB(3, weigh), steps=steps())))


def test_state_is_plain_and_empty_between_windows():
    cb = AccumulationCB(2)
    train(cut(make_data(12), [3] * 4), cb)
    assert cb.state_dict() == dict(n=0, total=0, first=3, grads=[], aside=[])
    cb.load_state_dict(cb.state_dict())
    with pytest.raises(RuntimeError, match="while nothing is training"):
        cb.load_state_dict(dict(n=1, total=1.0, first=3, grads=[], aside=[]))


# Bad input


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2", None])
def test_a_window_is_a_whole_number_of_batches(n):
    with pytest.raises(ValueError, match="`n_batches` is"):
        AccumulationCB(n)


@pytest.mark.parametrize("weigh", ["tokens", None, 3])
def test_a_weight_that_is_none_is_refused_at_once(weigh):
    with pytest.raises(ValueError, match="`weigh` is"):
        AccumulationCB(2, weigh)


@pytest.mark.parametrize(
    "count, words",
    [
        (-1, "0 or more"),
        (math.nan, "0 or more"),
        (math.inf, "0 or more"),
        (None, "0 or more"),
        (torch.ones(3), "one weight"),
        (True, "0 or more"),
    ],
)
def test_a_count_that_cannot_weigh_is_an_error(count, words):
    with pytest.raises(ValueError, match=words):
        train(cut(make_data(4), [2, 2]), AccumulationCB(2, lambda batch: count))


def test_inputs_without_rows_need_a_stated_weight():
    batches = [(torch.tensor(1.0), torch.tensor(2.0))]
    model = type(
        "Scale",
        (nn.Module,),
        {
            "__init__": lambda self: (
                nn.Module.__init__(self),
                setattr(self, "w", nn.Parameter(torch.ones(()))),
            )[0],
            "forward": lambda self, x: self.w * x,
        },
    )()
    with pytest.raises(TypeError, match="`weigh='mean'`"):
        train(batches, AccumulationCB(2), model=model)
    assert train(batches, AccumulationCB(2, "mean"), model=model).n_updates == 2


@pytest.mark.shows("PTA-52", "AIT-52")
def test_clipping_meets_the_whole_gradient_once():
    "Once per update, on the sum, not on each piece"
    pieces = cut(make_data(12), [3] * 4)
    small = train(pieces, AccumulationCB(2), ClipGradCB(0.05))
    torch.testing.assert_close(
        weights(small), weights(train(cut(make_data(12), [6, 6]), ClipGradCB(0.05))), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("loss_func", [nn.MSELoss(reduction="sum"), partial(F.mse_loss, reduction="sum")])
def test_a_loss_that_says_it_is_a_sum_is_not_taken_for_a_mean(loss_func):
    "Its gradients were weighed by rows once more, in silence"
    batches = [(torch.ones(n, 1), torch.ones(n, 1) * 3) for n in (8, 2)]

    def gradient(cb, loss_func, data):
        trainer, found = (
            Trainer(DataLoaders(data), loss_func, optim.SGD, nn.Linear(1, 1), [BasicTrainCB(), *cb]),
            [],
        )
        nn.init.ones_(trainer.model.weight)
        nn.init.zeros_(trainer.model.bias)
        trainer.fit(
            1,
            valid=False,
            callbacks=SimpleNamespace(
                before_step=lambda t: found.append(t.model.weight.grad.item()), order=50, name="look"
            ),
        )
        return found[-1]

    with pytest.raises(ValueError, match="weigh='sum'"):
        gradient([AccumulationCB(2)], loss_func, batches)
    whole = [tuple(torch.cat(o) for o in zip(*batches))]
    assert gradient([AccumulationCB(2, weigh="sum")], loss_func, batches) == gradient([], loss_func, whole)


def test_batches_beyond_the_length_that_was_known_are_gathered_as_the_others():
    def before_epoch(trainer):
        trainer.batches = (b for b in trainer.batches for _ in range(2))

    seen = []
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(8)]
    callbacks = [BasicTrainCB(), AccumulationCB(4), before_epoch]
    trainer = Trainer(DataLoaders(batches), F.mse_loss, optim.SGD, nn.Linear(3, 1), callbacks)

    def after_step(trainer):
        seen.append(trainer.batch_num)

    trainer.fit(1, valid=False, callbacks=after_step)
    assert seen == [3, 7, 11, 15]


class CriticCB:
    "A network beside the model, with an optimizer of its own, that learns through the loss of the model"

    on_valid = False

    def __init__(self, step="after_step", set_to_none=True):
        self.set_to_none = set_to_none
        setattr(self, step, self.learn)

    def before_fit(self, trainer):
        torch.manual_seed(5)
        self.net = nn.Linear(3, 1).double()
        self.opt = optim.SGD(self.net.parameters(), 0.1)

    def after_get_loss(self, trainer):
        x, y = trainer.batch
        trainer.loss = trainer.loss + F.mse_loss(self.net(x), y)

    def learn(self, trainer):
        self.opt.step()
        self.opt.zero_grad(set_to_none=self.set_to_none)


class OwnCritic(Trainer):
    "The same as attributes of the trainer"

    def before_fit(self):
        torch.manual_seed(5)
        self.net = nn.Linear(3, 1).double()
        self.opt_c = optim.SGD(self.net.parameters(), 0.1)

    def after_get_loss(self):
        CriticCB.after_get_loss(self, self)

    def after_step(self):
        self.opt_c.step()
        self.opt_c.zero_grad()


def with_critic(batches, *callbacks, cls=Trainer, n_epochs=2):
    t = cls(DataLoaders(batches), F.mse_loss, optim.SGD, make_model(), [BasicTrainCB(), *callbacks])
    t.fit(n_epochs, lr=0.1, valid=False)
    return [*t.model.parameters(), *(t if cls is OwnCritic else t.CriticCB).net.parameters()]


def are_close(one, other):
    return all(map(torch.allclose, one, other))


SIZES = [5, 3, 4, 8, 4]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_network_beside_the_model_gets_the_gradient_of_the_big_batch(set_to_none):
    big = with_critic(cut(make_data(), [8, 12, 4]), CriticCB())
    critic = CriticCB(set_to_none=set_to_none)
    assert are_close(with_critic(cut(make_data(), SIZES), critic, AccumulationCB(2)), big)


def test_a_second_network_of_the_trainer_gets_the_gradient_of_the_big_batch_and_is_not_clipped():
    big = with_critic(cut(make_data(), [8, 12, 4]), cls=OwnCritic)
    assert are_close(with_critic(cut(make_data(), SIZES), AccumulationCB(2), cls=OwnCritic), big)
    clipped = with_critic(cut(make_data(), SIZES), AccumulationCB(2), ClipGradCB(1e-3), cls=OwnCritic)
    assert are_close(clipped[-2:], big[-2:]) and not are_close(clipped[:-2], big[:-2])


@pytest.mark.parametrize("step", ["after_backward", "after_batch"])
def test_a_network_beside_the_model_that_steps_after_each_batch_is_left_alone(step):
    batches = cut(make_data(), [4] * 6)
    alone, gathered = (with_critic(batches, CriticCB(step), *cbs) for cbs in ((), (AccumulationCB(2),)))
    assert all(map(torch.equal, alone[-2:], gathered[-2:]))


def test_a_network_that_goes_backward_by_itself_before_a_window_has_that_part_undivided():
    class AheadCB(CriticCB):
        def before_epoch(self, trainer):
            x, y = make_data()
            F.mse_loss(self.net(x), y).backward()

    AheadCB.name = "CriticCB"
    big = with_critic(cut(make_data(), [8, 12, 4]), AheadCB())
    assert are_close(with_critic(cut(make_data(), SIZES), AheadCB(), AccumulationCB(2)), big)


def test_a_run_that_goes_on_in_a_window_knows_what_weighs_in_the_gradients_of_others(tmp_path):
    def run(folder, *others):
        save = CheckpointCB(folder, every=1)
        cbs = CriticCB(), AccumulationCB(3), save, *others
        dls = DataLoaders(exact_loader(list(zip(*make_data())), 5, seed=3))
        t = Trainer(dls, F.mse_loss, optim.SGD, make_model(), [BasicTrainCB(), *cbs])
        t.fit(2, lr=0.1, valid=False)
        return [*t.model.parameters(), *t.CriticCB.net.parameters()]

    def before_batch(trainer):
        if (trainer.epoch, trainer.batch_num) == (1, 2):
            raise KeyboardInterrupt

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", before_batch)
    assert all(map(torch.equal, run(tmp_path / "cut"), whole))


@pytest.mark.parametrize("step, warns", [("after_step", True), ("after_backward", False)])
def test_a_network_that_would_step_with_scaled_gradients_is_named_once(step, warns, recwarn):
    critic, batches = CriticCB(step), cut(make_data(), SIZES)
    with_critic(batches, critic, MixedPrecisionCB("float16", init_scale=8.0))
    told = [str(o.message) for o in recwarn if "`CriticCB.net.weight` has got a gradient" in str(o.message)]
    assert len(told) == warns


# A batch of one's own


def own_batch(*lines):
    "A trainer whose batch is written whole"

    class Own(StepsAsMethods):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            self.preds = self.model(self.batch[0])
            self.loss = self.loss_func(self.preds, self.batch[1])
            for line in lines if self.training else ():
                line(self)

    return Own


def run(*events):
    return lambda trainer: trainer.run_callbacks(*events)


def fitted(cls, *callbacks):
    dls = DataLoaders(cut(make_data(), SIZES))
    trainer = cls(dls, F.mse_loss, optim.SGD, make_model(), [*callbacks, AccumulationCB(2)])
    trainer.fit(1, lr=0.1, valid=False)
    return trainer


def test_a_step_with_gradients_of_an_unknown_backward_is_refused():
    "It used to gather for ever, so that nothing was trained"
    own = own_batch(lambda o: o.loss.backward(), run("step"), lambda o: o.opt.zero_grad())
    with pytest.raises(RuntimeError, match="`Own.one_batch` has come to a step .* the event `backward`"):
        fitted(own)


@pytest.mark.parametrize("at_end", [True, False])
def test_gradients_that_are_cleared_in_the_middle_of_a_window_are_refused(at_end):
    "The update would be that of its last batch"
    lines = [run("backward", "step"), lambda o: o.opt.zero_grad()][:: 1 if at_end else -1]
    with pytest.raises(RuntimeError, match="gone at batch 1, .* `Own.one_batch` clears them itself"):
        fitted(own_batch(*lines))


def every_second(trainer):
    if trainer.batch_num % 2 or trainer.batch_num + 1 == trainer.n_batches:
        trainer.run_callbacks("step", "zero_grad")


@pytest.mark.parametrize("lines", [[run("backward", "step", "zero_grad")], [run("backward"), every_second]])
def test_a_batch_of_ones_own_with_all_events_gathers_as_the_built_in_one(lines):
    own, built_in = fitted(own_batch(*lines)), fitted(Trainer, BasicTrainCB())
    assert own.n_updates == 3 and torch.equal(weights(own), weights(built_in))


def by_hand(trainer):
    trainer.opt.step()
    trainer.n_updates += 1


def test_a_step_by_hand_in_the_middle_of_a_window_is_refused_before_it_is_made():
    "Each batch stepped with the sum of all so far"
    before = make_model()
    trainers = []

    class NoteCB:
        def before_fit(self, trainer):
            trainers.append(trainer)

    own = own_batch(run("backward"), by_hand, run("zero_grad"))
    with pytest.raises(RuntimeError, match="In batch 0 .* outside the event `step`.*`Own.one_batch` step by"):
        fitted(own, NoteCB())
    (trainer,) = trainers
    assert all(map(torch.equal, trainer.model.parameters(), before.parameters()))
    assert trainer.opt._optimizer_step_pre_hooks == {}


def test_a_step_in_a_span_of_ones_own_and_one_of_another_optimizer_are_right():
    class InSpan(StepsAsMethods):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            self.run_callbacks("predict", "get_loss", "backward")
            self.critic.zero_grad()
            self.update()
            self.run_callbacks("zero_grad")
            self.loss_func(self.critic(self.batch[0]), self.batch[1]).backward()
            self.opt_c.step()

        @with_cbs("step", CancelStepException)
        def update(self):
            by_hand(self)

        def before_fit(self):
            self.critic = nn.Linear(3, 1).double()
            self.opt_c = optim.SGD(self.critic.parameters(), 0.1)

    own, built_in = fitted(InSpan), fitted(Trainer, BasicTrainCB())
    assert own.n_updates == 3 and torch.equal(weights(own), weights(built_in))


# A second optimizer for a part of the model


def optimizers_in(trainer):
    "One of the first layer, which the loop steps, and one of the last"
    return (optim.SGD(trainer.model[i].parameters(), 0.1) for i in (0, 2))


def two_optimizers(*lines, after_step=None, hold=lambda t, opt: setattr(t, "opt_head", opt)):
    "A trainer with a batch of its own, and what is done in it"

    class Two(own_batch(*lines)):
        def before_fit(self):
            self.opt, self.head = optimizers_in(self)
            hold(self, self.head)
            del self.head

    if after_step:
        Two.after_step = after_step
    return Two


def steps_head(trainer):
    trainer.opt_head.step()


def clears_head(trainer):
    trainer.opt_head.zero_grad()


def clips_head(trainer):
    nn.utils.clip_grad_norm_(trainer.model[2].parameters(), 1e-3)


def steps_and_clears_head(trainer):
    steps_head(trainer)
    clears_head(trainer)


TAKES_PART = {
    "steps and clears": [run("backward", "step"), steps_head, run("zero_grad"), clears_head],
    "steps": [run("backward", "step"), steps_head, run("zero_grad")],
    "steps first": [run("backward"), steps_head, clears_head, run("step", "zero_grad")],
    "clips": [run("backward"), clips_head, steps_head, run("step", "zero_grad")],
}


@pytest.mark.parametrize("kind", TAKES_PART)
def test_another_optimizer_that_steps_with_a_part_of_a_window_is_refused(kind):
    "The gradient of one batch was divided by those of all"
    cls = two_optimizers(*TAKES_PART[kind])
    with pytest.raises(RuntimeError, match="batch 0 `trainer.opt_head` .* still gathering.* in `after_step`"):
        fitted(cls)


def test_another_optimizer_that_loses_a_part_of_a_window_is_refused():
    lines = [run("backward", "step"), clears_head, run("zero_grad")]
    with pytest.raises(RuntimeError, match="batch 1 `trainer.opt_head` .* a part was cleared on the way"):
        fitted(two_optimizers(*lines, after_step=steps_head))


def test_an_optimizer_of_a_callback_or_in_a_list_is_refused_by_its_name():
    class HeadCB:
        def before_fit(self, trainer):
            self.opts = [*optimizers_in(trainer)]

        def after_batch(self, trainer):
            self.opts[1].step()

    for cls, cbs in ((Trainer, [BasicTrainCB()]), (two_optimizers(run("backward", "step", "zero_grad")), [])):
        with pytest.raises(RuntimeError, match=r"batch 0 `HeadCB.opts\[1\]` was about to step"):
            fitted(cls, *cbs, HeadCB())


def test_what_one_optimizer_has_lost_is_seen_beside_gradients_of_another():
    lines = [run("backward", "step"), lambda o: o.opt.zero_grad()]
    with pytest.raises(RuntimeError, match="gone at batch 1, .* clears them itself"):
        fitted(two_optimizers(*lines, after_step=steps_and_clears_head))


def test_another_optimizer_that_steps_when_a_window_is_complete_is_right():
    class HeadCB:
        def after_step(self, trainer):
            steps_and_clears_head(trainer)

    def steps_if_complete(trainer):
        if trainer.AccumulationCB.n == 0:
            steps_and_clears_head(trainer)

    events = run("backward", "step", "zero_grad")
    built_in = fitted(Trainer, BasicTrainCB())
    ways = [
        (two_optimizers(events, after_step=steps_and_clears_head), []),
        (two_optimizers(events), [HeadCB()]),
        (two_optimizers(run("backward", "step"), steps_if_complete, run("zero_grad")), []),
    ]
    for cls, cbs in ways:
        own = fitted(cls, *cbs)
        assert torch.equal(weights(own), weights(built_in)) and not own.opt._optimizer_step_pre_hooks
        assert not own.opt_head._optimizer_step_pre_hooks


def judge(trainer, real, fake):
    scores = trainer.model["d"](torch.cat([real, fake]))
    return F.softplus(scores * torch.tensor([-1.0, 1.0]).repeat_interleave(len(real))[:, None]).mean()


class Pair(StepsAsMethods):
    "A judge, which steps in every batch, and a generator, both in one model"

    set_to_none, judge_first, leaves = True, True, False

    def before_fit(self):
        self.opt, self.opt_d = (optim.SGD(self.model[o].parameters(), 0.1) for o in "gd")

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        real, noise = self.batch
        fake = self.model["g"](noise)
        if self.judge_first:
            self.learn_to_judge(real, fake)
        self.model["d"].requires_grad_(self.leaves)
        self.loss = F.softplus(-self.model["d"](fake)).mean()
        self.run_callbacks("backward", "step", "zero_grad")
        self.model["d"].requires_grad_(True)
        if not self.judge_first:
            self.learn_to_judge(real, fake)

    def learn_to_judge(self, real, fake):
        self.opt_d.zero_grad(set_to_none=self.set_to_none)
        judge(self, real, fake.detach()).backward()
        self.opt_d.step()


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("judge_first", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_network_of_a_pair_that_goes_backward_by_itself_is_right(set_to_none, judge_first, leaves):
    "What the loss of the other has left in it was cleared first"
    batches = [(torch.randn(4, 2), torch.randn(4, 2)) for _ in range(6)]
    model = nn.ModuleDict(dict(g=nn.Linear(2, 2), d=nn.Linear(2, 1)))
    trainer = Pair(DataLoaders(batches), None, None, copy.deepcopy(model), [AccumulationCB(2)])
    trainer.set_to_none, trainer.judge_first, trainer.leaves = set_to_none, judge_first, leaves
    trainer.fit(1, valid=False)
    by_hand = SimpleNamespace(model=model)
    opt_g, opt_d = (optim.SGD(model[o].parameters(), 0.1) for o in "gd")
    for i, (real, noise) in enumerate(batches):
        fake = model["g"](noise)
        for step in (0, 1) if judge_first else (1, 0):
            if step == 0:
                opt_d.zero_grad()
                judge(by_hand, real, fake.detach()).backward()
                opt_d.step()
                continue
            (F.softplus(-model["d"](fake)).mean() / 2).backward()
            if i % 2:
                opt_g.step()
                opt_g.zero_grad()
    assert all(map(torch.equal, trainer.model.parameters(), model.parameters()))


# Where a batch of one's own clears


def clearing(when):
    "A trainer that clears before predicting, before going backward, or after the step"

    class Own(Trainer):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            if when == "first":
                self.run_callbacks("zero_grad")
            self.run_callbacks("predict", "get_loss")
            if when == "before backward":
                self.run_callbacks("zero_grad")
            self.run_callbacks("backward", "step")
            if when == "last":
                self.run_callbacks("zero_grad")

    return Own


class SkipCB:
    "Leaves out some backward passes, before others hear of them or after it"

    def __init__(self, order):
        self.order = order

    def before_backward(self, trainer):
        if trainer.batch_num in (0, 3):
            raise CancelStepException("not this one")


WHEN = ["first", "before backward", "last"]


@pytest.mark.parametrize("steps", [BasicTrainCB, MomentumTrainCB])
@pytest.mark.parametrize("others", [[], [Order.FIRST], [Order.LAST]])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_it_does_not_matter_where_a_batch_clears_also_in_a_further_fit(n, others, steps):
    "Gradients that a step had used came into the first window of the next fit"

    def trained(cls):
        cbs = [steps(), *map(SkipCB, others), AccumulationCB(n)]
        trainer = cls(DataLoaders(cut(make_data(), SIZES)), F.mse_loss, optim.SGD, make_model(), cbs)
        for keep_opt in (False, True):
            trainer.fit(1, lr=0.1, valid=False, keep_opt=keep_opt)
        return weights(trainer)

    assert all(torch.equal(trained(clearing(when)), trained(Trainer)) for when in WHEN)


def test_a_shorter_window_that_the_end_of_a_stream_closes_is_cleared_once():
    class Stream:
        def __iter__(self):
            return iter(cut(make_data(), SIZES))

    def trained(cls, fits=(2,)):
        cbs = [MomentumTrainCB(), AccumulationCB(2)]
        trainer = cls(DataLoaders(Stream()), F.mse_loss, optim.SGD, make_model(), cbs)
        for k, n_epochs in enumerate(fits):
            trainer.fit(n_epochs, lr=0.1, valid=False, keep_opt=k > 0)
        return weights(trainer)

    assert all(torch.equal(trained(clearing(when)), trained(Trainer)) for when in WHEN)
    assert all(torch.equal(trained(clearing(when), (1, 1)), trained(Trainer)) for when in WHEN)


def resumable(cls, folder, *callbacks, every=1, dies=None):
    "The weights after two epochs of five batches; dies in one of them, and goes on if it has"
    set_seed(3)

    def after_get_loss(trainer):
        if trainer.epoch * 5 + trainer.batch_num == dies:
            raise KeyboardInterrupt

    cbs = [*callbacks, AccumulationCB(3), CheckpointCB(folder, every=every), after_get_loss]
    dls = DataLoaders(exact_loader(list(zip(*make_data())), 5, seed=3))
    trainer = cls(dls, F.mse_loss, partial(optim.SGD, momentum=0.9), make_model(), cbs)
    try:
        trainer.fit(2, lr=0.1, valid=False)
    except KeyboardInterrupt:
        pass
    return weights(trainer)


@pytest.mark.parametrize("every", [1, 3, "epoch"])
@pytest.mark.parametrize("when", WHEN)
def test_used_gradients_are_in_no_window_of_a_run_that_goes_on(when, every, tmp_path):
    "Wherever it was killed: in a window, at its border, in the last batch of an epoch"
    whole = resumable(Trainer, tmp_path / "whole", BasicTrainCB())
    for dies in (2, 3, 4, 5, 8, 9):
        folder = tmp_path / str(dies)
        for at in (dies, None):
            found = resumable(clearing(when), folder, BasicTrainCB(), every=every, dies=at)
        assert torch.equal(found, whole)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("order", [Order.FIRST, Order.LAST])
def test_a_run_goes_on_in_a_window_whose_first_backward_was_left_out(when, order, tmp_path):
    "Gradients from before it were lost or scaled down twice, or taken for those of an unknown backward"
    whole = resumable(Trainer, tmp_path / "whole", MomentumTrainCB(), SkipCB(order))
    for dies in (1, 4, 5, 6):
        folder = tmp_path / str(dies)
        for at in (dies, None):
            cbs = MomentumTrainCB(), SkipCB(order)
            found = resumable(clearing(when), folder, *cbs, dies=at)
        assert torch.equal(found, whole)


class Judged(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen, self.disc, self.aux = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)


class JudgedCB(BasicTrainCB):
    def predict(self, trainer):
        trainer.preds = trainer.model.gen(trainer.batch[0])

    def get_loss(self, trainer):
        model = trainer.model
        trainer.loss = F.softplus(-model.disc(trainer.preds) - model.aux(trainer.preds)).mean()


class JudgeCB:
    on_valid = False

    def __init__(self, closure, to_none=True):
        self.closure, self.to_none = closure, to_none

    def before_fit(self, trainer):
        model = trainer.model
        self.opt = optim.Adam([*model.disc.parameters(), *model.aux.parameters()], 1e-3)

    def after_batch(self, trainer):
        def closure():
            self.opt.zero_grad(set_to_none=self.to_none)
            model, (real,) = trainer.model, trainer.batch
            loss = (
                F.softplus(-model.disc(real)).mean() + F.softplus(model.disc(trainer.preds.detach())).mean()
            )
            loss.backward()
            return loss

        if self.closure:
            self.opt.step(closure)
        else:
            closure()
            self.opt.step()


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_a_judge_may_clear_in_the_closure_of_its_step_and_leave_a_part_without_gradient(closure, to_none):
    torch.manual_seed(0)
    model, batches = Judged(), [(torch.randn(5, 4),) for _ in range(6)]
    callbacks = [JudgedCB(), JudgeCB(closure, to_none), AccumulationCB(3)]
    make = lambda params, lr: optim.SGD(model.gen.parameters(), lr)
    trainer = Trainer(DataLoaders(batches), None, make, model, callbacks)
    trainer.fit(1, lr=0.1, valid=False)
    assert trainer.n_updates == 2
