"""The floating-point operations of the layers of a module in one forward pass, counted and not computed.

Source: `torch.utils.flop_counter`, over fake tensors: it runs without memory, on parameters anywhere, and always finds
the same numbers. Attention is counted as the matrix products that it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from weft import torch_internals
from weft.errors import listed, value_error
from weft.tensors.nested import map_tensors


def flops_of(module: nn.Module, names: Sequence[str], batch: object) -> list[float]:
    """Count.

    Args:
        module: With parameters anywhere, also on meta.
        names: Of its layers.
        batch: What forward takes: its argument, a tuple or list of them, or a mapping by name. Only shapes count.

    Raises:
        ValueError: Forward cannot be run without values, or has none of the layers do anything that counts.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415  (takes a second to import, as the next)
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415

    counter = FlopCounterMode(display=False)
    try:
        with torch_internals.fake_mode.found(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            state = {name: _empty(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
            args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
            inputs: Any = map_tensors(_empty, args if isinstance(args, (tuple, list)) else (args,))
            with counter:
                functional_call(module, state, tuple(inputs), dict(map_tensors(_empty, kwargs)))
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        _refuse(module, str(error).partition("\n")[0] or type(error).__name__, error)
    counts = counter.get_flop_counts()
    found = [float(sum(counts.get(f"{type(module).__name__}.{name}", {}).values())) for name in names]
    if not any(found):
        _refuse(module, f"no matrix product in {listed(names)}")
    return found


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _refuse(module: nn.Module, found: str, cause: BaseException | None = None) -> None:
    raise value_error(
        f"plan_pipeline: the operations of {type(module).__name__} cannot be counted",
        found=found,
        expected="a forward that can be run with the shapes of its inputs alone, and layers with matrix products",
        fix='weft.plan_pipeline(model, 4, cost={"layers.*": 1.0, "lm_head": 2.5})',
    ) from cause
