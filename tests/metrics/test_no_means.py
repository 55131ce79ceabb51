"Functions among the metrics that are averaged over batches, and are no mean over examples."

import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import BasicTrainCB, DataLoaders, EvaluatorCB, MetricsCB, Trainer


def f1(preds, y):
    found = preds.argmax(1)
    return 2 * (found * y).sum() / (found + y).sum().clamp(min=1)


def mean_f1(preds, y):
    "Of each example, on average: a mean all the same"
    return (preds.argmax(1) == y).float().mean()


def rmse(preds, y):
    return (preds[:, 0] - y).square().mean().sqrt()


def batches(n=3, sizes=(8,)):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(rows, 4, generator=generator), torch.randint(2, (rows,), generator=generator))
        for _ in range(n)
        for rows in sizes
    ]


def told(data=None, *cbs, **metrics):
    "What a fit of some epochs warns of, and its history"
    torch.manual_seed(0)
    data = batches() if data is None else data
    cbs = [BasicTrainCB(), MetricsCB(show=False, **metrics), *cbs]
    trainer = Trainer(DataLoaders(data, data), F.cross_entropy, optim.SGD, nn.Linear(4, 2), cbs)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(4, lr=0.1)
    return [str(o.message) for o in found], [row["train_loss"] for row in trainer.history]


def test_a_fit_tells_once_of_each_by_name():
    found, _ = told(f1=f1, rmse=rmse)
    assert ["`f1` of `MetricsCB`" in o or "`rmse` of `MetricsCB`" in o for o in found] == [True, True]
    assert all("no mean over examples" in o and "`ReportCB`" in o for o in found)


def test_the_name_of_the_function_counts_too():
    found, _ = told(**{"score": rmse})
    assert len(found) == 1 and "`score`" in found[0]


@pytest.mark.parametrize("metrics", [dict(f1=mean_f1), dict(accuracy=mean_f1), dict(other=lambda p, y: 0.5)])
def test_what_is_a_mean_is_let_alone_whatever_it_is_called(metrics):
    assert told(**metrics)[0] == []


def test_where_one_batch_is_all_there_is_it_is_exact():
    assert told(batches(1), f1=f1, rmse=rmse)[0] == []


def test_a_function_is_asked_only_where_its_name_says_it():
    calls = []

    def counted(preds, y):
        calls.append(len(y))
        return (preds[:, 0] - y).square().mean().sqrt()

    assert told(mine=counted)[0] == [] and calls == [8] * 12


def test_asking_draws_no_random_numbers():
    def drawn(preds, y):
        return rmse(preds, y) + torch.rand(())

    class DrawsCB:
        def after_batch(self, trainer):
            if trainer.training:
                drawn_so_far.append(float(torch.rand(())))

    runs = []
    for name in ("rmse", "mine"):
        drawn_so_far = []
        told(None, DrawsCB(), **{name: drawn})
        runs.append(drawn_so_far)
    assert runs[0] == runs[1]


def test_evaluations_in_a_fit_say_it_once():
    found, _ = told(None, EvaluatorCB("valid", updates=1, f1=f1), f1=f1)
    assert len([o for o in found if "`f1`" in o]) == 1


def test_others_than_tensors_are_let_alone():
    data = [({"a": torch.randn(4, 4)}, ["one", "two"] * 2) for _ in range(3)]

    class Named:
        def predict(self, trainer):
            trainer.preds = trainer.batch[0]["a"]

        def get_loss(self, trainer):
            trainer.loss = trainer.preds.mean()

    cbs = [Named(), MetricsCB(show=False, f1=lambda preds, y: 0.5)]
    trainer = Trainer(DataLoaders(data, data), None, None, nn.Linear(4, 2), cbs)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(1, train=False)
    assert found == []
