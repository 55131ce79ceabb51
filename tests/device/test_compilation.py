"A compiled model is the same model: its weights, its names, its callbacks, and nothing is left after the fit"

from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch._dynamo.backends.common import aot_autograd

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.device.compilation import CompileCB
from isaac_loop.device.device import place_state
from isaac_loop.loop.events import CancelBatchException, CancelFitException
from isaac_loop.loop.spans import with_cbs
from isaac_loop.loop.trainer import Trainer
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.train.accumulation import AccumulationCB
from isaac_loop.train.averaging import EMACB
from isaac_loop.train.training import BasicTrainCB

TRACED = dict(backend="aot_eager")  # All but the C compiler


def replaying(graph, inputs):
    "Stands for a captured graph: what a call gives lies in the memory of what the last call gave"
    places = {}

    def place(i, found):
        "Where a result of this shape lies"
        return places.setdefault((i, found.shape), found.detach().clone())

    def run(args):
        given = {id(o) for o in args if torch.is_tensor(o)}
        found = graph(*args)
        args.clear()
        is_new = [torch.is_tensor(o) and id(o) not in given for o in found]
        return [place(i, o).copy_(o).detach() if new else o for i, (o, new) in enumerate(zip(found, is_new))]

    run._boxed_call = True
    return run


def captured():
    "A backend whose graphs are replayed, and the option that says so"

    def backend(graph, inputs, options=None):
        return aot_autograd(fw_compiler=replaying, bw_compiler=replaying)(graph, inputs)

    return CompileCB(backend=backend, options={"triton.cudagraphs": True})


def made(*callbacks, opt_func=optim.SGD, loss_func=F.cross_entropy):
    torch.manual_seed(0)
    x, y = torch.randn(44, 1, 8, 8), torch.randint(0, 10, (44,))
    dls = DataLoaders(*(exact_loader(torch.utils.data.TensorDataset(x, y), 16, seed=1) for _ in range(2)))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    usual = [BasicTrainCB(), MetricsCB(show=False)]
    return Trainer(dls, loss_func, opt_func, model, [*usual, *callbacks])


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("loss_func", [F.cross_entropy, nn.CrossEntropyLoss()])
def test_losses_and_weights_are_those_of_the_plain_model(loss_func):
    plain, compiled = (
        made(EMACB(), loss_func=loss_func),
        made(EMACB(), CompileCB(**TRACED), loss_func=loss_func),
    )
    for t in (plain, compiled):
        t.fit(2, lr=0.05)
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(value, compiled.model.state_dict()[name], atol=1e-5), name
    for a, b in zip(plain.history, compiled.history):
        assert a["valid_loss"] == pytest.approx(b["valid_loss"], abs=1e-4)


def test_no_graph_is_made_from_the_second_epoch_on():
    torch._dynamo.reset()
    seen = []

    def log(trainer):
        seen.append(graphs())

    made(CompileCB(**TRACED), log).fit(4, lr=0.05)
    assert seen[1:] == seen[1:2] * 3 and seen[0] > 0


@pytest.mark.parametrize("loss_func", [F.cross_entropy, nn.CrossEntropyLoss()])
def test_model_and_loss_are_compiled_though_their_code_is_all_of_pytorch(loss_func):
    torch._dynamo.reset()
    names, seen = [], []

    def keep(graph, inputs):
        names.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return graph.forward

    fitting = made(CompileCB(backend=keep), loss_func=loss_func)
    for _ in range(10):  # More than the number of times that the compiler would begin anew
        fitting.fit(1, lr=0.05)
        seen.append(len(names))
    for function in ("conv2d", "cross_entropy"):
        assert any(function in found for found in names), (function, names)
    assert seen[1:] == seen[1:2] * 9


@pytest.mark.parametrize("n", [1, 3])
def test_what_a_captured_graph_gives_stays_as_it_is_when_it_is_replayed(n):
    "Losses that metrics keep for many batches, predictions, and gradients that are gathered over some"
    torch._dynamo.reset()
    plain, other = made(AccumulationCB(n)), made(AccumulationCB(n), captured())
    for trainer in (plain, other):
        trainer.fit(3, lr=0.05)
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(value, other.model.state_dict()[name], atol=1e-5), name
    for a, b in zip(plain.history, other.history):
        for name in ("train_loss", "valid_loss"):
            assert a[name] == pytest.approx(b[name], abs=1e-4)


def test_callbacks_stand_around_the_compiled_part():
    seen = []

    class Around:
        def before_predict(self, trainer):
            seen.append("before")

        def after_predict(self, trainer):
            seen.append(tuple(trainer.preds.shape))

        def after_get_loss(self, trainer):
            seen.append(trainer.loss.ndim)

    made(Around(), CompileCB(**TRACED)).fit(1, lr=0.05, valid=False)
    assert seen[:3] == ["before", (16, 10), 0] and len(seen) == 9


def test_a_checkpoint_has_the_names_of_the_model_and_goes_on_without_the_compiler(tmp_path):
    def stop(trainer):
        if trainer.training and trainer.batch_num == 1 and trainer.epoch == 1:
            raise RuntimeError("killed")

    stop.__name__ = "after_batch"
    t = made(CompileCB(**TRACED), CheckpointCB(tmp_path, every=1))
    with pytest.raises(RuntimeError, match="killed"):
        t.fit(3, lr=0.05, callbacks=stop)
    assert list(t.model.state_dict())[0] == "0.weight"
    again, whole = made(CheckpointCB(tmp_path, every=1)), made()
    again.fit(3, lr=0.05)
    whole.fit(3, lr=0.05)
    for p, q in zip(again.model.parameters(), whole.model.parameters()):
        assert torch.allclose(p, q, atol=1e-5)


@pytest.mark.parametrize("error", [ValueError("bad"), CancelFitException("enough")])
def test_however_a_fit_ends_nothing_stays_compiled(error):
    def after_predict(trainer):
        raise error

    t = made(CompileCB(channels_last=True, fused=True, **TRACED), after_predict, opt_func=optim.Adam)
    if isinstance(error, ValueError):
        with pytest.raises(ValueError):
            t.fit(1)
    else:
        t.fit(1)
    assert t.model._compiled_call_impl is None and t.loss_func is F.cross_entropy
    assert t.model[0].weight.is_contiguous() and not t.opt.param_groups[0]["fused"]


def test_an_optimizer_without_a_fused_step_is_refused():
    with pytest.raises(TypeError, match="has none"):
        made(CompileCB(model=False, loss=False, fused=True), opt_func=optim.Rprop).fit(1)


class OwnBatch(Trainer):
    "Two micro-batches of its own, with one step"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        for part in (slice(0, None, 2), slice(1, None, 2)):
            self.preds = self.model(x[part])
            self.loss = self.loss_func(self.preds, y[part]) / 2
            if self.training:
                self.loss.backward()
        if self.training:
            self.opt.step()
            self.opt.zero_grad()


def test_gradients_of_a_batch_of_ones_own_stay_when_a_captured_model_is_called_again():
    torch._dynamo.reset()
    data = [(torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))) for _ in range(3)]

    def trained(*callbacks):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        trainer = OwnBatch(DataLoaders(data), F.cross_entropy, optim.SGD, model, list(callbacks))
        trainer.fit(2, lr=0.1, valid=False)
        return trainer.model.state_dict()

    plain, other = trained(), trained(captured())
    for name, value in plain.items():
        assert torch.allclose(value, other[name], atol=1e-5), name


def test_channels_are_put_back_though_nothing_was_compiled():
    trainer = made(CompileCB(model=False, loss=False, channels_last=True))
    trainer.fit(1, lr=0.05)
    weight = trainer.model[0].weight
    assert weight.is_contiguous() and not trainer.CompileCB._moved


def test_a_fused_step_without_an_optimizer_is_told():
    class Other:
        def __init__(self, params, lr):
            self.param_groups = [dict(params=list(params), lr=lr)]

        def step(self):
            pass

        def zero_grad(self):
            pass

    with pytest.warns(UserWarning, match="no optimizer of PyTorch"):
        made(CompileCB(model=False, loss=False, fused=True), opt_func=Other).fit(1, lr=0.05)


def test_a_state_in_lists_and_one_of_another_make_follow_the_weights():
    weight = torch.zeros(3, device="meta")
    state = dict(step=torch.tensor(1.0), al=[torch.zeros(2), None], n=3, deep={"a": (torch.zeros(1),)})
    opt = SimpleNamespace(state={weight: state}, param_groups=[dict(params=[weight])])
    place_state(opt)
    held = opt.state[weight]
    assert held["al"][0].is_meta and held["deep"]["a"][0].is_meta and held["al"][1] is None
    assert held["n"] == 3 and held["step"].device.type == "cpu", "it knows neither setting"
    for odd in (None, [], {weight: torch.zeros(1)}, {weight: None}):
        place_state(SimpleNamespace(state=odd, param_groups=[dict(params=[weight]), {}]))
