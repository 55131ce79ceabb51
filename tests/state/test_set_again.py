"""Functions, layers and the loss that a run sets in its course: where a run that goes on does not set them
again, that is told, and where it does, nobody hears of it.
"""

import copy
import warnings
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cutting import ROWS, small_trainer
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.events import CancelStepException
from isaac_loop.loop.trainer import Trainer
from isaac_loop.state.errors import ResumeMismatch
from runs import Cut, CutCB, fit


def told_in(run):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
    return [str(o.message) for o in told]


def told_twice(tmp_path, make, n=8, every=2, valid=False):
    "What is told in a run that is cut, and when it goes on; and whether it ends as without a cut"

    def cut_run():
        with suppress(Cut):
            cut = CutCB("before_batch", lambda t: t.n_updates == n)
            fit(make(), 4, valid=valid, callbacks=[CheckpointCB(tmp_path, every=every), cut])

    def go_on():
        ended.append(fit(make(), 4, valid=valid, callbacks=CheckpointCB(tmp_path, every=every)))

    ended = [fit(make(), 4, valid=valid)]
    first, second = told_in(cut_run), told_in(go_on)
    return first, second, all(map(torch.equal, *(t.model.parameters() for t in ended)))


def size(preds):
    return preds.square().mean()


class Penalty:
    def __call__(self, preds):
        return 3 * preds.abs().mean()


def scaled(k):
    return lambda preds: k * preds.abs().mean()


class StagesCB:
    on_valid = False
    penalty = None

    def after_get_loss(self, trainer):
        if self.penalty is not None:
            trainer.loss = trainer.loss + self.penalty(trainer.preds)


class OnceCB(StagesCB):
    def before_epoch(self, trainer):
        if trainer.epoch == 1:
            self.penalty = size


class AtUpdateCB(StagesCB):
    def before_batch(self, trainer):
        if trainer.n_updates != 4:
            return
        self.penalty = self.own

    def own(self, preds):
        return preds.abs().mean()


class OnceTrainer(Trainer):
    penalty = None

    def before_epoch(self):
        if self.epoch == 1:
            self.penalty = size

    def after_get_loss(self):
        if self.penalty is not None:
            self.loss = self.loss + self.penalty(self.preds)


def with_own_trainer():
    trainer = small_trainer()
    return OnceTrainer(
        trainer.dls, trainer.loss_func, trainer.opt_func, trainer.model, list(trainer.callbacks)
    )


@pytest.mark.parametrize("every", [2, "epoch"])
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: small_trainer(OnceCB()), "`OnceCB.penalty`"),
        (lambda: small_trainer(AtUpdateCB()), "`AtUpdateCB.penalty`"),
        (with_own_trainer, "`trainer.penalty`"),
    ],
)
def test_a_function_that_is_set_once_is_named_when_it_is_saved_and_when_it_is_missed(
    tmp_path, make, path, every
):
    [first], [second], same = told_twice(tmp_path, make, every=every)
    assert first.startswith(f"{path} changed during this fit and cannot be kept")
    assert path in second and "nobody has set it again" in second and not same


class SomewhenCB(StagesCB):
    "Has another penalty from some moment on, of which its code says nothing"

    def __init__(self, first, then):
        self.penalty, self.then = first, then

    def before_batch(self, trainer):
        if trainer.n_updates in [4]:
            self.penalty = self.then


class AfterwardsCB(StagesCB):
    "Comes too late in a run that goes on"

    def after_epoch(self, trainer):
        if self.penalty is None and trainer.epoch > 0:
            self.penalty = size


class Fades(nn.Linear):
    act = None

    def __init__(self):
        torch.manual_seed(2)
        super().__init__(4, 1)

    def forward(self, x):
        y = super().forward(x)
        return y if self.act is None else self.act(y)


class ActCB:
    def before_epoch(self, trainer):
        if trainer.epoch in [1]:
            trainer.model.act = torch.tanh


class ForwardCB:
    def before_epoch(self, trainer):
        if trainer.epoch in [1]:
            trainer.model.forward = lambda x, m=trainer.model: F.linear(x, 2 * m.weight)


class HookCB:
    def before_epoch(self, trainer):
        if trainer.epoch in [1]:
            trainer.model.register_forward_hook(lambda m, args, out: 2 * out)


class GradHookCB:
    def before_epoch(self, trainer):
        if trainer.epoch in [1]:
            trainer.model.weight.register_hook(lambda grad: grad / 10)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: small_trainer(SomewhenCB(None, torch.amax)), "`SomewhenCB.penalty`"),
        (lambda: small_trainer(SomewhenCB(None, Penalty())), "`SomewhenCB.penalty`"),
        (lambda: small_trainer(SomewhenCB(scaled(1.0), scaled(3.0))), "`SomewhenCB.penalty`"),
        (lambda: small_trainer(AfterwardsCB()), "`AfterwardsCB.penalty`"),
        (lambda: small_trainer(ActCB(), model=Fades()), "`model.act`"),
        (
            lambda: small_trainer(ForwardCB()),
            "`ForwardCB.before_epoch.<locals>.<lambda>` was hung on `model`",
        ),
        (lambda: small_trainer(HookCB()), "`HookCB.before_epoch.<locals>.<lambda>` was hung on `model`"),
        (
            lambda: small_trainer(GradHookCB()),
            "`GradHookCB.before_epoch.<locals>.<lambda>` was hung on `model`",
        ),
    ],
)
def test_whatever_is_missed_when_a_run_goes_on_is_named(tmp_path, make, words):
    _, [second], same = told_twice(tmp_path, make)
    assert words in second and "gone on otherwise" in second and not same


def test_an_object_that_takes_the_place_of_one_of_another_class_is_named_when_it_is_saved(tmp_path):
    class Other(Penalty):
        def __call__(self, preds):
            return preds.square().mean()

    first, _, _ = told_twice(tmp_path, lambda: small_trainer(SomewhenCB(Other(), Penalty())))
    assert first[0].startswith("`SomewhenCB.penalty` changed during this fit")


class LastingCB(StagesCB):
    def before_epoch(self, trainer):
        if trainer.epoch >= 1:
            self.penalty = size


class EachEpochCB(StagesCB):
    def before_epoch(self, trainer):
        self.penalty = lambda preds: trainer.epoch * preds.square().mean()
        self.hook = trainer.model.register_forward_hook(lambda m, args, out: 2 * out)
        self.model, self.loss, self.own = trainer.model, trainer.loss_func, self.after_get_loss

    def after_epoch(self, trainer):
        self.penalty = None
        self.hook.remove()

    def __init__(self):
        self.hook = self.model = self.loss = self.own = None


class AtFirstCB(StagesCB):
    def before_fit(self, trainer):
        self.penalty = lambda preds: preds.square().mean()

    def after_fit(self, trainer):
        self.penalty = None


class WhenNeededCB(StagesCB):
    def before_batch(self, trainer):
        if self.penalty is None:
            self.penalty = torch.compile(size, backend="eager")


class ChosenLossCB:
    def before_batch(self, trainer):
        trainer.loss_func = F.l1_loss if trainer.epoch > 1 else F.mse_loss


class OtherLossInValidationCB:
    def before_epoch(self, trainer):
        trainer.loss_func = F.mse_loss if trainer.training else F.l1_loss


class AnnealedLossCB:
    def before_epoch(self, trainer):
        weight = 1 / (1 + trainer.epoch)
        trainer.loss_func = lambda preds, targets: weight * F.mse_loss(preds, targets)


class CountingLoss:
    def __init__(self):
        self.n = 0

    def __call__(self, preds, targets):
        self.n += 1
        return F.mse_loss(preds, targets) / self.n


class SharpLaterCB:
    def before_epoch(self, trainer):
        if trainer.epoch >= 1:
            trainer.model[1] = nn.Tanh()


class TurnsCB:
    def before_epoch(self, trainer):
        trainer.model[1] = nn.Tanh() if trainer.epoch % 2 else nn.ReLU()


class SharpAtFirstCB:
    def before_fit(self, trainer):
        trainer.model[1] = nn.Tanh()


def layers():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 1), nn.ReLU())


class Counts(nn.Module):
    "Prints what it has counted, and makes a layer when it is first needed"

    def __init__(self):
        super().__init__()
        self.layer, self.n, self.act = nn.LazyLinear(1), 0, None

    def forward(self, x):
        self.n, self.act = self.n + 1, self.act or nn.Softplus()
        return self.act(self.layer(x))

    def extra_repr(self):
        return f"n={self.n}"


@pytest.mark.parametrize(
    "make",
    [
        lambda: small_trainer(LastingCB()),
        lambda: small_trainer(EachEpochCB()),
        lambda: small_trainer(AtFirstCB()),
        lambda: small_trainer(WhenNeededCB()),
        lambda: small_trainer(ChosenLossCB()),
        lambda: small_trainer(AnnealedLossCB()),
        lambda: small_trainer(loss=CountingLoss()),
        lambda: small_trainer(SharpLaterCB(), model=layers()),
        lambda: small_trainer(SharpAtFirstCB(), model=layers()),
        lambda: small_trainer(TurnsCB(), model=layers()),
        lambda: small_trainer(model=Counts()),
    ],
)
@pytest.mark.parametrize("every", [2, "epoch"])
def test_what_the_script_sets_again_is_no_reason_to_warn(tmp_path, make, every):
    assert told_twice(tmp_path, make, every=every) == ([], [], True)


@pytest.mark.parametrize("every", [2, "epoch"])
def test_a_loss_of_validation_passes_is_no_reason_to_warn(tmp_path, every):
    def make():
        trainer = small_trainer(OtherLossInValidationCB())
        trainer.dls.valid = list(trainer.dls.train)
        return trainer

    assert told_twice(tmp_path, make, every=every, valid=True) == ([], [], True)


@pytest.mark.parametrize(
    "make", [lambda: small_trainer(OnceCB()), lambda: small_trainer(SharpOnceCB(), model=layers())]
)
def test_what_is_still_there_in_the_same_process_is_not_missed(tmp_path, make):
    trainer = make()
    cut = CutCB("before_batch", lambda t: t.n_updates == 8)
    with pytest.raises(Cut), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(trainer, 4, valid=False, callbacks=[CheckpointCB(tmp_path, every=2), cut])
    assert told_in(lambda: fit(trainer, 4, valid=False, callbacks=CheckpointCB(tmp_path, every=2))) == []
    fit(whole := make(), 4, valid=False)
    assert all(map(torch.equal, whole.model.parameters(), trainer.model.parameters()))
    [told] = told_in(lambda: fit(make(), 5, valid=False, callbacks=CheckpointCB(tmp_path, every=2)))
    assert "gone on otherwise" in told


class SharpOnceCB:
    def before_epoch(self, trainer):
        if trainer.epoch == 1:
            trainer.model[1] = nn.Tanh()


def test_a_layer_that_is_exchanged_once_is_named_when_it_is_saved_and_when_it_is_missed(tmp_path):
    [first], [second], same = told_twice(tmp_path, lambda: small_trainer(SharpOnceCB(), model=layers()))
    assert "`model.1` was `ReLU` and is `Tanh`" in first and "`trainer.epoch >= 3`" in first
    assert "`model.1` became `Tanh`, and here it is `ReLU`" in second and not same


class LossOnceCB:
    def __init__(self, loss):
        self._loss = loss

    def before_epoch(self, trainer):
        if trainer.epoch == 1:
            trainer.loss_func = self._loss


def test_a_loss_that_is_exchanged_once_is_named_and_the_script_is_not_blamed(tmp_path):
    [first], [second], same = told_twice(tmp_path, lambda: small_trainer(LossOnceCB(F.l1_loss)))
    assert "`trainer.loss_func` was exchanged: it was `mse_loss(" in first and "is `l1_loss(" in first
    assert "the loss became `l1_loss(" in second and "give the trainer the same" not in second and not same


def test_a_loss_with_other_settings_comes_back_and_one_with_other_weights_is_named(tmp_path):
    def make(**settings):
        rows = [(x, (x.sum() > 0).long()) for x, _ in ROWS]
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
        then = nn.CrossEntropyLoss(**dict(weight=torch.tensor([1.0, 2.0])) | settings)
        torch.manual_seed(2)
        dl, model = exact_loader(rows, 8, seed=1), nn.Linear(4, 2)
        return small_trainer(LossOnceCB(then), loss=loss, dl=dl, model=model)

    assert told_twice(tmp_path / "a", lambda: make(label_smoothing=0.3)) == ([], [], True)
    [first], [second], same = told_twice(tmp_path / "b", lambda: make(weight=torch.tensor([1.0, 3.0])))
    assert "is `CrossEntropyLoss(" in first and "the loss became" in second and not same


@pytest.mark.parametrize(("loss", "then"), [(F.mse_loss, nn.L1Loss()), (nn.MSELoss(), F.l1_loss)])
def test_a_loss_that_cannot_go_on_is_named_when_it_is_saved(tmp_path, loss, then):
    make = lambda: small_trainer(LossOnceCB(then), loss=loss)
    [first] = told_in(lambda: fit(make(), 2, valid=False, callbacks=CheckpointCB(tmp_path, every=2)))
    assert "cannot go on from what is saved. Give the trainer one loss" in first
    with pytest.raises(ResumeMismatch, match="the run began with this one, and has exchanged it"):
        fit(make(), 4, valid=False, callbacks=CheckpointCB(tmp_path, every=2))


class NeededCB(StagesCB):
    "Made when it is needed, in the first batch of a run and of one that goes on"

    def before_batch(self, trainer):
        if self.penalty is None:
            self.penalty = size


class FirstBatchCB(StagesCB):
    "Another one in each epoch, from its first batch on"

    def before_batch(self, trainer):
        if trainer.batch_num == 0:
            self.penalty = size if trainer.epoch % 2 else Penalty()


class LayerCB:
    on_valid = False

    def before_batch(self, trainer):
        if not isinstance(trainer.model[1], nn.Tanh):
            trainer.model[1] = nn.Tanh()


class HookOnceCB(LayerCB):
    hook = None

    def before_batch(self, trainer):
        if self.hook is None:
            self.hook = trainer.model[0].register_forward_hook(lambda layer, args, result: result * 0.9)


@pytest.mark.parametrize("make", [NeededCB, LayerCB, HookOnceCB])
def test_what_is_made_when_it_is_needed_is_no_loss_where_a_pass_has_no_batch_left(tmp_path, make):
    "The checkpoint lies behind the last batch of an epoch: nobody had an occasion"
    n_batches = len(small_trainer().dls.train)

    def trainer():
        torch.manual_seed(1)
        return small_trainer(make(), model=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))

    def first():
        with suppress(Cut):
            cut = CutCB("after_epoch", lambda t: True)
            fit(trainer(), 4, valid=False, callbacks=[CheckpointCB(tmp_path, every=n_batches), cut])

    told_in(first)
    ended = []
    go_on = lambda: fit(trainer(), 4, valid=False, callbacks=CheckpointCB(tmp_path, every=n_batches))
    assert told_in(lambda: ended.append(go_on())) == []
    whole = fit(trainer(), 4, valid=False)
    assert all(map(torch.equal, whole.model.parameters(), ended[0].model.parameters()))


def test_what_is_set_in_the_first_batch_of_each_epoch_comes_again_with_the_next(tmp_path):
    first, second, same = told_twice(tmp_path, lambda: small_trainer(FirstBatchCB()), every="epoch")
    assert first == second == [] and same


class CopyInBatchCB:
    "What each batch makes anew before it reads it, as the inner model of Reptile"

    copy = None

    def before_predict(self, trainer):
        self.copy = copy.deepcopy(trainer.model)

    def after_get_loss(self, trainer):
        if self.copy is not None:
            trainer.loss = trainer.loss + 0.1 * self.copy(trainer.batch[0]).detach().mean() * trainer.loss


class RowsCB:
    def __init__(self):
        self.rows = None

    def before_batch(self, trainer):
        numbers = [2.0, 3.0]
        self.rows = iter(numbers)
        next(self.rows)

    def before_backward(self, trainer):
        trainer.loss = trainer.loss * next(self.rows)


class RowsFirstCB(RowsCB):
    "A subclass that reads it too"

    def after_batch(self, trainer):
        self.rest = len(list(self.rows))


@pytest.mark.parametrize("every", [2, 3, "epoch"])
@pytest.mark.parametrize("make", [CopyInBatchCB, RowsCB, RowsFirstCB])
def test_what_each_batch_makes_before_it_reads_it_is_no_reason_to_warn(tmp_path, make, every):
    first, second, same = told_twice(tmp_path, lambda: small_trainer(make()), every=every)
    assert first == second == [] and same


class LastCopyCB(CopyInBatchCB):
    "Reads what the batch before has made"

    def before_batch(self, trainer):
        self.was = 0.0 if self.copy is None else self.copy(trainer.batch[0]).mean().item()


class AddsCB(CopyInBatchCB):
    def before_predict(self, trainer):
        former = self.copy
        self.copy = copy.deepcopy(trainer.model)
        self.copy.has_former = former is not None


class SomeBatchesCB(CopyInBatchCB):
    def before_predict(self, trainer):
        if trainer.n_updates % 3 == 0:
            self.copy = copy.deepcopy(trainer.model)


class TriedCB(CopyInBatchCB):
    def before_predict(self, trainer):
        with suppress(ZeroDivisionError):
            self.copy = [copy.deepcopy(trainer.model), 1 / (trainer.n_updates % 3)][0]


class LogCopyCB(CopyInBatchCB):
    def log(self, trainer):
        trainer.last = self.copy.weight.sum().item()


class HelperCB(CopyInBatchCB):
    def before_batch(self, trainer):
        self.look()

    def look(self):
        self.was = getattr(self, "copy", None) is None


class UnderCB(CopyInBatchCB):
    "Reads it before it is set"

    def after_predict(self, trainer):
        self.was = self.copy is None

    def before_get_loss(self, trainer):
        self.copy = copy.deepcopy(trainer.model)

    def before_predict(self, trainer):
        pass


class StepCopyCB(CopyInBatchCB):
    "Some batches have no step"

    def before_predict(self, trainer):
        pass

    def before_step(self, trainer):
        self.copy = copy.deepcopy(trainer.model)


class SkippedCB(CopyInBatchCB):
    def before_batch(self, trainer):
        self.skips = CancelStepException


class ReaderCB:
    def before_batch(self, trainer):
        self.was = trainer.CopyInBatchCB.copy is None


NEEDED_LATER = [
    LastCopyCB,
    AddsCB,
    SomeBatchesCB,
    TriedCB,
    LogCopyCB,
    HelperCB,
    UnderCB,
    StepCopyCB,
    SkippedCB,
]


@pytest.mark.parametrize("make", NEEDED_LATER)
def test_what_a_later_batch_may_read_is_named(tmp_path, make):
    first = told_in(lambda: fit(small_trainer(make(), CheckpointCB(tmp_path, every=2)), 2, valid=False))
    assert [f"`{make.__name__}.copy`" in o for o in first] == [True]


def test_what_another_callback_reads_is_named(tmp_path):
    cbs = CopyInBatchCB(), ReaderCB(), CheckpointCB(tmp_path, every=2)
    first = told_in(lambda: fit(small_trainer(*cbs), 2, valid=False))
    assert ["`CopyInBatchCB.copy`" in o for o in first] == [True]
