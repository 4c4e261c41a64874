"""Parameters in shards, by torch's FSDP2.

fsdp2.py         FSDP2 attached to a module
remove.py        and removed from it
full_params.py   whole parameters for a moment
gather_order.py  do all ranks gather the same units in the same order?
"""
