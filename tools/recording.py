"""What recording costs in a long run: time for a batch at its beginning and its end, bytes for a number,
seconds for a save.

python tools/recording.py            a million batches in one epoch
python tools/recording.py 200000     as many
"""

import resource
import sys
import tempfile
import time
from types import SimpleNamespace

import torch
from torch import nn, optim

from isaac_loop.train.clipping import ClipGradCB
from isaac_loop.inspection.gradients import GradientStatsCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.metrics.recorder import RecorderCB
from isaac_loop.train.training import BasicTrainCB
from isaac_loop.state.run_state import take_state
from isaac_loop.state.store import CheckpointStore
from isaac_loop.loop.trainer import Trainer


def memory():
    "Bytes that this process holds now"
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


class WatchCB:
    "Notes time and memory ten times in a run"

    order = 10_000

    def __init__(self, n):
        self.n, self.seen = n, []

    def after_batch(self, trainer):
        if (trainer.batch_num + 1) % (self.n // 10) == 0:
            self.seen.append((time.process_time(), memory()))


def save_seconds(trainer):
    "Processor time for a checkpoint in mid-epoch"
    with tempfile.TemporaryDirectory() as folder:
        store, start = CheckpointStore(folder), time.process_time()
        store.save(*take_state(trainer, 0, trainer.batch_num + 1, copy=False), step=1)
        seconds = time.process_time() - start
        store.close()
    return seconds


class SaveCB:
    "Saves after the first batch and after the last"

    order = 20_000

    def __init__(self, n):
        self.n, self.seconds = n, []

    def after_batch(self, trainer):
        if trainer.batch_num in (9, self.n - 1):
            self.seconds.append(save_seconds(trainer))


def measure(name, callbacks, n_numbers, n):
    "Train `n` batches in one epoch and print what it cost"
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    watch, save = WatchCB(n), SaveCB(n)
    dls = SimpleNamespace(train=((x, y) for _ in range(n)), valid=None, n_inp=1)
    trainer = Trainer(
        dls, nn.functional.mse_loss, optim.SGD, nn.Linear(2, 1), [BasicTrainCB(), *callbacks, watch, save]
    )
    trainer.fit(1, lr=1e-6, valid=False)
    (t0, _), (t1, m1), *_, (t8, _), (t9, m9) = watch.seen
    first, last = ((t1 - t0) / n * 1e7, (t9 - t8) / n * 1e7)
    size, saving = (m9 - m1) / (0.8 * n * n_numbers), (save.seconds[1] - save.seconds[0]) / n * 1e6
    print(
        f"{name:<18} {first:6.1f} and {last:6.1f} us a batch; {size:5.1f} bytes a number; "
        f"a save {saving:6.3f} us for each batch"
    )


def main():
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    for name, make, n_numbers in (
        ("nothing", lambda: [], 1),
        ("MetricsCB", lambda: [MetricsCB(show=False)], 2),
        ("RecorderCB", lambda: [RecorderCB()], 1),
        ("ClipGradCB", lambda: [ClipGradCB(1.0)], 2),
        ("GradientStatsCB", lambda: [GradientStatsCB()], 9),
    ):
        measure(name, make(), n_numbers, n)


if __name__ == "__main__":
    main()
