"Runs in which callbacks leave or come in the middle of a fit go on, and back, as they went."

import pytest
import torch

from isaac_loop.all import CheckpointCB, KeepBestCB, MetricsCB, RewindCB, StateOwnerMissing
from small import trainer_with


class Cut(Exception):
    pass


class CutCB:
    "An end that nobody expects"

    def before_step(self, trainer):
        if trainer.n_updates == 5:
            raise Cut


class OnceCB:
    "Another first epoch, then leave"

    def after_predict(self, trainer):
        if trainer.training:
            trainer.preds = trainer.preds * 1.5

    def log(self, trainer):
        trainer.remove_callback(self)


class WrapCB:
    "Other batches, and leave in the middle of an epoch, to whose end they last"

    def __init__(self, at):
        self.at = at

    def before_epoch(self, trainer):
        if trainer.training:
            trainer.batches = ((x * 2, y) for x, y in trainer.batches)

    def after_step(self, trainer):
        if trainer.n_updates == self.at:
            trainer.remove_callback(self)


class DropCB:
    "Takes another one out"

    def log(self, trainer):
        if trainer.epoch == 0:
            trainer.remove_callback("KeepBestCB")


class CountsCB(OnceCB):
    "Tells its state"

    def state_dict(self):
        return dict(n=1)

    def load_state_dict(self, state):
        pass


class HalfCB:
    "Comes late"

    def after_predict(self, trainer):
        if trainer.training:
            trainer.preds = trainer.preds * 0.5


class LateHalfCB(HalfCB):
    "There from the beginning, with a condition"

    name = "HalfCB"

    def after_predict(self, trainer):
        if trainer.epoch > 0:
            super().after_predict(trainer)


class AddsCB:
    def __init__(self, new):
        self.new = new

    def log(self, trainer):
        if trainer.epoch == 0:
            trainer.add_callback(self.new())


def once():
    return [OnceCB()]


def wrapped_before():
    return [WrapCB(2)]


def wrapped_in_pass():
    return [WrapCB(4)]


def best_left():
    return [MetricsCB(show=False), KeepBestCB(), DropCB()]


def counts():
    return [CountsCB()]


def adds():
    return [AddsCB(HalfCB)]


LEAVING = once, wrapped_before, wrapped_in_pass, best_left, counts


def trained(*callbacks, **kwargs):
    torch.manual_seed(0)
    t = trainer_with(*callbacks)
    t.fit(3, 0.3, **kwargs)
    return t


def cut_off(folder, *callbacks, every="epoch", **kwargs):
    with pytest.raises(Cut):
        trained(*callbacks, CheckpointCB(folder, every=every), CutCB(), **kwargs)


def is_same(a, b):
    return torch.equal(a.model.weight, b.model.weight) and torch.equal(a.model.bias, b.model.bias)


@pytest.mark.parametrize("make", LEAVING)
@pytest.mark.parametrize("every", ["epoch", 1])
def test_who_had_left_leaves_a_run_that_is_started_again(make, every, tmp_path):
    cut_off(tmp_path, *make(), every=every)
    assert is_same(trained(*make(), CheckpointCB(tmp_path, every=every)), trained(*make()))


@pytest.mark.parametrize("make", [*LEAVING, adds])
@pytest.mark.parametrize("every", [None, 1])
def test_a_run_goes_back_to_before_and_after_somebody_left_or_came(make, every):
    was = trained(*make())
    t = trained(*make(), RewindCB(every=every, keep=9))
    for place in sorted(t.RewindCB.states, reverse=True):
        t.rewind(place)
        t.fit(3, 0.3)
        assert is_same(t, was), place


@pytest.mark.parametrize("make", [once, adds])
def test_a_fit_that_broke_off_is_repeated_from_before_somebody_left_or_came(make, tmp_path):
    cutter = CutCB()
    torch.manual_seed(0)
    t = trainer_with(*make(), CheckpointCB(tmp_path, every=2), cutter)
    cutter.before_step = lambda trainer: trainer.n_updates == 3 and 1 / 0
    with pytest.raises(ZeroDivisionError):
        t.fit(3, 0.3)
    t.remove_callback(cutter)
    t.fit(3, 0.3)
    assert is_same(t, trained(*make()))


def test_who_left_in_the_first_fit_is_out_when_the_second_goes_on(tmp_path):
    was = trained(*once())
    was.fit(3, 0.3)
    t = trained(*once(), CheckpointCB(tmp_path))
    with pytest.raises(Cut):
        t.fit(3, 0.3, callbacks=CutCB())
    again = trained(*once(), CheckpointCB(tmp_path))
    again.fit(3, 0.3)
    assert is_same(again, was)


def test_who_is_there_for_one_fit_alone_leaves_it_too_but_not_at_its_end(tmp_path):
    cut_off(tmp_path, callbacks=once())
    t = trained(CheckpointCB(tmp_path), callbacks=once())
    assert is_same(t, trained(*once()))
    ended = trained(callbacks=HalfCB())
    assert ended._own_state.comings.left(ended) == {}


def test_who_had_come_and_is_not_there_is_named(tmp_path):
    cut_off(tmp_path, *adds())
    with pytest.warns(UserWarning, match="`HalfCB` came in the middle.*Give it from the beginning"):
        t = trained(*adds(), CheckpointCB(tmp_path))
    assert not is_same(t, trained(*adds()))


def test_who_had_come_may_be_given_from_the_beginning(tmp_path):
    cut_off(tmp_path, *adds())
    t = trained(LateHalfCB(), CheckpointCB(tmp_path))
    assert is_same(t, trained(*adds()))


def test_who_comes_again_by_itself_is_not_missed(tmp_path):
    def before_epoch(trainer):
        if not any(isinstance(cb, HalfCB) for cb in trainer.callbacks):
            trainer.add_callback(HalfCB())

    cut_off(tmp_path, before_epoch)
    assert is_same(trained(before_epoch, CheckpointCB(tmp_path)), trained(before_epoch))


def test_the_state_of_who_had_come_is_refused_with_what_helps(tmp_path):
    class LateCB(CountsCB):
        def log(self, trainer): ...

    cut_off(tmp_path, AddsCB(LateCB))
    with pytest.raises(StateOwnerMissing, match="In the middle of the saved run .'LateCB'. came: give"):
        trained(AddsCB(LateCB), CheckpointCB(tmp_path))


def test_who_was_replaced_is_missed_when_a_run_goes_back():
    class FirstCB(OnceCB):
        name = "HalfCB"

        def log(self, trainer):
            if trainer.epoch == 0:
                trainer.add_callback(HalfCB(), force=True)

    t = trained(FirstCB(), RewindCB())
    t.rewind(1)
    with pytest.warns(UserWarning, match="`HalfCB` left the run after this place, and the trainer does not"):
        t.rewind(0)


def test_a_state_that_does_not_say_who_came_or_left_is_taken_as_it_is():
    t = trained(*once(), RewindCB())
    for _, state in t.RewindCB.states.values():
        del state["comings"]
    t.rewind(1)
    t.fit(3, 0.3)
    assert is_same(t, trained(*once()))
