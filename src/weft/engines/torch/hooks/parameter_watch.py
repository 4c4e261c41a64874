"""Notice that a module has other parameters than a strategy was applied to, or trains others of them.

Looked at once per step. In the common case nothing changed, and that is seen in one pass over the modules' own
dictionaries, without names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.program_lines import part_expression, strategy_line
from weft.errors import ContractError, listed
from weft.peers.ledger import Ledger
from weft.tensors.remote_parameter import is_elsewhere


class ParameterWatch:
    """The parameters of a module as they were when they were last looked at.

    Attributes:
        trained: The parameters with `requires_grad`, by name.
        there: Names of those with `requires_grad` that another rank has.
        frozen: Names of the others.
    """

    def __init__(
        self, what: str, module: nn.Module, *, stands_in: Callable[[nn.Parameter], bool] | None = None
    ) -> None:
        """Look at a module.

        Args:
            what: Name of the strategy, for errors.
            module: Is not kept alive; its parts and parameters are.
            stands_in: Whether a parameter stands in for one of them while the module computes.
        """
        self._what = what
        self._class_name = type(module).__name__.removeprefix("FSDP")
        self._stands_in = stands_in
        self.look(module)

    def look(self, module: nn.Module) -> None:
        """Take the parameters as they are."""
        parts = list(module.modules())
        kinds = (torch_internals.MODULES, torch_internals.PARAMETERS)
        self._places: list[dict[str, Any]] = [kind.of(part) for part in parts for kind in kinds]
        self._held = list(chain.from_iterable(map(dict.values, self._places)))
        named = dict(module.named_parameters())
        self.trained = {name: p for name, p in named.items() if p.requires_grad and not is_elsewhere(p)}
        self.there = {name for name, p in named.items() if p.requires_grad and is_elsewhere(p)}
        self.frozen = {name for name, p in named.items() if not p.requires_grad}
        self._parameters = list(named.values())
        self._flags = [p.requires_grad for p in self._parameters]

    def changed_flags(self) -> bool:
        """Whether a parameter was frozen or unfrozen since."""
        return [p.requires_grad for p in self._parameters] != self._flags

    def agree(self, peers: Ledger, **facts: Any) -> list[Any]:
        """Agree with the ranks that have the same parameters about which are trained. Collectives: two meetings.

        Returns:
            The facts of all ranks.
        """
        entries = peers.meet("trained parameters", {"trained": list(self.trained), **facts})
        somewhere = {name for entry in entries for name in entry["trained"]}
        peers.agree("trained parameters", {"trained": sorted({*self.trained, *(self.there & somewhere)})})
        return entries

    def check_same(self, module: nn.Module) -> None:
        """Raise if the module has parameters that it had not.

        Raises:
            ContractError: A layer or a parameter was added, or put in place of a trained one.
        """
        held = list(chain.from_iterable(map(dict.values, self._places)))
        if len(held) == len(self._held) and all(map(operator.is_, held, self._held)):
            return
        known = set(map(id, self._parameters))
        others = [(name, p) for name, p in module.named_parameters() if id(p) not in known]
        strangers = [(name, p) for name, p in others if self._stands_in is None or not self._stands_in(p)]
        new = [name for name, p in strangers if p.requires_grad or name not in self.frozen]
        if not new:
            # A part was taken away, or moved to another place; or a frozen parameter was put in the place of another.
            if len(strangers) == len(others) and not self.changed_flags():
                self.look(module)
            return
        given = [name for name, p in strangers if not isinstance(p, nn.Parameter)]
        if given:
            raise ContractError(
                f"{self._what}: {self._class_name} is called with other parameters than its own",
                found=f"{listed(given)} in torch.func.functional_call; their gradients would not be averaged",
                expected="calls with its own parameters, without gradients, or inside torch.func.grad and the like",
                fix=f"weft.{self._what}(Adapted(model), ...)  # a module whose forward calls functional_call",
            )
        raise ContractError(
            f"{self._what}: {self._class_name} has parameters that it did not have when {self._what} was applied",
            found=f"{listed(new)}; their gradients would not be averaged",
            expected=f"all layers in the module, and module.to(...), before {self._what}",
            fix=f"{part_expression(new[0].partition('.')[0])} = ...; {strategy_line(self._what)}  # in this order",
        )
