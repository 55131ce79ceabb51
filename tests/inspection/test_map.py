"""The map of a loop, which is read in the source, against what a recording trainer sees.

What is seen must be among what is shown, for every callback of the library and for those that a user writes.
"""

import copy
import io
import linecache
import operator
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cached_property, partial, wraps
from types import FunctionType, SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import runs
from isaac_loop import Trainer, with_cbs
from isaac_loop.basics.tensors import map_tensors
from isaac_loop.callbacks import BasicTrainCB, ClipGradCB, MetricsCB, RewindCB
from isaac_loop.data import DataLoaders
from isaac_loop.inspection.map_entries import KINDS, all_entries, loops_entry
from isaac_loop.inspection.map_entries import _LOOP as LOOP
from isaac_loop.inspection.observing import observing
from isaac_loop.inspection.source import known_calls, reading
from isaac_loop.inspection.source.method_source import to_follow
from isaac_loop.loop.events import CancelEpochException, CancelException, CancelStepException, callback_name
from observing import observe, unchanged
from working import WORKING, images_trainer, working

MADE_UP = {"AttributeSchedulerCB", "LRFinderCB"}  # Their map says that it cannot tell everything
KEEPS_ALL = {"CheckpointCB"}  # It looks into every attribute for state that nobody tells


def watched_fit(trainer, n_epochs=2):
    "What was seen in a fit"
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with observing(trainer) as record:
            trainer.fit(n_epochs, 0.01)
    return record


def beyond(entries, record, callback):
    "What was seen of a callback and is not shown"
    shown = {entry.event: entry.found for entry in entries if entry.callback is callback}
    return [
        (event, kind, name)
        for (event, _), (who, seen) in record.found.items()
        if who is callback and event in shown
        for kind in KINDS
        for name in getattr(seen, kind)
        if name not in getattr(shown[event], kind)
    ]


def check_picture(map, callback):
    "Is it well-formed, and does it have everybody?"
    picture = ElementTree.fromstring(map.to_svg())
    texts = [o.text for o in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count(callback_name(callback)) == len([o for o in map.entries if o.callback is callback])
    ElementTree.fromstring(f"<div>{map.to_html()}</div>")
    assert len(map.table()) == len(map.entries) and map.to_markdown().startswith("| event |")


@pytest.mark.parametrize("name", WORKING)
def test_what_is_seen_is_among_what_a_well_formed_picture_shows(name, tmp_path):
    trainer, callback = working(name, tmp_path)
    map = trainer.map()
    check_picture(map, callback)
    entries = map.entries
    missing = beyond(entries, watched_fit(trainer), callback)
    missing = [o for o in missing if name not in KEEPS_ALL or o[1] != "reads"]
    unclear = [o for entry in entries if entry.callback is callback for o in entry.found.unclear]
    assert not missing or (name in MADE_UP and unclear), missing


def test_the_loops_own_writes_are_those_of_its_entries():
    trainer = images_trainer([BasicTrainCB()])
    seen = watched_fit(trainer).of(None)
    shown = {name for event in LOOP for name in loops_entry(event).found.writes}
    taken_away = {"preds", "loss"}
    assert set(seen.writes) - shown <= {"training"} | taken_away, (
        "the loop writes what its entries do not say"
    )
    assert not shown - set(seen.writes), "the entries say what the loop does not do"
    assert {"model", "history"} >= {
        name for event in LOOP for name in loops_entry(event).found.changes
    } and "model" in seen.changes


def test_a_look_at_one_batch_leaves_no_trace():
    batches = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)]
    trainer = runs.fit(runs.make_trainer(runs.everything(), DataLoaders(batches, batches)), 1)
    before = observe(trainer, skip=["_aside"])
    with redirect_stdout(io.StringIO()) as said:
        seen = trainer.map(observe=True)
    unchanged(trainer, before, skip=["_aside"])
    assert seen.observed == [] and not said.getvalue()


def test_training_after_a_look_is_training_without_one():
    plain = runs.fit(runs.make_trainer(runs.everything()))
    looked = runs.make_trainer(runs.everything())
    looked.map(observe=True)
    runs.same(plain, runs.fit(looked))


# What users write


class Counter:
    "Keeps its own things, by a helper of its base class"

    def note(self, trainer, name):
        setattr(trainer, name, self.n)

    def before_fit(self, trainer):
        self.n = 0
        self.params = list(trainer.model.parameters())


class NoisyCB(Counter):
    def after_batch(self, trainer):
        self.n += 1
        self.note(trainer, "n_noisy")
        with torch.no_grad():
            for p in self.params:
                p.add_(0.001 * torch.randn_like(p))


def log(trainer):
    trainer.last_row = trainer.history[-1] if len(trainer.history) else None


def halve(trainer, by):
    trainer.loss = trainer.loss * by


def two_optimizers(trainer):
    trainer.opt_d.step()
    trainer.opt_d.zero_grad()


class GanTrainer(Trainer):
    events = ("verify",)

    @with_cbs("extra", CancelException)
    def extra(self):
        self.found = self.batch[0].mean()

    def one_batch(self):
        self.run_callbacks("predict", "get_loss", "verify")
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")
        self.extra()


USERS = {
    "state kept by a base class": lambda: [BasicTrainCB(), NoisyCB()],
    "a function": lambda: [BasicTrainCB(), log],
    "a partial in a namespace": lambda: [
        BasicTrainCB(),
        SimpleNamespace(after_get_loss=partial(halve, by=0.5), name="halve"),
    ],
    "a lambda": lambda: [BasicTrainCB(), SimpleNamespace(after_batch=lambda t: setattr(t, "n", t.batch_num))],
}


@pytest.mark.parametrize("case", USERS)
def test_what_is_seen_of_a_users_callback_is_shown(case):
    trainer = images_trainer(USERS[case]())
    entries, callback = all_entries(trainer), trainer.callbacks[-1]
    record = watched_fit(trainer)
    assert not beyond(entries, record, callback)
    assert any(
        getattr(seen, kind) for _, (who, seen) in record.found.items() if who is callback for kind in KINDS
    )


def test_a_helper_of_the_base_class_is_followed():
    trainer = images_trainer([BasicTrainCB(), NoisyCB()])
    assert [row["callback"] for row in trainer.who_writes("n_noisy").rows] == ["NoisyCB"]
    writes_weights = [(row["event"], row["callback"]) for row in trainer.who_writes("model").rows]
    assert ("after_batch", "NoisyCB") in writes_weights


def test_a_second_optimizer_is_an_attribute_like_others():
    other = nn.Linear(2, 2)
    trainer = images_trainer([BasicTrainCB(), SimpleNamespace(after_batch=two_optimizers)])
    trainer.opt_d = optim.SGD(other.parameters(), 0.1)
    [row] = trainer.who_writes("opt_d").rows
    assert row["event"] == "after_batch"


def test_a_batch_of_ones_own_and_its_events_have_their_places():
    trainer = GanTrainer(
        DataLoaders([(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))]),
        F.cross_entropy,
        optim.SGD,
        nn.Linear(3, 2),
        [BasicTrainCB(), SimpleNamespace(verify=log), SimpleNamespace(before_extra=log, name="second")],
    )
    map = trainer.map()
    events = [entry.event for entry in map.entries]
    assert events.index("zero_grad") < events.index("verify") < events.index("before_extra")
    own = next(entry for entry in map.entries if entry.name == "GanTrainer")
    assert {"predict", "verify", "extra"} <= own.found.runs
    assert "second" in map.to_svg()


def test_what_has_no_source_is_said():
    names = {}
    exec("class HiddenCB:\n    def after_batch(self, trainer): trainer.hidden = 1", names)
    trainer = images_trainer([BasicTrainCB(), names["HiddenCB"]()])
    assert "`HiddenCB.after_batch`" in str(trainer.map()) and "source" in str(trainer.map())
    assert trainer.map("hidden", observe=True).observed == ["`HiddenCB.after_batch` writes hidden"]


class ChainCB:
    "What one method keeps, the next uses, against the order of events once"

    def before_fit(self, trainer):
        self.opt2 = self.saved

    def before_epoch(self, trainer):
        self.o = self.opt2

    def before_batch(self, trainer):
        self.opt3 = self.o

    def after_batch(self, trainer):
        self.opt3.step()

    def after_epoch(self, trainer):
        self.saved = trainer.opt


class PartialCB:
    "Calls a partial of what is known only later"

    def before_fit(self, trainer):
        self.p = partial(self.q, trainer)

    def before_batch(self, trainer):
        self.p()

    def after_batch(self, trainer):
        self.q = self.double

    def double(self, trainer):
        trainer.loss = trainer.loss * 2


def read_loss(trainer):
    return trainer.loss


def halve_preds(trainer):
    trainer.preds = trainer.preds / 2


def guarded(action):
    return lambda trainer: (lambda: lambda: action(trainer))()()


reader, writer = guarded(read_loss), guarded(halve_preds)


class TwoCB:
    "Calls two functions that one function has made"

    def after_get_loss(self, trainer):
        reader(trainer)
        writer(trainer)


@pytest.mark.parametrize("kind, name", [(ChainCB, "model"), (PartialCB, "loss"), (TwoCB, "preds")])
def test_what_is_known_in_a_roundabout_way_is_shown(kind, name):
    assert kind.__name__ in str(images_trainer([BasicTrainCB(), kind()]).who_writes(name))


class GroupsCB:
    "Writes where several errors at once are caught"

    def after_batch(self, trainer):
        try:
            len(trainer.batch)
        except* ValueError:
            trainer.trouble = 1


def test_what_happens_where_several_errors_are_caught_is_shown():
    assert "GroupsCB" in str(images_trainer([BasicTrainCB(), GroupsCB()]).who_writes("trouble"))


def test_an_attribute_that_nobody_touches_is_an_error_that_says_so():
    trainer = images_trainer([BasicTrainCB()])
    with pytest.raises(LookupError, match="Did you mean `preds`"):
        trainer.map("pred")
    with pytest.raises(LookupError, match="Nobody reads or writes"):
        trainer.who_reads("zzz")
    with pytest.raises(LookupError, match="`trainer.experiment` here. `trainer.map"):
        trainer.map("experiment")


def test_a_map_is_written_in_the_form_of_its_ending(tmp_path):
    map = images_trainer([BasicTrainCB(), ClipGradCB(1.0)]).map("gradients")
    for ending, beginning in {"svg": "<svg", "html": "<svg", "md": "| event", "txt": "event"}.items():
        map.save(tmp_path / f"map.{ending}")
        assert (tmp_path / f"map.{ending}").read_text().startswith(beginning)
    with pytest.raises(ValueError, match=r"map.png.*`\.svg`|map.png"):
        map.save(tmp_path / "map.png")


def test_a_map_runs_nothing():
    class LoudCB:
        @property
        def kept(self):
            raise AssertionError("a property was asked for")

        def after_batch(self, trainer):
            return self.kept

    trainer = images_trainer([BasicTrainCB(), LoudCB()])
    before = observe(trainer)
    trainer.map()
    unchanged(trainer, before)


def effects_of(*callbacks):
    "What the map shows of callbacks, by event, and what it could not follow"
    shown = {o.event: o.found for o in images_trainer([BasicTrainCB(), *callbacks]).map().entries}
    kinds = *KINDS, "does", "runs", "raises"
    told = {event: [set(getattr(found, kind)) for kind in kinds] for event, found in shown.items()}
    return told, {event: set(found.unclear) for event, found in shown.items()}


def test_what_only_looks_shows_the_same_if_it_is_followed(monkeypatch):
    "Some chapters and functions are passed over, since they change nothing: to follow them would take long"
    effects = lambda: effects_of(MetricsCB(same=lambda preds, targets: (preds == targets).sum()), RewindCB(2))
    found = effects()
    assert known_calls.LOOKING
    monkeypatch.setattr(known_calls, "LOOKING", set())
    assert effects() == found


class HalvesCB:
    "Does something with each tensor of a batch, by a function with and without a name"

    def before_batch(self, trainer):
        trainer.batch = map_tensors(self.half, trainer.batch)
        map_tensors(lambda o: o.add_(1), trainer.batch)

    def half(self, o):
        self.seen = o.shape
        return o / 2


def test_a_function_for_each_tensor_is_known_to_be_called_for_a_part_of_what_it_is_given(monkeypatch):
    "That which calls it is not followed: it calls itself for each kind of container"
    known = effects_of(HalvesCB())
    assert all("batch" in told for told in known[0]["before_batch"][: len(KINDS)])
    monkeypatch.setattr(reading, "map_tensors", None)
    assert effects_of(HalvesCB()) == known


def test_what_is_built_into_python_is_not_followed():
    assert not any(map(to_follow, [os.path.isdir, os.path.join, os.makedirs, shutil.rmtree, Mapping.get]))
    assert to_follow(working)


def test_who_does_not_ask_for_a_map_does_not_load_it():
    code = "import sys, isaac_loop.loop.trainer; print([o for o in sys.modules if '.inspection' in o])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# What else it says: cancels, passes, parts of a model; and other names


class LeavesCB:
    "Raises cancels of two kinds, and an error that is none"

    on_valid = False

    def before_batch(self, trainer):
        if trainer.batch_num > 1:
            raise CancelEpochException("enough")

    def before_step(self, trainer):
        if trainer.loss > 3:
            raise CancelStepException
        self.refuse(trainer)

    def refuse(self, trainer):
        raise ValueError("no")

    def cleanup_epoch(self, trainer):
        trainer.history.write(n_seen=trainer.batch_num)
        trainer.write_measured(n_more=1)


class OwnCancel(CancelException):
    pass


def test_who_may_leave_by_a_cancel_is_shown():
    map = images_trainer([BasicTrainCB(), LeavesCB()]).map()
    found = {row["event"]: row.get("may leave") for row in map.table().rows if row["callback"] == "LeavesCB"}
    assert found == {"before_batch (train)": "epoch", "before_step": "step", "cleanup_epoch (train)": None}
    assert "may leave" in str(map) and "<td" in map.to_html() and ">may leave<" in map.to_html()
    assert "may leave: epoch" in map.to_svg() and "may leave: epoch" not in map.to_markdown()
    assert "may leave" not in str(images_trainer([BasicTrainCB()]).map())


def test_a_cancel_of_ones_own_has_its_own_name():
    class LeavesCB:
        def after_batch(self, trainer):
            raise OwnCancel("now")

    entry = images_trainer([BasicTrainCB(), LeavesCB()]).map("LeavesCB").shown[0]
    assert entry.may_leave == "OwnCancel"


def test_the_kind_of_pass_is_told_where_it_is_not_plain():
    class ValidCB:
        on_train = False

        def before_fit(self, trainer):
            pass

        def after_epoch(self, trainer):
            pass

    trainer = images_trainer([BasicTrainCB(), ValidCB(), ClipGradCB(1.0)])
    events = {(row["callback"], row["event"]) for row in trainer.map().table().rows}
    assert {("ValidCB", "before_fit"), ("ValidCB", "after_epoch (valid)")} <= events
    assert {("ClipGradCB", "before_step"), ("ClipGradCB", "before_epoch (train)")} <= events


def test_a_mode_is_no_weight():
    class ModesCB:
        def before_epoch(self, trainer):
            trainer.model.eval()

        def after_step(self, trainer):
            if trainer.epoch:
                trainer.model[0].weight.data.mul_(0.9)

        def after_fit(self, trainer):
            trainer.model.requires_grad_(False)
            trainer.model.training = False

    trainer = images_trainer([BasicTrainCB(), ModesCB()])
    told = {(row["callback"], row["event"]): row["does"] for row in trainer.who_writes("model").rows}
    assert (
        told["the loop", "before_epoch"]
        == told["ModesCB", "before_epoch"].removeprefix("reads ")
        == "changes mode"
    )
    assert told["BasicTrainCB", "step"] == "changes weights"
    assert told["ModesCB", "after_step"].endswith("(changes weights)")
    assert told["ModesCB", "after_fit"].endswith("changes what is trained, mode")


def test_parentheses_are_explained_where_there_are_some():
    map = images_trainer([BasicTrainCB(), ClipGradCB(1.0)]).map()
    assert str(map).endswith("In parentheses: under a condition only.") and "Fainter" in map.to_html()
    assert "In parentheses" not in str(images_trainer([BasicTrainCB(), LeavesCB()]).map("n_updates"))


@pytest.mark.parametrize("word, name", [("weights", "model"), ("predictions", "preds"), ("optimizer", "opt")])
def test_other_words_for_an_attribute_are_understood(word, name):
    trainer = images_trainer([BasicTrainCB()])
    assert trainer.who_writes(word).rows == trainer.who_writes(name).rows != []
    assert f"`{word}` stands for `{name}`." in str(trainer.map(word))
    trainer.add_callback(SimpleNamespace(after_batch=lambda t: setattr(t, word, 1)))
    assert trainer.map(word).attribute == word  # Now there is one of that name


def test_a_callback_is_shown_by_its_name():
    trainer = images_trainer([BasicTrainCB(), LeavesCB()])
    assert {entry.name for entry in trainer.map("LeavesCB").shown} == {"LeavesCB"}
    assert [entry.event for entry in trainer.map("LeavesCB.before_step").shown] == ["before_step"]
    assert "BasicTrainCB" not in trainer.map("LeavesCB").to_svg()
    with pytest.raises(LookupError, match="is a callback and no attribute"):
        trainer.who_reads("LeavesCB")


def test_a_column_of_the_history_leads_to_its_writer():
    trainer = images_trainer([BasicTrainCB(), LeavesCB(), MetricsCB(n_right=lambda p, y: 0.0, show=False)])
    for name in ("n_seen", "n_more"):
        [row] = trainer.who_writes(name).rows
        assert (row["callback"], row["event"]) == ("LeavesCB", "cleanup_epoch (train)")
    assert "`n_seen` is a column of the history." in str(trainer.map("n_seen"))
    with pytest.raises(LookupError, match="`n_right` is a column.*`MetricsCB` has something of that name"):
        trainer.who_writes("n_right")
    trainer.history.rows.append({"made": 1})
    with pytest.raises(LookupError, match='`made` is a column.*who_writes."history"'):
        trainer.who_writes("made")


def test_what_is_swapped_has_the_place_of_what_runs_instead():
    trainer = images_trainer([BasicTrainCB()])
    for when in (None, lambda t: t.epoch == 0):
        with trainer.swap("BasicTrainCB.step", two_optimizers, when):
            [entry] = [entry for entry in trainer.map().entries if entry.event == "step"]
            assert entry.where.startswith("test_map.py:")


def keeps_a_note(trainer):
    trainer.note = trainer.lr
    trainer.opt.step()


def late(trainer):
    return trainer.epoch > 1


class OwnStep:
    def step(self, trainer):
        trainer.note = trainer.lr


@pytest.mark.parametrize(
    "other, when, condition",
    [
        (keeps_a_note, None, ""),
        (OwnStep(), None, ""),
        (keeps_a_note, late, "late(trainer)"),
        (keeps_a_note, lambda t: t.epoch == 0, "t.epoch == 0"),
    ],
)
def test_what_is_swapped_reads_and_writes_what_the_function_in_its_place_does(other, when, condition):
    trainer = images_trainer([BasicTrainCB()])
    with trainer.swap("step", other, when):
        [row] = trainer.map("note").table().rows
        assert row["event"] == "step" and row["does"] == ("(writes)" if when else "writes")
        assert row.get("if", "") == condition and row["where"].startswith("test_map.py:")
        assert trainer.who_writes("note").rows == [row]
        reads = {entry.event for entry in trainer.map("loss").shown if entry.touches("loss") == ["reads"]}
        assert "step" not in reads or when
        if when is late:
            assert "step" in [row["event"] for row in trainer.who_reads("epoch").rows], "it is asked"
    with pytest.raises(LookupError, match="Nobody reads or writes `trainer.note`"):
        trainer.map("note")


class Keeps:
    def __init__(self, f):
        self.f = f

    def after_step(self, trainer):
        self.f(trainer)


class Notes:
    def __call__(self, trainer):
        trainer.note = 1


@pytest.mark.parametrize("f", [keeps_a_note, Notes()])
def test_a_function_that_a_callback_was_given_is_followed(f):
    trainer = images_trainer([BasicTrainCB(), Keeps(f)])
    [row] = trainer.who_writes("note").rows
    assert (row["callback"], row["event"], row["does"]) == ("Keeps", "after_step", "writes")


def noting(f):
    "A decorator of a user's that does something of its own"

    @wraps(f)
    def inner(self, trainer):
        trainer.note = trainer.lr
        if trainer.epoch > 5:
            raise CancelStepException("enough")
        return f(self, trainer)

    return inner


def noting_so_much(n):
    def decorator(f):
        @wraps(f)
        def inner(*args, **named):
            args[1].note = n
            return f(*args, **named)

        return inner

    return decorator


class WrappedCB:
    @noting
    def after_step(self, trainer):
        trainer.mark = 1


class WrappedTwiceCB:
    @noting_so_much(3)
    @torch.no_grad()
    def after_step(self, trainer):
        trainer.mark = 1


@pytest.mark.parametrize("cls", [WrappedCB, WrappedTwiceCB])
def test_a_decorator_is_read_and_what_it_wraps(cls):
    trainer = images_trainer([BasicTrainCB(), cls()])
    for name in ("note", "mark"):
        [row] = trainer.who_writes(name).rows
        assert (row["callback"], row["does"]) == (cls.__name__, "writes")
    [entry] = trainer.map(cls.__name__).entries
    assert entry.may_leave == ("step" if cls is WrappedCB else "")
    assert set(entry.found.reads) == ({"lr", "epoch"} if cls is WrappedCB else set())
    assert entry.where.startswith("test_map.py:")


class PropertyCB:
    def before_fit(self, trainer):
        self.held = trainer

    @property
    def of_fit(self):
        return self.held

    @cached_property
    def of_fit_kept(self):
        return self.held

    def after_step(self, trainer):
        self.of_fit.note = 1

    def after_batch(self, trainer):
        self.of_fit_kept.note = 1


class ByDictCB:
    def after_step(self, trainer):
        trainer.__dict__["note"] = 1

    def after_batch(self, trainer):
        trainer.__dict__.update(note=1)


class ByMapCB:
    def write(self, trainer):
        trainer.note = 1

    def after_step(self, trainer):
        list(map(self.write, [trainer]))

    def after_batch(self, trainer):
        [*filter(lambda o: setattr(o, "note", 1), (trainer,))]


class AnyArgumentsCB:
    def after_step(self, *args):
        args[0].note = 1

    def after_batch(self, *args):
        self.after_step(*args)


class BySetAttrCB:
    def after_step(self, trainer):
        trainer.__setattr__("note", 1)

    def after_batch(self, trainer):
        object.__setattr__(trainer, "note", 1)


class InDictCB:
    def after_step(self, trainer):
        held = {"trainer": trainer}
        held["trainer"].note = 1

    def after_batch(self, trainer):
        held = [trainer, 3]
        for i in range(1):
            held[i].note = 1


@pytest.mark.parametrize("cls", [PropertyCB, ByDictCB, ByMapCB, AnyArgumentsCB, BySetAttrCB, InDictCB])
def test_a_trainer_that_comes_by_another_way_is_followed(cls):
    trainer = images_trainer([BasicTrainCB(), cls()])
    found = trainer.who_writes("note")
    assert [(row["callback"], row["event"]) for row in found.rows] == [
        (cls.__name__, "after_step"),
        (cls.__name__, "after_batch"),
    ]


def test_the_usual_steps_do_not_change_the_batch():
    told = images_trainer([BasicTrainCB()]).who_writes("batch")
    assert [row["callback"] for row in told.rows] == ["the loop"]


def of_the_users(trainer):
    trainer.note = 1


class OwnEvalCB:
    after_step = FunctionType(
        (lambda self, trainer: eval(trainer)).__code__, {"eval": of_the_users, "__name__": "mine"}
    )


def test_a_function_of_the_users_may_be_called_like_one_of_python():
    trainer = images_trainer([BasicTrainCB(), OwnEvalCB()])
    [row] = trainer.who_writes("note").rows
    assert row["callback"] == "OwnEvalCB" and not trainer.map().unclear


def runs_text(trainer):
    exec("trainer.note = 1")


def evaluates_text(trainer):
    eval('setattr(trainer, "note", 1)')


def hands_attributes_on(trainer):
    operator.setitem(vars(trainer), "note", 1)


def hands_a_list_on(trainer):
    operator.itemgetter(0)([trainer]).note = 1


@pytest.mark.parametrize("f", [runs_text, evaluates_text, hands_attributes_on, hands_a_list_on])
def test_where_the_source_does_not_tell_it_is_not_said_that_nobody_does(f):
    class AsksCB:
        after_step = staticmethod(f)

    trainer = images_trainer([BasicTrainCB(), AsksCB()])
    for ask in (trainer.map, trainer.who_writes):
        with pytest.raises(LookupError, match="cannot be known.*`AsksCB.after_step`"):
            ask("note")
    assert trainer.map("note", observe=True).shown


class FollowsCB:
    "A copy that follows the weights, which are only read for it"

    def before_fit(self, trainer):
        self.net = copy.deepcopy(trainer.model).requires_grad_(False).eval()

    def after_step(self, trainer):
        for a, b in zip(self.net.parameters(), trainer.model.parameters()):
            a.lerp_(b, 0.1)


class DecaysCB:
    def after_step(self, trainer):
        with torch.no_grad():
            torch._foreach_mul_(list(trainer.model.parameters()), 0.9)


def test_weights_that_are_read_for_a_copy_are_not_said_to_change():
    trainer = images_trainer([BasicTrainCB(), FollowsCB(), DecaysCB()])
    rows = [row for row in trainer.who_writes("model").rows if row["event"] == "after_step"]
    assert [row["callback"] for row in rows] == ["DecaysCB"]
    assert "FollowsCB" in str(trainer.who_reads("model"))


def test_an_attribute_that_nobody_reads_is_said_to_be_so():
    trainer = images_trainer(
        [BasicTrainCB(), SimpleNamespace(log=lambda t: setattr(t, "gap", 1), name="keeps")]
    )
    found = trainer.who_reads("gap")
    assert len(found) == 0 and str(found).startswith("Nobody reads `trainer.gap` here.")
    assert found._repr_markdown_() == str(found)


CASES = {}


def condition_of(body):
    "What the map says of the last line of a method with this body"

    class Case:
        def _helper(self, t):
            t.extra = 1

    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    names = {}
    text, path = f"def after_get_loss(self, t):\n{lines}", f"case_{len(CASES)}.py"
    CASES[path] = text
    linecache.cache[path] = len(text), None, text.splitlines(True), path
    exec(compile(text, path, "exec"), names)
    Case.after_get_loss = names["after_get_loss"]
    trainer = runs.make_trainer([BasicTrainCB(), Case()])
    row = [row for row in trainer.map("extra").table().rows if row["callback"] == "Case"][-1]
    return row["does"], row.get("if")


CONDITIONS = {
    "t.extra = 1": ("writes", None),
    "if t.epoch > 1: t.extra = 1": ("(writes)", "t.epoch > 1"),
    "if t.epoch > 1: pass\nelse: t.extra = 1": ("(writes)", "not t.epoch > 1"),
    "if t.epoch == 1: return\nt.extra = 1": ("(writes)", "t.epoch != 1"),
    "if t.training:\n    if t.epoch == 1: t.extra = 1": ("(writes)", "t.training and t.epoch == 1"),
    "if t.epoch: t.extra = 1\nelif t.lr > 2: t.extra = 2": (
        "(writes)",
        "t.epoch or not t.epoch and t.lr > 2",
    ),
    "if t.epoch: return\nelif t.lr > 2: return\nt.extra = 1": ("(writes)", None),
    "if t.training:\n    if t.epoch: pass\n    else: return\n    t.extra = 1": (
        "(writes)",
        "t.training and ...",
    ),
    "if t.epoch:\n    if t.training: return\nt.extra = 1": ("(writes)", None),
    "while t.lr:\n    if t.epoch: break\n    t.lr = 2\nt.extra = 1": ("(writes)", None),
    "if t.epoch == 0: self._helper(t)\nif t.epoch == 1: self._helper(t)": ("(writes)", "t.epoch == 0 or ..."),
    "match t.epoch:\n    case 0: t.extra = 1": ("(writes)", None),
    "if t.epoch:\n    if t.training: t.extra = 1\n    else: t.extra = 2": ("(writes)", "t.epoch"),
    "if t.epoch: t.extra = 1\nelse: t.extra = 2": ("writes", None),
    "if t.training:\n    if t.lr: t.extra = 1\n    t.lr = 0\n    if not t.lr: t.extra = 2": (
        "(writes)",
        "t.training and t.lr or t.training and (not t.lr)",
    ),
}


@pytest.mark.parametrize("body", CONDITIONS)
def test_the_condition_is_told_as_it_is_or_not_at_all(body):
    does, condition = condition_of(body)
    assert (does, (condition or "").replace("Ellipsis", "...")) == (
        CONDITIONS[body][0],
        CONDITIONS[body][1] or "",
    )


def without_source(name, body):
    "An object of a class that was made by `exec`"
    space = {}
    exec(f"class {name}:\n    def after_batch(self, trainer): {body}", space)
    return space[name]()


def test_who_touches_an_attribute_cannot_be_known_where_no_source_is_at_hand():
    trainer = images_trainer([BasicTrainCB(), without_source("HiddenCB", "trainer.secret = 1")])
    for ask in (trainer.who_reads, trainer.who_writes, trainer.map):
        with pytest.raises(LookupError, match="cannot be known.*`HiddenCB.after_batch`.*observe=True"):
            ask("secret")
    seen = trainer.map("secret", observe=True)
    assert [(o.name, o.touches("secret")) for o in seen.shown] == [("HiddenCB", ["writes"])]
    with pytest.raises(LookupError, match="cannot be known") as failed:
        trainer.map("secrets", observe=True)
    assert "watches one batch" not in str(failed.value)


def test_an_answer_says_whose_source_is_not_at_hand():
    keeps = SimpleNamespace(log=lambda t: setattr(t, "gap", 1), name="keeps")
    trainer = images_trainer([BasicTrainCB(), keeps])
    for ask in (trainer.who_reads, trainer.who_writes):
        assert "no source" not in str(ask("loss"))
    trainer.add_callback(without_source("HiddenCB", "trainer.seen = trainer.gap"))
    told = str(trainer.who_reads("gap"))
    assert told.startswith("Whether somebody reads `trainer.gap` here cannot be known") and "HiddenCB" in told
    for ask in (trainer.who_reads, trainer.who_writes):
        found = ask("loss")
        assert found.rows and "no source tells: `HiddenCB.after_batch`" in str(found)
        assert found._repr_markdown_().endswith(found.note) and found.note in str(found)


class ReadsAnyCB:
    "Reads what nobody knows before the run"

    def after_batch(self, trainer):
        getattr(trainer, str(trainer.loss), None)


def test_a_doubt_about_what_is_read_leaves_sure_who_writes():
    trainer = images_trainer([BasicTrainCB(), ReadsAnyCB()])
    assert "`ReadsAnyCB.after_batch` reads an attribute" in str(trainer.who_reads("loss"))
    assert "ReadsAnyCB" not in str(trainer.who_writes("loss"))


def test_a_callback_can_be_asked_for_itself_by_its_class_or_by_its_method():
    trainer = images_trainer([BasicTrainCB(), ClipGradCB(0.1)])
    named = str(trainer.map("ClipGradCB"))
    assert str(trainer.map(trainer.ClipGradCB)) == named == str(trainer.map(ClipGradCB))
    assert str(trainer.map(trainer.ClipGradCB.before_step)) == str(trainer.map("ClipGradCB.before_step"))
    for what in (trainer.ClipGradCB, ClipGradCB):
        with pytest.raises(LookupError, match="`ClipGradCB` is a callback and no attribute"):
            trainer.who_writes(what)
    with pytest.raises(LookupError, match="such as 'loss'.*There are .'BasicTrainCB', 'ClipGradCB'"):
        trainer.map(MetricsCB)


@pytest.mark.parametrize("what", [3, 2.5, ["loss"], b"loss", ClipGradCB(0.2), nn.Linear(2, 2)])
def test_what_is_no_name_is_refused_in_words(what):
    trainer = images_trainer([BasicTrainCB(), ClipGradCB(0.1)])
    for ask in (trainer.map, trainer.who_writes, trainer.who_reads):
        with pytest.raises(TypeError, match="`attribute` is .*follows an attribute by its name"):
            ask(what)
    with pytest.raises(TypeError, match="`attribute` is None"):
        trainer.who_writes(None)


def test_a_doubt_says_what_the_trainer_is_handed_to():
    class TwoCB:
        def __init__(self):
            self.all = [len, repr]

        def after_step(self, trainer):
            self.all[1](trainer)

    with pytest.raises(LookupError, match="hands the trainer to `self.all.1.`"):
        images_trainer([BasicTrainCB(), TwoCB()]).map("note")


def test_a_second_attribute_is_refused_and_not_taken_for_observing():
    with pytest.raises(TypeError, match="`observe` is 'preds'.*`trainer.map\\('preds'\\)`"):
        images_trainer([BasicTrainCB()]).map("loss", "preds")


class MadeUpNames(Trainer):
    def after_batch(self):
        self.kept = [getattr(self, f"batch_{name}") for name in ["num"]]


def test_what_a_trainers_own_methods_do_is_seen():
    dls = DataLoaders([(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))])
    trainer = MadeUpNames(dls, F.cross_entropy, optim.SGD, nn.Linear(3, 2), BasicTrainCB())
    map = trainer.map("batch_num", observe=True)
    assert map.observed == ["`MadeUpNames.after_batch` reads batch_num"]
    assert ("after_batch", "MadeUpNames") in [(o["event"], o["callback"]) for o in map.table().rows]


class OwnAdam:
    def before_fit(self, trainer):
        self.adam = optim.Adam(trainer.model.parameters(), 0.1)

    def after_backward(self, trainer):
        self.adam.step()


class GivenOptimizers:
    def __init__(self, opts):
        self.opts = opts

    def after_backward(self, trainer):
        for opt in self.opts.values():
            opt.step()


class SetsAdam:
    def before_fit(self, trainer):
        trainer.adam = trainer.opt_func(trainer.model.parameters(), trainer.lr)


class StepsAdam:
    def after_backward(self, trainer):
        trainer.adam.step()


class Jumps:
    def after_backward(self, trainer):
        nn.utils.vector_to_parameters(torch.zeros(8), trainer.model.parameters())


class TwoNames(Trainer):
    def before_fit(self):
        self.d_opt = optimizer_for(self.model)
        self.both = {"g": optim.SGD(self.model.parameters(), self.lr)}

    def before_step(self):
        self.d_opt.step()

    def after_backward(self):
        self.both["g"].step()


def optimizer_for(model):
    "Of a class that the source does not tell"
    return model.best_optimizer


WHO = {
    "made by a callback": (Trainer, lambda model: [OwnAdam()], ["OwnAdam"]),
    "given to a callback": (
        Trainer,
        lambda model: [GivenOptimizers({"all": optim.SGD(model.parameters(), 0.1)})],
        ["GivenOptimizers"],
    ),
    "of the trainer": (Trainer, lambda model: [SetsAdam(), StepsAdam()], ["StepsAdam"]),
    "by its name, and in a dict": (TwoNames, lambda model: [], ["TwoNames", "TwoNames"]),
    "by a vector": (Trainer, lambda model: [Jumps()], ["Jumps"]),
}


@pytest.mark.parametrize("case", WHO)
def test_who_changes_weights_is_known_whatever_the_optimizer_is_called(case):
    cls, others, who = WHO[case]
    model = nn.Linear(3, 2)
    dls = DataLoaders([(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))])
    trainer = cls(dls, F.cross_entropy, optim.SGD, model, [BasicTrainCB(), *others(model)])
    rows = [o for o in trainer.who_writes("model").rows if o["event"] in ("before_step", "after_backward")]
    assert [o["callback"] for o in rows] == who
    assert all("changes weights" in o["does"] for o in rows)


class Critic:
    "Trains a model of its own"

    def before_fit(self, trainer):
        self.critic = nn.Linear(3, 1)
        self.adam = optim.Adam(self.critic.parameters(), 0.1)
        trainer.head = nn.Linear(3, 1)
        trainer.opt_head = optim.Adam(trainer.head.parameters(), 0.1)

    def after_backward(self, trainer):
        self.adam.step()
        trainer.opt_head.step()


def test_an_optimizer_of_other_weights_is_not_said_to_change_those_of_the_model():
    trainer = images_trainer([BasicTrainCB(), Critic()])
    assert "Critic" not in [o["callback"] for o in trainer.who_writes("model").rows]
    assert ("Critic", "after_backward") in [
        (o["callback"], o["event"]) for o in trainer.who_writes("head").rows
    ]
