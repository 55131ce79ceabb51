"""Lists of many small tensors are kept as one tensor, and come back as they were."""

import io
import math

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.all import BasicTrainCB, CheckpointCB, DataLoaders, Trainer
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.state.change_marks import Marker
from isaac_loop.state.plain_state import from_plain, plain
from runs import Cut, CutCB

N = 100


def there_and_back(tree):
    "What the safe reader makes of it, and how many tensors the file has"
    file = io.BytesIO()
    made = plain(tree, exact=True)
    torch.save(made, file)
    file.seek(0)
    return from_plain(torch.load(file, weights_only=True)), len(file.getvalue())


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8).tolist()


KINDS = {
    "losses": lambda i: torch.tensor(i / 3),
    "counts": lambda i: torch.tensor(i),
    "marks": lambda i: torch.tensor(i % 3 == 0),
    "rows": lambda i: torch.arange(6.0).reshape(2, 3) + i,
    "half": lambda i: torch.full((2,), i, dtype=torch.bfloat16),
    "odd numbers": lambda i: torch.tensor([math.nan, -0.0, math.inf, 1e-45][i % 4]),
    "one channel": lambda i: torch.full((2, 1, 2, 2), i / 3).to(memory_format=torch.channels_last),
    "channels": lambda i: (torch.arange(24.0).reshape(2, 3, 2, 2) + i).to(memory_format=torch.channels_last),
    "columns": lambda i: (torch.arange(6.0) + i).reshape(2, 3).clone().T,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("container", [list, tuple])
def test_many_tensors_come_back_bit_for_bit_and_take_little_room(kind, container):
    xs = container(map(KINDS[kind], range(N)))
    again, size = there_and_back(dict(xs=xs))
    again = again["xs"]
    assert type(again) is container and [bits(x) for x in again] == [bits(x) for x in xs]
    assert [(x.dtype, x.shape) for x in again] == [(x.dtype, x.shape) for x in xs]
    assert len({x.untyped_storage().data_ptr() for x in again}) == N
    assert [x.stride() for x in again] == [x.stride() for x in xs]
    assert size < 7000 or kind in (
        "columns",
        "one channel",
        "channels",
    )  # 250 bytes for each tensor by itself


def test_whoever_shares_their_memory_shares_it_again():
    xs = [torch.tensor([float(i), 0.0]) for i in range(N)]
    orders = [
        dict(xs=xs, last=xs[-1], first=xs[0][:1], same=xs[3].detach()),
        dict(last=xs[-1], first=xs[0][:1], same=xs[3].detach(), xs=xs),
    ]
    for tree in orders:
        again, _ = there_and_back(tree)
        again["last"][0], again["first"][0], again["same"][1] = 7, 8, 9
        assert again["xs"][-1][0] == 7 and again["xs"][0][0] == 8 and again["xs"][3][1] == 9
        assert len(again["xs"]) == N and again["xs"][50][0] == 50


def test_one_list_in_two_places_holds_the_same_tensors():
    xs = [torch.tensor(float(i)) for i in range(N)]
    again, _ = there_and_back(dict(a=xs, b=tuple(xs), c=xs[: N - 10]))
    again["a"][4].fill_(99)
    assert again["b"][4] == 99 and again["c"][4] == 99


def test_parts_of_one_tensor_stay_parts_of_one():
    table = torch.arange(2.0 * N).reshape(N, 2)
    again, _ = there_and_back(dict(rows=list(table), table=table))
    again["table"][5] = -1
    assert again["rows"][5].tolist() == [-1, -1] and again["rows"][6].tolist() == [12, 13]


def test_a_tensor_twice_in_a_list_is_one():
    x = torch.tensor(1.0)
    again, _ = there_and_back([*(torch.tensor(float(i)) for i in range(N)), x, x])
    again[-1].fill_(5)
    assert again[-2] == 5


@pytest.mark.parametrize("kind", KINDS)
def test_many_have_the_marks_that_each_would_have(kind):
    xs = list(map(KINDS[kind], range(N)))
    together, alone = Marker(set()).mark(xs), [Marker(set()).mark(x) for x in xs]
    assert [together.part(i) for i in range(N)] == alone
    xs[7].data.flatten()[:1].logical_not_() if xs[7].dtype == torch.bool else xs[7].data.add_(1)
    assert Marker(set()).mark(xs) != together


class LossesCB:
    "Keeps each loss, and the last of them by another name"

    def __init__(self):
        self.losses = []

    def after_batch(self, trainer):
        self.losses.append(trainer.loss.detach())
        self.last = self.losses[-1]
        if len(self.losses) > 3:
            self.losses[1].mul_(0.5)
            trainer.opt.param_groups[0]["lr"] = 0.01 + 0.1 * float(self.losses[1])


def test_a_run_that_gathers_its_losses_goes_on_exactly(tmp_path):
    def fit(*more):
        torch.manual_seed(0)
        rows = torch.utils.data.TensorDataset(torch.randn(240, 4), torch.randint(2, (240,)))
        dls = DataLoaders(exact_loader(rows, 2, seed=1))
        callbacks = [BasicTrainCB(), LossesCB(), *more]
        trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(4, 2), callbacks)
        trainer.fit(1, lr=0.1, valid=False)
        return trainer

    whole = fit()
    with pytest.raises(Cut):
        fit(CheckpointCB(tmp_path, every=90), CutCB("after_batch", lambda t: t.n_updates == 100))
    again = fit(CheckpointCB(tmp_path, every=90))
    assert torch.equal(again.model.weight, whole.model.weight)
    assert torch.equal(torch.stack(again.LossesCB.losses), torch.stack(whole.LossesCB.losses))
    assert again.LossesCB.last is again.LossesCB.losses[-1]
