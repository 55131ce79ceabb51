"The rate finder, the batch-size finder"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .lr_finder import LRFinderCB as LRFinderCB
else:
    __getattr__, __dir__ = lazy(__name__)
