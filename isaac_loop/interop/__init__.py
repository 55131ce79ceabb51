"Callbacks written for other libraries, run as they are"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .adapters import adapt as adapt
else:
    __getattr__, __dir__ = lazy(__name__)
