"""Data that somebody changes in the course of a run: named when the run is saved, unless they come again."""

import warnings
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.trainer import Trainer
from isaac_loop.state.changed_data import look_at
from isaac_loop.train.training import BasicTrainCB
from runs import Cut, CutCB, fit

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class RowData(Dataset):
    "Rows whose targets lie in an attribute of any kind"

    def __init__(self, make=lambda y: y.clone()):
        self.x, self.y, self.transform = X.clone(), make(Y), None

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x, y = self.x[i], torch.as_tensor(self.y[i]).float().reshape(1)
        return (self.transform(x) if self.transform else x), y


class CachingData(RowData):
    "Keeps what it has read, counts, and opens something when it is needed"

    def __init__(self):
        super().__init__()
        self.cache, self.seen, self.opened, self.by_other_name, self.last = (
            {},
            [0] * 24,
            None,
            {},
            deque(maxlen=2),
        )
        self.tensor = torch.zeros(24)

    def keep(self, cache, i):
        cache[i] = self.x[i]

    def __getitem__(self, i):
        if self.opened is None:
            self.opened = RowData()
        self.seen[i] += 1
        self.tensor[i] = 1
        self.keep(self.by_other_name, i)
        self.last.append(i)
        if i not in self.cache:
            self.cache[i] = super().__getitem__(i)
        return self.cache[i]


class OrderSampler(Sampler):
    "Shuffles a list of its own in place when a pass begins"

    def __init__(self, n):
        self.order, self.rng = list(range(n)), torch.Generator().manual_seed(3)

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        new = torch.randperm(len(self.order), generator=self.rng).tolist()
        self.order[:] = new
        return iter(self.order)


def trainer_of(dl, *callbacks, valid=None):
    torch.manual_seed(1)
    return Trainer(
        DataLoaders(dl, valid), F.mse_loss, optim.SGD, nn.Linear(4, 1), [BasicTrainCB(), *callbacks]
    )


def saved(trainer, folder, n=3):
    "What is said of the data in a run that is saved"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(trainer, n, valid=trainer.dls.valid is not None, callbacks=CheckpointCB(folder, every="epoch"))
    return [str(o.message) for o in told if "dls.train" in str(o.message)]


def weights(trainer):
    return trainer.dls.train.sampler.weights


def set_weights(trainer):
    trainer.dls.train.sampler.weights = weights(trainer) * 2


def extend_indices(trainer):
    trainer.dls.train.dataset.indices.append(1)


def set_label(trainer):
    trainer.dls.train.dataset.y[0] = 5


def set_shuffled(trainer):
    trainer.dls.train.dataset.y = list(reversed(trainer.dls.train.dataset.y))


def set_transform(trainer):
    if trainer.epoch == 0:
        trainer.dls.train.dataset.transform = lambda x: x * 2


def set_tensor(trainer):
    trainer.dls.train.dataset.tensors[1][0] = 5


def weighted():
    return DataLoader(TensorDataset(X, Y), 8, sampler=WeightedRandomSampler(torch.ones(24), 24))


def plain(data):
    return DataLoader(data, 8)


CHANGES = {
    "sampler": (weighted, set_weights, "sampler.weights"),
    "subset": (lambda: plain(Subset(RowData(), list(range(16)))), extend_indices, "dataset.indices"),
    "tensor": (lambda: plain(RowData()), set_label, "dataset.y"),
    "exact": (lambda: exact_loader(RowData(), 8, seed=1), set_label, "dataset.y"),
    "array": (lambda: plain(RowData(lambda y: y.numpy().copy())), set_label, "dataset.y"),
    "list": (lambda: plain(RowData(lambda y: y[:, 0].tolist())), set_label, "dataset.y"),
    "new list": (lambda: plain(RowData(lambda y: y[:, 0].tolist())), set_shuffled, "dataset.y"),
    "dict": (lambda: plain(RowData(lambda y: dict(enumerate(y)))), set_label, "dataset.y"),
    "tensors": (lambda: plain(TensorDataset(X.clone(), Y.clone())), set_tensor, "dataset.tensors"),
    "transform": (lambda: plain(RowData()), set_transform, "dataset.transform"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("event", ["after_batch", "after_epoch", "log"])
def test_what_a_callback_changes_in_the_data_is_named_once(tmp_path, name, event):
    make, change, path = CHANGES[name]
    cb = type("ChangeCB", (), {event: lambda self, trainer: change(trainer)})()
    told = saved(trainer_of(make(), cb), tmp_path)
    assert len(told) == 1 and f"`dls.train.{path}` changed during this fit" in told[0]


def test_what_is_made_of_the_former_value_does_not_come_again(tmp_path):
    class GrowCB:
        def before_epoch(self, trainer):
            data = trainer.dls.train.dataset
            data.y = data.y + 1

    assert len(saved(trainer_of(plain(RowData()), GrowCB()), tmp_path)) == 1


@pytest.mark.parametrize("loader", [plain, lambda data: exact_loader(data, 8, seed=1)])
def test_what_reading_fills_is_no_alarm(tmp_path, loader):
    assert saved(trainer_of(loader(CachingData())), tmp_path) == []


def test_a_cache_that_validation_fills_too_is_no_alarm(tmp_path):
    train, valid = random_split(CachingData(), [16, 8], torch.Generator().manual_seed(2))
    assert saved(trainer_of(plain(train), valid=plain(valid)), tmp_path) == []


def test_a_sampler_that_keeps_its_order_is_no_alarm(tmp_path):
    assert saved(trainer_of(DataLoader(RowData(), 8, sampler=OrderSampler(24))), tmp_path) == []


def test_what_each_epoch_sets_anew_is_no_alarm(tmp_path):
    class LevelCB:
        def before_epoch(self, trainer):
            trainer.dls.train.dataset.y = Y * trainer.epoch
            trainer.dls.train.dataset.transform = lambda x: x + trainer.epoch

    assert saved(trainer_of(plain(RowData()), LevelCB()), tmp_path) == []


def test_what_the_fit_begins_with_is_no_alarm(tmp_path):
    class BeginCB:
        def before_fit(self, trainer):
            trainer.dls.train.dataset.y = Y * 2
            trainer.dls.train.dataset.x += 1

    assert saved(trainer_of(plain(RowData()), BeginCB()), tmp_path) == []


def test_a_class_says_that_nothing_is_lost(tmp_path):
    class SaidData(RowData):
        stateless = "y"

    cb = type("ChangeCB", (), {"after_batch": lambda self, trainer: set_label(trainer)})()
    assert saved(trainer_of(plain(SaidData()), cb), tmp_path) == []


def test_a_callback_that_sets_it_when_its_state_is_loaded_is_no_alarm(tmp_path):
    class TellCB:
        def before_fit(self, trainer):
            self.data = trainer.dls.train.dataset

        def log(self, trainer):
            self.data.y[0] += 1

        def state_dict(self):
            return dict(y=self.data.y.clone())

        def load_state_dict(self, state):
            self.data.y = state["y"]

    assert saved(trainer_of(plain(RowData()), TellCB()), tmp_path) == []


# ---- the way that is told


class HoldCB:
    "Holds what it changes"

    def __init__(self, find, change):
        self.find, self.change = find, change

    def before_fit(self, trainer):
        self.kept = self.find(trainer)

    def after_batch(self, trainer):
        self.change(self.kept, trainer)


def relabel(y, trainer):
    y[trainer.batch_num * 3] = trainer.loss.detach() + 0.1


def weigh(w, trainer):
    w[trainer.batch_num] += trainer.loss.detach()


def grow(indices, trainer):
    if trainer.batch_num == 2:
        indices[:] = [*indices[1:], 16 + trainer.epoch]


HELD = {
    "exact": (lambda: exact_loader(RowData(), 8, seed=1), lambda t: t.dls.train.dataset.y, relabel),
    "array": (
        lambda: exact_loader(RowData(lambda y: y.numpy().copy()), 8, seed=1),
        lambda t: t.dls.train.dataset.y,
        relabel,
    ),
    "plain": (lambda: DataLoader(RowData(), 8, shuffle=True), lambda t: t.dls.train.dataset.y, relabel),
    "subset": (
        lambda: DataLoader(Subset(RowData(), list(range(16))), 4, shuffle=True),
        lambda t: t.dls.train.dataset.indices,
        grow,
    ),
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("every", ["epoch", 2])
def test_what_a_callback_holds_goes_on_exactly_and_without_a_word(tmp_path, name, same, every):
    make, find, change = HELD[name]

    def run():
        return trainer_of(make(), HoldCB(find, change))

    whole, first = fit(run(), 4, valid=False), run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", ".*does not know its position")
        cut = CutCB("before_batch", lambda t: t.n_updates == 7)
        with pytest.raises(Cut):
            fit(first, 4, valid=False, callbacks=[CheckpointCB(tmp_path, every=every), cut])
        again = fit(first if same else run(), 4, valid=False, callbacks=CheckpointCB(tmp_path, every=every))
    assert torch.equal(whole.model.weight, again.model.weight)


def test_what_changed_after_the_checkpoint_is_named_in_the_same_process(tmp_path):
    cb = type("ChangeCB", (), {"after_batch": lambda self, trainer: trainer.dls.train.dataset.y.add_(1)})()
    trainer = trainer_of(exact_loader(RowData(), 8, seed=1), cb)
    with pytest.warns(UserWarning, match="dataset.y` changed during this fit"), pytest.raises(Cut):
        cut = CutCB("before_batch", lambda t: t.n_updates == 5)
        fit(trainer, 3, valid=False, callbacks=[CheckpointCB(tmp_path), cut])
    with pytest.warns(UserWarning, match="dataset.y` changed in this process after the place"):
        fit(trainer, 3, valid=False, callbacks=CheckpointCB(tmp_path))


@pytest.mark.parametrize("make", [CachingData, RowData])
def test_reading_is_no_change_in_the_same_process(tmp_path, make):
    class LevelCB:
        def before_epoch(self, trainer):
            trainer.dls.train.dataset.y = Y * trainer.epoch

    trainer = trainer_of(exact_loader(make(), 8, seed=1), LevelCB())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Cut):
            cut = CutCB("before_batch", lambda t: t.n_updates == 5)
            fit(trainer, 3, valid=False, callbacks=[CheckpointCB(tmp_path), cut])
        fit(trainer, 3, valid=False, callbacks=CheckpointCB(tmp_path))


def test_large_data_are_looked_at_in_part(tmp_path):
    class LargeData(RowData):
        def __init__(self):
            super().__init__()
            self.array, self.list = np.zeros(2**22), [0.0] * 200_000

    class FillCB:
        def log(self, trainer):
            data = trainer.dls.train.dataset
            data.array += 1
            data.list[:] = [1.0] * len(data.list)

    told = saved(trainer_of(plain(LargeData()), FillCB()), tmp_path)
    assert "dataset.array`, `dls.train.dataset.list`" in told[0]


KINDS = {
    "list": lambda: [0, 1, 2],
    "tuple": lambda: (0, 1, 2),
    "dict": lambda: {0: 0},
    "set": lambda: {1},
    "array": lambda: np.arange(3),
    "tensor": lambda: torch.arange(3),
    "bytes": lambda: bytearray(b"abc"),
    "number": lambda: 3,
}


@pytest.mark.parametrize("now", KINDS)
@pytest.mark.parametrize("was", KINDS)
def test_values_of_other_kinds_can_be_compared(was, now):
    assert (look_at(KINDS[was]()) == look_at(KINDS[now]())) == (was == now and was != "tensor")


def in_batches(change):
    class ChangesCB:
        def after_batch(self, trainer):
            change(trainer)

    return ChangesCB()


def set_array(trainer):
    trainer.dls.train.dataset.indices = np.arange(12)


def test_indices_that_become_an_array_are_named(tmp_path):
    trainer = trainer_of(DataLoader(Subset(RowData(), list(range(12))), 4), in_batches(set_array))
    (said,) = saved(trainer, tmp_path)
    assert said.startswith("`dls.train.dataset.indices` changed")


class UncountedList(list):
    def __len__(self):
        raise RuntimeError("not counted")


def test_what_does_not_let_itself_be_counted_trains(tmp_path):
    data = RowData()
    data.odd = UncountedList([1])
    assert saved(trainer_of(DataLoader(data, 4)), tmp_path) == []


class KeptRows:
    "A cache of its own class"

    def __init__(self):
        self.rows = {}

    def fetch(self, i, make):
        if i not in self.rows:
            self.rows[i] = make(i)
        return self.rows[i]


def put_into(rows, i, x):
    rows[i] = x


class OddlyCachingData(RowData):
    "Some rows are kept, in ways that nobody sees in the method that reads a row"

    def __init__(self):
        super().__init__()
        self.kept, self.alias, self.by_function = KeptRows(), {}, {}

    def __getitem__(self, i):
        row = super().__getitem__(i)
        if i < 12:
            return row
        rows = self.alias
        rows[i] = row
        put_into(self.by_function, i, row)
        setattr(self, f"shard{i % 3}", row)
        return self.kept.fetch(i, super().__getitem__)


def test_caches_that_nobody_names_but_the_data_are_no_alarm(tmp_path):
    data = OddlyCachingData()
    assert saved(trainer_of(DataLoader(data, 4)), tmp_path) == []
    assert len(data.kept.rows) == len(data.alias) == 12


LABELS = []


def relabel_listed(i):
    LABELS[i] = 5.0


def test_who_writes_by_a_name_of_the_script_is_seen(tmp_path):
    LABELS[:] = Y.flatten().tolist()
    data = RowData(lambda y: LABELS)
    (said,) = saved(trainer_of(DataLoader(data, 4), in_batches(lambda trainer: relabel_listed(0))), tmp_path)
    assert "`dls.train.dataset.y` changed" in said


def test_an_attribute_that_is_set_and_then_read_comes_again(tmp_path):
    def before_epoch(trainer):
        data = trainer.dls.train.dataset
        data.indices = list(range(4 * (trainer.epoch + 1)))
        assert len(data.indices) == 4 * (trainer.epoch + 1)

    trainer = trainer_of(DataLoader(Subset(RowData(), list(range(4))), 4), before_epoch)
    assert saved(trainer, tmp_path) == []
