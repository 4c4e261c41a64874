"""on_meta: parameters without memory, buffers with values, ties kept; then a strategy and load_weights."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import weft
from weft.testing import run_ranks
from weft.weights import on_meta


class Norm(nn.Module):
    """Without reset_parameters, as those of transformers."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * self.weight / x.norm(dim=-1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.Sequential(Norm(4), nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x):
        x = self.embed(x) + self.table * self.kept
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_parameters_are_on_meta_and_buffers_are_real():
    with on_meta():
        model = Net()
    assert all(p.is_meta and p.requires_grad for p in model.parameters())
    assert torch.equal(model.table, torch.arange(4.0)) and torch.equal(model.kept, torch.ones(4))
    assert model.head.weight is model.embed.weight and list(model.state_dict()) == list(Net().state_dict())
    assert not nn.Linear(1, 1).weight.is_meta, "afterwards all is as before"


def test_buffers_too_if_asked_for():
    with on_meta(buffers=True):
        model = Net()
    assert model.table.is_meta and model.kept.is_meta and model.embed.weight.is_meta


def test_class_attributes_and_ties_of_real_parameters_are_kept():
    class Marked(nn.Parameter):
        pass

    shared = Marked(torch.ones(2, 2))
    shared.mark = "here"
    with on_meta():
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        model[0].weight = model[1].weight = shared
        frozen = nn.ParameterList([nn.Parameter(torch.ones(2), requires_grad=False)])
    assert model[0].weight is model[1].weight and model[0].weight.is_meta and not shared.is_meta
    assert type(model[0].weight) is Marked and vars(model[0].weight) == {"mark": "here"}
    assert frozen[0].is_meta and not frozen[0].requires_grad


def test_other_threads_build_as_ever():
    built = []
    with on_meta():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(1, 1)))
        thread.start()
        thread.join()
    assert not built[0].weight.is_meta


def _data_bytes():
    """What `ulimit -d` limits, held or not."""
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


def test_building_takes_no_memory_that_counts_under_a_limit():
    with on_meta():
        nn.Linear(8, 8)  # what torch imports for this counts once
        before = _data_bytes()
        model = nn.ModuleList(nn.Linear(2000, 1000) for _ in range(40))
    assert _data_bytes() - before < 40_000_000 < sum(p.nbytes for p in model.parameters()) / 8


def test_large_tensors_without_values_are_as_ever():
    with on_meta():
        for made in (torch.empty(600, 500), torch.empty((1 << 20,), dtype=torch.bool), torch.empty(size=[1 << 19])):
            assert made.is_contiguous() and not made.is_meta and not made.requires_grad
            made.fill_(1)
        assert made.dtype == torch.get_default_dtype() and made.shape == (1 << 19,)
        assert torch.empty(600, 500, requires_grad=True).requires_grad
        assert torch.empty(1 << 20, device="meta").is_meta
        with torch.device("meta"):
            assert torch.empty(1 << 20).is_meta
    with torch.device("meta"), on_meta():
        assert torch.empty(1 << 20).is_meta
    with FakeTensorMode(), on_meta():
        assert nn.Linear(600, 500)(torch.ones(600)).shape == (500,) and type(torch.empty(1 << 20)) is FakeTensor


def test_an_error_in_the_body_takes_the_hooks_off():
    with pytest.raises(KeyError, match="mine"), on_meta():
        raise KeyError("mine")
    assert not nn.Linear(1, 1).weight.is_meta


def test_it_decorates_a_function_that_builds():
    assert on_meta()(Net)().embed.weight.is_meta


def _step(model, ctx):
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(0, 10, (4, 3), generator=draw).chunk(ctx.world_size)[ctx.rank]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x).square().mean().backward()
    optimizer.step()
    with weft.full_params(model, ctx):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _loaded(ctx, how, path):
    with on_meta():
        model = Net().double()
    model.table, model.kept = model.table.double(), model.kept.double()
    if how == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, weights="later")
        weft.load_weights(model, path, ctx)
    else:
        weft.load_weights(model, path, ctx)
        model, ctx = weft.replicate(model, ctx)
    return _step(model, ctx)


@pytest.mark.parametrize("how", ["fully_shard", "replicate"])
def test_a_strategy_and_load_weights_make_it_the_plain_model(how, tmp_path):
    torch.manual_seed(3)
    plain = Net().double()
    state, ctx = weft.checkpointable({"model": plain}, weft.local())
    weft.export(weft.save(state, tmp_path, 1, ctx), tmp_path / "weights")
    wanted = _step(plain, ctx)
    for found in run_ranks(_loaded, 2, how, str(tmp_path / "weights")):
        assert weft.testing.largest_difference(list(found.values()), list(wanted.values())) < 1e-12
