"A run with foreign callbacks that was killed in mid-pass goes on as the unbroken one, or says what is lost."

import copy
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torcheval.metrics import Mean

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.interop.adapters import adapt
from isaac_loop.interop.foreign_callback import _Given
from isaac_loop.loop.trainer import Trainer
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.train.training import BasicTrainCB
from foreign import TRAIN, VALID, make_model, same_weights


class Kill(Exception):
    "The end of a process"


def fit(cb, folder, stop_at=None, n_epochs=3):
    "A trainer after a run with `cb`, which ends in its middle or goes on from there"

    def after_batch(trainer):
        if trainer.training and trainer.n_updates == stop_at:
            raise Kill

    dls = DataLoaders(exact_loader(TRAIN, 8, seed=1), exact_loader(VALID, 8, shuffle=False))
    rates = RecorderCB(rate=lambda trainer: trainer.opt.param_groups[0]["lr"])
    trainer = Trainer(
        dls,
        F.cross_entropy,
        optim.SGD,
        make_model(),
        [BasicTrainCB(), rates, cb, CheckpointCB(folder, every=1), after_batch],
    )
    try:
        trainer.fit(n_epochs, lr=0.1)
    except Kill:
        pass
    return trainer


def resumed(make, tmp_path, stop_at=8):
    "What `make` gave for an unbroken run and for one that went on, both trainers, and the warnings"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        (whole, a), (first, _), (again, b) = make(), make(), make()
        one = fit(whole, tmp_path / "whole")
        fit(first, tmp_path / "broken", stop_at)
        two = fit(again, tmp_path / "broken")
    assert one.n_updates == two.n_updates == 15 and same_weights(one.model, two.model)
    return a, b, one, two, [str(o.message) for o in seen if "torch.jit" not in str(o.message)]


Pair = namedtuple("Pair", "a b")


@dataclass
class Best:
    value: float = 1e9
    epoch: int = -1


class Meter:
    def __init__(self):
        self.sum, self.n = 0.0, 0


def _meter(x):
    x.n, x.sum = x.n + 1, x.sum + 0.5


def _best(x):
    x.value, x.epoch = x.value - 1, x.epoch + 1


def _count(x):
    x["x"] += 1


def _more(x):
    x.n += 1


def _in_place(x):
    with torch.no_grad():
        x[0] += 1


# A first value, how it changes (a result takes its place), and what can be compared
KINDS = {
    "deque": (lambda: deque(maxlen=5), lambda x: x.append(len(x)), lambda x: (list(x), x.maxlen)),
    "counter": (Counter, _count, dict),
    "defaultdict": (lambda: defaultdict(int), _count, lambda x: (dict(x), x["new"])),
    "ordered": (OrderedDict, lambda x: x.update({len(x): 1}), list),
    "set": (set, lambda x: x.add(len(x)), sorted),
    "array": (lambda: np.zeros(4, np.float32), lambda x: x + 1, lambda x: (x.tolist(), x.dtype)),
    "tensor": (lambda: torch.zeros(2), lambda x: x.add_(1), torch.Tensor.tolist),
    "dataclass": (Best, _best, vars),
    "meter": (Meter, _meter, vars),
    "namedtuple": (lambda: Pair(0, 0), lambda x: Pair(x.a + 1, x.b), lambda x: (x.a, type(x))),
    "namespace": (lambda: SimpleNamespace(n=0), _more, vars),
    "nested": (lambda: {"a": [Meter()]}, lambda x: _meter(x["a"][0]), lambda x: vars(x["a"][0])),
    "parameters": (lambda: nn.ParameterList([torch.zeros(1)]), _in_place, lambda x: x[0].item()),
    "metric": (Mean, lambda x: x.update(torch.tensor(float(x.weights))), lambda x: x.compute().item()),
    "torch_generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda x: torch.rand(1, generator=x) and None,
        lambda x: torch.rand(1, generator=x).item(),
    ),
    "python_generator": (lambda: random.Random(1), lambda x: x.random() and None, random.Random.random),
    "numpy_generator": (
        lambda: np.random.default_rng(1),
        lambda x: x.random() and None,
        lambda x: x.random(),
    ),
}


class FromTheStart:
    "Of pytorch-accelerated, with an attribute of one kind"

    def __init__(self, first, change):
        self.value, self.change = first(), change

    def on_train_step_end(self, trainer, **kwargs):
        made = self.change(self.value)
        self.value = self.value if made is None else made


class FromTheRun(FromTheStart):
    "It makes the attribute when the run starts, and there is None before"

    def __init__(self, first, change):
        self.first, self.value, self.change = first, None, change

    def on_training_run_start(self, trainer, **kwargs):
        self.value = self.first()


@pytest.mark.parametrize("cls", [FromTheStart, FromTheRun])
@pytest.mark.parametrize("kind", KINDS)
def test_attributes_of_a_foreign_callback_are_kept(kind, cls, tmp_path):
    first, change, told = KINDS[kind]

    def make():
        foreign = cls(first, change)
        return adapt(foreign), foreign

    a, b, _, _, said = resumed(make, tmp_path)
    assert told(a.value) == told(b.value) and not said


def test_what_cannot_be_kept_of_a_foreign_callback_is_told(tmp_path):
    def make():
        foreign = FromTheStart(timedelta, lambda x: x + timedelta(seconds=1))
        return adapt(foreign), foreign

    *_, said = resumed(make, tmp_path)
    assert said and all("`FromTheStart.value` changed during this fit and cannot be kept" in o for o in said)


def test_a_scheduler_that_a_toolbox_callback_makes_goes_on(tmp_path):
    class Cosine:
        callback_name, execution_order = "cosine", 0

        def register_train_loop_object(self, loop):
            self.scheduler = optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, T_max=15)
            return self

        def on_after_optimizer_step(self):
            self.scheduler.step()

    def make():
        foreign = Cosine()
        return adapt(foreign), foreign

    a, b, one, two, said = resumed(make, tmp_path)
    rates = [[o["rate"] for o in t.history.batches if o["training"]] for t in (one, two)]
    assert rates[0] == rates[1] and len(set(rates[0])) == 15 and not said
    assert a.scheduler.last_epoch == b.scheduler.last_epoch == 15


def test_an_average_of_the_model_goes_on_and_stays_a_model(tmp_path):
    class Average:
        def __init__(self):
            self.average = None

        def on_training_run_start(self, trainer, **kwargs):
            self.average = copy.deepcopy(trainer.model)

        def on_train_step_end(self, trainer, **kwargs):
            for a, p in zip(self.average.parameters(), trainer.model.parameters()):
                a.data.lerp_(p.data, 0.1)

    def make():
        foreign = Average()
        return adapt(foreign), foreign

    a, b, _, _, said = resumed(make, tmp_path)
    assert same_weights(a.average, b.average) and not said


class Tracker:
    def __init__(self):
        self.n, self.seen = 0, []

    def update(self, epoch, step, measures, trainer):
        self.n += 1
        self.seen.append((epoch, step))

    def __call__(self, *args):
        self.update(*args)


class Slots:
    __slots__ = ("n", "seen")
    __init__, update, __call__ = Tracker.__init__, Tracker.update, Tracker.__call__


def _handed(tracker, seen, epoch, step, measures, trainer):
    tracker.update(epoch, step, measures, trainer)
    seen.append(step)


@pytest.mark.parametrize("cls", [Tracker, Slots])
@pytest.mark.parametrize(
    "wrap",
    [adapt, lambda o: adapt(o.update), lambda o: adapt(partial(o.update), name="bound")],
    ids=["object", "method", "partial"],
)
def test_the_object_behind_a_callable_is_looked_at(cls, wrap, tmp_path):
    def make():
        tracker = cls()
        return wrap(tracker), tracker

    a, b, _, _, said = resumed(make, tmp_path)
    assert a.n == b.n == 15 and a.seen == b.seen and not said


def test_what_a_partial_hands_over_is_kept(tmp_path):
    def make():
        tracker, seen = Tracker(), []
        adapted = adapt(partial(_handed, tracker, seen), name="handed")
        return adapted, adapted.foreign

    a, b, _, _, said = resumed(make, tmp_path)
    assert a.args[0].seen == b.args[0].seen and a.args[1] == b.args[1] and len(b.args[1]) == 15 and not said


def test_two_names_for_one_list_stay_that_and_what_was_deleted_stays_so(tmp_path):
    class Two:
        def __init__(self):
            self.a = self.b = []
            self.once, self.n_deleted = True, 0

        def on_step_end(self, state):
            self.a.append(state.step)
            if hasattr(self, "once"):
                del self.once
                self.n_deleted += 1

    def make():
        foreign = Two()
        return adapt(foreign), foreign

    a, b, _, _, said = resumed(make, tmp_path)
    assert a.a == b.a == b.b and b.a is b.b and not said
    assert b.n_deleted == 1 and not hasattr(b, "once")


def test_generators_anywhere_in_a_foreign_callback_go_on(tmp_path):
    class Draws:
        def __init__(self):
            self.parts, self.seen = {"inner": [random.Random(3)]}, []

        def on_step_end(self, state):
            self.seen.append(self.parts["inner"][0].random())

    def make():
        foreign = Draws()
        return adapt(foreign), foreign

    a, b, *_ = resumed(make, tmp_path)
    assert a.seen == b.seen


def test_a_foreign_callback_with_a_state_of_its_own_is_asked(tmp_path):
    class Tells:
        def __init__(self):
            self.n, self.seen = 0, []

        def on_step_end(self, state):
            self.n += 1
            self.seen.append(self.n)

        def state_dict(self):
            return dict(n=self.n)

        def load_state_dict(self, state):
            self.n = state["n"]

    def make():
        foreign = Tells()
        return adapt(foreign), foreign

    a, b, _, _, said = resumed(make, tmp_path)
    assert a.n == b.n == 15 and b.seen == list(range(8, 16)) and not said


def test_a_setting_that_differs_is_told_and_that_of_the_script_counts(tmp_path):
    class Patient:
        def __init__(self, patience):
            self.patience, self.n = patience, 0

        def on_step_end(self, state):
            self.n += 1

    fit(adapt(Patient(3)), tmp_path, stop_at=8)
    patient = Patient(5)
    with pytest.warns(UserWarning, match=r"`Patient.patience=5` \(saved: 3\)"):
        fit(adapt(patient), tmp_path)
    assert (patient.patience, patient.n) == (5, 15)


def test_state_that_an_earlier_version_has_saved_is_taken():
    "It held the plain attributes of the foreign callback"

    class Old:
        def __init__(self):
            self.n, self.by_name = 0, defaultdict(int)

        def on_step_end(self, state):
            "Nothing"

    old = Old()
    adapted = adapt(old)
    adapted.load_state_dict(dict(foreign=dict(n=7, by_name={"x": 2}), own=dict(_fresh=True), shared=None))
    assert old.n == 7 and old.by_name["x"] == 2 and old.by_name["new"] == 0


def test_classes_that_answer_any_name_with_an_error_go_on(tmp_path):
    "Those of pytorch-accelerated do, and the attribute is not there yet when the run goes on"

    class Answers:
        def __getattr__(self, name):
            raise NotImplementedError

        def on_train_step_end(self, trainer, **kwargs):
            self.n = vars(self).get("n", 0) + 1

    def make():
        foreign = Answers()
        return adapt(foreign), foreign

    a, b, _, _, said = resumed(make, tmp_path)
    assert a.n == b.n == 15 and not said


def test_a_list_that_the_script_has_given_to_a_partial_is_still_its_own_after_a_stop(tmp_path):
    def keep(rows, epoch, step, measures, trainer):
        rows.append(float(measures["loss"]))

    def fit(rows, stops):
        def before_epoch(trainer):
            if stops and trainer.epoch == 1:
                raise KeyboardInterrupt

        batches = [(torch.ones(2, 1), torch.ones(2, 1))] * 4
        callbacks = [BasicTrainCB(), MetricsCB(show=False), adapt(partial(keep, rows), name="keep")]
        dls = DataLoaders(batches)
        trainer = Trainer(dls, F.mse_loss, optim.SGD, nn.Linear(1, 1), [*callbacks, CheckpointCB(tmp_path)])
        trainer.fit(3, valid=False, callbacks=before_epoch)

    with pytest.raises(KeyboardInterrupt):
        fit([], True)
    rows = []
    fit(rows, False)
    assert len(rows) == 12


@pytest.mark.parametrize("held", [[1, 2], {"a": 1}, {1, 2}])
def test_a_container_of_a_partial_that_was_filled_in_place_is_not_emptied(held):
    given, was = _Given(partial(print, held)), copy.copy(held)
    given.arg_0 = held
    assert held == was and given._partial.args[0] is held
    given.arg_0 = type(held)()
    assert not held and given._partial.args[0] is held
