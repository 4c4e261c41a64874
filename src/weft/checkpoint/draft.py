"""A checkpoint on its way: what each rank brings, and how the main rank makes a whole of it.

`save` does this at once, `save_async` beside the program; [Note: in the background] in save_async.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.checkpoint.compare_replicas import Replicas, begin_fingerprints, differing_groups, digests, raise_different
from weft.checkpoint.format.manifest import (
    Damage,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    check,
    parse_manifest,
    step_of,
)
from weft.checkpoint.format.safetensors_write import write_parts
from weft.checkpoint.format.tensor_blocks import ranks_with_same_blocks, share_out_writes
from weft.checkpoint.history import History, history_of
from weft.checkpoint.state.collect import Checkpoint, Content, collect, plain_name
from weft.checkpoint.state.other_ranks import add_other_ranks
from weft.checkpoint.state.random_states import random_state
from weft.checkpoint.storage.find import checked_manifest, step_folder, storage_of
from weft.checkpoint.storage.protocol import Draft, Storage, changed_bytes
from weft.collectives.on_all_ranks import from_main, gathered, gathered_on_main
from weft.context import DistContext
from weft.context.placement import readable
from weft.contract import buffers_alone, trained_alone
from weft.errors import CheckpointError, listed
from weft.tensors.blocks import Block, Held

_NAMED = 64  # plain values of one object that are compared each by itself; more of them together
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
        replicas: Numbers that tell whether ranks that hold the same tensors hold the same values. On a CPU a thread may
            still make them: the state must not change before it has.
        alone: Parameters whose gradients no strategy averages, by name.
        own_buffers: Buffers that no strategy keeps equal, by name.
        plain: Objects that are no modules and no optimizers.
        others: Plain values of ranks that take no part, as their checkpoint is imported.
    """

    tensors: Mapping[str, TensorEntry]
    sharded: frozenset[str]
    same_as: Mapping[str, str]
    values: Mapping[str, Any]
    blocks: Mapping[str, Block]
    of_rank: Mapping[str, Any]
    replicas: Future[Replicas]
    alone: Sequence[str] = ()
    own_buffers: Sequence[str] = ()
    plain: Sequence[str] = ()
    others: Sequence[Mapping[str, Any]] = ()


def outline(state: Checkpoint, ctx: DistContext) -> tuple[Outline, dict[str, torch.Tensor]]:
    """Read the state; also gives the live tensors whose blocks this rank writes.

    Raises:
        TypeError: Something in the state cannot be saved; the text names it.
    """
    content = collect(state)
    partly = add_other_ranks(content, state, ctx)
    ranks = ranks_with_same_blocks(
        (held for name, held in content.tensors.items() if ctx.rank in partly.get(name, (ctx.rank,))), ctx
    )
    ranks |= {name: tuple(sorted(there.intersection(ranks.get(name, there)))) for name, there in partly.items()}
    written = _blocks_to_write(content, ranks, ctx)
    of_rank: dict[str, Any] = {"rng": random_state(ctx)} if state.rng else {}
    if content.generators:
        of_rank["generators"] = content.generators
    alone, own_buffers = (_named(state, ctx, which) for which in (trained_alone, buffers_alone))
    kept_equal = content.buffers.difference(own_buffers)  # those of rank 0 are everyone's in the next forward
    several = {
        name: found for name, found in ranks.items() if len(found) > 1 and ctx.rank in found and name not in kept_equal
    }
    values = {held.name: held.local for held in (*written, *(content.tensors[name] for name in several))}
    if ctx.world.pretended:  # there are no bytes to read
        several = {}
    else:
        values = readable({name: value.resolve_conj().resolve_neg() for name, value in values.items()}, ctx)
    replicas = begin_fingerprints({name: values[name] for name in several}, several)
    plain = [key for key, obj in state.objects.items() if not isinstance(obj, (nn.Module, torch.optim.Optimizer))]
    brought = outline_of(content, written, of_rank, replicas)
    brought = replace(brought, alone=alone, own_buffers=own_buffers, plain=plain)
    return brought, {held.name: values[held.name] for held in written}


def _named(state: Checkpoint, ctx: DistContext, which: Callable[[nn.Module, DistContext], list[str]]) -> list[str]:
    modules = {key: obj for key, obj in state.objects.items() if isinstance(obj, nn.Module)}
    return [f"{key}/{plain_name(name)}" for key, module in modules.items() for name in which(module, ctx)]


def outline_of(
    content: Content, written: Iterable[Held], of_rank: Mapping[str, Any], replicas: Future[Replicas] | None = None
) -> Outline:
    """What a rank brings that has a content and writes some of its tensors."""
    return Outline(
        tensors={name: TensorEntry(dtype=held.dtype, shape=held.shape) for name, held in content.tensors.items()},
        sharded=frozenset(name for name, held in content.tensors.items() if held.is_sharded),
        same_as=content.same_as,
        values=content.values,
        blocks={held.name: held.block for held in written},
        of_rank=of_rank,
        replicas=replicas or begin_fingerprints({}, {}),
    )


def _blocks_to_write(content: Content, ranks: Mapping[str, Sequence[int]], ctx: DistContext) -> list[Held]:
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
    chosen = share_out_writes(sizes, ctx.world_size)
    first = {name: chosen.get(name, there[0]) for name, there in ranks.items() if there}
    return [one for one in tensors if first.get(one.name) == ctx.rank and one.block.size]


def _digests(brought: Outline) -> dict[str, str]:
    """The plain values of each object, by their names, and what tensors it has, as hashes to be compared."""
    texts: dict[str, list[str]] = {key: [] for key in brought.values}
    for key, value in brought.values.items():
        named = isinstance(value, dict) and len(value) <= _NAMED
        for name, one in value.items() if named else [("", value)]:
            texts[f"{key}/{name}" if name else key] = [json.dumps(one)]  # a NaN equals itself there
    for name, entry in brought.tensors.items():
        texts[name.partition("/")[0]].append(f"{name} {entry.dtype} {entry.shape} {name in brought.sharded};")
    for name, origin in brought.same_as.items():
        texts[name.partition("/")[0]].append(f"{name} = {origin};")
    return {key: hashlib.sha256("".join(text).encode()).hexdigest() for key, text in texts.items()}


# -- the draft ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One save: where it writes and, on the main rank, what it found there.

    Attributes:
        what: The function that saves, for errors.
        storage: The directory, or the URL.
        name: Of the checkpoint.
        draft: Where the files are written until they are a checkpoint.
        history: What this job knows of the directory.
        existing: The whole checkpoint that has this name already.
        is_abandoned: It belongs to a branch that was abandoned, and makes room; otherwise only an equal one is saved.
        ending: A context: however it is left, the lock is given back, and after an error the draft is removed.
    """

    what: str
    storage: Storage
    name: str
    draft: Draft
    history: History
    existing: Manifest | None = None
    is_abandoned: bool = False
    ending: contextlib.ExitStack

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        return self.storage.where / self.name


def start_saving(
    what: str, directory: Path, step: int, brought: Outline, ctx: DistContext, *, fresh: bool = False
) -> Saving | None:
    """Lock the directory and begin a draft, on the main rank.

    Args:
        what: The caller's name.
        directory: Of the run.
        step: Of the checkpoint.
        brought: What this rank has to save.
        ctx: The context.
        fresh: Whether checkpoints of other runs that this job finds when it comes make room.

    Returns:
        None in an elastic job if there is nothing to save: the step has failed and is made again, or a replica that
        is gone has saved it.

    Raises:
        CheckpointError: Another job saves there, the step has already been saved with other values, or a restart would
            take another one.
        PeerError: It failed on the main rank.
    """
    replicas = ctx.replicas
    if replicas is not None and any(gathered(what, ctx, lambda: replicas.broken)):
        return None
    history, storage, name = history_of(ctx, directory), storage_of(directory), step_folder(directory, step).name
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as ending:

        def start() -> list[str]:
            ending.enter_context(storage.lock())
            there = storage.names()
            if replicas is not None and history.is_of_another_replica(storage, name, there):
                return ["", "", history.name_run()]
            if fresh and not ctx.attempt:
                there = history.begin_anew(storage, there)
            history.check(storage, step, there)
            if name in there:
                found.update(_existing_checkpoint(storage, name, history, brought))
            draft = storage.begin(name)
            ending.push(lambda kind, *_: storage.abandon(draft) if kind else None)
            return [*draft, history.name_run()]

        folder, suffix, run = from_main(what, ctx, start)
        history.belongs_to(run)
        if not folder:
            return None
        draft = Draft(folder, suffix)
        found |= {"storage": storage, "name": name, "draft": draft, "history": history}
        return Saving(what=what, ending=ending.pop_all(), **found)


def _existing_checkpoint(storage: Storage, name: str, history: History, brought: Outline) -> dict[str, Any]:
    """What has the name of a checkpoint that is to be saved.

    Raises:
        CheckpointError: It is whole and has other values, or is of another version of the format.
        OSError: It cannot be read.
    """
    try:
        existing = checked_manifest(storage, name, content=True)
    except Damage:
        return {}  # a run that went back behind it comes to this step again
    is_abandoned = name in history.abandoned
    if not is_abandoned and json.dumps(existing.values) != json.dumps(brought.values):
        raise _saved_already(storage.where / name)
    return {"existing": existing, "is_abandoned": is_abandoned}


def _saved_already(path: Path) -> CheckpointError:
    return CheckpointError(
        f"save: step {step_of(path.name)} has already been saved",
        found=f"{path}, with other values",
        expected="a new step: existing checkpoints are never changed",
        fix=f'weft.save(state, "{path.parent}-2", {step_of(path.name)}, ctx)  # or another step',
    )


# -- writing and committing --------------------------------------------------------------------------


class Keep(NamedTuple):
    """Which checkpoints stay, besides the new one.

    Attributes:
        newest: How many by step; None: all.
        best: How many by score; None: all that have one.
    """

    newest: int | None = None
    best: int | None = None


def complete(
    saving: Saving, brought: Outline, parts: Iterable[Any], ctx: DistContext, *, keep: Keep, score: float | None = None
) -> None:
    """Write this rank's file, part by part, and commit when all ranks have; then remove what is too old.

    Raises:
        CheckpointError: The state differs between the ranks, or from what has been saved as this step.
        PeerError: Another rank failed; nothing was committed.
        OSError: Writing failed.
    """
    what, storage, draft = saving.what, saving.storage, saving.draft
    name = draft.file(ctx.rank, ctx.world_size)

    def written() -> dict[str, Any]:
        with storage.new_file(draft, name) as file:
            entry = write_parts(file, parts)
        if not _holds(storage, draft, name, entry):
            raise changed_bytes(saving.path / name)
        return {
            "file": name,
            "entry": vars(entry),
            "blocks": brought.blocks,
            "digests": _digests(brought),
            "replicas": digests(brought.replicas.result()),
            "rank": brought.of_rank,
        }

    def committed() -> list[str]:
        _check_alike(of_ranks)
        doubtful = differing_groups([one["replicas"] for one in of_ranks])
        if doubtful:
            return doubtful
        manifest = _manifest(step_of(saving.name), saving.history.run, score, brought, of_ranks)
        if saving.existing is not None and _are_equal(manifest, saving.existing):  # a save that is tried again
            storage.abandon(draft)
        elif saving.existing is not None and not saving.is_abandoned:
            raise _saved_already(saving.path)
        else:
            text = manifest.text()
            parse_manifest(text, saving.path)  # what could not be read again is not written
            storage.commit(draft, saving.name, text, aside="discarded" if saving.is_abandoned else "damaged")
        _after_commit(saving, keep)
        return []

    saving.history.note_attempt(saving.name)
    of_ranks = gathered_on_main(what, ctx, written)
    doubtful = from_main(what, ctx, committed)
    if not doubtful:
        saving.history.note_saved(saving.name)
    else:
        told = gathered_on_main(
            what, ctx, lambda: {group: brought.replicas.result().get(group, {}) for group in doubtful}
        )
        from_main(what, ctx, lambda: raise_different(told, brought.alone, brought.own_buffers, brought.plain))


def _holds(storage: Storage, draft: Draft, name: str, entry: FileEntry) -> bool:
    """Whether a file of a draft is read back as it was written."""
    try:
        return storage.digest(draft.folder, name, entry.hash) == entry.digest
    except ValueError:  # shorter
        return False


def _are_equal(new: Manifest, existing: Manifest) -> bool:
    """Whether two saves of a step have the same content, whatever their files are called."""
    names = dict(zip(new.files, existing.files, strict=False))
    text = new.text().decode().partition("\n")[2]
    for name, other in names.items():
        text = text.replace(json.dumps(name), json.dumps(other))
    return text == existing.text().decode().partition("\n")[2]


def _after_commit(saving: Saving, keep: Keep) -> None:
    """What comes after the checkpoint is there. If that fails it is there all the same, so nothing raises."""
    storage, history = saving.storage, saving.history
    failed: list[str] = []

    def attempt(work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  (the caller is not to believe that nothing was saved)
            failed.append(f"{type(error).__name__}: {error}")

    attempt(lambda: storage.after_commit(saving.name))
    for name in sorted(history.abandoned):
        if step_of(name) > step_of(saving.name):
            attempt(partial(_discard, storage, history, name))
    if not failed:  # else a power cut might take the new one away
        attempt(lambda: _prune(saving, keep, attempt))
    if failed:
        text = f"weft: {saving.path} is saved, but what follows a save has failed: {listed(failed)}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _discard(storage: Storage, history: History, name: str) -> None:
    storage.set_aside(name)
    history.abandoned.discard(name)


def _prune(saving: Saving, keep: Keep, attempt: Callable[[Callable[[], object]], None]) -> None:
    """Remove all but the newest complete checkpoints, those of the best scores, and the one just saved.

    Those that are known to be damaged do not count.
    """
    if keep.newest is None:
        return
    storage, history = saving.storage, saving.history
    there = [name for name in storage.names() if name == saving.name or history.counts(storage, name)]
    scores = {name: history.facts(storage, name).score for name in there} if keep.best != 0 else {}
    ranked = sorted((score, step_of(name), name) for name, score in scores.items() if score is not None)
    kept = {saving.name, *there[-keep.newest :], *(name for _, _, name in ranked[: keep.best])}
    for name in there:
        if name not in kept:
            attempt(partial(storage.delete, name))
            history.forget(name)


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
            fix="value = weft.collectives.gather_objects(value, ctx)  # in state_dict(), of each rank's own: a list. "
            "What should be the same on all ranks follows from weft.gather, weft.reduce or weft.broadcast",
        )


def _manifest(
    step: int, run: str | None, score: float | None, brought: Outline, parts: Sequence[Mapping[str, Any]]
) -> Manifest:
    pieces: dict[str, list[Piece]] = {name: [] for name in brought.tensors}
    for part in parts:
        for name, (offsets, shape) in part["blocks"].items():
            pieces[name].append(Piece(file=part["file"], offsets=tuple(offsets), shape=tuple(shape)))
    tensors = {name: replace(entry, pieces=tuple(pieces[name])) for name, entry in brought.tensors.items()}
    for name, origin in brought.same_as.items():
        tensors[name] = replace(brought.tensors[origin], same_as=origin)
    ranks = [*(part["rank"] for part in parts), *brought.others]
    manifest = Manifest(
        step=step,
        world_size=len(ranks),
        tensors=tensors,
        values=dict(brought.values),
        ranks=ranks,
        files={part["file"]: FileEntry(**part["entry"]) for part in parts},
        run=run,
        score=float(score) if score is not None and math.isfinite(score) else None,
    )
    wrong = check(manifest)
    if wrong:
        raise CheckpointError(
            "save: the ranks do not hold each tensor exactly once",
            found=listed(wrong),
            expected="tensors that are whole on all ranks, or sharded without gaps",
            fix="value.full_tensor()  # or shard it over axes of ctx.mesh, which weft.start(mesh=...) names",
        )
    return manifest
