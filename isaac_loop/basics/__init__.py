"What everybody needs: checks, tables, tensors"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .tables import Table as Table
    from .tensors import map_tensors as map_tensors
    from .tensors import def_device as def_device
    from .tensors import default_device as default_device
    from .tensors import to_device as to_device
    from .tensors import to_cpu as to_cpu
    from .tensors import set_seed as set_seed
    from .tensors import inplace as inplace
else:
    __getattr__, __dir__ = lazy(__name__)
