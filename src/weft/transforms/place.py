"""`place`: parts of a module on several devices, in memory of the CPU and on a disk, for calls without gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from weft.checks import check_choice, check_module
from weft.collectives.on_all_ranks import num_threads, on_all
from weft.context import DistContext
from weft.contract import Part, Phase, Undoable, transform
from weft.engines.torch.streaming.stream import Streamed, StreamOptions
from weft.errors import ContractError
from weft.peers.pretended import check_not_pretended
from weft.weights import PlacementPlan, plan_placement
from weft.weights.assign import renamed
from weft.weights.places.placed_tensors import PlacedTensors
from weft.weights.sources import from_path
from weft.weights.stored_names import as_named_now

M = TypeVar("M", bound=nn.Module)


@transform(
    phase=Phase.STRATEGY,
    changes=Part.PARAMETERS | Part.FORWARD,
    excludes={Phase.RECOMPUTE, Phase.SPLIT, Phase.GROUPS, Phase.STRATEGY, Phase.FINISH, "sync_batch_norm"},
    collective=True,
)
def place(
    module: M,
    ctx: DistContext,
    plan: PlacementPlan | Mapping[str, int | str | None],
    *,
    weights: str | Path | None = None,
    ahead: int = 1,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
) -> tuple[M, DistContext]:
    """Place the parts of a module according to a plan, and stream those stored elsewhere than they compute.

    For inference with models larger than a device, or larger than the memory. What lies on a disk is read from the
    safetensors files themselves into memory that is used again for each part, the next part while one computes. The
    result has the same bits as that of the module in memory. Calls are without gradients: to train, use a strategy.

    Changes: `module` in place. What is streamed is on meta between calls, and keeps its names and `state_dict` keys;
    `to()`, `half()`, `load_state_dict()` and the like raise, and so does a copy or a pickle of what is streamed.
    `weft.undo` gives back what was there: tensors on meta, others with their values and on their devices.
    Collectives: none; each rank places a copy of its own, and an error on one rank is one on all.

    Args:
        module: On meta (`weft.weights.on_meta`), or with values.
        ctx: The current context; `weft.local()` for a single process.
        plan: Of `weft.weights.plan_placement`; or its budgets, for a plan with defaults.
        weights: What `weft.load_weights` reads: files, folders and checkpoints. None: the module has its values, and
            nothing is to lie on a disk.
        ahead: 1 reads the next part while one computes, as far as the budget of the plan allows; 0 does not.
        strict: Raise if the names in the files differ. What is on meta has to be there always.
        rename: From a name in the files to one in the module; None leaves the tensor out.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`.

    Raises:
        CheckpointError: The files cannot be used or trusted, or do not fit the module.
        ValueError: The plan is for another module or other devices, does not fit, or values are missing.
        ContractError: In calls with gradients, of parts within parts that are streamed, and in `torch.export`.
        OrderError: A strategy was applied; or `with_precision` comes after.
        OSError: A file cannot be read.
        TypeError: Not a module.
        PeerError: Another rank failed.

    Example:
        >>> import tempfile, weft
        >>> plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        >>> state, ctx = weft.checkpointable({"model": plain}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        ...     _ = weft.export(weft.save(state, folder, 1, ctx), folder + "/weights")
        ...     with weft.weights.on_meta():
        ...         model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        ...     budgets = {"cpu": "40KB", "disk": None}
        ...     model, ctx = weft.place(model, weft.local(), budgets, weights=folder + "/weights")
        ...     torch.equal(model(torch.ones(1, 64)), plain(torch.ones(1, 64)))
        True
    """
    check_not_pretended("place: streaming from files", ctx.world.group, "weft.weights.plan_placement(model, budgets)")

    def settle() -> tuple[PlacementPlan, PlacedTensors]:
        check_module("place", module, fix="model, ctx = weft.place(model, ctx, plan)")
        check_choice("place", "ahead", ahead, (0, 1))
        made = plan if isinstance(plan, PlacementPlan) else plan_placement(module, plan)
        ctx.engine.check_devices("place", made.computes_on)
        source = None if weights is None else from_path("place", Path(weights), "model")
        if source is not None:
            source = renamed(source, rename) if rename is not None else as_named_now(source, module)
        return made, PlacedTensors(module, made, source, strict=strict, num_threads=num_threads(ctx))

    made, tensors = on_all("place", ctx, settle)
    on_all("place", ctx, tensors.read)
    tensors.put()
    main, *others = made.computes_on
    first = torch.device(main)
    named = dict(module.named_modules())
    units = {name: unit for unit in made.units for name in unit.names if name and name in named}  # each part once
    devices = tuple(
        (named[name], torch.device(unit.place) if unit.place in (main, *others) else first)
        for name, unit in units.items()
        if others
    )
    options = StreamOptions(
        parts=tensors.parts(),
        device=first,
        room=dict(made.room).get(main, 0),
        ahead=bool(ahead),
        devices=devices,
        refusing=(module, *(named[name] for name in units)),
        refuse=_refuse,
    )
    hooks = Streamed(options, tensors.fill)
    return module, ctx.offering(_PlacedModule(hooks, tensors, tuple(part.name for part in options.parts)))


class _PlacedModule:
    """What one call of `place` did.

    Attributes:
        streamed: Names of the parts that have values only while they are called.
    """

    def __init__(self, hooks: Undoable, tensors: PlacedTensors, streamed: tuple[str, ...]) -> None:
        self._hooks, self._tensors = hooks, tensors
        self.streamed = streamed

    def undo(self) -> None:
        """Give back what was there."""
        self._hooks.undo()
        self._tensors.undo()


def _refuse(call: Any, args: Any, kwargs: Any) -> NoReturn:
    raise ContractError(
        "place: the tensors of a placed module cannot be moved, cast or loaded, nor copied where they are streamed",
        found="a call of to(), half(), cuda(), load_state_dict() or the like; or copy.deepcopy, pickle, torch.save",
        expected="the devices and dtypes of the plan",
        fix="model, ctx = weft.undo(model, ctx)",
    )
