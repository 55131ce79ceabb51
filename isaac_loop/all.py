"What one types in a notebook: `from isaac_loop.all import *` brings the names that the folders list"
import gc as _gc

from .lazy import nothing_more as _nothing_more

_collects = _gc.isenabled()
_gc.disable() # Nothing here is garbage, and to look through all that torch has brought takes 0.1 seconds
try:
    from .basics import *
    from .loop import *
    from .models import *
    from .data import *
    from .state import *
    from .device import *
    from .train import *
    from .schedule import *
    from .tune import *
    from .metrics import *
    from .show import *
    from .stop import *
    from .inspection import *
    from .evaluate import *
    from .checkpoints import *
    from .log import *
    from .recipes import *
    from .interop import *
finally:
    if _collects: _gc.enable()

__getattr__ = _nothing_more(__name__) # Says what an old name is called here
