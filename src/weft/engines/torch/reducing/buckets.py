"""Gradients in buckets: torch's DDP reducer, used directly.

[Note: order of sums] Buckets are made anew after the first backward pass, in the order in which gradients arrived, as
in DDP. Where a gradient lies in a bucket decides in which order three ranks or more add it up, and so its last bit:
a run that resumes begins with the buckets it had.

Source: `torch.distributed.Reducer` (torch/csrc/distributed/c10d/reducer.cpp), Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.engines.options import ReduceOptions
from weft.engines.torch.reducing.power_sgd import PowerSgdHook
from weft.tensors.pairwise import as_real

_Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


class Buckets:
    """Averages gradients bucket by bucket, while backward still runs.

    Attributes:
        order: The parameters of each bucket, by place, once gradients have arrived; see [Note: order of sums].
    """

    def __init__(
        self,
        module: nn.Module,
        named: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        options: ReduceOptions,
        order: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._parameters: list[torch.Tensor] = list(named.values())
        by_name = sparse_gradients(module)
        self._sparse = [name in by_name for name in named]
        is_whole = order is not None and sum(map(len, order)) == len(named)  # none was frozen or unfrozen since
        self.order = [list(bucket) for bucket in order] if order is not None and is_whole else None
        most = options.bucket_bytes
        limits = [min(torch_internals.FIRST_BUCKET_BYTES.found, most), most]
        buckets, sizes = torch_internals.assign_buckets(self._parameters, limits, self._sparse)
        self._reducer = dist.Reducer(
            self._parameters,
            self.order or list(reversed(buckets)),  # gradients come last layer first
            [most] * len(self.order) if self.order else list(reversed(sizes)),
            group,
            self._sparse,
            most,
            options.unused == "zero",
            True,  # noqa: FBT003  (gradients are views of the buckets: one copy less)
            dict(enumerate(named)),
            limits[0],
        )
        compress, dtype = options.compress, options.dtype
        if isinstance(compress, PowerSgdHook):
            compress.take(self._parameters)
        hook = _in_dtype(dtype) if compress is None and dtype is not None else compress
        self._told = bytearray([hook is None])
        if hook is not None:
            torch_internals.register_comm_hook(self._reducer, group, _noting(hook, self._told))

    @property
    def was_called_by_torch(self) -> bool:
        """Whether torch has called what is to reduce the buckets; True where torch itself does that."""
        return bool(self._told[0])

    def begin(self, outputs: list[torch.Tensor]) -> None:
        """Expect a gradient for every parameter (that `outputs` depend on, if unused ones may be)."""
        self._reducer.prepare_for_backward(outputs)

    def end(self, got: bytearray) -> None:
        """Check that all buckets have travelled; once, reorder them as the gradients really came."""
        torch_internals.REDUCER_FINISHED.of(self._reducer)()
        # torch does not tell what is in the new buckets but so, nor at all where gradients are sparse.
        if self.order is None and not any(self._sparse) and torch_internals.REBUILD_BUCKETS.of(self._reducer)():
            place = {id(p): i for i, p in enumerate(self._parameters)}
            buckets: list[dist.GradBucket] = torch_internals.BUCKET_VIEWS.of(self._reducer)()
            self.order = [[place[id(p)] for p in bucket.parameters()] for bucket in buckets]

    def release(self) -> None:
        """Destroy torch's reducer now, even if something still holds these buckets, such as the traceback of an error.

        A reducer that is the last owner of the process group destroys it while holding the GIL. Gloo then joins its
        threads, and a thread that is about to free a failed collective waits for the GIL: a deadlock.
        """
        del self._reducer


def sparse_gradients(module: nn.Module) -> list[str]:
    """Names of the trained parameters of `module` whose gradients are sparse tensors."""
    sparse = {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }
    return [name for name, p in module.named_parameters() if id(p) in sparse and p.requires_grad]


def _noting(hook: _Hook, told: bytearray) -> _Hook:
    """The hook, noting that it was called; it must not hold the buckets, whose reducer holds it in C++."""

    def call(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        told[0] = 1
        return hook(group, bucket)

    return call


def _in_dtype(dtype: torch.dtype) -> _Hook:
    """A communication hook that rounds a bucket to `dtype`, averages it, and widens it again."""

    def reduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        whole = bucket.buffer()
        buffer = as_real(whole)  # rounding a complex number itself would lose its imaginary part
        small = (buffer / dist.get_world_size(group)).to(dtype)
        work = dist.all_reduce(small, group=group, async_op=True)
        assert work is not None

        def widen(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            buffer.copy_(done.value()[0])
            return whole

        widened: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
        return widened

    return reduce
