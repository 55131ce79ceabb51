"The table of a model: what runs, its shapes and parameters."

import copy

import matplotlib
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.inspection.activations import ActivationStats, ActivationStatsCB
from isaac_loop.inspection.gradients import GradientStats, GradientStatsCB
from isaac_loop.train.training import BasicTrainCB, NBatchCB, OneBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import Order
import isaac_loop.inspection.loop_tables  # noqa: F401 (gives trainers `summarize_callbacks`)
from isaac_loop.inspection.model_summary import summarize_model
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer
from inspected import make_batches, make_model, make_trainer, n_hooks


matplotlib.use("Agg")


# Summary


@pytest.mark.shows("MIN-08")
def test_a_summary_counts_every_parameter_once():
    "A layer that runs twice, tied weights, a parameter outside any layer, a layer that never runs"

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.tied, self.unused = (
                nn.Linear(4, 4),
                nn.Linear(4, 4),
                nn.Linear(4, 4),
                nn.Linear(7, 7),
            )
            self.tied.weight, self.scale = self.b.weight, nn.Parameter(torch.ones(3))
            self.b.bias.requires_grad_(False)

        def forward(self, x):
            return self.tied(self.b(self.a(self.a(x)))).sum() * self.scale

    model = Odd()
    table = summarize_model(model, torch.randn(5, 4))
    assert [(o["layer"], o.get("parameters")) for o in table.rows] == [
        ("a", 20),
        ("a", 0),
        ("b", 20),
        ("tied", 4),
        ("Odd", 3),
        ("unused", 56),
        ("total", 103),
    ]
    assert table.rows[-1]["parameters"] == sum(p.numel() for p in model.parameters())
    assert table.rows[-1]["trainable"] == sum(p.numel() for p in model.parameters() if p.requires_grad) == 99
    assert table.rows[0]["MFLOPs"] == 2 * 4 * 4 / 1e6 and table.rows[-1]["MFLOPs"] == 4 * 2 * 4 * 4 / 1e6
    assert table.rows[5]["output"] is None and n_hooks(model) == 0


@pytest.mark.shows("MIN-08")
@pytest.mark.parametrize(
    "model, x, flops",
    [
        (nn.Conv2d(3, 5, 3, padding=1), torch.randn(2, 3, 8, 8), 2 * 5 * 8 * 8 * 3 * 9),
        (nn.Conv2d(4, 8, 1, groups=2), torch.randn(2, 4, 8, 8), 2 * 8 * 8 * 8 * 2),
        (nn.Linear(6, 7), torch.randn(2, 3, 6), 2 * 3 * 6 * 7),
        (nn.LSTM(4, 8, batch_first=True), torch.randn(2, 5, 4), 5 * 2 * 4 * 8 * (4 + 8)),
        (nn.ReLU(), torch.randn(2, 5), 0),
    ],
)
def test_operations_are_counted_for_one_example(model, x, flops):
    assert summarize_model(model, x).rows[-1]["MFLOPs"] * 1e6 == pytest.approx(flops)


@pytest.mark.shows("MIN-08")
def test_attention_is_counted_and_its_fast_path_comes_back():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    rows = summarize_model(model, torch.randn(2, 3, 8)).rows
    projections, scores = 2 * 3 * 8 * 8 * 4, 2 * 2 * 3 * 3 * 8
    assert rows[0]["layer"] == "self_attn" and rows[0]["MFLOPs"] * 1e6 == projections + scores
    assert torch.backends.mha.get_fastpath_enabled()


class DictCB(BasicTrainCB):
    "Batches are dicts, and the model takes keywords"

    def predict(self, trainer):
        trainer.preds = trainer.model(trainer.batch["x"])

    def get_loss(self, trainer):
        trainer.loss = F.mse_loss(trainer.preds, trainer.batch["y"])


@pytest.mark.shows("MIN-08", "ISA-42", "ISA-43")
def test_a_trainer_is_summarised_by_its_own_predict_and_left_as_it_was():
    batches = [dict(x=x, y=y) for x, y in make_batches()]
    trainer = Trainer(DataLoaders(batches, batches), None, optim.SGD, make_model(), DictCB())
    rows = trainer.summarize_model().rows
    assert rows[0]["input"] == "(5, 6)" and rows[-2]["output"] == "(5, 1)"
    assert not hasattr(trainer, "batch") and not hasattr(trainer, "preds")
    trainer.fit(1)
    batch, preds, state = trainer.batch, trainer.preds, copy.deepcopy(trainer.model.state_dict())
    trainer.summarize_model(batches[1])
    assert trainer.batch is batch and trainer.preds is preds and n_hooks(trainer.model) == 0
    assert all(torch.equal(v, state[k]) for k, v in trainer.model.state_dict().items())
    assert (
        "| layer |" in trainer.summarize_model()._repr_markdown_() and len(trainer.summarize_callbacks()) == 5
    )


@pytest.mark.shows("MIN-08")
@pytest.mark.parametrize("generator", [None, 3])
def test_a_summary_before_training_does_not_change_the_training(generator):
    "Drawing a batch from a shuffling loader takes no random numbers away"
    ends = []
    for summary in (False, True):
        set_seed(0)
        x, y = torch.randn(40, 6), torch.randn(40, 1)
        g = None if generator is None else torch.Generator().manual_seed(generator)
        dls = DataLoaders(torch.utils.data.DataLoader(list(zip(x, y)), 8, shuffle=True, generator=g))
        trainer = Trainer(dls, F.mse_loss, optim.SGD, make_model(), [BasicTrainCB()])
        if summary:
            trainer.summarize_model()
        trainer.fit(2, lr=0.05, valid=False)
        ends.append(trainer.model.state_dict())
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])


class Carry(nn.Module):
    "Its state goes on from batch to batch, in an attribute, in a list and in a tensor that is written to"

    def __init__(self):
        super().__init__()
        self.rnn, self.out, self.h = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 1), None
        self.sizes, self.total = [], torch.zeros(())

    def forward(self, x):
        x, h = self.rnn(x, self.h)
        self.h = h.detach()
        self.sizes.append(len(x))
        self.total += 1
        return self.out(x) * (1 + 0.1 * self.total) / len(self.sizes)


class CarryCB(BasicTrainCB):
    "A callback that keeps the state"

    h = None

    def predict(self, trainer):
        x, h = trainer.model.rnn(trainer.batch[0], self.h)
        self.h = h.detach()
        trainer.preds = trainer.model.out(x)


@pytest.mark.parametrize("make_cb", [BasicTrainCB, CarryCB])
def test_a_summary_leaves_what_the_model_or_a_callback_keeps_from_batch_to_batch(make_cb):
    ends = []
    for summary in (lambda trainer: None, Trainer.summarize_model):
        set_seed(0)
        batches = [(torch.randn(5, 3, 6), torch.randn(5, 3, 1)) for _ in range(4)]
        trainer = Trainer(DataLoaders(batches), F.mse_loss, optim.SGD, Carry(), [make_cb()])
        for _ in range(2):
            summary(trainer)
            trainer.fit(1, lr=0.1, valid=False)
        ends.append(trainer.model.out.weight)
    assert torch.equal(*ends)


def test_a_summary_of_a_model_alone_leaves_its_attributes():
    model, x = Carry(), torch.randn(5, 3, 6)
    summarize_model(model, x)
    assert model.h is None and model.sizes == [] and model.total == 0
    model(x)
    h = model.h
    summarize_model(model, x)
    assert model.h is h and model.sizes == [5] and model.total == 1


@pytest.mark.shows("MIN-08")
def test_what_cannot_be_summarised_says_why():
    with pytest.raises(ValueError, match="lazy layers"):
        summarize_model(nn.LazyLinear(3), torch.zeros(1, 2))
    with pytest.raises(TypeError, match="no layers to list"):
        summarize_model(lambda x: x, torch.zeros(1, 2))
    with pytest.raises(TypeError, match="`batch` is None, and without inputs"):
        summarize_model(nn.Linear(2, 3), None)
    traced = torch.jit.trace(nn.Linear(2, 3), torch.zeros(1, 2))
    for model in (traced, nn.Sequential(traced, nn.ReLU())):
        with pytest.raises(TypeError, match="`TopLevelTracedModule`, and what TorchScript has compiled"):
            summarize_model(model, torch.zeros(1, 2))
    trainer = Trainer(DataLoaders(iter(make_batches())), F.mse_loss, optim.SGD, make_model(), BasicTrainCB())
    with pytest.raises(ValueError, match="walked only once"):
        trainer.summarize_model()
    assert trainer.summarize_model(make_batches()[0]).rows
    assert len(list(trainer.dls.train)) == 4
    with pytest.raises(ValueError, match="gave no batch"):
        Trainer(DataLoaders([]), None, None, make_model(), None).summarize_model()
    model = make_model()
    with pytest.raises(RuntimeError):
        summarize_model(model, torch.zeros(2, 99))
    assert n_hooks(model) == 0 and model.training


@pytest.mark.shows("ISA-43")
def test_a_summary_also_stops_at_the_limits_of_a_pass():
    "Fit, and then both summaries"
    trainer = make_trainer([NBatchCB(2), OneBatchCB()])
    trainer.fit(1)
    assert len(trainer.summarize_callbacks()) and trainer.summarize_model().rows[-1]["layer"] == "total"


@pytest.mark.shows("ISA-74")
def test_a_record_can_be_read_in_the_middle_of_a_fit_and_hooks_survive_it():
    "Reading early loses nothing"

    class ReadCB:
        order = Order.LAST

        def after_batch(self, trainer):
            self.n = (
                len(trainer.ActivationStatsCB.stats["2"].mean),
                len(trainer.GradientStatsCB.stats["0.bias"].norm),
            )

    trainer = make_trainer([ActivationStatsCB(nn.ReLU), GradientStatsCB(), ReadCB()])
    trainer.fit(2, valid=False)
    assert trainer.ReadCB.n == (8, 8)
    assert GradientStats().hist.shape == (0, 32) and ActivationStats().hist.shape == (0, 40)
