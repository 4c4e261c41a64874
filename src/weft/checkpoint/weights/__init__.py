"""Weights alone: out of a checkpoint into the layout of Hugging Face, and from files into any module.

exporting.py  `export`
importing.py  `import_deepspeed`, which trusts what it reads
deepspeed_folders.py  what lies where in the folders of DeepSpeed
shards.py     which tensors in which of its files
publishing.py a folder that appears when it is complete
loading.py    `load_weights`
sources.py    what files, indices, folders and checkpoints hold
targets.py    what a module holds, and memory for modules on meta
placement.py  who reads what, and how it comes to the others
sending.py    the messages for that
converting.py values in other dtypes
"""

from weft.checkpoint.weights.exporting import export
from weft.checkpoint.weights.importing import import_deepspeed
from weft.checkpoint.weights.loading import LoadedWeights, load_weights

__all__ = ["LoadedWeights", "export", "import_deepspeed", "load_weights"]
