"""What an evaluator's own functions raise in one process: all end the same way, soon, with the cause named"""

import time
import warnings

import pytest
from several import in_processes, rank, trainer

from isaac_loop.evaluate.evaluator import EvaluatorCB
from isaac_loop.loop.events import CancelBatchException, CancelEpochException, CancelFitException

pytestmark = pytest.mark.processes

TIMES = dict(updates=3), dict(epochs=1), dict(at_start=True)
CASES = [
    ("user_iter_callback", ValueError, TIMES),
    ("user_iter_callback", CancelFitException, TIMES[:1]),
    ("user_epochs_done_callback", ValueError, TIMES[1:2]),
    ("user_epochs_done_callback", CancelFitException, TIMES),
    ("user_epochs_done_callback", CancelEpochException, TIMES[:1]),
    ("user_epochs_done_callback", CancelBatchException, TIMES[:1]),
    ("report", CancelFitException, TIMES[:1]),
    ("report", KeyError, TIMES[1:2]),
    ("metric", ValueError, TIMES[1:2]),
]


def ended(argument, error, when):
    "How a fit ends in which main's function raises"

    def raises(*args):
        if rank() == 0:
            raise error("no more")
        return None if argument != "metric" else 1.0

    start, t = time.monotonic(), trainer(EvaluatorCB(**{argument: raises}, **when))
    try:
        t.fit(2, lr=0.1)
    except Exception as found:
        return type(found).__name__, str(found), 0, time.monotonic() - start
    return "over", t.stop_reason, t.n_updates, time.monotonic() - start


def test_what_a_function_raises_in_one_process_ends_all():
    cases = [(argument, error, when) for argument, error, times in CASES for when in times]

    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [ended(*case) for case in cases]

    for case, main, other in zip(cases, *in_processes(2, run)):
        assert max(main[3], other[3]) < 5, case
        if issubclass(case[1], (ValueError, KeyError)):
            assert main[0] == case[1].__name__, case
            assert other[0] == "RankFailed" and f"Process 0 failed with {main[0]}: " in other[1], case
        else:
            assert main[:3] == other[:3] and main[0] == "over", case
