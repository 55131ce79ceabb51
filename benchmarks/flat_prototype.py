"""How cheap a loop of callbacks can be in plain Python: a yardstick, and no trainer to use.

The events of a batch are one flat tuple of bound methods, put together when the fit begins: no event is
looked up. It has our four cancels, cleanups in reverse, and a note on an error that names callback, event,
epoch and batch, but no spans, no coming and going of callbacks, no several errors at once.
"""

from torch import optim
from torch.nn import functional as F

from isaac_loop.loop.events import CancelBatchException, CancelEpochException, CancelFitException
from isaac_loop.loop.events import CancelStepException

NAME, IMPORT, PACKAGE = "flat prototype", None, None
STEPS = ("predict", "get_loss", "backward", "step", "zero_grad")
IN_BATCH = (
    "before_batch",
    *(f"{o}{step}" for step in STEPS for o in ("before_", "", "after_")),
    "after_batch",
)
NOTE = "Raised by `{}` at `{}`, in epoch {}, batch {}"


class Train:
    "The five steps"

    def predict(self, t):
        t.preds = t.model(t.batch[0])

    def get_loss(self, t):
        t.loss = t.loss_func(t.preds, t.batch[1])

    def backward(self, t):
        t.loss.backward()

    def step(self, t):
        t.opt.step()

    def zero_grad(self, t):
        t.opt.zero_grad()


class Count:
    "Counts updates"

    def step(self, t):
        t.n_updates += 1


class Forget:
    "Frees the memory of a batch before the next needs it"

    def before_batch(self, t):
        t.preds = t.loss = None


class Nothing:
    "Answers two events and does nothing"

    def before_batch(self, t):
        pass

    def after_batch(self, t):
        pass


class Flat:
    "A trainer whose plan is one tuple"

    def __init__(self, model, batches, loss_func, opt, callbacks):
        self.model, self.batches, self.loss_func = model, batches, loss_func
        self.opt, self.callbacks, self.n_updates = opt, callbacks, 0

    def plan(self):
        "Join the handlers of a batch; the step in which each stands is kept beside, for cancels and notes"
        pairs = [
            (event, getattr(cb, event)) for event in IN_BATCH for cb in self.callbacks if hasattr(cb, event)
        ]
        self.events = [event for event, _ in pairs]
        self.chain = tuple(handler for _, handler in pairs)
        self.cleanups = tuple(cb.cleanup_batch for cb in self.callbacks[::-1] if hasattr(cb, "cleanup_batch"))

    def one_batch(self):
        "All handlers, one behind the other"
        handler = None
        try:
            for handler in self.chain:
                handler(self)
        except CancelBatchException:
            pass
        except CancelStepException:
            self.go_on_after(handler)
        except BaseException as error:
            self.blame(error, handler)
            raise
        finally:
            for handler in self.cleanups:
                handler(self)

    def go_on_after(self, handler):
        "The rest of a batch after a step was cancelled"
        i = self.chain.index(handler)
        step = self.events[i].removeprefix("before_").removeprefix("after_")
        for event, following in list(zip(self.events, self.chain))[i + 1 :]:
            if event.removeprefix("before_").removeprefix("after_") != step:
                following(self)

    def blame(self, error, handler):
        "Note on an error where it was raised"
        if handler is None:
            return
        event = self.events[self.chain.index(handler)]
        error.add_note(NOTE.format(type(handler.__self__).__name__, event, self.epoch, self.batch_num))

    def fit(self, n_epochs):
        "Train"
        self.plan()
        try:
            for self.epoch in range(n_epochs):
                self.model.train()
                self.one_epoch()
        except CancelFitException:
            pass

    def one_epoch(self):
        "One pass over the batches"
        try:
            for self.batch_num, self.batch in enumerate(self.batches):
                self.one_batch()
        except CancelEpochException:
            pass


def bare(work, model, hooks=0):
    opt = optim.SGD(model.parameters(), work.lr)
    callbacks = [Forget(), Train(), Count(), *(Nothing() for _ in range(hooks))]
    trainer = Flat(model, work.train, F.cross_entropy, opt, callbacks)
    return lambda: trainer.fit(work.epochs)


VARIANTS = {NAME: dict(tiny=bare, cnn=bare)}
