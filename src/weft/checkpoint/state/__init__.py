"""Objects as tensors and plain values, and back.

collect.py        what has to survive, as tensors and plain values, by name
adapters.py       adapters of PEFT: their configuration, and which tensors are theirs
apply.py          from the files into the objects, all or nothing
containers.py     dicts and lists of plain values, filled in place
json_values.py    plain values as JSON
other_ranks.py    what only some ranks have, as in a pipeline
random_states.py  random states of the ranks

Tested by: tests/checkpoint
"""
