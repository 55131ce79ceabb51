"Everything of a run as plain data: gathered, put back, on the disk"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .errors import LoopError as LoopError
    from .errors import CheckpointCorrupt as CheckpointCorrupt
    from .errors import CheckpointFormatTooNew as CheckpointFormatTooNew
    from .errors import NoValidCheckpoint as NoValidCheckpoint
    from .errors import CheckpointFolderBusy as CheckpointFolderBusy
    from .errors import ResumeMismatch as ResumeMismatch
    from .errors import UnsaveableState as UnsaveableState
    from .errors import StateOwnerMissing as StateOwnerMissing
    from .errors import CheckpointWriteFailed as CheckpointWriteFailed
    from .errors import RankFailed as RankFailed
    from .errors import RanksDiverged as RanksDiverged
    from .errors import RanksDiffer as RanksDiffer
    from .errors import WorldSizeMismatch as WorldSizeMismatch
    from .snapshot import Snapshot as Snapshot
    from .checkpoint_files import load_weights as load_weights
    from .checkpoint_files import Checkpoint as Checkpoint
    from .store import CheckpointStore as CheckpointStore
else:
    __getattr__, __dir__ = lazy(__name__)
