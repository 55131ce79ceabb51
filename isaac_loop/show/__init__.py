"Bars, tables, columns to print, curves, live plots, images, files of media"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .progress import ProgressCB as ProgressCB
    from .columns import DerivedColumnsCB as DerivedColumnsCB
    from .columns import RenameColumnsCB as RenameColumnsCB
    from .columns import PrintColumnsCB as PrintColumnsCB
    from .curves import plot_history as plot_history
    from .curves import history_figure as history_figure
    from .live_plot import LivePlotCB as LivePlotCB
    from .images import subplots as subplots
    from .images import show_image as show_image
    from .images import get_grid as get_grid
    from .images import show_images as show_images
    from .images import UnNormalize as UnNormalize
else:
    __getattr__, __dir__ = lazy(__name__)
