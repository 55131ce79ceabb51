"""Faults that Sonosco's callbacks have, against ours in the same situation."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.device.device import DeviceCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.schedule.attribute_schedule import AttributeSchedulerCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import Order
from isaac_loop.loop.trainer import Trainer
from runs import fit


class Net(nn.Linear):
    window = True


def trainer_with(*cbs, n=7, **kwargs):
    batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(n)]
    return Trainer(
        DataLoaders(batches, batches[:1]),
        F.mse_loss,
        optim.SGD,
        Net(2, 1),
        [BasicTrainCB(), MetricsCB(train_metrics=True), *cbs],
        **kwargs,
    )


class NoteCB:
    "Losses and errors of the batches meant, noted independently"

    order, on_valid = Order.LAST, False

    def __init__(self, every):
        self.every, self.seen = every, {}

    def after_batch(self, trainer):
        if trainer.batch_num % self.every == 0:
            self.seen[trainer.epoch, trainer.batch_num] = (
                trainer.loss.double().item(),
                error(trainer).double().item(),
            )


def error(trainer):
    return (trainer.preds.detach() - trainer.batch[1]).abs().max()


@pytest.mark.shows("SON-11")
@pytest.mark.parametrize("every", [1, 2, 3, 7, 10])
def test_the_batches_meant_are_those_that_are_recorded(every):
    "Every batch is there, and every n-th is a choice made afterwards; the original wrote all but those"
    note = NoteCB(every)
    trainer = fit(trainer_with(RecorderCB(error=error), note), 2)
    rows = [o for o in trainer.history.batches if o["training"]]
    assert [(o["epoch"], o["batch"]) for o in rows] == [(e, b) for e in range(2) for b in range(7)]
    chosen = {(o["epoch"], o["batch"]): (o["loss"], o["error"]) for o in rows if o["batch"] % every == 0}
    assert chosen == note.seen


@pytest.mark.shows("SON-19")
@pytest.mark.parametrize("epoch", [0, 1, 3, 9])
def test_an_attribute_of_the_model_is_switched_after_an_epoch(epoch):
    "For both passes of an epoch, and put back in the end"
    seen = []

    def before_epoch(trainer):
        seen.append((trainer.epoch, trainer.training, trainer.model.window))

    before_epoch.order = Order.LAST
    trainer = fit(
        trainer_with(AttributeSchedulerCB({"model.window": lambda n: n < epoch}, unit="epoch"), before_epoch),
        4,
    )
    assert seen == [(e, training, e < epoch) for e in range(4) for training in (True, False)]
    assert trainer.model.window is True


@pytest.mark.shows("SON-31")
def test_nested_batches_are_moved_at_any_depth():
    "Lists, tuples and dicts within each other; what is no tensor stays"

    class NestedTrainer(Trainer):
        def split(self, batch):
            return (batch["audio"][0][0],), (batch["text"]["y"],)

    batch = dict(
        audio=[(torch.randn(4, 2), "a.wav")], text={"y": torch.randn(4, 1), "sizes": [torch.tensor([3, 1])]}
    )
    seen = []

    def after_batch(trainer):
        seen.append(trainer.batch)

    trainer = NestedTrainer(
        DataLoaders([batch]),
        F.mse_loss,
        optim.SGD,
        nn.Linear(2, 1, device="meta"),
        [DeviceCB("meta"), BasicTrainCB(), after_batch],
    )
    trainer.remove_callback("BasicTrainCB")
    with pytest.MonkeyPatch.context() as m:
        m.setattr("isaac_loop.device.device._check_device", lambda device: None)
        fit(trainer, 1, valid=False)
    (audio, name), text = seen[0]["audio"][0], seen[0]["text"]
    assert {o.device.type for o in (audio, text["y"], text["sizes"][0])} == {"meta"} and name == "a.wav"
