"Groups of callbacks for a quick start, the demo"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .recipes import CoreCBs as CoreCBs
    from .momentum_trainer import MomentumTrainer as MomentumTrainer
    from .demo import digit_loaders as digit_loaders
    from .demo import digit_trainer as digit_trainer
else:
    __getattr__, __dir__ = lazy(__name__)
