"""Execute every notebook, each in a process of its own.

This is what `nbdev-test` does, but for one thing: that lets several notebooks share a process, where what
one of them patches onto a class of the library is still there for the next.

    python tools/test_notebooks.py                all notebooks, two at a time
    python tools/test_notebooks.py 71_ 72_        those with one of these texts in their path
"""

import argparse
import multiprocessing
import multiprocessing.connection
import time
from pathlib import Path

import matplotlib.pyplot  # noqa: F401  What most notebooks need is imported once, before the processes are forked
import torch._dynamo  # noqa: F401  The first optimizer of a process loads it, and that takes a second
from nbdev.test import test_nb

ROOT = Path(__file__).parents[1]


def run(path):
    "In a process of its own: execute the notebook, and end with 0 if all went well"
    torch.set_num_threads(1)
    raise SystemExit(not test_nb(path, basepath=ROOT)[0])


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
    start, failed = time.perf_counter(), []
    for path, code, seconds in run_all(paths, args.n_workers):
        if seconds > 30:
            print(f"{path.relative_to(ROOT)}: {seconds:.0f} s")
        if code:
            failed.append(str(path.relative_to(ROOT)))
    print(f"{len(paths)} notebooks, {len(failed)} failed, in {time.perf_counter() - start:.0f} s")
    return "\n".join(failed) or None


if __name__ == "__main__":
    raise SystemExit(main())
