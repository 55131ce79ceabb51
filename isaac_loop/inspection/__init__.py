"Seeing the loop: map, check, trace, times, script, replay, walk; inside the model: activations, gradients"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .loop_map import LoopMap as LoopMap
    from .trace import Trace as Trace
    from .comparison import compare as compare
    from .comparison import Comparison as Comparison
    from .findings import CheckFailed as CheckFailed
    from .findings import Findings as Findings
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
    from .times import TimesCB as TimesCB
    from .profiler import ProfilerCB as ProfilerCB
    from .swap import Swap as Swap
    from .moments import Moment as Moment
    from .moments import Moments as Moments
    from .walk import Walk as Walk
    from .black_box import BlackBoxCB as BlackBoxCB
    from .replays import Replay as Replay
    from .ablation import Ablation as Ablation
    from .trying import try_callback as try_callback
    from .callback_report import BrokenPromise as BrokenPromise
    from .callback_report import CallbackReport as CallbackReport
    from .script_text import Script as Script
else:
    __getattr__, __dir__ = lazy(__name__)
