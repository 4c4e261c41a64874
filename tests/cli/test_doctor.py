"""`weft doctor`: a verdict for each check, and the name of the one that fails."""

import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path

import pytest
import torch

import weft.cli
from weft.cli.doctor import (
    _EXTRAS,
    Verdict,
    _devices,
    _disk,
    _versions,
    check_environment,
    check_extras,
    check_nccl,
    check_network,
    check_private_names,
    numa_nodes,
)
from weft.cli.rank_checks import CHECKS, STARTED
from weft.private_names import Attribute, Private, SupportedLibrary
from weft.version import TESTED_TORCH, newer_torch


def _doctor(*arguments, **variables):
    command = [sys.executable, "-m", "weft", "doctor", *arguments]
    env = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


@pytest.mark.slow
def test_all_is_well_here(tmp_path):
    done = _doctor("--folder", str(tmp_path / "shared"), "--limit-s", "80")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "weft doctor: all is well", done.stdout
    names = ["versions", "private names", "extras", "devices", "environment", "network", "disk", *CHECKS]
    assert [line[6:24].strip() for line in lines[:-1] if line[0] != " "] == names
    assert "2 ranks on" in done.stdout and list((tmp_path / "shared").iterdir()) == []


@pytest.mark.slow
def test_a_broken_network_is_named_soon():
    begin = time.monotonic()
    done = _doctor("--limit-s", "120", GLOO_SOCKET_IFNAME="no_such_interface")
    assert time.monotonic() - begin < 150
    assert done.returncode == 1 and "weft doctor: something is wrong" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert line.startswith("FAIL  all-reduce") and "no_such_interface" in line
    assert "next: weft doctor -n 1 leaves the network out" in done.stdout and "fully_shard" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("started", [1, 2])
def test_ranks_that_have_not_started_are_told_from_a_network_that_is_broken(monkeypatch, started):
    start = subprocess.Popen

    def popen(command, **options):
        return start(
            ["sh", "-c", f"for i in {'a b'[: 2 * started - 1]}; do touch {command[-1]}/{STARTED}$i; done; sleep 60"],
            **options,
        )

    monkeypatch.setattr(weft.cli.doctor.subprocess, "Popen", popen)
    (found,) = weft.cli.doctor._ranks(2, None, 2.0)
    if started == 2:
        assert found == Verdict("all-reduce", "FAIL", "it did not end within 2 s", CHECKS["all-reduce"][1])
    else:
        assert found[:2] == ("ranks", "FAIL") and "1 of 2 ranks had not started within 2 s; the load" in found.text
        assert f"{len(os.sched_getaffinity(0))} cores" in found.text and "weft doctor --limit-s 8," in found.step


def test_a_contradiction_of_the_environment_is_told_with_its_fix():
    found = check_environment({"WEFT_SED": "1"})
    assert found.state == "FAIL" and "WEFT_SED" in found.text and found.step == "unset WEFT_SED"
    place = {"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert check_environment(place).state == "FAIL"
    assert check_environment({}).line() == f"ok    {'environment':<18} rank 0 of 1, from single"


def test_what_nccl_was_told_is_shown_and_checked():
    assert torch.cuda.is_available() or list(check_nccl({"PATH": "x"}, ["eth0"])) == []
    nccl, recorder = check_nccl({"NCCL_DEBUG": "INFO", "TORCH_FR_BUFFER_SIZE": "2000"}, ["lo", "eth0"])
    assert (nccl.state, nccl.text) == ("ok", "NCCL_DEBUG=INFO TORCH_FR_BUFFER_SIZE=2000")
    assert (recorder.state, recorder.text) == ("ok", "keeps the last 2000 collectives")
    slow, off = check_nccl({"NCCL_P2P_DISABLE": "1"}, ["eth0"])
    assert slow.state == "note" and slow.step.startswith("unset NCCL_P2P_DISABLE")
    assert off.state == "note" and "TORCH_FR_BUFFER_SIZE=2000" in off.step
    for wish, fits in (
        ("eth", True),
        ("=eth", False),
        ("=eth0", True),
        ("ens,eth", True),
        ("^lo", True),
        ("ib0", False),
    ):
        found = next(check_nccl({"NCCL_SOCKET_IFNAME": wish}, ["lo", "eth0"]))
        assert found.state == ("ok" if fits else "FAIL") and (fits or "interfaces: lo, eth0" in found.text), wish


def test_numa_nodes_of_devices(tmp_path):
    for address, node in (("0000:01:00.0", "0"), ("0000:81:00.0", "1"), ("0000:82:00.0", "-1")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(f"{node}\n")
    assert numa_nodes(["0000:01:00.0", "0000:81:00.0", "0000:82:00.0", "0000:99:00.0"], tmp_path) == [
        "0",
        "1",
        "?",
        "?",
    ]
    assert numa_nodes(["0000:99:00.0"], tmp_path) == []


def test_whether_the_first_node_can_be_reached():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert "nobody listens" in next(check_network(f"127.0.0.1:{port}", {})).text
        server.listen()
        assert next(check_network(f"127.0.0.1:{port}", {})).state == "ok"
    for wrong in ("no-such-host.invalid:29500", "127.0.0.1:port", "127.0.0.1:999999"):
        found = next(check_network(wrong, {}))
        assert found.state == "FAIL" and wrong in found.text and "SOCKET_IFNAME" in found.step


def test_a_name_without_an_address_is_noted(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    (found,) = check_network(None, {})
    assert found.state == "note" and "/etc/hosts" in found.step


def test_a_name_with_a_loopback_address_is_enough_for_one_node_only(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    (found,) = check_network(None, {})
    assert found.state == "note" and "localhost is 127.0.0.1" in found.text and "enough for one node" in found.text
    assert found.step.startswith("for several nodes: export GLOO_SOCKET_IFNAME=")
    place = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    several = {**place, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    (found,) = check_network(None, several)
    assert found.state == "FAIL" and "other nodes cannot reach it" in found.text
    (found,) = check_network(None, {**several, "GLOO_SOCKET_IFNAME": "eth0"})
    assert found.state == "ok" and "GLOO_SOCKET_IFNAME=eth0" in found.text
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: socket.socket())
    assert [one.state for one in check_network("192.0.2.1:29500", {})] == ["ok", "FAIL"]
    assert [one.state for one in check_network("127.0.0.1:29500", {})] == ["ok", "note"]


def test_a_name_with_an_address_of_a_network_is_right(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.0.0.7")
    (found,) = check_network(None, {})
    assert found.state == "ok" and "is 10.0.0.7" in found.text


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    assert _disk(tmp_path / "file").state == "FAIL" and _disk(tmp_path).state == "ok"
    assert _versions().state == _devices().state == "ok"


def test_an_old_torch_is_named(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.8.1+cpu")
    assert _versions().state == "FAIL" and _versions().step == "pip install 'torch>=2.9'"


def test_a_torch_that_is_not_tested_is_noted(monkeypatch):
    monkeypatch.setattr("torch.__version__", "99.0.0+cpu")
    assert _versions().state == "note" and _versions().step == newer_torch("99.0.0+cpu")
    monkeypatch.setattr("torch.__version__", "2.11.0+cpu")
    assert _versions().state == "note" and ", ".join(TESTED_TORCH) in _versions().step
    monkeypatch.setattr("torch.__version__", f"{TESTED_TORCH[1]}+cu128")
    assert _versions().state == "ok" and "with which weft is tested" in _versions().text


def test_private_names_that_torch_lacks_are_named(monkeypatch):
    found = check_private_names()
    assert found.state == "ok" and re.fullmatch(r"torch has all \d{3} that weft uses", found.text)
    library = SupportedLibrary("torch", lambda: "2.13.0+cpu", TESTED_TORCH)
    table = types.SimpleNamespace(
        there=Private(library, "torch", "Tensor", "all"),
        gone=(Attribute(library, "torch:Tensor", "_no_such", "replicate"),),
        later=Private(library, "torch", "_not_yet", "undo", since="2.14"),
        earlier=Private(library, "torch", "_no_more", "undo", until="2.13"),
    )
    found = check_private_names(table)
    assert found.state == "FAIL" and found.text == "torch lacks torch.Tensor._no_such (for replicate)"
    assert found.step.startswith(f"pip install 'torch=={TESTED_TORCH[-1]}'")


def test_extras_are_those_of_the_package_and_told_with_their_versions():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = {
        extra: tuple(name for text in packages if (name := re.split(r"[\[<>=~ ]", text)[0]) != "torch")
        for extra, packages in project["optional-dependencies"].items()
        if extra not in ("bench", "docs", "examples", "test")
    }
    assert dict(_EXTRAS) == dict(sorted(extras.items()))
    version = importlib.metadata.version("plotly")
    found = check_extras({"report": ("plotly",), "half": ("plotly", "no-such-package"), "none": ("no-such-package",)})
    assert found.line() == f"ok    {'extras':<18} report (plotly {version}); not installed: half, none"
    assert check_extras({"none": ("no-such-package",)}).text == "none; not installed: none"
    assert "report (plotly" in check_extras().text


@pytest.mark.parametrize(("devices", "given", "ranks"), [(0, [], 2), (1, [], 1), (8, [], 2), (1, ["-n", "4"], 4)])
def test_ranks_of_their_own_device_are_started(monkeypatch, devices, given, ranks):
    started = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    monkeypatch.setattr(weft.cli.doctor, "_devices", lambda: Verdict("devices", "ok", ""))
    monkeypatch.setattr(weft.cli.doctor, "_ranks", lambda number, *_: iter(started.append(number) or ()))
    weft.cli.main(["doctor", *given])
    assert started == [ranks]


def test_the_exit_code_tells(monkeypatch, capsys):
    monkeypatch.setenv("WEFT_SED", "1")
    monkeypatch.setattr(weft.cli.doctor, "_ranks", lambda *_: iter(()))
    assert weft.cli.main(["doctor"]) == 1 and "FAIL  environment" in capsys.readouterr().out
    monkeypatch.delenv("WEFT_SED")
    assert weft.cli.main(["doctor", "-n", "1"]) == 0
