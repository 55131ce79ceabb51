"Loaders, the exact order of samples, augmentation"
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .small_data import load_digits as load_digits
    from .small_data import image_to_tensor as image_to_tensor
    from .small_data import sample_dataset_dict as sample_dataset_dict
    from .dataloaders import collate_rows as collate_rows
    from .dataloaders import get_dataloaders as get_dataloaders
    from .dataloaders import DataLoaders as DataLoaders
    from .sampling import SeededBatchSampler as SeededBatchSampler
    from .resumable_loaders import WorkerCrashed as WorkerCrashed
    from .exact_loaders import ExactLoader as ExactLoader
    from .replay_loaders import ReplayLoader as ReplayLoader
    from .exact_loaders import exact_loader as exact_loader
    from .augmentation import BatchTransformCB as BatchTransformCB
    from .augmentation import BatchAugmentationCB as BatchAugmentationCB
    from .random_patches import RandErase as RandErase
    from .random_patches import RandCopy as RandCopy
    from .augmentation import each_image as each_image
    from .augmentation import albumentations_transform as albumentations_transform
    from .mixtures import MixUpCB as MixUpCB
    from .mixtures import CutMixCB as CutMixCB
    from .augmentation import ProgressiveResizeCB as ProgressiveResizeCB
else:
    __getattr__, __dir__ = lazy(__name__)
