"""Mistakes that are in a program from its first step on, and that raise nothing by themselves.

They are looked for in the first steps: ranks that compute the same batches, weights that were changed on one rank,
buffers that forward changes on each rank alone, gradients that are never cleared, or are cleared or clipped within a
window. What is found is compared at the store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.backward_session import after_callbacks
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.hooks.program_lines import strategy_line
from weft.errors import AlreadyApplied, NotSynchronized, listed, warn
from weft.peers.ledger import Ledger
from weft.tensors.blocks import memory_of
from weft.tensors.checksums import can_be_read, checksums
from weft.tensors.dtensor import local
from weft.tensors.nested import tensors
from weft.version import TESTED_TORCH

_NUM_BATCHES = 2  # that differ on this rank and are equal on all ranks: by chance next to never
_MAX_TENSORS = 8
_MAX_ELEMENTS = 4096  # of a tensor, spread over it
_NUM_STEPS = 3
_NUM_KEPT = 64  # backward passes of windows
_GRADIENT = "the gradient of "
_STATISTICS = "statistics "


class FirstSteps:
    """What one strategy sees of them.

    Attributes:
        wants_inputs: Whether the arguments of the next forward pass are looked at.
        wants_gradients: Whether gradients are.
    """

    def __init__(self, what: str, class_name: str, peers: Ledger) -> None:
        self._what = what
        self._class_name = class_name
        self._peers = peers
        self._batches: list[str] = []
        self._buffers: list[dict[str, int]] = []  # checksums, as forward passes have left them on this rank
        self._empty = 0  # windows without a backward pass on this rank
        self._seen = 0  # forward passes whose inputs were looked at
        self._kept_often = 0
        self.wants_inputs = self.wants_gradients = True
        self._stepped: int | None = None  # version of the gradient that was stepped on
        self._adds = False  # whether backward passes have added to it since
        self._kept: int | None = None  # version of a gradient of this window that is not reduced yet
        self._reduced: dict[str, int] | None = None  # checksums of the first gradients that were reduced
        self._warned: set[str] = set()

    # -- data and weights --------------------------------------------------------------------------

    @torch_internals.untraced
    def see_inputs(self, module: nn.Module | None, args: Any, kwargs: Any) -> None:
        """A forward pass with gradients has these arguments.

        Raises:
            AlreadyApplied: Torch's DistributedDataParallel calls it.
        """
        self._seen += 1
        self.wants_inputs = self._seen < _NUM_BATCHES
        outer = torch_internals.active_ddp()
        if outer is not None and any(part is module for part in outer.modules()):
            raise AlreadyApplied(
                f"{self._what}: torch's DistributedDataParallel reduces gradients of {self._class_name} as well",
                found=f"DistributedDataParallel around a module that has {self._what}",
                expected="one of the two: gradients would be averaged twice",
                fix="leave the line with DistributedDataParallel(model) out",
            )
        digest = _digest((args, kwargs))
        if digest is not None:
            self._batches.append(digest)

    def compare(self, number: int, weights: Mapping[str, torch.Tensor]) -> None:
        """All ranks are about to make step `number` of this strategy.

        Args:
            number: Of the step, from 1.
            weights: Parameters of which each rank should hold the same values, by name.

        Collectives: none; a meeting in the first step and one in the second.

        Raises:
            NotSynchronized: On all ranks; weights differ before the first step, or torch did not average gradients.
        """
        if number == 1:
            self._compare_first({name: p for name, p in weights.items() if can_be_read(p)})
        elif number == _NUM_BATCHES and not self._peers.pretended:
            told = self._peers.meet("batches of the first steps", [self._batches, self._buffers])
            everyone, buffers = ([one[at] for one in told] for at in range(2))
            self._compare_buffers(buffers)
            changes = len(set(self._batches)) == _NUM_BATCHES
            if changes and len(everyone) > 1 and all(one == everyone[0] for one in everyone):
                self._warn(
                    f"{self._what}: all {len(everyone)} ranks compute the same batches",
                    f"the inputs of the first {_NUM_BATCHES} forward passes of {self._class_name}, bit for bit",
                    "a part of the data on each rank; so every rank does the work of one",
                    "loader, ctx = weft.shard_data(loader, ctx)  # without a loader: "
                    "rows = weft.data.split_between(rows, ctx)",
                )

    def note_buffers(self, own: Mapping[str, torch.Tensor], statistics: Mapping[str, torch.Tensor]) -> None:
        """Forward passes have left these on this rank; the next one begins with those of the first rank.

        Args:
            own: Buffers by name.
            statistics: Those of batch norms.
        """
        if len(self._buffers) < _NUM_BATCHES:
            every = {**own, **{f"{_STATISTICS}{name}": buffer for name, buffer in statistics.items()}}
            named = {name: buffer for name, buffer in every.items() if can_be_read(buffer)}
            self._buffers.append(dict(zip(named, checksums(named.values()), strict=True)))

    def _compare_buffers(self, everyone: list[list[dict[str, int]]]) -> None:
        facts = [{(number, *one) for number, named in enumerate(told) for one in named.items()} for told in everyone]
        differing = sorted({name for _, name, _ in facts[0].union(*facts) - facts[0].intersection(*facts)})
        if len(set(map(len, everyone))) != 1:
            return
        statistics = [name.removeprefix(_STATISTICS) for name in differing if name.startswith(_STATISTICS)]
        wrong = [name for name in differing if not name.startswith(_STATISTICS)]
        if statistics:
            self._warn(
                f"{self._what}: batch norms of {self._class_name} normalize over the rows of each rank",
                f"other values on each rank of {listed(statistics)}, in the first {_NUM_BATCHES} steps",
                "statistics of the whole batch, as in one process; if each rank has enough rows, as with DDP: "
                f'warnings.filterwarnings("ignore", "{self._what}: batch norms")',
                f"model, ctx = weft.sync_batch_norm(model, ctx); {strategy_line(self._what)}  # in this order",
            )
        if wrong:
            self._warn(
                f"{self._what}: forward gives buffers of {self._class_name} other values on each rank",
                f"{listed(wrong)}, in the first {_NUM_BATCHES} steps; the next forward pass has those of one rank",
                "buffers that are updated with numbers of all ranks",
                "sums = weft.reduce(sums, ctx)  # in forward, before the update; "
                'mean = weft.reduce(mean, ctx, "mean"); rows = weft.gather(rows, ctx)',
            )

    def compare_changed(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Weights were changed, and neither an optimizer nor a reduced backward pass was seen so far. Does not wait.

        Raises:
            ContextError: At the next call, or when the context is closed: they had other values on another rank.
        """
        total = sum(checksums(p for p in weights.values() if can_be_read(p)))
        self._peers.compare(
            f"weights of {self._class_name}, which no optimizer has changed",
            {"a sum of their bits": total},
            fix="gradient = weft.reduce(gradient, ctx, 'mean')  # or loss.backward(); or, if they are to differ, "
            "model(x) in weft.contract.no_sync",
        )

    def _compare_first(self, weights: Mapping[str, torch.Tensor]) -> None:
        mine = dict(zip(weights, checksums(weights.values()), strict=True))
        reduced = {f"{_GRADIENT}{name}": number for name, number in (self._reduced or {}).items()}
        found = self._peers.differing("weights before the first step", mine | reduced)
        gradients = [name.removeprefix(_GRADIENT) for name in found if name.startswith(_GRADIENT)]
        wrong = [name for name in found if not name.startswith(_GRADIENT)]
        if not found:
            return
        if not wrong:
            raise not_averaged_error(
                self._what, self._class_name, f"after a backward pass, they differ in {listed(gradients)}"
            )
        raise NotSynchronized(
            f"{self._what}: weights of {self._class_name} differ between the ranks before the first step",
            found=f"changed after {self._what}, not on all ranks alike: {listed(wrong)}",
            expected=f"weights that were loaded or initialized before {self._what}, which sends them to all ranks; "
            "or alike on all ranks",
            fix=f"model.load_state_dict(...); {strategy_line(self._what)}  # in this order",
        )

    # -- gradients ---------------------------------------------------------------------------------

    def note_reduced(self, named: Mapping[str, nn.Parameter]) -> None:
        """The first backward pass has reduced the gradients of these parameters: they are the same until changed."""
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None and can_be_read(p.grad)}
        self._reduced = dict(zip(gradients, checksums(gradients.values()), strict=True))

    def note_step(self, number: int, probe: nn.Parameter | None, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps; `probe` is a parameter whose gradient tells of the others."""
        if not self.wants_gradients or probe is None:
            return
        self._kept = self._stepped = None
        self.wants_gradients = number <= _NUM_STEPS and self._kept_often < _NUM_KEPT
        if not any(p is probe for p in parameters_of(optimizer)):
            return
        adds, self._adds = self._adds, False
        if probe.grad is None:
            return
        if adds:
            self._warn(
                f"{self._what}: a backward pass adds to gradients of {self._class_name} that were stepped on",
                "no zero_grad between two steps of this optimizer",
                "gradients that are cleared after each step",
                "optimizer.step(); optimizer.zero_grad()",
            )
        self._stepped = torch_internals.VERSION.of(probe.grad) if self.wants_gradients else None

    def note_kept(self, probe: nn.Parameter | None) -> None:
        """A backward pass of a window is about to end, and its gradients are not reduced."""
        if self.wants_gradients and probe is not None:
            after_callbacks(lambda: self._note_kept(probe))  # fp16 divides them by the scale

    def _note_kept(self, probe: nn.Parameter) -> None:
        self._stepped = None
        self._kept = None if probe.grad is None else torch_internals.VERSION.of(probe.grad)
        self._kept_often += 1

    def begin_window(self) -> None:
        """What an earlier window has left may be changed."""
        self._kept = None

    def note_empty_window(self, number: int) -> None:
        """A window ends in which this rank made no backward pass; `number` reductions were there before."""
        self._empty += 1
        if self._empty == number + 1 == _NUM_STEPS:
            self._warn(
                f"{self._what}: a rank makes no backward pass through {self._class_name}",
                f"this rank skipped every micro-batch of the first {_NUM_STEPS} windows; its gradient counts as zero",
                "a backward pass on each rank",
                "(loss * window.share).backward()  # not under `if ctx.is_main:`",
            )

    def check_kept(self, probe: nn.Parameter | None) -> None:
        """The next micro-batch of a window is computed.

        Raises:
            NotSynchronized: Gradients were changed since the last one.
        """
        if self._kept is None or probe is None:
            return
        is_changed = probe.grad is None or torch_internals.VERSION.of(probe.grad) != self._kept
        if is_changed and not _has_numbers(probe.grad):
            self._warn(
                f"{self._what}: gradients of {self._class_name} were cleared in the middle of a window",
                "zero_grad between the micro-batches of a window, whose gradients are to be added up",
                "zero_grad once per window, after the step",
                "for batch in window: ...; then optimizer.step() and optimizer.zero_grad(), after the inner loop",
            )
        elif is_changed:
            raise NotSynchronized(
                f"{self._what}: gradients of {self._class_name} were changed in the middle of a window",
                found="gradients of one rank that were clipped or scaled before they were averaged over the ranks",
                expected="clipping after the last micro-batch, where gradients are those of all ranks",
                fix="for batch in window: ...; then clip_grad_norm_ and optimizer.step(), after the inner loop",
            )
        self._kept = None

    def begin_backward(self, probe: nn.Parameter | None) -> None:
        """A backward pass begins, and has not reached `probe` yet.

        It may be that of another model's loss, whose gradients here are cleared before they are stepped on.
        """
        if not self.wants_gradients or probe is None or not probe.requires_grad:
            return
        stepped, self._stepped = self._stepped, None
        if self._kept is not None and probe.grad is None:
            self.check_kept(probe)
        if stepped is None and not self._adds:
            return
        if not _has_numbers(probe.grad):
            self._adds = False
        elif stepped is not None:
            # Gradients in one bucket share a version, and one parameter has got its gradient already.
            self._adds = torch_internals.VERSION.of(probe.grad) - stepped <= 1

    def _warn(self, problem: str, found: str, expected: str, fix: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            warn(problem, found=found, expected=expected, fix=fix)


def not_averaged_error(what: str, class_name: str, found: str) -> NotSynchronized:
    """The error of a strategy that torch did not call: to be raised by all ranks, in the first step."""
    return NotSynchronized(
        f"{what}: torch has not averaged the gradients of {class_name} as it was told to",
        found=f"{found}; torch {torch.__version__}",
        expected=f"a version that weft is tested with: torch {', '.join(TESTED_TORCH)}",
        fix=f"pip install 'torch=={TESTED_TORCH[-1]}'",
    )


def _has_numbers(gradient: torch.Tensor | None) -> bool:
    """Whether what of a gradient lies here is known not to be zero."""
    part = None if gradient is None else local(gradient.detach())
    return part is not None and can_be_read(part) and bool(part.any())


def _digest(value: Any) -> str | None:
    """A hash of some elements of the first tensors; None where there is nothing to read."""
    found: Iterable[torch.Tensor] = [one for one in tensors(value) if can_be_read(one)][:_MAX_TENSORS]
    hashed = hashlib.sha256()
    for tensor in found:
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        hashed.update(memory_of(flat[:: -(-len(flat) // _MAX_ELEMENTS)].contiguous().cpu()))
    return hashed.hexdigest() if found else None
