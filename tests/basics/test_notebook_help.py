"""Help in a notebook, `basics/notebook_help.py`: what IPython answers, in a process of its own."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import isaac_loop.all
from isaac_loop.basics.notebook_help import _answer, commented_signature, is_ours

START = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor", history_manager=None)
shell.history_manager.enabled = False
def help(name, **options): return shell.object_inspect_mime(name, **options)["text/plain"]
"""


def ask(code):
    "What a new process with an IPython shell prints"
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_shows_what_each_parameter_means_as_soon_as_the_library_is_imported():
    "For classes, functions, methods, methods of an object, and those that are patched on"
    shown = ask("""
shell.run_cell("from isaac_loop.all import *; trainer = Trainer([], None, None, None, None)")
for name in ("Trainer", "ProgressCB", "plot_history", "Trainer.fit", "trainer.fit", "trainer.get_preds"):
    print(help(name))
""")
    for comment in (
        "    model, # What to train\n",
        "    seconds:float=0.25, # Least time between two redraws; between plain lines it is at least 10\n",
        "    names=None, # Columns to draw, a list or one name; default: all losses and metrics\n",
        "    keep_opt:bool=False, # Go on with the last optimizer?",
        "with_loss:bool=False, #",
    ):
        assert comment in shown
    assert shown.count("Train and validate for `n_epochs`") == 2 and "Runs `fit`, epochs and batches" in shown
    assert "Init signature:\nTrainer(" in shown and "trainer.py" in shown


def test_help_about_anything_else_is_as_before():
    "Also the source, of ours, behind two question marks, and an object of ours"
    code = """
shell.run_cell("import torch; from isaac_loop import set_seed, Table; table = Table([dict(a=1)])")
def mine(x): # Of the user
    "Do it"
shell.user_ns["mine"] = mine
for name in ("print", "torch.nn.Linear", "mine", "table"): print(help(name))
print(help("set_seed", detail_level=1))
"""
    without = "shell.inspector.mime_hooks.clear()\n"
    first, rest = code.strip().split("\n", 1)
    assert ask(code) == ask(first + "\n" + without + rest)


def test_a_hook_of_somebody_else_is_asked_for_what_is_not_ours_and_ours_hangs_there_once():
    shown = ask("""
shell.inspector.mime_hooks["text/plain"] = lambda data: [("Theirs", data.obj.__name__)]
import isaac_loop
from isaac_loop.basics.notebook_help import show_docments
show_docments(shell)
shell.run_cell("from isaac_loop import set_seed")
print(help("print"), help("set_seed"), sep="\\n")
hook = shell.inspector.mime_hooks["text/plain"]
print(hook.keywords["before"].__name__, len(shell.inspector.mime_hooks))
""")
    assert shown.startswith("Theirs: print\nSignature:\nset_seed(")
    assert shown.endswith("<lambda> 2\n")


def test_without_ipython_nothing_is_imported_for_it():
    "And without a shell, as in a script that imports IPython for something else, nothing happens"
    heavy = "IPython", "fastcore", "isaac_loop.basics.notebook_help"
    code = f"import sys, isaac_loop; print([o for o in {heavy} if o in sys.modules])"
    for before, found in (("", []), ("import IPython; ", ["IPython"])):
        done = subprocess.run([sys.executable, "-c", before + code], capture_output=True, text=True)
        assert done.stdout == f"{found}\n", done.stderr


def public():
    "What `from isaac_loop.all import *` brings of ours"
    return {name: obj for name, obj in vars(isaac_loop.all).items() if is_ours(obj) and name[0] != "_"}


@pytest.mark.parametrize("name", sorted(public()))
def test_whatever_one_types_has_a_signature_with_comments(name):
    obj = public()[name]
    signature = commented_signature(obj)
    assert signature.startswith(f"{obj.__name__}(") and "NoneType=None" not in signature
    data = SimpleNamespace(
        obj=obj, info_dict=dict(docstring="said", file="f", type_name="t"), detail_level=0, omit_sections=()
    )
    pairs = _answer(data, show=str, before=None)
    assert all(type(o) is tuple and len(o) == 2 and all(type(text) is str for text in o) for o in pairs)
