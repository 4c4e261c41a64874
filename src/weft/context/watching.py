"""Who waits for whom: finds a rank that waits in a collective while this one waits in a meeting.

A rank that does not come to a meeting may be late, and is waited for; or it went another way and waits,
in a collective of torch, for the very rank that waits for it. From outside the two look alike, so each
rank has a thread that, when asked, writes down how many collectives the rank has begun and where it
stands. One that has begun more of them than a rank at the meeting ever will before it is not late:
this is certain, and needs no limit of time.

[Note: the watch] Keys, below the prefix of the world:
    late/asked          number of a meeting at which somebody waits
    late/<n>/<rank>     what a rank that has not come to meeting n is doing
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from weft.context.world import World
from weft.errors import PeerError, message

__all__ = ["Watch", "watch"]

_PERIOD_S = 0.5
_SURE_S = 1.5  # how long a rank has to stand still


def watch(world: World) -> None:
    """Start the thread of this rank, if there is none. It ends with the context."""
    if world.store is not None and world.size > 1 and world.watch is None and not world.root.closed:
        world.watch = Watch(world)
        world.root.holders.add(world.watch)


class Watch:
    """The thread, and what the others' threads wrote down."""

    def __init__(self, world: World) -> None:
        self._world = weakref.ref(world)
        self._seen: dict[int, tuple[str, float]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="weft watch", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """End the thread."""
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _PERIOD_S)

    def _answer(self) -> None:
        while not self._end.wait(_PERIOD_S):
            world = self._world()
            if world is None or world.store is None:
                return
            try:
                if world.store.check(["late/asked"]):
                    number = int(world.store.get("late/asked"))
                    if number > world.meetings:
                        mine = {"counts": _counts(world), "at": _main_line(), "waits": _may_wait(world)}
                        world.store.set(f"late/{number}/{world.rank}", json.dumps(mine))
            except RuntimeError:  # the store is gone, and with it everybody to answer to
                return
            del world

    def check(self, what: str, missing: Sequence[int]) -> None:
        """Raise if one of the ranks that are waited for waits for this one elsewhere.

        Raises:
            PeerError: It does; the text names the rank and its line.
        """  # noqa: DOC501  (an error made by a function)
        world = self._world()
        if world is None or world.store is None:
            return
        number, mine = world.meetings, _counts(world)
        world.store.set("late/asked", str(number))
        for rank in missing:
            key = f"late/{number}/{rank}"
            if not world.store.check([key]):
                continue
            text = world.store.get(key).decode()
            theirs = json.loads(text)
            if not theirs["waits"] or not any(theirs["counts"].get(name, 0) > count for name, count in mine.items()):
                continue
            before, since = self._seen.get(rank, ("", 0.0))
            if before != text:
                self._seen[rank] = (text, time.monotonic())
            elif time.monotonic() - since >= _SURE_S:
                raise _elsewhere(what, world, rank, theirs["at"])


def _elsewhere(what: str, world: World, rank: int, place: str) -> PeerError:
    return PeerError(
        message(
            f"{what}: rank {rank} of {world.size} did not call it",
            found=f"rank {rank} waits in a collective at {place}, for rank {world.rank}, which is in {what}",
            expected="every rank makes the same calls in the same order",
            fix=f"call {what} on all ranks: no `if ctx.is_main:` around it",
        ),
        rank=rank,
        text=f"did not call {what}, but waits in a collective at {place}",
    )


def _counts(world: World) -> dict[str, int]:
    """How many collectives this rank has begun on each group."""
    found = {}
    for each in (world.root, *world.root.lines.values(), *world.root.made):
        if each.group is not None:
            group: Any = each.group
            found[str(group.group_name)] = int(group._get_sequence_number_for_group())
    return found


def _may_wait(world: World) -> bool:
    """Whether the main thread is inside of torch or of this package, and not in the user's own code.

    Gloo counts messages between two ranks too, of which a rank in the middle has more than others: there
    the counts alone are no proof. Other backends wait wherever a value is read, and count these apart.
    """
    group = world.root.group
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or group is None or dist.get_backend(group) != "gloo":
        return True
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("weft", "torch")


def _main_line() -> str:
    """`file:line` of what the main thread does, outside of this package and of torch."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("weft", "torch", "contextlib"):
            break
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
