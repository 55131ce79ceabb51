"""Streams that tell their place: a run that was cut goes on as one that was not

Whatever the stream does at its next pass, begin anew, begin where it was told to, or go on; and whoever looks
at it in between.
"""

import contextlib
import functools
import io
import time
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from datasets import Dataset as HuggingFace
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

from isaac_loop.all import BasicTrainCB, CheckpointCB, DataLoaders, NBatchCB, Trainer, exact_loader, set_seed
from isaac_loop.data.exact_loaders import ExactLoader
from isaac_loop.state.errors import ResumeMismatch

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class Anew(IterableDataset):
    "Begins where it was told to"

    at = first = 0

    def state_dict(self):
        return dict(at=self.at)

    def load_state_dict(self, state):
        self.first = state["at"]

    def __iter__(self):
        for i in range(self.first, 48):
            self.at = i + 1
            yield X[i], Y[i]


class Lines(Anew):
    "One cursor, as that of a file"

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < 48:
            self.at += 1
            yield X[self.at - 1], Y[self.at - 1]
        self.at = 0


class On(Lines):
    "Has no end"

    def __iter__(self):
        while True:
            self.at += 1
            yield X[self.at % 48], Y[self.at % 48]


class Epochs(Anew):
    "Has another order in each epoch, and the epoch in its state"

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return dict(epoch=self.epoch, at=self.at)

    def load_state_dict(self, state):
        self.epoch, self.first = state["epoch"], state["at"]

    def __iter__(self):
        order = torch.randperm(48, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for i in range(self.first, 48):
            self.at = i + 1
            yield X[order[i]], Y[order[i]]


class Passes(Anew):
    "Counts its passes in its state, and goes through several files"

    n_passes = 0

    def state_dict(self):
        return dict(n_passes=self.n_passes, places=[dict(file=self.at // 24, row=self.at % 24)])

    def load_state_dict(self, state):
        self.n_passes = state["n_passes"]
        self.first = state["places"][0]["file"] * 24 + state["places"][0]["row"]

    def __iter__(self):
        self.n_passes += 1
        yield from super().__iter__()


@dataclass
class Compared(Anew):
    "Cannot be a key of a dict"

    at: int = 0
    first: int = 0


def hugging_face():
    rows = HuggingFace.from_dict({"x": X.tolist(), "y": Y.tolist()})
    return rows.to_iterable_dataset().with_format("torch")


def as_pair(trainer):
    batch = trainer.batch
    if isinstance(batch, dict):
        trainer.batch = batch["x"], batch["y"]


as_pair.__name__, as_pair.name = "before_batch", "as_pair"


def run(loader, folder=None, fails=None, cbs=(), every=1, n_epochs=3):
    "Number of updates, and a weight"

    def before_predict(trainer):
        if trainer.training and trainer.n_updates == fails:
            raise KeyError("cut")

    set_seed(1)
    more = [CheckpointCB(folder, every=every)] if folder else []
    callbacks = [BasicTrainCB(), as_pair, *cbs, *more, before_predict]
    trainer = Trainer(DataLoaders(loader, [(X, Y)]), F.cross_entropy, optim.SGD, nn.Linear(6, 2), callbacks)
    with contextlib.suppress(KeyError), contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(n_epochs, lr=0.1)
    return trainer.n_updates, trainer.model.weight[0, 0].item()


def goes_on(make, tmp_path, cbs=(), cuts=(3, 6, 8), **options):
    "Cut and gone on with, all is as in one run; what was warned of"
    whole = run(make(), cbs=cbs, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        for at in cuts:
            run(make(), tmp_path / f"{at}", at, cbs, **options)
            assert run(make(), tmp_path / f"{at}", None, cbs, **options) == whole, at
    usual = "again and dropping", "Whether these are the data"
    return [str(o.message) for o in told if not any(text in str(o.message) for text in usual)]


STREAMS = [Anew, Lines, Epochs, Passes, Compared, hugging_face]


@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_goes_on(stream, tmp_path):
    assert goes_on(lambda: exact_loader(stream(), 8), tmp_path) == []


@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_goes_on_in_a_new_loader(stream, tmp_path):
    "As in a notebook, where the cell with loaders and fit is run again"
    whole, again = run(exact_loader(stream(), 8)), stream()
    for at in (3, 6, 8):
        run(exact_loader(again, 8), tmp_path / f"{at}", at)
        found = run(exact_loader(again, 8), tmp_path / f"{at}")
        if stream not in (Lines, Compared):  # Which stand where the run was cut
            assert found == whole, at


@pytest.mark.parametrize("limit", [4, 6])
def test_a_stream_without_end_goes_on_where_it_is(limit, tmp_path):
    make = lambda: exact_loader(On(), 8)
    assert goes_on(make, tmp_path, [NBatchCB(limit)], cuts=[limit + 1, limit + 2, 2 * limit + 1]) == []


def test_where_it_was_cut_in_its_first_pass_the_user_hears_it(tmp_path):
    run(exact_loader(On(), 8), tmp_path, 2, [NBatchCB(4)])
    with pytest.warns(UserWarning, match="left before its end.*It begins anew"):
        run(exact_loader(On(), 8), tmp_path, None, [NBatchCB(4)])


@pytest.mark.parametrize("stream", [On, Anew])
def test_a_stream_that_may_go_on_or_not_is_named_at_the_end_of_its_first_pass(stream, tmp_path):
    run(exact_loader(stream(), 8), tmp_path, 5, [NBatchCB(4)], "epoch")
    with pytest.warns(UserWarning, match="left before its end.*It begins anew"):
        run(exact_loader(stream(), 8), tmp_path, None, [NBatchCB(4)], "epoch")


class Tireless(IterableDataset):
    "Draws its rows, and says that there is nothing to remember"

    def __iter__(self):
        while True:
            yield torch.randn(6), torch.randint(2, ())

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_stream_that_has_nothing_to_remember_is_not_named(tmp_path):
    make = lambda: exact_loader(Tireless(), 8, seed=1)
    assert goes_on(make, tmp_path, [NBatchCB(4)], cuts=[2, 5], every="epoch") == []


@pytest.mark.parametrize("stream", [On, Anew])
def test_after_two_passes_it_is_known(stream, tmp_path):
    make = lambda: exact_loader(stream(), 8)
    assert goes_on(make, tmp_path, [NBatchCB(4)], cuts=[9], every="epoch") == []


def after_batch(trainer):
    if trainer.training and trainer.batch_num % 2 == 0:
        next(iter(trainer.dls.train))


def test_a_look_takes_rows_from_a_cursor_and_the_user_hears_it(tmp_path):
    with pytest.warns(UserWarning, match="rows were taken away"):
        run(exact_loader(Lines(), 8), tmp_path, 3, [after_batch])


class Dropped(Anew):
    "Leaves rows out at random"

    def __iter__(self):
        for i in range(self.first, 48):
            self.at = i + 1
            if torch.rand(()) < 0.7:
                yield X[i], Y[i]


class Chosen(Epochs):
    "Leaves out others in each epoch"

    def __iter__(self):
        order = torch.randperm(48, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for i in range(self.first, 48):
            self.at = i + 1
            if X[order[i], 0] > -0.5:
                yield X[order[i]], Y[order[i]]


class OfTensor(Anew):
    kind = torch.tensor

    def state_dict(self):
        return dict(at=self.kind(self.at), rows=[0.5] * 500)

    def load_state_dict(self, state):
        self.first = int(state["at"])


class OfNumPy(OfTensor):
    kind = np.int64


class OfBytes(OfTensor):
    def state_dict(self):
        return dict(at=bytes([self.at]))

    def load_state_dict(self, state):
        self.first = state["at"][0]


@pytest.mark.parametrize("stream", [Dropped, Chosen, OfTensor, OfNumPy, OfBytes])
@pytest.mark.parametrize("limits", [(), [3]])
def test_whatever_its_rows_and_its_state_are(stream, limits, tmp_path):
    cbs = [NBatchCB(n) for n in limits]
    told = goes_on(lambda: exact_loader(stream(), 8), tmp_path, cbs, cuts=(2, 6, 8), n_epochs=4)
    assert all("left before its end" in text for text in told) and bool(told) <= bool(limits)


class Silent(Anew):
    "Tells nothing"

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class SilentNoise(Silent):
    "The same rows, with noise"

    def __iter__(self):
        for x, y in super().__iter__():
            yield x + torch.rand(()), y


class SilentSame(Silent):
    "The first row for a while, and then others"

    def __iter__(self):
        for i in range(48):
            yield X[max(0, i - 9)], Y[max(0, i - 9)]


class SilentOpen(Silent):
    "Cannot be copied"

    def __init__(self):
        self.source = open(__file__)


@pytest.mark.parametrize("stream", [Silent, SilentNoise, SilentSame, SilentOpen])
def test_a_state_that_is_empty_tells_no_place(stream, tmp_path):
    "So the epoch is read again"
    assert goes_on(lambda: exact_loader(stream(), 8), tmp_path) == []


@pytest.mark.parametrize("stream", STREAMS)
def test_a_snapshot_around_a_look_moves_nothing(stream, tmp_path):
    if stream is Lines:
        pytest.skip("A look takes rows from it")

    def log(trainer):
        with trainer.snapshot():
            next(iter(trainer.dls.train))

    assert goes_on(lambda: exact_loader(stream(), 8), tmp_path, [log], cuts=(3, 8)) == []


def test_a_look_that_was_begun_before_and_is_read_within_moves_nothing(tmp_path):
    def make():
        loader = exact_loader(Anew(), 8)
        peeks.append(iter(loader))
        next(peeks[-1])
        return loader

    def after_batch(trainer):
        if trainer.training:
            next(peeks[-1], None)

    peeks = []
    goes_on(make, tmp_path, [after_batch])


@pytest.mark.parametrize("data", [lambda: TensorDataset(X, Y), Anew])
def test_a_snapshot_within_a_pass_does_not_let_later_looks_move_it(data, tmp_path):
    def after_batch(trainer):
        if trainer.training and trainer.batch_num == 1:
            with trainer.snapshot():
                pass
        if trainer.training and trainer.batch_num == 3:
            next(iter(trainer.dls.train))

    assert goes_on(lambda: exact_loader(data(), 8), tmp_path, [after_batch], cuts=(4, 10)) == []


class Ahead(ExactLoader):
    "Holds one batch back"

    def __iter__(self):
        batches = super().__iter__()
        ready = next(batches)
        for batch in batches:
            yield ready
            ready = batch
        yield ready


class Cached(ExactLoader):
    kept = None

    def __iter__(self):
        if self.kept is None:
            self.kept = list(super().__iter__())
        return iter(self.kept)


class Twice(ExactLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            yield batch


class Limited(ExactLoader):
    "Stops after some batches, which it counts"

    def __iter__(self):
        for i, batch in enumerate(super().__iter__()):
            if i == 4:
                return
            yield batch


class Second(ExactLoader):
    "Leaves every other batch out"

    def __iter__(self):
        return (batch for i, batch in enumerate(super().__iter__()) if i % 2)


class Noise(ExactLoader):
    "Draws by itself, once for the whole pass and once for each batch"

    def __iter__(self):
        scale = torch.rand(1)
        for x, y in super().__iter__():
            yield x * scale + torch.rand(6), y


class Mapped(ExactLoader):
    def __iter__(self):
        return map(lambda pair: (pair[0] + 1, pair[1]), super().__iter__())


@pytest.mark.parametrize("kind", [Ahead, Cached, Twice, Limited, Second, Noise, Mapped])
def test_a_loader_with_a_way_of_its_own_goes_on_in_the_middle_of_an_epoch(kind, tmp_path):
    make = lambda: kind(TensorDataset(X, Y), 8)
    assert goes_on(make, tmp_path, cuts=[1, 2, 3]) == []
    if kind is not Cached:  # Which knows no more what the first epoch was
        assert goes_on(make, tmp_path, cuts=[4, 5, 7, 8, 10]) == []


def repeated(walk):
    "A decorator as one writes it, which gives what it wraps its name and module"

    @functools.wraps(walk)
    def walked(self):
        for i, (x, y) in enumerate(walk(self)):
            yield x * (1 + i), y
            if i % 2:
                yield x, y

    return walked


class Dressed(ExactLoader):
    __iter__ = repeated(ExactLoader.__iter__)


def test_a_way_that_is_dressed_as_the_librarys_goes_on_too(tmp_path):
    assert goes_on(lambda: Dressed(TensorDataset(X, Y), 8), tmp_path, cuts=[2, 8, 12]) == []


@pytest.mark.parametrize("kind", [Mapped, Noise, Twice])
def test_passes_that_are_cut_short_go_on(kind, tmp_path):
    make = lambda: kind(TensorDataset(X, Y), 8)
    assert goes_on(make, tmp_path, [NBatchCB(4)], cuts=[2, 4, 5, 9]) == []


class Keeping(ExactLoader):
    "Keeps something of the batches that were given"

    def __init__(self, *args):
        super().__init__(*args)
        self.kept = 0

    def __iter__(self):
        for x, y in super().__iter__():
            self.kept = self.kept + 1
            yield self.changed(x), y

    def changed(self, x):
        return x * self.kept


class Told(Keeping):
    "The same, as the message says"

    def state_dict(self):
        return super().state_dict() | dict(count=self.kept)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.kept = state["count"]


class ForShow(Keeping):
    def changed(self, x):
        return x


class Late(Keeping):
    "Its fraction counts in the last batches of a pass alone"

    def changed(self, x):
        return x * self.kept**0.5 if self.given[0] > 24 else x


class Beside(ExactLoader):
    "Counts in its dataset"

    def __iter__(self):
        for x, y in super().__iter__():
            self.dataset.n = getattr(self.dataset, "n", 0) + 1
            yield x * self.dataset.n, y


class Drawing(Keeping):
    def __init__(self, *args):
        super().__init__(*args)
        self.kept, self.dice = 1, torch.Generator().manual_seed(3)

    def __iter__(self):
        for x, y in ExactLoader.__iter__(self):
            yield x + torch.rand(6, generator=self.dice), y


class Mixing(Drawing):
    def __init__(self, *args):
        super().__init__(*args)
        self.other = ExactLoader(TensorDataset(X), 8, seed=5)

    def __iter__(self):
        for (x, y), (more,) in zip(ExactLoader.__iter__(self), self.other):
            yield x + more, y


class Stamped(ExactLoader):
    "Was given, or has noted when it was made, what is another one in each process"

    def __init__(self, *args):
        super().__init__(*args)
        self.start, self.config = time.perf_counter(), {"folder": f"run-{time.time_ns()}"}

    def __iter__(self):
        yield from super().__iter__()


def test_what_was_given_to_a_loader_is_not_named(tmp_path):
    make = lambda: Stamped(TensorDataset(X, Y), 8)
    assert goes_on(make, tmp_path, cuts=[2, 8]) == []
    assert goes_on(make, tmp_path / "between", cuts=[8], every="epoch") == []


class Many(ExactLoader):
    "Keeps much, of which a little counts in the last batches of a pass"

    def __init__(self, *args):
        super().__init__(*args)
        self.losses = {i: [] for i in range(48)}

    def __iter__(self):
        for i, (x, y) in enumerate(super().__iter__()):
            yield x * (1 + len(self.losses[0])) if i > 2 else x, y
        self.losses[0].append(x.mean().item())


@pytest.mark.parametrize("every", [1, "epoch"])
def test_of_much_that_it_keeps_a_little_is_seen(every, tmp_path):
    again = cut(Many, tmp_path, 8, every)
    with pytest.warns(UserWarning, match="`Many` keeps `losses`"):
        again()


def cut(kind, folder, at, every=1):
    run(kind(TensorDataset(X, Y), 8), folder, at, every=every)
    return lambda: run(kind(TensorDataset(X, Y), 8), folder, every=every)


@pytest.mark.parametrize("kind", [Cached, Keeping, Drawing, Mixing])
def test_what_it_makes_of_things_that_are_not_saved_is_refused(kind, tmp_path):
    again = cut(kind, tmp_path, 8)
    with pytest.raises(ResumeMismatch, match=f"`{kind.__name__}.__iter__` makes them of something"):
        again()


@pytest.mark.parametrize(
    "kind, name", [(Keeping, "kept"), (Drawing, "dice"), (Mixing, "other"), (ForShow, "kept")]
)
def test_between_two_epochs_what_it_keeps_is_named(kind, name, tmp_path):
    again = cut(kind, tmp_path, 8, "epoch")
    with pytest.warns(UserWarning, match=f"`{kind.__name__}` keeps .*`{name}`"):
        again()


@pytest.mark.parametrize("kind", [ForShow, Late])
def test_within_an_epoch_it_is_named_where_the_last_batch_is_the_same(kind, tmp_path):
    again = cut(kind, tmp_path, 8)
    with pytest.warns(UserWarning, match=f"`{kind.__name__}` keeps `kept`"):
        again()


def test_what_it_keeps_elsewhere_is_seen_by_the_batch(tmp_path):
    again = cut(Beside, tmp_path, 8)
    with pytest.warns(
        UserWarning, match="came out otherwise when it was read again, since `Beside.__iter__`"
    ):
        again()


def test_what_its_state_tells_goes_on(tmp_path):
    make = lambda: Told(TensorDataset(X, Y), 8)
    assert goes_on(make, tmp_path, cuts=[2, 8, 12, 13]) == []
    assert goes_on(make, tmp_path / "between", cuts=[8], every="epoch") == []


@pytest.mark.parametrize("kind", [Ahead, Cached, Twice])
def test_a_place_that_is_asked_for_by_another_way_is_named(kind):
    def before_batch(trainer):
        if trainer.training and trainer.batch_num:
            trainer.dls.train.state_dict()

    with pytest.warns(UserWarning, match=f"`{kind.__name__}.__iter__` has not read one batch"):
        run(kind(TensorDataset(X, Y), 8), cbs=[before_batch])


def test_set_epoch_within_a_pass_is_named():
    def before_batch(trainer):
        trainer.dls.train.set_epoch(trainer.epoch)

    with pytest.warns(UserWarning, match="`set_epoch.0.` was called while a loop reads"):
        run(exact_loader(TensorDataset(X, Y), 8), cbs=[before_batch])


def test_set_epoch_before_an_epoch_is_not_named():
    def before_epoch(trainer):
        if trainer.training:
            trainer.dls.train.set_epoch(trainer.epoch)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(exact_loader(TensorDataset(X, Y), 8), cbs=[before_epoch])


class Noisy(IterableDataset):
    "Read by workers, with random numbers"

    def __iter__(self):
        for i in range(get_worker_info().id, 48, 2):
            yield X[i] + torch.rand(6), Y[i]


def late(i):
    "As if the second worker had to open a large file"
    time.sleep(0.3 * i)


def test_a_look_while_workers_begin_leaves_them_their_epoch():
    def batches(looks):
        loader, found = exact_loader(Noisy(), 8, num_workers=2, worker_init_fn=late), []
        for n, batch in enumerate(loader):
            found.append(batch[0].sum().item())
            if looks and n == 0:
                next(iter(loader))
        return found

    assert batches(looks=True) == batches(looks=False)


@pytest.mark.parametrize("kind", [Ahead, Twice])
def test_between_two_epochs_it_goes_on_and_is_not_named(kind, tmp_path):
    make = lambda: kind(TensorDataset(X, Y), 8)
    assert goes_on(make, tmp_path, cuts=[14], every="epoch") == []


class Late(Anew):
    def state_dict(self):
        return dict(at=self.begun)

    def __iter__(self):
        self.begun = 0
        return super().__iter__()


def test_a_stream_that_tells_nothing_before_its_first_row_hears_why():
    with pytest.raises(AttributeError) as told:
        run(exact_loader(Late(), 8))
    assert any("`Late.state_dict` was asked before the first row" in note for note in told.value.__notes__)
