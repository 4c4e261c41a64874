"""pipeline: the layers of one model on several ranks, with the numbers of one process, and all that is refused."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import weft
from tests.fix_lines.told import told
from tests.variants import variants
from weft.engines.torch.pipeline.schedules import SCHEDULES
from weft.errors import ContractError, OrderError
from weft.testing import RanksFailed, fake, run_ranks

VOCAB, WIDTH, LENGTH = 17, 8, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, scale):
        rows, length, _ = x.shape
        q, k, v = (t.view(rows, length, -1, WIDTH // 2).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + scale * self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(gelu(self.up(self.second_norm(x))))


class Net(nn.Module):
    def __init__(self, layers=8):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        hidden = self.embed(x) + self.positions(torch.arange(x.shape[1]))
        scale = self.scale.to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, scale)
        return self.head(self.norm(hidden))


def _net(layers=8):
    torch.manual_seed(0)
    return Net(layers).double()


class Tied(Net):
    def __init__(self, layers=8):
        super().__init__(layers)
        self.head.weight = self.embed.weight


def _tied(layers=8):
    torch.manual_seed(0)
    return Tied(layers).double()


def _loss(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten())


def _data(rows=20):
    tokens = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _own(model, numbers=None):
    """What a rank has of the parameters, whole where it is cut."""
    named = {name: p for name, p in model.named_parameters() if not p.is_meta}
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in named.items()}


def _fit(model, call, ctx, *, steps, epochs, batch=4, optimizer=None, averages=None, state=None):
    """Losses, norms and parameters of a loop with windows, clipping and a short last window."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-3)
    loader, ctx = weft.shard_data(torch.utils.data.DataLoader(_data(), batch_size=batch), ctx)
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
    numbers = []
    for _ in range(epochs):
        for window in windows:
            total = 0.0
            for x, y in window:
                loss = call(x, y) * window.share
                loss.backward()
                total += loss.item()
            norm = weft.clip_grads(model, ctx, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
            numbers.append((total, norm.item()))
    return numbers, _own(model)


def _reference(steps=1, epochs=2, make=_net):
    model = make()
    return _fit(model, lambda x, y: _loss(model(x), y), weft.local(), steps=steps, epochs=epochs)


def _check(found, reference, *, mean_over=1):
    numbers, parameters = reference
    together = {}
    for rank_numbers, own in found:
        together |= own
        for (_, norm), (_, expected) in zip(rank_numbers, numbers, strict=True):
            assert abs(norm - expected) < 1e-12
    for index, (loss, _) in enumerate(numbers):
        assert abs(sum(one[0][index][0] for one in found) / len(found) - loss) < 1e-12
    assert sorted(together) == sorted(parameters)
    for _, own in found:  # tied parameters are on several ranks
        assert max((value - parameters[name]).abs().max().item() for name, value in own.items()) < 1e-12


# -- the numbers of one process ----------------------------------------------------------------------


def _all_schedules(ctx, make):
    found = {}
    for schedule in SCHEDULES:
        model, inner = weft.pipeline(make(), ctx, loss=_loss, schedule=schedule, micro_batches=4 * ctx.world_size // 2)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        numbers = []
        for x, y in torch.utils.data.DataLoader(_data(16), batch_size=8):
            loss = model(x, y)
            loss.backward()
            numbers.append((loss.item(), weft.clip_grads(model, inner, max_norm=0.1).item()))
            optimizer.step()
            optimizer.zero_grad()
        found[schedule] = numbers, _own(model)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "make"), [(2, _net), *(pytest.param(*one, marks=pytest.mark.variant) for one in ((2, _tied), (4, _tied)))]
)
def test_every_schedule_computes_the_numbers_of_one_process(ranks, make):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    numbers = []
    for x, y in torch.utils.data.DataLoader(_data(16), batch_size=8):
        loss = _loss(model(x), y)
        loss.backward()
        numbers.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()))
        optimizer.step()
        optimizer.zero_grad()
    found = run_ranks(_all_schedules, ranks, make, mesh={"pipeline": ranks}, probes="auto")
    for schedule in SCHEDULES:
        _check([one[schedule] for one in found], (numbers, _own(model)))


VOCAB_PLAN = {"embed": "vocab", "head": "gather", "layers.*.up": "column", "layers.*.down": "row"}


def _windows(ctx, strategy, steps, epochs, make=_net):
    model = make()
    if "tensor" in dict(ctx.axes):
        model, ctx = weft.tensor_parallel(model, ctx, plan=VOCAB_PLAN)
    model, ctx = weft.pipeline(model, ctx, loss=_loss, micro_batches=2)
    optimizer = None
    if isinstance(strategy, int):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=strategy)
    elif strategy == "units":
        model, ctx = weft.fully_shard(model, ctx, units=[Block, "embed", "head"])
    elif strategy:
        model, ctx = getattr(weft, strategy)(model, ctx)
    batch = 4 // ctx.axis_size("data") if strategy else 4
    return _fit(model, model, ctx, steps=steps, epochs=epochs, batch=batch, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_net, *variants(_tied)])
def test_windows_with_a_short_last_one_and_clipping(make):
    _check(run_ranks(_windows, 2, None, 3, 5, make, mesh={"pipeline": 2}, probes="auto"), _reference(3, 5, make))


@pytest.mark.slow
def test_copies_that_are_divided_have_one_gradient():
    _check(
        run_ranks(_windows, 4, None, 3, 1, _tied, mesh={"pipeline": 2, "tensor": 2}, probes="auto"),
        _reference(3, 1, _tied),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "make"),
    [("replicate", _tied), ("units", _tied), ("fully_shard", _net), (1, _tied), (2, _net), (3, _tied)],
)
def test_strategies_over_the_data_axis(strategy, make):
    found = run_ranks(_windows, 4, strategy, 3, 5, make, mesh={"data": 2, "pipeline": 2}, probes="auto")
    _check(found, _reference(3, 5, make))


def _drifting(ctx, folder, strategy):
    model, ctx = weft.pipeline(_wide(), ctx, loss=_loss, micro_batches=2)
    model, ctx = getattr(weft, strategy)(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    for step in range(3):
        tokens = torch.randint(0, 500, (2, 9), generator=torch.Generator().manual_seed(10 * ctx.data_rank + step))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    weft.save(state, folder, 1, ctx)  # raises if copies differ in one bit


def _wide():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 64), *(nn.Linear(64, 64) for _ in range(5)), nn.Linear(64, 500))
    model[-1].weight = model[0].weight
    return model


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "fully_shard"])
def test_copies_of_a_tied_parameter_have_equal_bits_whatever_travels_with_their_gradients(tmp_path, strategy):
    run_ranks(_drifting, 6, tmp_path, strategy, mesh={"data": 3, "pipeline": 2})


class Functional(Net):
    """Tied by what forward computes, and not by two names."""

    def forward(self, x):
        hidden = self.embed(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden, 1.0)
        return nn.functional.linear(self.norm(hidden), self.embed.weight)


def _functional():
    torch.manual_seed(0)
    model = Functional(3).double()
    del model.head
    return model


def _named_twice(ctx):
    stages = [["embed", "positions", "layers.0"], ["layers.1"], ["layers.2", "norm", "embed.weight"]]
    model, ctx = weft.pipeline(_functional(), ctx, loss=_loss, micro_batches=4, stages=stages)
    return _fit(model, model, ctx, steps=1, epochs=1)


def test_a_parameter_may_be_named_in_each_stage_that_uses_it():
    model = _functional()
    reference = _fit(model, lambda x, y: _loss(model(x), y), weft.local(), steps=1, epochs=1)
    _check(run_ranks(_named_twice, 3, mesh={"pipeline": 3}), reference)


def _frozen(ctx):
    model = _tied(4)
    model.embed.requires_grad_(False)
    call = model if ctx.world_size > 1 else lambda x, y: _loss(model(x), y)
    if ctx.world_size > 1:
        model, ctx = weft.pipeline(model, ctx, loss=_loss, micro_batches=2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    return _fit(model, call, ctx, steps=1, epochs=1, optimizer=optimizer)


def _stepped_in_backward(ctx):
    model, ctx = weft.pipeline(_tied(4), ctx, loss=_loss, micro_batches=2)
    model, ctx = weft.fully_shard(model, ctx)
    with pytest.raises(OrderError, match="tied over stages"):
        weft.step_in_backward(torch.optim.SGD(model.parameters(), 0.1), ctx)


def test_steps_in_backward_of_copies_are_refused():
    run_ranks(_stepped_in_backward, 2, mesh={"data": 1, "pipeline": 2})


@pytest.mark.slow
def test_frozen_tied_weights():
    _check(run_ranks(_frozen, 2, mesh={"pipeline": 2}), _frozen(weft.local()))


def _precise(ctx):
    model, ctx = weft.with_precision(_net().float(), ctx, "bf16")
    model, ctx = weft.recompute(model, ctx, blocks=Block)
    model, ctx = weft.pipeline(model, ctx, loss=_loss, micro_batches=2)
    model, ctx = weft.compile(model, ctx, backend="eager", blocks=Block)
    x, y = _data(4)[:]
    loss = model(x, y)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if not p.is_meta}


@pytest.mark.slow
def test_precision_recompute_and_compile_around_it():
    model, _ = weft.with_precision(_net().float(), weft.local(), "bf16")
    x, y = _data(4)[:]
    expected = _loss(model(x), y)
    expected.backward()
    for loss, gradients in run_ranks(_precise, 2, mesh={"pipeline": 2}):
        assert loss == pytest.approx(expected.item(), abs=1e-2)
        for name, gradient in gradients.items():
            wanted = dict(model.named_parameters())[name].grad
            assert (gradient - wanted).abs().max() < 0.02 * max(wanted.abs().max().item(), 0.05)


def _weighted(ctx):
    def loss(output, target):
        return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), (target != -100).sum()

    model, ctx = weft.pipeline(_net(), ctx, loss=loss, micro_batches=4)
    x, y = _ragged()
    value = model(x, y)
    (value**2).backward()
    with torch.no_grad():
        outputs, evaluated = model(x[:3]), model(x[:3], y[:3])
    return value.item(), {name: p.grad for name, p in model.named_parameters() if not p.is_meta}, outputs, evaluated


def _ragged():
    x, y = (t.clone() for t in _data(8)[:])
    y[0], y[3, 2:] = -100, -100
    y[0, 0] = 1
    return x, y


def test_a_sum_with_its_number_of_terms_is_exact_where_labels_are_ignored():
    model = _net()
    x, y = _ragged()
    expected = _loss(model(x), y)
    (expected**2).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    outputs, evaluated = model(x[:3]).detach(), _loss(model(x[:3]), y[:3]).item()
    for value, found, given, claimed in run_ranks(_weighted, 2, mesh={"pipeline": 2}):
        assert abs(value - expected.item()) < 1e-12
        assert max((gradient - gradients[name]).abs().max().item() for name, gradient in found.items()) < 1e-12
        assert (given - outputs).abs().max() < 1e-12
        assert abs(claimed - evaluated) < 1e-12


# -- what a rank has ---------------------------------------------------------------------------------


def _held(ctx):
    plan = weft.plan_pipeline(_net(), 2)
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, ctx = weft.pipeline(model, ctx, loss=_loss, micro_batches=2, rebind=optimizer)
    x, y = _data(4)[:]
    model(x, y).backward()
    optimizer.step()
    names = list(model.state_dict())
    there = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None and not p.is_meta)
    state = sum(t.nbytes for entry in optimizer.state.values() for t in entry.values() if t.dim())
    copied = copy.deepcopy(model)
    return plan.num_bytes[ctx.rank], there, gradients, state, names, [p.is_meta for p in copied.parameters()]


def test_memory_is_that_of_the_stages():
    for planned, there, gradients, state, names, _ in run_ranks(_held, 2, mesh={"pipeline": 2}):
        assert there == planned == gradients == state / 2
        assert names == list(_net().state_dict())


def _counted(ctx):
    import torch.distributed as dist

    model, ctx = weft.pipeline(_net(), ctx, loss=_loss, micro_batches=4)
    x, y = _data(8)[:]
    model(x, y).backward()
    counts = {}
    originals = {
        name: getattr(dist, name) for name in ("isend", "irecv", "broadcast", "all_reduce", "batch_isend_irecv")
    }

    def counted(name):
        def call(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            if name == "batch_isend_irecv":
                for one in args[0]:
                    kind = "isend" if one.op is originals["isend"] else "irecv"
                    counts[kind] = counts.get(kind, 0) + 1
            return originals[name](*args, **kwargs)

        return call

    from torch.distributed.pipelining import schedules

    class Watched(torch.overrides.TorchFunctionMode):
        pass

    found = []
    original = schedules._batch_p2p

    def batch(ops, desc=None):
        found.extend("send" if op.op is dist.isend else "receive" for op in ops)
        return original(ops, desc)

    schedules._batch_p2p = batch
    dist.broadcast = counted("broadcast")
    try:
        model(x, y).backward()
    finally:
        schedules._batch_p2p, dist.broadcast = original, originals["broadcast"]
    return found.count("send"), found.count("receive"), counts


def test_messages_of_a_call_are_one_each_way_per_micro_batch_and_the_loss():
    assert run_ranks(_counted, 2, mesh={"pipeline": 2}) == [(4, 4, {"broadcast": 1})] * 2


class Turned(nn.Linear):
    """Gives a view of other strides."""

    def forward(self, x):
        return super().forward(x).transpose(1, 2)


def _turned():
    torch.manual_seed(0)
    return nn.Sequential(*(Turned(3, 3) for _ in range(4))).double()


def _turned_steps(ctx):
    model, ctx = weft.pipeline(_turned(), ctx, loss=nn.functional.mse_loss, micro_batches=4)
    model(*torch.linspace(-1, 1, 144, dtype=torch.float64).view(2, 8, 3, 3)).backward()
    return {name: p.grad for name, p in model.named_parameters() if not p.is_meta}


def test_views_of_other_strides_leave_a_stage():
    model, (x, y) = _turned(), torch.linspace(-1, 1, 144, dtype=torch.float64).view(2, 8, 3, 3)
    nn.functional.mse_loss(model(x), y).backward()
    for found in run_ranks(_turned_steps, 2, mesh={"pipeline": 2}):
        assert all((model.get_parameter(name).grad - grad).abs().max() < 1e-12 for name, grad in found.items())


# -- checkpoints, averages, weights, undo ------------------------------------------------------------


def _run(ctx, folder, begin, steps, *, is_pipelined, strategy=None, make=_net):
    model = make(4)
    if is_pipelined:
        model, ctx = weft.pipeline(model, ctx, loss=_loss, micro_batches=ctx.axis_size("pipeline"))
    if strategy:
        model, ctx = getattr(weft, strategy)(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, ctx = weft.average_weights(model, ctx, decay=0.9)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    if begin:
        assert weft.restore(state, folder, ctx).step == begin
    numbers = []
    for step in range(begin, begin + steps):
        x, y = _data()[4 * step : 4 * step + 4]
        line = ctx.on(ctx.data_axes)
        rows = slice(line.rank * 4 // line.world_size, (line.rank + 1) * 4 // line.world_size)
        loss = model(x[rows], y[rows]) if is_pipelined else _loss(model(x[rows]), y[rows])
        loss.backward()
        given = [model, list(model.parameters()), optimizer][step % 3]
        norm = weft.clip_grads(given, ctx, max_norm=0.05, nonfinite="raise")
        optimizer.step()
        optimizer.zero_grad()
        weft.averages(model).update()
        numbers.append((loss.item(), norm.item()))
    if not begin:
        weft.save(state, folder, steps, ctx)
    with weft.averages(model).swapped():
        averaged = {f"averaged {name}": p for name, p in _own(model).items()}
    return numbers, _own(model) | averaged


@pytest.mark.slow
@pytest.mark.parametrize("make", [_net, _tied])
def test_a_checkpoint_of_a_pipeline_is_that_of_one_process(tmp_path, make):
    one, two = {"is_pipelined": False, "make": make}, {"is_pipelined": True, "make": make, "mesh": {"pipeline": 2}}
    first = _run(weft.local(), tmp_path / "one", 0, 2, **one)
    second = _run(weft.local(), tmp_path / "one", 2, 2, **one)
    _check(run_ranks(_run, 2, tmp_path / "two", 0, 2, probes="auto", **two), first)
    _check([_run(weft.local(), tmp_path / "two", 2, 2, **one)], second)
    _check(run_ranks(_run, 2, tmp_path / "one", 2, 2, probes="auto", **two), second)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_net, _tied])
@pytest.mark.parametrize("strategy", ["replicate", "fully_shard"])
def test_checkpoints_between_meshes(tmp_path, strategy, make):
    second = [_run(weft.local(), tmp_path / "one", begin, 2, is_pipelined=False, make=make) for begin in (0, 2)][1]
    mesh, options = {"data": 2, "pipeline": 2}, {"is_pipelined": True, "make": make}
    run_ranks(_run, 4, tmp_path / "four", 0, 2, strategy=strategy, mesh=mesh, probes="auto", **options)
    _check(run_ranks(_run, 2, tmp_path / "four", 2, 2, mesh={"pipeline": 2}, probes="auto", **options), second)
    _check(run_ranks(_run, 4, tmp_path / "four", 2, 2, mesh={"pipeline": 4}, probes="auto", **options), second)
    found = run_ranks(_run, 4, tmp_path / "one", 2, 2, strategy=strategy, mesh=mesh, probes="auto", **options)
    _check(found, second)


def _on_meta(make):
    model = make(4).to("meta")
    weft.weights.tie(model, weft.weights.find_tied(make(4)))
    return model


def _loaded(ctx, path, strategy, make):
    model = make(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model, ctx = weft.pipeline(model, ctx, loss=_loss, micro_batches=2)
    if strategy:
        model, ctx = getattr(weft, strategy)(model, ctx)
    weft.load_weights(model, path, ctx)
    on_meta = _on_meta(make)
    on_meta.scale = torch.tensor(0.5, dtype=torch.float64)
    drawn, _ = weft.pipeline(on_meta, ctx.on("pipeline"), loss=_loss, micro_batches=2, weights=make(4).state_dict)
    return _own(model), _own(drawn)


@pytest.mark.parametrize(
    ("strategy", "mesh", "make"),
    [
        (None, {"pipeline": 2}, _net),
        (None, {"pipeline": 2}, _tied),
        pytest.param("replicate", {"data": 2, "pipeline": 2}, _tied, marks=pytest.mark.variant),
        pytest.param("fully_shard", {"data": 2, "pipeline": 2}, _tied, marks=pytest.mark.variant),
    ],
)
def test_weights_are_loaded_by_the_ranks_that_have_them(tmp_path, strategy, mesh, make):
    model = make(4)
    state, ctx = weft.checkpointable({"model": model}, weft.local())
    path = weft.save(state, tmp_path, 1, ctx)
    found = run_ranks(_loaded, math.prod(mesh.values()), str(path), strategy, make, mesh=mesh, probes="auto")
    for kind in (0, 1):
        assert {name for one in found for name in one[kind]} == set(dict(model.named_parameters()))
        assert all(torch.equal(value, model.get_parameter(name)) for one in found for name, value in one[kind].items())


def _drawn(ctx):
    model = _on_meta(_tied)
    model.scale = torch.tensor(0.5, dtype=torch.float64)
    if ctx.world_size > 1:
        model, ctx = weft.pipeline(model, ctx, loss=_loss, micro_batches=2)
    else:
        model, ctx = weft.fully_shard(model, ctx)
    return _own(model)


def test_tied_weights_on_meta_are_drawn_once():
    expected = _drawn(weft.local())
    for found in run_ranks(_drawn, 2, mesh={"pipeline": 2}):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


def _undone(ctx, strategy, make):
    model = make(4)
    if strategy == "tensor":
        model, ctx = weft.tensor_parallel(model, ctx, plan={"layers.*.up": "column", "layers.*.down": "row"})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, ctx = weft.pipeline(model, ctx, loss=_loss, micro_batches=2, rebind=optimizer)
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, rebind=optimizer)
    numbers = []
    for step in range(4):
        if step == 2:
            model, ctx = weft.undo(model, ctx, rebind=optimizer)
            assert ctx.applied == ()
            assert make is _net or model.head.weight is model.embed.weight
            assert not any(hasattr(p, "full_tensor") or p.is_meta for p in model.parameters())
        x, y = _data()[4 * step : 4 * step + 4]
        loss = model(x, y) if step < 2 else _loss(model(x), y)
        loss.backward()
        numbers.append((loss.item(), weft.clip_grads(optimizer, ctx, max_norm=0.05).item()))
        optimizer.step()
        optimizer.zero_grad()
    return numbers, _own(model)


@pytest.mark.parametrize("make", [_net, _tied])
@pytest.mark.parametrize(
    "strategy", [None, *(pytest.param(one, marks=pytest.mark.variant) for one in ("tensor", "fully_shard"))]
)
def test_undo_gives_every_rank_all_parameters_and_state(strategy, make):
    reference = _plain_steps(make)
    mesh = {None: {}, "tensor": {"tensor": 2}, "fully_shard": {"data": 2}}[strategy] | {"pipeline": 2}
    found = run_ranks(_undone, math.prod(mesh.values()), strategy, make, mesh=mesh, probes="auto")
    for one in found:
        _check([one], reference)


def _plain_steps(make):
    model = make(4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    numbers = []
    for step in range(4):
        x, y = _data()[4 * step : 4 * step + 4]
        loss = _loss(model(x), y)
        loss.backward()
        numbers.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()))
        optimizer.step()
        optimizer.zero_grad()
    return numbers, _own(model)


# -- what is refused, before anything is changed -----------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "error", "text"),
    [
        (lambda: _net(1), {}, ContractError, r"1 block\(s\) for 2 stages"),
        (lambda: _net(3), {"schedule": "zbv_zero_bubble"}, ContractError, r"3 block\(s\) for 4 stages"),
        (_net, {"micro_batches": 1}, ValueError, r"1 micro-batches for 2 stages on 2 ranks"),
        (_net, {"micro_batches": 0}, ValueError, r"micro_batches = 0"),
        (_net, {"schedule": "2f2b"}, ValueError, r"schedule = '2f2b' is unknown"),
        (_net, {"stages": [["embed"]]}, ValueError, r"1 stages on 2 ranks"),
        (_net, {"stages": [["embed"], ["head"]]}, ValueError, r"in no stage: positions.weight"),
        (_net, {"stages": [["embed", "nowhere"], ["head"]]}, ValueError, r"'nowhere'"),
        (_net, {"stages": weft.plan_pipeline(_net(), 4)}, ValueError, r"4 stages on 2 ranks"),
        (_net, {"loss": 3}, TypeError, r"loss = 3 is not a function"),
        (_net, {"weights": "later"}, weft.errors.ContextError, r"each rank makes its own stages"),
        (_net, {"axis": "stages"}, weft.errors.ContextError, r"stages"),
    ],
    ids=lambda value: None if callable(value) else str(value)[:40],
)
def test_refused_before_anything_is_changed(make, options, error, text):
    model = make()
    before = {name: (p, p.device.type) for name, p in model.named_parameters()}
    with pytest.raises(error, match=text):
        weft.pipeline(model, fake(0, 2, mesh={"pipeline": 2}), **{"loss": _loss, **options})
    assert {name: (p, p.device.type) for name, p in model.named_parameters()} == before
    assert all(part._compiled_call_impl is None for part in model.modules())


def test_a_part_with_a_loss_scale_is_refused():
    model = _net().float()
    _, ctx = weft.with_precision(model.layers[0], fake(0, 2, mesh={"pipeline": 2}), "fp16")
    with pytest.raises(ContractError, match=r"fp16 on layers\.0"):
        weft.pipeline(model, ctx, loss=_loss)


def test_an_optimizer_that_would_keep_the_old_parameters_is_refused():
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(OrderError, match="rebind=optimizer"):
        weft.pipeline(model, fake(0, 2, mesh={"pipeline": 2}), loss=_loss)
    assert optimizer.state == {}


def _bad_calls(ctx):
    """What calls raise, on each rank; all before anything was sent, or told to all ranks."""
    x, y = _data(8)[:]
    found = {}

    def catch(name, call):
        try:
            call()
        except (ContractError, ValueError, TypeError) as error:
            found[name] = str(error)

    model, _ = weft.pipeline(_net(), ctx, loss=_loss, micro_batches=4)
    catch("rows", lambda: model(x[:6], y[:6]))
    catch("ignored", lambda: model(*_ragged()))
    catch("target", lambda: model(x))
    catch("layer", lambda: model.layers[0 if ctx.rank else 7](torch.ones(1, 2, WIDTH, dtype=torch.float64), 1.0))
    loss = model(x, y)
    loss.backward(retain_graph=True)
    catch("twice", loss.backward)
    catch("graph", lambda: model(x, y).backward(create_graph=True))
    catch("other rows", lambda: model(x, y[:4]))
    summed, _ = weft.pipeline(_net(), ctx, loss=lambda o, t: _loss(o, t) * t.numel(), micro_batches=4)
    catch("sum", lambda: summed(x, y))
    return found


def test_calls_that_cannot_be_exact_are_refused_on_all_ranks():
    texts = {
        "rows": "6 rows, 4 micro-batches",
        "ignored": "of the whole batch",
        "target": "takes a target",
        "layer": "a layer of another stage",
        "twice": "a second backward pass of one loss",
        "graph": "create_graph=True",
        "other rows": "the batch has 8 rows",
        "sum": "of the whole batch",
    }
    for found in run_ranks(_bad_calls, 2, mesh={"pipeline": 2}):
        assert list(found) == list(texts)
        for name, text in texts.items():
            assert text in found[name], found[name]


def _wrong_order(ctx):
    names = [name for stage in weft.plan_pipeline(_net(4), 2).stages for name in stage]
    swapped = [[*names[:2], "layers.2", "layers.3"], ["layers.0", "layers.1", "norm", "head"]]
    model, ctx = weft.pipeline(_net(4), ctx, loss=_loss, stages=swapped, micro_batches=2)
    model(*_data(4)[:])


def test_stages_in_another_order_than_forward_are_named():
    with pytest.raises(Exception, match="does not call its layers in the order of the stages"):
        run_ranks(_wrong_order, 2, mesh={"pipeline": 2})


class Skipping(Net):
    """The last layer is given what the embedding gave, too."""

    def forward(self, x):
        first = hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden, self.scale)
        return self.head(self.norm(hidden + first)) + self.positions.weight.sum()


def _skipping(ctx):
    model, ctx = weft.pipeline(Skipping().double(), ctx, loss=_loss, micro_batches=2)
    model(*_data(4)[:])


def test_a_value_that_skips_stages_is_an_error_and_never_another_number():
    with pytest.raises(Exception, match="what another stage computes"):
        run_ranks(_skipping, 2, mesh={"pipeline": 2})


class Failing(Net):
    def forward(self, x):
        if x[0, 0] == VOCAB - 1 and self.embed.weight.is_meta:
            raise ArithmeticError("this stage fails")
        return super().forward(x)


def _failing(ctx):
    torch.manual_seed(0)
    model, ctx = weft.pipeline(Failing().double(), ctx, loss=_loss, micro_batches=2)
    x, y = (t.clone() for t in _data(4)[:])
    model(x, y).backward()
    x[2, 0] = VOCAB - 1
    model(x, y)


def test_a_failure_on_one_stage_reaches_all_ranks():
    with pytest.raises(Exception, match="this stage fails") as caught:
        run_ranks(_failing, 2, mesh={"pipeline": 2}, timeout_s=55)
    assert "rank 1 failed: ArithmeticError" in str(caught.value)


# -- plans, one rank ---------------------------------------------------------------------------------


def goes_on(ctx):
    def loss(output, target):
        raise ArithmeticError("in the loss")

    model, ctx = weft.pipeline(
        _net(2),
        ctx,
        stages=[["embed", "positions", "layers.0"], ["layers.1", "norm", "head"]],
        loss=loss,
        micro_batches=2,
    )
    x, y = _data(4).tensors
    try:
        model(x, target=y)
    except ArithmeticError:
        with told("engines/torch/pipeline/pipelined.py", "after a call that has raised") as it:
            model(x, target=y)
        assert "start the ranks again" in it.fix
        raise  # as it says: the error ends this rank


@pytest.mark.slow
def test_a_rank_that_goes_on_after_a_failure_ends_and_reads_nothing_that_was_left():
    with pytest.raises(RanksFailed, match="in the loss"):
        run_ranks(goes_on, 2, mesh={"pipeline": 2})


def test_a_plan_balances_bytes_and_prints():
    plan = weft.plan_pipeline(_net(4), 2)
    assert plan.stages[0] == ("embed", "positions", "layers.0", "layers.1")
    assert plan.stages[1] == ("layers.2", "layers.3", "norm", "head")
    assert sum(plan.num_bytes) == sum(p.nbytes for p in _net(4).parameters())
    assert str(plan).splitlines()[1].split() == ["0", f"{plan.num_bytes[0]:,}", "embed", "...", "layers.1", "(4)"]


def test_costs_balance_the_stages_instead_of_bytes():
    model, (tokens, _) = _net(4), _data(2)[:]
    layers = [f"layers.{i}" for i in range(4)]
    counted = weft.plan_pipeline(model, 2, cost=tokens)
    assert counted == weft.plan_pipeline(model.to("meta"), 2, cost={"x": tokens})
    block = 2 * len(tokens) * LENGTH * WIDTH * (8 * WIDTH + 2 * LENGTH)  # 8 linear maps of its width, and attention
    assert counted.costs == (2 * block, 2 * block + 2 * len(tokens) * LENGTH * WIDTH * VOCAB)
    assert str(counted).splitlines()[1].split()[2] == f"{2 * block:,}"
    plan = weft.plan_pipeline(model, 2, cost={"layers.*": 1, "layers.3": 5.0})
    assert plan.stages == (("embed", "positions", *layers[:3]), (layers[3], "norm", "head"))
    assert plan.costs == (3.0, 5.0)
    assert plan == weft.plan_pipeline(model, 2, cost=lambda name, _: {"layers.3": 5}.get(name, name in layers))
    with pytest.raises(ValueError, match="nowhere"):
        weft.plan_pipeline(model, 2, cost={"nowhere": 1.0})


class Scaled(nn.Module):
    """A small model in fp16, whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(4))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer[1](layer[0](x))
        return self.head(x)


def _sum_and_count(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def _tiny(output, target):
    return _loss(output, target) * 2.0**-14  # of which gradients are 0 in float16, without a scale


def _scaled(ctx, loss, init):
    torch.manual_seed(0)
    scaling = weft.precision.LossScaling(init=init, growth_every=3)
    policy = weft.Precision(compute=torch.float16, output=torch.float32, scaling=scaling)
    model, ctx = weft.with_precision(Scaled(), ctx, policy)
    model, ctx = weft.pipeline(model, ctx, loss=loss, micro_batches=4)
    if ctx.data_size > 1:
        model, ctx = weft.fully_shard(model, ctx)
    optimizer, ctx = weft.skip_nonfinite(torch.optim.AdamW(model.parameters(), 1e-3), ctx)
    numbers = []
    for step in range(6):
        tokens = torch.randint(0, 50, (16, 9), generator=torch.Generator().manual_seed(step)).chunk(ctx.data_size)
        x, y = tokens[ctx.data_rank][:, :-1], tokens[ctx.data_rank][:, 1:]
        model(x, y).backward()
        if step > 3 and ctx.rank == 0:  # in one stage alone
            model.layers[0][0].bias.grad.mul_(math.inf)
        norm = weft.clip_grads(model, ctx, max_norm=1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((norm if math.isfinite(norm) else None, weft.loss_scale(model), weft.was_skipped(optimizer)))
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "loss", "init"),
    [
        ({"pipeline": 2}, _tiny, 2.0**16),
        ({"pipeline": 2}, _sum_and_count, 2.0**24),  # too large: the first steps are skipped
        pytest.param({"data": 2, "pipeline": 2}, _loss, 2.0**10, marks=pytest.mark.variant),
    ],
    ids=["small", "large", "data"],
)
def test_the_loss_scale_of_fp16_moves_alike_on_all_stages(mesh, loss, init):
    expected = run_ranks(_scaled, 1, loss, init)[0]
    for numbers in run_ranks(_scaled, math.prod(mesh.values()), loss, init, mesh=mesh):
        assert [one[1:] for one in numbers] == [one[1:] for one in expected]
        for (norm, *_), (wanted, *_) in zip(numbers, expected, strict=True):
            assert (norm is None) == (wanted is None)
            assert norm is None or norm == pytest.approx(wanted, rel=1e-2)


def test_one_rank_is_the_module_itself_with_its_loss():
    model, expected = _net(), _net()
    model, ctx = weft.pipeline(model, weft.local(), loss=_loss)
    x, y = _data(4)[:]
    model(x, y).backward()
    _loss(expected(x), y).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    with torch.no_grad():
        assert torch.equal(model(x), expected(x))
        assert model(x, y) == _loss(expected(x), y)
    model, _ = weft.undo(model, ctx)
    assert torch.equal(model(x), expected(x))
