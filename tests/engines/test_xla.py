"""XLA under the plain loop: numbers against plain torch, what is compiled, where tensors lie, and what is refused.

Real torch-xla on CPUs, as `pytest -m xla` with the extra `xla` installed. Whether several devices are one mesh is
decided once per process, so tests/engines/xla_cases.py runs in processes of its own: one device, and a mesh of four.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fix_lines.told import printed

CASES = Path(__file__).with_name("xla_cases.py")
HERE = {"PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2"}


def on(group):
    """A test of a process that takes a minute; with pytest-xdist and --dist=loadgroup one worker starts it."""

    def marked(test):
        return pytest.mark.xla(pytest.mark.timeout(600)(pytest.mark.xdist_group(group)(test)))

    return marked


def _run(arguments, *, limit_s=580, **more):
    env = {**os.environ, **HERE, **more}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=env)


def _cases(kind, **more):
    done = _run([CASES, kind], **more)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert done.returncode == 0 and lines, done.stderr
    return {found["case"]: found for found in map(json.loads, lines)}


@pytest.fixture(scope="module")
def single():
    found = _cases("single")

    def case(name):
        assert "failed" not in found[f"single_{name}"], found[f"single_{name}"]["failed"]
        return found[f"single_{name}"]

    return case


@pytest.fixture(scope="module")
def mesh():
    found = _cases("mesh", CPU_NUM_DEVICES="4")

    def case(name):
        assert "failed" not in found[f"mesh_{name}"], found[f"mesh_{name}"]["failed"]
        return found[f"mesh_{name}"]

    return case


def _agrees(found, tolerance=1e-5):
    assert found["steps"] == 20
    assert found["weights"] < tolerance and found["losses"] < tolerance, found
    assert found["executed"] == 20, "a graph per step, whatever the number of micro-batches"


@on("names")
def test_private_names_are_where_they_are_said_to_be():
    code = """
from weft.engines.xla import internals
from weft.private_names import Private
names = [one for one in vars(internals).values() if isinstance(one, Private)]
print(len(names), [one for one in names if not one.exists])
"""
    done = _run(["-c", code])
    assert done.stdout.split() == ["4", "[]"], done.stdout + done.stderr


# -- one device ----------------------------------------------------------------------------------------


@on("single")
@pytest.mark.parametrize("name", ["plain", "accumulation", "ragged_batch", "clipping", "recompute"])
def test_twenty_steps_on_one_device_are_those_of_plain_torch(single, name):
    _agrees(single(name))


@on("single")
def test_clip_grads_and_recompute_in_bf16_agree_too(single):
    assert single("clipping")["by weft"] < 1e-5
    assert single("recompute")["bf16"] == pytest.approx(single("bf16")["weights"], abs=1e-5)


@on("single")
def test_bf16_is_near_and_not_the_same(single):
    found = single("bf16")
    assert 1e-6 < found["weights"] < 0.02 and found["losses"] < 0.02


@on("single")
@pytest.mark.parametrize(
    ("name", "most"),
    [("plain", 0), ("accumulation", 1), ("ragged_batch", 1), ("bf16", 0), ("clipping", 0), ("recompute", 0)],
)
def test_nothing_is_compiled_after_the_second_step_but_a_shorter_last_window(single, name, most):
    found = single(name)
    assert found["compiled after step 2"] <= most, found["compiled by step"]
    assert sum(found["compiled by step"][1:-1]) == 0, found["compiled by step"]


@on("single")
def test_a_schedule_and_an_evaluation_compile_once(single):
    assert single("schedule")["compiled after step 2"] == 0 and single("schedule")["weights"] < 1e-5
    assert single("evaluation")["compiled"] == 0 and single("evaluation")["losses"] < 1e-5


@on("single")
def test_dropout_drops_the_same_in_the_second_run(single):
    found = single("recompute_draws_the_same")
    assert found["gradients"] < 1e-6 < found["some"]


@on("single")
def test_seeds_reach_the_device(single):
    # torch.manual_seed does not: that is torch-xla's, and told in docs/xla.md
    assert single("seeds") == {"case": "single_seeds", "same": True, "manual_seed": False, "other": False}


@on("single")
def test_what_xla_cannot_do_is_refused_with_the_reason(single):
    found = single("precisions")
    for policy in ("fp16", "fp16-true"):
        assert "found:    float16, which XLA has no autocast" in found[policy]
    assert found["bf16-true"] == ["torch.bfloat16", "torch.bfloat16"]
    assert "XLA compiles forward, backward and step as one graph" in found["compiled"]
    assert "recompute: save cannot be used on xla" in found["save"]


@on("single")
def test_averages_of_weights_are_those_of_plain_torch(single):
    assert single("averages")["weights"] < 1e-5


@on("single")
def test_a_mesh_after_the_first_tensor_is_refused():
    error = _cases("late", CPU_NUM_DEVICES="4")["late_mesh"]["error"]
    assert "comes too late" in error and "found:    a device of XLA is in use already" in error


# -- a mesh of four --------------------------------------------------------------------------------------


@on("mesh")
@pytest.mark.parametrize("name", ["replicate", "accumulation", "uneven_batch", "clipping", "recompute"])
def test_twenty_steps_on_four_devices_are_those_of_plain_torch(mesh, name):
    _agrees(mesh(name))


@on("mesh")
def test_an_optimizer_of_whole_tensors_steps_on_shards(mesh):
    assert mesh("whole_tensors")["weights"] < 1e-5  # Adafactor looks at values, so that a step is more than one graph


@on("mesh")
@pytest.mark.parametrize(
    ("name", "parameters"), [("fully_shard", 0.25), ("replica_and_shard", 0.5)], ids=["one axis", "two axes"]
)
def test_each_device_holds_its_part(mesh, name, parameters):
    found = mesh(name)
    assert found["weights"] < 1e-5 and found["losses"] < 1e-5
    assert found["parameters"] == found["state"] == [parameters] * 4
    assert found["compiled after step 2"] == 0


@on("mesh")
@pytest.mark.parametrize(("stage", "parameters"), [(1, 1.0), (2, 0.25), (3, 0.25)])
def test_zero_partition_cuts_the_state(mesh, stage, parameters):
    found = mesh("zero")[f"stage {stage}"]
    assert found["weights"] < 1e-5
    assert found["parameters"] == [parameters] * 4 and found["state"] == [0.25] * 4


@on("mesh")
def test_windows_on_a_mesh_compile_no_more(mesh):
    found = mesh("accumulation")
    assert found["compiled after step 2"] <= 1 and sum(found["compiled by step"][1:-1]) == 0
    assert 1e-6 < mesh("bf16")["weights"] < 0.02
    assert mesh("clipping")["by weft"] < 1e-5


@on("mesh")
def test_values_are_whole_for_who_looks_at_them(mesh):
    found = mesh("values")
    assert found["facts"] == [1, 1, [["data", 1]], [["data", 4]]]
    assert found["bias"] == [3.0] * 4 and found["cut"] == [0.25] * 4 and found["whole"] == [1.0] * 4
    assert found["gradients"] < 1e-6 and found["denominator"] == 8.0


@on("mesh")
def test_modules_on_meta_and_weights_from_files(mesh):
    assert mesh("on_meta")["equal"] and mesh("on_meta")["cut"] == [0.25] * 4
    assert mesh("weights")["weights"] == 0 and mesh("weights")["cut"] == [0.25] * 4


@on("mesh")
def test_a_module_that_torch_has_cut_is_refused(mesh):
    for error in (mesh("fsdp2")["error"], mesh("fsdp2")["placing"]):
        assert "FSDP2 does not work there" in error or "sharded already" in error
    assert "fix:      model, ctx = weft.fully_shard(model, ctx)" in mesh("fsdp2")["placing"]


# -- checkpoints -------------------------------------------------------------------------------------------


def _same_bits(found):
    assert found["step"] == 4
    assert found["from torch"] and found["to torch"] and found["goes on"], found


@on("single")
def test_checkpoints_are_the_same_bits_on_both_engines(single):
    _same_bits(single("checkpoints"))


@on("mesh")
def test_checkpoints_are_the_same_bits_on_a_mesh_and_cut_after_loading(mesh):
    _same_bits(mesh("checkpoints"))
    assert mesh("checkpoints")["parameters"] == mesh("checkpoints")["state"] == [0.25] * 4


# -- refused before anything could crash -------------------------------------------------------------------

START = """
import weft
try:
    weft.start(device="xla")
except weft.errors.WeftError as error:
    print(type(error).__name__, error)
import sys
print("imported" if "torch_xla" in sys.modules else "not imported")
"""
RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}


@on("single")
def test_several_processes_on_cpus_are_refused():
    done = _run(["-c", START], limit_s=100, **RANKS)
    assert "ContextError" in done.stdout and "found:    2 processes, PJRT_DEVICE=CPU" in done.stdout, done.stderr
    assert "XLA sends nothing between processes on CPUs" in done.stdout


def _metadata(folder, version):
    info = folder / f"torch_xla-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-xla\nVersion: {version}\n")
    (folder / "torch_xla.py").write_text("raise SystemExit('imported')\n")


@pytest.mark.slow
def test_without_torch_xla_the_line_to_type_is_told():
    hidden = "import importlib.metadata as m\nfind = m.version\n"
    hidden += "def version(name):\n    if name == 'torch-xla':\n        raise m.PackageNotFoundError(name)\n"
    hidden += "    return find(name)\nm.version = version\n"
    done = _run(["-c", hidden + START], limit_s=60)
    assert "MissingExtra" in done.stdout and "found:    no package torch-xla" in done.stdout, done.stderr
    assert "fix:      pip install 'torchweft[xla]'" in done.stdout and "not imported" in done.stdout


@pytest.mark.slow
def test_another_torch_is_refused_before_anything_is_imported(tmp_path):
    _metadata(tmp_path, "1.13.1")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = _run(["-c", START], limit_s=60, PYTHONPATH=path)
    import torch

    assert f"found:    torch-xla 1.13.1 and torch {torch.__version__.split('+')[0]}" in done.stdout, done.stderr
    assert "MissingExtra" in done.stdout and "not imported" in done.stdout


# -- torch_tpu: its device is one of torch's own -----------------------------------------------------------

TPU = """
import torch, torch.distributed as dist, weft
from weft.engines import Spmd, TorchEngine, engine_for

try:
    weft.start(device="tpu")
except weft.errors.MissingExtra as error:
    print(error)

# What torch_tpu tells torch on import, without the device itself.
torch.utils.rename_privateuse1_backend("tpu")
dist.Backend.register_backend("tpu_dist", lambda *arguments: None, devices=["tpu"])
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda: torch.device("tpu")
torch.accelerator.device_count = lambda: 4
engine = engine_for("tpu")
print(type(engine) is TorchEngine)
print([str(engine.device(request, 5, 8)) for request in ("tpu", "tpu:3", None)], engine.backend(torch.device("tpu", 1)))
print(isinstance(engine, Spmd))
"""


@pytest.mark.slow
def test_a_tpu_of_torch_tpu_takes_the_engine_of_torch():
    """As far as that can be seen without a TPU: which device, which backend."""
    done = _run(["-c", TPU], limit_s=60)
    told = printed("engines/torch/device/devices.py", "torch_tpu", done.stdout)
    assert told.fix.startswith("pip install torch_tpu "), done.stderr
    assert done.stdout.splitlines()[-3:] == [
        "True",
        "['tpu:1', 'tpu:3', 'tpu:1'] cpu:gloo,tpu:tpu_dist",
        "False",
    ], done.stdout + done.stderr
