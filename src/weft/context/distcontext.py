"""`DistContext`: where we run and what was done so far, as one immutable value.

This file holds the value and what can be asked of it. Making one is `start.py`; the live
handles behind it are `world.py`.
"""

from __future__ import annotations

import contextlib
import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.context import shutdown
from weft.context.applied import Applied
from weft.errors import CollectiveRefused, ContextError
from weft.peers.agreement import agree
from weft.peers.world import World

if TYPE_CHECKING:
    from weft.engines import Engine

__all__ = ["DistContext", "Restriction"]


class Restriction(NamedTuple):
    """That a context speaks for one rank only, and which line said so.

    Attributes:
        rank: In the context it was asked of.
        global_rank: The same one; holds in smaller contexts too.
        where: `file:line`.
    """

    rank: int
    global_rank: int
    where: str


@dataclass(frozen=True, kw_only=True)
class DistContext:
    """Where a program runs, and which transforms were applied so far.

    A context is a value: frozen, comparable, hashable, picklable. It is made by `weft.start`,
    `weft.adopt`, `weft.local` or `weft.testing.fake`; every transform returns a new one. Several
    contexts with different settings live side by side in one process. What cannot be a value (the
    process group, the store) hangs on `world`, which takes no part in comparison or pickling.

    Attributes:
        rank: Of this process among the ranks of this context; -1 when it is not one of them.
        world_size: Number of ranks of this context.
        local_rank: Of this process on its node.
        local_world_size: Number of processes of the job on this node.
        node_rank: Of this node.
        num_nodes: Number of nodes of the job.
        attempt: How often the launcher has started the job again, after a failure.
        device: Where this rank computes.
        axes: Names and sizes of the mesh axes, outermost first; sizes multiply to `world_size`.
        data_axes: The axes over which batches differ; along the others every rank sees the same.
        seed: Of everything that draws random numbers on purpose, such as `shard_data`.
        timeout_s: How long to wait for a peer before giving up.
        debug: Whether collectives compare their arguments over the ranks first.
        ranks: Global rank of each member of this context.
        applied: One record per transform, in order.
        sources: For each setting, which layer it came from.
        handed_over: What the transform that returned this context offers to later ones; see `offering`.
        restricted: Set by `only`: this context speaks for one rank, collectives are refused.
        engine: Who executes the transforms.
        world: Live handles: process group and store.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    attempt: int = 0
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (torch.device is immutable)
    axes: tuple[tuple[str, int], ...] = (("data", 1),)
    data_axes: tuple[str, ...] = ("data",)
    seed: int = 0
    timeout_s: float = 1800.0
    debug: bool = False
    ranks: tuple[int, ...] = (0,)
    applied: tuple[Applied, ...] = ()
    sources: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    handed_over: tuple[object, ...] = field(default=(), compare=False, repr=False)
    restricted: Restriction | None = field(default=None, compare=False)
    engine: Engine = field(compare=False, repr=False)
    world: World = field(compare=False, repr=False)

    # -- who am I --------------------------------------------------------------------------------

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of this context."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last rank of this context."""
        return self.rank == self.world_size - 1

    @property
    def here(self) -> bool:
        """Whether this process is one of the ranks this context speaks for."""
        return self.rank >= 0 and (self.restricted is None or self.restricted.global_rank == self.ranks[self.rank])

    @property
    def coordinates(self) -> dict[str, int]:
        """Place of this rank on each mesh axis.

        Example:
            >>> import weft
            >>> weft.testing.fake(rank=5, world_size=8, mesh={"replica": 2, "shard": 4}).coordinates
            {'replica': 1, 'shard': 1}
        """
        return self.coordinates_of(max(self.rank, 0))

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Place of any rank of this context on each mesh axis."""
        rest = rank
        places: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rest, places[name] = divmod(rest, size)
        return {name: places[name] for name, _ in self.axes}

    @property
    def data_rank(self) -> int:
        """Place of this rank among those that see different batches."""
        place = 0
        for name, size in self.axes:
            if name in self.data_axes:
                place = place * size + self.coordinates[name]
        return place

    @property
    def data_size(self) -> int:
        """Number of ranks that see different batches."""
        return math.prod(size for name, size in self.axes if name in self.data_axes)

    def axis_size(self, axis: str) -> int:
        """Size of a mesh axis.

        Raises:
            ContextError: There is no such axis.
        """
        sizes = dict(self.axes)
        if axis not in sizes:
            names = ", ".join(repr(name) for name, _ in self.axes)
            raise ContextError(
                f"axis = {axis!r} is not an axis of this context",
                found=f"axes {names}",
                expected="the name of a mesh axis",
                fix=f"weft.start(mesh={{{axis!r}: -1}}), or axis={self.axes[0][0]!r}",
            )
        return sizes[axis]

    # -- smaller contexts ------------------------------------------------------------------------

    def on(self, axis: str | Sequence[str]) -> DistContext:
        """Give the context of this rank's neighbours along one mesh axis (or along several).

        Changes: nothing. Collectives: none for one axis and for all data axes together, whose groups
        `start` made. The first call for another combination makes its groups: all ranks make that call.

        Args:
            axis: A mesh axis, or several, in any order.

        Returns:
            A context whose ranks are those that differ from this one on `axis` only; its axes are in
            the order of the mesh.

        Raises:
            ContextError: No such axis; or the ranks ask for different combinations.
            CollectiveRefused: Groups would have to be made, and this context came from `only`.
            PeerError: Another rank failed or did not come.
        """
        asked = (axis,) if isinstance(axis, str) else tuple(axis)
        for name in asked:
            self.axis_size(name)
        names = tuple(name for name, _ in self.axes if name in asked)
        sizes = tuple((name, self.axis_size(name)) for name in names)
        if {name for name, size in self.axes if size > 1} <= set(names):
            return replace(self, axes=sizes, data_axes=self._data_axes_in(names))
        members = next(line for line in self.all_lines(names) if self.rank in line)
        world = self._line(names, members)
        return replace(
            self,
            rank=members.index(self.rank) if self.rank in members else -1,
            world_size=len(members),
            axes=sizes,
            data_axes=self._data_axes_in(names),
            ranks=tuple(self.ranks[member] for member in members),
            world=world,
        )

    def all_lines(self, names: Sequence[str]) -> list[list[int]]:
        """The ranks, sorted into lines whose members differ along `names` only."""
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates_of(rank)
            lines.setdefault(tuple(at for name, at in place.items() if name not in names), []).append(rank)
        return list(lines.values())

    def _line(self, names: Sequence[str], members: list[int]) -> World:
        wide = [name for name in names if self.axis_size(name) > 1] or list(names[:1])
        live = self.world.lines.get("+".join(wide))
        if live is not None:
            return live
        if len(members) == 1 or self.world.group is None:
            return World(ranks=[self.ranks[m] for m in members], rank=members.index(self.rank))
        self.check_unrestricted(f"on {names}")
        return make_line_along(self, wide)

    def _data_axes_in(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in self.data_axes)

    def subset(self, ranks: Sequence[int]) -> DistContext:
        """Give a context for some of the ranks; every rank of this context has to call it.

        Changes: nothing. Collectives: makes one process group.

        Args:
            ranks: Ranks of this context, without repeats; their order does not matter.

        Returns:
            A context with one axis "data" over `ranks`, in ascending order. On the other ranks its `rank` is -1,
            `here` is False and every collective raises.

        Raises:
            CollectiveRefused: This context came from `only`.
            ContextError: Empty, repeated or unknown ranks.
            PeerError: Another rank failed or asked for other ranks.
        """
        self.check_unrestricted("subset")
        members = sorted(ranks)
        if not members or len(set(members)) != len(members) or not all(0 <= r < self.world_size for r in members):
            raise ContextError(
                f"subset: ranks = {members} cannot form a context",
                found=f"{members} of {self.world_size} ranks",
                expected=f"distinct ranks from 0 to {self.world_size - 1}",
                fix="ctx.subset([0, 1])",
            )
        world = shutdown.make_line(self.world, [members], f"subset {members}")
        return replace(
            self,
            rank=members.index(self.rank) if self.rank in members else -1,
            world_size=len(members),
            axes=(("data", len(members)),),
            data_axes=("data",),
            ranks=tuple(self.ranks[member] for member in members),
            world=world,
        )

    def only(self, rank: int | str = 0) -> DistContext:
        """Give a context for code that runs on one rank, on which a collective raises at once.

        `here` of the returned context is True on that rank alone, so that
        `if (solo := ctx.only(0)).here: report(model, solo)` cannot deadlock: whatever collective
        is tried below raises `CollectiveRefused` and names this line.

        Changes: nothing. Collectives: none.

        Args:
            rank: A rank of this context, or "main", "last", "local_main".

        Returns:
            This context, restricted to `rank`.

        Raises:
            ContextError: No such rank.
        """
        named = {"main": 0, "last": self.world_size - 1, "local_main": self.rank - self.local_rank}
        chosen = named.get(rank, -1) if isinstance(rank, str) else rank
        if not 0 <= chosen < self.world_size:
            raise ContextError(
                f"only: rank = {rank!r} is not a rank of this context",
                found=repr(rank),
                expected=f"0 to {self.world_size - 1}, 'main', 'last' or 'local_main'",
                fix="ctx.only(0)",
            )
        return replace(self, restricted=Restriction(chosen, self.ranks[chosen], line_outside()))

    # -- for transforms and collectives ----------------------------------------------------------

    def records(self, obj: object) -> tuple[Applied, ...]:
        """The transforms that were applied to `obj`, in order."""
        return tuple(record for record in self.applied if record.concerns(obj))

    def offering(self, *protocols: object) -> DistContext:
        """Hand something over to later transforms; for the last line of a transform.

        Changes: nothing. Collectives: none.

        Args:
            protocols: Values that fulfil a protocol of `weft.contract`, such as `GradSync`, or
                have an `undo` method. They are kept with the object, not with the context.

        Returns:
            This context with `handed_over` set; the decorator `transform` takes it off again.
        """
        return replace(self, handed_over=(*self.handed_over, *protocols))

    def merge(self, other: DistContext) -> DistContext:
        """Give this context with the records of `other` added; for models prepared separately.

        Raises:
            ContextError: The two contexts speak for different ranks.
        """
        if self.ranks != other.ranks or self.device != other.device:
            raise ContextError(
                "merge: the contexts speak for different ranks or devices",
                found=f"ranks {self.ranks} on {self.device}, and ranks {other.ranks} on {other.device}",
                expected="two contexts that come from one `start`",
                fix="pass one context through all transforms instead",
            )
        known = {id(record) for record in self.applied}
        added = tuple(record for record in other.applied if id(record) not in known)
        return replace(self, applied=(*self.applied, *added))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of these ranks, for torch calls and `torchmetrics`; None for one rank."""
        return self.world.group

    @property
    def mesh(self) -> DeviceMesh | None:
        """Torch's `DeviceMesh` with the axes of this context; None for one rank.

        Collectives: none; the groups exist already.
        """
        return shutdown.device_mesh(self.world, self.axes, self.device.type)

    def check_unrestricted(self, what: str) -> None:
        """Raise if this context speaks for one rank only, so that nothing of all ranks may run on it.

        Args:
            what: Name of the operation, for the error text.

        Raises:
            CollectiveRefused: The context came from `only`.
        """
        if self.restricted is not None:
            raise CollectiveRefused(
                f"{what}: refused on a context for rank {self.restricted.rank} only, at {line_outside()}",
                found=f"ctx.only({self.restricted.rank}) at {self.restricted.where}",
                expected="a collective is called by all ranks, on the full context",
                fix="call it on the full context, outside of the code for one rank",
            )

    def require_collective(self, what: str) -> World:
        """Return the live world, or raise if no collective may run on this context here.

        Args:
            what: Name of the operation, for the error text.

        Raises:
            CollectiveRefused: The context came from `only`, or this rank is not one of its ranks.
            ContextError: The context is closed, was unpickled, or is only pretended.
        """
        self.check_unrestricted(what)
        if self.rank < 0:
            raise CollectiveRefused(
                f"{what}: refused, this process is not one of the ranks of the context",
                found=f"ranks {self.ranks}",
                expected="only members call collectives of a subset",
                fix="if sub.here: ...",
            )
        if self.world_size > 1 and (self.world.group is None or self.world.root.closed):
            state = "is closed" if self.world.root.closed else "has no process group (a fake or an unpickled one)"
            raise ContextError(
                f"{what}: the context {state}",
                found=f"rank {self.rank} of {self.world_size}",
                expected="a context from weft.start or weft.adopt, before close",
                fix="with weft.start() as ctx: ...",
            )
        return self.world

    def agree(self, what: str, facts: Mapping[str, object] | None = None) -> None:
        """Come together with all ranks: each one got here, with the same facts.

        Transforms call it after they have checked their arguments and before they change
        anything, so that bad input on one rank raises on all. Nothing happens with one rank.

        Changes: nothing. Collectives: none; a meeting through the store.

        Raises:
            PeerError: Another rank failed, died, or did not come.
            ContextError: The ranks bring different facts; the text names the values.
        """
        if self.world_size > 1 and self.world.store is not None:
            agree(self.require_collective(what), what, facts)

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Print on the main rank only; `weft.collectives.print_once` as a method.

        Args:
            values: As for `print`.
            sep: Between the values.
            end: After the last one.

        Example:
            >>> import weft
            >>> weft.local().print("loss", 0.5)
            loss 0.5
        """
        if self.is_main:
            sys.stdout.write(sep.join(str(value) for value in values) + end)
            sys.stdout.flush()

    # -- end of life -----------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the job: wait for the peers, then destroy the group if `start` made it.

        Idempotent. A group that was adopted is never destroyed.
        """
        shutdown.close(self.world.root)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutdown.close_after(self.world.root, error)

    def __getstate__(self) -> dict[str, object]:
        hidden = {"world", "restricted", "handed_over"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "restricted", None)
        object.__setattr__(self, "handed_over", ())
        object.__setattr__(self, "world", World(ranks=self.ranks, rank=self.rank))


def make_line_along(ctx: DistContext, names: Sequence[str]) -> World:
    """Make the groups of the lines along these axes, and keep this rank's; all ranks of `ctx` call it."""
    lines = ctx.all_lines(names)
    made = shutdown.make_line(ctx.world, lines, f"axis {tuple(names)}")
    ctx.world.lines["+".join(names)] = made
    if len(names) > 1:  # along one of its axes a line has the same ranks as the mesh
        made.lines = {name: ctx.world.lines[name] for name in names}
    return made


def line_outside() -> str:
    """`file:line` of the innermost caller outside of this package (tests of weft count as outside)."""
    package = __name__.partition(".")[0]
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != package and name != "contextlib":
            break
        frame = frame.f_back
    with contextlib.suppress(ValueError):
        summary = traceback.extract_stack(frame, limit=1)[0]
        return f"{summary.filename}:{summary.lineno}"
    return "unknown line"
