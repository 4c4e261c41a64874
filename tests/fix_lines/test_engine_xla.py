"""XLA: what is told, and followed. xla_told.py runs in processes of its own; see there."""

import os
import shlex
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.fix_lines.sites import ROOT
from tests.fix_lines.told import printed

pytestmark = [pytest.mark.xla, pytest.mark.timeout(600)]
HERE = {"PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2", "CPU_NUM_DEVICES": "1"}
HERE |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
START = """
import torch, weft
with weft.start(device="xla") as ctx:
    print("axes", ctx.engine.axes)
"""


def _started(command, **more):
    env = {**os.environ, **HERE, **more}
    pipe = subprocess.PIPE
    return subprocess.Popen(list(map(str, command)), stdout=pipe, stderr=pipe, text=True, env=env)


def _run(*arguments, **more):
    """Standard output and error of a program of python."""
    with _started([sys.executable, *arguments], **more) as process:
        return process.communicate(timeout=300)


def _cases(kind, **more):
    out, err = _run("-m", "tests.fix_lines.xla_told", kind, **more)
    assert out.splitlines() and out.splitlines()[-1].startswith("followed"), out + err
    return [line for line in out.splitlines() if not line.startswith("[Gloo]")]


def test_on_one_device():
    assert len(_cases("single")) == 4


def test_on_a_mesh():
    assert len(_cases("mesh", CPU_NUM_DEVICES="4")) == 1
    line, _ = _cases("late", CPU_NUM_DEVICES="4")
    out, err = _run("-c", f"import weft\n{line}\n    print(ctx.engine.axes)", CPU_NUM_DEVICES="4")
    assert "(('data', 4),)" in out, err


def test_processes(tmp_path):
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    _, err = _run("-c", START, **ranks)
    it = printed("engines/xla/library.py", "ranks on CPUs", err)
    (tmp_path / "train.py").write_text(START)
    env = {**os.environ, **HERE, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    line = ["bash", "-c", it.fix]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert "axes (('data', 4),)" in done.stdout, done.stderr


def test_two_hosts():
    """As far as that can be seen on one: the ranks find each other, and a mesh of the devices of both is made."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    program = [sys.executable, "-m", "weft", "launch", "-n", 1, "--nnodes", 2, "--rdzv", address]
    hosts = [_started([*program, "-m", "tests.fix_lines.xla_told", "hosts"]) for _ in range(2)]
    found = [host.communicate(timeout=300) for host in hosts]
    line = next(line for line in found[0][0].splitlines() if "weft launch" in line)
    line = line[line.index("weft launch") :].partition("  #")[0]
    line = line.replace("<hosts>", "2").replace("<first host>:29500", address)
    assert shlex.split(line)[:-1] == list(map(str, program[2:])), line
    assert all("followed hosts_start" in out for out, _ in found), found


def test_without_torch_xla():
    hidden = "import sys, importlib.metadata as m\nfind = m.version\n"
    hidden += "def version(name):\n    if name == 'torch-xla':\n        raise m.PackageNotFoundError(name)\n"
    hidden += "    return find(name)\nm.version = version\n"
    _, err = _run("-c", hidden + START)
    it = printed("engines/xla/library.py", "MissingExtra", err)
    pip, install, extra = shlex.split(it.fix, comments=True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert (pip, install, extra) == ("pip", "install", "torchweft[xla]")
    assert any(one.startswith("torch-xla") for one in extras["xla"])
