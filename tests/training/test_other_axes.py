"""Strategies over modules that arrive cut over another axis, against one process."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

import weft
from weft.contract import Layout
from weft.testing import run_ranks

WIDTH, HEADS, WORDS = 8, 4, 30
STRATEGIES = ["replicate", "fully_shard", "zero1", "zero2", "zero3"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        size = WIDTH // HEADS
        q, k, v = (part(x).unflatten(-1, (-1, size)).transpose(1, 2) for part in self.qkv)
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Net(nn.Module):
    """A small transformer; `last` is in no plan, and stays plain."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def build():
    torch.manual_seed(0)
    return Net().double()


def parallel(net, mesh, *, sequence):
    """Cut by torch; with `sequence`, the norms of blocks get partial sums as gradients."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {}
    for number in range(len(net.blocks)):
        at = f"blocks.{number}."
        plan |= {f"{at}attention.qkv.{i}": ColwiseParallel() for i in range(3)}
        if sequence:
            plan |= {at + "first": SequenceParallel(), at + "second": SequenceParallel()}
            one, other = Shard(1), Replicate()
            plan[at + "attention"] = PrepareModuleInput(input_layouts=(one,), desired_input_layouts=(other,))
            plan[at + "attention.out"] = RowwiseParallel(output_layouts=one)
            plan[at + "up"] = ColwiseParallel(input_layouts=one)
            plan[at + "down"] = RowwiseParallel(output_layouts=one)
        else:
            plan[at + "attention.out"], plan[at + "up"], plan[at + "down"] = (
                RowwiseParallel(),
                ColwiseParallel(),
                RowwiseParallel(),
            )
    if sequence:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["last"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(net, mesh, plan)


def words(step, rows=8):
    return torch.randint(0, WORDS, (rows, 9), generator=torch.Generator().manual_seed(100 + step))


def loss_of(net, batch):
    return functional.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def strategy_on(net, optimizer, ctx, strategy, **options):
    if strategy.startswith("zero"):
        return weft.zero_partition(net, optimizer, ctx, stage=int(strategy[-1]), **options)
    if strategy == "fully_shard":
        units = next((kind for kind in (Block, Mixture) if any(isinstance(part, kind) for part in net.modules())), None)
        net, ctx = weft.fully_shard(net, ctx, units=units, rebind=optimizer, **options)
    elif strategy == "replicate":
        net, ctx = weft.replicate(net, ctx, **options)
    return net, optimizer, ctx


def alone(steps=3):
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(net, words(step))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach().clone() for name, p in net.named_parameters()}


def close(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def _train(ctx, strategy, sequence, own_mesh=False):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"] if own_mesh else ctx.mesh["tensor"]
    net = parallel(build(), mesh, sequence=sequence)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer, ctx = strategy_on(net, optimizer, ctx, strategy)
    losses, norms = [], []
    for step in range(3):
        loss = loss_of(net, words(step).chunk(ctx.data_size)[ctx.data_rank])
        loss.backward()
        norms.append(weft.clip_grads(net, ctx, max_norm=0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(weft.reduce(loss.detach(), ctx.on(ctx.data_axes), "mean").item())
    with weft.full_params(net, ctx):
        return losses, norms, {name: p.detach().clone() for name, p in net.named_parameters()}


def _train_all(ctx, sequence, own_mesh, strategies):
    return {strategy: _train(ctx, strategy, sequence, own_mesh) for strategy in strategies}


@pytest.mark.parametrize(
    ("sequence", "own_mesh", "strategies"),
    [
        (True, False, ["fully_shard"]),
        pytest.param(True, False, STRATEGIES, marks=pytest.mark.variant),
        pytest.param(False, False, STRATEGIES, marks=pytest.mark.variant),
        pytest.param(True, True, ["replicate", "fully_shard", "zero1"], marks=pytest.mark.variant),
    ],
    ids=["sequence", "sequence, all strategies", "plain", "a mesh of the user's own"],
)
def test_a_transformer_cut_by_torch_is_trained_as_in_one_process(sequence, own_mesh, strategies):
    losses, norms, parameters = alone()
    mesh = {"shard": 2, "tensor": 2} if own_mesh else {"data": 2, "tensor": 2}
    for of_rank in run_ranks(_train_all, 4, sequence, own_mesh, strategies, mesh=mesh):
        for found in of_rank.values():
            assert found[0] == pytest.approx(losses, abs=1e-12)
            assert found[1] == pytest.approx(norms, abs=1e-12)
            close(found[2], parameters)


def _train_without_data(ctx):
    return {strategy: _train(ctx, strategy, sequence=False) for strategy in STRATEGIES}


@pytest.mark.slow
def test_without_a_data_axis_a_strategy_does_nothing():
    losses, norms, parameters = alone()
    for of_rank in run_ranks(_train_without_data, 2, mesh={"tensor": 2}):
        for found in of_rank.values():
            assert found[0] == pytest.approx(losses, abs=1e-12)
            assert found[1] == pytest.approx(norms, abs=1e-12)
            close(found[2], parameters)


# -- windows, averages, undo, checkpoints ------------------------------------------------------------


def _everything(ctx, strategy, directory, resume):
    """Windows of 3 with a ragged tail, clipping and averages; saved in the middle, or resumed from there."""
    net = build()
    if "tensor" in dict(ctx.axes):
        net = parallel(net, ctx.mesh["tensor"], sequence=True)
    loader = torch.utils.data.DataLoader(words(7, rows=28), batch_size=4 // ctx.data_size)
    loader, ctx = weft.shard_data(loader, ctx)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer, ctx = strategy_on(net, optimizer, ctx, strategy)
    net, ctx = weft.average_weights(net, ctx, decay=0.5)
    net, loader, ctx = weft.accumulate_grads(net, loader, ctx, steps=3)
    state, ctx = weft.checkpointable({"net": net, "optimizer": optimizer, "loader": loader}, ctx)
    if resume:
        weft.restore(state, directory, ctx)
    for number, window in enumerate(loader, 1 if resume else 0):
        for batch in window:
            (loss_of(net, batch) * window.share).backward()
        weft.clip_grads(net, ctx, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        weft.averages(net).update()
        if number == 0 and directory is not None and not resume:
            weft.save(state, directory, 1, ctx)
    with weft.full_params(net, ctx):
        found = {name: p.detach().clone() for name, p in net.named_parameters()}
    with weft.averages(net).swapped(), weft.full_params(net, ctx):
        return found, {name: p.detach().clone() for name, p in net.named_parameters()}


MESHES = {
    "one": ({"data": 1}, 1, "none"),
    "replicate": ({"data": 2, "tensor": 2}, 4, "replicate"),
    "fully_shard": ({"shard": 2, "tensor": 2}, 4, "fully_shard"),
    "zero1": ({"data": 2, "tensor": 2}, 4, "zero1"),
    "data": ({"data": 2}, 2, "fully_shard"),
}


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        *(
            pytest.param(*pair, marks=pytest.mark.variant)
            for pair in (
                ("replicate", "fully_shard"),
                ("fully_shard", "zero1"),
                ("zero1", "one"),
                ("one", "replicate"),
                ("data", "fully_shard"),
                ("fully_shard", "data"),
            )
        ),
    ],
)
def test_a_checkpoint_of_one_mesh_is_resumed_on_another(saved, restored, tmp_path):
    expected = run_ranks(_everything, 1, "none", None, False)[0]
    for name, resume in ((saved, False), (restored, True)):
        mesh, ranks, strategy = MESHES[name]
        for parameters, averages in run_ranks(_everything, ranks, strategy, tmp_path, resume, mesh=mesh):
            close(parameters, expected[0])
            close(averages, expected[1])


def _undone(ctx, strategy):
    net = parallel(build(), ctx.mesh["tensor"], sequence=True)
    before = {name: (p.device_mesh, p.placements) for name, p in net.named_parameters() if isinstance(p, DTensor)}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer, ctx = strategy_on(net, optimizer, ctx, strategy)
    for step in range(2):
        loss_of(net, words(step).chunk(ctx.data_size)[ctx.data_rank]).backward()
        weft.clip_grads(net, ctx, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    net, ctx = weft.undo(net, ctx, rebind=optimizer)
    after = {name: (p.device_mesh, p.placements) for name, p in net.named_parameters() if isinstance(p, DTensor)}
    assert after == before
    for p, state in optimizer.state.items():
        assert all(type(v) is type(p) or type(v) is torch.Tensor for v in state.values())
        if isinstance(p, DTensor):
            assert state["exp_avg"].placements == p.placements
    copy.deepcopy(net)
    # The next strategy continues with it.
    net, ctx = weft.fully_shard(net, ctx, units=Block, rebind=optimizer)
    loss_of(net, words(2).chunk(ctx.data_size)[ctx.data_rank]).backward()
    weft.clip_grads(net, ctx, max_norm=0.5)
    gradients = weft.full_grads(net, ctx)
    optimizer.step()
    with weft.full_params(net, ctx):
        return gradients, {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["fully_shard", *(pytest.param(one, marks=pytest.mark.variant) for one in STRATEGIES if one[0] != "f")]
)
def test_undo_leaves_what_the_strategy_has_not_cut(strategy):
    expected = alone()
    for gradients, parameters in run_ranks(_undone, 4, strategy, mesh={"data": 2, "tensor": 2}):
        close(parameters, expected[2])
        assert not any(isinstance(one, DTensor) for one in gradients.values())


# -- experts: gradients that are summed over fewer axes ----------------------------------------------


class _Rows(torch.autograd.Function):
    """Rows of all ranks of a group, and in backward the sum of what they say of this rank's."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        pieces = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        rank, size = torch.distributed.get_rank(ctx.group), torch.distributed.get_world_size(ctx.group)
        return gradient.chunk(size)[rank], None


class _Sum(torch.autograd.Function):
    """The sum over a group, of which this rank keeps its rows; backward gives every rank all rows."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous()
        torch.distributed.all_reduce(x, group=group)
        rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        return x.chunk(size)[rank].clone()

    @staticmethod
    def backward(ctx, gradient):
        pieces = [torch.empty_like(gradient) for _ in range(torch.distributed.get_world_size(ctx.group))]
        torch.distributed.all_gather(pieces, gradient.contiguous(), group=ctx.group)
        return torch.cat(pieces), None


class Experts(nn.Module):
    """Four experts, each of which gets a share of every row; `group` holds others of them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 5) / 2)
        self.down = nn.Parameter(torch.randn(4, 5, 6) / 2)
        self.group = None

    def forward(self, x, shares):
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        if self.group is not None:
            x, shares = _Rows.apply(x, self.group), _Rows.apply(shares, self.group)
            rank = torch.distributed.get_rank(self.group)
            shares = shares.chunk(torch.distributed.get_world_size(self.group), dim=1)[rank]
        hidden = torch.tanh(torch.einsum("ni,eij->enj", x, up))
        y = torch.einsum("ne,enj,eji->ni", shares, hidden, down)
        return y if self.group is None else _Sum.apply(y, self.group)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.router, self.experts = nn.Linear(6, 6), nn.Linear(6, 4), Experts()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = torch.tanh(self.before(x))
        return self.scale * (x + self.experts(x, self.router(x).softmax(-1)))


class _Placed:
    def layout(self, name):
        return Layout(cut=("expert",), reduce_over=("data",)) if "experts" in name else None


@weft.transform(before={"replicate", "fully_shard", "zero_partition"})
def cut_experts(module, ctx):
    for part in (m for m in module.modules() if isinstance(m, Experts)):
        part.group = ctx.on("expert").group
        for name, p in list(part._parameters.items()):
            cut = distribute_tensor(p.detach(), ctx.mesh["expert"], [Shard(0)])
            part._parameters[name] = nn.Parameter(cut, requires_grad=p.requires_grad)
    return module, ctx.offering(_Placed())


def mixture():
    torch.manual_seed(3)
    return nn.Sequential(Mixture(), Mixture()).double()


def rows(step):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _mixture_alone():
    net = mixture()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    norms = []
    for step in range(3):
        for part in rows(step).chunk(2):  # two backward passes per step
            (net(part).square().mean() / 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach().clone() for name, p in net.named_parameters()}


def _train_mixture(ctx, strategy, directory=None, resume=False):
    net = mixture()
    if "expert" in dict(ctx.axes):
        net, ctx = cut_experts(net, ctx)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer, ctx = strategy_on(net, optimizer, ctx, strategy)
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in net.parameters() if p.dim() == 3)
    state, ctx = weft.checkpointable({"net": net, "optimizer": optimizer}, ctx)
    if resume:
        weft.restore(state, directory, ctx)
    norms = []
    for step in range(2 if resume else 0, 3):
        for part in rows(step).chunk(2):  # the second adds to a gradient that is averaged already
            mine = part.chunk(ctx.data_size)[ctx.data_rank]
            (net(mine).square().mean() / 2).backward()
        norms.append(weft.clip_grads(net, ctx, max_norm=0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and directory is not None:
            weft.save(state, directory, 2, ctx)
    moments = sum(
        v.to_local().numel() if isinstance(v, DTensor) else v.numel()
        for p, s in optimizer.state.items()
        for k, v in s.items()
        if k == "exp_avg" and p.dim() == 3
    )
    with weft.full_params(net, ctx):
        return norms, held, moments, {name: p.detach().clone() for name, p in net.named_parameters()}


def _train_mixtures(ctx):
    return {strategy: _train_mixture(ctx, strategy) for strategy in STRATEGIES}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [pytest.param({"expert": 2}, marks=pytest.mark.variant), {"data": 2, "expert": 2}], ids=str
)
def test_gradients_of_experts_are_summed_over_their_own_axes(mesh):
    norms, expected = _mixture_alone()
    ranks = 2 * mesh.get("data", 1)
    total = sum(p.numel() for p in expected.values() if p.dim() == 3)
    for of_rank in run_ranks(_train_mixtures, ranks, mesh=mesh):
        for strategy, (found, held, moments, parameters) in of_rank.items():
            assert found == pytest.approx(norms, abs=1e-12)
            close(parameters, expected)
            assert held == total // (2 if strategy in ("replicate", "zero1") else ranks)
            assert moments == total // (2 if strategy == "replicate" else ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "restored"), [("replicate", "zero3"), ("fully_shard", "zero1"), ("zero1", "none")])
def test_experts_are_saved_and_resumed_on_another_mesh(saved, restored, tmp_path):
    norms, expected = _mixture_alone()
    run_ranks(_train_mixture, 4, saved, tmp_path, mesh={"data": 2, "expert": 2})
    ranks = 1 if restored == "none" else 2
    mesh = {"data": 1} if restored == "none" else {"expert": 2}
    for found, _, _, parameters in run_ranks(_train_mixture, ranks, restored, tmp_path, True, mesh=mesh):
        assert found == pytest.approx(norms[2:], abs=1e-12)
        close(parameters, expected)


# -- gradients that are summed over more axes --------------------------------------------------------


class _Whole(torch.autograd.Function):
    """Rows of all ranks of a group, which do the same with them."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        pieces = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx, gradient):
        rank, size = torch.distributed.get_rank(ctx.group), torch.distributed.get_world_size(ctx.group)
        return gradient.chunk(size)[rank], None


class Split(nn.Module):
    """Ranks along an axis compute the first layer with other rows, and the last with all of them."""

    def __init__(self, group=None):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(6, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)
        self.group = group

    def forward(self, x):
        if self.group is None:
            return self.last(torch.tanh(self.first(x)))
        part = x.chunk(torch.distributed.get_world_size(self.group))[torch.distributed.get_rank(self.group)]
        return self.last(_Whole.apply(torch.tanh(self.first(part)), self.group))


class _Summed:
    def layout(self, name):
        return Layout(reduce_over=("data", "tensor")) if name.startswith("first") else None


@weft.transform(before={"replicate", "fully_shard", "zero_partition"})
def summed(module, ctx):
    return module, ctx.offering(_Summed())


def _sums(ctx):
    found = {}
    for strategy in STRATEGIES:
        net, at = summed(Split(ctx.on("tensor").group), ctx)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer, at = strategy_on(net, optimizer, at, strategy)
        for step in range(2):  # the second adds to what is reduced already
            net(rows(step).chunk(2)[ctx.data_rank]).square().mean().backward()
        optimizer.step()
        with weft.full_params(net, at):
            found[strategy] = {name: p.detach().clone() for name, p in net.named_parameters()}
    return found


def test_gradients_may_be_summed_over_more_axes_than_those_of_the_strategy():
    net = Split()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        net(rows(step)).square().mean().backward()
    optimizer.step()
    for of_rank in run_ranks(_sums, 4, mesh={"data": 2, "tensor": 2}):
        for found in of_rank.values():
            close(found, dict(net.named_parameters()))


# -- parameters without gradient, skipped micro-batches ----------------------------------------------


class Branches(nn.Module):
    """Two column-parallel layers, of which a call uses one, both, or none."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 1)

    def forward(self, x, use=("one", "two")):
        return self.last(x).sum() + sum(getattr(self, name)(x).square().sum() for name in use)


def _branches(ctx, **options):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(1)
    net = Branches().double()
    style = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("one", "two")}
    parallelize_module(net, ctx.mesh["tensor"], style)
    return weft.replicate(net, ctx, **options)


def _unused(ctx):
    x = torch.full((2, 6), float(ctx.data_rank + 1), dtype=torch.float64)
    found = {}
    net, at = _branches(ctx, unused="zero")
    net(x, ("one",) if ctx.data_rank else ("one", "two")).backward()
    found["used by one rank"] = {name: full.clone() for name, full in weft.full_grads(net, at).items()}
    net.zero_grad()
    net(x, ("one",)).backward()
    found["used by none"] = sorted(weft.full_grads(net, at))
    net, at = _branches(ctx)
    try:
        net(x, ("one",)).backward()
    except weft.errors.UnusedParameters as error:
        found["error"] = str(error)
    return found


def test_parameters_without_gradient_are_zero_or_named_also_where_they_are_cut():
    torch.manual_seed(1)
    net = Branches().double()
    for rank, use in enumerate((("one", "two"), ("one",))):
        (net(torch.full((2, 6), rank + 1.0, dtype=torch.float64), use) / 2).backward()
    expected = {name: p.grad for name, p in net.named_parameters()}
    for found in run_ranks(_unused, 4, mesh={"data": 2, "tensor": 2}):
        close(found["used by one rank"], expected)
        assert found["used by none"] == ["last.bias", "last.weight", "one.bias", "one.weight"]
        assert "two.weight" in found["error"] and "two.bias" in found["error"]


def _skipping(ctx):
    """The first rank skips its last micro-batch; then all skip a whole window."""
    net, ctx = _branches(ctx)
    loader = [torch.full((2, 6), 1.0 + number, dtype=torch.float64) for number in range(4)]
    net, loader, ctx = weft.accumulate_grads(net, loader, ctx, steps=2)
    found = []
    for number, window in enumerate(loader):  # one per step of the optimizer
        for place, x in enumerate(window):
            if number == 0 and (place == 0 or ctx.data_rank):
                net(x).backward()
        found.append({name: full.clone() for name, full in weft.full_grads(net, ctx).items()})
        net.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:accumulate_grads")
def test_a_rank_that_skips_its_last_micro_batch_meets_the_others():
    torch.manual_seed(1)
    net = Branches().double()
    for value, times in ((1.0, 2), (2.0, 1)):
        (net(torch.full((2, 6), value, dtype=torch.float64)) * times / 2).backward()
    for found in run_ranks(_skipping, 4, mesh={"data": 2, "tensor": 2}):
        close(found[0], {name: p.grad for name, p in net.named_parameters()})
        assert found[1] == {}


def _messages(ctx):
    """How many messages a backward pass sends along the data axis, and to all ranks; torch sends along the other."""
    net, _ = weft.replicate(parallel(build(), ctx.mesh["tensor"], sequence=True), ctx)
    groups = {"data": ctx.on("data").group, "all": ctx.group}
    loss_of(net, words(0).chunk(2)[ctx.data_rank]).backward()
    net.zero_grad()
    loss = loss_of(net, words(0).chunk(2)[ctx.data_rank])
    before = {name: group._get_sequence_number_for_group() for name, group in groups.items()}
    loss.backward()
    return {name: group._get_sequence_number_for_group() - before[name] for name, group in groups.items()}


def test_what_is_cut_travels_in_one_message_and_partial_sums_in_another():
    for counted in run_ranks(_messages, 4, mesh={"data": 2, "tensor": 2}):
        assert counted == {"data": 1, "all": 1}


# -- other optimizers, precisions, weights -----------------------------------------------------------


def _optimizers(ctx):
    found = {}
    for kind, strategies in (
        (torch.optim.Adafactor, ["zero1", "zero3"]),
        (torch.optim.Adagrad, ["zero1", "fully_shard"]),
    ):
        for strategy in strategies:
            net = parallel(build(), ctx.mesh["tensor"], sequence=True)
            optimizer = kind(net.parameters(), lr=1e-2)
            net, optimizer, at = strategy_on(net, optimizer, ctx, strategy)
            for step in range(2):
                loss_of(net, words(step).chunk(ctx.data_size)[ctx.data_rank]).backward()
                optimizer.step()
                optimizer.zero_grad()
            with weft.full_params(net, at):
                found[kind.__name__, strategy] = {name: p.detach().clone() for name, p in net.named_parameters()}
    return found


@pytest.mark.slow
def test_optimizers_that_look_at_whole_tensors_and_those_that_do_not():
    expected = {}
    for kind in (torch.optim.Adafactor, torch.optim.Adagrad):
        net = build()
        optimizer = kind(net.parameters(), lr=1e-2)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(net, words(step)).backward()
            optimizer.step()
        expected[kind.__name__] = dict(net.named_parameters())
    for found in run_ranks(_optimizers, 4, mesh={"data": 2, "tensor": 2}):
        for (kind, _), parameters in found.items():
            close(parameters, expected[kind])


def _precisions(ctx, policies):
    found = {}
    for policy in policies:
        for strategy in ("none",) if ctx.world_size == 1 else STRATEGIES:
            net = build().float()
            if ctx.world_size > 1:
                net = parallel(net, ctx.mesh["tensor"], sequence=True)
            net, at = weft.with_precision(net, ctx, policy)
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
            optimizer, at = weft.skip_nonfinite(optimizer, at)
            net, optimizer, at = strategy_on(net, optimizer, at, strategy)
            for step in range(2):
                loss_of(net, words(step).chunk(ctx.data_size)[ctx.data_rank]).backward()
                optimizer.zero_grad() if step == 0 else None
            with weft.full_params(net, at):
                found[policy, strategy] = weft.full_grads(net, at)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "tolerance"), [("fp32", 1e-6), ("bf16", 2e-2), ("fp16", 2e-3)])
def test_precisions_are_those_of_one_process(policy, tolerance):
    expected = run_ranks(_precisions, 1, [policy])[0][policy, "none"]
    for found in run_ranks(_precisions, 4, [policy], mesh={"data": 2, "tensor": 2}):
        for gradients in found.values():
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], rtol=0, atol=tolerance)


def _weights(ctx, path):
    net = parallel(build(), ctx.mesh["tensor"], sequence=True)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    net, ctx = weft.fully_shard(net, ctx, units=Block)
    weft.load_weights(net, path, ctx)
    with weft.full_params(net, ctx):
        found = {name: p.detach().clone() for name, p in net.named_parameters()}
    with weft.full_params(net, ctx, write=True), torch.no_grad():
        for p in net.parameters():
            p.mul_(2 if ctx.rank == 0 else 3)
    with weft.full_params(net, ctx):
        doubled = {name: p.detach().clone() for name, p in net.named_parameters()}
    try:
        weft.full_params(net, ctx, forward=True)
        refused = ""
    except weft.errors.ContractError as error:
        refused = str(error)
    return found, doubled, refused


def test_weights_are_loaded_and_written_by_hand(tmp_path):
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    expected = {name: p.detach() for name, p in build().named_parameters()}
    save_file(expected, tmp_path / "model.safetensors")
    for found, doubled, refused in run_ranks(
        _weights, 4, tmp_path / "model.safetensors", mesh={"data": 2, "tensor": 2}
    ):
        close(found, expected)
        close(doubled, {name: 2 * value for name, value in expected.items()})
        assert "sharded over axes other" in refused and "attention.qkv.0.weight" in refused


# -- three kinds of axes -----------------------------------------------------------------------------


class _Parts:
    axes = ("context",)


@weft.transform(before={"replicate", "fully_shard", "zero_partition"})
def in_parts(module, ctx):
    return module, ctx.offering(_Parts())


def _three(ctx, strategies):
    found = {}
    for strategy in strategies:
        net = parallel(build(), ctx.mesh["tensor"], sequence=True)
        at = ctx
        if "context" in dict(ctx.axes):
            net, at = in_parts(net, ctx)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        net, optimizer, at = strategy_on(net, optimizer, at, strategy)
        for step in range(3):
            mine = words(step).chunk(4)[ctx.rank // 2]
            loss_of(net, mine).backward()
            weft.clip_grads(net, at, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in net.parameters())
        with weft.full_params(net, at):
            found[strategy] = held, {name: p.detach().clone() for name, p in net.named_parameters()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [{"data": 2, "context": 2, "tensor": 2}, {"replica": 2, "shard": 2, "tensor": 2}], ids=str
)
def test_three_axes(mesh):
    _, _, expected = alone()
    for of_rank in run_ranks(_three, 8, STRATEGIES, mesh=mesh):
        for _, parameters in of_rank.values():
            close(parameters, expected)


def _apart(ctx):
    net, ctx = in_parts(parallel(build(), ctx.mesh["tensor"], sequence=True), ctx)
    weft.fully_shard(net, ctx)


@pytest.mark.slow
def test_axes_that_are_sharded_together_lie_beside_each_other():
    with pytest.raises(weft.testing.RanksFailed, match="are not adjacent"):
        run_ranks(_apart, 8, mesh={"data": 2, "tensor": 2, "context": 2})
