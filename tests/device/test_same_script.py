"""One script, started in each way that starts several processes: weights and losses are those of one.

Each way runs in processes of its own, as it does for a user.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "same_script.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SLOW = pytest.mark.skipif(
    "HYPOTHESIS_PROFILE" not in os.environ, reason="takes 5 to 40 s; `make torture` runs it"
)


def results(tmp_path, *before, after=(), **environment):
    "What the script has written"
    out = tmp_path / "out.json"
    command = [*(before or [sys.executable]), str(SCRIPT), str(out), *after]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def check_same(found, size, tmp_path):
    "The weights of `found` are those that one process ends with"
    from same_script import train

    train({"with": "distributed", "out": str(tmp_path / "one.json")})
    one = json.loads((tmp_path / "one.json").read_text())
    assert (one["size"], found["size"]) == (1, size)
    assert found["weights"] == pytest.approx(one["weights"], abs=1e-12)
    assert sum(found["losses"], []) == pytest.approx(sum(one["losses"], []), abs=1e-12)


@pytest.fixture(autouse=True)
def script_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


@pytest.mark.processes
def test_by_torchrun(tmp_path):
    check_same(results(tmp_path, *TORCHRUN), 2, tmp_path)


@SLOW
@pytest.mark.processes
def test_by_launch(tmp_path):
    check_same(results(tmp_path, after=["--launch", "2"]), 2, tmp_path)


@SLOW
@pytest.mark.processes
def test_by_torchrun_with_accelerate(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    after = ["--with", "accelerate"]
    check_same(results(tmp_path, *TORCHRUN, after=after, ACCELERATE_USE_CPU="true"), 2, tmp_path)


@SLOW
@pytest.mark.processes
def test_by_accelerate_which_starts_one_process_on_a_cpu(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    check_same(results(tmp_path, *command, after=["--with", "accelerate"]), 1, tmp_path)


@SLOW
@pytest.mark.processes
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: `pip install 'isaac_loop[ray]'`")
def test_by_ray_train(tmp_path):
    check_same(results(tmp_path, after=["--ray", "2"], RAY_AUTH_MODE="disabled"), 2, tmp_path)
