"Passes inside, beside and after others: what is kept apart, and what goes on."

import contextlib
import copy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import (
    BasicTrainCB,
    CancelEpochException,
    CancelFitException,
    DataLoaders,
    GradientStatsCB,
    MetricsCB,
    MomentumTrainCB,
    NBatchCB,
    Order,
    ProgressCB,
    RecorderCB,
    Trainer,
)
from small import data, trainer_with


def test_a_pass_inside_a_pass_is_refused_and_a_side_run_does_it():
    def after_batch(trainer):
        if trainer.training and trainer.batch_num == 1:
            trainer.one_epoch(False)

    with pytest.raises(RuntimeError, match="side_run"):
        trainer_with().fit(1, callbacks=after_batch)

    class EveryCB:
        order, found = Order.DECIDE, 0

        def after_batch(self, trainer):
            if trainer.training and trainer.batch_num == 1:
                with trainer.side_run(MetricsCB()) as side:
                    side.fit(1, train=False, callbacks=ProgressCB("plain"))
                    found = side.history.latest("valid_loss")
                self.found = found

    every = EveryCB()
    t = trainer_with(every, n=10)
    t.fit(1, valid=False)
    assert (t.n_updates, t.model.training) == (10, True) and every.found > 0


def test_a_pass_by_hand_leaves_the_mode_to_the_model():
    t = trainer_with()
    t.fit(1)
    t.one_epoch(False)
    t.model.train()
    assert t.training


@pytest.mark.parametrize("own", [dict(keep_opt=True), dict()])
def test_gradients_of_an_interrupted_fit_do_not_reach_one_with_the_same_optimizer(own):
    def before_step(trainer):
        raise KeyboardInterrupt

    t = trainer_with()
    if not own:
        t.opt_func, t.opt = None, optim.SGD(t.model.parameters(), 0.1)
    t.fit(1, 0.1)
    with pytest.raises(KeyboardInterrupt):
        t.fit(1, 0.1, callbacks=before_step, **own)
    assert t.model.weight.grad is not None  # To be looked at
    before = t.model.weight.item()
    t.fit(0, 0.1, **own)
    assert t.model.weight.grad is None and t.model.weight.item() == before


@pytest.mark.parametrize("train_cb", [BasicTrainCB, MomentumTrainCB])
def test_gradients_of_an_interrupted_fit_do_not_reach_the_next(train_cb):
    torch.manual_seed(0)
    batches, model = data(), nn.Linear(1, 1)

    def trained(interrupted):
        t = Trainer(DataLoaders(batches), F.mse_loss, optim.SGD, copy.deepcopy(model), train_cb())

        def before_step(trainer):
            raise KeyboardInterrupt

        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                t.fit(1, 0.1, callbacks=before_step, valid=False)
        t.fit(1, 0.1, valid=False)
        return t.model.weight.item()

    assert trained(True) == trained(False)


class HeadCB:
    "Trains a module of its own behind the model"

    def __init__(self):
        torch.manual_seed(2)
        self.head = nn.Linear(1, 1)

    def after_predict(self, trainer):
        trainer.preds = self.head(trainer.preds)


class GaveUp(Exception):
    pass


def breaks_off(event, error):
    def handler(trainer):
        raise error("enough")

    handler.__name__ = event
    return handler


ENDS = [
    ("before_step", KeyboardInterrupt),
    ("after_backward", GaveUp),
    ("after_backward", CancelFitException),
    ("before_zero_grad", CancelFitException),
]


def fit_again(t, event, error, before=False, **kwargs):
    "Break a fit off, as if with a rate of nothing, and train again"
    if before:
        with contextlib.suppress(KeyboardInterrupt, GaveUp):
            t.fit(1, 0.0, valid=False, callbacks=breaks_off(event, error), **kwargs)
    t.fit(1, 0.1, valid=False, **kwargs)


@pytest.mark.parametrize(("event", "error"), ENDS)
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_of_a_fit_that_broke_off_do_not_stay_in_a_module_of_a_callback(event, error, keep):
    def trained(before):
        torch.manual_seed(1)
        head, model = HeadCB(), nn.Linear(1, 1)
        opt_func = lambda params, lr: optim.SGD([*params, *head.head.parameters()], lr)
        t = Trainer(DataLoaders(data()), F.mse_loss, opt_func, model, [BasicTrainCB(), head])
        if keep:
            t.fit(1, 0.1, valid=False)
        fit_again(t, event, error, before, keep_opt=keep)
        return head.head.weight.item(), model.weight.item()

    assert trained(False) == trained(True)


@pytest.mark.parametrize(("event", "error"), ENDS)
@pytest.mark.parametrize("several", [list, lambda nets: dict(enumerate(nets)), tuple])
def test_gradients_of_a_fit_that_broke_off_do_not_stay_in_nets_in_a_list(event, error, several):
    "With optimizers of the user's own, one in a list and one that a callback has"

    class OwnCB(BasicTrainCB):
        def predict(self, trainer):
            first, second = trainer.nets.values() if isinstance(trainer.nets, dict) else trainer.nets
            trainer.preds = second(first(trainer.model(trainer.batch[0])))

        def step(self, trainer):
            if trainer.lr:
                trainer.opts["one"].step()
                self.other.step()

        def zero_grad(self, trainer):
            trainer.opts["one"].zero_grad()
            self.other.zero_grad()

    def trained(before):
        torch.manual_seed(1)
        nets, cb = [nn.Linear(1, 1), nn.Linear(1, 1)], OwnCB()
        t = Trainer(DataLoaders(data()), F.mse_loss, None, nn.Linear(1, 1), cb)
        hidden = nn.Linear(1, 1)  # Held by its optimizer alone
        t.nets = several(nets)
        t.opts = dict(one=optim.SGD([*nets[0].parameters(), *t.model.parameters()], 0.1))
        cb.other = optim.SGD([*nets[1].parameters(), *hidden.parameters()], 0.1)
        hidden.weight.grad = torch.ones(1, 1) if before else None
        fit_again(t, event, error, before)
        return [p.item() for net in (*nets, t.model, hidden) for p in net.parameters()]

    assert trained(False) == trained(True)


def test_gradients_that_a_fit_leaves_on_purpose_go_on_with_the_optimizer_that_is_kept():
    "They are old gradients with momentum, and the fit was cancelled when the update was done"
    by_two = Trainer(DataLoaders(data(n=1)), F.mse_loss, optim.SGD, nn.Linear(1, 1), MomentumTrainCB())
    at_once = copy.deepcopy(by_two)
    at_once.fit(2, 0.1, valid=False)
    by_two.fit(1, 0.1, valid=False, callbacks=breaks_off("after_batch", CancelFitException))
    by_two.fit(1, 0.1, valid=False, keep_opt=True)
    assert by_two.model.weight.item() == at_once.model.weight.item()


def test_an_optimizer_of_nets_in_a_list_has_something_to_train():
    "It was refused: nobody looked into lists"
    t = trainer_with()
    t.nets = [nn.Linear(1, 1)]
    t.opt_func = lambda params, lr: optim.SGD(t.nets[0].parameters(), lr)
    t.fit(1, valid=False)


@pytest.mark.parametrize("with_grad", [True, False])
def test_gradients_are_switched_on_or_off_as_before_after_an_interrupt(with_grad):
    def before_batch(trainer):
        torch.set_grad_enabled(not with_grad)
        raise KeyboardInterrupt

    t = trainer_with()
    with torch.set_grad_enabled(with_grad):
        with pytest.raises(KeyboardInterrupt):
            t.fit(1, callbacks=before_batch, valid=False)
        assert torch.is_grad_enabled() == with_grad


async def _later(trainer): ...


def test_request_stop_without_a_reason_stops():
    def after_batch(trainer):
        trainer.request_stop(None)

    t = trainer_with()
    t.fit(3, callbacks=after_batch)
    assert t.epoch == 0 and t.stop_reason


def test_keep_opt_keeps_the_ratio_of_the_rates_and_refuses_another_model():
    t = trainer_with()
    t.opt_func = lambda params, lr: optim.SGD(
        [{"params": params[:1], "lr": lr}, {"params": params[1:], "lr": lr * 10}]
    )
    with pytest.raises(ValueError, match="there is none yet"):
        t.fit(1, keep_opt=True)
    t.fit(1, 0.01)
    t.fit(1, 0.02, keep_opt=True)
    assert [g["lr"] for g in t.opt.param_groups] == pytest.approx([0.02, 0.2])
    t.model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="no parameter of this model"):
        t.fit(1, keep_opt=True)


def test_a_fit_without_a_rate_leaves_the_ratio_of_the_rates():
    "All had the same rate from then on, in silence"
    t = trainer_with()
    t.opt_func = lambda params, lr: optim.SGD(
        [{"params": params[:1], "lr": lr}, {"params": params[1:], "lr": lr * 10}]
    )
    t.fit(1, 0.01)
    for lr in (0.0, 0.0):
        t.fit(1, lr, keep_opt=True)
    t.fit(1, 0.02, keep_opt=True)
    assert [g["lr"] for g in t.opt.param_groups] == pytest.approx([0.02, 0.2])
    t.fit(1, 0.0)  # Nobody has known these
    t.fit(1, 0.0, keep_opt=True)
    with pytest.raises(ValueError, match=r"they had \[0.0, 0.0\], so there is none"):
        t.fit(1, 0.02, keep_opt=True)
    for group, lr in zip(t.opt.param_groups, (1.0, 2.0)):
        group["lr"] = lr
    t.fit(1, 0.02, keep_opt=True)
    assert [g["lr"] for g in t.opt.param_groups] == pytest.approx([0.02, 0.04])


def only_rate(params, *, lr):
    return optim.SGD(params, lr)


@pytest.mark.parametrize(
    ("opt_func", "told"),
    [
        (lambda params: optim.SGD(params, 0.1), "takes only one. Let it take both"),
        (only_rate, "takes only one. Let it take both"),
        (lambda: None, "takes none. Let it take both"),
        (lambda params, lr, momentum: None, "If it needs more, fill that in first"),
        (partial(optim.SGD, lr=0.1), "Leave `lr` out there"),
    ],
)
def test_a_function_that_takes_other_arguments_is_told_which_it_gets(opt_func, told):
    t = trainer_with()
    t.opt_func = opt_func
    with pytest.raises(TypeError) as error:
        t.fit(1)
    assert told in error.value.__notes__[0]


# --- Found by the next who used it


def test_the_first_reason_to_stop_is_the_one_that_is_kept():
    "A validation after it overwrote the place where a loss had become NaN"

    def after_batch(trainer):
        trainer.request_stop(f"{trainer.training}")

    t = trainer_with()
    t.fit(2, callbacks=after_batch)
    assert t.stop_reason == "True"


def test_a_run_on_the_side_keeps_the_callbacks_of_the_fit_too():
    "Those that were given to `fit` were taken for leftovers, so a batch stayed on its device, say"
    seen = []

    class BatchCB:
        order = Order.DATA

        def before_batch(self, trainer):
            seen.append(trainer.history is outer)

    def log(trainer):
        trainer.validate()

    log.order = Order.RECORD
    t = trainer_with()
    outer = t.history
    t.fit(1, callbacks=[BatchCB(), log])
    assert seen == [True] * 5 + [False] * 2


@pytest.mark.parametrize("cb, column", [(RecorderCB, "lr"), (GradientStatsCB, "grad_norm")])
def test_a_pass_that_is_left_before_it_has_begun_repeats_nothing_of_the_one_before(cb, column):
    def before_epoch(trainer):
        if trainer.epoch == 1:
            raise CancelEpochException

    before_epoch.order = -200
    t = trainer_with(cb(), before_epoch)
    t.fit(3, valid=False)
    assert [o["epoch"] for o in t.history.batches] == [0] * 3 + [2] * 3 and len(
        t.history.batches[column]
    ) == 6


class WalkCB:
    "Notes what a pass walks over, as it sees it from the end of the order"

    order = Order.LAST

    def before_fit(self, trainer):
        self.seen = []

    def before_epoch(self, trainer):
        self.seen.append([trainer.n_batches])

    def before_batch(self, trainer):
        self.seen[-1].append(len(trainer.batch[0]))


def sized(*sizes):
    return [(torch.randn(n, 1), torch.randn(n, 1)) for n in sizes]


@pytest.mark.parametrize(
    "change, train, valid",
    [
        (lambda t: setattr(t, "dl", sized(1, 2, 3, 5)), [4, 1, 2, 3, 5], [4, 1, 2, 3, 5]),
        (lambda t: setattr(t, "dl", iter(sized(1, 2))), [None, 1, 2], [None, 1, 2]),
        (lambda t: setattr(t, "batches", range(1)), [1, 4], [1, 4]),
        (lambda t: setattr(t, "batches", range(9)), [3, 4, 4, 4], [2, 4, 4]),
        (lambda t: setattr(t, "batches", sized(1, 2, 3, 5)), [4, 1, 2, 3, 5], [4, 1, 2, 3, 5]),
        (lambda t: setattr(t, "batches", (o for o in t.batches)), [3, 4, 4, 4], [2, 4, 4]),
        (lambda t: (setattr(t, "batches", range(2)), setattr(t, "dl", sized(1, 2, 3))), [2, 1, 2], [2, 1, 2]),
    ],
)
def test_a_pass_walks_over_what_a_callback_gives_it(change, train, valid):
    t = trainer_with(WalkCB(), ProgressCB())
    t.fit(2, callbacks=type("GiveCB", (), {"before_epoch": lambda self, trainer: change(trainer)})())
    assert t.WalkCB.seen == [train, valid] * 2


def test_a_limit_stays_when_the_loader_changes():
    t = trainer_with(WalkCB(), NBatchCB(1))

    def before_epoch(trainer):
        trainer.dl = sized(1, 2, 3, 5)

    t.fit(1, callbacks=before_epoch)
    assert t.WalkCB.seen == 2 * [[1, 1]]


def test_a_stop_ends_a_pass_over_other_batches_too():
    class OtherCB:
        def before_epoch(self, trainer):
            trainer.batches = sized(1, 2, 3, 5)

        def after_batch(self, trainer):
            if trainer.batch_num == 1:
                trainer.request_stop()

    t = trainer_with(WalkCB())
    t.fit(1, callbacks=OtherCB(), valid=False)
    assert t.WalkCB.seen == [[4, 1, 2]]


def test_what_was_set_for_a_pass_may_be_put_back_after_it():
    class UndoCB:
        def before_epoch(self, trainer):
            self.old, trainer.dl = trainer.dl, sized(1)

        def cleanup_epoch(self, trainer):
            trainer.dl = self.old

    t = trainer_with(WalkCB(), UndoCB())
    t.fit(1)
    assert t.WalkCB.seen == [[1, 1], [1, 1]] and t.dl is t.dls.valid


@pytest.mark.parametrize("kind", [dict, list])
def test_an_entry_exchanged_twice_is_seen_though_the_second_has_the_place_of_the_first(kind):
    "The model learned from the inputs of before, since a tensor that is gone gives its `id` to the next"
    seen, key = [], "x" if kind is dict else 0

    def before_predict(trainer):
        trainer.split(trainer.batch)  # Somebody has asked before, such as a metric
        for _ in range(2):
            trainer.batch[key] = trainer.batch[key] + 1

    def after_predict(trainer):
        seen.append(trainer.split(trainer.batch)[0][0].item() - trainer.batch[key].item())

    batches = [
        {"x": torch.ones(1, 1), "y": torch.ones(1, 1)} if kind is dict else [torch.ones(1, 1)] * 2
        for _ in range(3)
    ]
    dls = DataLoaders(batches, split=lambda batch: (batch[key] * 1, batch["y" if kind is dict else 1]))
    callbacks = [BasicTrainCB(), before_predict, after_predict]
    Trainer(dls, F.mse_loss, optim.SGD, nn.Linear(1, 1), callbacks).fit(1, valid=False)
    assert seen == [0.0] * 3
