"""Bars and tables of `show/progress.py`, checked against what a person would see in each place.

A pipe is what pytest captures. A terminal is a pseudo-terminal with a program of its own, and a small
screen that obeys the control characters. A notebook is executed in a real kernel. Redraws are counted, not
timed.
"""

import builtins
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from itertools import count
from types import SimpleNamespace

import nbformat
import pytest
import torch
import tqdm.std
from nbclient import NotebookClient
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.show.progress import ProgressCB, place_of_output
from isaac_loop.stop.early_stopping import EarlyStoppingCB
from isaac_loop.train.training import BasicTrainCB, NBatchCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.basics.tables import short
from isaac_loop.loop.events import CancelBatchException, CancelEpochException, CancelFitException, Order
from isaac_loop.loop.trainer import Trainer

PLACES = ("plain", "terminal", "notebook")


class Stream:
    "A loader that nobody knows the length of"

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


class Panel:
    "Stands in for IPython's display: keeps what was drawn"

    def __init__(self):
        self.drawn = []

    def __call__(self, obj, display_id=None):
        self.update(obj)
        return self

    def update(self, obj):
        self.drawn.append(repr(obj))


@pytest.fixture
def panel(monkeypatch):
    import IPython.display

    panel = Panel()
    monkeypatch.setattr(IPython.display, "display", panel)
    return panel


@pytest.fixture
def terminal(monkeypatch):
    "Called in a test, gives everything printed to stderr and stdout"

    def start():
        err, out = FakeTerminal(), FakeTerminal()
        monkeypatch.setattr(sys, "stderr", err)
        monkeypatch.setattr(sys, "stdout", out)
        return err, out

    return start


def make_trainer(callbacks, n_train=4, n_valid=2, stream=False):
    torch.manual_seed(0)
    x = torch.randn(4, 1)
    loaders = [[(x, 3 * x + 1)] * n for n in (n_train, n_valid)]
    return Trainer(
        DataLoaders(*(Stream(o) if stream else o for o in loaders)),
        F.mse_loss,
        optim.SGD,
        nn.Linear(1, 1),
        [BasicTrainCB(), *callbacks],
    )


def open_bars():
    return [o for o in tqdm.std.tqdm._instances if not o.disable]


def words(text):
    return [line.split() for line in text.splitlines()]


HEADER = ["epoch", "train_loss", "valid_loss", "time"]


# Where we are


def test_a_pipe_is_a_plain_place(capsys):
    assert place_of_output() == "plain"


def test_a_terminal_is_one_when_both_outputs_go_there(terminal, monkeypatch):
    terminal()
    assert place_of_output() == "terminal"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert place_of_output() == "plain"


@pytest.mark.parametrize(
    ("shell", "place"),
    [("ZMQInteractiveShell", "notebook"), ("Shell", "notebook"), ("TerminalInteractiveShell", "terminal")],
)
def test_ipython_is_a_notebook_unless_it_runs_in_a_terminal(shell, place, terminal, monkeypatch):
    terminal()
    monkeypatch.setattr(builtins, "get_ipython", type(shell, (), {}), raising=False)
    assert place_of_output() == place


@pytest.mark.parametrize("place", ["terminl", "Notebook", "", 3])
def test_an_unknown_place_is_refused(place):
    with pytest.raises(
        ValueError, match=f"`place` is {place!r}. Use 'notebook', 'terminal', 'plain' or None"
    ):
        ProgressCB(place)


@pytest.mark.shows("ISA-66")
def test_the_place_is_found_out_when_training_begins(panel, capsys, monkeypatch):
    "Not when the callback is made"
    cb = ProgressCB()
    monkeypatch.setattr(builtins, "get_ipython", type("ZMQInteractiveShell", (), {}), raising=False)
    make_trainer([MetricsCB(), cb]).fit(1)
    assert words(panel.drawn[-1])[0] == HEADER and capsys.readouterr().out == ""
    monkeypatch.delattr(builtins, "get_ipython")
    make_trainer([MetricsCB(), cb]).fit(1)
    assert words(capsys.readouterr().out)[0] == HEADER


# A pipe


def is_plain(text):
    return not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)


@pytest.mark.shows("ISA-66")
@pytest.mark.parametrize("stream", [False, True])
def test_a_pipe_gets_one_header_one_row_per_epoch_and_no_control_characters(stream, capfd):
    trainer = make_trainer([MetricsCB(), ProgressCB("plain")], stream=stream)
    trainer.fit(3, lr=0.1)
    out, err = capfd.readouterr()
    assert is_plain(out) and err == ""
    header, *rows = words(out)
    assert header == HEADER and len(rows) == 3
    for shown, row in zip(rows, trainer.history):
        assert shown[:3] == [str(row["epoch"]), f"{row['train_loss']:.3f}", f"{row['valid_loss']:.3f}"]
        assert re.fullmatch(r"\d\d:\d\d", shown[3])


def test_the_columns_of_a_pipe_stand_under_one_another(capsys):
    make_trainer([MetricsCB(), ProgressCB("plain")]).fit(2, lr=0.1)
    header, *rows = capsys.readouterr().out.splitlines()
    starts = [m.start() for m in re.finditer(r"\S+", header)]
    for row in rows:
        assert [m.start() for m in re.finditer(r"\S+", row)] == starts


def test_a_second_fit_has_a_table_of_its_own(capsys):
    trainer = make_trainer([MetricsCB(), ProgressCB("plain")])
    trainer.fit(2)
    trainer.fit(1)
    first = [line[0] for line in words(capsys.readouterr().out)]
    assert first == ["epoch", "0", "1", "epoch", "0"]


def test_the_header_comes_again_when_there_are_new_columns(capsys):
    class LateCB:
        order = Order.SCHEDULE

        def log(self, trainer):
            if trainer.epoch == 1:
                trainer.history.write(extra=7)

    make_trainer([MetricsCB(), ProgressCB("plain"), LateCB()]).fit(3)
    shown = words(capsys.readouterr().out)
    assert [line[0] for line in shown] == ["epoch", "0", "epoch", "1", "2"]
    assert shown[0] == HEADER and shown[2] == [*HEADER, "extra"]
    assert shown[3][-1] == "7" and len(shown[4]) == 4


def test_a_long_pass_in_a_pipe_gives_a_plain_line_now_and_then(capfd, monkeypatch):
    "A log shows that the run is alive; here every look at tqdm's clock takes five seconds"
    clock = count(0, 5)
    monkeypatch.setattr(tqdm.std, "time", lambda: next(clock))
    make_trainer([MetricsCB(), ProgressCB("plain")], n_train=30).fit(1)
    out, err = capfd.readouterr()
    assert is_plain(out) and err == ""
    alive = [line for line in out.splitlines() if line.startswith("Training: ")]
    assert len(alive) > 1
    for line in alive:
        assert re.fullmatch(r"Training: \d+/30 batches, \d\d:\d\d", line)


@pytest.mark.parametrize("seconds, between", [(0.25, 10), (3600, 3600)])
def test_lines_in_a_pipe_come_every_ten_seconds_or_less_often(seconds, between):
    cb = ProgressCB("plain", seconds=seconds)
    cb.before_fit(SimpleNamespace(epochs=range(1), n_epochs=1))
    bar = cb._bar([], "Training", 0)
    assert bar.mininterval == bar.delay == between


@pytest.mark.parametrize("seconds", [None, "x", -1, float("nan"), True])
def test_seconds_that_are_none_are_refused_at_once(seconds):
    with pytest.raises(ValueError, match=f"`seconds` is {seconds!r}(.|\n)*Use 0 or more"):
        ProgressCB("plain", seconds=seconds)


def test_without_rows_there_is_no_table(capfd):
    make_trainer([ProgressCB("plain")]).fit(2)
    assert capfd.readouterr() == ("", "")


# A terminal


class Screen:
    "Obeys carriage return, new line and cursor up; knows nothing else, so anything else would be seen"

    def __init__(self, text):
        self.lines, self.row, self.column = [[]], 0, 0
        for o in re.findall(r"\x1b\[A|.", text, re.DOTALL):
            {"\r": self.home, "\n": self.down, "\x1b[A": self.up}.get(o, lambda o=o: self.put(o))()

    def home(self):
        self.column = 0

    def up(self):
        self.row = max(0, self.row - 1)

    def down(self):
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])

    def put(self, char):
        line = self.lines[self.row]
        line.extend(" " * (self.column + 1 - len(line)))
        line[self.column] = char
        self.column += 1

    def text(self):
        return "\n".join("".join(o).rstrip() for o in self.lines).rstrip()


def run_in_terminal(program, size=(24, 100)):
    "Everything that `program` wrote to its pseudo-terminal, and its exit status"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        chunks = []
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:
                break  # Linux says so when the program has closed its side
            if not chunk:
                break
            chunks.append(chunk)
        process.wait(60)
    os.close(ours)
    return b"".join(chunks).decode(), process.returncode


PROGRAM = """
import time, torch
from torch import nn, optim
from torch.nn import functional as F
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.show.progress import ProgressCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.loop.trainer import Trainer

class SlowCB:
    "Each pass lasts longer than a redraw waits"
    def after_batch(self, trainer): time.sleep(0.015 if trainer.training else 0.03)

x = torch.ones(4, 1)
dls = DataLoaders([(x, x)]*30, [(x, x)]*15)
callbacks = [BasicTrainCB(), MetricsCB(), ProgressCB(), SlowCB()]
trainer = Trainer(dls, F.mse_loss, optim.SGD, nn.Linear(1, 1), callbacks)
trainer.fit(2, lr=0.1)
"""


FAILURE = """
class FailCB:
    def after_batch(self, trainer):
        if trainer.epoch == 1 and trainer.batch_num == 3: raise ValueError('out of luck')

print('AGAIN')
trainer.fit(2, lr=0.1, callbacks=FailCB())
"""


@pytest.mark.shows("ISA-66", "PTA-24")
def test_a_terminal_shows_bars_and_is_left_with_one_table_even_when_training_fails():
    "A fit that ends well, and a second one that does not"
    text, status = run_in_terminal(PROGRAM + FAILURE)
    assert status == 1, text
    for label, total in (("Epochs", 2), ("Training", 30), ("Validation", 15)):
        done = [int(o) for o in re.findall(rf"{label}: .*?(\d+)/{total} ", text)]
        assert done and max(done) > 0, f"the bar `{label}` has to be seen moving"
    shown = Screen(text).text()
    assert "ValueError: out of luck" in shown and not re.search("(Epochs|Training|Validation): ", shown)
    assert [line[0] for line in words(shown)][:7] == ["epoch", "0", "1", "AGAIN", "epoch", "0", "Traceback"]
    assert words(shown)[0] == HEADER


WARNING = """
import warnings
class WarnCB:
    def after_batch(self, trainer):
        if trainer.batch_num == 20: warnings.warn(f'in epoch {trainer.epoch}')

class SayCB:
    def after_batch(self, trainer):
        if trainer.batch_num == 25: say(f'said in epoch {trainer.epoch}')

from isaac_loop.basics.output import say
shown = warnings.showwarning
trainer.fit(1, lr=0.1, callbacks=[WarnCB(), SayCB()])
assert warnings.showwarning is shown
"""


def test_what_is_said_and_warned_of_stands_above_the_bars_in_a_terminal():
    "A bar may never stand in front of it"
    text, status = run_in_terminal(PROGRAM.replace("trainer.fit(2, lr=0.1)", "") + WARNING)
    assert status == 0, text
    lines = Screen(text).text().splitlines()
    assert lines[0].endswith("UserWarning: in epoch 0") and "|" not in lines[0]
    assert "said in epoch 0" in lines and not any("Training:" in line for line in lines)


PRINTING = """
class PrintCB:
    def after_batch(self, trainer):
        if trainer.batch_num == 20: print('printed', end=' '); print('in epoch', trainer.epoch)
        if trainer.training and trainer.batch_num == 25 and trainer.epoch == 1: trainer.request_stop('enough')

import sys
before = sys.stdout
trainer.fit(3, lr=0.1, callbacks=PrintCB())
assert sys.stdout is before
print('after')
"""


def test_what_a_callback_prints_stands_above_the_bars_and_the_reason_to_stop_below_the_table():
    text, status = run_in_terminal(PROGRAM.replace("trainer.fit(2, lr=0.1)", "") + PRINTING)
    assert status == 0, text
    lines = [o.strip() for o in Screen(text).text().splitlines()]
    assert [o for o in lines if "printed" in o] == ["printed in epoch 0", "printed in epoch 1"]
    assert lines[-2:] == ["stopped: enough", "after"] and not any("Training:" in o for o in lines)


class DotsCB:
    def after_batch(self, trainer):
        print(".", end="")


def test_a_line_that_was_begun_is_not_lost(terminal):
    _, out = terminal()
    trainer = make_trainer([ProgressCB("terminal")])
    trainer.fit(1, callbacks=DotsCB())
    assert "......" in out.getvalue() and sys.stdout is out


@pytest.mark.parametrize("callbacks", [[], [ProgressCB("plain")]], ids=["rows", "table"])
def test_a_fit_that_stops_before_its_time_says_why_once(callbacks, capsys):
    def log(trainer):
        trainer.request_stop("good enough")

    trainer = make_trainer([MetricsCB(), *callbacks])
    trainer.fit(3, callbacks=log)
    assert capsys.readouterr().out.splitlines()[-1] == "stopped: good enough"
    trainer.fit(1)
    trainer.MetricsCB.show = bool(callbacks)
    trainer.fit(3, callbacks=log)
    assert capsys.readouterr().out.count("stopped: good enough") == bool(callbacks)


def test_warnings_are_written_as_before_when_a_fit_fails(terminal):
    import warnings

    terminal()
    before = warnings.showwarning

    def after_batch(trainer):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        make_trainer([ProgressCB("terminal"), after_batch]).fit(1)
    assert warnings.showwarning is before


def test_an_output_that_is_none_or_closed_is_a_plain_place(terminal, monkeypatch):
    terminal()
    monkeypatch.setattr(sys, "stdout", None)
    assert place_of_output() == "plain"
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    assert place_of_output() == "plain"


# A notebook


def run_in_notebook(code):
    "The outputs of one cell in a real kernel"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return notebook.cells[0].outputs


@pytest.mark.shows("ISA-66")
def test_a_notebook_is_left_with_exactly_one_output_the_table():
    (output,) = run_in_notebook(PROGRAM)
    assert output.output_type == "display_data"
    header, *rows = words(output.data["text/plain"])
    assert header == HEADER and [row[0] for row in rows] == ["0", "1"]
    header, rule, *rows = output.data["text/markdown"].splitlines()
    assert header == f"| {' | '.join(HEADER)} |" and set(rule) == set("| -")
    assert [row.split(" | ")[0] for row in rows] == ["| 0", "| 1"]


@pytest.mark.shows("ISA-66")
def test_a_notebook_shows_a_bar_below_the_table_while_a_pass_runs(panel):
    class SlowCB:
        order = Order.LAST

        def after_batch(self, trainer):
            if trainer.epoch == 1 and trainer.training:
                time.sleep(0.02)

    make_trainer([MetricsCB(), ProgressCB("notebook", seconds=0.05), SlowCB()], n_train=50).fit(2)
    with_bar = [o for o in panel.drawn if "Training: " in o]
    assert with_bar and words(with_bar[-1])[0] == HEADER
    assert "Training" not in panel.drawn[-1] and [line[0] for line in words(panel.drawn[-1])] == [
        "epoch",
        "0",
        "1",
    ]


def test_nothing_is_left_to_see_in_a_notebook_when_there_are_no_rows(panel):
    make_trainer([ProgressCB("notebook", seconds=60)]).fit(1)
    assert panel.drawn[-1] == ""


def test_a_notebook_shows_the_bar_of_the_epochs_before_the_first_batch(panel):
    drawn = []

    def before_fit(trainer):
        drawn.extend(panel.drawn)

    before_fit.order = Order.LAST
    make_trainer([ProgressCB("notebook"), before_fit]).fit(3)
    assert len(set(drawn)) == 1 and "0/3" in drawn[0] and drawn[0].startswith("Epochs:   0%|")


def test_the_bars_of_a_notebook_are_blocks(panel):
    make_trainer([ProgressCB("notebook", seconds=0), SlowCB()], n_train=5).fit(8)
    assert any("█" in o for o in panel.drawn) and not any("#" in o for o in panel.drawn)


# How often


class SlowCB:
    "A thousandth of a second for each batch, so tqdm's own counting of iterations gets no excuse"

    def after_batch(self, trainer):
        time.sleep(0.001)


@pytest.mark.shows("ISA-66")
def test_a_notebook_is_redrawn_at_most_four_times_a_second(panel):
    "A thousand batches, a handful of drawings"
    start = time.monotonic()
    make_trainer([MetricsCB(), ProgressCB("notebook"), SlowCB()], n_train=900, n_valid=100).fit(1)
    seconds = time.monotonic() - start
    assert 1 < len(panel.drawn) <= 4 * seconds + 2  # One is the last, which nobody may leave out


def test_many_short_epochs_do_not_redraw_a_notebook_more_often(panel):
    start = time.monotonic()
    make_trainer([MetricsCB(), ProgressCB("notebook")]).fit(200)
    assert len(panel.drawn) <= 4 * (time.monotonic() - start) + 2
    assert len(words(panel.drawn[-1])) == 201


@pytest.mark.shows("ISA-66")
@pytest.mark.parametrize("stream", [False, True])
def test_a_terminal_is_redrawn_at_most_four_times_a_second(terminal, stream):
    "Each of the two bars"
    err, _ = terminal()
    start = time.monotonic()
    make_trainer([ProgressCB("terminal"), SlowCB()], n_train=900, n_valid=100, stream=stream).fit(1)
    seconds = time.monotonic() - start
    drawn = err.getvalue()
    assert 1 < drawn.count("Training:") <= 4 * seconds + 2
    for label in ("Epochs", "Validation"):
        assert 1 <= drawn.count(f"{label}:") <= 4 * seconds + 2


# How it ends


class EndCB:
    "Raises in the second epoch, while two bars are open"

    def __init__(self, error):
        self.error = error

    def after_batch(self, trainer):
        if trainer.epoch == 1 and trainer.batch_num == 1:
            raise self.error


@pytest.mark.shows("ISA-66")
@pytest.mark.parametrize(
    "error",
    [
        None,
        ValueError(),
        KeyboardInterrupt(),
        CancelFitException(),
        CancelEpochException(),
        CancelBatchException(),
    ],
    ids=lambda o: type(o).__name__,
)
@pytest.mark.parametrize("place", PLACES)
def test_no_bar_stays_open_however_training_ends(place, error, terminal, panel):
    _, out = terminal()
    trainer = make_trainer([MetricsCB(), ProgressCB(place, seconds=0)] + ([EndCB(error)] if error else []))
    try:
        trainer.fit(3)
    except (ValueError, KeyboardInterrupt) as e:
        assert e is error
    assert open_bars() == []
    rows = 1 if isinstance(error, (ValueError, KeyboardInterrupt, CancelFitException)) else 3
    shown = panel.drawn[-1] if place == "notebook" else out.getvalue()
    assert [line[0] for line in words(shown)] == ["epoch", *map(str, range(rows))]


@pytest.mark.shows("PTA-24")
@pytest.mark.parametrize("place", PLACES)
def test_bars_are_open_while_training_runs(place, terminal, panel):
    "The test above could not fail otherwise"
    terminal()

    class LookCB:
        order = Order.LAST

        def after_batch(self, trainer):
            self.n = len(open_bars())

    trainer = make_trainer([ProgressCB(place), LookCB()])
    trainer.fit(1)
    assert trainer.LookCB.n == (1 if place == "plain" else 2)  # A pipe has none around the epochs


@pytest.mark.parametrize("place", PLACES)
def test_a_callback_that_is_removed_in_the_middle_closes_its_bars(place, terminal, panel):
    terminal()

    class RemoveCB:
        def after_batch(self, trainer):
            if trainer.batch_num == 1:
                trainer.remove_callbacks([o for o in trainer.callbacks if isinstance(o, ProgressCB)])

    trainer = make_trainer([ProgressCB(place), RemoveCB()])
    trainer.fit(2)
    assert open_bars() == [] and trainer.n_updates == 8


@pytest.mark.shows("ISA-66")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stream", [False, True])
def test_bars_leave_the_number_of_batches_and_weights_alone(place, stream, terminal, panel):
    "Streams without a length too"
    terminal()
    shown, bare = (make_trainer(callbacks, stream=stream) for callbacks in ([ProgressCB(place)], []))
    for trainer in (shown, bare):
        trainer.fit(3, lr=0.1)
    assert shown.n_updates == bare.n_updates == 12
    assert torch.equal(shown.model.weight, bare.model.weight)


@pytest.mark.shows("ISA-60", "ISA-66")
def test_a_bar_knows_where_a_limited_pass_will_end(terminal):
    err, _ = terminal()
    make_trainer([NBatchCB(3), ProgressCB("terminal", seconds=0)], n_train=50, stream=True).fit(1)
    assert set(re.findall(r"Training: .*?\d+/(\d+) ", err.getvalue())) == {"3"}


@pytest.mark.shows("MIN-06")
@pytest.mark.parametrize("place", ["terminal", "notebook"])
def test_the_bar_shows_a_recent_loss(place, monkeypatch):
    "The loss of a batch is on the bar, one redraw late, and is the loss that was computed"
    from isaac_loop.show import progress

    shown = []
    monkeypatch.setattr(progress.tqdm, "set_postfix_str", lambda self, text, refresh=True: shown.append(text))

    class NoteCB:
        order = 1000

        def __init__(self):
            self.losses = []

        def after_batch(self, trainer):
            self.losses.append(trainer.loss.item())

    torch.manual_seed(0)
    batches = [(torch.randn(4, 1), torch.randn(4, 1)) for _ in range(4)]
    note = NoteCB()
    trainer = Trainer(
        DataLoaders(batches),
        torch.nn.functional.mse_loss,
        torch.optim.SGD,
        torch.nn.Linear(1, 1),
        [BasicTrainCB(), ProgressCB(place, seconds=0.0), note],
    )
    trainer.fit(1, valid=False)
    assert shown == [f"loss {short(o)}" for o in note.losses[:-1]]


@pytest.mark.parametrize("place", ["terminal", "notebook", "plain"])
def test_a_fit_that_another_callback_refuses_leaves_only_its_own_error(place):
    "`cleanup_fit` came without a `before_fit`, and added an error about `_bars`"
    batches = [(torch.randn(4, 1), torch.randn(4, 1)) for _ in range(2)]
    trainer = Trainer(
        DataLoaders(batches, batches),
        F.mse_loss,
        optim.SGD,
        nn.Linear(1, 1),
        [BasicTrainCB(), MetricsCB(), ProgressCB(place), EarlyStoppingCB("acc", mode="max")],
    )
    for _ in range(2):
        with pytest.raises(LookupError, match="acc") as e:
            trainer.fit(1)
        assert not any("besides" in o for o in getattr(e.value, "__notes__", ()))
    assert len(trainer.epochs) == 1 and open_bars() == []


FIRST_OPTIMIZER = """
import io, sys
import torch
from tqdm.std import tqdm
from isaac_loop.callbacks import BasicTrainCB, ProgressCB
from isaac_loop import DataLoaders, Trainer

seen = []

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo":
            seen.append("loading")

class Screen(io.StringIO):
    def write(self, text):
        if "Epochs" not in text:
            sys.__stderr__.write(text)
        elif "bar" not in seen[-1:]:
            seen.append("bar")

def before_fit(trainer):
    seen.append("before_fit" if hasattr(trainer, "opt") else "no optimizer")

def misused(params, lr, other):
    pass

sys.meta_path.insert(0, Watch())
sys.stderr = Screen()
dls = DataLoaders([(torch.ones(4, 2), torch.zeros(4, 1))])
trainer = Trainer(dls, torch.nn.MSELoss(), misused, torch.nn.Linear(2, 1),
                  [BasicTrainCB(), ProgressCB("terminal"), before_fit])
try: trainer.fit(1, valid=False)
except TypeError: assert seen == ["bar"] and not tqdm._instances
trainer.opt_func = torch.optim.SGD
seen.clear()
trainer.fit(1, valid=False)
assert seen[:2] == ["bar", "loading"] and seen.count("loading") == 1 and "before_fit" in seen[2:], seen
seen.clear()
trainer.fit(1, valid=False)
assert "bar" in seen and "loading" not in seen
assert not [o for o in tqdm._instances if not o.disable], list(tqdm._instances)
"""


def test_a_bar_is_there_before_the_first_optimizer_loads_what_it_needs():
    done = subprocess.run([sys.executable, "-c", FIRST_OPTIMIZER], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
