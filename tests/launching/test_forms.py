"""Messages of other processes are used only if they have the right form."""

import pytest

from weft.launching.replicas.forms import fits


@pytest.mark.parametrize(
    ("value", "form", "good"),
    [
        (True, range(2), False),
        (1.0, range(2), False),
        (2**64, range(2**53), False),
        (-1, range(2**53), False),
        (float("inf"), float, False),
        (True, float, False),
        ("a" * 101, 100, False),
        ("\ud800", 100, False),
        ("1.0", 100, True),
        ({"a": 1, "b": 2}, {"a": range(9)}, False),
        ({"a": None}, {"a": (None, range(9))}, True),
        ([1], [range(9)], False),
        ({"a": 1, "b": "x"}, [range(9)], False),
        (1, bool, False),
    ],
)
def test_forms(value, form, good):
    assert fits(value, form) is good
