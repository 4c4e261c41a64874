"""Tell of a unit whose parameters are read by the module around it, instead of being used in a call of the unit."""

from __future__ import annotations

import traceback

from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.engines.torch_errors import OF_LINEAR_LOSS, is_of_linear_loss
from weft.errors import listed, message


def explain_read(what: str, module: nn.Module, error: BaseException | None) -> None:
    """Add a note to an error that torch raised because a forward pass met shards.

    torch runs the hooks of a failed call, but raises its error whatever they do.

    Args:
        what: Name of the strategy.
        module: It was applied to.
        error: What the call of `module` raised.
    """
    if error is None or "DTensor" not in str(error):
        return
    names = {id(part): name for name, part in module.named_modules()}
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    readers = [part for part in callers if isinstance(part, nn.Module) and id(part) in names]
    if not readers:
        return
    reader = readers[-1]  # the innermost
    kind = type(reader).__name__.removeprefix("FSDP")
    units = [names[id(part)] for part in reader.modules() if part is not reader and isinstance(part, FSDPModule)]
    if units:
        error.add_note(
            message(
                f"{what}: {kind} reads parameters of a unit instead of calling it",
                found=f"units inside of {kind}: {listed(units)}",
                expected="units that are called: their parameters are gathered around their forward only",
                fix=OF_LINEAR_LOSS
                if is_of_linear_loss(error)
                else f"weft.{what}(..., units=...) without the one that is read; its parameters go with {kind} then",
            )
        )
