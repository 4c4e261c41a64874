"""Getting hold of torch-xla: installed, made for this torch, and in the mode that the mesh needs.

The versions are read from the metadata of the packages first: torch-xla with another torch ends the process, or
fails with a symbol that is missing. What an import of torch-xla writes into the environment stays: its runtime
reads it later. The handler of log messages that it adds is taken off again.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from typing import Any, NamedTuple

from weft.engines.xla import internals
from weft.errors import ContextError, MissingExtra

_INSTALL = "pip install 'torchweft[xla]'  # torch-xla 2.9 and torch 2.9.0, in an environment of their own"


class TorchXLA(NamedTuple):
    """The parts of torch-xla that are used here.

    Attributes:
        torch_xla: The package.
        model: `torch_xla.core.xla_model`.
        runtime: `torch_xla.runtime`.
        spmd: `torch_xla.distributed.spmd`.
    """

    torch_xla: Any
    model: Any
    runtime: Any
    spmd: Any


def library() -> TorchXLA:
    """torch-xla itself; imported by the first call.

    Raises:
        MissingExtra: It is not installed, or was made for another torch.
    """
    if "torch_xla" not in sys.modules:
        check_versions()
        handlers = list(logging.root.handlers)
        try:
            importlib.import_module("torch_xla")
        except ImportError as error:
            raise _missing(" needs the package torch-xla", f"{type(error).__name__}: {error}") from error
        finally:
            logging.root.handlers[:] = handlers
    names = ("torch_xla", "torch_xla.core.xla_model", "torch_xla.runtime", "torch_xla.distributed.spmd")
    package, model, runtime, spmd = (importlib.import_module(name) for name in names)
    return TorchXLA(package, model, runtime, spmd)


def check_versions() -> None:
    """Compare the versions of torch-xla and torch, without importing anything.

    Raises:
        MissingExtra: torch-xla is not installed, or of another minor version than torch.
    """
    try:
        xla = importlib.metadata.version("torch-xla")
    except importlib.metadata.PackageNotFoundError as error:
        raise _missing(" needs the package torch-xla", "no package torch-xla") from error
    torch = importlib.metadata.version("torch")
    if xla.split(".")[:2] != torch.split(".")[:2]:
        expected = f"torch {'.'.join(xla.split('.')[:2])}, as the two are linked to each other"
        raise _missing(": torch-xla was made for another torch", f"torch-xla {xla} and torch {torch}", expected)


def _missing(problem: str, found: str, expected: str = "torch-xla, which is not installed with weft") -> MissingExtra:
    return MissingExtra(f'start: device = "xla"{problem}', found=found, expected=expected, fix=_INSTALL)


def check_processes(lib: TorchXLA, world_size: int) -> None:
    """Raise if the processes of the job would not train together.

    Raises:
        ContextError: Several processes on CPUs, between which XLA sends nothing; or another number than XLA knows.
    """
    kind = lib.runtime.device_type()
    if world_size > 1 and kind == "CPU":
        raise ContextError(
            f'start: device = "xla" cannot serve {world_size} ranks on CPUs',
            found=f"{world_size} processes, PJRT_DEVICE=CPU",
            expected="one process: XLA sends nothing between processes on CPUs, each would train by itself",
            fix="PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python train.py  # one process, four devices",
        )
    known = lib.runtime.process_count() if world_size > 1 else 1
    if known != world_size:
        raise ContextError(
            f'start: device = "xla" knows another number of processes than the launcher, {world_size}',
            found=f"{known} process(es) of XLA on {kind}, world size {world_size}",
            expected="one process per host, all of them started",
            fix="weft launch -n 1 --nnodes <hosts> --rdzv <first host>:29500 train.py  # on each host",
        )


def use_spmd(lib: TorchXLA) -> None:
    """Let the devices of this process be one mesh; for the rest of the process.

    Raises:
        ContextError: A device was used before, so that it is too late.
    """
    if lib.runtime.is_spmd():
        return
    if internals.is_too_late():
        raise ContextError(
            'start: device = "xla" comes too late',
            found="a device of XLA is in use already",
            expected="weft.start before the first tensor on a device: several devices are one mesh from the start",
            fix='with weft.start(device="xla") as ctx:  # first of all',
        )
    lib.runtime.use_spmd()
