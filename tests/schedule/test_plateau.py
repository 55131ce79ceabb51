"Rates that are reduced, by a count or when nothing gets better any more."

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import optim
from torch.optim import lr_scheduler as lrs

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.schedule.plateau import PlateauSchedulerCB, StepSchedulerCB
from scheduled import lr_of, make_batches, make_trainer, RecorderCBNamed, WriteCB


@pytest.fixture(autouse=True)
def warnings_are_errors():
    "So nobody warns unasked, PyTorch about the order of steps least of all"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# Reductions and plateaus


@pytest.mark.shows("SON-14")
def test_a_reduction_below_the_lowest_rate_is_skipped_for_each_group():
    "Not clamped"

    def two_groups(params, lr):
        params = list(params)
        return optim.SGD([dict(params=params[:2], lr=lr / 10), dict(params=params[2:])], lr)

    trainer = make_trainer(
        StepSchedulerCB(1, 0.3, min_lr=0.02), RecorderCBNamed(a=lr_of(0), b=lr_of(1)), opt_func=two_groups
    )
    trainer.fit(4, lr=1.0, valid=False)
    assert trainer.history.batches["a"][::5] == pytest.approx([0.1, 0.03, 0.03, 0.03])
    assert trainer.history.batches["b"][::5] == pytest.approx([1, 0.3, 0.09, 0.027])


@pytest.mark.shows("SON-15", "AIT-47", "AIT-48", "F045")
@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-10, 10), min_size=1, max_size=12),
    mode=st.sampled_from(["min", "max"]),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 2),
    delta=st.floats(0, 2),
    min_lr=st.sampled_from([0, 0.03]),
)
def test_a_plateau_reduces_when_torch_would(values, mode, patience, cooldown, delta, min_lr):
    options = dict(
        mode=mode,
        factor=0.5,
        patience=patience,
        cooldown=cooldown,
        threshold=delta,
        threshold_mode="abs",
        min_lr=min_lr,
    )
    opt = optim.SGD([torch.zeros(1)], 0.1)
    scheduler, theirs = lrs.ReduceLROnPlateau(opt, **options), []
    for o in values:
        theirs.append(opt.param_groups[0]["lr"])
        scheduler.step(o)
    trainer = make_trainer(WriteCB(values), PlateauSchedulerCB("score", **options), n=1)
    trainer.fit(len(values), lr=0.1, valid=False)
    assert trainer.history.batches["lr"] == theirs


@pytest.mark.shows("SON-15")
def test_nan_never_is_better_and_no_value_says_nothing():
    trainer = make_trainer(
        WriteCB([1.0, math.nan, None, math.nan, 0.5]),
        PlateauSchedulerCB("score", mode="min", patience=1, factor=0.5),
        n=1,
    )
    trainer.fit(5, lr=0.1, valid=False)
    assert trainer.history.batches["lr"] == [0.1, 0.1, 0.1, 0.1, 0.05]


@pytest.mark.shows("AIT-48")
def test_the_direction_of_a_plateau_is_never_guessed():
    "As with every other callback that watches a column"
    with pytest.raises(ValueError, match="Say `mode='max'` or `mode='min'`"):
        PlateauSchedulerCB("accuracy")
    assert (
        PlateauSchedulerCB("my_loss").options["mode"],
        PlateauSchedulerCB("accuracy", mode="max").options["mode"],
    ) == ("min", "max")


@pytest.mark.shows("AIT-47")
def test_a_plateau_of_validation_loss():
    trainer = make_trainer(
        MetricsCB(show=False),
        PlateauSchedulerCB(factor=0.5, patience=0, threshold=10, threshold_mode="abs"),
        valid=make_batches(2),
    )
    trainer.fit(3, lr=0.1)
    assert trainer.history.batches["lr"][:5] == [0.1] * 5 and trainer.opt.param_groups[0]["lr"] == 0.025


class OwnPlateauCB(PlateauSchedulerCB):
    "As a class of the user's"


def test_a_class_derived_from_a_plateau_is_one():
    plateau = OwnPlateauCB("score", mode="max", factor=0.5, patience=0)
    trainer = make_trainer(WriteCB([1, 1, 2]), plateau)
    trainer.fit(3, lr=0.1, valid=False)
    assert trainer.history.batches["lr"][::5] == [0.1, 0.1, 0.05]


@pytest.mark.shows("AIT-48")
def test_a_name_that_nobody_records_fails_before_the_first_batch():
    trainer = make_trainer(MetricsCB(show=False), PlateauSchedulerCB("vaild_loss"), valid=make_batches(2))
    with pytest.raises(
        LookupError,
        match=r"`PlateauSchedulerCB` watches `vaild_loss`.*'train_loss', 'valid_loss', 'elapsed'\]. "
        "Did you mean `valid_loss`",
    ):
        trainer.fit(1)
    assert trainer.n_updates == 0 and "initial_lr" not in trainer.opt.param_groups[0]
    trainer = make_trainer(MetricsCB(show=False), PlateauSchedulerCB())
    with pytest.raises(LookupError, match="`valid_loss`, which no callback records"):
        trainer.fit(1, valid=False)


@pytest.mark.shows("AIT-48")
def test_a_name_of_somebody_who_declares_nothing_is_seen_at_the_first_row():
    trainer = make_trainer(
        WriteCB([1.0] * 3, declare=False),
        PlateauSchedulerCB("score", mode="min", patience=0, factor=0.5),
        n=2,
    )
    trainer.fit(3, lr=0.1, valid=False)
    assert trainer.history.batches["lr"] == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05]
    trainer = make_trainer(WriteCB([1.0] * 3, declare=False), PlateauSchedulerCB("scores", mode="min"), n=2)
    with pytest.raises(LookupError, match="Did you mean `score`"):
        trainer.fit(3, valid=False)
    assert trainer.n_updates == 2


@pytest.mark.shows("AIT-47")
def test_a_column_that_never_came_and_one_that_is_no_number_are_told():
    trainer = make_trainer(MetricsCB(show=False), PlateauSchedulerCB(), valid=make_batches(2))
    with pytest.warns(UserWarning, match="no value in any epoch"):
        trainer.fit(1, valid=False)
    trainer = make_trainer(WriteCB([[1.0, 2.0]]), PlateauSchedulerCB("score", mode="min"))
    with pytest.raises(TypeError, match="`score` is \\[1.0, 2.0\\]"):
        trainer.fit(1, valid=False)


def test_values_from_before_a_run_went_on_count_too(tmp_path):
    "Here a plateau, and a checkpoint that looks for the best of them, also if that was NaN"

    class NanCB:
        columns = ["score"]

        def cleanup_epoch(self, trainer):
            if trainer.epoch == 0:
                trainer.history.write(score=math.nan)

    def run(*callbacks):
        return make_trainer(
            NanCB(),
            PlateauSchedulerCB("score", mode="min", patience=0),
            CheckpointCB(tmp_path, monitor="score", mode="min"),
            *callbacks,
        ).fit(2, valid=False)

    def before_batch(trainer):
        if trainer.epoch == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(before_batch)
    run()  # Without a word
