"""A simulated accelerator, `sim`, for programs that have none: what it is, see device.cpp and collectives.cpp.

A process has it if torch finds its entry point, as it finds that of other devices that are not built in. Nothing else
has to be changed, so any program runs on it, `weft launch` and torchrun too:

    python -m tests.simulated_device weft launch -n 2 train.py      # a command, in this environment
    subprocess.run(command, env={**os.environ, **environment()})    # from Python

There `torch.accelerator` finds the device, `weft.start()` takes it, with one per local rank, and its collectives are
those of the backend `simccl`. The variables SIMULATED_DEVICES (4) and SIMULATED_BYTES (of each, 4 GiB) say what there
is. Tests use `on_ranks` of tests/simulated_device/ranks.py, with ranks that stay.

The first process builds it, in a folder of the user's cache, which takes half a minute of a C++ compiler; others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from typing import Self

_HERE = pathlib.Path(__file__).parent
_SOURCES = ("device.cpp", "collectives.cpp")
_NAME = "simulated_device"
_OPTIONS = ("-std=c++20", "-O1", "-fPIC", f"-DTORCH_EXTENSION_NAME={_NAME}")


def reason_to_skip() -> str | None:
    """Why it cannot be built here; None if it can."""
    if shutil.which(_compiler()) is None:
        return f"the simulated device needs a C++ compiler: there is no {_compiler()}"
    if not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the simulated device needs the headers of Python: there is no Python.h"
    return None


def environment(devices: int = 4) -> dict[str, str]:
    """The variables with which a Python process has the device; it is built if it has to be."""
    build()
    path = [str(_HERE / "entry_point"), str(_HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "SIMULATED_DEVICES": str(devices)}


def build() -> pathlib.Path:
    """The library, compiled unless that was done before, for these sources, this torch and this Python."""
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    digest = hashlib.sha256(repr((_compiler(), _OPTIONS)).encode())
    for name in ("device.h", *_SOURCES):
        digest.update((_HERE / name).read_bytes())
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "weft-simulated-device")
    key = f"{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:12]}"
    library = cache / f"{_NAME}-{key}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends, in whatever way
        if library.exists():
            return library
        includes = [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            compiling = [
                subprocess.Popen([_compiler(), *_OPTIONS, *includes, "-c", _HERE / name, "-o", f"{folder}/{name}.o"])
                for name in _SOURCES
            ]
            codes = [process.wait() for process in compiling]
            if any(codes):
                raise RuntimeError("the simulated device cannot be compiled: see above")
            made = f"{folder}/{_NAME}.so"
            objects = [f"{folder}/{name}.o" for name in _SOURCES]
            libraries = [f"-L{path}" for path in library_paths()]
            libraries += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
            subprocess.run([_compiler(), "-shared", *objects, "-o", made, *libraries], check=True)
            pathlib.Path(made).replace(library)
    return library


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"


def load() -> types.ModuleType:
    """Make `sim` a device of torch in this process, for as long as it lives; torch calls this when it is imported.

    Returns:
        The extension: `counts()` of what happened, and `take_hazards()`.
    """
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    import torch
    import torch.distributed as dist

    spec = importlib.util.spec_from_file_location(_NAME, build())
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    sys.modules[_NAME] = extension
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.__future__.set_swap_module_params_on_conversion(True)  # `module.to` keeps parameters, as to CUDA, and ties

    def collectives(store, rank, size, timeout):  # type: ignore[no-untyped-def]
        def gloo(store, rank, size):  # type: ignore[no-untyped-def]
            return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)

        return extension.Collectives(store, rank, size, timeout, gloo)

    dist.Backend.register_backend("simccl", collectives, devices=["sim"])
    # Of "cpu:gloo,sim:simccl" it is the default, as NCCL is: torch looks for the first of these in lower case, in
    # which it does not keep them.
    dist.Backend._plugins = {"simccl": dist.Backend._plugins["SIMCCL"], **dist.Backend._plugins}
    torchs = dist.ProcessGroup._get_sequence_number_for_group

    def sequence_number(group: dist.ProcessGroup) -> int:  # which torch has for its own backends only
        ours = "simccl" in dist.get_backend(group)
        return group._get_backend(torch.device("sim")).sequence_number() if ours else torchs(group)

    dist.ProcessGroup._get_sequence_number_for_group = sequence_number
    return extension


def waits() -> dict[str, int]:
    """How often the host has waited for the device, by what it did."""
    kinds = (
        "reads", "copies_to_host", "copies_to_device", "event_waits", "stream_waits", "device_waits", "barriers"
    )  # fmt: skip
    counts = load().counts()
    return {kind: counts[kind] for kind in kinds}


def _module(extension: types.ModuleType) -> types.ModuleType:
    """`torch.sim`, with what torch asks of the module of a device."""
    import torch

    module = types.ModuleType("torch.sim")

    def index(device: object = None) -> int:
        found = device if isinstance(device, int) else torch.device(device or "sim").index
        return extension.current_device() if found is None else found

    class Stream(torch.Stream):
        def __new__(cls, device: object = None, priority: int = 0) -> Self:
            return super().__new__(cls, device=torch.device("sim", index(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, *_: object, **__: object) -> Self:
            return super().__new__(cls, device=torch.device("sim", index()))

    def seed_all(seed: int) -> None:
        for number in range(extension.device_count()):
            extension.default_generator(number).manual_seed(seed)

    def stream(chosen: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if chosen is None else chosen

    class Device:
        def __init__(self, chosen: object) -> None:
            self._chosen = index(chosen)

        def __enter__(self) -> None:
            self._before = extension.current_device()
            extension.set_device(self._chosen)

        def __exit__(self, *_: object) -> None:
            extension.set_device(self._before)

    names = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,  # torch's checkpoint asks for it before it keeps random states
        "_is_in_bad_fork": lambda: False,
        "device_count": extension.device_count,
        "current_device": extension.current_device,
        "set_device": lambda chosen: extension.set_device(index(chosen)),
        "synchronize": lambda chosen=None: torch.accelerator.synchronize(index(chosen)),
        "manual_seed": lambda seed: extension.default_generator(index()).manual_seed(seed) and None,
        "manual_seed_all": seed_all,
        "get_rng_state": lambda chosen=None: extension.default_generator(index(chosen)).get_state(),
        "set_rng_state": lambda state, chosen=None: extension.default_generator(index(chosen)).set_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "current_stream": lambda chosen=None: torch.accelerator.current_stream(index(chosen)),
        "default_stream": lambda chosen=None: torch.Stream(stream_id=0, device_index=index(chosen), device_type=20),
        "empty_cache": lambda: None,
        "memory_allocated": lambda chosen=None: torch.accelerator.memory_allocated(index(chosen)),
        "max_memory_allocated": lambda chosen=None: torch.accelerator.max_memory_allocated(index(chosen)),
        "memory_reserved": lambda chosen=None: torch.accelerator.memory_reserved(index(chosen)),
        "max_memory_reserved": lambda chosen=None: torch.accelerator.max_memory_reserved(index(chosen)),
        "memory_stats": lambda chosen=None: torch.accelerator.memory_stats(index(chosen)),
        "reset_peak_memory_stats": lambda chosen=None: torch.accelerator.reset_peak_memory_stats(index(chosen)),
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "device": Device,
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module
