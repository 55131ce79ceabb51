"""Mistakes that a model shows before it runs, each beside what is like it and right.

Each planted one is found by the name of its rule; in the right ones nothing is found.
"""

import warnings
from functools import cache, partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop import Trainer
from isaac_loop.callbacks import BasicTrainCB, MetricsCB
from isaac_loop.data import DataLoaders
from isaac_loop.inspection import CheckFailed
from isaac_loop.recipes import digit_loaders

WRONG, RIGHT = [], []


def planted(name, batches=0):
    "A function that gives a trainer in which something is wrong, and how many batches show it"

    def mark(make):
        WRONG.append((make, name, batches))
        return make

    return mark


def right(make):
    "One that is like it and right"
    RIGHT.append(make)
    return make


@cache
def digits():
    "Rows of both splits, read from their pictures once"
    dls = digit_loaders()
    return dict(train=dls.train.dataset, test=dls.valid.dataset)


def trainer_with(model, *cbs, loss_func=F.cross_entropy, opt_func=optim.SGD):
    steps = [] if any(isinstance(o, BasicTrainCB) for o in cbs) else [BasicTrainCB()]
    dls = DataLoaders.from_dataset_dict(digits(), 16)
    return Trainer(dls, loss_func, opt_func, model, [*steps, *cbs])


def mlp(*layers):
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), *layers, nn.Linear(16, 10))


def findings_in(trainer, batches):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return trainer.check(batches=batches)
        except CheckFailed as error:
            return error.findings


# Units that are all the same


@planted("same_units")
def all_weights_are_one_number():
    def constant(m):
        if isinstance(m, nn.Linear):
            nn.init.constant_(m.weight, 0.01)
            nn.init.zeros_(m.bias)

    return trainer_with(mlp(nn.Linear(16, 16)).apply(constant))


@planted("same_units")
def all_parameters_are_filled():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    for p in model.parameters():
        p.data.fill_(0.1)
    return trainer_with(model)


@planted("same_units")
def one_row_for_all_and_a_single_unit_behind():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(64).expand(16, 64))
        model[3].weight.fill_(0.5)
    return trainer_with(model, loss_func=lambda preds, y: F.mse_loss(preds[:, 0], y.float()))


@right
def a_last_layer_of_zeros():
    model = mlp(nn.Linear(16, 16))
    nn.init.zeros_(model[-1].weight)
    return trainer_with(model)


@right
def one_layer_alone_that_is_constant():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.init.constant_(model[1].weight, 0.01)
    return trainer_with(model)


@right
def pairs_of_small_factors_begin_with_zeros():
    class LowRank(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.base = nn.Linear(n, n).requires_grad_(False)
            self.a, self.b = nn.Linear(n, 2, bias=False), nn.Linear(2, n, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    return trainer_with(mlp(LowRank(16)))


@right
def an_average_that_is_frozen():
    blur = nn.Conv2d(1, 2, 3, padding=1, bias=False).requires_grad_(False)
    blur.weight.fill_(1 / 9)
    return trainer_with(nn.Sequential(blur, nn.Flatten(), nn.Linear(128, 10), nn.LayerNorm([10])))


# One block for all places


@planted("shared_block")
def a_list_of_one_block():
    return trainer_with(mlp(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU())] * 3))


@planted("shared_block")
def one_block_in_a_module_list():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            block = nn.Linear(64, 64)
            self.blocks = nn.ModuleList([block for _ in range(3)])
            self.head = nn.Linear(64, 10)

        def forward(self, x):
            x = x.flatten(1)
            for block in self.blocks:
                x = block(x).relu()
            return self.head(x)

    return trainer_with(Deep())


@planted("shared_block")
def one_layer_named_twice():
    layer = nn.Linear(16, 16)
    return trainer_with(mlp(layer, nn.ReLU(), layer))


@right
def one_activation_for_all_places():
    act = nn.ReLU()
    return trainer_with(mlp(act, nn.Linear(16, 16), act))


@right
def weights_that_are_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
            self.b.weight = self.a.weight
            self.head = nn.Linear(64, 10)

        def forward(self, x):
            return self.head(self.b(self.a(x.flatten(1)).relu()).relu())

    return trainer_with(Tied())


# Settings that are another thing elsewhere


@planted("norm_momentum")
def the_momentum_of_keras():
    return trainer_with(mlp(nn.BatchNorm1d(16, momentum=0.99)))


@planted("norm_momentum")
def a_momentum_that_is_set_afterwards():
    model = mlp(nn.BatchNorm1d(16))
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.momentum = 0.9
    return trainer_with(model)


@right
def a_momentum_of_pytorch():
    return trainer_with(mlp(nn.BatchNorm1d(16, momentum=0.01), nn.BatchNorm1d(16, momentum=None)))


@planted("drops_most")
def a_keep_probability():
    return trainer_with(mlp(nn.Dropout(0.9)))


@planted("drops_most")
def a_keep_probability_in_a_function():
    class Net(nn.Module):
        def __init__(self, keep=0.85):
            super().__init__()
            self.a, self.b, self.keep = nn.Linear(64, 16), nn.Linear(16, 10), keep

        def forward(self, x):
            return self.b(F.dropout(self.a(x.flatten(1)), self.keep, self.training))

    return trainer_with(Net())


@right
def dropout_of_a_half():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(64, 16), nn.Linear(16, 10), nn.Dropout2d(0.5)

        def forward(self, x):
            return self.b(F.dropout(self.a(x.flatten(1)).relu(), p=0.5, training=self.training))

    return trainer_with(Net())


# One letter


@planted("misspelt")
def a_letter_of_requires_grad_is_missing():
    model = mlp()
    for p in model[1].parameters():
        p.require_grad = False
    return trainer_with(model)


@planted("misspelt")
def a_method_is_overwritten():
    model = mlp()
    for p in model[1].parameters():
        p.requires_grad_ = False
    return trainer_with(model)


@planted("misspelt")
def a_letter_is_missing_in_a_callback():
    class FreezeCB:
        def before_fit(self, trainer):
            for p in trainer.model[1].parameters():
                p.require_grad = False

    return trainer_with(mlp(), FreezeCB())


def freeze(module):
    for p in module.parameters():
        setattr(p, "require_grad", False)  # noqa: B010


@planted("misspelt")
def a_letter_is_missing_in_a_function_that_a_callback_calls():
    class FreezeCB:
        def before_fit(self, trainer):
            freeze(trainer.model[1])

    return trainer_with(mlp(), FreezeCB())


@planted("freezes_nothing")
def requires_grad_of_a_module():
    model = mlp()
    model[1].requires_grad = False
    return trainer_with(model)


@right
def a_module_that_remembers_that_it_is_frozen():
    model = mlp()
    model[1].requires_grad_(False)
    model[1].requires_grad = False
    for p in model[1].parameters():
        p.require_grad = False
        p.was_frozen = True
    return trainer_with(model)


# Short weights


@planted("short_weights")
def weights_in_bfloat16():
    class CastCB(BasicTrainCB):
        def predict(self, trainer):
            trainer.preds = trainer.model(trainer.batch[0].bfloat16()).float()

    return trainer_with(mlp().bfloat16(), CastCB(), opt_func=partial(optim.AdamW, weight_decay=0.1))


class HalfCB(BasicTrainCB):
    def before_fit(self, trainer):
        trainer.model.to(torch.bfloat16)

    def predict(self, trainer):
        trainer.preds = trainer.model(trainer.batch[0].bfloat16()).float()


@planted("short_weights", batches=1)
def weights_that_a_callback_casts():
    return trainer_with(mlp(), HalfCB(), opt_func=lambda params, lr: optim.SGD(params, lr=lr))


@right
def autocast():
    class AutocastCB(BasicTrainCB):
        def predict(self, trainer):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                trainer.preds = trainer.model(trainer.batch[0]).float()

    return trainer_with(mlp(), AutocastCB())


@right
def short_weights_that_are_frozen():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
            self.body.bfloat16().requires_grad_(False)

        def forward(self, x):
            return self.head(self.body(x.flatten(1).bfloat16()).float())

    return trainer_with(Net())


# Tensors that are no parameters


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.make()

    def make(self):
        self.scale = torch.ones([], requires_grad=True)

    def forward(self, x):
        return self.scale * self.layer(x.flatten(1))


@planted("no_parameter")
def a_tensor_in_the_model():
    return trainer_with(Scaled())


@planted("no_parameter")
def a_buffer_that_wants_a_gradient():
    class Buffered(Scaled):
        def make(self):
            self.register_buffer("scale", torch.ones([]).requires_grad_())

    return trainer_with(Buffered())


@planted("no_parameter")
def a_list_of_tensors():
    class Listed(Scaled):
        def make(self):
            self.scales = [torch.ones(10, requires_grad=True)]

        def forward(self, x):
            return self.scales[0] * self.layer(x.flatten(1))

    return trainer_with(Listed())


@planted("no_parameter")
def weights_of_a_loss_module():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_var = torch.zeros(1, requires_grad=True)

        def forward(self, preds, y):
            return (F.cross_entropy(preds, y) * torch.exp(-self.log_var) + self.log_var).sum()

    return trainer_with(mlp(), loss_func=Weighted())


@planted("no_parameter")
def weights_around_a_loss_function():
    log_var = torch.zeros(1, requires_grad=True)

    def loss_func(preds, y):
        return (F.cross_entropy(preds, y) * torch.exp(-log_var) + log_var).sum()

    return trainer_with(mlp(), loss_func=loss_func)


@right
def a_tensor_that_the_optimizer_is_given():
    model = Scaled()

    def opt_func(params, lr):
        return optim.SGD([*params, model.scale], lr)

    return trainer_with(model, opt_func=opt_func)


@right
def a_tensor_that_a_callback_gives_to_the_optimizer():
    class GiveCB:
        def before_fit(self, trainer):
            trainer.opt.add_param_group({"params": [trainer.model.scale]})

    return trainer_with(Scaled(), GiveCB())


@right
def points_at_which_a_derivative_is_taken():
    class Physics(nn.Module):
        def __init__(self):
            super().__init__()
            self.points = torch.linspace(0, 1, 64).requires_grad_()
            self.layer = nn.Linear(64, 10)

        def forward(self, x):
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(self.layer(self.points).sum(), self.points, create_graph=True)
            return self.layer(x.flatten(1) + slope)

    return trainer_with(Physics())


@right
def parameters():
    class Learnt(Scaled):
        def make(self):
            self.scale = nn.Parameter(torch.ones([]))
            self.register_buffer("mean", torch.zeros(3))

    return trainer_with(Learnt(), MetricsCB(show=False))


@pytest.mark.parametrize(("make", "name", "batches"), WRONG, ids=lambda o: getattr(o, "__name__", ""))
def test_a_planted_mistake_is_found(make, name, batches):
    found = findings_in(make(), batches)
    assert name in [o.name for o in found], found


@pytest.mark.parametrize("make", RIGHT, ids=lambda o: o.__name__)
def test_what_is_like_it_and_right_is_left_alone(make):
    assert list(findings_in(make(), 3)) == []


def test_what_surely_spoils_is_an_error_and_the_rest_a_warning():
    with pytest.raises(CheckFailed, match="same_units"):
        all_weights_are_one_number().check()
    with pytest.warns(match="shared_block"):
        a_list_of_one_block().check()
    assert a_list_of_one_block().check(ignore="shared_block") == []
