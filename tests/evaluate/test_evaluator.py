"""Evaluation in the middle of training (`evaluate/evaluator.py`).

The law: whatever an evaluator looks at and whenever it does, the training goes on bit for bit as without
it. Then: it looks when it was told to, at all that it was told to, and says so in the history.
"""

import random
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import isaac_loop.evaluate.evaluation  # noqa: F401
import runs
from isaac_loop.evaluate import one_evaluation
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.averaging import EMACB, SWACB
from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.device.device import DeviceCB
from isaac_loop.evaluate.evaluator import EvaluatorCB
from isaac_loop.evaluate.reports import ReportCB
from isaac_loop.log.loggers import LoggerCB
from isaac_loop.metrics.any_metric import MeanOf
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.schedule.plateau import PlateauSchedulerCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.log.trackers import WandB
from isaac_loop.train.training import BasicTrainCB, NBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelBatchException, CancelEpochException, CancelFitException, Order
from isaac_loop.loop.batch_record import BatchRecord
from isaac_loop.state.store import CheckpointStore
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.plan import Plan
from isaac_loop.loop.trainer import Trainer
from observing import bits, random_states
from waiting import InsideCB, RefuseToWait

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(22, 4, generator=G), torch.randint(0, 3, (22,), generator=G)
DATA = TensorDataset(X, Y)
OTHER = [(X[:9], Y[:9]), (X[9:], Y[9:])]  # Batches of different sizes: a mean of means would be wrong

SGD = partial(optim.SGD, momentum=0.9)


def make_trainer(*callbacks, valid=True, seed=0, model=None, loss_func=F.cross_entropy, opt_func=SGD):
    "Four batches in an epoch"
    set_seed(seed)
    model = model or nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    dls = DataLoaders(
        DataLoader(DATA, 6, shuffle=True), DataLoader(DATA, 10, shuffle=True) if valid else None
    )
    return Trainer(dls, loss_func, opt_func, model, [BasicTrainCB(), MetricsCB(show=False), *callbacks])


def outcome(trainer, n_epochs=3):
    "All that a fit leaves, but for what an evaluator writes"
    trainer.fit(n_epochs, lr=0.05)
    rows = [{k: o[k] for k in ("epoch", "train_loss", "valid_loss")} for o in trainer.history]
    state = [bits(v) for s in trainer.opt.state.values() for v in s.values() if torch.is_tensor(v)]
    batches = [(o["epoch"], o["training"], o["batch"], o["loss"]) for o in trainer.history.batches]
    return (
        [bits(o) for o in trainer.model.state_dict().values()],
        state,
        rows,
        batches,
        trainer.n_updates,
        random_states(),
    )


def turns_of(n_epochs=3, callbacks=(), make=EvaluatorCB, **options):
    "After how many updates an evaluator has a turn"
    lines = []
    trainer = make_trainer(make(OTHER, report=lines.append, **options), *callbacks)
    trainer.fit(n_epochs)
    return [int(o.split()[1]) for o in lines], trainer


# The law

SETS = {
    "none": None,
    "train": "train",
    "list": OTHER,
    "two": {"a": "valid", "b": OTHER},
    "shuffled": DataLoader(DATA, 5, shuffle=True, drop_last=True),
}


@pytest.mark.shows("PTA-36", "NEMO-45")
@settings(max_examples=20, deadline=None)
@given(
    sets=st.sampled_from(sorted(SETS)),
    updates=st.sampled_from([None, 1, 3]),
    epochs=st.sampled_from([None, 1, 2]),
    at_start=st.booleans(),
    seed=st.integers(0, 9),
)
def test_training_goes_on_bit_for_bit_as_without_it(sets, updates, epochs, at_start, seed):
    "Weights, optimizer, history, losses, random numbers; the user's functions draw from them too"

    def noisy(values, store):
        store.setdefault("x", []).append(values["preds"] + torch.randn(()))

    def done(store):
        assert not torch.is_grad_enabled()
        return dict(random=torch.rand(()), n=len(store["x"]))

    evaluator = EvaluatorCB(
        SETS[sets],
        noisy,
        done,
        updates=updates,
        epochs=epochs,
        at_start=at_start,
        report=lambda line: torch.rand(1),
        agreement=lambda preds, targets: preds.argmax(1) == targets,
    )
    assert outcome(make_trainer(evaluator, seed=seed)) == outcome(make_trainer(seed=seed))
    assert evaluator.n_evaluations > 0


def _draws(rng):
    return lambda *_: {"drawn": rng.random()}


OF_FUNCTIONS = {
    "done": lambda draw: EvaluatorCB(OTHER, lambda *_: None, draw, updates=2),
    "write": lambda draw: EvaluatorCB(OTHER, lambda *_: None, lambda _: {}, updates=2, write=draw),
    "report": lambda draw: EvaluatorCB(OTHER, updates=2, report=draw),
    "ReportCB": lambda draw: ReportCB(draw),
}


@pytest.mark.parametrize("function", OF_FUNCTIONS)
def test_what_functions_draw_from_a_generator_of_the_training_does_not_count(function):
    def trained(*names):
        rng = random.Random(1)

        class NoiseCB:
            def before_batch(self, trainer):
                trainer.batch = trainer.batch[0] + rng.random(), trainer.batch[1]

        return outcome(make_trainer(NoiseCB(), *(OF_FUNCTIONS[name](_draws(rng)) for name in names)))

    assert trained(function) == trained()


@pytest.mark.shows("PTA-36")
def test_a_fit_works_out_the_plan_of_its_evaluations_once_and_again_when_callbacks_have_changed(monkeypatch):
    built, build = [], Plan.build
    monkeypatch.setattr(
        Plan, "build", lambda self, *args, **kwargs: built.append(1) or build(self, *args, **kwargs)
    )

    def plans(n_epochs, *callbacks):
        built.clear()
        make_trainer(EvaluatorCB(OTHER, updates=1), *callbacks).fit(n_epochs, lr=0.05)
        return len(built)

    class Comes:
        def after_batch(self, trainer):
            if trainer.training and trainer.n_updates == 2:
                trainer.add_callback(LateCB())

    class LateCB:
        def before_get_loss(self, trainer):
            seen.append(1)

    seen = []
    assert plans(1) == plans(2)
    assert plans(2, Comes()) == plans(2) + 2  # The loop's own, and that of the evaluations
    assert (
        len(seen) > 16
    )  # In evaluations as well: 6 updates with two batches each, besides the loop's batches


def test_every_module_is_back_in_its_own_mode_for_the_rest_of_the_epoch():
    "After an evaluation in mid-epoch, also where a batch norm is kept in evaluation mode on purpose"
    modes = []

    class FreezeCB:
        def before_epoch(self, trainer):
            if trainer.training:
                trainer.model[1].eval()

    class ModesCB:
        on_valid = False
        order = Order.REPORT

        def before_predict(self, trainer):
            modes.append([m.training for m in trainer.model] + [trainer.training])

        def after_batch(self, trainer):
            modes.append([m.training for m in trainer.model] + [trainer.training])

    make_trainer(FreezeCB(), ModesCB(), EvaluatorCB(updates=1)).fit(1)
    assert modes == [[True, False, True, True, True]] * 8


def test_a_run_that_was_cut_goes_on_with_its_evaluations_and_with_what_they_steer(tmp_path, monkeypatch):
    "Saved at every batch, and gone on from each: no evaluation twice, and half of the patience used"
    monkeypatch.setattr(one_evaluation, "time", SimpleNamespace(perf_counter=lambda: 0.0))

    def make(*more):
        steering = [
            KeepBestCB("eval_loss"),
            EarlyStoppingCB("eval_loss", 4, min_delta=10.0),
            PlateauSchedulerCB("eval_loss", patience=0, threshold=10.0, threshold_mode="abs", factor=0.5),
        ]
        evaluator = EvaluatorCB(
            "valid", updates=3, epochs=2, at_start=True, accuracy=lambda p, t: p.argmax(1) == t
        )
        return runs.make_trainer(
            [BasicTrainCB(), MetricsCB(show=False), EMACB(0.9), RecorderCB(), *steering, evaluator, *more]
        )

    def save(name, **options):
        return CheckpointCB(tmp_path / name, monitor="eval_loss", **options)

    def steered(trainer):
        return (
            trainer.stop_reason,
            trainer.EarlyStoppingCB.state_dict(),
            trainer.PlateauSchedulerCB.state_dict(),
        )

    def last(name):
        found = CheckpointStore(tmp_path / name, read_only=True).list()[-1]
        return found.step, {k: v for k, v in found.metrics.items() if k.startswith("eval_")}

    whole = runs.fit(make(), 2)
    saved = runs.fit(make(save("all", every=1, keep_last=None)), 2)
    runs.same(whole, saved)
    found = CheckpointStore(tmp_path / "all", read_only=True).list()
    assert len(found) == 14
    for o in found:
        again = runs.fit(make(save(f"from {o.step}", every=1000, resume=o.path)), 2)
        runs.same(whole, again)
        assert steered(again) == steered(whole)
        if o is not found[-1]:
            assert last(f"from {o.step}") == last("all")
        assert again.EvaluatorCB.n_evaluations == whole.EvaluatorCB.n_evaluations == 6


def test_batches_that_were_written_in_mid_pass_are_found_again_after_loading():
    record = BatchRecord()
    record.write(0, 0, True, [0, 1], loss=[1.0, 2.0])
    record.write(0, 1, True, [0, 1], a=[5.0, 6.0])
    again = BatchRecord()
    again.load({k: list(v) for k, v in record.columns.items()})
    for o in (record, again):
        o.write(0, 1, True, [0, 1, 2], loss=[3.0, 4.0, 5.0])
    assert len(again) == 5 and again["loss"] == record["loss"] == [1, 2, 3, 4, 5]
    empty = BatchRecord()
    empty.load({k: [] for k in record.columns})
    empty.write(0, 0, True, [0], loss=[1.0])
    assert len(empty) == 1


def test_nobody_waits_for_the_device_inside_a_batch():
    mode = RefuseToWait()
    kept = lambda values, store: store.setdefault("right", []).append(
        values["preds"].argmax(1) == values["targets"]
    )
    done = lambda store: dict(right=torch.cat(store["right"]).float().mean())
    trainer = make_trainer(
        EvaluatorCB(OTHER, kept, done, epochs=1, mean=lambda p, t: (p.argmax(1) == t).float().mean()),
        InsideCB(mode),
    )
    with mode:
        trainer.fit(2)
    assert trainer.history.latest("eval_right") == pytest.approx(trainer.history.latest("eval_mean"))


# When


@pytest.mark.shows("NEMO-43", "NEMO-44", "NEMO-49", "PTA-35")
@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [4, 8, 12]),
        (dict(epochs=2), [8, 12]),
        (dict(epochs=2, at_end=False), [8]),
        (dict(epochs=1, at_start=True), [0, 4, 8, 12]),
        (dict(updates=5), [5, 10, 12]),
        (dict(updates=5, at_end=False), [5, 10]),
        (dict(updates=4), [4, 8, 12]),
        (dict(updates=3, epochs=2), [3, 6, 8, 9, 12]),
        (dict(updates=100), [12]),
        (dict(epochs=100), [12]),
        (dict(epochs=100, at_start=True, at_end=False), [0]),
        (dict(updates=1), list(range(1, 13))),
    ],
)
def test_it_evaluates_when_it_was_told_to_and_once_for_each_state_of_the_model(options, expected):
    "By updates, by epochs, by both, at the start, and always at the end"
    assert turns_of(**options)[0] == expected


@pytest.mark.shows("NEMO-43")
def test_updates_are_counted_and_not_batches():
    "With accumulation over two batches there are two updates in an epoch"
    assert turns_of(2, [AccumulationCB(2)], updates=1, at_end=False)[0] == [1, 2, 3, 4]


def test_a_fit_without_validation_or_without_training_is_evaluated_too():
    lines = []
    trainer = make_trainer(EvaluatorCB(OTHER, report=lines.append), valid=False)
    trainer.fit(2, valid=False)
    assert len(lines) == 2 and trainer.history["eval_loss"][0] is not None
    trainer = make_trainer(EvaluatorCB(OTHER, report=lines.append))
    trainer.fit(1, train=False)
    assert len(lines) == 3 and "eval_loss" in trainer.history[-1]
    trainer.fit(0)
    assert len(lines) == 3


def stop_at(event, when, error=None):
    def handler(trainer):
        if not when(trainer):
            return
        if error is not None:
            raise error
        trainer.request_stop("enough")

    handler.__name__, handler.order = event, Order.DECIDE
    return handler


@pytest.mark.shows("NEMO-44")
@pytest.mark.parametrize(
    "stop, expected, in_row",
    [
        (stop_at("after_step", lambda t: t.n_updates == 2), [2], True),
        (stop_at("log", lambda t: t.epoch == 0), [4], True),
        (stop_at("after_step", lambda t: t.n_updates == 2, CancelFitException("enough")), [2], True),
        (stop_at("after_predict", lambda t: not t.training, CancelFitException("enough")), [4], True),
        (stop_at("after_step", lambda t: t.n_updates == 2, CancelBatchException("skip")), [12], True),
    ],
)
def test_however_the_training_ends_the_last_model_is_evaluated(stop, expected, in_row):
    turns, trainer = turns_of(3, [stop], epochs=100)
    assert turns == expected and ("eval_loss" in trainer.history[-1]) == in_row


@pytest.mark.shows("NEMO-44")
def test_who_reads_the_last_row_finds_the_last_evaluation_in_it():
    "Also if the stop was asked for in the middle of an epoch"
    rows = []

    class LoggerCB:
        order = Order.REPORT

        def log(self, trainer):
            rows.append(dict(trainer.history.current))

    turns_of(3, [LoggerCB(), stop_at("after_step", lambda t: t.n_updates == 6)], epochs=100)
    assert ["eval_loss" in o for o in rows] == [False, True]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_training_that_breaks_is_not_evaluated_first(error):
    lines = []
    trainer = make_trainer(
        EvaluatorCB(OTHER, report=lines.append), stop_at("after_step", lambda t: t.n_updates == 2, error())
    )
    with pytest.raises(error):
        trainer.fit(1)
    assert lines == []


def test_a_cancelled_pass_is_the_end_of_an_epoch_all_the_same():
    "With a limit on training batches"
    limit = NBatchCB(2, on_valid=False)
    assert turns_of(3, [limit])[0] == [2, 4, 6]


def test_an_evaluator_that_had_no_turn_says_so():
    with pytest.warns(UserWarning, match="had no turn"):
        make_trainer(EvaluatorCB(OTHER, updates=100, at_end=False)).fit(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer(EvaluatorCB(OTHER)).fit(1)


# Which weights


def accuracy(preds, targets):
    return (preds.argmax(1) == targets).double().mean()


def p_of_target(preds, targets):
    return preds.softmax(1).gather(1, targets[:, None]).squeeze(1)


@pytest.mark.parametrize(
    "average",
    [
        lambda: EMACB(0.95),
        lambda: EMACB(0.95, keep=True),
        lambda: SWACB(0.5, update_bn=False),
        lambda: SWACB(0.0, every="update", update_bn=False, keep=True),
    ],
)
def test_an_evaluation_measures_the_weights_that_validation_measures(average):
    "One row describes one model: the average, once it has begun"
    set_seed(0)
    dls = DataLoaders(DataLoader(DATA, 6, shuffle=True), DataLoader(DATA, 10))
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    trainer = Trainer(
        dls,
        F.cross_entropy,
        SGD,
        model,
        [
            BasicTrainCB(),
            MetricsCB(p=MeanOf(p_of_target), show=False),
            average(),
            EvaluatorCB("valid", p=p_of_target),
        ],
    )
    trainer.fit(4, lr=0.1)
    assert trainer.history["eval_loss"] == pytest.approx(trainer.history["valid_loss"], rel=1e-6)
    assert trainer.history["eval_p"] == pytest.approx(trainer.history["p"], rel=1e-6)
    left = trainer.validate()["valid_loss"] == pytest.approx(trainer.history.latest("eval_loss"), rel=1e-6)
    assert left == trainer.callbacks[2].keep, "after the fit, with `keep` the average is what it leaves"
    assert trainer.EvaluatorCB.evaluate(trainer)["eval_loss"] == pytest.approx(
        trainer.validate()["valid_loss"], rel=1e-6
    )


class PruneCB:
    def after_epoch(self, trainer):
        if trainer.training:
            with torch.no_grad():
                trainer.model[0].weight.mul_(trainer.model[0].weight.abs() > 0.2)


class ReplaceCB:
    def after_epoch(self, trainer):
        if trainer.training:
            trainer.model[-1].bias = nn.Parameter(trainer.model[-1].bias.detach() + 1)


CHANGES = [partial(SWACB, 0.3, update_bn=False, keep=True), PruneCB, ReplaceCB]


@pytest.mark.parametrize("make", CHANGES)
def test_a_model_that_changes_after_its_last_update_is_measured_anew(make):
    trainer = make_trainer(make(), EvaluatorCB("valid", updates=4))  # 4 updates in an epoch
    trainer.fit(3, lr=0.1)
    row = trainer.history[-1]
    assert row["eval_loss"] == pytest.approx(row["valid_loss"], rel=1e-6)
    assert row["eval_loss"] == pytest.approx(trainer.validate()["valid_loss"], rel=1e-6)
    assert trainer.EvaluatorCB.n_evaluations == 4


@pytest.mark.parametrize("average", [partial(EMACB, 0.9), partial(EMACB, 0.9, keep=True)])
def test_a_model_that_stays_as_it_was_measured_is_not_measured_again(average):
    "Though an average was lent to it in between"
    trainer = make_trainer(average(), EvaluatorCB("valid", updates=4))
    trainer.fit(3, lr=0.1)
    assert trainer.EvaluatorCB.n_evaluations == 3


@pytest.mark.filterwarnings("ignore:The training loader does not know its position")
@pytest.mark.parametrize("change", CHANGES[:2])
def test_a_run_that_was_cut_measures_a_changed_model_anew_as_well(tmp_path, monkeypatch, change):
    monkeypatch.setattr(one_evaluation, "time", SimpleNamespace(perf_counter=lambda: 0.0))

    def make(*more):
        return make_trainer(change(), EvaluatorCB("valid", updates=4), *more)

    def row(trainer):
        trainer.fit(2, lr=0.1)
        evaluated = trainer.history.latest("eval_loss"), trainer.EvaluatorCB.n_evaluations
        return evaluated, trainer.history.latest("valid_loss")

    whole = row(make(CheckpointCB(tmp_path / "all", every=4, keep_last=None)))
    for found in CheckpointStore(tmp_path / "all", read_only=True).list():
        assert row(make(CheckpointCB(tmp_path / f"{found.step}", resume=found.path))) == whole


def test_an_evaluation_in_mid_epoch_and_its_functions_see_the_average_and_training_does_not():
    seen = []

    def done(store):
        seen.append((trainer.model[0].weight.clone(), trainer.model.training, torch.is_grad_enabled()))

    evaluator = EvaluatorCB(OTHER, None, done, updates=3)
    trainer = make_trainer(EMACB(0.9), evaluator)

    def after_batch(trainer):
        if trainer.training and trainer.n_updates == 6:
            seen.append(trainer.EMACB.evaluated[0].weight.clone())

    trainer.add_callback(after_batch)
    ours = outcome(trainer)
    assert (
        torch.equal(seen[1], seen[2][0])
        and seen[2][1:] == (False, False)
        and not trainer.EMACB.weights_swapped
    )
    assert ours == outcome(make_trainer(EMACB(0.9)))


# Stopping from an evaluation


def stopping(how, trainers, where="done", at=1):
    "The two functions of an evaluator, one of which wants to stop at its `at`-th call"
    calls = []

    def enough(*args):
        calls.append((trainers[0].epoch, trainers[0].n_updates))
        if len(calls) != at:
            return None
        if how == "stop":
            trainers[0].request_stop("good enough")
        else:
            raise how("good enough")

    return (enough, None) if where == "look" else (None, enough), calls


def run_stopping(how, where="done", at=1, n_epochs=3, **options):
    trainers = []
    functions, calls = stopping(how, trainers, where, at)
    trainers.append(make_trainer(EvaluatorCB(OTHER, *functions, **options)))
    trainers[0].fit(n_epochs)
    return trainers[0], calls


@pytest.mark.parametrize(
    "options, updates, n",
    [
        (dict(updates=3), 3, 1),
        (dict(epochs=1), 4, 1),
        (dict(at_start=True), 0, 1),
        (dict(updates=3, at=2), 6, 2),
        (dict(epochs=100), 12, 1),
    ],
)
def test_a_cancel_of_the_fit_at_the_end_of_an_evaluation_ends_the_training(options, updates, n):
    "No second evaluation of the same model, and what was measured is in the history"
    trainer, calls = run_stopping(CancelFitException, **options)
    assert trainer.n_updates == updates and len(calls) == trainer.EvaluatorCB.n_evaluations == n
    assert ("start_eval_loss" if not updates else "eval_loss") in trainer.history[-1]
    assert all(m.training for m in trainer.model.modules()) and torch.is_grad_enabled()


@pytest.mark.parametrize("how", [CancelEpochException, CancelBatchException])
@pytest.mark.parametrize("options", [dict(epochs=1), dict(epochs=1, at=3), dict(epochs=100)])
def test_a_cancel_of_what_is_over_does_nothing(how, options):
    trainer, calls = run_stopping(how, **options)
    assert (
        trainer.n_updates == 12
        and len(trainer.history) == 3
        and "valid_loss" in trainer.history[-1]
        and "eval_loss" in trainer.history[-1]
    )


def test_a_cancel_of_the_epoch_in_its_middle_ends_it():
    trainer, calls = run_stopping(CancelEpochException, updates=2)
    assert trainer.n_updates == 2 + 4 + 4 and "valid_loss" in trainer.history[0]


@pytest.mark.parametrize(
    "options, updates",
    [(dict(updates=3), 3), (dict(epochs=1), 4), (dict(at_start=True), 1), (dict(epochs=100), 12)],
)
def test_a_stop_at_the_end_of_an_evaluation_is_a_stop_of_the_training(options, updates):
    "In good order: the epoch has its validation; the function sees the true epoch and updates"
    trainer, calls = run_stopping("stop", **options)
    assert (
        trainer.n_updates == updates
        and trainer.stop_reason == "good enough"
        and "valid_loss" in trainer.history[-1]
    )
    assert calls[0] == (
        trainer.epoch if options.get("epochs") else 0,
        0 if options.get("at_start") else updates,
    )


@pytest.mark.parametrize(
    "how, updates, n_calls", [(CancelFitException, 3, 1), ("stop", 3, 1), (CancelEpochException, 12, 8)]
)
def test_the_function_for_batches_can_stop_too_and_says_that_the_numbers_are_partial(how, updates, n_calls):
    with pytest.warns(
        UserWarning,
        match=r"evaluation of `eval` was left early "
        r"\((CancelFitException: |CancelEpochException: |)good enough, after 1 batch\)",
    ) as heard:
        trainer, calls = run_stopping(how, "look", updates=3)
    assert (
        len(heard) == 1
        and trainer.n_updates == updates
        and len(calls) == 2 * trainer.EvaluatorCB.n_evaluations - 1
    )
    assert (
        trainer.stop_reason == ("good enough" if how == "stop" else None)
        and "eval_loss" in trainer.history[-1]
    )


def test_who_stops_at_the_last_batch_of_an_evaluation_has_seen_all_of_it():
    trainer, calls = run_stopping("stop", "look", updates=3, at=2)
    assert trainer.n_updates == 3 and len(calls) == 2
    trainer, calls = run_stopping("stop", "look", updates=3, n_batches=1)
    assert trainer.n_updates == 3 and len(calls) == 1


def test_a_cancel_leaves_further_data_sets_and_a_report_may_cancel_as_well():
    def enough(store):
        raise CancelFitException("enough")

    trainer = make_trainer(EvaluatorCB({"a": OTHER, "b": OTHER}, None, enough))
    trainer.fit(2)
    assert "a_loss" in trainer.history[-1] and "b_loss" not in trainer.history[-1] and trainer.n_updates == 4
    trainer = make_trainer(EvaluatorCB(OTHER, report=enough))
    trainer.fit(2)
    assert "eval_loss" in trainer.history[-1] and trainer.n_updates == 4
    assert "eval_loss" in EvaluatorCB(OTHER, None, enough).evaluate(make_trainer()), (
        "where there is no training, there is nothing to stop"
    )


# What


def by_hand(model, batches=OTHER):
    model.eval()
    with torch.no_grad():
        preds = torch.cat([model(x) for x, _ in batches])
    return preds, torch.cat([y for _, y in batches])


@pytest.mark.shows("AIT-67", "PTA-57", "SON-28")
def test_losses_and_metrics_are_true_means_over_all_rows():
    "All by one callback; a shuffled loader that drops rows is seen whole"
    sets = dict(test=OTHER, again=DataLoader(DATA, 5, shuffle=True, drop_last=True), train_end="train")
    trainer = make_trainer(
        EvaluatorCB(sets, epochs=2, error=lambda preds, targets: (preds.argmax(1) != targets).float().mean())
    )
    trainer.fit(2)
    preds, targets = by_hand(trainer.model)
    for name in sets:
        assert trainer.history.latest(f"{name}_loss") == pytest.approx(
            F.cross_entropy(preds, targets).item(), rel=1e-5
        )
        assert trainer.history.latest(f"{name}_error") == pytest.approx(
            (preds.argmax(1) != targets).float().mean().item()
        )
    assert trainer.history["test_loss"][0] is None and {"train_loss", "valid_loss"} <= set(
        trainer.history.names()
    )


@pytest.mark.shows("NEMO-43")
def test_an_evaluation_at_the_start_has_columns_of_its_own():
    "Of the model as it was before the first update"
    trainer = make_trainer(EvaluatorCB(OTHER, at_start=True, updates=1))
    preds, targets = by_hand(trainer.model)
    trainer.model.train()
    trainer.fit(2)
    assert trainer.history["start_eval_loss"] == [
        pytest.approx(F.cross_entropy(preds, targets).item(), rel=1e-5),
        None,
    ]
    assert trainer.history["start_eval_loss"][0] != trainer.history.batches["eval_loss"][0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(at_start=True),
        dict(user_epochs_done_callback=lambda store: dict(x=1)),
        dict(with_loss=False),
        dict(parts=lambda p, t: p.mean()),
    ],
)
def test_every_column_that_it_writes_is_declared(options):
    from fnmatch import fnmatchcase

    without, trainer = (
        make_trainer(),
        make_trainer(evaluator := EvaluatorCB({"a": OTHER, "b": "train"}, **options)),
    )
    for o in (without, trainer):
        o.fit(1)
    new = set(trainer.history.names()) - set(without.history.names())
    declared = evaluator.columns(trainer)
    assert new and all(any(fnmatchcase(o, d) for d in declared) for o in new)
    assert {d for d in declared if "*" not in d} <= new


@pytest.mark.shows("NEMO-38", "NEMO-39", "NEMO-45")
def test_the_store_is_emptied_before_each_evaluation_and_the_functions_see_what_they_asked_for():
    "Without gradients, in evaluation mode, one call for each batch"
    seen = []

    def iterate(values, store):
        seen.append(
            (
                sorted(values),
                values["mode"],
                values["preds"].requires_grad,
                values["inputs"].shape,
                values["y"].shape,
            )
        )
        store["n"] = store.get("n", 0) + 1

    counts = []
    tensors = dict(
        preds="preds", inputs="inputs", y="targets", loss="loss", mode=lambda trainer: trainer.model.training
    )
    make_trainer(
        EvaluatorCB(OTHER, iterate, lambda store: counts.append(dict(store)), tensors, updates=2)
    ).fit(1)
    assert counts == [dict(n=2), dict(n=2)]
    assert seen[:2] == [
        (["inputs", "loss", "mode", "preds", "y"], False, False, (9, 4), (9,)),
        (["inputs", "loss", "mode", "preds", "y"], False, False, (13, 4), (13,)),
    ]


@pytest.mark.shows("NEMO-40", "NEMO-47")
def test_returned_numbers_go_to_the_row_or_to_the_batch_and_none_writes_nothing():
    "Also tensors and numbers of NumPy; the time is always there"
    import numpy as np

    n = iter(range(100))
    trainer = make_trainer(
        EvaluatorCB(
            {"a": OTHER},
            None,
            lambda store: dict(x=next(n), y=torch.tensor(0.5), z=np.float32(0.25)),
            updates=3,
            at_end=False,
        )
    )
    trainer.fit(2)
    assert [
        (o["epoch"], o["batch"], o["a_x"], o["a_z"]) for o in trainer.history.batches if o["a_x"] == o["a_x"]
    ] == [(0, 2, 0, 0.25), (1, 1, 1, 0.25)]
    assert trainer.history["a_x"] == [0, 1] and trainer.history["a_y"] == [0.5, 0.5]
    lines = []
    silent = make_trainer(
        EvaluatorCB(OTHER, lambda values, store: None, lambda store: None, report=lines.append)
    )
    silent.fit(1)
    assert {o for o in silent.history[-1] if o.startswith("eval")} == {"eval_loss", "eval_seconds"}
    assert silent.history.latest("eval_seconds") > 0 and "eval_seconds" in lines[0]


@pytest.mark.shows("NEMO-42")
def test_what_is_returned_reaches_a_tracker(monkeypatch):
    "The row goes to Weights & Biases like any other"
    sent = []
    run = SimpleNamespace(
        log=sent.append, define_metric=lambda name, step_metric: None, finish=lambda exit_code: None
    )
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(__spec__="installed", run=None, init=lambda **kwargs: run)
    )
    make_trainer(
        EvaluatorCB({"test": OTHER}, None, lambda store: dict(score=0.75)),
        LoggerCB(WandB("project"), every=None),
    ).fit(2)
    assert [(row["test_score"], row["step"]) for row in sent if "test_score" in row] == [(0.75, 4), (0.75, 8)]
    run = SimpleNamespace(
        log=sent.append, finish=lambda exit_code: None, define_metric=lambda name, step_metric: None
    )
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(__spec__=object(), init=lambda **kwargs: run, run=None)
    )
    assert [(o["test_score"], o["step"]) for o in sent if "test_score" in o] == [(0.75, 4), (0.75, 8)]


@pytest.mark.shows("NEMO-41")
def test_a_function_may_write_by_itself():
    "Pictures and texts for loggers, and numbers under names of one's own"
    seen = []

    class LoggerCB:
        order = Order.REPORT

        def log(self, trainer):
            seen.append([(o["name"], o["kind"], o["step"]) for o in trainer.history.media])

    def write(history, returned, step):
        history.write_media("worst", "image", returned, step=step)

    trainer = make_trainer(
        LoggerCB(), EvaluatorCB(OTHER, None, lambda store: torch.zeros(1, 2, 2), write=write, updates=2)
    )
    trainer.fit(1)
    assert seen == [[("worst", "image", 2), ("worst", "image", 4)]]


@pytest.mark.shows("NEMO-48")
def test_several_evaluators_each_with_its_own_data_and_times():
    trainer = make_trainer(
        EvaluatorCB({"a": OTHER}, name="a"), EvaluatorCB({"b": OTHER[:1]}, name="b", updates=2)
    )
    trainer.fit(2)
    assert (trainer.a.n_evaluations, trainer.b.n_evaluations) == (2, 4)
    assert trainer.history.latest("a_loss") != trainer.history.latest("b_loss")


@pytest.mark.shows("PTA-37")
def test_a_limit_on_batches_limits():
    "Counted; one for intermediate evaluations only, and one for every evaluation"

    class CountCB:
        "Below `Order.RECORD`, so that it takes part in passes on the side"

        on_train = False

        def after_predict(self, trainer):
            seen[trainer.dl is trainer.dls.valid and not isinstance(trainer.dls.valid, list)] += 1

    data = [(X[i : i + 2], Y[i : i + 2]) for i in range(0, 20, 2)]
    seen = {True: 0, False: 0}
    make_trainer(CountCB(), EvaluatorCB(data, n_batches=3)).fit(1)
    assert seen == {True: 3, False: 3}, (
        "the validation pass has its three batches, the evaluation three of ten"
    )
    seen = {True: 0, False: 0}
    trainer = make_trainer(CountCB(), EvaluatorCB(data), NBatchCB(2, on_train=False))
    trainer.fit(1)
    assert seen == {True: 2, False: 2} and trainer.n_updates == 4
    seen = {True: 0, False: 0}
    make_trainer(CountCB(), EvaluatorCB(data, n_batches=100)).fit(1)
    assert seen[False] == 10


@pytest.mark.shows("PTA-11", "PTA-46")
def test_callbacks_for_the_evaluation_hear_its_own_events():
    "The beginning and the end of an evaluation run, and the end of an epoch after both passes"
    heard = []

    class HearCB:
        order = Order.REPORT

        def before_fit(self, trainer):
            heard.append("evaluation begins")

        def after_predict(self, trainer):
            heard.append("batch")

        def after_fit(self, trainer):
            heard.append("evaluation ends")

    class OuterCB:
        def after_epoch(self, trainer):
            heard.append("train" if trainer.training else "valid")

        def log(self, trainer):
            heard.append("epoch ends")

    outer = OuterCB()
    outer.order = Order.REPORT
    trainer = make_trainer(outer, EvaluatorCB(OTHER, callbacks=HearCB()))
    trainer.fit(1)
    assert heard == ["train", "evaluation begins", "batch", "batch", "evaluation ends", "valid", "epoch ends"]
    before = outcome_of(trainer)
    found = EvaluatorCB({"test": OTHER}, callbacks=HearCB(), right=lambda p, t: p.argmax(1) == t).evaluate(
        trainer
    )
    preds, targets = by_hand(trainer.model)
    assert found["test_right"] == pytest.approx((preds.argmax(1) == targets).float().mean().item())
    assert outcome_of(trainer) == before and len(heard) == 11


def outcome_of(trainer):
    return [bits(o) for o in trainer.model.state_dict().values()], list(trainer.history), random_states()


@pytest.mark.shows("NEMO-08")
def test_an_evaluation_without_a_fit():
    "A trainer that was never fit, with evaluators alone"
    trainer = make_trainer()
    before = outcome_of(trainer)
    found = [EvaluatorCB({name: dl}).evaluate(trainer) for name, dl in dict(a=OTHER, b="train").items()]
    assert found[0]["a_loss"] == pytest.approx(found[1]["b_loss"], rel=1e-5)
    assert outcome_of(trainer) == before


@pytest.mark.shows("PTA-58")
def test_classification_metrics_of_torchmetrics_where_the_model_is():
    "Moved to the device, updated with each batch, written into the history, and reset"
    import torchmetrics

    metric = torchmetrics.MetricCollection(
        {
            o: getattr(torchmetrics, o)(task="multiclass", num_classes=3)
            for o in ("Accuracy", "Precision", "Recall")
        }
    )
    trainer = make_trainer(DeviceCB("cpu"), EvaluatorCB({"test": OTHER}, updates=2, scores=metric))
    trainer.fit(2)
    preds, targets = by_hand(trainer.model)
    assert trainer.history.latest("test_scores_Accuracy") == pytest.approx(
        (preds.argmax(1) == targets).float().mean().item()
    )
    assert len(trainer.history["test_scores_Recall"]) == 2


@pytest.mark.shows("PTA-59")
def test_metrics_in_the_steps_of_a_trainer_of_ones_own():
    "The same without any callback, in methods of a subclass; an evaluation on the side uses them too"

    class Own(Trainer):
        def before_epoch(self):
            self.right = self.n = 0

        def after_batch(self):
            self.right = self.right + (self.preds.argmax(1) == self.batch[1]).sum()
            self.n += len(self.batch[1])

        def cleanup_epoch(self):
            self.history.write(
                **{f"{'train' if self.training else 'valid'}_accuracy": (self.right / self.n).item()}
            )

    model = nn.Linear(4, 3)
    trainer = Own(
        DataLoaders(OTHER, OTHER),
        F.cross_entropy,
        optim.SGD,
        model,
        [BasicTrainCB(), EvaluatorCB({"test": OTHER})],
    )
    trainer.fit(1)
    preds, targets = by_hand(model)
    expected = pytest.approx((preds.argmax(1) == targets).float().mean().item())
    assert (
        trainer.history.latest("valid_accuracy") == trainer.history.latest("test_valid_accuracy") == expected
    )


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter([DATA[i] for i in range(self.n)])


def test_data_without_a_length_without_targets_and_with_nan():
    found = EvaluatorCB({"stream": DataLoader(Stream(13), 5)}).evaluate(make_trainer())
    assert found["stream_loss"] > 0
    unlabelled = [(X[:9],), (X[9:],)]
    shapes = EvaluatorCB(
        unlabelled,
        lambda values, store: store.setdefault("preds", []).append(values["preds"]),
        lambda store: dict(n=len(torch.cat(store["preds"]))),
        with_loss=False,
    ).evaluate(make_trainer())
    assert shapes.keys() == {"eval_n", "eval_seconds"} and shapes["eval_n"] == 22
    bad = [(X[:9] * float("nan"), Y[:9])]
    trainer = make_trainer(EvaluatorCB(bad), EarlyStoppingCB("eval_loss", patience=2))
    trainer.fit(5)
    assert len(trainer.history) == 2, "NaN is never better"


@pytest.mark.shows("SON-28")
def test_a_mean_of_a_function():
    mean = MeanOf(lambda preds, targets: (preds - targets).abs())
    mean.update(torch.ones(3, 2), torch.zeros(3, 2))
    mean.update(torch.ones(1, 2) * 5, torch.zeros(1, 2))
    assert mean.compute() == 2
    mean.reset()
    assert mean.compute() != mean.compute(), "nothing is NaN"
    number = MeanOf(lambda preds, targets: 0.5)
    number.update(torch.ones(3), torch.zeros(3))
    assert number.compute() == 0.5
    arrays = MeanOf(lambda preds, targets: preds.numpy() * 2)
    arrays.update(torch.tensor([1.0, 2.0]), torch.zeros(2))
    assert arrays.compute() == 3


# Bad input


@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(updates=0), ValueError, "`updates` is 0"),
        (dict(updates=1.5), ValueError, "`updates`"),
        (dict(epochs=True), ValueError, "`epochs`"),
        (dict(epochs=-1), ValueError, "`epochs`"),
        (dict(n_batches=0), ValueError, "`n_batches`"),
        (dict(dl={}), ValueError, "empty dict"),
        (dict(dl={1: OTHER}), TypeError, "called 1"),
        (dict(dl=iter(OTHER)), TypeError, "walked only once"),
        (dict(dl=DATA), TypeError, "single rows"),
        (dict(dl=5), TypeError, "cannot be iterated"),
        (dict(dl=[DataLoader(DATA, 4)] * 2), TypeError, "list of loaders.*as a dict, with a name for each"),
        (dict(dl=["valid", "train"]), TypeError, "taken for a batch.*a dict: `{'valid': 'valid'"),
        (dict(user_iter_callback=5), TypeError, "`user_iter_callback` is 5"),
        (dict(write=print), ValueError, "no such function"),
        (dict(user_iter_callback=lambda values: 0), TypeError, r"called with \(values, store\)"),
        (dict(user_epochs_done_callback=lambda: 0), TypeError, r"\(store\)"),
        (dict(eval_tensors=["pred"]), LookupError, "Did you mean `preds`"),
        (dict(eval_tensors=[5]), TypeError, "5"),
        (dict(accuracy=MetricsCB), TypeError, "is a class"),
        (dict(accuracy=5), TypeError, "`accuracy=5` is no metric.*Its options are `dl`"),
        (dict(every=10), TypeError, "`EvaluatorCB` has no option `every`"),
        (dict(epoch=3), TypeError, "Did you mean `epochs`"),
        (dict(seconds=accuracy), ValueError, "`seconds` is a column"),
        (dict(loss=accuracy), ValueError, "`loss` is a column"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(options, error, words):
    with pytest.raises(error, match=words):
        EvaluatorCB(**options)


@pytest.mark.parametrize("dl", [[], DataLoader(TensorDataset(X[:0], Y[:0]), 4), {"good": OTHER, "test": []}])
def test_an_empty_set_is_refused_before_the_first_batch(dl):
    class SeenCB:
        n = 0

        def before_batch(self, trainer):
            self.n += 1

    trainer = make_trainer(seen := SeenCB(), EvaluatorCB(dl))
    with pytest.raises(ValueError, match="has no batches.*dataset empty"):
        trainer.fit(1)
    assert seen.n == 0
    with pytest.raises(ValueError, match="has no batches"):
        EvaluatorCB(dl).evaluate(trainer)


def test_an_empty_stream_and_a_missing_validation_set_say_so():
    with pytest.raises(ValueError, match="The data set `stream` gave no batch") as e:
        make_trainer(EvaluatorCB({"stream": DataLoader(Stream(0), 5)})).fit(1)
    assert any("while evaluating `stream`" in o for o in e.value.__notes__)
    with pytest.raises(ValueError, match="nothing to look at"):
        make_trainer(EvaluatorCB(), valid=False).fit(1, valid=False)
    with pytest.raises(LookupError, match="Did you mean `valid`"):
        make_trainer(EvaluatorCB("vaild")).fit(1)


@pytest.mark.parametrize("position", ["user_iter_callback", "user_epochs_done_callback", "accuracy"])
def test_an_error_in_a_function_names_callback_event_and_data_and_leaves_everything_in_order(position):
    def broken(*args):
        raise ZeroDivisionError("oh")

    trainer = make_trainer(EvaluatorCB({"test": OTHER}, updates=2, **{position: broken}))
    with pytest.raises(ZeroDivisionError) as e:
        trainer.fit(1)
    notes = " ".join(e.value.__notes__)
    assert (
        "while evaluating `test`" in notes
        and "raised by `EvaluatorCB.after_batch` at epoch 0, batch 1 (training)" in notes
    )
    assert all(m.training for m in trainer.model.modules()) and torch.is_grad_enabled()
    trainer.remove_callback("EvaluatorCB")
    trainer.fit(1)


@pytest.mark.parametrize(
    "returned, words",
    [([1], "there is `write`"), (dict(x=torch.zeros(2)), "single number"), (dict(x="text"), "single number")],
)
def test_what_cannot_be_a_column_is_refused(returned, words):
    with pytest.raises(TypeError, match=words):
        make_trainer(EvaluatorCB(OTHER, None, lambda store: returned)).fit(1)


@pytest.mark.parametrize("name", ["loss", "seconds", "right"])
def test_what_is_measured_anyway_is_not_overwritten(name):
    with pytest.raises(ValueError, match=f"returned `{name}`, which is measured already"):
        make_trainer(EvaluatorCB(OTHER, None, lambda store: {name: 1.0}, right=accuracy)).fit(1)
    free = EvaluatorCB(OTHER, None, lambda store: dict(loss=1.0), with_loss=False).evaluate(make_trainer())
    assert free["eval_loss"] == 1 and EvaluatorCB(OTHER, with_loss=False, loss=accuracy).columns(None) == [
        "eval_loss",
        "eval_loss_*",
        "eval_seconds",
    ]


@pytest.mark.parametrize("given", [dict(a=1.0), None, "text", [1.0], torch.zeros(5)])
def test_a_metric_that_gives_no_number_is_named(given):
    with pytest.raises(TypeError, match="metric `right` gave"):
        make_trainer(EvaluatorCB(OTHER, right=lambda preds, targets: given)).fit(1)


def test_two_who_write_one_column_are_told_before_the_first_batch():
    with pytest.raises(ValueError, match="`EvaluatorCB` and `MetricsCB` both write the column `valid_loss`"):
        make_trainer(EvaluatorCB({"valid": OTHER})).fit(1)
    with pytest.raises(ValueError, match="both write the column `eval_loss`"):
        make_trainer(EvaluatorCB(name="a"), EvaluatorCB(name="b")).fit(1)
    with pytest.raises(ValueError, match="called `EvaluatorCB` already"):
        make_trainer(EvaluatorCB({"a": OTHER}), EvaluatorCB({"b": OTHER}))


def test_its_columns_can_be_watched_and_others_cannot():
    trainer = make_trainer(
        EvaluatorCB({"test": OTHER}, updates=2, right=lambda p, t: p.argmax(1) == t),
        EarlyStoppingCB("test_right", mode="max", patience=1, threshold=0.0),
    )
    trainer.fit(3)
    assert len(trainer.history) == 1
    with pytest.raises(LookupError, match="Did you mean `test_loss`"):
        make_trainer(EvaluatorCB({"test": OTHER}), EarlyStoppingCB("test_los", mode="min")).fit(1)
    scored = make_trainer(
        EvaluatorCB({"test": OTHER}, None, lambda store: dict(score=1.0)),
        EarlyStoppingCB("test_score", mode="max", patience=1),
    )
    scored.fit(5)
    assert len(scored.history) == 2
    declared = {o for o in scored.EvaluatorCB.columns(scored)}
    assert declared == {"test_loss", "test_seconds", "test_*"}


# What is measured in the middle of an epoch steers at once

FOUR = [(X[i : i + 6], Y[i : i + 6]) for i in (0, 6, 11, 16)]


def steered(folder, endless, n=20):
    "Measured after every fourth update, in one epoch or in twenty; what all that watch the measure have done"
    watched, rates = "eval_loss" if endless else "valid_loss", []

    def before_step(trainer):
        rates.append(trainer.opt.param_groups[0]["lr"])

    set_seed(0)
    trainer = Trainer(
        DataLoaders(FOUR * n if endless else FOUR, OTHER),
        F.cross_entropy,
        SGD,
        nn.Linear(4, 3),
        [
            BasicTrainCB(),
            MetricsCB(show=False),
            KeepBestCB(watched),
            EarlyStoppingCB(watched, 3),
            PlateauSchedulerCB(watched, patience=0, factor=0.3),
            before_step,
            CheckpointCB(folder, "best", watched),
        ]
        + [EvaluatorCB(OTHER, updates=4, at_end=False)] * endless,
    )
    trainer.fit(1 if endless else n, lr=0.3, valid=not endless)
    best = CheckpointStore(folder, read_only=True).best()
    return (
        trainer.n_updates,
        rates,
        bits(trainer.model.weight),
        trainer.EarlyStoppingCB.best,
        trainer.KeepBestCB.best,
        best.step,
        best.metrics[watched],
    )


def test_one_epoch_without_end_is_steered_like_epochs_that_end_at_each_measurement(tmp_path):
    "Early stopping, best weights, best checkpoint and a plateau, bit for bit"
    endless, epochs = steered(tmp_path / "endless", True), steered(tmp_path / "epochs", False)
    assert endless == epochs and 16 < endless[0] < 80 and endless[5] < endless[0] and len(set(endless[1])) > 1


def test_a_checkpoint_says_what_was_measured_with_its_weights_and_nothing_older(tmp_path):
    "Four updates in an epoch, a look after every third: only those checkpoints have a number, their own"
    trainer = make_trainer(
        EvaluatorCB(OTHER, updates=3, at_end=False), CheckpointCB(tmp_path, 1, "eval_loss", keep_last=None)
    )
    trainer.fit(3)
    found = CheckpointStore(tmp_path, read_only=True).list()
    assert {o.step for o in found if o.metrics} == {3, 6, 9, 12} and {o.step for o in found} == {
        *range(1, 13)
    }
    for o in found:
        if not o.metrics:
            continue
        trainer.load(o.path)
        assert EvaluatorCB(OTHER).evaluate(trainer)["eval_loss"] == o.metrics["eval_loss"]


@pytest.mark.parametrize(
    "options",
    [
        dict(updates=3),
        dict(updates=2),
        dict(updates=3, epochs=1),
        dict(updates=1, epochs=1),
        dict(epochs=1),
        dict(updates=3, at_end=False),
        dict(updates=100),
    ],
)
def test_each_value_is_counted_once(options):
    stopping, told = EarlyStoppingCB("eval_loss", 100), []

    def measured(trainer):
        told.append(trainer.history.news)

    trainer = make_trainer(EvaluatorCB(OTHER, **options), stopping, measured)
    trainer.fit(3)
    assert stopping.n_seen == trainer.EvaluatorCB.n_evaluations and all(
        set(o) == {"eval_loss", "eval_seconds"} for o in told
    )


def test_a_value_of_the_last_state_after_a_stop_counts_too():
    "The stop is asked for in `log`, so that the last evaluation comes when the fit ends"

    def log(trainer):
        trainer.request_stop("enough")

    trainer = make_trainer(
        EvaluatorCB(OTHER, epochs=100), KeepBestCB("eval_loss"), EarlyStoppingCB("valid_loss", 100), log
    )
    trainer.fit(3)
    assert (
        trainer.KeepBestCB.best == trainer.history.latest("eval_loss")
        and trainer.EarlyStoppingCB.n_seen == 1
        and trainer.stop_reason == "enough"
    )


def test_who_leaves_in_measured_leaves_what_it_says():
    "And nobody is told twice"

    def measured(trainer):
        raise CancelEpochException("seen enough")

    stopping = EarlyStoppingCB("eval_loss", 100)
    measured.order = Order.REPORT
    trainer = make_trainer(EvaluatorCB(OTHER, updates=3, at_end=False), stopping, measured)
    trainer.fit(2)
    assert (trainer.n_updates, stopping.n_seen, len(trainer.history)) == (6, 2, 2)


def test_an_evaluation_in_which_all_batches_are_cancelled_warns_and_training_goes_on():
    class SkipCB:
        on_train = False

        def before_batch(self, trainer):
            raise CancelBatchException("no")

    with pytest.warns(UserWarning, match="No batch of `eval` got to its end"):
        make_trainer(SkipCB(), EvaluatorCB(OTHER)).fit(1)


def test_an_evaluator_can_be_used_for_another_fit():
    turns, trainer = turns_of(1, updates=3)
    assert turns == [3, 4]
    trainer.fit(1)
    assert trainer.EvaluatorCB.n_evaluations == 2 and len(trainer.history["eval_loss"]) == 2


class LeavesIn:
    "Leaves something early in every pass over validation data"

    on_train = False

    def __init__(self, cancel, at=1):
        self.cancel, self.at = cancel, at

    def before_batch(self, trainer):
        if trainer.batch_num == self.at:
            raise self.cancel("no more")


@pytest.mark.parametrize("cancel", [CancelBatchException, CancelEpochException, CancelFitException])
def test_an_evaluation_that_a_kept_callback_leaves_early_is_not_told_as_whole(cancel):
    evaluator = EvaluatorCB(updates=2, at_end=False)
    trainer = make_trainer(evaluator, LeavesIn(cancel))
    with pytest.warns(UserWarning, match="evaluation of `eval` was left early.*after [12] batch"):
        trainer.fit(1, lr=0.1, valid=False)


def test_a_stop_that_is_asked_for_in_an_evaluation_stops_the_training():
    class Stops:
        on_train = False

        def after_batch(self, trainer):
            trainer.request_stop("enough is seen")

    trainer = make_trainer(EvaluatorCB(updates=2, at_end=False), Stops())
    with pytest.warns(UserWarning, match="enough is seen, after 1 batch"):
        trainer.fit(3, lr=0.1, valid=False)
    assert trainer.stop_reason == "enough is seen" and trainer.n_updates == 2


def test_a_limit_of_the_evaluator_or_of_its_callbacks_is_no_gap():
    trainer = make_trainer(
        EvaluatorCB(updates=2, at_end=False, n_batches=1),
        EvaluatorCB({"few": "valid"}, updates=2, at_end=False, callbacks=NBatchCB(1), name="few"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(1, lr=0.1, valid=False)


@pytest.mark.parametrize("event", ["after_epoch", "after_fit", "cleanup_batch"])
def test_a_cancel_after_the_last_batch_leaves_no_gap(event):
    def leave(trainer):
        last = event != "cleanup_batch" or trainer.batch_num + 1 == trainer.n_batches
        if last and trainer._side_runs:
            raise CancelFitException("all is done")

    leave.order = -5
    late = SimpleNamespace(**{event: leave}, name="late")
    trainer = make_trainer(EvaluatorCB(updates=4, at_end=False), late)
    trainer.fit(1, lr=0.1, valid=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trainer.validate() and len(trainer.get_preds()) == 22
        trainer.fit(1, lr=0.1, valid=False)


class CountingSampler:
    "Another order in each epoch: of a counter, and of a generator that is kept in a list"

    def __init__(self):
        self.epoch, self.generators = 0, [torch.Generator().manual_seed(2)]

    def __iter__(self):
        self.epoch += 1
        order = torch.randperm(10, generator=self.generators[0]).tolist()
        return iter(order if self.epoch % 2 else order[::-1])

    def __len__(self):
        return 10


@pytest.mark.parametrize("dl", ["train", "valid"])
@pytest.mark.parametrize("ask", ["in the fit", "by hand", "report"])
def test_the_look_whether_a_loader_has_batches_draws_from_no_sampler(ask, dl):
    "The validation has no whole batch, so only in the order of its rows there is one"

    def trained(*callbacks):
        set_seed(0)
        sampler = CountingSampler()
        short = DataLoader(DATA, 12, sampler=sampler, drop_last=True)
        dls = DataLoaders(DataLoader(DATA, 4, sampler=sampler), short)
        own = [BasicTrainCB(), MetricsCB(show=False)]
        trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(4, 3), [*own, *callbacks])
        trainer.fit(3, 0.1, valid=False)
        return bits(trainer.model.weight), sampler.epoch

    class LookCB:
        order = Order.DECIDE

        def log(self, trainer):
            evaluator.evaluate(trainer)

    evaluator = EvaluatorCB(dl, epochs=1)
    report = ReportCB(dl=dl, rows=lambda preds, targets: len(preds))
    asks = {"in the fit": evaluator, "by hand": LookCB(), "report": report}
    assert trained(asks[ask]) == trained()


class BareLoader(DataLoader):
    "A subclass that has left out the `__init__` of its base"

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


@pytest.mark.parametrize("where", ["train", "valid", "evaluated"])
def test_a_loader_without_the_attributes_of_its_base_is_evaluated_like_a_list(where):
    def found(kind):
        loaders = {name: OTHER for name in ("train", "valid", "evaluated")}
        loaders[where] = kind(OTHER)
        set_seed(0)
        evaluator = EvaluatorCB(loaders["evaluated"], updates=1, at_end=False)
        trainer = Trainer(
            DataLoaders(loaders["train"], loaders["valid"]),
            F.cross_entropy,
            optim.SGD,
            nn.Linear(4, 3),
            [BasicTrainCB(), MetricsCB(show=False), evaluator],
        )
        trainer.fit(2, 0.1)
        return bits(trainer.model.weight), trainer.history.batches["eval_loss"]

    assert str(found(BareLoader)) == str(found(list))


class Endless(IterableDataset):
    "Rows of which nobody knows how many there are"

    def __iter__(self):
        return iter(zip(X[:20], Y[:20]))


@pytest.mark.parametrize("n", [1, 3])
def test_the_update_of_a_last_group_that_is_smaller_counts_in_its_own_epoch(n):
    "Of a stream it is known to be the last when the pass is over; of a list before"
    batches = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 20, 4)]
    found = []
    for dl in (batches, DataLoader(Endless(), 4)):
        evaluator = EvaluatorCB(updates=n, at_end=False)
        callbacks = [BasicTrainCB(), MetricsCB(show=False), AccumulationCB(2), evaluator]
        set_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        trainer = Trainer(DataLoaders(dl, OTHER), F.cross_entropy, SGD, model, callbacks)
        trainer.fit(2, lr=0.1)
        assert (trainer.n_updates, evaluator.n_evaluations) == (6, 6 // n)
        written = [o for o in trainer.history.batches["eval_loss"] if o == o]
        found.append(([row["eval_loss"] for row in trainer.history], written))
    assert found[0] == found[1]


@pytest.mark.parametrize("given", [iter, lambda o: map(lambda cb: cb, o), lambda o: [iter(o)]])
def test_callbacks_that_can_be_walked_over_once_run_in_every_evaluation(given):
    "A generator of callbacks was used up by the look at what is in it"
    heard = []

    class HearCB:
        def after_batch(self, trainer):
            heard.append(trainer.batch_num)

    make_trainer(EvaluatorCB(OTHER, callbacks=given([HearCB()]))).fit(2)
    assert heard == [0, 1, 0, 1]
    with pytest.raises(TypeError, match="`callbacks` holds 3.7"):
        EvaluatorCB(OTHER, callbacks=given([3.7]))


def test_a_loss_that_was_switched_off_later_is_not_computed():
    "The data may have no targets by then, and the loss was computed and thrown away"

    def loss_func(preds, targets):
        assert preds.requires_grad, "this is an evaluation"
        return F.cross_entropy(preds, targets)

    evaluator = EvaluatorCB()
    trainer = make_trainer(evaluator, loss_func=loss_func)
    evaluator.with_loss = False
    trainer.fit(1, valid=False)
    assert "eval_seconds" in trainer.history[-1] and "eval_loss" not in trainer.history[-1]
