"""What changes in a run where nobody looks at first: a run that was stopped and goes on, against the same run
that was never stopped. Nothing of it is lost without a word.
"""

import collections
import copy
import enum
import random
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import runs
from cutting import cut_once, small_trainer, stopped_and_not, with_loss
from isaac_loop.basics.tensors import set_seed
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.trainer import Trainer
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.state.change_marks import Marker
from isaac_loop.train.training import BasicTrainCB
from runs import Cut, CutCB, Rows, fit, make_loaders, make_model, make_trainer


def with_model(make):
    set_seed(42)
    return make_trainer([BasicTrainCB(), MetricsCB(show=False)], model=make())


def with_callback(cb):
    return make_trainer([BasicTrainCB(), MetricsCB(show=False), cb])


class Net(nn.Module):
    "A model that scales its predictions by what it keeps"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.keep()

    def keep(self):
        pass

    def scaled(self, y):
        return y

    def forward(self, x):
        return self.scaled(self.layer(x))


# ---- writes that raise no version of a tensor


def by_data(mine, other):
    mine.data.mul_(0.9).add_(other.data, alpha=0.1)


def by_set(mine, other):
    mine.data = 0.9 * mine.data + 0.1 * other.data


def by_numpy(mine, other):
    mine.detach().numpy()[:] = (0.9 * mine + 0.1 * other).detach().numpy()


@pytest.mark.parametrize("move", [by_data, by_set, by_numpy])
def test_weights_of_a_teacher_go_on_however_they_are_written(move, tmp_path):
    class TeacherCB:
        def __init__(self):
            self.teacher = nn.Linear(8, 3)

        def after_predict(self, trainer):
            if trainer.training:
                for pair in zip(self.teacher.parameters(), trainer.model.layer.parameters()):
                    move(*pair)
            trainer.preds = trainer.preds + self.teacher(trainer.batch[0]).detach() * trainer.preds

    def make():
        trainer = with_model(Net)
        trainer.add_callbacks(TeacherCB())
        return trainer

    stopped_and_not(tmp_path, make, [4, 10], attributes=lambda t: t.TeacherCB.teacher.state_dict())


TENSORS = {
    "zeros": torch.zeros(64),
    "many of many bytes": torch.zeros(4096, dtype=torch.float64),
    "a part": torch.zeros(4, 6)[:, 1::2],
    "expanded": torch.zeros(3, 1).expand(3, 1000),
    "truths": torch.zeros(5, dtype=torch.bool),
    "odd bytes": torch.zeros(7, dtype=torch.bfloat16)[1:],
    "one": torch.zeros(()),
    "complex": torch.zeros(3, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_write_without_a_version_changes_the_mark(name):
    x = TENSORS[name].clone(memory_format=torch.preserve_format) if name != "expanded" else TENSORS[name]
    before, again = (Marker(set()).mark(x) for _ in range(2))
    assert before == again
    (x.data[:, :1] if name == "expanded" else x.data).fill_(1)
    assert Marker(set()).mark(x) != before


# ---- what a run changes over to


class Phase(enum.Enum):
    WARM = "warm"
    MAIN = object()


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Phased(Net):
    "Goes over to another phase after some batches"

    def keep(self):
        self.n, self.phase, self.bits = 0, Phase.WARM, None

    def scaled(self, y):
        self.n += self.training
        if self.n == 5:
            self.phase, self.bits = Phase.MAIN, Bits.A | Bits.B
        return y if self.phase is Phase.WARM else self.bits * y


def test_a_phase_goes_on(tmp_path):
    stopped_and_not(tmp_path, lambda: with_model(Phased), [4, 10], attributes=lambda t: str(t.model.phase))


class SwitchCB:
    "Works in another way after some batches"

    def __init__(self):
        self.n, self.how, self.again = 0, self.warm, self.warm

    def warm(self, preds):
        return preds

    def main(self, preds):
        return 2 * preds

    def after_predict(self, trainer):
        self.n += trainer.training
        self.again = self.warm
        if self.n == 5:
            self.how = self.main
        trainer.preds = self.how(trainer.preds)


class SwitchNet(Net):
    "Has another activation after some batches, and makes one function when it is first needed"

    def keep(self):
        self.n, self.act, self.made = 0, F.relu, None

    def scaled(self, y):
        self.made = self.made or (lambda y: y)
        self.n += self.training
        if self.n == 5:
            self.act = F.softplus
        return self.act(y)


@pytest.mark.parametrize(
    "make, path",
    [(lambda: with_callback(SwitchCB()), "SwitchCB.how"), (lambda: with_model(SwitchNet), "model.act")],
)
def test_a_function_that_takes_the_place_of_another_is_named(make, path):
    trainer = fit(make(), 1)
    with pytest.warns(UserWarning) as told:
        trainer._own_state.take(trainer)
    assert len(told) == 1 and str(told[0].message).startswith(f"`{path}` changed during this fit")


# ---- what a model shows, and what it hides

Out = namedtuple("Out", "logits size")


class Shows(Net):
    "Keeps its last output, to be looked at, and the state that it carries, in tuples with names"

    def keep(self):
        self.out = self.packed = self.carried = None

    def scaled(self, y):
        self.out = Out(y.detach(), len(y))
        self.packed = nn.utils.rnn.pack_sequence([y.detach()[0]])
        self.carried = Out(y.detach().mean(0), 1 + (self.carried.size if self.carried else 0))
        return y * (1 + self.carried.logits) / self.carried.size


def test_tuples_with_names_go_on_also_where_there_was_nothing_at_first(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stopped_and_not(tmp_path, lambda: with_model(Shows), [4, 10])


class Hides(Net):
    "Has a teacher that is not among its modules"

    def keep(self):
        object.__setattr__(self, "teacher", copy.deepcopy(self.layer))
        self.__dict__["scale"] = nn.Parameter(torch.ones(3))

    def scaled(self, y):
        if self.training:
            for mine, other in zip(self.teacher.parameters(), self.layer.parameters()):
                mine.detach().lerp_(other.detach(), 0.1)
            self.__dict__["scale"] = nn.Parameter(self.scale.detach() * 0.9)
        return y + y * self.teacher.bias.detach() * self.scale.detach()


def test_a_hidden_module_stays_hidden(tmp_path):
    trainer = stopped_and_not(tmp_path, lambda: with_model(Hides), [2, 10])
    assert list(trainer.model._modules) == ["layer"] and "teacher" in vars(trainer.model)


# ---- what modules keep beside their weights


class Scaled(nn.Module):
    "A loss that is divided by its running mean"

    def __init__(self):
        super().__init__()
        self.keep()

    def keep(self):
        self.register_buffer("mean", torch.ones(()), persistent=False)

    def forward(self, preds, targets):
        loss = F.cross_entropy(preds, targets)
        if preds.requires_grad:
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


class ScaledByAttribute(Scaled):
    def keep(self):
        self.mean = torch.ones(())


class ScaledBySaved(Scaled):
    def keep(self):
        self.register_buffer("mean", torch.ones(()))


class Around(nn.Module):
    def __init__(self, make=ScaledByAttribute):
        super().__init__()
        self.inner = make()

    def forward(self, preds, targets):
        return self.inner(preds, targets)


LOSSES = {
    "buffer": Scaled,
    "inner": Around,
    "inner buffer": lambda: Around(Scaled),
    "method": lambda: Around().forward,
    "method, saved": lambda: Around(ScaledBySaved).forward,
}


@pytest.mark.parametrize("name", LOSSES)
def test_modules_of_a_loss_go_on_with_what_they_keep(name, tmp_path):
    stopped_and_not(tmp_path, lambda: with_loss(LOSSES[name]()), [4, 10])


@pytest.mark.parametrize("make", [Around, Scaled])
def test_another_module_of_the_trainer_goes_on_with_what_it_keeps(make, tmp_path):
    class Judged(Trainer):
        def before_fit(self):
            self.judge = make()

        def get_loss(self):
            self.loss = self.judge(self.preds, self.batch[1])

    class Steps:
        predict = BasicTrainCB.predict
        backward, step, zero_grad = BasicTrainCB.backward, BasicTrainCB.step, BasicTrainCB.zero_grad

    def trainer():
        set_seed(42)
        return Judged(make_loaders(), None, optim.AdamW, make_model(), [Steps(), MetricsCB(show=False)])

    stopped_and_not(tmp_path, trainer, [4, 10])


class MoreDropoutCB:
    def after_batch(self, trainer):
        if trainer.training:
            trainer.model[3].p = min(0.5, trainer.model[3].p + 0.02)
            trainer.model[1].momentum *= 0.95


def centre(model):
    "A hook that takes the mean of what was before, kept in a buffer and in an attribute of a plain layer"
    layer = model[0]
    layer.register_buffer("mean", torch.zeros(16), persistent=False)
    layer.shift = torch.zeros(16)

    def hook(m, args, out):
        if m.training:
            m.mean = 0.9 * m.mean + 0.1 * out.detach().mean(0)
            m.shift.add_(m.mean)
        return out - m.mean - 0.1 * m.shift.clone()

    layer.register_forward_hook(hook)
    return model


def test_layers_of_pytorch_go_on_with_what_was_set(tmp_path):
    def make():
        trainer = with_callback(MoreDropoutCB())
        centre(trainer.model)
        return trainer

    stopped_and_not(tmp_path, make, [4, 10], attributes=lambda t: (t.model[3].p, t.model[1].momentum))


def test_layers_of_pytorch_hold_no_state_where_nothing_was_set():
    layers = [nn.LazyConv1d(4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(24, 3), nn.Softplus()]
    trainer = fit(make_trainer([BasicTrainCB()], model=nn.Sequential(nn.Unflatten(1, (1, 8)), *layers)), 1)
    own = {name: x["state"] for name, x in trainer._own_state.take(trainer).items() if x["state"]}
    assert set(own) <= {"model.1"}  # The lazy layer has found its shape


class Lookahead(optim.SGD):
    "Steps, and goes halfway back every few steps, where it also has some noise of its own"

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.n, self.noise = 0, torch.Generator().manual_seed(1)
        self.slow = [p.detach().clone() for p in self.weights()]

    def weights(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.n += 1
        if self.n % 3 == 0:
            for p, slow in zip(self.weights(), self.slow):
                p.data.add_(0.01 * torch.randn(p.shape, generator=self.noise))
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class Around2(optim.Optimizer):
    "Another optimizer inside, whose groups it shares, as in sharpness-aware minimization"

    def __init__(self, params, lr):
        self.base = optim.AdamW(params, lr)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups
        self.n = 0

    def step(self, closure=None):
        self.n += 1
        self.param_groups[0]["weight_decay"] = 0.01 * self.n
        return self.base.step()


@pytest.mark.parametrize("opt_func", [Lookahead, Around2])
def test_an_optimizer_of_ones_own_goes_on_with_what_it_keeps(opt_func, tmp_path):
    def make():
        return make_trainer([BasicTrainCB(), MetricsCB(show=False)], opt_func=opt_func)

    trainer = stopped_and_not(tmp_path, make, [4, 10], attributes=lambda t: t.opt.n)
    if opt_func is Around2:
        assert trainer.opt.param_groups[0] is trainer.opt.base.param_groups[0]


class FillsBuffer(Net):
    def keep(self):
        self.register_buffer("mean", None)

    def scaled(self, y):
        now = y.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return y * (1 + self.mean)


def test_a_buffer_that_the_first_batch_fills_goes_on(tmp_path):
    stopped_and_not(tmp_path, lambda: with_model(FillsBuffer), [2, 10])


# ---- who reads the data


class Noise:
    level = 0.0

    def __call__(self, x):
        return x + self.level


class NoisyRows(Rows):
    def __init__(self, n):
        super().__init__(n, augment=False)
        self.tfm, self.tfms, self.level = Noise(), [Noise()], 0.0

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return self.tfms[0](self.tfm(x)) + self.level, y


class PassesSampler(torch.utils.data.Sampler):
    "Another order in each pass, of which it counts how many there were"

    def __init__(self, data):
        self.data, self.epoch = data, 0

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        self.epoch += 1
        yield from torch.randperm(
            len(self.data), generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()


class HarderCB:
    def log(self, trainer):
        data = trainer.dls.train.dataset
        data.level += 0.3
        data.tfm.level += 0.2
        data.tfms[0].level += 0.1


def plain():
    return DataLoader(NoisyRows(56), 8, sampler=PassesSampler(range(56)))


@pytest.mark.parametrize("loader", [plain, lambda: exact_loader(NoisyRows(56), 8, seed=7)])
def test_a_curriculum_goes_on_between_epochs_behind_any_loader(loader, tmp_path):
    def run(folder, n_epochs):
        dls = DataLoaders(loader(), make_loaders().valid)
        cbs = [BasicTrainCB(), MetricsCB(show=False), HarderCB(), CheckpointCB(tmp_path / folder)]
        return fit(make_trainer(cbs, dls), n_epochs)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = run("whole", 3)
        for n in (1, 2):
            run("parts", n)
        runs.same(whole, run("parts", 3))


def test_in_a_pass_that_is_read_again_a_sampler_counts_as_if_unbroken(tmp_path):
    "The loader is read from its beginning, with what its sampler had counted by then"

    def make():
        return make_trainer(
            [BasicTrainCB(), CheckpointCB(tmp_path / "run", every=1)],
            DataLoaders(plain(), make_loaders().valid),
        )

    cut = CutCB("before_batch", lambda t: t.n_updates == 10)
    with pytest.raises(Cut):
        fit(make(), 2, callbacks=cut)
    trainer = make()
    with pytest.warns(UserWarning, match="does not know its position"):
        fit(trainer, 2)
    assert trainer.dls.train.sampler.epoch == 2


# ---- settings from which `before_fit` makes something


class WeighCB:
    def __init__(self, start):
        self.start = start

    def before_fit(self, trainer):
        self.w, self.n = self.start, 0

    def after_get_loss(self, trainer):
        self.n += 1
        trainer.loss = trainer.loss * self.w


def test_what_is_made_from_another_setting_stays_as_the_script_makes_it(tmp_path):
    def run(start, n_epochs):
        return fit(make_trainer([BasicTrainCB(), WeighCB(start), CheckpointCB(tmp_path)]), n_epochs)

    first = run(1.0, 1)
    with pytest.warns(UserWarning, match=r"`WeighCB.start=3.0` \(saved: 1.0\)"):
        second = run(3.0, 2)
    assert second.WeighCB.w == 3.0 and second.WeighCB.n == 2 * first.WeighCB.n
    assert run(3.0, 3).WeighCB.w == 3.0


# ---- what is long, and what is equal but of another kind


class Replay(Net):
    "Remembers very many pairs, and takes the place of the oldest"

    def keep(self):
        self.pairs, self.n = [(i, torch.tensor(0.0)) for i in range(10_001)], 0

    def scaled(self, y):
        if self.training:
            self.pairs[self.n % 10_001] = self.n, y.detach().mean()
            self.n += 1
        return y * (1 + self.pairs[0][1] + self.pairs[1][1])


def test_very_many_pairs_go_on(tmp_path):
    stopped_and_not(tmp_path, lambda: with_model(Replay), [4, 10])


class Places(Net):
    "Marks very many places as seen, under keys that change"

    def keep(self):
        self.seen = {(i, 0): True for i in range(10_001)}

    def scaled(self, y):
        if self.training:
            key = next(iter(self.seen))
            del self.seen[key]
            self.seen[key[0], 1] = True
        return y * (1 + next(iter(self.seen))[0])


def test_very_many_keys_go_on(tmp_path):
    stopped_and_not(tmp_path, lambda: with_model(Places), [4, 10])


class Flags(Net):
    "Has numbers first, and truths later"

    def keep(self):
        self.n, self.flags = 0, [0, 1]

    def scaled(self, y):
        self.n += self.training
        if self.n == 4:
            self.flags = [False, True]
        return y * (2 if self.flags[1] is True else 1)


def test_truths_that_equal_the_numbers_of_before_go_on(tmp_path):
    stopped_and_not(tmp_path, lambda: with_model(Flags), [6, 10])


class StreamCB:
    "Draws further batches from a loader of PyTorch, beginning once a fit"

    def before_fit(self, trainer):
        self.it = iter(DataLoader(torch.arange(100.0), 4))

    def before_batch(self, trainer):
        x, y = trainer.batch
        trainer.batch = x + next(self.it).mean(), y


def test_an_iterator_of_pytorch_that_has_moved_on_is_named():
    trainer = fit(with_callback(StreamCB()), 1)
    with pytest.warns(UserWarning, match="`StreamCB.it` changed during this fit"):
        trainer._own_state.take(trainer)


# ---- modes that somebody switches on the way


def test_a_layer_that_was_put_into_evaluation_in_a_pass_stays_so_until_its_end(tmp_path):
    def after_step(trainer):
        if (trainer.epoch, trainer.batch_num) == (1, 0):
            trainer.model[1].eval()

    def make():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        return small_trainer(after_step, model=model)

    cut_once(tmp_path, make, lambda t: t.model[1].num_batches_tracked.item())


class ModalLoss(nn.Module):
    def forward(self, preds, targets):
        return F.mse_loss(preds, targets) * (1 + self.training)


def test_a_module_beside_the_model_stays_in_the_mode_that_it_was_put_into(tmp_path):
    def log(trainer):
        trainer.loss_func.eval()

    assert not cut_once(tmp_path, lambda: small_trainer(log, loss=ModalLoss())).loss_func.training


# ---- what is made on the way


class NoiseCB:
    "Makes its source of numbers, and a place to count in, at its first batch"

    source = None

    def __init__(self, new, draw):
        self.new, self.draw = new, draw

    def after_get_loss(self, trainer):
        if self.source is None:
            self.source = self.new()
        trainer.loss = trainer.loss * (1 + self.draw(self.source))


class OwnRandom(random.Random):
    pass


def counted(counts):
    counts["n"] += 1
    return counts["n"] / 10


GENERATORS = {
    "Python's": (lambda: random.Random(3), lambda x: x.random()),
    "PyTorch's": (lambda: torch.Generator().manual_seed(3), lambda x: torch.rand((), generator=x)),
    "NumPy's": (lambda: np.random.default_rng(3), lambda x: x.random()),
    "NumPy's of another kind": (lambda: np.random.Generator(np.random.SFC64(3)), lambda x: x.random()),
    "NumPy's of old": (lambda: np.random.RandomState(3), lambda x: x.rand()),
    "only the bits": (lambda: np.random.Philox(3), lambda x: x.random_raw() % 1000 / 1000),
    "a defaultdict": (lambda: collections.defaultdict(int), counted),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_what_anybody_can_make_again_goes_on_though_it_was_made_on_the_way(name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer = cut_once(tmp_path, lambda: small_trainer(NoiseCB(*GENERATORS[name])))
    if name == "a defaultdict":
        assert trainer.NoiseCB.source["new"] == 0


@pytest.mark.parametrize(
    "new, draw",
    [
        (lambda: OwnRandom(3), lambda x: x.random()),
        (lambda: collections.defaultdict(lambda: 0), counted),
    ],
)
def test_what_nobody_can_make_again_is_named_at_the_save_and_is_not_there_afterwards(new, draw, tmp_path):
    saving = lambda: CheckpointCB(tmp_path, every=2)
    with pytest.warns(UserWarning, match="`NoiseCB.source` changed during this fit and cannot be kept"):
        fit(small_trainer(NoiseCB(new, draw)), 2, valid=False, callbacks=saving())
    trainer = small_trainer(NoiseCB(new, draw))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(trainer, 2, valid=False, callbacks=saving())
    assert "source" not in vars(trainer.NoiseCB)
