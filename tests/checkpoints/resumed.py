"Runs that are broken off, for tests that go on with them."

import random
import signal

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from runs import Cut, CutCB, Rows, callbacks, fit, make_trainer


def plain_loaders(num_workers=0):
    train = DataLoader(Rows(40), 8, shuffle=True, num_workers=num_workers)
    return DataLoaders(train, DataLoader(Rows(24), 12))


class Stream(IterableDataset):
    "The rows through a shuffle buffer, each worker every n-th"

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        info, buffer = get_worker_info(), []
        for i in range(info.id if info else 0, len(self.rows), info.num_workers if info else 1):
            buffer.append(self.rows[i])
            if len(buffer) > 5:
                yield buffer.pop(random.randrange(6))
        yield from buffer


def press(trainer, signum=signal.SIGINT):
    "As if a signal came now"
    trainer.InterruptCB._note(signum)


def pressing(event, when, signum=signal.SIGINT):
    def handler(trainer):
        if when(trainer):
            press(trainer, signum)

    handler.__name__, handler.order = event, 60
    return handler


MOMENTS = {
    "in the first batch": pressing("after_predict", lambda t: (t.epoch, t.batch_num) == (0, 0)),
    "in the last batch of an epoch": pressing(
        "before_step", lambda t: (t.epoch, t.batch_num) == (1, t.n_batches - 1)
    ),
    "at the end of a training pass": pressing("after_epoch", lambda t: t.training and t.epoch == 1),
    "in validation": pressing("after_predict", lambda t: not t.training and t.epoch == 1),
    "in the last batch of validation": pressing(
        "after_predict", lambda t: not t.training and t.batch_num == 1
    ),
    "when a row is complete": pressing("log", lambda t: t.epoch == 1),
    "in the last validation of all": pressing("after_predict", lambda t: not t.training and t.epoch == 2),
    "in the last log": pressing("log", lambda t: t.epoch == 2),
    "after everything": pressing("after_fit", lambda t: True),
    "before anything": pressing("before_fit", lambda t: True),
}


def cut_at(n):
    return CutCB("after_backward", lambda t: t.n_updates == n)


def broken_off(folder, n=10, cbs=None, **options):
    "A run that lost its power after `n` updates"
    trainer = make_trainer(cbs() + [CheckpointCB(folder, **options)] if cbs else callbacks(folder, **options))
    with pytest.raises(Cut):
        fit(trainer, callbacks=cut_at(n))
    return trainer


class SeenCB:
    "Which rows were seen in which epoch"

    def __init__(self):
        self.rows = {}

    def after_batch(self, trainer):
        if trainer.training:
            self.rows.setdefault(trainer.epoch, []).extend(trainer.batch[0][:, 0].tolist())

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]
