"""`DistributedCB(engine='ddp')`: gradients put together by PyTorch's wrapper, against one process.

Weights must be those of one process up to rounding, with uneven and empty shares, several batches to an
update, sums, and parameters that are not used. All must end at the same update, whoever stops or leaves; no
other callback sees the wrapper.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from isaac_loop.loop.events import CancelBatchException, CancelEpochException, CancelFitException
from isaac_loop.loop.trainer import Trainer
from isaac_loop.state.errors import RankFailed
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.clipping import ClipGradCB
from several import in_processes, loaders, net, outcome, rank, trainer

pytestmark = pytest.mark.processes


class Unused(nn.Module):
    "A network with a parameter that nobody uses, and one that a share may not use"

    def __init__(self):
        super().__init__()
        self.net, self.other, self.unused = net(), nn.Linear(4, 1).double(), nn.Parameter(torch.ones(2))

    def forward(self, x):
        large = x[:, :1] > 1
        return self.net(x) + large * self.other(x) if large.any() else self.net(x)


def sum_loss(preds, targets):
    return F.mse_loss(preds, targets, reduction="sum")


CASES = {
    "uneven": lambda: dict(dls=loaders(51)),
    "empty": lambda: dict(dls=loaders(49)),
    "gathered": lambda: dict(dls=loaders(51), more=[AccumulationCB(2)]),
    "clipped": lambda: dict(dls=loaders(40), more=[ClipGradCB(0.1)]),
    "sums": lambda: dict(dls=loaders(51), loss_func=sum_loss, weigh="sum"),
    "unused": lambda: dict(dls=loaders(49), model=Unused()),
}


def fitted(case, engine="ddp"):
    kwargs = CASES[case]()
    more = kwargs.pop("more", ())
    t = trainer(*more, engine=engine, **kwargs)
    t.fit(2, lr=0.01)
    return outcome(t)[0], t.n_updates


def test_the_numbers_are_those_of_one_process():
    one = {case: fitted(case) for case in CASES}
    for answers in in_processes(2, lambda: {case: fitted(case) for case in CASES}):
        for case, (weights, updates) in answers.items():
            assert (weights - one[case][0]).abs().max() < 1e-12, case
            assert updates == one[case][1], case


def test_nobody_else_sees_the_wrapper_and_the_model_is_as_it_was():
    class LookCB:
        def __getattr__(self, name):
            if name.startswith(("before_", "after_", "cleanup_")):
                return lambda t: seen.add(type(t.model).__name__)
            raise AttributeError(name)

    def run():
        model = net()
        keys = list(model.state_dict())
        t = trainer(LookCB(), dls=loaders(24), model=model, engine="ddp")
        t.fit(1)
        assert t.model is model and list(model.state_dict()) == keys
        return seen

    seen = set()
    assert in_processes(2, run) == [{"Sequential"}] * 2


def test_pytorch_does_not_warn_of_what_is_not_the_users_business(capfd):
    in_processes(2, fitted, "uneven")
    assert "Warning" not in capfd.readouterr().err


class LeaveCB:
    "Leaves the third batch of the first epoch in one process, or asks to stop"

    def __init__(self, event, cancel=None):
        self.cancel = cancel
        setattr(self, event, self.leave)

    def leave(self, t):
        if rank() == 1 and t.training and t.epoch == 0 and t.batch_num == 2:
            if self.cancel is None:
                return t.request_stop("one is enough")
            raise self.cancel("enough of this")


LEFT = [
    ("before_batch", CancelBatchException, 1),
    ("after_predict", CancelEpochException, 1),
    ("after_backward", CancelFitException, 1),
    ("before_backward", CancelBatchException, 2),
    ("after_batch", CancelEpochException, 2),
    ("after_batch", None, 1),
]


def test_a_process_that_stops_or_leaves_is_followed_by_all_at_the_same_update():
    def run():
        return [left(*case) for case in LEFT]

    def left(event, cancel, n_batches):
        several = [AccumulationCB(n_batches)] if n_batches > 1 else []
        t = trainer(LeaveCB(event, cancel), *several, dls=loaders(40), engine="ddp")
        t.fit(2)
        return t.n_updates, outcome(t)[0], t.stop_reason

    for first, second in zip(*in_processes(2, run), strict=True):
        assert first[0] == second[0] > 0 and first[2] == second[2]
        assert torch.equal(first[1], second[1])


def test_an_error_in_one_process_is_named_in_the_other():
    class FailCB:
        def after_predict(self, t):
            if rank() == 1 and t.batch_num == 1:
                raise ValueError("no good")

    class FailInBackwardCB:
        def after_predict(self, t):
            if rank() == 1 and t.batch_num == 1:
                t.preds.register_hook(self.fail)

        def fail(self, grad):
            raise ValueError("no good")

    def run():
        told = []
        for cb in FailCB(), FailInBackwardCB():
            with pytest.raises((ValueError, RankFailed)) as found:
                trainer(cb, dls=loaders(24), engine="ddp").fit(1)
            told.append((found.type.__name__, str(found.value)))
        return told

    first, second = in_processes(2, run)
    assert [kind for kind, _ in second] == ["ValueError"] * 2
    assert all(kind == "RankFailed" and "no good" in text for kind, text in first)


def test_what_the_wrapper_would_not_see_is_refused():
    class Own(Trainer):
        def one_batch(self):
            self.run_callbacks("predict", "get_loss")

    def run():
        t = trainer(dls=loaders(24), engine="ddp")
        t.extra = nn.Linear(2, 2)
        with pytest.raises(TypeError, match="trained apart"):
            t.fit(1)

    in_processes(2, run)


def test_unknown_engines_are_refused():
    with pytest.raises(ValueError, match="'sum', 'ddp' or 'fsdp'"):
        trainer(engine="horovod")
