"""Where things are computed (`device/device.py`), and that nobody waits for the device inside a batch.

`DeviceCB` is checked against the device of everything that takes part; the `meta` device, which knows
shapes and no values, stands in for an accelerator. Waiting is checked by making it impossible: while a
batch is being worked on, every way from a tensor to a number raises an error.
"""

import dataclasses
from collections import namedtuple

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import isaac_loop.device.device as device_module
import isaac_loop.all as library
from isaac_loop.device.device import DeviceCB
from isaac_loop.device.precision import MixedPrecisionCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.show.progress import ProgressCB
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.training import BasicTrainCB, MomentumTrainCB, NBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import Order
from isaac_loop.loop.trainer import Trainer
from guarded import Guarded, make_batches, run_guarded
from waiting import Waited


def make_trainer(callbacks, batches=None, model=None, loss_func=F.mse_loss, opt_func=optim.SGD):
    batches = make_batches() if batches is None else batches
    return Trainer(
        DataLoaders(batches, batches[:2]),
        loss_func,
        opt_func,
        nn.Linear(3, 1) if model is None else model,
        callbacks,
    )


# What is moved


class BatchCB:
    "Keeps the batch that the steps will see"

    order = Order.DATA

    def before_batch(self, trainer):
        self.seen = trainer.batch


@pytest.mark.shows("ISA-46")
@pytest.mark.parametrize("position", [0, 1])
def test_model_and_batch_are_moved_wherever_the_callback_stands(position):
    callbacks = [BasicTrainCB()]
    callbacks.insert(position, DeviceCB("meta"))
    trainer = make_trainer(callbacks)
    trainer.fit(1)
    assert {p.device.type for p in trainer.model.parameters()} == {"meta"}
    assert trainer.batch[0].is_meta and trainer.preds.is_meta and trainer.loss.is_meta


Named = namedtuple("Named", "a b")


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    label: str


class Encoding:
    "Not a tensor, but it can be moved"

    def __init__(self, device):
        self.device = device

    def to(self, device):
        return Encoding(torch.device(device))


@pytest.mark.shows("ISA-46", "SON-31")
def test_every_tensor_in_a_nested_batch_is_moved_and_nothing_else_changes():
    x = torch.ones(2, 3)
    batch = {
        "deep": [x, (x, {"x": x})],
        "named": Named(x, 7),
        "sample": Sample(x, "cat"),
        "encoding": Encoding("cpu"),
        "id": "row 1",
        "none": None,
    }
    trainer = make_trainer([DeviceCB("meta"), BatchCB()], [batch])
    trainer.fit(1, train=False)
    seen = trainer.BatchCB.seen
    assert list(seen) == list(batch)
    assert seen["deep"][0].is_meta and seen["deep"][1][0].is_meta and seen["deep"][1][1]["x"].is_meta
    assert isinstance(seen["named"], Named) and seen["named"].a.is_meta and seen["named"].b == 7
    assert (
        isinstance(seen["sample"], Sample) and seen["sample"].image.is_meta and seen["sample"].label == "cat"
    )
    assert seen["encoding"].device.type == "meta"
    assert seen["id"] == "row 1" and seen["none"] is None
    assert batch["deep"][0] is x and batch["sample"].image is x, "the loader's own batch must stay as it was"


@pytest.mark.shows("ISA-46")
def test_a_loss_with_buffers_is_moved():
    "Class weights have to be where the predictions are"
    loss = nn.CrossEntropyLoss(weight=torch.ones(5))
    batches = [(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))]
    make_trainer([BasicTrainCB(), DeviceCB("meta")], batches, nn.Linear(3, 5), loss).fit(1)
    assert loss.weight.is_meta


@pytest.fixture
def parameters_keep_their_identity():
    "Have `Module.to` change parameters in place, as between CPU and GPU; by default not for `meta`"
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.shows("ISA-46")
@pytest.mark.parametrize(
    "opt_func",
    [lambda params, lr: optim.SGD(params, lr, momentum=0.9), optim.Adam, optim.Adagrad],
    ids=["sgd", "adam", "adagrad"],
)
def test_the_state_of_an_optimizer_that_is_kept_is_moved(opt_func, parameters_keep_their_identity):
    trainer = make_trainer([BasicTrainCB()], opt_func=opt_func)
    trainer.fit(1)
    opt = trainer.opt
    parameters = list(trainer.model.parameters())
    assert all(not v.is_meta for s in opt.state.values() for v in s.values())
    for p in parameters:
        p.grad = None  # `swap_tensors` wants them to itself
    trainer.loss = trainer.preds = None
    trainer.fit(1, callbacks=DeviceCB("meta"), keep_opt=True)
    assert trainer.opt is opt and list(opt.state) == parameters
    for p, state in opt.state.items():
        assert p.is_meta
        assert all(v.is_meta for name, v in state.items() if name != "step")
        assert "step" not in state or not state["step"].is_meta, "PyTorch keeps `step` on the CPU"


class Callable:
    "A model that is no module and cannot be moved"

    def __init__(self):
        self.weight = torch.ones(3, 1, requires_grad=True)

    def parameters(self):
        return iter([self.weight])

    def __call__(self, x):
        return x @ self.weight


@pytest.mark.shows("ISA-46")
def test_a_model_that_cannot_be_moved_is_left_where_it_is():
    model = Callable()
    trainer = make_trainer([BasicTrainCB(), DeviceCB("cpu")], model=model)
    trainer.fit(1, lr=0.1)
    assert trainer.n_updates == 3 and not torch.equal(model.weight, torch.ones(3, 1))


@pytest.mark.shows("ISA-46")
def test_a_function_is_a_model_too():
    "No parameters, no `to`, and its batches are still moved"
    trainer = make_trainer([BasicTrainCB(), DeviceCB("meta")], model=lambda x: x.sum(1, keepdim=True))
    trainer.fit(1, train=False)
    assert trainer.preds.is_meta


@pytest.mark.shows("ISA-46")
def test_the_default_device_is_asked_for_when_training_begins(monkeypatch):
    "A choice made later counts"
    cb = DeviceCB()
    monkeypatch.setattr(device_module, "default_device", lambda: torch.device("meta"))
    trainer = make_trainer([BasicTrainCB(), cb])
    trainer.fit(1)
    assert trainer.preds.is_meta


@pytest.mark.shows("ISA-47")
def test_the_device_that_was_given_is_kept_whatever_the_default_is(monkeypatch):
    "It has the name that it was given by, in every fit"
    cb = DeviceCB("meta")
    monkeypatch.setattr(device_module, "default_device", lambda: torch.device("cpu"))
    trainer = make_trainer([BasicTrainCB(), cb])
    for _ in range(2):
        trainer.fit(1)
        assert str(cb.device) == "meta" and trainer.preds.is_meta


def test_one_object_serves_two_trainers_and_two_fits():
    cb = DeviceCB("meta")
    for _ in range(2):
        trainer = make_trainer([BasicTrainCB(), cb])
        for _ in range(2):
            trainer.fit(1)
            assert trainer.preds.is_meta


@pytest.mark.parametrize(
    "make_cbs",
    [
        lambda: [BasicTrainCB(), MetricsCB(), DeviceCB("meta")],
        lambda: library.CoreCBs("meta", progress=False),
        lambda: library.CoreCBs(lambda: torch.device("meta"), progress=False),
    ],
)
def test_where_losses_are_read_a_device_without_numbers_is_refused_before_weights_are_lost(make_cbs):
    trainer = make_trainer(make_cbs())
    weight = trainer.model.weight.tolist()
    with pytest.raises(RuntimeError, match="`MetricsCB` would have no numbers to read"):
        trainer.fit(1)
    assert trainer.model.weight.tolist() == weight and trainer.n_updates == 0


def test_a_model_that_was_made_without_numbers_says_so_with_the_cure():
    trainer = make_trainer([BasicTrainCB(), DeviceCB("cpu")], model=nn.Linear(3, 1, device="meta"))
    with pytest.raises(RuntimeError, match=r"`weight` is the first of 2 .*`model\.to_empty\(device='cpu'\)`"):
        trainer.fit(1)
    trainer.model.to_empty(device="cpu").reset_parameters()
    trainer.fit(1)
    assert trainer.n_updates == 3


def test_a_second_network_without_numbers_is_called_by_its_name():
    trainer = make_trainer([BasicTrainCB(), DeviceCB("cpu")])
    trainer.teacher = nn.BatchNorm1d(3, affine=False, device="meta")
    with pytest.raises(
        RuntimeError, match="`teacher` was made on the device `meta`.*`running_mean` is the first"
    ):
        trainer.fit(1)


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_a_device_may_be_a_name_or_an_object(device):
    assert DeviceCB(device).device == torch.device("meta")


@pytest.mark.shows("ISA-46")
@pytest.mark.parametrize("name", ["cudda", "", "cpu:x"])
def test_a_name_that_no_device_has_is_refused_at_once(name):
    with pytest.raises(
        ValueError, match=f"`device` is '{name}', which PyTorch does not know. Use a name such as 'cpu'"
    ):
        DeviceCB(name)


@pytest.mark.shows("ISA-46")
def test_a_device_that_this_machine_lacks_is_an_error_before_anything_is_moved():
    "And the message says what there is"
    trainer = make_trainer([BasicTrainCB(), DeviceCB("cuda:99")])
    before = [p.device for p in trainer.model.parameters()]
    with pytest.raises(
        RuntimeError,
        match=r"`DeviceCB` was told to use 'cuda:99', but this machine cannot: (.|\n)*works; pass that",
    ) as caught:
        trainer.fit(1)
    assert f"'{device_module.default_device()}' works" in str(caught.value)
    assert "raised by `DeviceCB.before_fit`" in caught.value.__notes__
    assert caught.value.__suppress_context__, "one error is enough"
    assert [p.device for p in trainer.model.parameters()] == before
    trainer.remove_callback("DeviceCB")
    trainer.fit(1)
    assert trainer.n_updates == 3


# Nobody waits


class HitsMetric:
    "Counts on the device"

    def reset(self):
        self.hits, self.n = torch.zeros(()), 0

    def update(self, preds, targets):
        self.hits = self.hits + ((preds - targets).abs() < 1).sum()
        self.n += len(targets)

    def compute(self):
        return self.hits / self.n


BUILT_IN = {
    "BasicTrainCB": lambda: [BasicTrainCB()],
    "MomentumTrainCB": lambda: [MomentumTrainCB(0.9)],
    "NBatchCB": lambda: [BasicTrainCB(), NBatchCB(3)],
    "DeviceCB": lambda: [BasicTrainCB(), DeviceCB("cpu")],
    "MetricsCB": lambda: [BasicTrainCB(), MetricsCB(HitsMetric(), train_metrics=True)],
    "MetricsCB that counts": lambda: [
        BasicTrainCB(),
        MetricsCB(HitsMetric(), weigh=lambda batch: (batch[1] > -1).sum(), mae=torch.nn.functional.l1_loss),
    ],
    "ProgressCB": lambda: [BasicTrainCB(), ProgressCB("plain")],
    "TrackingCB": lambda: [BasicTrainCB(), TrackingCB()],
    "RecorderCB": lambda: [BasicTrainCB(), library.RecorderCB()],
    "OneCycleSchedulerCB": lambda: [BasicTrainCB(), library.OneCycleSchedulerCB()],
    "ActivationStatsCB": lambda: [BasicTrainCB(), library.ActivationStatsCB(torch.nn.Linear)],
    "GradientStatsCB": lambda: [BasicTrainCB(), library.GradientStatsCB()],
    "NonFiniteCB": lambda: [BasicTrainCB(), library.NonFiniteCB()],
    "NonFiniteStopCB": lambda: [BasicTrainCB(), library.NonFiniteStopCB()],
    "ClipGradCB": lambda: [BasicTrainCB(), library.ClipGradCB(max_norm=1.0)],
    "AccumulationCB": lambda: [BasicTrainCB(), library.AccumulationCB(1)],
    "InterruptCB": lambda: [BasicTrainCB(), library.InterruptCB()],
    "all together": lambda: [
        MomentumTrainCB(0.9),
        NBatchCB(600),
        DeviceCB("cpu"),
        MetricsCB(HitsMetric(), train_metrics=True),
        ProgressCB("plain"),
        TrackingCB(),
    ],
}


@pytest.mark.shows("ISA-56")
@pytest.mark.parametrize("everything", [False, True], ids=["batch guarded", "everything guarded"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_no_built_in_callback_waits_for_the_device(name, everything):
    n_batches = 550 if name == "all together" else 4  # More losses than are kept unstacked
    trainer = run_guarded(BUILT_IN[name](), everything, n_batches)
    assert trainer.n_updates == 2 * min(n_batches, 3 if name == "NBatchCB" else n_batches)
    assert isinstance(trainer.loss, Guarded)
    if hasattr(trainer, "MetricsCB"):
        assert len(trainer.history) == 2 and 0 <= trainer.history.latest("HitsMetric") <= 1


WAYS = {
    "item": lambda t: t.item(),
    "cpu": lambda t: t.cpu(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "bool": bool,
    "float": float,
    "int": int,
    "if": lambda t: 1 if t > 0 else 2,
    "f-string": lambda t: f"{t:.2f}",
    "repr": repr,
}


@pytest.mark.parametrize("everything", [False, True], ids=["batch guarded", "everything guarded"])
@pytest.mark.parametrize("way", WAYS)
def test_the_guard_notices_whoever_does_wait(way, everything):
    "The tests above could not fail otherwise"

    class WaitCB:
        order = Order.RECORD

        def after_batch(self, trainer):
            WAYS[way](trainer.loss.detach())

    with pytest.raises(Waited):
        run_guarded([BasicTrainCB(), WaitCB()], everything)


def test_the_guard_notices_who_waits_for_a_gradient():
    class WaitCB:
        def after_backward(self, trainer):
            trainer.model.weight.grad.sum().item()

    with pytest.raises(Waited):
        run_guarded([BasicTrainCB(), WaitCB()], everything=True)


class SyncIsAnErrorCB:
    "Has CUDA raise an error whenever the host waits while a batch is being worked on"

    order = -10_000

    def before_batch(self, trainer):
        torch.cuda.set_sync_debug_mode("error")

    def cleanup_batch(self, trainer):
        torch.cuda.set_sync_debug_mode("default")


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU to wait for")


@pytest.fixture
def sync_allowed_afterwards():
    yield
    torch.cuda.set_sync_debug_mode("default")


class CudaHitsMetric(HitsMetric):
    def reset(self):
        self.hits, self.n = torch.zeros((), device="cuda"), 0


@pytest.mark.shows("ISA-56")
@needs_gpu
def test_no_built_in_callback_waits_for_a_real_gpu(sync_allowed_afterwards):
    callbacks = [
        MomentumTrainCB(0.9),
        NBatchCB(600),
        DeviceCB("cuda"),
        MetricsCB(CudaHitsMetric(), train_metrics=True),
        ProgressCB("plain"),
        TrackingCB(),
        SyncIsAnErrorCB(),
    ]
    batches = [tuple(o.pin_memory() for o in batch) for batch in make_batches(550)]
    trainer = make_trainer(callbacks, batches)
    trainer.fit(2, lr=0.01)
    assert trainer.n_updates == 1100 and trainer.loss.is_cuda


@needs_gpu
def test_cuda_notices_whoever_does_wait(sync_allowed_afterwards):
    "The test above could not fail otherwise"

    class WaitCB:
        def after_batch(self, trainer):
            trainer.loss.item()

    with pytest.raises(RuntimeError, match="synchroniz"):
        make_trainer([BasicTrainCB(), DeviceCB("cuda"), WaitCB(), SyncIsAnErrorCB()]).fit(1)


@pytest.mark.shows("PTA-29")
def test_every_module_and_optimizer_of_the_trainer_is_moved(parameters_keep_their_identity):
    "A teacher, a critic, and the state of optimizers that were there before"
    trainer = make_trainer([BasicTrainCB(), DeviceCB("meta")])
    trainer.teacher, trainer.critic = torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(3)
    trainer.critic_opt = torch.optim.Adam(trainer.critic.parameters())
    trainer.critic(torch.randn(4, 3)).sum().backward()
    trainer.critic_opt.step()
    trainer.critic_opt.zero_grad()
    trainer.fit(1, valid=False)
    tensors = [
        *trainer.teacher.parameters(),
        *trainer.critic.parameters(),
        *trainer.critic.buffers(),
        *(o["exp_avg"] for o in trainer.critic_opt.state.values()),
    ]
    assert len(tensors) == 9 and {o.device.type for o in tensors} == {"meta"}


class PenaltyCB:
    "Adds a term to the loss at the last moment, and looks at it behind the backward pass"

    def before_backward(self, trainer):
        trainer.loss = trainer.loss + 0.1 * sum(p.pow(2).sum() for p in trainer.model.parameters())
        self.before = trainer.loss.item()

    def after_backward(self, trainer):
        self.after = trainer.loss.item()


@pytest.mark.parametrize("others", [(), ("accumulation",)])
def test_a_term_that_another_adds_to_the_loss_is_scaled_with_it_and_nobody_sees_the_scale(others):
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    batches = [(x[i : i + 8], x[i : i + 8].sum(1, keepdim=True)) for i in range(0, 32, 8)]
    found = []
    for half in ([], [MixedPrecisionCB("float16", init_scale=256.0)]):
        torch.manual_seed(0)
        penalty = PenaltyCB()
        callbacks = [BasicTrainCB(), penalty, *half, *(AccumulationCB(2) for _ in others)]
        model = nn.Linear(4, 1)
        Trainer(DataLoaders(batches), F.mse_loss, optim.SGD, model, callbacks).fit(5, lr=0.05, valid=False)
        assert penalty.before == penalty.after
        found.append(model.weight.detach())
    assert torch.allclose(*found, rtol=0.02, atol=0.01)


class SecondScaler(MixedPrecisionCB):
    "Scales for another optimizer, whose step is done elsewhere"

    step = before_step = cleanup_step = None


def test_two_that_scale_leave_the_true_loss():
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    seen = {}

    def before_backward(trainer):
        seen["before"] = trainer.loss.item()

    def after_backward(trainer):
        seen["after"] = trainer.loss.item()

    scalers = [kind("float16", init_scale=256.0) for kind in (MixedPrecisionCB, SecondScaler)]
    callbacks = [BasicTrainCB(), *scalers, before_backward, after_backward]
    Trainer(DataLoaders([(x, x[:, :1])]), F.mse_loss, optim.SGD, nn.Linear(4, 1), callbacks).fit(
        1, valid=False
    )
    assert seen["before"] == seen["after"]
