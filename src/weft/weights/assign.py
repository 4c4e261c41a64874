"""`load_weights` at work: what goes where is settled and checked, then read, then put in place.

[Note: once per node] What all ranks hold whole is shared out among them: each reads its share, and sends it to
the others when all have read theirs. Of shards each rank reads its own; where several ranks hold the same one,
one of them reads it and sends it along that axis of the mesh.

[Note: all or nothing] A module on meta gets memory that is read into, and is left on meta if a rank fails.
Into tensors with values nothing is read: what a rank has read waits in memory of the CPU until all have theirs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from weft.checkpoint.format.tensor_blocks import check_mesh_ranks, share_out_writes
from weft.checkpoint.format.transfer import Stored, Transfer, equal_bits, read_blocks, same_number_kind
from weft.checkpoint.state.collect import update_keepers
from weft.collectives.on_all_ranks import num_threads, on_all
from weft.collectives.primitives import name_lost_peer, wait_for_collective
from weft.context import DistContext, World
from weft.contract import owners
from weft.engines.torch.reducing.trained import is_reduced
from weft.errors import CheckpointError, listed, value_error
from weft.sharding import check_optimizers
from weft.tensors.blocks import hold
from weft.tensors.dtensor import is_sharded, local
from weft.tensors.remote_parameter import is_elsewhere
from weft.weights.sources import WeightFiles, reading
from weft.weights.targets import Target, TargetMemory, targets, waits_for_values

_IN_FLIGHT = 4  # messages; more bring nothing, and each keeps a tensor
Owners: TypeAlias = Mapping[str, Sequence[tuple[str, int]]]  # of what only some ranks have: where on which axes
Route: TypeAlias = tuple[Any, int]  # a process group, and which of its ranks has the tensor


class Move(NamedTuple):
    """A tensor on its way from files into a module.

    Attributes:
        name: In the module.
        stored: Where it lies; several places if it is one tensor in the module and several in the files.
        tensor: Where it goes; maybe on meta.
        parameter: Of `Target`.
        dtype: That it shall have there.
        routes: Groups to send it along, one after the other, and which of their ranks has it first.
    """

    name: str
    stored: tuple[Stored, ...]
    tensor: torch.Tensor
    parameter: int
    dtype: torch.dtype
    routes: tuple[Route, ...] = ()


class WeightAssignment:
    """Everything settled on this rank; nothing is changed before `read`.

    Attributes:
        path: Of the file, index or checkpoint.
        missing: Names that only the module has.
        unexpected: Names that only the files have.
    """

    def __init__(
        self,
        module: nn.Module,
        source: WeightFiles,
        ctx: DistContext,
        *,
        elsewhere: Mapping[int, torch.Tensor],
        strict: bool,
        dtype: torch.dtype | None,
        within: Collection[str] | None = None,
        what: str = "load_weights",
    ) -> None:
        self.path = source.path
        self._ctx = ctx
        self._source = source
        self._module = module
        held = targets(module, elsewhere, what=what)
        self.missing, self.unexpected = compare(what, module, source, held, strict=strict, within=within)
        self._dtypes = {id(one.tensor): one.tensor.dtype for one in held}
        if dtype is not None:
            self._dtypes |= {id(one.tensor): dtype for one in held if one.tensor.is_floating_point()}
        changed = [one for one in held if self._dtypes[id(one.tensor)] != one.tensor.dtype]
        _check_dtypes(module, changed, ctx)
        self._changed = [one.tensor for one in changed]
        partly = owners(module)
        moves = _moves(held, source, self._dtypes, ctx, partly)
        self._facts = [
            [move.name, str(move.dtype), tuple(move.tensor.shape)]
            + ([] if move.name in partly else [is_sharded(move.tensor), move.tensor.is_meta])
            for move in moves
        ]
        self._moves = [move for move in moves if not is_elsewhere(move.tensor)]
        self._memory = TargetMemory(module, ctx, {id(move.tensor) for move in self._moves}, self._dtypes)
        if any(waits_for_values(one.tensor) for one in held):
            check_optimizers("load_weights", module, ())
        self._staged: dict[int, torch.Tensor] = {}

    def facts(self) -> dict[str, object]:
        """What has to be alike on all ranks."""
        there = [[name, one.entry.dtype, one.entry.shape] for name, one in sorted(self._source.tensors.items())]
        texts = {"tensors in the files": there, "tensors of the module": [self._facts, self.missing]}
        return {key: hashlib.sha256(json.dumps(value).encode()).hexdigest() for key, value in texts.items()}

    def read(self, what: str) -> None:
        """Check the files and read the tensors, each rank its share; if one fails, the module is as it was.

        Raises:
            CheckpointError: A file is damaged or not as it was, or a tied tensor is stored with two values.
            ValueError: Values do not fit into the dtype of the module.
            OSError: A file cannot be read.
            PeerError: Another rank failed.
        """
        try:
            on_all(what, self._ctx, self._read)
        except BaseException:
            self._memory.undo()
            self._staged.clear()
            raise

    def _read(self) -> None:
        """Read this rank's share: into tensors on meta, else aside."""
        used = (move.stored[0] for move in self._moves)
        self._source.verify(used, number=self._ctx.rank, of=self._ctx.world_size)
        self._memory.take()
        files, wanted = self._source.files, []
        for name, stored, tensor, _, dtype, routes in self._moves:
            if all(dist.get_rank(group) == first for group, first in routes):
                held = hold(name, self._memory.of(tensor))
                out = held.local
                if not tensor.is_meta:
                    out = self._staged[id(tensor)] = torch.empty(held.block.shape, dtype=dtype)
                wanted.append(Transfer(stored[0], held.block, out))
                for other in stored[1:]:
                    if not equal_bits(files, stored[0], other, held.block, dtype):
                        raise CheckpointError(
                            f"load_weights: {name} and {other.key} differ in {self._source.path}",
                            found="one tensor in the module, two in the file",
                            expected="equal values for tied weights",
                            fix="build the module without tying them (tie_word_embeddings=False)",
                        )
        read_blocks(files, wanted, num_threads=num_threads(self._ctx))
        files.close()

    @torch.no_grad()
    def put(self) -> None:
        """Put in place what was read, and send it to the ranks that have it too."""
        for tensor in self._changed:
            if not tensor.is_meta:
                dtype, staged = self._dtypes[id(tensor)], self._staged.pop(id(tensor), None)
                tensor.data = tensor.data.to(dtype) if staged is None else staged.to(tensor.device)
        for move in self._moves:
            staged = self._staged.pop(id(move.tensor), None)
            if staged is not None:
                local(move.tensor).copy_(staged)
        whole = ((self._ctx.group, 0),) if self._ctx.world_size > 1 else ()
        sent = [(local(self._memory.of(move.tensor)), move.routes) for move in self._moves]
        sent += [(self._memory.of(tensor), whole) for tensor in self._memory.drawn]
        _send(sent, self._ctx.world)
        self._memory.settle()
        update_keepers(self._module, {move.parameter: move.tensor for move in self._moves})


# -- does it fit -------------------------------------------------------------------------------------


def compare(
    what: str,
    module: nn.Module,
    source: WeightFiles,
    held: list[Target],
    *,
    strict: bool,
    within: Collection[str] | None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that only the module has, of all or of some, and names that only the files have.

    Raises:
        CheckpointError: There are such names and `strict`; or a shape or a kind of numbers differs.
    """
    here = {name: one.tensor for one in held for name in one.names}
    asked = [one for one in held if within is None or not set(one.names).isdisjoint(within)]
    missing = tuple(one.names[0] for one in asked if source.tensors.keys().isdisjoint(one.names))
    unexpected = tuple(name for name in source.tensors if name not in here)
    wrong = {
        name: f"{name}: {stored.entry.dtype} {stored.entry.shape} for {str(tensor.dtype).removeprefix('torch.')} "
        f"{tuple(tensor.shape)}"
        for name, tensor in here.items()
        if (stored := source.tensors.get(name)) is not None
        and (stored.entry.shape != tuple(tensor.shape) or not same_number_kind(stored.dtype, tensor.dtype))
    }
    if not wrong and not (strict and (missing or unexpected)):
        return missing, unexpected
    found = [f"in the file and in the module: {listed(wrong.values())}"] if wrong else []
    found += [f"not in the file: {listed(missing)}"] if missing and strict else []
    found += [f"only in the file: {listed(unexpected)}"] if unexpected and strict else []
    raise CheckpointError(
        f"{what}: {source.path} does not fit the module",
        found="; ".join(found),
        expected="the names, shapes and kinds of numbers of the module",
        fix=_tie(module, missing) or reading(what, "path", _hint(wrong, missing, unexpected)),
    )


def _tie(module: nn.Module, missing: tuple[str, ...]) -> str:
    """The call that ties what is saved once, if the module can do so and something on meta is missing."""
    named = dict(module.state_dict(keep_vars=True))
    ties = [name for name, part in module.named_modules() if callable(getattr(part, "tie_weights", None))]
    if not ties or not any(name in named and named[name].is_meta for name in missing):
        return ""
    owner = f"model.{ties[0]}" if ties[0] else "model"
    return f"{owner}.tie_weights()  # before the transforms: tied weights are saved once"


def _hint(wrong: Collection[str], missing: tuple[str, ...], unexpected: tuple[str, ...]) -> str:
    """The option that would help: for tensors that do not fit, names that differ at their beginning, or are missing."""
    if wrong:
        return f"rename=lambda name: None if name in {tuple(wrong)} else name, strict=False"
    for name in unexpected:
        for wanted in missing:
            if name.endswith(f".{wanted}"):
                return f"rename=lambda name: name.removeprefix({name.removesuffix(wanted)!r})"
            if wanted.endswith(f".{name}"):
                return f"rename=lambda name: {wanted.removesuffix(name)!r} + name"
    return "strict=False"


def _check_dtypes(module: nn.Module, changed: list[Target], ctx: DistContext) -> None:
    """Raise if a dtype would have to change where others rely on it."""
    records = [record.name for record in ctx.records(module)]
    bound = [
        one.names[0]
        for one in changed
        if records or is_sharded(one.tensor) or (isinstance(one.tensor, nn.Parameter) and is_reduced(one.tensor))
    ]
    if bound:
        raise value_error(
            "load_weights: the dtype can no longer be changed",
            found=f"{listed(bound)}, after {listed(records) or 'sharding'}",
            expected="dtype for a module that no transform was applied to",
            fix="weft.load_weights first, then the transforms; or no dtype",
        )


def renamed(source: WeightFiles, rename: Callable[[str], str | None]) -> WeightFiles:
    """A source with other names; what is renamed to None is left out.

    Raises:
        ValueError: Two tensors would have one name.
    """
    tensors: dict[str, Stored] = {}
    for name, stored in source.tensors.items():
        new = rename(name)
        if new in tensors and tensors[new] != stored:
            raise value_error(
                "load_weights: rename gives two tensors one name",
                found=f"{new!r}, the second for {name!r}",
                expected="a name of its own for each, or None to leave it out",
                fix='rename=lambda name: name.removeprefix("model.")',
            )
        if new is not None:
            tensors[new] = stored
    return source._replace(tensors=tensors)


# -- who reads what, and sends it to whom ------------------------------------------------------------


def _moves(
    held: Sequence[Target], source: WeightFiles, dtypes: Mapping[int, torch.dtype], ctx: DistContext, partly: Owners
) -> list[Move]:
    """What is read from where, into what, and which rank sends it to whom; see [Note: once per node]."""
    found = [(one, names) for one in held if (names := [name for name in one.names if name in source.tensors])]
    whole = {
        names[0]: one.tensor.nbytes for one, names in found if not is_sharded(one.tensor) and one.names[0] not in partly
    }
    readers = share_out_writes(whole, ctx.world_size)  # who reads most has most to send
    moves: list[Move] = []
    for one, names in found:
        if is_sharded(one.tensor):
            routes = _along_copies(names[0], one.tensor, len(moves), ctx)
        elif one.names[0] in partly:
            routes = _among_owners(partly[one.names[0]], len(moves), ctx)
        else:
            routes = ((ctx.group, readers[names[0]]),) if ctx.world_size > 1 else ()
        stored = tuple(dict.fromkeys(source.tensors[name] for name in names))
        moves.append(Move(names[0], stored, one.tensor, one.parameter, dtypes[id(one.tensor)], routes))
    return moves


def _among_owners(owner: Sequence[tuple[str, int]], index: int, ctx: DistContext) -> tuple[Route, ...]:
    """One of the ranks that have a tensor reads it, if only some have it."""
    axes = {axis for axis, _ in owner}
    line = ctx.on([name for name, _ in ctx.axes if name not in axes])
    return ((line.group, index % line.world_size),) if line.world_size > 1 else ()


def _along_copies(name: str, tensor: torch.Tensor, index: int, ctx: DistContext) -> tuple[Route, ...]:
    cut: Any = tensor
    mesh = cut.device_mesh
    check_mesh_ranks("load_weights", name, mesh, ctx, fix="weft.load_weights(model, path, ctx)  # ctx of weft.start()")
    copies = [dim for dim, one in enumerate(cut.placements) if one.is_replicate() and mesh.size(dim) > 1]
    return tuple((mesh.get_group(dim), index % mesh.size(dim)) for dim in copies)


def _send(tensors: Sequence[tuple[torch.Tensor, Sequence[Route]]], world: World) -> None:
    """Send tensors along their routes: first all along the first of theirs, then all along the second.

    Raises:
        PeerError: A peer failed or died.
    """
    with name_lost_peer("load_weights", world):
        for turn in range(max((len(routes) for _, routes in tensors), default=0)):
            waiting: list[Callable[[], None]] = []
            for tensor, routes in tensors:
                if turn < len(routes) and tensor.numel():
                    waiting.append(_sending(tensor, *routes[turn], world))
                    if len(waiting) == _IN_FLIGHT:
                        waiting.pop(0)()
            for wait in waiting:
                wait()


def _sending(tensor: torch.Tensor, group: Any, first: int, world: World) -> Callable[[], None]:
    """Begin to send a tensor, as bytes, which every backend knows; returns what waits for its end."""
    dense = tensor.detach().contiguous().resolve_conj().resolve_neg()
    work = dist.broadcast(dense.reshape(-1).view(torch.uint8), group=group, group_src=first, async_op=True)

    def wait() -> None:
        wait_for_collective(work, world)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)

    return wait
