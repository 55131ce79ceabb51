"A mode in which turning a tensor into a number, which waits for the device, is an error inside a batch."

from torch.overrides import TorchFunctionMode

WAITING = {
    "item",
    "cpu",
    "tolist",
    "numpy",
    "is_nonzero",
    "nonzero",
    "equal",
    "allclose",
    "unique",
    "bincount",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__complex__",
    "__array__",
    "__format__",
    "__repr__",
    "__contains__",
}


class Waited(AssertionError):
    "Somebody turned a tensor into a number while a batch was being worked on"


def refuse(func):
    "Raise an error if `func` waits for the device"
    name = getattr(func, "__name__", "")
    if name in WAITING:
        raise Waited(f"waited in `{name}`")


class RefuseToWait(TorchFunctionMode):
    "Refuses while it is `inside` a batch, whatever tensor it is about"

    inside = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.inside:
            refuse(func)
        return func(*args, **kwargs or {})


class InsideCB:
    "Tells the mode whether a batch is being worked on: first at its beginning, last at its end"

    order = -10_000

    def __init__(self, mode):
        self.mode = mode

    def before_batch(self, trainer):
        self.mode.inside = True

    def cleanup_batch(self, trainer):
        self.mode.inside = False
