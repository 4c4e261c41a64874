"""`F.linear_cross_entropy` with options, as in one process, of heads that are whole, sharded or divided by rows."""

import collections
import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.lm import difference, whole
from tests.variants import variant_cases
from weft import torch_internals
from weft.testing import run_ranks

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
    if "compile" in how:
        module, ctx = weft.compile(module, ctx)
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
        *variant_cases(
            (4, {"data": 2, "tensor": 2}, "unit"),
            (4, {"data": 2, "context": 2}, "unit"),
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


@pytest.mark.slow
@pytest.mark.parametrize(("how", "mesh"), [("root compile", None), ("unit compile", None), ("compile", {"tensor": 2})])
def test_compiled_training_is_that_of_one_process(how, mesh):
    check(2, mesh, how, tied="unit" in how)


# -- one call ----------------------------------------------------------------------------------------


def one_call(ctx, vocabulary, naive=False, dtype=torch.float64, **options):
    """The loss and the gradients of hidden states and head, whose part lies on this rank."""
    torch.manual_seed(0)
    head = nn.Sequential(collections.OrderedDict(head=nn.Linear(WIDTH, vocabulary).to(dtype)))
    if ctx.world_size > 1:
        head, ctx = weft.tensor_parallel(head, ctx, plan={"head": options.pop("style", "vocab")})
        assert len(head.head.weight.to_local()) < vocabulary
    hidden = torch.randn(19, WIDTH).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (19,))
    labels[::4] = options.get("ignore_index", -100)
    if naive:
        loss = functional.cross_entropy(head.head(hidden), labels, **options)
    else:
        weight, bias, chunks = head.head.weight, head.head.bias, nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK)
        loss = functional.linear_cross_entropy(hidden, weight, labels, linear_bias=bias, options=chunks, **options)
    (loss * torch.arange(1.0, loss.numel() + 1, dtype=dtype).view(loss.shape)).sum().backward()
    found = {"loss": loss.detach(), "hidden": hidden.grad, "weight": head.head.weight.grad, "bias": head.head.bias.grad}
    return {name: whole(tensor).to(torch.float64) for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("ranks", "vocabulary", "options"),
    [
        (2, VOCABULARY, {}),
        (2, VOCABULARY, {"reduction": "none", "weight": WEIGHTS}),
        (4, 10, {"reduction": "mean", "weight": WEIGHTS[:10], "ignore_index": 3}),
        (2, VOCABULARY, {"reduction": "sum", "ignore_index": 1, "style": "gather"}),
        *variant_cases((2, VOCABULARY, {"style": "column"}), (4, VOCABULARY, {"reduction": "none"})),
    ],
    ids=str,
)
def test_options_are_those_of_cross_entropy(ranks, vocabulary, options):
    plain = {name: value for name, value in options.items() if name != "style"}
    expected = one_call(weft.local(), vocabulary, naive=True, **plain)
    assert difference(expected, one_call(weft.local(), vocabulary, **plain)) < 1e-12
    for found in run_ranks(one_call, ranks, vocabulary, mesh={"tensor": ranks}, **options):
        assert difference(expected, found) < 1e-12


def test_16_bit_logits_are_computed_with_in_float32():
    expected = one_call(weft.local(), VOCABULARY, naive=True)
    for found in run_ranks(one_call, 2, VOCABULARY, dtype=torch.bfloat16, mesh={"tensor": 2}):
        for name, tensor in found.items():
            assert (tensor - expected[name]).norm() < 2e-2 * expected[name].norm()


def wrong(ctx):
    """What is raised for heads whose weight is sharded."""
    chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK)
    hidden, labels = torch.randn(4, WIDTH), torch.tensor([0, 1, 2, 66])
    divided, _ = weft.tensor_parallel(nn.Sequential(nn.Linear(WIDTH, VOCABULARY)), ctx, plan={"0": "vocab"})
    weight, bias = divided[0].weight, divided[0].bias
    assert functional.linear_cross_entropy(hidden, weight, labels, linear_bias=bias, options=chunks).ndim == 0
    with pytest.raises(IndexError):
        functional.linear_cross_entropy(hidden, weight, labels + 1, options=chunks)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        functional.linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(RuntimeError, match="once_differentiable|create_graph|grad_fn"):
        x = hidden.clone().requires_grad_()
        loss = functional.linear_cross_entropy(x, weight, labels, options=chunks)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.sum().backward()


def of_a_shard(ctx):
    """A tensor that is computed from a shard is no part of a vocabulary, and not what a unit gathers."""
    sharded, _ = weft.fully_shard(nn.Sequential(nn.Linear(WIDTH, VOCABULARY)), ctx, units=["0"])
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK)
        functional.linear_cross_entropy(torch.randn(1, WIDTH), 2 * sharded[0].weight, torch.tensor([0]), options=chunks)


def test_what_cannot_be_computed_raises():
    run_ranks(wrong, 2, mesh={"tensor": 2})
    run_ranks(of_a_shard, 2)


def around_undo(ctx):
    where = torch_internals.linear_losses[0].home[0]
    before = dict(vars(where))
    module, after = weft.tensor_parallel(Language(), ctx, plan=PLAN)
    during = dict(vars(where))
    module, after = weft.undo(module, after)
    return sum(before[name] is not value for name, value in during.items()), dict(vars(where)) == before


def test_the_functions_of_torch_are_put_back():
    assert run_ranks(around_undo, 2, mesh={"tensor": 2}) == [(2, True)] * 2


# -- memory and messages -----------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """The shapes of what operations return, and the elements that all-gathers and all-reduces send."""

    def __init__(self):
        super().__init__()
        self.shapes, self.messages = set(), collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inside = {"torch_nn": torch_internals.linear_losses[0].found._init_fn}.get(func.namespace)
        with self if inside else contextlib.nullcontext():  # what torch's operation computes with is seen as well
            result = (inside or func)(*args, **(kwargs or {}))
        sent = next((each for each in torch.utils._pytree.tree_leaves(args) if isinstance(each, torch.Tensor)), None)
        for kind in ("allgather", "allreduce"):
            if kind in str(func).replace("_", "") and "c10d" in str(func):
                self.messages[kind, sent.numel()] += 1
        self.shapes |= {tuple(t.shape) for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)}
        return result

    def logits(self):
        """Rows and classes of what may be logits."""
        parts = {-(-VOCABULARY // 2), VOCABULARY // 2, VOCABULARY}
        return {shape for shape in self.shapes if len(shape) > 1 and shape[-1] in parts and WIDTH not in shape}


def seen(ctx, how, naive=False):
    torch.manual_seed(0)
    module, ctx = prepare(Language(bias=True, naive=naive), ctx, how)
    tokens, at, labels = batch(0)
    found = []
    for _ in range(3):
        with Seen() as forward:
            loss = module(tokens, at, labels, torch.tensor(3.0))
        with Seen() as backward:
            loss.backward()
        found.append((forward, backward))
    return [[(dict(one.messages), one.logits()) for one in step] for step in found]


@pytest.mark.parametrize(
    ("how", "mesh"), [("", {"tensor": 2}), ("unit", None), *variant_cases(("root", None), ("replicate", None))]
)
def test_no_rank_makes_logits_of_the_whole_batch(how, mesh):
    for steps in run_ranks(seen, 2, how, mesh=mesh, probes="off"):
        made = set().union(*(logits for step in steps for _, logits in step))
        assert made and all(rows <= CHUNK for rows, *_ in made)


def test_logits_of_the_whole_batch_would_be_seen():
    with Seen() as found:
        Language(naive=True)(*batch(0), torch.tensor(3.0))
    assert max(rows for rows, *_ in found.logits()) == ROWS * LENGTH


def test_a_head_that_is_a_unit_is_gathered_once_per_step():
    part = -(-VOCABULARY // 2) * (WIDTH + 1)  # of weight and bias
    for steps in run_ranks(seen, 2, "unit", probes="off"):
        for (forward, _), (backward, _) in steps:
            gathers = {size for kind, size in [*forward, *backward] if kind == "allgather"}
            assert {part, 2 * part} & gathers
            assert (
                sum(n for (kind, size), n in forward.items() if kind == "allgather" and size in (part, 2 * part)) == 1
            )
            assert not any(size in (part, 2 * part) for kind, size in backward if kind == "allgather")


def divided_messages(ctx):
    module, ctx = weft.tensor_parallel(Language(), ctx, plan=PLAN)
    chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK)
    hidden, labels = torch.randn(64, WIDTH).requires_grad_(), torch.randint(0, VOCABULARY, (64,))
    with Seen() as forward:
        loss = functional.linear_cross_entropy(hidden, module.head.weight, labels, options=chunks)
    with Seen() as backward:
        loss.backward()
    return [dict(one.messages) for one in (forward, backward)]


def test_a_divided_head_sends_two_numbers_per_row_and_a_gradient_once_for_all_chunks():
    for forward, backward in run_ranks(divided_messages, 2, mesh={"tensor": 2}, probes="off"):
        assert forward == {("allgather", 2 * 64): 1} and backward == {("allreduce", 64 * WIDTH): 1}


# -- pipelines ---------------------------------------------------------------------------------------


class Mean(Language):
    """Returns the mean over all tokens: each micro-batch has as many."""

    def forward(self, tokens, at, labels):
        return super().forward(tokens, at, labels.clamp(min=0), 1)


class Hidden(Language):
    """Leaves the loss to a function that has the head."""

    def forward(self, tokens, at):
        return self.hidden(tokens, at)

    def loss(self, x, labels):
        x, labels = x.flatten(0, 1), labels.flatten()
        chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK)
        total = functional.linear_cross_entropy(x, self.head.weight, labels, reduction="sum", options=chunks)
        return total, (labels != -100).sum()


def train_pipeline(ctx, kind):
    torch.manual_seed(0)
    module = kind(reduction="mean").double()
    axes = dict(ctx.axes) if ctx.world_size > 1 else {}
    if "tensor" in axes:
        module, ctx = weft.tensor_parallel(module, ctx, plan=PLAN)
    if "pipeline" in axes:
        module, ctx = weft.pipeline(module, ctx, micro_batches=2, loss=module.loss if kind is Hidden else None)
    if "data" in axes:
        module, ctx = weft.fully_shard(module, ctx, units=[Block, "head"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for number in range(4):
        tokens, at, labels = batch(number)
        if "data" in axes:
            tokens, at, labels = (each.chunk(2)[ctx.coordinates["data"]] for each in (tokens, at, labels))
        if kind is Hidden and not axes:
            total, count = module.loss(module(tokens, at), labels)
            loss = total / count
        else:
            loss = module(tokens, at, labels)
        loss.backward()
        weft.clip_grads(module, ctx, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    for _ in axes:
        module, ctx = weft.undo(module, ctx, rebind=optimizer)
    return {name: whole(p) for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "mesh", "kind"),
    [
        (2, {"pipeline": 2}, Hidden),
        *variant_cases(
            (2, {"pipeline": 2}, Mean),
            (4, {"pipeline": 2, "tensor": 2}, Hidden),
            (4, {"pipeline": 2, "tensor": 2}, Mean),
            (4, {"data": 2, "pipeline": 2}, Mean),
        ),
    ],
    ids=str,
)
def test_the_last_stage_of_a_pipeline_has_the_head(ranks, mesh, kind):
    expected = train_pipeline(weft.local(), kind)
    for found in run_ranks(train_pipeline, ranks, kind, mesh=mesh):
        assert difference(expected, found) < 1e-12
