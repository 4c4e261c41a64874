"""Whether a loss takes from the inside of a unit, where each rank has a part: seen in the backward pass.

Activations that a hook or an attribute has kept, or a second output, reach a loss past the row layer that adds up what
the ranks have. Each rank then computes another loss, and no output of the unit tells. So gradients are followed: what
arrives at a node of autograd's graph between a column layer and a row layer has to come from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from weft.engines.probes import Compared
from weft.engines.torch.probes.compare import LIMIT, LOW_LIMIT, difference
from weft.tensors.dtensor import local
from weft.tensors.nested import tensors

_Given = dict[tuple[int, int], torch.Tensor]  # what arrives at an input of a node, by its number


@contextlib.contextmanager
def watched(columns: Sequence[nn.Module], rows: Sequence[nn.Module], refuse: Callable[[str], None]) -> Iterator[None]:
    """Around a forward pass: its backward pass raises if a gradient comes to a part from elsewhere than a row layer.

    Args:
        columns: Layers that give each rank a part.
        rows: Layers that take one, and give the whole.
        refuse: Raises, with what was found.
    """
    begins: set[Any] = set()
    taken: set[Any] = set()
    ends: set[Any] = set()

    def see_column(_: nn.Module, args: Any, output: Any) -> None:
        begins.update(_nodes(output))

    def see_row(_: nn.Module, args: Any, output: Any) -> None:
        taken.update(_nodes(args))
        ends.update(_nodes(output))

    with contextlib.ExitStack() as stack, _HookedNodes() as hooked:
        for one in columns:
            stack.enter_context(one.register_forward_hook(see_column))
        for one in rows:
            stack.enter_context(one.register_forward_hook(see_row))
        yield
    if begins and taken:
        _watch(begins, taken, ends, hooked.nodes, refuse)


class _HookedNodes(TorchFunctionMode):
    """Notes the nodes whose gradients are changed by hooks of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: set[Any] = set()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook:
            hook = kwargs["hook"] if kwargs else args[1]
            made_by = str(getattr(getattr(hook, "func", hook), "__module__", ""))
            if not made_by.startswith(("torch.", "weft.")):  # which change no gradient
                self.nodes.add(args[0].grad_fn)
        return func(*args, **(kwargs or {}))


def _nodes(value: Any) -> list[Any]:
    return [tensor.grad_fn for tensor in tensors(value) if tensor.grad_fn is not None]


def _watch(
    begins: Collection[Any], taken: Iterable[Any], ends: Collection[Any], hooked: Collection[Any], refuse: Any
) -> None:
    begins, taken, ends = ({*filter(_is_alive, nodes)} for nodes in (begins, taken, ends))
    parts = _between(taken, begins, ends)
    numbers = {node: number for number, node in enumerate(parts)}
    given: _Given = {}  # nothing here may hold a node, which would hold it in C++
    for node in {*parts, *_reached(ends, parts)}:
        keys = [(numbers[to], at) if to in numbers else None for to, at in node.next_functions]
        if any(keys):
            node.register_hook(partial(_give, given, keys))
    for node, number in numbers.items():
        if node not in hooked:
            node.register_prehook(partial(_arrive, given, number, refuse))


def _is_alive(node: Any) -> bool:
    """Whether the graph of a node is there: one of an `autograd.Function` does not hold it, and forward may drop it."""
    try:
        return bool(node.next_functions)
    except RuntimeError:
        return False


def _give(given: _Given, keys: Sequence[tuple[int, int] | None], gradients: Sequence[Any], _: object) -> None:
    for key, gradient in zip(keys, gradients, strict=True):
        if key is not None and gradient is not None:
            given[key] = given[key] + gradient if key in given else gradient


def _arrive(given: _Given, number: int, refuse: Callable[[str], None], gradients: Sequence[Any]) -> None:
    for at, gradient in enumerate(gradients):
        expected = given.pop((number, at), None)
        if gradient is None or gradient is expected:
            continue
        found = local(gradient)
        limit = LIMIT if found.dtype.itemsize > 2 else LOW_LIMIT
        if expected is None or difference(Compared("", found, local(expected))) > limit:
            refuse(f"a loss of {tuple(found.shape)}, of which each rank has a part, past the row layer")


def _between(starts: Iterable[Any], begins: Collection[Any], stops: Collection[Any]) -> list[Any]:
    """The nodes on the ways from those of `starts` down to those of `begins`, with both."""
    leads: dict[Any, bool] = dict.fromkeys(begins, True)
    todo = [(node, False) for node in starts]
    while todo:
        node, is_done = todo.pop()
        below = [to for to, _ in node.next_functions if to is not None and to not in stops]
        if is_done:
            leads[node] = any(leads.get(to, False) for to in below)
        elif node not in leads:
            leads[node] = False
            todo.append((node, True))
            todo += [(to, False) for to in below if to not in leads]
    return [node for node, leads_there in leads.items() if leads_there]


def _reached(starts: Iterable[Any], stops: Collection[Any]) -> set[Any]:
    """The nodes that those of `starts` lead to before any of `stops`, with them."""
    known, found, todo = set(stops), set(), list(starts)
    while todo:
        node = todo.pop()
        if node not in known:
            known.add(node)
            found.add(node)
            todo += [to for to, _ in node.next_functions if to is not None]
    return found
