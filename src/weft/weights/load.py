"""`load_weights`: from files into a module, whatever the module is made of; `read`: tensors without a module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from weft.checkpoint.format.transfer import Transfer, read_blocks
from weft.checkpoint.state.adapters import CONFIG
from weft.checkpoint.state.collect import kept_shards
from weft.checkpoint.storage.copies import with_newest
from weft.checkpoint.storage.find import path_or_url
from weft.collectives.on_all_ranks import on_all
from weft.context import DistContext, local
from weft.contract import check_not_streamed
from weft.contract.select_modules import Names
from weft.tensors.blocks import whole
from weft.weights.adapter_files import names_in_module
from weft.weights.assign import WeightAssignment, renamed
from weft.weights.sources import chosen_tensors, floating_dtype, from_path
from weft.weights.stored_names import as_named_now


class LoadedWeights(NamedTuple):
    """What was loaded.

    Attributes:
        path: The file, index or checkpoint that was read.
        missing: Names that the module has and the files have not; they kept their values.
        unexpected: Names that only the files have.
    """

    path: Path
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_weights(
    module: nn.Module,
    path: str | Path,
    ctx: DistContext,
    *,
    strict: bool = True,
    dtype: torch.dtype | str | None = None,
    rename: Callable[[str], str | None] | None = None,
    object: str = "model",
    averages: bool = False,
) -> LoadedWeights:
    """Load parameters and buffers of a module from safetensors, or from a checkpoint.

    Use it for initial weights; `restore` resumes a run. Everything is checked before anything changes, and read before
    anything is put in place: on an error, every rank keeps what it had. Together, the ranks read each byte once:
    tensors that all ranks hold are divided among them for reading and then sent; each rank reads its own shards.

    Changes: the module, in place. Tensors keep their dtype and device, and tied ones stay tied; those on
    meta get memory on `ctx.device`, and their parameters are new objects, so the optimizer comes after.
    Collectives: broadcasts of what several ranks hold, 1x its bytes; none with one rank. Parameters that
    DeepSpeed keeps in pieces are gathered and cut up again, one by one.

    Args:
        module: Plain, replicated, sharded, or on meta; the same on all ranks.
        path: A `.safetensors` file; an index, with its files beside it; a folder with one of these; the
            folder of a checkpoint, or a directory of checkpoints, of which the newest complete one is
            taken, or the URL of one of these two. The folder of an adapter of PEFT is read into the active
            adapter of the module, by PEFT's names; nothing else is missing then.
        ctx: The context whose ranks take part; all that hold a part of the module.
        strict: Raise if names differ. Otherwise what is missing keeps its value, or is drawn by the
            `reset_parameters()` of its part if it is on meta. Shapes have to fit always.
        dtype: For the floating-point tensors that are saved; the others keep theirs. Only before
            transforms.
        rename: From a name in the files to one in the module; None leaves the tensor out.
        object: Which module, of those in a checkpoint.
        averages: Of a checkpoint, load the averages that `average_weights` keeps instead of the weights they are of.

    Returns:
        What was read, and what was missing or left over.

    Raises:
        CheckpointError: The files cannot be used or trusted, or do not fit the module. A pickle is
            refused.
        OSError: A file cannot be read; the module is as it was.
        ContextError: The ranks pass different modules or files.
        OrderError: An optimizer holds parameters on meta.
        TypeError: Not a module.
        ValueError: An option cannot be used, or numbers do not fit into their dtype.
        PeerError: Another rank failed.

    Example:
        >>> import tempfile, weft
        >>> model, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> state, ctx = weft.checkpointable({"model": model}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = weft.export(weft.save(state, folder, 1, ctx), folder + "/weights")
        ...     _ = weft.load_weights(other, folder + "/weights", ctx)
        >>> torch.equal(other.weight, model.weight)
        True
    """
    ctx.require_collective("load_weights")
    ctx.agree("load_weights", {"strict": strict, "dtype": str(dtype), "object": object, "averages": averages})

    elsewhere = kept_shards(module) if isinstance(module, nn.Module) else {}

    def settled(found: Path) -> WeightAssignment:
        check_not_streamed("load_weights", module)
        source, within = from_path("load_weights", found, object, averages=averages), None
        wanted = floating_dtype("load_weights", dtype)
        if rename is None and (found / CONFIG).is_file():
            names = names_in_module(module, found)
            source, within = renamed(source, lambda name: names.get(name, name)), names.values()
        else:
            source = renamed(source, rename) if rename is not None else as_named_now(source, module)
        return WeightAssignment(module, source, ctx, elsewhere=elsewhere, strict=strict, dtype=wanted, within=within)

    def work(found: Path) -> WeightAssignment:
        placement = on_all("load_weights", ctx, lambda: settled(found))
        ctx.agree("load_weights", placement.facts())
        placement.read("load_weights")
        return placement

    placement = with_newest("load_weights", path_or_url(path), ctx, work)
    placement.put()
    return LoadedWeights(placement.path, placement.missing, placement.unexpected)


def read(
    path: str | Path,
    *,
    names: Names | None = None,
    object: str = "model",
    averages: bool = False,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Read tensors of a checkpoint, or of safetensors, as a dict: without a module, in one process.

    The pieces of all ranks are merged, and only those of the tensors that are asked for are read; the files of a
    checkpoint that they lie in are compared with their hashes first. Of tied weights the first name is there.

    Changes: nothing. Collectives: none.

    Args:
        path: As for `weft.load_weights`: a file, an index, a folder, a checkpoint, a directory of checkpoints, or the
            URL of one of these two.
        names: Which: a pattern in which `*` stays within one part of a name and `**` stands for any number of
            parts ("encoder.**"), several, or a function of the name. Default: all.
        object: Which module, of those in a checkpoint.
        averages: Of a checkpoint, read the averages that `average_weights` keeps instead of the weights they are of,
            in the dtype of these.
        device: Where the tensors are made.

    Returns:
        The tensors by name, in the dtype and shape they were saved in.

    Raises:
        CheckpointError: The files cannot be used or trusted, or hold no tensor of these names.
        OSError: A file cannot be read.
        ValueError: `names` cannot be used.

    Example:
        >>> import tempfile, weft
        >>> state, ctx = weft.checkpointable({"model": torch.nn.Linear(3, 2)}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = weft.save(state, folder, 1, ctx)
        ...     found = read(folder, names="bias")
        >>> {name: tuple(tensor.shape) for name, tensor in found.items()}
        {'bias': (2,)}
    """

    def work(found: Path) -> dict[str, torch.Tensor]:
        source = from_path("read", found, object, averages=averages)
        try:
            chosen = chosen_tensors("read", source.tensors, names, option="names")
            source.verify(chosen.values())
            made = {
                name: torch.empty(one.entry.shape, dtype=source.dtype_of(one), device=device)
                for name, one in chosen.items()
            }
            wanted = [Transfer(one, whole(one.entry.shape), made[name]) for name, one in chosen.items()]
            read_blocks(source.files, wanted, num_threads=1)
        finally:
            source.files.close()
        return made

    return with_newest("read", path_or_url(path), local(), work)
