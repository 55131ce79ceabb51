"Everything of a run as plain data: gathered, put back, on the disk"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .plain_state import LoopError as LoopError
    from .plain_state import CheckpointCorrupt as CheckpointCorrupt
    from .plain_state import CheckpointFormatTooNew as CheckpointFormatTooNew
    from .plain_state import NoValidCheckpoint as NoValidCheckpoint
    from .plain_state import CheckpointFolderBusy as CheckpointFolderBusy
    from .plain_state import ResumeMismatch as ResumeMismatch
    from .plain_state import UnsaveableState as UnsaveableState
    from .plain_state import StateOwnerMissing as StateOwnerMissing
    from .plain_state import CheckpointWriteFailed as CheckpointWriteFailed
    from .snapshot import Snapshot as Snapshot
    from .checkpoint_files import load_weights as load_weights
    from .checkpoint_files import Checkpoint as Checkpoint
    from .store import CheckpointStore as CheckpointStore
else:
    __getattr__, __dir__ = lazy(__name__)
