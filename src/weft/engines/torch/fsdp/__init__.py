"""Parameters in shards, by torch's FSDP2.

fsdp2.py              FSDP2 attached to a module
units.py              what it gathers and frees together
gather_dtype.py       parameters that are gathered in a lower dtype than that of their shards
pending_gradients.py  gradients of a window, which it keeps
trained.py            its trained parameters
unused.py             parameters that get no gradient
own_parameters.py     are those in the module its own?
gather_order.py       do all ranks gather the same units in the same order?
refusals.py           what a sharded module cannot do
remove.py             FSDP2 removed from a module
full_params.py        full parameters for a moment

Tested by: tests/transforms/test_fully_shard.py, tests/transforms/test_full_params.py, tests/engines
"""
