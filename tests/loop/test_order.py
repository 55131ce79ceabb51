"Order, coming and going, and what counts as a callback: laws over permutations and kinds of objects."

import dataclasses
import itertools
import types
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isaac_loop.loop.events import Order
from isaac_loop.loop.trainer import Trainer


class Loaders:
    train = valid = (0, 1)


class Model:
    training = True

    def train(self, mode):
        self.training = mode


def trainer_with(*callbacks):
    return Trainer(Loaders(), None, None, Model(), list(callbacks))


def teller(name, seen, order=0):
    "Tells when it was called"
    return SimpleNamespace(
        name=name,
        order=order,
        before_fit=lambda t: seen.append(name),
        cleanup_fit=lambda t: seen.append(f"cleanup {name}"),
    )


@pytest.mark.shows("ISA-09", "ISA-10")
@pytest.mark.parametrize("names", list(itertools.permutations("abcd")))
def test_ties_keep_the_order_of_adding_and_cleanups_are_reversed(names):
    seen = []
    trainer_with(*[teller(o, seen) for o in names]).fit(0)
    assert seen == [*names, *(f"cleanup {o}" for o in reversed(names))]


@pytest.mark.shows("AIT-14", "AIT-13")
@given(st.lists(st.sampled_from([-3, 0, 0.5, 7, Order.RECORD, Order.LAST]), max_size=8))
def test_callbacks_are_sorted_by_order_and_stable(orders):
    seen = []
    trainer_with(*[teller(f"cb{i}", seen, o) for i, o in enumerate(orders)]).fit(0)
    expected = [f"cb{i}" for i, _ in sorted(enumerate(orders), key=lambda o: o[1])]
    assert seen == [*expected, *(f"cleanup {o}" for o in reversed(expected))]


@pytest.mark.shows("SON-18")
@pytest.mark.parametrize(
    "event", ["before_fit", "before_epoch", "before_batch", "predict", "after_batch", "cleanup_batch"]
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_that_leaves_skips_nobody_and_gets_its_cleanups(event, position):
    seen = []

    def leaves(name):
        return lambda t: (seen.append((event, name)), t.remove_callback("leaver"))[0]

    others = [SimpleNamespace(name=o, **{event: lambda t, o=o: seen.append((event, o))}) for o in "ab"]
    leaver = SimpleNamespace(name="leaver", **{event: leaves("leaver")})
    cleanups = [o for o in ("cleanup_batch", "cleanup_epoch", "cleanup_fit") if o != event]
    for o in cleanups:
        setattr(leaver, o, lambda t, o=o: seen.append((o, "leaver")))
    group = [*others[:position], leaver, *others[position:]]
    trainer = trainer_with(*group)
    trainer.fit(1, valid=False)
    for o in "ab":
        assert seen.count((event, o)) == {"before_fit": 1, "before_epoch": 1}.get(event, 2)
    assert seen.count((event, "leaver")) == 1
    open_then = {"before_fit": ["cleanup_fit"], "before_epoch": ["cleanup_epoch", "cleanup_fit"]}.get(
        event, ["cleanup_batch", "cleanup_epoch", "cleanup_fit"]
    )
    assert [o for o, name in seen if name == "leaver" and o in cleanups] == [
        o for o in open_then if o in cleanups
    ]


@pytest.mark.parametrize(
    "event, told",
    [
        ("before_fit", ["before_fit"]),
        ("before_epoch", ["before_fit", "before_epoch"]),
        ("before_batch", ["before_fit", "before_epoch", "before_batch"]),
        ("log", ["before_fit"]),
    ],
)
def test_one_that_comes_is_told_of_all_open_spans(event, told):
    seen = []
    events = ("before_fit", "before_epoch", "before_batch", "cleanup_batch", "cleanup_epoch", "cleanup_fit")
    newcomer = SimpleNamespace(
        name="new", order=Order.LAST, **{o: lambda t, o=o: seen.append(o) for o in events}
    )

    def comes(trainer):
        if newcomer not in trainer.callbacks:
            trainer.add_callback(newcomer)
            assert seen == told

    trainer_with(SimpleNamespace(name="host", **{event: comes})).fit(1, valid=False)
    for level in ("fit", "epoch", "batch"):
        assert seen.count(f"before_{level}") == seen.count(f"cleanup_{level}")


def before_fit(trainer):
    CALLED.append("function")


CALLED = []


@dataclasses.dataclass
class DataCB:
    label: str = "dataclass"

    def before_fit(self, trainer):
        CALLED.append(self.label)


class PlainCB:
    def before_fit(self, trainer):
        CALLED.append("instance")


def module():
    m = types.ModuleType("my_callbacks")
    m.before_fit = lambda trainer: CALLED.append("module")
    return m


@pytest.mark.shows("ISA-11", "F008", "NEMO-06", "SON-05")
@pytest.mark.parametrize(
    "duck, said",
    [
        (PlainCB(), "instance"),
        (DataCB(), "dataclass"),
        (module(), "module"),
        (before_fit, "function"),
        (SimpleNamespace(before_fit=lambda t: CALLED.append("namespace")), "namespace"),
    ],
    ids=lambda o: str(o)[:20],
)
def test_any_duck_is_a_callback(duck, said):
    CALLED.clear()
    trainer_with(duck).fit(0)
    assert CALLED == [said]


@pytest.mark.shows("F010")
def test_on_train_and_on_valid_switch_a_callback_off_for_a_kind_of_pass():
    seen = []
    for name, options in (("train", dict(on_valid=False)), ("valid", dict(on_train=False))):
        cb = SimpleNamespace(
            before_epoch=lambda t: seen.append(t.training), before_fit=lambda t: seen.append("fit"), **options
        )
        seen.clear()
        trainer_with(cb).fit(1)
        assert seen == ["fit", name == "train"]


@pytest.mark.shows("ISA-31 to ISA-37")
def test_groups_bring_their_members_along_and_take_them_away():
    a, b = PlainCB(), DataCB()
    inner = SimpleNamespace(name="inner", callbacks=[b])
    group = SimpleNamespace(name="group", callbacks=[a, inner], before_fit=lambda t: CALLED.append("group"))
    trainer = trainer_with()
    CALLED.clear()
    trainer.fit(0, callbacks=[None, group])
    assert CALLED == ["group", "instance", "dataclass"] and trainer.callbacks == []
    trainer.add_callbacks(group)
    assert trainer.PlainCB is a and trainer.DataCB is b
    trainer.remove_callbacks("group", delete=True)
    assert trainer.callbacks == [] and "PlainCB" not in dir(trainer)


@pytest.mark.shows("ISA-33")
def test_force_replaces_the_callback_of_the_same_name():
    old, new = PlainCB(), PlainCB()
    trainer = trainer_with(old)
    trainer.add_callback(new, force=True)
    assert trainer.callbacks == [new] and trainer.PlainCB is new


@pytest.mark.shows("AIT-13")
def test_two_of_one_class_live_together_under_different_names():
    a, b = PlainCB(), PlainCB()
    b.name = "other"
    trainer = trainer_with(a, b)
    assert (trainer.PlainCB, trainer.other) == (a, b)


def test_a_method_patched_onto_the_class_counts_at_the_next_fit():
    class Late:
        def before_fit(self, trainer): ...

    seen = []
    trainer = trainer_with(Late())
    trainer.fit(1)
    Late.after_fit = lambda self, trainer: seen.append("patched")
    trainer.fit(1)
    assert seen == ["patched"]


def test_something_else_under_the_name_order_is_named_when_the_next_fit_sorts():
    class Mixes:
        def before_batch(self, trainer):
            self.order = torch.randperm(4)

    trainer = trainer_with(Mixes())
    trainer.fit(1)
    with pytest.raises(TypeError, match=r"`Mixes.order` is tensor(.|\n)*sorted by it(.|\n)*another name"):
        trainer.fit(1)
