"The store of checkpoints: which ones stay, what is in them, and two runs in one folder."

import errno
import json
import math
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import time
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from isaac_loop.state import atomic_folders
from isaac_loop.state.errors import (
    CheckpointFolderBusy,
    CheckpointWriteFailed,
    NoValidCheckpoint,
    UnsaveableState,
)
from isaac_loop.state.checkpoint_files import Checkpoint, load_weights
from isaac_loop.state.store import CheckpointStore
from places import ROOT
from stores import FILES, make, manifest_of, quiet_load, save, visible


WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    "A test cannot cut the power, so only the order of `fsync` is tested; waiting for it would test nothing"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


# ---------------------------------------------------------------- retention


def model_of_retention(saved, keep_last, keep_best, keep_every, mode):
    "The rule in ten lines: which of `saved`, (step, score) in the order of saving, are still there"
    alive = []
    for step, score in saved:
        alive = [o for o in alive if o[0] != step] + [(step, score)]
        finite = [o for o in alive if math.isfinite(o[1])]
        ranked = sorted(finite, key=lambda o: o[1] if mode == "min" else -o[1])
        safe = [
            *alive[-keep_last:],
            *ranked[:keep_best],
            *(o for o in alive if keep_every and o[0] % keep_every == 0),
        ]
        alive = [o for o in alive if any(o is p for p in safe)]
    return [o[0] for o in alive]


scores = st.sampled_from([0.1, 0.2, 0.2, 0.3, 0.5, float("nan"), float("inf"), float("-inf"), -1.0])
steps = st.sampled_from([1, 2, 3, 5, 8, 9, 10, 99, 100, 101, 9_999, 10_000, 123_456_789])


@pytest.mark.shows("NEMO-26", "NEMO-35", "AIT-40", "PTA-25")
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    saved=st.lists(st.tuples(steps, scores), min_size=1, max_size=10),
    keep_last=st.integers(2, 4),
    keep_best=st.integers(0, 3),
    keep_every=st.sampled_from([None, 5, 100]),
    mode=st.sampled_from(["min", "max"]),
    name=st.sampled_from(["step-{step}", "step-{step:08}", "same", "x-{loss:.1f}", "{step}-STEP"]),
)
def test_retention_is_the_rule(saved, keep_last, keep_best, keep_every, mode, name, tmp_path_factory):
    "Ties, NaN, going back, 9 999 and 10 000, folders of others, any names"
    folder = tmp_path_factory.mktemp("retention") / "run"
    (folder / "step-1-mine").mkdir(parents=True)
    (folder / "step-1-mine" / "notes.txt").write_text("keep me")
    foreign = make(folder.parent / "other", (7, 9_999), run_id="other")
    for o in visible(foreign):
        shutil.copytree(foreign / o, folder / f"zz-{o}")
    with CheckpointStore(folder, "r", keep_last, keep_best, keep_every, name, "loss", mode) as store:
        for step, score in saved:
            save(store, step, metrics={"loss": score})
            assert store.latest().step == step
            assert len(store.list()) >= min(2, len({o for o, _ in saved[: saved.index((step, score)) + 1]}))
        assert [o.step for o in store.list()] == model_of_retention(
            saved, keep_last, keep_best, keep_every, mode
        )
        finite = [o for o in store.list() if math.isfinite(o.metrics["loss"])]
        best = store.best()
        assert (best is None) == (not finite)
        if best:
            assert best.metrics["loss"] == (min if mode == "min" else max)(o.metrics["loss"] for o in finite)
            assert json.loads((folder / "best.json").read_text())["path"] == best.path.name
        assert json.loads((folder / "last.json").read_text())["path"] == store.latest().path.name
    assert (folder / "step-1-mine" / "notes.txt").read_text() == "keep me"
    assert {"zz-step-00000007", "zz-step-00009999"} <= set(visible(folder))
    shutil.rmtree(folder.parent)


@pytest.mark.shows("AIT-40")
def test_the_list_that_deleted_the_best(tmp_path):
    "Accuracies .5 .9 .6 .7 .4 with the best two kept; the fault kept .5 and .6"
    with CheckpointStore(tmp_path, keep_best=2, monitor="accuracy", mode="max") as store:
        for step, accuracy in enumerate([0.5, 0.9, 0.6, 0.7, 0.4]):
            save(store, step, metrics={"accuracy": accuracy})
        assert [o.metrics["accuracy"] for o in store.ranked()] == [0.9, 0.7, 0.4]
        assert store.best().step == 1
        store.keep_best = 1
        save(store, 5, metrics={"accuracy": 0.1})
        assert [o.metrics["accuracy"] for o in store.list()] == [0.9, 0.4, 0.1]


@pytest.mark.shows("NEMO-35", "NEMO-28")
def test_step_and_epoch_with_the_same_number_do_not_go_together(tmp_path):
    "Names end alike, and the checkpoints of an earlier process are counted"
    for name, ids in (("net-STEP-{step}", range(1, 4)), ("net-EPOCH-{epoch}", range(1, 4))):
        for n in ids:
            with CheckpointStore(tmp_path, run_id=name[:6], pattern=name) as store:
                save(store, n, epoch=n)
    assert visible(tmp_path) == ["net-EPOCH-2", "net-EPOCH-3", "net-STEP-2", "net-STEP-3"]


def test_the_one_resumed_from_is_never_deleted(tmp_path):
    "It may be the only one that is any good"
    make(tmp_path, (1, 2, 3, 4), run_id="r")
    with CheckpointStore(tmp_path) as store:
        assert store.load("step-00000002")[2]["run_id"] == store.run_id == "r"
        for step in (3, 4, 5, 6):
            save(store, step)
            assert store.latest().step == step, "the run goes on from there, whatever its former life left"
        assert [o.step for o in store.list()] == [2, 5, 6]


def test_a_new_run_in_an_old_folder_leaves_the_others_alone(tmp_path):
    "Numbers of another run neither hide the new ones nor are they overwritten"
    make(tmp_path, (10, 1000), run_id="old")
    with CheckpointStore(tmp_path) as store:
        for step in (10, 20, 30):
            save(store, step)
    assert visible(tmp_path) == ["step-00000010", "step-00000020", "step-00000030", "step-00001000"]
    assert Checkpoint(tmp_path / "step-00000010").run_id == "old"
    again = CheckpointStore(tmp_path, read_only=True)
    assert again.load()[1]["step"] == 30 and again.run_id == store.run_id
    assert CheckpointStore(tmp_path, run_id="old", read_only=True).latest().step == 1000


def test_a_name_that_is_taken_by_another_run_is_not_overwritten(tmp_path):
    make(tmp_path, (10,), run_id="old")
    (tmp_path / "step-00000020").mkdir()
    with CheckpointStore(tmp_path) as store:
        assert [save(store, o).name for o in (10, 20, 20)] == [
            "step-00000010-2",
            "step-00000020-2",
            "step-00000020-2",
        ]
    assert os.listdir(tmp_path / "step-00000020") == []


def test_a_damaged_one_does_not_count_as_one_of_the_two(tmp_path):
    "Two whole ones remain, however many others there are"
    with CheckpointStore(tmp_path, run_id="r") as store:
        for step in (1, 2, 3):
            save(store, step)
        (tmp_path / "step-00000003" / "state.pt").write_bytes(b"")
        save(store, 4)
        assert [o.step for o in store.list()] == [2, 4]
        assert [o.name for o in store.damaged()] == ["step-00000003"]


def test_what_somebody_put_into_a_checkpoint_is_not_deleted(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / "step-00000001" / "notes.txt").write_text("the good one")
    save(store, 2)
    with pytest.warns(UserWarning, match="notes.txt"):
        save(store, 3)
    assert (tmp_path / "step-00000001" / "notes.txt").exists()
    store.close()


FOREIGN = [
    ".tmp-results-2024",
    ".old-notes-1",
    ".trash-mine-0",
    ".tmp-results-20240101",
    ".old-step-00000010-00000001",
    ".trash-x-0a0b0c0d",
]


def test_what_others_put_into_the_folder_stays(tmp_path):
    "A name like ours is no proof, and neither is the name of a file in it; a file or a link is never ours"
    make(tmp_path / "run", (10,), run_id="r")
    for i, name in enumerate(FOREIGN):
        for kind in ("folder", "file", "link"):
            folder = tmp_path / f"{kind}-{i}"
            shutil.copytree(tmp_path / "run", folder)
            if kind == "folder":
                (folder / name).mkdir()
                (folder / name / "model.safetensors").write_text("mine")
            elif kind == "file":
                (folder / name).write_text("mine")
            else:
                (folder / name).symlink_to("step-00000010")
            with CheckpointStore(folder, run_id="r") as store:
                save(store, 20)
            assert os.path.lexists(folder / name) and [o.step for o in store.list()] == [10, 20]


def test_a_hidden_folder_of_ours_with_something_else_in_it_stays(tmp_path):
    make(tmp_path, (10,))
    hidden = tmp_path / ".tmp-step-00000020-00000001"
    shutil.copytree(tmp_path / "step-00000010", hidden)
    (hidden / "notes.txt").write_text("mine")
    CheckpointStore(tmp_path).close()
    assert sorted(os.listdir(hidden)) == sorted([*FILES, "notes.txt"])


def test_a_replaced_checkpoint_of_another_run_is_not_put_among_ours(tmp_path):
    "Copied in; ours gets its name back, also when it is the only one of its run, beside an old run"
    make(tmp_path / "other", (30,), run_id="other")
    make(tmp_path / "ours", (10,), run_id="old")
    make(tmp_path / "new", (40,), run_id="r")
    shutil.copytree(tmp_path / "other" / "step-00000030", tmp_path / "ours" / ".old-step-00000030-00000001")
    for kind in ("old", "tmp"):
        shutil.copytree(
            tmp_path / "new" / "step-00000040", tmp_path / "ours" / f".{kind}-step-00000040-00000001"
        )
    with CheckpointStore(tmp_path / "ours") as store:
        assert [o.run_id for o in store.all()] == ["old", "r"]
    assert (tmp_path / "ours" / ".old-step-00000030-00000001").exists()


def test_small_files_of_others_are_neither_overwritten_nor_deleted(tmp_path):
    "Every save without a `monitor` deleted a `best.json`, whoever had written it"
    for name in ("best.json", "last.json"):
        (tmp_path / name).write_text('{"accuracy": 0.9}')
    with CheckpointStore(tmp_path) as store, pytest.warns(UserWarning, match="did not write it"):
        save(store, 10)
    assert [(tmp_path / o).read_text() for o in ("best.json", "last.json")] == ['{"accuracy": 0.9}'] * 2


def test_a_lock_file_of_others_is_not_overwritten(tmp_path):
    (tmp_path / "notes").write_text("mine")
    for make_it in (
        lambda: (tmp_path / ".lock").symlink_to("notes"),
        lambda: (tmp_path / ".lock").write_text("mine"),
    ):
        make_it()
        with pytest.raises(CheckpointWriteFailed, match="cannot be used for checkpoints"):
            CheckpointStore(tmp_path)
        assert (tmp_path / ".lock").read_text() == "mine"
        (tmp_path / ".lock").unlink()


def copied(name):
    "A step's folder with only one of its files"
    return lambda run: [o.unlink() for o in (run / "step-00000010").iterdir() if o.name != name]


TRACES = {
    "only weights": (copied("model.safetensors"), "step-00000010"),
    "only the state": (copied("state.pt"), "step-00000010"),
    "only the manifest": (copied("manifest.json"), "step-00000010"),
    "nothing in the folder": (copied(None), "step-00000010"),
    "weights without a folder": (
        lambda run: [
            (run / "step-00000010" / "model.safetensors").rename(run / "step-10.safetensors"),
            shutil.rmtree(run / "step-00000010"),
        ],
        "step-10.safetensors",
    ),
    "the state without a folder": (
        lambda run: [
            (run / "step-00000010" / "state.pt").rename(run / "state.pt"),
            shutil.rmtree(run / "step-00000010"),
        ],
        "state.pt",
    ),
    "a checkpoint as the folder": (
        lambda run: [o.rename(run / o.name) for o in (run / "step-00000010").iterdir()],
        "manifest.json",
    ),
    "a hint": (lambda run: shutil.rmtree(run / "step-00000010"), "last.json"),
    "moved into a folder": (
        lambda run: [(run / "old").mkdir(), (run / "step-00000010").rename(run / "old" / "step-00000010")],
        "old",
    ),
    "a link to elsewhere": (
        lambda run: [
            (run / "step-00000010").rename(run.parent / "there"),
            (run / "step-00000010").symlink_to(run.parent / "there"),
        ],
        "step-00000010",
    ),
    "a link to nothing": (
        lambda run: [shutil.rmtree(run / "step-00000010"), (run / "step-00000010").symlink_to("gone")],
        "step-00000010",
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_what_is_left_of_a_run_is_named(name, tmp_path):
    change, trace = TRACES[name]
    change(make(tmp_path / "run", (10,)))
    store = CheckpointStore(tmp_path / "run", read_only=True)
    assert trace in [o.name for o in store.traces()] and not store.list()
    with pytest.raises(NoValidCheckpoint, match=trace), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.load()


def test_what_may_lie_beside_checkpoints_is_no_trace(tmp_path):
    "Results, logs, other weights, another store below, another name, and what a killed process leaves"
    from safetensors.torch import save_file

    make(tmp_path / "exports", (10,))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "manifest.json").write_text("{}")
    (tmp_path / "log.json").write_text("{}")
    (tmp_path / ".tmp-step-00000010-00000001").mkdir()
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    make(tmp_path)
    assert CheckpointStore(tmp_path, read_only=True).traces() == {}
    with CheckpointStore(tmp_path) as store:
        path = save(store, 20)
        (tmp_path / "favourite").symlink_to(path.name)
        assert store.traces() == {}


def test_a_link_to_the_newest_is_passed_over_aloud(tmp_path):
    make(tmp_path / "run", (10, 20))
    (tmp_path / "run" / "step-00000020").rename(tmp_path / "there")
    (tmp_path / "run" / "step-00000020").symlink_to(tmp_path / "there")
    loaded, told = quiet_load(tmp_path / "run")
    assert loaded[1]["step"] == 10 and len(told) == 1 and "is a link to" in told[0]


# ---------------------------------------------------------------- two runs, copies, locks


def test_a_lock_that_somebody_closed_is_let_go_without_a_word(tmp_path):
    "A daemon closes all files at its start; the number may belong to another file by then"
    store = CheckpointStore(tmp_path / "run")
    fd = store._lock.fd
    os.close(fd)
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    try:
        assert other == fd
        store.close()
        os.write(other, b"still open")
    finally:
        os.close(other)
    CheckpointStore(tmp_path / "run").close()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_file_system_without_locks_is_one_error(tmp_path, monkeypatch):
    "It was followed by `Exception ignored in FolderLock.__del__`"

    def flock(fd, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(
        atomic_folders,
        "fcntl",
        type("fcntl", (), dict(flock=staticmethod(flock), LOCK_EX=2, LOCK_NB=4, LOCK_UN=8)),
    )
    with pytest.raises(CheckpointWriteFailed, match="No locks available"):
        CheckpointStore(tmp_path)


def test_two_runs_in_one_folder(tmp_path):
    "The second is refused at once, and nothing of the first is touched"
    with CheckpointStore(tmp_path) as store:
        save(store, 1)
        (tmp_path / ".tmp-step-2-00000001").mkdir()
        with pytest.raises(CheckpointFolderBusy, match="this process itself"):
            CheckpointStore(tmp_path)
        assert (tmp_path / ".tmp-step-2-00000001").exists(), "only the owner sweeps"
        other = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from isaac_loop.state.store import *\nCheckpointStore({str(tmp_path)!r})",
            ],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert (
            other.returncode == 1
            and f"CheckpointFolderBusy: `{tmp_path}`" in other.stderr
            and str(os.getpid()) in other.stderr
        )
        save(store, 2)
    CheckpointStore(tmp_path).close()


def test_the_lock_ends_with_the_store(tmp_path):
    "Closed, left by an error, or forgotten"
    store = CheckpointStore(tmp_path)
    store.close()
    store.close()
    with pytest.raises(ZeroDivisionError), CheckpointStore(tmp_path):
        raise ZeroDivisionError
    CheckpointStore(tmp_path)
    CheckpointStore(tmp_path).close()


CHILD = """
import os, sys, time
from isaac_loop.state.store import CheckpointStore
store = CheckpointStore(sys.argv[1])
if os.fork() == 0:
    os.close(1)
    time.sleep(60) # An orphan, like the worker of a loader
else:
    print('ready', flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_lock_ends_with_the_process_even_if_its_workers_live_on(tmp_path):
    "SIGKILL; the run can be started again at once"
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(CheckpointFolderBusy, match=str(process.pid)):
            CheckpointStore(tmp_path)
        process.kill()
        process.wait()
        CheckpointStore(tmp_path).close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def test_a_run_that_was_copied_or_moved_goes_on(tmp_path):
    "Everything a checkpoint is stands inside it"
    make(tmp_path / "first", (10, 20), run_id="r")
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    (tmp_path / "first").rename(tmp_path / "moved")
    for name in ("copy", "moved"):
        with CheckpointStore(tmp_path / name) as store:
            assert store.load()[1]["step"] == 20 and store.run_id == "r"
            save(store, 30)
            assert [o.step for o in store.list()] == [20, 30]
    shutil.copytree(tmp_path / "copy" / "step-00000030", tmp_path / "elsewhere" / "any name")
    with CheckpointStore(tmp_path / "other") as store:
        assert store.load(tmp_path / "elsewhere" / "any name")[1]["step"] == 30
        assert store.run_id is None, "weights of another run do not make this one that run"


def test_a_run_may_be_moved_while_it_is_closed_and_links_are_not_followed(tmp_path):
    make(tmp_path / "run", (10,))
    (tmp_path / "run" / "favourite").symlink_to("step-00000010")
    store = CheckpointStore(tmp_path / "run", read_only=True)
    assert [o.path.name for o in store.list()] == ["step-00000010"]
    assert (
        store.load("favourite")[1]["step"] == 10 and store.resumed_from == tmp_path / "run" / "step-00000010"
    )


# ---------------------------------------------------------------- contents


class Extra(nn.Module):
    "A module with state that is no tensor"

    def __init__(self):
        super().__init__()
        self.lin, self.seen = nn.Linear(2, 2), 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_every_kind_of_weights_comes_back(tmp_path):
    "Tied, transposed, expanded, empty, complex, in small numbers, on no weights at all"
    tied = nn.Linear(3, 3).weight
    flat = torch.arange(12.0)
    weights = {
        "z": tied,
        "a.b": tied,
        "t": flat.view(3, 4).t(),
        "part": flat[2:5],
        "wide": torch.ones(1).expand(4),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(2),
        "bool": torch.tensor([True]),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "c64": torch.tensor([1j]),
        "c128": torch.ones((2, 2), dtype=torch.complex128) * 1j,
        "c0": torch.tensor(1j, dtype=torch.complex128),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
        "e8": torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu),
        "last": torch.rand(1, 2, 3, 3).to(memory_format=torch.channels_last),
    }
    with CheckpointStore(tmp_path) as store:
        path = store.save(weights, step=1)
        for loaded in (store.load()[0], load_weights(path)):
            assert list(loaded) == list(weights)
            for name, x in weights.items():
                assert loaded[name].dtype == x.dtype and loaded[name].shape == x.shape, name
                assert torch.equal(
                    loaded[name].contiguous().reshape(-1).view(torch.uint8),
                    x.detach().contiguous().reshape(-1).view(torch.uint8),
                ), name
            assert loaded["z"] is loaded["a.b"]
        assert store.save({}, None, step=2) and store.load()[:2] == ({}, None)


@pytest.mark.shows("PTA-50")
def test_a_model_loads_without_the_library(tmp_path):
    "The weights are a plain safetensors file, for any program"
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with CheckpointStore(tmp_path) as store:
        path = store.save(model.state_dict(), step=1)
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    other.load_state_dict(load_file(path / "model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))


def test_extra_state_of_modules_travels_too(tmp_path):
    model = Extra()
    model.seen = 7
    with CheckpointStore(tmp_path) as store:
        store.save(model.state_dict(), step=1)
        other = Extra()
        other.load_state_dict(store.load()[0])
    assert other.seen == 7


@pytest.mark.shows("PTA-27", "PTA-38", "NEMO-28", "AIT-39")
def test_one_layout_for_every_save(tmp_path):
    "The first, the best and any other save hold the same things under the same names"
    model = nn.Linear(2, 2)
    opt = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(opt, 3)
    with CheckpointStore(tmp_path, keep_last=None, monitor="f1", mode="max") as store:
        for step, f1 in enumerate([0.1, 0.5, 0.3]):
            store.save(
                model.state_dict(),
                {"opt": opt.state_dict(), "schedule": schedule.state_dict()},
                step=step,
                epoch=step,
                samples=8 * step,
                metrics={"f1": f1},
                info={"lr": 0.1},
            )
        loaded = [o.read() for o in store.list()]
        assert store.best().step == 1
    assert len({(tuple(w), tuple(s), tuple(m)) for w, s, m in loaded}) == 1
    assert [(m["samples"], m["metrics"], m["info"]) for _, _, m in loaded] == [
        (8 * i, {"f1": f}, {"lr": 0.1}) for i, f in enumerate([0.1, 0.5, 0.3])
    ]
    opt.load_state_dict(loaded[-1][1]["opt"])
    schedule.load_state_dict(loaded[-1][1]["schedule"])


@pytest.mark.shows("NEMO-54", "AIT-43")
def test_any_part_of_a_model_can_be_kept_alone(tmp_path):
    "Chosen modules only, with the settings as readable text in the manifest"
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    with CheckpointStore(tmp_path) as store:
        path = store.save(model["head"].state_dict(), step=1, info={"lr": 0.1, "layers": ["body", "head"]})
    head = nn.Linear(2, 1)
    head.load_state_dict(load_weights(path))
    assert torch.equal(head.weight, model["head"].weight)
    assert '"lr": 0.1' in (path / "manifest.json").read_text()


@pytest.mark.parametrize(
    "kwargs, error, text",
    [
        (dict(state={"f": pathlib.Path("x")}), UnsaveableState, "state['f'] is a pathlib.Path"),
        (dict(weights={"w": torch.eye(2).to_sparse()}), UnsaveableState, "to_dense"),
        (dict(weights={"w": torch.empty(2, device="meta")}), UnsaveableState, "weights['w']"),
        (dict(weights={1: torch.ones(1)}), UnsaveableState, "no name for a weight"),
        (dict(weights=nn.Linear(1, 1)), UnsaveableState, "Pass its `state_dict()`"),
        (dict(weights=[torch.ones(1)]), UnsaveableState, "is a list"),
        (dict(weights={"_extra_state": object()}), UnsaveableState, "weights['_extra_state']"),
        (dict(step=1.5), TypeError, "whole number"),
        (dict(step=-1), ValueError, "0 or more"),
        (dict(samples="many"), TypeError, "samples"),
        (dict(metrics={"loss": "low"}), UnsaveableState, "metrics['loss']"),
        (dict(metrics={"los": 1.0}), LookupError, "Did you mean `los`?"),
        (dict(info={"a": torch.ones(1)}), UnsaveableState, "manifest"),
        (dict(info={1: 2}), UnsaveableState, "manifest"),
        (dict(info={"a": float("nan")}), UnsaveableState, "manifest"),
        (dict(info={"a": json.loads("[" * 30 + "]" * 30)}), UnsaveableState, "manifest"),
        (dict(info={"a": "x" * 2_000_000}), UnsaveableState, "manifest"),
        (dict(info={"a": (1, 2)}), UnsaveableState, "manifest"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(kwargs, error, text, tmp_path):
    "And the folder stays as it was"
    with CheckpointStore(tmp_path, monitor="loss") as store:
        with pytest.raises(error) as caught:
            store.save(**{"weights": WEIGHTS, **kwargs})
        assert text in str(caught.value)
        assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a/b",
        "../x",
        ".hidden",
        "{step",
        "{step.__class__}",
        "{step[0]}",
        "{}",
        "{0}",
        "a\0b",
        "{step!r:>{step}}x/",
        "..",
        "~",
        "~me",
        "/x",
        "a\nb",
        "CON",
        "aux.txt",
        "com1",
        "a:b",
        "{step}.",
        "{step} ",
        "{step:x>300}",
        "{loss:d}",
    ],
)
def test_patterns_that_are_no_names(name, tmp_path):
    with pytest.raises(ValueError, match="pattern"):
        CheckpointStore(tmp_path / "run", pattern=name)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["..", ".", "~", "a\nb", "CON", "aux.txt", "a:b", "x.", ".lock"])
def test_names_that_are_none_are_not_looked_for(name, tmp_path):
    "`load('..')` took the newest checkpoint of the folder above"
    make(tmp_path, (10,))
    with pytest.raises(ValueError, match="no name of a checkpoint"):
        CheckpointStore(make(tmp_path / "run", (20,)), read_only=True).load(name)


@pytest.mark.shows("NEMO-28")
def test_names_are_filled_with_numbers_and_metrics(tmp_path):
    "A pattern of one's own"
    with CheckpointStore(tmp_path, pattern="e{epoch:02}-{loss:.2f}") as store:
        assert save(store, 5, epoch=3, metrics={"loss": torch.tensor(0.256)}).name == "e03-0.26"
        assert save(store, 6, epoch=3, metrics={"loss": 0.26}).name == "e03-0.26-2"
        assert save(store, 7, epoch=3, metrics={"loss": float("nan")}).name == "e03-nan"
        with pytest.raises(LookupError, match="no `loss`"):
            save(store, 8, epoch=3)
        assert math.isnan(store.latest().metrics["loss"])


def test_hints_are_never_needed(tmp_path):
    "They may lie, be missing or be folders"
    with CheckpointStore(tmp_path, monitor="loss") as store:
        save(store, 1, metrics={"loss": 0.5})
        for lie in ("{}", "nonsense", '{"path": "../../x"}'):
            (tmp_path / "best.json").write_text(lie)
            (tmp_path / "last.json").write_text(lie)
            assert store.latest().step == store.best().step == 1
        (tmp_path / "last.json").unlink()
        (tmp_path / "last.json").mkdir()
        (tmp_path / "last.json" / "x").mkdir()
        with pytest.warns(UserWarning, match="The checkpoint is written"):
            save(store, 2, metrics={"loss": 0.6})
        assert store.load()[1]["step"] == 2


def test_files_are_ordinary_and_readable(tmp_path):
    with CheckpointStore(tmp_path) as store:
        path = save(store, 1)
    assert sorted(os.listdir(path)) == sorted(FILES)
    assert all(stat.S_IMODE((path / o).stat().st_mode) & 0o400 for o in FILES)
    assert manifest_of(path)["versions"]["torch"] == torch.__version__
    assert time.strptime(manifest_of(path)["saved"], "%Y-%m-%dT%H:%M:%S+00:00")
