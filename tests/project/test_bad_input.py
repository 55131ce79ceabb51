"""Bad input gets a clear error, and nothing is lost.

Each case says what a tired person does, which error comes, and words that must be in it or in its notes.
Afterwards the same trainer still trains.
"""

import warnings
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from isaac_loop.all import (
    BasicTrainCB,
    CancelBatchException,
    CheckpointCB,
    DataLoaders,
    DeviceCB,
    DistributedCB,
    MetricsCB,
    Monitor,
    MomentumTrainCB,
    NBatchCB,
    ProgressCB,
    Trainer,
    WorldSizeMismatch,
    collate_rows,
    exact_loader,
    replaces,
    sample_dataset_dict,
)
from isaac_loop.device.launching import launch


def batches(n=3):
    return [(torch.ones(4, 2), torch.zeros(4, 1)) for _ in range(n)]


def make(callbacks=None, dls=None, loss=F.mse_loss, opt=optim.SGD, model=None, **kwargs):
    "A trainer in which all is well, but for what is given"
    return Trainer(
        dls or DataLoaders(batches(), batches()),
        loss,
        opt,
        model or nn.Linear(2, 1),
        BasicTrainCB() if callbacks is None else callbacks,
        **kwargs,
    )


def fit(callbacks=None, n_epochs=1, lr=0.1, **kwargs):
    "Make a trainer, and fit"
    options = {o: kwargs.pop(o) for o in ("train", "valid") if o in kwargs}
    trainer = make(callbacks, **kwargs)
    trainer.fit(n_epochs, lr, **options)


class OneReplacer:
    @replaces
    def step(self, trainer): ...


class OtherReplacer:
    @replaces
    def step(self, trainer): ...


class Inner:
    def before_batch(self, trainer):
        trainer.fit(1)


class TooEarly:
    def before_predict(self, trainer):
        return trainer.preds


class OddBatch(BasicTrainCB):
    def before_batch(self, trainer):
        trainer.batch = torch.ones(3)


def adds_twice():
    cb, trainer = TooEarly(), make()
    trainer.add_callbacks([cb])
    trainer.add_callbacks([cb])


def needs_total():
    class Schedule:
        def before_fit(self, trainer):
            return trainer.total_updates

    fit([BasicTrainCB(), Schedule()], dls=DataLoaders(iter(batches())), valid=False)


def opt_with_more(params, lr, rho):
    return optim.SGD(params, lr)


CASES = {
    "a class instead of an object": (lambda: fit(BasicTrainCB), TypeError, "is a class"),
    "befor_batch": (
        lambda: fit(SimpleNamespace(befor_batch=print)),
        ValueError,
        "Did you mean `before_batch`",
    ),
    "after_bach": (lambda: fit(SimpleNamespace(after_bach=print)), ValueError, "Did you mean `after_batch`"),
    "a method without self": (
        lambda: fit(type("BareCB", (), {"after_batch": eval("lambda: None")})()),
        TypeError,
        "named after an event, and events call it with the trainer alone",
    ),
    "a callback in the place of the rate": (
        lambda: fit(lr=SimpleNamespace(name="SayCB", after_batch=print)),
        TypeError,
        "`lr` is the callback `SayCB`",
    ),
    "a name of miniai's": (
        lambda: fit(SimpleNamespace(after_loss=print)),
        ValueError,
        "Here it is `after_get_loss`",
    ),
    "no event at all": (
        lambda: fit(SimpleNamespace(on_epoch_end=print)),
        ValueError,
        "no method named after an event",
    ),
    "a lambda": (lambda: fit(lambda trainer: None), ValueError, "no method named after an event"),
    "an event that cannot be called": (
        lambda: fit(SimpleNamespace(before_fit=3)),
        TypeError,
        "cannot be called",
    ),
    "order is text": (
        lambda: fit(SimpleNamespace(before_fit=print, order="late")),
        TypeError,
        "order` is 'late'",
    ),
    "order is NaN": (
        lambda: fit(SimpleNamespace(before_fit=print, order=float("nan"))),
        TypeError,
        "order` is nan",
    ),
    "two core-step providers": (
        lambda: fit([BasicTrainCB(), MomentumTrainCB()]),
        ValueError,
        "Leave out `BasicTrainCB`",
    ),
    "two @replaces": (
        lambda: fit([BasicTrainCB(), OneReplacer(), OtherReplacer()]),
        ValueError,
        "`OneReplacer.step` and `OtherReplacer.step`",
    ),
    "@replaces on an event around": (
        lambda: fit(SimpleNamespace(before_fit=replaces(lambda trainer: None))),
        ValueError,
        "only a step can be replaced",
    ),
    "preds too early": (lambda: fit([BasicTrainCB(), TooEarly()]), AttributeError, "BasicTrainCB"),
    "preds before any fit": (lambda: make().preds, AttributeError, "the step `predict`"),
    "a callback added twice": (adds_twice, ValueError, "added already"),
    "a second one of the same name": (
        lambda: make([BasicTrainCB(), TooEarly(), TooEarly()]),
        ValueError,
        "another `name`",
    ),
    "a name that hides": (
        lambda: make(SimpleNamespace(name="model", before_fit=print)),
        ValueError,
        "hide `trainer.model`",
    ),
    "removing a stranger": (lambda: make().remove_callback("BasicTrainCb"), LookupError, "BasicTrainCB"),
    "an empty loader": (lambda: fit(dls=DataLoaders([], batches())), ValueError, "no batches"),
    "an empty stream": (lambda: fit(dls=DataLoaders(iter([])), valid=False), ValueError, "gave no batch"),
    "a one-shot iterator": (
        lambda: fit(dls=DataLoaders(iter(batches())), valid=False, n_epochs=2),
        ValueError,
        "walked only once",
    ),
    "total of a stream": (needs_total, ValueError, "no `len`"),
    "no validation loader": (lambda: fit(dls=DataLoaders(batches())), ValueError, "fit(valid=False)"),
    "one split": (lambda: DataLoaders.from_dataset_dict({"train": [1]}, 2), ValueError, "does not say"),
    "three splits": (
        lambda: DataLoaders.from_dataset_dict({"train": [1], "a": [2], "b": [3]}, 2),
        ValueError,
        "does not say",
    ),
    "a split that is not there": (
        lambda: DataLoaders.from_dataset_dict({"train": [1], "valid": [2]}, 2, valid="vaild"),
        LookupError,
        "Did you mean `valid`",
    ),
    "a sample larger than its data": (
        lambda: sample_dataset_dict({"train": Dataset.from_dict(dict(x=[1, 2]))}, (3,)),
        ValueError,
        "3 rows",
    ),
    "a split without rows to select": (
        lambda: sample_dataset_dict({"train": [1, 2]}, (1,)),
        TypeError,
        "no rows can be selected",
    ),
    "a folder without a name": (lambda: CheckpointCB(""), ValueError, "`folder` is '', which names nothing"),
    "a flag in words": (lambda: CheckpointCB("a", strict="no"), TypeError, "`strict` is 'no'"),
    "a flag as a number": (lambda: DistributedCB(share=1), TypeError, "`share` is 1, which is neither"),
    "a column that is not there": (
        lambda: collate_rows(["imag"])([{"image": 1}]),
        LookupError,
        "Did you mean `image`",
    ),
    "a batch that is no tuple": (lambda: fit(OddBatch()), TypeError, "override `Trainer.split`"),
    "n_inp larger than the batch": (
        lambda: fit(dls=DataLoaders(batches(), batches(), n_inp=3)),
        ValueError,
        "`dls.n_inp`",
    ),
    "n_inp of 0": (lambda: DataLoaders(batches(), n_inp=0), ValueError, "at least one input"),
    "a loader that cannot be iterated": (lambda: DataLoaders(3), TypeError, "cannot be iterated"),
    "a loss that is no scalar": (lambda: fit(loss=lambda p, t: p - t), RuntimeError, "has shape (4, 1)"),
    "a loss without gradient": (
        lambda: fit(loss=lambda p, t: (p - t).mean().detach()),
        RuntimeError,
        "does not depend on any parameter",
    ),
    "a loss that is a float": (lambda: fit(loss=lambda p, t: 0.5), AttributeError, "only a tensor remembers"),
    "a metric without update": (
        lambda: MetricsCB(accuracy=SimpleNamespace(reset=print)),
        TypeError,
        "no method `update`",
    ),
    "a metric's class": (lambda: MetricsCB(dict), TypeError, "is a class"),
    "a model without parameters": (lambda: fit(model=nn.Flatten()), ValueError, "no parameters"),
    "negative epochs": (lambda: fit(n_epochs=-1), ValueError, "`n_epochs` is -1"),
    "half an epoch": (lambda: fit(n_epochs=0.5), TypeError, "`n_epochs` is 0.5"),
    "epochs are True": (lambda: fit(n_epochs=True), TypeError, "`n_epochs` is True"),
    "no rate": (lambda: fit(lr=None), TypeError, "`lr` is None"),
    "rate is NaN": (lambda: fit(lr=float("nan")), ValueError, "`lr` is nan"),
    "negative rate": (lambda: fit(lr=-1.0), ValueError, "`lr` is -1.0"),
    "nothing to do": (lambda: fit(train=False, valid=False), ValueError, "nothing to do"),
    "fit inside fit": (lambda: fit([BasicTrainCB(), Inner()]), RuntimeError, "inside `fit`"),
    "an optimizer that needs more": (lambda: fit(opt=opt_with_more), TypeError, "functools.partial"),
    "an optimizer object": (
        lambda: make(opt=optim.SGD([torch.ones(1, requires_grad=True)])),
        TypeError,
        "Pass the class",
    ),
    "a cancel outside its span": (
        lambda: fit(SimpleNamespace(before_fit=lambda t: (_ for _ in ()).throw(CancelBatchException))),
        CancelBatchException,
        "not open here",
    ),
    "a keyword nobody takes": (lambda: make(momentum=0.9), TypeError, "nobody takes"),
    "a device PyTorch does not know": (lambda: DeviceCB("gpu0"), ValueError, "does not know"),
    "a device that is not there": (
        lambda: fit([BasicTrainCB(), DeviceCB("xpu")]),
        RuntimeError,
        "this machine cannot",
    ),
    "an event that is none": (lambda: make().run_callbacks("predikt"), LookupError, "Did you mean `predict`"),
    "stopping nothing": (lambda: make().request_stop("now"), RuntimeError, "nothing is training"),
    "no batches at all": (lambda: NBatchCB(0), ValueError, "1 or more"),
    "momentum of 2": (lambda: MomentumTrainCB(2), ValueError, "`momentum` is 2"),
    "a place that is none": (lambda: ProgressCB("browser"), ValueError, "'browser'"),
    "a mode that is none": (lambda: Monitor("up"), ValueError, "'up'"),
}


@pytest.mark.parametrize("do, error, words", CASES.values(), ids=CASES)
def test_bad_input_gets_a_clear_error(do, error, words):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error) as info:
            do()
    said = "\n".join([str(info.value), *getattr(info.value, "__notes__", ())])
    assert words in said, said


# ---- In several processes

ROWS = [(torch.ones(2), torch.zeros(1)) for _ in range(8)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


def loader_of(**kwargs):
    "An exact loader of eight rows"
    return exact_loader(ROWS, 4, seed=1, **kwargs)


def weighted():
    return DataLoader(ROWS, 4, sampler=WeightedRandomSampler([1.0] * 8, 8))


class OnRanks(SimpleNamespace):
    "Runs only in some processes"

    def log(self, trainer): ...


class Sparse(nn.Module):
    "Has a gradient that is sparse"

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 1, sparse=True)

    def forward(self, x):
        return self.table(x[:, 0].long())


def together(n=2, train=None, model=None, callbacks=(), **kwargs):
    "A fit in `n` processes"

    def run():
        every = [BasicTrainCB(), DistributedCB(timeout=10, **kwargs), *callbacks]
        net = nn.Linear(2, 1) if model is None else model()
        fit(every, dls=DataLoaders((train or loader_of)()), model=net, valid=False)

    launch(run, n, timeout=60)


def lonely(**environment):
    "A fit in a process whose environment says half"

    def run():
        import os

        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        os.environ.update(environment)
        fit([BasicTrainCB(), DistributedCB()], dls=DataLoaders(loader_of()), valid=False)

    launch(run, 1, timeout=60)


SEVERAL = {
    "an unknown way to share": (lambda: DistributedCB("wole"), ValueError, "'whole'"),
    "no time to wait": (lambda: DistributedCB(timeout=0), ValueError, "`timeout` is 0"),
    "no process expected": (lambda: DistributedCB(expected=0), ValueError, "`expected` is 0"),
    "a weight that is none": (lambda: DistributedCB(weigh="rows"), ValueError, "'samples'"),
    "share that is no flag": (lambda: DistributedCB(share="no"), TypeError, "`share` is 'no'"),
    "a loader that draws by weights": (lambda: together(train=weighted), TypeError, "exact_loader"),
    "a stream": (lambda: together(train=lambda: DataLoader(Stream(), 4)), TypeError, "share=False"),
    "a list of batches": (lambda: together(train=batches), TypeError, "exact_loader"),
    "a loader that is shared already": (
        lambda: together(train=lambda: loader_of(rank=0, world_size=2)),
        ValueError,
        "shared twice",
    ),
    "a size without a rank": (lambda: lonely(WORLD_SIZE="2"), ValueError, "`RANK`"),
    "a rank without an address": (lambda: lonely(WORLD_SIZE="2", RANK="0"), ValueError, "torchrun"),
    "fewer processes than expected": (
        lambda: together(expected=3),
        WorldSizeMismatch,
        "there are 2 processes",
    ),
    "one process where two are expected": (
        lambda: fit([BasicTrainCB(), DistributedCB(expected=2)]),
        WorldSizeMismatch,
        "there are 1 processes",
    ),
    "a process that is not there": (
        lambda: together(callbacks=[OnRanks(on_ranks=5)]),
        ValueError,
        "`OnRanks.on_ranks` is 5, but there are 2 processes",
    ),
    "a place that is no process": (lambda: make(OnRanks(on_ranks="first")), ValueError, "names no process"),
    "a sparse gradient": (lambda: together(model=Sparse), TypeError, "`model.table.weight` is sparse"),
    "a lazy model": (
        lambda: together(model=lambda: nn.LazyLinear(1)),
        ValueError,
        "`model.weight` has no shape yet",
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("do, error, words", SEVERAL.values(), ids=SEVERAL)
def test_bad_input_in_several_processes_gets_a_clear_error(do, error, words):
    test_bad_input_gets_a_clear_error(do, error, words)


@pytest.mark.processes
def test_a_seed_that_is_left_out_is_drawn_for_all_and_said_in_one_line(capfd):
    def run():
        order = []

        def before_batch(trainer):
            order.append(trainer.batch[0][:, 0].tolist())

        rows = [(torch.full((2,), float(i)), torch.zeros(1)) for i in range(8)]
        dls = DataLoaders(DataLoader(rows, 4, shuffle=True))
        fit([BasicTrainCB(), DistributedCB(timeout=10), before_batch], dls=dls, valid=False)
        return order

    first, second = launch(run, 2, timeout=60)
    both = [x for share in (first, second) for batch in share for x in batch]
    assert sorted(both) == list(range(8))
    assert capfd.readouterr().out.count("from a seed that was drawn") == 1


def test_only_some_steps_is_a_warning():
    with pytest.warns(UserWarning, match="No callback does `step`, `zero_grad`"):
        fit(SimpleNamespace(predict=lambda t: None, get_loss=lambda t: None, backward=lambda t: None))


def test_nothing_is_lost_by_a_failed_fit():
    trainer = make()
    before = list(trainer.callbacks)
    with pytest.raises(ValueError):
        trainer.fit(1, callbacks=[DeviceCB("cpu"), SimpleNamespace(after_bach=print)])
    assert trainer.callbacks == before and "DeviceCB" not in dir(trainer)
    trainer.fit(1)
    assert trainer.n_updates == 3


def test_streams_themselves_train_fine():
    class Stream:
        def __iter__(self):
            return iter(batches())

    trainer = make([BasicTrainCB(), MetricsCB(), ProgressCB("plain")], dls=DataLoaders(Stream(), Stream()))
    trainer.fit(2)
    assert trainer.n_updates == 6 and len(trainer.history) == 2 and trainer.updates_per_epoch is None
