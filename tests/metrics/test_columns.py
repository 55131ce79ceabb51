"Rows of the history: which columns a metric may fill, and of which fit they are."

import pytest

from isaac_loop.all import CancelEpochException, History, MetricsCB, ProgressCB
from small import trainer_with


async def _later(trainer): ...


@pytest.mark.parametrize("skipped", [True, False])
def test_a_pass_that_never_began_writes_no_losses(skipped):
    def before_epoch(trainer):
        if trainer.training == skipped:
            raise CancelEpochException("not this one")

    t = trainer_with(MetricsCB())
    t.fit(2, callbacks=before_epoch)
    left, gone = ("valid_loss", "train_loss") if skipped else ("train_loss", "valid_loss")
    assert left in t.history.names() and gone not in t.history.names()
    assert set(t.history.batches["training"]) == {not skipped}


class Value:
    "A metric with one value"

    def __init__(self, value):
        self.value = value

    def update(self, *args): ...
    def compute(self):
        return self.value

    def reset(self): ...


@pytest.mark.parametrize("names", [dict(loss=Value(1)), dict(a=Value(1), train_a=Value(2))])
def test_training_metrics_that_would_hide_a_column_are_refused(names):
    with pytest.raises(ValueError, match="is taken"):
        MetricsCB(train_metrics=True, **names)


def test_a_metric_whose_dict_would_hide_a_column_is_refused():
    t = trainer_with(MetricsCB(valid=Value({"loss": 1})))
    with pytest.raises(ValueError, match="`valid_loss`, which is taken"):
        t.fit(1)


@pytest.mark.parametrize("metrics", [[Value(1)], {"a": Value(1)}])
def test_metrics_in_a_container_have_a_hint(metrics):
    with pytest.raises(TypeError, match="one by one"):
        MetricsCB(metrics)


def test_rows_of_an_earlier_fit_are_not_shown_again(capsys):
    t = trainer_with(ProgressCB("plain"))
    t.fit(1, callbacks=MetricsCB())
    capsys.readouterr()
    t.fit(2)
    assert capsys.readouterr().out == "" and t.history.current is None


def test_nothing_is_written_into_the_row_of_an_earlier_fit():
    def before_fit(trainer):
        trainer.history.write(note="start")

    t = trainer_with(MetricsCB())
    t.fit(1)
    with pytest.raises(LookupError, match="no epoch to write to yet"):
        t.fit(1, callbacks=before_fit)
    assert "note" not in t.history[-1]
    with pytest.raises(LookupError):
        History().write_batches(True, [0], loss=[1.0])
