"""What a sharded module cannot do, with what to do instead."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft import torch_internals
from weft.engines.torch.hooks.bypassed_forward import calls_that_bypass_forward
from weft.engines.torch.hooks.graph_walk import Running
from weft.engines.torch.hooks.method_hooks import Removable
from weft.engines.torch.parts.refuse_pickle import refuse_states
from weft.errors import ContractError, listed

_COPYING = ("__deepcopy__", "__reduce_ex__")  # looked up on the instance, before its class


def _refuse_copy(what: str, class_name: str, *unused: Any) -> NoReturn:
    """What copying and pickling of a sharded module come to."""
    raise ContractError(
        f"{what}: a sharded {class_name} can be neither copied nor pickled",
        found="copy.deepcopy, pickle or torch.save of the module itself",
        expected="weft.save or weft.export for files, weft.average_weights for averages; or a plain module",
        fix="model, ctx = weft.undo(model, ctx, rebind=optimizer)  # before a copy; or copy it before sharding",
    )


def refuse_copies(what: str, module: nn.Module, removable: Removable) -> None:
    """Let copies and pickles of the sharded parts of a module raise, and of its state_dict; `allow_copies` ends it."""
    refuse_states(what, module, removable)
    for part in module.modules():
        if any(True for _ in part.parameters()):
            refuse = partial(_refuse_copy, what, type(part).__name__.removeprefix("FSDP"))
            vars(part).update(dict.fromkeys(_COPYING, refuse))


def allow_copies(module: nn.Module) -> None:
    """Take that back."""
    for part in module.modules():
        for name in _COPYING:
            vars(part).pop(name, None)


def refuse_calls_of_parts(
    what: str, module: nn.Module, sharded: Callable[[], Collection[int]], methods: Sequence[str], removable: Removable
) -> None:
    """Let calls of parts whose parameters are never gathered raise, in place of torch's error about DTensors.

    Args:
        what: Name of the strategy.
        module: Sharded in units, which may be called themselves.
        sharded: Ids of its parameters, where they are in shards.
        methods: Listed ones.
        removable: Ends it; to be used when the module is called, so that calls cost nothing more.

    Raises:
        ContractError: Not here: in such a call.
    """
    of = weakref.ref(module)

    def refuse(part: nn.Module, args: Any) -> None:
        whole, ids = of(), sharded()
        names = {id(p): name for name, p in whole.named_parameters()} if whole is not None else {}
        held = [names[id(p)] for p in part.parameters(recurse=False) if id(p) in ids and id(p) in names]
        if held:
            found, fix = calls_that_bypass_forward(what, held[0], whole, methods)
            raise ContractError(
                f"{what}: {held[0]!r} of {type(whole).__name__.removeprefix('FSDP')} is used past forward, in shards",
                found=found,
                expected="calls of the module itself, of a unit, or of a method in methods=(...)",
                fix=fix,
            )

    for part in module.modules():
        if torch_internals.PARAMETERS.of(part) and not isinstance(part, FSDPModule):
            removable.add(part.register_forward_pre_hook(refuse).remove)


def check_without_gradients(what: str, class_name: str) -> None:
    """Raise for a call with gradients by one rank alone.

    Raises:
        ContractError: Gradients are enabled.
    """
    if torch.is_grad_enabled():
        raise ContractError(
            f"{what}: {class_name} is called with gradients while its parameters are gathered for one rank alone",
            found="a call inside weft.full_params(..., forward=True)",
            expected="calls without gradients: backward needs all ranks",
            fix="with weft.full_params(model, ctx, forward=True), torch.no_grad(): ...",
        )


def check_loaded(what: str, class_name: str, module: nn.Module) -> None:
    """Raise for a call of a module whose weights were not loaded.

    Raises:
        ContractError: A tensor of it is on meta.
    """
    kinds = (module.named_parameters(), module.named_buffers())
    empty = [name for kind in kinds for name, tensor in kind if tensor.is_meta]
    if empty:
        raise ContractError(
            f"{what}: {class_name} is called before its weights were loaded",
            found=f"{listed(empty)} on meta",
            expected='weights="later", then load_weights, then the first call',
            fix="weft.load_weights(model, path, ctx)",
        )


def check_reduces(what: str, class_name: str, running: Running, parameters: Collection[int]) -> None:
    """Raise for a backward pass that FSDP2 cannot do, before it does half of it.

    Args:
        what: Name of the strategy.
        class_name: Of the module.
        running: The backward pass.
        parameters: Ids of the module's parameters.

    Raises:
        ContractError: It differentiates gradients, or returns those of parameters.
    """
    if running.creates_graph or any(id(tensor) in parameters for tensor in running.returned):
        asked = "a backward pass with create_graph=True" if running.creates_graph else "torch.autograd.grad"
        raise ContractError(
            f"{what}: {asked} through {class_name}, whose parameters are sharded",
            found="a gradient penalty, gradients of gradients, or torch.func.grad or jacrev without torch.no_grad()"
            if running.creates_graph
            else "gradients of parameters that are returned instead of added to `.grad`",
            expected="loss.backward(): FSDP2, also without weft, frees parameters after their backward, and "
            "reduces `.grad` only",
            fix="model, ctx = weft.replicate(model, ctx)  # instead of sharding",
        )
