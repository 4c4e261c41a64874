"""Scripts of Accelerate and of Lightning Fabric, rewritten for weft: behind `weft migrate`, on LibCST.

translate.py    the whole script, and its imports
walk.py         names, attributes, tests and calls, where they stand
calls.py        calls that a row says, and those of methods that take more
statements.py   calls that take a statement
prepare.py      before the loop: the context, transforms, windows
strategies.py   plugins, keywords and configuration files as strategies
checkpoints.py  what is saved and loaded
loops.py        a loop with `accumulate` becomes a loop over windows
script.py       what is what in a script: models, loaders, loops, settings
draft.py        a translation in progress
library.py      what each call of Accelerate or Fabric is in weft: the rows of accelerate.toml and fabric.toml

Tested by: tests/migrate
"""

from weft_migrate.draft import Finding
from weft_migrate.translate import Translation, translate

__all__ = ["Finding", "Translation", "translate"]
