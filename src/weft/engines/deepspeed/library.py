"""Getting hold of DeepSpeed, and what it leaves in the process taken back.

DeepSpeed is imported when the first engine is asked for and not before. What it changes outside of itself
is put back: a variable that it sets on import, the `mpu` that `initialize` leaves behind; and its log level and its
table of operations, which are others while an engine is made. `LOCAL_RANK`, which it wants to read, is there for the
time of the call.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.engines.deepspeed import internals
from weft.errors import ContextError, MissingExtra
from weft.private_names import replaced

_TESTED = (0, 19)


def deepspeed() -> Any:
    """DeepSpeed itself.

    Raises:
        MissingExtra: It is not installed, or in a version that was never tried.
    """
    if "deepspeed" in sys.modules:
        return sys.modules["deepspeed"]
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it tells which accelerator it found
    try:
        with _environment_put_back():
            library = importlib.import_module("deepspeed")
    except ImportError as error:
        why = "DeepSpeed 0.19, which is not installed with weft"
        raise _missing("needs the package deepspeed", f"{type(error).__name__}: {error}", why) from error
    finally:
        logging.disable(disabled)
    version = tuple(int(part) for part in library.__version__.split(".")[:2])
    if version != _TESTED:
        why = "deepspeed 0.19: weft reaches into its optimizers, which change from version to version"
        raise _missing("does not know this version", f"deepspeed {library.__version__}", why)
    return library


def _missing(problem: str, found: str, expected: str) -> MissingExtra:
    return MissingExtra(
        f'zero_partition: engine="deepspeed" {problem}',
        found=found,
        expected=expected,
        fix="DS_BUILD_OPS=0 pip install 'torchweft[deepspeed]'",
    )


@contextlib.contextmanager
def _environment_put_back() -> Iterator[None]:
    """Around what changes variables of the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def check_accelerator(device: torch.device) -> None:
    """Raise if DeepSpeed computes elsewhere than the context.

    Raises:
        ContextError: It does; it chose when it was imported.
    """
    chosen = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    if chosen.partition(":")[0] != device.type:
        raise ContextError(
            "zero_partition: DeepSpeed computes on another device than the context",
            found=f"{chosen}, and {device}",
            expected="one kind of device for both",
            fix=f"DS_ACCELERATOR={device.type}  # in the environment, before the program starts",
        )


def load_async_io() -> None:
    """Load the extension that reads and writes disks; compile it first, which takes minutes, if needed.

    Raises:
        MissingExtra: A library or the compiler is missing, or compiling failed.
    """
    builder = importlib.import_module("deepspeed.accelerator").get_accelerator().create_op_builder("AsyncIOBuilder")
    flags = internals.COMPILER_FLAGS.of(builder)
    with _environment_put_back():
        # ninja is installed beside python, which need not be on the path.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        try:
            if not builder.is_compatible(verbose=False):
                _raise_no_async_io("the library libaio is missing")
            # Names for a debugger take a third of the time.
            internals.COMPILER_FLAGS.set(builder, lambda: [*flags(), "-g0"])
            builder.load(verbose=False)
        except (OSError, RuntimeError) as error:
            _raise_no_async_io(f"{type(error).__name__}: {error}")


def _raise_no_async_io(why: str) -> NoReturn:
    raise MissingExtra(
        "zero_partition: DeepSpeed cannot offload to a disk here",
        found=why,
        expected="a C++ compiler, ninja and libaio, from which DeepSpeed compiles its extension",
        fix="apt-get install g++ libaio-dev",
    )


@contextlib.contextmanager
def restore_process_state(local_rank: int) -> Iterator[None]:
    """Around the making of an engine: what that changes in the process is as before afterwards."""
    logger = importlib.import_module("deepspeed.utils").logger
    stack: list[Any] = internals.modules_running.found
    operations: dict[str, bool] = internals.operations.found
    depth, level = len(stack), logger.level
    handlers, offered = list(logging.root.handlers), operations.copy()
    groups, name_of_mpu = internals.mpu.home
    mpu, linear = {name_of_mpu: getattr(groups, name_of_mpu)}, {"linear": torch.nn.functional.linear}
    with _environment_put_back(), replaced(groups, **mpu), replaced(torch.nn.functional, **linear):
        logger.setLevel(max(level, logging.ERROR))
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
        # It would be compiled, for minutes, when the first engine is made. Messages go through torch's groups as well.
        operations["deepspeed_shm_comm"] = False
        try:
            yield
        finally:
            operations |= offered
            del stack[depth:]
            logger.setLevel(level)
            logging.root.handlers[:] = handlers


@contextlib.contextmanager
def without_broadcasts() -> Iterator[None]:
    """Around the making of an engine for a module whose values are equal on all ranks already.

    DeepSpeed's own broadcasts cannot send a parameter that is a single number.
    """
    (engine, name_of_broadcast), (init, name_of_cut) = internals.broadcast.home, internals.cut.home

    def nothing(self: object) -> None:
        """Instead of a broadcast of all parameters."""

    def cut(self: Any, parameter: Any) -> None:
        internals.CONVERT.of(self)(parameter)
        parameter.partition()

    with replaced(engine, **{name_of_broadcast: nothing}), replaced(init, **{name_of_cut: cut}):
        yield


@contextlib.contextmanager
def lend_process_state(module: nn.Module | None, local_rank: int) -> Iterator[None]:
    """What DeepSpeed wants to find in the process during a forward pass of stage 3, there for that time only.

    `LOCAL_RANK` in the environment, and the module at the bottom of a stack that it keeps for the process. What a
    forward pass that raised has left there is taken away, too.
    """
    stack: list[Any] = internals.modules_running.found
    depth, is_named = len(stack), "LOCAL_RANK" in os.environ
    stack.append(module)
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    try:
        yield
    finally:
        del stack[depth:]
        if not is_named:
            os.environ.pop("LOCAL_RANK", None)


class Attributes:
    """What DeepSpeed hangs on a module and its parameters, so that it can be taken off."""

    def __init__(self, module: nn.Module) -> None:
        found: list[Any] = [*module.modules(), *module.parameters()]
        self._before = [(weakref.ref(one), frozenset(vars(one))) for one in found]
        self._hung: list[tuple[weakref.ref[Any], frozenset[str]]] = []

    def note(self) -> None:
        """The engine was made: what is new is DeepSpeed's."""
        alive = [(target, target(), before) for target, before in self._before]
        self._hung = [(target, frozenset(vars(one)) - before) for target, one, before in alive if one is not None]

    def take_off(self) -> None:
        """Take it off, and what it hung there later."""
        for target, names in self._hung:
            one = target()
            for name in list(vars(one)) if one is not None else ():
                if name in names or name.startswith(("ds_", "applied_pre_backward")):
                    delattr(one, name)
            if isinstance(one, nn.Module):
                torch_internals.PARAMETERS.set(one, dict(torch_internals.PARAMETERS.of(one)))


class GroupView:
    """The protocol by which DeepSpeed asks for process groups, over one group.

    Attributes:
        group: The ranks it divides over; None once it is released.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: dist.ProcessGroup | None = group

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks it divides over."""
        return self.group

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return dist.get_world_size(self.group)

    def get_data_parallel_rank(self) -> int:
        """This rank among them."""
        return dist.get_rank(self.group)

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their global numbers."""
        return dist.get_process_group_ranks(self.group) if self.group is not None else []

    def get_model_parallel_group(self) -> None:
        """No rank holds a part of the model only."""

    def get_model_parallel_world_size(self) -> int:
        """One."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """The first."""
        return 0

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
