"What is recorded is what each batch was trained with, whoever changes it and however the pass ends."

import contextlib
import math
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch
from guarded import run_guarded
from torch import nn, optim
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode

from isaac_loop.evaluate.evaluator import EvaluatorCB
from isaac_loop.inspection.gradients import GradientPlotCB, GradientStatsCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import (
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    Order,
)
from isaac_loop.loop.spans import with_cbs
from isaac_loop.loop.monitor import check_monitored
from isaac_loop.state.errors import ResumeMismatch
from isaac_loop.loop.trainer import Trainer

matplotlib.use("Agg")


def make_trainer(*callbacks, n=4, opt_func=optim.SGD):
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randn(3, 2, generator=g), torch.randn(3, 1, generator=g)) for _ in range(n)]
    return Trainer(
        DataLoaders(batches, batches[:2]), F.mse_loss, opt_func, nn.Linear(2, 1), [BasicTrainCB(), *callbacks]
    )


class CountCB:
    "Changes the rate after every step; a tensor in place"

    order = Order.SCHEDULE

    def after_step(self, trainer):
        lr = trainer.opt.param_groups[0]["lr"]
        if torch.is_tensor(lr):
            lr.add_(1)
        else:
            trainer.opt.param_groups[0]["lr"] = lr + 1


@pytest.mark.shows("MIN-10", "NEMO-04")
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_rate_is_the_one_that_the_batch_was_trained_with(as_tensor):
    "Also if it is a tensor that is changed in place"

    def opt_func(params, lr):
        return optim.Adam(params, torch.tensor(float(lr)) if as_tensor else lr, foreach=False)

    trainer = make_trainer(RecorderCB(), CountCB(), opt_func=opt_func)
    trainer.fit(2, lr=1, valid=False)
    assert trainer.history.batches["lr"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


@pytest.mark.shows("MIN-10")
def test_values_stand_beside_the_losses_and_validation_has_none():
    trainer = make_trainer(
        MetricsCB(show=False), RecorderCB(again=lambda t: t.loss, two=lambda t: 2, n=lambda t: t.n_updates)
    )
    trainer.fit(2, lr=0.01)
    batches = trainer.history.batches
    assert len(batches) == 12
    for row in batches:
        if row["training"]:
            assert (
                row["again"] == row["loss"]
                and row["two"] == 2
                and row["n"] == 4 * row["epoch"] + row["batch"]
            )
        else:
            assert math.isnan(row["again"]) and math.isnan(row["two"])


@pytest.mark.shows("MIN-10")
def test_many_tensors_are_stacked_and_none_is_lost():
    "At the borders of the stacks, mixed with numbers"
    for n in (63, 64, 65, 300):
        trainer = make_trainer(
            RecorderCB(x=lambda t: torch.tensor(t.batch_num) if t.batch_num % 3 else t.batch_num), n=n
        )
        trainer.fit(1, valid=False)
        assert trainer.history.batches["x"] == list(range(n))


@pytest.mark.shows("MIN-10")
@pytest.mark.parametrize(
    "exception, expected",
    [
        (CancelBatchException, [0, 1, 3]),
        (CancelEpochException, [0, 1]),
        (CancelFitException, [0, 1]),
        (CancelStepException, [0, 1, 2, 3]),
        (KeyboardInterrupt, [0, 1]),
    ],
)
def test_only_batches_that_happened_are_recorded(exception, expected):
    "Also the values that were taken before a batch was cancelled are dropped"

    class CancelCB:
        def before_backward(self, trainer):
            if trainer.batch_num == 2:
                raise exception("now")

    trainer = make_trainer(RecorderCB(number=lambda t: t.batch_num), CancelCB())
    if exception is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(1, valid=False)
    else:
        trainer.fit(1, valid=False)
    assert trainer.history.batches["number"] == trainer.history.batches["batch"] == expected


class OwnTrainer(Trainer):
    "Writes a batch in one method, as many scripts do"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.loss = self.loss_func(self.model(x), y)
        if not self.training:
            return
        self.loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        self.n_updates += 1


def make_own(*callbacks):
    ours = make_trainer()
    return OwnTrainer(ours.dls, ours.loss_func, ours.opt_func, ours.model, callbacks)


def test_a_batch_of_ones_own_without_steps_is_recorded_when_it_is_over():
    trainer = make_own(
        MetricsCB(show=False), RecorderCB(again=lambda t: t.loss, lr=lambda t: t.opt.param_groups[0]["lr"])
    )
    trainer.fit(2, lr=0.5)
    rows = [o for o in trainer.history.batches if o["training"]]
    assert len(rows) == 8 and all(o["again"] == o["loss"] and o["lr"] == 0.5 for o in rows)


def test_who_waits_for_a_step_of_a_batch_of_ones_own_is_told_how_it_could_run():
    class WaitsCB:
        def before_step(self, trainer):
            raise AssertionError

    with pytest.warns(
        UserWarning,
        match=r"`WaitsCB.before_step` waits in vain. Let `OwnTrainer.one_batch` run its steps, "
        r"as in `self.run_callbacks\('step'\)`",
    ) as found:
        make_own(WaitsCB()).fit(1)
    assert "BasicTrainCB" not in str(found[0].message)


def test_going_on_with_other_columns_is_refused_in_mid_pass_only():
    state = dict(fit=0, values=dict(lr=[0.1]), batches=[0])
    with pytest.raises(ResumeMismatch, match=r"recorded \['lr'\] when it was saved, and records \['x'\] now"):
        RecorderCB(x=lambda t: 1).load_state_dict(state)
    RecorderCB(x=lambda t: 1).load_state_dict(dict(fit=0, values=dict(lr=[]), batches=[]))


@pytest.mark.shows("MIN-10")
def test_recording_changes_nothing_and_waits_for_nothing():
    "Weights bit for bit the same with and without"
    weights = []
    for extra in (
        [],
        [
            RecorderCB(
                loss2=lambda t: t.loss,
                w=lambda t: t.model.weight[0, 0],
                lr=lambda t: t.opt.param_groups[0]["lr"],
            )
        ],
    ):
        torch.manual_seed(1)
        trainer = make_trainer(*extra)
        trainer.fit(3, lr=0.1)
        weights.append(trainer.model.weight)
    assert torch.equal(*weights)
    for everything in (False, True):
        run_guarded([BasicTrainCB(), RecorderCB(loss2=lambda t: t.loss)], everything, 550)


@pytest.mark.parametrize("watched", [True, False])
def test_what_is_kept_holds_no_graph(watched):
    "Watched, as on a device, it is a tensor"
    recorder = RecorderCB(loss2=lambda t: t.loss)

    class LookCB:
        order = Order.LAST

        def after_batch(self, trainer):
            kept = [value for column in recorder._pass._columns()[1] for value in column]
            assert kept and not any(getattr(value, "requires_grad", False) for value in kept)
            assert all(isinstance(value, torch.Tensor) for value in kept) == watched

    with BaseTorchFunctionMode() if watched else contextlib.nullcontext():
        make_trainer(recorder, LookCB()).fit(1, valid=False)


@pytest.mark.shows("MIN-10")
@pytest.mark.parametrize(
    "value, message", [(torch.ones(2), r"shape \(2,\)"), ("fast", "'fast'"), (None, "None")]
)
def test_what_is_not_one_number_is_an_error_that_names_the_column(value, message):
    with pytest.raises(TypeError, match=f"asked for `speed` and got .*{message}"):
        make_trainer(RecorderCB(speed=lambda t: value)).fit(1)


@pytest.mark.parametrize("name", ["fit", "epoch", "training", "batch"])
def test_the_columns_that_number_batches_are_not_overwritten(name):
    with pytest.raises(ValueError, match="another name"):
        RecorderCB(**{name: lambda t: 1})


@pytest.mark.shows("MIN-10")
def test_the_plot_shows_the_last_fit():
    recorder = RecorderCB(lr=lambda t: t.opt.param_groups[0]["lr"], loss2=lambda t: t.loss)
    with pytest.raises(ValueError, match="recorded nothing yet"):
        recorder.plot()
    trainer = make_trainer(recorder, MetricsCB(show=False))
    trainer.fit(2, lr=0.5)
    trainer.fit(1, lr=0.25)
    axes = recorder.plot()
    assert [o.get_ylabel() for o in axes] == ["lr", "loss2"] and axes[-1].get_xlabel() == "training batch"
    assert np.array_equal(axes[0].get_lines()[0].get_ydata(), [0.25] * 4)
    assert len(recorder.plot("loss")) == 1, "any column of the batches"
    with pytest.raises(LookupError, match="Did you mean `loss2`"):
        recorder.plot("los2")


@pytest.mark.shows("MIN-10")
def test_recorders_of_other_names_live_together_and_write_no_columns_of_rows():
    second = RecorderCB(x=lambda t: 1)
    second.name = "second"
    trainer = make_trainer(RecorderCB(), second)
    trainer.fit(1, valid=False)
    assert trainer.history.batches["x"] == [1.0] * 4 and len(trainer.history.batches["lr"]) == 4
    with pytest.raises(LookupError, match="no callback records"):
        check_monitored(trainer, "lr", "me")


def named(name, callback):
    callback.name = name
    return callback


CLASHES = {
    "loss": lambda: [MetricsCB(show=False), RecorderCB(loss=lambda t: 100 + t.epoch)],
    "v": lambda: [RecorderCB(v=lambda t: 1), named("second", RecorderCB(v=lambda t: 2))],
    "grad_norm": lambda: [RecorderCB(grad_norm=lambda t: -1), ClipGradCB(1)],
    "norm": lambda: [RecorderCB(norm=lambda t: -1), ClipGradCB(1, column="norm")],
    "grad_norm of two": lambda: [GradientStatsCB(), ClipGradCB(1)],
    "grad_norm of parts": lambda: [GradientStatsCB(nn.Linear), named("second", GradientStatsCB(nn.ReLU))],
    "grad_norm of both": lambda: [ClipGradCB(1), named("second", ClipGradCB(max_value=0.1))],
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("column", CLASHES)
def test_two_who_write_one_column_of_batches_are_told_before_the_first(column, turned):
    callbacks, column = CLASHES[column](), column.split()[0]
    trainer = make_trainer(*(callbacks[::-1] if turned else callbacks))
    with pytest.raises(ValueError, match=f"both write the column `{column}` of training batches"):
        trainer.fit(1, valid=False)
    assert not len(trainer.history.batches)


def test_norms_before_and_after_clipping_have_columns_of_their_own():
    trainer = make_trainer(ClipGradCB(1e-3, column="norm_before"), GradientStatsCB(), MetricsCB(show=False))
    trainer.fit(1, valid=False)
    before, after = trainer.history.batches["norm_before"], trainer.history.batches["grad_norm"]
    assert len(before) == len(after) == 4 and all(a <= 1e-3 + 1e-6 < b for a, b in zip(after, before))


def test_two_who_look_at_the_same_gradients_write_the_same_norms(tmp_path):
    trainer = make_trainer(GradientStatsCB(), GradientPlotCB(tmp_path), MetricsCB(show=False))
    trainer.fit(1, valid=False)
    assert len(trainer.history.batches["grad_norm"]) == 4
    parts = GradientStatsCB(nn.Linear), GradientStatsCB(nn.Linear, every=2, column="of_linear")
    trainer = make_trainer(parts[0], named("second", parts[1]), MetricsCB(show=False))
    trainer.fit(1, valid=False)
    norms = trainer.history.batches
    assert norms["of_linear"][::2] == norms["grad_norm"][::2] and "of_linear" in trainer.history[-1]


def test_who_writes_no_column_of_training_batches_of_that_name_hides_none():
    "The loss that a recorder reads is the one that is there already"
    measured = MetricsCB(show=False)
    measured.on_train = False
    for others, column in (
        ([measured], "loss"),
        ([ClipGradCB(1, column=None)], "grad_norm"),
        ([ClipGradCB(1)], "v"),
    ):
        trainer = make_trainer(*others, RecorderCB(**{column: lambda t: 7}))
        trainer.fit(1, valid=False)
        assert trainer.history.batches[column] == [7.0] * 4
    trainer = make_trainer(MetricsCB(show=False), RecorderCB(loss=lambda t: t.loss.item(), n=lambda t: 1))
    trainer.fit(1, valid=False)
    assert len(trainer.history.batches["loss"]) == 4


def test_numbers_of_other_types_stay_what_they_are_when_blocks_are_joined():
    "Whole numbers first, and then some in a type that could not hold them"

    def value(trainer):
        early = trainer.batch_num < 64
        return torch.tensor(1000 + trainer.batch_num) if early else torch.tensor(0.5, dtype=torch.bfloat16)

    trainer = make_trainer(RecorderCB(found=value), n=130)
    trainer.fit(1, valid=False)
    assert trainer.history.batches["found"] == [1000 + i if i < 64 else 0.5 for i in range(130)]


def test_a_fit_without_training_refuses_no_column_of_training_batches():
    trainer = make_trainer(ClipGradCB(1.0), RecorderCB(grad_norm=lambda t: 1.0))
    trainer.dls.valid = trainer.dls.train
    trainer.fit(1, train=False)
    with pytest.raises(ValueError, match="both write the column `grad_norm`"):
        trainer.fit(1)


def test_a_column_of_an_evaluator_is_not_hidden_by_a_recorder():
    "One that evaluates at the end of epochs writes none beside the batches"
    recorder = RecorderCB(eval_loss=lambda t: 7.0)
    rows = [(torch.ones(2, 2), torch.ones(2, 1))]
    with pytest.raises(ValueError, match="both write the column `eval_loss`"):
        make_trainer(EvaluatorCB(rows, updates=1), recorder).fit(1, valid=False)
    make_trainer(EvaluatorCB(rows), recorder).fit(1, valid=False)


@pytest.mark.parametrize("valid", [True, False])
def test_who_comes_after_a_validation_pass_is_asked_for_its_columns_too(valid):
    def log(trainer):
        if trainer.epoch == 0:
            trainer.add_callbacks(RecorderCB(grad_norm=lambda t: -1.0))

    trainer = make_trainer(ClipGradCB(1.0), log)
    trainer.dls.valid = trainer.dls.train
    with pytest.raises(ValueError, match="both write the column `grad_norm`"):
        trainer.fit(2, valid=valid)


def test_columns_that_say_something_else_are_no_columns():
    mine = SimpleNamespace(name="mine", batch_columns=lambda: ["grad_norm"], log=lambda trainer: None)
    make_trainer(mine, ClipGradCB(1.0)).fit(1, valid=False)
    mine.batch_columns = "grad_norm"
    with pytest.raises(ValueError, match="both write the column `grad_norm`"):
        make_trainer(mine, ClipGradCB(1.0)).fit(1, valid=False)


def test_a_rate_that_no_single_optimizer_has_is_told_with_the_names_of_those_there_are():
    class Two(Trainer):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            self.preds = self.model(self.batch[0])
            self.loss = F.mse_loss(self.preds, self.batch[1])

    trainer = make_trainer(RecorderCB())
    two = Two(trainer.dls, F.mse_loss, None, trainer.model, RecorderCB())
    two.opt_body = two.opt_head = optim.SGD(two.model.parameters(), 0.1)
    with pytest.raises(
        AttributeError, match="the trainer has the optimizers .*`trainer.opt_body`, `trainer.opt_head`"
    ):
        two.fit(1, valid=False)


@pytest.mark.parametrize(
    "make", [lambda name: ClipGradCB(1.0, column=name), lambda name: GradientStatsCB(column=name)]
)
def test_a_column_has_a_name_that_nothing_else_has(make):
    with pytest.raises(ValueError, match="`epoch` is a column that says which batch"):
        make("epoch")
    with pytest.raises(TypeError, match="`3` cannot be the name of a column"):
        make(3)


def test_columns_of_another_kind_are_passed_over():
    odd = SimpleNamespace(name="odd", batch_columns=3, log=lambda trainer: None)
    make_trainer(odd, ClipGradCB(1.0)).fit(1, valid=False)
