"""Evaluations and predictions of several processes, checked against those of one.

Data are in double precision; there are batches that cannot be shared evenly, and a last one with fewer rows
than processes. Every process must have the same history and the same predictions to the last bit.
"""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import several
from results import check, differences, fitted, trainer, without_times
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.evaluate.evaluator import EvaluatorCB
from isaac_loop.evaluate.capturing import CapturePredsCB
from isaac_loop.evaluate.reports import PredictionsCSVCB, ReportCB, regression_scores
from isaac_loop.evaluate.text_comparison import TextComparisonCB
from isaac_loop.loop.events import CancelBatchException, CancelEpochException, Order
from isaac_loop.metrics.metrics import MetricsCB

pytestmark = pytest.mark.processes


def mae(preds, targets):
    return (preds - targets).abs()


def loaders():
    "Training rows; validation rows of which the last batch of 5 has one"
    train = exact_loader(several.rows(37), 8, seed=3)
    return DataLoaders(train, exact_loader(several.rows(21, 1), 5, shuffle=False))


def shuffled():
    "A plain loader that shuffles, and a subset of rows in an order of its own"
    order = torch.utils.data.SubsetRandomSampler(range(3, 17))
    return DataLoader(several.rows(23, 7), 6, shuffle=True), DataLoader(several.rows(23, 7), 4, sampler=order)


class AskCB:
    "Takes predictions and measurements in the middle of a fit"

    order = Order.REPORT

    def __init__(self, *asked):
        self.asked, self.found = asked, []

    def log(self, trainer):
        self.found += [ask(trainer) for ask in self.asked]


def asked(make, *questions, n_epochs=1, **kwargs):
    "What is found in a fit, in this process or as one of several"
    ask = AskCB(*questions)
    made = trainer(*make(), ask, dls=loaders, **kwargs)
    made.fit(n_epochs, lr=0.05)
    return ask.found


def of_all(found):
    "Predictions as they can be compared"
    return [found.preds, found.targets, found.losses, list(found.indices)]


def check_answers(make, *questions, sizes=(2, 3), **kwargs):
    alone = asked(make, *questions, **kwargs)
    for size in sizes:
        found = several.in_processes(size, lambda: asked(make, *questions, **kwargs))
        for other in found[1:]:
            assert repr(other) == repr(found[0])
        wrong = differences(alone, found[0])
        assert not wrong, wrong[:3]
    return alone


@pytest.mark.shows("AIT-63")
def test_predictions_are_complete_in_every_process_and_in_the_order_of_the_data():
    plain, subset = shuffled()
    found = check_answers(
        lambda: [MetricsCB(show=False)],
        lambda t: of_all(t.get_preds(with_loss=True)),
        lambda t: of_all(t.get_preds(plain)),
        lambda t: of_all(t.get_preds(subset)),
        lambda t: of_all(t.get_preds("train")),
        lambda t: t.validate(plain, mae=mae),
        lambda t: t.validate(mae=mae),
    )
    assert found[0][3] == list(range(21)) and found[2][3] == list(range(3, 17))


def test_a_stream_is_read_whole_by_every_process():
    batches = [several.rows(n, n).tensors for n in (3, 1, 2)]
    found = check_answers(
        list,
        lambda t: of_all(t.get_preds(batches)),
        lambda t: t.validate(batches, mae=mae),
        sizes=(2,),
    )
    assert len(found[0][0]) == 6


@dataclasses.dataclass
class Output:
    "What some models give"

    said: torch.Tensor
    loss: torch.Tensor


class Padded(nn.Module):
    "Gives rows with as many entries as the longest of the batch has, and a number for the batch"

    def __init__(self):
        super().__init__()
        self.inner = several.net()

    def forward(self, x):
        said = self.inner(x)
        n = 1 + int((x[:, 0].abs().max() * 2).item()) if self.padded else 1
        return Output(said.expand(-1, n), said.mean())


@pytest.mark.shows("NEMO-46")
@pytest.mark.parametrize("padded", [False, True])
def test_structures_and_rows_of_unequal_length_are_gathered(padded):
    "Padded to the longest row of the share, which may not be that of the batch: the values are the same"

    def ask(t):
        said = t.get_preds().preds
        return [[float(row[0]) for row in said.said], said.loss]

    Padded.padded = padded

    def loss_func(preds, targets):
        return (preds.said[:, :1] - targets).square().mean()

    check_answers(list, ask, sizes=(2,), loss_func=loss_func, model=Padded)


class Turning(nn.Module):
    "Fills its dict in another order for a single row"

    def __init__(self):
        super().__init__()
        self.inner = several.net()

    def forward(self, x):
        said = dict(once=self.inner(x), twice=self.inner(x) * 2)
        return said if len(x) > 1 else dict(reversed(said.items()))


def test_dicts_are_gathered_by_key_though_shares_of_one_row_have_another_order():
    "Of 3 processes the last has one row of each batch"

    def ask(t):
        said = t.get_preds().preds
        return sorted(said), said["once"], said["twice"]

    def loss_func(preds, targets):
        return (preds["once"] - targets).square().mean()

    (names, once, twice), *_ = check_answers(list, ask, sizes=(2, 3), loss_func=loss_func, model=Turning)
    assert names == ["once", "twice"] and torch.allclose(twice, 2 * once)


def captured(make):
    capture = CapturePredsCB(with_loss=True)
    made = trainer(*make(), capture, dls=loaders)
    made.fit(1, lr=0.05)
    return of_all(capture.result()), [without_times(row) for row in made.history]


def test_what_a_validation_pass_captures_is_there_for_reports_and_after_the_fit():
    make = lambda: [MetricsCB(show=False), ReportCB(regression_scores)]  # noqa: E731
    alone = captured(make)
    for size in (2, 3):
        found = several.in_processes(size, captured, make)
        assert repr(found[0]) == repr(found[-1])
        assert not differences(list(alone), list(found[0]))


class LeaveFirst:
    "Leaves the validation pass, or a batch of it, in one process, before others have begun"

    order, on_train = Order.FIRST, False

    def __init__(self, event, error):
        self.error = error
        setattr(self, event, self._leave)

    def _leave(self, trainer):
        if trainer.ranks.rank == 1:
            raise self.error("on purpose")


@pytest.mark.parametrize("event", ["before_epoch", "before_batch"])
def test_where_one_process_leaves_a_validation_pass_the_others_keep_their_rows(event):
    "Nothing waits, and all have the same numbers"

    def run():
        leave = LeaveFirst(event, CancelEpochException if event == "before_epoch" else CancelBatchException)
        texts = TextComparisonCB(lambda row: str(row), tokens=lambda preds: preds.round().int(), show=False)
        capture = CapturePredsCB()
        made = trainer(leave, MetricsCB(mae=mae, show=False), texts, capture, dls=loaders)
        made.fit(2, lr=0.05)
        return [without_times(row) for row in made.history], list(capture.result().indices)

    found = several.in_processes(2, run)
    assert repr(found[0]) == repr(found[1])
    assert len(found[0][1]) == 13 and "mae" in found[0][0][-1]  # 3 rows of each batch of 5, and the last one


def test_main_writes_predictions_in_the_order_of_the_data(tmp_path):
    def run(folder):
        written = []
        csv = PredictionsCSVCB(folder / "{epoch}.csv", with_loss=True)
        capture = CapturePredsCB(write=lambda found: written.append(list(found.indices)))
        ask = AskCB(lambda t: t.write_preds(lambda found: written.append(list(found.indices))))
        trainer(MetricsCB(show=False), csv, ask, capture, dls=loaders).fit(1, lr=0.05)
        return [i for part in written for i in part]

    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = run(tmp_path / "one")
    found = several.in_processes(2, run, tmp_path / "two")
    assert found == [alone, []] and alone == [*range(21)] * 2
    one, two = ((tmp_path / name / "0.csv").read_text().splitlines() for name in ("one", "two"))
    assert len(one) == 22 and one[0] == two[0]
    for a, b in zip(one[1:], two[1:]):
        assert not differences(*([float(o.strip("[]")) for o in line.split(",")] for line in (a, b)))


def test_predictions_after_the_fit_in_main_alone_ask_nobody():
    def run():
        made = trainer(MetricsCB(show=False), dls=loaders)
        made.fit(1, lr=0.05)
        return len(made.get_preds()) if several.rank() == 0 else None

    assert several.in_processes(2, run) == [21, None]


class Stream:
    "Batches without a length"

    def __iter__(self):
        return iter([several.rows(n, n).tensors for n in (3, 2)])


@pytest.mark.parametrize("kind", ["updates", "functions", "sets"])
def test_evaluators_measure_what_one_process_would(kind):
    def make():
        count = {"updates": dict(updates=2, at_start=True, n_batches=2), "functions": dict(epochs=1)}.get(
            kind, {}
        )
        sets, functions = dict(all="valid", seen="train"), {}
        if kind == "sets":
            sets = dict(own=shuffled()[0], stream=Stream())
        if kind == "functions":

            def look(tensors, store):
                store["n"] = store.get("n", 0) + len(tensors["preds"])

            functions = dict(user_iter_callback=look, user_epochs_done_callback=lambda store: dict(store))
        return [MetricsCB(show=False), EvaluatorCB(sets, mae=mae, **count, **functions)]

    rows = check(make, (2, 3), dls=loaders)
    if kind == "functions":
        assert (rows[-1]["all_n"], rows[-1]["seen_n"]) == (21, 37)


class LeaveLate:
    "Leaves a training batch, or the pass, in one process when the others have made their update"

    on_valid = False

    def __init__(self, error):
        self.error = error

    def after_step(self, trainer):
        if trainer.ranks.rank == 1 and trainer.batch_num == 1:
            raise self.error("on purpose")


@pytest.mark.parametrize("error", [CancelBatchException, CancelEpochException])
def test_an_evaluation_in_the_middle_of_a_pass_does_not_wait_for_a_process_that_leaves(error):
    def make():
        return [MetricsCB(show=False), EvaluatorCB(updates=1, mae=mae), LeaveLate(error)]

    found = several.in_processes(2, fitted, make)
    assert repr(found[0]) == repr(found[1])


def test_a_function_that_wishes_to_stop_stops_all():
    def run():
        made = trainer(MetricsCB(show=False), dls=loaders)
        look = lambda tensors, store: made.request_stop("enough")  # noqa: E731
        made.add_callbacks(EvaluatorCB(user_iter_callback=look, epochs=1))
        made.fit(5, lr=0.05)
        return len(made.history), made.stop_reason

    assert several.in_processes(2, run) == [(1, "enough")] * 2


def test_reports_and_texts_are_shown_by_main_alone(capfd):
    def make():
        said = []
        report = EvaluatorCB(report=print, name="evaluator")
        score = ReportCB(mean=lambda preds, targets: said.append(print("scored")) or preds.mean())
        shown = TextComparisonCB(str, tokens=lambda preds: preds.round().int())
        return [MetricsCB(show=False), report, score, shown]

    several.in_processes(2, fitted, make, 1)
    out = capfd.readouterr().out
    assert [out.count(o) for o in ("after 7 updates", "scored", "texts, epoch 0")] == [1, 1, 1]


def texts(**kwargs):
    return TextComparisonCB(lambda row: "".join(chr(97 + o % 26) for o in row), **kwargs)


def text_loaders():
    "Rows of token numbers as inputs and targets; one that is a list of strings for validation"
    tokens = torch.randint(26, (17, 3), generator=torch.Generator().manual_seed(5))
    data = TensorDataset(tokens.double(), tokens)
    return DataLoaders(exact_loader(data, 4, seed=1), exact_loader(data, 7, shuffle=False))


class Spell(nn.Module):
    "Scores for each of 26 letters"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(26, 26, dtype=torch.float64)

    def forward(self, x):
        return self.table(x.long())


def spelling_loss(preds, targets):
    return nn.functional.cross_entropy(preds.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("how", ["preds", "generate", "strings", "one row"])
def test_texts_are_compared_as_in_one_process(how):
    kwargs = {}
    if how == "generate":
        kwargs = dict(generate=lambda model, inputs: model(*inputs).argmax(-1))
    if how == "strings":
        kwargs = dict(truth=lambda batch: [str(o) for o in batch[1].tolist()], n_samples=6)

    def dls():
        made = text_loaders()
        if how == "one row":
            made.valid = exact_loader(made.valid.dataset, 1, shuffle=False)
        return made

    def run():
        shown = texts(show=False, **kwargs)
        made = trainer(MetricsCB(show=False), shown, dls=dls, model=Spell, loss_func=spelling_loss)
        made.fit(1, lr=0.05)
        return [without_times(row) for row in made.history], shown.rows

    alone = run()
    for size in (2, 3):
        found = several.in_processes(size, run)
        assert repr(found[0]) == repr(found[-1])
        assert not differences(list(alone), list(found[0]))
    assert len(alone[1]) == {"strings": 6, "one row": 1}.get(how, 4)
