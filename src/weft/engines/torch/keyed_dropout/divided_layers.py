"""Which part of the features of an activation a rank has, where `tensor_parallel` divides the layers.

Between a column layer and the row layer after it, the last dimension of activations is divided, and so are the heads of
attention. Hooks on these layers tell which of both a module is at.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.probes.whole_unit import is_in


class DividedLayers:
    """The layers of one module.

    Attributes:
        rank: Of this process along the axis.
        ranks: How many there are.
        sequence: Whether sequences are divided between the layers.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, *, sequence: bool = False) -> None:
        self.rank = rank
        self.ranks = ranks
        self.sequence = sequence
        self._widths: dict[str, set[int]] = {}  # by the parts whose activations are divided at this moment

    def follow(self, module: nn.Module, styles: Mapping[str, object], removable: Removable) -> None:
        """Learn from hooks when the layers compute.

        Args:
            module: Whose layers were divided.
            styles: The style of each.
            removable: Learns how to take the hooks off.
        """
        for name, style in styles.items():
            is_column = isinstance(style, ColwiseParallel) or str(style).partition(":")[0] == "column"
            if is_column or style == "row" or isinstance(style, RowwiseParallel):
                after = self._divided if is_column else self._whole
                attach(module.get_submodule(name), removable, after=partial(after, name))

    def widths_at(self, name: str) -> frozenset[int]:
        """The sizes of the last dimension of activations that are divided where a module computes; empty: none is."""
        found = [widths for part, widths in self._widths.items() if is_in(name, part)]
        return frozenset().union(*found)

    def _divided(self, name: str, module: nn.Module, args: object, output: Any) -> None:
        self._widths.setdefault(name.rpartition(".")[0], set()).add(output.shape[-1])

    def _whole(self, name: str, module: nn.Module, args: object, output: Any) -> None:
        for part in [part for part in self._widths if is_in(name, part)]:
            del self._widths[part]
