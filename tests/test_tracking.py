"""What is written down and shown: `callbacks/tracking.py`, `inspection.py`, `demo.py` and the imports.

Records are checked against the objects that they are about, tables against what really ran or is really there, and the
demo against what a person reads in a shell.
"""
import inspect
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import isaac_loop.demo as demo
from isaac_loop.callbacks.device import DeviceCB
from isaac_loop.callbacks.metrics import MetricsCB
from isaac_loop.callbacks.progress import ProgressCB
from isaac_loop.callbacks.tracking import TrackingCB, settings, source_of
from isaac_loop.callbacks.training import BasicTrainCB, MomentumTrainCB, NBatchCB, OneBatchCB
from isaac_loop.data import DataLoaders
from isaac_loop.events import EVENTS, SPANS, CancelEpochException, CancelException, CancelFitException, replaces, with_cbs
from isaac_loop.inspection import callback_table, event_table, show_source, state_table
from isaac_loop.models import SimpleNet
from isaac_loop.trainer import STATE, Trainer


def make_trainer(callbacks, cls=Trainer, model=None, opt_func=optim.SGD, loss_func=F.mse_loss):
    batches = [(torch.ones(2, 4), torch.ones(2, 1))] * 3
    return cls(DataLoaders(batches, batches[:2]), loss_func, opt_func, SimpleNet(4, 3, 1) if model is None else model, callbacks)


class QuietCB(MetricsCB):
    "Prints nothing"
    def _log(self, row): pass


# TrackingCB

def test_a_fit_an_epoch_and_a_batch_each_leave_a_row():
    "ISA-62, ISA-63"
    trainer = make_trainer([MomentumTrainCB(0.9), QuietCB(), TrackingCB()])
    trainer.fit(2, lr=0.05)
    cb = trainer.TrackingCB
    row, = cb.fit_stats
    assert row["model"] == str(trainer.model) and row["model_class"] == "SimpleNet"
    assert row["model_source"] == inspect.getsource(SimpleNet)
    assert (row["loss_func"], row["opt_func"], row["lr"], row["n_epochs"]) == ("mse_loss", "SGD", 0.05, 2)
    assert row["callbacks"] == ["MomentumTrainCB", "QuietCB", "TrackingCB"]
    assert row["MomentumTrainCB.momentum"] == 0.9
    assert cb.epoch_stats == list(trainer.history)
    assert cb.batch_stats == list(trainer.history.batches) and len(cb.batch_stats) == 2 * (3 + 2)
    assert set(cb.batch_stats[0]) >= {"fit", "epoch", "training", "batch", "loss"}


class FirstCB:
    name = "First"
    momentum, shared, callbacks = 0.1, "first", ()

    def before_fit(self, trainer): pass


class SecondCB(FirstCB):
    name = "Second"
    momentum, shared = 0.2, "second"

    def __init__(self): self.own, self._private, self.can_be_called = 3, 4, print

    @property
    def computed(self): return self.own + 1


def test_equal_settings_of_two_callbacks_do_not_collide():
    "ISA-65: each has the name of its callback before it"
    trainer = make_trainer([BasicTrainCB(), FirstCB(), SecondCB(), TrackingCB()])
    trainer.fit(1)
    row, = trainer.TrackingCB.fit_stats
    assert (row["First.momentum"], row["Second.momentum"]) == (0.1, 0.2)
    assert (row["First.shared"], row["Second.shared"]) == ("first", "second")


def test_every_public_attribute_that_cannot_be_called_is_a_setting():
    "ISA-63"
    assert settings(SecondCB()) == {"Second.computed": 4, "Second.momentum": 0.2, "Second.name": "Second", "Second.own": 3, "Second.shared": "second"}


def test_settings_of_all_built_in_callbacks_are_found():
    "ISA-63"
    trainer = make_trainer([BasicTrainCB(), NBatchCB(2), QuietCB(train_metrics=True), DeviceCB("cpu"), ProgressCB("plain", seconds=3), TrackingCB()])
    trainer.fit(1)
    row, = trainer.TrackingCB.fit_stats
    expected = {"NBatchCB.n_batches": 2, "QuietCB.train_metrics": True, "DeviceCB.device": "device(type='cpu')", "ProgressCB.place": "plain", "ProgressCB.seconds": 3}
    assert {o: row[o] for o in expected} == expected


def test_records_are_plain_data():
    "ISA-63: readable without our code, whatever a callback keeps"
    class OddCB:
        def __init__(self): self.array, self.long, self.orders = torch.ones(2), list(range(10_000)), NBatchCB.order
        def before_fit(self, trainer): pass

    trainer = make_trainer([BasicTrainCB(), QuietCB(), OddCB(), TrackingCB()])
    trainer.fit(1)
    cb = trainer.TrackingCB
    for rows in (cb.fit_stats, cb.epoch_stats, cb.batch_stats): assert json.loads(json.dumps(rows)) == rows
    row = cb.fit_stats[0]
    assert row["OddCB.array"] == "tensor([1., 1.])" and row["OddCB.orders"] == -100
    assert len(row["OddCB.long"]) == 200 and row["OddCB.long"].startswith("[0, 1, 2") and row["OddCB.long"].endswith("...")


def test_two_fits_are_kept_apart_and_keep_what_they_were_trained_with():
    "ISA-63"
    trainer = make_trainer([MomentumTrainCB(0.9), QuietCB(), TrackingCB()])
    trainer.fit(2, lr=0.05)
    trainer.MomentumTrainCB.momentum = 0.5
    trainer.fit(1, lr=0.01, callbacks=NBatchCB(1))
    cb = trainer.TrackingCB
    assert [row["fit"] for row in cb.fit_stats] == [0, 1]
    assert [row["fit"] for row in cb.epoch_stats] == [0, 0, 1]
    assert [row["fit"] for row in cb.batch_stats] == [0] * 10 + [1] * 2
    assert [row["MomentumTrainCB.momentum"] for row in cb.fit_stats] == [0.9, 0.5]
    assert [row["lr"] for row in cb.fit_stats] == [0.05, 0.01]
    assert ["NBatchCB" in row["callbacks"] for row in cb.fit_stats] == [False, True]


def test_one_object_may_track_two_trainers():
    "ISA-65: nothing is taken from a global"
    cb = TrackingCB()
    for model in (SimpleNet(4, 3, 1), nn.Linear(4, 1)): make_trainer([BasicTrainCB(), QuietCB(), cb], model=model).fit(1)
    assert [row["model_class"] for row in cb.fit_stats] == ["SimpleNet", "Linear"]
    assert (len(cb.epoch_stats), len(cb.batch_stats)) == (2, 10)


def test_the_rows_of_epochs_are_copies():
    trainer = make_trainer([BasicTrainCB(), QuietCB(), TrackingCB()])
    trainer.fit(1)
    trainer.history.write(valid_loss="changed later")
    assert trainer.TrackingCB.epoch_stats[0]["valid_loss"] != "changed later"


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), CancelFitException(), CancelEpochException()], ids=lambda o: type(o).__name__)
def test_a_fit_that_is_cut_short_leaves_its_record(error):
    "ISA-63: everything that was measured until then"
    class EndCB:
        order = 30
        def after_batch(self, trainer):
            if (trainer.epoch, trainer.batch_num) == (1, 1): raise error

    trainer = make_trainer([BasicTrainCB(), QuietCB(), TrackingCB(), EndCB()])
    try: trainer.fit(3)
    except (ValueError, KeyboardInterrupt) as e: assert e is error
    cb = trainer.TrackingCB
    assert len(cb.fit_stats) == 1
    assert cb.batch_stats == list(trainer.history.batches) and len(cb.batch_stats) >= 5
    assert [row["epoch"] for row in cb.epoch_stats] == ([0, 1, 2] if isinstance(error, CancelEpochException) else [0])


def test_tracking_works_without_metrics():
    "ISA-62"
    trainer = make_trainer([BasicTrainCB(), TrackingCB()])
    trainer.fit(2)
    fits, epochs, batches = trainer.TrackingCB.frames()
    assert len(fits) == 1 and epochs.empty and batches.empty


def test_everything_comes_as_three_data_frames():
    "ISA-63"
    trainer = make_trainer([MomentumTrainCB(0.9), QuietCB(), TrackingCB()])
    trainer.fit(2)
    trainer.fit(1)
    fits, epochs, batches = frames = trainer.TrackingCB.frames()
    assert all(isinstance(o, pd.DataFrame) for o in frames)
    assert [len(o) for o in frames] == [2, 3, 15]
    assert fits["MomentumTrainCB.momentum"].tolist() == [0.9, 0.9]
    assert epochs["valid_loss"].tolist() == trainer.history["valid_loss"]
    assert batches["loss"].tolist() == trainer.history.batches["loss"]
    joined = batches.merge(epochs, on=["fit", "epoch"]).merge(fits, on="fit")
    assert len(joined) == 15 and set(joined.model_class) == {"SimpleNet"}


def test_functions_partials_and_modules_have_names():
    trainer = make_trainer([BasicTrainCB(), TrackingCB()], opt_func=partial(optim.SGD, momentum=0.9), loss_func=nn.MSELoss())
    trainer.fit(1)
    row, = trainer.TrackingCB.fit_stats
    assert (row["opt_func"], row["loss_func"]) == ("SGD", "MSELoss")


def test_a_model_without_source_has_none():
    "ISA-63: a class that was typed into a shell"
    scope = {"nn": nn}
    exec("class Typed(nn.Linear): pass", scope)
    assert source_of(scope["Typed"](4, 1)) is None
    trainer = make_trainer([BasicTrainCB(), TrackingCB()], model=scope["Typed"](4, 1))
    trainer.fit(1)
    assert trainer.TrackingCB.fit_stats[0]["model_class"] == "Typed"


# The summary of callbacks

def test_the_summary_of_three_callbacks_has_eight_rows_in_order():
    "ISA-40, ISA-41"
    trainer = make_trainer([BasicTrainCB(), DeviceCB(), OneBatchCB()])
    table = trainer.summarize_callbacks()
    assert [(row["step"], row["callback"]) for row in table.rows] == [
        ("before_fit", "DeviceCB"), ("before_batch", "DeviceCB"), ("predict", "BasicTrainCB"), ("get_loss", "BasicTrainCB"),
        ("backward", "BasicTrainCB"), ("step", "BasicTrainCB"), ("zero_grad", "BasicTrainCB"), ("after_batch", "OneBatchCB")]
    for row in table.rows: assert row["does"] == getattr(getattr(trainer, row["callback"]), row["step"]).__doc__
    assert len(table) == 8 and str(table).splitlines()[0].split() == ["step", "callback", "does"]


def spy(diary, cls, *args, **kwargs):
    "An object of a class that also writes down what was called on it"
    def wrap(event):
        def handler(self, trainer):
            diary.append((event, cls.__name__))
            return getattr(cls, event)(self, trainer)
        return handler
    made = type(cls.__name__, (cls,), {event: wrap(event) for event in EVENTS if hasattr(cls, event)})
    return made(*args, **kwargs)


def test_the_summary_is_in_the_order_in_which_things_really_run():
    "ISA-40: first of all the first calls, in a fit of one epoch with both passes"
    diary = []
    watch = type("WatchCB", (), {event: lambda self, trainer: None for event in EVENTS})
    late = type("LateCB", (), {"order": 60, **{event: lambda self, trainer: None for event in EVENTS}})
    trainer = make_trainer([spy(diary, late), spy(diary, ProgressCB, "plain"), spy(diary, QuietCB), spy(diary, BasicTrainCB), spy(diary, watch), spy(diary, DeviceCB, "cpu"), spy(diary, TrackingCB)])
    trainer.fit(1)
    table = callback_table(trainer)
    assert [(row["step"], row["callback"]) for row in table.rows] == list(dict.fromkeys(diary))
    assert {row["step"] for row in table.rows} == set(EVENTS)


def test_a_summary_needs_no_fit_and_changes_nothing():
    "ISA-40"
    trainer = make_trainer([BasicTrainCB(), OneBatchCB()])
    before = str(trainer.summarize_callbacks())
    trainer.fit(2)
    assert str(trainer.summarize_callbacks()) == before and trainer.n_updates == 1


def test_the_summary_says_who_is_replaced_and_who_sees_which_pass():
    "ISA-40, ISA-44"
    class StepCB:
        @replaces
        def step(self, trainer): "Do nothing at all"

    class TrainOnlyCB:
        on_valid = False
        def before_batch(self, trainer): "Augment"

    class ValidOnlyCB:
        on_train = False
        def before_batch(self, trainer): "Crop the centre"

    trainer = make_trainer([BasicTrainCB(), StepCB(), TrainOnlyCB(), ValidOnlyCB()])
    found = {(row["step"], row["callback"]): row["does"] for row in callback_table(trainer).rows}
    assert found["step", "StepCB"] == "Do nothing at all (instead of BasicTrainCB)" and ("step", "BasicTrainCB") not in found
    assert found["before_batch", "TrainOnlyCB"] == "Augment (training only)"
    assert found["before_batch", "ValidOnlyCB"] == "Crop the centre (validation only)"


class CancelWarmUp(CancelException): "Leave the warming up"


class WarmTrainer(Trainer):
    "Has a step of its own, an event of its own, and a span of its own"
    events = ("after_warning",)

    def predict(self):
        "Predict by itself"
        self.preds = self.model(self.batch[0])

    @with_cbs("warm_up", CancelWarmUp)
    def warm_up(self): pass


def test_a_trainer_with_methods_and_events_of_its_own_is_in_the_summary():
    "ISA-40, MIN-02"
    class WarmCB:
        def after_warning(self, trainer): "Blink"
        def before_warm_up(self, trainer): "Light the fire"

    rows = {(row["step"], row["callback"]): row["does"] for row in callback_table(make_trainer([WarmCB()], WarmTrainer)).rows}
    assert rows == {("predict", "WarmTrainer"): "Predict by itself", ("after_warning", "WarmCB"): "Blink", ("before_warm_up", "WarmCB"): "Light the fire"}


# The other tables

def test_the_table_of_events_has_every_event_once_in_order():
    table = event_table()
    assert tuple(row["event"] for row in table.rows) == EVENTS
    for row in table.rows:
        span = SPANS.get(re.sub("^(before|after|cleanup)_", "", row["event"]))
        assert row["cancel_with"] == (span.exception.__name__ if span else "")
        assert row["when"] and row["when"] in str(table)


def test_the_table_of_events_has_those_of_a_subclass():
    events = tuple(row["event"] for row in event_table(WarmTrainer).rows)
    assert events[:len(EVENTS)] == EVENTS
    assert sorted(events[len(EVENTS):]) == ["after_warm_up", "after_warning", "before_warm_up", "cleanup_warm_up", "warm_up"]


def test_the_table_of_state_has_what_a_trainer_has_while_it_trains():
    "Everything in the table is really there, and no public attribute of the trainer is missing from it"
    class LookCB:
        def after_batch(self, trainer):
            self.missing = [o for o in STATE if not hasattr(trainer, o)]
            self.public = [o for o in vars(trainer) if not o.startswith("_") and o != "plan"]

    trainer = make_trainer([BasicTrainCB(), LookCB()])
    trainer.fit(1)
    table = state_table()
    assert [row["attribute"] for row in table.rows] == list(STATE)
    assert all(row["what"] and row["written_by"] for row in table.rows)
    assert trainer.LookCB.missing == [] and set(trainer.LookCB.public) <= set(STATE)


@pytest.mark.parametrize("obj", [Trainer.one_batch, BasicTrainCB, with_cbs, DeviceCB, Trainer._fit, MomentumTrainCB.zero_grad], ids=lambda o: o.__qualname__)
def test_source_is_that_of_the_library_itself(obj):
    "ISA-110: line by line as it stands in the file"
    shown = repr(show_source(obj)).splitlines()
    written = [line.strip() for line in Path(inspect.getsourcefile(inspect.unwrap(obj))).read_text().splitlines()]
    start = next(i for i in range(len(written)) if written[i:i + len(shown)] == [line.strip() for line in shown])
    assert shown[0] == written[start] and len(shown) > 1
    assert any(re.match(rf"(def|class) {obj.__name__}\b", line) for line in shown)


def test_source_shows_the_decorator_and_not_its_inside():
    "ISA-110"
    lines = repr(show_source(Trainer.one_batch)).splitlines()
    assert lines[0] == "@with_cbs('batch', CancelBatchException)" and lines[1].startswith("def one_batch(self)")
    assert show_source(Trainer.one_batch)._repr_markdown_() == "```python\n" + "\n".join(lines) + "\n```"


# The demo

def run_demo(*options):
    "A shell's view of `python -m isaac_loop`"
    return subprocess.run([sys.executable, "-m", "isaac_loop", *options], capture_output=True, text=True, timeout=120)


def test_the_demo_learns_to_read_digits_and_shows_its_parts(tmp_path):
    "F130: the table, the callbacks, and a plot that is there"
    done = run_demo("--epochs", "10", "--plot", str(tmp_path / "new folder" / "loss.png"))
    assert done.returncode == 0 and done.stderr == ""
    table, callbacks = done.stdout.split("What ran at each step:")
    header, *rows = (line.split() for line in table.strip().splitlines())
    assert header == ["epoch", "train_loss", "valid_loss", "accuracy", "time"] and [row[0] for row in rows] == [str(o) for o in range(10)]
    for name in ("BasicTrainCB", "MetricsCB", "DeviceCB", "ProgressCB"): assert name in callbacks
    assert float(re.search(r"Accuracy on 360 digits never trained on: ([\d.]+)%", done.stdout)[1]) >= 95
    plot = Path(re.search("Loss plot: (.*)", done.stdout)[1])
    assert plot.is_absolute() and plot.parent == tmp_path / "new folder"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_demo_speaks_of_a_wrong_option_without_a_traceback():
    "From a shell"
    done = run_demo("--device", "cudda")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("`device` is 'cudda', which PyTorch does not know. Use a name such as 'cpu', 'cuda', 'cuda:1' or 'mps'.")


@pytest.mark.parametrize(("options", "message"), [
    (["--epochs", "-1"], "`n_epochs` is -1, and nothing can be trained fewer than 0 times. Use 0 or more."),
    (["--lr", "nan"], "`lr` is nan, and the first step would spoil every weight."),
    (["--device", "cuda:99"], "`DeviceCB` was told to use 'cuda:99', but this machine cannot"),
    (["--epochs", "three"], "argument --epochs: invalid int value: 'three'"),
    (["--epoch-count", "3"], "unrecognized arguments: --epoch-count 3"),
], ids=lambda o: " ".join(o) if isinstance(o, list) else "")
def test_the_demo_refuses_what_it_cannot_do(options, message, capsys):
    with pytest.raises(SystemExit) as caught: demo.main(options)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and message in err and out == ""


def test_the_demo_has_help(capsys):
    with pytest.raises(SystemExit) as caught: demo.main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and "python -m isaac_loop" in out
    for option in ("--epochs", "--lr", "--seed", "--device", "--plot"): assert option in out


def test_the_same_seed_gives_the_same_run(tmp_path, capsys):
    def run(seed):
        demo.main(["--epochs", "1", "--device", "cpu", "--seed", str(seed), "--plot", str(tmp_path / "loss.png")])
        return re.sub(r"\d\d:\d\d", "", capsys.readouterr().out)

    first, other, again = run(1), run(2), run(1)
    assert first == again and first != other


def test_no_epochs_show_the_callbacks_and_draw_nothing(tmp_path, capsys):
    demo.main(["--epochs", "0", "--device", "cpu", "--plot", str(tmp_path / "loss.png")])
    out = capsys.readouterr().out
    assert "BasicTrainCB" in out and "Loss plot" not in out and not (tmp_path / "loss.png").exists()


# Imports

@pytest.mark.parametrize(("module", "heavy"), [("isaac_loop.trainer", ["matplotlib", "pandas", "datasets", "torcheval", "torchmetrics", "IPython"]), ("isaac_loop.events", ["torch", "numpy"])])
def test_an_import_brings_only_what_it_needs(module, heavy):
    "The loop alone starts quickly"
    program = f"import sys, {module}; print([o for o in {heavy} if o in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
