"""What `try_callback` says of sound callbacks, what it leaves behind, and what it refuses.

A sound callback, whatever it does, breaks no promise, also in the surroundings of a user; of the trials
nothing is left; the report shows all of it. Faults are in `test_planted_faults.py`.
"""

import copy
import os
import random
import signal
import tempfile
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from isaac_loop import CancelBatchException, CancelEpochException, DataLoaders, Order, Trainer
from isaac_loop.callbacks import BasicTrainCB, EvaluatorCB, FreezeCB, MetricsCB, RecorderCB
from isaac_loop.data import exact_loader
from isaac_loop.inspection import try_callback
from isaac_loop.inspection import BrokenPromise
from isaac_loop.loop.monitor import Monitor
from observing import observe, random_states, unchanged
from planted_faults import FAULTS, make_closure

QUICK = dict(seconds=0)  # As few cut runs as there may be


def test_state_in_a_closure_is_found_when_two_of_them_are_made_and_when_a_run_goes_on():
    report = try_callback(make_closure(), promises=["two_fits", "resume"])
    assert report.broken == ["two_fits", "resume"]
    assert "outside of its attributes" in str(report["resume"])
    shared = try_callback(make_closure()(), promises=["repeats"])
    assert shared.broken == ["repeats"]


# ---- sound callbacks


class Sound:
    "Does a bit of everything, and puts all of it back"

    order = Order.RECORD

    def __init__(self, path=None):
        self.path = path

    def before_fit(self, trainer):
        self.n, self.means, self.generator = 0, [], torch.Generator().manual_seed(0)
        self.old, trainer.loss_func = trainer.loss_func, self.loss(trainer.loss_func)
        self.handle = trainer.model[1].register_forward_hook(self.note)
        self.handler = signal.signal(signal.SIGTERM, lambda *args: None)
        self.file = None if self.path is None else open(self.path, "a")

    def loss(self, old):
        return lambda preds, targets: 2 * old(preds, targets)

    def note(self, module, inputs, output):
        if module.training:
            self.means.append(output.detach().mean())

    def before_batch(self, trainer):
        if not trainer.training:
            return
        x, y = trainer.batch
        trainer.batch = x + 0.01 * torch.randn(x.shape, generator=self.generator), y

    def before_predict(self, trainer):
        self.grad = torch.is_grad_enabled()
        torch.set_grad_enabled(self.grad)

    def cleanup_predict(self, trainer):
        torch.set_grad_enabled(self.grad)

    def after_step(self, trainer):
        self.n += 1
        trainer.opt.param_groups[0]["lr"] = 0.1 / self.n

    def after_epoch(self, trainer):
        if trainer.training:
            trainer.history.write(mean=torch.stack(self.means).mean().item())
            self.means.clear()
        if self.file:
            self.file.write("an epoch\n")

    def cleanup_fit(self, trainer):
        if getattr(self, "old", None) is None:  # `before_fit` had no turn
            return
        trainer.loss_func = self.old
        self.handle.remove()
        signal.signal(signal.SIGTERM, self.handler)
        if self.file:
            self.file.close()
        self.old = None


class Tells:
    "Has a state that it tells itself"

    def before_fit(self, trainer):
        self._n = 0

    def before_step(self, trainer):
        self._n += 1
        trainer.opt.param_groups[0]["lr"] = 0.1 / self._n

    def state_dict(self):
        return {"n": self._n}

    def load_state_dict(self, state):
        self._n = state["n"]


class Cancels:
    "Leaves out a batch, and the end of a validation"

    def after_predict(self, trainer):
        if trainer.training and trainer.batch_num == 0:
            raise CancelBatchException("not this one")

    def before_batch(self, trainer):
        if not trainer.training and trainer.batch_num == 1:
            raise CancelEpochException("enough")


def prints(trainer):
    print(trainer.history[-1] if len(trainer.history) else "nothing yet")


prints.__name__ = "log"
SOUND = {
    "a bit of everything": Sound,
    "with a file": lambda: Sound("notes.txt"),
    "a state of its own": Tells,
    "cancels": Cancels,
    "a function": lambda: prints,
    "a class": lambda: RecorderCB,
    "a namespace": lambda: SimpleNamespace(after_batch=lambda trainer: None, name="quiet"),
    "a group": lambda: SimpleNamespace(callbacks=[Tells(), RecorderCB()], name="both"),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_callback_breaks_no_promise(name):
    given = SOUND[name]()
    report = try_callback(given, **({} if name == "a bit of everything" else QUICK))
    assert report.ok and not report.broken, report
    report.check()


def test_what_has_nothing_to_be_tried_says_so():
    report = try_callback(prints, promises=["cleanup", "state_dict", "hooks", "modes", "files", "random"])
    told = {name: tried.reason for name, tried in report.promises.items()}
    assert told.pop("added") is None
    assert told["state_dict"] == "has no `state_dict`" and told["hooks"] == "registers no hooks"
    assert all(told.values()) and {o.verdict for o in report.promises.values()} == {"kept", "not tried"}
    assert try_callback(prints, promises="resume")["resume"].reason == "has no state"


class CountsAPass:
    def before_epoch(self, trainer):
        self.n = 0

    def after_batch(self, trainer):
        self.n += 1

    def cleanup_epoch(self, trainer):
        self.n = 0


class RemembersNowAndThen:
    seen = None

    def before_fit(self, trainer):
        self.seen = None

    def after_batch(self, trainer):
        self.seen = trainer.batch_num if trainer.training and trainer.batch_num == 2 else None


class HoldsMonitor:
    def __init__(self):
        self.watch = Monitor("min", 0.0, 99)

    def before_fit(self, trainer):
        self.watch.reset()

    def log(self, trainer):
        self.watch.update(trainer.history.news.get("valid_loss"))


class HoldsGenerator:
    def __init__(self):
        self.numbers = torch.Generator()

    def after_batch(self, trainer):
        torch.randn(1, generator=self.numbers)


@pytest.mark.parametrize("kind", [CountsAPass, RemembersNowAndThen, HoldsMonitor, HoldsGenerator])
def test_who_has_a_state_is_not_told_to_have_none(kind):
    "It may be gone at the end, or lie in an object that the callback holds"
    tried = try_callback(kind, promises="resume")["resume"]
    assert tried.verdict == "kept" and tried.reason is None


def test_who_holds_settings_alone_has_no_state():
    class Settings:
        def __init__(self):
            self.limit, self.names = 3, ["a", "b"]

        def after_batch(self, trainer):
            assert self.limit

    assert try_callback(Settings, promises="resume")["resume"].reason == "has no state"


def test_who_changes_the_training_may_draw_random_numbers():
    class Noise:
        def before_batch(self, trainer):
            trainer.batch = trainer.batch[0] + torch.randn(1), trainer.batch[1]

    assert "changes the training" in try_callback(Noise(), promises="random")["random"].reason


def test_a_wait_now_and_then_is_told_and_does_not_break_the_promise():
    class Sometimes:
        def after_batch(self, trainer):
            if trainer.batch_num % 8 == 4:
                print(trainer.loss.item())

    report = try_callback(Sometimes(), promises="waits")
    assert report.ok and "waits in 12% of the batches" in str(report["waits"])


def test_numbers_of_the_processor_may_be_looked_at():
    class Here:
        def before_batch(self, trainer):
            self.share = torch.rand(3).sum().item()
            self.order = torch.arange(4).tolist()
            self.shape = tuple(trainer.batch[0].shape)

        order = Order.DATA

    assert try_callback(Here(), promises="waits").ok


def before_batch(trainer):
    if not torch.isfinite(trainer.batch[0]).all():
        raise CancelBatchException("a pixel is not a number")


def test_a_batch_may_be_looked_at_before_it_goes_to_the_device():
    first, later = SimpleNamespace(before_batch=before_batch, order=Order.FIRST), SimpleNamespace()
    later.before_batch, later.name, first.name = before_batch, "later", "first"
    assert try_callback(first, promises="waits").ok
    assert not try_callback(later, promises="waits").ok


def test_who_asks_for_a_column_that_was_never_measured_is_told_and_breaks_no_promise():
    def log(trainer):
        if trainer.history.latest("valid_loss") < 0.3:
            trainer.request_stop("good enough")

    report = try_callback(log, promises="cancels", seconds=20)
    assert report.ok and "`trainer.history.news.get(name)`" in str(report["cancels"])


def test_a_mode_that_is_left_is_found_and_goes_on_in_a_resumed_run():
    make, _ = FAULTS["EvaluatesAndForgetsToTrain"]
    report = try_callback(make(), promises=["modes", "resume"])
    assert report.broken == ["modes"]


def test_what_needs_another_model_is_told_how_to_bring_it():
    class Encodes:
        def before_fit(self, trainer):
            trainer.model.encoder.train()

    assert "`try_callback(cb, trainer)`" in str(try_callback(Encodes())["added"])


# ---- nothing is left


def of_process():
    handler = signal.getsignal(signal.SIGINT)
    return print, torch.get_default_dtype(), torch.is_anomaly_enabled(), handler


def test_of_the_trials_nothing_is_left(tmp_path, monkeypatch):
    "Random numbers, files, handlers, functions, and the objects that were handed over are as they were"
    monkeypatch.chdir(tmp_path)
    temporary = tmp_path.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    names = "ReplacesPrint ChangesTheDefaultType MovesElsewhere WritesWhereItStands HandlesCtrlCUntilAfterFit"
    for name in [*names.split(), "SharesAListWithAllOthers", "LooksForAnomaliesForEver"]:
        make, promise = FAULTS[name]
        callback = make()
        before, numbers = observe(callback), random_states()
        process = of_process()
        filters, shared = list(warnings.filters), copy.copy(getattr(callback, "losses", None))
        assert promise in try_callback(callback, promises=[promise, "repeats"], **QUICK).broken
        unchanged(callback, before)
        assert random_states() == numbers and os.getcwd() == str(tmp_path)
        assert of_process() == process
        assert list(warnings.filters) == filters and getattr(callback, "losses", None) == shared
    assert list(tmp_path.iterdir()) == [] and not [
        o for o in temporary.iterdir() if not o.name.startswith("torch")
    ]


def test_a_folder_that_was_given_is_not_touched(tmp_path, monkeypatch):
    "Neither one with its whole path nor one that the callback has made absolute"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "notes.txt").write_text("mine")
    for path in (tmp_path / "given" / "notes.txt", str(tmp_path / "new.txt"), Path("there.txt").absolute()):
        report = try_callback(Sound(path), promises=["files", "two_fits"], **QUICK)
        assert report.ok, report
    assert (tmp_path / "given" / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["given"]


def test_nothing_is_printed_and_nothing_warned_of(capfd, recwarn):
    class Loud:
        def after_batch(self, trainer):
            print("a batch")
            warnings.warn("beware")

    assert try_callback(Loud(), promises=["cancels", "resume"], **QUICK).ok
    assert capfd.readouterr() == ("", "") and not recwarn.list


# ---- surroundings of one's own


class Rows(nn.Module):
    "A model with two inputs, and parts with names"

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x, scale):
        return self.head(torch.relu(self.body(x) * scale))


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(4), torch.ones(1), torch.randn(1)


class MyTrainer(Trainer):
    def predict(self):
        x, scale, _ = self.batch
        self.preds = self.model(x, scale)

    def get_loss(self):
        self.loss = self.loss_func(self.preds, self.batch[2])

    def backward(self):
        self.loss.backward()

    def step(self):
        self.opt.step()

    def zero_grad(self):
        self.opt.zero_grad()


def own_trainer(cls=Trainer, callbacks=None, opt_func=optim.AdamW):
    data = [(torch.randn(4), torch.ones(1), torch.randn(1)) for _ in range(40)]
    dls = DataLoaders(exact_loader(data, 4, seed=1), DataLoader(data, 8, shuffle=True), n_inp=2)
    if callbacks is None:
        callbacks = [BasicTrainCB(), MetricsCB(show=False), RecorderCB()]
    return (
        Trainer(dls, F.mse_loss, opt_func, Rows(), callbacks)
        if cls is Trainer
        else cls(dls, F.mse_loss, opt_func, Rows(), callbacks)
    )


SURROUNDINGS = {
    "exact loader and random one": own_trainer,
    "trained already": lambda: trained(own_trainer()),
    "steps as methods": lambda: own_trainer(MyTrainer, []),
    "two optimizers' worth of options": lambda: own_trainer(
        opt_func=lambda ps, lr: optim.SGD(ps, lr, momentum=0.9)
    ),
}


def trained(trainer):
    trainer.fit(1, lr=0.01)
    return trainer


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_callback_is_tried_in_copies_of_my_trainer(name):
    trainer = SURROUNDINGS[name]()
    loaders = trainer.dls.train, trainer.dls.valid  # Reading from them leaves something in them
    before, numbers, place = observe(trainer, loaders), random_states(), trainer.dls.train.state_dict()
    assert try_callback(FreezeCB("body"), trainer, promises=["cleanup", "two_trainers", "resume"], **QUICK).ok

    class Freezes:
        def before_fit(self, trainer):
            trainer.model.body.requires_grad_(False)

        def after_fit(self, trainer):
            trainer.model.body.requires_grad_(True)

    report = try_callback(Freezes(), trainer, promises=["cleanup"], **QUICK)
    assert "`model.body.weight`" in str(report["cleanup"])
    unchanged(trainer, before, loaders)
    assert random_states() == numbers and trainer.dls.train.state_dict() == place


def test_other_loaders_and_other_callbacks_take_the_place_of_mine():
    trainer, seen = own_trainer(), []

    class Looks:
        def before_batch(self, trainer):
            seen.append((len(trainer.batch[0]), [type(cb).__name__ for cb in trainer.callbacks]))

    stream = DataLoader(Stream(), 3)
    report = try_callback(
        Looks(),
        trainer,
        dls=DataLoaders(stream, stream, n_inp=2),
        callbacks=[BasicTrainCB()],
        promises=["two_fits", "memory"],
    )
    assert report.ok and set(map(str, seen)) == {str((3, ["BasicTrainCB", "Looks"]))}


def test_a_callback_that_the_trainer_has_is_not_added_twice():
    trainer = own_trainer()
    assert try_callback(trainer.RecorderCB, trainer, promises=["repeats", "resume"]).ok
    assert try_callback(lambda: RecorderCB(), trainer, promises="two_fits").ok


def test_what_a_callback_knows_of_its_trainer_stays_true():
    "It holds the loader, the model and another callback of the trainer; the copies hold the copies"
    trainer = own_trainer()

    class Knows:
        def __init__(self, trainer):
            self.model, self.valid, self.recorder = trainer.model, trainer.dls.valid, trainer.RecorderCB

        def after_fit(self, trainer):
            assert self.model is trainer.model and self.valid is trainer.dls.valid
            assert self.recorder is trainer.RecorderCB

    assert try_callback(Knows(trainer), trainer, promises=["added", "repeats"]).ok


# ---- the report, and what is refused


def test_the_report_shows_itself():
    make, promise = FAULTS["LooksAtTheLoss"]
    report = try_callback(make(), promises=["waits", "memory", "hooks"])
    assert not report.ok and report.broken == ["waits"]
    text, markdown = str(report), report._repr_markdown_()
    for shown in (text, markdown):
        assert "2 kept, 1 broken, 1 not tried" in shown and "registers no hooks" in shown
        assert "planted_faults.py" in shown and str(Path(__file__).parent) not in shown
    assert len(report.table()) == 4 and "| waits |" in markdown
    with pytest.raises(BrokenPromise) as caught:
        report.check(ignore=["memory"])
    assert "LooksAtTheLoss.after_get_loss" in str(caught.value) and "check(ignore=...)" in str(caught.value)
    with pytest.raises(LookupError, match="Did you mean `waits`"):
        report.check(ignore="wait")
    with pytest.raises(LookupError, match="Did you mean `waits`"):
        report["wait"]


def test_what_cannot_be_tried_is_refused_with_a_way_out():
    class Locked:
        def __init__(self):
            self.lock = threading.Lock()

        def after_batch(self, trainer):
            with self.lock:
                pass

    with pytest.raises(TypeError, match=r"cannot be copied .* `try_callback\(lambda: Locked\(...\)\)`"):
        try_callback(Locked())
    assert all(try_callback(o, promises="two_fits").ok for o in (Locked, lambda: Locked()))
    with pytest.raises(LookupError, match="There is no promise `hook`. Did you mean `hooks`?"):
        try_callback(Locked, promises=["hook"])
    with pytest.raises(TypeError, match="None is no callback"):
        try_callback(None)
    with pytest.raises(ValueError, match="Pass `trainer=` as well"):
        try_callback(Locked, dls=DataLoaders([]))

    def before_epoch(trainer):
        try_callback(Locked, trainer)

    with pytest.raises(RuntimeError, match="`trainer` is training"):
        own_trainer().fit(1, callbacks=before_epoch)


def test_numpy_draws_count_as_draws():
    class Watches:
        def after_batch(self, trainer):
            random.random(), np.random.rand()

    assert try_callback(Watches(), promises="random").broken == ["random"]


def test_a_generator_of_its_own_is_told_of():
    told = try_callback(Sound(), promises="random")["random"].reason
    assert "generator of its own" in told and "draws no random numbers" not in told
    assert "draws no random numbers" in try_callback(Tells(), promises="random")["random"].reason


def test_a_callback_that_fails_only_in_a_trial_gives_a_row():
    "It asks for what a run on the side does not have"

    class Fragile:
        def before_epoch(self, trainer):
            self.metrics = trainer.MetricsCB

        def before_batch(self, trainer):
            if not trainer.dl.batch_size:
                raise RuntimeError("no size")

        def __deepcopy__(self, memo):
            return Fragile()

    report = try_callback(Fragile(), promises=["evaluation", "waits"])
    assert report.broken == ["evaluation"] and "Fragile.before_epoch" in str(report["evaluation"])
    assert try_callback(3).broken == ["added"]


class RemembersTheBest:
    "Reads what an evaluation writes, in the events of a callback that takes part in it"

    column = "valid_loss"

    def before_fit(self, trainer):
        self.best = 9.0

    def log(self, trainer):
        self.best = min(self.best, trainer.history.latest(self.column))


class RemembersTheNewest(RemembersTheBest):
    def log(self, trainer):
        self.best = min(self.best, trainer.history[-1][self.column])


@pytest.mark.parametrize("kind", [RemembersTheBest, RemembersTheNewest])
def test_an_evaluation_is_recorded_as_by_those_who_evaluate(kind):
    given = None, own_trainer()
    assert all(try_callback(kind(), trainer, promises="evaluation").ok for trainer in given)
    callbacks = [BasicTrainCB(), MetricsCB(show=False), kind(), EvaluatorCB(updates=1, at_start=True)]
    trainer = own_trainer(callbacks=callbacks)
    trainer.fit(1)
    assert trainer.validate()["valid_loss"] > 0


@pytest.mark.parametrize("column", ["train_loss", "accuracy"])
def test_what_an_evaluation_does_not_write_is_missing_in_it(column):
    class Asks(RemembersTheBest):
        in_side_runs = True  # Else it is not told of rows there

    Asks.column = column
    accuracy = MetricsCB(accuracy=lambda preds, y: (preds.argmax(1) == y).float(), show=False)
    report = try_callback(Asks(), callbacks=[BasicTrainCB(), accuracy], promises="evaluation")
    assert report.broken == ["evaluation"] and f"no `{column}`" in str(report["evaluation"])


def test_a_source_that_nobody_has_read_is_not_said_to_be_sound():
    space = {}
    exec("class TwiceCB:\n    def after_backward(self, trainer): trainer.opt.step()\n", space)
    report = try_callback(space["TwiceCB"](), promises="sound")
    assert report["sound"].verdict == "not tried" and "`TwiceCB.after_backward`" in report["sound"].reason
