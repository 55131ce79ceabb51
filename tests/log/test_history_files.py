"The history of a run as files in its folder."

import csv
import shutil
import warnings
import wave

import pytest
import torch

import isaac_loop.log.code_version as provenance
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.log.experiment import ExperimentCB
from isaac_loop.log.history_files import HistoryFilesCB, table_text
from isaac_loop.state.store import CheckpointStore
from runs import Cut, CutCB
from experiments import files, small


@pytest.fixture(autouse=True)
def no_git_of_the_tests(monkeypatch, request):
    "Most tests need no git, and asking it a hundred times takes seconds"
    if "git" not in request.node.name:
        monkeypatch.setattr(provenance, "_git", lambda *args: None)


# ---- the history as files


@pytest.mark.shows("AIT-37")
def test_metrics_that_appear_later_get_a_header(tmp_path):
    "Text, tabs or commas; the file is always a table"

    def cleanup_epoch(trainer):
        if trainer.epoch == 1 and not trainer.training:
            trainer.history.write(**{"f1, macro": 0.5})

    trainer = small(HistoryFilesCB(tmp_path, table=["csv", "tsv", "txt"], plot=None))

    def log(trainer):
        headers.append(
            (tmp_path / "results" / "history.csv").read_text().splitlines()[0] if trainer.epoch else ""
        )

    headers, log.order = [], 99
    trainer.fit(3, callbacks=[cleanup_epoch, log])
    assert "f1" in headers[1]
    for kind, mark in (("csv", ","), ("tsv", "\t")):
        with open(tmp_path / "results" / f"history.{kind}", newline="") as f:
            rows = list(csv.DictReader(f, delimiter=mark))
        assert [o["f1, macro"] for o in rows] == ["", "0.5", ""]
        assert [float(o["valid_loss"]) for o in rows] == trainer.history["valid_loss"], "every digit"
    assert (tmp_path / "results" / "history.txt").read_text().count("f1, macro") == 1
    assert not list(tmp_path.rglob(".part*"))
    assert table_text([]) == "\n"


@pytest.mark.shows("AIT-36", "AIT-22")
def test_curves_are_drawn_when_and_as_they_are_wanted(tmp_path):
    "Each epoch or at the end, png or pdf, a folder for each epoch"
    trainer = small(ExperimentCB(tmp_path, "p"), HistoryFilesCB(plot="pdf", keep_plots=True))
    trainer.fit(2)
    assert files(trainer.experiment.folder / "plots") == [
        "epoch-0/history.pdf",
        "epoch-1/history.pdf",
        "history.pdf",
    ]
    trainer = small(HistoryFilesCB(tmp_path / "end", each_epoch=False))
    seen = []

    def log(trainer):
        seen.append(files(tmp_path / "end"))

    log.order = 99
    trainer.fit(2, callbacks=log)
    assert seen == [[], []] and files(tmp_path / "end") == ["plots/history.png", "results/history.csv"]
    trainer = small(HistoryFilesCB(tmp_path / "cut", each_epoch=False))
    with pytest.raises(Cut):
        trainer.fit(3, callbacks=CutCB("after_backward", lambda t: t.epoch == 2))
    assert len((tmp_path / "cut" / "results" / "history.csv").read_text().splitlines()) == 3
    for bad in (dict(table="xlsx"), dict(plot="word")):
        with pytest.raises(ValueError, match=f"`{next(iter(bad))}` is"):
            HistoryFilesCB(tmp_path, **bad)


@pytest.mark.shows("AIT-42")
def test_media_become_files_that_can_be_opened(tmp_path):
    "Labels, reports and pictures are kept with their epoch, the model in its checkpoint"
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    sound = torch.sin(torch.arange(100) / 5)

    def cleanup_epoch(trainer):
        if trainer.training:
            return
        write = trainer.history.write_media
        write("labels", "table", [dict(true=1, predicted=0), dict(true=2, predicted=2)])
        write("report/final", "text", "accuracy: 50 %")
        write("report/final", "text", "once more")
        write("curve", "figure", Figure(figsize=(1, 1)))
        write("digit", "image", torch.tensor([[[0.0, 1.0], [0.5, 2.0]]]))
        write("beep", "audio", sound, rate=8000)

    trainer = small(ExperimentCB(tmp_path, "p"), CheckpointCB(), HistoryFilesCB(plot=None))
    trainer.fit(1, callbacks=cleanup_epoch)
    folder = trainer.experiment.folder
    assert files(folder / "results") == [
        "epoch-0/beep.wav",
        "epoch-0/labels.csv",
        "epoch-0/report-final-2.txt",
        "epoch-0/report-final.txt",
        "history.csv",
    ]
    assert (folder / "results" / "epoch-0" / "labels.csv").read_text() == "true,predicted\n1,0\n2,2\n"
    assert (imread(folder / "plots" / "epoch-0" / "digit.png") * 255).round().tolist() == [
        [0, 255],
        [128, 255],
    ]
    with wave.open(str(folder / "results" / "epoch-0" / "beep.wav")) as f:
        assert (f.getframerate(), f.getnframes()) == (8000, 100)
    assert torch.equal(
        CheckpointStore(folder / "checkpoints", read_only=True).load()[0]["weight"], trainer.model.weight
    )


@pytest.mark.parametrize(
    "value, kind, name",
    [
        (torch.rand(1, 2, 3, 4), "image", "i"),
        ("a text", "text", "x" * 300),
        ("a text", "text", "\u00e4" * 300),
    ],
    ids=["shape", "long", "umlauts"],
)
def test_a_medium_that_cannot_be_written_costs_nothing_else(value, kind, name, tmp_path):
    def after_epoch(trainer):
        if not trainer.training:
            return
        trainer.history.write_media(name, kind, value)
        trainer.history.write_media("fine", "text", "all is well")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        small(after_epoch, HistoryFilesCB(tmp_path)).fit(3)
    assert (
        len((tmp_path / "results" / "history.csv").read_text().splitlines()) == 4
        and (tmp_path / "plots" / "history.png").exists()
    )
    assert all((tmp_path / "results" / f"epoch-{i}" / "fine.txt").exists() for i in range(3))
    assert [str(o.message).startswith("`HistoryFilesCB` could not write image `i` to") for o in caught] == [
        True
    ] * (kind == "image")
    assert kind == "image" or len(files(tmp_path / "results" / "epoch-0")) == 2


def test_names_that_become_one_file_get_numbers(tmp_path):
    def after_epoch(trainer):
        for o in ("a/b", "a b"):
            trainer.training and trainer.history.write_media(o, "text", o)

    small(after_epoch, HistoryFilesCB(tmp_path)).fit(1)
    assert [(tmp_path / "results" / "epoch-0" / o).read_text() for o in ("a-b.txt", "a-b-2.txt")] == [
        "a/b",
        "a b",
    ]


def test_a_table_that_could_not_be_written_is_written_later(tmp_path):
    blocked = tmp_path / "results" / "history.csv"

    def before_epoch(trainer):
        if trainer.epoch == 0:
            (blocked / "x").mkdir(parents=True, exist_ok=True)
        if trainer.epoch == 2 and blocked.is_dir():
            shutil.rmtree(blocked)

    with pytest.warns(UserWarning, match="could not write `history.csv`"):
        small(before_epoch, HistoryFilesCB(tmp_path)).fit(3)
    assert len(blocked.read_text().splitlines()) == 4
