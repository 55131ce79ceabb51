"""Checkpoints amid an epoch whose batches were made with the model of then are named when written."""

import warnings

import pytest
import torch

from cutting import ROWS, small_trainer
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.state.errors import ResumeMismatch
from runs import Cut, CutCB, fit


class PlayCB:
    "Makes the batches of an epoch with the model of its beginning"

    def before_epoch(self, trainer):
        x = torch.stack([x for x, _ in ROWS])
        with torch.no_grad():
            self.data = x, trainer.model(x) + x.sum(1, keepdim=True)
        trainer.batches, trainer.n_batches = self.batches(), 3

    def batches(self):
        for i in torch.randperm(24).split(8):
            yield [o[i] for o in self.data]


class ShuffleCB:
    "Makes them of what comes again"

    def before_epoch(self, trainer):
        trainer.model.train()
        x, y = map(torch.stack, zip(*ROWS))
        trainer.batches, trainer.n_batches = [(x[i], y[i]) for i in torch.randperm(24).split(8)], 3


def said(folder, cb, every):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(Cut):
            cut = CutCB("before_batch", lambda t: t.n_updates == 5)
            fit(small_trainer(cb), 3, valid=False, callbacks=[CheckpointCB(folder, every=every), cut])
    return [str(o.message) for o in told]


def test_it_is_named_once_and_a_run_that_goes_on_is_refused(tmp_path):
    (told,) = said(tmp_path, PlayCB(), every=1)
    assert "whose batches `PlayCB` made in `before_epoch`" in told and "every='epoch'" in told
    with pytest.raises(ResumeMismatch, match="is another one than in the saved run"):
        fit(small_trainer(PlayCB()), 3, valid=False, callbacks=CheckpointCB(tmp_path, every=1))


def test_between_epochs_there_is_nothing_to_name_and_the_run_goes_on_exactly(tmp_path):
    whole = fit(small_trainer(PlayCB()), 3, valid=False)
    assert said(tmp_path, PlayCB(), every="epoch") == []
    again = fit(small_trainer(PlayCB()), 3, valid=False, callbacks=CheckpointCB(tmp_path))
    assert torch.equal(whole.model.weight, again.model.weight)


def test_what_can_be_made_again_is_no_alarm(tmp_path):
    whole = fit(small_trainer(ShuffleCB()), 3, valid=False)
    assert said(tmp_path, ShuffleCB(), every=1) == []
    again = fit(small_trainer(ShuffleCB()), 3, valid=False, callbacks=CheckpointCB(tmp_path, every=1))
    assert torch.equal(whole.model.weight, again.model.weight)
