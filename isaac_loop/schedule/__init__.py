"Rates and other attributes that follow a curve, plateau"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .schedulers import BatchSchedulerCB as BatchSchedulerCB
    from .schedulers import EpochSchedulerCB as EpochSchedulerCB
    from .schedules import OneCycleSchedulerCB as OneCycleSchedulerCB
    from .schedules import WarmupSchedulerCB as WarmupSchedulerCB
    from .schedules import WSDSchedulerCB as WSDSchedulerCB
    from .plateau import StepSchedulerCB as StepSchedulerCB
    from .plateau import PlateauSchedulerCB as PlateauSchedulerCB
    from .annealing import piecewise as piecewise
    from .attribute_schedule import AttributeSchedulerCB as AttributeSchedulerCB
else:
    __getattr__, __dir__ = lazy(__name__)
