"""JSON that may come from anywhere: manifests, headers, indices.

Python reads values that lie in each other by recursion. A text may be too deep for that, and then it is none that weft
wrote; or the program has called weft deep in a recursion of its own, and then it says nothing about the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_MOST_NESTED = 700  # values of a state may be 200 deep, three times as deep in JSON
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|([\[{])|[\]}]')


def parse_json(text: bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a text in JSON.

    Args:
        text: In UTF-8.
        pairs: Makes the value of an object; default: a dict.

    Raises:
        ValueError: It is no JSON, or nested too deep.
        RecursionError: This program is too deep in its own stack to read it.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        if _nesting(text) > _MOST_NESTED:
            raise ValueError(f"values in each other, more than {_MOST_NESTED} deep") from None
    with ThreadPoolExecutor(1) as threads:  # whose stack is empty
        return threads.submit(json.loads, text, object_pairs_hook=pairs).result()


def _nesting(text: bytes) -> int:
    """How deep values lie in each other."""
    depth = most = 0
    for found in _BRACKETS.finditer(text):
        if not found[0].startswith(b'"'):
            depth += 1 if found[1] else -1
            most = max(most, depth)
    return most
