"""A process group whose other ranks are only pretended: nothing is sent, every message is written down.

The others bring what this rank brings: a sum is the number of ranks times its own values, a gather is copies of
them. Tensors without values (fake ones) have shapes alone, and those are right anyway. Numbers that one rank sends to
another are in its `Mail`: the sender has to have run before.
"""

# ruff: noqa: D102  (the operations are torch's)

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["BACKEND", "Mail", "NotSent", "PretendedGroup"]

BACKEND = "pretended_gloo"  # what depends on gloo, such as exchanges between pairs, is as on gloo
Note = Callable[[str, "PretendedGroup", int], None]
_Group: Any = dist.ProcessGroup  # whose operations have many overloads


class NotSent(BaseException):
    """A rank waits for numbers that another one has not sent yet. Not an Exception, which a program may catch.

    Attributes:
        source: Global rank of the other one.
    """

    def __init__(self, source: int) -> None:
        super().__init__(source)
        self.source = source


class Mail:
    """The numbers that ranks send each other, kept while they run one after the other, each from its start."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._counts: Counter[tuple[str, int, int]] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._sent.values()))

    def begin(self) -> None:
        """A rank starts."""
        self._counts.clear()

    def send(self, source: int, target: int, values: torch.Tensor) -> None:
        """Keep what a rank sends, if it did not in an earlier run."""
        sent = self._sent.setdefault((source, target), [])
        if self._next("sent", source, target) == len(sent):
            sent.append(values)

    def receive(self, source: int, target: int) -> torch.Tensor:
        """The next message from one rank to another.

        Raises:
            NotSent: It was not sent yet.
        """
        sent = self._sent.get((source, target), [])
        number = self._next("received", source, target)
        if number >= len(sent):
            raise NotSent(source)
        return sent[number]

    def _next(self, what: str, source: int, target: int) -> int:
        self._counts[what, source, target] += 1
        return self._counts[what, source, target] - 1


class PretendedGroup(_Group):  # type: ignore[misc]
    """One rank of a group, alone in its process.

    Attributes:
        ranks: Global rank of every member.
        per_node: Ranks of a node.
        axes: Names and sizes of the mesh that was asked for, and then of the one in use; None: not asked for.
        saved: Bytes that this rank would have written of the last checkpoint.
    """

    def __init__(self, ranks: Sequence[int], rank: int, per_node: int, note: Note, mail: Mail) -> None:
        super().__init__(rank, len(ranks))
        self.ranks = tuple(ranks)
        self.per_node = per_node
        self.axes: dict[str, int] | None = None
        self.saved = 0
        self._name = BACKEND
        self._note = note
        self._mail = mail
        self._members = rank, len(ranks)

    def rank(self) -> int:
        """Of this process in the group."""
        return self._members[0]

    def size(self) -> int:
        """How many ranks."""
        return self._members[1]

    def getBackendName(self) -> str:  # noqa: N802  (torch's)
        """What torch calls it."""
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._name = name

    @property
    def pg_name(self) -> str:
        """Its name among torch's groups."""
        return self._name

    group_name: Any = pg_name

    # -- torch's operations ------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        for tensor in filter(_has_values, tensors):
            self._reduced(tensor, opts)
        return self._done("all_reduce", tensors, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._done("broadcast", tensors, tensors)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._done("reduce", tensors, tensors)

    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> dist.Work:
        if _has_values(output) and _has_values(given):
            _put(output.view(self.size(), -1), given.view(1, -1))
        return self._done("all_gather", [output], [output])

    all_gather_single = _allgather_base

    def allgather(self, outputs: Any, given: Any, opts: Any = None) -> dist.Work:
        for each, mine in zip(outputs, given, strict=True):
            for output in each:
                _put(output, mine)
        return self._done("all_gather", outputs, [tensor for each in outputs for tensor in each])

    def allgather_into_tensor_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> dist.Work:
        return self._done("all_gather", outputs, outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any = None) -> dist.Work:
        if _has_values(output) and _has_values(given):
            _put(output, given.view(self.size(), *output.shape)[self.rank()])
            self._reduced(output, opts)
        return self._done("reduce_scatter", [given], [output])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter(self, outputs: Any, given: Any, opts: Any = None) -> dist.Work:
        return self._done("reduce_scatter", given, outputs)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> dist.Work:
        return self._done("reduce_scatter", given, outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self, output: Any, given: Any, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> dist.Work:
        if output.shape == given.shape and not input_splits:
            chunks = given.view(self.size(), -1)
            _put(output.view(self.size(), -1), chunks[self.rank()].expand_as(chunks))
        return self._done("all_to_all", [given], [output])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Any, given: Any, opts: Any = None) -> dist.Work:
        for output in outputs:
            if output.shape == given[self.rank()].shape:
                _put(output, given[self.rank()])
        return self._done("all_to_all", given, outputs)

    def gather(self, outputs: Any, given: Any, opts: Any = None) -> dist.Work:
        for output in outputs[0] if outputs else ():
            _put(output, given[0])
        return self._done("gather", given, [tensor for each in outputs for tensor in each])

    def scatter(self, outputs: Any, given: Any, opts: Any = None) -> dist.Work:
        if given:
            _put(outputs[0], given[0][self.rank()])
        return self._done("scatter", outputs, outputs)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        for tensor in filter(_has_values, tensors):
            with _disable_current_modes():
                self._mail.send(self.ranks[self.rank()], self.ranks[peer], tensor.detach().clone())
        return self._done("send", tensors, tensors)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        for tensor in filter(_has_values, tensors):
            _put(tensor, self._mail.receive(self.ranks[peer], self.ranks[self.rank()]))
        return self._done("recv", tensors, tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._done("barrier", [], [])

    # ----------------------------------------------------------------------------------------------------

    def _reduced(self, tensor: torch.Tensor, opts: Any) -> None:
        if opts is None or dist.ReduceOp.SUM in (opts, getattr(opts, "reduceOp", None)):
            with _disable_current_modes(), torch.no_grad():
                tensor.mul_(self.size())

    def _done(self, kind: str, counted: Any, result: list[torch.Tensor]) -> dist.Work:
        self._note(kind, self, _bytes(counted))
        future: Any = Future()  # the reducer of torch wants one that has a value
        future.set_result(list(result))
        work: dist.Work = _create_work_from_future(future)
        return work


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


def _has_values(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor)


def _put(output: torch.Tensor, values: torch.Tensor) -> None:
    if _has_values(output) and _has_values(values):
        with _disable_current_modes(), torch.no_grad():
            output.copy_(values)
