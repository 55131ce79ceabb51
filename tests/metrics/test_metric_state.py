"""What a metric of one's own has gathered goes on as callbacks do: settings are the script's, and what
cannot be kept is named by a warning. Runs are compared with those that were never stopped."""

import warnings
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchmetrics
from torcheval.metrics import MulticlassAccuracy

import runs
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.checkpoints.rewind import RewindCB
from isaac_loop.metrics.any_metric import MetricOn
from isaac_loop.metrics.metric_state import Noted, load_metric
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.train.training import BasicTrainCB


class Confusion:
    "Counts in an array of NumPy, and remembers the last few rows"

    def __init__(self, n=3, window=4):
        self.n, self.window = n, window

    def reset(self):
        self.counts, self.last = np.zeros((self.n, self.n)), deque(maxlen=self.window)

    def update(self, preds, targets):
        np.add.at(self.counts, (targets.numpy(), preds.argmax(1).numpy()), 1)
        self.last.extend(targets.tolist())

    def compute(self):
        return {"accuracy": float(self.counts.trace() / self.counts.sum()), "last": sum(self.last)}


class Held(Confusion):
    "Holds what is no plain data and never changes"

    def __init__(self):
        super().__init__()
        self.vocabulary, self.folder = SimpleNamespace(words=["a", "b", "c"]), Path("somewhere")


class Table(Confusion):
    "Counts in an object that `reset` makes"

    def reset(self):
        super().reset()
        self.table = SimpleNamespace(n=0, rows=[])

    def update(self, preds, targets):
        super().update(preds, targets)
        self.table.n += len(targets)
        self.table.rows.append(targets[0])

    def compute(self):
        return super().compute() | {"n": self.table.n, "rows": sum(self.table.rows)}


class Boxes(Confusion):
    "Keeps objects that nobody can make again"

    def update(self, preds, targets):
        super().update(preds, targets)
        self.boxes.append(SimpleNamespace(preds=preds))

    def reset(self):
        super().reset()
        self.boxes = []


class TopK:
    "Share of rows whose target is among the `k` highest scores"

    def __init__(self, k):
        self.k = k

    def reset(self):
        self.hits = self.n = 0

    def update(self, preds, targets):
        self.hits += (preds.topk(self.k).indices == targets[:, None]).any(1).sum().item()
        self.n += len(targets)

    def compute(self):
        return self.hits / self.n


def make(metric, *more):
    return runs.make_trainer([BasicTrainCB(), MetricsCB(train_metrics=True, show=False, m=metric), *more])


def warned_in(f):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = f()
    return result, [str(o.message) for o in told]


@pytest.mark.parametrize("kind", [Confusion, Held, Table])
@pytest.mark.parametrize("at", [4, 11])
def test_a_metric_of_ones_own_goes_on_in_the_middle_of_a_pass(kind, at, tmp_path):
    def make_one(*more):
        return make(kind(), *more, CheckpointCB(tmp_path / "run", every=1))

    cut = runs.CutCB("before_batch", lambda t: t.training and t.epoch * 7 + t.batch_num == at)

    def both():
        with pytest.raises(runs.Cut):
            runs.fit(make_one(cut), 2)
        return runs.fit(make_one(), 2)

    resumed, told = warned_in(both)
    assert not told
    runs.same(runs.fit(make(kind()), 2), resumed)


def test_what_cannot_be_kept_is_named_once_if_it_matters(tmp_path):
    _, told = warned_in(lambda: runs.fit(make(Boxes(), CheckpointCB(tmp_path / "a", every=2)), 2))
    assert len(told) == 1 and "`train_m.boxes` changed" in told[0] and "load_state_dict" in told[0]
    _, told = warned_in(lambda: runs.fit(make(Boxes(), CheckpointCB(tmp_path / "b")), 3))
    assert not told  # Between two passes `reset` makes them anew


SETTINGS = {
    "own": (TopK(1), TopK(3), "`m.k=3` (saved: 1)"),
    "chosen": (
        MetricOn(TopK(1), lambda *batch: batch),
        MetricOn(TopK(3), lambda *batch: batch),
        "`m.metric.k=3` (saved: 1)",
    ),
    "torchmetrics": (
        torchmetrics.Accuracy("multiclass", num_classes=3, top_k=1),
        torchmetrics.Accuracy("multiclass", num_classes=3, top_k=3),
        "`m.top_k=3` (saved: 1)",
    ),
    "torcheval": (
        MulticlassAccuracy(k=1, num_classes=3),
        MulticlassAccuracy(k=3, num_classes=3),
        "`m.k=3` (saved: 1)",
    ),
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_settings_of_a_metric_are_those_of_the_script(name, tmp_path):
    before, now, text = SETTINGS[name]
    runs.fit(make(before, CheckpointCB(tmp_path / "run")), 1)
    trainer, told = warned_in(lambda: runs.fit(make(now, CheckpointCB(tmp_path / "run")), 2))
    assert trainer.history.latest("m") == 1.0
    assert len(told) == 1 and text in told[0] and "measure something else from here on" in told[0]


def test_the_second_fit_of_a_script_knows_what_was_counted_in_the_first(tmp_path):
    def script(metric, *more):
        trainer = make(metric)
        runs.fit(trainer, 1)
        trainer.validate()
        return runs.fit(trainer, 2, callbacks=[*more, CheckpointCB(tmp_path / "run", every=1)])

    def both():
        with pytest.raises(runs.Cut):
            script(TopK(2), runs.CutCB("before_batch", lambda t: t.epoch == 0 and t.batch_num == 5))
        return script(TopK(2))

    resumed, told = warned_in(both)
    assert not told
    trainer = make(TopK(2))
    runs.fit(trainer, 1)
    runs.fit(trainer, 2)
    assert resumed.history.latest("m") == trainer.history.latest("m")


def test_a_metric_that_adds_up_over_epochs_goes_back_with_the_run():
    class Evaluations(TopK):
        def __init__(self, k):
            super().__init__(k)
            self.seen = 0

        def compute(self):
            self.seen += 1
            return super().compute()

    trainer = make(Evaluations(1), RewindCB())
    counted = trainer.MetricsCB.metrics["m"]
    runs.fit(trainer, 2)
    assert counted.seen == 2
    trainer.rewind(1)
    _, told = warned_in(lambda: runs.fit(trainer, 2))
    assert counted.seen == 2 and not told
    trainer.rewind(0)
    _, told = warned_in(lambda: runs.fit(trainer, 3))
    assert counted.seen == 3 and not told


def test_states_of_earlier_versions_are_read():
    metric = TopK(3)
    noted = Noted([metric])
    assert load_metric(metric, dict(k=3, hits=5, n=8), noted) == ([], [])
    assert metric.compute() == 5 / 8
    pair = SimpleNamespace(parts=[TopK(3), TopK(2)])
    load_metric(pair, dict(parts=[dict(k=3, hits=1, n=2), dict(k=2, hits=1, n=4)]), Noted([pair]))
    assert [o.compute() for o in pair.parts] == [1 / 2, 1 / 4]
    tensors = SimpleNamespace(total=torch.zeros(1))
    load_metric(tensors, dict(total=torch.ones(1)))
    assert tensors.total == 1
