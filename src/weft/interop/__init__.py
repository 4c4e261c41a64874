"""Where weft meets other libraries: what they wrote, and how they work under weft's context and contract.

deepspeed_checkpoint.py  `import_deepspeed`, which trusts what it reads
deepspeed_partition.py   `zero_partition(engine="deepspeed")`: arguments checked, ranks agreed

Tested by: tests/engines/test_deepspeed.py, tests/engines/test_deepspeed_checkpoint.py
"""

from weft.interop.deepspeed_checkpoint import import_deepspeed

__all__ = ["import_deepspeed"]
