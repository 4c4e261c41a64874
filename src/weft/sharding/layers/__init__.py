"""What comes before layers are cut by a plan, for tensor parallelism.

tensor_plan.py     which part is cut in which way
proposed_plan.py   the same for a model that does not say it
adapter_layers.py  layers that PEFT has put another layer into
tensor_checks.py   what cannot be computed exactly
linear_layers.py   linear layers, and several projections in one
forward_source.py  what the source code of a `forward` tells
tensor_layers.py   all of it in its order, and the engine

Tested by: tests/transforms/test_tensor_parallel.py
"""
