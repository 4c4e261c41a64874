"""Random numbers that do not depend on who draws them: seeds without collisions, and numbers by counting.

[Note: seeds] torch keeps 32 bits of a seed on the CPU. Hashes of 32 bits collide among some ten thousand
workers, so the seeds of torch are counted up from one hash: rank and worker differ in the count.
Python and numpy take seeds of any length, and get the whole hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Self

import numpy as np
import torch

from weft.checks import check_choice, check_count
from weft.collectives.objects import broadcast
from weft.context import DistContext
from weft.errors import type_error
from weft.keyed_random.philox import philox
from weft.tensors.rng_state import DeviceRng, RngState

__all__ = ["Seeded", "Seeds", "keyed_normal", "keyed_uniform", "mix", "seeded", "set_seed", "sync_rng", "worker_seeds"]

_WORKERS = 4096  # per rank: more would share a stream with the next rank


def mix(*parts: object) -> int:
    """Hash some facts into a seed, 0 <= seed < 2**63, the same in every process.

    Example:
        >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
        (True, False)
    """
    digest = hashlib.blake2b("/".join(map(repr, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def restored(
    device: torch.device | None = None, engine: DeviceRng | None = None, generators: Sequence[torch.Generator] = ()
) -> Iterator[None]:
    """Let all random states, as those of `RngState.capture`, be after the body what they were before it."""
    before = RngState.capture(device, engine, generators)
    try:
        yield
    finally:
        before.apply(device, engine, generators)


@contextlib.contextmanager
def seeded(seed: int, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Seed python's, numpy's and torch's CPU generators for the body, and restore them."""
    with restored(generators=generators):
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        for generator in generators:
            generator.manual_seed(seed)
        yield


class Seeds(NamedTuple):
    """One seed per library; what `worker_seeds` returns.

    Attributes:
        python: For `random.seed`.
        numpy: For `np.random.seed`.
        torch: For `torch.manual_seed`.
    """

    python: int
    numpy: tuple[int, ...]
    torch: int

    def apply(self) -> None:
        """Seed the generators of this process."""
        random.seed(self.python)
        np.random.seed(self.numpy[0] if len(self.numpy) == 1 else self.numpy)  # the usual stream of a small seed
        torch.default_generator.manual_seed(self.torch)


def worker_seeds(worker: int, ctx: DistContext, *, epoch: int = 0) -> Seeds:
    """Seeds for a worker process of a data loader: no two workers of any two ranks share a stream.

    `shard_data` seeds its workers with these before it calls your `worker_init_fn`; call it for
    loaders of your own. Ranks that see the same batches get the same seeds.

    Changes: nothing; `.apply()` of the result seeds. Collectives: none.

    Args:
        worker: Number of the worker, below 4096.
        ctx: The current context; its `seed` and `data_rank` count.
        epoch: Workers that live for one epoch draw other numbers in the next.

    Returns:
        A seed for each of python, numpy and torch.

    Raises:
        ValueError: `worker` or `epoch` is out of range.

    Example:
        >>> import weft
        >>> one, two = (weft.rng.worker_seeds(n, weft.local()) for n in range(2))
        >>> one.torch != two.torch
        True
    """
    check_count("worker_seeds", "worker", worker, least=0, below=_WORKERS, fix="weft.rng.worker_seeds(0, ctx, epoch=0)")
    check_count("worker_seeds", "epoch", epoch, least=0, below=2**62, fix="weft.rng.worker_seeds(0, ctx, epoch=0)")
    return seeds_for(ctx.seed, epoch, ctx.data_rank, worker)


def seeds_for(seed: int, epoch: int, rank: int, worker: int) -> Seeds:
    """See `worker_seeds`; also for processes that have no context."""
    base = mix(seed, epoch, "workers")
    whole = mix(seed, epoch, rank, worker, "worker")
    low = (base + rank * _WORKERS + worker) % 2**32
    return Seeds(whole, (whole % 2**32, whole >> 32, rank, worker), (base >> 32 << 32) + low)


# -- set_seed ----------------------------------------------------------------------------------------


class Seeded:
    """What `set_seed` leaves behind: as a context manager it puts the deterministic mode back.

    Attributes:
        seeds: The seeds that were set on this rank.
    """

    def __init__(self, seeds: Seeds, before: tuple[bool, bool, bool] | None) -> None:
        self.seeds = seeds
        self._before = before

    def restore(self) -> None:
        """Put deterministic mode and cuDNN's choice of algorithms back as they were."""
        if self._before is not None:
            deterministic, warn_only, benchmark = self._before
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            torch.backends.cudnn.benchmark = benchmark
            self._before = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()


def set_seed(
    seed: int,
    ctx: DistContext,
    *,
    ranks: Literal["same", "distinct"] | Sequence[str] = "same",
    deterministic: bool = False,
) -> Seeded:
    """Seed python, numpy and torch, on all devices; the same on all ranks, or another for each.

    Models are to be built with the same numbers everywhere, dropout and noise drawn with others: with one state
    all ranks draw the same dropout masks, so call it again with "distinct" after the model is built. The order
    of the data depends on neither: it is a function of (seed, epoch), see `shard_data`.

    Changes: the global random states of this process; with `deterministic` torch's flag and
    cuDNN's, until `.restore()` or the end of `with weft.rng.set_seed(...)`. Collectives: none.

    Args:
        seed: 0 <= seed < 2**63.
        ctx: The current context.
        ranks: "same": all ranks get the same streams. "distinct": ranks that see different batches get
            streams of their own, those of other replicas of an elastic job too. A list of mesh axes, such as
            ["pipeline"]: ranks with another place on one of these axes do, and the others share one.
        deterministic: Let torch raise where an operation has no deterministic algorithm. CUDA needs
            the variable CUBLAS_WORKSPACE_CONFIG=:4096:8 for it.

    Returns:
        The seeds, and the way back from `deterministic`.

    Raises:
        ValueError: `seed` is not a whole number or out of range, or `ranks` is unknown.
        ContextError: `ranks` names an axis that is not there.

    Example:
        >>> import weft
        >>> with weft.rng.set_seed(3, weft.local(), deterministic=True):
        ...     first = torch.rand(1)
        >>> weft.rng.set_seed(3, weft.local()) and torch.rand(1) == first
        tensor([True])
    """
    check_count("set_seed", "seed", seed, least=0, below=2**63, fix="weft.rng.set_seed(0, ctx)")
    if isinstance(ranks, str):
        check_choice("set_seed", "ranks", ranks, ("same", "distinct"), fix='weft.rng.set_seed(0, ctx, ranks="same")')
    axes = {"same": [], "distinct": ctx.data_axes}[ranks] if isinstance(ranks, str) else ranks
    sizes = {name: ctx.axis_size(name) for name in axes}
    place = 0
    for name, at in ctx.coordinates.items():
        place = place * sizes[name] + at if name in sizes else place
    if ranks == "distinct" and ctx.replicas is not None:
        place += ctx.replicas.place * ctx.data_size
    if ranks == "same":
        seeds = Seeds(seed, (seed % 2**32, seed >> 32)[: 1 if seed < 2**32 else 2], seed)
    else:
        seeds = seeds_for(seed, 0, place, 0)
    seeds.apply()
    torch.manual_seed(seeds.torch)  # of all devices
    ctx.engine.seed(ctx.device, seeds.torch)
    if not deterministic:
        return Seeded(seeds, None)
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False
    return Seeded(seeds, before)


# -- numbers by counting -----------------------------------------------------------------------------


def keyed_uniform(
    ids: torch.Tensor, *, seed: int, epoch: int, shape: Sequence[int] = (), site: int = 0
) -> torch.Tensor:
    """Uniform random numbers that are a function of (seed, epoch, sample id), for masks and augmentation.

    No state is read or changed: a sample gets the same numbers at every number of ranks and workers, in
    any batch, on any device, and in a run resumed from a checkpoint. For a dataset that draws from the
    global generators use `shard_data(..., keyed=True)`, which does not cover a `collate_fn`.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10).

    Changes: nothing. Collectives: none.

    Args:
        ids: Sample ids [rows], as in the `rows` of `shard_data(..., with_ids=True)`; int64, >= 0.
        seed: Any integer, such as `ctx.seed`.
        epoch: Number of the epoch, such as `rows.epoch`.
        shape: Numbers per sample. A padded dimension comes first, as in (length, 3): a shorter sample then has
            the first numbers of a longer one. With (3, length) its numbers depend on the padding of the batch.
        site: Separates several draws for the same samples, such as the layers or masks of one step.

    Returns:
        float32 [rows, ...] in [0, 1), the dots for `shape`, on the device of `ids`.

    Raises:
        TypeError: `ids` are not int64.

    Example:
        >>> ids = torch.tensor([7, 3])
        >>> both, one = keyed_uniform(ids, seed=0, epoch=0), keyed_uniform(ids[1:], seed=0, epoch=0)
        >>> both[1] == one[0]
        tensor(True)
    """
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
        found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise type_error(
            "keyed_uniform: ids cannot be used",
            found=found,
            expected="a tensor of int64 [rows]",
            fix="weft.rng.keyed_uniform(rows.ids, seed=ctx.seed, epoch=rows.epoch)",
        )
    count = int(np.prod(shape, dtype=np.int64)) if shape else 1
    key = mix(seed, epoch, site)
    blocks = torch.arange(-(-count // 4), device=ids.device).expand(len(ids), -1)
    rows = ids[:, None].expand_as(blocks)
    words = philox([blocks, rows & 0xFFFFFFFF, rows >> 32, torch.zeros_like(blocks)], key)
    numbers = torch.stack(words, dim=-1).reshape(len(ids), -1)[:, :count]
    return ((numbers >> 8).to(torch.float32) * 2.0**-24).reshape(len(ids), *shape)


def keyed_normal(ids: torch.Tensor, *, seed: int, epoch: int, shape: Sequence[int] = (), site: int = 0) -> torch.Tensor:
    """Normal random numbers that are a function of (seed, epoch, sample id), such as the noise of a diffusion model.

    As `keyed_uniform`, of which each takes two. Devices may differ in the last bit, by their logarithm and cosine.

    Source: Box and Muller, "A note on the generation of random normal deviates", 1958.

    Changes: nothing. Collectives: none.

    Args:
        ids: Sample ids [rows], as in the `rows` of `shard_data(..., with_ids=True)`; int64, >= 0.
        seed: Any integer, such as `ctx.seed`.
        epoch: Number of the epoch, such as `rows.epoch`.
        shape: Numbers per sample; a padded dimension comes first.
        site: Separates several draws for the same samples, also from those of `keyed_uniform`.

    Returns:
        float32 [rows, ...] of mean 0 and variance 1, the dots for `shape`, on the device of `ids`.

    Raises:
        TypeError: `ids` are not int64.

    Example:
        >>> ids = torch.tensor([7, 3])
        >>> both, one = keyed_normal(ids, seed=0, epoch=0), keyed_normal(ids[1:], seed=0, epoch=0)
        >>> both[1] == one[0]
        tensor(True)
    """
    first, second = keyed_uniform(ids, seed=seed, epoch=epoch, shape=(*shape, 2), site=site).unbind(-1)
    return (-2 * (1 - first).log()).sqrt() * (2 * torch.pi * second).cos()


def sync_rng(ctx: DistContext, *, generators: Sequence[torch.Generator] = (), source: int = 0) -> None:
    """Give every rank the random states of one: python, numpy, torch and the device; and generators.

    For code that has drawn different numbers on the ranks and shall draw the same from now on.

    Changes: the global random states and `generators`, on all ranks but `source`. Collectives: two
    broadcasts.

    Args:
        ctx: The context whose ranks take part.
        generators: Generators of your own, the same number on all ranks.
        source: The rank whose states count.

    Raises:
        ValueError: No such rank.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> weft.rng.sync_rng(weft.local())
    """
    mine = RngState.capture(ctx.device, ctx.engine, generators) if ctx.rank == source else None
    state = broadcast(mine, ctx, source=source)
    if ctx.rank != source and state is not None:
        state.on_cpu().apply(ctx.device, ctx.engine, generators)
