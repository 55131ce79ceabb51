"Several processes find together, ask one another, and part: groups, messages, ends, and whose data they read"

import gc
import multiprocessing
import os
import time
from datetime import timedelta

import pytest
import torch
from several import TIMEOUT, in_processes, loaders, outcome, rank, rows, trainer
from torch import nn
from torch.utils.data import DataLoader

from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.device.connection import _why_lost, in_words
from isaac_loop.device.launching import launch
from isaac_loop.device.process_ranks import ProcessRanks
from isaac_loop.device.processes import _not_found, join
from isaac_loop.loop.ranks import Ranks
from isaac_loop.state.errors import RankFailed, RanksDiffer, WorldSizeMismatch

pytestmark = pytest.mark.processes


class Rows:
    "Notes which rows were read"

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.full((4,), float(i), dtype=torch.float64), torch.zeros(1, dtype=torch.float64)


class Read:
    "The numbers of the rows that each pass was made of"

    def before_fit(self, trainer):
        self.rows = {True: [], False: []}

    def after_batch(self, trainer):
        self.rows[trainer.training].append(trainer.batch[0][:, 0].tolist())


@pytest.mark.parametrize("n,n_valid", [(53, 21), (3, 1), (33, 3)])
def test_every_row_is_read_once_and_batches_are_those_of_one_process(n, n_valid):
    def read():
        dls = DataLoaders(exact_loader(Rows(n), 8, seed=3), exact_loader(Rows(n_valid), 8, shuffle=False))
        seen = Read()
        trainer(seen, dls=dls).fit(1, lr=1e-6)
        return seen.rows

    alone, several = read(), in_processes(4, read)
    for training in (True, False):
        shares = zip(*(read[training] for read in several))
        assert [sum(batch, []) for batch in shares] == alone[training]


def test_alone_nothing_changes_by_a_bit():
    def fitted(*gone):
        t = trainer()
        t.remove_callbacks([cb for cb in t.callbacks if type(cb).__name__ in gone])
        t.fit(2, lr=0.05)
        return outcome(t)

    names = "DistributedJoin", "DistributedSync", "DistributedWatch"
    with_it, without = fitted(), fitted(*names)
    assert torch.equal(with_it[0], without[0]) and with_it[1] == without[1]


def test_one_message_before_each_update_and_a_few_after_each_pass():
    def count():
        sent = {"sums": 0, "gathers": 0}
        total, gather = ProcessRanks.sum_in_place, ProcessRanks.gather

        def count_sums(self, x):
            sent["sums"] += 1
            return total(self, x)

        def count_gathers(self, x):
            sent["gathers"] += 1
            return gather(self, x)

        ProcessRanks.sum_in_place, ProcessRanks.gather = count_sums, count_gathers
        t = trainer(dls=DataLoaders(loaders().train))
        t.remove_callbacks("MetricsCB")
        try:
            t.fit(2, lr=0.05, valid=False)
        finally:
            ProcessRanks.sum_in_place, ProcessRanks.gather = total, gather
        return sent, t.n_updates

    sent, n_updates = in_processes(2, count)[0]
    assert sent["sums"] <= n_updates + 2 + 1  # One for the end of each pass, and one to part
    assert sent["gathers"] <= 1 + 2 * 3  # What was set up; then weights and wishes for each epoch


def test_several_fits_in_the_same_processes():
    def twice():
        t = trainer()
        t.fit(1, lr=0.05)
        between = type(t.ranks), t.dls.train.batch_sampler.world_size
        t.fit(1, lr=0.05)
        return outcome(t)[0], between

    (alone, _), several = twice(), in_processes(2, twice)
    for theirs, between in several:
        assert between == (Ranks, 1) and (theirs - alone).abs().max() < 1e-12


def test_a_group_that_somebody_has_begun_stays():
    import torch.distributed as dist

    def fit():
        dist.init_process_group("gloo")
        t = trainer()
        t.fit(2, lr=0.05)
        there = dist.is_initialized()
        dist.barrier()
        gc.collect()
        dist.destroy_process_group()
        return outcome(t)[0], there

    alone = trainer()
    alone.fit(2, lr=0.05)
    for theirs, there in in_processes(2, fit):
        assert there and (theirs - outcome(alone)[0]).abs().max() < 1e-12


def test_after_a_fit_all_have_the_random_numbers_of_main():
    class Draws:
        def after_batch(self, trainer):
            self.last = torch.rand(1).item()

    def fit():
        draws = Draws()
        trainer(draws).fit(1, lr=0.05)
        return draws.last, torch.rand(2).tolist()

    (first, after), (second, others) = in_processes(2, fit)
    assert first != second and after == others


def test_processes_begin_with_the_weights_of_main():
    def fit():
        torch.manual_seed(rank())
        model = nn.Linear(4, 1).double()
        t = trainer(model=model)
        t.fit(1, lr=0.0)
        return t.model.weight.tolist()

    torch.manual_seed(0)
    mains = nn.Linear(4, 1).double().weight.tolist()
    assert in_processes(2, fit) == [mains, mains]


DIFFERENT = {
    "lr": lambda: trainer().fit(1, lr=0.1 + rank()),
    "epochs": lambda: trainer().fit(1 + rank(), lr=0.1),
    "model.0.weight": lambda: trainer(model=nn.Sequential(nn.Linear(4, 1 + rank()).double())).fit(1),
    "callbacks": lambda: trainer(*([Read()] if rank() else [])).fit(1),
    "dls.train": lambda: trainer(dls=loaders(53 + 8 * rank())).fit(1),
    "loss_func": lambda: trainer(loss_func=nn.L1Loss() if rank() else nn.MSELoss()).fit(1),
    "model": lambda: trainer(model=nn.Sequential(nn.Linear(4, 1), nn.ReLU() if rank() else nn.Tanh())).fit(1),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_is_set_up_differently_is_refused_by_name_in_all(name):
    def told():
        with pytest.raises(RanksDiffer) as error:
            DIFFERENT[name]()
        return str(error.value)

    first, second = in_processes(2, told)
    assert first == second and f"`{name}` is" in first and "in process 1" in first


def test_fewer_processes_than_expected_train_nothing():
    def told():
        with pytest.raises(WorldSizeMismatch, match="`expected=3`, but there are 2"):
            trainer(expected=3).fit(1)
        return "told"

    assert in_processes(2, told) == ["told"] * 2
    with pytest.raises(WorldSizeMismatch, match="there are 1"):
        trainer(expected=2).fit(1)


def test_plain_loaders_get_an_order_that_all_share():
    def read():
        dls = DataLoaders(DataLoader(Rows(20), 8, shuffle=True), DataLoader(Rows(5), 4))
        seen = Read()
        t = trainer(seen, dls=dls)
        t.fit(2, lr=1e-6)
        return seen.rows[True], t.dls is dls and type(dls.train) is DataLoader

    (first, as_it_was), (second, _) = in_processes(2, read)
    whole = [a + b for a, b in zip(first, second)]
    epochs = sum(whole[:3], []), sum(whole[3:], [])
    assert as_it_was and [sorted(epoch) for epoch in epochs] == [list(map(float, range(20)))] * 2
    assert epochs[0] != epochs[1]


def test_own_parts_of_the_data_are_left_alone():
    def fit():
        part = exact_loader(rows(24), 4, seed=3, rank=rank(), world_size=int(os.environ.get("WORLD_SIZE", 1)))
        t = trainer(dls=DataLoaders(part), share=False)
        t.fit(1, lr=0.05, valid=False)
        return outcome(t)[0]

    t = trainer(dls=DataLoaders(exact_loader(rows(24), 8, seed=3)))
    t.fit(1, lr=0.05, valid=False)
    for theirs in in_processes(2, fit):
        assert (theirs - outcome(t)[0]).abs().max() < 1e-12


def test_whole_batches_for_each_process_make_larger_updates():
    def fit():
        t = trainer(dls=DataLoaders(exact_loader(rows(32), 4, seed=3)), batch="each")
        t.fit(1, lr=0.05, valid=False)
        return outcome(t)[0], t.n_updates

    t = trainer(dls=DataLoaders(exact_loader(rows(32), 8, seed=3)))
    t.fit(1, lr=0.05, valid=False)
    for theirs, n_updates in in_processes(2, fit):
        assert n_updates == 4 and (theirs - outcome(t)[0]).abs().max() < 1e-12


def test_plain_data_travels_and_code_does_not():
    def ask():
        ranks = join(TIMEOUT)
        big = ranks.gather(torch.arange(1000 * (1 + ranks.rank)))
        text = ranks.from_main(lambda: {"name": "é" * 5000})
        with pytest.raises(Exception, match="no plain data"):
            ranks.gather(Ranks())
        ranks.leave()
        return [len(x) for x in big], len(text["name"])

    assert in_processes(2, ask) == [([1000, 2000], 5000)] * 2


def test_a_process_that_never_comes_is_named():
    def ask():
        if rank() == 1:
            return time.sleep(1.5)
        with pytest.raises(RankFailed, match="2 of 3 have come, and no process 1"):
            join(0.8)

    in_processes(3, ask)


def test_the_first_process_that_fails_is_told_though_another_fails_after_it():
    def fail():
        ranks = join(timeout=TIMEOUT)
        store, words = ranks._store, ["", "the first", "the second"]
        if rank() > 0:
            if rank() == 2:
                store.wait(["failed"])
            ranks.fail(ValueError(words[rank()]))
            store.set(f"failed/{rank()}", "")
            return
        store.wait(["failed/1", "failed/2"])
        with pytest.raises(RankFailed, match="Process 1 failed with ValueError: the first,"):
            ranks.gather(0)
        return True

    assert in_processes(3, fail) == [True, None, None]


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_an_error_without_a_text_is_told_by_its_class(text):
    told = dict(error=RuntimeError(text), seconds=1, rank=0, size=2)
    assert _why_lost(None, **told).endswith("PyTorch says: RuntimeError")
    assert in_words(RuntimeError(text)) == "RuntimeError"
    with pytest.raises(RankFailed, match="PyTorch says: RuntimeError$"):
        raise _not_found(timedelta(seconds=1), 2, RuntimeError(text))


def test_the_words_for_an_error_are_one_line():
    error = OSError("no\n\tdisk")
    error.add_note("raised by `SaveCB.after_epoch`\n    at epoch 2")
    assert in_words(error) == "OSError: no disk (raised by `SaveCB.after_epoch` at epoch 2)"


def test_an_error_of_main_reaches_all():
    def ask():
        ranks = join(TIMEOUT)

        def fail():
            raise OSError("disk full")

        try:
            ranks.from_main(fail)
        except Exception as error:
            return type(error), str(error)

    first, second = in_processes(2, ask)
    assert first == (OSError, "disk full")
    assert second[0] is RankFailed and "OSError: disk full" in second[1]


def test_a_rate_finder_between_fits_leaves_everything_as_it_was():
    def find():
        t = trainer()
        before = outcome(t)[0]
        t.lr_find()
        return torch.equal(before, outcome(t)[0]), t.dls.train.batch_sampler.world_size

    assert in_processes(2, find) == [(True, 1)] * 2


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux shows them")
def test_launch_copies_a_process_without_threads_of_its_own(monkeypatch):
    "A lock that a thread holds while its process is copied stays locked in the copy for ever"

    def n_threads():
        return len(os.listdir("/proc/self/task"))

    before, found, fork = n_threads(), [], os.fork
    monkeypatch.setattr(os, "fork", lambda: found.append(n_threads()) or fork())
    for _ in range(2):  # The second time there was a store before
        assert in_processes(3, rank) == [0, 1, 2]
    assert found == 6 * [before]


class NeedsTwo(Exception):
    "As it is written by many: it can be pickled, and not made again from that"

    def __init__(self, n, what):
        super().__init__(f"{n} of {what}")


def test_an_answer_that_cannot_be_made_again_is_told_with_its_process():
    "Only here, as it is read: a large answer is not unpickled where it was made"

    def odd():
        return NeedsTwo(1, "two")

    with pytest.raises(RuntimeError, match=r"`odd` returned in process 0 of 2 .*NeedsTwo.*is lost") as found:
        launch(odd, 2)
    assert not any("In its process" in note for note in getattr(found.value, "__notes__", ()))
    assert multiprocessing.active_children() == []


def test_launch_tells_what_went_wrong_and_leaves_no_process():
    def wait():
        if rank() == 1:
            time.sleep(60)

    with pytest.raises(TimeoutError, match="process 1 of 2"):
        launch(wait, 2, timeout=1)
    with pytest.raises(ValueError, match="n_processes"):
        launch(wait, 0)
    with pytest.raises(TypeError, match="nothing to run"):
        launch(wait(), 2)
    with pytest.raises(TypeError, match="Pass a function and its arguments apart"):
        launch(2, wait, 0.1)
    assert multiprocessing.active_children() == []


def test_a_trainer_that_was_made_before_the_processes():
    t = trainer()
    alone = trainer()
    alone.fit(2, lr=0.05)

    def fit():
        t.fit(2, lr=0.05)
        return outcome(t)[0]

    for theirs in in_processes(2, fit):
        assert (theirs - outcome(alone)[0]).abs().max() < 1e-12


def test_between_fits_each_process_is_on_its_own():
    def use():
        t = trainer()
        t.fit(1, lr=0.05)
        preds = t.get_preds() if rank() == 0 else None
        t.fit(1, lr=0.05)
        return None if preds is None else len(preds.preds)

    assert in_processes(2, use) == [21, None]


def test_an_error_in_an_evaluation_between_fits_is_its_own():
    class Bad:
        def before_predict(self, trainer):
            raise ValueError("bad")

    def use():
        t = trainer()
        t.fit(1, lr=0.05)
        with pytest.raises(ValueError, match="bad"):
            t.add_callbacks(Bad())
            t.one_epoch(False)
        return "told"

    assert in_processes(2, use) == ["told"] * 2


def test_rows_in_another_order_are_told():
    def told():
        data = rows(29)
        order = torch.arange(29) if rank() == 0 else torch.arange(29).flip(0)
        part = torch.utils.data.TensorDataset(*(x[order] for x in data.tensors))
        with pytest.raises(RanksDiffer, match="`dls.train` is not the same in process 1"):
            trainer(dls=DataLoaders(exact_loader(part, 8, seed=1))).fit(1, valid=False)
        return "told"

    assert in_processes(2, told) == ["told"] * 2


@pytest.mark.parametrize(
    "known,words",
    [
        (dict(RANK="1"), "has `RANK` but no `WORLD_SIZE`"),
        (dict(RANK="abc", WORLD_SIZE="2", MASTER_ADDR="x", MASTER_PORT="1"), "RANK=abc"),
        (dict(RANK="2", WORLD_SIZE="2", MASTER_ADDR="x", MASTER_PORT="1"), "RANK=2"),
    ],
)
def test_an_environment_that_names_no_process_is_refused(known, words, monkeypatch):
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        trainer()
