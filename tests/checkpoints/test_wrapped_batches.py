"""
Batches that something of the user's own stands around: a run that was cut goes on as if it had not been,
without a word, or is refused, or a warning names what cannot be seen.
"""

import contextlib
import functools
import gc
import itertools
import random
import warnings
from collections import deque
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset as HuggingFace
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from isaac_loop.basics.tensors import set_seed
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import ExactLoader, exact_loader
from isaac_loop.loop.events import CancelEpochException, CancelFitException, Order
from isaac_loop.loop.trainer import Trainer
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.state.errors import ResumeMismatch
from isaac_loop.stop.interrupts import InterruptCB
from isaac_loop.train.training import BasicTrainCB, NBatchCB
from resumed import press
from runs import Cut, CutCB

x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(x, (x.sum(1) > 0).long())
OTHER = TensorDataset(x.flip(0), (x.sum(1) > 0).long().flip(0))


def loaders(exact=True):
    train = exact_loader(DATA, 8, seed=3) if exact is True else None
    if train is None:
        train = exact() if exact else DataLoader(DATA, 8, shuffle=True)
    return DataLoaders(train, exact_loader(DATA, 16, shuffle=False))


def run(make, at=None, folder=None, exact=True, every=1, **options):
    "A run, cut after `at` updates if that is given, from what is saved in `folder` on; and what it warns of"
    set_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    trainer = Trainer(
        loaders(exact), F.cross_entropy, optim.SGD, model, [BasicTrainCB(), MetricsCB(), *make()]
    )
    more = [CheckpointCB(folder, every=every, **options)] if folder else []
    if at is not None:
        more.append(CutCB("before_predict", lambda t: t.training and t.n_updates == at))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        if at is None:
            trainer.fit(3, lr=0.1, callbacks=more)
        else:
            with pytest.raises(Cut):
                trainer.fit(3, lr=0.1, callbacks=more)
    return trainer, [str(o.message) for o in told if "batches are read again" not in str(o.message)]


def goes_on(make, tmp_path, cuts=(3, 8), **options):
    "Cut and gone on with, the weights are those of a run that was not cut; what was warned of on the way"
    whole, _ = run(make, exact=options.get("exact", True))
    told = []
    for at in cuts:
        _, first = run(make, at, tmp_path / f"{at}", **options)
        again, then = run(make, None, tmp_path / f"{at}", **options)
        told += first + then
        for a, b in zip(whole.model.parameters(), again.model.parameters()):
            assert torch.equal(a, b), at
    return told


class WrapCB:
    "Puts `wrap` around the batches of each training pass"

    def __init__(self, wrap):
        self.wrap, self.rng, self.torchs = wrap, np.random.default_rng(4), torch.Generator().manual_seed(2)
        self.python, self.kept = random.Random(1), deque([0.5], maxlen=3)

    def before_epoch(self, trainer):
        self.trainer = trainer
        if trainer.training:
            trainer.batches = self.wrap(self, trainer.batches)


def mixed(cb, batches):
    for a, b in batches:
        i = torch.randperm(len(a))
        yield 0.7 * a + 0.3 * a[i], b


def by_updates(cb, batches):
    return ((a * (1 + cb.trainer.n_updates / 100), b) for a, b in batches)


def adversarial(cb, batches):
    def away(batch):
        a = batch[0].clone().requires_grad_()
        F.cross_entropy(cb.trainer.model(a), batch[1]).backward()
        return a.detach() + 0.1 * a.grad.sign(), batch[1]

    return map(away, batches)


def counted(cb, batches):
    share, n = 0.7, 0
    for a, b in batches:
        n += 1
        yield a * share ** (n % 3) + torch.randn(1), b


def own_numbers(cb, batches):
    for a, b in batches:
        noise = cb.rng.normal() + cb.python.random() + torch.rand(1, generator=cb.torchs)
        cb.kept.append(float(noise))
        yield a + sum(cb.kept), b


def buffered_by_own(cb, batches):
    "Through a shuffle buffer, whose choice nothing else has a part in"
    held = []
    for batch in batches:
        held.append(batch)
        if len(held) > 2:
            yield held.pop(int(cb.rng.integers(3)))
    yield from held


class Mixed:
    "Has a length"

    def __init__(self, cb, batches):
        self.batches, self.share = batches, 0.7

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for a, b in self.batches:
            yield self.share * a + (1 - self.share) * a[torch.randperm(len(a))], b


def ahead(cb, batches):
    "Reads one batch ahead"
    batches = iter(batches)
    ready = next(batches)
    for batch in batches:
        yield ready
        ready = batch
    yield ready


EXACT = mixed, by_updates, adversarial, counted, own_numbers, buffered_by_own, Mixed, ahead


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("wrap", EXACT, ids=lambda o: o.__name__)
def test_what_keeps_nothing_that_is_other_goes_on_without_a_word(wrap, exact, tmp_path):
    "All were refused in mid-epoch, as their dropped batches came out otherwise"
    assert goes_on(lambda: [WrapCB(wrap)], tmp_path, exact=exact) == []


def some(cb, batches):
    return (batch for batch in batches if torch.rand(1) < 0.7)


def hard(cb, batches):
    def is_hard(batch):
        with torch.no_grad():
            return F.cross_entropy(cb.trainer.model(batch[0]), batch[1]) > 0.65

    return filter(is_hard, batches)


def buffered(cb, batches):
    held = []
    for batch in batches:
        held.append(batch)
        if len(held) > 2:
            yield held.pop(random.randrange(3) if torch.rand(1) < 0.6 else 0)
    yield from held


def twice(cb, batches):
    for batch in batches:
        yield batch
        if torch.rand(1) < 0.5:
            yield batch


def with_the_one_before(cb, batches):
    before = 0
    for a, b in batches:
        before = 0.5 * a + 0.5 * before * torch.rand(1)
        yield before, b


@pytest.mark.parametrize("wrap", [some, hard, buffered, twice, with_the_one_before])
def test_what_would_go_on_with_other_batches_is_refused(wrap, tmp_path):
    "Those that choose among the loader's own batches went on without a word; a choice may come out the same"
    make, refused = lambda: [WrapCB(wrap)], 0
    for at in range(2, 7):
        try:
            assert goes_on(make, tmp_path, [at]) == []
        except ResumeMismatch as error:
            refused += 1
            assert "`WrapCB` made them in `before_epoch`" in str(error)
            _, told = run(make, None, tmp_path / f"{at}", strict=False)
            assert ["the run would go on with other batches" in o for o in told] == [True]
    assert refused


class Hidden:
    "Holds a number where nobody sees it"

    __slots__ = ()
    held = 1.0


def with_a_time(cb, batches):
    took = 0.0
    for a, b in batches:
        begun = perf_counter()
        yield a + torch.rand(1), b
        took += perf_counter() - begun
        cb.took = took


def with_what_cannot_be_seen(cb, batches):
    hidden = Hidden()
    for a, b in batches:
        yield a + hidden.held + torch.rand(1), b


@pytest.mark.parametrize("wrap", [with_a_time, with_what_cannot_be_seen])
def test_what_cannot_be_seen_is_warned_of_where_another_batch_came_out(wrap, tmp_path):
    told = goes_on(lambda: [WrapCB(wrap)], tmp_path)
    assert ["came out otherwise when it was read again" in o for o in told] == [True, True]


class Drawn(torch.utils.data.Dataset):
    "Rows with noise from a generator of their own"

    def __init__(self):
        self.rng = random.Random(3)

    def __len__(self):
        return len(DATA)

    def __getitem__(self, i):
        return DATA[i][0] + self.rng.random(), DATA[i][1]


def drawn_rows():
    return exact_loader(Drawn(), 8, seed=3, in_memory=False)


def kept_back(cb, batches):
    "Hands out each batch two later"
    held = deque()
    for batch in batches:
        held.append(batch)
        if len(held) > 2:
            yield held.popleft()
    yield from held


def test_rows_that_draw_from_a_generator_of_their_own_are_named_where_batches_of_them_are_kept_back(tmp_path):
    "They cannot be read again as they were; it was put down to what makes the batches"
    with pytest.raises(ResumeMismatch, match="its rows draw from `dataset.rng`") as failed:
        goes_on(lambda: [WrapCB(kept_back)], tmp_path, [3], exact=drawn_rows)
    assert "made them in `before_epoch`" not in str(failed.value)
    assert goes_on(lambda: [WrapCB(kept_back)], tmp_path / "usual", [3]) == []


def test_so_they_are_where_nothing_is_kept_back_and_the_run_goes_on_exactly(tmp_path):
    told = goes_on(lambda: [WrapCB(with_what_cannot_be_seen)], tmp_path, exact=drawn_rows)
    assert ["since its rows draw from `dataset.rng`" in o for o in told] == [True, True]


# ---- other loaders, wherever they are held


def exact():
    return exact_loader(OTHER, 8, seed=9)


def plain():
    return DataLoader(OTHER, 8, shuffle=True, generator=torch.Generator().manual_seed(4))


def sampled():
    return DataLoader(OTHER, 8, sampler=RandomSampler(OTHER, generator=torch.Generator().manual_seed(5)))


def mixed_in(trainer, other):
    if trainer.training:
        trainer.batches = ((a[0] + b[0], a[1]) for a, b in zip(trainer.batches, other))


class MixCB:
    def __init__(self, made):
        self.made = made

    def before_epoch(self, trainer):
        mixed_in(trainer, self.other(trainer))


class AttributeCB(MixCB):
    def other(self, trainer):
        return self.made


class InListCB(MixCB):
    def __init__(self, made):
        self.made = [{"other": made}]

    def other(self, trainer):
        return self.made[0]["other"]


class OfLoadersCB(MixCB):
    def __init__(self, made):
        MixCB.__init__(self, [made])

    def before_fit(self, trainer):
        trainer.dls.extra = self.made.pop()

    def other(self, trainer):
        return trainer.dls.extra


class OfTrainerCB(OfLoadersCB):
    def before_fit(self, trainer):
        trainer.extra = self.made.pop()

    def other(self, trainer):
        return trainer.extra


class InTurnCB:
    "Small loaders and large ones, by turns, with one name more for that of now"

    def __init__(self, made):
        self.stages = [exact_loader(DATA, 12, seed=1), made]

    def before_epoch(self, trainer):
        if trainer.training:
            trainer.dl = self.now = self.stages[trainer.epoch % 2]


def around(made):
    def before_epoch(trainer):
        mixed_in(trainer, made)

    return before_epoch


HOLDERS = AttributeCB, InListCB, OfLoadersCB, OfTrainerCB, InTurnCB, around


@pytest.mark.parametrize("every", ["epoch", 1])
@pytest.mark.parametrize("make", [exact, plain, sampled])
@pytest.mark.parametrize("holder", HOLDERS, ids=lambda o: o.__name__)
def test_a_loader_goes_on_wherever_it_is_held(holder, make, every, tmp_path):
    "Only an exact one that was itself an attribute of a callback did; others began anew without a word"
    assert goes_on(lambda: [holder(make())], tmp_path, (7, 12), every=every) == []


class SemiCB:
    "Takes unlabelled rows beside each batch, from a walk that it holds"

    def __init__(self, make):
        self.unlabelled = make()

    def before_epoch(self, trainer):
        self.it = iter(self.unlabelled)

    def before_batch(self, trainer):
        if trainer.training:
            a, b = trainer.batch
            trainer.batch = a + next(self.it)[0].mean(0), b


@pytest.mark.parametrize("make", [exact, plain])
def test_a_walk_over_a_loader_that_a_callback_holds_is_named(make, tmp_path):
    "Only one over an exact loader was; with a plain one the run was another without a word"
    _, told = run(lambda: [SemiCB(make)], 8, tmp_path, every=1)
    assert ["`SemiCB.it` changed during this fit and cannot be kept" in o for o in told] == [True]


def test_a_walk_that_is_made_anew_before_it_is_used_is_not_named(tmp_path):
    assert goes_on(lambda: [SemiCB(plain)], tmp_path, (8, 14), every="epoch") == []


# ---- looks at the training loader, and runs on the side over it, in the middle of a pass


class PeekCB:
    "Takes a batch of the training loader to look at"

    def __init__(self, when="after_batch", keep=False):
        self.when, self.keep, self.it = when, keep, None

    def look(self, trainer):
        it = iter(trainer.dls.train)
        next(it)
        self.it = it if self.keep else None

    def before_batch(self, trainer):
        if self.when == "before_batch" and trainer.training:
            self.look(trainer)

    def after_batch(self, trainer):
        if self.when == "after_batch" and trainer.training:
            self.look(trainer)


class WholePeekCB:
    "Walks over the whole training loader"

    def after_batch(self, trainer):
        if trainer.training and trainer.n_updates % 3 == 0:
            self.n = sum(1 for _ in trainer.dls.train)


class SideCB:
    "Runs on the side over the same loader"

    order = Order.DECIDE

    def __init__(self, run):
        self.run = run

    def after_batch(self, trainer):
        if trainer.training and trainer.n_updates % 3 == 0:
            with trainer.side_run() as side:
                self.run(side)


def warm_up(side):
    side.fit(1, lr=0.1, valid=False, callbacks=NBatchCB(2))


def evaluate(side):
    side.dls = DataLoaders(side.dls.train, side.dls.train)
    side.fit(1, train=False)


LOOKS = {
    "after": lambda: [PeekCB()],
    "before": lambda: [PeekCB("before_batch")],
    "held": lambda: [PeekCB(keep=True)],
    "whole": lambda: [WholePeekCB()],
    "trains": lambda: [SideCB(warm_up)],
    "evaluates": lambda: [SideCB(evaluate)],
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_the_training_loader_does_not_move_the_place(look, tmp_path):
    goes_on(LOOKS[look], tmp_path, cuts=(2, 3, 5, 6, 8, 12, 13))


class OwnLoader(ExactLoader):
    "Changes the batches on their way"

    def __iter__(self):
        for a, b in super().__iter__():
            yield a + torch.rand(1), b


class MappedLoader(ExactLoader):
    def __iter__(self):
        return map(lambda batch: (batch[0] * 2, batch[1]), super().__iter__())


class Stream(IterableDataset):
    "Tells where it is, by what is no number of its own"

    def __init__(self):
        self.place = {"at": 0, "first": 0}

    def state_dict(self):
        return dict(at=self.place["at"])

    def load_state_dict(self, state):
        self.place["first"] = state["at"]

    def __iter__(self):
        for i in range(self.place["first"], len(DATA)):
            self.place["at"] = i + 1
            yield DATA[i]


def hugging_face():
    rows = HuggingFace.from_dict({"x": x.tolist(), "y": DATA.tensors[1].tolist()})
    return exact_loader(rows.to_iterable_dataset().with_format("torch"), 8, seed=3)


LOADERS = {
    "a generator": lambda: OwnLoader(DATA, 8, seed=3),
    "a map": lambda: MappedLoader(DATA, 8, seed=3),
    "a stream": lambda: exact_loader(Stream(), 8, seed=3),
    "Hugging Face": hugging_face,
}


class PairCB:
    order = Order.FIRST

    def before_batch(self, trainer):
        if isinstance(trainer.batch, dict):
            trainer.batch = trainer.batch["x"], trainer.batch["y"]


@pytest.mark.parametrize("look", ["after", "held", "whole", "trains"])
@pytest.mark.parametrize("loader", LOADERS)
def test_nor_does_a_look_at_a_loader_of_ones_own_or_at_a_stream(loader, look, tmp_path):
    goes_on(lambda: [PairCB(), *LOOKS[look]()], tmp_path, cuts=(3, 8), exact=LOADERS[loader])


class CancelCB:
    "Leaves a pass early"

    def after_batch(self, trainer):
        if trainer.training and trainer.batch_num == 2 and trainer.epoch == 0:
            raise CancelEpochException


def test_a_look_in_a_pass_that_is_left_early_leaves_the_next_one_whole(tmp_path):
    goes_on(lambda: [PeekCB(), CancelCB()], tmp_path, cuts=(2, 3, 5, 8))


def mix(batches):
    before = 0
    for a, b in batches:
        before = a + 0.5 * before * torch.rand(1)
        yield before, b


class Mixer:
    def __init__(self):
        self.before = 0

    def __call__(self, batch):
        self.before = batch[0] + 0.5 * self.before * torch.rand(1)
        return self.before, batch[1]


def mixer():
    kept = [0]

    def call(batch):
        kept[0] = batch[0] + 0.5 * kept[0] * torch.rand(1)
        return kept[0], batch[1]

    return call


def called(f, batches):
    return (f(b) for b in batches)


def mixed_in_a_default():
    def call(batch, kept=[0]):  # noqa: B006 - As people keep something
        kept[0] = batch[0] + 0.5 * kept[0] * torch.rand(1)
        return kept[0], batch[1]

    return call


def with_kept(kept, batch):
    kept[0] = batch[0] + 0.5 * kept[0] * torch.rand(1)
    return kept[0], batch[1]


HIDDEN = {
    "in a map": lambda cb, batches: map(tuple, mix(batches)),
    "in a zip": lambda cb, batches: (b for b, _ in zip(mix(batches), itertools.count())),
    "an object": lambda cb, batches: map(Mixer(), batches),
    "a method": lambda cb, batches: map(Mixer().__call__, batches),
    "a closure": lambda cb, batches: map(mixer(), batches),
    "a closure that is called": lambda cb, batches: called(mixer(), batches),
    "a default value": lambda cb, batches: map(mixed_in_a_default(), batches),
    "a partial": lambda cb, batches: map(functools.partial(with_kept, [0]), batches),
}


@pytest.mark.parametrize("wrap", HIDDEN)
def test_what_remembers_within_what_passes_on_is_not_overlooked(wrap, tmp_path):
    make = lambda: [WrapCB(HIDDEN[wrap])]  # noqa: E731
    run(make, 3, tmp_path)
    with pytest.raises(ResumeMismatch, match="come others than in the saved run"):
        run(make, None, tmp_path)


SEEN = [0]


def counting_for_show(cb, batches):
    def call(batch):
        call.n += 1
        return batch

    call.n = 0
    for batch in map(call, batches):
        SEEN[0] += 1
        yield batch


def test_a_count_for_show_is_no_reason_to_refuse(tmp_path):
    assert goes_on(lambda: [WrapCB(counting_for_show)], tmp_path) == []


def plain_map(cb, batches):
    scale = 2.0
    return map(lambda b: (b[0] * scale, b[1]), batches)


def test_a_map_with_a_function_that_keeps_nothing_goes_on(tmp_path):
    assert goes_on(lambda: [WrapCB(plain_map)], tmp_path) == []


class Doubled:
    "Stands around a loader, and passes on what it is asked"

    def __init__(self, dl):
        self.dl = dl

    def __getattr__(self, name):
        if name.startswith("__") or name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __len__(self):
        return len(self.dl)

    def __iter__(self):
        return ((a + 1000, b) for a, b in self.dl)


def test_who_stands_around_a_loader_and_passes_on_what_it_is_asked_makes_the_batches():
    seen = []
    dls = DataLoaders(Doubled(exact_loader(DATA, 8, seed=3)))
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(6, 2), [BasicTrainCB()])
    look = SimpleNamespace(after_batch=lambda t: seen.append(t.batch[0].min().item()))
    trainer.fit(1, valid=False, callbacks=look)
    assert min(seen) > 900


def timed(cb, batches):
    times = []

    def noisy(batch):
        began = perf_counter()
        out = batch[0] + torch.randn(1), batch[1]
        times.append(perf_counter() - began)
        return out

    return map(noisy, batches)


def test_times_that_a_function_of_a_map_notes_are_no_reason_to_refuse(tmp_path):
    goes_on(lambda: [WrapCB(timed)], tmp_path)


class LimitCB:
    "Three batches in each epoch"

    def before_epoch(self, trainer):
        if trainer.training:
            trainer.batches = range(3)


class LeaveCB:
    "Leaves each training pass after its third batch"

    def after_batch(self, trainer):
        if trainer.training and trainer.batch_num == 2:
            raise CancelEpochException


class SliceCB:
    def before_epoch(self, trainer):
        if trainer.training:
            trainer.batches = itertools.islice(trainer.batches, 3)


LEAVERS = {"range": LimitCB, "cancel": LeaveCB, "islice": SliceCB, "NBatchCB": lambda: NBatchCB(3)}


@pytest.mark.parametrize("leave", LEAVERS)
@pytest.mark.parametrize("look", ["after", "before", "whole", "evaluates"])
def test_a_look_at_the_batch_with_which_a_pass_is_left_changes_no_other_pass(leave, look, tmp_path):
    def batches(*callbacks):
        seen = []
        note = SimpleNamespace(before_predict=lambda t: t.training and seen.append(t.batch[0].sum().item()))
        trainer = Trainer(loaders(), F.cross_entropy, optim.SGD, nn.Linear(6, 2), [BasicTrainCB()])
        trainer.fit(3, lr=0.1, callbacks=[note, *callbacks])
        return seen

    plain = batches(LEAVERS[leave]())
    assert len(plain) == 9 and batches(LEAVERS[leave](), *LOOKS[look]()) == plain
    goes_on(lambda: [LEAVERS[leave](), *LOOKS[look]()], tmp_path, cuts=(1, 2, 3, 5, 6))


@pytest.mark.parametrize("error", [CancelFitException, Cut])
def test_after_a_fit_that_was_left_nobody_reads_any_more(error, tmp_path):
    def leave(trainer):
        if trainer.n_updates == 2:
            raise error

    dls = loaders()
    keeps = [CheckpointCB(tmp_path, every=1), RewindCB()]
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(6, 2), [BasicTrainCB(), *keeps])
    with contextlib.suppress(Cut):
        trainer.fit(1, callbacks=SimpleNamespace(after_batch=leave))
    gc.collect()
    assert not dls.train.is_read()


class Rows(IterableDataset):
    "A stream that tells no place"

    def __init__(self, endless=False):
        self.endless = endless

    def __iter__(self):
        rows = [DATA[i] for i in range(40)]
        return itertools.cycle(rows) if self.endless else iter(rows)


def scaled(cb, batches):
    return ((a / 40, b) for a, b in batches)


LEFT = {
    "exact": True,
    "a stream": lambda: exact_loader(Rows(), 8),
    "without end": lambda: exact_loader(Rows(True), 8),
    "one that tells its place": lambda: exact_loader(Stream(), 8),
}


@pytest.mark.parametrize("loader", LEFT)
def test_after_a_pass_that_was_left_a_run_goes_on_in_the_next_one(loader, tmp_path):
    "What stands around the batches holds the old pass still, and its rest was taken for the next one"
    make = lambda: [LEAVERS["NBatchCB"](), WrapCB(scaled)]  # noqa: E731
    told = goes_on(make, tmp_path, cuts=(4, 5), exact=LEFT[loader])
    assert [o for o in told if "again and dropping" not in o] == []


# ---- loaders that others hold, after a stop in the middle of an epoch and at the end of one


class Reading:
    "A loader of the user's own"

    def __init__(self):
        self.dl = exact()

    def __iter__(self):
        for a, b in self.dl:
            yield a, b


def stopped(folder, train, held, broken=False):
    "Sums of the batches of a fit that stops in its second epoch, perhaps cut after that, and of one more fit"

    def after_batch(trainer):
        if trainer.training:
            seen.append(trainer.batch[0].sum().item())
            if trainer.n_updates == 8:
                trainer.request_stop()
        elif broken and trainer.epoch == 1:
            raise Cut

    set_seed(1)
    seen, wrapped = [], [AttributeCB(held())] if held else []
    callbacks = [BasicTrainCB(), *wrapped, CheckpointCB(folder, every=1), after_batch]
    dls = DataLoaders(train(), [DATA[:8]])
    trainer = Trainer(dls, F.cross_entropy, optim.SGD, nn.Linear(6, 2), callbacks)
    with contextlib.suppress(Cut):
        trainer.fit(3, lr=0.1)
        trainer.fit(1, lr=0.1)
    return seen


def streamed():
    return exact_loader(Rows(True), 8, seed=2)


HELD = {"by a loader": (Reading, None), "by a callback": (exact, exact), "a stream": (plain, streamed)}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.filterwarnings("ignore")
def test_after_a_stop_loaders_that_others_hold_begin_the_next_epoch(held, tmp_path):
    "They gave what the run had left of the old one"
    whole = stopped(tmp_path / "whole", *HELD[held])
    first = stopped(tmp_path / "cut", *HELD[held], broken=True)
    assert len(first) == 8 and first + stopped(tmp_path / "cut", *HELD[held]) == whole


def cleanup_epoch(trainer):
    "Comes when a training pass is over, and is heard of in validation"
    if trainer.training and trainer.epoch == 1:
        press(trainer)


def test_so_they_do_after_an_interrupt_in_validation_where_the_training_pass_was_left(tmp_path):
    make = lambda: [NBatchCB(3), AttributeCB(exact())]  # noqa: E731
    whole, _ = run(make)
    with pytest.raises(KeyboardInterrupt):
        run(lambda: [*make(), InterruptCB(), cleanup_epoch], None, tmp_path)
    again, _ = run(make, None, tmp_path)
    assert torch.equal(again.model[0].weight, whole.model[0].weight)


def test_a_stream_beside_the_batches_begins_its_next_epoch_after_the_last_batch_of_one(tmp_path):
    "Read again to that place, it went on from there"
    assert goes_on(lambda: [AttributeCB(streamed())], tmp_path, [6], exact=exact) == []
