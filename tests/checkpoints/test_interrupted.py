"Runs that are killed or interrupted from outside, and end as if nothing had happened."

import shutil
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from itertools import count

import pytest
import torch
from torch import optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.averaging import EMACB, SWACB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.stop.interrupts import InterruptCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.schedule.schedules import OneCycleSchedulerCB
from isaac_loop.train.training import BasicTrainCB, NBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelEpochException, CancelFitException
from isaac_loop.loop.spans import with_cbs
from isaac_loop.loop.trainer import Trainer
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.state.errors import ResumeMismatch
from isaac_loop.state.store import CheckpointStore
from runs import Cut, CutCB, Rows, callbacks, fit, make_loaders, make_trainer, result, same
from places import PATHS, ROOT
from resumed import MOMENTS, Stream, plain_loaders, press, pressing


pytestmark = pytest.mark.filterwarnings("ignore:The training loader does not know", "ignore:Reading")


# ---- killed and interrupted from outside


class Placed(IterableDataset):
    "An endless stream that knows its place, and how many rows were read"

    start = at = read = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]

    def __iter__(self):
        rows = Rows(64)
        for self.at in count(self.start + 1):
            self.read += 1
            yield rows[(self.at - 1) % 64]


class Honoured:
    "A loader of somebody else's that keeps its place: the contract of torchdata's"

    def __init__(self):
        self.rows, self.at, self.start = Rows(40, False), 0, 0

    def state_dict(self):
        return {"_num_yielded": self.at}

    def load_state_dict(self, state):
        self.start = self.at = state["_num_yielded"]

    def __len__(self):
        return 5

    def __iter__(self):
        first, self.start = self.start, 0
        for k in range(first, 5):
            self.at = k + 1
            yield self.rows.x[8 * k : 8 * k + 8], self.rows.y[8 * k : 8 * k + 8]
        self.at = 0


@pytest.mark.parametrize("make", [lambda: exact_loader(Placed(), 8, seed=5), Honoured])
def test_what_knows_its_place_is_not_read_again(make, tmp_path):
    "Two epochs of five batches, also where one ends; a run from every second batch"

    def make_run(folder, **options):
        return make_trainer(
            [
                BasicTrainCB(),
                MetricsCB(),
                NBatchCB(5),
                RecorderCB(),
                CheckpointCB(folder, every=1, keep_last=None, **options),
            ],
            DataLoaders(make()),
            optim.SGD,
        )

    whole = fit(make_run(tmp_path / "all"), 2, valid=False)
    for o in CheckpointStore(tmp_path / "all", read_only=True).list()[::2]:
        again = fit(make_run(tmp_path / f"from {o.step}", resume=o.path), 2, valid=False)
        same(whole, again)
        if make is not Honoured:
            assert again.dls.train.dataset.read <= 8 * (
                10 - o.step + 2
            )  # `NBatchCB` reads one more in each epoch


@pytest.mark.shows("SON-34", "SON-27", "U10")
def test_killed_and_interrupted_processes_end_as_if_nothing_had_happened():
    "20 kills and 20 signals, also while resuming, saving and validating (`make torture` has more)"
    tool = ROOT / "tools/torture.py"
    done = subprocess.run(
        [sys.executable, tool, "--kills", "20", "--signals", "20"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 lost" in done.stdout


# torch may import `tabulate` at exit, and Python then forgets that an interrupt has ended the program
SCRIPT = """
import contextlib
with contextlib.suppress(ImportError): import tabulate
import os, signal, sys, warnings
sys.path[:0] = {paths}
import runs
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.stop.interrupts import InterruptCB
def before_backward(trainer):
    if trainer.epoch == 1: {kill}(os.getpid(), signal.{name})
callbacks = [*runs.callbacks({folder!r}), InterruptCB(), before_backward]
trainer = runs.make_trainer(callbacks, runs.make_loaders(num_workers={workers}))
runs.fit(trainer)
"""


@pytest.mark.shows("SON-27")
@pytest.mark.parametrize(
    "name,code,kill,workers", [("SIGINT", -signal.SIGINT, "os.kill", 0), ("SIGTERM", 143, "os.killpg", 2)]
)
def test_a_script_that_is_interrupted_ends_as_the_system_expects(name, code, kill, workers, tmp_path):
    """A shell sees 130 (a process that ended by SIGINT) and 143, also if SIGTERM comes to the workers.

    Every batch that was done is saved."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            SCRIPT.format(paths=PATHS, name=name, kill=kill, workers=workers, folder=str(tmp_path / "run")),
        ],
        capture_output=True,
        timeout=60,
        start_new_session=True,
    )
    assert done.returncode == code, done.stderr
    assert CheckpointStore(tmp_path / "run", read_only=True).latest().step == 8
    same(fit(make_trainer()), fit(make_trainer(callbacks(tmp_path / "run"))))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("loaders", [make_loaders, plain_loaders])
def test_nothing_is_lost_whenever_an_interrupt_comes(moment, loaders, tmp_path):
    "At most one more batch, everything saved, and the next fit, in this process or another, goes on"
    whole = fit(make_trainer(dls=loaders()))
    for again_here in (True, False):
        folder = tmp_path / str(again_here)
        first = make_trainer([*callbacks(folder), InterruptCB()], loaders())
        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            fit(first, callbacks=MOMENTS[moment])
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
        latest = CheckpointStore(folder, read_only=True).latest()
        assert latest.step == first.n_updates  # So no batch is done twice
        same(
            whole, fit(first if again_here else make_trainer([*callbacks(folder), InterruptCB()], loaders()))
        )


@pytest.mark.parametrize("event", ["log", "after_fit", "cleanup_fit"])
@pytest.mark.parametrize("with_callback", [True, False])
def test_a_fit_that_was_interrupted_at_its_very_end_is_not_trained_twice(event, with_callback, tmp_path):
    "The cell is run again, and ends as one fit; the one after that trains"

    def cbs(folder=None):
        return [
            BasicTrainCB(),
            MetricsCB(show=False),
            SWACB(0.5, keep=True),
            *([CheckpointCB(folder)] if folder else []),
        ]

    whole = fit(make_trainer(cbs()), 2)
    one_fit, two_fits = result(whole), result(fit(whole, 2))
    for order in (5, 35, 45):

        def last(trainer):
            if trainer.epoch != 1:
                return
            if not with_callback:
                raise KeyboardInterrupt
            press(trainer)

        last.__name__, last.order = (
            event,
            order if event != "cleanup_fit" else order + 10,
        )  # While handlers are still there
        trainer = make_trainer(cbs(tmp_path / str(order)) + [InterruptCB()] * with_callback)
        with pytest.raises(KeyboardInterrupt):
            fit(trainer, 2, callbacks=last)
        same(one_fit, fit(trainer, 2))
    same(two_fits, fit(trainer, 2))


def test_a_run_that_somebody_else_has_finished_meanwhile_is_not_trained_again(tmp_path, capsys):
    "A notebook was interrupted, a script went on in its folder, and then the cells are run once more"

    def cbs():
        return [*callbacks(tmp_path / "run"), InterruptCB()]

    for n_fits in (1, 2):
        trainer = make_trainer(cbs())
        with pytest.raises(KeyboardInterrupt):
            fit(trainer, callbacks=CutCB("before_step", lambda t: t.n_updates == 16 and press(t)))
        script = make_trainer(cbs())
        for _ in range(n_fits):
            fit(script)
        trainer.fit(3, 0.02)
        assert "complete already" in capsys.readouterr().out
        if n_fits == 2:
            fit(trainer)
        same(script, trainer)
        same(fit(script), fit(trainer))
        shutil.rmtree(tmp_path / "run")


def test_callbacks_of_one_fit_go_on_with_it_when_it_was_interrupted(tmp_path):
    whole, trainer = fit(make_trainer()), make_trainer([])
    for n in (9, 16):
        with pytest.raises(KeyboardInterrupt):
            fit(
                trainer,
                callbacks=[
                    *callbacks(tmp_path / "run"),
                    InterruptCB(),
                    CutCB("before_step", lambda t: t.n_updates == n and press(t)),
                ],
            )
    fit(trainer, callbacks=callbacks(tmp_path / "run"))
    assert torch.equal(whole.model[0].weight, trainer.model[0].weight) and len(trainer.history) == 3


def test_a_fit_after_loading_is_a_new_one_though_the_last_was_interrupted(tmp_path):
    "It went on with the newest checkpoint, and what had been loaded was gone"
    trainer = make_trainer(
        [BasicTrainCB(), MetricsCB(), InterruptCB(), CheckpointCB(tmp_path / "run", keep_last=None)]
    )
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, callbacks=CutCB("after_fit", press))
    trainer.load(tmp_path / "run" / "step-00000007")
    assert len(trainer.history) == 1 and len(fit(trainer, 1).history) == 2 and trainer.n_updates == 7


def test_a_fit_after_loading_from_mid_epoch_says_that_its_first_epoch_is_not_whole(tmp_path):
    "A schedule for 14 updates had 12"
    whole = fit(make_trainer([BasicTrainCB(), CheckpointCB(tmp_path / "run", every=9, keep_last=None)]))
    n, trainer = whole.n_updates, make_trainer([BasicTrainCB()])
    with pytest.warns(UserWarning, match=r"only the rest of its batches.*set_epoch\(2\)"):
        trainer.load(tmp_path / "run" / "step-00000009")
    assert fit(trainer, 1).n_updates == 2 * 7 - 9
    with pytest.warns(UserWarning, match="rest"):
        trainer.load(tmp_path / "run" / "step-00000009")
    trainer.dls.train.set_epoch(2)
    assert fit(trainer, 1).n_updates == 7
    trainer.load(tmp_path / "run" / f"step-{n:08}")
    assert fit(trainer, 1).n_updates == 7


def test_a_second_interrupt_in_validation_saves_nothing_either(tmp_path):
    def predict(trainer):
        if not trainer.training:
            press(trainer), press(trainer)

    trainer = make_trainer([*callbacks(tmp_path / "run"), InterruptCB()])
    with pytest.raises(KeyboardInterrupt, match="second"):
        fit(trainer, callbacks=predict)
    assert trainer.n_updates == 7 and not CheckpointStore(tmp_path / "run", read_only=True).list()


class OwnEMACB(EMACB):
    "Does more than its parent, so its state is noted with those of others"


@pytest.mark.parametrize("kind", [EMACB, OwnEMACB])
def test_an_interrupt_in_validation_has_the_average_of_that_moment(kind, tmp_path):
    "It is in the model just then, and is not copied beforehand"

    def predict(trainer):
        if trainer.epoch == 1 and not trainer.training:
            press(trainer)

    def run(folder=tmp_path / "run"):
        others = [cb for cb in callbacks(folder) if not isinstance(cb, EMACB)]
        return make_trainer([*others, InterruptCB(), kind(0.8)])

    whole = fit(run(tmp_path / "whole"), 3)
    with pytest.raises(KeyboardInterrupt):
        fit(run(), 3, callbacks=predict)
    same(whole, fit(run(), 3))


def test_an_interrupt_is_not_swallowed_by_a_stop_or_a_cancel(tmp_path):
    def log(trainer):
        press(trainer)
        trainer.request_stop("enough")

    trainer = make_trainer([*callbacks(tmp_path / "run"), InterruptCB()])
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, callbacks=log)
    position = CheckpointStore(tmp_path / "run", read_only=True).load()[1]["position"]
    assert position["finished"] and position["stop_reason"] == "enough" and trainer.n_updates == 7

    def before_backward(trainer):
        press(trainer, signal.SIGTERM)
        raise CancelFitException("no more")

    with pytest.raises(SystemExit):
        fit(make_trainer([*callbacks(), InterruptCB()]), callbacks=before_backward)


@pytest.mark.parametrize("error", [CancelFitException, CancelEpochException])
def test_the_epoch_after_a_cancelled_one_is_whole(error, tmp_path):
    "The loader was saved in the middle of the cancelled pass, so the next one had only the rest"

    class LeaveCB:
        seen = 0

        def after_batch(self, trainer):
            self.seen += 1
            if self.seen == 2:
                raise error

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    def run(folder, cut=False):
        trainer = make_trainer(
            [
                BasicTrainCB(),
                MetricsCB(),
                OneCycleSchedulerCB(),
                CheckpointCB(folder),
                LeaveCB(),
                CutCB("before_step", lambda t: cut and t.LeaveCB.seen == 2),
            ]
        )
        with suppress(Cut):
            for _ in range(2):
                fit(trainer, 2, valid=False)
        return trainer

    whole = run(tmp_path / "whole")
    run(tmp_path / "cut", cut=True)
    same(whole, run(tmp_path / "cut"))


def test_a_second_interrupt_is_immediate_and_saves_nothing(tmp_path):
    def before_backward(trainer):
        press(trainer)
        press(trainer)

    trainer = make_trainer([*callbacks(tmp_path / "run"), InterruptCB()])
    with pytest.raises(KeyboardInterrupt, match="second"):
        fit(trainer, callbacks=before_backward)
    assert trainer.n_updates == 0 and not CheckpointStore(tmp_path / "run", read_only=True).list()


def test_outside_of_the_main_thread_no_handlers_are_touched():
    before, errors = signal.getsignal(signal.SIGINT), []

    def work():
        try:
            fit(
                make_trainer([*callbacks(), InterruptCB()]),
                1,
                callbacks=CutCB("before_fit", lambda t: signal.getsignal(signal.SIGINT) is not before),
            )
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors and signal.getsignal(signal.SIGINT) is before


def test_nested_fits_put_back_the_handlers_of_the_outer_one():
    seen = []

    def after_batch(trainer):
        if not trainer.training:
            return
        outer = signal.getsignal(signal.SIGTERM)
        fit(make_trainer([*callbacks(), InterruptCB()]), 1)
        seen.append(signal.getsignal(signal.SIGTERM) == outer != before)

    before = signal.getsignal(signal.SIGTERM)
    fit(make_trainer([*callbacks(), InterruptCB()]), 1, callbacks=after_batch)
    assert all(seen) and len(seen) == 7 and signal.getsignal(signal.SIGTERM) == before


class Asks(Rows):
    "Each item says whether a signal ends the worker that reads it, and what Ctrl-C does there"

    def __getitem__(self, i):
        signal.raise_signal(signal.SIGINT)  # Left to the main process
        return super().__getitem__(i)


def test_workers_leave_an_interrupt_to_the_main_process():
    dls = make_loaders()
    dls.train = exact_loader(Asks(16), 8, num_workers=2)
    trainer = fit(make_trainer([*callbacks(), InterruptCB()], dls), 1)
    assert trainer.n_updates == 2 and trainer.interrupted is None


# ---- a window that is open when a stream ends


def streams(make):
    return DataLoaders(make(Stream(Rows(40)), 8), exact_loader(Rows(24), 12, shuffle=False))


def exact_stream():
    return streams(lambda rows, size: exact_loader(rows, size, seed=3))


def plain_stream():
    return streams(DataLoader)


@pytest.mark.parametrize("loaders", [exact_stream, plain_stream])
@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("window", [2, 3, 9])
def test_the_last_window_of_a_stream_is_closed_in_a_run_that_goes_on_behind_its_last_batch(
    loaders, valid, window, tmp_path
):
    "Nothing was left of the pass but its end, which did not know where it was, so the run never went on"

    def run(name):
        cbs = [BasicTrainCB(), AccumulationCB(window), MetricsCB(), InterruptCB()]
        return make_trainer([*cbs, CheckpointCB(tmp_path / name)], loaders())

    whole = fit(run("whole"), 2, valid=valid)
    last = pressing("after_batch", lambda t: t.training and (t.epoch, t.batch_num) == (0, 4))
    with pytest.raises(KeyboardInterrupt):
        fit(run("cut"), 2, valid=valid, callbacks=last)
    same(whole, fit(run("cut"), 2, valid=valid))


# ---- what the end of a training pass does is done once


class EndsCB:
    "Does at the end of a training pass what must not be done twice"

    on_valid = False

    def __init__(self):
        self.ends = 0

    def after_epoch(self, trainer):
        self.ends += 1
        trainer.opt.param_groups[0]["lr"] *= 0.5

    @torch.no_grad()
    def cleanup_epoch(self, trainer):
        trainer.model[0].weight.add_(torch.randn(16, 8), alpha=0.01 * self.ends)
        if self.ends == 2:
            trainer.opt.state.clear()


class RateCB:
    "Lowers the rate whenever a pass begins"

    def before_epoch(self, trainer):
        trainer.opt.param_groups[0]["lr"] *= 0.9


def in_pass(event, training, batch=None, epoch=1):
    "Ctrl-C at an event of the training or the validation pass of an epoch"
    where = training, epoch

    def handler(trainer):
        at_batch = batch is None or batch == trainer.batch_num
        if (trainer.training, trainer.epoch) == where and at_batch and not trainer.interrupted:
            press(trainer)

    handler.__name__, handler.order = event, 60
    return handler


ENDS = {
    "last training batch": lambda: in_pass("after_step", True, 4),
    "end of the training pass": lambda: in_pass("after_epoch", True),
    "cleanup of the training pass": lambda: in_pass("cleanup_epoch", True),
    "beginning of validation": lambda: in_pass("before_epoch", False),
    "first batch of validation": lambda: in_pass("after_predict", False, 0),
    "last batch of validation": lambda: in_pass("after_batch", False, 1),
    "end of validation": lambda: in_pass("after_epoch", False),
    "first epoch": lambda: in_pass("after_batch", False, 0, 0),
    "last epoch": lambda: in_pass("after_batch", False, 0, 2),
}


def exact_loaders():
    return make_loaders(40)


LOADERS = [exact_loaders, plain_loaders, exact_stream, plain_stream]


def ended(folder, loaders, *more):
    cbs = [BasicTrainCB(), MetricsCB(), EndsCB(), RateCB(), InterruptCB(), *more]
    return make_trainer([*cbs, CheckpointCB(folder)], loaders())


def all_of(trainer):
    rates = [{k: x for k, x in o.items() if k != "params"} for o in trainer.opt.param_groups]
    return result(trainer), rates, trainer.EndsCB.ends


@pytest.mark.parametrize("moment", ENDS)
@pytest.mark.parametrize("loaders", LOADERS)
@pytest.mark.parametrize("window", [None, 2])
def test_what_a_training_pass_does_at_its_end_is_done_once(moment, loaders, window, tmp_path):
    "The rate was halved twice, a random number drawn twice, and the last window of a stream was used twice"

    def run(name):
        return ended(tmp_path / name, loaders, *([AccumulationCB(window)] if window else []))

    whole = fit(run("whole"), 3)
    first = run("cut")
    with pytest.raises(KeyboardInterrupt):
        fit(first, 3, callbacks=ENDS[moment]())
    assert CheckpointStore(tmp_path / "cut", read_only=True).latest().step == first.n_updates
    again = fit(run("cut"), 3)
    same(whole, again)
    assert all_of(again) == all_of(whole)


def test_a_validation_pass_may_be_interrupted_again_and_again(tmp_path):
    "The training pass before it is left out each time, whoever else goes on"
    whole = fit(ended(tmp_path / "whole", plain_loaders, RewindCB()), 3)
    begun = []

    def before_epoch(trainer):
        begun.append((trainer.epoch, trainer.training))

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            again = ended(tmp_path / "cut", plain_loaders, RewindCB())
            fit(again, 3, callbacks=[before_epoch, ENDS["first batch of validation"]()])
    assert begun[-2:] == [(1, False), (1, False)] and begun.count((1, True)) == 1
    again = fit(ended(tmp_path / "cut", plain_loaders, RewindCB()), 3)
    same(whole, again)
    assert all_of(again) == all_of(whole)
    again.rewind(2)
    same(whole, fit(again, 3))


def test_a_cancelled_training_pass_is_over_too(tmp_path):
    "Nothing of it was saved; the next one begins with the first batch, wherever the loader was left"

    class LeavesCB:
        on_valid = False

        def after_batch(self, trainer):
            if trainer.batch_num == 2:
                raise CancelEpochException("enough")

    whole = fit(ended(tmp_path / "whole", exact_loaders, LeavesCB()), 3)
    with pytest.raises(KeyboardInterrupt):
        fit(ended(tmp_path / "cut", exact_loaders, LeavesCB()), 3, callbacks=ENDS["first epoch"]())
    assert CheckpointStore(tmp_path / "cut", read_only=True).latest().step == 3
    again = fit(ended(tmp_path / "cut", exact_loaders, LeavesCB()), 3)
    same(whole, again)
    assert all_of(again) == all_of(whole)


def test_a_run_that_was_stopping_stops_after_its_validation(tmp_path):
    def after_step(trainer):
        if (trainer.epoch, trainer.batch_num) == (1, 1):
            trainer.request_stop("enough")

    whole = fit(ended(tmp_path / "whole", exact_loaders), 3, callbacks=after_step)
    with pytest.raises(KeyboardInterrupt):
        fit(
            ended(tmp_path / "cut", exact_loaders),
            3,
            callbacks=[after_step, ENDS["first batch of validation"]()],
        )
    again = fit(ended(tmp_path / "cut", exact_loaders), 3)
    assert again.stop_reason == "enough" and again.epoch == 1
    same(whole, again)


def test_fewer_epochs_are_complete_when_the_last_was_interrupted_in_validation(tmp_path, capsys):
    "There is nothing to go on with, and that is said"
    first = ended(tmp_path, exact_loaders)
    with pytest.raises(KeyboardInterrupt):
        fit(first, 3, callbacks=ENDS["first batch of validation"]())
    again = ended(tmp_path, exact_loaders)
    again.fit(1, 0.02)
    assert "complete already" in capsys.readouterr().out
    assert torch.equal(first.model[0].weight, again.model[0].weight)


def test_weights_written_in_an_interrupted_validation_are_named(tmp_path):
    "They are not copied before it, so what was written comes twice; an average takes back what it puts in"

    class ShrinksCB:
        on_train = False

        @torch.no_grad()
        def before_epoch(self, trainer):
            trainer.model[0].weight.mul_(0.9)

    for cb in (ShrinksCB(), EMACB(0.9)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with pytest.raises(KeyboardInterrupt):
                fit(ended(tmp_path / type(cb).__name__, exact_loaders, cb), callbacks=ENDS["first epoch"]())
        named = [str(o.message) for o in told if "was written to in the validation pass" in str(o.message)]
        assert len(named) == isinstance(cb, ShrinksCB) and all("`0.weight` of the model" in o for o in named)


class Averaging(optim.SGD):
    "Averages weights, and swaps them in by `eval` and out by `train`, as schedule-free optimizers do"

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["z"] = p.detach().clone()
        self.param_groups[0]["train_mode"] = True

    def swap(self, on, share):
        if self.param_groups[0]["train_mode"] != on:
            self.param_groups[0]["train_mode"] = on
            for p in self.param_groups[0]["params"]:
                self.write(p, share)

    def write(self, p, share):
        p.data.lerp_(self.state[p]["z"], share)

    def eval(self):
        self.swap(False, 1 - 1 / 0.9)

    def train(self):
        self.swap(True, 0.1)


class Loud(Averaging):
    "PyTorch sees that it writes"

    @torch.no_grad()
    def write(self, p, share):
        p.lerp_(self.state[p]["z"], share)


@pytest.mark.parametrize("opt_func", [Averaging, Loud])
def test_an_optimizer_that_swaps_weights_for_validation_goes_on_with_the_right_ones(opt_func, tmp_path):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    rows = list(zip(x, (x[:, 0] > 0).long()))

    class SwapCB:
        def before_epoch(self, trainer):
            trainer.opt.train() if trainer.training else trainer.opt.eval()

    def made(folder):
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 2)
        dls = DataLoaders(exact_loader(rows, 10, seed=1), exact_loader(rows, 10, shuffle=False))
        callbacks = [BasicTrainCB(), MetricsCB(show=False), SwapCB(), InterruptCB(), CheckpointCB(folder)]
        return Trainer(dls, F.cross_entropy, opt_func, model, callbacks)

    def after_batch(trainer):
        if not trainer.training and (trainer.epoch, trainer.batch_num) == (1, 2):
            trainer.InterruptCB._note(signal.SIGINT)

    whole = made(tmp_path / "whole")
    whole.fit(3, lr=0.1)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "cut").fit(3, lr=0.1, callbacks=after_batch)
    again = made(tmp_path / "cut")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.fit(3, lr=0.1)
    assert all(map(torch.equal, whole.model.parameters(), again.model.parameters()))
    assert again.history["valid_loss"] == whole.history["valid_loss"]


def test_a_fit_of_ones_own_that_would_train_an_epoch_twice_is_refused(tmp_path):
    class Own(Trainer):
        @with_cbs("fit", CancelFitException)
        def _fit(self, train, valid):
            for self.epoch in self.epochs:
                self.history.start_epoch(self.epoch)
                self.one_epoch(True)
                self.one_epoch(False)
                self.run_callbacks("log")

    def after_batch(trainer):
        if not trainer.training and trainer.epoch == 1:
            trainer.InterruptCB._note(signal.SIGINT)

    def made(cls):
        dls = DataLoaders(*[[(torch.ones(2, 3), torch.ones(2, 1))] * 3] * 2)
        callbacks = [BasicTrainCB(), InterruptCB(), CheckpointCB(tmp_path)]
        return cls(dls, F.mse_loss, optim.SGD, torch.nn.Linear(3, 1), callbacks)

    with pytest.raises(KeyboardInterrupt):
        made(Trainer).fit(3, lr=0.1, callbacks=after_batch)
    with pytest.raises(ResumeMismatch, match="`Own._fit` begins that epoch with training"):
        made(Own).fit(3, lr=0.1)
