"""`DistContext`: where a program runs and what was done so far, as one immutable value.

This file holds the value, and `Applied`, what it knows of one transform. Its numbers are in `rank_facts.py`, whether a
collective may run in `guards.py`, smaller contexts in `sub_contexts.py`, making one in `start.py`; the live handles
behind it are `peers/world.py`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.context import shutdown
from weft.context.sub_contexts import Divisible
from weft.engines.probes import ProbeMode
from weft.errors import ContextError
from weft.peers.agreement import agree
from weft.peers.replica_groups import ReplicaGroup
from weft.peers.world import World

if TYPE_CHECKING:
    from weft.engines import Engine


@dataclass(frozen=True, kw_only=True)
class Applied:
    """One transform that was applied: its name, its options, and to what.

    The objects themselves are only referred to weakly: a context never keeps a model alive.
    Records compare by name, options and class names, so that two contexts built the same way
    over models of the same class are equal. A pickled record forgets its objects.

    Attributes:
        name: Name of the transform function.
        options: Its keyword arguments as `(name, text)`, defaults included.
        targets: Class names of the objects it was applied to.
        chosen: What it chose by itself, in words.
    """

    name: str
    options: tuple[tuple[str, str], ...] = ()
    targets: tuple[str, ...] = ()
    refs: tuple[weakref.ref[Any], ...] = field(default=(), compare=False, repr=False)
    chosen: str = field(default="", compare=False)

    def concerns(self, obj: object) -> bool:
        """Say whether this record is about `obj`."""
        return obj is not None and any(ref() is obj for ref in self.refs)

    def __getstate__(self) -> dict[str, object]:
        return {each.name: () if each.name == "refs" else getattr(self, each.name) for each in fields(self)}

    def __str__(self) -> str:
        options = ", ".join(f"{name}={text}" for name, text in self.options)
        return f"{self.name}({', '.join(self.targets)}{f'; {options}' if options else ''})"


@dataclass(frozen=True, kw_only=True)
class DistContext(Divisible):
    """Where a program runs, and which transforms were applied so far.

    A context is a value: frozen, comparable, hashable, picklable. It is made by `weft.start`, `weft.adopt`,
    `weft.local` or `weft.testing.fake`; every transform returns a new one. Several contexts with different settings can
    coexist in one process. What cannot be a value (the process group, the store) is in `world`, which is ignored by
    comparison and pickling.

    Attributes:
        rank: Rank of this process in this context; -1 if it is not part of it.
        world_size: Number of ranks of this context.
        local_rank: Rank of this process on its node.
        local_world_size: Number of processes of the job on this node.
        node_rank: Rank of this node.
        num_nodes: Number of nodes of the job.
        attempt: How often the launcher has restarted the job after a failure.
        device: Where this rank computes.
        axes: Names and sizes of the mesh axes, outermost first; sizes multiply to `world_size`.
        data_axes: The axes over which batches differ; along the others every rank sees the same.
        seed: Seed for everything that draws random numbers on purpose, such as `shard_data`.
        timeout_s: How long to wait for a peer before giving up.
        debug: Whether collectives compare their arguments over the ranks first.
        probes: When it is measured that the ranks compute together what one process computes; see `start`.
        ranks: Global rank of each member of this context.
        applied: One record per transform, in order.
        sources: For each setting, which layer it came from.
        handed_over: What the transform that returned this context offers to later ones; see `offering`.
        restricted: Set by `only`: this context is for one rank, and collectives raise an error.
        engine: Who executes the transforms.
        world: Live handles: process group and store.
        replicas: In an elastic job, the replicas that step together; all other fields describe this replica.
    """

    seed: int = 0
    timeout_s: float = 600.0
    debug: bool = False
    probes: ProbeMode = "auto"
    applied: tuple[Applied, ...] = ()
    sources: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    handed_over: tuple[object, ...] = field(default=(), compare=False, repr=False)
    engine: Engine = field(compare=False, repr=False)
    replicas: ReplicaGroup | None = field(default=None, compare=False, repr=False)

    @property
    def num_replicas(self) -> int:
        """How many replicas of an elastic job make steps together at this moment; 1 in other jobs."""
        return 1 if self.replicas is None else self.replicas.size

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of these ranks, for torch calls and `torchmetrics`; None for one rank."""
        return self.world.group

    @property
    def mesh(self) -> DeviceMesh | None:
        """Torch's `DeviceMesh` with the axes of this context, over groups that exist; None for one rank."""
        return shutdown.device_mesh(self.world, self.axes, self.device.type)

    def records(self, obj: object) -> tuple[Applied, ...]:
        """The transforms that were applied to `obj`, in order."""
        return tuple(record for record in self.applied if record.concerns(obj))

    def offering(self, *protocols: object) -> DistContext:
        """Hand something over to later transforms; for the last line of a transform.

        Args:
            protocols: Values that fulfil a protocol of `weft.contract`, such as `GradSync`, or
                have an `undo` method. They are kept with the object, not with the context.
        """
        return replace(self, handed_over=(*self.handed_over, *protocols))

    def merge(self, other: DistContext) -> DistContext:
        """Return this context with the records of `other` added; for models prepared separately.

        Raises:
            ContextError: The two contexts speak for different ranks.
        """
        if self.ranks != other.ranks or self.device != other.device:
            raise ContextError(
                "merge: the contexts belong to different ranks or devices",
                found=f"ranks {self.ranks} on {self.device}, and ranks {other.ranks} on {other.device}",
                expected="two contexts that come from one `start`",
                fix="pass one context through all transforms instead",
            )
        known = {id(record) for record in self.applied}
        added = tuple(record for record in other.applied if id(record) not in known)
        return replace(self, applied=(*self.applied, *added))

    def agree(self, what: str, facts: Mapping[str, object] | None = None) -> None:
        """Meet all ranks: each one got here, with the same facts.

        Transforms call it after they have checked their arguments and before they change
        anything, so that bad input on one rank raises on all. Nothing happens with one rank.

        Changes: nothing. Collectives: none; a meeting through the store.

        Raises:
            PeerError: Another rank failed, died, or did not come.
            ContextError: The ranks pass different facts; the text names the values.
        """
        if self.world_size > 1 and self.world.store is not None:
            agree(self.require_collective(what), what, facts)

    def print(self, *values: object, sep: str = " ", end: str = "\n", flush: bool = True) -> None:
        """Print on the main rank only."""
        if self.is_main:
            sys.stdout.write(sep.join(str(value) for value in values) + end)
            if flush:
                sys.stdout.flush()

    def close(self) -> None:
        """Leave the job: wait for the peers, then destroy the group if `start` made it (not if it was adopted)."""
        shutdown.close(self.world.root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        shutdown.close_after(self.world.root, error)

    def __getstate__(self) -> dict[str, object]:
        hidden = {"world", "restricted", "handed_over", "replicas"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # What is not in the state, but for the world, has its default.
        for name, value in {**state, "world": World(ranks=state["ranks"], rank=state["rank"])}.items():
            object.__setattr__(self, name, value)
