"""The bytes of a tensor's numbers (`basics/bits.py`), against those of a copy in the usual order."""

import pytest
import torch

from isaac_loop.basics.bits import bytes_of
from isaac_loop.inspection.run_values import digest
from isaac_loop.state.change_marks import Marker

TABLE = torch.arange(50.0).reshape(5, 10)
IMAGES = torch.randn(2, 3, 2, 2)

ODD = {
    "a number cut out of a table": TABLE[:1, ::10],
    "its copy": TABLE[:1, ::10].clone(),
    "every tenth of ten": TABLE[0][::10],
    "a row on end": torch.arange(3.0)[None].T,
    "columns": TABLE[:, ::2],
    "transposed": TABLE.T,
    "repeated": TABLE[:, :1].expand(5, 4),
    "overlapping": torch.arange(6.0).as_strided((3, 3), (1, 1)),
    "channels last": IMAGES.to(memory_format=torch.channels_last),
    "single pixels": IMAGES[:, :, :1, :1].contiguous(memory_format=torch.channels_last),
    "conjugate": torch.randn(2, 3, dtype=torch.complex64).T.conj(),
    "negative": torch.randn(2, 3, dtype=torch.complex64).conj().imag,
    "one number": torch.tensor(3),
    "nothing": torch.empty(3, 0).T,
}


@pytest.mark.parametrize("kind", ODD)
def test_bytes_are_those_of_numbers_in_the_order_in_which_they_are_read(kind):
    x = ODD[kind]
    usual = torch.empty(x.shape, dtype=x.dtype).copy_(x)
    assert bytes_of(x).numpy().tobytes() == usual.numpy().tobytes()
    assert digest(x) == digest(usual)


@pytest.mark.parametrize("kind", ODD)
def test_any_tensor_can_be_marked_and_changes_are_seen(kind):
    x = ODD[kind].clone()
    before = Marker(set()).mark([x])
    assert Marker(set()).mark([x]) == before
    if x.numel():
        x.data.add_(1)
        assert Marker(set()).mark([x]) != before
