"""Caches of transformers in a pipeline: each rank keeps the keys and values of its own layers.

[Note: the length of a cache] Forward asks a cache how long it is, by its first layer or the first of a kind, whatever
stage has that. So the layers of other ranks are in the cache of this one, too, with keys and values of the right shapes
on meta, and what they answer is what one process would be told. Beam search reorders them like the others.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.torch.pipeline.batch_parts import Inputs
from weft.errors import value_error
from weft.private_names import replaced
from weft.tensors.messages import control_device

_KINDS = ("DynamicLayer", "DynamicSlidingWindowLayer")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_WORDS = 9  # of each layer: a dtype, and the shapes of keys and values


def asks_for_cache(inputs: Inputs) -> bool:
    """Whether a call is given a cache, or is to make one."""
    return inputs.kwargs.get("past_key_values") is not None or bool(inputs.kwargs.get("use_cache"))


class StageCache:
    """The cache of one call without gradients.

    Attributes:
        cache: Of transformers; made here if the call was given none.

    Raises:
        ValueError: It is of a kind whose layers do not only grow.
    """

    def __init__(self, module: nn.Module, inputs: Inputs, num_layers: int) -> None:
        given = inputs.kwargs.get("past_key_values")
        if given is None:
            given = sys.modules["transformers.cache_utils"].DynamicCache(config=getattr(module, "config", None))
            inputs.kwargs["past_key_values"] = given
        self.cache: Any = given
        self._num_layers = num_layers
        layers = getattr(given, "layers", None)
        kinds = {type(layer).__name__ for layer in layers or ()} - set(_KINDS)
        if layers is None or kinds or getattr(given, "offloading", False):
            raise value_error(
                "pipeline: a cache of this kind cannot be spread over the stages",
                found=f"{type(given).__name__} with {', '.join(sorted(kinds)) or 'layers that are offloaded'}",
                expected=f"layers that grow with each call: {', '.join(_KINDS)}",
                fix='model.generate(tokens, cache_implementation="dynamic"), or use_cache=False',
            )
        self._before = [dict(vars(layer)) for layer in given.layers]
        self._after: dict[int, dict[str, Any]] = {}
        self._grown: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def in_stage(self) -> Iterator[None]:
        """Let one stage of this rank see the cache as it was before the call, and add to it.

        Yields:
            Nothing.
        """
        cache, update = self.cache, self.cache.update
        self._restore(self._before)

        def noted(keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            self._grown[layer_idx] = keys, values
            found = update(keys, values, layer_idx, *args, **kwargs)
            self._after[layer_idx] = dict(vars(cache.layers[layer_idx]))
            return found

        with replaced(cache, update=noted):
            yield

    def end(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Keep what the stages of this rank have added, and of the other layers the shapes. Collectives: an all-reduce.

        Args:
            group: The ranks of the pipeline.
            device: Of this rank.
        """
        table = torch.zeros(self._num_layers, _WORDS, dtype=torch.int64)
        for number, (keys, values) in self._grown.items():
            table[number] = torch.tensor([1 + _DTYPES.index(keys.dtype), *keys.shape, *values.shape])
        found = table.to(control_device(group, device))
        dist.all_reduce(found, group=group)
        self._restore(self._before)
        for number, (dtype, *shape) in enumerate(found.tolist()):
            if not dtype:
                continue
            while len(self.cache.layers) <= number:
                self.cache.layers.append(self.cache.layer_class_to_replicate())
            layer = self.cache.layers[number]
            if number in self._after:
                vars(layer).update(self._after[number])
            else:
                layer.update(
                    *(torch.empty(one, dtype=_DTYPES[dtype - 1], device="meta") for one in (shape[:4], shape[4:]))
                )

    def _restore(self, states: list[dict[str, Any]]) -> None:
        del self.cache.layers[len(states) :]
        for layer, state in zip(self.cache.layers, states, strict=True):
            vars(layer).clear()
            vars(layer).update(state)
