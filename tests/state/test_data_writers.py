"""Who has written to data: somebody beside them is named, however they did it; what fills itself is not."""

import types
from functools import cached_property, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_changed_data import X, Y, RowData, plain, saved, trainer_of
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.exact_loaders import exact_loader
from runs import Cut, CutCB, fit

SCRIPT_Y, SCRIPT_ARRAY, SOFT = Y.clone(), Y.numpy().copy(), Y.clone()


def listed():
    return plain(RowData(lambda y: y.flatten().tolist()))


def relabel(trainer):
    trainer.dls.train.dataset.y[:3] = [trainer.loss.item()] * 3


class TensorCB:
    def after_epoch(self, trainer):
        SCRIPT_Y[0] += 1


class ArrayCB:
    def after_epoch(self, trainer):
        SCRIPT_ARRAY[0] += 1


class Labeler:
    def run(self, trainer):
        relabel(trainer)


class HelpedCB:
    def __init__(self, labeler):
        self.labeler = labeler

    def after_epoch(self, trainer):
        self.labeler.run(trainer)


class StaticCB:
    @staticmethod
    def improve(data):
        data.y[0] = 7.0

    def after_epoch(self, trainer):
        self.improve(trainer.dls.train.dataset)


class ValidCB:
    on_train = False

    def after_epoch(self, trainer):
        relabel(trainer)


utils = types.ModuleType("utils_of_the_user")
exec("def mend(data):\n    data.y[0] += 1", vars(utils))


class ModuleCB:
    def after_epoch(self, trainer):
        utils.mend(trainer.dls.train.dataset)


class GivenCB:
    def __init__(self, f):
        self.f = f

    def after_epoch(self, trainer):
        self.f(trainer)


def ensembling_loss(preds, target):
    with torch.no_grad():
        SOFT[:8] = (SOFT[:8] + preds) / 2
    return F.mse_loss(preds, target)


def of_script(y):
    return lambda: plain(TensorDataset(X, y() if callable(y) else y))


WRITERS = {
    "tensor of the script": (of_script(SCRIPT_Y), TensorCB, "tensors"),
    "array of the script": (of_script(lambda: torch.from_numpy(SCRIPT_ARRAY)), ArrayCB, "tensors"),
    "array, own class": (lambda: plain(RowData(lambda y: torch.from_numpy(SCRIPT_ARRAY))), ArrayCB, "y"),
    "namespace": (listed, lambda: SimpleNamespace(after_epoch=relabel), "y"),
    "helper": (listed, lambda: HelpedCB(Labeler()), "y"),
    "static method": (listed, StaticCB, "y"),
    "only when validating": (listed, ValidCB, "y"),
    "module": (listed, ModuleCB, "y"),
    "given function": (listed, lambda: GivenCB(relabel), "y"),
    "given method": (listed, lambda: GivenCB(Labeler().run), "y"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_whoever_writes_to_data_is_named(tmp_path, name):
    make, callback, attribute = WRITERS[name]
    valid = plain(RowData()) if name == "only when validating" else None
    (said,) = saved(trainer_of(make(), callback(), valid=valid), tmp_path)
    assert said.startswith(f"`dls.train.dataset.{attribute}` changed during this fit")


def test_a_loss_function_that_writes_to_data_is_named(tmp_path):
    trainer = trainer_of(plain(TensorDataset(X, SOFT)))
    trainer.loss_func = ensembling_loss
    (said,) = saved(trainer, tmp_path)
    assert said.startswith("`dls.train.dataset.tensors` changed")


# ---- data that fill themselves, in a later epoch than the first


class Store:
    def __init__(self):
        self.found = {}

    def __setitem__(self, i, x):
        self.found[i] = x

    def get(self, i, make):
        if i not in self.found:
            self.found[i] = make(i)
        return self.found[i]


class LateData(RowData):
    "Begins to keep rows in the second epoch, in one of many ways"

    def __init__(self, way):
        super().__init__()
        self.way, self.on, self.store, self.second = way, False, Store(), Store()
        self.shards, self.buffer, self.array = {0: {}, 1: {}}, torch.zeros(24, 4), np.zeros((24, 4))
        self.queues, self.handed, self.work = [[], []], [], partial(self.store.get)
        self.started = self.in_background

    def in_background(self, i):
        self.handed.append(i)

    @cached_property
    def table(self):
        return [1]

    def by_store(self, i, x):
        self.store.get(i, lambda i: x)

    def by_entry(self, i, x):
        self.second[i] = x

    def by_shard(self, i, x):
        self.shards[i % 2][i] = x

    def by_view(self, i, x):
        row = self.buffer[i]
        row.copy_(x)

    def by_function(self, i, x):
        np.copyto(self.array[i], x.numpy())

    def by_local(self, i, x):
        queue = self.queues[i % 2]
        queue.append(x)

    def by_thread(self, i, x):
        self.started(i)

    def by_property(self, i, x):
        return self.table

    def by_partial(self, i, x):
        self.work(i, lambda i: x)

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        if self.on:
            getattr(type(self), self.way)(self, i, x)
        return x, y


class WatchCB:
    "Begins the cache, and looks at it"

    def __init__(self):
        self.seen, self.full = [], 0

    def before_epoch(self, trainer):
        trainer.dls.train.dataset.on = trainer.epoch > 0

    def after_epoch(self, trainer):
        store = dict(n=len(trainer.dls.train.dataset.store.found))
        self.seen.append(store.get("n"))
        self.full = len(self.seen)


class NamedData(LateData):
    "The same without `getattr`, so that all can be seen"

    def __getitem__(self, i):
        x, y = RowData.__getitem__(self, i)
        if self.on:
            self.by_store(i, x)
            self.by_entry(i, x)
            self.by_shard(i, x)
            self.by_view(i, x)
            self.by_function(i, x)
            self.by_local(i, x)
            self.by_thread(i, x)
            self.by_property(i, x)
            self.by_partial(i, x)
        return x, y


@pytest.mark.parametrize("way", [k for k in vars(LateData) if k.startswith("by_")])
def test_what_fills_itself_later_is_no_alarm(tmp_path, way):
    data = LateData(way)
    assert saved(trainer_of(plain(data), WatchCB()), tmp_path) == []


def test_several_ways_of_filling_that_can_be_seen_are_no_alarm(tmp_path):
    data = NamedData("")
    assert saved(trainer_of(plain(data), WatchCB()), tmp_path) == []
    assert len(data.store.found) == len(data.second.found) == 24 and data.buffer.any() and data.handed


def test_one_who_writes_to_a_cache_is_named_beside_what_fills_itself(tmp_path):
    class ClearCB(WatchCB):
        def after_epoch(self, trainer):
            trainer.dls.train.dataset.shards[0].clear()
            trainer.dls.train.dataset.queues[0].append(3)

    data = NamedData("")
    said = " ".join(saved(trainer_of(plain(data), ClearCB()), tmp_path))
    assert "dataset.queues" in said and "dataset.shards" in said and "store" not in said


# ---- what is held


class HoldsOneCB:
    "Holds one of the tensors, and reads another by its place"

    def before_fit(self, trainer):
        self.y = self.find(trainer.dls.train.dataset)

    def find(self, data):
        return data.tensors[1]

    def after_epoch(self, trainer):
        with torch.no_grad():
            self.y[:12] = trainer.model(trainer.dls.train.dataset.tensors[0][:12])


class HoldsAllCB(HoldsOneCB):
    def find(self, data):
        return data.tensors

    def after_epoch(self, trainer):
        with torch.no_grad():
            self.y[1][:12] = trainer.model(self.y[0][:12])


class HoldsArrayCB(HoldsOneCB):
    def find(self, data):
        return data.tensors[1].numpy()

    def after_epoch(self, trainer):
        with torch.no_grad():
            self.y[:12] = trainer.model(trainer.dls.train.dataset.tensors[0][:12]).numpy()


@pytest.mark.parametrize("kind", [HoldsOneCB, HoldsAllCB, HoldsArrayCB])
@pytest.mark.parametrize("same", [False, True])
def test_one_of_the_tensors_that_is_held_goes_on_without_a_word(tmp_path, kind, same, recwarn):
    def run():
        return trainer_of(exact_loader(TensorDataset(X.clone(), Y.clone()), 8, seed=1), kind())

    whole, first = fit(run(), 4, valid=False), run()
    cut = CutCB("before_batch", lambda t: t.n_updates == 7)
    with pytest.raises(Cut):
        fit(first, 4, valid=False, callbacks=[CheckpointCB(tmp_path, every=2), cut])
    again = fit(first if same else run(), 4, valid=False, callbacks=CheckpointCB(tmp_path, every=2))
    assert torch.equal(whole.model.weight, again.model.weight)
    assert [str(o.message) for o in recwarn if "dls.train" in str(o.message)] == []
