"Faults that were found by using and attacking the library; each test would fail if its fault came back."

import copy
import linecache
import pickle
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import (
    AccumulationCB,
    BasicTrainCB,
    CheckpointCB,
    DataLoaders,
    DeviceCB,
    EarlyStoppingCB,
    MetricsCB,
    ProgressCB,
    RewindCB,
    StepSchedulerCB,
    Trainer,
    callback_table,
    def_device,
    default_device,
    digit_loaders,
    event_table,
    init_delegates,
    replaces,
    show_source,
    to_device,
)
from small import trainer_with


async def _later(trainer): ...


@pytest.mark.parametrize("place", ["plain", "terminal"])
def test_a_trainer_with_bars_can_be_pickled_and_copied_after_a_fit(place, capsys):
    t = trainer_with(ProgressCB(place), MetricsCB())
    t.fit(1)
    for again in (pickle.loads(pickle.dumps(t)), copy.deepcopy(t)):
        again.fit(1)
        assert len(again.history) == 2


def test_callbacks_with_tensors_can_be_summarized():
    @dataclass
    class TensorCB:
        weight: torch.Tensor
        name: str

        def after_batch(self, trainer):
            "Nothing"

    t = trainer_with(TensorCB(torch.ones(2), "a"), TensorCB(torch.ones(2), "b"))
    assert [o["callback"] for o in callback_table(t).rows if o["step"] == "after_batch"] == ["a", "b"]


def test_init_delegates_works_without_brackets_and_with_star_args():
    import inspect

    @init_delegates
    class Plain(Trainer):
        def subclassing_method(self, x=1):
            self.x = x

    @init_delegates()
    class Star(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

        def subclassing_method(self, y=2):
            self.y = y

    assert "x=1" in str(inspect.signature(Plain)) and trainer_with(cls=Plain, x=3).x == 3
    assert str(inspect.signature(Star.__init__)) == "(self, dls, loss_func, opt_func, model, callbacks, y=2)"
    assert trainer_with(cls=Star, y=5).y == 5


def test_one_event_of_a_subclass_needs_no_tuple():
    class OneEvent(Trainer):
        events = "checked"

    seen = []
    t = trainer_with(SimpleNamespace(name="a", checked=seen.append), cls=OneEvent)
    t.run_callbacks("checked")
    assert seen == [t]


def test_tools_take_objects_as_well_as_classes():
    assert len(event_table(trainer_with())) == len(event_table(Trainer))
    assert "class MetricsCB" in repr(show_source(MetricsCB()))


@pytest.mark.shows("ISA-46")
def test_the_device_may_be_a_function():
    "The one that finds the default as well as another"
    t = trainer_with(DeviceCB(default_device))
    t.fit(1)
    assert next(t.model.parameters()).device.type == def_device.type
    assert to_device(torch.ones(1), default_device).device.type == def_device.type
    with pytest.raises(ValueError, match="which PyTorch does not know"):
        DeviceCB(3.5)


@pytest.mark.parametrize(
    "path, message", [("loss.xyz", "is no format"), ("/proc/nowhere/loss.png", "cannot be written")]
)
def test_a_plot_that_cannot_be_saved_is_refused_before_training(path, message, capsys):
    from isaac_loop.recipes.demo import main

    with pytest.raises(SystemExit) as e:
        main(["--epochs", "1", "--plot", path])
    assert e.value.code == 2 and message in capsys.readouterr().err


def test_a_plot_without_suffix_is_saved_where_it_says(tmp_path, capsys):
    from isaac_loop.recipes.demo import main

    main(["--epochs", "1", "--device", "cpu", "--plot", str(tmp_path / "loss")])
    assert (
        f"Loss plot: {tmp_path / 'loss.png'}" in capsys.readouterr().out and (tmp_path / "loss.png").exists()
    )


@pytest.mark.parametrize("name", ["train", "valid", None])
def test_predictions_from_exact_loaders_come_in_order_and_leave_their_position_alone(name):
    dls, plain = digit_loaders(seed=3), digit_loaders()
    t = Trainer(
        dls,
        F.cross_entropy,
        optim.SGD,
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        [BasicTrainCB(), MetricsCB()],
    )
    t.MetricsCB._log = lambda row: None
    t.fit(1)
    before = dls.train.state_dict(), dls.valid.state_dict()
    found = t.get_preds(name)
    assert (dls.train.state_dict(), dls.valid.state_dict()) == before
    expected = (
        torch.cat([y for _, y in DataLoaders(plain.train, plain.valid).valid])
        if name != "train"
        else torch.tensor([o["label"] for o in dls.train.dataset])
    )
    assert torch.equal(found.targets, expected)
    assert t.validate()["valid_loss"] == pytest.approx(t.history.latest("valid_loss"))


def test_the_finder_tries_one_rate_for_each_update_when_gradients_are_accumulated():
    t = trainer_with(AccumulationCB(4), n=8)
    found = t.lr_find(n_batches=6, max_mult=1e9)
    assert len(found.lrs) == 6 and found.lrs == pytest.approx([1e-5 * 1.3**i for i in range(6)])


@pytest.mark.parametrize("make", [lambda: EarlyStoppingCB(3), lambda: StepSchedulerCB(2.5)])
def test_numbers_in_the_wrong_place_have_a_clear_error(make):
    with pytest.raises((TypeError, ValueError), match="`monitor` is 3|`epochs` is 2.5"):
        make()


@pytest.mark.parametrize("watcher", [ProgressCB("plain"), RewindCB(), CheckpointCB])
def test_a_trainer_can_be_copied_after_a_fit_whatever_walked_over_its_batches(watcher, tmp_path):
    t = trainer_with(MetricsCB(), watcher(tmp_path / "run") if isinstance(watcher, type) else watcher)
    t.fit(1)
    again = copy.deepcopy(t)
    assert (
        torch.equal(again.model.weight, t.model.weight)
        and again.history.rows == t.history.rows
        and list(t.epochs) == [0]
    )


def test_a_function_that_only_reads_the_rows_may_evaluate():
    found = []

    def log(trainer):
        found.append(trainer.validate()["valid_loss"])

    t = trainer_with(MetricsCB(), log)
    t.fit(2)
    assert found == pytest.approx(t.history["valid_loss"])


def test_one_dataset_where_splits_are_wanted_is_told_so_in_a_line():
    "Every row was read, and printed"
    rows = Dataset.from_dict(dict(x=list(range(500)), y=list(range(500))))
    with pytest.raises(TypeError, match="is a Dataset, which has no splits") as e:
        DataLoaders.from_dataset_dict(rows, 32)
    assert len(str(e.value)) < 500


def put_preds(trainer):
    trainer.preds = trainer.model(trainer.batch[0])


@pytest.mark.shows("ISA-44")
def test_two_callbacks_that_both_predict_are_warned_of_once_in_a_fit():
    "With no class in common both run, which is right for `step` alone"

    class OtherCB:
        order = 1

        def predict(self, trainer):
            trainer.preds = trainer.model(trainer.batch[0])

        def get_loss(self, trainer):
            trainer.loss = trainer.loss_func(trainer.preds, trainer.batch[1])

        def step(self, trainer): ...
        def zero_grad(self, trainer): ...

    class AloneCB(OtherCB):
        @replaces
        def predict(self, trainer):
            super().predict(trainer)

        @replaces
        def get_loss(self, trainer):
            super().get_loss(trainer)

    with pytest.warns(UserWarning) as told:
        trainer_with(OtherCB()).fit(2)
    assert [str(o.message).split(" both run")[0] for o in told] == [
        "`BasicTrainCB.predict` and `OtherCB.predict`",
        "`BasicTrainCB.get_loss` and `OtherCB.get_loss`",
    ]

    class HelpedCB:
        def predict(self, trainer):
            self.help(trainer)

        def help(self, trainer):
            put_preds(trainer)

    class LooksCB:
        def predict(self, trainer):
            self.seen = trainer.batch_num

    with pytest.warns(UserWarning, match="`HelpedCB.predict` both run"):
        trainer_with(HelpedCB()).fit(1, train=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cb in (AloneCB(), LooksCB()):
            trainer_with(cb).fit(1)


class PredictsTooCB:
    order = 1

    def predict(self, trainer):
        "Predict once more"
        put_preds(trainer)
        self.n = getattr(self, "n", 0) + 1


def test_a_trainer_whose_steps_are_watched_can_be_pickled_and_copied():
    "Watching stood in closures, which no pickle takes and which a copy shares"
    t = trainer_with(PredictsTooCB())
    with pytest.warns(UserWarning, match="`PredictsTooCB.predict` both run"):
        t.fit(1)
    t.opt = t.loss_func = None  # Not what is asked here
    assert pickle.loads(pickle.dumps(t)).PredictsTooCB.n == t.PredictsTooCB.n
    before = t.PredictsTooCB.n
    copied = copy.deepcopy(t)
    for handler in copied.plan["predict"]:
        copied.batch = t.dls.train[0] if isinstance(t.dls.train, list) else next(iter(t.dls.train))
        handler(copied)
    assert (t.PredictsTooCB.n, copied.PredictsTooCB.n) == (before, before + 1)
    assert "Predict once more" in str(t.summarize_callbacks())


def test_who_clips_in_backward_is_no_second_provider_and_who_adds_gradients_is():
    "Any change of a gradient counted as another `backward`"

    class ClipsCB:
        order = 1

        def backward(self, trainer):
            nn.utils.clip_grad_norm_(trainer.model.parameters(), 1e-3)

    class AddsCB:
        order = 1

        def backward(self, trainer):
            sum((p**2).sum() for p in trainer.model.parameters()).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_with(ClipsCB()).fit(1)
    with pytest.warns(UserWarning, match="`AddsCB.backward` both run"):
        trainer_with(AddsCB()).fit(1)


def test_two_callbacks_that_both_give_gradients_are_warned_of_and_one_that_looks_is_not():
    class DecayCB:
        order = 1

        def backward(self, trainer):
            trainer.model.weight.square().sum().backward()

    class LooksCB:
        order = 1

        def backward(self, trainer):
            self.seen = trainer.model.weight.grad.clone()

    with pytest.warns(UserWarning, match="`BasicTrainCB.backward` and `DecayCB.backward` both run.*add up"):
        trainer_with(DecayCB()).fit(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_with(LooksCB()).fit(1)


def test_the_source_of_a_class_in_a_cell_is_shown_and_what_has_none_is_told():
    text = (
        "n = 1\nclass CellCB:\n    n = 2\n\n    def after_batch(self, t): self.n = 3\n\nclass Other: pass\n"
    )
    linecache.cache["<a cell>"] = len(text), None, text.splitlines(True), "<a cell>"
    space = {"__name__": "a_notebook"}
    exec(compile(text, "<a cell>", "exec"), space)
    shown = repr(show_source(space["CellCB"]()))
    assert shown.startswith("class CellCB:") and shown.endswith("self.n = 3")
    with pytest.raises(OSError, match="Python has no source of `Other`"):
        show_source(space["Other"])
    with pytest.raises(TypeError, match="the text 'CellCB'.*without the quotes"):
        show_source("CellCB")
