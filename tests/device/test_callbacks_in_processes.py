"""Callbacks in several processes: who prints and writes, who stops all, whose numbers are whose.

One process is the measure: the same script, run by one process and by two, must leave the same numbers.
"""

import contextlib
import csv
import io
import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from several import in_processes, loaders, net, outcome, rank, rows, trainer
from torch import nn
from torch.nn import functional as F

from isaac_loop.basics.output import say
from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.device.distributed import DistributedCB
from isaac_loop.device.precision import MixedPrecisionCB
from isaac_loop.inspection.gradients import GradientStatsCB
from isaac_loop.log.experiment import ExperimentCB
from isaac_loop.log.history_files import HistoryFilesCB
from isaac_loop.log.log_files import CSV, JSONLines
from isaac_loop.log.loggers import LoggerCB
from isaac_loop.log.notify import NotifyCB
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.log.upload import UploadCB
from isaac_loop.loop.events import Order
from isaac_loop.loop.trainer import Trainer
from isaac_loop.metrics.epoch_time import EpochTimeCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.show.columns import PrintColumnsCB
from isaac_loop.show.progress import ProgressCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.stop.limits import LimitCB
from isaac_loop.stop.nonfinite_stop import NonFiniteStopCB
from isaac_loop.stop.same_predictions import SamePredictionsCB
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.averaging import EMACB, SWACB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.train.freezing import FreezeCB
from isaac_loop.train.training import BasicTrainCB

pytestmark = pytest.mark.processes


def same(weights, others, tolerance=1e-12):
    "The same bits in all processes, and the numbers of one process up to rounding"
    (one,) = others
    return all(torch.equal(o, weights[0]) for o in weights) and torch.allclose(
        weights[0], one, rtol=0, atol=tolerance
    )


def one_and_two(f, *args, n=2):
    "What `f` returns in one process, and in each of several"
    return in_processes(1, f, *args)[0], in_processes(n, f, *args)


# ---- G9: one process prints and writes

TIMES = {"elapsed", "seconds_per_step", "total_seconds", "started", "ended", "seconds", "epoch_seconds"}
OWN = {"loss", "mean_loss", "run"}  # Main's share of a batch, and a number that is drawn


def told(folder):
    "The rows of all files with rows, and the names of all files"
    found = {}
    for path in sorted(folder.rglob("*")):
        name = "/".join(path.relative_to(folder).parts)
        name = name.replace(next((o for o in name.split("/") if o.startswith("run_")), "?"), "run")
        if path.is_dir() or path.suffix in (".txt", ".diff", ".sqlite") or path.name == ".lock":
            continue
        lines = []
        if path.suffix == ".csv":
            lines = list(csv.DictReader(path.open(encoding="utf-8")))
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found[name] = [{k: number(v) for k, v in row.items() if k not in TIMES | OWN} for row in lines]
    return found


def number(text):
    try:
        return round(float(text), 9)
    except (TypeError, ValueError):
        return text if isinstance(text, str) and len(text) < 40 else None


def write_everything(folder, progress):
    "A fit with all that prints and writes; what was printed, and how often somebody was told"
    messages, out = [], io.StringIO()
    show = (
        [ProgressCB("plain")]
        if progress
        else [PrintColumnsCB("train_loss", "valid_loss"), GradientStatsCB(show=True)]
    )
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t = trainer(
            ExperimentCB(folder / "runs", "p"),
            HistoryFilesCB(plot=None),
            LoggerCB([CSV(folder / "csv"), JSONLines(folder / "log.jsonl")], every=2),
            TrackingCB(folder / "tracked"),
            NotifyCB(lambda *args: messages.append(args[0])),
            UploadCB((folder / "copy").as_uri()),
            EpochTimeCB(show=False),
            LimitCB(epochs=2),
            MetricsCB(show=True, name="spoken") if False else MetricsCB2(),
            *show,
        )
        t.fit(5, lr=0.01)
        t.print("over")
    return out.getvalue(), messages


class MetricsCB2(MetricsCB):
    "One that also prints"

    def columns(self, trainer):
        return []

    def cleanup_epoch(self, trainer):
        self._losses = None


def lines(text):
    "What was printed, without times and paths"
    words = [[o for o in line.split() if not o.replace(".", "").isdigit()] for line in text.splitlines()]
    return [" ".join(o) for o in words if "processes share" not in " ".join(o)]


@pytest.mark.shows("NEMO-18", "NEMO-60", "PTA-21", "PTA-24", "PTA-60", "PTA-43")
@pytest.mark.parametrize("progress", [False, True])
def test_files_and_output_come_from_main_and_equal_those_of_one_process(progress, tmp_path):
    one, two = one_and_two(lambda: write_everything(tmp_path / str(DistributedSize()), progress))
    (first, messages), (second, none) = two
    assert second == "" and none == [] and messages == one[1] and len(messages) == 3
    assert lines(first) == lines(one[0]) and "over" in first and "stopped: 2 epochs are enough" in first
    a, b = told(tmp_path / "1"), told(tmp_path / "2")
    assert a.keys() == b.keys() and {o for o in a if o.endswith(".csv")} and a == b
    logs = {path.name for path in (tmp_path / "2").rglob("log-*.txt")}
    assert logs == {"log-0.txt", "log-1.txt"}


def DistributedSize():
    import os

    return os.environ["WORLD_SIZE"]
