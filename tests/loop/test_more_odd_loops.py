"""Loops without a loader, with a carried state, over an endless stream, or with a batch written whole:
held against loops by hand, broken off anywhere and resumed, and disturbed by whoever looks on.

The callbacks are those of the tutorials `more_odd_loops` and `counting_in_updates`.
"""

import copy
import itertools
import warnings
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import isaac_loop.evaluate.evaluation  # noqa: F401  (brings `get_preds` and `validate`)
from isaac_loop import CancelBatchException, CancelEpochException, CancelStepException
from isaac_loop import DataLoaders, Trainer, set_seed, with_cbs
from isaac_loop.callbacks import (
    AccumulationCB,
    BasicTrainCB,
    CheckpointCB,
    ClipGradCB,
    EarlyStoppingCB,
    EMACB,
)
from isaac_loop.callbacks import EvaluatorCB, KeepBestCB, LimitCB, MetricsCB, NBatchCB, OneCycleSchedulerCB
from isaac_loop.callbacks import ProgressCB, RecorderCB, WarmupSchedulerCB
from isaac_loop.data import exact_loader

from pages import page

more, counting = (
    partial(lambda name, thing: page(name)[thing], o) for o in ("more_odd_loops", "counting_in_updates")
)
pytestmark = pytest.mark.filterwarnings("ignore:.*read again", "ignore:Reading .* again")


class Cut(Exception):
    pass


def cut_at(n):
    def before_backward(trainer):
        if trainer.n_updates == n:
            raise Cut

    return before_backward


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def resumed(make, folder, at, every=3, **kwargs):
    "The trainer of a run that broke off after `at` updates and was started again with everything new"
    with pytest.raises(Cut):
        make(CheckpointCB(folder, every=every), cut_at(at)).fit(**kwargs)
    trainer = make(CheckpointCB(folder, every=every))
    trainer.fit(**kwargs)
    return trainer


def losses(trainer):
    return trainer.history.batches["loss"]


def recorder():
    return RecorderCB(loss=lambda trainer: trainer.loss)


# Games


def policy():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def gamer(*callbacks, n=10, valid=None, cls=None, seed=0):
    set_seed(seed)
    cls = cls or more("ReinforceCB")
    return Trainer(DataLoaders(range(n), valid), None, optim.Adam, policy(), [cls(), *callbacks])


def schedule():
    return [ClipGradCB(0.5), OneCycleSchedulerCB(), EMACB(0.9), recorder()]


@pytest.mark.parametrize("at", [0, 4, 9])
def test_games_go_on_after_any_of_them(at, tmp_path):
    def make(*callbacks):
        return gamer(*schedule(), *callbacks)

    whole = make()
    whole.fit(1, lr=0.02, valid=False)
    again = resumed(make, tmp_path, at, n_epochs=1, lr=0.02, valid=False)
    assert same(again.model, whole.model) and same(again.EMACB.average, whole.EMACB.average)
    assert losses(again) == losses(whole)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradients_of_several_games_make_one_update(seed):
    trainer = gamer(AccumulationCB(2, weigh="mean"), ProgressCB("plain"), seed=seed)
    trainer.fit(1, lr=0.02, valid=False)
    set_seed(seed)
    model = policy()
    opt = optim.Adam(model.parameters(), 0.02)
    for _ in range(5):
        for _ in range(2):
            (more("reinforce")(*more("play")(model)) / 2).backward()
        opt.step()
        opt.zero_grad()
    assert same(trainer.model, model) and trainer.n_updates == 5


def test_games_are_measured_if_somebody_says_what_they_weigh():
    with pytest.raises(TypeError, match="`weigh='mean'`"):
        gamer(MetricsCB()).fit(1, valid=False)
    trainer = gamer(MetricsCB(weigh="mean", show=False), valid=range(2))
    trainer.fit(2)
    assert trainer.history.names() == ["fit", "epoch", "train_loss", "valid_loss", "elapsed"]


def test_validation_plays_too_and_does_not_learn():
    seen = []

    def after_predict(trainer):
        seen.append((trainer.training, trainer.preds[0].requires_grad))

    gamer(after_predict, n=2, valid=range(3)).fit(1)
    assert seen == [(True, True)] * 2 + [(False, False)] * 3


def test_a_game_may_be_left_without_learning_from_it():
    def before_step(trainer):
        if trainer.batch == 1:
            raise CancelStepException

    def after_predict(trainer):
        if trainer.batch == 2:
            raise CancelBatchException

    trainer = gamer(before_step, n=4, cls=None)
    trainer.fit(1, valid=False, callbacks=after_predict)
    assert trainer.n_updates == 2


# A state that is carried on


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x, state):
        h, state = self.rnn(x, state)
        return self.out(h), state


WAVES = torch.sin(torch.arange(3.0).view(3, 1, 1) + 0.5 * torch.arange(43.0).view(1, -1, 1))
PIECES = list(zip(WAVES[:, :-1].split(6, 1), WAVES[:, 1:].split(6, 1)))  # Seven


class OnAndOnCB(BasicTrainCB):
    "A state that is never begun anew, not even by the next epoch, and that validation must not touch"

    def before_fit(self, trainer):
        self.state = None

    def predict(self, trainer):
        trainer.preds, state = trainer.model(trainer.batch[0], self.state if trainer.training else None)
        if trainer.training:
            self.state = state.detach()


class Forgetful:
    "The carried state of the page, which checkpoints are told to leave out"

    stateless = "state"


def carrier(*callbacks, cls=None):
    set_seed(0)
    cls = cls or more("CarryCB")
    return Trainer(
        DataLoaders(PIECES, PIECES[:2]), F.mse_loss, optim.Adam, Net(), [cls(), recorder(), *callbacks]
    )


def carried_by_hand(n_epochs, anew):
    set_seed(0)
    model, state = Net(), None
    opt = optim.Adam(model.parameters(), 0.02)
    for _ in range(n_epochs):
        state = None if anew else state
        for x, y in PIECES:
            preds, state = model(x, state)
            F.mse_loss(preds, y).backward()
            opt.step()
            opt.zero_grad()
            state = state.detach()
    return model


def validating(trainer):
    if trainer.n_updates % 3 == 1:
        trainer.validate()


def predicting(trainer):
    if trainer.n_updates % 3 == 1:
        trainer.get_preds("train")


DISTURBANCES = {
    "nobody": [],
    "metrics": [MetricsCB(show=False)],
    "evaluator": [EvaluatorCB(updates=2)],
    "evaluator of training": [EvaluatorCB("train", updates=3)],
}
KINDS = {"by epoch": (None, True), "on and on": (OnAndOnCB, False)}
of_both_kinds = pytest.mark.parametrize("cls,anew", KINDS.values(), ids=KINDS)


@of_both_kinds
@pytest.mark.parametrize("disturbing", DISTURBANCES.values(), ids=DISTURBANCES)
def test_a_carried_state_is_that_of_training_whoever_looks_on(cls, anew, disturbing):
    trainer = carrier(*copy.deepcopy(disturbing), cls=cls)
    trainer.fit(3, lr=0.02)
    assert same(trainer.model, carried_by_hand(3, anew))


@of_both_kinds
@pytest.mark.parametrize("look", [validating, predicting])
def test_a_carried_state_survives_a_pass_in_the_middle(cls, anew, look):
    def after_step(trainer):
        look(trainer)

    trainer = carrier(after_step, cls=cls)
    trainer.fit(3, lr=0.02, valid=False)
    assert same(trainer.model, carried_by_hand(3, anew))


@of_both_kinds
@pytest.mark.parametrize("at,disturbing", [(2, "nobody"), (7, "nobody"), (13, "evaluator"), (20, "nobody")])
def test_a_carried_state_goes_on_after_any_piece(cls, anew, at, disturbing, tmp_path):
    def make(*callbacks):
        return carrier(*copy.deepcopy(DISTURBANCES[disturbing]), *callbacks, cls=cls)

    again = resumed(make, tmp_path, at, every=2, n_epochs=3, lr=0.02)
    assert same(again.model, carried_by_hand(3, anew))
    whole = make()
    whole.fit(3, lr=0.02)
    assert losses(again) == losses(whole)


def test_it_is_the_state_that_makes_it_exact(tmp_path):
    forgetful = type("ForgetfulCB", (Forgetful, more("CarryCB")), {})
    again = resumed(partial(carrier, cls=forgetful), tmp_path, 11, n_epochs=3, lr=0.02, valid=False)
    assert not same(again.model, carried_by_hand(3, True))


# Streams without an end


class Rows(IterableDataset):
    "Random rows for ever"

    def __iter__(self):
        while True:
            x = torch.rand(3)
            yield x, x.prod().view(1)


class PlacedRows(Rows):
    "The same, which has nothing to remember"

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


class Batches:
    "Batches of them, from an object that can be iterated"

    def __iter__(self):
        while True:
            x = torch.rand(4, 3)
            yield x, x.prod(1, keepdim=True)


STREAMS = {
    "exact": lambda: exact_loader(Rows(), 4, seed=1),
    "placed": lambda: exact_loader(PlacedRows(), 4, seed=1),
    "loader": lambda: DataLoader(Rows(), 4),
    "object": Batches,
    "generator": lambda: iter(Batches()),
    "cycle": lambda: itertools.cycle([(torch.ones(4, 3) * i, torch.ones(4, 1)) for i in (0.1, 0.2, 0.3)]),
}
VALID = [(torch.rand(6, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 1))]
of_each_stream = pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)


def regression():
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 1))


def streamer(stream, *callbacks, updates=20, every=4):
    set_seed(0)
    usual = [BasicTrainCB(), LimitCB(updates), AccumulationCB(2), ClipGradCB(0.3), recorder()]
    usual += [WarmupSchedulerCB("cosine", warmup=5, end_factor=0.1), EvaluatorCB(updates=every)]
    usual += [KeepBestCB("eval_loss"), EarlyStoppingCB("eval_loss", patience=4)]
    return Trainer(DataLoaders(stream(), VALID), F.mse_loss, optim.AdamW, regression(), [*usual, *callbacks])


@of_each_stream
@pytest.mark.parametrize("at", [1, 12])
def test_an_endless_stream_goes_on_where_it_was_broken_off(stream, at, tmp_path):
    "Model, best weights, patience, and the loss of every batch"
    whole = streamer(stream)
    whole.fit(1, lr=0.05, valid=False)
    again = resumed(partial(streamer, stream), tmp_path, at, every=5, n_epochs=1, lr=0.05, valid=False)
    assert same(again.model, whole.model) and losses(again) == losses(whole)
    assert (again.n_updates, again.stop_reason) == (whole.n_updates, whole.stop_reason)
    for name in ("best", "n_bad"):
        assert getattr(again.EarlyStoppingCB, name) == getattr(whole.EarlyStoppingCB, name)
    assert again.KeepBestCB.best == whole.KeepBestCB.best


def test_a_stream_that_has_nothing_to_remember_is_not_read_again(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed(partial(streamer, STREAMS["placed"]), tmp_path, 7, n_epochs=1, valid=False)
    with pytest.warns(UserWarning, match="Reading .* again"):
        resumed(partial(streamer, STREAMS["exact"]), tmp_path / "other", 7, n_epochs=1, valid=False)


@of_each_stream
def test_a_run_over_a_stream_that_has_reached_its_limit_is_complete(stream, tmp_path, capsys):
    first = streamer(stream, CheckpointCB(tmp_path, every=5))
    first.fit(1, valid=False)
    again = streamer(stream, CheckpointCB(tmp_path, every=5))
    again.fit(1, valid=False)
    assert "complete already" in capsys.readouterr().out
    assert again.n_updates == 20 and len(losses(again)) == 40


@pytest.mark.parametrize("stream", [STREAMS["object"], STREAMS["generator"], STREAMS["loader"]])
def test_a_higher_limit_and_an_epoch_more_train_further(stream, tmp_path):
    "As if there had been that limit from the beginning, where a second pass draws on from the same numbers"

    def make(updates, *callbacks):
        set_seed(0)
        usual = [BasicTrainCB(), LimitCB(updates), *callbacks]
        return Trainer(DataLoaders(stream()), F.mse_loss, optim.AdamW, regression(), usual)

    make(8, CheckpointCB(tmp_path)).fit(1, valid=False)
    further = make(13, CheckpointCB(tmp_path))
    further.fit(2, valid=False)
    assert further.n_updates == 13
    whole = make(13)
    whole.fit(1, valid=False)
    assert stream is STREAMS["loader"] or same(
        further.model, whole.model
    )  # A loader draws a seed for each pass


@pytest.mark.parametrize(
    "limit,n_updates",
    [(dict(updates=7), 7), (dict(samples=30), 4), (dict(samples=32), 4), (dict(samples=33), 5)],
)
def test_a_limit_in_the_middle_of_an_update_makes_it_of_what_there_is(limit, n_updates):
    set_seed(0)
    callbacks = [BasicTrainCB(), LimitCB(**limit), AccumulationCB(2)]
    trainer = Trainer(DataLoaders(Batches()), F.mse_loss, optim.SGD, regression(), callbacks)
    trainer.fit(valid=False)  # However many epochs
    assert trainer.n_updates == n_updates and trainer.epoch == 0


def test_tokens_are_counted_by_a_function_of_the_batch():
    callbacks = [BasicTrainCB(), LimitCB(samples=100, count=lambda batch: batch[0].numel())]
    trainer = Trainer(DataLoaders(Batches()), F.mse_loss, optim.SGD, regression(), callbacks)
    trainer.fit(1, valid=False)
    assert trainer.n_updates == 9 and trainer.stop_reason == "108 samples are enough"


@pytest.mark.parametrize("name", ["exact", "placed", "loader", "object"])
def test_an_evaluation_of_the_first_batches_of_an_endless_stream_leaves_no_trace(name):
    def make(*callbacks):
        set_seed(0)
        loaders = DataLoaders(STREAMS[name](), iter(Batches()))  # Of which validation takes what it needs
        usual = [BasicTrainCB(), LimitCB(12), recorder(), *callbacks]
        trainer = Trainer(loaders, F.mse_loss, optim.AdamW, regression(), usual)
        trainer.fit(1, lr=0.05, valid=False)
        return trainer

    both = dict(train="train", valid="valid")
    alone, watched = make(), make(EvaluatorCB(both, updates=3, n_batches=2, at_start=True))
    assert same(alone.model, watched.model) and losses(alone) == losses(watched)
    assert sum(o == o for o in watched.history.batches["train_loss"]) == 4


def test_an_evaluation_takes_no_batches_away_from_an_iterator_that_trains():
    trainer = Trainer(DataLoaders(iter(Batches())), F.mse_loss, optim.SGD, regression(), [BasicTrainCB()])
    with pytest.raises(TypeError, match="`train` of `EvaluatorCB` is the iterator that the training reads"):
        trainer.fit(1, valid=False, callbacks=EvaluatorCB(dict(train="train"), updates=3, n_batches=2))


def test_a_stream_cut_into_epochs_has_a_row_for_each_and_a_length():
    callbacks = [BasicTrainCB(), AccumulationCB(2), NBatchCB(8, on_valid=False), OneCycleSchedulerCB()]
    trainer = Trainer(DataLoaders(Batches(), VALID), F.mse_loss, optim.Adam, regression(), callbacks)
    trainer.fit(3, callbacks=MetricsCB(show=False))
    assert (len(trainer.history), trainer.n_updates, trainer.total_updates) == (3, 12, 12)


def test_windows_and_their_targets_are_one_character_apart():
    codes = torch.arange(50)
    inp, target = next(iter(counting("Windows")(codes, 7)))
    assert len(inp) == 7 and torch.equal(target, inp + 1)


# A batch written whole


def careful(*callbacks):
    set_seed(0)
    rows = [(torch.randn(6, 3), torch.randint(0, 3, (6,))) for _ in range(6)]
    cls = more("CarefulTrainer")
    return cls(DataLoaders(rows, rows), F.cross_entropy, optim.SGD, nn.Linear(3, 3), callbacks)


@pytest.mark.parametrize("at", [1, 6, 11])
def test_a_batch_written_whole_goes_on_with_what_it_has_counted(at, tmp_path):
    whole = careful(recorder())
    whole.fit(3, lr=40.0)
    assert whole.n_back > 0

    def before_batch(trainer):
        if trainer.n_updates == at:
            raise Cut

    with pytest.raises(Cut):
        careful(recorder(), CheckpointCB(tmp_path, every=2), before_batch).fit(3, lr=40.0)
    again = careful(recorder(), CheckpointCB(tmp_path, every=2))
    again.fit(3, lr=40.0)
    assert same(again.model, whole.model) and again.n_back == whole.n_back
    assert losses(again) == losses(whole)


def inline(counts):
    "A trainer that does everything in `one_batch`, and its step by `run_callbacks` if it `counts` that way"

    class Inline(Trainer):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            x, y = self.batch
            self.preds = self.model(x)
            self.loss = self.loss_func(self.preds, y)
            if not self.training:
                return
            self.loss.backward()
            if counts:
                self.run_callbacks("step")
            else:
                self.opt.step()
                self.n_updates += 1
            self.opt.zero_grad()

        if counts:

            def step(self):
                self.opt.step()

    rows = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(6)]
    return partial(Inline, DataLoaders(rows, rows), F.mse_loss, optim.SGD, nn.Linear(3, 1))


@pytest.mark.parametrize(
    "callback", [LimitCB(4), ClipGradCB(1.0), EMACB(), OneCycleSchedulerCB(cycle_momentum=False)], ids=str
)
def test_a_step_that_is_run_is_not_waited_for_in_vain(callback):
    "Although nobody does the other steps"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inline(counts=True)([copy.deepcopy(callback), MetricsCB(show=False)]).fit(1)
    with pytest.warns(UserWarning, match=rf"`{type(callback).__name__}.\w+_step` waits in vain"):
        inline(counts=False)([copy.deepcopy(callback), MetricsCB(show=False)]).fit(1)


def test_another_step_that_nobody_does_is_waited_for_in_vain_beside_it():
    def before_zero_grad(trainer):
        raise AssertionError

    with pytest.warns(UserWarning, match="`before_zero_grad.before_zero_grad` waits in vain"):
        inline(counts=True)(before_zero_grad).fit(1)


class ByHand(Trainer):
    "Updates by hand in `one_batch`, and counts that"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.preds = self.model(x)
        self.loss = self.loss_func(self.preds, y)
        if self.training:
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.n_updates += 1


class TellsOfSteps(ByHand):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        ByHand.one_batch.__wrapped__(self)
        if self.training:
            self.run_callbacks("after_step")


def by_hand(*cbs, cls=ByHand):
    rows = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(4)]
    callbacks = [BasicTrainCB(), MetricsCB(show=False), *cbs]
    return cls(DataLoaders(rows, rows), F.mse_loss, optim.SGD, nn.Linear(3, 1), callbacks)


def said_by(f):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        f()
    return [str(o.message) for o in told]


WAITING = {
    "accumulation": (AccumulationCB(2), ["backward", "step", "zero_grad"]),
    "clipping": (ClipGradCB(1.0), ["step"]),
    "average": (EMACB(), ["step"]),
    "schedule": (OneCycleSchedulerCB(cycle_momentum=False), ["step"]),
}


@pytest.mark.parametrize("name", WAITING)
def test_who_hears_nothing_of_updates_that_are_made_by_hand_is_named_once(name):
    "Although the updates are counted"
    callback, steps = WAITING[name]
    callback = copy.deepcopy(callback)
    (told,) = said_by(lambda: by_hand(callback).fit(2))
    assert f"`{type(callback).__name__}." in told and "waited in vain in the training pass of epoch 0" in told
    assert f"self.run_callbacks({', '.join(map(repr, steps))})" in told
    found = by_hand(copy.deepcopy(callback))
    told = said_by(found.check)
    assert any(f"`{type(callback).__name__}." in o and "waits in vain" in o for o in told)


class EverySecond(Trainer):
    "Gathers by itself: the step is run in every second batch"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward")
            if self.batch_num % 2:
                self.run_callbacks("step", "zero_grad")


class Around(Trainer):
    "The usual batch, with something around it"

    def one_batch(self):
        super().one_batch()


def broken_off_and_resumed(cls, folder, at, every=1, n=5):
    "What is said by the run that goes on behind the last checkpoint before pass and batch `at`"

    def before_batch(trainer):
        if (trainer.training, trainer.batch_num) == at:
            raise Cut

    def make(*others):
        rows = [(torch.ones(3), torch.ones(1))] * n
        dls = DataLoaders(*(exact_loader(rows, 1, shuffle=False) for _ in range(2)))
        schedule = OneCycleSchedulerCB(cycle_momentum=False)
        waiting = [schedule, EMACB(), MetricsCB(show=False), CheckpointCB(folder, every=every)]
        return cls(dls, F.mse_loss, optim.SGD, nn.Linear(3, 1), [BasicTrainCB(), *waiting, *others])

    with warnings.catch_warnings(), pytest.raises(Cut):
        warnings.simplefilter("ignore")
        make(before_batch).fit(1)
    return said_by(lambda: make().fit(1))


@pytest.mark.parametrize("cls", [EverySecond, Around])
@pytest.mark.parametrize("at", [(True, 4), (False, 0)])
def test_who_had_a_turn_before_a_run_was_broken_off_has_not_waited_in_vain(cls, at, tmp_path):
    "The rest of the pass has no batch, or none with a step"
    assert broken_off_and_resumed(cls, tmp_path, at, n=5 if at[0] else 4) == []


def test_who_hears_nothing_in_the_rest_of_a_pass_is_named_all_the_same(tmp_path):
    (told,) = broken_off_and_resumed(ByHand, tmp_path, (True, 3))
    assert "waited in vain in the training pass of epoch 0" in told


class LooksOnCB:
    "Has something else to do in such a loop"

    def before_step(self, trainer): ...
    def after_batch(self, trainer): ...


def test_who_has_a_turn_somewhere_or_wants_none_is_not_named():
    assert said_by(lambda: by_hand(LooksOnCB()).fit(1)) == []
    silent = ClipGradCB(1.0)
    silent.silent = "waits_in_vain"
    assert said_by(lambda: by_hand(silent).fit(1)) == []
    assert said_by(lambda: by_hand(EMACB()).fit(1, train=False)) == []
    tells = by_hand(EMACB(), cls=TellsOfSteps)
    assert said_by(lambda: tells.fit(1)) == [] and not any("`EMACB." in o for o in said_by(tells.check))


@pytest.mark.parametrize("extra", [{}, dict(scale=2)])
def test_events_that_a_batch_of_ones_own_runs_are_known(extra):
    "Also those with further arguments, and when callbacks come and go"

    class Own(Trainer):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            self.run_callbacks("predict", "get_loss")
            if self.training:
                self.run_callbacks("backward")
                self.run_callbacks("step", **extra)
                self.run_callbacks("zero_grad")

        def predict(self):
            self.preds = self.model(self.batch[0])

        def get_loss(self):
            self.loss = self.loss_func(self.preds, self.batch[1])

        def backward(self):
            self.loss.backward()

        def step(self, scale=1):
            self.opt.step()

        def zero_grad(self):
            self.opt.zero_grad()

    class WatchCB:
        heard = 0

        def after_step(self, trainer, scale=1):
            self.heard += 1

        def before_step(self, trainer, scale=1): ...

    class LeavesCB:
        def after_batch(self, trainer):
            trainer.remove_callbacks(self)

    rows = [(torch.randn(6, 3), torch.randn(6, 1))]
    watch = WatchCB()
    trainer = Own(DataLoaders(rows), F.mse_loss, optim.SGD, nn.Linear(3, 1), [watch, LeavesCB()])
    assert said_by(lambda: trainer.fit(1, valid=False)) == [] and watch.heard == 1


class Usual(Trainer):
    "Does in a batch of its own what the loop does"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")


class LeavesOut(ByHand):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        if self.training:
            raise CancelBatchException
        ByHand.one_batch.__wrapped__(self)


class CancelsCB:
    "Only validates"

    def __init__(self, event, exception):
        setattr(self, event, lambda trainer: self._cancel(trainer, exception))

    def _cancel(self, trainer, exception):
        if trainer.training:
            raise exception


class AllOverflowedCB:
    def before_step(self, trainer):
        raise CancelStepException


@pytest.mark.parametrize(
    "callback",
    [
        CancelsCB("before_epoch", CancelEpochException),
        CancelsCB("before_batch", CancelBatchException),
        CancelsCB("after_predict", CancelBatchException),
        CancelsCB("after_predict", CancelEpochException),
        AllOverflowedCB(),
    ],
)
@pytest.mark.parametrize("cls", [Usual, LeavesOut])
def test_a_pass_in_which_callbacks_left_out_all_updates_is_not_put_down_to_a_batch_of_ones_own(cls, callback):
    trainer = by_hand(callback, cls=cls)
    assert said_by(lambda: trainer.fit(2)) == [] and trainer.n_updates == 0


def test_an_uncounted_update_in_a_pass_that_was_cancelled_later_is_still_noticed():
    class Uncounted(ByHand):
        @with_cbs("batch", CancelBatchException)
        def one_batch(self):
            ByHand.one_batch.__wrapped__(self)
            self.n_updates -= self.training  # As if it did not count

    def after_batch(trainer):
        if trainer.training and trainer.batch_num == 2:
            raise CancelEpochException

    for callbacks in ([], [after_batch]):
        (told,) = said_by(lambda: by_hand(*callbacks, cls=Uncounted).fit(1))
        assert "ended without an update that the loop knows of" in told


class OwnSpan(Trainer):
    "Steps in the span of the library, by a method of its own"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.run_callbacks("predict", "get_loss")
        if self.training:
            self.loss.backward()
            self.my_step()
            self.opt.zero_grad()

    @with_cbs("step", CancelStepException)
    def my_step(self):
        self.opt.step()
        self.n_updates += 1


def test_who_answers_around_a_step_in_a_span_of_ones_own_has_not_waited_in_vain():
    callbacks = [ClipGradCB(0.01), EMACB(), OneCycleSchedulerCB(cycle_momentum=False)]
    torch.manual_seed(0)
    own = by_hand(*copy.deepcopy(callbacks), cls=OwnSpan)
    assert said_by(lambda: own.fit(2)) == []
    torch.manual_seed(0)
    usual = by_hand(*callbacks, cls=Usual)
    usual.fit(2)
    assert torch.equal(own.model.weight, usual.model.weight)

    def after_backward(trainer): ...

    (told,) = said_by(lambda: by_hand(EMACB(), after_backward, cls=OwnSpan).fit(1))
    assert told.startswith("`after_backward.after_backward` waited in vain")


# A batch that grows on the way


@pytest.mark.shows("ISA-116")
@pytest.mark.parametrize("at", [2, 5, 7])
def test_a_batch_that_grows_is_resumed_with_the_same_noise(at, tmp_path):
    cls = page("more_odd_loops")["DreamBoothCB"]
    page("more_odd_loops")["left"] = torch.linspace(0.98, 0.02, 20)[:, None]
    images = torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    halves = [
        [o, torch.randint(0, 12, (6, 2), generator=torch.Generator().manual_seed(1))] for o in images.split(6)
    ]

    def make(*callbacks):
        set_seed(0)
        loader = DataLoader(halves, batch_size=None, shuffle=True)
        callbacks = [cls(0.3), OneCycleSchedulerCB(), recorder(), MetricsCB(show=False), *callbacks]
        return Trainer(DataLoaders(loader), F.mse_loss, optim.AdamW, more("Guess")(), callbacks)

    whole = make()
    whole.fit(2, lr=0.01, valid=False)
    again = resumed(make, tmp_path, at, n_epochs=2, lr=0.01, valid=False)
    assert same(again.model, whole.model) and losses(again) == losses(whole)
    assert all(len(o) == 2 for o in halves)
