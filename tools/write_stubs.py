"""Write `isaac_loop/loop/trainer.pyi`: what type checkers and editors know of the trainer.

Its methods come from many modules, each at its first use, and callbacks give it attributes. A checker sees
neither, so the file lists each public method with its arguments and what they mean.
"""

import builtins
import inspect
import re
import textwrap
from pathlib import Path

from fastcore.docments import docments

from isaac_loop.loop.trainer import Trainer

ROOT = Path(__file__).parents[1]
STUB = ROOT / "isaac_loop" / "loop" / "trainer.pyi"
HEAD = """"What type checkers and editors know of the trainer; written by tools/write_stubs.py"

from typing import Any

{imports}

class Trainer:
    "{doc}"
    events: tuple[str, ...]
    dls: Any
    model: Any
    loss_func: Any
    opt_func: Any
    history: History
    preds: Any
    loss: Any
    n_updates: int
    stop_reason: str | None
    exception: BaseException | None
{others}
"""
FOOT = """
    def __getattr__(self, name: str) -> Any:
        "What callbacks and subclasses set, and what the loop holds for a pass, such as `batch` and `epoch`"
"""
LISTED = {"events", "preds", "loss"}
REFUSED = "unknown"  # Where `fit` and others gather what they refuse in words of their own


def public(cls=Trainer):
    "The public attributes of the class by name, by the alphabet; asked for, those from elsewhere come"
    names = [name for name in sorted(dir(cls)) if not name.startswith("_") and hasattr(cls, name)]
    return {name: inspect.getattr_static(cls, name) for name in names}


def patched(root=ROOT):
    "Names of classes that get public methods beside their definition, which a checker does not see"
    texts = [path.read_text() for path in sorted((root / "isaac_loop").rglob("*.py"))]
    return {kind for text in texts for kind in re.findall(PATCH, text)}


PATCH = re.compile(r"^@patch.*\n(?:@.*\n)*def [a-z]\w*\(self: *(\w+)", re.MULTILINE)
PATCHED = patched()


def kind_of(annotation, default, taken):
    "The text of an annotation; `taken` gets what has to be imported for it"
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return ""
    module, name = getattr(annotation, "__module__", ""), getattr(annotation, "__qualname__", "")
    if not isinstance(annotation, type) or "." in name or name in PATCHED:
        text = "Any"
    else:
        text = name
        if module != builtins.__name__:
            taken.add((module, name))
    return f"{text} | None" if default is None and text != "Any" else text


def argument(parameter, taken):
    "A parameter as it stands in a definition"
    if parameter.name == "self":
        return "self"
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    kind = kind_of(parameter.annotation, parameter.default, taken)
    default = parameter.default
    if not kind and default is None:
        kind = "Any"
    text = star.get(parameter.kind, "") + parameter.name + (f": {kind}" if kind else "")
    if default is inspect.Parameter.empty:
        return text
    is_simple = default is None or type(default) in (bool, int, float, str) and default == default
    value = repr(default) if is_simple else "..."
    return f"{text} = {value}" if kind else f"{text}={value}"


def arguments(signature, taken):
    "The parameters of a method, with a bare star where those by name begin"
    found, has_star = [], False
    for o in signature.parameters.values():
        if o.name == REFUSED:
            continue
        if o.kind is o.KEYWORD_ONLY and not has_star:
            found.append("*")
        has_star |= o.kind in (o.KEYWORD_ONLY, o.VAR_POSITIONAL)
        found.append(argument(o, taken))
    return found


def meanings(f):
    "What the docstring says, and what each parameter means"
    told = docments(f, full=True)
    named = {name: o.docment for name, o in told.items() if o.docment and name not in ("return", REFUSED)}
    lines = [f"{name}: {docment}" for name, docment in named.items()]
    if told.get("return") is not None and told["return"].docment:
        lines.append(f"Returns: {told['return'].docment}")
    texts = [inspect.getdoc(f) or "", *(["", *lines] if lines else [])]
    return [line for text in texts for line in textwrap.wrap(text, 96) or [""]]


def method(name, f, taken):
    "The lines of one method"
    signature = inspect.signature(f)
    returned = kind_of(signature.return_annotation, "", taken) or ("None" if name == "__init__" else "Any")
    indent = " " * 8
    text = [
        f"    def {name}(",
        *(f"{indent}{o}," for o in arguments(signature, taken)),
        f"    ) -> {returned}:",
    ]
    told = meanings(f)
    if name == "__init__":
        told[0] = "Its parts, of which each may be exchanged later"
    first, *rest = [o.replace("\\", "\\\\").replace('"', '\\"') for o in told]
    doc = [f'{indent}"{first}"'] if not rest else [f'{indent}"""{first}', *rest, '"""']
    return text + doc[:1] + [(indent + o) if o else "" for o in doc[1:]]


def property_of(name, x, taken):
    "The lines of a property"
    kind = kind_of(inspect.signature(x.fget).return_annotation, "", taken) or "Any"
    doc = (inspect.getdoc(x) or "").replace('"', '\\"')
    return ["    @property", f"    def {name}(self) -> {kind}:", f'        "{doc}"']


def stub():
    "The text of the file"
    taken, others = {("isaac_loop.loop.history", "History")}, []
    lines = method("__init__", Trainer.__init__, taken)
    for name, x in public().items():
        f = getattr(Trainer, name)
        if isinstance(x, property):
            lines += ["", *property_of(name, x, taken)]
        elif callable(f):
            lines += ["", *method(name, f, taken)]
        elif name not in LISTED:
            others.append(f"    {name}: Any")
    imports = "\n".join(f"from {module} import {name}" for module, name in sorted(taken))
    head = HEAD.format(imports=imports, doc=inspect.getdoc(Trainer), others="\n".join(others))
    return head + "\n" + "\n".join(lines) + "\n" + FOOT


if __name__ == "__main__":
    STUB.write_text(stub())
