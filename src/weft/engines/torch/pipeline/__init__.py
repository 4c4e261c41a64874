"""The layers of a module on several ranks, one stage after the other.

pipelined.py         the calls of the module: forwards and backwards of a whole schedule
losses.py            the loss of a pass: combined from its micro-batches, shared with all ranks; that of one stage
row_probe.py         two micro-batches through all stages and back, together and separately
outputs.py           what a call without gradients returns
stage_forward.py     the forward of the module, of which a rank computes one stage
stage_borders.py     what leaves one stage and enters the next
stage_cache.py       caches of transformers, of which each rank keeps the layers that it has
stage_parameters.py  parameters and gradients of the passes of a schedule
schedules.py         torch's schedules
batch_parts.py       a batch in parts, and the loss of all of them
remote_output.py     a tensor that another stage computes

Tested by: tests/transforms/test_pipeline.py, tests/probes/test_pipeline_probes.py
"""
