"""A run's folder, what is in it, and going on with it.

Folders are compared with what the run really was; nothing of it may change a weight.
"""

import argparse
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
import zipfile
from dataclasses import FrozenInstanceError, dataclass
from datetime import datetime, timedelta, timezone

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import isaac_loop.log.experiment as experiment
import isaac_loop.log.code_version as provenance
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.log.experiment import ExperimentCB
from isaac_loop.log.folder_names import earlier_folder, take_folder
from isaac_loop.log.history_files import HistoryFilesCB
from isaac_loop.stop.interrupts import InterruptCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.log.notify import NotifyCB
from isaac_loop.device.precision import MixedPrecisionCB
from isaac_loop.log.upload import UploadCB, fetch
from isaac_loop.log.run_config import RunConfig
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import EVENTS, CancelFitException
from isaac_loop.log.code_version import git_state
from isaac_loop.state.errors import NoValidCheckpoint
from isaac_loop.state.store import CheckpointStore
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer
from runs import Cut, CutCB, callbacks, fit, make_trainer, momentum_sgd, same
from waiting import InsideCB, RefuseToWait
from experiments import small


def record(folder, name="run.json"):
    return json.loads((folder / name).read_text())


@pytest.fixture(autouse=True)
def no_git_of_the_tests(monkeypatch, request):
    "Most tests need no git, and asking it a hundred times takes seconds"
    if "git" not in request.node.name:
        monkeypatch.setattr(provenance, "_git", lambda *args: None)


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
        found.append(take_folder(tmp_path / "p", "run", "2026-01-31_12-00-00"))

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


def beginning(root, name="net", resume=None, **kwargs):
    return small(ExperimentCB(root, "p", name, resume=resume), CheckpointCB(every=1, **kwargs))


def broken_off(trainer):
    with pytest.raises(Cut):
        trainer.fit(2, callbacks=CutCB("before_batch", lambda t: t.epoch == 1))
    return trainer


def told_of_a_run_before(trainer):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(1)
    return [str(o.message) for o in caught if "has not come to its end" in str(o.message)]


def test_a_run_that_begins_anew_in_a_new_folder_tells_of_the_one_that_has_not_ended(tmp_path):
    "Started again without `resume='latest'` it began anew, and nobody said that the one before waits"
    left = broken_off(beginning(tmp_path)).CheckpointCB.path
    (said,) = told_of_a_run_before(beginning(tmp_path))
    assert left.relative_to(tmp_path).as_posix() in said and "pass `resume='latest'` to `Exp" in said
    broken_off(beginning(tmp_path, resume="latest"))
    assert told_of_a_run_before(beginning(tmp_path, resume="latest")) == []


def test_a_run_that_is_meant_to_be_new_or_goes_on_is_told_nothing(tmp_path):
    assert told_of_a_run_before(beginning(tmp_path)) == told_of_a_run_before(beginning(tmp_path)) == []
    broken_off(beginning(tmp_path))
    assert told_of_a_run_before(beginning(tmp_path, "other")) == []
    assert told_of_a_run_before(beginning(tmp_path, folder=tmp_path / "own")) == []
    broken_off(beginning(tmp_path))
    never = small(ExperimentCB(tmp_path, "p", "net"), CheckpointCB(resume="never"))
    assert told_of_a_run_before(never) == []


def test_a_run_that_is_still_going_on_is_no_run_that_was_left(tmp_path):
    "Two of one name beside one another"
    told = []

    def before_epoch(trainer):
        if trainer.epoch == 1 and trainer.training:
            told.append(told_of_a_run_before(beginning(tmp_path)))

    beginning(tmp_path).fit(2, callbacks=before_epoch)
    assert told == [[]]


def test_who_must_go_on_in_a_folder_that_was_made_just_now_is_told_how(tmp_path):
    broken_off(beginning(tmp_path))
    with pytest.raises(NoValidCheckpoint) as caught:
        small(ExperimentCB(tmp_path, "p", "net"), CheckpointCB(resume="must")).fit(2)
    assert "pass `resume='latest'`" in "".join(caught.value.__notes__)
    trainer = small(ExperimentCB(tmp_path, "p", "net", resume="latest"), CheckpointCB(resume="must"))
    trainer.fit(2)
    assert trainer.n_updates == 6


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


def test_a_complete_run_that_is_started_again_knows_its_folder_and_its_checkpoint(tmp_path):
    "The last lines of a script, such as `torch.save(..., trainer.experiment.folder/'final.pt')`, run again"
    folders, paths = [], []
    for _ in range(3):
        experiment, checkpoint = ExperimentCB(tmp_path, "p", "net", resume="latest"), CheckpointCB()
        trainer = small(experiment, checkpoint)
        trainer.fit(2)
        (trainer.experiment.folder / "final.txt").write_text("done")
        assert experiment.folder == trainer.experiment.folder
        folders.append(experiment.folder)
        paths.append(checkpoint.path)
    assert len(set(folders)) == 1 and len(set(paths)) == 1 and paths[0].parent == folders[0] / "checkpoints"
    trainer.fit(2)
    assert trainer.experiment.folder == folders[0] and len(list((tmp_path / "p").iterdir())) == 1


def test_a_fit_that_did_nothing_in_a_new_folder_leaves_none(tmp_path):
    trainer = small(ExperimentCB(tmp_path, "p", "net", resume="latest"))
    trainer.fit(0)
    assert trainer.experiment is None and list((tmp_path / "p").iterdir()) == []


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
    assert earlier_folder(tmp_path / "p", "run").name == "run_2026-10-25_02-10-00"
    assert earlier_folder(tmp_path / "q", "run") is None
    with pytest.raises(ValueError, match="no such folder to go on in"):
        small(ExperimentCB(tmp_path, "p", resume=tmp_path / "nothing")).fit(1)


def test_the_newest_folder_is_the_one_begun_last_whatever_the_clock_says(tmp_path, capsys):
    "It was set back by more than an hour between two runs, and the first went on; which it was is said"
    first = broken_off(beginning(tmp_path)).experiment.folder
    (first / "run.json").write_text(json.dumps(record(first) | dict(created="2999-01-01")))
    second = broken_off(beginning(tmp_path)).experiment.folder
    trainer = beginning(tmp_path, resume="latest")
    trainer.fit(2)
    assert trainer.experiment.folder == second
    assert f"continuing from {second}/checkpoints/step-0" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.shows("NEMO-60")
def test_several_processes_share_a_time_stamp_and_each_has_a_log(tmp_path):
    "One folder, one record, one log file per rank; a folder that cannot be made is an error of all"
    from several import in_processes, rank, trainer

    def run(root, **kwargs):
        def after_fit(trainer):
            print("this is", rank())

        t = trainer(ExperimentCB(root, "p", tee=True, **kwargs), HistoryFilesCB(plot=None))
        t.fit(1, callbacks=after_fit)
        return t.experiment.folder

    folder, other = in_processes(2, run, tmp_path)
    assert folder == other
    assert {o.name for o in (folder / "logs").iterdir()} == {"log-0.txt", "log-1.txt"}
    assert not (folder / "run-2.json").exists()
    for i in range(2):
        assert f"this is {i}\n" in (folder / "logs" / f"log-{i}.txt").read_text()
    first = record(folder)["fits"][0]
    assert (first["config"]["n_processes"], first["outcome"]) == (2, "finished")
    with pytest.raises(ValueError, match="no such folder to go on in"):
        in_processes(2, lambda: run(tmp_path, resume=tmp_path / "nothing"))


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
