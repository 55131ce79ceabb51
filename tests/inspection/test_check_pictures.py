"""Mistakes with pictures, tables and outputs of models, each beside what is like it and right.

Each planted one is found by name when some batches are run; in the right ones nothing is found.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torcheval.metrics import BinaryAccuracy

from isaac_loop import CancelBatchException, Trainer, with_cbs
from isaac_loop.callbacks import BasicTrainCB, MetricsCB
from isaac_loop.data import DataLoaders
from isaac_loop.inspection.seen_run.seen_readings import Readings
from marked import Marked, Planted
from working import found_in

planted, right = Planted(), Marked()


def fitting(data, model, loss_func, *cbs, collate=None, kind=Trainer, batch_size=16):
    torch.manual_seed(0)
    dls = (
        data
        if isinstance(data, DataLoaders)
        else DataLoaders(DataLoader(data, batch_size, shuffle=True, collate_fn=collate))
    )
    steps = [BasicTrainCB()] if kind is Trainer else []
    return kind(dls, loss_func, optim.Adam, model, [*steps, *cbs])


class Rows(Dataset):
    "Rows of tensors, with something done to each"

    def __init__(self, x, y, change=lambda x, y: (x, y)):
        self.x, self.y, self.change = x, y, change

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.change(self.x[i], self.y[i])


class Changes:
    "A callback that does something to each training batch"

    on_valid = False

    def __init__(self, change):
        self.change = change

    def before_batch(self, trainer):
        trainer.batch = self.change(*trainer.batch)


# Pictures and what is said of places in them


def pictures(n=64):
    torch.manual_seed(1)
    masks = torch.zeros(n, 12, 12)
    for i, mask in enumerate(masks):
        mask[i % 7 : i % 7 + 4, i % 5 : i % 5 + 3] = 1
    return masks[:, None] + 0.1 * torch.randn(n, 1, 12, 12), masks


class Masks(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.conv(x)[:, 0]


def segmenting(change, *cbs):
    return fitting(Rows(*pictures(), change), Masks(), F.binary_cross_entropy_with_logits, *cbs)


def turned(x, y):
    return x.rot90(int(torch.randint(4, ())), (-2, -1)), y


def both_turned(x, y):
    n = int(torch.randint(4, ()))
    return x.rot90(n, (-2, -1)), y.rot90(n, (-2, -1))


def rolled_and_lighter(x, y):
    return 0.5 * x.roll(int(torch.randint(6, ())), -1) + 0.1, y


def some_flipped(x, y):
    return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x), y


def all_flipped(x, y):
    return x.flip(-1), y.flip(-1)


def noisier(x, y):
    return x + 0.2 * torch.randn_like(x), y


def as_they_are(x, y):
    return x, y


@planted("targets_not_moved")
def turned_by_the_dataset():
    return segmenting(turned)


@planted("targets_not_moved")
def rolled_by_the_dataset():
    return segmenting(rolled_and_lighter)


@planted("targets_not_moved")
def flipped_by_a_callback():
    return segmenting(as_they_are, Changes(some_flipped))


@planted("targets_not_moved")
def flipped_by_the_collate_function():
    def collate(rows):
        x, y = map(torch.stack, zip(*rows))
        return (x.flip(-2), y) if torch.rand(()) < 0.5 else (x, y)

    data = Rows(*pictures())
    return fitting(data, Masks(), F.binary_cross_entropy_with_logits, collate=collate)


class FlipsBoxes:
    "Boxes are as they were"

    def before_batch(self, trainer):
        images, boxes = trainer.batch
        if trainer.training:
            trainer.batch = images.flip(-1), boxes


class FlipsAges(FlipsBoxes):
    "Two numbers that are no places"

    def before_batch(self, trainer):
        x, y = trainer.batch
        trainer.batch = x.flip(-1), y


def in_a_row(n_out):
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, n_out))


@planted("targets_not_moved")
def boxes_that_stay():
    x, _ = pictures()
    return fitting(TensorDataset(x, torch.rand(64, 4)), in_a_row(4), F.mse_loss, FlipsBoxes())


@right
def two_numbers_that_are_no_places():
    x, _ = pictures()
    return fitting(TensorDataset(x, torch.rand(64, 2)), in_a_row(2), F.mse_loss, FlipsAges())


@right
def classes_of_flipped_pictures():
    x, _ = pictures()
    return fitting(
        TensorDataset(x, torch.arange(64) % 3), in_a_row(3), F.cross_entropy, Changes(some_flipped)
    )


@right
def both_turned_by_the_dataset():
    return segmenting(both_turned)


@right
def both_flipped_by_a_callback():
    return segmenting(as_they_are, Changes(all_flipped))


@right
def noise_on_pictures():
    return segmenting(noisier)


@planted("view_for_transpose")
def colours_made_first_by_a_view():
    x = F.interpolate(torch.rand(64, 3, 4, 4), 12, mode="bilinear").permute(0, 2, 3, 1).contiguous()
    return fitting(TensorDataset(x.view(64, 3, 12, 12), torch.arange(64) % 3), colours(), F.cross_entropy)


def colours():
    return nn.Sequential(nn.Flatten(), nn.Linear(432, 8), nn.ReLU(), nn.Linear(8, 3))


@right
def colours_that_come_first():
    x = F.interpolate(torch.rand(64, 3, 4, 4), 12, mode="bilinear")
    return fitting(TensorDataset(x, torch.arange(64) % 3), colours(), F.cross_entropy)


@right
def colours_of_noise():
    return fitting(TensorDataset(torch.rand(64, 3, 12, 12), torch.arange(64) % 3), colours(), F.cross_entropy)


# Rows that drift, bytes that wrap around


def net(n_in=4, n_out=3):
    return nn.Sequential(nn.Linear(n_in, 8), nn.ReLU(), nn.Linear(8, n_out))


def classes(n=64):
    return torch.arange(n) % 3


def noise_in_place(x, y):
    x += 0.1 * torch.randn(4)
    return x.clone(), y


def noise_in_an_array(x, y):
    x += np.random.randn(4).astype("float32")
    return torch.from_numpy(x.copy()), y


def smaller_in_place(x, y):
    return x.mul_(0.9), y


def clamped_in_place(x, y):
    return x.clamp_(-1, 1), y


def noise_on_a_copy(x, y):
    return x + 0.1 * torch.randn(4), y


def classifying(data, *cbs, **options):
    return fitting(data, net(), F.cross_entropy, *cbs, **options)


@planted("changes_data")
def noise_that_adds_up():
    return classifying(Rows(torch.randn(64, 4), classes(), noise_in_place))


@planted("changes_data")
def noise_that_adds_up_in_arrays():
    return classifying(Rows(np.random.randn(64, 4).astype("float32"), classes(), noise_in_an_array))


@planted("changes_data")
def rows_of_a_part_that_shrink():
    rows = Rows(list(torch.randn(80, 4)), classes(80), smaller_in_place)
    return classifying(Subset(rows, range(10, 74)))


@right
def rows_that_are_clamped_once():
    return classifying(Rows(torch.randn(64, 4), classes(), clamped_in_place))


@right
def noise_on_copies():
    return classifying(Rows(torch.randn(64, 4), classes(), noise_on_a_copy))


@right
def rows_that_are_counted():
    "How often each was read"

    class Counted(Rows):
        def __init__(self, *args):
            super().__init__(*args)
            self.times = torch.zeros(64)

        def __getitem__(self, i):
            self.times[i] += 1
            return super().__getitem__(i)

    return classifying(Counted(torch.randn(64, 4), classes()))


def test_rows_are_put_back():
    rows = Rows(torch.randn(64, 4), classes(), noise_in_place)
    before, trainer = rows.x.clone(), classifying(rows)
    readings = Readings(trainer)
    readings.read()
    assert readings.drifting == "Rows.x" and torch.equal(rows.x, before)


def bytes_of(n=64):
    torch.manual_seed(2)
    return torch.randint(256, (n, 8, 8), dtype=torch.uint8)


def brighter_array(x, y):
    x = x.numpy() + np.uint8(np.random.randint(10, 90))
    return torch.from_numpy(x).float() / 255, y


def brighter_tensor(x, y):
    return (x + 60).float() / 255, y


def darker_in_place(x, y):
    x = x.clone()
    x -= 40
    return x.float(), y


def clipped(x, y):
    return (x.int() + int(torch.randint(10, 90, ()))).clamp(max=255).byte().float() / 255, y


def in_floats(x, y):
    return x.float() / 255 + 0.3 * torch.rand(()), y


def of_bytes(change, *cbs):
    model = nn.Sequential(nn.Flatten(), *net(64))
    return fitting(Rows(bytes_of(), classes(), change), model, F.cross_entropy, *cbs)


for _change in (brighter_array, brighter_tensor, darker_in_place):
    planted.append((lambda change=_change: of_bytes(change), ("bytes_wrap",)))
planted.append((lambda: of_bytes(as_they_are, Changes(brighter_tensor)), ("bytes_wrap",)))
right += [lambda: of_bytes(clipped), lambda: of_bytes(in_floats)]


# Scales of inputs


def by_the_largest(x, y):
    return x / x.max(), y


def by_mean_and_spread(x, y):
    return (x - x.mean()) / x.std(), y


def by_each_row(x, y):
    return x / x.norm(dim=1, keepdim=True), y


def by_a_constant(x, y):
    return (x - 0.5) / 0.3, y


class OwnBatch(Trainer):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.loss = F.cross_entropy(self.model(x / x.abs().max()), y)
        if self.training:
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()


def uniform(n=64):
    torch.manual_seed(3)
    return TensorDataset(torch.rand(n, 4), classes(n))


def collated(change):
    return lambda rows: change(*map(torch.stack, zip(*rows)))


def mixed(x, y):
    "Two rows and the class of the first"
    return 0.9 * x + 0.1 * x[torch.randperm(len(x))], y


def scaled(collate=None, change=None):
    return classifying(uniform(), *([Changes(change)] if change else []), collate=collate)


for _change in (by_the_largest, by_mean_and_spread):
    planted.append((lambda change=_change: classifying(uniform(), Changes(change)), ("batch_scale",)))
    planted.append(
        (lambda change=_change: classifying(uniform(), collate=collated(change)), ("batch_scale",))
    )
planted.append((lambda: fitting(uniform(), net(), F.cross_entropy, kind=OwnBatch), ("batch_scale",)))
for _change in (by_each_row, by_a_constant):
    right.append(lambda change=_change: classifying(uniform(), collate=collated(change)))
right.append(lambda: classifying(uniform(), Changes(by_each_row)))


def test_rows_that_are_mixed_have_no_scale_of_the_batch():
    assert "batch_scale" not in found_in(classifying(uniform(), collate=collated(mixed)), batches=3)


def table(n=64):
    torch.manual_seed(4)
    return torch.rand(n, 4) * torch.tensor([50, 50_000, 9, 4_000])


def over_rows(x, y=None):
    x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
    return x if y is None else (x, y)


@planted("row_scale")
def a_table_scaled_by_row():
    return classifying(TensorDataset(over_rows(table()), classes()))


@planted("row_scale")
def a_table_scaled_by_row_in_a_callback():
    return classifying(TensorDataset(table(), classes()), Changes(lambda x, y: (F.layer_norm(x, (4,)), y)))


@right
def a_table_scaled_by_column():
    x = table()
    return classifying(TensorDataset((x - x.mean(0)) / x.std(0), classes()))


@right
def series_scaled_by_row():
    x = over_rows(torch.randn(64, 20).cumsum(1))
    return fitting(TensorDataset(x, classes()), net(20), F.cross_entropy)


def with_gaps(mark, shape=(64, 4)):
    torch.manual_seed(5)
    x = torch.randn(shape)
    x[torch.rand(shape) < 0.1] = mark
    return x


@planted("missing_as_number")
def a_mark_in_a_table():
    return classifying(TensorDataset(with_gaps(-999.0), classes()))


@planted("missing_as_number")
def a_mark_in_series():
    model = nn.Sequential(nn.Flatten(), nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 3))
    return fitting(TensorDataset(with_gaps(9999.0, (64, 10, 4)), classes()), model, F.cross_entropy)


@planted("missing_as_number")
def a_mark_that_a_callback_puts_in():
    data = TensorDataset(with_gaps(torch.nan), classes())
    return classifying(data, Changes(lambda x, y: (x.nan_to_num(-9999.0), y)))


class Fills(nn.Sequential):
    "Knows the mark"

    def forward(self, x):
        return super().forward(torch.where(x == -999, 0.0, x))


@right
def a_mark_that_the_model_knows():
    return fitting(TensorDataset(with_gaps(-999.0), classes()), Fills(*net()), F.cross_entropy)


@right
def gaps_that_are_zero():
    return classifying(TensorDataset(with_gaps(0.0), classes()))


@right
def numbers_with_outliers():
    torch.manual_seed(6)
    return classifying(TensorDataset(torch.randn(64, 4).pow(5), classes()))


# Outputs


def prices(n=64):
    torch.manual_seed(7)
    x = torch.randn(n, 4)
    return x, 350_000 + 80_000 * x[:, :1]


def own_square(preds, y):
    return ((preds - y) ** 2).mean()


class Shifted(nn.Sequential):
    "Begins where the targets are"

    def forward(self, x):
        return 350_000 + 80_000 * super().forward(x)


for _loss in (F.mse_loss, nn.L1Loss(), own_square):
    planted.append(
        (lambda loss=_loss: fitting(TensorDataset(*prices()), net(4, 1), loss), ("large_targets",))
    )
right.append(lambda: fitting(TensorDataset(*prices()), Shifted(*net(4, 1)), F.mse_loss))


def standard(x, y):
    return TensorDataset(x, (y - y.mean()) / y.std())


right.append(lambda: fitting(standard(*prices()), net(4, 1), own_square))


class Clamped(nn.Sequential):
    def forward(self, x):
        return super().forward(x).clamp(min=0)


def yes_or_no(n=64):
    torch.manual_seed(8)
    x = torch.randn(n, 4)
    return TensorDataset(3 * x, (x[:, :1] > 0).float())


BCE = F.binary_cross_entropy_with_logits


@planted("relu_on_logits")
def a_relu_at_the_end():
    return fitting(uniform(), nn.Sequential(*net(), nn.ReLU()), nn.CrossEntropyLoss())


@planted("relu_on_logits")
def logits_that_are_clamped():
    return fitting(yes_or_no(), Clamped(*net(4, 1)), BCE)


@right
def logits_within_bounds():
    class Bounded(nn.Sequential):
        def forward(self, x):
            return super().forward(x).clamp(-5, 5)

    return fitting(yes_or_no(), Bounded(*net(4, 1)), BCE)


@planted("no_activation")
def two_layers_in_a_row():
    return fitting(
        uniform(), nn.Sequential(nn.Linear(4, 16), nn.Dropout(), nn.Linear(16, 3)), F.cross_entropy
    )


@planted("no_activation")
def layers_and_norms_and_a_sigmoid():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)

        def forward(self, x):
            return self.b(self.norm(self.a(x))).sigmoid()

    return fitting(yes_or_no(), Net(), F.binary_cross_entropy)


@right
def a_matrix_of_low_rank():
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 8))
    return fitting(data, nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8)), F.mse_loss)


@right
def one_layer_and_another_beside_it():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)

        def forward(self, x):
            return self.a(x) + self.b(x.flip(1))

    return fitting(uniform(), Wide(), F.cross_entropy)


@right
def a_product_of_two_layers():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.a(x) * self.b(x))

    return fitting(uniform(), Gated(), F.cross_entropy)


class Share:
    "A metric of one's own"

    def __init__(self, of=lambda x: x > 0.5):
        self.of = of

    def reset(self):
        self.right = []

    def update(self, preds, y):
        self.right.append((self.of(preds).float() == y).float().mean())

    def compute(self):
        return torch.stack(self.right).mean()


def measuring(metric):
    data = DataLoaders(DataLoader(yes_or_no(), 16, shuffle=True), DataLoader(yes_or_no(48), 16))
    return fitting(data, net(4, 1), BCE, MetricsCB(accuracy=metric, show=False))


class Counts:
    def after_batch(self, trainer):
        self.n = int(trainer.preds.squeeze(1).ge(0.5).sum())


class Scores(nn.Sequential):
    "A loss of one's own that measures on its way"

    def forward(self, preds, y):
        self.share = (torch.round(preds) == y).float().mean()
        return BCE(preds, y)


def found_as_limit(make):
    return "threshold_of_logits" in found_in(make(), batches=3)


def test_limits_of_probabilities():
    wrong = [
        lambda: measuring(Share()),
        lambda: fitting(yes_or_no(), net(4, 1), BCE, Counts()),
        lambda: fitting(yes_or_no(), net(4, 1), Scores()),
    ]
    fine = [
        lambda: measuring(Share(lambda x: x.sigmoid() > 0.5)),
        lambda: measuring(Share(lambda x: x > 0)),
        lambda: measuring(BinaryAccuracyOfLogits()),
    ]
    assert [found_as_limit(make) for make in (*wrong, *fine)] == [True] * 3 + [False] * 3


class BinaryAccuracyOfLogits:
    def __init__(self):
        self.inner = BinaryAccuracy()

    def reset(self):
        self.inner.reset()

    def update(self, preds, y):
        self.inner.update(preds[:, 0].sigmoid(), y[:, 0])

    def compute(self):
        return self.inner.compute()


# Weights of classes


def uneven():
    torch.manual_seed(9)
    y = torch.tensor([0] * 4 + [1] * 40 + [2] * 12 + [3] * 8)
    return torch.randn(64, 4), y[torch.randperm(64)]


def most_common(y):
    return torch.tensor([len(y) / n for _, n in Counter(y.tolist()).most_common()])


def roots(y):
    return torch.bincount(y).sort(descending=True).values.float().rsqrt()


def by_number(y):
    return len(y) / torch.bincount(y).float()


def weighing(weights, data=TensorDataset):
    x, y = uneven()
    return fitting(data(x, y), net(4, 4), nn.CrossEntropyLoss(weights(y)))


for _weights in (most_common, roots):
    planted.append((lambda weights=_weights: weighing(weights), ("weights_misplaced",)))
planted.append((lambda: weighing(most_common, Rows), ("weights_misplaced",)))
right.append(lambda: weighing(by_number))
right.append(lambda: weighing(lambda y: torch.bincount(y).float().rsqrt(), Rows))


# Skips that are changed in place


class Block(nn.Module):
    def __init__(self, inplace=True):
        super().__init__()
        self.act, self.conv = nn.ReLU(inplace=inplace), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.conv(self.act(x))


class Named(Block):
    def forward(self, x):
        identity = x
        x = F.relu(x, inplace=True)
        x = self.conv(x)
        x += identity
        return x


class Branched(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x):
        return x + self.branch(x)


class Later(Block):
    def forward(self, x):
        out = self.conv(x.relu_())
        return out + x


class Behind(Block):
    "As in most residual blocks"

    def forward(self, x):
        identity = x
        out = self.act(self.conv(x))
        out = self.conv(out)
        out += identity
        return self.act(out)


class SetAnew(Block):
    def forward(self, x):
        x = self.act(x)
        return x + self.conv(x)


class EitherWay(Block):
    def forward(self, x):
        if x.shape[0] > 1_000:
            return self.act(x)
        return x + self.conv(x).sigmoid()


def of_blocks(block):
    return fitting(uniform(), nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 3)), F.cross_entropy)


for _block in (Block, Named, Branched, Later):
    planted.append((lambda block=_block: of_blocks(block()), ("skip_changed",)))
for _block in (Behind, SetAnew, EitherWay):
    right.append(lambda block=_block: of_blocks(block()))
right.append(lambda: of_blocks(Block(inplace=False)))


@pytest.mark.parametrize("make, names", planted, ids=lambda o: getattr(o, "__name__", " "))
def test_a_mistake_is_found_by_name(make, names):
    assert {*names} == {*found_in(make(), batches=3)}


@pytest.mark.parametrize("make", right, ids=lambda o: o.__name__)
def test_what_is_like_it_and_right_is_left_alone(make):
    assert found_in(make(), batches=3) == []
