"""Curves (`curves.py`), live plots (`show/live_plot.py`) and the batch as the model sees it (`plots.py`).

Figures are checked on the numbers in their lines, `show_image_batch` on the batch that a fit really begins
with and on a trainer that must be the same in every respect afterwards.
"""

import copy
import csv
import random
import warnings
from collections import namedtuple
from itertools import pairwise

import matplotlib.figure
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, RandomSampler

from isaac_loop.show import live_plot
from isaac_loop.all import AccumulationCB, CheckpointCB, EarlyStoppingCB, LimitCB
from isaac_loop.data.augmentation import BatchAugmentationCB, BatchTransformCB
from isaac_loop.data.mixtures import MixUpCB
from isaac_loop.data.random_patches import RandErase
from isaac_loop.device.device import DeviceCB
from isaac_loop.show.live_plot import LivePlotCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.train.training import BasicTrainCB, NBatchCB
from isaac_loop.show.curves import history_figure, plot_history, smoothed
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop import numbers_on_device
from isaac_loop.loop.events import CancelBatchException, CancelFitException, Order
from isaac_loop.loop.history import History
from isaac_loop.show.images import UnNormalize
from isaac_loop.show.plots import Trainer  # With `show_image_batch`


@pytest.fixture(autouse=True)
def no_window():
    plt.switch_backend("Agg")
    yield
    plt.close("all")


class AccuracyMetric:
    def reset(self):
        self.hits, self.n = 0, 0

    def update(self, preds, targets):
        self.hits = self.hits + (preds.argmax(1) == targets).sum()
        self.n += len(targets)

    def compute(self):
        return self.hits / self.n


def make_model(p=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Dropout(p), nn.Linear(36, 3))


def make_trainer(
    callbacks=(), shuffle=True, generator=None, n=20, model=None, loss_func=F.cross_entropy, **kwargs
):
    g = torch.Generator().manual_seed(0)
    data = list(zip(torch.rand(n, 1, 6, 6, generator=g), torch.randint(3, (n,), generator=g)))
    dls = DataLoaders(
        DataLoader(data, 6, shuffle=shuffle, generator=generator, **kwargs), DataLoader(data, 8)
    )
    torch.manual_seed(0)
    return Trainer(
        dls, loss_func, optim.SGD, make_model() if model is None else model, [BasicTrainCB(), *callbacks]
    )


def trained(n_epochs=3, **kwargs):
    trainer = make_trainer([MetricsCB(accuracy=AccuracyMetric(), show=False)], **kwargs)
    trainer.fit(n_epochs, lr=0.1)
    return trainer


def lines(ax):
    return {o.get_label(): list(o.get_ydata()) for o in ax.lines if not o.get_label().startswith("_")}


# History


@pytest.mark.shows("ISA-118")
def test_losses_and_metrics_are_drawn_as_they_were_recorded():
    "One figure, labelled"
    history = trained().history
    losses, metrics = history.plot()
    assert lines(losses) == {"train_loss": history["train_loss"], "valid_loss": history["valid_loss"]}
    assert lines(metrics) == {"accuracy": history["accuracy"]}
    assert losses.figure is metrics.figure
    assert (losses.get_xlabel(), losses.get_ylabel(), metrics.get_ylabel()) == (
        "epochs trained",
        "mean loss per example",
        "accuracy",
    )
    assert list(losses.lines[0].get_xdata()) == [1, 2, 3]


def test_several_fits_follow_one_another_and_one_can_be_chosen():
    trainer = trained()
    trainer.fit(2, lr=0.1)
    losses = trainer.history.plot()[0]
    assert len(lines(losses)["train_loss"]) == 5
    assert [o.get_xdata()[0] for o in losses.lines if o.get_linestyle() == ":"] == [3.5]
    assert lines(trainer.history.plot(fit=1)[0])["train_loss"] == trainer.history["train_loss"][3:]


def test_two_histories_share_a_figure():
    a, b = trained(), trained(2)
    axes = a.history.plot(label="a")
    assert b.history.plot(axes=axes, label="b") is axes
    assert set(lines(axes[0])) == {"a train_loss", "a valid_loss", "b train_loss", "b valid_loss"}
    assert len(plt.get_fignums()) == 1
    with pytest.raises(ValueError, match="There are 0 free axes, but what is drawn needs 1"):
        b.history.plot(axes=a.history.plot("accuracy"))


def test_names_choose_the_columns_and_misspelt_ones_are_answered():
    history = trained().history
    assert [list(lines(ax)) for ax in history.plot(["valid_loss", "accuracy"])] == [
        ["valid_loss"],
        ["accuracy"],
    ]
    assert [ax.get_ylabel() for ax in history.plot("elapsed")] == ["elapsed (seconds)"]
    with pytest.raises(LookupError, match=r"called `acuracy`; there are \[.*Did you mean `accuracy`"):
        history.plot("acuracy")


def test_a_second_name_that_is_no_list_is_not_taken_for_a_fit():
    with pytest.raises(TypeError, match="`fit` is 'valid_loss'.*a list: `history.plot"):
        trained().history.plot("train_loss", "valid_loss")


def test_an_empty_history_and_one_without_numbers_are_clear_errors():
    for plot in (
        History().plot,
        lambda: plot_history([]),
        make_trainer().history.plot,
        lambda: trained().history.plot(fit=7),
    ):
        with pytest.raises(ValueError, match="no rows yet.*`MetricsCB`"):
            plot()
    with pytest.raises(ValueError, match="no losses and no metrics"):
        plot_history([dict(fit=0, epoch=0, elapsed=1.0)])
    with pytest.raises(ValueError, match="no batches yet"):
        History().plot_batches()


def test_histories_by_name_are_drawn_one_after_the_other():
    rows = [dict(fit=0, epoch=0, train_loss=1.0)]
    with pytest.raises(TypeError, match="plot_history.b, axes=axes"):
        plot_history({"a": rows, "b": rows})
    with pytest.raises(TypeError, match=r"plot_history.\[row\]"):
        plot_history(rows[0])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda trainer: trainer, r"class `Trainer`.*`plot_history\(trainer.history\)`"),
        (lambda trainer: trainer.history[-1], r"class `dict`.*`plot_history\(\[row\]\)`"),
        (lambda trainer: [trainer.history] * 2, "class `list` with `History`.*`axes = plot_history"),
        (lambda trainer: pd.DataFrame(trainer.history), r"class `DataFrame`.*to_dict\('records'\)"),
        (lambda trainer: "log.csv", "class `str`.*read the rows first"),
        (lambda trainer: None, "class `NoneType`.*Pass `trainer.history`"),
        (lambda trainer: [None], "class `list` with `NoneType` in it"),
    ],
    ids=["trainer", "row", "histories", "table", "path", "nothing", "no rows"],
)
@pytest.mark.parametrize("plot", [plot_history, history_figure])
def test_what_is_no_list_of_rows_says_how_to_get_one(plot, make, told):
    with pytest.raises(TypeError, match=told):
        plot(make(trained()))


def test_rows_without_a_value_leave_a_gap_and_lists_are_not_drawn():
    rows = [
        dict(valid_loss=1.0, per_class=[1, 2]),
        dict(train_loss=2.0),
        dict(valid_loss=None),
        dict(valid_loss=3.0),
    ]
    drawn = lines(plot_history(rows)[0])
    assert set(drawn) == {"valid_loss", "train_loss"}
    np.testing.assert_equal(drawn["valid_loss"], [1.0, np.nan, np.nan, 3.0])
    with pytest.raises(LookupError, match="no column of numbers called `per_class`"):
        plot_history(rows, "per_class")


@pytest.mark.shows("ISA-118")
def test_a_log_file_is_drawn_like_a_history(tmp_path):
    "Plots from a log, written to CSV and read again"
    history = trained().history
    with open(tmp_path / "log.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, history.names())
        writer.writeheader()
        writer.writerows(history)
    with open(tmp_path / "log.csv", newline="") as f:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(f)]
    assert [lines(ax) for ax in plot_history(rows)] == [lines(ax) for ax in history.plot()]


@pytest.mark.shows("ISA-118")
def test_batches_are_drawn_with_their_running_mean():
    history = trained().history
    ax = history.plot_batches()
    losses = [o["loss"] for o in history.batches if o["training"]]
    assert [list(o.get_ydata()) for o in ax.lines] == [losses, smoothed(losses)]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("training batches", "loss")
    assert len(history.plot_batches(smooth=0).lines) == 1
    assert len(history.plot_batches(training=False).lines[0].get_xdata()) == 9
    with pytest.raises(LookupError, match="Did you mean `loss`"):
        history.plot_batches("los")


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(-100, 100), min_size=1, max_size=30), smooth=st.floats(0, 0.99))
def test_the_running_mean_is_the_weighted_mean_of_all_so_far(values, smooth):
    for i, mean in enumerate(smoothed(values, smooth)):
        assert mean == pytest.approx(
            np.average(values[: i + 1], weights=[smooth ** (i - k) + 1e-300 for k in range(i + 1)]), abs=1e-6
        )


@pytest.mark.parametrize("smooth", [1, -0.1, 2])
def test_a_running_mean_that_never_fades_is_refused(smooth):
    with pytest.raises(ValueError, match="`smooth` is"):
        smoothed([1.0], smooth)


# Live plot


@pytest.fixture
def figures(monkeypatch):
    "The figures that were drawn, as (rows, losses, lines of the first axes)"
    drawn, figure = [], live_plot._figure

    def keep(rows, losses, *args):
        fig = figure(rows, losses, *args)
        drawn.append((len(rows), len(losses), [lines(ax) for ax in fig.axes], fig))
        return fig

    monkeypatch.setattr(live_plot, "_figure", keep)
    return drawn


@pytest.mark.shows("ISA-118", "MIN-06")
def test_the_figure_is_drawn_at_the_end_whatever_the_interval(tmp_path, figures):
    trainer = make_trainer(
        [
            MetricsCB(accuracy=AccuracyMetric(), show=False),
            LivePlotCB(tmp_path / "deep" / "loss.png", seconds=1000),
        ]
    )
    trainer.fit(3, lr=0.1)
    assert [o[:2] for o in figures] == [(3, 12)]
    losses, metrics = figures[0][2]
    assert (
        losses["valid_loss"] == trainer.history["valid_loss"]
        and metrics["accuracy"] == trainer.history["accuracy"]
    )
    assert f"valid_loss {trainer.history.latest('valid_loss'):.3f}" in figures[0][3].get_suptitle()
    assert (tmp_path / "deep" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not plt.get_fignums()


@pytest.mark.shows("MIN-06")
def test_it_is_redrawn_while_a_pass_runs(tmp_path, figures):
    "Also before the first epoch is over"
    trainer = make_trainer([MetricsCB(show=False), LivePlotCB(tmp_path / "loss.png", seconds=0)])
    trainer.fit(1)
    assert any(rows == 0 and losses > 0 for rows, losses, *_ in figures)
    assert [o[:2] for o in figures][-1] == (1, 4)
    assert [o[1] for o in figures] == sorted(o[1] for o in figures)


def test_only_the_present_fit_is_drawn_and_names_choose(tmp_path, figures):
    trainer = make_trainer([MetricsCB(accuracy=AccuracyMetric(), show=False)])
    trainer.fit(3)
    trainer.fit(2, callbacks=LivePlotCB(tmp_path / "loss.png", names="accuracy", seconds=1000))
    rows, _, (drawn,), _ = figures[-1]
    assert rows == 2 and drawn == {"accuracy": trainer.history["accuracy"][3:]}
    with pytest.raises(LookupError, match="Did you mean `accuracy`"):
        trainer.fit(2, callbacks=LivePlotCB(tmp_path / "loss.png", names=["acuracy"]))


def test_without_metrics_the_losses_of_the_batches_are_drawn(tmp_path, figures):
    make_trainer([LivePlotCB(tmp_path / "loss.pdf")]).fit(2)
    assert figures[-1][:2] == (0, 8) and len(figures[-1][2][0]["training batches, running mean"]) == 8


@pytest.mark.parametrize(
    "path, message", [("loss.xyz", "ending such as"), ("file/loss.png", "cannot write its figure")]
)
def test_a_file_that_cannot_be_written_is_an_error_before_the_first_batch(tmp_path, path, message):
    (tmp_path / "file").write_text("not a folder")
    trainer = make_trainer([LivePlotCB(tmp_path / path)])
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(ValueError, match=message) as caught:
        trainer.fit(1)
    assert trainer.n_updates == 0 and all(
        torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items()
    )
    assert len(caught.value.__notes__) == 1, "the cleanup has nothing to complain about"


def test_no_notebook_and_no_path_is_an_error():
    with pytest.raises(ValueError, match="nowhere to draw.*Give it one"):
        make_trainer([LivePlotCB()]).fit(1)
    with pytest.raises(ValueError, match="`seconds` is -1"):
        LivePlotCB("loss.png", seconds=-1)


def test_a_disk_that_fills_up_does_not_end_training(tmp_path, monkeypatch):
    callback = LivePlotCB(tmp_path / "loss.png", seconds=0)
    trainer = make_trainer([MetricsCB(show=False), callback])

    class FullDiskCB:
        def before_epoch(self, trainer):
            def full(*args, **kwargs):
                raise OSError(28, "No space left on device")

            monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)

    trainer.add_callback(FullDiskCB())
    with pytest.warns(UserWarning, match="could not write.*No space left.*training goes on") as caught:
        trainer.fit(2)
    assert trainer.n_updates == 8 and len(caught) == 1


class Stream:
    "Batches whose number nobody knows"

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.fixture
def at_every_batch(monkeypatch):
    monkeypatch.setattr(live_plot, "_PAUSE", 0)


def ends(drawn):
    "For each drawing how far the losses of the batches go, and the axis, in what unit"
    found = []
    for *_, fig in drawn:
        ax = fig.axes[0]
        line = next((o for o in ax.lines if "batches" in o.get_label()), None)
        if line is not None:
            found.append((max(line.get_xdata()), ax.get_xlim()[1], ax.get_xlabel()))
    return found


@pytest.mark.parametrize("callbacks", [[], [AccumulationCB(4)], [NBatchCB(2)], [LimitCB(updates=6)]])
def test_no_epoch_is_drawn_that_did_not_happen(callbacks, tmp_path, figures, at_every_batch):
    seen = []

    class LookCB:
        order = Order.LAST

        def after_batch(self, trainer):
            if trainer.training:
                seen.append(trainer.epoch + (trainer.batch_num + 1) / trainer.n_batches)

    live = LivePlotCB(tmp_path / "loss.png", seconds=0)
    make_trainer([MetricsCB(show=False), live, LookCB(), *callbacks]).fit(3)
    drawn = ends(figures)
    assert drawn and all(x <= max(seen) for x, *_ in drawn) and drawn[-1][0] == max(seen)
    assert {unit for *_, unit in drawn} == {"epochs trained"}


def test_in_a_stream_batches_are_counted_until_the_first_pass_is_over(tmp_path, figures, at_every_batch):
    trainer = make_trainer([LivePlotCB(tmp_path / "loss.png", seconds=0)])
    trainer.dls.train = Stream(trainer.dls.train)
    trainer.fit(2)
    drawn = ends(figures)
    first = [o for o in drawn if o[2] == "training batches"]
    assert [o[0] for o in first] == [1, 2, 3, 4] and drawn[-1][0] == 2
    assert [o[0] for o in drawn[len(first) :]] == sorted(o[0] for o in drawn[len(first) :])


def test_size_panels_and_axis_stay_from_the_first_drawing_to_the_last(tmp_path, figures, at_every_batch):
    callbacks = [
        MetricsCB(accuracy=AccuracyMetric(), show=False),
        LivePlotCB(tmp_path / "loss.png", seconds=0),
    ]
    make_trainer([*callbacks, EarlyStoppingCB(patience=1, min_delta=100)]).fit(7)
    sizes = {(tuple(fig.get_size_inches()), len(fig.axes)) for *_, fig in figures}
    limits = {ax.get_xlim() for *_, fig in figures for ax in fig.axes}
    assert len(sizes) == 1 and sizes.pop()[1] == 2
    assert len(limits) == 1 and 7 <= limits.pop()[1] < 7.2


def test_no_more_than_a_tenth_of_the_time_goes_into_drawing(tmp_path, monkeypatch):
    "A batch takes a second here, and a drawing ten"
    now, drawn = [0.0], []

    class ClockCB:
        def before_batch(self, trainer):
            now[0] += 1

    def figure(*args):
        now[0] += 10
        drawn.append(now[0])
        return matplotlib.figure.Figure()

    monkeypatch.setattr(live_plot.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(live_plot, "_figure", figure)
    make_trainer([LivePlotCB(tmp_path / "loss.png", seconds=0), ClockCB()]).fit(100, valid=False)
    assert now[0] == 400 + 10 * len(drawn) and len(drawn) > 3
    assert all(after - before >= 100 for before, after in pairwise(drawn[:-1])), (
        "but for the last, at the end"
    )


def test_a_run_that_goes_on_is_drawn_from_where_it_goes_on(tmp_path, figures):
    def run(*callbacks):
        live = LivePlotCB(tmp_path / "loss.png", seconds=1000)
        make_trainer([MetricsCB(show=False), CheckpointCB(tmp_path / "run"), live, *callbacks]).fit(4)

    def log(trainer):
        if trainer.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(log)
    run()
    rows, losses, (drawn, *_), fig = figures[-1]
    (line,) = [o for o in fig.axes[0].lines if "batches" in o.get_label()]
    assert rows == 4 and 2 < min(line.get_xdata()) and max(line.get_xdata()) == 4


@pytest.mark.shows("ISA-118")
def test_in_a_notebook_one_output_is_replaced(monkeypatch):
    import IPython.display

    shown = []

    class Handle:
        def update(self, image):
            shown.append(("update", image.data[:4]))

    def display(image, display_id):
        shown.append(("new", image.data[:4]))
        return Handle()

    monkeypatch.setattr(live_plot, "_in_notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", display)
    at_first = []

    def before_batch(trainer):
        at_first.append(len(shown))

    make_trainer([MetricsCB(show=False), LivePlotCB(seconds=0), before_batch]).fit(2)
    assert at_first[0] == 1, "its place is taken before anything else is shown"
    assert shown[0] == ("new", b"\x89PNG") and set(shown[1:]) == {("update", b"\x89PNG")}


def test_a_live_plot_changes_nothing_about_training(tmp_path):
    "Weights, history and random numbers, bit for bit"
    results = []
    for callbacks in ([], [LivePlotCB(tmp_path / "loss.png", seconds=0)]):
        trainer = make_trainer([MetricsCB(show=False), *callbacks], model=make_model(0.5))
        trainer.fit(2, lr=0.1)
        results.append((trainer.model[2].weight, trainer.history["train_loss"], torch.get_rng_state()))
    assert (
        torch.equal(results[0][0], results[1][0])
        and results[0][1] == results[1][1]
        and torch.equal(results[0][2], results[1][2])
    )


class GuardCB(TorchFunctionMode):
    "Waiting for a tensor inside a batch is an error"

    order, inside = -10_000, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.inside and getattr(func, "__name__", "") in (
            "item",
            "cpu",
            "tolist",
            "numpy",
            "__bool__",
            "__float__",
            "__format__",
        ):
            raise AssertionError(func.__name__)
        return func(*args, **kwargs or {})

    def before_batch(self, trainer):
        self.inside = True

    def cleanup_batch(self, trainer):
        self.inside = False


def test_between_two_drawings_nobody_waits_for_the_device(tmp_path):
    guard = GuardCB()
    trainer = make_trainer([guard, LivePlotCB(tmp_path / "loss.png", seconds=1000)])
    with guard:
        trainer.fit(2)
    assert trainer.n_updates == 8


def test_losses_still_on_their_way_are_left_for_the_next_drawing():
    "An event stands in for the accelerator's"
    losses = live_plot.DeviceNumbers()
    ready = []
    Event = namedtuple("Event", "query synchronize")
    late = numbers_on_device.Sent(torch.tensor([2.0]))
    late._events["device"] = Event(lambda: bool(ready), lambda: ready.append(True))
    losses._sent.append(late)
    losses.add(torch.tensor(3.0))
    losses.send()
    assert losses.arrived().tolist() == []
    assert losses.read().tolist() == [2.0, 3.0]


# The batch as the model sees it


class CatchCB:
    "Keeps the first batch, and ends the fit"

    order = Order.RECORD

    def before_batch(self, trainer):
        self.batch = trainer.batch
        raise CancelFitException("one is enough")


class CountCB:
    "A callback with a list and a number that change"

    order = Order.DATA

    def __init__(self):
        self.seen, self.n = [], 0

    def before_fit(self, trainer):
        self.n += 1

    def before_batch(self, trainer):
        self.seen.append(trainer.batch_num)
        trainer.batch = (
            trainer.batch[0] * torch.rand(()) * random.random() * np.random.rand(),
            trainer.batch[1],
        )


def pixels(axes):
    return torch.stack([torch.tensor(np.asarray(ax.images[0].get_array())) for ax in axes.flat if ax.images])


GENERATORS = {
    "global": lambda: {},
    "own": lambda: dict(generator=torch.Generator().manual_seed(3)),
    "sampler": lambda: dict(
        shuffle=False, sampler=RandomSampler(range(20), generator=torch.Generator().manual_seed(3))
    ),
}


@pytest.mark.shows("ISA-82", "ISA-114", "MIN-13")
@pytest.mark.parametrize("kind", GENERATORS)
def test_the_batch_is_the_one_that_the_next_fit_begins_with(kind):
    "Shuffled and augmented, after the device, with its targets as titles; twice the same"
    kwargs = GENERATORS[kind]()
    if kind == "sampler":
        kwargs["shuffle"] = None
    trainer = make_trainer(
        [BatchAugmentationCB(RandErase(p=1)), CountCB(), DeviceCB("cpu"), MixUpCB()], **kwargs
    )
    first, second = trainer.show_image_batch(max_n=4), trainer.show_image_batch(max_n=4)
    catch = CatchCB()
    trainer.fit(1, callbacks=catch)
    assert torch.equal(pixels(first), catch.batch[0][:4, 0]) and torch.equal(pixels(second), pixels(first))
    assert [ax.get_title() for ax in first.flat] == [str(o) for o in catch.batch[1][:4].tolist()]


def state_of(trainer):
    "Everything that can be compared about a trainer and the random numbers"
    return copy.deepcopy(
        (
            {k: repr(v) for k, v in vars(trainer).items()},
            list(trainer.history),
            len(trainer.history.batches),
            trainer.history.fit,
            str(trainer.model.state_dict()),
            [m.training for m in trainer.model.modules()],
            [repr({k: v for k, v in vars(o).items() if k != "metrics"}) for o in trainer.callbacks],
            str(random.getstate()),
            str(np.random.get_state()),
            torch.get_rng_state().tolist(),
        )
    )


@pytest.mark.shows("ISA-82")
@pytest.mark.parametrize("fitted", [False, True])
def test_looking_leaves_the_trainer_as_it_was(fitted):
    "State, history, random numbers, callbacks and their lists, modes of the modules"
    trainer = make_trainer(
        [CountCB(), MetricsCB(show=False), DeviceCB("cpu"), BatchAugmentationCB(RandErase())]
    )
    if fitted:
        trainer.fit(1)
    trainer.model[2].eval()
    objects, plan, before = list(trainer.callbacks), trainer.plan, state_of(trainer)
    tensors = [(p, p.data_ptr()) for p in trainer.model.parameters()]
    trainer.show_image_batch()
    trainer.show_image_batch(callbacks=MixUpCB(), train=True)
    assert state_of(trainer) == before
    assert (
        all(a is b for a, b in zip(objects, trainer.callbacks))
        and trainer.plan is plan
        and trainer.CountCB is objects[1]
    )
    assert all(p.data_ptr() == pointer for p, pointer in tensors)


@pytest.mark.shows("ISA-82")
def test_fit_after_a_look_equals_fit_without():
    "Bit for bit"
    weights = []
    for look in (False, True):
        trainer = make_trainer([BatchAugmentationCB(RandErase())], model=make_model(0.5))
        if look:
            trainer.show_image_batch()
        trainer.fit(1, lr=0.1)
        if look:
            trainer.show_image_batch(train=False)
        trainer.fit(1, lr=0.1, keep_opt=True)
        weights.append(trainer.model[2].weight)
    assert torch.equal(*weights)


def test_the_model_stays_on_its_device_and_so_does_the_loss():
    "Although `DeviceCB` moves what it is given"

    class MovesCB(DeviceCB):
        name = "MovesCB"

        def before_batch(self, trainer):
            assert next(trainer.model.parameters()).is_meta and trainer.loss_func.weight.is_meta

    trainer = make_trainer([MovesCB("meta")], loss_func=nn.CrossEntropyLoss(weight=torch.ones(3)))
    trainer.show_image_batch()
    assert not next(trainer.model.parameters()).is_meta and not trainer.loss_func.weight.is_meta


def test_watchers_and_steps_do_not_run():
    class WatchCB:
        order = Order.RECORD

        def before_batch(self, trainer):
            raise AssertionError("a watcher ran")

    class StepCB:
        def predict(self, trainer):
            raise AssertionError("a step ran")

    make_trainer([WatchCB(), StepCB(), MetricsCB(show=False)]).show_image_batch()


@pytest.mark.shows("ISA-82")
def test_validation_images_further_callbacks_and_a_limit():
    trainer = make_trainer([BatchAugmentationCB(RandErase(p=1))])
    data = trainer.dls.valid.dataset
    assert torch.equal(
        pixels(trainer.show_image_batch(train=False)), torch.stack([data[i][0][0] for i in range(8)])
    )
    flipped = trainer.show_image_batch(3, BatchTransformCB(lambda b: (b[0].flip(-1), b[1])), train=False)
    assert torch.equal(pixels(flipped), torch.stack([data[i][0][0].flip(-1) for i in range(3)]))
    shifted = BatchTransformCB(lambda b: ((b[0] - 0.5) / 0.25, b[1]))
    assert torch.allclose(
        pixels(trainer.show_image_batch(2, shifted, train=False, tfm=UnNormalize(0.5, 0.25))),
        torch.stack([data[i][0][0] for i in range(2)]),
        atol=1e-6,
    )


def test_a_split_of_ones_own_and_callbacks_of_any_kind_are_respected():
    class Deep(Trainer):
        def subclassing_method(self):
            self.add_callback(BasicTrainCB())

        def split(self, batch):
            return (batch["deep"]["x"],), (batch["y"],)

    def before_batch(trainer):
        trainer.batch = {"deep": {"x": trainer.batch["deep"]["x"] / 2}, "y": trainer.batch["y"]}

    batches = [{"deep": {"x": torch.rand(4, 3, 6, 6)}, "y": torch.arange(4)}]
    trainer = Deep(
        DataLoaders(batches, batches),
        F.cross_entropy,
        optim.SGD,
        nn.Linear(2, 2),
        [before_batch, NBatchCB(1)],
    )
    axes = trainer.show_image_batch()
    assert torch.equal(pixels(axes), batches[0]["deep"]["x"].permute(0, 2, 3, 1) / 2)
    assert [ax.get_title() for ax in axes.flat] == ["0", "1", "2", "3"]


def test_what_cannot_be_drawn_is_an_error():
    class SkipCB:
        order = Order.DATA

        def before_batch(self, trainer):
            raise CancelBatchException("skipped")

    with pytest.raises(ValueError, match="No batch reached the model"):
        make_trainer([SkipCB()]).show_image_batch()
    with pytest.raises(ValueError, match="is no image"):
        make_trainer([BatchTransformCB(lambda b: (b[0].flatten(1), b[1]))]).show_image_batch()
    trainer = make_trainer()
    trainer.dls.valid = None
    with pytest.raises(ValueError, match="`dls.valid`, which is None"):
        trainer.show_image_batch(train=False)


def test_targets_that_are_no_numbers_leave_no_titles():
    batches = [(torch.rand(4, 6, 6), torch.rand(4, 2))]
    trainer = Trainer(DataLoaders(batches, batches), F.mse_loss, optim.SGD, nn.Linear(2, 2), None)
    with warnings.catch_warnings(action="error"):
        axes = trainer.show_image_batch()
    assert [ax.get_title() for ax in axes.flat] == [""] * 4


def test_a_look_at_a_batch_of_a_trained_trainer_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer = make_trainer([BatchAugmentationCB(RandErase())])
        trainer.fit(1, valid=False)
        trainer.show_image_batch(2)
        trainer.fit(1, valid=False)


def test_epochs_without_a_number_keep_their_place_on_every_axis():
    "Losses that became NaN ended the axis before the metric beside it"
    nan = float("nan")
    rows = [dict(fit=1, epoch=i, train_loss=nan if i else 2.0, accuracy=50.0 + i) for i in range(4)]
    losses, metrics = plot_history(rows)
    assert losses.get_xlim() == metrics.get_xlim() and losses.get_xlim()[1] > 4
