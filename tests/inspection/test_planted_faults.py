"""What `try_callback` finds, against callbacks with one planted fault each.

Each fault is found by the promise that it breaks, and told with the call that did it: those of the ancestors
of this library, and those that people make every day.
"""

import pytest

from isaac_loop.inspection import BrokenPromise, try_callback
from planted_faults import FAULTS

QUICK = dict(seconds=0)  # As few cut runs as there may be

SEEDS = {  # What is told of the faults of the ancestors
    "HooksUntilAfterFit": ["`forward_hooks` of `model.0`", "not put back when `fit` was left by"],
    "LeavesForGood": ["after the first fit, `LeavesForGood` is no longer among the callbacks"],
    "EvaluatesAndForgetsToTrain": ["the mode of `model`: training before a training batch, evaluation after"],
    "DeletesByEnding": ["`kept/others-step-1.txt`, a file of somebody else, was taken away"],
}
PLACES = {  # And where
    "HooksUntilAfterFit": "`HooksUntilAfterFit.before_fit` (line ",
    "EvaluatesAndForgetsToTrain": "`EvaluatesAndForgetsToTrain.after_step` (line ",
    "ScalesTheLossUntilAfterBackward": "`ScalesTheLossUntilAfterBackward.before_backward` (line ",
    "LooksAtTheLoss": "`LooksAtTheLoss.after_get_loss`, line ",
    "FreezesForGood": "`requires_grad` of `model.1.weight` (and 1 alike): True before a fit that went well",
    "LeavesDropoutChanged": "`p` of `model.4`: 0.1 before a fit that went well, 0.5 after it; put back",
    "CountsOn": "`CountsOn.n`: nothing when the first fit began, 5 when the second did. Set it in",
    "SetsARateForEveryBatch": "`lr` of group 0 of `trainer.opt`, changed by `SetsARateForEveryBatch.before_",
    "AsksForTheNormOfGradients": "keep `.detach()` of the tensor, and read it once, in `cleanup_epoch`",
    "WaitsInAHook": "a hook or a generator of its own, line ",
    "KeepsLossesWithTheirGraphs": "`KeepsLossesWithTheirGraphs.losses`",
    "DrawsASampleToPrint": "`DrawsASampleToPrint.after_epoch` (line ",
    "WritesWhereItStands": "`WritesWhereItStands.after_epoch` (line ",
    "MisspellsAnEvent": "Did you mean `after_batch`?",
    "ForgetsAPart": "`ForgetsAPart.total`: 1 when it was saved, 0 when it went on",
    "CountsInAGenerator": "`CountsInAGenerator.rates` changed during this fit and cannot be kept",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_the_promise_that_it_breaks(name):
    make, promise = FAULTS[name]
    # Where a machine is slow, few cuts would be left
    effort = dict(seconds=5) if promise == "cleanup" else QUICK
    report = try_callback(make(), promises=[promise], **effort)
    assert report.broken == [promise]
    for text in [*SEEDS.get(name, ()), *([PLACES[name]] if name in PLACES else ())]:
        assert text in str(report[promise])
    with pytest.raises(BrokenPromise, match=f"`{promise}` is broken"):
        report.check()
    report.check(ignore=promise)
