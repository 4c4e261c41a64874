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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from weft.checkpoint.format.dtypes import of_one_kind
from weft.checkpoint.format.safetensors_read import inside
from weft.checkpoint.format.safetensors_write import check_file
from weft.checkpoint.format.tensor_blocks import Block, block_of, local_part, writers
from weft.checkpoint.state.collect import tell_keepers
from weft.context import DistContext
from weft.errors import CheckpointError, ContextError, listed, value_error
from weft.sharding import check_optimizers
from weft.tensors.dtensor import is_sharded
from weft.tensors.host_memory import memory_of
from weft.weights.convert import blocks, fill
from weft.weights.send import Route, send
from weft.weights.sources import Source, Stored
from weft.weights.targets import Memory, Target, targets

__all__ = ["Placement", "renamed"]


class Move(NamedTuple):
    """A tensor on its way from a file into a module.

    Attributes:
        name: In the module.
        stored: Where it lies.
        others: The same tensor under other names, stored by itself.
        tensor: Where it goes; maybe on meta.
        parameter: Of `Target`.
        dtype: That it shall have there.
        routes: Groups to send it along, one after the other, and which of their ranks has it first.
        reads: Whether this rank reads it.
    """

    name: str
    stored: Stored
    others: tuple[Stored, ...]
    tensor: torch.Tensor
    parameter: int
    dtype: torch.dtype
    routes: tuple[Route, ...] = ()
    reads: bool = True


class Placement:
    """Everything settled on this rank; nothing is changed before `read`.

    Attributes:
        path: Of the file, index or checkpoint.
        missing: Names that only the module has.
        unexpected: Names that only the files have.
    """

    def __init__(
        self,
        what: str,
        module: nn.Module,
        source: Source,
        ctx: DistContext,
        *,
        elsewhere: Mapping[int, torch.Tensor],
        strict: bool,
        dtype: torch.dtype | None,
    ) -> None:
        self.path = source.path
        self._what = what
        self._ctx = ctx
        self._source = source
        self._module = module
        held = targets(what, module, elsewhere)
        known = {name for target in held for name in target.names}
        self.missing = tuple(one.names[0] for one in held if not any(name in source.tensors for name in one.names))
        self.unexpected = tuple(name for name in source.tensors if name not in known)
        dtypes = {id(one.tensor): _wanted(one.tensor, dtype) for one in held}
        self._check(held, strict=strict)
        self._check_dtypes(module, held, dtypes)
        self._moves = self._routed([_move(one, source, dtypes) for one in held if one.names[0] not in self.missing])
        self._changed = [one.tensor for one in held if dtypes[id(one.tensor)] != one.tensor.dtype]
        self._dtypes = dtypes
        self._memory = Memory(what, module, ctx, {id(move.tensor) for move in self._moves}, dtypes)
        if any(one.tensor.is_meta for one in held):
            check_optimizers(what, module, ctx, ())
        self._staged: dict[int, torch.Tensor] = {}

    def facts(self) -> dict[str, object]:
        """What has to be alike on all ranks."""
        there = [[name, one.entry.dtype, one.entry.shape] for name, one in sorted(self._source.tensors.items())]
        here = [
            [move.name, str(move.dtype), tuple(move.tensor.shape), is_sharded(move.tensor), move.tensor.is_meta]
            for move in self._moves
        ]
        texts = {"tensors in the files": there, "tensors of the module": [here, self.missing]}
        return {key: hashlib.sha256(json.dumps(value).encode()).hexdigest() for key, value in texts.items()}

    # -- does it fit -----------------------------------------------------------------------------

    def _check(self, held: list[Target], *, strict: bool) -> None:
        wrong = [
            f"{name}: {stored.entry.dtype} {stored.entry.shape} for {str(one.tensor.dtype).removeprefix('torch.')} "
            f"{tuple(one.tensor.shape)}"
            for one in held
            for name in one.names
            for stored in ([self._source.tensors[name]] if name in self._source.tensors else [])
            if stored.entry.shape != tuple(one.tensor.shape)
            or not of_one_kind(getattr(torch, stored.entry.dtype), one.tensor.dtype)
        ]
        if not wrong and not (strict and (self.missing or self.unexpected)):
            return
        found = [f"in the file and in the module: {listed(wrong)}"] if wrong else []
        found += [f"not in the file: {listed(self.missing)}"] if self.missing and strict else []
        found += [f"only in the file: {listed(self.unexpected)}"] if self.unexpected and strict else []
        raise CheckpointError(
            f"{self._what}: {self._source.path} does not fit the module",
            found="; ".join(found),
            expected="the names, shapes and kinds of numbers of the module",
            fix=self._tie() or f"weft.{self._what}(module, path, ctx, {self._hint()})",
        )

    def _tie(self) -> str:
        """The call that ties what is saved once, if the module can do so and something on meta is missing."""
        named = dict(self._module.state_dict(keep_vars=True))
        ties = [name for name, part in self._module.named_modules() if callable(getattr(part, "tie_weights", None))]
        if not ties or not any(name in named and named[name].is_meta for name in self.missing):
            return ""
        owner = f"model.{ties[0]}" if ties[0] else "model"
        return f"{owner}.tie_weights()  # before the transforms: tied weights are saved once"

    def _hint(self) -> str:
        """The option that would help: names that differ at their beginning only, or some that are not there."""
        for name in self.unexpected:
            for wanted in self.missing:
                if name.endswith(f".{wanted}"):
                    return f"rename=lambda name: name.removeprefix({name.removesuffix(wanted)!r})"
                if wanted.endswith(f".{name}"):
                    return f"rename=lambda name: {wanted.removesuffix(name)!r} + name"
        return "strict=False"

    def _check_dtypes(self, module: nn.Module, held: list[Target], dtypes: dict[int, torch.dtype]) -> None:
        """Raise if a dtype would have to change where others rely on it."""
        changed = [one for one in held if dtypes[id(one.tensor)] != one.tensor.dtype]
        engine, records = self._ctx.engine, [record.name for record in self._ctx.records(module)]
        bound = [
            one.names[0]
            for one in changed
            if records
            or is_sharded(one.tensor)
            or (isinstance(one.tensor, nn.Parameter) and engine.is_reduced(one.tensor))
        ]
        if bound:
            raise value_error(
                f"{self._what}: dtype cannot be changed by now",
                found=f"{listed(bound)}, after {listed(records) or 'sharding'}",
                expected="dtype for a module that no transform was applied to",
                fix=f"weft.{self._what} first, then the transforms; or no dtype",
            )

    # -- who reads what --------------------------------------------------------------------------

    def _routed(self, moves: list[Move]) -> list[Move]:
        """Settle which rank reads each tensor; see [Note: once per node]."""
        whole = {move.name: move.tensor for move in moves if not is_sharded(move.tensor)}
        chosen = writers(whole, self._ctx.world_size)
        routed: list[Move] = []
        for index, move in enumerate(moves):
            if is_sharded(move.tensor):
                routes = self._along_copies(move, index)
            else:
                routes = ((self._ctx.group, chosen[move.name]),) if self._ctx.world_size > 1 else ()
            reads = all(dist.get_rank(group) == first for group, first in routes)
            routed.append(move._replace(routes=routes, reads=reads))
        return routed

    def _along_copies(self, move: Move, index: int) -> tuple[Route, ...]:
        cut: Any = move.tensor
        mesh = cut.device_mesh
        outside = set(mesh.mesh.flatten().tolist()) - set(self._ctx.ranks)
        if outside and mesh.size() > 1:
            raise ContextError(
                f"{self._what}: {move.name} is cut over ranks that the context does not have",
                found=f"global ranks {listed(sorted(outside))} besides {listed(self._ctx.ranks)}",
                expected="the context the module was sharded with",
                fix=f"weft.{self._what}(module, path, ctx)  # of weft.start()",
            )
        copies = [dim for dim, one in enumerate(cut.placements) if one.is_replicate() and mesh.size(dim) > 1]
        return tuple((mesh.get_group(dim), index % mesh.size(dim)) for dim in copies)

    # -- reading ---------------------------------------------------------------------------------

    def verify(self) -> None:
        """Compare the files of a checkpoint with its hashes; each rank its share of them.

        Raises:
            CheckpointError: One is damaged; the text names it.
        """
        manifest = self._source.manifest
        if manifest is not None:
            used = sorted({piece.file for move in self._moves for piece in move.stored.entry.pieces})
            for name in used[self._ctx.rank :: self._ctx.world_size]:
                check_file(self._source.path, name, manifest)

    def read(self) -> None:
        """Read this rank's share: into the memory of tensors that were on meta, else aside."""
        self._memory.take()
        for move in self._moves:
            if move.reads:
                self._read_one(move)
        self._source.files.close()

    def _read_one(self, move: Move) -> None:
        block = block_of(move.tensor)
        if move.tensor.is_meta:
            out = local_part(self._memory.of(move.tensor))
        else:
            out = self._staged[id(move.tensor)] = torch.empty(block.shape, dtype=move.dtype)
        fill(self._source.files, move.name, move.stored, block, out)
        for other in move.others:
            self._compare(move, other, block, out)

    def _compare(self, move: Move, other: Stored, block: Block, out: torch.Tensor) -> None:
        """A tied tensor that is stored twice has to be stored with one value."""
        for part, values in blocks(self._source.files, move.name, other, block, move.dtype):
            mine = out[inside(part, (0,) * len(part.shape))].to("cpu").contiguous()
            if memory_of(mine) != memory_of(values.contiguous()):
                raise CheckpointError(
                    f"{self._what}: {move.name} and {other.key} differ in {self._source.path}",
                    found="one tensor in the module, two in the file",
                    expected="equal values for tied weights",
                    fix="build the module without tying them (tie_word_embeddings=False)",
                )

    def undo(self) -> None:
        """Leave the module as it was."""
        self._memory.undo()
        self._staged.clear()

    # -- putting in place ------------------------------------------------------------------------

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
                local_part(move.tensor).copy_(staged)
        whole = ((self._ctx.group, 0),) if self._ctx.world_size > 1 else ()
        sent = [(local_part(self._memory.of(move.tensor)), move.routes) for move in self._moves]
        sent += [(self._memory.of(tensor), whole) for tensor in self._memory.drawn]
        send(self._what, sent, self._ctx.world)
        self._memory.settle()
        tell_keepers(self._module, {move.parameter: move.tensor for move in self._moves})


def renamed(what: str, source: Source, rename: Callable[[str], str | None] | None) -> Source:
    """A source with other names; what is renamed to None is left out.

    Raises:
        ValueError: Two tensors would have one name.
    """
    if rename is None:
        return source
    tensors: dict[str, Stored] = {}
    for name, stored in source.tensors.items():
        new = rename(name)
        if new in tensors and tensors[new] != stored:
            raise value_error(
                f"{what}: rename gives two tensors one name",
                found=f"{new!r}, the second for {name!r}",
                expected="a name of its own for each, or None to leave it out",
                fix='rename=lambda name: name.removeprefix("model.")',
            )
        if new is not None:
            tensors[new] = stored
    return source._replace(tensors=tensors)


def _move(target: Target, source: Source, dtypes: dict[int, torch.dtype]) -> Move:
    there = [source.tensors[name] for name in target.names if name in source.tensors]
    others = tuple(one for one in dict.fromkeys(there[1:]) if one != there[0])
    name = next(name for name in target.names if name in source.tensors)
    return Move(name, there[0], others, target.tensor, target.parameter, dtypes[id(target.tensor)])


def _wanted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
