"""The leak police: a test leaves environment, defaults, random state and threads as they were."""

import gc
import importlib.util
import os
import pathlib
import random
import sys
import threading
import time
import zlib

import hypothesis
import pytest
import torch
import torch._dynamo  # noqa: F401  (any optimizer imports it, and it sets variables; not ours to answer for)

from weft.tensors.rng_state import seed_torch
from weft.testing import run_ranks
from weft.testing.ranks import RankPool

# Programs of Accelerate, which is not always installed; they hold no doctests.
collect_ignore_glob = ["migrate/accelerate_scripts/*"]

# This package and the tests are compiled once, and not by each of the many processes that the tests start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A busy machine makes nothing fail: what hangs is found later.
run_ranks.__kwdefaults__["timeout_s"] = RankPool.run.__kwdefaults__["timeout_s"] = 300.0

# The same cases on every run; `--hypothesis-profile explore` looks for new ones.
hypothesis.settings.register_profile("same", derandomize=True, database=None)
hypothesis.settings.register_profile("explore")
hypothesis.settings.load_profile("same")

# The tensors are small: threads that wait for each other take many times as long, in the programs that tests start too.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
torch.manual_seed(0)  # parameters of tests that are drawn are the same in all workers of pytest-xdist


def pytest_collection_modifyitems(config, items):
    """Suites of their own: `pytest -m slow`; `-m deepspeed` and `-m xla` with the extra, `-m gpu` with a device.

    `-m variant` runs all variants of cases that are in another suite; every third is in the slow one, too.
    """
    chosen = config.option.markexpr
    kept, left_out = [], []
    for item in items:
        is_variant = item.get_closest_marker("variant") is not None
        if is_variant and zlib.crc32(item.nodeid.encode()) % 3:
            needed = "variant" in chosen
        else:
            if is_variant:
                item.add_marker("slow")
            needed = "slow" in chosen or "variant" in chosen or not item.get_closest_marker("slow")
        (kept if needed else left_out).append(item)
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)
    missing = {
        "deepspeed": importlib.util.find_spec("deepspeed") is None and "needs the extra deepspeed",
        "xla": importlib.util.find_spec("torch_xla") is None and "needs the extra xla",
        # GPU_TESTS_DRY: the same tests in miniature on the CPU, by `.ci/gpu --dry`
        "gpu": not (torch.accelerator.is_available() or "GPU_TESTS_DRY" in os.environ) and "needs an accelerator",
    }
    for name, why in missing.items():
        if why:
            reason = why
        elif name not in config.option.markexpr:
            reason = f"in a suite of its own: pytest -m {name}"
        else:
            continue
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_ignore_collect(collection_path, config):
    """Other libraries have a suite of their own, `.ci/interop`, which names the folder: to import them takes long."""
    if collection_path == pathlib.Path(__file__).parent / "interop" and not any(
        "interop" in one for one in config.args
    ):
        return True
    return None


def pytest_collection_finish(session):
    """What was imported is more than a million objects: a collection of garbage that looks at them takes the better
    part of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm_ranks():
    """Ranks can be forked: the limit of time of a test does not count how long torch takes to be imported."""
    run_ranks(_nothing, 2)


def _nothing(ctx):
    return None


def _state():
    return {
        # Left behind by libraries: by inductor when it compiles for the first time, and by Accelerate, which DeepSpeed
        # and PEFT import.
        "environment": {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("TORCHINDUCTOR_", "TRITON_", "PYTORCH_NVML_BASED_CUDA_CHECK"))
        },
        "default dtype": torch.get_default_dtype(),
        "default device": torch.empty(0).device,
        "gradients": torch.is_grad_enabled(),
        "torch threads": torch.get_num_threads(),
        "threads": sorted(t.name for t in threading.enumerate() if not t.daemon),
        "group": torch.distributed.is_initialized(),
    }


@pytest.fixture(autouse=True)
def leak_police():
    seed_torch(0)
    random.seed(0)
    before = _state()
    before["environment"].pop("PYTEST_CURRENT_TEST", None)
    yield
    # Worker threads of other libraries (pyarrow, datasets) end a moment after the call that started them.
    deadline = time.monotonic() + 5
    while _state()["threads"] != before["threads"] and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    after = _state()
    after["environment"].pop("PYTEST_CURRENT_TEST", None)
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, "the test changed: " + "; ".join(f"{n}: {before[n]} -> {after[n]}" for n in changed)
