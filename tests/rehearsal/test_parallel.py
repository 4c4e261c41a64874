"""Layers, sequences, experts and stages divided over ranks: rehearsed as they then run."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear, one_hot, scaled_dot_product_attention

import weft
from weft.errors import ContextError
from weft.testing import assert_rehearsed

WIDTH, HEADS, LENGTH, WORDS, ROWS = 32, 4, 16, 64, 8
PLAN = {
    "embed": "vocab",
    "blocks.*.attention.[qkv]": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "blocks.*.norm_?": "sequence",
    "head": "gather",
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x, places):
        x = self.embed(x) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean_loss(logits, y):
    return cross_entropy(logits.flatten(0, 1), y.flatten())


def divided(ctx, *options):
    """A step of a language model, divided along every axis of the mesh."""
    model, axes = LM(), dict(ctx.axes)
    if "tensor" in axes:
        model, ctx = weft.tensor_parallel(model, ctx, plan=PLAN, sequence="sequence" in options)
    if "context" in axes:
        model, ctx = weft.context_parallel(model, ctx, method="gather" if "gather" in options else "heads")
    if "pipeline" in axes:
        model, ctx = weft.pipeline(model, ctx, loss=mean_loss, micro_batches=4)
    if "shard" in axes:
        model, ctx = weft.fully_shard(model, ctx)
    elif {"data", "context"} & axes.keys():
        model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    text = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % WORDS
    batch = text, text, torch.arange(LENGTH).expand(ROWS, -1)

    def step():
        x, y, places = weft.data.split_sequence(batch, ctx) if "context" in axes else batch
        loss = model(x, places, y) if "pipeline" in axes else mean_loss(model(x, places), y)
        loss.backward()
        weft.clip_grads(model, ctx, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"context": 2}, ()),
        ({"data": 2, "tensor": 2}, ()),
        ({"shard": 2, "tensor": 2}, ("sequence",)),
        ({"shard": 2, "context": 2}, ("gather",)),
        ({"pipeline": 2, "shard": 2}, ()),
    ],
    ids=str,
)
def test_a_model_that_is_divided_is_rehearsed_as_it_runs(mesh, options):
    ranks = math.prod(mesh.values())
    only = [0, ranks - 1] if "pipeline" in mesh else [ranks - 1]  # others are alike
    found = assert_rehearsed(divided, ranks, *options, mesh=mesh, only=only)
    assert any(name in mesh for message in found.messages for name in message.axis.split("+"))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 4 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(4, WIDTH, 4 * WIDTH))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            row, choice = torch.where(top_k_index == expert)
            y = linear(gelu(linear(hidden_states[row], self.up[expert])), self.down[expert])
            result = result.index_add(0, row, y * top_k_weights[row, choice, None])
        return result


class Mixture(nn.Module):
    """A router that has learned to choose experts in turn."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 4, bias=False), Experts()
        with torch.no_grad():
            self.router.weight.copy_(torch.eye(4))

    def forward(self, x):
        features = one_hot(torch.arange(len(x)) % 4, 4).float() + x[:, :4] * 1e-6
        weights, chosen = self.router(features).softmax(-1).topk(1, -1)
        return x + self.experts(x, chosen, top_k_weights=weights)


def mixture(ctx):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture())
    model, ctx = weft.expert_parallel(model, ctx)
    model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)

    def step():
        model(torch.ones(64, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class ListedMixture(nn.Module):
    """Experts in a list, called one by one."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 4, bias=False), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        with torch.no_grad():
            self.router.weight.copy_(torch.eye(4))

    def forward(self, x):
        weights = self.router(one_hot(torch.arange(len(x)) % 4, 4).float() + x * 1e-6).softmax(-1)
        choices = weights.argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choices == number).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows]) * weights[rows, number : number + 1])
        return x + y


def listed_mixture(ctx):
    model, ctx = weft.expert_parallel(nn.Sequential(nn.Linear(4, 4), ListedMixture()), ctx)
    model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

    def step():
        model(torch.ones(64, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.slow
def test_a_list_of_experts_is_rehearsed_as_it_runs():
    found = assert_rehearsed(listed_mixture, 2, mesh={"data": 1, "expert": 2}, assume={"choices": "balanced"})
    assert any(message.kind == "all_to_all" for message in found.messages)


@pytest.mark.slow
def test_experts_are_rehearsed_with_declared_choices_as_they_run():
    found = assert_rehearsed(mixture, 2, mesh={"data": 1, "expert": 2}, assume={"choices": "balanced"})
    assert [message.count for message in found.messages if message.kind == "all_to_all"] == [7]
    assert "choices among 4 are balanced" in found.assumed[0]


@pytest.mark.slow
def test_all_rows_on_one_rank_are_the_worst_case():
    mesh = {"data": 1, "expert": 2}
    even, worst, other = (
        weft.rehearse(mixture, 2, mesh=mesh, assume={"choices": choice}, rank=rank)
        for choice, rank in (("balanced", 0), (0, 0), (0, 1))
    )
    assert worst.step_peak.activations > 1.3 * even.step_peak.activations > 1.3 * other.step_peak.activations


def test_choices_that_are_not_declared_are_an_error_that_names_their_line():
    with pytest.raises(ContextError, match=r'(?s)depends on the values.*fix:.*test_parallel.py:\d+": "balanced"'):
        weft.rehearse(mixture, 2, mesh={"data": 1, "expert": 2})


def uneven(ctx):
    model = nn.Linear(4, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=1)

    def step():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    return step


@pytest.mark.slow
def test_ranks_with_uneven_shards_are_told_apart():
    found = weft.rehearse(uneven, 4, rank="all distinct")
    assert [one.same_as for one in found] == [(0, 1, 2), (3,)]
    assert [one.at_rest.optimizer for one in found] == [3 * 5 * 4, 1 * 5 * 4]


@pytest.mark.slow
def test_each_stage_of_a_pipeline_is_a_kind():
    found = weft.rehearse(divided, 8, mesh={"shard": 2, "pipeline": 4}, rank="all distinct")
    # Stages in the middle differ too: an earlier one holds the activations of more micro-batches.
    assert [one.same_as for one in found] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert found[1].step_peak.activations > found[2].step_peak.activations
    assert {message.kind for message in found[1].messages} >= {"send", "recv"}


def relay(ctx):
    def step():
        number = torch.tensor([5])
        if ctx.rank:
            torch.distributed.recv(number, ctx.rank - 1)
            assert number.item() == 5 + ctx.rank
        if ctx.rank + 1 < ctx.world_size:
            torch.distributed.send(number + 1, ctx.rank + 1)

    return step


@pytest.mark.slow
def test_numbers_that_one_rank_sends_arrive_at_the_next():
    found = weft.rehearse(relay, 3, rank=2)
    assert [(message.kind, message.axis) for message in found.messages] == [("recv", "data")]


def waits(ctx):
    return lambda: ctx.rank or torch.distributed.recv(torch.zeros(1, dtype=torch.int64), 1)


def test_a_number_that_is_never_sent_is_an_error():
    with pytest.raises(ContextError, match="rank 0 waits for integers that rank 1 never sends"):
        weft.rehearse(waits, 2)


class _Returned(dict):
    """What a model of transformers returns."""

    __getattr__ = dict.__getitem__


class _WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return _Returned(loss=x.square().mean())


def _with_loss(ctx):
    model, ctx = weft.pipeline(_WithLoss(), ctx, micro_batches=2)

    def step():
        model(torch.randn(ROWS, WIDTH)).loss.backward()

    return step


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, "all distinct"])
def test_a_pipeline_whose_call_returns_an_object_with_the_loss(rank):
    assert weft.rehearse(_with_loss, 2, mesh={"pipeline": 2}, rank=rank)
