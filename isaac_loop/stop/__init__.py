"Early stopping, limits, interrupts; guards against NaN, spikes and collapse"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .early_stopping import EarlyStoppingCB as EarlyStoppingCB
    from .limits import LimitCB as LimitCB
    from .interrupts import InterruptCB as InterruptCB
    from .nonfinite_stop import NonFiniteStopCB as NonFiniteStopCB
    from .loss_spikes import LossSpikeCB as LossSpikeCB
    from .same_predictions import SamePredictionsCB as SamePredictionsCB
else:
    __getattr__, __dir__ = lazy(__name__)
