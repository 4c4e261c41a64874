"""One model over several ranks: what the dimensions of parallelism besides data are made of.

tensor_module.py      linear layers and embeddings cut over ranks; the sequence cut between them
tensor_hooks.py       arguments that are gathered once, the sequence that is cut and joined
fused_columns.py      several projections in one column layer, heads that ranks share
part_sums.py          gradients of which each rank has a part of the sum
split_attention.py    attention over sequences of which each rank holds a part
sequence_exchange.py  what it sends
sequence_inputs.py    what a model is called with then
sequence_code.py      which parts of a model attend or number tokens, read from its code
exchange.py           tensors that travel in one node of the graph, and gradients that come back
sequence_slice.py     context parallelism, measured: a slice of a batch in parts and whole
between_blocks.py     tensor parallelism, measured: what is between blocks that have parts of a sequence
experts/              experts divided among ranks, and tokens sent to them

Tested by: tests/transforms/test_tensor_parallel.py, tests/transforms/test_context_parallel.py,
    tests/engines/test_fused_projections.py, tests/engines/test_attention_masks.py
"""
