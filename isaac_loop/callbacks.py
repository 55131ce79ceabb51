"All callbacks, whichever folder they come from; written by tools/list_callbacks.py"
from typing import TYPE_CHECKING

from .lazy import lazy

if TYPE_CHECKING:
    from .data import BatchTransformCB as BatchTransformCB
    from .data import BatchAugmentationCB as BatchAugmentationCB
    from .data import MixUpCB as MixUpCB
    from .data import CutMixCB as CutMixCB
    from .data import ProgressiveResizeCB as ProgressiveResizeCB
    from .device import DeviceCB as DeviceCB
    from .device import MixedPrecisionCB as MixedPrecisionCB
    from .device import CompileCB as CompileCB
    from .device import AccelerateCB as AccelerateCB
    from .device import DistributedCB as DistributedCB
    from .train import BasicTrainCB as BasicTrainCB
    from .train import MomentumTrainCB as MomentumTrainCB
    from .train import NBatchCB as NBatchCB
    from .train import OneBatchCB as OneBatchCB
    from .train import AccumulationCB as AccumulationCB
    from .train import ClipGradCB as ClipGradCB
    from .train import FreezeCB as FreezeCB
    from .train import BatchNormEvalCB as BatchNormEvalCB
    from .train import EMACB as EMACB
    from .train import SWACB as SWACB
    from .schedule import BatchSchedulerCB as BatchSchedulerCB
    from .schedule import EpochSchedulerCB as EpochSchedulerCB
    from .schedule import OneCycleSchedulerCB as OneCycleSchedulerCB
    from .schedule import WarmupSchedulerCB as WarmupSchedulerCB
    from .schedule import WSDSchedulerCB as WSDSchedulerCB
    from .schedule import StepSchedulerCB as StepSchedulerCB
    from .schedule import PlateauSchedulerCB as PlateauSchedulerCB
    from .schedule import AttributeSchedulerCB as AttributeSchedulerCB
    from .tune import LRFinderCB as LRFinderCB
    from .metrics import MetricsCB as MetricsCB
    from .metrics import RecorderCB as RecorderCB
    from .metrics import EpochTimeCB as EpochTimeCB
    from .show import ProgressCB as ProgressCB
    from .show import DerivedColumnsCB as DerivedColumnsCB
    from .show import RenameColumnsCB as RenameColumnsCB
    from .show import PrintColumnsCB as PrintColumnsCB
    from .show import LivePlotCB as LivePlotCB
    from .stop import EarlyStoppingCB as EarlyStoppingCB
    from .stop import LimitCB as LimitCB
    from .stop import InterruptCB as InterruptCB
    from .stop import NonFiniteStopCB as NonFiniteStopCB
    from .stop import LossSpikeCB as LossSpikeCB
    from .stop import SamePredictionsCB as SamePredictionsCB
    from .inspection import ActivationStatsCB as ActivationStatsCB
    from .inspection import GradientStatsCB as GradientStatsCB
    from .inspection import GradientPlotCB as GradientPlotCB
    from .inspection import UpdateRatioCB as UpdateRatioCB
    from .inspection import NonFiniteCB as NonFiniteCB
    from .inspection import TimesCB as TimesCB
    from .inspection import ProfilerCB as ProfilerCB
    from .inspection import BlackBoxCB as BlackBoxCB
    from .evaluate import DropoutOnCB as DropoutOnCB
    from .evaluate import CapturePredsCB as CapturePredsCB
    from .evaluate import EvaluatorCB as EvaluatorCB
    from .evaluate import ReportCB as ReportCB
    from .evaluate import PredictionsCSVCB as PredictionsCSVCB
    from .evaluate import TextComparisonCB as TextComparisonCB
    from .checkpoints import CheckpointCB as CheckpointCB
    from .checkpoints import RewindCB as RewindCB
    from .checkpoints import KeepBestCB as KeepBestCB
    from .checkpoints import ExportCB as ExportCB
    from .log import LoggerCB as LoggerCB
    from .log import TrackingCB as TrackingCB
    from .log import ExperimentCB as ExperimentCB
    from .log import HistoryFilesCB as HistoryFilesCB
    from .log import UploadCB as UploadCB
    from .log import NotifyCB as NotifyCB
else:
    __getattr__, __dir__ = lazy(__name__)
