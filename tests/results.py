"What a fit leaves in its history, in one process and in several, for tests that compare them"

import math
from functools import partial

import torch
from torch.nn import functional as F

import several
from isaac_loop.device.distributed import DistributedCB
from isaac_loop.loop.trainer import Trainer
from isaac_loop.train.training import BasicTrainCB


def trainer(*callbacks, dls=None, loss_func=F.mse_loss, model=None):
    "A trainer for one process or several, without a callback that records"
    usual = [BasicTrainCB(), DistributedCB(timeout=several.TIMEOUT)]
    dls = (dls or several.loaders)()  # Made anew: a loader goes on where the last fit has ended
    model = (model or several.net)()
    return Trainer(dls, loss_func, torch.optim.Adam, model, [*usual, *callbacks])


def without_times(row):
    "A row without what a clock has said"
    return {name: value for name, value in row.items() if not name.endswith(("elapsed", "seconds"))}


def fitted(make, n_epochs=2, **kwargs):
    "Rows without times, columns of batches, and times of a fit with the callbacks that `make` gives"
    made = trainer(*make(), **kwargs)
    made.fit(n_epochs, lr=0.05)
    rows = [without_times(row) for row in made.history]
    batches = without_times({name: list(column) for name, column in made.history.batches.columns.items()})
    return rows, batches, [row.get("elapsed") for row in made.history]


def differences(one, other):
    "Where two things are not the same up to rounding"
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return [(key, *o) for key in one for o in differences(one[key], other[key])]
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        return [o for pair in zip(one, other) for o in differences(*pair)]
    if torch.is_tensor(one):
        return differences(one.tolist(), other.tolist())
    if isinstance(one, (str, type(None))):
        return [] if one == other else [(one, other)]
    if math.isnan(one) and math.isnan(other):
        return []
    return [] if abs(one - other) <= 1e-12 * max(1, abs(one)) else [(one, other)]


def check(make, sizes=(2, 3), **kwargs):
    "One process and several have the same history, and several have the same bits; the rows"
    rows, batches, _ = fitted(make, **kwargs)
    for size in sizes:
        found = several.in_processes(size, partial(fitted, make, **kwargs))
        for other in found[1:]:
            assert repr(other) == repr(found[0])  # NaN is not equal to itself
        wrong = differences([rows, batches], list(found[0][:2]))
        assert not wrong, wrong[:5]
    return rows
