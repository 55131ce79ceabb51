"Gradients of each parameter, and the first layer that gives a NaN, against loops written by hand."

import math
import re

import matplotlib
import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.inspection.activations import ActivationStatsCB
from isaac_loop.inspection.gradients import GradientPlotCB, GradientStatsCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.inspection.first_nonfinite import NonFiniteCB
from isaac_loop.inspection.update_ratios import UpdateRatioCB
from isaac_loop.loop.events import CancelStepException, Order
import isaac_loop.inspection.loop_tables  # noqa: F401 (gives trainers `summarize_callbacks`)
from isaac_loop.basics.tensors import set_seed
from inspected import make_batches, make_model, make_trainer, n_hooks


matplotlib.use("Agg")


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
        ValueError, match="`format` is 'word', but matplotlib does not write that. Use .*'pdf'"
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
