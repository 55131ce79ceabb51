"""Looking inside a model: `hooks.py`, `records.py`, the callbacks of chapter 8, and `model_summary.py`.

Statistics are checked against numpy or against a loop written by hand. That nothing is left behind is
checked after every kind of ending; that nothing is changed, by comparing weights and random states bit for
bit; that nobody waits for the device, by making it impossible.
"""

import copy
import gc
import math
import pickle
import random

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.inspection.activations import ActivationStats, ActivationStatsCB, HooksCallback
from isaac_loop.inspection.gradients import GradientStatsCB
from isaac_loop.inspection.first_nonfinite import NonFiniteCB
from isaac_loop.train.training import BasicTrainCB, OneBatchCB
from isaac_loop.inspection.update_ratios import UpdateRatioCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.evaluate.evaluator import EvaluatorCB
from isaac_loop.loop.trainer import Trainer
from isaac_loop.loop.events import (
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    Order,
)
import isaac_loop.inspection.loop_tables  # noqa: F401 (gives trainers `summarize_callbacks`)
from isaac_loop.models.hooks import Hook, Hooks, find_modules, first_tensor, probing
from isaac_loop.loop.numbers_on_device import DeviceRecord, histogram
from inspected import make_batches, make_model, make_trainer, n_hooks
from waiting import InsideCB, RefuseToWait, Waited


matplotlib.use("Agg")


def count(hook, module, inp, outp):
    hook.n = getattr(hook, "n", 0) + 1


# Hook


@pytest.mark.shows("ISA-70")
def test_a_hook_gets_what_pytorch_gives_and_lasts_as_long_as_its_block():
    model, x = make_model().eval(), torch.randn(3, 6)
    seen = []
    with Hook(model[0], lambda *args: seen.append(args)) as hook:
        outp = model[0](x)
    assert seen[0][0] is hook and seen[0][1] is model[0] and seen[0][2][0] is x and seen[0][3] is outp
    model(x)
    assert len(seen) == 1 and n_hooks(model) == 0
    hook.remove()


@pytest.mark.shows("ISA-70", "ISA-71")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("how", ["delete", "remove", "block", "error in the block"])
def test_a_hook_ends(how, backward):
    "`__exit__` of the original took no arguments"
    layer = nn.Linear(2, 2)
    hook = Hook(layer, count, backward)
    assert n_hooks(layer) == 1
    if how == "delete":
        del hook
    elif how == "remove":
        hook.remove()
    elif how == "block":
        with hook:
            pass
    else:
        with pytest.raises(ZeroDivisionError), hook:
            raise ZeroDivisionError
    assert n_hooks(layer) == 0


@pytest.mark.shows("ISA-70", "ISA-71", "MIN-15")
def test_hooks_are_a_list_that_ends_as_a_whole_and_in_parts():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    hooks = Hooks(model, count)
    assert isinstance(hooks, list) and len(hooks) == 5
    del hooks[0]
    del hooks[1:3]
    assert [len(o._forward_hooks) for o in model] == [0, 1, 0, 0, 1]
    with pytest.raises(ZeroDivisionError), hooks:
        raise ZeroDivisionError
    assert n_hooks(model) == 0
    hooks = Hooks({"a": model[0], "b": model[1]}, count)
    assert [o.name for o in hooks] == ["a", "b"]
    del hooks
    gc.collect()
    assert n_hooks(model) == 0


@pytest.mark.shows("ISA-70")
def test_backward_hooks_get_gradients():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    with Hook(layer, lambda hook, m, gi, go: vars(hook).update(gi=gi[0], go=go[0]), backward=True) as hook:
        layer(x).square().sum().backward()
    assert torch.equal(hook.gi, x.grad) and torch.allclose(hook.go, 2 * layer(x).detach())


def test_what_a_hook_returns_takes_the_place_of_the_output():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    with Hook(layer, lambda hook, m, inp, outp: outp * 0):
        assert torch.equal(layer(x), torch.zeros(4, 2))


def test_an_error_in_a_hook_names_the_layer():
    layer = nn.Linear(3, 2)
    with Hook(layer, lambda *args: 1 / 0, name="encoder.0"), pytest.raises(ZeroDivisionError) as caught:
        layer(torch.ones(1, 3))
    assert "raised by the hook on `encoder.0` (Linear)" in caught.value.__notes__


@pytest.mark.parametrize(
    "module, func", [("layer", count), (nn.Linear, count), (nn.Linear(1, 1), None), (nn.Linear(1, 1), 3)]
)
def test_a_hook_needs_a_module_and_a_function(module, func):
    with pytest.raises(TypeError, match="Pass a"):
        Hook(module, func)


def test_copies_of_a_hooked_model_are_silent_and_copies_of_a_hook_hold_what_was_gathered():
    model = make_model().eval()
    with Hook(model[0], count) as hook:
        model(torch.ones(2, 6))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(torch.ones(2, 6))
        assert hook.n == 1
        twin = copy.deepcopy(hook)
        assert twin.n == 1 and twin.module is model[0]
        del twin
        assert n_hooks(model) == 1, "the copy is on no module, so its end changes nothing"


# Which modules


@pytest.mark.parametrize(
    "module_filter, names",
    [
        (nn.Linear, ["0", "4"]),
        ((nn.ReLU, nn.Dropout), ["2", "3"]),
        (lambda o: isinstance(o, nn.BatchNorm1d), ["1"]),
        (None, ["Sequential", "0", "1", "2", "3", "4"]),
    ],
)
def test_modules_are_found_by_class_or_function(module_filter, names):
    assert list(find_modules(make_model(), module_filter)) == names


def test_wrong_filters_say_what_to_do():
    with pytest.raises(
        ValueError,
        match=r"accepts none of the 6 modules of `Sequential`.*`0` \(Linear\), `1` \(BatchNorm1d\)",
    ):
        find_modules(make_model(), nn.LSTM)
    with pytest.raises(TypeError, match="Use a class such as"):
        find_modules(make_model(), "Linear")
    with pytest.raises(TypeError, match="no modules to look into"):
        find_modules(lambda x: x, nn.Linear)


def test_the_first_tensor_is_found_in_any_structure():
    x, i = torch.ones(1), torch.ones(1, dtype=torch.long)
    assert first_tensor((i, {"a": None, "b": [x]})) is x
    assert first_tensor((i, 3, "text")) is None


# Records


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1025])
def test_records_lose_nothing_at_the_borders_of_their_stacks(n):
    record = DeviceRecord()
    for i in range(n):
        record.add(torch.tensor([i, -i], dtype=torch.bfloat16 if n < 200 else torch.float32), (0, 1, 1, i))
        if i == 600:
            record.read()
    assert (
        len(record) == n and record.read().tolist() == [[i, -i] for i in range(n)] == record.read().tolist()
    )
    assert record.places() == [dict(fit=0, epoch=1, training=True, batch=i) for i in range(n)]


@settings(max_examples=50, deadline=None)
@given(
    x=st.lists(
        st.floats(-12, 12, width=32) | st.sampled_from([0.0, 10.0, 0.25, math.nan, math.inf, -math.inf])
    )
)
def test_both_histograms_are_those_of_numpy(x):
    finite = np.array([o for o in x if math.isfinite(o)], dtype=np.float32)
    expected = np.histogram(finite, bins=40, range=(0, 10))[0].tolist()
    assert histogram(torch.tensor(x, dtype=torch.float32), 40, 0, 10).tolist() == expected
    torch.use_deterministic_algorithms(True)
    try:
        assert histogram(torch.tensor(x, dtype=torch.float32), 40, 0, 10).tolist() == expected
    finally:
        torch.use_deterministic_algorithms(False)


# HooksCallback


class RaiseCB:
    "Raises an exception at one event"

    def __init__(self, event, exception, order):
        self.order = order

        def handler(trainer):
            raise exception

        setattr(self, event, handler)


ENDINGS = [
    ("before_fit", ValueError),
    ("before_fit", CancelFitException),
    ("before_epoch", CancelEpochException),
    ("before_batch", CancelBatchException),
    ("after_predict", CancelFitException),
    ("after_predict", KeyboardInterrupt),
    ("after_get_loss", ValueError),
    ("before_step", CancelStepException),
    ("after_batch", CancelFitException),
    ("cleanup_epoch", ValueError),
    ("log", CancelFitException),
    ("after_fit", ValueError),
    ("cleanup_fit", ValueError),
]
HOOKED = {
    "HooksCallback": lambda: HooksCallback(count),
    "ActivationStatsCB": lambda: ActivationStatsCB(nn.ReLU),
    "NonFiniteCB": lambda: NonFiniteCB(),
}


@pytest.mark.shows("ISA-73")
@pytest.mark.parametrize("order", [Order.FIRST, Order.LAST])
@pytest.mark.parametrize("event, exception", ENDINGS)
@pytest.mark.parametrize("name", HOOKED)
def test_no_hook_is_left_after_any_ending(name, event, exception, order):
    "The original removed them in `after_fit`, which a cancelled fit skips"
    trainer = make_trainer([HOOKED[name](), RaiseCB(event, exception("on purpose"), order)])
    try:
        trainer.fit(2)
    except (ValueError, KeyboardInterrupt) as e:
        assert "on purpose" in str(e)
    assert n_hooks(trainer.model) == 0
    trainer.remove_callback("RaiseCB")
    trainer.fit(1)
    assert n_hooks(trainer.model) == 0 and trainer.n_updates == 4


@pytest.mark.shows("ISA-73")
def test_hooks_are_gone_after_one_batch():
    trainer = make_trainer([HooksCallback(count, nn.Linear), OneBatchCB()])
    trainer.fit(3)
    assert [o.n for o in trainer.HooksCallback] == [1, 1] and n_hooks(trainer.model) == 0


@pytest.mark.shows("ISA-72")
@pytest.mark.parametrize(
    "on_train, on_valid, n", [(True, False, 8), (False, True, 4), (True, True, 12), (False, False, None)]
)
def test_hooks_follow_the_kinds_of_pass_that_were_asked_for(on_train, on_valid, n):
    "4 training and 2 validation batches in each of 2 epochs"
    cb = HooksCallback(count, nn.Linear, on_train, on_valid)
    trainer = make_trainer([cb])
    trainer.fit(2)
    assert len(cb) == 2 and [getattr(o, "n", None) for o in cb] == [n, n]
    trainer.fit(1)
    assert [getattr(o, "n", None) for o in cb] == [n and n // 2] * 2, "the second fit starts from nothing"


@pytest.mark.shows("ISA-72")
def test_modules_can_be_given_and_keep_their_names():
    model = make_model()
    cb = HooksCallback(count, modules=[model[4], model[0]])
    make_trainer([cb], model).fit(1)
    assert {o.name: o.n for o in cb} == {"4": 4, "0": 4}


@pytest.mark.shows("ISA-72")
def test_a_filter_that_matches_nothing_fails_before_the_first_batch():
    class BatchesCB:
        n = 0

        def before_batch(self, trainer):
            self.n += 1

    for cb in (
        HooksCallback(count, nn.Conv2d),
        ActivationStatsCB(nn.Conv2d),
        GradientStatsCB(nn.Conv2d),
        UpdateRatioCB(nn.Conv2d),
        NonFiniteCB(module_filter=nn.Conv2d),
    ):
        trainer = make_trainer([BatchesCB(), cb])
        with pytest.raises(ValueError, match=r"accepts none of the 6 modules .* `0` \(Linear\)") as caught:
            trainer.fit(1)
        assert (
            trainer.BatchesCB.n == 0
            and f"raised by `{type(cb).__name__}.before_fit`" in caught.value.__notes__[0]
        )


@pytest.mark.shows("ISA-72")
def test_a_hookfunc_of_the_callback_cannot_change_the_output():
    weights = []
    for callbacks in ([], [HooksCallback(lambda hook, m, inp, outp: outp * 0)]):
        trainer = make_trainer(callbacks)
        trainer.fit(2)
        weights.append(list(trainer.model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    with pytest.raises(TypeError, match="`hookfunc` is None"):
        HooksCallback(None)


@pytest.mark.shows("ISA-72")
@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_that_are_never_called_are_told_of_once(compiled):
    "A module that does not run, and a model that was compiled and has run before"
    model = make_model()
    if compiled:
        model = torch.compile(model, backend="eager")
        make_trainer([], model).fit(1)
        chosen = nn.Linear
    else:
        model.spare, chosen = nn.Linear(6, 6), lambda o: getattr(o, "out_features", 0) == 6
        model.forward = lambda x: nn.Sequential.forward(model[:5], x)
    trainer = make_trainer([HooksCallback(count, chosen)], model)
    with pytest.warns(UserWarning, match="No hook of `HooksCallback` was called in a whole pass") as caught:
        trainer.fit(3)
    assert len(caught) == 1
    trainer.fit(1, train=False)


# Activations


@pytest.mark.shows("ISA-74", "F125")
def test_activation_statistics_are_those_of_numpy():
    seen = []
    cb = ActivationStatsCB(lambda o: isinstance(o, (nn.Linear, nn.ReLU)), on_valid=True)
    trainer = make_trainer(
        [
            cb,
            HooksCallback(
                lambda hook, m, inp, outp: seen.append(outp.detach().clone()), nn.ReLU, on_valid=True
            ),
        ]
    )
    trainer.fit(2, lr=0.1)
    stats = cb.stats["2"]
    assert list(cb.stats) == ["0", "2", "4"] and len(stats) == len(seen) == 12
    for i, x in enumerate(o.double().numpy() for o in seen):
        assert stats.mean[i] == pytest.approx(x.mean(), rel=1e-5)
        assert stats.std[i] == pytest.approx(x.std(ddof=1), rel=1e-5)
        assert stats.hist[i].tolist() == np.histogram(np.abs(x), 40, (0, 10))[0].tolist()
        assert stats.dead[i] == pytest.approx((np.abs(x) < 0.25).mean())
    assert [(o["epoch"], o["training"], o["batch"]) for o in stats.rows()] == [
        (e, t, b) for e in (0, 1) for t, n in ((True, 4), (False, 2)) for b in range(n)
    ]
    assert len(cb.rows()) == 36 and {type(o["mean"]) for o in cb.rows()} == {float}


@pytest.mark.shows("ISA-74")
def test_activations_of_unusual_layers():
    "Several outputs, half precision, a layer that runs twice, one number, NaN"

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.twice, self.low = nn.LSTM(6, 6), nn.Identity(), nn.Identity()

        def forward(self, x):
            x = self.twice(self.twice(self.lstm(x)[0]))
            return self.low(x.bfloat16()).float().mean(1, keepdim=True)

    cb = ActivationStatsCB()
    make_trainer([cb], Odd()).fit(1)
    assert {name: len(o) for name, o in cb.stats.items()} == {"lstm": 4, "twice": 8, "low": 4}
    assert all(math.isfinite(o) for s in cb.stats.values() for o in s.mean + s.std)
    stats = ActivationStats()
    stats.add(torch.tensor([3.0]), (0, 0, 1, 0))
    stats.add(torch.tensor([math.nan, 1.0]), (0, 0, 1, 1))
    assert stats.std[0] == 0 and stats.mean[0] == 3 and math.isnan(stats.mean[1]) and stats.hist[1].sum() == 1


def test_a_layer_without_floats_is_named():
    class Index(nn.Module):
        def forward(self, x):
            return x.argmax(1)

    class Model(nn.Sequential):
        def forward(self, x):
            return self[0](x) + 0 * self[1](x)[:, None]

    model = Model(nn.Linear(6, 1), Index())
    with pytest.raises(TypeError, match="`1` gives a tensor of torch.int64, which has no mean. Leave"):
        make_trainer([ActivationStatsCB()], model).fit(1)
    make_trainer([ActivationStatsCB(nn.Linear)], model).fit(1)


@pytest.mark.shows("ISA-75", "F125")
def test_activation_plots_draw_what_was_recorded():
    cb = ActivationStatsCB(nn.Linear)
    for draw in (cb.plot_stats, cb.color_dim, cb.dead_chart):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw()
    make_trainer([cb]).fit(2)
    mean, std = cb.plot_stats()
    assert [list(o.get_ydata()) for o in mean.lines] == [o.mean for o in cb.stats.values()]
    assert [list(o.get_ydata()) for o in std.lines] == [o.std for o in cb.stats.values()]
    images = cb.color_dim()
    assert np.allclose(images[0].images[0].get_array(), np.log1p(cb.stats["0"].hist.numpy().T)) and images[
        0
    ].images[0].get_array().shape == (40, 8)
    charts = cb.dead_chart()
    assert [list(o.lines[0].get_ydata()) for o in charts] == [o.dead for o in cb.stats.values()]
    for ax in (mean, std, *images, *charts):
        assert ax.get_xlabel() and ax.get_ylabel()
    matplotlib.pyplot.close("all")


# Watchers change nothing, and wait for nothing

WATCHERS = {
    "hooks": lambda: HooksCallback(count, on_valid=True),
    "activations": lambda: ActivationStatsCB(on_valid=True),
    "gradients": lambda: GradientStatsCB(),
    "update ratios": lambda: UpdateRatioCB(),
    "not finite": lambda: NonFiniteCB(),
    "not finite, at once": lambda: NonFiniteCB(1),
}


@pytest.mark.shows("F125", "F126")
@settings(max_examples=20, deadline=None)
@given(
    names=st.sets(st.sampled_from(sorted(set(WATCHERS) - {"not finite, at once"}))),
    opt=st.sampled_from([optim.SGD, optim.Adam]),
)
def test_any_bundle_of_those_who_look_inside_changes_nothing(names, opt):
    "Weights, buffers, optimizer and random states are the same bit for bit"
    ends = []
    for callbacks in ([], [WATCHERS[o]() for o in sorted(names)]):
        trainer = make_trainer(callbacks, opt_func=opt)
        trainer.fit(2, lr=0.05)
        ends.append((trainer.model.state_dict(), trainer.opt.state_dict()["state"], torch.get_rng_state()))
    (a, opt_a, rng_a), (b, opt_b, rng_b) = ends
    assert all(torch.equal(a[k], b[k]) for k in a) and a.keys() == b.keys()
    assert all(
        torch.equal(torch.as_tensor(opt_a[i][k]), torch.as_tensor(opt_b[i][k]))
        for i in opt_a
        for k in opt_a[i]
        if opt_a[i][k] is not None
    )
    assert torch.equal(rng_a, rng_b)


@pytest.mark.shows("F125", "F126")
@pytest.mark.parametrize("name", WATCHERS)
def test_those_who_look_inside_do_not_wait_for_the_device(name):
    "520 batches, more than are kept unstacked; only a flag that is read at once does wait, as it says"
    mode = RefuseToWait()
    trainer = make_trainer(
        [WATCHERS[name](), InsideCB(mode)], batches=make_batches(5 if "finite" in name else 520)
    )
    with mode:
        if name == "not finite, at once":
            with pytest.raises(Waited, match="waited in"):
                trainer.fit(1)
        else:
            trainer.fit(1)
            assert trainer.n_updates == len(trainer.dls.train)


# Only looking


@pytest.mark.parametrize("training", [True, False, None])
@pytest.mark.parametrize("error", [True, False])
def test_probing_puts_everything_back(training, error):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout()
            self.register_buffer("n", torch.zeros(()))
            self.register_buffer("none", None)

        def forward(self, x):
            self.n = self.n + 1
            self.register_buffer("new", torch.ones(1))
            random.random(), np.random.rand(), torch.rand(1)
            return self.drop(self.norm(x))

    model = Noisy().train()
    model.drop.eval()
    n, before = model.n, copy.deepcopy(model.state_dict())
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    try:
        with probing(model, training):
            assert not model(torch.randn(4, 3, requires_grad=True)).requires_grad
            assert (model.training, model.drop.training) == (
                (True, False) if training is None else (training, training)
            )
            if error:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert error
    assert (
        model.n is n
        and "new" not in model._buffers
        and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    )
    assert model.training and model.norm.training and not model.drop.training and torch.is_grad_enabled()
    assert (
        random.getstate() == states[0]
        and np.random.get_state()[1].tolist() == states[1]
        and torch.equal(torch.get_rng_state(), states[2])
    )


@pytest.mark.parametrize("training", [True, False, None])
def test_probing_leaves_attributes_that_a_forward_sets_unless_it_builds_layers(training):
    class Carry(nn.Module):
        h, n = None, 0

        def forward(self, x):
            self.h, self.n = x, self.n + 1
            return x

    class Built(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.size = None, None

        def forward(self, x):
            if self.layer is None:
                self.layer, self.size = nn.Linear(3, 2), 2
            return self.layer(x)

    carry, built = Carry(), Built()
    carry.n = 4
    model = nn.Sequential(carry, built, nn.LazyLinear(2))
    with probing(model, training):
        model(torch.randn(4, 3))
    assert carry.n == 4 and carry.h is None and "h" not in vars(carry)
    assert built.layer.out_features == built.size == 2 and model[2].in_features == 2
    assert model(torch.randn(4, 3)).shape == (4, 2)


def test_pictures_of_many_layers_are_no_taller_than_a_page():
    "Forty-three layers coloured by depth; of two hundred an even choice, and the figure says so"
    layers = [m for _ in range(60) for m in (nn.Linear(4, 4), nn.ReLU())]
    model = nn.Sequential(*layers)
    cbs = [ActivationStatsCB(nn.ReLU), GradientStatsCB(nn.Linear)]
    batches = [(torch.randn(2, 4), torch.randn(2, 4))] * 2
    trainer = make_trainer(cbs, model=model, batches=batches)
    trainer.fit(1, valid=False)
    mean, std = cbs[0].plot_stats()
    assert len(mean.lines) == 60 and mean.get_legend() is None and len(mean.figure.axes) == 4
    for draw in (cbs[0].color_dim, cbs[0].dead_chart, cbs[1].plot_distributions):
        figure = draw()[0].figure
        assert len(draw()) == 48 and figure.get_figheight() <= 11
        assert "48 of" in figure.get_suptitle()
    assert len(cbs[0].dead_chart(max_n=5)) == 5


def test_what_an_evaluation_in_between_computes_is_no_fault_of_the_training():
    torch.manual_seed(0)
    rows = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(6)]
    bad = [(torch.full((4, 3), math.nan), torch.randn(4, 1))]
    said = []
    callbacks = [BasicTrainCB(), NonFiniteCB(report=said.append), EvaluatorCB(dict(hard=bad), updates=2)]
    trainer = Trainer(DataLoaders([*rows, *bad]), F.mse_loss, optim.SGD, nn.Linear(3, 1), callbacks)
    trainer.fit(1, valid=False)
    found = trainer.NonFiniteCB.found
    assert len(said) == 1 and (found["what"], found["batch"]) == ("batch", 6)
