"Going on with what no longer fits, or with other data: what is noticed, and what is said."

import random
import shutil
import warnings
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.stop.interrupts import InterruptCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.data.fingerprint import rows_of
from isaac_loop.data.replay_loaders import ReplayLoader
from isaac_loop.state.errors import ResumeMismatch, StateOwnerMissing
from isaac_loop.state.store import CheckpointStore
from runs import Cut, CutCB, Rows, callbacks, fit, make_loaders, make_trainer, same, tree
from resumed import MOMENTS, broken_off, plain_loaders, SeenCB, Stream


pytestmark = pytest.mark.filterwarnings("ignore:The training loader does not know", "ignore:Reading")


# ---- what no longer fits


@pytest.mark.shows("NEMO-29", "NEMO-36")
def test_what_would_give_a_wrong_result_is_refused_with_both_sides(tmp_path):
    "Strict by default, before the first batch, and nothing in the folder changes"
    broken_off(tmp_path / "run", every=4)

    def wider():
        return nn.Sequential(
            nn.Linear(8, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 3)
        )

    with pytest.raises(ResumeMismatch, match=r"`0.weight` was \(16, 8\), and is \(20, 8\)"):
        fit(make_trainer(callbacks(tmp_path / "run"), model=wider()))

    def halves(params, lr):
        return optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr)

    with pytest.raises(ResumeMismatch, match=r"groups had \[6\] parameters, and have \[2, 4\]"):
        fit(make_trainer(callbacks(tmp_path / "run"), opt_func=halves))
    with pytest.raises(StateOwnerMissing, match="EMACB"):
        fit(make_trainer([BasicTrainCB(), MetricsCB(), CheckpointCB(tmp_path / "run")]))
    with pytest.raises(StateOwnerMissing, match="SeenCB"):
        fit(make_trainer([*callbacks(tmp_path / "run"), SeenCB()]))
    relaxed = fit(make_trainer([*callbacks(tmp_path / "run", strict=False), SeenCB()]))
    assert relaxed.n_updates == 21
    with pytest.raises(ValueError, match="samples would be left out"):
        broken_off(tmp_path / "other", every=4)
        fit(make_trainer(callbacks(tmp_path / "other"), make_loaders(seed=8)))


def test_random_numbers_of_a_device_that_is_not_here_are_an_error_unless_told_otherwise(
    tmp_path, monkeypatch
):
    from isaac_loop.state import run_state

    real = run_state.compact_random_state
    monkeypatch.setattr(
        run_state,
        "compact_random_state",
        lambda: real() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 64},
    )
    broken_off(tmp_path / "run", every=4)
    with pytest.raises(ResumeMismatch, match="cuda"):
        fit(make_trainer(callbacks(tmp_path / "run")))
    fit(make_trainer(callbacks(tmp_path / "run", strict=False)))


@pytest.mark.shows("NEMO-25", "NEMO-26", "NEMO-30", "NEMO-32", "NEMO-37", "AIT-41", "NEMO-24")
def test_the_seeds_example_with_its_six_arguments(tmp_path):
    "Folder, how often, how many, another folder to load from, and insisting on it; the end is always saved"
    fit(make_trainer(callbacks(tmp_path / "run", every=4, keep_last=4)))
    assert [o.step for o in CheckpointStore(tmp_path / "run", read_only=True).list()] == [12, 16, 20, 21]
    found = CheckpointStore(tmp_path / "run", read_only=True).list()[0]
    same(
        fit(make_trainer()),
        fit(make_trainer(callbacks(tmp_path / "other", every="epoch", keep_last=2, resume=found.path))),
    )
    assert [o.step for o in CheckpointStore(tmp_path / "other", read_only=True).list()] == [14, 21]
    for every in (0, -1, 1.5, "batch", None, True):
        with pytest.raises(ValueError, match="`every` is"):
            CheckpointCB(tmp_path / "run", every=every)
    with pytest.raises(ValueError, match="`resume` is"):
        CheckpointCB(tmp_path / "run", resume="yes")
    with pytest.raises(ValueError, match="what is best"):
        CheckpointCB(tmp_path / "run", every="best")


@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.parametrize("loaders", [make_loaders, plain_loaders])
@pytest.mark.parametrize("every", [1, "epoch"])
def test_an_interrupt_after_a_request_to_stop_loses_nothing(at, loaders, every, tmp_path):
    "A time limit, then Ctrl-C in the validation: the next run validates and ends; so for a second fit"

    def after_batch(trainer):
        if trainer.training and trainer.epoch == 1 and trainer.batch_num == min(at, trainer.n_batches - 1):
            trainer.request_stop("enough")

    whole = fit(fit(make_trainer([*callbacks(), after_batch], loaders())), 1)
    cbs = lambda: [*callbacks(tmp_path / "run", every=every), InterruptCB()]
    first = make_trainer(cbs(), loaders())
    with pytest.raises(KeyboardInterrupt):
        fit(first, callbacks=[after_batch, MOMENTS["in validation"]])
    assert CheckpointStore(tmp_path / "run", read_only=True).latest().step == first.n_updates
    again = fit(make_trainer(cbs(), loaders()))  # Who has asked to stop need not be there any more
    assert again.stop_reason == "enough" and len(again.history) == 2
    same(whole, fit(again, 1))


# ---- other data, though as many


class Points:
    "Rows by number; `read` counts them"

    read = 0

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.read += 1
        return self.x[i], self.y[i]


def points(n=40, order=slice(None), seed=1):
    rows = Rows(n, False)
    return Points((rows.x + 0.01 * seed)[order], rows.y[order])


class Tokens(Points):
    "Only the labels are the same whenever they are read"

    def __getitem__(self, i):
        return self.x[i] + torch.randn(8) + random.random() + torch.randn((), generator=self.own), self.y[i]

    own = torch.Generator()


def hugging_face(order=range(40)):
    from datasets import Dataset

    rows = Rows(40, False)
    return (
        Dataset.from_dict({"x": rows.x.tolist(), "y": rows.y.tolist()})
        .select(order)
        .with_transform(lambda o: {"x": torch.tensor(o["x"]) + torch.randn(8), "y": o["y"]})
    )


def batches_of(dataset, **options):
    return DataLoader(
        dataset,
        **{
            "batch_size": 8,
            "collate_fn": lambda rows: tuple(
                torch.stack([torch.as_tensor(v) for v in o])
                for o in zip(*(tuple(r.values()) if isinstance(r, dict) else r for r in rows))
            ),
        }
        | options,
    )


BACK = list(reversed(range(40)))
OTHERS = {
    "reordered": (lambda: batches_of(points()), lambda: batches_of(points(order=BACK)), "other rows"),
    "two rows changed places": (
        lambda: batches_of(points(10)),
        lambda: batches_of(points(10, [0, 1, 5, 3, 4, 2, 6, 7, 8, 9])),
        "2 differ, the first of them row 2",
    ),
    "replaced": (lambda: batches_of(points()), lambda: batches_of(points(seed=2)), "other rows"),
    "longer": (lambda: batches_of(points()), lambda: batches_of(points(48)), "it had 40 rows, and has 48"),
    "augmented": (
        lambda: batches_of(Tokens(*vars(points()).values())),
        lambda: batches_of(Tokens(*vars(points(order=BACK)).values())),
        "other rows",
    ),
    "a subset": (
        lambda: batches_of(Subset(points(), range(32))),
        lambda: batches_of(Subset(points(), range(8, 40))),
        "other rows",
    ),
    "Hugging Face": (
        lambda: batches_of(hugging_face()),
        lambda: batches_of(hugging_face(BACK)),
        "other rows",
    ),
    "exact": (lambda: exact_loader(points(), 8), lambda: exact_loader(points(seed=2), 8), "other rows"),
    "a list": (lambda: list(batches_of(points())), lambda: list(batches_of(points()))[::-1], "other rows"),
    "batch size": (
        lambda: batches_of(points()),
        lambda: batches_of(points(), batch_size=9),
        "`batch_size` was 8, and is 9",
    ),
    "shuffled": (
        lambda: batches_of(points()),
        lambda: batches_of(points(), shuffle=True),
        "`sampler` was SequentialSampler",
    ),
    "its own fingerprint": (
        lambda: batches_of(own_print("a")),
        lambda: batches_of(own_print("b")),
        "`fingerprint` was 'a', and is 'b'",
    ),
}


def own_print(text):
    dataset = points()
    dataset.fingerprint = text
    return dataset


@pytest.mark.parametrize("what", OTHERS)
def test_other_data_are_refused_before_anything_is_put_back(what, tmp_path):
    "Between two epochs, where nothing but the rows tells; the same data, made anew, go on"
    make, other, words = OTHERS[what]

    def make_run(train, **options):
        return make_trainer(
            [BasicTrainCB(), MetricsCB(), CheckpointCB(tmp_path / "run", **options)],
            DataLoaders(train),
            optim.SGD,
        )

    fit(make_run(make()), 1, valid=False)
    again = make_run(other())
    before = tree(again.model.state_dict())
    with pytest.raises(ResumeMismatch, match=words):
        fit(again, 2, valid=False)
    assert tree(again.model.state_dict()) == before
    relaxed = make_run(other(), strict=False, resume=tmp_path / "run")
    relaxed.CheckpointCB.folder = tmp_path / "other"
    with pytest.warns(UserWarning, match=words):
        fit(relaxed, 2, valid=False)
    assert [o["epoch"] for o in fit(make_run(make()), 2, valid=False).history] == [0, 1]


def test_other_rows_for_validation_are_refused(tmp_path):
    def make_run(rows):
        return make_trainer(
            [BasicTrainCB(), MetricsCB(), CheckpointCB(tmp_path / "run")],
            DataLoaders(exact_loader(points(), 8), exact_loader(rows, 8, shuffle=False)),
        )

    fit(make_run(points(16)), 1)
    with pytest.raises(ResumeMismatch, match="`dls.valid`: it has other rows"):
        fit(make_run(points(16, seed=2)), 2)
    fit(make_run(points(16)), 2)


def stream_of_points(num_workers):
    return exact_loader(Stream(points()), 8, num_workers=num_workers)


class OwnLoader(DataLoader):
    "One of a user's class"


def plain_streams(num_workers):
    "The same stream, read by loaders of three kinds"
    loaders = [kind(Stream(points()), 8, num_workers=num_workers) for kind in (DataLoader, OwnLoader)]
    return [*loaders, ReplayLoader(loaders[1])]


def test_another_order_in_the_middle_of_an_epoch_is_refused_even_if_it_need_not_be_strict(tmp_path):
    "The weights are still those of the script"

    def make_run(loader):
        return make_trainer(
            [BasicTrainCB(), MetricsCB(), CheckpointCB(tmp_path / "run", every=3, strict=False)],
            DataLoaders(loader),
            optim.SGD,
        )

    for first, then, words in [
        (exact_loader(points(), 8, seed=1), exact_loader(points(), 8, seed=2), "`seed` was 1, and is 2"),
        (batches_of(points()), batches_of(points(), batch_size=9), "`batch_size` was 8"),
        (stream_of_points(0), stream_of_points(2), "`num_workers` was 0, and is 2"),
        *((a, b, "`num_workers` was 0, and is 2") for a, b in zip(plain_streams(0), plain_streams(2))),
    ]:
        with pytest.raises(Cut):
            fit(make_run(first), 1, valid=False, callbacks=CutCB("before_batch", lambda t: t.n_updates == 3))
        again = make_run(then)
        before = tree(again.model.state_dict())
        with pytest.raises(ResumeMismatch, match=words):
            fit(again, 1, valid=False)
        assert tree(again.model.state_dict()) == before
        shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("make", [stream_of_points, lambda n: plain_streams(n)[0]])
@pytest.mark.parametrize("was, now", [(0, 1), (1, 0)])
def test_one_worker_of_a_stream_for_none_may_draw_other_numbers_and_leaves_out_no_row(
    make, was, now, tmp_path
):
    def make_run(n):
        checkpoint = CheckpointCB(tmp_path / "run", every=3)
        return make_trainer([BasicTrainCB(), checkpoint], DataLoaders(make(n)), optim.SGD)

    with pytest.raises(Cut):
        fit(make_run(was), 1, valid=False, callbacks=CutCB("before_batch", lambda t: t.n_updates == 3))
    words = f"`num_workers` was {was}, and is {now}; .* draws random numbers would draw others"
    with pytest.raises(ResumeMismatch, match=words) as failed:
        fit(make_run(now), 1, valid=False)
    assert "left out" not in str(failed.value)


def test_a_look_at_the_data_is_no_part_of_the_run(tmp_path):
    "No row is counted as read, no generator moves, and no file is opened before workers start"

    class Lazy(Points):
        file, numbers = None, random.Random(1)

        def __getitem__(self, i):
            self.file = self.file or open(__file__)
            return super().__getitem__(i)[0] + self.numbers.random(), self.y[i]

    dataset = Lazy(*vars(points()).values())
    dataset.numbers = random.Random(1)
    seen = []

    def before_epoch(trainer):
        seen.append(
            (
                dataset.read,
                dataset.file,
                dataset.numbers.getstate() == random.Random(1).getstate(),
                torch.get_rng_state(),
                random.getstate(),
            )
        )

    for folder in (None, tmp_path / "run"):
        fit(
            make_trainer(
                [BasicTrainCB(), *([CheckpointCB(folder)] * bool(folder)), before_epoch],
                DataLoaders(batches_of(dataset)),
                optim.SGD,
            ),
            1,
            valid=False,
        )
        dataset.read, dataset.file, dataset.numbers = 0, None, random.Random(1)
    assert seen[0][:3] == seen[1][:3] == (0, None, True)
    assert torch.equal(seen[0][3], seen[1][3]) and seen[0][4] == seen[1][4]


def test_what_is_seldom_drawn_by_numbers_of_ones_own_is_no_other_row(tmp_path):
    "A flip comes up twice alike in one row, so it is taken for random only because it is not in others"

    class Flipped(Points):
        def __init__(self, *flips):
            self.flips, self.ticks, (self.x, self.y) = flips, count(), vars(points()).values()

        def __getitem__(self, i):
            return self.x[i] * self.flips[next(self.ticks) % 4], self.y[i]

    def make_run(*flips):
        return make_trainer(
            [BasicTrainCB(), CheckpointCB(tmp_path / "run")],
            DataLoaders(batches_of(Flipped(*flips))),
            optim.SGD,
        )

    fit(make_run(1, 1, 1, -1), 1, valid=False)
    fit(make_run(-1, -1, 1, -1), 2, valid=False)


def test_data_that_grow_in_the_course_of_a_fit_go_on_in_the_same_program(tmp_path):
    "What counts is what they were when the run began"
    batches = list(batches_of(points()))
    trainer = make_trainer([BasicTrainCB(), CheckpointCB(tmp_path / "run")], DataLoaders(batches), optim.SGD)
    with pytest.raises(Cut):
        fit(
            trainer,
            2,
            valid=False,
            callbacks=[
                CutCB("before_batch", lambda t: t.epoch == 1),
                type("GrowCB", (), {"after_epoch": lambda self, trainer: batches.append(batches[0])})(),
            ],
        )
    with pytest.raises(ResumeMismatch, match="had 5 rows, and has 6"):
        fit(
            make_trainer(
                [BasicTrainCB(), CheckpointCB(tmp_path / "run")], DataLoaders(list(batches)), optim.SGD
            ),
            2,
            valid=False,
        )
    assert fit(trainer, 2, valid=False).n_updates == 11


def test_data_that_nobody_can_compare_are_named_and_go_on(tmp_path, capsys):
    "A stream, and a run that was saved before there were fingerprints"

    def make_run(train):
        return make_trainer([BasicTrainCB(), CheckpointCB(tmp_path / "run")], DataLoaders(train), optim.SGD)

    make_run(exact_loader(Stream(Rows(40, False)), 8)).fit(1, valid=False)
    make_run(exact_loader(Stream(Rows(40, False)), 8)).fit(2, valid=False)
    assert "cannot be told: `dls.train` is a stream." in capsys.readouterr().out
    saved = make_run(exact_loader(points(), 8))
    weights, state = runs_state(saved)
    with CheckpointStore(tmp_path / "old") as store:
        path = store.save(weights, {k: v for k, v in state.items() if k not in ("data", "loss_func")}, 5)
    again = make_run(exact_loader(points(), 8))
    again.CheckpointCB.folder, again.CheckpointCB.resume = tmp_path / "new", str(path)
    again.fit(2, lr=0.02, valid=False)
    assert "`dls.train` had no fingerprint when it was saved" in capsys.readouterr().out


def runs_state(trainer):
    from isaac_loop.state.run_state import take_state

    trainer.remove_callbacks("CheckpointCB")
    fit(trainer, 1, valid=False)
    return take_state(trainer, 1)


def weighed(preds, targs, weight=0.5):
    return weight * F.cross_entropy(preds, targs)


class LongLoss(nn.CrossEntropyLoss):
    "Has a buffer of many numbers"

    def __init__(self, many):
        super().__init__()
        self.register_buffer("many", many)


@pytest.mark.parametrize(
    "first,then,words",
    [
        (F.cross_entropy, nn.CrossEntropyLoss(), "`cross_entropy.*` with `CrossEntropyLoss"),
        (weighed, partial(weighed, weight=2.0), "weight=2"),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), "label_smoothing=0.1"),
        (lambda p, t: 0.5 * weighed(p, t), lambda p, t: 0.25 * weighed(p, t), "lambda"),
        (LongLoss(torch.ones(100)), LongLoss(torch.ones(100).index_fill(0, torch.tensor([7]), 5.0)), "long"),
    ],
)
def test_another_loss_is_told(first, then, words, tmp_path, recwarn):
    def make_run(loss_func):
        trainer = make_trainer(
            [BasicTrainCB(), CheckpointCB(tmp_path / "run", strict=False)],
            DataLoaders(exact_loader(points(), 8)),
            optim.SGD,
        )
        trainer.loss_func = loss_func
        return trainer

    fit(make_run(first), 1, valid=False)
    fit(make_run(first), 2, valid=False)
    assert not recwarn.list
    if isinstance(first, nn.Module) == isinstance(then, nn.Module):
        with pytest.warns(UserWarning, match="had the loss"):
            fit(make_run(then), 3, valid=False)
    else:
        with pytest.raises(ResumeMismatch, match="loss_func"):
            fit(make_run(then), 3, valid=False)


@pytest.mark.parametrize(
    "first, then, words",
    [
        (
            F.cross_entropy,
            nn.CrossEntropyLoss(),
            "it was a function, and is a module, `CrossEntropyLoss`, of which",
        ),
        (
            nn.CrossEntropyLoss(),
            F.cross_entropy,
            "it was a module, whose state is saved, and is a function now",
        ),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(torch.ones(3)), r"`weight` was not there, and is \(3,\)"),
    ],
)
def test_a_loss_with_another_state_is_refused_in_words(first, then, words, tmp_path):
    def make_run(loss_func):
        dls = DataLoaders(exact_loader(points(), 8))
        trainer = make_trainer([BasicTrainCB(), CheckpointCB(tmp_path / "run")], dls, optim.SGD)
        trainer.loss_func = loss_func
        return trainer

    fit(make_run(first), 1, valid=False)
    with pytest.raises(ResumeMismatch, match=f"`trainer.loss_func`: {words}"):
        make_run(then).fit(2, valid=False)


class CountedLoss(nn.CrossEntropyLoss):
    "Counts its calls in a buffer, and makes another with the first of them"

    def __init__(self, weight=None):
        super().__init__(weight)
        self.register_buffer("n", torch.tensor(0))
        self.register_buffer("first", None)

    def forward(self, preds, targs):
        loss = super().forward(preds, targs)
        self.n += 1
        self.first = loss.detach() if self.first is None else self.first
        return loss


@pytest.mark.parametrize("then", [None, [3.0, 1.0, 2.0]])
def test_weights_of_classes_are_those_of_the_script_and_what_a_loss_counts_comes_back(then, tmp_path):
    "The words say that the run goes on with another loss, so it does"

    def make_run(weight):
        dls = DataLoaders(exact_loader(points(), 8))
        trainer = make_trainer([BasicTrainCB(), CheckpointCB(tmp_path / "run")], dls, optim.SGD)
        trainer.loss_func = CountedLoss(None if weight is None else torch.tensor(weight))
        return trainer

    loss = fit(make_run([1.0, 2.0, 3.0]), 1, valid=False).loss_func
    with pytest.warns(UserWarning, match="had the loss .*1.0, 2.0, 3.0"):
        again = fit(make_run(then), 2, valid=False).loss_func
    assert again.n == 2 * loss.n and again.first == loss.first
    assert tree(again.weight) == tree(then if then is None else torch.tensor(then))


class CountsReadings:
    "Each row is fainter every time that it is read"

    def __init__(self, n, kind):
        self.x = Rows(n, augment=False)
        self.seen = {"tensor": torch.zeros, "array": np.zeros, "list": lambda n: [0] * n}[kind](n)
        self.parts = [dict(seen=self.seen)]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.parts[0]["seen"][i] += 1
        x, y = self.x[i]
        return x / float(self.parts[0]["seen"][i]), y


@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_a_dataset_that_notes_what_was_read_is_left_as_it_is(kind, tmp_path):
    "Rows were read for the fingerprint from a copy that shared its tensors, so a checkpoint changed the run"
    data = lambda: DataLoaders(DataLoader(CountsReadings(40, kind), 8), make_loaders().valid)
    make = lambda *more: make_trainer([BasicTrainCB(), MetricsCB(), *more], data())
    same(fit(make()), fit(make(CheckpointCB(tmp_path))))


def test_a_dataset_whose_large_tensor_changes_when_it_is_read_is_named(tmp_path):
    data = CountsReadings(40, "tensor")
    data.parts[0]["seen"] = torch.zeros(2**19)
    with pytest.warns(UserWarning, match="a row of `CountsReadings` changes a large tensor.*`fingerprint`"):
        rows_of(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows_of(CountsReadings(40, "tensor"))
