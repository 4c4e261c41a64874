"""Where the state of a parameter lies between steps: cut as the parameter is, and over the rows of what is left."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from weft import torch_internals
from weft.engines.options import StepMeshes
from weft.tensors.blocks import as_dtensor, chunk, cut_as, full_tensor
from weft.tensors.dtensor import local


class StateLayout(NamedTuple):
    """Mesh and placements of state of the shape of one parameter.

    Attributes:
        parameter: Plain, or a DTensor over other axes than `rows`.
        rows: The rows of what a rank holds of it are cut over this mesh.
        mesh: Of the state.
        placements: Of the state.
    """

    parameter: torch.Tensor
    rows: DeviceMesh
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def mine(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what it holds of a tensor of the parameter's shape, in the same memory.

        They are those that torch.chunk and FSDP2 cut.
        """
        return part.narrow(0, *chunk(part.shape[0], self.rows.size(), self.rows.get_local_rank()))

    def dtensor(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part of state as others see it."""
        of = self.parameter
        return as_dtensor(rows, self.mesh, self.placements, of.shape, of.stride())

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of state that is whole, or cut in any way. Collectives: if it is cut in another way."""
        if isinstance(value, DTensor) and value.placements == self.placements and value.device_mesh == self.mesh:
            return value.to_local()
        whole = full_tensor(value)
        held = local(cut_as(whole, self.parameter)) if isinstance(self.parameter, DTensor) else whole
        return self.mine(held).clone(memory_format=torch.contiguous_format)


def state_layout(parameter: torch.Tensor, mesh: DeviceMesh | None, others: StepMeshes) -> StateLayout | None:
    """Where the state of a parameter lies of which each rank keeps its rows; None: it lies as the parameter does.

    Args:
        parameter: Plain, or a DTensor.
        mesh: Over which the rows of what a rank holds are cut; None: they are not.
        others: Parameters for which that is otherwise.
    """
    rows, cut = others.get(cast("nn.Parameter", parameter), (mesh, None))
    if rows is None or not parameter.dim():
        return None
    if not isinstance(parameter, DTensor):
        return StateLayout(parameter, rows, rows, (Shard(0),))
    if cut is None:
        return None
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
