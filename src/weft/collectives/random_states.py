"""`sync_rng`: the random states of one rank for all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from weft.collectives.objects import broadcast
from weft.context import DistContext

__all__ = ["sync_rng"]


def sync_rng(ctx: DistContext, *, generators: Sequence[torch.Generator] = (), source: int = 0) -> None:
    """Give every rank the random states of one: python, numpy, torch and the device; and generators.

    For code that has drawn different numbers on the ranks and shall draw the same from now on.

    Changes: the global random states and `generators`, on all ranks but `source`. Collectives: two
    broadcasts.

    Args:
        ctx: Whose ranks.
        generators: Generators of your own, the same number on all ranks.
        source: The rank whose states count.

    Raises:
        ValueError: No such rank.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> weft.sync_rng(weft.local())
    """
    mine: dict[str, Any] | None = None
    if ctx.rank == source or ctx.world_size == 1:
        numpy: Any = np.random.get_state()
        mine = {
            "python": random.getstate(),
            "numpy": [numpy[0], torch.from_numpy(numpy[1].astype(np.int64)), *numpy[2:]],
            "torch": torch.default_generator.get_state(),
            "device": ctx.engine.rng_state(ctx.device),
            "generators": [generator.get_state() for generator in generators],
        }
    states = broadcast(mine, ctx, source=source)
    if ctx.rank == source or states is None:
        return
    name, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *rest))
    torch.default_generator.set_state(states["torch"].cpu())
    if states["device"] is not None:
        ctx.engine.set_rng_state(ctx.device, states["device"].cpu())
    for generator, state in zip(generators, states["generators"], strict=True):
        generator.set_state(state.cpu())
