"Saving, resuming, rewinding, exporting, the best weights"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .checkpoint import CheckpointCB as CheckpointCB
    from .rewind import RewindCB as RewindCB
    from .best_weights import KeepBestCB as KeepBestCB
    from .exports import ExportCB as ExportCB
else:
    __getattr__, __dir__ = lazy(__name__)
