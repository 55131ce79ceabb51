"""Tracebacks of errors that leave a fit: the lines that a user has written stay, those of the loop go."""

import traceback

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from isaac_loop.all import CoreCBs, DataLoaders, InterruptCB, Trainer, with_cbs
from isaac_loop.loop.events import CancelException, Order


class FailingNet(nn.Linear):
    def forward(self, x):
        return deep_in_the_model(super().forward(x))


def deep_in_the_model(x):
    return x @ torch.zeros(3, 3)


class FailingCB:
    def after_batch(self, trainer):
        raise KeyError("mine")


class FailingData(list):
    def __getitem__(self, i):
        return 1 / 0


def failing_loss(preds, targs):
    raise ArithmeticError("the loss")


def way_of(error, whole=False):
    "Names of the functions in the traceback, from this test on"
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)][0 if whole else 1 :]


def failed(
    model=None, loss_func=nn.functional.mse_loss, callbacks=None, kind=Trainer, data=None, error=Exception
):
    x = torch.randn(8, 4)
    dl = DataLoader(data or torch.utils.data.TensorDataset(x, x[:, :1]), 4)
    trainer = kind(
        DataLoaders(dl, dl),
        loss_func,
        torch.optim.SGD,
        model or nn.Linear(4, 1),
        [CoreCBs(progress=False), callbacks],
    )
    with pytest.raises(error) as raised:
        trainer.fit(1)
    return raised.value


def test_an_error_in_a_callback_shows_the_call_and_the_callback():
    error = failed(callbacks=FailingCB())
    assert way_of(error) == ["after_batch"] and "FailingCB.after_batch" in error.__notes__[-1]


def test_an_error_in_the_model_keeps_the_frames_of_model_and_torch():
    way = way_of(failed(FailingNet(4, 1)))
    assert way[0] == "predict" and way[-2:] == ["forward", "deep_in_the_model"] and "_call_impl" in way


def test_an_error_in_the_loss_keeps_its_line():
    assert way_of(failed(loss_func=failing_loss)) == ["get_loss", "failing_loss"]


def test_an_error_in_the_data_comes_from_the_loader():
    way = way_of(failed(data=FailingData([1, 2]), callbacks=InterruptCB()))
    assert "__getitem__" in way[-1] and not {"_one_epoch", "until_over", "_watched"} & set(way)


class MyTrainer(Trainer):
    @with_cbs("mine", CancelException)
    def in_my_span(self):
        self.run_callbacks("predict", "get_loss")

    def one_batch(self):
        self.in_my_span()


def test_the_frames_of_a_subclass_stay():
    way = way_of(failed(FailingNet(4, 1), kind=MyTrainer))
    assert way[:3] == ["one_batch", "in_my_span", "predict"]


class RaisingFromCB:
    order = Order.RECORD  # Not in the run on the side

    def after_batch(self, trainer):
        try:
            with trainer.side_run() as side:
                side.fit(1, callbacks=FailingCB(), train=False)
        except KeyError as e:
            raise ValueError("outer") from e


def test_the_error_that_it_came_from_is_shortened_too():
    cause = failed(callbacks=RaisingFromCB()).__cause__
    assert isinstance(cause, KeyError) and way_of(cause, whole=True) == ["after_batch", "after_batch"]


def test_an_error_of_the_loop_itself_keeps_its_last_line():
    class Wrong:
        def before_fit(self, trainer):
            trainer.run_callbacks("no_such_event")

    assert len(way_of(failed(callbacks=Wrong(), error=LookupError))) == 2


def test_an_environment_variable_shows_every_line(monkeypatch):
    monkeypatch.setenv("ISAAC_LOOP_FULL_TRACEBACK", "1")
    assert {"fit", "_fit", "run_span"} <= set(way_of(failed(FailingNet(4, 1))))


def test_an_optimizer_that_cannot_be_made_shows_its_own_line():
    def opt_func(params, lr):
        raise RuntimeError("no such optimizer")

    x = torch.randn(8, 4)
    dls = DataLoaders([(x, x)], [(x, x)])
    with pytest.raises(RuntimeError) as raised:
        Trainer(dls, nn.functional.mse_loss, opt_func, nn.Linear(4, 4), CoreCBs(progress=False)).fit(1)
    assert way_of(raised.value) == ["opt_func"]


def test_a_notebook_shows_some_twenty_lines_and_the_note_last():
    from IPython.core.ultratb import VerboseTB

    error = failed(callbacks=FailingCB())
    lines = VerboseTB(theme_name="nocolor").text(type(error), error, error.__traceback__).splitlines()
    assert len(lines) < 30 and lines[-1].startswith("raised by `FailingCB.after_batch`")


class AssertingCB:
    def after_batch(self, trainer):
        __tracebackhide__ = False
        assert trainer.loss is None


class HiddenCB:
    def after_batch(self, trainer):
        __tracebackhide__ = True
        raise ValueError("in the open")


@pytest.mark.parametrize("callback, error", [(AssertingCB(), AssertionError), (HiddenCB(), ValueError)])
def test_the_line_of_a_user_that_failed_is_never_hidden(callback, error):
    "Whatever it says of itself"
    assert way_of(failed(callbacks=callback, error=error)) == ["after_batch"]


def test_errors_of_a_group_are_without_the_loop_too():
    class GroupCB:
        def after_batch(self, trainer):
            try:
                trainer.run_callbacks("no such event")
            except LookupError as inner:
                raise ExceptionGroup("several", [inner]) from None

    group = failed(callbacks=GroupCB(), error=ExceptionGroup)
    assert "run_callbacks" not in way_of(group.exceptions[0], whole=True)


def test_what_is_refused_shows_the_call_and_nothing_of_the_library():
    x = torch.randn(8, 4)
    trainer = Trainer(DataLoaders([(x, x)]), None, None, nn.Linear(4, 4), CoreCBs(progress=False))
    for call in (lambda: trainer.fit(-1), lambda: trainer.fit(1, cbs=[]), lambda: trainer.fit(1, lr="fast")):
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        assert way_of(raised.value) == ["<lambda>"]


def test_a_fit_inside_a_fit_is_refused_and_the_outer_one_goes_on():
    refused = []

    def after_batch(trainer):
        try:
            trainer.fit(1)
        except RuntimeError as error:
            refused.append(error)

    x = torch.randn(8, 4)
    trainer = Trainer(
        DataLoaders([(x, x)] * 3), nn.MSELoss(), torch.optim.SGD, nn.Linear(4, 4), CoreCBs(progress=False)
    )
    trainer.fit(1, valid=False, callbacks=after_batch)
    assert len(refused) == 3 and trainer.n_updates == 3 and not trainer._fitting
