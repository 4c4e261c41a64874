"""The random states of a rank (python, numpy, torch and the device) as JSON, and back.

Each rank has states of its own. At another number of ranks a generator of the user's that was alike on all ranks stays
so; of others, each rank gets a state drawn from seed, step, rank and name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.context import DistContext
from weft.errors import CheckpointError
from weft.rng import Seeds
from weft.tensors.rng_state import RngState, numpy_json, numpy_state, python_json, python_state, to_hex, torch_state


def random_state(ctx: DistContext) -> dict[str, Any]:
    """The random states of this rank, as JSON."""
    now = RngState.capture(ctx.device, ctx.engine)
    return as_json(now.python, now.numpy, now.cpu, {} if now.device is None else {ctx.device.type: now.device})


def as_json(python: Any, numpy: Any, cpu: Any, devices: Mapping[str, Any]) -> dict[str, Any]:
    """Random states as JSON.

    Args:
        python: As of `random.getstate`.
        numpy: As of `numpy.random.get_state`.
        cpu: Of torch, uint8.
        devices: By the kind of device; of several, that of this rank.
    """
    found = {"python": python_json(*python), "numpy": numpy_json(*numpy), "torch": to_hex(cpu)}
    return found | {kind: to_hex(state) for kind, state in devices.items()}


def checked_states(found: Mapping[str, Any]) -> RngState:
    """Those of python, numpy and torch, of JSON.

    Raises:
        ValueError: They are something else; other errors than of the system mean the same.
    """
    states = RngState(python_state(*found["python"]), numpy_state(*found["numpy"]), torch_state(found["torch"]))
    torch.Generator().set_state(states.cpu)
    return states


def prepare_random_state(found: Mapping[str, Any], ctx: DistContext) -> Callable[[], None]:
    """Check random states without setting them; call the result to set them.

    Raises:
        CheckpointError: One of them is not what it should be.
    """
    device, engine = ctx.device, ctx.engine
    try:
        states = checked_states(found)
        if device.type in found:
            other = torch_state(found[device.type])
            engine.check_rng_state(device, other)
            states = states._replace(device=other)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            "restore: the random states in the checkpoint cannot be used",
            found=f"{type(error).__name__}: {error}",
            expected="states of python, numpy and torch",
            fix="state, ctx = weft.checkpointable(objects, ctx, rng=False)",
        ) from error
    return lambda: states.apply(device, engine)


def drawn_state(step: int, ctx: DistContext) -> Callable[[], None]:
    """New random states for a rank that did not save one; a function of seed, step, rank and replica."""
    replica = "" if ctx.replicas is None else f" {ctx.replicas.place}"
    number = zlib.crc32(f"{ctx.seed} {step} {ctx.rank}{replica}".encode())

    def apply() -> None:
        Seeds(number, (number,), number).apply()
        ctx.engine.seed(ctx.device, number)

    return apply


def restored_from(states: Sequence[Any], rank: int, world_size: int) -> Any:
    """Which of the states of the ranks that saved a rank continues from; None if it needs a new one."""
    if len(states) == world_size:
        return states[rank]
    return states[0] if all(state == states[0] for state in states) else None
