"""A run that was stopped anywhere and goes on, against the same run that was never stopped.

Everything is compared bit for bit: weights, optimizer, average, best weights, rows of the history and losses of all batches.
"""
import shutil

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

from isaac_loop.callbacks.augmentation import MixUpCB
from isaac_loop.callbacks.averaging import EMACB, SWACB
from isaac_loop.callbacks.best import KeepBestCB
from isaac_loop.callbacks.checkpoint import CheckpointCB, RewindCB
from isaac_loop.callbacks.interrupts import InterruptCB
from isaac_loop.callbacks.metrics import MetricsCB
from isaac_loop.callbacks.progress import ProgressCB
from isaac_loop.callbacks.recorder import RecorderCB
from isaac_loop.callbacks.schedules import OneCycleSchedulerCB, PlateauSchedulerCB
from isaac_loop.callbacks.tracking import TrackingCB
from isaac_loop.callbacks.training import BasicTrainCB, MomentumTrainCB, NBatchCB
from isaac_loop.data import DataLoaders
from isaac_loop.sampling import ReplayLoader, exact_loader
from isaac_loop.store import CheckpointStore, load_weights
from runs import Cut, CutCB, Rows, callbacks, fit, make_loaders, make_model, make_trainer, momentum_sgd, result, same, tree

pytestmark = pytest.mark.filterwarnings("ignore:The training loader does not know", "ignore:Reading")


# ---- T3: save at every batch, go on from each

def everything():
    "As many callbacks as fit into one run"
    import torcheval.metrics
    import torchmetrics
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    return [BasicTrainCB(), MetricsCB(torcheval.metrics.MulticlassAccuracy(), train_metrics=True, tm=accuracy), OneCycleSchedulerCB(), EMACB(0.9),
            KeepBestCB(), RecorderCB(rate=lambda t: t.opt.param_groups[0]["lr"], loss=lambda t: t.loss), TrackingCB(), ProgressCB("plain")]


def plain_loaders(num_workers=0):
    train = DataLoader(Rows(40), 8, shuffle=True, num_workers=num_workers)
    return DataLoaders(train, DataLoader(Rows(24), 12))


VARIANTS = {
    "everything": (everything, make_loaders, optim.AdamW),
    "momentum in the gradients": (lambda: callbacks(train=MomentumTrainCB(0.5)), make_loaders, momentum_sgd),
    "swa, mixup, plateau": (lambda: [BasicTrainCB(), MetricsCB(), MixUpCB(), SWACB(0.3, each="update", keep=True), PlateauSchedulerCB(patience=0)], make_loaders, optim.Adam),
    "swa by epoch, limited": (lambda: [BasicTrainCB(), MetricsCB(), NBatchCB(3), SWACB(0.3)], make_loaders, optim.Adam),
    "plain loaders": (callbacks, plain_loaders, optim.Adam),
    "a list": (callbacks, lambda: DataLoaders([o for o in DataLoader(Rows(40, False), 8)], list(DataLoader(Rows(24, False), 12))), optim.Adam),
    "replayed": (callbacks, lambda: DataLoaders(ReplayLoader(DataLoader(Rows(40), 8, shuffle=True), 3), DataLoader(Rows(24), 12)), optim.Adam),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_going_on_from_every_batch_is_the_same_run(variant, tmp_path):
    "T3; NEMO-23, NEMO-25, NEMO-34, PTA-38, PTA-51: three epochs, saved at every batch; one run from each of the checkpoints"
    make_cbs, make_dls, opt_func = VARIANTS[variant]
    whole = fit(make_trainer(make_cbs(), make_dls(), opt_func))
    saved = fit(make_trainer([*make_cbs(), CheckpointCB(tmp_path/"all", every=1, keep_last=None)], make_dls(), opt_func))
    same(whole, saved)
    found = CheckpointStore(tmp_path/"all", read_only=True).list()
    assert len(found) == whole.n_updates
    for o in found:
        again = fit(make_trainer([*make_cbs(), CheckpointCB(tmp_path/f"from {o.step}", every=1000, resume=o.path)], make_dls(), opt_func))
        same(whole, again)
        if hasattr(again, "TrackingCB"): same_tables(whole.TrackingCB, again.TrackingCB)


def same_tables(a, b):
    for name in ("epoch_stats", "batch_stats"):
        found, expected = ([{k: v for k, v in row.items() if k not in ("run", "elapsed")} for row in getattr(o, name)] for o in (a, b))
        assert tree(found) == tree(expected)


@pytest.mark.parametrize("first,then", [(2, 2), (0, 2), (2, 0), (1, 3)])
def test_the_number_of_workers_may_change(first, then, tmp_path):
    "T3 with workers: one run from each place of the second epoch"
    whole = fit(make_trainer(dls=make_loaders(24)), 2)
    saved = fit(make_trainer(callbacks(tmp_path/"all", every=1, keep_last=None), make_loaders(24, num_workers=first)), 2)
    same(whole, saved)
    for o in CheckpointStore(tmp_path/"all", read_only=True).list()[1:5]:
        same(whole, fit(make_trainer(callbacks(tmp_path/f"from {o.step}", resume=o.path), make_loaders(24, num_workers=then)), 2))
