"""The likely mistakes of a program on several ranks: each is told, with its cause and the line to write.

docs/mistakes.md lists them; a test compares the two.
"""

import copy
import functools
import io
import pathlib
import random
import re
import tempfile
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import weft
from tests.variants import variant_cases
from weft.testing import RanksFailed, run_ranks

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "mistakes.md"


def _net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def _loader(samples=16, **options):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 4, generator=generator), torch.randn(samples, 2, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=2, **options)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def _begin(ctx, strategy=weft.replicate, samples=16, steps=None):
    """Model, optimizer, loader, or windows, and context of a program without a mistake."""
    loader, ctx = weft.shard_data(_loader(samples), ctx)
    model, ctx = strategy(_net(), ctx)
    optimizer = _sgd(model)
    if steps is not None:
        model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
    return model, optimizer, loader, ctx


def _train(model, optimizer, loader, *, weighed=True, clears=True):
    for x, y in loader:
        loss = mse_loss(model(x), y)
        (loss * loader.share if weighed else loss).backward()
        optimizer.step()
        if clears:
            optimizer.zero_grad()


# -- data ----------------------------------------------------------------------------------------------


def loader_not_sharded(ctx, strategy):
    model, _ = strategy(_net(), ctx)
    _train(model, _sgd(model), _loader(), weighed=False)


class Codebook(nn.Module):
    """A layer, and sums of its inputs in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("sums", torch.zeros(4))

    def forward(self, x):
        self.sums += x.detach().sum(0)
        return self.layer(x)


def buffer_of_own_rows(ctx, strategy):
    model, ctx = strategy(Codebook(), ctx)
    loader, ctx = weft.shard_data(DataLoader(torch.randn(16, 4), batch_size=2), ctx)
    optimizer = _sgd(model)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def batch_norm_of_own_rows(ctx):
    loader, ctx = weft.shard_data(_loader(), ctx)
    model, ctx = weft.replicate(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), ctx)
    _train(model, _sgd(model), loader)


def split_twice(ctx):
    data = _loader().dataset
    weft.shard_data(DataLoader(data, sampler=DistributedSampler(data, ctx.world_size, ctx.rank)), ctx)


def order_from_entropy(ctx):
    """Each rank shuffles by itself."""
    order = list(range(16))
    random.SystemRandom().shuffle(order)
    loader, ctx = weft.shard_data(_loader(sampler=order), ctx)
    model, ctx = weft.replicate(_net(), ctx)
    _train(model, _sgd(model), loader)


def mean_losses_of_no_rows(ctx):
    model, _, _, ctx = _begin(ctx, weft.fully_shard)
    loader, ctx = weft.shard_data(_loader(samples=5), ctx, uneven="empty")
    with torch.no_grad():
        for x, y in loader:
            mse_loss(model(x), y)


def _begin_with_norms(ctx, samples, uneven, norm):
    loader, ctx = weft.shard_data(_loader(samples), ctx, uneven=uneven)
    model, ctx = weft.sync_batch_norm(norm, ctx)
    model, ctx = weft.replicate(model, ctx)
    return model, _sgd(model), loader, ctx


def repeated_rows_in_batch_norms(ctx):
    model, optimizer, loader, ctx = _begin_with_norms(ctx, 13, "pad", nn.Sequential(nn.BatchNorm1d(4), _net()))
    _train(model, optimizer, loader)


def padding_of_one_rank_in_batch_norms(ctx):
    model, _, loader, ctx = _begin_with_norms(ctx, 16, "balance", nn.BatchNorm1d(4))
    for x, _ in loader:
        model(x[:, :, None].expand(2, 4, 3 + ctx.rank))


def share_forgotten(ctx):
    model, optimizer, loader, ctx = _begin(ctx, samples=15)
    _train(model, optimizer, loader, weighed=False)


# -- model and strategy --------------------------------------------------------------------------------


def no_strategy(ctx):
    loader, ctx = weft.shard_data(_loader(), ctx)
    model = _net()
    _train(model, _sgd(model), loader)


def part_without_strategy(ctx, added):
    model, optimizer, loader, ctx = _begin(ctx)
    head = nn.Linear(2, 2)
    for step, (x, y) in enumerate(loader):
        if step == added:
            optimizer.add_param_group({"params": head.parameters()})
        loss = mse_loss(head(model(x)), y)
        (loss * loader.share).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_changed_on_one_rank(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    if ctx.is_main:
        model.load_state_dict({name: tensor + 1 for name, tensor in _net().state_dict().items()})
    _train(model, optimizer, loader)


def spikes_clipped_on_one_rank(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    for x, y in loader:
        loss = mse_loss(model(x), y)
        loss.backward()
        if loss.item() > ctx.rank:  # a limit that is reached on some ranks only
            weft.clip_grads(model, ctx, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()


def whole_weights_into_shards(ctx):
    model, ctx = weft.fully_shard(_net(), ctx)
    model.load_state_dict(_net().state_dict())


def limits_in_hooks(ctx):
    model, optimizer, loader, _ = _begin(ctx)
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-1, 1))
    _train(model, optimizer, loader)


def converted(ctx, change):
    model, optimizer, loader, ctx = _begin(ctx)
    change(model)
    dtype = model[0].weight.dtype
    _train(model, optimizer, ((x.to(dtype), y.to(dtype)) for x, y in loader), weighed=False)


def _there_and_back(model):
    kept = model.double()[0].weight.data  # so that the memory cannot be the same
    model.float()
    return kept


def other_weights(ctx, strategy, with_gradients):
    model, ctx = strategy(_net(), ctx)
    with torch.set_grad_enabled(with_gradients):
        weights = {name: p * 2 for name, p in model.named_parameters()}
        torch.func.functional_call(model, weights, (torch.ones(1, 4),))


def data_assigned(ctx):
    model, optimizer, loader, ctx = _begin(ctx, weft.fully_shard)
    for p in model.parameters():
        p.data = p.data.clamp(-1, 1)
    _train(model, optimizer, loader)


def samples_of_parts(ctx):
    model, ctx = weft.tensor_parallel(_net(), ctx, plan={"0": "column", "2": "row"})
    torch.func.vmap(torch.func.jacrev(model))(torch.ones(2, 4))


def ddp_around(ctx):
    model, _, loader, ctx = _begin(ctx)
    model = DistributedDataParallel(model)
    _train(model, _sgd(model), loader)


def ddp_inside(ctx):
    weft.replicate(DistributedDataParallel(_net()), ctx)


def part_called(ctx, strategy):
    model, _, _, _ = _begin(ctx, strategy)
    model[2](torch.ones(1, 8)).sum().backward()


class _TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.used(x)


def unused_parameters(ctx):
    model, ctx = weft.replicate(_TwoHeads(), ctx)
    model(torch.ones(1, 4)).sum().backward()


# -- transforms ----------------------------------------------------------------------------------------


def result_not_unpacked(ctx):
    model = weft.replicate(_net(), ctx)
    weft.accumulate_grads(model, _loader(), ctx, steps=2)


def old_context(ctx):
    model, _ = weft.replicate(_net(), ctx)
    weft.accumulate_grads(model, _loader(), ctx, steps=2)


# -- optimizers ----------------------------------------------------------------------------------------


def optimizer_before_fully_shard(ctx):
    model = _net()
    optimizer = _sgd(model)
    model, ctx = weft.fully_shard(model, ctx)
    optimizer.step()


def optimizer_of_another_model(ctx, strategy):
    optimizer = _sgd(_net())
    loader, ctx = weft.shard_data(_loader(), ctx)
    model, ctx = strategy(_net(), ctx)
    _train(model, optimizer, loader)


def gradients_not_cleared(ctx, strategy):
    model, optimizer, loader, ctx = _begin(ctx, strategy)
    _train(model, optimizer, loader, clears=False)


def chain(ctx, element):
    model, optimizer, loader, ctx = _begin(ctx)
    optimizer, ctx = weft.grad_chain(optimizer, ctx, element)
    _train(model, optimizer, loader)


def halve(grads, ctx):
    for gradient in grads.values():
        gradient.mul_(0.5)


def leave_out(grads, ctx):
    return {name: gradient for name, gradient in grads.items() if ctx.rank}


def fp16_without_skipping(ctx):
    loader, ctx = weft.shard_data(_loader(), ctx)
    model, ctx = weft.with_precision(_net(), ctx, "fp16")
    model, ctx = weft.replicate(model, ctx)
    _train(model, _sgd(model), loader)


def schedule_by_own_loss(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(4):
        _train(model, optimizer, loader)
        scheduler.step(1.0 if ctx.rank else 1.0 / (epoch + 1))


# -- windows -------------------------------------------------------------------------------------------


def window_as_batch(ctx):
    _, _, windows, _ = _begin(ctx, steps=2)
    for x, y in windows:
        raise AssertionError(x, y)


def windows_not_used(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    model, _, ctx = weft.accumulate_grads(model, loader, ctx, steps=2)
    _train(model, optimizer, loader)


def backward_on_one_rank_in_windows(ctx):
    model, optimizer, windows, ctx = _begin(ctx, samples=32, steps=2)
    for window in windows:
        for x, y in window:
            loss = mse_loss(model(x), y) * window.share
            if ctx.is_main:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _in_windows(ctx, samples=16, *, weigh=lambda window: window.share, before=None, after=None):
    model, optimizer, windows, ctx = _begin(ctx, samples=samples, steps=2)
    for window in windows:
        for x, y in window:
            if before:
                before(optimizer)
            (mse_loss(model(x), y) * weigh(window)).backward()
            if after:
                after(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def divided_by_length(ctx):
    _in_windows(ctx, 15, weigh=lambda window: 1 / len(window))


def not_divided(ctx):
    _in_windows(ctx, weigh=lambda window: 1.0)


def step_in_window(ctx):
    _in_windows(ctx, after=lambda model, optimizer: optimizer.step())


def clipped_in_window(ctx):
    _in_windows(ctx, after=lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))


def windows_under_ddp(ctx, which):
    model = _net()
    wrapped = DistributedDataParallel(model)
    _, windows, ctx = weft.accumulate_grads(wrapped if which == "wrapped" else model, _loader(), ctx, steps=2)
    for x, y in next(iter(windows)):
        mse_loss(wrapped(x), y).backward()


def cleared_in_window(ctx):
    _in_windows(ctx, before=lambda optimizer: optimizer.zero_grad())


# -- one rank only -------------------------------------------------------------------------------------


def backward_on_one_rank(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    for x, y in loader:
        loss = mse_loss(model(x), y)
        if ctx.is_main:
            loss.backward()
        optimizer.step()


def evaluated_on_one_rank(ctx):
    model, optimizer, loader, ctx = _begin(ctx, weft.fully_shard)
    if ctx.is_main:
        with torch.no_grad():
            model(torch.ones(1, 4))
    _train(model, optimizer, loader)


def episodes_of_different_lengths(ctx):
    model, _, _, ctx = _begin(ctx, weft.fully_shard)
    steps = 2 + ctx.rank
    with torch.no_grad():
        for _ in range(steps):
            model(torch.ones(1, 4))
    weft.reduce(torch.tensor(steps), ctx)


def eval_mode_on_one_rank(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    for _ in range(2):
        _train(model, optimizer, loader)
        if ctx.is_main:
            model.eval()


def spikes_dropped_on_one_rank(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    for number, (x, y) in enumerate(loader):
        mse_loss(model(x), y).backward()
        if number == 2 and ctx.is_main:  # its own loss is too high
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


def saved_on_one_rank(ctx):
    model, _, _, ctx = _begin(ctx)
    state, ctx = weft.checkpointable({"model": model}, ctx)
    if ctx.is_main:
        weft.save(state, tempfile.mkdtemp(), 1, ctx)
    weft.barrier(ctx)


def loop_left_by_one_rank(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    for step, (x, y) in enumerate(loader):
        if ctx.rank == 1 and step == 2:
            break
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- files and values ----------------------------------------------------------------------------------


def state_dict_of_shards(ctx):
    model, ctx = weft.fully_shard(_net(), ctx)
    torch.save(model.state_dict(), f"{tempfile.mkdtemp()}/model.pt")


def optimizer_state_of_parts(ctx, strategy):
    loader, ctx = weft.shard_data(_loader(), ctx)
    model = _net()
    if strategy is weft.fully_shard:
        model, ctx = strategy(model, ctx)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    else:
        model, optimizer, ctx = strategy(model, torch.optim.AdamW(model.parameters(), 0.1), ctx, stage=1)
    _train(model, optimizer, loader)
    torch.save(optimizer.state_dict(), f"{tempfile.mkdtemp()}/optimizer.pt")


def checkpoint_of_another_model(ctx, folder):
    for width in (8, 9):
        model, _ = weft.replicate(_net(width), ctx)
        state, own = weft.checkpointable({"model": model}, ctx.on("data"))
        weft.save(state, folder, 1, own) if width == 8 else weft.restore(state, folder, own)


def gathered_with_gradients(ctx):
    weft.gather(_net()(torch.ones(1, 4)), ctx)


# -- model axes ----------------------------------------------------------------------------------------


class _Feedforward(nn.Module):
    def __init__(self, mixes=False):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.mixes = nn.Linear(4, 8), nn.Linear(8, 4), mixes

    def forward(self, x):
        hidden = self.up(x).relu()
        return self.down(hidden.softmax(-1) if self.mixes else hidden)


def _cut(ctx, model=None, plan=None):
    plan = plan or {"up": "column", "down": "row"}
    return weft.tensor_parallel(model or _Feedforward(), ctx, plan=plan)[0]


def mixed_features(ctx):
    _cut(ctx, _Feedforward(mixes=True))(torch.ones(2, 4)).sum().backward()


def other_batches_along_tensor(ctx):
    _cut(ctx)(torch.ones(2, 4) + ctx.rank).sum().backward()


def half_a_pair(ctx):
    _cut(ctx, plan={"up": "column"})(torch.ones(2, 4)).sum().backward()


def loss_of_an_activation(ctx):
    model, kept = _cut(ctx), []
    model.up.register_forward_hook(lambda module, args, output: kept.append(output))
    (model(torch.ones(2, 4)).sum() + kept[-1].square().mean()).backward()


def cut_vocabulary(ctx):
    torch.manual_seed(0)
    words = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    tokens = torch.arange(6)
    cross_entropy(_cut(ctx, words, {"1": "vocab"})(tokens), tokens).backward()


class _LossOfHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, tokens):
        return nn.functional.linear_cross_entropy(self.words(tokens), self.head.weight, tokens)


def all_logits_of_a_cut_head(ctx):
    _cut(ctx, _LossOfHead(), {"head": "vocab"})(torch.arange(6))


def plan_without_a_part(ctx):
    _cut(ctx, plan={"feedforward.up": "column"})


def cut_after_the_strategy(ctx):
    model, ctx = weft.replicate(_Feedforward(), ctx)
    _cut(ctx, model)


def optimizer_before_the_cut(ctx):
    model = _Feedforward()
    optimizer = _sgd(model)
    _cut(ctx, model)
    optimizer.step()


class _Attention(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inputs, self.how = nn.Embedding(8, 4), nn.Linear(4, 12), how

    def forward(self, tokens):
        q, k, v = (
            part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.inputs(self.embedding(tokens)).chunk(3, -1)
        )
        if self.how == "by hand":
            found = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        else:
            mask = torch.ones(2 * [q.shape[2]]).tril().triu(-1).bool() if self.how == "window" else None
            found = scaled_dot_product_attention(q, k, v, mask)
        found = found.transpose(1, 2).flatten(2)
        return {"pooled": found.mean(1), "summed": found.square().sum()}.get(self.how, found)


def sequences(ctx, how, length=8, cuts=True):
    model, ctx = weft.context_parallel(_Attention(how), ctx)
    tokens = torch.arange(2 * length).view(2, length) % 8
    if cuts:
        tokens, _ = weft.data.split_sequence((tokens, torch.arange(length).expand(2, length)), ctx)
    model(tokens).square().mean().backward()


class _Masked(_Attention):
    """As masked language models of transformers."""

    def forward(self, input_ids, labels, position_ids=None, shift_labels=None, num_items_in_batch=None):
        losses = cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten(), reduction="sum")
        return losses / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


def labels_in_place(ctx):
    model, ctx = weft.context_parallel(_Masked(""), ctx)
    tokens = torch.arange(16).view(2, 8) % 4
    model(**weft.data.split_sequence({"input_ids": tokens, "labels": tokens}, ctx)).backward()


class _Experts(nn.Module):
    def __init__(self, number=4, balances=False):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.balances = nn.Linear(4, number), balances
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(number))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        weights, chosen = (scores / scores.sum(0) if self.balances else scores).max(-1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            found[chosen == number] = expert(x[chosen == number])
        return found * weights[:, None]


def tokens_that_compete(ctx):
    model, ctx = weft.expert_parallel(_Experts(balances=True), ctx)
    model(torch.randn(6, 4) + ctx.rank).sum().backward()


class _Labelled(_Experts):
    """As models of transformers, which can add the loss of their routers to their own."""

    config = types.SimpleNamespace(output_router_logits=False, router_aux_loss_coef=0.01)

    def forward(self, x, labels=None, output_router_logits=None):
        return super().forward(x)


def balanced_over_one_rank(ctx):
    model, ctx = weft.expert_parallel(_Labelled(), ctx)
    x = torch.randn(6, 4) + ctx.rank
    model(x, labels=x, output_router_logits=True).sum().backward()


def three_experts_on_two_ranks(ctx):
    weft.expert_parallel(_Experts(3), ctx)


def experts_of_one_batch(ctx):
    weft.expert_parallel(_Experts(), ctx, axis="tensor")


def _staged(ctx, *, loss=mse_loss, rows=8, norm=False, before=False, target=None, use=None):
    """A step of a pipeline, or what `use` does with it."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if norm else nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = _sgd(model) if before else None
    model, ctx = weft.pipeline(model, ctx, loss=loss, micro_batches=2)
    optimizer = optimizer or _sgd(model)
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    if use is None:
        model(x, torch.zeros(rows, 4) if target is None else target).backward()
        optimizer.step()
    else:
        use(model, x)


def rows_that_depend_on_each_other(ctx):
    _staged(ctx, norm=True)


def other_batches_along_the_pipeline(ctx):
    _staged(ctx, use=lambda model, x: model(x + ctx.rank, x).backward())


def mean_over_some_labels(ctx):
    ignoring = functools.partial(cross_entropy, ignore_index=0)
    _staged(ctx, loss=ignoring, target=torch.tensor([0, 0, 0, 1, 2, 3, 1, 2]))


def uneven_batch(ctx):
    _staged(ctx, rows=7)


def optimizer_before_the_stages(ctx):
    _staged(ctx, before=True)


def loss_outside_of_the_pipeline(ctx):
    _staged(ctx, use=lambda model, x: mse_loss(model(x), x).backward())


def two_backward_passes(ctx):
    def twice(model, x):
        loss = model(x, x)
        loss.backward(retain_graph=True)
        loss.backward()

    _staged(ctx, use=twice)


def scale_of_a_part(ctx):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    _, ctx = weft.with_precision(model[0], ctx, "fp16")
    weft.pipeline(model, ctx, loss=mse_loss)


def layer_of_another_stage(ctx):
    _staged(ctx, use=lambda model, x: (model[0](x).sum() + model[3](x).sum()).backward())


def clipped_by_torch(ctx):
    def clips(model, x):
        model(x, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    _staged(ctx, use=clips)


def weights_of_stages(ctx):
    _staged(ctx, use=lambda model, x: torch.save(model.state_dict(), io.BytesIO()))


def block_that_counts(ctx):
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    model, ctx = weft.recompute(nn.Sequential(Counting(4, 4), nn.Linear(4, 4)), ctx, blocks=["0"])
    model(torch.ones(2, 4)).sum().backward()


MESHES = {
    "tensor": (
        samples_of_parts, mixed_features, other_batches_along_tensor, half_a_pair, loss_of_an_activation,
        cut_vocabulary, all_logits_of_a_cut_head, plan_without_a_part,
        cut_after_the_strategy, optimizer_before_the_cut, experts_of_one_batch,
    ),
    "context": (sequences, labels_in_place),
    "expert": (tokens_that_compete, balanced_over_one_rank, three_experts_on_two_ranks),
    "pipeline": (
        rows_that_depend_on_each_other, other_batches_along_the_pipeline,
        mean_over_some_labels, uneven_batch, optimizer_before_the_stages,
        loss_outside_of_the_pipeline, two_backward_passes, layer_of_another_stage, clipped_by_torch, weights_of_stages,
        scale_of_a_part,
    ),
}  # fmt: skip
_APART = "the ranks do not compute together what {} is for one process"
MODEL_AXES = [
    (mixed_features, (), weft.errors.ProbeFailed, f"tensor_parallel: {_APART.format('_Feedforward')}"),
    (other_batches_along_tensor, (), weft.errors.ProbeFailed, "other values or shapes on rank"),
    (half_a_pair, (), weft.errors.ProbeFailed, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    (loss_of_an_activation, (), weft.errors.ProbeFailed, "a loss of (2, 4), of which each rank has a part"),
    (cut_vocabulary, (), weft.errors.ContractError, "torch computes with tensors of one kind"),
    pytest.param(
        *(all_logits_of_a_cut_head, (), weft.errors.ContractError, "torch computes with tensors of one kind"),
        marks=pytest.mark.skipif(not hasattr(nn.functional, "linear_cross_entropy"), reason="torch 2.13 has it"),
    ),
    (plan_without_a_part, (), ValueError, "tensor_parallel: the pattern 'feedforward.up' matches no part of"),
    (cut_after_the_strategy, (), weft.errors.OrderError, "tensor_parallel: comes too late, after replicate"),
    (optimizer_before_the_cut, (), weft.errors.OrderError, "tensor_parallel: 1 optimizer(s) hold parameters of"),
    (sequences, ("whole", 8, False), weft.errors.ContractError, "called with inputs that were not split"),
    (sequences, ("whole", 6), ValueError, "split_sequence: sequences of 6 places cannot be split over 2 ranks"),
    (sequences, ("by hand",), weft.errors.ContractError, "computed without F.scaled_dot_product_attention"),
    (sequences, ("window",), weft.errors.ContractError, "a mask [1, 1, 4, 4] of torch.bool for 4 of 8 places"),
    (labels_in_place, (), weft.errors.ProbeFailed, "what is returned, over the ranks, differs"),
    (sequences, ("pooled",), weft.errors.ProbeFailed, "what is returned (2, 4) differs"),
    (sequences, ("summed",), weft.errors.ProbeFailed, "the mean over the ranks of what is returned differs"),
    (tokens_that_compete, (), weft.errors.ProbeFailed, "output 0 of half of the rows"),
    (
        balanced_over_one_rank,
        (),
        weft.errors.ContractError,
        "expert_parallel: _Labelled would add the load balancing loss of its routers",
    ),
    (three_experts_on_two_ranks, (), ValueError, "expert_parallel: the experts of 'experts' cannot be divided"),
    (experts_of_one_batch, (), weft.errors.ContextError, "expert_parallel: batches are the same along 'tensor'"),
    (rows_that_depend_on_each_other, (), weft.errors.ProbeFailed, "pipeline: rows of a batch are mixed"),
    (other_batches_along_the_pipeline, (), weft.errors.ProbeFailed, "of one pipeline were given different batches"),
    (mean_over_some_labels, (), weft.errors.ProbeFailed, "pipeline: the mean over the micro-batches is not the loss"),
    (uneven_batch, (), ValueError, "pipeline: a batch of 7 rows cannot be cut into 2 micro-batches"),
    (optimizer_before_the_stages, (), weft.errors.OrderError, "pipeline: 1 optimizer(s) hold parameters of"),
    (loss_outside_of_the_pipeline, (), TypeError, "pipeline: a call of a module with a loss function takes a target"),
    (two_backward_passes, (), weft.errors.ContractError, "pipeline: a loss has one backward pass"),
    (scale_of_a_part, (), weft.errors.ContractError, "pipeline: a part of the module has a loss scale of its own"),
    (layer_of_another_stage, (), weft.errors.ContractError, "is a layer of another stage"),
    (clipped_by_torch, (), weft.errors.ContractError, "numbers are read that another rank has"),
    (weights_of_stages, (), weft.errors.ContractError, "tensors that another rank has cannot be pickled"),
    (block_that_counts, (), weft.errors.ProbeFailed, "recompute: block '0' returned something else"),
]

CASES = [
    *MODEL_AXES,
    (loader_not_sharded, (weft.replicate,), UserWarning, "replicate: all 2 ranks compute the same batches"),
    (loader_not_sharded, (weft.fully_shard,), UserWarning, "fully_shard: all 2 ranks compute the same batches"),
    (buffer_of_own_rows, (weft.replicate,), UserWarning, "replicate: forward gives buffers of Codebook other values"),
    (
        buffer_of_own_rows,
        (weft.fully_shard,),
        UserWarning,
        "fully_shard: forward gives buffers of Codebook other values",
    ),
    (
        batch_norm_of_own_rows,
        (),
        UserWarning,
        "replicate: batch norms of Sequential normalize over the rows of each rank",
    ),
    (split_twice, (), ValueError, "shard_data: this loader cannot be split over the ranks"),
    (
        order_from_entropy,
        (),
        weft.errors.ContextError,
        "shard_data: the ranks read what list yields in",
    ),
    (share_forgotten, (), UserWarning, "shard_data: a step on an unweighted loss"),
    (repeated_rows_in_batch_norms, (), UserWarning, "sync_batch_norm: rows that repeat others count"),
    (padding_of_one_rank_in_batch_norms, (), UserWarning, "sync_batch_norm: the ranks have padded their rows"),
    (mean_losses_of_no_rows, (), UserWarning, "shard_data: an evaluation got a batch without rows"),
    (no_strategy, (), UserWarning, "shard_data: ranks train apart"),
    (part_without_strategy, (0,), UserWarning, "shard_data: ranks train apart"),
    (part_without_strategy, (1,), UserWarning, "shard_data: ranks train apart"),
    (weights_changed_on_one_rank, (), weft.errors.NotSynchronized, "replicate: weights of Sequential differ"),
    (spikes_clipped_on_one_rank, (), weft.errors.ContextError, "replicate: weights before step"),
    (whole_weights_into_shards, (), weft.errors.ContractError, "fully_shard: load_state_dict was given whole tensors"),
    (
        limits_in_hooks,
        (),
        weft.errors.ContractError,
        "replicate: hooks on parameters of Sequential change the gradients of one rank",
    ),
    (converted, (nn.Module.double,), weft.errors.ContractError, "replicate: Sequential was moved or converted after"),
    (converted, (_there_and_back,), weft.errors.ContractError, "replicate: Sequential was moved or converted after"),
    (ddp_around, (), weft.errors.AlreadyApplied, "replicate: torch's DistributedDataParallel reduces gradients of"),
    (
        ddp_inside,
        (),
        weft.errors.AlreadyApplied,
        "replicate: torch's DistributedDataParallel already reduces these gradients",
    ),
    (
        other_weights,
        (weft.fully_shard, False),
        weft.errors.ContractError,
        "fully_shard: Sequential is called with other",
    ),
    (other_weights, (weft.replicate, True), weft.errors.ContractError, "replicate: Sequential is called with other"),
    (data_assigned, (), weft.errors.ContractError, "fully_shard: .data of sharded parameters of Sequential was"),
    (samples_of_parts, (), weft.errors.ContractError, "tensor_parallel: Sequential is called inside torch.func"),
    (part_called, (weft.replicate,), weft.errors.NotSynchronized, "replicate: a gradient reached '2.bias' of"),
    (part_called, (weft.fully_shard,), weft.errors.ContractError, "fully_shard: '2.weight' of Sequential is used past"),
    (unused_parameters, (), weft.errors.UnusedParameters, "replicate: 2 parameter(s) of _TwoHeads got no gradient"),
    (result_not_unpacked, (), TypeError, "accumulate_grads: the result of replicate was not unpacked"),
    (old_context, (), weft.errors.StaleContext, "accumulate_grads: the context does not know what was done to this"),
    (optimizer_before_fully_shard, (), weft.errors.OrderError, "fully_shard: 1 optimizer(s) hold parameters of"),
    (optimizer_of_another_model, (weft.replicate,), weft.errors.ContractError, "replicate: SGD updates none of the"),
    (optimizer_of_another_model, (weft.fully_shard,), weft.errors.ContractError, "fully_shard: SGD updates none of"),
    (chain, (weft.grads.clip_norm,), TypeError, "grad_chain: these are no functions of gradients and a context"),
    (chain, (halve,), weft.errors.ContractError, "grad_chain: halve returned what are no gradients"),
    (
        chain,
        (leave_out,),
        weft.errors.ContextError,
        "grad_chain: gradients that are left out: the ranks do not agree",
    ),
    (gradients_not_cleared, (weft.replicate,), UserWarning, "replicate: a backward pass adds to gradients of"),
    (gradients_not_cleared, (weft.fully_shard,), UserWarning, "fully_shard: a backward pass adds to gradients of"),
    (fp16_without_skipping, (), weft.errors.ContractError, "with_precision: parameters of Sequential were updated by"),
    (spikes_dropped_on_one_rank, (), weft.errors.PeerError, "of SGD, with 0 gradients,"),
    (schedule_by_own_loss, (), weft.errors.ContextError, "of SGD: the ranks do not agree"),
    (window_as_batch, (), TypeError, "a window was unpacked like a batch"),
    (windows_not_used, (), UserWarning, "shard_data: a step in a loop over a loader whose windows nobody uses"),
    (divided_by_length, (), UserWarning, "accumulate_grads: mean losses divided by len(window)"),
    (not_divided, (), UserWarning, "accumulate_grads: the losses of the micro-batches of this window are not weighted"),
    (step_in_window, (), weft.errors.NotSynchronized, "replicate: a step on gradients of Sequential before they were"),
    (clipped_in_window, (), weft.errors.NotSynchronized, "replicate: gradients of Sequential were changed in the"),
    (windows_under_ddp, ("wrapped",), weft.errors.AlreadyApplied, "accumulate_grads: torch's DistributedDataParallel"),
    (windows_under_ddp, ("inner",), weft.errors.AlreadyApplied, "accumulate_grads: torch's DistributedDataParallel"),
    (cleared_in_window, (), UserWarning, "replicate: gradients of Sequential were cleared in the middle"),
    *variant_cases(
        (backward_on_one_rank, (), weft.errors.PeerError, "replicate: optimizer.step() without a backward pass")
    ),
    (backward_on_one_rank_in_windows, (), UserWarning, "replicate: a rank makes no backward pass through"),
    (evaluated_on_one_rank, (), weft.errors.NotSynchronized, "fully_shard: the ranks gather different units"),
    *variant_cases((episodes_of_different_lengths, (), weft.errors.PeerError, "reduce: rank 1 of 2 did not call it")),
    (eval_mode_on_one_rank, (), weft.errors.ContextError, "of SGD: the ranks do not agree"),
    (saved_on_one_rank, (), weft.errors.ContextError, "save: the ranks do not agree"),
    *variant_cases((loop_left_by_one_rank, (), weft.errors.PeerError, "left the job while others still work")),
    (state_dict_of_shards, (), weft.errors.ContractError, "fully_shard: the state_dict of a sharded module cannot be"),
    (optimizer_state_of_parts, (weft.fully_shard,), weft.errors.ContractError, "fully_shard: the state_dict of AdamW"),
    (
        optimizer_state_of_parts,
        (weft.zero_partition,),
        weft.errors.ContractError,
        "zero_partition: the state_dict of A",
    ),
    (checkpoint_of_another_model, ("folder",), weft.errors.CheckpointError, "restore: "),
    (gathered_with_gradients, (), TypeError, "gather: a tensor requires grad"),
]


def second_pass_through_a_graph(ctx):
    model, ctx = weft.replicate(_net(), ctx)
    found = model(torch.ones(2, 4))
    found.sum().backward()
    found.square().sum().backward()


def step_between_forward_and_backward(ctx):
    model, ctx = weft.replicate(_net(), ctx)
    optimizer = _sgd(model)
    first, second = model(torch.ones(2, 4)), model(torch.ones(2, 4))
    first.sum().backward()
    optimizer.step()
    second.sum().backward()


def loss_without_gradients(ctx):
    model, ctx = weft.replicate(_net(), ctx)
    with torch.set_grad_enabled(ctx.is_main):
        loss = model(torch.ones(2, 4)).sum()
    loss.backward()


def part_called_after_the_model(ctx):
    model, ctx = weft.fully_shard(_net(), ctx)
    model(torch.ones(2, 4)).sum().backward()
    model[0](torch.ones(2, 4))


def attention_without_rows(ctx):
    loader, ctx = weft.shard_data(DataLoader(torch.ones(1, 2, 4)), ctx, uneven="empty")
    model, ctx = weft.replicate(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), ctx)
    for x in loader:
        model(x, src_key_padding_mask=x[..., 0] == 0).sum().backward()


def average_by_hand_of_a_copy(ctx):
    net = _net()
    average = copy.deepcopy(net)
    model, ctx = weft.fully_shard(net, ctx)
    with torch.no_grad():
        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(p, 0.1)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (second_pass_through_a_graph, "Trying to backward through the graph a second time"),
        (step_between_forward_and_backward, "modified by an inplace operation"),
        (loss_without_gradients, "element 0 of tensors does not require grad"),
        (part_called_after_the_model, "plain tensors beside"),
        (attention_without_rows, "cannot reshape tensor of 0 elements"),
        (average_by_hand_of_a_copy, "got mixed torch.Tensor and DTensor"),
    ],
)
def test_errors_of_torch_are_as_the_page_says(program, text):
    assert text in re.sub(r"\s+", " ", PAGE.read_text())
    with pytest.raises(RanksFailed) as caught:
        run_ranks(program, 2)
    told = "torch computes with tensors of one kind" if program is part_called_after_the_model else text
    assert any(told in str(error) for error in caught.value.errors.values())


def _warned(ctx, mistake, args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mistake(ctx, *args)
    return [str(one.message) for one in caught if one.category is UserWarning]


@pytest.mark.parametrize(("mistake", "args", "kind", "text"), CASES)
def test_a_mistake_is_told(mistake, args, kind, text, tmp_path):
    args = tuple(str(tmp_path) if one == "folder" else one for one in args)
    if kind is UserWarning:
        told = [said for rank in run_ranks(_warned, 2, mistake, args) for said in rank]
        assert told and all(said.startswith(text) for said in told)
    else:
        mesh = next(({axis: 2} for axis, mistakes in MESHES.items() if mistake in mistakes), None)
        with pytest.raises(RanksFailed) as caught:
            run_ranks(mistake, 2, *args, mesh=mesh)
        errors = caught.value.errors.values()
        told = [str(error) for error in errors if isinstance(error, kind) and text in str(error)]
        assert told, errors
        assert len(errors) == 2 or mistake is loop_left_by_one_rank  # the other rank had ended
    assert any(re.search(r"fix: |if weft\.collectives\.any_rank", said) for said in told)


def _under_ddp_after_undo(ctx):
    model, _, ctx = weft.accumulate_grads(_net(), _loader(), ctx, steps=2)
    model, ctx = weft.undo(model, ctx)
    DistributedDataParallel(model)(torch.ones(2, 4)).sum().backward()


def test_ddp_is_no_mistake_once_windows_are_undone():
    run_ranks(_under_ddp_after_undo, 2)


@pytest.mark.parametrize("strategy", [weft.replicate, weft.fully_shard])
def test_a_program_without_mistakes_is_told_nothing(strategy):
    assert run_ranks(_warned, 2, _no_mistake, (strategy,)) == [[], []]
    for freezes in (False, True):
        assert run_ranks(_warned, 2, _loss_through_another_model, (strategy, freezes)) == [[], []]


def _no_mistake(ctx, strategy):
    model, optimizer, loader, _ = _begin(ctx, strategy, samples=15)
    for set_to_none in (True, False):
        for x, y in loader:
            loss = mse_loss(model(x), y) * loader.share
            optimizer.zero_grad(set_to_none=set_to_none)  # between forward and backward, as many programs do
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    model, optimizer, windows, ctx = _begin(ctx, strategy, samples=15, steps=2)
    for window in windows:
        for x, y in window:
            (mse_loss(model(x), y) * window.share).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    other, optimizer, loader, ctx = _begin(ctx, strategy, samples=15)
    for x, y in loader:  # sums that are divided by what all ranks have
        total = mse_loss(other(x), y, reduction="sum")
        (total / weft.metrics.denominator(len(x), ctx)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _loss_through_another_model(ctx, strategy, freezes):
    """An actor whose loss flows through a critic, and gradients that are cleared before each backward pass."""
    for set_to_none in (True, False):
        actor, ctx = strategy(_net(), ctx)
        critic, ctx = strategy(_net(), ctx)
        actor_optimizer, critic_optimizer = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
        for _ in range(4):
            x = torch.randn(3, 4) + ctx.rank
            critic_optimizer.zero_grad(set_to_none=set_to_none)
            critic(torch.cat([x[:, :2], actor(x).detach()], 1)).square().mean().backward()
            critic_optimizer.step()
            critic.requires_grad_(not freezes)
            actor_optimizer.zero_grad(set_to_none=set_to_none)
            critic(torch.cat([x[:, :2], actor(x)], 1)).mean().backward()
            actor_optimizer.step()
            critic.requires_grad_(True)


def test_the_page_lists_every_mistake():
    ours = PAGE.read_text().partition("## Errors of torch")[0]
    heads = re.findall(r"^\| .*? \| `(.*?)` \| .* \|$", ours, re.MULTILINE)
    values = [getattr(case, "values", case) for case in CASES]
    missing = [text for _, _, _, text in values if not any(head in text or text in head for head in heads)]
    assert not missing
    unknown = [head for head in heads if not any(head in text or text in head for _, _, _, text in values)]
    assert not unknown and len(heads) >= 30
