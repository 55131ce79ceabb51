"""Tensors of which each process has a part are refused by name, where reading them would end the program."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from isaac_loop.state.snapshot import Snapshot


class Holder:
    pass


def test_a_snapshot_refuses_a_sharded_tensor(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    if dist.is_initialized() or os.environ.get("WORLD_SIZE"):
        pytest.skip("there is a group of processes already")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        held = Holder()
        held.weight = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,))))
        with pytest.raises(TypeError, match="DTensor"):
            Snapshot(held)
    finally:
        dist.destroy_process_group()
