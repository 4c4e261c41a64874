"""Parameters that FSDP2 gathers in a lower dtype than that of their shards: in what autocast would cast them to.

torch's policy is one for all parameters of a unit; here some of them are gathered in it, and the others as they are.
Their gradients come in the lower dtype and are widened as soon as they are there, as autocast does: units add up and
reduce gradients of one dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.hooks.program_lines import part_expression
from weft.errors import ContractError


def gather_in(
    dtypes: Mapping[str, torch.dtype], named: Mapping[str, Any], module: nn.Module, removable: Removable
) -> None:
    """Gather parameters in these dtypes.

    Args:
        dtypes: By name in the module.
        named: What FSDP2 keeps of each parameter.
        module: Whose.
        removable: Learns how to take the hooks off.
    """
    for name, dtype in dtypes.items():
        if name in named:
            _gather_one(weakref.ref(named[name]), dtype)
    parts = {name.rpartition(".")[0] for name in dtypes if name in named}
    for part in sorted(parts):
        attach(module.get_submodule(part), removable, before=_checking(part))


def _gather_one(ref: weakref.ref[Any], dtype: torch.dtype) -> None:
    def init_dtypes(policy: Any) -> None:
        one: Any = ref()
        type(one).init_dtype_attrs(one, policy)
        torch_internals.PARAM_DTYPE.set(one, dtype)

    def init_unsharded() -> None:
        one: Any = ref()
        is_new = torch_internals.PARAM_WHOLE.get(one) is None
        type(one).init_unsharded_param(one)
        if is_new:
            torch_internals.PARAM_WHOLE.of(one).register_post_accumulate_grad_hook(widen)

    def widen(parameter: torch.Tensor) -> None:
        one: Any = ref()
        if parameter.grad is None:
            return
        wide = parameter.grad.to(one.orig_dtype)
        parameter.grad = None
        kept = torch_internals.PARAM_KEPT.of(one)
        torch_internals.PARAM_KEPT.set(one, wide if kept is None else kept.add_(wide))

    parameter: Any = ref()
    torch_internals.PARAM_INIT_DTYPES.set(parameter, init_dtypes)
    torch_internals.PARAM_INIT_WHOLE.set(parameter, init_unsharded)


def _checking(name: str) -> Any:
    def check(part: nn.Module, args: Any, kwargs: Any) -> None:
        del kwargs
        device = next((value.device.type for value in args if isinstance(value, torch.Tensor)), "cpu")
        if not torch.is_autocast_enabled(device):
            written = part_expression(name)
            raise ContractError(
                f"with_precision: {name} computes without autocast, and its parameters are gathered in a lower dtype",
                found=f"a {type(part).__name__} that is called where autocast is off",
                expected="gather for layers that compute under autocast; another precision for the others",
                fix=f'_, ctx = weft.with_precision({written}, ctx, "fp32")  # before with_precision(model, ...)',
            )

    return check
