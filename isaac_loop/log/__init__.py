"Writing elsewhere: files, trackers, the folder of a run, its copy, messages"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .loggers import LoggerCB as LoggerCB
    from .log_files import CSV as CSV
    from .log_files import JSONLines as JSONLines
    from .log_files import SQLite as SQLite
    from .log_files import Screen as Screen
    from .trackers import TensorBoard as TensorBoard
    from .trackers import WandB as WandB
    from .trackers import MLflow as MLflow
    from .trackers import Trackio as Trackio
    from .tracking import TrackingCB as TrackingCB
    from .experiment import ExperimentCB as ExperimentCB
    from .history_files import HistoryFilesCB as HistoryFilesCB
    from .upload import UploadCB as UploadCB
    from .upload import fetch as fetch
    from .notify import Email as Email
    from .notify import NotifyCB as NotifyCB
else:
    __getattr__, __dir__ = lazy(__name__)
