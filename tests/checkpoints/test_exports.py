"""`checkpoints/exports.py`, and saving when a function says so: which files there are, and what is in them.

The law of warm-up, stable, decay: what is saved before a decay goes on into a longer run as if that had
been meant from the start.
"""

import shutil

import pytest
import torch
from runs import Cut, CutCB, fit, make_model, make_trainer, same, tree

from isaac_loop.train.averaging import EMACB
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.checkpoints.exports import ExportCB
from isaac_loop.schedule.schedules import WSDSchedulerCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.state.checkpoint_files import Checkpoint, load_weights
from isaac_loop.loop.events import CancelFitException
from isaac_loop.state.store import CheckpointStore

pytestmark = pytest.mark.filterwarnings("error")


def steps(folder):
    return [o.step for o in CheckpointStore(folder, read_only=True).list()]


def new(*callbacks):
    return make_trainer([BasicTrainCB(), *callbacks])


@pytest.mark.shows("NEMO-54", "PTA-50")
@pytest.mark.parametrize(
    "every, found",
    [("epoch", [7, 14, 21]), (5, [5, 10, 15, 20, 21]), (lambda t: t.n_updates in (2, 14), [2, 14, 21])],
)
def test_exports_come_when_asked_for_and_at_the_end(every, found, tmp_path):
    "Each is what the model was then, and training is as without"
    seen = {}

    def after_step(trainer):
        seen[trainer.n_updates] = {k: v.clone() for k, v in trainer.model.state_dict().items()}

    trainer = fit(new(ExportCB(tmp_path, every, keep_last=None), after_step), 3)
    assert steps(tmp_path) == found
    for o in CheckpointStore(tmp_path, read_only=True).list():
        assert tree(load_weights(o.path)) == tree(seen[o.step])
    assert tree(trainer.model.state_dict()) == tree(fit(new(), 3).model.state_dict())


def test_only_the_newest_are_kept(tmp_path):
    fit(new(ExportCB(tmp_path, 3, keep_last=2)), 2)
    assert steps(tmp_path) == [12, 14]


@pytest.mark.shows("NEMO-54")
def test_chosen_parts_only(tmp_path):
    "The others are not in the file, and a name that fits nothing is an error before the first batch"
    trainer = fit(new(ExportCB(tmp_path, parts=["0", "4.bias"])), 1)
    assert {k: v.tolist() for k, v in load_weights(trainer.ExportCB.path).items()} == {
        k: trainer.model.state_dict()[k].tolist() for k in ("0.weight", "0.bias", "4.bias")
    }
    other = new(ExportCB(tmp_path, parts=["0", "5"]))
    with pytest.raises(LookupError, match="no weights in `5`"):
        fit(other, 1)
    assert other.n_updates == 0
    with pytest.raises(ValueError, match="`every` is 0"):
        ExportCB(tmp_path, every=0)


@pytest.mark.parametrize("error, found", [(CancelFitException, [9]), (ValueError, [])])
def test_a_cancelled_fit_is_exported_and_a_failed_one_is_not(error, found, tmp_path):
    "And the folder is free again for the next fit"
    trainer = new(ExportCB(tmp_path, every=100))
    try:
        fit(trainer, 2, callbacks=CutCB("before_batch", lambda t: t.n_updates == 9, error))
    except ValueError:
        pass
    assert steps(tmp_path) == found
    fit(trainer, 1)
    assert steps(tmp_path)[-1] == 9 + 7


@pytest.mark.parametrize("every", ["epoch", 5, 100])
@pytest.mark.parametrize("cut", [None, "after_fit"])
def test_a_run_that_is_complete_already_keeps_its_export(cut, every, tmp_path, capsys):
    "It ended with an AttributeError; an export that is missing is made up for"

    def start(*more):
        cbs = [ExportCB(tmp_path / "out", every), CheckpointCB(tmp_path / "full"), *more]
        make_trainer([BasicTrainCB(), *cbs]).fit(2, valid=False)
        return cbs[0].path

    def files():
        return {o: (o.read_bytes(), o.stat().st_mtime_ns) for o in (tmp_path / "out").glob("*/*")}

    if cut:  # All is trained, and the end neither saved nor exported
        with pytest.raises(Cut):
            start(CutCB(cut, lambda t: True))
    first = start()
    before, weights = files(), tree(load_weights(first))
    capsys.readouterr()
    for _ in range(2):
        assert start() == first and files() == before
        assert "This fit is complete already" in capsys.readouterr().out
    assert steps(tmp_path / "out") == {"epoch": [7, 14], 5: [5, 10, 14], 100: [14]}[every]
    shutil.rmtree(tmp_path / "out")
    assert tree(load_weights(start())) == weights and steps(tmp_path / "out") == [14]


def test_beside_an_average_the_average_is_exported(tmp_path):
    trainer = fit(new(EMACB(0.8), ExportCB(tmp_path)), 1)
    assert (
        tree(load_weights(trainer.ExportCB.path))
        == tree(trainer.EMACB.average.module.state_dict())
        != tree(trainer.model.state_dict())
    )


def wsd(**options):
    return WSDSchedulerCB(warmup=2, decay_length=4, **options)


@pytest.mark.shows("PTA-39")
def test_a_state_before_each_decay_and_an_export_after_it(tmp_path):
    "With several decays; a checkpoint of the end is written as always"
    schedule = wsd(n_decays=2)
    fit(
        new(
            schedule,
            CheckpointCB(tmp_path / "full", every=schedule.decay_begins, keep_last=None),
            ExportCB(tmp_path / "portable", every=schedule.decay_ends, keep_last=None),
        ),
        4,
    )
    assert schedule.decays(28) == [(10, 14), (24, 28)]
    assert steps(tmp_path / "full") == [10, 24, 28] and steps(tmp_path / "portable") == [14, 28]


@pytest.mark.shows("PTA-39")
def test_what_was_saved_before_the_decay_goes_on_into_a_longer_run(tmp_path):
    "Bit for bit, although a short run with its decay came first; from the export something else may begin"
    schedule = wsd()
    fit(
        new(
            schedule,
            CheckpointCB(tmp_path / "short", every=schedule.decay_begins, keep_last=None),
            ExportCB(tmp_path / "out", every=schedule.decay_ends),
        ),
        2,
    )
    before = CheckpointStore(tmp_path / "short", read_only=True).list()[0]
    assert (before.step, schedule.decays(14), schedule.decays(28)) == (10, [(10, 14)], [(24, 28)])
    with pytest.warns(
        UserWarning, match="saved in a fit of 14 steps, but this fit has 28. Its curve follows the new length"
    ):
        longer = fit(new(wsd(), CheckpointCB(tmp_path / "long", resume=before.path, keep_last=None)), 4)
    same(longer, fit(new(wsd(), CheckpointCB(tmp_path / "never stopped", keep_last=None)), 4))
    model = make_model()
    model.load_state_dict(load_weights(Checkpoint(tmp_path / "out" / "step-00000014").path))
    assert fit(make_trainer([BasicTrainCB(), wsd()], model=model), 1).n_updates == 7


def test_a_function_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="or a function of the trainer"):
        CheckpointCB(tmp_path, every=0)
    with pytest.raises(Cut):
        fit(
            new(
                CheckpointCB(tmp_path, every=lambda t: t.n_updates == 3),
                CutCB("before_step", lambda t: t.n_updates == 5),
            )
        )
    assert steps(tmp_path) == [3], "and between the two nothing else is saved"
    assert torch.is_tensor(load_weights(CheckpointStore(tmp_path, read_only=True).latest().path)["0.weight"])
