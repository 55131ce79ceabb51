"""What changes in a run where nobody looks at first: a run that was stopped and goes on, against the same run
that was never stopped. Nothing of it is lost without a word.
"""

import copy
import enum
import warnings
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cutting import stopped_and_not
from isaac_loop.basics.tensors import set_seed
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.state.change_marks import Marker
from isaac_loop.train.training import BasicTrainCB
from runs import fit, make_trainer


def with_model(make):
    set_seed(42)
    return make_trainer([BasicTrainCB(), MetricsCB(show=False)], model=make())


def with_callback(cb):
    return make_trainer([BasicTrainCB(), MetricsCB(show=False), cb])


class Net(nn.Module):
    "A model that scales its predictions by what it keeps"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.keep()

    def keep(self):
        pass

    def scaled(self, y):
        return y

    def forward(self, x):
        return self.scaled(self.layer(x))


# ---- writes that raise no version of a tensor


def by_data(mine, other):
    mine.data.mul_(0.9).add_(other.data, alpha=0.1)


def by_set(mine, other):
    mine.data = 0.9 * mine.data + 0.1 * other.data


def by_numpy(mine, other):
    mine.detach().numpy()[:] = (0.9 * mine + 0.1 * other).detach().numpy()


@pytest.mark.parametrize("move", [by_data, by_set, by_numpy])
def test_weights_of_a_teacher_go_on_however_they_are_written(move, tmp_path):
    class TeacherCB:
        def __init__(self):
            self.teacher = nn.Linear(8, 3)

        def after_predict(self, trainer):
            if trainer.training:
                for pair in zip(self.teacher.parameters(), trainer.model.layer.parameters()):
                    move(*pair)
            trainer.preds = trainer.preds + self.teacher(trainer.batch[0]).detach() * trainer.preds

    def make():
        trainer = with_model(Net)
        trainer.add_callbacks(TeacherCB())
        return trainer

    stopped_and_not(tmp_path, make, [4, 10], attributes=lambda t: t.TeacherCB.teacher.state_dict())


TENSORS = {
    "zeros": torch.zeros(64),
    "many of many bytes": torch.zeros(4096, dtype=torch.float64),
    "a part": torch.zeros(4, 6)[:, 1::2],
    "expanded": torch.zeros(3, 1).expand(3, 1000),
    "truths": torch.zeros(5, dtype=torch.bool),
    "odd bytes": torch.zeros(7, dtype=torch.bfloat16)[1:],
    "one": torch.zeros(()),
    "complex": torch.zeros(3, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_write_without_a_version_changes_the_mark(name):
    x = TENSORS[name].clone(memory_format=torch.preserve_format) if name != "expanded" else TENSORS[name]
    before, again = (Marker(set()).mark(x) for _ in range(2))
    assert before == again
    (x.data[:, :1] if name == "expanded" else x.data).fill_(1)
    assert Marker(set()).mark(x) != before


# ---- what a run changes over to


class Phase(enum.Enum):
    WARM = "warm"
    MAIN = object()


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Phased(Net):
    "Goes over to another phase after some batches"

    def keep(self):
        self.n, self.phase, self.bits = 0, Phase.WARM, None

    def scaled(self, y):
        self.n += self.training
        if self.n == 5:
            self.phase, self.bits = Phase.MAIN, Bits.A | Bits.B
        return y if self.phase is Phase.WARM else self.bits * y


def test_a_phase_goes_on(tmp_path):
    stopped_and_not(tmp_path, lambda: with_model(Phased), [4, 10], attributes=lambda t: str(t.model.phase))


class SwitchCB:
    "Works in another way after some batches"

    def __init__(self):
        self.n, self.how, self.again = 0, self.warm, self.warm

    def warm(self, preds):
        return preds

    def main(self, preds):
        return 2 * preds

    def after_predict(self, trainer):
        self.n += trainer.training
        self.again = self.warm
        if self.n == 5:
            self.how = self.main
        trainer.preds = self.how(trainer.preds)


class SwitchNet(Net):
    "Has another activation after some batches, and makes one function when it is first needed"

    def keep(self):
        self.n, self.act, self.made = 0, F.relu, None

    def scaled(self, y):
        self.made = self.made or (lambda y: y)
        self.n += self.training
        if self.n == 5:
            self.act = F.softplus
        return self.act(y)


@pytest.mark.parametrize(
    "make, path",
    [(lambda: with_callback(SwitchCB()), "SwitchCB.how"), (lambda: with_model(SwitchNet), "model.act")],
)
def test_a_function_that_takes_the_place_of_another_is_named(make, path):
    trainer = fit(make(), 1)
    with pytest.warns(UserWarning) as told:
        trainer._own_state.take(trainer)
    assert len(told) == 1 and str(told[0].message).startswith(f"`{path}` changed during this fit")


# ---- what a model shows, and what it hides

Out = namedtuple("Out", "logits size")


class Shows(Net):
    "Keeps its last output, to be looked at, and the state that it carries, in tuples with names"

    def keep(self):
        self.out = self.packed = self.carried = None

    def scaled(self, y):
        self.out = Out(y.detach(), len(y))
        self.packed = nn.utils.rnn.pack_sequence([y.detach()[0]])
        self.carried = Out(y.detach().mean(0), 1 + (self.carried.size if self.carried else 0))
        return y * (1 + self.carried.logits) / self.carried.size


def test_tuples_with_names_go_on_also_where_there_was_nothing_at_first(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stopped_and_not(tmp_path, lambda: with_model(Shows), [4, 10])


class Hides(Net):
    "Has a teacher that is not among its modules"

    def keep(self):
        object.__setattr__(self, "teacher", copy.deepcopy(self.layer))
        self.__dict__["scale"] = nn.Parameter(torch.ones(3))

    def scaled(self, y):
        if self.training:
            for mine, other in zip(self.teacher.parameters(), self.layer.parameters()):
                mine.detach().lerp_(other.detach(), 0.1)
            self.__dict__["scale"] = nn.Parameter(self.scale.detach() * 0.9)
        return y + y * self.teacher.bias.detach() * self.scale.detach()


def test_a_hidden_module_stays_hidden(tmp_path):
    trainer = stopped_and_not(tmp_path, lambda: with_model(Hides), [2, 10])
    assert list(trainer.model._modules) == ["layer"] and "teacher" in vars(trainer.model)
