"""Weights alone: out of a checkpoint into the layout of Hugging Face, from files into any module, and where they lie.

export.py         `export`: which tensors, under which names, in which files
adapter_files.py  adapters of PEFT: which one is meant, and what it is called in files
publish.py        a folder that appears when it is complete
stream.py         `stream`, whole weights bucket by bucket; `local_parts`, what a rank has of each
load.py           `load_weights`; `read`, for tensors without a module
sources.py        what files, indices, folders and checkpoints hold
stored_names.py   names that a model of transformers had when its file was written
targets.py        what a module holds, and memory for modules on meta
assign.py         who reads what, and how it comes to the others
tied.py           `find_tied`, `tie`
on_meta.py        `on_meta`: modules without memory for their parameters
quantization/     weights in 8 or 4 bits: `quantized`
places/           where the parts of a module lie: `module_sizes`, `plan_placement`

Tested by: tests/weights
"""

from weft.weights.export import export
from weft.weights.load import LoadedWeights, load_weights, read
from weft.weights.on_meta import on_meta
from weft.weights.places.module_sizes import module_sizes
from weft.weights.places.plan_placement import PlacedUnit, PlacementPlan, plan_placement
from weft.weights.quantization.quantize import quantized
from weft.weights.stream import LocalPart, local_parts, stream
from weft.weights.tied import find_tied, tie

__all__ = [
    "LoadedWeights",
    "LocalPart",
    "PlacedUnit",
    "PlacementPlan",
    "export",
    "find_tied",
    "load_weights",
    "local_parts",
    "module_sizes",
    "on_meta",
    "plan_placement",
    "quantized",
    "read",
    "stream",
    "tie",
]
