"Logs at tracking services, `log/trackers.py`: the real packages, offline, each read back by its own means."

import csv
import importlib.util
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.checkpoints.exports import ExportCB
from isaac_loop.log.log_files import CSV
from isaac_loop.evaluate.evaluator import EvaluatorCB
from isaac_loop.log.loggers import LoggerCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.log.trackers import MLflow, TensorBoard, Trackio, WandB
from isaac_loop.stop.interrupts import InterruptCB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.events import CancelFitException
from isaac_loop.loop.history import updates_of_run
from isaac_loop.loop.trainer import Trainer
from isaac_loop.state.store import CheckpointStore
from runs import Cut, CutCB, callbacks, fit
from runs import make_trainer as make_run
from places import PATHS

N = 12


def need(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


class PerClass:
    def reset(self):
        pass

    def update(self, preds, targets):
        pass

    def compute(self):
        return torch.tensor([0.25, 0.75])


def make_trainer(*callbacks):
    set_seed(1)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(N)]
    return Trainer(
        DataLoaders(batches, batches[:2]),
        F.mse_loss,
        optim.SGD,
        nn.Linear(3, 1),
        [BasicTrainCB(), MetricsCB(recall=PerClass(), show=False), *callbacks],
    )


def show(trainer):
    "One of everything, at the first step"
    if trainer.n_updates > 1:
        return
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([0, 1])
    for name, kind, value, about in [
        ("words", "text", "well said", {}),
        ("scores", "table", [dict(who="me", score=1)], {}),
        ("figure", "figure", figure, {}),
        ("grey", "image", torch.full((1, 4, 5), 0.5), {}),
        ("colour", "image", torch.arange(60, dtype=torch.uint8).view(3, 4, 5), {}),
        ("tone", "audio", torch.sin(torch.arange(80.0)), dict(rate=8000)),
    ]:
        trainer.history.write_media(name, kind, value, **about)


def due(n):
    "The steps that are logged out of `n` updates"
    return [1, *range(5, n + 1, 5)]


def trained(log, n_epochs=2, **options):
    "A trainer that has trained, with what it should have logged"
    trainer = make_trainer(
        LoggerCB(
            log,
            every=5,
            media=show,
            values=dict(norm=lambda t: t.model.weight.norm()),
            params=dict(note="first", layers=[3, 4], nested=dict(deep=1)),
            **options,
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.fit(n_epochs, lr=0.1)
    losses = [o["loss"] for o in trainer.history.batches if o["training"]]
    return trainer, {i: losses[i - 1] for i in due(len(losses))}


@pytest.mark.shows("NEMO-53")
@pytest.mark.parametrize(
    "package, make, extra",
    [
        ("tensorboard", lambda: TensorBoard("x"), "tensorboard"),
        ("wandb", lambda: WandB("x"), "wandb"),
        ("mlflow", lambda: MLflow("x"), "mlflow"),
        ("trackio", lambda: Trackio("x"), "trackio"),
    ],
)
def test_a_package_that_is_not_installed_is_named_where_the_log_is_made(package, make, extra, monkeypatch):
    "The error names the extra"
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"`{package}`, which is not installed.*isaac_loop\[{extra}\]"):
        make()


def test_importing_the_chapter_imports_no_service():
    services = ("tensorboard", "wandb", "mlflow", "trackio")
    code = f"import sys, isaac_loop.log.trackers; sys.exit(any(o in sys.modules for o in {services}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# TensorBoard


def accumulated(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(path), size_guidance=dict(scalars=0, images=0, tensors=0))
    found.Reload()
    return found


@pytest.mark.shows("NEMO-09", "NEMO-13", "NEMO-17", "NEMO-22", "AIT-56 to AIT-58", "SON-20")
@need("tensorboard")
def test_tensorboard_reads_all_of_it_at_its_steps(tmp_path):
    trainer, losses = trained(TensorBoard(tmp_path / "new" / "runs"), alerts=("loss", ">", -1))
    found = accumulated(tmp_path / "new" / "runs")
    assert {o.step: o.value for o in found.Scalars("train/batch_loss")} == pytest.approx(losses)
    for name in ("lr/opt", "train/mean_loss", "train/norm", "time/seconds_per_step"):
        assert [o.step for o in found.Scalars(name)] == list(losses)
    for name in ("train_loss", "valid_loss"):
        assert [(o.step, o.value) for o in found.Scalars(name.replace("_", "/"))] == [
            (i * N + N, pytest.approx(v)) for i, v in enumerate(trainer.history[name])
        ]
    assert (
        [o.value for o in found.Scalars("valid/recall/1")] == [0.75, 0.75]
        and len(found.Scalars("time/elapsed")) == 2
        and len(found.Scalars("time/total_seconds")) == 1
    )
    tags = found.Tags()
    assert (
        set(tags["images"]) == {"figure", "grey", "colour"}
        and tags["audio"] == ["tone"]
        and found.Audio("tone")[0].sample_rate == 8000
    )
    assert (found.Images("grey")[0].width, found.Images("grey")[0].height) == (5, 4)
    texts = {
        o.removesuffix("/text_summary"): found.Tensors(o)[0].tensor_proto.string_val[0].decode()
        for o in tags["tensors"]
        if o.endswith("text_summary")
    }
    assert (
        texts["words"] == "well said"
        and "| me | 1 |" in texts["scores"]
        and texts["outcome"] == "finished"
        and "`loss`" in texts["alerts"]
    )
    assert "| note | first |" in texts["run"] and "BasicTrainCB" in texts["run"]
    params = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"nested.deep" in params and b"layers" in params and b"first" in params
    assert len(list((tmp_path / "new" / "runs").iterdir())) == 1, (
        "one run, and none of its own for the hyper-parameters"
    )


@pytest.mark.shows("NEMO-15")
@need("tensorboard")
def test_a_writer_that_is_there_already_is_used_and_left_open(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    trainer, losses = trained(TensorBoard(writer))
    trainer.fit(1)
    writer.add_scalar("mine", 1, 0)
    writer.close()
    assert [o.step for o in accumulated(tmp_path).Scalars("train/batch_loss")] == due(3 * N) and accumulated(
        tmp_path
    ).Scalars("mine")


@need("tensorboard")
def test_a_resumed_run_is_one_curve(tmp_path):
    def log():
        return LoggerCB(TensorBoard(tmp_path / "tb"), every=1)

    killed = make_run(
        [
            *callbacks(),
            log(),
            CheckpointCB(tmp_path / "store", every=4),
            CutCB("after_backward", lambda t: t.n_updates == 11),
        ]
    )
    with pytest.raises(Cut):
        fit(killed)
    whole = fit(make_run([*callbacks(), log(), CheckpointCB(tmp_path / "store", every=4)]))
    points = accumulated(tmp_path / "tb").Scalars("train/batch_loss")
    assert [o.step for o in points] == list(range(1, 22))
    assert [o.value for o in points] == pytest.approx(
        [o["loss"] for o in whole.history.batches if o["training"]], rel=1e-5
    )


@need("tensorboard")
def test_a_second_run_in_a_folder_is_a_run_of_its_own(tmp_path):
    "It was laid over the first as one zigzag; both go on where they were, also when another came in between"

    def run(store, *more, **options):
        return make_run(
            [
                *callbacks(),
                LoggerCB(TensorBoard(tmp_path / "tb", **options), every=1, run="my try"),
                CheckpointCB(tmp_path / store, every=4),
                *more,
            ]
        )

    def cut():
        return CutCB("after_backward", lambda t: t.n_updates == 11)

    for store in ("a", "b"):
        with pytest.raises(Cut):
            fit(run(store, cut(), filename_suffix=".mine"))
    for store in ("a", "b"):
        fit(fit(run(store)))
    folders = {o.parent for o in (tmp_path / "tb").rglob("events.*")}
    assert len(folders) == 2 and tmp_path / "tb" in folders
    (second,) = folders - {tmp_path / "tb"}
    assert second.parent == tmp_path / "tb" and second.name.startswith("my_try-")
    for o in folders:
        assert [o.step for o in accumulated(o).Scalars("train/batch_loss")] == list(range(1, 43))


@need("tensorboard")
def test_the_files_of_a_resumed_run_are_read_in_the_order_in_which_they_were_written(tmp_path):
    "Names count seconds and then writers, `.9` and `.10`: two of one second came in the wrong order"
    log = TensorBoard(tmp_path)
    for step in (0, 2, 4):
        log.start(dict(id="a", name="a", step=step, params={}, callbacks=[]))
        for n in (step + 1, step + 2):
            log.row(dict(loss=float(n)), n)
        log.close(True)
    assert [o.step for o in accumulated(tmp_path).Scalars("train/batch_loss")] == list(range(1, 7))
    assert len({o.name.split(".")[3] for o in tmp_path.iterdir()}) == 3  # No two of one second


@need("tensorboard")
def test_a_clock_that_was_set_back_mixes_no_files(tmp_path):
    "What was written before had a later name, so what came after it was read first, and hidden"
    log, now = TensorBoard(tmp_path), int(time.time())
    for step in (0, 2, 4):
        log.start(dict(id="a", name="a", step=step, params={}, callbacks=[]))
        for n in (step + 1, step + 2, step + 3):
            log.row(dict(loss=float(step)), n)
        log.close(True)
        if step == 0:
            (file,) = tmp_path.iterdir()
            file.rename(tmp_path / file.name.replace(file.name.split(".")[3], str(now + 7200)))
    points = accumulated(tmp_path).Scalars("train/batch_loss")
    assert [(o.step, o.value) for o in points] == [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (6, 4), (7, 4)]
    assert all(abs(o.wall_time - now) < 600 for o in points)


@need("tensorboard")
@pytest.mark.parametrize("training", [True, False], ids=["training", "validation"])
def test_columns_of_a_pass_that_was_interrupted_have_one_point_at_each_step(training, tmp_path):
    "Those that a run which goes on sends again at the end of the pass, and those that it does not"

    def before_batch(trainer):
        if (trainer.training, trainer.epoch, trainer.batch_num) == (training, 1, 1):
            signal.raise_signal(signal.SIGINT)

    def start(*more):
        log = LoggerCB([TensorBoard(tmp_path / "tb"), CSV(tmp_path / "csv")], every=2)
        save = CheckpointCB(tmp_path / "store", every=4)
        return make_run([*callbacks(), ClipGradCB(1.0), InterruptCB(), save, log, *more])

    with pytest.raises(KeyboardInterrupt):
        fit(start(before_batch))
    fit(start())
    expected = [1, *range(2, 22, 2)]
    found = accumulated(tmp_path / "tb")
    for tag in ("train/batch_loss", "train/grad_norm"):
        assert [o.step for o in found.Scalars(tag)] == expected, tag
    with open(tmp_path / "csv" / "batches.csv") as f:
        assert [int(o["step"]) for o in csv.DictReader(f)] == expected


@need("tensorboard")
def test_tags_of_tensorboard_stand_in_groups(tmp_path):
    "What is shown in one chart has one group, and the number of the epoch has no curve"
    other = EvaluatorCB(dict(test=[(torch.randn(4, 3), torch.randn(4, 1))]))
    make_trainer(other, LoggerCB(TensorBoard(tmp_path))).fit(2)
    tags = accumulated(tmp_path).Tags()["scalars"]
    assert {"train/loss", "valid/loss", "valid/recall/0", "test/loss", "lr/opt", "time/elapsed"} <= set(tags)
    assert {o.split("/")[0] for o in tags} == {"train", "valid", "test", "lr", "time", "fit"}
    assert not any("epoch" in o for o in tags)


def steps_of(folder):
    return [o.step for o in CheckpointStore(folder, read_only=True).list()]


@need("tensorboard")
def test_one_number_tells_a_moment_of_the_run_in_logs_files_and_checkpoints(tmp_path):
    "Updates over all fits: also those before the log was there, of a fit that broke off, and before a resume"

    def show(trainer):
        trainer.history.write_media("said", "text", str(updates_of_run(trainer)))

    def make(*more):
        logs = [CSV(tmp_path / "csv"), TensorBoard(tmp_path / "tb")]
        log, store = LoggerCB(logs, every=4, media=show), CheckpointCB(tmp_path / "store", keep_last=None)
        return make_run([*callbacks(), *more]), [log, store, ExportCB(tmp_path / "out", keep_last=None)]

    def go_through_it(*more):
        trainer, watchers = make(*more)
        trainer.fit(1)
        trainer.fit(1, callbacks=CutCB("before_batch", lambda t: t.n_updates == 3, CancelFitException))
        trainer.add_callbacks(watchers)
        trainer.fit(1)
        trainer.fit(2)
        return trainer

    with pytest.raises(Cut):
        cut = CutCB("after_backward", lambda t: t.history.fit == 3 and t.n_updates == 9)
        go_through_it(cut)
    assert steps_of(tmp_path / "store") == [17, 24]
    trainer = go_through_it()
    assert updates_of_run(trainer) == 7 + 3 + 7 + 14
    epochs = [17, 24, 31]
    assert steps_of(tmp_path / "store") == steps_of(tmp_path / "out") == epochs
    tables = {o.stem: [*csv.DictReader(o.open())] for o in (tmp_path / "csv").glob("*.csv")}
    found = accumulated(tmp_path / "tb")
    assert [int(o["step"]) for o in tables["epochs"]] == epochs
    assert [o.step for o in found.Scalars("valid/loss")] == epochs
    assert [int(o["step"]) for o in tables["steps"]] == [11, 12, 16, 20, 24, 28]
    assert [o.step for o in found.Scalars("train/batch_loss")] == [11, 12, 16, 20, 24, 28]
    assert [(o["step"], o["value"]) for o in tables["media"]] == [
        (str(o), str(o)) for o in (11, 12, 16, 20, 24, 28)
    ]
    assert CheckpointStore(tmp_path / "by hand").list() == []
    assert steps_of(trainer.save(tmp_path / "by hand").parent) == [31]


# Weights & Biases


def wandb_records(folder):
    "All records of the offline runs in `folder`: a log as in LevelDB, with 7 bytes before it"
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(Path(folder).rglob("*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            if at + 7 + length > len(data):
                return  # Being written
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                record = Record()
                record.ParseFromString(whole)
                yield record
                whole = b""


def wandb_read(folder):
    "The same when the runs are complete: their process writes the end after `finish` has returned"
    for _ in range(600):
        records = list(wandb_records(folder))
        if any(r.HasField("exit") for r in records):
            return records
        time.sleep(0.1)
    raise AssertionError("The run was never written to its end")


def wandb_rows(records):
    return [
        {o.key or "/".join(o.nested_key): json.loads(o.value_json) for o in r.history.item}
        for r in records
        if r.HasField("history")
    ]


@pytest.fixture
def wandb_offline(monkeypatch, tmp_path):
    for name, value in dict(
        WANDB_MODE="offline",
        WANDB_SILENT="true",
        WANDB_ERROR_REPORTING="false",
        WANDB_DIR=str(tmp_path),
        WANDB_CACHE_DIR=str(tmp_path / "cache"),
        WANDB_CONFIG_DIR=str(tmp_path / "config"),
        WANDB_DATA_DIR=str(tmp_path / "data"),
    ).items():
        monkeypatch.setenv(name, value)
    import wandb

    wandb.setup()
    yield wandb
    if wandb.run is not None:
        wandb.run.finish()


@pytest.mark.shows("NEMO-22", "NEMO-51", "NEMO-52", "AIT-59", "MIN-14")
@need("wandb")
def test_wandb_has_the_rows_the_settings_the_media_and_the_alerts(wandb_offline, tmp_path):
    "Also samples"
    settings = wandb_offline.Settings(console="off")
    trainer, losses = trained(
        WandB("digits", dir=tmp_path, settings=settings, config=dict(mine=1)),
        alerts=("valid_loss", ">", -1),
        run="baseline",
    )
    assert wandb_offline.run is None, "closed"
    records = wandb_read(tmp_path)
    rows = wandb_rows(records)
    assert {o["step"]: o["loss"] for o in rows if "loss" in o} == pytest.approx(losses) and all(
        "lr" in o for o in rows if "loss" in o
    )
    assert [o["valid_loss"] for o in rows if "valid_loss" in o] == pytest.approx(
        trainer.history["valid_loss"]
    )
    config = {
        o.key: json.loads(o.value_json) for r in records if r.HasField("run") for o in r.run.config.update
    }
    assert (
        config["note"] == "first"
        and config["lr"] == 0.1
        and config["mine"] == 1
        and "order" in config["callbacks"]["BasicTrainCB"]
    )
    assert [(r.run.project, r.run.display_name) for r in records if r.HasField("run")][0] == (
        "digits",
        "baseline",
    )
    media = {
        name: o[f"{name}/_type"]
        for o in rows
        for name in ("words", "scores", "figure", "grey", "tone")
        if f"{name}/_type" in o
    }
    assert media == {
        "words": "table-file",
        "scores": "table-file",
        "figure": "image-file",
        "grey": "image-file",
        "tone": "audio-file",
    }
    (alert,) = [r.alert for r in records if r.HasField("alert")]
    assert "`valid_loss` is" in alert.title and "at step 12" in alert.text
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [0]


@pytest.mark.shows("NEMO-53")
@need("wandb")
def test_a_session_that_is_open_already_is_joined_and_left_open(wandb_offline, tmp_path):
    "And its own steps, which are further on, do not swallow ours"
    run = wandb_offline.init(project="theirs", dir=tmp_path, settings=wandb_offline.Settings(console="off"))
    for i in range(50):
        run.log(dict(mine=i))
    trainer, losses = trained(WandB("ours"))
    assert wandb_offline.run is run and run.config["note"] == "first"
    run.log(dict(mine=50))
    run.finish()
    records = wandb_read(tmp_path)
    rows = wandb_rows(records)
    assert [o["mine"] for o in rows if "mine" in o] == list(range(51)) and [
        o["step"] for o in rows if "loss" in o
    ] == list(losses)
    assert {r.run.project for r in records if r.HasField("run")} == {"theirs"}


# MLflow


@pytest.fixture
def mlflow_local(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    return f"sqlite:///{tmp_path}/store.db"


@pytest.mark.shows("PTA-60", "AIT-57")
@need("mlflow")
@need("sqlalchemy")
def test_mlflow_has_metrics_parameters_tags_and_files(mlflow_local, tmp_path):
    "Read through its client; a second fit goes on with the same run, a killed one fails"
    from mlflow import MlflowClient

    trainer, losses = trained(MLflow("digits", mlflow_local, dict(team="vision")), run="baseline")
    trainer.fit(1, lr=0.2)
    client = MlflowClient(mlflow_local)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "baseline"
    history = {o.step: o.value for o in client.get_metric_history(run.info.run_id, "loss")}
    assert {k: history[k] for k in losses} == pytest.approx(losses) and list(history) == due(3 * N)
    assert [o.value for o in client.get_metric_history(run.info.run_id, "valid_loss")] == pytest.approx(
        trainer.history["valid_loss"]
    )
    assert run.data.metrics["recall/1"] == 0.75
    assert (
        run.data.params["lr"] == "0.1"
        and run.data.params["nested.deep"] == "1"
        and run.data.params["callbacks.BasicTrainCB.order"] == "0"
    )
    assert (
        run.data.tags["team"] == "vision"
        and run.data.tags["outcome"] == "finished"
        and "MetricsCB" in run.data.tags["callbacks"]
    )
    files = {Path(o.path).name for o in client.list_artifacts(run.info.run_id, "media")}
    assert {"words-1.txt", "scores-1.csv", "figure-1.png", "grey-1.png", "tone-1.wav"} <= files
    assert {o.name for o in tmp_path.iterdir()} <= {"store.db", "mlartifacts"}, (
        "nothing in the present folder"
    )

    def before_backward(trainer):
        raise ValueError

    other = make_trainer(LoggerCB(MLflow("digits", mlflow_local)), before_backward)
    with pytest.raises(ValueError):
        other.fit(1)
    assert sorted(o.info.status for o in client.search_runs([run.info.experiment_id])) == [
        "FAILED",
        "FINISHED",
    ]


# Trackio, in a process of its own, as it looks for its folder when it is imported

TRACKIO = """
import sys
sys.path[:0] = {paths}
import test_trackers as t
place = t.Trackio("digits", auto_log_cpu=False, auto_log_gpu=False)
trainer, losses = t.trained(place, alerts=("valid_loss", ">", -1), run="baseline")
trainer.fit(1)
from trackio.sqlite_storage import SQLiteStorage
import json
name, = [o["name"] if isinstance(o, dict) else o for o in SQLiteStorage.get_runs("digits")]
found = dict(name=name, losses=losses, valid=trainer.history["valid_loss"])
found["logs"] = SQLiteStorage.get_logs("digits", name)
found["config"] = SQLiteStorage.get_run_config("digits", name)
found["alerts"] = SQLiteStorage.get_alerts("digits")
print("RESULT" + json.dumps(found, default=str))
"""


@pytest.mark.shows("NEMO-22")
@need("trackio")
def test_trackio_has_the_rows_in_its_local_store(tmp_path):
    env = os.environ | dict(
        TRACKIO_DIR=str(tmp_path),
        HF_HUB_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        MPLCONFIGDIR=str(tmp_path),
    )
    code = TRACKIO.format(paths=[str(Path(__file__).parent), *PATHS])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.partition("RESULT")[2].splitlines()[0])
    assert found["name"].startswith("baseline-")
    loss = {o["step"]: o["loss"] for o in found["logs"] if "loss" in o}
    assert list(loss) == due(3 * N) and {str(k): loss[k] for k in due(2 * N)} == pytest.approx(
        found["losses"]
    )
    assert [o["valid_loss"] for o in found["logs"] if "valid_loss" in o] == pytest.approx(found["valid"])
    media = {k: o[k]["_type"] for o in found["logs"] for k in ("words", "grey", "figure", "tone") if k in o}
    assert media == {
        "words": "trackio.markdown",
        "grey": "trackio.image",
        "figure": "trackio.image",
        "tone": "trackio.audio",
    }
    assert (
        found["config"]["note"] == "first"
        and "BasicTrainCB" in found["config"]["callbacks"]
        and len(found["alerts"]) == 1
    )


@pytest.mark.parametrize("make", [lambda o: TensorBoard(o)])
def test_a_tracker_changes_nothing_about_training(make, tmp_path):
    "The law of all watchers; the weights bit for bit"
    results = []
    for cbs in ([], [LoggerCB(make(tmp_path), every=1, media=show)]):
        trainer = make_trainer(*cbs)
        trainer.fit(2, lr=0.1)
        results.append(
            (torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), torch.get_rng_state())
        )
    assert all(torch.equal(a, b) for a, b in zip(*results))
