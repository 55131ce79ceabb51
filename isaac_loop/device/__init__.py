"Device, precision, several processes, Accelerate, memory"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .device import DeviceCB as DeviceCB
    from .precision import MixedPrecisionCB as MixedPrecisionCB
    from .compilation import CompileCB as CompileCB
    from .accelerated import AccelerateCB as AccelerateCB
    from .memory import clean_memory as clean_memory
    from .launching import launch as launch
    from .distributed import DistributedCB as DistributedCB
else:
    __getattr__, __dir__ = lazy(__name__)
