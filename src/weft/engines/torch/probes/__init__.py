"""Probes: promises that are measured while a program runs.

runner.py      when a unit is called: compare what goes in, and measure what it computes
compare.py     with one process, and with the other ranks
no_trace.py    one call more, that leaves nothing behind
whole_unit.py  tensor parallelism: layers on several ranks, and whole on each
"""
