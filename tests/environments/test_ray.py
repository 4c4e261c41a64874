"""Ray Train: a worker function finds its place, and trains as one process would. A real local Ray."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]

SCRIPT = """
import json, os, pathlib, sys

def build():
    import torch
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()

def worker(config):
    import torch, weft
    seen = weft.environments.topology(os.environ)
    with weft.start(device="cpu") as ctx:
        found = {"seen": [seen.rank, seen.world_size, seen.source]}
        found["place"] = [ctx.rank, ctx.world_size, ctx.local_rank, ctx.local_world_size, ctx.node_rank, ctx.num_nodes]
        found["sum"] = float(weft.reduce(torch.tensor(float(ctx.rank + 1)), ctx, "sum"))
        model, ctx = weft.replicate(build(), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            mine = x.chunk(ctx.world_size)[ctx.rank]
            (model(mine) - mine.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found["weights"] = [value.tolist() for value in model.state_dict().values()]
    found["group is still Ray's"] = torch.distributed.is_initialized()
    pathlib.Path(config["out"], f"{found['place'][0]}.json").write_text(json.dumps(found))

if __name__ == "__main__":
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    out = sys.argv[1]
    path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": path})
    scaling = ScalingConfig(num_workers=2)
    TorchTrainer(
        worker, train_loop_config={"out": out}, scaling_config=scaling, run_config=RunConfig(storage_path=out)
    ).fit()
    ray.shutdown()
"""


def _reference():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict().values()


@pytest.mark.timeout(240)
def test_workers_of_ray_train_find_their_place_and_train_as_one_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, tmp_path], cwd=tmp_path, capture_output=True, text=True, timeout=220, check=False,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["seen"] == [rank, 2, "ray"] and found["place"] == [rank, 2, rank, 2, 0, 1]
        assert found["sum"] == 3.0 and found["group is still Ray's"]
        for ours, theirs in zip(found["weights"], _reference(), strict=True):
            assert torch.allclose(torch.tensor(ours, dtype=torch.float64), theirs, rtol=0, atol=1e-12)
