"""A small language model with a tied embedding and an odd vocabulary, for the tests of what cuts a model."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LENGTH = 33, 16, 4, 8
PLAN = {
    "emb": "vocab",
    "head": "gather",
    "blocks.*.attn.[qkv]": "column",
    "blocks.*.attn.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "blocks.*.norm?": "sequence",
    "blocks.*.attn.norm": "replicate",
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = WIDTH // HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=name == "v") for name in "qkvo")
        self.norm = nn.LayerNorm(self.size)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = [y.view(batch, length, -1, self.size).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x))]
        y = functional.scaled_dot_product_attention(self.norm(q), k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class LM(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        x = self.emb(x) + self.pos(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model(dtype=torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LM().to(dtype)


def samples(count):
    return torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def loss_of(module, rows, reduction="mean"):
    return functional.cross_entropy(module(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)


def optimizer_of(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


def reference(rows, batch, steps, optimizer_steps=None):
    """Losses, norms and parameters of a plain loop in one process: windows of `steps` batches, the last one ragged."""
    module = model()
    optimizer = optimizer_of(module)
    losses, norms = [], []
    batches = rows.split(batch)
    for start in range(0, len(batches), steps)[:optimizer_steps]:
        window = torch.cat(batches[start : start + steps])
        loss = loss_of(module, window)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {name: p.detach().clone() for name, p in module.named_parameters()}


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def difference(one, two):
    """The largest one, of dicts of tensors or lists of numbers."""
    if isinstance(one, dict):
        assert list(one) == list(two)
        return max(float((one[name] - two[name]).abs().max()) for name in one)
    return max(abs(a - b) for a, b in zip(one, two, strict=True))
