"""`AccelerateCB` in several processes, against one process without it.

Accelerate finds the processes by the environment, on a CPU because it is told so. Weights must be those of
one process up to rounding, loaders are not handed over, and all end at the same update.
"""

import pytest
import torch
from torch.nn import functional as F

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.device.accelerated import AccelerateCB
from isaac_loop.device.distributed import DistributedCB
from isaac_loop.loop.events import CancelEpochException
from isaac_loop.loop.trainer import Trainer
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.state.errors import RankFailed
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.training import BasicTrainCB
from several import in_processes, loaders, net, outcome, rank

pytest.importorskip("accelerate", reason="accelerate is not installed")


def made(*callbacks, n=51, dtype=torch.float64, accelerate=(AccelerateCB,)):
    those = [cls("no", cpu=True) if cls is AccelerateCB else cls() for cls in accelerate]
    usual = [BasicTrainCB(), MetricsCB(show=False), *those]
    dls = loaders(n, dtype=dtype)
    return Trainer(dls, F.mse_loss, torch.optim.Adam, net(dtype), [*usual, *callbacks])


def fitted(dtype, more=(), fits=1, **kwargs):
    t = made(*[cb() for cb in more], dtype=dtype, **kwargs)
    model, keys = t.model, list(t.model.state_dict())
    for _ in range(fits):
        t.fit(2, lr=0.01)
        assert t.model is model and list(model.state_dict()) == keys
    return outcome(t)[0], t.n_updates


@pytest.mark.processes
@pytest.mark.shows("ISA-78")
def test_the_numbers_are_those_of_one_process():
    cases = {
        "twice": dict(dtype=torch.float64, fits=2),
        "gathered": dict(dtype=torch.float64, more=[lambda: AccumulationCB(2)]),
        "empty shares": dict(dtype=torch.float64, n=49),
        "single precision": dict(dtype=torch.float32),
    }
    one = {case: fitted(accelerate=(), **kwargs) for case, kwargs in cases.items()}

    def run():
        return {case: fitted(**kwargs) for case, kwargs in cases.items()}

    for answers in in_processes(2, run):
        for case, (weights, updates) in answers.items():
            limit = 2e-7 if weights.dtype == torch.float32 else 1e-12
            assert (weights - one[case][0]).abs().max() <= limit, case
            assert updates == one[case][1], case


class LeaveCB:
    "Asks to stop, leaves the pass or fails in the second process, in the third batch"

    def __init__(self, how):
        self.how = how

    def after_predict(self, t):
        if rank() == 1 and t.training and t.batch_num == 2:
            if self.how == "stop":
                t.request_stop("one is enough")
            elif self.how == "cancel":
                raise CancelEpochException("enough of this")
            else:
                raise ValueError("no good")


@pytest.mark.processes
def test_a_process_that_stops_leaves_or_fails_is_followed_by_all():
    def run():
        ends = []
        for how in "stop", "cancel":
            t = made(LeaveCB(how))
            t.fit(2)
            ends.append((t.n_updates, t.epoch, t.stop_reason, outcome(t)[0].tolist()))
        with pytest.raises((ValueError, RankFailed)) as found:
            made(LeaveCB("fail")).fit(1)
        return ends, str(found.value)

    (first, told), (second, error) = in_processes(2, run)
    assert first == second
    assert error == "no good" and told.startswith("Process 1 failed with ValueError: no good")


@pytest.mark.processes
def test_processes_that_accelerate_does_not_see_are_told():
    def run():
        usual = [BasicTrainCB(), AccelerateCB()]
        with pytest.raises(ValueError, match="There are 2 processes, and Accelerate has found 1") as found:
            Trainer(loaders(), F.mse_loss, torch.optim.SGD, net(), usual).fit(1)
        assert "ACCELERATE_USE_CPU" in str(found.value)

    if torch.cuda.is_available():
        pytest.skip("Accelerate sees the processes where there are GPUs")
    in_processes(2, run)


def test_only_one_may_bring_processes_together():
    t = made(accelerate=(AccelerateCB, DistributedCB))
    with pytest.raises(TypeError, match="Choose one"):
        t.fit(1)


@pytest.mark.parametrize("exact", [True, False])
def test_a_run_is_saved_in_the_middle_of_an_epoch(tmp_path, exact):
    t = made(CheckpointCB(tmp_path, every=2))
    if not exact:
        t.dls.train = torch.utils.data.DataLoader(t.dls.train.dataset, 8)
    t.fit(1)
    assert any(tmp_path.iterdir())
