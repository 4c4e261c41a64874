"""The inputs of a call, cut into micro-batches of equal size, and how their losses make that of the batch.

[Note: the mean of a batch] The mean over a batch is the mean over its micro-batches if each has as many terms. They
have as many rows. Where some labels do not count they may have other numbers of terms: a causal or masked language
model of transformers takes the number of the whole batch (`num_items_in_batch`); a loss function may return
(sum, count); a plain mean is computed of the whole batch as well, and refused where it differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.engines.torch.probes.no_trace import is_measured
from weft.errors import listed, type_error, value_error
from weft.keyed_random.row_keys import rows_cut
from weft.tensors.nested import leaves, map_tensors, tensors

_IGNORED = -100  # torch's and transformers' number for labels that do not count


class _Nothing:
    """No target was given."""


NOTHING = _Nothing()


class Inputs(NamedTuple):
    """What a call was given.

    Attributes:
        args: Of forward, by position.
        kwargs: By name.
        target: For the loss function; NOTHING without one.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = NOTHING


def inputs_of(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, has_loss: bool) -> Inputs:
    """Tell the target of a loss function from what forward takes.

    With gradients the target is the last argument, or `target=`. Without, it is if forward does not take so many.

    Raises:
        TypeError: There is no target and gradients are asked for, or what is given can be read in two ways.
    """
    if not has_loss:
        return Inputs(args, kwargs)
    signature = inspect.signature(forward)
    if "target" in kwargs and "target" not in signature.parameters:
        named = {name: value for name, value in kwargs.items() if name != "target"}
        return Inputs(args, named, kwargs["target"])
    *rest, last = args or (None,)
    as_target = (len(args) > 1 or bool(args and kwargs)) and _binds(signature, rest, kwargs)
    if torch.is_grad_enabled():
        if as_target:
            return Inputs(tuple(rest), kwargs, last)
        found = "no argument besides those of forward"
    else:
        as_input = _binds(signature, args, kwargs) and not (as_target and is_measured())  # a call with gradients
        if as_input != as_target:
            return Inputs(tuple(rest), kwargs, last) if as_target else Inputs(args, kwargs)
        found = "a last argument that may be the target, or one of forward" if as_input else "other arguments"
    raise type_error(
        "pipeline: a call of a module with a loss function takes a target",
        found=f"{len(args)} arguments by position, and {listed(kwargs) or 'none'} by name: {found}",
        expected=f"those of forward{signature}, and the target last; without gradients it may be left out",
        fix="loss = model(x, target=y)",
    )


def _binds(signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


class MicroBatches:
    """The micro-batches of one call.

    Attributes:
        whole: All of them.
        parts: One by one.
        key: Shapes and dtypes of all inputs; equal for batches that the same messages fit.
    """

    def __init__(self, inputs: Inputs, number: int, *, exactly: bool) -> None:
        """Cut them.

        Args:
            inputs: Of the call.
            number: How many.
            exactly: Raise if the batch cannot be cut so; else take the largest number that divides it.

        Raises:
            ValueError: The batch cannot be divided; a tensor has another number of rows; or one needs a gradient.
        """
        found = [t for t in tensors(inputs) if t.dim()]
        if not found:
            raise value_error(
                "pipeline: there is nothing to cut into micro-batches",
                found="no tensor with rows among the inputs",
                expected="inputs whose first dimension is the batch",
                fix="model(x, y)",
            )
        rows = found[0].shape[0]
        if not exactly:
            number = max((n for n in range(1, min(number, rows) + 1) if rows % n == 0), default=1)
        if rows % number or not rows:
            size = -(-rows // number) * number
            raise value_error(
                f"pipeline: a batch of {rows} rows cannot be cut into {number} micro-batches",
                found=f"{rows} rows, {number} micro-batches",
                expected="micro-batches of equal size, so that their mean is the mean over the batch",
                fix=f"DataLoader(..., batch_size={size}, drop_last=True)  # a multiple of {number} rows"
                if rows
                else 'weft.shard_data(loader, ctx, uneven="pad")  # a batch without rows has no mean',
            )
        _check_rows(inputs, rows, number)
        self.whole = inputs
        self._rows = rows
        self.parts = [_rows(inputs, rows, slice(i * rows // number, (i + 1) * rows // number)) for i in range(number)]
        self.key = (number, *((tuple(t.shape), t.dtype) for t in tensors(inputs)))

    def together(self, numbers: range) -> Inputs:
        """Several micro-batches, as one batch."""
        size = self._rows // len(self.parts)
        return _rows(self.whole, self._rows, slice(numbers.start * size, numbers.stop * size))

    def ends(self, half: int | None = None) -> tuple[list[Inputs], Inputs]:
        """The first and the last micro-batch, one by one and as one batch.

        Args:
            half: Of their rows take this half, counted modulo 2; where it would be odd, all of them: layers may look at
                rows in pairs.
        """
        size = self._rows // len(self.parts)
        few = size if half is None or size % 4 else size // 2
        start = 0 if half is None else half * few % size
        first, last = ([*range(end + start, end + start + few)] for end in (0, self._rows - size))
        one, other, both = (_rows(self.whole, self._rows, rows) for rows in (first, last, first + last))
        return [one, other], both


def _check_rows(inputs: Inputs, rows: int, number: int) -> None:
    named = [(".".join(path), leaf) for path, leaf in leaves(inputs) if isinstance(leaf, torch.Tensor)]
    wrong = [f"{name} of shape {tuple(t.shape)}" for name, t in named if t.dim() and t.shape[0] not in (1, rows)]
    if wrong:
        raise value_error(
            "pipeline: inputs have other numbers of rows than the batch",
            found=f"{listed(wrong)}; the batch has {rows} rows",
            expected=f"{rows} rows, cut into {number} micro-batches, or 1, which all of them get",
            fix="x[None]  # one row, which all micro-batches get; or a buffer of the module",
        )
    tracked = [name for name, t in named if t.requires_grad and torch.is_grad_enabled()]
    if tracked:
        raise value_error(
            "pipeline: no gradient flows back into the inputs",
            found=listed(tracked),
            expected="inputs that need none: the first stage has them, and the call computes all gradients",
            fix="x = x.detach()",
        )


def _rows(inputs: Inputs, rows: int, part: slice | list[int]) -> Inputs:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return rows_cut(tensor, part) if tensor.dim() and tensor.shape[0] == rows else tensor

    return map_tensors(cut, inputs)


# -- models of transformers --------------------------------------------------------------------------


def num_items(module: nn.Module, forward: Callable[..., Any], inputs: Inputs) -> torch.Tensor | None:
    """The number of labels that count in a batch of a language model of transformers, which takes it; else None."""
    kind = getattr(module, "loss_type", None)
    if kind not in ("ForCausalLM", "ForMaskedLM") or not hasattr(module, "loss_function"):
        return None
    signature = inspect.signature(forward)
    takes_more = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    given = signature.bind(*inputs.args, **inputs.kwargs).arguments
    labels = given.get("labels")
    if not takes_more or not isinstance(labels, torch.Tensor) or "num_items_in_batch" in inputs.kwargs:
        return None
    return (labels[..., 1:] if kind == "ForCausalLM" else labels).ne(_IGNORED).sum()


def check_flags(module: nn.Module, kwargs: Mapping[str, Any], *, keeps_cache: bool = False) -> None:
    """Raise if a model of transformers is to collect something over all its layers.

    Args:
        module: The model.
        kwargs: Of a call.
        keeps_cache: Whether the call may have a cache, as one without gradients.

    Raises:
        ValueError: The text names the option.
    """
    config = getattr(module, "config", None)
    names = ("output_router_logits", "output_hidden_states", "output_attentions")
    flags = [name for name in names if kwargs.get(name, getattr(config, name, False) is True)]
    flags += [name for name in ("use_cache", "past_key_values") if kwargs.get(name) and not keeps_cache]
    if flags:
        given = [f"{flag}={None if flag == 'past_key_values' else False}" for flag in flags if flag in kwargs]
        lines = [f"model.config.{flag} = False" for flag in flags if flag not in kwargs]
        lines += [f"{', '.join(given)} in the call"] if given else []
        raise value_error(
            f"pipeline: {type(module).__name__} would collect values of all layers, which lie on several stages",
            found=listed(flags),
            expected="loss and outputs that come out of the last layer",
            fix="; ".join(lines),
        )
