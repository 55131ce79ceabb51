"""All libraries on the same work, in turn with a loop written by hand: `make bench`, or

    python -m benchmarks.bench --quick --works tiny typical --libraries ours peers.ignite

Each library has a process of its own, in which the loop by hand and the library take turns, and the processes
take turns as well; a ratio is that of two runs one after the other. The processes are begun anew some times,
since how the memory of a process happens to lie makes a difference of some percent. Then come import, memory
and start in fresh processes, the costs around the loop (`around.py`), rows from memory (`data.py`), and
several processes (`several.py`).
"""

import argparse
import ast
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from . import report

ROOT = Path(__file__).parents[1]
PEERS = sorted(f"peers.{path.stem}" for path in (Path(__file__).parent / "peers").glob("[!_]*.py"))
LIBRARIES = ["by_hand", "ours", "flat_prototype", *PEERS]
WORKS = ["tiny", "typical", "cnn", "tutorial", "guarded"]
QUICK = dict(tiny=50, typical=50, cnn=10, tutorial=2, guarded=50)
N_HOOKS, BY_HAND, OURS = 10, "by hand", ("isaac_loop", "flat prototype")
BESIDE = (BY_HAND, *OURS, "isaac_loop compiled")  # The loops between which some percent matter
OFTEN = dict(tiny=2, typical=2, guarded=2, cnn=5)  # Pairs a round for these; otherwise one
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
ENV.pop("PYTHONDONTWRITEBYTECODE", None)  # Installed packages have been compiled once; so is this one


class Worker:
    "A process with one library, which runs what it is asked for"

    def __init__(self, module):
        self.module = module
        command = [sys.executable, "-m", "benchmarks.worker"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(command, cwd=ROOT, env=ENV, text=True, bufsize=1, **pipes)
        told = self.ask(module=module)
        self.error, self.variants = told.get("error"), told.get("variants", {})
        self.package = told.get("package")

    def ask(self, **request):
        "The answer to a request; an error is among what it may hold"
        try:
            print(json.dumps(request), file=self.process.stdin)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else dict(error="its process has ended")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def workers(modules):
    "One process for each library, for the length of a `with` block"
    found = [Worker(module) for module in modules]
    try:
        yield found
    finally:
        for worker in found:
            worker.close()


class Found:
    "What was measured, and why something was left out"

    def __init__(self):
        self.pairs = {}  # By variant and work: answers to requests for a pair
        self.hooks, self.starts, self.over_flat = {}, {}, {}  # By variant
        self.fresh, self.imports = {}, {}
        self.left_out, self.packages = {}, {}

    def add(self, kind, key, answer, variant):
        "Note an answer"
        if "error" in answer:
            self.left_out[variant] = answer["error"]
        else:
            kind.setdefault(key, []).append(answer)


def turn(variant, n_round, base=BY_HAND):
    "Who runs first changes with the round"
    both = [dict(variant=base), dict(variant=variant)]
    return both if n_round % 2 else both[::-1]


def in_order(answer, n_round):
    "An answer with the loop by hand first"
    if "runs" in answer and not n_round % 2:
        answer["runs"].reverse()
    return answer


def measure_pairs(found, running, work, rounds, n):
    "Each library against the loop by hand, pair by pair"
    todo = [(worker, name) for worker in running for name, works in worker.variants.items() if work in works]
    todo = [
        (*one, turn_no) for one in todo for turn_no in range(OFTEN.get(work, 1) if one[1] in BESIDE else 1)
    ]
    for n_round in range(-1, rounds):  # The first pairs warm up
        for worker, name, turn_no in random.sample(todo, len(todo)):
            n_pair = n_round + turn_no
            answer = in_order(worker.ask(do="pair", work=work, n=n, turn=turn(name, n_pair)), n_pair)
            if n_round >= 0 or "error" in answer:
                found.add(found.pairs, (name, work), answer, f"{name}, {work}")
        say(f"{work}: round {n_round + 1} of {rounds}")


def measure_parts(found, running, rounds, n):
    "What a hook that does nothing costs, and the start of a fit"
    for worker in running:
        name = next(iter(worker.variants), None)
        if name in (None, BY_HAND):  # None: it did not import
            continue
        ours = name in OURS
        for n_round in range(rounds * (2 if ours else 1)):
            both = [dict(variant=name), dict(variant=name, hooks=N_HOOKS)]
            both = both if n_round % 2 else both[::-1]
            answer = in_order(worker.ask(do="pair", work="tiny", n=n, turn=both), n_round)
            found.add(found.hooks, name, answer, f"{name}, hooks")
            answer = in_order(worker.ask(do="pair", work="tiny", n=1, turn=turn(name, n_round)), n_round)
            found.add(found.starts, name, answer, f"{name}, start")
            if name == OURS[0]:
                both = turn(name, n_round, OURS[1])
                answer = in_order(worker.ask(do="pair", work="tiny", n=n, turn=both), n_round)
                found.add(found.over_flat, name, answer, f"{name}, against the prototype")
        say(f"{name}: hooks and start")


def measure_fresh(found, modules, rounds, n):
    "Memory and the first fit, in processes that do nothing else"
    for module in modules:
        for _ in range(rounds):
            with workers([module]) as (worker,):
                for name in [next(iter(worker.variants))] if worker.variants else []:
                    answer = worker.ask(do="alone", work="tiny", n=n, variant=name)
                    found.add(found.fresh, name, answer, f"{name}, alone")
        say(f"{module}: fresh processes")


TRAINER, BASIS = "isaac_loop.loop.trainer", "torch and fastcore"
COMPARED = (BY_HAND, OURS[0], TRAINER, BASIS)  # In the line below the table


def measure_imports(found, statements, rounds):
    "Seconds of imports in fresh interpreters, in turn"
    code = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
    compared = {name: o for name, o in statements.items() if name in COMPARED}
    for n_round in range(-1, 3 * rounds):  # The first writes bytecode, where there is none yet
        for name, statement in (statements if n_round < rounds else compared).items():
            command = [sys.executable, "-W", "ignore", "-c", code.format(statement)]
            done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True)
            if done.returncode:
                found.left_out[f"{name}, import"] = done.stderr.strip().splitlines()[-1]
            elif n_round >= 0:
                found.imports.setdefault(name, []).append(float(done.stdout.split()[-1]))
    say("imports")


def facts_of(module):
    "Name, statement that imports it, and package of a library, read from its file"
    tree = ast.parse((Path(__file__).parent / f"{module.replace('.', '/')}.py").read_text())
    values = [o.value for o in tree.body if isinstance(o, ast.Assign) and isinstance(o.value, ast.Tuple)]
    return next(ast.literal_eval(value) for value in values if len(value.elts) == 3)


def statements(modules):
    "What to import for each library"
    found = {name: statement for name, statement, _ in map(facts_of, modules) if statement}
    return found | {TRAINER: f"import {TRAINER}", BASIS: "import torch, fastcore.foundation"}


def measure(args):
    "Everything about the loops"
    found = Found()
    for n_start in range(args.starts):
        with workers(args.libraries) as running:
            for worker in running:
                if worker.error:
                    found.left_out[worker.module] = worker.error
                found.packages |= {name: worker.package for name in list(worker.variants)[:1]}
            for work in args.works:
                measure_pairs(
                    found, running, work, -(-args.rounds // args.starts), QUICK[work] if args.quick else None
                )
            if n_start == 0:
                measure_parts(found, running, -(-args.rounds // 2), 100 if args.quick else None)
    measure_fresh(found, args.libraries, 1 if args.quick else 3, 50)
    measure_imports(found, statements(args.libraries), 2 if args.quick else 5)
    return found


PARTS = ["around", "data", "several"]


def section(module, quick):
    "What another part of the benchmark prints"
    command = [sys.executable, "-m", f"benchmarks.{module}", *(["--quick"] if quick else [])]
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=errors, text=True)
        errors.seek(0)
        reason = errors.read().strip().splitlines()[-1:] if done.returncode else []
    say(module)
    return done.stdout if not done.returncode else f"{done.stdout}\nNot measured: {' '.join(reason)}\n"


def say(text):
    print(text, file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small work, to see that everything runs")
    parser.add_argument("--rounds", type=int, default=None, help="pairs for each library and work")
    parser.add_argument("--starts", type=int, default=None, help="how often the processes are begun anew")
    parser.add_argument("--works", nargs="+", default=WORKS, choices=WORKS)
    parser.add_argument("--libraries", nargs="+", default=LIBRARIES, choices=LIBRARIES)
    parser.add_argument(
        "--parts", nargs="*", default=["around", "data", "several"], help="what else to measure"
    )
    parser.add_argument(
        "--out", default=str(Path(__file__).parent), help="folder for results.md and results.svg"
    )
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 18)
    args.starts = args.starts or (1 if args.quick else 3)
    found = measure(args)
    sections = [section(part, args.quick) for part in args.parts]
    Path(args.out).mkdir(parents=True, exist_ok=True)
    path = report.write(found, args, sections, Path(args.out))
    say(f"See {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
