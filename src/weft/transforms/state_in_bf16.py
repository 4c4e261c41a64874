"""`state_in_bf16`: the moments of AdamW in 16 bits between steps, rounded stochastically."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from weft.checks import check_count, check_optimizer
from weft.context import DistContext
from weft.context.placement import check_ranks_send
from weft.contract import KeepsParameters, Part, Phase, offered, transform
from weft.contract.marks import known_modules
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.hooks.method_hooks import Removable
from weft.engines.torch.reducing.flat_step import FlatStep
from weft.engines.torch.steps.combined_optimizer import kinds_of
from weft.engines.torch.steps.in_backward import check_has_gradients
from weft.engines.torch.steps.step_by_parts import AroundPart, step_by_parts
from weft.engines.torch.steps.swapped import step_hooks
from weft.errors import OrderError, listed, type_error
from weft.grads.named_grads import ParameterNames
from weft.keyed_random.elements import words_block
from weft.rng import mix
from weft.tensors.blocks import hold, sharded_as
from weft.tensors.dtensor import local

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741

_KINDS = (torch.optim.AdamW, torch.optim.Adam)
_MOMENTS = ("exp_avg", "exp_avg_sq")  # not what amsgrad keeps: of a maximum, chances do not cancel out
_LEAST_BYTES = 4


@transform(phase=Phase.FINISH, changes=Part.STEP, collective=True)
def state_in_bf16(optimizer: O, ctx: DistContext, *, seed: int | None = None) -> tuple[O, DistContext]:
    """Keep the moments of AdamW or Adam in bfloat16 between steps: 4 bytes per parameter instead of 8.

    A step computes in the dtype of the parameters, on 64 MiB of them after the other, and rounds each moment up or down
    by chance, in proportion to how near it is to both neighbors, so that on average nothing is lost. Rounded to the
    nearest, a second moment would stand still: with beta2 = 0.999, a step changes it by less than half the distance
    between two neighbors. The chance follows from the seed, the step, the name of the parameter and the place of the
    element in the whole tensor (Philox): the numbers do not depend on the number of ranks or on how parameters are
    sharded, and a resumed run continues as if it had not ended. Checkpoints hold the 16 bits.

    Of the optimizers that `optimizers` has made one, those of other classes keep their state as it is.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015; Zamirai et al., "Revisiting
    BFloat16 Training", 2020.

    Changes: hooks on `optimizer`; state that is there is rounded in the next step.
    Collectives: here, a meeting through the store; in a step, those of the strategy, part by part.

    Args:
        optimizer: AdamW or Adam over parameters of modules that `ctx` knows, or made of `model.named_parameters()`.
        ctx: The current context.
        seed: 0 <= seed < 2**63; default: `ctx.seed`.

    Returns:
        `optimizer` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: It was applied before.
        TypeError: No group is of AdamW or Adam, or parameters have 16 bits.
        OrderError: With `fuse_step`, `step_in_backward` or DeepSpeed, or no module is known that has the parameters.
        ValueError: `seed` is out of range.
        ContextError: The ranks pass different seeds, or an engine computes on all devices together (XLA).
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> model, ctx = weft.replicate(torch.nn.Linear(2, 1), weft.local())
        >>> optimizer, ctx = weft.state_in_bf16(torch.optim.AdamW(model.parameters()), ctx)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].dtype
        torch.bfloat16
    """
    check_optimizer("state_in_bf16", optimizer)
    kinds = kinds_of(optimizer)
    if not any(kind in _KINDS for kind in kinds):
        raise type_error(
            "state_in_bf16: the state of this optimizer is not known",
            found=", ".join(sorted({kind.__name__ for kind in kinds})),
            expected="torch.optim.AdamW or Adam, whose moments are averages",
            fix="optimizer = torch.optim.AdamW(model.parameters())",
        )
    check_has_gradients("state_in_bf16", parameters_of(optimizer))
    narrow = [p for p in parameters_of(optimizer) if p.dtype.itemsize < _LEAST_BYTES]
    if narrow:
        raise type_error(
            "state_in_bf16: the state of 16-bit parameters has 16 bits already, and steps compute in them",
            found=f"{len(narrow)} parameters of {listed(sorted({str(p.dtype) for p in narrow}))}",
            expected="parameters in float32, computed in 16 bits",
            fix='model, ctx = weft.with_precision(model, ctx, "bf16")  # not "bf16-true"',
        )
    if seed is not None:
        line = "optimizer, ctx = weft.state_in_bf16(optimizer, ctx, seed=0)"
        check_count("state_in_bf16", "seed", seed, least=0, below=2**63, fix=line)
    check_ranks_send("state_in_bf16", ctx, "an engine whose ranks step by themselves", fix="leave state_in_bf16 out")
    pieces = any(offered(part, KeepsParameters) for module in known_modules(ctx) for part in module.modules())
    if pieces or any(isinstance(one, FlatStep) for one in step_hooks(optimizer)):
        raise OrderError(
            "state_in_bf16: the state of single parameters is not there",
            found="DeepSpeed, which keeps state in pieces" if pieces else "fuse_step, which steps on flat buffers",
            expected='zero_partition(engine="torch"), without fuse_step',
            fix="leave state_in_bf16 out",
        )
    ctx.agree("state_in_bf16", {"optimizer": type(optimizer).__name__, "seed": seed})
    return optimizer, ctx.offering(Bf16State(optimizer, ctx, ctx.seed if seed is None else seed))


class Bf16State:
    """The moments of one optimizer, and the number of its steps, which checkpoints keep."""

    def __init__(self, optimizer: torch.optim.Optimizer, ctx: DistContext, seed: int) -> None:
        self._optimizer, self._seed, self._steps = weakref.ref(optimizer), seed, 0
        self._names = ParameterNames("state_in_bf16", optimizer, known_modules(ctx))
        self._hooks = Removable()
        self._hooks.add(optimizer.register_load_state_dict_post_hook(self._take_state).remove)
        self._hooks.add(step_by_parts(optimizer, AroundPart(self._widen, self._round)))
        self._hooks.add(optimizer.register_step_post_hook(self._count).remove)

    def undo(self) -> None:
        """Take the hooks off; the state is in the dtype of the parameters again."""
        self._hooks.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            self._widen(parameters_of(optimizer))

    def state_dict(self) -> dict[str, Any]:
        """The number of steps."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from a saved number."""
        self._steps = state["steps"]

    def _count(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1

    def _moments(self, parameters: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, str, dict[str, Any], str]]:
        """Parameters and their names, their state, and which of it are moments."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        names = {id(p): name for name, p in self._names.of(optimizer).items()}
        kinds = zip(optimizer.param_groups, kinds_of(optimizer), strict=True)
        narrow = {id(p) for entry, kind in kinds if kind in _KINDS for p in entry["params"] if not p.is_complex()}
        for parameter in [p for p in parameters if id(p) in narrow]:
            state = optimizer.state.get(parameter, {})
            yield from ((parameter, names[id(parameter)], state, key) for key in _MOMENTS if key in state)

    def _widen(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter, _, state, key in self._moments(parameters):
            state[key] = state[key].to(parameter.dtype)

    @torch.no_grad()
    def _round(self, parameters: Sequence[torch.Tensor]) -> None:
        drawn: tuple[str, torch.Tensor] | None = None
        for _, name, state, key in self._moments(parameters):
            held = hold(name, state[key])
            if drawn is None or drawn[0] != name:
                number = mix(self._seed, self._steps, name, "bf16 state")
                drawn = name, words_block(held.block, held.shape, number, held.local.device)
            bits = drawn[1] & 0xFFFF if key == "exp_avg" else drawn[1] >> 16
            state[key] = sharded_as(_rounded(held.local, bits), state[key])

    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """What torch has widened while it was loaded is narrow again, if it was."""
        for _, _, state, key in self._moments(parameters_of(optimizer)):
            narrow = state[key].to(torch.bfloat16)
            if torch.equal(local(narrow).to(state[key].dtype), local(state[key])):
                state[key] = narrow


def _rounded(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """A tensor in bfloat16: of both neighbors the one that 16 random bits choose.

    Args:
        value: Floating-point numbers.
        bits: int64 in [0, 2**16), of its shape.
    """
    if value.dtype is torch.bfloat16:
        return value
    wide = value.float().contiguous()
    # bfloat16 is the upper half of float32: what carries into it when the lower half is added rounds up.
    found = ((wide.view(torch.int32) + bits.to(torch.int32)) & -65536).view(torch.float32)
    return torch.where(wide.isfinite(), found, wide).to(torch.bfloat16)
