"Losses, metrics, what each batch did, the time of an epoch, bootstrap estimates"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .any_metric import MeanOf as MeanOf
    from .any_metric import MetricOn as MetricOn
    from .metrics import MetricsCB as MetricsCB
    from .recorder import RecorderCB as RecorderCB
    from .epoch_time import EpochTimeCB as EpochTimeCB
    from .confidence import Estimates as Estimates
    from .confidence import bootstrap as bootstrap
else:
    __getattr__, __dir__ = lazy(__name__)
