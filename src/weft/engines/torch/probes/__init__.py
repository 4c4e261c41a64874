"""Probes: promises that are measured while a program runs.

runner.py          when a unit is called: compare what goes in, and measure what it computes
compare.py         with one process, and with the other ranks
no_trace.py        one call more, that leaves nothing behind
call_state.py      what a call may change, and putting it back
repeated_hooks.py  which hooks run again in it
observed.py        what is computed while a probe runs, and without dropout
same_draws.py      rows draw the same random numbers together and separately
whole_unit.py      tensor parallelism: layers on several ranks, and whole on each
gradient_hooks.py  what hooks on parameters make of gradients before they are averaged
part_uses.py       and whether a loss takes from what lies between them

Tested by: tests/probes
"""
