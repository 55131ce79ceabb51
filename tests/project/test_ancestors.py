# ruff: noqa: F405
"""What one writes who comes from isaacai, miniai or fastai: the ways of their notebooks, as they are.

Only names of the libraries' folders differ: everything comes by the star of `isaac_loop.all`.
"""

import inspect

import fastcore.all as fc
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from PIL import Image as PILImage
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from torcheval.metrics import MulticlassAccuracy

from isaac_loop.all import *  # noqa: F403, as its users write

from small import StepsAsMethods

NAMES = ["T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Boot"]


@pytest.fixture(autouse=True)
def no_figures_stay():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def hub():
    "What a data set of pictures looks like when it comes from the hub"
    random = np.random.default_rng(0)
    features = Features(image=Image(), label=ClassLabel(names=NAMES))

    def split(n):
        images = [PILImage.fromarray(random.integers(0, 255, (28, 28), dtype=np.uint8)) for _ in range(n)]
        return Dataset.from_dict(
            dict(image=images, label=[i % 10 for i in range(n)]), features=features
        ).with_transform(to_tensors)

    return DatasetDict(train=split(600), test=split(200))


@inplace
def to_tensors(rows):
    "In the seed's words: `[(TF.to_tensor(o)-xmean)/xstd for o in b['image']]`"
    rows["image"] = [(torch.tensor(np.array(o))[None] / 255 - 0.28) / 0.35 for o in rows["image"]]


@pytest.fixture
def dls(hub):
    set_seed(42)
    return DataLoaders.from_dataset_dict(sample_dataset_dict(DatasetDict(hub), (256, 128)), 64)


def make_trainer(dls, *callbacks, model=None):
    return Trainer(
        dls,
        nn.CrossEntropyLoss(),
        torch.optim.Adam,
        get_model_conv() if model is None else model,
        callbacks=list(callbacks),
    )


# isaacai


@pytest.mark.shows("ISA-96", "ISA-99")
def test_loaders_come_from_the_hub_and_show_what_they_hold(dls):
    x, y = fc.first(dls.train)
    assert x.shape == (64, 1, 28, 28) and y.shape == (64,) and len(dls.train.dataset) == 256
    dls.show_batch()
    titles = [ax.get_title() for ax in plt.gcf().axes if ax.images]
    assert len(titles) == 9 and set(titles) <= set(NAMES)
    dls.show_batch(3, nrows=1, imsize=2)
    assert [ax.get_subplotspec().get_geometry()[:2] for ax in plt.gcf().axes] == [(1, 3)] * 3


def test_models_move_to_the_default_device_and_are_initialised_module_by_module(dls):
    "Modules without weights are passed over"
    model = get_model_conv(norm=nn.BatchNorm2d)
    model.to(def_device)
    xb = fc.first(dls.train)[0]
    fc.test_eq(model(xb.to(def_device)).shape, (64, 10))
    for module in model.modules():
        lsuv_init(model, module, xb.to(def_device))


def test_a_trainer_without_callbacks_can_be_looked_at(dls):
    trainer = make_trainer(dls)
    assert "Conv2d" in str(trainer.summarize_model())
    assert len(trainer.summarize_callbacks()) == 0


def test_one_batch_tries_everything(dls):
    trainer = make_trainer(dls, BasicTrainCB(), MetricsCB(), DeviceCB(), OneBatchCB(), ProgressCB())
    trainer.fit()
    assert trainer.n_updates == 1 and "BasicTrainCB" in str(trainer.summarize_callbacks())


def test_the_usual_run_measures_and_shows(dls, capsys):
    set_seed(1)
    trainer = make_trainer(dls, CoreCBs(Accuracy=MulticlassAccuracy()), OneCycleSchedulerCB())
    trainer.fit(2, lr=0.01)
    assert trainer.history.names() == ["fit", "epoch", "train_loss", "valid_loss", "Accuracy", "elapsed"]
    for lost in ("losses_epoch", "metrics_epoch", "losses_batch"):
        with pytest.raises(AttributeError, match="Here it is `trainer.history"):
            getattr(trainer.MetricsCB, lost)


def test_dicts_are_printed_if_one_likes(dls, capsys):
    make_trainer(dls, BasicTrainCB(), MetricsCB(show="dict", accuracy=MulticlassAccuracy())).fit(1)
    printed = capsys.readouterr().out
    assert (
        printed.startswith("{'accuracy': '0.") and "'train_loss': '2.3" in printed and "'epoch': 0" in printed
    )


def test_the_rate_finder_is_a_callback_of_one_fit(dls, capsys):
    "It says what it found, stays on the trainer and leaves no other trace"
    trainer = make_trainer(dls, BasicTrainCB(), DeviceCB(), MetricsCB(Accuracy=MulticlassAccuracy()))
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.fit(callbacks=[LRFinderCB()])
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert trainer.lr_finder.suggestions() and len(trainer.lr_finder.lrs) > 5
    assert "valley" in capsys.readouterr().out
    trainer.lr_finder.plot()
    assert plt.gcf().axes[0].get_xscale() == "log"


@pytest.mark.parametrize("drawn", ["color_dim", "dead_chart", "plot_stats"])
def test_activations_are_followed_by_a_filter_of_fastcore(dls, drawn):
    trainer = make_trainer(dls, BasicTrainCB(), DeviceCB(), ActivationStatsCB(fc.risinstance(nn.Conv2d)))
    trainer.fit(1)
    getattr(trainer.ActivationStatsCB, drawn)()
    assert plt.gcf().axes


def test_transforms_by_position_change_batches_and_can_be_seen(dls):
    flip = nn.Sequential(nn.Identity(), nn.ReLU())
    trainer = make_trainer(dls, BasicTrainCB(), DeviceCB(), BatchAugmentationCB([flip]))
    trainer.show_image_batch(3)
    shown = [im for ax in plt.gcf().axes for im in ax.images]
    assert len(shown) == 3 and all(im.get_array().min() >= 0 for im in shown)
    assert UnNormalize([0.5], [0.5])(torch.ones(1, 1, 2, 2)).max() == 1


def test_steps_are_changed_by_inheritance(dls):
    class ClippedTrainCB(BasicTrainCB):
        def backward(self, trainer):
            super().backward(trainer)
            nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)

    trainer = make_trainer(dls, ClippedTrainCB())
    trainer.fit(1)
    assert trainer.n_updates == 4


def test_a_callback_may_have_the_base_and_cancel_by_class(dls):
    "The exception needs no text, and the method may call its argument what it likes"

    class FirstBatchCB(Callback):
        order = 100

        def after_batch(self, learn):
            raise CancelFitException

    trainer = make_trainer(dls, BasicTrainCB(), FirstBatchCB())
    trainer.fit()
    assert trainer.n_updates == 1 and Callback.order == 0 and FirstBatchCB.order == 100


def test_a_training_callback_made_from_accelerates_writes_its_own_init(dls):
    "As for a model whose batch is worked out before it is used"

    class TrainWithNoiseCB(AccelerateCB):
        def __init__(self, mixed_precision="no", weight=0.5):
            self.weight = weight
            self.acc = Accelerator(mixed_precision=mixed_precision, cpu=True)

        def before_fit(self, trainer):
            trainer.model, trainer.opt, trainer.dls.train, trainer.dls.valid = self.acc.prepare(
                trainer.model, trainer.opt, trainer.dls.train, trainer.dls.valid
            )

        def before_batch(self, trainer):
            trainer.batch = list(trainer.batch)
            trainer.batch[0] = trainer.batch[0] + self.weight * torch.randn_like(trainer.batch[0])

    trainer = make_trainer(dls, TrainWithNoiseCB(weight=0.1), MetricsCB(show=False), ProgressCB())
    trainer.fit(1, lr=5e-3)
    assert trainer.n_updates == 4 and trainer.history.latest("valid_loss") > 0


@pytest.mark.parametrize("part", [BasicTrainCB, with_cbs, DeviceCB, MetricsCB, MomentumTrainCB, CoreCBs])
def test_the_source_of_every_part_can_be_read(part):
    assert f"{'def' if inspect.isfunction(part) else 'class'} {part.__name__}" in inspect.getsource(part)
    assert part.__name__ in str(show_source(part))


@pytest.mark.shows("ISA-89")
def test_a_trainer_of_a_kind_takes_the_share_of_old_gradients(dls):
    trainer = MomentumTrainer(
        dls, nn.CrossEntropyLoss(), torch.optim.SGD, get_model_conv(), callbacks=[MetricsCB()], momentum=0.9
    )
    trainer.fit(1)
    assert trainer.MomentumTrainCB.momentum == 0.9 and trainer.DeviceCB in trainer.callbacks


# miniai and fastai


@pytest.fixture
def pairs():
    set_seed(0)
    x = torch.randn(96, 1, 8, 8)
    data = TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())
    return DataLoaders(*get_dataloaders(data, data, 32))


def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), GeneralRelu(leak=0.1, sub=0.4), nn.Linear(16, 2))


def test_a_loop_of_methods_is_a_subclass(pairs):
    "The steps written into the trainer itself, as `TrainLearner` has them"

    set_seed(1)
    model = small()
    StepsAsMethods(pairs, F.cross_entropy, optim.SGD, model, None).fit(2, 0.1)
    set_seed(1)
    other = small()
    Trainer(pairs, F.cross_entropy, optim.SGD, other, BasicTrainCB()).fit(2, 0.1)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    wrong = type("WrongTrainer", (Trainer,), {"predict": lambda self, trainer: None})
    with pytest.raises(TypeError, match="Let it take `self` alone, which is the trainer."):
        wrong(pairs, F.cross_entropy, optim.SGD, other, None)


def test_several_inputs_are_said_by_the_loaders():
    x, z = torch.randn(32, 3), torch.randn(32, 3)
    loader = DataLoader(TensorDataset(x, z, x.sum(1, keepdim=True)), 8)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(6, 1)

        def forward(self, x, z):
            return self.out(torch.cat([x, z], 1))

    trainer = Trainer(DataLoaders(loader, loader, n_inp=2), F.mse_loss, optim.SGD, Two(), BasicTrainCB())
    trainer.fit(1)
    assert trainer.n_updates == 4


def test_rates_and_momenta_are_recorded_under_a_schedule(pairs):
    def rate(trainer):
        return trainer.opt.param_groups[0]["lr"]

    def momentum(trainer):
        return trainer.opt.param_groups[0]["betas"][0]

    def schedule(opt):
        return lr_scheduler.OneCycleLR(opt, max_lr=0.06, total_steps=6)

    recorder = RecorderCB(lr=rate, mom=momentum)
    trainer = Trainer(
        pairs, F.cross_entropy, optim.AdamW, small(), [BasicTrainCB(), BatchSchedulerCB(schedule), recorder]
    )
    trainer.fit(2, lr=0.06)
    batches = trainer.history.batches
    assert max(batches["lr"]) > 0.05 > min(batches["lr"]) and min(batches["mom"]) < 0.9
    recorder.plot()
    assert len(plt.gcf().axes) >= 1


def test_predictions_are_captured_with_their_inputs(pairs):
    trainer = Trainer(pairs, F.cross_entropy, optim.SGD, small(), BasicTrainCB())
    preds, targets, inputs = trainer.capture_preds(inps=True)
    assert (len(preds), len(targets), len(inputs)) == (96, 96, 96)


def test_a_batch_is_transformed_in_training_only(pairs):
    seen = []

    def shift(batch):
        seen.append(len(batch))
        return batch[0] + 1, batch[1]

    callbacks = [BasicTrainCB(), BatchTransformCB(shift, on_valid=False), nn_hooks()]
    Trainer(pairs, F.cross_entropy, optim.SGD, small(), callbacks).fit(1)
    assert len(seen) == 3


def nn_hooks():
    return HooksCallback(lambda hook, module, inputs, output: None, module_filter=fc.risinstance(nn.Linear))


def test_weights_are_initialised_and_functions_drawn():
    model = get_model_conv(act=lambda: GeneralRelu(leak=0.1, sub=0.4))
    model.apply(lambda m: init_weights(m, leaky=0.1))
    plot_func(GeneralRelu(leak=0.1, sub=0.4))
    assert plt.gcf().axes[0].lines
    with Hooks(model, lambda hook, module, inputs, output: setattr(hook, "mean", output.mean())) as hooks:
        model(torch.randn(2, 1, 28, 28).to(def_device))
    assert all(hasattr(hook, "mean") for hook in hooks)
    del hooks[0]


def test_an_optimizer_of_ones_own_is_kept(pairs):
    model = small()
    trainer = Trainer(pairs, F.cross_entropy, None, model, BasicTrainCB())
    trainer.opt = optim.SGD(model.parameters(), 0.05)
    trainer.fit(1)
    assert trainer.opt.param_groups[0]["lr"] == 0.05 and trainer.n_updates == 3


def test_random_patches_change_pictures(pairs):
    x = next(iter(pairs.train))[0]
    for patch in (RandErase(p=1.0), RandCopy(p=1.0)):
        assert patch(x.clone()).shape == x.shape
    clean_memory()
