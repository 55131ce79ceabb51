"Batches whose rows are no examples, such as the nodes of graphs: whoever weighs by them is told."

import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import AccumulationCB, BasicTrainCB, DataLoaders, MetricsCB, Trainer


class OfGraphs(nn.Module):
    "Classes of graphs, from the sums of their nodes"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 2)

    def forward(self, nodes, graph):
        return self.head(torch.zeros(int(graph.max()) + 1, 4).index_add_(0, graph, nodes))


def graphs(*sizes):
    "One batch: all nodes, the number of its graph for each, and a class for each graph"
    graph = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return torch.randn(sum(sizes), 4), graph, torch.randint(2, (len(sizes),))


UNEVEN = [graphs(2, 2, 2, 2), graphs(2, 2, 2, 2), graphs(40, 40)]


def told(model, batches, *cbs, n_inp=1, f=lambda trainer: trainer.fit(2), **options):
    "What `f` warns of, by default a fit"
    loaders = DataLoaders(batches, batches, n_inp=n_inp)
    cbs = [BasicTrainCB(), MetricsCB(show=False, **options), *cbs]
    trainer = Trainer(loaders, F.cross_entropy, optim.SGD, model, cbs)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        f(trainer)
    return [str(o.message) for o in found]


def of_graphs(sample):
    return len(sample[2])


def test_losses_that_are_weighed_by_nodes_are_told_once_with_numbers_and_cure():
    (message,) = told(OfGraphs(), UNEVEN, n_inp=2)
    assert "`MetricsCB` counts 8 rows in a batch with 4 predictions and targets" in message
    assert "80 in another one with 2" in message and "`weigh=lambda batch: len(batch[2])`" in message
    for weigh in (of_graphs, "mean"):
        assert told(OfGraphs(), UNEVEN, n_inp=2, weigh=weigh) == []


def test_the_cure_gives_the_mean_over_graphs():
    model = OfGraphs()
    of_batches = [F.cross_entropy(model(*batch[:2]), batch[2], reduction="sum") for batch in UNEVEN]
    loaders = DataLoaders(UNEVEN, UNEVEN, n_inp=2)
    trainer = Trainer(
        loaders, F.cross_entropy, optim.SGD, model, [BasicTrainCB(), MetricsCB(weigh=of_graphs)]
    )
    assert trainer.validate()["valid_loss"] == pytest.approx(float(sum(of_batches)) / 10, rel=1e-6)


def test_gradients_that_are_weighed_by_nodes_are_told_each_to_its_callback():
    (message,) = told(OfGraphs(), UNEVEN, AccumulationCB(3), n_inp=2, weigh=of_graphs)
    assert "`AccumulationCB` counts 8 rows" in message and "len(batch[2])" in message
    both = told(OfGraphs(), UNEVEN, AccumulationCB(3), n_inp=2)
    assert ["`MetricsCB`" in o for o in both] == [False, True]


def test_the_cure_gives_the_update_of_one_big_batch():
    model, whole = OfGraphs(), OfGraphs()
    losses = [F.cross_entropy(whole(*batch[:2]), batch[2], reduction="sum") for batch in UNEVEN]
    (sum(losses) / 10).backward()
    optim.SGD(whole.parameters(), 1e-3).step()

    def fit(trainer):
        trainer.fit(1, valid=False)

    gathering = AccumulationCB(3, weigh=of_graphs)
    assert told(model, UNEVEN, gathering, n_inp=2, f=fit, weigh=of_graphs) == []
    for a, b in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(a, b)


def test_a_check_tells_it_and_is_silenced_by_its_name():
    found = []
    for ignore in ((), "uneven_rows"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append([o.name for o in trainer_of_graphs().check(ignore, batches=3)])
    assert ["uneven_rows" in names for names in found] == [True, False]


def trainer_of_graphs():
    loaders = DataLoaders(UNEVEN, UNEVEN, n_inp=2)
    return Trainer(loaders, F.cross_entropy, optim.SGD, OfGraphs(), [BasicTrainCB(), MetricsCB(show=False)])


def test_evaluations_say_it_no_more():
    "Neither those of a fit nor `validate` behind it"

    class Evaluates:
        def after_epoch(self, trainer):
            if trainer.training:
                trainer.validate(UNEVEN)

    def two(trainer):
        trainer.fit(2)
        trainer.validate()

    assert len(told(OfGraphs(), UNEVEN, Evaluates(), n_inp=2, f=two)) == 1


class Pairs(nn.Module):
    "Siamese: the rows of a pair stand one behind the other"

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(x.reshape(len(x) // 2, 8))


class Steps(nn.Module):
    "A prediction for each step, all of them in one column"

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(x).flatten(0, 1)


def classes(n):
    return torch.randint(2, (n,))


FINE = {
    "graphs of one size": (OfGraphs(), [graphs(3, 3, 3), graphs(3, 3)], 2),
    "one batch": (OfGraphs(), [graphs(9, 1, 2)], 2),
    "pairs": (Pairs(), [(torch.randn(2 * n, 4), classes(n)) for n in (8, 8, 3)], 1),
    "steps of one length": (Steps(), [(torch.randn(n, 5, 4), classes(5 * n)) for n in (8, 8, 3)], 1),
    "plain": (nn.Linear(4, 2), [(torch.randn(n, 4), classes(n)) for n in (8, 8, 3)], 1),
}


@pytest.mark.parametrize("case", FINE)
def test_where_rows_stand_for_as_many_predictions_everywhere_nothing_is_told(case):
    model, batches, n_inp = FINE[case]
    assert told(model, batches, AccumulationCB(2), n_inp=n_inp) == []


def test_steps_of_several_lengths_are_told():
    batches = [(torch.randn(8, steps, 4), classes(8 * steps)) for steps in (5, 9)]
    (message,) = told(Steps(), batches)
    assert "8 rows in a batch with 40 predictions and targets, and 8 in another one with 72" in message
