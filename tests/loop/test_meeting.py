"""How callbacks meet: through the trainer, its history, and events of their own. Each test is something that
callbacks of other libraries have a service for: messages, a log of everybody's rates, estimates, reports.
"""

import copy
import io
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import isaac_loop.evaluate.evaluation  # noqa: F401, brings `get_preds`
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.averaging import EMACB
from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.device.precision import MixedPrecisionCB
from isaac_loop.show.progress import ProgressCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.schedule.schedulers import BatchSchedulerCB
from isaac_loop.stop.limits import LimitCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders, get_dataloaders
from isaac_loop.loop.events import CancelFitException, Order
from isaac_loop.loop.history import History
from isaac_loop.loop.trainer import Trainer


def make_batches(n=4, rows=4):
    g = torch.Generator().manual_seed(n)
    return [(torch.randn(rows, 3, generator=g), torch.randn(rows, 1, generator=g)) for _ in range(n)]


def make_trainer(*callbacks, n=4, cls=Trainer):
    torch.manual_seed(0)
    return cls(
        DataLoaders(make_batches(n), make_batches(2)),
        F.mse_loss,
        optim.SGD,
        nn.Linear(3, 1),
        [BasicTrainCB(), *callbacks],
    )


# Messages


@pytest.mark.shows("AIT-18")
def test_messages_go_through_the_trainer():
    "One stays, one is taken, one lasts an epoch, one is overwritten; the reader knows no writer"

    class WriterCB:
        "Leaves messages"

        def before_fit(self, trainer):
            trainer.kept, trainer.mail = "for good", []

        def before_epoch(self, trainer):
            trainer.of_this_epoch = trainer.epoch

        def after_batch(self, trainer):
            trainer.newest = trainer.batch_num
            if trainer.batch_num == 2:
                trainer.mail.append(f"batch 2 of epoch {trainer.epoch}")

        def cleanup_epoch(self, trainer):
            del trainer.of_this_epoch

    class ReaderCB:
        "Reads them"

        order = Order.REPORT

        def __init__(self):
            self.seen, self.taken = [], []

        def after_batch(self, trainer):
            self.seen.append((trainer.kept, trainer.newest, trainer.of_this_epoch))
            while trainer.mail:
                self.taken.append((trainer.mail.pop(0), trainer.batch_num))

    trainer = make_trainer(ReaderCB(), WriterCB())
    trainer.fit(2, valid=False)
    assert trainer.ReaderCB.seen == [("for good", b, e) for e in range(2) for b in range(4)]
    assert trainer.ReaderCB.taken == [("batch 2 of epoch 0", 2), ("batch 2 of epoch 1", 2)]
    assert (
        trainer.kept == "for good"
        and trainer.newest == 3
        and not hasattr(trainer, "of_this_epoch")
        and trainer.mail == []
    )


@pytest.mark.shows("AIT-18", "PTA-01")
def test_a_message_that_nobody_wrote_is_an_error_that_says_who_should_have():
    "Read before it is written, it is no silent None"

    def before_batch(trainer):
        trainer.loss  # noqa: B018

    with pytest.raises(
        AttributeError, match="`trainer.loss` does not exist yet. It is written by the step `get_loss`"
    ):
        make_trainer(before_batch).fit(1)

    def after_batch(trainer):
        trainer.mial  # noqa: B018

    trainer = make_trainer(after_batch)
    trainer.mail = []
    with pytest.raises(AttributeError, match="no attribute and no callback `mial`"):
        trainer.fit(1)


@pytest.mark.shows("PTA-03", "PTA-17")
def test_an_event_of_ones_own_takes_arguments():
    "Whoever has the method gets them, the others are skipped"

    class Shouting(Trainer):
        events = ("shout",)

    said = []

    class HearCB:
        def shout(self, trainer, word, times=1):
            said.append((trainer is shouting, word * times))

    class PredictCB(BasicTrainCB):
        def predict(self, trainer):
            super().predict(trainer)
            trainer.run_callbacks("shout", word="hey", times=trainer.batch_num)

    torch.manual_seed(0)
    shouting = Shouting(
        DataLoaders(make_batches(3)),
        F.mse_loss,
        optim.SGD,
        nn.Linear(3, 1),
        [PredictCB(), HearCB(), MetricsCB(show=False)],
    )
    shouting.fit(1, valid=False)
    assert said == [(True, ""), (True, "hey"), (True, "heyhey")]


# One that is called at each step


class MeasuresCB:
    "Averages of everything, refreshed now and then, for whoever asks; closed whatever happens"

    order = Order.RECORD

    def __init__(self, every=2):
        self.every = every

    def before_fit(self, trainer):
        self.seen, self.closed, self._losses = [], False, []

    def after_batch(self, trainer):
        "Average the losses so far"
        assert trainer.training is torch.is_grad_enabled()
        if not trainer.training:
            return
        self._losses.append(trainer.loss.detach())
        if (trainer.batch_num + 1) % self.every == 0 or trainer.batch_num + 1 == trainer.n_batches:
            self.seen.append((trainer.epoch, trainer.batch_num, torch.stack(self._losses).mean()))

    def cleanup_fit(self, trainer):
        self.closed = True


@pytest.mark.shows("SON-02", "SON-04", "SON-08", "SON-32")
@pytest.mark.parametrize("ending", [None, CancelFitException(), ValueError()])
def test_a_callback_of_a_class_is_called_at_each_step(ending):
    "With the averages at every second batch and at the last, and closed after any end"

    def after_epoch(trainer):
        if ending is not None and trainer.epoch == 1:
            raise ending

    losses = []

    def after_batch(trainer):
        if trainer.training:
            losses.append(trainer.loss.item())

    trainer = make_trainer(MeasuresCB(), after_batch, after_epoch, n=5)
    try:
        trainer.fit(2, valid=True)
    except ValueError:
        pass
    cb = trainer.MeasuresCB
    assert [o[:2] for o in cb.seen] == [(e, b) for e in range(2) for b in (1, 3, 4)] and cb.closed
    for epoch, batch, mean in cb.seen:
        assert mean.item() == pytest.approx(
            sum(losses[: epoch * 5 + batch + 1]) / (epoch * 5 + batch + 1), rel=1e-5
        )


@pytest.mark.shows("SON-18")
def test_a_callback_may_do_its_work_and_leave():
    "It predicts the seconds of an epoch, removes itself, and the one behind it misses nothing"
    clock = iter(range(0, 1000, 3))

    class EstimateCB:
        def __init__(self, n):
            self.n = n

        def before_batch(self, trainer):
            if trainer.batch_num == 0:
                self.start = next(clock)

        def after_batch(self, trainer):
            if trainer.batch_num + 1 < self.n:
                return next(clock)
            trainer.seconds_of_epoch = (next(clock) - self.start) / self.n * trainer.n_batches
            trainer.remove_callback(self)

    class BehindCB:
        def before_fit(self, trainer):
            self.n = 0

        def after_batch(self, trainer):
            self.n += 1

    trainer = make_trainer(EstimateCB(4), BehindCB(), n=10)
    trainer.fit(2, valid=False)
    assert trainer.seconds_of_epoch == 3 * 10 and trainer.BehindCB.n == 20
    assert [type(o) for o in trainer.callbacks] == [BasicTrainCB, BehindCB]


@pytest.mark.shows("SON-11")
def test_every_batch_that_is_meant_is_recorded_and_no_other():
    "A recorder for every third batch has those and not their complement"

    class EveryCB(RecorderCB):
        on_valid = False

        def after_batch(self, trainer):
            if trainer.batch_num % 3 == 0:
                self.kept.append((trainer.epoch, trainer.batch_num))

    cb = EveryCB()
    cb.kept = []
    make_trainer(cb, MetricsCB(show=False), n=7).fit(2)
    assert cb.kept == [(e, b) for e in range(2) for b in (0, 3, 6)]


# A report


@pytest.mark.shows("AIT-76")
def test_a_report_of_predictions_after_each_epoch_and_at_the_end():
    "Predictions for the validation rows, and in the end for rows nobody trained on; training takes no notice"
    test = make_batches(3)

    class ReportCB:
        "Keeps what it would print"

        order = Order.REPORT

        def before_fit(self, trainer):
            self.lines, self.start = [], 12.5

        def log(self, trainer):
            self.lines.append((trainer.epoch, trainer.get_preds().preds.clone()))

        def after_fit(self, trainer):
            self.lines.append(("test", trainer.get_preds(test).preds))

    trainer, plain = make_trainer(ReportCB()), make_trainer()
    models = []

    def log(t):
        models.append(copy.deepcopy(t.model))

    trainer.fit(3, lr=0.1, callbacks=log)
    plain.fit(3, lr=0.1)
    assert torch.equal(trainer.model.weight, plain.model.weight) and [
        o for o, _ in trainer.ReportCB.lines
    ] == [0, 1, 2, "test"]
    with torch.no_grad():
        for (_, preds), model in zip(trainer.ReportCB.lines, models):
            assert torch.equal(preds, torch.cat([model(x) for x, _ in trainer.dls.valid]))
        assert torch.equal(trainer.ReportCB.lines[-1][1], torch.cat([trainer.model(x) for x, _ in test]))


@pytest.mark.shows("PTA-23")
def test_progress_is_told_for_training_and_for_an_evaluation_alone():
    "A header when the first row comes, a row for each epoch, and the same for a run that only evaluates"
    trainer = make_trainer(MetricsCB(), ProgressCB("plain"))
    for kwargs, column in ((dict(), "train_loss"), (dict(train=False), "valid_loss")):
        with redirect_stdout(io.StringIO()) as out:
            trainer.fit(2, **kwargs)
        header, *rows = [o.split() for o in out.getvalue().splitlines()]
        assert header[0] == "epoch" and column in header and [o[0] for o in rows] == ["0", "1"]
    assert "train_loss" not in header


# The history


@pytest.mark.shows("PTA-40")
def test_the_history_answers_what_others_ask_of_theirs():
    "Names, values, the newest, one more, the epoch, beginning anew; a number that is not there is an error"
    trainer = make_trainer(MetricsCB(show=False))
    trainer.fit(3)
    history = trainer.history
    assert (
        set(history.names()) == {"fit", "epoch", "train_loss", "valid_loss", "elapsed"}
        and len(history["train_loss"]) == 3
    )
    assert (
        history.latest("valid_loss") == history["valid_loss"][-1]
        and history["epoch"] == [0, 1, 2]
        and history.current["epoch"] == 2
    )
    history.write(score=0.5)
    assert history["score"] == [None, None, 0.5]
    for row in history.rows:
        row.pop("score", None)
    with pytest.raises(LookupError, match="The history has no `score`"):
        history.latest("score")
    trainer.history = History()
    assert len(trainer.history) == 0
    trainer.fit(1)
    assert (trainer.history.fit, len(trainer.history)) == (0, 1)


class ListHistory(History):
    "A history of one's own, which also tells somebody else"

    def __init__(self):
        super().__init__()
        self.told = []

    def write(self, **columns):
        super().write(**columns)
        self.told.append(set(columns))


@pytest.mark.shows("PTA-40")
def test_another_class_of_history_may_take_its_place():
    trainer = make_trainer(MetricsCB(show=False))
    trainer.history = ListHistory()
    trainer.fit(1)
    assert (
        set().union(*trainer.history.told) == {"train_loss", "valid_loss", "elapsed"}
        and len(trainer.history) == 1
    )


# Training with many options


@pytest.mark.shows("PTA-45", "PTA-47")
def test_all_options_of_training_together():
    "Updates, accumulation, clipping, a schedule, options of loaders; each is one callback or argument"
    rows = list(zip(torch.randn(30, 3), torch.randn(30, 1)))
    made = []

    def schedule(opt, trainer):
        made.append(
            (trainer.n_epochs, trainer.updates_per_epoch, len(trainer.dls.train), trainer.total_updates)
        )
        return optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=trainer.total_updates - 2)

    torch.manual_seed(0)
    dls = DataLoaders(
        *get_dataloaders(rows, rows, 4, drop_last=True, collate_fn=lambda o: tuple(map(torch.stack, zip(*o))))
    )
    trainer = Trainer(
        dls,
        F.mse_loss,
        optim.AdamW,
        nn.Linear(3, 1),
        [
            BasicTrainCB(),
            MetricsCB(show=False),
            AccumulationCB(2),
            ClipGradCB(max_norm=0.1),
            LimitCB(10),
            BatchSchedulerCB(schedule),
            RecorderCB(),
        ],
    )
    trainer.fit(5, lr=0.1)
    assert (
        made == [(5, 4, 7, 10)] and trainer.n_updates == 10 and trainer.stop_reason == "10 updates are enough"
    )
    assert trainer.opt.param_groups[0]["lr"] == 0
    trainer.history = History()
    trainer.fit(1, lr=0.1)
    assert len(trainer.history) == 1


@pytest.mark.filterwarnings("error")
def test_half_precision_leaves_an_own_way_of_stepping_alone():
    "With bfloat16 two optimizers both step; with float16 the scaler does, and the summary says so"

    class TwoStepsCB(BasicTrainCB):
        def step(self, trainer):
            trainer.opt.step()
            trainer.n_steps += 1

    for dtype, expected in (("bfloat16", 4), ("float16", 0)):
        trainer = make_trainer()
        trainer.callbacks.clear()
        trainer.add_callbacks([TwoStepsCB(), MixedPrecisionCB(dtype, init_scale=1.0)])
        trainer.n_steps = 0
        trainer.fit(1, valid=False)
        assert trainer.n_steps == expected and trainer.n_updates == 4


@pytest.mark.shows("PTA-31")
def test_the_best_average_is_measured_and_kept():
    "Validation measures the average, other metrics included, and the best of it ends in the model"

    class HitsMetric:
        def reset(self):
            self.x = []

        def update(self, preds, targets):
            self.x.append(preds.mean())

        def compute(self):
            return torch.stack(self.x).mean()

    kept = []

    class LookCB:
        order = Order.LAST

        def log(self, trainer):
            kept.append(copy.deepcopy(trainer.EMACB.evaluated))

    trainer = make_trainer(MetricsCB(mean=HitsMetric(), show=False), EMACB(0.5), KeepBestCB(), LookCB())
    trainer.fit(4, lr=0.7)
    for row, average in zip(trainer.history, kept):
        with torch.no_grad():
            preds = [average(x) for x, _ in trainer.dls.valid]
        assert row["mean"] == pytest.approx(torch.cat(preds).mean().item(), rel=1e-5)
        assert row["valid_loss"] == pytest.approx(
            F.mse_loss(torch.cat(preds), torch.cat([y for _, y in trainer.dls.valid])).item(), rel=1e-5
        )
    best = min(range(4), key=lambda o: trainer.history["valid_loss"][o])
    assert trainer.KeepBestCB.best_epoch == best and torch.equal(trainer.model.weight, kept[best].weight)
