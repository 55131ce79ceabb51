"""A run that was saved behind the last batch of a pass, or within one over a plain loader, goes on exactly

Generators and numbers stand where they stood when it was saved, whoever else draws from them or sets them.
"""

import contextlib
import io
import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset, default_collate

from isaac_loop.all import BasicTrainCB, CheckpointCB, DataLoaders, RewindCB, Trainer, exact_loader, set_seed
from runs import Cut, CutCB

X = torch.randn(36, 4, generator=torch.Generator().manual_seed(0))
ROWS = TensorDataset(X, X.sum(1, keepdim=True))


def seeded():
    return torch.Generator().manual_seed(5)


def exact(data=ROWS):
    return exact_loader(data, 6, seed=1)


def plain(data=ROWS, **options):
    return DataLoader(data, 6, shuffle="sampler" not in options, **options)


class OtherRowsCB:
    "Adds a term that is measured on rows of another loader"

    def __init__(self, dl=None):
        self.dl = dl

    def after_get_loss(self, trainer):
        x, y = next(iter(self.dl or trainer.dls.valid))
        trainer.loss = trainer.loss + F.mse_loss(trainer.model(x), y)


class NoiseCB:
    def __init__(self, rng):
        self.rng = rng

    def after_predict(self, trainer):
        trainer.preds = trainer.preds + torch.randn(1, generator=self.rng)


class NoisyRows(Dataset):
    def __init__(self, rng):
        self.rng = rng

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i] + torch.randn(4, generator=self.rng), X[i].sum(0, keepdim=True)


class NoisyModel(nn.Linear):
    def __init__(self, rng):
        super().__init__(4, 1)
        self.rng = rng

    def forward(self, x):
        return super().forward(x + torch.randn(x.shape, generator=self.rng))


class PassesSampler(Sampler):
    "Counts the passes, and draws the order from how many there were"

    def __init__(self, at_end=False):
        self.at_end, self.passes = at_end, 0

    def __len__(self):
        return len(X)

    def __iter__(self):
        if not self.at_end:
            self.passes += 1
        yield from torch.randperm(len(X), generator=torch.Generator().manual_seed(self.passes)).tolist()
        self.passes += self.at_end


class ClassPassesSampler(PassesSampler):
    "The same, and its class counts them"

    def __init__(self):
        ClassPassesSampler.n = 0

    def __iter__(self):
        ClassPassesSampler.n += 1
        return iter(torch.randperm(len(X), generator=torch.Generator().manual_seed(self.n)).tolist())


class Levelled(Dataset):
    level = 0

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i] * (1 + self.level), X[i].sum(0, keepdim=True)


class Counted(Levelled):
    n = 0

    def __getitem__(self, i):
        self.n += 1
        x, y = super().__getitem__(i)
        return x + self.n / 100, y


def counting():
    def collate(rows):
        collate.n += 1
        x, y = default_collate(rows)
        return x + collate.n / 100, y

    collate.n = 0
    return collate


class HarderCB:
    def log(self, trainer):
        trainer.dls.train.dataset.level += 1


class NextOrderCB:
    def log(self, trainer):
        trainer.dls.train.sampler.set_epoch(trainer.epoch + 1)


class HarderInPassCB:
    def after_batch(self, trainer):
        trainer.dls.train.dataset.level += 0.1


def shared(kind):
    rng = seeded()

    def noisy(rows):
        x, y = default_collate(rows)
        return x + torch.randn(x.shape, generator=rng), y

    if kind == "rows":
        return dict(train=plain(NoisyRows(rng), generator=rng))
    if kind == "collate":
        return dict(train=plain(generator=rng, collate_fn=noisy))
    if kind == "model":
        return dict(train=plain(generator=rng), model=NoisyModel(rng))
    return dict(train=plain(generator=rng), callbacks=[NoiseCB(rng)])


KINDS = {
    "a loader in a callback": lambda: dict(train=exact(), callbacks=[OtherRowsCB(plain(generator=seeded()))]),
    "that beside a plain one": lambda: dict(
        train=plain(), callbacks=[OtherRowsCB(plain(generator=seeded()))]
    ),
    "the validation loader": lambda: dict(
        train=exact(), valid=plain(generator=seeded()), callbacks=[OtherRowsCB()]
    ),
    "one generator for loader and rows": lambda: shared("rows"),
    "for loader and collate": lambda: shared("collate"),
    "for loader and model": lambda: shared("model"),
    "for loader and callback": lambda: shared("callback"),
    "rows with a generator of their own": lambda: dict(train=plain(NoisyRows(seeded()))),
    "the epoch of a sampler from one": lambda: dict(
        train=plain(sampler=DistributedSampler(ROWS, num_replicas=1, rank=0)), callbacks=[NextOrderCB()]
    ),
    "a level from a callback": lambda: dict(train=plain(Levelled()), callbacks=[HarderCB()]),
}
AT_THE_END = {
    "a sampler that counts passes": lambda: dict(train=plain(sampler=PassesSampler())),
    "one that counts them at their end": lambda: dict(train=plain(sampler=PassesSampler(at_end=True))),
    "one whose class counts them": lambda: dict(train=plain(sampler=ClassPassesSampler())),
    "a function that counts": lambda: dict(train=plain(collate_fn=counting())),
    "rows that count": lambda: dict(train=plain(Counted())),
    "a level from a callback in the pass": lambda: dict(train=plain(Counted()), callbacks=[HarderInPassCB()]),
}


def before_step(trainer):
    if trainer.n_updates == 14:
        raise RuntimeError("power cut")


def make(kind, *further):
    set_seed(1)
    parts = (KINDS | AT_THE_END)[kind]()
    dls = DataLoaders(parts["train"], parts.get("valid"))
    model = parts.get("model") or nn.Linear(4, 1)
    callbacks = [BasicTrainCB(), *parts.get("callbacks", ()), *further]
    return Trainer(dls, F.mse_loss, optim.SGD, model, callbacks)


def trained(trainer, *callbacks):
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(4, lr=0.01, valid=False, callbacks=callbacks)
    return [p.tolist() for p in trainer.model.parameters()]


def goes_on_exactly(kind, folder, every):
    whole = trained(make(kind))
    assert trained(make(kind, CheckpointCB(folder / "whole", every=every))) == whole
    with pytest.raises(RuntimeError, match="power cut"):
        trained(make(kind, CheckpointCB(folder / "cut", every=every)), before_step)
    return trained(make(kind, CheckpointCB(folder / "cut", every=every))) == whole


@pytest.mark.parametrize("every", [3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_all_generators_stand_where_they_stood(kind, every, tmp_path):
    "At the end of the pass, and after four of its batches"
    assert goes_on_exactly(kind, tmp_path, every)


@pytest.mark.parametrize("kind", AT_THE_END)
def test_behind_the_last_batch_numbers_are_kept_as_between_two_epochs(kind, tmp_path):
    assert goes_on_exactly(kind, tmp_path, every=6)


@pytest.mark.parametrize("every", [3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_taken_back_goes_on_exactly(kind, every):
    whole, trainer = trained(make(kind)), make(kind, RewindCB(every=every))
    trained(trainer)
    trainer.rewind((1, 6) if every == 3 else (1, 4))
    assert trained(trainer) == whole


def test_a_pass_that_is_read_again_counts_from_where_it_began(tmp_path):
    "In a second epoch a dataset that counts its rows has counted those of the first"

    class Rows(Dataset):
        n = 0

        def __len__(self):
            return 8

        def __getitem__(self, i):
            self.n += 1
            return torch.tensor([float(self.n)]), torch.ones(1)

    def run(*callbacks):
        seen = []

        def before_batch(trainer):
            seen.append(trainer.batch[0].flatten().tolist())

        callbacks = [BasicTrainCB(), before_batch, *callbacks]
        dls = DataLoaders(DataLoader(Rows(), 2))
        trainer = Trainer(dls, F.mse_loss, optim.SGD, nn.Linear(1, 1), callbacks)
        with contextlib.suppress(Cut):
            trainer.fit(3, lr=1e-4, valid=False)
        return seen

    whole = run()
    run(CheckpointCB(tmp_path, every=1), CutCB("after_batch", lambda trainer: trainer.n_updates == 6))
    assert run(CheckpointCB(tmp_path, every=1)) == whole[5:]
