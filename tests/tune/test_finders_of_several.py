"The rate finder and the batch-size finder where several processes train, checked against one process"

import pytest
import torch
from torch.nn import functional as F

import several
from results import differences, trainer
from isaac_loop.loop.events import CancelBatchException
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.tune.lr_finder import LRFinderCB
import isaac_loop.tune.batch_finder  # noqa: F401 (a method of the trainer)

pytestmark = pytest.mark.processes


def found_by(how, *callbacks, **kwargs):
    "Rates, losses, and whether weights, optimizer and random numbers are as they were"
    made = trainer(MetricsCB(show=False), *callbacks, **kwargs)
    before = [p.detach().clone() for p in made.model.parameters()]
    random = torch.get_rng_state()
    if how == "method":
        finder = made.lr_find(1e-3, lr_mult=2)
    else:
        made.fit(5, 1e-3, callbacks=[LRFinderCB(2, show=False)])
        finder = made.lr_finder
    same = all(torch.equal(p, q) for p, q in zip(made.model.parameters(), before))
    if how == "method":
        same = same and torch.equal(torch.get_rng_state(), random)
    made.fit(1, lr=0.05)  # And the trainer goes on as if nothing had been
    return finder.lrs, finder.losses, same, made.history[-1]["train_loss"]


@pytest.mark.parametrize("how", ["method", "callback", "accumulation", "sum"])
def test_all_processes_try_the_rates_and_find_the_losses_of_one(how):
    "They stop at the same update, where the loss over the rows of all explodes"

    def run():
        callbacks = [AccumulationCB(2)] if how == "accumulation" else []
        kwargs = dict(loss_func=summed) if how == "sum" else {}
        return found_by("callback" if how == "callback" else "method", *callbacks, **kwargs)

    alone = run()
    found = several.in_processes(2, run)
    assert len(alone[0]) > 5 and alone[2]
    assert repr(found[0]) == repr(found[1])
    rates, losses, same, after = found[0]
    wrong = differences([*alone[:2], alone[3]], [rates, losses, after])
    assert same and not wrong, wrong[:4]


def summed(preds, targets, reduction="sum"):
    return F.mse_loss(preds, targets, reduction=reduction)


class Leave:
    "Leaves a batch in one process, before its loss or after its update"

    on_valid = False

    def __init__(self, event):
        setattr(self, event, self._leave)

    def _leave(self, trainer):
        if trainer.ranks.rank == 1 and trainer.batch_num == 2:
            raise CancelBatchException("on purpose")


@pytest.mark.parametrize("event", ["before_batch", "after_step"])
def test_a_process_that_leaves_a_batch_finds_the_same(event):
    found = several.in_processes(2, lambda: found_by("callback", Leave(event)))
    assert repr(found[0]) == repr(found[1])


class Full:
    "Has memory for so many rows in each process"

    def __init__(self, *most):
        self.most = most

    def before_backward(self, trainer):
        rows = len(trainer.batch[0])
        if rows > self.most[several.rank()]:
            raise MemoryError


def test_the_largest_batch_is_the_one_that_fits_into_every_process():
    def run():
        made = trainer(Full(100, 20))
        weights = torch.cat([p.detach().flatten() for p in made.model.parameters()])
        size = made.find_batch_size(max_size=256)
        made.callbacks = [cb for cb in made.callbacks if not isinstance(cb, Full)]
        same = torch.equal(weights, torch.cat([p.detach().flatten() for p in made.model.parameters()]))
        made.fit(1, lr=0.05)
        return size, same

    assert several.in_processes(2, run) == [(16, True)] * 2
