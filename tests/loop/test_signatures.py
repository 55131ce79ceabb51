"""Set-up methods and the signatures they give to subclasses, checked against what Python really accepts.

The chains of subclasses are drawn at random: some classes are decorated and some are not, some pass
`**kwargs` on and some end the chain, some declare an argument anew. What a class should take is worked out
here by a plain merge of dicts, and each signature is then tried by calling it.
"""

import copy
import inspect
import json
from inspect import Parameter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.device.device import DeviceCB
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.train.training import BasicTrainCB, MomentumTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.subclassing import check_keywords, delegated_parameters, init_delegates
from isaac_loop.loop.trainer import Trainer

from places import TUTORIALS

TUTORIAL = TUTORIALS / "callbacks.ipynb"
TRAINER_SIGNATURE = "(self, dls, loss_func, opt_func, model, callbacks, **kwargs)"


def signature(cls):
    "What `cls.__init__` prints as its signature"
    return str(inspect.signature(cls.__init__))


def trainer_parts(seed=0):
    "The first four arguments of a trainer: three batches, a loss, an optimizer and a model"
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(4, 3, generator=g), torch.randint(0, 2, (4,), generator=g)) for _ in range(3)]
    return DataLoaders(batches, batches[:1]), F.cross_entropy, optim.SGD, nn.Linear(3, 2)


@pytest.fixture(scope="module")
def momentum_trainer():
    "`TrackedTrainer`, exactly as the tutorial writes it"
    cells = json.loads(TUTORIAL.read_text())["cells"]
    source = next(text for o in cells if "class TrackedTrainer(Trainer)" in (text := "".join(o["source"])))
    names = dict(
        Trainer=Trainer,
        init_delegates=init_delegates,
        MomentumTrainCB=MomentumTrainCB,
        DeviceCB=DeviceCB,
        TrackingCB=TrackingCB,
    )
    exec(source.split("\n\n")[0], names)
    return names["TrackedTrainer"]


# `subclassing_method`


@pytest.mark.shows("ISA-83")
def test_subclassing_method_runs_once_at_the_end_of_construction():
    "The trainer is complete by then, and what it adds comes after the callbacks of the caller"
    calls = []

    class Ours(Trainer):
        def subclassing_method(self, n=1):
            calls.append((n, dict(vars(self)), list(self.callbacks)))
            self.add_callbacks(DeviceCB("cpu"))

    dls, loss_func, opt_func, model = trainer_parts()
    first = BasicTrainCB()
    trainer = Ours(dls, loss_func, opt_func, model, first, n=7)
    assert len(calls) == 1
    n, state, callbacks = calls[0]
    assert n == 7 and callbacks == [first]
    assert (
        state["dls"] is dls
        and state["model"] is model
        and state["opt_func"] is opt_func
        and state["loss_func"] is loss_func
    )
    assert state.keys() == vars(trainer).keys()  # Nothing is set after it
    assert [type(o) for o in trainer.callbacks] == [BasicTrainCB, DeviceCB]


@pytest.mark.shows("ISA-83")
def test_a_plain_trainer_needs_no_subclassing_method():
    "On `Trainer` itself it does nothing"
    trainer = Trainer(*trainer_parts(), BasicTrainCB())
    assert [type(o) for o in trainer.callbacks] == [BasicTrainCB]


# The signatures that the tutorial prints


@pytest.mark.shows("ISA-87", "ISA-86")
def test_the_trainer_prints_its_own_signature(momentum_trainer):
    "Also after a subclass was decorated"
    assert signature(momentum_trainer) != signature(Trainer)
    assert signature(Trainer) == TRAINER_SIGNATURE
    assert not hasattr(Trainer.__init__, "__signature__")


@pytest.mark.shows("ISA-84", "ISA-88")
def test_the_momentum_trainer_of_the_tutorial_prints_its_arguments(momentum_trainer):
    assert signature(momentum_trainer) == "(self, dls, loss_func, opt_func, model, callbacks, momentum=0.85)"
    assert (
        str(inspect.signature(momentum_trainer))
        == "(dls, loss_func, opt_func, model, callbacks, momentum=0.85)"
    )


@pytest.mark.shows("ISA-89")
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_momentum_trainer_trains_like_a_trainer_with_its_callbacks(momentum_trainer, momentum):
    "Same weights, bit for bit, whether the argument is given by name or by position"
    dls, loss_func, opt_func, model = trainer_parts()
    models = [copy.deepcopy(model) for _ in range(3)]
    momentum_trainer(dls, loss_func, opt_func, models[0], None, momentum=momentum).fit(2, lr=0.1)
    momentum_trainer(dls, loss_func, opt_func, models[1], None, momentum).fit(2, lr=0.1)
    Trainer(dls, loss_func, opt_func, models[2], [MomentumTrainCB(momentum), DeviceCB()]).fit(2, lr=0.1)
    assert not torch.equal(models[2].weight, model.weight.to(models[2].weight.device))
    assert torch.equal(models[0].weight, models[2].weight) and torch.equal(models[1].weight, models[2].weight)


# Chains of subclasses, one by one


@pytest.mark.shows("ISA-85")
def test_the_whole_chain_is_followed_through_an_undecorated_class():
    "Three generations, the middle one undecorated"

    @init_delegates()
    class First(Trainer):
        def subclassing_method(self, momentum=0.85, **kwargs):
            super().subclassing_method(**kwargs)
            self.momentum = momentum

    class Second(First):
        def subclassing_method(self, clip=1.0, **kwargs):
            super().subclassing_method(**kwargs)
            self.clip = clip

    @init_delegates()
    class Third(Second):
        def subclassing_method(self, warmup=10, **kwargs):
            super().subclassing_method(**kwargs)
            self.warmup = warmup

    assert (
        signature(Third)
        == "(self, dls, loss_func, opt_func, model, callbacks, momentum=0.85, clip=1.0, warmup=10)"
    )
    assert signature(First) == "(self, dls, loss_func, opt_func, model, callbacks, momentum=0.85)"
    trainer = Third(*trainer_parts(), None, 0.1, 0.2, warmup=3)
    assert (trainer.momentum, trainer.clip, trainer.warmup) == (0.1, 0.2, 3)
    second = Second(*trainer_parts(), None, clip=2.0, momentum=0.3)
    assert (second.momentum, second.clip) == (0.3, 2.0)


@pytest.mark.shows("ISA-85")
def test_a_class_that_passes_nothing_on_shows_only_what_it_takes():
    "Without `**kwargs` the parents' arguments cannot be given, so they are not shown"

    @init_delegates()
    class First(Trainer):
        def subclassing_method(self, momentum=0.85):
            self.momentum = momentum

    @init_delegates()
    class Second(First):
        def subclassing_method(self, clip=1.0):
            super().subclassing_method(momentum=0.5)
            self.clip = clip

    assert signature(Second) == "(self, dls, loss_func, opt_func, model, callbacks, clip=1.0)"
    trainer = Second(*trainer_parts(), None, 2.0)
    assert (trainer.momentum, trainer.clip) == (0.5, 2.0)
    with pytest.raises(TypeError, match="`Second` got the keyword `momentum`"):
        Second(*trainer_parts(), None, momentum=0.1)


@pytest.mark.shows("ISA-85")
def test_a_mixin_belongs_to_the_chain():
    "The chain is Python's own order of classes"

    class Warmup:
        def subclassing_method(self, warmup=10, **kwargs):
            super().subclassing_method(**kwargs)
            self.warmup = warmup

    class Momentum(Trainer):
        def subclassing_method(self, momentum=0.85, **kwargs):
            super().subclassing_method(**kwargs)
            self.momentum = momentum

    @init_delegates()
    class Both(Warmup, Momentum):
        pass

    assert signature(Both) == "(self, dls, loss_func, opt_func, model, callbacks, momentum=0.85, warmup=10)"
    trainer = Both(*trainer_parts(), None, 0.1, 5)
    assert (trainer.momentum, trainer.warmup) == (0.1, 5)


@pytest.mark.shows("ISA-84")
def test_an_init_of_the_subclass_keeps_its_own_arguments_first():
    "A subclass may also have an `__init__` that hands `**kwargs` on"

    @init_delegates()
    class Sized(Trainer):
        def __init__(self, size, model, **kwargs):
            dls, loss_func, opt_func, _ = trainer_parts()
            self.size = size
            super().__init__(dls, loss_func, opt_func, model, None, **kwargs)

        def subclassing_method(self, momentum=0.85):
            self.momentum = momentum

    assert signature(Sized) == "(self, size, model, momentum=0.85)"
    trainer = Sized(3, nn.Linear(3, 2), 0.5)
    assert (trainer.size, trainer.momentum) == (3, 0.5)


@pytest.mark.shows("ISA-86")
def test_the_name_of_the_method_is_an_option():
    class Base:
        def __init__(self, model, **kwargs):
            check_keywords(type(self), kwargs, "set_up")
            self.set_up(**kwargs)

        def set_up(self, **kwargs):
            pass

    @init_delegates("set_up")
    class Child(Base):
        def set_up(self, depth=2):
            self.depth = depth

        def subclassing_method(self, unrelated=0):
            pass

    assert signature(Child) == "(self, model, depth=2)"
    assert signature(Base) == "(self, model, **kwargs)"
    assert Child("m", 5).depth == 5
    with pytest.raises(TypeError, match="`Child.set_up` takes `depth`. Did you mean `depth`"):
        Child("m", dept=5)


@pytest.mark.shows("ISA-90")
def test_arguments_without_defaults_work_at_every_level():
    "Three levels that each require something; what comes after a default is given by name"

    @init_delegates()
    class First(Trainer):
        def subclassing_method(self, a, **kwargs):
            super().subclassing_method(**kwargs)
            self.a = a

    @init_delegates()
    class Second(First):
        def subclassing_method(self, b, c=3, **kwargs):
            super().subclassing_method(**kwargs)
            self.b, self.c = b, c

    @init_delegates()
    class Third(Second):
        def subclassing_method(self, d, **kwargs):
            super().subclassing_method(**kwargs)
            self.d = d

    assert signature(First) == "(self, dls, loss_func, opt_func, model, callbacks, a)"
    assert signature(Second) == "(self, dls, loss_func, opt_func, model, callbacks, a, b, c=3)"
    assert signature(Third) == "(self, dls, loss_func, opt_func, model, callbacks, a, b, c=3, *, d)"
    trainer = Third(*trainer_parts(), None, 1, 2, d=4)
    assert (trainer.a, trainer.b, trainer.c, trainer.d) == (1, 2, 3, 4)
    for missing in "abd":
        with pytest.raises(TypeError, match=f"'{missing}'"):
            Third(*trainer_parts(), None, **{o: 0 for o in "abd" if o != missing})


@pytest.mark.shows("ISA-91")
def test_annotations_are_carried_over():
    "In the signature and in `__annotations__`, from every level, and not into the parent"

    @init_delegates()
    class First(Trainer):
        def subclassing_method(self, momentum: float = 0.85, **kwargs):
            super().subclassing_method(**kwargs)

    @init_delegates()
    class Second(First):
        def subclassing_method(self, steps: list[int], plain=None, **kwargs):
            super().subclassing_method(**kwargs)

    own = "momentum: float = 0.85, plain=None, *, steps: list[int]"
    assert signature(Second) == f"(self, dls, loss_func, opt_func, model, callbacks, {own})"
    assert Second.__init__.__annotations__ == {"momentum": float, "steps": list[int]}
    assert First.__init__.__annotations__ == {"momentum": float}
    assert Trainer.__init__.__annotations__ == {}


@pytest.mark.shows("ISA-92")
def test_a_child_may_declare_a_default_anew():
    "Its default counts, the argument keeps its place, and the parent keeps its own default"

    @init_delegates()
    class First(Trainer):
        def subclassing_method(self, momentum=0.85, clip=1.0, **kwargs):
            super().subclassing_method(**kwargs)
            self.momentum, self.clip = momentum, clip

    @init_delegates()
    class Second(First):
        def subclassing_method(self, momentum=0.9, **kwargs):
            super().subclassing_method(momentum=momentum, **kwargs)

    assert signature(Second) == "(self, dls, loss_func, opt_func, model, callbacks, momentum=0.9, clip=1.0)"
    assert signature(First) == "(self, dls, loss_func, opt_func, model, callbacks, momentum=0.85, clip=1.0)"
    assert (Second(*trainer_parts(), None).momentum, First(*trainer_parts(), None).momentum) == (0.9, 0.85)
    trainer = Second(*trainer_parts(), None, 0.1, 0.2)
    assert (trainer.momentum, trainer.clip) == (0.1, 0.2)


@pytest.mark.shows("ISA-93")
@pytest.mark.parametrize("decorate", [init_delegates(), lambda cls: cls], ids=["decorated", "undecorated"])
def test_a_misspelt_keyword_is_refused_with_the_near_name(decorate):
    @decorate
    class Ours(Trainer):
        def subclassing_method(self, momentum=0.85, **kwargs):
            super().subclassing_method(**kwargs)

    with pytest.raises(TypeError) as caught:
        Ours(*trainer_parts(), None, momentun=0.9)
    assert "`Ours` got the keyword `momentun`" in str(caught.value) and "Did you mean `momentum`?" in str(
        caught.value
    )
    with pytest.raises(TypeError) as caught:
        Ours(*trainer_parts(), None, zzz=0.9)
    assert (
        "`zzz`" in str(caught.value)
        and "takes `momentum`" in str(caught.value)
        and "Did you mean" not in str(caught.value)
    )


@pytest.mark.shows("ISA-93")
def test_a_plain_trainer_refuses_every_keyword():
    "`Trainer.subclassing_method` has `**kwargs` and takes nothing"
    with pytest.raises(TypeError, match="`Trainer` got the keyword `momentum`, which nobody takes"):
        Trainer(*trainer_parts(), None, momentum=0.9)


@pytest.mark.shows("ISA-84")
def test_an_argument_given_twice_or_beyond_the_last_is_refused(momentum_trainer):
    "The decorated class is as strict as any function"
    with pytest.raises(TypeError, match="`momentum` twice"):
        momentum_trainer(*trainer_parts(), None, 0.5, momentum=0.6)
    with pytest.raises(TypeError, match="positional"):
        momentum_trainer(*trainer_parts(), None, 0.5, 0.6)
    with pytest.raises(TypeError, match="callbacks"):
        momentum_trainer(*trainer_parts())


# Chains of subclasses, at random


class NeedsCallbacks:
    "The smallest base class: two arguments, and it remembers the first value it sees for each name"

    def __init__(self, model, callbacks, **kwargs):
        check_keywords(type(self), kwargs)
        self.model, self.callbacks, self.got = model, callbacks, {}
        self.subclassing_method(**kwargs)

    def subclassing_method(self, **kwargs):
        assert not kwargs, "an argument reached the base class"


class MayHaveCallbacks(NeedsCallbacks):
    "The same with a default"

    def __init__(self, model, callbacks=None, **kwargs):
        super().__init__(model, callbacks, **kwargs)


param = st.fixed_dictionaries(
    dict(
        name=st.sampled_from("abcdef"), required=st.booleans(), annotation=st.sampled_from([None, int, float])
    )
)
level = st.fixed_dictionaries(
    dict(
        decorated=st.booleans(),
        has_method=st.integers(0, 4).map(bool),
        passes_on=st.integers(0, 3).map(bool),
        keyword_only=st.integers(0, 3).map(lambda o: o == 0),
        params=st.lists(param, max_size=3, unique_by=lambda o: o["name"]),
    )
)
chains = st.tuples(
    st.sampled_from([NeedsCallbacks, MayHaveCallbacks]), st.lists(level, min_size=1, max_size=5)
)


def make_method(cls_name, spec, number, parent_takes):
    "A `subclassing_method` from source, and what it declares by itself"
    params = sorted(spec["params"], key=lambda o: not o["required"])  # Python wants these first
    own = {
        o["name"]: dict(
            o,
            default=Parameter.empty if o["required"] else 100 * number + i,
            keyword_only=spec["keyword_only"],
        )
        for i, o in enumerate(params)
    }
    words = ["self", *(["*"] if spec["keyword_only"] and own else [])]
    for name, o in own.items():
        kind = f": {o['annotation'].__name__}" if o["annotation"] else ""
        words.append(name + kind + ("" if o["required"] else f" = {o['default']}"))
    if spec["passes_on"]:
        words.append("**kwargs")
    again = [f"{o}={o}" for o in own if o in parent_takes]
    rest = (
        ["**kwargs"]
        if spec["passes_on"]
        else [f"{o}='fixed'" for o in parent_takes if o not in own and parent_takes[o]["required"]]
    )
    lines = [
        f"def subclassing_method({', '.join(words)}):",
        *(f"    self.got.setdefault('{o}', {o})" for o in own),
        f"    super(classes['{cls_name}'], self).subclassing_method({', '.join(again + rest)})",
    ]
    return "\n".join(lines), own


def make_chain(base, levels):
    "Classes from the oldest to the youngest, each with what it should take (name -> declaration)"
    classes, chain, cls, takes = {}, [], base, {}
    for number, spec in enumerate(levels, 1):
        name, body = f"Level{number}", {}
        if spec["has_method"]:
            source, own = make_method(name, spec, number, takes)
            exec(source, {"classes": classes}, body)
            takes = {**takes, **own} if spec["passes_on"] else own
        cls = type(name, (cls,), body)
        if spec["decorated"] or number == len(levels):
            cls = init_delegates()(cls)
        classes[name] = cls
        chain.append((cls, takes, spec["decorated"] or number == len(levels)))
    return chain


@pytest.mark.shows("ISA-84 to ISA-86", "ISA-90 to ISA-92")
@settings(max_examples=150, deadline=None)
@given(chains)
def test_every_decorated_class_shows_exactly_what_it_takes(chain):
    "Names, defaults and annotations of any chain, also in the parents once the children exist"
    base, levels = chain
    before = signature(base)
    for cls, takes, decorated in make_chain(base, levels):
        assert [p.name for p in delegated_parameters(cls)] == list(takes)
        if not decorated:
            continue
        sig = inspect.signature(cls.__init__).parameters
        shown = list(sig.values())[3:]
        assert list(sig)[:3] == ["self", "model", "callbacks"]
        assert {p.name: (p.default, p.annotation) for p in shown} == {
            k: (v["default"], v["annotation"] or Parameter.empty) for k, v in takes.items()
        }
        assert cls.__init__.__annotations__ == {
            k: v["annotation"] for k, v in takes.items() if v["annotation"]
        }
        by_position = [p.name for p in shown if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
        assert by_position == [o for o in takes if o in by_position]  # The oldest class's come first
        for p in shown:
            if takes[p.name]["keyword_only"]:
                assert p.kind is Parameter.KEYWORD_ONLY
            elif not takes[p.name]["required"]:
                assert p.kind is Parameter.POSITIONAL_OR_KEYWORD
    assert signature(base) == before


@pytest.mark.shows("ISA-84", "ISA-85", "ISA-90", "ISA-92")
@settings(max_examples=150, deadline=None)
@given(chains, st.data())
def test_every_value_that_fits_the_signature_arrives(chain, data):
    "By position and by name; what is left out has the youngest default"
    base, levels = chain
    cls, takes, _ = make_chain(base, levels)[-1]
    params = list(inspect.signature(cls.__init__).parameters.values())[3:]
    n_by_position = data.draw(st.integers(0, sum(p.kind is Parameter.POSITIONAL_OR_KEYWORD for p in params)))
    by_name = [
        p.name for p in params[n_by_position:] if takes[p.name]["required"] or data.draw(st.booleans())
    ]
    values = {p.name: f"value {i}" for i, p in enumerate(params)}
    made = cls(
        "model", ["cb"], *(values[p.name] for p in params[:n_by_position]), **{o: values[o] for o in by_name}
    )
    given_names = {*by_name, *(p.name for p in params[:n_by_position])}
    assert (made.model, made.callbacks) == ("model", ["cb"])
    assert {o: made.got[o] for o in takes} == {
        o: values[o] if o in given_names else takes[o]["default"] for o in takes
    }


@pytest.mark.shows("ISA-85", "ISA-93")
@settings(max_examples=100, deadline=None)
@given(chains)
def test_every_name_that_is_not_shown_is_refused(chain):
    "Whether decorated or not, a class takes what `delegated_parameters` says and nothing else"
    base, levels = chain
    for cls, takes, _ in make_chain(base, levels):
        needed = {k: 0 for k, v in takes.items() if v["required"]}
        for name in "abcdefg":
            if name in takes:
                assert cls("m", [], **{**needed, name: "here"}).got[name] == "here"
            else:
                with pytest.raises(TypeError, match=f"`{cls.__name__}` got the keyword `{name}`"):
                    cls("m", [], **needed, **{name: 1})


@pytest.mark.shows("ISA-93")
@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(["momentum", "patience", "clip_value", "warmup_epochs"]), min_size=1, unique=True
    ),
    st.booleans(),
    st.data(),
)
def test_a_slip_of_one_letter_is_mended_by_the_message(names, decorated, data):
    "A letter left out, doubled or swapped with its neighbour"
    body = {}
    exec(f"def subclassing_method(self, {', '.join(f'{o}=0' for o in names)}): pass", {}, body)
    cls = type("Ours", (NeedsCallbacks,), body)
    if decorated:
        cls = init_delegates()(cls)
    meant = data.draw(st.sampled_from(names))
    i = data.draw(st.integers(1, len(meant) - 2))
    typed = data.draw(
        st.sampled_from(
            [
                meant[:i] + meant[i + 1 :],
                meant[:i] + meant[i] + meant[i:],
                meant[:i] + meant[i + 1] + meant[i] + meant[i + 2 :],
            ]
        )
    )
    assume(typed != meant)
    with pytest.raises(TypeError, match=f"Did you mean `{meant}`"):
        cls("m", [], **{typed: 1})


def set_up(**kwargs):
    class Own(Trainer):
        def subclassing_method(self, **kwargs):
            self.add_callbacks(MetricsCB(**kwargs))

    class Further(Own):
        def subclassing_method(self, patience=3, **kwargs):
            super().subclassing_method(**kwargs)
            self.patience = patience

    class Deaf(Trainer):
        def subclassing_method(self, patience=3, **kwargs):
            self.patience = patience

    return [
        lambda cls=cls: cls(None, None, None, nn.Linear(1, 1), None, **kwargs) for cls in (Own, Further, Deaf)
    ]


def test_a_set_up_may_hand_its_keywords_to_a_callback():
    own, further, deaf = set_up(weigh="mean")
    assert own().MetricsCB.weigh == further().MetricsCB.weigh == "mean"
    with pytest.raises(TypeError, match="got the keyword `weigh`, which nobody takes"):
        deaf()
    own, further, deaf = set_up(patience=4)
    assert further().patience == deaf().patience == 4
    with pytest.raises(TypeError, match="patience"):
        own()
