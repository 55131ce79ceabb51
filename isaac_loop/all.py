"Every public name, for notebooks: `from isaac_loop.all import *`"
from isaac_loop.events import *
from isaac_loop.signatures import *
from isaac_loop.tables import *
from isaac_loop.tensors import *
from isaac_loop.history import *
from isaac_loop.memory import *
from isaac_loop.trainer import *
from isaac_loop.data import *
from isaac_loop.models import *
from isaac_loop.images import *
from isaac_loop.callbacks.training import *
from isaac_loop.callbacks.device import *
from isaac_loop.callbacks.metrics import *
from isaac_loop.callbacks.progress import *
from isaac_loop.callbacks.tracking import *
from isaac_loop.inspection import *
from isaac_loop.demo import *
