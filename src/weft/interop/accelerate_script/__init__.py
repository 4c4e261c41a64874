"""Scripts of Accelerate, rewritten: `translate` makes exact edits of the source and lists what it leaves.

translate.py    the walk, and the imports
statements.py   calls that take a statement; tests of `sync_gradients`
expressions.py  names, attributes and other calls
setup.py        before the loop: the context, transforms, the state
loops.py        a loop with `accumulate` becomes a loop over windows
calls.py        one row per call: what it is in weft; hints for the others
reach.py        settings that a function reads of the accelerator become parameters of it
names.py        what is what in a script: accelerators, models, loaders, loops
translation.py        what these share, and what is to be reported
edits.py        edits of a text that keep every other character
"""

from weft.interop.accelerate_script.translate import Translation, translate
from weft.interop.accelerate_script.translation import Finding

__all__ = ["Finding", "Translation", "translate"]
