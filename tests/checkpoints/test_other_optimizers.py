"An optimizer that is not of PyTorch's class goes on as the others do."

import warnings
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.trainer import Trainer
from isaac_loop.schedule.attribute_schedule import AttributeSchedulerCB
from isaac_loop.schedule.schedulers import EpochSchedulerCB
from isaac_loop.state.errors import ResumeMismatch, UnsaveableState
from isaac_loop.state.store import CheckpointStore
from isaac_loop.train.training import BasicTrainCB
from runs import Cut, CutCB


class Both:
    "Two optimizers as one, which does not tell its state"

    def __init__(self, params, lr):
        weight, bias = params
        self.a, self.b = optim.Adam([weight], lr), optim.SGD([bias], lr, momentum=0.9)

    @property
    def param_groups(self):
        return self.a.param_groups + self.b.param_groups

    def step(self):
        self.a.step()
        self.b.step()

    def zero_grad(self):
        self.a.zero_grad()
        self.b.zero_grad()


class BothTold(Both):
    def state_dict(self):
        return dict(a=self.a.state_dict(), b=self.b.state_dict())

    def load_state_dict(self, state):
        self.a.load_state_dict(state["a"])
        self.b.load_state_dict(state["b"])


class Lookahead:
    "Goes back halfway after every third step"

    def __init__(self, params, lr):
        self.base = optim.Adam(params, lr)
        self.param_groups, self.n = self.base.param_groups, 0
        self.slow = [p.detach().clone() for p in self._params()]

    def _params(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self):
        self.base.step()
        self.n += 1
        if self.n % 3:
            return
        for slow, p in zip(self.slow, self._params()):
            p.copy_(slow.lerp_(p, 0.5))

    def zero_grad(self):
        self.base.zero_grad()


class ByHand:
    "Momentum in a list that its state is, without groups"

    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr
        self.moved = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        for moved, p in zip(self.moved, self.params):
            p.sub_(self.lr * moved.mul_(0.9).add_(p.grad))

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def state_dict(self):
        return [moved.clone() for moved in self.moved]

    def load_state_dict(self, state):
        self.moved = state


class ByParameter(ByHand):
    "Keeps its momentum where nobody can save it"

    state_dict = None

    def __init__(self, params, lr):
        self.params, self.lr, self.by = list(params), lr, {}

    @property
    def moved(self):
        return [self.by.setdefault(p, torch.zeros_like(p)) for p in self.params]


class ManyCB(BasicTrainCB):
    "Steps with several optimizers in a list"

    def step(self, trainer):
        for opt in trainer.opt:
            opt.step()

    def zero_grad(self, trainer):
        for opt in trainer.opt:
            opt.zero_grad()


def several(params, lr):
    weight, bias = params
    return [optim.Adam([weight], lr), optim.SGD([bias], lr, momentum=0.9)]


def make(opt_func, *callbacks, train=None):
    torch.manual_seed(0)
    rows, model = torch.randn(16, 5), nn.Linear(5, 1)
    dls = DataLoaders(exact_loader(TensorDataset(rows, rows.sum(1, keepdim=True)), 4, seed=1))
    return Trainer(dls, F.mse_loss, opt_func, model, [train or BasicTrainCB(), *callbacks])


def cut_after(n):
    return CutCB("after_batch", lambda trainer: trainer.n_updates == n)


def fit(trainer, n_epochs=3):
    trainer.fit(n_epochs, lr=0.05, valid=False)
    return trainer


@pytest.mark.parametrize("n, every", [(4, "epoch"), (6, 1)])
@pytest.mark.parametrize("opt_func", [Both, BothTold, Lookahead, ByHand, several])
def test_a_run_with_an_optimizer_of_another_class_goes_on(opt_func, n, every, tmp_path):
    train = ManyCB() if opt_func is several else None
    whole = fit(make(opt_func, train=train))
    with pytest.raises(Cut):
        fit(make(opt_func, CheckpointCB(tmp_path, every=every), cut_after(n), train=train))
    resumed = fit(make(opt_func, CheckpointCB(tmp_path, every=every), train=train))
    assert resumed.n_updates == whole.n_updates
    for p, q in zip(resumed.model.parameters(), whole.model.parameters()):
        assert torch.equal(p, q)


def test_a_schedule_follows_the_groups_of_an_optimizer_inside(tmp_path):
    "Also after a state was loaded, for which PyTorch makes new groups"

    def falling():
        return AttributeSchedulerCB({"opt.lr": lambda progress: 0.05 * (1.1 - progress)})

    whole = fit(make(BothTold, falling()))
    with pytest.raises(Cut):
        fit(make(BothTold, falling(), CheckpointCB(tmp_path, every=1), cut_after(6)))
    resumed = fit(make(BothTold, falling(), CheckpointCB(tmp_path, every=1)))
    for p, q in zip(resumed.model.parameters(), whole.model.parameters()):
        assert torch.equal(p, q)


def test_what_such_an_optimizer_tells_stands_with_the_others(tmp_path):
    fit(make(BothTold, CheckpointCB(tmp_path)), 1)
    _, saved, _ = CheckpointStore(tmp_path, read_only=True).load()
    assert set(saved["opts"]["opt"]) == {"a", "b"} and saved["opt_classes"] == {"opt": "BothTold"}


@pytest.mark.parametrize("then, now", [(BothTold, optim.Adam), (optim.Adam, BothTold), (Both, BothTold)])
def test_another_optimizer_is_refused_whatever_its_class(then, now, tmp_path):
    fit(make(then, CheckpointCB(tmp_path)), 1)
    with pytest.raises(ResumeMismatch, match="`trainer.opt`: its class was|the optimizers: saved were"):
        fit(make(now, CheckpointCB(tmp_path)), 2)


def test_what_cannot_be_kept_of_an_optimizer_is_named(tmp_path):
    with pytest.warns(UserWarning, match=r"`trainer.opt.by` changed .* give the optimizer `state_dict\(\)`"):
        fit(make(ByParameter, CheckpointCB(tmp_path)), 1)


def test_a_scheduler_of_pytorch_says_which_optimizers_it_takes():
    step = partial(optim.lr_scheduler.StepLR, step_size=1)
    with pytest.raises(TypeError) as raised:
        fit(make(Both, EpochSchedulerCB(step)))
    told = raised.value.__notes__[0]
    assert "a `Both` is not" in told and "AttributeSchedulerCB({'opt.lr': f})" in told


def test_an_optimizer_whose_base_was_not_made_is_refused_before_it_trains(tmp_path):
    class Forgetful(optim.Optimizer):
        def __init__(self, params, lr):
            self.param_groups, self.state, self.defaults = [dict(params=params, lr=lr)], {}, {}

        def step(self):
            raise AssertionError("It has trained")

    with pytest.raises(TypeError, match=r"`__init__` has not called .* `super\(\).__init__"):
        fit(make(Forgetful, CheckpointCB(tmp_path)))


def test_an_optimizer_that_remembers_an_exchanged_layer_is_named_with_the_cure(tmp_path):
    forgets = False

    def log(trainer):
        old, trainer.model[0] = trainer.model[0], nn.Linear(5, 1)
        trainer.opt.param_groups[0]["params"] = list(trainer.model.parameters())
        if forgets:
            for p in old.parameters():
                trainer.opt.state.pop(p, None)

    def with_head(folder):
        trainer = make(optim.Adam, log, CheckpointCB(folder))
        trainer.model = nn.Sequential(trainer.model)
        return trainer

    told = r"`trainer.opt`, of class `Adam`, remembers 2 parameters .* `trainer.opt.state.pop\(p, None\)`"
    with pytest.raises(UnsaveableState, match=told):
        fit(with_head(tmp_path / "one"), 1)
    forgets = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That a run which is broken off cannot go on is told elsewhere
        assert fit(with_head(tmp_path / "two"), 1).CheckpointCB.path.exists()


class Proximal(optim.SGD):
    "Pulls towards the weights that it was made with"

    def __init__(self, params, lr, pull=0.5):
        super().__init__(params, lr)
        self.pull, self.params = pull, [p for group in self.param_groups for p in group["params"]]
        self.start = [p.detach().clone() for p in self.params]
        self.norm = float(sum(p.norm() for p in self.start))

    @torch.no_grad()
    def step(self):
        for p, start in zip(self.params, self.start):
            p.grad.add_(p - start, alpha=self.pull * self.norm)
        super().step()


@pytest.mark.parametrize("in_same_process", [False, True])
def test_what_an_optimizer_has_made_of_the_first_weights_comes_back(in_same_process, tmp_path):
    whole, cut = fit(make(Proximal)), make(Proximal, CheckpointCB(tmp_path, every=2), cut_after(5))
    with pytest.raises(Cut):
        fit(cut)
    if in_same_process:
        cut.remove_callback("Cut at after_batch")
    else:
        cut = make(Proximal, CheckpointCB(tmp_path, every=2))
        with torch.no_grad():
            cut.model.weight.zero_()  # A script without a seed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(cut)
    assert torch.equal(cut.model.weight, whole.model.weight)


class Anchor:
    def __init__(self, start):
        self.start = start


class InObject(Proximal):
    "Has its copies in an object, and in a module"

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.anchor, self.frozen = Anchor(self.start), nn.ParameterList(p.clone() for p in self.start)
        self.start = None

    def step(self):
        pairs = zip(self.anchor.start, self.frozen)
        self.start = [(a + b.detach()) / 2 for a, b in pairs]
        super().step()
        self.start = None


class Around:
    "Has another optimizer inside, and tells no state"

    def __init__(self, params, lr):
        self.inner = Proximal(params, lr)

    @property
    def param_groups(self):
        return self.inner.param_groups

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


def two(params, lr):
    weight, bias = params
    return [Proximal([weight], lr), optim.SGD([bias], lr, momentum=0.9)]


@pytest.mark.parametrize("opt_func", [InObject, Around, two])
def test_it_comes_back_from_wherever_the_optimizer_has_it(opt_func, tmp_path):
    train = ManyCB() if opt_func is two else None
    whole = fit(make(opt_func, train=train))
    with pytest.raises(Cut):
        fit(make(opt_func, CheckpointCB(tmp_path, every=2), cut_after(5), train=train))
    again = make(opt_func, CheckpointCB(tmp_path, every=2), train=train)
    with torch.no_grad():
        again.model.weight.zero_()  # A script without a seed
    fit(again)
    assert torch.equal(again.model.weight, whole.model.weight)


@pytest.mark.parametrize(
    "was, now", [({"limit": 0.1}, {"limit": 5.0}), (torch.tensor(1.0), torch.tensor(3.0)), (0.1, 5.0)]
)
def test_what_the_script_gives_is_never_written_to(was, now, tmp_path):
    class Given(optim.SGD):
        def __init__(self, params, lr, config):
            super().__init__(params, lr)
            self.config, self._config = config, config

    fit(make(partial(Given, config=was), CheckpointCB(tmp_path)), 1)
    again = make(partial(Given, config=now), CheckpointCB(tmp_path))
    with pytest.warns(UserWarning, match="`trainer.opt.config.*saved.*`trainer.opt._config"):
        fit(again, 2)
    assert again.opt.config is now and again.opt._config is now and now in ({"limit": 5.0}, 3.0, 5.0)


def test_copies_by_the_id_of_a_parameter_are_named(tmp_path):
    class ById(Proximal):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.by_id = {id(p): start for p, start in zip(self.params, self.start)}

    with pytest.warns(UserWarning, match="`trainer.opt.by_id` was made"):
        fit(make(ById, CheckpointCB(tmp_path)), 1)


def test_what_the_script_gives_an_optimizer_stays_and_is_told_of(tmp_path):
    with pytest.raises(Cut):
        fit(make(Proximal, CheckpointCB(tmp_path, every=2), cut_after(5)))
    now = make(partial(Proximal, pull=0.7), CheckpointCB(tmp_path, every=2))
    with pytest.warns(UserWarning, match=r"`trainer.opt.pull=0.7` \(saved: 0.5\)"):
        fit(now)
    assert now.opt.pull == 0.7


def test_what_an_optimizer_has_made_and_nobody_can_keep_is_named_but_for_what_only_names_parameters(tmp_path):
    class ByKeys(Proximal):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.first = dict(zip(self.params, self.start))
            self.numbers = {p: i for i, p in enumerate(self.params)}

    with pytest.warns(
        UserWarning, match="`trainer.opt.first` was made in this fit and cannot be kept"
    ) as told:
        fit(make(ByKeys, CheckpointCB(tmp_path)), 1)
    assert not any("opt.numbers" in str(o.message) for o in told)


@pytest.mark.parametrize("opt_func", [optim.Adam, Proximal, Lookahead, BothTold])
def test_a_fit_with_keep_opt_goes_on_with_what_was_loaded(opt_func, tmp_path):
    whole = fit(make(opt_func), 1)
    whole.fit(1, valid=False, keep_opt=True)
    fit(make(opt_func, CheckpointCB(tmp_path)), 1)
    again = make(opt_func)
    with torch.no_grad():
        again.model.weight.zero_()
    again.load(tmp_path)
    again.fit(1, valid=False, keep_opt=True)
    assert torch.equal(again.model.weight, whole.model.weight)
