"""`weft doctor`: is this machine fit for training? Each check has a verdict and, if it fails, a next step."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from weft import torch_internals
from weft.cli.rank_checks import CHECKS, STARTED
from weft.context.settings import resolve
from weft.environments import cores_here, topology
from weft.errors import ContextError, listed
from weft.peers.connect import interface_to
from weft.private_names import Attribute, Private
from weft.version import TESTED_TORCH, __version__, newer_torch, numbers_of

_LIMIT_S = 22.0
_MODULE = "weft.cli.rank_checks"
_EXTRAS = MappingProxyType(
    {
        "checkpoint": ("xxhash",),
        "config": ("pyyaml",),
        "deepspeed": ("deepspeed",),
        "interop": ("datasets", "torchdata", "torchmetrics"),
        "migrate": ("libcst", "pyyaml"),
        "notebook": ("cloudpickle",),
        "ray": ("ray",),
        "remote": ("fsspec",),
        "report": ("plotly",),
        "tracking": ("rich", "tensorboard"),
        "xla": ("torch-xla",),
    }
)
_ONE_NODE = "which is enough for one node"


class Verdict(NamedTuple):
    """How a check ended.

    Attributes:
        name: Of the check.
        state: "ok", "note" or "FAIL".
        text: What was found.
        step: What to do next, if it failed.
    """

    name: str
    state: str
    text: str
    step: str = ""

    def line(self) -> str:
        """As it is printed."""
        return f"{self.state:<5} {self.name:<18} {self.text}" + (f"\n{'':24} next: {self.step}" if self.step else "")


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "doctor",
        help="check this machine, and N ranks on it",
        description="Check versions, devices, environment, network and disk, then work on N ranks: an all-reduce, "
        "steps with fully_shard, a checkpoint. Exit code 0 if all is well, else 1.",
    )
    sub.add_argument("-n", "--nproc", type=int, help="ranks (default 2, or 1 where there is one accelerator)")
    sub.add_argument("--rdzv", metavar="HOST:PORT", help="see whether the first node can be reached")
    sub.add_argument("--folder", type=Path, help="of checkpoints, such as a shared file system; default: temporary")
    sub.add_argument(
        "--limit-s", type=float, default=_LIMIT_S, help="seconds for ranks to start, and again for their work"
    )


def run(options: argparse.Namespace) -> int:
    """Do all checks, printing each as it ends."""
    failed = False
    for verdict in _verdicts(options):
        failed |= verdict.state == "FAIL"
        print(verdict.line(), flush=True)  # noqa: T201
    print("weft doctor: " + ("something is wrong, see above" if failed else "all is well"))  # noqa: T201
    return int(failed)


def _verdicts(options: argparse.Namespace) -> Iterator[Verdict]:
    yield _versions()
    yield check_private_names()
    yield check_extras()
    yield _devices()
    yield check_environment(os.environ)  # noqa: TID251  (it is checked)
    yield from check_network(options.rdzv, os.environ)  # noqa: TID251  (as above)
    yield from check_nccl(os.environ, [name for _, name in socket.if_nameindex()])  # noqa: TID251  (as above)
    yield _disk(options.folder)
    number = torch.accelerator.device_count() if torch.accelerator.is_available() else 2
    ranks = min(2, number) if options.nproc is None else options.nproc  # NCCL wants a device for each rank
    yield from _ranks(ranks, options.folder, options.limit_s)


def _versions() -> Verdict:
    installed = str(torch.__version__)
    found = f"weft {__version__}, python {platform.python_version()}, torch {installed}"
    if numbers_of(installed) < [2, 9]:
        return Verdict("versions", "FAIL", found, "pip install 'torch>=2.9'")
    if installed.partition("+")[0] in TESTED_TORCH:
        return Verdict("versions", "ok", f"{found}, with which weft is tested")
    step = newer_torch(installed) or f"weft is tested with torch {', '.join(TESTED_TORCH)}; others are likely to work"
    return Verdict("versions", "note", found, step)


def check_private_names(table: object = torch_internals) -> Verdict:
    """Whether the installed torch has all that weft uses of it without a public name."""
    values = [one for value in vars(table).values() for one in (value if isinstance(value, tuple) else (value,))]
    names = {id(one): one for one in values if isinstance(one, (Private, Attribute))}
    gone = [f"{one!r} (for {one.use})" for one in names.values() if one.is_due and not one.exists]
    if not gone:
        return Verdict("private names", "ok", f"torch has all {len(names)} that weft uses")
    step = f"pip install 'torch=={TESTED_TORCH[-1]}', or do without what needs them; the rest of weft works"
    return Verdict("private names", "FAIL", f"torch lacks {listed(gone)}", step)


def check_extras(extras: Mapping[str, Sequence[str]] = _EXTRAS) -> Verdict:
    """Which extras of weft are installed, with the versions of their packages."""
    versions: dict[str, dict[str, str]] = {}
    for extra, packages in extras.items():
        for package in packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions.setdefault(extra, {})[package] = importlib.metadata.version(package)
    whole = {extra: found for extra, found in versions.items() if len(found) == len(extras[extra])}
    shown = [f"{extra} ({', '.join(map(' '.join, found.items()))})" for extra, found in whole.items()]
    others = [extra for extra in extras if extra not in whole]
    text = ", ".join(shown) or "none"
    return Verdict("extras", "ok", f"{text}; not installed: {', '.join(others)}" if others else text)


def _devices() -> Verdict:
    cores = len(cores_here())
    if not torch.accelerator.is_available():
        return Verdict("devices", "ok", f"{cores} CPU cores, no accelerator")
    kind = torch.accelerator.current_accelerator()
    number = torch.accelerator.device_count()
    try:
        torch.ones(8, device=kind).sum().item()
    except RuntimeError as error:
        step = "see whether other programs use the device, and whether driver and torch fit together"
        return Verdict("devices", "FAIL", f"{kind}: {str(error).splitlines()[0]}", step)
    nodes = numa_nodes(_addresses(number)) if kind is not None and kind.type == "cuda" else []
    numa = f", on NUMA nodes {' '.join(nodes)}" if nodes else ""
    return Verdict("devices", "ok", f"{number} x {kind}{numa}, {cores} CPU cores")


def _addresses(number: int) -> list[str]:
    """Where the devices of CUDA are on the PCI bus."""
    found: list[Any] = [torch.cuda.get_device_properties(index) for index in range(number)]
    return [f"{one.pci_domain_id:04x}:{one.pci_bus_id:02x}:{one.pci_device_id:02x}.0" for one in found]


def numa_nodes(addresses: Sequence[str], devices: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """The NUMA node of each PCI address, "?" if the system does not say; empty if it says nothing."""
    files = [devices / address / "numa_node" for address in addresses]
    texts = [file.read_text(encoding="ascii").strip() if file.is_file() else "?" for file in files]
    return [] if all(text == "?" for text in texts) else [text.replace("-1", "?") for text in texts]


def check_nccl(env: Mapping[str, str], interfaces: Sequence[str]) -> Iterator[Verdict]:
    """Which variables of NCCL are set, and whether the flight recorder is on; nothing without CUDA and variables."""
    given = {
        name: value for name, value in sorted(env.items()) if name.startswith(("NCCL_", "TORCH_NCCL_", "TORCH_FR"))
    }
    if not given and not torch.cuda.is_available():
        return
    wish = given.get("NCCL_SOCKET_IFNAME", "^")
    exact, names = wish.startswith("="), [name for name in wish.lstrip("=").split(",") if name]
    fits = [one for one in interfaces for name in names if (one == name if exact else one.startswith(name))]
    if not wish.startswith("^") and not fits:
        found = f"NCCL_SOCKET_IFNAME={wish}; interfaces: {', '.join(interfaces) or 'none'}"
        yield Verdict("nccl", "FAIL", found, "export NCCL_SOCKET_IFNAME with the beginning of one of these names")
        return
    text = " ".join(f"{name}={value}" for name, value in given.items()) or "defaults"
    slow = [name for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE") if given.get(name) == "1"]
    if slow:
        step = f"unset {' '.join(slow)}, unless NCCL hangs without: messages take a slower way"
        yield Verdict("nccl", "note", text, step)
    else:
        yield Verdict("nccl", "ok", text)
    sizes = [given.get(name, "") for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    if any(size.isdecimal() and int(size) > 0 for size in sizes):
        yield Verdict("flight recorder", "ok", f"keeps the last {max(filter(None, sizes), key=len)} collectives")
    else:
        step = "export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1, to see where ranks wait for each other"
        yield Verdict("flight recorder", "note", "not asked for", step)


def check_environment(env: Mapping[str, str]) -> Verdict:
    """Whether variables of launchers and of weft contradict each other or mean nothing."""
    try:
        place = topology(env)
        resolve({}, env, place.source)
    except ContextError as error:
        problem, *lines = str(error).splitlines()
        parts = {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines)}
        return Verdict("environment", "FAIL", f"{problem}: {parts['found']}", parts["fix"])
    return Verdict("environment", "ok", f"rank {place.rank} of {place.world_size}, from {place.source}")


def check_network(rdzv: str | None, env: Mapping[str, str]) -> Iterator[Verdict]:
    """Whether the first node can be reached, if its address is given; and this machine by others, by its own name."""
    interface = interface_to(None if rdzv is None else rdzv.rpartition(":")[0])
    if rdzv is not None:
        yield _first_node(rdzv, interface)
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        step = f"echo 127.0.0.1 {name} >> /etc/hosts, {_ONE_NODE}"
        yield Verdict("network", "note", f"{name} has no address: {error}", step)
        return
    chosen = env.get("GLOO_SOCKET_IFNAME")
    text = f"{name} is {address} (from {interface})" + (f", GLOO_SOCKET_IFNAME={chosen}" if chosen else "")
    if chosen or not address.startswith("127."):
        yield Verdict("network", "ok", text)
        return
    step = f"export GLOO_SOCKET_IFNAME={interface.partition(' ')[0]} on each node, or give {name} its address there"
    if _on_several_nodes(rdzv, env):
        yield Verdict("network", "FAIL", f"{text}, where other nodes cannot reach it", step)
    else:
        yield Verdict("network", "note", f"{text}, {_ONE_NODE}", f"for several nodes: {step}")


def _on_several_nodes(rdzv: str | None, env: Mapping[str, str]) -> bool:
    if rdzv is not None:
        with contextlib.suppress(OSError):
            return not socket.gethostbyname(rdzv.rpartition(":")[0]).startswith("127.")
    with contextlib.suppress(ContextError):  # `check_environment` reports it
        return topology(env).num_nodes > 1
    return False


def _first_node(rdzv: str, interface: str) -> Verdict:
    host, _, port = rdzv.rpartition(":")
    begin = time.perf_counter()
    try:
        if not 0 < int(port) < 2**16:
            raise ValueError(f"there is no port {port}")
        with socket.create_connection((host, int(port)), timeout=5):
            pass
    except ConnectionRefusedError:
        text = f"{host}:{port} can be reached and nobody listens, which is right before the job begins"
        return Verdict("first node", "ok", f"{text} (from {interface})")
    except (OSError, ValueError) as error:
        step = "check the name, the port and firewalls; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface"
        return Verdict("first node", "FAIL", f"{rdzv} cannot be reached from {interface}: {error}", step)
    return Verdict("first node", "ok", f"{rdzv} answers in {time.perf_counter() - begin:.2f} s (from {interface})")


def _disk(folder: Path | None) -> Verdict:
    where = folder or Path(tempfile.gettempdir())
    try:
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=where) as file:
            begin = time.perf_counter()
            file.write(b"0" * 2**24)
            file.flush()
            os.fsync(file.fileno())
            rate = 2**24 / 1e6 / (time.perf_counter() - begin)
        free = shutil.disk_usage(where).free / 1e9
    except OSError as error:
        return Verdict("disk", "FAIL", f"{where}: {error}", "weft doctor --folder DIRECTORY, one that can be written")
    return Verdict("disk", "ok", f"{where}: {free:.0f} GB free, {rate:.0f} MB/s to the disk")


def _ranks(nproc: int, folder: Path | None, limit_s: float) -> Iterator[Verdict]:
    """Real work on N ranks, started as a user would; yields a verdict for each part of it."""
    with tempfile.TemporaryDirectory(prefix="weft-doctor-", dir=folder) as scratch:
        command = [sys.executable, "-m", "weft", "launch", "-n", str(nproc), "-m", _MODULE, scratch]
        process = subprocess.Popen(  # noqa: S603  (our own program)
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        output, missing = _output(process, nproc, Path(scratch), limit_s)
        found = Path(scratch) / "results.json"
        done: dict[str, str] = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
    if missing:
        load = f"the load of the machine is {os.getloadavg()[0]:.1f}, on {len(cores_here())} cores"
        step = f"weft doctor --limit-s {4 * limit_s:.0f}, or when the machine has less to do"
        found_out = f"{missing} of {nproc} ranks had not started within {limit_s:.0f} s; {load}"
        yield Verdict("ranks", "FAIL", found_out, step)
        return
    for name, (_, step) in CHECKS.items():
        if name in done:
            yield Verdict(name, "ok", done[name])
        else:
            yield Verdict(name, "FAIL", _telling_line(output), step)
            return


def _output(process: subprocess.Popen[str], nproc: int, scratch: Path, limit_s: float) -> tuple[str, int]:
    """What ranks print, and how many of them had not started when the time was over; it begins anew when all have."""
    missing, end = nproc, time.monotonic() + limit_s
    while time.monotonic() < end:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=0.1)[0], 0
        if missing and not (missing := max(0, nproc - len(list(scratch.glob(f"{STARTED}*"))))):
            end = time.monotonic() + limit_s
    os.killpg(process.pid, 9)
    return process.communicate()[0] + f"\nit did not end within {limit_s:.0f} s", missing


def _telling_line(output: str) -> str:
    """The line that says most: that of the exception, else the last one."""
    lines = [line for line in output.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith((" ", "weft launch: ", "Traceback"))]
    raised = [line for line in said if ": " in line and line.partition(":")[0].rpartition(".")[2].isidentifier()]
    return (raised[-1:] or lines[-1:] or ["no output"])[0].removeprefix("weft launch: ")
