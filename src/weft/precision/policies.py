"""Which dtype where: `Precision`, `LossScaling` and the policies with names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, NoneType
from typing import Any, Literal

import torch

from weft.errors import listed, type_error, value_error

PolicyName = Literal["fp32", "fp64", "bf16", "fp16", "fp8", "bf16-true", "fp16-true"]


LOW = (torch.bfloat16, torch.float16)
STORAGE = (torch.float8_e4m3fn, torch.float8_e5m2, *LOW)


def _is_float(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2


def _is_power_of_two(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the fp16 scale moves. Powers of two only, so that scaling and unscaling are exact.

    Source: Micikevicius et al., "Mixed Precision Training", 2018; `torch.amp.GradScaler`.

    Attributes:
        init: First scale.
        growth: Factor after `growth_every` good steps in a row.
        backoff: Factor after a step with a non-finite gradient.
        growth_every: Good steps until the scale grows.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_every: int = 2000

    def __post_init__(self) -> None:
        factors = {"init": self.init, "growth": self.growth, "backoff": self.backoff}
        wrong = [f"{name}={value!r}" for name, value in factors.items() if not _is_power_of_two(value)]
        if not wrong:
            wrong += [f"growth={self.growth}"] if self.growth < 1 else []
            wrong += [f"backoff={self.backoff}"] if self.backoff >= 1 else []
        if type(self.growth_every) is not int or self.growth_every < 1:
            wrong += [f"growth_every={self.growth_every!r}"]
        if wrong:
            raise value_error(
                f"LossScaling: {listed(wrong)} cannot be used",
                found=listed(wrong),
                expected="powers of two; growth >= 1, backoff < 1; growth_every a whole number >= 1",
                fix="weft.precision.LossScaling(init=2.0**16, growth=2.0, backoff=0.5, growth_every=2000)",
            )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Which dtype is used where. None always means: leave it as it is.

    Attributes:
        param: Dtype in which trained parameters are stored. Frozen ones are left alone, unless the module computes
            in this dtype without autocast ("fp32", "fp64"): then they are cast, too.
        compute: Dtype of the computation inside the module. If parameters are stored in another dtype, torch's autocast
            picks the operations that are safe in it; otherwise inputs are cast to it, and an autocast around the module
            has no effect inside.
        reduce: Dtype in which gradients are communicated.
        gather: The `compute` dtype, for modules that are sharded: linear layers and convolutions, whose
            parameters autocast would cast, are gathered in it, everything else as it is.
        matmul: `torch.float8_e4m3fn`: linear layers, of which both sides are multiples of 16, multiply matrices that
            are rounded to it row by row; gradients of their weights are added up in float32.
        storage: Dtype in which frozen weights of linear layers, convolutions and embeddings are stored, such as
            `torch.float8_e4m3fn`; each layer casts its weights to `compute` while it is called.
        buffer: Floating-point buffers are stored in it; those of a layer whose own parameters are
            all frozen are left alone, like these.
        output: Floating-point outputs are cast to it.
        scaling: For fp16: scale gradients inside the module.
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    gather: torch.dtype | None = None
    matmul: torch.dtype | None = None
    storage: torch.dtype | None = None
    buffer: torch.dtype | None = None
    output: torch.dtype | None = None
    scaling: LossScaling | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.scaling, (LossScaling, NoneType)):
            raise type_error(
                "Precision: scaling is no LossScaling",
                found=repr(self.scaling),
                expected="a weft.precision.LossScaling or None",
                fix="weft.Precision(compute=torch.float16, scaling=weft.precision.LossScaling())",
            )
        fields = {"param": self.param, "compute": self.compute, "reduce": self.reduce}
        fields |= {"buffer": self.buffer, "output": self.output}
        wrong = [f"{name}={dtype}" for name, dtype in fields.items() if dtype is not None and not _is_float(dtype)]
        if wrong:
            raise value_error(
                f"Precision: {listed(wrong)} cannot be used",
                found=listed(wrong),
                expected="floating-point dtypes of 16 bits or more",
                fix="weft.Precision(param=torch.float32, compute=torch.bfloat16)",
            )
        if self.matmul is not None and (self.matmul is not torch.float8_e4m3fn or self.scaling or self.gather):
            raise value_error(
                f"Precision: matmul = {self.matmul} cannot be used",
                found=f"matmul={self.matmul}, scaling={self.scaling}, gather={self.gather}",
                expected="matmul=torch.float8_e4m3fn, without a loss scale and without gather",
                fix="weft.Precision(param=torch.float32, compute=torch.bfloat16, matmul=torch.float8_e4m3fn)",
            )
        if self.storage is not None and (self.storage not in STORAGE or self.compute is None):
            raise value_error(
                "Precision: weights cannot be stored in this dtype",
                found=f"storage={self.storage}, compute={self.compute}",
                expected=f"{listed(map(str, STORAGE))}, and the dtype to compute in",
                fix="weft.Precision(storage=torch.float8_e4m3fn, compute=torch.bfloat16)",
            )
        if self.gather is not None and (self.gather is not self.compute or self.compute not in LOW):
            raise value_error(
                "Precision: parameters cannot be gathered in another dtype than autocast casts them to",
                found=f"gather={self.gather}, compute={self.compute}",
                expected="gather and compute both torch.bfloat16, or both torch.float16; or no gather",
                fix="weft.Precision(param=torch.float32, compute=torch.bfloat16, gather=torch.bfloat16)",
            )
        if self.scaling is not None and self.compute is not torch.float16:
            raise value_error(
                "Precision: a loss scale has no effect here",
                found=f"compute={self.compute}",
                expected="compute=torch.float16 with scaling, or no scaling",
                fix="weft.Precision(compute=torch.float16, scaling=weft.precision.LossScaling())",
            )


_FP32 = Precision(param=torch.float32, compute=torch.float32, buffer=torch.float32)
NAMED: Mapping[PolicyName, Precision] = MappingProxyType(
    {
        "fp32": _FP32,
        "fp64": Precision(param=torch.float64, compute=torch.float64, buffer=torch.float64),
        "bf16": replace(_FP32, compute=torch.bfloat16, output=torch.float32),
        "fp16": replace(_FP32, compute=torch.float16, output=torch.float32, scaling=LossScaling()),
        "fp8": replace(_FP32, matmul=torch.float8_e4m3fn),
        "bf16-true": Precision(param=torch.bfloat16, compute=torch.bfloat16, buffer=torch.bfloat16),
        "fp16-true": Precision(param=torch.float16, compute=torch.float16, buffer=torch.float16),
    }
)


class PrecisionOffer:
    """What later transforms may ask of a module with a precision."""

    def __init__(self, precision: Precision, precise: Any, stored: Any = None, chosen: str = "") -> None:
        self.chosen = chosen
        self.precision = precision
        self.stored = stored
        self.reduce_dtype = precision.reduce
        self.precise = precise

    def undo(self) -> None:
        """Take casts and autocast off; parameters keep their dtype, but those that rested in another get it back."""
        for one in (self.stored, self.precise):
            if one is not None:
                one.undo()


def named_policy(policy: PolicyName | Precision | None) -> Precision:
    """The policy of a name.

    Raises:
        ValueError: There is none.
    """
    if isinstance(policy, Precision):
        return policy
    if isinstance(policy, str) and policy in NAMED:
        return NAMED[policy]
    raise value_error(
        f"with_precision: policy = {policy!r} is unknown",
        found=repr(policy),
        expected=", ".join(repr(name) for name in NAMED) + ", or a weft.Precision",
        fix='model, ctx = weft.with_precision(model, ctx, "bf16")',
    )
