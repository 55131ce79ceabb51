"The calls of a batch stand in one chain: nobody can tell that from running one event after the other."

import copy
import functools
import gc
import itertools
import pickle
import random
import weakref
from types import SimpleNamespace

import pytest
import torch

from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop import running
from isaac_loop.loop.events import CancelBatchException, CancelEpochException, CancelFitException
from isaac_loop.loop.events import CancelStepException, Order, STEPS
from isaac_loop.loop.passes import inputs_of, targets_of
from isaac_loop.loop.running import run_event
from isaac_loop.loop.spans import in_span
from isaac_loop.loop.trainer import Trainer
from small import trainer_with

EVENTS = ["before_batch", "after_batch", "cleanup_batch", "log"]
EVENTS += [o + step for step in STEPS for o in ("before_", "", "after_", "cleanup_")]
CANCELS = [CancelStepException, CancelBatchException, CancelEpochException, CancelFitException]
DEEDS = ["come", "go", "go", "come and go", *CANCELS, CancelStepException, ValueError, KeyboardInterrupt]


def step_span(step):
    return in_span(lambda trainer, **extra: run_event(trainer, step, extra), STEPS[step])


class EventByEvent(Trainer):
    "Runs each event by itself, and asks the plan before each"

    spans = {step: step_span(step) for step in STEPS}

    def run_callbacks(self, *names, **extra):
        for name in names:
            if name in self.plan.bare_steps:
                try:
                    run_event(self, name)
                except CancelStepException:
                    pass
            elif name in STEPS:
                self.spans[name](self)
            else:
                run_event(self, name, extra)


class CountPredictsCB:
    n = 0

    def after_predict(self, trainer):
        self.n += 1


def unruly(name, seed, seen, deeds):
    "A callback that answers some events, and at some of them does something to the loop"
    chance = random.Random(f"{seed} {name}")
    events = chance.sample(EVENTS, chance.randint(1, 6))

    def answer(event):
        n = [0]
        when, deed = chance.randrange(3), chance.choice(deeds)
        whom, order = chance.random(), chance.choice([-1, 0, 1])

        def handler(trainer):
            seen.append((name, event, getattr(trainer, "batch_num", None), trainer.training))
            n[0] += 1
            if n[0] - 1 != when or len(seen) > 300:
                return
            others = [o for o in trainer.callbacks if hasattr(o, "unruly")]
            if deed in ("go", "come and go") and others:
                trainer.remove_callbacks(others[int(whom * len(others))])
            if deed in ("come", "come and go"):
                new = unruly(f"{name}.{event}", seed, seen, [*deeds, None, None, None, None])
                new.order = order
                trainer.add_callback(new)
            if isinstance(deed, type):
                raise deed(name)

        return handler

    found = SimpleNamespace(name=name, order=chance.choice([-1, 0, 0, 1]), unruly=True)
    vars(found).update({event: answer(event) for event in events})
    return found


def run(cls, seed, deeds):
    "What was called, what came out of the fit, and the weights"
    torch.manual_seed(seed)
    seen = []
    trainer = trainer_with(*(unruly(f"cb{i}", seed, seen, deeds) for i in range(3)), cls=cls)
    error = None
    try:
        trainer.fit(2, lr=0.1)
    except BaseException as e:
        error = repr(e), [o.replace(cls.__name__, "Trainer") for o in getattr(e, "__notes__", ())]
    return seen, error, trainer.n_updates, [p.tolist() for p in trainer.model.parameters()]


@pytest.mark.shows("ISA-05")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 120, 60))
def test_a_chain_is_the_same_as_one_event_after_the_other(first):
    for seed in range(first, first + 60):
        for deeds in (DEEDS, DEEDS[:3], ["come", CancelStepException]):
            assert run(Trainer, seed, deeds) == run(EventByEvent, seed, deeds), (seed, deeds)


class Asked(Trainer):
    "Notes what its `run_callbacks` is asked for"

    def subclassing_method(self):
        self.asked = []

    def run_callbacks(self, *names, **extra):
        self.asked.append(names)
        super().run_callbacks(*names, **extra)


def test_a_run_callbacks_of_ones_own_is_asked_for_every_step():
    trainer = trainer_with(cls=Asked)
    trainer.fit(1)
    training = [("predict", "get_loss"), ("backward", "step", "zero_grad")]
    assert trainer.asked == [*training * 3, *training[:1] * 2, ("log",)]


def predict_leaves(trainer):
    raise CancelStepException


predict_leaves.__name__ = "predict"


def test_a_run_callbacks_of_ones_own_is_asked_once_also_after_a_cancel():
    others = dict.fromkeys(["get_loss", "backward", "step", "zero_grad"], lambda trainer: None)
    trainer = trainer_with(predict_leaves, SimpleNamespace(name="others", **others), cls=Asked, n=1)
    trainer.remove_callbacks("BasicTrainCB")
    trainer.fit(1, valid=False)
    assert trainer.asked == [("predict", "get_loss"), ("backward", "step", "zero_grad"), ("log",)]
    trainer.run_callbacks(["predict", "get_loss"])
    assert trainer.asked[3:] == [(["predict", "get_loss"],)]


def test_a_run_callbacks_that_somebody_puts_in_its_place_is_asked(monkeypatch):
    for place in ("instance", "class"):
        trainer, asked, usual = trainer_with(n=1), [], Trainer.run_callbacks

        def wrapped(self, *names, asked=asked, usual=usual, **extra):
            asked.append(names)
            return usual(self, *names, **extra)

        def before_epoch(trainer, place=place, wrapped=wrapped):
            if place == "class":
                monkeypatch.setattr(Trainer, "run_callbacks", wrapped)
            else:
                trainer.run_callbacks = wrapped.__get__(trainer)

        trainer.fit(1, callbacks=before_epoch, valid=False)
        assert asked[:2] == [("predict", "get_loss"), ("backward", "step", "zero_grad")], place


@pytest.mark.parametrize("place", ["subclass", "class", "instance"])
def test_a_one_batch_of_ones_own_is_called_wherever_it_was_put(monkeypatch, place):
    seen, usual = [], Trainer.one_batch

    @functools.wraps(usual)  # Which takes over what the usual one has for its chain
    def watched(self):
        seen.append(self.batch_num)
        return usual(self)

    own = type("Own", (Trainer,), dict(one_batch=watched)) if place == "subclass" else Trainer
    trainer = trainer_with(cls=own, n=3)
    if place == "class":
        monkeypatch.setattr(Trainer, "one_batch", watched)
    if place == "instance":
        trainer.one_batch = watched.__get__(trainer)
    trainer.fit(1, valid=False)
    assert seen == [0, 1, 2] and trainer.n_updates == 3


@pytest.mark.parametrize("place", ["subclass", "class", "instance", "loaders"])
def test_a_split_of_ones_own_is_asked_wherever_it_was_put(monkeypatch, place):
    asked = []

    def halves(batch):
        asked.append(batch)
        return batch[:1], tuple(2 * y for y in batch[1:])

    own = type("Own", (Trainer,), dict(split=lambda self, batch: halves(batch)))
    trainer, usual = trainer_with(cls=own if place == "subclass" else Trainer, n=3), trainer_with(n=3)
    trainer.model, trainer.dls.train = copy.deepcopy(usual.model), usual.dls.train
    if place == "class":
        monkeypatch.setattr(Trainer, "split", lambda self, batch: halves(batch))
    if place == "instance":
        trainer.split = halves
    if place == "loaders":
        trainer.dls.split = halves
    trainer.fit(1, valid=False)
    assert asked
    monkeypatch.undo()
    doubled = SimpleNamespace()
    doubled.before_batch = lambda trainer: setattr(trainer, "batch", (trainer.batch[0], 2 * trainer.batch[1]))
    usual.fit(1, callbacks=doubled, valid=False)
    assert trainer.model.weight.equal(usual.model.weight)


@pytest.mark.parametrize("says_more", [True, False])
def test_an_evaluation_leaves_the_way_to_tell_inputs_from_targets(says_more):
    trainer, seen = trainer_with(n=4), []
    if says_more:
        trainer.dls.split = lambda batch: (batch[:1], tuple(2 * y for y in batch[1:]))

    def after_batch(trainer):
        if trainer.batch_num == 1:
            trainer.validate(DataLoaders(None, trainer.dls.valid).valid)
        seen.append(targets_of(trainer)[0].equal(trainer.batch[1]))

    after_batch.order = Order.RECORD
    trainer.fit(1, callbacks=after_batch, valid=False)
    assert seen == [not says_more] * 4


def test_loaders_that_say_more_in_the_middle_of_a_pass_are_heard_at_once():
    trainer, seen = trainer_with(n=4), []
    batches = list(trainer.dls.train)
    triples = [(x, x, y) for x, y in batches]

    class TakesTurns:
        def __iter__(self):
            for i in range(4):
                trainer.dls.n_inp = 1 + i % 2
                yield triples[i] if i % 2 else batches[i]

    class Both(torch.nn.Linear):
        def forward(self, x, more=0):
            return super().forward(x + more)

    def after_batch(trainer):
        seen.append((len(inputs_of(trainer)), len(targets_of(trainer))))
        with trainer.side_run() as side:
            side.dls = DataLoaders(triples, n_inp=2)
            assert [len(o) for o in side.split(triples[0])] == [2, 1]

    trainer.dls.train, trainer.model = TakesTurns(), Both(1, 1)
    trainer.fit(1, callbacks=after_batch, valid=False)
    assert seen == [(1, 1), (2, 1)] * 2


@pytest.mark.parametrize("name", ["one_batch", "split", "run_callbacks"])
@pytest.mark.parametrize("comes", [True, False])
def test_a_method_of_the_trainer_that_comes_or_goes_within_a_pass_is_told(name, comes):
    trainer = trainer_with(n=4)
    usual = getattr(trainer, name)
    if not comes:
        setattr(trainer, name, lambda *args, **kwargs: usual(*args, **kwargs))

    def after_batch(trainer):
        if trainer.batch_num == 1 and trainer.epoch == 0:
            setattr(trainer, name, usual) if comes else delattr(trainer, name)

    with pytest.warns(UserWarning, match=f"`trainer.{name}` was (set|taken away)") as told:
        trainer.fit(2, callbacks=after_batch, valid=False)
    assert len([o for o in told if "in the middle of a pass" in str(o.message)]) == 1


def test_a_chain_that_has_changed_is_made_anew_once(monkeypatch):
    made, usual = [], running.chain_of

    def counted(plan, names):
        made.append(names[0])
        return usual(plan, names)

    monkeypatch.setattr(running, "chain_of", counted)
    seen = []
    late = SimpleNamespace(name="late", after_batch=lambda trainer: seen.append(trainer.batch_num))

    def before_batch(trainer):
        if trainer.batch_num == 2:
            trainer.add_callbacks(late)

    trainer_with(n=6).fit(1, callbacks=before_batch, valid=False)
    assert seen == [2, 3, 4, 5] and made.count("before_batch") == 2


def test_chains_hear_of_changes_however_many_there_are():
    events = [f"e{i}" for i in range(120)]

    class ManyEvents(Trainer):
        def one_batch(self):
            for event in self.events:
                self.run_callbacks(event)
            self.run_callbacks("predict", "get_loss")

    ManyEvents.events = tuple(events)
    seen = []
    late = SimpleNamespace(name="late", get_loss=lambda trainer: seen.append("late"))

    def predict(trainer):
        trainer.remove_callbacks(late)

    trainer = trainer_with(late, cls=ManyEvents, n=1)
    trainer.remove_callbacks("BasicTrainCB")
    trainer.fit(1, callbacks=predict, valid=False)
    assert not seen


def test_a_trainer_that_says_itself_whether_it_trains_is_asked():
    class Never(Trainer):
        training = property(lambda self: False)

    trainer = trainer_with(cls=Never)
    trainer.fit(1)
    assert trainer.n_updates == 0


def test_a_batch_by_hand_goes_by_the_mode_of_the_model():
    trainer = trainer_with(n=1)
    trainer.fit(1)
    weight = trainer.model.weight.clone()
    trainer.batch = trainer.dls.train[0]
    trainer.model.eval()
    trainer.one_batch()
    assert trainer.model.weight.equal(weight)
    trainer.model.train()
    trainer.one_batch()
    assert not trainer.model.weight.equal(weight)
    with pytest.raises(TypeError):
        trainer.one_batch(3)


def test_many_cancels_go_no_deeper_and_many_orders_are_not_kept():
    seen = []

    class Long(Trainer):
        def one_batch(self):
            self.run_callbacks(*["predict"] * 2000)
            for order in itertools.permutations(STEPS):
                self.run_callbacks(*order)

    trainer = trainer_with(cls=Long, n=1)
    trainer.remove_callbacks("BasicTrainCB")

    def predict(trainer):
        seen.append(1)
        raise CancelStepException

    trainer.fit(1, callbacks=predict, valid=False)
    assert len(seen) == 2120 and len(trainer.plan.chains) < 60
    trainer.run_callbacks()


def test_a_callback_of_one_fit_is_free_after_it():
    class HereCB:
        def after_predict(self, trainer):
            pass

    here, trainer = HereCB(), trainer_with()
    alive = weakref.ref(here)
    trainer.fit(1, callbacks=here)
    del here
    gc.collect()
    assert alive() is None


def test_one_method_under_two_names_answers_both_events():
    seen = []

    class Both:
        def predict(self, trainer):
            seen.append("both")

        get_loss = predict

    both = Both()
    both.backward = both.step = seen_function = lambda trainer: seen.append("function")
    trainer = trainer_with(n=1)
    trainer.remove_callbacks("BasicTrainCB")
    trainer.add_callback(both)
    trainer.fit(1, valid=False)
    assert seen == ["both", "both", "function", "function"] and both.step is seen_function


def test_the_second_of_two_calls_of_one_function_is_blamed_where_it_fails():
    calls = []

    def fails_at_once_more(trainer):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("twice")

    twice = SimpleNamespace(name="twice", predict=fails_at_once_more, zero_grad=fails_at_once_more)
    with pytest.raises(ValueError) as info:
        trainer_with(twice).fit(1)
    assert "raised by `twice.zero_grad`" in info.value.__notes__[0]


def test_a_trainer_with_chains_can_be_pickled_and_copied():
    t = trainer_with(CountPredictsCB())
    t.fit(1)
    for again in (pickle.loads(pickle.dumps(t)), copy.deepcopy(t)):
        again.fit(1)
        assert again.CountPredictsCB.n == 10 and t.CountPredictsCB.n == 5
