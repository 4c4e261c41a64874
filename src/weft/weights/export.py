"""`export`: the weights of a checkpoint in the layout of Hugging Face."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.checkpoint.format.safetensors_read import TensorFiles
from weft.checkpoint.format.safetensors_write import file_header, new_file, write_bytes, write_parts
from weft.checkpoint.format.transfer import Stored, read_in_parts
from weft.checkpoint.state.adapters import CONFIG
from weft.checkpoint.storage.copies import with_newest
from weft.checkpoint.storage.find import path_or_url
from weft.checks import option_error
from weft.context import local
from weft.contract.select_modules import Names
from weft.errors import CheckpointError, value_error
from weft.tensors.blocks import memory_of, whole
from weft.tensors.messages import in_buckets
from weft.weights.adapter_files import check_adapter_options, stored_adapter
from weft.weights.places.module_sizes import UNITS, parse_size
from weft.weights.publish import published
from weft.weights.sources import MAX_INDEX_BYTES, averages_in, chosen_tensors, floating_dtype, from_checkpoint


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
    averages: bool | None = None,
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
        averages: Write the averages that `average_weights` keeps instead of the weights they are of, in the
            dtype of these: what the module computes with inside `averages.swapped()`. False: the weights, as
            by default, when a line in the log of "weft" says that there are averages too.

    Returns:
        The files: tensors first, then the index, if there is one.

    Raises:
        CheckpointError: There is no complete checkpoint, `out` holds something else, there is no such adapter,
            there are no averages, or nothing is left to export.
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
    limit = num_bytes_of("export", "max_shard_size", max_shard_size, fix='weft.export(path, out, max_shard_size="5GB")')
    wanted = floating_dtype("export", dtype)
    name = name if name is not None else "adapter_model" if peft else "model"
    check_names(name, rename)
    check_adapter_options("export", peft, fix="weft.export(path, out, peft=True)", filter=filter, rename=rename)

    def write(found: Path) -> list[str]:
        most, source = limit, from_checkpoint("export", found, object, averages=averages is True)
        if averages is None and source.manifest is not None and averages_in(source.manifest, object):
            logging.getLogger("weft").warning(
                "export: %s has averages of %r too, and the weights are written, not these; averages=True "
                "(--averages) writes the averages, averages=False (--no-averages) leaves this line out",
                source.path, object,
            )  # fmt: skip
        adapter = stored_adapter(source, object, peft) if peft else None
        if adapter is not None:
            # PEFT reads one file, in which a tensor that is two adapters' is there twice.
            chosen, most = {file: source.tensors[own] for file, own in adapter.names.items()}, sys.maxsize
        else:
            chosen = chosen_tensors("export", source.tensors, filter, option="filter")
        tensors = renamed_tensors(chosen, wanted, rename, source.dtype_of)
        shards = _shards(tensors, name, limit=most)
        texts = {f"{name}.safetensors.index.json": _index(tensors, shards)} if len(shards) > 1 else {}
        if adapter is not None:
            texts[CONFIG] = (json.dumps(adapter.config, indent=2, sort_keys=True) + "\n").encode()
        with published(Path(out), source.path, name) as hidden:
            source.verify(tensor.stored for tensor in tensors.values())
            for file, names in shards.items():
                with new_file(hidden / file) as opened:
                    write_parts(opened, _parts(tensors, names, source.files))
            for file, text in texts.items():
                write_bytes(hidden / file, text)
        source.files.close()
        return [*shards, *texts]

    return tuple(Path(out) / file for file in with_newest("export", path_or_url(path), local(), write))


# -- which tensors, under which names, in which of several files -----------------------------------------


def num_bytes_of(what: str, option: str, size: int | str, *, fix: str) -> int:
    """A size in bytes, given as a number or as a text such as "5GB".

    Raises:
        ValueError: It is none.
    """
    found = parse_size(size) if isinstance(size, str) else size
    if type(found) is not int or found < 1:
        raise value_error(
            f"{what}: {option} = {size!r} is not a size",
            found=repr(size),
            expected=f"a whole number of bytes > 0, or a number and one of {', '.join(UNITS)}",
            fix=fix,
        )
    return found


class Tensor(NamedTuple):
    """One to be written."""

    stored: Stored
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.stored.entry.shape) * self.dtype.itemsize

    def on_meta(self) -> torch.Tensor:
        """A tensor of its shape and dtype."""
        return torch.empty(self.stored.entry.shape, dtype=self.dtype, device="meta")


def check_names(name: object, rename: object) -> None:
    """Raise unless files can be called so, and tensors be renamed by this.

    Raises:
        ValueError: They cannot.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        fix = 'weft.export(path, out, name="model")'
        raise option_error("export", "name", name, expected="a prefix of file names", fix=fix)
    check_rename("export", rename)


def check_rename(what: str, rename: object) -> None:
    """Raise unless tensors can be renamed by this.

    Raises:
        ValueError: They cannot.
    """
    if rename is not None and not callable(rename):
        raise value_error(
            f"{what}: rename = {rename!r:.80} cannot be used",
            found=type(rename).__name__,
            expected="a function from the name in the module to one in the files",
            fix='rename=lambda name: "model." + name',
        )


def renamed_tensors(
    tensors: Mapping[str, Stored],
    dtype: torch.dtype | None,
    rename: Callable[[str], str] | None,
    dtype_of: Callable[[Stored], torch.dtype] = lambda stored: stored.dtype,
) -> dict[str, Tensor]:
    """Tensors in the dtype, and under the name, that they have in the files.

    Raises:
        ValueError: Two would have one name.
    """
    found: dict[str, Tensor] = {}
    for name, stored in tensors.items():
        new = name if rename is None else rename(name)
        if not isinstance(new, str) or new in found or new == "__metadata__":
            raise value_error(
                f"export: {name} cannot be called {new!r}",
                found="a name that is taken" if new in found else repr(new),
                expected="from rename, a name of its own for each tensor",
                fix='rename=lambda name: "model." + name',
            )
        found[new] = Tensor(stored, dtype if dtype and stored.dtype.is_floating_point else dtype_of(stored))
    return found


def _shards(tensors: Mapping[str, Tensor], name: str, *, limit: int) -> dict[str, list[str]]:
    """Which tensors are in which file, in the order of the module; what is larger than one file gets its own."""
    shards = list(in_buckets(tensors, lambda key: tensors[key].size, limit)) or [[]]
    many = len(shards)
    if many == 1:
        return {f"{name}.safetensors": shards[0]}
    return {f"{name}-{number:05d}-of-{many:05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _index(tensors: Mapping[str, Tensor], shards: Mapping[str, list[str]]) -> bytes:
    """Which file holds which tensor, as text.

    Raises:
        CheckpointError: It could not be read again.
    """
    places = {name: file for file, names in shards.items() for name in names}
    size = sum(one.size for one in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    text = (json.dumps(index, indent=2) + "\n").encode()
    if len(text) > MAX_INDEX_BYTES:
        raise CheckpointError(
            "export: the index would be too large",
            found=f"{len(text)} bytes for {len(places)} tensors",
            expected=f"at most {MAX_INDEX_BYTES} bytes, or it could not be read again",
            fix='weft.export(path, out, max_shard_size="10TB")  # one file, which has no index',
        )
    return text


def _parts(tensors: Mapping[str, Tensor], names: list[str], source: TensorFiles) -> Iterator[Any]:
    """The bytes of a file of these tensors, a few megabytes at a time."""
    head, order = file_header({name: tensors[name].on_meta() for name in names}, {"format": "pt"})
    yield head
    for name in order:
        stored, dtype = tensors[name]
        for _, values in read_in_parts(source, stored, whole(stored.entry.shape), dtype):
            yield memory_of(values)
