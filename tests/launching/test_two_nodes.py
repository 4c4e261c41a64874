"""Two nodes on one machine: two network namespaces joined by a cable, or two loopback addresses without them."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

pytestmark = pytest.mark.slow

LAUNCH = [sys.executable, "-m", "weft", "launch"]
STEPS, DIES = 8, 4

TRAIN = """
import json, os, pathlib, signal, sys, time
import torch, weft
from torch import nn

out, dies = pathlib.Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
with weft.start(device="cpu", timeout_s=60) as ctx:
    total = float(weft.reduce(torch.tensor(float(ctx.rank)), ctx, "sum"))
    place = [ctx.rank, ctx.world_size, ctx.local_rank, ctx.local_world_size, ctx.node_rank, ctx.num_nodes, total]
    (out / f"place-{ctx.attempt}-{ctx.rank}.json").write_text(json.dumps(place))
    model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    restored = weft.restore(state, out / "checkpoints", ctx) if weft.checkpoint.latest(out / "checkpoints") else None
    for step in range(restored.step if restored else 0, 8):
        if step == dies and ctx.attempt == 0 and ctx.rank == 3:
            time.sleep(1.0 if sys.argv[3:] == ["busy"] else 0.0)  # the others are busy by then
            os.kill(os.getpid(), signal.SIGKILL)
        if step == dies and ctx.attempt == 0 and ctx.rank < 2 and sys.argv[3:] == ["busy"]:
            time.sleep(60)  # does not notice: its launcher does
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(ctx.world_size)[ctx.rank]
        (model(mine) - mine.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weft.save(state, out / "checkpoints", step + 1, ctx)
    if ctx.is_main:
        from safetensors.torch import save_file
        save_file(dict(model.state_dict()), out / "end.safetensors")
"""


def _reference():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False).returncode == 0


@pytest.fixture
def nodes():
    """Of each node: how a command is run there, and the interface; and the address of the first one."""
    names = [f"weft{os.getpid() % 10000}{side}" for side in "ab"]
    cables = [f"{name}c" for name in names]
    steps = [["netns", "add", name] for name in names] if shutil.which("ip") else [["no", "ip"]]
    steps += [["link", "add", cables[0], "type", "veth", "peer", "name", cables[1]]]
    for number, (name, cable) in enumerate(zip(names, cables, strict=True), start=1):
        steps += [
            ["link", "set", cable, "netns", name],
            ["-n", name, "addr", "add", f"10.77.9.{number}/24", "dev", cable],
        ]
        steps += [["-n", name, "link", "set", device, "up"] for device in (cable, "lo")]
    try:
        if shutil.which("ip") and all(_ip(*step) for step in steps):
            yield [(["ip", "netns", "exec", n], c) for n, c in zip(names, cables, strict=True)], "10.77.9.1"
        else:
            yield [([], "lo"), ([], "lo")], "127.0.0.2"
    finally:
        if shutil.which("ip"):
            for name in names:
                _ip("netns", "del", name)


def _run(nodes, address, folder, options, dies):
    """Launch on both nodes, the second one first; returns the output of each."""
    (folder / "train.py").write_text(TRAIN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launchers = []
    for rank, (prefix, interface) in reversed(list(enumerate(nodes))):
        own = ["--node-rank", str(rank)] if "ranked" in options else []
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_")}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        command = [*LAUNCH, "-n", "2", "--nnodes", "2", "--rdzv", f"{address}:{port}", "--max-restarts", "1", *own]
        launchers.append(
            subprocess.Popen(
                [*prefix, *command, "train.py", str(folder), str(dies), options], cwd=folder, env=environment,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    try:
        outputs = [process.communicate(timeout=300)[0] for process in launchers]
    finally:
        for process in launchers:
            process.kill()
            process.communicate()
    assert [process.returncode for process in launchers] == [0, 0], "\n----\n".join(outputs)
    return outputs[::-1]


def _places(folder, attempt):
    return [json.loads((folder / f"place-{attempt}-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", ["ranked", "as they come", "busy"])
def test_a_killed_rank_restarts_all_nodes_and_the_end_is_that_of_one_process(nodes, tmp_path, options):
    if shutil.which("ip") is None and options != "ranked":
        pytest.skip("without namespaces nodes are told apart by their ranks alone")
    outputs = _run(*nodes, tmp_path, options, DIES)
    for attempt in (0, 1):
        found = _places(tmp_path, attempt)
        # rank, world, local rank, local world, node, nodes, sum of the ranks
        assert found == [[rank, 4, rank % 2, 2, rank // 2, 2, 6.0] for rank in range(4)]
    assert "".join(outputs).count("all ranks start again after a failure") == 1, outputs
    assert "connectFullMesh failed" not in "".join(outputs), outputs  # ranks of two attempts that met
    end, expected = load_file(tmp_path / "end.safetensors"), _reference()
    assert all(torch.allclose(end[name], expected[name], rtol=0, atol=1e-12) for name in expected)
