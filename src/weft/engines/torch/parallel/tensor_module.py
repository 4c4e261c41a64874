"""Cut the layers of a module over ranks with torch's styles, and put them together again.

torch's `ColwiseParallel` and `RowwiseParallel` cut the layers and lay the messages around their calls. What torch
leaves to the user is here: the argument of an attention or an MLP becomes a DTensor once, not once per layer in it
(`tensor_hooks.py`); the sequence is cut between the first and the last block; tied parameters stay tied; gradients of
which each rank has a part are added up in one message (`part_sums.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from typing_extensions import override

from weft import torch_internals
from weft.engines.options import TensorOptions
from weft.engines.probes import Probe
from weft.engines.torch.hooks.backward_session import BackwardSession, when_entered
from weft.engines.torch.hooks.function_transforms import refuse_torch_func
from weft.engines.torch.hooks.method_hooks import attach
from weft.engines.torch.parallel.between_blocks import BetweenBlocks
from weft.engines.torch.parallel.fused_columns import FusedColumns, with_local_sizes
from weft.engines.torch.parallel.part_sums import PartSums
from weft.engines.torch.parallel.tensor_hooks import (
    TransposedStyle,
    added_hooks,
    cut_sequence,
    gather_argument,
    hooks_of,
    join_sequence,
    own_part,
    remove_added_hooks,
    run_first,
    whole_sequence,
)
from weft.engines.torch.parts.assigned_data import AssignedData
from weft.engines.torch.parts.cut_gradient import CutLayerGradient
from weft.engines.torch.parts.dtensor_reads import ReadChecks
from weft.engines.torch.parts.linear_loss import HeadReads
from weft.engines.torch.parts.part_gradients import PartGradients
from weft.engines.torch.parts.refuse_pickle import refuse_states
from weft.engines.torch.probes.no_trace import is_measured
from weft.engines.torch.probes.whole_unit import TensorUnits, is_in, units_around
from weft.engines.torch.reducing.strategy import Strategy
from weft.errors import ContractError, listed
from weft.peers.ledger import Ledger
from weft.private_names import replaced
from weft.tensors.blocks import unsharded_parameter
from weft.tensors.dtensor import replace_parameters


class TensorParallelModule(Strategy):
    """A module whose layers are cut over the ranks of one axis, as later transforms see it."""

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: TensorOptions, peers: Ledger
    ) -> None:
        super().__init__(module, group, options, peers)
        self._ranks, self.mean_over = self.mean_over, 1  # gradients are added up, not averaged
        self._mesh = mesh
        before = hooks_of(module)
        self._fused = {name: FusedColumns(name, module, group, options) for name in options.fused}
        self._cut_layers(module, options)
        for name, part in units_around(module, options.styles).items() if self._fused or options.head_tables else ():
            inside = [fused for one, fused in self._fused.items() if is_in(one, name)]
            if inside or options.head_tables:
                attach(part, self._removable, around=partial(with_local_sizes, inside, mesh), methods=["forward"])
        for name in options.gathers:
            arrives = Shard(1) if name in options.inside else Replicate()
            attach(module.get_submodule(name), self._removable, before=gather_argument(mesh, arrives))
        for name in [name for name, style in options.styles.items() if style == "whole" and name in options.inside]:
            attach(module.get_submodule(name), self._removable, before=whole_sequence(mesh), after=own_part(mesh))
        if options.blocks:
            first, last = (module.get_submodule(options.blocks[at]) for at in (0, -1))
            attach(first, self._removable, before=cut_sequence(mesh, options.blocks[0]), first=True)
            attach(last, self._removable, after=join_sequence(mesh))
        for name in ("", *options.styles):  # parts may be called past the module
            attach(module.get_submodule(name), self._removable, after=partial(_hook_outputs, _refuse_graph))
        begins = options.blocks[0] if options.blocks else None
        for tell in options.told:
            tell(module, options.styles, mesh.get_local_rank(), mesh.size(), self._removable, first_block=begins)
        self._units = TensorUnits(module, mesh, group, options, added_hooks(before))
        self.probes: tuple[Probe, ...] = (self._units,)
        if options.blocks:
            self.probes += (BetweenBlocks(module, mesh, group, options),)
        self._removable.add(ReadChecks(HeadReads(mesh=mesh)).release)
        refuse_states(self._what, module, self._removable)
        self._gradients = gradients = PartGradients(self._what, module, CutLayerGradient)

        def follow(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():  # what is compiled is one graph; clipping is torch's error then
                gradients.follow(output)

        attach(module, self._removable, after=follow)
        mine = {n: p for n, p in module.named_parameters() if isinstance(p, DTensor) and p.device_mesh == mesh}
        alike = [name for name, p in mine.items() if p.placements[0].is_replicate()]
        self._sums = PartSums(options.summed, alike, mine)
        self._session = BackwardSession(self._begin, self._end, rounds=2)
        self._ignores = False  # backward passes
        self._assigned = AssignedData(self._what, self._class_name)
        self._cut = [(name, *_place_of(module, name)) for name in mine]
        self._look_at_data()
        self._watch(module, options)

    @property
    def adds_up(self) -> bool:
        """Whether there are gradients of which each rank has a part."""
        return bool(self._sums)

    # -- cutting ---------------------------------------------------------------------------------

    def _cut_layers(self, module: nn.Module, options: TensorOptions) -> None:
        held = [torch_internals.PARAMETERS.of(part) for part in module.modules()]
        uses = [(slots, name, p) for slots in held for name, p in slots.items() if p is not None]
        for name, style in options.styles.items():
            part = module.get_submodule(name)
            if options.make_real is not None:
                options.make_real(part)
            torch_style = self._style_of(name, part, style, options)
            if torch_style is not None:
                self._apply(part, torch_style, self._fused.get(name))
        if options.make_real is not None:
            options.make_real(module)
        made: dict[nn.Parameter, nn.Parameter] = {}
        for slots, name, before in uses:
            if slots[name] is not before:
                made.setdefault(before, slots[name])
        for slots, name, before in uses:  # tied ones stay tied, also those that were cut in several parts
            slots[name] = made.get(before, before)

    def _style_of(
        self, name: str, part: nn.Module, style: str | ParallelStyle, options: TensorOptions
    ) -> ParallelStyle | None:
        """Torch's style; None for a part that stays whole."""
        if isinstance(style, ParallelStyle):
            return style
        inside, gathered = name in options.inside, name.rpartition(".")[0] in options.gathers
        arrives = Shard(1) if inside and not gathered else Replicate()
        leaves = Shard(1) if inside else Replicate()
        if name in options.transposed:
            if style == "row":
                return TransposedStyle(column=False, arrives=Shard(-1), leaves=leaves)
            return TransposedStyle(column=True, arrives=arrives, leaves=Shard(-1) if style == "column" else leaves)
        divided_logits = ColwiseParallel(input_layouts=arrives, use_local_output=False)
        styles: dict[str, ParallelStyle] = {
            "column": ColwiseParallel(input_layouts=arrives),
            "gather": ColwiseParallel(input_layouts=arrives, output_layouts=leaves),
            "row": RowwiseParallel(output_layouts=leaves),
            "vocab": divided_logits if isinstance(part, nn.Linear) else RowwiseParallel(input_layouts=Replicate()),
        }
        return styles.get(style)

    def _apply(self, part: nn.Module, style: ParallelStyle, fused: FusedColumns | None) -> None:
        before = hooks_of(part)
        trained = {name: p.requires_grad for name, p in part.named_parameters()}
        parallelize_module(part, self._mesh, style, src_data_rank=None)
        if fused is not None:
            attach(part, self._removable, after=fused.exchange)
        run_first(before)
        for name, p in part.named_parameters():
            p.requires_grad_(trained[name])
        self._removable.add(lambda: remove_added_hooks(before))

    @override
    def release(self) -> None:
        """Let the process group go; backward raises from now on."""
        super().release()
        self._gradients.release()
        for fused in self._fused.values():
            fused.release()

    @override
    def undo(self) -> None:
        """Make the layers whole. Collectives: one all-gather per cut parameter."""
        module = self._module()
        super().undo()
        if module is not None:
            cut = [p for p in module.parameters() if isinstance(p, DTensor) and p.device_mesh == self._mesh]
            replace_parameters(module, {p: unsharded_parameter(p, None) for p in cut})

    # -- windows and steps -----------------------------------------------------------------------

    @property
    @override
    def owes(self) -> bool:
        """Whether gradients of the running window are parts of sums."""
        return super().owes and self._sums.in_parts

    def end_window(self, *, left: bool = False) -> None:
        """Add up what the window still owes. Collectives: one all-reduce, if its last micro-batch was skipped."""
        if self._close_window() and not left:
            self._add_up()

    @override
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Add up what is pending, so that no step sees parts of sums."""
        module = self._module()
        if module is None or not self._sums.in_parts or not self._sums.has_gradients(module):
            return
        if not self.enabled:
            self._raise_in_window()
        self._add_up()

    # -- forward and backward --------------------------------------------------------------------

    def _watch(self, module: nn.Module, options: TensorOptions) -> None:
        """Learn when a backward pass comes back through the module, or a part whose gradients are parts of sums."""
        self._entrance = self._session.entrance(self.enter)
        for name in sorted({name.rpartition(".")[0] for name in options.summed} - {""}):
            attach(module.get_submodule(name), self._removable, after=partial(_hook_outputs, self._entrance))
        attach(module, self._removable, before=self._before, after=self._after, first=True)
        refuse_torch_func(self._what, module, self._removable)

    @override
    def _before(self, module: Any = None, args: Any = (), kwargs: Any = None) -> None:
        if not torch.compiler.is_compiling():
            whole = [name for name, slots, own in self._cut if not isinstance(slots.get(own), DTensor | None)]
            if whole:
                raise ContractError(
                    f"tensor_parallel: {self._class_name} is called with whole tensors in place of its parts",
                    found=f"{listed(whole)}: functional_call, or a call inside weft.full_params",
                    expected="for each parameter that is cut, a DTensor that is cut as it is",
                    fix="functional_call(model, {n: p * 2 for n, p in model.named_parameters()}, x); "
                    "model(x) after full_params",
                )
            self._look_at_data()

    def _look_at_data(self) -> None:
        named = ((name, slots.get(own)) for name, slots, own in self._cut)
        self._assigned.look((name, p) for name, p in named if isinstance(p, DTensor) and p.device_mesh == self._mesh)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        """The module was called."""
        if not torch.is_grad_enabled() or self._group is None or (self._sums.checked and not self._sums):
            return
        self._look(module)
        _hook_outputs(self._entrance, module, args, output)

    @torch_internals.untraced
    def _look(self, module: nn.Module) -> None:
        if self._session.flag[0]:
            self._session.was_torn()
        if self._sums:
            trained = [p for p in module.parameters() if p.requires_grad]
            self._steps.look(next(iter(trained), None), lambda: trained)

    def without_backward(self) -> AbstractContextManager[None]:
        """Leave backward passes alone, as those inside a pipeline's call, which fill no `.grad`."""
        return replaced(self, _ignores=True)

    def enter(self) -> None:
        """The first gradient of a backward pass is here."""
        if not self._ignores:
            self._session.enter()

    def _begin(self) -> None:
        module = self._module()
        if module is not None:
            self._sums.begin(module, self._ranks)

    def _end(self) -> None:
        module = self._module()
        if module is None or self._group is None:
            return
        if not self._sums.checked:
            self._sums.check_others(module, self._group, self._what, self._units.line_for)
        if self.enabled:
            self._add_up()

    def _add_up(self) -> None:
        module = self._module()
        if module is not None and self._group is not None:
            self._sums.add_up(module, self._group)
        self._due = False


def _place_of(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    part, _, own = name.rpartition(".")
    return torch_internals.PARAMETERS.of(module.get_submodule(part)), own


def _hook_outputs(hook: Callable[[torch.Tensor], None], module: nn.Module, args: Any, output: Any) -> None:
    """A hook on a module; what is compiled is left to the hook around it, and a probe leaves no gradients."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_measured():
        when_entered(output, hook)


def _refuse_graph(gradient: torch.Tensor) -> None:
    """A hook on a tensor: torch's layers return gradients without a graph, and second derivatives would be 0."""
    if torch.is_grad_enabled():
        raise ContractError(
            "tensor_parallel: a backward pass with create_graph=True through layers that are cut",
            found="a gradient penalty, or torch.autograd.functional.hvp or hessian",
            expected="first derivatives: torch's layers, also without weft, drop the graph of their gradients",
            fix="model, ctx = weft.replicate(model, ctx)  # instead of tensor_parallel",
        )
