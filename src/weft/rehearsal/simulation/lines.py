"""The line of the user's program that is running."""

from __future__ import annotations

import functools
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_TORCH = str(Path(torch.__file__).parent) + "/"
_WEFT = str(Path(__file__).parents[2]) + "/"
_CHECKING = (_WEFT, f"{_TORCH}amp/grad_scaler.py", f"{_TORCH}nn/init.py")
_FOR_PROGRAM = tuple(  # whose lines they read for: logs, norms that are DTensors, conditions
    _WEFT + name for name in ("monitoring/log.py", "engines/torch/parts/dtensor_reads.py", "collectives/barriers.py")
)
_OWN = str(Path(__file__).parents[1]) + "/"
_STDLIB = tuple(f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib"))
_UNSEEN = tuple(f"{_TORCH}{name}" for name in ("_subclasses/", "_dynamo/", "_compile.py", "_ops.py"))  # simulate
_STRATEGIES = ("/distributed/fsdp/", "/distributed/_composable/", "/engines/torch/reducing/", "/engines/torch/fsdp/")


class CodePosition(NamedTuple):
    """Where a program is.

    Attributes:
        line: The innermost one outside torch and weft, "train.py:41"; empty if there is none.
        caller: Whose code that line called: "user", "torch", "weft", "strategy" or "optimizer".
        in_order: Whether that line called, however far away, code that checks for numbers that would have to be
            replaced: weft's, the gradient scaler of torch, or its functions that draw initial weights. What `weft.log`
            and `any_rank` read is for that line, and so are numbers that are DTensors, such as a norm.
    """

    line: str
    caller: str
    in_order: bool


def code_position() -> CodePosition:
    """Where the program is now."""
    frame: FrameType | None = sys._getframe(1)
    caller, is_open, in_order, for_program = "", True, False, False
    while frame is not None:
        owner = _owner(frame.f_code.co_filename)
        if owner == "user":
            return CodePosition(
                _line(frame.f_code.co_filename, frame.f_lineno), caller or "user", in_order and not for_program
            )
        for_program = for_program or frame.f_code.co_filename in _FOR_PROGRAM
        in_order = in_order or (owner != "python" and frame.f_code.co_filename.startswith(_CHECKING))
        if owner == "call":
            is_open = False  # what strategies do is done in hooks: this is a module that computes
        elif is_open and owner in ("strategy", "optimizer"):
            caller, is_open = owner, False
        caller = caller or ("" if owner == "python" else "torch" if owner == "call" else owner)
        frame = frame.f_back
    return CodePosition("", caller, in_order)


def line_in(error: BaseException) -> str | None:
    """The innermost line outside torch and weft that an error went through."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _owner(each.filename) == "user"]
    return _line(frames[-1].filename, frames[-1].lineno or 0) if frames else None


@functools.cache
def _owner(file: str) -> str:
    if (
        "-packages/safetensors/" in file
        or file.startswith((_OWN, "<", *_UNSEEN))
        or (file.startswith(_STDLIB) and "-packages/" not in file)
    ):
        return "python"
    if not file.startswith((_TORCH, _WEFT)):
        return "user"
    if file.endswith("/torch/nn/modules/module.py"):
        return "call"
    if any(part in file for part in _STRATEGIES):
        return "strategy"
    if file.startswith(_TORCH):
        return "optimizer" if file.startswith(f"{_TORCH}optim/") else "torch"
    return "weft"


@functools.cache
def _line(file: str, number: int) -> str:
    path = Path(file)
    inside = path.is_relative_to(Path.cwd())
    return f"{path.relative_to(Path.cwd()) if inside else path.name}:{number}"
