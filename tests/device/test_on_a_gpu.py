"""The laws once more where there is a GPU: nobody waits, resume is exact, what is compiled is the same.

Skipped where there is none. `python -m benchmarks.on_gpu` measures there.
"""

import contextlib
import copy
import io
import sys
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import runs
from isaac_loop.all import AccumulationCB, BasicTrainCB, BlackBoxCB, CheckpointCB, ClipGradCB, CompileCB
from isaac_loop.all import CoreCBs, DataLoaders, DeviceCB, EMACB, InterruptCB, MetricsCB, MixedPrecisionCB
from isaac_loop.all import OneCycleSchedulerCB, Order, ProgressCB, RecorderCB, TimesCB, Trainer, set_seed
from isaac_loop.data.dataloaders import get_dataloaders
from isaac_loop.loop.events import CancelFitException

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
GPU = "cuda"
NORM, DROPOUT = 1, 3  # Places in the model


def batches(n, size=16):
    "Random batches on the CPU"
    return [(torch.randn(size, 1, 8, 8), torch.randint(0, 10, (size,))) for _ in range(n)]


def convolutions():
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(144, 10))


def made(*callbacks, n=6, opt_func=optim.SGD, without=()):
    "A trainer on the GPU, the same each time"
    torch.manual_seed(0)
    model = convolutions()
    for i in without:
        model[i] = nn.Identity()
    cbs = [BasicTrainCB(), DeviceCB(GPU), MetricsCB(show=False), *callbacks]
    return Trainer(DataLoaders(batches(n), batches(2)), F.cross_entropy, opt_func, model, cbs)


def fitted(*callbacks, n_epochs=2, **options):
    trainer = made(*callbacks, **options)
    trainer.fit(n_epochs, lr=0.05)
    return trainer


def near(a, b, within):
    "Fail, and say where, unless the weights of both are near"
    for name, value in a.model.state_dict().items():
        assert torch.allclose(value, b.model.state_dict()[name], atol=within, rtol=0), name


# Nobody waits


@contextlib.contextmanager
def waits_counted():
    "PyTorch warns of each time that the host waits for the GPU"
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{o.filename}:{o.lineno}" for o in caught if "synchroniz" in str(o.message)]


def accuracy(preds, targets):
    return preds.argmax(1) == targets


def waits_of(n_epochs, n_batches, *callbacks):
    "How often a fit with the default callbacks and some more waits for the GPU, its first fit left aside"
    data = [tuple(o.pin_memory() for o in batch) for batch in batches(n_batches)]
    core = CoreCBs(GPU, accuracy=accuracy, train_metrics=True, progress=False, show=False)
    trainer = Trainer(DataLoaders(data), F.cross_entropy, optim.SGD, convolutions(), [core, *callbacks])
    trainer.fit(1, lr=0.01, valid=False)
    with contextlib.redirect_stdout(io.StringIO()), waits_counted() as found:
        trainer.fit(n_epochs, lr=0.01, valid=False)
    return len(found), found


@pytest.mark.parametrize(
    "more",
    [
        lambda: [],
        lambda: [ProgressCB("plain"), RecorderCB(), ClipGradCB(1.0), OneCycleSchedulerCB(), EMACB()],
    ],
    ids=["default", "careful"],
)
def test_waits_for_the_gpu_are_one_for_an_epoch_however_many_batches(more):
    (few, _), (many, places), (epochs, where) = (waits_of(*o, *more()) for o in ((1, 20), (1, 600), (4, 20)))
    assert many <= few + 1, places
    assert epochs - few <= 3, where


def test_the_count_of_waits_sees_one():
    def after_batch(trainer):
        trainer.loss.item()

    assert waits_of(1, 20, after_batch)[0] - waits_of(1, 20)[0] >= 20


def test_a_bar_that_redraws_as_often_as_it_may_does_not_wait_for_its_loss(monkeypatch):
    shown = SimpleNamespace(display=lambda *args, **kwargs: None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=shown))
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    few, many = (waits_of(1, n, ProgressCB("notebook", seconds=0.0))[0] for n in (20, 300))
    assert many <= few + 1


# The same, bit for bit


@pytest.fixture
def exact():
    "PyTorch chooses operations that give the same every time"
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def test_the_same_weights_as_by_hand(exact):
    trainer = fitted(n_epochs=2)
    other = made()
    model = other.model.to(GPU)
    opt = optim.SGD(model.parameters(), 0.05)
    for _ in range(2):
        model.train()
        for x, y in other.dls.train:
            F.cross_entropy(model(x.to(GPU)), y.to(GPU)).backward()
            opt.step()
            opt.zero_grad()
        model.eval()
        with torch.no_grad():
            for x, _ in other.dls.valid:
                model(x.to(GPU))
    for name, value in model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name]), name


@pytest.mark.parametrize("at", [(1, 2), (2, 5)])
@pytest.mark.parametrize("half", [None, "float16", "bfloat16"])
def test_a_fit_that_goes_on_is_as_if_it_had_never_stopped(exact, tmp_path, at, half):
    "Dropout draws from the GPU's generator, which a checkpoint holds"

    def callbacks(folder):
        more = [MixedPrecisionCB(half)] if half else []
        return [DeviceCB(GPU), *more, *runs.callbacks(folder, every=1)]

    whole = runs.fit(runs.make_trainer(callbacks(tmp_path / "whole")))
    cut = runs.CutCB("after_batch", lambda t: t.training and (t.epoch, t.batch_num) == at)
    with pytest.raises(runs.Cut):
        runs.fit(runs.make_trainer([*callbacks(tmp_path / "cut"), cut]))
    again = runs.fit(runs.make_trainer(callbacks(tmp_path / "cut")))
    assert next(again.model.parameters()).is_cuda
    runs.same(whole, again)


def test_an_evaluation_in_the_middle_leaves_no_trace(exact):
    "Nor in the generator of the GPU, from which dropout draws"

    class DrawsCB:
        def before_predict(self, trainer):
            if not trainer.training:
                torch.rand(3, device=GPU)

    def after_batch(trainer):
        if trainer.training and trainer.batch_num == 3:
            trainer.validate()

    near(fitted(DrawsCB(), after_batch), fitted(DrawsCB()), 0.0)


def test_a_black_box_replays_to_the_same_numbers(exact):
    class PlantedCB:
        order = Order.LAST

        def after_get_loss(self, trainer):
            if trainer.training and (trainer.epoch, trainer.batch_num) == (1, 4):
                raise RuntimeError("planted")

    trainer = made(BlackBoxCB(3), PlantedCB())
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(3, lr=0.05)
    weights, loss = copy.deepcopy(trainer.model.state_dict()), trainer.loss.item()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.replay()
    assert trainer.loss.item() == loss
    for name, value in weights.items():
        assert torch.equal(value, trainer.model.state_dict()[name]), name


def test_rows_in_memory_lie_on_the_gpu_and_come_in_the_order_of_the_usual_loader(exact):
    x, y = torch.randn(200, 1, 8, 8), torch.randint(0, 10, (200,))

    def trained(in_memory):
        data = TensorDataset(x, y)
        loaders = get_dataloaders(data, data, 16, in_memory=in_memory, seed=3)
        set_seed(0)
        cbs = [BasicTrainCB(), DeviceCB(GPU), MetricsCB(show=False)]
        trainer = Trainer(DataLoaders(*loaders), F.cross_entropy, optim.SGD, convolutions(), cbs)
        trainer.fit(2, lr=0.05)
        return trainer

    held, usual = trained(True), trained(False)
    near(held, usual, 0.0)
    with waits_counted() as found:
        for _ in held.dls.train:
            pass
    assert len(found) <= 1, found


# Optimizers


def test_a_fused_step_finds_its_counters_whoever_made_them():
    "Adam's are on the CPU unless it is fused or capturable"
    fused = CompileCB(model=False, loss=False, fused=True)
    trainer, plain = (made(opt_func=optim.Adam, without=[NORM, DROPOUT]) for _ in range(2))
    for i, more in enumerate(([], [fused], [], [fused])):
        trainer.fit(1, lr=0.01, keep_opt=i > 0, callbacks=more)
        plain.fit(1, lr=0.01, keep_opt=i > 0)
    near(trainer, plain, 1e-3)
    step = next(iter(trainer.opt.state.values()))["step"]
    assert step.device.type == "cpu" and step == 24


# Compiled


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


WAYS = {
    "plain": [],
    "accumulation": [lambda: AccumulationCB(2)],
    "careful": [lambda: ClipGradCB(1.0), OneCycleSchedulerCB, EMACB, RecorderCB],
    "half": [lambda: MixedPrecisionCB("float16")],
}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_and_captured_training_is_that_of_the_plain_model(mode, way):
    "Losses that are read many batches later included, and no graph is made from the second epoch on"
    torch._dynamo.reset()
    seen = []

    def log(trainer):
        seen.append(graphs())

    more = lambda: [make() for make in WAYS[way]]  # noqa: E731
    plain = fitted(*more(), n_epochs=4, without=[DROPOUT])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = fitted(*more(), CompileCB(mode=mode), log, n_epochs=4, without=[DROPOUT])
    within = 1e-2 if way == "half" else 1e-4
    near(plain, compiled, within)
    for a, b in zip(plain.history, compiled.history):
        for name in ("train_loss", "valid_loss"):
            assert a[name] == pytest.approx(b[name], abs=10 * within), name
    assert seen[0] > 0 and seen[1:] == seen[1:2] * 3


# Times


def test_times_add_up_and_name_who_waits():
    class WaitsCB:
        def after_batch(self, trainer):
            trainer.loss.item()

    class SleepsCB:
        def before_batch(self, trainer):
            time.sleep(0.002)

    trainer, times = made(n=60), TimesCB()
    trainer.fit(1, lr=0.01)
    start = time.perf_counter()
    trainer.fit(1, lr=0.01, callbacks=[times, SleepsCB()])
    whole = time.perf_counter() - start
    found = times.times
    assert found.total == pytest.approx(whole, rel=0.02)
    assert any(row.get("device") for row in found.rows)
    slept = sum(row["seconds"] for row in found.rows if row["callback"] == "SleepsCB")
    assert slept >= 0.12 and "SleepsCB.before_batch" in found.advice
    trainer.fit(1, lr=0.01, callbacks=[times, WaitsCB()])
    assert "`WaitsCB.after_batch` waits for the device" in times.times.advice


# Cancels and interrupts do not leave the GPU in the middle of something


def test_a_cancelled_fit_leaves_nothing_behind_on_the_gpu():
    def after_backward(trainer):
        if trainer.batch_num == 3:
            raise CancelFitException

    trainer = made(InterruptCB(), n=10)
    trainer.fit(1, lr=0.01)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        trainer.fit(1, lr=0.01, callbacks=after_backward)
    assert torch.cuda.memory_allocated() - before < 1_000_000


def test_a_loader_with_workers_and_pinned_memory_is_read_without_waiting():
    data = TensorDataset(torch.randn(320, 1, 8, 8), torch.randint(0, 10, (320,)))
    loader = DataLoader(data, 16, num_workers=2, pin_memory=True)
    trainer = Trainer(
        DataLoaders(loader),
        F.cross_entropy,
        optim.SGD,
        convolutions(),
        CoreCBs(GPU, progress=False, show=False),
    )
    trainer.fit(1, lr=0.01, valid=False)
    with waits_counted() as found:
        trainer.fit(1, lr=0.01, valid=False)
    assert len(found) <= 5, found


def test_what_was_saved_on_a_gpu_is_loaded_by_a_trainer_on_the_cpu(tmp_path):
    trainer, other = fitted(CheckpointCB(tmp_path)), made()
    other.remove_callback("DeviceCB")
    other.load(tmp_path)
    for name, value in other.model.state_dict().items():
        assert value.device.type == "cpu" and torch.equal(value, trainer.model.state_dict()[name].cpu()), name
