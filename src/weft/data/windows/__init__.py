"""Windows: groups of micro-batches, one for each optimizer step.

window.py         one window
splitter.py       how a loader is split into them
loader.py         a loader that yields them
micro_batches.py  what a window reads from
sync.py           when its gradients are kept, and when they are reduced

Tested by: tests/transforms/test_accumulate_grads.py, tests/data
"""
