"""clip_grads: torch's numbers wherever gradients lie, one branch on all ranks, few numbers sent."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import weft
from tests.variants import variant_cases
from weft.testing import RanksFailed, largest_difference, run_ranks

NORMS = [1.0, 2.0, 3.0, math.inf]


class Net(nn.Module):
    """Sizes that 4 ranks cannot cut evenly; `third` leaves some of them without a row."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 6)
        self.third = nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)) * self.scale)))


def _net(seed=0, kind=torch.float64):
    torch.manual_seed(seed)
    return Net().to(kind)


def _x(rank, rows=3):
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(rank + 10), dtype=torch.float64) * 3


def _loss(model, x):
    return model(x).square().mean() * 10


def _full(tensor):
    return None if tensor is None else tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _grads(model):
    return [None if p.grad is None else _full(p.grad).clone() for p in model.parameters()]


def _with_grads(shapes, dtypes=(torch.float32,), seed=0):
    torch.manual_seed(seed)
    parameters = [
        nn.Parameter(torch.zeros(shape, dtype=dtypes[i % len(dtypes)])) for i, shape in enumerate(map(tuple, shapes))
    ]
    for p in parameters:
        p.grad = torch.randn_like(p) * 3
    return parameters


def _copies(parameters):
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    for copy, p in zip(copies, parameters, strict=True):
        copy.grad = None if p.grad is None else p.grad.clone()
    return copies


def _same_bits(ours, theirs):
    return all(
        (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True)
    )


# -- one process: the bits of torch ------------------------------------------------------------------

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    shapes=SHAPES,
    dtypes=st.sampled_from([(torch.float32,), (torch.float64,), (torch.float32, torch.float64)]),
    norm_type=st.sampled_from([0.5, *NORMS]),
    max_norm=st.sampled_from([1e-3, 0.7, 5.0, 1e9, math.inf]),
    seed=st.integers(0, 2**16),
)
def test_one_process_gives_the_bits_of_clip_grad_norm(shapes, dtypes, norm_type, max_norm, seed):
    ours = _with_grads(shapes, dtypes, seed)
    theirs = _copies(ours)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    norm = weft.clip_grads(ours, weft.local(), max_norm=max_norm, norm_type=norm_type)
    assert norm.dtype == expected.dtype and norm.shape == () and torch.equal(norm, expected)
    assert _same_bits(ours, theirs)


@settings(max_examples=40, deadline=None)
@given(shapes=SHAPES, max_value=st.sampled_from([1e-3, 0.5, 3.0, 100.0]), seed=st.integers(0, 2**16))
def test_one_process_gives_the_bits_of_clip_grad_value(shapes, max_value, seed):
    ours = _with_grads(shapes, (torch.float32, torch.float64), seed)
    theirs = _copies(ours)
    expected = nn.utils.get_total_norm([p.grad for p in ours])
    nn.utils.clip_grad_value_(theirs, max_value)
    assert torch.equal(weft.clip_grads(ours, weft.local(), max_value=max_value), expected)
    assert _same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_16_bit_gradients_is_not_rounded_to_16_bits(dtype):
    parameters = _with_grads([(100,), (30, 10)], (dtype,))
    exact = torch.linalg.vector_norm(torch.cat([p.grad.double().flatten() for p in parameters]))
    expected = [p.grad.double() * (0.5 / exact) for p in parameters]
    norm = weft.clip_grads(parameters, weft.local(), max_norm=0.5)
    assert norm.dtype == torch.float32 and abs(norm / exact - 1) < 1e-6
    assert all(p.grad.dtype == dtype for p in parameters)
    assert all(
        torch.allclose(p.grad.double(), e, rtol=2**-8, atol=1e-7) for p, e in zip(parameters, expected, strict=True)
    )


def test_a_norm_beyond_float16_does_not_erase_the_gradients():
    parameters = _with_grads([(4,)], (torch.float16,))
    parameters[0].grad.fill_(60000.0)
    assert weft.clip_grads(parameters, weft.local(), max_norm=2.0, nonfinite="raise") == 120000.0
    assert torch.allclose(parameters[0].grad, torch.ones(4, dtype=torch.float16), rtol=1e-3)


def test_gradients_of_16_and_32_bits_together():
    parameters = _with_grads([(9,), (3, 3)], (torch.bfloat16, torch.float32))
    exact = torch.linalg.vector_norm(torch.cat([p.grad.double().flatten() for p in parameters]))
    norm = weft.clip_grads(parameters, weft.local(), max_norm=0.5)
    assert norm.dtype == torch.float32 and abs(norm / exact - 1) < 1e-6
    assert parameters[0].grad.dtype == torch.bfloat16 and parameters[1].grad.dtype == torch.float32


def test_a_gradient_without_elements_counts_as_zero():
    for norm_type in NORMS:
        parameters = _with_grads([(0, 3), (4,)])
        expected = torch.linalg.vector_norm(parameters[1].grad, norm_type)
        assert torch.allclose(weft.clip_grads(parameters, weft.local(), max_norm=1.0, norm_type=norm_type), expected)
        empty = parameters[:1]
        assert weft.clip_grads(empty, weft.local(), max_norm=1.0, norm_type=norm_type) == 0


def test_without_limits_it_only_tells_the_norm():
    ours = _with_grads([(3, 4), (5,)])
    before = _copies(ours)
    assert torch.equal(weft.clip_grads(ours, weft.local()), nn.utils.get_total_norm([p.grad for p in ours]))
    assert _same_bits(ours, before)


def test_no_gradients_at_all():
    model = _net()
    for options in ({"max_norm": 1.0}, {"max_value": 1.0}, {"norm_type": math.inf}, {"nonfinite": "skip"}):
        norm = weft.clip_grads(model, weft.local(), **options)
        assert norm == 0 and norm.shape == () and type(norm) is torch.Tensor
    assert weft.clip_grads([], weft.local(), max_norm=1.0) == 0
    assert all(p.grad is None for p in model.parameters())


def test_parameters_without_gradient_are_ignored():
    ours = _with_grads([(3,), (4,), (5,)])
    ours[1].grad = None
    theirs = _copies(ours)
    expected = nn.utils.clip_grad_norm_(theirs, 0.1)
    assert torch.equal(weft.clip_grads(ours, weft.local(), max_norm=0.1), expected) and _same_bits(ours, theirs)


def test_everything_that_has_parameters_can_be_given_and_counts_once():
    def fresh():
        one, two = _net(), _net(1)
        two.second.weight = one.second.weight
        (_loss(one, _x(0)) + _loss(two, _x(1))).backward()
        return one, two

    one, two = fresh()
    parameters = list(dict.fromkeys([*one.parameters(), *two.parameters()]))
    expected = nn.utils.clip_grad_norm_(parameters, 0.1)
    clipped = _grads(one) + _grads(two)
    ways = [
        lambda one, two: [one, two],
        lambda one, two: (one, two),
        lambda one, two: {"one": one, "two": two},
        lambda one, two: {"nets": [one], "rest": {"two": two}},
        lambda one, two: [one, two, torch.optim.SGD(one.parameters(), 0.1)],
        lambda one, two: [*one.parameters(), *two.parameters()],
        lambda one, two: (p for net in (one, two) for p in net.parameters()),
        lambda one, two: [net.parameters() for net in (one, two)],
        lambda one, two: torch.optim.SGD(list(dict.fromkeys([*one.parameters(), *two.parameters()])), 0.1),
        lambda one, two: nn.ModuleList([one, two]),
    ]
    for way in ways:
        one, two = fresh()
        assert torch.equal(weft.clip_grads(way(one, two), weft.local(), max_norm=0.1), expected)
        assert all(map(torch.equal, _grads(one) + _grads(two), clipped))
    one, _ = fresh()
    alone = nn.utils.get_total_norm([one.first.bias.grad])
    assert torch.equal(weft.clip_grads(one.first.bias, weft.local(), max_norm=1.0), alone)


@pytest.mark.parametrize("option", ["max_norm", "max_value"])
def test_sparse_gradients_count_each_row_once(option):
    sparse, dense = nn.Embedding(6, 3, sparse=True), nn.Embedding(6, 3)
    dense.load_state_dict(sparse.state_dict())
    rows = torch.tensor([1, 4, 1, 1])
    for table in (sparse, dense):
        (table(rows) * torch.arange(4.0)[:, None]).sum().backward()
    clip = nn.utils.clip_grad_norm_ if option == "max_norm" else nn.utils.clip_grad_value_
    expected = nn.utils.get_total_norm([dense.weight.grad])
    clip(dense.parameters(), 0.9)
    assert torch.allclose(weft.clip_grads(sparse, weft.local(), **{option: 0.9}), expected)
    assert sparse.weight.grad.is_sparse
    assert torch.allclose(sparse.weight.grad.to_dense(), dense.weight.grad)
    torch.optim.SGD(sparse.parameters(), 0.1).step()


def test_the_same_storage_is_changed_and_no_graph_is_kept():
    model = _net()
    _loss(model, _x(0)).backward()
    pointers = [p.grad.data_ptr() for p in model.parameters()]
    norm = weft.clip_grads(model, weft.local(), max_norm=0.01)
    assert [p.grad.data_ptr() for p in model.parameters()] == pointers and not norm.requires_grad


def test_it_does_not_wait_for_the_device(monkeypatch):
    model = _net()
    _loss(model, _x(0)).backward()

    def waits(*_):
        raise AssertionError("a value was read on the host")

    for name in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    weft.clip_grads(model, weft.local(), max_norm=0.01)
    weft.clip_grads(model, weft.local(), max_value=0.01)


# -- several ranks: the numbers of one process -------------------------------------------------------


def _prepare(ctx, how):
    """One or two models, laid out in some way, with the gradients of the joined batch."""
    from torch.distributed.fsdp import fully_shard

    one, two = _net(), _net(1)
    if how == "replicate":
        one, ctx = weft.replicate(one, ctx)
        two, ctx = weft.replicate(two, ctx, flat=True)
    elif how == "sharded":  # also on a hybrid mesh
        fully_shard(one.second, mesh=ctx.mesh)
        fully_shard(one, mesh=ctx.mesh)
        fully_shard(two, mesh=ctx.mesh)
    elif how == "mixed":  # sharded and replicated parameters in one model
        fully_shard(one.second, mesh=ctx.mesh)
        one.first, ctx = weft.replicate(one.first, ctx)
        one.third, ctx = weft.replicate(one.third, ctx)
        one.scale.requires_grad_(False)
        fully_shard(two, mesh=ctx.mesh)
    elif how == "meshes":  # one over all ranks, the other over half of them: copies in the other half
        from torch.distributed.device_mesh import init_device_mesh

        world = init_device_mesh("cpu", (ctx.world_size,))
        fully_shard(one, mesh=world)
        fully_shard(two, mesh=ctx.mesh)
    for model in (one, two):
        _loss(model, _x(ctx.rank)).backward()
    return {"one": one, "two": two}, ctx


def _ranks_clip(ctx, how, options):
    models, ctx = _prepare(ctx, how)
    norm = weft.clip_grads(models, ctx, **options)
    assert type(norm) is torch.Tensor and norm.shape == () and norm.dtype == torch.float64
    return norm, _grads(models["one"]) + _grads(models["two"])


def _reference(n, how, options):
    models = [_net(), _net(1)]
    models[0].scale.requires_grad_(how != "mixed")
    for rank in range(n):
        for model in models:
            (_loss(model, _x(rank)) / n).backward()
    parameters = [p for model in models for p in model.parameters() if p.grad is not None]
    if "max_value" in options:
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        nn.utils.clip_grad_value_(parameters, options["max_value"])
    else:
        norm = nn.utils.clip_grad_norm_(parameters, options["max_norm"], options.get("norm_type", 2.0))
    return norm, [g for model in models for g in _grads(model)]


HYBRID = {"replica": 2, "shard": 2}
WORLDS = [
    ("replicate", 1, None),
    ("replicate", 2, None),
    ("sharded", 2, None),
    ("mixed", 2, None),
    ("meshes", 4, HYBRID),
    ("replicate", 4, None),
    ("sharded", 4, None),
    ("sharded", 4, HYBRID),
    ("mixed", 4, None),
    ("mixed", 4, HYBRID),
]
IDS = [f"{how}-{n}{'-hybrid' if mesh else ''}" for how, n, mesh in WORLDS]


OPTIONS = [
    *({"max_norm": 0.3, "norm_type": p} for p in NORMS),
    {"max_norm": 1e9},
    {"max_norm": 0.3, "nonfinite": "skip"},
    {"max_value": 0.05},
]
EVERY = list(itertools.product(WORLDS, OPTIONS))  # in the ordinary suite, each option with two worlds or three
QUICK = [(*world, options) for place, (world, options) in enumerate(EVERY[: 5 * len(OPTIONS)]) if place % 2]


@pytest.mark.parametrize(
    ("how", "n", "mesh", "options"),
    [*QUICK, *variant_cases(*[case for world, options in EVERY if (case := (*world, options)) not in QUICK][::2])],
    ids=str,
)
def test_ranks_give_the_numbers_of_one_process(how, n, mesh, options):
    norm, gradients = _reference(n, how, options)
    found = run_ranks(_ranks_clip, n, how, options, mesh=mesh)
    for rank_norm, rank_gradients in found:
        assert abs(rank_norm - norm) <= 1e-12 * norm
        assert torch.equal(rank_norm, found[0][0])
        for ours, theirs in zip(rank_gradients, gradients, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or largest_difference([ours], [theirs]) < 1e-12


def _random_shards(ctx, shapes, dims, norm_type, dtype):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    plain = _with_grads(shapes, (dtype,))
    parameters = []
    for p, dim in zip(plain, dims, strict=True):
        whole = dim is None or dim >= p.dim()
        if whole and len(parameters) % 2:
            parameters.append(p)
            continue
        placements = [Replicate()] * (ctx.mesh.ndim - 1) + [Replicate() if whole else Shard(dim)]
        cut = nn.Parameter(distribute_tensor(p.detach(), ctx.mesh, placements))
        cut.grad = distribute_tensor(p.grad, ctx.mesh, placements)
        parameters.append(cut)
    theirs = _copies(plain)
    expected = nn.utils.clip_grad_norm_(theirs, 0.5, norm_type)
    norm = weft.clip_grads(parameters, ctx, max_norm=0.5, norm_type=norm_type)
    assert not isinstance(norm, DTensor) and norm.dtype == dtype
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    assert abs(norm / expected - 1) < tolerance
    return max(largest_difference([_full(a.grad)], [b.grad]) for a, b in zip(parameters, theirs, strict=True)) / float(
        max(b.grad.abs().max() for b in theirs)
    ), norm


@settings(max_examples=12, deadline=None)
@given(
    cuts=st.lists(
        st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.sampled_from([None, 0, 1])),
        min_size=1,
        max_size=6,
    ),
    norm_type=st.sampled_from(NORMS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    world=st.sampled_from([(2, None), (4, None), (4, HYBRID)]),
)
def test_random_shapes_cut_along_random_dims(cuts, norm_type, dtype, world):
    n, mesh = world
    shapes, dims = [shape for shape, _ in cuts], [dim for _, dim in cuts]
    found = run_ranks(_random_shards, n, shapes, dims, norm_type, dtype, mesh=mesh)
    assert max(difference for difference, _ in found) < (1e-12 if dtype is torch.float64 else 3e-6)
    assert len({norm.item() for _, norm in found}) == 1


def _two_cuts(ctx):
    """A 2-D mesh whose both axes cut, as with tensor parallelism under FSDP."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    found = []
    plain = _with_grads([(5, 6), (7, 3), (4,)], (torch.float64,))
    placements = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Replicate())]
    for norm_type in NORMS:
        theirs, parameters = _copies(plain), []
        for p, cut in zip(plain, placements, strict=True):
            parameters.append(nn.Parameter(distribute_tensor(p.detach(), ctx.mesh, cut)))
            parameters[-1].grad = distribute_tensor(p.grad.clone(), ctx.mesh, cut)
        expected = nn.utils.clip_grad_norm_(theirs, 0.5, norm_type)
        with _counted() as counter:
            norm = weft.clip_grads(parameters, ctx, max_norm=0.5, norm_type=norm_type)
        differences = [abs(norm - expected).item()]
        differences += [largest_difference([_full(a.grad)], [b.grad]) for a, b in zip(parameters, theirs, strict=True)]
        found.append((max(differences), counter.get_total_counts()))
    return found


def test_gradients_cut_along_two_axes():
    for found in run_ranks(_two_cuts, 4, mesh=HYBRID):
        assert all(difference < 1e-12 and messages == 2 for difference, messages in found)


def _sharded_low(ctx, dtype):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(_net(kind=dtype), mesh=ctx.mesh)
    _loss(model, _x(0).to(dtype)).backward()
    exact = torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in _grads(model)]))
    norm = weft.clip_grads(model, ctx, max_norm=0.5)
    after = torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in _grads(model)]))
    return norm.dtype, float(norm / exact), float(after)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sharded_16_bit_gradients(dtype):
    for kind, ratio, after in run_ranks(_sharded_low, 2, dtype):
        assert kind == torch.float32 and abs(ratio - 1) < 1e-6 and abs(after - 0.5) < 0.005


# -- what is sent ------------------------------------------------------------------------------------


def _counted():
    from torch.distributed.tensor.debug import CommDebugMode

    return CommDebugMode()


def _count(ctx, how, nonfinite):
    models, ctx = _prepare(ctx, how)
    found = []
    for options in ({"max_norm": 1.0}, {"max_value": 1.0}, {"max_norm": 1.0, "norm_type": math.inf}):
        with _counted() as counter:
            weft.clip_grads(models, ctx, **options, nonfinite=nonfinite)
        found.append({str(op).rpartition(".")[2]: number for op, number in counter.get_comm_counts().items()})
    return found


@pytest.mark.parametrize(
    ("how", "n", "mesh", "nonfinite", "messages"),
    [
        ("replicate", 2, None, None, 0),
        ("sharded", 2, None, "skip", 1),
        ("mixed", 2, None, None, 1),
        ("sharded", 4, HYBRID, "skip", 2),
        ("meshes", 4, HYBRID, None, 2),
        *variant_cases(
            ("replicate", 2, None, "skip", 1),
            ("sharded", 2, None, None, 1),
            ("mixed", 2, None, "skip", 1),
            ("sharded", 4, HYBRID, None, 1),
            ("meshes", 4, HYBRID, "skip", 2),
        ),
    ],
)
def test_one_message_per_set_of_ranks(how, n, mesh, nonfinite, messages):
    for counts in run_ranks(_count, n, how, nonfinite, mesh=mesh):
        assert [sum(found.values()) for found in counts] == [messages] * 3, counts


def _sizes(ctx):
    import torch.distributed as dist

    models, ctx = _prepare(ctx, "sharded")
    sizes, plain = [], dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **kwargs: (sizes.append(tensor.numel()), plain(tensor, *args, **kwargs))[1]
    try:
        weft.clip_grads(models, ctx, max_norm=1.0, nonfinite="skip")
    finally:
        dist.all_reduce = plain
    return sizes


def test_a_message_is_one_number():
    assert run_ranks(_sizes, 2) == [[1]] * 2


def _evaluated_before(ctx):
    """A forward pass after backward: FSDP2 keeps the root's gathered copies, which have no gradients."""
    models, ctx = _prepare(ctx, "sharded")
    with torch.no_grad():
        models["one"](_x(9))
    return weft.clip_grads(models, ctx, max_norm=1.0)


def test_an_evaluation_before_it_hides_no_gradients():
    norm, _ = _reference(2, "sharded", {"max_norm": 1.0})
    assert all(abs(found - norm) < 1e-12 * norm for found in run_ranks(_evaluated_before, 2))


def _some_without(ctx):
    models, ctx = _prepare(ctx, "sharded")
    for p in models["one"].parameters():
        p.grad = None
    if ctx.rank == 0:  # a rank without any gradient does not leave the others waiting
        for p in models["two"].parameters():
            p.grad = None
    return weft.clip_grads(models, ctx, max_norm=1.0)


def test_a_rank_without_gradients_takes_part():
    zero, one = run_ranks(_some_without, 2)
    assert zero == one and zero > 0


# -- gradients that are not finite -------------------------------------------------------------------


def test_without_a_policy_it_does_what_torch_does():
    for bad in (math.nan, math.inf):
        for options in ({"max_norm": 1.0}, {"max_norm": 1.0, "norm_type": math.inf}):
            ours = _with_grads([(3,), (4,)])
            ours[1].grad[2] = bad
            theirs = _copies(ours)
            expected = nn.utils.clip_grad_norm_(theirs, **options)
            norm = weft.clip_grads(ours, weft.local(), **options)
            assert torch.equal(norm.nan_to_num(7), expected.nan_to_num(7))
            assert all(
                torch.equal(a.grad.nan_to_num(7), b.grad.nan_to_num(7)) for a, b in zip(ours, theirs, strict=True)
            )


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"max_value": 0.5}, {"norm_type": math.inf}])
@pytest.mark.parametrize("policy", ["raise", "skip", "zero"])
def test_a_policy_does_nothing_to_finite_gradients(policy, options):
    ours = _with_grads([(3,), (4,)])
    theirs = _copies(ours)
    expected = weft.clip_grads(theirs, weft.local(), **options)
    assert torch.equal(weft.clip_grads(ours, weft.local(), nonfinite=policy, **options), expected)
    assert _same_bits(ours, theirs)


def _bad(ctx, how, policy, where, bad, options):
    """A gradient element that is not finite, on one rank only, after the reduction."""
    models, ctx = _prepare(ctx, how)
    if ctx.rank == where:
        broken = models["one"].first.weight if how in ("mixed", "replicate") else models["two"].first.weight
        gradient = broken.grad.to_local() if hasattr(broken.grad, "to_local") else broken.grad
        gradient.view(-1)[0] = bad
    optimizer = torch.optim.SGD([p for model in models.values() for p in model.parameters()], 0.1)
    before = [p.detach().clone() for model in models.values() for p in model.parameters()]
    kept = _grads(models["two"]) if how == "mixed" else []
    try:
        norm = weft.clip_grads(models, ctx, nonfinite=policy, **options)
    except FloatingPointError as error:
        assert all(map(torch.equal, kept, _grads(models["two"])))
        return str(error)
    gradients = [p.grad for model in models.values() for p in model.parameters()]
    optimizer.step()
    after = [p.detach() for model in models.values() for p in model.parameters()]
    same = all(torch.equal(_full(a), _full(b)) for a, b in zip(before, after, strict=True))
    if policy == "skip":
        kind = "none" if all(g is None for g in gradients) else "some"
    else:
        kind = "zero" if all(g is None or _full(g).eq(0).all() for g in gradients) else "some"
    return bool(norm.isfinite()), kind, same


BAD_WORLDS = [*WORLDS[1:4], *variant_cases(*WORLDS[4:])]


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"max_value": 0.5, "norm_type": math.inf}], ids=str)
@pytest.mark.parametrize(("how", "n", "mesh"), BAD_WORLDS, ids=IDS[1:])
def test_one_bad_rank_makes_all_take_the_same_branch(how, n, mesh, options):
    for policy, kind in (("skip", "none"), ("zero", "zero")):
        found = run_ranks(_bad, n, how, policy, n - 1, math.nan, options, mesh=mesh)
        assert found == [(False, kind, True)] * n
    name = "one.first.weight" if how in ("mixed", "replicate") else "two.first.weight"
    for text in run_ranks(_bad, n, how, "raise", n - 1, math.inf, options, mesh=mesh):
        assert f"found:    rank {n - 1}: {name}\n" in text and "fix:      weft.clip_grads" in text


def test_raise_names_up_to_five_parameters_and_changes_nothing():
    model = _net()
    _loss(model, _x(0)).backward()
    for p in model.parameters():
        p.grad.fill_(math.nan)
    with pytest.raises(
        FloatingPointError, match=r"found: .*rank 0: scale, .*second.bias and 2 more\n.*\n.*fix: .*skip"
    ):
        weft.clip_grads(model, weft.local(), max_norm=1.0, nonfinite="raise")
    assert all(p.grad.isnan().all() for p in model.parameters())
    with pytest.raises(FloatingPointError, match=r"rank 0: group 0\[1\]"):
        parameters = _with_grads([(2,), (2,)])
        parameters[1].grad.fill_(math.inf)
        weft.clip_grads(torch.optim.SGD(parameters, 0.1), weft.local(), nonfinite="raise")
    with pytest.raises(FloatingPointError, match="rank 0: 1\n"):
        weft.clip_grads(parameters, weft.local(), nonfinite="raise")
    with pytest.raises(FloatingPointError, match="rank 0: the parameter\n"):
        weft.clip_grads(parameters[1], weft.local(), nonfinite="raise")


def test_raise_names_sparse_gradients():
    table = nn.Embedding(6, 3, sparse=True)
    (table(torch.tensor([1, 1])) * math.inf).sum().backward()
    with pytest.raises(FloatingPointError, match="rank 0: weight\n"):
        weft.clip_grads(table, weft.local(), nonfinite="raise")


def test_a_norm_that_overflows_is_told_apart():
    parameters = _with_grads([(2,)])
    parameters[0].grad.fill_(3e38)
    with pytest.raises(FloatingPointError, match=r"the norm overflows torch.float32\n  found: .*finite gradients"):
        weft.clip_grads(parameters, weft.local(), nonfinite="raise")


def _only_main(ctx):
    model, ctx = weft.replicate(_net(), ctx)
    _loss(model, _x(ctx.rank)).backward()
    weft.clip_grads(model, ctx.only(0), max_norm=1.0)  # sends nothing
    weft.clip_grads(model, ctx.only(0), max_norm=1.0, nonfinite="skip")


def test_a_policy_is_refused_on_a_context_for_one_rank():
    with pytest.raises(RanksFailed, match=r"clip_grads: refused on a context for rank 0 only"):
        run_ranks(_only_main, 2)


# -- together with the other transforms --------------------------------------------------------------


def _fp16(ctx):
    """A gradient that overflows in the step: the norm says so, the step is skipped, the next is good."""
    fp16 = weft.Precision(
        param=torch.float32, compute=torch.float16, output=torch.float32, scaling=weft.precision.LossScaling(init=256.0)
    )
    model, ctx = weft.with_precision(_net(kind=torch.float32), ctx, fp16)
    model, ctx = weft.replicate(model, ctx)
    optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(model.parameters(), 0.1), ctx)
    found = []
    for factor in (1.0, 1e30, 1.0):
        (_loss(model, _x(ctx.rank).float()) * factor).backward()
        norm = weft.clip_grads(model, ctx, max_norm=0.5, nonfinite="skip")
        optimizer.step()
        found.append((bool(norm.isfinite()), model.first.weight.detach().clone()))
        optimizer.zero_grad()
    return found


def test_after_fp16_the_norm_is_in_true_units():
    for n in (1, 2):
        reference = _net()
        for rank in range(n):
            (_loss(reference, _x(rank)) / n).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.optim.SGD(reference.parameters(), 0.1).step()
        for (good, first), (bad, second), (again, third) in run_ranks(_fp16, n):
            assert good and not bad and again
            assert largest_difference([first], [reference.first.weight.float()]) < 2e-3
            assert torch.equal(first, second) and not torch.equal(second, third)


def _flat(ctx, policy):
    model, ctx = weft.replicate(_net(), ctx, flat=True)
    optimizer, ctx = weft.fuse_step(torch.optim.AdamW(model.parameters(), 0.1), ctx)
    for step in range(4):
        _loss(model, _x(ctx.rank + 10 * step)).backward()
        if step == 2 and ctx.rank == 1:
            model.first.weight.grad[0, 0] = math.nan
        weft.clip_grads(model, ctx, max_norm=0.05, nonfinite=policy)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_a_skipped_step_of_a_fused_optimizer():
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for step in (0, 1, 3):
        for rank in range(2):
            (_loss(model, _x(rank + 10 * step)) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(_flat, 2, "skip"):
        assert largest_difference(found, [p.detach() for p in model.parameters()]) < 1e-12


# -- what is refused, before anything is changed -----------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"max_norm": 0.0}, ValueError, r"max_norm = 0.0 cannot be used\n  found: .*\n  expected: .*> 0 or None"),
        ({"max_norm": -1}, ValueError, r"found:    -1\n.*\n  fix:      weft.clip_grads\(model, ctx, max_norm=1.0\)"),
        ({"max_norm": math.nan}, ValueError, "found:    nan"),
        ({"max_norm": "1"}, TypeError, "max_norm = '1' is no number\n  found:    str"),
        ({"max_norm": True}, TypeError, "found:    bool"),
        ({"max_value": 0}, ValueError, "max_value = 0 cannot be used"),
        ({"max_norm": 1.0, "norm_type": 0}, ValueError, "norm_type = 0 cannot be used"),
        ({"max_norm": 1.0, "norm_type": -math.inf}, ValueError, "found:    -inf"),
        ({"norm_type": "inf"}, TypeError, r"fix: .*\(model, ctx, max_norm=1.0, norm_type=float\('inf'\)\)"),
        ({"norm_type": None}, TypeError, "found:    NoneType"),
        (
            {"max_norm": 1.0, "max_value": 2.0},
            ValueError,
            r"exclude each other\n  found:    max_norm=1.0, max_value=2.0",
        ),
        ({"nonfinite": "ignore"}, ValueError, "expected: 'raise', 'skip', 'zero' or None"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, kind, text):
    ours = _with_grads([(3,)])
    before = _copies(ours)
    with pytest.raises(kind, match=text) as caught:
        weft.clip_grads(ours, weft.local(), **options)
    assert all(f"  {field}:" in str(caught.value) for field in ("found", "expected", "fix"))
    assert _same_bits(ours, before)


@pytest.mark.parametrize(
    ("modules", "kind", "text"),
    [
        (3, TypeError, "modules has no gradients\n  found:    int"),
        ("model", TypeError, "found:    str"),
        (["model"], TypeError, "0 has no gradients\n  found:    str"),
        ({"nets": [nn.Linear(1, 1), None]}, TypeError, "nets.1 has no gradients\n  found:    NoneType"),
        (iter([]), ValueError, "an iterator gave nothing\n  found:    modules: an empty list_iterator"),
        (nn.Linear(1, 1).weight * 2, TypeError, "is no parameter\n  found: .*computed by MulBackward0"),
    ],
    ids=["number", "string", "in a list", "in a dict", "used iterator", "computed tensor"],
)
def test_things_without_gradients_are_refused(modules, kind, text):
    with pytest.raises(kind, match=text) as caught:
        weft.clip_grads(modules, weft.local(), max_norm=1.0)
    assert all(f"  {field}:" in str(caught.value) for field in ("found", "expected", "fix"))


def test_a_forgotten_context_is_refused():
    with pytest.raises(
        TypeError, match=r"ctx = 1.0 is not a context\n  found:    float\n.*\n  fix:      weft.clip_grads"
    ):
        weft.clip_grads(_net(), 1.0)


def _partial(ctx):
    from torch.distributed.tensor import DTensor, Partial, Replicate

    p = nn.Parameter(DTensor.from_local(torch.ones(3), ctx.mesh, [Replicate()]))
    p.grad = DTensor.from_local(torch.ones(3), ctx.mesh, [Partial()])
    with pytest.raises(ValueError, match=r"not been reduced over the ranks yet\n  found:    shape \(3,\)"):
        weft.clip_grads(p, ctx, max_norm=1.0)
    return p.grad.to_local().tolist()


def test_a_gradient_that_is_not_reduced_is_refused():
    assert run_ranks(_partial, 2) == [[1.0] * 3] * 2


def test_nothing_is_recorded():
    model, ctx = nn.Linear(1, 1), weft.local()
    model(torch.ones(1)).sum().backward()
    for _ in range(2):
        weft.clip_grads(model, ctx, max_norm=1.0)
    assert ctx.applied == () and weft.contract.offered(model, object) == []
