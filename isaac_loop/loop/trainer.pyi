"What type checkers and editors know of the trainer; written by tools/write_stubs.py"

from typing import Any

from isaac_loop.basics.tables import Table
from isaac_loop.inspection.ablation import Ablation
from isaac_loop.inspection.findings import Findings
from isaac_loop.inspection.replays import Replay
from isaac_loop.inspection.script_text import Script
from isaac_loop.inspection.swap import Swap
from isaac_loop.inspection.times import TimesCB
from isaac_loop.inspection.trace import Trace
from isaac_loop.log.run_config import RunConfig
from isaac_loop.loop.history import History

class Trainer:
    "Runs `fit`, epochs and batches; callbacks do everything that happens in them"
    events: tuple[str, ...]
    dls: Any
    model: Any
    loss_func: Any
    opt_func: Any
    history: History
    preds: Any
    loss: Any
    n_updates: int
    stop_reason: str | None
    exception: BaseException | None
    batches: Any
    callbacks: Any
    dl: Any
    epochs: Any

    def __init__(
        self,
        dls,
        loss_func,
        opt_func,
        model,
        callbacks,
        **kwargs,
    ) -> None:
        """Its parts, of which each may be exchanged later

        dls: Has loaders `train` and `valid`; anything that can be iterated is a loader
        loss_func: Called with predictions and targets
        opt_func: Makes an optimizer from parameters and a rate, like `SGD`; None if you set `opt`
        yourself
        model: What to train
        callbacks: One or several: objects with methods named after events, functions so named, or None
        """

    def ablate(
        self,
        callback,
        n_batches: int = 10,
        n_epochs: int = 3,
        lr=0.001,
        callbacks: Any = None,
        train: bool = True,
        valid: bool = True,
        keep_opt: bool = False,
    ) -> Ablation:
        """Run some batches with and without a callback, show where they differ first, and put everything
        back

        callback: The callback, its name or its class; a group takes its members along
        n_batches: Training batches to compare; each validation pass has as many at most
        n_epochs: As for `fit`: schedules go by it; the run ends with the epoch that has had its batches
        lr: As for `fit`
        callbacks: Callbacks to add for this; the one to leave out may be among them
        train: As for `fit`
        valid: As for `fit`
        keep_opt: As for `fit`
        """

    def add_callback(
        self,
        callback,
        force: bool = False,
    ) -> Any:
        """Add one callback

        callback: As in `add_callbacks`
        force: Replace a callback of the same name instead of refusing?
        """

    def add_callbacks(
        self,
        callbacks,
        force: bool = False,
    ) -> Any:
        """Add `callbacks` at the end; among equal `order`s they run in the order of adding

        callbacks: A callback, several, or None; a group (it has an attribute `callbacks`) brings its
        members
        force: Replace callbacks of the same name instead of refusing?
        """

    def added_callbacks(
        self,
        callbacks,
    ) -> Any:
        """Have `callbacks` for the length of a `with` block

        callbacks: As in `add_callbacks`
        """

    def capture_preds(
        self,
        callbacks: Any = None,
        inps: bool = False,
    ) -> tuple:
        """Predictions and targets for `dls.valid`

        callbacks: Callbacks for this pass
        inps: Also give back what went into the model?
        Returns: Predictions and targets, and inputs if asked for
        """

    def check(
        self,
        ignore=...,
        batches: int = 0,
        lr: float | None = None,
        callbacks: Any = None,
    ) -> Findings:
        """Look for mistakes in the order and the doings of callbacks; `CheckFailed` for what spoils the
        result

        ignore: Names of findings that are meant so, one or several
        batches: Also run so many batches of each pass, twice, and put everything back; 3 tell most
        lr: Learning rate for these; default: that of the last fit, or else 0.001
        callbacks: Those that `fit` will be given, beside the trainer's own
        Returns: Those that are no error; each was warned of
        """

    def epoch_preds(
        self,
        dl: Any = None,
        with_loss: bool = False,
        force: bool = False,
    ) -> Any:
        """Predictions at this point of the training, from one pass for all who ask

        dl: A loader, 'train' or 'valid'; default: `dls.valid`
        with_loss: With the loss of each example?
        force: Run a new pass, whatever is known?
        Returns: As `get_preds` gives them, or in the order of the validation pass that was captured
        """

    def find_batch_size(
        self,
        start: int = 2,
        max_size: int = 65536,
        callbacks: Any = None,
    ) -> int:
        """Try ever larger batches, in each process, until memory of one runs out, and leave the trainer as
        it was

        start: The first size to try
        max_size: Do not go beyond
        callbacks: Further callbacks for the trials
        Returns: The largest size, doubling from `start`, that fits
        """

    def fit(
        self,
        n_epochs=3,
        lr=0.001,
        callbacks: Any = None,
        train=True,
        valid=True,
        keep_opt=False,
    ) -> Any:
        """Train and validate for `n_epochs`; callbacks do all the work

        n_epochs: How many epochs; each is a training pass, a validation pass, and the event `log`
        lr: Learning rate for `opt_func`; with `opt_func=None` your own optimizer keeps its rates
        callbacks: Callbacks for this fit only
        train: Run the training passes?
        valid: Run the validation passes?
        keep_opt: Go on with the last optimizer? Its rate becomes `lr`, and groups keep their ratios
        """

    def get_preds(
        self,
        dl: Any = None,
        with_inputs: bool = False,
        with_loss: bool = False,
        callbacks: Any = None,
    ) -> Any:
        """Predictions for all rows of a loader, in the order of its dataset; a stream's as they come

        dl: A loader, 'train' or 'valid'; default: `dls.valid`
        with_inputs: Also give back what went into the model?
        with_loss: Also compute the loss of each example?
        callbacks: Callbacks for this pass, beside the trainer's own below `Order.RECORD`
        Returns: Unpacks into predictions, targets, and losses and inputs if asked for
        """

    def load(
        self,
        folder,
        strict: bool = True,
        best: bool = False,
        monitor: str | None = None,
        mode: str | None = None,
    ) -> Any:
        """Take over weights, optimizers, history, loaders, random numbers; `fit(keep_opt=True)` goes on
        with them

        folder: With checkpoints, of which the newest that is whole is taken; or one checkpoint
        strict: Raise an error if this machine lacks a device whose random numbers were saved?
        best: Take the best instead of the newest?
        monitor: With `best`: which number says so; default: what the newest run has monitored
        mode: With `monitor`: 'min' when lower is better, 'max' when higher is; not needed for a loss
        """

    def lr_find(
        self,
        start_lr: float = 1e-05,
        lr_mult: float = 1.3,
        max_mult: float = 3.0,
        n_batches: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Try rising learning rates, and leave the trainer as it was

        start_lr: The first and smallest rate, as `fit` takes it; groups may have parts of it
        lr_mult: Factor from one batch to the next
        max_mult: Stop when the loss exceeds this multiple of the best
        n_batches: Stop after so many batches at the latest; default: when the rate would exceed 100
        callbacks: Further callbacks for the search
        Returns: With `lrs`, which are rates for `fit`, `losses`, `suggestions()` and `plot()`
        """

    def map(
        self,
        attribute: str | None = None,
        observe: bool = False,
    ) -> Any:
        """What every callback reads, writes and changes of the trainer, event by event

        attribute: Follow this one alone, as in `trainer.map('loss')`; or show a callback, or its name
        observe: Also watch one batch of each pass, which is put back, and add what is seen there
        Returns: Text by `str`; in a notebook a picture and a table
        """

    def one_batch(
        self,
    ) -> Any:
        "One batch: predict and compute the loss; while training also backward, step and zero_grad"

    def one_epoch(
        self,
        training,
    ) -> Any:
        """One pass over a loader, with the model in the right mode, and without gradients when validating

        training: True for a pass over `dls.train`, False for one over `dls.valid`
        """

    def print(
        self,
        *parts,
        sep: str = ' ',
        file: Any = None,
    ) -> Any:
        """Print a line in main alone, above any bar

        parts: As for Python's `print`
        sep: What stands between them
        file: Where to; default: `sys.stdout`
        """

    def remove_callback(
        self,
        callback,
        delete: bool = False,
    ) -> Any:
        """Take one callback out of the loop

        callback: The callback, its name or its class
        delete: Also forget `trainer.<name>`?
        """

    def remove_callbacks(
        self,
        callbacks,
        delete: bool = False,
    ) -> Any:
        """Take `callbacks` out of the loop

        callbacks: A callback, its name or its class, several, or None; a group takes its members along
        delete: Also forget `trainer.<name>`?
        """

    def replay(
        self,
        callbacks: Any = None,
        to: Any = None,
        stop: str | None = None,
        below=...,
    ) -> Replay:
        """Run the last batches again that a `BlackBoxCB` has kept, and leave the trainer where the run
        failed

        callbacks: Callbacks to add to those of the run: to print, to look, to stop in a debugger
        to: Batch to end at: 17, (2, 17), (2, 'validation', 3); default: where the run failed, or its
        end
        stop: Event of that batch to end at; default: `before_step` after a NaN, otherwise its end
        below: Leave out callbacks of the run whose `order` is this or later: they save and report
        """

    def request_stop(
        self,
        reason='asked to stop',
        everywhere=False,
    ) -> Any:
        """Stop in good order: this pass ends after its batch, the epoch closes as usual, and no other
        begins

        reason: Kept as `stop_reason`
        everywhere: Do all processes ask for it here? Then nobody has to be told
        """

    def rewind(
        self,
        to: tuple,
    ) -> Any:
        """Let the next `fit` go on from a state that `RewindCB` kept

        to: Epoch and batches done, one of `trainer.RewindCB.states`; an epoch alone means its beginning
        """

    def run_callbacks(
        self,
        *names,
        **extra,
    ) -> Any:
        """Run each event in turn; a step runs as a span, with its `before_`, `after_` and `cleanup_`

        names: Steps or other events, also as one list
        """

    @property
    def run_config(self) -> RunConfig:
        "What the present fit is run with, or the last one"

    def sample_preds(
        self,
        n_samples: int = 10,
        dl: Any = None,
        callbacks: Any = None,
    ) -> Any:
        """Predictions of several passes that differ by chance: by dropout, or by what `callbacks` do

        n_samples: How many passes
        dl: A loader, 'train' or 'valid'; default: `dls.valid`
        callbacks: What makes the passes differ; default: `DropoutOnCB()`
        """

    def save(
        self,
        folder,
        **metrics,
    ) -> Any:
        """Save everything of this run into a checkpoint, between two fits; of several processes main does
        it

        folder: Where; made if missing
        """

    def show_image_batch(
        self,
        max_n: int = 9,
        callbacks: Any = None,
        train: bool = True,
        tfm: Any = None,
        **kwargs,
    ) -> Any:
        """Draw the first images of the next fit's first batch as the model will see them; changes nothing

        max_n: Most images to draw
        callbacks: Further callbacks for this look only, such as an augmentation to try
        train: A batch of the training pass, or else of validation?
        tfm: Applied to the images before they are drawn, such as `UnNormalize`
        """

    def side_run(
        self,
        callbacks: Any = None,
        below=...,
        again: bool = False,
    ) -> Any:
        """Lend the trainer to another run, such as an evaluation; what that run trains stays trained

        callbacks: Callbacks for this run, beside those that are kept
        below: Keep callbacks whose `order` is lower, but for those that only read rows
        again: Do the same come again in this fit? Then what is worked out for them is kept
        """

    def snapshot(
        self,
        keep=...,
    ) -> Any:
        """Remember everything of this run: weights, optimizer, random states, history, callbacks

        keep: One or several objects that stay as they are when the snapshot is restored
        Returns: Use it in a `with` block, or call its `restore`
        """

    def split(
        self,
        batch,
    ) -> tuple:
        """Inputs and targets of `batch`, as `dls` say; a subclass may override it, and is then asked each
        time

        batch: What the loader gave
        Returns: A tuple of inputs, and a tuple of targets
        """

    def subclassing_method(
        self,
        *args,
        **kwargs,
    ) -> Any:
        """Called at the end of construction; a subclass overrides it to add callbacks

        args: A type checker lets such a one be overridden by any other
        """

    def summarize_callbacks(
        self,
    ) -> Table:
        "What runs at each step, in the order of execution, with the docstring of each method"

    def summarize_model(
        self,
        batch: Any = None,
    ) -> Table:
        """Input, output, parameters and millions of operations (for one example) of each layer

        batch: As the loader gives it; default: the first of `dls.train`
        Returns: One row for each layer, and the total
        """

    def swap(
        self,
        what,
        other,
        when: Any = None,
    ) -> Swap:
        """Put another function in the place of whatever does an event

        what: An event such as 'backward', 'ClipGradCB.before_step' for one callback's, or the method
        itself
        other: What to do instead: a function of the trainer, or a callback with a method of that name
        when: Function of the trainer: only where it holds, asked each time; default: always
        Returns: Undone by its `undo`, or at the end of a `with` block
        """

    def times(
        self,
        n_epochs: int = 1,
        lr: float = 0.001,
        callbacks: Any = None,
        train: bool = True,
        valid: bool = True,
        keep_opt: bool = False,
        below: float = ...,
        timer: TimesCB | None = None,
    ) -> Any:
        """Time a fit on the side, and leave the trainer as it was

        n_epochs: How many epochs to time
        lr: Learning rate, as for `fit`
        callbacks: Further callbacks for this run
        train: Run the training passes?
        valid: Run the validation passes?
        keep_opt: Go on with the last optimizer?
        below: Callbacks of this `order` or beyond stay away, and those that only read rows
        timer: How to time; default: `TimesCB()`
        Returns: A table, with `advice`, `plot()` and `save_trace(path)`
        """

    def to_script(
        self,
        callbacks: Any = None,
        valid: bool | None = None,
        partial: bool = False,
    ) -> Script:
        """The plain PyTorch loop that the present callbacks amount to

        callbacks: Further callbacks, as for one `fit`
        valid: With validation passes? Default: if there is a loader for them
        partial: Put a comment where something cannot be written, instead of an error?
        Returns: Its text is `str(script)`
        """

    @property
    def total_updates(self) -> Any:
        "Optimizer updates in the whole fit, known beforehand; a `ValueError` if no length is, and no limit"

    def trace(
        self,
        lr: float | None = None,
        train: bool = True,
        valid: bool = False,
        keep_opt: bool = False,
        batch: int = 0,
        all: bool = False,
    ) -> Trace:
        """Run a pass up to a batch, without those who save or report, put everything back, and show that
        batch

        lr: Learning rate; default: that of the last fit, or else 0.001
        train: Show the training batch?
        valid: Show a validation batch?
        keep_opt: With the optimizer of the last fit?
        batch: Number of the batch in its pass, from 0; those before it run without being shown
        all: Show steps that changed nothing as well?
        """

    @property
    def training(self) -> Any:
        "Whether this pass trains; between fits, whether the model is in training mode"

    def validate(
        self,
        dl: Any = None,
        callbacks: Any = None,
        weigh: Any = None,
        **metrics,
    ) -> dict:
        """Loss and metrics over every row of a loader

        dl: A loader, 'train' or 'valid'; default: `dls.valid`
        callbacks: Callbacks for this pass
        weigh: What each batch's loss is a mean over, as for `MetricsCB`; default: as the trainer's own
        Returns: `valid_loss` and the metrics
        """

    def walk(
        self,
        *args,
        at: Any = None,
        n_epochs=3,
        lr=0.001,
        callbacks: Any = None,
        train=True,
        valid=True,
        keep_opt=False,
    ) -> Any:
        """Train as `fit` does, and stop after each call of a callback

        args: For `fit`
        at: Events, callbacks, 'ClipGradCB.before_step', or functions of a moment; default: every call
        n_epochs: How many epochs; each is a training pass, a validation pass, and the event `log`
        lr: Learning rate for `opt_func`; with `opt_func=None` your own optimizer keeps its rates
        callbacks: Callbacks for this fit only
        train: Run the training passes?
        valid: Run the validation passes?
        keep_opt: Go on with the last optimizer? Its rate becomes `lr`, and groups keep their ratios
        Returns: An iterator of moments
        """

    def who_reads(
        self,
        attribute: str,
    ) -> Table:
        """Who reads an attribute of the trainer, in the order of the loop

        attribute: Of the trainer, such as 'preds'
        """

    def who_writes(
        self,
        attribute: str,
    ) -> Table:
        """Who writes an attribute of the trainer or changes it in place, in the order of the loop

        attribute: Of the trainer, such as 'preds'; 'gradients' are those of the model
        """

    def write_measured(
        self,
        **columns,
    ) -> Any:
        "Write what was measured in the middle of an epoch, and let `measured` tell of it"

    def write_preds(
        self,
        write,
        dl: Any = None,
        with_inputs: bool = False,
        with_loss: bool = False,
        callbacks: Any = None,
    ) -> Any:
        """Hand the predictions of each batch to `write` (in main), in the order of the dataset, and keep
        nothing

        write: Called with the `Predictions` of each batch
        dl: A loader, 'train' or 'valid'; default: `dls.valid`
        with_inputs: Also hand over what went into the model?
        with_loss: Also compute the loss of each example?
        callbacks: Callbacks for this pass
        """

    def __getattr__(self, name: str) -> Any:
        "What callbacks and subclasses set, and what the loop holds for a pass, such as `batch` and `epoch`"
