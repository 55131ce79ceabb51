"""A run's folder, its copies far away and the messages about it.

Folders are compared with what the run really was, storages are memory and a server that speaks the protocol
of S3, and mail goes through a server on this machine. None of it may change a weight.
"""

import argparse
import csv
import io
import json
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import warnings
import wave
import zipfile
from dataclasses import FrozenInstanceError, dataclass
from datetime import datetime, timedelta, timezone
from email import message_from_bytes, policy
from pathlib import Path

import fsspec
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import isaac_loop.log.experiment as experiment
import isaac_loop.log.upload as remote
import isaac_loop.log.code_version as provenance
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.log.experiment import ExperimentCB
from isaac_loop.log.history_files import HistoryFilesCB, table_text
from isaac_loop.stop.interrupts import InterruptCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.log.notify import Email, NotifyCB
from isaac_loop.device.precision import MixedPrecisionCB
from isaac_loop.log.upload import UploadCB, fetch
from isaac_loop.log.run_config import RunConfig
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import EVENTS, CancelFitException
from isaac_loop.log.code_version import git_state
from isaac_loop.state.run_folder import Experiment, without_password
from isaac_loop.state.store import CheckpointStore
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer
from runs import Cut, CutCB, callbacks, fit, make_trainer, momentum_sgd, same
from waiting import InsideCB, RefuseToWait


def small(*cbs, model=None):
    "A trainer that is done in a moment"
    set_seed(0)
    data = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(3)]
    return Trainer(
        DataLoaders(data, data[:1]),
        F.mse_loss,
        optim.Adam,
        model or nn.Linear(3, 1),
        [BasicTrainCB(), MetricsCB(show=False), *cbs],
    )


def record(folder, name="run.json"):
    return json.loads((folder / name).read_text())


def files(folder):
    return sorted(o.relative_to(folder).as_posix() for o in folder.rglob("*") if o.is_file())


@pytest.fixture(autouse=True)
def no_git_of_the_tests(monkeypatch, request):
    "Most tests need no git, and asking it a hundred times takes seconds"
    if "git" not in request.node.name:
        monkeypatch.setattr(provenance, "_git", lambda *args: None)


@pytest.fixture
def memory():
    "An empty storage"
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    return fs


# ---- watchers change nothing

WATCHERS = {
    "experiment": lambda folder, sent: [ExperimentCB(folder, "p", tee=True)],
    "files": lambda folder, sent: [HistoryFilesCB(folder / "files", keep_plots=True)],
    "upload": lambda folder, sent: [ExperimentCB(folder, "p"), UploadCB("memory://law")],
    "messages": lambda folder, sent: [NotifyCB(lambda *args: sent.append(args))],
    "all": lambda folder, sent: [
        ExperimentCB(folder, "p", url="memory://law"),
        CheckpointCB(every=1),
        HistoryFilesCB(),
        UploadCB(),
        NotifyCB(lambda *args: sent.append(args)),
    ],
}


@pytest.mark.parametrize("name", WATCHERS)
def test_watching_changes_nothing_and_no_batch_waits(name, tmp_path, memory):
    def run(cbs):
        set_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        data = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(3)]
        trainer = Trainer(
            DataLoaders(
                torch.utils.data.DataLoader(
                    torch.utils.data.TensorDataset(*map(torch.cat, zip(*data))), 5, shuffle=True
                ),
                data[:1],
            ),
            F.mse_loss,
            momentum_sgd,
            model,
            [BasicTrainCB(), MetricsCB(show=False), *cbs],
        )
        mode = RefuseToWait()
        if not any(isinstance(o, CheckpointCB) for o in cbs):
            trainer.add_callback(InsideCB(mode))  # Saving in the middle of an epoch has to wait
        with mode:
            trainer.fit(2, lr=0.1)
        return trainer, torch.get_rng_state()

    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The training loader")
        (plain, before), (watched, after) = run([]), run(WATCHERS[name](tmp_path, []))
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.model.state_dict().values(), watched.model.state_dict().values())
    )
    assert torch.equal(before, after) and plain.history["valid_loss"] == watched.history["valid_loss"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, CancelFitException])
def test_after_a_failure_at_any_event_streams_and_handlers_are_as_before(
    error, tmp_path, memory, monkeypatch
):
    monkeypatch.setattr("isaac_loop.log.notify.history_figure", lambda rows: None)  # Slow
    handlers, streams = list(logging.getLogger().handlers), (sys.stdout, sys.stderr)
    for event in [
        o for o in EVENTS if "fit" in o or "epoch" in o or o in ("log", "before_batch", "after_step")
    ]:
        cbs = [
            ExperimentCB(tmp_path, "p", tee=True),
            HistoryFilesCB(plot=None),
            UploadCB("memory://any"),
            NotifyCB(lambda *args: None),
        ]
        trainer = small(*cbs)
        try:
            trainer.fit(2, callbacks=CutCB(event, lambda t: t.n_updates >= 2 or event == "before_fit", error))
        except (ValueError, KeyboardInterrupt, CancelFitException):
            pass
        assert (sys.stdout, sys.stderr) == streams and logging.getLogger().handlers == handlers, event
        trainer.fit(1)
        assert record(trainer.experiment.folder)["fits"][-1]["outcome"] == "finished", event
        assert (sys.stdout, sys.stderr) == streams and logging.getLogger().handlers == handlers, event


# ---- the folder


@pytest.mark.shows("AIT-44", "SON-26")
def test_the_folder_has_its_layout_and_only_what_was_needed(tmp_path):
    "`<root>/<project>/<name>_<time>`, parts made when something is put there; own files find a place"
    trainer = small(ExperimentCB(tmp_path, "digits", "wide"), CheckpointCB(), HistoryFilesCB())
    trainer.fit(1)
    folder = trainer.experiment.folder
    assert folder.parent == tmp_path / "digits" and re.fullmatch(
        r"wide_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folder.name
    )
    assert trainer.experiment.stamp == folder.name.removeprefix("wide_")
    assert {o.name for o in folder.iterdir()} == {
        "checkpoints",
        "logs",
        "results",
        "plots",
        "code",
        "run.json",
    }
    lone = small(ExperimentCB(tmp_path, "digits", "lone"))
    lone.fit(1)
    assert {o.name for o in lone.experiment.folder.iterdir()} == {"logs", "code", "run.json"}
    lone.experiment.path("mine", "a.txt").write_text("kept")
    assert (lone.experiment.folder / "mine" / "a.txt").read_text() == "kept"
    with pytest.raises(FrozenInstanceError):
        lone.experiment.project = "other"


@pytest.mark.shows("AIT-44")
def test_a_run_that_has_nothing_to_keep_leaves_no_folder(tmp_path):
    "Also beside a checkpoint store, which had locked its part already; the next fit gets a folder"
    trainer = small(ExperimentCB(tmp_path, "p"), CheckpointCB(), model=nn.Linear(4, 1))
    with pytest.raises(RuntimeError):
        trainer.fit(1)
    assert list((tmp_path / "p").iterdir()) == [] and trainer.experiment is None
    trainer.model = nn.Linear(3, 1)
    trainer.fit(1)
    assert record(trainer.experiment.folder)["fits"][0]["outcome"] == "finished"


def test_what_somebody_else_has_put_into_the_folder_is_never_removed(tmp_path):
    class PutCB:
        order = 45

        def before_fit(self, trainer):
            trainer.experiment.path("mine.txt").write_text("precious")
            raise Cut

    with pytest.raises(Cut):
        small(ExperimentCB(tmp_path, "p"), PutCB()).fit(1)
    assert [o.read_text() for o in tmp_path.rglob("mine.txt")] == ["precious"]


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment.time, "strftime", lambda *args: "2026-01-31_12-00-00")
    found, barrier = [], threading.Barrier(8)

    def take():
        barrier.wait()
        found.append(experiment._take_folder(tmp_path / "p", "run", "2026-01-31_12-00-00"))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for o in threads:
        o.start()
    for o in threads:
        o.join()
    assert len(set(found)) == 8 and all(o.is_dir() for o in found)
    trainer = small(ExperimentCB(tmp_path, "p"))
    trainer.fit(1)
    assert trainer.experiment.folder.name == "run_2026-01-31_12-00-00-9"


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "", "a\\b", "a\nb", None, "x" * 200])
def test_names_that_are_no_folder_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="name of one folder"):
        ExperimentCB(tmp_path, name)
    with pytest.raises(ValueError, match="`name` is"):
        ExperimentCB(tmp_path, "p", name)


def test_a_place_that_cannot_be_written_is_an_error_before_the_first_batch(tmp_path):
    (tmp_path / "file").touch()
    batches = []

    def before_batch(trainer):
        batches.append(1)

    with pytest.raises(OSError, match="`ExperimentCB` cannot write to .*Choose a `root`"):
        small(ExperimentCB(tmp_path / "file", "p"), before_batch).fit(1)
    with pytest.raises(OSError, match="`HistoryFilesCB` cannot write to"):
        small(HistoryFilesCB(tmp_path / "file" / "x"), before_batch).fit(1)
    assert batches == []


def test_fits_of_one_trainer_share_a_folder_and_trainers_do_not(tmp_path):
    cb = ExperimentCB(tmp_path, "p")
    trainer = small(cb)
    trainer.fit(1)
    first = trainer.experiment.folder
    trainer.fit(2, lr=0.5)
    assert trainer.experiment.folder == first
    assert [
        (o["fit"], o["config"]["n_epochs"], o["config"]["lr"], o["outcome"]) for o in record(first)["fits"]
    ] == [(0, 1, 0.001, "finished"), (1, 2, 0.5, "finished")]
    assert (first / "logs" / "log.txt").read_text().count("finished") == 2
    shutil.rmtree(first)
    trainer.fit(1)
    assert len(record(trainer.experiment.folder)["fits"]) == 1, "a new one"
    other = small(cb)
    other.fit(1)
    assert other.experiment.folder != trainer.experiment.folder


# ---- who infers


@pytest.mark.shows("AIT-21", "AIT-22")
def test_details_come_from_the_run_or_are_named_as_missing(tmp_path):
    "What is given wins, what is not given comes from the loop, and a loop without says what to do"
    for cb in (CheckpointCB(), HistoryFilesCB(), UploadCB("memory://x")):
        with pytest.raises(
            LookupError, match=rf"`{type(cb).__name__}` was given no `folder`.*add `ExperimentCB"
        ):
            small(cb).fit(1)
    with pytest.raises(LookupError, match="given no `url`, and this run has no experiment"):
        small(UploadCB(folder=tmp_path)).fit(1)
    with pytest.raises(LookupError, match="given no `url`, and the experiment has none"):
        small(UploadCB(), ExperimentCB(tmp_path, "p")).fit(1)
    trainer = small(
        HistoryFilesCB(table="tsv"),
        CheckpointCB(tmp_path / "elsewhere"),
        ExperimentCB(tmp_path / "runs", "p"),
    )  # Whatever the order of adding
    trainer.fit(1)
    assert (trainer.experiment.folder / "results" / "history.tsv").exists() and (
        trainer.experiment.folder / "plots" / "history.png"
    ).exists()
    assert (
        not (trainer.experiment.folder / "checkpoints").exists()
        and len(CheckpointStore(tmp_path / "elsewhere", read_only=True).list()) == 1
    )


def test_a_callback_may_not_hide_the_record(tmp_path):
    cb = CutCB("log", lambda t: False)
    cb.name = "experiment"
    with pytest.raises(ValueError, match="would hide `trainer.experiment`"):
        small(cb)
    assert small().experiment is None


def test_side_runs_make_no_folder(tmp_path):
    trainer = small(ExperimentCB(tmp_path, "p"), HistoryFilesCB(plot=None))
    with trainer.side_run() as side:
        side.fit(1, train=False)
    assert list(tmp_path.iterdir()) == []

    def after_epoch(trainer):
        if not trainer.training and not seen:
            seen.append(trainer.experiment)
            with trainer.side_run() as side:
                side.fit(1, train=False)
            assert trainer.experiment is seen[0]

    seen = []
    trainer.fit(2, callbacks=after_epoch)
    assert len(list((tmp_path / "p").iterdir())) == 1 and len(record(trainer.experiment.folder)["fits"]) == 1


# ---- the record


@pytest.mark.shows("NEMO-60", "AIT-43", "PTA-41")
def test_the_record_says_what_was_run(tmp_path):
    "Hyper-parameters, versions, seeds, settings of callbacks, sources; files and folders that were asked for"
    (tmp_path / "src" / "__pycache__").mkdir(parents=True)
    (tmp_path / "src" / "runs").mkdir()
    for o in ("src/a.py", "src/.secret", "src/__pycache__/a.pyc", "src/runs/old.bin", "notes.md"):
        (tmp_path / o).write_text("x = 1\n")

    class OwnNet(nn.Linear):
        pass

    set_seed(5)
    cb = ExperimentCB(
        tmp_path / "src" / "runs",
        "p",
        hyper=dict(width=3, nan=float("nan"), x=torch.tensor([1, 2])),
        files=[tmp_path / "src", tmp_path / "notes.md"],
    )
    trainer = small(cb, InterruptCB(), model=OwnNet(3, 1))
    cb.hyper["width"] = 99
    trainer.fit(1, lr=0.25)
    folder = trainer.experiment.folder
    found = record(folder)
    assert found["hyper"] == {"width": 99, "nan": "NaN", "x": [1, 2]}
    assert (found["python"], found["torch"], found["seeds"]["torch"]) == (
        ".".join(map(str, sys.version_info[:3])),
        torch.__version__,
        0,
    )
    assert (
        found["fits"][0]["config"] == trainer.run_config.to_dict() and found["fits"][0]["opt_func"] == "Adam"
    )
    assert {"InterruptCB", "BasicTrainCB", "MetricsCB"} <= set(found["fits"][0]["callbacks"])
    code = folder / "code"
    assert "class OwnNet(nn.Linear):" in (code / "model.py").read_text()
    sources = (code / "callbacks.py").read_text()
    assert "class InterruptCB" in sources and "class MetricsCB" in sources
    assert f"torch=={torch.__version__.partition('+')[0]}" in (code / "requirements.txt").read_text()
    assert zipfile.ZipFile(code / "src.zip").namelist() == ["a.py"] and (code / "notes.md").exists()
    with pytest.raises(ValueError, match="not there"):
        ExperimentCB(tmp_path, "p", files=[tmp_path / "nothing"])


@pytest.mark.shows("NEMO-60", "AIT-43", "SON-26")
def test_the_running_script_is_kept_as_it_was_when_the_run_began(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("lr = 0.1\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.delitem(sys.modules, "IPython")
    trainer = small(
        ExperimentCB(tmp_path, "p"),
        CutCB("before_batch", lambda t: script.write_text("lr = 0.2\n") and False),
    )
    trainer.fit(1)
    assert (trainer.experiment.folder / "code" / "train.py").read_text() == "lr = 0.1\n"


def test_secrets_of_the_command_line_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys,
        "orig_argv",
        [
            "python",
            "train.py",
            "--lr",
            "0.1",
            "--api-key",
            "abc1",
            "--password=abc2",
            "TOKEN=abc3",
            "ftp://me:abc4@host/x",
            "--width=8",
        ],
    )
    trainer = small(ExperimentCB(tmp_path, "p", url="memory://u:abc5@x/y?sig=abc6"))
    trainer.fit(1)
    hidden = "--api-key '***' '--password=***' 'TOKEN=***' 'ftp://me:***@host/x'"
    assert record(trainer.experiment.folder)["command"] == f"python train.py --lr 0.1 {hidden} --width=8"
    everything = b"".join(
        o.read_bytes()
        for o in trainer.experiment.folder.rglob("*")
        if o.is_file() and o.parent.name != "code"
    )
    assert not re.search(rb"abc\d", everything)


@pytest.mark.shows("NEMO-60")
def test_git_says_commit_and_changes_and_may_be_missing(tmp_path, monkeypatch):
    "Hash and diff; without git, without a repository or with a git that hangs the run is kept all the same"

    def git(*args):
        return subprocess.run(
            [
                "git",
                "-c",
                "user.name=me",
                "-c",
                "user.email=me@localhost",
                "-c",
                "commit.gpgsign=false",
                *args,
            ],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    script = tmp_path / "train.py"
    script.write_text("lr = 0.1\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    for o in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "First"]):
        git(*o)
    assert git_state(tmp_path)["diff"] == "" and git_state(tmp_path)["changed"] == []
    script.write_text("lr = 0.2\n")
    trainer = small(ExperimentCB(tmp_path / "runs", "p"))
    trainer.fit(1)
    found = record(trainer.experiment.folder)["git"]
    assert found["commit"] == git("rev-parse", "HEAD").strip() and " M train.py" in found["changed"]
    patch = (trainer.experiment.folder / "code" / "git.diff").read_text()
    assert patch == git("diff", "HEAD")

    def hangs(*args, **kwargs):
        raise subprocess.TimeoutExpired("git", 20)

    for name, value in (("PATH", str(tmp_path)), ("run", hangs)):
        with monkeypatch.context() as m:
            if name == "PATH":
                m.setenv(name, value)
            else:
                m.setattr(provenance.subprocess, name, value)
            assert git_state(tmp_path) == {}
            trainer = small(ExperimentCB(tmp_path / "runs", "p"))
            trainer.fit(1)
            assert record(trainer.experiment.folder)["git"] == {}
    assert git_state(tmp_path / "nowhere") == {}


def test_hyper_parameters_come_in_three_kinds(tmp_path):
    @dataclass
    class Hyper:
        width: int = 3

    for given in (Hyper(), argparse.Namespace(width=3), dict(width=3)):
        assert ExperimentCB(tmp_path, "p", hyper=given).hyper == {"width": 3}
    assert ExperimentCB(tmp_path, "p").hyper == {}
    with pytest.raises(TypeError, match="have names"):
        ExperimentCB(tmp_path, "p", hyper=[1, 2])


@pytest.mark.shows("PTA-41")
def test_the_configuration_is_what_the_loop_does():
    "Sizes, accumulation, precision and updates, and it cannot be changed"
    data = torch.utils.data.TensorDataset(torch.randn(22, 3), torch.randn(22, 1))
    dls = DataLoaders(torch.utils.data.DataLoader(data, 4), torch.utils.data.DataLoader(data, 11))
    trainer = Trainer(
        dls, F.mse_loss, optim.SGD, nn.Linear(3, 1), [BasicTrainCB(), AccumulationCB(4), MixedPrecisionCB()]
    )
    trainer.fit(2, lr=0.1)
    config = trainer.run_config
    assert (
        config.train_batch_size,
        config.valid_batch_size,
        config.batches_per_epoch,
        config.accumulation,
        config.effective_batch_size,
    ) == (4, 11, 6, 4, 16)
    assert (
        config.updates_per_epoch * 2 == trainer.n_updates == 4
        and config.precision == "bfloat16"
        and config.is_main
        and config.n_processes == 1
    )
    assert RunConfig(**config.to_dict()) == config
    with pytest.raises(FrozenInstanceError):
        config.n_epochs = 5


@pytest.mark.shows("NEMO-61")
def test_a_seed_with_determinism_and_benchmark_mode_is_refused():
    "Seeds and deterministic algorithms belong together, and a race between algorithms does not"
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="contradict each other"):
        set_seed(1, deterministic=True, benchmark=True)
    assert torch.equal(state, torch.get_rng_state()), "nothing was half done"
    try:
        set_seed(1, benchmark=True)
        assert torch.backends.cudnn.benchmark
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


# ---- the log


@pytest.mark.shows("NEMO-60", "SON-26")
def test_the_log_has_rows_logging_prints_and_the_traceback(tmp_path):
    trainer = small(ExperimentCB(tmp_path, "p", tee=True))

    def before_epoch(trainer):
        print("printed", trainer.epoch, trainer.training)
        sys.stderr.write("10 %\r100 %\n")
        logging.getLogger("some.part").warning("a warning of %s", "theirs")
        logging.getLogger("some.part").info("too quiet")
        if trainer.epoch == 1:
            raise Cut("in the second epoch")

    with pytest.raises(Cut):
        trainer.fit(3, callbacks=before_epoch)
    text = (trainer.experiment.folder / "logs" / "log.txt").read_text()
    assert (
        "Fit 0 of p/run: 3 epochs" in text
        and "printed 0 True" in text
        and "WARNING some.part: a warning of theirs" in text
    )
    assert " 100 %\n" in text and "10 %\r" not in text and "too quiet" not in text
    assert f"train_loss {trainer.history[0]['train_loss']:.3f}" in text
    assert "Traceback" in text and "Cut: in the second epoch" in text and "before_epoch" in text
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", o) for o in text.splitlines())
    assert (
        record(trainer.experiment.folder)["fits"][0] | dict(outcome="Cut", reason="in the second epoch")
        == record(trainer.experiment.folder)["fits"][0]
    )


def test_logging_speaks_as_if_nobody_listened(tmp_path, capfd, monkeypatch):
    "A warning without any handler still goes to the screen, once; one with a handler of its own only there"
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level, own = root.level, io.StringIO()
    handled = logging.getLogger("handled")
    handler = logging.StreamHandler(own)
    handled.addHandler(handler)

    def before_epoch(trainer):
        if trainer.training:
            logging.getLogger("lonely").warning("on the screen")
            handled.warning("elsewhere")

    try:
        trainer = small(ExperimentCB(tmp_path, "p"))
        trainer.fit(1, callbacks=before_epoch)
    finally:
        handled.removeHandler(handler)
    assert (
        capfd.readouterr().err == "on the screen\n"
        and own.getvalue() == "elsewhere\n"
        and root.level == level
        and root.handlers == []
    )
    text = (trainer.experiment.folder / "logs" / "log.txt").read_text()
    assert text.count("on the screen") == text.count("elsewhere") == 1


def test_a_stream_that_somebody_put_before_ours_stays(tmp_path):
    "And what it passes on is not copied any more"
    before, mine = sys.stdout, []

    class Front:
        def __init__(self, inner):
            self.inner = inner

        def write(self, text):
            mine.append(text)
            return self.inner.write(text)

        def flush(self):
            self.inner.flush()

    trainer = small(ExperimentCB(tmp_path, "p", tee=True))

    def after_fit(trainer):
        sys.stdout = Front(sys.stdout)

    try:
        trainer.fit(1, callbacks=after_fit)
        assert isinstance(sys.stdout, Front)
        print("afterwards")
    finally:
        sys.stdout = before
    assert (
        "afterwards" in mine
        and "afterwards" not in (trainer.experiment.folder / "logs" / "log.txt").read_text()
    )


@pytest.mark.parametrize("what", ["logs", "run.json", "everything"])
def test_a_disk_that_fails_in_the_middle_is_a_warning(what, tmp_path):
    def before_epoch(trainer):
        if trainer.epoch != 1 or not trainer.training:
            return
        folder = trainer.experiment.folder
        if what == "everything":
            shutil.rmtree(folder)
            folder.touch()
        else:
            path = folder / what
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            path.touch() if what == "logs" else path.mkdir()

    trainer = small(ExperimentCB(tmp_path, "p"), HistoryFilesCB(plot=None))
    with pytest.warns(UserWarning, match="[Tt]raining goes on") as seen:
        trainer.fit(3, callbacks=before_epoch)
    assert len(trainer.history) == 3 and trainer.n_updates == 9
    assert len({str(o.message) for o in seen}) == len(seen), "each kind once"


# ---- going on


@pytest.mark.shows("SON-27", "SON-34", "SON-07", "SON-17", "AIT-39")
def test_an_interrupted_experiment_goes_on_in_its_folder(tmp_path):
    "Ctrl-C stores trainer and model; started again, the run ends bit for bit as if nothing had happened"
    whole = fit(make_trainer(callbacks()))

    def start(resume, *extra):
        cb = ExperimentCB(tmp_path, "p", "net", hyper=dict(width=16), resume=resume)
        return make_trainer([*callbacks(), InterruptCB(), cb, CheckpointCB(every=2), *extra])

    import signal

    trainer = start(
        "latest", CutCB("after_backward", lambda t: t.n_updates == 9 and signal.raise_signal(signal.SIGINT))
    )
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    folder = trainer.experiment.folder
    assert record(folder)["fits"][0]["outcome"] == "KeyboardInterrupt"
    newest = CheckpointStore(folder / "checkpoints", read_only=True).latest()
    assert (
        newest.manifest["info"]
        == dict(
            fit=0,
            monitor=None,
            mode="min",
            project="p",
            name="net",
            hyper=dict(width=16),
            measured_with="EMACB",
        )
        and newest.step == 10
    )
    other = small(ExperimentCB(tmp_path, "p", "net_2"))
    other.fit(1)  # A newer one, of another name
    again = fit(start("latest"))
    assert again.experiment.folder == folder and again.experiment.stamp == trainer.experiment.stamp
    same(whole, again)
    assert (
        record(folder, "run-2.json")["fits"][0]["outcome"] == "finished"
        and (folder / "code" / "start-2" / "callbacks.py").exists()
    )


@pytest.mark.parametrize("order", [35, 200])
def test_a_run_that_was_killed_when_all_was_trained_is_finished_by_the_next_start(order, tmp_path):
    "Before the last checkpoint or after it: the record said for ever that it was running"

    def start(root):
        return make_trainer([*callbacks(), ExperimentCB(root, "p", "net", resume="latest"), CheckpointCB()])

    def after_fit(trainer):
        shutil.copytree(tmp_path / "a", tmp_path / "b")  # As a kill leaves it

    after_fit.order = order
    fit(start(tmp_path / "a"), 2, callbacks=after_fit)
    (folder,) = (tmp_path / "b" / "p").iterdir()
    assert record(folder)["fits"][0]["outcome"] == "running"
    for _ in range(2):
        fit(start(tmp_path / "b"), 2)
    (row,) = record(folder)["fits"]
    assert (row["outcome"], row["n_updates"]) == ("finished", 14) and not (folder / "run-2.json").exists()
    assert (folder / "logs" / "log.txt").read_text().count("finished") == 1


def test_code_is_kept_again_only_where_it_has_changed(tmp_path):
    "And a start that was killed is told from one that is running"

    def start(*more):
        return small(ExperimentCB(tmp_path, "p", resume="latest", files=[tmp_path / "notes.md"]), *more)

    (tmp_path / "notes.md").write_text("one")
    for note, more in (
        ("one", ()),
        ("one", ()),
        ("two", ()),
        ("two", ()),
        ("two", [InterruptCB()]),
        ("one", ()),
    ):
        (tmp_path / "notes.md").write_text(note)
        trainer = start(*more)
        trainer.fit(1)
    folder = trainer.experiment.folder
    assert sorted(o.name for o in (folder / "code").iterdir() if o.is_dir()) == [
        "start-3",
        "start-5",
        "start-6",
    ]
    assert [record(folder, f"run{n}.json")["code"] for n in ("", "-2", "-3", "-4")] == [
        "code",
        "code",
        "code/start-3",
        "code/start-3",
    ]
    found = record(folder)
    found["fits"][0]["outcome"] = "running"
    for o in range(2, 7):
        (folder / f"run-{o}.json").unlink()
    (folder / "run.json").write_text(json.dumps(found))
    start().fit(1)
    assert (record(folder)["fits"][0]["outcome"], record(folder)["fits"][0]["reason"]) == (
        "broken off",
        "the run went on in run-2.json",
    )


def test_a_name_that_the_system_cannot_write_is_refused_where_it_was_typed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "fsencode", lambda o: str(o).encode("ascii")
    )  # As in the locale C without UTF-8 mode
    with pytest.raises(ValueError, match="`name` is 'rün'.*PYTHONUTF8=1"):
        ExperimentCB(tmp_path, "p", "rün")
    with pytest.raises(ValueError, match="`root` is .*PYTHONUTF8=1"):
        ExperimentCB("läufe", "p")


def test_the_newest_folder_is_the_one_begun_last(tmp_path):
    "Not the last by name: clocks are set back twice a year"
    for name, minutes in (
        ("run_2026-10-25_02-30-00", 0),
        ("run_2026-10-25_02-10-00", 40),
        ("run_2026-10-25_02-50-00", 20),
    ):
        (tmp_path / "p" / name).mkdir(parents=True)
        (tmp_path / "p" / name / "run.json").write_text(
            json.dumps(
                dict(
                    created=(
                        datetime(2026, 10, 25, tzinfo=timezone.utc) + timedelta(minutes=minutes)
                    ).isoformat()
                )
            )
        )
    (tmp_path / "p" / "run_2026-10-25_03-00-00").mkdir()
    (tmp_path / "p" / "run_2026-10-25_03-10-00").mkdir()
    (tmp_path / "p" / "run_2026-10-25_03-10-00" / "run.json").write_text("half a rec")
    assert experiment._earlier(tmp_path / "p", "run").name == "run_2026-10-25_02-10-00"
    assert experiment._earlier(tmp_path / "q", "run") is None
    with pytest.raises(ValueError, match="no such folder to go on in"):
        small(ExperimentCB(tmp_path, "p", resume=tmp_path / "nothing")).fit(1)


PROCESSES = """
import os, sys, torch, torch.distributed as dist
from torch.nn import functional as F
from isaac_loop.log.experiment import ExperimentCB
from isaac_loop.log.history_files import HistoryFilesCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.trainer import Trainer
root, store = sys.argv[1:]
child = os.fork() # Quicker than importing everything twice
rank = int(child == 0)
dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=2)
batch = torch.ones(2, 3), torch.ones(2, 1)
callbacks = [BasicTrainCB(), ExperimentCB(root, 'p', tee=True), HistoryFilesCB(plot=None)]
dls, model = DataLoaders([batch], [batch]), torch.nn.Linear(3, 1)
trainer = Trainer(dls, F.mse_loss, torch.optim.SGD, model, callbacks)
def after_fit(trainer): print('this is', rank)
trainer.fit(1, callbacks=after_fit)
dist.barrier()
dist.destroy_process_group()
if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.shows("NEMO-60")
def test_several_processes_share_a_time_stamp_and_each_has_a_log(tmp_path):
    "One folder, one record, one log file per rank"
    done = subprocess.run(
        [sys.executable, "-c", PROCESSES, str(tmp_path / "runs"), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs" / "p").iterdir()
    assert {o.name for o in (folder / "logs").iterdir()} == {"log-0.txt", "log-1.txt"} and not (
        folder / "run-2.json"
    ).exists()
    for i in range(2):
        assert f"this is {i}\n" in (folder / "logs" / f"log-{i}.txt").read_text()
    assert (
        record(folder)["fits"][0]["config"]["n_processes"] == 2
        and record(folder)["fits"][0]["outcome"] == "finished"
    )


# ---- the history as files


@pytest.mark.shows("AIT-37")
def test_metrics_that_appear_later_get_a_header(tmp_path):
    "Text, tabs or commas; the file is always a table"

    def cleanup_epoch(trainer):
        if trainer.epoch == 1 and not trainer.training:
            trainer.history.write(**{"f1, macro": 0.5})

    trainer = small(HistoryFilesCB(tmp_path, table=["csv", "tsv", "txt"], plot=None))

    def log(trainer):
        headers.append(
            (tmp_path / "results" / "history.csv").read_text().splitlines()[0] if trainer.epoch else ""
        )

    headers, log.order = [], 99
    trainer.fit(3, callbacks=[cleanup_epoch, log])
    assert "f1" in headers[1]
    for kind, mark in (("csv", ","), ("tsv", "\t")):
        with open(tmp_path / "results" / f"history.{kind}", newline="") as f:
            rows = list(csv.DictReader(f, delimiter=mark))
        assert [o["f1, macro"] for o in rows] == ["", "0.5", ""]
        assert [float(o["valid_loss"]) for o in rows] == trainer.history["valid_loss"], "every digit"
    assert (tmp_path / "results" / "history.txt").read_text().count("f1, macro") == 1
    assert not list(tmp_path.rglob(".part*"))
    assert table_text([]) == "\n"


@pytest.mark.shows("AIT-36", "AIT-22")
def test_curves_are_drawn_when_and_as_they_are_wanted(tmp_path):
    "Each epoch or at the end, png or pdf, a folder for each epoch"
    trainer = small(ExperimentCB(tmp_path, "p"), HistoryFilesCB(plot="pdf", keep_plots=True))
    trainer.fit(2)
    assert files(trainer.experiment.folder / "plots") == [
        "epoch-0/history.pdf",
        "epoch-1/history.pdf",
        "history.pdf",
    ]
    trainer = small(HistoryFilesCB(tmp_path / "end", each_epoch=False))
    seen = []

    def log(trainer):
        seen.append(files(tmp_path / "end"))

    log.order = 99
    trainer.fit(2, callbacks=log)
    assert seen == [[], []] and files(tmp_path / "end") == ["plots/history.png", "results/history.csv"]
    trainer = small(HistoryFilesCB(tmp_path / "cut", each_epoch=False))
    with pytest.raises(Cut):
        trainer.fit(3, callbacks=CutCB("after_backward", lambda t: t.epoch == 2))
    assert len((tmp_path / "cut" / "results" / "history.csv").read_text().splitlines()) == 3
    for bad in (dict(table="xlsx"), dict(plot="word")):
        with pytest.raises(ValueError, match=f"`{next(iter(bad))}` is"):
            HistoryFilesCB(tmp_path, **bad)


@pytest.mark.shows("AIT-42")
def test_media_become_files_that_can_be_opened(tmp_path):
    "Labels, reports and pictures are kept with their epoch, the model in its checkpoint"
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    sound = torch.sin(torch.arange(100) / 5)

    def cleanup_epoch(trainer):
        if trainer.training:
            return
        write = trainer.history.write_media
        write("labels", "table", [dict(true=1, predicted=0), dict(true=2, predicted=2)])
        write("report/final", "text", "accuracy: 50 %")
        write("report/final", "text", "once more")
        write("curve", "figure", Figure(figsize=(1, 1)))
        write("digit", "image", torch.tensor([[[0.0, 1.0], [0.5, 2.0]]]))
        write("beep", "audio", sound, rate=8000)

    trainer = small(ExperimentCB(tmp_path, "p"), CheckpointCB(), HistoryFilesCB(plot=None))
    trainer.fit(1, callbacks=cleanup_epoch)
    folder = trainer.experiment.folder
    assert files(folder / "results") == [
        "epoch-0/beep.wav",
        "epoch-0/labels.csv",
        "epoch-0/report-final-2.txt",
        "epoch-0/report-final.txt",
        "history.csv",
    ]
    assert (folder / "results" / "epoch-0" / "labels.csv").read_text() == "true,predicted\n1,0\n2,2\n"
    assert (imread(folder / "plots" / "epoch-0" / "digit.png") * 255).round().tolist() == [
        [0, 255],
        [128, 255],
    ]
    with wave.open(str(folder / "results" / "epoch-0" / "beep.wav")) as f:
        assert (f.getframerate(), f.getnframes()) == (8000, 100)
    assert torch.equal(
        CheckpointStore(folder / "checkpoints", read_only=True).load()[0]["weight"], trainer.model.weight
    )


# ---- copies far away


class Far:
    "A file system in between, which notes what is asked of it, and fails when told"

    def __init__(self, fs):
        self.fs, self.calls, self.fail = fs, [], lambda name, path: False

    def __getattr__(self, name):
        return getattr(self.fs, name)

    def _note(self, name, path):
        if self.fail(name, path):
            raise OSError("the line is down")
        self.calls.append((name, path.rpartition("/far/")[2]))

    def put_file(self, local, path):
        self._note("put", path)
        self.fs.put_file(local, path)

    def rm_file(self, path):
        self._note("rm", path)
        self.fs.rm_file(path)

    def take(self):
        calls, self.calls = [o for o in self.calls if ".probe" not in o[1]], []
        return calls


@pytest.fixture
def far(memory, monkeypatch):
    made, connect = Far(memory), remote._connect
    monkeypatch.setattr(remote, "_connect", lambda url, options: (made, connect(url, options)[1]))
    return made


def whole_run():
    return fit(make_trainer(callbacks()))


def cut_run(cbs, n=11):
    trainer = make_trainer([*callbacks(), *cbs, CutCB("after_backward", lambda t: t.n_updates == n)])
    with pytest.raises(Cut):
        fit(trainer)
    return trainer


@pytest.mark.shows("AIT-38", "AIT-21")
def test_a_run_goes_on_from_memory_bit_for_bit(tmp_path, memory):
    "Uploaded with its experiment, fetched elsewhere, and ended as if it had never moved"
    trainer = cut_run(
        [ExperimentCB(tmp_path / "here", "p", url="memory://bucket/runs"), CheckpointCB(every=2), UploadCB()]
    )
    target = trainer.UploadCB.target
    assert (
        target == f"memory://bucket/runs/p/{trainer.experiment.folder.name}" and trainer.UploadCB.behind == []
    )
    assert sorted(remote._files_there(memory, target.partition("://")[2])) == [
        o for o in files(trainer.experiment.folder) if "/." not in f"/{o}"
    ]
    shutil.rmtree(tmp_path / "here")
    folder = fetch(target, tmp_path / "there" / trainer.experiment.folder.name)
    again = fit(
        make_trainer(
            [
                *callbacks(),
                ExperimentCB(tmp_path / "there", "p", resume=folder),
                CheckpointCB(every=2),
                UploadCB("memory://bucket/runs"),
            ]
        )
    )
    same(whole_run(), again)
    assert again.UploadCB.target == target and "run-2.json" in remote._files_there(
        memory, target.partition("://")[2]
    )


@pytest.fixture(scope="module")
def s3():
    "A server on this machine that speaks the protocol of S3, with an empty bucket"
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = dict(
        key="me",
        secret="very-secret",
        client_kwargs=dict(endpoint_url=f"http://{host}:{port}", region_name="eu-west-1"),
        skip_instance_cache=True,
    )
    fsspec.filesystem("s3", **options).mkdir("bucket")
    yield options
    server.stop()


@pytest.mark.shows("AIT-38")
def test_a_run_goes_on_from_s3_bit_for_bit(s3, tmp_path):
    "A real client and the real protocol; what is in the bucket is what is in the folder"
    trainer = cut_run(
        [
            CheckpointCB(tmp_path / "here", every=2, keep_last=2),
            UploadCB("s3://bucket/runs/first", tmp_path / "here", **s3),
        ]
    )
    assert trainer.UploadCB.behind == []
    fs = fsspec.filesystem("s3", **s3)
    found = remote._files_there(fs, "bucket/runs/first")
    assert (
        found
        == {
            o: (tmp_path / "here" / o).stat().st_size
            for o in files(tmp_path / "here")
            if not o.startswith(".")
        }
        and len(found) == 7
    )
    again = fit(
        make_trainer(
            [
                *callbacks(),
                CheckpointCB(fetch("s3://bucket/runs/first", tmp_path / "there", **s3), every=2),
                UploadCB("s3://bucket/runs/first", tmp_path / "there", **s3),
            ]
        )
    )
    same(whole_run(), again)
    assert {o.path.name for o in CheckpointStore(tmp_path / "there", read_only=True).list()} == {
        o.partition("/")[0] for o in remote._files_there(fs, "bucket/runs/first") if "/" in o
    }, "old ones are dropped there too"


def test_a_bucket_that_is_not_there_is_an_error_before_the_first_batch_and_is_not_made(s3, tmp_path):
    trainer = small(UploadCB("s3://misspelt/runs", tmp_path, retries=0, **s3))
    with pytest.raises(
        OSError,
        match="`UploadCB` cannot write to `s3://misspelt/runs`.*Make sure that the bucket or folder exists",
    ) as caught:
        trainer.fit(1)
    assert trainer.n_updates == 0 and "very-secret" not in str(caught.value)
    assert "misspelt" not in fsspec.filesystem("s3", **s3).ls("")


def test_protocols_that_cannot_be_used_are_refused_where_they_are_typed(monkeypatch):
    with pytest.raises(ValueError, match="`s4://bucket` is no address"):
        UploadCB("s4://bucket")
    from fsspec.registry import _registry

    for name in ("s3", "s3a"):
        monkeypatch.delitem(_registry, name, raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ImportError, match=r"pip install isaac_loop\[s3\]"):
        UploadCB("s3://bucket/runs")
    for bad in (dict(every=0), dict(every=True), dict(retries=-1)):
        with pytest.raises(ValueError):
            UploadCB("memory://x", **bad)


def check_order(calls):
    "Whoever stops after any of `calls` leaves only checkpoints that are whole"
    there = set()
    for what, path in calls:
        there.add(path) if what == "put" else there.discard(path)
        for o in there:
            if o.endswith("manifest.json"):
                assert {
                    o.replace("manifest.json", name) for name in ("model.safetensors", "state.pt")
                } <= there, (what, path)


def test_at_any_moment_every_checkpoint_there_is_whole(tmp_path, far):
    "Data before the manifest; of what is dropped the manifest first; hidden files stay here"
    trainer = make_trainer(
        [*callbacks(), CheckpointCB(tmp_path, every=3), UploadCB("memory://far/", tmp_path)]
    )
    fit(trainer)
    calls = far.take()
    assert sum(what == "rm" for what, _ in calls) >= 3 and not any("/." in f"/{path}" for _, path in calls)
    check_order(calls)
    once = [path for what, path in calls if what == "put" and "step" in path and "21" not in path]
    assert len(once) == len(set(once)) == 15, (
        "nothing is copied twice but the last one, which is saved again when the fit is over"
    )


def test_a_checkpoint_that_is_replaced_is_taken_back_first(tmp_path, far):
    def before_epoch(trainer):
        if not trainer.training:
            return
        with CheckpointStore(tmp_path, run_id="one") as store:
            store.save({"w": torch.full((3,), float(trainer.epoch))}, step=1)

    fit(small(UploadCB("memory://far", tmp_path), before_epoch), 2)
    calls = far.take()
    check_order(calls)
    name = "step-00000001/manifest.json"
    assert [what for what, path in calls if path == name] == ["put", "rm", "put"]
    assert CheckpointStore(fetch("memory://far", tmp_path / "back"), read_only=True).load()[0][
        "w"
    ].tolist() == [1, 1, 1]


def test_only_what_is_new_or_has_changed_is_copied_also_by_the_next_process(tmp_path, far):
    (tmp_path / "data").mkdir()
    for name in ("data/big.bin", "log.txt"):
        (tmp_path / name).write_text("0")

    def before_epoch(trainer):
        if trainer.epoch:
            (tmp_path / "log.txt").write_text(f"epoch {trainer.epoch}")

    fit(small(UploadCB("memory://far", tmp_path), before_epoch), 3)
    assert [o[1] for o in far.take()] == ["data/big.bin", "log.txt", "log.txt", "log.txt"]
    fit(small(UploadCB("memory://far", tmp_path)), 1)
    assert far.take() == []
    far.fs.rm("/far/data/big.bin")  # Somebody deleted it there
    fit(small(UploadCB("memory://far", tmp_path)), 1)
    assert [o[1] for o in far.take()] == ["data/big.bin"]
    fit(small(UploadCB("memory://far", tmp_path, every=2)), 5)
    (tmp_path / "data" / "big.bin").unlink()
    fit(small(UploadCB("memory://far", tmp_path)), 1)
    assert far.take() == [], "only checkpoints are ever deleted there"


def test_a_storage_that_fails_in_the_middle_costs_a_warning_and_catches_up(tmp_path, far):
    "And the copy can be gone on from at any time"
    bad = []
    far.fail = lambda name, path: bool(bad) and name == "put" and path.endswith(bad[0])

    def before_epoch(trainer):
        if trainer.training:
            bad[:] = ["state.pt"] if trainer.epoch in (1, 2) else []

    def log(trainer):
        behind.append(list(trainer.UploadCB.behind))

    behind, log.order = [], 99
    trainer = make_trainer(
        [
            *callbacks(),
            CheckpointCB(tmp_path / "here"),
            UploadCB("memory://far", tmp_path / "here", retries=1, wait=0),
        ]
    )
    with pytest.warns(
        UserWarning, match="could not copy to `memory://far` .OSError: the line is down.*Training goes on"
    ) as seen:
        fit(trainer, 4, callbacks=[before_epoch, log])
    assert len([o for o in seen if "UploadCB" in str(o.message)]) == 1
    assert behind[2] and behind[2][0].endswith("state.pt") and trainer.UploadCB.behind == []
    check_order(far.take())
    assert len(CheckpointStore(fetch("memory://far", tmp_path / "there"), read_only=True).list()) == 2
    same(fit(make_trainer(callbacks()), 4), trainer)


def test_a_complete_run_copies_its_end_if_it_did_not_arrive(tmp_path, far, capsys):
    far.fail = lambda name, path: name == "put" and not path.endswith(".txt")
    with pytest.warns(UserWarning, match="Training goes on"):
        fit(
            make_trainer(
                [*callbacks(), CheckpointCB(tmp_path), UploadCB("memory://far", tmp_path, retries=0)]
            )
        )
    far.fail = lambda name, path: False
    again = fit(make_trainer([*callbacks(), CheckpointCB(tmp_path), UploadCB("memory://far", tmp_path)]))
    assert (
        "step-00000021/manifest.json" in remote._files_there(far.fs, "/far") and again.UploadCB.behind == []
    )


@pytest.mark.shows("AIT-29")
def test_the_end_of_the_log_is_copied_also_after_an_error(tmp_path, memory):
    "After each epoch and at the end, whatever the end is"
    trainer = small(
        UploadCB("memory://logs"), ExperimentCB(tmp_path, "p"), CutCB("before_batch", lambda t: t.epoch == 1)
    )

    def before_epoch(trainer):
        if trainer.epoch == 1:
            copied.append(memory.cat_file(f"/logs/p/{trainer.experiment.folder.name}/logs/log.txt").decode())

    copied = []
    with pytest.raises(Cut):
        trainer.fit(2, callbacks=before_epoch)
    assert "epoch 0, train_loss" in copied[0] and "Traceback" not in copied[0]
    text = memory.cat_file(f"/logs/p/{trainer.experiment.folder.name}/logs/log.txt").decode()
    assert "Traceback" in text and "Cut, after" in text
    assert (
        json.loads(memory.cat_file(f"/logs/p/{trainer.experiment.folder.name}/run.json"))["fits"][0][
            "outcome"
        ]
        == "Cut"
    )


def test_a_storage_that_shows_and_deletes_nothing_still_takes_copies(tmp_path, far):
    "Drop boxes: all is copied once more at the next start, and a warning says that nothing is deleted there"

    def find(path, detail):
        raise PermissionError("no listing")

    far.find, far.fail = find, lambda name, path: name == "rm"
    (tmp_path / "a.txt").touch()
    for _ in range(2):
        with pytest.warns(UserWarning, match="may write to `memory://far`, but not delete") as seen:
            small(UploadCB("memory://far", tmp_path)).fit(1)
        assert far.take() == [("put", "a.txt")] and len(seen) == 1


def test_a_folder_on_a_shared_disk_is_a_storage_too(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.txt").write_text("kept")
    trainer = small(UploadCB((tmp_path / "disk" / "deep").as_uri(), tmp_path / "here"))
    trainer.fit(1)
    assert files(tmp_path / "disk") == ["deep/a.txt"]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="`UploadCB` cannot write to"):
        small(UploadCB((tmp_path / "file" / "x").as_uri(), tmp_path / "here", wait=0)).fit(1)


def test_fetching_gives_all_or_nothing(tmp_path, far):
    for o in ("a.txt", "b/c.txt"):
        far.fs.pipe_file(f"/far/{o}", o.encode())

    def get_file(path, local):
        if path.endswith("c.txt"):
            raise OSError("the line is down")
        far.fs.get_file(path, local)

    far.get_file = get_file
    with pytest.raises(OSError, match="the line is down"):
        fetch("memory://far", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    del far.get_file
    (tmp_path / "new").mkdir()
    assert files(fetch("memory://far", tmp_path / "new")) == [".uploaded.json", "a.txt", "b/c.txt"]
    with pytest.raises(ValueError, match="is there already, and may be newer"):
        fetch("memory://far", tmp_path / "new")
    with pytest.raises(FileNotFoundError, match="no files below"):
        fetch("memory://nothing", tmp_path / "other")
    far.find = lambda path, detail: {"/far/../../evil.txt": dict(size=1)}
    with pytest.raises(ValueError, match="leads out of the folder"):
        fetch("memory://far", tmp_path / "other")
    assert {o.name for o in tmp_path.iterdir()} == {"new"}


def test_passwords_in_addresses_are_never_shown(tmp_path, memory, monkeypatch):
    url = "ftp://me:p4ss@host/runs"
    connect = remote._connect
    monkeypatch.setattr(remote, "_connect", lambda url, options: connect("memory://runs", {}))
    tracking = TrackingCB()
    trainer = small(
        ExperimentCB(tmp_path, "p", url=url),
        UploadCB(url, secret="p4ss", wait=0),
        NotifyCB(
            Email("localhost", 25, "a@b", "c@d", user="u", password="p4ss", tls=None), every=None, end=False
        ),
        tracking,
    )

    def before_epoch(trainer):
        trainer.UploadCB._fs = None

    with pytest.warns(UserWarning) as seen:
        trainer.fit(1, callbacks=before_epoch)
    shown = [str(o.message) for o in seen] + [
        repr(o)
        for o in (
            trainer.experiment,
            trainer.UploadCB,
            tracking.fit_stats,
            trainer.NotifyCB,
            trainer.NotifyCB._send,
        )
    ]
    shown += [
        o.read_text() for o in trainer.experiment.folder.rglob("*") if o.is_file() and o.parent.name != "code"
    ]
    assert not any("p4ss" in o for o in shown) and "ftp://me:***@host/runs" in "".join(shown)
    assert (
        without_password("at s3://b/x and sftp://u:p4ss@h:22/y?k=p4ss.")
        == "at s3://b/x and sftp://u:***@h:22/y?***"
    )
    assert "p4ss" not in repr(Experiment("p", "r", "now", Path("x"), url=url)) and "p4ss" not in str(
        Experiment("p", "r", "now", Path("x"), url=url).to_dict()
    )


# ---- messages


class Box:
    "Keeps the mails that come in"

    def __init__(self):
        self.mails = []

    async def handle_DATA(self, server, session, envelope):
        self.mails.append(message_from_bytes(envelope.content, policy=policy.default))
        self.rcpt = envelope.rcpt_tos
        return "250 OK"


@pytest.fixture
def mail_server():
    "Starts mail servers on free ports of this machine"
    from aiosmtpd.controller import Controller

    class FreePort(Controller):
        def _trigger_server(self):
            self.port = self.server.sockets[0].getsockname()[1]
            super()._trigger_server()

    running = []

    def start(**options):
        box = Box()
        running.append(FreePort(box, hostname="127.0.0.1", port=0, **options))
        running[-1].start()
        return box, running[-1].port

    yield start
    for o in running:
        o.stop()


@pytest.mark.shows("AIT-28")
def test_rows_hyper_parameters_and_curves_come_by_mail(tmp_path, mail_server):
    "After each epoch and at the end"
    box, port = mail_server()
    trainer = small(
        ExperimentCB(tmp_path, "digits", "wide", hyper=dict(width=256)),
        NotifyCB(Email("127.0.0.1", port, "gpu@x.org", ["me@x.org", "you@x.org"], tls=None)),
    )
    trainer.fit(2)
    assert [o["Subject"] for o in box.mails] == [
        "Epoch 1 of 2: digits/wide",
        "Epoch 2 of 2: digits/wide",
        "Finished: digits/wide",
    ]
    assert box.rcpt == ["me@x.org", "you@x.org"] and box.mails[0]["From"] == "gpu@x.org"
    text = box.mails[-1].get_body().get_content()
    assert (
        "width: 256" in text
        and f"{trainer.history.latest('valid_loss'):.3f}" in text
        and "n_updates: 6" in text
    )
    attached = {o.get_filename(): o for o in box.mails[-1].iter_attachments()}
    assert attached["history.png"].get_content_type() == "image/png" and attached[
        "history.png"
    ].get_content().startswith(b"\x89PNG")
    assert "valid_loss" in attached["history.txt"].get_content()


def certificate(folder):
    "A key and a certificate for this machine, signed by itself"
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    import ipaddress

    key, name, now = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "here")]),
        datetime.now(timezone.utc),
    )
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
    made = made.add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
    ).sign(key, hashes.SHA256())
    file = folder / "certificate.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    return server, ssl.create_default_context(cafile=file)


@pytest.mark.parametrize("tls", ["starttls", "ssl"])
@pytest.mark.filterwarnings("ignore:Requiring AUTH")  # Of the server
def test_a_login_goes_through_an_encrypted_line_only(tls, tmp_path, mail_server, monkeypatch):
    from aiosmtpd.smtp import AuthResult

    monkeypatch.setattr("isaac_loop.log.notify.history_figure", lambda rows: None)  # Slow
    seen = []

    def authenticator(server, session, envelope, mechanism, data):
        seen.append((session.ssl is not None or tls == "ssl", data.login, data.password))
        return AuthResult(success=data.password == b"p4ss", handled=False)

    theirs, ours = certificate(tmp_path)
    options = (
        dict(tls_context=theirs, require_starttls=True) if tls == "starttls" else dict(ssl_context=theirs)
    )
    box, port = mail_server(
        authenticator=authenticator, auth_required=True, auth_require_tls=tls == "starttls", **options
    )

    def email(password):
        return Email(
            "127.0.0.1", port, "a@x.org", "b@x.org", user="me", password=password, tls=tls, context=ours
        )

    email("p4ss")("Hello", "text", {})
    assert seen == [(True, b"me", b"p4ss")] and box.mails[0].get_content().strip() == "text"
    trainer = small(NotifyCB(email("wr0ng")))
    with pytest.warns(UserWarning, match="could not send a message .SMTPAuthenticationError") as warned:
        trainer.fit(1)
    assert "wr0ng" not in str(warned[0].message) and len(box.mails) == 1
    tried = len(seen)
    untrusting = Email("127.0.0.1", port, "a@x.org", "b@x.org", user="me", password="p4ss", tls=tls)
    with pytest.raises(ssl.SSLError):
        untrusting("Hello", "text", {})
    assert len(seen) == tried, "no password for a server with a certificate that nobody knows"


def test_an_email_that_could_not_work_is_refused():
    for bad, match in (
        (dict(tls="tls"), "`tls` is"),
        (dict(user="me"), "both `user` and `password`"),
        (dict(user="me", password="x", tls=None), "readable by everybody"),
        (dict(recipients=[]), "empty"),
    ):
        with pytest.raises(ValueError, match=match):
            Email(**{**dict(host="mail.x.org", port=25, sender="a@x.org", recipients="b@x.org"), **bad})
    for bad in ("me@x.org", None):
        with pytest.raises(TypeError, match="cannot be called"):
            NotifyCB(bad)
    with pytest.raises(TypeError, match="does not take that"):
        NotifyCB(lambda subject: None)
    with pytest.raises(ValueError, match="`every` is 0"):
        NotifyCB(print, every=0)


def test_a_server_that_is_down_costs_one_warning(monkeypatch):
    monkeypatch.setattr("isaac_loop.log.notify.history_figure", lambda rows: None)  # Slow
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # Taken, and nobody listens
        trainer = small(NotifyCB(Email("127.0.0.1", s.getsockname()[1], "a@x.org", "b@x.org", tls=None)))
        with pytest.warns(UserWarning, match="could not send a message .*Training goes on") as seen:
            trainer.fit(3)
    assert len(seen) == 1 and len(trainer.history) == 3
    tries = []

    def send(subject, text, files):
        tries.append(subject)
        if len(tries) == 1:
            raise TimeoutError

    with pytest.warns(UserWarning):
        small(NotifyCB(send)).fit(2)
    assert len(tries) == 3, "later messages are tried"


@pytest.mark.parametrize(
    "way, word, reason",
    [
        ("error", "Failed", "Cut: pulled"),
        ("cancel", "Cancelled", "enough"),
        ("stop", "Stopped", "time is up"),
        ("interrupt", "Interrupted", "KeyboardInterrupt"),
        ("end", "Finished", ""),
    ],
)
def test_every_end_is_told_in_its_own_word(way, word, reason, monkeypatch):
    monkeypatch.setattr("isaac_loop.log.notify.history_figure", lambda rows: None)
    sent = []

    def before_backward(trainer):
        if trainer.epoch != 1:
            return
        if way == "error":
            raise Cut("pulled")
        if way == "cancel":
            raise CancelFitException("enough")
        if way == "interrupt":
            raise KeyboardInterrupt
        if way == "stop":
            trainer.request_stop("time is up")

    trainer = small(NotifyCB(lambda *args: sent.append(args), every=2), before_backward)
    try:
        trainer.fit(3)
    except (Cut, KeyboardInterrupt):
        pass
    assert sent[-1][0] == f"{word}: Linear" and reason in sent[-1][1]
    assert ("Traceback" in sent[-1][1]) == (way == "error")
    assert len(sent) == (2 if way in ("stop", "end") else 1)
    quiet = []
    trainer = small(NotifyCB(lambda *args: quiet.append(args), every=None, end=False), before_backward)
    try:
        trainer.fit(3)
    except (Cut, KeyboardInterrupt):
        pass
    assert len(quiet) == (way == "error")


def test_a_second_ctrl_c_waits_for_no_server(tmp_path, far):
    class HurryCB:
        hurried = False

        def before_step(self, trainer):
            self.hurried = True
            raise KeyboardInterrupt

    sent = []
    (tmp_path / "a.txt").touch()
    trainer = small(UploadCB("memory://far", tmp_path), NotifyCB(lambda *args: sent.append(args)), HurryCB())
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(1)
    assert far.take() == [] and sent == []


def test_an_interrupt_while_copying_loses_nothing_that_was_copied(tmp_path, far):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(name)

    def stop(name, path):
        if path.endswith("b.txt"):
            raise KeyboardInterrupt

    far.fail = stop
    with pytest.raises(KeyboardInterrupt):
        small(UploadCB("memory://far", tmp_path)).fit(1)
    far.fail = lambda name, path: False
    assert [o[1] for o in far.take()][:1] == ["a.txt"]
    small(UploadCB("memory://far", tmp_path)).fit(1)
    assert sorted(o[1] for o in far.take()) == ["b.txt", "c.txt"]


@pytest.mark.parametrize("far", ["here", "here/b", "here/deep/er"])
def test_a_folder_is_not_copied_into_itself(far, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "x").write_text("x")
    for url in (str(tmp_path / far), (tmp_path / far).as_uri()):
        with pytest.raises(ValueError, match="the same folder or inside it"):
            small(UploadCB(url, tmp_path / "here")).fit(1)
    assert sorted(o.name for o in (tmp_path / "here").iterdir()) == ["x"]
    fit(small(UploadCB(str(tmp_path / "herein"), tmp_path / "here")), 2)
    assert (tmp_path / "herein" / "x").read_text() == "x", "a name that begins alike is another place"


def test_an_experiment_is_not_copied_onto_itself(tmp_path):
    with pytest.raises(ValueError, match="the same folder or inside it"):
        small(ExperimentCB(tmp_path, "p"), UploadCB(str(tmp_path))).fit(1)


def test_a_folder_in_which_there_never_was_a_file_is_mentioned(tmp_path):
    with pytest.warns(UserWarning, match="never found a file in"):
        small(UploadCB("memory://far", tmp_path / "missing")).fit(1)

    def log(trainer):
        (tmp_path / "late").write_text("x")

    fit(small(UploadCB("memory://far", tmp_path), log), 2)


# ---- mistakes, found by others


def test_an_address_is_no_folder(tmp_path, monkeypatch):
    "A local folder called `s3:` would be made, and the run be lost with the machine"
    from isaac_loop.checkpoints.exports import ExportCB
    from isaac_loop.inspection.gradients import GradientPlotCB
    from isaac_loop.show.live_plot import LivePlotCB
    from isaac_loop.evaluate.reports import PredictionsCSVCB
    from isaac_loop.state.checkpoint_files import load_weights
    import isaac_loop.checkpoints.save_and_load  # noqa: F401  `trainer.save`

    monkeypatch.chdir(tmp_path)
    trainer = small()
    trainer.fit(1)
    takers = [
        CheckpointCB,
        ExportCB,
        GradientPlotCB,
        LivePlotCB,
        lambda o: PredictionsCSVCB(f"{o}.csv"),
        lambda o: TrackingCB(f"{o}.jsonl"),
        HistoryFilesCB,
        CheckpointStore,
        load_weights,
        lambda o: ExperimentCB(o, "p"),
        lambda o: ExperimentCB("runs", "p", resume=o),
        lambda o: CheckpointCB("a", resume=o),
        lambda o: UploadCB("memory://b", o),
        lambda o: fetch("memory://b", o),
        trainer.save,
        trainer.load,
    ]
    for take in takers:
        for address in ("s3://bucket/run", "memory://runs/a", "file:///tmp/x"):
            with pytest.raises(ValueError, match=r"is an address, `\w+://...`.*UploadCB"):
                take(address)
    assert not list(tmp_path.iterdir())


def test_what_is_no_path_is_named(tmp_path):
    from isaac_loop.evaluate.reports import PredictionsCSVCB

    for make in (
        lambda: PredictionsCSVCB(None),
        lambda: ExperimentCB(tmp_path, "p", resume=True),
        lambda: ExperimentCB(tmp_path, "p", files=[3]),
        lambda: CheckpointCB(3),
    ):
        with pytest.raises(TypeError, match="is no path"):
            make()
    assert ExperimentCB(tmp_path, "p", files=None).files == []
    for bad in (dict(retries=None), dict(retries=1.5), dict(wait="x"), dict(retries=-1)):
        with pytest.raises(ValueError, match="`retries` is|`wait` is"):
            UploadCB("memory://b", **bad)


@pytest.mark.parametrize(
    "value, kind, name",
    [
        (torch.rand(1, 2, 3, 4), "image", "i"),
        ("a text", "text", "x" * 300),
        ("a text", "text", "\u00e4" * 300),
    ],
    ids=["shape", "long", "umlauts"],
)
def test_a_medium_that_cannot_be_written_costs_nothing_else(value, kind, name, tmp_path):
    def after_epoch(trainer):
        if not trainer.training:
            return
        trainer.history.write_media(name, kind, value)
        trainer.history.write_media("fine", "text", "all is well")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        small(after_epoch, HistoryFilesCB(tmp_path)).fit(3)
    assert (
        len((tmp_path / "results" / "history.csv").read_text().splitlines()) == 4
        and (tmp_path / "plots" / "history.png").exists()
    )
    assert all((tmp_path / "results" / f"epoch-{i}" / "fine.txt").exists() for i in range(3))
    assert [str(o.message).startswith("`HistoryFilesCB` could not write image `i` to") for o in caught] == [
        True
    ] * (kind == "image")
    assert kind == "image" or len(files(tmp_path / "results" / "epoch-0")) == 2


def test_names_that_become_one_file_get_numbers(tmp_path):
    def after_epoch(trainer):
        for o in ("a/b", "a b"):
            trainer.training and trainer.history.write_media(o, "text", o)

    small(after_epoch, HistoryFilesCB(tmp_path)).fit(1)
    assert [(tmp_path / "results" / "epoch-0" / o).read_text() for o in ("a-b.txt", "a-b-2.txt")] == [
        "a/b",
        "a b",
    ]


def test_a_table_that_could_not_be_written_is_written_later(tmp_path):
    blocked = tmp_path / "results" / "history.csv"

    def before_epoch(trainer):
        if trainer.epoch == 0:
            (blocked / "x").mkdir(parents=True, exist_ok=True)
        if trainer.epoch == 2 and blocked.is_dir():
            shutil.rmtree(blocked)

    with pytest.warns(UserWarning, match="could not write `history.csv`"):
        small(before_epoch, HistoryFilesCB(tmp_path)).fit(3)
    assert len(blocked.read_text().splitlines()) == 4


def test_a_copy_within_the_folder_is_refused_and_a_folder_that_never_came_is_told(tmp_path):
    source = tmp_path / "run"
    source.mkdir()
    for cbs in ([UploadCB(str(source / "b"), source)], [UploadCB(f"file://{source}", source)]):
        with pytest.raises(ValueError, match="the same folder or inside it"):
            small(*cbs).fit(1)
    with pytest.raises(ValueError, match="the same folder or inside it"):
        small(ExperimentCB(source, "p"), UploadCB(str(source))).fit(1)
    (source / "x").write_text("x")
    small(UploadCB(str(tmp_path / "run 2"), source)).fit(1)
    with pytest.warns(UserWarning, match="never found a file in"):
        small(UploadCB(str(tmp_path / "far"), tmp_path / "nowhere")).fit(1)


@pytest.mark.parametrize("every", [1, None])
def test_a_message_may_cancel_the_fit_and_not_its_end(every):
    told = []

    def send(subject, text, files):
        told.append(subject)
        raise CancelFitException("enough")

    trainer = small(NotifyCB(send, every=every))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(3)
    assert len(trainer.history) == (1 if every else 3) and len(told) == (2 if every else 1)
