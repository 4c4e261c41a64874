"""Where a step ends.

[Note: one graph per step] XLA collects operations and runs nothing until it is told to, or until a value is looked
at. All of a step is one graph here: it ends when an optimizer of tensors on XLA has stepped. A window of
micro-batches is one graph as well, and a shorter last window is another one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from weft.engines.xla.device_layout import lay_state
from weft.engines.xla.library import TorchXLA


class StepEnd:
    """A hook on all optimizers, also those that are made later; others than those of XLA are left alone."""

    def __init__(self, lib: TorchXLA, mesh: Any) -> None:
        self._lib = lib
        self._mesh = mesh
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def release(self) -> None:
        """Take the hook off."""
        self._handle.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not any(p.device.type == "xla" for group in optimizer.param_groups for p in group["params"]):
            return
        if self._mesh is not None:
            # State that this step has made, while it is a part of the graph; see [Note: marks get lost].
            lay_state(self._lib, self._mesh, optimizer)
        self._lib.torch_xla.sync()
