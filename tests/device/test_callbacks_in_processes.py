"""Callbacks in several processes: who prints and writes, who stops all, whose numbers are whose.

One process is the measure: the same script, run by one process and by two, must leave the same numbers.
"""

import contextlib
import csv
import importlib
import io
import json
import math
import os
import warnings

import pytest
import torch
from several import in_processes, loaders, net, outcome, rank, rows, trainer
from torch import nn

from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.device.precision import MixedPrecisionCB
from isaac_loop.evaluate.evaluator import EvaluatorCB
from isaac_loop.inspection.black_box import BlackBoxCB
from isaac_loop.inspection.gradients import GradientPlotCB, GradientStatsCB
from isaac_loop.log.experiment import ExperimentCB
from isaac_loop.log.history_files import HistoryFilesCB
from isaac_loop.log.log_files import CSV, JSONLines
from isaac_loop.log.loggers import LoggerCB
from isaac_loop.log.notify import NotifyCB
from isaac_loop.log.run_config import RunConfig
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.log.upload import UploadCB
from isaac_loop.loop.events import CancelEpochException
from isaac_loop.metrics.epoch_time import EpochTimeCB
from isaac_loop.show.columns import PrintColumnsCB
from isaac_loop.show.live_plot import LivePlotCB
from isaac_loop.show.progress import ProgressCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.stop.limits import LimitCB
from isaac_loop.stop.nonfinite_stop import NonFiniteStopCB
from isaac_loop.stop.same_predictions import SamePredictionsCB
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.averaging import EMACB, SWACB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.train.freezing import FreezeCB

pytestmark = pytest.mark.processes


def size():
    "How many processes there are"
    return int(os.environ["WORLD_SIZE"])


def one_and_two(f, *args):
    "What `f` returns in one process, and in each of two"
    return in_processes(1, f, *args)[0], in_processes(2, f, *args)


def check_same(one, several, tolerance=1e-12):
    "The same bits in all processes, and the numbers of one process up to rounding"
    assert all(torch.equal(o, several[0]) for o in several)
    assert torch.allclose(several[0], one, rtol=0, atol=tolerance)


# ---- One process prints and writes

TIMES = {"elapsed", "seconds_per_step", "total_seconds", "started", "ended", "seconds"}
OWN = {"loss", "mean_loss", "run", "callbacks", "id"}  # Main's share of a batch; names that are drawn


def number(text):
    "A value of a file, as far as two runs can have the same one"
    try:
        return None if math.isnan(float(text)) else round(float(text), 9)
    except (TypeError, ValueError):
        return text if isinstance(text, str) and len(text) < 40 else None


def rows_of(path):
    "The rows of a file"
    if path.suffix == ".csv":
        found = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    elif path.suffix == ".jsonl":
        found = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    else:
        return []
    kept = [row for row in found if row.get("table") != "fit_stats"]  # Settings, with paths and processes
    return [{k: number(v) for k, v in row.items() if k not in TIMES | OWN} for row in kept]


def contents(folder):
    "The rows of all files, by their names, without the time stamp of the run"
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    names = [
        "/".join("run" if o.startswith("run_") else o for o in path.relative_to(folder).parts)
        for path in files
    ]
    return {name: rows_of(path) for name, path in zip(names, files) if not name.endswith("log-1.txt")}


def words(text):
    "What was printed, without numbers that are times, and the lines that name the processes"
    lines = [line for line in text.splitlines() if "processes share" not in line]
    return [[o for o in line.split() if ":" not in o][:3] for line in lines]


def files(folder, messages):
    "All that writes files and messages, and bars"
    return [
        ExperimentCB(folder / "runs", "p"),
        HistoryFilesCB(plot=None),
        LoggerCB([CSV(folder / "csv"), JSONLines(folder / "log.jsonl")], every=2),
        TrackingCB(folder / "tracked.jsonl"),
        NotifyCB(lambda subject, *args: messages.append(subject), every=2),
        UploadCB((folder / "copy").as_uri()),
        ProgressCB("plain"),
    ]


def pictures(folder, messages):
    "All that prints and draws"
    figures = [GradientPlotCB(folder / "gradients"), LivePlotCB(folder / "live.png")]
    printed = [PrintColumnsCB("train_loss", "valid_loss"), GradientStatsCB(show=True)]
    return [LoggerCB(CSV(folder / "csv"), every=2), EpochTimeCB(show=False), *figures, *printed]


def write_everything(folder, writers):
    "A fit with what prints and writes: what was printed, and what somebody was told"
    folder, messages, out = folder / str(size()), [], io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t = trainer(*writers(folder, messages), LimitCB(epochs=2))
        t.fit(5, lr=0.01, callbacks=after_fit)
    return out.getvalue(), messages


def after_fit(trainer):
    trainer.print("over", trainer.epoch)


@pytest.mark.shows("NEMO-18", "NEMO-60", "PTA-21", "PTA-24", "PTA-43", "PTA-60")
@pytest.mark.parametrize("writers", [files, pictures])
def test_files_and_output_come_from_main_and_are_those_of_one_process(writers, tmp_path):
    importlib.import_module("matplotlib.figure")  # Once, before it is copied
    (printed, messages), ((first, told), (second, none)) = one_and_two(write_everything, tmp_path, writers)
    assert (second, none) == ("", []) and told == messages and len(told) == (2 if writers is files else 0)
    assert words(first) == words(printed) and "over 1" in first
    one, two = contents(tmp_path / "1"), contents(tmp_path / "2")
    one = {name.replace("log.txt", "log-0.txt"): found for name, found in one.items()}
    assert one.keys() == two.keys() and sum(map(len, one.values())) > 10
    assert one == two
    others = list((tmp_path / "2").rglob("log-1.txt"))  # The log of the other process, and its copy
    assert len(others) == (2 if writers is files else 0)


@pytest.mark.parametrize("n", [1, 2])
def test_logs_of_main_go_on_with_the_run_in_any_number_of_processes(n, tmp_path):
    "Other processes have no state for them, neither when it is saved nor when it is read"

    def run(fails):
        def before_batch(trainer):
            if fails and (rank(), trainer.epoch, trainer.batch_num) == (1, 1, 4):
                raise ValueError("one fails")

        logs = LoggerCB(CSV(tmp_path / "csv"), every=1), TrackingCB(tmp_path / "tracked.jsonl")
        t = trainer(CheckpointCB(tmp_path / "saved", every=3), *logs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            t.fit(2, lr=0.01, callbacks=before_batch)
        return t.n_updates

    with pytest.raises(ValueError, match="one fails"):
        in_processes(2, run, True)
    assert in_processes(n, run, False) == [14] * n
    steps, epochs = (rows_of(tmp_path / "csv" / f"{name}.csv") for name in ("steps", "epochs"))
    assert [row["step"] for row in steps] == list(range(1, 15)) and [row["epoch"] for row in epochs] == [0, 1]
    tracked = [row for row in rows_of(tmp_path / "tracked.jsonl") if row["table"] == "batch_stats"]
    assert sum(row["training"] == 1 for row in tracked) == 14


def test_a_black_box_writes_the_batches_of_each_process_into_a_folder_of_its_own(tmp_path):
    def run():
        def after_predict(trainer):
            if rank() == 1 and trainer.batch_num == 2:
                raise ValueError("one fails")

        trainer(BlackBoxCB(folder=tmp_path)).fit(1, callbacks=after_predict)

    with pytest.raises(ValueError, match="one fails"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        in_processes(2, run)
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.pt")}
    assert found == {"black_box.pt", "process-1/black_box.pt"}


# ---- Stopping


def run(make, n_epochs=4, lr=0.02, dls=None, **kwargs):
    "A fit, and what it has come to"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t = trainer(*make(), dls=dls() if dls else None, **kwargs)
        t.fit(n_epochs, lr=lr)
    return *outcome(t), t.n_updates, t.stop_reason


STOPS = {
    "early": (lambda: [EarlyStoppingCB(patience=1, min_delta=10)], "not improved"),
    "threshold": (lambda: [EarlyStoppingCB(threshold=100.0)], "has reached"),
    "updates": (lambda: [LimitCB(10)], "10 updates"),
    "epochs": (lambda: [LimitCB(epochs=2)], "2 epochs"),
    "samples": (lambda: [LimitCB(samples=70)], "77 samples"),
    "accumulation": (lambda: [LimitCB(samples=70), AccumulationCB(3)], "77 samples"),
    "counted": (lambda: [LimitCB(samples=200, count=lambda batch: batch[0].numel())], "212 samples"),
}


@pytest.mark.shows("NEMO-57", "AIT-17", "AIT-65")
def test_all_stop_at_the_update_at_which_one_process_stops():
    def stops():
        return {name: run(make) for name, (make, _) in STOPS.items()}

    one, two = one_and_two(stops)
    for name, (_, words) in STOPS.items():
        weights, history, *end = one[name]
        check_same(weights, [o[name][0] for o in two])
        assert [o[name][2:] for o in two] == [tuple(end)] * 2 and words in end[-1], name
        assert len(two[0][name][1]) == len(history)


@pytest.mark.shows("AIT-17", "PTA-44")
def test_what_one_process_alone_asks_for_is_a_wish_that_all_obey():
    "A limit of time, whose clocks differ, and a callback that runs in one process"

    class StopCB:
        on_ranks = 1

        def after_batch(self, trainer):
            if trainer.batch_num == 2:
                trainer.request_stop("process 1 has seen enough")

    def stops():
        return run(lambda: [LimitCB(seconds=1e-9 if rank() else 1000)]), run(lambda: [StopCB()])

    for ends in zip(*in_processes(2, stops)):
        assert torch.equal(ends[0][0], ends[1][0]) and ends[0][2:] == ends[1][2:]
        assert ends[0][2] < 7 and ends[0][3]


def bad_rows(value, which=30):
    "Loaders of which one row, which one of the processes gets, has a target that is no number"

    def make():
        data = rows(53)
        data.tensors[1][which] = value
        return DataLoaders(exact_loader(data, 8, shuffle=False), exact_loader(rows(21, 1), 8, shuffle=False))

    return make


def masked(preds, targets):
    "A loss that is infinite where a gradient is not"
    return nn.functional.mse_loss(preds, targets.nan_to_num(posinf=0)) + targets.detach().mean()


BAD = {
    "at once": (lambda: [NonFiniteStopCB(1)], math.nan, {}),
    "later": (lambda: [NonFiniteStopCB(3)], math.nan, {}),
    "at the end": (lambda: [NonFiniteStopCB(100, gradients=False)], math.nan, {}),
    "the loss alone": (lambda: [NonFiniteStopCB(3)], math.inf, dict(loss_func=masked)),
}


@pytest.mark.shows("NEMO-57")
def test_a_bad_number_of_any_process_is_kept_out_of_the_weights_of_all():
    def stops():
        return {
            name: run(make, 1, dls=bad_rows(value), **kwargs) for name, (make, value, kwargs) in BAD.items()
        }

    one, two = one_and_two(stops)
    for name in BAD:
        assert all(o[name][0].isfinite().all() for o in [one, *two]), name
        check_same(one[name][0], [o[name][0] for o in two])
        assert [o[name][2] for o in two] == [one[name][2]] * 2
        assert all("was NaN or infinite" in o[name][3] for o in two), name


@pytest.mark.shows("AIT-27")
def test_predictions_are_the_same_only_if_they_are_so_in_all_processes():
    "One that has few rows may have the same for all of them"

    def labels(preds):
        return torch.full((len(preds),), rank() if DIFFER else 7)

    def stops():
        found = []
        for differ in (True, False):
            globals()["DIFFER"] = differ
            found.append(run(lambda: [SamePredictionsCB(labels=labels)], 2)[2:])
        return found

    two = in_processes(2, stops)
    assert two[0] == two[1] and [end for _, end in two[0]] == [
        None,
        "all 21 predictions of the validation pass are 7",
    ]

    def cancelled():
        def before_predict(trainer):
            if rank() and not trainer.training:
                raise CancelEpochException("no more here")

        return run(lambda: [SamePredictionsCB(labels=lambda preds: preds * 0), before_predict], 2)[2:]

    assert in_processes(2, cancelled) == [(14, None)] * 2


DIFFER = False


# ---- Weights


class WithNorm(nn.Sequential):
    "A network with batch norm"

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
        self.to(torch.float64)


WATCHED = {
    "ema": (lambda: [EMACB(0.9, keep=True)], {}),
    "swa": (lambda: [SWACB(0.25, every="update", keep=True)], {}),
    "best": (lambda: [KeepBestCB()], {}),
    "clipped": (lambda: [ClipGradCB(0.1), AccumulationCB(2)], {}),
    "unfreezing": (lambda: [FreezeCB("0", until=2)], {}),
}


@pytest.mark.shows("AIT-65", "NEMO-57")
def test_averages_best_weights_clipping_and_freezing_need_no_message():
    def fits():
        return {name: run(make, 3, **kwargs)[0] for name, (make, kwargs) in WATCHED.items()}

    one, two = one_and_two(fits)
    for name in WATCHED:
        check_same(one[name], [o[name] for o in two])


def test_batch_norm_of_an_average_has_the_means_of_all_processes():
    def fit():
        t = trainer(SWACB(0.5), model=WithNorm())
        t.fit(2, lr=0.01)
        norm = t.SWACB.average.module[1]
        first = t.SWACB.average.module[0]
        return torch.stack([norm.running_mean, norm.running_var]), first(rows(53).tensors[0]).mean(0)

    (one, _), two = one_and_two(fit)
    assert torch.equal(two[0][0], two[1][0])
    means, true = two[0][0][0], two[0][1]
    assert torch.allclose(means, true, atol=0.2) and means.isfinite().all()


LEFT_IN_THE_MODEL = {
    "ema": lambda: [EMACB(0.9, keep=True)],
    "swa": lambda: [SWACB(0.25, every="update", update_bn=False, keep=True)],
    "best of an average": lambda: [EMACB(0.9), KeepBestCB()],
}


@pytest.mark.parametrize("name", LEFT_IN_THE_MODEL)
def test_all_processes_end_with_the_batch_norm_of_the_average_that_was_measured(name):
    def fit():
        t = trainer(*LEFT_IN_THE_MODEL[name](), model=WithNorm())
        t.fit(2, lr=0.01)
        model, (x, y) = t.model.eval(), rows(21, 1).tensors
        best = min(t.history.column("valid_loss")) if "best" in name else t.history[-1]["valid_loss"]
        return model.state_dict(), abs(nn.functional.mse_loss(model(x), y).item() - best)

    (first, off), (second, also_off) = in_processes(2, fit)
    assert all(torch.equal(x, second[name]) for name, x in first.items())
    assert max(off, also_off) < 1e-12


@pytest.mark.parametrize("average", [False, True])
def test_what_is_measured_in_the_middle_of_a_pass_has_one_batch_norm_in_all_processes(average):
    def fit():
        check = EvaluatorCB({"mid": loaders().valid}, updates=3, at_end=False)
        t = trainer(check, KeepBestCB("mid_loss"), *[EMACB(0.9)] * average, model=WithNorm())
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "An evaluation wrote to")
            t.fit(1, lr=0.01)
        model, (x, y) = t.model.eval(), rows(21, 1).tensors
        return model[1].running_mean, abs(nn.functional.mse_loss(model(x), y).item() - t.KeepBestCB.best)

    (first, off), (second, also_off) = in_processes(2, fit)
    assert torch.equal(first, second) and max(off, also_off) < 1e-12


# ---- Half precision


@pytest.mark.shows("NEMO-57", "AIT-65", "AIT-79")
def test_half_precision_goes_with_several_processes():
    "The exchange comes before un-scaling, so one infinite gradient leaves out the step of all"

    def single():
        dls = DataLoaders(
            exact_loader(rows(17, dtype=torch.float32), 8, seed=3),
            exact_loader(rows(9, 1, torch.float32), 8, shuffle=False),
        )
        return dls

    def overflow(preds, targets):
        loss = nn.functional.mse_loss(preds.float(), targets)
        first = rank() == size() - 1 and OVERFLOWS.pop()
        return loss * math.inf if first else loss

    def fit(dtype, overflows=False, **kwargs):
        cb = MixedPrecisionCB(dtype, **kwargs)
        globals()["OVERFLOWS"] = [False] * 100 + [overflows]
        t = trainer(cb, ClipGradCB(1.0), dls=single(), model=net(torch.float32), loss_func=overflow)
        t.fit(3, lr=0.01)
        return outcome(t)[0], t.n_updates, cb.scaler.get_scale()

    def fits():
        return [fit("bfloat16"), fit("float16", init_scale=2.0**8), fit("float16", True, init_scale=2.0**8)]

    one, two = one_and_two(fits)
    for i, (weights, updates, scale) in enumerate(one):
        check_same(weights, [o[i][0] for o in two], 0.01)
        assert [o[i][1:] for o in two] == [(updates, scale)] * 2
    assert [o[1] for o in one] == [9, 9, 8] and one[2][2] == 2.0**7


OVERFLOWS = []


# ---- What is asked of the processes


class CountCB:
    "As a user writes it: counts what is positive in all processes, and lets main name the run"

    def before_fit(self, trainer):
        self.name_of_run = trainer.ranks.from_main(lambda: f"drawn in {rank()}")
        self.n, self.names = 0, []

    def after_batch(self, trainer):
        if trainer.training:
            self.n += (trainer.batch[1] > 0).sum()

    def log(self, trainer):
        trainer.history.write(positive=trainer.ranks.total(self.n).item())
        self.names = [str(o) for o in trainer.ranks.gather(dict(rank=trainer.ranks.rank))]
        trainer.print("positive", trainer.history.current["positive"])


@pytest.mark.shows("PTA-42 to PTA-44", "AIT-62")
def test_a_callback_of_the_user_asks_and_prints_by_the_trainer(capfd):
    def fit():
        counts = CountCB()
        t = trainer(counts)
        t.fit(1)
        return counts.name_of_run, counts.names, t.history[-1]["positive"]

    (_, _, positive), two = one_and_two(fit)
    assert two == [("drawn in 0", ["{'rank': 0}", "{'rank': 1}"], positive)] * 2
    assert capfd.readouterr().out.count("positive") == 2


@pytest.mark.shows("AIT-15", "AIT-62", "PTA-44")
def test_a_callback_runs_in_every_process_unless_it_says_where():
    def fit():
        seen = []

        def watching(name, where):
            return type(name, (), dict(on_ranks=where, log=lambda self, trainer: seen.append(name)))()

        where = dict(All=None, Main="main", Second=1, Two={0, 2})
        trainer(*(watching(*pair) for pair in where.items())).fit(1)
        return seen

    assert in_processes(3, fit) == [["All", "Main", "Two"], ["All", "Second"], ["All", "Two"]]


@pytest.mark.shows("PTA-53", "PTA-55")
@pytest.mark.parametrize("batch, rows_of_update", [("whole", 16), ("each", 32)])
def test_the_configuration_counts_the_rows_of_an_update_in_all_processes(batch, rows_of_update):
    def fit():
        seen = []

        def before_batch(trainer):
            seen.append(RunConfig.of(trainer))

        trainer(AccumulationCB(2), batch=batch).fit(1, callbacks=before_batch)
        return seen[0]

    first, second = in_processes(2, fit)
    assert (first.effective_batch_size, second.effective_batch_size) == (rows_of_update,) * 2
    assert (first.n_processes, first.rank, first.is_main) == (2, 0, True)
    assert (second.n_processes, second.rank, second.is_main) == (2, 1, False)


def test_each_process_draws_random_numbers_of_its_own():
    "So dropout and random augmentation differ; afterwards all have those of main"

    def fit():
        drawn = []

        def before_batch(trainer):
            drawn.append(torch.rand(()).item())

        trainer().fit(1, callbacks=before_batch)
        return drawn, torch.rand(()).item()

    (a, after), (b, then) = in_processes(2, fit)
    assert not set(a) & set(b) and after == then


@pytest.mark.shows("AIT-60")
def test_each_epoch_has_an_order_of_its_own_without_telling_the_sampler():
    "Together the processes read each row once in an epoch, in the order of one process"

    def fit():
        read = [], []

        def before_batch(trainer):
            if trainer.training:
                read[trainer.epoch].append(trainer.batch[0][:, 0])

        trainer().fit(2, callbacks=before_batch)
        return read

    one, (first, second) = one_and_two(fit)
    for epoch in (0, 1):
        batches = zip(one[epoch], first[epoch], second[epoch], strict=True)
        assert all(torch.equal(whole, torch.cat(parts)) for whole, *parts in batches)
    assert not torch.equal(torch.cat(one[0]), torch.cat(one[1]))
