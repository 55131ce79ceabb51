"""Recipes of research with one line wrong: policies, views, noise, games of two networks.

Each planted one is found by name; the right recipes beside them, also those that look odd, are left alone.
"""

import copy
import random

import pytest
import torch
from torch import nn, optim
from torch.distributions import Categorical, Normal
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from isaac_loop import CancelBatchException, Trainer, with_cbs
from isaac_loop.callbacks import BasicTrainCB, MetricsCB
from isaac_loop.data import DataLoaders
from marked import Marked, Planted
from working import found_in

planted, right = Planted(), Marked()


def rows(n=48, width=6):
    return torch.randn(n, width)


def loaders(*tensors, n_inp=1):
    torch.manual_seed(len(tensors))
    data = TensorDataset(*(tensors or (rows(),)))
    return DataLoaders(DataLoader(data, 8, shuffle=True, drop_last=True), n_inp=n_inp)


def fitting(model, *cbs, dls=None, loss_func=None):
    return Trainer(dls or loaders(), loss_func, optim.SGD, model, [*cbs, MetricsCB(weigh="mean")])


def net(i=6, o=4, p=0.0):
    return nn.Sequential(nn.Linear(i, 16), nn.Tanh(), nn.Dropout(p), nn.Linear(16, o))


def noisy(x):
    return x + 0.1 * torch.randn_like(x)


# Views


def info_nce(a, b):
    logits, target = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / 0.2, torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def nt_xent(a, b):
    z = F.normalize(torch.cat([a, b]), dim=1)
    logits = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(a)))


def barlow_twins(a, b):
    a, b = ((x - x.mean(0)) / (x.std(0) + 1e-5) for x in (a, b))
    return ((a.T @ b / len(a) - torch.eye(a.shape[1])) ** 2).sum()


def vicreg(a, b):
    spread = sum(F.relu(1 - x.std(0)).mean() for x in (a, b))
    return F.mse_loss(a, b) + spread


class TwoViews(BasicTrainCB):
    "Draws two views; `views` makes them, `loss` compares them"

    def __init__(self, loss, views):
        self.loss, self.views = loss, views

    def predict(self, trainer):
        a, b = self.views(trainer.batch[0])
        trainer.preds = trainer.model(a), trainer.model(b)

    def get_loss(self, trainer):
        trainer.loss = self.loss(*trainer.preds)


def drawn_once(x):
    view = noisy(x)
    return view, view


def drawn_twice(x):
    return noisy(x), noisy(x)


def the_row_itself(x):
    return x, x


LOSSES = [nt_xent, barlow_twins, vicreg]


@pytest.mark.parametrize("loss", LOSSES)
def test_one_view_that_is_drawn_once(loss):
    assert found_in(fitting(net(), TwoViews(loss, drawn_once)), batches=2) == ["same_views"]


@pytest.mark.parametrize("loss", LOSSES)
def test_two_views(loss):
    assert found_in(fitting(net(), TwoViews(loss, drawn_twice)), batches=2) == []


@right
def dropout_makes_the_views():
    return fitting(net(p=0.2), TwoViews(info_nce, the_row_itself))


@planted("same_views")
def no_dropout_to_make_the_views():
    return fitting(net(), TwoViews(info_nce, the_row_itself))


class Pairs(Dataset):
    def __init__(self, once):
        self.x, self.once = rows(), once

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return (drawn_once if self.once else drawn_twice)(self.x[i])


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = net()

    def forward(self, a, b):
        return self.encoder(a), self.encoder(b)


def pairs(once):
    torch.manual_seed(0)
    dls = DataLoaders(DataLoader(Pairs(once), 8, shuffle=True), DataLoader(Pairs(once), 8), n_inp=2)
    return fitting(Siamese(), BasicTrainCB(), dls=dls, loss_func=lambda preds: info_nce(*preds))


@planted("same_views")
def a_dataset_that_gives_one_view():
    return pairs(once=True)


@right
def a_dataset_that_gives_two_views():
    return pairs(once=False)


class Predicting(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = net(), net(4)

    def forward(self, x):
        z = self.body(x)
        return z, self.head(z)


def cosine(p, z):
    return -F.cosine_similarity(p, z, dim=1).mean()


def product(p, z):
    return -(F.normalize(p, dim=1) * F.normalize(z, dim=1)).sum(1).mean()


def squares(p, z):
    return F.mse_loss(F.normalize(p, dim=1), F.normalize(z, dim=1))


def sim_siam(distance, cut, views=drawn_twice):
    def loss(one, other):
        (z, p), (y, q) = one, other
        return distance(p, y.detach() if cut else y) / 2 + distance(q, z.detach() if cut else z) / 2

    return fitting(Predicting(), TwoViews(loss, views))


@pytest.mark.parametrize("distance", [cosine, product, squares])
def test_branches_that_are_drawn_together(distance):
    assert found_in(sim_siam(distance, cut=False), batches=2) == ["both_drawn"]
    assert found_in(sim_siam(distance, cut=True), batches=2) == []


@planted("same_views")
def sim_siam_with_one_view():
    return sim_siam(cosine, cut=True, views=drawn_once)


class Byol(BasicTrainCB):
    "The second branch is a moving average of the first"

    def before_fit(self, trainer):
        self.target = copy.deepcopy(trainer.model).requires_grad_(False)

    def predict(self, trainer):
        a, b = drawn_twice(trainer.batch[0])
        with torch.no_grad():
            self.aims = [self.target(x)[0] for x in (b, a)]
        trainer.preds = [trainer.model(x)[1] for x in (a, b)]

    def get_loss(self, trainer):
        trainer.loss = sum(squares(p, z) for p, z in zip(trainer.preds, self.aims))

    def after_step(self, trainer):
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), trainer.model.parameters()):
                old.lerp_(new, 0.01)


@right
def bootstrap_your_own_latent():
    return fitting(Predicting(), Byol())


class Student(BasicTrainCB):
    "A teacher that begins as the student, and is asked for the same rows"

    before_fit, after_step = Byol.before_fit, Byol.after_step

    def get_loss(self, trainer):
        with torch.no_grad():
            aim = self.target(trainer.batch[0])
        trainer.loss = F.mse_loss(trainer.preds, aim) + trainer.preds.square().mean()


@right
def a_teacher_that_begins_as_the_student():
    return fitting(net(), Student())


class Queue(BasicTrainCB):
    "Momentum contrast; `first` says where the right column stands"

    def __init__(self, first, keys=12):
        self.first, self.queue = first, F.normalize(torch.randn(keys, 4), dim=1)

    def predict(self, trainer):
        q, k = (F.normalize(trainer.model(x), dim=1) for x in drawn_twice(trainer.batch[0]))
        parts = torch.einsum("nc,nc->n", q, k.detach())[:, None], q @ self.queue.T
        trainer.preds = torch.cat(parts if self.first else parts[::-1], dim=1) / 0.2

    def get_loss(self, trainer):
        trainer.loss = F.cross_entropy(trainer.preds, self.labels(trainer.preds))

    def labels(self, preds):
        return torch.zeros(len(preds), dtype=torch.long)


class LastLabel(Queue):
    def labels(self, preds):
        return torch.full((len(preds),), preds.shape[1] - 1)


@planted("wrong_positive")
def the_positive_stands_last():
    return fitting(net(), Queue(first=False))


@planted("wrong_positive")
def the_label_is_the_last():
    return fitting(net(), LastLabel(first=True))


@right
def the_positive_stands_first():
    return fitting(net(), Queue(first=True))


@right
def the_positive_and_the_label_stand_last():
    return fitting(net(), LastLabel(first=False))


# Noise


class Diffusion(BasicTrainCB):
    "Noise is added, and to be found again"

    def predict(self, trainer):
        x = trainer.batch[0]
        self.noise = torch.randn_like(x)
        trainer.preds = trainer.model(self.mixed(x))

    def mixed(self, x):
        return 0.6 * x + 0.8 * self.noise

    def get_loss(self, trainer):
        trainer.loss = F.mse_loss(trainer.preds, self.noise)


class OtherNoise(Diffusion):
    def mixed(self, x):
        return 0.6 * x + 0.8 * torch.randn_like(x)


class NoiseInLoss(Diffusion):
    def get_loss(self, trainer):
        trainer.loss = ((trainer.preds - torch.randn(trainer.preds.shape)) ** 2).mean()


class Velocity(Diffusion):
    def get_loss(self, trainer):
        trainer.loss = (trainer.preds - (self.noise - trainer.batch[0])).square().mean()


@planted("fresh_noise")
def noise_that_only_the_loss_knows():
    return fitting(net(6, 6), OtherNoise())


@planted("fresh_noise")
def noise_that_is_drawn_in_the_loss():
    return fitting(net(6, 6), NoiseInLoss())


@pytest.mark.parametrize("cls", [Diffusion, Velocity])
def test_noise_that_is_to_be_found(cls):
    assert found_in(fitting(net(6, 6), cls()), batches=2) == []


class AddsNoise:
    "A batch of rows becomes one of rows with noise, times and noise"

    def __init__(self, divide):
        self.divide = divide

    def before_batch(self, trainer):
        (x,) = trainer.batch
        noise, t = torch.randn_like(x), torch.randint(100, (len(x),))
        trainer.batch = (x + noise, self.divide(t)[:, None].expand(-1, 1)), noise


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net(7, 6)

    def forward(self, given):
        return self.net(torch.cat(given, 1))


def timed(divide):
    return fitting(Timed(), BasicTrainCB(), AddsNoise(divide), loss_func=F.mse_loss)


@planted("divided_away")
def times_that_are_all_0():
    return timed(lambda t: (t // 100).float())


@planted("divided_away")
def times_that_are_floored_to_0():
    return timed(lambda t: torch.div(t, 100, rounding_mode="floor").to(torch.float32))


@right
def times_that_are_fractions():
    return timed(lambda t: t / 100)


@right
def whole_hundreds():
    return timed(lambda t: (t // 10).float())


class Masked(BasicTrainCB):
    "Hides numbers by chance; `counts` says which errors count"

    def predict(self, trainer):
        x = trainer.batch[0]
        self.hidden = torch.rand(x.shape) < 0.6
        trainer.preds = trainer.model(x.masked_fill(self.hidden, 0.0))

    def get_loss(self, trainer):
        trainer.loss = self.mean((trainer.preds - trainer.batch[0]) ** 2)

    def mean(self, errors):
        return (errors * self.hidden).sum() / self.hidden.sum()


class OfTheVisible(Masked):
    def mean(self, errors):
        seen = 1 - self.hidden.float()
        return (errors * seen).sum() / seen.sum()


class ChosenVisible(Masked):
    def mean(self, errors):
        return errors[~self.hidden].mean()


class OfBoth(Masked):
    def mean(self, errors):
        return errors[self.hidden].mean() + 0.1 * errors[~self.hidden].mean()


class Missing(Masked):
    "What is missing in the data cannot be compared with"

    def predict(self, trainer):
        x = trainer.batch[0]
        self.hidden = x > 1
        trainer.preds = trainer.model(x.masked_fill(self.hidden, 0.0))

    def mean(self, errors):
        return errors[~self.hidden].mean()


@pytest.mark.parametrize("cls", [OfTheVisible, ChosenVisible])
def test_errors_of_what_was_shown(cls):
    assert found_in(fitting(net(6, 6), cls()), batches=2) == ["visible_only"]


@pytest.mark.parametrize("cls", [Masked, OfBoth, Missing])
def test_errors_of_what_was_hidden(cls):
    assert found_in(fitting(net(6, 6), cls()), batches=2) == []


class Codes(nn.Module):
    "Nearest codes; `put_in` says how they go on"

    def __init__(self, put_in, looks_up):
        super().__init__()
        self.enc, self.dec, self.codes = net(), net(4, 6), nn.Embedding(7, 4)
        self.put_in, self.looks_up = put_in, looks_up

    def forward(self, x):
        z = self.enc(x)
        q = self.looks_up(self.codes, torch.cdist(z, self.codes.weight).argmin(1))
        vq = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return self.dec(self.put_in(z, q)), vq


def by_call(codes, i):
    return codes(i)


def by_product(codes, i):
    return F.one_hot(i, 7).float() @ codes.weight


def with_codes(put_in, looks_up):
    dls = loaders(x := rows(), x)
    model = Codes(put_in, looks_up)
    return fitting(model, BasicTrainCB(), dls=dls, loss_func=lambda out, x: F.mse_loss(out[0], x) + out[1])


@pytest.mark.parametrize("looks_up", [by_call, by_product])
def test_codes_that_cut_the_gradient(looks_up):
    names = found_in(with_codes(lambda z, q: q, looks_up), batches=2)
    assert names == ["codes_cut"]
    straight = with_codes(lambda z, q: z + (q - z).detach(), looks_up)
    assert found_in(straight, batches=2) == []


# Policies


def reinforce(turned, cls=None):
    class Plays(cls or BasicTrainCB):
        def predict(self, trainer):
            dist = Categorical(logits=trainer.model(trainer.batch[0]))
            actions = dist.sample()
            trainer.preds = dist.log_prob(actions), (actions == 1).float()

    return fitting(net(), Plays())


class Gains(BasicTrainCB):
    def get_loss(self, trainer):
        log_probs, rewards = trainer.preds
        rewards = rewards - 0.5
        trainer.loss = (log_probs * rewards).mean()


class Collected(BasicTrainCB):
    def get_loss(self, trainer):
        losses = []
        for log_prob, reward in zip(*trainer.preds):
            losses.append(log_prob * reward)
        trainer.loss = torch.stack(losses).sum()


class Helped(BasicTrainCB):
    def gain(self, log_prob, adv):
        return torch.mean(log_prob.squeeze() * adv)

    def get_loss(self, trainer):
        policy_loss = self.gain(*trainer.preds)
        trainer.loss = policy_loss + 0.1


class Turned(Helped):
    def get_loss(self, trainer):
        trainer.loss = 0.1 - self.gain(*trainer.preds)


class TurnedInList(Collected):
    def get_loss(self, trainer):
        losses = []
        for log_prob, reward in zip(*trainer.preds):
            losses.append(-log_prob * reward)
        trainer.loss = torch.stack(losses).sum()


class Climbs(Gains):
    def backward(self, trainer):
        (-trainer.loss).backward()


class Costs(BasicTrainCB):
    def get_loss(self, trainer):
        log_prob, costs = trainer.preds
        trainer.loss = (log_prob * costs).mean()


@pytest.mark.parametrize("cls", [Gains, Collected, Helped])
def test_rewards_that_are_made_small(cls):
    assert found_in(reinforce(False, cls), batches=2) == ["policy_sign"]


@pytest.mark.parametrize("cls", [Turned, TurnedInList, Climbs, Costs])
def test_rewards_that_grow(cls):
    assert found_in(reinforce(True, cls), batches=2) == []


class PlaysOne(BasicTrainCB):
    "Plays an action, and asks for the log-probability of `of(dist, action)`"

    def __init__(self, of, draws=None):
        self.of, self.draws = of, draws

    def predict(self, trainer):
        logits = trainer.model(trainer.batch[0])
        dist = Categorical(logits=logits) if self.draws is None else Normal(logits, 1.0)
        action = dist.sample()
        trainer.preds = self.of(dist, action), -(action.float() ** 2)

    def get_loss(self, trainer):
        log_prob, gain = trainer.preds
        trainer.loss = -(log_prob * gain).mean()


@pytest.mark.parametrize("draws", [None, Normal])
def test_an_action_that_nobody_plays(draws):
    wrong = PlaysOne(lambda dist, action: dist.log_prob(dist.sample()), draws)
    assert found_in(fitting(net(), wrong), batches=2) == ["fresh_action"]
    played = PlaysOne(lambda dist, action: dist.log_prob(action), draws)
    assert found_in(fitting(net(), played), batches=2) == []


class Proximal(Trainer):
    "Several passes over what was played; `old` says when the old probabilities are asked for"

    again = True

    def log_prob(self, s, a):
        return Categorical(logits=self.model(s)).log_prob(a)

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        s = self.batch[0]
        with torch.no_grad():
            a = Categorical(logits=self.model(s)).sample()
            old = self.log_prob(s, a)
        for _ in range(3):
            if self.again:
                old = self.log_prob(s, a).detach()
            new = self.log_prob(s, a)
            ratio, adv = (new - old).exp(), a - a.float().mean()
            self.loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            if self.training:
                self.run_callbacks("backward", "step", "zero_grad")


class Kept(Proximal):
    again = False


class OnPolicy(Proximal):
    "One pass each, where the ratio is 1 on purpose"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        s = self.batch[0]
        for _ in range(2):
            with torch.no_grad():
                a = Categorical(logits=self.model(s)).sample()
            new = self.log_prob(s, a)
            self.loss = -((new - new.detach()).exp() * (a - a.float().mean())).mean()
            if self.training:
                self.run_callbacks("backward", "step", "zero_grad")


@pytest.mark.parametrize("cls, names", [(Proximal, ["ratio_of_one"]), (Kept, []), (OnPolicy, [])])
def test_ratios_of_probabilities(cls, names):
    trainer = cls(loaders(), None, optim.SGD, net(), [BasicTrainCB(), MetricsCB(weigh="mean")])
    assert found_in(trainer, batches=2) == names


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = net()

    def forward(self, s):
        dist = Normal(self.mean(s), 1.0)
        u = dist.rsample()
        return torch.tanh(u), self.log_prob(dist, u)

    def log_prob(self, dist, u):
        return dist.log_prob(u).sum(1)


class Together(Actor):
    def forward(self, s):
        dist = Normal(self.mean(s), 1.0)
        u = dist.rsample()
        return u.tanh(), dist.log_prob(u).sum(1)


class Corrected(Together):
    def forward(self, s):
        dist = Normal(self.mean(s), 1.0)
        u = dist.rsample()
        return u.tanh(), dist.log_prob(u).sum(1) - self.correction(u).sum(1)

    def correction(self, u):
        return 2 * (0.6931 - u - F.softplus(-2 * u))


def soft(out):
    return (0.2 * out[1] + out[0].sum(1)).mean()


@pytest.mark.parametrize("cls, names", [(Together, ["tanh_uncorrected"]), (Corrected, [])])
def test_squashed_actions(cls, names):
    assert found_in(fitting(cls(), BasicTrainCB(), loss_func=soft), batches=2) == names


class Transitions(BasicTrainCB):
    def predict(self, trainer):
        s, a, *_ = trainer.batch
        trainer.preds = trainer.model(s)[torch.arange(len(s)), a]

    def get_loss(self, trainer):
        _, _, reward, then, done = trainer.batch
        with torch.no_grad():
            trainer.loss_target = reward + 0.9 * self.lasting(done) * trainer.model(then).max(1).values
        trainer.loss = F.smooth_l1_loss(trainer.preds, trainer.loss_target)

    def lasting(self, done):
        return 1 - done


class Forgets(Transitions):
    def get_loss(self, trainer):
        _, _, reward, then, done = trainer.batch
        with torch.no_grad():
            trainer.loss_target = reward + 0.9 * trainer.model(then).max(1).values
        trainer.loss = F.smooth_l1_loss(trainer.preds, trainer.loss_target)


class ForgetsMask(Trainer):
    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        x, actions, rewards, then, mask = self.batch
        self.preds = self.model(x)
        self.loss = F.mse_loss(self.preds.mean(1), rewards) + 0 * self.model(then).sum() + 0 * actions.sum()
        if self.training:
            self.run_callbacks("backward", "step", "zero_grad")


def transitions():
    tensors = rows(), torch.randint(4, (48,)), torch.randn(48), rows(), (torch.rand(48) < 0.2).float()
    return loaders(*tensors)


def test_parts_of_a_batch_that_nobody_reads():
    assert found_in(fitting(net(), Transitions(), dls=transitions())) == []
    assert found_in(fitting(net(), Forgets(), dls=transitions())) == ["unread_part"]
    trainer = ForgetsMask(transitions(), None, optim.SGD, net(), [BasicTrainCB()])
    assert "unread_part" in found_in(trainer)


class World:
    def __init__(self, copies):
        self.state, self.copies = torch.zeros(6), copies

    def step(self):
        self.state += torch.randn(6)
        return self.state.clone() if self.copies else self.state


class Replay(BasicTrainCB):
    "Plays, and learns of what it remembers"

    def __init__(self, copies, puts_together=torch.stack):
        self.world, self.memory, self.puts_together = World(copies), [], puts_together

    def predict(self, trainer):
        self.memory += [self.world.step() for _ in range(6)]
        trainer.preds = trainer.model(self.puts_together(random.choices(self.memory, k=8)))

    def get_loss(self, trainer):
        trainer.loss = trainer.preds.square().mean()


def in_rows(states):
    return torch.cat([state[None] for state in states])


@pytest.mark.parametrize("puts_together", [torch.stack, in_rows])
def test_a_memory_of_one_state(puts_together):
    wrong, well = (fitting(net(), Replay(copies, puts_together)) for copies in (False, True))
    assert found_in(wrong, batches=2) == ["one_state"]
    assert found_in(well, batches=2) == []


# Machinery of recipes


class Uncertain:
    "Asks the model several times"

    def __init__(self, mode, event="after_epoch"):
        self.mode, self.x = mode, rows(5)
        setattr(self, event, self.look)

    @torch.no_grad()
    def look(self, trainer):
        modes = [(m, m.training) for m in trainer.model.modules()]
        trainer.model.train(self.mode)
        self.spread = torch.stack([trainer.model(self.x).softmax(1) for _ in range(5)]).var(0).mean()
        for m, mode in modes:
            m.training = mode


def test_answers_that_are_all_one():
    def plain(mode):
        dls = loaders(rows(), torch.randint(4, (48,)))
        cbs = BasicTrainCB(), Uncertain(mode)
        return found_in(fitting(net(p=0.3), *cbs, dls=dls, loss_func=F.cross_entropy), batches=2)

    assert plain(False) == ["same_answers"]
    assert "same_answers" not in plain(True)


class Chains(BasicTrainCB):
    "Rows of a buffer are moved on"

    def before_fit(self, trainer):
        self.buffer = torch.zeros(30, 6)

    def get_loss(self, trainer):
        at = torch.randperm(30)[:8]
        moved = self.buffer[at] + torch.randn(8, 6)
        self.keep(at, moved)
        trainer.loss = trainer.preds.mean() - trainer.model(moved).mean() + trainer.preds.square().mean()

    def keep(self, at, moved):
        self.buffer[at] = moved


class CopiesAway(Chains):
    def keep(self, at, moved):
        self.buffer[at].copy_(moved)


class ZeroesAway(Chains):
    def keep(self, at, moved):
        self.buffer[at] = moved
        self.buffer[self.buffer.abs() > 2].zero_()


class SetsAway(Chains):
    def keep(self, at, moved):
        self.buffer[at][:] = moved


class Views(Chains):
    def keep(self, at, moved):
        for i, row in zip(at.tolist(), moved):
            self.buffer[i].copy_(row)
        self.buffer[2:4].mul_(0.5)
        self.buffer.clamp_(-2, 2)
        mine = self.buffer[at].mul_(2)
        self.buffer.index_copy_(0, at, mine)


@pytest.mark.parametrize("cls", [CopiesAway, ZeroesAway, SetsAway])
def test_what_is_written_to_a_copy(cls):
    assert found_in(fitting(net(6, 1), cls()), batches=2) == ["written_to_copy"]


@pytest.mark.parametrize("cls", [Chains, Views])
def test_what_is_written_to_the_rows(cls):
    assert found_in(fitting(net(6, 1), cls()), batches=2) == []


class Game(Trainer):
    "Two networks; `wanted` is the label that the first is to have"

    wanted, sign = 1.0, 1

    def before_fit(self):
        self.opt_g = optim.SGD(self.model["g"].parameters(), 1e-3)
        self.opt_d = optim.SGD(self.model["d"].parameters(), 1e-3)

    def score(self, x, label):
        logits = self.model["d"](x)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        g, x = self.model["g"], self.batch[0]
        fake = g(torch.randn_like(x))
        self.loss = self.score(x, 1.0) + self.score(fake.detach(), 0.0)
        if self.training:
            self.opt_d.zero_grad()
            self.loss.backward()
            self.opt_d.step()
        loss_g = self.sign * self.score(g(torch.randn_like(x)), self.wanted)
        if self.training:
            self.opt_g.zero_grad()
            loss_g.backward()
            self.opt_g.step()


class Found(Game):
    wanted = 0.0


class Saturating(Game):
    wanted, sign = 0.0, -1


class Unpacked(Game):
    "Both networks get their names in one line"

    @with_cbs("batch", CancelBatchException)
    def one_batch(self):
        (real,) = self.batch
        g, d = self.model.g, self.model.d
        fake = g(torch.randn_like(real))
        loss_d = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
        if self.training:
            self.opt_g.zero_grad()
            self.opt_d.zero_grad()
            loss_d.backward()
            self.opt_d.step()
        self.loss = F.softplus(-d(fake)).mean()
        if self.training:
            self.loss.backward()
            self.opt_g.step()

    def before_fit(self):
        self.opt_g = optim.SGD(self.model.g.parameters(), 1e-3)
        self.opt_d = optim.SGD(self.model.d.parameters(), 1e-3)


class Networks(nn.Module):
    def __init__(self):
        super().__init__()
        self.g, self.d = net(6, 6), net(6, 1)

    def __getitem__(self, name):
        return getattr(self, name)


@pytest.mark.parametrize("cls, names", [(Game, []), (Saturating, []), (Unpacked, []), (Found, ["same_goal"])])
def test_two_networks_that_play(cls, names):
    x = rows()
    dls = DataLoaders(DataLoader(TensorDataset(x), 8, shuffle=True), DataLoader(TensorDataset(x[:16]), 8))
    trainer = cls(dls, None, None, Networks(), [MetricsCB(weigh="mean")])
    assert found_in(trainer, batches=2) == names


class Hints:
    "Compares with features of a teacher, that a hook has put into a list"

    def __init__(self, teacher):
        self.teacher, self.features = teacher.eval().requires_grad_(False), []
        teacher[0].register_forward_hook(self.keep)

    def keep(self, module, given, out):
        self.features.append(out)

    def after_get_loss(self, trainer):
        if trainer.training:
            self.teacher(trainer.batch[0])
            trainer.loss = trainer.loss + F.mse_loss(trainer.model[0](trainer.batch[0]), self.features[0])


class HintsByName(Hints):
    def __init__(self, teacher):
        self.teacher, self.features = teacher.eval().requires_grad_(False), []

        def keep(module, given, out):
            self.features.append(out)

        teacher[0].register_forward_hook(keep)


class NewList(Hints):
    def before_batch(self, trainer):
        self.features = []


class TakesOut(Hints):
    def after_batch(self, trainer):
        while self.features:
            self.features.pop()


@pytest.mark.parametrize("cls", [Hints, HintsByName, NewList, TakesOut])
def test_features_of_the_first_batch(cls):
    dls = loaders(rows(), torch.randint(4, (48,)))
    trainer = fitting(net(), BasicTrainCB(), cls(net()), dls=dls, loss_func=F.cross_entropy)
    wanted = ["first_kept"] if cls in (Hints, HintsByName) else []
    assert found_in(trainer) == wanted


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor * grad, None


class Adversary(nn.Module):
    factor = 0.5

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(Reversal.apply(x, self.factor))


class Negative(Adversary):
    factor = -0.5


class GradientReversal(nn.Module):
    def __init__(self, sign):
        super().__init__()
        self.sign = sign

    def forward(self, x):
        return self.sign * x + (x - self.sign * x).detach()


@pytest.mark.parametrize(
    "make, names",
    [
        (Adversary, ["not_reversed"]),
        (Negative, []),
        (lambda: nn.Sequential(GradientReversal(1.0), net()), ["not_reversed"]),
        (lambda: nn.Sequential(GradientReversal(-1.0), net()), []),
    ],
)
def test_reversals(make, names):
    dls = loaders(rows(), torch.randint(4, (48,)))
    assert found_in(fitting(make(), BasicTrainCB(), dls=dls, loss_func=F.cross_entropy)) == names


def unpriced(out, y):
    mean, logvar = out.chunk(2, 1)
    return (0.5 * (y - mean) ** 2 * (-logvar).exp()).mean()


def unpriced_and_clamped(out, y):
    mean, log_sigma = out.chunk(2, 1)
    log_sigma = log_sigma.clamp(-4, 4)
    return (torch.exp(-2 * log_sigma) * (y - mean).square()).mean()


def priced(out, y):
    mean, logvar = out.chunk(2, 1)
    return (0.5 * (y - mean) ** 2 * (-logvar).exp()).mean() + 0.5 * logvar.mean()


def decayed(out, y):
    return (torch.exp(-y) * (out[:, :3] - y) ** 2).mean()


class ByDoubt(nn.Module):
    "Weighs two losses"

    def __init__(self, priced):
        super().__init__()
        self.log_vars, self.priced = nn.Parameter(torch.zeros(2)), priced

    def forward(self, out, y):
        return self.plain(out, y)

    def plain(self, out, y):
        loss = F.mse_loss(out[:, :3], y)
        return torch.exp(-self.log_vars[0]) * loss


@pytest.mark.parametrize("loss, names", [(unpriced, 1), (unpriced_and_clamped, 1), (priced, 0), (decayed, 0)])
def test_doubt_that_costs_nothing(loss, names):
    dls = loaders(rows(), rows(48, 3))
    trainer = fitting(net(6, 6), BasicTrainCB(), dls=dls, loss_func=loss)
    assert found_in(trainer) == ["scale_runs_away"] * names


def test_weights_of_losses_that_cost_nothing():
    dls = loaders(rows(), rows(48, 3))
    assert "scale_runs_away" in found_in(
        fitting(net(6, 6), BasicTrainCB(), dls=dls, loss_func=ByDoubt(False))
    )


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 6)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        return torch.cat([b * s.exp() + t, a], 1), s.sum(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x, log_det = layer(x)
        return x, log_det


class Summed(Flow):
    def forward(self, x):
        total = 0.0
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        return x, total


class Listed(Flow):
    def forward(self, x):
        dets = []
        for layer in self.layers:
            x, log_det = layer(x)
            dets.append(log_det)
        return x, sum(dets)


class LastState(Flow):
    "The state of the last layer is wanted alone"

    def forward(self, x):
        for layer in self.layers:
            x, state = layer(x)
        return x, state


def flow_loss(out):
    return ((out[0] ** 2).sum(1) / 2 - out[1]).mean()


@pytest.mark.parametrize("cls", [Flow, Summed, Listed, LastState])
def test_terms_of_all_layers(cls):
    names = ["last_term"] if cls is Flow else []
    assert found_in(fitting(cls(), BasicTrainCB(), loss_func=flow_loss), batches=2) == names


class Attack:
    "Moves the inputs along the sign of the gradient"

    def __init__(self, eps=0.1, alpha=0.05, steps=4):
        self.eps, self.alpha, self.steps = eps, alpha, steps

    def before_batch(self, trainer):
        x, y = trainer.batch
        adv = x.clone()
        for _ in range(self.steps):
            adv.requires_grad_(True)
            (grad,) = torch.autograd.grad(F.cross_entropy(trainer.model(adv), y), adv)
            adv = self.moved(x, adv.detach() + self.alpha * grad.sign())
        trainer.batch = adv, y

    def moved(self, x, adv):
        return adv


class Held(Attack):
    def before_batch(self, trainer):
        x, y = trainer.batch
        delta = torch.zeros_like(x)
        for _ in range(self.steps):
            delta.requires_grad_(True)
            (grad,) = torch.autograd.grad(F.cross_entropy(trainer.model(x + delta), y), delta)
            delta = (delta.detach() + self.alpha * grad.sign()).clamp(-self.eps, self.eps)
        trainer.batch = x + delta, y


class Projected(Attack):
    def before_batch(self, trainer):
        x, y = trainer.batch
        adv = x.clone()
        for _ in range(self.steps):
            adv.requires_grad_(True)
            (grad,) = torch.autograd.grad(F.cross_entropy(trainer.model(adv), y), adv)
            adv = self.project(x, adv.detach() + self.alpha * grad.sign())
        trainer.batch = adv, y

    def project(self, x, adv):
        return torch.min(torch.max(adv, x - self.eps), x + self.eps)


def attacked(attack):
    dls = loaders(rows(), torch.randint(4, (48,)))
    return found_in(fitting(net(), BasicTrainCB(), attack, dls=dls, loss_func=F.cross_entropy))


def test_attacks_that_go_too_far():
    assert "no_projection" in attacked(Attack())
    for attack in (Held(), Projected(), Attack(alpha=0.02), Attack(steps=1)):
        assert "no_projection" not in attacked(attack)


@pytest.mark.parametrize("make, names", planted, ids=lambda o: getattr(o, "__name__", " "))
def test_a_line_that_is_wrong_is_found_by_name(make, names):
    assert found_in(make(), batches=2) == [*names]


@pytest.mark.parametrize("make", right, ids=lambda o: o.__name__)
def test_nothing_is_found_where_all_is_right(make):
    assert found_in(make(), batches=2) == []
