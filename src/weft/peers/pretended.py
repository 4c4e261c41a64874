"""A process group whose other ranks are only pretended: nothing is sent, every message is written down.

The others bring what this rank brings: a sum is the number of ranks times its own values, a gather is copies of
them. Tensors without values (fake ones) have shapes alone, and those are right anyway. What one rank alone has, such as
numbers that it sends to another, or a value that it tells all, is in its `Mail`: the sender has to have run before.
"""

# ruff: noqa: D102  (the operations are torch's)

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from weft import torch_internals
from weft.errors import ContextError
from weft.tensors.nested import map_tensors, tensors

BACKEND = "pretended_gloo"  # what depends on gloo, such as exchanges between pairs, is as on gloo
Note = Callable[[str, "PretendedGroup", int], None]
_ALL = -1  # among ranks
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
    """What ranks send each other, kept while they run one after the other, each from its start."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], list[Any]] = {}
        self._counts: Counter[tuple[str, int, int]] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._sent.values()))

    def begin(self) -> None:
        """A rank starts."""
        self._counts.clear()

    def send(self, source: int, target: int, values: Any) -> None:
        """Keep what a rank sends, if it did not in an earlier run."""
        sent = self._sent.setdefault((source, target), [])
        if self._next("sent", source, target) == len(sent):
            sent.append(values)

    def receive(self, source: int, target: int) -> Any:
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
        for method in (
            torch_internals.NAME_GROUP,
            torch_internals.MESSAGES_BEGUN,
            torch_internals.GATHER_ON_GROUP,
            torch_internals.REDUCE_ON_GROUP,
        ):
            method.check()
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
        torch_internals.NAME_GROUP.of(super())(name)
        self._name = name

    def _get_backend(self, device: torch.device) -> PretendedGroup:
        return self  # torch 2.14 asks it whether it sends several messages as one, which it does not

    def _get_sequence_number_for_group(self) -> int:
        return 0  # nobody else is there to compare it with

    @property
    def pg_name(self) -> str:
        """Its name among torch's groups."""
        return self._name

    group_name: Any = pg_name

    def told(self, value: Any, source: int) -> Any:
        """The value that one rank has, given to all; where there is another one, that: it may well be the same."""
        source = self.ranks[source]
        if source == self.ranks[self.rank()]:
            self._mail.send(source, _ALL, map_tensors(_kept, value))
        elif value is None:
            return map_tensors(_made_anew, self._mail.receive(source, _ALL))
        return value

    # -- torch's operations ------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        for tensor in tensors:
            self._reduced(tensor, opts)
        return self._done("all_reduce", tensors, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._done("broadcast", tensors, tensors)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._done("reduce", tensors, tensors)

    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [given])

    all_gather_single = _allgather_base

    def allgather(self, outputs: Any, given: Any, opts: Any = None) -> dist.Work:
        for each, mine in zip(outputs, given, strict=True):
            for output in each:
                _put(output, mine)
        return self._done("all_gather", outputs, [tensor for each in outputs for tensor in each])

    def allgather_into_tensor_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> dist.Work:
        for output, mine in zip(outputs, given, strict=True):
            _put_copies(output, mine, self.size())
        return self._done("all_gather", outputs, outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [given], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter(self, outputs: Any, given: Any, opts: Any = None) -> dist.Work:
        for output, mine in zip(outputs, given, strict=True):
            _put(output, mine[self.rank()])
            self._reduced(output, opts)
        return self._done("reduce_scatter", given, outputs)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> dist.Work:
        for output, mine in zip(outputs, given, strict=True):
            if _has_values(output):
                _put(output, mine.view(self.size(), *output.shape)[self.rank()])
                self._reduced(output, opts)
        return self._done("reduce_scatter", given, outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self, output: Any, given: Any, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> dist.Work:
        if _has_values(output) and len(output) and len(given):
            sent = given.split(input_splits or len(given) // self.size())
            received = output.split(output_splits or len(output) // self.size())
            for place, theirs in zip(received, sent, strict=True):
                choices = sent[self.rank()], theirs, torch.empty(1).expand(place.shape)  # a pair sends each other alike
                _put(place, next(each for each in choices if each.shape == place.shape))
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
            self._mail.send(self.ranks[self.rank()], self.ranks[peer], _kept(tensor))
        return self._done("send", tensors, tensors)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        for tensor in filter(_has_values, tensors):
            _put(tensor, self._mail.receive(self.ranks[peer], self.ranks[self.rank()]))
        return self._done("recv", tensors, tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._done("barrier", [], [])

    # ----------------------------------------------------------------------------------------------------

    def _reduced(self, tensor: torch.Tensor, opts: Any) -> None:
        if _has_values(tensor) and (opts is None or dist.ReduceOp.SUM in (opts, getattr(opts, "reduceOp", None))):
            with torch.no_grad():
                tensor.mul_(self.size())

    def _done(self, kind: str, counted: Any, result: list[torch.Tensor]) -> dist.Work:
        self._note(kind, self, sum(t.numel() * t.element_size() for t in tensors(counted)))
        future: Any = Future()  # the reducer of torch wants one that has a value
        future.set_result(list(result))
        work: dist.Work = torch_internals.work_of(future)
        return work


def rehearses() -> bool:
    """Whether this process rehearses: its ranks are pretended, and its numbers are not known."""
    return dist.is_initialized() and isinstance(dist.group.WORLD, PretendedGroup)


def check_not_pretended(what: str, group: object, fix: str) -> None:
    """Raise where ranks are pretended, for what cannot be rehearsed.

    Raises:
        ContextError: They are.
    """
    if isinstance(group, PretendedGroup):
        raise ContextError(
            f"{what} cannot be rehearsed",
            found=f"{group.size()} ranks that are pretended",
            expected="a real run, or a program without it",
            fix=fix,
        )


def _has_values(tensor: torch.Tensor) -> bool:
    return not torch_internals.fake_tensor.holds(tensor)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for another simulation: its values, or its shape."""
    if not _has_values(tensor):
        return tensor.detach().to("meta")
    with torch_internals.without_modes():
        return tensor.detach().clone()


def _made_anew(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu") if tensor.device.type == "meta" else tensor.clone()


def _put(output: torch.Tensor, values: torch.Tensor) -> None:
    """Fill a tensor that may have values. The simulation sees it: it may have none afterwards."""
    if _has_values(output):
        with torch.no_grad():
            output.copy_(values)


def _put_copies(output: torch.Tensor, values: torch.Tensor, count: int) -> None:
    if _has_values(output):
        given = _kept(values) if _has_values(values) else values  # it may be a row of the output
        _put(output.view(count, -1), given.view(1, -1))
