"""`compile`: torch.compile of a module, or of its repeated blocks, in place.

Arguments and the choice of parts are here; the compiler is called by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from weft import torch_internals
from weft.context import DistContext
from weft.context.placement import check_ranks_send
from weft.contract import Part, Phase, check_not_elsewhere, transform
from weft.contract.select_modules import Selection, select_apart
from weft.engines.options import CompileOptions
from weft.engines.torch.compute.compile_module import Compiled, check_backend
from weft.engines.torch.hooks.method_hooks import already_compiled
from weft.errors import AlreadyApplied, ContractError, listed, value_error
from weft.tensors.dtensor import is_sharded

M = TypeVar("M", bound=nn.Module)


@transform(phase=Phase.FINISH, changes=Part.FORWARD, collective=True)
def compile(
    module: M,
    ctx: DistContext,
    *,
    blocks: Selection | None = None,
    backend: str | Callable[..., Any] = "inductor",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[M, DistContext]:
    """Compile the forward and backward of `module` with `torch.compile`, as a whole or by blocks.

    Comes last, after everything that changes what is computed. By blocks is the better choice for
    models that repeat one: each class is compiled once for all its instances, in a fraction of the
    time, gradients are reduced while backward runs (a whole model gives them all at its end), and
    units of `fully_shard` are gathered outside the graphs, so that `fullgraph=True` holds.

    Source: Ansel et al., "PyTorch 2", ASPLOS 2024; `torch.compile`.

    Changes: `module` in place: `forward` of it, or of each block, is an attribute of the instance.
    Unlike `torch.compile(model)` there is no wrapper: class, names and keys stay, without a prefix,
    and a copy or pickle is plain. Hooks run around the compiled forward, uncompiled.
    Collectives: none. Each rank compiles for itself, in the first call.

    Args:
        module: With all other transforms applied.
        ctx: The current context.
        blocks: The parts to compile, none inside another: a class, a pattern of names
            ("layers.*"), a number of parameters, a function (name, part) -> bool, parts, or
            several of these; see `weft.contract.select_modules`. Default: the whole module.
        backend: A name, see `torch.compiler.list_backends()`, or a function. Where `recompute` is
            applied to norms with running statistics, "aot_eager" stands in for "eager".
        fullgraph: Raise where a part needs more than one graph, instead of running in pieces.
        dynamic: True: any size fits. False: one graph per size. None: as False, and as True for
            sizes that have changed.
        mode: A set of options of inductor: "reduce-overhead", "max-autotune", ...
        options: Single options of the backend; not both `mode` and `options`.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: A part of `module` is compiled already, by this or by `torch.compile`.
        OrderError: On the same object, a transform that has to come earlier is applied later.
        ValueError: No or nested parts, one that is never called, an unknown backend, `mode` and
            `options` together or without effect.
        ContractError: A whole module that is sharded over data and by `tensor_parallel`: give `blocks`.
        ContextError: The ranks pass different options.
        PeerError: Another rank failed.

    Example:
        >>> import torch, weft
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> model, ctx = weft.compile(model, weft.local(), backend="eager", fullgraph=True)
        >>> model(torch.ones(1, 2)).shape, list(model.state_dict())
        (torch.Size([1, 2]), ['0.weight', '0.bias'])
    """
    _check_new(module)
    graph = "no torch.compile: XLA compiles forward, backward and step as one graph"
    check_ranks_send("compile", ctx, graph, fix="leave weft.compile out")
    check_not_elsewhere("compile", module, "graphs are made of parameters that stay where they are")
    if blocks is None:
        _check_one_axis(module, ctx)
    parts = select_apart("compile", module, module if blocks is None else blocks)
    _check_options(backend, mode, options)
    if isinstance(backend, str):
        check_backend(backend)
    given = CompileOptions(backend=backend, fullgraph=fullgraph, dynamic=dynamic, mode=mode, options=options)
    ctx.agree("compile", {"parts": list(parts), "fullgraph": fullgraph, "dynamic": dynamic, "mode": mode})
    return module, ctx.offering(Compiled(parts, given))


def _check_one_axis(module: nn.Module, ctx: DistContext) -> None:
    sharded: dict[str, Any] = {name: p for name, p in module.named_parameters() if is_sharded(p)}
    axes = {name: set(p.device_mesh.mesh_dim_names or ()) for name, p in sharded.items()}
    twice = [name for name, held in axes.items() if held & {*ctx.data_axes} and held - {*ctx.data_axes}]
    if twice:
        raise ContractError(
            "compile: a whole module with parameters that are sharded over data and by layers cannot be compiled",
            found=f"{listed(twice)}: over {' and '.join(sorted(axes[twice[0]]))}",
            expected="blocks, which torch compiles; of the whole module it fails in the middle",
            fix='model, ctx = weft.compile(model, ctx, blocks="layers.*")',
        )


def _check_options(backend: object, mode: str | None, options: Mapping[str, Any] | None) -> None:
    if mode is not None and options is not None:
        raise value_error(
            "compile: mode and options cannot be used together",
            found=f"mode = {mode!r}, options = {dict(options)!r}",
            expected="a set of options by its name, or single options",
            fix=f"weft.compile(model, ctx, mode={mode!r})",
        )
    if backend in ("eager", "aot_eager") and (mode is not None or options is not None):
        raise value_error(
            f"compile: mode and options have no effect on backend {backend!r}",
            found=f"mode = {mode!r}" if mode is not None else f"options = {options!r}",
            expected="a backend that generates code",
            fix=f"weft.compile(model, ctx, backend={backend!r})",
        )


def _check_new(module: nn.Module) -> None:
    done = already_compiled(module)
    if done:
        wrapped = torch_internals.compiled_module.holds(module)
        raise AlreadyApplied(
            f"compile: parts of {type(module).__name__} are compiled already",
            found=listed(done),
            expected="a module that is compiled here, and was not before",
            fix=f"model, ctx = weft.compile(model.{torch_internals.COMPILED_MODULE.name}, ctx)"
            "  # the module that torch.compile was given"
            if wrapped
            else "model, ctx = weft.compile(model, ctx)  # in place of module.compile(), once",
        )
