"""Tokens, states, heads, graphs, likelihoods and ties that are mixed up, beside what is right.

Each planted one is found by name when some batches are run; in the right ones nothing is found.
"""

import math

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from isaac_loop import CancelBatchException, Trainer, with_cbs
from isaac_loop.callbacks import BasicTrainCB, MetricsCB
from isaac_loop.data import DataLoaders
from marked import Marked, Planted
from working import found_in

planted, right = Planted(), Marked()


def loaders(*tensors, n_inp=1, shuffle=True):
    data = TensorDataset(*tensors)
    return DataLoaders(DataLoader(data, 16, shuffle=shuffle), DataLoader(data, 16), n_inp=n_inp)


def fitting(model, dls, loss_func=F.cross_entropy, *cbs):
    return Trainer(dls, loss_func, optim.Adam, model, [BasicTrainCB(), *cbs])


def rows(*shape):
    return torch.randn(96, *shape)


def ids(n, *shape, least=0):
    return torch.randint(least, n, (96, *shape))


class Part(nn.Module):
    "A layer of whose answer something else is made"

    def __init__(self, layer, makes):
        super().__init__()
        self.layer, self.makes = layer, makes

    def forward(self, *inputs):
        return self.makes(self.layer(inputs[0]), *inputs[1:])


class Columns(nn.Module):
    "An embedding for each column of a table"

    def __init__(self, padding):
        super().__init__()
        self.parts = nn.ModuleList([nn.Embedding(6, 3, padding_idx=padding) for _ in range(2)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.cat([part(x[:, i]) for i, part in enumerate(self.parts)], 1))


@planted("id_as_padding", "id_as_padding")
def categories_with_padding():
    return fitting(Columns(0), loaders(ids(6, 2), ids(3)))


@planted("id_as_padding")
def words_that_are_rows():
    return fitting(nn.Embedding(6, 3, padding_idx=5), loaders(ids(6), ids(3)))


@right
def categories_without_padding():
    return fitting(Columns(None), loaders(ids(6, 2), ids(3)))


@right
def texts_with_padding():
    bag = Part(nn.Embedding(6, 3, padding_idx=0), lambda x: x.mean(1))
    return fitting(bag, loaders(ids(6, 7), ids(3)))


class Steps(nn.Module):
    "Reads texts step by step"

    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(6, 3, padding_idx=0), nn.GRUCell(3, 3)

    def forward(self, x):
        state = torch.zeros(len(x), 3)
        for i in range(x.shape[1]):
            state = self.cell(self.embed(x[:, i]), state)
        return state


@right
def texts_step_by_step():
    return fitting(Steps(), loaders(ids(6, 7), ids(3)))


class Masks:
    "Masks tokens, before or after their labels are made"

    on_valid = False

    def __init__(self, copies, keeps=False):
        self.copies, self.keeps = copies, keeps

    def before_batch(self, trainer):
        x = trainer.batch[0].clone()
        labels = x.clone() if self.copies else x
        masked = torch.rand(x.shape) < 0.3
        x[masked] = 0
        if self.keeps:
            noise = masked & (torch.rand(x.shape) < 0.3)
            x[noise] = torch.randint(1, 9, (int(noise.sum()),))
        labels[~masked] = -100 if self.copies else labels[~masked]
        trainer.batch = x, labels if self.copies else torch.where(masked, labels, -100)


def of_places(preds, y):
    return F.cross_entropy(preds.flatten(0, 1), y.flatten())


def of_masked(preds, y):
    counts = y != -100
    return F.cross_entropy(preds[counts], y[counts])


@planted("labels_not_cloned")
def labels_that_are_masked():
    return fitting(nn.Embedding(9, 9), loaders(ids(9, 8, least=1), ids(9, 8)), of_places, Masks(False))


@planted("labels_not_cloned")
def labels_of_masked_places_alone():
    return fitting(nn.Embedding(9, 9), loaders(ids(9, 8, least=1), ids(9, 8)), of_masked, Masks(False))


@planted("labels_not_cloned")
def labels_of_some_other_tokens():
    dls = loaders(ids(9, 8, least=1), ids(9, 8))
    return fitting(nn.Embedding(9, 9), dls, of_places, Masks(False, keeps=True))


@right
def labels_that_are_copies():
    dls = loaders(ids(9, 8, least=1), ids(9, 8))
    return fitting(nn.Embedding(9, 9), dls, of_places, Masks(True, keeps=True))


def spelling(lengths, flat=False, **options):
    loss = nn.CTCLoss(zero_infinity=True, **options)

    def ctc(preds, y):
        n, t, _ = preds.shape
        targets = torch.cat([row[: lengths(y)] for row in y]) if flat else y
        sizes = torch.full((n,), t), torch.full((n,), lengths(y))
        return loss(preds.transpose(0, 1).log_softmax(2), targets, *sizes)

    return ctc


@planted("blank_in_targets")
def letters_from_zero():
    return fitting(nn.Linear(4, 6), loaders(rows(9, 4), ids(6, 3)), spelling(lambda y: 3))


@planted("blank_in_targets")
def letters_in_one_row():
    return fitting(nn.Linear(4, 6), loaders(rows(9, 4), ids(6, 3)), spelling(lambda y: 2, True, blank=5))


@right
def letters_behind_the_blank():
    letters = ids(6, 3, least=1)
    letters[:, 2] = 0  # Padding
    return fitting(nn.Linear(4, 6), loaders(rows(9, 4), letters), spelling(lambda y: 2))


@right
def letters_before_the_blank():
    return fitting(nn.Linear(4, 6), loaders(rows(9, 4), ids(5, 3)), spelling(lambda y: 3, blank=5))


class OnwardTrainer(Trainer):
    "Goes on with the state of the batch before"

    state, anew = None, False

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, y = self.batch
        state = None if self.anew else self.state
        out, state = self.model.rnn(x, state)
        self.state = tuple(o.detach() for o in state)
        self.loss = F.cross_entropy(self.model.head(out[:, -1]), y)
        if self.training:
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()


class AnewTrainer(OnwardTrainer):
    anew = True


def reader():
    return nn.ModuleDict(dict(rnn=nn.LSTM(2, 4, batch_first=True), head=nn.Linear(4, 3)))


@planted("state_carried")
def a_state_of_other_rows():
    return OnwardTrainer(loaders(rows(5, 2), ids(3)), None, optim.Adam, reader(), None)


@right
def a_state_of_the_same_rows():
    return OnwardTrainer(loaders(rows(5, 2), ids(3), shuffle=False), None, optim.Adam, reader(), None)


@right
def no_state():
    return AnewTrainer(loaders(rows(5, 2), ids(3)), None, optim.Adam, reader(), None)


class Learnt(nn.Module):
    "Begins with a state that is learnt"

    def __init__(self):
        super().__init__()
        self.first, self.rnn = nn.Parameter(torch.randn(1, 1, 3)), nn.GRU(2, 3, batch_first=True)

    def forward(self, x):
        return self.rnn(x, self.first.expand(1, len(x), 3).contiguous())[1][0]


@right
def a_state_that_is_learnt():
    return fitting(Learnt(), loaders(rows(5, 2), ids(3)))


def into_heads(x):
    return x.reshape(len(x), 4, 6, 2).mean((1, 2))


def from_heads(x):
    heads = x.view(len(x), 6, 4, 2).transpose(1, 2).contiguous()
    return heads.view(len(x), 6, 8).mean(1)


def there_and_back(x):
    heads = x.view(len(x), 6, 4, 2).transpose(1, 2)
    return heads.transpose(1, 2).reshape(len(x), 6, 8).mean(1)


@planted("heads_mixed")
def heads_by_a_view():
    return fitting(Part(nn.Linear(2, 8), into_heads), loaders(rows(6, 2), ids(2)))


@planted("heads_mixed")
def heads_joined_by_a_view():
    return fitting(Part(nn.Linear(2, 8), from_heads), loaders(rows(6, 2), ids(2)))


@right
def heads_that_change_places():
    return fitting(Part(nn.Linear(2, 8), there_and_back), loaders(rows(6, 2), ids(2)))


def graphs(offset):
    "Batches of six rings of three to five nodes"
    for _ in range(3):
        sizes, starts, start = [3, 4, 5, 3, 4, 5], [], 0
        for size in sizes:
            starts.append(start * offset)
            start += size
        ends = [torch.arange(size) for size in sizes]
        edges = [torch.stack([o, (o + 1) % len(o)]) + begin for o, begin in zip(ends, starts)]
        of_node = torch.arange(6).repeat_interleave(torch.tensor(sizes))
        yield torch.randn(start, 4), torch.cat(edges, 1), of_node, torch.randint(2, (6,))


class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.node, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x, edges, of_node):
        x = self.node(x)
        x = x.index_add(0, edges[1], x[edges[0]])
        return self.head(x.new_zeros(6, 5).index_add(0, of_node, x))


@planted("edges_not_offset")
def edges_of_the_first_graph():
    return fitting(Messages(), DataLoaders(list(graphs(0)), n_inp=3))


@right
def edges_of_each_graph():
    return fitting(Messages(), DataLoaders(list(graphs(1)), n_inp=3))


counts = torch.poisson(torch.full((96, 1), 2.0))


@planted("rate_as_log")
def rates_as_logarithms():
    model = nn.Sequential(nn.Linear(4, 1), nn.Softplus())
    return fitting(model, loaders(rows(4), counts), nn.PoissonNLLLoss())


@planted("rate_as_log")
def exponentials_as_logarithms():
    model = Part(nn.Linear(4, 1), lambda x: x.clamp(max=5).exp() + 1e-3)
    return fitting(model, loaders(rows(4), counts), lambda x, y: F.poisson_nll_loss(x, y, full=True))


@right
def rates_as_rates():
    model = nn.Sequential(nn.Linear(4, 1), nn.Softplus())
    return fitting(model, loaders(rows(4), counts), nn.PoissonNLLLoss(log_input=False))


@right
def logarithms_of_rates():
    return fitting(nn.Linear(4, 1), loaders(rows(4), counts), nn.PoissonNLLLoss())


class Spread(nn.Module):
    "A likelihood of normal errors"

    def __init__(self, squares):
        super().__init__()
        self.nll, self.squares = nn.GaussianNLLLoss(), squares

    def forward(self, preds, y):
        sigma = F.softplus(preds[:, 1:])
        if self.squares:
            return self.nll(preds[:, :1], y, sigma.square())
        return self.nll(preds[:, :1], y, sigma)


def by_name(preds, y):
    mean, log_std = preds.chunk(2, 1)
    return F.gaussian_nll_loss(mean, y, var=log_std.exp())


def of_log_variance(preds, y):
    mean, log_var = preds.chunk(2, 1)
    return F.gaussian_nll_loss(mean, y, log_var.exp())


def squared_under_the_old_name(preds, y):
    mean, std = preds[:, :1], preds[:, 1:].exp()
    std = std**2
    return F.gaussian_nll_loss(mean, y, std)


@planted("std_as_variance")
def a_softplus_as_variance():
    return fitting(nn.Linear(4, 2), loaders(rows(4), rows(1)), Spread(False))


@planted("std_as_variance")
def a_spread_as_variance():
    return fitting(nn.Linear(4, 2), loaders(rows(4), rows(1)), by_name)


@right
def a_square():
    return fitting(nn.Linear(4, 2), loaders(rows(4), rows(1)), Spread(True))


@right
def a_variance():
    return fitting(nn.Linear(4, 2), loaders(rows(4), rows(1)), of_log_variance)


@right
def a_square_under_the_old_name():
    return fitting(nn.Linear(4, 2), loaders(rows(4), rows(1)), squared_under_the_old_name)


class Sample(nn.Linear):
    "Draws from a normal distribution"

    half = 1.0

    def forward(self, x):
        mean, log_var = super().forward(x).chunk(2, 1)
        var = (self.half * log_var).exp()
        return self.drawn(mean, var, log_var)

    def drawn(self, mean, var, log_var):
        return torch.distributions.Normal(mean, scale=torch.exp(log_var)).rsample()


class SampleByRoot(Sample):
    def drawn(self, mean, var, log_var):
        return torch.distributions.Normal(mean, var.sqrt()).rsample()


class SampleOfRoots(Sample):
    def drawn(self, mean, var, log_var):
        var = (0.5 * log_var).exp()
        return torch.distributions.Normal(mean, var).rsample()


@planted("variance_as_std")
def a_variance_as_spread():
    return fitting(Sample(4, 6), loaders(rows(4), ids(3)))


@right
def a_root_as_spread():
    return fitting(SampleByRoot(4, 6), loaders(rows(4), ids(3)))


@right
def a_root_called_var():
    return fitting(SampleOfRoots(4, 6), loaders(rows(4), ids(3)))


def distances(preds):
    a, b, c = preds.chunk(3, 1)
    return F.pairwise_distance(a, b), (a - c).pow(2).sum(1)


def rank(turned=1, scores=False):
    def good_first(preds, y):
        d_pos, d_neg = distances(preds)
        if scores:
            d_pos, d_neg = -d_pos, -d_neg
        return F.margin_ranking_loss(d_pos, d_neg, turned * torch.ones_like(d_pos), margin=1.0)

    return good_first


def bad_first(preds, y):
    positive, negative = distances(preds)
    return nn.MarginRankingLoss(0.2)(negative, positive, target=torch.ones_like(positive))


def bad_first_turned(preds, y):
    positive, negative = distances(preds)
    return nn.MarginRankingLoss(0.2)(negative, positive, target=-torch.ones_like(positive))


def triplets(preds, y):
    dist_ap, dist_an = distances(preds)
    return (0.3 + dist_an - dist_ap).clamp(min=0).mean()


def triplets_right(preds, y):
    dist_ap, dist_an = distances(preds)
    return (0.3 + dist_ap - dist_an).clamp(min=0).mean()


for loss in rank(1), bad_first_turned, triplets:
    planted("ranking_turned")(lambda loss=loss: fitting(nn.Linear(4, 9), loaders(rows(4), ids(3)), loss))

for loss in rank(-1), rank(1, scores=True), bad_first, triplets_right:
    right(lambda loss=loss: fitting(nn.Linear(4, 9), loaders(rows(4), ids(3)), loss))


def contrast(factor, twice=False):
    def of_pairs(preds, y):
        a, b = (F.normalize(o, dim=-1) for o in preds.chunk(2, 1))
        if not twice:
            return F.cross_entropy(a @ b.t() * factor, torch.arange(len(a)))
        z, n = torch.cat([a, b]), len(a)
        sim = (F.cosine_similarity(z[:, None], z[None], dim=-1) * factor).fill_diagonal_(-torch.inf)
        return F.cross_entropy(sim, (torch.arange(2 * n) + n) % (2 * n))

    return of_pairs


class Clip(nn.Module):
    "Cosines with a scale that is learnt"

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 6), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        a, b = (F.normalize(o, dim=1) for o in self.layer(x).chunk(2, 1))
        return a @ b.T * self.scale.exp()


def of_diagonal(preds, y):
    return F.cross_entropy(preds, torch.arange(len(preds)))


for loss in contrast(0.07), contrast(1.0, twice=True):
    planted("flat_similarities")(lambda loss=loss: fitting(nn.Linear(4, 6), loaders(rows(4), ids(3)), loss))

for loss in contrast(1 / 0.07), contrast(10.0, twice=True):
    right(lambda loss=loss: fitting(nn.Linear(4, 6), loaders(rows(4), ids(3)), loss))


@right
def a_scale_that_is_learnt():
    return fitting(Clip(), loaders(rows(4), ids(3)), of_diagonal)


def cox(order, gather=lambda x: x.logcumsumexp(0)):
    def loss(preds, time, event):
        chosen = order(time)
        risk = preds[chosen, 0]
        return -((risk - gather(risk)) * event[chosen]).mean()

    return loss


def in_steps(risk):
    return risk.exp().cumsum(0).log()


def from_the_end(risk):
    return risk.flip(0).logcumsumexp(0).flip(0)


def survival():
    return loaders(rows(4), torch.rand(96), ids(2).float())


def latest_last(time):
    return time.sort().indices


for loss in cox(torch.argsort), cox(latest_last, in_steps), cox(lambda t: (-t).argsort(descending=True)):
    planted("risk_turned")(lambda loss=loss: fitting(nn.Linear(4, 1), survival(), loss))

for loss in cox(lambda t: t.argsort(descending=True), in_steps), cox(torch.argsort, from_the_end):
    right(lambda loss=loss: fitting(nn.Linear(4, 1), survival(), loss))


def levels(reached, loss=F.binary_cross_entropy_with_logits):
    return lambda preds, y: loss(preds, reached(y[:, None], torch.arange(3)).float())


@planted("level_of_all")
def levels_that_all_reach():
    return fitting(nn.Linear(4, 3), loaders(rows(4), ids(4)), levels(torch.ge))


@planted("level_of_all")
def levels_from_one():
    model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())
    return fitting(model, loaders(rows(4), 1 + ids(4)), levels(torch.gt, F.binary_cross_entropy))


@right
def levels_above():
    return fitting(nn.Linear(4, 3), loaders(rows(4), ids(4)), levels(torch.gt))


@right
def tags_of_which_one_is_everywhere():
    tags = ids(2, 3).float()
    tags[:, 0] = 1
    return fitting(nn.Linear(4, 3), loaders(rows(4), tags), F.binary_cross_entropy_with_logits)


class Tied(nn.Module):
    "A model of words whose head has their vectors"

    def __init__(self, tie=True):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        if tie:
            self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.words(x).mean(1))


class TiedByMethod(Tied):
    def __init__(self, then=lambda model: None):
        super().__init__(tie=False)
        self.tie()
        then(self)

    def tie(self):
        self.words.weight = self.head.weight


def new_words(model):
    model.words = nn.Embedding(9, 4)


def new_weights(model):
    for part in (model.words, model.head):
        part.weight = nn.Parameter(torch.randn(9, 4))


for then in new_words, new_weights:
    planted("no_longer_tied")(lambda then=then: fitting(TiedByMethod(then), loaders(ids(9, 5), ids(9))))


@right
def still_tied():
    return fitting(TiedByMethod(), loaders(ids(9, 5), ids(9)))


@right
def never_tied():
    return fitting(Tied(tie=False), loaders(ids(9, 5), ids(9)))


def perplexity(preds, y):
    return math.exp(F.cross_entropy(preds, y).item())


def bits(preds, y):
    return 2 ** (F.cross_entropy(preds, y) / math.log(2))


for metric in perplexity, bits:
    planted("mean_of_exps")(
        lambda metric=metric: fitting(
            nn.Linear(4, 3), loaders(rows(4), ids(3)), F.cross_entropy, MetricsCB(metric=metric)
        )
    )


@right
def a_mean_of_rows():
    metrics = MetricsCB(entropy=F.cross_entropy, right=lambda x, y: (x.argmax(1) == y).float())
    return fitting(nn.Linear(4, 3), loaders(rows(4), ids(3)), F.cross_entropy, metrics)


class Field(nn.Module):
    "A conditional random field"

    def __init__(self, turned):
        super().__init__()
        self.follows, self.begins = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3))
        self.turned = turned

    def forward(self, says, tags):
        follows = self.follows.T if self.turned else self.follows
        score = says.gather(2, tags[..., None]).sum((1, 2)) + self.begins[tags[:, 0]]
        score = score + follows[tags[:, :-1], tags[:, 1:]].sum(1)
        alpha = says[:, 0] + self.begins
        for i in range(1, says.shape[1]):
            alpha = (alpha[:, :, None] + self.follows + says[:, i, None]).logsumexp(1)
        return (score - alpha.logsumexp(1)).mean()


class TaggerCB(BasicTrainCB):
    def predict(self, trainer):
        trainer.preds = trainer.model["says"](trainer.batch[0])

    def get_loss(self, trainer):
        trainer.loss = -trainer.model["field"](trainer.preds, trainer.batch[1])


def tagger(turned):
    model = nn.ModuleDict(dict(says=nn.Linear(4, 3), field=Field(turned)))
    return Trainer(loaders(rows(5, 4), ids(3, 5)), None, optim.Adam, model, [TaggerCB()])


@planted("transitions_turned")
def transitions_both_ways():
    return tagger(True)


@right
def transitions_one_way():
    return tagger(False)


class Forecast(nn.Module):
    "Says a series from its true past, in evaluation or not"

    def __init__(self, always):
        super().__init__()
        self.cell, self.says, self.always = nn.GRU(1, 4, batch_first=True), nn.Linear(4, 1), always

    def forward(self, past, future):
        given = torch.cat([past[:, -1:], future[:, :-1]], 1)
        if not (self.always or self.training):
            given = past[:, -1:].expand_as(future).contiguous()
        return self.says(self.cell(given)[0])


def forecasts():
    future = rows(6, 1)
    return loaders(rows(9, 1), future, future, n_inp=2)


@planted("true_past")
def the_true_past_in_validation():
    return fitting(Forecast(True), forecasts(), F.mse_loss)


@right
def the_true_past_in_training():
    return fitting(Forecast(False), forecasts(), F.mse_loss)


@right
def what_is_encoded_and_decoded():
    future = rows(6)
    model = Part(nn.Linear(9, 6), lambda x, y: x + 0.5 * y)
    return fitting(model, loaders(rows(9), future, future, n_inp=2), F.mse_loss)


class Erases(nn.Module):
    "Erases something on the way, by one of several functions"

    def __init__(self, erase, asks=False):
        super().__init__()
        self.erase, self.asks, self.head = erase, asks, nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x if self.asks and not self.training else self.erase(x))


def a_band(x):
    x, start = x.clone(), torch.randint(0, 6, (1,)).item()
    x[:, start : start + 2] = 0.0
    return x


def whole_rows(x):
    keep = torch.empty(len(x), 1).bernoulli_(0.8)
    return x / 0.8 * keep


def some(x):
    return torch.where(torch.rand_like(x) < 0.2, torch.zeros_like(x), x)


def a_sample(x):
    return x + torch.randn_like(x) * x.exp()


for erase in a_band, whole_rows, some:
    planted("erased_in_validation")(lambda erase=erase: fitting(Erases(erase), loaders(rows(8), ids(3))))
    right(lambda erase=erase: fitting(Erases(erase, asks=True), loaders(rows(8), ids(3))))


@right
def a_sample_in_validation():
    return fitting(Erases(a_sample), loaders(rows(8), ids(3)))


@right
def what_is_to_be_restored():
    x = rows(8)
    return fitting(nn.Sequential(Erases(some), nn.Linear(3, 8)), loaders(x, x), F.mse_loss)


def scaled(x, part):
    return (x - part.mean(0)) / part.std(0)


def table(part):
    x = torch.randn(200, 3) * 2 + 1
    data = TensorDataset(scaled(x, x[part]), torch.randint(3, (200,)))
    return data


@planted("scaled_together")
def a_table_that_is_split_at_random():
    train, valid = (DataLoader(o, 16) for o in random_split(table(slice(None)), [150, 50]))
    return fitting(nn.Linear(3, 3), DataLoaders(train, valid))


@planted("scaled_together")
def windows_of_one_series():
    series = torch.randn(400).cumsum(0)
    windows = scaled(series, series).unfold(0, 12, 1)
    parts = (windows[:250], windows[270:])
    batches = [list(zip(o[:, :9].split(50), o[:, 9:].split(50))) for o in parts]
    return fitting(nn.Linear(9, 3), DataLoaders(*batches), F.mse_loss)


@right
def a_table_that_is_scaled_by_a_part():
    data = table(slice(150))
    train, valid = (DataLoader(TensorDataset(*o), 16) for o in (data[:150], data[150:]))
    return fitting(nn.Linear(3, 3), DataLoaders(train, valid))


@pytest.mark.parametrize("make, names", planted)
def test_what_goes_wrong_with_sequences_is_found(make, names):
    torch.manual_seed(0)
    assert tuple(found_in(make(), batches=3)) == names


@pytest.mark.parametrize("make", right)
def test_right_sequences_are_left_alone(make):
    torch.manual_seed(0)
    assert found_in(make(), batches=3) == []
