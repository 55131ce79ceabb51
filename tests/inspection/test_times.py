"""`TimesCB` and `trainer.times` against a clock that moves only when somebody spends time.

What is reported is what each had spent, in whatever fit, and the sum is the whole. And against the same fit
without them: nothing else has changed, however it ends.
"""

import copy
import json
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode

from isaac_loop.all import (
    BasicTrainCB,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CheckpointCB,
    DataLoaders,
    EvaluatorCB,
    MetricsCB,
    NBatchCB,
    ProgressCB,
    TimesCB,
    Trainer,
    with_cbs,
)
from isaac_loop.inspection.device_waits import what_waits
from isaac_loop.inspection.time_report import LoopTimes
from isaac_loop.loop.events import EVENTS, SPANS
from observing import observe, random_states, unchanged
from runs import everything, fit, make_trainer, momentum_sgd, same
from small import StepsAsMethods, data, trainer_with

DATA, LOOP = "waiting for data", "the loop itself"


class Clock:
    "Time that stands still; a function tells it, so that no run on the side puts it back"

    def __init__(self):
        self.now = 0.0


class Spender:
    "Answers every event but the steps, and spends 1/8 s in each"

    def __init__(self, spend, events=None):
        self.spent = {}
        for event in events or [e for e in EVENTS if e not in SPANS]:
            setattr(self, event, self._spending(event, spend))

    def _spending(self, event, spend):
        def handler(trainer, **extra):
            kind = {True: "train", False: "valid"}[trainer.plan.training]
            in_pass = event == "cleanup_epoch" or any(span.name == "epoch" for span in trainer.plan.spans)
            key = (kind if in_pass else "", event)
            self.spent[key] = self.spent.get(key, 0) + 0.125
            spend(0.125)

        handler.__name__ = event
        return handler


@pytest.fixture
def time():
    "A clock, and a function that spends seconds"
    clock = Clock()

    def spend(seconds):
        clock.now += seconds

    return SimpleNamespace(clock=lambda: clock.now, spend=spend)


def timer(time, **options):
    return TimesCB(clock=time.clock, **options)


def by_call(times):
    return {(row["pass"], row["event"], row["callback"]): row for row in times.rows}


def left_clean(trainer):
    "Nothing of the watching is left"
    assert trainer.plan.changes == ()
    assert _get_current_dispatch_mode_stack() == []
    assert "DeviceWaits" not in torch.cuda.synchronize.__qualname__
    assert torch.cuda.synchronize.__module__ == "torch.cuda"


# --- The sum is the whole


def test_each_is_given_what_he_has_spent_and_nobody_else(time):
    spender = Spender(time.spend)
    spender.name = "spender"
    trainer = trainer_with(timer(time), spender)
    trainer.fit(2)
    times = trainer.TimesCB.times
    found = {
        (of, event): row["seconds"] for (of, event, who), row in by_call(times).items() if who == "spender"
    }
    spent = spender.spent
    before_fit = spent.pop(("", "before_fit"))
    assert found == spent
    assert by_call(times)["", "before_fit", "all others"]["seconds"] == before_fit
    assert times.total == time.clock() == before_fit + sum(spent.values())
    left_clean(trainer)


def test_trainer_times_tells_before_fit_apart(time):
    one, two = Spender(time.spend, ["before_fit"]), Spender(time.spend, ["before_fit", "cleanup_fit"])
    one.name, two.name = "one", "two"
    trainer = trainer_with(one, two)
    times = trainer.times(1, timer=timer(time))
    assert (times.seconds("one"), times.seconds("two"), times.total) == (0.125, 0.25, 0.375)


def test_trainer_times_has_what_comes_before_all_callbacks(time):
    def opt_func(params, lr):
        time.spend(2)
        return optim.SGD(params, lr)

    trainer = trainer_with(Spender(time.spend))
    trainer.opt_func = opt_func
    times = trainer.times(1, timer=timer(time))
    assert times.seconds("getting ready") == 2
    assert times.seconds("the loop itself") == 0
    assert times.total == time.clock()


def test_calls_are_counted():
    trainer = trainer_with(MetricsCB(), TimesCB())
    trainer.fit(2)
    rows = by_call(trainer.TimesCB.times)
    assert rows["train", "backward", "BasicTrainCB"]["calls"] == 6
    assert rows["valid", "predict", "BasicTrainCB"]["calls"] == 4
    assert rows["train", "batch", LOOP]["calls"] == 6
    assert rows["train", "", DATA]["calls"] == 2 * (
        1 + 3 + 1
    )  # `iter`, three batches, and that there is no more
    assert rows["", "fit", LOOP]["calls"] == 1


class Slow:
    "Batches that take a quarter of a second each"

    def __init__(self, batches, spend):
        self.batches, self.spend = batches, spend

    def __iter__(self):
        for batch in self.batches:
            self.spend(0.25)
            yield batch


def slowly(trainer, time):
    trainer.dls.train, trainer.dls.valid = (
        Slow(list(o), time.spend) for o in (trainer.dls.train, trainer.dls.valid)
    )
    return trainer


def test_waiting_for_data_is_told_by_pass(time):
    trainer = slowly(trainer_with(timer(time), n=3), time)
    trainer.fit(2)
    rows = by_call(trainer.TimesCB.times)
    assert rows["train", "", DATA]["seconds"] == 2 * 3 * 0.25
    assert rows["valid", "", DATA]["seconds"] == 2 * 2 * 0.25
    assert "waited for data" in trainer.TimesCB.times.advice


def test_a_call_inside_a_call_is_taken_from_the_outer_one(time):
    class Outer:
        def after_batch(self, trainer):
            time.spend(1)
            trainer.run_callbacks("measured")
            time.spend(2)

    class Inner:
        def measured(self, trainer):
            time.spend(4)

    trainer = trainer_with(Outer(), Inner(), timer(time))
    trainer.fit(1, valid=False)
    times = trainer.TimesCB.times
    assert (times.seconds("Outer"), times.seconds("Inner"), times.total) == (9, 12, 21)


def test_an_evaluation_in_the_middle_is_that_of_its_callback_once(time):
    class Model(nn.Linear):
        def forward(self, x):
            time.spend(0.25)
            return super().forward(x)

    evaluator = EvaluatorCB(data(2), updates=2)
    trainer = trainer_with(evaluator, timer(time), n=4)
    trainer.model = Model(1, 1)
    trainer.fit(1, valid=False)
    times = trainer.TimesCB.times
    assert times.seconds("BasicTrainCB", "predict") == 4 * 0.25
    assert times.seconds("EvaluatorCB") == 2 * evaluator.n_evaluations * 0.25 > 0
    assert times.total == time.clock()


class OwnBatch(Trainer):
    "Without a span, and without the names of steps"

    def one_batch(self):
        self.spend(0.5)
        (x,), (y,) = self.split(self.batch)
        self.loss = self.loss_func(self.model(x), y)
        if self.training:
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()


class OwnSpan(Trainer):
    events = ("look",)

    def one_batch(self):
        self.check()
        super().one_batch()

    @with_cbs("check", CancelStepException)
    def check(self):
        self.spend(0.5)
        self.run_callbacks("look")


def test_an_own_batch_is_named_after_its_trainer(time):
    trainer = slowly(trainer_with(timer(time), cls=OwnBatch), time)
    trainer.spend = time.spend
    trainer.callbacks = [trainer.TimesCB]
    trainer.fit(1, valid=False)
    rows = by_call(trainer.TimesCB.times)
    assert rows["train", "one_batch", "OwnBatch"]["seconds"] == 3 * 0.5
    assert rows["train", "", DATA]["seconds"] == 3 * 0.25
    assert trainer.TimesCB.times.total == time.clock()


@pytest.mark.parametrize(
    "answers", [[], ["before_check"], ["after_check", "look"], ["cleanup_check", "check"]]
)
def test_the_body_of_an_own_span_is_told(time, answers):
    trainer = trainer_with(timer(time), cls=OwnSpan)
    trainer.spend = time.spend
    if answers:
        spender = Spender(time.spend, answers)
        spender.name = "spender"
        trainer.add_callback(spender)
    trainer.fit(1)
    times = trainer.TimesCB.times
    assert times.seconds("OwnSpan", "check") == 5 * 0.5
    assert not answers or times.seconds("spender") == 5 * 0.125 * len(answers)
    assert times.total == time.clock()


def test_steps_that_are_methods_have_the_name_of_the_trainer(time):
    class Steps(StepsAsMethods):
        def backward(self):
            time.spend(1)
            super().backward()

    trainer = trainer_with(timer(time), cls=Steps)
    trainer.remove_callback(BasicTrainCB)
    trainer.fit(1)
    assert trainer.TimesCB.times.seconds("Steps", "backward") == 3
    assert by_call(trainer.TimesCB.times)["train", "backward", "Steps"]["where"].startswith("test_times.py:")


def test_a_step_that_evaluates_again_counts_once(time):
    "LBFGS runs the other steps inside its own"

    class Loss(nn.Module):
        def forward(self, preds, targets):
            time.spend(1)
            return F.mse_loss(preds, targets)

    trainer = trainer_with(timer(time), n=2)
    trainer.opt_func, trainer.loss_func = optim.LBFGS, Loss()
    trainer.fit(1, lr=0.1, valid=False)
    times = trainer.TimesCB.times
    assert times.seconds("BasicTrainCB", "get_loss") == times.total == time.clock() > 2
    assert times.seconds("BasicTrainCB", "step") == 0


def test_it_is_counted_when_callbacks_come_and_go(time):
    class Guest:
        def after_batch(self, trainer):
            time.spend(1)
            if trainer.batch_num == 1:
                trainer.remove_callback(self)

    class Host:
        def before_batch(self, trainer):
            time.spend(0.5)
            if trainer.batch_num == 0:
                trainer.add_callback(Guest(), force=True)

    trainer = trainer_with(Host(), timer(time), n=4)
    trainer.fit(2, valid=False)
    times = trainer.TimesCB.times
    assert (times.seconds("Host"), times.seconds("Guest"), times.total) == (4, 4, 8)
    left_clean(trainer)


def test_it_may_come_and_go_itself(time):
    spend = Spender(time.spend, ["after_batch"])
    spend.name = "spend"
    mine = timer(time)

    def before_batch(trainer):
        if trainer.epoch == 0 and trainer.batch_num == 2:
            trainer.add_callback(mine)
        if trainer.epoch == 1 and trainer.batch_num == 2:
            trainer.remove_callback(mine)

    trainer = trainer_with(spend, before_batch, n=4)
    trainer.fit(3, valid=False)
    assert mine.times.seconds("spend") == mine.times.total == 4 * 0.125
    left_clean(trainer)


def test_two_of_them_find_the_same(time):
    spender = Spender(time.spend)
    spender.name = "spender"
    one, two = timer(time), timer(time)
    one.name, two.name = "one", "two"
    trainer = trainer_with(one, spender, two)
    trainer.fit(2)
    assert one.times.seconds("spender") == two.times.seconds("spender") > 0
    assert one.times.total == time.clock()
    left_clean(trainer)


def test_one_object_in_two_fits_and_two_trainers(time):
    mine = timer(time)
    for n in (1, 2):
        spender = Spender(time.spend, ["after_batch"])
        spender.name = "spender"
        trainer = trainer_with(mine, spender)
        for _ in range(2):
            trainer.fit(n, valid=False)
            assert mine.times.seconds("spender") == n * 3 * 0.125


def test_it_can_be_read_in_the_middle(time):
    seen = []

    class Reader:
        def after_batch(self, trainer):
            time.spend(1)
            seen.append((trainer.TimesCB.times.seconds(self), trainer.TimesCB.times.total))

    trainer = trainer_with(Reader(), timer(time))
    trainer.fit(1, valid=False)
    assert seen == [(1, 1), (2, 2), (3, 3)]


def test_a_stream_is_timed_where_it_is(time):
    def stream():
        for batch in data(5):
            time.spend(0.25)
            yield batch

    trainer = trainer_with(timer(time))
    trainer.dls.train = stream()
    trainer.fit(1, valid=False)
    assert trainer.TimesCB.times.seconds(DATA) == trainer.TimesCB.times.total == 5 * 0.25


def test_a_snapshot_put_back_in_the_middle_loses_no_time(time):
    class Back:
        def after_batch(self, trainer):
            time.spend(1)
            if trainer.batch_num == 1:
                self.snapshot = trainer.snapshot()
            if trainer.batch_num == 4:
                self.snapshot.restore()

    trainer = trainer_with(Back(), timer(time), n=6)
    trainer.fit(2, valid=False)
    assert trainer.TimesCB.times.seconds("Back") == trainer.TimesCB.times.total == 12
    left_clean(trainer)


def test_an_own_run_on_the_side_may_be_timed_as_well(time):
    inner = timer(time)
    inner.name = "inner"
    spender = Spender(time.spend, ["after_batch"])
    spender.name, spender.order = "spender", 5
    evaluator = EvaluatorCB(data(2), updates=3, callbacks=inner)
    trainer = trainer_with(spender, timer(time), evaluator)
    trainer.fit(1, valid=False)
    assert inner.times.seconds("spender") == inner.times.total == 2 * 0.125
    assert trainer.TimesCB.times.seconds("EvaluatorCB") == 2 * 0.125
    assert trainer.TimesCB.times.seconds("spender") == 3 * 0.125


# --- However it ends


ENDS = [
    KeyboardInterrupt,
    ValueError,
    CancelStepException,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
]


class EndCB:
    "Raises at one event, the second time if there is one in a fit"

    def __init__(self, event, error):
        self.left, self.error = 0 if event.endswith("_fit") else 1, error
        setattr(self, event, self._end)

    def _end(self, trainer):
        self.left -= 1
        if self.left < 0:
            self.left = 99
            raise self.error("the end")


def outcome(trainer):
    try:
        trainer.fit(2, lr=0.1)
    except BaseException as error:
        frames, tb = [], error.__traceback__
        while tb is not None:
            frames.append((tb.tb_frame.f_code.co_name, tb.tb_frame.f_code.co_filename))
            tb = tb.tb_next
        return type(error), str(error), getattr(error, "__notes__", []), frames
    return None


@pytest.mark.parametrize("error", ENDS)
def test_it_ends_as_without_it_and_leaves_nothing(error, time):
    for event in EVENTS:
        ended = []
        for cbs in ([], [timer(time)]):
            torch.manual_seed(0)
            spender = Spender(time.spend)
            spender.name = "spender"
            trainer = trainer_with(spender, EndCB(event, error), *cbs)
            start = time.clock()
            ended.append((outcome(trainer), [p.tolist() for p in trainer.model.parameters()]))
            whole = time.clock() - start
        assert ended[0] == ended[1], event
        assert trainer.TimesCB.times.total == whole
        left_clean(trainer)
        trainer.fit(1)
        left_clean(trainer)


def interrupted(trainer, after):
    "A fit, interrupted in the given one of the lines that the timing runs; whether there were so many"
    left = [after]

    def line(frame, event, arg):
        left[0] -= event == "line"
        if left[0] == 0:
            raise KeyboardInterrupt
        return line

    def call(frame, event, arg):
        return line if frame.f_globals.get("__name__") in TIMING else None

    sys.settrace(call)
    try:
        trainer.fit(1)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return left[0] <= 0


TIMING = [f"isaac_loop.inspection.{name}" for name in ("times", "time_account", "device_waits")]


def test_after_an_interrupt_in_any_line_the_next_fit_is_clean(time):
    after = 1
    spender = Spender(time.spend)
    spender.name = "spender"
    trainer = trainer_with(spender, timer(time, n_looked=1), n=2)
    while interrupted(trainer, after):
        start = time.clock()
        trainer.fit(1)
        assert trainer.TimesCB.times.total == time.clock() - start, after
        left_clean(trainer)
        after += 61
    assert after > 1000


def test_an_error_of_the_data_shows_as_without_it():
    def broken():
        yield from data(2)
        raise OSError("disk")

    found = []
    for cbs in ([], [TimesCB()]):
        trainer = trainer_with(*cbs)
        trainer.dls.train = broken()
        found.append(outcome(trainer))
    assert found[0] == found[1]
    assert found[0][0] is OSError


# --- It changes nothing


def test_a_run_with_everything_in_it_stays_the_same_to_the_bit():
    alone = fit(make_trainer(everything()))
    timed = fit(make_trainer([*everything(), TimesCB(n_looked=99)]))
    same(alone, timed)
    times = timed.TimesCB.times
    assert abs(sum(row["seconds"] for row in times.rows) / times.total - 1) < 1e-9


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x[:, None].expand(-1, 3, -1))[:, 0, :3]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 3, 2, dropout=0.2)

    def forward(self, x):
        return self.layer(x[None])[0][0]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.MaxPool1d(2), nn.Flatten()
        )
        self.last = nn.Linear(12, 3)

    def forward(self, x):
        return self.last(F.dropout(self.layers(x[:, None]), 0.2, self.training))


@pytest.mark.parametrize("model", [Attention, Recurrent, Convolution])
@pytest.mark.parametrize("opt_func", [momentum_sgd, optim.AdamW])
def test_models_and_optimizers_compute_the_same_while_looked_at(model, opt_func):
    found = []
    for cbs in ([], [TimesCB(n_looked=99)]):
        torch.manual_seed(0)
        trainer = make_trainer([BasicTrainCB(), MetricsCB(), *cbs], opt_func=opt_func, model=model())
        found.append(fit(trainer, 2))
    same(*found)


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
def test_what_is_compiled_stays_compiled(how):
    "A mode would have had it computed otherwise, in the batches looked at"
    found = []
    for cbs in ([], [TimesCB(n_looked=2)]):
        torch.manual_seed(0)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        trainer = trainer_with(*cbs, Greedy(lambda trainer: trainer.loss.item()))
        trainer.model = torch.compile(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), backend=how)
        trainer.fit(2)
        frames = dict(torch._dynamo.utils.counters["frames"])
        found.append((frames, [p.tolist() for p in trainer.model.parameters()]))
    assert found[0] == found[1]
    assert found[0][0]["ok"] > 0
    waits = {(o["callback"], o["what"], o["times"]) for o in trainer.TimesCB.times.waits}
    assert waits == {("Greedy", "item", 2)}


def test_batches_are_for_others_what_they_were():
    seen = []

    class Looker:
        def before_batch(self, trainer):
            seen.append((trainer.n_batches, len(trainer.batches), trainer.batches.total, trainer.start_batch))

    for cbs in ([], [TimesCB()]):
        trainer_with(Looker(), NBatchCB(2), ProgressCB("plain"), *cbs, n=5).fit(1)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_it_goes_on_with_a_saved_run(tmp_path):
    "Stopped in the middle of an epoch, with the timing on, and gone on with it: as never stopped without it"
    whole = fit(make_trainer([BasicTrainCB(), MetricsCB()]))

    class Stop:
        def after_batch(self, trainer):
            if trainer.epoch == 1 and trainer.batch_num == 3:
                raise KeyboardInterrupt

    def saving(*cbs):
        saved = CheckpointCB(tmp_path, every=2)
        return make_trainer([BasicTrainCB(), MetricsCB(), saved, TimesCB(), *cbs])

    with pytest.raises(KeyboardInterrupt):
        fit(saving(Stop()))
    second = fit(saving())
    same(whole, second)
    assert by_call(second.TimesCB.times)["train", "predict", "BasicTrainCB"]["calls"] < 21


def test_trainers_with_one_are_copied_and_pickled(time):
    trainer = trainer_with(timer(time), TimesCB.__new__(TimesCB) and MetricsCB())
    trainer.fit(1)
    other = copy.deepcopy(trainer.callbacks[1])
    assert other.times.total == trainer.TimesCB.times.total
    mine = TimesCB()
    trainer_with(mine).fit(1)
    assert pickle.loads(pickle.dumps(mine)).times.total == mine.times.total


# --- Who waits


def planted(*cbs, model=None, cls=Trainer, **options):
    trainer = trainer_with(*cbs, TimesCB(**options), cls=cls)
    if model is not None:
        trainer.model = model
    trainer.fit(2)
    left_clean(trainer)
    return trainer.TimesCB.times


def lines(times):
    return {(o["pass"], o["callback"], o["event"], o["what"], o["line"]): o["times"] for o in times.waits}


class Greedy:
    def __init__(self, line):
        self.ask = line

    def after_batch(self, trainer):
        self.ask(trainer)


@pytest.mark.parametrize(
    "what, ask",
    [
        ("item", lambda trainer: trainer.loss.item()),
        ("item", lambda trainer: float(trainer.loss.detach())),
        ("item", lambda trainer: trainer.loss > 0 and None),
        ("item", lambda trainer: int(trainer.preds.argmax())),
        ("item", lambda trainer: f"{trainer.loss:.2f}"),
        ("nonzero", lambda trainer: trainer.preds.nonzero()),
        ("nonzero", lambda trainer: torch.where(trainer.preds > 0)),
        ("index by a mask", lambda trainer: trainer.preds[trainer.preds > 0]),
        ("masked_select", lambda trainer: trainer.preds.masked_select(trainer.preds > 0)),
        ("equal", lambda trainer: torch.equal(trainer.preds, trainer.preds)),
        ("unique", lambda trainer: trainer.preds.unique()),
    ],
)
def test_whoever_asks_for_a_result_is_found_by_callback_method_and_line(what, ask):
    times = planted(Greedy(ask))
    (train, valid) = (o for o in times.waits if o["what"] == what)
    for wait, of in ((train, "train"), (valid, "valid")):
        assert (wait["pass"], wait["callback"], wait["event"]) == (of, "Greedy", "after_batch")
        assert wait["line"].startswith(f'("{what}", lambda trainer')
        assert wait["where"] == f"test_times.py:{ask.__code__.co_firstlineno}"
    assert (train["times"], valid["times"]) == (3, 3)  # In the first three batches of each
    assert str(times).count("- Greedy.after_batch, 6 ×") == 1


def test_what_does_not_wait_is_not_reported():
    class Modest:
        def after_batch(self, trainer):
            loss = trainer.loss.detach() * 2
            loss.add_(1).clamp(min=0).to(torch.float64)
            trainer.preds[0], trainer.preds[torch.arange(2)], trainer.preds.clone()
            trainer.preds.detach()[trainer.preds > 0] = 0.0
            torch.where(trainer.preds > 0, 1.0, 2.0), loss.shape, trainer.preds.max()

    assert planted(Modest()).waits == []


def test_ours_make_nobody_wait_in_a_batch():
    trainer = make_trainer([o for o in everything() if not isinstance(o, EvaluatorCB)] + [TimesCB()])
    fit(trainer, 1)
    assert trainer.TimesCB.times.waits == []


def test_it_is_found_in_a_model_a_helper_and_an_own_batch():
    class Picky(nn.Linear):
        def forward(self, x):
            if x.sum() > 1e9:  # Here
                return x
            return super().forward(x)

    class Helped:
        def after_batch(self, trainer):
            self.help(trainer.loss)

        def help(self, loss):
            return loss.item()  # And here

    class Asking(OwnBatch):
        def one_batch(self):
            super().one_batch()
            self.loss.tolist(), self.loss.item()  # And there

        def spend(self, seconds):
            pass

    found = lines(planted(Helped(), model=Picky(1, 1)))
    assert found["train", "BasicTrainCB", "predict", "item", "if x.sum() > 1e9:  # Here"] == 3
    assert found["valid", "Helped", "after_batch", "item", "return loss.item()  # And here"] == 3
    trainer = trainer_with(TimesCB(n_looked=1), cls=Asking)
    trainer.remove_callback(BasicTrainCB)
    trainer.fit(1)
    found = lines(trainer.TimesCB.times)
    assert (
        found["train", "Asking", "one_batch", "item", "self.loss.tolist(), self.loss.item()  # And there"]
        >= 1
    )


def test_synchronizing_is_found(monkeypatch):
    called = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: called.append(args))
    mine = torch.cuda.synchronize
    trainer = trainer_with(Greedy(lambda trainer: torch.cuda.synchronize(0)), TimesCB(n_looked=2))
    trainer.fit(1)
    assert torch.cuda.synchronize is mine
    assert called == [(0,)] * 5
    assert [(o["what"], o["times"]) for o in trainer.TimesCB.times.waits] == [("synchronize", 2)] * 2


def test_copies_wait_from_a_device_to_the_processor_only():
    aten = torch.ops.aten
    cpu, gpu = (SimpleNamespace(device=torch.device(o)) for o in ("cpu", "cuda"))
    to = aten._to_copy.default
    assert what_waits(to, (gpu,), dict(device=torch.device("cpu"))) == "copy to the CPU"
    assert what_waits(to, (gpu,), dict(device=torch.device("cpu"), non_blocking=True)) is None
    assert what_waits(to, (cpu,), dict(device=torch.device("cuda"))) is None
    assert what_waits(to, (gpu,), dict(dtype=torch.float64)) is None
    copying = aten.copy_.default
    assert what_waits(copying, (cpu, gpu), {}) == "copy to the CPU"
    assert what_waits(copying, (cpu, gpu, True), {}) is None
    assert what_waits(copying, (gpu, cpu), {}) is None
    assert what_waits(aten.add.Tensor, (cpu, cpu), {}) is None


class OwnMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


SOME = "before_fit before_epoch before_batch before_predict predict after_backward after_batch cleanup_batch"
INNER = [*SOME.split(), "after_epoch", "cleanup_epoch", "after_fit", "cleanup_fit"]


@pytest.mark.parametrize("first", INNER)
def test_modes_of_others_come_and_go_between_any_two_events(first):
    "Put on at one event in one batch and taken off at another, before and after ours"
    for last in INNER:

        class Mode:
            mode, turn = None, 0

            def on(self, trainer):
                if self.mode is None and self.turn == 0:
                    self.mode = OwnMode().__enter__()
                    self.turn = 1

            def off(self, trainer):
                if self.mode is not None:
                    self.mode.__exit__(None, None, None)
                    self.mode = None

            def both(self, trainer):
                if self.mode is None:
                    self.on(trainer)
                else:
                    self.off(trainer)

        cb = Mode()
        if first == last:
            setattr(cb, first, cb.both)
        else:
            setattr(cb, first, cb.on)
            setattr(cb, last, cb.off)
        trainer = trainer_with(cb, TimesCB(n_looked=2))
        trainer.fit(2)
        cb.off(trainer)
        left = len(_get_current_dispatch_mode_stack())
        for _ in range(left):
            _pop_mode()
        assert left == 0, (first, last)


# --- A device


class Event:
    "An event in the queue of a device that works off its orders one after the other"

    done, clock = 0.0, None
    made = 0

    def __init__(self):
        Event.made += 1

    def record(self):
        self.at = max(Event.done, Event.clock())

    def query(self):
        return Event.clock() >= self.at

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return 1000 * (later.at - self.at)


def test_a_device_has_its_own_times(time):
    Event.done, Event.clock, Event.made = 0.0, time.clock, 0

    class Model(nn.Linear):
        def forward(self, x):
            Event.done = max(Event.done, time.clock()) + 2  # What the device will need
            time.spend(0.25)  # What ordering needs
            return super().forward(x)

    class Greedy:
        def after_batch(self, trainer):
            time.spend(max(Event.done - time.clock(), 0))  # Waits until all is done

    trainer = trainer_with(Greedy(), timer(time, event=Event))
    trainer.model = Model(1, 1)
    trainer.fit(2)
    times = trainer.TimesCB.times
    rows = by_call(times)
    assert rows["train", "after_batch", "Greedy"]["seconds"] == 6 * 1.75
    assert rows["train", "predict", "BasicTrainCB"]["seconds"] == 6 * 0.25
    assert rows["train", "predict", "BasicTrainCB"]["device"] == 6 * 2
    assert rows["train", "after_batch", "Greedy"]["device"] == 0
    assert sum(row["device"] for row in times.rows) == times.total == time.clock() == 20
    assert "device ms" in times.table().columns
    assert Event.made < 60  # They are used again


def test_on_a_gpu_its_own_events_are_used(time, monkeypatch):
    "A stand-in for a model on a GPU, whose events note on which stream they are"
    streams = []

    class CudaEvent(Event):
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self, stream):
            streams.append(stream)
            super().record()

    Event.done, Event.clock = 0.0, time.clock
    monkeypatch.setattr(torch.cuda, "Event", CudaEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")

    class Model:
        def parameters(self):
            return iter([SimpleNamespace(device=torch.device("cuda:1"))])

    cbs = [timer(time), Spender(time.spend)]
    trainer = Trainer(DataLoaders(data(), data()), None, None, Model(), cbs)
    trainer.fit(1, train=False)
    assert set(streams) == {"stream of cuda:1"}
    times = trainer.TimesCB.times
    device = sum(row["device"] for row in times.rows)
    assert 0 < device == times.total - by_call(times)["", "before_fit", "all others"]["seconds"]


# --- On the side


def test_a_run_on_the_side_leaves_everything_as_it_was():
    rows = [(torch.randn(8, 8), torch.randint(3, (8,))) for _ in range(6)]
    trainer = make_trainer(everything(), DataLoaders(rows[:4], rows[4:]))
    fit(trainer, 1)
    for arguments in (
        dict(lr=0.1),
        dict(n_epochs=2),
        dict(train=False),
        dict(below=99, keep_opt=True),
    ):
        before, numbers = observe(trainer), random_states()
        assert trainer.times(**arguments).total > 0
        unchanged(trainer, before)
        assert random_states() == numbers


def test_a_fit_after_it_is_the_fit_without_it():
    one, two = fit(make_trainer(everything())), make_trainer(everything())
    two.times(1, lr=0.3)
    same(one, fit(two))


def test_it_may_be_asked_in_the_middle_of_a_fit():
    class Ask:
        def after_batch(self, trainer):
            if trainer.batch_num == 1:
                self.times = trainer.times(1, callbacks=NBatchCB(1), valid=False)

    one = fit(make_trainer([BasicTrainCB(), MetricsCB()]))
    two = fit(make_trainer([BasicTrainCB(), MetricsCB(), Ask()]))
    same(one, two)
    assert by_call(two.Ask.times)["train", "predict", "BasicTrainCB"]["calls"] == 1


def test_it_is_put_back_after_an_error_too():
    class Bad:
        def after_batch(self, trainer):
            raise KeyboardInterrupt

    trainer = trainer_with()
    before = observe(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.times(1, callbacks=Bad())
    unchanged(trainer, before)
    left_clean(trainer)


def test_who_saves_and_reports_stays_away_and_is_named(tmp_path):
    cbs = [BasicTrainCB(), MetricsCB(), ProgressCB("plain"), CheckpointCB(tmp_path / "run")]
    trainer = make_trainer(cbs)
    times = trainer.times(1)
    assert times.left_out == ["ProgressCB", "CheckpointCB"]
    assert "`ProgressCB`, `CheckpointCB`" in str(times)
    assert not (tmp_path / "run").exists()


def test_it_stands_beside_one_that_is_there_already():
    trainer = trainer_with(TimesCB())
    assert trainer.times(1).seconds("BasicTrainCB") > 0
    with pytest.raises(AttributeError, match="timed no fit yet"):
        _ = trainer.TimesCB.times


def test_wrong_arguments_are_refused_with_words():
    trainer = trainer_with()
    with pytest.raises(TypeError):
        trainer.times(1, epochs=3)
    with pytest.raises(ValueError, match="n_epochs"):
        trainer.times(-1)
    trainer.dls.train = iter(data())
    with pytest.raises(ValueError, match="`dls.train` can be walked only once.*Add `TimesCB"):
        trainer.times(1)
    with pytest.raises(ValueError, match="`n_looked` is -1"):
        TimesCB(n_looked=-1)
    with pytest.raises(ValueError, match="`n_traced` is 1.5"):
        TimesCB(n_traced=1.5)
    with pytest.raises(TypeError, match="`clock` is 3"):
        TimesCB(clock=3)
    with pytest.raises(AttributeError, match="Add it to a trainer, and call `fit`"):
        _ = TimesCB().times


# --- What is shown


def test_a_planted_sleep_is_found_by_callback_method_and_line(time):
    class Sleepy:
        def before_batch(self, trainer):
            pass

        def after_batch(self, trainer):
            time.spend(1)

    trainer = trainer_with(Sleepy(), MetricsCB(), timer(time))
    trainer.fit(1)
    slowest = trainer.TimesCB.times.rows[0]
    line = Sleepy.after_batch.__code__.co_firstlineno
    assert (slowest["callback"], slowest["event"], slowest["where"]) == (
        "Sleepy",
        "after_batch",
        f"test_times.py:{line}",
    )
    assert trainer.TimesCB.times.advice.startswith(
        f"100 % of the time went into `Sleepy.after_batch` (test_times.py:{line})"
    )


def row(seconds, callback="A", event="after_batch", of="train"):
    return {"pass": of, "event": event, "callback": callback, "calls": 1, "seconds": seconds, "where": ""}


WAIT = dict(row(0), what="item", where="a.py:3", line="x.item()", times=3)


@pytest.mark.parametrize(
    "rows, facts, advice",
    [
        (
            [row(61, DATA, ""), row(39)],
            dict(num_workers=0),
            "61 % of the time the loop waited for data: .*`num_workers=2`",
        ),
        (
            [row(61, DATA, "") | dict(calls=61_000), row(39)],
            dict(num_workers=0),
            "61 % .* a batch comes in 1.0 ms.*larger batches.*in_memory=True",
        ),
        ([row(61, DATA, ""), row(39)], dict(num_workers=4), "61 % .* more than 4 workers"),
        ([row(61, DATA, ""), row(39)], {}, "61 % .* `DataLoader`"),
        ([row(30, DATA, ""), row(70)], {}, "70 % of the time went into `A.after_batch`: do it less"),
        (
            [row(15), row(15, of="valid"), row(70, "B", "predict")],
            {},
            "30 % of the time went into `A.after_batch`",
        ),
        ([row(90, "B", "predict"), row(10)], {}, "90 % of the time went into the steps themselves"),
        (
            [row(50, LOOP, "batch"), row(50, "B", "predict")],
            {},
            "50 % of the time went into the loop itself: larger",
        ),
        (
            [row(70, "B", "predict", "valid"), row(30, "B", "step")],
            {},
            "70 % of the time went into validation",
        ),
        (
            [dict(row(90, "B", "predict"), device=1)],
            dict(waits=[WAIT]),
            "`A.after_batch` waits for the device .a.py:3",
        ),
        ([row(90, "B", "predict")], dict(waits=[WAIT]), "100 % of the time went into the steps"),
        (
            [row(60, "all others", "before_fit", ""), row(40, "B", "step")],
            {},
            "60 % .*`trainer.times` tells which",
        ),
        ([row(60, "getting ready", "fit", ""), row(40, "B", "step")], {}, "60 % .* time more epochs"),
        ([], {}, "No time has passed"),
        ([row(0)], {}, "No time has passed"),
    ],
)
def test_the_advice_is_about_what_is_largest(rows, facts, advice):
    import re

    assert re.match(advice, LoopTimes(rows, **facts).advice)


def test_the_table_adds_up_however_many_rows_it_shows():
    rows = [row(i, f"cb{i}") for i in range(1, 31)]
    times = LoopTimes(rows)
    for n in (None, 0, 1, 29, 30, 31):
        shown = times.table(n).rows
        *body, total = [float(o["ms"]) for o in shown]
        assert sum(body) == total == 1000 * times.total
    assert len(times.table(12)) == 14
    assert "18 others" in str(times)
    assert "18 others" in times._repr_markdown_()


def test_the_time_line_can_be_read_by_its_viewers(tmp_path, time):
    "Fields of the format, and calls that lie inside one another or beside one another"
    spender = Spender(time.spend)
    spender.name = "spender"
    Event.done, Event.clock = 0.0, time.clock
    trainer = trainer_with(timer(time, event=Event), spender)
    trainer.fit(2)
    trainer.TimesCB.times.save_trace(tmp_path / "new" / "trace.json")
    trace = json.loads((tmp_path / "new" / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    lines = {o["tid"]: o["args"]["name"] for o in trace["traceEvents"] if o["ph"] == "M"}
    assert lines == {1: "loop", 2: "device"}
    events = [o for o in trace["traceEvents"] if o["ph"] == "X"]
    for event in events:
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} <= event.keys()
        assert isinstance(event["name"], str) and event["name"]
        assert event["ts"] >= 0 and event["dur"] >= 0
    host = [(o["ts"], o["ts"] + o["dur"]) for o in events if o["tid"] == 1]
    for a, b in host:
        for c, d in host:
            assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)
    names = {o["name"] for o in events}
    assert {"fit", "epoch", "batch", DATA, "spender.after_batch", "BasicTrainCB.predict"} <= names
    assert max(o["dur"] for o in events if o["tid"] == 1) == 1e6 * time.clock()


def test_the_time_line_has_a_limit():
    trainer = trainer_with(TimesCB(n_traced=5))
    trainer.fit(1)
    assert len(trainer.TimesCB.times.stays[0]) == 5
    trainer = trainer_with(TimesCB(n_traced=0))
    trainer.fit(1)
    with pytest.raises(ValueError, match="no time line"):
        trainer.TimesCB.times.save_trace("trace.json")
    with pytest.raises(TypeError):
        trainer.TimesCB.times.save_trace(3)


def test_bars_are_drawn_on_axes_of_ones_own(time):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    trainer = trainer_with(timer(time), Spender(time.spend))
    trainer.fit(1)
    ax = trainer.TimesCB.times.plot(Figure().subplots(), n=5)
    assert len(ax.patches) == 5
    assert "%" in ax.get_xlabel()


def test_a_callback_is_found_by_itself_or_its_name():
    trainer = trainer_with(MetricsCB(), TimesCB())
    trainer.fit(1)
    times = trainer.TimesCB.times
    assert times.seconds(trainer.MetricsCB) == times.seconds("MetricsCB") > 0
    with pytest.raises(LookupError, match="No time was measured for `MetricCB`.*Did you mean `MetricsCB`"):
        times.seconds("MetricCB")


def test_data_without_a_batch_are_the_error_that_they_are(time):
    trainer = trainer_with(timer(time))
    trainer.dls = DataLoaders([], [])
    with pytest.raises(ValueError, match="has no batches"):
        trainer.fit(1)
    left_clean(trainer)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(clock=object), "`clock` gave <object .* Pass one such as `time.perf_counter`"),
        (dict(event=object), "`event` gave <object .* Pass a class such as `torch.cuda.Event`"),
        (dict(event=lambda: 1), "`event` gave 1, which has no method `record`"),
        (dict(event="cuda"), "`event` is 'cuda', which cannot be called"),
    ],
)
def test_what_gives_no_times_is_refused_before_the_first_batch(options, words):
    trainer = trainer_with()
    with pytest.raises(TypeError, match=words):
        trainer.fit(1, callbacks=TimesCB(**options))
    left_clean(trainer)
    assert trainer.n_updates == 0


@pytest.mark.parametrize("timer", [3, "fast", TimesCB, BasicTrainCB()])
def test_a_timer_that_is_none_is_refused_in_words(timer):
    trainer = make_trainer([BasicTrainCB()])
    with pytest.raises(TypeError, match="`timer` is .*a fit is timed by a `TimesCB`"):
        trainer.times(timer=timer)
