"""Random numbers from generators of the user's own, wherever these lie

Three laws: a checkpoint changes nothing of a run, a run goes on bit for bit as if it had not stopped and
without a warning, and a look before training changes nothing.
"""

import contextlib
import functools
import io
import random
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from isaac_loop.all import (
    BasicTrainCB,
    BatchAugmentationCB,
    CheckpointCB,
    DataLoaders,
    EvaluatorCB,
    MetricsCB,
    ResumeMismatch,
    RewindCB,
    Trainer,
    each_image,
    exact_loader,
    set_seed,
)
from isaac_loop.data.generators import data_generators

RNG = np.random.default_rng(0)
elsewhere = types.ModuleType("elsewhere")


class Rows(Dataset):
    def __init__(self):
        self.x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 20

    def noise(self):
        return 0

    def __getitem__(self, i):
        return self.x[i] + self.noise(), i % 3


class Own(Rows):
    def __init__(self):
        super().__init__()
        self.rng = random.Random(3)

    def noise(self):
        return self.rng.random() / 10


class OfScript(Rows):
    def noise(self):
        return RNG.normal() / 10


class OfModule(Rows):
    def noise(self):
        return elsewhere.rng.random() / 10


class LayerOfScript(nn.Module):
    def forward(self, x):
        return x + RNG.normal() / 10


def closed():
    rng = random.Random(0)

    class Closed(Rows):
        def noise(self):
            return rng.random() / 10

    return Closed()


def by_default():
    class Default(Rows):
        def noise(self, rng=random.Random(3)):  # noqa: B008
            return rng.random() / 10

    Default.noise.__defaults__[0].seed(3)  # As in a script that is begun anew
    return Default()


def transformed():
    datasets, rng = pytest.importorskip("datasets"), np.random.default_rng(0)

    def noisy(rows):
        x = [torch.tensor(o) + float(rng.normal()) / 10 for o in rows["x"]]
        return dict(x=x, y=rows["y"])

    rows = dict(x=Rows().x.tolist(), y=[i % 3 for i in range(20)])
    return datasets.Dataset.from_dict(rows).with_transform(noisy)


def of_columns(rows):
    return torch.stack([row["x"] for row in rows]), torch.tensor([row["y"] for row in rows])


class Over(Subset):
    "A subset with a generator that has the name of the one in its dataset"

    def __init__(self):
        super().__init__(Own(), range(20))
        self.rng = random.Random(5)

    def __getitem__(self, i):
        x, y = self.dataset[i]
        return x + self.rng.random() / 10, y

    def __getitems__(self, indices):
        return [self[i] for i in indices]


class Many(Rows):
    def __init__(self):
        super().__init__()
        self.rngs = [random.Random(i) for i in range(101)]

    def __getitem__(self, i):
        return self.x[i] + self.rngs[i].random() / 10, i % 3


class Boxes(Rows):
    def __init__(self):
        super().__init__()
        self.boxes = [[[i] * 4 for i in range(60)] for _ in range(20)]
        self.tfm = types.SimpleNamespace(inner=types.SimpleNamespace(aug=Own()))

    def noise(self):
        return self.tfm.inner.aug.noise()


class OfClass(Rows):
    rng = None

    def noise(self):
        return type(self).rng.random() / 10


def of_held_class():
    class Held(Rows):
        tfm = Own()

        def noise(self):
            return self.tfm.noise()

    return Held()


class Slot:
    __slots__ = ("__rng",)

    def __init__(self):
        self.__rng = random.Random(3)

    def __call__(self):
        return self.__rng.random() / 10


def in_private_slot():
    data = Rows()
    data.noise = Slot()
    return data


def of_another_source():
    data = Rows()
    data.rng = np.random.RandomState(np.random.PCG64(1))
    data.noise = lambda: data.rng.rand() / 10
    return data


def function():
    rng = random.Random(0)

    def before_batch(trainer):
        trainer.batch = trainer.batch[0] + rng.random() / 10, trainer.batch[1]

    return [before_batch]


def augmentation():
    rng = torch.Generator().manual_seed(1)
    return [BatchAugmentationCB(lambda x: x + torch.randn(x.shape, generator=rng) / 10)]


def decorated():
    rng = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def noisy(x):
        return x + torch.randn(x.shape, generator=rng) / 10

    return [BatchAugmentationCB(each_image(noisy))]


class NoisyModel(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + self.rng.random() / 10


class NoisyLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = random.Random(2)

    def forward(self, preds, target):
        return F.cross_entropy(preds * (1 + self.rng.random()), target)


class WithModel(Trainer):
    def __init__(self, dls, loss, opt, model, callbacks):
        model.__class__, model.rng = NoisyModel, random.Random(1)
        super().__init__(dls, loss, opt, model, callbacks)


class WithGenerator(Trainer):
    def __init__(self, *args):
        super().__init__(*args)
        self.gen = torch.Generator().manual_seed(0)


class AddNoise:
    def before_batch(self, trainer):
        noise = torch.randn(4, generator=trainer.gen) / 10
        trainer.batch = trainer.batch[0] + noise, trainer.batch[1]


def exact(data, **options):
    return exact_loader(data, 4, 1, in_memory=False, **options)


KINDS = {
    "name of the script": dict(data=OfScript),
    "name of another module": dict(data=OfModule),
    "name in a layer": dict(layer=LayerOfScript),
    "class in a function": dict(data=closed),
    "default of a method": dict(data=by_default),
    "Hugging Face": dict(data=transformed, load=functools.partial(exact, collate_fn=of_columns)),
    "function as callback": dict(callbacks=function),
    "augmentation": dict(callbacks=augmentation),
    "decorated augmentation": dict(callbacks=decorated),
    "model and loss": dict(loss=NoisyLoss, trainer=WithModel),
    "subset and dataset": dict(data=Over),
    "very many": dict(data=Many),
    "beside many boxes": dict(data=Boxes),
    "trainer": dict(trainer=WithGenerator, callbacks=lambda: [AddNoise()]),
    "class": dict(data=OfClass),
    "in what a class holds": dict(data=of_held_class),
    "private slot": dict(data=in_private_slot),
    "RandomState of PCG64": dict(data=of_another_source),
    "data of EvaluatorCB": dict(callbacks=lambda: [EvaluatorCB(DataLoader(Own(), 4), updates=2)]),
}


def anew():
    "As in a script that is begun anew"
    global RNG
    RNG = np.random.default_rng(0)
    OfClass.rng, elsewhere.rng = random.Random(0), random.Random(0)
    set_seed(3)


def make(data=Rows, layer=nn.ReLU, callbacks=list, loss=None, load=exact, trainer=Trainer, end=()):
    anew()
    model = nn.Sequential(nn.Linear(4, 8), layer(), nn.Linear(8, 3))
    dls = DataLoaders(load(data()), load(data()))
    every = [BasicTrainCB(), MetricsCB(show=False), *callbacks(), *end]
    return trainer(dls, loss() if loss else F.cross_entropy, optim.Adam, model, every)


def outcome(*end, look=None, **options):
    trainer = make(end=end, **options)
    with contextlib.redirect_stdout(io.StringIO()):
        if look:
            getattr(trainer, look)()
        try:
            trainer.fit(4, lr=0.01)
        except RuntimeError as e:
            assert str(e).startswith("power cut")
    losses = [(row.get("valid_loss"), row.get("eval_loss")) for row in trainer.history]
    return [p.tolist() for p in trainer.model.parameters()], losses


def after_batch(trainer):
    if trainer.n_updates == 8:
        raise RuntimeError("power cut")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_changes_nothing_and_a_run_goes_on_exactly(kind, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = outcome(**KINDS[kind])
        assert outcome(CheckpointCB(tmp_path / "whole", every=2), **KINDS[kind]) == whole
        outcome(CheckpointCB(tmp_path / "cut", every=2), after_batch, **KINDS[kind])
        assert outcome(CheckpointCB(tmp_path / "cut", every=2), **KINDS[kind]) == whole


@pytest.mark.parametrize("look", ["validate", "get_preds", "lr_find", "summarize_model", "check"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_look_before_training_changes_nothing(kind, look):
    assert outcome(look=look, **KINDS[kind]) == outcome(**KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_puts_generators_back(kind):
    trainer = make(**KINDS[kind])
    with contextlib.redirect_stdout(io.StringIO()):
        with trainer.snapshot():
            trainer.fit(1, lr=0.01)
            first = trainer.model[0].weight.tolist()
        trainer.fit(1, lr=0.01)
    assert trainer.model[0].weight.tolist() == first


def usual():
    data = Rows()
    data.noise = random.random
    return data


def with_default():
    data = Rows()
    data.generator = torch.default_generator
    return data


@pytest.mark.parametrize("data", [usual, with_default])
def test_usual_sources_are_nobodys_own(data):
    assert data_generators(DataLoader(data(), 4)) == {}


def test_who_only_makes_rows_from_a_generator_draws_nothing_later():
    class Made(Rows):
        def __init__(self):
            super().__init__()
            self.x = torch.tensor(RNG.normal(size=(20, 4))).float()

    assert data_generators(DataLoader(Made(), 4)) == {}


class Wrapped:
    "A loader around a loader, as other libraries make them"

    def __init__(self, dl):
        self.dl = dl

    def __len__(self):
        return len(self.dl)

    def __iter__(self):
        return iter(self.dl)


def test_what_lies_behind_a_wrapped_loader_is_named_when_a_run_goes_on(tmp_path):
    options = dict(data=Own, load=lambda data: Wrapped(DataLoader(data, 4)))
    outcome(CheckpointCB(tmp_path), after_batch, **options)
    with pytest.warns(UserWarning, match=r"`dl.dataset.rng` of `dls.train` may draw random numbers"):
        outcome(CheckpointCB(tmp_path), **options)


class NoisyLoader(DataLoader):
    def __init__(self, data):
        super().__init__(data, 4)
        self.rng = random.Random(3)

    def __iter__(self):
        return ((x + self.rng.random(), y) for x, y in super().__iter__())


def test_what_a_loader_of_ones_own_has_added_is_named_when_a_run_goes_on(tmp_path):
    outcome(CheckpointCB(tmp_path), after_batch, load=NoisyLoader)
    with pytest.warns(UserWarning, match=r"`rng` of `dls.train` may draw random numbers"):
        outcome(CheckpointCB(tmp_path), load=NoisyLoader)


def test_a_run_that_is_taken_back_names_what_nobody_saves():
    trainer = make(load=NoisyLoader, end=[RewindCB()])
    trainer.fit(2, lr=0.01)
    trainer.rewind(1)
    with pytest.warns(UserWarning, match=r"`rng` of `dls.train` may draw random numbers"):
        trainer.fit(2, lr=0.01)


def test_a_transform_of_both_loaders_is_kept_with_one_and_not_named_for_the_other(tmp_path):
    made = []

    def rows():
        made.append(Rows())
        made[-1].noise = made[0].shared if len(made) > 1 else Own().noise
        made[0].shared = made[0].noise
        return made[-1]

    def load(data):
        return exact(data) if len(made) == 1 else DataLoader(data, 4)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome(CheckpointCB(tmp_path, every=2), after_batch, data=rows, load=load)
        made.clear()
        warnings.filterwarnings("ignore", message=".*read again")
        outcome(CheckpointCB(tmp_path, every=2), data=rows, load=load)


class SlotThatFails:
    __slots__ = "data", "late"

    def __init__(self):
        self.data = {}

    def __getattr__(self, name):
        return self.data[name]


class Key:
    def __repr__(self):
        return self.name


class NotOpened(dict):
    def items(self):
        raise OSError("not opened")


class Uncounted(list):
    def __len__(self):
        raise RuntimeError("not counted")


class Entropy(random.Random):
    def getstate(self):
        raise NotImplementedError


ODD = {
    "slot": SlotThatFails,
    "key": lambda: {Key(): [Key()]},
    "not opened": lambda: NotOpened(a=1),
    "uncounted": lambda: Uncounted([1]),
    "of no module": type("Nowhere", (), {"__module__": None}),
    "entropy": Entropy,
}


@pytest.mark.parametrize("kind", ODD)
def test_data_that_cannot_be_looked_into_train_and_validate(kind):
    data = Own()
    data.odd = ODD[kind]()
    trainer = make(data=lambda: data)
    trainer.fit(1, lr=0.01)
    trainer.validate()
    assert trainer.n_updates == 5
    assert any(x is data.rng for x in data_generators(trainer.dls.train).values())


def test_another_modules_names_are_those_that_code_reads():
    sys.modules.setdefault("elsewhere", elsewhere)
    anew()
    assert list(data_generators(DataLoader(OfModule(), 4))) == ["dataset.noise.elsewhere.rng"]


def _number(rng):
    return torch.rand(1, generator=rng).item() if isinstance(rng, torch.Generator) else rng.random()


class HoldsCB:
    def __init__(self, rng):
        self.rng = rng

    def before_batch(self, trainer):
        trainer.batch = trainer.batch[0] + float(_number(self.rng)) / 10, trainer.batch[1]


OF_KINDS = {
    "random.Random": lambda: random.Random(1),
    "numpy.random.PCG64": lambda: np.random.default_rng(1),
    "numpy.random.RandomState": lambda: np.random.RandomState(1),
    "torch.Generator": lambda: torch.Generator().manual_seed(1),
}


@pytest.mark.parametrize("here", OF_KINDS)
@pytest.mark.parametrize("saved", OF_KINDS)
def test_a_run_does_not_go_on_with_a_generator_of_another_kind(saved, here, tmp_path):
    outcome(CheckpointCB(tmp_path, every=2), HoldsCB(OF_KINDS[saved]()), after_batch)
    told = rf"`HoldsCB.rng` drew its random numbers from `{saved}` .* here it is `{here}`"
    fails = contextlib.nullcontext() if saved == here else pytest.raises(ResumeMismatch, match=told)
    with fails:
        outcome(CheckpointCB(tmp_path, every=2), HoldsCB(OF_KINDS[here]()))


class OfNumpy(Own):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(3)


class OfOldNumpy(Own):
    def __init__(self):
        super().__init__()
        self.rng = np.random.RandomState(3)

    def noise(self):
        return self.rng.rand() / 10


class OfTorch(Own):
    def __init__(self):
        super().__init__()
        self.rng = torch.Generator().manual_seed(3)

    def noise(self):
        return torch.rand((), generator=self.rng) / 10


def shuffled(data, **options):
    return DataLoader(data, 4, shuffle=True, **options)


class NoisyCollate:
    def __init__(self):
        self.rng = random.Random(5)

    def __call__(self, rows):
        x, y = torch.utils.data.default_collate(rows)
        return x + self.rng.random(), y


def noisily_collated(data):
    return shuffled(data, collate_fn=NoisyCollate())


PLAIN = {
    "random": dict(data=Own, load=shuffled),
    "numpy": dict(data=OfNumpy, load=shuffled),
    "old numpy": dict(data=OfOldNumpy, load=shuffled),
    "torch": dict(data=OfTorch, load=shuffled),
    "script": dict(data=OfScript, load=shuffled),
    "subset": dict(data=lambda: Subset(OfNumpy(), range(18)), load=shuffled),
    "collate": dict(load=noisily_collated),
}


@pytest.mark.parametrize("every", ["epoch", 3])
@pytest.mark.parametrize("kind", PLAIN)
def test_generators_of_rows_that_a_plain_loader_reads_here_go_on_exactly_and_without_a_word(
    kind, every, tmp_path
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", ".*does not know its position")
        whole = outcome(**PLAIN[kind])
        outcome(CheckpointCB(tmp_path, every=every), after_batch, **PLAIN[kind])
        assert outcome(CheckpointCB(tmp_path, every=every), **PLAIN[kind]) == whole


def test_with_workers_they_are_named(tmp_path):
    options = dict(data=OfNumpy, load=functools.partial(shuffled, num_workers=1))
    outcome(CheckpointCB(tmp_path), after_batch, **options)
    with pytest.warns(UserWarning, match=r"`dataset.rng` of `dls.train` may draw random numbers"):
        outcome(CheckpointCB(tmp_path), **options)
