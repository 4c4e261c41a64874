"""`quantized`: linear layers with weights of 8 or 4 bits, made while the weights are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from weft import torch_internals
from weft.checkpoint.format.transfer import Transfer, read_blocks
from weft.checks import check_module
from weft.collectives.on_all_ranks import on_all
from weft.context import Applied, DistContext
from weft.contract.name_table import patterns_by_name
from weft.contract.select_modules import fits_pattern
from weft.errors import OrderError, listed, value_error
from weft.peers.pretended import check_not_pretended
from weft.tensors.blocks import whole
from weft.tensors.quantized import quantized_parts
from weft.weights.assign import WeightAssignment, renamed
from weft.weights.quantization.quantized_layers import Quantizer, quantizer
from weft.weights.sources import WeightFiles, floating_dtype, from_path
from weft.weights.stored_names import as_named_now

M = TypeVar("M", bound=nn.Module)
Scheme = Literal["nf4", "fp4", "int8", "float8"]


def quantized(
    module: M,
    ctx: DistContext,
    scheme: Scheme | Mapping[str, Scheme | None],
    *,
    weights: str | Path | None = None,
    skip: Sequence[str] | None = None,
    engine: Literal["bitsandbytes", "torchao"] | None = None,
    dtype: torch.dtype | str | None = None,
    double: bool = False,
) -> tuple[M, DistContext]:
    """Store the weights of linear layers in 8 or 4 bits; for inference, and for training adapters.

    Each layer is read, quantized and put away before the next one is read, so that a module on meta is never whole in
    full precision. The numbers are those of the library: bitsandbytes for "nf4", "fp4" (Dettmers et al., "QLoRA", 2023)
    and, as an option, "int8" (LLM.int8()); torchao for "int8" and "float8" weights. Quantized weights are frozen.

    Call it before adapters are put in and before all strategies. 4-bit weights go through every strategy and into
    checkpoints; 8-bit ones are refused where a library keeps them in a form that cannot be cut or sent.

    Changes: the module, in place: its linear layers are replaced; on an error it is as it was. Collectives: those of
    `load_weights` for what is not quantized, with `weights`; each rank reads all that is quantized.

    Args:
        module: With values, or on meta with `weights`.
        ctx: The current context.
        scheme: "nf4" or "fp4": 4 bits, in blocks of 64. "int8" or "float8": 8 bits, a scale for each row. Or a table of
            them by name, `{"*.mlp": "nf4", "*.attn.*": "int8"}`: the first pattern that fits a layer, or something that
            it is in, decides; None, or no pattern: it stays as it is. See `weft.contract.name_table`.
        weights: A `.safetensors` file, an index, a folder or a checkpoint, as for `load_weights`.
        skip: Layers that stay as they are: names, of which any part may match ("lm_head"), or patterns
            ("layers.*.mlp.**"). Default: none; in models of transformers, those that it does not quantize either: the
            layer that gives the outputs, and those that the model keeps in float32.
        engine: The library. Default: bitsandbytes for 4 bits, torchao for 8.
        dtype: In which layers compute, and in which what is not quantized is loaded. Default: that of the module.
        double: With 4 bits, quantize the scales too (0.4 bits less per weight).

    Returns:
        The module and the next context.

    Raises:
        TypeError: Not a module.
        ValueError: The scheme or an option cannot be used here, no layer is left, or a module on meta has no `weights`.
        OrderError: The module is under a strategy, or quantized already.
        MissingExtra: The library is not installed.
        CheckpointError: The files do not fit the module.
        OSError: A file cannot be read.
        ContextError: The ranks pass different modules, files or options.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> weft.quantized(nn.Linear(2, 2), weft.local(), "int3")
        Traceback (most recent call last):
            ...
        ValueError: quantized: scheme = 'int3' is unknown
          found:    'int3'
          expected: 'nf4', 'fp4', 'int8' or 'float8'
          fix:      quantized(..., scheme='nf4')
    """
    check_module("quantized", module, fix='model, ctx = weft.quantized(model, ctx, "nf4")')
    check_not_pretended("quantized: making weights of few bits", ctx.world.group, "weft estimate MODEL  # int8, int4")
    compute = floating_dtype("quantized", dtype)
    schemes = [one for one in scheme.values() if one is not None] if isinstance(scheme, Mapping) else [scheme]
    known: dict[str, Quantizer] = on_all(
        "quantized", ctx, lambda: {one: quantizer(one, engine, double=double) for one in schemes}
    )
    chosen = on_all("quantized", ctx, lambda: _chosen(module, ctx, scheme, skip, weights))
    how = {name: known[own] for name, own in chosen.items()}
    engines = sorted({one.engine for one in known.values()})
    facts = {"scheme": chosen, "engine": engines, "layers": list(chosen), "dtype": str(dtype), "double": double}
    ctx.agree("quantized", facts)
    if weights is None:
        on_all("quantized", ctx, lambda: _swap(module, None, how, compute, ctx))
    else:
        _load(module, Path(weights), how, compute, ctx)
    for name in {flag for one in known.values() for flag in one.flags}:
        setattr(module, name, True)  # PEFT asks for them, and chooses its kind of layer by them
    record = Applied(
        name="quantized",
        options=(("scheme", listed(dict.fromkeys(schemes))), ("engine", listed(engines)), ("layers", str(len(how)))),
        targets=(type(module).__name__,),
    )
    return module, replace(ctx, applied=(*ctx.applied, record))


def _chosen(
    module: nn.Module,
    ctx: DistContext,
    scheme: str | Mapping[str, Scheme | None],
    skip: Sequence[str] | None,
    weights: object,
) -> dict[str, str]:
    """The layers to be quantized: the scheme of each, by its name."""
    line = f"model, ctx = weft.quantized(model, ctx, {scheme!r:.60})"
    if ctx.records(module):
        raise OrderError(
            f"quantized: {type(module).__name__} is under {listed(record.name for record in ctx.records(module))}",
            found="parameters that are already replicated, sharded or watched",
            expected="quantized, adapters, then the strategy",
            fix=f"{line}  # before the transforms",
        )
    if quantized_parts(module):
        raise OrderError(
            f"quantized: {type(module).__name__} is already quantized",
            found=listed(quantized_parts(module)),
            expected="weights of full precision",
            fix=f"{line}  # once, for all layers",
        )
    if weights is None and any(p.is_meta for p in module.parameters()):
        raise value_error(
            f"quantized: {type(module).__name__} is on meta",
            found="parameters without values",
            expected="weights to read",
            fix=f'{line[:-1]}, weights="model.safetensors")',
        )
    kept = _kept(module) if skip is None else set()
    linear = {name: part for name, part in module.named_modules() if type(part) is nn.Linear}
    idle = [pattern for pattern in skip or () if not any(_fits(name, pattern) for name, _ in module.named_modules())]
    table: Mapping[str, str | None] = scheme if isinstance(scheme, Mapping) else {"*": scheme}
    of = patterns_by_name("quantized", module.named_modules(remove_duplicate=False), table)
    schemes = {name: table[of[id(part)]] for name, part in linear.items() if id(part) in of}
    chosen = {
        name: part
        for name, part in linear.items()
        if schemes.get(name) is not None
        and part not in kept
        and not any(_fits(name, pattern) for pattern in skip or ())
    }
    if not chosen or idle:
        raise value_error(
            f"quantized: skip = {skip!r:.80} names nothing" if idle else "quantized: no layer is left",
            found=listed(idle) if idle else f"{len(linear)} linear layers: {listed(linear) or 'none'}",
            expected="names of layers, or patterns" if idle else "torch.nn.Linear layers that are not skipped",
            fix=f"skip=()  # or some of: {listed(linear)}" if linear else "leave weft.quantized out",
        )
    shared = [name for name, part in chosen.items() if _is_shared(part, module)]
    if shared:
        raise value_error(
            "quantized: weights shared with other parts cannot be quantized for one of them",
            found=listed(shared),
            expected="layers with weights of their own",
            fix=f"skip={tuple(shared)!r}",
        )
    return {name: str(schemes[name]) for name in chosen}


def _kept(module: nn.Module) -> set[nn.Module]:
    """What transformers does not quantize in a model of it (`quantizers.base.get_keys_to_not_convert`)."""
    ask: Any = getattr(module, "get_output_embeddings", None)
    if not callable(ask):
        return set()
    last = list(module.named_parameters())[-1][0].removesuffix(".weight")  # a layer with a bias is quantized
    wide = getattr(module, "_keep_in_fp32_modules", None) or ()
    kept: set[Any] = {ask()}
    return kept | {
        part for name, part in module.named_modules() if name == last or any(_fits(name, one) for one in wide)
    }


def _fits(name: str, pattern: str) -> bool:
    return pattern in name.split(".") or fits_pattern(name, pattern)


def _is_shared(layer: nn.Linear, module: nn.Module) -> bool:
    every = [p for part in module.modules() for p in torch_internals.PARAMETERS.of(part).values()]
    return sum(p is layer.weight for p in every) > 1


def _load(
    module: nn.Module,
    path: Path,
    how: Mapping[str, Quantizer],
    compute: torch.dtype | None,
    ctx: DistContext,
) -> None:
    """Read, quantize and put in place, layer by layer; then what is left."""

    def settle() -> tuple[WeightFiles, WeightAssignment]:
        source = as_named_now(from_path("quantized", path, "model"), module)
        return source, WeightAssignment(module, source, ctx, elsewhere={}, strict=True, dtype=compute, what="quantized")

    layers = {name: module.get_submodule(name) for name in how}
    source, fitting = on_all("quantized", ctx, settle)
    ctx.agree("quantized", fitting.facts())

    def rest() -> WeightAssignment:
        names = [name for name, _ in module.named_parameters()] + [name for name, _ in module.named_buffers()]
        own = {name for name in names if name.rpartition(".")[0] not in layers}
        left = renamed(source, lambda name: name if name in own else None)
        return WeightAssignment(module, left, ctx, elsewhere={}, strict=True, dtype=compute, within=own)

    try:
        on_all("quantized", ctx, lambda: _swap(module, source, how, compute, ctx))
        placement = on_all("quantized", ctx, rest)
        placement.read("quantized")
    except BaseException:
        for name, layer in layers.items():
            module.set_submodule(name, layer)
        raise
    placement.put()


@torch.no_grad()
def _swap(
    module: nn.Module,
    source: WeightFiles | None,
    how: Mapping[str, Quantizer],
    compute: torch.dtype | None,
    ctx: DistContext,
) -> None:
    if source is not None:
        used = [stored for name, stored in source.tensors.items() if name.rpartition(".")[0] in how]
        source.verify(used, number=ctx.rank, of=ctx.world_size)
    for name, quantizing in how.items():
        layer: Any = module.get_submodule(name)
        dtype = compute or layer.weight.dtype
        if source is None:
            weight, bias = layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype)
        else:
            weight = _read(source, f"{name}.weight", dtype)
            bias = None if layer.bias is None else _read(source, f"{name}.bias", dtype)
        made = quantizing.quantize(weight, bias, dtype, ctx.device)
        made.train(layer.training)
        for parameter in made.parameters():
            parameter.requires_grad = False
        if layer.bias is not None:
            made.bias.requires_grad_(layer.bias.requires_grad)
        module.set_submodule(name, made)


def _read(source: WeightFiles, name: str, dtype: torch.dtype) -> torch.Tensor:
    stored = source.tensors[name]
    out = torch.empty(stored.entry.shape, dtype=dtype)
    read_blocks(source.files, [Transfer(stored, whole(stored.entry.shape), out)], num_threads=1)
    return out
