"""What docs/existing_code.md says of pieces of weft beside torch's own wrappers, on two ranks against one."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.testing import RanksFailed, run_ranks


def _pieces(ctx, pieces):
    """Parameters after an epoch of a model in DDP, and the averaged ones."""
    torch.manual_seed(0)
    x = torch.randn(42, 4, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    if "average_weights" in pieces:
        model, ctx = weft.average_weights(model, ctx, decay=0.9)
    if "recompute" in pieces:
        model, ctx = weft.recompute(model, ctx, blocks=nn.Linear)
    wrapped = DistributedDataParallel(model) if ctx.world_size > 1 else model
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    loader, ctx = weft.shard_data(DataLoader(data, batch_size=8, shuffle=True), ctx, mode="split")
    for x, y in loader:
        (mse_loss(wrapped(x), y) * loader.share).backward()
        if "clip_grads" in pieces:
            weft.clip_grads(model, ctx, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
    found = [p.detach() for p in model.parameters()]
    if "average_weights" in pieces:
        with weft.averages(model).swapped():
            found += [p.detach().clone() for p in model.parameters()]
    return found


@pytest.mark.parametrize("pieces", ["", "average_weights recompute", "clip_grads"])
def test_pieces_beside_ddp_train_as_one_process_does(pieces):
    (one,) = run_ranks(_pieces, 1, pieces.split())
    for found in run_ranks(_pieces, 2, pieces.split()):
        assert weft.testing.largest_difference(one, found) < 1e-12


def _both_kinds(ctx):
    wrapped = DistributedDataParallel(nn.Linear(2, 1))
    model, ctx = weft.replicate(nn.Linear(2, 1), ctx)
    x = torch.full((1, 2), ctx.rank + 1.0)
    (wrapped(x) + model(x)).sum().backward()
    return wrapped.module.weight.grad.tolist(), model.weight.grad.tolist()


def test_one_model_may_have_ddp_and_another_replicate():
    assert run_ranks(_both_kinds, 2) == [([[1.5, 1.5]], [[1.5, 1.5]])] * 2


def _twice(ctx, order):
    model = nn.Linear(2, 1)
    if order == "ddp first":
        weft.replicate(DistributedDataParallel(model), ctx)
    model, ctx = weft.replicate(model, ctx)
    DistributedDataParallel(model)(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("order", ["ddp first", "replicate first"])
def test_ddp_and_replicate_on_one_model_are_an_error(order):
    with pytest.raises(RanksFailed, match="DistributedDataParallel") as raised:
        run_ranks(_twice, 2, order)
    assert isinstance(raised.value.errors[0], weft.errors.AlreadyApplied)


def _fsdp(ctx, folder):
    torch.manual_seed(ctx.world_size)
    model = nn.Linear(4, 2)
    if ctx.world_size > 1:
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    if ctx.world_size > 1:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        weft.save(state, folder, 1, ctx)
        return model.weight.full_tensor().tolist()
    weft.restore(state, folder, ctx)
    return model.weight.tolist()


def test_a_model_under_torchs_own_fsdp_is_saved_and_restored_without_it(tmp_path):
    saved = run_ranks(_fsdp, 2, str(tmp_path))
    assert run_ranks(_fsdp, 1, str(tmp_path)) == saved[:1]
