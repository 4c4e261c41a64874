"""The laws of shard_data for every small size, batch, number of ranks and mode, and not for a sample of them."""

import itertools

import pytest
from torch.utils.data import DataLoader

import weft
from tests.data.test_streams import STREAMS, _counted, _shares
from weft.testing import fake

pytestmark = pytest.mark.slow


def _listed(n):
    return list(range(n))


KINDS = [_listed, *STREAMS]
MODES = ("batches", "split")


def _check(kind, n, batch_size, world, mode, uneven, **options):
    """Each sample once, in order; `len` is what comes; the evaluation has n rows."""
    size = batch_size * world if mode == "split" else batch_size
    parts, positions = _shares(lambda: kind(n), world, size, mode=mode, uneven=uneven, **options)
    values, ids = _counted(parts)
    assert values == ids == list(range(len(ids)))
    assert n - len(ids) < (world if uneven == "drop" else 1)
    if uneven == "pad":
        assert all(len(batch) == batch_size for part in parts for batch, *_ in part)
    if kind is _listed or hasattr(kind, "__len__"):
        loader, _ = weft.shard_data(DataLoader(kind(n), batch_size=size), fake(0, world), mode=mode, uneven=uneven)
        assert len(loader) == len(parts[0])
    return positions


@pytest.mark.filterwarnings("ignore:shard_data. .* a loop over the loader does nothing")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_every_sample_once_in_order_at_every_size(world, mode):
    for kind, uneven in itertools.product(KINDS, ("empty", "pad", "drop")):
        for n, batch_size in itertools.product((*range(8), 11, 12, 16, 19, 30), (1, 2, 3, 5)):
            _check(kind, n, batch_size, world, mode, uneven)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_after_any_batch_it_goes_on_at_any_number_of_ranks(world):
    for kind, n, batch_size in itertools.product(KINDS, (1, 5, 12, 23), (1, 3, 5)):
        _, positions = _shares(lambda kind=kind, n=n: kind(n), world, batch_size, uneven="empty")
        for position, other in itertools.product(positions, (1, 2, 3, 4)):
            if position["epoch"] == 0:
                rest, _ = _shares(lambda kind=kind, n=n: kind(n), other, 2, position=position, uneven="empty")
                assert _counted(rest)[0] == list(range(position["samples"], n))


@pytest.mark.parametrize("world", [1, 3])
def test_two_workers_change_nothing(world):
    for kind, uneven in itertools.product(KINDS, ("empty", "pad")):
        for n, batch_size in ((1, 3), (13, 3)):
            _check(kind, n, batch_size, world, "batches", uneven, workers=2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("uneven", ["balance", "error"])
def test_what_cannot_be_shared_out_is_refused_and_all_else_is_whole(mode, uneven):
    for n, batch_size, world in itertools.product(range(41), range(1, 6), (2, 3, 4)):
        rest = n % (batch_size * world)
        refused = 0 < rest < world if uneven == "balance" else rest % world != 0
        size = batch_size * world if mode == "split" else batch_size
        try:
            parts, _ = _shares(lambda n=n: _listed(n), world, size, mode=mode, uneven=uneven)
        except ValueError:
            assert refused, (n, batch_size, world)
        else:
            assert not refused, (n, batch_size, world)
            assert _counted(parts)[0] == list(range(n))
