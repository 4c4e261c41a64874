"""Probes: promises that are measured while a program runs.

runner.py          when a unit is called: compare what goes in, and measure what it computes
compare.py         with one process, and with the other ranks
no_trace.py        one call more, that leaves nothing behind
repeated_hooks.py  which hooks run again in it
observed.py        what is computed while a probe runs, and without dropout
same_draws.py      rows draw the same random numbers together and apart
whole_unit.py      tensor parallelism: layers on several ranks, and whole on each
between_blocks.py  and what is between blocks that have parts of a sequence
part_uses.py       and whether a loss takes from what lies between them
whole_experts.py   expert parallelism: experts on several ranks and all on each, and the layers around them
sequence_slice.py  context parallelism: a slice of a batch in parts and whole

Tested by: tests/probes
"""
