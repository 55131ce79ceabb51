"Every test begins with the same random numbers, whichever ran before it."
import pytest

from isaac_loop.tensors import set_seed


@pytest.fixture(autouse=True)
def same_random_numbers():
    set_seed(0)
