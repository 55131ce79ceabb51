"""A process in which one library and the loop by hand run in turn, once each time that they are asked.

    python -m benchmarks.worker

reads requests from its standard input, one JSON object in a line, first the module with the variants, and
answers each with one line. What a library prints goes to a file.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import sys
import tempfile
import time
import warnings


def loaded(module):
    "A module of variants, imported; and the seconds for that, with torch there already"
    import torch

    torch.set_num_threads(1)
    start = time.perf_counter()
    found = importlib.import_module(f"benchmarks.{module}")
    return found, time.perf_counter() - start


def builder(module, variant, work):
    "What makes a function to run"
    shared = {"by hand": "by_hand", "flat prototype": "flat_prototype"}
    if variant in shared:  # In every process
        return importlib.import_module(f"benchmarks.{shared[variant]}").VARIANTS[variant][work]
    return module.VARIANTS[variant][work]


def run_once(module, variant, work, hooks=0):
    "Run a variant; seconds, seconds of the processor, the weights, what was measured"
    model = work.model()
    make = builder(module, variant, work.name)
    run = make(work, model, hooks) if hooks else make(work, model)
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    row = run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    weights = [o.detach().clone() for o in model.state_dict().values()]
    return dict(seconds=seconds, cpu=cpu), weights, row


def difference(mine, theirs):
    "The largest difference between two lists of tensors; 0 if they are equal bit for bit"
    import torch

    if all(torch.equal(a, b) for a, b in zip(mine, theirs)):
        return 0.0
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(mine, theirs))


def pair(module, request):
    "Two runs of the same work, one after the other, and how far their weights differ"
    from .workloads import make

    work = make(request["work"], request.get("n"))
    answers, weights, rows = [], [], []
    for which in request["turn"]:
        answer, found, row = run_once(module, which["variant"], work, which.get("hooks", 0))
        answers.append(answer)
        weights.append(found)
        rows.append(row)
    return dict(runs=answers, differ=difference(*weights), rows=[numbers(row) for row in rows])


def numbers(row):
    "What was measured, as far as it is numbers"
    return {k: float(v) for k, v in (row or {}).items() if isinstance(v, (int, float))}


def alone(module, request):
    "The first fits of this process, and the most memory that it has had"
    from .workloads import make

    work = make(request["work"], request.get("n"))
    seconds = []
    for _ in range(2):  # From the start, as making the first optimizer imports half of torch
        start = time.perf_counter()
        run_once(module, request["variant"], work)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return dict(first=seconds[0], second=seconds[1], peak=peak)


ACTIONS = dict(pair=pair, alone=alone)


@contextlib.contextmanager
def quiet():
    "Whatever is printed goes to a file; gives what answers are written to"
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        yield answers


def answer_to(module, line):
    "What a request gives, or its error"
    try:
        request = json.loads(line)
        return ACTIONS[request.pop("do")](module, request)
    except Exception as error:
        return dict(error=f"{type(error).__name__}: {error}"[:300])


def main():
    "Answer until nobody asks"
    warnings.simplefilter("ignore")
    with quiet() as answers, tempfile.TemporaryDirectory() as place:
        request = json.loads(sys.stdin.readline())
        try:
            module, seconds = loaded(request["module"])
            names = {name: list(works) for name, works in module.VARIANTS.items()}
            print(json.dumps(dict(variants=names, seconds=seconds, package=module.PACKAGE)), file=answers)
        except Exception as error:
            print(json.dumps(dict(error=f"{type(error).__name__}: {error}"[:300])), file=answers)
            return
        os.chdir(place)  # What a library writes is gone afterwards
        for line in sys.stdin:
            print(json.dumps(answer_to(module, line)), file=answers)
        os.chdir("/")


if __name__ == "__main__":
    main()
