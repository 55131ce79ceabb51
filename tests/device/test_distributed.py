"Training in several processes against the same training in one: weights, rows, updates, however a pass ends"

import os
import time
from datetime import timedelta

import pytest
import torch
from several import in_processes, loaders, net, outcome, rank, trainer
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.device import connection
from isaac_loop.device.distributed import DistributedCB
from isaac_loop.device.joining import SharedData
from isaac_loop.loop.events import CancelBatchException, CancelEpochException, CancelFitException
from isaac_loop.loop.events import Order
from isaac_loop.loop.spans import with_cbs
from isaac_loop.loop.trainer import Trainer
from isaac_loop.state.errors import RankFailed, RanksDiverged
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.train.training import BasicTrainCB, MomentumTrainCB

pytestmark = pytest.mark.processes


def weights(t):
    return torch.cat([p.detach().reshape(-1) for p in t.model.parameters()])


CASES = {
    "adam": dict(),
    "sgd in batches of 15": dict(opt_func=optim.SGD, batch_size=15),
    "single precision": dict(dtype=torch.float32),
    "193 rows, a last batch of one": dict(n=193, batch_size=16),
    "three rows": dict(n=3, batch_size=16),
    "windows of two": dict(callbacks=lambda: [AccumulationCB(2)]),
    "windows of three": dict(callbacks=lambda: [AccumulationCB(3)], n=50),
    "windows of batches that weigh alike": dict(callbacks=lambda: [AccumulationCB(3, weigh="mean")], n=50),
    "clipping": dict(callbacks=lambda: [ClipGradCB(0.1), AccumulationCB(2)]),
    "sums": dict(loss_func=nn.MSELoss(reduction="sum"), opt_func=optim.SGD, lr=1e-4),
    "tokens": dict(weigh=lambda batch: (batch[1] > 0).sum(), loss_func="positive"),
    "momentum of gradients": dict(train=MomentumTrainCB),
}


def positive(preds, y):
    "A mean over the rows whose target is positive"
    keep = (y > 0).to(preds.dtype)
    return ((preds - y) ** 2 * keep).sum() / keep.sum().clamp(min=1)


def fitted(name, epochs=2):
    o = dict(CASES[name])
    dtype = o.pop("dtype", torch.float64)
    n, batch_size = o.pop("n", 53), o.pop("batch_size", 8)
    loss_func = o.pop("loss_func", F.mse_loss)
    if loss_func == "positive":
        loss_func = positive
    make, lr, cls = o.pop("callbacks", list), o.pop("lr", 0.05), o.pop("train", None)
    t = trainer(*make(), dls=loaders(n, 3, batch_size, dtype), model=net(dtype), loss_func=loss_func, **o)
    if cls:
        t.remove_callbacks("BasicTrainCB")
        t.add_callbacks(cls())
    t.fit(epochs, lr=lr)
    return outcome(t), t.n_updates


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_several_processes_end_where_one_ends(name, n):
    (alone, alone_rows), n_updates = fitted(name)
    for (theirs, _), updates in in_processes(n, fitted, name):
        assert (theirs - alone).abs().max() < (1e-6 if "single" in name else 1e-12)
        assert updates == n_updates


class Raise:
    "Raises an error or a cancel at a chosen place in one process"

    order = Order.STEP + 1

    def __init__(self, event, error, where=0, epoch=0, batch=2, order=None):
        self.event, self.error, self.where, self.epoch, self.batch = event, error, where, epoch, batch
        if order is not None:
            self.order = order
        setattr(self, event, self.act)

    def act(self, trainer):
        here = (trainer.epoch, getattr(trainer, "batch_num", None)) == (self.epoch, self.batch)
        if rank() == self.where and here and trainer.training:
            self.do(trainer)

    def do(self, trainer):
        raise self.error


class Stop(Raise):
    def do(self, trainer):
        trainer.request_stop("enough")


class Seen:
    "Notes which batches were trained on, and how passes ended"

    order = -200

    def before_fit(self, trainer):
        self.batches, self.ends = [], []

    def after_step(self, trainer):
        self.batches.append((trainer.epoch, trainer.batch_num))

    def cleanup_epoch(self, trainer):
        self.ends.append((trainer.epoch, trainer.training, type(trainer.exception).__name__))


def seen(make, epochs=2, **kwargs):
    watch = Seen()
    t = trainer(*make(), watch, **kwargs)
    t.fit(epochs, lr=0.05)
    return outcome(t)[0], t.n_updates, watch.batches, watch.ends, t.stop_reason


CANCELS = CancelBatchException, CancelEpochException, CancelFitException
BEFORE, AFTER = ("before_batch", "after_predict", "before_step"), ("after_step", "after_batch")


@pytest.mark.parametrize("batch", [0, 2, 6])
@pytest.mark.parametrize("cancel", CANCELS)
def test_a_cancel_of_one_process_is_a_cancel_of_all(cancel, batch):
    "The places before and after the exchange, with every kind, in the first, a middle and the last batch"
    for event in (*BEFORE, *AFTER):
        made = lambda event=event: [Raise(event, cancel("for a test"), 1, batch=batch, order=Order.FIRST)]
        first, second = in_processes(2, seen, made)
        assert torch.equal(first[0], second[0]) and first[1:] == second[1:], event
        if event == "before_batch" and cancel is not CancelBatchException:
            assert (0, batch) not in first[2]


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("event", ["before_batch", "after_batch", "cleanup_epoch", "log"])
def test_a_stop_of_one_process_stops_all_after_the_same_batch(event, window):
    def made():
        batch = 6 if event == "cleanup_epoch" else 2
        return [Stop(event, None, 1, batch=batch), *([AccumulationCB(window)] if window > 1 else [])]

    first, second = in_processes(2, seen, made)
    assert torch.equal(first[0], second[0]) and first[1:] == second[1:]
    if event != "log":
        assert first[4] == "enough" and first[2][-1][0] == 0


@pytest.mark.parametrize(
    "event",
    [
        "before_fit",
        "before_epoch",
        "before_batch",
        "predict",
        "before_backward",
        "before_step",
        "after_step",
        "after_batch",
        "cleanup_batch",
        "cleanup_epoch",
        "log",
    ],
)
@pytest.mark.parametrize("where", [0, 1])
def test_an_error_in_one_process_ends_the_others_by_name(event, where):
    class Bad:
        pass

    def raise_it(trainer):
        if rank() == where:
            raise ValueError("no more disk")

    setattr(Bad, event, lambda self, trainer: raise_it(trainer))

    def run():
        try:
            trainer(Bad()).fit(1, lr=0.1)
        except Exception as error:
            return type(error), str(error)

    ends = in_processes(2, run)
    assert ends[where] == (ValueError, "no more disk")
    kind, text = ends[1 - where]
    assert kind is RankFailed and f"Process {where} failed with ValueError: no more disk" in text
    assert f"Bad.{event}" in text


def test_a_process_that_is_gone_ends_the_others():
    class Gone(Raise):
        def do(self, trainer):
            os._exit(3)

    def run():
        start = time.monotonic()
        try:
            trainer(Gone("after_predict", None, 1)).fit(1, lr=0.1)
        except RankFailed as error:
            return str(error), time.monotonic() - start

    with pytest.raises(RuntimeError, match="exit code 3"):
        in_processes(2, run)


def test_leaving_between_exchange_and_step_in_one_process_is_told():
    made = lambda: [Raise("before_step", CancelBatchException("alone"), 1, order=Order.STEP)]
    assert {kind for kind, _ in in_processes(2, told, made)} == {RanksDiverged}


class Skips:
    "Leaves out something in one process alone"

    order = Order.FIRST

    def __init__(self, event, batch=2):
        setattr(self, event, self.act)
        self.batch = batch

    def act(self, trainer):
        if rank() == 1 and trainer.training and trainer.batch_num == self.batch:
            from isaac_loop.loop.events import CancelStepException

            raise CancelStepException("one process only")


def told(make):
    try:
        trainer(*make()).fit(2, lr=0.1)
    except Exception as error:
        return type(error), str(error)


def test_processes_that_are_not_at_the_same_place_are_told_on_all():
    class OtherRate:
        def after_batch(self, trainer):
            if rank() == 1 and trainer.batch_num == 2:
                trainer.opt.param_groups[0]["lr"] *= 2

    class OtherWeight:
        def after_batch(self, trainer):
            if rank() == 1 and trainer.batch_num == 2 and trainer.training:
                with torch.no_grad():
                    next(trainer.model.parameters()).add_(1e-12)

    class FewerBatches:
        def before_epoch(self, trainer):
            if rank() == 1 and trainer.training:
                trainer.batches = range(3)

    for make in (
        lambda: [Skips("before_step")],
        lambda: [OtherRate()],
        lambda: [OtherWeight()],
        lambda: [FewerBatches()],
    ):
        ends = in_processes(2, told, make)
        assert [kind for kind, _ in ends] == [RanksDiverged] * 2, ends
        assert ends[0] == ends[1]


def test_a_backward_that_one_process_leaves_out_is_no_divergence():
    first, second = in_processes(2, seen, lambda: [Skips("before_backward")])
    assert torch.equal(first[0], second[0]) and first[1:] == second[1:]


class Leaves:
    "Leaves at a chosen place, in one process or in all"

    order = Order.RECORD

    def __init__(self, event, cancel, training=True, everywhere=False):
        self.cancel, self.training, self.everywhere = cancel, training, everywhere
        setattr(self, event, self.act)

    def act(self, trainer):
        epoch = vars(trainer).get("epoch", 0)
        if trainer.training == self.training and epoch == 0 and (self.everywhere or rank() == 1):
            raise self.cancel("for a test")


PLACES = [
    ("before_epoch", CancelEpochException, True),
    ("before_epoch", CancelFitException, True),
    ("before_epoch", CancelFitException, False),
    ("after_predict", CancelFitException, False),
    ("after_predict", CancelEpochException, False),
    ("cleanup_epoch", CancelFitException, True),
    ("cleanup_epoch", CancelFitException, False),
    ("log", CancelFitException, False),
]


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("event,cancel,training", PLACES)
def test_whoever_leaves_outside_of_training_batches_is_followed(event, cancel, training, everywhere):
    def run():
        start = time.monotonic()
        leaves = [Leaves(event, cancel, training, everywhere)]
        return seen(lambda: leaves), time.monotonic() - start

    (first, seconds), (second, _) = in_processes(2, run)
    assert torch.equal(first[0], second[0]) and first[1] == second[1] and first[4] == second[4]
    assert seconds < 6
    if cancel is CancelFitException:
        assert max((epoch for epoch, _ in first[2]), default=0) == 0


def other_engine(leaves, **kwargs):
    t = trainer(leaves, **kwargs)
    t.fit(2)
    return weights(t), t.n_updates


@pytest.mark.parametrize("cancel", [CancelEpochException, CancelFitException])
@pytest.mark.parametrize("kwargs", [dict(engine="ddp"), dict(engine="fsdp"), dict(sync_bn=True)], ids=str)
def test_whoever_leaves_before_a_pass_is_followed_with_other_engines(kwargs, cancel):
    def both():
        return [other_engine(Leaves("before_epoch", cancel), **o) for o in ({}, kwargs)]

    (usual, first), (_, second) = in_processes(2, both)
    assert usual[1] == first[1] == second[1] == (0 if cancel is CancelFitException else 7)
    assert torch.equal(first[0], second[0]) and (first[0] - usual[0]).abs().max() < 1e-12


@pytest.mark.parametrize("engine", ["sum", "ddp", "fsdp"])
def test_a_cancel_of_a_batch_where_none_is_open_is_an_error_in_all(engine):
    def run():
        with pytest.raises((CancelBatchException, RankFailed)) as e:
            other_engine(Leaves("before_epoch", CancelBatchException), engine=engine)
        return type(e.value), str(e.value)

    (there, told), (here, _) = in_processes(2, run)
    assert (there, here) == (RankFailed, CancelBatchException) and "CancelBatchException: for a test" in told


class LeavesUncleared:
    "Leaves a batch that is as good as done, in one process"

    order = Order.RECORD

    def __init__(self, event):
        setattr(self, event, self.act)

    def act(self, trainer):
        if trainer.training and vars(trainer).get("batch_num") == 2 and rank() == 1:
            raise CancelBatchException("for a test")


@pytest.mark.parametrize("engine", ["sum", "ddp", "fsdp"])
def test_a_batch_that_one_process_leaves_before_clearing_is_cleared(engine):
    def run():
        events = "before_zero_grad", "after_zero_grad", "before_fit"
        return [other_engine(LeavesUncleared(event), engine=engine) for event in events]

    first, second = in_processes(2, run)
    for (here, n), (there, m) in zip(first, second):
        assert torch.equal(here, there) and n == m and torch.equal(here, first[-1][0])


def test_a_cancel_of_the_fit_before_all_have_met_is_told():
    def before_fit(t):
        if rank() == 1:
            raise CancelFitException("for a test")

    def run():
        try:
            trainer(before_fit).fit(2)
        except RankFailed as error:
            return str(error)

    told, ended = in_processes(2, run)
    assert "it was left by a cancel (for a test) in `before_fit`" in told and ended is None


class PastBackward(Trainer):
    "Computes gradients where nobody hears of it"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.preds = self.model(self.batch[0])
        self.loss = self.loss_func(self.preds, self.batch[1])
        if self.training:
            self.loss.backward()
            self.run_callbacks("step")
            self.opt.zero_grad()

    def step(self):
        self.opt.step()


class ByBackward(PastBackward):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.preds = self.model(self.batch[0])
        self.loss = self.loss_func(self.preds, self.batch[1])
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")

    def backward(self):
        self.loss.backward()

    def zero_grad(self):
        self.opt.zero_grad()


@pytest.mark.filterwarnings("ignore:.*waits in vain")
def test_gradients_that_come_past_backward_are_refused_and_the_way_told_is_right():
    def fit(cls):
        t = cls(loaders(), F.mse_loss, optim.Adam, net(), [DistributedCB(timeout=20)])
        t.fit(2)
        return weights(t)

    def run():
        with pytest.raises(RuntimeError, match="PastBackward.one_batch.*'backward', 'step', 'zero_grad'"):
            fit(PastBackward)
        return fit(ByBackward)

    alone = fit(PastBackward)
    for found in in_processes(2, run):
        assert (found - alone).abs().max() < 1e-12


def test_a_process_that_leaves_before_anything_has_begun_is_told():
    class Early:
        def before_fit(self, trainer):
            if rank() == 1:
                raise CancelFitException("not today")

    def run():
        try:
            trainer(Early()).fit(1, lr=0.1)
        except RankFailed as error:
            return str(error)

    told, ended = in_processes(2, run)
    assert "not today" in told and ended is None


def test_weights_that_one_process_changes_after_the_last_pass_are_told():
    class Late:
        def after_fit(self, trainer):
            if rank() == 1:
                with torch.no_grad():
                    next(trainer.model.parameters()).add_(1)

    ends = in_processes(2, told, lambda: [Late()])
    assert [kind for kind, _ in ends] == [RanksDiverged] * 2 and "After the fit" in ends[0][1]


QUESTIONS = {
    "gather": lambda ranks: ranks.gather({}),
    "total": lambda ranks: ranks.total(torch.ones(1)),
    "from_main": lambda ranks: ranks.from_main(lambda: 1),
}
MOMENTS = "before_batch", "after_backward", "after_batch", "log", "cleanup_fit"


@pytest.fixture
def looks_soon(monkeypatch):
    "Whoever waits looks why after a tenth of a second"
    monkeypatch.setattr(connection, "_LOOK", timedelta(seconds=0.1))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_question_that_one_process_asks_alone_is_told_in_all(moment, looks_soon):
    class AsksCB:
        def __init__(self, ask, where):
            self.ask, self.where = ask, where
            setattr(self, moment, self.act)

        def act(self, trainer):
            in_time = "fit" in moment or trainer.epoch == 0 and (moment == "log" or trainer.batch_num == 2)
            if in_time and rank() == self.where:
                self.ask(trainer.ranks)

    def all_of_them():
        return [told(lambda ask=ask: [AsksCB(ask, i % 2)]) for i, ask in enumerate(QUESTIONS.values())]

    for i, ends in enumerate(zip(*in_processes(2, all_of_them))):
        name = list(QUESTIONS)[i]
        assert ends[0] == ends[1] and ends[0][0] is RanksDiverged
        assert f"process {i % 2} is at a `{name}` of `" in ends[0][1]


def test_what_cannot_be_sent_is_named():
    class SendsCB:
        def after_batch(self, trainer):
            class Local:
                pass

            if trainer.ranks.is_main:
                trainer.ranks.gather(Local())

    first, second = in_processes(2, told, lambda: [SendsCB()])
    assert first[0] is TypeError and "A `Local` cannot be sent to other processes" in first[1]
    assert second[0] is RankFailed and "A `Local` cannot be sent to other processes" in second[1]


def test_sums_of_different_shapes_are_told():
    class AddsCB:
        def after_batch(self, trainer):
            trainer.ranks.total(torch.ones(1 + rank()))

    ends = in_processes(3, told, lambda: [AddsCB()])
    assert [kind for kind, _ in ends] == [RanksDiverged] * 3
    assert "process 2 is at a `total` of `AddsCB.after_batch`" in ends[0][1]


def test_the_last_window_of_a_pass_whose_end_nobody_knows():
    class UnknownEndCB:
        order = Order.JOIN - 1

        def before_epoch(self, trainer):
            trainer.n_batches = None

    def fit(n, window):
        t = trainer(AccumulationCB(window), UnknownEndCB(), dls=loaders(n, 5))
        t.fit(2, lr=0.05)
        return outcome(t)[0], t.n_updates

    cases = [(n, window) for n in (17, 25, 26, 33) for window in (2, 3)]
    alone, several = [fit(*case) for case in cases], in_processes(3, lambda: [fit(*case) for case in cases])
    for case, (weights, n_updates), *theirs in zip(cases, alone, *several):
        for found, updates in theirs:
            assert (found - weights).abs().max() < 1e-12 and updates == n_updates, case


def test_windows_of_a_batch_of_ones_own_are_refused():
    class Twice(Trainer):
        def one_batch(self):
            self.run_callbacks("predict", "get_loss")
            if self.training:
                self.run_callbacks("backward", "step", "zero_grad")

    def run():
        t = Twice(
            loaders(), F.mse_loss, optim.SGD, net(), [BasicTrainCB(), DistributedCB(), AccumulationCB(2)]
        )
        with pytest.raises(ValueError, match="Twice.one_batch"):
            t.fit(1)
        return "told"

    assert in_processes(2, run) == ["told"] * 2


def test_loaders_are_given_back_though_one_refuses():
    "What the first raises comes out, when all have had their turn"
    cb, back = SharedData("whole", True, False), []

    def refuses():
        raise RuntimeError("a loader that refuses")

    cb._give_back = [lambda: back.append("train"), refuses, lambda: back.append("valid")]
    with pytest.raises(RuntimeError, match="a loader that refuses"):
        cb._give_loaders_back()
    assert back == ["train", "valid"]
    cb._give_loaders_back()
    assert back == ["train", "valid"]


class Means(nn.Module):
    "What is learnt lies in a buffer"

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))


def without_parameters(n):
    class MeanCB:
        def predict(self, trainer):
            trainer.preds = trainer.batch[0] - trainer.model.mean

        def step(self, trainer):
            trainer.model.mean += 0.1 * trainer.preds.mean(0)

        get_loss = backward = zero_grad = lambda self, trainer: None

    made = Trainer(loaders(), None, None, Means(), [MeanCB(), DistributedCB(timeout=20)])
    try:
        made.fit(1, valid=False)
    except ValueError as error:
        return str(error)


def test_what_has_no_gradients_is_refused_before_it_trains():
    for text in in_processes(2, without_parameters, 1):
        assert text.startswith("Processes that share batches put their gradients together, and there is no")
