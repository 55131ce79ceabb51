"A before and an after around whoever provides a step: what callbacks wrapped in one another would be for."

import copy
import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import (
    BasicTrainCB,
    CancelBatchException,
    CancelEpochException,
    CancelStepException,
    DataLoaders,
    MixedPrecisionCB,
    Order,
    ProfilerCB,
    Trainer,
    replaces,
)


@pytest.mark.shows("MIN-16")
def test_callbacks_stand_around_the_provider_of_a_step_in_layers():
    "The lowest order is the outermost layer, and nobody knows the others"
    seen = []

    def layer(name, at):
        class LayerCB:
            order = at

            def before_step(self, trainer):
                seen.append(f"{name} opens")

            def cleanup_step(self, trainer):
                seen.append(f"{name} closes")

        cb = LayerCB()
        cb.name = name
        return cb

    class OtherStepCB:
        @replaces
        def step(self, trainer):
            seen.append("step")
            trainer.opt.step()

    batches = [(torch.randn(4, 1), torch.randn(4, 1))]
    trainer = Trainer(
        DataLoaders(batches),
        F.mse_loss,
        optim.SGD,
        nn.Linear(1, 1),
        [BasicTrainCB(), OtherStepCB(), layer("inner", Order.STEP - 1), layer("outer", Order.FIRST)],
    )
    trainer.fit(1, valid=False)
    assert seen == ["outer opens", "inner opens", "step", "inner closes", "outer closes"]


@pytest.mark.shows("MIN-12", "MIN-14", "MIN-16")
def test_precision_and_profiler_wrap_plain_training_without_touching_it():
    "The unfinished note's own example: tracer and mixed precision around the plain training callback"
    torch.manual_seed(0)
    batches, model = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(5)], nn.Linear(4, 1)

    def trained(*callbacks):
        trainer = Trainer(
            DataLoaders(batches), F.mse_loss, optim.SGD, copy.deepcopy(model), [BasicTrainCB(), *callbacks]
        )
        trainer.fit(1, 0.1, valid=False)
        return trainer.model.weight

    assert torch.equal(trained(MixedPrecisionCB()), trained(MixedPrecisionCB(), ProfilerCB()))
    assert not torch.equal(trained(), trained(MixedPrecisionCB()))


@pytest.mark.parametrize("scale, epochs", [(2.0**127, [0]), (2.0**16, [])])
def test_an_epoch_without_a_step_is_told_of(scale, epochs):
    "Every fp16 step of the first epoch overflows; the scale falls, and the second epoch learns"
    batches = [(torch.full((4, 2), 8.0), torch.ones(4, 1))] * 110
    trainer = Trainer(
        DataLoaders(batches),
        F.mse_loss,
        optim.SGD,
        nn.Linear(2, 1),
        [BasicTrainCB(), MixedPrecisionCB("float16", init_scale=scale)],
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(2, lr=1e-4, valid=False)
    assert [
        f"In epoch {o} a gradient overflowed in every one of 110 steps" in str(w.message)
        for o, w in zip(epochs, told, strict=True)
    ] == [True] * len(epochs)
    assert trainer.n_updates > 0


def test_a_scaled_loss_is_given_back():
    "Only `backward` sees it; whoever records afterwards gets the loss as it is"
    seen = []

    def after_batch(trainer):
        seen.append(trainer.loss.item())

    batches, model = [(torch.randn(8, 2), torch.randn(8, 1)) for _ in range(3)], nn.Linear(2, 1)
    for cbs in ([], [MixedPrecisionCB("float16", init_scale=2.0**10)]):
        Trainer(
            DataLoaders(batches),
            F.mse_loss,
            optim.SGD,
            copy.deepcopy(model),
            [BasicTrainCB(), *cbs, after_batch],
        ).fit(1, 0.1, valid=False)
    assert seen[3:] == pytest.approx(seen[:3], rel=0.01)


@pytest.mark.parametrize("cancel", [CancelStepException, CancelBatchException, CancelEpochException])
@pytest.mark.parametrize("order", [Order.FIRST, Order.STEP])
def test_an_update_that_is_left_out_in_float16_is_as_by_hand(cancel, order):
    "The next batch failed, its gradients already un-scaled; and those that stay are added to scaled ones"
    batches = [(torch.randn(8, 2), torch.randn(8, 1)) for _ in range(5)]
    first = nn.Linear(2, 1)

    def before_step(trainer):
        if trainer.batch_num == 2:
            raise cancel

    before_step.order = order
    trainer = Trainer(
        DataLoaders(batches),
        F.mse_loss,
        optim.SGD,
        copy.deepcopy(first),
        [BasicTrainCB(), MixedPrecisionCB("float16", init_scale=2.0**10), before_step],
    )
    trainer.fit(2, lr=0.1, valid=False)
    opt, scaler = optim.SGD(first.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(2):
        for i, (x, y) in enumerate(batches):
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(first(x), y)
            scaler.scale(loss).backward()
            if i == 2 and cancel is CancelEpochException:
                break
            if i != 2:
                scaler.step(opt)
                scaler.update()
            if i != 2 or cancel is CancelStepException:
                opt.zero_grad()
    assert torch.equal(trainer.model.weight, first.weight) and trainer.n_updates == (
        4 if cancel is CancelEpochException else 8
    )
