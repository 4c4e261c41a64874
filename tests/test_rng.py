"""Seeds, numbers by counting, and random states alike on all ranks."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import weft
from weft.keyed_random.philox import philox
from weft.testing import fake, run_ranks


def _draws():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_the_same_seed_gives_the_same_numbers():
    weft.rng.set_seed(3, fake(0, 2))
    first = _draws()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    assert _draws() == first  # as everybody seeds them
    weft.rng.set_seed(2**40, fake(0, 2))
    assert _draws() != first
    weft.rng.set_seed(3, fake(1, 2))
    assert _draws() == first
    seen = []
    for rank in range(4):
        assert weft.rng.set_seed(3, fake(rank, 4), ranks="distinct").seeds != ()
        seen.append(_draws())
    assert all(len({draws[library] for draws in seen}) == 4 for library in range(3))
    mesh = {"data": 2, "tensor": 2}
    pair = [weft.rng.set_seed(3, fake(rank, 4, mesh=mesh), ranks="distinct").seeds for rank in range(4)]
    assert pair[0] == pair[1] != pair[2] == pair[3]


def test_seeds_differ_along_the_axes_that_are_named():
    mesh = {"data": 2, "pipeline": 2, "tensor": 2}
    ranks = [fake(rank, 8, mesh=mesh) for rank in range(8)]

    def seeds(axes):
        return [weft.rng.set_seed(3, ctx, ranks=axes).seeds for ctx in ranks]

    assert seeds(["data"]) == seeds("distinct") and len(set(seeds([]))) == 1
    found = seeds(["pipeline"])
    assert found[0] == found[1] == found[4] == found[5] != found[2] == found[3] == found[6] == found[7]
    assert seeds(["tensor", "data"]) == seeds(["data", "tensor"]) and len(set(seeds(["data", "tensor"]))) == 4
    with pytest.raises(weft.errors.ContextError, match="'stage' is not an axis of this context"):
        seeds(["stage"])


def test_deterministic_mode_is_put_back():
    with weft.rng.set_seed(0, weft.local(), deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True])
def test_an_invalid_seed_is_refused(seed):
    with pytest.raises(ValueError, match="(?s)set_seed: seed = .*found:.*whole number, 0 to .*fix:"):
        weft.rng.set_seed(seed, weft.local())
    with pytest.raises(ValueError, match="(?s)worker_seeds:.*found:.*fix:"):
        weft.rng.worker_seeds(5000, weft.local())


def test_no_two_workers_of_any_two_ranks_share_a_stream():
    draws = []
    state = np.random.get_state()
    for rank in range(64):
        ctx = fake(rank, 64)
        for worker in range(64):
            weft.rng.worker_seeds(worker, ctx).apply()
            draws.append((random.getrandbits(62), np.random.randint(2**62), torch.randint(2**62, ()).item()))
    np.random.set_state(state)
    assert all(len({draw[library] for draw in draws}) == 64 * 64 for library in range(3))


class Noise(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, *_draws()], dtype=torch.float64)


def _worker_init(worker):
    get_worker_info().dataset.started = worker


class Started(Noise):
    started = None

    def __getitem__(self, index):
        return torch.tensor([index, self.started, get_worker_info().seed % 2**31])


def test_workers_have_seeds_of_their_own_and_run_the_users_start():
    found = []
    for rank in range(2):
        loader = DataLoader(Started(), batch_size=2, num_workers=2, worker_init_fn=_worker_init)
        loader, _ = weft.shard_data(loader, fake(rank, 2))
        found += [row for batch in loader for row in batch.tolist()]
        assert loader.worker_init_fn is _worker_init
    assert {row[1] for row in found} == {0, 1} and len({row[2] for row in found}) == 4


def _noise(world, workers=0, position=None, steps=None, keyed=True):
    found = {}
    for rank in range(world):
        loader = DataLoader(Noise(), batch_size=2, shuffle=True, num_workers=workers)
        loader, _ = weft.shard_data(loader, fake(rank, world, seed=1), keyed=keyed)
        if position is not None:
            loader.load_state_dict(position)
        for number, batch in enumerate(loader, start=1):
            found.update({int(row[0]): row for row in batch.tolist()})
            if number == steps:
                position = loader.state_dict()
                break
    return found, position


def test_keyed_augmentation_does_not_depend_on_ranks_workers_or_going_on():
    state = torch.get_rng_state()
    whole, _ = _noise(1)
    assert torch.equal(state, torch.get_rng_state())
    assert whole == _noise(2)[0] == _noise(3)[0] == _noise(2, workers=2)[0]
    assert whole != _noise(1, keyed=False)[0]
    first, position = _noise(1, steps=2)
    rest, _ = _noise(2, position=position)
    assert {**first, **rest} == whole and not set(first) & set(rest)
    assert len({row[3] for row in whole.values()}) == 12


def test_numbers_by_counting():
    ids = torch.randint(2**40, (50,))
    whole = weft.rng.keyed_uniform(ids, seed=1, epoch=2, shape=(3, 7))
    assert whole.shape == (50, 3, 7) and whole.dtype == torch.float32 and 0 <= whole.min() and whole.max() < 1
    assert torch.equal(weft.rng.keyed_uniform(ids[20:30], seed=1, epoch=2, shape=(3, 7)), whole[20:30])
    others = [{"seed": 2, "epoch": 2}, {"seed": 1, "epoch": 3}, {"seed": 1, "epoch": 2, "site": 1}]
    assert not any(torch.equal(weft.rng.keyed_uniform(ids, **o, shape=(3, 7)), whole) for o in others)
    many = weft.rng.keyed_uniform(torch.arange(1000), seed=0, epoch=0, shape=(100,)).double()
    # 100,000 draws: a mean is off by 0.0009 in one standard deviation.
    assert abs(many.mean() - 0.5) < 0.004 and abs(many.var() - 1 / 12) < 0.002 and len(many.unique()) > 99_000
    with pytest.raises(TypeError, match="(?s)found:.*float32.*fix:"):
        weft.rng.keyed_uniform(torch.ones(2), seed=0, epoch=0)


def test_normal_numbers_by_counting():
    ids = torch.randint(2**40, (50,))
    whole = weft.rng.keyed_normal(ids, seed=1, epoch=2, shape=(3, 7))
    assert whole.shape == (50, 3, 7) and whole.dtype == torch.float32
    assert torch.equal(weft.rng.keyed_normal(ids[20:30], seed=1, epoch=2, shape=(3, 7)), whole[20:30])
    assert torch.equal(weft.rng.keyed_normal(ids, seed=1, epoch=2, shape=(2, 7)), whole[:, :2])
    assert weft.rng.keyed_normal(ids, seed=1, epoch=2).shape == (50,)
    many = weft.rng.keyed_normal(torch.arange(1000), seed=0, epoch=0, shape=(100,)).double()
    # 100,000 draws: in one standard deviation, a mean is off by 0.003, a variance by 0.0045, a fourth moment by 0.03.
    assert abs(many.mean()) < 0.013 and abs(many.var() - 1) < 0.018 and abs(many.pow(4).mean() - 3) < 0.13
    assert many.isfinite().all() and abs((many[:, :-1] * many[:, 1:]).mean()) < 0.013
    with pytest.raises(TypeError, match="(?s)found:.*float32.*fix:"):
        weft.rng.keyed_normal(torch.ones(2), seed=0, epoch=0)


def test_philox_gives_the_published_numbers():
    """Known answers of Random123: counter and key all zero; all ones."""

    def words(counter, key):
        found = philox([torch.tensor([c]) for c in counter], key[0] + (key[1] << 32))
        return [f"{int(word):08x}" for word in found]

    assert words([0] * 4, [0] * 2) == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert words([2**32 - 1] * 4, [2**32 - 1] * 2) == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


def _synchronised(ctx):
    generator = torch.Generator().manual_seed(ctx.rank)
    torch.manual_seed(ctx.rank), random.seed(ctx.rank), np.random.seed(ctx.rank)
    weft.rng.sync_rng(ctx, generators=[generator], source=1)
    return (*_draws(), torch.rand((), generator=generator).item())


def test_random_states_of_one_rank_for_all():
    found = run_ranks(_synchronised, 2)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = (*_draws(), torch.rand((), generator=torch.Generator().manual_seed(1)).item())
    assert found == [expected, expected]
