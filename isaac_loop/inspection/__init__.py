"Seeing inside loop and model: what runs, layers, activations, gradients, the first NaN, the profiler"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .loop_tables import event_table as event_table
    from .loop_tables import state_table as state_table
    from .loop_tables import callback_table as callback_table
    from .loop_tables import show_source as show_source
    from .model_summary import summarize_model as summarize_model
    from .activations import HooksCallback as HooksCallback
    from .activations import ActivationStatsCB as ActivationStatsCB
    from .gradients import GradientStatsCB as GradientStatsCB
    from .gradients import GradientPlotCB as GradientPlotCB
    from .update_ratios import UpdateRatioCB as UpdateRatioCB
    from .first_nonfinite import NonFiniteCB as NonFiniteCB
    from .profiler import ProfilerCB as ProfilerCB
    from .script import Script as Script
else:
    __getattr__, __dir__ = lazy(__name__)
