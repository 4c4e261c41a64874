"""A checkpoint on its way: what each rank brings, and how the main rank makes a whole of it.

`save` does this at once, `save_async` beside the program; [Note: in the background] in save_async.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.checkpoint.compare_replicas import Replicas, differing, digests, fingerprints, refuse
from weft.checkpoint.format import commit
from weft.checkpoint.format.manifest import NAME, FileEntry, Manifest, Piece, TensorEntry, check
from weft.checkpoint.format.remote import Mirror, mirror_of
from weft.checkpoint.format.safetensors_write import digest_of, sync_folder, write_text
from weft.checkpoint.format.tensor_blocks import Block, Held, holders, writers
from weft.checkpoint.history import History, history_of
from weft.checkpoint.state.collect import Checkpoint, Content, collect
from weft.checkpoint.state.other_ranks import add_elsewhere
from weft.checkpoint.state.random_states import random_state
from weft.collectives.on_all_ranks import from_main, gathered, gathered_on_main
from weft.context import DistContext
from weft.context.placement import readable
from weft.errors import CheckpointError, listed

__all__ = ["Draft", "Outline", "complete", "lock", "outline", "outline_of", "start_draft"]


# -- what a rank brings ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What this rank brings to a checkpoint, without bytes of tensors; nothing in it changes any more.

    Attributes:
        tensors: All tensors of the state, by name; their pieces come from all ranks.
        sharded: Names of those that are sharded.
        same_as: Tensors that are the very same as another: its name.
        values: Plain values by object.
        blocks: Which block of which tensor this rank writes.
        of_rank: Plain values of this rank alone.
        replicas: Numbers that tell whether ranks that hold the same tensors hold the same values.
    """

    tensors: Mapping[str, TensorEntry]
    sharded: frozenset[str]
    same_as: Mapping[str, str]
    values: Mapping[str, Any]
    blocks: Mapping[str, Block]
    of_rank: Mapping[str, Any]
    replicas: Replicas


def outline(state: Checkpoint, ctx: DistContext) -> tuple[Outline, dict[str, torch.Tensor]]:
    """Read the state; also gives the live tensors whose blocks this rank writes.

    Raises:
        TypeError: Something in the state cannot be saved; the text names it.
    """
    content = collect(state)
    partly = add_elsewhere(content, state, ctx)
    ranks = holders((held for name, held in content.tensors.items() if ctx.rank in partly.get(name, (ctx.rank,))), ctx)
    ranks |= {name: tuple(sorted(there.intersection(ranks.get(name, there)))) for name, there in partly.items()}
    written = _share(content, ranks, ctx)
    of_rank: dict[str, Any] = {"rng": random_state(ctx)} if state.rng else {}
    if content.generators:
        of_rank["generators"] = content.generators
    several = {
        name: found
        for name, found in ranks.items()
        if len(found) > 1 and ctx.rank in found and name not in content.buffers
    }
    if ctx.world.pretended:  # there are no bytes to read
        return outline_of(content, written, of_rank), {held.name: held.local for held in written}
    replicas = fingerprints(_readable([content.tensors[name] for name in several], ctx), several)
    return outline_of(content, written, of_rank, replicas), _readable(written, ctx)


def outline_of(
    content: Content, written: Iterable[Held], of_rank: Mapping[str, Any], replicas: Replicas | None = None
) -> Outline:
    """What a rank brings that has a content and writes some of its tensors."""
    return Outline(
        tensors={name: TensorEntry(dtype=held.dtype, shape=held.shape) for name, held in content.tensors.items()},
        sharded=frozenset(name for name, held in content.tensors.items() if held.is_sharded),
        same_as=content.same_as,
        values=content.values,
        blocks={held.name: held.block for held in written},
        of_rank=of_rank,
        replicas=replicas or {},
    )


def _readable(tensors: Iterable[Held], ctx: DistContext) -> dict[str, torch.Tensor]:
    """What this rank holds of tensors, as bytes that can be read."""
    return readable({held.name: held.local.resolve_conj().resolve_neg() for held in tensors}, ctx)


def _share(content: Content, ranks: Mapping[str, Sequence[int]], ctx: DistContext) -> list[Held]:
    """The blocks that this rank writes: its share of the tensors that all hold, and of others where it is the first.

    Buffers are written by rank 0, together: where ranks have their own, as after a forward without a backward, those
    of one rank belong to each other.
    """
    tensors = content.tensors.values()
    sizes = {
        held.name: held.tensor.nbytes
        for held in tensors
        if not held.is_sharded and held.name not in content.buffers and len(ranks[held.name]) == ctx.world_size
    }
    chosen = writers(sizes, ctx.world_size)
    return [one for one in tensors if chosen.get(one.name, ranks[one.name][0]) == ctx.rank and one.block.size]


def _digests(brought: Outline) -> dict[str, str]:
    """The plain values of each object, and what tensors it has, as hashes to be compared."""
    texts = {key: [json.dumps(value)] for key, value in brought.values.items()}  # a NaN equals itself there
    for name, entry in brought.tensors.items():
        texts[name.partition("/")[0]].append(f"{name} {entry.dtype} {entry.shape} {name in brought.sharded};")
    for name, origin in brought.same_as.items():
        texts[name.partition("/")[0]].append(f"{name} = {origin};")
    return {key: hashlib.sha256("".join(text).encode()).hexdigest() for key, text in texts.items()}


# -- the hidden folder -------------------------------------------------------------------------------


class Draft(NamedTuple):
    """The hidden folder of one save and, on the main rank, the lock of the directory.

    Attributes:
        hidden: Where the files are written.
        final: Where they appear; a URL if they are sent there.
        mirror: Of a URL.
        history: What this job knows of the directory.
        ending: A context: however it is left, the lock is given back, and after an error the folder is removed.
    """

    hidden: Path
    final: Path
    mirror: Mirror | None
    history: History
    ending: contextlib.ExitStack


def start_draft(what: str, directory: Path, step: int, ctx: DistContext) -> Draft | None:
    """Lock the directory and make the hidden folder, on the main rank.

    Returns:
        None in an elastic job if there is nothing to save: the step has failed and is made again, or a replica that
        is gone has saved it.

    Raises:
        CheckpointError: Another job saves there, the step has already been saved, or a restart would take another one.
        PeerError: It failed on the main rank.
    """
    replicas = ctx.replicas
    if replicas is not None and any(gathered(what, ctx, lambda: replicas.broken)):
        return None
    history, mirror = history_of(ctx, directory), mirror_of(directory)
    local, final = directory if mirror is None else mirror.local, commit.target(directory, step)
    with contextlib.ExitStack() as ending:

        def start() -> list[str]:
            handle = lock(local)
            _held().add(handle)
            ending.callback(os.close, handle)
            ending.callback(_held().discard, handle)
            if mirror is not None:
                mirror.refresh()
            history.check(directory, step, commit.named_folders(local))
            if replicas is not None and history.is_of_another_replica(local / final.name):
                return ["", history.name_run()]
            if mirror is not None:
                _make_room(mirror, final, step, history)
            folder = commit.begin(local, step)
            ending.push(lambda kind, *_: shutil.rmtree(folder, ignore_errors=True) if kind else None)
            return [folder.name, history.name_run()]

        hidden, run = from_main(what, ctx, start)
        history.belongs_to(run)
        return Draft(local / hidden, final, mirror, history, ending.pop_all()) if hidden else None


def _make_room(mirror: Mirror, final: Path, step: int, history: History) -> None:
    """Remove what was never committed, and a damaged checkpoint of the same step."""
    there = (mirror.local / final.name).exists()
    if there and not history.is_damaged(final.name) and mirror.is_complete(final.name):
        raise commit.saved_already(final, step)
    if there:
        mirror.delete(final.name)
    mirror.remove_leftovers()


def lock(directory: Path) -> int:
    """Take the lock of a directory: one job saves at a time. It is given back by closing the file.

    Raises:
        CheckpointError: Somebody else holds it.
    """
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for folder in made:
        sync_folder(folder.parent)  # or a power cut takes the new directory away, and all that is in it
    handle = os.open(directory / ".saving", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with contextlib.suppress(PermissionError):  # another user made it
        os.fchmod(handle, 0o600)  # whoever may read it may take the lock
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise CheckpointError(
            f"save: another process is saving into {directory}",
            found="the lock of the directory is held",
            expected="one job per directory, one save at a time",
            fix="give each run a directory of its own",
        ) from error
    return handle


@functools.cache
def _held() -> set[int]:
    """The locks that this process holds. A process forked from it lets go of them.

    The workers of a loader may be forked during a save, and outlive a killed trainer by seconds: the
    trainer that takes its place would find the directory locked.
    """
    held: set[int] = set()

    def let_go() -> None:
        while held:
            os.close(held.pop())

    os.register_at_fork(after_in_child=let_go)
    return held


# -- writing and committing --------------------------------------------------------------------------


def complete(
    what: str,
    draft: Draft,
    step: int,
    brought: Outline,
    write: Callable[[Path], FileEntry],
    ctx: DistContext,
    *,
    keep: int | None,
) -> None:
    """Write this rank's file and, when all ranks have, commit; then remove what is too old.

    Raises:
        CheckpointError: The state differs between the ranks.
        PeerError: Another rank failed; nothing was committed.
        OSError: Writing failed.
    """
    name = f"rank-{ctx.rank:05d}-of-{ctx.world_size:05d}.safetensors"

    def written() -> dict[str, Any]:
        if draft.mirror is not None:
            draft.hidden.mkdir(parents=True, exist_ok=True)  # the main rank has made that of its machine
        entry = write(draft.hidden / name)
        if draft.mirror is not None:
            draft.mirror.put(draft.hidden / name, draft.final.name)
        # Read back if older ones are removed for it.
        if keep is not None and _read_back(draft, name, entry.hash) != entry.digest:
            problem = "the file system returns other bytes than were written; nothing was committed"
            raise OSError(errno.EIO, problem, str(draft.final / name))
        if draft.mirror is not None:
            (draft.hidden / name).unlink()
        return {
            "file": name,
            "entry": vars(entry),
            "blocks": brought.blocks,
            "digests": _digests(brought),
            "replicas": digests(brought.replicas),
            "rank": brought.of_rank,
        }

    def committed() -> list[str]:
        _check_alike(parts)
        doubtful = differing([part["replicas"] for part in parts])
        if doubtful:
            return doubtful
        write_text(draft.hidden / NAME, _manifest(step, draft.history.run, brought, parts).text())
        if draft.mirror is not None:
            draft.mirror.commit(draft.hidden / NAME, draft.final.name)
        commit.finish(draft.hidden, draft.final if draft.mirror is None else draft.mirror.local / draft.final.name)
        draft.history.saved(draft.final)
        if keep is not None and draft.mirror is None:
            commit.prune(draft.final.parent, keep, draft.final, draft.history)
        elif keep is not None:
            _prune(draft, keep)
        return []

    parts = gathered_on_main(what, ctx, written)
    doubtful = from_main(what, ctx, committed)
    if doubtful:
        told = gathered_on_main(what, ctx, lambda: {group: brought.replicas.get(group, {}) for group in doubtful})
        from_main(what, ctx, lambda: refuse(told))


def _read_back(draft: Draft, name: str, kind: str) -> str:
    if draft.mirror is None:
        return digest_of(draft.hidden / name, kind)
    return draft.mirror.digest(name, draft.final.name, kind)


def _prune(draft: Draft, keep: int) -> None:
    """As `commit.prune`, where a URL says."""
    assert draft.mirror is not None
    saved = draft.final.name
    try:
        names = [name for name in draft.mirror.refresh() if not draft.history.is_damaged(name)]
        for name in [name for name in names if name == saved or draft.mirror.is_complete(name)][:-keep]:
            if name != saved:
                draft.mirror.delete(name)
    except OSError as error:
        text = f"weft: {draft.final} is saved, but older checkpoints could not be removed: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _check_alike(parts: Sequence[Mapping[str, Any]]) -> None:
    different = [
        f"{key} on rank {rank}"
        for rank, part in enumerate(parts)
        for key, digest in part["digests"].items()
        if digest != parts[0]["digests"].get(key)
    ]
    if different:
        raise CheckpointError(
            "save: the state differs between the ranks",
            found=listed(different),
            expected="the same plain values, and the same tensors, sharded the same way, on all ranks",
            fix="gather it first: weft.collectives.gather_objects(value, ctx)",
        )


def _manifest(step: int, run: str | None, brought: Outline, parts: Sequence[Mapping[str, Any]]) -> Manifest:
    pieces: dict[str, list[Piece]] = {name: [] for name in brought.tensors}
    for part in parts:
        for name, (offsets, shape) in part["blocks"].items():
            pieces[name].append(Piece(file=part["file"], offsets=tuple(offsets), shape=tuple(shape)))
    tensors = {name: replace(entry, pieces=tuple(pieces[name])) for name, entry in brought.tensors.items()}
    for name, origin in brought.same_as.items():
        tensors[name] = replace(brought.tensors[origin], same_as=origin)
    manifest = Manifest(
        step=step,
        world_size=len(parts),
        tensors=tensors,
        values=dict(brought.values),
        ranks=[part["rank"] for part in parts],
        files={part["file"]: FileEntry(**part["entry"]) for part in parts},
        run=run,
    )
    wrong = check(manifest)
    if wrong:
        raise CheckpointError(
            "save: the ranks do not hold each tensor exactly once",
            found=listed(wrong),
            expected="tensors that are whole on all ranks, or sharded without gaps",
            fix="report it with the output of weft.explain(ctx)",
        )
    return manifest
