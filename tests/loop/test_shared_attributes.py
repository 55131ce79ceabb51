"""What callbacks ask of one another is written down: every look at one, found in the code, is in `OFFERS`."""

import ast
import importlib
from pathlib import Path

import isaac_loop
from isaac_loop.loop.shared_attributes import DEFAULTS, OFFERS, STATE

FOLDER = Path(isaac_loop.__file__).parent
MODULES = {
    str(path.relative_to(FOLDER).with_suffix("")): ast.parse(path.read_text())
    for path in FOLDER.rglob("*.py")
    if path.name != "_modidx.py"
}

ASKS_FOR_A_CLASS = {  # Elsewhere a class may only look for its own kind
    "log/run_config": "reports the settings of callbacks, which own them",
    "inspection/run_rules/check_paces": "tells batches of which several make an update",
    "inspection/run_rules/check_mixups": "tells schedules by epochs from those by updates",
    "inspection/source_rules/check_schedules": "looks into the settings of built-in schedules",
    "interop/adapters": "refuses what it has made itself",
    "interop/pytorch_accelerated_trainer": "tells a foreign callback what its own trainer would tell it",
}

FOREIGN = {"interop/aitoolbox_loop": {"scheduler"}}  # What another library asks of its own callbacks


def is_callbacks(expression):
    "Whether an expression speaks of `callbacks`"
    names = (getattr(o, "attr", None) or getattr(o, "id", None) for o in ast.walk(expression))
    return "callbacks" in names


def elements(function):
    "Names that stand for a callback in `function`: of loops over callbacks, and parameters"
    for node in ast.walk(function):
        if isinstance(node, (ast.For, ast.comprehension)) and is_callbacks(node.iter):
            yield from (o.id for o in ast.walk(node.target) if isinstance(o, ast.Name))
    yield from (o.arg for o in function.args.args if o.arg in ("cb", "callback", "other"))


def looks(tree):
    "Calls of `getattr`, `hasattr`, `isinstance` and the like on a callback, with their second argument"
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = set(elements(function))
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called = node.func.id
                if called in ("getattr", "attribute_or_none", "hasattr", "isinstance"):
                    if getattr(node.args[0], "id", None) in names:
                        yield called, node.args[1]


def asked_for(tree):
    "Attributes that are asked of callbacks, by `getattr` and `hasattr`, or by `offered` and `offering`"
    for called, what in looks(tree):
        if called != "isinstance" and isinstance(what, ast.Constant):
            yield what.value
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("offered", "offering") and isinstance(node.args[1], ast.Constant):
                yield node.args[1].value


def classes_asked_for(tree):
    "Classes of callbacks that are looked for, but for those defined in the same module"
    own = {o.name for o in ast.walk(tree) if isinstance(o, ast.ClassDef)}
    for called, what in looks(tree):
        names = [o.id for o in ast.walk(what) if isinstance(o, ast.Name)]
        if called == "isinstance":
            yield from (o for o in names if o not in own and (o.endswith("CB") or o == "cls"))


def unwritten(tree):
    return {name for name in asked_for(tree) if name not in OFFERS and not name.startswith("_")}


def test_what_is_asked_of_a_callback_is_written_down():
    found = {module: unwritten(tree) for module, tree in MODULES.items()}
    assert {module: names for module, names in found.items() if names} == FOREIGN


def test_a_callback_is_not_looked_for_by_its_class():
    found = {module for module, tree in MODULES.items() if set(classes_asked_for(tree))}
    assert found == set(ASKS_FOR_A_CLASS)


def test_what_is_written_down_is_asked_for_and_offered():
    asked = {name for tree in MODULES.values() for name in asked_for(tree)}
    by_loop = {"on_train", "on_valid", "state_dict", "load_state_dict", "stateless", "explain"}
    assert set(OFFERS) - by_loop - asked == set()
    written = "\n".join(ast.unparse(o) for name, o in MODULES.items() if "shared" not in name)
    for name in OFFERS:
        assert any(o in written for o in (f"{name} =", f"{name},", f"def {name}(")), name


def test_new_looks_are_refused():
    code = "def f(trainer): return [o for o in trainer.callbacks if {}]"
    assert unwritten(ast.parse(code.format("getattr(o, 'shows_row', False)"))) == {"shows_row"}
    assert unwritten(ast.parse(code.format("hasattr(o, 'on_tea')"))) == {"on_tea"}
    assert unwritten(ast.parse("def f(t):\n for cb in t.callbacks: getattr(cb, 'x', 1)")) == {"x"}
    assert unwritten(ast.parse("def f(cb): return getattr(cb, 'warm', 0)")) == {"warm"}
    assert unwritten(ast.parse("def f(cb): return attribute_or_none(cb, 'warm')")) == {"warm"}
    assert unwritten(ast.parse("offered(trainer, 'teapot')")) == {"teapot"}
    assert unwritten(ast.parse(code.format("getattr(o, 'shows_rows', False)"))) == set()
    by_class = ast.parse(code.format("isinstance(o, MetricsCB)"))
    assert list(classes_asked_for(by_class)) == ["MetricsCB"]


def test_what_only_a_callback_writes_has_a_default():
    assert set(DEFAULTS) <= set(STATE)
    assert {o for o in STATE if "CB`" in STATE[o][0].split(",")[0]} - {"history", "preds", "loss"} == {
        *DEFAULTS,
        "experiment",
    }


def writers():
    "Classes of the library with a method that writes into rows"
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            methods = [(node.name, o) for o in node.body] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].annotation:
                methods.append((ast.unparse(node.args.args[0].annotation), node))
            for cls, method in methods:
                if "trainer.history.write(" in ast.unparse(method) or ".write_measured(" in ast.unparse(
                    method
                ):
                    yield module, cls


def test_ours_declare_the_columns_that_they_write():
    found = set(writers()) - {("loop/trainer", "Trainer")}
    assert len(found) > 6
    for module, cls in found:
        name = "isaac_loop." + module.replace("/", ".")
        assert hasattr(getattr(importlib.import_module(name), cls), "columns"), cls
