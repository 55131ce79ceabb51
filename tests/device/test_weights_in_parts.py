"""`DistributedCB(engine='fsdp')`: each process has a part of every weight, against one process.

Weights and history must be those of one process up to rounding (1e-12 in double precision). A checkpoint has
whole weights, so any number of processes goes on from it, cut or not. All end together, whoever stops, leaves
or fails, and what does not work is named.
"""

import os
import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.checkpoints.best_weights import KeepBestCB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.checkpoints.exports import ExportCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.device.compilation import CompileCB
from isaac_loop.inspection.black_box import BlackBoxCB
from isaac_loop.inspection.gradients import GradientStatsCB
from isaac_loop.inspection.update_ratios import UpdateRatioCB
from isaac_loop.loop.events import CancelBatchException, CancelEpochException, CancelFitException
from isaac_loop.state.errors import RankFailed, RanksDiverged, UnsaveableState
from isaac_loop.state.run_state import take_state
from isaac_loop.stop.nonfinite_stop import NonFiniteStopCB
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.averaging import EMACB, SWACB
from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.train.freezing import FreezeCB
from several import in_processes, loaders, net, outcome, rank, trainer

pytestmark = pytest.mark.processes

CLOSE = 1e-12
MOMENTUM = partial(optim.SGD, momentum=0.9)


class Unused(nn.Module):
    "A network with parameters that a share may not use"

    def __init__(self):
        super().__init__()
        self.net, self.other = net(), nn.Linear(4, 1).double()

    def forward(self, x):
        large = x[:, :1] > 1
        return self.net(x) + large * self.other(x) if large.any() else self.net(x)


def normed():
    torch.manual_seed(1)
    layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers).double()


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)).double()
    model[2].weight = model[0].weight
    return model


CASES = {
    "sgd": lambda: dict(opt_func=optim.SGD, dls=loaders(27, 9)),
    "momentum, a batch of one row": lambda: dict(opt_func=MOMENTUM, dls=loaders(25, 9)),
    "adam": lambda: dict(dls=loaders(27, 9)),
    "gathered": lambda: dict(dls=loaders(27, 9), more=[AccumulationCB(2)]),
    "clipped": lambda: dict(dls=loaders(24, 9), more=[ClipGradCB(0.1)]),
    "units": lambda: dict(dls=loaders(27, 9), shard=nn.Linear),
    "best": lambda: dict(dls=loaders(24, 9), more=[KeepBestCB()]),
    "sums": lambda: dict(dls=loaders(27, 9), loss_func=partial(F.mse_loss, reduction="sum"), weigh="sum"),
    "norms": lambda: dict(dls=loaders(24, 9), model=normed(), sync_bn=True),
    "not used": lambda: dict(dls=loaders(25, 9), model=Unused()),
    "tied": lambda: dict(dls=loaders(24, 9), model=tied()),
}


def fitted(case, engine="fsdp"):
    torch.manual_seed(1)
    kwargs = CASES[case]()
    more, shard = kwargs.pop("more", ()), kwargs.pop("shard", None)
    t = trainer(*more, engine=engine, shard=shard if engine == "fsdp" else None, **kwargs)
    t.fit(2, lr=0.01)
    return outcome(t)


def difference(one, other):
    "The largest difference of weights and history"
    (weights, rows), (weights2, rows2) = one, other
    both = [(a[k], b[k]) for a, b in zip(rows, rows2, strict=True) for k in a if isinstance(a[k], float)]
    return max((weights - weights2).abs().max().item(), *(abs(a - b) for a, b in both))


@pytest.mark.parametrize("n", [2, 3])
def test_the_numbers_are_those_of_one_process(n):
    cases = list(CASES) if n == 2 else ["momentum, a batch of one row", "gathered"]
    one = {case: fitted(case) for case in cases}
    for answers in in_processes(n, lambda: {case: fitted(case) for case in cases}):
        for case, told in answers.items():
            assert difference(told, one[case]) < CLOSE, case


def test_in_one_process_the_engine_changes_no_bit():
    assert torch.equal(fitted("adam")[0], fitted("adam", "sum")[0])


def test_the_model_is_cut_within_a_fit_and_whole_and_itself_behind_it():
    def look(t):
        seen.append([p.to_local().numel() for p in t.model.parameters()])

    look.on_valid = False
    seen = []

    def run(engine):
        def after_step(t):
            if engine == "fsdp":
                look(t)

        model = net()
        before, keys = list(model.parameters()), list(model.state_dict())
        t = trainer(after_step, dls=loaders(24), model=model, engine=engine)
        t.fit(1)
        t.fit(1, keep_opt=True)
        t.fit(1)
        t.get_preds()
        assert type(model) is nn.Sequential and list(model.state_dict()) == keys
        assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
        return outcome(t)[0], seen[:1]

    one, two = run("sum")[0], in_processes(2, run, "fsdp")
    for weights, parts in two:
        assert (weights - one).abs().max() < CLOSE
        assert sum(parts[0]) < one.numel()


class DieCB:
    "Ends the process without a word"

    def __init__(self, n):
        self.n = n

    def cleanup_batch(self, t):
        if t.training and t.n_updates == self.n:
            os._exit(9)


def resumed(folder, engine, *more):
    warnings.simplefilter("ignore")  # Another number of processes goes on
    t = trainer(CheckpointCB(folder, every=2), KeepBestCB(), *more, dls=loaders(27, 9), engine=engine)
    t.fit(2, lr=0.01)
    return outcome(t)


SIZES = [(2, "fsdp", 2, "fsdp"), (2, "fsdp", 1, "sum"), (1, "sum", 2, "fsdp")]


@pytest.mark.parametrize(("n", "engine", "n2", "engine2"), SIZES)
def test_a_run_that_was_killed_goes_on_with_or_without_parts(n, engine, n2, engine2, tmp_path):
    one = resumed(tmp_path / "one", "sum")
    with pytest.raises(RuntimeError, match="exit code 9"):
        in_processes(n, resumed, tmp_path / "run", engine, DieCB(7))
    found = in_processes(n2, resumed, tmp_path / "run", engine2)
    for told in found:
        assert difference(told, one) < CLOSE
        assert torch.equal(told[0], found[0][0])
    if (n, engine) == (n2, engine2):
        uncut = in_processes(n2, resumed, tmp_path / "uncut", engine2)
        assert torch.equal(found[0][0], uncut[0][0])


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
    ("before_batch", CancelBatchException),
    ("before_predict", CancelEpochException),
    ("after_predict", CancelBatchException),
    ("after_backward", CancelFitException),
    ("after_batch", CancelEpochException),
    ("after_batch", None),
]


def test_a_process_that_stops_or_leaves_is_followed_by_all_at_the_same_update():
    def left(event, cancel, engine):
        t = trainer(LeaveCB(event, cancel), dls=loaders(32, 8), engine=engine)
        t.fit(2)
        return t.n_updates, outcome(t)[0], t.stop_reason

    def run():
        return [(left(*case, "fsdp"), left(*case, "sum")) for case in LEFT]

    for (first, plain), (second, _) in zip(*in_processes(2, run), strict=True):
        assert first[0] == second[0] == plain[0] and first[2] == second[2] == plain[2]
        assert torch.equal(first[1], second[1]) and (first[1] - plain[1]).abs().max() < CLOSE


class FailCB:
    "Fails in one process: in a handler, or where the model predicts or goes backward"

    def __init__(self, place):
        self.place = place
        if place not in ("forward", "backward"):
            setattr(self, place, self.fail_at)

    def before_fit(self, t):
        self.t = t
        if self.place == "forward":
            t.model[1].register_forward_hook(lambda *_: self.fail_at(t))

    def after_predict(self, t):
        if self.place == "backward" and t.training:
            t.preds.register_hook(lambda grad: self.fail_at(t))

    def fail_at(self, t):
        if rank() == 1 and t.training and t.batch_num == 1:
            raise ValueError("no good")


def test_an_error_in_one_process_is_named_in_the_other():
    def run():
        told = []
        for place in ("before_predict", "after_step", "forward", "backward"):
            t = trainer(FailCB(place), dls=loaders(24), engine="fsdp", shard=nn.Linear)
            with pytest.raises((ValueError, RankFailed)) as found:
                t.fit(1)
            notes = " ".join(found.value.__notes__)
            told.append((found.type.__name__, str(found.value), notes))
            assert "are NaN now" in notes and t.model[0].weight.isnan().all()
        return told

    first, second = in_processes(2, run)
    assert [kind for kind, *_ in second] == ["ValueError"] * 4
    assert all(kind == "RankFailed" and "no good" in text for kind, text, _ in first)


def in_a_group(f):
    "Call `f` where a group was begun before, as by who cuts the model himself"
    dist.init_process_group("gloo")
    try:
        return f()
    finally:
        dist.destroy_process_group()


def own(whole=True, engine="fsdp", **kwargs):
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model[0])
    if whole:
        fully_shard(model)
    t = trainer(dls=loaders(27), model=model, engine=engine, **kwargs)
    t.fit(1, lr=0.01)
    t.fit(1, lr=0.01)
    return torch.cat([p.full_tensor().detach().view(-1) for p in model.parameters()])


def test_a_model_that_the_user_has_cut_stays_cut():
    t = trainer(dls=loaders(27))
    t.fit(1, lr=0.01)
    t.fit(1, lr=0.01)
    for weights in in_processes(2, in_a_group, own):
        assert (weights - outcome(t)[0]).abs().max() < CLOSE


OWN = [
    (dict(whole=False), ValueError, r"Call `fully_shard\(model\)` as well"),
    (dict(engine="sum"), TypeError, "only `engine='fsdp'` works"),
    (dict(shard=nn.Linear), ValueError, "Leave one of them out"),
]


@pytest.mark.parametrize(("kwargs", "error", "words"), OWN)
def test_a_model_that_the_user_has_cut_is_refused_where_that_cannot_work(kwargs, error, words):
    def run():
        with pytest.raises(error, match=words):
            own(**kwargs)

    in_processes(2, in_a_group, run)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = net(), nn.Parameter(torch.tensor(1.0).double())

    def forward(self, x):
        return self.net(x) * self.scale


def two_types():
    return nn.Sequential(nn.Linear(4, 1).double(), nn.Linear(1, 1))


def two_devices():
    return nn.Sequential(nn.Linear(4, 1).double(), nn.Linear(1, 1, device="meta"))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([net()])

    def forward(self, x):
        return self.parts[0](x)


BAD = [
    (dict(more=EMACB), TypeError, "it copies the model"),
    (dict(more=SWACB), TypeError, "it copies the model"),
    (dict(more=RewindCB), TypeError, "it takes weights back"),
    (dict(more=BlackBoxCB), TypeError, "it takes weights back"),
    (dict(more=GradientStatsCB), TypeError, "each process has a part"),
    (dict(more=UpdateRatioCB), TypeError, "each process has a part"),
    (dict(more=NonFiniteStopCB), TypeError, "each process has a part"),
    (dict(more=lambda: ExportCB("folder")), TypeError, "in one process alone"),
    (dict(more=lambda: FreezeCB("0")), TypeError, "cannot change while they are cut"),
    (dict(more=CompileCB), TypeError, "cut already"),
    (dict(more=lambda: ClipGradCB(max_value=1)), TypeError, "needs `max_norm`"),
    (dict(more=lambda: ClipGradCB(adaptive=0.1)), TypeError, "needs `max_norm`"),
    (dict(model=Scaled), ValueError, "`scale` is a single number"),
    (dict(model=two_types), ValueError, "torch.float32 and torch.float64"),
    (dict(model=two_devices), ValueError, "on one device"),
    (dict(model=tied, shard=nn.Linear), ValueError, "belongs to two units"),
    (dict(shard=nn.Conv2d), ValueError, "chooses none"),
    (dict(model=Listed, shard=nn.ModuleList), ValueError, "never called itself"),
]


def test_what_does_not_work_is_named_before_anything_has_changed():
    def run():
        for case, error, words in BAD:
            more = [case["more"]()] if "more" in case else []
            model = case.get("model", net)()
            t = trainer(*more, dls=loaders(24), model=model, engine="fsdp", shard=case.get("shard"))
            kind, weights = type(t.model), list(t.model.parameters())
            with pytest.raises(error, match=words):
                t.fit(1)
            assert type(t.model) is kind
            assert all(p is q for p, q in zip(weights, t.model.parameters(), strict=True))

    in_processes(2, run)


def test_a_snapshot_within_a_fit_is_refused():
    def after_step(t):
        with pytest.raises(TypeError, match="cannot be put back as it was"):
            t.snapshot()

    in_processes(2, lambda: trainer(after_step, dls=loaders(16), engine="fsdp").fit(1))


class Alone:
    "Does something in one process alone, behind the third batch"

    def __init__(self, act):
        self.act = act

    def after_batch(self, trainer):
        if trainer.training and trainer.epoch == 0 and trainer.batch_num == 2 and rank() == 0:
            self.act(trainer)


def change_weights(t):
    with torch.no_grad():
        for p in t.model.parameters():
            p.mul_(1.5)


ALONE = {
    "calls the model": (lambda t: t.model(t.batch[0]), "a forward pass outside of `predict`"),
    "changes weights": (change_weights, "was changed .* times: not as often in all processes"),
}


def test_what_one_process_does_alone_with_parts_is_told_in_all():
    "Nobody waits in vain, and no weights drift apart"

    def told():
        errors = []
        for act, _ in ALONE.values():
            with pytest.raises(RanksDiverged) as e:
                trainer(Alone(act), engine="fsdp").fit(2, lr=0.1)
            errors.append(str(e.value))
        return errors

    first, second = in_processes(2, told)
    assert first == second
    for text, (_, words) in zip(first, ALONE.values()):
        assert re.search(words, text)


def test_a_forward_pass_of_all_processes_is_none_of_one_alone():
    class Looks:
        def after_batch(self, trainer):
            with torch.no_grad():
                self.seen = trainer.model(trainer.batch[0]).shape

    (here, *_), _ = in_processes(2, lambda: outcome(looked_at(Looks())))
    assert (here - outcome(looked_at(Looks()))[0]).abs().max() < CLOSE


def looked_at(*cbs):
    t = trainer(*cbs, engine="fsdp")
    t.fit(2, lr=0.1)
    return t


def test_a_save_in_the_middle_of_an_update_is_refused():
    def after_batch(t):
        if t.training and t.batch_num == 0:
            with pytest.raises(UnsaveableState, match="while gradients of several batches are gathered"):
                take_state(t, 0, 1)

    in_processes(2, lambda: trainer(after_batch, AccumulationCB(2), dls=loaders(16), engine="fsdp").fit(1))


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        (dict(shard=nn.Linear), ValueError, "the engine is 'sum'"),
        (dict(shard=nn.Linear, engine="ddp"), ValueError, "the engine is 'ddp'"),
        (dict(shard=3, engine="fsdp"), TypeError, "chooses no modules"),
        (dict(shard=(), engine="fsdp"), TypeError, "chooses no modules"),
    ],
)
def test_a_choice_of_modules_that_is_none_is_refused(kwargs, error, words):
    with pytest.raises(error, match=words):
        trainer(**kwargs)
