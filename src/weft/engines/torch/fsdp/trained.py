"""The trained parameters of a sharded module, in shards and full, and how they change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import nn

from weft import torch_internals
from weft.engines.torch.fsdp.refusals import check_loaded
from weft.engines.torch.fsdp.units import Units
from weft.engines.torch.hooks.parameter_watch import ParameterWatch
from weft.engines.torch.reducing.separate_reduction import SeparateReduction
from weft.peers.ledger import Ledger
from weft.tensors.remote_parameter import is_elsewhere


@dataclass(eq=False, repr=False)
class TrainedShards:
    """Such parameters.

    Attributes:
        unsharded: Those that FSDP2 does not cut.
        on_meta: Whether the module waits for `load_weights`.
        every: The names of all parameters, also of those that other ranks have.
        watch: What they were when the module was last called.
    """

    _what: str
    module: InitVar[nn.Module]
    _units: Units
    unsharded: SeparateReduction
    _entrance: Callable[[], Callable[[torch.Tensor], Any]]

    def __post_init__(self, module: nn.Module) -> None:
        self.every = tuple(name for name, _ in module.named_parameters())
        self.on_meta = any(t.is_meta and not is_elsewhere(t) for t in (*module.parameters(), *module.buffers()))
        self.watch = ParameterWatch(self._what, module, stands_in=self._units.stands_in)
        self._first: nn.Parameter | None = None  # whose version tells of steps
        self.unsharded.take(dict(module.named_parameters()), self._entrance)

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters an optimizer sees, by name."""
        sharded = {torch_internals.PARAM_NAME.of(one): one.sharded_param for one in self._units.parameters()}
        return {name: p for name, p in {**sharded, **self.unsharded.named}.items() if p.requires_grad}

    def first(self) -> nn.Parameter | None:
        """The first of them."""
        if self._first is None:
            self._first = next(iter(self.named().values()), None)
        return self._first

    def same_on_all(self) -> dict[str, nn.Parameter]:
        """None: each rank has a part."""
        return {}

    def ids(self) -> set[int]:
        """What gradients of parameters could be asked for: also those that FSDP2 has put into the module."""
        ids = set(map(id, self.unsharded.named.values()))
        for one in self._units.parameters():
            ids |= {id(one.sharded_param), id(torch_internals.PARAM_WHOLE.get(one))}
        return ids

    def take_loaded(self, class_name: str, module: nn.Module) -> None:
        """Use what `load_weights` has put in the place of tensors on meta."""
        check_loaded(self._what, class_name, module)
        self.watch.look(module)
        self.unsharded.take(dict(module.named_parameters()), self._entrance)
        self.on_meta = False

    def look(self, module: nn.Module, peers: Ledger) -> None:
        """Notice parameters that were added, frozen or unfrozen since the last call.

        Collectives: if others are trained now, two meetings: ranks that reduce other ones would send other sizes.
        """
        self.watch.check_same(module)
        if self.watch.changed_flags():
            self.watch.look(module)
            self.watch.agree(peers)
            self.unsharded.take(dict(module.named_parameters()), self._entrance)
