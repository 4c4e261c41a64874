"""Samplers as people write them, each made by a function of the number of samples: for tests of orders."""

from __future__ import annotations

import itertools
import os
import random
import secrets
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

_RNG = np.random.default_rng(5)


class _Sampler(Sampler):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n


class Global(_Sampler):
    def __iter__(self):
        order = list(range(self.n))
        random.shuffle(order)
        return iter(order)


class GlobalNumpy(_Sampler):
    def __iter__(self):
        return iter(np.random.permutation(self.n))


class OwnNumpy(_Sampler):
    def __init__(self, n):
        super().__init__(n)
        self.rng = np.random.default_rng(3)

    def __iter__(self):
        return iter(self.rng.permutation(self.n))


class OwnRandomState(_Sampler):
    def __init__(self, n):
        super().__init__(n)
        self.state = np.random.RandomState(3)

    def __iter__(self):
        return iter(self.state.permutation(self.n).astype(np.int32))


class OwnPython(_Sampler):
    def __init__(self, n):
        super().__init__(n)
        self._random = random.Random(7)

    def __iter__(self):
        yield from self._random.sample(range(self.n), self.n)


class OwnTorch(_Sampler):
    def __init__(self, n):
        super().__init__(n)
        self.g = torch.Generator().manual_seed(9)

    def __iter__(self):
        return iter(torch.randperm(self.n, generator=self.g))  # tensors without a dimension


class Nested(_Sampler):
    def __init__(self, n):
        super().__init__(n)
        self.parts = {"inner": [OwnPython(n)], "other": (1, 2)}

    def __iter__(self):
        return iter(self.parts["inner"][0])


class OwnEpochs(_Sampler):
    def __init__(self, n):
        super().__init__(n)
        self.calls = 0

    def __iter__(self):
        self.calls += 1
        return iter(np.random.default_rng(self.calls).permutation(self.n).tolist())


class SetEpoch(_Sampler):
    def __init__(self, n):
        super().__init__(n)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng((4, self.epoch)).permutation(self.n).tolist())


class ClassCounter(_Sampler):
    calls = 0

    def __iter__(self):
        type(self).calls += 1
        return iter(np.random.default_rng(type(self).calls).permutation(self.n).tolist())


class LazyCounter(_Sampler):
    def __iter__(self):
        self.at = getattr(self, "at", -1) + 1
        return iter([(i + self.at) % self.n for i in range(self.n)])


class InPlace(_Sampler):
    def __init__(self, n):
        super().__init__(n)
        self.order = list(range(n))

    def __iter__(self):
        random.shuffle(self.order)
        return iter(self.order)


class ModuleGenerator(_Sampler):
    def __iter__(self):
        return iter(_RNG.permutation(self.n).tolist())


class Entropy(_Sampler):
    def __iter__(self):
        return iter(np.random.default_rng().permutation(self.n).tolist())


class EntropyOnce(_Sampler):
    def __init__(self, n):
        super().__init__(n)
        self.rng = np.random.default_rng()

    def __iter__(self):
        return iter(self.rng.permutation(self.n).tolist())


class System(_Sampler):
    def __init__(self, n):
        super().__init__(n)
        self.random = random.SystemRandom()

    def __iter__(self):
        order = list(range(self.n))
        self.random.shuffle(order)
        return iter(order)


class Secret(_Sampler):
    def __iter__(self):
        return iter(sorted(range(self.n), key=lambda i: secrets.token_bytes(4)))


class PerRank(_Sampler):
    def __iter__(self):
        return iter(np.random.default_rng(os.getpid()).permutation(self.n).tolist())


class SetOrder(_Sampler):
    """The order of a set of texts is another one in each process."""

    def __iter__(self):
        names = {f"file{i}" for i in range(self.n)}
        return iter([int(name[4:]) for name in names])


class Listing(_Sampler):
    def __init__(self, n, folder):
        super().__init__(n)
        self.folder = Path(folder)

    def __iter__(self):
        return iter([int(path.name) for path in self.folder.iterdir()])


class NoLength(Sampler):
    def __init__(self, n):
        self.n = n
        self.rng = np.random.default_rng(1)

    def __iter__(self):
        yield from self.rng.permutation(self.n).tolist()


class WrongLength(_Sampler):
    def __len__(self):
        return self.n - 1

    def __iter__(self):
        return iter(range(self.n))


class Iterators(_Sampler):
    def __init__(self, n):
        super().__init__(n)
        self.count = itertools.count()

    def __iter__(self):
        shift = next(self.count)
        return iter([(i + shift) % self.n for i in range(self.n)])


class OwnBatches(Sampler):
    def __init__(self, n):
        self.n, self.rng = n, random.Random(2)

    def __len__(self):
        return (self.n + 2) // 3

    def __iter__(self):
        order = self.rng.sample(range(self.n), self.n)
        return iter([order[at : at + 3] for at in range(0, self.n, 3)])


class Bits(_Sampler):
    def __init__(self, n):
        super().__init__(n)
        self.bits = np.random.Generator(np.random.Philox(8))

    def __iter__(self):
        return iter(np.asarray(self.bits.permutation(self.n), dtype=np.uint16))


class Growing(_Sampler):
    """Reads more in each epoch."""

    def __init__(self, n):
        super().__init__(n)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.n // 4 * (self.epoch + 1)

    def __iter__(self):
        return iter(range(len(self)))


class Once(Sampler):
    """Its own iterator, and does not tell its length."""

    def __init__(self, n):
        self.rest = iter(range(n))

    def __iter__(self):
        return self.rest


def once(n):
    return iter(range(n))


def subset(n):
    return SubsetRandomSampler(range(n), generator=torch.Generator().manual_seed(1))


def batches_of_own(n):
    return BatchSampler(OwnNumpy(n), 3, drop_last=False)


class MyBatches(BatchSampler):
    pass


def my_batches(n):
    return MyBatches(OwnPython(n), 3, drop_last=False)


def replacement(n):
    return RandomSampler(range(n), replacement=True, num_samples=n)


def weighted(n):
    return WeightedRandomSampler(list(range(1, n + 1)), n)


# In which each sample comes once per epoch, whose orders can be made again.
GOOD = [Global, GlobalNumpy, OwnNumpy, OwnRandomState, OwnPython, OwnTorch, Nested, OwnEpochs, SetEpoch, ClassCounter]
GOOD += [LazyCounter, NoLength, Bits, subset]
BATCHES = [OwnBatches, batches_of_own, my_batches]
DRAWN = [replacement, weighted]
# Which differ between ranks, and cannot be made again.
RANKS_DIFFER = [Entropy, EntropyOnce, System, Secret, PerRank]
# Whose state is where nobody looks.
HIDDEN = [InPlace, ModuleGenerator, Iterators]
