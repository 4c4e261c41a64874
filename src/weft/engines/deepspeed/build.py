"""Make one of DeepSpeed's engines around a module and an optimizer."""

from __future__ import annotations

import importlib
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft import torch_internals
from weft.engines.deepspeed import internals
from weft.engines.deepspeed.buffers import Buffers, BuffersOfStage3, BuffersOfStages12
from weft.engines.deepspeed.library import Attributes, GroupView, deepspeed, restore_process_state, without_broadcasts
from weft.engines.deepspeed.parameters import Parameters
from weft.engines.deepspeed.partition import Partition, PartitionOptions
from weft.errors import value_error


def check_config(config: Mapping[str, Any], group: dist.ProcessGroup, local_rank: int) -> None:
    """Let DeepSpeed look at a configuration; nothing is made.

    Raises:
        ValueError: It refuses.
    """
    deepspeed()
    kind = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfig
    view = GroupView(group)
    try:
        with restore_process_state(local_rank):
            kind(dict(config), view)
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise value_error(
            "zero_partition: DeepSpeed rejects the configuration",
            found=f"{type(error).__name__}: {error}",
            expected="keys and values of DeepSpeed",
            fix="config={...}  # without them",
        ) from error


def partition(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    mesh: DeviceMesh | None,
    options: PartitionOptions,
) -> Partition:
    """Make an engine, and hang it under the module and the optimizer."""
    library = deepspeed()
    view = GroupView(group)
    if options.make_real is not None:
        with restore_process_state(options.local_rank), without_broadcasts():
            _make_real(module, view, options)
        options.moved()
    attributes = Attributes(module)
    inner, numbers = _twin(optimizer)
    with restore_process_state(options.local_rank), without_broadcasts():
        engine, *_ = library.initialize(model=module, optimizer=inner, config=dict(options.config), mpu=view)
        # It keeps names of modules and parameters for its error texts, and with them the model.
        internals.forget_names()
    attributes.note()
    zero = engine.optimizer
    is_sharded = options.stage == 3
    gathering = library.zero.GatheredParameters if is_sharded else None
    buffers: Buffers = BuffersOfStage3(zero) if is_sharded else BuffersOfStages12(zero)
    if not is_sharded:  # it is not needed then, and a module with it could be neither copied nor pickled
        for parameter in module.parameters():
            for each in internals.HUNG_ON:
                vars(parameter).pop(each.name, None)
    # Gradients are averaged in backward and not in its step, and around calls there are hooks of ours.
    internals.REDUCES_IN_BACKWARD.set(engine, False)  # noqa: FBT003
    internals.BEFORE_FORWARD.of(engine).remove()
    internals.AFTER_FORWARD.of(engine).remove()
    parameters = Parameters(module, buffers, view, mesh, gathering, attributes)
    return Partition(
        module,
        optimizer,
        engine,
        buffers,
        parameters,
        options=options,
        view=view,
        groups=list(zip(numbers, zero.optimizer.param_groups, strict=True)),
    )


def _make_real(module: nn.Module, view: GroupView, options: PartitionOptions) -> None:
    """Make a module on meta real, and cut it, part by part: no rank ever holds more than one part whole."""
    library = deepspeed()
    assert options.make_real is not None
    init = library.zero.Init(config_dict_or_path=dict(options.config), mpu=view, mem_efficient_linear=False)
    for part in reversed(list(module.modules())):  # inner ones first
        cut = [p for p in part.parameters(recurse=False) if internals.ID.get(p) is not None]  # tied to one that was cut
        with library.zero.GatheredParameters(cut, enabled=bool(cut)):
            options.make_real(part)
        internals.CUT_ALL.of(init)(list(part.parameters(recurse=False)))


def _twin(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, list[int]]:
    """An optimizer of the same kind over the trained parameters, for DeepSpeed to step; and which groups it has."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's
    twin.__dict__.pop("_weft_marks", None)
    for hooks in torch_internals.OPTIMIZER_HOOKS:
        hooks.set(twin, OrderedDict())
    twin.state = defaultdict(dict)
    groups, numbers = [], []
    for number, entry in enumerate(optimizer.param_groups):
        trained = [p for p in entry["params"] if p.requires_grad and internals.NUMEL.get(p, p.numel())]
        if trained:
            groups.append({**entry, "params": trained})
            numbers.append(number)
    twin.param_groups = groups
    return twin, numbers
