"""Variants of a case that is in the ordinary suite: `pytest -m slow` runs them."""

import pytest


def slow(*values):
    """Values of one parameter."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_cases(*cases):
    """Values of several parameters, each a tuple."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]
