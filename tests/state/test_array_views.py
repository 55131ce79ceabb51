"A view on an array that both go on is nothing to warn of; one that stands elsewhere by now is"

import warnings

import numpy as np
import pytest
import torch

from cutting import cut_once, small_trainer
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from runs import fit


class ViewCB:
    "Scales the loss by an array, and writes to a view on it"

    def __init__(self):
        self.all = np.zeros(4)
        self.some = self.all[1:3]

    def after_get_loss(self, trainer):
        self.some += 0.1
        trainer.loss = trainer.loss * (1 + float(self.all.sum()))


class FirstCB(ViewCB):
    "The view comes first, and is never written to"

    def __init__(self):
        made = np.zeros((2, 2), order="F")
        self.some, self.all = made[:1], made

    def after_get_loss(self, trainer):
        self.all[1] += 0.1
        trainer.loss = trainer.loss * (1 + float(self.all.sum()))


class TensorCB(ViewCB):
    def __init__(self):
        super().__init__()
        self.tensor = torch.from_numpy(self.all)


class SetsCB(ViewCB):
    "Before it is read, in each batch"

    def before_batch(self, trainer):
        self.some = self.all[trainer.batch_num :][:1]


@pytest.mark.parametrize("kind", [ViewCB, FirstCB, TensorCB, SetsCB])
def test_a_view_goes_on_with_its_array_without_a_word(kind, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = cut_once(tmp_path, lambda: small_trainer(kind()))
    cb = trainer.callbacks[1]
    assert np.shares_memory(cb.some, cb.all)


class MovesCB(ViewCB):
    def before_batch(self, trainer):
        if trainer.batch_num % 2:
            self.some = self.all[trainer.batch_num :][:1]


class OverlapCB(ViewCB):
    "None of the two has it all"

    def __init__(self):
        made = np.zeros(4)
        self.some, self.all = made[:3], made[1:]


@pytest.mark.parametrize("kind", [MovesCB, OverlapCB])
def test_one_that_cannot_be_kept_is_named(kind, tmp_path):
    with pytest.warns(UserWarning, match=r"`(MovesCB.some|OverlapCB.all)` .* cannot be kept"):
        fit(small_trainer(kind()), 1, valid=False, callbacks=CheckpointCB(tmp_path))
