"""Smaller contexts: along mesh axes, over some ranks, for one rank; and the process groups they need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from weft.context.guards import Guarded, Restriction, line_outside
from weft.context.rank_facts import rank_groups
from weft.context.shutdown import device_mesh, new_subgroup
from weft.errors import ContextError
from weft.peers.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class Divisible(Guarded):
    """The part of a `DistContext` that makes smaller ones."""

    def on(self, axis: str | Sequence[str]) -> Self:
        """Return the context of the ranks that differ from this one on `axis` only.

        Changes: nothing. Collectives: none for one axis and for all data axes together, whose groups
        `start` made. The first call for another combination makes its groups: all ranks make that call.

        Args:
            axis: A mesh axis, or several, in any order; the result has them in the order of the mesh.

        Raises:
            ContextError: No such axis; or the ranks ask for different combinations.
            CollectiveRefused: Groups would have to be made, and this context came from `only`.
            PeerError: Another rank failed or did not come.
        """
        asked = (axis,) if isinstance(axis, str) else tuple(axis)
        for name in asked:
            self.axis_size(name)
        axes = tuple((name, size) for name, size in self.axes if name in asked)
        names = tuple(name for name, _ in axes)
        data_axes = tuple(name for name in names if name in self.data_axes)
        if {name for name, size in self.axes if size > 1} <= set(names):
            return replace(self, axes=axes, data_axes=data_axes)
        members = next(group for group in rank_groups(self, names) if self.rank in group)
        return self._of_members(members, axes, data_axes, _axis_world(self, axes, members))

    def subset(self, ranks: Sequence[int]) -> Self:
        """Return a context with one axis "data" over some of the ranks; every rank of this context has to call it.

        On the other ranks its `rank` is -1, `here` is False and every collective raises.

        Changes: nothing. Collectives: makes one process group.

        Args:
            ranks: Ranks of this context, without repeats; the result has them in ascending order.

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
                fix=f"ctx.subset({list(range(self.world_size))[:2]})",
            )
        world = new_subgroup(self.world, [members], f"subset {members}")
        return self._of_members(members, (("data", len(members)),), ("data",), world)

    def only(self, rank: int | str = 0) -> Self:
        """Return a context for code that runs on one rank, on which a collective raises at once.

        `here` of the returned context is True on that rank alone, so that
        `if (solo := ctx.only(0)).here: report(model, solo)` cannot deadlock: a collective
        below raises `CollectiveRefused` and names this line.

        Changes: nothing. Collectives: none.

        Args:
            rank: A rank of this context, or "main", "last", "local_main".

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

    def _of_members(
        self, members: list[int], axes: tuple[tuple[str, int], ...], data_axes: tuple[str, ...], world: World
    ) -> Self:
        return replace(
            self,
            rank=members.index(self.rank) if self.rank in members else -1,
            world_size=len(members),
            axes=axes,
            data_axes=data_axes,
            ranks=tuple(self.ranks[member] for member in members),
            world=world,
        )


def mesh_along(ctx: Divisible, dims: Sequence[Sequence[str]]) -> DeviceMesh:
    """Torch's mesh with a dimension for each set of axes, part of one over all ranks. Collectives: as `on` says.

    Raises:
        ContextError: Axes that are to be one dimension are not adjacent.
    """
    return mesh_view(ctx, dims)[tuple(_dim_name(ctx, axes) for axes in dims)]


def mesh_view(ctx: Divisible, dims: Sequence[Sequence[str]]) -> DeviceMesh:
    """Torch's mesh over all ranks, in which each of some sets of axes is one dimension; see `mesh_along`."""
    mesh = device_mesh(ctx.world, ctx.axes, ctx.device.type)
    assert mesh is not None
    if all(len(axes) == 1 for axes in dims):
        return mesh
    order = [name for name, size in ctx.axes if size > 1]
    joined: dict[str, tuple[str, ...]] = {}
    for axes in dims:
        wide = tuple(_dim_name(ctx, axes).split("+"))
        joined["+".join(wide)] = wide
        at = [order.index(name) for name in wide if name in order]
        if at and at[-1] - at[0] >= len(at):
            raise ContextError(
                f"the axes {wide} of the mesh are not adjacent",
                found=f"mesh {dict(ctx.axes)}",
                expected=f"one after the other those along which parameters are sharded together: {wide}",
                fix=f"weft.start(mesh={json.dumps({name: ctx.axis_size(name) for name in (*wide, *dict(ctx.axes))})})",
            )
        ctx.on(wide)  # makes the groups
    whole: dict[str, int] = {}
    for name, size in ctx.axes:
        key = next((key for key, wide in joined.items() if name in wide), name)
        whole[key] = whole.get(key, 1) * size
    joint = device_mesh(ctx.world, tuple(whole.items()), ctx.device.type)
    assert joint is not None
    return joint


def _dim_name(ctx: Guarded, axes: Sequence[str]) -> str:
    """What some axes are called that are one dimension of a mesh."""
    return "+".join(name for name, size in ctx.axes if size > 1 and name in axes) or axes[0]


def new_axis_group(ctx: Guarded, names: Sequence[str], *, known: bool = False) -> World:
    """Make the groups along these axes, and return this rank's; all ranks of `ctx` call it.

    Args:
        ctx: Of all ranks.
        names: Axes.
        known: The ranks have met already, and know that their meshes are the same.
    """
    made = new_subgroup(ctx.world, rank_groups(ctx, names), f"axis {tuple(names)}", known=known)
    ctx.world.axis_groups["+".join(names)] = made
    if len(names) > 1:  # along one of its axes the group has the same ranks as the mesh
        made.axis_groups = {name: ctx.world.axis_groups[name] for name in names}
    return made


def _axis_world(ctx: Guarded, axes: tuple[tuple[str, int], ...], members: list[int]) -> World:
    wide = [name for name, size in axes if size > 1] or [name for name, _ in axes[:1]]
    live = ctx.world.axis_groups.get("+".join(wide))
    if live is not None:
        return live
    if len(members) == 1 or ctx.world.group is None:
        return World(ranks=tuple(ctx.ranks[m] for m in members), rank=members.index(ctx.rank))
    ctx.check_unrestricted(f"on {tuple(name for name, _ in axes)}")
    return new_axis_group(ctx, wide)
