"The store of checkpoints is whole or not there, whatever ends the process or fills the disk."

import errno
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

from isaac_loop.state import checkpoint_files, checkpoint_folder, atomic_folders
from isaac_loop.state import store as store_module
from isaac_loop.state.errors import CheckpointWriteFailed, LoopError
from isaac_loop.state.checkpoint_files import Checkpoint
from isaac_loop.state.store import CheckpointStore
from places import PATHS, ROOT
from stores import FILES, make, quiet_load, save, visible


MODULES = (store_module, atomic_folders, checkpoint_folder, checkpoint_files)  # All that touch the disk


def use_disk(monkeypatch, disk):
    "Let all that the store asks of the system, also for reading, go through `disk`"
    for module in MODULES:
        monkeypatch.setattr(module, "os", disk)


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    "A test cannot cut the power, so only the order of `fsync` is tested; waiting for it would test nothing"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


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
        for lock in list(atomic_folders.FolderLock.held):
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
            disk = tests.Disk(n, end=lambda: os._exit(9))
            for module in tests.MODULES: module.os = disk
            tests.one_life(folder)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, n
"""
FRESH = """
import os, pathlib, shutil, sys, torch
torch.set_num_threads(1)
sys.path[:0] = {paths}
import test_store_crashes as tests
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
    assert '`ulimit -f`' in str(e) and 'make room' not in str(e)
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
        assert ("it is a file" in str(caught.value)) == (path == tmp_path / "file")
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


def test_the_folder_is_deleted_in_the_middle_of_a_save(tmp_path, monkeypatch):
    "There is no room to be made, and no checkpoint before it is left"
    store = CheckpointStore(tmp_path / "run")
    save(store, 10)
    disk = Disk()

    def change(name, f, args, kwargs):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return f(*args, **kwargs)

    disk.change = change
    use_disk(monkeypatch, disk)
    with pytest.raises(CheckpointWriteFailed, match="deleted or replaced"):
        save(store, 20)


def test_a_save_looks_once_at_those_before(tmp_path, monkeypatch):
    "Whoever keeps all of them pays for each in every save"
    looks = []
    plain = Checkpoint.is_as_it_was
    monkeypatch.setattr(Checkpoint, "is_as_it_was", lambda self: looks.append(self.step) or plain(self))
    with CheckpointStore(tmp_path, keep_last=None) as store:
        for step in range(1, 6):
            save(store, step)
            assert looks == [*range(1, step)]
            looks.clear()
        save(store, 5)
        assert [o.step for o in store.list()] == [1, 2, 3, 4, 5]


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
