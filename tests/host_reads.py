"""Counts what makes the host wait for a device, on a CPU: values that are read, and tensors made of Python's values.

A dispatch mode sees what torch does, in C++ too; a function mode sees what is asked of a tensor and does nothing on a
CPU (`tensor.cpu()`, `tensor.tolist()`). Backward runs in the thread of the caller there, so both see it.
"""

import collections

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# A copy from pageable memory waits for the stream: that is what `torch.tensor(values, device=...)` makes.
_OPERATIONS = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "lift_fresh",
    "lift_fresh_copy",
}
_METHODS = {"cpu", "numpy", "tolist", "__array__"}
_MOVES = {"_to_copy", "copy_"}


class HostReads(TorchDispatchMode):
    """A context manager; `counts` holds how often each operation was called in it."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()
        self._asked = _Asked(self.counts)

    def __enter__(self):
        self._asked.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._asked.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        if name in _OPERATIONS:
            self.counts[name] += 1
        found = func(*args, **(kwargs or {}))
        if name in _MOVES and _is_read(name, args, found):
            self.counts[name] += 1
        return found


class _Asked(TorchFunctionMode):
    def __init__(self, counts):
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _METHODS:
            self._counts[name] += 1
        return func(*args, **(kwargs or {}))


def _is_read(name, args, found):
    """Whether a copy goes from an accelerator to the CPU."""
    source, target = (args[1], args[0]) if name == "copy_" else (args[0], found)
    return source.device.type != "cpu" and target.device.type == "cpu"
