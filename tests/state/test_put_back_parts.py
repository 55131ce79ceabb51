"""What an evaluation in mid-fit puts back of layers, modes and samplers, whoever has written them."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from isaac_loop.all import BasicTrainCB, DataLoaders, EvaluatorCB, Trainer
from isaac_loop.basics.tensors import modules_of, set_mode
from isaac_loop.state.snapshot import Snapshot

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
BATCHES = [(X[:6], Y[:6]), (X[6:], Y[6:])]


def fitted(model, *callbacks, dls=None, inside=None):
    "A trainer that has evaluated after each update"
    evaluator = EvaluatorCB(updates=1, at_end=False, callbacks=inside)
    trainer = Trainer(
        dls or DataLoaders(BATCHES, BATCHES), F.cross_entropy, optim.SGD, model, [BasicTrainCB(), *callbacks]
    )
    trainer.add_callback(evaluator)
    trainer.fit(1, lr=0.1, valid=False)
    return trainer


# Layers


class SetsCB:
    "Sets attributes of layers while somebody evaluates"

    def before_batch(self, trainer):
        for m in trainer.model.modules():
            m.seen = 1
        trainer.model[0].scale = 3.0


class SeesCB:
    "What a layer has after each update"

    order = 1000

    def after_batch(self, trainer):
        self.found = [sorted(vars(m).keys() & {"seen", "scale"}) for m in trainer.model.modules()]


def test_what_an_evaluation_sets_in_layers_is_gone_and_what_it_changes_is_as_it_was():
    model, sees = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2))), SeesCB()
    model[0].scale = 2.0
    fitted(model, sees, inside=[SetsCB()])
    assert sees.found == [[], ["scale"], [], [], []]
    assert model[0].scale == 2.0


class Grows(nn.Module):
    "Has something in an attribute of a layer of PyTorch that each forward changes"

    def __init__(self, held):
        super().__init__()
        self.lin = nn.Linear(4, 2)
        self.lin.held = held

    def forward(self, x):
        held = self.lin.held
        if isinstance(held, list):
            held.append(1)
        elif isinstance(held, dict):
            held[len(held)] = 1
        else:
            held.add_(1)
        return self.lin(x) * (1 + 0.1 * (held.item() if torch.is_tensor(held) else len(held)))


class Renames(nn.Module):
    "Exchanges an attribute of a layer for one of another name"

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2)
        self.lin.cool = True

    def forward(self, x):
        if not self.training and hasattr(self.lin, "cool"):
            del self.lin.cool
            self.lin.hot = True
        return self.lin(x) * (0.5 if hasattr(self.lin, "hot") else 1.0)


MODELS = {
    "list": lambda: Grows([]),
    "dict": lambda: Grows({}),
    "tensor": lambda: Grows(torch.zeros(1)),
    "name": Renames,
}


@pytest.mark.parametrize("kind", MODELS)
def test_what_a_forward_changes_in_layers_of_pytorch_belongs_to_the_training(kind):
    weights = []
    for evaluators in ([], [EvaluatorCB(updates=1)]):
        torch.manual_seed(0)
        callbacks = [BasicTrainCB(), *evaluators]
        trainer = Trainer(
            DataLoaders(BATCHES, BATCHES), F.cross_entropy, optim.SGD, MODELS[kind](), callbacks
        )
        trainer.fit(2, lr=0.1, valid=False)
        weights.append(trainer.model.lin.weight)
    assert torch.equal(*weights)


@pytest.mark.parametrize("kind", ["plain", "script", "shared", "empty place"])
def test_all_modules_are_in_the_mode_of_the_pass_and_back_again(kind):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    if kind == "script":
        inner = torch.jit.script(inner)
    model = nn.Sequential(inner, inner if kind == "shared" else nn.Identity(), nn.Linear(4, 2))
    if kind == "empty place":
        model[2].register_module("later", None)
    modes = []

    def before_predict(trainer):
        modes.append({m.training for m in trainer.model.modules()})

    fitted(model, before_predict)
    assert modes == [{True}, {False}, {False}] * 2
    assert {m.training for m in model.modules()} == {True}


# Modes


class Notes(nn.Linear):
    "Wants to know of each mode"

    def __init__(self):
        super().__init__(4, 2)
        self.told = []

    def train(self, mode=True):
        self.told.append(mode)
        return super().train(mode)


class Computes(nn.Linear):
    "Works its mode out"

    modes = ()

    @property
    def training(self):
        return bool(self.modes and self.modes[-1])

    @training.setter
    def training(self, mode):
        self.modes = (*self.modes, mode)


def test_a_module_with_a_train_of_its_own_is_called():
    model = nn.Sequential(Notes())
    set_mode(model, False)
    set_mode(model, True)
    assert model[0].told == [False, True]


def test_a_module_that_was_given_a_train_of_its_own_is_called():
    model, told = nn.Sequential(nn.Linear(4, 2), nn.ReLU()), []
    model[0].train = lambda mode=True: told.append(mode)
    set_mode(model, False)
    assert told == [False] and not model[1].training


class Counts(nn.Linear):
    "Has an `eval` of its own"

    n = 0

    def eval(self):
        self.n += 1
        return super().eval()


def test_a_model_with_an_eval_of_its_own_is_asked_as_by_hand():
    model = Counts(4, 2)
    Trainer(DataLoaders(BATCHES, BATCHES), F.cross_entropy, optim.SGD, model, [BasicTrainCB()]).fit(3, lr=0.1)
    assert model.n == 3


class Hides(nn.Sequential):
    "Keeps its parts away from PyTorch's `train`"

    def children(self):
        return iter(())


def test_a_module_whose_parts_are_hidden_is_asked_as_by_hand():
    model = nn.Sequential(Hides(nn.Dropout()))
    set_mode(model, False)
    assert not model[0].training and model[0][0].training


def test_a_module_that_works_its_mode_out_is_told():
    model = nn.Sequential(Computes(4, 2))
    set_mode(model, False)
    assert model[0].modes[-1] is False and model[0].training is False


def test_a_model_without_modes_is_left_alone():
    set_mode(lambda x: x, False)
    assert modules_of(lambda x: x) == []


@pytest.mark.parametrize("training", [True, False])
def test_modules_are_each_found_once_and_put_into_the_mode(training):
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Sequential(layer, nn.BatchNorm1d(2)), nn.ModuleDict({"a": layer}))
    found = modules_of(model)
    assert len(found) == len(set(found)) and set(found) == set(model.modules())
    set_mode(model, training)
    assert all(m.training is training for m in model.modules())


# Samplers


class ResizesCB:
    "Changes the samplers of both loaders while somebody evaluates"

    def __init__(self, dls):
        self.dls = dls

    def before_fit(self, trainer):
        for dl in (self.dls.train, self.dls.valid):
            dl.batch_sampler.batch_size = 1
            dl.batch_sampler.extra = 7
            dl.sampler.told = True


def test_samplers_are_as_they_were_after_an_evaluation():
    data = TensorDataset(X, Y)
    dls = DataLoaders(DataLoader(data, 4, shuffle=True), DataLoader(data, 6))
    fitted(nn.Linear(4, 2), dls=dls, inside=[ResizesCB(dls)])
    for dl, size in ((dls.train, 4), (dls.valid, 6)):
        assert dl.batch_sampler.batch_size == size
        assert not hasattr(dl.batch_sampler, "extra") and not hasattr(dl.sampler, "told")


def test_a_generator_of_a_sampler_inside_a_batch_sampler_is_put_back():
    g = torch.Generator().manual_seed(3)
    data = TensorDataset(X, Y)
    sampler = BatchSampler(RandomSampler(data, generator=g), 4, False)
    dls = DataLoaders(DataLoader(data, batch_sampler=sampler), BATCHES)
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(4, 2), [BasicTrainCB()])
    before = g.get_state()
    with Snapshot(trainer):
        list(dls.train)
        assert not torch.equal(g.get_state(), before)
    assert torch.equal(g.get_state(), before)


class Own(BatchSampler):
    "Of one's own, with a number"

    n = 0

    def __iter__(self):
        self.n += 1
        return super().__iter__()


def test_a_batch_sampler_of_ones_own_is_put_back_with_its_attributes():
    data = TensorDataset(X, Y)
    sampler = Own(RandomSampler(data), 4, False)
    sampler.list = [1]
    dls = DataLoaders(DataLoader(data, batch_sampler=sampler), BATCHES)
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(4, 2), [BasicTrainCB()])
    with Snapshot(trainer):
        list(dls.train)
        sampler.list.append(2)
        assert sampler.n == 1
    assert (sampler.n, sampler.list) == (0, [1])
