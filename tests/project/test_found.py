"Faults that were found by using and attacking the library; each test would fail if its fault came back."

import copy
import pickle
import signal
import warnings
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from fastcore.foundation import L
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import (
    AccumulationCB,
    BasicTrainCB,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CheckpointCB,
    DataLoaders,
    DeviceCB,
    EMACB,
    EarlyStoppingCB,
    GradientStatsCB,
    History,
    KeepBestCB,
    MetricsCB,
    MixedPrecisionCB,
    MomentumTrainCB,
    NBatchCB,
    OneBatchCB,
    Order,
    ProgressCB,
    RecorderCB,
    ResumeMismatch,
    RewindCB,
    SWACB,
    StepSchedulerCB,
    Trainer,
    callback_table,
    def_device,
    digit_loaders,
    event_table,
    exact_loader,
    init_delegates,
    replaces,
    show_source,
    to_device,
    with_cbs,
)


def data(n=3):
    return [(torch.randn(4, 1), torch.randn(4, 1)) for _ in range(n)]


def trainer_with(*callbacks, n=3, cls=Trainer, **kwargs):
    return cls(
        DataLoaders(data(n), data(2)),
        F.mse_loss,
        optim.SGD,
        nn.Linear(1, 1),
        [BasicTrainCB(), *callbacks],
        **kwargs,
    )


def test_a_pass_inside_a_pass_is_refused_and_a_side_run_does_it():
    def after_batch(trainer):
        if trainer.training and trainer.batch_num == 1:
            trainer.one_epoch(False)

    with pytest.raises(RuntimeError, match="side_run"):
        trainer_with().fit(1, callbacks=after_batch)

    class EveryCB:
        order, found = Order.DECIDE, 0

        def after_batch(self, trainer):
            if trainer.training and trainer.batch_num == 1:
                with trainer.side_run(MetricsCB()) as side:
                    side.fit(1, train=False, callbacks=ProgressCB("plain"))
                    found = side.history.latest("valid_loss")
                self.found = found

    every = EveryCB()
    t = trainer_with(every, n=10)
    t.fit(1, valid=False)
    assert (t.n_updates, t.model.training) == (10, True) and every.found > 0


def test_a_pass_by_hand_leaves_the_mode_to_the_model():
    t = trainer_with()
    t.fit(1)
    t.one_epoch(False)
    t.model.train()
    assert t.training


@pytest.mark.parametrize("own", [dict(keep_opt=True), dict()])
def test_gradients_of_an_interrupted_fit_do_not_reach_one_with_the_same_optimizer(own):
    def before_step(trainer):
        raise KeyboardInterrupt

    t = trainer_with()
    if not own:
        t.opt_func, t.opt = None, optim.SGD(t.model.parameters(), 0.1)
    t.fit(1, 0.1)
    with pytest.raises(KeyboardInterrupt):
        t.fit(1, 0.1, callbacks=before_step, **own)
    assert t.model.weight.grad is not None  # To be looked at
    before = t.model.weight.item()
    t.fit(0, 0.1, **own)
    assert t.model.weight.grad is None and t.model.weight.item() == before


@pytest.mark.parametrize("train_cb", [BasicTrainCB, MomentumTrainCB])
def test_gradients_of_an_interrupted_fit_do_not_reach_the_next(train_cb):
    torch.manual_seed(0)
    batches, model = data(), nn.Linear(1, 1)

    def trained(interrupted):
        t = Trainer(DataLoaders(batches), F.mse_loss, optim.SGD, copy.deepcopy(model), train_cb())

        def before_step(trainer):
            raise KeyboardInterrupt

        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                t.fit(1, 0.1, callbacks=before_step, valid=False)
        t.fit(1, 0.1, valid=False)
        return t.model.weight.item()

    assert trained(True) == trained(False)


@pytest.mark.shows("ISA-44")
def test_a_step_of_the_trainer_and_one_of_a_callback_are_refused_together_unless_one_replaces():
    "Never two providers by accident"

    class OwnStep(Trainer):
        def step(self):
            self.opt.step()

    class OwnStepAlone(Trainer):
        @replaces
        def step(self):
            self.opt.step()

    with pytest.raises(
        ValueError, match="`OwnStep.step`, a method of the trainer itself, and `BasicTrainCB.step`"
    ):
        trainer_with(cls=OwnStep).fit(1)
    t = trainer_with(cls=OwnStepAlone)
    seen = []
    t.opt_func = lambda params, lr: SimpleNamespace(
        step=lambda: seen.append(1), zero_grad=lambda: None, param_groups=[]
    )
    t.fit(1, valid=False)
    assert len(seen) == t.n_updates == 3


def bad_classes():
    class Misspelt(Trainer):
        def before_bach(self): ...

    class Argument(Trainer):
        def predict(self, x): ...

    class Log(Trainer):
        def log(self, message): ...

    class Decorated(Trainer):
        @with_cbs("predict", CancelStepException)
        def predict(self): ...

    return [
        (Misspelt, "Did you mean `before_batch`"),
        (Argument, "named after an event"),
        (Log, "named after an event"),
        (Decorated, "Leave the decorator out"),
    ]


@pytest.mark.parametrize("cls, message", bad_classes(), ids=lambda o: getattr(o, "__name__", None))
def test_methods_of_a_trainer_that_could_not_work_are_refused(cls, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Trainer.__init__(cls.__new__(cls), DataLoaders(data()), F.mse_loss, optim.SGD, nn.Linear(1, 1), None)


async def _later(trainer): ...


def _yielding(trainer):
    yield


def _too_many(trainer, more): ...


@pytest.mark.parametrize(
    "handler, message",
    [(_later, "coroutine"), (_yielding, "generator"), (_too_many, "with the trainer alone")],
)
def test_handlers_that_would_do_nothing_or_fail_are_refused(handler, message):
    with pytest.raises(TypeError, match=message):
        trainer_with(SimpleNamespace(name="odd", after_batch=handler))


def test_an_error_inside_a_property_comes_out():
    class PropertyCB:
        @property
        def after_batch(self):
            return self.missing

        def before_fit(self, trainer): ...

    with pytest.raises(AttributeError, match="missing"):
        trainer_with(PropertyCB())

    class PropertyTrainer(Trainer):
        @property
        def n_params(self):
            return self.model.params()

    with pytest.raises(AttributeError, match="object has no attribute 'params'"):
        _ = trainer_with(cls=PropertyTrainer).n_params


def test_request_stop_without_a_reason_stops():
    def after_batch(trainer):
        trainer.request_stop(None)

    t = trainer_with()
    t.fit(3, callbacks=after_batch)
    assert t.epoch == 0 and t.stop_reason


def test_keep_opt_keeps_the_ratio_of_the_rates_and_refuses_another_model():
    t = trainer_with()
    t.opt_func = lambda params, lr: optim.SGD(
        [{"params": params[:1], "lr": lr}, {"params": params[1:], "lr": lr * 10}]
    )
    with pytest.raises(ValueError, match="there is none yet"):
        t.fit(1, keep_opt=True)
    t.fit(1, 0.01)
    t.fit(1, 0.02, keep_opt=True)
    assert [g["lr"] for g in t.opt.param_groups] == pytest.approx([0.02, 0.2])
    t.model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="no parameter of this model"):
        t.fit(1, keep_opt=True)


@pytest.mark.parametrize("lr", ["0.1", True, None, float("nan"), -1.0])
def test_what_is_no_rate_is_refused(lr):
    with pytest.raises((TypeError, ValueError), match="`lr` is"):
        trainer_with().fit(1, lr=lr)


def test_an_interrupt_while_callbacks_come_leaves_none_of_them():
    t = trainer_with()
    extra, build = SimpleNamespace(name="extra", after_batch=lambda trainer: None), t.plan.build
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        build(*args, **kwargs)

    t.plan.build = interrupted
    with pytest.raises(KeyboardInterrupt):
        t.fit(1, callbacks=extra)
    t.plan.build = build
    assert extra not in t.callbacks and not hasattr(t, "extra")
    t.fit(1, callbacks=extra)


def test_an_alarm_at_any_moment_leaves_a_trainer_that_fits_again():
    "Real signals, each a little later; a callback that an interrupt leaves behind is gone at the next fit"
    armed = [False]

    def alarm(*args):
        if armed[0]:
            raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, alarm)
    t = trainer_with()
    try:
        for i in range(300):
            try:
                armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (i + 1))
                t.fit(1, callbacks=SimpleNamespace(name="extra", after_batch=lambda trainer: None))
                armed[0] = False
            except KeyboardInterrupt:
                armed[0] = False
            t.fit(0)
            assert len(t.callbacks) == len(t._named) == 1
            assert not t._fitting and torch.is_grad_enabled() and t.exception is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_a_newcomer_that_fails_does_not_stay():
    def before_fit(trainer):
        raise ValueError("no")

    bad = SimpleNamespace(name="bad", before_fit=before_fit)

    def after_batch(trainer):
        with pytest.raises(ValueError), trainer.added_callbacks(bad):
            pass
        with pytest.raises(ValueError, match="no"):
            trainer.add_callback(bad)

    t = trainer_with()
    t.fit(1, callbacks=after_batch)
    assert bad not in t.callbacks and not hasattr(t, "bad")


def test_a_callback_of_one_fit_that_removes_or_renames_itself_leaves_no_name():
    class OnceCB:
        def after_batch(self, trainer):
            trainer.remove_callback(self)

    t = trainer_with()
    t.fit(1, callbacks=OnceCB())
    assert not hasattr(t, "OnceCB")
    t.add_callback(cb := OnceCB())
    cb.name = "another"
    t.remove_callback(cb, delete=True)
    assert not hasattr(t, "OnceCB") and not hasattr(t, "another")


@pytest.mark.parametrize("place", ["plain", "terminal"])
def test_a_trainer_with_bars_can_be_pickled_and_copied_after_a_fit(place, capsys):
    t = trainer_with(ProgressCB(place), MetricsCB())
    t.fit(1)
    for again in (pickle.loads(pickle.dumps(t)), copy.deepcopy(t)):
        again.fit(1)
        assert len(again.history) == 2


def test_an_exception_used_again_gathers_no_notes():
    skip = CancelStepException("skip")

    def before_step(trainer):
        raise skip

    trainer_with(n=50).fit(1, callbacks=before_step)
    assert not getattr(skip, "__notes__", ())


def test_notes_do_not_name_the_place_of_an_earlier_fit():
    def before_fit(trainer):
        raise ValueError("early")

    t = trainer_with()
    t.fit(2)
    with pytest.raises(ValueError) as e:
        t.fit(1, callbacks=before_fit)
    assert e.value.__notes__ == ["raised by `before_fit.before_fit`"]


def test_a_loader_that_fails_is_said_to_fail_after_the_batch_before():
    def broken():
        yield from data(1)
        error = OSError("disk")
        error.add_note("file 17")
        raise error

    t = Trainer(DataLoaders(broken()), F.mse_loss, optim.SGD, nn.Linear(1, 1), BasicTrainCB())
    with pytest.raises(OSError) as e:
        t.fit(1, valid=False)
    assert e.value.__notes__[0] == "file 17" and "after batch 0" in e.value.__notes__[1]


def test_the_warning_about_missing_steps_points_at_the_line_with_fit():
    t = Trainer(
        DataLoaders(data()),
        F.mse_loss,
        optim.SGD,
        nn.Linear(1, 1),
        SimpleNamespace(predict=lambda trainer: None),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t.fit(1, valid=False)
    assert caught[0].filename == __file__


def test_callbacks_with_tensors_can_be_summarized():
    @dataclass
    class TensorCB:
        weight: torch.Tensor
        name: str

        def after_batch(self, trainer):
            "Nothing"

    t = trainer_with(TensorCB(torch.ones(2), "a"), TensorCB(torch.ones(2), "b"))
    assert [o["callback"] for o in callback_table(t).rows if o["step"] == "after_batch"] == ["a", "b"]


def test_a_mock_can_be_a_callback():
    t = trainer_with(mock := Mock(spec=["after_batch"]))
    t.fit(1, valid=False)
    assert mock.after_batch.call_count == 3


@pytest.mark.shows("NEMO-07", "AIT-31")
def test_bound_methods_and_partials_are_functions():
    class Helper:
        def __init__(self):
            self.n = 0

        def after_batch(self, trainer):
            self.n += 1

    def after_epoch(seen, trainer):
        seen.append(trainer.training)

    helper, seen = Helper(), []
    trainer_with(helper.after_batch, partial(after_epoch, seen)).fit(1)
    assert (helper.n, seen) == (5, [True, False])


@pytest.mark.parametrize(
    "several",
    [
        lambda o: L(o),
        lambda o: {i: x for i, x in enumerate(o)}.values(),
        lambda o: [o[:1], [o[1:]]],
        lambda o: iter(o),
    ],
)
def test_callbacks_come_in_any_container(several):
    t = Trainer(
        DataLoaders(data()), F.mse_loss, optim.SGD, nn.Linear(1, 1), several([BasicTrainCB(), MetricsCB()])
    )
    assert [type(o) for o in t.callbacks] == [BasicTrainCB, MetricsCB]


def test_a_trainer_is_no_callback():
    with pytest.raises(TypeError, match="other.callbacks"):
        trainer_with(trainer_with())


def test_arguments_in_the_order_of_another_library_are_recognised():
    with pytest.raises(TypeError, match="The order is"):
        Trainer(DataLoaders(data()), nn.Linear(1, 1), F.mse_loss, optim.Adam, None)
    with pytest.raises(TypeError, match="The order is"):
        Trainer(DataLoaders(data()), F.mse_loss, nn.Linear(1, 1), optim.Adam, None)


def test_forgotten_arguments_have_a_hint():
    class TwoInputs(nn.Linear):
        def forward(self, a, b):
            return super().forward(a + b)

    t = Trainer(DataLoaders(data()), F.mse_loss, optim.SGD, TwoInputs(1, 1), BasicTrainCB())
    with pytest.raises(TypeError) as e:
        t.fit(1, valid=False)
    assert "n_inp" in e.value.__notes__[0]
    t = Trainer(DataLoaders(data()), None, optim.SGD, nn.Linear(1, 1), BasicTrainCB())
    with pytest.raises(TypeError) as e:
        t.fit(1, valid=False)
    assert "loss_func=None" in e.value.__notes__[0]


def test_init_delegates_works_without_brackets_and_with_star_args():
    import inspect

    @init_delegates
    class Plain(Trainer):
        def subclassing_method(self, x=1):
            self.x = x

    @init_delegates()
    class Star(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

        def subclassing_method(self, y=2):
            self.y = y

    assert "x=1" in str(inspect.signature(Plain)) and trainer_with(cls=Plain, x=3).x == 3
    assert str(inspect.signature(Star.__init__)) == "(self, dls, loss_func, opt_func, model, callbacks, y=2)"
    assert trainer_with(cls=Star, y=5).y == 5


def test_one_event_of_a_subclass_needs_no_tuple():
    class OneEvent(Trainer):
        events = "checked"

    seen = []
    t = trainer_with(SimpleNamespace(name="a", checked=seen.append), cls=OneEvent)
    t.run_callbacks("checked")
    assert seen == [t]


def test_tools_take_objects_as_well_as_classes():
    assert len(event_table(trainer_with())) == len(event_table(Trainer))
    assert "class MetricsCB" in repr(show_source(MetricsCB()))


def test_a_callback_can_be_removed_by_its_class():
    t = trainer_with(MetricsCB())
    t.remove_callback(MetricsCB)
    assert len(t.callbacks) == 1
    with pytest.raises(LookupError, match="`MetricsCB`"):
        t.remove_callback(MetricsCB)


@pytest.mark.shows("ISA-46")
def test_the_device_may_be_a_function():
    "The default is printed as `def_device`, so passing it works"
    t = trainer_with(DeviceCB(def_device))
    t.fit(1)
    assert next(t.model.parameters()).device.type == def_device().type
    assert to_device(torch.ones(1), def_device).device.type == def_device().type
    with pytest.raises(ValueError, match="which PyTorch does not know"):
        DeviceCB(3.5)


def test_what_is_appended_to_the_list_is_checked_and_named_when_a_fit_begins():
    t = trainer_with()
    t.callbacks.append(MetricsCB())
    t.fit(1)
    assert t.MetricsCB in t.callbacks
    t.callbacks.append(MetricsCB)
    with pytest.raises(TypeError, match="only an object can be a callback"):
        t.fit(1)


@pytest.mark.parametrize(
    "path, message", [("loss.xyz", "is no format"), ("/proc/nowhere/loss.png", "cannot be written")]
)
def test_a_plot_that_cannot_be_saved_is_refused_before_training(path, message, capsys):
    from isaac_loop.recipes.demo import main

    with pytest.raises(SystemExit) as e:
        main(["--epochs", "1", "--plot", path])
    assert e.value.code == 2 and message in capsys.readouterr().err


def test_a_plot_without_suffix_is_saved_where_it_says(tmp_path, capsys):
    from isaac_loop.recipes.demo import main

    main(["--epochs", "1", "--device", "cpu", "--plot", str(tmp_path / "loss")])
    assert (
        f"Loss plot: {tmp_path / 'loss.png'}" in capsys.readouterr().out and (tmp_path / "loss.png").exists()
    )


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


def test_a_vector_loss_in_validation_says_what_is_wrong():
    t = Trainer(
        DataLoaders(data(), data()),
        lambda preds, targets: (preds - targets) ** 2,
        optim.SGD,
        nn.Linear(1, 1),
        [BasicTrainCB(), MetricsCB()],
    )
    with pytest.raises(ValueError, match="mean or a sum"):
        t.fit(1, train=False)


@pytest.mark.parametrize("name", ["train", "valid", None])
def test_predictions_from_exact_loaders_come_in_order_and_leave_their_position_alone(name):
    dls, plain = digit_loaders(seed=3), digit_loaders()
    t = Trainer(
        dls,
        F.cross_entropy,
        optim.SGD,
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        [BasicTrainCB(), MetricsCB()],
    )
    t.MetricsCB._log = lambda row: None
    t.fit(1)
    before = dls.train.state_dict(), dls.valid.state_dict()
    found = t.get_preds(name)
    assert (dls.train.state_dict(), dls.valid.state_dict()) == before
    expected = (
        torch.cat([y for _, y in DataLoaders(plain.train, plain.valid).valid])
        if name != "train"
        else torch.tensor([o["label"] for o in dls.train.dataset])
    )
    assert torch.equal(found.targets, expected)
    assert t.validate()["valid_loss"] == pytest.approx(t.history.latest("valid_loss"))


def test_the_finder_tries_one_rate_for_each_update_when_gradients_are_accumulated():
    t = trainer_with(AccumulationCB(4), n=8)
    found = t.lr_find(n_batches=6, max_mult=1e9)
    assert len(found.lrs) == 6 and found.lrs == pytest.approx([1e-5 * 1.3**i for i in range(6)])


@pytest.mark.parametrize("make", [lambda: EarlyStoppingCB(3), lambda: StepSchedulerCB(2.5)])
def test_numbers_in_the_wrong_place_have_a_clear_error(make):
    with pytest.raises((TypeError, ValueError), match="`monitor` is 3|`epochs` is 2.5"):
        make()


def exact_trainer(*callbacks, opt_func=optim.Adam):
    torch.manual_seed(0)
    rows = [(torch.randn(1), torch.randn(1)) for _ in range(24)]
    return Trainer(
        DataLoaders(exact_loader(rows, 4, seed=1)),
        F.mse_loss,
        opt_func,
        nn.Linear(1, 1),
        [BasicTrainCB(), *callbacks],
    )


class StopCB:
    "An interrupt after five updates"

    def after_step(self, trainer):
        if trainer.n_updates == 5:
            raise KeyboardInterrupt


def cut_off(folder):
    with pytest.raises(KeyboardInterrupt):
        exact_trainer(CheckpointCB(folder, every=2)).fit(2, 0.1, callbacks=StopCB(), valid=False)


def test_another_optimizer_is_noticed_before_a_run_goes_on(tmp_path):
    cut_off(tmp_path)
    with pytest.raises(ResumeMismatch, match="`trainer.opt`: its class was `Adam`, and is `SGD`"):
        exact_trainer(CheckpointCB(tmp_path, every=2), opt_func=optim.SGD).fit(2, 0.1, valid=False)


def test_another_rate_is_said_to_have_no_effect_on_a_run_that_goes_on(tmp_path):
    cut_off(tmp_path)
    t = exact_trainer(CheckpointCB(tmp_path, every=2))
    with pytest.warns(UserWarning, match=r"`lr=0.01` \(saved: 0.1\) has no effect"):
        t.fit(2, 0.01, valid=False)
    assert t.opt.param_groups[0]["lr"] == 0.1 and t.n_updates == 12


def test_a_checkpoint_loaded_by_hand_moves_the_loaders_on(tmp_path):
    first, second = exact_trainer(), exact_trainer()
    first.fit(2, 0.1, valid=False)
    first.save(tmp_path)
    first.fit(1, 0.1, valid=False, keep_opt=True)
    second.load(tmp_path)
    second.fit(1, 0.1, valid=False, keep_opt=True)
    assert torch.equal(first.model.weight, second.model.weight)


def test_two_averages_in_one_fit_are_refused():
    with pytest.raises(ValueError, match="only one can be measured"):
        trainer_with(EMACB(), SWACB()).fit(1)


def test_which_way_is_better_is_never_guessed():
    for make in (KeepBestCB, lambda name: CheckpointCB("nowhere", monitor=name), EarlyStoppingCB):
        with pytest.raises(ValueError, match="Say `mode='max'`"):
            make("accuracy")
        make("valid_loss")


@pytest.mark.parametrize(
    "cb", [lambda folder: KeepBestCB(), lambda folder: CheckpointCB(folder, monitor="valid_loss")]
)
def test_an_epoch_without_validation_is_no_error_for_who_keeps_the_best(cb, tmp_path):
    def before_epoch(trainer):
        if not trainer.training and trainer.epoch % 2 == 0:
            raise CancelEpochException("not this time")

    t = trainer_with(MetricsCB(), cb(tmp_path))
    t.fit(3, callbacks=before_epoch)
    assert [o is None for o in t.history["valid_loss"]] == [True, False, True]


def test_states_to_go_back_to_are_kept_once_for_each_update():
    t = trainer_with(AccumulationCB(2), RewindCB(every=2), n=8)
    t.fit(1, valid=False)
    assert sorted(t.RewindCB.states) == [(0, 4), (0, 8)]
    with pytest.raises(TypeError, match="is an epoch and a number of batches"):
        t.rewind("a")


# --- Found by the next who used it


def test_the_first_reason_to_stop_is_the_one_that_is_kept():
    "A validation after it overwrote the place where a loss had become NaN"

    def after_batch(trainer):
        trainer.request_stop(f"{trainer.training}")

    t = trainer_with()
    t.fit(2, callbacks=after_batch)
    assert t.stop_reason == "True"


@pytest.mark.parametrize("watcher", [ProgressCB("plain"), RewindCB(), CheckpointCB])
def test_a_trainer_can_be_copied_after_a_fit_whatever_walked_over_its_batches(watcher, tmp_path):
    t = trainer_with(MetricsCB(), watcher(tmp_path / "run") if isinstance(watcher, type) else watcher)
    t.fit(1)
    again = copy.deepcopy(t)
    assert (
        torch.equal(again.model.weight, t.model.weight)
        and again.history.rows == t.history.rows
        and list(t.epochs) == [0]
    )


def test_a_loss_class_is_refused_where_it_is_typed():
    with pytest.raises(TypeError, match=r"Make one: `MSELoss\(\)`"):
        Trainer(DataLoaders(data()), nn.MSELoss, optim.SGD, nn.Linear(1, 1), None)


def test_a_callback_that_evaluates_itself_without_end_is_told_how_to_mend_it():
    def after_epoch(trainer):
        trainer.validate()

    for callbacks in ([after_epoch], []):
        with pytest.raises(RuntimeError, match="order = Order.RECORD"):
            trainer_with(*callbacks).fit(1, callbacks=None if callbacks else after_epoch)
    after_epoch.order = Order.RECORD
    trainer_with().fit(1, callbacks=after_epoch)


def test_a_function_that_only_reads_the_rows_may_evaluate():
    found = []

    def log(trainer):
        found.append(trainer.validate()["valid_loss"])

    t = trainer_with(MetricsCB(), log)
    t.fit(2)
    assert found == pytest.approx(t.history["valid_loss"])


def test_a_run_on_the_side_keeps_the_callbacks_of_the_fit_too():
    "Those that were given to `fit` were taken for leftovers, so a batch stayed on its device, say"
    seen = []

    class BatchCB:
        order = Order.DATA

        def before_batch(self, trainer):
            seen.append(trainer.history is outer)

    def log(trainer):
        trainer.validate()

    log.order = Order.RECORD
    t = trainer_with()
    outer = t.history
    t.fit(1, callbacks=[BatchCB(), log])
    assert seen == [True] * 5 + [False] * 2


def test_steps_that_somebody_waits_for_and_nobody_does_are_missed():
    def trainer(*callbacks):
        return Trainer(DataLoaders(data(), data()), F.mse_loss, optim.SGD, nn.Linear(1, 1), callbacks)

    with pytest.warns(UserWarning, match="`EMACB.after_step` waits in vain.*Add `BasicTrainCB`"):
        trainer(EMACB()).fit(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer().fit(1)  # An empty loop is fine


class ByHand(Trainer):
    "A batch as somebody would write it first"

    def one_batch(self):
        self.preds = self.model(self.batch[0])
        self.loss = self.loss_func(self.preds, self.batch[1])
        if self.training:
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()


class Decorated(ByHand):
    one_batch = with_cbs("batch", CancelBatchException)(ByHand.one_batch)


class Counted(Decorated):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        ByHand.one_batch(self)
        self.n_updates += self.training


def test_a_batch_written_by_hand_is_told_what_it_leaves_out():
    "Losses, schedules, averages and checkpoints stood still in silence"
    with pytest.warns(UserWarning, match="`ByHand.one_batch` replaces the span of a batch"):
        trainer_with(MetricsCB(), cls=ByHand).fit(1)
    t = trainer_with(MetricsCB(), cls=Decorated)
    with pytest.warns(UserWarning, match=r"epoch 0 ended without an update.*self.run_callbacks\('step'\)"):
        t.fit(1)
    assert t.history.latest("train_loss") > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        t = trainer_with(MetricsCB(), cls=Counted)
        t.fit(1)
    assert t.n_updates == 3


def test_one_dataset_where_splits_are_wanted_is_told_so_in_a_line():
    "Every row was read, and printed"
    rows = Dataset.from_dict(dict(x=list(range(500)), y=list(range(500))))
    with pytest.raises(TypeError, match="is a Dataset, which has no splits") as e:
        DataLoaders.from_dataset_dict(rows, 32)
    assert len(str(e.value)) < 500


@pytest.mark.parametrize("end", [CancelFitException, KeyboardInterrupt])
@pytest.mark.parametrize("cb", [KeepBestCB, lambda: EMACB(0.9, keep=True), lambda: SWACB(0.0, keep=True)])
def test_a_fit_that_is_left_before_it_has_begun_gets_no_weights_of_the_one_before(cb, end):
    t = trainer_with(MetricsCB(), cb())
    t.fit(1)
    with torch.no_grad():
        for p in t.model.parameters():
            p.fill_(7)

    def before_fit(trainer):
        raise end

    before_fit.order = -200
    try:
        t.fit(1, callbacks=before_fit)
    except KeyboardInterrupt:
        pass
    assert all((p == 7).all() for p in t.model.parameters())
    t.fit(1)
    assert not any((p == 7).all() for p in t.model.parameters())


def norms():
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_an_average_beside_float16_has_its_batch_norms_measured_in_the_end():
    "The fit failed after its last epoch, as the scaler waited for gradients"
    batches = data(5)
    t = Trainer(
        DataLoaders(batches, batches),
        F.mse_loss,
        optim.SGD,
        norms(),
        [BasicTrainCB(), MixedPrecisionCB("float16"), SWACB(0.0)],
    )
    t.fit(2, lr=0.01)
    first, norm, _ = t.SWACB.average.module
    with torch.autocast("cpu", torch.float16):
        expected = first(torch.cat([x for x, _ in batches]))
    assert (
        torch.allclose(norm.running_mean, expected.float().mean(0), atol=1e-4)
        and norm.num_batches_tracked == 5
    )


@pytest.mark.parametrize("callback, n", [(NBatchCB(2), 2), (AccumulationCB(3), 7), (OneBatchCB(), None)])
def test_an_average_is_measured_on_the_batches_of_a_training_pass_or_says_that_it_is_not(callback, n):
    batches = data(7)
    t = Trainer(
        DataLoaders(batches, batches),
        F.mse_loss,
        optim.SGD,
        norms(),
        [BasicTrainCB(), SWACB(0.0, every="update"), callback],
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        t.fit(2, lr=0.01)
    first, norm, _ = t.SWACB.average.module
    if n is None:
        assert "were not measured, because the fit was cancelled (one batch is enough)" in str(
            told[0].message
        )
    else:
        assert (
            torch.allclose(
                norm.running_mean, first(torch.cat([x for x, _ in batches[:n]])).mean(0), atol=1e-5
            )
            and not told
        )


@pytest.mark.parametrize("end", [None, ValueError, KeyboardInterrupt])
def test_one_average_for_two_fits_at_a_time_is_refused_and_the_first_goes_on(end):
    shared, alone = EMACB(0.9), trainer_with(EMACB(0.9))
    first = Trainer(alone.dls, F.mse_loss, optim.SGD, copy.deepcopy(alone.model), [BasicTrainCB(), shared])

    def after_batch(trainer):
        if not trainer.training:
            return
        with pytest.raises(RuntimeError, match="`EMACB` is averaging the weights of another fit"):
            trainer_with(shared).fit(1)
        if end and trainer.batch_num:
            raise end

    try:
        first.fit(1, callbacks=after_batch)
    except (ValueError, KeyboardInterrupt):
        pass
    alone.fit(1)
    if end is None:
        assert torch.equal(shared.average.module.weight, alone.EMACB.average.module.weight)
    trainer_with(shared).fit(1)


def test_an_average_of_a_lazy_model_says_how_to_mend_it():
    t = Trainer(
        DataLoaders(data(), data()),
        F.mse_loss,
        optim.SGD,
        nn.Sequential(nn.LazyLinear(1)),
        [BasicTrainCB(), EMACB()],
    )
    with pytest.raises(ValueError, match="`0.weight` has no shape yet, .*`EMACB` .*Run one batch"):
        t.fit(1)
    t.model(data()[0][0])
    t.fit(1)


@pytest.mark.parametrize("cb, column", [(RecorderCB, "lr"), (GradientStatsCB, "grad_norm")])
def test_a_pass_that_is_left_before_it_has_begun_repeats_nothing_of_the_one_before(cb, column):
    def before_epoch(trainer):
        if trainer.epoch == 1:
            raise CancelEpochException

    before_epoch.order = -200
    t = trainer_with(cb(), before_epoch)
    t.fit(3, valid=False)
    assert [o["epoch"] for o in t.history.batches] == [0] * 3 + [2] * 3 and len(
        t.history.batches[column]
    ) == 6


# What callbacks set and change


@pytest.mark.parametrize(
    "opt_func, message",
    [
        (lambda params, lr: None, "returned None"),
        (lambda params, lr: "sgd", "class str, which has no `step`"),
        (lambda params, lr: optim.SGD(nn.Linear(1, 1).parameters(), lr), "no parameter of `Linear`"),
    ],
)
def test_what_opt_func_makes_must_change_the_model(opt_func, message):
    t = trainer_with()
    t.opt_func = opt_func
    with pytest.raises((TypeError, ValueError), match=message):
        t.fit(1)


def test_an_optimizer_of_other_modules_of_the_run_is_fine():
    "The second net of a GAN, a loss with parameters, a head that a callback has, several optimizers"

    class HeadCB:
        def __init__(self):
            self.head = nn.Linear(1, 1)

        def before_fit(self, trainer): ...

    t, head = trainer_with(HeadCB()), HeadCB()
    t.critic, t.loss_func = nn.Linear(1, 1), nn.PReLU()
    for module in (t.critic, t.loss_func, t.HeadCB.head):
        t.opt_func = lambda params, lr, module=module: optim.SGD(module.parameters(), lr)
        t.fit(0)
    t.opt_func = lambda params, lr: [optim.SGD(params, lr), optim.SGD(head.head.parameters(), lr)]
    t.fit(0)


@pytest.mark.parametrize(
    "name, meant",
    [("epochs", "n_epochs"), ("max_epochs", "n_epochs"), ("learning_rate", "lr"), ("callback", "callbacks")],
)
def test_an_argument_called_as_elsewhere_is_answered_with_its_name_here(name, meant):
    with pytest.raises(TypeError, match=f"keyword `{name}`.*Did you mean `{meant}`"):
        trainer_with().fit(**{name: 1})


def put_preds(trainer):
    trainer.preds = trainer.model(trainer.batch[0])


@pytest.mark.shows("ISA-44")
def test_two_callbacks_that_both_predict_are_warned_of_once_in_a_fit():
    "With no class in common both run, which is right for `step` alone"

    class OtherCB:
        order = 1

        def predict(self, trainer):
            trainer.preds = trainer.model(trainer.batch[0])

        def get_loss(self, trainer):
            trainer.loss = trainer.loss_func(trainer.preds, trainer.batch[1])

        def step(self, trainer): ...
        def zero_grad(self, trainer): ...

    class AloneCB(OtherCB):
        @replaces
        def predict(self, trainer):
            super().predict(trainer)

        @replaces
        def get_loss(self, trainer):
            super().get_loss(trainer)

    with pytest.warns(UserWarning) as told:
        trainer_with(OtherCB()).fit(2)
    assert [str(o.message).split(" both run")[0] for o in told] == [
        "`BasicTrainCB.predict` and `OtherCB.predict`",
        "`BasicTrainCB.get_loss` and `OtherCB.get_loss`",
    ]

    class HelpedCB:
        def predict(self, trainer):
            self.help(trainer)

        def help(self, trainer):
            put_preds(trainer)

    class LooksCB:
        def predict(self, trainer):
            self.seen = trainer.batch_num

    with pytest.warns(UserWarning, match="`HelpedCB.predict` both run"):
        trainer_with(HelpedCB()).fit(1, train=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cb in (AloneCB(), LooksCB()):
            trainer_with(cb).fit(1)


class WalkCB:
    "Notes what a pass walks over, as it sees it from the end of the order"

    order = Order.LAST

    def before_fit(self, trainer):
        self.seen = []

    def before_epoch(self, trainer):
        self.seen.append([trainer.n_batches])

    def before_batch(self, trainer):
        self.seen[-1].append(len(trainer.batch[0]))


def sized(*sizes):
    return [(torch.randn(n, 1), torch.randn(n, 1)) for n in sizes]


@pytest.mark.parametrize(
    "change, train, valid",
    [
        (lambda t: setattr(t, "dl", sized(1, 2, 3, 5)), [4, 1, 2, 3, 5], [4, 1, 2, 3, 5]),
        (lambda t: setattr(t, "dl", iter(sized(1, 2))), [None, 1, 2], [None, 1, 2]),
        (lambda t: setattr(t, "batches", range(1)), [1, 4], [1, 4]),
        (lambda t: setattr(t, "batches", range(9)), [3, 4, 4, 4], [2, 4, 4]),
        (lambda t: setattr(t, "batches", sized(1, 2, 3, 5)), [4, 1, 2, 3, 5], [4, 1, 2, 3, 5]),
        (lambda t: setattr(t, "batches", (o for o in t.batches)), [3, 4, 4, 4], [2, 4, 4]),
        (lambda t: (setattr(t, "batches", range(2)), setattr(t, "dl", sized(1, 2, 3))), [2, 1, 2], [2, 1, 2]),
    ],
)
def test_a_pass_walks_over_what_a_callback_gives_it(change, train, valid):
    t = trainer_with(WalkCB(), ProgressCB())
    t.fit(2, callbacks=type("GiveCB", (), {"before_epoch": lambda self, trainer: change(trainer)})())
    assert t.WalkCB.seen == [train, valid] * 2


def test_a_limit_stays_when_the_loader_changes():
    t = trainer_with(WalkCB(), NBatchCB(1))

    def before_epoch(trainer):
        trainer.dl = sized(1, 2, 3, 5)

    t.fit(1, callbacks=before_epoch)
    assert t.WalkCB.seen == 2 * [[1, 1]]


@pytest.mark.parametrize(
    "event, name, value, message",
    [
        ("before_fit", "epochs", 5, r"Use `range\(5\)`"),
        ("before_epoch", "batches", 5, r"Use `range\(5\)`"),
        ("before_epoch", "dl", None, "set to None"),
        ("before_epoch", "batches", range(2, 5), "begins with its first batch"),
        ("before_batch", "dl", [], "in a batch, which has no effect"),
        ("after_batch", "batches", range(2), "in a batch, which has no effect"),
        ("before_fit", "dl", [], "before any pass has begun, which has no effect"),
    ],
)
def test_what_the_loop_could_not_walk_over_or_would_not_see_is_refused(event, name, value, message):
    cb = type("SetCB", (), {event: lambda self, trainer: setattr(trainer, name, value)})()
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message) as e:
        trainer_with(cb).fit(1)
    assert f"`SetCB.{event}`" in e.value.__notes__[0]


def test_what_was_set_for_a_pass_may_be_put_back_after_it():
    class UndoCB:
        def before_epoch(self, trainer):
            self.old, trainer.dl = trainer.dl, sized(1)

        def cleanup_epoch(self, trainer):
            trainer.dl = self.old

    t = trainer_with(WalkCB(), UndoCB())
    t.fit(1)
    assert t.WalkCB.seen == [[1, 1], [1, 1]] and t.dl is t.dls.valid


class ComesCB:
    "Notes what it is told"

    def __init__(self, name="ComesCB", order=0):
        self.name, self.order, self.seen = name, order, []

    def before_fit(self, trainer):
        self.seen.append("fit")

    def before_batch(self, trainer):
        self.seen.append("batch")

    def before_predict(self, trainer):
        self.seen.append("predict")

    def after_backward(self, trainer):
        self.seen.append("backward")

    def cleanup_batch(self, trainer):
        self.seen.append("cleanup")


@pytest.mark.parametrize(
    "come",
    [
        lambda t, cb: t.callbacks.append(cb),
        lambda t, cb: t.callbacks.insert(0, cb),
        lambda t, cb: t.callbacks.extend([cb]),
        lambda t, cb: setattr(t, "callbacks", [*t.callbacks, cb]),
        lambda t, cb: t.callbacks.append(SimpleNamespace(callbacks=[cb])),
    ],
)
def test_a_callback_that_is_put_into_the_list_joins_from_the_next_step_on(come):
    "And is told of the spans that are open"
    cb = ComesCB()

    def after_predict(trainer):
        if trainer.batch_num == 1 and cb not in trainer.callbacks:
            come(trainer, cb)

    t = trainer_with()
    t.fit(1, valid=False, callbacks=after_predict)
    assert cb.seen == ["fit", "batch", "predict", "backward", "cleanup"] + [
        "batch",
        "predict",
        "backward",
        "cleanup",
    ]
    assert t.ComesCB is cb and cb in t.callbacks


@pytest.mark.parametrize(
    "go",
    [
        lambda t, cb: t.callbacks.remove(cb),
        lambda t, cb: t.callbacks.pop(),
        lambda t, cb: t.callbacks.__delitem__(-1),
        lambda t, cb: setattr(t, "callbacks", [o for o in t.callbacks if o is not cb]),
    ],
)
def test_a_callback_that_is_taken_from_the_list_leaves_with_its_cleanup(go):
    cb = ComesCB()

    def after_predict(trainer):
        if trainer.batch_num == 1 and cb in trainer.callbacks:
            go(trainer, cb)

    t = trainer_with(SimpleNamespace(name="first", after_predict=after_predict), cb)
    t.fit(1, valid=False)
    assert cb.seen == ["fit", "batch", "predict", "backward", "cleanup", "batch", "predict", "cleanup"]


def test_the_list_is_checked_when_it_changes_and_stays_as_it_was():
    def before_epoch(trainer):
        for wrong in (MetricsCB, trainer.BasicTrainCB, BasicTrainCB()):
            with pytest.raises((TypeError, ValueError)):
                trainer.callbacks.append(wrong)
            assert trainer.callbacks == before
        trainer.callbacks[0] = BasicTrainCB()

    t = trainer_with()
    t.add_callback(before_epoch)
    before = list(t.callbacks)
    t.fit(1, train=False)
    assert t.BasicTrainCB is not before[0] and t.callbacks[0] is t.BasicTrainCB
    t.callbacks += [t.BasicTrainCB]
    with pytest.raises(ValueError, match="was added already"):
        t.fit(1)
