"A run that is cut and goes on, against the same run that was never stopped"

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import runs
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.trainer import Trainer
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.train.training import BasicTrainCB
from runs import Cut, CutCB, fit, make_trainer, tree


def stopped_and_not(tmp_path, make, places, n_epochs=3, attributes=lambda t: None):
    "The same run left alone, and cut after each of these numbers of training batches, one after the other"
    whole = fit(make(), n_epochs)
    for n in places:
        cut = CutCB("before_batch", lambda t: t.training and t.epoch * 7 + t.batch_num == n)
        trainer = make()
        trainer.add_callbacks([CheckpointCB(tmp_path / "run", every=1), cut])
        with pytest.raises(Cut):
            fit(trainer, n_epochs)
    trainer = make()
    trainer.add_callbacks(CheckpointCB(tmp_path / "run", every=1))
    fit(trainer, n_epochs)
    runs.same(whole, trainer)
    assert tree(attributes(whole)) == tree(attributes(trainer))
    assert whole.stop_reason == trainer.stop_reason
    return trainer


def with_loss(loss_func):
    trainer = make_trainer([BasicTrainCB(), MetricsCB(show=False)])
    trainer.loss_func = loss_func
    return trainer


X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
ROWS = list(zip(X, X.sum(1, keepdim=True)))


def small_trainer(*callbacks, loss=F.mse_loss, opt=optim.SGD, dl=None, model=None):
    "Three batches in an epoch, and weights that are the same each time"
    torch.manual_seed(1)
    dls = DataLoaders(exact_loader(ROWS, 8, seed=7) if dl is None else dl)
    return Trainer(dls, loss, opt, model or nn.Linear(4, 1), [BasicTrainCB(), *callbacks])


def cut_once(folder, make, look=lambda t: None):
    "A run left alone, and the same run cut in the middle of its second pass; gives the trainer that went on"
    whole = fit(make(), 3, valid=False)
    cut = CutCB("before_batch", lambda t: t.n_updates == 5)
    with pytest.raises(Cut):
        fit(make(), 3, valid=False, callbacks=[CheckpointCB(folder / "run", every=2), cut])
    trainer = fit(make(), 3, valid=False, callbacks=CheckpointCB(folder / "run", every=2))
    assert all(map(torch.equal, whole.model.parameters(), trainer.model.parameters()))
    assert str(look(whole)) == str(look(trainer))
    return trainer
