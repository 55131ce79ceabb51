"""The modes of the loop and those of whoever walks do not meet, for each that PyTorch has.

Each is switched on by a callback of the loop from `before_batch` to `cleanup_batch`, and looked at in the
body of the `for`; then the other way round; and in orders that do not nest.
"""

import contextvars
import decimal
import sys
import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import runs
from isaac_loop.all import MixedPrecisionCB, Order
from isaac_loop.inspection.own_modes import Modes
from small import trainer_with

VARIABLE = contextvars.ContextVar("of a test", default="nobody's")


class CountsFunctions(TorchFunctionMode):
    n = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.n += 1
        return function(*args, **(kwargs or {}))


class CountsOperations(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += 1
        return function(*args, **(kwargs or {}))


class Setting:
    "A `with` block around a value that is read and written"

    def __init__(self, read, write, value):
        self.read, self.write, self.value = read, write, value

    def __enter__(self):
        self.before = self.read()
        self.write(self.value)

    def __exit__(self, *error):
        self.write(self.before)


class Deterministic:
    def __enter__(self):
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *error):
        torch.use_deterministic_algorithms(False)


class Variable:
    def __enter__(self):
        self.token = VARIABLE.set("the one's")

    def __exit__(self, *error):
        VARIABLE.reset(self.token)


def saved_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def nesting():
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


MODES = {  # What switches it on, and what tells whether it is
    "no grad": (torch.no_grad, lambda: not torch.is_grad_enabled()),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.is_autocast_enabled("cpu")),
    "nested autocast": (lambda: torch.autocast("cpu", enabled=False), lambda: nesting() > 0),
    "cache of autocast": (
        lambda: torch.autocast("cpu", cache_enabled=False),
        lambda: not torch.is_autocast_cache_enabled(),
    ),
    "default dtype": (
        lambda: Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        lambda: torch.get_default_dtype() == torch.float64 and torch.ones(1).dtype == torch.float64,
    ),
    "device": (lambda: torch.device("meta"), lambda: torch.empty(1).is_meta),
    "default device": (
        lambda: Setting(lambda: None, torch.set_default_device, "meta"),
        lambda: torch.get_default_device().type == "meta" and torch.empty(1).is_meta,
    ),
    "deterministic": (Deterministic, torch.are_deterministic_algorithms_enabled),
    "cudnn": (
        lambda: torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=True, allow_tf32=True),
        lambda: torch.backends.cudnn.deterministic,
    ),
    "anomaly": (
        lambda: Setting(torch.is_anomaly_enabled, torch.set_anomaly_enabled, True),
        torch.is_anomaly_enabled,
    ),
    "function mode": (CountsFunctions, lambda: torch._C._len_torch_function_stack() > 0),
    "dispatch mode": (CountsOperations, lambda: len(_get_current_dispatch_mode_stack()) > 0),
    "saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        saved_hooks,
    ),
    "forbidden hooks": (
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
        lambda: not torch._C._autograd._saved_tensors_hooks_is_enabled(),
    ),
    "no functions": (
        torch._C.DisableTorchFunction,
        lambda: torch._C._get_torch_function_state() == torch._C._TorchFunctionState.ALL_DISABLED,
    ),
    "one thread": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        lambda: not torch._C._is_multithreading_enabled(),
    ),
    "forward": (
        lambda: Setting(torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled, False),
        lambda: not torch._C._is_fwd_grad_enabled(),
    ),
    "variable": (Variable, lambda: VARIABLE.get() == "the one's"),
    "decimal": (lambda: decimal.localcontext(prec=7), lambda: decimal.getcontext().prec == 7),
}


class Has:
    "Has a mode from `before_batch` to `cleanup_batch`, and notes whether it is on"

    order = Order.FIRST

    def __init__(self, mode, is_on):
        self.mode, self.is_on = mode, is_on
        self.seen = []

    def before_batch(self, trainer):
        "On"
        self.open = self.mode()
        self.open.__enter__()

    def cleanup_batch(self, trainer):
        "Off"
        self.seen.append(self.is_on())
        self.open.__exit__(None, None, None)

    def before_epoch(self, trainer):
        self.seen.append(not self.is_on())


class Does:
    "A little work in each batch, in whatever mode"

    def predict(self, trainer):
        trainer.preds = trainer.batch[0] * 2


def empty(*cbs):
    trainer = trainer_with(*cbs)
    trainer.remove_callback("BasicTrainCB")
    return trainer


@pytest.fixture(autouse=True)
def as_before():
    yield
    assert not any(is_on() for _, is_on in MODES.values())


@pytest.mark.parametrize("name", MODES)
@pytest.mark.filterwarnings("ignore")
def test_a_mode_of_the_loop_is_not_mine(name):
    cb = Has(*MODES[name])
    inside = 0
    for moment in empty(cb, Does()).walk(3, 0.1, valid=False):
        assert not cb.is_on(), moment
        inside += moment.event == "predict"
    assert inside == 9 and cb.seen and all(cb.seen)


@pytest.mark.parametrize("name", MODES)
@pytest.mark.filterwarnings("ignore")
def test_my_mode_is_not_the_loops(name):
    mode, is_on = MODES[name]
    seen = []

    class Looks:
        def predict(self, trainer):
            seen.append(is_on())

    for _ in empty(Looks()).walk(1, at=Looks, valid=False):
        with mode():
            assert is_on()
    walk = empty(Looks()).walk(2, at=Looks, valid=False)
    next(walk)
    with mode():  # Around the steps of the walk
        next(walk)
        assert is_on()
        next(walk)
        assert is_on()
    next(walk)
    walk.close()
    assert seen == [False] * 7


@pytest.mark.parametrize("name", MODES)
@pytest.mark.filterwarnings("ignore")
def test_the_loop_begins_in_the_modes_of_the_first_step_and_keeps_them(name):
    mode, is_on = MODES[name]
    seen = []

    class Looks:
        def predict(self, trainer):
            seen.append(is_on())

    walk = empty(Looks()).walk(1, at=Looks)
    with mode():
        next(walk)
        assert is_on()
    assert not is_on()
    next(walk)
    assert not is_on()
    walk.close()
    assert seen == [True, True] and not is_on()


@pytest.mark.parametrize("name", MODES)
@pytest.mark.filterwarnings("ignore")
def test_switched_on_by_one_side_and_off_while_the_other_has_it_too(name):
    "Blocks that overlap in time and do not nest: the loop's opens first, mine then, the loop's closes first"
    cb = Has(*MODES[name])
    walk = empty(cb).walk(1, at=["before_batch", "cleanup_batch"])
    for _ in range(3):
        assert walk.to("before_batch") and not cb.is_on()
        with cb.mode():
            assert cb.is_on()
            walk.to("cleanup_batch")
            assert cb.is_on()
        assert not cb.is_on()
    walk.close()
    assert all(cb.seen)


@pytest.mark.filterwarnings("ignore")
def test_modes_that_count_see_their_own_side_and_none_of_the_looking():
    "Against the same counted in `fit`"
    counts = []
    for use in (lambda t: t.fit(1, 0.1, valid=False), lambda t: list(map(str, t.walk(1, 0.1, valid=False)))):
        functions, operations, flops = CountsFunctions(), CountsOperations(), FlopCounterMode(display=False)

        class Counted:
            order = Order.FIRST

            def before_predict(self, trainer):
                for o in (functions, operations, flops):
                    o.__enter__()

            def cleanup_step(self, trainer):
                for o in (flops, operations, functions):
                    o.__exit__(None, None, None)

        torch.manual_seed(0)
        trainer = trainer_with(Counted())
        use(trainer)
        counts.append((functions.n, operations.n, flops.get_total_flops()))
    assert counts[0] == counts[1] and counts[0][2] > 0


def test_autocast_casts_the_weights_anew_after_i_have_used_them_without_gradients():
    "PyTorch keeps casts while autocast is open: one that I made without gradients must not reach the loop"

    weights = []
    for walks in (False, True):
        torch.manual_seed(0)
        trainer = trainer_with(MixedPrecisionCB())
        if not walks:
            trainer.fit(1, 0.1)
        else:
            for _ in trainer.walk(1, 0.1, at="before_predict"):
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                    trainer.model(trainer.batch[0])
        weights.append(trainer.model.weight.detach().clone())
    assert torch.equal(*weights)


def test_validation_without_gradients_and_mine_with():
    trainer = trainer_with()
    for _ in trainer.walk(1, train=False, at="predict"):
        assert torch.is_grad_enabled() and not trainer.preds.requires_grad
        trainer.model(trainer.batch[0]).sum().backward()
    assert trainer.model.weight.grad is not None


def test_a_walk_within_no_grad_is_a_fit_within_no_grad():
    trainer = trainer_with()
    with torch.no_grad(), pytest.raises(RuntimeError) as fitted:
        trainer.fit(1)
    with torch.no_grad(), pytest.raises(RuntimeError) as walked:
        list(trainer.walk(1))
    assert str(walked.value) == str(fitted.value) and walked.value.__notes__ == fitted.value.__notes__
    with torch.no_grad():
        assert [o.event for o in trainer.walk(1, train=False, at="predict")] == ["predict"] * 2
        assert not torch.is_grad_enabled()


def test_the_error_that_is_being_handled_is_of_one_side():
    seen = []

    class Handles:
        def predict(self, trainer):
            try:
                raise ZeroDivisionError
            except ZeroDivisionError:
                trainer.run_callbacks("measured")
                seen.append(sys.exc_info()[0])

        def measured(self, trainer):
            seen.append(sys.exc_info()[0])

    try:
        raise KeyError
    except KeyError:
        for _ in empty(Handles()).walk(1, train=False):
            assert sys.exc_info()[0] is KeyError
    assert seen == [ZeroDivisionError] * 4
    for _ in empty(Handles()).walk(1, train=False):
        assert sys.exc_info()[0] is None


def test_random_numbers_belong_to_both():
    "Drawn during a pause, the loop gets others; as after a callback that draws"
    drawn = []

    class Draws:
        def predict(self, trainer):
            drawn.append(torch.rand(()).item())

    trainer = empty(Draws())
    torch.manual_seed(0)
    for _ in trainer.walk(1, train=False, at=Draws):
        drawn.append(torch.rand(()).item())
    torch.manual_seed(0)
    assert drawn == [torch.rand(()).item() for _ in range(4)]


def test_leaving_runs_the_cleanups_in_the_modes_of_the_loop():
    for mode, is_on in MODES.values():
        cb = Has(mode, is_on)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            walk = empty(cb, Does()).walk(1, at="predict")
            next(walk)
            walk.close()
        assert cb.seen == [True, True] and not is_on()


@pytest.mark.filterwarnings("ignore")
def test_the_modes_of_two_walks_and_mine_are_three():
    one, two = Has(*MODES["no grad"]), Has(*MODES["default dtype"])
    for _ in zip(*(empty(cb, Does()).walk(1, valid=False) for cb in (one, two))):
        assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    assert all(one.seen) and all(two.seen)


def test_taking_modes_away_and_putting_them_back_changes_none():
    with torch.no_grad(), torch.autocast("cpu"), CountsFunctions(), CountsOperations(), torch.device("meta"):
        modes = Modes()
        before = [read() for _, read in MODES.values()]
        for _ in range(3):
            modes.take()
            modes.put()
        assert [read() for _, read in MODES.values()] == before


def test_a_body_that_leaves_its_modes_otherwise_than_it_found_them():
    "The weights of a plain fit, whatever the body does"
    fitted = runs.fit(runs.make_trainer(), 1)
    trainer = runs.make_trainer()
    for _ in trainer.walk(1, 0.02):
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            state = torch.get_rng_state()
            (torch.randn(8, 8) @ torch.ones(8, dtype=torch.get_default_dtype())).sum()
            torch.set_rng_state(state)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
    assert torch.get_default_dtype() == torch.float64 and not torch.is_grad_enabled()  # Mine
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    runs.same(fitted, trainer)
