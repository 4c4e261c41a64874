"""`export`: the weights of a checkpoint in the layout of Hugging Face."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from weft.checkpoint.format.safetensors_write import write_bytes
from weft.checkpoint.state.adapters import CONFIG
from weft.checkpoint.storage.copies import with_newest
from weft.checkpoint.storage.find import path_or_url
from weft.context import local
from weft.contract.select_modules import Names
from weft.weights.adapter_files import check_adapter_options, stored_adapter
from weft.weights.hf_layout import HFLayout, check_names, chosen_tensors, num_bytes, renamed_tensors
from weft.weights.publish import published
from weft.weights.sources import floating_dtype, from_checkpoint


def export(
    path: str | Path,
    out: str | Path,
    *,
    object: str = "model",
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | str | None = None,
    filter: Names | None = None,
    rename: Callable[[str], str] | None = None,
    name: str | None = None,
    peft: bool | str = False,
) -> tuple[Path, ...]:
    """Write the weights of a checkpoint as safetensors that others read: one file, or several and an index.

    The pieces of all ranks are merged, in one process, without the code of the model and without
    gathering it: a few megabytes are in memory at a time. The files of the checkpoint are compared
    with their hashes first. Tied weights are stored once, under the first of their names, as
    `save_pretrained` and `safetensors.torch.save_model` do. What `get_extra_state` returned and what
    transforms keep are no weights, and stay behind.

    Changes: the folder `out`, which appears when it is complete. An earlier export there is replaced; a
    folder with anything else in it is refused. Collectives: none.

    Args:
        path: The folder of a checkpoint, or a directory of them: the newest complete one is taken. Or its URL.
        out: Folder to write, on the same file system as its parent.
        object: Which module, by its name in `checkpointable`.
        max_shard_size: Most bytes of tensors per file: a number, or a text such as "5GB" (10^9) or
            "500MiB" (2^20). A larger tensor gets a file of its own.
        dtype: For floating-point tensors; the others keep theirs.
        filter: Names to export: a pattern in which `*` stays within one part of a name and `**` stands for
            any number of parts ("encoder.**"), several, or a function of the name. Default: all.
        rename: From the name in the module to one in the files.
        name: What the files are called. Default: "model", or "adapter_model" with `peft`.
        peft: Write an adapter alone, under PEFT's names and with its configuration, as
            `PeftModel.from_pretrained(base, out)` reads it: its name, or True if the module has one. In
            one file, without `filter` and `rename`.

    Returns:
        The files: tensors first, then the index, if there is one.

    Raises:
        CheckpointError: There is no complete checkpoint, `out` holds something else, there is no such adapter,
            or nothing is left to export.
        ValueError: An option cannot be used, or numbers do not fit into `dtype`.
        OSError: Reading or writing failed; `out` is as it was.

    Example:
        >>> import tempfile, weft
        >>> state, ctx = weft.checkpointable({"model": torch.nn.Linear(3, 2)}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = weft.save(state, folder, 1, ctx)
        ...     files = weft.export(folder, folder + "/weights")
        >>> [file.name for file in files]
        ['model.safetensors']
    """
    limit, wanted = num_bytes(max_shard_size), floating_dtype("export", dtype)
    name = name if name is not None else "adapter_model" if peft else "model"
    check_names(name, rename)
    check_adapter_options(peft, filter, rename)

    def write(found: Path) -> list[str]:
        most, source = limit, from_checkpoint("export", found, object)
        adapter = stored_adapter(source, object, peft) if peft else None
        if adapter is not None:
            # PEFT reads one file, in which a tensor that is two adapters' is there twice.
            chosen, most = {file: source.tensors[own] for file, own in adapter.names.items()}, sys.maxsize
        else:
            chosen = chosen_tensors("export", source, filter, option="filter")
        tensors = renamed_tensors(chosen, wanted, rename)
        layout = HFLayout(tensors, name, limit=most)
        with published(Path(out), source.path, name) as hidden:
            source.verify(tensor.stored for tensor in tensors.values())
            layout.write(hidden, source.files)
            if adapter is not None:
                config = json.dumps(adapter.config, indent=2, sort_keys=True) + "\n"
                write_bytes(hidden / CONFIG, config.encode())
        source.files.close()
        return layout.files() + ([CONFIG] if adapter is not None else [])

    return tuple(Path(out) / file for file in with_newest("export", path_or_url(path), local(), write))
