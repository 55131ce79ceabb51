"What one types in a notebook: `from isaac_loop.all import *` brings the names that the folders list"
from .basics import *
from .loop import *
from .models import *
from .data import *
from .state import *
from .device import *
from .train import *
from .schedule import *
from .tune import *
from .metrics import *
from .show import *
from .stop import *
from .inspection import *
from .evaluate import *
from .checkpoints import *
from .log import *
from .recipes import *
from .interop import *
from .loop.elsewhere import bring_all as _bring_all

_bring_all() # `Trainer.save` and its like, to be read or overridden
