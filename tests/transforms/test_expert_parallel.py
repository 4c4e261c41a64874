"""expert_parallel: stacked and listed experts, tokens and gradients of all ranks, and everything that is refused."""

import collections
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.variants import variants
from weft.contract import layouts
from weft.testing import RanksFailed, largest_difference, run_ranks


class Stacked(nn.Module):
    """Experts as transformers has them."""

    def __init__(self, experts=4, width=6):
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, 5, width))
        self.down = nn.Parameter(torch.randn(experts, width, 5) / 5)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique():
            if expert == self.num_experts:  # none
                continue
            token, place = torch.where(top_k_index == expert)
            rows = linear(torch.relu(linear(hidden_states[token], self.up[expert])), self.down[expert])
            result.index_add_(0, token, rows * top_k_weights[token, place, None])
        return result


class StackedLayer(nn.Module):
    def __init__(self, experts=4, width=6, choices=2):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = Stacked(experts, width)
        self.choices = choices

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.choices, -1)
        return x + self.experts(x, chosen, top_k_weights=weights)


class Expert(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.up = nn.Linear(width, 5)
        self.down = nn.Linear(5, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class ListedLayer(nn.Module):
    """A layer as many write it: only experts that have tokens are called."""

    def __init__(self, experts=4, width=6, choices=2):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))
        self.choices = choices
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        weights, chosen = self.router(x).softmax(-1).topk(self.choices, -1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                result.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return x + result


class Net(nn.Module):
    def __init__(self, experts=4, choices=2):
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.stacked = StackedLayer(experts, choices=choices)
        self.listed = ListedLayer(experts, choices=choices)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.listed(self.stacked(self.first(x))))


def _net(make=Net, *args, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make(*args, **options).double()


def _batch(rows=12):
    draw = torch.Generator().manual_seed(2)
    return torch.randn(rows, 3, generator=draw, dtype=torch.float64), torch.randint(0, 2, (rows,), generator=draw)


def _loss(model, batch):
    x, y = batch
    return cross_entropy(model(x.to(next(model.parameters()).dtype)), y, reduction="sum")


def _mine(ctx, batch):
    return [part.chunk(ctx.data_size)[ctx.data_rank] for part in batch]


def _divided(ctx, make=Net, **options):
    model = _net(make)
    if ctx.coordinates["expert"]:  # the values of the first rank along the axis count
        for name, p in model.named_parameters():
            if ".experts." in f".{name}":
                p.data += 1
    return weft.expert_parallel(model, ctx, **options)


def _summed(model, ctx):
    """The gradients, summed over the ranks as `layouts` says, by name; of experts those that are here."""
    found = {}
    for (name, p), layout in zip(model.named_parameters(), layouts(model, ctx).values(), strict=True):
        if p.is_meta:
            continue
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        gradient = (gradient.to_local() if hasattr(gradient, "to_local") else gradient).clone()
        axes = [axis for axis in layout.reduce_over if ctx.axis_size(axis) > 1]
        if axes:
            dist.all_reduce(gradient, group=ctx.on(axes).group)
        found[name] = gradient
    return found


# -- numbers -------------------------------------------------------------------------------------------


def _gradients(ctx, starve):
    model, ctx = _divided(ctx)
    if starve:
        _starve(model)
    _loss(model, _mine(ctx, _batch())).backward()
    assert model.listed.calls == 1  # though forward ran twice
    place, size = ctx.coordinates["expert"], ctx.axis_size("expert")
    without = {name for name, p in model.named_parameters() if p.grad is None}
    return place, size, _summed(model, ctx), without


def _starve(model):
    """Let all tokens choose experts 0 and 1, so that the second rank of two has none."""
    with torch.no_grad():
        for layer in (model.stacked, model.listed):
            layer.router.bias[:2] += 1e3


MESHES = [
    ({"expert": 2}, 2),
    pytest.param({"expert": 4}, 4, marks=pytest.mark.variant),
    ({"data": 2, "expert": 2}, 4),
]


@pytest.mark.parametrize(("mesh", "ranks"), MESHES)
@pytest.mark.parametrize("starve", [False, True])
def test_gradients_are_those_of_one_process_and_each_rank_holds_its_experts(mesh, ranks, starve):
    model = _net()
    if starve:
        _starve(model)
    _loss(model, _batch()).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for place, size, found, without in run_ranks(_gradients, ranks, starve, mesh=mesh):
        held = range(place * 4 // size, (place + 1) * 4 // size)
        theirs = {f"listed.experts.{number}" for number in range(4) if number not in held}
        assert set(found) == {name for name in expected if name.rpartition(".")[0].rpartition(".")[0] not in theirs}
        for name, gradient in found.items():
            wanted = expected[name]
            if wanted is None:
                assert name in without and not gradient.any(), name  # as in one process: no tokens, no gradient
                continue
            wanted = wanted[held.start : held.stop] if name.startswith("stacked.experts") else wanted
            assert (gradient - wanted).abs().max() < 1e-12, name


class Empty(nn.Module):
    """A layer that one rank has no tokens for at all."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(3, 6), ListedLayer()
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.layer(self.first(x)))


def _without_tokens(ctx):
    model, ctx = _divided(ctx, Empty)
    x, y = _batch()
    share = slice(0, 12 if ctx.rank else 0)
    _loss(model, (x[share], y[share])).backward()
    return _summed(model, ctx)


def test_a_rank_without_any_tokens_takes_part():
    model = _net(Empty)
    _loss(model, _batch()).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    one, two = run_ranks(_without_tokens, 2, mesh={"expert": 2})
    for name, wanted in expected.items():
        gradient = {**one, **two}[name]
        assert (gradient - (0 if wanted is None else wanted)).abs().max() < 1e-12, name


def _no_choice(ctx):
    whole = _net(Stacked)
    model = nn.ModuleDict({"experts": _net(Stacked)})
    model, ctx = weft.expert_parallel(model, ctx)
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(ctx.rank))
    chosen = torch.tensor([[0, 4], [4, 4], [3, 1]])
    weights = torch.full((3, 2), 0.5, dtype=torch.float64)
    return (model["experts"](x, chosen, weights) - whole(x, chosen, weights)).abs().max().item()


def test_a_router_may_choose_no_expert():
    assert max(run_ranks(_no_choice, 2, mesh={"expert": 2})) < 1e-14


# -- trainings -------------------------------------------------------------------------------------------


class StackedNet(nn.Module):
    """Two layers of stacked experts."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.layers = nn.ModuleList(StackedLayer() for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _samples():
    return torch.utils.data.TensorDataset(*_batch(46))


def _optimizer(model):
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)


def _alone(make, steps, count=10):
    """Losses, norms and parameters of one process; the last batch of an epoch is short, and so is its last window."""
    model = _net(make)
    optimizer = _optimizer(model)
    x, y = _batch(46)
    batches = list(zip(x.split(8), y.split(8), strict=True))
    losses, norms = [], []
    while len(norms) < count:
        for start in range(0, len(batches), steps):
            window = batches[start : start + steps]
            total = sum(len(classes) for _, classes in window)
            for batch in window:
                loss = _loss(model, batch) / total
                loss.backward()
                losses.append(loss.item())
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            if len(norms) == count:
                break
    return losses, norms, [p.detach() for p in model.parameters()]


def _prepared(ctx, make, strategy, steps=1, **before):
    torch.manual_seed(ctx.rank)
    model, optimizer = _net(make), None
    loader = torch.utils.data.DataLoader(_samples(), batch_size=8 // ctx.data_size)
    loader, ctx = weft.shard_data(loader, ctx)
    if "precision" in before:
        model, ctx = weft.with_precision(model.float(), ctx, before["precision"])
    if "blocks" in before:
        model, ctx = weft.recompute(model, ctx, blocks=before["blocks"])
    model, ctx = weft.expert_parallel(model, ctx)
    if strategy.startswith("zero"):
        optimizer = _optimizer(model)
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    else:
        model, ctx = getattr(weft, strategy)(model, ctx)
        optimizer = _optimizer(model)
    model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
    return model, optimizer, loader, ctx


def _windows(loader):
    while True:
        yield from loader


def _steps(model, optimizer, windows, ctx, count=10):
    losses, norms = [], []
    for window in itertools.islice(windows, count):
        total = window.denominator(lambda batch: len(batch[1]))
        for batch in window:
            loss = _loss(model, batch) / total
            loss.backward()
            losses.append(weft.reduce(loss.detach(), ctx, "mean").item())
        norms.append(float(weft.clip_grads(model, ctx, max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def _trained(ctx, make, strategy, steps, before, count=10):
    model, optimizer, loader, ctx = _prepared(ctx, make, strategy, steps, **before)
    losses, norms = _steps(model, optimizer, _windows(loader), ctx, count)
    with weft.full_params(model, ctx):
        return losses, norms, [p.detach().clone() for p in model.parameters()]


MESHES = (({"expert": 2}, 2), ({"expert": 4}, 4), ({"data": 2, "expert": 2}, 4))
STRATEGIES = ("replicate", "fully_shard", "zero1", "zero2", "zero3")
CASES = [  # every two choices meet
    (mesh, ranks, strategy, 3 if (first + second) % 2 else 1)
    for first, (mesh, ranks) in enumerate(MESHES)
    for second, strategy in enumerate(STRATEGIES)
]
FAST = [case for case in CASES if case[1:] in ((2, "replicate", 1), (2, "fully_shard", 3))]


@pytest.mark.parametrize(
    ("mesh", "ranks", "strategy", "steps"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.variant) for case in CASES if case not in FAST)],
)
def test_ten_steps_are_those_of_one_process(mesh, ranks, strategy, steps):
    losses, norms, parameters = _alone(StackedNet, steps)
    for found in run_ranks(_trained, ranks, StackedNet, strategy, steps, {}, mesh=mesh, probes="auto"):
        assert found[0] == pytest.approx(losses, rel=0, abs=1e-12)
        assert found[1] == pytest.approx(norms, rel=0, abs=1e-12)
        assert largest_difference(parameters, found[2]) < 1e-12


def _saved(ctx, strategy, directory):
    model, optimizer, loader, ctx = _prepared(ctx, StackedNet, strategy)
    model, ctx = weft.average_weights(model, ctx, decay=0.9)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
    windows = _windows(loader)
    _steps(model, optimizer, windows, ctx, 5)
    path = weft.save(state, f"{directory}/saved", 5, ctx)
    if ctx.is_main:
        weft.export(path, f"{directory}/export")
    losses, norms = _steps(model, optimizer, windows, ctx, 5)
    with weft.averages(model).swapped(), weft.full_params(model, ctx):
        averages = [p.detach().clone() for p in model.parameters()]
    return losses, norms, averages


def _resumed(ctx, strategy, directory):
    model, optimizer, loader, ctx = _prepared(ctx, StackedNet, strategy)
    model, ctx = weft.average_weights(model, ctx, decay=0.9)
    weft.load_weights(model, f"{directory}/export", ctx)
    with weft.full_params(model, ctx):
        loaded = [p.detach().clone() for p in model.parameters()]
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
    weft.restore(state, f"{directory}/saved", ctx)
    with weft.full_params(model, ctx):
        restored = [p.detach().clone() for p in model.parameters()]
    losses, norms = _steps(model, optimizer, _windows(loader), ctx, 5)
    with weft.averages(model).swapped(), weft.full_params(model, ctx):
        averages = [p.detach().clone() for p in model.parameters()]
    return losses, norms, averages, largest_difference(loaded, restored)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("replicate", {"expert": 2}, 2), ("fully_shard", {"data": 2, "expert": 2}, 4)),
        pytest.param(
            ("fully_shard", {"data": 2, "expert": 2}, 4), ("replicate", {"expert": 1}, 1), marks=pytest.mark.variant
        ),
        pytest.param(
            ("zero1", {"expert": 2}, 2), ("replicate", {"data": 1, "expert": 4}, 4), marks=pytest.mark.variant
        ),
    ],
)
def test_a_training_resumes_on_another_mesh(one, other, tmp_path):
    strategy, mesh, ranks = one
    losses, norms, averages = run_ranks(_saved, ranks, strategy, str(tmp_path), mesh=mesh, probes="auto")[0]
    strategy, mesh, ranks = other
    for found in run_ranks(_resumed, ranks, strategy, str(tmp_path), mesh=mesh, probes="auto"):
        assert found[3] == 0.0
        assert found[0] == pytest.approx(losses, rel=0, abs=1e-12)
        assert found[1] == pytest.approx(norms, rel=0, abs=1e-12)
        assert largest_difference(averages, found[2]) < 1e-12


@pytest.mark.parametrize("strategy", ["fully_shard", *variants("replicate")])
def test_with_recomputed_layers_numbers_are_the_same(strategy):
    losses, norms, parameters = _alone(StackedNet, 1, 3)
    before = {"blocks": "layers.*"}
    for found in run_ranks(_trained, 2, StackedNet, strategy, 1, before, 3, mesh={"expert": 2}):
        assert found[0] + found[1] == pytest.approx(losses + norms, rel=0, abs=1e-12)
        assert largest_difference(parameters, found[2]) < 1e-12


def test_in_bf16_losses_are_close():
    losses, _, _ = _alone(StackedNet, 1, 5)
    for found in run_ranks(_trained, 2, StackedNet, "replicate", 1, {"precision": "bf16"}, 5, mesh={"expert": 2}):
        assert found[0] == pytest.approx(losses, rel=0, abs=0.02)


def _undone_after(ctx, strategy):
    model, optimizer, loader, ctx = _prepared(ctx, StackedNet, strategy)
    _steps(model, optimizer, _windows(loader), ctx, 2)
    with weft.full_params(model, ctx):
        before = [p.detach().clone() for p in model.parameters()]
    model, ctx = weft.undo(model, ctx, rebind=optimizer)
    moments = [optimizer.state[p]["exp_avg"].shape == p.shape for p in model.parameters()]
    return largest_difference(before, [p.detach() for p in model.parameters()]), all(moments)


@pytest.mark.parametrize("strategy", ["fully_shard", *variants("replicate")])
def test_undo_takes_the_strategy_back_and_then_the_experts(strategy):
    assert run_ranks(_undone_after, 2, strategy, mesh={"expert": 2}) == [(0.0, True)] * 2


class ChainedNet(StackedNet):
    """Stages of a pipeline, of stacked and listed experts."""

    def __init__(self):
        super().__init__()
        make = (StackedLayer, functools.partial(ListedLayer, choices=4))  # all are called
        self.layers = nn.ModuleList(layer() for layer in make * 2)


def _mean_loss(output, target):
    return cross_entropy(output, target)


def _in_stages(ctx, strategy):
    model, optimizer = _net(ChainedNet), None
    model, ctx = weft.expert_parallel(model, ctx)
    model, ctx = weft.pipeline(model, ctx, loss=_mean_loss, micro_batches=2)
    if strategy == "zero_partition":
        model, optimizer, ctx = weft.zero_partition(model, _optimizer(model), ctx, stage=2)
    else:
        model, ctx = getattr(weft, strategy)(model, ctx)
        optimizer = _optimizer(model)
    losses = []
    for step in range(4):
        if step == 3:
            model, ctx = weft.undo(model, ctx, rebind=optimizer)
        x, y = _batch(64) if step == 3 else _mine(ctx, _batch(64))
        loss = _mean_loss(model(x), y) if step == 3 else model(x, y)
        loss.backward()
        losses.append(weft.reduce(loss.detach(), ctx, "mean").item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fully_shard", *variants("zero_partition", "replicate")])
def test_experts_in_stages_are_trained_and_undone_as_in_one_process(strategy):
    model, losses = _net(ChainedNet), []
    optimizer = _optimizer(model)
    for _ in range(4):
        x, y = _batch(64)
        loss = _mean_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for found, parameters in run_ranks(_in_stages, 4, strategy, mesh={"pipeline": 2, "expert": 2}, probes="auto"):
        assert found == pytest.approx(losses, rel=0, abs=1e-12)
        assert largest_difference(parameters, [p.detach() for p in model.parameters()]) < 1e-12


# -- what is sent and held --------------------------------------------------------------------------------


class Messages(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.name().partition("::")[2].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def _messages(ctx):
    model, ctx = _divided(ctx)
    batch = _mine(ctx, _batch())
    with Messages() as forward:
        loss = _loss(model, batch)
    with Messages() as backward:
        loss.backward()
    with torch.no_grad(), Messages() as evaluation:
        model(batch[0])
    held = {name: p.to_local().shape if hasattr(p, "to_local") else p.shape for name, p in model.named_parameters()}
    meta = {name for name, p in model.named_parameters() if p.is_meta}
    return forward.counts, backward.counts, evaluation.counts, held, meta


def test_messages_and_memory_are_those_known_in_advance():
    counted = run_ranks(_messages, 2, mesh={"expert": 2}, probes="off")
    for rank, (forward, backward, evaluation, held, meta) in enumerate(counted):
        # stacked: counts, rows, weights, results; listed: counts, rows, results
        assert forward == evaluation == {"alltoall_base": 4 + 3}
        assert backward == {"alltoall_base": 3 + 2}
        assert held["stacked.experts.up"] == (2, 5, 6) and held["stacked.experts.down"] == (2, 6, 5)
        others = (2, 3) if rank == 0 else (0, 1)
        parameters = [own for own, _ in Expert().named_parameters()]
        assert meta == {f"listed.experts.{number}.{own}" for number in others for own in parameters}


# -- taken back --------------------------------------------------------------------------------------------


def _undone(ctx):
    model = _net()
    names = list(model.state_dict())
    optimizer = torch.optim.AdamW(model.stacked.parameters(), 0.05)
    _loss(model, _batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = [value.clone() for each in optimizer.state.values() for value in each.values()]
    before = [p.detach().clone() for p in model.parameters()]
    model, ctx = weft.expert_parallel(model, ctx, rebind=optimizer)
    assert list(model.state_dict()) == names
    assert all(any(p is q for q in model.parameters()) for p in optimizer.param_groups[0]["params"])
    model, ctx = weft.undo(model, ctx, rebind=optimizer)
    assert (
        not ctx.applied and "forward" not in model.listed.__dict__ and "forward" not in model.stacked.experts.__dict__
    )
    after = [value for each in optimizer.state.values() for value in each.values()]
    assert all(torch.equal(one, two) for one, two in zip(state, after, strict=True))
    return largest_difference(before, [p.detach() for p in model.parameters()])


def test_undo_gives_every_rank_all_experts_and_their_state():
    assert run_ranks(_undone, 2, mesh={"expert": 2}) == [0.0, 0.0]


# -- what is refused ---------------------------------------------------------------------------------------


def _refused(ctx, make, options):
    model = make()
    before = {name: id(p) for name, p in model.named_parameters()}
    try:
        weft.expert_parallel(model, ctx, **options)
    except (weft.errors.WeftError, ValueError, TypeError) as error:
        assert before == {name: id(p) for name, p in model.named_parameters()}
        assert not any("forward" in part.__dict__ for part in model.modules())
        return type(error).__name__, str(error)
    return None


def _uneven():
    model = _net(ListedLayer)
    model.experts[2].up = nn.Linear(6, 7).double()
    return model


def _with_buffers():
    model = _net(ListedLayer)
    for expert in model.experts:
        expert.register_buffer("seen", torch.zeros(()))
    return model


def _tied():
    model = _net(ListedLayer)
    model.experts[1].up.weight = model.experts[0].up.weight
    return model


def _hooked():
    model = _net(ListedLayer)
    model.experts[0].up.weight.register_hook(lambda gradient: gradient)
    return model


def _configured():
    from types import SimpleNamespace

    class Labelled(Net):
        def forward(self, x, labels=None, output_router_logits=None):
            return super().forward(x)

    model = _net(Labelled)
    model.config = SimpleNamespace(output_router_logits=True, router_aux_loss_coef=0.01)
    return model


@pytest.mark.parametrize(
    ("make", "options", "kind", "words"),
    [
        (lambda: _net(Net, 3), {}, "ValueError", ["3 experts, 2 ranks"]),
        (lambda: nn.Linear(2, 2), {}, "ValueError", ["no experts", "Linear"]),
        (_uneven, {}, "ValueError", ["not alike", "up.weight (5, 6)", "up.weight (7, 6)"]),
        (_with_buffers, {}, "ValueError", ["buffers", "experts.0.seen"]),
        (_tied, {}, "ValueError", ["experts.0.up.weight = experts.1.up.weight"]),
        (_hooked, {}, "ValueError", ["hooks", "experts.0.up.weight"]),
        (_net, {"experts": "listed"}, "ValueError", ["is not known", "ListedLayer.forward"]),
        (_net, {"axis": "nowhere"}, "ContextError", ["'nowhere'"]),
        (_net, {"weights": {}}, "ValueError", ["weights"]),
        (_net, {"weights": "later"}, "ValueError", ["real parameters"]),
        (_configured, {}, "ValueError", ["load balancing", "router_aux_loss_coef=0.01"]),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_changes(make, options, kind, words):
    for found, text in run_ranks(_refused, 2, make, options, mesh={"expert": 2}):
        assert found == kind, text
        assert all(word in text for word in words), text
        assert "expected:" in text and "fix:" in text


def _same_batches(ctx):
    return _refused(ctx, _net, {})


def test_an_axis_along_which_batches_are_the_same_is_refused():
    found = run_ranks(_same_batches, 2, mesh={"data": 1, "expert": 2}, data_axes=("data",))
    assert all(kind == "ContextError" and "batches are the same along 'expert'" in text for kind, text in found)


class Drawing(ListedLayer):
    def forward(self, x):
        return super().forward(x + self.calls * torch.randn(x.shape, dtype=x.dtype))


class Feeding(ListedLayer):
    """An expert whose rows are the results of another one."""

    def forward(self, x):
        return self.experts[1](self.experts[0](x))


class Reading(ListedLayer):
    def forward(self, x):
        return x @ self.experts[0].up.weight.t() @ self.experts[0].up.weight


def _called(ctx, make):
    model, ctx = _divided(ctx, make)
    model(torch.ones(2, 6, dtype=torch.float64))


@pytest.mark.parametrize(
    ("make", "words"), [(Feeding, "not the same when it runs again"), (Reading, "other than by calls")]
)
def test_layers_that_do_more_with_experts_than_to_call_them_are_refused(make, words):
    with pytest.raises(RanksFailed, match=words):
        run_ranks(_called, 2, make, mesh={"expert": 2})


def _drawn(ctx):
    model, ctx = _divided(ctx, Drawing)
    torch.manual_seed(3)
    found = model(torch.ones(2, 6, dtype=torch.float64))
    after = torch.rand(1).item()
    torch.manual_seed(3)
    return (found - _net(Drawing)(torch.ones(2, 6, dtype=torch.float64))).abs().max().item(), after - torch.rand(
        1
    ).item()


def test_random_numbers_are_drawn_once():
    assert all(max(map(abs, found)) < 1e-14 for found in run_ranks(_drawn, 2, mesh={"expert": 2}))


def _asked_for_local_loss(ctx):
    model = _configured()
    model.config.output_router_logits = False
    model, ctx = weft.expert_parallel(model, ctx)
    x, y = _mine(ctx, _batch())
    model(x, output_router_logits=True)  # the user's own loss may be made of them
    model(x, labels=y, output_router_logits=True)


def test_a_call_that_adds_the_routers_loss_over_the_local_batch_is_refused():
    with pytest.raises(RanksFailed, match="load balancing loss"):
        run_ranks(_asked_for_local_loss, 2, mesh={"expert": 2})
