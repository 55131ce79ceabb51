"What counts as a flag: of `fit`, and of callbacks."

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from isaac_loop.all import NBatchCB
from small import data, trainer_with


@pytest.mark.parametrize("name", ["train", "valid", "keep_opt"])
@pytest.mark.parametrize("value", ["False", "no", "", 2, 0.5, torch.zeros(1)], ids=str)
def test_what_is_no_flag_of_a_fit_is_refused_by_name(name, value):
    "'False' trained, and nobody said so"
    trainer = trainer_with()
    with pytest.raises(TypeError, match=f"as `{name}`, which is neither True nor False"):
        trainer.fit(1, **{name: value})
    assert not trainer.history


def test_a_loader_in_the_place_of_a_flag_is_told_where_loaders_go():
    "The loss of `dls.valid` was shown for that of the other data"
    other = DataLoader(data(), batch_size=None)
    with pytest.raises(TypeError, match=r"got a DataLoader as `valid`.*`trainer.validate\(loader\)`"):
        trainer_with().fit(1, valid=other)


@pytest.mark.parametrize("flag", [True, 1, 1.0, np.bool_(True), np.int64(1)], ids=repr)
def test_numbers_that_are_one_or_zero_and_flags_of_numpy_are_flags(flag):
    trainer = trainer_with()
    trainer.fit(1, train=flag, valid=type(flag)(0), keep_opt=None)
    assert trainer.n_updates == 3


@pytest.mark.parametrize("name", ["on_train", "on_valid", "in_side_runs"])
@pytest.mark.parametrize("value", ["no", "False"])
def test_a_text_as_the_flag_of_a_callback_is_refused(name, value):
    "It counted as True"

    class WatchCB:
        def after_batch(self, trainer):
            pass

    setattr(WatchCB, name, value)
    with pytest.raises(TypeError, match=f"`WatchCB.{name}` is '{value}', which is neither True nor False"):
        trainer_with(WatchCB())
    trainer_with(NBatchCB(1, on_valid=False))
