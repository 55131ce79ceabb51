"""Execute every notebook, each in a process of its own, and compare what it prints with what is saved in it.

This is what `nbdev-test` does, but for two things: that lets several notebooks share a process, where what
one of them patches onto a class of the library is still there for the next, and it looks at no output.

Of outputs the words are compared, and whole numbers. Fractions may differ in their last digits from machine
to machine; times, addresses and temporary folders differ always. What a cell merely displays, such as bars
and figures, is left out, and so are lines that its other processes print, since they come to Jupyter only.

A notebook that printed something else is executed once more at the end, by itself, and fails if it does so
again: words that depend on how busy the machine is do not belong in a notebook, but they are no fault of the
library.

    python tools/test_notebooks.py                all notebooks, two at a time
    python tools/test_notebooks.py 71_ 72_        those with one of these texts in their path
"""

import argparse
import difflib
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import time
from contextlib import chdir
from pathlib import Path

import matplotlib.pyplot  # noqa: F401  What most notebooks need is imported once, before the processes are forked
import torch._dynamo  # noqa: F401  The first optimizer of a process loads it, and that takes a second
from execnb.shell import CaptureShell
from fastcore.nbio import read_nb

ROOT = Path(__file__).parents[1]
OTHERWISE = 2  # Exit code of a notebook that went well, but printed something else
VARY = {  # Cells whose words depend on the last digits of numbers
    "8b3161fc",  # tutorials/text_comparison: words that three models write
    "82cd2c5f",  # tutorials/vision: the order and predictions of the largest losses
}
PATTERNS = [  # What differs from run to run, and what stands for it
    (r"[^\n]*\r(?!\n)", ""),  # A line that is written anew
    (r" at 0x[0-9a-f]+", ""),
    (r"/tmp/tmp\w+", "..."),
    (r"\d{4}-\d\d-\d\d[ _T]\d\d[-:]\d\d[-:]\d\d", "<date>"),
    (r"\b\d\d:\d\d\b", "<time>"),
    (r"(?<![\w.])-?(\d+\.\d*(e[-+]?\d+)?|\d+e[-+]?\d+)", "<number>"),
    (r"--+", "--"),  # Rules of tables are as long as their numbers
]
ELSEWHERE = re.compile(r"USDT:|(each of )?\d+ processes\b|beginning anew|continuing from|Batch norm \(`")


def words(outputs):
    "Lines that a cell prints and gives, without what differs from run to run"
    texts = [
        "".join(o["text"] if o["output_type"] == "stream" else o["data"].get("text/plain", ""))
        for o in outputs
        if o["output_type"] == "execute_result" or o["output_type"] == "stream" and o["name"] == "stdout"
    ]
    text = "\n".join(texts)
    for pattern, instead in PATTERNS:
        text = re.sub(pattern, instead, text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line and not ELSEWHERE.match(line)]


def differences(cells, saved):
    "What is printed otherwise than saved, as text"
    for i, (cell, before) in enumerate(zip(cells, saved, strict=True)):
        now = words(cell.get("outputs", ()))
        if now != before and cell.id not in VARY:
            lines = list(difflib.unified_diff(before, now, "saved", "now", lineterm="", n=0))
            yield "\n".join([f"Cell {i} prints otherwise than is saved:", *lines[2:12]])


def run(path):
    "In a process of its own: execute the notebook, and end with 0 if all went well and as saved, else 1 or 2"
    torch.set_num_threads(1)
    os.environ["IN_TEST"] = "1"  # So that its last cell exports nothing
    sys.path.insert(0, str(ROOT))
    nb, shell = read_nb(path), CaptureShell(path)
    saved = [words(cell.get("outputs", ())) for cell in nb.cells]
    with chdir(path.parent):
        try:
            shell.run_all(nb, exc_stop=True)
        except BaseException:
            print(shell.prettytb(fname=path), file=sys.stderr)
            raise SystemExit(1) from None
    found = list(differences(nb.cells, saved))
    if found:
        mend = (
            f"Is that right? Then save it: `python tools/save_outputs.py {path.relative_to(ROOT / 'nbs')}`."
        )
        print("", path.relative_to(ROOT), *found, mend, sep="\n", file=sys.stderr)
    sys.stderr.flush()
    raise SystemExit(OTHERWISE if found else 0)


def run_all(paths, n_workers):
    "Paths with their exit codes and seconds, as they come to an end"
    context, waiting, running = multiprocessing.get_context("fork"), list(paths), {}
    while waiting or running:
        while waiting and len(running) < n_workers:
            path = waiting.pop(0)
            process = context.Process(target=run, args=(path,))
            process.start()
            running[process.sentinel] = path, process, time.perf_counter()
        for sentinel in multiprocessing.connection.wait(list(running)):
            path, process, start = running.pop(sentinel)
            process.join()
            yield path, process.exitcode, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="texts in the path; default: all notebooks")
    parser.add_argument("--n-workers", type=int, default=2)
    args = parser.parse_args()
    paths = [
        o
        for o in sorted((ROOT / "nbs").rglob("*.ipynb"), reverse=True)  # Tutorials, which take longest, first
        if not any(p.startswith((".", "_")) for p in o.relative_to(ROOT).parts)
    ]
    paths = [o for o in paths if not args.words or any(w in str(o.relative_to(ROOT)) for w in args.words)]
    start, failed, again = time.perf_counter(), [], []
    for path, code, seconds in run_all(paths, args.n_workers):
        if seconds > 30:
            print(f"{path.relative_to(ROOT)}: {seconds:.0f} s")
        if code:
            (again if code == OTHERWISE else failed).append(path)
    for path, code, _ in run_all(again, 1):
        if code:
            failed.append(path)
        else:
            print(f"{path.relative_to(ROOT)} printed something else, but not when it was executed again")
    print(f"{len(paths)} notebooks, {len(failed)} failed, in {time.perf_counter() - start:.0f} s")
    return "\n".join(str(path.relative_to(ROOT)) for path in failed) or None


if __name__ == "__main__":
    raise SystemExit(main())
