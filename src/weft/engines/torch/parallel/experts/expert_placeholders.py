"""What takes the place of listed experts while the module around them runs.

In a first run calls are noted, in a second one they are answered; see `listed.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from typing_extensions import override

from weft import torch_internals
from weft.errors import ContractError

_WITHOUT = (
    'weft.expert_parallel(..., experts=...) without this list, or weft.replicate(model, ctx, unused="zero") alone'
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class ExpertCall(NamedTuple):
    """One call of an expert: which, and with what."""

    number: int
    rows: torch.Tensor


class ExpertPlaceholder(nn.Module):
    """Takes the place of one expert in a list, while the module around it runs."""

    def __init__(self, number: int, book: Any) -> None:
        super().__init__()
        self.number = number
        self.book = book

    @override
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Note the call, or answer it."""
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or args[0].dtype not in DTYPES:
            raise ContractError(
                "expert_parallel: an expert is called with something else than one tensor of rows",
                found=f"{len(args)} argument(s), and by name: {', '.join(kwargs) or 'none'}",
                expected="expert(rows), with floating-point rows [..., width], each computed independently",
                fix=_WITHOUT,
            )
        return self.book(self.number, args[0])  # type: ignore[no-any-return]

    @override
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("number", "book", "forward", "training"):
            return super().__getattr__(name)
        raise ContractError(
            f"expert_parallel: {name!r} of an expert is read while the module around it runs",
            found=f"expert {self.number}, used other than by calls",
            expected="a forward that only calls its experts: those of other ranks have no values here",
            fix=_WITHOUT,
        )


class Answering:
    """Answers the calls of the second run, which are those of the first."""

    def __init__(self, name: str, calls: list[ExpertCall], results: list[torch.Tensor], *, compares: bool) -> None:
        self._name = name
        self._calls = calls
        self._results = results
        self._compares = compares
        self._answered = 0

    def __call__(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Answer a call."""
        place = self._answered
        self._answered += 1
        if place >= len(self._calls):
            self._raise_changed("more calls of experts")
        noted = self._calls[place]
        if noted.number != number or noted.rows.shape != rows.shape:
            self._raise_changed(f"expert {number} with {tuple(rows.shape)} as call {place}")
        # Rows that depend on the result of an expert were not numbers in the first run.
        # In a rehearsal none are numbers.
        if self._compares and not torch_internals.fake_tensor.holds(rows) and not torch.equal(noted.rows, rows):
            self._raise_changed(f"other rows for expert {number}")
        return self._results[place]

    def check_all(self) -> None:
        """Raise if calls of the first run are missing in the second."""
        if self._answered < len(self._calls):
            self._raise_changed("fewer calls of experts")

    def _raise_changed(self, found: str) -> NoReturn:
        raise ContractError(
            f"expert_parallel: forward of the module around {self._name!r} is not the same when it runs again",
            found=f"{found}, than in the first run of the same forward",
            expected="a forward that routes rows to experts by its inputs, parameters and buffers alone, where no "
            "expert's rows depend on the results of another",
            fix=_WITHOUT,
        )
