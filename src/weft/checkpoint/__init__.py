"""Checkpoints: state that survives anything, at any world size and under any strategy.

state.py     what has to survive, as tensors and plain values, by name
pieces.py    which part of a tensor a rank holds, and which rank writes it
manifest.py  the one JSON file that says what a checkpoint consists of
files.py     safetensors files with hashes, brought to the disk for certain
commit.py    all or nothing: hidden folder, one rename; which checkpoints there are
saving.py    `save`
restoring.py `restore`, `verify`

[Note: format] A checkpoint is a folder `step-<number>` with one safetensors file per rank and
`manifest.json`: for each tensor its dtype, shape and pieces (file, offsets, shape); plain values as
JSON; and bytes and SHA-256 of each file. Nothing is pickled. A tensor may be cut up in any way, so
the number of ranks and the strategy may differ between saving and restoring.
"""

from weft.checkpoint.commit import latest
from weft.checkpoint.restoring import Restored, restore, verify
from weft.checkpoint.saving import save
from weft.checkpoint.state import Checkpoint, checkpointable

__all__ = ["Checkpoint", "Restored", "checkpointable", "latest", "restore", "save", "verify"]
