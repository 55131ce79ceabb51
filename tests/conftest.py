"""Every test begins with the same random numbers and without figures, whichever ran before it.

Their files lie in memory where there is room for that: what the library writes it also syncs, and a disk
takes longer for it than many a test for all else.

Laws over random cases take the same cases each time, so that a failure is the fault of the change it came
with. `make torture` tries others: `HYPOTHESIS_PROFILE=others`.
"""

import gc
import os
import shutil
import sys

import pytest
from hypothesis import settings

from isaac_loop.basics.tensors import set_seed

settings.register_profile("same", derandomize=True)
settings.register_profile("others", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

MEMORY = "/dev/shm"  # Of Linux; in containers it may be small
if os.path.isdir(MEMORY) and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


@pytest.fixture(autouse=True)
def same_random_numbers():
    set_seed(0)


@pytest.fixture(autouse=True)
def no_figure_left():
    "Some tests count the figures that are open"
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


def set_aside():
    "Collecting garbage looks through what tests make, and not each time through all modules and all tests"
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    set_aside()


def pytest_runtest_teardown(item, nextitem):
    "After a file whose tests have loaded large libraries"
    is_last = nextitem is None or nextitem.path != item.path
    if is_last and len(gc.get_objects()) > 100_000:
        set_aside()
