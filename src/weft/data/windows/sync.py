"""When the modules keep gradients and when they reduce them: a window begins, its last backward pass, its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from weft.context import DistContext
from weft.contract import GradSync, ScattersGradients
from weft.data.windows.micro_batches import WindowBatches

Reduce = Literal["last", "every", "scatter"]


@dataclass
class WindowSync:
    """What the windows of one loader announce to its modules.

    Attributes:
        reduce: Whether gradients are reduced in the last backward pass of a window or in every one, or scattered in
            every one.
        syncs: What reduces them.
        mean_over: Number of ranks they are averaged over.
        ctx: Of `accumulate_grads`.
        parts: Axes besides the data axes that `mean_over` counts: their ranks see parts of the same samples.
        handed_out: Number of windows so far, of this process.
        current: What the window reads from that was handed out last, in the running or last pass.
        is_open: Whether the modules are in the middle of it.
        warned: Whether the user was warned that `len(window)` is no normaliser for batches of different sizes.
    """

    reduce: Reduce
    syncs: list[GradSync]
    mean_over: int
    ctx: DistContext
    parts: tuple[str, ...] = ()
    handed_out: int = 0
    current: WindowBatches[Any] | None = None
    is_open: bool = False
    warned: bool = False

    def begin_window(self, window: int) -> None:
        """Announce to the modules that gradients are kept from now on."""
        if window == self.handed_out:
            self.is_open = True
            for sync in self.syncs:
                if self.reduce == "scatter" and isinstance(sync, ScattersGradients):
                    sync.begin_scattered_window()
                else:
                    sync.begin_window()

    def last_backward(self, window: int) -> None:
        """Announce to the modules that the next backward pass is the window's last."""
        if window == self.handed_out:
            for sync in self.syncs:
                sync.last_backward()

    def end_window(self, window: int, *, left: bool = False) -> None:
        """Announce to the modules that the window is over, unless they know, or a later window has taken over.

        What a user keeps of an earlier window may be collected at any time, on one rank only.
        """
        if window == self.handed_out and self.is_open:
            self.is_open = False
            # Several modules are reduced in the order of their backward passes, which a rank that skipped them does not
            # know; so all ranks have to have skipped the same ones. What averages over one rank is between ranks with
            # the same batches, which skip them together.
            averaging = [sync for sync in self.syncs if sync.mean_over > 1]
            owing = [number for number, sync in enumerate(averaging) if getattr(sync, "owes", False)]
            if len(averaging) > 1 and owing and not left:
                self.ctx.agree(
                    "accumulate_grads: modules without a backward pass in the last micro-batch", {"modules": owing}
                )
            # As in a backward pass: what adds up over ranks with the same batch follows the averages.
            for sync in sorted(self.syncs, key=lambda sync: sync.mean_over == 1):
                sync.end_window(left=left)
