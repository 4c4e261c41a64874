"""accumulate_grads: windows, remainders, schedules, denominators, and what is not disturbed by them."""

import gc
import itertools
import os
import random
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import weft
from weft.data.windows.micro_batches import WindowBatches
from weft.testing import largest_difference, run_ranks


def _windows(loader, steps=3, **options):
    return weft.accumulate_grads(nn.Linear(1, 1), loader, weft.local(), steps=steps, **options)[1]


def _contents(windows):
    found = []
    for window in windows:
        batches = list(window)
        assert len(window) == len(batches)
        found.append([b.tolist() if isinstance(b, torch.Tensor) else b for b in batches])
    return found


# -- windows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remainder", "epochs", "lengths"),
    [
        ("step", [[[0, 1, 2], [3, 4, 5], [6]]] * 3, [3, 3, 3]),
        ("drop", [[[0, 1, 2], [3, 4, 5]]] * 3, [2, 2, 2]),
        (
            "carry",
            [[[0, 1, 2], [3, 4, 5]], [[6, 0, 1], [2, 3, 4]], [[5, 6, 0], [1, 2, 3], [4, 5, 6]]],
            [2, 2, 3],
        ),
    ],
)
@pytest.mark.parametrize("kind", ["list", "loader", "unsized", "iterable loader"])
def test_windows_of_three_epochs(kind, remainder, epochs, lengths):
    loader = {
        "list": list(range(7)),
        "loader": DataLoader(range(7), batch_size=None),
        "unsized": Unsized(7),
        "iterable loader": DataLoader(Stream(7), batch_size=None),
    }[kind]
    windows = _windows(loader, remainder=remainder)
    for expected, length in zip(epochs, lengths, strict=True):
        if kind in ("list", "loader"):
            assert len(windows) == length
        assert _contents(windows) == expected


class Unsized:
    """Iterable again and again, without a length."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Stream(IterableDataset):
    """Splits itself among workers, as its documentation asks for."""

    def __init__(self, size, told=None):
        self.size = size
        if told is not None:
            self.told = told

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter(range(0 if info is None else info.id, self.size, 1 if info is None else info.num_workers))


class SizedStream(Stream):
    def __len__(self):
        return self.told


def test_a_generator_is_used_up_after_one_epoch():
    windows = _windows(x for x in range(4))
    assert _contents(windows) == [[0, 1, 2], [3]] and _contents(windows) == []
    with pytest.raises(TypeError, match="has no len"):
        len(windows)


def test_an_iterable_loader_is_cut_by_what_it_yields_and_not_by_its_guess():
    # 4 + 4 samples of two workers are 2 + 2 batches of three, but len() is ceil(8 / 3)
    loader = DataLoader(SizedStream(8, told=8), batch_size=3, num_workers=2)
    loader.dataset.told = 12  # or torch warns that its guess was wrong
    found = _contents(_windows(loader))
    assert sorted(itertools.chain(*itertools.chain(*found))) == list(range(8))
    assert [len(window) for window in found] == [3, 1]


def test_workers_and_kept_attributes():
    def collate(samples):
        return torch.stack(samples) + 100

    dataset = TensorDataset(torch.arange(10.0))
    loader = DataLoader(
        dataset,
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=3,
        collate_fn=lambda samples: collate([s[0] for s in samples]),
    )
    loader.note = "mine"
    windows = _windows(loader)
    assert isinstance(windows, DataLoader) and windows.note == "mine" and windows is not loader
    kept = ("dataset", "sampler", "batch_sampler", "collate_fn", "num_workers", "prefetch_factor", "persistent_workers")
    assert all(getattr(windows, name) is getattr(loader, name) for name in kept)
    expected = [[[100, 101], [102, 103], [104, 105]], [[106, 107], [108, 109]]]
    assert _contents(windows) == expected and _contents(windows) == expected
    assert len(windows) == 2 and len(loader) == 5
    assert torch.equal(next(iter(loader)), torch.tensor([100.0, 101.0]))  # the original yields batches
    windows._iterator = loader._iterator = None  # ends the workers


def test_a_subclass_of_dataloader_stays_one():
    class Mine(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch * 2

        def __len__(self):
            return super().__len__()

    windows = _windows(Mine(range(4), batch_size=2), steps=5)
    assert isinstance(windows, Mine) and _contents(windows) == [[[0, 2], [4, 6]]] and len(windows) == 1


@pytest.mark.parametrize("remainder", ["step", "drop", "carry"])
@pytest.mark.parametrize("loader", [[], DataLoader([], batch_size=2), Unsized(0)], ids=["list", "loader", "unsized"])
def test_an_empty_loader_has_no_windows(loader, remainder):
    windows = _windows(loader, remainder=remainder)
    assert _contents(windows) == [] and _contents(windows) == []
    if not isinstance(loader, Unsized):
        assert len(windows) == 0


def test_a_window_larger_than_the_loader():
    assert _contents(_windows([1, 2], steps=9)) == [[1, 2]]
    assert _contents(_windows([1, 2], steps=9, remainder="drop")) == []
    carried = _windows([1, 2], steps=5, remainder="carry")
    assert [_contents(carried) for _ in range(3)] == [[], [], [[1, 2, 1, 2, 1]]]


@pytest.mark.parametrize("remainder", ["step", "drop", "carry"])
def test_length_stays_the_same_while_an_epoch_runs(remainder):
    windows = _windows(list(range(5)), steps=lambda window: 1 + window % 3, remainder=remainder)
    for _ in range(4):
        promised, during = len(windows), []
        for window in windows:
            during.append(len(windows))
            list(window)
        assert during == [promised] * promised


def test_break_leaves_the_rest_of_a_window_out():
    windows = _windows(list(range(7)))
    firsts = []
    for window in windows:
        for batch in window:
            firsts.append(batch)
            break
    assert firsts == [0, 3, 6]


def test_a_window_goes_on_after_a_break_and_only_once():
    windows = _windows(list(range(7)))
    window = next(iter(windows))
    for batch in window:
        if batch == 1:
            break
    assert list(window) == [2]
    with pytest.raises(weft.errors.ContractError, match=r"(?s)found:    all 3 micro-batches.*fix:    .*list\(window\)"):
        list(window)


def test_a_window_kept_for_later_is_not_silently_empty():
    kept = list(_windows(list(range(7))))
    assert [len(window) for window in kept] == [3, 3, 1]
    with pytest.raises(weft.errors.ContractError, match=r"(?s)iterated a second time.*fix:"):
        list(kept[0])


def test_an_epoch_left_early_begins_anew():
    windows = _windows(list(range(7)), remainder="carry")
    for window in windows:
        assert list(window) == [0, 1, 2]
        break
    assert len(windows) == 2 and _contents(windows) == [[0, 1, 2], [3, 4, 5]]


def test_two_passes_at_the_same_time():
    windows = _windows(list(range(5)))
    pairs = [(list(a), list(b)) for a, b in zip(windows, windows, strict=True)]
    assert pairs == [([0, 1, 2],) * 2, ([3, 4],) * 2]


def test_windows_of_a_resumed_loader_that_is_left_early():
    """The next epoch is a whole one again, also in windows."""
    loader, ctx = weft.shard_data(DataLoader(range(12), batch_size=2), weft.local())
    loader.load_state_dict({**loader.state_dict(), "samples": 8})
    _, windows, _ = weft.accumulate_grads(nn.Linear(1, 1), loader, ctx, steps=2)
    for window in windows:
        assert len(windows) == 3 and windows.remaining == 0 and [b.tolist() for b in window] == [[8, 9], [10, 11]]
        break
    assert _contents(windows) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]


class Liar(list):
    def __init__(self, items, told):
        super().__init__(items)
        self.told = told

    def __len__(self):
        return self.told


@pytest.mark.parametrize("remainder", ["step", "drop", "carry"])
@pytest.mark.parametrize(("told", "text"), [(7, "found:    fewer batches"), (4, "found:    more batches")])
def test_a_loader_with_an_untrue_length(told, text, remainder):
    with pytest.raises(weft.errors.ContractError, match=f"(?s){text}.*fix:.*def __len__"):
        for window in _windows(Liar(range(5), told), remainder=remainder):
            list(window)


# -- schedules ---------------------------------------------------------------------------------------


def test_a_schedule_goes_on_over_epochs():
    windows = _windows(list(range(7)), steps=lambda window: (1, 2, 4)[min(window, 2)])
    assert len(windows) == 3 and _contents(windows) == [[0], [1, 2], [3, 4, 5, 6]]
    assert len(windows) == 2 and _contents(windows) == [[0, 1, 2, 3], [4, 5, 6]]


def test_a_schedule_trains_as_windows_of_those_sizes():
    x = torch.randn(14, 3, 2, dtype=torch.float64)
    model, expected = _net(), _net()
    optimizer, plain = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, expected))
    model, windows, _ = weft.accumulate_grads(model, x, weft.local(), steps=lambda window: 2**window)
    for window in windows:
        for batch in window:
            (model(batch).square().mean() / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for part in x.split([1, 2, 4, 7]):
        expected(part.flatten(0, 1)).square().mean().backward()
        plain.step()
        plain.zero_grad()
    assert largest_difference(_values(model), _values(expected)) < 1e-14


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, None])
def test_a_schedule_with_a_bad_size(bad):
    with pytest.raises(ValueError, match=r"(?s)steps\(0\) = .*fix:"):
        _windows([1, 2], steps=lambda window: bad)
    late = _windows([1, 2], steps=lambda window: bad if window else 1)
    with pytest.raises(ValueError, match=r"(?s)steps\(1\) = .*fix:"):
        list(late)


# -- reduction ---------------------------------------------------------------------------------------


def _net(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()


def _values(model):
    return [p.detach() for p in model.parameters()]


def _warm(model):
    """One reduction: after the first, buckets are made anew, for which the ranks meet."""
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    model.zero_grad()


def _x(rank, rows=3):
    return torch.randn(rows, 2, generator=torch.Generator().manual_seed(rank + 10), dtype=torch.float64)


def _collectives(call):
    """Number of collectives in a call; of a backward, for instance."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as counter:
        call()
    return counter.get_total_counts()


def _count_reductions(ctx, reduce, options):
    """Collectives in each backward of two windows of 3 + 1, and the gradients of the windows."""
    model, ctx = weft.replicate(_net(), ctx, **options)
    _warm(model)
    data = [_x(4 * ctx.rank + i) for i in range(4)]
    model, windows, ctx = weft.accumulate_grads(model, data, ctx, steps=3, reduce=reduce)
    counts, gradients = [], []
    for window in windows:
        row = [_collectives((model(x).square().mean() / len(window)).backward) for x in window]
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
        counts.append(row)
    model(_x(0)).sum().backward()  # after the windows every backward is reduced again
    return counts, gradients, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("reduce", "options", "counts"),
    [
        ("last", {}, [[0, 0, 1], [1]]),
        ("every", {}, [[1, 1, 1], [1]]),
        ("last", {"bucket_bytes": 1}, [[0, 0, 4], [4]]),
        ("last", {"unused": "zero", "flat": True}, [[0, 0, 2], [2]]),  # which were used, and the values
    ],
    ids=str,
)
def test_reductions_are_counted_and_gradients_are_means(reduce, options, counts):
    expected = []
    for window in ((0, 1, 2), (3,)):
        plain = _net()
        for rank, i in itertools.product(range(2), window):
            (plain(_x(4 * rank + i)).square().mean() / len(window) / 2).backward()
        expected.append([p.grad for p in plain.parameters()])
    found = run_ranks(_count_reductions, 2, reduce, options)
    for found_counts, gradients, after in found:
        assert found_counts == counts
        assert largest_difference(gradients, expected) < 1e-15
        assert largest_difference(after, found[0][2]) == 0


def _parts(ctx):
    """The replicated module is a part of what is accumulated: still one reduction, and the true mean."""
    whole = nn.ModuleDict({"inner": _net()})
    _, ctx = weft.replicate(whole["inner"], ctx)
    _warm(whole["inner"])
    whole, windows, ctx = weft.accumulate_grads(whole, [_x(ctx.rank), _x(ctx.rank + 2)], ctx, steps=2)
    counts = []
    for window in windows:
        rows = window.denominator(len)
        counts.extend(_collectives((whole["inner"](x).square().sum() / rows).backward) for x in window)
    return rows, counts, [p.grad.clone() for p in whole.parameters()]


def test_a_replicated_part_of_an_accumulated_module():
    plain = _net()
    plain(torch.cat([_x(i) for i in range(4)])).square().mean().backward()
    for rows, counts, gradients in run_ranks(_parts, 2):
        assert rows == 6 and counts == [0, 1]
        assert largest_difference(gradients, [p.grad for p in plain.parameters()]) < 1e-15


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right, self.spare = (nn.Linear(2, 2) for _ in range(4))

    def forward(self, x, side):
        return {"left": self.left, "right": self.right}[side](self.trunk(x))


def _branches(ctx, flat, sides):
    """Which parameters are used changes inside of a window; outputs of earlier micro-batches live on."""
    torch.manual_seed(0)
    model, ctx = weft.replicate(Branches(), ctx, flat=flat, unused="zero")
    model, windows, ctx = weft.accumulate_grads(model, sides[ctx.rank], ctx, steps=2)
    results, outputs = [], []
    model(torch.ones(1, 2), "right")  # a forward pass without a backward
    for window in windows:
        for side in window:
            outputs.append(model(torch.ones(1, 2) * (ctx.rank + 1), side))
            (outputs[-1].sum() / len(window)).backward()
        results.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
    return results


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "sides",
    [
        [["left", "right"], ["left", "right"]],
        [["left", "left"], ["right", "left"]],
        [["left", "left", "right", "left", "left"], ["left", "right", "left", "left", "left"]],
    ],
    ids=str,
)
def test_a_parameter_used_in_some_micro_batches_only(flat, sides):
    torch.manual_seed(0)
    plain = Branches()
    found = run_ranks(_branches, 2, flat, sides)
    for number, start in enumerate(range(0, len(sides[0]), 2)):
        window = range(start, min(start + 2, len(sides[0])))
        for rank, i in itertools.product(range(2), window):
            (plain(torch.ones(1, 2) * (rank + 1), sides[rank][i]).sum() / len(window) / 2).backward()
        for name, p in plain.named_parameters():
            for rank in range(2):
                if p.grad is None:
                    assert found[rank][number][name] is None, name
                else:
                    assert torch.allclose(found[rank][number][name], p.grad, atol=1e-6), name
        plain.zero_grad()


def _left_early(ctx, how):
    """A window is left early; what is done afterwards is as if it had not been."""
    model, ctx = weft.replicate(_net(), ctx)
    data = [_x(4 * ctx.rank + i) for i in range(4)]
    model, windows, ctx = weft.accumulate_grads(model, data, ctx, steps=2)
    sync = weft.contract.offered(model, weft.contract.GradSync)[0]
    kept = []
    try:
        for window in windows:
            stream = iter(window)
            kept.append(stream)  # somebody holds on to it
            for x in stream:
                model(x).sum().backward()
                assert not sync.enabled
                if how == "exception":
                    raise KeyError("inside")
                break
            model.zero_grad()
            if how == "break both":
                break
    except KeyError:
        model.zero_grad()
    del window
    if how == "exception":
        kept.clear()
    assert sync.enabled
    window = next(iter(windows))
    for number, x in enumerate(window):
        kept.clear()  # an old window that goes now changes nothing
        gc.collect()
        assert sync.enabled == (number == 1)
        (model(x).square().mean() / len(window)).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("how", ["break", "break both", "exception"])
def test_a_window_left_early_disturbs_nothing(how):
    plain = _net()
    for i in (0, 1, 4, 5):
        (plain(_x(i)).square().mean() / 4).backward()
    for found in run_ranks(_left_early, 2, how):
        assert largest_difference(found, [p.grad for p in plain.parameters()]) < 1e-15


# -- denominators ------------------------------------------------------------------------------------


def _denominators(ctx):
    def of(*counts):
        """Of one window with these counts per rank."""
        model, c = weft.replicate(_net(), ctx)
        _, windows, c = weft.accumulate_grads(model, [counts[ctx.rank]] * 2, c, steps=2)
        window = next(iter(windows))
        given = window.denominator(lambda batch: batch)
        assert len(list(window)) == 2 and window.denominator(lambda batch: batch) == given
        return given

    mask = torch.tensor([[True, False], [True, True]])
    half = torch.ones(4000, dtype=torch.float16)
    return [
        of(3, 5),
        of(0, 5),
        of(0, 0),
        of(0.5, 0.25),
        of(torch.tensor(7), torch.tensor(2)),
        of(mask, ~mask),
        of(half, half[:1]),
        of(torch.tensor(2**40), torch.tensor(1)),
        of(torch.tensor([2.0, 1.0], requires_grad=True), torch.zeros(0)),
    ]


def test_denominators_of_all_kinds_of_counts():
    # two equal micro-batches, mean over two ranks: the sum over the ranks; of zero, 1 in one process
    for found in run_ranks(_denominators, 2):
        assert found == [8, 5, 0.5, 0.75, 9, 4, 4001, 2**40 + 1, 3]


def test_denominator_of_a_number_on_one_rank():
    window = next(iter(_windows([1, 2])))
    assert window.denominator(6) == 6 and window.denominator(0) == 1
    assert window.denominator(2.0**25 + 1) == 2**25 + 1  # more digits than a float32 has
    assert next(iter(window)) == 1 and window.denominator(torch.tensor(2.5)) == 2.5


def test_means_per_micro_batch_are_no_mistake():
    batches, ctx = [torch.ones(2), torch.ones(1)], weft.local()
    _, windows, ctx = weft.accumulate_grads(nn.Linear(1, 1), batches, ctx, steps=2)
    for window in windows:
        for batch in window:
            assert weft.metrics.denominator(len(batch), ctx) * len(window) > 0  # and no warning


def test_denominator_reads_ahead_but_not_behind():
    window = next(iter(_windows([1, 2, 3])))
    next(iter(window))
    with pytest.raises(weft.errors.ContractError, match=r"(?s)found:    1 of 3 micro-batches used already.*fix:"):
        window.denominator(lambda batch: batch)
    window = next(iter(_windows([1, 2, 3])))
    assert window.denominator(lambda batch: batch) == 6
    next(iter(window))
    assert window.denominator(lambda batch: 2 * batch) == 12


def _bad_counts(ctx, mine):
    model, ctx = weft.replicate(_net(), ctx)
    _, windows, ctx = weft.accumulate_grads(model, [1], ctx, steps=1)
    with pytest.raises(ValueError, match=rf"(?s)negative, not finite.*on rank {ctx.rank}.*fix:"):
        next(iter(windows)).denominator(mine[ctx.rank])
    return True


@pytest.mark.parametrize(
    "bad", [-1, float("nan"), float("inf"), torch.tensor(-3.0)], ids=lambda value: type(value).__name__
)
def test_a_bad_count_on_one_rank_raises_on_all(bad):
    assert run_ranks(_bad_counts, 2, [5, bad]) == [True, True]


def _fails_on_one(ctx):
    model, ctx = weft.replicate(_net(), ctx)
    _, windows, ctx = weft.accumulate_grads(model, [1], ctx, steps=1)
    next(iter(windows)).denominator(lambda batch: 1 // (1 - ctx.rank))


def test_a_count_that_fails_on_one_rank_reaches_the_other():
    with pytest.raises(weft.testing.RanksFailed, match="integer division or modulo by zero") as caught:
        run_ranks(_fails_on_one, 2)
    assert caught.value.first == 1 and not isinstance(caught.value.errors[1], weft.errors.PeerError)


def _token_mean(ctx, empty):
    """A token-normalised loss over sequences of different lengths; some micro-batches have no token."""
    torch.manual_seed(0)
    embed = nn.Embedding(5, 4).double()
    model, ctx = weft.replicate(embed, ctx)
    draw = torch.Generator().manual_seed(ctx.rank + 1)
    data = [torch.randint(0, 5, (n,), generator=draw) for n in (empty if ctx.rank else [3, 0, 7, 1, 4])]
    model, windows, ctx = weft.accumulate_grads(model, data, ctx, steps=3)
    results = []
    for window in windows:
        tokens = window.denominator(torch.numel)
        loss = 0.0
        for ids in window:
            part = model(ids).square().sum() / tokens
            part.backward()
            loss += part.item()
        mean = weft.reduce(torch.tensor(loss, dtype=torch.float64), ctx, "mean").item()
        results.append((model.weight.grad.clone(), mean))
        model.zero_grad()
    return data, results


@pytest.mark.parametrize("lengths", [[1, 9, 2, 0, 2], [0, 0, 0, 0, 0]], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("n", [1, 2])
def test_a_token_mean_is_exactly_the_global_one(n, lengths):
    found = run_ranks(_token_mean, n, lengths)
    for number, start in enumerate((0, 3)):
        torch.manual_seed(0)
        plain = nn.Embedding(5, 4).double()
        ids = torch.cat([data[i] for data, _ in found for i in range(start, min(start + 3, 5))])
        loss = plain(ids).square().sum() / len(ids)
        loss.backward()
        for _, results in found:
            gradient, mean = results[number]
            assert torch.allclose(gradient, plain.weight.grad, atol=1e-15, rtol=0)
            assert mean == pytest.approx(loss.item(), abs=1e-15)


# -- several modules and loaders ---------------------------------------------------------------------


def _train_gan(generator, discriminator, optimizers, g_windows, d_windows):
    """Two windows loaders with different steps side by side, each for its own module."""
    for g_window, d_window in zip(g_windows, d_windows, strict=True):
        for batch in d_window:
            fake = generator(batch).detach()
            ((discriminator(fake) - discriminator(batch)).mean() / len(d_window)).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        for batch in g_window:
            (-discriminator(generator(batch)).mean() / len(g_window)).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
    return [p.detach().clone() for m in (generator, discriminator) for p in m.parameters()]


def _gan(ctx, n):
    """With `n` ranks' data on as many ranks as there are."""
    generator, discriminator = _net(2), _net()
    g_data, d_data = (
        [torch.stack([_x(100 * r + 50 * k + i) for r in range(n)]) for i in range(s)] for k, s in ((0, 4), (1, 6))
    )
    if ctx.world_size > 1:
        g_data, d_data = ([x[ctx.rank] for x in data] for data in (g_data, d_data))
    else:
        g_data, d_data = ([x.flatten(0, 1) for x in data] for data in (g_data, d_data))
    generator, ctx = weft.replicate(generator, ctx)
    discriminator, ctx = weft.replicate(discriminator, ctx, flat=True)
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (generator, discriminator)]
    generator, g_windows, ctx = weft.accumulate_grads(generator, g_data, ctx, steps=2)
    discriminator, d_windows, ctx = weft.accumulate_grads(discriminator, d_data, ctx, steps=3)
    return _train_gan(generator, discriminator, optimizers, g_windows, d_windows)


def test_a_gan_with_two_windows_loaders():
    plain = run_ranks(_gan, 1, 2)[0]
    for found in run_ranks(_gan, 2, 2):
        assert largest_difference(found, plain) < 1e-13


def _several(ctx, kind):
    one, ctx = weft.replicate(_net(2), ctx)
    two, ctx = weft.replicate(_net(), ctx, bucket_bytes=1)
    _warm(one)
    _warm(two)
    group = {"tuple": (one, two), "list": [one, two], "dict": {"one": one, "two": two}}[kind]
    data = [_x(2 * ctx.rank + i) for i in range(2)]
    modules, windows, ctx = weft.accumulate_grads(group, data, ctx, steps=2)
    assert modules is group and [len(ctx.records(m)) for m in (one, two)] == [2, 2]
    for window in windows:
        counts = [_collectives(two(one(x)).mean().backward) for x in window]
    return counts, [p.grad.clone() for m in (one, two) for p in m.parameters()]


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_several_modules_in_one_window(kind):
    one, two = _net(2), _net()
    for i in range(4):
        (two(one(_x(i))).mean() / 2).backward()
    for counts, found in run_ranks(_several, 2, kind):
        assert counts == [0, 1 + 4]  # one bucket, and one for each of four parameters
        assert largest_difference(found, [p.grad for m in (one, two) for p in m.parameters()]) < 1e-15


def _other_things_inside(ctx):
    """Another loader, evaluation and another model's training inside of a window change nothing."""
    model, ctx = weft.replicate(_net(), ctx)
    other, ctx = weft.replicate(_net(), ctx)
    data = [_x(4 * ctx.rank + i) for i in range(4)]
    model, windows, ctx = weft.accumulate_grads(model, data, ctx, steps=2)
    other, other_windows, ctx = weft.accumulate_grads(other, data, ctx, steps=3)
    evaluation = DataLoader(torch.stack(data), batch_size=2)
    gradients, scores = [], []
    for window in windows:
        for x in window:
            (model(x).square().mean() / len(window)).backward()
            model.eval()
            with torch.no_grad():
                scores.append([model(batch).sum().item() for batch in evaluation])
            model.train()
            for inner in other_windows:
                for y in inner:
                    other(y).mean().backward()
                    break
                other.zero_grad()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    return gradients


def test_other_loaders_and_evaluation_inside_of_a_window():
    expected = []
    for window in ((0, 1), (2, 3)):
        plain = _net()
        for rank, i in itertools.product(range(2), window):
            (plain(_x(4 * rank + i)).square().mean() / 4).backward()
        expected.append([p.grad for p in plain.parameters()])
    for found in run_ranks(_other_things_inside, 2):
        assert largest_difference(found, expected) < 1e-15


# -- with fp16 ---------------------------------------------------------------------------------------


def _fp16(ctx, flat):
    """An overflow in the first micro-batch skips the step of its window, and of that one only."""
    model, ctx = weft.with_precision(_net().float(), ctx, "fp16")
    model, ctx = weft.replicate(model, ctx, flat=flat)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    data = [_x(6 * ctx.rank + i).float() for i in range(6)]
    model, windows, ctx = weft.accumulate_grads(model, data, ctx, steps=2)
    steps = []
    for number, window in enumerate(windows):
        for index, x in enumerate(window):
            factor = float("inf") if (number, index, ctx.rank) == (1, 0, 1) else 1.0
            (factor * model(x).square().mean() / len(window)).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        steps.append((weft.was_skipped(optimizer), weft.loss_scale(model), gradients))
        optimizer.zero_grad()
    return steps, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("flat", [False, True])
def test_fp16_skips_the_window_with_the_overflow_on_all_ranks(flat):
    plain = _net()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for window in ((0, 1), (4, 5)):
        for rank, i in itertools.product(range(2), window):
            (plain(_x(6 * rank + i)).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = run_ranks(_fp16, 2, flat)
    for steps, parameters in found:
        assert [skipped for skipped, _, _ in steps] == [False, True, False]
        assert [scale for _, scale, _ in steps] == [2.0**16, 2.0**15, 2.0**15]
        assert largest_difference(parameters, _values(plain)) < 2e-3  # 2**-11 a step, gradients about 1
        assert largest_difference(parameters, found[0][1]) == 0


# -- without ranks or replicas -----------------------------------------------------------------------


def test_one_rank_without_replicate_is_plain_torch_bit_for_bit():
    x = torch.randn(9, 2, dtype=torch.float64)
    model, plain = _net(), _net()
    model, windows, ctx = weft.accumulate_grads(model, DataLoader(x, batch_size=3), weft.local(), steps=2)
    for window in windows:
        for batch in window:
            (model(batch).square().mean() / len(window)).backward()
    for window in (x.split(3)[:2], x.split(3)[2:]):
        for batch in window:
            (plain(batch).square().mean() / len(window)).backward()
    assert largest_difference([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]) == 0
    assert [record.name for record in ctx.applied] == ["accumulate_grads"]


# -- refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": 0}, "found:    0"),
        ({"steps": -2}, "found:    -2"),
        ({"steps": 2.0}, "found:    2.0"),
        ({"steps": True}, "found:    True"),
        ({"steps": {0: 1}}, "found:    {0: 1}"),
        ({"remainder": "keep"}, "found:    'keep'"),
        ({"reduce": "never"}, "found:    'never'"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_bad_options(options, text):
    with pytest.raises(ValueError, match=f"(?s){text}.*fix:"):
        _windows([1], **options)


@pytest.mark.parametrize(
    ("modules", "loader", "text"),
    [
        ([1], [1], "found:    int; list"),
        (7, [1], "found:    int; list"),
        ([], [1], "found:    no module; list"),
        ({}, [1], "found:    no module; list"),
        ({"a": None}, [1], "found:    NoneType; list"),
        (nn.Linear(1, 1), 5, "found:    Linear; int"),
        ((m for m in [nn.Linear(1, 1)]), [1], "found:    generator; list"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_what_is_neither_module_nor_loader(modules, loader, text):
    with pytest.raises(TypeError, match=f"(?s){text}.*fix:"):
        weft.accumulate_grads(modules, loader, weft.local(), steps=2)


def test_twice_and_too_late():
    model, windows, ctx = weft.accumulate_grads(_net(), [1], weft.local(), steps=2)
    with pytest.raises(weft.errors.AlreadyApplied, match=r"(?s)this Sequential already has this transform.*fix:"):
        weft.accumulate_grads(model, [1], ctx, steps=2)
    with pytest.raises(weft.errors.AlreadyApplied, match=r"(?s)this Windows already has this transform.*fix:"):
        weft.accumulate_grads(_net(), windows, ctx, steps=2)
    with pytest.raises(weft.errors.OrderError, match=r"(?s)replicate: comes too late.*fix:"):
        weft.replicate(model, ctx)


def _disagree(ctx, what):
    model, ctx = weft.replicate(_net(), ctx)
    options = {"steps": 2, "loader": [1] * 4}
    if what == "windows":
        options["loader"] = [1] * (4 + ctx.rank)
    elif what == "steps":
        options["steps"] = 2 + ctx.rank
    elif what == "schedule":
        options["steps"] = lambda window: 2 + ctx.rank
    try:
        weft.accumulate_grads(model, options["loader"], ctx, steps=options["steps"])
    except weft.errors.ContextError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("windows", "windows per epoch: 2 on rank 0, 3 on rank 1"),
        ("steps", "steps: 2 on rank 0, 3 on rank 1"),
        ("schedule", "steps: 'schedule, at first 2' on rank 0, 'schedule, at first 3' on rank 1"),
    ],
)
def test_ranks_that_disagree(what, text):
    for found in run_ranks(_disagree, 2, what):
        assert text in found


class Summed:
    """A strategy of a user's own, over another number of ranks than `replicate`'s."""

    mean_over = 3

    def begin_window(self):
        pass

    def last_backward(self):
        pass

    def end_window(self, *, left=False):
        pass


def test_modules_with_different_denominators():
    @weft.transform()
    def sum_gradients(module, ctx, *, ranks):
        offer = Summed()
        offer.mean_over = ranks
        return module, ctx.offering(offer)

    ctx = weft.local()
    one, ctx = sum_gradients(_net(), ctx, ranks=1)
    two, ctx = sum_gradients(_net(), ctx, ranks=3)
    with pytest.raises(ValueError, match=r"(?s)found:    \[1, 3\] ranks.*fix:"):
        weft.accumulate_grads([one, two], [1], ctx, steps=2)


# -- nothing global, nothing left --------------------------------------------------------------------


def _global_state():
    return (
        dict(os.environ),
        random.getstate(),
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
        {name: id(value) for name, value in vars(weft).items()},
        {name: id(value) for name, value in vars(sys.modules["weft.transforms.accumulate_grads"]).items()},
    )


def test_nothing_global_changes_and_nothing_is_left():
    assert weft.accumulate_grads  # its modules are imported now, not in between
    loader, ctx = weft.shard_data(DataLoader(torch.randn(9, 2), batch_size=2, shuffle=True), weft.local())
    model = _net().float()
    before = _global_state()
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=2, remainder="carry")
    for window in windows:
        window.denominator(len)
        for x in window:
            model(x).sum().backward()
    assert _global_state() == before
    first = next(iter(window.__class__(WindowBatches(iter([(1, None)]), 1), windows.weft_splitter.sync)))
    assert first == 1
    refs = [weakref.ref(part) for part in (model, loader, windows, window, ctx, windows.weft_splitter)]
    del model, loader, windows, window, ctx, x
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_a_window_that_is_used_as_a_batch_says_so():
    model, windows, _ = weft.accumulate_grads(nn.Linear(1, 1), [torch.ones(2, 1)] * 4, weft.local(), steps=2)
    window = next(iter(windows))
    with pytest.raises(TypeError, match="(?s)a window was passed to linear.*for batch in window"):
        model(window)
    for use in (lambda: torch.stack(window), lambda: window["x"], lambda: window[0]):
        with pytest.raises(TypeError, match="(?s)a window was.*for batch in window"):
            use()
    with pytest.raises(AttributeError, match="(?s)a window was asked for its attribute 'to'"):
        window.to("cpu")
    assert [len(batch) for batch in window] == [2, 2] and not hasattr(window, "__array__")
