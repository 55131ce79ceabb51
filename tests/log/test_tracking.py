"""What is written down and shown: `log/tracking.py`, `inspection.py`, `demo.py` and the imports.

Records are checked against the objects that they are about, tables against what really ran or is really
there, and the demo against what a person reads in a shell.
"""

import copy
import csv
import errno
import inspect
import io
import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

import isaac_loop.log.row_files as row_files
import isaac_loop.recipes.demo as demo
from isaac_loop.device.device import DeviceCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.show.progress import ProgressCB
from isaac_loop.log.row_files import CSVRows, JSONRows, SQLiteRows, write_csv, write_jsonl, write_sqlite
from isaac_loop.log.run_facts import settings, source_of
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.train.training import BasicTrainCB, MomentumTrainCB, NBatchCB, OneBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import (
    EVENTS,
    SPANS,
    CancelEpochException,
    CancelException,
    CancelFitException,
    replaces,
)
from isaac_loop.loop.spans import with_cbs
from isaac_loop.inspection.loop_tables import callback_table, event_table, show_source, state_table
from isaac_loop.models.small_models import SimpleNet
from isaac_loop.loop.trainer import Trainer
from isaac_loop.loop.shared_attributes import STATE


def make_trainer(callbacks, cls=Trainer, model=None, opt_func=optim.SGD, loss_func=F.mse_loss):
    batches = [(torch.ones(2, 4), torch.ones(2, 1))] * 3
    return cls(
        DataLoaders(batches, batches[:2]),
        loss_func,
        opt_func,
        SimpleNet(4, 3, 1) if model is None else model,
        callbacks,
    )


def with_run(cb, rows):
    return [{"run": cb.run, **row} for row in rows]


# TrackingCB


@pytest.mark.shows("ISA-62", "ISA-63")
def test_a_fit_an_epoch_and_a_batch_each_leave_a_row():
    trainer = make_trainer([MomentumTrainCB(0.9), MetricsCB(show=False), TrackingCB()])
    trainer.fit(2, lr=0.05)
    cb = trainer.TrackingCB
    (row,) = cb.fit_stats
    assert row["model"] == str(trainer.model) and row["model_class"] == "SimpleNet"
    assert row["model_source"] == inspect.getsource(SimpleNet)
    assert (row["loss_func"], row["opt_func"], row["lr"], row["n_epochs"]) == ("mse_loss", "SGD", 0.05, 2)
    assert row["callbacks"] == ["MomentumTrainCB", "MetricsCB", "TrackingCB"]
    assert row["MomentumTrainCB.momentum"] == 0.9
    assert cb.epoch_stats == with_run(cb, trainer.history)
    assert cb.batch_stats == with_run(cb, trainer.history.batches) and len(cb.batch_stats) == 2 * (3 + 2)
    assert set(cb.batch_stats[0]) >= {"fit", "epoch", "training", "batch", "loss"}


class FirstCB:
    name = "First"
    momentum, shared, callbacks = 0.1, "first", ()

    def before_fit(self, trainer):
        pass


class SecondCB(FirstCB):
    name = "Second"
    momentum, shared = 0.2, "second"

    def __init__(self):
        self.own, self._private, self.can_be_called = 3, 4, print

    @property
    def computed(self):
        return self.own + 1


@pytest.mark.shows("ISA-65")
def test_equal_settings_of_two_callbacks_do_not_collide():
    "Each has the name of its callback before it"
    trainer = make_trainer([BasicTrainCB(), FirstCB(), SecondCB(), TrackingCB()])
    trainer.fit(1)
    (row,) = trainer.TrackingCB.fit_stats
    assert (row["First.momentum"], row["Second.momentum"]) == (0.1, 0.2)
    assert (row["First.shared"], row["Second.shared"]) == ("first", "second")


@pytest.mark.shows("ISA-63")
def test_every_public_attribute_that_cannot_be_called_is_a_setting():
    assert settings(SecondCB()) == {
        "Second.computed": 4,
        "Second.momentum": 0.2,
        "Second.name": "Second",
        "Second.own": 3,
        "Second.shared": "second",
    }


@pytest.mark.shows("ISA-63")
def test_settings_of_all_built_in_callbacks_are_found():
    trainer = make_trainer(
        [
            BasicTrainCB(),
            NBatchCB(2),
            MetricsCB(train_metrics=True, show=False),
            DeviceCB("cpu"),
            ProgressCB("plain", seconds=3),
            TrackingCB(),
        ]
    )
    trainer.fit(1)
    (row,) = trainer.TrackingCB.fit_stats
    expected = {
        "NBatchCB.n_batches": 2,
        "MetricsCB.train_metrics": True,
        "DeviceCB.device": "device(type='cpu')",
        "ProgressCB.place": "plain",
        "ProgressCB.seconds": 3,
    }
    assert {o: row[o] for o in expected} == expected


@pytest.mark.shows("ISA-63")
def test_records_are_plain_data():
    "Readable without our code, whatever a callback keeps"

    class OddCB:
        def __init__(self):
            self.array, self.long, self.orders = torch.ones(2), list(range(10_000)), NBatchCB.order

        def before_fit(self, trainer):
            pass

    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), OddCB(), TrackingCB()])
    trainer.fit(1)
    cb = trainer.TrackingCB
    for rows in (cb.fit_stats, cb.epoch_stats, list(cb.batch_stats)):
        assert json.loads(json.dumps(rows)) == rows
    row = cb.fit_stats[0]
    assert row["OddCB.array"] == "tensor([1., 1.])" and row["OddCB.orders"] == -100
    assert (
        row["OddCB.long"].startswith("[0, 1, 2")
        and row["OddCB.long"].endswith("...]")
        and len(row["OddCB.long"]) <= 200
    )


@pytest.mark.shows("ISA-63")
def test_two_fits_are_kept_apart_and_keep_what_they_were_trained_with():
    trainer = make_trainer([MomentumTrainCB(0.9), MetricsCB(show=False), TrackingCB()])
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


@pytest.mark.shows("ISA-65")
def test_one_object_may_track_two_trainers():
    "Nothing is taken from a global"
    cb = TrackingCB()
    for model in (SimpleNet(4, 3, 1), nn.Linear(4, 1)):
        make_trainer([BasicTrainCB(), MetricsCB(show=False), cb], model=model).fit(1)
    assert [row["model_class"] for row in cb.fit_stats] == ["SimpleNet", "Linear"]
    assert (len(cb.epoch_stats), len(cb.batch_stats)) == (2, 10)


@pytest.mark.parametrize("path", ["runs.db", "runs.jsonl", "runs"])
def test_batches_are_kept_once_and_written_in_blocks(tmp_path, monkeypatch, path):
    "Nothing beside the history's own columns; what failed midway is not written twice"
    seen, fails = [], iter([False, False, True])

    def append(table, rows):
        if table == "batch_stats":
            if next(fails, False):
                raise OSError("full")
            seen.append(len(rows))
        real(table, rows)

    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), TrackingCB(tmp_path / path)])
    cb, file = trainer.TrackingCB, trainer.TrackingCB._outlet.log.file
    real = file.append
    trainer.fit(1)
    monkeypatch.setattr(file, "append", append)
    monkeypatch.setattr("isaac_loop.log.tracking._BLOCK", 2)
    with pytest.warns(UserWarning, match="could not write"):
        trainer.fit(2)
    assert seen == [2, 2, 1, 2, 2, 1] and [o[1] for o in cb.batch_stats.parts] == [trainer.history.batches]
    assert len(cb.batch_stats) == 15 == len(trainer.history.batches)


def test_the_rows_of_epochs_are_copies():
    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), TrackingCB()])
    trainer.fit(1)
    trainer.history.write(valid_loss="changed later")
    assert trainer.TrackingCB.epoch_stats[0]["valid_loss"] != "changed later"


@pytest.mark.shows("ISA-63")
@pytest.mark.parametrize(
    "error",
    [ValueError(), KeyboardInterrupt(), CancelFitException(), CancelEpochException()],
    ids=lambda o: type(o).__name__,
)
def test_a_fit_that_is_cut_short_leaves_its_record(error):
    "Everything that was measured until then"

    class EndCB:
        order = 30

        def after_batch(self, trainer):
            if (trainer.epoch, trainer.batch_num) == (1, 1):
                raise error

    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), TrackingCB(), EndCB()])
    try:
        trainer.fit(3)
    except (ValueError, KeyboardInterrupt) as e:
        assert e is error
    cb = trainer.TrackingCB
    assert len(cb.fit_stats) == 1
    assert cb.batch_stats == with_run(cb, trainer.history.batches) and len(cb.batch_stats) >= 5
    assert [row["epoch"] for row in cb.epoch_stats] == (
        [0, 1, 2] if isinstance(error, CancelEpochException) else [0]
    )


@pytest.mark.shows("ISA-62")
def test_tracking_works_without_metrics():
    trainer = make_trainer([BasicTrainCB(), TrackingCB()])
    trainer.fit(2)
    fits, epochs, batches = trainer.TrackingCB.frames()
    assert len(fits) == 1 and epochs.empty and batches.empty


@pytest.mark.shows("ISA-63")
def test_everything_comes_as_three_data_frames():
    trainer = make_trainer([MomentumTrainCB(0.9), MetricsCB(show=False), TrackingCB()])
    trainer.fit(2)
    trainer.fit(1)
    fits, epochs, batches = frames = trainer.TrackingCB.frames()
    assert all(isinstance(o, pd.DataFrame) for o in frames)
    assert [len(o) for o in frames] == [2, 3, 15]
    assert fits["MomentumTrainCB.momentum"].tolist() == [0.9, 0.9]
    assert epochs["valid_loss"].tolist() == trainer.history["valid_loss"]
    assert batches["loss"].tolist() == trainer.history.batches["loss"]
    joined = batches.merge(epochs, on=["run", "fit", "epoch"]).merge(fits, on=["run", "fit"])
    assert len(joined) == 15 and set(joined.model_class) == {"SimpleNet"}


def test_functions_partials_and_modules_have_names():
    trainer = make_trainer(
        [BasicTrainCB(), TrackingCB()], opt_func=partial(optim.SGD, momentum=0.9), loss_func=nn.MSELoss()
    )
    trainer.fit(1)
    (row,) = trainer.TrackingCB.fit_stats
    assert (row["opt_func"], row["loss_func"]) == ("SGD(momentum=0.9)", "MSELoss")


@pytest.mark.shows("ISA-63")
def test_a_model_without_source_has_none():
    "A class that was typed into a shell"
    scope = {"nn": nn}
    exec("class Typed(nn.Linear): pass", scope)
    assert source_of(scope["Typed"](4, 1)) is None
    trainer = make_trainer([BasicTrainCB(), TrackingCB()], model=scope["Typed"](4, 1))
    trainer.fit(1)
    assert trainer.TrackingCB.fit_stats[0]["model_class"] == "Typed"


@pytest.mark.shows("ISA-63")
def test_two_equal_fits_leave_equal_settings():
    "No addresses in memory, and a property that has nothing to tell stops nobody"

    class ShyCB:
        def __init__(self):
            self.helper = object()

        @property
        def result(self):
            raise RuntimeError("nothing measured yet")

        def before_fit(self, trainer):
            pass

    assert (
        settings(ShyCB())
        == settings(ShyCB())
        == {"ShyCB.helper": "<object object>", "ShyCB.result": "(RuntimeError: nothing measured yet)"}
    )


@pytest.mark.shows("ISA-63")
def test_a_long_setting_costs_no_more_than_its_beginning():
    "A list of tensors from the last run, of which a few are looked at"

    class Counted:
        looked_at = 0

        def __repr__(self):
            Counted.looked_at += 1
            return "Counted()"

    class ListCB:
        kept = [Counted() for _ in range(10_000)]

        def before_fit(self, trainer):
            pass

    assert len(settings(ListCB())["ListCB.kept"]) <= 200 and Counted.looked_at <= 100


# Stores: what is read back here is read with the standard library alone


def read_sqlite(path):
    "All tables as lists of dicts"
    with closing(sqlite3.connect(path)) as db:
        db.row_factory = sqlite3.Row
        names = [o[0] for o in db.execute("select name from sqlite_master where type = 'table'")]
        quoted = {o: '"' + o.replace('"', '""') + '"' for o in names}
        return {
            o: [dict(row) for row in db.execute(f"select * from {quoted[o]} order by rowid")] for o in names
        }


def read_jsonl(path):
    tables = {}
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        row = json.loads(line, parse_constant=lambda o: pytest.fail(f"{o} is no JSON"))
        tables.setdefault(row.pop("table"), []).append(row)
    return tables


def read_csv(path):
    "All runs' tables"
    tables, usual = {}, csv.field_size_limit(10**9)
    for file in sorted(path.rglob("*.csv")):
        with open(file, newline="", encoding="utf-8") as f:
            tables.setdefault(file.stem, []).extend(csv.DictReader(f, strict=True))
    csv.field_size_limit(usual)
    return tables


STORES = {
    ".sqlite": (write_sqlite, read_sqlite),
    ".jsonl": (write_jsonl, read_jsonl),
    "": (write_csv, read_csv),
}
stores = pytest.mark.parametrize("kind", STORES, ids=lambda o: o or "csv")


def same(kind, value, found):
    "Whether `found` is what a file of this kind should say about `value`"
    if value is None:
        return found in (None, "")
    if isinstance(value, float) and math.isnan(value):
        return found is None if kind == ".sqlite" else math.isnan(float(found))
    if isinstance(value, (list, dict)):
        return (found if kind == ".jsonl" else json.loads(found)) == value
    if isinstance(value, bool):
        return found == (str(value) if kind == "" else value)
    if isinstance(value, (int, float)):
        return type(value)(found) == value
    return found == value


@pytest.mark.shows("ISA-62", "ISA-63", "ISA-64")
@stores
def test_a_run_can_be_read_without_this_library(kind, tmp_path):
    "What was trained, with which callbacks and settings, per fit, epoch and batch"
    path = tmp_path / f"new folder/runs{kind}"
    trainer = make_trainer([MomentumTrainCB(0.9), MetricsCB(show=False), TrackingCB(path, "first try")])
    trainer.fit(2, lr=0.05)
    trainer.fit(1)
    cb, tables = trainer.TrackingCB, STORES[kind][1](path)
    assert set(tables) == {"fit_stats", "epoch_stats", "batch_stats", "fit_ends"}
    for name, rows in tables.items():
        expected = getattr(cb, name)
        assert len(rows) == len(expected)
        for row, other in zip(rows, expected):
            assert all(same(kind, other.get(o), row.get(o)) for o in {*row, *other}), (row, other)
    first = tables["fit_stats"][0]
    assert (
        first["experiment"] == "first try"
        and first["run"] == cb.run
        and float(first["MomentumTrainCB.momentum"]) == 0.9
    )
    assert datetime.fromisoformat(first["started"]).utcoffset().total_seconds() == 0
    assert first["model_source"] == inspect.getsource(SimpleNet)
    assert [o["outcome"] for o in tables["fit_ends"]] == ["finished", "finished"]


ODD_NAMES = [
    'a "quoted" name',
    "semi;colon -- drop table",
    "Größe 📏",
    "comma,name",
    "line\nbreak",
    "Loss",
    "loss",
    "LOSS",
    "LOSS #15",
    "loss #0",
    "loss #0 #0",
    "Ø",
    "ø",
    "run",
    "table",
    "select",
    "'",
    "[x]",
    "half \udc80",
    "nul\0l",
    "",
]
ODD_VALUES = [
    1,
    2**70,
    -0.5,
    1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
    True,
    None,
    'Ä, "x";\n📏',
    "half \udc80",
    "",
    [1, [2.5, None]],
    {"a": {"b": "ü"}},
    "x" * 200_000,
]


@pytest.mark.shows("ISA-65")
@stores
def test_odd_names_and_values_come_back(kind, tmp_path):
    "No name is lost, and none stands for two"
    write, read = STORES[kind]
    path = tmp_path / f"odd{kind}"
    names = [o for o in ODD_NAMES if not (kind == ".jsonl" and o == "table")]
    for i in range(len(ODD_VALUES)):
        write(
            path,
            'an "odd" table',
            [{name: ODD_VALUES[(i + k) % len(ODD_VALUES)] for k, name in enumerate(names)}],
        )
    (rows,) = read(path).values()
    assert len(rows) == len(ODD_VALUES)
    for i, row in enumerate(rows):
        assert len(row) == len(names)
        for k, found in enumerate(row.values()):
            value = ODD_VALUES[(i + k) % len(ODD_VALUES)]
            if isinstance(value, str):
                value = value.encode("utf-8", "backslashreplace").decode() if kind != ".jsonl" else value
            if value == 2**70:
                assert int(found) == value
            else:
                assert same(kind, value, found), (kind, value, found)


@stores
def test_tensors_arrays_and_everything_else_become_plain(kind, tmp_path):
    write, read = STORES[kind]
    values = dict(
        scalar=torch.tensor(0.5),
        bf16=torch.tensor(2, dtype=torch.bfloat16),
        vector=torch.tensor([1, 2]),
        needs_grad=torch.ones(2, requires_grad=True),
        array=np.eye(2),
        number=np.float32(0.25),
        whole=np.int64(3),
        truth=np.bool_(True),
        order=NBatchCB.order,
        pair=(1, 2),
        path=Path,
        meta=torch.empty(2, device="meta"),
    )
    write(tmp_path / f"t{kind}", "t", [values])
    (row,) = read(tmp_path / f"t{kind}")["t"]
    expected = dict(
        scalar=0.5,
        bf16=2.0,
        vector=[1, 2],
        needs_grad=[1.0, 1.0],
        array=[[1.0, 0.0], [0.0, 1.0]],
        number=0.25,
        whole=3,
        truth=True,
        order=-100,
        pair=[1, 2],
    )
    assert all(same(kind, v, row[k]) for k, v in expected.items()), row
    assert "Path" in row["path"] and "meta" in row["meta"]


@stores
def test_columns_may_come_late_and_in_any_order(kind, tmp_path):
    write, read = STORES[kind]
    rows = [dict(a=1), dict(b=2, a=3), dict(c=4), dict(a=5, b=6, c=7)]
    write(tmp_path / f"t{kind}", "t", rows[:1])
    write(tmp_path / f"t{kind}", "t", rows[1:3])
    write(tmp_path / f"t{kind}", "t", rows[3:])
    write(tmp_path / f"t{kind}", "t", [])
    found = read(tmp_path / f"t{kind}")["t"]
    assert [{k: int(v) for k, v in row.items() if v not in (None, "")} for row in found] == rows
    if kind != ".jsonl":
        assert all(list(row) == ["a", "b", "c"] for row in found)


names = st.text(min_size=0, max_size=6)
cells = st.one_of(st.none(), st.booleans(), st.integers(-(2**80), 2**80), st.floats(), st.text(max_size=8))


@pytest.mark.shows("ISA-65")
@settings_of_hypothesis(max_examples=40, deadline=None)
@given(
    blocks=st.lists(
        st.lists(st.dictionaries(names, cells, min_size=1, max_size=4), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    )
)
@pytest.mark.parametrize("kind", STORES, ids=lambda o: o or "csv")
def test_any_rows_are_kept(kind, blocks):
    "Whatever the names, as many cells come back as were written, with their values"
    write, read = STORES[kind]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"t{kind}"
        for block in blocks:
            write(path, "t", block)
        found = read(path)["t"]
    written = [row for block in blocks for row in block]
    assert len(found) == len(written)
    for row, back in zip(written, found):
        kept = [
            o for o in row.values() if o not in (None, "") and not (isinstance(o, float) and math.isnan(o))
        ]
        values = [o for o in back.values() if o not in (None, "", "nan", "NaN")]
        as_text = lambda o: (
            str(int(o))
            if isinstance(o, bool) and kind == ".sqlite"
            else str(float(o))
            if isinstance(o, float)
            else str(o)
        )
        if kind == ".jsonl":
            values = [
                {"Infinity": "inf", "-Infinity": "-inf"}.get(o, o) if isinstance(o, str) else o
                for o in values
            ]
        kept = [o for o in kept if o not in ("nan", "NaN", "Infinity", "-Infinity")]
        values = [o for o in values if o not in ("Infinity", "-Infinity")]
        assert sorted(map(as_text, kept)) == sorted(map(as_text, values))


@pytest.mark.shows("ISA-65")
@settings_of_hypothesis(max_examples=60, deadline=None)
@given(
    calls=st.lists(
        st.lists(st.text("aAbB #01", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
        min_size=2,
        max_size=5,
    )
)
def test_a_column_stands_for_one_name_at_any_time(calls):
    "In SQLite, where capitals do not count, whatever came before"
    with tempfile.TemporaryDirectory() as folder:
        for i, call in enumerate(calls):
            write_sqlite(Path(folder) / "t.db", "t", [dict.fromkeys(call, i)])
        rows = read_sqlite(Path(folder) / "t.db")["t"]
    by_column = {}
    for i, (call, row) in enumerate(zip(calls, rows, strict=True)):
        filled = {
            re.sub(r" #\d+$", "", o) if re.search(r" #\d+$", o) else o: o for o, v in row.items() if v == i
        }
        assert sorted(filled) == sorted(call)
        for name, column in filled.items():
            assert by_column.setdefault(column, name) == name


def test_a_csv_file_is_complete_at_every_moment(tmp_path, monkeypatch):
    "An end of the program while a column is being added leaves the old file"
    write_csv(tmp_path, "t", [dict(a=1)])
    before = (tmp_path / "t.csv").read_text()

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_csv(tmp_path, "t", [dict(b=2)])
    assert (tmp_path / "t.csv").read_text() == before
    monkeypatch.undo()
    write_csv(tmp_path, "t", [dict(b=2)])
    assert read_csv(tmp_path) == {"t": [dict(a="1", b=""), dict(a="", b="2")]}
    assert [o.name for o in tmp_path.iterdir()] == ["t.csv"]


def test_a_broken_last_line_spoils_no_other(tmp_path):
    "A machine that lost its power in the middle of a line"
    path = tmp_path / "t.jsonl"
    write_jsonl(path, "t", [dict(a=1)])
    with open(path, "a") as f:
        f.write('{"table": "t", "a')
    write_jsonl(path, "t", [dict(a=3)])
    lines = path.read_text().split("\n")
    assert [json.loads(lines[0])["a"], json.loads(lines[2])["a"], lines[3]] == [1, 3, ""]


@pytest.mark.parametrize("cuts", [True, False], ids=["cut at once", "cut later"])
@pytest.mark.parametrize("kind", ["", ".jsonl"], ids=["csv", "jsonl"])
def test_a_disk_that_is_full_in_the_middle_of_a_line_leaves_nothing_of_it(kind, cuts, tmp_path, monkeypatch):
    "Also where the file cannot be cut back before there is room again"

    class FullDisk(io.FileIO):
        def write(self, data):
            if len(data) < 9:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[: len(data) // 2])

        def truncate(self, size):
            if not cuts:
                raise OSError(errno.EIO, "Input/output error")
            return super().truncate(size)

    def open_there(path, mode="r", **options):
        return FullDisk(str(path), "a+") if mode == "ab+" else open(path, mode, **options)

    write, read = STORES[kind]
    path = tmp_path / f"t{kind}"
    write(path, "t", [dict(a=1, b="first")])
    with monkeypatch.context() as full:
        full.setattr(row_files, "open", open_there, raising=False)
        with pytest.raises(OSError, match="No space left"):
            write(path, "t", [dict(a=2, b="a text that is too long for this disk")])
    write(path, "t", [dict(a=3, b="last")])
    assert [(str(o["a"]), o["b"]) for o in read(path)["t"]] == [("1", "first"), ("3", "last")]


def python(program, *args, **kwargs):
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, args)],
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **kwargs,
    )


WRITE_MANY = """
import sys
from isaac_loop.log.row_files import write_csv, write_jsonl, write_sqlite
path, who = sys.argv[1:]
write = write_jsonl if path.endswith('jsonl') else write_sqlite if path.endswith('sqlite') else write_csv
for i in range(60):
    rows = [{'who': who, 'i': i, f'only {who} {i//20}': 'x'*3000, 'j': j} for j in range(3)]
    write(path, 't', rows)
"""


@pytest.mark.shows("ISA-64")
@stores
def test_several_programs_may_write_to_one_file_at_the_same_time(kind, tmp_path):
    "Rows and new columns of all, none lost and none mixed"
    path = tmp_path / f"t{kind}"
    running = [python(WRITE_MANY, path, who) for who in "abc"]
    for o in running:
        assert (o.communicate(timeout=120)[1], o.returncode) == ("", 0)
    rows = STORES[kind][1](path)["t"]
    for who in "abc":
        mine = [row for row in rows if row["who"] == who]
        assert [(int(row["i"]), int(row["j"])) for row in mine] == [
            (i, j) for i in range(60) for j in range(3)
        ]
        assert all(row[f"only {who} {int(row['i']) // 20}"] == "x" * 3000 for row in mine)


@pytest.mark.parametrize("kind, name", [(SQLiteRows, "t.db"), (JSONRows, "t.jsonl"), (CSVRows, "t")])
def test_what_another_run_appends_while_rows_are_dropped_stays(kind, name, tmp_path):
    "It waits until the file is written anew"
    rows = kind(tmp_path / name)
    rows.append("t", [dict(run="mine", step=i) for i in range(2)])
    other = threading.Thread(target=rows.append, args=("t", [dict(run="yours", step=7)]))

    def keeps(table, step):
        if not other.ident:
            other.start()
            other.join(0.2)
        return int(step) == 0

    rows.drop("mine", keeps)
    other.join()
    assert [int(row["step"]) for run in ("mine", "yours") for _, row in rows.read(run)] == [0, 7]


KILLED = """
import os, signal, sys
import torch
from isaac_loop.all import BasicTrainCB, DataLoaders, MetricsCB, SimpleNet, TrackingCB, Trainer
batches = [(torch.ones(2, 4), torch.ones(2, 1))] * 3
def after_batch(trainer):
    if (trainer.epoch, trainer.batch_num) == (2, 1): os.kill(os.getpid(), signal.SIGKILL)
callbacks = [BasicTrainCB(), MetricsCB(), TrackingCB(sys.argv[1])]
mse = torch.nn.functional.mse_loss
trainer = Trainer(DataLoaders(batches), mse, torch.optim.SGD, SimpleNet(4, 3, 1), callbacks)
trainer.fit(5, valid=False, callbacks=after_batch)
"""


@pytest.mark.shows("ISA-63")
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="nothing kills like that here")
@stores
def test_a_killed_run_keeps_what_was_written_and_the_next_one_goes_on(kind, tmp_path):
    "All complete epochs; a fit without an end was killed"
    path = tmp_path / f"runs{kind}"
    killed = python(KILLED, path)
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    make_trainer([BasicTrainCB(), MetricsCB(show=False), TrackingCB(path)]).fit(1)
    tables = STORES[kind][1](path)
    first, second = (
        o["run"] for o in sorted(tables["fit_stats"], key=lambda o: int(o["n_epochs"]), reverse=True)
    )
    of = lambda run, table: [row for row in tables[table] if row["run"] == run]
    assert [int(o["epoch"]) for o in of(first, "epoch_stats")] == [0, 1] and len(
        of(first, "batch_stats")
    ) == 6
    assert (len(of(second, "epoch_stats")), len(of(second, "batch_stats"))) == (1, 5)
    assert [o["run"] for o in tables["fit_ends"]] == [second]


# The callback and its stores

ENDS = {
    "CancelFitException": CancelFitException("enough"),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "ValueError": ValueError("bad batch"),
    "stopped": None,
}


@pytest.mark.shows("ISA-63")
@stores
@pytest.mark.parametrize("outcome", ENDS)
def test_a_fit_that_is_cut_short_is_written_as_far_as_it_came(outcome, kind, tmp_path):
    "The batches of the unfinished epoch too, and how it ended"

    class EndCB:
        order = 30

        def cleanup_epoch(self, trainer):  # Before the metrics write their rows of this pass
            if trainer.epoch == 1 and not trainer.training and outcome != "stopped":
                raise ENDS[outcome]

        def after_batch(self, trainer):
            if trainer.epoch == 1 and outcome == "stopped":
                trainer.request_stop("by hand")

    trainer = make_trainer(
        [BasicTrainCB(), MetricsCB(show=False), TrackingCB(tmp_path / f"t{kind}"), EndCB()]
    )
    try:
        trainer.fit(3)
    except (ValueError, KeyboardInterrupt) as e:
        assert e is ENDS[outcome]
    tables = STORES[kind][1](tmp_path / f"t{kind}")
    (end,) = tables["fit_ends"]
    assert end["outcome"] == outcome and (end["reason"] or "") == {
        "CancelFitException": "enough",
        "ValueError": "bad batch",
        "stopped": "by hand",
    }.get(outcome, "")
    assert int(end["n_updates"]) == trainer.n_updates and float(end["seconds"]) >= 0
    assert [int(o["epoch"]) for o in tables["epoch_stats"]] == ([0, 1] if outcome == "stopped" else [0])
    assert len(tables["batch_stats"]) == len(trainer.history.batches) >= 7


@pytest.mark.shows("ISA-63")
@stores
def test_what_other_callbacks_log_is_included_also_when_it_comes_late(kind, tmp_path):
    "Per batch what anybody writes; per epoch too"

    class GradNormCB:
        order = 20

        def before_epoch(self, trainer):
            self.norms, self.numbers = [], []

        def before_step(self, trainer):
            self.norms.append(trainer.model[1].weight.grad.norm())
            self.numbers.append(trainer.batch_num)

        def cleanup_epoch(self, trainer):
            if not trainer.training or trainer.epoch == 0:
                return
            trainer.history.write_batches(True, self.numbers, grad_norm=[o.item() for o in self.norms])
            trainer.history.write(hardest=torch.stack(self.norms).max(), note="übrigens")

    trainer = make_trainer(
        [BasicTrainCB(), MetricsCB(show=False), GradNormCB(), TrackingCB(tmp_path / f"t{kind}")]
    )
    trainer.fit(2)
    tables = STORES[kind][1](tmp_path / f"t{kind}")
    norms = [row.get("grad_norm") for row in tables["batch_stats"]]
    expected = trainer.history.batches["grad_norm"]
    assert [i for i, o in enumerate(norms) if o not in (None, "", "nan", "NaN")] == [5, 6, 7]
    assert [float(norms[i]) for i in (5, 6, 7)] == [expected[i] for i in (5, 6, 7)]
    late = tables["epoch_stats"][1]
    assert float(late["hardest"]) == pytest.approx(max(expected[5:8])) and late["note"] == "übrigens"


@pytest.mark.shows("ISA-65")
def test_a_column_called_run_keeps_its_value_beside_ours(tmp_path):
    class RunCB:
        order = 20

        def cleanup_epoch(self, trainer):
            trainer.history.write(run="mine", run_=2, table=3)

    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), RunCB(), TrackingCB(tmp_path / "t.jsonl")])
    trainer.fit(1)
    (row,) = read_jsonl(tmp_path / "t.jsonl")["epoch_stats"]
    assert (row["run"], row["run__"], row["run_"], row["table_"]) == (trainer.TrackingCB.run, "mine", 2, 3)


@pytest.mark.shows("ISA-64")
def test_runs_have_numbers_of_their_own():
    "One for each trainer, whoever shares the callback, and the same for its second fit"
    cb, trainers = TrackingCB(), []
    for _ in range(2):
        trainers.append(make_trainer([BasicTrainCB(), cb]))
        trainers[-1].fit(1)
        trainers[-1].fit(1)
    first, again, second, last = (row["run"] for row in cb.fit_stats)
    assert first == again != second == last
    assert [row["fit"] for row in cb.fit_stats] == [0, 1, 0, 1]


def test_rows_of_an_older_fit_are_not_repeated():
    "A second fit without the callback that writes rows"
    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), TrackingCB()])
    trainer.fit(2)
    trainer.remove_callback("MetricsCB")
    trainer.fit(2)
    assert [row["epoch"] for row in trainer.TrackingCB.epoch_stats] == [0, 1] and len(
        trainer.TrackingCB.batch_stats
    ) == 10


def test_a_fit_that_never_began_leaves_nothing():
    class BadCB:
        def before_fit(self, trainer):
            raise ValueError

    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), TrackingCB()])
    trainer.fit(1)
    with pytest.raises(ValueError):
        trainer.fit(1, callbacks=BadCB())
    cb = trainer.TrackingCB
    assert (len(cb.fit_stats), len(cb.epoch_stats), len(cb.batch_stats), len(cb.fit_ends)) == (1, 1, 5, 1)


@pytest.mark.parametrize(
    "suffix, hint", [(".csv", "leave `.csv` away"), (".json", "`.jsonl`"), (".xlsx", "`.sqlite`")]
)
def test_a_path_that_says_nothing_is_refused_where_it_is_typed(suffix, hint):
    with pytest.raises(ValueError, match=f"ends in '{suffix}'.*{hint}"):
        TrackingCB(f"runs{suffix}")


@pytest.mark.parametrize(
    "make",
    [
        lambda o: _below_a_file(o, "t.sqlite"),
        lambda o: _below_a_file(o, "t.jsonl"),
        lambda o: _below_a_file(o, "t"),
        lambda o: _no_database(o),
        lambda o: _a_file(o),
    ],
    ids=["sqlite", "jsonl", "csv", "no database", "a file instead of a folder"],
)
def test_a_place_that_cannot_be_written_is_an_error_before_the_first_batch(make, tmp_path):
    path = make(tmp_path)
    before = {o: o.read_bytes() for o in tmp_path.rglob("*") if o.is_file()}
    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), TrackingCB(path)])
    with pytest.raises(OSError, match="`TrackingCB` cannot write to .*Choose a `path`") as caught:
        trainer.fit(1)
    assert caught.value.__cause__ is not None and trainer.n_updates == 0
    assert {o: o.read_bytes() for o in tmp_path.rglob("*") if o.is_file()} == before
    assert trainer.TrackingCB.fit_stats == [] == trainer.TrackingCB.fit_ends


def _below_a_file(folder, name):
    (folder / "file").write_text("not a folder")
    return folder / "file" / name


def _no_database(folder):
    (folder / "t.db").write_text("not a database " * 100)
    return folder / "t.db"


def _a_file(folder):
    (folder / "runs").write_text("not a folder")
    return folder / "runs"


@stores
def test_a_disk_that_is_full_for_a_while_costs_no_training_and_no_row(kind, tmp_path):
    full = []

    def append(table, rows):
        if full:
            raise OSError("No space left on device")
        real(table, rows)

    class FillCB:
        def before_epoch(self, trainer):
            full[:] = [True] if trainer.epoch == 1 else []

    cb = TrackingCB(tmp_path / f"t{kind}")
    file = cb._outlet.log.file
    real, file.append = file.append, append
    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), cb, FillCB()])
    with pytest.warns(UserWarning, match="No space left on device.*Training goes on"):
        trainer.fit(3)
    tables = STORES[kind][1](tmp_path / f"t{kind}")
    assert [int(o["epoch"]) for o in tables["epoch_stats"]] == [0, 1, 2] and len(tables["batch_stats"]) == 15


@stores
def test_a_callback_with_a_store_can_be_copied_and_holds_nothing_open(kind, tmp_path):
    "A snapshot copies what callbacks hold"
    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False), TrackingCB(tmp_path / f"t{kind}")])
    copies = []

    def log(trainer):
        copies.append(copy.deepcopy(trainer.TrackingCB.__dict__))

    trainer.fit(2, callbacks=log)
    assert len(copies) == 2 and copies[0]["run"] == trainer.TrackingCB.run


@stores
def test_writing_changes_no_weight_and_no_random_number(kind, tmp_path):
    "The law of all watchers"
    results = []
    for callbacks in ([], [MetricsCB(show=False), TrackingCB(tmp_path / f"t{kind}", "law")]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        make_trainer([BasicTrainCB(), *callbacks], model=model, opt_func=optim.Adam).fit(3, lr=0.1)
        results.append((torch.cat([p.detach().flatten() for p in model.parameters()]), torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.shows("ISA-56")
def test_inside_a_batch_nothing_is_written_or_read(tmp_path):
    "The callback answers no event of a batch at all"
    assert [o for o in EVENTS if hasattr(TrackingCB, o)] == ["before_fit", "log", "cleanup_fit"]


@pytest.mark.shows("ISA-64")
def test_runs_can_be_compared_in_sql(tmp_path):
    "One file, several experiments"
    path = tmp_path / "runs.db"
    for momentum in (0.1, 0.5, 0.9):
        make_trainer(
            [MomentumTrainCB(momentum), MetricsCB(show=False), TrackingCB(path, f"m{momentum}")]
        ).fit(2)
    with closing(sqlite3.connect(path)) as db:
        found = db.execute(
            'select experiment, "MomentumTrainCB.momentum", count(*) '
            "from fit_stats join epoch_stats using (run, fit) group by experiment order by 1"
        ).fetchall()
    assert found == [("m0.1", 0.1, 2), ("m0.5", 0.5, 2), ("m0.9", 0.9, 2)]


# The summary of callbacks


@pytest.mark.shows("ISA-40", "ISA-41")
def test_the_summary_of_three_callbacks_has_eight_rows_in_order():
    trainer = make_trainer([BasicTrainCB(), DeviceCB(), OneBatchCB()])
    table = trainer.summarize_callbacks()
    assert [(row["step"], row["callback"]) for row in table.rows] == [
        ("before_fit", "DeviceCB"),
        ("before_batch", "DeviceCB"),
        ("predict", "BasicTrainCB"),
        ("get_loss", "BasicTrainCB"),
        ("backward", "BasicTrainCB"),
        ("step", "BasicTrainCB"),
        ("zero_grad", "BasicTrainCB"),
        ("after_batch", "OneBatchCB"),
    ]
    for row in table.rows:
        assert row["does"] == getattr(getattr(trainer, row["callback"]), row["step"]).__doc__
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


@pytest.mark.shows("ISA-40")
def test_the_summary_is_in_the_order_in_which_things_really_run():
    "First of all the first calls, in a fit of one epoch with both passes"
    diary = []
    watch = type("WatchCB", (), {event: lambda self, trainer: None for event in EVENTS})
    late = type(
        "LateCB",
        (),
        {
            "order": 60,
            **{event: lambda self, trainer: None for event in EVENTS},
            "after_batch": lambda self, trainer: trainer.write_measured(score=1),
        },
    )
    trainer = make_trainer(
        [
            spy(diary, late),
            spy(diary, ProgressCB, "plain"),
            spy(diary, MetricsCB),
            spy(diary, BasicTrainCB),
            spy(diary, watch),
            spy(diary, DeviceCB, "cpu"),
            spy(diary, TrackingCB),
        ]
    )
    trainer.fit(1)
    table = callback_table(trainer)
    assert [(row["step"], row["callback"]) for row in table.rows] == list(dict.fromkeys(diary))
    assert {row["step"] for row in table.rows} == set(EVENTS)


@pytest.mark.shows("ISA-40")
def test_a_summary_needs_no_fit_and_changes_nothing():
    trainer = make_trainer([BasicTrainCB(), OneBatchCB()])
    before = str(trainer.summarize_callbacks())
    trainer.fit(2)
    assert str(trainer.summarize_callbacks()) == before and trainer.n_updates == 1


@pytest.mark.shows("ISA-40", "ISA-44")
def test_the_summary_says_who_is_replaced_and_who_sees_which_pass():
    class StepCB:
        @replaces
        def step(self, trainer):
            "Do nothing at all"

    class TrainOnlyCB:
        on_valid = False

        def before_batch(self, trainer):
            "Augment"

    class ValidOnlyCB:
        on_train = False

        def before_batch(self, trainer):
            "Crop the centre"

    trainer = make_trainer([BasicTrainCB(), StepCB(), TrainOnlyCB(), ValidOnlyCB()])
    found = {(row["step"], row["callback"]): row["does"] for row in callback_table(trainer).rows}
    assert (
        found["step", "StepCB"] == "Do nothing at all (instead of BasicTrainCB)"
        and ("step", "BasicTrainCB") not in found
    )
    assert found["before_batch", "TrainOnlyCB"] == "Augment (training only)"
    assert found["before_batch", "ValidOnlyCB"] == "Crop the centre (validation only)"


class CancelWarmUp(CancelException):
    "Leave the warming up"


class WarmTrainer(Trainer):
    "Has a step of its own, an event of its own, and a span of its own"

    events = ("after_warning",)

    def predict(self):
        "Predict by itself"
        self.preds = self.model(self.batch[0])

    @with_cbs("warm_up", CancelWarmUp)
    def warm_up(self):
        pass


@pytest.mark.shows("ISA-40", "MIN-02")
def test_a_trainer_with_methods_and_events_of_its_own_is_in_the_summary():
    class WarmCB:
        def after_warning(self, trainer):
            "Blink"

        def before_warm_up(self, trainer):
            "Light the fire"

    rows = {
        (row["step"], row["callback"]): row["does"]
        for row in callback_table(make_trainer([WarmCB()], WarmTrainer)).rows
    }
    assert rows == {
        ("predict", "WarmTrainer"): "Predict by itself",
        ("after_warning", "WarmCB"): "Blink",
        ("before_warm_up", "WarmCB"): "Light the fire",
    }


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
    assert events[: len(EVENTS)] == EVENTS
    assert sorted(events[len(EVENTS) :]) == [
        "after_warm_up",
        "after_warning",
        "before_warm_up",
        "cleanup_warm_up",
        "warm_up",
    ]


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


@pytest.mark.shows("ISA-110")
@pytest.mark.parametrize(
    "obj",
    [Trainer.one_batch, BasicTrainCB, with_cbs, DeviceCB, Trainer._fit, MomentumTrainCB.zero_grad],
    ids=lambda o: o.__qualname__,
)
def test_source_is_that_of_the_library_itself(obj):
    "Line by line as it stands in the file"
    shown = repr(show_source(obj)).splitlines()
    written = [
        line.strip() for line in Path(inspect.getsourcefile(inspect.unwrap(obj))).read_text().splitlines()
    ]
    start = next(
        i for i in range(len(written)) if written[i : i + len(shown)] == [line.strip() for line in shown]
    )
    assert shown[0] == written[start] and len(shown) > 1
    assert any(re.match(rf"(def|class) {obj.__name__}\b", line) for line in shown)


@pytest.mark.shows("ISA-110")
def test_source_shows_the_decorator_and_not_its_inside():
    lines = repr(show_source(Trainer.one_batch)).splitlines()
    assert lines[:2] == ["@in_one_chain", "@with_cbs('batch', CancelBatchException)"]
    assert lines[2].startswith("def one_batch(self)")
    assert show_source(Trainer.one_batch)._repr_markdown_() == "```python\n" + "\n".join(lines) + "\n```"


# The demo


def run_demo(*options):
    "A shell's view of `python -m isaac_loop`"
    return subprocess.run(
        [sys.executable, "-m", "isaac_loop", *options], capture_output=True, text=True, timeout=120
    )


@pytest.mark.shows("F130")
def test_the_demo_learns_to_read_digits_and_shows_its_parts(tmp_path):
    "The table, the callbacks, and a plot that is there"
    done = run_demo("--epochs", "10", "--plot", str(tmp_path / "new folder" / "loss.png"))
    assert done.returncode == 0 and done.stderr == ""
    table, callbacks = done.stdout.split("What ran at each step:")
    header, *rows = (line.split() for line in table.strip().splitlines())
    assert header == ["epoch", "train_loss", "valid_loss", "accuracy", "time"] and [
        row[0] for row in rows
    ] == [str(o) for o in range(10)]
    for name in ("BasicTrainCB", "MetricsCB", "DeviceCB", "ProgressCB"):
        assert name in callbacks
    assert float(re.search(r"Accuracy on 360 digits never trained on: ([\d.]+)%", done.stdout)[1]) >= 95
    plot = Path(re.search("Loss plot: (.*)", done.stdout)[1])
    assert plot.is_absolute() and plot.parent == tmp_path / "new folder"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_demo_speaks_of_a_wrong_option_without_a_traceback():
    "From a shell"
    done = run_demo("--device", "cudda")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        "`device` is 'cudda', which PyTorch does not know. "
        "Use a name such as 'cpu', 'cuda', 'cuda:1' or 'mps'."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--epochs", "-1"],
            "`n_epochs` is -1, and nothing can be trained fewer than 0 times. Use 0 or more.",
        ),
        (["--lr", "nan"], "`lr` is nan, and the first step would spoil every weight."),
        (["--device", "cuda:99"], "`DeviceCB` was told to use 'cuda:99', but this machine cannot"),
        (["--epochs", "three"], "argument --epochs: invalid int value: 'three'"),
        (["--epoch-count", "3"], "unrecognized arguments: --epoch-count 3"),
    ],
    ids=lambda o: " ".join(o) if isinstance(o, list) else "",
)
def test_the_demo_refuses_what_it_cannot_do(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        demo.main(options)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and message in err and out == ""


def test_the_demo_has_help(capsys):
    with pytest.raises(SystemExit) as caught:
        demo.main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and "python -m isaac_loop" in out
    for option in ("--epochs", "--lr", "--seed", "--device", "--plot"):
        assert option in out


def test_the_same_seed_gives_the_same_run(tmp_path, capsys):
    def run(seed):
        demo.main(
            ["--epochs", "1", "--device", "cpu", "--seed", str(seed), "--plot", str(tmp_path / "loss.png")]
        )
        return re.sub(r"\d\d:\d\d", "", capsys.readouterr().out)

    first, other, again = run(1), run(2), run(1)
    assert first == again and first != other


def test_no_epochs_show_the_callbacks_and_draw_nothing(tmp_path, capsys):
    demo.main(["--epochs", "0", "--device", "cpu", "--plot", str(tmp_path / "loss.png")])
    out = capsys.readouterr().out
    assert "BasicTrainCB" in out and "Loss plot" not in out and not (tmp_path / "loss.png").exists()


# Imports


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "isaac_loop.loop.trainer",
            ["matplotlib", "pandas", "datasets", "torcheval", "torchmetrics", "IPython"],
        ),
        ("isaac_loop.loop.events", ["torch", "numpy"]),
    ],
)
def test_an_import_brings_only_what_it_needs(module, heavy):
    "The loop alone starts quickly"
    program = f"import sys, {module}; print([o for o in {heavy} if o in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
