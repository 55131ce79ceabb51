"What was measured as one page: a table and a picture, with versions and machine"

import importlib.metadata
import operator
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

from .workloads import make

HERE = Path(__file__).parent
QUICK = "**A trial with small work and few rounds, on a busy machine: these figures mean nothing yet.**\n"
ABOUT = """\
Each cell of the first five columns: the ratio to the loop by hand, the median of {rounds} pairs (for
`isaac_loop` and what is beside it twice as many, of *cnn*, whose runs are short, five times as many), and
in brackets the middle half of the ratios; then microseconds per batch over the loop by hand (the median
of the differences). The row *by hand* is that loop against itself, and so the noise. *Hook*: microseconds
for one call of a hook that does nothing. *Start*: milliseconds of a fit of two batches over those by
hand. *First fit*: milliseconds of making and fitting the first time in a process over the second time.
*Import*: seconds in a fresh interpreter, the least, torch included. *Memory*: the most that a process
with this library alone has had, in MB over the loop by hand. *Weights*: the largest difference to those
of the loop by hand in the end, over all kinds of work; 0 is bit for bit. Compiled, operations round
differently: up to {tolerance:g} is allowed there.
"""
TOLERANCE = {"isaac_loop compiled": 1e-4}  # How far weights may be from those of the loop by hand


def seconds(answers, which, kind="seconds"):
    return [answer["runs"][which][kind] for answer in answers]


def middle(values):
    "Median and the middle half"
    if len(values) < 2:
        return values * 3
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def over(answers, n_batches, kind="seconds"):
    "Microseconds per batch of the second over the first, the median over all pairs"
    both = zip(seconds(answers, 0, kind), seconds(answers, 1, kind))
    return statistics.median((theirs - mine) / n_batches * 1e6 for mine, theirs in both)


def least_over(answers):
    "Seconds of the second over the first, the least of each, for differences that drown in noise"
    return min(seconds(answers, 1)) - min(seconds(answers, 0))


def ratios(answers, kind="seconds"):
    return [b / a for a, b in zip(seconds(answers, 0, kind), seconds(answers, 1, kind))]


def cell(answers, work, n, kind="seconds"):
    "Ratio, its middle half, and microseconds per batch"
    low, median, high = middle(ratios(answers, kind))
    return f"{median:.2f} ({low:.2f}–{high:.2f}) {over(answers, make(work, n).n_batches, kind):+.0f} µs"


def differ(found, name):
    "The largest difference of weights"
    values = [answer["differ"] for (variant, _), o in found.pairs.items() if variant == name for answer in o]
    if not values:
        return ""
    much = max(values) > TOLERANCE.get(name, float("inf"))
    return f"{max(values):.1g}" + " **too much**" * much


def rows(found, works, size, kind="seconds"):
    "One row for each variant"
    names = list(dict.fromkeys(name for name, _ in found.pairs))
    for name in sorted(names, key=lambda name: speed(found, name)):
        row = {"": name}
        for work in works:
            answers = found.pairs.get((name, work))
            row[work] = cell(answers, work, size(work), kind) if answers else ""
        yield row | (others(found, name, size) if kind == "seconds" else {})


def speed(found, name):
    "The fastest on the first work that it does comes first; the loop by hand before all"
    answers = next(o for (variant, _), o in found.pairs.items() if variant == name)
    return name != "by hand", statistics.median(ratios(answers))


def others(found, name, size):
    "What else is known about a variant"
    from .bench import N_HOOKS

    row = dict.fromkeys(["hook", "start", "first fit", "import", "memory"], "")
    if name in found.hooks:
        n_calls = make("tiny", size("hooks")).n_batches * 2 * N_HOOKS
        row["hook"] = f"{least_over(found.hooks[name]) / n_calls * 1e6:.2f} µs"
    if name in found.starts:
        row["start"] = f"{over(found.starts[name], 1) / 1000:.1f} ms"
    if name in found.fresh:
        first = min(answer["first"] - answer["second"] for answer in found.fresh[name])
        base = min((answer["peak"] for answer in found.fresh.get("by hand", [])), default=0)
        row["first fit"] = f"{first * 1000:.0f} ms"
        row["memory"] = f"{min(answer['peak'] for answer in found.fresh[name]) - base:+.0f} MB"
    if name in found.imports:
        row["import"] = f"{min(found.imports[name]):.2f} s"
    return row | {"weights": differ(found, name)}


def markdown(table):
    "Rows as a table"
    table = list(table)
    if not table:
        return ""
    names = list(table[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def against_flat(found, size):
    "Our loop and the prototype in turn in one process"
    answers = found.over_flat.get("isaac_loop")
    if not answers:
        return ""
    low, median, high = middle(ratios(answers))
    each = over(answers, make("tiny", size("hooks")).n_batches)
    return (
        f"Beside the flat prototype in one process, *tiny* in `isaac_loop` takes {median:.3f} times as long "
        f"({low:.3f}–{high:.3f}), {each:+.1f} µs a batch."
    )


def further_lines(found, size):
    "Against the prototype, and our imports against those of what they need"
    took, lines = found.imports, [against_flat(found, size)]
    if {"isaac_loop", "by hand"} <= took.keys():
        ratios = [ours / bare for ours, bare in zip(took["isaac_loop"], took["by hand"])]
        low, ratio, high = middle(ratios)
        lines.append(
            f"`from isaac_loop.all import *` takes {ratio:.2f} times as long as `import torch` "
            f"({low:.2f}–{high:.2f}, {len(ratios)} pairs)."
        )
    if {"isaac_loop.loop.trainer", "torch and fastcore"} <= took.keys():
        more = map(operator.sub, took["isaac_loop.loop.trainer"], took["torch and fastcore"])
        more = statistics.median(more) * 1000
        lines.append(f"`import isaac_loop.loop.trainer` takes {more:.0f} ms more than torch and fastcore.")
    return " ".join(filter(None, lines))


def machine():
    "Processor, cores, system"
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    name = next(
        (o.partition(":")[2].strip() for o in lines if o.startswith("model name")), platform.processor()
    )
    system = f"{platform.system()}, Python {platform.python_version()}"
    return f"{name}, {os.cpu_count()} cores, one thread for each process; {system}"


def versions(found):
    "Of the libraries that took part"
    told = []
    for package in ["torch", *found.packages.values()]:
        if package and package != "isaac_loop" and package not in [o.split()[0] for o in told]:
            told.append(f"{package} {importlib.metadata.version(package)}")
    commit = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return ", ".join([f"isaac_loop at {commit.stdout.strip() or 'an unknown commit'}", *told])


def draw(found, works, size, path):
    "Microseconds per batch over the loop by hand, a row for each variant"
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "benchmarks"
    names = [row[""] for row in rows(found, works[:1], size) if row[""] != "by hand"][::-1]
    ax = (fig := Figure(figsize=(7, 0.28 * len(names) + 1), layout="constrained")).subplots()
    for work, marker in zip(works, "osD^v"):
        known = [name for name in names if (name, work) in found.pairs]
        values = [over(found.pairs[name, work], make(work, size(work)).n_batches) for name in known]
        shown = [max(value, 1) for value in values]  # Below that it is noise
        ax.plot(shown, known, marker, label=work, markersize=5)
    ax.set(xscale="log", xlabel="microseconds per batch over the loop by hand (1 or less at the left)")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    fig.savefig(path, metadata=dict(Date=None))


def write(found, args, sections, folder):
    "Write `results.md` and its picture"
    from .bench import QUICK as SMALL

    def size(work):
        return SMALL.get(work, 100) if args.quick else None

    left_out = [f"- {name}: {reason}" for name, reason in found.left_out.items()] or ["Nothing."]
    page = [
        "# What the loop costs, beside a loop by hand and other libraries\n",
        *([QUICK] if args.quick else []),
        f"{machine()}. {time.strftime('%Y-%m-%d')}.\n\n{versions(found)}.\n",
        "Made by `make bench`; what is measured, and how, is in [README.md](README.md).\n",
        "## Loops\n",
        ABOUT.format(rounds=args.rounds, tolerance=max(TOLERANCE.values())),
        markdown(rows(found, args.works, size)),
        further_lines(found, size) + "\n",
        "![Microseconds per batch over the loop by hand](results.svg)\n",
        "The same by processor time:\n",
        markdown(rows(found, args.works, size, "cpu")),
        "## Left out\n",
        "\n".join(left_out) + "\n",
        *sections,
    ]
    draw(found, args.works, size, folder / "results.svg")
    (folder / "results.md").write_text("\n".join(page))
    return folder / "results.md"
