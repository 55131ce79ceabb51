"""Mistakes in the source of a model's forward and of a loss, each beside what is like it and right.

Each planted one is found by the name of its rule; in the right ones nothing is found.
"""

import pytest
import torch
from torch import nn, optim
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from isaac_loop import Trainer
from isaac_loop.callbacks import BasicTrainCB
from isaac_loop.data import DataLoaders
from working import found_in

WRONG, RIGHT = [], []


def planted(name):
    "A function that gives a trainer in which something is wrong"

    def mark(make):
        WRONG.append((make, name))
        return make

    return mark


def right(make):
    "One that is like it and right"
    RIGHT.append(make)
    return make


def trainer_with(model, *cbs, loss_func=F.cross_entropy, n_inp=1):
    dls = DataLoaders([torch.randn(4, 3)], n_inp=n_inp)
    steps = [] if any(isinstance(o, BasicTrainCB) for o in cbs) else [BasicTrainCB()]
    return Trainer(dls, loss_func, optim.SGD, model, [*steps, *cbs])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(8, 8), nn.Linear(4, 8)
        self.rnn, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)


# Layers that are new in every call


@planted("layer_in_forward")
def a_layer_called_at_once():
    class Model(Net):
        def forward(self, x):
            return self.head(nn.Linear(x.shape[1], 8).to(x.device)(x))

    return trainer_with(Model())


@planted("layer_in_forward")
def a_layer_made_in_a_branch():
    class Model(Net):
        def forward(self, x):
            if x.shape[1] != 8:
                project = nn.Linear(x.shape[1], 8)
                project = project.to(x.device)
                x = project(x)
            return self.head(x)

    return trainer_with(Model())


@planted("layer_in_forward")
def a_layer_made_and_moved_in_one_line():
    class Model(Net):
        def forward(self, x):
            project = nn.Linear(x.shape[1], 8).to(x.device).float()
            return self.head(project(x))

    return trainer_with(Model())


@planted("layer_in_forward")
def a_sequence_made_in_a_method():
    class Model(Net):
        def forward(self, x):
            return self.head(self.expand(x))

        def expand(self, x):
            return nn.Sequential(nn.ReLU(), nn.Linear(8, 8))(x)

    return trainer_with(Model())


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layer = nn.Linear(n, n)

    def forward(self, x):
        return self.layer(x)


@planted("layer_in_forward")
def a_block_of_ones_own():
    class Model(Net):
        def forward(self, x):
            block = Block(8)
            return self.head(block(x))

    return trainer_with(Model())


def projected(x):
    return nn.Conv1d(8, 8, 1)(x)


@planted("layer_in_forward")
def a_layer_in_a_function_that_a_callback_calls():
    class PredictCB(BasicTrainCB):
        def predict(self, trainer):
            trainer.preds = trainer.model(projected(trainer.batch[0]))

    return trainer_with(nn.Linear(8, 3), PredictCB())


@right
def a_layer_that_is_kept_and_one_with_weights_of_its_own():
    class Model(Net):
        def forward(self, x):
            if not hasattr(self, "project"):
                self.project = nn.Linear(x.shape[1], 8)
            blur = nn.Conv1d(1, 1, 3, bias=False)
            blur.weight.data.fill_(1 / 3)
            return self.head(nn.Dropout(0.1)(nn.ReLU()(nn.Flatten()(blur(self.project(x))))))

    return trainer_with(Model())


@right
def a_layer_of_the_model_that_is_moved_under_another_name():
    class Model(Net):
        def forward(self, x):
            enc = self.enc.to(x.device)
            blur = nn.Conv1d(1, 1, 3, bias=False).to(x.device)
            blur.weight.data.fill_(1 / 3)
            return self.head(blur(enc(x)))

    return trainer_with(Model())


@right
def losses_and_norms_without_weights():
    class Model(Net):
        def forward(self, x):
            return self.head(nn.LayerNorm(8)(nn.BatchNorm1d(8, affine=False)(x)))

    def loss_func(preds, y):
        return nn.CrossEntropyLoss(label_smoothing=0.1)(preds, y)

    return trainer_with(Model(), loss_func=loss_func)


# Inputs that nobody reads


class LastStep(Net):
    def forward(self, x, lengths):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


@planted("unread_input")
def lengths_that_a_model_does_not_read():
    return trainer_with(LastStep(), n_inp=2)


@planted("unread_input")
def lengths_that_are_handed_to_one_who_does_not_read_them():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = LastStep()

        def forward(self, x, lengths=None):
            return self.net(x, lengths=lengths)

    return trainer_with(Wrapped(), n_inp=2)


def of_nodes(preds, y, mask):
    return F.cross_entropy(preds, y)


@planted("unread_input")
def a_mask_that_a_loss_does_not_read():
    return trainer_with(nn.Linear(8, 3), loss_func=of_nodes)


@planted("unread_input")
def a_mask_that_a_loss_hands_on_in_vain():
    def loss_func(preds, y, mask):
        return of_nodes(preds, y, mask) * 2

    return trainer_with(nn.Linear(8, 3), loss_func=loss_func)


@planted("unread_input")
def a_mask_that_a_loss_module_does_not_read():
    class Loss(nn.Module):
        def forward(self, preds, y, mask):
            return F.cross_entropy(preds, y)

    return trainer_with(nn.Linear(8, 3), loss_func=Loss())


@planted("unread_input")
def predictions_that_are_not_read():
    def loss_func(preds, y):
        return pred.mean() - y.float().mean()  # noqa: F821

    return trainer_with(nn.Linear(8, 3), loss_func=loss_func)


@right
def what_is_read_in_some_way():
    class Model(Net):
        def forward(self, x, lengths, mask=None, _extra=None):
            return self.pooled(self.rnn(x)[0], lengths)

        def pooled(self, out, lengths):
            return self.head(out[torch.arange(len(out)), lengths - 1])

    def loss_func(preds, y, mask):
        return of_nodes(preds[mask], y[mask], mask)

    return trainer_with(Model(), loss_func=loss_func, n_inp=2)


@right
def what_is_left_out_and_says_so():
    class Model(Net):
        def forward(self, x, mask):
            del mask
            return self.head(x)

    def loss_func(preds, y, _mask):
        return F.cross_entropy(preds, y)

    return trainer_with(Model(), loss_func=loss_func, n_inp=2)


@right
def a_loss_without_targets():
    def loss_func(preds, y, ids):
        return preds.pow(2).mean()

    return trainer_with(nn.Linear(8, 3), loss_func=loss_func)


@right
def a_loss_that_hands_all_on():
    def loss_func(preds, y, mask):
        parts = [y, mask]
        return weighted(preds, *parts)

    def weighted(preds, y, mask):
        return (F.cross_entropy(preds, y, reduction="none") * mask).sum() / mask.sum()

    return trainer_with(nn.Linear(8, 3), loss_func=loss_func)


# Draws that cut the gradient


@planted("sample_cuts")
def a_sample_of_a_normal():
    class VAE(Net):
        def forward(self, x):
            mu, logvar = self.enc(x).chunk(2, dim=1)
            q = Normal(mu, (0.5 * logvar).exp())
            z = q.sample()
            return self.dec(z), q

    return trainer_with(VAE())


@planted("sample_cuts")
def a_sample_in_a_method():
    class VAE(Net):
        def forward(self, x):
            mu, logvar = self.enc(x).chunk(2, dim=1)
            return self.dec(self.reparameterize(mu, logvar)), mu, logvar

        def reparameterize(self, mu, logvar):
            return Independent(Normal(mu, logvar.exp()), 1).sample()

    return trainer_with(VAE())


@planted("sample_cuts")
def a_sample_in_a_module():
    class Sampling(nn.Module):
        def forward(self, mu, logvar):
            return torch.normal(mu, logvar.exp())

    class VAE(Net):
        def __init__(self):
            super().__init__()
            self.sampling = Sampling()

        def forward(self, x):
            return self.dec(self.sampling(*self.enc(x).chunk(2, dim=1)))

    return trainer_with(VAE())


@planted("sample_cuts")
def a_sample_in_a_callback():
    class PredictCB(BasicTrainCB):
        def predict(self, trainer):
            mu, logvar = trainer.model.enc(trainer.batch[0]).chunk(2, dim=1)
            trainer.preds = trainer.model.dec(torch.distributions.Normal(mu, logvar.exp()).sample())

    return trainer_with(Net(), PredictCB())


@right
def a_sample_that_keeps_its_past():
    class VAE(Net):
        def forward(self, x):
            mu, logvar = self.enc(x).chunk(2, dim=1)
            q = Normal(mu, (0.5 * logvar).exp())
            return self.dec(q.rsample() if self.training else q.sample())

    return trainer_with(VAE())


@right
def noise_that_nobody_learns():
    class Noisy(Net):
        def forward(self, x):
            x = x + Normal(torch.zeros_like(x), torch.ones_like(x)).sample() + torch.normal(0.0, 0.1, x.shape)
            return self.head(x + Normal(0.0, 1.0).sample(x.shape))

    return trainer_with(Noisy())


@right
def an_action_that_is_scored():
    class Policy(Net):
        def forward(self, x):
            q = Normal(self.head(x), 1.0)
            return q, q.sample()

    def loss_func(preds, reward):
        q, action = preds
        return -(q.log_prob(action).sum(1) * reward).mean()

    return trainer_with(Policy(), loss_func=loss_func)


@right
def a_choice():
    class Policy(Net):
        def forward(self, x):
            return Categorical(logits=self.head(x)).sample()

    return trainer_with(Policy())


# Two scales in one loss


@planted("mixed_reductions")
def a_mean_and_a_sum():
    def loss_func(preds, x):
        recon, mu, logvar = preds
        rec = F.binary_cross_entropy(recon, x)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return rec + kl

    return trainer_with(nn.Linear(8, 8), loss_func=loss_func)


def divergence(mu, logvar):
    return -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum()


@planted("mixed_reductions")
def a_mean_and_a_sum_in_a_function():
    def loss_func(preds, x):
        return F.mse_loss(preds[0], x) + divergence(*preds[1:])

    return trainer_with(nn.Linear(8, 8), loss_func=loss_func)


@planted("mixed_reductions")
def a_mean_by_a_module_and_a_sum_of_divergences():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.recon = nn.MSELoss()

        def forward(self, preds, x):
            loss = self.recon(preds[0], x)
            loss = loss + kl_divergence(preds[1], Normal(0.0, 1.0)).sum()
            return loss

    return trainer_with(nn.Linear(8, 8), loss_func=Loss())


@planted("mixed_reductions")
def a_mean_by_hand_and_a_sum_in_a_callback():
    class LossCB(BasicTrainCB):
        def get_loss(self, trainer):
            recon, mu, logvar = trainer.preds
            kl = 0.5 * torch.sum(logvar.exp() + mu**2 - 1 - logvar)
            trainer.loss = ((recon - trainer.batch[0]) ** 2).mean() + kl

    return trainer_with(nn.Linear(8, 8), LossCB())


def by_row(mu, logvar):
    return -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()


@planted("mixed_reductions")
def a_mean_and_a_sum_for_each_row():
    def loss_func(preds, x):
        return F.mse_loss(preds[0], x) + by_row(*preds[1:])

    return trainer_with(nn.Linear(8, 8), loss_func=loss_func)


@right
def two_sums_for_each_row():
    def loss_func(preds, x):
        return F.mse_loss(preds[0], x, reduction="none").sum(1).mean() + by_row(*preds[1:])

    return trainer_with(nn.Linear(8, 8), loss_func=loss_func)


@right
def two_sums_by_hand_for_each_row():
    def loss_func(preds, x):
        return ((preds[0] - x) ** 2).sum(1).mean() + by_row(*preds[1:])

    return trainer_with(nn.Linear(8, 8), loss_func=loss_func)


@right
def a_mean_and_a_weighed_sum_for_each_row():
    def loss_func(preds, x):
        return F.mse_loss(preds[0], x) + 0.01 * by_row(*preds[1:])

    return trainer_with(nn.Linear(8, 8), loss_func=loss_func)


def terms(preds, x, reduction):
    recon, mu, logvar = preds
    return F.mse_loss(recon, x, reduction=reduction), divergence(mu, logvar)


@right
def sums_of_both():
    def loss_func(preds, x):
        rec = F.mse_loss(preds[0], x, reduction="sum")
        return (rec + divergence(*preds[1:])) / len(x)

    return trainer_with(nn.Linear(8, 8), loss_func=loss_func)


@right
def a_term_that_is_weighed():
    beta = 1e-3

    def loss_func(preds, x):
        return F.mse_loss(preds[0], x) + beta * divergence(*preds[1:])

    return trainer_with(nn.Linear(8, 8), loss_func=loss_func)


@right
def a_term_that_is_divided_later():
    def loss_func(preds, x):
        recon, mu, logvar = preds
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        kl /= x.numel()
        return F.mse_loss(recon, x) + kl

    return trainer_with(nn.Linear(8, 8), loss_func=loss_func)


@right
def a_sum_over_numbers_alone():
    def loss_func(preds, x):
        recon, mu, logvar = preds
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1)
        return F.mse_loss(recon, x) + kl.mean()

    return trainer_with(nn.Linear(8, 8), loss_func=loss_func)


# Rows that stay sorted


@planted("not_unsorted")
def rows_sorted_for_packing():
    class Packed(Net):
        def forward(self, x, lengths):
            lengths, order = lengths.sort(descending=True)
            packed = pack_padded_sequence(x[order], lengths.cpu(), batch_first=True)
            return self.head(self.rnn(packed)[1][-1])

    return trainer_with(Packed(), n_inp=2)


@planted("not_unsorted")
def rows_sorted_by_argsort():
    class Packed(Net):
        def forward(self, x, lengths):
            order = torch.argsort(lengths, descending=True)
            x = torch.index_select(x, 0, order)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths[order], batch_first=True)
            return self.head(self.rnn(packed)[1][-1])

    return trainer_with(Packed(), n_inp=2)


@right
def rows_put_back_by_an_inverse():
    class Packed(Net):
        def forward(self, x, lengths):
            lengths, order = torch.sort(lengths, descending=True)
            packed = pack_padded_sequence(x[order], lengths.cpu(), batch_first=True)
            _, back = order.sort()
            return self.head(self.rnn(packed)[1][-1][back])

    return trainer_with(Packed(), n_inp=2)


@right
def rows_written_back():
    class Packed(Net):
        def forward(self, x, lengths):
            order = lengths.argsort(descending=True)
            packed = pack_padded_sequence(x[order], lengths[order], batch_first=True)
            h = self.rnn(packed)[1][-1]
            answers = torch.empty_like(h)
            answers[order] = h
            return self.head(answers)

    return trainer_with(Packed(), n_inp=2)


@right
def the_best_of_some_candidates():
    class Best(Net):
        def forward(self, x):
            order = x.sum(1).argsort(descending=True)
            return self.head(x[order[:2]] + x[order][:2])

    return trainer_with(Best())


@pytest.mark.parametrize(("make", "name"), WRONG, ids=lambda o: getattr(o, "__name__", ""))
def test_a_planted_mistake_is_found(make, name):
    assert name in found_in(make())


@pytest.mark.parametrize("make", RIGHT, ids=lambda o: o.__name__)
def test_what_is_like_it_and_right_is_left_alone(make):
    assert found_in(make()) == []
