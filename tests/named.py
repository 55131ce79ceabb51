"What is not true of a piece of code that names parts of the library, in a table of a page or in a message."

import ast
import inspect


import isaac_loop.all as everything
from isaac_loop.loop.events import EVENTS
from isaac_loop.loop.shared_attributes import STATE

KNOWN = {*vars(everything), "SimpleNamespace", "L"}


def wrong(code):
    "What is not true of a piece of code, or None"
    if code == "def log(trainer): ..." or code == "def after_batch(trainer): ...":
        return None
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except SyntaxError:
        return "is no Python"
    return next((why for o in nodes if (why := wrong_name(o) or wrong_call(o))), None)


def wrong_name(node):
    "What is not true of a name or an attribute, or None"
    if isinstance(node, ast.Name) and node.id[0].isupper() and node.id not in KNOWN:
        return f"there is no `{node.id}`"
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
        return None
    has = hasattr(everything.Trainer, node.attr) or node.attr in STATE or node.attr in KNOWN  # A callback
    if node.value.id == "trainer" and not has:
        return f"the trainer has no `{node.attr}`"
    if node.value.id == "Order" and not hasattr(everything.Order, node.attr):
        return f"there is no `Order.{node.attr}`"


def wrong_call(node):
    "Why a class, a function or a method of the trainer does not take these arguments, or None"
    if not isinstance(node, ast.Call):
        return None
    bare = node.func.id if isinstance(node.func, ast.Name) else None
    of_trainer = (
        node.func.attr
        if isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", None) == "trainer"
        else bare
    )
    known, method = vars(everything).get(bare), getattr(everything.Trainer, of_trainer or "", None)
    if known is None and (method is None or of_trainer in EVENTS):
        return None
    given = [object()] * (len(node.args) + (known is None))
    signature, some = (
        inspect.signature(known or method),
        any(
            isinstance(o, ast.Constant) and o.value is ...
            for o in [*node.args, *(k.value for k in node.keywords)]
        ),
    )
    try:
        (signature.bind_partial if some else signature.bind)(*given, **{k.arg: None for k in node.keywords})
    except TypeError as e:
        return str(e)
