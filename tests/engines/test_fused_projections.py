"""Column layers that hold several projections, and heads that ranks share: numbers and checkpoints of one process."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import weft
from tests.lm import difference, whole
from weft.errors import ContextError, ProbeFailed
from weft.testing import run_ranks

WIDTH, HEADS, WORDS, LENGTH = 32, 4, 33, 8


class Viewed(nn.Module):
    """As in timm: a view with the sizes of one process, before and after."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        x = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))


class Split(nn.Module):
    """As in nanoGPT: a split by the width of the model."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd = HEADS, WIDTH
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        size = x.size()
        heads = [
            part.view(*size[:2], self.n_head, size[2] // self.n_head).transpose(1, 2)
            for part in torch.split(self.c_attn(x), self.n_embd, dim=2)
        ]
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(size))


class Grouped(nn.Module):
    """Fewer heads of keys and values, taken by indices; a gate and what it opens in the layers after it."""

    def __init__(self, groups=HEADS):
        super().__init__()
        self.head_dim, self.num_key_value_groups = 4, groups
        self.kv = WIDTH // groups
        self.qkv_proj, self.o_proj = nn.Linear(WIDTH, WIDTH + 2 * self.kv), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.qkv_proj(x)
        q, k, v = y[..., :WIDTH], y[:, :, WIDTH : WIDTH + self.kv], y[..., WIDTH + self.kv :]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(self.num_key_value_groups, 1) for part in (k, v))
        return self.o_proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(WIDTH), attention(), nn.LayerNorm(WIDTH), Gated()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block(attention) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(attention):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(attention).double()


def rows_of(step, count=8):
    return torch.randint(0, WORDS, (count, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def steps_of(module, optimizer, steps, ctx=None):
    """Train; in one process without a context."""
    for step in steps:
        rows = rows_of(step)
        if ctx is not None:
            rows = rows.chunk(ctx.data_size)[ctx.data_rank]
        functional.cross_entropy(module(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        if ctx is None:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        else:
            weft.clip_grads(module, ctx, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


def reference(attention, steps):
    module = model(attention)
    steps_of(module, optimizer_of(module), range(steps))
    return {name: p.detach() for name, p in module.named_parameters()}


def prepared(ctx, attention, strategy=None, sequence=False):
    module = model(attention)
    if ctx.world_size > 1 and any(name == "tensor" for name, _ in ctx.axes):
        module, ctx = weft.tensor_parallel(module, ctx, plan=dict(weft.tensor_plan(module)), sequence=sequence)
    if strategy is not None:
        module, ctx = getattr(weft, strategy)(module, ctx)
    return module, optimizer_of(module), ctx


def train(ctx, attention, strategy, sequence):
    module, optimizer, ctx = prepared(ctx, attention, strategy, sequence)
    steps_of(module, optimizer, range(4), ctx)
    with weft.full_params(module, ctx):
        return {name: whole(p) for name, p in module.named_parameters()}


def test_plans_are_read_from_shapes_and_code():
    assert dict(weft.tensor_plan(model(Viewed))) == {
        "blocks.*.attn.qkv": "column:3",
        "blocks.*.attn.proj": "row",
        "blocks.*.mlp.gate_up": "column:2",
        "blocks.*.mlp.down": "row",
        "blocks.*.norm1": "sequence",
        "blocks.*.norm2": "sequence",
        "head": "gather",
        "words": "vocab",
    }
    assert weft.tensor_plan(model(Split))["blocks.*.attn.c_attn"] == "column:3"
    assert weft.tensor_plan(model(Grouped))["blocks.*.attn.qkv_proj"] == "column:32,8,8"
    with pytest.raises(ValueError, match="has no plan for"):  # its code is not read, so nothing says that it has parts
        weft.tensor_plan(nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "mesh", "strategy", "sequence"),
    [
        (Viewed, {"tensor": 2}, None, True),
        (Split, {"tensor": 2}, None, False),
        (Grouped, {"tensor": 2}, None, False),
        *(
            pytest.param(*each, marks=pytest.mark.variant)
            for each in [
                (Viewed, {"tensor": 4}, None, False),
                (Split, {"tensor": 4}, None, True),
                (Grouped, {"tensor": 4}, None, True),
                (Grouped, {"data": 2, "tensor": 2}, "replicate", False),
                (Viewed, {"data": 2, "tensor": 2}, "fully_shard", True),
                (Split, {"data": 2, "tensor": 2}, "fully_shard", False),
            ]
        ),
    ],
)
def test_training_is_that_of_one_process(attention, mesh, strategy, sequence):
    expected = reference(attention, 4)
    ranks = 4 if "data" in mesh else mesh["tensor"]
    for found in run_ranks(train, ranks, attention, strategy, sequence, mesh=mesh):
        assert difference(expected, found) < 1e-10


def shared_by_all():
    """One head of keys and values."""
    return Grouped(groups=8)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.variant)])
def test_ranks_share_a_head_of_keys(ranks):
    expected = reference(shared_by_all, 4)
    for found in run_ranks(train, ranks, shared_by_all, None, False, mesh={"tensor": ranks}):
        assert difference(expected, found) < 1e-10


# -- checkpoints, undo -------------------------------------------------------------------------------


def saved(ctx, attention, folder):
    module, optimizer, ctx = prepared(ctx, attention)
    state, ctx = weft.checkpointable({"model": module, "optimizer": optimizer}, ctx)
    steps_of(module, optimizer, range(2), ctx)
    weft.save(state, folder, 2, ctx)


def restored(ctx, attention, folder, strategy):
    module, optimizer, ctx = prepared(ctx, attention, strategy)
    state, ctx = weft.checkpointable({"model": module, "optimizer": optimizer}, ctx)
    weft.restore(state, folder, ctx)
    steps_of(module, optimizer, range(2, 4), ctx)
    with weft.full_params(module, ctx):
        return {name: whole(p) for name, p in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        [(1, None, None)],
        pytest.param(
            [
                (4, {"tensor": 4}, None),
                (2, {"data": 2}, "replicate"),
                (4, {"data": 2, "tensor": 2}, "fully_shard"),
            ],
            marks=pytest.mark.variant,
        ),
    ],
    ids=["one", "others"],
)
def test_a_checkpoint_is_that_of_one_process(others, tmp_path):
    run_ranks(saved, 2, Grouped, tmp_path, mesh={"tensor": 2})
    expected = reference(Grouped, 4)
    for ranks, mesh, strategy in others:
        for found in run_ranks(restored, ranks, Grouped, tmp_path, strategy, mesh=mesh):
            assert difference(expected, found) < 1e-10


def undone(ctx):
    module, rows = model(shared_by_all), rows_of(0)
    before, expected = {name: p.detach().clone() for name, p in module.named_parameters()}, module(rows)
    cut, cut_ctx = weft.tensor_parallel(module, ctx, plan=dict(weft.tensor_plan(module)))
    held = module.blocks[0].attn.qkv_proj.weight.to_local().shape
    apart = float((cut(rows) - expected).abs().max())
    groups = module.blocks[0].attn.num_key_value_groups
    module, _ = weft.undo(cut, cut_ctx)
    changed = [name for name, part in module.named_modules() if "forward" in vars(part)]
    after = {name: p.detach() for name, p in module.named_parameters()}
    return tuple(held), apart, groups, changed, difference(before, after), float((module(rows) - expected).abs().max())


def test_undo_leaves_nothing_behind():
    for held, apart, groups, changed, difference_of_weights, after in run_ranks(undone, 2, mesh={"tensor": 2}):
        assert held == (20, WIDTH) and groups == 8 and not changed  # half of 40 rows, also of a head that is shared
        assert apart < 1e-12 and difference_of_weights == 0 and after == 0


def on_meta(ctx, attention, source):
    with torch.device("meta"):
        module = Net(attention).double()
    module, ctx = weft.tensor_parallel(module, ctx, plan=dict(weft.tensor_plan(module)), weights=source)
    optimizer = optimizer_of(module)
    steps_of(module, optimizer, range(4), ctx)
    with weft.full_params(module, ctx):
        return {name: whole(p) for name, p in module.named_parameters()}


def rebound(ctx, attention):
    module = model(attention)
    optimizer = optimizer_of(module)
    steps_of(module, optimizer, range(2))
    plan = dict(weft.tensor_plan(module))
    module, ctx = weft.tensor_parallel(module, ctx, plan=plan, rebind=optimizer)
    steps_of(module, optimizer, range(2, 4), ctx)
    with weft.full_params(module, ctx):
        return {name: whole(p) for name, p in module.named_parameters()}


@pytest.mark.slow
def test_a_module_on_meta_and_an_optimizer_with_state():
    expected, source = reference(shared_by_all, 4), dict(model(shared_by_all).state_dict())
    for found in (
        *run_ranks(on_meta, 2, shared_by_all, source, mesh={"tensor": 2}),
        *run_ranks(rebound, 2, shared_by_all, mesh={"tensor": 2}),
    ):
        assert difference(expected, found) < 1e-10


# -- refusals ----------------------------------------------------------------------------------------


class Mixed(Split):
    """Takes every third feature, which are features of other heads where the ranks have theirs."""

    def forward(self, x):
        heads = [self.c_attn(x)[..., at::3].unflatten(-1, (-1, 8)).transpose(1, 2) for at in range(3)]
        return self.c_proj(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


PARTS = {"blocks.*.attn.c_attn": "column:3", "blocks.*.attn.c_proj": "row"}


def refused(ctx):
    module, ctx = weft.tensor_parallel(model(Mixed), ctx, plan=PARTS)
    with pytest.raises(ProbeFailed, match="do not compute together what"):
        module(rows_of(0))


def test_projections_that_are_taken_apart_otherwise_are_refused():
    run_ranks(refused, 2, mesh={"tensor": 2})


def three_heads():
    """Of keys and values, for four ranks."""
    attention = Grouped(groups=1)
    attention.num_key_value_heads, attention.kv = 3, 12
    attention.qkv_proj = nn.Linear(WIDTH, WIDTH + 24)
    return attention


def not_divisible(ctx):
    plan = {"blocks.*.attn.qkv_proj": "column:32,12,12", "blocks.*.attn.o_proj": "row"}
    with pytest.raises(ContextError, match="num_key_value_heads of blocks.0.attn is not divisible") as error:
        weft.tensor_parallel(model(three_heads), ctx, plan=plan)
    return str(error.value)


@pytest.mark.slow
def test_heads_of_keys_that_ranks_cannot_share_are_refused():
    assert all("3 heads, 4 ranks" in text for text in run_ranks(not_divisible, 4, mesh={"tensor": 4}))
