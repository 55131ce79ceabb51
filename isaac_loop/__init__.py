"""Train PyTorch models with a loop in which every action is a callback.

`from isaac_loop.all import *` brings everything that one types in a notebook. A script names what it takes:
`from isaac_loop import Trainer`, `from isaac_loop.callbacks import EarlyStoppingCB`. Each folder is one thing
that you may want to do, and lists its names: `from isaac_loop.show import plot_history`. `isaac_loop.loop`
says which events there are and is the loop itself; the callbacks in the other folders do the work.
"""
from typing import TYPE_CHECKING

from .lazy import help_in_notebooks, lazy

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .loop import Trainer as Trainer
    from .loop import History as History
    from .loop import Order as Order
    from .loop import replaces as replaces
    from .loop import with_cbs as with_cbs
    from .loop import CancelFitException as CancelFitException
    from .loop import CancelEpochException as CancelEpochException
    from .loop import CancelBatchException as CancelBatchException
    from .loop import CancelStepException as CancelStepException
    from .data import DataLoaders as DataLoaders
    from .basics import Table as Table
    from .basics import set_seed as set_seed
    from . import callbacks as callbacks
    from . import basics as basics
    from . import loop as loop
    from . import models as models
    from . import data as data
    from . import state as state
    from . import device as device
    from . import train as train
    from . import schedule as schedule
    from . import tune as tune
    from . import metrics as metrics
    from . import show as show
    from . import stop as stop
    from . import inspection as inspection
    from . import evaluate as evaluate
    from . import checkpoints as checkpoints
    from . import log as log
    from . import recipes as recipes
    from . import interop as interop
else:
    __getattr__, __dir__ = lazy(__name__)

help_in_notebooks()
