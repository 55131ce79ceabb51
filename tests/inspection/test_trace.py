"""A trace of one batch, and the comparison of two trainers, against what is known of them.

A trace may be taken at any time: afterwards everything is as it was, bit for bit, also when the batch fails.
"""

import copy
import io
from collections import deque
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import runs
from isaac_loop import CancelBatchException, Trainer, with_cbs
from isaac_loop.callbacks import AccumulationCB, BasicTrainCB, ClipGradCB, EMACB, MetricsCB, NBatchCB
from isaac_loop.data import DataLoaders
from isaac_loop.inspection import compare
from isaac_loop.loop import CancelStepException
from observing import observe, unchanged
from working import WORKING, images_trainer, working


def plain_trainer(cbs, n=3):
    batches = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(n)]
    return runs.make_trainer(cbs, DataLoaders(batches, batches))


def test_a_trace_leaves_nothing_behind():
    trainer = runs.fit(plain_trainer(runs.everything()), 1)
    before = observe(trainer, skip=[trainer._aside])
    with redirect_stdout(io.StringIO()) as said:
        trainer.trace(valid=True)
    unchanged(trainer, before, skip=[trainer._aside])
    assert not said.getvalue()


def test_training_after_a_trace_is_training_without_one():
    plain = runs.fit(runs.make_trainer(runs.everything()))
    traced = runs.make_trainer(runs.everything())
    traced.trace()
    runs.same(plain, runs.fit(traced))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WORKING)
def test_every_callback_can_be_traced(name, tmp_path):
    trainer, _ = working(name, tmp_path)
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    events = [step.event for step in trainer.trace().steps]
    assert "predict" in events
    assert all(map(torch.equal, weights, trainer.model.parameters()))


def test_a_trace_tells_shapes_dtypes_and_what_became_of_them():
    def halve(trainer):
        trainer.preds = trainer.preds.half()

    def grow(trainer):
        trainer.batch = (trainer.batch[0].double(), trainer.batch[1])

    steps = SimpleNamespace(after_predict=halve), SimpleNamespace(cleanup_predict=grow, name="grow")
    trace = plain_trainer([BasicTrainCB(), *steps]).trace()
    changes = {step.event: step.changes for step in trace.steps}
    assert changes["predict"]["preds"] == "(4, 3) float32"
    assert changes["after_predict"] == {"preds": "(4, 3) float32 -> (4, 3) float16"}
    assert "(4, 8) float64" in changes["cleanup_predict"]["batch"]
    assert changes["backward"] == {"gradients": "6 of 6 changed"}
    assert changes["zero_grad"] == {"gradients": "6 of 6 cleared"}


def test_what_runs_inside_a_callback_is_not_told_twice():
    class InnerCB:
        def after_batch(self, trainer):
            trainer.outer = 1
            trainer.run_callbacks("extra")

    class MoreTrainer(Trainer):
        events = ("extra",)

    def extra(trainer):
        trainer.inner = 2

    batches = [(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))]
    cbs = [BasicTrainCB(), InnerCB(), SimpleNamespace(extra=extra)]
    trace = MoreTrainer(DataLoaders(batches), F.cross_entropy, optim.SGD, nn.Linear(3, 2), cbs).trace()
    found = {step.event: step.changes for step in trace.steps if step.event in ("after_batch", "extra")}
    assert found == {"after_batch": {"outer": "1"}, "extra": {"inner": "2"}}


def test_a_batch_that_fails_leaves_the_trainer_as_it_was():
    def fail(trainer):
        trainer.model[0].weight.data.zero_()
        raise ValueError("no")

    trainer = plain_trainer([BasicTrainCB(), SimpleNamespace(after_step=fail)])
    before = observe(trainer, skip=[trainer._aside])
    with pytest.raises(ValueError, match="no"):
        trainer.trace()
    unchanged(trainer, before, skip=[trainer._aside])
    assert trainer.plan.changes == ()


def test_a_stream_loses_no_batch_to_a_look():
    batches = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)]
    trainer = runs.make_trainer([BasicTrainCB()], DataLoaders(iter(batches)))
    for look in (trainer.trace, lambda: trainer.map(observe=True)):
        with pytest.raises(ValueError, match="`dls.train` gives its batches only once"):
            look()
    assert len(list(trainer.dls.train)) == 3


def test_a_trace_takes_a_rate_and_a_pass():
    trainer = plain_trainer([BasicTrainCB()])
    assert not any(step.event == "step" for step in trainer.trace(train=False, valid=True).steps)
    assert "step" in str(trainer.trace(lr=0.5)) and "| step |" in trainer.trace()._repr_markdown_()
    with pytest.raises(ValueError, match="leaves nothing to show"):
        trainer.trace(train=False)


def test_a_trace_in_the_middle_of_a_fit_changes_nothing_of_it():
    class TraceCB:
        def after_batch(self, trainer):
            if trainer.training and trainer.batch_num == 2:
                self.trace = trainer.trace()

    class IdleCB:
        def after_batch(self, trainer):
            pass

    runs.same(
        runs.fit(runs.make_trainer([BasicTrainCB(), MetricsCB(), IdleCB()]), 2),
        runs.fit(runs.make_trainer([BasicTrainCB(), MetricsCB(), TraceCB()]), 2),
    )


class PhasesTrainer(Trainer):
    "Two training passes in each epoch"

    def one_epoch(self, training):
        for self.phase in ("wake", "sleep") if training else ("wake",):
            super().one_epoch(training)


def linear(cls):
    batches = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)]
    return cls(DataLoaders(batches), F.cross_entropy, optim.SGD, nn.Linear(8, 3), [BasicTrainCB()])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_of_several_passes_in_an_epoch_only_one_batch_is_shown(batch):
    steps = linear(PhasesTrainer).trace(batch=batch).steps
    assert [step.event for step in steps if step.event in ("predict", "step")] == ["predict", "step"]


class TwoStepsTrainer(Trainer):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward", "step", "step")


@pytest.mark.filterwarnings("error")
def test_a_trace_asks_for_no_number_of_updates_that_it_would_have_to_keep_to():
    assert linear(TwoStepsTrainer).trace(batch=2).steps


# Two trainers


def test_only_what_differs_is_told():
    a, b = (images_trainer([BasicTrainCB(), ClipGradCB(o), MetricsCB()]) for o in (1.0, 0.5))
    same = compare(a, a)
    assert same.differences == {} and str(same).startswith(
        "Nothing of this differs: classes of trainer, model"
    )
    assert "Not compared are values of weights, data" in same._repr_markdown_()
    assert compare(a, b).differences == {"ClipGradCB": ("ClipGradCB(1.0)", "ClipGradCB(0.5)")}
    c = images_trainer([BasicTrainCB(), ClipGradCB(1.0), MetricsCB()], opt_func=optim.SGD)
    assert list(compare(a, c).differences) == ["opt_func"]


def test_a_further_callback_is_told_with_its_place_and_what_it_writes():
    a = images_trainer([BasicTrainCB()])
    b = images_trainer([BasicTrainCB(), AccumulationCB(2)])
    found = compare(a, b).differences
    assert found["AccumulationCB"] == (None, "AccumulationCB()")
    assert found["at before_step"] == (None, "AccumulationCB")
    assert "AccumulationCB.before_backward" in found["who writes loss"][1]


class Gated(nn.Module):
    def __init__(self, share, act=F.relu):
        super().__init__()
        self.share, self.act = share, act
        self.inner = nn.Linear(4, 4)


def of_layers(*layers):
    return Trainer(DataLoaders([], []), F.mse_loss, optim.SGD, nn.Sequential(nn.Linear(4, 4), *layers), [])


@pytest.mark.parametrize(
    "one, other, told",
    [
        (nn.ReLU(), nn.GELU(), ("ReLU", "GELU(approximate='none')")),
        (
            nn.Dropout(0.3),
            nn.Dropout(0.9),
            ("Dropout(p=0.3, inplace=False)", "Dropout(p=0.9, inplace=False)"),
        ),
        (Gated(0.1), Gated(0.2), ("share=0.1", "share=0.2")),
        (Gated(0.1), Gated(0.1, F.gelu), ("relu", "gelu")),
    ],
)
def test_a_layer_that_works_otherwise_is_told(one, other, told):
    [(name, texts)] = compare(of_layers(one), of_layers(other)).differences.items()
    assert name == "model.1" and all(what in text for what, text in zip(told, texts))
    assert compare(of_layers(one), of_layers(copy.deepcopy(one))).differences == {}


def test_what_is_frozen_and_what_is_shuffled_is_told():
    a, b = of_layers(nn.ReLU()), of_layers(nn.ReLU())
    b.model[0].bias.requires_grad_(False)
    assert compare(a, b).differences == {"model.0.bias": ("trained", "frozen")}
    rows = TensorDataset(torch.zeros(8, 4), torch.zeros(8, 4))
    a, b = of_layers(), of_layers()
    a.dls.train, b.dls.train = DataLoader(rows, 4), DataLoader(rows, 4, shuffle=True)
    text = "DataLoader, 2 batches of 4"
    assert compare(a, b).differences == {"dls.train": (text, f"{text}, shuffled")}


def test_of_models_that_have_little_in_common_the_first_layers_are_told():
    a, b = of_layers(*[nn.ReLU() for _ in range(30)]), of_layers(*[nn.GELU() for _ in range(20)])
    found = compare(a, b).differences
    assert len(found) == 13 and found["further layers"] == ("18 differ", None)


def test_an_order_that_is_another_is_told():
    def two(order):
        cbs = [SimpleNamespace(after_batch=print, name=name, order=o) for name, o in zip("ab", order)]
        return images_trainer([BasicTrainCB(), NBatchCB(1), *cbs])

    assert compare(two((1, 2)), two((3, 2))).differences == {
        "a.order": ("1", "3"),
        "at after_batch": ("a, b", "b, a"),
    }


class CriticTrainer(Trainer):
    def subclassing_method(self, n_critic=1):
        self.n_critic = n_critic

    def one_batch(self):
        for _ in range(self.n_critic):
            self.run_callbacks("predict", "get_loss", "backward", "step", "zero_grad")


def critic(*callbacks, cls=CriticTrainer, dls=None, **settings):
    dls = dls or DataLoaders([])
    model, callbacks = nn.Linear(4, 4), [BasicTrainCB(), *callbacks]
    return cls(dls, F.mse_loss, optim.SGD, model, callbacks, **settings)


def scaled(by, name="scale"):
    def scale(trainer):
        trainer.loss = trainer.loss * by

    return scale


def test_settings_and_methods_of_a_trainer_of_ones_own_are_told():
    assert compare(critic(n_critic=1), critic(n_critic=5)).differences == {"trainer.n_critic": ("1", "5")}
    one = CriticTrainer

    class Other(CriticTrainer):
        def one_batch(self):
            self.run_callbacks("predict", "get_loss", "backward", "step", "zero_grad")

    Other.__name__ = one.__name__
    assert list(compare(critic(), critic(cls=Other)).differences) == ["trainer.one_batch"]
    assert compare(critic(), critic()).differences == {}


def test_what_a_function_does_and_what_it_holds_is_told():
    def squared(trainer):
        trainer.loss = trainer.loss * trainer.loss

    half, twice = ({"get_loss": scaled(by)} for by in (0.5, 2))
    found = compare(critic(SimpleNamespace(**half)), critic(SimpleNamespace(**twice))).differences
    assert [text.split(" [")[0] for text in found["SimpleNamespace"]] == [
        "SimpleNamespace(get_loss=scaled.<locals>.scale(by=0.5)",
        "SimpleNamespace(get_loss=scaled.<locals>.scale(by=2)",
    ]


def function_of(text):
    space = {}
    exec(text, space)
    return space["after_get_loss"]


def test_two_functions_of_one_name_that_do_something_else_are_told():
    def both(*bodies):
        texts = [f"def after_get_loss(trainer): trainer.loss = trainer.loss {body}" for body in bodies]
        return compare(*(critic(function_of(text)) for text in texts)).differences

    assert both("+ 1", "+ 1") == {}
    assert list(both("+ 1", "+ 2")) == list(both("+ 1", "- 1")) == ["after_get_loss"]


class Doubles:
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * 2


def test_two_classes_of_one_name_that_do_something_else_are_told():
    class Triples:
        def after_get_loss(self, trainer):
            trainer.loss = trainer.loss * 3

    Triples.__name__ = "Doubles"
    assert list(compare(critic(Doubles()), critic(Triples())).differences) == ["Doubles.after_get_loss"]
    assert compare(critic(Doubles()), critic(Doubles())).differences == {}


def test_a_swap_in_force_and_how_a_batch_is_taken_apart_is_told():
    a, b = critic(), critic()
    b.swap("get_loss", lambda trainer: setattr(trainer, "loss", trainer.preds.mean()))
    (before, after) = compare(a, b).differences["swap at get_loss"]
    assert before is None and "<lambda>" in after
    of_split = [DataLoaders([], split=o) for o in (lambda b: (b[0], b[1]), lambda b: (b[1], b[0]))]
    assert list(compare(*(critic(dls=dls) for dls in of_split)).differences) == ["dls.split"]
    of_two = compare(critic(dls=DataLoaders([], n_inp=2)), critic())
    assert of_two.differences == {"dls.n_inp": ("2", "1")}


def test_what_is_no_trainer_is_refused():
    with pytest.raises(TypeError, match="is no trainer"):
        compare(images_trainer([BasicTrainCB()]), None)


# Which batch it is, cancels, and values that stay


def shown(trace):
    return [(step.name, step.event) for step in trace.steps if step.changes or step.raised]


def test_the_chosen_batch_is_what_it_is_in_a_fit():
    trainer = plain_trainer([BasicTrainCB(), AccumulationCB(2), ClipGradCB(1e-3)], n=4)
    first, second = trainer.trace(), trainer.trace(batch=1)
    assert ("BasicTrainCB", "step") not in shown(first) and ("BasicTrainCB", "step") in shown(second)
    assert ("ClipGradCB", "before_step") not in shown(first) and ("ClipGradCB", "before_step") in shown(
        second
    )
    assert "batch 1 of the training pass, which has 4" in str(second) and "`after_epoch`" in second.said
    last = trainer.trace(batch=3)
    assert "`after_epoch`" not in last.said and "batch 3 of" in last._repr_markdown_()


def test_batches_are_counted_for_callbacks_as_in_the_fit():
    class CountCB:
        def before_fit(self, trainer):
            self.seen = [trainer.updates_per_epoch]
            Kept.seen = self.seen

        def after_batch(self, trainer):
            self.seen.append((trainer.batch_num, trainer.n_batches))

        def after_epoch(self, trainer):
            self.seen.append("after")

    class Kept:
        pass

    plain_trainer([BasicTrainCB(), CountCB()], n=5).trace(batch=2, lr=0.1)
    assert Kept.seen == [5, (0, 5), (1, 5), (2, 5), (0, 5), (1, 5), (2, 5)]
    plain_trainer([BasicTrainCB(), CountCB()], n=3).trace(batch=2)
    assert Kept.seen == [3, (0, 3), (1, 3), (2, 3), "after", (0, 3), (1, 3), (2, 3), "after"]


def test_a_later_batch_leaves_nothing_behind_either():
    batches = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(4)]
    trainer = runs.fit(runs.make_trainer(runs.everything(), DataLoaders(batches, batches)), 1)
    before = observe(trainer, skip=[trainer._aside])
    with redirect_stdout(io.StringIO()):
        trainer.trace(batch=2, valid=True)
    unchanged(trainer, before, skip=[trainer._aside])


@pytest.mark.parametrize("look", ["trace", "map"])
def test_what_a_callback_does_to_a_batch_in_place_is_not_done_to_the_data(look):
    class DoublesCB:
        def before_predict(self, trainer):
            trainer.batch[0].mul_(2)
            trainer.batch[1][0] = 1

    trainer = plain_trainer([BasicTrainCB(), DoublesCB()])
    before = copy.deepcopy([trainer.dls.train, trainer.dls.valid])
    if look == "trace":
        steps = trainer.trace(batch=1, valid=True).steps
        assert any("batch" in step.changes for step in steps if step.name == "DoublesCB")
    else:
        assert "batch" in str(trainer.map("DoublesCB", observe=True))
    for was, now in zip(before, (trainer.dls.train, trainer.dls.valid)):
        assert all(torch.equal(a, b) for pair in zip(was, now) for a, b in zip(*pair))


def test_a_batch_that_cannot_be_copied_is_traced_all_the_same():
    class Odd(tuple):
        def __deepcopy__(self, memo):
            raise TypeError("not this one")

    batches = [Odd((torch.randn(4, 8), torch.randint(3, (4,)))) for _ in range(3)]
    trainer = runs.make_trainer([BasicTrainCB()], DataLoaders(batches, batches))
    assert [o.event for o in trainer.trace().steps if o.changes][:2] == ["predict", "get_loss"]


def test_a_number_that_no_pass_comes_to_is_refused_or_told():
    trainer = plain_trainer([BasicTrainCB()])
    with pytest.raises(ValueError, match="training pass has 3 batches.*Use one up to 2"):
        trainer.trace(batch=3)
    with pytest.raises(ValueError, match="`batch`"):
        trainer.trace(batch=-1)
    limited = plain_trainer([BasicTrainCB(), NBatchCB(1)])
    assert "did not come to batch 2" in limited.trace(batch=2).said


def test_a_loader_without_a_length_can_be_traced():
    class Endless:
        def __iter__(self):
            while True:
                yield torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)

    trace = runs.make_trainer([BasicTrainCB()], DataLoaders(Endless())).trace(batch=2)
    assert trace.said.startswith("Shown is batch 2 of the training pass; the first")


def test_a_cancel_is_told_with_what_it_leaves_out():
    def before_step(trainer):
        raise CancelStepException("too large")

    trainer = plain_trainer([BasicTrainCB(), SimpleNamespace(before_step=before_step, name="cedar")])
    trace = trainer.trace()
    [step] = [step for step in trace.steps if step.raised]
    assert (step.name, step.raised) == ("cedar", "CancelStepException: too large")
    assert step.way.left_out == ["BasicTrainCB.step"] and "CancelStepException: too large" in str(trace)
    outer = SimpleNamespace(name="outer", order=-1, after_epoch=lambda t: t.run_callbacks("step"))
    trainer.add_callback(outer)
    assert [o.name for o in trainer.trace(batch=2).steps if o.raised] == ["cedar", "cedar"]


def test_what_is_written_and_stays_equal_is_told_apart_from_a_change():
    def touch(trainer):
        for p in trainer.model.parameters():
            p.grad.mul_(1)

    def halve(trainer):
        trainer.loss = trainer.loss / 2

    steps = [
        SimpleNamespace(before_step=touch, name="touch"),
        SimpleNamespace(after_get_loss=halve, name="halve"),
    ]
    found = {step.name: step.changes for step in plain_trainer([BasicTrainCB(), *steps]).trace().steps}
    assert found["touch"] == {"gradients": "6 of 6 written, values equal"}
    assert ", by up to 0." in found["halve"]["loss"]


def test_weights_that_are_exchanged_are_seen():
    trainer = plain_trainer([BasicTrainCB(), EMACB(0.5, warmup=False)])
    trace = trainer.trace(batch=2, lr=0.5, train=False, valid=True)
    told = {step.event: step.changes for step in trace.steps if step.name == "EMACB" and step.changes}
    assert list(told) == ["before_fit", "before_epoch", "cleanup_epoch"]
    assert all("tensors exchanged, by up to 0." in told[event]["model"] for event in list(told)[1:])


class KeepsMuch:
    "Has a network, an optimizer, numbers and containers of its own, and some that are the trainer's"

    on_valid = False

    def before_fit(self, trainer):
        self.net = nn.Linear(2, 2)
        self.opt = optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.n, self.seen, self.where = 0, [], {}
        self.where["itself"] = self.where
        self.model, self._hidden = trainer.model, 0

    def after_step(self, trainer):
        "Train the other network"
        self.net(torch.ones(1, 2)).sum().backward()
        self.opt.step()
        self.n += 1
        self._hidden += 1
        self.seen.append(self.n)
        self.where["last"] = trainer.batch_num
        with torch.no_grad():
            next(trainer.model.parameters()).mul_(1.5)

    def after_batch(self, trainer):
        "Have less"
        del self.seen


def test_what_a_callback_keeps_for_itself_is_told_once():
    steps = plain_trainer([BasicTrainCB(), KeepsMuch()]).trace().steps
    told = {step.event: step.changes for step in steps if step.name == "KeepsMuch"}
    assert {"self.net", "self.opt", "self.n", "self.seen", "self.where"} == set(told["before_fit"])
    changes = told["after_step"]
    assert changes["self.n"] == "0 -> 1" and changes["self.net"].startswith("2 of 2 tensors changed")
    assert set(changes) == {"model", "self.net", "self.opt", "self.n", "self.seen", "self.where"}
    assert told["after_batch"] == {"self.seen": "removed"}


def test_a_walk_tells_the_same():
    walk = plain_trainer([BasicTrainCB(), KeepsMuch()]).walk(1, at=KeepsMuch)
    told = {moment.event: moment.wrote for moment in walk.take("after_batch")}
    assert set(told["before_fit"]) >= {"self.net", "self.opt", "self.n"}
    changes = told["after_step"]
    assert changes["self.n"] == "1" and changes["self.net"] == "weights, gradients"
    assert changes["self.opt"] == "state" and "weights" in changes["model"]
    assert set(changes) == {"model", "self.net", "self.opt", "self.n", "self.seen", "self.where"}
    assert told["after_batch"] == {"self.seen": "removed"}
    walk.close()


def test_functions_slots_and_objects_without_attributes_are_traced_too():
    class Slotted:
        __slots__ = ("n",)

        def after_batch(self, trainer):
            self.n = 1

    def after_batch(trainer):
        after_batch.calls = getattr(after_batch, "calls", 0) + 1

    trainer = plain_trainer([BasicTrainCB(), Slotted(), after_batch])
    told = {step.name: step.changes for step in trainer.trace(all=True).steps if step.event == "after_batch"}
    assert told == {"Slotted": {}, "after_batch": {"self.calls": "1"}}


def test_steps_without_a_change_are_shown_on_demand():
    trainer = plain_trainer([BasicTrainCB(), SimpleNamespace(after_batch=lambda t: None, name="idle")])
    assert "idle" not in str(trainer.trace()) and "idle" in str(trainer.trace(all=True))
    assert "idle" not in str(trainer.trace(all=True).table(all=False))


@pytest.mark.parametrize("counts", [True, False])
def test_what_batch_norms_measure_is_seen_though_pytorch_does_not_tell(counts):
    trainer = plain_trainer([BasicTrainCB()])
    trainer.model = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    if not counts:
        trainer.model[1].num_batches_tracked = None
    n, mean = 8 + counts, trainer.model[1].running_mean.clone()
    [told] = [step.changes["model"] for step in trainer.trace().steps if step.event == "predict"]
    assert told.startswith(f"{2 + counts} of {n} tensors changed, by up to 0.")
    assert torch.equal(trainer.model[1].running_mean, mean)
    assert "buffers" in str(trainer.walk(1).to("predict"))


class History:
    "A class of the user's, which is named like one of ours"


class Box:
    "A plain object, which stands where the callback does"

    def __init__(self):
        self.n, self.net = 0, nn.Linear(2, 2)


class Unreadable(int):
    def __repr__(self):
        raise RuntimeError("no words")


class OwnParameters(nn.Linear):
    def parameters(self, kind):
        raise RuntimeError("of which kind?")


class ShutDict(dict):
    def items(self):
        raise RuntimeError("shut")


ODD = {
    "class named History": History,
    "inference": lambda: torch.inference_mode()(torch.ones)(2),
    "keys": lambda: {torch.ones(2): 1, (torch.ones(2), 1): 2},
    "itself": lambda: (lambda v: v.extend([v] * 12) or v)([]),
    "no words": lambda: [Unreadable(1)],
    "own parameters": lambda: OwnParameters(2, 2),
    "shut": lambda: ShutDict(a=1),
    "lazy": lambda: nn.LazyLinear(2),
    "meta": lambda: torch.empty(2, device="meta"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore:.*changed during this fit")
def test_looking_does_not_stumble_over_what_a_callback_holds(name):
    class Holds:
        on_valid = False

        def before_fit(self, trainer):
            self.held = ODD[name]()

        def after_batch(self, trainer):
            self.other, self.held = self.held, ODD[name]()

    make = lambda: plain_trainer([BasicTrainCB(), Holds()])
    told = {step.event: step.changes for step in make().trace().steps if step.name == "Holds"}
    assert "self.held" in told["before_fit"] and {"self.held", "self.other"} <= set(told["after_batch"])
    fitted, walker = make(), make()
    torch.manual_seed(1)
    fitted.fit(1)
    torch.manual_seed(1)
    wrote = [moment.wrote for moment in walker.walk(1)]
    assert any("self.held" in names for names in wrote)
    assert all(map(torch.equal, walker.model.parameters(), fitted.model.parameters()))


def test_changes_inside_of_what_a_callback_holds_are_told():
    class Holds:
        on_valid = False

        def before_fit(self, trainer):
            self.last, self.box, self.draws = deque(maxlen=2), Box(), torch.Generator()

        def after_step(self, trainer):
            self.last.append(trainer.batch_num)
            self.box.n += 1
            torch.rand(1, generator=self.draws)
            with torch.no_grad():
                self.box.net.weight.mul_(2)

    make = lambda: plain_trainer([BasicTrainCB(), Holds()])
    found = {step.event: step.changes for step in make().trace().steps if step.name == "Holds"}
    assert set(found["after_step"]) == {"self.last", "self.box.n", "self.box.net", "self.draws"}
    assert found["after_step"]["self.box.n"] == "0 -> 1"
    with make().walk(1) as walk:
        wrote = walk.to("Holds.after_step").wrote
    assert set(wrote) == {"self.last", "self.box.n", "self.box.net", "self.draws"}


def test_the_parts_of_a_callback_that_is_a_module_are_told():
    class Learns(nn.Module):
        on_valid = False

        def __init__(self):
            super().__init__()
            self.head, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(()))

        def after_step(self, trainer):
            with torch.no_grad():
                self.head.weight.mul_(2)
                self.scale.mul_(3)

    make = lambda: plain_trainer([BasicTrainCB(), Learns()])
    found = {step.event: step.changes for step in make().trace().steps if step.name == "Learns"}
    assert set(found["after_step"]) == {"self.head", "self.scale"}
    with make().walk(1) as walk:
        assert set(walk.to("Learns.after_step").wrote) == {"self.head", "self.scale"}


def test_a_second_network_of_the_trainer_is_not_told_by_the_values_of_the_first():
    class Pulls:
        def before_fit(self, trainer):
            trainer.teacher = nn.Linear(2, 2)

        def after_step(self, trainer):
            with torch.no_grad():
                trainer.teacher.weight.mul_(2)

    steps = plain_trainer([BasicTrainCB(), Pulls()]).trace(lr=0.5).steps
    found = {step.event: step.changes for step in steps if step.name == "Pulls"}
    assert found["after_step"]["teacher"] == "1 of 2 tensors changed"


def test_what_a_callback_gives_to_the_trainer_and_keeps_is_not_removed():
    class Lends:
        on_valid = False

        def before_fit(self, trainer):
            self.other = nn.Linear(2, 2)

        def before_batch(self, trainer):
            trainer.lent = self.other

    make = lambda: plain_trainer([BasicTrainCB(), Lends()])
    found = {step.event: step.changes for step in make().trace().steps if step.name == "Lends"}
    assert found["before_batch"] == {"lent": "Linear"}
    with make().walk(1) as walk:
        assert walk.to("Lends.before_batch").wrote == {"lent": "Linear"}


def test_a_set_that_grows_is_told():
    class Gathers:
        on_valid = False

        def before_fit(self, trainer):
            self.seen = set()

        def after_batch(self, trainer):
            self.seen.add(trainer.batch_num)

    steps = plain_trainer([BasicTrainCB(), Gathers()]).trace().steps
    found = {step.event: step.changes for step in steps if step.name == "Gathers"}
    assert found["after_batch"] == {"self.seen": "changed in place"}
