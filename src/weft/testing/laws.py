"""The laws every transform keeps, as functions: for the table of this package and for your own.

A `Row` says how to apply one transform to the parts of a small training job. Each law takes a row
and raises `AssertionError` if the transform breaks it. `check_laws(row)` runs them all.

    1. one_rank_changes_nothing     on one rank the parameters are those of plain torch, bit for bit
    2. names_stay                   parameter names, order, state_dict keys, class, attributes
    3. twice_raises                 AlreadyApplied, and a stale context is noticed
    4. ranks_equal_reference        n ranks = the naive loop in one process
    6. pairs_agree                  any two rows, in both orders: the reference, or OrderError
    7. leaves_no_trace              environment, random state, default dtype, threads, groups
    8. failure_reaches_all          bad input on one rank: every rank raises, in seconds

(5, saving and loading, is tested with the checkpoints.)
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from weft import torch_internals
from weft.collectives import reduce
from weft.context import DistContext, local
from weft.context.placement import to_device
from weft.contract import KeepsParameters, layouts, offered
from weft.errors import AlreadyApplied, OrderError, PeerError, WeftError
from weft.tensors import dtensor
from weft.tensors.remote_parameter import is_elsewhere
from weft.testing.equivalence import largest_difference
from weft.testing.law_job import (
    Job,
    Model,
    Parts,
    Row,
    build,
    finish_step,
    loss_of,
    plain_loader,
    prepare,
    reference,
    train,
)
from weft.testing.ranks import run_ranks

__all__ = [
    "LAWS",
    "Job",
    "Parts",
    "Row",
    "check_laws",
    "failure_reaches_all",
    "leaves_no_trace",
    "names_stay",
    "one_rank_changes_nothing",
    "pairs_agree",
    "ranks_equal_reference",
    "reference",
    "train",
    "twice_raises",
]


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank holds of the state, by name."""
    return {name: dtensor.local(value).clone() for name, value in module.state_dict().items() if not value.is_meta}


def _with_needs(row: Row) -> list[Row]:
    return [*row.needs, row]


def _steps_of(rows: Sequence[Row]) -> int:
    """Micro-batches per window, written in a row's name as `accumulate_grads[3]`."""
    names = [row.name for row in rows if row.name.startswith("accumulate_grads")]
    return int(names[0].partition("[")[2].partition("]")[0].partition(",")[0] or 1) if names else 1


def one_rank_changes_nothing(row: Row, job: Job | None = None) -> None:
    """Law 1: on one rank, training gives the parameters of plain torch, bit for bit."""
    job = replace(job or (row.job or Job)(), dtype=row.dtype)
    rows = _with_needs(row)
    expected = reference(job, _steps_of(rows), row.device)
    difference = largest_difference(expected, train(local(device=row.device), rows, job))
    assert difference <= row.one_rank_tolerance, f"{row.name}: on one rank parameters differ by {difference}"


def names_stay(row: Row, ranks: int = 2) -> None:
    """Law 2: names, order, keys, class and attributes of the module stay, and it can be copied."""
    run_ranks(_check_names, ranks, row, **_world(row, ranks))


def _check_names(ctx: DistContext, row: Row) -> None:
    job = (row.job or Job)(dtype=row.dtype)
    before, untouched = job.model().to(ctx.device), plain_loader(ctx, job, _with_needs(row))
    parts, ctx = prepare(ctx, job, _with_needs(row))
    module = parts.module
    assert isinstance(module, Model), f"{row.name}: the class became {type(module)}"
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in before.named_parameters()], row.name
    assert list(module.state_dict()) == list(before.state_dict()), row.name
    assert module.note == "mine" and module.third.weight is module.second.weight, row.name
    assert isinstance(parts.loader, DataLoader), f"{row.name}: the loader became {type(parts.loader)}"
    kept = ("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "prefetch_factor")
    changed = [name for name in kept if getattr(parts.loader, name) != getattr(untouched, name)]
    assert not changed, f"{row.name}: the loader lost {changed}"
    elsewhere = any(offer.elsewhere for offer in offered(module, KeepsParameters))
    elsewhere |= any(map(is_elsewhere, module.parameters()))
    if elsewhere or any(dtensor.is_sharded(p) for p in module.parameters()):
        return  # the parts of other ranks cannot be copied
    copied = copy.deepcopy(module)
    x = job.dataset().tensors[0][:2].to(ctx.device)
    with torch.no_grad():
        assert torch.allclose(copied(x), before.to(x.dtype)(x), atol=0.05) or ctx.rank, f"{row.name}: the copy differs"
    pickle.loads(pickle.dumps(module))


def _world(row: Row, ranks: int) -> dict[str, Any]:
    """Where a row runs, and the mesh that it wants where there are several ranks."""
    mesh = {"mesh": row.mesh} if row.mesh is not None and ranks > 1 else {}
    return {"device": row.device, "backend": row.backend, **mesh}


def _before(ctx: DistContext, row: Row) -> tuple[Parts, DistContext]:
    """The parts that a row is applied to."""
    job = (row.job or Job)(dtype=row.dtype)
    parts, ctx = build(ctx, job, row.needs)
    if row.on_optimizer or row.on_both:
        parts.optimizer = job.optimizer(parts.module)
    return parts, ctx


def twice_raises(row: Row, ranks: int = 2) -> None:
    """Law 3: a second application raises AlreadyApplied, also with a context that forgot the first."""
    run_ranks(_check_twice, ranks, row, **_world(row, ranks))


def _check_twice(ctx: DistContext, row: Row) -> None:
    parts, before = _before(ctx, row)
    after = row.apply(parts, before)
    state = _state(parts.module)
    for known in (after, before):
        try:
            row.apply(parts, known)
        except AlreadyApplied as error:
            assert "found:" in str(error) and "fix:" in str(error), str(error)
        else:
            raise AssertionError(f"{row.name}: a second application was accepted")
    for name, value in _state(parts.module).items():
        assert torch.equal(value, state[name]), f"{row.name}: refused, but {name} changed"
    assert before.applied == after.applied[: len(before.applied)], f"{row.name}: changed the context it was given"


def ranks_equal_reference(row: Row, ranks: int = 2, job: Job | None = None) -> None:
    """Law 4: training on several ranks gives the parameters of the naive loop in one process."""
    job = replace(job or (row.job or Job)(), dtype=row.dtype)
    rows = _complete(_with_needs(row))
    expected = reference(job, _steps_of(rows), row.device)
    for rank, found in enumerate(run_ranks(train, ranks, rows, job, **_world(row, ranks))):
        difference = largest_difference(expected, found)
        assert difference <= row.tolerance, f"{row.name}: rank {rank} of {ranks} differs by {difference}"


def _complete(rows: list[Row]) -> list[Row]:
    """Training on several ranks needs something that makes the gradients equal."""
    if any(row.synchronizes for row in rows):
        return rows
    return [*rows, PLAIN_SYNC]  # last: it asks where gradients are to be summed


def pairs_agree(one: Row, two: Row, ranks: int = 2, job: Job | None = None) -> str:
    """Law 6: two rows in this order give the reference, or raise OrderError naming the right order.

    Returns:
        "agrees" or "refused".
    """
    job = replace(
        job or (one.job or two.job or Job)(),
        dtype=torch.float32 if torch.float32 in (one.dtype, two.dtype) else torch.float64,
    )
    needs = [row for row in (*one.needs, *two.needs) if row.name not in (one.name, two.name)]
    rows = [*dict.fromkeys(needs), one, two]
    found = run_ranks(_train_pair, ranks, rows, job, **_world(one if one.mesh else two, ranks))
    texts = [text for text in found if isinstance(text, str)]
    if texts:
        assert len(texts) == ranks, f"{one.name}, {two.name}: refused on {len(texts)} of {ranks} ranks: {texts[0]}"
        for text in texts:
            assert one.name.partition("[")[0] in text and two.name.partition("[")[0] in text, text
            assert "expected:" in text, text
        return "refused"
    expected = reference(job, _steps_of(rows), one.device)
    for rank, parameters in enumerate(found):
        difference = largest_difference(expected, parameters)
        limit = max(one.tolerance, two.tolerance, 1e-6 if job.dtype is torch.float32 else 0)
        assert difference <= limit, f"{one.name}, then {two.name}: rank {rank} differs by {difference}"
    return "agrees"


def _train_pair(ctx: DistContext, rows: list[Row], job: Job) -> list[torch.Tensor] | str:
    try:
        return train(ctx, _complete(rows), job)
    except OrderError as error:
        return str(error)


def leaves_no_trace(row: Row, ranks: int = 2) -> None:
    """Law 7: the process is as before, and everything is collected once it is dropped."""
    run_ranks(_check_trace, ranks, row, **_world(row, ranks))


def _check_trace(ctx: DistContext, row: Row) -> None:
    job = (row.job or Job)(dtype=row.dtype)
    before = _process_state()
    parts, after = prepare(ctx, job, _with_needs(row))
    if any(r.synchronizes for r in _with_needs(row)):
        _train_once(parts, job, after)
    changed = [name for name, value in _process_state().items() if value != before[name]]
    assert not changed, f"{row.name}: {', '.join(changed)} changed"
    refs = [weakref.ref(part) for part in (parts.module, parts.loader, parts.optimizer) if part is not None]
    first = next(parts.module.parameters())
    refs.append(weakref.ref(first))
    del parts, first
    gc.collect()
    alive = [type(ref()).__name__ for ref in refs if ref() is not None]
    assert not alive, f"{row.name}: still alive after del and one collection: {alive}"
    del after


def _train_once(parts: Parts, job: Job, ctx: DistContext) -> None:
    """One backward pass and step, so that whatever is made lazily is there."""
    assert parts.optimizer is not None
    with torch.random.fork_rng(devices=[]):  # torch's own DataLoader draws a seed for its workers
        window = next(iter(parts.loader))
        batch = next(iter(window)) if hasattr(window, "denominator") else window
    features, classes = to_device(batch, ctx)
    loss_of(parts.module, features, classes, 1.0).backward()
    finish_step(parts.module, parts.optimizer, job, ctx)


def _process_state() -> dict[str, object]:
    return {
        # inductor sets some of these when it compiles for the first time
        "environment": {
            name: text for name, text in os.environ.items() if not name.startswith(("TORCHINDUCTOR_", "TRITON_"))
        },
        "torch random state": torch.get_rng_state().tolist(),
        "python random state": random.getstate(),
        "numpy random state": [np.asarray(part).tolist() for part in np.random.get_state()],
        "default dtype": torch.get_default_dtype(),
        "default device": torch.empty(0).device,
        "gradients": torch.is_grad_enabled(),
        "torch threads": torch.get_num_threads(),
        "threads": threading.active_count(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "groups": len(torch_internals.world.found.pg_map) if dist.is_initialized() else 0,
    }


def failure_reaches_all(row: Row, ranks: int = 2, limit_s: float = 10.0) -> None:
    """Law 8: if the transform refuses on one rank, every rank raises within seconds and knows which."""
    if row.break_input is None:
        return
    for rank, (kind, culprit, seconds, changed) in enumerate(
        run_ranks(_check_failure, ranks, row, timeout_s=2 * limit_s, **_world(row, ranks))
    ):
        assert kind != "nothing", f"{row.name}: rank {rank} did not notice"
        assert seconds < limit_s, f"{row.name}: rank {rank} needed {seconds:.1f} s to notice"
        assert rank == ranks - 1 or culprit == ranks - 1, f"{row.name}: rank {rank} got {kind}, blames {culprit}"
        assert not changed, f"{row.name}: rank {rank} changed {changed}"


def _check_failure(ctx: DistContext, row: Row) -> tuple[str, int, float, list[str]]:
    assert row.break_input is not None
    parts, ctx = _before(ctx, row)
    state = _state(parts.module)
    hooks = _count_hooks(parts.module)
    begin = time.monotonic()
    kind, culprit = "nothing", -1
    try:
        (row.break_input if ctx.rank == ctx.world_size - 1 else row.apply)(parts, ctx)
        ctx.agree("after the transform")  # local transforms: the next meeting shows it
    except PeerError as error:
        kind, culprit = "PeerError", error.rank
    except (WeftError, ValueError, TypeError) as error:
        kind = type(error).__name__
        culprit = ctx.world_size - 1 if f"on rank {ctx.world_size - 1}" in str(error) else -1
    seconds = time.monotonic() - begin
    changed = [name for name, value in _state(parts.module).items() if not torch.equal(value, state[name])]
    changed += ["hooks"] if _count_hooks(parts.module) != hooks else []
    return kind, culprit, seconds, changed


def _count_hooks(module: nn.Module) -> int:
    hooks = (torch_internals.FORWARD_HOOKS, torch_internals.FORWARD_PRE_HOOKS)
    return sum(len(kind.of(m)) for m in module.modules() for kind in hooks)


def _sync_plainly(parts: Parts, ctx: DistContext) -> DistContext:
    """Sum gradients by hand, as a row of its own: the laws do not lean on `replicate`."""
    if ctx.world_size > 1:
        for parameter, layout in zip(parts.module.parameters(), layouts(parts.module, ctx).values(), strict=True):
            axes = [axis for axis in layout.reduce_over if ctx.axis_size(axis) > 1]
            if axes and not parameter.is_meta:
                parameter.register_hook(partial(reduce, ctx=ctx.on(axes), op="sum"))
    return ctx


PLAIN_SYNC = Row(name="plain sync", apply=_sync_plainly, synchronizes=True)


LAWS: Mapping[str, Callable[[Row], None]] = MappingProxyType(
    {
        "one_rank_changes_nothing": one_rank_changes_nothing,
        "names_stay": names_stay,
        "twice_raises": twice_raises,
        "ranks_equal_reference": ranks_equal_reference,
        "leaves_no_trace": leaves_no_trace,
        "failure_reaches_all": failure_reaches_all,
    }
)


def check_laws(row: Row) -> None:
    """Run every law that concerns one row alone.

    Raises:
        AssertionError: A law is broken; the text says which and how.
        RanksFailed: It is broken on some rank, or the ranks hang.
    """
    for law in LAWS.values():
        law(row)
