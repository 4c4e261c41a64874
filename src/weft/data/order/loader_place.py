"""The place of a loader in the program: by its number it has an order of its own, and who is built anew continues."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from weft.peers.world import World
from weft.rng import mix


@dataclass(eq=False)
class LoaderPlace:
    """What the loaders over one dataset share that a program builds one after the other.

    Attributes:
        number: Of the place, in the order in which the program makes them.
        seed: Of the order: as given if this is the first one with it, otherwise mixed with the number.
        epoch: The epoch that comes next.
        is_fresh: Its loader was not read yet.
        readers: How many iterations over it are running.
        has_no_rows: The batch that was given last is this rank's for a step in which it has no sample.
    """

    number: int
    dataset: weakref.ref[Any] | None
    sampler: type[Any]
    generator: torch.Generator | None
    seed: int
    epoch: int = 0
    is_fresh: bool = True
    readers: int = 0
    has_no_rows: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "dataset": None, "generator": None}  # which are of this process

    def worker_seed(self, seed: int) -> int:
        """What the random states of its workers are a function of, in a program with this seed."""
        return mix(seed, self.number, "loader") if self.number else seed

    def is_before(self, dataset: object, sampler: object) -> bool:
        """Whether its loader has been read, and one over this dataset comes after it."""
        same = self.dataset is not None and self.dataset() is dataset and self.sampler is type(sampler)
        return same and not self.is_fresh and not self.readers


def place_of(world: World, dataset: object, sampler: object, *, seed: int, given: bool) -> LoaderPlace:
    """The place of a new loader: that of its predecessor over the same dataset, or a new one.

    Loaders that are read side by side, as for pairs of samples, so have orders of their own, and one that is built
    anew in each epoch continues to count. Ranks that run the same program have the same places.

    Args:
        world: Where places are counted.
        dataset: What the loader reads.
        sampler: What yields its order.
        seed: Of its order, if it is the first of this program.
        given: Whether the user chose that seed for this loader alone.
    """
    places: list[LoaderPlace] = world.root.loaders
    found = next((place for place in places if place.is_before(dataset, sampler)), None)
    if found is not None:
        found.is_fresh = True
        if given:
            found.seed = seed
        return found
    generator = getattr(sampler, "generator", None)
    generator = generator if isinstance(generator, torch.Generator) else None
    # A generator with a seed of its own is a choice, but one that several loaders share is not.
    first = not places or (generator is not None and all(place.generator is not generator for place in places))
    own = seed if given or first else mix(seed, len(places), "loader")
    reference = None
    with contextlib.suppress(TypeError):  # a list: whether it still is the same cannot be seen
        reference = weakref.ref(dataset)
    places.append(LoaderPlace(len(places), reference, type(sampler), generator, own))
    return places[-1]
