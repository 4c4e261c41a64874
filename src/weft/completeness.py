"""`check`: is this program complete, or would its ranks silently train apart?

A call that is missing raises nothing by itself: a loader that was not shared reads the same samples on every rank, a
model without a strategy trains for itself. What was applied is written on the objects, so it can be looked up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import data

from weft.context import DistContext
from weft.contract import GradSync, KeepsParameters, applied_to, gradient_axes, offered, trained_alone
from weft.data.loader_copy import split_already
from weft.engines.torch.hooks.bypassed_forward import line_for_container
from weft.errors import ContractError, listed
from weft.peers.agreement import exchange
from weft.tensors.dtensor import is_sharded
from weft.tensors.nested import leaves, tensors


class MissingCall(NamedTuple):
    """Something that is missing, and the line that adds it."""

    found: str
    expected: str
    fix: str


def check(ctx: DistContext, *, model: object = None, optimizer: object = None, loader: object = None) -> None:
    """Raise if a program is not complete: what it does would differ between the ranks without an error.

    To be called once, before the loop, on all ranks. What it finds on several ranks: a loader that was not shared; a
    model, or parameters of it, without a strategy; a strategy over some of the data axes only; an optimizer that
    holds none of the model's parameters, because they were exchanged for shards. On a context for one rank,
    `check(ctx.only(0), model=model)`, it finds parameters or a state_dict of which that rank holds a part only.
    It does not know of gradients that the program averages by hand, with `weft.reduce`: leave their parameters out.

    Changes: nothing. Collectives: none; a meeting through the store. None at all on a context for one rank.

    Args:
        ctx: The context that the last transform returned.
        model: A module, a state_dict, or a list, tuple or dict of them.
        optimizer: An optimizer, or several.
        loader: A loader, or a list, tuple or dict of several.

    Raises:
        ContractError: On all ranks, with everything that was found and the lines to write.
        PeerError: Another rank failed, or did not come.

    Example:
        >>> import weft
        >>> model, ctx = weft.replicate(nn.Linear(2, 2), weft.local())
        >>> weft.check(ctx, model=model, optimizer=torch.optim.SGD(model.parameters()))
    """
    modules = list(_each(model, nn.Module))
    findings: list[MissingCall] = []
    if ctx.restricted is not None:
        findings += _parts_alone(modules, model)
    else:
        findings += find_loaders([] if loader is None else _loaders(loader), ctx)
        findings += find_modules(modules, ctx)
        findings += _dead_optimizers(modules, _each(optimizer, torch.optim.Optimizer))
    everyone = [findings]
    if ctx.restricted is None and ctx.world_size > 1 and ctx.world.store is not None:
        world = ctx.require_collective("check")
        everyone = [[MissingCall(*one) for one in found] for found in exchange(world, "check", findings)]
    if any(everyone):
        raise incomplete("check", everyone)


def incomplete(what: str, everyone: Sequence[Sequence[MissingCall]]) -> ContractError:
    """The error for what was found, by rank; of this rank alone, if it is the same on all."""
    where: dict[MissingCall, list[int]] = {}
    for rank, found in enumerate(everyone):
        for finding in found:
            where.setdefault(finding, []).append(rank)
    said = [
        finding.found + ("" if len(ranks) == len(everyone) else f" (on rank {listed(ranks)})")
        for finding, ranks in where.items()
    ]
    return ContractError(
        f"{what}: the program is not complete",
        found=listed(said),
        expected=listed(dict.fromkeys(finding.expected for finding in where)),
        fix="\n            ".join(dict.fromkeys(finding.fix for finding in where)),
    )


def find_loaders(loaders: Iterable[object], ctx: DistContext, *, sure: bool = False) -> list[MissingCall]:
    """The loaders of which every rank reads all, with `sure` only where that is certain; none with one rank."""
    return [
        MissingCall(
            f"{type(loader).__name__} was not shared: each of {ctx.data_size} ranks reads all of it",
            "a loader from which each rank gets its own part",
            "loader, ctx = weft.shard_data(loader, ctx)  # already_sharded=True if each rank has its own data",
        )
        for loader in (loaders if ctx.data_size > 1 else ())
        if not (_is_shared(loader) or (sure and not _reads_all(loader)))
    ]


def _is_shared(loader: object) -> bool:
    return any(record.name == "shard_data" for record in applied_to(loader)) or bool(split_already(loader))


def _reads_all(loader: object) -> bool:
    """Whether it reads a whole dataset by samplers of torch: others may leave out what is of other ranks."""
    if not isinstance(loader, data.DataLoader) or isinstance(loader.dataset, (data.Subset, data.IterableDataset)):
        return False
    stock = type(loader.sampler) in (data.SequentialSampler, data.RandomSampler)
    return stock and (loader.batch_sampler is None or type(loader.batch_sampler) is data.BatchSampler)


def find_modules(modules: Iterable[nn.Module], ctx: DistContext) -> Iterator[MissingCall]:
    """The modules whose gradients are not averaged over all ranks that see different batches."""
    for module in modules:
        axes = gradient_axes(module, ctx)
        size = math.prod(map(ctx.axis_size, axes))
        if size == 1:
            continue
        kind = type(module).__name__
        for part in module.modules():
            over = math.prod(sync.mean_over for sync in offered(part, GradSync))
            if 1 < over < size:
                names = listed(dict.fromkeys(record.name for record in applied_to(part)))
                yield MissingCall(
                    f"gradients of {kind} are averaged over {over} of {size} ranks ({names})",
                    f"a strategy over all ranks whose batches differ: {', '.join(axes)}",
                    f"model, ctx = weft.fully_shard(model, ctx, axis={axes!r})",
                )
        alone: dict[str, list[str]] = {}
        for name in trained_alone(module, ctx):
            alone.setdefault(line_for_container(module, name), []).append(name)
        for line, own in alone.items():
            by_hand = line.startswith("p.grad")
            yield MissingCall(
                f"no strategy for {kind}: each of {size} ranks trains {listed(own)} for itself",
                "gradients averaged over the ranks: by hand, which check cannot know, or by a strategy for a forward"
                if by_hand
                else "a strategy that averages gradients over the ranks",
                line if by_hand else f"{line}  # or weft.fully_shard, weft.zero_partition",
            )


def _dead_optimizers(
    modules: Sequence[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[MissingCall]:
    if not modules or any(keeps.elsewhere for module in modules for keeps in offered(module, KeepsParameters)):
        return
    held = {id(p) for module in modules for p in module.parameters()}
    kinds = listed(type(module).__name__ for module in modules)
    for one in optimizers:
        if not any(id(p) in held for group in one.param_groups for p in group["params"]):
            yield MissingCall(
                f"{type(one).__name__} holds none of the parameters of {kinds}",
                "an optimizer over the parameters as they are after the strategy, which may exchange them for shards",
                f"optimizer = {_called(type(one))}(model.parameters())  # after the strategy",
            )


def _called(kind: type[torch.optim.Optimizer]) -> str:
    """A class of optimizers as a program calls it."""
    return f"torch.optim.{kind.__name__}" if kind is getattr(torch.optim, kind.__name__, None) else kind.__name__


def _parts_alone(modules: Sequence[nn.Module], model: object) -> Iterator[MissingCall]:
    sharded = [name for module in modules for name, p in module.named_parameters() if is_sharded(p)]
    if not modules:
        sharded = [type(one).__name__ for one in tensors(model) if is_sharded(one)]
    if sharded:
        yield MissingCall(
            f"one rank holds a part only of {listed(sharded)}",
            "all ranks save their parts, or one rank saves what was made whole",
            "weft.save(state, directory, step, ctx)  # on all ranks; or with weft.full_params(model, ctx): ..., on all",
        )


def _each(value: object, kind: type[Any]) -> Iterator[Any]:
    """The objects of a kind in a nested value."""
    found = leaves(value, whole=lambda one: isinstance(one, kind))
    return (leaf for _, leaf in found if isinstance(leaf, kind))


def _loaders(value: Any) -> list[object]:
    """One loader or several; a list of batches is no list of loaders."""
    if isinstance(value, Mapping):
        return list(value.values())
    several = isinstance(value, (list, tuple)) and all(isinstance(x, data.DataLoader) or applied_to(x) for x in value)
    return list(value) if several else [value]
