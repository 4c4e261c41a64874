"""Changes to a script that make it smaller, tried without touching it."""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from weft.errors import WeftError
from weft.private_names import replaced
from weft.rehearsal.result import Rehearsal
from weft.transforms.recompute import recompute

_STRATEGIES = ("replicate", "fully_shard", "zero_partition")


@dataclass(frozen=True)
class Change:
    """Something to do otherwise.

    Attributes:
        mesh: Instead of the one that was asked for; None: as it was.
        recomputes: Blocks are computed again in backward.
        offloads: Their inputs wait in the memory of the CPU.
    """

    mesh: Mapping[str, int] | None = None
    recomputes: bool = False
    offloads: bool = False

    def __str__(self) -> str:
        parts = []
        if self.mesh is not None:
            parts.append("--mesh " + ",".join(f"{name}={size}" for name, size in self.mesh.items()))
        if self.recomputes:
            option = ", offload=True" if self.offloads else ""
            parts.append(f"weft.recompute(model, ctx, blocks=...{option}) before the strategy")
        return ", and ".join(parts)


def changes(mesh: Mapping[str, int] | None) -> Iterator[Change]:
    """Changes to try, small ones first: a wider shard axis, recompute, yet wider ones, the widest with it, offload."""
    meshes: list[Mapping[str, int]] = []
    if mesh is not None and {"replica", "shard"} <= mesh.keys():
        replicas, ranks = mesh["replica"], mesh["replica"] * mesh["shard"]
        while replicas > 1:
            replicas //= next(factor for factor in range(2, replicas + 1) if replicas % factor == 0)
            meshes.append({**mesh, "replica": replicas, "shard": ranks // replicas})
    yield from (Change(mesh=each) for each in meshes[:1])
    yield Change(recomputes=True)
    yield from (Change(mesh=each) for each in meshes[1:])
    for offloads in (False, True):
        yield from (Change(each, recomputes=True, offloads=offloads) for each in meshes[-1:])
    if not meshes:
        yield Change(recomputes=True, offloads=True)


def first_that_fits(
    limit: float, mesh: Mapping[str, int] | None, rehearse: Callable[[Change], Rehearsal]
) -> tuple[Change, Rehearsal] | None:
    """The first change with which a step needs at most `limit` bytes, rehearsed; None if there is none.

    A change with which the program fails, such as a shard axis that its heads do not divide by, is passed over.
    """
    for change in changes(mesh):
        with contextlib.suppress(WeftError, ValueError, RuntimeError):
            found = rehearse(change)
            if found.step_peak.total <= limit:
                return change, found
    return None


@contextlib.contextmanager
def recomputing_strategies(change: Change) -> Iterator[None]:
    """Let the strategies of weft, as a script finds them in the facade, recompute blocks."""
    facade: Any = importlib.import_module("weft")
    names = _STRATEGIES if change.recomputes else ()
    with replaced(facade, **{name: partial(_recomputing, getattr(facade, name), change.offloads) for name in names}):
        yield


def _recomputing(strategy: Any, offload: bool, module: nn.Module, *rest: Any, **options: Any) -> Any:
    *others, ctx = rest
    blocks = _blocks(module)
    done = any(record.name == "recompute" for record in ctx.records(module))
    if blocks is not None and not done:
        module, ctx = recompute(module, ctx, blocks=blocks, offload=offload)
    return strategy(module, *others, ctx, **options)


def _blocks(module: nn.Module) -> type[nn.Module] | None:
    """The class of the children that repeat and hold most parameters."""
    sizes: Counter[type[nn.Module]] = Counter()
    for part in module.modules():
        kinds = Counter(type(child) for child in part.children())
        for child in part.children():
            if kinds[type(child)] > 1:
                sizes[type(child)] += sum(p.numel() for p in child.parameters())
    return sizes.most_common(1)[0][0] if sizes else None
