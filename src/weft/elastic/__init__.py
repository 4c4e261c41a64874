"""A job that continues when one of its replicas dies.

resilient_loader.py  `resilient`: the loop over steps that are made again, by those alive, if one was lost in them
step_mark.py         what a step that failed has changed besides the weights, and putting it back
join.py              the state of one replica, sent to another one in pieces
memory_copy.py       a copy of the state that outlives all replicas
requirements.py      what a program has to be, so that its steps can be made again

Tested by: tests/elastic
"""

from weft.elastic.resilient_loader import Resilient, resilient

__all__ = ["Resilient", "resilient"]
