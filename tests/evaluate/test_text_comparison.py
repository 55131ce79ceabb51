"Texts beside the truth: error rates against jiwer, and training with the callback against that without."

import random
import warnings
from contextlib import contextmanager

import jiwer
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.train.averaging import EMACB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.evaluate.text_comparison import TextComparisonCB, char_error_rate, token_rows, word_error_rate
from isaac_loop.train.training import BasicTrainCB, NBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.events import CancelFitException, CancelStepException, Order
from isaac_loop.state.random_numbers import random_state
from isaac_loop.basics.tensors import set_seed
from isaac_loop.loop.trainer import Trainer
from runs import Cut, CutCB, callbacks, fit, make_trainer, same, tree
from waiting import InsideCB, RefuseToWait

LETTERS = "~. abcdefg"
PAD, EOS = 0, 1


def decode(row):
    return "".join(LETTERS[o] for o in row)


def greedy(model, inputs):
    return model(*inputs).argmax(-1)


def make_batch(n, length=6):
    y = torch.randint(2, len(LETTERS), (n, length))
    for row, end in zip(y, torch.randint(2, length, (n,))):
        row[end], row[end + 1 :] = EOS, PAD
    return y.flip(1), y


class Net(nn.Module):
    "Notes the mode and the number of rows of each call"

    def __init__(self):
        super().__init__()
        self.calls = []
        self.embed, self.norm, self.drop, self.out = (
            nn.Embedding(10, 8),
            nn.BatchNorm1d(6),
            nn.Dropout(0.3),
            nn.Linear(8, 10),
        )

    def forward(self, x):
        self.calls.append((len(x), self.training, self.drop.training, torch.is_grad_enabled()))
        return self.out(self.drop(self.norm(self.embed(x))))


def trainer_with(*cbs, batches=None, train=None, **kwargs):
    set_seed(3)
    dls = DataLoaders([make_batch(8) for _ in range(3)], batches or [make_batch(8), make_batch(5)], **kwargs)
    loss_func = lambda preds, y: F.cross_entropy(preds.transpose(1, 2), y, ignore_index=PAD)
    return Trainer(dls, loss_func, optim.Adam, Net(), [train or BasicTrainCB(), *cbs])


def texts(generate=None, **kwargs):
    "The callback, without a word"
    return TextComparisonCB(
        kwargs.pop("decode", decode), generate, **dict(eos=EOS, ignore=PAD, show=False) | kwargs
    )


# ---- error rates

sentences = st.lists(st.text("ab ", max_size=8), min_size=1, max_size=4)


@pytest.mark.shows("SON-28")
@given(sentences, sentences)
@settings(max_examples=60, deadline=None)
def test_error_rates_are_those_of_jiwer(found, truths):
    "Words and characters, one text or several, also empty ones"
    n = min(len(found), len(truths))
    found, truths = found[:n], truths[:n]
    for ours, theirs, size in (
        (word_error_rate, jiwer.process_words, lambda o: len(o.split())),
        (char_error_rate, jiwer.process_characters, len),
    ):
        clean = (
            [" ".join(o.split()) for o in truths],
            [" ".join(o.split()) for o in found],
        )  # jiwer's characters leave spaces at the ends out
        if not sum(map(size, clean[0])):
            continue
        out = theirs(*map(list, clean))
        expected = (out.substitutions + out.deletions + out.insertions) / sum(map(size, clean[0]))
        assert ours(clean[1], clean[0]) == pytest.approx(expected)


@pytest.mark.parametrize("rate", [word_error_rate, char_error_rate])
def test_rates_without_a_truth(rate):
    assert rate("", "") == 0 and rate("abc", "") == float("inf") and rate("", "abc") == 1


@pytest.mark.shows("SON-24")
def test_rows_are_cut_by_lengths_eos_and_what_to_ignore():
    "Targets that stand end to end are taken apart by their lengths"
    flat, lengths = torch.tensor([5, 6, 7, 8, 1, 9]), torch.tensor([3, 0, 3])
    assert token_rows(flat, lengths) == [[5, 6, 7], [], [8, 1, 9]]
    assert token_rows(flat, lengths, eos=1, ignore=(5, 6)) == [[7], [], [8]]
    assert token_rows([torch.tensor([5, 6]), [7]], [1, 1]) == [[5], [7]]
    assert token_rows([]) == []
    with pytest.raises(ValueError, match="stand end to end.*lengths="):
        token_rows(flat)
    with pytest.raises(ValueError, match="add up to 5, but there are 6"):
        token_rows(flat, [2, 3])


# ---- the callback watches, and nothing else


def restless(model, inputs):
    "A recogniser without manners: random numbers of all kinds, and another mode"
    torch.rand(3), random.random(), np.random.rand()
    found = greedy(model, inputs)
    model.train()
    return found


@pytest.mark.parametrize(
    "cb", [texts(), texts(restless), texts(restless, every=2, n_samples=100), texts(decode=lambda row: 1 / 0)]
)
@pytest.mark.filterwarnings("ignore:`texts`")
def test_training_goes_on_bit_for_bit_as_without_it(cb):
    results = []
    for extra in ([], [cb]):
        trainer = trainer_with(MetricsCB(), *extra)
        fit(trainer, 3)
        rows = [
            {k: v for k, v in row.items() if k != "elapsed" and not k.startswith("texts")}
            for row in trainer.history
        ]
        results.append(
            tree(
                [
                    trainer.model.state_dict(),
                    trainer.opt.state_dict(),
                    rows,
                    random_state()["torch"],
                    random.random(),
                    np.random.rand(),
                ]
            )
        )
    assert results[0] == results[1]


class Mixed:
    "Validates with one module in training mode, and with gradients, as is done to adapt to the data"

    order = Order.LAST
    on_train = False

    def before_epoch(self, trainer):
        trainer.model.drop.train()
        torch.set_grad_enabled(True)


class After:
    "Looks at the modes right after the callback, whose cleanup comes before"

    order = Order.RECORD

    def cleanup_epoch(self, trainer):
        if not trainer.training:
            self.modes = {name: o.training for name, o in trainer.model.named_modules()}


@pytest.mark.shows("SON-21", "SON-25")
@pytest.mark.parametrize("n_samples,seen", [(1, 1), (3, 3), (8, 8), (50, 8)])
def test_it_runs_in_eval_mode_on_so_many_samples_and_puts_modes_back(n_samples, seen):
    "In eval mode as a whole, `n_samples` honoured, every module's own mode put back, no gradients"
    calls, after = [], After()

    def generate(model, inputs):
        assert not torch.is_grad_enabled()
        found = restless(model, inputs)
        calls.append(model.calls.pop())
        return found

    trainer = trainer_with(texts(generate, n_samples=n_samples), Mixed(), after)
    fit(trainer, 1)
    assert trainer.model.calls.pop()[1:] == (False, True, True)
    assert calls == [(seen, False, False, False)]
    assert len(trainer.texts.rows) == seen
    assert after.modes["drop"] and not any(v for k, v in after.modes.items() if k != "drop")


@pytest.mark.shows("SON-22", "SON-25")
@pytest.mark.parametrize("n_samples,seen", [(3, 3), (50, 8)])
def test_teacher_forcing_uses_the_predictions_of_the_pass(n_samples, seen):
    "No further call of the model; in the mode of the pass, as many samples as asked for"
    trainer = trainer_with(texts(n_samples=n_samples))
    fit(trainer, 1)
    assert [o[0] for o in trainer.model.calls] == [8, 8, 8, 8, 5] and trainer.model.calls[3][1:] == (
        False,
        False,
        False,
    )
    assert len(trainer.texts.rows) == seen
    trainer.model.eval()
    x, y = trainer.dls.valid[0]
    expected = [
        [
            o[: len([t for t in row if t != PAD])]
            for o, row in zip(trainer.model(x).argmax(-1).tolist(), y.tolist())
        ]
    ][0]
    assert [o["text"] for o in trainer.texts.rows] == [
        decode(o) for o in token_rows(expected, eos=EOS, ignore=PAD)
    ][:seen]


@pytest.mark.shows("SON-23")
def test_a_recogniser_may_give_texts_at_once():
    trainer = trainer_with(texts(lambda model, inputs: ["abc"] * len(inputs[0]), decode=decode))
    fit(trainer, 1)
    assert [o["text"] for o in trainer.texts.rows] == ["abc"] * 4
    assert trainer.texts.rows[0]["truth"] == decode(
        token_rows(trainer.dls.valid[0][1], eos=EOS, ignore=PAD)[0]
    )


def test_nothing_waits_for_the_device_while_batches_run():
    mode = RefuseToWait()
    trainer = trainer_with(texts(), texts(greedy, name="free"), InsideCB(mode))
    trainer.opt_func = optim.SGD
    with mode:
        fit(trainer, 2)
    assert len(trainer.history) == 2


# ---- when


def epochs(trainer):
    return [row["epoch"] for row in trainer.history if "texts_wer" in row]


def test_every_so_many_epochs_and_after_the_last():
    trainer = trainer_with(MetricsCB(), texts(every=2))
    fit(trainer, 5)
    assert epochs(trainer) == [1, 3, 4]


@pytest.mark.shows("SON-24")
def test_a_model_that_has_learnt_nothing_is_not_shown_unless_nothing_is_to_be_learnt():
    "Nothing before the first step; but a fit without training is there to look"

    def before_step(trainer):
        if trainer.epoch == 0:
            raise CancelStepException("not yet")

    trainer = trainer_with(MetricsCB(), texts(), before_step)
    fit(trainer, 2)
    assert epochs(trainer) == [1]
    fit(trainer, 1, train=False)
    assert len(epochs(trainer)) == 2


def test_a_pass_that_is_cut_short_shows_its_texts():
    trainer = trainer_with(MetricsCB(), NBatchCB(1), texts())
    fit(trainer, 2)
    assert epochs(trainer) == [0, 1]


def test_an_error_or_an_interrupt_shows_nothing():
    def after_batch(trainer):
        if not trainer.training:
            raise KeyboardInterrupt

    after_batch.order = 100
    trainer = trainer_with(texts(lambda *_: pytest.fail("called")), after_batch)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, 1)


def test_averaged_weights_write_the_texts():
    "What validation measures is what is shown"
    seen = []

    def generate(model, inputs):
        seen.append(model.out.weight.detach().clone())
        return greedy(model, inputs)

    trainer = trainer_with(EMACB(0.5), texts(generate))
    fit(trainer, 1)
    assert torch.equal(seen[0], trainer.EMACB.average.module.out.weight) and not torch.equal(
        seen[0], trainer.model.out.weight
    )


def test_a_run_that_goes_on_has_the_same_texts(tmp_path):
    def comparing():
        return texts(
            decode=lambda row: "abc"[row[0]],
            truth=lambda batch: batch[1][:, None],
            tokens=lambda preds: preds.argmax(-1)[:, None],
            eos=None,
            ignore=(),
        )

    whole = fit(make_trainer([*callbacks(), comparing()]))
    cut = CutCB("before_predict", lambda t: t.epoch == 2 and t.training and t.batch_num == 3)
    with pytest.raises(Cut):
        fit(make_trainer([*callbacks(tmp_path), comparing(), cut]))
    again = fit(make_trainer([*callbacks(tmp_path), comparing()]))
    same(whole, again)
    assert whole.texts.rows == again.texts.rows and len(whole.texts.rows) == 4


# ---- where the texts go


def test_rates_are_columns_and_texts_are_media(capsys):
    "To the screen, and to any logger"
    media = []

    def log(trainer):
        media.extend(trainer.history.media)

    cb = TextComparisonCB(decode, n_samples=2, eos=EOS, ignore=PAD, name="heard")
    trainer = trainer_with(cb, EarlyStoppingCB("heard_cer", mode="min", patience=1), log)
    trainer.fit(2)
    assert trainer.history.names() == ["fit", "epoch", *cb.columns(trainer)]
    assert [(o["name"], o["kind"], len(o["value"])) for o in media] == [("heard", "table", 2)] * len(
        trainer.history
    )
    assert media[-1]["value"] == cb.rows and set(cb.rows[0]) == {"truth", "text", "wer", "cer"}
    printed = capsys.readouterr().out
    assert printed.count("heard, epoch 0") == 1 and cb.rows[0]["truth"] in printed
    pairs = [(o["text"], o["truth"]) for o in cb.rows]
    assert trainer.history.latest("heard_wer") == word_error_rate(*map(list, zip(*pairs)))


def test_two_comparisons_need_two_names():
    with pytest.raises(ValueError, match="called `texts` already"):
        trainer_with(texts(), texts(greedy))


# ---- batches of other kinds


def flattened(batch):
    x, y = batch
    lengths = (y != PAD).sum(1)
    return x, y[y != PAD], lengths


class CutLossCB(BasicTrainCB):
    "A loss that pads the targets again"

    def get_loss(self, trainer):
        _, y, lengths = trainer.batch
        rows = torch.nn.utils.rnn.pad_sequence(y.split(lengths.tolist()), batch_first=True)
        trainer.loss = F.cross_entropy(
            trainer.preds[:, : rows.shape[1]].transpose(1, 2), rows, ignore_index=PAD
        )


@pytest.mark.shows("SON-24")
def test_targets_end_to_end_are_those_in_rows():
    "Un-flattened by their lengths"
    batches = [make_batch(8)]
    plain = trainer_with(texts(), batches=batches)
    flat = trainer_with(
        texts(lengths=lambda batch: batch[2]), train=CutLossCB(), batches=[flattened(o) for o in batches]
    )
    flat.dls.train = [flattened(o) for o in flat.dls.train]
    for o in (plain, flat):
        fit(o, 1, train=False)
    assert plain.texts.rows == flat.texts.rows


class DictTrainer(Trainer):
    def split(self, batch):
        return (batch["x"],), (batch["y"],)


class Reused:
    "A loader that writes every batch into the same memory"

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        x, y = (o.clone() for o in self.batches[0])
        for a, b in self.batches:
            yield x.copy_(a), y.copy_(b)


@pytest.mark.parametrize("generate", [None, greedy])
def test_what_is_kept_of_a_batch_is_kept_as_it_was(generate):
    found = []
    for kind in (list, Reused):
        trainer = trainer_with(texts(generate, tokens=None if generate else lambda preds: preds.argmax(-1)))
        trainer.dls.valid = kind([(x, y) for x, y in (make_batch(8), make_batch(8))])
        fit(trainer, 1)
        found.append(trainer.texts.rows)
    assert found[0] == found[1]


def test_truths_may_be_texts_and_batches_dicts():
    batches = [
        dict(x=x, y=y, text=[decode(o) for o in token_rows(y, eos=EOS, ignore=PAD)])
        for x, y in [make_batch(8)]
    ]
    cb = texts(greedy, truth=lambda batch: batch["text"])
    trainer = DictTrainer(
        DataLoaders(batches, batches),
        lambda preds, y: F.cross_entropy(preds.transpose(1, 2), y),
        optim.SGD,
        Net(),
        [BasicTrainCB(), cb],
    )
    fit(trainer, 1)
    assert [o["truth"] for o in cb.rows] == batches[0]["text"][:4]


def test_predictions_of_another_shape_need_a_function():
    class Both(Net):
        def forward(self, x):
            return super().forward(x), x

    for tokens, expected in ((None, 0), (lambda preds: preds[0].argmax(-1), 1)):
        trainer = trainer_with(texts(tokens=tokens))
        trainer.model, trainer.loss_func = (
            Both(),
            lambda preds, y: F.cross_entropy(preds[0].transpose(1, 2), y),
        )
        with (
            pytest.warns(UserWarning, match="predictions are a tuple.*tokens=")
            if tokens is None
            else no_warning()
        ):
            fit(trainer, 1)
        assert len(trainer.history) == expected


@contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---- bad input


def failing_at(text):
    def failing(row):
        if decode(row) == text:
            raise KeyError("no such token")
        return decode(row)

    return failing


def test_a_decoder_that_fails_costs_one_sample_and_one_warning():
    "The warning names callback, event, epoch and sample; training goes on"
    truths = [decode(o) for o in token_rows(trainer_with().dls.valid[0][1], eos=EOS, ignore=PAD)]
    trainer = trainer_with(texts(decode=failing_at(truths[1])), MetricsCB())
    with pytest.warns(UserWarning) as caught:
        fit(trainer, 3)
    assert len(caught) == 1
    for words in ("`texts`", "`cleanup_epoch`", "epoch 0", "sample 1", "KeyError", "Training goes on"):
        assert words in str(caught[0].message)
    assert (
        len(trainer.history) == 3
        and "truth" in trainer.texts.rows[1]
        and trainer.texts.rows[1]["truth"] is None
        and "wer" not in trainer.texts.rows[1]
    )
    good = [o for i, o in enumerate(trainer.texts.rows) if i != 1]
    assert trainer.history.latest("texts_cer") == char_error_rate(
        [o["text"] for o in good], [o["truth"] for o in good]
    )


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(decode=lambda row: row), "which is no text"),
        (dict(generate=lambda model, inputs: 1 / 0), "ZeroDivisionError"),
        (dict(generate=lambda model, inputs: greedy(model, inputs)[:2]), "2 texts for 4 samples"),
        (dict(truth=lambda batch: batch["y"]), "`after_batch`"),
        (dict(lengths=lambda batch: [1, 2]), "zip"),
        (dict(truth=lambda batch: batch[1].flatten()), "end to end"),
    ],
)
def test_functions_that_fail_are_reported_once_and_training_goes_on(options, words):
    trainer = trainer_with(texts(**options), MetricsCB())
    with pytest.warns(UserWarning, match=words) as caught:
        fit(trainer, 2)
    assert len(caught) == 1 and len(trainer.history) == 2 and "texts_wer" not in trainer.history.names()
    with pytest.warns(UserWarning, match=words):
        fit(trainer, 1)  # The next fit says so again


def test_a_cancel_is_no_failure():
    def cancel(row):
        raise CancelFitException("seen enough")

    trainer = trainer_with(texts(decode=cancel), MetricsCB())
    with no_warning():
        fit(trainer, 3)
    assert len(trainer.history) == 1


@pytest.mark.parametrize(
    "options,error,words",
    [
        (dict(decode=None), TypeError, "`decode` is None"),
        (dict(generate="beam"), TypeError, "`generate` is 'beam'"),
        (dict(lengths=[3, 4]), TypeError, "`lengths`"),
        (dict(n_samples=0), ValueError, "`n_samples` is 0"),
        (dict(n_samples=True), ValueError, "`n_samples` is True"),
        (dict(every=1.5), ValueError, "`every` is 1.5"),
    ],
)
def test_settings_that_cannot_work_are_refused_where_they_are_typed(options, error, words):
    with pytest.raises(error, match=words):
        texts(**options)


def test_there_must_be_a_validation_set():
    trainer = trainer_with(texts())
    trainer.dls.valid = None
    with pytest.raises(ValueError, match="no `dls.valid`"):
        fit(trainer, 1, valid=False)


def test_a_fit_without_validation_has_no_texts_and_says_so():
    trainer = trainer_with(texts())
    with pytest.warns(UserWarning, match="no texts to compare.*with validation"):
        fit(trainer, 1, valid=False)
    with no_warning():
        fit(trainer, 0, valid=False)
        fit(trainer_with(texts(every=5), stop_early()), 9)


def stop_early():
    def log(trainer):
        if trainer.epoch == 1:
            trainer.request_stop("enough")

    return log
