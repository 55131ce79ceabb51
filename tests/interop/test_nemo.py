"Callbacks of NeMo 0.x through `adapt`; it wants torch 1.x, so they are written from its documentation."

from types import SimpleNamespace

import pytest
import torch
from torch import optim
from torch.nn import functional as F

from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.inspection.loop_tables import summarize_callbacks  # noqa: F401  A method of the trainer
from isaac_loop.interop.adapters import adapt
from isaac_loop.loop.events import CancelBatchException, CancelStepException, Order
from isaac_loop.loop.spans import with_cbs
from isaac_loop.loop.trainer import Trainer
from foreign import X, Y, Nemo010, loaders, make_model, ours, silent


class Nemo011:
    "In the manner of 0.11: methods take a state"

    def __init__(self):
        self.seen = []

    def on_train_start(self, state):
        self.seen.append(("train_start", state["step"]))

    def on_batch_start(self, state):
        self.seen.append(("batch_start", state["step"]))

    def on_batch_end(self, state):
        self.seen.append(("batch_end", state["step"]))

    def on_step_start(self, state):
        self.seen.append(("step_start", state["step"]))

    def on_step_end(self, state):
        self.seen.append(
            (
                "step_end",
                state["step"],
                state["epoch"],
                state["tensors"]["loss"].item(),
                tuple(state.get_tensor("preds").shape),
            )
        )

    def on_train_end(self, state):
        self.seen.append(("train_end", state["step"]))


@pytest.mark.shows("NEMO-01 to NEMO-05")
def test_nemo_callbacks_get_their_events_once_per_update():
    "A batch that only accumulates is no iteration; the rate and the ranks are known"
    nemo, other = Nemo010(), Nemo010()
    ours(adapt(nemo), adapt(other, name="other"), AccumulationCB(2), n_epochs=1)
    rows = [
        ("action_start", 0),
        ("epoch_start", 0),
        *((f"iteration_{o}", n) for n in range(3) for o in ("start", "end")),
        ("epoch_end", 3),
        ("action_end", 3),
    ]
    assert (
        [o[:2] for o in nemo.seen] == rows
        and all(o[2:] == (0.5, 0, 0) for o in nemo.seen)
        and other.seen == nemo.seen
    )


@pytest.mark.shows("NEMO-02", "NEMO-03", "NEMO-07")
def test_nemo_states_give_batches_steps_and_tensors_by_name():
    nemo, losses = Nemo011(), []

    class LossCB:
        on_valid = False

        def after_step(self, trainer):
            losses.append(trainer.loss.item())

    mine = ours(adapt(nemo), LossCB(), AccumulationCB(2), n_epochs=1)
    assert [o[0] for o in nemo.seen] == [
        "train_start",
        *["step_start", "batch_start", "batch_end", "batch_start", "batch_end", "step_end"] * 2,
        "step_start",
        "batch_start",
        "batch_end",
        "step_end",
        "train_end",
    ]
    assert [o[1] for o in nemo.seen if o[0] == "batch_end"] == [0, 0, 1, 1, 2]
    ends = [o for o in nemo.seen if o[0] == "step_end"]
    assert (
        [o[1:3] for o in ends] == [(0, 0), (1, 0), (2, 0)]
        and [o[3] for o in ends] == losses
        and ends[0][4] == (8, 2)
    )
    facade = mine.Nemo011.facade
    assert {"input_0", "target_0"} <= set(facade.tensors)
    with pytest.raises(LookupError, match="no tensor `inputs`.*Did you mean `input_0`"):
        facade.get_tensor("inputs")


def test_the_rate_is_that_of_the_fit_also_in_a_second_one():
    nemo = Nemo010()
    trainer = ours(adapt(nemo), n_epochs=1)
    silent(trainer.fit, 1, lr=0.25)
    rates = [o[2] for o in nemo.seen if o[0] == "iteration_end"]
    assert rates == [0.5] * 5 + [0.25] * 5


@pytest.mark.parametrize("n", [1, 2])
def test_a_batch_ends_when_its_gradients_are_there_before_they_are_clipped(n):
    "The loss is its own, also where the last window weighs batches of different sizes"
    ends, gradients = [], []

    def on_batch_end(state):
        norm = torch.cat([p.grad.flatten() for p in state.model.parameters()]).norm().item()
        ends.append((state.step, state.get_tensor("loss").item(), norm))

    class WatchCB:
        on_valid, order = False, Order.FIRST + 3

        def after_get_loss(self, trainer):
            self.loss = trainer.loss.item()

        def after_backward(self, trainer):
            norm = torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).norm().item()
            gradients.append((trainer.n_updates, self.loss, norm))

    batches = [(X[i:j], Y[i:j]) for i, j in ((0, 8), (8, 16), (16, 24), (24, 28), (28, 40))]
    dls = DataLoaders(batches, batches[:1])
    ours(adapt(on_batch_end), WatchCB(), ClipGradCB(1e-6), AccumulationCB(n), dls=dls, n_epochs=2)
    assert ends == gradients and [o[0] for o in ends[:5]] == [i // n for i in range(5)]


def test_a_batch_ends_once_whatever_happens_in_it():
    "No gradients at all, and a trainer that goes backward twice"
    ends = []

    class NoneCB:
        def before_backward(self, trainer):
            raise CancelStepException("not now")

    class Twice(Trainer):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            self.run_callbacks("predict", "get_loss")
            if self.training:
                self.run_callbacks("backward", "step", "zero_grad")
                self.run_callbacks("predict", "get_loss", "backward", "step", "zero_grad")

    ours(adapt(SimpleNamespace(on_batch_end=lambda state: ends.append(state.epoch))), NoneCB(), n_epochs=1)
    assert ends == [0] * 5
    ends.clear()
    cbs = [BasicTrainCB(), adapt(SimpleNamespace(on_batch_end=lambda state: ends.append(state.epoch)))]
    Twice(loaders(), F.cross_entropy, optim.SGD, make_model(), cbs).fit(1)
    assert ends == [0] * 5


@pytest.mark.shows("NEMO-06")
def test_any_object_is_a_callback_and_there_may_be_several_of_a_kind():
    "NeMo takes only its own base class, and one loss logger at a time"

    class Ducks:
        def on_iteration_end(self, state):
            self.n = state.step

    ducks = Ducks(), Ducks()
    ours(*(adapt(o, name=f"duck{i}") for i, o in enumerate(ducks)))
    assert [o.n for o in ducks] == [14, 14]
