"""gathered: whole parameters for a moment, under every strategy; DeepSpeed's is in test_deepspeed.py."""

import pytest
import torch
from torch import nn

import weft
from weft.testing import largest_difference, run_ranks


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    net.number = nn.Parameter(torch.tensor(2.0))
    return net


STRATEGIES = {
    "plain": lambda model, ctx: (model, ctx),
    "replicate": weft.replicate,
    "fully_shard": lambda model, ctx: weft.fully_shard(model, ctx, units=nn.Linear),
    **{
        f"zero {stage}": lambda model, ctx, stage=stage: weft.zero_partition(
            model, torch.optim.SGD(model.parameters(), 0.1), ctx, stage=stage
        )[::2]
        for stage in (1, 2, 3)
    },
}


def _whole(ctx):
    found = {}
    for name, strategy in STRATEGIES.items():
        model, after = strategy(_net(), ctx)
        with weft.full_params(model, after):
            read = [p.detach().clone() for p in model.parameters()]
            state = model.state_dict()  # what `save_pretrained` and `torch.save` of other libraries write
            assert all(type(each) is torch.Tensor and each.data_ptr() for each in state.values()), name
            assert all(torch.equal(state[key], p) for key, p in model.named_parameters()), name
            with torch.no_grad():
                if name == "fully_shard" and ctx.world_size > 1:
                    model[0].weight.zero_()  # lost: nobody asked to keep it
        before = [type(p).__name__ for p in model.parameters()]
        with weft.full_params(model, after, write=True), torch.no_grad():
            for p in model.parameters():
                p.mul_(2 if ctx.rank == 0 else 7)
        assert [type(p).__name__ for p in model.parameters()] == before
        with weft.full_params(model, after):
            written = [p.detach().clone() for p in model.parameters()]
        x = torch.ones(2, 3)
        found[name] = (read, written, model(x).detach())
    return found


def test_parameters_are_whole_inside_and_what_the_first_rank_writes_stays():
    expected = [p.detach() for p in _net().parameters()]
    twice = _net()
    with torch.no_grad():
        for p in twice.parameters():
            p.mul_(2)
    for ranks in (1, 2):
        for found in run_ranks(_whole, ranks):
            for name, (read, written, output) in found.items():
                assert largest_difference(read, expected) == 0, name
                assert largest_difference(written, [p.detach() for p in twice.parameters()]) == 0, name
                assert torch.allclose(output, twice(torch.ones(2, 3)), atol=1e-6), name


def test_what_is_no_module_is_refused():
    with (
        pytest.raises(TypeError, match=r"full_params: this is not a module\n  found:    int(.|\n)*fix:"),
        weft.full_params(1, weft.local()),
    ):
        pass


def _alone(ctx, name):
    """Each rank calls the model another number of times, then they train on."""
    model, after = STRATEGIES[name](_net(), ctx)
    x = torch.ones(2, 3)
    expected = _net()(x)
    for early in (True, False):  # before the first training step, and after it
        with weft.full_params(model, after, forward=True), torch.no_grad():
            for _ in range(3 * ctx.rank):
                assert torch.equal(model(x), expected) or not early
        if ctx.world_size > 1 and name in ("fully_shard", "zero 2", "zero 3"):
            with weft.full_params(model, after, forward=True):
                with pytest.raises(weft.errors.ContractError, match=r"(?s)with gradients.*fix:.*torch.no_grad\(\)"):
                    model(x)
        (model(x * (1 + ctx.rank)) * model.number).sum().backward()
        grads = [_full(p.grad) for p in model.parameters()]
        model.zero_grad()
    with torch.no_grad():
        model(x)
    return grads


def _full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_model_is_called_by_each_rank_as_often_as_it_likes(name):
    plain = _net()
    ranks = 1 if name == "plain" else 2
    for rank in range(ranks):
        ((plain(torch.ones(2, 3) * (1 + rank)) * plain.number).sum() / ranks).backward()
    for grads in run_ranks(_alone, ranks, name):
        assert largest_difference(grads, [p.grad for p in plain.parameters()]) < 1e-5
