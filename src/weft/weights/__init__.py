"""Weights alone: out of a checkpoint into the layout of Hugging Face, and from files into any module.

export.py     `export`
hf_layout.py  which tensors in which of its files
publish.py    a folder that appears when it is complete
load.py       `load_weights`
sources.py    what files, indices, folders and checkpoints hold
targets.py    what a module holds, and memory for modules on meta
assign.py     who reads what, and how it comes to the others
"""

from weft.weights.export import export
from weft.weights.load import LoadedWeights, load_weights

__all__ = ["LoadedWeights", "export", "load_weights"]
