"The store of checkpoints: whole or not there, whatever ends the process, fills the disk or damages a file."

import errno
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
import warnings
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from isaac_loop.state import checkpoint_files
from isaac_loop.state import store as store_module
from isaac_loop.state.plain_state import (
    CheckpointCorrupt,
    CheckpointFolderBusy,
    CheckpointFormatTooNew,
    CheckpointWriteFailed,
    LoopError,
    NoValidCheckpoint,
    UnsaveableState,
)
from isaac_loop.state.checkpoint_files import Checkpoint, load_weights
from isaac_loop.state.store import CheckpointStore

from places import PATHS, ROOT

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
FILES = ("model.safetensors", "state.pt", "manifest.json")


def use_disk(monkeypatch, disk):
    "Let all that the store asks of the system, also for reading, go through `disk`"
    for module in (store_module, checkpoint_files):
        monkeypatch.setattr(module, "os", disk)


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    "A test cannot cut the power, so only the order of `fsync` is tested; waiting for it would test nothing"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


def weights_of(step):
    "Weights and state that tell which step they belong to"
    return {"w": torch.full((3,), float(step))}, {"step": step, "moment": torch.full((2,), float(step))}


def save(store, step, **kwargs):
    return store.save(*weights_of(step), step=step, **kwargs)


def make(folder, steps=(), **kwargs):
    "A closed folder with checkpoints of `steps`"
    with CheckpointStore(folder, keep_last=None, **kwargs) as store:
        for step in steps:
            save(store, step)
    return folder


def visible(folder):
    "Names of what can be seen in a folder"
    return sorted(o.name for o in folder.iterdir() if not o.name.startswith(".") and o.is_dir())


def quiet_load(folder, **kwargs):
    "Load the newest good checkpoint and collect the warnings"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = CheckpointStore(folder, read_only=True).load(**kwargs)
    return loaded, [str(o.message) for o in caught]


# ---------------------------------------------------------------- crash points


class Crash(BaseException):
    "The process is gone"


class Disk:
    "`os` as the store sees it: notes every call that changes the disk, can end the process before the n-th"

    CHANGES = (
        "open",
        "write",
        "fsync",
        "close",
        "mkdir",
        "makedirs",
        "rename",
        "replace",
        "unlink",
        "rmdir",
        "ftruncate",
        "pwrite",
    )

    def __init__(self, end_at=None, half=False, end=None):
        self.calls, self.end_at, self.half, self.dead, self.end = [], end_at, half, False, end

    def __getattr__(self, name):
        f = getattr(os, name)
        if name in self.CHANGES:
            return lambda *args, **kwargs: self.change(name, f, args, kwargs)
        if callable(f) and name in ("listdir", "scandir", "lstat", "stat", "fdopen"):
            return lambda *args, **kwargs: self.look(f, args, kwargs)
        return f

    def look(self, f, args, kwargs):
        if self.dead:
            raise Crash
        return f(*args, **kwargs)

    def change(self, name, f, args, kwargs):
        if self.dead:
            if name == "close":
                return f(*args)  # The system closes a dead process's files
            raise Crash
        if len(self.calls) == self.end_at:
            if self.end:
                self.end()
            self.dead = True
            if name == "write" and self.half:
                f(args[0], args[1][: len(args[1]) // 2])
            if name == "close":
                f(*args)
            raise Crash
        self.calls.append((name, args))
        return f(*args, **kwargs)


START = {
    "empty": lambda folder: make(folder),
    "full, so that something is deleted": lambda folder: make(folder, (10, 20, 30), run_id="r"),
    "the same step again, with leftovers": lambda folder: leftovers(make(folder, (10, 40), run_id="r")),
    "killed between the two renames": lambda folder: os.rename(
        make(folder, (10, 40), run_id="r") / "step-00000040", folder / ".old-step-00000040-00000001"
    ),
}


def leftovers(folder):
    "What a killed process may have left: half a checkpoint, a replaced one, one half deleted"
    for name in (
        ".tmp-step-00000050-00000001",
        ".old-step-00000010-00000001",
        ".trash-step-00000005-00000001",
    ):
        shutil.copytree(folder / "step-00000010", folder / name)
    (folder / ".tmp-step-00000050-00000001" / "manifest.json").unlink()
    (folder / ".trash-step-00000005-00000001" / "state.pt").unlink()
    (folder / ".tmp-last.json-0a0b0c0d").mkdir()
    (folder / ".tmp-last.json-0a0b0c0d" / "last.json").write_text("{")
    for name in (".tmp-step-00000050-00000001", ".tmp-last.json-0a0b0c0d"):
        (folder / name / ".isaac_loop").touch()
    (folder / ".tmp-step-00000060-00000001").mkdir()


def one_life(folder, keep_last=2):
    "Open the store, which sweeps, and save step 40, which may overwrite and delete"
    with CheckpointStore(folder, run_id="r", keep_last=keep_last) as store:
        save(store, 40)


def check_after_crash(folder, before):
    "What must hold wherever the process ended"
    for name in visible(folder):
        weights, state, manifest = Checkpoint(folder / name).read()
        assert weights["w"][0] == state["step"] == manifest["step"] == state["moment"][0], name
    with CheckpointStore(folder, run_id="r") as store:
        assert store.damaged() == {}
        steps = [o.step for o in store.list()]
        assert set(before[-1:] if 40 in steps else before) <= {*steps, 40} and (steps or not before), (
            before,
            steps,
        )
        assert len(steps) >= min(2, len(before))
        save(store, 50)
        assert store.load()[1]["step"] == 50
        assert [o.step for o in store.list()][-1] == 50 and len(store.list()) <= 2
    assert not [o for o in os.listdir(folder) if o.startswith((".tmp-", ".old-", ".trash-"))]


@pytest.mark.shows("NEMO-36", "NEMO-35")
@pytest.mark.parametrize("half", [False, True], ids=["before the call", "half a write"])
@pytest.mark.parametrize("start", START)
def test_the_process_may_end_at_every_call(start, half, tmp_path, monkeypatch):
    "At each call of open, sweep, save, overwrite and retention, and after half of each write"
    START[start](tmp_path / "start")
    before = sorted(
        {
            int(o.name.split("-")[1 if o.name[0] != "." else 2])
            for o in (tmp_path / "start").iterdir()
            if "step-" in o.name and (o.name[0] != "." or "old" in o.name)
        }
    )
    disk = Disk()
    shutil.copytree(tmp_path / "start", tmp_path / "whole")
    use_disk(monkeypatch, disk)
    one_life(tmp_path / "whole")
    points = len(disk.calls)
    assert points >= (30 if start == "empty" else 40)
    assert not [o for o in os.listdir(tmp_path / "whole") if o.startswith((".tmp-", ".old-", ".trash-"))]
    for n in range(points):
        if half and disk.calls[n][0] != "write":
            continue
        folder = tmp_path / f"crash-{n}"
        shutil.copytree(tmp_path / "start", folder)
        use_disk(monkeypatch, Disk(n, half))
        with pytest.raises(Crash):
            one_life(folder)
        for lock in list(store_module._Lock.held):
            use_disk(monkeypatch, os)
            lock.release()  # As the system does for a process that is gone
        use_disk(monkeypatch, os)
        check_after_crash(folder, before)
        shutil.rmtree(folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_process_that_really_ends_leaves_whole_checkpoints_and_no_lock(tmp_path, monkeypatch):
    "The same with processes of their own, ended at once by the system's call"
    START["the same step again, with leftovers"](tmp_path / "start")
    in_a_fresh_process(CRASHES, tmp_path)
    for n in range(3, 60, 5):
        check_after_crash(tmp_path / f"crash-{n}", [10, 40])


CRASHES = """
for n in range(3, 60, 5):
    folder = path / f'crash-{n}'
    shutil.copytree(path / 'start', folder)
    child = os.fork()
    if child == 0:
        try:
            tests.store_module.os = tests.checkpoint_files.os = tests.Disk(n, end=lambda: os._exit(9))
            tests.one_life(folder)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, n
"""


FRESH = """
import os, pathlib, shutil, sys, torch
torch.set_num_threads(1)
sys.path[:0] = {paths}
import test_store as tests
path = pathlib.Path(sys.argv[1])
"""


def in_a_fresh_process(code, path):
    "Run `code` where no thread has begun yet, so that forking is safe"
    start = FRESH.format(paths=[str(pathlib.Path(__file__).parent), *PATHS])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{start}\n{code}", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.shows("SON-27")
def test_an_interrupt_in_a_save_clears_the_attempt_away(tmp_path, monkeypatch):
    "Ctrl-C at any call of a save; the process lives on and can save again"
    store = CheckpointStore(tmp_path, run_id="r")
    save(store, 10)
    save(store, 20)
    for n in range(100):
        disk = Disk()
        real = disk.change

        def change(name, f, args, kwargs, n=n, disk=disk, real=real):
            if len(disk.calls) == n:
                disk.calls.append(("interrupt", ()))
                if name == "close":
                    f(*args)
                raise KeyboardInterrupt
            return real(name, f, args, kwargs)

        disk.change = change
        use_disk(monkeypatch, disk)
        try:
            save(store, 20)
            done = ("interrupt", ()) not in disk.calls
        except KeyboardInterrupt:
            done = False
        use_disk(monkeypatch, os)
        assert {10, 20} == {o.step for o in store.list()} and not store.damaged()
        if done:
            break
    assert done and n > 15
    save(store, 30)
    assert not [o for o in os.listdir(tmp_path) if o.startswith((".tmp-", ".old-", ".trash-"))]


# ---------------------------------------------------------------- order of calls


def test_files_then_manifest_then_folder_then_name_then_parent_then_deletion(tmp_path, monkeypatch):
    "Nothing is deleted before the new checkpoint and its name are on the disk"
    with CheckpointStore(tmp_path, run_id="r") as store:
        for step in (10, 20):
            save(store, step)
        disk, names, order = Disk(), {}, []
        use_disk(monkeypatch, disk)
        real = disk.change

        def change(name, f, args, kwargs):
            result = real(name, f, args, kwargs)
            if name == "open":
                names[result] = pathlib.Path(args[0]).name
            name = "create" if name == "open" and args[1] & os.O_CREAT else name
            order.append(
                (
                    name,
                    names.get(args[0])
                    if name in ("fsync", "write", "close")
                    else [pathlib.Path(o).name for o in args if isinstance(o, (str, pathlib.Path))],
                )
            )
            return result

        disk.change = change
        save(store, 30)
    hidden = next(o[1][0] for o in order if o[0] == "mkdir")
    spot = {
        "model": order.index(("fsync", "model.safetensors")),
        "state": order.index(("fsync", "state.pt")),
        "manifest": order.index(("fsync", "manifest.json")),
        "hidden": order.index(("fsync", hidden)),
        "rename": order.index(("rename", [hidden, "step-00000030"])),
        "parent": order.index(("fsync", tmp_path.name)),
        "delete": next(
            i
            for i, o in enumerate(order)
            if (o[0] == "unlink" and o[1][0] in FILES)
            or o[0] == "rmdir"
            or (o[0] == "rename" and ".trash-" in o[1][1])
        ),
    }
    begin = next(i for i, o in enumerate(order) if o[0] == "create" and o[1] == ["manifest.json"])
    assert (
        max(spot["model"], spot["state"])
        < begin
        < spot["manifest"]
        < spot["hidden"]
        < spot["rename"]
        < spot["parent"]
        < spot["delete"]
    )
    assert hidden.startswith(".tmp-step-00000030-")
    for file in FILES:
        assert (
            max(i for i, o in enumerate(order) if o == ("write", file))
            < order.index(("fsync", file))
            < order.index(("close", file))
        )


def test_what_is_replaced_goes_only_after_the_new_one_has_its_name(tmp_path, monkeypatch):
    "When a step is saved again"
    with CheckpointStore(tmp_path, run_id="r") as store:
        save(store, 10)
        disk = Disk()
        use_disk(monkeypatch, disk)
        save(store, 10)
    renames = [
        [pathlib.Path(o).name.rpartition("-")[0] for o in args]
        for name, args in disk.calls
        if name == "rename"
    ]
    assert [o[1].partition("-step")[0] for o in renames] == [".old", "step"]
    first_deletion = next(
        i for i, o in enumerate(disk.calls) if o[0] == "unlink" and pathlib.Path(o[1][0]).name in FILES
    )
    assert first_deletion > max(i for i, o in enumerate(disk.calls) if o[0] == "rename")


# ---------------------------------------------------------------- damage


def damages():
    "150 ways to damage a checkpoint: a name and a function of its folder"
    for file, k in itertools.product(FILES, range(8)):
        yield (
            f"{file} cut to {k}/8",
            lambda folder, file=file, k=k: (folder / file).write_bytes(
                (b := (folder / file).read_bytes())[: len(b) * k // 8]
            ),
        )
    for file, k in itertools.product(FILES, range(36)):
        yield f"{file} bit {k}", lambda folder, file=file, k=k: flip(folder / file, k)
    for file in FILES:
        yield f"{file} deleted", lambda folder, file=file: (folder / file).unlink()
        yield (
            f"{file} longer",
            lambda folder, file=file: (folder / file).write_bytes((folder / file).read_bytes() + b"\0"),
        )
        yield (
            f"{file} of another step",
            lambda folder, file=file: shutil.copy(folder.parent / "step-00000010" / file, folder / file),
        )
        yield (
            f"{file} a folder",
            lambda folder, file=file: ((folder / file).unlink(), (folder / file).mkdir()),
        )
    yield "future format", lambda folder: edit(folder, format=2)
    yield (
        "a manifest that says other sizes",
        lambda folder: edit(
            folder, files={k: {**v, "bytes": v["bytes"] + 1} for k, v in manifest_of(folder)["files"].items()}
        ),
    )
    yield (
        "another step in the manifest",
        lambda folder: (folder / "manifest.json").write_text(
            (folder / "manifest.json").read_text().replace('"step": 20', '"step": 21')
        ),
    )
    yield (
        "a manifest of zeros",
        lambda folder: (folder / "manifest.json").write_bytes(
            b"\0" * (folder / "manifest.json").stat().st_size
        ),
    )
    yield (
        "a manifest with NaN",
        lambda folder: (folder / "manifest.json").write_text(
            (folder / "manifest.json").read_text().replace('"samples": null', '"samples": NaN')
        ),
    )
    yield "a manifest that is a list", lambda folder: (folder / "manifest.json").write_text("[]")


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def edit(folder, **changes):
    "Change a manifest and make its checksum right again"
    fields = manifest_of(folder)
    fields.pop("checksum")
    (folder / "manifest.json").write_bytes(checkpoint_files.manifest_bytes({**fields, **changes}))


def flip(file, k):
    "Flip one bit, at a place that differs with k"
    data = bytearray(file.read_bytes())
    place = (k * 7919 * 131) % (len(data) * 8)
    data[place // 8] ^= 1 << place % 8
    file.write_bytes(data)


DAMAGES = dict(damages())


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    return make(tmp_path_factory.mktemp("good") / "run", (10, 20), run_id="r")


def test_there_are_enough_damages():
    assert len(DAMAGES) >= 150


@pytest.mark.shows("NEMO-33", "NEMO-36")
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_noticed_and_the_one_before_is_loaded(name, two_steps, tmp_path):
    "Named file and reason, never loaded; a path that was given is not replaced by another"
    shutil.copytree(two_steps, tmp_path / "run")
    bad = tmp_path / "run" / "step-00000020"
    DAMAGES[name](bad)
    with pytest.raises((CheckpointCorrupt, CheckpointFormatTooNew)) as caught:
        CheckpointStore(tmp_path / "run", read_only=True).load(bad)
    assert "step-00000020" in str(caught.value)
    if isinstance(caught.value, CheckpointFormatTooNew):
        with pytest.raises(CheckpointFormatTooNew, match="Update isaac_loop"):
            CheckpointStore(tmp_path / "run", read_only=True).load()
        return
    (_, state, manifest), messages = quiet_load(tmp_path / "run")
    assert state["step"] == manifest["step"] == 10
    assert (
        len(messages) == 1
        and "step-00000020" in messages[0]
        and next(o for o in FILES if o in name or o == "manifest.json" or "sizes" in name)
        and "Use another" in messages[0]
    )


def test_only_sizes_are_compared_when_asked_for(two_steps, tmp_path):
    "A flipped bit in a number passes then; that is the price of reading once"
    shutil.copytree(two_steps, tmp_path / "run")
    file = tmp_path / "run" / "step-00000020" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    loaded, messages = quiet_load(tmp_path / "run", verify="size")
    assert loaded[2]["step"] == 20 and not messages
    file.write_bytes(data[:-1])
    assert quiet_load(tmp_path / "run", verify="size")[0][2]["step"] == 10
    with pytest.raises(ValueError, match="'sha256' or 'size'"):
        quiet_load(tmp_path / "run", verify="md5")


@pytest.mark.shows("NEMO-27", "NEMO-36")
def test_when_none_is_good_each_candidate_is_listed(two_steps, tmp_path):
    "No going on with random weights"
    shutil.copytree(two_steps, tmp_path / "run")
    (tmp_path / "run" / "step-00000010" / "state.pt").write_bytes(b"")
    flip(tmp_path / "run" / "step-00000020" / "model.safetensors", 5)
    with warnings.catch_warnings(record=True), pytest.raises(NoValidCheckpoint) as caught:
        warnings.simplefilter("always")
        CheckpointStore(tmp_path / "run", read_only=True).load()
    lines = str(caught.value).splitlines()
    assert "0 bytes" in next(o for o in lines if "step-00000010" in o) and "damaged" in next(
        o for o in lines if "step-00000020" in o
    )
    with pytest.raises(NoValidCheckpoint, match="Is it the right folder"):
        CheckpointStore(tmp_path / "nothing", read_only=True).load()
    assert not (tmp_path / "nothing").exists()


# ---------------------------------------------------------------- trouble with the disk


@pytest.fixture
def small_disk(tmp_path):
    "A file system of one megabyte"
    folder = tmp_path / "small"
    folder.mkdir()
    done = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True
        )
        if shutil.which("mount")
        else None
    )
    if done is None or done.returncode:
        pytest.skip(
            f"a small tmpfs cannot be mounted here: {done.stderr.strip() if done else 'no mount command'}"
        )
    yield folder
    subprocess.run(["umount", "-l", str(folder)])


def check_failed_save(caught, folder, steps):
    "The error has the facts, and what was there before is whole"
    error = caught.value
    assert isinstance(error, OSError) and isinstance(error, LoopError)
    assert str(error.path).startswith(str(folder)) and str(error.path) in str(error)
    assert [o.step for o in CheckpointStore(folder, read_only=True).list()] == steps
    assert not [o for o in os.listdir(folder) if o.startswith((".tmp-", ".old-", ".trash-"))]
    if steps:
        assert quiet_load(folder)[0][1]["step"] == steps[-1]


@pytest.mark.parametrize("room", [0, 3_000, 50_000, 150_000, 250_000])
def test_a_full_disk(room, small_disk):
    "Five levels of fill; the error says how much room was wanted, and after making room it works"
    store = CheckpointStore(small_disk, run_id="r")
    save(store, 10)
    save(store, 20)
    big = {"w": torch.zeros(60_000)}
    ballast = small_disk / "ballast"
    with open(ballast, "wb") as file:
        free = shutil.disk_usage(small_disk).free
        file.write(b"x" * (free - room // 4096 * 4096))
    with pytest.raises(CheckpointWriteFailed) as caught:
        store.save(big, step=30)
    check_failed_save(caught, small_disk, [10, 20])
    assert caught.value.needed > 240_000 and caught.value.free < caught.value.needed
    assert f"{caught.value.needed:,} bytes" in str(caught.value)
    assert big["w"].sum() == 0
    ballast.unlink()
    store.save(big, step=30)
    assert store.latest().step == 30
    store.close()


@pytest.mark.parametrize("call", ["write", "fsync", "mkdir", "rename", "open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_the_system_refuses_a_call_in_the_middle(call, number, tmp_path, monkeypatch):
    "The disk fills up, breaks or goes read-only between the check and the writing"
    store = CheckpointStore(tmp_path, run_id="r")
    for step in (10, 20):
        save(store, step)
    for skip in itertools.count():
        disk, left = Disk(), [skip]
        real = disk.change

        def change(name, f, args, kwargs, left=left, real=real):
            if name == call and (call != "open" or args[1] & os.O_CREAT):
                left[0] -= 1
                if left[0] == -1:
                    raise OSError(number, os.strerror(number))
            return real(name, f, args, kwargs)

        disk.change = change
        use_disk(monkeypatch, disk)
        try:
            with warnings.catch_warnings(record=True) as caught_warnings:
                warnings.simplefilter("always")
                save(store, 30)
        except CheckpointWriteFailed as e:
            use_disk(monkeypatch, os)
            assert os.strerror(number) in str(e) and e.needed and e.free
            assert {o.step for o in store.list()} >= ({10, 20} if skip < 3 else {20}) and not store.damaged()
        else:
            use_disk(monkeypatch, os)
            assert left[0] >= 0 or "tidying up" in str(caught_warnings[0].message)
            break
        shutil.rmtree(tmp_path / "step-00000030", ignore_errors=True)
    save(store, 40)
    assert store.load()[1]["step"] == 40
    assert not [o for o in os.listdir(tmp_path) if o.startswith((".tmp-", ".old-", ".trash-"))]
    store.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_file_that_may_not_grow(tmp_path):
    "The system's own limit on file sizes, in a process of its own"
    make(tmp_path / "run", (10, 20), run_id="r")
    in_a_fresh_process(LIMITED, tmp_path)
    assert visible(tmp_path / "run") == ["step-00000010", "step-00000020"]


LIMITED = """
import errno, resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
store = tests.CheckpointStore(path / 'run', run_id='r')
try: store.save({'w': torch.zeros(60_000)}, step=30)
except tests.CheckpointWriteFailed as e:
    assert isinstance(e.__cause__, OSError) and e.__cause__.errno == errno.EFBIG
else: raise AssertionError('the file grew')
"""


@pytest.mark.shows("NEMO-23")
def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(tmp_path):
    "A file where the folder should be, also higher up; a read-only folder; a missing parent is made"
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointWriteFailed, match="cannot be used for checkpoints") as caught:
            CheckpointStore(path)
        assert caught.value.path == path
    assert (tmp_path / "file").read_text() == "mine"
    with CheckpointStore(tmp_path / "a" / "b" / "c") as store:
        save(store, 1)
    assert CheckpointStore(tmp_path / "a" / "b" / "c", read_only=True).latest().step == 1


def test_a_read_only_disk(small_disk):
    "Refused at the start; reading goes on"
    make(small_disk, (10,), run_id="r")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointWriteFailed, match="Read-only file system"):
        CheckpointStore(small_disk)
    assert CheckpointStore(small_disk, read_only=True).load()[1]["step"] == 10


def test_the_system_says_that_the_folder_is_read_only(tmp_path, monkeypatch):
    "The same wherever a disk cannot be mounted"
    disk = Disk()

    def change(name, f, args, kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    disk.change = change
    use_disk(monkeypatch, disk)
    with pytest.raises(CheckpointWriteFailed, match="Permission denied"):
        CheckpointStore(tmp_path)


def test_the_folder_is_deleted_while_the_run_goes_on(tmp_path):
    "An error that says so, not a new folder in silence; also when somebody made another one in its place"
    store = CheckpointStore(tmp_path / "runs" / "a")
    save(store, 10)
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(CheckpointWriteFailed, match="deleted or replaced"):
        save(store, 20)
    assert not (tmp_path / "runs").exists()
    with CheckpointStore(tmp_path / "runs" / "a"):
        with pytest.raises(CheckpointWriteFailed, match="deleted or replaced"):
            save(store, 20)
    store.close()
    with pytest.raises(CheckpointWriteFailed, match="closed"):
        save(store, 20)
    with pytest.raises(CheckpointWriteFailed, match="read-only"):
        save(CheckpointStore(tmp_path / "runs" / "a", read_only=True), 20)


# ---------------------------------------------------------------- malice


class Runs:
    "Runs a command when an ordinary reader reads it"

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


class Evaluates:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return eval, (f"open({str(self.canary)!r}, 'w')",)


def resign(folder):
    "Make all checksums right, as an attacker would"
    edit(
        folder,
        files={
            o: {
                "bytes": (folder / o).stat().st_size,
                "sha256": hashlib.sha256((folder / o).read_bytes()).hexdigest(),
            }
            for o in FILES[:2]
        },
    )


def evil_state(tree):
    def attack(folder, canary):
        torch.save(tree(canary), folder / "state.pt")
        resign(folder)

    return attack


def header(text, data=b""):
    "A safetensors file with any header"
    return lambda folder, canary: (
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data),
        resign(folder),
    )


def compressed(folder, canary):
    "A small file that unfolds into a huge one"
    torch.save({"state": torch.zeros(10**6), "extra": {}}, folder / "plain.pt")
    with (
        zipfile.ZipFile(folder / "plain.pt") as old,
        zipfile.ZipFile(folder / "state.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for o in old.infolist():
            new.writestr(o.filename, old.read(o))
    resign(folder)


def rename_entry(name):
    def attack(folder, canary):
        about = manifest_of(folder)["files"]
        edit(folder, files={name: about["state.pt"], "model.safetensors": about["model.safetensors"]})

    return attack


def link(file, target):
    def attack(folder, canary):
        aim = target(folder)
        (folder / file).unlink()
        (folder / file).symlink_to(aim)

    return attack


def outside(folder):
    "A good file, only elsewhere"
    shutil.copy(folder / "state.pt", folder.parent.parent / "elsewhere")
    return folder.parent.parent / "elsewhere"


def pipe(folder, canary):
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def raw_pickle(folder, canary):
    import pickle

    (folder / "state.pt").write_bytes(pickle.dumps(Runs(canary)))
    resign(folder)


NOTES = {"names": ["w"], "aliases": {}, "views": {}}


def noted(**notes):
    "Real weights with notes that lie"

    def attack(folder, canary):
        (folder / "model.safetensors").write_bytes(
            store_module.safetensors_bytes(
                {"w": torch.ones(3)}, {"isaac_loop": json.dumps({**NOTES, **notes})}
            )
        )
        resign(folder)

    return attack


ATTACKS = {
    "code instead of the state": evil_state(lambda c: Runs(c)),
    "code in the state": evil_state(lambda c: {"state": Runs(c), "extra": {}}),
    "code deep in the state": evil_state(lambda c: {"state": {"a": [{"b": (1, Runs(c))}]}, "extra": {}}),
    "code in the optimizer": evil_state(
        lambda c: {"state": {"opt": {"state": {0: {"exp_avg": Runs(c)}}, "param_groups": []}}, "extra": {}}
    ),
    "code among the random numbers": evil_state(
        lambda c: {"state": {"random": {"python": (3, Evaluates(c), None)}}, "extra": {}}
    ),
    "code as a key": evil_state(lambda c: {"state": {Evaluates(c): 1}, "extra": {}}),
    "code in the extra state": evil_state(lambda c: {"state": {}, "extra": {"x": Evaluates(c)}}),
    "a whole module": evil_state(lambda c: {"state": nn.Linear(1, 1), "extra": {}}),
    "code in the old format": raw_pickle,
    "code in the old format of torch": lambda folder, canary: (
        torch.save(
            {"state": Runs(canary), "extra": {}}, folder / "state.pt", _use_new_zipfile_serialization=False
        ),
        resign(folder),
    ),
    "a compressed file": compressed,
    "another layout": evil_state(lambda c: [1, 2]),
    "a name with dots": rename_entry("../../state.pt"),
    "an absolute name": rename_entry("/etc/passwd"),
    "a hidden name": rename_entry(".bashrc"),
    "a name with a zero": rename_entry("state.pt\0x"),
    "a third file": lambda folder, canary: edit(
        folder, files={**manifest_of(folder)["files"], "more": {"bytes": 0, "sha256": "0" * 64}}
    ),
    "a link for the state": link("state.pt", outside),
    "a link for the weights": link("model.safetensors", lambda folder: "/etc/passwd"),
    "a link for the manifest": link(
        "manifest.json", lambda folder: folder.parent / "step-00000010" / "manifest.json"
    ),
    "a pipe for the manifest": pipe,
    "a huge header": lambda folder, canary: (
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}"),
        resign(folder),
    ),
    "a header larger than the file": lambda folder, canary: (
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10**6) + b"{}"),
        resign(folder),
    ),
    "a huge shape": header(b'{"w":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}', b"0000"),
    "overlapping weights": header(
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"0000",
    ),
    "a deep header": header(b'{"w":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "notes that name others": noted(names=["w", "v"]),
    "an alias to nothing": noted(names=["w", "v"], aliases={"v": "u"}),
    "aliases in a circle": noted(names=["w", "v"], aliases={"v": "v"}),
    "a view of another kind": noted(views={"w": "__class__"}),
    "deep notes": lambda folder, canary: (
        (folder / "model.safetensors").write_bytes(
            store_module.safetensors_bytes({"w": torch.ones(3)}, {"isaac_loop": "[" * 10**5})
        ),
        resign(folder),
    ),
    "a deep manifest": lambda folder, canary: (folder / "manifest.json").write_text("[" * 10**5),
    "a huge manifest": lambda folder, canary: (folder / "manifest.json").write_bytes(b" " * (2 * 10**6)),
    "a huge number": lambda folder, canary: (folder / "manifest.json").write_text(
        '{"format": ' + "9" * 10**5 + "}"
    ),
    "deep facts": lambda folder, canary: edit(folder, info={"a": json.loads("[" * 30 + "]" * 30)}),
    "a negative step": lambda folder, canary: edit(folder, step=-1),
    "a step that is true": lambda folder, canary: edit(folder, step=True),
    "a metric that is text": lambda folder, canary: edit(folder, metrics={"loss": "touch"}),
    "sizes that are text": lambda folder, canary: edit(
        folder, files={k: {**v, "bytes": str(v["bytes"])} for k, v in manifest_of(folder)["files"].items()}
    ),
    "files that are numbers": lambda folder, canary: edit(folder, files={o: 1 for o in FILES[:2]}),
}


@pytest.mark.shows("PTA-50")
@pytest.mark.parametrize("forced", [False, True], ids=["", "unsafe reading asked for"])
@pytest.mark.parametrize("name", ATTACKS)
def test_a_strangers_checkpoint_cannot_run_anything(name, forced, two_steps, tmp_path, monkeypatch):
    "All checksums are right, and still there is a named error and no canary"
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    shutil.copytree(two_steps, tmp_path / "run")
    folder, canary = tmp_path / "run" / "step-00000020", tmp_path / "canary"
    ATTACKS[name](folder, canary)
    with pytest.raises(CheckpointCorrupt, match="step-00000020") as caught:
        CheckpointStore(tmp_path / "run", read_only=True).load(folder)
    assert "(1)" not in str(caught.value) and "arbitrary" not in str(caught.value), (
        "torch's advice how to read it all the same"
    )
    assert quiet_load(tmp_path / "run")[0][1]["step"] == 10
    with CheckpointStore(tmp_path / "run", run_id="r") as store:
        save(store, 30)
    assert not canary.exists()


def test_weights_are_loaded_without_a_look_at_the_state(two_steps, tmp_path):
    "`load_weights` opens the safetensors file alone"
    shutil.copytree(two_steps, tmp_path / "run")
    folder = tmp_path / "run" / "step-00000020"
    torch.save(Runs(tmp_path / "canary"), folder / "state.pt")
    (folder / "manifest.json").unlink()
    assert load_weights(folder)["w"].tolist() == [20, 20, 20]
    assert load_weights(str(folder / "model.safetensors"))["w"].tolist() == [20, 20, 20]
    assert not (tmp_path / "canary").exists()
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointCorrupt, match="model.safetensors"):
        load_weights(folder)
    with pytest.raises(NoValidCheckpoint, match="step-00000010"):
        load_weights(tmp_path / "run")
    with pytest.raises(NoValidCheckpoint):
        load_weights(tmp_path / "none" / "at" / "all")


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
    "It was followed by `Exception ignored in _Lock.__del__`"

    def flock(fd, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(
        store_module,
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
