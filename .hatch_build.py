"""Compile the package when it is installed in place, as pip does for packages that it copies.

Otherwise each `import weft` would compile its sources again wherever Python may not write bytecode.
"""

import compileall
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileInPlace(BuildHookInterface[Any]):
    """A hook of hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Runs before the wheel is built."""
        if version == "editable":
            compileall.compile_dir(Path(self.root) / "src", quiet=1)
