"""Gradients as products of thin matrices on their way: torch's PowerSGD hook, with a state that is saved.

[Note: one at a time] The hook sends messages of its own when the first one has arrived, from a thread of the process
group. Those of two buckets could be in another order on another rank, so each bucket is waited for; on a GPU that
is a wait of the stream and not of the program.

[Note: buckets] What is remembered belongs to a bucket and the order in it. A run that resumes has the same buckets;
where it has others, because `bucket_bytes` is another, say, it begins without memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft.precision import PowerSGD
from weft.tensors.dtensor import is_sharded, local

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState


class PowerSgdHook:
    """The communication hook of one module."""

    def __init__(
        self, options: PowerSGD, place: int, num_ranks: int, stacked: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Begin without memory.

        Args:
            options: As the user chose.
            place: Of this rank among those that average.
            num_ranks: Their number.
            stacked: The tensors of all these ranks as one, of which each has its own.
        """
        self._place, self._num_ranks, self._stacked = place, num_ranks, stacked
        self._options = options
        self._places: dict[int, int] = {}  # of parameters, by their ids
        self._buckets: dict[int, list[int]] = {}  # parameters of each, by place; see [Note: buckets]

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average these from now on."""
        self._places = {id(p): place for place, p in enumerate(parameters)}

    def __call__(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket."""
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # noqa: PLC0415  (few programs need it)

        state = self._state
        state.process_group = group
        places = [self._places[id(p)] for p in bucket.parameters()]
        if self._buckets.setdefault(bucket.index(), places) != places:  # made anew, or others are trained now
            for memory in (self._buckets, state.error_dict, state.p_memory_dict, state.q_memory_dict):
                memory.clear()
            self._buckets[bucket.index()] = places
        future: torch.futures.Future[torch.Tensor] = powerSGD_hook.powerSGD_hook(state, bucket)
        future.wait()  # see [Note: one at a time]
        return future

    def state_dict(self) -> dict[str, Any]:
        """Steps so far, the source of random numbers, and buckets with what is remembered; errors are each rank's."""
        state = self._state
        drawn: Any = state.rng.get_state(legacy=True)
        _, keys, *rest = drawn
        return {
            "steps": state.iter,
            "random": [keys.tolist(), *rest],
            "buckets": [self._buckets[index] for index in sorted(self._buckets)],
            "errors": {str(index): self._stacked(error) for index, error in state.error_dict.items()},
            "left": {str(index): values for index, values in state.p_memory_dict.items()},
            "right": {str(index): values for index, values in state.q_memory_dict.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume; errors of another number of ranks are replaced by their mean, which is what they add up to."""
        state = self._state
        state.iter = saved["steps"]
        keys, *rest = saved["random"]
        state.rng.set_state(("MT19937", keys, *rest))
        self._buckets = dict(enumerate(saved["buckets"]))
        state.error_dict = {int(index): self._mine(value) for index, value in saved["errors"].items()}
        state.p_memory_dict = {int(index): local(value).clone() for index, value in saved["left"].items()}
        state.q_memory_dict = {int(index): local(value).clone() for index, value in saved["right"].items()}

    def _mine(self, errors: torch.Tensor) -> torch.Tensor:
        if is_sharded(errors):
            return local(errors)[0].clone()
        if errors.dim() == 1:  # one rank alone has no others beside it
            return errors.clone()
        return (errors[self._place] if len(errors) == self._num_ranks else errors.mean(0)).clone()

    @functools.cached_property
    def _state(self) -> PowerSGDState:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # noqa: PLC0415  (see above)

        options = self._options
        return powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=options.rank,
            start_powerSGD_iter=options.start_step,
            min_compression_rate=options.min_rate,
            random_seed=options.seed,
            # Added to norms: changes none, and a gradient of zeros stays zero instead of becoming NaN.
            orthogonalization_epsilon=torch.finfo(torch.float32).tiny,  # pyright: ignore[reportArgumentType]
        )
