"Rows that come and go from epoch to epoch, with a plain loader, and a run that was saved among them."

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from isaac_loop.basics.tensors import set_seed
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.trainer import Trainer
from isaac_loop.state.errors import ResumeMismatch
from isaac_loop.train.training import BasicTrainCB
from runs import Cut, CutCB

pytestmark = pytest.mark.filterwarnings("ignore:The training loader does not know")

FEATURES = torch.arange(160.0).view(40, 4).sin()
TARGETS = (FEATURES[:, :1] > 0).float()


def some_rows(n):
    return list(zip(FEATURES[:n].clone(), TARGETS[:n].clone()))


class Curriculum:
    "More rows with each epoch, by its number"

    def before_epoch(self, trainer):
        if trainer.training:
            trainer.dls.train.dataset.indices = list(range(8 + 8 * trainer.epoch))


class Counted(Dataset):
    "Says how many of its rows there are"

    n = 8

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return FEATURES[i], TARGETS[i]


class LongerInLog:
    "One number of the dataset grows after each epoch"

    def log(self, trainer):
        trainer.dls.train.dataset.n += 8


class KeepsNewRows:
    "New rows have a list of their own, and each epoch puts both together"

    def before_fit(self, trainer):
        self.rows, self.new = trainer.dls.train.dataset, []
        self.n = 8

    def before_epoch(self, trainer):
        self.rows[self.n :] = self.new

    def after_epoch(self, trainer):
        w = trainer.model.weight.detach()
        self.new += [(x + w[0], y) for x, y in some_rows(8)]


class GrowsItsList:
    "Holds the list that is the dataset, and extends it after each epoch"

    def before_fit(self, trainer):
        self.rows = trainer.dls.train.dataset

    def after_epoch(self, trainer):
        self.rows += some_rows(8)


KINDS = {
    "curriculum": (lambda: Subset(TensorDataset(FEATURES, TARGETS), list(range(8))), Curriculum),
    "number in the dataset": (Counted, LongerInLog),
    "list of new rows": (lambda: some_rows(8), KeepsNewRows),
}


def run_of(folder, data, *callbacks, every=1):
    set_seed(1)
    dls, model = DataLoaders(DataLoader(data, 4, shuffle=True)), nn.Linear(4, 1)
    cbs = [BasicTrainCB(), CheckpointCB(folder, every=every), *callbacks]
    return Trainer(dls, F.binary_cross_entropy_with_logits, optim.Adam, model, cbs)


def cut_in(trainer, epoch, batch):
    at = CutCB("before_step", lambda t: (t.epoch, t.batch_num) == (epoch, batch))
    with pytest.raises(Cut):
        trainer.fit(3, lr=0.1, valid=False, callbacks=[at])


@pytest.mark.parametrize("same_process", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [(1, 2), (2, 5)])
def test_a_run_among_growing_rows_goes_on_as_if_nothing_had_happened(kind, same_process, place, tmp_path):
    "What counts are the rows once `before_epoch` has run"
    data, callback = KINDS[kind]
    whole = run_of(tmp_path / "whole", data(), callback())
    whole.fit(3, lr=0.1, valid=False)
    assert whole.n_updates == 2 + 4 + 6
    broken = run_of(tmp_path / "run", data(), callback())
    cut_in(broken, *place)
    again = broken if same_process else run_of(tmp_path / "run", data(), callback())
    again.fit(3, lr=0.1, valid=False)
    assert again.n_updates == whole.n_updates
    assert torch.equal(again.model.weight, whole.model.weight)


def test_rows_that_nobody_has_set_again_are_refused_in_the_pass(tmp_path):
    "What is missing is said with what to do, and before a batch is trained"
    data, callback = KINDS["curriculum"]
    cut_in(run_of(tmp_path / "run", data(), callback()), 2, 1)
    stays = run_of(tmp_path / "run", data())
    with pytest.raises(ResumeMismatch, match="6 batches in epoch 2, and has 2 now .*in each `before_epoch`"):
        stays.fit(3, lr=0.1, valid=False)
    assert stays.n_updates == 7 and "preds" not in vars(stays)


def test_a_loader_whose_length_never_varied_is_refused_before_anything_is_put_back(tmp_path):
    "As before: the saved run had as many batches all the time"
    cut_in(run_of(tmp_path / "run", some_rows(24)), 1, 1)
    shorter = run_of(tmp_path / "run", some_rows(16))
    with pytest.raises(ResumeMismatch, match="it had 6 batches, and has 4"):
        shorter.fit(3, lr=0.1, valid=False)
    assert shorter.n_updates == 0


@pytest.mark.parametrize("every", [1, "epoch"])
def test_a_list_that_is_the_data_and_grows_is_named_when_the_run_is_saved(every, tmp_path, recwarn):
    run_of(tmp_path / "run", some_rows(8), GrowsItsList(), every=every).fit(3, lr=0.1, valid=False)
    (told,) = [str(w.message) for w in recwarn if "is a list that" in str(w.message)]
    assert "`GrowsItsList` holds. It had 8 rows when it was seen first, and has 16" in told


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_come_again_are_not_named(kind, tmp_path, recwarn):
    data, callback = KINDS[kind]
    run_of(tmp_path / "run", data(), callback()).fit(3, lr=0.1, valid=False)
    assert not [str(w.message) for w in recwarn if "dataset" in str(w.message)]
