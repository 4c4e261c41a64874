"""balance_loss and balance_bias_: models with balanced experts train as in one process that has all tokens."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

import weft
from tests.transforms.test_expert_parallel import Expert, Stacked
from tests.variants import variant_cases
from weft.errors import ContractError
from weft.testing import largest_difference, run_ranks

WORDS, WIDTH, LENGTH, EXPERTS, RATE = 17, 6, 8, 4, 1e-2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.inputs(x).chunk(3, -1))
        return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A router that chooses two experts for each token; returns what it has chosen, too."""

    def __init__(self, *, is_listed):
        super().__init__()
        self.attention, self.router = Attention(), nn.Linear(WIDTH, EXPERTS)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS)) if is_listed else Stacked()

    def forward(self, x):
        x = x + self.attention(x)
        tokens = x.flatten(0, 1)
        probs = self.router(tokens).softmax(-1)
        chosen = (probs + self.bias).topk(2).indices
        weights = probs.gather(-1, chosen)
        return x + self.mixed(tokens, chosen, weights).view_as(x), probs, chosen

    def mixed(self, tokens, chosen, weights):
        if isinstance(self.experts, Stacked):
            return self.experts(tokens, chosen, weights)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            result = result.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
        return result


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(is_listed=is_listed) for is_listed in (False, True))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words, at):
        x = self.words(words) + self.positions(at)
        routed = []
        for layer in self.layers:
            x, *choices = layer(x)
            routed.append(choices)
        return self.head(x), routed


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Net().double()


def _rows():
    """27 rows in batches of 8: the last has three, of which four ranks get one each, or none."""
    words = torch.randint(0, WORDS, (27, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    at = torch.arange(LENGTH)
    return [(row[:-1], row[1:], at) for row in words]


def _switch(probs, chosen, mask=None):
    """The loss in plain torch."""
    hits = F.one_hot(chosen, EXPERTS).double().sum(-2)
    counts = torch.ones(len(probs), dtype=torch.float64) if mask is None else mask.double()
    share, mean = ((t * counts[:, None]).sum(0) / counts.sum() for t in (hits, probs))
    return EXPERTS * (share * mean).sum()


def _alone(steps=1):
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, every = [], []
    for start in range(0, 27, 8 * steps):
        window, counts = _rows()[start : start + 8 * steps], torch.zeros(2, EXPERTS, dtype=torch.int64)
        for begin in range(0, len(window), 8):
            rows = window[begin : begin + 8]
            words, labels, at = map(torch.stack, zip(*rows, strict=True))
            logits, routed = model(words, at)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            for (probs, chosen), count in zip(routed, counts, strict=True):
                loss = loss + 0.01 * _switch(probs, chosen)
                count.add_(chosen.flatten().bincount(minlength=EXPERTS))
            loss = loss * len(rows) / len(window)
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        every.append(counts.tolist())
        for layer, count in zip(model.layers, counts, strict=True):
            layer.bias += RATE * (count.double().mean() - count).sign()
    return losses, every, [p.detach() for p in model.parameters()], [layer.bias.clone() for layer in model.layers]


def _train(ctx, strategy, steps=1, folder=None, until=0):
    """Train to the end of the epoch, or save after `until` windows."""
    model = _net()
    loader, ctx = weft.shard_data(DataLoader(_rows(), batch_size=8), ctx, mode="split", uneven="empty")
    names = [name for name, _ in ctx.axes]
    if "expert" in names:
        model, ctx = weft.expert_parallel(model, ctx)
    if "context" in names:
        model, ctx = weft.context_parallel(model, ctx)
    # a rank without rows chooses no experts
    model, ctx = getattr(weft, strategy)(model, ctx, unused="zero")
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": windows}, ctx)
    biases, losses, every = [layer.bias for layer in model.layers], [], []
    if folder is not None and not until:
        weft.restore(state, folder, ctx)
    for window in windows:
        counts = [torch.zeros(EXPERTS, dtype=torch.int64) for _ in biases]
        for batch in window:
            words, labels, at = weft.data.split_sequence(batch, ctx) if "context" in names else batch
            logits, routed = model(words, at)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) if len(words) else logits.sum()
            for (probs, chosen), count in zip(routed, counts, strict=True):
                loss = loss + 0.01 * weft.balance_loss(probs, chosen, ctx)
                count.add_(chosen.flatten().bincount(minlength=EXPERTS))
            loss = loss * window.share
            loss.backward()
            losses.append(weft.reduce(loss.detach(), ctx, "mean").item())
        weft.clip_grads(model, ctx, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        every.append([each.tolist() for each in weft.balance_bias_(biases, counts, ctx, rate=RATE)])
        if len(every) == until:
            weft.save(state, folder, until, ctx)
            return None
    model, ctx = weft.undo(model, ctx, rebind=optimizer)
    return losses, every, [p.detach() for p in model.parameters()], biases


BOTH = {"data": 2, "expert": 2}
CASES = [
    ("replicate", 2, {"data": 2}, 1),
    ("fully_shard", 2, {"expert": 2}, 1),
    ("replicate", 2, {"context": 2}, 1),
    ("replicate", 4, BOTH, 2),
    *variant_cases(
        ("replicate", 1, {"data": 1}, 1),
        ("replicate", 4, {"data": 4}, 1),
        ("fully_shard", 2, {"data": 2}, 2),
        ("fully_shard", 4, {"data": 4}, 1),
        ("replicate", 2, {"expert": 2}, 2),
        ("replicate", 4, {"expert": 4}, 1),
        ("fully_shard", 4, BOTH, 1),
        ("fully_shard", 4, {"data": 2, "context": 2}, 1),
        ("fully_shard", 2, {"context": 2}, 2),
        ("fully_shard", 4, {"expert": 2, "context": 2}, 1),
    ),
]


@pytest.mark.parametrize(("strategy", "ranks", "mesh", "steps"), CASES)
def test_training_is_that_of_one_process(strategy, ranks, mesh, steps):
    losses, counts, parameters, biases = _alone(steps)
    for found in run_ranks(_train, ranks, strategy, steps, mesh=mesh):
        assert found[0] == pytest.approx(losses, abs=1e-12, rel=0)
        assert found[1] == counts
        assert largest_difference(parameters, found[2]) < 1e-10
        assert all(torch.equal(one, other) for one, other in zip(biases, found[3], strict=True))


def test_the_loss_is_that_of_the_papers():
    draw = torch.Generator().manual_seed(0)
    probs = torch.rand(3, 5, EXPERTS, generator=draw, dtype=torch.float64).softmax(-1).requires_grad_()
    chosen, mask = probs.topk(2).indices, torch.rand(3, 5, generator=draw) < 0.5
    expected = _switch(probs.flatten(0, 1), chosen.flatten(0, 1), mask.flatten())
    (wanted,) = torch.autograd.grad(expected, probs)
    for one in (mask, mask.long()):
        found = weft.balance_loss(probs, chosen, weft.local(), mask=one)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, probs)[0], wanted)
    alike = torch.full((8, EXPERTS), 1 / EXPERTS)
    every = torch.arange(8).view(8, 1) % EXPERTS
    assert weft.balance_loss(alike, torch.cat([every, (every + 1) % EXPERTS], 1), weft.local()) == 2
    assert weft.balance_loss(probs, chosen, weft.local(), mask=torch.zeros(3, 5)) == 0
    low = probs.detach().bfloat16()
    assert weft.balance_loss(low, low.topk(1).indices, weft.local()).dtype == torch.float32


def _no_tokens(ctx):
    probs = torch.rand(4 * ctx.rank, EXPERTS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = weft.balance_loss(probs, probs.topk(1).indices, ctx)
    (loss * (1 + 2 * ctx.rank)).backward()  # weights as those of `share`, whose mean over the ranks is 2
    return loss.item(), probs.grad / 2 / ctx.world_size


def test_a_rank_without_tokens_takes_part_and_losses_may_be_weighted():
    (one, _), (other, gradient) = run_ranks(_no_tokens, 2)
    probs = torch.rand(4, EXPERTS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = weft.balance_loss(probs, probs.topk(1).indices, weft.local())
    expected.backward()
    assert one == other == pytest.approx(expected.item())
    torch.testing.assert_close(gradient, probs.grad)


@pytest.mark.parametrize(
    ("before", "after"), [({"data": 2}, {"expert": 2}), *variant_cases(({"expert": 2}, {"context": 2}))]
)
def test_a_run_resumes_with_its_biases_on_other_ranks(before, after, tmp_path):
    _, counts, parameters, biases = _alone()
    run_ranks(_train, 2, "fully_shard", 1, tmp_path, 2, mesh=before)
    for found in run_ranks(_train, 2, "replicate", 1, tmp_path, mesh=after):
        assert found[1] == counts[2:]
        assert largest_difference(parameters, found[2]) < 1e-10
        assert all(torch.equal(one, other) for one, other in zip(biases, found[3], strict=True))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Stacked()
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(x)))
        tokens = self.norm(x).flatten(0, 1)
        probs = self.router(tokens).softmax(-1)
        chosen = (probs + self.bias).topk(2).indices
        self.routed = probs, chosen
        return x + self.experts(tokens, chosen, probs.gather(-1, chosen)).view_as(x)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _in_blocks(ctx, strategy=None):
    """Steps of a model whose routers have slices of the sequence."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Blocks().double()
    if strategy is not None:
        plan = {"up": "column", "down": "row", "norm": "sequence", "router": "sequence", "experts": "sequence"}
        plan = {f"blocks.*.{name}": style for name, style in plan.items()}
        model, ctx = weft.tensor_parallel(model, ctx, plan=plan, sequence=True)
        if ctx.data_size > 1:
            model, ctx = getattr(weft, strategy)(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    every = []
    for step in range(4):
        words = torch.randint(0, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(step))
        words = words.chunk(ctx.data_size)[ctx.data_rank]
        loss = F.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten())
        loss = loss + sum(0.1 * weft.balance_loss(*block.routed, ctx) for block in model.blocks)
        loss.backward()
        weft.clip_grads(model, ctx, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        counts = [block.routed[1].flatten().bincount(minlength=EXPERTS) for block in model.blocks]
        total = weft.balance_bias_([block.bias for block in model.blocks], counts, ctx, rate=RATE)
        every.append([each.tolist() for each in total])
    biases = [block.bias.clone() for block in model.blocks]
    with weft.full_params(model, ctx):
        return every, [p.detach().clone() for p in model.parameters()], biases


@pytest.mark.parametrize(
    ("ranks", "mesh", "strategy"),
    [
        (2, {"tensor": 2}, "replicate"),
        *variant_cases((4, {"data": 2, "tensor": 2}, "replicate"), (4, {"data": 2, "tensor": 2}, "fully_shard")),
    ],
)
def test_routers_in_blocks_whose_sequence_is_split_over_the_tensor_axis(ranks, mesh, strategy):
    counts, parameters, biases = _in_blocks(weft.local())
    for found in run_ranks(_in_blocks, ranks, strategy, mesh=mesh):
        assert found[0] == counts
        assert largest_difference(parameters, found[1]) < 1e-10
        assert all(torch.equal(one, other) for one, other in zip(biases, found[2], strict=True))


class Labelled(nn.Linear):
    """As models of transformers that can add the loss of their routers."""

    config = SimpleNamespace(output_router_logits=False, router_aux_loss_coef=0.01)

    def forward(self, x, labels=None, output_router_logits=None):
        return super().forward(x)


def _local_loss(ctx, strategy):
    model, ctx = getattr(weft, strategy)(Labelled(4, 4), ctx)
    x = torch.ones(2, 4)
    model(x, labels=x).sum().backward()
    with pytest.raises(ContractError, match=f"{strategy}: .*Labelled would add the load balancing loss"):
        model(x, labels=x, output_router_logits=True)
    model.router_aux_loss_coef = 0.0
    model(x, labels=x, output_router_logits=True).sum().backward()


@pytest.mark.parametrize("strategy", ["replicate", "fully_shard"])
def test_a_loss_that_a_model_adds_over_the_local_batch_is_refused(strategy):
    run_ranks(_local_loss, 2, strategy)
