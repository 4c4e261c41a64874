"""`full_params`: whole parameters for a moment, wherever they lie."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn

from weft.checks import check_module
from weft.context import DistContext
from weft.contract import ComputesAlone, KeepsParameters, check_not_streamed, layouts, offered
from weft.errors import ContractError, listed
from weft.tensors.dtensor import resting_parameters
from weft.tensors.remote_parameter import is_elsewhere


def full_params(
    module: nn.Module, ctx: DistContext, *, write: bool = False, forward: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Gather the full parameters of a module inside the body, and restore their sharding after it.

    Use it when `fully_shard` or `zero_partition` has sharded the module, to inspect weights, to save them with another
    library (`model.state_dict()`, `save_pretrained`), or to change them by hand (an initialisation, replacing an
    embedding). Every rank must enter it, and needs memory for the whole module meanwhile. If parameters are not
    sharded, reading costs nothing.

    With `forward`, the module can also be called inside, without collectives: by one rank alone, or any number of times
    on each rank (rollouts of different lengths, generation, an evaluation on the main rank).

        with weft.full_params(model, ctx, forward=True), torch.no_grad():
            while not done:
                action = model(observation)

    Source: DeepSpeed's `zero.GatheredParameters`.

    Changes: the parameters of `module` inside the body; with `write`, what rank 0 has done to
    them stays, on all ranks.
    Collectives: one all-gather per parameter that is cut; with `write`, a broadcast of each.

    Args:
        module: With or without transforms.
        ctx: The current context.
        write: Keep the changes that rank 0 makes. Without it, changes to sharded parameters are lost.
        forward: Let calls of `module` inside compute with the gathered parameters. Without gradients only:
            a call under `torch.enable_grad()` raises `ContractError`.

    Returns:
        A context manager, for a `with` statement.

    Raises:
        TypeError: `module` is not a module.
        ContractError: With `forward`, an engine gathers the parameters in each call (DeepSpeed's stage 3), or
            other axes cut them; with `write`, other ranks have some (pipelines, lists of experts).
        CollectiveRefused: The context speaks for some ranks only.

    Example:
        >>> import torch, weft
        >>> model, ctx = nn.Linear(2, 1, bias=False), weft.local()
        >>> with weft.full_params(model, ctx, write=True), torch.no_grad():
        ...     _ = model.weight.fill_(3.0)
        >>> model.weight.tolist()
        [[3.0, 3.0]]
    """
    check_module("full_params", module, fix="with weft.full_params(model, ctx): ...")
    check_not_streamed("full_params", module)
    elsewhere = [part for part in module.modules() if any(o.elsewhere for o in offered(part, KeepsParameters))]
    if forward and elsewhere:
        raise ContractError(
            f"full_params: a {type(elsewhere[0]).__name__} cannot be called by one rank alone",
            found="parameters that another engine keeps between steps, and gathers in each call",
            expected="fully_shard, or zero_partition of torch's engine",
            fix='weft.zero_partition(model, optimizer, ctx, stage=3, engine="torch")',
        )
    found = layouts(module, ctx) if forward else {}
    cut = [name for name, one in found.items() if not set(one.cut).issubset(one.reduce_over)]
    if cut:
        raise ContractError(
            f"full_params: a {type(module).__name__} cannot be called by one rank alone",
            found=f"parameters that are sharded over axes other than those of a strategy: {listed(cut)}",
            expected="a module whose calls take no other ranks",
            fix="with weft.full_params(model, ctx): ...  # to look at weights; call the model on all ranks",
        )
    away = [name for name, p in module.named_parameters() if is_elsewhere(p)] if write else []
    if away:
        raise ContractError(
            "full_params: write=True, where each rank has parameters of its own",
            found=f"parameters of other ranks, as of a pipeline or of experts: {listed(away)}",
            expected="a module of which every rank has all parameters, whole or in shards",
            fix="model, ctx = weft.undo(model, ctx, rebind=optimizer)",
        )
    group = ctx.require_collective("full_params").group if write else None
    return _gathered(module, ctx, group, write=write, forward=forward)


@contextlib.contextmanager
def _gathered(
    module: nn.Module, ctx: DistContext, group: dist.ProcessGroup | None, *, write: bool, forward: bool
) -> Iterator[None]:
    keepers = [(part, offer) for part in module.modules() for offer in offered(part, KeepsParameters)]
    kept = {id(p) for part, _ in keepers for p in part.parameters()}
    with contextlib.ExitStack() as stack:
        for _, offer in keepers:
            stack.enter_context(offer.gathered(write=write))
        others = [p for p in resting_parameters(module) if id(p) not in kept]
        stack.enter_context(ctx.engine.gathered(module, others, group, write=write))
        for part in module.modules() if forward else ():
            for sharded in offered(part, ComputesAlone):
                stack.enter_context(sharded.alone())
        yield
