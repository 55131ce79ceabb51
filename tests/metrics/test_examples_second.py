"Sequences whose steps come first: nobody guesses how many examples there are, and somebody is told."

import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import BasicTrainCB, DataLoaders, MetricsCB, Trainer


class LastStep(nn.Module):
    def __init__(self, batch_first=False, ids=False):
        super().__init__()
        self.words = nn.Embedding(5, 3) if ids else nn.Identity()
        self.rnn, self.head = nn.GRU(3, 4, batch_first=batch_first), nn.Linear(4, 2)

    def forward(self, x, *lengths):
        return self.head(self.rnn(self.words(x))[1][0])


class EachStep(LastStep):
    def forward(self, x):
        return self.head(self.rnn(x)[0]).flatten(0, 1)


SHAPES = (5, 8), (9, 8), (20, 3)


def classes(n):
    return torch.randint(2, (n,))


def told(model, batches, n_inp=1, **options):
    "What two fits warn of"
    loaders = DataLoaders(batches, batches, n_inp=n_inp)
    trainer = Trainer(
        loaders, F.cross_entropy, optim.SGD, model, [BasicTrainCB(), MetricsCB(show=False, **options)]
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(2)
        trainer.fit(1)
    return [str(o.message) for o in found]


@pytest.mark.parametrize("ids", [False, True])
def test_losses_that_are_weighed_by_steps_are_told_once_with_the_cure(ids):
    "`valid_loss` was weighed by 5, 9 and 20, and not by 8, 8 and 3"
    batches = [(torch.randint(5, (t, b)) if ids else torch.randn(t, b, 3), classes(b)) for t, b in SHAPES]
    (message,) = told(LastStep(ids=ids), batches)
    assert "predictions and targets 3 rows" in message and "`weigh=lambda batch: len(batch[1])`" in message
    for weigh in (lambda batch: len(batch[1]), "mean"):
        assert told(LastStep(ids=ids), batches, weigh=weigh) == []


FINE = {
    "examples first": (LastStep(True), [(torch.randn(b, t, 3), classes(b)) for t, b in SHAPES], 1),
    "lengths say it": (
        LastStep(),
        [(torch.randn(t, b, 3), torch.full((b,), t), classes(b)) for t, b in SHAPES],
        2,
    ),
    "a target for each step": (
        EachStep(),
        [(torch.randn(t, 8, 3), classes(t * 8)) for t, _ in SHAPES],
        1,
    ),
    "a table as wide as long": (nn.Linear(3, 2), [(torch.randn(3, 3), classes(3))], 1),
    "one example": (LastStep(), [(torch.randn(5, 1, 3), classes(1))], 1),
    "crops": (
        nn.Sequential(
            nn.Flatten(), nn.Linear(48, 6), nn.Unflatten(0, (3, 4)), nn.Flatten(), nn.Linear(24, 2)
        ),
        [(torch.randn(12, 3, 4, 4), classes(3))],
        1,
    ),
}


@pytest.mark.parametrize("case", FINE)
def test_other_shapes_say_nothing(case):
    model, batches, n_inp = FINE[case]
    assert told(model, batches, n_inp) == []


def test_a_target_for_each_step_of_more_and_fewer_examples_is_told_as_uneven():
    "`valid_loss` was weighed by 5, 9 and 20, and not by 40, 72 and 60"
    batches = [(torch.randn(t, b, 3), classes(t * b)) for t, b in SHAPES]
    (message,) = told(EachStep(), batches)
    assert "5 rows in a batch with 40 predictions and targets, and 20 in another one with 60" in message
    assert told(EachStep(), batches, weigh=lambda batch: len(batch[1])) == []


def test_batches_of_other_shapes_are_no_table_that_was_scaled_together():
    batches = [(torch.randn(t, b, 3), classes(b)) for t, b in SHAPES]
    trainer = Trainer(DataLoaders(batches, batches), F.cross_entropy, optim.SGD, LastStep(), BasicTrainCB())
    assert "not_looked" not in [o.name for o in trainer.check(batches=2)]
