"""`stream`: whole weights, bucket by bucket, on every rank; `local_parts`: what a rank has of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from weft import torch_internals
from weft.checkpoint.format.manifest import TensorEntry
from weft.checkpoint.format.tensor_blocks import check_mesh_ranks, ranks_with_same_blocks
from weft.checkpoint.format.transfer import Stored, converted
from weft.checkpoint.state.adapters import adapters_of
from weft.checkpoint.state.collect import Content, collect_weights
from weft.checks import check_module
from weft.collectives.on_all_ranks import gathered, on_all
from weft.collectives.primitives import num_bytes
from weft.collectives.whole_tensors import Gather, InParts, brought
from weft.context import DistContext
from weft.contract import check_not_streamed, owners
from weft.contract.select_modules import Names
from weft.errors import ContractError
from weft.peers.agreement import disagree
from weft.tensors.blocks import Held, block_of
from weft.tensors.messages import in_buckets
from weft.tensors.remote_parameter import is_elsewhere
from weft.weights.adapter_files import check_adapter_options, chosen_adapter, merged, plan_merge
from weft.weights.export import Tensor, check_rename, num_bytes_of, renamed_tensors
from weft.weights.sources import chosen_tensors, floating_dtype


class LocalPart(NamedTuple):
    """What a rank has of a tensor.

    Attributes:
        name: In the module; of tied weights, the first.
        tensor: Its block, without a copy.
        offsets: Where the block begins in the whole tensor, for each dimension.
        shape: Of the whole tensor.
        ranks: Ranks of the context that have the same block, in order.
    """

    name: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


def local_parts(module: nn.Module, ctx: DistContext) -> tuple[LocalPart, ...]:
    """What this rank has of each parameter and saved buffer, and where it lies: for engines that cut weights anew.

    Together, the blocks of all ranks are every tensor without gaps. Tensors of other ranks, as of the other stages of a
    pipeline, are not listed. Under `local_steps` the parts are those of the weights that the ranks have in common, as
    in checkpoints.

    Changes: nothing. Collectives: a meeting, if ranks have different tensors; DeepSpeed's stage 3 gathers each
    parameter, of which the parts are copies.

    Args:
        module: With or without transforms.
        ctx: The current context.

    Returns:
        A part for each tensor, in the order of `state_dict()`.

    Raises:
        TypeError: Not a module, or `state_dict()` has something that is no parameter or buffer.
        ContractError: Parts of the module are streamed.

    Example:
        >>> import weft
        >>> [(one.name, one.offsets, one.shape, one.ranks) for one in local_parts(nn.Linear(3, 2), weft.local())]
        [('weight', (0, 0), (2, 3), (0,)), ('bias', (0,), (2,), (0,))]
    """
    held = _Weights("local_parts", module, ctx)
    here = {name: one for name, one in held.tensors.items() if not is_elsewhere(one.tensor)}
    alike = ranks_with_same_blocks(here.values(), ctx)
    there = gathered("local_parts", ctx, lambda: list(here)) if held.is_divided else None
    ranks = {name: tuple(rank for rank in alike[name] if there is None or name in there[rank]) for name in here}
    return tuple(LocalPart(name, one.local, one.block.offsets, one.shape, ranks[name]) for name, one in here.items())


def stream(
    module: nn.Module,
    ctx: DistContext,
    *,
    bucket_bytes: int | str = "512MiB",
    dtype: torch.dtype | str | None = None,
    filter: Names | None = None,
    rename: Callable[[str], str] | None = None,
    peft: bool | str = False,
    merge: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the whole weights of a module, a bucket at a time: to hand them to a rollout engine, or a server.

    Names, dtypes and bytes are those that `weft.export` writes from a checkpoint of the module, under every strategy:
    tied weights come once, under the first of their names, and buffers are those of the first rank. Every rank gets the
    same tensors in the same order, in memory that is the caller's. Beside the module, a rank holds at most a bucket
    and two tensors.

    All ranks take all tensors. A rank that leaves the loop early raises `PeerError` on those that go on to the next
    bucket; if all leave it in the same bucket, nothing is wrong. Between the first and the last tensor nothing may
    change the module.

        for name, tensor in weft.weights.stream(model, ctx, dtype="bf16"):
            engine.load_weights([(name, tensor)])

    Changes: nothing; shards that FSDP2 left gathered after a forward pass are put in place. Collectives: for each
    bucket a meeting, an all-gather of what is cut, and a broadcast of what some ranks do not have; none if all ranks
    hold everything and there are no buffers. DeepSpeed's stage 3 gathers each parameter at first.

    Args:
        module: With or without transforms; the same on all ranks.
        ctx: The context whose ranks take part; all that hold a part of the module.
        bucket_bytes: Most bytes of tensors per message: a number, or a text such as "1GB". A larger tensor is a bucket
            of its own.
        dtype: For floating-point tensors; the others keep theirs.
        filter: Names to take: a pattern as for `weft.export`, several, or a function of the name. Default: all.
        rename: From the name in the module, or after the merge, to the one that is given.
        peft: An adapter alone, under PEFT's names: its name, or True if the module has one. Without `filter` and
            `rename`.
        merge: Merge the active adapters of PEFT into their layers, one layer at a time; the module stays as it is.
            Names and numbers are those after PEFT's `merge_and_unload`.

    Returns:
        An iterator of names and tensors, on `ctx.device`.

    Raises:
        TypeError: Not a module, or `state_dict()` has something that is no parameter or buffer.
        ValueError: An option cannot be used, or numbers do not fit into `dtype`.
        CheckpointError: No tensors remain, or there is no such adapter.
        ContractError: Parts of the module are streamed, or its adapters cannot be merged layer by layer.
        ContextError: The ranks pass different modules or options, or the module is sharded over other ranks.
        PeerError: Another rank failed, or left the loop.

    Example:
        >>> import weft
        >>> [(name, tuple(tensor.shape)) for name, tensor in stream(nn.Linear(3, 2), weft.local())]
        [('weight', (2, 3)), ('bias', (2,))]
    """
    ctx.require_collective("stream")
    options = {"bucket_bytes": bucket_bytes, "dtype": str(dtype), "peft": peft, "merge": merge}
    weights = on_all("stream", ctx, lambda: _Weights("stream", module, ctx), options)

    def settled() -> list[list[_Unit]]:
        limit = num_bytes_of(
            "stream", "bucket_bytes", bucket_bytes, fix='weft.weights.stream(model, ctx, bucket_bytes="1GB")'
        )
        check_rename("stream", rename)
        fix = "weft.weights.stream(model, ctx, peft=True)"
        check_adapter_options("stream", peft, fix=fix, merge=merge, filter=filter, rename=rename)
        wanted = floating_dtype("stream", dtype)
        names, layers = _names(weights, peft=peft, merge=merge)
        stored = {
            name: Stored(origin, TensorEntry(dtype=weights.tensors[origin].dtype, shape=weights.tensors[origin].shape))
            for name, origin in names.items()
        }
        chosen = stored if peft else chosen_tensors("stream", stored, filter, option="filter")
        units = _units(weights, renamed_tensors(chosen, wanted, rename), layers)
        return list(in_buckets(units, _Unit.num_bytes, limit))

    buckets = on_all("stream", ctx, settled)
    facts = [[unit.facts() for unit in bucket] for bucket in buckets]
    ctx.agree("stream", {"tensors": hashlib.sha256(json.dumps(facts).encode()).hexdigest()})
    return _streamed(buckets, ctx)


def _streamed(buckets: list[list[_Unit]], ctx: DistContext) -> Iterator[tuple[str, torch.Tensor]]:
    number, every = len(buckets), [one for bucket in buckets for unit in bucket for one in unit.parts]
    is_sent = any(one.gathers or one.source is not None for one in every)
    try:
        while buckets:
            bucket = buckets.pop(0)
            wanted = [part for unit in bucket for part in unit.parts]
            made = brought("stream", wanted, ctx, meets=is_sent)
            for unit in bucket:
                yield from unit.results([made.pop(0) for _ in unit.parts])
    except GeneratorExit:
        if buckets and is_sent:
            error = ContractError(
                "stream: this rank has left the loop early",
                found=f"{number - len(buckets)} of {number} buckets taken",
                expected="all ranks take all tensors, or all leave in the same bucket",
                fix="weights = dict(weft.weights.stream(model, ctx))  # or leave the loop on all ranks",
            )
            disagree(ctx.world, error)
        raise


# -- what there is, and how it comes to all ranks ------------------------------------------------------------


class _Weights:
    """The tensors of a module, by name, as a checkpoint would have them.

    Attributes:
        module: Which.
        tensors: The first name of each; in parts, or on meta if other ranks have it.
        same_as: The other names of tied ones.
        named: All of `state_dict()`.
        is_divided: Whether only some ranks have a tensor, as in a pipeline.
    """

    def __init__(self, what: str, module: nn.Module, ctx: DistContext) -> None:
        check_module(what, module, fix=f"weft.weights.{what}(model, ctx)")
        check_not_streamed(what, module)
        content = Content()
        self.named, _ = collect_weights("", module, content, what=what)
        self.module, self.tensors, self.same_as = module, content.tensors, content.same_as
        self._ctx, self._owners, self._buffers = ctx, owners(module), content.buffers
        self.is_divided = bool(self._owners)

    def in_parts(self, name: str, dtype: torch.dtype) -> InParts:
        """How a tensor comes to all ranks."""
        held, source, owner, ctx = self.tensors[name], None, self._owners.get(name, ()), self._ctx
        is_divided = any(ctx.axis_size(axis) > 1 for axis, _ in owner)
        if ctx.world_size > 1 and (is_divided or (name in self._buffers and not held.is_sharded)):
            places = (ctx.coordinates_of(rank) for rank in range(ctx.world_size))
            source = next(rank for rank, place in enumerate(places) if all(place[axis] == at for axis, at in owner))
        gathers = _gathers(held, ctx)
        read = partial(_value, held, dtype, copy=source is None and not gathers, check=not ctx.world.pretended)
        return InParts(name, None if is_elsewhere(held.tensor) else read, dtype, held.shape, gathers, source)


def _value(held: Held, dtype: torch.dtype, *, copy: bool, check: bool) -> torch.Tensor:
    """What this rank has of a tensor, in another dtype."""
    value = held.local
    if dtype != value.dtype:
        return converted(held.name, value, dtype) if check else value.to(dtype)
    return value.clone() if copy else value


def _gathers(held: Held, ctx: DistContext) -> tuple[Gather, ...]:
    """What makes a tensor whole: what FSDP2 has cut comes first, then the last dimension of the mesh."""
    if not held.is_sharded:
        return ()
    cut: Any = held.tensor
    mesh, placements = cut.device_mesh, list(cut.placements)
    check_mesh_ranks("stream", held.name, mesh, ctx, fix="weft.weights.stream(model, ctx)  # ctx of weft.start()")
    from torch.distributed.tensor import Replicate  # noqa: PLC0415  (half a second of imports in torch)

    found: list[Gather] = []
    strided = [dim for dim, one in enumerate(placements) if torch_internals.strided_shard.holds(one)]
    for dim in (*strided, *(dim for dim in reversed(range(mesh.ndim)) if dim not in strided)):
        if not placements[dim].is_replicate():
            along = placements[dim].dim
            placements[dim] = Replicate()
            if mesh.size(dim) > 1:
                shape = block_of(held.shape, mesh, placements).shape
                found.append(Gather(mesh.get_group(dim), along, shape))
    return tuple(found)


# -- which of them, under which names, in which bucket ---------------------------------------------------------


class _Unit(NamedTuple):
    """Tensors that are given together: one, or those of a layer and of the adapters that are merged into it.

    Attributes:
        parts: What it is made of.
        given: Names, the name of the part, and the dtype of what is given.
        layer: Of PEFT, with adapters; None: the only part is what is given.
        path: Its name in the module.
    """

    parts: list[InParts]
    given: list[tuple[str, str, torch.dtype]]
    layer: nn.Module | None = None
    path: str = ""

    def num_bytes(self) -> int:
        """Of all parts, whole."""
        return sum(num_bytes(one.shape, one.dtype) for one in self.parts)

    def facts(self) -> list[Any]:
        """What has to be alike on all ranks, to be compared."""
        parts = [[one.name, str(one.dtype), one.shape, one.source] for one in self.parts]
        return [parts, [[name, part, str(dtype)] for name, part, dtype in self.given]]

    def results(self, made: list[Callable[[], torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """What is given."""
        if self.layer is None:
            yield self.given[0][0], made[0]()
            return
        inner = [part.name.removeprefix(f"{self.path}.") for part in self.parts]
        whole = merged(self.layer, {name: make() for name, make in zip(inner, made, strict=True)})
        for name, part, dtype in self.given:
            yield name, converted(name, whole.pop(part.removeprefix(f"{self.path}.")), dtype)


def _names(weights: _Weights, *, peft: bool | str, merge: bool) -> tuple[dict[str, str], dict[str, nn.Module]]:
    """Under which names tensors may be given, each with the first one in the module; and layers to merge, by name."""
    names = {**{name: name for name in weights.tensors}, **weights.same_as}
    if peft:
        adapters = adapters_of(weights.module, weights.named)
        what = f"stream: {type(weights.module).__name__}"
        adapter = chosen_adapter(what, adapters, peft, call="weft.weights.stream(model, ctx{})")
        return {file: names[own] for file, own in adapter.names.items()}, {}
    if merge:
        layers, after = plan_merge(weights.module, names)
        return {after[name]: origin for name, origin in names.items() if name in after}, layers
    return names, {}


def _units(weights: _Weights, tensors: Mapping[str, Tensor], layers: Mapping[str, nn.Module]) -> list[_Unit]:
    """Tensors alone, or with all others of a layer that is merged."""
    units: dict[str, _Unit] = {}
    for name, (stored, dtype) in tensors.items():
        origin = stored.key
        path = next((path for path in layers if origin.startswith(f"{path}.")), None)
        if path is None:
            units[f"{name}."] = _Unit([weights.in_parts(origin, dtype)], [(name, origin, dtype)])
            continue
        if path not in units:
            inside = {one: held.tensor.dtype for one, held in weights.tensors.items() if one.startswith(f"{path}.")}
            units[path] = _Unit([weights.in_parts(one, own) for one, own in inside.items()], [], layers[path], path)
        units[path].given.append((name, origin, dtype))
    return list(units.values())
