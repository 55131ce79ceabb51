"Saving a few weights in a store, and what is there then."

import json
import warnings

import torch

from isaac_loop.state.store import CheckpointStore


FILES = ("model.safetensors", "state.pt", "manifest.json")


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


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())
