"""Logs: `log/loggers.py`, `log/log_files.py` and `outlets.py`, against what really happened in the run.

Files are read with the standard library. What a killed and resumed run has logged is compared with the log
of the same run that was never stopped.
"""

import argparse
import copy
import csv
import json
import shutil
import sqlite3
import warnings
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.averaging import EMACB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.train.freezing import FreezeCB
from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.log.loggers import LoggerCB
from isaac_loop.log.log_files import CSV, JSONLines, Screen, SQLite
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.log.run_facts import run_map
from isaac_loop.log.trackers import TensorBoard
from isaac_loop.train.training import BasicTrainCB, MomentumTrainCB, NBatchCB, OneBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelBatchException, CancelFitException, Order
from isaac_loop.loop.spans import with_cbs
from isaac_loop.loop.trainer import Trainer
from isaac_loop.schedule.schedulers import BatchSchedulerCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.show.media_files import media_file, wav_bytes
from isaac_loop.basics.tensors import set_seed
from runs import Cut, CutCB, fit, same
from runs import make_trainer as make_run
from waiting import RefuseToWait

N = 12


class Keep:
    "A log that keeps all it is told"

    def __init__(self):
        self.rows, self.seen, self.alerts, self.runs, self.ends = [], [], [], [], []

    def start(self, run):
        self.runs.append(run)

    def row(self, values, step, table):
        self.rows.append((table, step, values))

    def media(self, name, kind, value, step, **about):
        self.seen.append((name, kind, step, about))

    def alert(self, text, step):
        self.alerts.append((step, text))

    def close(self, ok):
        self.ends.append(ok)

    def of(self, table):
        return {step: values for name, step, values in self.rows if name == table}


def make_trainer(*callbacks, metrics=True, opt_func=optim.SGD, model=None):
    set_seed(1)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(N)]
    cbs = [BasicTrainCB(), *([MetricsCB(show=False)] if metrics else []), *callbacks]
    return Trainer(DataLoaders(batches, batches[:2]), F.mse_loss, opt_func, model or nn.Linear(3, 1), cbs)


# What is logged, and when


def due(n, every):
    "The steps that are logged out of `n` updates"
    return sorted({1, *range(every, n + 1, every)})


@pytest.mark.shows("SON-11", "SON-20", "NEMO-14", "NEMO-52")
@pytest.mark.parametrize("every", [1, 2, 5, 25, 1000, None])
@pytest.mark.parametrize("epochs", [1, 2, 3, None])
def test_exactly_the_steps_that_were_meant_are_logged(every, epochs):
    "The first, then multiples of `every` over the whole run; epochs by their own count, the last one always"
    if every is None and epochs is None:
        return
    keep = Keep()
    trainer = make_trainer(LoggerCB(keep, every=every, epochs=epochs))
    trainer.fit(5, lr=0.1)
    losses = [o["loss"] for o in trainer.history.batches if o["training"]]
    steps, rows = keep.of("steps"), keep.of("epochs")
    assert list(steps) == (due(5 * N, every) if every else [])
    for step, before, values in zip(steps, [0, *steps], steps.values()):
        assert (
            values["loss"] == pytest.approx(losses[step - 1])
            and values["lr"] == 0.1
            and values["epoch"] == (step - 1) // N
            and values["seconds_per_step"] >= 0
        )
        since = losses[before:step]
        assert values["mean_loss"] == pytest.approx(sum(since) / len(since), rel=1e-5)
    meant = [e for e in range(5) if epochs and ((e + 1) % epochs == 0 or e == 4)]
    assert list(rows) == [(e + 1) * N for e in meant]
    for e, values in zip(meant, rows.values()):
        assert values == {k: v for k, v in trainer.history[e].items() if k != "fit"}
    end = keep.of("fits")[5 * N]
    assert end["outcome"] == "finished" and end["n_updates"] == 5 * N and end["total_seconds"] > 0


@pytest.mark.shows("NEMO-16", "NEMO-52")
def test_the_time_of_an_epoch_is_there_without_metrics():
    keep = Keep()
    make_trainer(LoggerCB(keep), metrics=False).fit(2)
    assert (
        all(set(o) == {"epoch", "elapsed"} and o["elapsed"] > 0 for o in keep.of("epochs").values())
        and len(keep.of("epochs")) == 2
    )


@pytest.mark.shows("AIT-57", "PTA-21")
def test_chosen_columns_are_logged_and_no_others():
    keep = Keep()
    make_trainer(LoggerCB(keep, columns="valid_loss")).fit(1)
    assert set(keep.of("epochs")[N]) == {"epoch", "valid_loss"}


@pytest.mark.shows("NEMO-10", "NEMO-12", "NEMO-19", "NEMO-20")
def test_values_are_asked_on_steps_that_log_and_on_no_others():
    "A function, an attribute, and one deeper down"
    asked, keep = [], Keep()

    def double(trainer):
        asked.append(trainer.n_updates)
        return trainer.loss.detach() * 2

    trainer = make_trainer(
        LoggerCB(keep, every=5, values={"double": double, "updates": "n_updates", "bias": "model.bias"})
    )
    trainer.fit(2)
    assert asked == due(2 * N, 5) == list(keep.of("steps"))
    for step, values in keep.of("steps").items():
        assert values["double"] == pytest.approx(2 * values["loss"]) and values["updates"] == step
    make_trainer(LoggerCB(keep, every=500, values=["n_updates"])).fit(1)


def test_an_update_over_several_batches_is_one_step():
    "Frequencies count optimizer updates"
    keep = Keep()
    trainer = make_trainer(AccumulationCB(3, "mean"), LoggerCB(keep, every=2))
    trainer.fit(2)
    assert trainer.n_updates == 8 and list(keep.of("steps")) == [1, 2, 4, 6, 8]
    losses = [o["loss"] for o in trainer.history.batches if o["training"]]
    assert [o["loss"] for o in keep.of("steps").values()] == pytest.approx(
        [losses[i] for i in (2, 5, 11, 17, 23)]
    )
    assert keep.of("steps")[4]["mean_loss"] == pytest.approx(sum(losses[6:12]) / 6, rel=1e-5)


def test_a_batch_with_several_updates_jumps_over_no_row():
    "As in a GAN, with an update for each of two optimizers"

    class TwiceTrainer(Trainer):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            self.run_callbacks(
                "predict", "get_loss", *(["backward", "step", "step", "zero_grad"] if self.training else [])
            )

    keep = Keep()
    trainer = make_trainer(RecorderCB(number=lambda t: t.batch_num), LoggerCB(keep, every=10))
    trainer = TwiceTrainer(trainer.dls, trainer.loss_func, trainer.opt_func, trainer.model, trainer.callbacks)
    trainer.fit(2)
    assert trainer.n_updates == 4 * N and list(keep.of("steps")) == [2, 10, 20, 30, 40] == list(
        keep.of("batches")
    )


def test_the_step_goes_on_over_fits_and_begins_anew_with_another_trainer():
    keep = Keep()
    cb = LoggerCB(keep, every=10)
    trainer = make_trainer(cb)
    trainer.fit(1)
    trainer.fit(1, train=False)
    trainer.fit(1)
    assert (
        list(keep.of("steps")) == [1, 10, 20]
        and [o["step"] for o in keep.runs] == [0, N, N]
        and len({o["id"] for o in keep.runs}) == 1
    )
    make_trainer(cb).fit(1)
    assert keep.runs[-1]["step"] == 0 and keep.runs[-1]["id"] != keep.runs[0]["id"]


def test_a_cancelled_or_skipped_batch_moves_nothing():
    class SkipCB:
        def before_batch(self, trainer):
            if trainer.training and trainer.batch_num in (0, 3):
                raise CancelBatchException

    keep = Keep()
    trainer = make_trainer(SkipCB(), RecorderCB(number=lambda t: t.batch_num), LoggerCB(keep, every=2))
    trainer.fit(1)
    assert trainer.n_updates == N - 2 and list(keep.of("steps")) == [1, 2, 4, 6, 8, 10]
    assert {s: o["number"] for s, o in keep.of("batches").items()} == {1: 1, 2: 2, 4: 5, 6: 7, 8: 9, 10: 11}


@pytest.mark.parametrize("limit", [OneBatchCB, lambda: NBatchCB(1)])
@pytest.mark.parametrize("first", [True, False])
def test_a_limit_at_the_end_of_a_batch_hides_nothing(limit, first):
    keep = Keep()
    cbs = [limit(), LoggerCB(keep, every=1)]
    make_trainer(*(cbs if first else cbs[::-1])).fit(1)
    assert list(keep.of("steps")) == [1]


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_rate_of_an_update_is_the_one_it_was_made_with(every, lr, accumulated):
    "Also the first one, though a schedule changes it after each update, and a rate in a tensor in place"
    keep, made_with = Keep(), []

    class NoteCB:
        order = Order.WATCH

        def before_step(self, trainer):
            made_with.append(float(trainer.opt.param_groups[0]["lr"]))

    schedule = BatchSchedulerCB(partial(optim.lr_scheduler.ExponentialLR, gamma=0.5))
    several = [AccumulationCB(accumulated)] if accumulated > 1 else []
    opt_func = lambda params, lr: optim.SGD(params, lr=lr.clone() if torch.is_tensor(lr) else lr)
    trainer = make_trainer(*several, schedule, NoteCB(), LoggerCB(keep, every=every), opt_func=opt_func)
    trainer.fit(2, lr=lr)
    rates = {step: row["lr"] for step, row in keep.of("steps").items()}
    assert made_with[0] == pytest.approx(0.1) and made_with[1] == pytest.approx(0.05)
    assert rates == {step: pytest.approx(made_with[step - 1]) for step in due(trainer.n_updates, every)}


def test_odd_loops_log_what_they_have():
    "No loss, no optimizer, or several of them with several groups"

    class OwnCB:
        def step(self, trainer):
            pass

    keep = Keep()
    trainer = Trainer(DataLoaders([1, 2, 3]), None, None, nn.Linear(3, 1), [OwnCB(), LoggerCB(keep, every=1)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(1, valid=False)
        assert set(keep.of("steps")[1]) == {"epoch", "seconds_per_step"}
        trainer.critic = optim.SGD(
            [dict(params=[o], lr=i / 10) for i, o in enumerate(trainer.model.parameters())], lr=1
        )
        trainer.opt = optim.SGD(trainer.model.parameters(), lr=torch.tensor(0.5))
        trainer.fit(1, valid=False)
    row = keep.of("steps")[4]
    assert (row["lr"], row["lr/critic/0"], row["lr/critic/1"]) == (0.5, 0.0, 0.1)


def test_a_loss_that_is_not_finite_is_logged_as_it_is():
    keep = Keep()
    trainer = make_trainer(LoggerCB(keep, every=1))
    trainer.loss_func = lambda p, y: F.mse_loss(p, y) * float("nan")
    trainer.fit(1)
    assert all(o["loss"] != o["loss"] for o in keep.of("steps").values()) and len(keep.of("steps")) == N


# What others write


class EvaluatorCB:
    "Writes columns of single batches and media in the middle of a pass, as an evaluator does"

    def after_batch(self, trainer):
        if not trainer.training or trainer.batch_num % 7 != 3:
            return
        trainer.history.write_batches(True, [trainer.batch_num], test_loss=[trainer.batch_num / 2])
        trainer.history.write_batches(True, [trainer.batch_num], test_accuracy=[0.5])
        trainer.history.write_media("said", "text", f"batch {trainer.batch_num}", speaker="me")


@pytest.mark.shows("AIT-18")
def test_what_is_written_in_the_middle_of_an_epoch_is_sent_at_once():
    "Callbacks meet in the history"
    order, keep = [], Keep()
    keep.row = lambda values, step, table: order.append((table, step, values))
    trainer = make_trainer(
        EvaluatorCB(), LoggerCB(keep, every=5, media=lambda t: t.history.write_media("mine", "text", "x"))
    )
    trainer.fit(2)
    found = [(step, values) for table, step, values in order if table == "batches"]
    assert found == [
        (4, dict(test_loss=1.5, test_accuracy=0.5)),
        (11, dict(test_loss=5.0, test_accuracy=0.5)),
        (16, dict(test_loss=1.5, test_accuracy=0.5)),
        (23, dict(test_loss=5.0, test_accuracy=0.5)),
    ]
    places = [(table, step) for table, step, _ in order]
    assert (
        places.index(("batches", 4))
        < places.index(("steps", 5))
        < places.index(("batches", 11))
        < places.index(("epochs", N))
    )
    assert [o for o in keep.seen if o[0] == "said"] == [
        ("said", "text", o, {"speaker": "me"}) for o in (4, 11, 16, 23)
    ]
    assert [o[2] for o in keep.seen if o[0] == "mine"] == due(2 * N, 5)


def test_columns_of_all_batches_are_thinned_out():
    keep = Keep()
    make_trainer(RecorderCB(number=lambda t: t.batch_num + 100 * t.epoch), LoggerCB(keep, every=5)).fit(2)
    assert keep.of("batches") == {
        1: {"number": 0},
        5: {"number": 4},
        10: {"number": 9},
        15: {"number": 102},
        20: {"number": 107},
    }
    keep = Keep()
    make_trainer(RecorderCB(number=lambda t: 1), LoggerCB(keep, every=None)).fit(2)
    assert not keep.of("batches") and len(keep.of("epochs")) == 2


def test_what_comes_after_the_last_row_is_not_lost():
    class LateCB:
        order = 60

        def after_fit(self, trainer):
            trainer.history.write(test_loss=7.0)
            trainer.history.write_media("last words", "text", "bye")

    keep = Keep()
    make_trainer(LateCB(), LoggerCB(keep)).fit(2)
    assert [values for table, _, values in keep.rows if table == "epochs"][-1] == dict(
        epoch=1, test_loss=7.0
    ) and keep.seen == [("last words", "text", 2 * N, {})]


@pytest.mark.shows("AIT-59")
def test_an_alert_goes_off_when_a_level_is_crossed_and_again_after_it_came_back():
    keep, values = Keep(), iter([1, 3, 4, float("nan"), 5, 1, 3])
    trainer = make_trainer(
        LoggerCB(
            [keep, print],
            every=2,
            values=dict(heat=lambda t: next(values, 0)),
            alerts=[("heat", ">", 2), ("heat", "<", 2), ("valid_loss", ">", -1)],
        )
    )
    trainer.fit(1)
    assert [step for step, _ in keep.alerts] == [1, 2, 10, N, N]
    assert keep.alerts[0][1] == "`heat` is 1, below 2" and keep.alerts[-1][1].startswith("`valid_loss` is")


# Hyper-parameters and the map of the run


@pytest.mark.shows("NEMO-51", "PTA-60")
def test_logs_hear_what_is_trained_with_which_settings():
    keep = Keep()
    args = argparse.Namespace(layers=3, note="first", rates=(0.1, 0.2))
    trainer = make_trainer(MomentumTrainCB(0.9), LoggerCB(keep, params=args, run="baseline"))
    trainer.remove_callback(BasicTrainCB)
    trainer.fit(1, lr=0.5)
    (run,) = keep.runs
    assert run["name"] == "baseline" and run["params"] == dict(
        model="Linear",
        loss_func="mse_loss",
        opt_func="SGD",
        lr=0.5,
        n_epochs=1,
        layers=3,
        note="first",
        rates=[0.1, 0.2],
    )
    assert [o["name"] for o in run["callbacks"]] == [
        "MomentumTrainCB",
        "MetricsCB",
        "LoggerCB",
    ] and json.dumps(run)
    assert run["callbacks"][0]["settings"]["momentum"] == 0.9 and run["callbacks"][1]["order"] == 10
    assert [o["name"] for o in run_map(trainer)] == [o["name"] for o in run["callbacks"]]


def test_what_belongs_to_a_run_is_no_setting_in_the_row_of_the_run(tmp_path):
    "Frozen parameters stood there for `FreezeCB`; arguments and plain attributes still do"

    class CountCB:
        stateless = "n_seen", "limit"

        def __init__(self, limit, weights):
            self.limit, self.weights = limit, weights
            self.n_seen, self.note, self.best = 0, "mine", [torch.ones(2)]

        def after_batch(self, trainer):
            self.n_seen += 1

    log = LoggerCB(JSONLines(tmp_path / "log.jsonl"))
    cbs = [BasicTrainCB(), MetricsCB(show=False), FreezeCB("0"), EMACB(0.9), KeepBestCB(), EarlyStoppingCB()]
    fit(make_run([*cbs, CountCB(3, torch.ones(2)), log]), 1)
    lines = [json.loads(o) for o in (tmp_path / "log.jsonl").read_text().splitlines()]
    (run,) = [o for o in lines if o["table"] == "runs"]
    told = {o["name"]: o["settings"] for o in run["callbacks"]}
    assert told["FreezeCB"] == {"batch_norms": False, "on_valid": False, "ranges": "[('0', 0, None)]"}
    assert told["CountCB"] == {"limit": 3, "note": "mine", "weights": "tensor([1., 1.])"}
    assert not {"weights", "best_epoch", "seen", "judge"} & told["KeepBestCB"].keys()
    assert not {"evaluated", "weights_swapped", "n_averaged"} & told["EMACB"].keys()
    assert (told["EMACB"]["decay"], told["KeepBestCB"]["monitor"]) == (0.9, "valid_loss")
    assert told["EarlyStoppingCB"]["patience"] == EarlyStoppingCB().patience
    assert not {"best", "n_bad", "n_seen"} & told["EarlyStoppingCB"].keys()
    assert "Parameter" not in json.dumps(run)


# Watching only


@pytest.mark.shows("NEMO-19")
def test_no_batch_waits_for_the_device_unless_it_logs():
    "Reading is an error in all batches but those that log"
    keep = Keep()

    class InsideCB:
        order = -10_000

        def __init__(self, mode):
            self.mode = mode

        def before_batch(self, trainer):
            self.mode.inside = not trainer.training or trainer.n_updates + 1 not in due(2 * N, 5)

        def cleanup_batch(self, trainer):
            self.mode.inside = False

    with RefuseToWait() as mode:
        trainer = make_trainer(
            InsideCB(mode), LoggerCB(keep, every=5, values=dict(size=lambda t: t.preds.abs().mean()))
        )
    with mode:
        trainer.fit(2)
    assert list(keep.of("steps")) == due(2 * N, 5)


@pytest.mark.shows("NEMO-18", "PTA-21")
def test_only_the_first_of_several_processes_logs(monkeypatch):
    "The plan leaves it out in the others, so they do not even ask for its values"
    asked = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, n in ((0, 1), (1, 0)):
        monkeypatch.setenv("RANK", str(rank))
        keep = Keep()
        make_trainer(LoggerCB(keep, values=dict(one=lambda t: asked.append(1) or 1))).fit(1)
        assert len(keep.runs) == len(keep.ends) == n and bool(keep.rows) == bool(n)
    assert len(asked) == 1


# Files


def read_csv(folder):
    tables = {}
    for file in Path(folder).glob("*.csv"):
        with open(file, newline="", encoding="utf-8") as f:
            tables[file.stem] = list(csv.DictReader(f, strict=True))
    return tables


def read_jsonl(path):
    tables = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        tables.setdefault(row.pop("table"), []).append({k: str(v) for k, v in row.items()})
    return tables


def read_sqlite(path):
    with closing(sqlite3.connect(path)) as db:
        db.row_factory = sqlite3.Row
        names = [o[0] for o in db.execute("select name from sqlite_master where type = 'table'")]
        return {o: [as_texts(row) for row in db.execute(f"select * from {o} order by rowid")] for o in names}


def as_texts(row):
    return {k: str(row[k]) for k in row.keys() if row[k] is not None}


FILES = {
    "csv": (lambda folder: CSV(folder / "logs"), lambda folder: read_csv(folder / "logs")),
    "jsonl": (
        lambda folder: JSONLines(folder / "new" / "log.jsonl"),
        lambda folder: read_jsonl(folder / "new" / "log.jsonl"),
    ),
    "sqlite": (
        lambda folder: SQLite(folder / "new" / "log.db"),
        lambda folder: read_sqlite(folder / "new" / "log.db"),
    ),
}
files = pytest.mark.parametrize("kind", FILES)


@pytest.mark.shows("NEMO-22", "AIT-57")
@files
def test_files_hold_the_whole_run(kind, tmp_path):
    "Rows at their steps, media, alerts and the map"
    make, read = FILES[kind]

    def show(trainer):
        trainer.history.write_media("a/b: text", "text", 'Größe, "x"\nnext')
        for _ in range(2):
            trainer.history.write_media("tone", "audio", torch.sin(torch.arange(100.0)), rate=8000)

    trainer = make_trainer(
        LoggerCB(make(tmp_path), every=5, media=show, alerts=("loss", ">", -1), params=dict(seed=3))
    )
    trainer.fit(2, lr=0.1)
    tables, run = read(tmp_path), trainer.LoggerCB.state_dict()["id"]
    assert all(o["run"] == run for rows in tables.values() for o in rows)
    assert [int(o["step"]) for o in tables["steps"]] == due(2 * N, 5) and [
        float(o["valid_loss"]) for o in tables["epochs"]
    ] == trainer.history["valid_loss"]
    assert (
        "seed" in tables["runs"][0]["params"]
        and "BasicTrainCB" in tables["runs"][0]["callbacks"]
        and len(tables["alerts"]) == 1
    )
    texts = [o for o in tables["media"] if o["kind"] == "text"]
    assert [o["value"] for o in texts] == ['Größe, "x"\nnext'] * 5
    sounds = [o["file"] for o in tables["media"] if o["kind"] == "audio"]
    assert len(set(sounds)) == 10
    for o in sounds:
        assert (next(tmp_path.rglob(Path(o).name))).read_bytes() == wav_bytes(
            torch.sin(torch.arange(100.0)), 8000
        )


@files
def test_two_runs_in_one_place_stay_apart(kind, tmp_path):
    make, read = FILES[kind]
    for _ in range(2):
        make_trainer(LoggerCB(make(tmp_path), every=5)).fit(1)
    rows = read(tmp_path)["steps"]
    assert len({o["run"] for o in rows}) == 2 and [int(o["step"]) for o in rows] == [1, 5, 10] * 2


def without_times(tables):
    drop = ("seconds_per_step", "elapsed", "total_seconds", "run")
    return {
        name: [{k: v for k, v in row.items() if k not in drop} for row in rows]
        for name, rows in tables.items()
        if name != "runs"
    }


@files
@pytest.mark.parametrize("at", [4, 6, 7, 8, 13, 20])
def test_the_log_of_a_run_that_was_killed_is_that_of_one_that_was_not(kind, at, tmp_path):
    "Rows after the checkpoint are dropped, those before it stay, means go on"
    make, read = FILES[kind]

    def cbs(folder):
        log = LoggerCB(
            make(folder),
            every=2,
            alerts=("lr", ">", 0.015),
            media=lambda t: t.history.write_media("note", "text", str(t.n_updates)),
        )
        return [BasicTrainCB(), MetricsCB(show=False), RecorderCB(number=lambda t: t.batch_num), log]

    whole = fit(make_run(cbs(tmp_path / "whole")))
    killed = make_run(
        [
            *cbs(tmp_path / "cut"),
            CheckpointCB(tmp_path / "store", every=3),
            CutCB("after_backward", lambda t: t.n_updates == at),
        ]
    )
    with pytest.raises(Cut):
        fit(killed)
    again = fit(make_run([*cbs(tmp_path / "cut"), CheckpointCB(tmp_path / "store", every=3)]))
    same(whole, again)
    expected, found = without_times(read(tmp_path / "whole")), without_times(read(tmp_path / "cut"))
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        assert len(found[name]) == len(rows), name
        for a, b in zip(rows, found[name]):
            assert a.keys() == b.keys()
            for k in a:
                assert a[k] == b[k] or float(a[k]) == pytest.approx(float(b[k]), rel=1e-5), (name, k)


@files
@pytest.mark.parametrize("order", [35, 200])
def test_the_end_of_a_run_that_was_killed_when_all_was_trained_is_logged_once(kind, order, tmp_path):
    "Before the last checkpoint, or after it and before the logs were closed"
    make, read = FILES[kind]

    def start(folder):
        return make_run(
            [
                BasicTrainCB(),
                MetricsCB(show=False),
                LoggerCB(make(folder), every=4),
                CheckpointCB(folder / "store"),
            ]
        )

    def after_fit(trainer):
        shutil.copytree(tmp_path / "whole", tmp_path / "killed")  # As a kill leaves it

    after_fit.order = order
    whole = fit(start(tmp_path / "whole"), 2, callbacks=after_fit)
    assert "fits" not in read(tmp_path / "killed")
    for _ in range(3):
        again = fit(start(tmp_path / "killed"), 2)
        assert without_times(read(tmp_path / "killed")) == without_times(read(tmp_path / "whole"))
    assert len(read(tmp_path / "killed")["runs"]) == 2
    for trainer in (whole, again):
        fit(trainer, 1)
    assert [(o["outcome"], o["n_updates"]) for o in read(tmp_path / "killed")["fits"]] == [
        ("finished", "14"),
        ("finished", "7"),
    ]


@files
def test_a_second_fit_that_was_killed_before_its_checkpoint_leaves_no_rows(kind, tmp_path):
    "However often: the fit before it, which is complete, tells how many rows stay"
    make, read = FILES[kind]

    def two_fits(name, copied=None):
        def after_backward(trainer):
            if trainer.n_updates == 5 and copied:
                shutil.copytree(tmp_path / name, tmp_path / copied)  # As a kill leaves it

        log = LoggerCB(make(tmp_path / name), every=2)
        cbs = [BasicTrainCB(), MetricsCB(show=False), log, CheckpointCB(tmp_path / name / "store")]
        trainer = fit(make_run(cbs), 1)
        fit(trainer, 1, callbacks=after_backward)

    two_fits("whole", copied="killed")
    two_fits("killed", copied="killed again")
    two_fits("killed again")
    assert without_times(read(tmp_path / "killed again")) == without_times(read(tmp_path / "whole"))


@files
def test_a_run_that_is_taken_back_takes_back_its_log(kind, tmp_path):
    make, read = FILES[kind]
    trainer = make_run([BasicTrainCB(), MetricsCB(show=False), RewindCB(), LoggerCB(make(tmp_path), every=2)])
    fit(trainer)
    first = without_times(read(tmp_path))
    trainer.rewind(1)
    fit(trainer)
    again = without_times(read(tmp_path))
    assert [o["step"] for o in again["steps"]] == [o["step"] for o in first["steps"]] and [
        o["loss"] for o in again["steps"]
    ] == [o["loss"] for o in first["steps"]]
    assert len(again["epochs"]) == 3


# Failing logs


class Broken(Keep):
    "Fails at some calls"

    def __init__(self, method, when):
        super().__init__()
        self.method, self.when, self.n = method, when, 0

    def _maybe(self, method):
        if method != self.method:
            return
        self.n += 1
        if self.when(self.n):
            raise ConnectionError("nobody answers")

    def row(self, values, step, table):
        self._maybe("row") or super().row(values, step, table)

    def start(self, run):
        self._maybe("start") or super().start(run)

    def close(self, ok):
        self._maybe("close") or super().close(ok)

    def alert(self, text, step):
        self._maybe("alert") or super().alert(text, step)

    def media(self, *args, **kwargs):
        self._maybe("media") or super().media(*args, **kwargs)


def rows_of(*logs, **options):
    trainer = make_trainer(EvaluatorCB(), LoggerCB(list(logs), every=5, alerts=("loss", ">", -1), **options))
    trainer.fit(2)
    return trainer


@pytest.mark.parametrize("method", ["row", "media", "alert", "close"])
@pytest.mark.parametrize(
    "when", [lambda n: True, lambda n: n == 1, lambda n: n > 2], ids=["always", "once", "from then on"]
)
def test_a_log_that_fails_costs_one_warning_and_nobody_else_anything(method, when):
    "The issue: training goes on, one warning, nothing else lost"
    alone, other, broken = Keep(), Keep(), Broken(method, when)
    plain = rows_of(alone)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = rows_of(broken, other)
    fails = [i for i in range(1, broken.n + 1) if when(i)]
    assert len(caught) == bool(fails)
    for o in caught:
        assert (
            "`Broken` failed at step" in str(o.message)
            and "nobody answers" in str(o.message)
            and "Training goes on" in str(o.message)
            and "unsent" in str(o.message)
        )
    names = lambda keep: ([(t, s, sorted(v)) for t, s, v in keep.rows], keep.seen, keep.alerts, keep.ends)
    assert names(other) == names(alone)
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), plain.model.parameters()))
    missing = trainer.LoggerCB.unsent.get("Broken", [])
    assert sorted([(t, s) for t, s, _ in broken.rows] + [(t, s) for _, s, t in missing]) == sorted(
        (t, s) for t, s, _ in alone.rows
    )


def test_a_log_that_fails_for_a_while_gets_all_rows_in_their_order():
    broken, other = Broken("row", lambda n: 2 <= n <= 3), Keep()
    with pytest.warns(UserWarning, match="lacks a row"):
        trainer = rows_of(broken, other)
    assert [o[:2] for o in broken.rows] == [o[:2] for o in other.rows] and not trainer.LoggerCB.unsent


def test_a_log_that_cannot_start_is_an_error_and_the_others_are_closed():
    first, broken = Keep(), Broken("start", lambda n: True)
    trainer = make_trainer(LoggerCB([first, broken]))
    with pytest.raises(ConnectionError) as caught:
        trainer.fit(1)
    assert any("`Broken` could not be started, so nothing was trained" in o for o in caught.value.__notes__)
    assert trainer.n_updates == 0 and first.ends == [False] and not broken.ends
    broken.method = None
    trainer.fit(1)
    assert first.ends == [False, True] and broken.ends == [True]


def below_a_file(folder, make):
    (folder / "file").write_text("no folder")
    return make(folder / "file" / "logs")


@pytest.mark.parametrize(
    "make",
    [CSV, lambda o: JSONLines(o / "log.jsonl"), lambda o: SQLite(o / "log.db"), TensorBoard],
    ids=["csv", "jsonl", "sqlite", "tensorboard"],
)
def test_a_place_that_cannot_be_written_is_an_error_before_the_first_batch(make, tmp_path):
    trainer = make_trainer(LoggerCB(below_a_file(tmp_path, make)))
    with pytest.raises(OSError, match="cannot write to .*Choose"):
        trainer.fit(1)
    assert trainer.n_updates == 0 and [o.name for o in tmp_path.iterdir()] == ["file"]


def test_what_a_log_cannot_show_is_skipped_with_one_warning(capsys):
    def show(trainer):
        trainer.history.write_media("picture", "image", torch.zeros(1, 2, 2))
        trainer.history.write_media("said", "text", "hello")

    keep = Keep()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(
            LoggerCB([Screen("no such value"), keep, lambda values, step: None], every=2, media=show)
        ).fit(2)
    (message,) = [str(o.message) for o in caught]
    assert "`Screen` cannot show image, so `picture`" in message and capsys.readouterr().out.count(
        "said\nhello"
    ) == len(due(2 * N, 2))
    assert [o[0] for o in keep.seen] == ["picture", "said"] * len(due(2 * N, 2))


@pytest.mark.shows("NEMO-16")
@pytest.mark.parametrize(
    "error, ok", [(ValueError("x"), False), (KeyboardInterrupt(), False), (CancelFitException("x"), True)]
)
def test_however_a_fit_ends_logs_are_closed_and_lack_nothing(error, ok):
    "Total time and the end"

    def after_backward(trainer):
        if trainer.epoch == 1 and trainer.batch_num == 5:
            raise error

    keep = Keep()
    trainer = make_trainer(after_backward, RecorderCB(number=lambda t: t.batch_num), LoggerCB(keep, every=2))
    try:
        trainer.fit(3)
    except (ValueError, KeyboardInterrupt) as e:
        assert e is error
    assert keep.ends == [ok] and keep.of("fits")[N + 5]["outcome"] == type(error).__name__
    assert list(keep.of("steps")) == due(N + 5, 2) and list(keep.of("epochs")) == [N]


def test_a_fit_that_never_began_tells_nobody():
    class BadCB:
        order = 200

        def before_fit(self, trainer):
            raise ValueError

    keep = Keep()
    with pytest.raises(ValueError):
        make_trainer(BadCB(), LoggerCB(keep)).fit(1)
    assert not (keep.runs or keep.rows or keep.ends)


# Mistakes


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(every=0), "`every` is 0, but updates are counted"),
        (dict(every=-1), "counted"),
        (dict(every=2.5), "counted"),
        (dict(every=True), "counted"),
        (dict(epochs=0), "`epochs` is 0"),
        (dict(every=None, epochs=None), "leave nothing to log"),
        (dict(every=None, values="loss_func"), "`every` is None"),
        (dict(every=None, media=print), "`every` is None"),
        (dict(epochs=None, columns=["valid_loss"]), "`epochs` is None"),
        (dict(values=dict(lr=len)), "every row has already"),
        (dict(alerts=[("loss", "=", 1)]), "a direction and a level"),
        (dict(alerts="loss > 1"), "a direction and a level"),
        (dict(alerts=[("loss", ">", float("nan"))]), "a direction and a level"),
    ],
)
def test_contradictory_frequencies_and_names_are_refused_where_they_are_typed(options, message):
    with pytest.raises(ValueError, match=message):
        LoggerCB(print, **options)


@pytest.mark.parametrize(
    "to, kind, message",
    [
        ("logs", TypeError, "does not say what to write there"),
        (Path("logs"), TypeError, "CSV"),
        (CSV, TypeError, "is a class"),
        ([], ValueError, "is empty"),
        (object(), TypeError, "can take nothing"),
        (None, TypeError, "can take nothing"),
        ([print, print], ValueError, "twice"),
    ],
)
def test_what_is_no_log_is_refused_where_it_is_typed(to, kind, message):
    with pytest.raises(kind, match=message):
        LoggerCB(to)


@pytest.mark.parametrize("options", [dict(columns=["vaild_loss"]), dict(alerts=("vaild_loss", ">", 1))])
def test_names_that_nobody_records_are_an_error_before_the_first_batch(options):
    trainer = make_trainer(LoggerCB(print, **options))
    with pytest.raises(LookupError, match="`LoggerCB` watches `vaild_loss`.*Did you mean `valid_loss`"):
        trainer.fit(1)
    assert trainer.n_updates == 0


def test_a_column_that_never_came_is_told_in_the_end():
    class UndeclaredCB:
        def after_epoch(self, trainer):
            if trainer.epoch == 1:
                trainer.history.write(rare=1.0)

    def run(*columns):
        make_trainer(UndeclaredCB(), LoggerCB(lambda values, step: None, columns=columns)).fit(2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run("rare", "valid_loss")
    with pytest.warns(UserWarning, match=r"was to log the columns \['rear'\], but no row"):
        run("rare", "rear")


@pytest.mark.parametrize(
    "values, kind, message",
    [
        (dict(p=lambda t: t.preds), TypeError, r"`p` and got a tensor of shape \(4, 1\)"),
        (dict(p=lambda t: "x"), TypeError, "got 'x'"),
        ("modle", AttributeError, "Did you mean `model`"),
        (
            "model.biass",
            AttributeError,
            "asked for `model.biass`, and a `Linear` has no.*Did you mean `bias`",
        ),
        ("opt.lr", AttributeError, "a `SGD` has no `lr`. For anything else give a function"),
        ("opt.optimizer_step_pre_hook", AttributeError, "Did you mean `register_step_pre_hook`"),
    ],
)
def test_a_value_that_is_no_number_or_not_there_is_an_error_at_the_first_step(values, kind, message):
    with pytest.raises(kind, match=message):
        make_trainer(LoggerCB(lambda values, step: None, values=values)).fit(1)


def test_media_become_files_that_others_read():
    for kind, value, ending in [
        ("text", "x", ".txt"),
        ("table", [dict(a=1), dict(b=2)], ".csv"),
        ("image", torch.rand(4, 4) * 3 - 1, ".png"),
        ("image", torch.rand(1, 4, 4).bfloat16(), ".png"),
        ("audio", torch.randn(1, 9).half(), ".wav"),
    ]:
        found, data = media_file(kind, value, rate=100, anything="else")
        assert found == ending and data
    with pytest.raises(ValueError, match="is no image"):
        media_file("image", torch.zeros(2, 3, 4, 5))


@files
def test_a_fit_that_is_taken_back_is_no_part_of_the_log(kind, tmp_path):
    make, read = FILES[kind]
    trainer = make_trainer(LoggerCB(make(tmp_path), every=5))
    trainer.fit(1)
    before = read(tmp_path)
    with trainer.snapshot():
        trainer.fit(1)
    copy.deepcopy(trainer)
    trainer.fit(1)
    steps = [int(o["step"]) for o in read(tmp_path)["steps"]]
    assert (
        before["steps"] == read(tmp_path)["steps"][:3] and steps[:3] == [1, 5, 10] and steps[-2:] == [15, 20]
    )


class Sorts(Keep):
    "Takes no row that has a text in `odd`"

    def __init__(self, error):
        super().__init__()
        self.error = error

    def row(self, values, step, table):
        if "odd" in values:
            raise self.error("no such value")
        super().row(values, step, table)


def test_what_may_come_again_is_sent_to_logs_that_can_drop_it(tmp_path):
    "Also when the run never goes on; the others have what came since it was saved"

    class Service(Keep):
        hides_by_step = True

    def start(*more):
        return make_run([BasicTrainCB(), ClipGradCB(1.0), LoggerCB(logs, every=2), *more])

    def stop():
        return CutCB("after_backward", lambda t: t.n_updates == 5)

    logs = keep, service = Keep(), Service()
    for more in ([], [CheckpointCB(tmp_path, every=3)]):
        with pytest.raises(Cut):
            fit(start(stop(), *more))
        assert list(keep.of("batches")) == [1, 2, 4]
        assert list(service.of("batches")) == ([4] if more else [1, 2, 4])
        keep.rows.clear()
        service.rows.clear()


@pytest.mark.parametrize("error", [TypeError, ValueError, OverflowError])
def test_a_row_that_a_log_can_never_take_holds_up_no_other(error):
    def after_epoch(trainer):
        if trainer.training and trainer.epoch == 0:
            trainer.history.write(odd="x")

    log, other = Sorts(error), Keep()
    trainer = make_trainer(after_epoch, LoggerCB([log, other], every=5))
    with pytest.warns(UserWarning, match="`Sorts` failed at step") as caught:
        trainer.fit(3)
    assert len([o for o in caught if "failed at step" in str(o.message)]) == 1
    assert [o[:2] for o in log.rows] == [o[:2] for o in other.rows if "odd" not in o[2]] and len(
        log.rows
    ) == len(other.rows) - 1
    assert [o[1:] for o in trainer.LoggerCB.unsent["Sorts"]] == [(N, "epochs")]


def test_a_number_that_is_too_large_for_tensorboard_costs_one_row(tmp_path):
    def after_epoch(trainer):
        if trainer.training and trainer.epoch == 0:
            trainer.history.write(large=10**400)

    trainer = make_trainer(after_epoch, LoggerCB(TensorBoard(tmp_path), every=None))
    with pytest.warns(UserWarning, match="OverflowError"):
        trainer.fit(3)
    assert [o[1:] for o in trainer.LoggerCB.unsent["TensorBoard"]] == [(N, "epochs")]


@files
def test_columns_called_run_and_step_are_logged_under_another_name(kind, tmp_path):
    "Every row has a run and a step of its own, and one would hide the other"

    def after_epoch(trainer):
        if not trainer.training:
            return
        trainer.history.write(step=5, run="mine")
        trainer.history.write_batches(True, range(trainer.n_batches), step=[7.0] * trainer.n_batches)

    make, read = FILES[kind]
    trainer = make_trainer(after_epoch, LoggerCB(make(tmp_path), every=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(2)
    tables = read(tmp_path)
    assert not trainer.LoggerCB.unsent and [
        (str(o["step"]), str(o["step_"]), o["run_"]) for o in tables["epochs"]
    ] == [("12", "5", "mine"), ("24", "5", "mine")]
    assert [int(o["step"]) for o in tables["batches"]] == due(2 * N, 4) and {
        float(o["step_"]) for o in tables["batches"]
    } == {7.0}


@pytest.mark.parametrize(
    "make",
    [CSV, TensorBoard, lambda o: JSONLines(o / "log.jsonl"), lambda o: SQLite(o / "log.db")],
    ids=["csv", "tensorboard", "jsonl", "sqlite"],
)
def test_two_logs_to_one_place_are_refused(make, tmp_path):
    "On going on the one would cut what the other has written"
    with pytest.raises(ValueError, match="two logs.*each row would be there twice"):
        LoggerCB([make(tmp_path), make(tmp_path)])
    LoggerCB([make(tmp_path / "a"), make(tmp_path / "b"), CSV(tmp_path / "c"), TensorBoard(tmp_path / "c")])


@pytest.mark.parametrize("make", [CSV, TensorBoard, JSONLines, SQLite])
def test_an_address_is_no_folder_for_a_log(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for o in ("s3://bucket/logs", Path("memory://logs")):
        with pytest.raises(ValueError, match="is an address.*UploadCB"):
            make(o)
    for o in (None, 3):
        with pytest.raises(TypeError, match="is no path"):
            make(o)
    assert not list(tmp_path.iterdir())


def test_logs_that_could_not_be_called_are_refused_where_they_are_typed():
    with pytest.raises(
        TypeError, match=r"`<lambda>` is called with \(values, step\), and does not take that"
    ):
        LoggerCB(lambda values: None)
    for name in ("row", "start", "alert", "close"):
        cls = type("Bad", (Keep,), {name: lambda self: None})
        with pytest.raises(TypeError, match=rf"`Bad.{name}` is called with \("):
            LoggerCB(cls())
    for fine in (
        lambda values, step: None,
        lambda *args: None,
        lambda values, step, *, table: None,
        print,
        {}.update,
    ):
        LoggerCB(fine)
    for bad in (3, "lr"):
        with pytest.raises(TypeError, match="hyper-parameters have names"):
            LoggerCB(print, params=bad)


def test_a_log_may_cancel_the_fit_and_not_its_end():
    def enough(values, step):
        if step > 3:
            raise CancelFitException("enough")

    trainer = make_trainer(LoggerCB(enough, every=2))
    trainer.fit(3)
    assert trainer.n_updates < N
