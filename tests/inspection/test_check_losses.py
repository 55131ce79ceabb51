"""Loss functions that are given what they do not want, each beside what is like it and right.

Each planted mistake is found by name when some batches are run, in the ways in which people write it; in the
right ones nothing is found.
"""

import warnings
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from isaac_loop import Trainer, with_cbs
from isaac_loop.callbacks import AccumulationCB, BasicTrainCB, DistributedCB, MetricsCB
from isaac_loop.data import DataLoaders
from isaac_loop.inspection import CheckFailed
from isaac_loop.evaluate.evaluator import EvaluatorCB
from isaac_loop.loop.events import CancelBatchException
from marked import Marked, Planted

planted, right = Planted(), Marked()


def loaders(make, size=16, **options):
    "Loaders of rows that a function makes"
    torch.manual_seed(0)
    train, valid = TensorDataset(*make(96)), TensorDataset(*make(48))
    return DataLoaders(DataLoader(train, size, shuffle=True), DataLoader(valid, size), **options)


def classes(n):
    x = torch.randn(n, 6)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5)


def yes_or_no(n):
    x = torch.randn(n, 6)
    return x, (x[:, :1] > 0).float()


def net(n_out=3, *more, act=nn.ReLU):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), act(), nn.Linear(16, n_out), *more)


def with_loss(loss_func, make=classes, model=None, *cbs, weigh=None, **options):
    "A trainer with such a loss function"
    with_steps = BasicTrainCB() if not any(isinstance(cb, BasicTrainCB) for cb in cbs) else None
    cbs = [cb for cb in (with_steps, *cbs, MetricsCB(weigh=weigh)) if cb is not None]
    return Trainer(loaders(make, **options), loss_func, optim.SGD, model or net(), cbs)


class OwnBatch(Trainer):
    "Goes its own way, with a loss that is a method"

    def before_fit(self):
        self.opt = optim.SGD(self.model.parameters(), self.lr)

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        self.loss = self.own_loss(*self.batch)
        if not self.training:
            return
        self.opt.zero_grad()
        self.loss.backward()
        self.opt.step()


def own_batch(own_loss, make=classes, model=None):
    cls = type("Own", (OwnBatch,), dict(own_loss=own_loss))
    return cls(loaders(make), None, None, model or net(), [])


def in_callback(get_loss, make=classes, model=None, predict=None):
    kind = dict(get_loss=get_loss) | (dict(predict=predict) if predict else {})
    return with_loss(None, make, model, type("OwnCB", (BasicTrainCB,), kind)())


# Probabilities


@planted("softmax_twice")
def softmax_in_a_wrapper():
    criterion = nn.CrossEntropyLoss()
    return with_loss(lambda preds, y: criterion(preds, y), model=net(3, nn.Softmax(1)))


@planted("softmax_twice")
def sigmoid_in_one_batch():
    def own_loss(self, x, y):
        probabilities = torch.sigmoid(self.model(x))
        return F.binary_cross_entropy_with_logits(probabilities.squeeze(1), y[:, 0])

    return own_batch(own_loss, yes_or_no, net(1))


@planted("softmax_twice")
def sigmoid_for_the_loss_of_a_callback():
    def get_loss(self, trainer):
        if not hasattr(self, "criterion"):
            self.criterion = nn.BCEWithLogitsLoss()
        trainer.loss = self.criterion(trainer.preds, trainer.batch[1])

    return in_callback(get_loss, yes_or_no, net(1, nn.Sigmoid()))


@right
def numbers_before_the_softmax():
    def loss_func(preds, y):
        weights = preds.detach().softmax(1).amax(1)
        return (F.cross_entropy(preds, y, reduction="none") * weights).mean()

    return with_loss(loss_func)


@right
def gated():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.net = nn.Linear(6, 3), net()

        def forward(self, x):
            return self.gate(x).sigmoid() * self.net(x)

    return with_loss(lambda preds, y: F.cross_entropy(preds, y), model=Gated())


def own_nll(preds, y):
    return F.nll_loss(preds, y)


@planted("needs_log")
def logits_for_nll():
    def own_loss(self, x, y):
        return own_nll(self.model(5 * x), y)

    return own_batch(own_loss)


@planted("needs_log")
def probabilities_for_a_divergence():
    def own_loss(self, x, y):
        wanted = F.one_hot(y, 3).float() * 0.9 + 0.1 / 3
        return divergence(self.model(x).softmax(1), wanted)

    return own_batch(own_loss)


def divergence(a, b):
    return F.kl_div(a, b, reduction="batchmean")


@right
def logarithms():
    def own_loss(self, x, y):
        logs = self.model(x).log_softmax(1)
        wanted = F.one_hot(y, 3).float() * 0.9 + 0.1 / 3
        return own_nll(logs, y) + divergence(logs, wanted)

    return own_batch(own_loss)


# Targets


def tags(n):
    x = torch.randn(n, 6)
    return x, (x[:, :3] > 0.2).float()


@planted("several_classes")
def tags_as_classes():
    return with_loss(nn.CrossEntropyLoss(label_smoothing=0.1), tags)


@planted("several_classes")
def tags_as_classes_in_one_batch():
    return own_batch(lambda self, x, y: F.cross_entropy(self.model(x), y), tags)


@right
def shares_of_classes():
    def loss_func(preds, y):
        return F.cross_entropy(preds, y / y.sum(1, keepdim=True).clamp(min=1))

    return with_loss(loss_func, tags)


@right
def one_class_in_each_row():
    return with_loss(lambda preds, y: F.cross_entropy(preds, F.one_hot(y, 3).float()))


def rare(n):
    x = torch.randn(n, 6)
    return x, (torch.arange(n) % 10 == 0).long()


COUNTS = torch.tensor([0.9, 0.1])


@planted("weights_turned")
def weights_by_counts():
    return with_loss(nn.CrossEntropyLoss(weight=COUNTS), rare, net(2))


@planted("weights_turned")
def weights_by_counts_for_nll():
    return with_loss(lambda preds, y: F.nll_loss(preds.log_softmax(1), y, COUNTS), rare, net(2))


@planted("weights_turned")
def positive_weight_turned():
    def rare_tag(n):
        x, y = rare(n)
        return x, y.float()[:, None]

    return with_loss(nn.BCEWithLogitsLoss(pos_weight=torch.tensor(1 / 9)), rare_tag, net(1))


@right
def weights_by_inverse_counts():
    weight = 0.5 / COUNTS
    return with_loss(nn.CrossEntropyLoss(weight=weight), rare, net(2), weigh=lambda o: weight[o[1]].sum())


@right
def one_class_left_out():
    loss_func = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0]))
    return with_loss(loss_func, rare, net(2), weigh=lambda batch: (batch[1] == 0).sum())


@right
def classes_alike():
    weight = torch.tensor([2.0, 1.0, 1.0])
    return with_loss(nn.CrossEntropyLoss(weight=weight), weigh=lambda batch: weight[batch[1]].sum())


@planted("unweighed_loss")
def classes_that_weigh_more():
    return with_loss(nn.CrossEntropyLoss(weight=0.5 / COUNTS), rare, net(2))


@planted("unweighed_loss")
def classes_that_weigh_more_in_a_partial():
    return with_loss(partial(F.cross_entropy, weight=torch.tensor([1.0, 2.0, 9.0])))


@planted("unweighed_loss")
def classes_that_weigh_more_in_a_callback():
    def get_loss(self, trainer):
        weight = torch.tensor([1.0, 2.0, 9.0])
        trainer.loss = F.nll_loss(trainer.preds.log_softmax(1), trainer.batch[1], weight)

    return in_callback(get_loss)


def some_unknown(n):
    x, y = classes(n)
    y[torch.rand(n) < 0.4] = -100
    return x, y


def evaluated(loss_func, make, **options):
    "Measured by an evaluator alone, as where epochs say nothing"
    cbs = [BasicTrainCB(), EvaluatorCB(**options)]
    return Trainer(loaders(make), loss_func, optim.SGD, net(), cbs)


@planted("unweighed_loss")
def rows_without_label_for_an_evaluator():
    return evaluated(nn.CrossEntropyLoss(), some_unknown)


@right
def rows_without_label_that_an_evaluator_counts():
    return evaluated(nn.CrossEntropyLoss(), some_unknown, weigh=lambda batch: (batch[1] != -100).sum())


@right
def rows_without_label_and_an_evaluator_without_loss():
    return evaluated(nn.CrossEntropyLoss(), some_unknown, with_loss=False)


@planted("unweighed_loss")
def rows_without_label():
    return with_loss(nn.CrossEntropyLoss(), some_unknown)


@planted("unweighed_loss")
def rows_without_label_in_validation_alone():
    trainer = with_loss(F.cross_entropy)
    trainer.dls.valid = loaders(some_unknown).valid
    return trainer


@right
def rows_without_label_weighed():
    return with_loss(F.cross_entropy, some_unknown, weigh=lambda batch: (batch[1] != -100).sum())


@right
def rows_without_label_summed():
    return with_loss(nn.CrossEntropyLoss(reduction="sum"), some_unknown)


@right
def as_many_rows_without_label_in_each_batch():
    def make(n):
        x, y = classes(n)
        y[::4] = -100
        return x, y

    trainer = with_loss(F.cross_entropy, make)
    trainer.dls.train = DataLoader(trainer.dls.train.dataset, 16)
    return trainer


@right
def no_label_that_is_ignored():
    return with_loss(nn.CrossEntropyLoss(ignore_index=7), size=20)


@right
def classes_that_weigh_twice_as_much_each():
    return with_loss(nn.CrossEntropyLoss(weight=torch.tensor([2.0, 2.0, 2.0])), size=20)


def cut_to_zero(n):
    x, y = yes_or_no(n)
    return x, (y * 0.7).long()


@planted("constant_targets")
def shares_cut_to_numbers():
    return with_loss(lambda preds, y: F.l1_loss(preds, y.float()), cut_to_zero, net(1))


@planted("constant_targets")
def one_class_alone():
    return own_batch(lambda self, x, y: F.cross_entropy(self.model(x), y[:, 0]), cut_to_zero)


@right
def one_in_a_hundred():
    def make(n):
        x, y = cut_to_zero(n)
        y[7] = 1
        return x, y

    options = dict(size=8)  # The few batches do not have it
    trainer = with_loss(lambda preds, y: F.mse_loss(preds, y.float()), make, net(1), **options)
    trainer.dls.train = DataLoader(trainer.dls.train.dataset, 16, sampler=range(10, 96))
    return trainer


@right
def ones_and_zeros_beside():
    "Targets that are made for the loss are none of the data"

    def own_loss(self, x, y):
        ones = torch.ones(len(x), 3)
        return F.mse_loss(self.model(x), ones) + F.mse_loss(-self.model(x), ones)

    return own_batch(own_loss)


# Texts


def text(n, length=8):
    return torch.randint(1, 9, (n, 1)) + torch.randint(0, 3, (n, length)).cumsum(1)


def same_text(n):
    x = text(n) % 20
    return x, x.clone()


def next_text(n):
    x = text(n, 9) % 20
    return x[:, :-1], x[:, 1:].clone()


class Reader(nn.Module):
    "A language model, or one that reads both ways"

    def __init__(self, both=False, shift=False, time_first=False):
        super().__init__()
        torch.manual_seed(1)
        self.emb = nn.Embedding(40, 12)
        self.rnn = nn.GRU(12, 16, batch_first=not time_first, bidirectional=both)
        self.out = nn.Linear(32 if both else 16, 40)
        self.shift, self.time_first = shift, time_first

    def forward(self, x):
        if self.time_first:
            x = x.t()
        x = F.pad(x, (1, -1)) if self.shift else x
        return self.out(self.rnn(self.emb(x))[0])


def of_places(preds, y):
    return F.cross_entropy(preds.transpose(1, 2), y)


def of_flat(preds, y):
    return F.cross_entropy(preds.reshape(-1, preds.shape[-1]), y.reshape(-1))


@planted("not_shifted")
def text_not_shifted():
    return with_loss(of_places, same_text, Reader())


@planted("not_shifted")
def text_not_shifted_flat():
    return own_batch(lambda self, x, y: of_flat(self.model(x), y), same_text, Reader())


@planted("not_shifted")
def tokens_alone():
    def get_loss(self, trainer):
        tokens = trainer.batch[0]
        trainer.loss = F.cross_entropy(trainer.preds.flatten(0, 1), tokens.flatten())

    return in_callback(get_loss, lambda n: (text(n) % 20,), Reader())


@right
def shifted_by_the_data():
    return with_loss(of_places, next_text, Reader())


@right
def shifted_by_the_loss():
    return with_loss(lambda preds, y: of_flat(preds[:, :-1], y[:, 1:]), same_text, Reader())


@right
def shifted_by_the_model():
    return with_loss(of_places, same_text, Reader(shift=True))


@right
def gives_back_what_it_got():
    return with_loss(of_places, same_text, Reader(both=True))


def padded(n):
    x = torch.randint(1, 20, (n, 8))
    x[torch.arange(8) >= torch.randint(3, 9, (n, 1))] = 0
    return x, torch.where(x > 0, x % 4 + 1, 0)


class Tagger(nn.Module):
    def __init__(self, padding_idx=0):
        super().__init__()
        torch.manual_seed(1)
        self.emb, self.out = nn.Embedding(20, 12, padding_idx=padding_idx), nn.Linear(12, 5)

    def forward(self, x):
        return self.out(self.emb(x))


@planted("padding_counts")
def padding_in_a_loss():
    return with_loss(of_flat, padded, Tagger())


@planted("padding_counts")
def padding_in_a_loss_of_places():
    return own_batch(lambda self, x, y: of_places(self.model(x), y), padded, Tagger())


@planted("padding_counts")
def padding_in_a_loss_of_logarithms():
    def loss_func(preds, y):
        return F.nll_loss(preds.log_softmax(-1).flatten(0, 1), y.flatten(), reduction="sum") / len(y)

    return with_loss(loss_func, padded, Tagger())


def words_in(batch):
    return (batch[1] != 0).sum()


@planted("unweighed_loss")
def padding_ignored_and_rows_counted():
    def loss_func(preds, y):
        return F.cross_entropy(preds.transpose(1, 2), y, ignore_index=0)

    return with_loss(loss_func, padded, Tagger())


@right
def padding_ignored():
    def loss_func(preds, y):
        return F.cross_entropy(preds.transpose(1, 2), y, ignore_index=0)

    return with_loss(loss_func, padded, Tagger(), weigh=words_in)


@right
def padding_without_weight():
    def loss_func(preds, y):
        return F.cross_entropy(preds.transpose(1, 2), y, torch.tensor([0.0, 1, 1, 1, 1]))

    return with_loss(loss_func, padded, Tagger(), weigh=words_in)


@right
def padding_masked():
    def loss_func(preds, y):
        losses = F.cross_entropy(preds.transpose(1, 2), y, reduction="none")
        return (losses * (y > 0)).sum() / (y > 0).sum()

    return with_loss(loss_func, padded, Tagger())


@right
def padding_chosen_out():
    return with_loss(lambda preds, y: F.cross_entropy(preds[y > 0], y[y > 0]), padded, Tagger())


@right
def no_padding_but_a_word():
    def words(n):
        x = torch.randint(0, 20, (n, 8))
        return x, x % 5

    return with_loss(of_flat, words, Tagger())


@planted("flattened_apart")
def time_and_rows_apart():
    return with_loss(of_flat, next_text, Reader(time_first=True))


@planted("flattened_apart")
def time_and_rows_apart_in_a_callback():
    def get_loss(self, trainer):
        y = trainer.batch[1].flatten()
        trainer.loss = nn.CrossEntropyLoss()(trainer.preds.flatten(0, 1), y)

    return in_callback(get_loss, next_text, Reader(time_first=True))


@right
def time_first_on_both_sides():
    return with_loss(lambda preds, y: of_flat(preds, y.t()), next_text, Reader(time_first=True))


# Pairs


def two_views(n):
    x = torch.randn(n, 6)
    return x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)


def contrast(self, a, b, mask=None):
    z = F.normalize(torch.cat([self.model(a), self.model(b)]), dim=1)
    similar = z @ z.t() / 0.2
    if mask:
        similar = mask(similar)
    return F.cross_entropy(similar, torch.arange(len(z)).roll(len(a)))


@planted("finds_itself")
def diagonal_left_in():
    return own_batch(contrast, two_views, net(8))


@planted("finds_itself")
def one_side_with_all():
    def own_loss(self, a, b):
        a, b = F.normalize(self.model(a), dim=1), F.normalize(self.model(b), dim=1)
        return nn.CrossEntropyLoss()(a @ torch.cat([a, b]).t() / 0.2, torch.arange(len(a)) + len(a))

    return own_batch(own_loss, two_views, net(8))


@right
def diagonal_taken_out():
    def mask(similar):
        return similar.masked_fill(torch.eye(len(similar), dtype=torch.bool), -1e9)

    return own_batch(lambda self, a, b: contrast(self, a, b, mask), two_views, net(8))


@right
def two_sides():
    def own_loss(self, a, b):
        a, b = F.normalize(self.model(a), dim=1), F.normalize(self.model(b), dim=1)
        return F.cross_entropy(a @ b.t() / 0.2, torch.arange(len(a)))

    return own_batch(own_loss, two_views, net(8))


def steps(n):
    x = torch.randn(n, 6)
    return x, x.roll(1, 1), torch.rand(n)


def td_loss(loss, cut):
    def own_loss(self, s, s2, r):
        target = r + 0.9 * self.model(s2).max(1).values
        return loss(self.model(s)[:, 0], cut(target))

    return own_loss


@planted("target_gradient")
def next_value_with_gradient():
    return own_batch(td_loss(F.smooth_l1_loss, lambda x: x), steps)


@planted("target_gradient")
def next_value_with_gradient_in_a_module():
    return own_batch(td_loss(nn.MSELoss(), lambda x: x), steps)


@planted("target_gradient")
def teacher_that_learns():
    return own_batch(distilled(torch.clone), two_views, TwoNets())


class TwoNets(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = net(act=nn.Tanh), net(act=nn.Tanh)


def distilled(cut):
    return lambda self, a, b: F.mse_loss(self.model.student(a), cut(self.model.teacher(b)))


@right
def next_value_cut_off():
    return own_batch(td_loss(F.smooth_l1_loss, torch.detach), steps)


@right
def two_views_of_one_net():
    return own_batch(lambda self, a, b: F.mse_loss(self.model(a), self.model(b)), two_views)


@right
def a_difference_of_derivatives():
    "A physical law has the model on both sides"

    def own_loss(self, x, y):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            u = self.model(x)
            du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
            return F.mse_loss(du[:, :1], y - u)

    return own_batch(own_loss, yes_or_no, net(1, act=nn.Tanh))


# Numbers from elsewhere


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.out = nn.Linear(2, 8), nn.Linear(2, 8), nn.Linear(8, 3)
        self.attend = attend

    def forward(self, x):
        x = x.view(len(x), 3, 2)
        q, k = self.q(x), self.k(x)
        return self.out(self.attend(q @ k.transpose(1, 2) / 8**0.5, k).mean(1))


@planted("attention_axis")
def softmax_over_queries():
    return with_loss(F.cross_entropy, model=Attention(lambda s, v: F.softmax(s, dim=1) @ v))


@planted("attention_axis")
def softmax_over_queries_of_heads():
    def attend(s, v):
        weights = F.dropout(nn.Softmax(dim=-2)(s.masked_fill(s < -9, -1e9)[:, None]), 0.1, False)
        return torch.matmul(weights, v[:, None])[:, 0]

    return with_loss(F.cross_entropy, model=Attention(attend))


@planted("attention_axis")
def softmax_over_queries_in_a_sum():
    def attend(s, v):
        return torch.einsum("bqk,bkd->bqd", s.softmax(1), v)

    return with_loss(F.cross_entropy, model=Attention(attend))


@right
def softmax_over_keys():
    return with_loss(F.cross_entropy, model=Attention(lambda s, v: s.softmax(-1) @ v))


@right
def keys_first():
    return with_loss(F.cross_entropy, model=Attention(lambda s, v: s.softmax(1).transpose(1, 2) @ v))


@right
def slots():
    "Slots compete for places, and then take the mean of them"

    def attend(s, v):
        weights = s.softmax(dim=1) + 1e-8
        return (weights / weights.sum(-1, keepdim=True)) @ v

    return with_loss(F.cross_entropy, model=Attention(attend))


ALPHA = torch.linspace(0.9, 0.1, 100)


def noisy(factor, like=torch.randn_like):
    def own_loss(self, x):
        t, noise = torch.randint(100, (len(x),)), like(x)
        a = factor(t)
        return F.mse_loss(self.model(a.sqrt() * x + (1 - a).sqrt() * noise), noise)

    return own_batch(own_loss, lambda n: (torch.randn(n, 16),), nn.Linear(16, 16))


@planted("spread_rows")
def factors_along_columns():
    return noisy(lambda t: ALPHA[t])


@planted("spread_rows")
def factors_gathered_along_columns():
    return noisy(lambda t: ALPHA.gather(0, t))


@right
def factors_along_rows():
    return noisy(lambda t: ALPHA[t][:, None])


@right
def columns_in_order():
    order = torch.arange(16)
    return noisy(lambda t: ALPHA[order])


@right
def corrected_pairs():
    "How often each column was drawn is taken from each of its pairs"

    def own_loss(self, x):
        a, rows = self.model(x), torch.randint(100, (len(x),))
        return F.cross_entropy(a @ x.t() - ALPHA[rows].log(), torch.arange(len(x)))

    return own_batch(own_loss, lambda n: (torch.randn(n, 6),), nn.Linear(6, 6))


def sure(greatest):
    def own_loss(self, x, y):
        logits = self.model(x)
        with torch.no_grad():
            confidence, guess = greatest(self.model(x + 0.1)).max(1)
        keep = confidence.ge(0.9).float()
        return F.cross_entropy(logits, y) + (F.cross_entropy(logits, guess, reduction="none") * keep).mean()

    return own_batch(own_loss)


@planted("threshold_of_logits")
def limit_of_logits():
    return sure(lambda x: x)


@planted("threshold_of_logits")
def limit_of_logits_in_a_callback():
    class Sure:
        def before_epoch(self, trainer):
            self.n = 0

        def after_predict(self, trainer):
            self.n += (trainer.preds.detach().amax(dim=1) > 0.8).sum()

    return with_loss(F.cross_entropy, classes, None, Sure())


@right
def limit_of_probabilities():
    return sure(lambda x: x.softmax(1))


@right
def limit_of_similarity():
    weight = F.normalize(torch.randn(4, 3), dim=1)
    return sure(lambda x: F.linear(F.normalize(x, dim=1), weight)[:, :3])


def law(order=1):
    def own_loss(self, x, y):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            u = self.model(x)
            du = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
            if order == 2:
                du = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)[0]
            return (du[:, :1] - y).square().mean() + u.square().mean()

    return own_loss


@planted("zero_derivative")
def second_derivative_of_straight_pieces():
    return own_batch(law(2), yes_or_no, net(1))


@planted("zero_derivative")
def second_derivative_in_a_callback():
    def predict(self, trainer):
        with torch.enable_grad():
            self.x = trainer.batch[0].clone().requires_grad_()
            trainer.preds = trainer.model(self.x)

    def get_loss(self, trainer):
        with torch.enable_grad():
            first = torch.autograd.grad(trainer.preds.sum(), self.x, create_graph=True)[0]
            second = torch.autograd.grad(first.sum(), self.x, create_graph=True)[0]
            trainer.loss = second.square().mean() + trainer.preds.square().mean()

    return in_callback(get_loss, yes_or_no, net(1, act=nn.LeakyReLU), predict)


@right
def first_derivative_of_straight_pieces():
    return own_batch(law(1), yes_or_no, net(1))


@right
def second_derivative_of_a_smooth_model():
    return own_batch(law(2), yes_or_no, net(1, act=nn.Tanh))


def penalty(model, x, create_graph):
    x = x.clone().requires_grad_()
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)[0]
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def critic(create_graph, first=False):
    def own_loss(self, x, y):
        with torch.enable_grad():
            term = 10 * penalty(self.model, x, create_graph)
            distance = self.model(torch.randn_like(x)).mean() - self.model(x).mean()
            if first:
                return term + self.model(torch.randn_like(x)).mean() - self.model(x).mean()
            return distance + term

    return own_batch(own_loss, yes_or_no, net(1))


@planted("constant_term")
def penalty_without_graph():
    return critic(False)


@planted("constant_term")
def penalty_without_graph_before_the_rest():
    return critic(False, first=True)


@right
def penalty_with_graph():
    return critic(True)


def colours(n):
    y = torch.arange(n) % 3
    return torch.rand(n, 6, 6, 3) + F.one_hot(y, 3)[:, None, None], y


class ColourNet(nn.Module):
    def __init__(self, turn):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        self.turn = turn

    def forward(self, x):
        return self.net(self.turn(x))


@planted("view_for_transpose")
def colours_renamed():
    return with_loss(F.cross_entropy, colours, ColourNet(lambda x: x.view(len(x), 3, 6, 6)))


@planted("view_for_transpose")
def colours_renamed_in_a_callback():
    class ToImages:
        def before_batch(self, trainer):
            x, y = trainer.batch
            trainer.batch = x.reshape(-1, 3, *x.shape[1:3]), y

    return with_loss(F.cross_entropy, colours, ColourNet(lambda x: x), ToImages())


@right
def colours_exchanged():
    return with_loss(F.cross_entropy, colours, ColourNet(lambda x: x.permute(0, 3, 1, 2)))


@right
def flat_colours():
    def flat(n):
        x, y = colours(n)
        return x.permute(0, 3, 1, 2).flatten(1), y

    return with_loss(F.cross_entropy, flat, ColourNet(lambda x: x.view(-1, 3, 6, 6)))


def seen_in(trainer):
    "All findings of a check that runs batches"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return trainer.check(batches=3)
        except CheckFailed as error:
            return error.findings


@pytest.mark.parametrize("make,names", planted, ids=[make.__name__ for make, _ in planted])
def test_each_mistake_is_found(make, names):
    assert set(names) <= {o.name for o in seen_in(make())}


@pytest.mark.parametrize("make", right, ids=[make.__name__ for make in right])
def test_what_is_right_is_let_alone(make):
    assert [str(o) for o in seen_in(make())] == []


@pytest.mark.parametrize(
    "weigh, others, said",
    [
        (None, [AccumulationCB(2)], "AccumulationCB` weighs gradients by rows likewise"),
        (None, [DistributedCB()], "DistributedCB` weighs the gradients of several processes so"),
        (None, [], None),
        ("told", [AccumulationCB(2)], "`AccumulationCB` weighs the gradients of a batch by its rows"),
        ("told", [AccumulationCB(2, weigh=lambda batch: (batch[1] != -100).sum())], None),
    ],
)
def test_gradients_that_are_weighed_by_rows_are_told_of(weigh, others, said):
    "Beside the history, or alone"
    weigh = None if weigh is None else lambda batch: (batch[1] != -100).sum()
    trainer = with_loss(nn.CrossEntropyLoss(), some_unknown, weigh=weigh)
    trainer.add_callbacks(others)
    found = [str(o) for o in seen_in(trainer) if o.name == "unweighed_loss"]
    assert len(found) == (weigh is None or said is not None)
    assert ("gradients" in "".join(found)) == (said is not None) and (said or "") in "".join(found)


def test_a_loss_of_weights_is_warned_of_and_weighed_right_as_the_warning_says():
    weight = torch.tensor([1.0, 2.0, 9.0])
    trainer = with_loss(nn.CrossEntropyLoss(weight))
    with pytest.warns(UserWarning, match=r"divides by the weights.*weigh=lambda batch: weight\[batch\[1\]\]"):
        [finding] = trainer.check(batches=3)
    assert finding.name == "unweighed_loss" and not finding.spoils
    assert trainer.check(batches=3, ignore="unweighed_loss") == []
    x, y = trainer.dls.valid.dataset.tensors
    whole = F.cross_entropy(trainer.model(x), y, weight).item()
    for weigh, is_right in ((None, False), (lambda batch: weight[batch[1]].sum(), True)):
        trainer.MetricsCB.weigh = weigh
        trainer.fit(1, train=False)
        assert (abs(trainer.history.latest("valid_loss") - whole) < 1e-5) == is_right


def test_a_loss_of_weights_is_none_of_a_loop_without_a_history_of_losses():
    trainer = with_loss(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 9.0])))
    trainer.remove_callbacks(trainer.MetricsCB)
    assert trainer.check(batches=3) == []
