"""What the library that this one grew from could do, line by line, wherever no other test shows it.

Each test reads one promise as a user would and tries exactly that; where the old library had a fault, ours
must not.
"""

import ast
import inspect
import json

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torcheval.metrics import MulticlassAccuracy

from isaac_loop.device.device import DeviceCB
from isaac_loop.metrics.metrics import MetricsCB
from isaac_loop.show.progress import ProgressCB
from isaac_loop.log.tracking import TrackingCB
from isaac_loop.train.training import BasicTrainCB, MomentumTrainCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.small_data import image_to_tensor, load_digits, sample_dataset_dict
from isaac_loop.loop.events import (
    EVENTS,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
)
from isaac_loop.loop.trainer import with_cbs
from isaac_loop.models.small_models import SimpleNet
from isaac_loop.basics.tensors import inplace
from isaac_loop.loop.trainer import Trainer

from places import TUTORIALS

BATCH_EVENTS = [
    "before_batch",
    "predict",
    "get_loss",
    "before_backward",
    "backward",
    "step",
    "zero_grad",
    "after_batch",
    "cleanup_batch",
]
OTHER_EVENTS = ["before_epoch", "after_epoch", "cleanup_epoch", "before_fit", "after_fit", "cleanup_fit"]


def make_batches(n=3):
    return [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(n)]


def make_trainer(*callbacks, cls=Trainer, train=None, valid=None):
    return cls(
        DataLoaders(train or make_batches(), valid or make_batches(2)),
        F.mse_loss,
        optim.SGD,
        nn.Linear(2, 1),
        list(callbacks),
    )


def callback(class_name="AnyCB", **members):
    return type(class_name, (), members)()


def diary_of(events, name="DiaryCB"):
    "A callback that writes down each of `events`"
    diary = []

    def noting(event):
        return lambda self, trainer: diary.append(event)

    return diary, callback(name, **{o: noting(o) for o in events})


# Trainer and loop


@pytest.mark.shows("ISA-01")
def test_the_trainer_takes_five_plain_things():
    "By position or by name, each an ordinary thing of PyTorch; the optimizer is a class or any factory"
    dls, model, cb = DataLoaders(make_batches()), nn.Linear(2, 1), BasicTrainCB()
    for opt_func in (optim.SGD, lambda params, lr: optim.AdamW(params, lr, weight_decay=0.1)):
        by_position = Trainer(dls, F.mse_loss, opt_func, model, [cb])
        by_name = Trainer(callbacks=[cb], model=model, opt_func=opt_func, loss_func=F.mse_loss, dls=dls)
        for trainer in (by_position, by_name):
            assert (trainer.dls, trainer.loss_func, trainer.opt_func, trainer.model, trainer.callbacks) == (
                dls,
                F.mse_loss,
                opt_func,
                model,
                [cb],
            )
            trainer.fit(1, valid=False)
            assert isinstance(trainer.opt, optim.Optimizer)


@pytest.mark.shows("ISA-02", "ISA-03")
def test_fit_has_the_defaults_of_old_and_trains_by_itself():
    "Three epochs at 1e-3 with both passes"
    defaults = {o.name: o.default for o in inspect.signature(Trainer.fit).parameters.values()}
    assert {o: defaults[o] for o in ("n_epochs", "lr", "callbacks", "train", "valid")} == dict(
        n_epochs=3, lr=1e-3, callbacks=None, train=True, valid=True
    )
    diary, cb = diary_of(["before_epoch", "step"])
    trainer = make_trainer(BasicTrainCB(), cb)
    before = trainer.model.weight.clone()
    trainer.fit()
    assert (
        diary == 3 * (["before_epoch"] + ["step"] * 3 + ["before_epoch"])
        and trainer.opt.param_groups[0]["lr"] == 1e-3
    )
    assert not torch.equal(trainer.model.weight, before)


@pytest.mark.shows("ISA-07")
def test_one_batch_runs_five_steps_in_training_and_two_in_validation():
    "In this order, with `before_backward` before `backward`"
    steps = ["predict", "get_loss", "before_backward", "backward", "step", "zero_grad"]
    diary, cb = diary_of(steps)
    trainer = make_trainer(cb)
    trainer.fit(1, valid=False)
    assert diary == steps * 3
    diary.clear()
    trainer.fit(1, train=False)
    assert diary == ["predict", "get_loss"] * 2


@pytest.mark.shows("ISA-08")
def test_run_callbacks_takes_a_name_or_several():
    "Names are the outer loop, callbacks the inner one"
    diary = []

    def noting(who):
        return callback(
            who, **{o: lambda self, trainer, o=o: diary.append((o, who)) for o in ("predict", "get_loss")}
        )

    trainer = make_trainer(noting("One"), noting("Two"))
    trainer.run_callbacks("predict")
    assert diary == [("predict", "One"), ("predict", "Two")]
    both = [("predict", "One"), ("predict", "Two"), ("get_loss", "One"), ("get_loss", "Two")]
    for names in (["predict", "get_loss"], ("predict", "get_loss")):
        diary.clear()
        trainer.run_callbacks(names)
        assert diary == both
    diary.clear()
    trainer.run_callbacks("predict", "get_loss")
    assert diary == both


@pytest.mark.shows("ISA-09", "ISA-10")
def test_order_is_read_anew_at_each_fit():
    "It may change between fits; without one it is 0"
    diary, plain = diary_of(["before_fit"], "PlainCB")
    early = callback("EarlyCB", order=-1, before_fit=lambda self, trainer: diary.append("early"))
    trainer = make_trainer(plain, early)
    trainer.fit(0)
    early.order = 1
    trainer.fit(0)
    assert diary == ["early", "before_fit", "before_fit", "early"]


@pytest.mark.shows("ISA-12", "AIT-12")
def test_a_method_gets_the_trainer_and_works_by_setting_attributes():
    "The very trainer, and what one sets the next one sees, without any base class"
    seen = []

    class PredictCB:
        def predict(self, trainer):
            trainer.preds, trainer.mark = trainer.batch[0] * 2, "mine"

    class LookCB:
        def after_batch(self, trainer):
            seen.append((trainer, trainer.mark, torch.equal(trainer.preds, trainer.batch[0] * 2)))

    trainer = make_trainer(PredictCB(), LookCB())
    trainer.fit(1, train=False)
    assert seen == [(trainer, "mine", True)] * 2


@pytest.mark.shows("ISA-13")
def test_nobody_uses_before_backward_and_anybody_may():
    "For instance to weigh the loss"
    assert not any(
        hasattr(o, "before_backward")
        for o in (BasicTrainCB, MomentumTrainCB, DeviceCB, MetricsCB, ProgressCB, TrackingCB)
    )
    weights = []
    for factor in (1, 0):

        def before_backward(trainer, factor=factor):
            trainer.loss = trainer.loss * factor

        torch.manual_seed(0)
        trainer = make_trainer(BasicTrainCB(), before_backward)
        first = trainer.model.weight.clone()
        trainer.fit(1, lr=0.1)
        weights.append(torch.equal(trainer.model.weight, first))
    assert weights == [False, True]


@pytest.mark.shows("ISA-14")
def test_a_name_that_is_no_event_is_refused_and_own_ones_can_be_declared():
    "In `run_callbacks` and on a callback"
    with pytest.raises(LookupError, match="Did you mean `get_loss`"):
        make_trainer().run_callbacks("get_los")
    with pytest.raises(ValueError, match="Did you mean `after_batch`"):
        make_trainer(callback(after_bach=lambda self, trainer: None))

    class Greeting(Trainer):
        events = ("greet",)

    said = []
    make_trainer(callback(greet=lambda self, trainer: said.append("hello")), cls=Greeting).run_callbacks(
        "greet"
    )
    assert said == ["hello"]


@pytest.mark.shows("ISA-15", "NEMO-03", "SON-08")
def test_all_public_state_is_there_during_a_batch():
    names = "dls dl model loss_func opt_func opt lr n_epochs epochs epoch batches batch_num batch".split()
    names += ["preds", "loss", "training", "callbacks"]
    missing = []
    make_trainer(
        BasicTrainCB(),
        callback(
            after_batch=lambda self, trainer: missing.extend(o for o in names if not hasattr(trainer, o))
        ),
    ).fit(2)
    assert missing == []


@pytest.mark.shows("ISA-16")
def test_epochs_and_batches_can_be_wrapped():
    "A callback puts its own iterables in their place before they are walked"
    walked = []

    def noting(what, items):
        for o in items:
            walked.append(what)
            yield o

    class WrapCB:
        def before_fit(self, trainer):
            trainer.epochs = noting("epoch", trainer.epochs)

        def before_epoch(self, trainer):
            trainer.batches = noting("train" if trainer.training else "valid", trainer.batches)

    trainer = make_trainer(BasicTrainCB(), WrapCB())
    trainer.fit(2)
    assert walked == 2 * ["epoch", "train", "train", "train", "valid", "valid"] and trainer.n_updates == 6


@pytest.mark.shows("ISA-17")
@pytest.mark.parametrize("kind", [tuple, list])
def test_a_batch_is_what_the_loader_gave(kind):
    "The very object; its first entry is the input, its second the target"
    batches, seen = [kind(o) for o in make_batches()], []

    class LookCB:
        def before_batch(self, trainer):
            seen.append(trainer.batch)

        def after_batch(self, trainer):
            assert torch.equal(trainer.preds, trainer.model(trainer.batch[0])) and torch.equal(
                trainer.loss, F.mse_loss(trainer.preds, trainer.batch[1])
            )

    make_trainer(BasicTrainCB(), LookCB(), train=batches, valid=batches).fit(1, train=False)
    assert len(seen) == 3 and all(a is b for a, b in zip(seen, batches))


# Events


@pytest.mark.shows("ISA-18")
def test_with_cbs_runs_before_after_and_always_cleanup():
    "Around any method; the exception given ends it quietly, any other reaches the user"

    class Enough(Exception):
        "Ends tea"

    events = ["before_tea", "after_tea", "cleanup_tea"]

    class TeaTrainer(Trainer):
        @with_cbs("tea", Enough)
        def drink(self, error=None):
            diary.append("body")
            if error is not None:
                raise error
            return "refreshed"

    diary, cb = diary_of(events)
    trainer = make_trainer(cb, cls=TeaTrainer)
    assert trainer.drink() == "refreshed" and diary == ["before_tea", "body", "after_tea", "cleanup_tea"]
    for error in (Enough(), ValueError("spilt")):
        diary.clear()
        if isinstance(error, Enough):
            trainer.drink(error)
        else:
            with pytest.raises(ValueError, match="spilt"):
                trainer.drink(error)
        assert diary == ["before_tea", "body", "cleanup_tea"]


@pytest.mark.shows("ISA-19", "ISA-20", "ISA-21", "NEMO-02", "AIT-02", "AIT-03", "AIT-04")
def test_the_fifteen_events_of_old_come_in_their_order():
    assert len(BATCH_EVENTS + OTHER_EVENTS) == 15 and set(BATCH_EVENTS + OTHER_EVENTS) <= set(EVENTS)
    diary, cb = diary_of(BATCH_EVENTS + OTHER_EVENTS)
    make_trainer(cb).fit(1)
    valid = [o for o in BATCH_EVENTS if o not in ("before_backward", "backward", "step", "zero_grad")]
    assert diary == [
        "before_fit",
        "before_epoch",
        *BATCH_EVENTS * 3,
        "after_epoch",
        "cleanup_epoch",
        "before_epoch",
        *valid * 2,
        "after_epoch",
        "cleanup_epoch",
        "after_fit",
        "cleanup_fit",
    ]


@pytest.mark.shows("ISA-22", "PTA-06")
def test_training_and_validation_can_have_events_of_their_own():
    "Four for each pass by `with_cbs`, or a callback for one kind of pass"

    class Passes(Trainer):
        @with_cbs("train", CancelEpochException)
        def train_pass(self):
            super().one_epoch(True)

        @with_cbs("valid", CancelEpochException)
        def valid_pass(self):
            super().one_epoch(False)

        def one_epoch(self, training):
            self.train_pass() if training else self.valid_pass()

    diary, cb = diary_of(["before_train", "after_train", "before_valid", "after_valid", "before_epoch"])
    make_trainer(cb, cls=Passes).fit(2)
    assert diary == 2 * [
        "before_train",
        "before_epoch",
        "after_train",
        "before_valid",
        "before_epoch",
        "after_valid",
    ]
    diary, cb = diary_of(["before_epoch", "after_epoch"])
    cb.on_valid = False
    make_trainer(cb).fit(2)
    assert diary == 2 * ["before_epoch", "after_epoch"]


# Who comes first, what is left out, and what goes on, for a cancel raised in the second of two callbacks
EXPECTED = {
    "before_batch": ["before_batch", "cleanup_batch"],
    "predict": ["before_batch", "predict", "cleanup_batch"],
    "after_batch": ["before_batch", "predict", "after_batch", "cleanup_batch"],
}


@pytest.mark.shows("ISA-23 to ISA-26", "ISA-29")
@pytest.mark.parametrize("event", EXPECTED)
def test_a_cancelled_batch_is_like_continue(event):
    "The rest is skipped, cleanup comes, nobody after it runs, and training goes on"

    def cancel(self, trainer):
        if trainer.batch_num == 1:
            raise CancelBatchException("skip it")

    events = ["before_batch", "predict", "after_batch", "cleanup_batch"]
    first, before_it = diary_of(events, "First")
    last, after_it = diary_of(events, "Last")
    make_trainer(before_it, callback("CancelCB", **{event: cancel}), after_it).fit(1, train=False, valid=True)
    assert first == events + EXPECTED[event]
    assert last == events + [o for o in EXPECTED[event] if o != event]


@pytest.mark.shows("ISA-28", "SON-02")
@pytest.mark.parametrize(
    "error", [CancelEpochException(), CancelFitException(), ValueError()], ids=lambda o: type(o).__name__
)
def test_outer_cancels_and_errors_pass_every_inner_cleanup(error):
    "Only the error reaches the user"

    def predict(self, trainer):
        if trainer.batch_num == 1:
            raise error

    diary, cb = diary_of(["cleanup_batch", "cleanup_epoch", "after_epoch", "cleanup_fit", "after_fit"])
    trainer = make_trainer(cb, callback("CancelCB", predict=predict))
    if isinstance(error, ValueError):
        with pytest.raises(ValueError) as caught:
            trainer.fit(1, train=False)
        assert caught.value is error
    else:
        trainer.fit(1, train=False)
    assert diary == ["cleanup_batch"] * 2 + ["cleanup_epoch"] + (
        ["after_fit"] if isinstance(error, CancelEpochException) else []
    ) + ["cleanup_fit"]


@pytest.mark.shows("ISA-27")
def test_a_cancel_in_a_cleanup_goes_up():
    "The batch's own does not end there but is an error; the epoch's ends the epoch"
    for cancel in (CancelBatchException, CancelEpochException):

        def cleanup_batch(self, trainer, cancel=cancel):
            raise cancel

        diary, cb = diary_of(["cleanup_batch", "cleanup_epoch", "after_fit"])
        trainer = make_trainer(cb, callback("CancelCB", cleanup_batch=cleanup_batch))
        if cancel is CancelEpochException:
            trainer.fit(1, train=False)
            assert diary == ["cleanup_batch", "cleanup_epoch", "after_fit"]
        else:
            with pytest.raises(CancelBatchException):
                trainer.fit(1, train=False)
            assert diary == ["cleanup_batch", "cleanup_epoch"]


@pytest.mark.shows("ISA-30")
@pytest.mark.parametrize("event", ["before_fit", "before_epoch", "after_epoch", "log"])
def test_a_batch_cannot_be_cancelled_where_there_is_none(event):
    "It reaches the user with a note on who raised it, where, and why nothing caught it"

    def cancel(self, trainer):
        raise CancelBatchException("too early")

    with pytest.raises(CancelBatchException) as caught:
        make_trainer(callback("EagerCB", **{event: cancel})).fit(1)
    notes = "\n".join(caught.value.__notes__)
    assert (
        f"`EagerCB.{event}`" in notes
        and "was not open here" in notes
        and "exception of one that is open" in notes
    )


# Adding, removing, finding


class GreetCB:
    def before_fit(self, trainer):
        "Greet"


class OtherCB:
    def before_fit(self, trainer):
        "Do something else"


@pytest.mark.shows("ISA-31", "ISA-32", "SON-05", "PTA-15")
def test_callbacks_are_added_one_by_one_or_together():
    "None is ignored, and each is reachable by the name of its class"
    trainer = make_trainer(None)
    assert trainer.callbacks == []
    greet, other = GreetCB(), OtherCB()
    trainer.add_callback(None)
    trainer.add_callback(greet)
    trainer.add_callbacks([None, other])
    assert trainer.callbacks == [greet, other] and trainer.GreetCB is greet and trainer.OtherCB is other


@pytest.mark.shows("ISA-33")
def test_a_second_of_the_same_name_is_refused_or_forced():
    old, new = GreetCB(), GreetCB()
    trainer = make_trainer(old)
    with pytest.raises(ValueError, match="There is a callback called `GreetCB` already"):
        trainer.add_callback(new)
    assert trainer.callbacks == [old] and trainer.GreetCB is old
    trainer.add_callback(new, force=True)
    assert trainer.callbacks == [new] and trainer.GreetCB is new


@pytest.mark.shows("ISA-34")
@pytest.mark.parametrize("wanted", ["object", "name", "list"])
def test_callbacks_are_removed_and_on_request_forgotten(wanted):
    "By object or by name; only with `delete` is the attribute gone"
    greet, other = GreetCB(), OtherCB()
    trainer = make_trainer(greet, other)
    what = {"object": greet, "name": "GreetCB", "list": [greet]}[wanted]
    trainer.remove_callbacks(what) if wanted == "list" else trainer.remove_callback(what)
    assert trainer.callbacks == [other] and trainer.GreetCB is greet
    trainer.add_callback(greet)
    trainer.remove_callbacks(what, delete=True) if wanted == "list" else trainer.remove_callback(
        what, delete=True
    )
    assert trainer.callbacks == [other] and not hasattr(trainer, "GreetCB")


@pytest.mark.shows("ISA-35", "ISA-36", "NEMO-01", "AIT-01")
@pytest.mark.parametrize(
    "ending",
    [None, ValueError("oops"), KeyboardInterrupt(), CancelFitException("enough")],
    ids=lambda o: type(o).__name__,
)
def test_after_callbacks_for_one_fit_the_trainer_is_exactly_as_before(ending):
    "In the list and among the attributes, however the fit ended"

    def before_batch(self, trainer):
        if ending is not None:
            raise ending

    mine, guest, group = (
        OtherCB(),
        GreetCB(),
        callback("GroupCB", callbacks=[callback("MemberCB", before_batch=before_batch)]),
    )
    trainer = make_trainer(BasicTrainCB(), mine)
    trainer.fit(1)
    callbacks, names = list(trainer.callbacks), set(dir(trainer))
    error = None
    try:
        trainer.fit(1, callbacks=[guest, None, group])
    except (ValueError, KeyboardInterrupt) as e:
        error = e
    assert error is (None if isinstance(ending, CancelFitException) else ending)
    assert (
        trainer.callbacks == callbacks
        and trainer.OtherCB is mine
        and set(dir(trainer)) - {"preds", "loss"} == names - {"preds", "loss"}
    )
    assert not any(hasattr(trainer, o) for o in ("GreetCB", "GroupCB", "MemberCB"))


@pytest.mark.shows("ISA-37")
def test_a_group_brings_its_callbacks_and_may_act_itself():
    "Recursively; the group comes before its members"
    diary = []

    def noting(name, **members):
        return callback(name, before_fit=lambda self, trainer: diary.append(name), **members)

    inner = noting("Inner", callbacks=[noting("Deep")])
    bare = callback("Bare", callbacks=[noting("Last")])
    trainer = make_trainer(noting("Outer", callbacks=[inner, noting("Side")]), bare)
    trainer.fit(0)
    assert diary == ["Outer", "Inner", "Deep", "Side", "Last"]
    assert all(hasattr(trainer, o) for o in ("Outer", "Inner", "Deep", "Side", "Bare", "Last"))


@pytest.mark.shows("ISA-44")
@pytest.mark.parametrize(
    "other", [MomentumTrainCB, type("OwnTrainCB", (BasicTrainCB,), {})], ids=lambda o: o.__name__
)
def test_training_twice_in_one_loop_is_noticed(other):
    "A provider and its subclass together would step twice in silence"
    trainer = make_trainer(BasicTrainCB(), other())
    before = trainer.model.weight.clone()
    with pytest.raises(
        ValueError,
        match=f"`BasicTrainCB` and `{other.__name__}` both have `predict`.*Leave out `BasicTrainCB`",
    ):
        trainer.fit(1)
    assert torch.equal(trainer.model.weight, before)


# Metrics


@pytest.mark.shows("MIN-05")
def test_values_of_training_and_validation_are_kept_apart():
    "Two passes, two sets of columns; unnamed metrics go by their class"
    batches = [(torch.eye(2), torch.tensor([0, 1]))]
    wrong = [(torch.eye(2), torch.tensor([1, 0]))]
    model = nn.Linear(2, 2)
    nn.init.eye_(model.weight)
    nn.init.zeros_(model.bias)
    trainer = Trainer(
        DataLoaders(batches, wrong),
        F.cross_entropy,
        optim.SGD,
        model,
        [BasicTrainCB(), MetricsCB(MulticlassAccuracy(), train_metrics=True)],
    )
    trainer.fit(1, lr=0)
    row = trainer.history[-1]
    assert (row["train_MulticlassAccuracy"], row["MulticlassAccuracy"]) == (1, 0) and row["train_loss"] < row[
        "valid_loss"
    ]


@pytest.mark.shows("MIN-01", "NEMO-07", "AIT-06", "AIT-11")
def test_there_are_events_after_each_step():
    "In their places; the last one only after an update that really happened"
    events = [
        "predict",
        "after_predict",
        "get_loss",
        "after_get_loss",
        "backward",
        "after_backward",
        "step",
        "after_step",
        "zero_grad",
    ]
    diary, cb = diary_of(events)
    make_trainer(cb).fit(1, valid=False)
    assert diary == events * 3


# The tutorial


@inplace
def to_tensors(rows):
    rows["image"] = [image_to_tensor(o) for o in rows["image"]]


def digit_loaders():
    digits = sample_dataset_dict(load_digits(), (500, 300)).with_transform(to_tensors)
    return DataLoaders.from_dataset_dict({name: list(ds) for name, ds in digits.items()}, batch_size=64)


@pytest.mark.shows("ISA-108", "ISA-109")
def test_the_basic_trainer_of_the_tutorial_learns_and_prints_a_dict_per_epoch(capsys):
    "Losses fall and accuracy rises; `DeviceCB` stands last and works first"
    diary = []

    class LastCB(DeviceCB):
        def before_fit(self, trainer):
            diary.append("device")
            super().before_fit(trainer)

    class NotedCB(MetricsCB):
        def before_fit(self, trainer):
            diary.append("metrics")
            super().before_fit(trainer)

    trainer = Trainer(
        digit_loaders(),
        F.cross_entropy,
        optim.Adam,
        SimpleNet(64, 100, 10),
        [BasicTrainCB(), NotedCB(Accuracy=MulticlassAccuracy(), show="dict"), LastCB()],
    )
    trainer.fit(3, lr=3e-3)
    printed = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(o) for o in printed] == [["Accuracy", "train_loss", "valid_loss", "epoch", "elapsed"]] * 3
    columns = {name: [float(o[name]) for o in printed] for name in ("Accuracy", "train_loss", "valid_loss")}
    for name in ("train_loss", "valid_loss"):
        assert columns[name] == sorted(columns[name], reverse=True) and columns[name][-1] < columns[name][0]
    assert columns["Accuracy"][0] < columns["Accuracy"][-1] and columns["Accuracy"][-1] > 0.6
    assert diary == ["device", "metrics"]


@pytest.mark.shows("ISA-117")
def test_the_tutorial_has_its_chapters():
    "In their order, each with code that was run"
    cells = json.loads((TUTORIALS / "callbacks.ipynb").read_text())["cells"]
    chapters, ran = [], {}
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and source.startswith("## "):
            chapters.append(source.splitlines()[0][3:].replace("`", "").lower())
        elif cell["cell_type"] == "code" and cell["outputs"]:
            ran[chapters[-1]] = True
    assert chapters == [
        "setup",
        "basic trainer",
        "one batch",
        "run_callbacks",
        "with_cbs",
        "other callbacks",
        "available events",
        "cancel exceptions",
        "inheritance",
    ]
    assert all(ran[o] for o in chapters)
