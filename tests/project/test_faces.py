"""What the library promises by name: what each folder's face lists, and what is brought when somebody asks.

A name that comes, goes or moves to another face changes a list on this page, so that it is a decision.
"""

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from types import ModuleType

import pytest

from isaac_loop.loop.methods_on_demand import ELSEWHERE
from places import ROOT, TUTORIALS

FACES = {
    "": """
        CancelBatchException CancelEpochException CancelFitException CancelStepException
        DataLoaders History Order replaces set_seed Table Trainer with_cbs
    """,
    "basics": """
        def_device default_device inplace map_tensors set_seed Table to_cpu to_device
    """,
    "loop": """
        Callback CancelBatchException CancelEpochException CancelException CancelFitException
        CancelStepException DeviceRecord History init_delegates Monitor Order Ranks
        replaces Trainer with_cbs
    """,
    "models": """
        conv find_modules GeneralRelu get_model_conv get_model_fc get_model_timm Hook Hooks init_weights
        lsuv_init plot_func SimpleNet
    """,
    "data": """
        albumentations_transform BatchAugmentationCB BatchTransformCB collate_rows CutMixCB DataLoaders
        each_image exact_loader ExactLoader get_dataloaders image_to_tensor load_digits MixUpCB
        ProgressiveResizeCB RandCopy RandErase ReplayLoader sample_dataset_dict SeededBatchSampler
        WorkerCrashed
    """,
    "state": """
        Checkpoint CheckpointCorrupt CheckpointFolderBusy CheckpointFormatTooNew CheckpointStore
        CheckpointWriteFailed load_weights LoopError NoValidCheckpoint RankFailed RanksDiffer
        RanksDiverged ResumeMismatch Snapshot StateOwnerMissing UnsaveableState WorldSizeMismatch
    """,
    "device": "AccelerateCB clean_memory CompileCB DeviceCB DistributedCB launch MixedPrecisionCB",
    "train": """
        AccumulationCB BasicTrainCB BatchNormEvalCB ClipGradCB discriminative_rates EMACB FreezeCB
        layer_groups loss_per_example MomentumTrainCB NBatchCB OneBatchCB SWACB
    """,
    "schedule": """
        AttributeSchedulerCB BatchSchedulerCB EpochSchedulerCB OneCycleSchedulerCB piecewise
        PlateauSchedulerCB StepSchedulerCB WarmupSchedulerCB WSDSchedulerCB
    """,
    "tune": "LRFinderCB",
    "metrics": """
        bootstrap EpochTimeCB Estimates MeanOf MetricOn MetricsCB RecorderCB
    """,
    "show": """
        DerivedColumnsCB get_grid history_figure LivePlotCB plot_history PrintColumnsCB ProgressCB
        RenameColumnsCB show_image show_images subplots UnNormalize
    """,
    "stop": """
        EarlyStoppingCB InterruptCB LimitCB LossSpikeCB NonFiniteStopCB SamePredictionsCB
    """,
    "inspection": """
        Ablation ActivationStatsCB BlackBoxCB BrokenPromise callback_table CallbackReport CheckFailed
        compare Comparison event_table Findings GradientPlotCB GradientStatsCB HooksCallback LoopMap
        Moment Moments NonFiniteCB ProfilerCB Replay Script show_source state_table summarize_model
        Swap TimesCB Trace try_callback UpdateRatioCB Walk
    """,
    "evaluate": """
        binary_scores CapturePredsCB char_error_rate classification_scores DropoutOnCB EvaluatorCB
        Predictions PredictionsCSVCB regression_scores ReportCB text_scores TextComparisonCB token_rows
        word_error_rate write_preds_csv
    """,
    "checkpoints": "CheckpointCB ExportCB KeepBestCB RewindCB",
    "log": """
        CSV Email ExperimentCB fetch HistoryFilesCB JSONLines LoggerCB MLflow NotifyCB Screen SQLite
        TensorBoard TrackingCB Trackio UploadCB WandB
    """,
    "recipes": "CoreCBs digit_loaders digit_trainer MomentumTrainer",
    "interop": "adapt",
}

# Everything that a folder lists and that ends like a callback
FACES["callbacks"] = " ".join(
    sorted(name for names in FACES.values() for name in names.split() if name.endswith("CB"))
)

MACHINERY = {  # Names without an underscore that a face leaves to their module
    "loop": """
        BatchRecord callback_name check_keywords check_monitored delegated_parameters EVENTS histogram
        is_replacing MEDIA OFFERS offered offering place_of Span SPANS STEPS
    """,
    "models": "first_tensor probing",
    "data": "in_order",
    "state": """
        bare check_fits check_states checkpoints_near Experiment experiment_of from_plain
        of_content opt_defaults places_of plain plain_random_state put_callbacks put_frozen
        put_generators put_held put_position put_random put_state put_weights cut_names load_weights_into
        random_state run_folder set_plain_random_state set_random_state stateful_callbacks
        take_callbacks take_parts take_state
    """,
    "tune": "smooth suggest_rates",
    "show": "image_array media_file smoothed wav_bytes",
    "inspection": "ActivationStats GradientStats LoopTimes",
    "evaluate": "join_batches",
    "checkpoints": "evaluated_model",
    "log": """
        git_state run_map RunConfig table_text write_csv write_jsonl write_sqlite
    """,
}

FOLDERS = [o for o in FACES if o not in ("", "callbacks")]


def face(name):
    return importlib.import_module(f"isaac_loop.{name}".rstrip("."))


def modules(folder):
    "Names of the modules in a folder"
    return [o.stem for o in sorted((ROOT / "isaac_loop" / folder).glob("*.py")) if o.stem != "__init__"]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", FACES)
def test_a_face_lists_these_names_and_no_other(name):
    assert sorted(face(name).__all__) == sorted(FACES[name].split())
    assert set(face(name).__all__) <= set(dir(face(name)))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_name_of_a_module_is_in_the_face_of_its_folder_or_deliberately_not(folder):
    public = {name: o for o in modules(folder) for name in face(f"{folder}.{o}").__all__ if "." not in name}
    listed, machinery = set(FACES[folder].split()), set(MACHINERY.get(folder, "").split())
    assert not listed & machinery
    undecided = set(public) ^ (listed | machinery)
    assert not undecided, "Put a new name into the face of its folder, or call it machinery"
    for name in listed:
        assert getattr(face(folder), name) is getattr(face(f"{folder}.{public[name]}"), name)


@pytest.mark.parametrize("name", FACES)
def test_type_checkers_see_what_is_loaded(name):
    "Each line is `from module import name as name`, which is public to them, and gives what it says"
    tree = ast.parse(open(face(name).__file__).read())
    (block,) = [o for o in tree.body if isinstance(o, ast.If)]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    assert ast.unparse(block.orelse) == "__getattr__, __dir__ = lazy(__name__)"
    for node in block.body:
        (alias,) = node.names
        assert isinstance(node, ast.ImportFrom) and node.level == 1 and alias.asname == alias.name
        module = importlib.import_module(f".{node.module or alias.name}", face(name).__package__)
        assert getattr(face(name), alias.name) is (getattr(module, alias.name) if node.module else module)


@pytest.mark.parametrize("name", FACES)
def test_no_name_of_a_face_is_that_of_a_module_beside_it(name):
    "Python sets a module as an attribute of its folder when it is imported; it would hide the name"
    folder = ROOT / "isaac_loop" / ("" if name == "callbacks" else name)
    assert not {o.stem for o in folder.iterdir()} & set(FACES[name].split())
    assert not any(isinstance(getattr(face(name), o), ModuleType) for o in FACES[name].split())


def test_folders_are_there_without_importing_them():
    code = "import isaac_loop; print(*(getattr(isaac_loop, o).__name__ for o in {}))"
    faces = [*FOLDERS, "callbacks"]
    assert run(code.format(faces)).split() == [f"isaac_loop.{o}" for o in faces]
    assert set(faces) <= set(dir(face("")))


def test_the_face_of_all_callbacks_is_as_the_tool_writes_it():
    "Run `tools/list_callbacks.py` after a folder has a new one"
    spec = importlib.util.spec_from_file_location("list_callbacks", ROOT / "tools" / "list_callbacks.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.FACE.read_text() == tool.face()


def test_all_is_what_the_folders_list():
    namespace = {}
    exec("from isaac_loop.all import *", namespace)
    assert set(namespace) - {"__builtins__"} == {o for folder in FOLDERS for o in FACES[folder].split()}


def test_no_name_is_in_two_folders():
    names = [o for folder in FOLDERS for o in (FACES[folder] + " " + MACHINERY.get(folder, "")).split()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", FACES)
def test_a_face_costs_nothing_before_it_is_asked(name):
    module = f"isaac_loop.{name}".rstrip(".")
    assert run(f"import sys, {module}; dir({module}); print('torch' in sys.modules)") == "False\n"


def test_a_face_loads_no_more_than_the_name_needs():
    code = "import sys; from isaac_loop.stop import LimitCB; print(*sys.modules)"
    assert [o for o in run(code).split() if "isaac_loop.stop." in o] == ["isaac_loop.stop.limits"]


def test_a_wrong_name_is_an_error():
    with pytest.raises(ImportError, match="no attribute 'EarlyStopingCB'. Did you mean `EarlyStoppingCB`"):
        exec("from isaac_loop.stop import EarlyStopingCB")
    with pytest.raises(ImportError, match="cannot import name 'Nonsense' from 'isaac_loop.stop'"):
        exec("from isaac_loop.stop import Nonsense")


def test_what_a_page_imports_by_face_is_there():
    "Also that of pages which no test executes"
    texts = [(ROOT / "README.md").read_text(), *(o.read_text() for o in TUTORIALS.glob("*.ipynb"))]
    for text in texts:
        for name, taken in re.findall(r"from isaac_loop\.?(\w*) import ([\w, ]+)", text):
            if name in FACES:
                assert {o.strip() for o in taken.split(",")} <= set(FACES[name].split())


# --- Methods that other modules bring


def added(cls):
    "What other modules have patched onto a class, and which they are"
    module = {name: (getattr(o, "fget", None) or o) for name, o in vars(cls).items()}
    module = {name: o.__module__ for name, o in module.items() if callable(o) and not name.startswith("__")}
    return {name: o.removeprefix("isaac_loop.") for name, o in module.items() if o != cls.__module__}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_methods_from_elsewhere_are_all_in_the_table(kind):
    "Private ones only where the loop itself calls them"
    for folder in FOLDERS:
        for module in modules(folder):
            face(f"{folder}.{module}")
    found = added(getattr(face("data" if kind == "DataLoaders" else "loop"), kind))
    public = {name: o for name, o in found.items() if not name.startswith("_")}
    private = {name: o for name, o in found.items() if name.startswith("_") and name in ELSEWHERE[kind]}
    assert public | private == ELSEWHERE[kind]


def test_methods_from_elsewhere_are_brought_when_somebody_asks():
    code = """
import json
from types import SimpleNamespace
from isaac_loop import DataLoaders, Trainer
from isaac_loop.loop.methods_on_demand import ELSEWHERE

trainer = Trainer(SimpleNamespace(), None, None, None, None)
found = {}
for owner in (trainer, DataLoaders([]), trainer.history):
    kind = type(owner).__name__
    for name, module in ELSEWHERE[kind].items():
        assert name in dir(owner), name
        try: getattr(owner, name)
        except Exception: pass # The configuration of an empty trainer
        method = vars(type(owner))[name]
        module = getattr(method, 'fget', method).__module__
        found.setdefault(kind, {})[name] = module.removeprefix('isaac_loop.')
try: trainer.history.latst
except AttributeError as e: print(json.dumps([found, str(e)]))
"""
    found, message = json.loads(run(code))
    assert found == ELSEWHERE
    assert "Did you mean `latest`?" in message


def test_a_subclass_may_override_a_method_from_elsewhere():
    code = """
from isaac_loop import Trainer

class Careful(Trainer):
    def save(self, path): return super().save.__module__

print(Careful(None, None, None, None, None).save('x'), 'save' in dir(Trainer))
"""
    assert run(code).split() == ["isaac_loop.checkpoints.save_and_load", "True"]


def test_a_method_that_somebody_has_put_in_place_of_one_from_elsewhere_stays():
    "Loading its module for another method put the library's back"
    code = """
from unittest import mock
from isaac_loop import Trainer

def mine(self, *args): return 'mine'

Trainer.save = mine
Trainer.load
print(Trainer.save is mine)
with mock.patch.object(Trainer, 'get_preds', mine):
    Trainer.validate, Trainer.epoch_preds
    print(Trainer.get_preds is mine)
print(Trainer.get_preds.__module__)
"""
    assert run(code).split() == ["True", "True", "isaac_loop.evaluate.predictions"]
