"""Reports over all predictions, files of predictions, derived columns and bootstrap estimates.

Scores are checked against scikit-learn, passes over data are counted, and files are read back.
"""

import csv
import json
import math
import os
import warnings
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F
from torcheval.metrics import MulticlassAccuracy
from torch.utils.data import DataLoader, TensorDataset

import isaac_loop.evaluate.evaluation  # noqa: F401
from isaac_loop.metrics.confidence import Estimates, bootstrap
from isaac_loop.train.averaging import EMACB, SWACB
from isaac_loop.show.columns import DerivedColumnsCB, PrintColumnsCB, RenameColumnsCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.evaluate.capturing import CapturePredsCB, Predictions
from isaac_loop.evaluate.reports import (
    PredictionsCSVCB,
    ReportCB,
    binary_scores,
    classification_scores,
    regression_scores,
    text_scores,
    write_preds_csv,
)
from isaac_loop.metrics.any_metric import MetricOn
from isaac_loop.evaluate.evaluator import EvaluatorCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.train.training import BasicTrainCB, NBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelEpochException, Order
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer
from observing import bits, random_states

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(22, 4, generator=G), torch.randint(0, 3, (22,), generator=G)
DATA, OTHER = TensorDataset(X, Y), [(X[:9], Y[:9]), (X[9:13], Y[9:13])]


PASSES = weakref.WeakKeyDictionary()  # What a module has itself is given back after an evaluation in a fit


class Counting(nn.Linear):
    "Counts its passes in evaluation mode"

    @property
    def n(self):
        return PASSES.get(self, 0)

    def forward(self, x):
        PASSES[self] = self.n + (not self.training)
        return super().forward(x)


def make_trainer(*callbacks, model=None, loss_func=F.cross_entropy, data=DATA):
    set_seed(0)
    dls = DataLoaders(DataLoader(data, 6, shuffle=True), DataLoader(data, 8))
    return Trainer(
        dls,
        loss_func,
        optim.SGD,
        model or Counting(4, 3),
        [BasicTrainCB(), MetricsCB(show=False), *callbacks],
    )


def accuracy(preds, targets):
    return (preds.argmax(1) == targets).float().mean()


# One pass for all who ask


class AskCB:
    order = Order.REPORT

    def __init__(self, name, **options):
        self.name, self.options, self.found = name, options, []

    def log(self, trainer):
        self.found.append(trainer.epoch_preds(**self.options))


@pytest.mark.shows("AIT-19")
@pytest.mark.parametrize("captured, passes", [(True, 1), (False, 2)])
def test_one_pass_serves_all_who_ask_at_the_end_of_an_epoch(captured, passes):
    "Reports, files and own questions; the validation pass has three batches"
    asking = [AskCB("a"), AskCB("b", dl="valid")]
    trainer = make_trainer(*asking, ReportCB(classification_scores), *[CapturePredsCB()] * captured)
    trainer.fit(2)
    assert trainer.model.n == 2 * 3 * passes
    assert asking[0].found[1] is asking[1].found[1] and asking[0].found[0] is not asking[0].found[1]
    for o in (asking[0].found[1], trainer.get_preds()):
        assert torch.allclose(o.preds, trainer.model(X).detach(), atol=1e-6) and torch.equal(o.targets, Y)


@pytest.mark.shows("AIT-19")
def test_force_looks_again_and_losses_are_computed_when_somebody_wants_them():
    trainer = make_trainer(
        AskCB("a"), AskCB("b", force=True), AskCB("c", with_loss=True), AskCB("d", with_loss=True)
    )
    trainer.fit(1)
    a, b, c, d = (getattr(trainer, o).found[0] for o in "abcd")
    assert a is not b and c is d and c is not b and torch.equal(a.preds, c.preds)
    assert torch.allclose(c.losses, F.cross_entropy(c.preds, Y, reduction="none"))
    assert trainer.model.n == 3 * 4
    again = trainer.epoch_preds(), trainer.epoch_preds()
    assert again[0] is not again[1], "outside a fit the weights may have changed"


def test_in_the_middle_of_a_pass_the_capture_is_not_taken_for_whole():
    seen = []

    class MidCB:
        order, on_train = Order.REPORT, False

        def after_batch(self, trainer):
            seen.append(len(trainer.epoch_preds()))

    make_trainer(CapturePredsCB(), MidCB()).fit(1)
    assert seen == [22, 22, 22]


def test_captured_predictions_of_another_stage_are_not_used():
    "In the next training pass the weights are others"
    seen = []

    class LaterCB:
        order, on_valid = Order.REPORT, False

        def cleanup_epoch(self, trainer):
            seen.append(bits(trainer.epoch_preds().preds) == bits(trainer.get_preds().preds))

    make_trainer(CapturePredsCB(), LaterCB()).fit(2)
    assert seen == [True] * 2


@pytest.mark.shows("AIT-09", "AIT-71")
def test_callbacks_hear_each_batch_of_a_prediction():
    "Predictions and targets of every batch, and the end, without any training"
    heard = []

    class HearCB:
        order = Order.REPORT

        def after_batch(self, trainer):
            heard.append(
                (trainer.preds.shape[0], trainer.split(trainer.batch)[1][0].shape[0], trainer.training)
            )

        def after_epoch(self, trainer):
            heard.append("end")

    trainer = make_trainer()
    weights = bits(trainer.model.weight)
    trainer.get_preds(OTHER, callbacks=HearCB())
    assert heard == [(9, 9, False), (4, 4, False), "end"] and bits(trainer.model.weight) == weights


@pytest.mark.parametrize(
    "average",
    [
        lambda: EMACB(0.95),
        lambda: SWACB(0.5, update_bn=False),
        lambda: SWACB(0.0, every="update", update_bn=False),
    ],
)
@pytest.mark.parametrize("captured", [False, True])
def test_predictions_are_those_of_the_weights_that_validation_measures(average, captured, tmp_path):
    """One row describes one model, with an average in the trainer and with or without a `CapturePredsCB`.

    That holds at any time of the fit, and never outside of it."""
    loss = lambda preds, targets: F.cross_entropy(preds, targets)
    asked = []

    class AskAlwaysCB:
        order = Order.REPORT

        def after_batch(self, trainer):
            if trainer.epoch == 3:
                asked.append(
                    (trainer.epoch_preds(with_loss=True).losses.mean().item(), trainer.average.evaluated)
                )

        def log(self, trainer):
            asked.append((trainer.epoch_preds(with_loss=True).losses.mean().item(), None))

    mean = average()
    mean.name = "average"
    trainer = make_trainer(
        mean,
        ReportCB(mean=loss),
        ReportCB(dl={"copy": DataLoader(DATA, 5)}, mean=loss, name="r2"),
        PredictionsCSVCB(tmp_path / "p.csv", with_loss=True),
        AskAlwaysCB(),
        *[CapturePredsCB()] * captured,
    )
    trainer.fit(4, lr=0.5)
    history = trainer.history
    assert history["valid_mean"] == pytest.approx(history["valid_loss"], rel=1e-5) and history[
        "copy_mean"
    ] == pytest.approx(history["valid_loss"], rel=1e-5)
    in_file = [float(o["loss"]) for o in read(tmp_path / "p.csv")]
    assert np.mean(in_file) == pytest.approx(history.latest("valid_loss"), rel=1e-5) and asked[-1][
        0
    ] == pytest.approx(history.latest("valid_loss"), rel=1e-5)
    outside = trainer.epoch_preds(with_loss=True).losses.mean().item()
    assert (
        outside
        == pytest.approx(trainer.validate()["valid_loss"], rel=1e-5)
        != pytest.approx(history.latest("valid_loss"), rel=1e-5)
    )
    assert len(asked) == 3 + 4 + 3 + 1


def test_predictions_are_not_kept_when_the_average_has_changed_at_the_same_update():
    "SWACB takes the weights in when the epoch ends, after the last update"
    asked = {}

    class AskTwiceCB:
        on_valid = False

        def after_batch(self, trainer):
            asked["batch"] = trainer.epoch_preds("train")

        def cleanup_epoch(self, trainer):
            asked["epoch"] = trainer.epoch_preds("train")

    trainer = make_trainer(SWACB(0.0, update_bn=False), AskTwiceCB())
    trainer.fit(2, lr=0.5)
    assert not torch.equal(asked["batch"].preds, asked["epoch"].preds)
    assert torch.allclose(asked["epoch"].preds, trainer.SWACB.evaluated(X).detach(), atol=1e-6)


# Scores


@pytest.mark.shows("AIT-69")
@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 30), n_classes=st.integers(2, 5), seed=st.integers(0, 1000))
def test_scores_are_those_of_scikit_learn(n, n_classes, seed):
    import sklearn.metrics as sk

    g = torch.Generator().manual_seed(seed)
    preds, targets = torch.randn(n, n_classes, generator=g), torch.randint(0, n_classes, (n,), generator=g)
    said = preds.argmax(1)
    ours = {k: float(v) for k, v in classification_scores(preds, targets).items()}
    theirs = sk.precision_recall_fscore_support(targets, said, average="macro", zero_division=0)
    assert list(ours.values()) == pytest.approx([sk.accuracy_score(targets, said), *theirs[:3]])
    scores, yes = (preds[:, 0] * 2).round() / 2, (targets > 0).long()  # Rounded: equal scores
    ours = {k: float(v) for k, v in binary_scores(scores, yes).items()}
    expected = [
        sk.accuracy_score(yes, scores > 0),
        *sk.precision_recall_fscore_support(yes, scores > 0, average="binary", zero_division=0)[:3],
    ]
    assert list(ours.values())[:4] == pytest.approx(expected)
    if len(set(yes.tolist())) == 2:
        assert ours["roc_auc"] == pytest.approx(sk.roc_auc_score(yes, scores))
    else:
        assert math.isnan(ours["roc_auc"])
    numbers, other = preds[:, 0].double(), torch.randn(n, generator=g).double()
    ours = {k: float(v) for k, v in regression_scores(numbers, other).items()}
    assert ours["mse"] == pytest.approx(sk.mean_squared_error(other, numbers)) and ours[
        "rmse"
    ] == pytest.approx(ours["mse"] ** 0.5)
    assert ours["mae"] == pytest.approx(sk.mean_absolute_error(other, numbers))
    if n > 1:
        assert ours["r2"] == pytest.approx(sk.r2_score(other, numbers))


@pytest.mark.shows("AIT-69")
def test_text_scores():
    assert text_scores(["A b", "c", "", "x y"], ["a  B!", "d", "", "y z"]) == dict(
        exact_match=0.5, word_f1=pytest.approx((1 + 0 + 1 + 0.5) / 4)
    )
    assert text_scores([], []) == dict(exact_match=0, word_f1=0)
    with pytest.raises(ValueError):
        text_scores(["a"], [])


def floats_of(scores):
    return {k: float(v) for k, v in scores.items()}


def test_scores_of_masks_count_every_pixel():
    g = torch.Generator().manual_seed(0)
    preds, masks = torch.randn(3, 4, 5, 6, generator=g), torch.randint(0, 4, (3, 5, 6), generator=g)
    by_pixel = floats_of(classification_scores(preds.movedim(1, -1).reshape(-1, 4), masks.flatten()))
    assert floats_of(classification_scores(preds, masks)) == by_pixel
    assert floats_of(classification_scores(preds.argmax(1), masks)) == by_pixel
    assert math.isnan(classification_scores(torch.zeros(0, 3), torch.zeros(0).long())["accuracy"])


@pytest.mark.parametrize(
    "preds, targets, words",
    [
        (torch.randn(6, 1), torch.ones(6, 1), r"shape \(6, 1\) are not one score.*Use `binary_scores`"),
        (torch.randn(6), torch.ones(6), r"shape \(6,\) are not one score"),
        (torch.randn(6, 5), torch.ones(6, 5), r"Targets \(6, 5\) are not one class number"),
        (torch.randn(6, 5), torch.ones(6, 1).long(), r"Targets \(6, 1\) are not one class number"),
        (torch.ones(6).long(), torch.ones(5).long(), r"Targets \(5,\) are not one class number"),
        (torch.randn(6, 5), None, "Targets None are not one class number"),
    ],
)
def test_what_is_no_class_for_each_example_is_refused(preds, targets, words):
    "As the confusion matrix does"
    with pytest.raises(TypeError, match=words):
        classification_scores(preds, targets)


@pytest.mark.parametrize("ignored", [-1, -100])
def test_targets_that_are_no_class_are_counted_neither_by_scores_nor_in_the_matrix(ignored):
    "The loss ignores them, and a class of them would halve the accuracy"
    targets = torch.tensor([0, 1, 2, *[ignored] * 3])
    preds = torch.eye(3)[[0, 1, 1, 0, 1, 2]]
    expected = classification_scores(preds[:3], targets[:3])
    assert classification_scores(preds, targets) == expected and expected["accuracy"] == pytest.approx(2 / 3)
    assert Predictions(preds, targets).confusion_matrix().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
    assert math.isnan(classification_scores(preds[3:], targets[3:])["accuracy"])
    assert Predictions(preds[3:], targets[3:]).confusion_matrix().sum() == 0


def test_predictions_filled_up_with_the_ignored_number_are_left_out_as_well():
    said, targets = torch.tensor([0, 1, -100]), torch.tensor([0, 0, -100])
    assert classification_scores(said, targets)["accuracy"] == 0.5
    found = Predictions(said, targets).confusion_matrix(decode=lambda preds: preds)
    assert found.tolist() == [[1, 1], [0, 0]]


def test_a_class_below_0_that_is_predicted_counts_and_has_no_place_in_a_matrix():
    said, targets = torch.tensor([-1, 1, 1]), torch.tensor([-1, -1, 1])
    assert classification_scores(said, targets)["recall"] == 0.75
    with pytest.raises(ValueError, match="Class -1 is predicted, but classes are counted from 0"):
        Predictions(said, targets).confusion_matrix(decode=lambda preds: preds)


def test_a_target_without_a_score_is_refused_by_scores_and_matrix():
    preds, targets = torch.eye(3), torch.tensor([0, 1, 255])
    with pytest.raises(ValueError, match="Class 255 occurs, but there are 3 classes.*turn it into -100"):
        classification_scores(preds, targets)
    with pytest.raises(ValueError, match="Class 255 occurs, but there are 3 classes"):
        Predictions(preds, targets).confusion_matrix()


def test_a_report_on_a_binary_net_says_what_to_use():
    yes_or_no = TensorDataset(X, (Y > 0).float()[:, None])
    parts = dict(model=nn.Linear(4, 1), loss_func=F.binary_cross_entropy_with_logits, data=yes_or_no)
    with pytest.raises(TypeError, match="Use `binary_scores`.*`ReportCB"):
        make_trainer(ReportCB(classification_scores), **parts).fit(1)
    by_hand = lambda preds, targets: ((preds > 0).long(), targets.long())  # noqa: E731
    trainer = make_trainer(ReportCB(classification_scores, prepare=by_hand), **parts)
    trainer.fit(1)
    preds, targets = trainer.get_preds()
    right = ((preds > 0) == (targets > 0)).double().mean()
    assert trainer.history.latest("valid_accuracy") == pytest.approx(right.item())


def test_numbers_of_another_shape_than_their_targets_are_refused():
    for scores in (regression_scores, binary_scores):
        with pytest.raises(ValueError, match=r"of shapes \(2, 3\) and \(3, 2\)"):
            scores(torch.ones(2, 3), torch.ones(3, 2))
        column, row = torch.tensor([[1.0], [-2.0]]), torch.tensor([0.0, 1.0])
        assert floats_of(scores(column, row)) == floats_of(scores(column[:, 0], row))


def test_regression_scores_of_odd_targets():
    assert math.isnan(regression_scores(torch.ones(3), torch.ones(3))["r2"])
    with pytest.raises(ValueError, match="3 predictions and 2 targets"):
        regression_scores(torch.ones(3), torch.ones(2))
    assert math.isnan(float(regression_scores(torch.tensor([math.nan, 1]), torch.ones(2))["mse"]))


# The report


@pytest.mark.shows("AIT-32", "AIT-69", "SON-28")
def test_packages_metrics_and_functions_together_with_prefixes():
    "One of torchmetrics, one in the manner of Hugging Face, one by jiwer; on training and validation data"
    import jiwer
    import torchmetrics

    class HuggingFaceLike:
        "What `evaluate.load` gives, by its documentation"

        def compute(self, predictions=None, references=None):
            return {"exact": (predictions.argmax(1) == references).float().mean().item()}

    words = lambda o: [str(i) for i in o.tolist()]
    report = ReportCB(
        classification_scores,
        lambda preds, targets: dict(n=len(preds)),
        dl=["train", "valid"],
        hf=HuggingFaceLike(),
        wer=lambda p, t: jiwer.wer(words(t), words(p.argmax(1))),
        tm=torchmetrics.Accuracy(task="multiclass", num_classes=3),
    )
    trainer = make_trainer(report, CapturePredsCB())
    trainer.fit(2)
    row = trainer.history[-1]
    for name in ("train", "valid"):
        assert row[f"{name}_n"] == 22
        assert [row[f"{name}_hf_exact"], row[f"{name}_tm"], 1 - row[f"{name}_wer"]] == pytest.approx(
            [row[f"{name}_accuracy"]] * 3
        )
    assert row["valid_accuracy"] == pytest.approx(accuracy(trainer.model(X), Y).item())


WEIGHTED = [(x, y, torch.rand(len(y))) for x, y in OTHER]


def weighted_trainer(callback, batches, loss_func):
    set_seed(0)
    return Trainer(
        DataLoaders(batches, batches), loss_func, optim.SGD, nn.Linear(4, 3), [BasicTrainCB(), callback]
    )


@pytest.mark.parametrize("loader", ["several", "one pair"])
def test_a_metric_gets_targets_in_a_report_as_it_gets_them_in_a_pass(loader):
    if loader == "several":
        batches = WEIGHTED
        loss_func = lambda p, y, w: (F.cross_entropy(p, y, reduction="none") * w).mean()
        choose = lambda p, y, w: (p, y)
    else:
        batches = [(x, (y, w)) for x, y, w in WEIGHTED]
        loss_func = lambda p, pair: (F.cross_entropy(p, pair[0], reduction="none") * pair[1]).mean()
        choose = lambda p, pair: (p, pair[0])
    found = {}
    for make, column in ((MetricsCB, "acc"), (EvaluatorCB, "eval_acc"), (ReportCB, "valid_acc")):
        trainer = weighted_trainer(make(acc=MetricOn(MulticlassAccuracy(), choose)), batches, loss_func)
        trainer.fit(1)
        found[column] = trainer.history.latest(column)
    assert len(set(found.values())) == 1, found


def test_a_function_of_a_report_gets_several_targets_as_a_tuple():
    seen = []
    loss_func = lambda p, y, w: (F.cross_entropy(p, y, reduction="none") * w).mean()
    report = ReportCB(n=lambda preds, targets: seen.append(targets) or len(preds))
    weighted_trainer(report, WEIGHTED, loss_func).fit(1)
    assert type(seen[0]) is tuple and [len(o) for o in seen[0]] == [13, 13]


def test_an_error_of_a_metric_in_a_report_says_what_it_was_updated_with():
    loss_func = lambda p, y, w: (F.cross_entropy(p, y, reduction="none") * w).mean()
    with pytest.raises(TypeError) as e:
        weighted_trainer(ReportCB(acc=MulticlassAccuracy()), WEIGHTED, loss_func).fit(1)
    assert any(
        "`acc` was updated with predictions (13, 3) and targets (13,), (13,)" in o for o in e.value.__notes__
    )


@pytest.mark.shows("AIT-32", "AIT-42")
@pytest.mark.parametrize("every, expected", [(1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (None, [4]), (100, [4])])
def test_reports_come_every_so_many_epochs_and_after_the_last(every, expected):
    trainer = make_trainer(ReportCB(dl={"test": OTHER, "valid": "valid"}, every=every, accuracy=accuracy))
    trainer.fit(5)
    assert (
        [o["epoch"] for o in trainer.history if "test_accuracy" in o]
        == [o["epoch"] for o in trainer.history if "valid_accuracy" in o]
        == expected
    )


@pytest.mark.shows("AIT-42")
def test_a_report_comes_at_the_end_however_the_training_stops():
    "After a stop that nobody knew of, and without a validation pass"

    def log(trainer):
        if trainer.epoch == 1:
            trainer.request_stop("enough")

    trainer = make_trainer(ReportCB(accuracy=accuracy, every=None), log)
    trainer.fit(5)
    assert [o.get("valid_accuracy") is not None for o in trainer.history] == [False, True]
    trainer = make_trainer(ReportCB(accuracy=accuracy))
    trainer.fit(2, valid=False)
    assert "valid_accuracy" in trainer.history[-1]
    trainer.fit(0)


def test_a_report_changes_nothing_about_the_training(tmp_path):
    def outcome(*callbacks):
        trainer = make_trainer(*callbacks)
        trainer.fit(3, lr=0.1)
        return (
            [bits(o) for o in trainer.model.state_dict().values()],
            trainer.history["train_loss"],
            random_states(),
        )

    noisy = lambda preds, targets: torch.rand(())
    assert outcome() == outcome(
        ReportCB(classification_scores, dl=["train", "valid"], noisy=noisy),
        CapturePredsCB(with_loss=True),
        PredictionsCSVCB(tmp_path / "a.csv", dl="train"),
    )


@pytest.mark.shows("AIT-33")
def test_columns_of_a_report_can_be_watched():
    trainer = make_trainer(
        ReportCB(classification_scores),
        EarlyStoppingCB("valid_f1", mode="max", threshold=0.0),
        PrintColumnsCB("valid_f1", report=(lines := []).append),
    )
    trainer.fit(3)
    assert len(trainer.history) == 1 and lines[0].startswith("epoch 0: valid_f1 ")
    with pytest.raises(LookupError, match="Did you mean `valid_f1`"):
        make_trainer(ReportCB(classification_scores), EarlyStoppingCB("valid_f2", mode="max")).fit(1)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: ReportCB(), ValueError, "no function"),
        (lambda: ReportCB(5), TypeError, "cannot be called"),
        (lambda: ReportCB(accuracy=5), TypeError, "`accuracy` is 5"),
        (lambda: ReportCB(accuracy, every=0), ValueError, "`every` is 0"),
        (lambda: ReportCB(accuracy, every=True), ValueError, "`every`"),
        (lambda: ReportCB(accuracy, dl={}), ValueError, "empty dict"),
        (lambda: ReportCB(accuracy, dl=[]), ValueError, "empty dict"),
        (lambda: ReportCB(accuracy, dl=iter(OTHER)), TypeError, "walked only once"),
        (lambda: PredictionsCSVCB(None), TypeError, "`path` is None"),
        (lambda: PredictionsCSVCB("a.csv", dl=["train", "valid"]), ValueError, "Put `{name}`"),
        (lambda: PredictionsCSVCB("a.csv", every=-1), ValueError, "`every`"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_trouble_in_a_report_is_named():
    with pytest.raises(TypeError, match="a number needs a name"):
        make_trainer(ReportCB(accuracy)).fit(1)
    with pytest.raises(ValueError, match="`ReportCB` and `MetricsCB` both write the column `valid_loss`"):
        make_trainer(ReportCB(loss=accuracy)).fit(1)
    with pytest.raises(ValueError, match="data set `test` of `ReportCB` has no batches"):
        make_trainer(ReportCB(accuracy=accuracy, dl={"test": []})).fit(1)
    with pytest.raises(LookupError, match="Did you mean `valid`"):
        make_trainer(ReportCB(accuracy=accuracy, dl="vaild")).fit(1)

    def broken(preds, targets):
        raise ZeroDivisionError("oh")

    with pytest.raises(ZeroDivisionError) as e:
        make_trainer(ReportCB(score=broken)).fit(1)
    assert any("raised by `ReportCB.cleanup_epoch` at epoch 0" in o for o in e.value.__notes__)


# Files


def read(path):
    return list(csv.DictReader(open(path, newline="", encoding="utf-8")))


@pytest.mark.shows("PTA-61")
def test_a_file_holds_predictions_and_targets_of_the_newest_evaluation_only(tmp_path):
    "Both, one line for each example however many epochs there were, in the order of the data"
    trainer = make_trainer(
        PredictionsCSVCB(
            tmp_path / "new" / "preds.csv", with_loss=True, with_scores=True, classes=["a", "b", "c"]
        )
    )
    trainer.fit(3, lr=0.1)
    lines = read(tmp_path / "new" / "preds.csv")
    preds = trainer.model(X)
    assert [o["target"] for o in lines] == ["abc"[o] for o in Y] and [o["prediction"] for o in lines] == [
        "abc"[o] for o in preds.argmax(1)
    ]
    assert [int(o["index"]) for o in lines] == list(range(22)) and list(lines[0]) == [
        "index",
        "target",
        "prediction",
        "loss",
        "score_a",
        "score_b",
        "score_c",
    ]
    assert [float(o["score_b"]) for o in lines] == pytest.approx(preds[:, 1].tolist(), abs=1e-6)
    assert [float(o["loss"]) for o in lines] == pytest.approx(
        F.cross_entropy(preds, Y, reduction="none").tolist(), abs=1e-6
    )
    assert os.listdir(tmp_path / "new") == ["preds.csv"]


def test_one_file_for_each_epoch_or_data_set_if_asked(tmp_path):
    make_trainer(
        PredictionsCSVCB(f"{tmp_path}/{{name}}-{{epoch}}.csv", dl={"valid": "valid", "other": OTHER}, every=2)
    ).fit(3)
    assert sorted(os.listdir(tmp_path)) == ["other-1.csv", "other-2.csv", "valid-1.csv", "valid-2.csv"]
    assert len(read(tmp_path / "other-2.csv")) == 13 and len(read(tmp_path / "valid-1.csv")) == 22


@pytest.mark.shows("PTA-61")
def test_a_file_that_cannot_be_written_leaves_the_old_one_whole(tmp_path, monkeypatch):
    "Written aside and put in place at once; a full disk costs a warning"
    path = tmp_path / "preds.csv"
    trainer = make_trainer(PredictionsCSVCB(path))
    trainer.fit(1)
    before = path.read_bytes()

    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr("isaac_loop.show.media_files.os.replace", full)
    with pytest.warns(UserWarning, match="No space left.*Training goes on"):
        trainer.fit(1, lr=0.5)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["preds.csv"]
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError):
        write_preds_csv(path, trainer.get_preds(), decode=lambda preds: 1 / 0)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["preds.csv"]


def test_a_place_where_nothing_can_be_written_is_known_before_the_first_batch(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "preds.csv"):
        trainer = make_trainer(PredictionsCSVCB(path))
        with pytest.raises(OSError, match="cannot write to"):
            trainer.fit(1)
        assert trainer.n_updates == 0


def test_a_validation_pass_that_was_cut_short_gives_the_lines_it_had(tmp_path):
    make_trainer(PredictionsCSVCB(tmp_path / "preds.csv"), CapturePredsCB(), NBatchCB(1, on_train=False)).fit(
        1
    )
    assert len(read(tmp_path / "preds.csv")) == 8

    class CutCB:
        on_train = False

        def before_batch(self, trainer):
            if trainer.batch_num == 2:
                raise CancelEpochException("enough")

    make_trainer(PredictionsCSVCB(tmp_path / "preds.csv"), CapturePredsCB(), CutCB()).fit(1)
    assert len(read(tmp_path / "preds.csv")) == 16


def test_files_of_other_kinds_of_predictions(tmp_path):
    "Numbers, structures, texts, NaN, no targets"
    path = tmp_path / "preds.csv"
    write_preds_csv(path, Predictions(torch.tensor([[0.5], [math.nan]]), torch.tensor([[1.0], [2.0]])))
    assert read(path) == [
        dict(index="0", target="1.0", prediction="0.5"),
        dict(index="1", target="2.0", prediction="nan"),
    ]
    write_preds_csv(
        path,
        Predictions(
            dict(box=torch.ones(2, 2, 2), score=torch.tensor([0.5, 0.25])),
            (torch.tensor([1, 2]), ["a, b", 'say "c"']),
            indices=[7, 9],
        ),
    )
    assert read(path)[1] == dict(
        index="9",
        target_0="2",
        target_1='say "c"',
        prediction_box="[[1.0, 1.0], [1.0, 1.0]]",
        prediction_score="0.25",
    )
    write_preds_csv(path, Predictions(torch.ones(2, 3)))
    assert json.loads(read(path)[0]["prediction"]) == [1, 1, 1] and "target" not in read(path)[0]
    write_preds_csv(
        path,
        Predictions(torch.tensor([-1.0, 1.0]), torch.tensor([0, 1])),
        classes=["no", "yes"],
        decode=lambda preds: (preds > 0).long(),
    )
    assert [o["prediction"] for o in read(path)] == ["no", "yes"]
    with pytest.raises(ValueError, match="`classes` names 1"):
        write_preds_csv(path, Predictions(torch.ones(2, 3), torch.tensor([0, 1])), classes=["a"])
    with pytest.raises(TypeError, match="not one score for each"):
        write_preds_csv(path, Predictions(torch.ones(2)), with_scores=True)


@pytest.mark.shows("AIT-42")
def test_everything_at_the_end_of_a_training(tmp_path):
    "The final evaluation on validation and test data, their scores, and true and predicted labels"
    sets = {"valid": "valid", "test": OTHER}
    trainer = make_trainer(
        ReportCB(classification_scores, dl=sets, every=None),
        PredictionsCSVCB(f"{tmp_path}/{{name}}.csv", dl=sets, every=None),
    )
    trainer.fit(3)
    for name in sets:
        lines = read(tmp_path / f"{name}.csv")
        assert sum(o["target"] == o["prediction"] for o in lines) / len(lines) == pytest.approx(
            trainer.history.latest(f"{name}_accuracy")
        )
        assert trainer.history[f"{name}_accuracy"][:2] == [None, None]


# Columns


@pytest.mark.shows("AIT-34")
def test_a_derived_column_is_there_for_all_who_read_rows():
    "Also derived from a derived one, once at the end, and watched by early stopping"
    trainer = make_trainer(
        DerivedColumnsCB(
            gap=lambda row: row["valid_loss"] - row["train_loss"], twice=lambda row: 2 * row["gap"]
        ),
        DerivedColumnsCB(at_end=True, name="end", best=lambda h: min(h["gap"])),
        EarlyStoppingCB("twice", mode="min", threshold=1e9),
    )
    trainer.fit(3)
    assert len(trainer.history) == 1 and trainer.history.latest("twice") == 2 * trainer.history.latest(
        "gap"
    ) == 2 * trainer.history.latest("best")


@pytest.mark.shows("AIT-33", "AIT-34", "AIT-35")
def test_a_missing_column_is_an_error_or_left_out():
    "Strict or lenient"
    double = lambda row: 2 * row["acc"]
    with pytest.raises(LookupError, match=r"row has no `acc`; it has \['fit', 'epoch', 'train_loss'") as e:
        make_trainer(DerivedColumnsCB(double=double)).fit(1)
    assert any("while deriving the column `double`" in o for o in e.value.__notes__)
    with pytest.raises(LookupError, match="no `acc`"):
        make_trainer(DerivedColumnsCB(at_end=True, best=lambda h: max(h["acc"]))).fit(1)
    with pytest.raises(LookupError, match="no `acc`"):
        make_trainer(RenameColumnsCB(acc="accuracy")).fit(1)
    with pytest.raises(LookupError, match="`acc`, which no callback records"):
        make_trainer(PrintColumnsCB("acc")).fit(1)
    trainer = make_trainer(
        DerivedColumnsCB(strict=False, double=double),
        RenameColumnsCB(strict=False, acc="accuracy", train_loss="loss"),
        PrintColumnsCB("acc", "loss", strict=False, report=(lines := []).append),
    )
    with pytest.warns(UserWarning, match="`acc`") as heard:
        trainer.fit(3)
    assert (
        len([o for o in heard if "`acc`" in str(o.message)]) == 1
        and len(lines) == 3
        and all("loss " in o and "acc" not in o for o in lines)
    )
    assert "double" not in trainer.history.names() and "loss" in trainer.history.names()


@pytest.mark.shows("AIT-33")
def test_a_column_that_comes_now_and_then_is_printed_when_it_is_there():
    "Also strictly"
    trainer = make_trainer(
        ReportCB(every=2, accuracy=accuracy),
        PrintColumnsCB("train_loss", "valid_accuracy", list_names=True, report=(lines := []).append),
    )
    trainer.fit(3)
    assert lines[0].startswith("columns: fit, epoch, train_loss") and [
        "valid_accuracy" in o for o in lines[1:]
    ] == [False, True, True]


@pytest.mark.shows("AIT-35")
def test_renamed_columns_keep_their_place_and_can_be_watched():
    trainer = make_trainer(
        RenameColumnsCB({"valid_loss": "validation loss"}, train_loss="training_loss"),
        EarlyStoppingCB("training_loss", threshold=1e9),
    )
    trainer.fit(2)
    assert (
        trainer.history.names() == ["fit", "epoch", "training_loss", "validation loss", "elapsed"]
        and len(trainer.history) == 1
    )
    swapped = make_trainer(RenameColumnsCB(train_loss="valid_loss", valid_loss="train_loss"))
    swapped.fit(1)
    (plain := make_trainer()).fit(1)
    assert swapped.history.latest("valid_loss") == plain.history.latest("train_loss")
    make_trainer(
        RenameColumnsCB(train_loss="valid_loss", valid_loss="train_loss"), EarlyStoppingCB("valid_loss")
    ).fit(1)


def test_who_watches_a_name_that_is_renamed_away_is_told():
    "It would never see a value"
    for watcher in (EarlyStoppingCB("valid_loss"), PrintColumnsCB("valid_loss")):
        trainer = make_trainer(RenameColumnsCB(valid_loss="test_loss"), watcher)
        with pytest.raises(LookupError, match="Watch `test_loss`"):
            trainer.fit(1)
        assert trainer.n_updates == 0


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: DerivedColumnsCB(), ValueError, "no function"),
        (lambda: DerivedColumnsCB(a=5), TypeError, "`a` is 5"),
        (lambda: RenameColumnsCB(), ValueError, "no names"),
        (lambda: RenameColumnsCB(a="c", b="c"), ValueError, "hide the other"),
        (lambda: PrintColumnsCB(every=0), ValueError, "`every` is 0"),
        (lambda: RenameColumnsCB(epoch="ep"), ValueError, "`epoch` tells the rows"),
        (lambda: RenameColumnsCB(train_loss="fit"), ValueError, "`fit` tells the rows"),
        (lambda: PrintColumnsCB(3), TypeError, "given 3, which is no name"),
        (lambda: PrintColumnsCB(["a", "b"]), TypeError, "one by one"),
    ],
)
def test_columns_that_make_no_sense_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


# Bootstrap


@pytest.mark.shows("SON-29")
@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 40), seed=st.integers(0, 1000))
def test_estimates_are_those_of_a_loop_written_by_hand(n, seed):
    "Same draws, NumPy's mean, deviation and quantiles"
    g = torch.Generator().manual_seed(seed)
    preds, targets = torch.randn(n, 3, generator=g), torch.randint(0, 3, (n,), generator=g)
    before = random_states()
    found = bootstrap(preds, targets, n_samples=50, level=0.8, seed=seed, accuracy=accuracy).to_dict()[
        "accuracy"
    ]
    assert random_states() == before
    g, values = torch.Generator().manual_seed(seed), []
    for _ in range(50):
        rows = torch.randint(n, (n,), generator=g)
        values.append(accuracy(preds[rows], targets[rows]).item())
    assert found == dict(
        value=pytest.approx(accuracy(preds, targets).item()),
        mean=pytest.approx(np.mean(values)),
        std=pytest.approx(np.std(values, ddof=1), abs=1e-9),
        low=pytest.approx(np.quantile(values, 0.1)),
        high=pytest.approx(np.quantile(values, 0.9)),
        n=50,
    )


@pytest.mark.shows("SON-29", "SON-28")
def test_bootstrap_takes_metric_objects_dicts_texts_and_predictions_of_a_trainer():
    from torcheval.metrics import MulticlassAccuracy

    trainer = make_trainer()
    found = bootstrap(
        *trainer.get_preds(),
        n_samples=20,
        accuracy=accuracy,
        torcheval=MulticlassAccuracy(),
        scores=classification_scores,
    )
    assert isinstance(found, Estimates) and [o["metric"] for o in found.rows] == [
        "accuracy",
        "torcheval",
        *(f"scores_{o}" for o in classification_scores.names),
    ]
    of = found.to_dict()
    for o in ("torcheval", "scores_accuracy"):
        assert of[o] == pytest.approx(of["accuracy"], abs=1e-6)
    texts = bootstrap(["a", "b", "c"], ["a", "b", "d"], n_samples=20, text=text_scores).to_dict()
    assert texts["text_exact_match"]["value"] == pytest.approx(2 / 3) and texts["text_exact_match"]["std"] > 0
    structures = bootstrap(
        dict(a=torch.arange(5.0)),
        (torch.arange(5.0), torch.zeros(5)),
        n_samples=5,
        same=lambda p, t: (p["a"] == t[0]).float().mean(),
    )
    assert structures.rows[0]["mean"] == 1


@pytest.mark.shows("SON-29")
def test_bootstrap_takes_arrays_of_numpy():
    "The metric gets arrays too"
    g = torch.Generator().manual_seed(0)
    preds, targets = torch.randn(9, 3, generator=g), torch.randint(0, 3, (9,), generator=g)

    def right(preds, targets):
        assert isinstance(preds, np.ndarray) and isinstance(targets, np.ndarray)
        return (preds.argmax(1) == targets).mean()

    assert bootstrap(preds.numpy(), targets.numpy(), n_samples=20, accuracy=right).to_dict()[
        "accuracy"
    ] == pytest.approx(bootstrap(preds, targets, n_samples=20, accuracy=accuracy).to_dict()["accuracy"])
    with pytest.raises(TypeError, match="Predictions are a dict.*Pass tensors, NumPy arrays"):
        bootstrap(dict(a="b"), targets, accuracy=accuracy)


@pytest.mark.shows("SON-29")
def test_draws_without_a_value_are_left_out_and_counted_and_json_has_no_nan():
    def share(preds, targets):
        return preds[targets == 1].mean()

    found = bootstrap(
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([0, 0, 1]),
        n_samples=200,
        share=share,
        never=lambda p, t: math.nan,
    )
    share, never = found.rows
    assert 0 < share["n"] < 200 and share["mean"] == 3 and share["std"] == 0
    assert never["n"] == 0 and math.isnan(never["mean"])
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["never"]["mean"] is None


@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(n_samples=1), ValueError, "`n_samples` is 1"),
        (dict(n_samples=True), ValueError, "`n_samples`"),
        (dict(level=0), ValueError, "`level` is 0"),
        (dict(level=95), ValueError, "`level` is 95"),
        (dict(preds=torch.zeros(0, 3), targets=torch.zeros(0)), ValueError, "no examples"),
        (dict(targets=torch.zeros(2)), ValueError, "which belong together"),
        (dict(accuracy=5), TypeError, "`accuracy` is 5"),
        (dict(accuracy=MetricsCB), TypeError, "is a class"),
        (dict(accuracy=lambda p, t: p), TypeError, "single number"),
    ],
)
def test_bootstrap_of_nonsense_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        bootstrap(**dict(preds=torch.zeros(4, 3), targets=torch.zeros(4), accuracy=accuracy) | options)
    with pytest.raises(ValueError, match="no metric"):
        bootstrap(torch.zeros(3), torch.zeros(3))


def test_a_report_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer(ReportCB(classification_scores), CapturePredsCB()).fit(1)
