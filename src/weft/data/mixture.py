"""One dataset of several, with weights; [Note: mixtures] in order/mixed_order.py says how they take turns."""

from __future__ import annotations

import copy
import hashlib
import math
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from typing_extensions import override

from weft.checks import as_number, check_choice, check_count
from weft.data import datasets_internals
from weft.data.loader_copy import length_of
from weft.data.order.epoch_order import generators_of
from weft.data.order.mixed_order import MixedOrder, MixedSample
from weft.data.order.tell_epoch import tell_epoch
from weft.data.split.stream_samples import SeekableStream, has_state, opened
from weft.errors import ContractError, type_error, value_error
from weft.rng import mix as hashed

_FIX = 'weft.data.mix({"text": (text, 0.7), "code": (code, 0.3)}, seed=0)'
_END: Any = object()
_MOST = 2**53  # times the weight of another source, or samples of an epoch


def mix(
    sources: Mapping[str, tuple[Any, float]],
    *,
    seed: int = 0,
    stop: Literal["first", "all", "never"] = "first",
    shuffle: bool = True,
    with_names: bool = False,
) -> Mixture:
    """Make one dataset of several, in which each has a share of the samples.

    The order is a function of (seed, epoch). In it, a source's samples come at random places, and yet each source is
    never more than `1 + (sources - 2) * share` samples away from its share of what came before. In one pass through a
    source each of its samples comes once. All of it is computed for any position, so that reading jumps.

    Use the result as any other dataset: `weft.shard_data(DataLoader(mixture, batch_size=8), ctx)`. With
    `shuffle=True` in the loader, each sample still comes as often in an epoch, but no shorter part has the shares, and
    a sample takes longer to find.

    Changes: nothing; sources with `set_epoch` are told the epoch when the mixture is (streams in later passes of it
    another number, so that they shuffle anew), and each `generator` of a stream is seeded. Collectives: none.

    Args:
        sources: By name: a dataset, and its weight, a number above 0; they need not sum to 1. Map-style datasets,
            and streams (iterable datasets); of a stream, `__len__` has to be true if there is one.
        seed: Of the order.
        stop: "first": an epoch ends when the first source is used up, and no sample comes twice. "all": when every
            source was read whole; the shorter ones start again, shuffled anew. "never": it does not end.
            All sources are then close to their share of the epoch. Where the length of one is unknown, the epoch
            ends when the turn comes to one that is used up ("first"), or to the last one ("all").
        shuffle: Whether map-style sources are shuffled, in each pass anew. Streams keep their own order.
        with_names: Make each sample a pair: the name of its source, and the sample.

    Returns:
        A map-style dataset if all sources are, and `stop` is not "never"; otherwise a stream. The stream can begin
        anywhere (see `SeekableStream`) if all sources can: map-style ones, and seekable ones with a length. It has a
        state if all other sources have one.

    Raises:
        TypeError: There is no source, or a source is no dataset, or the sources are no mapping to pairs.
        ValueError: A weight is not above 0 or not finite, or 2**53 times another one; a source has no sample; one
            stream is there twice; an epoch would have more than 2**53 samples.
        ContractError: While reading: a stream has not as many samples as its length says, or none.

    Example:
        >>> mixture = mix({"a": (range(4), 1), "b": (range(10, 19), 2)}, shuffle=False)
        >>> sorted(mixture), mixture.counts
        ([0, 1, 2, 3, 10, 11, 12, 13, 14, 15, 16, 17], {'a': 4, 'b': 8})
    """
    check_choice("mix", "stop", stop, ("first", "all", "never"), fix=_FIX)
    check_count("mix", "seed", seed, least=0, fix=_FIX)
    if not isinstance(sources, Mapping) or not sources:
        found = "no source" if isinstance(sources, Mapping) else type(sources).__name__
        raise type_error("mix: sources cannot be used", found=found, expected="a dict of sources", fix=_FIX)
    parts = []
    for name, pair in sources.items():
        if not isinstance(name, str) or not isinstance(pair, (tuple, list)) or len(pair) != 2:
            found, expected = f"{name!r}: {type(pair).__name__}", "by name, a pair of a dataset and its weight"
            raise type_error("mix: a source cannot be used", found=found, expected=expected, fix=_FIX)
        parts.append(_MixedSource(name, *pair))
    weights = [part.weight for part in parts]
    if max(weights) > _MOST * min(weights):
        found, expected = f"{float(min(weights))} and {float(max(weights))}", "weights of like size"
        raise value_error("mix: a source would never be read", found=found, expected=expected, fix=_FIX)
    streams = [id(part.dataset) for part in parts if part.kind != "map"]
    if len(set(streams)) < len(streams):
        found, fix = "one stream under two names", "other = copy.deepcopy(stream)  # for the second name"
        raise value_error("mix: sources cannot be used", found=found, expected="a stream of its own for each", fix=fix)
    kinds = {part.kind for part in parts}
    if kinds == {"map"} and stop != "never":
        batches = any(part.fetch for part in parts)
        cls: type[Mixture] = _BatchMapMixture if batches else _MapMixture
    elif all(part.kind == "map" or (part.kind == "seekable" and part.length) for part in parts):
        cls = _SeekableMixture
    else:
        cls = _StreamMixture if "plain" in kinds else _StatefulMixture
    return cls(parts, seed, stop, shuffle=shuffle, with_names=with_names)


def _weight(name: str, weight: Any) -> Fraction:
    value = None if isinstance(weight, bool) else as_number(weight)
    if value is None or not 0 < value <= sys.float_info.max:
        what = f"mix: the weight of {name!r} cannot be used"
        raise value_error(what, found=repr(weight), expected="a finite number above 0", fix=_FIX)
    return Fraction(float(value))


class _MixedSource:
    """One source, and how it is read."""

    def __init__(self, name: str, dataset: Any, weight: Any) -> None:
        self.name, self.dataset = name, dataset
        self.kind, self.length = _kind(name, dataset), length_of(dataset)
        if self.length == 0 or (self.kind == "map" and self.length is None):
            found = f"{name!r}: {type(dataset).__name__} without {'samples' if self.length == 0 else 'a len'}"
            fix = f"sources.pop({name!r})" if self.length == 0 else "def __len__(self): return ...  # its samples"
            raise value_error("mix: a source cannot be used", found=found, expected="samples, and a length", fix=fix)
        self.weight = _weight(name, weight)
        self.fetch = getattr(dataset, "__getitems__", None)
        self.begin: Any = copy.deepcopy(dataset.state_dict()) if self.kind == "stateful" else None

    def at(self, index: int) -> Any:
        """A sample of a map-style dataset."""
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"while sample {index} of {self.name!r} was read")
            raise


def _kind(name: str, dataset: Any) -> str:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if hasattr(dataset, "__iter__") and not hasattr(dataset, "__next__"):
            return "seekable" if isinstance(dataset, SeekableStream) else "stateful" if has_state(dataset) else "plain"
    elif not isinstance(dataset, (Mapping, str)):
        return "map"
    fix = f'sources[{name!r}] = dataset["train"], weight' if isinstance(dataset, Mapping) else _FIX
    raise type_error(
        "mix: a source cannot be used",
        found=f"{name!r}: {type(dataset).__name__}",
        expected="a dataset with an index, or an iterable that can be read again and again (no iterator, no dict)",
        fix=f"sources[{name!r}] = list(dataset), weight" if hasattr(dataset, "__next__") else fix,
    )


class Mixture(Dataset[Any]):
    """What `weft.data.mix` returns: a dataset, map-style or iterable, that knows which source a sample is from.

    Attributes:
        names: Of the sources, in the order in which they were given.
        fingerprint: A text that mixtures with the same order have in common.
        counts: How many samples of each source an epoch has, by name; None if that is unknown, or it does not end.
        epoch: Whose order it has.
        endless: Whether it has no end.
    """

    def __init__(
        self, sources: Sequence[_MixedSource], seed: int, stop: str, *, shuffle: bool, with_names: bool
    ) -> None:
        self.names = tuple(source.name for source in sources)
        self._sources, self._seed, self._stop, self._with_names = sources, seed, stop, with_names
        lengths = [source.length for source in sources]
        self.counts: dict[str, int] | None = None
        if stop != "never" and None not in lengths:
            ends = [Fraction(source.length or 0) / source.weight for source in sources]
            end = min(ends) if stop == "first" else max(ends)
            self.counts = {source.name: max(1, round(end * source.weight)) for source in sources}
            self._rates = list(self.counts.values())
            if sum(self._rates) > _MOST:
                found, fix = f"{sum(self._rates)} samples", 'weft.data.mix(sources, stop="never")'
                raise value_error("mix: an epoch is too long", found=found, expected=f"at most {_MOST}", fix=fix)
        else:
            unit = math.lcm(*(source.weight.denominator for source in sources))
            self._rates = [int(source.weight * unit) for source in sources]
        self.endless = stop == "never"
        self._shuffle = [shuffle and source.kind == "map" for source in sources]
        self.epoch = 0
        self._orders: dict[int, MixedOrder] = {}
        self._order = self._order_of(0)
        # Under the name where `shard_data` looks for it: whether a source was split by `split_dataset_by_node`.
        splits = [datasets_internals.split_of(source.dataset) for source in sources]
        self.weft_split = next((split for split in splits if split is not None), None)
        # Names, the samples of an epoch or the weights, and all else that the order follows from.
        facts = (self.names, self._rates, lengths, seed, stop, self._shuffle)
        self.fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def set_epoch(self, epoch: int) -> None:
        """Have the order of this epoch from the next iteration on, and tell the sources that have `set_epoch`."""
        self.epoch, self._order = epoch, self._order_of(epoch)
        for source in self._sources:
            tell_epoch(source.dataset, epoch)

    def source_of(self, positions: torch.Tensor | Sequence[int], *, epoch: int | None = None) -> torch.Tensor:
        """Which source samples are from, for metrics by source; nothing is read.

        Args:
            positions: Numbers of samples in the order of the epoch, any shape: indices of a map-style mixture, or the
                `rows.ids` of `shard_data(..., with_ids=True)`.
            epoch: Whose order; default: the present one.

        Returns:
            int64, of the shape of `positions`, on the CPU: indices into `names`.

        Raises:
            IndexError: There is no such position.
        """
        order = self._order_of(self.epoch if epoch is None else epoch)
        given = torch.as_tensor(positions, dtype=torch.int64, device="cpu")
        return torch.tensor([order[at].source for at in given.flatten().tolist()], dtype=torch.int64).view(given.shape)

    def _order_of(self, epoch: int) -> MixedOrder:
        if epoch not in self._orders:
            lengths = [source.length or 0 for source in self._sources]
            keys = [hashed(self._seed, epoch, name, "mixture") for name in self.names]
            order = MixedOrder(self._rates, lengths, self._shuffle, keys, endless=self.counts is None)
            self._orders = dict([*self._orders.items()][-1:]) | {epoch: order}  # two loaders may take turns
        return self._orders[epoch]

    def _given(self, source: int, sample: Any) -> Any:
        return (self.names[source], sample) if self._with_names else sample


class _MapMixture(Mixture):
    """Of map-style datasets."""

    def __len__(self) -> int:
        return self._order.total

    def __getitem__(self, index: Any) -> Any:
        source, number = self._order[self._position(index)]
        return self._given(source, self._sources[source].at(number))

    def _position(self, index: Any) -> int:
        position = operator.index(index)
        return position + len(self) if position < 0 else position


class _BatchMapMixture(_MapMixture):
    """One of them gives many samples at once."""

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        places = [self._order[self._position(index)] for index in indices]
        found: list[Any] = [None] * len(places)
        for number, source in enumerate(self._sources):
            wanted = [at for at, place in enumerate(places) if place.source == number]
            ids = [places[at].sample for at in wanted]
            samples = source.fetch(ids) if source.fetch and ids else map(source.at, ids)
            for at, sample in zip(wanted, samples, strict=True):
                found[at] = self._given(number, sample)
        return found


class _StreamMixture(Mixture, IterableDataset[Any]):
    """With streams among the sources, or without an end."""

    def __len__(self) -> int:
        if self.counts is None:
            raise type_error(
                "len: a mixture without an end, or with a stream of unknown length, has none",
                found=f"stop={self._stop!r}, sources: {', '.join(self.names)}",
                expected="a length of every source, and an end",
                fix="for sample in mixture: ...  # without len(mixture)",
            )
        return self._order.total

    def __iter__(self) -> Iterator[Any]:
        self._check_worker()
        return self._read(self._order.from_position(0), [_SourceReading(self, source) for source in self._sources])

    def _check_worker(self) -> None:
        """Raise in a worker among many that samples are not divided among: each would yield all."""
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise ContractError(
                "mix: several workers would each read the whole mixture",
                found=f"a torch DataLoader with num_workers={info.num_workers} over a mixture that is a stream",
                expected="a loader from shard_data, on one rank too, or one worker",
                fix='loader, ctx = weft.shard_data(loader, ctx, uneven="empty")',
            )

    def _read(self, places: Iterator[MixedSample], readings: Sequence[_SourceReading]) -> Iterator[Any]:
        for source, index in places:
            sample = readings[source].take(index)
            if sample is _END:
                if self.counts is None and (
                    self._stop == "first" or (self._stop == "all" and all(each.passes for each in readings))
                ):
                    return
                sample = readings[source].take(index)
            yield self._given(source, sample)
        for reading in readings:
            reading.check_end()


class _SeekableMixture(_StreamMixture):
    """It can begin anywhere, for all of its sources can."""

    def iter_from(self, start: int) -> Iterator[Any]:
        """See `SeekableStream`."""
        before = zip(self._sources, self._order.before(start), strict=True)
        readings = [_SourceReading(self, source, *divmod(count, source.length or 1)) for source, count in before]
        return self._read(self._order.from_position(start), readings)


class _StatefulMixture(_StreamMixture):
    """It can go back to a state, for all of its sources can."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._loaded: dict[str, Any] | None = None
        self._position, self._readings = 0, [_SourceReading(self, source) for source in self._sources]

    @override
    def __iter__(self) -> Iterator[Any]:
        self._check_worker()
        state, self._loaded = self._loaded, None
        states = state["sources"] if state else {}
        self._position = state["position"] if state else 0
        self._readings = [_SourceReading(self, each, *states.get(each.name, (0, 0, None))) for each in self._sources]
        samples = self._read(self._order.from_position(self._position), self._readings)
        return self._counted(samples, self._readings)

    def _counted(self, samples: Iterator[Any], readings: Sequence[_SourceReading]) -> Iterator[Any]:
        for sample in samples:
            if readings is self._readings:  # no other iteration began since
                self._position += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        """Where the reading of the epoch stands."""
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        sources = {reading.source.name: reading.state() for reading in self._readings}
        return {"mixture": self.fingerprint, "position": self._position, "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration continue there.

        Raises:
            ValueError: It is a state of another mixture.
        """
        if state.get("mixture") != self.fingerprint:
            raise value_error(
                "mix: the state belongs to another mixture, whose order was another one",
                found=f"{state.get('mixture')}, and not {self.fingerprint}",
                expected="the same names, weights, lengths, seed, stop and shuffle",
                fix="mixture.set_epoch(saved_epoch + 1)  # or that of the loader: the next epoch, of the new mixture",
            )
        self._loaded = copy.deepcopy(state)


class _SourceReading:
    """Where the reading of one source stands.

    Attributes:
        passes: How often it was used up.
        read: Samples of it since then.
    """

    def __init__(self, owner: Mixture, source: _MixedSource, passes: int = 0, read: int = 0, state: Any = None) -> None:
        self.source = source
        self.passes, self.read = passes, read
        self._seed, self._epoch = owner._seed, owner.epoch
        self._state = state
        self._samples: Iterator[Any] | None = None

    def take(self, index: int) -> Any:
        """The next sample; if there is none, the mark of the end, and the next pass begins."""
        source = self.source
        if source.kind == "map":
            sample = _END if self.read == source.length else source.at(index)
        else:
            self._samples = self._begun() if self._samples is None else self._samples
            try:
                sample = next(self._samples, _END)
            except Exception as error:
                error.add_note(f"while sample {self.read} of {source.name!r} was read")
                raise
            at_end = self.read > 0 if source.length is None else self.read == source.length
            if (sample is _END) != at_end and (sample is _END or source.length is not None):
                raise self._untrue()
        self.read += 1
        if sample is _END:
            self.passes, self.read, self._samples, self._state = self.passes + 1, 0, None, None
        return sample

    def check_end(self) -> None:
        """Raise if a stream has more samples than its length says, when it was read up to there."""
        if self._samples is not None and self.read == self.source.length:
            self.take(0)

    def state(self) -> tuple[int, int, Any]:
        """What a reading begins with that continues here."""
        stateful = self.source.kind == "stateful" and self._samples is not None
        return self.passes, self.read, copy.deepcopy(self.source.dataset.state_dict()) if stateful else self._state

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_samples": None, "_state": self.state()[2]}  # a generator stays in its process

    def _begun(self) -> Iterator[Any]:
        source, dataset = self.source, self.source.dataset
        # The first pass is told the epoch itself, later ones a number of their own, small enough to seed any library.
        tell_epoch(dataset, (self._epoch + 65537 * self.passes) % 2**31)
        for generator in generators_of(dataset):
            generator.manual_seed(hashed(self._seed, self._epoch, source.name, self.passes))
        return opened(dataset, self.read, source.begin, self._state)

    def _untrue(self) -> ContractError:
        length = self.source.length
        return ContractError(
            "mix: a stream does not yield what its length says" if length else "mix: a stream yields nothing",
            found=f"{self.source.name!r}: {self.read} samples" + (f" or more, and not {length}" if length else ""),
            expected="samples, and a __len__ that is true in every epoch, or none",
            fix="def __len__(self): return ...  # the true number of samples of this epoch"
            if length
            else "def __iter__(self): return iter(...)  # anew in each call, with at least one sample",
        )
