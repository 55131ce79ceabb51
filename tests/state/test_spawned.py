"Children of a generator of NumPy, and of a `SeedSequence`, go on where they were"

import warnings

import numpy as np
import pytest

from cutting import ROWS, cut_once, small_trainer
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.data.random_generators import generators_seeded


class SpawnCB:
    def __init__(self, seed=4):
        self.rng = np.random.default_rng(seed)

    def child(self):
        return self.rng.spawn(1)[0].normal()

    def before_batch(self, trainer):
        trainer.batch = trainer.batch[0] + self.child(), trainer.batch[1]


class SourceCB(SpawnCB):
    def child(self):
        return np.random.Generator(self.rng.bit_generator.spawn(1)[0]).normal()


class SeedsCB(SpawnCB):
    def __init__(self, seed=4):
        self.seeds = np.random.SeedSequence(seed)

    def child(self):
        return np.random.default_rng(self.seeds.spawn(1)[0]).normal()


class SharedCB(SpawnCB):
    def __init__(self, seed=4):
        self.seeds = np.random.SeedSequence(seed)
        self.rng = np.random.default_rng(self.seeds)

    def child(self):
        return super().child() + np.random.default_rng(self.seeds.spawn(1)[0]).normal()


KINDS = [SpawnCB, SourceCB, SeedsCB, SharedCB]


@pytest.mark.parametrize("seed", [4, [2**70, 3]])
@pytest.mark.parametrize("kind", KINDS)
def test_children_go_on_where_they_were(kind, seed, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut_once(tmp_path, lambda: small_trainer(kind(seed)))


@pytest.mark.parametrize("kind", [SpawnCB, SourceCB])
def test_a_generator_without_a_seed_goes_on_with_its_own_children(kind, tmp_path):
    first = cut_once(tmp_path / "seeded", lambda: small_trainer(kind(9)))
    made = iter([kind(9), kind(9), kind(None)])
    again = cut_once(tmp_path / "unseeded", lambda: small_trainer(next(made)))
    assert again.callbacks[1].child() == first.callbacks[1].child()


class SeededRows(SeedsCB):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, i):
        return ROWS[i][0] + self.child(), ROWS[i][1]


def test_children_of_a_dataset_go_on_where_they_were(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut_once(tmp_path, lambda: small_trainer(dl=exact_loader(SeededRows(), 8, seed=7)))


@pytest.mark.parametrize("kind", [SpawnCB, SourceCB])
def test_a_snapshot_puts_children_back(kind):
    trainer = small_trainer(kind())
    with trainer.snapshot():
        first = trainer.callbacks[1].child()
    assert trainer.callbacks[1].child() == first


def test_rows_of_an_exact_loader_have_the_same_children_each_time():
    rng = np.random.default_rng(1)
    with generators_seeded({"rng": rng}, 7, 0):
        first = rng.spawn(1)[0].normal()
    rng.spawn(3)
    with generators_seeded({"rng": rng}, 7, 0):
        assert rng.spawn(1)[0].normal() == first
