"""The version of weft, which ranks compare when they start; what it is tested with; and what lies over its files."""

from __future__ import annotations

import re
from pathlib import Path

from weft.errors import message

__version__ = "0.3.0.dev0"

# README, the guides, the workflows and pyproject.toml name these, and a test compares them.
TESTED_PYTHON = ("3.11", "3.12", "3.13")
TESTED_TORCH = ("2.9.0", "2.13.0", "2.14.1")


def newer_torch(installed: str) -> str:
    """What there is to say of a torch that is newer than all that weft is tested with; empty if this one is not."""
    newest = TESTED_TORCH[-1]
    if numbers_of(installed) <= numbers_of(newest):
        return ""
    return (
        f"torch {installed} is newer than those weft was tested with, up to {newest}: "
        f"if something fails that plain torch can do, pip install 'torch=={newest}'"
    )


def numbers_of(version: str) -> list[int]:
    """The first numbers of a version: major, minor, patch, or as many as there are."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def refuse_other_packages(folder: Path) -> None:
    """Raise if pip has put files of the distribution `weft`, another project, into a folder beside those of this one.

    Raises:
        ImportError: It has. Files of both have the same names, and which of them are there depends on the order.
    """
    others = sorted(path.name.removesuffix(".dist-info") for path in folder.glob("weft-*.dist-info"))
    if others:
        raise ImportError(
            message(
                "weft: another project has a package of this name in the same environment",
                found=f"{', '.join(others)} in {folder}, whose files lie among those of torchweft",
                expected="the distribution torchweft alone: its package and its command are weft",
                fix="pip uninstall -y weft torchweft && pip install torchweft",
            )
        )
