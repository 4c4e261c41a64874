"""Step on this rank's rows of each parameter only, then gather the others' (ZeRO stage 1).

Between steps everything looks as always: the optimizer's groups hold the module's parameters. Its
state holds DTensors, cut along the first dimension, so that `state_dict` needs no communication and
can be loaded at any number of ranks. For optimizers whose update of an element depends on that
element alone; see `WholeStep` for the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weft.engines.torch.rebinding import like
from weft.engines.torch.whole_step import check_no_closure
from weft.errors import ContractError, listed, message

__all__ = ["PartitionedStep"]

_BUCKET_BYTES = 25 * 2**20
_LARGE_BYTES = 2**17


class _Rows:
    """The rows of one parameter that this rank updates."""

    def __init__(self, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
        self.parameter = parameter
        self._mesh = mesh
        size, rank = mesh.size(), mesh.get_local_rank()
        total = parameter.shape[0]
        self.per_rank = -(-total // size)  # as torch.chunk and FSDP2 cut
        start = min(rank * self.per_rank, total)
        self._start, self._count = start, min(start + self.per_rank, total) - start
        self.values = nn.Parameter(self.mine(parameter.data), parameter.requires_grad)  # the same memory
        self.state: dict[str, Any] = {}
        self._shown: dict[str, tuple[Any, Any]] = {}

    def is_large(self) -> bool:
        """Whether all ranks hold as many rows, enough of them to be sent without packing."""
        p = self.parameter
        even = p.shape[0] == self.per_rank * self._mesh.size()
        return even and p.is_contiguous() and p.numel() * p.element_size() >= _LARGE_BYTES

    def mine(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor of the parameter's shape, in the same memory."""
        return tensor.narrow(0, self._start, self._count)

    def follow(self) -> None:
        """Take this rank's rows as they are now: somebody may have given the parameter other memory."""
        self.values.data = self.mine(self.parameter.data)
        gradient = self.parameter.grad
        self.values.grad = None if gradient is None else self.mine(gradient)

    def shown(self) -> dict[str, Any]:
        """The state as others see it; optimizers update it in place, so a DTensor is made once."""
        for key, value in self.state.items():
            if key not in self._shown or self._shown[key][0] is not value:
                self._shown[key] = (value, self._as_dtensor(value))
        return {key: self._shown[key][1] for key in self.state}

    def _as_dtensor(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == self.values.shape:
            whole = self.parameter
            return DTensor.from_local(
                value, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        return value

    def hidden(self, value: Any) -> Any:
        """State as the step sees it: this rank's rows."""
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape != self.parameter.shape:
            return value
        if isinstance(value, DTensor):
            value = value.full_tensor() if value.placements != (Shard(0),) else value.to_local()
            return self.mine(value).clone() if value.shape != self.values.shape else value
        return self.mine(value).clone()


class PartitionedStep:
    """The hooks on one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._group: dist.ProcessGroup | None = mesh.get_group()
        self._rows = [
            [_Rows(p, mesh) if p.dim() else None for p in entry["params"]] for entry in optimizer.param_groups
        ]
        self._held = [[id(p) for p in entry["params"]] for entry in optimizer.param_groups]
        self._plain: list[list[torch.Tensor]] | None = None
        self._take_state(optimizer)
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_load_state_dict_post_hook(self._take_state),
        ]
        self._optimizer = weakref.ref(optimizer)

    def release(self) -> None:
        """Let the process group go."""
        self._group = None

    def undo(self) -> None:
        """Take the hooks off and make the state whole. Collectives: one all-gather per tensor of state."""
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        for rows in self._all():
            state = {} if optimizer is None else optimizer.state.get(rows.parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = like(value, rows.parameter)
        self._rows = []
        self.release()

    def _all(self) -> Iterator[_Rows]:
        for group in self._rows:
            yield from (rows for rows in group if rows is not None)

    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Cut whole state into this rank's rows, and show it cut."""
        for rows in self._all():
            state = optimizer.state.get(rows.parameter)
            if state:
                rows.state = {key: rows.hidden(value) for key, value in state.items()}
                optimizer.state[rows.parameter] = rows.shown()
            else:
                rows.state = {}

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_no_closure("zero_partition", (*args[1:], *kwargs.values()))
        if self._plain is not None:
            self._put_back(optimizer)  # the last step raised
        self._check_groups(optimizer)
        for rows in self._all():
            rows.follow()
            optimizer.state.pop(rows.parameter, None)
            if rows.state:
                optimizer.state[rows.values] = rows.state
        self._plain = [entry["params"] for entry in optimizer.param_groups]
        for entry, group in zip(optimizer.param_groups, self._rows, strict=True):
            entry["params"] = [
                p if rows is None else rows.values for p, rows in zip(entry["params"], group, strict=True)
            ]

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stepped = self._put_back(optimizer)
        self._gather(stepped)
        # The parameters changed without torch noticing: their version is what tells others.
        torch.autograd.graph.increment_version([rows.parameter for rows in stepped])

    def _put_back(self, optimizer: torch.optim.Optimizer) -> list[_Rows]:
        """Let the optimizer hold whole parameters again; returns what was stepped."""
        assert self._plain is not None
        for entry, plain in zip(optimizer.param_groups, self._plain, strict=True):
            entry["params"] = plain
        self._plain = None
        stepped = []
        for rows in self._all():
            state = optimizer.state.pop(rows.values, None)
            if state:
                rows.state = state
            if rows.state:
                optimizer.state[rows.parameter] = rows.shown()
            if rows.values.grad is not None:
                stepped.append(rows)
                rows.values.grad = None
        return stepped

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the optimizer holds other parameters than it did."""
        now = [[id(p) for p in entry["params"]] for entry in optimizer.param_groups]
        if now != self._held:
            raise ContractError(
                message(
                    "zero_partition: the optimizer got other parameters after it was partitioned",
                    found=f"{len(now)} groups of {listed(map(len, now))} parameters, "
                    f"before {len(self._held)} of {listed(map(len, self._held))}, or other ones",
                    expected="add_param_group before zero_partition",
                    fix="optimizer.add_param_group(...); model, optimizer, ctx = weft.zero_partition(...)",
                )
            )

    def _gather(self, stepped: list[_Rows]) -> None:
        assert self._group is not None
        bucket: list[_Rows] = []
        filled = 0
        for rows in stepped:
            if rows.is_large():
                _all_gather(rows.parameter.data.view(-1), rows.values.data.view(-1), self._group)
                continue
            if bucket and (filled > _BUCKET_BYTES or bucket[0].parameter.dtype != rows.parameter.dtype):
                self._gather_bucket(bucket)
                bucket, filled = [], 0
            bucket.append(rows)
            filled += rows.parameter.numel() * rows.parameter.element_size()
        if bucket:
            self._gather_bucket(bucket)

    @torch.no_grad()
    def _gather_bucket(self, bucket: list[_Rows]) -> None:
        size = self._mesh.size()
        widths = [rows.per_rank * (rows.parameter.numel() // max(rows.parameter.shape[0], 1)) for rows in bucket]
        first = bucket[0].parameter
        sent = first.new_zeros(sum(widths))
        for rows, part in zip(bucket, sent.split(widths), strict=True):
            part[: rows.values.numel()] = rows.values.reshape(-1)
        everyone = first.new_empty(size * sent.numel())
        _all_gather(everyone, sent, self._group)
        for rows, parts in zip(bucket, everyone.view(size, -1).split(widths, dim=1), strict=True):
            whole = rows.parameter.data
            whole.copy_(parts.reshape(-1)[: whole.numel()].view(whole.shape))


def _all_gather(everyone: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Gather into `everyone`, of which `mine` may be this rank's part."""
    # torch 2.13 gave this a new name and deprecated the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, mine, group=group)
