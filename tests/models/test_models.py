"""The networks of `models.py`, their first weights, and `lsuv.py`.

Initialisations are checked by what they promise: the spread of the weights, or mean and standard deviation
of what a layer then really gives, measured here by a plain forward pass.
"""

import copy
import sys
from functools import partial
from types import SimpleNamespace

import matplotlib
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from isaac_loop.models.lsuv import lsuv_init
from isaac_loop.models.small_models import (
    GeneralRelu,
    conv,
    get_model_conv,
    get_model_fc,
    get_model_timm,
    init_weights,
    plot_func,
)

matplotlib.use("Agg")


@pytest.mark.shows("MIN-13")
@given(
    leak=st.none() | st.floats(0, 0.9), sub=st.none() | st.floats(-1, 1), maxv=st.none() | st.floats(0.1, 3)
)
def test_general_relu_is_its_formula(leak, sub, maxv):
    for x in (-3.0, -0.5, 0.0, 0.5, 3.0):
        y = max(x, 0) + (leak or 0) * min(x, 0) - (sub or 0)
        assert GeneralRelu(leak, sub, maxv)(torch.tensor(x)).item() == pytest.approx(
            y if maxv is None else min(y, maxv), abs=1e-5
        )


@pytest.mark.shows("MIN-13")
def test_plot_func_draws_the_function():
    ax = plot_func(torch.tanh, -1, 1, 21)
    x, y = ax.lines[0].get_data()
    assert (
        len(x) == 21 and (x[0], x[-1]) == (-1, 1) and torch.allclose(torch.tensor(y), torch.tensor(x).tanh())
    )
    assert ax.get_xlabel() == "x" and ax.get_ylabel() == "tanh(x)"
    assert plot_func(nn.PReLU()).get_ylabel() == "PReLU(x)"
    matplotlib.pyplot.close("all")


@pytest.mark.shows("MIN-13")
@pytest.mark.parametrize(
    "layer, fan_in",
    [
        (nn.Conv1d(64, 64, 5), 320),
        (nn.Conv2d(32, 64, 3), 288),
        (nn.Conv3d(8, 64, 3), 216),
        (nn.Linear(300, 200), 300),
    ],
)
@pytest.mark.parametrize("leaky", [0.0, 0.2])
def test_weights_have_the_spread_of_he(layer, fan_in, leaky):
    bias = layer.bias.clone()
    layer.apply(partial(init_weights, leaky=leaky))
    assert layer.weight.std().item() == pytest.approx((2 / (1 + leaky**2) / fan_in) ** 0.5, rel=0.05)
    assert torch.equal(layer.bias, bias)


@pytest.mark.shows("MIN-13")
def test_other_layers_keep_their_weights():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Embedding(4, 4), nn.LSTM(3, 3), nn.PReLU())
    before = copy.deepcopy(model.state_dict())
    model.apply(init_weights)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.shows("ISA-102")
@pytest.mark.parametrize("ks", [1, 3, 5])
@pytest.mark.parametrize("stride, size", [(1, 8), (2, 4)])
def test_conv_keeps_or_halves_the_image(ks, stride, size):
    assert conv(3, 5, ks, stride)(torch.zeros(2, 3, 8, 8)).shape == (2, 5, size, size)


@pytest.mark.shows("ISA-102")
def test_conv_has_a_bias_unless_a_normalisation_brings_one():
    kinds = lambda block: [type(o) for o in block]
    assert kinds(conv(1, 2)) == [nn.Conv2d, nn.ReLU] and conv(1, 2)[0].bias is not None
    assert (
        kinds(conv(1, 2, norm=nn.BatchNorm2d)) == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
        and conv(1, 2, norm=nn.BatchNorm2d)[0].bias is None
    )
    assert kinds(conv(1, 2, act=None)) == [nn.Conv2d] and conv(1, 2, bias=False)[0].bias is None
    assert conv(1, 2, norm=nn.BatchNorm2d, bias=True)[0].bias is not None


@pytest.mark.shows("ISA-102")
@settings(max_examples=15, deadline=None)
@given(
    nfs=st.lists(st.integers(1, 6), min_size=2, max_size=5), size=st.integers(1, 12), n_out=st.integers(1, 4)
)
def test_stacks_have_the_widths_asked_for(nfs, size, n_out):
    model = get_model_conv(nn.Tanh, nfs, nn.BatchNorm2d, n_out)
    assert model(torch.zeros(2, nfs[0], size, size)).shape == (2, n_out)
    assert [o.out_channels for o in model.modules() if isinstance(o, nn.Conv2d)] == nfs[1:]
    fc = get_model_fc(nfs=nfs, act=nn.Tanh, norm=nn.BatchNorm1d)
    assert fc(torch.zeros(2, nfs[0])).shape == (2, nfs[-1])
    assert [o.out_features for o in fc if isinstance(o, nn.Linear)] == nfs[1:]
    assert isinstance(fc[-1], nn.Linear) and sum(isinstance(o, nn.Tanh) for o in fc) == len(nfs) - 2


@pytest.mark.shows("ISA-102")
def test_three_numbers_make_two_layers():
    "By place, by name, or as they come; the three and a list would contradict each other"
    for model in (get_model_fc(12, 7, 3), get_model_fc(n_inp=12, n_hidden=7, n_out=3)):
        assert [o.weight.shape for o in model if isinstance(o, nn.Linear)] == [(7, 12), (3, 7)]
        assert model(torch.zeros(5, 3, 2, 2)).shape == (5, 3)
    assert str(get_model_fc()) == str(get_model_fc(nfs=(64, 50, 10)))
    with pytest.raises(ValueError, match="either the three or `nfs`"):
        get_model_fc(784, nfs=(64, 10))
    with pytest.raises(ValueError, match="`n_hidden` is 0"):
        get_model_fc(12, 0, 3)
    with pytest.raises(ValueError, match="`n_inp` is <class .*Tanh"):
        get_model_fc(nn.Tanh, (64, 50, 10))


@pytest.mark.shows("ISA-102")
@pytest.mark.parametrize("nfs", [(), (3,), (3, 0), (3, 2.5), (True, 2)])
def test_widths_that_make_no_layer_are_refused(nfs):
    for make in (get_model_conv, get_model_fc):
        with pytest.raises(ValueError, match="whole number"):
            make(nfs=nfs)


@pytest.mark.shows("ISA-102")
def test_timm_is_asked_for_by_name_and_its_absence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match="pip install timm"):
        get_model_timm("resnet18")
    monkeypatch.setitem(
        sys.modules, "timm", SimpleNamespace(create_model=lambda name, **kwargs: (name, kwargs))
    )
    assert get_model_timm("resnet18", in_chans=1, num_classes=10) == (
        "resnet18",
        dict(in_chans=1, num_classes=10),
    )


# LSUV


def spread(x):
    return x.mean().item(), x.std().item()


@pytest.mark.shows("ISA-103")
@settings(max_examples=25, deadline=None)
@given(mean=st.floats(-2, 2), std=st.floats(0.1, 3), seed=st.integers(0, 20))
def test_mean_and_spread_each_reach_their_own_target(mean, std, seed):
    "The original stopped when the spread was near the target of the mean"
    torch.manual_seed(seed)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16)), torch.randn(64, 8)
    stats = lsuv_init(model, model[2], x, targ_mean=mean, target_std=std)
    with torch.no_grad():
        got = spread(model(x))
    assert got == pytest.approx((mean, std), abs=2e-3) and got == pytest.approx(
        (stats["mean"], stats["std"]), abs=1e-5
    )


@pytest.mark.shows("ISA-103", "MIN-13")
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 50))
def test_a_deep_net_is_measured_after_its_activations(seed):
    "With a leaky, shifted ReLU the mean of the activations can be zero"
    torch.manual_seed(seed)
    model = get_model_conv(partial(GeneralRelu, leak=0.1, sub=0.4), (1, 8, 16, 16))
    x = torch.randn(64, 1, 8, 8)
    for block in model[:3]:
        lsuv_init(model, block[0], x, block[1])
    for i in range(3):
        with torch.no_grad():
            assert spread(model[: i + 1](x)) == pytest.approx((0, 1), abs=2e-3)


@pytest.mark.shows("ISA-103")
def test_only_the_layer_is_changed():
    "Not batch norm's running statistics, nor random states, nor modes"
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)).train()
    x = torch.randn(32, 4)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    lsuv_init(model, model[0], x)
    after = model.state_dict()
    assert {k for k in after if not torch.equal(after[k], before[k])} == {"0.weight", "0.bias"}
    assert all(o.training for o in model.modules()) and all(
        p.grad is None and p.requires_grad for p in model.parameters()
    )
    assert not any(len(o._forward_hooks) for o in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.shows("ISA-103")
def test_a_state_that_the_model_keeps_is_not_moved_by_measuring():
    class Carry(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.h = nn.Linear(8, 8), 0.0

        def forward(self, x):
            self.h = (self.layer(x) + self.h).detach()
            return self.h

    model = Carry()
    lsuv_init(model, model.layer, torch.randn(64, 8), model)
    assert model.h == 0.0


@pytest.mark.shows("ISA-103")
def test_a_layer_without_bias_keeps_its_mean():
    model = nn.Linear(8, 64, bias=False)
    stats = lsuv_init(model, model, torch.randn(64, 8) + 3, target_std=2)
    assert stats["std"] == pytest.approx(2, abs=1e-3) and stats["loops"] == 1


@pytest.mark.shows("ISA-103")
def test_targets_out_of_reach_are_warned_of_with_what_was_reached():
    "After a plain ReLU no mean is zero"
    model, x = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), torch.randn(64, 8)
    with pytest.warns(
        UserWarning, match=r"After 5 corrections the mean is [0-9.]+ \(wanted: 0\).*measure before it"
    ):
        stats = lsuv_init(model, model[0], x, model[1], max_loops=5)
    assert stats["loops"] == 5


def test_several_inputs_are_a_tuple():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, a, b):
            return self.layer(a + b)

    model = Two()
    stats = lsuv_init(model, model.layer, (torch.randn(32, 4), torch.randn(32, 4)))
    assert (stats["mean"], stats["std"]) == pytest.approx((0, 1), abs=1e-3)


@pytest.mark.shows("ISA-103")
def test_a_loop_over_all_modules_skips_those_without_weights():
    "Containers, activations, pooling; what was skipped is told, and nothing of it has changed"
    torch.manual_seed(0)
    stack = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    model, x = nn.Sequential(*stack, nn.Flatten(), nn.Linear(16, 3)), torch.randn(32, 1, 8, 8)
    told = {type(o).__name__: lsuv_init(model, o, x) for o in model.modules()}
    skipped = [name for name, stats in told.items() if stats == dict(skipped=name)]
    assert skipped == ["Sequential", "BatchNorm2d", "ReLU", "AdaptiveAvgPool2d", "Flatten"]
    for name in ("Conv2d", "Linear"):
        assert (told[name]["mean"], told[name]["std"]) == pytest.approx((0, 1), abs=1e-3)
    bare = nn.Sequential(nn.ReLU(), nn.Flatten())
    with pytest.raises(ValueError, match="all are skipped: `Sequential`, `ReLU`, `Flatten`"):
        lsuv_init(bare, bare[0], x)


@pytest.mark.shows("ISA-103")
def test_what_no_scaling_can_mend_is_an_error():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(8, 4)
    with pytest.raises(TypeError, match="`trainable_module` is a `ReLU`, which has no `weight`"):
        lsuv_init(model, model[1], x, model[0])
    with pytest.raises(ValueError, match="never reached `Linear`"):
        lsuv_init(model, nn.Linear(4, 4), x)
    with pytest.raises(ValueError, match="`target_std` is 0"):
        lsuv_init(model, model[0], x, target_std=0)
    with pytest.raises(ValueError, match="is nan, and no scaling"):
        lsuv_init(model, model[0], x * float("nan"))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    with pytest.raises(ValueError, match="is 0, and no scaling"):
        lsuv_init(model, model[0], x)
    assert torch.equal(F.relu(x), model[1](x))
