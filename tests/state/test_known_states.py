"States of random numbers that are read at once are those that would be read in full"

import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isaac_loop.state import random_numbers
from isaac_loop.state.random_numbers import random_state, same_random_state, set_random_state


def in_full():
    return {"python": random.getstate(), "numpy": np.random.get_state()}


def put_back(state):
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def check():
    ours, full = random_state(), in_full()
    assert ours["python"] == full["python"]
    assert all(np.array_equal(a, b) for a, b in zip(ours["numpy"], full["numpy"], strict=True))


DOINGS = {
    "draw": random.random,
    "draw a normal": lambda: random.gauss(0, 1),
    "seed": lambda: random.seed(3),
    "draw of numpy": np.random.rand,
    "draw a normal of numpy": np.random.randn,
    "draw normals of numpy": lambda: np.random.randn(2),
    "draw bytes of numpy": lambda: np.random.bytes(1),
    "draw a binomial": lambda: np.random.binomial(10, 0.5),
    "seed numpy": lambda: np.random.seed(3),
    "shuffle": lambda: np.random.shuffle([1, 2, 3]),
    "spoil what was given": lambda: random_state()["numpy"][1].fill(7),
}


@given(st.lists(st.sampled_from([*DOINGS, "keep", "put back", "put back ours", "look"]), max_size=12))
def test_a_state_is_that_of_now_whatever_was_done_before(doings):
    begin = in_full()
    kept = [begin]
    try:
        for what in doings:
            if what in DOINGS:
                DOINGS[what]()
            elif what == "keep":
                kept.append(in_full())
            elif what == "put back":
                put_back(kept[-1])
            elif what == "put back ours":
                set_random_state(random_state() | kept[-1])
                assert random.getstate() == kept[-1]["python"]
                assert np.array_equal(np.random.get_state()[1], kept[-1]["numpy"][1])
                assert np.random.get_state()[2:] == kept[-1]["numpy"][2:]
            else:
                check()
        check()
    finally:
        put_back(begin)


def test_the_second_of_two_normal_numbers_is_not_forgotten():
    "It leaves the 624 numbers and the place as they are"
    np.random.seed(0)
    np.random.randn()
    one_waits = np.random.get_state()
    expected = np.random.randn()
    check()  # What is known now has the same 624 numbers, and none that waits
    np.random.set_state(one_waits)
    before = random_state()
    assert np.random.randn() == expected
    assert not same_random_state(before, random_state())
    set_random_state(before)
    assert np.random.randn() == expected


def test_a_state_is_read_once_while_nobody_draws(monkeypatch):
    random_state()
    known = random_numbers._known_of_numpy(np.random.get_state)
    if known.known() is None:
        pytest.skip("NumPy's generator is of another kind")
    monkeypatch.setattr(known, "read", lambda: pytest.fail("It was read again"))
    random_state()
    set_random_state(random_state())


@pytest.mark.filterwarnings("ignore:get_state and legacy")
def test_another_kind_of_generator_is_read_each_time():
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        before = random_state()
        known = random_numbers._known_of_numpy(np.random.get_state)
        assert known.known() is None  # The memory of this kind was never tried out
        drawn = np.random.rand()
        assert not same_random_state(before, random_state())
        set_random_state(before)
        assert np.random.rand() == drawn
    finally:
        np.random.set_bit_generator(usual)
    check()


def test_a_draw_without_traces_is_found_out():
    dice = random.Random(0)
    dice.gauss(0, 1)
    second = [lambda: dice.gauss(0, 1)]  # It waits in an attribute
    assert not random_numbers.leaves_traces(second, [dice])


def test_threads_that_draw_meanwhile_leave_no_old_state():
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            np.random.rand(), random.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(300):
            random_state()
    finally:
        stop.set()
        thread.join()
    check()


def test_another_generator_in_the_place_of_pythons_is_asked(monkeypatch):
    mine = random.Random(5)
    random_state()
    monkeypatch.setattr(random, "getstate", mine.getstate)
    assert random_state()["python"] == mine.getstate()
    mine.gauss(0, 1)
    assert random_state()["python"] == mine.getstate()
