"""What every collective does first and last: may it run here, do the ranks agree, who is to blame."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weft.context import DistContext, World
from weft.context.guards import line_outside
from weft.engines.torch_errors import is_communication_error
from weft.errors import ContextError, PeerError, listed, type_error
from weft.peers.agreement import agree
from weft.peers.gloo_connections import never_destroy
from weft.peers.liveness import check_failed, find_absent_rank, find_culprit, find_late_rank, peer_error
from weft.peers.store import StoreLost
from weft.tensors.dtensor import axes_of, is_sharded
from weft.tensors.nested import leaves, map_tensors
from weft.tensors.pairwise import in_pairs, pair_rounds

T = TypeVar("T")

_SLICE = timedelta(seconds=0.5)
_ANY_ROWS = ("gather", "all_to_all")  # the number of rows may differ between ranks: that is what they are for
# Of other arguments these would return garbage, or nothing; all the others compare theirs as they go.
_COMPARED = ("broadcast", "reduce", "scatter")
_MOST_COMPARED = 32  # of values whose shapes change in each step, the first ones
_ALIGNED = 16  # bytes
HEADER_WORDS = 64  # of int64 in a first message: one size fits nearly all calls


def all_gather_words(words: list[int], ctx: DistContext, length: int = HEADER_WORDS) -> list[list[int]]:
    """Gather up to `length` integers from every rank; short rows are filled up with zeros."""
    rows = torch.zeros(ctx.world_size, length, dtype=torch.int64, device=ctx.device)
    rows[ctx.rank, : len(words)] = torch.tensor(words, dtype=torch.int64)
    all_gather_rows(rows, ctx.world)
    found: list[list[int]] = rows.tolist()
    return found


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Size of a tensor of this shape and dtype."""
    return dtype.itemsize * math.prod(shape)


def aligned(nbytes: int) -> int:
    """Where the next tensor of a message may begin, so that its memory is seen as its dtype."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, of a copy if it has gaps, as uint8 [n]."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8) if len(flat) else flat.new_empty(0, dtype=torch.uint8)


def all_gather_bytes(mine: torch.Tensor, sizes: Sequence[int], ctx: DistContext) -> list[torch.Tensor]:
    """The bytes of every rank, whose sizes all ranks know; one message, padded to the longest."""
    rows = torch.zeros(ctx.world_size, max(sizes), dtype=torch.uint8, device=ctx.device)
    rows[ctx.rank, : len(mine)] = mine
    all_gather_rows(rows, ctx.world)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def only_tensors(what: str, value: object) -> list[torch.Tensor]:
    """The leaves of `value`, or `TypeError` if one is not a tensor."""
    found: list[torch.Tensor] = []
    for path, leaf in leaves(value):
        if not isinstance(leaf, torch.Tensor):
            raise type_error(
                f"{what}: {'.'.join(path) or 'the value'} is not a tensor",
                found=f"{type(leaf).__name__} {leaf!r:.60}",
                expected="a nested value of tensors",
                fix="weft.collectives.gather_objects(value, ctx)  # for other values; of an array, torch.from_numpy(x)",
            )
        found.append(leaf)
    return found


def tensors_of(what: str, value: object, *, grad: bool) -> tuple[list[torch.Tensor], str]:
    """The tensors of `value`, and as text which of them gradients flow through.

    Raises:
        TypeError: A leaf is not a tensor, or is cut over ranks; or one requires grad, and the result would silently be
            a constant.
    """
    found = only_tensors(what, value)
    cut = [tensor for tensor in found if is_sharded(tensor)]
    if cut:
        raise type_error(
            f"{what}: a tensor is cut over ranks, whose parts do not belong together",
            found=listed(f"a DTensor {tuple(tensor.shape)} over {axes_of(tensor)}" for tensor in cut),
            expected="tensors of which each rank has its own",
            fix=f"weft.collectives.{what}(value.full_tensor(), ctx)",
        )
    tracked = [index for index, tensor in enumerate(found) if tensor.requires_grad and torch.is_grad_enabled()]
    if not grad and tracked:
        raise type_error(
            f"{what}: a tensor requires grad, and no gradient would flow back from the result",
            found=listed(f"{tuple(found[index].shape)} {found[index].dtype}" for index in tracked),
            expected="grad=True, which sends gradients back to the ranks that the tensors came from, "
            "or detached tensors",
            fix=f"weft.collectives.{what}(value, ctx, grad=True)  # or value.detach(), if it is only looked at",
        )
    return (found, f"; grad through {tracked}") if tracked else ([tensor.detach() for tensor in found], "")


def rebuilt(value: T, tensors: Iterable[torch.Tensor]) -> T:
    """`value` with other tensors."""
    outputs = iter(tensors)
    return map_tensors(lambda _: next(outputs), value)


def enter_collective(what: str, ctx: DistContext, value: object, facts: dict[str, object]) -> World:
    """Check that a collective may run here; of new arguments, or with `debug`, that all ranks mean the same one."""
    world = ctx.require_collective(what)
    check_failed(world)
    if world.store is not None and world.size > 1:
        compared = what in _COMPARED and len(world.compared) < _MOST_COMPARED
        shaped = leaves(value) if compared and value is not None else ()
        call = (what, *facts.values(), *((*path, leaf.shape, leaf.dtype) for path, leaf in shaped))
        if ctx.debug or (compared and call not in world.compared):
            described = {**facts, **({"value": _describe(what, value)} if value is not None else {})}
            try:
                with refuse_two_threads(what, world):
                    agree(world, what, {**described, "at": line_outside()})
            except PeerError as error:
                if compared:
                    error.add_note(
                        f"weft: {what} compares the ranks when arguments are new; those of this rank are: {described}"
                    )
                raise
            if compared:
                world.compared.add(call)
    return world


def _describe(what: str, value: object) -> str:
    def shape(leaf: torch.Tensor) -> str:
        return f"[rows, {', '.join(map(str, leaf.shape[1:]))}]" if what in _ANY_ROWS else str(list(leaf.shape))

    return "; ".join(f"{'.'.join(path) or 'value'}: {shape(leaf)} {leaf.dtype}" for path, leaf in leaves(value))


def all_gather_rows(rows: torch.Tensor, world: World) -> None:
    """Fill the rows [ranks, n] of the other ranks; this rank's own is there already."""
    row_gather(rows, world)()


def row_gather(rows: torch.Tensor, world: World) -> Callable[[], None]:
    """What `all_gather_rows` does, prepared for rows that are filled again and again."""
    group: Any = world.group
    if not rows.numel():
        return lambda: None
    if in_pairs(group, rows, world.size):  # a third of the cost of gloo's own
        rounds = [
            (theirs, ours, [len(ours) if rank == peer else 0 for rank in range(world.size)])
            for theirs, ours, peer in pair_rounds(rows, world.rank)
        ]

        def exchange() -> None:
            for theirs, ours, splits in rounds:
                _wait_in_slices(group.alltoall_base(theirs, ours, splits, splits), world)

        return exchange
    return lambda: wait_for_collective(begin_gathering(rows, world.rank, group), world)


def begin_gathering(rows: torch.Tensor, rank: int, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Begin to fill the rows [ranks, n] of the other ranks of a group, in which this rank has `rank`."""
    # torch 2.13 gave `all_gather_into_tensor` a new name and deprecated the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(rows.view(-1), rows[rank], group=group, async_op=True)
    return work


def wait_for_collective(work: dist.Work | None, world: World, *, on_cpu: bool = False) -> None:
    """Wait for a collective, and look after the peers meanwhile.

    A peer that failed elsewhere never comes; on gloo the wait is cut into slices to notice that. What it sent before
    may still arrive: it takes two looks to blame a peer.
    On other backends this only orders the current stream after the collective, as `work.wait()`, see `peers_named`;
    but for tensors `on_cpu`, which are gloo's in any group.

    Raises:
        PeerError: A peer failed or died.
        ContextError: Another thread of this rank called a collective meanwhile.
        RuntimeError: torch's own error of the collective.
    """
    if work is None:
        return
    if not on_cpu and dist.get_backend(world.group) != "gloo":
        work.wait()
        return
    _wait_in_slices(work, world)


def _wait_in_slices(work: dist.Work, world: World) -> None:
    if world.pretended or work.is_completed():
        work.wait()
        return
    suspect = None
    while True:
        try:
            work.wait(_SLICE)
            return
        except RuntimeError as error:
            if "Operation timed out!" not in str(error):
                raise
        if work.is_completed():  # right after the slice was over
            work.wait()
            return
        if world.clash is not None:
            world.root.abandoned = True
            group: Any = world.group
            never_destroy([group])  # the peers may be in another collective, and wait as this rank does
            raise _clash(world.clash)
        blamed = find_absent_rank(world) or find_culprit(world)
        if blamed is not None and blamed == suspect:
            world.root.abandoned = True  # gloo still waits, and in the end closes its connections
            raise peer_error("", *blamed)
        suspect = blamed


@contextlib.contextmanager
def name_lost_peer(what: str, world: World) -> Iterator[None]:
    """Turn torch's error about a lost connection into one that names the rank to blame; one thread at a time.

    A collective of an aborted group has none: what came of it is not looked at.
    """
    try:
        with refuse_two_threads(what, world):
            yield
    except StoreLost as error:
        raise peer_error(what, error.rank, error.text) from error
    except RuntimeError as error:
        blamed = world.root.failure
        if blamed is None and is_communication_error(error):
            blamed = find_late_rank(world, what) if "imed out" in str(error) else find_culprit(world)
        if blamed is None:
            raise
        raise peer_error(what, *blamed) from error
    if world.root.failure is not None:
        raise peer_error(what, *world.root.failure)


@contextlib.contextmanager
def refuse_two_threads(what: str, world: World) -> Iterator[None]:
    """Refuse a collective while another thread of this rank is in one: which of the two meets which is chance.

    Both threads learn of it: one that went on alone might meet the other one of its peers, and wait for good.
    """
    mine = (threading.get_ident(), f"{what} in thread {threading.current_thread().name!r}")
    first = world.inside.setdefault("collective", mine)
    if first[0] != mine[0]:
        world.clash = f"{first[1]}, and {mine[1]}"
        raise _clash(world.clash)
    clash = None
    try:
        yield
    finally:
        if first is mine:
            clash, world.clash = world.clash, None
            world.inside.clear()
    if clash is not None:
        raise _clash(clash)


def _clash(found: str) -> ContextError:
    return ContextError(
        "two threads of this rank call collectives on the same context",
        found=found,
        expected="one thread at a time: the order of collectives is the same on all ranks",
        fix="other = ctx.subset(range(ctx.world_size))  # a context of its own for the second thread",
    )
