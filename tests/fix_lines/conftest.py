"""That each line has a test is seen in the ordinary suite; the tests run in the slow one, or in their engine's."""

import pytest


def pytest_itemcollected(item):
    """Hook of pytest, for the tests of this folder."""
    engine = any(item.get_closest_marker(name) for name in ("deepspeed", "xla"))
    if item.path.name != "test_every_fix_line.py" and not engine:
        item.add_marker(pytest.mark.slow)
