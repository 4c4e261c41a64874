"""The version of weft, which ranks compare when they start; and whether another package named weft lies over it."""

from __future__ import annotations

from pathlib import Path

from weft.errors import message

__all__ = ["__version__", "refuse_other_packages"]

__version__ = "0.3.0.dev0"

TESTED_TORCH = ("2.9.0", "2.13.0", "2.14.1")


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
