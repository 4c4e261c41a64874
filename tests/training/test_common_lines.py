"""Lines that every loop has: what docs/common_lines.md says of each, under each strategy and along each axis."""

import copy
import gc
import io
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.torch_version import TorchVersion

import weft
from tests.variants import variant_cases, variants
from weft.engines.torch.parts.dtensor_reads import ReadChecks
from weft.errors import ContractError, WeftError
from weft.tensors.blocks import full_tensor
from weft.testing import RanksFailed, run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "common_lines.md"
DTYPE = torch.float64


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 4), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x):
        weight, choice = self.router(x).softmax(-1).max(-1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (choice == number).any():
                found = found.index_put((torch.where(choice == number)[0],), expert(x[choice == number]))
        return found * weight[:, None]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = {"expert": Mixture, "context": Attention}.get(how, nn.Identity)()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        self.fails = False

    def forward(self, x):
        x = self.down(torch.tanh(self.up(self.middle(self.first(x)))))
        if self.fails:
            raise KeyError("fails")
        return self.norm(x)


def _net(how, seed=0):
    torch.manual_seed(seed)
    return Net(how).to(DTYPE)


class Loop:
    """A model under a strategy with an optimizer; on one rank without the strategy."""

    def __init__(self, ctx, how):
        self.how, self.alone = how, ctx.world_size == 1
        model, optimizer = _net(how), None
        if self.alone:
            pass
        elif how.startswith("zero"):
            optimizer = torch.optim.Adam(model.parameters(), 0.05)
            model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(how[-1]))
        elif how == "fully_shard":
            model, ctx = weft.fully_shard(model, ctx)
        elif how == "tensor":
            model, ctx = weft.tensor_parallel(model, ctx, plan={"up": "column", "down": "row"})
        elif how == "pipeline":
            model, ctx = weft.pipeline(model, ctx, loss=mse_loss, micro_batches=2)
        else:
            if how in ("expert", "context"):
                model, ctx = getattr(weft, f"{how}_parallel")(model, ctx)
            model, ctx = weft.replicate(model, ctx, unused="zero" if how == "expert" else "error")
        self.model, self.ctx = model, ctx
        self.optimizer = optimizer or torch.optim.Adam(model.parameters(), 0.05)

    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        shape = (2, 8, 4) if self.how == "context" else (8, 4)
        x, y = (torch.randn(shape, generator=generator, dtype=DTYPE) for _ in range(2))
        if self.alone or self.how in ("tensor", "pipeline"):
            return x, y
        if self.how == "context":
            return weft.data.split_sequence((x, y), self.ctx)
        return x.chunk(2)[self.ctx.rank], y.chunk(2)[self.ctx.rank]

    def loss(self, step):
        x, y = self.batch(step)
        if self.how == "pipeline" and not self.alone:
            return self.model(x, y)
        return mse_loss(self.model(x), y)

    def step(self, step):
        self.optimizer.zero_grad()
        self.loss(step).backward()
        self.optimizer.step()

    def weights(self):
        with weft.full_params(self.model, self.ctx):
            return {name: p.detach().clone() for name, p in self.model.named_parameters() if not p.is_meta}


LINES = {}


def line(code):
    def register(run):
        LINES[code] = run
        return run

    return register


@line("nn.utils.clip_grad_norm_(model.parameters(), 0.05)")
def _(loop):
    return nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05)


@line("nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()")
def _(loop):
    return nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05).item()


@line('f"{nn.utils.clip_grad_norm_(model.parameters(), 0.05):.3f}"')
def _(loop):
    return float(f"{nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05):.3f}")


@line("nn.utils.clip_grad_value_(model.parameters(), 0.01)")
def _(loop):
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.01)


@line("sum(p.grad.norm().item() ** 2 for p in model.parameters())")
def _(loop):
    return sum(p.grad.norm().item() ** 2 for p in loop.model.parameters() if p.grad is not None)


@line("all(p.grad.isfinite().all() for p in model.parameters())")
def _(loop):
    return all(p.grad.isfinite().all() for p in loop.model.parameters() if p.grad is not None)


@line("p.grad.mul_(0.5)")
def _(loop):
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


@line("p.register_hook(lambda gradient: gradient * 0.5)")
def _(loop):
    for p in loop.model.parameters():
        p.register_hook(lambda gradient: gradient * 0.5)


@line("p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))")
def _(loop):
    for p in loop.model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


@line("p.grad = None")
def _(loop):
    loop.model.up.weight.grad = None


@line("p.grad = whole")
def _(loop):
    p = loop.model.up.weight
    p.grad = torch.ones(p.shape, dtype=DTYPE, device=p.device)


@line("loss + 0.1 * sum(p.square().sum() for p in model.parameters())")
def _(loop):
    loop.optimizer.zero_grad()
    loss = loop.loss(9)
    (loss + 0.1 * sum(p.square().sum() for p in loop.model.parameters())).backward()
    loop.optimizer.step()


@line("torch.autograd.grad(y, x, create_graph=True)  # a gradient penalty")
def _(loop):
    x = loop.batch(5)[0].requires_grad_()
    given = (x, x.detach()) if loop.how == "pipeline" and not loop.alone else (x,)
    with sdpa_kernel(SDPBackend.MATH):  # torch has no second derivative of the others
        gradient = torch.autograd.grad(loop.model(*given).square().sum(), x, create_graph=True)[0]
        loop.optimizer.zero_grad()
        gradient.square().mean().backward()


@line("sum(p.numel() for p in model.parameters())")
def _(loop):
    return sum(p.numel() for p in loop.model.parameters())


@line("sum(p.square().sum().item() for p in model.parameters())")
def _(loop):
    return sum(p.square().sum().item() for p in loop.model.parameters())


@line("p.tolist()")
def _(loop):
    return torch.cat([torch.tensor(p.tolist(), dtype=DTYPE).flatten() for p in loop.model.parameters()])


@line("[row.norm() for row in p]")
def _(loop):
    return torch.tensor([row.norm().item() for p in loop.model.parameters() for row in p])


@line('f"{p.norm():.3f}"')
def _(loop):
    return [f"{p.norm():.3f}" for p in loop.model.parameters()]


@line("p.data.mul_(0.5)")
def _(loop):
    for p in loop.model.parameters():
        p.data.mul_(0.5)


@line("p.data[2:5] = 0")
def _(loop):
    loop.model.up.weight.data[2:5] = 0


@line("p.grad[0].mul_(0)")
def _(loop):
    loop.model.up.weight.grad[0].mul_(0)


@line("p.data[p.data < 0] = 0")
def _(loop):
    p = loop.model.up.weight
    p.data[p.data < 0] = 0


@line("nn.init.eye_(p)")
def _(loop):
    nn.init.eye_(loop.model.up.weight)


@line("loss = model(x); p.data.mul_(0.5)  # and no backward")
def _(loop):
    loop.loss(5)
    for p in loop.model.parameters():
        p.data.mul_(0.5)


@line("p.data = p.data * 0.5")
def _(loop):
    for p in loop.model.parameters():
        p.data = p.data * 0.5
    loop.step(5)


@line("p.data.copy_(whole)")
def _(loop):
    for p, whole in zip(loop.model.parameters(), _net(loop.how, 7).parameters(), strict=True):
        p.data.copy_(whole.data)


@line("nn.utils.vector_to_parameters(vector, model.parameters())")
def _(loop):
    count = sum(p.numel() for p in loop.model.parameters())
    nn.utils.vector_to_parameters(torch.linspace(-1, 1, count, dtype=DTYPE), loop.model.parameters())
    loop.step(5)


@line("torch.save(model.state_dict(), file)")
def _(loop):
    file = io.BytesIO()
    torch.save(loop.model.state_dict(), file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


@line("torch.save(optimizer.state_dict(), file)")
def _(loop):
    file = io.BytesIO()
    torch.save(loop.optimizer.state_dict(), file)
    file.seek(0)
    return {number: one["exp_avg"] for number, one in torch.load(file, weights_only=True)["state"].items()}


@line("model.load_state_dict(whole)")
def _(loop):
    loop.model.load_state_dict(_net(loop.how, 7).state_dict())


@line("model.load_state_dict(other.state_dict())")
def _(loop):
    loop.model.load_state_dict({name: tensor * 2 for name, tensor in loop.model.state_dict().items()})


@line("plain.load_state_dict(model.state_dict())")
def _(loop):
    plain = _net(loop.how, 7)
    plain.load_state_dict(loop.model.state_dict())
    return dict(plain.state_dict())


@line("copy.deepcopy(model)")
def _(loop):
    copied = copy.deepcopy(loop.model).eval()
    x, _ = loop.batch(9)
    return copied(x).mean().item() * 0


@line("torch.save(model, file)")
def _(loop):
    torch.save(loop.model, io.BytesIO())


@line("copy.deepcopy(model.state_dict())")
def _(loop):
    kept = copy.deepcopy(loop.model.state_dict())
    loop.step(5)
    loop.model.load_state_dict(kept)


@line("copy.deepcopy(optimizer)")
def _(loop):
    copy.deepcopy(loop.optimizer)


@line("model.share_memory()")
def _(loop):
    loop.model.share_memory()


@line("torch.func.functional_call(model, weights, x)")
def _(loop):
    weights = {name: p.detach() * 2 for name, p in loop.model.named_parameters()}
    x, _ = loop.batch(9)
    with torch.no_grad():
        found = torch.func.functional_call(loop.model, weights, (x,)).mean()
        return found if loop.alone or loop.how in ("tensor", "pipeline") else weft.reduce(found, loop.ctx, "mean")


@line("part.requires_grad_(False)  # on all ranks")
def _(loop):
    loop.model.up.requires_grad_(requires_grad=False)


@line("model.to(dtype); model.to(device)")
def _(loop):
    loop.model.to(DTYPE).to("cpu")


@line("nn.init.constant_(p, 0.1)")
def _(loop):
    for p in loop.model.parameters():
        nn.init.constant_(p.data, 0.1)


@line("model.named_parameters()  # after a forward that raised")
def _(loop):
    loop.model.fails = True
    with pytest.raises(KeyError):
        loop.loss(5)
    loop.model.fails = False
    return {name: tuple(p.shape) for name, p in loop.model.named_parameters()}


def _run(ctx, how, names):
    """What each line gives: an error, or what it returns and the weights after another step."""
    found = {}
    for name in names:
        loop = Loop(ctx, how)
        for step in range(2):
            loop.step(step)
        try:
            value = LINES[name](loop)
            loop.optimizer.step()
            loop.step(2)
            value = {n: _plain(v) for n, v in value.items()} if isinstance(value, dict) else _plain(value)
            found[name] = value, loop.weights()
        except (WeftError, RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _plain(value):
    return full_tensor(value).detach().clone() if isinstance(value, torch.Tensor) else value


def _equal(found, expected):
    if isinstance(expected, dict):
        return found.keys() <= expected.keys() and all(_equal(found[name], expected[name]) for name in found)
    if isinstance(expected, torch.Tensor):
        return found.shape == expected.shape and (found - expected).abs().max() < 1e-9
    return abs(found - expected) < 1e-9 if isinstance(expected, float) else found == expected


def _judged(found, expected):
    if isinstance(found, str):
        return "error" if all(word in found for word in ("found:", "expected:", "fix:")) else found
    return "same" if _equal(found[0], expected[0]) and _equal(found[1], expected[1]) else "SILENT"


def _table():
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in PAGE.read_text().splitlines() if row.startswith("|")
    ]
    header, _, *rows = rows
    return {how.strip("`"): {row[0].strip("`"): _here(row[at]) for row in rows} for at, how in enumerate(header) if at}


def _here(cell):
    """With the installed torch: "same", or "error; torch 2.14: same" where it is so since that version."""
    before, _, since = cell.partition("; torch ")
    version, _, then = since.partition(": ")
    return then if since and TorchVersion(torch.__version__) >= version else before


AXES = {how: {how: 2} for how in ("tensor", "expert", "context", "pipeline")}


QUICK = ("fully_shard",)


@pytest.mark.parametrize("how", [*QUICK, *variants(*(how for how in _table() if how not in QUICK))])
def test_every_line_is_as_on_one_process_or_an_error(how):
    expected = _run(weft.local(), how, LINES)
    told = _table()[how]
    *others, last = LINES
    for found in run_ranks(_run, 2, how, others, mesh=AXES.get(how), probes="auto"):
        assert {name: _judged(one, expected[name]) for name, one in found.items()} == {n: told[n] for n in others}
    if how == "pipeline":  # the stages wait for each other in a forward pass: all of them end
        assert told[last] == "error"
        with pytest.raises(RanksFailed, match="KeyError: 'fails'"):
            run_ranks(_fails, 2, how, mesh=AXES[how], probes="auto")
    else:
        for found in run_ranks(_run, 2, how, [last], mesh=AXES.get(how), probes="auto"):
            assert _judged(found[last], expected[last]) == told[last]


def _penalized(ctx, how):
    """The weights after three steps with a norm and sums of squares of all parameters in the loss."""
    loop = Loop(ctx, how)
    for step in range(3):
        loop.optimizer.zero_grad()
        terms = [loop.model.up.weight.norm(), *(p.square().sum() for p in loop.model.parameters())]
        (
            loop.loss(step) + 0.1 * sum(getattr(term, "full_tensor", lambda term=term: term)() for term in terms)
        ).backward()
        loop.optimizer.step()
    return loop.weights()


@pytest.mark.parametrize("how", ["fully_shard", *variants("zero 3", "tensor")])
def test_penalties_that_are_made_whole_are_as_on_one_process(how):
    expected = _penalized(weft.local(), how)
    for found in run_ranks(_penalized, 2, how, mesh=AXES.get(how), probes="auto"):
        assert _equal(found, expected)


def _fails(ctx, how):
    loop = Loop(ctx, how)
    loop.step(0)
    loop.model.fails = True
    loop.loss(1)


def _clipped(ctx, strategy, by_value):
    """Norms of three steps, and a sum over what was trained, of a model whose layers are cut under a strategy."""
    model, alone = _net("tensor"), ctx.world_size == 1
    if not alone:
        model, ctx = weft.tensor_parallel(model, ctx, plan={"up": "column", "down": "row"})
        model, ctx = getattr(weft, strategy)(model, ctx)
    optimizer, found = torch.optim.Adam(model.parameters(), 0.1), []
    for step in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=DTYPE).chunk(ctx.data_size)
        model(x[ctx.data_rank]).square().mul(x[ctx.data_rank].sin()).mean().backward()
        if by_value:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        else:
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01).item())
        optimizer.step()
        optimizer.zero_grad()
    with weft.full_params(model, ctx):
        return [*found, sum(p.sum().item() for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by_value", "strategy"),
    [(False, "fully_shard"), *variant_cases((True, "fully_shard"), (False, "replicate"), (True, "replicate"))],
)
def test_torch_clips_gradients_of_cut_layers_under_a_strategy(strategy, by_value):
    expected = _clipped(weft.local(), strategy, by_value)
    for found in run_ranks(_clipped, 4, strategy, by_value, mesh={"data": 2, "tensor": 2}, probes="auto"):
        assert found == pytest.approx(expected, abs=1e-9)


def _trained_copy(ctx, how):
    """Weights of a copy that is trained after the lines on the page."""
    loop = Loop(ctx, how)
    loop.step(0)
    loop.model = copy.deepcopy(loop.model)
    if not loop.alone:
        if how == "context":
            loop.model, loop.ctx = weft.context_parallel(loop.model, loop.ctx)
        loop.model, loop.ctx = weft.replicate(loop.model, loop.ctx)
    loop.optimizer = torch.optim.Adam(loop.model.parameters(), 0.05)
    for step in range(1, 4):
        loop.step(step)
    return loop.weights()


@pytest.mark.parametrize("how", ["context", *variants("replicate", "zero 1")])
def test_a_copy_is_trained_as_the_page_says(how):
    expected = _trained_copy(weft.local(), how)
    for found in run_ranks(_trained_copy, 2, how, mesh=AXES.get(how), probes="auto"):
        assert _equal(found, expected)


def _undone(ctx, how):
    """A module that is made plain between a backward pass and a step: its gradients and the sum that the page gives."""
    loop = Loop(ctx, how)
    loop.loss(0).backward()
    own = [p for p in loop.model.parameters() if not p.is_meta]
    squares = sum(p.detach().square().sum() for p in own)
    total = squares if loop.alone else weft.reduce(squares, ctx.on(how), "sum")
    model = loop.model if loop.alone else weft.undo(loop.model, loop.ctx, rebind=loop.optimizer)[0]
    again = sum(p.detach().square().sum().item() for p in model.parameters())
    return total.item(), again, [p.grad is not None and p.grad.is_meta for p in model.parameters()]


def test_a_pipeline_is_undone_between_backward_and_step():
    expected = _undone(weft.local(), "pipeline")
    for total, again, on_meta in run_ranks(_undone, 2, "pipeline", mesh={"pipeline": 2}, probes="auto"):
        assert (total, again) == pytest.approx(expected[:2], abs=1e-9)
        assert not any(on_meta)


def _copied(ctx):
    """Copies between DTensors that lie along different axes, and of whole values into terms of a sum."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    checks = ReadChecks()
    there, here = (DTensor.from_local(torch.ones(2, 2), ctx.mesh[axis], [Shard(0)]) for axis in ("data", "tensor"))
    terms = DTensor.from_local(torch.ones(4, 2), ctx.mesh["data"], [Partial()])
    told = []
    for target, source in ((there, here), (terms, torch.ones(4, 2)), (torch.ones(4, 2), there)):
        try:
            target.copy_(source)
            told.append("copied")
        except WeftError as error:
            told.append(type(error).__name__)
    there.copy_(torch.arange(8.0).view(4, 2))
    checks.release()
    return told, there.full_tensor()


def test_copies_that_would_mix_ranks_raise():
    for told, whole in run_ranks(_copied, 4, mesh={"data": 2, "tensor": 2}):
        assert told == ["ContractError"] * 3
        assert torch.equal(whole, torch.arange(8.0).view(4, 2))


WRITES = (
    "t[0, 0] = 1",
    "t[2:5].zero_()",
    "t[:, 1:3].fill_(9)",
    "t[..., 0].mul_(2)",
    "t.view(-1)[5:7].fill_(9)",
    "t.view(-1).mul_(2)",
    "t.t()[0].fill_(2)",
    "t.chunk(4, 1)[0].zero_()",
    "t.chunk(4)[1].zero_()",
    "t.narrow(0, 1, 2).zero_()",
    "t.diagonal().zero_()",
    "t.fill_diagonal_(0)",
    "t.tril_()",
    "t.renorm_(2, 0, 0.5)",
    "t[t < 3] = 0",
    "t[t[:, 0] < 9] = 0",
    "t[:, t[0] < 2] = 0",
    "t.masked_fill_(t < 3, 0)",
    "t.index_fill_(0, torch.tensor(1), 5)",
    "t[:, 1] = 5",
    "t[1:3] += 1",
    "t.clamp_(2, 9)",
    "t[2:5].copy_(torch.ones(3, 4))",
    "torch._foreach_zero_([t[2:5]])",
    "torch.add(t[2:5], 1, out=t[2:5])",
    "torch.add(t, 1, out=t)",
    "torch.eye(8, 4, out=t)",
    "t[2:5].clone().zero_()",
)


def _written(ctx, dim):
    """The values of a tensor that is cut along `dim` after each line; or that it was refused."""
    from torch.distributed.tensor import DTensor, Shard

    checks = ReadChecks()
    found = {}
    for code in WRITES:
        t = torch.arange(32.0).view(8, 4)
        if ctx.world_size > 1:
            t = DTensor.from_local(t.chunk(2, dim)[ctx.rank].contiguous(), ctx.mesh, [Shard(dim)])
        try:
            exec(code, {"torch": torch, "t": t})
            found[code] = full_tensor(t).clone()
        except ContractError:
            found[code] = None
    checks.release()
    return found


@pytest.mark.parametrize("dim", [1, *variants(0)])
def test_what_is_written_into_a_part_of_a_sharded_tensor_arrives_or_is_refused(dim):
    expected = _written(weft.local(), dim)
    for found in run_ranks(_written, 2, dim):
        assert all(one is None or torch.equal(one, expected[code]) for code, one in found.items())
        assert found["t.view(-1)[5:7].fill_(9)"] is None
        assert found["t[..., 0].mul_(2)" if dim == 0 else "t[2:5].zero_()"] is not None


def test_the_page_has_every_line():
    assert list(_table()["replicate"]) == list(LINES)


def _of_torch():
    from torch.distributed.tensor import DTensor

    dispatcher = DTensor._op_dispatcher
    return dict(vars(DTensor)), dict(vars(dispatcher)), dict(dispatcher._custom_op_handlers)


def _ends(ctx):
    """What torch does with DTensors while strategies live, and after the last one."""
    from torch.distributed.tensor import DTensor, Shard

    def is_written():
        t = DTensor.from_local(torch.zeros(4, 4), ctx.mesh, [Shard(0)])
        try:
            t[2:5].copy_(t[2:5])
        except ContractError:
            return False
        return True

    def number():
        value = DTensor.from_local(torch.ones(2), ctx.mesh, [Shard(0)]).norm()
        try:
            return value.item()
        except ContractError:
            return None

    def look():
        found.append((is_written(), number() is not None))

    before, found = _of_torch(), []
    models = [weft.fully_shard(nn.Linear(4, 4), ctx)[0], weft.fully_shard(nn.Linear(4, 4), ctx)]
    look()
    del models[0]
    gc.collect()
    look()
    weft.undo(*models.pop())
    look()
    model = weft.fully_shard(nn.Linear(4, 4), ctx)
    look()
    del model
    gc.collect()
    look()
    return found, before == _of_torch()


def test_operations_of_torch_are_as_before_when_the_last_strategy_has_ended():
    for found, as_before in run_ranks(_ends, 2):
        assert found == [(one, one) for one in (False, False, True, False, True)]
        assert as_before


def _clips_stages(ctx, beside):
    """A line of torch's over gradients of which this rank has some, as parts, and other ranks the others."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))
    if beside == "tensor":
        model, ctx = weft.tensor_parallel(model, ctx, plan={"*.0": "column", "*.1": "row"})
    model, ctx = weft.pipeline(model, ctx, loss=mse_loss, micro_batches=2)
    if beside == "shard":
        model, ctx = weft.fully_shard(model, ctx)
    model(torch.ones(4, 4), target=torch.ones(4, 4)).backward()
    with pytest.raises(ContractError, match="numbers are read that another rank has"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    with pytest.raises(ContractError, match="numbers are read that another rank has"):
        nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    weft.clip_grads(model, ctx, max_norm=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["shard", "tensor"])
def test_a_norm_over_parts_of_stages_is_refused(beside):
    run_ranks(_clips_stages, 4, beside, mesh={"pipeline": 2, beside: 2})
