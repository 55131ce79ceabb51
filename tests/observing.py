"Describes all that can be seen from an object, without the library, so that two moments can be compared."

import random
import types
from array import array
from collections import deque
from functools import partial

import numpy as np
import torch

from isaac_loop.loop.plan import Plan


def bits(x):
    "A tensor's or an array's type, shape and bytes"
    if isinstance(x, np.ndarray):
        return str(x.dtype), x.shape, list(map(id, x.flat)) if x.dtype == object else x.tobytes()
    if x.is_sparse:
        return "sparse", tuple(x.shape), bits(x.detach().to_dense())
    return (
        str(x.dtype),
        tuple(x.shape),
        x.detach()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes(),
    )


def random_states():
    "All that random numbers depend on"
    _, words, *rest = np.random.get_state()
    return random.getstate(), torch.get_rng_state().tolist(), words.tolist(), rest


def _items(x):
    "Keys and values of a dict by name"
    keys = {k: f"[{k!r}]" if isinstance(k, (str, int)) else f"[{id(k)}]" for k in x}
    return {keys[k]: v for k, v in x.items()} | {f"key {keys[k]}": k for k in x}


MEMOS = (  # Of a trainer
    "_aside",  # Random numbers on the side go on
    "_checked",  # What need not be checked again
    "_aside_known",  # What need not be worked out again
)


def _own(x):
    "The `__dict__` of `x` without asking its `__getattr__`"
    try:
        own = object.__getattribute__(x, "__dict__")
    except AttributeError:
        return {}
    return {k: v for k, v in own.items() if k not in MEMOS} if isinstance(own, dict) else {}


def _filled(x, slot):
    try:
        object.__getattribute__(x, slot)
    except AttributeError:
        return False
    return True


def _parts(x):
    "A description of `x` alone, and the parts to look at next by name"
    if isinstance(x, torch.Tensor):
        return (bits(x), x.requires_grad), {"grad": x.grad} if x.is_leaf else {}
    if isinstance(x, np.ndarray):
        return bits(x), {f"[{i}]": o for i, o in enumerate(x.flat)} if x.dtype == object else {}
    if isinstance(x, torch.Generator):
        return x.get_state().tolist(), {}
    if isinstance(x, random.Random):
        return x.getstate(), {}
    if isinstance(x, np.random.Generator):
        return repr(x.bit_generator.state), {}
    if isinstance(x, Plan):
        return [
            (kind, event, [(id(cb), h.__name__) for cb, h in found])
            for kind, d in x.entries.items()
            for event, found in d.items()
        ], {}
    if isinstance(x, (array, bytearray)):
        return bytes(x), {}
    own = _own(x)
    for c in type(x).__mro__:
        names = vars(c).get("__slots__", ())
        own |= {
            o: getattr(x, o)
            for o in ([names] if isinstance(names, str) else names)
            if o not in ("__dict__", "__weakref__") and _filled(x, o)
        }
    if isinstance(x, dict):
        return list(map(id, x)), own | _items(x)
    if isinstance(x, (list, tuple, deque)):
        return len(x), own | {f"[{i}]": v for i, v in enumerate(x)}
    if isinstance(x, (set, frozenset)):
        return sorted(map(id, x)), own | {f"<{id(o)}>": o for o in x}
    return sorted(own), own


def observe(root, skip=()):
    "Every path from `root`, and what is found there: class, identity, value"
    found, seen, todo = {}, {id(o) for o in skip}, [("", root)]
    while todo:
        path, x = todo.pop()
        if x is None or isinstance(x, (str, bytes, int, float, complex)):
            found[path] = repr(x)
        elif isinstance(x, (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)):
            found[path] = id(x)
        elif isinstance(x, types.MethodType):
            found[path] = id(x.__func__), id(x.__self__)
        elif isinstance(x, partial):
            found[path], todo = (
                id(x.func),
                [*todo, (path + ".args", x.args), (path + ".keywords", x.keywords)],
            )
        elif id(x) in seen:
            found[path] = id(x)
        else:
            seen.add(id(x))
            description, parts = _parts(x)
            found[path] = type(x), id(x), description
            todo += [(f"{path}.{name}", o) for name, o in parts.items()]
    return found


def differences(before, after):
    "Paths at which two observations differ"
    return sorted(o for o in before.keys() | after.keys() if before.get(o) != after.get(o))


def unchanged(root, before, skip=()):
    "Assert that `root` looks as it did"
    assert differences(before, observe(root, skip)) == []
