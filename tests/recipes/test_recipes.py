"""Groups of callbacks against the same ones listed singly, and the recipes of the tutorials in small.

The hub cannot be reached from a test, so the recipes for larger images are run on the built-in digits, and
a residual network stands in for the one of timm.
"""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torcheval.metrics import MulticlassAccuracy
from torchmetrics.classification import MulticlassF1Score

import isaac_loop.tune.batch_finder  # noqa: F401 (more methods of the trainer)
import isaac_loop.tune.lr_finder  # noqa: F401
import isaac_loop.evaluate.evaluation  # noqa: F401
import isaac_loop.show.plots  # noqa: F401
from isaac_loop.recipes.demo import plot_path
from isaac_loop.inspection.activations import ActivationStatsCB
from isaac_loop.device.device import DeviceCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.show.progress import ProgressCB
from isaac_loop.schedule.schedules import OneCycleSchedulerCB
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.train.training import BasicTrainCB, NBatchCB, OneBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.recipes.demo import digit_loaders
from isaac_loop.inspection.loop_tables import callback_table
from isaac_loop.models.small_models import conv, get_model_conv, get_model_timm
from isaac_loop.recipes.recipes import CoreCBs
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer


def new_model():
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))


def new_trainer(callbacks):
    set_seed(1)
    batches = [(x := torch.randn(16, 2), (x[:, 0] > 0).long()) for _ in range(6)]
    return Trainer(DataLoaders(batches, batches[:2]), F.cross_entropy, optim.Adam, new_model(), callbacks)


def one_by_one():
    return [DeviceCB("cpu"), BasicTrainCB(), MetricsCB(accuracy=MulticlassAccuracy()), ProgressCB()]


def rows(trainer):
    return [{k: v for k, v in o.items() if k != "elapsed"} for o in trainer.history]


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


# The group and the list


@pytest.mark.shows("ISA-38")
def test_the_group_is_the_five_callbacks_in_one():
    "The usual callbacks, `ActivationStatsCB` among them only when a filter is given"
    kinds = [DeviceCB, BasicTrainCB, MetricsCB, ProgressCB]
    assert [type(o) for o in CoreCBs().callbacks] == kinds
    group = CoreCBs("cpu", nn.ReLU, accuracy=MulticlassAccuracy(), train_metrics=True)
    device, _, metrics, _, activations = group.callbacks
    assert [type(o) for o in group.callbacks] == [*kinds, ActivationStatsCB]
    assert device.device == torch.device("cpu") and activations.module_filter is nn.ReLU
    assert list(metrics.metrics) == ["accuracy"] and metrics.train_metrics
    assert repr(group) == "CoreCBs(DeviceCB, BasicTrainCB, MetricsCB, ProgressCB, ActivationStatsCB)"


@pytest.mark.shows("ISA-37", "ISA-38")
def test_training_with_the_group_is_training_with_the_list(capsys):
    "Same weights bit for bit, same rows, same table of what runs"
    ours, theirs = new_trainer(CoreCBs("cpu", accuracy=MulticlassAccuracy())), new_trainer(one_by_one())
    shown = []
    for trainer in (ours, theirs):
        set_seed(3)
        trainer.fit(2, lr=1e-2)
        shown.append(re.sub(r"\d\d:\d\d", "--:--", capsys.readouterr().out))  # How long it took may differ
    assert torch.equal(weights(ours), weights(theirs)) and rows(ours) == rows(theirs) and len(rows(ours)) == 2
    assert shown[0] == shown[1] and "accuracy" in shown[0]
    assert callback_table(ours).rows == callback_table(theirs).rows


@pytest.mark.shows("ISA-38")
def test_watching_activations_changes_no_weight():
    plain, watched = new_trainer(CoreCBs("cpu")), new_trainer(CoreCBs("cpu", nn.ReLU))
    for trainer in (plain, watched):
        set_seed(3)
        trainer.fit(1)
    assert torch.equal(weights(plain), weights(watched))
    assert not hasattr(plain, "ActivationStatsCB") and len(watched.ActivationStatsCB.stats["1"]) == 6
    assert all(not o._forward_hooks for o in watched.model.modules())


@pytest.mark.parametrize(
    "make", [lambda m: CoreCBs(m), lambda m: CoreCBs("cpu", m)], ids=["device", "module_filter"]
)
@pytest.mark.parametrize(
    "metric", [MulticlassAccuracy, lambda: MulticlassF1Score(2)], ids=["torcheval", "torchmetrics"]
)
def test_a_metric_without_its_name_is_refused_where_it_was_typed(make, metric):
    with pytest.raises(TypeError, match="which is a metric.*by name.*CoreCBs\\(accuracy="):
        make(metric())


@pytest.mark.parametrize(
    "kwargs, error",
    [
        (dict(accuracy=MulticlassAccuracy), "only an object can count"),
        (dict(accuracy=3), "`accuracy=3` is no metric, and `CoreCBs` has no option"),
        (dict(train_metric=True), "Did you mean `train_metrics`"),
        (dict(device="cupboard"), "PyTorch does not know"),
    ],
)
def test_mistakes_in_settings_are_those_of_the_members(kwargs, error):
    with pytest.raises((TypeError, ValueError), match=error):
        CoreCBs(**kwargs)


# Together with others


@pytest.mark.shows("ISA-115")
def test_a_group_plus_one_batch_ends_after_one_batch():
    "One update, hooks gone, a row for what was trained, and the trainer as good as new"
    trainer = new_trainer([CoreCBs("cpu", nn.ReLU, accuracy=MulticlassAccuracy()), OneBatchCB()])
    trainer.fit(3)
    assert (
        trainer.n_updates == 1
        and len(trainer.history.batches) == 1
        and len(trainer.ActivationStatsCB.stats["1"]) == 1
    )
    assert list(trainer.history[0]) == ["fit", "epoch", "train_loss", "elapsed"]
    assert all(not o._forward_hooks for o in trainer.model.modules())
    trainer.remove_callback("OneBatchCB", delete=True)
    trainer.fit(1)
    assert trainer.n_updates == 6 and "accuracy" in trainer.history[-1]


@pytest.mark.shows("ISA-115")
def test_one_batch_for_one_fit_only():
    "The group stays, the guest goes"
    trainer = new_trainer(CoreCBs("cpu"))
    trainer.fit(1, callbacks=OneBatchCB())
    assert trainer.n_updates == 1
    trainer.fit(1)
    assert trainer.n_updates == 6


def test_the_group_and_one_of_its_members_twice_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="callback called `DeviceCB` already"):
        new_trainer([CoreCBs("cpu"), DeviceCB("cpu")])
    with pytest.raises(ValueError, match="called `.*` already"):
        new_trainer([CoreCBs("cpu"), CoreCBs("cpu")])


class MyStepCB(BasicTrainCB):
    def step(self, trainer):
        trainer.opt.step()


def test_steps_of_ones_own_take_the_place_of_the_members():
    "`Leave out BasicTrainCB` was no help for a member of a group"
    with pytest.raises(
        ValueError,
        match=r"Leave out `BasicTrainCB`, which came with the group `CoreCBs` "
        r"\(hand the other one to the group.*`CoreCBs\(train=...\)`",
    ):
        new_trainer([CoreCBs("cpu"), MyStepCB()]).fit(1)
    with pytest.raises(
        ValueError,
        match=r"Leave out `BasicTrainCB`\. To do only some steps .* with `@replaces` in a class that is no "
        r"subclass of `BasicTrainCB`\.",
    ):
        new_trainer([CoreCBs("cpu", train=MyStepCB()), BasicTrainCB()]).fit(1)
    ours, theirs = new_trainer([CoreCBs("cpu", train=MyStepCB())]), new_trainer([CoreCBs("cpu")])
    for trainer in (ours, theirs):
        trainer.fit(2, lr=0.01)
    assert torch.equal(weights(ours), weights(theirs)) and type(ours.callbacks[2]) is MyStepCB
    assert repr(CoreCBs("cpu", train=MyStepCB())) == "CoreCBs(DeviceCB, MyStepCB, MetricsCB, ProgressCB)"


@pytest.mark.parametrize(
    "train, error",
    [
        (MyStepCB, r"Make one: `MyStepCB\(\)`"),
        (True, "does none of the steps"),
        (NBatchCB(1), "does none of the steps"),
        (MulticlassAccuracy(), "which is a metric"),
    ],
)
def test_what_does_no_step_is_not_taken_for_training(train, error):
    with pytest.raises(TypeError, match=error):
        CoreCBs("cpu", train=train)


def test_a_metric_that_stands_where_the_device_does_is_told_how_to_be_given():
    def accuracy(preds, targets):
        return preds.argmax(1) == targets

    with pytest.raises(TypeError, match=r"`device` .*pass it by name, as in `CoreCBs\(accuracy=f\)`"):
        CoreCBs(accuracy)
    for device in ("cpu", torch.device("cpu"), lambda: "cpu"):
        assert type(CoreCBs(device).callbacks[0]).__name__ == "DeviceCB"


def test_a_group_can_be_silent_and_take_functions(capsys):
    trainer = new_trainer(
        [
            CoreCBs(
                "cpu",
                progress=False,
                show=False,
                weigh="mean",
                error=lambda preds, targets: preds.argmax(1) != targets,
            )
        ]
    )
    trainer.fit(1)
    assert (
        capsys.readouterr().out == ""
        and 0 <= trainer.history.latest("error") <= 1
        and trainer.MetricsCB.weigh == "mean"
    )


@pytest.mark.shows("ISA-37")
def test_two_trainers_may_take_over_each_others_callbacks():
    "A list that holds a group and its members means each of them once"
    first = new_trainer(CoreCBs("cpu"))
    second = new_trainer(first.callbacks)
    assert all(a is b for a, b in zip(first.callbacks, second.callbacks, strict=True))
    inner = SimpleNamespace(name="inner", callbacks=[NBatchCB(1)])
    outer = SimpleNamespace(name="outer", callbacks=[inner])
    third = new_trainer([inner, outer, inner.callbacks[0]])
    assert [getattr(o, "name", "NBatchCB") for o in third.callbacks] == ["inner", "outer", "NBatchCB"]
    with pytest.raises(ValueError, match="was added already"):
        new_trainer([[o := NBatchCB(1)], o])


@pytest.mark.shows("ISA-37")
def test_a_trainer_with_the_group_can_be_searched_evaluated_and_shown():
    "Side runs keep the members that work and leave out those that watch"
    trainer = new_trainer([CoreCBs("cpu", nn.ReLU, accuracy=MulticlassAccuracy())])
    trainer.fit(1)
    before, n = weights(trainer), len(trainer.history)
    assert len(trainer.lr_find(start_lr=1e-2, n_batches=6).lrs) == 6 and trainer.find_batch_size(2, 8) == 8
    assert len(trainer.get_preds()) == 32
    assert trainer.validate()["valid_loss"] == pytest.approx(trainer.history.latest("valid_loss"))
    assert torch.equal(before, weights(trainer)) and len(trainer.history) == n
    assert len(trainer.callbacks) == 6 and len(trainer.ActivationStatsCB.stats["1"]) == 6


def test_an_image_batch_is_shown_through_the_group():
    trainer = Trainer(
        DataLoaders([(torch.rand(4, 1, 5, 5), torch.arange(4))]),
        F.cross_entropy,
        optim.SGD,
        nn.Sequential(nn.Flatten(), nn.Linear(25, 4)),
        CoreCBs("cpu"),
    )
    assert [o.get_title() for o in trainer.show_image_batch().flat] == ["0", "1", "2", "3"]
    assert "DeviceCB" in repr(trainer)


def test_tracking_names_the_members():
    trainer = new_trainer([CoreCBs("cpu"), TrackingCB()])
    trainer.fit(1)
    row = trainer.TrackingCB.fit_stats[0]
    assert {"CoreCBs", "DeviceCB", "BasicTrainCB"} <= set(row["callbacks"])


@pytest.mark.shows("ISA-37")
def test_the_group_leaves_with_all_it_brought():
    trainer = new_trainer([CoreCBs("cpu", nn.ReLU), NBatchCB(1)])
    trainer.remove_callback(CoreCBs, delete=True)
    assert [type(o) for o in trainer.callbacks] == [NBatchCB] and not hasattr(trainer, "MetricsCB")


# Recipes for images


class ResBlock(nn.Module):
    def __init__(self, n_inp, n_out):
        super().__init__()
        self.convs = nn.Sequential(
            conv(n_inp, n_out, norm=nn.BatchNorm2d),
            conv(n_out, n_out, stride=1, act=None, norm=nn.BatchNorm2d),
        )
        self.skip = conv(n_inp, n_out, kernel_size=1, act=None, norm=nn.BatchNorm2d)

    def forward(self, x):
        return F.relu(self.convs(x) + self.skip(x))


def stand_in(name, in_chans=3, num_classes=1000, **kwargs):
    "As timm's `create_model`, for one name"
    assert name == "resnet18" and not kwargs
    return nn.Sequential(
        conv(in_chans, 32, stride=1, norm=nn.BatchNorm2d),
        ResBlock(32, 64),
        ResBlock(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    )


def five_epochs(model):
    "Five epochs of one cycle on the digits; the accuracy on images that were not trained on"
    set_seed(42)
    trainer = Trainer(
        digit_loaders(),
        F.cross_entropy,
        optim.Adam,
        model,
        [CoreCBs("cpu", accuracy=MulticlassAccuracy()), OneCycleSchedulerCB()],
    )
    trainer.fit(5, lr=1e-2)
    return trainer.history["accuracy"]


@pytest.mark.shows("ISA-111")
def test_five_epochs_of_one_cycle_with_the_small_conv_net_pass_90_percent():
    "The recipe for Fashion-MNIST, on the built-in digits"
    accuracy = five_epochs(get_model_conv(nfs=(1, 32, 64, 128), norm=nn.BatchNorm2d))
    assert len(accuracy) == 5 and accuracy[-1] > 0.9


@pytest.mark.shows("ISA-112")
def test_a_resnet_of_one_input_channel_by_timm_passes_90_percent(monkeypatch):
    "The same with `get_model_timm`; timm's function gets the name and the number of channels and classes"
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=stand_in))
    model = get_model_timm("resnet18", in_chans=1, num_classes=10)
    assert model[0][0].in_channels == 1
    assert five_epochs(model)[-1] > 0.9


def test_a_plot_goes_into_a_folder_that_is_there(tmp_path, monkeypatch):
    assert plot_path(tmp_path) == tmp_path.resolve() / "loss.png"
    monkeypatch.chdir(tmp_path)
    assert plot_path(".") == tmp_path.resolve() / "loss.png"
    assert plot_path("curves") == tmp_path.resolve() / "curves.png"
