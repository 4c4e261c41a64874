"""`no_sync`: backward passes that keep their gradients on this rank, for loops that are written elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from weft.checks import check_module
from weft.context import DistContext
from weft.contract.marks import applied_to, offered
from weft.engines.results import GradSync
from weft.errors import ContractError


@contextlib.contextmanager
def no_sync(module: nn.Module, ctx: DistContext, *, enabled: bool = True) -> Iterator[None]:
    """Keep gradients on this rank: the first backward pass after the body reduces those of all passes in it.

    For a loop that cannot take its micro-batches from the windows of `accumulate_grads`. Use it alike on all ranks:

        for number, (x, y) in enumerate(loader, 1):
            with weft.contract.no_sync(model, ctx, enabled=number % 4 != 0):
                (loss_of(model(x), y) / 4).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    Several forward passes before one backward need none of this. What the body leaves behaves as gradients do:
    `zero_grad` drops them, and where no backward pass follows, the step reduces them. Sharded modules keep them whole.

    Changes: when the backward passes of `module` communicate. Collectives: none, and none in backward passes inside;
    what follows the body begins with a meeting through the store, where parameters are sharded.

    Args:
        module: What a strategy was applied to, also in parts.
        ctx: The current context.
        enabled: False: do nothing.

    Yields:
        Nothing.

    Raises:
        TypeError: `module` is not a module.
        ContractError: Its windows come from `accumulate_grads`, which decides.

    Example:
        >>> import torch, weft
        >>> model, ctx = weft.replicate(nn.Linear(1, 1), weft.local())
        >>> with no_sync(model, ctx):
        ...     model(torch.ones(1, 1)).sum().backward()
    """
    check_module("no_sync", module, fix="with weft.contract.no_sync(model, ctx): ...")
    if any(record.name == "accumulate_grads" for part in module.modules() for record in applied_to(part)):
        raise ContractError(
            "no_sync: accumulate_grads decides which backward pass communicates",
            found=f"a {type(module).__name__} whose micro-batches come in windows",
            expected="windows, or no_sync without accumulate_grads",
            fix="for window in loader:\n    for batch in window: ...  # without no_sync",
        )
    syncs = grad_syncs([module]) if enabled else []
    for sync in syncs:
        sync.begin_window()
    try:
        yield
    finally:
        for sync in syncs:
            sync.end_window(left=True)


def grad_syncs(modules: Iterable[nn.Module]) -> list[GradSync]:
    """What decides when gradients of these modules, and of their parts, are exchanged; each once."""
    found = [sync for module in modules for part in module.modules() for sync in offered(part, GradSync)]
    return list({id(sync): sync for sync in found}.values())
