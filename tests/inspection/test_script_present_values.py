"""What a script takes from a source is what is there now.

A source says how a class, a function or a default was made. If it has become another since, or would be
made otherwise a second time, the script is given the thing itself, writes its present value, or is refused.
"""

import dataclasses
import enum
import functools
import typing

import pytest
import torch
from torch import optim
from torch.nn import functional as F

from isaac_loop import Trainer, set_seed
from isaac_loop.callbacks import BasicTrainCB
from isaac_loop.data import DataLoaders
from isaac_loop.models import SimpleNet
from test_script import both


def make(*callbacks, cls=Trainer, core=True):
    set_seed(4)
    batches = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(4)]
    model = SimpleNet(4, 8, 3)
    return cls(
        DataLoaders(batches, batches[:2]),
        F.cross_entropy,
        optim.SGD,
        model,
        [*[BasicTrainCB()] * core, *callbacks],
    )


def by(f):
    "A callback that makes of the loss what `f` gives for it"

    class By:
        def after_get_loss(self, trainer):
            trainer.loss = f(trainer.loss)

    return By()


# Classes


class Settings:
    weight = 1.0


Settings.weight = 0.3


class Derived(Settings):
    pass


class Tables:
    table = {"a": 1}  # noqa: RUF012 - That is what is tested

    @staticmethod
    def plain(x):
        return x


Tables.table["a"] = 0.2


class Patched:
    @staticmethod
    def plain(x):
        return x


Patched.plain = staticmethod(lambda x: 0.4 * x)


class Noise:
    shift = torch.randn(3)


K = 2


class Early:
    weight = K


K = 5


class CountedByClass:
    total = 0

    def mean(self, x):
        CountedByClass.total += 1
        return x / CountedByClass.total


class SettingsCB:
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * Settings.weight


class DerivedCB:
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * Derived.weight


class TablesCB:
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * Tables.table["a"]


class PatchedCB:
    def after_get_loss(self, trainer):
        trainer.loss = Patched.plain(trainer.loss)


class NoiseCB:
    def after_predict(self, trainer):
        trainer.preds = trainer.preds + Noise.shift


class EarlyCB:
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * Early.weight


class OwnConstantCB:
    weight = 1.0

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * OwnConstantCB.weight


OwnConstantCB.weight = 0.3


class TwiceHeldCB:
    seen = []  # noqa: RUF012 - That is what is tested

    def __init__(self):
        self.seen.clear()

    def after_get_loss(self, trainer):
        self.seen.append(1)
        trainer.loss = trainer.loss / len(TwiceHeldCB.seen)


class CountedCB:
    def __init__(self):
        CountedByClass.total = 4
        self.counted = CountedByClass()

    def after_get_loss(self, trainer):
        trainer.loss = self.counted.mean(trainer.loss)


class CountedTwiceCB(CountedCB):
    "One of the two objects is made in the fit"

    def __init__(self):
        super().__init__()
        self.counted.dice = torch.Generator()

    def before_fit(self, trainer):
        self.other = CountedByClass()

    def after_predict(self, trainer):
        trainer.preds = self.other.mean(trainer.preds)


CHANGED = {
    SettingsCB: "Settings",
    DerivedCB: "Derived",
    TablesCB: "Tables",
    PatchedCB: "Patched",
    NoiseCB: "Noise",
    EarlyCB: "Early",
    OwnConstantCB: "OwnConstantCB",
    TwiceHeldCB: "TwiceHeldCB",
    CountedCB: "counted",
    CountedTwiceCB: "CountedByClass",
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_class_that_its_source_would_not_make_again_is_given(kind, monkeypatch):
    assert CHANGED[kind] in both(lambda: make(kind()), monkeypatch).needs


@dataclasses.dataclass
class Weights:
    by: float = 1 / 2
    seen: list = dataclasses.field(default_factory=list)

    @property
    def half(self):
        return self.by / 2

    def of(self, x, kind=torch.float32, limit=float("inf")):
        self.seen.append(1)
        return (x * self.half).to(kind).clamp(max=limit)


class Pair(typing.NamedTuple):
    by: float
    more: float = 2

    @functools.cached_property
    def both(self):
        return 0

    @staticmethod
    def of(x):
        return 0.5 * x


class Which(enum.Enum):
    FIRST = enum.auto()
    SECOND = "b", 2


class PlainClassesCB:
    def before_fit(self, trainer):
        self.weights = Weights()

    def after_get_loss(self, trainer):
        which = Which.FIRST if trainer.epoch else Which.SECOND
        trainer.loss = self.weights.of(trainer.loss) * Pair(0.5).more * (1 if which is Which.FIRST else 2)


def test_a_class_that_is_as_its_source_says_is_written(monkeypatch):
    assert not both(lambda: make(PlainClassesCB()), monkeypatch).needs


def counts_on_its_class():
    CountsByHelperCB.n += 1


class CountsByHelperCB:
    n = 0

    def after_get_loss(self, trainer):
        counts_on_its_class()
        trainer.loss = trainer.loss / self.n


def test_a_function_that_sets_what_a_callback_reads_of_its_class_is_refused():
    with pytest.raises(ValueError, match="`counts_on_its_class` changes `CountsByHelperCB.n`"):
        make(CountsByHelperCB()).to_script()


# Decorators


def scaled(k):
    def decorate(f):
        def wrapper(*args):
            return f(*args) * k

        return wrapper

    return decorate


def negative(f):
    @functools.wraps(f)
    def wrapper(*args):
        return -f(*args)

    return wrapper


def counted(f):
    calls = [2]

    @functools.wraps(f)
    def wrapper(x):
        calls[0] += 1
        return f(x) / calls[0]

    return wrapper


@scaled(0.3)
def shrink(x):
    return x


@scaled(-0.3)
@negative
def twice_within(x):
    return x


@negative
@scaled(-0.3)
def twice_around(x):
    return x


@torch.no_grad()
def without_graph(x):
    return x * 0.5 - x.detach()


@pytest.mark.parametrize("f", [shrink, twice_within, twice_around])
def test_a_decorated_function_is_decorated_once(f, monkeypatch):
    both(lambda: make(by(f)), monkeypatch)


def test_decorators_of_torch_stay(monkeypatch):
    script = both(lambda: make(by(lambda x: 0.5 * x), CallsWithoutGraphCB()), monkeypatch)
    assert "@torch.no_grad()\ndef without_graph" in str(script)


class CallsWithoutGraphCB:
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss + without_graph(trainer.loss)


def test_what_a_decorator_has_kept_goes_on(monkeypatch):
    both(lambda: make(by(counted(lambda x: 3 * x))), monkeypatch)


class StaticCB:
    @staticmethod
    @scaled(0.3)
    def shrunk(x):
        return x

    def after_get_loss(self, trainer):
        trainer.loss = self.shrunk(trainer.loss)


def test_a_decorated_static_method_is_decorated_once(monkeypatch):
    both(lambda: make(StaticCB()), monkeypatch)


class DecoratedCB:
    @scaled(0.3)
    def shrunk(self, x):
        return x

    def after_get_loss(self, trainer):
        trainer.loss = self.shrunk(trainer.loss)


class DecoratedPropertyCB:
    @property
    @scaled(0.3)
    def share(self):
        return 1

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * self.share


class AllArgumentsCB:
    def after_get_loss(self, *args):
        args[0].loss = args[0].loss * 0.3


class TwiceWrappedCB:
    @negative
    @scaled(0.3)
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * 0.3


class WrappedLaterCB:
    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * 0.3


WrappedLaterCB.after_get_loss = negative(WrappedLaterCB.after_get_loss)

REFUSED = {
    DecoratedCB: r"it takes `self` in `\*args`",
    DecoratedPropertyCB: r"it takes `self` in `\*args`",
    AllArgumentsCB: r"it takes `trainer` in `\*args`. Name all arguments",
    TwiceWrappedCB: "something is put around it that its source does not show",
    WrappedLaterCB: "something is put around it that its source does not show",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_method_in_a_function_that_hides_it_is_refused(kind):
    with pytest.raises(ValueError, match=REFUSED[kind]):
        make(kind()).to_script()


# Defaults


class ListCB:
    def __init__(self):
        ListCB.after_get_loss.__defaults__[0].clear()

    def after_get_loss(self, trainer, seen=[]):  # noqa: B006 - That is what is tested
        seen.append(1)
        trainer.loss = trainer.loss / len(seen)


class DiceCB:
    def __init__(self):
        DiceCB.before_batch.__defaults__[0].manual_seed(1)

    def before_batch(self, trainer, dice=torch.Generator().manual_seed(1)):  # noqa: B008
        x, y = trainer.batch
        trainer.batch = x + torch.randn(x.shape, generator=dice), y


class DrawnCB:
    def shifted(self, x, *, by=torch.randn(3)):  # noqa: B008 - That is what is tested
        return x + by

    def after_predict(self, trainer, by=torch.randn(3)):  # noqa: B008
        trainer.preds = self.shifted(trainer.preds + by)


class SplitListCB:
    "Its helper is another function in passes of validation"

    def __init__(self):
        SplitListCB.mean.__defaults__[0].clear()

    def mean(self, trainer, seen=[]):  # noqa: B006
        seen.append(1)
        return 1 / len(seen) if trainer.training else 0.0

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * (1 + self.mean(trainer))


BY = 2.0


def multiplied(x, k=BY, plain=F.relu):
    return plain(x * k)


def noisy(x, by=torch.rand(1)):  # noqa: B008
    return x * by


BY = 5.0
DEFAULTS = {
    "a list": ListCB,
    "random numbers": DiceCB,
    "drawn": DrawnCB,
    "two passes": SplitListCB,
    "a variable": lambda: by(multiplied),
    "drawn for a function": lambda: by(noisy),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_is_made_once(name, monkeypatch):
    both(lambda: make(DEFAULTS[name]()), monkeypatch)


# Objects that can be reset


class RunningMean:
    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.n = 0.0, 0

    def add(self, x):
        self.total, self.n = self.total + x, self.n + 1
        return self.total / self.n


class RunningMeanCB:
    def __init__(self):
        self.mean = RunningMean()
        self.mean.add(50.0)

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss / self.mean.add(trainer.loss.item())


def test_an_object_with_a_reset_goes_on_from_where_it_is(monkeypatch):
    both(lambda: make(RunningMeanCB()), monkeypatch)


# Generators


class ScalesCB:
    def before_epoch(self, trainer):
        scale = 1 / (trainer.epoch + 1)
        if trainer.training:
            self.scales = (scale * 0.9**i for i in range(100))

    def after_get_loss(self, trainer):
        if trainer.training:
            trainer.loss = trainer.loss * next(self.scales)


class OtherScaleCB:
    def before_batch(self, trainer):
        scale = trainer.batch[0].std()
        trainer.batch = trainer.batch[0] / scale, trainer.batch[1]


class SumCB:
    def after_get_loss(self, trainer):
        share = 0.1
        trainer.loss = trainer.loss * sum(share * i for i in range(3))


def test_a_generator_that_is_kept_keeps_its_variables(monkeypatch):
    both(lambda: make(ScalesCB(), OtherScaleCB()), monkeypatch)


def test_a_generator_that_is_used_up_stays_in_its_line(monkeypatch):
    assert "sum(share * i for i in range(3))" in str(both(lambda: make(SumCB()), monkeypatch))


# Private names


class PrivateCB:
    __share = 0.5

    def __init__(self):
        self.__k, self.k = 0.3, 7

    def __scaled(self, x, by=1.0):
        return x * self.__k * by

    @property
    def __half(self):
        return 0.5

    def after_get_loss(self, trainer):
        trainer.loss = self.__scaled(trainer.loss, by=self.__half) * self.__share
        self.__k *= 0.9
        self.k += 1


class PrivateToo(PrivateCB):
    def __init__(self):
        super().__init__()
        self.__k = 2.0

    def after_get_loss(self, trainer):
        super().after_get_loss(trainer)
        trainer.loss = trainer.loss * self.__k


class PrivateTrainer(Trainer):
    __share = 0.5

    def predict(self):
        self.preds = self.model(self.__scaled())

    def get_loss(self):
        self.loss = self.loss_func(self.preds, self.batch[1])

    def backward(self):
        self.loss.backward()

    def step(self):
        self.opt.step()

    def zero_grad(self):
        self.opt.zero_grad()

    def __scaled(self):
        return self.batch[0] * self.__share


@pytest.mark.parametrize("kind", [PrivateCB, PrivateToo])
def test_private_names_are_those_of_their_class(kind, monkeypatch):
    both(lambda: make(kind()), monkeypatch)


def test_private_names_of_a_trainer_are_written(monkeypatch):
    both(lambda: make(cls=PrivateTrainer, core=False), monkeypatch)


# Names of what is given


class ShareCB:
    def __init__(self, share):
        self.share = share

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * self.share


def by_share(share):
    def after_predict(trainer):
        trainer.preds = trainer.preds * share

    return after_predict


def test_things_of_one_name_that_are_given_stay_apart(monkeypatch):
    def make_several():
        return make(ShareCB(torch.tensor(0.2)), by_share(torch.tensor(0.3)))

    assert len(both(make_several, monkeypatch).needs) == 2
