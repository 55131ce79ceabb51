"Predictions in the order of the data, evaluators, reports"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .evaluation import DropoutOnCB as DropoutOnCB
    from .capturing import Predictions as Predictions
    from .capturing import CapturePredsCB as CapturePredsCB
    from .evaluator import EvaluatorCB as EvaluatorCB
    from .reports import classification_scores as classification_scores
    from .reports import binary_scores as binary_scores
    from .reports import regression_scores as regression_scores
    from .reports import text_scores as text_scores
    from .reports import ReportCB as ReportCB
    from .reports import write_preds_csv as write_preds_csv
    from .reports import PredictionsCSVCB as PredictionsCSVCB
    from .text_comparison import word_error_rate as word_error_rate
    from .text_comparison import char_error_rate as char_error_rate
    from .text_comparison import token_rows as token_rows
    from .text_comparison import TextComparisonCB as TextComparisonCB
else:
    __getattr__, __dir__ = lazy(__name__)
