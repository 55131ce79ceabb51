"""What a fit changes beside weights and callbacks is kept, or named by the save and not only by the resume.

Samplers inside samplers, lists shuffled where they lie, attributes that a callback gives to a dataset,
the mode of a model, tensors that a model gets in the middle, and weights that hang on a graph.
"""

import copy
import random
import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.basics.tensors import set_seed
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.trainer import Trainer
from isaac_loop.stop.interrupts import InterruptCB
from isaac_loop.train.training import BasicTrainCB

pytestmark = pytest.mark.filterwarnings("ignore:The training loader does not know")
X = torch.randn(12, 1, generator=torch.Generator().manual_seed(0))


def make(dl, *callbacks, folder=None, every="epoch", model=None):
    set_seed(1)
    saving = [CheckpointCB(folder, every=every)] if folder else []
    dls = DataLoaders(dl(), [(X, 2 * X)])
    model = model or nn.Linear(1, 1)
    return Trainer(dls, F.mse_loss, optim.SGD, model, [BasicTrainCB(), *(o() for o in callbacks), *saving])


def power_cut(n):
    def before_backward(trainer):
        if trainer.n_updates == n:
            raise ZeroDivisionError

    return before_backward


def goes_on(folder, dl, *callbacks, every="epoch", in_process=False):
    "Whether a run that breaks off ends with the weights of one that does not"
    whole = make(dl, *callbacks)
    whole.fit(3, lr=0.01, valid=False)
    first = make(dl, *callbacks, folder=folder, every=every)
    with pytest.raises(ZeroDivisionError):
        first.fit(3, lr=0.01, valid=False, callbacks=power_cut(9))
    again = first if in_process else make(dl, *callbacks, folder=folder, every=every)
    again.fit(3, lr=0.01, valid=False)
    return torch.equal(whole.model.weight, again.model.weight)


def inner():
    sampler = RandomSampler(range(12), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(X, 2 * X), batch_sampler=BatchSampler(sampler, 2, False))


def batches():
    return list(zip(X.split(2), (2 * X).split(2)))


class ShuffleCB:
    def before_epoch(self, trainer):
        random.shuffle(trainer.dls.train)


class Rows(Dataset):
    level = 0

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return X[i] * (1 + self.level), 2 * X[i]


class HarderCB:
    def after_batch(self, trainer):
        if trainer.batch_num % 2 == 0:
            trainer.dls.train.dataset.level += 0.1


@pytest.mark.parametrize("every", ["epoch", 2])
def test_a_sampler_inside_one_of_batches_draws_on(every, tmp_path):
    assert goes_on(tmp_path, inner, every=every)


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("every", ["epoch", 2])
def test_a_list_that_is_shuffled_where_it_lies_comes_back_in_its_order(every, in_process, tmp_path):
    assert goes_on(tmp_path, batches, ShuffleCB, every=every, in_process=in_process)


@pytest.mark.parametrize("every", [2, 4])
def test_a_level_that_a_callback_gives_to_a_dataset_is_kept_in_a_pass(every, tmp_path):
    "Its class has the value with which it begins"
    assert goes_on(tmp_path, lambda: DataLoader(Rows(), 2), HarderCB, every=every)


@pytest.mark.parametrize("event", ["log", "after_epoch", "cleanup_epoch"])
def test_a_run_of_which_nothing_is_left_has_the_mode_that_it_ended_with(event, tmp_path):
    def press(trainer):
        if trainer.epoch == 2 and not trainer.training:
            trainer.InterruptCB._note(2)

    press.__name__ = event
    with pytest.raises(KeyboardInterrupt):
        make(batches, InterruptCB, folder=tmp_path).fit(3, lr=0.01, callbacks=press)
    again = make(batches, InterruptCB, folder=tmp_path)
    again.fit(3, lr=0.01)
    assert again.n_updates == 18 and not again.model.training


def told_in(folder, *callbacks, model=None):
    trainer = make(batches, *callbacks, folder=folder, model=model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(3, lr=0.01, valid=False)
    return [str(o.message) for o in told]


class Net(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.register_buffer("seen", None)


class BufferCB:
    def before_batch(self, trainer):
        if trainer.n_updates == 2:
            trainer.model.register_buffer("late", torch.zeros(1))


class FillCB:
    def before_batch(self, trainer):
        trainer.model.seen = torch.zeros(1)


def test_what_a_model_gets_in_the_middle_is_named_once_when_it_is_saved(tmp_path):
    [told] = told_in(tmp_path, BufferCB)
    assert "`model.late` has come" in told and "from the beginning" in told


def test_a_buffer_that_was_to_be_filled_is_none_of_these(tmp_path):
    assert told_in(tmp_path, FillCB, model=Net()) == []


class TeacherCB:
    "An average of the weights, made by whoever forgot `torch.no_grad()`"

    def __init__(self, no_grad=False):
        self.no_grad = no_grad

    def before_fit(self, trainer):
        self.teacher = copy.deepcopy(trainer.model).requires_grad_(False)

    def after_step(self, trainer):
        with torch.set_grad_enabled(not self.no_grad):
            for old, new in zip(self.teacher.parameters(), trainer.model.parameters()):
                old.mul_(0.9).add_(new.clone(), alpha=0.1)


def test_weights_that_hang_on_a_graph_are_named_once_in_words_of_the_library(tmp_path):
    [told] = told_in(tmp_path / "with", TeacherCB)
    assert "`TeacherCB.teacher` hang on a graph" in told and "torch.no_grad()" in told
    assert told_in(tmp_path / "without", lambda: TeacherCB(no_grad=True)) == []
