"""Models that mix rows or remember batches, and one thing where two were meant, beside what is right.

Each planted one is found by name when some batches are run; in the right ones nothing is found.
"""

import copy

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from isaac_loop import CancelBatchException, Trainer, with_cbs
from isaac_loop.callbacks import BasicTrainCB, MetricsCB, OneCycleSchedulerCB
from isaac_loop.data import DataLoaders
from marked import Marked, Planted
from working import found_in

planted, right = Planted(), Marked()


def loaders(*tensors, n_inp=1, shuffle=True, n=48):
    torch.manual_seed(len(tensors))
    data = [TensorDataset(*(make(n) for make in tensors)) for _ in range(2)]
    return DataLoaders(DataLoader(data[0], 8, shuffle=shuffle), DataLoader(data[1], 8), n_inp=n_inp)


def series(n):
    return torch.randn(n, 7, 2)


def classes(n):
    return torch.arange(n) % 3


def lengths(n):
    return 2 + torch.randperm(n) % 6


def rows(n):
    return torch.randn(n, 4)


def fitting(model, dls, *cbs, opt_func=optim.Adam, loss_func=F.cross_entropy):
    return Trainer(dls, loss_func, opt_func, model, [BasicTrainCB(), *cbs])


class Reader(nn.Module):
    "Reads series; `last` says what goes into the head"

    def __init__(self, batch_first=True, both=False, last=lambda y, h: y[:, -1]):
        super().__init__()
        self.rnn = nn.GRU(2, 5, batch_first=batch_first, bidirectional=both)
        self.head, self.last = nn.Linear(10 if both else 5, 3), last

    def forward(self, x):
        return self.head(self.last(*self.rnn(x)))


@planted("rows_mixed")
def time_comes_first():
    return fitting(Reader(batch_first=False), loaders(series, classes))


@planted("rows_mixed")
def a_view_of_two_directions():
    return fitting(Reader(both=True, last=lambda y, h: h.view(len(y), -1)), loaders(series, classes))


@right
def two_directions_side_by_side():
    return fitting(Reader(both=True, last=lambda y, h: torch.cat([h[0], h[1]], 1)), loaders(series, classes))


class Pool(nn.Module):
    "Weighs places of a series by a softmax"

    def __init__(self, dim):
        super().__init__()
        self.score, self.head, self.dim = nn.Linear(2, 1), nn.Linear(2, 3), dim

    def forward(self, x):
        return self.head((x * self.score(x).softmax(self.dim)).sum(1))


@planted("rows_mixed")
def weights_over_the_batch():
    return fitting(Pool(0), loaders(series, classes))


@right
def weights_over_places():
    return fitting(Pool(1), loaders(series, classes))


@planted("rows_mixed")
def unit_columns():
    model = nn.Linear(4, 3)
    model.register_forward_hook(lambda m, args, y: F.normalize(y, dim=0))
    return fitting(model, loaders(rows, classes))


class Packed(nn.Module):
    "Sorts rows by length, and puts them back if it is told to"

    def __init__(self, back):
        super().__init__()
        self.rnn, self.head, self.back = nn.GRU(2, 5, batch_first=True), nn.Linear(5, 3), back

    def forward(self, x, n):
        n, order = n.sort(descending=True)
        _, h = self.rnn(pack_padded_sequence(x[order], n, batch_first=True))
        return self.head(h[-1][order.argsort()] if self.back else h[-1])


@planted("rows_mixed")
def rows_that_stay_sorted():
    return fitting(Packed(back=False), loaders(series, lengths, classes, n_inp=2))


@right
def rows_that_are_put_back():
    return fitting(Packed(back=True), loaders(series, lengths, classes, n_inp=2))


class Tagger(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(9, 4), nn.GRU(4, 3, batch_first=batch_first)

    def forward(self, x):
        return self.rnn(self.embed(x))[0].transpose(1, 2)


def words(n):
    return torch.randint(9, (n, 6))


def tags(n):
    return torch.randint(3, (n, 6))


@planted("rows_mixed")
def a_tagger_that_reads_across():
    return fitting(Tagger(batch_first=False), loaders(words, tags))


@right
def a_tagger_that_reads_along():
    return fitting(Tagger(batch_first=True), loaders(words, tags))


class Graph(nn.Module):
    "Nodes see those beside them"

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x, beside):
        return self.head(beside @ x)


@right
def nodes_of_a_graph():
    return fitting(Graph(), loaders(rows, lambda n: torch.rand(n, 8), classes, n_inp=2, n=8))


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head, self.state = nn.GRU(2, 5, batch_first=True), nn.Linear(5, 3), None

    def forward(self, x):
        y, h = self.rnn(x, self.state)
        self.state = h.detach()
        return self.head(y[:, -1])


class Noisy(Reader):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


@planted("carries_over")
def a_state_over_shuffled_rows():
    return fitting(Stateful(), loaders(series, classes))


@right
def a_state_over_rows_in_order():
    return fitting(Stateful(), loaders(series, classes, shuffle=False))


@right
def noise_in_evaluation_too():
    return fitting(Noisy(), loaders(series, classes))


class Target:
    "Keeps a second model"

    def __init__(self, name, second):
        self.name_of_second, self.second = name, second

    def before_fit(self, trainer):
        setattr(self, self.name_of_second, self.second(trainer.model))


def keeps(name, second):
    return fitting(nn.Linear(4, 3), loaders(rows, classes), Target(name, second))


@planted("same_model")
def a_target_that_is_the_model():
    return keeps("target_net", lambda model: model)


@planted("kept_alias")
def a_teacher_that_is_the_model():
    return keeps("_teacher", lambda model: model)


@planted("same_model")
def a_teacher_that_is_the_model_and_no_source_tells():
    return keeps("_teacher", nn.Module.train)  # It returns the model


@right
def a_target_that_is_a_copy():
    return keeps("target_net", copy.deepcopy)


@right
def the_model_at_hand():
    return keeps("net", lambda model: model)


class Online(nn.Module):
    def __init__(self, copied):
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.target_encoder = copy.deepcopy(self.encoder).requires_grad_(False) if copied else self.encoder

    def forward(self, x):
        with torch.no_grad():
            aim = self.target_encoder(x)
        return self.encoder(x) - aim


@planted("same_model")
def a_target_within_the_model():
    return fitting(Online(copied=False), loaders(rows, classes))


@right
def a_copy_within_the_model():
    return fitting(Online(copied=True), loaders(rows, classes))


class Decay:
    def __init__(self, opt=None):
        self.opt, self.schedule = opt, opt and optim.lr_scheduler.ExponentialLR(opt, 0.9)

    def before_fit(self, trainer):
        if self.opt is None:
            self.schedule = optim.lr_scheduler.ExponentialLR(trainer.opt, 0.9)

    def log(self, trainer):
        self.schedule.step()


@planted("other_optimizer")
def a_schedule_of_an_idle_optimizer():
    model = nn.Linear(4, 3)
    return fitting(model, loaders(rows, classes), Decay(optim.Adam(model.parameters())))


@right
def a_schedule_of_the_optimizer():
    return fitting(nn.Linear(4, 3), loaders(rows, classes), Decay())


@right
def a_schedule_of_ones_own_optimizer():
    model = nn.Linear(4, 3)
    trainer = fitting(model, loaders(rows, classes), opt_func=None)
    trainer.opt = optim.Adam(model.parameters())
    trainer.add_callbacks(Decay(trainer.opt))
    return trainer


def two_rates(params, lr):
    first, last = params
    return optim.Adam([dict(params=[first], lr=lr / 10), dict(params=[last], lr=lr)], lr)


class Linear:
    "Lets rates fall, each from where it began if it is told to"

    def __init__(self, each):
        self.each = each

    def before_fit(self, trainer):
        self.base = [group["lr"] for group in trainer.opt.param_groups]

    def after_step(self, trainer):
        left = 1 - trainer.n_updates / (trainer.total_updates + 1)
        for group, base in zip(trainer.opt.param_groups, self.base):
            group["lr"] = (base if self.each else trainer.lr) * left


@planted("one_rate")
def one_rate_for_two_groups():
    return fitting(nn.Linear(4, 3), loaders(rows, classes), Linear(each=False), opt_func=two_rates)


@right
def a_factor_for_two_groups():
    return fitting(nn.Linear(4, 3), loaders(rows, classes), Linear(each=True), opt_func=two_rates)


@right
def our_own_schedule_for_two_groups():
    return fitting(nn.Linear(4, 3), loaders(rows, classes), OneCycleSchedulerCB(), opt_func=two_rates)


@right
def one_rate_where_there_was_one():
    return fitting(nn.Linear(4, 3), loaders(rows, classes), Linear(each=False))


def buffer_of(copied):
    torch.manual_seed(0)
    state, kept = torch.zeros(4), []
    for _ in range(48):
        state += torch.randn(4)
        kept.append((state.clone() if copied else state, len(kept) % 3))
    return DataLoaders(DataLoader(kept, 8, shuffle=True))


@planted("same_rows")
def one_tensor_in_all_rows():
    return fitting(nn.Linear(4, 3), buffer_of(copied=False))


@right
def a_copy_in_each_row():
    return fitting(nn.Linear(4, 3), buffer_of(copied=True))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x):
        return self.a(x), self.b(x)


def balanced(detached):
    def loss_func(preds, y):
        a, b = F.cross_entropy(preds[0], y), preds[1].square().mean()
        factor = b / a
        return a * (factor.detach() if detached else factor) + b

    return loss_func


@planted("zero_gradient")
def a_loss_divided_by_itself():
    torch.manual_seed(0)
    return fitting(Heads(), loaders(rows, classes), loss_func=balanced(detached=False))


@right
def a_loss_divided_by_a_number():
    torch.manual_seed(0)
    return fitting(Heads(), loaders(rows, classes), loss_func=balanced(detached=True))


class Adapter(nn.Module):
    "Begins as nothing: the gradient of the first part is 0 in the first step, and in that alone"

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(2, 3)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@right
def an_adapter_that_begins_at_zero():
    return fitting(Adapter(), loaders(rows, classes))


class Unfreezes:
    "Lets the first weight learn, after a hundred updates; it gives it to the optimizer if it is told to"

    def after_step(self, trainer):
        if trainer.n_updates == 100:
            trainer.model.weight.requires_grad_(True)


class UnfreezesAndAdds(Unfreezes):
    def after_step(self, trainer):
        if trainer.n_updates == 100:
            trainer.model.weight.requires_grad_(True)
            trainer.opt.add_param_group({"params": [trainer.model.weight]})


def frozen_at_first(cb, opt_func):
    model = nn.Linear(4, 3)
    model.weight.requires_grad_(False)
    return fitting(model, loaders(rows, classes), cb, opt_func=opt_func)


def of_those_that_learn(params, lr):
    return optim.SGD([p for p in params if p.requires_grad], lr)


@planted("no_optimizer")
def freed_when_no_optimizer_has_it():
    return frozen_at_first(Unfreezes(), of_those_that_learn)


@right
def freed_when_the_optimizer_has_it():
    return frozen_at_first(Unfreezes(), optim.SGD)


@right
def freed_and_given_to_the_optimizer():
    return frozen_at_first(UnfreezesAndAdds(), of_those_that_learn)


class HeadOptimizer:
    "An optimizer for the last bias alone"

    def before_fit(self, trainer):
        self.opt = optim.SGD([trainer.model.bias], 0.1)

    def after_step(self, trainer):
        self.opt.step()

    def after_zero_grad(self, trainer):
        self.opt.zero_grad()


@planted("shared_weights")
def two_optimizers_with_one_bias():
    def opt_func(params, lr):
        return optim.SGD(params, lr)

    return fitting(nn.Linear(4, 3), loaders(rows, classes), HeadOptimizer(), opt_func=opt_func)


@right
def two_optimizers_with_a_part_each():
    def opt_func(params, lr):
        return optim.SGD(list(params)[:1], lr)

    return fitting(nn.Linear(4, 3), loaders(rows, classes), HeadOptimizer(), opt_func=opt_func)


@right
def an_optimizer_by_hand_and_one_to_come():
    trainer = fitting(nn.Linear(4, 3), loaders(rows, classes), HeadOptimizer(), opt_func=None)
    trainer.opt = optim.SGD([trainer.model.weight], 0.1)
    return trainer


class OwnOptimizer(Trainer):
    "Makes its steps by an optimizer of another name"

    def before_fit(self):
        self.optimizer = optim.Adam(self.model.parameters())

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.loss = F.cross_entropy(self.model(x), y)
        if self.training:
            self.optimizer.zero_grad()
            self.loss.backward()
            self.optimizer.step()


class SeveralOptimizers(OwnOptimizer):
    def before_fit(self):
        self.opts = [optim.Adam([p]) for p in self.model.parameters()]

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.loss = F.cross_entropy(self.model(x), y)
        if self.training:
            for opt in self.opts:
                opt.zero_grad()
            self.loss.backward()
            for opt in self.opts:
                opt.step()


@pytest.mark.parametrize("cls", [OwnOptimizer, SeveralOptimizers])
def test_an_own_batch_may_step_an_optimizer_of_any_name(cls):
    trainer = cls(loaders(rows, classes), None, None, nn.Linear(4, 3), None)
    assert found_in(trainer) == found_in(trainer, batches=3) == []


class Views:
    "Two random views of each row, as where a model is to know them again"

    def __len__(self):
        return 48

    def __getitem__(self, i):
        return i + torch.randn(4), i + torch.randn(4)


@right
def two_random_views():
    data = TwoViews()
    return fitting(nn.Linear(4, 4), DataLoaders(*(DataLoader(data, 8),) * 2), loss_func=F.mse_loss)


class TwoViews(Views, torch.utils.data.Dataset):
    pass


class Averaged:
    "An average of the weights; what batch norms measure comes to it if it is told to"

    def __init__(self, buffers):
        self.buffers = buffers

    def before_fit(self, trainer):
        self.average = copy.deepcopy(trainer.model)


class OfParameters(Averaged):
    def after_step(self, trainer):
        with torch.no_grad():
            for a, p in zip(self.average.parameters(), trainer.model.parameters()):
                a.mul_(0.9).add_(p, alpha=0.1)

    def after_fit(self, trainer):
        trainer.model.load_state_dict(self.average.state_dict())


class OfBuffers(OfParameters):
    def after_epoch(self, trainer):
        for a, b in zip(self.average.buffers(), trainer.model.buffers()):
            a.copy_(b)


@planted("average_without_buffers")
def an_average_of_parameters_put_back_whole():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return fitting(model, loaders(rows, classes), OfParameters(False))


@right
def an_average_of_buffers_too():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return fitting(model, loaders(rows, classes), OfBuffers(True))


class Focal(nn.Module):
    def __init__(self, reduction):
        super().__init__()
        self.ce = nn.CrossEntropyLoss(reduction=reduction)

    def forward(self, preds, y):
        ce = self.ce(preds, y)
        pt = torch.exp(-ce)
        return ((1 - pt) ** 2 * ce).mean()


@planted("mean_too_early")
def a_focal_loss_of_a_mean():
    return fitting(nn.Linear(4, 3), loaders(rows, classes), loss_func=Focal("mean"))


@right
def a_focal_loss_of_each_row():
    return fitting(nn.Linear(4, 3), loaders(rows, classes), loss_func=Focal("none"))


class AttacksWeights:
    "A second gradient at moved weights; they are put back behind the step, or before it"

    def after_backward(self, trainer):
        self.kept = [p.detach().clone() for p in trainer.model.parameters()]
        with torch.no_grad():
            trainer.model.weight.add_(0.1 * trainer.model.weight.grad.sign())
        x, y = trainer.batch
        F.cross_entropy(trainer.model(x), y).backward()

    def put_back(self, trainer):
        with torch.no_grad():
            for p, was in zip(trainer.model.parameters(), self.kept):
                p.copy_(was)


class PutsBackTooLate(AttacksWeights):
    def after_step(self, trainer):
        self.put_back(trainer)


class PutsBackInTime(AttacksWeights):
    def after_backward(self, trainer):
        super().after_backward(trainer)
        self.put_back(trainer)


@planted("never_moved")
def weights_put_back_behind_the_step():
    return fitting(nn.Linear(4, 3), loaders(rows, classes), PutsBackTooLate())


@right
def weights_put_back_before_the_step():
    return fitting(nn.Linear(4, 3), loaders(rows, classes), PutsBackInTime())


class OfParametersAlone(Averaged):
    "An average that is put into the model for validation, by way of a backup"

    def after_step(self, trainer):
        with torch.no_grad():
            for a, p in zip(self.average.parameters(), trainer.model.parameters()):
                a.lerp_(p, 0.1)
            if self.buffers:
                for a, b in zip(self.average.buffers(), trainer.model.buffers()):
                    a.copy_(b)

    def before_epoch(self, trainer):
        self.backup = None if trainer.training else copy.deepcopy(trainer.model.state_dict())
        if self.backup is not None:
            trainer.model.load_state_dict(self.average.state_dict())

    def cleanup_epoch(self, trainer):
        if self.backup is not None:
            trainer.model.load_state_dict(self.backup)


def measured(buffers):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return fitting(model, loaders(rows, classes), OfParametersAlone(buffers))


@planted("average_without_buffers")
def an_average_that_says_nothing_of_buffers():
    return measured(buffers=False)


@right
def an_average_that_copies_buffers():
    return measured(buffers=True)


class Sharpness(Trainer):
    "Two backward passes, the second at moved weights; clears in between if it is told to"

    clears = False

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        self.loss = F.cross_entropy(self.model(x), y)
        if not self.training:
            return
        self.loss.backward()
        moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in self.model.parameters()]
        with torch.no_grad():
            for p, move in zip(self.model.parameters(), moves):
                p.add_(move)
        if self.clears:
            self.opt.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(self.model.parameters(), moves):
                p.sub_(move)
        self.opt.step()
        self.opt.zero_grad()


class SharpnessCleared(Sharpness):
    clears = True


def sharpness(cls):
    return cls(loaders(rows, classes), None, optim.SGD, nn.Linear(4, 3), None)


@planted("gradients_mixed")
def gradients_of_two_places():
    return sharpness(Sharpness)


@right
def gradients_of_one_place():
    return sharpness(SharpnessCleared)


@pytest.mark.parametrize("make, names", planted, ids=lambda o: getattr(o, "__name__", " "))
def test_a_mix_up_is_found_by_name(make, names):
    assert set(names) <= {*found_in(make(), batches=3)}


@pytest.mark.parametrize("make", right, ids=lambda o: o.__name__)
def test_nothing_is_found_where_all_is_right(make):
    trainer = make()
    before = {k: x.clone() for k, x in trainer.model.state_dict().items()}
    assert found_in(trainer, batches=3) == []
    assert all(torch.equal(x, before[k]) for k, x in trainer.model.state_dict().items())


def test_a_trainer_that_was_looked_at_trains_as_before():
    a, b = (fitting(nn.Linear(4, 3), loaders(rows, classes), MetricsCB(show=False)) for _ in range(2))
    b.model.load_state_dict(a.model.state_dict())
    a.check(batches=3)
    for trainer in (a, b):
        torch.manual_seed(3)
        trainer.fit(1)
    assert torch.equal(a.model.weight, b.model.weight)


class OneAfterTheOther(Trainer):
    "Two optimizers, of which the step is told which one it is for"

    def before_fit(self):
        self.opt_d, self.opt_g = (optim.Adam(self.model[name].parameters()) for name in ("d", "g"))

    def step(self):
        self.opt_now.step()

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, _ = self.batch
        fake = self.model["g"](torch.randn_like(x))
        self.opt_now = self.opt_d
        self.opt_d.zero_grad()
        self.loss = F.softplus(-self.model["d"](x)).mean() + F.softplus(self.model["d"](fake.detach())).mean()
        self.loss.backward()
        self.run_callbacks("step")
        self.opt_now = self.opt_g
        self.opt_g.zero_grad()
        self.loss = F.softplus(-self.model["d"](fake)).mean()
        self.loss.backward()
        self.run_callbacks("step")


def test_a_name_may_stand_for_one_optimizer_after_the_other():
    torch.manual_seed(0)
    model = nn.ModuleDict(dict(d=nn.Linear(4, 1), g=nn.Linear(4, 4)))
    dls = DataLoaders(loaders(rows, classes).train)
    assert found_in(OneAfterTheOther(dls, None, None, model, None), batches=3) == []


class Attacks(Trainer):
    "Trains with inputs that were moved along the gradient; clears what that left if it is told to"

    clears = False

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        if self.training:
            x = x.clone().requires_grad_(True)
            F.cross_entropy(self.model(x), y).backward()
            x = (x + 0.1 * x.grad.sign()).detach()
            if self.clears:
                self.opt.zero_grad()
        self.loss = F.cross_entropy(self.model(x), y)
        if self.training:
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()


class AttacksAndClears(Attacks):
    clears = True


def test_an_attack_that_leaves_its_gradients():
    def made(cls):
        return cls(loaders(rows, classes), None, optim.SGD, nn.Linear(4, 3), None)

    assert found_in(made(Attacks), batches=3) == ["gradients_mixed"]
    assert found_in(made(AttacksAndClears), batches=3) == []
