"""One replica of an elastic job: how it meets the others, adds up with them, and loses them without losing itself.

Each quorum ([Note: quorum] in quorum.py) has a process group of its own, made through the launcher's store and no part
of torch's default group. When a replica dies the operations of the others fail; then they let the group go, which wakes
up those that still wait, and ask for the next quorum.

A replica may have several ranks. Each of them is connected to the rank of the same number in the other replicas: a
*lane*. What fails on one lane has failed on all ranks of the replica: they vote about it after each exchange.

[Note: replica keys] Below `STORE`, in the store of the launcher. Queues:
    asks              what replicas and the launchers of other nodes have to say: the kind of message, and the message
    answer/<name>/<r> the quorum, or why the replica is refused, for its rank r
    group/<number>/   where the members of a quorum connect
    order/<launcher>  what the launcher of another node is to do
Values:
    here/<name>/<r>   the process that takes itself for this rank
    called/<number>   the members of this quorum are to come together after their step
    broken/<number>   a member of this quorum is gone, or waits for the next one
What a rank has to know before it is in the environment, see `REPLICA_VARIABLE`.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from weft import torch_internals
from weft.errors import ContextError
from weft.peers.gloo_connections import close_connections, connections
from weft.peers.quorum import Answer, Ask, LoopPosition
from weft.peers.store import RankStore, StoreLost
from weft.peers.world import World
from weft.tensors.pairwise import SmallSum

STORE = "weft/replicas"  # prefix of all keys
REPLICA_VARIABLE = "WEFT_REPLICA"  # JSON: "job", its name; "ranks" of each replica; folders "memory" and "folder"
_CONNECT_S = 5.0  # a member may have died since the quorum was decided
_LOOK_S = 0.2  # how often it is looked whether somebody new waits
_PATIENCE_S = 0.5  # how long an operation may take before it is looked whether it can still succeed
_PIECE = 2**24  # bytes of a message
_PIECE_S = 30.0  # how long one may take


class ReplicaGroup:
    """The replicas that make steps together, as a rank of one of them sees them.

    Attributes:
        name: Of this replica, and of no other.
        index: Of this replica in the quorum.
        size: Replicas in the quorum.
        most: Replicas of the job when all live.
        number: Of the quorum; 0 before the first.
        broken: A step has failed since the last quorum.
        called: Somebody new waits: all meet after this step.
        exchanges: How often all have added up something since the last quorum.
        inside: The ranks of this replica.
        on_loss: Called when a step fails, before anything else happens.
        is_done: Says whether the work is done, of what the context was left with: None, or a SystemExit of code 0.
        loop: Where the loop stands.
    """

    def __init__(
        self,
        board: RankStore | None,
        name: str,
        most: int,
        inside: World,
        device: torch.device,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Remember where the replicas meet.

        Args:
            board: Where the launcher listens; None for a replica that is alone for good.
            name: Of this replica.
            most: Replicas of the job.
            inside: The ranks of this replica; its `timeout_s` is how long another replica may take for a step.
            device: On which they can send each other something.
            facts: Of `REPLICA_VARIABLE`.
        """
        self.name = name
        self.index, self.size, self.most, self.number = 0, 1, most, 0
        self.broken = self.called = False
        self.exchanges = 0
        self.inside = inside
        self.on_loss: Callable[[], None] = lambda: None
        self.is_done: Callable[[BaseException | None], bool] = lambda error: False  # noqa: ARG005
        self.loop = LoopPosition()
        self._board, self._device, self._facts = board, device, facts
        self._lane: _Lane | None = None  # while this replica is connected to others
        self._looked_s = 0.0
        self._meetings = 0

    @property
    def place(self) -> int:
        """The number of this replica, and of those that take its place."""
        return int(self.name.partition(".")[0])

    def memory(self) -> Path | None:
        """A folder in the memory of the machine that outlives this process; None without a launcher."""
        return Path(self._facts["memory"]) if "memory" in self._facts else None

    def job(self) -> str:
        """A name that all replicas of this job have in common, and no other job."""
        return str(self._facts.get("job") or secrets.token_hex(8))

    # -- the work --------------------------------------------------------------------------------

    def report_position(self, loop: LoopPosition) -> None:
        """Tell the launcher where the loop stands."""
        self.loop = loop
        if self.inside.rank == 0:
            self._say_loop(done=False)

    def part(self, error: BaseException | None) -> None:
        """The context was left in good order: tell the launcher if the work is done."""
        if self.is_done(error):
            self._say_loop(done=True)
            if self._board is not None:
                self._board.has("told")  # the rank that answers has read it

    def _say_loop(self, *, done: bool) -> None:
        if self._board is not None:
            first = self.place * self.inside.size
            about = {"name": self.name, "rank": first + self.inside.rank, "done": done}
            self._board.push("asks", {"kind": "loop", **about, **self.loop._asdict()})

    # -- quorums ---------------------------------------------------------------------------------

    def meet(self, step: int, *, fresh: bool, facts: dict[str, str], failed: bool = False) -> Answer:
        """Ask for a quorum, wait for it, and connect to its members; others take part when their step is done.

        Args:
            step: Steps that were made.
            fresh: See `Ask`, as for the others.
            facts: What has to be alike in all.
            failed: Whether a step was lost.

        Raises:
            ContextError: This replica is refused; the text says why.
            PeerError: The launcher is gone, or does not answer.
        """
        self.release()
        answer = Answer(self.number + 1, (self.name,), step=step)
        if self._board is not None:
            answer = self._asked(self._board, Ask(step, fresh, facts, self.inside.timeout_s, failed))
        if answer.refused:
            raise ContextError(
                "resilient: this replica was refused",
                found=answer.refused,
                expected="one process per rank, started by `weft launch`, with the program of the others",
                fix="weft launch -n 3 --min-replicas 1 train.py",
            )
        self.number, self.size = answer.number, len(answer.members)
        self.index = answer.members.index(self.name)
        self.called, self.exchanges = False, 0
        if self._board is not None and self.size > 1:
            board = self._board.below(f"group/{self.number}/{self.inside.rank}")
            found = _connect(board, self.index, self.size, self._is_hopeless)
            self._lane = None if found is None else _Lane(*found, self.inside.timeout_s, self._is_hopeless)
        self.broken = self.size > 1 and self._lane is None
        self.vote()
        return answer

    def _asked(self, board: RankStore, ask: Ask) -> Answer:
        """What the launcher answers to this replica."""
        self._meetings += 1
        me = f"{self.name}/{self.inside.rank}"
        if self._meetings == 1 and not board.claim(f"here/{me}", secrets.token_hex(8)):
            return Answer(refused=f"two processes take themselves for rank {self.inside.rank} of replica {self.name}")
        if self.inside.rank == 0:
            board.push("asks", {"kind": "ask", "name": self.name, **ask._asdict()})
        while True:  # as long as the others live they come, and the launcher ends those that hang
            found = board.pop(f"answer/{me}", 60.0)
            if isinstance(found, dict) and found.keys() == set(Answer._fields):
                values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}
                return Answer(**values)

    def release(self) -> None:
        """Let the group go; the others' operations fail."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.release()

    # -- in a step -------------------------------------------------------------------------------

    def add_up(self, tensors: Iterable[torch.Tensor], *, room: bool = False) -> bool:
        """Add tensors up over the quorum, in place; False, and no later one succeeds, if a replica was lost.

        Then the values of the tensors mean nothing. One after the other: what fails leaves nothing in flight. All
        ranks of a replica come here equally often. `room`: the last element of the first tensor is free, for what
        else the replicas tell each other; otherwise that travels by itself.
        """
        found = list(tensors)
        signal = found[0][-1:] if room else torch.zeros(1)
        signal.fill_(self._somebody_waits())
        for tensor in found if room else (signal, *found):
            if self._lane is not None and not self.broken and not self._lane.add_up(tensor):
                self._lose()
        self.called |= bool(signal) and not self.broken
        self.exchanges += 1
        self.vote()
        return not self.broken

    def _is_hopeless(self) -> bool:
        """Whether the launcher knows of a member that will not take part any more."""
        return self._board is not None and self._board.has(f"broken/{self.number}")

    def vote(self) -> bool:
        """Whether no rank of this replica has lost another one; they come here together."""
        if self.inside.group is not None:
            votes = torch.tensor([self.broken, self.called], dtype=torch.uint8, device=self._device)
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.inside.group)
            broken, self.called = map(bool, votes.tolist())
            if broken:
                self._lose()
        return not self.broken

    def _somebody_waits(self) -> bool:
        """Whether the launcher calls all together; said by one rank, which the others hear of in the sum."""
        now = time.monotonic()
        if self._board is None or self.index or self.inside.rank or now - self._looked_s < _LOOK_S:
            return False
        self._looked_s = now
        return self._board.has(f"called/{self.number}")

    def _lose(self) -> None:
        if not self.broken:
            self.on_loss()
        self.broken = True
        self.release()

    # -- from one to another -----------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int) -> bool:
        """Send the bytes of a contiguous tensor on the CPU to a member, in pieces; False if a replica was lost."""
        return self._move(tensor, lambda group, piece: group.send([piece], to, 0))

    def receive(self, tensor: torch.Tensor, source: int) -> bool:
        """Fill a contiguous tensor on the CPU with what a member sends; False if a replica was lost."""
        return self._move(tensor, lambda group, piece: group.recv([piece], source, 0))

    def _move(self, tensor: torch.Tensor, move: Callable[[Any, torch.Tensor], dist.Work]) -> bool:
        if self._lane is None:
            return False
        has_succeeded = self._lane.move(tensor, move)
        if not has_succeeded:
            self._lose()
        return has_succeeded


class _Lane:
    """The ranks of one number in the replicas of a quorum, connected. What fails is false; nothing works after that."""

    def __init__(
        self, group: Any, connections: set[tuple[int, int]], timeout_s: float, is_hopeless: Callable[[], bool]
    ) -> None:
        """Take over a group.

        Args:
            group: Of gloo.
            connections: That it has made.
            timeout_s: How long one operation may take.
            is_hopeless: Whether it is known that one cannot succeed.
        """
        torch_internals.SET_TIMEOUT.of(group)(timedelta(seconds=timeout_s))
        self._group: Any = group
        self._connections = connections
        self._timeout_s, self._is_hopeless = timeout_s, is_hopeless
        self._sums: dict[tuple[torch.dtype, int], SmallSum] = {}

    def release(self) -> None:
        """Let the group go."""
        # Processes that were forked from this one, as by a loader, keep them open; so closing them is not enough.
        mine = self._connections
        if mine:
            close_connections(lambda *ports: ports in mine)
        self._sums.clear()
        group = [self._group]  # it ends when its operations have, which may be never
        self._group = None
        threading.Thread(target=group.clear, name="weft release", daemon=True).start()

    def add_up(self, tensor: torch.Tensor) -> bool:
        """Add a tensor up over the replicas, in place."""
        key = tensor.dtype, tensor.numel()
        if key not in self._sums:
            self._sums[key] = SmallSum(self._group, tensor, self._wait)
        with contextlib.suppress(RuntimeError):
            self._sums[key](tensor)
            return True
        return False

    def _wait(self, work: dist.Work) -> None:
        """Wait for an operation, unless the launcher knows that it cannot succeed."""
        hopeless = False
        while True:
            try:
                work.wait(timedelta(seconds=_PATIENCE_S))
                return
            except RuntimeError:
                if hopeless or work.is_completed():
                    raise
            hopeless = self._is_hopeless()

    def move(self, tensor: torch.Tensor, move: Callable[[Any, torch.Tensor], dist.Work]) -> bool:
        """Send or receive the bytes of a contiguous tensor on the CPU, in pieces."""
        with contextlib.suppress(RuntimeError):
            for piece in tensor.reshape(-1).view(torch.uint8).split(_PIECE):
                move(self._group, piece).wait(timedelta(seconds=min(_PIECE_S, self._timeout_s)))
            return True
        return False


def _connect(
    board: RankStore, index: int, size: int, is_hopeless: Callable[[], bool]
) -> tuple[Any, set[tuple[int, int]]] | None:
    """A group and the connections that it has made; None if a member does not come.

    Args:
        board: Where the members of the group find each other.
        index: The number of this member.
        size: How many there are.
        is_hopeless: Whether the launcher knows that one will not come.
    """
    made: list[Any] = []
    over = threading.Event()

    def connect() -> None:
        with contextlib.suppress(RuntimeError, StoreLost):
            store = _Addresses(board, index, size)
            made.append(dist.ProcessGroupGloo(store, index, size, timedelta(seconds=_CONNECT_S)))
        over.set()

    before = connections()
    threading.Thread(target=connect, name="weft connect", daemon=True).start()
    while not over.wait(_PATIENCE_S):  # gloo waits five times as long as its timeout, for one that has just died
        if is_hopeless():
            return None
    if not made:
        return None
    new = {one for one in connections() - before if one[1] != board.port}
    return made.pop(), new


class _Addresses(dist.Store):
    """What gloo takes for a store: it sends what one member writes to each of the others, so that no stranger can."""

    def __init__(self, board: RankStore, index: int, size: int) -> None:
        super().__init__()
        self._board, self._index = board, index
        self._others = [other for other in range(size) if other != index]
        self._found: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch says str, and gives bytes
        """Send a value to the others."""
        self._found[key] = value
        for other in self._others:
            self._board.push(f"{key}/{other}", value.decode("latin-1"))

    @override
    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=_CONNECT_S)) -> None:
        """Wait until the others have sent these."""
        end = time.monotonic() + timeout.total_seconds()
        for key in keys:
            if key not in self._found:
                value = self._board.pop(f"{key}/{self._index}", max(end - time.monotonic(), 0.0))
                if not isinstance(value, str):
                    raise dist.DistStoreError(f"{key} has not come")
                self._found[key] = value.encode("latin-1", "replace")

    @override
    def get(self, key: str) -> bytes:
        """A value that has come."""
        self.wait([key])
        return self._found[key]
