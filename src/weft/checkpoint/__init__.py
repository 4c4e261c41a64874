"""Checkpoints: state that survives anything, at any world size and under any strategy.

state.py      what has to survive, as tensors and plain values, by name
values.py     plain values as JSON, and back
dtypes.py     which conversions of numbers keep what they mean
randomness.py random states
generators.py random generators of the user's own
pieces.py     which part of a tensor a rank holds, who holds the same, and which rank writes it
replicas.py   whether ranks that hold the same tensor hold the same values
manifest.py   the one JSON file that says what a checkpoint consists of
hashes.py     which hash a file has
memory.py     fresh memory
files.py      safetensors files with hashes, brought to the disk for certain
history.py    which checkpoints of a directory belong to a run
commit.py     all or nothing: hidden folder, one rename; `latest`, `verify`
saving.py     `save`
saving_async.py `save_async`: the same beside the program
staging.py    the memory that it copies the state into
writing.py    what a rank brings, and how the main rank makes a whole of it
reading.py    tensors out of the files, cut up as they are needed
loading.py    from the files into the objects, all or nothing
restoring.py  `restore`
weights/      `export`, `load_weights`, `import_deepspeed`: weights in the layout of Hugging Face, without the rest
ranks.py      work that fails on one rank fails on all

[Note: format] A checkpoint is a folder `step-<number>` with one safetensors file per rank and
`manifest.json`: for each tensor its dtype, shape and pieces (file, offsets, shape); plain values as
JSON; bytes and hash of each file, with the name of the hash. Its own first line holds the SHA-256 of
the rest of it. Nothing is pickled. A tensor may be cut up in any way, so the number of ranks and the
strategy may differ between saving and restoring.
"""

from weft.checkpoint.commit import latest, verify
from weft.checkpoint.restoring import Restored, restore
from weft.checkpoint.saving import save
from weft.checkpoint.saving_async import RunningSave, save_async
from weft.checkpoint.state import Checkpoint, checkpointable
from weft.checkpoint.weights import LoadedWeights, export, import_deepspeed, load_weights

__all__ = [
    "Checkpoint",
    "LoadedWeights",
    "Restored",
    "RunningSave",
    "checkpointable",
    "export",
    "import_deepspeed",
    "latest",
    "load_weights",
    "restore",
    "save",
    "save_async",
    "verify",
]
