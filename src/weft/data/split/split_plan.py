"""Which rank gets which samples of an epoch, in which step: pure arithmetic.

Words: a *unit* is what is shared out, a sample or (for a custom batch sampler) a whole batch. The
*order* is the list of units of an epoch, the same on all ranks. Step t uses the span
`order[start + t*G : start + (t+1)*G]`, G units for all ranks together, split into equal pieces in
rank order. So the ranks' pieces, joined, are the order itself, at every world size. A *span* is a part
of the order of one epoch; a resumed run has one or more of them to read.

A step may also have a fixed number of units, `step_units`, at any number of ranks: then the pieces differ by at most
one unit, and the steps are the same at any number of ranks.

With `within`, units are batches, a step is one of them, and each rank gets a part of its samples.

With `costs` the units of a step are divided into pieces of nearly equal cost, which may have different numbers of
units. The step is still that span of the order, so a position means the same at every world size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

from weft.data.equal_cost import Costs, equal_shares
from weft.errors import value_error, warn

U = TypeVar("U")
Uneven = Literal["balance", "empty", "pad", "drop", "error", "join"]
UNKNOWN = 2**62  # units of a stream that does not tell its length
_CHOICES = (
    'uneven="empty")  # some ranks get no rows; or "pad", with_ids=True (repeats samples: use rows of ids.valid only); '
    'or "drop" (loses samples)'
)


class Span(NamedTuple):
    """Units `start` up to `stop` of the order of an epoch."""

    epoch: int
    start: int
    stop: int


class SplitPlan(NamedTuple):
    """How units are shared out.

    Attributes:
        rank: Of this process among the ranks that see different data.
        size: Number of these ranks.
        per_rank: Units per rank and full step.
        drop_last: Leave the last, incomplete step out.
        uneven: What to do with an incomplete last step whose units cannot be shared out equally.
        costs: What units cost, if pieces are to cost the same.
        step_units: Units per full step, if that is not `per_rank * size`.
        within: A step is one unit, a batch of samples, which are shared out.
    """

    rank: int
    size: int
    per_rank: int
    drop_last: bool
    uneven: Uneven
    costs: Costs | None = None
    step_units: int | None = None
    within: bool = False

    @property
    def per_step(self) -> int:
        """Units per full step, all ranks together."""
        return self.per_rank * self.size if self.step_units is None else self.step_units

    @property
    def allows_empty(self) -> bool:
        """Whether a rank may get a batch without rows."""
        return self.uneven in ("empty", "join")

    def num_steps(self, units: int) -> int:
        """Steps in which so many units are used up."""
        full, rest = divmod(units, self.per_step)
        return full + (1 if self.rest_makes_step(rest) else 0)

    def rest_makes_step(self, rest: int) -> bool:
        """Whether so many units left over make a step."""
        return rest > 0 and not self.drop_last and (rest >= self.size or self.uneven != "drop")

    def steps_in(self, spans: Iterable[Span]) -> int:
        """Steps in which some spans are used up, one after the other."""
        return sum(self.num_steps(span.stop - span.start) for span in spans)

    def used(self, units: int) -> int:
        """Units that all ranks together are given in a step that has so many, repetitions included."""
        if self.uneven == "pad":
            return self.per_step
        return units - units % self.size if self.uneven == "drop" else units

    def step_at(self, spans: Iterable[Span], step: int) -> Span | None:
        """Units that are used in a step of some spans; None after the last one."""
        for span in spans:
            have = self.num_steps(max(span.stop - span.start, 0))
            if step < have:
                start = span.start + step * self.per_step
                return Span(span.epoch, start, min(start + self.per_step, span.stop))
            step -= have
        return None

    def split(self, spans: Sequence[Span], steps: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """Split some spans into what is used in so many steps, and what is left."""
        for index, span in enumerate(spans):
            have = self.num_steps(span.stop - span.start)
            if steps < have or steps == 0:
                middle = span.start + steps * self.per_step
                begun = (span._replace(stop=middle),) if steps else ()
                return (*spans[:index], *begun), (span._replace(start=middle), *spans[index + 1 :])
            steps -= have
        return tuple(spans), ()

    def pieces(self, order: Sequence[U], start: int, stop: int) -> Iterator[tuple[Sequence[U], int]]:
        """Yield this rank's piece of every step of a span, and how many of its units do not repeat.

        A piece is empty only if `allows_empty`. With `within`, a piece is a part of one batch, and samples are counted.
        """
        if self.within:
            for batch in order[start:stop]:
                samples: Any = [*cast("Iterable[Any]", batch)]
                self.check_batch(len(samples))
                pieces: Iterator[Any] = self.of_batch(len(samples)).pieces(samples, 0, len(samples))
                for part, valid in pieces:  # one, as of a step
                    yield ([part] if part else ()), valid
            return
        if self.costs is not None:
            yield from self._of_equal_cost(order, start, stop, self.costs)
            return
        full, rest = divmod(stop - start, self.per_step)
        mine, whole = self.share(self.per_step)
        for first in range(start + mine, start + full * self.per_step, self.per_step):
            yield order[first : first + whole], whole
        if self.rest_makes_step(rest):
            first, count = self.share(rest)
            piece = order[stop - rest + first : stop - rest + first + count]
            if self.uneven == "pad":  # the order goes round: its first units come again until the step is full
                begin = stop - rest + first
                piece = [*piece, *(order[i % len(order)] for i in range(begin + count, begin + whole))]
            yield piece, count

    def of_batch(self, samples: int) -> SplitPlan:
        """How the samples of one batch are shared out: as those of a step."""
        each = -(-samples // self.size)
        return self._replace(per_rank=each, drop_last=False, step_units=None, within=False)

    def check_batch(self, samples: int) -> None:
        """Raise if a batch cannot be shared out as `uneven` asks.

        Raises:
            ValueError: The text names the numbers and the choices.
        """
        unequal = self.uneven == "error" and samples % self.size != 0
        least = self.size if self.uneven in ("balance", "drop") else 1
        if unequal or samples < least:
            raise value_error(
                f"shard_data: a batch of the batch sampler cannot be split over {self.size} ranks",
                found=f"{samples} samples, {self.size} ranks, uneven={self.uneven!r}",
                expected=f"a multiple of {self.size}" if unequal else f"at least {least}, or a choice what to do",
                fix=f'loader, ctx = weft.shard_data(loader, ctx, mode="split", {_CHOICES}'
                if samples
                else "if batch: yield batch  # in the batch sampler",
            )

    def _of_equal_cost(
        self, order: Sequence[U], start: int, stop: int, costs: Costs
    ) -> Iterator[tuple[Sequence[U], int]]:
        for first in range(start, start + self.num_steps(stop - start) * self.per_step, self.per_step):
            count = min(stop - first, self.per_step)
            units = order[first : first + (count if count == self.per_step else self.used(count))]
            shares = equal_shares(costs.of(units), self.size)
            turn = first // self.per_step  # the dearest piece goes round
            piece = [units[place] for place in shares[(self.rank + turn) % self.size]]
            yield piece, len(piece)

    def share(self, rest: int) -> tuple[int, int]:
        """First unit, and number of units, that this rank gets of a step of `rest` units."""
        if self.uneven == "pad":
            first = min(self.rank * self.per_rank, rest)
            return (self.rank * self.per_rank, min(rest - first, self.per_rank))
        share, extra = divmod(rest, self.size)
        if self.uneven == "drop":
            extra = 0
        return self.rank * share + min(self.rank, extra), share + (1 if self.rank < extra else 0)

    def check(self, units: int, what: str) -> None:
        """Raise if the last step cannot be shared out as `uneven` asks.

        Raises:
            ValueError: The text names the numbers and the choices.
        """
        rest = 0 if self.drop_last else units % self.per_step
        unequal = self.uneven == "error" and rest % self.size != 0
        too_few = self.uneven == "balance" and 0 < rest < self.size
        if unequal or too_few:
            raise value_error(
                f"shard_data: {what} cannot be split evenly over {self.size} ranks",
                found=f"{units} in steps of {self.per_rank} x {self.size}, {rest} left for the last step",
                expected=f"{'a multiple of' if unequal else 'at least'} {self.size} left, or a choice what to do",
                fix=f"loader, ctx = weft.shard_data(loader, ctx, {_CHOICES}",
            )


def warn_of_no_step(what: str, found: str) -> None:
    """Warn that a loop over the loader does nothing, because an epoch has no step."""
    warn(
        f"shard_data: {what}, a loop over the loader does nothing",
        found=found,
        expected="enough for one step on every rank",
        fix='a smaller batch_size; or drop_last=False and weft.shard_data(loader, ctx, uneven="empty")',
    )
