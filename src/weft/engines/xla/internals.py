"""What weft uses of torch-xla without a public name; see `weft.private_names`.

A test compares this file with the installed torch-xla.
"""

from __future__ import annotations

import importlib.metadata
from functools import partial

from weft import private_names

_XLA = private_names.SupportedLibrary("torch-xla", lambda: importlib.metadata.version("torch-xla"), ("2.9.0",))
Private = partial(private_names.Private, _XLA)

_NATIVE = "torch_xla:_XLAC"  # written in C++
mark_sharding = Private(_NATIVE, "_xla_mark_sharding", "layouts: what strategies are on xla")
clear_sharding = Private(_NATIVE, "_xla_clear_sharding", "layouts: what strategies are on xla")
to_cpu = Private(_NATIVE, "_xla_get_cpu_tensors", "checkpoints; logged values")
is_too_late = Private(_NATIVE, "_xla_get_spmd_config_is_locked", "start on xla")
