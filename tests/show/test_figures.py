"""Every figure that the library makes: no text lies outside the canvas when it is saved, and what counts
has whole numbers on its axis. The list of plots is held against the code: one that is missing is found.
"""

import ast
import io
import math
import os
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import nn, optim
from torch.nn import functional as F

import isaac_loop
from isaac_loop.basics.tensors import set_seed
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.evaluate import evaluation  # noqa: F401  Plots of predictions
from isaac_loop.inspection.activations import ActivationStatsCB
from isaac_loop.inspection.gradients import GradientPlotCB, GradientStatsCB
from isaac_loop.inspection.times import TimesCB
from isaac_loop.inspection.update_ratios import UpdateRatioCB
from isaac_loop.loop.trainer import Trainer
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.models.small_models import plot_func
from isaac_loop.recipes.demo import save_loss_plot
from isaac_loop.schedule.annealing import piecewise
from isaac_loop.schedule.attribute_schedule import AttributeSchedulerCB
from isaac_loop.schedule.schedules import OneCycleSchedulerCB
from isaac_loop.show import plots  # noqa: F401  `trainer.show_image_batch`
from isaac_loop.show.curves import history_figure
from isaac_loop.show.images import show_image, show_images
from isaac_loop.show.live_plot import LivePlotCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.tune.lr_finder import LRFinderCB


class DeepNet(nn.Sequential):
    "Layers with long names"

    def __init__(self, n_hidden=2, width=12):
        super().__init__()
        self.add_module("flatten", nn.Flatten())
        sizes = [36] + [width] * n_hidden
        for i, (n_in, n_out) in enumerate(zip(sizes, sizes[1:])):
            layer = nn.Sequential(nn.Linear(n_in, n_out), nn.ReLU())
            self.add_module(f"encoder_block_with_a_long_name_{i}", layer)
        self.add_module("head", nn.Linear(width, N_CLASSES))


N_CLASSES = 12
NAMES = [f"a class with a long name {i}" for i in range(N_CLASSES)]


def trained(*callbacks, n_epochs=2, n_hidden=2, scale=1.0):
    set_seed(0)
    batches = [(torch.rand(16, 1, 6, 6), torch.randint(N_CLASSES, (16,))) for _ in range(4)]

    def loss_func(preds, targets):
        return F.cross_entropy(preds, targets) * scale

    model = DeepNet(n_hidden)
    metrics = MetricsCB(show=False, wrong=Wrong())
    trainer = Trainer(
        DataLoaders(batches, batches[:2]),
        loss_func,
        optim.SGD,
        model,
        [BasicTrainCB(), metrics, *callbacks],
    )
    trainer.fit(n_epochs, lr=0.1)
    return trainer


class Wrong:
    "A count, of another scale than the loss"

    def reset(self):
        self.n = 0

    def update(self, preds, targets):
        self.n += (preds.argmax(1) != targets).sum().item()

    def compute(self):
        return 1e6 * self.n


def preds(**options):
    return trained().get_preds(**options)


def lr_finder():
    finder = LRFinderCB(n_steps=30) if "n_steps" in LRFinderCB.__init__.__code__.co_varnames else LRFinderCB()
    trained(finder, n_epochs=10)
    return finder.plot()


def many_classes():
    found = preds()
    found.preds = torch.randn(32, 30)
    return found.plot_confusion_matrix([f"class number {i}" for i in range(30)], normalize="all")


def files_of(make):
    "What was saved while `make` ran: figures that nobody returns"

    def run(tmp_path, monkeypatch):
        saved, savefig = [], Figure.savefig

        def keep(self, *args, **kwargs):
            saved.append(self)
            return savefig(self, *args, **kwargs)

        monkeypatch.setattr(Figure, "savefig", keep)
        make(tmp_path)
        return [o for o in saved if o.axes]

    run.needs_a_place = True
    return run


PLOTS = {
    "History.plot": lambda: trained().history.plot(),
    "History.plot, one epoch": lambda: trained(n_epochs=1).history.plot(),
    "History.plot, large numbers": lambda: trained(scale=1e-7).history.plot(label="a run with a name"),
    "History.plot_batches": lambda: trained().history.plot_batches(),
    "history_figure": lambda: history_figure(trained().history),
    "Predictions.plot_top_losses": lambda: preds(with_inputs=True, with_loss=True).plot_top_losses(
        classes=NAMES
    ),
    "Predictions.plot_confusion_matrix": lambda: preds().plot_confusion_matrix(NAMES),
    "Predictions.plot_confusion_matrix, shares": lambda: preds().plot_confusion_matrix(normalize="true"),
    "Predictions.plot_confusion_matrix, many classes": many_classes,
    "RecorderCB.plot": lambda: trained(
        RecorderCB(scaled=lambda t: t.loss * 1e6, n=lambda t: t.batch_num)
    ).RecorderCB.plot(),
    "LRFinderCB.plot": lr_finder,
    "ActivationStatsCB.plot_stats": lambda: trained(ActivationStatsCB()).ActivationStatsCB.plot_stats(),
    "ActivationStatsCB.color_dim": lambda: trained(ActivationStatsCB()).ActivationStatsCB.color_dim(),
    "ActivationStatsCB.dead_chart": lambda: trained(ActivationStatsCB()).ActivationStatsCB.dead_chart(),
    "ActivationStatsCB.plot_stats, deep": lambda: trained(
        ActivationStatsCB(), n_hidden=20
    ).ActivationStatsCB.plot_stats(),
    "ActivationStatsCB.color_dim, deep": lambda: trained(
        ActivationStatsCB(), n_hidden=20
    ).ActivationStatsCB.color_dim(),
    "GradientStatsCB.plot_norms": lambda: trained(GradientStatsCB()).GradientStatsCB.plot_norms(),
    "GradientStatsCB.plot_distributions": lambda: trained(
        GradientStatsCB()
    ).GradientStatsCB.plot_distributions(),
    "GradientStatsCB.plot_distributions, deep": lambda: trained(
        GradientStatsCB(), n_hidden=20
    ).GradientStatsCB.plot_distributions(),
    "UpdateRatioCB.plot": lambda: trained(UpdateRatioCB()).UpdateRatioCB.plot(),
    "LoopTimes.plot": lambda: trained(TimesCB()).TimesCB.times.plot(),
    "plot_func": lambda: plot_func(torch.sigmoid),
    "DataLoaders.show_batch": lambda: trained().dls.show_batch(classes=NAMES),
    "SchedulerCB.plot": lambda: OneCycleSchedulerCB().plot(n_epochs=1, updates_per_epoch=3),
    "AttributeSchedulerCB.plot": lambda: AttributeSchedulerCB(
        {"model.head.p": piecewise((0, 0.0), (0.5, 0.3))}
    ).plot(n_epochs=1, updates_per_epoch=3),
    "show_image": lambda: show_image(torch.rand(3, 6, 6), title="a title that is longer", frame=True),
    "show_images": lambda: show_images(torch.rand(7, 1, 6, 6), NAMES[:7], suptitle="all of them"),
    "Trainer.show_image_batch": lambda: trained().show_image_batch(),
    "save_loss_plot": files_of(lambda path: save_loss_plot(trained().history, path / "losses.png")),
    "GradientPlotCB.log": files_of(lambda path: trained(GradientPlotCB(path))),
    "LivePlotCB": files_of(lambda path: trained(LivePlotCB(path / "live.png", seconds=0))),
}


def figures_of(found):
    "The figures of axes, of arrays of them, of figures"
    if isinstance(found, Figure):
        return [found]
    if hasattr(found, "figure"):
        return [found.figure]
    return list(dict.fromkeys(figure for one in getattr(found, "flat", found) for figure in figures_of(one)))


def drawn_texts(figure, monkeypatch):
    "The texts that are really drawn: ticks beyond the ends of an axis are there, but not seen"
    drawn, draw = [], Text.draw

    def noting(self, renderer):
        drawn.append(self)
        return draw(self, renderer)

    figure.savefig(io.BytesIO(), format="png")  # The layout comes to rest
    with monkeypatch.context() as patched:
        patched.setattr(Text, "draw", noting)
        figure.savefig(io.BytesIO(), format="png")
    return [o for o in dict.fromkeys(drawn) if o.get_visible() and o.get_text().strip()]


COUNTS = "epoch", "batch", "update"


@pytest.fixture(autouse=True)
def closed():
    with plt.rc_context({"figure.max_open_warning": 0}):
        yield
    plt.close("all")


@pytest.mark.parametrize("name", PLOTS)
def test_no_text_is_cut_off_and_what_counts_has_whole_numbers(name, tmp_path, monkeypatch):
    make = PLOTS[name]
    found = make(tmp_path, monkeypatch) if hasattr(make, "needs_a_place") else make()
    figures = figures_of(found)
    assert figures
    for i, figure in enumerate(figures):
        if folder := os.environ.get("SHOW_FIGURES"):
            figure.savefig(Path(folder) / f"{name.replace(' ', '_')}-{i}.png")
        for text in drawn_texts(figure, monkeypatch):
            box, canvas = text.get_window_extent(), figure.bbox
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= canvas.x1 + 1 and box.y1 <= canvas.y1 + 1
            assert inside, f"{text.get_text()!r} lies at {box.extents.round()} in {canvas.extents}"
        for ax in figure.axes:
            if any(o in ax.get_xlabel() for o in COUNTS):
                low, high = sorted(ax.get_xlim())
                places = [x for x in ax.get_xticks() if low <= x <= high]
                if math.ceil(low) <= high:  # Within the first epoch there is no whole number to show
                    assert places and all(math.isclose(x, round(x)) for x in places), places


def makers(path):
    "Names of the functions in a module that make a figure"
    tree = ast.parse(path.read_text())
    for f in ast.walk(tree):
        if isinstance(f, ast.FunctionDef):
            called = {
                getattr(o.func, "attr", getattr(o.func, "id", ""))
                for o in ast.walk(f)
                if isinstance(o, ast.Call)
            }
            if called & {"subplots", "Figure", "figure"}:
                yield f"{path.stem}.{f.name}"


ASKED_ELSEWHERE = {  # Who makes the figures of the plots above
    "annealing.draw_curves",
    "curves._new_axes",
    "images.get_grid",
    "images.subplots",
    "live_plot._figure",
    "many_layers.panels",
    "curves.plot_lines",
    "gradients.log",
}
NO_PICTURE = {"demo.plot_path", "live_plot._check_place"}  # Ask what can be written
ASKED_ELSEWHERE |= {"lr_finder._repr_png_"}  # The plot of the finder


def test_the_list_of_plots_is_complete():
    folder = Path(isaac_loop.__file__).parent
    found = {name for path in folder.rglob("*.py") for name in makers(path)}
    named = {name.partition(",")[0].rpartition(".")[2] for name in PLOTS}
    left = {o for o in found - ASKED_ELSEWHERE - NO_PICTURE if o.rpartition(".")[2] not in named}
    assert not left and ASKED_ELSEWHERE | NO_PICTURE <= found


def test_every_figure_has_a_layout_that_cuts_nothing_off():
    "Also where no test looks: each call that makes one says so"
    folder, found = Path(isaac_loop.__file__).parent, []
    for path in folder.rglob("*.py"):
        source = path.read_text()
        for call in ast.walk(ast.parse(source)):
            is_maker = isinstance(call, ast.Call) and ast.unparse(call.func) in (
                "plt.subplots",
                "plt.figure",
                "Figure",
            )
            if is_maker and f"{path.stem}" not in ("demo", "live_plot", "media_files"):
                found += [] if "layout" in ast.unparse(call) else [ast.get_source_segment(source, call)]
    assert found == []
