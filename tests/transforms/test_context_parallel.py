"""context_parallel: parts of sequences on several ranks train as whole sequences in one process."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.fix_lines.told import told
from tests.variants import pairs, variant_cases, variants
from weft.errors import ContextError, ContractError, OrderError
from weft.tensors.sequence_order import SequencePart, places
from weft.testing import run_ranks

WORDS, LENGTH, ROWS = 61, 16, 22  # 22 rows in micro-batches of 4: a ragged tail
ORDERS, METHODS = ("zigzag", "contiguous"), ("heads", "gather")


class Attention(nn.Module):
    """Causal or full self-attention, with as many or fewer heads of keys."""

    def __init__(self, width=32, heads=4, keys=2, causal=True):
        super().__init__()
        self.num_heads, self.keys, self.causal = heads, keys, causal
        # Keys have no bias: its gradient is zero but for rounding, which AdamW would make steps of.
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width // heads * keys, bias=False)
        self.value = nn.Linear(width, width // heads * keys)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q = self.query(x).unflatten(-1, (-1, 8)).transpose(1, 2)  # as many heads as this rank has
        k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.keys != self.num_heads)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), Attention(**options)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    """A language model with learned positions, tied embeddings and an odd vocabulary."""

    def __init__(self, **options):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, 32), nn.Embedding(LENGTH, 32)
        self.blocks = nn.ModuleList([Block(**options) for _ in range(2)])
        self.head = nn.Linear(32, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x, position_ids):
        h = self.words(x) + self.positions(position_ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def _model(**options):
    torch.manual_seed(0)
    return Model(**options).double()


def _data():
    words = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(words[:, :-1], words[:, 1:])


def _positions(x):
    return torch.arange(x.shape[1]).expand(len(x), -1)


def _reference(steps, epochs):
    """Losses, norms and parameters of the plain loop in one process."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for _ in range(epochs):
        batches = list(zip(*(t.split(4) for t in _data().tensors), strict=True))
        for start in range(0, len(batches), steps):
            window = batches[start : start + steps]
            count, total = sum(y.numel() for _, y in window), 0.0
            for x, y in window:
                loss = F.cross_entropy(model(x, _positions(x)).flatten(0, 1), y.flatten(), reduction="sum") / count
                loss.backward()
                total += loss.item()
            losses.append(total)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, [p.detach() for p in model.parameters()]


def _start(ctx, strategy, method="heads", order="zigzag", steps=1):
    model = _model()
    loader, ctx = weft.shard_data(DataLoader(_data(), batch_size=4 // ctx.data_size), ctx, uneven="empty")
    model, ctx = weft.context_parallel(model, ctx, method=method, order=order)
    model, ctx = getattr(weft, strategy)(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
    return model, loader, optimizer, ctx


def _epoch(model, loader, optimizer, ctx, order, shares):
    """Losses and norms of one epoch; mean losses times shares, or sums over denominators."""
    losses, norms = [], []
    for window in loader:
        total, count = 0.0, None if shares else window.denominator(lambda batch: batch[1].numel())
        for batch in window:
            x, y, at = weft.data.split_sequence((*batch, _positions(batch[0])), ctx, order=order)
            logits, y = model(x, at).flatten(0, 1), y.flatten()
            if shares:
                loss = F.cross_entropy(logits, y) * window.share if len(y) else logits.sum() * 0
            else:
                loss = F.cross_entropy(logits, y, reduction="sum") / count
            loss.backward()
            total += weft.reduce(loss.detach(), ctx, "mean").item()
        losses.append(total)
        norms.append(float(weft.clip_grads(model, ctx, max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def _whole(model, ctx):
    with weft.full_params(model, ctx):
        return [p.detach().clone() for p in model.parameters()]


def _train(ctx, strategy, method, order, steps, epochs, shares):
    model, loader, optimizer, ctx = _start(ctx, strategy, method, order, steps)
    parts = [_epoch(model, loader, optimizer, ctx, order, shares) for _ in range(epochs)]
    losses, norms = (list(itertools.chain(*each)) for each in zip(*parts, strict=True))
    return losses, norms, _whole(model, ctx)


def _check_equal(found, expected):
    for one, two in zip(found[:2], expected[:2], strict=True):
        assert one == pytest.approx(two, abs=1e-12, rel=0)
    assert max((a - b).abs().max().item() for a, b in zip(found[2], expected[2], strict=True)) < 1e-12


# -- training ----------------------------------------------------------------------------------------

SMALL = [
    ({"context": 2}, "replicate", "heads", "zigzag", 1, True),
    ({"context": 2}, "fully_shard", "gather", "zigzag", 3, False),
    ({"data": 2, "context": 2}, "fully_shard", "heads", "contiguous", 3, True),
]
LARGE = [  # every two choices meet
    (*case, case[-1] == 3)
    for case in pairs(
        ({"context": 2}, {"context": 4}, {"data": 2, "context": 2}),
        ("replicate", "fully_shard"),
        METHODS,
        ORDERS,
        (1, 3),
    )
]


@pytest.mark.parametrize(
    ("mesh", "strategy", "method", "order", "steps", "shares"),
    [*SMALL[:2], *(pytest.param(*each, marks=pytest.mark.variant) for each in LARGE if each not in SMALL[:2])],
)
def test_training_is_that_of_one_process(mesh, strategy, method, order, steps, shares):
    epochs = 2 if steps == 1 else 5  # 12 steps, or 10
    expected = _reference(steps, epochs)
    ranks = 4 if len(mesh) == 2 else mesh["context"]
    for found in run_ranks(_train, ranks, strategy, method, order, steps, epochs, shares, mesh=mesh, probes="auto"):
        _check_equal(found, expected)


def test_zero_partition_averages_over_parts_as_well():
    expected = _reference(1, 1)
    for found in run_ranks(_train_zero, 2, mesh={"context": 2}):
        _check_equal(found, expected)


def _train_zero(ctx):
    model = _model()
    model, ctx = weft.context_parallel(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=1)
    loader, ctx = weft.shard_data(DataLoader(_data(), batch_size=4), ctx)
    model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=1)
    losses, norms = _epoch(model, loader, optimizer, ctx, "zigzag", True)
    return losses, norms, _whole(model, ctx)


# -- attention by itself -----------------------------------------------------------------------------


def _attend(ctx, causal, keys):
    """Largest difference to whole sequences, of outputs and all gradients, over methods and orders."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(3, LENGTH, 32, generator=draw, dtype=torch.float64)
    weight = torch.randn(3, LENGTH, 32, generator=draw, dtype=torch.float64)
    torch.manual_seed(0)
    plain = Attention(keys=keys, causal=causal).double()
    whole = x.clone().requires_grad_()
    expected = plain(whole)
    (expected * weight).sum().backward()
    largest = 0.0
    for method, order in itertools.product(METHODS, ORDERS):
        model, inner = weft.context_parallel(copy.deepcopy(plain).requires_grad_(True), ctx, method=method, order=order)
        model.zero_grad()
        mine = places(LENGTH, SequencePart(order, ctx.world_size, ctx.rank))
        part = weft.data.split_sequence(x, inner, order=order).requires_grad_()
        found = model(part)
        (found * weight[:, mine]).sum().backward()
        pairs = [(found, expected[:, mine]), (part.grad, whole.grad[:, mine])]
        pairs += [
            (weft.reduce(p.grad, ctx, "sum"), q.grad)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        ]
        largest = max(largest, *((a - b).abs().max().item() for a, b in pairs))
    return largest


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.variant)])
@pytest.mark.parametrize(("causal", "keys"), [(True, 4), (True, 1), (False, 2)])
def test_attention_over_parts_is_attention_over_the_whole(ranks, causal, keys):
    assert max(run_ranks(_attend, ranks, causal, keys, mesh={"context": ranks})) < 1e-12


class Encoder(nn.Module):
    """nn.TransformerEncoder with the mask that its documentation shows, made for the length it sees."""

    def __init__(self, causal):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, dtype=torch.float64)
        self.encoder, self.causal = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), causal

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if self.causal else None
        return self.encoder(x, mask=mask, is_causal=self.causal)


def _encode(ctx, causal, training):
    torch.manual_seed(0)
    plain = Encoder(causal).train(training)
    x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.set_grad_enabled(training):
        expected = copy.deepcopy(plain)(x)
        model, inner = weft.context_parallel(plain, ctx, method="gather")
        found = model(weft.data.split_sequence(x, inner))
    return (found - expected[:, places(LENGTH, SequencePart("zigzag", 2, ctx.rank))]).abs().max().item()


@pytest.mark.parametrize(("causal", "training"), [(True, True), (False, True), (True, False)])
def test_multihead_attention_of_torch(causal, training):
    assert max(run_ranks(_encode, 2, causal, training, mesh={"context": 2})) < 1e-12


# -- messages, checkpoints, undo ---------------------------------------------------------------------


def _messages(ctx, method):
    model, inner = weft.context_parallel(_model(), ctx, method=method)
    x, y = _data()[:4]
    x, y, at = weft.data.split_sequence((x, y, _positions(x)), inner)
    with CommDebugMode() as counts:
        F.cross_entropy(model(x, at).flatten(0, 1), y.flatten()).backward()
    return {getattr(op, "__name__", str(op)): n for op, n in counts.get_comm_counts().items()}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("heads", {"all_to_all_single": 8}),  # two layers, two each way
        ("gather", {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}),  # two layers, one each way
    ],
)
def test_messages_of_a_step(method, expected):
    assert run_ranks(_messages, 2, method, mesh={"context": 2}, probes="off") == [expected] * 2


def _save(ctx, directory):
    model, loader, optimizer, ctx = _start(ctx, "fully_shard")
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
    _epoch(model, loader, optimizer, ctx, "zigzag", True)
    weft.save(state, directory, 1, ctx)


def _resume(ctx, directory, options):
    if options is None:
        model = _model()
        loader, ctx = weft.shard_data(DataLoader(_data(), batch_size=4 // ctx.data_size), ctx, uneven="empty")
        model, ctx = weft.replicate(model, ctx)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=1)
        ctx_of_parts = weft.local()
    else:
        model, loader, optimizer, ctx = _start(ctx, **options)
        ctx_of_parts = ctx
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
    assert weft.restore(state, directory, ctx) is not None
    order = (options or {}).get("order", "zigzag")
    losses = []
    for window in loader:
        for batch in window:
            x, y, at = weft.data.split_sequence((*batch, _positions(batch[0])), ctx_of_parts, order=order)
            logits = model(x, at).flatten(0, 1)
            loss = F.cross_entropy(logits, y.flatten()) * window.share if y.numel() else logits.sum() * 0
            loss.backward()
            losses.append(weft.reduce(loss.detach(), ctx, "mean").item())
        weft.clip_grads(model, ctx, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, _whole(model, ctx)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"context": 2}, {"strategy": "replicate", "method": "gather", "order": "contiguous"}),
        pytest.param({"data": 2}, None, marks=pytest.mark.variant),
        pytest.param({"data": 2, "context": 2}, {"strategy": "fully_shard"}, marks=pytest.mark.variant),
        pytest.param({"context": 4}, {"strategy": "fully_shard"}, marks=pytest.mark.variant),
    ],
)
def test_a_checkpoint_is_restored_on_another_mesh(tmp_path, mesh, options):
    losses, _, parameters = _reference(1, 2)
    run_ranks(_save, 2, tmp_path, mesh={"context": 2}, probes="auto")
    for found, trained in run_ranks(
        _resume, 4 if sum(mesh.values()) == 4 else 2, tmp_path, options, mesh=mesh, probes="auto"
    ):
        assert found == pytest.approx(losses[len(losses) // 2 :], abs=1e-12, rel=0)
        assert max((a - b).abs().max().item() for a, b in zip(trained, parameters, strict=True)) < 1e-12


def _closed(ctx):
    model, inner = weft.context_parallel(_model(), ctx)
    x, at = weft.data.split_sequence((_data()[:2][0], torch.arange(LENGTH).expand(2, -1)), inner)
    for holder in list(inner.world.root.holders):
        holder.release()  # as closing the context does
    with pytest.raises(ContextError, match="its process group is gone"):
        model(x, at)


def test_attention_of_a_closed_context_raises():
    run_ranks(_closed, 2, mesh={"context": 2})


def _undone(ctx):
    plain = _model()
    model, inner = weft.context_parallel(_model(), ctx)
    x, _ = _data()[:2]
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    model, inner = weft.undo(model, inner)
    expected = plain(x, _positions(x))
    same = [torch.equal(each(x, _positions(x)), expected) for each in (model, copied, pickled)]
    hooks = sum(len(m._forward_pre_hooks) + ("forward" in m.__dict__) for m in model.modules())
    return same, hooks, inner.applied


def test_undo_and_copies_are_plain():
    assert run_ranks(_undone, 2, mesh={"context": 2}) == [([True] * 3, 0, ())] * 2


# -- with other transforms ---------------------------------------------------------------------------


def _composed(ctx, method, options):
    """Losses and gradients with recompute or compile, less those without."""
    found = []
    for composed in (False, True):
        model = _model()
        if composed and "recompute" in options:
            model, inner = weft.recompute(model, ctx, blocks=Block)
        else:
            inner = ctx
        model, inner = weft.context_parallel(model, inner, method=method)
        model, inner = weft.replicate(model, inner)
        if composed and "compile" in options:
            # The compiler leaves blocks that are computed again as they are: it cannot catch a call in them.
            whole = "recompute" not in options
            model, inner = weft.compile(model, inner, blocks=Block, backend="aot_eager", fullgraph=whole)
        x, y = _data()[:4]
        x, y, at = weft.data.split_sequence((x, y, _positions(x)), inner)
        loss = F.cross_entropy(model(x, at).flatten(0, 1), y.flatten())
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("options", "method"),
    [
        (("recompute",), METHODS[0]),
        (("recompute", "compile"), METHODS[1]),
        *variant_cases((("compile",), METHODS[0])),
    ],
)
def test_blocks_are_computed_again_and_compiled(method, options):
    assert max(run_ranks(_composed, 2, method, options, mesh={"context": 2})) < 1e-12


def _in_bf16(ctx):
    found = []
    for split in (False, True):
        model = _model().float()
        model, inner = weft.with_precision(model, ctx, "bf16")
        if split:
            model, inner = weft.context_parallel(model, inner)
        x, y = _data()[:4]
        alone = inner if split else weft.local()
        x, y, at = weft.data.split_sequence((x, y, _positions(x)), alone)
        loss = F.cross_entropy(model(x, at).flatten(0, 1).float(), y.flatten())
        found.append(weft.reduce(loss.detach(), ctx, "mean").item())
    return found


def test_low_precision_travels_as_it_is_computed():
    for whole, parts in run_ranks(_in_bf16, 2, mesh={"context": 2}):
        assert parts == pytest.approx(whole, abs=5e-3)


def _with_tensors(ctx):
    model, x = _model(), _data()[:4]
    pair = {"attention.query": "column", "attention.key": "column", "attention.value": "column", "attention.out": "row"}
    plan = {f"blocks.*.{name}": style for name, style in pair.items()}
    model, ctx = weft.tensor_parallel(model, ctx, plan=plan)
    model, ctx = weft.context_parallel(model, ctx)
    model, ctx = weft.fully_shard(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y, at = weft.data.split_sequence((*x, _positions(x[0])), ctx)
    loss = F.cross_entropy(model(x, at).flatten(0, 1), y.flatten())
    loss.backward()
    norm = weft.clip_grads(model, ctx, max_norm=0.5)
    optimizer.step()
    return [weft.reduce(loss.detach(), ctx, "mean").item()], [float(norm)], _whole(model, ctx)


@pytest.mark.slow
def test_heads_cut_by_tensor_parallel_are_shared_further():
    model, (x, y) = _model(), _data()[:4]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = F.cross_entropy(model(x, _positions(x)).flatten(0, 1), y.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    optimizer.step()
    expected = [loss.item()], [norm], [p.detach() for p in model.parameters()]
    for found in run_ranks(_with_tensors, 4, mesh={"context": 2, "tensor": 2}):
        _check_equal(found, expected)


# -- counts ------------------------------------------------------------------------------------------


def _counts(ctx):
    model, loader, _, ctx = _start(ctx, "replicate", steps=3)
    model.train()  # what a context knows of a model is gone with the model
    window = next(iter(loader))
    whole = window.denominator(lambda batch: batch[1].numel())
    for _, y in window:
        part, share = weft.data.split_sequence(y, ctx), window.share
    return (
        whole,
        window.denominator(part.numel()),
        weft.metrics.denominator(part.numel(), ctx),
        share,
        weft.metrics.weighted_mean(torch.tensor(float(ctx.rank)), ctx, weight=1 + ctx.rank).item(),
    )


def test_counts_over_data_and_parts():
    # three micro-batches of 4 rows on 4 ranks: 12 * 16 places, or 2 rows of 16 places per pair of ranks
    expected = (12 * 16 / 4, 4 * 16 / 4, 4 * 16 / 4, 2 * 2 / 12, (0 + 2 + 6 + 12) / 10)
    for found in run_ranks(_counts, 4, mesh={"data": 2, "context": 2}):
        assert found == pytest.approx(expected)


# -- what is refused ---------------------------------------------------------------------------------


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(), nn.Linear(32, 32)

    def forward(self, x):
        x = self.first(x)
        return torch.softmax(self.second(x) @ x.transpose(1, 2), -1) @ x


class Counting(nn.Module):
    """Numbers its tokens itself."""

    def __init__(self):
        super().__init__()
        self.table, self.attention = nn.Embedding(LENGTH, 32), Attention()

    def forward(self, x):
        return self.attention(x + self.table(torch.arange(x.shape[1])))


class Sometimes(Attention):
    def forward(self, x):
        return super().forward(x) if self.training else x


class Sliced(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_embed, self.attention = nn.Parameter(torch.zeros(1, LENGTH, 32)), Attention()

    def forward(self, x):
        return self.attention(x + self.pos_embed[:, : x.shape[1]])


class Flexible(Attention):
    """Attention that may take another way."""

    def forward(self, x):
        return flex_attention(x, x, x) if self.causal is None else super().forward(x)


REFUSED = [
    (lambda: nn.Linear(4, 4), {}, "has no attention that can be caught"),
    (Flexible, {}, "Flexible: flex_attention"),
    (
        lambda: Attention(heads=4, keys=4, width=36).requires_grad_(True),
        {"axis": "nothing"},
        "'nothing' is not an axis",
    ),
    (Attention, {"method": "ring"}, "method = 'ring' is unknown"),
    (Attention, {"order": "random"}, "order = 'random' is unknown"),
]


def _refused(ctx, number):
    make, options, _ = REFUSED[number]
    module = make()
    before = [len(m._forward_pre_hooks) + len(m.__dict__) for m in module.modules()]
    try:
        weft.context_parallel(module, ctx, **options)
    except (ContractError, ContextError, ValueError) as error:
        assert [len(m._forward_pre_hooks) + len(m.__dict__) for m in module.modules()] == before
        return str(error)
    return "accepted"


def _refusals(ctx):
    return [_refused(ctx, number) for number in range(len(REFUSED))]


def test_what_cannot_be_exact_is_refused_before_anything_changes():
    for texts in run_ranks(_refusals, 2, mesh={"context": 2}):
        for text, (_, _, expected) in zip(texts, REFUSED, strict=True):
            assert expected in text, text
            assert "fix:" in text


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.wide = Attention(), nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x):
        return self.wide(self.attention(x).transpose(1, 2)).transpose(1, 2)


MEASURED = [
    (ByHand, "the output .*differs|what is returned .*differs"),
    (lambda: nn.Sequential(Attention(), nn.LSTM(32, 32, batch_first=True)), "output 0 .*differs"),
    (Convolved, "what is returned .*differs"),
    (Counting, "positions of this rank"),
    (Sliced, "positions of this rank"),
    (lambda: Attention(width=24, heads=3, keys=3), "3 heads of queries on this rank, 2 ranks"),
    (lambda: nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True), "drops weights with probability 0.1"),
]


def _measured(ctx):
    texts = []
    for make, _ in MEASURED:
        torch.manual_seed(3)
        module, inner = weft.context_parallel(make().double(), ctx)
        options = {"need_weights": False} if isinstance(module, nn.MultiheadAttention) else {}
        width = next(p.shape[-1] for p in module.parameters() if p.ndim > 1)
        x = torch.randn(2, LENGTH, width, dtype=torch.float64)
        part = weft.data.split_sequence(x, inner)
        with pytest.raises(ContractError) as error:
            module(*(part,) * (3 if isinstance(module, nn.MultiheadAttention) else 1), **options)
        texts.append(str(error.value))
    return texts


def test_what_cannot_be_exact_is_found_in_the_first_call():
    for texts in run_ranks(_measured, 2, mesh={"context": 2}):
        for text, (_, expected) in zip(texts, MEASURED, strict=True):
            assert re.search(expected, text), text
            assert "fix:" in text


def _calls(ctx):
    """What calls of a split model say that are not of its part."""
    x, _ = _data()[:2]
    model, inner = weft.context_parallel(_model(), ctx)
    other, _ = weft.context_parallel(Sometimes().double().eval(), ctx)
    dropping, _ = weft.context_parallel(Masked().double(), ctx)
    part, _ = weft.data.split_sequence((x, _positions(x)), inner)
    hidden = weft.data.split_sequence(torch.randn(2, LENGTH, 32, dtype=torch.float64), inner)
    wrong = weft.data.split_sequence((x, _positions(x)), inner, order="contiguous")
    masks = [torch.eye(8, dtype=torch.bool), torch.zeros(8, 8, dtype=torch.float64)[None].expand(2, 8, 8)[:, None]]
    calls = [
        lambda: model(x, _positions(x)),
        lambda: model(part, _positions(part)),
        lambda: model(*wrong),
        lambda: other(hidden),
        lambda: dropping(hidden, attn_mask=masks[0]),
        lambda: dropping(hidden, attn_mask=masks[1]),
        lambda: dropping(hidden, dropout_p=0.5),
        lambda: dropping(hidden, memory=torch.zeros(2, 4, 7, 8, dtype=torch.float64)),
    ]
    texts = []
    for call in calls:
        try:
            call()
        except ContractError as error:
            texts.append(str(error))
        else:
            texts.append("accepted")
    return texts


class Masked(nn.Module):
    def forward(self, x, memory=None, **options):
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(
            q, q if memory is None else memory, q if memory is None else memory, **options
        )


def test_calls_that_would_be_silently_different_raise():
    expected = [
        "inputs that were not split",
        "positions that count from 0 on this rank",
        "parts of sequences that were cut in another way",
        "computed without F.scaled_dot_product_attention",
        "a mask [1, 1, 8, 8] of torch.bool for 8 of 16 places",
        "a mask [2, 1, 8, 8] of torch.float64 for 8 of 16 places",
        "drops weights with probability 0.5",
        "queries [2, 4, 8, 8], keys [2, 4, 7, 8]",
    ]
    for texts in run_ranks(_calls, 2, mesh={"context": 2}):
        for text, part in zip(texts, expected, strict=True):
            assert part in text, text


def _with_recomputed_attention(ctx):
    model, ctx = weft.recompute(_model(), ctx, blocks=Attention)
    with pytest.raises(OrderError, match="recompute of the blocks around them"):
        weft.context_parallel(model, ctx)
    model, ctx = weft.context_parallel(_model(), ctx)
    with pytest.raises(ContextError, match="the ranks along 'context' see different parts"):
        weft.replicate(model, ctx, axis="data")


def test_orders_and_axes_that_would_be_wrong_are_refused():
    run_ranks(_with_recomputed_attention, 2, mesh={"data": 1, "context": 2})


def _alone(ctx, *, averages):
    model, ctx = weft.context_parallel(_model(), ctx)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = (column[:4] for column in _data().tensors)
    x, y, at = weft.data.split_sequence((x, y, _positions(x)), ctx)
    F.cross_entropy(model(x, at).flatten(0, 1), y.flatten()).backward()
    if averages:
        for p in model.parameters():
            torch.distributed.all_reduce(p.grad)
        optimizer.step()
        return
    with told("loop_watch.py", "on its part of each sequence alone") as it:
        optimizer.step()
    assert "SGD steps on" in str(it.error) and all(map(torch.equal, before, model.parameters()))
    model = it.run(model=model, ctx=ctx)["model"]
    F.cross_entropy(model(x, at).flatten(0, 1), y.flatten()).backward()
    optimizer.step()


@pytest.mark.parametrize("averages", [True, *variants(False)])
def test_a_step_on_gradients_of_one_part_alone_is_refused(averages):
    run_ranks(_alone, 2, averages=averages, mesh={"context": 2})


def _on_data_axis(ctx):
    with pytest.raises(ContextError, match="batches differ along 'data'"):
        weft.context_parallel(_model(), ctx, axis="data")


def test_an_axis_of_batches_is_refused():
    run_ranks(_on_data_axis, 2)


def test_one_rank_needs_no_axis():
    model, ctx = weft.context_parallel(_model(), weft.local())
    x, _ = _data()[:2]
    assert torch.equal(model(x, _positions(x)), _model()(x, _positions(x)))
    assert [record.name for record in ctx.applied] == ["context_parallel"]


class _Attends(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.attention(x, x, x, need_weights=False)[0]


def _with_default_device(ctx, device):
    torch.set_default_device(device)
    try:
        model, ctx = weft.context_parallel(_Attends(), ctx)
        tokens = torch.arange(16).view(2, 8) % 8
        tokens, _ = weft.data.split_sequence((tokens, torch.arange(8).expand(2, 8)), ctx)
        loss = model(tokens).square().mean()
        loss.backward()
        return weft.reduce(loss.detach(), ctx, "mean").item()
    finally:
        torch.set_default_device(None)


def test_a_default_device_changes_nothing():
    """It is a mode of torch, beside the one that catches attention."""
    (alone,) = run_ranks(_with_default_device, 1, None, mesh={"context": 1})
    for device in (None, "cpu"):
        for loss in run_ranks(_with_default_device, 2, device, mesh={"context": 2}):
            assert loss == pytest.approx(alone, rel=1e-5)
