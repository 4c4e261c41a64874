"""Step on what this rank holds of each parameter, as plain tensors.

Of a whole parameter these are its rows; then the others' are gathered (ZeRO stage 1). Of a sharded
parameter it is the shard, and nothing is sent: torch lacks some operations of its optimizers for
DTensors, takes longer for the others, and refuses lists of DTensors and plain tensors.

Between steps everything looks as always: the optimizer's groups hold the module's parameters. Its
state holds DTensors, cut as sharded parameters are and else along the first dimension, so that
`state_dict` needs no communication and can be loaded at any number of ranks. For optimizers whose
update of an element depends on that element alone; see `WholeStep` for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from weft import torch_internals
from weft.engines.options import StepMeshes
from weft.engines.torch.sharded_step.state_layout import StateLayout, state_layout
from weft.engines.torch.steps.swapped import Groups, StepsOnOthers, after_closure, check_same_groups, ids_of
from weft.tensors.blocks import divided_as, redistributed_as, sharded_as
from weft.tensors.dtensor import local
from weft.tensors.messages import grouped, in_buckets
from weft.tensors.pairwise import PairGather, as_real

_BUCKET_BYTES = 25 * 2**20
_LARGE_BYTES = 2**17
_FEW_RANKS = 16
_KEPT_BYTES = 2**20  # messages of small parameters, kept from step to step


class ParameterShard:
    """What this rank updates of one parameter."""

    def __init__(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        self.parameter = parameter
        self.values = nn.Parameter(values, parameter.requires_grad)  # the same memory
        self.place = 0
        self._known: dict[str, tuple[Any, Any]] = {}  # state as the step sees it, and as others do

    def follow(self) -> None:
        """Take this rank's part as it is now: somebody may have given the parameter other memory."""
        raise NotImplementedError

    def as_dtensor(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor of the state as others see it."""
        raise NotImplementedError

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor of the state as the step sees it: this rank's part."""
        raise NotImplementedError

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        """Give it the parameter's gradient, and its state in the optimizer."""
        self.follow()
        gradient = self.values.grad
        if gradient is not None and not gradient.is_sparse and gradient.stride() != self.values.stride():
            self.values.grad = torch.empty_like(self.values).copy_(gradient)  # fused kernels look at memory alone
        state = optimizer.state.pop(self.parameter, None)
        if state:
            optimizer.state[self.values] = self._taken(state)

    def leave(self, optimizer: torch.optim.Optimizer) -> bool:
        """Give the state back; returns whether there was a gradient."""
        state = optimizer.state.pop(self.values, None)
        if state:
            optimizer.state[self.parameter] = self._shown(state)
        had_gradient = self.values.grad is not None
        self.values.grad = None
        return had_gradient

    def cut_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep this rank's part only of state that is there."""
        state = optimizer.state.get(self.parameter)
        if state:
            optimizer.state[self.parameter] = self._shown(self._taken(state))

    def _taken(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state that others see, as the step sees it."""
        known = self._known
        return {
            key: known[key][0] if key in known and known[key][1] is value else self._hide(value)
            for key, value in state.items()
        }

    def _shown(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """State of a step as others see it; optimizers update it in place, so a DTensor is made once."""
        known = self._known
        self._known = {
            key: known[key] if key in known and known[key][0] is value else (value, self._show(value))
            for key, value in state.items()
        }
        return {key: value for key, (_, value) in self._known.items()}

    def _hide(self, value: Any) -> Any:
        return self.part(value) if _is_like(value, self.parameter) else value

    def _show(self, value: Any) -> Any:
        return self.as_dtensor(value) if _is_like(value, self.values) else value


def _is_like(value: object, tensor: torch.Tensor) -> bool:
    """Whether a part of the state has the shape of a tensor, and is no number."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == tensor.shape


class HeldShard(ParameterShard):
    """The shard of one parameter that is a DTensor."""

    def __init__(self, parameter: DTensor) -> None:
        self._sharded = parameter
        super().__init__(cast("nn.Parameter", parameter), local(parameter).detach())

    @torch.no_grad()  # in which `to_local` costs nothing
    @override
    def follow(self) -> None:
        sharded = self._sharded
        values = sharded.to_local()
        if self.place != values.data_ptr():
            self.values.data = values
            self.place = values.data_ptr()
        gradient = self.parameter.grad
        self.values.grad = None if gradient is None else cast("DTensor", divided_as(gradient, sharded)).to_local()

    @override
    def as_dtensor(self, value: torch.Tensor) -> torch.Tensor:
        return sharded_as(value, self._sharded)

    @override
    def part(self, value: torch.Tensor) -> torch.Tensor:
        alike = isinstance(value, DTensor) and value.placements == self._sharded.placements
        return local(value if alike else redistributed_as(value, self.parameter))


class _Rows(ParameterShard):
    """The rows of what this rank holds of one parameter: of all of it, or of its part of a DTensor."""

    def __init__(self, parameter: nn.Parameter, layout: StateLayout) -> None:
        self._layout = layout
        self._is_cut = isinstance(parameter, DTensor)
        self.mesh = mesh = layout.rows
        self.whole = self._held(parameter.data)
        total = self.whole.shape[0]
        self.per_rank = -(-total // mesh.size())  # as torch.chunk and FSDP2 cut
        mine = layout.mine(self.whole)
        # Rows of a matrix that lies column by column have gaps, which torch's fused kernels do not know of.
        self.is_copied = not mine.is_contiguous()
        super().__init__(parameter, mine.contiguous())
        self.nbytes = self.whole.numel() * self.whole.element_size()
        # Whether all ranks hold as many rows, enough of them to be sent without packing.
        self.is_large = (
            total == self.per_rank * mesh.size() and self.whole.is_contiguous() and self.nbytes >= _LARGE_BYTES
        )
        self.place = self.whole.data_ptr()
        self._gradient: tuple[int, torch.Tensor] | None = None
        self._exchange: tuple[int, PairGather] | None = None

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        return local(tensor).detach() if self._is_cut else tensor

    @override
    def follow(self) -> None:
        # The parameter itself is asked where it is plain, which is most of the time.
        if self._is_cut or self.place != self.parameter.data_ptr():
            whole = self._held(self.parameter.data)
            if self.place != whole.data_ptr():
                self.whole, self.place = whole, whole.data_ptr()
                if not self.is_copied:
                    self.values.data = self._layout.mine(whole)
        gradient = self.parameter.grad
        if gradient is None:
            self.values.grad = None
            return
        gradient = self._held(gradient)
        if self._gradient is not None and self._gradient[0] == gradient.data_ptr():
            self.values.grad = self._gradient[1]
        else:
            self.values.grad = self._layout.mine(gradient)
            # A view of a bucket comes back step after step; anything else is to be freed.
            is_kept = torch_internals.IS_VIEW.of(gradient)() and not self._is_cut
            self._gradient = (gradient.data_ptr(), self.values.grad) if is_kept else None

        if self.is_copied:
            self.values.data.copy_(self._layout.mine(self.whole))

    @torch.no_grad()
    @override
    def leave(self, optimizer: torch.optim.Optimizer) -> bool:
        """As for every part; and write rows that are stepped on in memory of their own."""
        is_stepped = super().leave(optimizer)
        if is_stepped and self.is_copied:
            self._layout.mine(self.whole).copy_(self.values)
        return is_stepped

    def exchange(self, group: dist.ProcessGroup) -> PairGather:
        """Fills the other ranks' rows in place, where `is_large`."""
        if self._exchange is None or self._exchange[0] != self.place:
            self._exchange = (self.place, PairGather(group, as_real(self.whole.view(-1))))
        return self._exchange[1]

    def forget_group(self) -> None:
        """Let the process group go."""
        self._exchange = None

    @override
    def as_dtensor(self, value: torch.Tensor) -> torch.Tensor:
        return self._layout.dtensor(value)

    @override
    def part(self, value: torch.Tensor) -> torch.Tensor:
        return self._layout.part(value)


class PartitionedStep(StepsOnOthers):
    """The hooks on one optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh | None,
        others: StepMeshes,
        places: Collection[int] | None = None,
    ) -> None:
        """Hang it on.

        Args:
            optimizer: Over plain or sharded parameters.
            mesh: The rows of plain parameters are shared out over it; None: each rank steps on all of them.
            others: Parameters for which that is otherwise.
            places: Of the groups that are stepped on here; None: all.
        """
        self._at = None if places is None else frozenset(places)
        self._released = False
        self._mesh, self._others = mesh, others
        self._parts: list[list[ParameterShard | None]] = []
        self._take_groups(optimizer)
        found = [part.mesh for part in self._all() if isinstance(part, _Rows)]
        self._meshes = list({id(one): one for one in found}.values())  # over which rows are gathered
        self._kept: dict[int, tuple[list[int], _RowsGather]] = {}
        self._take_state(optimizer)
        super().__init__(optimizer, self._before, self._after, self._take_state)

    def release(self) -> None:
        """Let the process group go."""
        self._released = True
        self._kept.clear()
        for part in self._all():
            if isinstance(part, _Rows):
                part.forget_group()

    @override
    def undo(self) -> None:
        """Take the hooks off and make the state of plain parameters whole: one all-gather per tensor of it."""
        super().undo()
        self._parts = []
        self.release()

    @override
    def _kept_in_rows(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
        return [part.parameter for part in self._all() if isinstance(part, _Rows)]

    def _take_groups(self, optimizer: torch.optim.Optimizer) -> None:
        self._held = ids_of(optimizer)
        self._parts = [
            [self._part_of(p) if self._at is None or at in self._at else None for p in entry["params"]]
            for at, entry in enumerate(optimizer.param_groups)
        ]

    def _part_of(self, parameter: nn.Parameter) -> ParameterShard | None:
        """What is stepped on in the place of a parameter; None: itself."""
        layout = state_layout(parameter, self._mesh, self._others)
        if layout is not None:
            return _Rows(parameter, layout)
        return HeldShard(parameter) if isinstance(parameter, DTensor) else None

    def _all(self) -> Iterator[ParameterShard]:
        for group in self._parts:
            yield from (part for part in group if part is not None)

    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Cut whole state into this rank's parts, and show it cut."""
        for part in self._all():
            part.cut_state(optimizer)

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._own is not None:
            self._put_back(optimizer)  # the last step raised
        return after_closure(args, kwargs, lambda: self._exchange(optimizer))  # a closure sees the parameters whole

    def _exchange(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer hold this rank's parts."""
        self._check_groups(optimizer)
        for part in self._all():
            part.enter(optimizer)
        others: Groups = [
            [p if part is None else part.values for p, part in zip(entry["params"], group, strict=True)]
            for entry, group in zip(optimizer.param_groups, self._parts, strict=True)
        ]
        self._give(optimizer, others)

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stepped = self._put_back(optimizer)
        self._gather([part for part in stepped if isinstance(part, _Rows)])
        # The parameters changed without torch noticing: their version is what tells others.
        torch.autograd.graph.increment_version([part.parameter for part in stepped])

    def _put_back(self, optimizer: torch.optim.Optimizer) -> list[ParameterShard]:
        """Let the optimizer hold whole parameters again; returns what was stepped."""
        self._give_back(optimizer)
        return [part for part in self._all() if part.leave(optimizer)]

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has to hold the parameters that it did."""
        check_same_groups(
            "zero_partition: the optimizer got other parameters after it was partitioned",
            optimizer,
            self._held,
            expected="add_param_group before zero_partition",
            fix="optimizer.add_param_group(...); model, optimizer, ctx = weft.zero_partition(...)",
        )

    def _gather(self, stepped: list[_Rows]) -> None:
        if not stepped:
            return
        assert not self._released
        for mesh in self._meshes:
            self._gather_over(mesh, [rows for rows in stepped if rows.mesh is mesh])

    def _gather_over(self, mesh: DeviceMesh, stepped: list[_Rows]) -> None:
        group = mesh.get_group()
        PairGather.run([rows.exchange(group) for rows in stepped if rows.is_large])
        small = [rows for rows in stepped if not rows.is_large]
        places = [rows.place for rows in small]
        kept = self._kept.pop(id(mesh), None)
        if kept is not None and kept[0] == places:
            self._kept[id(mesh)] = kept
            kept[1].gather()
            return
        alike = grouped(small, lambda rows: rows.parameter.dtype).values()
        buckets = [bucket for same in alike for bucket in in_buckets(same, lambda rows: rows.nbytes, _BUCKET_BYTES)]
        for bucket in buckets:
            sent = _RowsGather(bucket, mesh, group)
            sent.gather()
            if len(buckets) == 1 and sum(rows.nbytes for rows in bucket) <= _KEPT_BYTES:
                self._kept[id(mesh)] = (places, sent)


class _RowsGather:
    """One all-gather for the rows of several parameters: what is sent, and where it belongs."""

    def __init__(self, bucket: list[_Rows], mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
        size, rank = mesh.size(), mesh.get_local_rank()
        wholes = [rows.whole for rows in bucket]
        widths = [
            rows.per_rank * (whole.numel() // max(whole.shape[0], 1))
            for rows, whole in zip(bucket, wholes, strict=True)
        ]
        everyone = wholes[0].new_zeros(size * sum(widths))
        self._exchange = PairGather(group, as_real(everyone))
        self._mine = [rows.values.data for rows in bucket]
        self._sent_parts = [
            part[: mine.numel()].view(mine.shape)
            for mine, part in zip(self._mine, everyone.view(size, -1)[rank].split(widths), strict=True)
        ]
        # Copies from one rank are contiguous, and one kernel makes many of them; from many ranks, one copy is less.
        together = 1 if size <= _FEW_RANKS else size
        self._theirs: list[torch.Tensor] = []
        self._received: list[torch.Tensor] = []
        for rows, whole, parts in zip(bucket, wholes, everyone.view(size, -1).split(widths, dim=1), strict=True):
            full = whole.shape[0] // max(rows.per_rank, 1)  # ranks with as many rows
            for first in range(0, full, together):
                last = min(first + together, full)
                if (first, last) != (rank, rank + 1):
                    theirs = whole[first * rows.per_rank : last * rows.per_rank].unflatten(0, (last - first, -1))
                    self._theirs.append(theirs)
                    self._received.append(parts[first:last].view(theirs.shape))
            rest = whole[full * rows.per_rank :]
            if rest.numel() and full != rank:
                self._theirs.append(rest)
                self._received.append(parts[full, : rest.numel()].view(rest.shape))

    @torch.no_grad()
    def gather(self) -> None:
        """Send this rank's rows, and write the others' into the parameters."""
        torch_internals.foreach_copy(self._sent_parts, self._mine)
        PairGather.run([self._exchange])
        if self._theirs:  # none, where this rank holds all rows that there are
            torch_internals.foreach_copy(self._theirs, self._received)
