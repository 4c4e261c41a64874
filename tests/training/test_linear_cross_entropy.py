"""`F.linear_cross_entropy` with options, as in one process, of heads that are whole, sharded or divided by rows."""

import collections

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.lm import difference
from tests.variants import slow_cases
from weft.errors import ContractError
from weft.testing import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="torch 2.13 has it")

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS, CHUNK = 67, 16, 4, 8, 8, 5
PLAN = {
    "words": "vocab",
    "blocks.*.attention.[qkv]": "column",
    "blocks.*.attention.o": "row",
    "blocks.*.gate": "column",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "blocks.*.norm?": "sequence",
    "head": "vocab",
}
WEIGHTS = torch.linspace(0.5, 2, VOCABULARY, dtype=torch.float64)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), Attention()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Language(nn.Module):
    """Returns the loss, a sum that is divided by the number of tokens that count."""

    def __init__(self, *, tied=False, bias=False, naive=False, **options):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.words.weight
        self.naive, self.options = naive, {"reduction": "sum", **options}

    def hidden(self, tokens, at):
        x = self.words(tokens) + self.places(at)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens, at, labels, count):
        x, labels = self.hidden(tokens, at).flatten(0, 1), labels.flatten()
        if self.naive:
            loss = functional.cross_entropy(self.head(x), labels, **self.options)
        else:
            chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK)
            weight, bias = self.head.weight, self.head.bias
            loss = functional.linear_cross_entropy(x, weight, labels, linear_bias=bias, options=chunks, **self.options)
        return loss.sum() / count


def batch(number):
    """Tokens, places and labels, of which some do not count: on some ranks more than on others."""
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=draw)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=draw) < torch.linspace(0, 0.8, ROWS)[:, None]] = -100
    return tokens[:, :-1], torch.arange(LENGTH).expand(ROWS, -1), labels


def prepare(module, ctx, how):
    axes = dict(ctx.axes)
    if "tensor" in axes:
        module, ctx = weft.tensor_parallel(module, ctx, plan=PLAN, sequence="sequence" in how)
    if "context" in axes:
        module, ctx = weft.context_parallel(module, ctx)
    if "replicate" in how:
        module, ctx = weft.replicate(module, ctx)
    if "root" in how:
        module, ctx = weft.fully_shard(module, ctx, units=Block)
    if "unit" in how:
        module, ctx = weft.fully_shard(module, ctx, units=[Block, nn.Embedding, "head"])
    return module, ctx


def train(ctx, how, **options):
    torch.manual_seed(0)
    module, ctx = prepare(Language(**options).double(), ctx, how)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for number in range(4):
        tokens, at, labels = batch(number)
        for axis in [one for one in ("replica", "shard", "data") if one in dict(ctx.axes)]:
            tokens, at, labels = (
                each.chunk(ctx.axis_size(axis))[ctx.coordinates[axis]] for each in (tokens, at, labels)
            )
        if "context" in dict(ctx.axes):
            tokens, at, labels = weft.data.split_sequence((tokens, at, labels), ctx)
        count = weft.metrics.denominator((labels != -100).sum(), ctx)
        module(tokens, at, labels, count).backward()
        weft.clip_grads(module, ctx, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    with weft.full_params(module, ctx):
        found = {name: p.detach().clone() for name, p in module.named_parameters()}
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in found.items()}


def check(ranks, mesh, how, **options):
    expected = train(weft.local(), "", naive=True, **options)
    for found in run_ranks(train, ranks, how, mesh=mesh, **options):
        assert difference(expected, found) < 1e-12


@pytest.mark.parametrize(
    ("ranks", "mesh", "how"),
    [
        (1, None, ""),
        (2, None, "replicate"),
        (2, None, "root"),
        (2, None, "unit"),
        (2, {"tensor": 2}, ""),
        (4, {"data": 2, "tensor": 2}, "unit"),
        (4, {"data": 2, "context": 2}, "unit"),
        *slow_cases(
            (4, None, "replicate"),
            (4, None, "root"),
            (4, None, "unit"),
            (4, {"replica": 2, "shard": 2}, "unit"),
            (4, {"tensor": 4}, "sequence"),
            (4, {"data": 2, "tensor": 2}, "replicate"),
            (4, {"data": 2, "tensor": 2}, "sequence root"),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_training_is_that_of_one_process_with_all_logits(ranks, mesh, how, tied):
    check(ranks, mesh, how, tied=tied)
