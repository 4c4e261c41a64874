"""`assert_equivalent`: does a training function give the same at every world size?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.errors import listed, value_error
from weft.tensors.nested import leaves
from weft.testing.ranks import run_ranks


def assert_equivalent(
    train: Callable[..., Any],
    worlds: Sequence[int] = (1, 2, 4),
    *args: Any,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    timeout_s: float = 60.0,
    **kwargs: Any,
) -> None:
    """Run `train(ctx, ...)` at several world sizes and compare what it returns.

    For your own training step: return the loss curve, or the parameters, for one global batch
    size, and this shows that neither depends on the number of ranks.

    Changes: starts processes. Collectives: those of `train`.

    Args:
        train: Returns a nested value of tensors and numbers, the same on all ranks.
        worlds: World sizes; the first is the reference.
        args: For `train`.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        timeout_s: Per world size.
        kwargs: For `train`.

    Raises:
        AssertionError: The text names world size, rank, place and values.
        RanksFailed: `train` raised.

    Example:
        >>> def mean(ctx):
        ...     part = torch.arange(8.0).chunk(ctx.world_size)[ctx.rank]
        ...     return weft.reduce(part.sum(), ctx, "sum") / 8
        >>> import weft
        >>> assert_equivalent(mean, worlds=(1, 2))
    """
    reference = None
    for n in worlds:
        for rank, result in enumerate(run_ranks(train, n, *args, timeout_s=timeout_s, **kwargs)):
            if reference is None:
                reference = result
            _compare(reference, result, f"world {n}, rank {rank}, against world {worlds[0]}", rtol, atol)


def _compare(expected: object, found: object, where: str, rtol: float, atol: float) -> None:
    ones, twos = list(leaves(expected)), list(leaves(found))
    assert any(leaf is not None for _, leaf in ones), f"{where}: the function returned nothing to compare"
    paths, other_paths = [[".".join(path) for path, _ in each] for each in (ones, twos)]
    assert paths == other_paths, f"{where}: the result has {listed(other_paths)}, not {listed(paths)}"
    for (path, one), (_, two) in zip(ones, twos, strict=True):
        place = ".".join(path) or "the result"
        if isinstance(one, (torch.Tensor, int, float)) and not isinstance(one, bool):
            torch.testing.assert_close(
                torch.as_tensor(two),
                torch.as_tensor(one),
                rtol=rtol,
                atol=atol,
                msg=functools.partial("{}\n{}".format, f"{where}: {place}"),
            )
        else:
            assert one == two, f"{where}: {place} is {two!r}, not {one!r}"


def largest_difference(one: object, two: object) -> float:
    """The largest absolute difference between the tensors of two nested values, in float64.

    Changes: nothing. Collectives: none.

    Args:
        one: A nested value of tensors.
        two: Another of the same structure and shapes.

    Returns:
        The difference; NaN if either holds a NaN, so that no comparison with it is true.

    Raises:
        ValueError: Structures or shapes differ.

    Example:
        >>> largest_difference([torch.zeros(2)], [torch.tensor([0.0, 3.0])])
        3.0
    """
    largest = torch.zeros((), dtype=torch.float64)
    for (path, a), (_, b) in zip(leaves(one), leaves(two), strict=True):
        if a.shape != b.shape:
            raise value_error(
                f"largest_difference: {'.'.join(path) or 'the values'} cannot be compared",
                found=f"shapes {tuple(a.shape)} and {tuple(b.shape)}",
                expected="equal shapes",
                fix="compare values of one structure",
            )
        if a.numel():
            wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
            difference = (a.detach().to(wide) - b.detach().to(wide)).abs().max()
            largest = torch.maximum(largest, difference.cpu())  # carries NaN on, unlike `max`
    return float(largest)
