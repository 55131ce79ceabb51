"Every public name, for notebooks: `from isaac_loop.all import *`"
from isaac_loop.events import *
from isaac_loop.signatures import *
from isaac_loop.tables import *
from isaac_loop.tensors import *
from isaac_loop.history import *
from isaac_loop.snapshot import *
from isaac_loop.checks import *
from isaac_loop.state import *
from isaac_loop.checkpoint_files import *
from isaac_loop.sampling import *
from isaac_loop.trainer import *
<<<<<<< HEAD
from isaac_loop.loaders import *
from isaac_loop.hooks import *
from isaac_loop.store import *
=======
from isaac_loop.checks import *
from isaac_loop.options import *
from isaac_loop.annealing import *
from isaac_loop.kept_state import *
from isaac_loop.scheduler_checks import *
>>>>>>> 991b66d1219aec8785f4e4a12642a88a8e512157
from isaac_loop.data import *
from isaac_loop.models import *
from isaac_loop.lsuv import *
from isaac_loop.records import *
from isaac_loop.images import *
from isaac_loop.curves import *
from isaac_loop.memory import *
from isaac_loop.run_state import *
from isaac_loop.run_folder import *
from isaac_loop.bootstrap import *
from isaac_loop.callbacks.training import *
from isaac_loop.callbacks.accumulation import *
from isaac_loop.callbacks.clipping import *
from isaac_loop.callbacks.freezing import *
from isaac_loop.media import *
<<<<<<< HEAD
from isaac_loop.callbacks.resuming import *
from isaac_loop.saving import *
=======
from isaac_loop.outlets import *
from isaac_loop.alerts import *
from isaac_loop.callbacks.schedulers import *
from isaac_loop.callbacks.limits import *
>>>>>>> 991b66d1219aec8785f4e4a12642a88a8e512157
from isaac_loop.callbacks.device import *
from isaac_loop.callbacks.precision import *
from isaac_loop.callbacks.accelerated import *
from isaac_loop.callbacks.flags import *
from isaac_loop.readings import *
from isaac_loop.callbacks.reductions import *
from isaac_loop.log_file import *
from isaac_loop.provenance import *
from isaac_loop.callbacks.metrics import *
from isaac_loop.callbacks.progress import *
from isaac_loop.callbacks.tracking import *
from isaac_loop.callbacks.recorder import *
from isaac_loop.callbacks.live_plot import *
from isaac_loop.callbacks.predictions import *
from isaac_loop.callbacks.columns import *
from isaac_loop.callbacks.epoch_time import *
from isaac_loop.callbacks.run_config import *
from isaac_loop.callbacks.attributes import *
from isaac_loop.callbacks.stopping import *
from isaac_loop.callbacks.schedules import *
from isaac_loop.callbacks.lr_finder import *
from isaac_loop.callbacks.averaging import *
from isaac_loop.callbacks.augmentation import *
from isaac_loop.callbacks.interrupts import *
from isaac_loop.callbacks.best import *
from isaac_loop.callbacks.evaluator import *
from isaac_loop.callbacks.reports import *
from isaac_loop.callbacks.text_comparison import *
from isaac_loop.callbacks.checkpoint import *
from isaac_loop.callbacks.loggers import *
from isaac_loop.callbacks.trackers import *
from isaac_loop.callbacks.experiment import *
from isaac_loop.callbacks.remote import *
from isaac_loop.callbacks.notify import *
from isaac_loop.callbacks.exports import *
from isaac_loop.callbacks.history_files import *
<<<<<<< HEAD
from isaac_loop.callbacks.rewind import *
=======
from isaac_loop.callbacks.logs import *
>>>>>>> 991b66d1219aec8785f4e4a12642a88a8e512157
from isaac_loop.callbacks.activations import *
from isaac_loop.callbacks.gradients import *
from isaac_loop.callbacks.nonfinite import *
from isaac_loop.callbacks.profiler import *
from isaac_loop.callbacks.bad_numbers import *
from isaac_loop.callbacks.spikes import *
from isaac_loop.callbacks.collapse import *
from isaac_loop.plots import *
from isaac_loop.inspection import *
from isaac_loop.evaluation import *
from isaac_loop.model_summary import *
from isaac_loop.recipes import *
from isaac_loop.demo import *
from isaac_loop.foreign.base import *
from isaac_loop.foreign.aitoolbox import *
from isaac_loop.foreign.nemo import *
from isaac_loop.foreign.pytorch_accelerated import *
from isaac_loop.foreign.sonosco import *
from isaac_loop.interop import *
