"""Who waits for whom: finds a rank that waits in a collective for one that will not come.

A rank that does not come may be late, and is waited for; or it took another path. From outside the two look
alike, so each rank has a thread, the watch. It recognises two cases that need no limit of time:

- A rank waits at a meeting for one that waits in a collective for it. A rank that has begun more collectives than one
  at the meeting ever will is not late. The rank at the meeting raises.
- A rank waits in a collective for one that has left, or has reported an error (`report_failure`), with fewer
  collectives begun on the same group; or any rank has left by an error, or died. Nothing ends torch's own waits but the
  end of what they wait on: the watch aborts the groups and cuts the connections to that rank, and whatever torch raises
  is turned into a `PeerError` that names it. Who has left in good order with as many collectives, or belongs to other
  groups, is not waited for.

One thing needs a limit: all ranks wait, but not in the same collective, or somebody has left. That may be messages of
several groups which take long; after 6 seconds in which no rank has moved it is not. Who waits for a message of one
rank is found only this way: of such messages the ranks of a group have different numbers. Where a backward pass waits
is hidden in C++: it waits if its thread takes no CPU time.

A second thread, the guard, never asks the store anything: it ends questions that the store does not answer, those of
the watch included, see store.py.

[Note: the watch] Keys, below the prefix of a root:
    watch/asked      grows while somebody waits at a meeting
    watch/at/<rank>  what a rank was doing when that grew
    note/<k>         who left or failed, see world.py
"""

from __future__ import annotations

import atexit
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from weft import torch_internals
from weft.errors import ContextError, PeerError
from weft.peers.gloo_connections import abort_groups, close_connections, groups_among, listening_ports
from weft.peers.liveness import Neighbours, is_behind, read_notes
from weft.peers.store import RankStore, StoreLost
from weft.peers.world import World

_TORCH = "torch.distributed.distributed_c10d"
_PERIOD_S = 0.5
_SURE_S = 1.5  # how long a rank has to stand still
_STUCK_S = 4.0  # how long before it asks whether all the others do, too
_STUCK_TOGETHER_S = 2.0  # and for how long they have to
_RANKS_PER_S = 4000.0  # that may ask the store for news
_CALL_THE_GROUP = ("weft.tensors.pairwise", "weft.engines.torch.reducing.flat_buffer")  # not torch's functions
_NOT_THE_USER = ("weft", "torch", "contextlib", "threading", "concurrent")
_BETWEEN_PAIRS = ("send", "recv", "isend", "irecv")  # functions of torch


def start_watching(world: World) -> None:
    """Start the threads of this rank. They end with the context."""
    if world.store is not None and world.size > 1:
        world.watch = StragglerWatch(world)
        world.holders.add(world.watch)
        # An adopted context is not closed; a thread that came back from torch's code after the interpreter's end
        # would abort the process.
        atexit.register(_release, weakref.ref(world.watch))


def _release(watch: weakref.ref[StragglerWatch]) -> None:
    if (found := watch()) is not None:
        found.release()


class StragglerWatch:
    """The threads of one rank, and what is known of the others."""

    patience_s = _SURE_S

    def __init__(self, world: World) -> None:
        self._world = weakref.ref(world)
        self._seen: dict[int, _AwaitedRank] = {}
        self._asked = 0
        self._neighbours = Neighbours()
        self._still = _Unchanged()
        self._cpu = _Unchanged()
        self._clock = _clock_of_main_thread()
        self._answers = _Unchanged()
        self._end = threading.Event()
        period_s = max(_PERIOD_S, world.size / _RANKS_PER_S)
        targets = [("weft watch", self._tick), ("weft guard", self._guard)]
        self._threads = [
            threading.Thread(target=self._repeat, args=(target, period_s), name=name, daemon=True)
            for name, target in targets
        ]
        for thread in self._threads:
            thread.start()

    def release(self) -> None:
        """End the threads, and those of the store that wait for a key, while its answers have a limit still."""
        world = self._world()
        if world is not None and world.store is not None:
            world.store.end_waits()
        self._end.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2 * _PERIOD_S)

    def check(self, what: str, ranks: Sequence[int], world: World) -> None:
        """Raise if one of some ranks, of those that are waited for at a meeting, waits for this one elsewhere.

        Raises:
            PeerError: It does; the text names the rank and its line.
        """
        root = world.root
        if root.store is None:
            return
        asked, mine = root.store.add("watch/asked", 1), world.collectives()
        for rank in ranks:
            member = root.ranks.index(world.ranks[rank])
            theirs = root.store.found(f"watch/at/{member}", "asked", "collectives", "waits", "at")
            if theirs is None or not is_behind(mine, theirs["waits"]):
                continue
            # Answers keep coming, and say the same.
            seen, state = self._seen.get(member), [theirs["collectives"], theirs["at"], mine]
            if seen is None or seen.state != state:
                self._seen[member] = _AwaitedRank(state, asked, time.monotonic())
            elif time.monotonic() - seen.since >= _SURE_S and theirs["asked"] > seen.asked:
                raise _elsewhere(what, world, rank, theirs["at"])

    # -- the threads -----------------------------------------------------------------------------

    def _repeat(self, target: Any, period_s: float) -> None:
        while not self._end.wait(period_s):
            world = self._world()
            if world is None or world.store is None or not target(world, world.store):
                return
            del world

    def _guard(self, _: World, store: RankStore) -> bool:
        store.guard()
        return True

    def _tick(self, world: World, store: RankStore) -> bool:
        """Answer those who wait, and see whether this rank waits in vain itself; False to end."""
        try:
            place = self._place()
            asked = store.add("watch/asked", 0)
            if asked != self._asked:
                self._asked = asked
                answer = {"asked": asked, "collectives": world.collectives(), "waits": _waited_in(world)}
                answer |= {"sent": world.sent(), "at": _main_line(), "in": place}
                store.write(f"watch/at/{world.rank}", answer)
            if not world.closed:
                read_notes(world)
                self._look(world, store, place)
        except (StoreLost, ContextError) as error:  # then no meeting can take place any more
            if not world.closed and not self._end.is_set():
                _give_up(world, getattr(error, "rank", -1), getattr(error, "text", str(error)), [])
            return False
        return True

    def _place(self) -> str:
        """The collective that the main thread is in, or the backward pass that waits in one; empty if that is not sure.

        Called regularly: it compares the CPU time of that thread with those of earlier calls.
        """
        idle_s = 0.0 if self._clock is None else self._cpu.seconds(time.clock_gettime(self._clock))
        return _collective() or ("a backward pass" if idle_s >= _SURE_S and _is_in_backward() else "")

    def _look(self, world: World, store: RankStore, place: str) -> None:
        waits = _may_wait(world)
        still_s = self._still.seconds(world.sent() if waits else None)
        if not waits or still_s < _SURE_S:
            return
        if world.failure is not None:  # and what it waits for comes from another rank, which has left by now
            _close_connections(world, [port for note in world.notes for port in note["ports"]])
            return
        self._neighbours.report_dead(world, store)
        waited_in = _waited_in(world)
        behind = [
            note
            for note in world.notes
            if note["from"] != world.rank
            and (note["left"] or note["failures"] > world.failures)
            and (note["over"] or is_behind(note["collectives"], waited_in))
        ]
        gone = [note["from"] for note in behind if note["left"]]
        for note in behind:  # of a rank that failed and then left, the error is reported
            if note["from"] in gone or self._stands(store, note):
                _give_up(world, note["rank"], note["error"], note["ports"])
                return
        if still_s >= _STUCK_S and place:
            self._look_at_all(world, store, is_for_one=not waited_in)

    def _look_at_all(self, world: World, store: RankStore, *, is_for_one: bool) -> None:
        """Give up if all ranks wait, and not in the same collective; or this one for one rank, and some have left."""
        store.add("watch/asked", 1)
        left = {note["from"]: note for note in world.notes if note["left"]}
        staying = [rank for rank in range(world.size) if rank not in left]
        names = ("sent", "in", "at")
        answers = [store.found(f"watch/at/{rank}", *names) for rank in staying]
        same_s = self._answers.seconds([None if each is None else [each[name] for name in names] for each in answers])
        if same_s < _STUCK_TOGETHER_S or not all(each is not None and each["in"] for each in answers):
            return
        found = dict(zip(staying, answers, strict=True))
        mine = found[world.rank]["in"]
        others = [rank for rank, theirs in found.items() if theirs["in"] != mine]
        if left and is_for_one:  # of those that have left, the one with which this rank shares most groups
            note = max(left.values(), key=lambda note: len(note["collectives"].keys() & world.collectives().keys()))
            _give_up(world, note["rank"], note["error"], note["ports"])
        elif others and not left:
            place = found[others[0]]
            text = f"waits in {place['in']} at {place['at']}, while rank {world.ranks[world.rank]} waits in {mine}"
            _give_up(world, world.ranks[others[0]], text, [])

    def _stands(self, store: RankStore, note: dict[str, Any]) -> bool:
        """Whether a rank that reported an error has begun no collective since."""
        asked, theirs = store.add("watch/asked", 1), store.found(f"watch/at/{note['from']}", "asked", "collectives")
        if theirs is None:
            return False
        continued = is_behind(note["collectives"], theirs["collectives"])
        return bool(theirs["asked"] >= note.setdefault("since", asked) and not continued)


class _AwaitedRank(NamedTuple):
    """What a rank that is waited for was doing, when `asked` was that large, since when."""

    state: list[Any]
    asked: int
    since: float


class _Unchanged:
    """Since when a value has been the same."""

    def __init__(self) -> None:
        self._value: object = None
        self._since = 0.0

    def seconds(self, value: object) -> float:
        """How long it has been this value."""
        if value != self._value:
            self._value, self._since = value, time.monotonic()
        return time.monotonic() - self._since


def _give_up(world: World, rank: int, text: str, ports: Sequence[int]) -> None:
    """Let what this rank waits for in a collective end; `close_after` says which rank is to blame.

    An aborted collective ends without an error: code that uses its result calls `check_failed` first.
    """
    world.failure = (rank, text)
    abort_groups(groups_among(world.ranks))
    _close_connections(world, ports)  # last: NCCL needs its connections to abort


def _close_connections(world: World, ports: Sequence[int]) -> None:
    """End the connections to ranks that listen at these ports, and those that others have made to this rank."""
    store_port = None if world.store is None else world.store.port
    mine = set(listening_ports()) - {store_port}
    theirs = set(ports) - {store_port}
    close_connections(lambda local, remote: store_port not in (local, remote) and (local in mine or remote in theirs))


def _elsewhere(what: str, world: World, rank: int, place: str) -> PeerError:
    rank, mine = world.ranks[rank], world.ranks[world.rank]
    return PeerError(
        f"{what}: rank {rank} of {world.root.size} did not call it",
        found=f"rank {rank} waits in a collective at {place}, for rank {mine}, which is in {what}",
        expected="every rank makes the same calls in the same order",
        fix=f"call {what} on all ranks: no `if ctx.is_main:` around it, and no choice by one rank's loss before; and a "
        "sharded model as often on each: else in `with weft.full_params(model, ctx, forward=True):`",
        rank=rank,
        text=f"did not call {what}, but waits in a collective at {place}",
    )


def _may_wait(world: World) -> bool:
    """Whether the main thread is inside torch or this package, and not in the user's own code.

    Gloo counts messages between two ranks too, of which a rank in the middle has more than others: there
    the counts alone are no proof. Other backends wait wherever a value is read, and count these apart.
    """
    group = world.root.group
    innermost = next((module for module, _ in _calls()), None)
    try:
        if innermost is None or group is None or dist.get_backend(group) != "gloo":
            return True
    except ValueError:  # destroyed by who made it, and not by `close`: no rank waits in it
        return False
    return innermost.partition(".")[0] in ("weft", "torch")


def _waited_in(world: World) -> dict[str, int]:
    """How many collectives were begun on the groups in which the main thread may wait for all ranks.

    These are none if it waits for one rank, or runs the user's code; and all where torch's frames do not say which.
    """
    begun = world.collectives() if _may_wait(world) else {}
    calls = list(_calls())
    outside = next((module for module, _ in calls if not module.startswith("torch.")), "")
    for module, frame in calls:
        if module == _TORCH and frame.f_code.co_name in _BETWEEN_PAIRS and not outside.startswith("weft."):
            return {}
        if module == _TORCH and "group" in frame.f_locals:
            group: Any = frame.f_locals["group"] or dist.group.WORLD
            return {name: count for name, count in begun.items() if name == group.group_name}
        if not module.startswith("torch."):
            break
    return begun


def _collective() -> str:
    """The collective of gloo that the main thread is certainly in; empty if that is not known."""
    found = ""
    for module, frame in _calls():
        if module == _TORCH:
            found = f"torch.distributed.{frame.f_code.co_name}"
        elif module in _CALL_THE_GROUP:
            found = found or "a message between pairs of ranks"
        elif module.startswith("weft.collectives"):
            found = f"weft.{frame.f_code.co_name}"
        elif found:
            return found
        elif not module.startswith("torch"):
            return ""
    return found


def _is_in_backward() -> bool:
    """Whether the main thread is inside of autograd's engine, and in no hook."""
    code = torch_internals.run_backward.found.__code__
    return any(frame.f_code is code for _, frame in itertools.islice(_calls(), 1))


def _clock_of_main_thread() -> int | None:
    ident, clock_of = threading.main_thread().ident, getattr(time, "pthread_getcpuclockid", None)
    return None if ident is None or clock_of is None else int(clock_of(ident))


def _main_line() -> str:
    """`file:line` of what the main thread does, outside this package and torch."""
    outside = (f for module, f in _calls() if module.partition(".")[0] not in _NOT_THE_USER)
    frame = next(outside, None)
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _calls() -> Iterator[tuple[str, FrameType]]:
    """The calls that the main thread is in, the innermost first, each with the name of its module."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame
        frame = frame.f_back
