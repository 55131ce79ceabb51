"Checkpoints that are damaged or that lie: the file and the reason are named, and nothing is run."

import hashlib
import itertools
import json
import os
import shutil
import struct
import warnings
import zipfile

import pytest
import torch
from torch import nn

from isaac_loop.state import checkpoint_files
from safetensors.torch import save as save_tensors
from isaac_loop.state.errors import CheckpointCorrupt, CheckpointFormatTooNew, NoValidCheckpoint
from isaac_loop.state.checkpoint_files import FORMAT, load_weights
from isaac_loop.state.store import CheckpointStore
from stores import FILES, make, manifest_of, quiet_load, save


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    "A test cannot cut the power, so only the order of `fsync` is tested; waiting for it would test nothing"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


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
    yield "future format", lambda folder: edit(folder, format=FORMAT + 1)
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
            save_tensors({"w": torch.ones(3)}, {"isaac_loop": json.dumps({**NOTES, **notes})})
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
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"0000",
    ),
    "a deep header": header(b'{"w":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "notes that name others": noted(names=["w", "v"]),
    "an alias to nothing": noted(names=["w", "v"], aliases={"v": "u"}),
    "aliases in a circle": noted(names=["w", "v"], aliases={"v": "v"}),
    "a view of another kind": noted(views={"w": "__class__"}),
    "deep notes": lambda folder, canary: (
        (folder / "model.safetensors").write_bytes(
            save_tensors({"w": torch.ones(3)}, {"isaac_loop": "[" * 10**5})
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


@pytest.mark.parametrize("k", range(0, 36, 5))
def test_a_changed_bit_in_weights_is_noticed_if_a_manifest_lies_beside_them(k, two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path / "run")
    folder = tmp_path / "run" / "step-00000020"
    flip(folder / "model.safetensors", k)
    for path in (folder, folder / "model.safetensors"):
        with pytest.raises(CheckpointCorrupt, match="model.safetensors"):
            load_weights(path)


def test_weights_that_were_exchanged_are_refused_unless_only_their_size_is_asked_for(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path / "run")
    folder = tmp_path / "run" / "step-00000020"
    shutil.copy(tmp_path / "run" / "step-00000010" / "model.safetensors", folder)
    with pytest.raises(CheckpointCorrupt, match="is damaged: its sha256"):
        load_weights(folder)
    assert load_weights(folder, verify="size")["w"].tolist() == [10, 10, 10]
    with pytest.raises(ValueError, match="`verify` is 'none'"):
        load_weights(folder, verify="none")
    (folder / "manifest.json").write_text("{}")  # Nothing to compare with
    assert load_weights(folder)["w"].tolist() == [10, 10, 10]
    shutil.copy(folder / "model.safetensors", tmp_path / "mine.safetensors")
    assert load_weights(tmp_path / "mine.safetensors")["w"].tolist() == [10, 10, 10]
