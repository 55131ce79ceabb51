"""On a GPU: what a batch costs over the same loop by hand, as it is, compiled, and captured as CUDA graphs

    python -m benchmarks.on_gpu --works tiny cnn resnet --ways plain compiled graphs

Both take turns in one process, on batches that lie on the GPU already. Time is that between two events on the
device, around all batches of a run. Beside it stands how long the host was busy before it waited for it;
where that is as long, the device has waited for the host.
"""

import argparse
import copy
import statistics
import time
import warnings

import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop import DataLoaders, Trainer
from isaac_loop.callbacks import BasicTrainCB, ClipGradCB, CompileCB, DeviceCB, EMACB, MetricsCB
from isaac_loop.callbacks import OneCycleSchedulerCB, RecorderCB

from .workloads import convolutions, mlp

LR = 0.01
WAYS = {"plain": None, "compiled": {}, "graphs": dict(mode="reduce-overhead")}  # For `torch.compile`


class Block(nn.Module):
    "Two convolutions beside a shortcut"

    def __init__(self, before, after, stride):
        super().__init__()
        self.first, self.second = conv(before, after, 3, stride), conv(after, after, 3, 1)
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else conv(before, after, 1, stride)

    def forward(self, x):
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def conv(before, after, size, stride):
    layer = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after))


def resnet():
    "Of the size of ResNet-18 (He et al. 2015): four stages of two blocks, 11 million weights"
    layers, before = [conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(before, width, stride), Block(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def batches(n, *shape):
    "As many of 64 rows"
    return [
        (torch.randn(64, *shape, device="cuda"), torch.randint(0, 10, (64,), device="cuda")) for _ in range(n)
    ]


WORKS = {  # Model, shape of a row, batches of a run
    "tiny": (mlp, (64,), 200),
    "cnn": (convolutions, (1, 28, 28), 100),
    "resnet": (resnet, (3, 224, 224), 40),
}


def by_hand(data, model, options):
    "Forward, backward, step; compiled if `options` says how"
    opt, forward, loss_func = optim.SGD(model.parameters(), LR), model, F.cross_entropy
    if options is not None:
        forward, loss_func = (torch.compile(o, **options) for o in (model, loss_func))

    def run():
        model.train()
        for x, y in data:
            preds = loss = None
            preds = forward(x)
            loss = loss_func(preds, y)
            loss.backward()
            opt.step()
            opt.zero_grad()

    return run


def ours(*callbacks):
    "The same by a trainer with `callbacks` as well"

    def make(data, model, options):
        more = [] if options is None else [CompileCB(**options)]
        cbs = [BasicTrainCB(), *more, *(make() for make in callbacks)]
        trainer = Trainer(DataLoaders(data), F.cross_entropy, optim.SGD, model, cbs)
        return lambda: trainer.fit(1, lr=LR, valid=False)

    return make


def accuracy(preds, targets):
    return preds.argmax(1) == targets


METRICS = [lambda: DeviceCB("cuda"), lambda: MetricsCB(accuracy=accuracy, train_metrics=True, show=False)]
CAREFUL = [lambda: ClipGradCB(1.0), OneCycleSchedulerCB, lambda: EMACB(0.99), RecorderCB]
OURS = {
    "isaac_loop": ours(),
    "with device and metrics": ours(*METRICS),
    "and clipping, one-cycle, EMA": ours(*METRICS, *CAREFUL),
}


def timed(run):
    "Seconds of a run between two events on the device, and on the host before it waits"
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begun = time.perf_counter()
    start.record()
    run()
    end.record()
    host = time.perf_counter() - begun  # Before anybody waits
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000, host


def compare(work, way, name, rounds):
    "Pairs of runs in turn; a row of the table"
    make, shape, n = WORKS[work]
    torch.manual_seed(0)
    data, net = batches(n, *shape), make().cuda()
    nets = [copy.deepcopy(net) for _ in range(2)]
    runs = [f(data, model, WAYS[way]) for f, model in zip((by_hand, OURS[name]), nets)]
    for run in runs:
        run(), run()  # Compiled, captured and warm
    pairs = []
    for i in range(rounds):
        order = (0, 1) if i % 2 else (1, 0)
        found = {j: timed(runs[j]) for j in order}
        pairs.append((found[0], found[1]))
    differ = max(
        (a.double() - b.double()).abs().max().item() for a, b in zip(*(o.state_dict().values() for o in nets))
    )
    hand, over = (statistics.median(o) for o in zip(*[(a[0], b[0] - a[0]) for a, b in pairs]))
    ratios = sorted(b[0] / a[0] for a, b in pairs)
    return dict(
        work=work,
        way=way,
        library=name,
        by_hand_us=hand / n * 1e6,
        over_us=over / n * 1e6,
        ratio=statistics.median(ratios),
        middle=(ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]),
        host_us=(
            statistics.median(a[1] for a, _ in pairs) / n * 1e6,
            statistics.median(b[1] for _, b in pairs) / n * 1e6,
        ),
        differ=differ,
    )


HEADER = (
    "| work | | isaac_loop | by hand | over it | ratio | host, by hand | host | weights |\n|" + "---|" * 9
)
ROW = (
    "| {work} | {way} | {library} | {by_hand_us:.0f} us | {over_us:+.1f} us | {ratio:.3f} "
    "[{middle[0]:.3f}, {middle[1]:.3f}] | {host_us[0]:.0f} us | {host_us[1]:.0f} us | {differ:.0e} |"
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=WORKS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--libraries", nargs="+", default=list(OURS), choices=OURS)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here")
    warnings.simplefilter("ignore")
    torch.backends.cudnn.deterministic = True
    torch.set_num_threads(1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}\n\n{HEADER}")
    for work in args.works:
        for way in args.ways:
            for name in args.libraries:
                print(ROW.format(**compare(work, way, name, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
