"Averages of the weights: what they are measured on, and which fit they belong to."

import contextlib
import copy
import threading
import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import (
    AccumulationCB,
    BasicTrainCB,
    BatchNormEvalCB,
    CancelBatchException,
    CancelFitException,
    CheckpointCB,
    ClipGradCB,
    DataLoaders,
    EMACB,
    FreezeCB,
    GradientStatsCB,
    KeepBestCB,
    LimitCB,
    MetricsCB,
    MixedPrecisionCB,
    NBatchCB,
    OneBatchCB,
    SWACB,
    Trainer,
)
from small import data, trainer_with


async def _later(trainer): ...


def test_two_averages_in_one_fit_are_refused():
    with pytest.raises(ValueError, match="only one can be measured"):
        trainer_with(EMACB(), SWACB()).fit(1)


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


class StopsCB:
    "Asks for a stop in the first epoch"

    def after_batch(self, trainer):
        trainer.request_stop("enough")


@pytest.mark.parametrize(
    "every, where", [("epoch", "the end of the training pass of epoch 3"), ("update", "in epoch 3")]
)
def test_an_average_that_has_not_begun_when_the_fit_ends_says_so(every, where):
    t = trainer_with(SWACB(0.75, every=every, keep=True))
    with pytest.warns(UserWarning, match=f"`SWACB` has averaged nothing(.|\n)*`start=0.75`(.|\n)*{where}"):
        t.fit(4, callbacks=StopsCB())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (1, 2, 3):
            t.fit(n)
            assert t.SWACB.n_averaged
        t.fit(1, train=False)
        t.lr_find(n_batches=3)


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


class Replaced:
    "Gives the model another weight in the middle of a pass"

    def before_batch(self, trainer):
        if trainer.training and trainer.batch_num == 2:
            layer = trainer.model[0]
            layer.weight = nn.Parameter(layer.weight.detach() + 1)


class PlainEMA(EMACB):
    "The average as torch's own method makes it"

    def _look(self, model):
        return None


def ema_run(cls, *callbacks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    batches = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(5)]
    trainer = Trainer(
        DataLoaders(batches, batches),
        F.mse_loss,
        optim.SGD,
        model,
        [BasicTrainCB(), cls(0.9), *callbacks],
    )
    trainer.fit(2, lr=0.1)
    return getattr(trainer, cls.__name__).average


@pytest.mark.parametrize("callbacks", [(), (Replaced(),)])
def test_the_average_is_that_of_torch_digit_for_digit(callbacks):
    mine, theirs = (ema_run(cls, *callbacks).state_dict() for cls in (EMACB, PlainEMA))
    assert mine.keys() == theirs.keys() and mine["n_averaged"] == 10
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


# A model that grows in the middle of a fit


class GrowCB:
    "Puts another layer behind the model before an epoch, and gives it to the optimizer"

    def __init__(self, epoch=1):
        self.epoch = epoch

    def before_epoch(self, trainer):
        if trainer.training and trainer.epoch == self.epoch:
            trainer.model.append(nn.Linear(1, 1))
            trainer.opt.add_param_group(dict(params=trainer.model[-1].parameters()))


def grown(*callbacks, lr=0.1):
    trainer = trainer_with(MetricsCB(show=False), GrowCB(), *callbacks)
    trainer.model = nn.Sequential(trainer.model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(2, lr)
    return trainer, [str(o.message) for o in told]


@pytest.mark.parametrize("cb", [lambda: EMACB(0.9), lambda: SWACB(0.0)])
def test_an_average_takes_no_weights_in_that_it_did_not_begin_with(cb):
    with pytest.raises(ValueError, match="average with 2 parameters, and the model has 4(.|\n)*between two"):
        grown(cb())


def test_weights_that_were_not_there_at_the_best_epoch_are_named():
    trainer, told = grown(KeepBestCB(), lr=5.0)
    assert trainer.KeepBestCB.best_epoch == 0
    assert any("in epoch 0, when the model had no `1.weight` and 1 more" in o for o in told)
    assert not [o for o in grown(lr=5.0)[1] if "best weights" in o]


def test_norms_of_gradients_have_those_of_a_layer_that_came_later():
    trainer, _ = grown(GradientStatsCB(), ClipGradCB(1e9, column="norm"))
    assert trainer.history["grad_norm"] == pytest.approx(trainer.history["norm"])
    assert {"1.weight", "1.bias"} <= {o["parameter"] for o in trainer.GradientStatsCB.rows()}


class Endless:
    "Batches without an end"

    def __iter__(self):
        self.given = 0
        while True:
            self.given += 1
            yield torch.full((4, 1), float(self.given)), torch.ones(4, 1)


def test_an_average_is_measured_on_as_many_batches_of_a_stream_as_a_pass_has_had():
    trainer = Trainer(
        DataLoaders(Endless()),
        F.mse_loss,
        optim.SGD,
        norms(),
        [BasicTrainCB(), LimitCB(5), SWACB(0.0, every="update")],
    )
    trainer.fit(1, lr=0.0, valid=False)
    first, norm, _ = trainer.SWACB.average.module
    seen = torch.cat([torch.full((4, 1), float(i)) for i in range(1, 6)])
    assert torch.allclose(norm.running_mean, first(seen).mean(0), atol=1e-5)


class Told(nn.Module):
    "Is told a factor, counts examples, and keeps its last output, with its graph in training"

    def __init__(self):
        super().__init__()
        self.factor, self.seen = 0.0, 0
        self.line, self.norm = nn.Linear(1, 1), nn.BatchNorm1d(1)

    def forward(self, x):
        self.seen += self.training * len(x)
        self.last = [self.norm(self.line(x * (1 + self.factor)))]
        return self.last[0]

    def get_extra_state(self):
        return dict(seen=self.seen)

    def set_extra_state(self, state):
        self.seen = state["seen"]


def told(*callbacks):
    t = trainer_with(*callbacks)
    t.model = Told()
    return t


def test_an_average_is_measured_with_what_the_model_has_been_told_by_then():
    def before_epoch(trainer):
        trainer.model.factor = float(trainer.epoch)

    t = told(SWACB(0.3), before_epoch)
    t.fit(4, lr=0.05, valid=False)
    average, x = t.SWACB.average.module, torch.cat([x for x, _ in t.dls.train])
    torch.testing.assert_close(average.norm.running_mean, average.line(x * 4).mean(0))
    assert t.model.seen == 4 * len(x)


@pytest.mark.parametrize("cb", [lambda: EMACB(0.5, keep=True), lambda: SWACB(0.0, keep=True)])
def test_a_model_that_takes_the_average_keeps_what_else_it_knows(cb):
    t = told(cb())
    t.fit(2, lr=0.05, valid=False)
    average = t.callbacks[-1].average.module
    for kept in (average.named_parameters(), average.named_buffers()):
        assert all(torch.equal(x, t.model.state_dict()[name]) for name, x in kept)
    assert t.model.seen == 2 * 3 * 4


def test_an_average_of_a_model_that_cannot_be_copied_any_more_is_measured_as_it_began_with_a_warning():
    def after_epoch(trainer):
        trainer.model.lock = threading.Lock()

    t = told(SWACB(0.0), after_epoch)
    with pytest.warns(UserWarning, match="The model cannot be copied now .TypeError.*when the fit began"):
        t.fit(2, lr=0.05, valid=False)
    average, x = t.SWACB.average.module, torch.cat([x for x, _ in t.dls.train])
    torch.testing.assert_close(average.norm.running_mean, average.line(x).mean(0))


def test_a_model_with_a_state_of_its_own_of_which_no_batch_is_measured_says_so():
    def before_predict(trainer):
        if trainer._side_runs:
            raise CancelBatchException

    before_predict.order = -10
    t = told(SWACB(0.0), before_predict)
    with pytest.warns(UserWarning, match="a callback let no batch through"):
        t.fit(2, lr=0.05, valid=False)
    average = t.SWACB.average.module
    assert torch.equal(average.norm.running_mean, t.model.norm.running_mean)


def with_body():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.ReLU())
    return nn.Sequential(body, nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 1))


class EvalInBatchCB:
    def before_batch(self, trainer):
        if trainer.training:
            trainer.model[0].eval()

    def cleanup_batch(self, trainer):
        trainer.model[0].train(trainer.training)


class LastEvalCB:
    order, on_valid = 100, False

    def before_epoch(self, trainer):
        trainer.model[0].eval()


def body_in_eval(trainer):
    if trainer.training:
        trainer.model[0].eval()


STILL = {
    "norms": lambda: [BatchNormEvalCB("0")],
    "frozen": lambda: [FreezeCB("0", batch_norms=True), BatchNormEvalCB(only_frozen=True)],
    "a function": lambda: [function_named(body_in_eval, "before_epoch")],
    "in each batch": lambda: [EvalInBatchCB()],
    "last": lambda: [LastEvalCB()],
    "measured otherwise": lambda: [
        BatchNormEvalCB("0"),
        function_named(lambda t: t.model.eval(), "after_epoch"),
    ],
}


def function_named(f, name):
    def handler(trainer):
        f(trainer)

    handler.__name__ = name
    return handler


@pytest.mark.parametrize("name", STILL)
@pytest.mark.parametrize("every", ["epoch", "update"])
def test_an_average_keeps_the_statistics_that_training_keeps(name, every):
    "They were measured as if training had changed them, and the average was worse than in its validation"
    t = trainer_with(MetricsCB(), SWACB(0.0, every, keep=True), *STILL[name]())
    t.model = with_body()
    t.fit(3, lr=1e-2)
    kept, measured = t.model[0][1], t.model[2]
    assert not kept.running_mean.any() and (kept.num_batches_tracked, measured.num_batches_tracked) == (0, 3)
    x = torch.cat([x for x, _ in t.dls.train])
    expected = t.model[1](t.model[0].eval()(x))
    torch.testing.assert_close(measured.running_mean, expected.mean(0))


def test_an_average_of_which_training_keeps_all_statistics_is_as_it_was_validated():
    t = trainer_with(MetricsCB(), SWACB(0.0, "update", keep=True), BatchNormEvalCB(), n=4)
    t.model = with_body()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        t.fit(3, lr=1e-2)
        assert t.history.latest("valid_loss") == t.validate()["valid_loss"]
        t.fit(1, callbacks=OneBatchCB())  # Nothing was to be measured


def test_statistics_that_were_free_in_the_end_are_measured():
    "Frozen in the first epoch alone"
    freeze = FreezeCB("0", until=1, batch_norms=True)
    t = trainer_with(SWACB(0.0, keep=True), freeze, BatchNormEvalCB(only_frozen=True))
    t.model = with_body()
    t.fit(3, lr=1e-2)
    x = torch.cat([x for x, _ in t.dls.train])
    torch.testing.assert_close(t.model[0][1].running_mean, t.model[0][0](x).mean(0))


class UpdatesCB:
    n = 0

    def after_step(self, trainer):
        self.n += 1


def test_a_run_that_goes_on_after_its_last_pass_knows_which_statistics_training_kept(tmp_path):
    def run(*more):
        torch.manual_seed(3)
        t = trainer_with(SWACB(0.0, keep=True), BatchNormEvalCB("0"), *more)
        t.model = with_body()
        with contextlib.suppress(KeyboardInterrupt):
            t.fit(2, lr=1e-2)
        return t.model[0][1].running_mean

    def before_epoch(trainer):
        if trainer.epoch == 1 and not trainer.training:
            raise KeyboardInterrupt

    run(CheckpointCB(tmp_path, every=1), before_epoch)
    left = run(CheckpointCB(tmp_path, every=1), seen := UpdatesCB())
    assert not left.any() and seen.n == 0


@pytest.mark.parametrize("make", [lambda: EMACB(0.5), lambda: SWACB(0.0)])
def test_a_model_that_is_a_script_of_torchscript_is_averaged_like_another(make):
    def validated(convert):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            callbacks = [BasicTrainCB(), MetricsCB(show=False), make()]
            t = Trainer(DataLoaders(data(), data(2)), F.mse_loss, optim.SGD, convert(model), callbacks)
            t.fit(3, lr=0.05)
        return t.history["valid_loss"]

    assert validated(torch.jit.script) == pytest.approx(validated(lambda model: model), rel=1e-5)
