"""What happened in each step of a run, written down so that two runs can be compared.

exact_sums.py      sums of the bits of tensors, the same however they are cut
parameter_sums.py  those of the parameters by unit, from what each rank holds
samples.py         a digest of the samples of a step
record.py          `ledger`: records steps
file.py            lines of JSON
compare.py         the first step, and the first thing in it, that differs between two runs

`weft ledger` is the command. (What ranks have called and sent is another ledger: `weft.peers.ledger`.)

Tested by: tests/monitoring/test_ledger.py
"""

from weft.monitoring.run_ledger.record import Ledger, ledger

__all__ = ["Ledger", "ledger"]
