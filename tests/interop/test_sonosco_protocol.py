"Callbacks of Sonosco through `adapt`; it cannot be installed here, so they are written from its pages."

import pytest
import torch
from torch import optim
from torch.nn import functional as F
from torcheval.metrics import MulticlassAccuracy

from waiting import InsideCB, RefuseToWait
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.stop.limits import LimitCB
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.loop.events import CancelBatchException, Order
from isaac_loop.loop.spans import with_cbs
from isaac_loop.inspection.loop_tables import summarize_callbacks  # noqa: F401  A method of the trainer
from isaac_loop.interop.adapters import adapt
from isaac_loop.loop.trainer import Trainer
from foreign import loaders, make_model, ours, Plain, same_weights, silent


@pytest.mark.shows("SON-01", "SON-02", "SON-03", "SON-05", "SON-08", "SON-32")
def test_a_plain_callback_is_called_after_every_update_without_gradients_and_closed():
    "Epochs from 1, steps from 0; not in validation passes; what it computes has none, weights have theirs"
    plain, weights = Plain(), []

    class WeightsCB:
        on_valid = False

        def after_step(self, trainer):
            weights.append(next(trainer.model.parameters()).sum().item())

    mine = ours(adapt(plain), WeightsCB())
    assert [o[:2] for o in plain.calls] == [(epoch, step) for epoch in (1, 2, 3) for step in range(5)]
    assert (
        not any(o[2] for o in plain.calls)
        and [o[3] for o in plain.calls] == weights
        and not any(o[4] for o in plain.calls)
    )
    assert plain.closed == 1 and mine.Plain.foreign is plain and same_weights(mine.model, ours().model)


class LayerwiseGradientNorm:
    "Theirs: the norm of each layer in each batch, and a mean at the end of the epoch"

    def __init__(self):
        self.batches, self.means = {}, {}

    def __call__(self, epoch, step, performance_measures, context):
        for name, param in context.model.named_parameters():
            if param.grad is not None:
                self.batches.setdefault(name, []).append(param.grad.norm().item())
        if step == len(context.train_data_loader) - 1:
            for name, norms in self.batches.items():
                self.means.setdefault(name, []).append(sum(norms) / len(norms))
            self.batches = {}


@pytest.mark.parametrize("test_step", [1, 50])
def test_gradients_of_the_batch_are_there_also_beside_a_validation(test_step):
    norms, seen = LayerwiseGradientNorm(), []

    class WatchCB:
        on_valid = False

        def before_step(self, trainer):
            seen.append({name: p.grad.norm().item() for name, p in trainer.model.named_parameters()})

    reads = Plain(lambda epoch, step, measures, trainer: dict(measures))
    mine = ours(adapt(reads, test_step=test_step), adapt(norms), WatchCB(), n_epochs=2)
    for name, means in norms.means.items():
        assert means == [sum(o[name] for o in seen[i : i + 5]) / 5 for i in (0, 5)]
    assert len(norms.means) == 6 and same_weights(mine.model, ours(n_epochs=2).model)


def test_with_several_batches_to_an_update_each_is_told_once_and_has_what_is_gathered():
    "5 batches, of which the last closes a window of its own"
    seen, updates = [], []

    def look(epoch, step, measures, trainer):
        grad = next(trainer.model.parameters()).grad
        seen.append((step, trainer.n_updates, grad is not None))

    class UpdatesCB:
        on_valid = False

        def after_batch(self, trainer):
            updates.append((trainer.batch_num, trainer.n_updates, True))

    ours(adapt(look), UpdatesCB(), AccumulationCB(2), n_epochs=1)
    assert seen == updates and [o[1] for o in seen] == [0, 1, 1, 2, 3]


def test_a_trainer_with_several_updates_in_a_batch_calls_once_at_its_end():
    class Twice(Trainer):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            self.run_callbacks("predict", "get_loss")
            if self.training:
                self.run_callbacks("backward", "step", "zero_grad")
                self.run_callbacks("predict", "get_loss", "backward", "step", "zero_grad")

    seen = []
    look = adapt(lambda epoch, step, measures, trainer: seen.append((step, trainer.n_updates)), name="look")
    Twice(loaders(), F.cross_entropy, optim.SGD, make_model(), [BasicTrainCB(), look]).fit(1)
    assert seen == [(step, 2 * step + 2) for step in range(5)]


class EarlyStopping:
    "Theirs: it looks at the last batch of an epoch, and sets what the trainer looks at"

    def __init__(self, patience):
        self.patience, self.best, self.n_bad = patience, float("inf"), 0

    def __call__(self, epoch, step, performance_measures, context):
        if step != len(context.train_data_loader) - 1 or "val_loss" not in performance_measures:
            return
        loss = performance_measures["val_loss"]
        self.n_bad = 0 if loss < self.best - 0.05 else self.n_bad + 1
        self.best = min(loss, self.best)
        if self.n_bad >= self.patience:
            context._stop_training = True


def test_callbacks_that_ask_for_the_loaders_of_their_context_work():
    stops = EarlyStopping(2)
    mine = ours(adapt(stops), MetricsCB(accuracy=MulticlassAccuracy()), n_epochs=20)
    assert mine.n_updates % 5 == 0 and 10 < mine.n_updates < 100 and "asked to stop" in mine.stop_reason
    assert stops.best == pytest.approx(min(mine.history["valid_loss"]))


def test_a_context_has_the_names_of_theirs():
    seen = []

    def look(epoch, step, measures, context):
        names = "train_data_loader", "val_data_loader", "test_data_loader", "metrics", "test_step"
        seen.append([getattr(context, name) for name in names])
        assert context.performance_measures is measures
        assert context.loss is mine.loss and context.loss_func is mine.loss_func

    dls, accuracy = loaders(), MulticlassAccuracy()
    cbs = [BasicTrainCB(), MetricsCB(accuracy=accuracy), adapt(look, test_step=7), adapt(Plain())]
    mine = Trainer(dls, F.cross_entropy, optim.SGD, make_model(), cbs)
    silent(mine.fit, 1)
    assert seen == [[dls.train, dls.valid, None, [accuracy], 7]] * 5


def test_another_loader_in_the_place_of_ours_is_walked():
    steps = []

    def shorten(epoch, step, measures, context):
        steps.append((epoch, step))
        context.train_data_loader = list(context.train_data_loader)[:2]

    ours(adapt(shorten), n_epochs=2)
    assert steps == [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 0), (2, 1)]


@pytest.mark.shows("SON-02")
def test_a_plain_callback_is_closed_after_a_stop_and_after_an_error():
    "Theirs was not closed after an error"
    plain = Plain()
    ours(adapt(plain), LimitCB(updates=2))
    assert plain.closed == 1 and len(plain.calls) == 2

    def fail(*args):
        raise RuntimeError("broken")

    for broken in (Plain(fail), Plain()):

        def after_batch(trainer):
            raise RuntimeError("broken")

        with pytest.raises(RuntimeError, match="broken"):
            ours(adapt(broken), after_batch)
        assert broken.closed == 1


@pytest.mark.shows("SON-04")
def test_measures_are_means_since_the_last_refresh_and_the_validation_joins_at_the_end():
    "The first batch has measures, too; metrics are those of the validation"
    seen, losses, norms = [], [], []

    class WatchCB:
        on_valid, order = False, Order.REPORT

        def before_step(self, trainer):
            norms.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).norm().item())

        def after_batch(self, trainer):
            losses.append(trainer.loss.item())

    mine = ours(
        adapt(Plain(lambda e, s, m, c: seen.append(dict(m))), test_step=2),
        MetricsCB(accuracy=MulticlassAccuracy()),
        WatchCB(),
        n_epochs=2,
    )
    mean = lambda x, *i: pytest.approx(sum(x[o] for o in i) / len(i))
    assert [o["loss"] for o in seen[:5]] == [
        mean(losses, 0),
        mean(losses, 0, 1),
        mean(losses, 0, 1),
        mean(losses, 2, 3),
        mean(losses, 4),
    ]
    assert [o["gradient_norm"] for o in seen[:5]] == [
        mean(norms, 0),
        mean(norms, 0, 1),
        mean(norms, 0, 1),
        mean(norms, 2, 3),
        mean(norms, 4),
    ]
    assert [set(o) for o in seen[:5]] == [{"loss", "gradient_norm"}] * 4 + [
        {"loss", "gradient_norm", "val_loss", "val_accuracy"}
    ]
    assert [seen[o]["val_loss"] for o in (4, 9)] == [
        pytest.approx(o) for o in mine.history["valid_loss"]
    ] and seen[9]["val_accuracy"] == mine.history["accuracy"][-1]


@pytest.mark.shows("SON-04")
def test_measures_that_nobody_reads_wait_for_nothing():
    "No number is asked from the device, and no validation pass is run"
    passes = []

    class CountsCB:
        order = Order.STEP

        def before_epoch(self, trainer):
            passes.append(trainer.training)

    mode = RefuseToWait()
    with mode:
        ours(
            adapt(lambda epoch, step, measures, trainer: "val_loss" in measures, name="plain", test_step=2),
            CountsCB(),
            InsideCB(mode),
        )
    assert passes == [True, False] * 3

    def read(epoch, step, measures, trainer):
        return measures["loss"]

    with pytest.raises(AssertionError), mode:
        ours(adapt(read), InsideCB(mode))
    mode.inside = False


@pytest.mark.shows("SON-04")
def test_a_validation_on_the_last_batch_changes_nothing():
    assert same_weights(ours(adapt(lambda e, s, m, c: dict(m), name="plain")).model, ours().model)


@pytest.mark.shows("SON-06")
def test_stop_training_takes_effect_at_the_end_of_the_epoch():
    plain = Plain(
        lambda epoch, step, measures, trainer: trainer.stop_training() if (epoch, step) == (2, 1) else None
    )
    mine = ours(adapt(plain), n_epochs=5)
    assert plain.calls[-1][:2] == (2, 4) and mine.n_updates == 10 and "asked to stop" in mine.stop_reason
    silent(mine.fit, 1)
    assert mine.stop_reason is None and plain.closed == 2


@pytest.mark.shows("SON-08")
def test_the_context_is_the_trainer():
    "Every member can be read and set"

    def use(epoch, step, measures, trainer):
        assert (
            trainer.n_updates == 5 * (epoch - 1) + step + 1
            and trainer.loss is mine.loss
            and trainer.optimizer is mine.opt
        )
        trainer.note = step
        trainer.optimizer.param_groups[0]["lr"] = 0.25

    mine = Trainer(loaders(), F.cross_entropy, optim.SGD, make_model(), [BasicTrainCB(), adapt(use)])
    mine.fit(1)
    assert mine.note == 4 and mine.opt.param_groups[0]["lr"] == 0.25

    def ask(epoch, step, measures, trainer):
        return trainer.modle

    with pytest.raises(AttributeError, match="asked its trainer for `modle`"):
        ours(adapt(ask))


@pytest.mark.shows("SON-03", "SON-05")
def test_a_fifth_argument_is_served_and_fewer_than_four_are_refused():
    got = []
    ours(
        adapt(lambda epoch, step, measures, trainer, validation: got.append(validation), name="five"),
        n_epochs=1,
    )
    assert got == [False] * 5
    for wrong in (lambda loss: 0, lambda a, b, c, d, e, f: 0):
        with pytest.raises(TypeError, match=r"cannot be called as `cb\(epoch, step, measures, trainer\)`"):
            adapt(wrong)
    with pytest.raises(ValueError, match="`test_step` is 0"):
        adapt(lambda a, b, c, d: 0, test_step=0)


@pytest.mark.shows("SON-05")
def test_plain_callbacks_are_added_like_any_other():
    "Theirs: `set_callbacks`, `add_callback`"
    calls = []
    trainer = Trainer(loaders(), F.cross_entropy, optim.SGD, make_model(), [BasicTrainCB()])
    trainer.add_callback(adapt(lambda *args: calls.append(args[1]), name="plain"))
    trainer.fit(1)
    trainer.remove_callback("plain")
    trainer.fit(1)
    assert calls == list(range(5))
