"""A program's own code on one rank of many, in one process, without memory, network or devices.

rehearse.py        `rehearse`: run a program, and say what it holds and sends
both_ways.py       with small numbers and with large ones, where the program reads what is not known
distinct_ranks.py  which ranks are alike, and one of each kind
script.py          the same for a script as it is
changes.py         what would make it smaller, rehearsed
search.py          meshes and options of a script side by side, in one table
simulation/        what it runs in: pretended ranks, tensors without memory, and what sees them
memory.py          what a rank holds, by kind and by line
messages.py        what ranks send each other, and a model of the time it takes
result.py          `Rehearsal`: memory by kind, messages by axis, as a value that prints
table.py           how it prints
estimate.py        memory from the shapes of parameters alone

Tested by: tests/rehearsal, tests/cli/test_rehearse.py
"""

from weft.rehearsal.memory import Holder, Memory, Moment
from weft.rehearsal.messages import Links, Message, sent_bytes
from weft.rehearsal.result import Difference, Rehearsal

__all__ = ["Difference", "Holder", "Links", "Memory", "Message", "Moment", "Rehearsal", "sent_bytes"]
