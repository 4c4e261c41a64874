"""Whether a value that another process has written has the form that it should have."""

from __future__ import annotations

import math
from typing import Any


def fits(value: object, form: Any) -> bool:
    """Say whether a JSON value has a form.

    Args:
        value: What was read.
        form: A type, a range of whole numbers, None, or the most characters of a name; a tuple of forms, of which it
            has one; a dict with the forms of its fields, or a list with the form of all of them, by any names.

    Example:
        >>> form = {"name": 9, "step": range(2**53), "patience_s": float, "facts": [str]}
        >>> fits({"name": "1.0", "step": 3, "patience_s": 20, "facts": {"a": "b"}}, form)
        True
        >>> fits({"name": "1.0", "step": 10**30, "patience_s": float("nan"), "facts": None}, form)
        False
    """
    if isinstance(form, tuple):
        return any(fits(value, one) for one in form)
    if isinstance(form, dict):
        return isinstance(value, dict) and value.keys() == form.keys() and all(fits(value[n], form[n]) for n in form)
    if isinstance(form, list):
        return isinstance(value, dict) and all(fits(one, form[0]) for one in value.values())
    if isinstance(form, range):
        return type(value) is int and value in form
    if isinstance(form, int):
        return type(value) is str and value.isascii() and len(value) <= form
    if form is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    return value is None if form is None else type(value) is form
