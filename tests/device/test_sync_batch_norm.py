"""Batch norm over the rows of all processes, against one process that has all rows.

Weights, running statistics and history must be those of one process up to rounding, whatever the shares are.
A process that leaves a batch between two messages of a norm must not be waited for.
"""

import copy

import pytest
import torch
from torch import nn

from isaac_loop.loop.events import CancelBatchException, CancelEpochException, CancelFitException
from isaac_loop.state.errors import RanksDiffer, RanksDiverged
from isaac_loop.train.accumulation import AccumulationCB
from several import in_processes, loaders, outcome, rank, trainer

pytestmark = pytest.mark.processes


def net(dtype=torch.float64):
    "Norms over two and three dimensions; no bias before them, whose gradient is nothing but rounding"
    torch.manual_seed(1)
    layers = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Unflatten(1, (3, 2))
    more = nn.BatchNorm1d(3, affine=False), nn.Flatten(), nn.Linear(6, 1)
    return nn.Sequential(*layers, *more).to(dtype)


def fitted(n, dtype, *callbacks, n_epochs=1, **kwargs):
    t = trainer(*callbacks, dls=loaders(n, dtype=dtype), model=net(dtype), sync_bn=True, **kwargs)
    t.fit(n_epochs, lr=0.01)
    buffers = torch.cat([x.reshape(-1).to(dtype) for x in t.model.buffers()])
    return outcome(t)[0], buffers


def check_same(one, others, limit):
    for weights, buffers in others:
        assert (weights - one[0]).abs().max() <= limit and (buffers - one[1]).abs().max() <= limit


@pytest.mark.shows("PTA-34")
@pytest.mark.parametrize("n, dtype, limit", [(3, torch.float64, 1e-12), (2, torch.float32, 5e-7)])
def test_the_numbers_are_those_of_one_process(n, dtype, limit):
    check_same(fitted(53, dtype), in_processes(n, fitted, 53, dtype), limit)


def test_gradients_of_several_batches_may_be_gathered():
    def run():
        return fitted(53, torch.float64, AccumulationCB(2))

    check_same(run(), in_processes(2, run), 1e-12)


@pytest.mark.parametrize("n", [9, 11])
def test_a_share_of_one_row_is_named_where_each_process_measures_its_own(n):
    def fit(**kwargs):
        t = trainer(dls=loaders(n, **kwargs), model=net())
        t.fit(1, lr=0.01, valid=False)

    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        in_processes(2, fit)
    (note,) = [o for o in caught.value.__notes__ if o.startswith(f"This batch has {n - 8} row")]
    assert "this process has a single one" in note and "`drop_last=True`" in note and "sync_bn=True" in note
    in_processes(2, lambda: fit(drop_last=True))


def test_too_few_rows_at_the_end_join_the_batch_before(capfd):
    class CountCB:
        def after_batch(self, t):
            if t.training:
                rows.append(len(t.batch[0]))

    def run():
        t = trainer(CountCB(), dls=loaders(33), model=net(), sync_bn=True)
        t.fit(1)
        return rows, len(t.dls.train)

    rows = []
    answers = in_processes(2, run)
    assert [o[0] for o in answers] == [[4, 4, 4, 5], [4, 4, 4, 4]]
    assert answers[0][1] == 5, "after the fit the loader is as it was"
    assert capfd.readouterr().out.count("The last rows of an epoch (1) are fewer than the 2 processes") == 1


def test_a_process_without_any_row_is_refused():
    with pytest.raises(ValueError, match="2 rows cannot be shared among 3 processes"):
        in_processes(3, fitted, 2, torch.float64)


def test_the_model_is_the_same_after_a_fit_as_before_and_a_copy_measures_alone():
    class CopyCB:
        def after_predict(self, t):
            if t.training and rank() == 0:
                twin = copy.deepcopy(t.model)
                norm(twin)

    def norm(model):
        model[1].train()
        model[1].double()(torch.ones(2, 6, dtype=torch.float64))

    def run():
        t = trainer(dls=loaders(16), model=net(), sync_bn=True)
        before = [type(m) for m in t.model.modules()], list(t.model.state_dict()), [*vars(t.model[1])]
        t.fit(1)
        norm(t.model)
        assert before == (
            [type(m) for m in t.model.modules()],
            list(t.model.state_dict()),
            [*vars(t.model[1])],
        )

    in_processes(2, run)


LEFT = {
    1: [("before_batch", CancelFitException), ("after_predict", CancelBatchException)],
    2: [("before_predict", CancelEpochException), ("after_backward", CancelFitException)],
}


class LeaveCB:
    "Leaves the third batch of the first epoch in one process"

    def __init__(self, event, cancel):
        self.cancel = cancel
        setattr(self, event, self.leave)

    def leave(self, t):
        if rank() == 1 and t.training and t.epoch == 0 and t.batch_num == 2:
            raise self.cancel("enough of this")


@pytest.mark.parametrize("n_batches", [1, 2])
def test_a_batch_that_one_process_leaves_is_left_by_all(n_batches):
    def run():
        return [left(event, cancel) for event, cancel in LEFT[n_batches]]

    def left(event, cancel):
        several = [AccumulationCB(n_batches)] if n_batches > 1 else []
        t = trainer(LeaveCB(event, cancel), *several, dls=loaders(40), model=net(), sync_bn=True)
        t.fit(2)
        return t.n_updates, outcome(t)[0]

    for first, second in zip(*in_processes(2, run), strict=True):
        assert first[0] == second[0] > 0
        assert torch.equal(first[1], second[1])


def test_one_process_with_fewer_batches_is_told_and_not_waited_for():
    class Batches(list):
        def __iter__(self):
            return iter(self[: len(self) - rank()])

    def run():
        dls = loaders(40)
        dls.train = Batches(dls.train)
        t = trainer(dls=dls, model=net(), sync_bn=True, share=False)
        t.fit(1)

    with pytest.raises((RanksDiverged, RanksDiffer), match="others have another batch|dls.train"):
        in_processes(2, run)


def test_alone_it_changes_nothing():
    plain = trainer(dls=loaders(24), model=net())
    plain.fit(1)
    synced = trainer(dls=loaders(24), model=net(), sync_bn=True)
    synced.fit(1)
    assert torch.equal(outcome(plain)[0], outcome(synced)[0])
