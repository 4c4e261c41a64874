"""Batches of a batch sampler that are cut over the ranks: each is the global batch of a step."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.variants import variant_cases
from weft.testing import RanksFailed, fake, largest_difference, run_ranks

BATCHES = [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10, 11], [12, 13], [14]]


def _read(ranks, batches=BATCHES, **options):
    """For each rank, its batches: the samples, how many do not repeat, and the share."""
    found = []
    for rank in range(ranks):
        loader = DataLoader(range(20), batch_sampler=batches)
        loader, _ = weft.shard_data(loader, fake(rank, ranks), mode="split", with_ids=True, **options)
        found.append([(batch.tolist(), int(ids.valid.sum()), loader.share) for batch, ids in loader])
        assert len(loader) == len(found[-1]) == len(batches)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("uneven", ["empty", "pad"])
def test_the_parts_of_all_ranks_are_the_batches_of_the_sampler(ranks, uneven):
    found = _read(ranks, uneven=uneven)
    for step, batch in enumerate(BATCHES):
        parts = [rank[step] for rank in found]
        assert list(itertools.chain(*(samples[:valid] for samples, valid, _ in parts))) == batch
        sizes = [len(samples) for samples, _, _ in parts]
        assert max(sizes) - min(sizes) <= (uneven == "empty")
        assert all(set(samples) <= set(batch) for samples, _, _ in parts)
        assert [share for _, _, share in parts] == pytest.approx([size * ranks / sum(sizes) for size in sizes])


def test_what_does_not_fit_is_left_out_or_refused():
    large = [[0, 1, 2], [3, 4, 5, 6]]
    dropped = _read(2, large, uneven="drop")
    assert [[samples for samples, _, _ in rank] for rank in dropped] == [[[0], [3, 4]], [[1], [5, 6]]]
    balanced = _read(2, large)
    assert [[len(samples) for samples, _, _ in rank] for rank in balanced] == [[2, 2], [1, 2]]
    with pytest.raises(ValueError, match=r"(?s)3 samples, 2 ranks, uneven='error'.*a multiple of 2"):
        _read(2, large, uneven="error")
    for uneven in (None, "drop"):
        with pytest.raises(ValueError, match=r"(?s)1 samples, 2 ranks.*at least 2, or a choice.*fix: .*empty"):
            _read(2, [*large, [7]], uneven=uneven)
    with pytest.raises(ValueError, match=r"(?s)0 samples, 2 ranks.*at least 1.*fix: .*if batch: yield batch"):
        _read(2, [*large, []], uneven="empty")


def test_batches_without_an_end_are_cut_as_they_come():
    class Endless:
        def __iter__(self):
            return itertools.cycle(BATCHES[:4])

    loaders = [
        weft.shard_data(DataLoader(range(20), batch_sampler=Endless()), fake(rank, 2), mode="split", uneven="empty")[0]
        for rank in range(2)
    ]
    pairs = itertools.islice(zip(*loaders, strict=True), 10)
    assert [[*one.tolist(), *two.tolist()] for one, two in pairs] == [*BATCHES[:4], *BATCHES[:4], *BATCHES[:2]]


ROWS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LENGTHS = [3, 90, 4, 88, 5, 91, 2, 89, 7, 60] * 4


def _sampler():
    return weft.data.length_batches(LENGTHS, batch_size=6)


def _train(ctx, folder, strategy, windows, workers, stop=None):
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(ROWS), batch_sampler=_sampler(), num_workers=workers)
    loader, ctx = weft.shard_data(loader, ctx, mode="split", uneven="empty")
    model, ctx = getattr(weft, strategy)(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double(), ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if windows:
        model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=windows)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
    restored = weft.restore(state, folder, ctx)
    step = restored.step if restored else 0
    while loader.epoch < 2:
        for window in loader:
            for (x,) in window if windows else [window]:
                share = window.share if windows else loader.share
                loss = model(x).square().sum() / max(len(x), 1)
                (loss * share).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == stop:
                weft.save(state, folder, step, ctx)
                return None
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def _plain(windows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader, _ = weft.shard_data(DataLoader(range(40), batch_sampler=_sampler()), weft.local())  # of whole batches
    for _ in range(2):
        batches = [batch.tolist() for batch in loader]
        for start in range(0, len(batches), windows or 1):
            rows = list(itertools.chain(*batches[start : start + (windows or 1)]))
            model(ROWS[rows]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("strategy", "windows", "workers", "before", "after"),
    [
        ("replicate", 0, 0, 2, 4),
        ("fully_shard", 3, 0, 4, 1),
        *variant_cases(("fully_shard", 0, 1, 1, 4), ("replicate", 3, 0, 4, 2), ("replicate", 2, 2, 2, 2)),
    ],
)
def test_training_is_that_of_one_process_also_after_a_resume_on_other_ranks(
    tmp_path, strategy, windows, workers, before, after
):
    run_ranks(_train, before, tmp_path, strategy, windows, workers, 4 if windows else 5)
    for found in run_ranks(_train, after, tmp_path, strategy, windows, workers):
        assert largest_difference(found, _plain(windows)) < 1e-12


def _sizes_differ(ctx):
    batches = [[0, 1], [2, 3]] if ctx.rank == 0 else [[0, 1, 2], [3]]
    loader, ctx = weft.shard_data(DataLoader(range(4), batch_sampler=batches), ctx, mode="split")
    return list(loader)


def test_samplers_that_yield_other_batches_on_a_rank_are_named():
    with pytest.raises(RanksFailed, match="in different orders"):
        run_ranks(_sizes_differ, 2)
