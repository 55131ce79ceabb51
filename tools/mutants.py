"""Break the library in one place after another, and see that a test notices each time.

A mutant names a function, a piece of its text, what to write in its place, and the tests that must fail
then. It names no path and no line, so files and code may move; a text that is not there exactly once, or a
name that the module does not know, is an error, not a pass.

    python tools/mutants.py                 all mutants, two at a time
    python tools/mutants.py Accumulation    those whose function has one of these texts in its name
    python tools/mutants.py --check         see that each finds its place; a second
"""

import argparse
import ast
import builtins
import os
import re
import shutil
import subprocess
import symtable
import sys
import tempfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from mutant_list import MUTANTS

ROOT = Path(__file__).parents[1]
COPIED = (
    "isaac_loop",
    "tests",
    "tools",
    "nbs",
    "pyproject.toml",
    "settings.ini",
    "README.md",
    "CONTRIBUTING.md",
)

Place = namedtuple("Place", "path start end")  # A function's text, as offsets in its file


class StaleMutant(ValueError):
    "A mutant whose function, text or test is not there (any more)"


def owner_of(node, within):
    "Name of the class that a function belongs to: the one around it, or the one it is patched onto"
    if within:
        return within
    patched = any("patch" in ast.unparse(o) for o in node.decorator_list)
    first = next(iter(node.args.args), None)
    return (
        ast.unparse(first.annotation)
        if patched and first is not None and first.annotation is not None
        else ""
    )


def functions_in(path):
    "Qualified names of the functions and methods in a file, with the place of each"
    source = path.read_text(encoding="utf-8")
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.parse(source).body:
        inside = [(o, node.name) for o in node.body] if isinstance(node, ast.ClassDef) else [(node, "")]
        for part, within in inside:
            if not isinstance(part, ast.FunctionDef):
                continue
            owner = owner_of(part, within)
            yield (
                f"{owner}.{part.name}".lstrip("."),
                Place(path, starts[part.lineno - 1], starts[part.end_lineno]),
            )


def all_functions(root):
    "Places by qualified name; a name that several modules use has several"
    found = {}
    for path in sorted((root / "isaac_loop").rglob("*.py")):
        if path.name == "_modidx.py":
            continue
        for name, place in functions_in(path):
            found.setdefault(name, []).append(place)
    return found


def scopes_in(table):
    "A symbol table and all those within it"
    yield table
    for inner in table.get_children():
        yield from scopes_in(inner)


def unknown_names(source):
    "Names that are used in a module, and that nobody there gives a value"
    module = symtable.symtable(source, "module", "exec")
    known = {o.get_name() for o in module.get_symbols() if o.is_assigned() or o.is_imported()}
    used = {o.get_name() for t in scopes_in(module) for o in t.get_symbols() if o.is_global()}
    return used - known - set(dir(builtins))


def broken(mutant, functions):
    "The file to break, and its text with the mutant in it"
    able = []
    for place in functions.get(mutant.function, ()):
        source = place.path.read_text(encoding="utf-8")
        text = source[place.start : place.end]
        if text.count(mutant.old) == 1:
            able.append((place, source, text))
    if len(able) != 1:
        raise StaleMutant(
            f"`{mutant.function}` has the text {mutant.old!r} {len(able)} times, and must have it once. "
            "Change the mutant together with the code."
        )
    place, source, text = able[0]
    mutated = source[: place.start] + text.replace(mutant.old, mutant.new) + source[place.end :]
    unknown = unknown_names(mutated) - unknown_names(source)
    if unknown:
        raise StaleMutant(
            f"`{mutant.function}` would fail because its module knows no {sorted(unknown)}, and not because "
            "its promise is broken. Use names that are there."
        )
    return place.path, mutated


def all_tests(root):
    "Texts of the test files, by path"
    return {o: o.read_text(encoding="utf-8") for o in sorted((root / "tests").rglob("test_*.py"))}


def find_tests(names, files, root):
    "Arguments for pytest, by test; a name that is used twice has its file before it: `test_clip::test_it`"
    found = {}
    for name in names:
        file, _, test = name.rpartition("::")
        paths = [
            o
            for o, source in files.items()
            if file in ("", o.stem) and re.search(rf"^def {test}\(", source, re.M)
        ]
        if len(paths) != 1:
            raise StaleMutant(f"There are {len(paths)} tests called `{name}`; there must be one.")
        found[name] = f"{paths[0].relative_to(root).as_posix()}::{test}"
    return found


def run_tests(arguments, root):
    "Exit status, names of the tests that failed, and the output"
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [
        Path(sys.executable).parent / "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-rfE",
        "--tb=line",
        *arguments,
    ]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S+?::(\w+)", done.stdout, re.M))
    return done.returncode, failed, done.stdout + done.stderr


def make_copy():
    "A folder with everything that a test may look at"
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def survivors(mutant, root):
    "Tests that should have failed with the mutant in the copy at `root`, and did not"
    path, text = broken(mutant, all_functions(root))
    whole = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    try:
        _, failed, output = run_tests(find_tests(mutant.tests, all_tests(root), root).values(), root)
    finally:
        path.write_text(whole, encoding="utf-8")
    return [o for o in mutant.tests if o.rpartition("::")[2] not in failed], output


def check_places(mutants, root):
    "Every mutant must find its function, its text and its tests"
    functions, files, stale = all_functions(root), all_tests(root), []
    for mutant in mutants:
        try:
            broken(mutant, functions)
            find_tests(mutant.tests, files, root)
        except StaleMutant as error:
            stale.append(f"{mutant.why}: {error}")
    if stale:
        raise SystemExit("\n".join(stale))


def check_healthy(mutants, root):
    "Without a mutant every test must pass"
    names = dict.fromkeys(o for mutant in mutants for o in mutant.tests)
    wanted = find_tests(names, all_tests(root), root)
    status, failed, output = run_tests(wanted.values(), root)
    if status:
        raise SystemExit(f"These fail without any mutant: {sorted(failed)}\n{output}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="texts in the names of functions; default: all mutants")
    parser.add_argument(
        "--check",
        action="store_true",
        help="only see that every mutant finds its function, its text and its tests",
    )
    parser.add_argument("--n-workers", type=int, default=2)
    args = parser.parse_args()
    mutants = [o for o in MUTANTS if not args.words or any(w in o.function for w in args.words)]
    check_places(mutants, ROOT)
    if args.check:
        print(f"{len(mutants)} mutants find their place")
        return 0
    folders, free, alive = [make_copy() for _ in range(args.n_workers)], SimpleQueue(), []
    for folder in folders:
        free.put(folder)

    def try_one(mutant):
        folder = free.get()
        try:
            return mutant, *survivors(mutant, folder)
        finally:
            free.put(folder)

    try:
        check_healthy(mutants, folders[0])
        with ThreadPoolExecutor(args.n_workers) as pool:
            for mutant, silent, output in pool.map(try_one, mutants):
                print(f"{'ALIVE' if silent else 'dead '}  {mutant.function}: {mutant.why}", flush=True)
                if silent:
                    alive.append(mutant)
                    print(f"       did not fail: {', '.join(silent)}\n{output[-600:]}")
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants are dead")
    return 1 if alive or not mutants else 0


if __name__ == "__main__":
    raise SystemExit(main())
