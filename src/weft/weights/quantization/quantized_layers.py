"""The libraries that quantize weights, each as a function of one layer."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.checks import check_choice
from weft.errors import MissingExtra, value_error

_ENGINES = MappingProxyType(
    {"nf4": ("bitsandbytes",), "fp4": ("bitsandbytes",), "int8": ("torchao", "bitsandbytes"), "float8": ("torchao",)}
)


class Quantizer(NamedTuple):
    """How a library quantizes a layer.

    Attributes:
        engine: The library.
        quantize: From weight [out, in], bias [out] or None, dtype of computing and device to a layer.
        flags: Attributes of a model by which PEFT knows what its layers are made of.
    """

    engine: str
    quantize: Callable[[torch.Tensor, torch.Tensor | None, torch.dtype, torch.device], Any]
    flags: tuple[str, ...] = ()


def quantizer(scheme: str, engine: str | None, *, double: bool) -> Quantizer:
    """Import a library, and try it with one small layer.

    Raises:
        ValueError: Scheme and library do not go together, or it cannot do this here.
        MissingExtra: It is not installed.
    """
    check_choice("quantized", "scheme", scheme, tuple(_ENGINES))
    engine = engine or _ENGINES[scheme][0]
    check_choice("quantized", "engine", engine, _ENGINES[scheme])
    if double and scheme not in ("nf4", "fp4"):
        raise value_error(
            f'quantized: double=True has no effect on "{scheme}"',
            found="one scale for each row",
            expected='"nf4" or "fp4", which have one for every 64 weights',
            fix="double=False",
        )
    try:
        library: Any = importlib.import_module(engine)
    except ImportError as error:
        raise MissingExtra(
            f'quantized: "{scheme}" needs {engine}',
            found=f"{type(error).__name__}: {error}",
            expected=f"{engine}, whose layers are used",
            fix=f"pip install {engine}",
        ) from error
    made = _bitsandbytes(library, scheme, double=double) if engine == "bitsandbytes" else _torchao(library, scheme)
    _try(scheme, made)
    return made


def _bitsandbytes(library: Any, scheme: str, *, double: bool) -> Quantizer:
    parts = library.nn

    def four(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> Any:
        layer = _without_weight(parts.Linear4bit, weight, bias, compute_dtype=dtype, quant_type=scheme)
        layer.weight = parts.Params4bit(
            weight, requires_grad=False, quant_type=scheme, compress_statistics=double, module=layer
        )
        return layer.to(device)

    def eight(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> Any:
        del dtype  # that of the inputs
        layer = _without_weight(parts.Linear8bitLt, weight, bias, has_fp16_weights=False)
        layer.weight = parts.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        return layer.to(device)

    if scheme == "int8":
        return Quantizer("bitsandbytes", eight, ("is_loaded_in_8bit",))
    return Quantizer("bitsandbytes", four, ("is_loaded_in_4bit",))


def _torchao(library: Any, scheme: str) -> Quantizer:
    quantization = library.quantization
    config = {"int8": "Int8WeightOnlyConfig", "float8": "Float8WeightOnlyConfig"}[scheme]

    def eight(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> Any:
        del dtype
        layer = _without_weight(nn.Linear, weight, bias)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        quantization.quantize_(layer.to(device), getattr(quantization, config)())
        return layer

    return Quantizer("torchao", eight)


def _without_weight(kind: Any, weight: torch.Tensor, bias: torch.Tensor | None, **options: object) -> Any:
    """A layer for a weight [out, in], which it is yet to get, with its bias."""
    out, into = weight.shape
    with torch.device("meta"):
        layer = kind(into, out, bias=bias is not None, **options)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer


def _try(scheme: str, made: Quantizer) -> None:
    """What a library needs, such as kernels of another package, shows when it is used."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.quantize(torch.zeros(64, 64), None, torch.float32, torch.device("cpu"))(torch.zeros(1, 64))
    except Exception as error:
        raise value_error(
            f'quantized: {made.engine} cannot do "{scheme}" here',
            found=f"{type(error).__name__}: {error}",
            expected="a small layer that is quantized, and computes",
            fix=f"another of: {', '.join(one for one in _ENGINES if one != scheme)}",
        ) from error
