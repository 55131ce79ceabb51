"""Where the code may know of several processes: in `device`, and in the loop as little as it can.

Everybody else asks `trainer.ranks`, which one process answers itself.
"""

import ast
import inspect
from pathlib import Path

import isaac_loop
from isaac_loop.all import Trainer
from isaac_loop.loop.ranks import Ranks

PACKAGE = Path(isaac_loop.__file__).parent
ENVIRONMENT = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"


def sources():
    "Trees of all modules, by their names in the package"
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def named(tree):
    "Dotted names and imports in a module, without texts"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_the_folder_of_devices_names_torch_distributed():
    "Of the callbacks these are `DistributedCB`, `AccelerateCB` and what they consist of"
    known = {
        name
        for name, tree in sources()
        if any(o.startswith(("torch.distributed", "dist.")) for o in named(tree))
    }
    assert "device/processes.py" in known
    assert not [name for name in known if not name.startswith("device/")]
    classes = "device/device.py", "device/precision.py", "device/main_process.py", "device/memory.py"
    assert known.isdisjoint(classes)


def test_rank_and_size_are_read_from_the_environment_in_two_places():
    "Where a callback is added, when nobody has joined yet, and where processes join"
    found = {
        name
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in ENVIRONMENT
    }
    assert "loop/ranks.py" in found
    assert not [name for name in found if not name.startswith(("loop/ranks", "device/"))]


def test_the_loop_knows_of_processes_by_three_names():
    "`ranks`, who runs where, and a promise that all ask to stop"
    words = {
        name: {o for node in ast.walk(tree) for o in mentions(node)}
        for name, tree in sources()
        if name.startswith("loop/") and name not in ("loop/ranks.py", "loop/__init__.py")
    }
    known = {name: found for name, found in words.items() if found}
    assert known == {
        "loop/adding_callbacks.py": {"check_on_ranks"},
        "loop/plan.py": {"runs_here"},
        "loop/spans.py": {"ranks"},
        "loop/trainer.py": {"Ranks", "ranks", "everywhere"},
    }
    assert list(inspect.signature(Trainer.request_stop).parameters) == ["self", "reason", "everywhere"]
    public = [name for name in dir(Ranks) if not name.startswith("_")]
    asks = ["fail", "from_main", "gather", "heard", "is_main", "local_rank", "meet", "rank", "shares", "size"]
    asks += ["soon", "total"]
    assert public == asks


def mentions(node):
    "Names of several processes that a part of a source uses"
    names = "ranks", "Ranks", "runs_here", "check_on_ranks", "everywhere", "world_size", "rank"
    found = [getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "arg", None)]
    return [o for o in found if isinstance(o, str) and o in names]


def test_one_process_answers_itself_without_torch():
    "The module of the answers imports nothing heavy"
    ranks, tree = Ranks(), dict(sources())["loop/ranks.py"]
    assert not any(o.startswith("torch") for o in named(tree))
    assert (ranks.soon("stop", "enough"), ranks.gather(1), ranks.from_main(lambda: 2)) == ("enough", [1], 2)
