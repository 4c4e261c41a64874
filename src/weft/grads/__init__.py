"""Gradients between backward and the optimizer's step: what `weft.grad_chain` is made of, and gradients per sample.

named_grads.py  gradients by name, as they lie on this rank; sums over the ranks that hold the parts
chain.py        the hook on an optimizer that calls one element after the other
elements.py     clip_norm, clip_value, centralize, add_noise, skip_nonfinite, also for fp16 scales
limits.py       what clipping asks of its limits; parameters of which only some ranks have a gradient
per_sample.py   the gradients of each sample of a batch

Tested by: tests/transforms/test_grad_chain.py, tests/transforms/test_clip_grads.py,
    tests/transforms/test_skip_nonfinite.py, tests/training/test_grad_samples.py
"""

from weft.grads.elements import add_noise, centralize, clip_norm, clip_value, skip_nonfinite
from weft.grads.named_grads import Element, NamedGrads
from weft.grads.per_sample import grad_samples

__all__ = [
    "Element",
    "NamedGrads",
    "add_noise",
    "centralize",
    "clip_norm",
    "clip_value",
    "grad_samples",
    "skip_nonfinite",
]
