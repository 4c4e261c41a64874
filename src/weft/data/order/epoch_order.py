"""The order of each epoch of a map-style dataset, whatever sampler the user brought.

[Note: orders] An order is made once, where an iteration over its epoch begins, with the global random states set to a
function of (seed, epoch). What else a sampler draws from or counts, its state, is as the epoch before left it; it is
kept in the position, and put back when a run resumes. Whether that suffices is not assumed: a digest of the order is
compared between the ranks, and on resume with the one in the position.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from weft.data.equal_cost import Costs, alike_together
from weft.data.loader_copy import length_of
from weft.data.order.digest import digest_of
from weft.data.order.endless_order import EndlessOrder
from weft.data.order.sampler_state import SamplerState
from weft.data.order.tell_epoch import tell_epoch
from weft.errors import ContractError, message
from weft.rng import mix, seeded
from weft.tensors.rng_state import RngState

_READ_AHEAD = 2**16  # units beyond those expected, after which an order counts as endless


class OtherOrder(ValueError):
    """An epoch has another order now than when a position in it was saved."""


@dataclass
class _MadeOrder:
    units: Sequence[Any]
    start: dict[str, Any]  # the state of the sampler before
    digest: str | None = None


class EpochOrder:
    """The order of each epoch of a map-style dataset: of samples, or of whole batches; see [Note: orders].

    Attributes:
        source: The user's sampler or batch sampler.
        known: How many units it says there are; None if it does not tell.
        costs: What samples cost, if ranks are to have equal costs.
        is_plain: Whether orders are functions of seed, epoch and length: the source then has no state.
    """

    def __init__(self, source: Any, known: int | None, dataset: object, costs: Costs | None = None) -> None:
        self.source = source
        self.known = known
        self.costs = costs
        expected = known if known is not None else 2 * len(dataset) if isinstance(dataset, Sized) else 0
        self._most = expected + _READ_AHEAD
        self.is_plain = _is_plain(source)
        self._state = SamplerState(None if self.is_plain else source, dataset, generators_of(source))
        self._made: dict[tuple[int, int], _MadeOrder] = {}
        self._starts: dict[int, Mapping[str, Any]] = {}
        self._lengths: dict[tuple[int, int], int] = {}

    def order(self, seed: int, epoch: int) -> Sequence[Any]:
        """All units of an epoch.

        Raises:
            ContractError: They are not as many as the sampler says.
        """
        return self._of(seed, epoch).units

    def known_length(self, seed: int, epoch: int) -> int | None:
        """Number of units of an epoch, `UNKNOWN` if it does not end; None before somebody has asked for it."""
        made = self._made.get((seed, epoch))
        return self._lengths.get((seed, epoch), self.known) if made is None else len(made.units)

    def length(self, seed: int, epoch: int) -> int:
        """The same; a sampler that does not tell its length is run for it, and left as it was."""
        found = self.known_length(seed, epoch)
        if found is None:
            found = self._lengths[seed, epoch] = len(self.peek(seed, epoch))
        return found

    def peek(self, seed: int, epoch: int) -> Sequence[Any]:
        """The units of an epoch whose turn may come later, as the sampler would yield them now."""
        if (seed, epoch) in self._made or self.is_plain or isinstance(self.source, Iterator):
            return self.order(seed, epoch)  # an iterator yields once
        put_back, starts = self._state.prepare(self._state.capture()), dict(self._starts)
        try:
            return self._make(seed, epoch).units
        finally:
            put_back()
            self._starts = starts

    def digest(self, seed: int, epoch: int) -> str | None:
        """A digest of the order of an epoch; None if that is a function of seed, epoch and length."""
        return None if self.is_plain else self._digest(self._of(seed, epoch))

    def keep(self, epochs: Collection[int]) -> None:
        """Let go of the orders of other epochs, but for the last ones."""
        for key in [key for key in self._made if key[1] not in epochs][:-2]:
            del self._made[key]

    # -- positions -------------------------------------------------------------------------------

    def state(self, seed: int, epochs: Mapping[int, bool]) -> dict[str, Any]:
        """What a position says of the orders of some epochs.

        Args:
            seed: Of the order.
            epochs: Those that are not used up, and whether a part of each is.

        Returns:
            "order": digests of those that are begun, or else of the one before, by which it is known on resume whether
            orders can be made again. "sampler": the states of the sampler at their beginnings.
        """
        last = min(epochs) - 1
        if not self.is_plain and (seed, last) in self._made and not any(epochs.values()):
            epochs = {last: True, **epochs}
        begun = [[epoch, self._digest(self._of(seed, epoch))] for epoch, is_begun in epochs.items() if is_begun]
        found: dict[str, Any] = {"order": begun} if begun else {}
        made = {epoch: self._made.get((seed, epoch)) for epoch in epochs}
        starts = [[epoch, one.start if one else self._start(epoch)] for epoch, one in made.items()]
        return found | ({"sampler": starts} if any(start for _, start in starts) else {})

    def resume(self, seed: int, state: Mapping[str, Any], begun: Collection[int]) -> Callable[[], None]:
        """Go on from what `state` returned; makes the orders of the epochs that are begun.

        Args:
            seed: Of the order.
            state: The position.
            begun: The epochs of which it says that a part is used, or else the one before.

        Returns:
            What undoes it.

        Raises:
            ValueError: The state cannot be used.
            OtherOrder: The sampler yields another order.
        """
        starts = {} if self.is_plain else dict(state.get("sampler", ()))
        digests = dict(state.get("order", ()))
        for start in starts.values():
            self._state.prepare(start)
        made, before = self._made, self._starts
        put_back = self._state.prepare(self._state.capture())

        def undo() -> None:
            self._made, self._starts = made, before
            put_back()

        self._made, self._starts = dict(made) if isinstance(self.source, Iterator) else {}, starts
        try:
            for epoch, digest in ((epoch, digests[epoch]) for epoch in digests if epoch in begun):
                order = self._of(seed, epoch)
                if self._digest(order) != digest:
                    raise self._other_order(epoch, order, digest)
        except BaseException:
            undo()
            raise
        return undo

    # -- making one ------------------------------------------------------------------------------

    def _of(self, seed: int, epoch: int) -> _MadeOrder:
        made = self._made.get((seed, epoch))
        if made is None or (isinstance(made.units, EndlessOrder) and made.units.is_begun):
            if made is not None:  # an endless one has to begin anew
                self._starts.setdefault(epoch, made.start)
            made = self._made[seed, epoch] = self._make(seed, epoch)
            if self._lengths.get((seed, epoch), len(made.units)) != len(made.units):
                raise ContractError(
                    f"shard_data: {type(self.source).__name__} yields another number of samples when it is run again",
                    found=f"{len(made.units)} in epoch {epoch}, {self._lengths[seed, epoch]} before",
                    expected="an __iter__ that begins anew, or a __len__, so that it is run once",
                    fix="def __len__(self): return ...  # the number of samples of an epoch",
                )
        return made

    def _start(self, epoch: int) -> dict[str, Any]:
        return dict(self._starts[epoch]) if epoch in self._starts else self._state.capture()

    def _make(self, seed: int, epoch: int) -> _MadeOrder:
        start = self._start(epoch)
        if self._starts.pop(epoch, None) is not None:
            self._state.prepare(start)()
        units = _drawn(self.source, seed, epoch, self._most)
        if isinstance(units, EndlessOrder):
            return _MadeOrder(units, start, digest_of(units[0 : self._most]))
        if self.known is not None and len(units) not in (self.known, length_of(self.source)):
            raise ContractError(
                "shard_data: the sampler does not yield what its length says",
                found=f"{len(units)} in epoch {epoch}, {self.known} at set-up",
                expected="as many as its length says, in every epoch",
                fix="give the sampler a __len__ that is true, or none",
            )
        if self.costs is not None:
            units = alike_together(units, self.costs)
        return _MadeOrder(units, start)

    def _digest(self, made: _MadeOrder) -> str:
        made.digest = digest_of(made.units) if made.digest is None else made.digest
        return made.digest

    def _other_order(self, epoch: int, order: _MadeOrder, saved: str) -> OtherOrder:
        name = type(self.source).__name__
        text = message(
            f"load_state_dict: {name} yields another order of epoch {epoch} than when the position was saved",
            found=f"order {order.digest} of {len(order.units)} now, {saved} in the position: samples would be read "
            "twice, and others never",
            expected="the dataset and sampler of the saved run, and a sampler that draws from random, numpy.random or "
            "torch, which are seeded for each epoch, or from generators in its attributes, which are put back; not "
            "from the system's entropy, the clock, or a list that it shuffles in place",
            fix='loader, ctx = weft.shard_data(loader, ctx, resized="next_epoch")  # the next epoch; from there on: '
            "def __iter__(self): return iter(torch.randperm(len(self)).tolist())",
        )
        return OtherOrder(text)


def _is_plain(sampler: Any) -> bool:
    """Whether its order is a function of seed and length, and its state is none."""
    whole = type(sampler) is RandomSampler and not sampler.replacement
    return type(sampler) is SequentialSampler or (whole and sampler.num_samples == len(sampler.data_source))


def _drawn(sampler: Iterable[Any], seed: int, epoch: int, most: int) -> Sequence[Any]:
    """Run a sampler with all random sources set to a function of (seed, epoch), and restored after.

    Args:
        sampler: Any sampler or batch sampler. If it has `set_epoch`, it is called with the epoch; if it
            has a `generator`, that is seeded too.
        seed: Any integer.
        epoch: Number of the epoch.
        most: After so many units it counts as endless.

    Returns:
        All that the sampler yields in this epoch.
    """
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if type(sampler) is RandomSampler and _is_plain(sampler):
        return _permutation(len(sampler.data_source), sampler.generator, mix(seed, epoch, "order"))
    tell_epoch(sampler, epoch, of_data=False)
    generators = generators_of(sampler)
    with seeded(mix(seed, epoch, "order"), generators):
        iterator = iter(sampler)
        units = list(itertools.islice(iterator, most))
        if len(units) < most:
            return units
        inside = RngState.capture(generators=generators)
    return EndlessOrder(units, iterator, inside, generators)


def _permutation(count: int, own: torch.Generator | None, seed: int) -> Sequence[int]:
    """What a `RandomSampler` yields whose random source was seeded, without one call per sample."""
    if own is None:
        source = torch.Generator().manual_seed(seed)
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=source).item())
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def generators_of(source: Any) -> list[torch.Generator]:
    """The generators of a sampler or stream, and of the sampler it draws from (a `BatchSampler` has one inside)."""
    found = [getattr(source, "generator", None), getattr(getattr(source, "sampler", None), "generator", None)]
    return [generator for generator in found if isinstance(generator, torch.Generator)]
