"Small models, initialisation, hooks"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .small_models import SimpleNet as SimpleNet
    from .small_models import GeneralRelu as GeneralRelu
    from .small_models import plot_func as plot_func
    from .small_models import init_weights as init_weights
    from .small_models import conv as conv
    from .small_models import get_model_conv as get_model_conv
    from .small_models import get_model_fc as get_model_fc
    from .small_models import get_model_timm as get_model_timm
    from .lsuv import lsuv_init as lsuv_init
    from .hooks import Hook as Hook
    from .hooks import Hooks as Hooks
    from .hooks import find_modules as find_modules
else:
    __getattr__, __dir__ = lazy(__name__)
