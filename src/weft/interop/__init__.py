"""What other libraries wrote, read by weft: one file or folder per library.

accelerate_script/       `translate`, behind `weft migrate`: programs of Accelerate
deepspeed_checkpoint.py  `import_deepspeed`, which trusts what it reads
"""

from weft.interop.deepspeed_checkpoint import import_deepspeed

__all__ = ["import_deepspeed"]
