"""What `launch_function` and the ranks it starts leave for each other, as files in one folder."""

from __future__ import annotations

import contextlib
import importlib
import pickle
from typing import Any, NamedTuple

from weft.errors import MissingExtra, type_error

CALL_FILE, ENDING_FILE = "call", "ending.json"


class RankCall(NamedTuple):
    """What a rank does.

    Attributes:
        path: Where it finds modules.
        arguments: `sys.argv`.
        pickled: Function and arguments; read once modules are found.
    """

    path: list[str]
    arguments: list[str]
    pickled: bytes


def dumps(value: Any, what: str) -> bytes:
    """Pickle, by cloudpickle if it is there.

    Raises:
        MissingExtra: Only cloudpickle could do it.
        TypeError: Nothing can.
    """
    pickler: Any = pickle
    with contextlib.suppress(ImportError):
        pickler = importlib.import_module("cloudpickle")
    data, found, cause = b"", "", None
    try:
        data = pickler.dumps(value)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is reported)
        found, cause = f"{type(error).__name__}: {error}", error
    if pickler is not pickle and found:
        raise type_error(
            f"{what} cannot be sent to another process",
            found=found,
            expected="values that can be pickled",
            fix="make files, locks and connections inside the function, and return plain values",
        ) from cause
    if found or (pickler is pickle and b"__main__" in data):
        raise MissingExtra(
            f"{what} cannot be sent to another process without cloudpickle",
            found=found or "something that is defined in __main__",
            expected="a function of a module, or the extra torchweft[notebook]",
            fix="pip install 'torchweft[notebook]'",
        ) from cause
    return data
