"""Callbacks of other libraries in several processes: what they ask of their trainer is answered by ours."""

import pytest
import torch
from several import in_processes, loaders, outcome, rank, rows, trainer

from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.interop.adapters import adapt

pytestmark = pytest.mark.processes


def fit(*callbacks, n_epochs=1, dls=None, **kwargs):
    "A trainer after a fit with foreign callbacks"
    t = trainer(*map(adapt, callbacks), dls=dls, **kwargs)
    t.fit(n_epochs, lr=0.02)
    return t


# ---- pytorch-accelerated


class Gathers:
    "Asks for everything that is about processes"

    def __init__(self):
        self.seen, self.targets = {}, []

    def on_training_run_start(self, trainer, **kwargs):
        accelerator, config = trainer._accelerator, trainer.run_config
        accelerator.wait_for_everyone()
        self.seen = dict(
            rank=(accelerator.process_index, accelerator.num_processes, accelerator.local_process_index),
            main=(
                accelerator.is_main_process,
                accelerator.is_local_main_process,
                accelerator.is_last_process,
            ),
            config=(config.is_world_process_zero, config.is_distributed, config.num_processes),
            rows=(config.train_per_device_batch_size, config.train_total_batch_size),
        )
        trainer.print("begins", end="!\n")

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        self.targets.append(trainer.gather(batch[1]))

    def on_training_run_end(self, trainer, **kwargs):
        self.gathered = trainer.gather(torch.tensor([trainer._accelerator.process_index]))
        self.losses = trainer.run_history.get_metric_values("eval_loss_epoch")


@pytest.mark.shows("PTA-42 to PTA-44", "PTA-54", "PTA-55", "NEMO-46")
def test_what_is_gathered_has_each_row_once_however_uneven_the_batches(capfd):
    "21 rows in batches of 8, and of 20, so that only one process has a row of the last batch"

    def run(batch_size):
        gathers = Gathers()
        dls = loaders()
        dls.valid = exact_loader(rows(21, 1), batch_size, shuffle=False)
        fit(gathers, dls=dls)
        return gathers.seen, torch.cat(gathers.targets), gathers.losses, gathers.gathered.tolist()

    for batch_size in (8, 20):
        (_, targets, losses, _), two = (
            in_processes(1, run, batch_size)[0],
            in_processes(2, run, batch_size),
        )
        assert torch.equal(targets, rows(21, 1).tensors[1])
        assert all(torch.equal(o[1], targets) and o[3] == [0, 1] for o in two)
        assert all(o[2] == pytest.approx(losses, rel=1e-6) for o in two)
    first, second = (o[0] for o in two)
    assert first["rank"] == (0, 2, 0) and second["rank"] == (1, 2, 1)
    assert first["main"] == (True, True, False) and second["main"] == (False, False, True)
    assert first["config"] == (True, True, 2) and second["config"] == (False, True, 2)
    assert first["rows"] == second["rows"] == (4, 8)
    assert capfd.readouterr().out.count("begins!") == 4


@pytest.mark.shows("PTA-61", "PTA-42")
def test_main_alone_saves_what_all_have(tmp_path):
    class Saves:
        def on_training_run_end(self, trainer, **kwargs):
            trainer.save_checkpoint(tmp_path / f"{rank()}.pt", save_scheduler=False)
            trainer._accelerator.save([1], tmp_path / f"list-{rank()}.pt")

    in_processes(2, lambda: fit(Saves()).n_updates)
    assert {o.name for o in tmp_path.iterdir()} == {"0.pt", "list-0.pt"}


# ---- NeMo


@pytest.mark.shows("NEMO-03", "NEMO-18")
def test_the_state_of_nemo_knows_the_ranks():
    class Ranks:
        def on_action_start(self, state):
            self.seen = state.local_rank, state["global_rank"]

    def run():
        ranks = Ranks()
        fit(ranks)
        return ranks.seen

    assert in_processes(2, run) == [(0, 0), (1, 1)]


# ---- Sonosco


def test_a_callable_that_asks_to_stop_in_one_process_stops_all():
    def stops(epoch, step, measures, context):
        if rank() == 1 and step == 2:
            context.stop_training()

    def run():
        t = fit(stops, n_epochs=3)
        return t.epoch, t.stop_reason

    assert in_processes(2, run) == [(0, "`stops` asked to stop")] * 2


# ---- AIToolbox


@pytest.fixture
def toolbox():
    return pytest.importorskip("aitoolbox.torchtrain.callbacks.abstract").AbstractCallback


@pytest.mark.shows("AIT-08", "AIT-15", "AIT-17", "AIT-62", "AIT-77")
def test_a_toolbox_callback_runs_in_each_process_or_in_that_of_its_device(toolbox):
    "Each is told that processes have started; `early_stop` of one stops all"

    class Notes(toolbox):
        def __init__(self, device=None):
            super().__init__("notes", device_idx_execution=device)
            self.seen = []

        def on_multiprocess_start(self):
            self.seen.append("started")

        def on_epoch_end(self):
            loop = self.train_loop_obj
            self.seen.append((loop.is_main_process(), loop.ddp_training_mode, loop.ddp_rank, loop.gpu_mode))
            loop.early_stop = loop.early_stop or rank() == 1

    def run():
        every, second = Notes(), Notes(1)
        t = trainer(adapt(every), adapt(second, name="second"))
        t.fit(3, lr=0.02)
        return every.seen, second.seen, t.epoch, t.stop_reason

    (first, none, *end), (other, same, *end_of_other) = in_processes(2, run)
    assert first == ["started", (True, True, 0, "ddp")] and none == []
    assert other == same == ["started", (False, True, 1, "ddp")]
    assert end == end_of_other == [0, "a callback set `early_stop`"]


@pytest.mark.shows("AIT-61")
def test_a_toolbox_callback_may_build_the_loaders_inside_each_process(toolbox):
    "Then each process has the part that was built there, and nothing is shared a second time"

    class Builds(toolbox):
        def on_multiprocess_start(self):
            loop = self.train_loop_obj
            loop.train_loader = exact_loader(rows(48), 4, seed=3, rank=loop.ddp_rank, world_size=2)

    def run():
        read = []

        def before_batch(trainer):
            if trainer.training:
                read.append(trainer.batch[0])

        t = trainer(adapt(Builds("builds")), before_batch, share=False)
        t.fit(1, lr=0.02)
        return outcome(t)[0], torch.cat(read), t.n_updates

    (weights, x, n), (others, y, m) = in_processes(2, run)
    assert torch.equal(weights, others) and n == m == 6
    both, all_rows = torch.cat([x, y]), rows(48).tensors[0]
    assert torch.equal(both[both[:, 0].argsort()], all_rows[all_rows[:, 0].argsort()])


@pytest.mark.shows("AIT-63", "AIT-79")
def test_losses_and_predictions_of_all_processes_reach_toolbox_callbacks(toolbox):
    class Looks(toolbox):
        def on_epoch_end(self):
            loop = self.train_loop_obj
            self.preds, self.targets, _ = loop.predict_on_validation_set()
            self.loss = loop.evaluate_loss_on_validation_set().item()
            self.trained = loop.train_history["accumulated_loss"]

    def run():
        looks = Looks("looks")
        t = fit(looks, dls=DataLoaders(loaders().train, exact_loader(rows(21, 1), 20, shuffle=False)))
        return looks.preds, looks.targets, looks.loss, looks.trained, t.n_updates

    one, two = in_processes(1, run)[0], in_processes(2, run)
    for found in two:
        assert torch.allclose(found[0], one[0], atol=1e-10) and torch.equal(found[1], one[1])
        assert found[2:4] == (pytest.approx(one[2]), pytest.approx(one[3])) and found[4] == one[4]
