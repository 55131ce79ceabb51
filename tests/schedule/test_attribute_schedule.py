"Any attribute of trainer, model or optimizer may follow a curve."

import copy
import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.events import Order
from isaac_loop.loop.trainer import Trainer
from isaac_loop.schedule.annealing import piecewise
from isaac_loop.schedule.attribute_schedule import AttributeSchedulerCB
from isaac_loop.train.training import BasicTrainCB
from scheduled import MOMENTUM, make_batches, make_trainer, same, still_model


@pytest.fixture(autouse=True)
def warnings_are_errors():
    "So nobody warns unasked, PyTorch about the order of steps least of all"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# Attributes


@pytest.mark.shows("NEMO-55", "F046")
def test_any_attribute_follows_its_function_and_is_put_back():
    "Groups, one group, modules, and anything else that the trainer has"
    seen = []

    class LookCB:
        order = Order.LAST

        def before_step(self, trainer):
            g = trainer.opt.param_groups
            seen.append(
                (
                    g[0]["weight_decay"],
                    g[1]["momentum"],
                    g[0]["momentum"],
                    trainer.model[1].p,
                    trainer.loss_func.beta,
                )
            )

    def two_groups(params, lr):
        params = list(params)
        return MOMENTUM([dict(params=params[:2]), dict(params=params[2:])], lr)

    cb = AttributeSchedulerCB(
        {
            "opt.weight_decay": lambda p: p,
            "opt.1.momentum": lambda p: 0.5 * p,
            "model.1.p": lambda p: p / 10,
            "loss_func.beta": lambda p: 1 + p,
        }
    )
    trainer = make_trainer(cb, LookCB(), opt_func=two_groups)
    trainer.loss_func = nn.SmoothL1Loss(beta=0.7)
    trainer.fit(2, lr=0.01, valid=False)
    for i, row in enumerate(seen):
        assert row == pytest.approx((i / 10, i / 20, 0.9, i / 100, 1 + i / 10))
    assert len(seen) == 10
    assert (
        trainer.opt.param_groups[0]["weight_decay"],
        trainer.opt.param_groups[1]["momentum"],
        trainer.model[1].p,
        trainer.loss_func.beta,
    ) == (0, 0.9, 0.1, 0.7)


@pytest.mark.shows("NEMO-55", "SON-19", "F046")
def test_an_attribute_can_be_flipped_after_an_epoch():
    "Counted in epochs"
    seen = []

    class LookCB:
        def before_predict(self, trainer):
            seen.append(trainer.model[1].p)

    trainer = make_trainer(
        AttributeSchedulerCB({"model.1.p": lambda epoch: 0.5 if epoch < 1 else 0.0}, unit="epoch"),
        LookCB(),
        n=2,
    )
    trainer.fit(3, valid=False)
    assert seen == [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.shows("NEMO-55")
@pytest.mark.parametrize(
    "target, message",
    [
        ("opt.momentun", "Did you mean `momentum`"),
        ("model.*.q", "has an attribute `q`"),
        ("model.7.p", "No module `7`"),
        ("model.0.weigth", "Did you mean `weight`"),
    ],
)
def test_a_target_that_does_not_exist_fails_before_the_first_batch(target, message):
    trainer = make_trainer(AttributeSchedulerCB({target: lambda p: p}))
    with pytest.raises(LookupError, match=message):
        trainer.fit(1, valid=False)
    assert trainer.n_updates == 0


@pytest.mark.shows("NEMO-55", "F046")
def test_scheduling_the_rate_by_a_function_equals_doing_it_by_hand():
    "Bit for bit"
    ours = still_model()
    theirs = copy.deepcopy(ours)
    make_trainer(AttributeSchedulerCB({"opt.momentum": piecewise((0, 0.9), (1, 0.5))}), model=ours).fit(
        2, lr=0.1, valid=False
    )
    opt, i = MOMENTUM(theirs.parameters(), 0.1), 0
    for _ in range(2):
        for x, y in make_batches():
            opt.param_groups[0]["momentum"] = 0.9 + (0.5 - 0.9) * (i / 10 - 0) / 1
            F.mse_loss(theirs(x), y).backward()
            opt.step()
            opt.zero_grad()
            i += 1
    assert same(ours, theirs)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_a_rate_is_put_back_also_if_it_is_a_tensor(lr):
    model = still_model()
    trainer = make_trainer(AttributeSchedulerCB({"opt.lr": lambda p: 0.1 * (1 - p)}), model=model)
    trainer.opt_func, trainer.opt = None, optim.Adam(model.parameters(), lr=lr)
    trainer.fit(1, valid=False)
    assert float(trainer.opt.param_groups[0]["lr"]) == pytest.approx(0.1)


class Counting:
    "A rate that is another one each time it is asked for"

    def __init__(self):
        self.n = 0

    def __call__(self, place):
        self.n += 1
        return 0.1 / (1 + self.n)


@pytest.mark.parametrize("unit", ["progress", "update", "epoch"])
@pytest.mark.parametrize("every", [3, 4, "epoch"])
def test_a_function_that_counts_is_asked_as_often_in_a_run_that_goes_on(unit, every, tmp_path):
    rows = [(torch.randn(4), torch.randn(1)) for _ in range(12)]

    def trained(folder, *callbacks):
        torch.manual_seed(0)
        loaders = DataLoaders(exact_loader(rows, 2, seed=1))
        follows = AttributeSchedulerCB({"opt.lr": Counting()}, unit)
        cbs = [BasicTrainCB(), follows, CheckpointCB(tmp_path / folder, every=every)]
        trainer = Trainer(loaders, F.mse_loss, optim.SGD, nn.Linear(4, 1), cbs)
        trainer.fit(3, lr=0.1, valid=False, callbacks=callbacks)
        return trainer.model.weight

    def before_step(trainer):
        if trainer.n_updates == 8:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        trained("cut", before_step)
    assert torch.equal(trained("cut"), trained("whole"))
