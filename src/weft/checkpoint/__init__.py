"""Checkpoints: state that survives anything, at any world size and under any strategy.

save.py              `save`
save_async.py        `save_async`: the same beside the program
staging.py           the memory that it copies the state into
draft.py             what each rank writes, and how the main rank commits it; older ones pruned
compare_replicas.py  whether ranks that hold the same tensor hold the same values
restore.py           `restore`
reader.py            which bytes of which files this rank needs
history.py           which checkpoints of a directory belong to a run
format/              what a checkpoint is on disk
storage/             where checkpoints lie, in a directory or at a URL, and which there are
state/               objects as tensors and plain values, and back

[Note: format] A checkpoint is a folder `step-<number>` with one safetensors file per rank and
`manifest.json`: for each tensor its dtype, shape and pieces (file, offsets, shape); plain values as
JSON; bytes and hash of each file, with the name of the hash. Its own first line holds the SHA-256 of
the rest of it. Nothing is pickled. A tensor may be cut up in any way, so the number of ranks and the
strategy may differ between saving and restoring.

Tested by: tests/checkpoint
"""

from weft.checkpoint.restore import Restored, restore
from weft.checkpoint.save import save
from weft.checkpoint.save_async import RunningSave, save_async
from weft.checkpoint.state.collect import Checkpoint, checkpointable
from weft.checkpoint.storage.find import best, latest, verify

__all__ = [
    "Checkpoint",
    "Restored",
    "RunningSave",
    "best",
    "checkpointable",
    "latest",
    "restore",
    "save",
    "save_async",
    "verify",
]
