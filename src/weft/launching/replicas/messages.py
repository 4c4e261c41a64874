"""What replicas and other launchers have to say to the launcher that decides; see [Note: replica keys]."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from weft.launching.replicas.forms import fits
from weft.peers.store import RankStore

_NAME = 100  # characters
_COUNT = range(2**53)
_CODE = range(-255, 256)  # of an exit, or minus the number of a signal
_FORMS = MappingProxyType(
    {
        "ask": {"name": _NAME, "step": _COUNT, "fresh": bool, "facts": [str], "patience_s": float, "failed": bool},
        "loop": {"name": _NAME, "rank": _COUNT, "step": _COUNT, "inside": bool, "whole": bool, "done": bool},
        "node": {
            "launcher": _NAME,
            "node": (None, _COUNT),
            "first": bool,
            "facts": [(str, _COUNT)],
            "replicas": [{"pids": [_COUNT], "exits": [(None, _CODE)], "stopped": bool, "trace": str}],
            "leaving": bool,
            "gone": bool,
        },
    }
)
_MOST = 10_000  # messages that are read before something else has its turn


def arrived(board: RankStore) -> Iterator[tuple[str, dict[str, Any]]]:
    """The kind of each message that has come, and the message. Those of another form are passed over."""
    for _ in range(_MOST):
        found = board.pop("asks")
        if found is None:
            return
        kind = found.pop("kind", None) if isinstance(found, dict) else None
        if isinstance(kind, str) and kind in _FORMS and fits(found, _FORMS[kind]):
            yield kind, found
        else:
            board.warn("asks")
