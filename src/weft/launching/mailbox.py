"""What `launch_function` and its ranks leave for each other, as files in one folder; and how values are pickled."""

from __future__ import annotations

import contextlib
import importlib
import pickle
from typing import Any

from weft.errors import MissingExtra, type_error

CALL_FILE, ENDING_FILE = "call", "ending.json"


def dumps(value: Any, what: str, *, extra: str = "notebook") -> bytes:
    """Pickle, by cloudpickle if it is there.

    Args:
        value: Function and arguments, a result, or an error.
        what: What it is, for the text.
        extra: The extra of weft that installs cloudpickle.

    Raises:
        MissingExtra: Only cloudpickle could do it.
        TypeError: Nothing can.
    """
    pickler: Any = pickle
    with contextlib.suppress(ImportError):
        pickler = importlib.import_module("cloudpickle")
    cause: Exception | None = None
    try:
        data: bytes = pickler.dumps(value)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is reported)
        found, cause = f"{type(error).__name__}: {error}", error
    else:
        if pickler is not pickle or b"__main__" not in data:
            return data
        found = "something that is defined in __main__"
    if pickler is not pickle:
        raise type_error(
            f"{what} cannot be sent to another process",
            found=found,
            expected="values that can be pickled",
            fix="make files, locks and connections inside the function, and return plain values",
        ) from cause
    raise MissingExtra(
        f"{what} cannot be sent to another process without cloudpickle",
        found=found,
        expected=f"a function of a module, or the extra torchweft[{extra}]",
        fix=f"pip install 'torchweft[{extra}]'",
    ) from cause
