"""Old words, `basics/old_names.py`: each is an error that names ours, and what it names is there."""

import inspect
import re
import subprocess
import sys
import warnings
from importlib import import_module

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import isaac_loop
import isaac_loop.all as everything
from isaac_loop import DataLoaders, Trainer
from isaac_loop.basics.old_names import ATTRIBUTES, EVENT_NAMES, FLAGS, KEYWORDS, NAMES, OF_TRAINER
from isaac_loop.loop.events import EVENTS
from isaac_loop.loop.shared_attributes import STATE

from named import wrong

TABLES = {"names": NAMES, "of a trainer": OF_TRAINER, "events": EVENT_NAMES, "flags": FLAGS}
TABLES |= {f"keywords of {name}": words for name, words in KEYWORDS.items()}
TABLES |= {f"attributes of {name}": words for name, words in ATTRIBUTES.items()}
EXAMPLES = {  # The shortest calls that make one of each
    "DataLoaders": lambda cls, **kwargs: cls([(torch.ones(4, 2), torch.ones(4, 1))], **kwargs),
    "HooksCallback": lambda cls, **kwargs: cls(print, **kwargs),
    "RecorderCB": lambda cls, **kwargs: cls(loss=lambda trainer: trainer.loss, **kwargs),
    "BatchTransformCB": lambda cls, **kwargs: cls(print, **kwargs),
    "BatchSchedulerCB": lambda cls, **kwargs: cls(optim.lr_scheduler.ExponentialLR, **kwargs),
    "EpochSchedulerCB": lambda cls, **kwargs: cls(optim.lr_scheduler.ExponentialLR, **kwargs),
}


def make_trainer(callbacks=None, cls=Trainer, **kwargs):
    dls = DataLoaders([(torch.ones(4, 2), torch.ones(4, 1))])
    return cls(dls, F.mse_loss, optim.SGD, nn.Linear(2, 1), callbacks, **kwargs)


def known(name):
    "What stands in a table as `name`: a class or function, or a method of the trainer or of the loaders"
    return vars(everything).get(name) or getattr(Trainer, name, None) or getattr(DataLoaders, name)


def made(name, **kwargs):
    "An object of the class `name`"
    cls = known(name)
    return EXAMPLES.get(name, lambda cls, **kwargs: cls(**kwargs))(cls, **kwargs)


def rows(table):
    "Each name of a nested table with each of its words"
    return [(name, word) for name, words in table.items() for word in words]


@pytest.mark.parametrize("table", TABLES)
def test_what_stands_on_the_right_is_there_and_takes_these_arguments(table):
    codes = {code for phrase in TABLES[table].values() for code in re.findall("`([^`]+)`", phrase)}
    foreign = re.compile(r"\b(get_image_files|folder\.glob)\b")
    found = {code: why for code in codes if not foreign.search(code) and (why := wrong(code))}
    assert found == {}


def test_no_old_word_is_one_of_ours():
    "Otherwise the table would explain away what is there"
    ours = {*vars(everything), *dir(isaac_loop)}
    assert not ours & NAMES.keys()
    assert not {*dir(Trainer), *STATE} & OF_TRAINER.keys()
    assert not {*EVENTS} & EVENT_NAMES.keys()
    for name, word in rows(KEYWORDS):
        assert word not in inspect.signature(known(name)).parameters, (name, word)
    for name, word in rows(ATTRIBUTES):
        assert word not in dir(made(name)), (name, word)


@pytest.mark.parametrize("word", NAMES)
def test_a_name_is_explained_where_it_is_asked_for_or_imported(word):
    with pytest.raises(AttributeError) as asked:
        getattr(isaac_loop.callbacks, word)
    with pytest.raises(ImportError) as imported:
        exec(f"from isaac_loop import {word}")
    for caught in (asked, imported):
        assert str(caught.value).endswith(f"has no attribute '{word}'. Here it is {NAMES[word]}.")


def test_a_name_that_is_elsewhere_is_said_to_be_there():
    with pytest.raises(ImportError, match="no attribute 'EarlyStoppingCB'. It is in `isaac_loop.callbacks`."):
        exec("from isaac_loop import EarlyStoppingCB")
    with pytest.raises(ImportError, match="It is in `isaac_loop.show`."):
        exec("from isaac_loop.stop import plot_history")
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        exec("from isaac_loop import Nonsense")
    assert not hasattr(isaac_loop, "Learner") and not hasattr(isaac_loop.stop, "Learner")
    assert import_module("isaac_loop.stop.early_stopping") is vars(isaac_loop.stop)["early_stopping"]
    exec("from isaac_loop.basics import old_names")


@pytest.mark.parametrize(
    "word, ours",
    [
        ("ModelCheckpoint", "CheckpointCB"),  # It was `Checkpoint`, which only reads what is saved
        ("SaveModelCallback", "CheckpointCB"),
        ("EarlyStopping", "EarlyStoppingCB"),
        ("LearningRateMonitor", "LoggerCB"),
        ("ReduceLROnPlateau", "PlateauSchedulerCB"),
        ("CSVLogger", "LoggerCB"),
        ("TensorBoardLogger", "LoggerCB"),
        ("GradientAccumulation", "AccumulationCB"),
        ("StochasticWeightAveraging", "SWACB"),
        ("ModelEmaCallback", "EMACB"),
        ("TerminateOnNaN", "NonFiniteStopCB"),
        ("MixedPrecision", "MixedPrecisionCB"),
        ("GradientClip", "ClipGradCB"),
        ("ProgressBar", "ProgressCB"),
        ("RichProgressBar", "ProgressCB"),
        ("Timer", "LimitCB"),
        ("LearnerCallback", "Callback"),
        ("Learner", "Trainer"),
        ("DataBlock", "DataLoaders"),
        ("DataLoader", "torch.utils.data.DataLoader"),
        ("LightningModule", "Trainer"),
        ("LearningRateFinder", "trainer.lr_find"),
        ("EMACallback", "EMACB"),
        ("MetricsCallback", "MetricsCB"),
        ("SWA", "SWACB"),
        ("RNNCallback", None),  # No `Callback` misspelt
        ("NetworkCheckpoint", None),
    ],
)
def test_what_others_call_otherwise_is_told_by_the_name_of_what_does_the_same(word, ours):
    with pytest.raises(AttributeError) as caught:
        getattr(everything, word)
    named = re.findall(r"`([\w.]+)", str(caught.value))
    assert ours in named if ours else not named


def test_an_import_from_anywhere_says_so(tmp_path):
    "From a module that is no folder, too; Python's own message would take its place"
    for line, end in (
        (
            "from isaac_loop.all import Learner",
            "Here it is `Trainer(dls, loss_func, opt_func, model, callbacks)`.",
        ),
        ("from isaac_loop.callbacks import TrainCB", "for several inputs."),
        ("from isaac_loop.callbacks import DataLoaders", "It is in `isaac_loop`."),
        ("import isaac_loop.all as il; il.SingleBatchCB", "Here it is `OneBatchCB()`."),
    ):
        (tmp_path / "script.py").write_text(line)
        done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True)
        assert end in done.stderr.splitlines()[-1]


def test_arguments_that_are_missing_are_told_in_their_order():
    "Python's error, with a note for each keyword of another library; other errors have none"
    with pytest.raises(TypeError, match="missing 4 required") as caught:
        Trainer(model=nn.Linear(1, 1), optimizer=optim.Adam, loss=F.mse_loss, train_dataloader=[])
    *words, order = caught.value.__notes__
    assert words == [
        "What others call `optimizer` is `opt_func` here.",
        "What others call `loss` is `loss_func` here.",
        "What others call `train_dataloader` is `DataLoaders(train, valid)` here.",
    ]
    assert order.startswith("The order is `Trainer(dls, loss_func, opt_func, model, callbacks)`")
    assert re.search(r"`(Trainer\(.+?\))`", order)[1] == f"Trainer{inspect.signature(Trainer)}".replace(
        ", **kwargs", ""
    )
    with pytest.raises(TypeError) as caught:
        make_trainer(cls=type("Own", (Trainer,), {"subclassing_method": lambda self, cbs: len(3)}), cbs=1)
    assert not hasattr(caught.value, "__notes__"), "a keyword of one's own is nobody else's"


@pytest.mark.parametrize("word", FLAGS)
def test_a_flag_of_fastais_callbacks_is_noticed(word):
    "A helper that is called so is one's own"
    members = {word: False, "after_batch": lambda self, trainer: None}
    with pytest.warns(UserWarning, match=f"does not look at `OldCB.{word}`") as caught:
        make_trainer(type("OldCB", (), members)())
    assert str(caught[0].message).endswith(f"Here it is {FLAGS[word]}.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer(type("OldCB", (), members | {word: lambda self: None})())


def test_all_events_of_a_class_are_told_at_once():
    callback = type("OldCB", (), {o: lambda self, trainer: None for o in ("after_pred", "after_loss")})()
    with pytest.raises(ValueError, match="`after_get_loss`.*Nor is `OldCB.after_pred`. Here it is"):
        make_trainer(callback)


def test_a_callback_that_asks_for_its_learner_is_told_where_the_trainer_is():
    class OldCB:
        def after_batch(self, trainer):
            return self.learn.loss

    class OtherCB:
        def after_batch(self, trainer):
            return trainer.model.learn

    for callback, told in ((OldCB(), True), (OtherCB(), False)):
        with pytest.raises(AttributeError) as caught:
            make_trainer([everything.BasicTrainCB(), callback]).fit(1, valid=False)
        assert (
            any(o.startswith("`self.learn` is for callbacks of fastai") for o in caught.value.__notes__)
            == told
        )


def test_parts_of_a_batch_that_are_set_in_vain_are_noticed():
    def before_batch(trainer):
        trainer.xb = trainer.batch[:1]

    with pytest.warns(UserWarning, match="model and loss get what stands in `trainer.batch`"):
        make_trainer([everything.BasicTrainCB(), before_batch]).fit(1, valid=False)


@pytest.mark.parametrize("word", OF_TRAINER)
def test_an_attribute_of_a_trainer_is_explained(word):
    with pytest.raises(AttributeError) as caught:
        getattr(make_trainer(), word)
    assert str(caught.value).endswith(f"`{word}`. Here it is {OF_TRAINER[word]}.")


@pytest.mark.parametrize("name, word", rows(KEYWORDS))
def test_a_keyword_is_explained_and_the_one_named_instead_exists(name, word):
    with pytest.raises(TypeError) as caught:
        if name in ("Trainer", "MomentumTrainer"):
            make_trainer(cls=known(name), **{word: 1})
        elif hasattr(Trainer, name):
            getattr(make_trainer(), name)(**{word: 1})
        else:
            made(name, **{word: 1})
    phrase = KEYWORDS[name][word]
    assert f"got the keyword `{word}`" in str(caught.value)
    assert str(caught.value).endswith(f"Here it is {phrase}.")
    instead = re.fullmatch(r"`(\w+)(=.*)?`", phrase)
    if instead and not hasattr(everything, instead[1]):
        taken = inspect.signature(known(name)).parameters
        assert instead[1] in taken or name == "get_grid" and instead[1] == "suptitle", "it passes it on"


@pytest.mark.parametrize("name, word", rows(ATTRIBUTES))
def test_an_attribute_of_a_callback_is_explained_and_the_one_named_instead_exists(name, word):
    callback, phrase = made(name), ATTRIBUTES[name][word]
    with pytest.raises(AttributeError) as caught:
        getattr(callback, word)
    assert str(caught.value) == f"`{name}` has no attribute `{word}`. Here it is {phrase}."
    instead = re.fullmatch(r"`(\w+)`", phrase)
    assert not instead or hasattr(callback, instead[1])


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_marked_class_is_otherwise_as_it_was(name):
    "An attribute that nobody ever had is missing as usual, in a subclass too"
    callback = made(name)
    with pytest.raises(AttributeError, match=f"`{name}` has no attribute `nothing`.$"):
        callback.nothing  # noqa: B018
    assert getattr(callback, "nothing", None) is None
    cls = type("Own" + name, (known(name),), {})
    assert cls.__init__ is known(name).__init__ and inspect.signature(cls) == inspect.signature(known(name))


def test_errors_inside_a_property_and_attributes_of_a_second_base_are_their_own():
    class Mine(everything.MetricsCB):
        @property
        def best(self):
            return self.no_such.value

    with pytest.raises(AttributeError, match="`Mine` has no attribute `no_such`"):
        Mine().best  # noqa: B018

    class Net(everything.RecorderCB, nn.Module):
        def __init__(self):
            nn.Module.__init__(self)
            everything.RecorderCB.__init__(self)
            self.lin = nn.Linear(2, 2)

    assert isinstance(Net().lin, nn.Linear)
    with pytest.raises(AttributeError, match="Here it is"):
        Net().recs  # noqa: B018


def test_a_keyword_that_is_misspelt_has_a_hint():
    with pytest.raises(TypeError, match="patiance") as caught:
        everything.EarlyStoppingCB(patiance=3)
    assert caught.value.__notes__ == ["Did you mean `patience`?"]


def test_an_old_event_beside_a_known_one_is_refused():
    members = {o: lambda self, trainer: None for o in ("begin_fit", "after_batch")}
    with pytest.raises(ValueError, match="`OldCB.begin_fit` is not an event.*Here it is `before_fit`"):
        make_trainer(type("OldCB", (), members)())


@pytest.mark.parametrize("word", EVENT_NAMES)
def test_an_event_is_explained(word):
    callback = type("OldCB", (), {word: lambda self, trainer: None})()
    with pytest.raises(ValueError) as caught:
        make_trainer(callback)
    assert f"`OldCB.{word}` is not an event" in str(caught.value)
    assert f"Here it is {EVENT_NAMES[word]}." in str(caught.value)


def test_a_notebook_says_what_a_name_is_called_here():
    "Below the error, once, however often the library is loaded; other errors are left alone"
    code = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor", history_manager=None)
shell.history_manager.enabled = False
shell.run_cell("from isaac_loop.all import *")
shell.run_cell("import importlib, isaac_loop; importlib.reload(isaac_loop)")
shell.run_cell("Learner(1)")
shell.run_cell("DataLoaders.from_dd")
shell.run_cell("nonsense")
shell.run_cell("1/0")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("isaac_loop has no")]
    assert said == [
        f"isaac_loop has no `Learner`. Here it is {NAMES['Learner']}.",
        "isaac_loop has no `from_dd`. Here it is `DataLoaders.from_dataset_dict`.",
    ]
