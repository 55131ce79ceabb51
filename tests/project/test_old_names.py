"""Old words, `basics/old_names.py`: each is an error that names ours, and what it names is there."""

import inspect
import re
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import isaac_loop
import isaac_loop.all as everything
from isaac_loop import DataLoaders, Trainer
from isaac_loop.basics.old_names import ATTRIBUTES, EVENT_NAMES, KEYWORDS, NAMES, OF_TRAINER
from isaac_loop.loop.events import EVENTS
from isaac_loop.loop.shared_attributes import STATE

from named import wrong

TABLES = {"names": NAMES, "of a trainer": OF_TRAINER, "events": EVENT_NAMES} | KEYWORDS | ATTRIBUTES
EXAMPLES = {  # The shortest calls that make one of each
    "MetricsCB": lambda cls, **kwargs: cls(**kwargs),
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
    "What stands in a table as `name`: a class or function, or a method of the trainer"
    return vars(everything).get(name) or getattr(Trainer, name)


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
shell.run_cell("nonsense")
shell.run_cell("1/0")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("isaac_loop has no")]
    assert said == [f"isaac_loop has no `Learner`. Here it is {NAMES['Learner']}."]
