"""`gathered`: whole parameters for a moment, wherever they lie."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn

from weft.context import DistContext
from weft.contract import KeepsParameters, offered
from weft.errors import message

__all__ = ["gathered"]


def gathered(module: nn.Module, ctx: DistContext, *, write: bool = False) -> contextlib.AbstractContextManager[None]:
    """Let a module have its parameters whole inside of the body, and as before after it.

    For looking at weights, or changing them by hand (an initialisation, an embedding that is
    replaced), when `fully_shard` or `zero_partition` have cut them up. Every rank enters it, and needs
    the memory of the whole module meanwhile. Where parameters are whole anyway, reading costs nothing.

    Source: DeepSpeed's `zero.GatheredParameters`.

    Changes: the parameters of `module` inside of the body; with `write`, what rank 0 has done to
    them stays, on all ranks.
    Collectives: one all-gather per parameter that is cut; with `write`, a broadcast of each.

    Args:
        module: With or without transforms.
        ctx: Where we run.
        write: Keep changes. Those of rank 0 count, so it is enough if that makes them. Without it,
            changes of parameters that are cut are lost.

    Returns:
        A context manager, for a `with` statement.

    Raises:
        TypeError: `module` is no module.
        CollectiveRefused: The context speaks for some ranks only.

    Example:
        >>> import torch, weft
        >>> model, ctx = nn.Linear(2, 1, bias=False), weft.local()
        >>> with weft.gathered(model, ctx, write=True), torch.no_grad():
        ...     _ = model.weight.fill_(3.0)
        >>> model.weight.tolist()
        [[3.0, 3.0]]
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            message(
                "gathered: this is not a module",
                found=type(module).__name__,
                expected="a torch.nn.Module",
                fix="with weft.gathered(model, ctx): ...",
            )
        )
    return _gathered(module, ctx, ctx.require_collective("gathered").group if write else None, write=write)


@contextlib.contextmanager
def _gathered(module: nn.Module, ctx: DistContext, group: dist.ProcessGroup | None, *, write: bool) -> Iterator[None]:
    keepers = [(part, offer) for part in module.modules() for offer in offered(part, KeepsParameters)]
    kept = {id(p) for part, _ in keepers for p in part.parameters()}
    with contextlib.ExitStack() as stack:
        for _, offer in keepers:
            stack.enter_context(offer.gathered(write=write))
        others = [p for p in module.parameters() if id(p) not in kept]
        stack.enter_context(ctx.engine.gathered(module, others, group, write=write))
        yield
