"""`fit` called once more in the same process, after a break: it goes on as the run that was never stopped.

That holds also for what had not changed yet when the checkpoint was written."""

import copy
import csv
import io
import random
import threading
import types
from collections import Counter, deque

import numpy as np
import pytest
import torch
from torch import nn
from tqdm import tqdm

from cutting import small_trainer
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.state import beginnings
from runs import Cut, CutCB, fit, tree


class LateCB:
    "Gathers from the second epoch on, so that nothing had changed when the first checkpoint was written"

    def __init__(self):
        self.number, self.list, self.dict, self.deque, self.nested = 0, [], {}, deque(), [[]]
        self.counter, self.object, self.long = Counter(), types.SimpleNamespace(n=0), [0] * 30
        self.tensor, self.view, self.array = torch.zeros(4), None, np.zeros(3)
        self.view = self.tensor[:2]
        self.net, self.gone, self.n_gone = nn.Linear(1, 1), "here", 0
        nn.init.zeros_(self.net.weight)
        self.generators = torch.Generator().manual_seed(4), random.Random(4), np.random.default_rng(4)

    def before_backward(self, trainer):
        if trainer.epoch < 1:
            return
        self.number += 1
        self.list.append(self.number)
        self.dict[len(self.dict)] = self.deque.append(1)
        self.nested[0].append(self.number)
        self.counter["a"] += 1
        self.object.n += 1
        self.long[0] += 1
        self.tensor += 1
        self.array += 1
        self.net.weight.data += 1
        self.late = getattr(self, "late", 0) + 1
        self.n_gone += len(vars(self).pop("gone", ""))
        g, r, n = self.generators
        self.drawn = torch.rand(1, generator=g).item() + r.random() + n.random()
        trainer.loss = trainer.loss * self.drawn


def held(cb):
    own = {k: x for k, x in vars(cb).items() if k not in ("generators", "net", "object")}
    return tree(own | dict(net=cb.net.weight, object=vars(cb.object)))


def broken_and_not(make, folder, n=5, every="epoch", loops=1, epochs=3):
    "The same run left alone, and one that breaks off and goes on in the same process"
    whole, trainer = fit(make(), epochs, valid=False), make()
    trainer.add_callbacks(CheckpointCB(folder / "run", every=every))
    for _ in range(loops):
        with pytest.raises(Cut):
            cut = CutCB("before_step", lambda t: t.n_updates == n)
            fit(trainer, epochs, valid=False, callbacks=cut)
    fit(trainer, epochs, valid=False)
    assert all(map(torch.equal, whole.model.parameters(), trainer.model.parameters()))
    return whole, trainer


@pytest.mark.parametrize("loops", [1, 2])
@pytest.mark.parametrize("every", ["epoch", 2])
def test_what_changed_only_after_the_checkpoint_is_as_it_was_then(every, loops, tmp_path):
    whole, trainer = broken_and_not(lambda: small_trainer(LateCB()), tmp_path, every=every, loops=loops)
    assert held(whole.LateCB) == held(trainer.LateCB)


def test_a_rewind_puts_back_what_changed_after_the_place(tmp_path):
    whole, trainer = fit(small_trainer(LateCB()), 3, valid=False), small_trainer(LateCB(), RewindCB())
    fit(trainer, 3, valid=False)
    for epoch in (2, 1, 0):
        trainer.rewind(epoch)
        fit(trainer, 3, valid=False)
        assert held(whole.LateCB) == held(trainer.LateCB)


def test_models_datasets_and_classes_are_as_they_were_then_too(tmp_path):
    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.level = 0

        def __len__(self):
            return 6

        def __getitem__(self, i):
            return torch.full((1,), float(i + self.level)), torch.full((1,), 2.0 * i)

    class HarderCB:
        n = 0

        def before_epoch(self, trainer):
            if trainer.epoch == 1:
                trainer.dls.train.dataset.level += 1
                trainer.model.scale += 1
                type(self).n += 1

        def before_backward(self, trainer):
            trainer.loss = trainer.loss * (trainer.model.scale + self.n)

    class Net(nn.Linear):
        scale = 1

        def __init__(self):
            super().__init__(1, 1)
            self.scale = 1

    def make():
        HarderCB.n = 0
        torch.manual_seed(1)
        model = Net()
        dl = torch.utils.data.DataLoader(Rows(), 2)
        trainer = small_trainer(HarderCB(), dl=dl, model=model)
        return trainer

    whole, trainer = broken_and_not(make, tmp_path)
    assert trainer.dls.train.dataset.level == trainer.model.scale - 1 == HarderCB.n == 1


def test_what_was_too_large_for_a_copy_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(beginnings, "_MOST", 30_000)
    trainer = small_trainer(LateCB())
    trainer.LateCB.big = torch.zeros(10_000)

    def before_batch(trainer):
        if trainer.epoch == 1:
            trainer.LateCB.big += 1

    trainer.add_callbacks([before_batch, CheckpointCB(tmp_path / "run")])
    with pytest.raises(Cut):
        fit(trainer, 3, valid=False, callbacks=CutCB("before_step", lambda t: t.n_updates == 5))
    with pytest.warns(UserWarning, match="^`LateCB.big` changed in this process .*in another process"):
        fit(trainer, 3, valid=False)


def test_what_a_user_has_set_between_two_fits_stays(tmp_path):
    "Only what a fit has changed is put back"
    trainer = small_trainer(LateCB(), CheckpointCB(tmp_path / "run"))
    trainer.LateCB.table = torch.zeros(2)
    with pytest.raises(Cut):
        fit(trainer, 3, valid=False, callbacks=CutCB("before_step", lambda t: t.n_updates == 5))
    trainer.LateCB.table = torch.ones(2)
    trainer.LateCB.other = "new"
    fit(trainer, 3, valid=False)
    assert trainer.LateCB.table.sum() == 2 and trainer.LateCB.other == "new"


class Meter:
    "An object with a file, which no checkpoint keeps"

    def __init__(self):
        self.file, self.n = io.StringIO(), 0

    def add(self):
        self.n += 1
        self.file.write("x")


def scale_by(cb, trainer, factor):
    cb.n_used = getattr(cb, "n_used", 0) + 1
    trainer.loss = trainer.loss * factor


class MeterCB:
    on_valid = False

    def before_epoch(self, trainer):
        self.made = self.make(trainer)

    def make(self, trainer):
        return Meter()

    def use(self):
        self.made.add()

    def before_backward(self, trainer):
        self.use()
        scale_by(self, trainer, 1.5)


class NoneFirstCB(MeterCB):
    def __init__(self):
        self.made = None


class LaterCB(MeterCB):
    "The first checkpoint comes before there is anything"

    def __init__(self):
        self.made = None

    def before_epoch(self, trainer):
        if trainer.epoch > 0:
            self.made = Meter()

    def before_backward(self, trainer):
        if trainer.epoch > 0:
            self.made.add()
        scale_by(self, trainer, 1.5)


class IteratorCB(MeterCB):
    def make(self, trainer):
        return iter([3] * 50)

    def use(self):
        assert next(self.made) == 3


class WriterCB(IteratorCB):
    def make(self, trainer):
        return csv.writer(io.StringIO())

    def use(self):
        self.made.writerow([1])


class GeneratorCB(IteratorCB):
    def make(self, trainer):
        return (3 for _ in range(50))


class LockCB(MeterCB):
    def make(self, trainer):
        return threading.Lock()

    def use(self):
        with self.made:
            pass


class IfMissingCB(LockCB):
    "Made once, in the first epoch"

    def before_epoch(self, trainer):
        if not hasattr(self, "made"):
            self.made = threading.Lock()


class BarCB(MeterCB):
    def make(self, trainer):
        return tqdm(disable=True)

    def use(self):
        self.made.update(1)

    def cleanup_epoch(self, trainer):
        self.made.close()


class HookCB(MeterCB):
    def make(self, trainer):
        return trainer.model.register_forward_hook(lambda layer, args, out: out * 0.9)

    def use(self):
        assert self.made.id in self.made.hooks_dict_ref()

    def cleanup_epoch(self, trainer):
        self.made.remove()


class HeadCB(MeterCB):
    "A module and an optimizer for each epoch"

    def make(self, trainer):
        head = nn.Linear(1, 1)
        return head, torch.optim.SGD(head.parameters(), 0.1)

    def use(self):
        head, opt = self.made
        head(torch.ones(1)).sum().backward()
        opt.step()


MADE = [MeterCB, NoneFirstCB, LaterCB, IteratorCB, WriterCB, GeneratorCB, LockCB, IfMissingCB]


@pytest.mark.filterwarnings("ignore:.*cannot be kept in a checkpoint")
@pytest.mark.parametrize("make", [*MADE, BarCB, HookCB, HeadCB])
@pytest.mark.parametrize(("every", "n"), [(2, 5), (2, 4), ("epoch", 5)])
def test_what_an_epoch_makes_is_there_when_its_rest_goes_on(make, every, n, tmp_path):
    whole, trainer = broken_and_not(lambda: small_trainer(make()), tmp_path, n=n, every=every)
    used = [getattr(t, make.__name__).n_used for t in (whole, trainer)]
    assert used[0] == used[1] > 0


class FormerModelCB:
    "Learns from the model of the epoch before"

    former = None

    def log(self, trainer):
        self.former = copy.deepcopy(trainer.model)

    def before_backward(self, trainer):
        if self.former is not None:
            trainer.loss = trainer.loss + self.former(trainer.batch[0]).detach().mean() * trainer.preds.mean()


@pytest.mark.filterwarnings("ignore:.*cannot be kept in a checkpoint")
def test_what_was_made_before_the_place_and_is_still_there_stays(tmp_path):
    broken_and_not(lambda: small_trainer(FormerModelCB()), tmp_path, n=5, every=2)


class AfterThePlaceCB:
    "What comes only after the checkpoint, and not by itself"

    def before_backward(self, trainer):
        if trainer.n_updates == 5:
            self.late = Meter()
        assert hasattr(self, "late") == (trainer.n_updates >= 5)


def test_what_came_only_after_the_place_is_taken_away(tmp_path):
    trainer = small_trainer(AfterThePlaceCB(), CheckpointCB(tmp_path / "run", every=2))
    with pytest.raises(Cut):
        fit(trainer, 3, valid=False, callbacks=CutCB("before_step", lambda t: t.n_updates == 5))
    fit(trainer, 2, valid=False)
