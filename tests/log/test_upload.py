"Copies of a run far away: in a storage in memory, and on a server that speaks the protocol of S3."

import json
import shutil
import sys
from pathlib import Path

import fsspec
import pytest
import torch

import isaac_loop.log.upload as remote
import isaac_loop.log.code_version as provenance
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.log.experiment import ExperimentCB
from isaac_loop.log.notify import Email, NotifyCB
from isaac_loop.log.upload import UploadCB, fetch
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.state.run_folder import Experiment, without_password
from isaac_loop.state.store import CheckpointStore
from runs import Cut, CutCB, callbacks, fit, make_trainer, same
from experiments import files, small


@pytest.fixture(autouse=True)
def no_git_of_the_tests(monkeypatch, request):
    "Most tests need no git, and asking it a hundred times takes seconds"
    if "git" not in request.node.name:
        monkeypatch.setattr(provenance, "_git", lambda *args: None)


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
