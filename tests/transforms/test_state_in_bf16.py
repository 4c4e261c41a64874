"""state_in_bf16: the moments of AdamW in 16 bits, rounded by chances that follow from the place of each element."""

from functools import partial

import pytest
import torch
from torch import nn

import weft
from tests.contract.test_name_table import net
from tests.fix_lines.told import told
from tests.variants import variant_cases
from weft.engines.torch.steps.step_by_parts import AroundPart
from weft.keyed_random.elements import words_block
from weft.tensors.blocks import Block, whole
from weft.testing import largest_difference, run_ranks
from weft.transforms import state_in_bf16 as transform_file

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
BF16 = torch.bfloat16


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def moments(optimizer):
    return {value.dtype for state in optimizer.state.values() for key, value in state.items() if key != "step"}


def train(ctx, how, *, save=None, restore=None, part_bytes=None, seed=None):
    """Six steps, or those after a checkpoint."""
    if part_bytes is not None:
        transform_file.AroundPart = partial(AroundPart, part_bytes=part_bytes)
    model, mine = net().double(), X.chunk(ctx.world_size)[ctx.rank]
    optimizer = adamw(model.named_parameters()) if how in ("plain", "zero1", "zero2", "zero3") else None
    if how.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(how[4]))
    elif how in ("replicate", "flat"):
        model, ctx = weft.replicate(model, ctx, flat=how == "flat")
    elif how != "plain":
        model, ctx = weft.fully_shard(model, ctx)
    if how == "with Muon":
        is_norm = {"*norm*": adamw, "*.bias": adamw, "head.*": adamw, "*": torch.optim.Muon}
        optimizer, ctx = weft.gather_step(weft.optimizers(model, is_norm, ctx), ctx)
    optimizer = optimizer or adamw(model.parameters())
    optimizer, ctx = weft.state_in_bf16(optimizer, ctx, seed=seed)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    found = weft.restore(state, restore, ctx) if restore else None
    if found:
        assert moments(optimizer) == {BF16}
    for step in range(found.step if found else 0, 6):
        model(mine * (1 + step)).square().mean().backward()
        weft.clip_grads(model, ctx, max_norm=1.0)
        optimizer.step()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.zero_grad()
        if step == 2 and save:
            weft.save(state, save, 3, ctx)
    assert moments(optimizer) == ({BF16, torch.float64} if how == "with Muon" else {BF16})
    with weft.full_params(model, ctx):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(ctx, hows, **options):
    return [train(ctx, how, **options) for how in hows]


FAST, MORE = ["replicate", "fully_shard", "zero1"], ["flat", "zero2", "zero3"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hows"), [(2, FAST), *variant_cases((2, MORE), (4, FAST + MORE))], ids=str)
def test_every_strategy_rounds_as_one_process_also_resumed_and_part_by_part(ranks, hows, tmp_path):
    expected = train(weft.local(), "plain", save=tmp_path)
    for options in ({}, {"restore": tmp_path}, {"part_bytes": 3000}):
        for found in run_ranks(trained, ranks, hows, timeout_s=200, **options):
            assert [largest_difference(one, expected) < 1e-14 for one in found] == [True] * len(hows), options


def test_the_seed_counts_and_part_sizes_do_not(monkeypatch):
    monkeypatch.setattr(transform_file, "AroundPart", AroundPart)  # is put back
    one = train(weft.local(), "plain")
    assert largest_difference(one, train(weft.local(), "plain", part_bytes=1)) == 0
    assert largest_difference(one, train(weft.local(), "plain", seed=5)) > 0


def test_muon_beside_adamw_keeps_its_momentum():
    one, two = (run_ranks(trained, ranks, ["with Muon"])[0][0] for ranks in (1, 2))
    assert largest_difference(one, two) < 1e-14


def test_rounding_is_right_on_average_and_to_a_neighbor():
    value = torch.tensor([1.0 + 2**-9, -3.0, 1e-30, 0.0, float("inf"), float("-inf"), float("nan")])
    drawn = torch.randint(2**16, (4000, 7), generator=torch.Generator().manual_seed(0))
    found = transform_file._rounded(value.expand(4000, 7), drawn).double()
    assert sorted(set(found[:, 0].tolist())) == [1.0, 1.0 + 2**-7]
    assert found[:, 0].mean().item() == pytest.approx(value[0].item(), abs=4 * 2**-7 * 0.5 / 4000**0.5)
    assert found[:, 2].mean().item() == pytest.approx(1e-30, rel=1e-3)
    assert found[:, [1, 3, 4, 5]].unique(dim=0).tolist() == [[-3.0, 0.0, float("inf"), float("-inf")]]
    assert found[:, 6].isnan().all()


def test_a_second_moment_follows_where_rounding_to_the_nearest_stands_still():
    p = nn.Parameter(torch.zeros(4096))
    optimizer, _ = weft.state_in_bf16(torch.optim.AdamW([("p", p)], lr=0.0), weft.local())
    for step in range(300):
        p.grad = torch.full_like(p, 2.0 if step < 150 else 1.0)
        optimizer.step()
    found = optimizer.state[p]["exp_avg_sq"].double().mean().item()
    exact = nearest = 0.0
    for step in range(300):
        squared = 4.0 if step < 150 else 1.0
        exact = 0.999 * exact + 0.001 * squared
        nearest = torch.tensor(0.999 * nearest + 0.001 * squared).to(BF16).item()
    assert found == pytest.approx(exact, rel=2e-3)
    assert abs(nearest - exact) > 0.02 * exact


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 9), (), (4, 0)])
def test_the_words_of_a_block_are_that_block_of_the_whole(shape):
    device = torch.device("cpu")
    every = words_block(whole(shape), shape, 3, device)
    assert every.shape == shape
    for dim, length in enumerate(shape):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = length // 2, length - length // 2
        part = Block(tuple(offsets), tuple(sizes))
        assert torch.equal(words_block(part, shape, 3, device), every[part.slices])
    if every.numel() > 1:
        assert every.unique().numel() == every.numel()
        assert not torch.equal(every, words_block(whole(shape), shape, 4, device))


def test_undo_and_an_error_in_a_step_leave_a_plain_optimizer():
    model, ctx = weft.replicate(net(), weft.local())
    optimizer, ctx = weft.state_in_bf16(adamw(model.parameters()), ctx)
    model(torch.ones(2, 16)).sum().backward()
    weight = model.head.weight
    right, weight.grad = weight.grad, weight.grad.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    weight.grad = right
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    model, ctx = weft.undo(model, ctx, rebind=optimizer)
    assert moments(optimizer) == {torch.float32}
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.slow
def test_fix_lines():
    model, ctx = weft.replicate(nn.Linear(2, 2), weft.local())
    with told("transforms/state_in_bf16.py", "the state of this optimizer is not known") as it:
        weft.state_in_bf16(torch.optim.SGD(model.parameters()), ctx)
    made = it.run(torch=torch, model=model)["optimizer"]
    with told("transforms/state_in_bf16.py", "check_count") as it:
        weft.state_in_bf16(made, ctx, seed=-1)
    it.run(optimizer=made, ctx=ctx)
    low, other = weft.with_precision(nn.Linear(2, 2), weft.local(), "bf16-true")
    with told("transforms/state_in_bf16.py", "has 16 bits already") as it:
        weft.state_in_bf16(adamw(low.named_parameters()), other)
    found = it.run(model=nn.Linear(2, 2), ctx=weft.local())
    weft.state_in_bf16(adamw(found["model"].parameters()), found["ctx"])
    assert run_ranks(_fused, 2) == ["leave state_in_bf16 out"] * 2


def _fused(ctx):
    model, ctx = weft.replicate(nn.Linear(2, 2), ctx, flat=True)
    optimizer, ctx = weft.fuse_step(adamw(model.parameters()), ctx)
    with told("transforms/state_in_bf16.py", "single parameters is not there") as it:
        weft.state_in_bf16(optimizer, ctx)
    return it.fix


def test_not_twice():
    optimizer, ctx = weft.state_in_bf16(adamw(nn.Linear(1, 1).named_parameters()), weft.local())
    with pytest.raises(weft.errors.AlreadyApplied):
        weft.state_in_bf16(optimizer, ctx)
