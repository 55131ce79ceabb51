"The five steps, accumulation, clipping, freezing, averages of the weights"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .training import BasicTrainCB as BasicTrainCB
    from .training import MomentumTrainCB as MomentumTrainCB
    from .training import NBatchCB as NBatchCB
    from .training import OneBatchCB as OneBatchCB
    from .accumulation import AccumulationCB as AccumulationCB
    from .clipping import ClipGradCB as ClipGradCB
    from .freezing import layer_groups as layer_groups
    from .freezing import FreezeCB as FreezeCB
    from .freezing import discriminative_rates as discriminative_rates
    from .freezing import BatchNormEvalCB as BatchNormEvalCB
    from .averaging import EMACB as EMACB
    from .averaging import SWACB as SWACB
    from .example_losses import loss_per_example as loss_per_example
else:
    __getattr__, __dir__ = lazy(__name__)
