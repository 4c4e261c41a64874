"""Variants of a case that is in the ordinary suite: `pytest -m variant` runs them, and `pytest -m slow` every third."""

import itertools

import pytest


def variants(*values):
    """Values of one parameter."""
    return [pytest.param(value, marks=pytest.mark.variant) for value in values]


def variant_cases(*cases):
    """Values of several parameters, each a tuple."""
    return [pytest.param(*case, marks=pytest.mark.variant) for case in cases]


def diagonal(first, second, *, every=1):
    """All pairs of values of two parameters: as many in the ordinary suite as it takes for each value to be there.

    Or, of those, the first of `every` so many.
    """
    quick = {(i % len(first), i % len(second)) for i in range(0, max(len(first), len(second)), every)}
    return [
        pytest.param(one, two, marks=[] if (i, j) in quick else [pytest.mark.variant])
        for i, one in enumerate(first)
        for j, two in enumerate(second)
    ]


def one_in(number, values):
    """All values of one parameter; the ordinary suite runs the first of every so many."""
    return [pytest.param(one, marks=[pytest.mark.variant] if at % number else []) for at, one in enumerate(values)]


def pairs(*options):
    """Cases in which every value of one parameter meets every value of every other, in few cases: not all products."""
    cases = list(itertools.product(*options))
    missing = {met for case in cases for met in _meetings(case)}
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing & _meetings(case)))
        missing -= _meetings(best)
        chosen.append(best)
    return chosen


def _meetings(case):
    return {(i, j, str(case[i]), str(case[j])) for i, j in itertools.combinations(range(len(case)), 2)}
