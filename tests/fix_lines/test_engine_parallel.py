"""Experts, sequences and layers over ranks: `weft.engines.torch.parallel` and what is around it."""

import copy
import io
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.func import functional_call
from torch.nn.functional import linear, scaled_dot_product_attention

import weft
from tests.fix_lines.told import told
from weft.testing import run_ranks

# -- experts -----------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Stacked ones, as in transformers."""

    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique():
            token, place = torch.where(top_k_index == expert)
            result.index_add_(
                0, token, linear(hidden_states[token], self.up[expert]) * top_k_weights[token, place, None]
            )
        return result


class Routed(nn.Module):
    """A layer with stacked experts, and a config as models of transformers have."""

    first = 0

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4), Experts()
        self.config = SimpleNamespace(output_router_logits=False, router_aux_loss_coef=0.01)

    def forward(self, x, labels=None, output_router_logits=None):
        del labels, output_router_logits
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        return x + self.experts(x, chosen + self.first, weights)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return torch.relu(self.inner(x))


class Listed(nn.Module):
    """A layer with experts in a list."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(6, 2), nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            result = result.index_add(0, *self.rows(x, torch.where(chosen == number)[0], expert))
        return x + result * weight[:, None]

    def rows(self, x, row, expert):
        return row, expert(x[row])


class Dictionaries(Listed):
    def rows(self, x, row, expert):
        return row, expert(x=x[row])


class Reading(Listed):
    def rows(self, x, row, expert):
        return row, linear(x[row], expert.inner.weight)


class Feeding(Listed):
    def rows(self, x, row, expert):
        return row, expert(expert(x[row]))


def _without_the_list(it, kind, ctx, x):
    others, alone = it.fix.split(", or ")
    assert others == "weft.expert_parallel(..., experts=...) without this list"
    model = nn.Sequential(Listed(), kind())
    model, _ = weft.expert_parallel(model, ctx, experts="0.experts")
    model(x).sum().backward()
    assert [[p.is_meta for p in part.experts.parameters()].count(True) for part in model] == [2, 0]
    model = kind()
    eval(alone.removesuffix(" alone"), {"weft": weft, "model": model, "ctx": ctx})
    model(x).sum().backward()


def _expert_mistakes(ctx):
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(ctx.rank))
    called, read, fed = (
        weft.expert_parallel(nn.Sequential(Listed(), kind()), ctx)[0] for kind in (Dictionaries, Reading, Feeding)
    )
    with told("engines/torch/parallel/experts/expert_placeholders.py", "called with something else") as it:
        called(x)
    _without_the_list(it, Dictionaries, ctx, x)
    with told("engines/torch/parallel/experts/expert_placeholders.py", "of an expert is read") as it:
        read(x)
    _without_the_list(it, Reading, ctx, x)
    with told("engines/torch/parallel/experts/expert_placeholders.py", "when it runs again") as it:
        fed(x)
    _without_the_list(it, Feeding, ctx, x)

    wrong = Routed()
    wrong.first = 2
    wrong, _ = weft.expert_parallel(wrong, ctx)
    with told("engines/torch/parallel/experts/stacked.py", "that there is not") as it:
        wrong(x)
    assert it.fix.startswith("a router that chooses among the experts")
    wrong.first = 0
    wrong(x).sum().backward()

    with weft.adopt(mesh={"expert": 2}, device="cpu") as inner:
        model, _ = weft.expert_parallel(Routed(), inner)
    with told("engines/torch/parallel/experts/all_to_all.py", "are gone") as it:
        model(x)
    with weft.adopt(mesh={"expert": 2}, device="cpu") as inner:
        model, divided = weft.expert_parallel(Routed(), inner)
        model = it.run(model=model, ctx=divided)["model"]
    model(x).sum().backward()


def _local_losses(ctx):
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(ctx.rank))
    model = Routed()
    model.config.output_router_logits = True
    with told("engines/torch/parallel/experts/local_losses.py", "adds the load balancing") as it:
        weft.expert_parallel(model, ctx)
    model.config.output_router_logits = False
    model, inner = weft.expert_parallel(model, ctx)
    with told("engines/torch/parallel/experts/local_losses.py", "would add the load balancing") as asked:
        model(x, labels=x, output_router_logits=True)
    assert it.fix == asked.fix or not asked.fix
    it.run(model=model)
    model, inner = weft.replicate(model, inner)

    def balancing(x, ctx):
        chances = model.router(x).softmax(-1)
        return weft.balance_loss(chances, chances.topk(2, -1).indices, ctx)

    loss = model(x, labels=x, output_router_logits=True).square().mean() + balancing(x, inner)
    loss.backward()
    together = model.router.weight.grad.clone()
    everyone = weft.gather(x, ctx)
    model, inner = weft.undo(model, inner)
    model.zero_grad()
    (model(everyone).square().mean() + balancing(everyone, weft.local())).backward()
    assert torch.allclose(together, model.router.weight.grad, atol=1e-6)


@pytest.mark.slow
def test_experts():
    run_ranks(_expert_mistakes, 2, mesh={"expert": 2})
    run_ranks(_local_losses, 2, mesh={"expert": 2})


# -- sequences ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention without layers of its own, and a forward that may leave it out."""

    def __init__(self, heads=4):
        super().__init__()
        self.heads, self.inner = heads, nn.Linear(24, 24)

    def forward(self, x, memory=None, *, by_hand=False, **options):
        q, k = (
            self.inner(t).unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (x, x if memory is None else memory)
        )
        if by_hand:
            return x
        return scaled_dot_product_attention(q, k, k, **options).transpose(1, 2).flatten(2)


class Words(nn.Module):
    """A language model."""

    def __init__(self):
        super().__init__()
        self.words, self.positions, self.attention = nn.Embedding(9, 24), nn.Embedding(8, 24), Attention()

    def forward(self, x, position_ids):
        return self.attention(self.words(x) + self.positions(position_ids), is_causal=True)


def _sequence_mistakes(ctx):
    x = torch.arange(16).view(2, 8) % 9
    at = torch.arange(8)[None]
    torch.manual_seed(0)
    model, ctx = weft.context_parallel(Words(), ctx)
    part = weft.data.split_sequence((x, at), ctx, order="contiguous")
    with told("engines/torch/parallel/sequence_inputs.py", "in another way") as it:
        model(*part)
    batch = (x, at)
    model(*eval(it.fix, {"weft": weft, "batch": batch, "ctx": ctx}))

    torch.manual_seed(0)
    expected = weft.data.split_sequence(Words()(x, at), ctx)
    with told("engines/torch/parallel/sequence_inputs.py", "that were not split") as whole:
        model(x, at)
    with told("engines/torch/parallel/sequence_inputs.py", "count from 0") as counted:
        model(weft.data.split_sequence(x, ctx), torch.arange(4)[None])
    for it in (whole, counted):
        with_batch, alone = it.fix.split(", or ")
        names = {"weft": weft, "torch": torch, "batch": {"x": x}, "x": x, "y": x, "ctx": ctx, "model": model}
        assert torch.allclose(eval(with_batch, names), expected, atol=1e-6)
        mine, _, places = eval(alone, names)
        assert torch.allclose(model(mine, places), expected, atol=1e-6)


def _attention_mistakes(ctx):
    x = torch.randn(2, 8, 24)
    model, inner = weft.context_parallel(Attention(), ctx)
    part = weft.data.split_sequence(x, inner)
    with told("engines/torch/parallel/split_attention.py", "computed without") as it:
        model(part, by_hand=True)
    assert it.fix.endswith("or need_weights=False for nn.MultiheadAttention")
    other, _ = weft.context_parallel(nn.MultiheadAttention(24, 4, dropout=0.1, batch_first=True), ctx)
    with told("engines/torch/parallel/split_attention.py", "computed without") as it:
        other.eval()(part, part, part)
    other(part, part, part, need_weights=False)

    with told("engines/torch/parallel/split_attention.py", "something else than its own sequence") as it:
        model(part, memory=torch.randn(2, 7, 24))
    assert it.fix.startswith("model(..., use_cache=False) with whole sequences")
    model(part)

    for mask in (torch.eye(4, dtype=torch.bool), torch.zeros(2, 1, 4, 4)):
        with told("engines/torch/parallel/split_attention.py", "a mask of attention module") as it:
            model(part, attn_mask=mask)
    assert it.fix.endswith("or is_causal=True without a mask")
    model(part, is_causal=True)
    ids = torch.tensor([[0] * 5 + [1] * 3])
    whole = it.run(batch={"x": x, "segment_ids": ids}, ctx=inner)["part"]
    model(whole["x"], attn_mask=(whole["segment_ids"][:, None, :, None] == whole["segment_ids"][:, None, None, :]))

    with told("engines/torch/parallel/split_attention.py", "drops weights") as it:
        other.train()(part, part, part, need_weights=False)
    assert it.fix.endswith("or dropout=0.0 for nn.MultiheadAttention")
    other, _ = weft.context_parallel(nn.MultiheadAttention(24, 4, dropout=0.0, batch_first=True), ctx)
    other(part, part, part, need_weights=False)
    names = {"weft": weft, "model": nn.MultiheadAttention(24, 4, dropout=0.1, batch_first=True), "ctx": ctx}
    names["loader"], names["ctx"] = weft.shard_data(torch.utils.data.DataLoader(x, batch_size=2), ctx)
    exec(it.fix.partition(";")[0], names)
    other, inner = weft.context_parallel(names["model"], names["ctx"])
    for batch in names["loader"]:
        part = weft.data.split_sequence(batch, inner)
        other(part, part, part, need_weights=False)

    other, _ = weft.context_parallel(Attention(heads=3), ctx)
    with told("engines/torch/parallel/split_attention.py", "cannot be shared by") as it:
        other(part)
    other = it.run(model=Attention(heads=3), ctx=ctx)["model"]
    other(part)

    with weft.adopt(mesh={"context": 2}, device="cpu") as opened:
        model, _ = weft.context_parallel(Attention(), opened)
        model(part)
    with told("engines/torch/parallel/split_attention.py", "its process group is gone") as it:
        model(part)
    with weft.adopt(mesh={"context": 2}, device="cpu") as opened:
        model, split = weft.context_parallel(Attention(), opened)
        model = it.run(model=model, ctx=split)["model"]
    assert torch.equal(model(x), copy.deepcopy(model)(x))


@pytest.mark.slow
def test_sequences():
    run_ranks(_sequence_mistakes, 2, mesh={"context": 2})
    run_ranks(_attention_mistakes, 2, mesh={"context": 2})


# -- layers that are cut -----------------------------------------------------------------------------


class Heads(nn.Module):
    """Something between two layers is done to each head."""

    def __init__(self, between=None):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(2, 2)
        self.between = between or torch.tanh

    def forward(self, x):
        return x + self.down(self.between(self.scale(self.up(x).unflatten(-1, (-1, 2))).flatten(-2)))


HEADS = {"*.up": "column", "*.down": "row", "*.scale": "replicate"}


def _planned(it, plan):
    """The plan that a line says, with what was in it before in place of the dots."""
    it.fix = it.fix.replace("...", "**plan")
    return it.run(plan=plan)["plan"]


def _heads(between=None):
    torch.manual_seed(0)
    return nn.Sequential(Heads(), Heads(between))


def _trains_as_one(model, plan, ctx, alone):
    model, _ = weft.tensor_parallel(model, ctx, plan=plan)
    x = torch.linspace(-1, 1, 12).view(3, 4)
    for one in (model, alone):
        one(x).square().sum().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad, q.grad, atol=1e-6)


def _plan_mistakes(ctx, probes):
    x, plan = torch.linspace(-1, 1, 12).view(3, 4), {"*.up": "column", "*.down": "row"}
    model, _ = weft.tensor_parallel(_heads(), ctx, plan=plan)
    if probes == "off":
        with told("engines/torch/parallel/part_sums.py", "differ between the ranks") as it:
            model(x).sum().backward()
        assert _planned(it, plan) == HEADS
        _trains_as_one(_heads(), HEADS, ctx, _heads())
        return
    with told("engines/torch/probes/runner.py", "at most {limit}") as it:
        model(x).sum().backward()
    assert _planned(it, plan) == HEADS

    def centered(h):
        return h - h.mean(-1, keepdim=True)

    model, _ = weft.tensor_parallel(_heads(centered), ctx, plan=HEADS)
    with told("engines/torch/probes/runner.py", "at most {limit}") as it:
        model(x)
    assert it.fix.startswith("leave the layers around it out of the plan")
    _trains_as_one(_heads(centered), {f"0{name[1:]}": style for name, style in HEADS.items()}, ctx, _heads(centered))

    model, inner = weft.tensor_parallel(_heads(), ctx, plan=HEADS)
    with told("engines/torch/probes/runner.py", "other values or shapes") as it:
        model(x + ctx.rank)
    loader = torch.utils.data.DataLoader(x)
    for batch in it.run(loader=loader, ctx=inner)["loader"]:
        model(batch)

    model, inner = weft.tensor_parallel(nn.Sequential(nn.Dropout(), *_heads()), ctx, plan=HEADS)
    torch.manual_seed(ctx.rank)
    with told("engines/torch/probes/runner.py", "other values or shapes") as it:
        model(x)
    names = it.run(loader=torch.utils.data.DataLoader(x), ctx=ctx, weft=weft)
    names["model"] = nn.Sequential(nn.Dropout(), *_heads())
    exec(it.fix.split("; for dropout, ")[1], names)
    model, _ = weft.tensor_parallel(names["model"], names["ctx"], plan=HEADS)
    for batch in names["loader"]:
        model(batch).sum().backward()


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Heads()])

    def forward(self, x):
        return self.blocks[0](x)


class Tied(nn.Module):
    """Logits [tokens, 8] with the weights of the embedding; of a head that has them too; or a penalty beside them."""

    def __init__(self, how="function"):
        super().__init__()
        self.embedding, self.body, self.how = nn.Embedding(8, 4), _heads(), how
        if how == "head":
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.body(self.embedding(tokens))
        if self.how == "head":
            return self.head(x)
        if self.how == "function":
            return nn.functional.linear(x, self.embedding.weight)
        square = self.body[0].up.weight.square().sum()
        return x + (square if self.how == "mixed" or not hasattr(square, "full_tensor") else square.full_tensor())


def _mixed_in_forward(ctx):
    plan, tokens = {f"body.{name}": style for name, style in HEADS.items()}, torch.arange(8)
    for how in ("function", "mixed"):
        model, _ = weft.tensor_parallel(Tied(how), ctx, plan={**plan, "embedding": "vocab"})
        with told("engines/torch_errors.py", "computes with tensors of one kind") as it:
            model(tokens)
    head, leave, term = it.fix.split("; ")
    assert head.startswith("call the layers that have the parameters, such as self.head(x)")
    assert (leave[:29], term[:14]) == ("or leave these layers out of ", ".full_tensor()")
    fixed = {"head": {"embedding": "vocab", "head": "gather"}, "function": {}, "penalty": {"embedding": "vocab"}}
    for how, more in fixed.items():
        model, _ = weft.tensor_parallel(Tied(how), ctx, plan={**plan, **more})
        alone = Tied(how)
        alone.load_state_dict({n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.state_dict().items()})
        for one in (model, alone):
            one(tokens).square().mean().backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(getattr(p.grad, "full_tensor", lambda p=p: p.grad)(), q.grad, atol=1e-6)


class LossOfHead(nn.Module):
    """Without options, torch makes the logits of the whole batch."""

    def __init__(self, **options):
        super().__init__()
        self.words, self.head, self.options = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), options

    def forward(self, tokens):
        hidden = self.words(tokens)
        return nn.functional.linear_cross_entropy(hidden, self.head.weight, tokens, **self.options)


def _all_logits(ctx):
    tokens = torch.arange(8)
    if "tensor" in dict(ctx.axes):
        model, _ = weft.tensor_parallel(LossOfHead(), ctx, plan={"head": "vocab"})
        with told("engines/torch_errors.py", "computes with tensors of one kind") as it:
            model(tokens)
    else:
        model, _ = weft.fully_shard(LossOfHead(), ctx, units=["words", "head"])
        with told("engines/torch/hooks/parameter_reads.py", "reads parameters of a unit") as it:
            with pytest.raises(RuntimeError, match="DTensor"):
                model(tokens)
    whole = model.head.weight.full_tensor()
    hidden = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    found = it.run(F=nn.functional, torch=torch, hidden=hidden, head=model.head, labels=tokens)["loss"]
    assert torch.allclose(found, nn.functional.cross_entropy(hidden @ whole.T, tokens), atol=1e-6)


def _penalty(ctx):
    x, alone = torch.linspace(-1, 1, 12).view(3, 4), _heads()
    model, _ = weft.tensor_parallel(_heads(), ctx, plan=HEADS)
    with told("engines/torch/parts/dtensor_operations.py", "terms of one loss") as it:
        model(x).square().mean() + model[0].up.weight.square().sum()
    term, decay = it.fix.split("  # of each term over parameters; or ")
    penalty = model[0].up.weight.square().sum()
    eval(term, {"loss": model(x).square().mean(), "penalty": penalty}).backward()
    (alone(x).square().mean() + 0.1 * alone[0].up.weight.square().sum()).backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(getattr(p.grad, "full_tensor", lambda p=p: p.grad)(), q.grad, atol=1e-6)
    torch.optim.SGD(model.parameters(), **{decay.partition("=")[0]: 0.1}).step()


def _tensor_mistakes(ctx):
    plan = {f"blocks.{name}": style for name, style in HEADS.items()}
    x = torch.randn(2, 7, 4)
    model, _ = weft.tensor_parallel(Sequences(), ctx, plan=plan, sequence=True)
    with told("engines/torch/parallel/tensor_hooks.py", "cannot be cut") as it:
        model(x)
    assert it.fix == "pad the batch, or weft.tensor_parallel(..., sequence=False)"
    model(nn.functional.pad(x, (0, 0, 0, 1)))
    weft.tensor_parallel(Sequences(), ctx, plan=plan, sequence=False)[0](x)

    model, inner = weft.tensor_parallel(_heads(), ctx, plan=HEADS)
    whole = {name: getattr(p.detach(), "full_tensor", p.detach)() for name, p in model.named_parameters()}
    with told("engines/torch/parallel/tensor_module.py", "with whole tensors") as it:
        functional_call(model, whole, (x,))
    given, plain = it.fix.split("; ")
    eval(given, {"functional_call": functional_call, "model": model, "x": x})
    with told("engines/torch/parallel/tensor_module.py", "with whole tensors"), weft.full_params(model, inner):
        model(x)
    assert plain == "model(x) after full_params"
    model(x).sum().backward()

    inputs = x.clone().requires_grad_()
    for call in (model, model[0].up):
        with told("engines/torch/parallel/tensor_module.py", "create_graph=True") as it:
            torch.autograd.grad(call(inputs).square().sum(), inputs, create_graph=True)
    same = it.run(model=_heads(), ctx=ctx)["model"]
    assert torch.autograd.grad(same(inputs).square().sum(), inputs, create_graph=True)[0].grad_fn is not None

    p = model[0].up.weight
    with told("engines/torch/parts/assigned_data.py", "was assigned") as it:
        p.data = p.data * 0.5
        model(x)
    model, inner = weft.tensor_parallel(_heads(), ctx, plan=HEADS)
    p, before = model[0].up.weight, model[0].up.weight.detach().full_tensor()
    mine, every = it.fix.split("; whole tensors: ")
    exec(mine, {"torch": torch, "p": p})
    assert torch.equal(p.detach().full_tensor(), before * 0.5)
    exec(every.replace("p.copy_(...)", "model[0].up.weight.copy_(before)"), {**globals(), **locals(), "ctx": inner})
    assert torch.equal(p.detach().full_tensor(), before)

    with told("engines/torch/parts/refuse_pickle.py", "pickle of a") as it:
        torch.save(model, io.BytesIO())
    copied = copy.deepcopy(model)
    copied(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.save(it.run(model=model, ctx=inner, optimizer=optimizer)["model"], io.BytesIO())
    model, inner = weft.tensor_parallel(_heads(), ctx, plan=HEADS)

    with told("engines/torch/parts/refuse_pickle.py", "was given whole tensors") as it:
        model.load_state_dict(whole)
    assert it.fix.startswith("model.load_state_dict(...) before weft.tensor_parallel, or")
    model = _heads()
    model.load_state_dict(whole)
    model, inner = weft.tensor_parallel(model, ctx, plan=HEADS)
    model(x).sum().backward()

    with told("engines/torch/parts/cut_gradient.py", "in one call") as it:
        torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    line, every = it.fix.split("; or, on all ranks: ")
    names = {"weft": weft, "model": model, "ctx": inner}
    exec(line, names)
    assert every == "tensor.full_tensor()"
    gradients = [getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)() for p in model.parameters()]
    assert torch.cat([one.flatten() for one in gradients]).norm() <= 1 + 1e-5


def _changes_a_row(fix, model, ctx):
    """A line that makes a DTensor whole, changes it and takes it back; and one that does so with a model."""
    expected = model.weight.detach().full_tensor()
    names = {"torch": torch, "weft": weft, "model": model, "ctx": ctx, "tensor": model.weight}
    pattern = r"(.*)  # on all ranks; to change it, under no_grad: (.*); parameters also: (.*) \.\.\."
    whole, change, every = re.fullmatch(pattern, fix).groups()
    exec(f"{whole}\nwith torch.no_grad(): {change}", names)
    expected[0] = 0
    assert torch.equal(model.weight.detach().full_tensor(), expected)
    exec(f"{every}\n    model.weight[0] = 1", names)
    expected[0] = 1
    assert torch.equal(model.weight.detach().full_tensor(), expected)


def _part_mistakes(ctx, folder):
    model, inner = weft.fully_shard(nn.Linear(4, 4), ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 4)
    model(x).square().sum().backward()
    optimizer.step()
    value = model.weight.grad.norm()
    with told("engines/torch/parts/dtensor_reads.py", "is read, of which") as it:
        float(value)
    line, more = it.fix.split("  # on all ranks; or ")
    names = {"weft": weft, "value": value, "model": model, "ctx": inner}
    assert eval(line, names) == pytest.approx(model.weight.grad.full_tensor().norm().item())
    exec(more, names)

    with told("engines/torch/parts/dtensor_reads.py", "into a plain tensor") as it:
        torch.empty(4, 4).copy_(model.weight.detach())
    line, more = it.fix.split("  # on all ranks; or ")
    target = torch.empty(4, 4)
    exec(line, {"target": target, "source": model.weight.detach()})
    assert torch.equal(target, model.weight.detach().full_tensor())
    with weft.full_params(model, inner):
        assert more == "with weft.full_params(model, ctx): ..." and torch.equal(target.copy_(model.weight), target)

    target = DTensor.from_local(torch.ones(4), ctx.mesh, [Partial()])
    with told("engines/torch/parts/dtensor_reads.py", "a term of a sum") as it:
        target.copy_(torch.arange(4.0))
    target = it.run(target=target, Replicate=Replicate)["target"]
    assert torch.equal(target.copy_(torch.arange(4.0)).full_tensor(), torch.arange(4.0))

    source = model.weight.detach()
    target = DTensor.from_local(
        torch.zeros(4, 4), init_device_mesh("cpu", (2,), mesh_dim_names=("other",)), [Replicate()]
    )
    with told("engines/torch/parts/dtensor_reads.py", "over other ranks") as it:
        target.copy_(source)
    it.run(target=target, source=source)
    assert torch.equal(target.full_tensor(), source.full_tensor())

    tensor = model.weight.detach()
    with told("engines/torch/parts/dtensor_operations.py", "which changes a copy") as it:
        tensor[0] = 0
    _changes_a_row(it.fix, model, inner)
    with told("engines/torch/parts/dtensor_operations.py", "torch cannot do this") as it:
        tensor[tensor < 0] = 0
    _changes_a_row(it.fix, model, inner)
    with told("engines/torch/parts/dtensor_operations.py", "memory of its part") as it:
        tensor.numpy()
    _changes_a_row(it.fix, model, inner)

    with told("engines/torch/parts/refuse_pickle.py", "cannot be pickled") as it:
        torch.save(model.state_dict(), io.BytesIO())
    state, after = weft.checkpointable({"model": model, "optimizer": optimizer}, inner)
    with told("engines/torch/parts/refuse_pickle.py", "cannot be pickled"):
        torch.save(optimizer.state_dict(), io.BytesIO())
    save, rest = it.fix.split("  # then, in one process: ")
    export, gathered = rest.split("; or\n")
    names = {"weft": weft, "state": state, "directory": folder, "step": 1, "ctx": after, "folder": folder / "weights"}
    exec(save, names)
    if ctx.rank == 0:
        assert [file.name for file in eval(export, names)] == ["model.safetensors"]
    assert gathered.strip() == "with weft.full_params(model, ctx): ...  # on all ranks"
    with weft.full_params(model, after):
        torch.save(model.state_dict(), io.BytesIO())

    with told("engines/torch/parts/refuse_pickle.py", "was given whole tensors") as it:
        model.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    assert it.fix.endswith("or weft.load_weights(model, path, ctx) after it")
    weft.load_weights(model, names["path"], after)


@pytest.mark.slow
def test_layers_that_are_cut(tmp_path):
    run_ranks(_part_mistakes, 2, tmp_path)
    run_ranks(_plan_mistakes, 2, "every", mesh={"tensor": 2})
    run_ranks(_plan_mistakes, 2, "off", mesh={"tensor": 2}, probes="off")
    run_ranks(_tensor_mistakes, 2, mesh={"tensor": 2})
    run_ranks(_penalty, 2, mesh={"tensor": 2})
    run_ranks(_mixed_in_forward, 2, mesh={"tensor": 2})
    if hasattr(nn.functional, "linear_cross_entropy"):  # torch 2.13
        run_ranks(_all_logits, 2, mesh={"tensor": 2})
        run_ranks(_all_logits, 2)


# -- what strategies have in common ------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.first(x)


def _strategy_mistakes(ctx):
    x = torch.randn(4, 4)
    model, inner = weft.replicate(TwoHeads(), ctx)
    with told("engines/torch/reducing/strategy.py", "got no gradient") as it:
        model(x).sum().backward()
    assert it.fix.startswith('weft.replicate(..., unused="zero"), or requires_grad_(False) on them; on all of TwoHeads')
    model, _ = weft.replicate(TwoHeads(), ctx, unused="zero")
    model(x).sum().backward()
    model = TwoHeads()
    model.second.requires_grad_(False)
    model, _ = weft.replicate(model, ctx)
    model(x).sum().backward()

    x.requires_grad_()
    model, _ = weft.replicate(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), ctx)
    model(x).sum().backward()
    with told("engines/torch/reducing/strategy.py", "got no gradient") as it:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum().backward()
    assert it.fix == "add the losses up and call backward once; the passes before this one gave them gradients"
    model, _ = weft.replicate(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), ctx)
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    (model(x).sum() + slope.square().sum()).backward()
    x.requires_grad_(False)

    generator, _ = weft.replicate(nn.Linear(4, 4), ctx)
    critic, _ = weft.replicate(TwoHeads(), ctx)
    with told("engines/torch/reducing/strategy.py", "got no gradient"):
        critic(generator(x)).sum().backward()
    critic.requires_grad_(False)
    critic(generator(x)).sum().backward()
    critic.requires_grad_(True)
    optimizer = torch.optim.SGD(critic.parameters(), 0.1)
    (critic(x).sum() + critic.second(x).sum()).backward()
    optimizer.step()  # what is left of these gradients is no part of the step that follows
    with told("engines/torch/reducing/strategy.py", "got no gradient") as it:
        critic(generator(x)).sum().backward()
    assert it.fix.startswith('weft.replicate(..., unused="zero"), or requires_grad_(False) on them; on all of TwoHeads')

    model, inner = weft.replicate(nn.Linear(4, 1), ctx)
    model, windows, inner = weft.accumulate_grads(model, list(x.chunk(2)), inner, steps=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with told("engines/torch/reducing/strategy.py", "before they were averaged") as it:
        for window in windows:
            for batch in window:
                model(batch).sum().backward()
                optimizer.step()
    assert it.fix == "for batch in window: ...; then optimizer.step(), after the inner loop"
    optimizer.zero_grad()
    for window in windows:
        for batch in window:
            model(batch).sum().backward()
        optimizer.step()


@pytest.mark.slow
def test_strategies():
    run_ranks(_strategy_mistakes, 2)
