"Events, plan and spans, the trainer, its history"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .events import CancelException as CancelException
    from .events import CancelFitException as CancelFitException
    from .events import CancelEpochException as CancelEpochException
    from .events import CancelBatchException as CancelBatchException
    from .events import CancelStepException as CancelStepException
    from .events import Callback as Callback
    from .events import Order as Order
    from .events import replaces as replaces
    from .ranks import Ranks as Ranks
    from .spans import with_cbs as with_cbs
    from .trainer import Trainer as Trainer
    from .history import History as History
    from .monitor import Monitor as Monitor
    from .numbers_on_device import DeviceRecord as DeviceRecord
    from .subclassing import init_delegates as init_delegates
else:
    __getattr__, __dir__ = lazy(__name__)
