"""Groups of a world: making smaller ones, its mesh, and the orderly end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft import torch_internals
from weft.engines.torch_errors import is_communication_error, mixed_kinds_error
from weft.environments.joined import forget_joined
from weft.errors import ContextError, PeerError
from weft.peers.agreement import agree
from weft.peers.gloo_connections import abort_groups, groups_among, never_destroy
from weft.peers.liveness import exception_text, find_culprit, find_late_rank, part, wait_for_leaving
from weft.peers.store import StoreLost
from weft.peers.world import PREEMPTED, World
from weft.tensors.dtensor import forget_groups

_CLOSE_LIMIT_S = 30.0  # peers that take longer to come to the end are not waited for, but where they meet
_LEDGER_LIMIT_S = 2.0  # between their last steps the ranks have met in a collective
_END_LIMIT_S = 30  # of the process, after the program ended by a failure
_BLAME_LIMIT_S = 4.0  # a peer that died needs a moment until that can be seen


def new_subgroup(world: World, groups: Sequence[Sequence[int]], name: str, *, known: bool = False) -> World:
    """Make process groups for some disjoint sets of ranks, and return the one this rank is in.

    Collectives: makes one process group, of this rank's set. Every rank of `world` calls it with the same sets.

    Args:
        world: The larger world.
        groups: Ranks of `world`, each set in ascending order.
        name: For the error text when the ranks do not agree.
        known: The ranks have met already, and know that the sets are the same on all.

    Returns:
        The world of this rank's set; of the first one with rank -1, if it is in none.
    """
    mine = list(next((members for members in groups if world.rank in members), groups[0]))
    rank = mine.index(world.rank) if world.rank in mine else -1
    sub = World(ranks=tuple(world.ranks[m] for m in mine), rank=rank, timeout_s=world.timeout_s)
    sub.root = world.root
    number = world.next_number("subgroup")
    if world.group is None:
        return sub
    if world.store is None:  # the groups of others are of no use
        made = dist.new_group(list(sub.ranks), backend=dist.get_backend(world.group)) if rank >= 0 else None
        sub.group = made if isinstance(made, dist.ProcessGroup) else None
        world.root.made.append(sub)
        return sub
    if not known:
        agree(world, name, {"groups": [list(each) for each in groups]})
    store = world.store.below(f"sub/{number}/{sub.ranks[0]}")
    with _named(store.name):
        sub.group = _new_group(world, sub, are_all=sum(map(len, groups)) == world.size)
    if rank >= 0:
        sub.store = store
        world.root.made.append(sub)
    return sub


def _new_group(world: World, sub: World, *, are_all: bool) -> dist.ProcessGroup | None:
    """The process group of a smaller world; None on ranks that are not in it.

    Its members alone make it, at the same time as others make theirs. Only if torch splits the communicator of the
    default group, as it does where that has a device, all ranks of that one have to take part: they do so once,
    those that are in no set as well. If some of them are not here, torch must not split.
    """
    default: Any = dist.group.WORLD
    bound = getattr(default, "bound_device_id", None)
    source = None if bound is None else torch_internals.BACKEND_OF.of(default)(bound)
    splits = getattr(source, "supports_splitting", False) and hasattr(source, "perform_nocolor_split")
    alone = are_all or not splits or len(world.ranks) < dist.get_world_size()
    if alone and sub.rank < 0:
        return None
    backend = dist.get_backend(world.group)  # not that of the device: ranks may share one, by gloo
    options: dict[str, Any] = {"backend": backend, "timeout": timedelta(seconds=world.timeout_s)}
    unbound = bound is not None and not (splits and len(world.ranks) == dist.get_world_size())
    if unbound:
        default.bound_device_id = None
    try:
        made = dist.new_group(list(sub.ranks), use_local_synchronization=alone, **options)
    finally:
        if unbound:
            default.bound_device_id = bound
    if not isinstance(made, dist.ProcessGroup):
        return None
    world.root.disposable.append(made)
    return made


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Let the group that is made have this name, under which its ranks meet.

    That of torch follows from how many groups a process has, and two ranks may have made different numbers of them;
    and where a group was destroyed, the next one would meet what that has left behind.
    """
    c10d: Any = dist.distributed_c10d
    before = torch_internals.GROUP_NAMER.of(c10d)
    torch_internals.GROUP_NAMER.set(c10d, lambda *_, **__: name)
    try:
        yield
    finally:
        torch_internals.GROUP_NAMER.set(c10d, before)


def device_mesh(world: World, axes: tuple[tuple[str, int], ...], device_type: str) -> DeviceMesh | None:
    """Torch's mesh over groups that exist already; made once per world and set of axes."""
    if world.group is None:
        return None
    if axes not in world.meshes:
        names = tuple(name for name, _ in axes)
        sizes = tuple(size for _, size in axes)
        groups = [world.group if size == world.size else world.axis_groups[name].group for name, size in axes]
        grid = torch.tensor(world.ranks, dtype=torch.int).view(sizes)
        arguments: Any = (groups[0], device_type) if len(groups) == 1 else (groups, device_type, grid)
        world.meshes[axes] = DeviceMesh.from_group(*arguments, mesh_dim_names=names)
    return world.meshes[axes]


def close(world: World, leaving: BaseException | None = None) -> None:
    """Leave in good order: wait for work in the background and for the peers. Idempotent.

    Args:
        world: Of this rank.
        leaving: The SystemExit that ends the program in good order, if one does.

    Raises:
        PeerError: A peer failed.
        BaseException: Of work in the background that failed, if it was not raised yet.
    """
    if world.closed or _is_forked(world):
        return
    if world.failure is not None:
        close_after(world, leaving)
        return
    failure = _background_failure(world, world.timeout_s) or _difference(world)
    world.closed = True
    part(world, failure)
    wait_for_leaving(world, world.timeout_s if world.serves_store else min(world.timeout_s, _CLOSE_LIMIT_S))
    _release(world)
    if failure is not None:
        raise failure
    with contextlib.suppress(StoreLost):
        world.on_close(leaving)


def _is_forked(world: World) -> bool:
    """Whether this process is a fork of the rank: its end is not the rank's."""
    return world.process != os.getpid()


def _difference(world: World) -> ContextError | None:
    """Compare once more what the strategies compare now and then: the last steps of a program count too."""
    try:
        for ledger in list(world.ledgers):
            ledger.finish(_LEDGER_LIMIT_S)
    except ContextError as error:
        return error
    except StoreLost:
        return None
    return None


def _background_failure(world: World, limit_s: float) -> BaseException | None:
    """Wait for the work in the background; return its error, if it was not raised yet."""
    background, world.background = world.background, None
    return None if background is None else background.finish(limit_s)


def close_after(world: World, error: BaseException | None) -> None:
    """Leave after the body of `with` ended, with or without an error.

    Raises:
        PeerError: `error` is only the echo of a peer that failed; names that peer.
        ContractError: `error` is torch's, of plain tensors beside DTensors; says what to write.
    """
    if _is_forked(world):
        return
    clean_exit = isinstance(error, SystemExit) and error.code in (None, 0, PREEMPTED)
    if world.closed or (world.failure is None and (error is None or clean_exit)):
        close(world, error)
        return
    world.closed = True
    cause = _cause(world, error)
    if cause is error and not isinstance(error, PeerError) and any(place.has_no_rows for place in world.loaders):
        cause.add_note(
            f'weft: rank {world.ranks[world.rank]} was given a batch without rows, as of uneven="empty"; for code '
            'that needs some: uneven="pad", with_ids=True, and leave rows out of the loss that are not ids.valid '
            "(batch norms would count them)"
        )
    part(world, cause)
    # Once nothing here refers to the group, its connections close and the peers wake up at once.
    _release(world, failed=True)
    failure = _background_failure(world, min(world.timeout_s, _CLOSE_LIMIT_S))
    if failure is not None:
        cause.add_note(f"weft: work in the background failed too: {exception_text(failure)}")
    if world.serves_store:
        wait_for_leaving(world, _BLAME_LIMIT_S)
    if cause is not error:
        raise cause from error


def _cause(world: World, error: BaseException | None) -> BaseException:
    """What to raise for `error`, or for none: the peer whose failure it is an echo of, if there is one.

    After an abort anything may be such an echo, also that all seems to be well; see `abort_groups`.
    """
    blamed = world.failure
    mixed = mixed_kinds_error(error) if error is not None and blamed is None else None
    if mixed is not None:
        return mixed
    if error is not None and (isinstance(error, PeerError) or world.store is None):
        return error
    if error is not None and is_communication_error(error):
        blamed = _wait_for_culprit(world, error)
    if blamed is None:
        assert error is not None
        return error
    rank, text = blamed
    mine = world.ranks[world.rank]
    problem = f"rank {rank} failed, and with it rank {mine}: {text}" if rank >= 0 else text
    if rank == mine:
        problem = f"others waited for this rank, {rank}, and left: it {text}"
    return PeerError(problem, rank=rank, text=text)


def close_at_exit(world: World) -> None:
    """The end of a program, also of one that never called `close`: says which peer failed, if one did."""
    if _is_forked(world):
        return
    if world.abandoned and world.closed and hasattr(signal, "alarm"):
        # Destructors of NCCL may wait for minutes after a failure; what the program registered meanwhile has run.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_END_LIMIT_S)
    if world.closed:
        return
    # The first is there if `multiprocessing` ends this process, the second if the interpreter printed an exception.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    try:
        close_after(world, error)
    except PeerError as blamed:
        print(f"weft: {blamed}", file=sys.stderr)  # noqa: T201  (too late for any other way)


def _wait_for_culprit(world: World, error: BaseException) -> tuple[int, str] | None:
    try:
        if world.failure is not None:
            return world.failure
        if "imed out" in str(error):  # no rank died: one did not come
            return find_late_rank(world, "close")
        end = time.monotonic() + _BLAME_LIMIT_S
        while time.monotonic() < end:
            blamed = world.failure or find_culprit(world)
            if blamed is not None:
                return blamed
            time.sleep(0.05)
    except StoreLost as lost:
        return lost.rank, lost.text
    return None


def _release(world: World, *, failed: bool = False) -> None:
    if world.joined:
        forget_joined(os.environ)  # noqa: TID251
    if failed:  # NCCL destroys a group when its collectives have ended, to which no rank comes; others' groups stay
        groups = groups_among(world.ranks) if world.owner else list(world.disposable)
        abort_groups(groups)
        never_destroy([each for each in groups if dist.get_backend(each) != "gloo"])
    for holder in list(world.holders):
        holder.release()
    world.meshes.clear()
    world.messages.clear()  # they know the group
    disposable, world.disposable = world.disposable, []
    for sub in (*world.made, *world.axis_groups.values()):
        sub.group = None
        sub.meshes.clear()
        sub.messages.clear()
    world.axis_groups.clear()
    world.made.clear()
    group, world.group = world.group, None
    if group is None or not dist.is_initialized():
        return
    with contextlib.suppress(RuntimeError):  # peers that are gone cannot say goodbye
        aborted = failed and dist.get_backend(group) != "gloo"
        world.abandoned = world.abandoned or aborted
        # The first waits for nothing.
        destroy: Callable[..., None] = torch_internals.abort_group if aborted else dist.destroy_process_group
        for made in [None] if world.owner else disposable:
            destroy(made)
    forget_groups(is_device_usable=not failed)
