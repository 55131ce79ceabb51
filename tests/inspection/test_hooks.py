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
import re

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from isaac_loop.inspection.activations import ActivationStats, ActivationStatsCB, HooksCallback
from isaac_loop.inspection.gradients import GradientPlotCB, GradientStats, GradientStatsCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.inspection.first_nonfinite import NonFiniteCB
from isaac_loop.train.training import BasicTrainCB, NBatchCB, OneBatchCB
from isaac_loop.inspection.update_ratios import UpdateRatioCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import (
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    Order,
)
import isaac_loop.inspection.loop_tables  # noqa: F401 (gives trainers `summarize_callbacks`)
from isaac_loop.models.hooks import Hook, Hooks, find_modules, first_tensor, probing
from isaac_loop.inspection.model_summary import summarize_model
from isaac_loop.loop.device_numbers import DeviceRecord, histogram
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer

matplotlib.use("Agg")


def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


def make_batches(n=4, rows=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(rows, 6, generator=g), torch.randn(rows, 1, generator=g)) for _ in range(n)]


def make_trainer(callbacks, model=None, batches=None, opt_func=optim.SGD, loss_func=F.mse_loss):
    set_seed(0)
    batches = make_batches() if batches is None else batches
    return Trainer(
        DataLoaders(batches, batches[:2]),
        loss_func,
        opt_func,
        make_model() if model is None else model,
        [BasicTrainCB(), *callbacks],
    )


def n_hooks(model):
    return sum(
        len(o._forward_hooks) + len(o._forward_pre_hooks) + len(o._backward_hooks) for o in model.modules()
    )


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
    assert {name: len(o) for name, o in cb.stats.items()} == {"Odd": 4, "lstm": 4, "twice": 8, "low": 4}
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


# Gradients


def gradients_by_hand(opt_func, n_epochs, lr, clip=None):
    "Gradients, and weights before and after each step, of a plain loop"
    set_seed(0)
    model = make_model()
    opt = opt_func(model.parameters(), lr)
    for _ in range(n_epochs):
        model.train()
        for x, y in make_batches():
            F.mse_loss(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            grads, before = (
                {k: f(p).clone() for k, p in model.named_parameters()}
                for f in (lambda p: p.grad, lambda p: p.detach())
            )
            opt.step()
            yield grads, before, {k: p.detach().clone() for k, p in model.named_parameters()}
            opt.zero_grad()


@pytest.mark.shows("SON-10", "AIT-54", "F126")
@pytest.mark.parametrize("opt_func", [optim.SGD, optim.Adam])
def test_gradient_statistics_are_those_of_the_loop_by_hand(opt_func):
    "Norm per parameter and batch, and its mean per epoch"
    trainer = make_trainer([GradientStatsCB()], opt_func=opt_func)
    trainer.fit(2, lr=0.05)
    cb, totals = trainer.GradientStatsCB, []
    counted = {name: [0, 0] for name in cb.stats}
    for i, (grads, _, _) in enumerate(gradients_by_hand(opt_func, 2, 0.05)):
        totals.append(math.sqrt(sum(g.double().square().sum() for g in grads.values())))
        for name, g in grads.items():
            stats, g = cb.stats[name], g.double().numpy()
            assert stats.norm[i] == pytest.approx(np.sqrt(np.square(g).sum()), rel=1e-5, abs=1e-10)
            assert stats.mean[i] == pytest.approx(g.mean(), rel=1e-4, abs=1e-7)
            assert stats.std[i] == pytest.approx(g.std(ddof=1) if g.size > 1 else 0, rel=1e-4, abs=1e-10)
            assert stats.zeros[i] == pytest.approx((g == 0).mean())
            counted[name][i // 4] += ((np.abs(g) >= 1e-12) & (g != 0)).sum()
    assert {name: o.hist.sum(1).tolist() for name, o in cb.stats.items()} == counted, (
        "one histogram for each epoch"
    )
    assert trainer.history.batches["grad_norm"] == pytest.approx(totals, rel=1e-5)
    assert trainer.history["grad_norm"] == pytest.approx([np.mean(totals[:4]), np.mean(totals[4:])], rel=1e-5)
    table = {o["parameter"]: o for o in cb.table(epoch=0).rows}
    assert table["0.weight"]["norm"] == pytest.approx(np.mean(cb.stats["0.weight"].norm[:4]))
    assert len(cb.rows()) == 8 * len(cb.stats)


def test_every_says_how_seldom_we_look():
    trainer = make_trainer([GradientStatsCB(every=3), ActivationStatsCB(nn.ReLU, every=3)])
    trainer.fit(2)
    assert [(o["epoch"], o["batch"]) for o in trainer.GradientStatsCB.stats["0.weight"].rows()] == [
        (0, 0),
        (0, 3),
        (1, 2),
    ]
    assert [(o["epoch"], o["batch"]) for o in trainer.ActivationStatsCB.stats["2"].rows()] == [
        (0, 0),
        (0, 3),
        (1, 0),
        (1, 3),
    ]


def test_what_is_kept_of_a_long_run_is_on_the_cpu_and_no_more_than_its_numbers():
    "Four numbers for each parameter and update, in a handful of blocks; a histogram for each epoch"
    trainer = make_trainer([GradientStatsCB()], batches=make_batches(520))
    trainer.fit(1)
    for o in trainer.GradientStatsCB.stats.values():
        record = o.record
        assert (
            len(record) == 520
            and len(record._new) <= record.block
            and len(record._here) <= 10
            and not record._sent
        )
        assert sum(o.untyped_storage().nbytes() for o in record._here) <= 4 * 4 * 520 and [
            len(c) for c in o.counts.values()
        ] == [32]


@pytest.mark.shows("F126")
def test_gradients_are_seen_as_the_step_gets_them():
    "After clipping, and only at real updates"

    class ClipCB:
        def before_step(self, trainer):
            nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1)

    class EverySecondCB:
        order = Order.FIRST

        def before_step(self, trainer):
            if trainer.batch_num % 2 == 0:
                raise CancelStepException("wait")

        before_zero_grad = before_step

    trainer = make_trainer([GradientStatsCB(), UpdateRatioCB(), ClipCB()])
    trainer.fit(1, lr=0.05)
    assert max(trainer.history.batches["grad_norm"]) < 0.101
    assert trainer.GradientStatsCB.stats["4.weight"].norm == pytest.approx(
        [g["4.weight"].norm().item() for g, _, _ in gradients_by_hand(optim.SGD, 1, 0.05, 0.1)], rel=1e-4
    )
    trainer.add_callback(EverySecondCB())
    trainer.fit(1)
    assert [o["batch"] for o in trainer.GradientStatsCB.stats["0.weight"].rows()] == [1, 3] and len(
        trainer.UpdateRatioCB.ratios["0.weight"]
    ) == 2
    assert trainer.n_updates == 2


@pytest.mark.shows("AIT-55")
def test_parameters_without_a_gradient_are_named_and_no_error():
    "Frozen ones, and those that the batch did not use"
    model = make_model()
    model.spare = nn.Linear(3, 3)
    model.forward = lambda x: nn.Sequential.forward(model[:5], x)
    model[0].weight.requires_grad_(False)
    cb = GradientStatsCB()
    trainer = make_trainer([cb, MetricsCB()], model)
    trainer.fit(1)
    assert cb.without_grad == ["0.weight", "spare.weight", "spare.bias"]
    assert {o["parameter"] for o in cb.table().rows if "norm" not in o} == set(cb.without_grad)
    assert len(cb.plot_distributions()) == 5
    assert set(trainer.history[-1]) >= {"grad_norm", "train_loss", "valid_loss"}
    matplotlib.pyplot.close("all")


def test_sparse_gradients_and_fits_that_do_not_train():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(10, 1, sparse=True)

        def forward(self, x):
            return self.bag(x)

    batches = [(torch.tensor([[1, 2], [2, 3]]), torch.ones(2, 1))]
    trainer = make_trainer([GradientStatsCB()], Bag(), batches)
    trainer.fit(1, train=False)
    assert trainer.GradientStatsCB.without_grad == ["bag.weight"] and len(trainer.history) == 0
    trainer.fit(1)
    x, y = batches[0]
    w = torch.zeros(10, 1, requires_grad=True)
    set_seed(0)
    w.data = Bag().bag.weight.data
    F.mse_loss(F.embedding_bag(x, w), y).backward()
    assert trainer.GradientStatsCB.stats["bag.weight"].norm == pytest.approx([w.grad.norm().item()], rel=1e-5)


@pytest.mark.shows("AIT-54")
def test_the_report_is_printed_once_an_epoch(capsys):
    "Mean, standard deviation and share of zeros of each layer"
    make_trainer([GradientStatsCB(nn.Linear, show=True)]).fit(2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 5 and lines[0].split() == lines[5].split() == [
        "parameter",
        "epoch",
        "norm",
        "mean",
        "std",
        "zeros",
    ]
    assert lines[6].split()[:2] == ["0.weight", "1"]


@pytest.mark.shows("AIT-55")
@pytest.mark.parametrize("format", ["png", "pdf"])
def test_pictures_of_the_distributions_are_saved_each_epoch(tmp_path, format):
    trainer = make_trainer([GradientPlotCB(tmp_path / "deep" / "folder", format, nn.Linear)])
    trainer.fit(2)
    trainer.fit(1)
    files = sorted((tmp_path / "deep" / "folder").iterdir())
    assert [o.name for o in files] == [
        f"gradients-fit{f}-epoch00{e}.{format}" for f, e in ((0, 0), (0, 1), (1, 0))
    ]
    assert all(o.read_bytes().startswith(b"\x89PNG" if format == "png" else b"%PDF") for o in files)
    assert not matplotlib.pyplot.get_fignums(), "no figure stays open"


@pytest.mark.shows("AIT-55", "F126")
def test_distributions_are_those_of_the_epoch_asked_for():
    cb = GradientStatsCB(nn.Linear)
    for draw in (cb.plot_norms, cb.plot_distributions):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw()
    make_trainer([cb]).fit(2)
    for epoch, row in ((0, 0), (1, 1), (None, 1)):
        for ax, o in zip(cb.plot_distributions(epoch), cb.stats.values(), strict=True):
            assert ax.patches[0].get_data().values.tolist() == o.hist[row].tolist()
            assert ax.get_xlabel() and ax.get_ylabel()
    assert [list(o.get_ydata()) for o in cb.plot_norms().lines] == [o.norm for o in cb.stats.values()]
    matplotlib.pyplot.close("all")


def test_wrong_settings_of_the_gradient_callbacks():
    with pytest.raises(
        ValueError, match="`format` is 'word', which matplotlib cannot write. Use one of .*'pdf'"
    ):
        GradientPlotCB("x", "word")
    with pytest.raises(ValueError, match="have no parameters of their own"):
        make_trainer([GradientStatsCB(nn.ReLU)]).fit(1)
    for every in (0, -1, True, 1.5):
        for cb in (UpdateRatioCB, GradientStatsCB, ActivationStatsCB):
            with pytest.raises(ValueError, match="`every` is"):
                cb(every=every)
        with pytest.raises(ValueError, match="`every` is"):
            NonFiniteCB(every=every)


@pytest.mark.shows("F126")
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("opt_func", [optim.SGD, optim.Adam])
def test_update_ratios_are_those_of_the_loop_by_hand(opt_func, every):
    trainer = make_trainer([UpdateRatioCB(every=every)], opt_func=opt_func)
    trainer.fit(2, lr=0.05)
    steps = list(gradients_by_hand(opt_func, 2, 0.05))[::every]
    for name, ratios in trainer.UpdateRatioCB.ratios.items():
        expected = [
            ((after[name] - before[name]).norm() / before[name].norm()).item()
            if before[name].any()
            else math.nan
            for _, before, after in steps
        ]
        assert ratios == pytest.approx(expected, rel=1e-4, nan_ok=True)
    assert math.isnan(trainer.UpdateRatioCB.ratios["1.bias"][0]), "batch norm's shift begins at zero"
    assert trainer.UpdateRatioCB.plot().get_ylabel() and not trainer.UpdateRatioCB._before
    matplotlib.pyplot.close("all")


# The first bad layer


class Bad(nn.Module):
    "Gives a NaN, or an infinite gradient, in its nth run while training"

    def __init__(self, n, backward=False):
        super().__init__()
        self.n, self.backward, self.runs, self.w = n, backward, 0, nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.runs += self.training
        if not self.training or self.runs != self.n + 1:
            return x * self.w
        return x + (self.w - self.w.detach()).abs().sqrt() if self.backward else x * self.w + math.nan


EVERY = [1, 2, 3, 100]


@pytest.mark.shows("F104")
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("n", [0, 3, 5])
def test_the_first_bad_layer_is_named_however_seldom_we_look(every, backward, n):
    "Layer, epoch and batch"
    said = []
    model = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.ReLU(), Bad(n, backward)), nn.Linear(4, 1))
    trainer = make_trainer([NonFiniteCB(every, report=said.append)], model)
    trainer.fit(3)
    what = "gradient" if backward else "output"
    assert trainer.NonFiniteCB.found == dict(
        what=what, layer="1.1", kind="Bad", fit=0, epoch=n // 4, training=True, batch=n % 4
    )
    assert len(said) == 1 and said[0].startswith(
        f"The {what} of `1.1` (Bad) was the first to hold a NaN or an infinity, "
        f"at epoch {n // 4}, batch {n % 4} (training)."
    )
    assert n_hooks(trainer.model) == 0
    model[1][1].n = -1
    nn.init.ones_(model[1][1].w)
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    trainer.fit(1)
    assert trainer.NonFiniteCB.found is None, "the second fit starts from nothing"


@pytest.mark.shows("F104")
@pytest.mark.parametrize("every", EVERY)
def test_a_bad_batch_and_a_bad_loss_are_told_from_a_bad_layer(every):
    batches = make_batches()
    batches[2][1][0] = math.inf
    for loss_func, bad_batches, what, batch in (
        (F.mse_loss, batches, "batch", 2),
        (lambda p, t: F.mse_loss(p, t) / 0, make_batches(), "loss", 0),
    ):
        trainer = make_trainer(
            [NonFiniteCB(every, report=lambda text: None)], batches=bad_batches, loss_func=loss_func
        )
        trainer.fit(1)
        assert (
            trainer.NonFiniteCB.found["what"],
            trainer.NonFiniteCB.found["layer"],
            trainer.NonFiniteCB.found["batch"],
        ) == (what, None, batch)


@pytest.mark.shows("F104")
def test_what_went_bad_is_known_after_an_error_too_and_by_default_a_warning_says_it():
    model = nn.Sequential(nn.Linear(6, 1), Bad(1))

    def strict(preds, targets):
        if not preds.isfinite().all():
            raise ArithmeticError("not finite")
        return F.mse_loss(preds, targets)

    trainer = make_trainer([NonFiniteCB()], model, loss_func=strict)
    with (
        pytest.warns(UserWarning, match=re.escape("The output of `1` (Bad) was the first to hold a NaN")),
        pytest.raises(ArithmeticError),
    ):
        trainer.fit(1)
    assert trainer.NonFiniteCB.found["batch"] == 1 and n_hooks(model) == 0


@pytest.mark.shows("F104")
def test_a_healthy_run_and_integers_are_not_accused():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 1))
    trainer = make_trainer([NonFiniteCB(1)], model, [(torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 1))])
    trainer.fit(2)
    assert trainer.NonFiniteCB.found is None


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


WAITING = {
    "item",
    "cpu",
    "tolist",
    "numpy",
    "is_nonzero",
    "nonzero",
    "equal",
    "allclose",
    "unique",
    "bincount",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__array__",
}


class InsideCB:
    "While a batch is being worked on, turning a tensor into a number is an error"

    order = -10_000

    def before_batch(self, trainer):
        self.inside = True

    def cleanup_batch(self, trainer):
        self.inside = False


class Guard(TorchFunctionMode):
    def __init__(self, cb):
        super().__init__()
        self.cb = cb

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(self.cb, "inside", False) and getattr(func, "__name__", "") in WAITING:
            raise RuntimeError(f"waited in `{func.__name__}`")
        return func(*args, **kwargs or {})


@pytest.mark.shows("F125", "F126")
@pytest.mark.parametrize("name", WATCHERS)
def test_those_who_look_inside_do_not_wait_for_the_device(name):
    "520 batches, more than are kept unstacked; only a flag that is read at once does wait, as it says"
    cb = InsideCB()
    trainer = make_trainer([WATCHERS[name](), cb], batches=make_batches(5 if "finite" in name else 520))
    with Guard(cb):
        if name == "not finite, at once":
            with pytest.raises(RuntimeError, match="waited in"):
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


# Summary


@pytest.mark.shows("MIN-08")
def test_a_summary_counts_every_parameter_once():
    "A layer that runs twice, tied weights, a parameter outside any layer, a layer that never runs"

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.tied, self.unused = (
                nn.Linear(4, 4),
                nn.Linear(4, 4),
                nn.Linear(4, 4),
                nn.Linear(7, 7),
            )
            self.tied.weight, self.scale = self.b.weight, nn.Parameter(torch.ones(3))
            self.b.bias.requires_grad_(False)

        def forward(self, x):
            return self.tied(self.b(self.a(self.a(x)))).sum() * self.scale

    model = Odd()
    table = summarize_model(model, torch.randn(5, 4))
    assert [(o["layer"], o.get("parameters")) for o in table.rows] == [
        ("a", 20),
        ("a", 0),
        ("b", 20),
        ("tied", 4),
        ("Odd", 3),
        ("unused", 56),
        ("total", 103),
    ]
    assert table.rows[-1]["parameters"] == sum(p.numel() for p in model.parameters())
    assert table.rows[-1]["trainable"] == sum(p.numel() for p in model.parameters() if p.requires_grad) == 99
    assert table.rows[0]["MFLOPs"] == 2 * 4 * 4 / 1e6 and table.rows[-1]["MFLOPs"] == 4 * 2 * 4 * 4 / 1e6
    assert table.rows[5]["output"] is None and n_hooks(model) == 0


@pytest.mark.shows("MIN-08")
@pytest.mark.parametrize(
    "model, x, flops",
    [
        (nn.Conv2d(3, 5, 3, padding=1), torch.randn(2, 3, 8, 8), 2 * 5 * 8 * 8 * 3 * 9),
        (nn.Conv2d(4, 8, 1, groups=2), torch.randn(2, 4, 8, 8), 2 * 8 * 8 * 8 * 2),
        (nn.Linear(6, 7), torch.randn(2, 3, 6), 2 * 3 * 6 * 7),
        (nn.LSTM(4, 8, batch_first=True), torch.randn(2, 5, 4), 5 * 2 * 4 * 8 * (4 + 8)),
        (nn.ReLU(), torch.randn(2, 5), 0),
    ],
)
def test_operations_are_counted_for_one_example(model, x, flops):
    assert summarize_model(model, x).rows[-1]["MFLOPs"] * 1e6 == pytest.approx(flops)


@pytest.mark.shows("MIN-08")
def test_attention_is_counted_and_its_fast_path_comes_back():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    rows = summarize_model(model, torch.randn(2, 3, 8)).rows
    projections, scores = 2 * 3 * 8 * 8 * 4, 2 * 2 * 3 * 3 * 8
    assert rows[0]["layer"] == "self_attn" and rows[0]["MFLOPs"] * 1e6 == projections + scores
    assert torch.backends.mha.get_fastpath_enabled()


class DictCB(BasicTrainCB):
    "Batches are dicts, and the model takes keywords"

    def predict(self, trainer):
        trainer.preds = trainer.model(trainer.batch["x"])

    def get_loss(self, trainer):
        trainer.loss = F.mse_loss(trainer.preds, trainer.batch["y"])


@pytest.mark.shows("MIN-08", "ISA-42", "ISA-43")
def test_a_trainer_is_summarised_by_its_own_predict_and_left_as_it_was():
    batches = [dict(x=x, y=y) for x, y in make_batches()]
    trainer = Trainer(DataLoaders(batches, batches), None, optim.SGD, make_model(), DictCB())
    rows = trainer.summarize_model().rows
    assert rows[0]["input"] == "(5, 6)" and rows[-2]["output"] == "(5, 1)"
    assert not hasattr(trainer, "batch") and not hasattr(trainer, "preds")
    trainer.fit(1)
    batch, preds, state = trainer.batch, trainer.preds, copy.deepcopy(trainer.model.state_dict())
    trainer.summarize_model(batches[1])
    assert trainer.batch is batch and trainer.preds is preds and n_hooks(trainer.model) == 0
    assert all(torch.equal(v, state[k]) for k, v in trainer.model.state_dict().items())
    assert (
        "| layer |" in trainer.summarize_model()._repr_markdown_() and len(trainer.summarize_callbacks()) == 5
    )


@pytest.mark.shows("MIN-08")
@pytest.mark.parametrize("generator", [None, 3])
def test_a_summary_before_training_does_not_change_the_training(generator):
    "Drawing a batch from a shuffling loader takes no random numbers away"
    ends = []
    for summary in (False, True):
        set_seed(0)
        x, y = torch.randn(40, 6), torch.randn(40, 1)
        g = None if generator is None else torch.Generator().manual_seed(generator)
        dls = DataLoaders(torch.utils.data.DataLoader(list(zip(x, y)), 8, shuffle=True, generator=g))
        trainer = Trainer(dls, F.mse_loss, optim.SGD, make_model(), [BasicTrainCB()])
        if summary:
            trainer.summarize_model()
        trainer.fit(2, lr=0.05, valid=False)
        ends.append(trainer.model.state_dict())
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])


@pytest.mark.shows("MIN-08")
def test_what_cannot_be_summarised_says_why():
    with pytest.raises(ValueError, match="lazy layers"):
        summarize_model(nn.LazyLinear(3), torch.zeros(1, 2))
    with pytest.raises(TypeError, match="no layers to list"):
        summarize_model(lambda x: x, torch.zeros(1, 2))
    trainer = Trainer(DataLoaders(iter(make_batches())), F.mse_loss, optim.SGD, make_model(), BasicTrainCB())
    with pytest.raises(ValueError, match="walked only once"):
        trainer.summarize_model()
    assert trainer.summarize_model(make_batches()[0]).rows
    assert len(list(trainer.dls.train)) == 4
    with pytest.raises(ValueError, match="gave no batch"):
        Trainer(DataLoaders([]), None, None, make_model(), None).summarize_model()
    model = make_model()
    with pytest.raises(RuntimeError):
        summarize_model(model, torch.zeros(2, 99))
    assert n_hooks(model) == 0 and model.training


@pytest.mark.shows("ISA-43")
def test_a_summary_also_stops_at_the_limits_of_a_pass():
    "Fit, and then both summaries"
    trainer = make_trainer([NBatchCB(2), OneBatchCB()])
    trainer.fit(1)
    assert len(trainer.summarize_callbacks()) and trainer.summarize_model().rows[-1]["layer"] == "total"


@pytest.mark.shows("ISA-74")
def test_a_record_can_be_read_in_the_middle_of_a_fit_and_hooks_survive_it():
    "Reading early loses nothing"

    class ReadCB:
        order = Order.LAST

        def after_batch(self, trainer):
            self.n = (
                len(trainer.ActivationStatsCB.stats["2"].mean),
                len(trainer.GradientStatsCB.stats["0.bias"].norm),
            )

    trainer = make_trainer([ActivationStatsCB(nn.ReLU), GradientStatsCB(), ReadCB()])
    trainer.fit(2, valid=False)
    assert trainer.ReadCB.n == (8, 8)
    assert GradientStats().hist.shape == (0, 32) and ActivationStats().hist.shape == (0, 40)
