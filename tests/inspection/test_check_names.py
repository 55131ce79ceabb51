"Slips in names and results that go nowhere: what the check finds, and what it lets alone."

import pytest
from torch import optim

from inspected import make_trainer


class LosCB:
    def after_get_loss(self, trainer):
        trainer.los = trainer.loss * 2


class ValdCB:
    on_vald = False

    def after_step(self, trainer):
        pass


class ReturnsDoubleCB:
    def after_get_loss(self, trainer):
        return trainer.loss * 2


class ReturnsTurnedCB:
    def after_predict(self, trainer):
        return -trainer.preds


class NamesStopCB:
    def after_batch(self, trainer):
        if trainer.batch_num > 100:
            trainer.request_stop  # noqa: B018


class BatchEndCB:
    def before_fit(self, trainer):
        self.n = 0

    def batch_end(self, trainer):
        self.n += 1


FAULTS = {
    LosCB: ("misspelt", "trainer.loss`"),
    ValdCB: ("unread_setting", "`on_valid`"),
    ReturnsDoubleCB: ("return_ignored", "as in `trainer.loss = ...`"),
    ReturnsTurnedCB: ("return_ignored", "as in `trainer.preds = ...`"),
    NamesStopCB: ("no_effect", "`trainer.request_stop()`"),
    BatchEndCB: ("nearly_event", "another word for `after_batch`, and nobody calls it"),
}


@pytest.mark.parametrize("cls", FAULTS, ids=lambda o: o.__name__)
def test_a_slip_is_found(cls):
    name, words = FAULTS[cls]
    findings = make_trainer([cls()]).check(batches=0)
    assert [o.name for o in findings] == [name] and words in str(findings[0])


class OwnNamesCB:
    "Calls what it has, reads what it sets, and returns what is its own"

    on_valds = None
    on_trace = False

    def before_fit(self, trainer):
        self.last = 0.0

    def after_get_loss(self, trainer):
        self.epoch_end(trainer)
        return self.last * 2

    def epoch_end(self, trainer):
        trainer.gloss = self.on_trace


class SetsAndReturnsCB:
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss + 1 - 1
        return trainer.loss * 2


@pytest.mark.parametrize("cls", [OwnNamesCB, SetsAndReturnsCB])
def test_names_and_results_of_ones_own_are_let_alone(cls):
    assert list(make_trainer([cls()]).check(batches=0)) == []


def twice(params, lr):
    rate = 2 * lr
    return optim.SGD(params, rate)


def of_groups(params, lr):
    return optim.SGD([dict(params=[p], lr=rate) for p, rate in zip(params, [lr] * 9)])


def test_a_rate_that_the_maker_of_the_optimizer_does_not_look_at_is_found():
    "`fit(lr=...)` changed nothing"
    (finding,) = make_trainer([], opt_func=lambda p, lr: optim.SGD(p, 0.1)).check()
    assert finding.name == "unread_rate" and "does not use it" in finding.text


@pytest.mark.parametrize("opt_func", [twice, of_groups, optim.Adam, lambda p, _: optim.SGD(p, 0.1)])
def test_a_rate_that_is_used_or_meant_to_be_left_out_is_let_alone(opt_func):
    assert list(make_trainer([], opt_func=opt_func).check()) == []
