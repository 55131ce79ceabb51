"""Tables as text, `basics/tables.py`, in lines of any width: no word is lost, or broken if it fits."""

import io
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isaac_loop.basics.tables import Table, fitted
from isaac_loop.inspection import loop_tables  # noqa: F401  `trainer.summarize_callbacks`
from runs import callbacks, make_trainer


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    "Makes a terminal of so many columns; returns what it shows"

    def make(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "stdout", Terminal())
        return sys.stdout

    return make


texts = st.text("ab c", max_size=30)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(texts, min_size=n, max_size=n), min_size=1)),
    st.integers(5, 60),
)
def test_lines_are_no_wider_than_asked_for_and_lose_no_word(cells, width):
    groups = fitted(cells, width)
    words = [word for row in cells for cell in row for word in cell.split()]
    shown = [word for lines in groups for line in lines for word in line.split()]
    assert set(shown) == set(words) and len(shown) >= len(words)
    longest = max(map(len, words), default=0)
    first = max((len(word) for row in cells for word in row[0].split()), default=0)
    for line in (line for lines in groups for line in lines):
        assert len(line) <= width or len(line) <= first + 2 + longest, "a group has at least two columns"


@pytest.mark.parametrize("columns", [80, 140])
def test_the_table_of_callbacks_breaks_no_word_in_a_terminal(columns, terminal):
    trainer = make_trainer(callbacks())
    table = trainer.summarize_callbacks()
    whole = table.to_text()
    screen = terminal(columns)
    print(table)
    lines = screen.getvalue().splitlines()
    assert max(map(len, whole.splitlines())) > columns >= max(map(len, lines)) > columns - 12
    assert sorted(" ".join(lines).split()) == sorted(whole.split())
    assert repr(table) == str(table)


def test_a_history_that_is_too_wide_comes_in_groups_that_begin_with_the_epoch(terminal):
    rows = [dict(epoch=i, **{f"metric_number_{j}": i / 10 for j in range(8)}) for i in range(2)]
    screen = terminal(80)
    print(Table(rows))
    lines = screen.getvalue().splitlines()
    assert [line.split()[0] for line in lines if line] == ["epoch", "0", "1"] * 2 and max(
        map(len, lines)
    ) <= 80


def test_what_is_no_terminal_gets_whole_lines(terminal, monkeypatch):
    "A pipe, a file, a notebook; also what a program writes while somebody looks at a terminal"
    table = Table([dict(step="step", does="word " * 60)])
    whole = str(table)
    assert len(whole.splitlines()) == 2
    terminal(40)
    assert table.to_text() == whole and len(str(table).splitlines()) > 2
    monkeypatch.setattr(sys, "stdout", None)  # As under `pythonw`
    assert str(table) == whole
