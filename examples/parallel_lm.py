"""One language model on any mesh: data, shard, tensor, context, expert and pipeline parallelism, and mixtures of them.

    python examples/parallel_lm.py
    weft launch -n 2 examples/parallel_lm.py --mesh tensor=2
    weft launch -n 4 examples/parallel_lm.py --mesh data=2,tensor=2 --sequence
    weft launch -n 4 examples/parallel_lm.py --mesh pipeline=2,shard=2
    weft launch -n 4 examples/parallel_lm.py --mesh context=2,tensor=2
    weft launch -n 2 examples/parallel_lm.py --mesh expert=2 --experts 4

Every line prints the same losses (the last one those of `--experts 4` on one rank). The model and the loop are plain
torch; each axis of the mesh adds one call between them.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

import weft

BYTES, WIDTH, HEADS, DEPTH = 256, 64, 4, 4
LENGTH = 64  # of a sequence

PLAN = {  # for tensor parallelism: which layers are cut by their outputs, and which by their inputs
    "words": "vocab",
    "blocks.*.attention.[qkv]": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "blocks.*.norm_?": "sequence",
    "head": "gather",
}


class Attention(nn.Module):
    """Causal self-attention, [batch, seq, width]; it has as many heads as its layers have outputs for."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        result: Tensor = self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    """A feed-forward net, [..., width]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(gelu(self.up(x)))
        return result


class Experts(nn.Module):
    """Feed-forward nets in stacked parameters; each row of [rows, width] goes through those chosen for it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, 4 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(count, WIDTH, 4 * WIDTH) / (4 * WIDTH) ** 0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            row, choice = torch.where(top_k_index == expert)
            y = linear(gelu(linear(hidden_states[row], self.up[expert])), self.down[expert])
            result = result.index_add(0, row, y * top_k_weights[row, choice, None])
        return result


class Mixture(nn.Module):
    """A mixture of experts: a router chooses two of them for each position."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, count), Experts(count)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).flatten(0, 1).softmax(-1).topk(2, -1)
        result: Tensor = self.experts(x.flatten(0, 1), chosen, weights).view_as(x)
        return result


class Block(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mixture(experts) if experts else MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        result: Tensor = x + self.mlp(self.norm_2(x))
        return result


class LM(nn.Module):
    """Bytes [batch, seq] and their places [batch, seq] to logits [batch, seq, 256]."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(experts) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = self.words(x) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def mean_loss(logits: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), y.flatten())


def text() -> TensorDataset:
    """Inputs, targets and places [LENGTH] from one source file of Python's standard library."""
    source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    pieces = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    pieces = pieces[: len(pieces) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    return TensorDataset(pieces[:, :-1], pieces[:, 1:], torch.arange(LENGTH).expand(len(pieces), -1))


def main(options: argparse.Namespace, ctx: weft.DistContext) -> None:
    torch.manual_seed(0)
    model = LM(options.experts).double()
    axes = dict(ctx.axes)

    # The batch size is that of all ranks together, so that the losses do not depend on the mesh.
    loader, ctx = weft.shard_data(DataLoader(text(), batch_size=options.batch, shuffle=True), ctx, mode="split", seed=0)
    if "tensor" in axes:
        plan = {name: style for name, style in PLAN.items() if not (options.experts and ".mlp." in name)}
        model, ctx = weft.tensor_parallel(model, ctx, plan=plan, sequence=options.sequence)
    if "context" in axes:
        model, ctx = weft.context_parallel(model, ctx)
    if "expert" in axes:
        model, ctx = weft.expert_parallel(model, ctx)
    if "pipeline" in axes:
        model, ctx = weft.pipeline(model, ctx, loss=mean_loss, micro_batches=2)
    if "shard" in axes:
        model, ctx = weft.fully_shard(model, ctx)
    else:
        model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
    restored = weft.restore(state, options.out, ctx) if options.resume else None

    step = restored.step if restored else 0
    for batch in loader:
        share = loader.share  # exact means over ranks whose batches are not equally large
        x, y, places = weft.data.split_sequence(tuple(batch), ctx) if "context" in axes else batch
        loss = model(x, places, y) if "pipeline" in axes else mean_loss(model(x, places), y)
        (loss * share).backward()
        norm = weft.clip_grads(model, ctx, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mean = weft.reduce(loss.detach() * share, ctx, "mean").item()
        ctx.print(f"step {step}  loss {mean:.6f}  norm {norm.item():.6f}")
        if step == options.steps:
            break
    if options.out is not None:
        weft.save(state, options.out, step, ctx)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="", help="axes and sizes, as in data=2,tensor=2; default: one axis, data")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step, of all ranks together")
    parser.add_argument("--experts", type=int, default=0, help="number of experts per block; 0: none")
    parser.add_argument(
        "--sequence", action="store_true", help="tensor parallelism cuts the sequence between layers too"
    )
    parser.add_argument("--out", type=Path, help="save a checkpoint here at the end")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --out, on any mesh")
    return parser.parse_args()


if __name__ == "__main__":
    given = parse()
    mesh = {axis: int(size) for axis, _, size in (part.partition("=") for part in given.mesh.split(",") if part)}
    with weft.start(mesh=mesh or None) as start:
        main(given, start)
