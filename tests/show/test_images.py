"""Drawing, checked on what arrives in matplotlib, pixel by pixel, and `clean_memory` on weak references.

Every image is given in many ways: tensor or array, channels first or last, floats or bytes; what is drawn
must be the same.
"""

import gc
import sys
import weakref

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from isaac_loop.show.images import UnNormalize, get_grid, image_array, show_image, show_images, subplots
from isaac_loop.device.memory import clean_memory


@pytest.fixture(autouse=True)
def no_window():
    plt.switch_backend("Agg")
    yield
    plt.close("all")


COLOUR = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0))
GREY = COLOUR[0]


# Layouts


@pytest.mark.shows("ISA-107")
@pytest.mark.parametrize(
    "image",
    [
        COLOUR,
        COLOUR.permute(1, 2, 0),
        COLOUR.numpy(),
        COLOUR.permute(1, 2, 0).numpy(),
        COLOUR.double(),
        COLOUR.clone().requires_grad_(),
        COLOUR.permute(1, 2, 0).tolist(),
    ],
    ids=["first", "last", "array first", "array last", "double", "with gradient", "lists"],
)
def test_colour_images_of_any_layout_are_the_same_picture(image):
    assert np.array_equal(image_array(image), COLOUR.permute(1, 2, 0).numpy())


@pytest.mark.shows("ISA-107")
@pytest.mark.parametrize(
    "image", [GREY, GREY[None], GREY[..., None], GREY.numpy(), GREY[None].numpy(), GREY[..., None].numpy()]
)
def test_grey_images_lose_their_channel(image):
    assert np.array_equal(image_array(image), GREY.numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_drawn_in_full(dtype):
    "numpy has no bfloat16, and matplotlib no float16"
    array = image_array(COLOUR.to(dtype))
    assert array.dtype == np.float32 and np.allclose(array, COLOUR.permute(1, 2, 0), atol=0.01)


def test_bytes_stay_bytes_and_masks_become_floats():
    assert image_array((COLOUR * 255).byte()).dtype == np.uint8
    assert image_array(GREY > 0.5).dtype == np.float32


@pytest.mark.parametrize("shape, where", [((3, 4, 3), 0), ((1, 9, 1), 0), ((3, 5, 4), 0)])
def test_where_both_ends_could_be_channels_tensors_have_them_first_and_arrays_last(shape, where):
    image = torch.rand(shape)
    first = image.permute(1, 2, 0).squeeze(-1)
    assert np.array_equal(image_array(image), first.numpy())
    assert np.array_equal(image_array(image.numpy()), image.squeeze(-1).numpy())


@pytest.mark.shows("ISA-107")
@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "CMYK"])
def test_pil_images_of_every_mode_are_drawn_in_their_colours(mode):
    "A palette's numbers are no colours"
    original = Image.fromarray((COLOUR.permute(1, 2, 0).numpy() * 255).astype("uint8")).convert("RGB")
    image = original.convert(mode)
    array = image_array(image)
    show_image(image)
    expected = np.asarray(image if mode in ("1", "L", "RGB", "RGBA") else image.convert("RGB"))
    assert np.array_equal(array, expected)


@pytest.mark.parametrize("shape", [(7,), (2, 5, 7), (5, 6, 7), (2, 3, 5, 7)])
def test_what_is_no_image_is_an_error_with_its_shape(shape):
    with pytest.raises(ValueError, match=f"The shape \\({', '.join(map(str, shape))}.*is no image") as caught:
        show_image(torch.zeros(shape))
    assert ("show_images" in str(caught.value)) == (len(shape) == 4)


# One image


def test_an_image_is_drawn_on_the_axes_that_are_given():
    fig, axes = subplots(1, 2)
    assert show_image(GREY, axes[1], title=7) is axes[1]
    assert not axes[0].images and axes[1].get_title() == "7" and not axes[1].axison
    assert len(plt.get_fignums()) == 1


def test_grey_values_keep_their_brightness_and_wider_ones_are_stretched():
    clim = lambda image, **kwargs: show_image(image, **kwargs).images[0].get_clim()
    assert clim(GREY / 4) == (0, 1)
    assert clim((GREY * 100).byte()) == (0, 255)
    assert clim(GREY * 6 - 3) == pytest.approx(((GREY * 6 - 3).min().item(), (GREY * 6 - 3).max().item()))
    assert clim(GREY, vmin=0.2, vmax=0.3) == (0.2, 0.3)


def test_colours_far_out_of_range_are_cut_off_with_a_warning():
    with pytest.warns(UserWarning, match=r"from -2.*only 0 to 1 can be shown.*`UnNormalize`"):
        ax = show_image(COLOUR * 4 - 2)
    shown = ax.images[0].get_array()
    assert shown.min() == 0 and shown.max() == 1


def test_a_little_overshoot_and_bytes_are_drawn_in_silence(recwarn):
    show_image(COLOUR * 1.05)
    show_image((COLOUR * 255).byte())
    show_image((COLOUR * 255).long())
    assert not recwarn.list


def test_drawing_changes_neither_image_nor_random_numbers():
    image, state = COLOUR.clone(), torch.get_rng_state()
    show_image(image)
    assert torch.equal(image, COLOUR) and torch.equal(torch.get_rng_state(), state)


# Grids


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 12), nrows=st.none() | st.integers(1, 5))
def test_a_grid_has_a_place_for_every_image_and_no_row_too_many(n, nrows):
    axes = get_grid(n, nrows)
    assert axes.size >= n and (nrows is None or axes.shape[0] == nrows)
    assert [ax.axison for ax in axes.flat] == [True] * n + [False] * (axes.size - n)
    if nrows is None:
        assert axes.size - n < axes.shape[1]
    plt.close("all")


def test_a_grid_too_small_or_empty_is_an_error():
    with pytest.raises(ValueError, match="2 rows of 2 have no place for 5 images"):
        get_grid(5, 2, 2)
    with pytest.raises(ValueError, match="nothing to draw"):
        show_images([])


@pytest.mark.parametrize("n", [None, "3", 2.5, float("nan"), True, 0])
def test_a_grid_is_for_a_number_of_images(n):
    with pytest.raises(ValueError, match=f"`n` is {n!r}, but images are counted"):
        get_grid(n)


@pytest.mark.shows("ISA-107")
def test_images_of_different_size_and_kind_share_a_grid():
    axes = show_images([GREY, COLOUR, COLOUR.numpy(), Image.new("L", (9, 4))], titles=torch.arange(4))
    assert [ax.get_title() for ax in axes.flat] == ["0", "1", "2", "3"]
    assert axes.flat[3].images[0].get_array().shape == (4, 9)


def test_the_figure_grows_with_the_images():
    small, large = get_grid(4).flat[0].figure, get_grid(16).flat[0].figure
    assert (large.get_size_inches() == 2 * small.get_size_inches()).all()


def test_titles_of_another_number_are_an_error():
    with pytest.raises(ValueError, match="2 images and 3 titles"):
        show_images([GREY, GREY], titles="abc")


# UnNormalize


@pytest.mark.shows("ISA-81")
@settings(max_examples=25, deadline=None)
@given(
    mean=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    std=st.lists(st.floats(0.1, 9), min_size=3, max_size=3),
)
def test_a_normalisation_is_undone_and_the_argument_stays(mean, std):
    "Not in place"
    m, s = (torch.tensor(o).view(3, 1, 1) for o in (mean, std))
    normalised = ((COLOUR - m) / s)[None]
    before = normalised.clone()
    assert torch.allclose(UnNormalize(mean, std)(normalised), COLOUR[None], atol=1e-5)
    assert torch.equal(normalised, before)


@pytest.mark.shows("ISA-81")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_undoing_keeps_dtype_device_and_shape(dtype):
    undo = UnNormalize(torch.tensor([0.5] * 3), np.array([0.2] * 3))
    for shape in ((3, 4, 5), (2, 3, 4, 5)):
        new = undo(torch.zeros(shape, dtype=dtype))
        assert new.dtype == dtype and new.shape == shape
    assert undo(torch.zeros(3, 4, 5, device="meta")).is_meta


@pytest.mark.shows("ISA-81")
def test_one_number_stands_for_all_channels():
    assert torch.allclose(UnNormalize(0.5, 0.25)((COLOUR - 0.5) / 0.25), COLOUR)


def test_wrong_use_of_a_normalisation_is_an_error():
    with pytest.raises(ValueError, match="3 means and 2 deviations"):
        UnNormalize([0, 0, 0], [1, 1])
    with pytest.raises(ValueError, match="nothing can have been divided"):
        UnNormalize(0, 0)
    undo = UnNormalize([0.0] * 3, [1.0] * 3)
    with pytest.raises(ValueError, match="there are 3 means"):
        undo(torch.zeros(2, 1, 4, 4))
    with pytest.raises(TypeError, match="torch.uint8"):
        undo(torch.zeros(3, 4, 4, dtype=torch.uint8))


# Memory


class Thing:
    "Can be watched"


def failed(depth=0):
    "An error that holds a `Thing` in its frames, and the things"
    things = []

    def fail(depth):
        thing = Thing()
        things.append(weakref.ref(thing))
        if depth == 0:
            raise RuntimeError("out of memory")
        try:
            fail(depth - 1)
        except RuntimeError as e:
            raise ValueError("because of that") from e

    try:
        fail(depth)
    except Exception as e:
        error = e
    return error, things


@pytest.fixture
def no_last_error():
    yield
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)


@pytest.mark.shows("ISA-105")
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_what_the_last_error_held_is_let_go(depth, no_last_error):
    "Also what the errors it came from held, and although somebody keeps the error itself"
    error, things = failed(depth)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    gc.collect()
    assert len(things) == depth + 1 and all(o() is not None for o in things)
    clean_memory()
    assert all(o() is None for o in things)
    assert not hasattr(sys, "last_value") and not hasattr(sys, "last_traceback")
    assert type(error) is (ValueError if depth else RuntimeError)


@pytest.mark.shows("ISA-105")
def test_garbage_in_circles_is_collected_and_what_is_in_use_stays():
    gc.disable()
    try:
        circle, kept = Thing(), Thing()
        circle.me = circle
        gone = weakref.ref(circle)
        del circle
        assert gone() is not None
        clean_memory()
        assert gone() is None and isinstance(kept, Thing)
    finally:
        gc.enable()


@pytest.mark.shows("ISA-105")
def test_the_cache_of_the_device_is_emptied(monkeypatch):
    emptied = []
    module = type("module", (), {"empty_cache": staticmethod(lambda: emptied.append(True))})
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    clean_memory(device="cuda")
    assert emptied == [True]


@pytest.mark.shows("ISA-105")
def test_outputs_of_a_notebook_are_forgotten_unless_asked_to_stay(monkeypatch):
    import builtins

    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    shell.user_ns["things"] = [Thing()]
    shell.run_cell("things.pop()", store_history=True, silent=False)
    thing = weakref.ref(shell.user_ns["_"])
    clean_memory(outputs=False)
    assert thing() is not None
    clean_memory()
    assert thing() is None
    InteractiveShell.clear_instance()
