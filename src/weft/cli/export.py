"""`weft export`: the weights of a checkpoint in the layout of Hugging Face."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from weft.errors import CheckpointError
from weft.weights import export

_OPTIONS = ("object", "max_shard_size", "dtype", "filter", "name", "peft", "averages")  # of `export`, too


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "export",
        help="write the weights of a checkpoint as safetensors that others read",
        allow_abbrev=False,
        description="Merge the weights of a checkpoint into safetensors in the layout of Hugging Face: one file, or "
        "several and an index. One process, a few megabytes at a time, without the code of the model.",
    )
    sub.add_argument("path", help="folder of a checkpoint, or a directory of them: the newest complete one")
    sub.add_argument("out", help="folder to write; an earlier export in it is replaced")
    sub.add_argument("--object", default="model", metavar="NAME", help='which module (default "model")')
    most = 'most bytes per file (default "5GB")'
    sub.add_argument("--max-shard-size", type=_size, default="5GB", metavar="SIZE", help=most)
    sub.add_argument("--dtype", default=None, help='of floating-point tensors, such as "bf16"; default: as they are')
    sub.add_argument(
        "--filter", action="append", default=None, metavar="PATTERN", help='names to export, such as "**.lora_*.**"'
    )
    sub.add_argument("--name", default=None, help='what the files are called (default "model", or "adapter_model")')
    sub.add_argument(
        "--peft", nargs="?", const=True, default=False, metavar="ADAPTER", help="an adapter alone, as PEFT reads it"
    )
    sub.add_argument(
        "--averages",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the averages that weft.average_weights keeps, instead of the weights",
    )


def _size(text: str) -> int | str:
    """A number of bytes, or a text such as "5GB"."""
    return int(text) if text.isdecimal() else text


def run(options: argparse.Namespace) -> int:
    """Export; returns 0, 1 if there is nothing to export or no place for it, 2 for a wrong option."""
    try:
        files = export(options.path, options.out, **{name: getattr(options, name) for name in _OPTIONS})
    except (CheckpointError, OSError, ValueError) as error:
        print(f"weft {error}" if isinstance(error, CheckpointError) else f"weft export: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, ValueError) else 1
    for file in files:
        print(f"{file}  {file.stat().st_size} bytes")  # noqa: T201
    return 0
