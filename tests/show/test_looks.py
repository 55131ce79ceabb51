"""Looking at data or model changes nothing: whoever looks trains as if nobody had looked.

The same fit with and without a look, bit for bit, over every kind of loader; also in the middle of a pass.
"""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from isaac_loop.all import BasicTrainCB, DataLoaders, Order, Trainer, exact_loader

torch.manual_seed(0)
ROWS = TensorDataset(torch.rand(20, 1, 4, 4), torch.arange(20) % 3)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([ROWS[i] for i in range(20)])


LOADERS = {
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
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Dropout(0.1))
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
