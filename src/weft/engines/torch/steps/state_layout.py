"""Where the state of a parameter lies between steps: cut as the parameter is, and over the rows of what is left."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from weft import torch_internals
from weft.tensors.blocks import as_dtensor, chunk, cut_as, full_tensor
from weft.tensors.dtensor import local


class StateLayout(NamedTuple):
    """Mesh and placements of state of the shape of one parameter.

    Attributes:
        parameter: Plain, or a DTensor over other axes than `rows`.
        rows: The rows of what a rank holds of it are cut over this mesh; None: they are not.
        mesh: Of the state.
        placements: Of the state.
    """

    parameter: torch.Tensor
    rows: DeviceMesh | None
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def mine(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what it holds of a tensor of the parameter's shape, in the same memory."""
        if self.rows is None:
            return part
        start, count = self.place(part.shape[0])
        return part.narrow(0, start, count)

    def place(self, total: int) -> tuple[int, int]:
        """Where its rows begin, and how many there are, of so many; as torch.chunk and FSDP2 cut."""
        if self.rows is None:
            return 0, total
        return chunk(total, self.rows.size(), self.rows.get_local_rank())

    def dtensor(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part of state as others see it."""
        of = self.parameter
        made: torch.Tensor = as_dtensor(rows, self.mesh, self.placements, of.shape, of.stride())
        return made

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of state that is whole, or cut in any way. Collectives: if it is cut in another way."""
        if isinstance(value, DTensor) and value.placements == self.placements and value.device_mesh == self.mesh:
            return value.to_local()
        whole = full_tensor(value)
        held = local(cut_as(whole, self.parameter)) if isinstance(self.parameter, DTensor) else whole
        return self.mine(held).clone(memory_format=torch.contiguous_format)


def state_layout(parameter: torch.Tensor, rows: DeviceMesh | None, cut: DeviceMesh | None) -> StateLayout | None:
    """Where the state of a parameter lies; None if it is whole on every rank.

    Args:
        parameter: Plain, or a DTensor.
        rows: Over which the rows of what a rank holds are cut; None: they are not.
        cut: The part of our mesh that has cut a DTensor.
    """
    if not isinstance(parameter, DTensor):
        return None if rows is None or not parameter.dim() else StateLayout(parameter, rows, rows, (Shard(0),))
    assert cut is not None
    if rows is None or not parameter.dim():
        return StateLayout(parameter, None, cut, tuple(parameter.placements))
    pieces = math.prod(cut.size(dim) for dim, one in enumerate(parameter.placements) if one == Shard(0))
    first = Shard(0) if pieces == 1 else torch_internals.strided_shard(0, split_factor=pieces)
    return StateLayout(parameter, rows, _joined(rows, cut), (first, *parameter.placements))


def _joined(rows: DeviceMesh, cut: DeviceMesh) -> DeviceMesh:
    """Two parts of one mesh as one."""
    found: DeviceMesh
    if torch_internals.JOIN_MESHES.exists:
        found = torch_internals.JOIN_MESHES.of(DeviceMesh)([rows, cut])
    else:
        whole = torch_internals.mesh_resources.found.get_root_mesh(rows)
        found = whole[(*(rows.mesh_dim_names or ()), *(cut.mesh_dim_names or ()))]
    return found
