"""What a script changes in the course of a run, and what somebody changes in the script between two starts.

The first goes on as if the run had never stopped; the second is told, since the result is another one.
"""

import collections
import dataclasses
import random
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import Dataset

from isaac_loop.all import (
    AccumulationCB,
    BasicTrainCB,
    BatchNormEvalCB,
    CheckpointCB,
    ClipGradCB,
    DataLoaders,
    EMACB,
    FreezeCB,
    MetricsCB,
    MixedPrecisionCB,
    NBatchCB,
    ReplayLoader,
    RewindCB,
    Trainer,
    exact_loader,
    set_seed,
)
from isaac_loop.state.errors import ResumeMismatch
from isaac_loop.state.script_facts import other_facts, script_facts

N = 20


class Rows(Dataset):
    def __init__(self):
        self.x = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i] + self.noise(), i % 3

    def noise(self):
        return 0


class Noisy(Rows):
    "Draws from generators of its own"

    def __init__(self):
        super().__init__()
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)
        self.torch = torch.Generator().manual_seed(1)

    def noise(self):
        return (
            self.numpy.normal() + self.python.random() + torch.randn((), generator=self.torch).item()
        ) / 10


class Jitter:
    def __init__(self):
        self.rng = random.Random(4)

    def __call__(self, x):
        return x + self.rng.random()


class Jittered(Rows):
    "Draws by a transform that it holds"

    def __init__(self):
        super().__init__()
        self.tfms = {"noise": [Jitter()]}

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return self.tfms["noise"][0](x), y


class Held(Rows):
    "Draws by something that it holds, with much beside it"

    def __init__(self, draw):
        super().__init__()
        self.boxes = [{"box": [[1, 2], [3, 4]], "label": [i]} for i in range(90)]
        self.draw = draw

    def noise(self):
        return self.draw() / 10


class SlottedJitter:
    __slots__ = ("rng",)

    def __init__(self):
        self.rng = random.Random(1)

    def __call__(self):
        return self.rng.random()


class NoiseLayer(nn.Module):
    "Draws from a generator of its own"

    def __init__(self):
        super().__init__()
        self.of = SimpleNamespace(rng=torch.Generator().manual_seed(2))

    def forward(self, x=0):
        return x + torch.randn((), generator=self.of.rng)


class OfClass:
    rng = random.Random(4)

    def __call__(self):
        return self.rng.random()


class QueueOfJitters:
    def __init__(self):
        self.jitters = collections.deque([SlottedJitter()])

    def __call__(self):
        return self.jitters[0]()


def of_keyword():
    def draw(*, rng):
        return rng.random()

    draw.__kwdefaults__ = {"rng": random.Random(3)}  # Another one for each, as in a script that is begun anew
    return draw


def of_class():
    OfClass.rng.seed(4)
    return OfClass()


DRAWING = {
    "module": NoiseLayer,
    "slots": SlottedJitter,
    "deque": QueueOfJitters,
    "keyword": of_keyword,
    "class": of_class,
    "built-in": lambda: random.Random(3).random,
}


def jittered_batches():
    rng = random.Random(5)

    def collate(rows):
        x, y = torch.utils.data.default_collate(rows)
        return x + rng.random(), y

    return collate


class CutCB:
    def __init__(self, at):
        self.at = at

    def after_batch(self, trainer):
        if trainer.n_updates == self.at:
            raise RuntimeError("power cut")


class ThawCB:
    "Lets the first layer learn from the second epoch on"

    def before_fit(self, trainer):
        trainer.model[0].requires_grad_(False)

    def before_epoch(self, trainer):
        if trainer.epoch == 1:
            trainer.model[0].requires_grad_(True)


class ThawInPassCB(ThawCB):
    "Lets it learn in the middle of a pass"

    before_epoch = None

    def after_batch(self, trainer):
        if trainer.n_updates == 7:
            trainer.model[0].requires_grad_(True)


def make(
    callbacks,
    folder=None,
    cut=None,
    data=Rows,
    every=2,
    layers=None,
    saving=CheckpointCB,
    collate=None,
    model=nn.ReLU,
):
    set_seed(3)
    layers = layers or (model(), nn.Dropout(0.1))
    model = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 3))
    dls = DataLoaders(exact_loader(data(), 4, 1, in_memory=False, collate_fn=collate and collate()))
    made = [o() for o in callbacks]
    made += [saving(folder, every=every)] if folder else []
    made += [CutCB(cut)] if cut else []
    return Trainer(dls, F.cross_entropy, optim.Adam, model, [BasicTrainCB(), MetricsCB(show=False), *made])


def outcome(trainer):
    return [p.tolist() for p in trainer.model.parameters()], [
        p.requires_grad for p in trainer.model.parameters()
    ]


def goes_on(tmp_path, callbacks, cut, **options):
    "Whole, and cut and begun again by a new script"
    whole = make(callbacks, **{k: o for k, o in options.items() if k in ("data", "collate", "model")})
    whole.fit(4, lr=0.01, valid=False)
    with pytest.raises(RuntimeError, match="power cut"):
        make(callbacks, tmp_path, cut, **options).fit(4, lr=0.01, valid=False)
    again = make(callbacks, tmp_path, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.fit(4, lr=0.01, valid=False)
    assert outcome(again) == outcome(whole)


@pytest.mark.parametrize("thaw", [ThawCB, ThawInPassCB])
@pytest.mark.parametrize("every", ["epoch", 2])
@pytest.mark.parametrize("cut", [6, 9, 12, 18])
def test_layers_that_a_callback_has_thawed_are_thawed_when_the_run_goes_on(tmp_path, thaw, every, cut):
    goes_on(tmp_path, [thaw], cut, every=every)


@pytest.mark.parametrize("every", ["epoch", 2])
@pytest.mark.parametrize("cut", [8, 13])
@pytest.mark.parametrize("data", [Noisy, Jittered, lambda: torch.utils.data.ConcatDataset([Jittered()] * 2)])
def test_generators_of_a_dataset_go_on(tmp_path, data, every, cut):
    goes_on(tmp_path, [], cut, data=data, every=every)


@pytest.mark.parametrize("every", ["epoch", 2])
@pytest.mark.parametrize("kind", DRAWING)
def test_generators_go_on_wherever_they_lie(tmp_path, kind, every):
    goes_on(tmp_path, [], 8, data=lambda: Held(DRAWING[kind]()), every=every)


@pytest.mark.parametrize("every", ["epoch", 2])
def test_a_generator_of_the_model_goes_on(tmp_path, every):
    goes_on(tmp_path, [], 8, every=every, model=NoiseLayer)


class Carrying(nn.Module):
    "Carries a hidden state with its graph, counts, and remembers"

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)
        self.hidden, self.n_calls, self.bank, self.name = None, 0, [], "carries"
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, x):
        y = self.out(x)
        if self.hidden is not None:
            y = y + self.hidden.detach()
        self.hidden, self.n_calls = 0.5 * y.mean(0), self.n_calls + 1
        self.bank.append(y.detach().mean())
        del self.bank[:-3]
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y / self.n_calls + sum(self.bank) + self.mean


@pytest.mark.parametrize("every", ["epoch", 2])
@pytest.mark.parametrize("inside", [False, True])
def test_what_a_model_carries_in_plain_attributes_goes_on(tmp_path, every, inside):
    model = (lambda: nn.Sequential(nn.ReLU(), Carrying())) if inside else Carrying
    goes_on(tmp_path, [], 8, every=every, model=model)


class Late(nn.Module):
    "Has its hidden state from the first batch on only"

    hidden = None

    def forward(self, x):
        hidden = torch.zeros(8) if self.hidden is None else self.hidden
        self.hidden = (0.9 * hidden + x.mean(0)).detach()
        return x + self.hidden


@pytest.mark.parametrize("every", ["epoch", 2])
def test_what_a_model_carries_from_its_first_batch_on_goes_on(tmp_path, every):
    goes_on(tmp_path, [], 8, every=every, model=Late)


def test_what_a_model_carries_and_cannot_be_kept_is_named(tmp_path):
    class Iterating(Late):
        def __init__(self):
            super().__init__()
            self.steps = iter(range(10**6))

        def forward(self, x):
            next(self.steps)
            return super().forward(x)

    with pytest.warns(UserWarning, match=r"`model\.1\.steps` changed.*attributes, or, if nothing is lost"):
        make([], tmp_path, model=Iterating).fit(1, lr=0.01, valid=False)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple


class Telling(nn.Module):
    "Keeps what it gave last, so that one can look at it"

    def forward(self, x):
        self.attention, self.maps = x.softmax(-1), [x, x.detach()]
        self.last, self.cut = Output(x, (x, x)), slice(1, 3)
        self.spread = torch.distributions.Normal(x.detach().mean(), 1.0)
        return x


def test_what_a_model_only_shows_is_no_reason_to_warn(tmp_path):
    goes_on(tmp_path, [], 8, every=2, model=Telling)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make([], tmp_path / "b", model=Telling).fit(1, lr=0.01, valid=False)


class Masked(nn.Module):
    "Has a mask, as language models do, which is made by the script"

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(300, 300), persistent=False)

    def forward(self, x):
        return x * self.mask[0, 0]


class MoveCB:
    "Moves the model to another device, as far as one can see"

    def before_fit(self, trainer):
        for module in trainer.model.modules():
            for name, x in module._buffers.items():
                setattr(module, name, x.clone())


def test_what_was_only_moved_to_a_device_is_not_saved(tmp_path):
    goes_on(tmp_path, [MoveCB], 8, model=Masked)
    assert max(o.stat().st_size for o in tmp_path.rglob("*") if o.is_file()) < 100_000


def test_a_session_of_another_library_stays_that_of_the_script(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/tracks.py").write_text(
        "import uuid\nclass Run:\n"
        "    def __init__(self): self.id, self.step = uuid.uuid4().hex, 0\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *args): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    import tracks

    class TrackCB:
        def before_fit(self, trainer):
            self.run = tracks.Run()
            self.began = self.run.id

        def after_batch(self, trainer):
            self.run.step += 1

    with pytest.raises(RuntimeError, match="power cut"):
        make([TrackCB], tmp_path / "run", 8).fit(4, lr=0.01, valid=False)
    again = make([TrackCB], tmp_path / "run")
    again.fit(4, lr=0.01, valid=False)
    assert again.TrackCB.run.step < again.n_updates


class Buffer(torch.utils.data.Dataset):
    "Rows that were met, as a dataset so that others can read them"

    def __init__(self):
        self.rows = []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Game:
    "Has a place, and can be closed"

    place = 0.0

    def move(self):
        self.place = 0.9 * self.place + random.random()
        return self.place

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass


class Hardest(torch.utils.data.Sampler):
    "Tells how often each row was met"

    def __init__(self):
        self.met = torch.zeros(3)

    def __iter__(self):
        return iter(range(3))


class PlayCB:
    def before_fit(self, trainer):
        self.buffer, self.game, self.sampler = Buffer(), Game(), Hardest()

    def before_batch(self, trainer):
        self.buffer.rows.append(self.game.move())
        self.sampler.met += self.buffer[random.randrange(len(self.buffer))]
        trainer.batch = trainer.batch[0] + self.sampler.met.mean() / 10, trainer.batch[1]


@pytest.mark.parametrize("every", ["epoch", 2])
def test_buffers_that_are_datasets_and_games_that_can_be_closed_go_on(tmp_path, every):
    goes_on(tmp_path, [PlayCB], 8, every=every)


class MeetsCB:
    "Holds the data of the training loader, which however large is no state of a callback"

    def before_fit(self, trainer):
        self.data = trainer.dls.train.dataset

    def after_batch(self, trainer):
        self.data.cache.append(torch.zeros(1000))


class Caching(Rows):
    stateless = "cache"  # A run that goes on fills it anew

    def __init__(self):
        super().__init__()
        self.cache = []


def test_data_of_a_loader_are_not_saved_with_a_callback_that_holds_them(tmp_path):
    goes_on(tmp_path, [MeetsCB], 8, data=Caching)
    assert max(o.stat().st_size for o in tmp_path.rglob("*") if o.is_file()) < 100_000


@pytest.mark.parametrize("cut", [8, 13])
def test_generators_of_the_function_that_makes_batches_go_on(tmp_path, cut):
    goes_on(tmp_path, [], cut, every=2, collate=jittered_batches)


def test_a_rewind_freezes_what_was_frozen_then():
    trainer = make([ThawCB, lambda: RewindCB(every=1)])
    trainer.fit(1, lr=0.01, valid=False)
    assert not trainer.model[0].weight.requires_grad


def changed(tmp_path, was, now, **options):
    "The warnings of a run that goes on with other callbacks or layers"
    with pytest.raises(RuntimeError, match="power cut"):
        make(was, tmp_path, 7).fit(4, lr=0.01, valid=False)
    again = make(now, tmp_path, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again.fit(4, lr=0.01, valid=False)
    return [str(o.message) for o in told if "goes on otherwise" in str(o.message)]


class FirstCB:
    def after_backward(self, trainer):
        pass


class SecondCB:
    def after_backward(self, trainer):
        pass


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ([lambda: ClipGradCB(0.1)], [lambda: ClipGradCB(0.01)], "`ClipGradCB(0.01)` was `ClipGradCB(0.1)`"),
        (
            [lambda: AccumulationCB(2)],
            [lambda: AccumulationCB(3)],
            "`AccumulationCB(3)` was `AccumulationCB()`",
        ),
        ([lambda: EMACB(0.1)], [lambda: EMACB(0.4)], "was `EMACB(0.1"),
        ([lambda: FreezeCB("0", until=2)], [lambda: FreezeCB("0", until=3)], "was `FreezeCB('0', until=2)`"),
        ([MixedPrecisionCB], [], "`MixedPrecisionCB` has gone"),
        ([], [MixedPrecisionCB], "`MixedPrecisionCB` is new"),
        ([FirstCB, SecondCB], [SecondCB, FirstCB], "`SecondCB`, `FirstCB`, and came as"),
    ],
)
def test_other_callbacks_than_in_the_saved_run_are_told(tmp_path, was, now, words):
    told = changed(tmp_path, was, now)
    assert len(told) == 1 and words in told[0]


def test_callbacks_of_ones_own_may_come_and_go(tmp_path):
    "Nobody knows whether they take part, and those that end a run on purpose never come again"
    assert changed(tmp_path, [FirstCB], [SecondCB]) == []


class CountsCB:
    def __init__(self):
        self.n = 0

    def after_backward(self, trainer):
        self.n += 1


class CountsForItselfCB(CountsCB):
    stateless = True


def test_a_callback_of_ones_own_that_holds_something_is_told_if_it_is_new(tmp_path):
    told = changed(tmp_path, [FirstCB], [FirstCB, CountsCB])
    assert len(told) == 1 and "saved: `CountsCB` is new. If" in told[0]


def test_it_is_not_if_nothing_need_be_kept_of_it(tmp_path):
    assert changed(tmp_path, [FirstCB], [FirstCB, CountsForItselfCB]) == []


def test_another_model_with_the_same_weights_is_told(tmp_path):
    told = changed(tmp_path, [], [], layers=(nn.Tanh(), nn.Dropout(0.5)))
    assert len(told) == 1 and "the model has `(1): Tanh()` for `(1): ReLU()` and 1 more lines" in told[0]


@pytest.mark.parametrize(
    ("was", "now", "line"),
    [
        ((), (nn.ReLU(),), "the model has `(1): ReLU()`"),
        ((nn.ReLU(),), (), "the model goes without `(1): ReLU()`"),
        ((), (nn.ReLU(), nn.Tanh()), "the model has `(1): ReLU()` and 1 more lines"),
        (
            (nn.Tanh(),),
            (nn.ReLU(), nn.Tanh()),
            "the model has `(1): ReLU()` for `(1): Tanh()` and 1 more lines",
        ),
        (
            (nn.ReLU(),) * 400,
            (nn.ReLU(),) * 399 + (nn.Tanh(),),
            "the model has `(400): Tanh()` for `(400): ReLU()`",
        ),
    ],
)
def test_a_layer_that_has_come_or_gone_is_told_and_none_beside_it(was, now, line):
    def scripted(layers):
        return SimpleNamespace(callbacks=[], model=nn.Sequential(nn.Linear(2, 2), *layers))

    assert other_facts(scripted(now), dict(script=script_facts(scripted(was)))) == [line]


class FreezeFirstCB:
    "Stands for a script that freezes a layer before it fits"

    def before_fit(self, trainer):
        trainer.model[0].requires_grad_(False)


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ([FreezeFirstCB], [], "`0.bias` (and 1 more) was frozen, and is not, which has no effect"),
        ([], [FreezeFirstCB], "`0.bias` (and 1 more) is frozen, and was not, which has no effect"),
        ([ThawCB], [FreezeFirstCB], ""),
    ],
)
def test_a_script_that_freezes_other_layers_is_told_that_this_has_no_effect(tmp_path, was, now, words):
    told = changed(tmp_path, was, now)
    assert [words in o for o in told] == [True] * bool(words)


@pytest.mark.parametrize("every", [1, "epoch"])
@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ([lambda: FreezeCB("0", until=3)], [], "`FreezeCB` has gone"),
        ([lambda: FreezeCB("0", until=3)], [lambda: FreezeCB("0", until=1)], "was `FreezeCB('0', until=3)`"),
        ([lambda: FreezeCB("0")], [lambda: FreezeCB("3")], "was `FreezeCB('0')`"),
    ],
)
def test_what_only_a_callback_froze_learns_again_without_it(tmp_path, every, was, now, words):
    with pytest.raises(RuntimeError, match="power cut"):
        make(was, tmp_path, 7, every=every).fit(4, lr=0.01, valid=False)
    again = make(now, tmp_path, every=every)
    before = again.model[0].weight.detach().clone()
    with pytest.warns(UserWarning, match=re.escape(words)):
        again.fit(4, lr=0.01, valid=False)
    assert all(p.requires_grad for p in again.model.parameters())
    assert not torch.equal(again.model[0].weight, before)


def test_what_the_run_has_thawed_is_not_put_down_to_the_script(tmp_path):
    "In a notebook the same trainer goes on, whose layers are as the run before has left them"
    trainer = make([ThawCB], tmp_path, 12, every="epoch")
    with pytest.raises(RuntimeError, match="power cut"):
        trainer.fit(4, lr=0.01, valid=False)
    trainer.remove_callbacks("CutCB")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(4, lr=0.01, valid=False)
    assert not [o for o in told if "which has no effect" in str(o.message)]
    assert trainer.n_updates == 20


@pytest.mark.parametrize("callback", [lambda: NBatchCB(4), BatchNormEvalCB])
def test_a_callback_without_a_state_that_has_gone_is_named(tmp_path, callback):
    norms = dict(layers=(nn.BatchNorm1d(8),))
    with pytest.raises(RuntimeError, match="power cut"):
        make([callback], tmp_path, 7, **norms).fit(4, lr=0.01, valid=False)
    with pytest.warns(UserWarning, match=f"`{type(callback()).__name__}` has gone"):
        make([], tmp_path, **norms).fit(4, lr=0.01, valid=False)


@pytest.mark.parametrize(
    "callbacks", [[], [FirstCB, SecondCB], [lambda: ClipGradCB(0.1)], [ThawCB], [CountsCB]]
)
def test_the_same_script_is_told_nothing(tmp_path, callbacks):
    assert changed(tmp_path, callbacks, callbacks) == []


def test_a_checkpoint_of_an_earlier_version_is_taken_up_without_a_word(tmp_path):
    from isaac_loop.state.putting_back import put_frozen
    from isaac_loop.state.run_state import take_state

    trainer = make([ThawCB])
    trainer.fit(1, lr=0.01, valid=False)
    _, state = take_state(trainer, 1)
    del state["frozen"], state["script"]
    assert put_frozen(trainer, state) == 0 and other_facts(trainer, state) == []
    assert not trainer.model[0].weight.requires_grad


class AddGroupCB:
    def before_epoch(self, trainer):
        if trainer.epoch == 1 and len(trainer.opt.param_groups) == 1:
            trainer.opt.add_param_group(dict(params=[nn.Parameter(torch.zeros(1))]))


def test_a_group_of_parameters_that_came_in_the_run_cannot_go_on_and_is_told_how_it_could(tmp_path):
    with pytest.raises(RuntimeError, match="power cut"):
        make([AddGroupCB], tmp_path, 7).fit(4, lr=0.01, valid=False)
    with pytest.raises(ResumeMismatch, match=r"had \[4, 1\] parameters, and have \[4\] .*`add_param_group`"):
        make([AddGroupCB], tmp_path).fit(4, lr=0.01, valid=False)


class ExchangeCB:
    "Makes another optimizer for the second epoch"

    def __init__(self, make):
        self.make = make

    def before_epoch(self, trainer):
        if trainer.epoch == 1:
            trainer.opt = self.make(trainer.model.parameters())


def of_head(params, lr=0.01):
    return optim.SGD(list(params)[2:], lr=lr)


def of_body(params, lr=0.01):
    return optim.SGD(list(params)[:2], lr=lr)


def of_all(params, lr=0.01):
    return optim.SGD(params, lr=lr, momentum=0.9)


def in_groups(params, lr=0.01):
    params = list(params)
    return optim.SGD([{"params": params[:2], "lr": 0.002}, {"params": params[2:]}], lr=lr)


def exchanging(folder, opts, cut=None, exchanges=True):
    first, later = opts
    trainer = make([lambda: ExchangeCB(later)] if exchanges else [], folder, cut)
    trainer.opt_func = first
    return trainer


def told_in(trainer):
    "What is warned of exchanged optimizers until the power cut, or the end"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            trainer.fit(4, lr=0.01, valid=False)
        except RuntimeError:
            pass
    return [str(o.message) for o in told if "In the course of this fit" in str(o.message)]


EXCHANGES = {
    "another class": (optim.Adam, of_all, "class was `SGD`, and is `Adam`"),
    "more of the model": (of_head, of_all, r"had \[4\] parameters, and have \[2\]"),
    "groups": (of_head, in_groups, r"had \[2, 2\] parameters, and have \[2\] .*`add_param_group`"),
    "another part of the model": (of_head, of_body, "had other parameters"),
}


@pytest.mark.parametrize("case", EXCHANGES)
def test_an_optimizer_that_is_exchanged_in_the_run_is_told_at_once_and_cannot_be_taken_up(tmp_path, case):
    *opts, words = EXCHANGES[case]
    [told] = told_in(exchanging(tmp_path, opts, 9))
    assert "`trainer.opt` was" in told and "freeze what is to learn later" in told
    with pytest.raises(ResumeMismatch, match=words) as failed:
        exchanging(tmp_path, opts).fit(4, lr=0.01, valid=False)
    assert "freeze what is to learn later" in str(failed.value)


@pytest.mark.parametrize("case", EXCHANGES)
def test_a_run_with_an_exchanged_optimizer_goes_on_if_the_later_one_is_made_at_once(tmp_path, case):
    opts = EXCHANGES[case][:2]
    whole = exchanging(None, opts)
    whole.fit(4, lr=0.01, valid=False)
    told_in(exchanging(tmp_path, opts, 9))
    again = exchanging(tmp_path, (opts[1], opts[1]), exchanges=False)
    again.fit(4, lr=0.01, valid=False)
    assert again.n_updates == 20 and outcome(again) == outcome(whole)


def test_an_optimizer_of_the_same_kind_for_the_same_parameters_goes_on_without_a_word(tmp_path):
    opts = optim.SGD, of_all
    whole = exchanging(None, opts)
    whole.fit(4, lr=0.01, valid=False)
    assert told_in(exchanging(tmp_path, opts, 13)) == []
    again = exchanging(tmp_path, opts)
    assert told_in(again) == []
    assert again.n_updates == 20 and outcome(again) == outcome(whole)


class NamesCB:
    "Gives the optimizer and the model another name in the middle of a fit"

    def before_step(self, trainer):
        if trainer.n_updates == 5:
            trainer.opt2, trainer.net = trainer.opt, trainer.model


def test_what_gets_another_name_in_the_run_is_still_the_same_part(tmp_path):
    "The script has not given it yet when it begins anew"
    whole = make([NamesCB])
    whole.fit(4, lr=0.01, valid=False)
    with pytest.raises(RuntimeError, match="power cut"):
        make([NamesCB], tmp_path, 9).fit(4, lr=0.01, valid=False)
    again = make([NamesCB], tmp_path)
    assert told_in(again) == []
    assert again.n_updates == 20 and outcome(again) == outcome(whole)


class CriticCB:
    "Has a second network, with an optimizer of a class of the script's own, and each with two names"

    stateless = "names"

    def __init__(self, names):
        self.names = names

    def before_fit(self, trainer):
        critic = Counting()
        opt = CountingSGD(critic.parameters(), lr=0.1, momentum=0.9)
        for name in self.names:
            setattr(trainer, f"critic_{name}", critic)
            setattr(trainer, f"opt_{name}", opt)

    def after_step(self, trainer):
        trainer.critic_a(trainer.batch[0]).mean().backward()
        trainer.opt_b.step()
        trainer.opt_b.zero_grad()


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
        self.n_calls = 0

    def forward(self, x):
        self.n_calls += 1
        return super().forward(x) * self.n_calls


class CountingSGD(optim.SGD):
    n_steps = 0

    def step(self):
        super().step()
        self.n_steps += 1


@pytest.mark.parametrize("cut", [9, 10])
def test_names_of_one_part_may_be_given_in_another_order(tmp_path, cut):
    def critic(trainer):
        return trainer.critic_a.weight.tolist(), trainer.critic_b.n_calls, trainer.opt_a.n_steps

    whole = make([lambda: CriticCB("ab")])
    whole.fit(4, lr=0.01, valid=False)
    with pytest.raises(RuntimeError, match="power cut"):
        make([lambda: CriticCB("ab")], tmp_path, cut).fit(4, lr=0.01, valid=False)
    again = make([lambda: CriticCB("ba")], tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.fit(4, lr=0.01, valid=False)
    assert again.n_updates == 20 and outcome(again) == outcome(whole)
    assert critic(again) == critic(whole) and critic(again)[-2:] == (20, 20)


def test_names_that_an_earlier_version_has_saved_for_one_part_are_taken_for_one():
    from isaac_loop.state.run_checks import check_fits
    from isaac_loop.state.putting_back import put_state
    from isaac_loop.state.run_state import take_state

    trainer = make([])
    trainer.critic, trainer.opt_func = nn.Linear(1, 1), of_all
    trainer.fit(1, lr=0.01, valid=False)
    weights, state = take_state(trainer, 1)
    assert list(state["opts"]) == ["opt"]
    for names, part, copies in [
        ("opts", "opt", ["opt2"]),
        ("opt_classes", "opt", ["opt2"]),
        ("opts_made", "opt", ["opt2"]),
        ("modules", "critic", ["teacher"]),
    ]:
        state[names] |= {name: state[names][part] for name in copies}
    of_opts = state | dict(modules={"critic": state["modules"]["critic"]})
    check_fits(trainer, weights, of_opts)
    other = of_opts | dict(opts=state["opts"] | {"opt2": dict(state=dict(), param_groups=[])})
    with pytest.raises(ResumeMismatch, match="the optimizers: saved were .*'opt2'"):
        check_fits(trainer, weights, other)
    state["modules"]["net"] = dict(weights)
    with pytest.raises(ResumeMismatch, match="`trainer.teacher`: it was a module"):
        check_fits(trainer, weights, state)
    trainer.opt2, trainer.teacher, trainer.net = trainer.opt, trainer.critic, trainer.model
    check_fits(trainer, weights, state)
    put_state(trainer, weights, state)


@pytest.mark.parametrize("cut", [3, 7, 14])
def test_another_optimizer_in_a_second_fit_goes_on_exactly(tmp_path, cut):
    def two_fits(folder, cut=None):
        trainer = make([], folder, cut)
        trainer.opt_func = of_head
        trainer.fit(1, lr=0.01, valid=False)
        trainer.opt_func = optim.Adam
        trainer.fit(3, lr=0.01, valid=False)
        return trainer

    with pytest.raises(RuntimeError, match="power cut"):
        two_fits(tmp_path, cut)
    assert outcome(two_fits(tmp_path)) == outcome(two_fits(None))


class OwnSampler(torch.utils.data.Sampler):
    def __init__(self):
        self.rng = random.Random(1)

    def __iter__(self):
        return iter(self.rng.sample(range(N), N))

    def __len__(self):
        return N


class OwnLoader:
    def __init__(self):
        self.rng = np.random.default_rng(1)

    def __iter__(self):
        for i in self.rng.permutation(N):
            yield torch.full((2, 4), float(i)), torch.tensor([i % 3, 0])


class JitteredStream(torch.utils.data.IterableDataset):
    def __init__(self):
        self.rng, self.rows = random.Random(3), Rows()

    def __iter__(self):
        return (self.rows[i] for i in self.rng.sample(range(N), N))


class Batches:
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(torch.utils.data.DataLoader(self.data, 4))


def made_anew(data):
    return lambda: torch.utils.data.DataLoader(data, 4, shuffle=True)


def own_generator(seed):
    return torch.Generator().manual_seed(seed)


LOADERS = {
    "dataset": (lambda: torch.utils.data.DataLoader(Noisy(), 4, shuffle=True), ""),
    "sampler": (lambda: torch.utils.data.DataLoader(Rows(), 4, sampler=OwnSampler()), "`sampler.rng`"),
    "loader": (OwnLoader, "`rng` of `dls.train`"),
    "workers": (lambda: exact_loader(Noisy(), 4, in_memory=False, num_workers=1), "`dataset.numpy`"),
    "its own, saved": (
        lambda: torch.utils.data.DataLoader(Rows(), 4, shuffle=True, generator=own_generator(1)),
        "",
    ),
    "exact": (lambda: exact_loader(Noisy(), 4, in_memory=False), ""),
    "transform": (
        lambda: torch.utils.data.DataLoader(Jittered(), 4, shuffle=True),
        "",
    ),
    "batches": (
        lambda: torch.utils.data.DataLoader(Rows(), 4, collate_fn=jittered_batches()),
        "",
    ),
    "batch sampler": (
        lambda: torch.utils.data.DataLoader(
            Rows(), batch_sampler=torch.utils.data.BatchSampler(OwnSampler(), 4, False)
        ),
        "`batch_sampler.sampler.rng`",
    ),
    "stream": (lambda: exact_loader(JitteredStream(), 4), "Draw from the usual sources"),
    "transform, exact": (lambda: exact_loader(Jittered(), 4, in_memory=False), ""),
    "made anew": (lambda: ReplayLoader(made_anew(Jittered())), "`make.data.tfms['noise'][0].rng`"),
    "own loader": (lambda: Batches(Jittered()), "`data.tfms['noise'][0].rng`"),
    "list": (lambda: [(torch.ones(2, 4), torch.tensor([0, 1]))] * 3, ""),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_generators_that_nobody_saves_are_named_when_a_run_goes_on_between_two_epochs(tmp_path, kind):
    "There nothing is read again, so the warning of loaders that read again does not come"
    load, words = LOADERS[kind]
    trainers = [make([], tmp_path, every="epoch") for _ in range(2)]
    for trainer in trainers:
        trainer.dls = DataLoaders(load())
    trainers[0].fit(1, lr=0.01, valid=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainers[1].fit(2, lr=0.01, valid=False)
    said = [str(o.message) for o in told if "draw random numbers that are not saved" in str(o.message)]
    assert [words in o for o in said] == [True] * bool(words)


def ended(folder, kind, *n_epochs):
    "Weights and numbers of fits in one folder, each by a script of its own, that train and validate"
    for i, n in enumerate(n_epochs):
        trainer = make([], folder, every="epoch")
        trainer.dls = DataLoaders(LOADERS[kind][0](), torch.utils.data.DataLoader(Jittered(), 4))
        set_seed(3 + i)
        trainer.fit(n, lr=0.01)
    rows = [{k: v for k, v in row.items() if k != "elapsed"} for row in trainer.history]
    return [p.tolist() for p in trainer.model.parameters()], rows


@pytest.mark.parametrize("kind", ["dataset", "transform", "batches"])
def test_generators_of_rows_that_are_read_here_go_on_exactly_also_those_of_the_validation_data(
    tmp_path, kind
):
    whole = ended(tmp_path / "whole", kind, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*draw random numbers that are not saved")
        assert ended(tmp_path / "parts", kind, 1, 2) == whole
