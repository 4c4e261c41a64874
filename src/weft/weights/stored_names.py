"""Names and shapes that a model had when its file was written, in those that it has now, as transformers knows them."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from torch import nn

from weft.checkpoint.format.manifest import NamedPiece, Piece, TensorEntry
from weft.checkpoint.format.transfer import Stored
from weft.weights.sources import WeightFiles


def as_named_now(source: WeightFiles, module: nn.Module) -> WeightFiles:
    """A source whose tensors have the names of a model of transformers, if its file was written with others.

    transformers stores models under the names of their first version, and matrices of experts one by one; it says
    itself what belongs to what (`transformers.conversion_mapping`). Tensors that are put together stay where they are:
    each becomes a piece. What is cut or turned on the way is left as it is, and does not fit then.

    Returns:
        The same source if there is nothing to convert, or the module is no model of transformers.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return source
    names = dict.fromkeys(module.state_dict(keep_vars=True), True)
    if source.manifest is not None or source.tensors.keys() <= names.keys():
        return source
    try:
        mappings: Any = importlib.import_module("transformers.conversion_mapping")  # not before transformers 5
        rename: Any = importlib.import_module("transformers.core_model_loading").rename_source_key
    except ImportError:
        return source
    model: Any = module
    mapping = mappings.get_model_conversion_mapping(model)
    converters: list[Any] = [one for one in mapping if hasattr(one, "operations")]
    renamings: list[Any] = [one for one in mapping if not hasattr(one, "operations")]
    tensors: dict[str, Stored] = {}
    groups: dict[str, dict[str, list[Stored]]] = {}
    for name in sorted(source.tensors, key=_natural):
        new, pattern = rename(name, renamings, converters, model.base_model_prefix, names)
        if name in names or pattern is None:
            tensors[name if name in names else new] = source.tensors[name]
        else:
            groups.setdefault(new, {}).setdefault(pattern, []).append(source.tensors[name])
    for new, parts in groups.items():
        converter = next(one for one in converters if parts.keys() <= set(one.source_patterns))
        together = _together([parts.get(pattern, []) for pattern in converter.source_patterns], converter.operations)
        if together is None:
            tensors |= {one.key: one for found in parts.values() for one in found}
        else:
            tensors[new] = Stored(new, together)
    return source._replace(tensors=tensors)


def _together(parts: list[list[Stored]], operations: list[Any]) -> TensorEntry | None:
    """Lists of tensors, each stacked, and then one after the other; None if something else is done with them."""
    kinds = [type(one).__name__ for one in operations]
    entries = [one.entry for found in parts for one in found]
    alike = len({(one.dtype, len(one.shape)) for one in entries}) == 1 and all(len(one.pieces) == 1 for one in entries)
    stacked = kinds[:1] == ["MergeModulelist"] and operations[0].dim == 0
    joined = kinds[1:] if stacked else kinds
    if not alike or joined not in ([], ["Concatenate"]) or (not stacked and any(len(found) != 1 for found in parts)):
        return None
    dim = operations[-1].dim if joined else 0
    pieces: list[Piece] = []
    at, shape = 0, list(entries[0].shape)
    for found in parts:
        for number, one in enumerate(found):
            (piece,) = one.entry.pieces
            shape = [1, *piece.shape] if stacked else list(piece.shape)
            offsets = [0] * len(shape)
            offsets[0] += number if stacked else 0
            offsets[dim] += at if joined else 0
            start, size = tuple(offsets), tuple(shape)
            pieces.append(NamedPiece(file=piece.file, offsets=start, shape=size, name=one.key, stored=piece.shape))
        at += shape[dim] if joined else 0
    if stacked:
        shape[0] = len(parts[0])
    if joined:
        shape[dim] = at
    total = TensorEntry(dtype=entries[0].dtype, shape=tuple(shape), pieces=tuple(pieces))
    return total if all(len(found) == len(parts[0]) for found in parts) else None


def _natural(name: str) -> list[Any]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
