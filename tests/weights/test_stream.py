"""stream, local_parts: bytes of `export` on every rank, in bounded memory; a rank that leaves is reported."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import weft
from tests import lm
from tests.variants import variant_cases
from weft.errors import PeerError
from weft.testing import RanksFailed, run_ranks

CUT = {name: kind for name, kind in lm.PLAN.items() if kind != "sequence"}


class Model(nn.Module):
    """Tied weights, uneven shards, a batch norm whose numbers differ between the ranks, an integer buffer."""

    def __init__(self):
        super().__init__()
        self.lm, self.norm = lm.LM(), nn.BatchNorm1d(lm.LENGTH)
        self.register_buffer("counts", torch.arange(3))

    def forward(self, x):
        logits = self.lm(x)
        return logits + 0 * self.norm(logits.detach()).mean()


def _no_bias(name):
    return not name.endswith("bias")


def _composed(ctx, how):
    torch.manual_seed(0)
    axes = dict(ctx.axes)
    model = (lm.LM() if "tensor" in axes else Model()).double()
    if "tensor" in axes:
        model, ctx = weft.tensor_parallel(model, ctx, plan=CUT)
    if how == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units=[lm.Block])
    elif how == "replicate":
        model, ctx = weft.replicate(model, ctx)
    optimizer = lm.optimizer_of(model)
    if how.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(how[-1]))
    elif how == "local_steps":
        model, optimizer, ctx = weft.local_steps(model, optimizer, ctx, every=2)
    return model, optimizer, ctx


def _train(model, optimizer, ctx, steps):
    for step in steps:
        rows = weft.data.split_between(lm.samples(8 * step)[-8:], ctx)
        lm.loss_of(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [(*part[:1], part.tensor.clone(), *part[2:]) for part in weft.weights.local_parts(model, ctx)]


def _streams(world, how, folder):
    model, optimizer, ctx = _composed(world, how)
    expected = _train(model, optimizer, ctx, range(1, 5))
    model, optimizer, ctx = _composed(world, how)
    parts = _train(model, optimizer, ctx, range(1, 4))
    state, ctx = weft.checkpointable({"model": model}, ctx)
    weft.save(state, folder, 3, ctx)
    found = list(weft.weights.stream(model, ctx, bucket_bytes="10KB"))
    low = list(weft.weights.stream(model, ctx, dtype="bf16", rename="m.{}".format, filter=_no_bias))
    after = _train(model, optimizer, ctx, range(4, 5))
    same = [torch.equal(one[1], two[1]) and one[2:] == two[2:] for one, two in zip(expected, after, strict=True)]
    return found, low, parts, all(same)


@pytest.mark.parametrize(
    ("how", "mesh"),
    [
        ("fully_shard", {"data": 2}),
        ("replicate", {"data": 2}),
        *variant_cases(
            ("zero1", {"data": 2}),
            ("zero2", {"data": 2}),
            ("zero3", {"data": 4}),
            ("local_steps", {"data": 2}),
            ("fully_shard", {"replica": 2, "shard": 2}),
            ("fully_shard", {"data": 2, "tensor": 2}),
            ("replicate", {"tensor": 2, "data": 2}),
            ("replicate", {"data": 1}),
        ),
    ],
)
def test_the_bytes_of_export_on_every_rank_and_training_goes_on(how, mesh, tmp_path):
    ranks = torch.Size(mesh.values()).numel()
    of_ranks = run_ranks(_streams, ranks, how, str(tmp_path / "run"), mesh=mesh, probes="off")
    weft.export(tmp_path / "run", tmp_path / "whole")
    weft.export(tmp_path / "run", tmp_path / "low", dtype="bf16", filter=_no_bias, rename="m.{}".format)
    whole, low = weft.weights.read(tmp_path / "whole"), weft.weights.read(tmp_path / "low")
    places = [{(name, at, tensor.shape) for name, tensor, at, *_ in parts} for _, _, parts, _ in of_ranks]
    for rank, (found, small, parts, same) in enumerate(of_ranks):
        assert same
        for given, expected in ((found, whole), (small, low)):
            assert [name for name, _ in given] == [name for name, _ in (of_ranks[0][0] if given is found else small)]
            assert len(given) == len(expected)
            for name, tensor in given:
                assert tensor.dtype == expected[name].dtype
                assert torch.equal(tensor, expected[name]), name
        for name, tensor, at, shape, ranks_there in parts:
            assert shape == whole[name].shape
            assert rank in ranks_there
            if tensor.numel():
                assert ranks_there == tuple(r for r, there in enumerate(places) if (name, at, tensor.shape) in there)
            block = whole[name][tuple(slice(a, a + n) for a, n in zip(at, tensor.shape, strict=True))]
            assert torch.equal(block, tensor) or (how == "local_steps" and name.startswith("norm."))


def _is_left(ctx, ways):
    model, ctx = weft.fully_shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), ctx, units=[nn.Linear])
    for number, _ in enumerate(weft.weights.stream(model, ctx, bucket_bytes=600)):
        if number == ctx.rank:  # at another tensor of the same bucket
            break
    told = []
    try:
        for _ in weft.weights.stream(model, ctx, bucket_bytes=600):
            if ctx.rank == 0 and ways == "break":
                break
            if ctx.rank == 0 and ways == "raise":
                raise KeyError("the engine")
    except PeerError as error:
        told.append(str(error))
    names = [name for name, _ in weft.weights.stream(model, ctx)]  # and the next one is whole again
    return told, len(names)


def test_a_rank_that_leaves_the_loop_alone_is_reported_on_the_others():
    (alone, whole), (told, also_whole) = run_ranks(_is_left, 2, "break", timeout_s=30)
    assert (alone, whole, also_whole) == ([], 8, 8)
    assert "rank 0" in told[0]
    assert "1 of 2 buckets taken" in told[0]
    with pytest.raises(RanksFailed, match=r"rank 0 failed first(?s:.*)KeyError: 'the engine'"):
        run_ranks(_is_left, 2, "raise", timeout_s=30)


def _differs(ctx):
    model, ctx = weft.replicate(nn.Linear(2, 2), ctx)
    with pytest.raises(weft.errors.ContextError, match=r"stream: the ranks do not agree(?s:.*)dtype"):
        weft.weights.stream(model, ctx, dtype="bf16" if ctx.is_main else "fp16")
    if ctx.is_main:
        model.bias.data.fill_(1e30)
    failed = (ValueError, "does not fit into torch.float16") if ctx.is_main else (PeerError, "rank 0 failed")
    model.register_buffer("sent", torch.zeros(2))
    with pytest.raises(failed[0], match=failed[1]):
        list(weft.weights.stream(model, ctx, dtype="fp16"))


def test_an_error_of_one_rank_is_one_of_all():
    run_ranks(_differs, 2, timeout_s=30)


def _eight_gigabytes(ctx, how):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(32)))
    if how == "pipeline":
        model, ctx = weft.pipeline(model.to_empty(device="cpu"), ctx, loss=lambda y, _: y.mean(), micro_batches=8)
    else:
        model, ctx = weft.fully_shard(model, ctx, units=[nn.Linear], weights="later")
        model.to_empty(device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        sent = sum(tensor.nbytes for _, tensor in weft.weights.stream(model, ctx, bucket_bytes="600MB"))
        assert sent == 32 * 8192**2 * 4
        optimizer.step()

    return step


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fully_shard", *variant_cases(("pipeline",))])
def test_eight_gigabytes_take_a_shard_and_two_buckets(how):
    mesh = {"pipeline": 8} if how == "pipeline" else {"data": 8}
    found = weft.rehearse(lambda ctx: _eight_gigabytes(ctx, how), ranks=8, mesh=mesh)
    assert found.at_rest.total < 1.1e9
    assert found.step_peak.total - found.at_rest.total <= 2 * 600e6


@pytest.mark.parametrize("function", ["stream", "local_parts"])
def test_tensors_of_torchao_are_refused_by_the_name_of_the_function(function, monkeypatch):
    class OfTorchao(torch.Tensor):
        """As the quantized weights of torchao: its numbers are in several tensors."""

    module = nn.Sequential(nn.Linear(2, 2))
    module[0].weight = nn.Parameter(module[0].weight.detach().as_subclass(OfTorchao))
    monkeypatch.setitem(sys.modules, "torchao.utils", SimpleNamespace(TorchAOBaseTensor=OfTorchao))
    with pytest.raises(TypeError, match=rf"^{function}: 0\.weight cannot be read\n  found: +OfTorchao of torchao"):
        getattr(weft.weights, function)(module, weft.local())
