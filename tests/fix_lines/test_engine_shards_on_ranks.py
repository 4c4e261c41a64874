"""The torch engine on two ranks: what `fully_shard`, optimizers over shards and layers in parts say to a program."""

import copy
import io

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.func import functional_call

import weft
from tests.fix_lines.test_engine_strategies_on_ranks import (
    Adapted,
    Net,
    each,
    sgd,
    train,
    under,
    windows_in_part,
    x_of,
)
from tests.fix_lines.told import told
from weft.testing import run_ranks
from weft.weights import on_meta

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_ranks")]


# -- calls ------------------------------------------------------------------------------------------------


def _past_forward(ctx):
    model, _ = weft.fully_shard(Net(), ctx)
    with told("engines/torch/fsdp/refusals.py", "is used past forward, in shards") as it:
        model.encode(x_of(ctx))
    listed, instead = it.fix.split("; or ")
    assert instead == "model(...)  # in place of model.body(...)"
    model, _ = eval(listed, {"weft": weft, "model": Net(), "ctx": ctx})
    (model.encode(x_of(ctx)).sum() + model(x_of(ctx)).sum()).backward()


class Reads(Net):
    def forward(self, x):
        return torch.tanh(self.body(x)) @ self.head.weight.T


def _reads(ctx):
    model, _ = weft.fully_shard(Reads(), ctx, units=["body", "head"], unused="zero")
    with told("engines/torch/hooks/parameter_reads.py", "reads parameters of a unit") as it:
        with pytest.raises(RuntimeError, match="DTensor") as caught:
            model(x_of(ctx))
        assert "fix:" in caught.value.__notes__[0]
    assert it.fix == "weft.fully_shard(..., units=...) without the one that is read; its parameters go with Reads then"
    model, _ = weft.fully_shard(Reads(), ctx, units=["body"], unused="zero")
    train(model, sgd(model), ctx)


def _alone(ctx):
    model, here = weft.fully_shard(Net(), ctx)
    with told("engines/torch/fsdp/refusals.py", "while its parameters are gathered for one rank"):
        with weft.full_params(model, here, forward=True):
            model(x_of(ctx))
    with weft.full_params(model, here, forward=True), torch.no_grad():
        model(x_of(ctx))


def _later(ctx, path):
    plain = Net()
    if ctx.is_main:
        save_file(plain.state_dict(), path)
    weft.barrier(ctx)
    with on_meta():
        model = Net()
    model, here = weft.fully_shard(model, ctx, weights="later")
    with told("engines/torch/fsdp/refusals.py", "before its weights were loaded") as it:
        model(x_of(ctx))
    it.run(model=model, path=path, ctx=here)
    torch.testing.assert_close(model(x_of(ctx)), plain(x_of(ctx)))


def _gradients(ctx):
    model, _ = weft.fully_shard(Net(), ctx)
    with told("engines/torch/fsdp/refusals.py", "whose parameters are sharded") as it:
        x = x_of(ctx).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    viewed, _ = weft.fully_shard(nn.Sequential(Net(), nn.Flatten(0)), ctx)
    with told("engines/torch/fsdp/refusals.py", "whose parameters are sharded"):
        torch.func.jacrev(viewed)(x_of(ctx))
    model = it.run(model=Net(), ctx=ctx)["model"]
    x = x_of(ctx).requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.sum() + slope.square().sum()).backward()
    torch.autograd.grad(model(x).sum(), model.head.weight)


def _copied(ctx):
    model, optimizer, here = under(weft.fully_shard, ctx)
    with told("engines/torch/fsdp/refusals.py", "can be neither copied nor pickled") as it:
        copy.deepcopy(model)
    assert it.fix.endswith("or copy it before sharding")
    names = it.run(model=model, ctx=here, optimizer=optimizer)
    torch.save(copy.deepcopy(model), io.BytesIO())
    names["model"](x_of(ctx)).sum().backward()
    optimizer.step()
    model = Net()
    twin = copy.deepcopy(model)
    train(*under(weft.fully_shard, ctx, model)[:2], ctx)
    twin(x_of(ctx))


def _given(ctx):
    model, here = weft.fully_shard(Net(), ctx)
    doubled = {name: p.detach() * 2 for name, p in model.named_parameters()}
    with told("engines/torch/fsdp/own_parameters.py", "is called with other parameters"), torch.no_grad():
        functional_call(model, doubled, (x_of(ctx),))
    whole = {name: p.full_tensor() for name, p in doubled.items()}
    with weft.full_params(model, here, forward=True), torch.no_grad():
        functional_call(model, whole, (x_of(ctx),))
    with told("engines/torch/fsdp/own_parameters.py", "is called with other parameters") as it:
        functional_call(model, doubled, (x_of(ctx),))
    names = it.run(Adapted=Adapted, model=Net(), ctx=ctx)
    train(names["model"], sgd(names["model"]), ctx)

    def rows(model):
        return torch.func.grad(lambda p, x: functional_call(model, p, (x,)).sum())(
            dict(model.named_parameters()), x_of(ctx)
        )

    with told("engines/torch/fsdp/own_parameters.py", "is called with other parameters") as it:
        rows(model)
    rows(it.run(model=Net(), ctx=ctx)["model"])

    model, here = weft.fully_shard(Net(), ctx)
    model.head.weight = nn.Parameter(torch.ones(2, 4))
    with told("engines/torch/fsdp/own_parameters.py", "is called with other parameters") as it:
        model(x_of(ctx))
    assert it.fix.endswith("  # after parameters are replaced, with an optimizer over the new ones")
    model = Net()
    model.head.weight = nn.Parameter(torch.ones(2, 4))
    names = it.run(model=model, ctx=ctx)
    train(names["model"], sgd(names["model"]), ctx)


def _hooked(ctx):
    model, _ = weft.fully_shard(Net(), ctx)
    p = model.head.weight
    handle = p.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with told("engines/torch/fsdp/own_parameters.py", "would not be called") as it:
        model(x_of(ctx))
    handle.remove()
    exec(it.fix, {"loss": model(x_of(ctx)).sum() * 9, "p": p})
    assert p.grad.full_tensor().abs().max() == 1


def _lost_write(ctx):
    model, here = weft.fully_shard(Net(), ctx)
    before = model.head.weight.detach().full_tensor()
    for passes_backward in (False, True):
        loss = model(x_of(ctx)).sum()
        with torch.no_grad():
            model.head.weight.mul_(0.5)
        with told("engines/torch/parts/left_gathered.py", "were written to") as it:
            (loss if passes_backward else model(x_of(ctx)).sum()).backward()
    model(x_of(ctx))
    it.run(torch=torch, model=model, ctx=here)
    assert torch.equal(model.head.weight.detach().full_tensor(), before * 0.5)
    model(x_of(ctx)).sum().backward()


def _windows(ctx):
    with told("engines/torch/fsdp/pending_gradients.py", "before they were reduced") as it:
        windows_in_part(weft.fully_shard, ctx, breaks=True)
    assert it.fix.startswith("continue  # in place of break")
    windows_in_part(weft.fully_shard, ctx, breaks=False)


class Fussy(nn.Module):
    """Computes one layer without autocast."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            x = self.layers[0](x.float())
        return self.layers[1](x)


def _gathered_low(ctx):
    policy = weft.Precision(compute=torch.bfloat16, gather=torch.bfloat16)
    model, here = weft.with_precision(Fussy(), ctx, policy)
    model, here = weft.fully_shard(model, here)
    with told("engines/torch/fsdp/gather_dtype.py", "computes without autocast") as it:
        model(x_of(ctx))
    model = Fussy()
    here = it.run(model=model, ctx=ctx)["ctx"]
    model, here = weft.with_precision(model, here, policy)
    model, here = weft.fully_shard(model, here)
    train(model, sgd(model), ctx)


def _calls(ctx, path):
    each(
        ctx,
        _past_forward,
        _reads,
        _alone,
        lambda ctx: _later(ctx, path),
        _gradients,
        _copied,
        _given,
        _hooked,
        _lost_write,
        _windows,
        _gathered_low,
    )


def test_calls(tmp_path):
    run_ranks(_calls, 2, tmp_path / "w.safetensors")


# -- optimizers and gradients -----------------------------------------------------------------------------


def _whole_tensors(ctx):
    model, here = weft.fully_shard(Net(), ctx)
    optimizer = torch.optim.Adafactor(model.parameters())
    with told("engines/torch/sharded_step/full_params.py", "gather_step") as it:
        train(model, optimizer, ctx)
    optimizer.zero_grad()
    train(model, it.run(optimizer=optimizer, ctx=here)["optimizer"], ctx)

    def steps(model):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure():
            optimizer.zero_grad()
            loss = model(x_of(ctx)).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    model, here = weft.fully_shard(Net(), ctx)
    with told("engines/torch/sharded_step/full_params.py", "gather_step") as it:
        steps(model)
    steps(it.run(model=Net(), ctx=ctx)["model"])


def _partial(ctx):
    model, here = weft.fully_shard(Net(), ctx)
    model(x_of(ctx)).sum().backward()
    p = model.head.bias
    mesh = p.device_mesh
    p.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with told("engines/torch/compute/grad_norm.py", "has not been reduced") as it:
        weft.clip_grads(model, here, max_norm=1.0)
    it.run(p=p)
    weft.clip_grads(model, here, max_norm=1.0)
    assert p.grad.placements == p.placements


def _optimizers(ctx):
    each(ctx, _whole_tensors, _partial)


def test_optimizers():
    run_ranks(_optimizers, 2)


# -- layers in parts, and over all ranks ----------------------------------------------------------------------


def _parts(ctx):
    model, _ = weft.tensor_parallel(Net(), ctx, plan={"body": "column", "head": "row"})
    with told("engines/torch/hooks/function_transforms.py", "inside torch.func") as it:
        torch.func.vmap(model)(x_of(ctx))
    batch = torch.linspace(-1, 1, 8).view(2, 4)
    it.run(model=model, batch=batch)
    plain = Net()
    plain(batch).sum().backward()
    torch.testing.assert_close(model.head.bias.grad.to_local(), plain.head.bias.grad)


def test_layers_in_parts():
    run_ranks(_parts, 2, mesh={"tensor": 2})


def _over_all(ctx):
    with told("engines/torch/device/devices.py", "cannot serve") as it:
        weft.start(device="mps")
    assert it.fix == 'weft.start(device="cpu"), or launch with -n 1'
    weft.start(device="cpu").close()

    model, _ = weft.sync_batch_norm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), ctx)
    rows = torch.ones(1 - ctx.rank, 4)
    with told("engines/torch/compute/sync_batch_norm.py", "a single value has no variance") as it:
        model(rows)
    assert it.fix == "a larger batch, or model.eval()"
    model(torch.ones(1, 4) + ctx.rank)
    model.eval()(rows)
    norm, _ = weft.sync_batch_norm(nn.BatchNorm1d(4), ctx)
    x = torch.randn(2, 3 + ctx.rank, 4)  # padded by each rank
    with told("engines/torch/compute/sync_batch_norm.py", "different lengths") as it:
        norm(x.mT)
    norm, _ = weft.sync_batch_norm(nn.BatchNorm1d(4), ctx)
    norm(it.run(x=x, ctx=ctx)["x"].mT)


def test_devices_and_batch_norms():
    run_ranks(_over_all, 2)
