"""The record of a run and its tables, checked against plain lists of dicts.

`History` and `BatchRecord` are driven with random fits and compared with rows written down by hand;
`Monitor` is compared with an oracle that looks at the whole past anew for every value; a Markdown table is
read back again.
"""

import html
import math
import re
import tracemalloc
from collections import defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from isaac_loop.loop.batch_record import BatchRecord
from isaac_loop.loop.history import History
from isaac_loop.loop.monitor import Monitor, check_monitored
from isaac_loop.basics.tables import Table, short

# Rows

columns = st.dictionaries(
    st.sampled_from(["train_loss", "valid_loss", "accuracy", "note"]),
    st.one_of(st.floats(allow_nan=False), st.text(max_size=3)),
    max_size=3,
)
fits = st.lists(
    st.lists(st.lists(columns, max_size=3), max_size=3), max_size=3
)  # Fits of epochs of writes of columns


def record(fits):
    "A history of `fits`, and the rows it should have"
    history, rows = History(), []
    for fit, epochs in enumerate(fits):
        history.start_fit()
        for epoch, writes in enumerate(epochs):
            history.start_epoch(epoch)
            if writes:
                rows.append(dict(fit=fit, epoch=epoch))
            for values in writes:
                history.write(**values)
                rows[-1].update(values)
    return history, rows


@settings(max_examples=150, deadline=None)
@given(fits)
def test_the_history_is_the_list_of_what_was_written(fits):
    "One row per epoch in which anything was written, over any number of fits"
    history, rows = record(fits)
    assert (
        len(history) == len(rows)
        and list(history) == rows
        and history[:] == rows
        and history[-2:] == rows[-2:]
    )
    assert [list(o) for o in history] == [list(o) for o in rows]  # Columns in the order of writing
    for i in range(-len(rows), len(rows)):
        assert history[i] == rows[i]
    with pytest.raises(IndexError):
        history[len(rows)]


@settings(max_examples=150, deadline=None)
@given(fits)
def test_a_column_has_one_value_per_row(fits):
    "None where a row has none; `latest` is what the newest row says and nothing older"
    history, rows = record(fits)
    names = [o for i, row in enumerate(rows) for o in row if not any(o in r for r in rows[:i])]
    first = ["fit", "epoch", "train_loss", "valid_loss"]
    place = {o: (o == "elapsed", o not in first, first.index(o) if o in first else 0) for o in names}
    assert history.names() == sorted(names, key=place.get)  # As they are read, and as they came
    for name in names:
        assert history[name] == history.column(name) == [row.get(name) for row in rows]
        assert history.latest(name) == rows[-1].get(name)
    for name in {"fit", "train_loss", "accuracy", "never"} - set(names):
        for read in (history.latest, history.column, history.check_name, history.__getitem__):
            with pytest.raises(LookupError, match=f"no `{name}`"):
                read(name)


@settings(max_examples=50, deadline=None)
@given(fits)
def test_pandas_takes_the_history_as_it_is(fits):
    "`pandas.DataFrame(history)` is the table of the rows"
    history, rows = record(fits)
    pd.testing.assert_frame_equal(pd.DataFrame(history), pd.DataFrame(rows))


@pytest.mark.parametrize("name", ["to_df", "df", "frame", "dataframe", "to_pandas"])
def test_a_table_that_is_asked_for_by_another_name_is_that_of_pandas(name):
    with pytest.raises(AttributeError, match=r"no attribute `.*`pd\.DataFrame\(trainer\.history\)`"):
        getattr(History(), name)


def test_a_name_that_is_not_there_is_answered_with_a_public_one_if_any():
    history = History()
    for name, told in (("rowz", "rows"), ("colum", "column")):
        with pytest.raises(AttributeError, match=f"Did you mean `{told}`"):
            getattr(history, name)
    for name in ("to_d", "told", "tellin", "_tol", "nex"):
        with pytest.raises(AttributeError) as caught:
            getattr(history, name)
        assert "`_" not in str(caught.value).removeprefix(f"`History` has no attribute `{name}`")
        assert caught.value.obj is None, "or else Python would guess beside"


def test_the_latest_value_is_never_an_older_epochs():
    "An epoch without validation says None, which no reader can take for news"
    history, _ = record([[[dict(train_loss=2.0, valid_loss=1.5)], [dict(train_loss=1.0)]]])
    assert history.latest("valid_loss") is None and history["valid_loss"] == [1.5, None]


def test_a_row_keeps_what_a_tensor_was_and_not_what_becomes_of_it_nor_its_graph():
    history, weight = History(), torch.ones((), requires_grad=True)
    history.start_fit()
    running = torch.zeros(())
    for epoch in range(3):
        history.start_epoch(epoch)
        running += 1
        history.write(running=running, loss=2 * weight)
    assert history["running"] == [1, 2, 3]
    assert not any(loss.requires_grad for loss in history["loss"])


@pytest.mark.parametrize(
    "value, change",
    [
        ([1], lambda o: o.append(2)),
        (dict(a=[1]), lambda o: o["a"].append(2)),
        (([1], 2), lambda o: o[0].append(2)),
        ({1}, lambda o: o.add(2)),
        (deque([1], 3), lambda o: o.append(2)),
        (defaultdict(int, a=1), lambda o: o.update(a=2)),
        (np.ones(2), lambda o: o.fill(2)),
        ([torch.ones(2)], lambda o: o[0].fill_(2)),
    ],
)
def test_a_row_keeps_what_a_container_held_and_not_what_becomes_of_it(value, change):
    history, was = History(), str(value)
    history.start_epoch(0)
    history.write(values=value)
    change(value)
    history.start_epoch(1)
    history.write(values=value)
    assert list(map(str, history["values"])) == [was, str(value)] and was != str(value)
    assert type(history["values"][0]) is type(value)


def test_a_wrong_column_is_answered_with_the_near_one():
    "The message has the name asked for, the names there are, and the nearest"
    history, _ = record([[[dict(train_loss=2.0, valid_loss=1.5)]]])
    for read in (history.latest, history.column, history.__getitem__):
        with pytest.raises(LookupError) as caught:
            read("val_loss")
        assert not isinstance(caught.value, KeyError)  # Which would print its message in quotes
        assert (
            "`val_loss`" in str(caught.value)
            and "'train_loss'" in str(caught.value)
            and "Did you mean `valid_loss`?" in str(caught.value)
        )
    with pytest.raises(LookupError, match="nothing yet"):
        History().latest("valid_loss")


def test_nothing_can_be_written_before_the_first_epoch():
    "A value without an epoch has no row to go to"
    history = History()
    history.start_fit()
    with pytest.raises(LookupError, match="no epoch to write to"):
        history.write(loss=1)
    assert len(history) == 0


def test_the_history_is_shown_as_a_table():
    "Text in a terminal, Markdown in a notebook, and words when there is nothing"
    history, rows = record([[[dict(train_loss=2.0)]], [[dict(train_loss=1.0)]]])
    assert repr(history) == str(Table(rows)) and history._repr_markdown_() == Table(rows)._repr_markdown_()
    assert repr(History()) == History()._repr_markdown_() == "History: nothing recorded yet"


# Batches


@st.composite
def passes(draw):
    "Passes over a loader, each with several writes about some of its batches"
    result = []
    for fit in range(draw(st.integers(1, 2))):
        for epoch in range(draw(st.integers(0, 2))):
            for training in (True, False):
                writes = []
                for _ in range(draw(st.integers(0, 3))):
                    batches = draw(st.lists(st.integers(0, 5), max_size=5))
                    batches = sorted(set(batches)) if draw(st.booleans()) else batches
                    numbers = st.lists(
                        st.floats(allow_nan=False), min_size=len(batches), max_size=len(batches)
                    )
                    writes.append(
                        (
                            batches,
                            draw(
                                st.dictionaries(st.sampled_from(["loss", "lr", "norm"]), numbers, max_size=2)
                            ),
                        )
                    )
                result.append((fit, epoch, training, writes))
    return result


@settings(max_examples=150, deadline=None)
@given(passes())
def test_what_is_written_about_a_batch_meets_in_one_row(passes):
    "Against a dict from (fit, epoch, training, batch) to values; what was not measured is NaN"
    history, rows = History(), {}
    for fit, epoch, training, writes in passes:
        while history.fit < fit:
            history.start_fit()
        history.start_epoch(epoch)
        for batches, values in writes:
            history.write_batches(training, batches, **values)
            for i, batch in enumerate(batches):
                row = rows.setdefault(
                    (fit, epoch, training, batch), dict(fit=fit, epoch=epoch, training=training, batch=batch)
                )
                row.update({k: v[i] for k, v in values.items()})
    record, rows = history.batches, list(rows.values())
    names = [o for o in record.columns if o not in BatchRecord.place]
    expected = [
        {**{o: row[o] for o in BatchRecord.place}, **{o: row.get(o, math.nan) for o in names}} for row in rows
    ]
    assert {o for row in rows for o in row} <= set(record.columns)
    np.testing.assert_equal(list(record), expected)
    np.testing.assert_equal(record[1:3], expected[1:3])
    assert len(record) == len(rows) and all(type(o["training"]) is bool for o in record)
    for o in record.columns:
        np.testing.assert_equal(record[o], [row[o] for row in expected])
    if rows:
        pd.testing.assert_frame_equal(pd.DataFrame(record), pd.DataFrame(expected))


@pytest.mark.parametrize("n", [1, 3])
def test_a_column_that_does_not_fit_the_batches_is_refused(n):
    record = BatchRecord()
    with pytest.raises(ValueError, match="zip"):
        record.write(0, 0, True, [0, 1], loss=[2.0] * n)


@pytest.mark.parametrize("kind", [list, tuple, bytes, iter, np.array, torch.tensor, lambda o: map(int, o)])
def test_a_column_may_be_anything_that_gives_numbers(kind):
    record = BatchRecord()
    record.write(0, 0, True, range(3), loss=kind([1, 0, 2]))
    record.write(0, 0, True, [1, 3], lr=kind([4, 5]))
    assert record["loss"][:3] == [1.0, 0.0, 2.0] and record["lr"][1::2] == [4.0, 5.0]


def test_two_writers_of_one_epoch_share_its_rows():
    "Whoever comes second may know fewer batches, and the history's own row is not opened by either"
    history = History()
    history.start_fit()
    history.start_epoch(0)
    history.write_batches(True, [0, 1], loss=[3.0, 2.0])
    history.write_batches(True, [1], lr=[0.1])
    assert len(history) == 0 and len(history.batches) == 2
    assert history.batches[1] == dict(
        fit=0, epoch=0, training=True, batch=1, loss=2.0, lr=0.1
    ) and math.isnan(history.batches[0]["lr"])
    history.write(train_loss=2.5)  # Opens the row
    history.write_batches(False, [0], loss=[4.0])
    assert history.batches[-1]["training"] is False and history.batches[-1]["epoch"] == 0


@pytest.mark.parametrize("n_passes", [1, 10])
def test_the_record_of_batches_is_compact(n_passes):
    "At most 16 bytes for a number, also while a pass is under way; a dict for each batch would take some 300"
    n = 1000
    tracemalloc.start()
    try:
        record = BatchRecord()
        before = tracemalloc.get_traced_memory()[0]
        for epoch in range(n_passes):
            for i in range(0, 10 * n // n_passes, 50):
                record.write(0, epoch, True, range(i, i + 50), loss=[i / 7.0] * 50)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(record) == 10 * n and used / len(record) <= 16


def test_a_saved_history_is_a_tensor_for_each_column_and_lists_of_earlier_versions_are_read():
    "However many batches there are, a save walks over a handful of objects"
    history = History()
    for _ in range(2):
        history.start_fit()
        history.start_epoch(0)
        history.write_batches(True, [0, 1, 3], loss=[3.0, 2.0, 1.0])
    history.write_batches(True, [3, 2], lr=[0.1, 0.2])
    state = history.state_dict()
    assert {k: str(v.tolist()) for k, v in state["batches"].items()} == {
        k: str(v.tolist()) for k, v in history.batches.columns.items()
    }
    old = {**state, "batches": {k: v.tolist() for k, v in state["batches"].items()}}
    for saved in (state, old):
        again = History()
        again.load_state_dict(saved)
        assert str(list(again.batches)) == str(list(history.batches))
        again.write_batches(True, [2, 4], loss=[0.5, 0.25])
        assert again.batches["batch"][3:] == [0, 1, 3, 2, 4] and again.batches["loss"][3:] == [
            3.0,
            2.0,
            1.0,
            0.5,
            0.25,
        ]


@pytest.mark.shows("AIT-70")
def test_a_wrong_column_or_a_missing_value_of_a_batch_is_an_error():
    "As for epochs: the near name; and values are never quietly dropped"
    record = BatchRecord()
    record.write(0, 0, True, [0, 1], loss=[2.0, 1.0])
    with pytest.raises(LookupError, match="Did you mean `loss`"):
        record["los"]
    with pytest.raises(IndexError):
        record[2]
    with pytest.raises(ValueError):
        record.write(0, 0, True, [2, 3], loss=[1.0])


# Is it better?


def oracle(values, mode, min_delta):
    "For each value whether it is better, and how many in a row were not, each time from the beginning"
    better, counts = [], []
    for i, value in enumerate(values):
        winners = [o for o, good in zip(values, better) if good]
        if value is None or math.isnan(value):
            good = False
        elif not winners:
            good = True
        elif mode == "min":
            good = value < winners[-1] - min_delta
        else:
            good = value > winners[-1] + min_delta
        better.append(good)
        last = max((n for n, good in enumerate(better) if good), default=-1)
        counts.append(sum(o is not None for o in values[last + 1 : i + 1]))
    return better, counts


quarters = st.integers(-8, 8).map(
    lambda o: o / 4
)  # Sums of these are exact, so two ways to compare must agree
news = st.lists(quarters | st.sampled_from([None, math.nan, math.inf, -math.inf]), max_size=12)
modes, deltas, patiences = (
    st.sampled_from(["min", "max"]),
    st.sampled_from([0, 0.25, 0.5, 1.0]),
    st.none() | st.integers(1, 4),
)


@settings(max_examples=300, deadline=None)
@given(news, modes, deltas, patiences)
def test_a_monitor_agrees_with_an_oracle(values, mode, min_delta, patience):
    "Better or not, how long not, and whether patience has run out, after each value"
    monitor = Monitor(mode, min_delta, patience)
    better, counts = oracle(values, mode, min_delta)
    for value, good, count in zip(values, better, counts):
        assert monitor.is_better(value) is good  # Asking changes nothing
        assert monitor.update(value) is good
        assert monitor.n_bad == count
        assert monitor.exhausted is (patience is not None and count >= patience)
    winners = [o for o, good in zip(values, better) if good]
    assert monitor.best == (winners[-1] if winners else None)


@settings(max_examples=100, deadline=None)
@given(news, deltas, patiences)
def test_higher_is_better_is_lower_is_better_upside_down(values, min_delta, patience):
    "`max` on the values is `min` on their negatives"
    up, down = Monitor("max", min_delta, patience), Monitor("min", min_delta, patience)
    for o in values:
        assert up.update(o) == down.update(None if o is None else -o) and up.exhausted == down.exhausted


@settings(max_examples=100, deadline=None)
@given(news, modes, deltas, st.data())
def test_none_says_nothing(values, mode, min_delta, data):
    "Epochs without the value, wherever they come, change neither the best nor the count"
    plain, dotted = Monitor(mode, min_delta, 2), Monitor(mode, min_delta, 2)
    for o in values:
        for _ in range(data.draw(st.integers(0, 2))):
            assert dotted.update(None) is False
        assert plain.update(o) == dotted.update(o) and vars(plain) == vars(dotted)


@settings(max_examples=100, deadline=None)
@given(news, modes, deltas, quarters)
def test_equal_and_nan_are_not_better(values, mode, min_delta, value):
    "And they wear patience down"
    monitor = Monitor(mode, min_delta)
    for o in [*values, value]:
        monitor.update(o)
    assume(monitor.best is not None)
    best, n_bad = monitor.best, monitor.n_bad
    assert not monitor.update(best) and not monitor.update(math.nan)
    assert (monitor.best, monitor.n_bad) == (best, n_bad + 2)


def test_what_comes_first_is_not_the_best_if_it_is_nan():
    "Else nothing would ever be better"
    monitor = Monitor()
    assert [monitor.update(o) for o in (math.nan, 2.0, math.nan, 1.0)] == [False, True, False, True]


@settings(max_examples=50, deadline=None)
@given(news, news, modes)
def test_a_reset_monitor_is_a_new_one(first, second, mode):
    "Nothing of an earlier fit is left"
    used, new = Monitor(mode, 0.25, 2), Monitor(mode, 0.25, 2)
    for o in first:
        used.update(o)
    used.reset()
    assert [(used.update(o), used.exhausted) for o in second] == [
        (new.update(o), new.exhausted) for o in second
    ]


@pytest.mark.parametrize("mode", ["lower", "MIN", None, ""])
def test_a_mode_other_than_min_and_max_is_refused(mode):
    "With the value and both that can be used"
    with pytest.raises(ValueError) as caught:
        Monitor(mode)
    assert repr(mode) in str(caught.value) and "'min'" in str(caught.value) and "'max'" in str(caught.value)


@pytest.mark.parametrize("min_delta", [-0.1, -math.inf, math.nan])
def test_a_negative_min_delta_is_refused(min_delta):
    "It would call a change for the worse an improvement"
    with pytest.raises(ValueError, match=re.escape(repr(min_delta))):
        Monitor(min_delta=min_delta)


# Tables


@pytest.mark.parametrize(
    "value, text",
    [
        (0.123456, "0.123"),
        (2, "2"),
        (0.0, "0.000"),
        (-1.5, "-1.500"),
        (0.001, "0.001"),
        (0.00099, "0.00099"),
        (-2.5e-05, "-2.5e-05"),
        (1.23456e-7, "1.23e-07"),
        (np.float32(0.5), "0.500"),
        (np.int64(3), "3"),
        (None, ""),
        (True, "True"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        ("cosine", "cosine"),
        (12345.678, "12345.678"),
    ],
)
def test_values_are_written_short(value, text):
    "Three digits after the point, or three that count; nothing for None"
    assert short(value) == text


texts = st.text(st.sampled_from("ab1 |\\<>&`*_-'\""), max_size=6).map(str.strip)
cells = st.one_of(texts, st.none(), st.integers(), st.floats(allow_nan=False), st.booleans())
tables = st.lists(
    st.dictionaries(st.sampled_from(["epoch", "a|b", "<loss>", "x & y"]), cells, max_size=4),
    min_size=1,
    max_size=4,
)


def read_markdown(text):
    "The cells of a Markdown table: pipes with a backslash before them belong to a cell"
    lines = [re.split(r"(?<!\\)\|", line) for line in text.splitlines()]
    assert all(line[0] == line[-1] == "" for line in lines)
    return [[html.unescape(o.strip().replace("\\|", "|")) for o in line[1:-1]] for line in lines]


@settings(max_examples=200, deadline=None)
@given(tables)
def test_a_markdown_table_can_be_read_back(rows):
    "Whatever pipes, backslashes and angle brackets are in the cells; a missing cell is empty"
    names = list(dict.fromkeys(o for row in rows for o in row))
    assume(names)
    header, rule, *body = read_markdown(Table(rows)._repr_markdown_())
    assert header == names and rule == ["---"] * len(names)
    assert body == [[short(row.get(o)) for o in names] for row in rows]


def test_pipes_in_markdown_are_escaped():
    "In the header and in cells; a terminal shows them as they are"
    table = Table([{"a|b": "x|y", "c": "<b>"}])
    assert table._repr_markdown_() == "| a\\|b | c |\n| --- | --- |\n| x\\|y | &lt;b&gt; |"
    assert str(table) == "a|b  c\nx|y  <b>"


@settings(max_examples=200, deadline=None)
@given(tables)
def test_the_columns_of_a_text_table_stand_below_one_another(rows):
    "Each line cut at the same places gives the cells again, the empty ones too"
    names = list(dict.fromkeys(o for row in rows for o in row))
    assume(names)
    table = Table(rows)
    expected = [names] + [[short(row.get(o)) for o in names] for row in rows]
    widths = [max(len(line[i]) for line in expected) for i in range(len(names))]
    lines = str(table).split("\n")
    assert len(lines) == len(rows) + 1 == len(table) + 1 and all(line == line.rstrip() for line in lines)
    for line, cells in zip(lines, expected):
        start = 0
        for cell, width in zip(cells, widths):
            assert line[start : start + width].rstrip() == cell
            assert line[start + width : start + width + 2].strip() == ""
            start += width + 2


def test_a_table_shows_the_columns_asked_for():
    "In that order, also those which no row has; a later change of the rows does not reach it"
    rows = [dict(a=1, b=2), dict(b=3, c=4)]
    table = Table(rows, ["c", "missing", "b"])
    rows[0]["b"] = "changed"
    assert table.cells() == [["c", "missing", "b"], ["", "", "2"], ["4", "", "3"]]
    assert Table(rows, []).columns == [] and str(Table([])) == ""


# Who will write what


class Declares:
    columns = ["score", "f1_*"]

    def cleanup_epoch(self, trainer):
        trainer.history.write(score=1.0)


class DeclaresByMethod:
    def columns(self, trainer):
        return [f"loss_of_{trainer.who}"]

    def cleanup_epoch(self, trainer):
        trainer.history.write(**{f"loss_of_{trainer.who}": 1.0})


class WritesMore(Declares):
    def after_epoch(self, trainer):
        trainer.history.write(more=1.0)


class WritesInside:
    def after_epoch(self, trainer):
        def later():
            trainer.history.write(inside=1.0)

        later()


class Reads:
    "Has `history` and `write`, but not together"

    def log(self, trainer):
        return trainer.history[-1]

    def show(self, file):
        file.write("row")


def cleanup_epoch(trainer):
    trainer.history.write(speed=1.0)


def monitored(name, *callbacks):
    return check_monitored(SimpleNamespace(callbacks=list(callbacks), who="me"), name, "StopCB")


@pytest.mark.parametrize("name", ["score", "f1_cat", "loss_of_me", "epoch", "fit"])
def test_a_declared_column_is_known(name):
    assert monitored(name, Reads(), Declares(), DeclaresByMethod()) is True


@pytest.mark.parametrize(
    "writer", [WritesMore(), WritesInside(), cleanup_epoch], ids=["subclass", "inner function", "function"]
)
def test_somebody_who_writes_without_declaring_leaves_it_open(writer):
    assert monitored("more", writer, Declares()) is False
    assert monitored("score", writer, Declares()) is True


def test_a_subclass_or_an_object_that_declares_settles_it():
    writer = WritesMore()
    writer.columns = ["score", "more"]
    assert monitored("more", writer) is True
    with pytest.raises(LookupError):
        monitored("less", writer)


@pytest.mark.parametrize("callbacks", [(), (Reads(),), (Declares(), Reads())])
def test_a_column_of_nobody_is_an_error_with_the_names_there_are(callbacks):
    with pytest.raises(
        LookupError, match="`StopCB` watches `scor`, which no callback records; recorded are"
    ) as caught:
        monitored("scor", *callbacks)
    assert ("Did you mean `score`" in str(caught.value)) == (len(callbacks) == 2) and "*" not in str(
        caught.value
    )


@pytest.mark.parametrize("until", [0, 1, 2])
def test_rows_up_to_a_fit_are_those_that_were_there_when_it_ended(until):
    "Also where a column began in a later fit, or was left off in one"

    def write(history, fit):
        history.start_fit()
        for epoch in range(2):
            history.start_epoch(epoch)
            history.write(loss=10.0 * fit + epoch)
            history.write_batches(
                True, [0, 1], **{"late" if fit else "early": [fit + 0.5, fit + 0.25]}, loss=[1.0, 2.0]
            )

    whole, then = History(), History()
    for fit in range(3):
        write(whole, fit)
    for fit in range(until + 1):
        write(then, fit)
    taken = History()
    taken.load_state_dict(whole.state_dict(), until_fit=until)
    assert taken.fit == until and taken.rows == then.rows and taken.current is None
    for name, column in then.batches.columns.items():
        assert str(taken.batches[name]) == str(then.batches[name]) and len(column) <= len(taken.batches)
    with pytest.raises(LookupError, match="no epoch to write to"):
        taken.write(loss=1.0)


def test_the_record_of_batches_is_a_mapping_of_its_columns():
    record = BatchRecord()
    record.write(0, 0, True, [0, 1], loss=[2.0, 1.0])
    assert dict(record)["loss"] == [2.0, 1.0] and list(record.keys()) == [*BatchRecord.place, "loss"]
