"""sync_batch_norm: statistics of the joined batch, for every kind of batch norm and split."""

import copy
import pickle

import pytest
import torch
from torch import nn

import weft
from weft.testing import RanksFailed, largest_difference, run_ranks

KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def _norm(dims, options, dtype=torch.float64):
    norm = KINDS[dims](3, dtype=dtype, **options)
    with torch.no_grad():
        for index, p in enumerate(norm.parameters()):
            p.copy_(torch.linspace(-1, 2, 3) + index)
    return norm


def _batch(dims, rows, step, dtype=torch.float64):
    draw = torch.Generator().manual_seed(100 + step)
    return (torch.randn(rows, 3, *[2] * dims if dims > 1 else [], generator=draw, dtype=torch.float64) * 3 + 5).to(
        dtype
    )


def _go(norm, part, rows, steps, dims, dtype, calls=1):
    """Outputs, gradients and statistics after some steps on one part of each batch."""
    outputs, inputs = [], []
    for step in range(steps):
        x = _batch(dims, rows, step, dtype)[part].clone().requires_grad_()
        out = x
        for _ in range(calls):
            out = norm(out)
        weight = _batch(dims, rows, step + 50, dtype)[part]
        (out * weight).sum().backward()  # a sum over samples: independent of the split
        outputs.append(out.detach())
        inputs.append(x.grad)
    return outputs, inputs, [p.grad for p in norm.parameters()], [b.clone() for b in norm.buffers()]


def _on_ranks(ctx, dims, options, sizes, dtype, calls):
    start = sum(sizes[: ctx.rank])
    norm, ctx = weft.sync_batch_norm(_norm(dims, options, dtype), ctx)
    part = slice(start, start + sizes[ctx.rank])
    outputs, inputs, grads, buffers = _go(norm, part, sum(sizes), 3, dims, dtype, calls)
    grads = [weft.reduce(g, ctx, "sum") for g in grads]
    return outputs, inputs, grads, buffers


def _compare(dims, options, sizes, dtype=torch.float64, limit=1e-11, calls=1):
    outputs, inputs, grads, buffers = _go(_norm(dims, options, dtype), slice(None), sum(sizes), 3, dims, dtype, calls)
    start = 0
    for size, found in zip(sizes, run_ranks(_on_ranks, len(sizes), dims, options, sizes, dtype, calls), strict=True):
        part = slice(start, start + size)
        start += size
        assert largest_difference([o[part] for o in outputs], found[0]) < limit
        assert largest_difference([i[part] for i in inputs], found[1]) < limit
        assert largest_difference(grads, found[2]) < limit
        assert largest_difference(buffers, found[3]) < limit


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(4, 4), (5, 2), (1, 1), (3, 1, 4)], ids=str)
def test_numbers_are_those_of_the_joined_batch(dims, sizes):
    _compare(dims, {}, sizes)


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.5},
        {"momentum": 0.0},
        {"eps": 0.1},
    ],
    ids=str,
)
def test_every_option_of_torch_keeps_its_meaning(options):
    _compare(2, options, (4, 3))


def test_a_batch_norm_that_is_called_twice():
    _compare(1, {}, (4, 3), calls=2)


def test_float32_is_as_accurate_as_one_process():
    _compare(2, {}, (4, 3), dtype=torch.float32, limit=2e-4)  # gradients are about 400


def _empty_rank(ctx):
    norm, ctx = weft.sync_batch_norm(_norm(1, {}), ctx)
    x = _batch(1, 6, 0)[: 6 if ctx.rank == 0 else 0].clone().requires_grad_()
    out = norm(x)
    (out * _batch(1, 6, 50)[: len(x)]).sum().backward()
    return out.detach(), x.grad, norm.running_var, [weft.reduce(p.grad, ctx, "sum") for p in norm.parameters()]


def test_a_rank_without_samples_takes_part():
    outputs, inputs, grads, buffers = _go(_norm(1, {}), slice(None), 6, 1, 1, torch.float64)
    zero, one = run_ranks(_empty_rank, 2)
    assert largest_difference((outputs[0], inputs[0]), zero[:2]) < 1e-11 and len(one[0]) == 0
    assert largest_difference([buffers[1], grads], [zero[2], zero[3]]) < 1e-11
    assert torch.equal(zero[2], one[2])


def _one_sample(ctx):
    norm, ctx = weft.sync_batch_norm(_norm(1, {}), ctx)
    norm(_batch(1, 1, 0)[: 1 - ctx.rank])


def test_one_sample_on_all_ranks_is_refused_as_by_torch():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        _norm(1, {})(_batch(1, 1, 0))
    with pytest.raises(RanksFailed, match=r"(?s)found:    1 value per channel over all ranks.*fix:") as caught:
        run_ranks(_one_sample, 2, timeout_s=55)
    assert {type(e) for e in caught.value.errors.values()} == {ValueError}


def _eval(ctx):
    norm, ctx = weft.sync_batch_norm(_norm(2, {}), ctx)
    norm(_batch(2, 4, ctx.rank))
    norm.eval()
    x = _batch(2, 4, 7)
    if ctx.rank == 0:  # no message: one rank may evaluate alone
        out = norm(x)
        plain = _norm(2, {}).eval()
        plain.load_state_dict(norm.state_dict())
        assert torch.equal(out, plain(x))
    return norm.running_mean, int(norm.num_batches_tracked)


def test_evaluation_uses_running_statistics_without_messages():
    zero, one = run_ranks(_eval, 2)
    assert torch.equal(zero[0], one[0]) and (zero[1], one[1]) == (1, 1)


def _eval_without_statistics(ctx):
    norm, ctx = weft.sync_batch_norm(_norm(1, {"track_running_stats": False}), ctx)
    norm.eval()
    if ctx.rank == 0:
        x = _batch(1, 4, 0)
        return torch.equal(norm(x), _norm(1, {"track_running_stats": False}).eval()(x))
    return True


def test_evaluation_without_statistics_normalises_alone():
    assert run_ranks(_eval_without_statistics, 2) == [True, True]


def _messages(ctx):
    from torch.distributed.tensor.debug import CommDebugMode

    norm, ctx = weft.sync_batch_norm(_norm(2, {}), ctx)
    counts = []
    x = _batch(2, 4, ctx.rank).requires_grad_()
    for _ in range(16):  # in which shapes are compared as well
        with CommDebugMode() as counter:
            norm(x)
    counts.append(counter.get_total_counts())
    with CommDebugMode() as counter:
        out = norm(x)
    counts.append(counter.get_total_counts())
    with CommDebugMode() as counter:
        out.sum().backward()
    counts.append(counter.get_total_counts())
    norm.eval()
    with CommDebugMode() as counter:
        norm(x)
    return [*counts, counter.get_total_counts()]


def test_as_many_messages_as_documented():
    assert run_ranks(_messages, 2) == [[3, 2, 1, 0]] * 2


def _padded_apart(ctx):
    norm, ctx = weft.sync_batch_norm(_norm(1, {}), ctx)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    for equal in (x, x[: ctx.rank], x[:, :, 0]):  # also where a rank has no rows, and without positions
        norm(equal)
    longer = nn.functional.pad(x, (0, ctx.rank))
    with pytest.warns(UserWarning, match="different lengths\n  found:    from 4 to 6 positions per row"):
        norm(longer)
    norm(longer), norm.eval()(longer)  # once


def test_rows_that_each_rank_has_padded_to_its_own_longest_are_warned_of():
    run_ranks(_padded_apart, 3)


class _Mine(nn.BatchNorm2d):
    """A user's batch norm: not touched, for its forward may be anything."""


def _classes(ctx):
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm1d(3)), nn.InstanceNorm2d(3))
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    model, ctx = weft.sync_batch_norm(model, ctx)
    assert list(model.state_dict()) == keys
    assert all(isinstance(m, kind) for m, kind in zip(model.modules(), kinds, strict=True))
    changed = [type(m) is not kind for m, kind in zip(model.modules(), kinds, strict=True)]
    for undoable in weft.contract.offered(model, weft.contract.Undoable):
        undoable.undo()
    assert [type(m) for m in model.modules()] == kinds and "weft_ranks" not in vars(model[1])
    return changed


def test_batch_norms_only_change_and_can_be_changed_back():
    assert run_ranks(_classes, 2) == [[False, False, True, False, True, False]] * 2
    model = nn.BatchNorm1d(2)
    same, _ = weft.sync_batch_norm(model, weft.local())
    assert same is model and type(model) is nn.BatchNorm1d


def _copies(ctx):
    norm, after = weft.sync_batch_norm(_norm(1, {}), ctx)
    copied, loaded = copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))
    x = _batch(1, 5, ctx.rank)
    found = [torch.equal(loaded(x), _norm(1, {})(x))]
    for one in (copied, loaded):
        again, one_after = weft.sync_batch_norm(copy.deepcopy(one), after)
        found.append(torch.equal(again(x), norm(x)))
        weft.undo(again, one_after)
        found.append(type(again) is type(one))
    found.append(torch.equal(copied(x), norm(x)))
    return all(found)


def test_a_copy_is_synchronized_and_one_that_was_pickled_once_the_transform_is_applied_to_it():
    assert run_ranks(_copies, 2) == [True, True]


def _axes(ctx):
    norm, ctx = weft.sync_batch_norm(_norm(1, {"momentum": 1.0}), ctx, axis="replica")
    norm(_batch(1, 4, ctx.rank))
    return norm.running_mean


def test_an_axis_of_the_mesh():
    found = run_ranks(_axes, 4, mesh={"replica": 2, "shard": 2})
    for rank, mean in enumerate(found):
        joined = torch.cat([_batch(1, 4, rank % 2), _batch(1, 4, rank % 2 + 2)])
        assert largest_difference(mean, joined.mean(0)) < 1e-12


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()

    def forward(self, x):
        return self.layers(x)


def _train(module, part, total):
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        (module(_batch(1, 8, step)[part]).square().sum() / total).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [t.detach().clone() for t in module.state_dict().values()]


def _train_on_ranks(ctx, flat):
    module, ctx = weft.sync_batch_norm(_Net(), ctx)
    module, ctx = weft.replicate(module, ctx, flat=flat)
    part = slice(0, 6) if ctx.rank == 0 else slice(6, 8)
    return _train(module, part, 8 / ctx.world_size)


@pytest.mark.parametrize("flat", [False, True])
def test_training_with_uneven_batches_is_training_in_one_process(flat):
    expected = _train(_Net(), slice(None), 8)
    for found in run_ranks(_train_on_ranks, 2, flat):
        assert largest_difference(expected, found) < 1e-12


def _low(ctx):
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    model, ctx = weft.with_precision(model, ctx, "bf16")
    model, ctx = weft.sync_batch_norm(model, ctx)
    out = model(_batch(2, 4, ctx.rank, torch.float32))
    out.square().mean().backward()
    return out.dtype, model[1].running_mean.dtype, model[1].weight.grad.dtype, bool(out.isfinite().all())


def test_sixteen_bit_inputs_keep_float32_statistics():
    assert run_ranks(_low, 2) == [(torch.float32, torch.float32, torch.float32, True)] * 2


def _wrong_input(ctx):
    norm, ctx = weft.sync_batch_norm(_norm(2, {}), ctx)
    norm(torch.ones(2, 3, dtype=torch.float64))


def test_a_wrong_shape_is_refused_as_by_torch():
    with pytest.raises(RanksFailed, match=r"expected 4D input \(got 2D input\)"):
        run_ranks(_wrong_input, 2)


def _refused(ctx, what):
    model = _Net()
    if what == "order":
        model, ctx = weft.replicate(model, ctx)
    if what == "different" and ctx.rank == 1:
        model.layers[1] = nn.Identity()
    options = {"axis": "nowhere"} if what == "axis" else {}
    try:
        weft.sync_batch_norm(model, ctx.only(0) if what == "only" else ctx, **options)
    except weft.errors.WeftError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("order", "OrderError: sync_batch_norm: comes too late, after replicate"),
        ("axis", "axis = 'nowhere' is not an axis"),
        ("different", "batch norms: 1 on rank 0, 0 on rank 1"),
        ("only", "CollectiveRefused: sync_batch_norm: refused on a context for rank 0 only"),
    ],
)
def test_what_is_refused_is_named(what, text):
    for found in run_ranks(_refused, 2, what):
        assert text in found or "PeerError" in found, found
        assert "fix:" in found or "PeerError" in found
