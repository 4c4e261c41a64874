"""Imported once by the process that ranks are forked from, so that no rank has to.

`torch._dynamo` is imported by every optimizer when it is made; here it is shared too.
"""

import gc

import torch._dynamo

import weft

__all__ = ["torch", "weft"]

gc.collect()
gc.freeze()  # collections in a rank need not look at all this again
