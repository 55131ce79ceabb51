"""Looking at data or model changes nothing: whoever looks trains as if nobody had looked.

The same fit with and without a look, bit for bit, over every kind of loader; also in the middle of a pass.
"""

import random

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from isaac_loop.all import BasicTrainCB, DataLoaders, EvaluatorCB, Order, Trainer, exact_loader
from isaac_loop.data.generators import data_generators, held_generators

torch.manual_seed(0)
ROWS = TensorDataset(torch.rand(20, 1, 4, 4), torch.arange(20) % 3)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([ROWS[i] for i in range(20)])


class Jitter:
    def __init__(self):
        self.rng = random.Random(4)

    def __call__(self, x):
        return x + self.rng.random()


class Jittered(Dataset):
    "Draws by a transform that it holds"

    def __init__(self):
        self.tfms = [Jitter()]

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return self.tfms[0](ROWS[i][0]), ROWS[i][1]


class Place(IterableDataset):
    "A stream that can go on anywhere, and stands where it was read last"

    i = 0

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = state["i"]

    def __iter__(self):
        while self.i < 20:
            self.i += 1
            yield ROWS[self.i - 1]
        self.i = 0


class StartPlace(Place):
    "The same, and only a state that is put back lets it begin elsewhere"

    start = 0

    def load_state_dict(self, state):
        self.start = self.i = state["i"]

    def __iter__(self):
        first, self.start = self.start, 0
        for i in range(first, 20):
            self.i = i + 1
            yield ROWS[i]


class Noise(nn.Module):
    "Draws from a generator of its own, also when it evaluates"

    def __init__(self):
        super().__init__()
        self.drawn = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.drawn)


LOADERS = {
    "jittered": lambda: exact_loader(Jittered(), 4),
    "jittered, plain": lambda: DataLoader(Jittered(), 4, shuffle=True),
    "place": lambda: exact_loader(Place(), 4),
    "start": lambda: exact_loader(StartPlace(), 4),
    "exact": lambda: exact_loader(ROWS, 4, in_memory=False),
    "in memory": lambda: exact_loader(ROWS, 4, in_memory=True),
    "workers": lambda: exact_loader(ROWS, 4, in_memory=False, num_workers=2),
    "stream": lambda: exact_loader(Stream(), 4),
    "shuffled": lambda: DataLoader(ROWS, 4, shuffle=True),
    "generator": lambda: DataLoader(ROWS, 4, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "list": lambda: list(DataLoader(ROWS, 4)),
}
LOOKS = {
    "show_batch": lambda trainer: trainer.dls.show_batch(2),
    "show_image_batch": lambda trainer: trainer.show_image_batch(2),
    "summarize_model": lambda trainer: trainer.summarize_model(),
}


class SeenCB:
    "Notes the rows of each batch, and where the loader stands behind it; looks in one of them"

    def __init__(self, look=None, at=None):
        self.look, self.at, self.seen = look, at, []

    def after_batch(self, trainer):
        if self.look and trainer.n_updates == self.at:
            self.look(trainer)
        tells = getattr(trainer.dl, "state_dict", lambda: None)
        self.seen.append((trainer.batch[0].flatten().tolist(), tells(), torch.rand(()).item()))


@pytest.fixture(autouse=True)
def close():
    yield
    from matplotlib import pyplot

    pyplot.close("all")


def run(kind, between=None, within=None, at=None):
    "Two fits, with a look before each, or one in the middle of the first"
    torch.manual_seed(42)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Dropout(0.1), Noise())
    trainer = Trainer(DataLoaders(LOADERS[kind]()), F.cross_entropy, optim.SGD, model, BasicTrainCB())
    trainer.add_callbacks(cb := SeenCB(within, at))
    for _ in range(2):
        if between:
            between(trainer)
            between(trainer)
        trainer.fit(2, lr=0.1, valid=False)
    return cb.seen, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", LOADERS)
def test_who_looks_before_a_fit_trains_as_if_nobody_had_looked(kind, look):
    assert run(kind, between=LOOKS[look]) == run(kind)


@pytest.mark.parametrize("at", [2, 5])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", [o for o in LOADERS if o != "workers"])
def test_who_looks_in_the_middle_of_a_pass_trains_as_if_nobody_had_looked(kind, look, at):
    "Where the loader stands is right again at the next batch at the latest"
    if kind == "place" and at == 5:
        pytest.skip("at its end, two passes over such a stream have no batch for the second")
    looked, usual = run(kind, within=LOOKS[look], at=at), run(kind)
    assert looked == usual


def test_a_look_from_a_callback_that_prepares_batches_is_refused_and_later_ones_are_not():
    def looker(event, order):
        cb = type("LookCB", (), {event: lambda self, trainer: trainer.show_image_batch(2), "order": order})()
        trainer = Trainer(DataLoaders(LOADERS["exact"]()), F.cross_entropy, optim.SGD, net(), BasicTrainCB())
        trainer.fit(1, lr=0.1, valid=False, callbacks=cb)
        return trainer.n_updates

    with pytest.raises(RuntimeError, match="order = Order.RECORD"):
        looker("before_batch", 0)
    assert looker("before_batch", Order.RECORD) == looker("log", 0) == 5


def test_how_many_images_is_a_count():
    trainer = Trainer(DataLoaders(LOADERS["exact"]()), F.cross_entropy, optim.SGD, net(), BasicTrainCB())
    for wrong in (-1, 2.5):
        with pytest.raises((ValueError, TypeError), match="images are counted"):
            trainer.show_image_batch(wrong)


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


EVALUATIONS = {
    "validate": lambda trainer: trainer.validate(),
    "get_preds": lambda trainer: trainer.get_preds(),
    "lr_find": lambda trainer: trainer.lr_find(),
}


@pytest.mark.parametrize("what", [*EVALUATIONS, "EvaluatorCB"])
@pytest.mark.parametrize("kind", ["exact", "jittered", "jittered, plain"])
def test_an_evaluation_leaves_generators_of_data_and_model_where_they_are(kind, what):
    def run(what=None):
        torch.manual_seed(42)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), Noise())
        dls = DataLoaders(LOADERS[kind](), LOADERS[kind]())
        trainer = Trainer(dls, F.cross_entropy, optim.SGD, model, BasicTrainCB())
        if what in EVALUATIONS:
            EVALUATIONS[what](trainer)
        else:
            trainer.add_callbacks(EvaluatorCB(updates=2) if what else None)
        trainer.fit(2, lr=0.1, valid=False)
        return [p.tolist() for p in model.parameters()]

    assert run(what) == run()


class HidesItself:
    "Fails when it is looked into"

    @property
    def __dict__(self):
        raise RuntimeError("closed")


class OwnTrainer(Trainer):
    def loss(self, preds, target):
        return F.cross_entropy(preds, target)


def test_the_search_for_generators_ends_at_a_trainer_and_at_what_cannot_be_looked_into():
    data = Jittered()
    data.closed, data.many = HidesItself(), type("Many", (), {})()
    vars(data.many).update({f"x{i}": HidesItself() for i in range(2000)})
    assert list(data_generators(DataLoader(data, 4))) == ["dataset.tfms[0].rng"]
    trainer = OwnTrainer(DataLoaders(DataLoader(data, 4)), None, optim.SGD, net(), BasicTrainCB())
    trainer.loss_func, trainer.rng = trainer.loss, random.Random(1)
    assert held_generators([trainer.model, trainer.loss_func]) == {}
    trainer.fit(1, lr=0.1, valid=False)
