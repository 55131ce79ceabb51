"""What a fit warns of, a check tells beforehand.

Each loop is told of by `fit`, by the name of a finding by `check`, and so that the next fit says it as well.
"""

import re
import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from isaac_loop.all import (
    BasicTrainCB,
    CancelBatchException,
    DataLoaders,
    MetricsCB,
    Trainer,
    WarmupSchedulerCB,
    with_cbs,
)
from working import found_in

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def loader(x=X, y=Y, size=6, **options):
    return DataLoader(TensorDataset(x, y), size, **options)


def loop(*cbs, valid=None, cls=Trainer, loss_func=F.cross_entropy, model=None, metrics=None, **options):
    torch.manual_seed(1)
    usual = [BasicTrainCB(), MetricsCB(show=False, **(metrics or {}))]
    dls = DataLoaders(loader(), loader() if valid is None else valid)
    model = nn.Linear(4, 2) if model is None else model
    return cls(dls, loss_func, optim.SGD, model, [*usual, *cbs], **options)


TELLS = {}


def tells(name, batches=3):
    def mark(make):
        TELLS[make.__name__] = (make, name, batches)
        return make

    return mark


@tells("two_providers")
def two_losses():
    class Doubles:
        def get_loss(self, trainer):
            trainer.loss = 2 * F.cross_entropy(trainer.preds, trainer.batch[1])

    return loop(Doubles())


@tells("two_providers")
def two_predictions():
    class Predicts:
        def predict(self, trainer):
            trainer.preds = trainer.model(trainer.batch[0])

    return loop(Predicts())


@tells("dropped_rows", batches=0)
def rows_left_out():
    return loop(valid=loader(size=7, drop_last=True))


@tells("set_in_vain", batches=0)
def another_name():
    trainer = loop()
    trainer.criterion = nn.MSELoss()
    return trainer


@tells("unused_optimizer", batches=0)
def an_optimizer_by_hand():
    trainer = loop()
    trainer.opt = optim.Adam(trainer.model.parameters())
    return trainer


@tells("missing_step", batches=0)
def half_a_loop():
    class Half:
        def predict(self, trainer):
            trainer.preds = trainer.model(trainer.batch[0])

        def get_loss(self, trainer):
            trainer.loss = F.cross_entropy(trainer.preds, trainer.batch[1])

    return Trainer(DataLoaders(loader(), loader()), F.cross_entropy, optim.SGD, nn.Linear(4, 2), [Half()])


@tells("weighed_against", batches=0)
def a_sum_weighed_as_a_mean():
    return loop(loss_func=nn.CrossEntropyLoss(reduction="sum"), metrics=dict(weigh="samples"))


@tells("set_in_vain")
def parts_of_another_library():
    class Parts:
        def before_batch(self, trainer):
            trainer.xb = trainer.batch[0] / 2

    return loop(Parts())


@tells("late_model")
def a_model_too_late():
    class Replaces:
        def before_epoch(self, trainer):
            if trainer.training and trainer.epoch == 1:
                trainer.model = nn.Linear(4, 2)

    return loop(Replaces())


@tells("late_loader")
def a_loader_too_late():
    class Exchanges:
        def before_epoch(self, trainer):
            if trainer.training:
                trainer.dls.train = loader(X + 1)

    return loop(Exchanges())


@tells("late_method")
def a_method_too_late():
    class Splits:
        def before_batch(self, trainer):
            trainer.split = lambda batch: (batch[:1], batch[1:])

    return loop(Splits())


@tells("unread_stop")
def a_stop_of_another_library():
    class Stops:
        def after_batch(self, trainer):
            trainer.stop_training = True

    return loop(Stops())


@tells("other_length")
def twice_as_many_updates():
    class Plans:
        def before_fit(self, trainer):
            self.total = trainer.total_updates

    class Twice(Trainer):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            self.run_callbacks("predict", "get_loss")
            if self.training:
                self.run_callbacks("backward", "step", "zero_grad")
                self.run_callbacks("predict", "get_loss", "backward", "step", "zero_grad")

    return loop(Plans(), cls=Twice)


@tells("stays_in_training")
def a_model_without_modes():
    class Holds:
        def __init__(self):
            self.net = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))

        def __call__(self, x):
            return self.net(x)

        def parameters(self):
            return self.net.parameters()

    return loop(model=Holds())


@tells("examples_second")
def steps_first():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 2)

        def forward(self, x):
            return self.rnn(x)[0][-1]

    trainer = loop(model=Last())
    sequences = [(torch.randn(9, 5, 3), torch.randint(2, (5,))) for _ in range(3)]
    trainer.dls = DataLoaders(sequences, sequences)
    return trainer


def told(f):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        f()
    return [str(o.message) for o in found]


def numberless(text):
    "A check runs fewer batches than a fit"
    return re.sub(r"\d+", "n", text)


def texts(trainer, **options):
    "What a check finds, and by which names"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {o.name: o.text for o in trainer.check(**options)}


@pytest.mark.parametrize("case", TELLS)
def test_what_a_fit_warns_of_a_check_tells_in_the_same_words(case):
    make, name, batches = TELLS[case]
    said = [numberless(o) for o in told(lambda: make().fit(2))]
    trainer = make()
    found = texts(trainer, batches=batches)
    assert name in found
    text = numberless(found[name])
    assert text in said and text in [numberless(o) for o in told(lambda: trainer.fit(2))]
    assert name not in texts(make(), batches=batches, ignore=name)


def test_who_means_it_is_not_told():
    class Doubles:
        silent = "two_providers"

        def get_loss(self, trainer):
            trainer.loss = 2 * F.cross_entropy(trainer.preds, trainer.batch[1])

    assert found_in(loop(Doubles()), batches=3) == []


def test_ordinary_loops_say_nothing():
    assert found_in(loop()) == found_in(loop(), batches=3) == []
    trained = loop()
    trained.fit(1)
    assert found_in(trained) == found_in(trained, batches=3) == []
    only_validates = loop(valid=loader())
    only_validates.dls.train = None
    assert "missing_step" not in found_in(only_validates)


class MadeCB:
    "Makes the batches of a pass itself, `n` of them"

    def __init__(self, n):
        self.n = n

    def before_epoch(self, trainer):
        if trainer.training:
            trainer.batches = ((X[:6], Y[:6]) for _ in range(self.n))


@pytest.mark.parametrize("n, is_told", [(4, False), (5, True)])
def test_batches_that_a_callback_makes_are_not_cut_short_and_are_as_many_as_said(n, is_told):
    "The loader has 4 and gave 2 of them, so the schedule seemed to end too early"
    trainer = loop(MadeCB(n), WarmupSchedulerCB("linear", warmup=0))
    assert ("other_length" in found_in(trainer, batches=2)) == is_told
    heard = [text for text in told(lambda: trainer.fit(2)) if "total_updates" in text]
    assert bool(heard) == is_told, "as in the fit"


def test_in_the_middle_of_a_fit_its_optimizer_is_no_other():
    class Asks:
        order = 99

        def log(self, trainer):
            self.found = found_in(trainer)

    trainer = loop(Asks())
    trainer.fit(1)
    assert trainer.Asks.found == []


# Functions that are no mean


def f1(preds, y):
    hits = (preds.argmax(1) * y).sum()
    return 2 * hits / (preds.argmax(1) + y).sum().clamp(min=1)


def rmse(preds, y):
    return (preds[:, 0] - y).square().mean().sqrt()


def sorted_loop(**metrics):
    "Each of the first two batches of the validation has one class, so that an F1 of both is a mean"
    x, y = torch.randn(24, 4), torch.tensor([0] * 12 + [1] * 12)
    return loop(valid=loader(x, y), metrics=metrics, model=Ones())


class Ones(nn.Linear):
    "Says class 1 of about half of the rows"

    def __init__(self):
        super().__init__(4, 2)


def test_an_f1_of_sorted_rows_is_found_though_it_is_a_mean_of_the_first_batches():
    class First:
        def after_predict(self, trainer):
            if not trainer.training and trainer.batch_num < 2:
                trainer.preds = torch.tensor([[1.0, 0.0]]).repeat(len(trainer.preds), 1)

    trainer = sorted_loop(mine=f1)
    trainer.add_callbacks(First())
    assert "mean_of_means" in found_in(trainer, batches=4)


def test_all_of_them_are_named_at_once():
    found = texts(sorted_loop(f1=f1, rmse=rmse, share=lambda p, y: p.argmax(1) == y), batches=4)
    assert "`f1` is" in found["mean_of_means"] and "`rmse` is" in found["mean_of_means"]
    assert "share" not in found["mean_of_means"] and "over 4 batches" in found["mean_of_means"]


def test_large_predictions_of_two_batches_alone_are_kept(monkeypatch):
    from isaac_loop.inspection.seen_run import batch_notes

    monkeypatch.setattr(batch_notes, "_MOST", 20)
    found = texts(sorted_loop(f1=f1, rmse=rmse), batches=4)
    assert "over 2 batches" in found["mean_of_means"]
