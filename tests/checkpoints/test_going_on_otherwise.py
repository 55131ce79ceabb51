"Runs that go on with another optimizer or rate, and what counts as the best."

import functools
import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import (
    AccumulationCB,
    BasicTrainCB,
    CancelEpochException,
    CheckpointCB,
    ClipGradCB,
    DataLoaders,
    EarlyStoppingCB,
    KeepBestCB,
    MetricsCB,
    MixedPrecisionCB,
    OneCycleSchedulerCB,
    ResumeMismatch,
    RewindCB,
    Trainer,
    exact_loader,
)
from small import trainer_with


async def _later(trainer): ...


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


@pytest.mark.parametrize("was", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("now", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("opt_func", [optim.SGD, optim.Adam])
def test_a_model_of_another_precision_does_not_go_on(tmp_path, was, now, opt_func):
    def trained(dtype):
        def before_batch(trainer):
            trainer.batch = tuple(x.to(dtype) for x in trainer.batch)

        t = exact_trainer(CheckpointCB(tmp_path, every=2), before_batch, opt_func=opt_func)
        t.model.to(dtype)
        return t

    with pytest.raises(KeyboardInterrupt):
        trained(was).fit(2, 0.1, callbacks=StopCB(), valid=False)
    again = trained(now)
    if was is now:
        return again.fit(2, 0.1, valid=False)
    line = (
        f"the model: `weight` and 1 more had numbers of type {was}, and now of {now}. .* by `.to\\({was}\\)`"
    )
    with pytest.raises(ResumeMismatch, match=line):
        again.fit(2, 0.1, valid=False)
    with pytest.raises(ResumeMismatch, match=line):
        again.load(tmp_path)


def test_mixed_precision_may_come_and_go(tmp_path):
    cut_off(tmp_path)
    t = exact_trainer(CheckpointCB(tmp_path, every=2, strict=False), MixedPrecisionCB())
    with pytest.warns(UserWarning, match="`MixedPrecisionCB` is new"):
        t.fit(2, 0.1, valid=False)
    assert t.n_updates == 12 and t.model.weight.dtype is torch.float32


def test_another_rate_is_said_to_have_no_effect_on_a_run_that_goes_on(tmp_path):
    cut_off(tmp_path)
    t = exact_trainer(CheckpointCB(tmp_path, every=2))
    with pytest.warns(UserWarning, match=r"`lr=0.01` \(saved: 0.1\) has no effect"):
        t.fit(2, 0.01, valid=False)
    assert t.opt.param_groups[0]["lr"] == 0.1 and t.n_updates == 12


def fit_to_its_end(folder, *callbacks, opt_func=optim.Adam, loss=F.mse_loss, n=2, lr=0.1):
    "The trainer, and what is warned of by a fit that is saved in this folder"
    t = exact_trainer(CheckpointCB(folder), *callbacks, opt_func=opt_func)
    t.loss_func = loss
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        t.fit(n, lr, valid=False)
    return t, [str(o.message) for o in told]


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(lr=0.01), "`lr=0.01` (saved: 0.1)"),
        (dict(lr=0.01, n=1), "`lr=0.01` (saved: 0.1)"),
        (dict(opt_func=functools.partial(optim.Adam, weight_decay=0.5)), "`weight_decay=0.5` (saved: 0)"),
        (dict(loss=F.l1_loss), "the loss is `l1_loss("),
    ],
)
def test_a_finished_run_says_which_settings_have_no_effect(options, words, tmp_path):
    "Three rates in one folder were three times the first model, and nobody was told"
    first, told = fit_to_its_end(tmp_path)
    assert told == []
    again, told = fit_to_its_end(tmp_path, **options)
    assert torch.equal(first.model.weight, again.model.weight)
    assert len(told) == 1 and told[0].startswith("This fit was complete already, so nothing is trained")
    assert words in told[0] and "another folder for each setting" in told[0]
    assert "resume='never'" in told[0]


def test_a_finished_run_names_all_that_differs_at_once(tmp_path):
    fit_to_its_end(tmp_path, ClipGradCB(1.0))
    opt_func = functools.partial(optim.Adam, weight_decay=0.5)
    _, (told,) = fit_to_its_end(tmp_path, ClipGradCB(2.0), opt_func=opt_func, lr=0.01)
    for words in ("`lr=0.01` (saved: 0.1)", "`weight_decay=0.5` (saved: 0)", "was `ClipGradCB(1.0"):
        assert words in told


def test_a_finished_run_with_the_same_settings_is_no_false_alarm(tmp_path):
    "Also with a schedule, with another loss by now, in a second fit at another rate, and with fewer epochs"

    def before_epoch(trainer):
        if trainer.epoch == 1:
            trainer.loss_func = F.l1_loss

    for folder, make, n_again in (
        ("plain", list, 2),
        ("scheduled", lambda: [OneCycleSchedulerCB()], 2),
        ("exchanged", lambda: [before_epoch], 2),
        ("fewer", list, 1),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit_to_its_end(tmp_path / folder, *make())
        assert not [o for o in fit_to_its_end(tmp_path / folder, *make(), n=n_again)[1] if "complete" in o]
    for _ in range(2):
        t = exact_trainer(CheckpointCB(tmp_path / "two"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            t.fit(1, 0.1, valid=False)
            t.fit(1, 0.01, valid=False)


def test_a_checkpoint_loaded_by_hand_moves_the_loaders_on(tmp_path):
    first, second = exact_trainer(), exact_trainer()
    first.fit(2, 0.1, valid=False)
    first.save(tmp_path)
    first.fit(1, 0.1, valid=False, keep_opt=True)
    second.load(tmp_path)
    second.fit(1, 0.1, valid=False, keep_opt=True)
    assert torch.equal(first.model.weight, second.model.weight)


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


@pytest.mark.parametrize("unset", [float("nan"), (0.9, float("nan"))])
def test_an_option_that_is_no_number_is_still_the_same(unset, tmp_path):
    class Adam(optim.Adam):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.defaults["threshold"] = unset if type(unset) is float else tuple(map(float, unset))

    with pytest.raises(KeyboardInterrupt):
        exact_trainer(CheckpointCB(tmp_path, every=2), opt_func=Adam).fit(
            2, 0.1, callbacks=StopCB(), valid=False
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact_trainer(CheckpointCB(tmp_path, every=2), opt_func=Adam).fit(2, 0.1, valid=False)
