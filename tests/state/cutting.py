"A run that is cut and goes on, against the same run that was never stopped"

import pytest

import runs
from isaac_loop.checkpoints.checkpoint import CheckpointCB
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
