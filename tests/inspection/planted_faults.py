"Callbacks with one fault each, of the kind that people really make; and the promise that it breaks."

import builtins
import copy
import os
import signal
import threading
import warnings
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from isaac_loop import CancelBatchException, Order

FAULTS = {}  # By name: the class, and the promise that it breaks


def breaks(promise, *args):
    def listed(cls):
        FAULTS[cls.__name__] = partial(cls, *args), promise
        return cls

    return listed


# ---- the faults of the seeds


@breaks("cleanup")
class HooksUntilAfterFit:
    "ISA-73: it removes its hooks in `after_fit`, which a cancelled fit skips"

    def before_fit(self, trainer):
        self.means = []
        self.handles = [m.register_forward_hook(self.note) for m in trainer.model]

    def note(self, module, inputs, output):
        self.means.append(output.detach().mean())

    def after_fit(self, trainer):
        for handle in self.handles:
            handle.remove()


@breaks("two_fits")
class LeavesForGood:
    "SON-18: it estimates the time of an epoch after two batches and leaves the list being walked"

    def before_fit(self, trainer):
        self.n = 0

    def after_batch(self, trainer):
        self.n += 1
        if self.n == 2:
            self.estimate = trainer.n_batches
            trainer.callbacks.remove(self)


@breaks("modes")
class EvaluatesAndForgetsToTrain:
    "PTA-36: it evaluates every few steps, and nothing switches the model back within that epoch"

    def after_step(self, trainer):
        if trainer.n_updates % 2:
            return
        trainer.model.eval()
        with torch.no_grad():
            trainer.model(*trainer.split(trainer.batch)[0])


@breaks("files", "kept")
class DeletesByEnding:
    "NEMO-35: deleting is by the ending of a name, so files with the same number go together"

    def __init__(self, folder, keep=1):
        self.folder, self.keep = folder, keep

    def before_fit(self, trainer):
        Path(self.folder).mkdir(exist_ok=True)

    def after_step(self, trainer):
        n = trainer.n_updates
        (Path(self.folder) / f"step-{n}.txt").write_text("weights")
        for path in Path(self.folder).iterdir():
            if path.name.endswith(f"-{n - self.keep}.txt"):
                path.unlink()


# ---- what it changes


@breaks("hooks")
class NeverTakesItsHookOff:
    def before_fit(self, trainer):
        trainer.model.register_forward_hook(lambda *args: None)


@breaks("hooks")
class HooksOnAParameter:
    def before_epoch(self, trainer):
        for p in trainer.model.parameters():
            p.register_hook(lambda grad: grad)


@breaks("cleanup")
class WrapsTheLoss:
    def before_fit(self, trainer):
        self.old = trainer.loss_func
        trainer.loss_func = lambda preds, targets: self.old(preds, targets, label_smoothing=0.1)

    def after_fit(self, trainer):
        trainer.loss_func = self.old


@breaks("cleanup")
class NeverUnwrapsTheLoss:
    def before_fit(self, trainer):
        old = trainer.loss_func
        trainer.loss_func = lambda *args: old(*args)


@breaks("cleanup")
class AveragesUntilAfterEpoch:
    "Validates with an average, and puts the weights back only if the epoch came to its end"

    def before_fit(self, trainer):
        self.average = copy.deepcopy(trainer.model.state_dict())

    def after_step(self, trainer):
        for k, v in trainer.model.state_dict().items():
            if v.is_floating_point():
                self.average[k].lerp_(v, 0.5)

    def before_epoch(self, trainer):
        if not trainer.training:
            self.weights = copy.deepcopy(trainer.model.state_dict())
            trainer.model.load_state_dict(self.average)

    def after_epoch(self, trainer):
        if not trainer.training:
            trainer.model.load_state_dict(self.weights)


@breaks("cleanup")
class FreezesUntilAfterFit:
    def before_fit(self, trainer):
        trainer.model[1].requires_grad_(False)

    def after_fit(self, trainer):
        trainer.model[1].requires_grad_(True)


@breaks("cleanup")
class FreezesForGood:
    "No later fit would train what it has frozen"

    def before_fit(self, trainer):
        for p in trainer.model[1].parameters():
            p.requires_grad = False


@breaks("cleanup")
class LeavesDropoutChanged:
    def before_epoch(self, trainer):
        trainer.model[4].p = 0.5


@breaks("cleanup")
class HandlesCtrlCUntilAfterFit:
    def before_fit(self, trainer):
        self.old = signal.signal(signal.SIGINT, lambda *args: None)

    def after_fit(self, trainer):
        signal.signal(signal.SIGINT, self.old)


@breaks("cleanup", "log.txt")
class LeavesAFileOpen:
    def __init__(self, path):
        self.path = path

    def before_fit(self, trainer):
        self.file = open(self.path, "w")

    def after_batch(self, trainer):
        self.file.write("a batch\n")

    def after_fit(self, trainer):
        self.file.close()


@breaks("cleanup")
class ScalesTheLossUntilAfterBackward:
    def before_backward(self, trainer):
        self.loss, trainer.loss = trainer.loss, trainer.loss * 8

    def after_backward(self, trainer):
        trainer.loss = self.loss
        for p in trainer.model.parameters():
            p.grad /= 8


@breaks("cleanup")
class PatchesAFunctionUntilAfterPredict:
    def before_predict(self, trainer):
        self.old, F.relu = F.relu, lambda x, **kwargs: x.clamp(min=0)

    def after_predict(self, trainer):
        F.relu = self.old


@breaks("modes")
class SwitchesGradientsOff:
    "In a validation pass nobody notices, until the callback is used in training"

    def after_step(self, trainer):
        torch.set_grad_enabled(False)

    def before_predict(self, trainer):
        if trainer.training:
            torch.set_grad_enabled(True)


# ---- cancels


@breaks("cancels")
class CleansUpWhatIsNotThere:
    def before_epoch(self, trainer):
        self.seen = []

    def cleanup_epoch(self, trainer):
        self.seen.clear()


@breaks("cancels")
class ExpectsEveryBatchToEnd:
    def before_fit(self, trainer):
        self.inside = False

    def before_batch(self, trainer):
        if self.inside:
            raise RuntimeError("two batches at once")
        self.inside = True

    def after_batch(self, trainer):
        self.inside = False


@breaks("cancels")
class ResetsAtTheEnd:
    "State of a run is put back when the fit has gone well, not when the next one begins"

    n = 0

    def after_step(self, trainer):
        self.n += 1
        trainer.opt.param_groups[0]["lr"] = 0.1 / self.n

    def after_fit(self, trainer):
        self.n = 0


# ---- used again


@breaks("two_fits")
class GathersFromTheDayItWasMade:
    def __init__(self):
        self.losses = []

    def after_batch(self, trainer):
        self.losses.append(trainer.loss.detach())


@breaks("two_fits")
class WarmsUpOnce:
    n = 0

    def before_step(self, trainer):
        self.n += 1
        trainer.opt.param_groups[0]["lr"] = 0.1 * min(1, self.n / 3)


@breaks("two_fits")
class CountsOn:
    n = 0

    def before_batch(self, trainer):
        self.n += 1
        trainer.opt.param_groups[0]["lr"] = 0.1 * min(1, self.n / 8)


@breaks("evaluation")
class SetsARateForEveryBatch:
    "An evaluation in between leaves its rate to the next update"

    order = Order.STEP

    def before_batch(self, trainer):
        if not trainer.training:
            trainer.opt.param_groups[0]["lr"] = 0.0
        elif trainer.batch_num == 0:
            trainer.opt.param_groups[0]["lr"] = 0.1


@breaks("repeats")
class SharesAListWithAllOthers:
    losses = []

    def before_fit(self, trainer):
        self.n = len(self.losses)

    def after_batch(self, trainer):
        self.losses.append(trainer.batch_num)


@breaks("two_trainers")
class KeepsTheFirstModel:
    model = None

    def before_fit(self, trainer):
        if self.model is None:
            self.model = trainer.model

    def after_step(self, trainer):
        with torch.no_grad():
            for p in self.model.parameters():
                p *= 0.9


# ---- going on


@breaks("resume")
class ForgetsAPart:
    def before_fit(self, trainer):
        self.n, self.total = 0, 0.0

    def before_step(self, trainer):
        self.n, self.total = self.n + 1, self.total + trainer.batch_num + 1
        trainer.opt.param_groups[0]["lr"] = 0.01 * self.total / self.n

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


@breaks("resume")
class CountsInAGenerator:
    def before_fit(self, trainer):
        self.rates = (0.1 / i for i in range(1, 1000))

    def before_step(self, trainer):
        trainer.opt.param_groups[0]["lr"] = next(self.rates)


def make_closure():
    def callback():
        n = 0

        def before_step(trainer):
            nonlocal n
            n += 1
            trainer.opt.param_groups[0]["lr"] = 0.1 / n

        return before_step

    return callback


@breaks("state_dict")
class SavesWhatCannotBeRead:
    def before_fit(self, trainer):
        self.n = 0

    def state_dict(self):
        return {"rule": lambda x: x, "n": 1}

    def load_state_dict(self, state):
        pass


@breaks("state_dict")
class SavesAndNeverLoads:
    def before_fit(self, trainer):
        self.n = 0

    def state_dict(self):
        return {"n": self.n}


@breaks("state_dict")
class LoadsNothing:
    def before_fit(self, trainer):
        self.n = 0

    def after_batch(self, trainer):
        self.n += 1

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        state["n"] = self.n


@breaks("evaluation")
class CountsForwardPasses:
    "A hook cannot tell an evaluation from training"

    order = Order.RECORD

    def before_fit(self, trainer):
        self.n = 0
        self.handle = trainer.model.register_forward_hook(self.count)

    def count(self, *args):
        self.n += 1

    def after_batch(self, trainer):
        trainer.opt.param_groups[0]["lr"] = 0.1 / self.n

    def cleanup_fit(self, trainer):
        self.handle.remove()


# ---- in every batch


@breaks("waits")
class LooksAtTheLoss:
    def after_get_loss(self, trainer):
        if trainer.loss > 100:
            raise CancelBatchException("too large")


@breaks("waits")
class AsksForTheNormOfGradients:
    def before_step(self, trainer):
        norms = [p.grad.norm() for p in trainer.model.parameters()]
        self.norm = sum(norms).item()


@breaks("waits")
class WaitsInAHook:
    def before_fit(self, trainer):
        self.handle = trainer.model[1].register_forward_hook(self.note)

    def note(self, module, inputs, output):
        self.mean = float(output.mean())

    def cleanup_fit(self, trainer):
        self.handle.remove()


@breaks("memory")
class KeepsLossesWithTheirGraphs:
    def before_fit(self, trainer):
        self.losses = []

    def after_batch(self, trainer):
        self.losses.append(trainer.loss)


@breaks("memory")
class KeepsBatchesInAHook:
    def before_fit(self, trainer):
        self.seen = {}

    def after_predict(self, trainer):
        self.seen[trainer.epoch, trainer.batch_num] = trainer.batch


@breaks("memory")
class KeepsMeansWithTheirGraphs:
    def before_fit(self, trainer):
        self.means = []
        self.handle = trainer.model[1].register_forward_hook(self.note)

    def note(self, module, inputs, output):
        self.means.append(output.mean())

    def cleanup_fit(self, trainer):
        self.handle.remove()


@breaks("random")
class DrawsASampleToPrint:
    def after_epoch(self, trainer):
        rows = torch.randperm(8)[:2]
        print(rows)


@breaks("random")
class SeedsInTheMiddle:
    def before_epoch(self, trainer):
        torch.manual_seed(0)

    on_train = False


# ---- the process


@breaks("process")
class ChangesTheDefaultType:
    def after_fit(self, trainer):
        torch.set_default_dtype(torch.float64)


@breaks("process")
class SilencesAllWarnings:
    def before_fit(self, trainer):
        warnings.filterwarnings("ignore")


@breaks("process")
class LooksForAnomaliesForEver:
    def before_fit(self, trainer):
        torch.autograd.set_detect_anomaly(True, check_nan=False)


@breaks("process")
class ReplacesPrint:
    def before_fit(self, trainer):
        builtins.print = lambda *args, **kwargs: None


@breaks("process")
class LeavesAThread:
    def before_fit(self, trainer):
        self.stop = threading.Event()
        threading.Thread(target=self.stop.wait, args=(2,), daemon=True).start()

    def __deepcopy__(self, memo):
        return type(self)()


@breaks("process")
class MovesElsewhere:
    def before_fit(self, trainer):
        os.makedirs("elsewhere", exist_ok=True)
        os.chdir("elsewhere")


@breaks("files")
class WritesWhereItStands:
    def after_epoch(self, trainer):
        Path("notes.txt").write_text("an epoch")


# ---- names


@breaks("added")
class MisspellsAnEvent:
    def after_bach(self, trainer):
        pass


@breaks("added")
class FailsAtOnce:
    def before_fit(self, trainer):
        self.losses.clear()
