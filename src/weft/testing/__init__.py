"""Test worlds, for weft and for its users.

fake.py          any rank of any world in one process: plans and shapes
ranks.py         real gloo ranks from a warm pool: numbers and failures
ranks_failed.py  which of them failed, and why
rank_server.py   the process they are forked from
rank_worker.py   what a rank does
equivalence.py   does training give the same at every world size?
rehearsed.py     does a rehearsal say what a real run then does?
laws.py          what every transform promises, as functions
law_job.py       the small training job they run
element_laws.py  the same for functions of gradients

Tested by: tests/testing
"""

from weft.testing import laws as laws
from weft.testing.element_laws import check_element
from weft.testing.equivalence import assert_equivalent, largest_difference
from weft.testing.fake import fake
from weft.testing.ranks import RankPool, run_ranks
from weft.testing.ranks_failed import RanksFailed
from weft.testing.rehearsed import assert_rehearsed

__all__ = [
    "RankPool",
    "RanksFailed",
    "assert_equivalent",
    "assert_rehearsed",
    "check_element",
    "fake",
    "largest_difference",
    "laws",
    "run_ranks",
]
