"""compile: the numbers of eager, one graph per class, no recompiles, and no trace in names."""

import copy
import itertools
import pickle
import shutil
import warnings

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import weft
from tests.fix_lines.told import told
from tests.variants import variant_cases, variants
from weft.testing import largest_difference, run_ranks

# The compiler looks at `grad` of its inputs, and hides the warning in a way that an error escapes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Block(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.one = nn.Linear(size, 2 * size)
        self.two = nn.Linear(2 * size, size)

    def forward(self, x, *, scale=None):
        y = self.two(torch.tanh(self.one(x)))
        return x + (y if scale is None else y * scale)


class Net(nn.Module):
    def __init__(self, depth=2, norm=False):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scale=2.0)
        return self.head(self.norm(x))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _net(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return Net(**options).to(dtype)


def _x(i=0, rows=4, dtype=torch.float32):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(i), dtype=dtype)


def _train(model, ctx, policy=None, steps=3, window=2, rank=0, ranks=1):
    """Accumulated steps; a compilation after the second one raises."""
    loader = [_x(i) for i in range(steps * window)]
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=window)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if policy is not None:
        optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    for step, each in enumerate(windows):
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            for x in each:
                (model(x.chunk(ranks)[rank]).float().square().mean() / len(each)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def _pipeline(ctx, policy=None, chosen=None, strategy=None, **compile_options):
    model = _net(norm=compile_options.pop("norm", False))
    if policy is not None:
        model, ctx = weft.with_precision(model, ctx, policy)
    if chosen is not None:
        model, ctx = weft.recompute(model, ctx, blocks=Block, **chosen)
    if strategy is not None:
        model, ctx = weft.replicate(model, ctx, **strategy)
    if compile_options:
        model, ctx = weft.compile(model, ctx, **compile_options)
    return model, ctx


# -- the numbers of eager ----------------------------------------------------------------------------


SAVING = {"save": ["matmul"]}


@pytest.mark.parametrize(
    ("blocks", "policy", "chosen"),
    [
        (None, None, None), (None, "bf16", {}), (None, "fp16", SAVING), (None, "bf16-true", {}),
        (Block, None, {}), (Block, "bf16", SAVING), (Block, "fp16", {}),
        *variant_cases(
            (None, None, {}), (None, "fp16", {}), (Block, "bf16", {}), (None, "fp16", None), (Block, None, None),
            (None, None, SAVING),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_one_graph_and_the_numbers_of_eager(blocks, policy, chosen):
    """`fullgraph`: nothing of precision or recomputation stands in the way of the compiler."""
    expected = _train(*_pipeline(weft.local(), policy, chosen), policy, steps=3)
    counter = CompileCounterWithBackend("eager")
    model, ctx = _pipeline(weft.local(), policy, chosen, blocks=blocks, backend=counter, fullgraph=True)
    assert largest_difference(expected, _train(model, ctx, policy, steps=3)) == 0
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, *variants("bf16", "fp16")])
def test_a_compiled_backward_and_running_statistics(policy):
    options = {"norm": True, "chosen": {}, "policy": policy}
    expected = _train(*_pipeline(weft.local(), **options), policy, steps=3)
    model, ctx = _pipeline(weft.local(), **options, backend="aot_eager", fullgraph=True)
    assert largest_difference(expected, _train(model, ctx, policy, steps=3)) == 0


def _saved_bytes(model):
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    model(_x(rows=64)).sum().backward()  # compiled first
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(_x(rows=64))
    return sum(size for pointer, size in held.items() if pointer not in owned)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("synced", [True, False])
def test_running_statistics_of_recomputed_blocks_move_once_on_the_plain_backend(whole, synced):
    def run(*, recomputed):
        torch.manual_seed(0)
        model, ctx = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2))), weft.local()
        if synced:
            model, ctx = weft.sync_batch_norm(model, ctx)
        if recomputed:
            model, ctx = weft.recompute(model, ctx, blocks="*")
            model, ctx = weft.compile(model, ctx, backend="eager", blocks=None if whole else "*")
        for step in range(3):
            model(torch.arange(12.0).view(4, 3).sin() + step).square().sum().backward()
        return [p.grad for p in model.parameters()] + list(model.buffers())

    for found, expected in zip(run(recomputed=True), run(recomputed=False), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_compiled_block_keeps_only_what_recompute_says():
    kept = [
        _saved_bytes(_pipeline(weft.local(), chosen=chosen, backend="aot_eager", blocks=Block)[0])
        for chosen in (None, {})
    ]
    assert kept[0] - kept[1] >= 2 * 64 * 16 * 4  # tanh's result in two blocks


def _with_inductor(ctx):
    model, ctx = weft.compile(_net(), ctx, blocks=Block, fullgraph=True)
    return _train(model, ctx)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_generates_code():
    # In a process of its own: inductor starts threads and sets variables.
    assert largest_difference(_train(_net(), weft.local()), run_ranks(_with_inductor, 1)[0]) < 1e-6


# -- one compilation per class -----------------------------------------------------------------------


class Other(Block):
    def forward(self, x):
        return super().forward(x) * 2


def test_a_repeated_block_is_compiled_once_per_class():
    counter = CompileCounterWithBackend("eager")
    model = _net(depth=12)
    model.blocks.append(Other())
    plain = copy.deepcopy(model)
    model.blocks.forward = plain.blocks.forward = None
    model, _ = weft.compile(
        nn.Sequential(model.embed, *[nn.Sequential(b) for b in model.blocks]),
        weft.local(),
        blocks=Block,
        backend=counter,
    )
    plain = nn.Sequential(plain.embed, *[nn.Sequential(b) for b in plain.blocks])
    assert torch.equal(model(_x()), plain(_x()))
    assert counter.frame_count == 2


@pytest.mark.slow
def test_many_classes_do_not_use_up_the_compilers_memory():
    """With one code object for all, the ninth class would not be compiled any more."""
    classes = [
        type(f"Block{i}", (Block,), {"forward": lambda self, x, i=i: Block.forward(self, x) * i}) for i in range(12)
    ]
    model = nn.Sequential(nn.Linear(8, 8), *[cls() for cls in classes])
    counter = CompileCounterWithBackend("eager")
    model, _ = weft.compile(model, weft.local(), blocks=Block, backend=counter, fullgraph=True)
    for _ in range(2):
        model(_x())
    assert counter.frame_count == 12


def test_other_sizes():
    for dynamic, graphs in ((None, 2), (True, 1), (False, 4)):
        counter = CompileCounterWithBackend("eager")
        model, _ = weft.compile(_net(), weft.local(), backend=counter, dynamic=dynamic)
        plain = _net()
        for rows in (4, 5, 6, 7):
            assert torch.equal(model(_x(rows=rows)), plain(_x(rows=rows)))
        assert counter.frame_count == graphs, dynamic


def test_without_gradients_and_in_eval():
    model, plain = weft.compile(_net(norm=True), weft.local(), backend="eager", fullgraph=True)[0], _net(norm=True)
    for each in (model, plain):
        each(_x())
        each.eval()
    with torch.no_grad():
        assert torch.equal(model(_x()), plain(_x()))


# -- contexts ----------------------------------------------------------------------------------------


def test_a_step_with_a_context_in_it_is_one_graph_and_stays_compiled():
    model, ctx = weft.with_precision(_net(), weft.local(), "fp32")
    counter = CompileCounterWithBackend("eager")

    @torch.compile(backend=counter, fullgraph=True)
    def step(x, ctx):
        x = x.to(ctx.device) * (ctx.rank + 1)
        return Block.forward(model.blocks[0], x) / ctx.world_size

    for i in range(5):
        step(_x(i), ctx)
    with torch._dynamo.config.patch(error_on_recompile=True):
        again, other = weft.with_precision(_net(), weft.local(), "fp32")
        step(_x(), other)
        step(_x(), weft.local())
    assert counter.frame_count == 1 and again is not model


# -- no trace ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [None, Block], ids=["whole", "blocks"])
def test_names_and_class_stay_and_copies_are_plain(blocks):
    plain = _net()
    model, _ = weft.compile(_net(), weft.local(), blocks=blocks, backend="eager")
    assert type(model) is Net and list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    model(_x())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        counter = CompileCounterWithBackend("eager")
        assert torch.equal(other(_x()), plain(_x()))
        again, _ = weft.compile(other, weft.local(), backend=counter)
        assert torch.equal(again(_x()), plain(_x())) and counter.frame_count == 1


def test_undo_gives_the_uncompiled_module_back():
    counter = CompileCounterWithBackend("eager")
    model, ctx = weft.recompute(_net(), weft.local(), blocks=Block)
    before = [part.__dict__.get("forward") for part in model.modules()]
    model, ctx = weft.compile(model, ctx, blocks=[Block, "head"], backend=counter)
    offer = weft.contract.offered(model, weft.contract.Undoable)[-1]
    offer.undo()
    offer.undo()
    assert [part.__dict__.get("forward") for part in model.modules()] == before
    assert torch.equal(model(_x()), _net()(_x())) and counter.frame_count == 0


def test_hooks_run_around_the_compiled_forward():
    model, seen = _net(), []
    model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model, _ = weft.compile(model, weft.local(), blocks=Block, backend="eager", fullgraph=True)
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    assert torch.equal(model.blocks[0](_x()), _net().blocks[0](_x() * 0)) and len(seen) == 1


# -- refused -----------------------------------------------------------------------------------------


def test_twice_is_refused():
    model, ctx = weft.compile(_net(), weft.local(), blocks="blocks.0", backend="eager")
    with pytest.raises(weft.errors.AlreadyApplied, match=r"(?s)this Net already has this transform.*found:.*fix:"):
        weft.compile(model, ctx, blocks="blocks.1", backend="eager")
    with pytest.raises(weft.errors.AlreadyApplied, match=r"(?s)found:    0\n.*fix:      model, ctx = weft.compile"):
        weft.compile(model.blocks, ctx, blocks="1", backend="eager")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"blocks": ["blocks.0", nn.Linear]}, r"found:    'blocks.0.one' in 'blocks.0'.*\n.*fix:"),
        ({"blocks": "blocks"}, r"found:    'blocks' \(ModuleList\)\n.*fix:      \"blocks\.\*\""),
        ({"blocks": nn.Conv1d}, "compile: no part of Net is chosen by class Conv1d\n.*found:.*fix:"),
        ({"backend": "inducktor"}, "backend = 'inducktor' is unknown\n.*found:.*expected: one of .*fix:"),
        ({"mode": "max-autotune", "options": {"a": 1}}, "cannot be used together\n.*found:.*fix:"),
        ({"backend": "aot_eager", "mode": "max-autotune"}, "no effect on backend 'aot_eager'\n.*found:.*fix:"),
        ({"backend": "eager", "options": {"a": 1}}, r"no effect on backend 'eager'\n  found:    options = .*fix:"),
    ],
)
def test_arguments_that_cannot_be_used(options, text):
    model = _net()
    with pytest.raises(ValueError, match=f"(?s){text}"):
        weft.compile(model, weft.local(), **options)
    assert not any("forward" in part.__dict__ for part in model.modules())


EARLIER = {
    "with_precision": lambda m, c: weft.with_precision(m, c, "bf16"),
    "sync_batch_norm": weft.sync_batch_norm,
    "recompute": lambda m, c: weft.recompute(m, c, blocks=Block),
    "replicate": weft.replicate,
    "fully_shard": lambda m, c: weft.fully_shard(m, c),
}


@pytest.mark.parametrize("earlier", EARLIER)
def test_it_comes_last(earlier):
    model, ctx = weft.compile(_net(), weft.local(), backend="eager")
    with pytest.raises(weft.errors.OrderError, match=f"(?s)found:.*expected: {earlier}, then compile\n.*fix:"):
        EARLIER[earlier](model, ctx)
    model, ctx = EARLIER[earlier](_net(), weft.local())
    weft.compile(model, ctx, backend="eager")


# -- several ranks -----------------------------------------------------------------------------------


def _on_ranks(ctx, policy, chosen, strategy, compile_options):
    torch._dynamo.reset()
    model, ctx = _pipeline(ctx, policy, chosen, strategy, **compile_options)
    return _train(model, ctx, policy, steps=10, rank=ctx.rank, ranks=ctx.world_size)


@pytest.mark.parametrize("blocks", [None, pytest.param("blocks.*", marks=pytest.mark.slow)], ids=["whole", "blocks"])
@pytest.mark.parametrize(
    ("policy", "strategy"),
    [(None, {}), *variant_cases((None, {"flat": True}), ("fp16", {"unused": "zero"}), ("bf16", {}))],
    ids=str,
)
def test_two_ranks_give_the_numbers_of_eager(policy, strategy, blocks):
    expected = run_ranks(_on_ranks, 2, policy, {}, strategy, {})
    found = run_ranks(_on_ranks, 2, policy, {}, strategy, {"backend": "eager", "fullgraph": True, "blocks": blocks})
    assert largest_difference(expected, found) == 0
    if policy is None:
        alone = _train(*_pipeline(weft.local()), steps=10)
        assert largest_difference(alone, found[0]) < 1e-6


def _permutation(ctx, order):
    """Losses, or the order that the error asks for."""
    torch._dynamo.reset()
    model = _net()
    try:
        for name in order:
            if name == "compile":
                model, ctx = weft.compile(model, ctx, backend="aot_eager")
            else:
                model, ctx = EARLIER[name](model, ctx)
    except weft.errors.OrderError as error:
        return str(error)
    optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(model.parameters(), 0.1), ctx)
    losses = []
    for i in range(3):
        loss = model(_x(i).chunk(2)[ctx.rank]).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert list(model.state_dict()) == list(_net().state_dict())
    return losses


@pytest.mark.slow
def test_every_permutation_gives_the_same_losses_or_names_the_order():
    names = ["with_precision", "recompute", "replicate", "compile"]
    right = run_ranks(_permutation, 2, names[:3])
    for order in itertools.permutations(names):
        found = run_ranks(_permutation, 2, order)
        if list(order) == names:
            assert found == right
        else:
            wrong = [(b, a) for a, b in itertools.pairwise(order) if names.index(a) > names.index(b)]
            assert any(f"{first}, then {second}" in found[0] for first, second in itertools.combinations(names, 2))
            assert wrong and found[0] == found[1] and "fix:" in found[0]


def _by_torch(model, ctx):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh)
    return fully_shard(model, mesh=ctx.mesh), ctx


def _by_weft(model, ctx):
    return weft.fully_shard(model, ctx, units=Block)


def _sharded(ctx, shard, options):
    torch._dynamo.reset()
    model, ctx = weft.recompute(_net(torch.float64), ctx, blocks=Block)
    model, ctx = shard(model, ctx)
    if options:
        model, ctx = weft.compile(model, ctx, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(4):
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            model(_x(i, dtype=torch.float64).chunk(2)[ctx.rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("shard", [pytest.param(_by_torch, marks=pytest.mark.variant), _by_weft])
@pytest.mark.parametrize("options", [{"blocks": Block, "fullgraph": True}, *variants({})], ids=["blocks", "whole"])
def test_units_of_fsdp2_are_gathered_outside_of_the_graphs(shard, options):
    expected = run_ranks(_sharded, 2, shard, {})
    found = run_ranks(_sharded, 2, shard, {"backend": "aot_eager", **options})
    assert largest_difference(expected, found) < 1e-15


def _different(ctx):
    errors = []
    model = _net()
    for options in ({"fullgraph": bool(ctx.rank)}, {"mode": "x" if ctx.rank else None}):
        try:
            weft.compile(model, ctx, backend="eager", **options)
        except (weft.errors.WeftError, ValueError) as error:
            errors.append((type(error).__name__, str(error)))
    return errors, "forward" in model.__dict__


def test_ranks_that_differ_raise_everywhere():
    for rank, (errors, changed) in enumerate(run_ranks(_different, 2)):
        assert [kind for kind, _ in errors] == ["ContextError", "ValueError" if rank else "PeerError"]
        assert "fullgraph" in errors[0][1] and "no effect" in errors[1][1] and not changed


def _compiled_before(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    if how == "wrapper":
        return torch.compile(model, backend="eager")
    if how:
        (model if how == "in place" else model[0]).compile(backend="eager")
    return model


def _strategies_over_compiled(ctx, how):
    found = []
    for strategy in ("replicate", "fully_shard", "zero"):
        model = _compiled_before(how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if strategy == "replicate":
            model, made = weft.replicate(model, ctx)
        elif strategy == "fully_shard":
            model, made = weft.fully_shard(model, ctx, units=nn.Linear, rebind=optimizer)
        else:
            model, optimizer, made = weft.zero_partition(model, optimizer, ctx, stage=2)
        for step in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # dynamo's, about hooks of FSDP2 that it does not trace
                model(torch.full((2, 2), step + ctx.rank + 1.0).double()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with weft.full_params(model, made):
            found.append([p.detach().clone() for p in model.parameters()])
    return found


@pytest.mark.slow
def test_strategies_take_what_torch_compiled_before():
    plain = run_ranks(_strategies_over_compiled, 2, "")
    for how in ("wrapper", "in place", "part"):
        for found, expected in zip(run_ranks(_strategies_over_compiled, 2, how), plain, strict=True):
            for mine, right in zip(found, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True)), how


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("wrapper", r"weft.compile\(model._orig_mod, ctx\)"),
        ("in place", r"weft.compile\(model, ctx\)  # in place of module.compile\(\)"),
        ("part", r"found:    0\n.*in place of module.compile\(\)"),
    ],
)
def test_compiling_twice_names_the_line_to_write(how, line):
    with pytest.raises(weft.errors.AlreadyApplied, match=f"(?s)compile.*{line}"):
        weft.compile(_compiled_before(how), weft.local())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.block(self.block(x)))


def _gradients_of_twice(policy, blocks, *, plain):
    torch.manual_seed(0)
    model, ctx = weft.with_precision(Twice(), weft.local(), policy)
    if not plain:
        model, ctx = weft.recompute(model, ctx, blocks=Block)
        model, ctx = weft.compile(model, ctx, blocks=blocks, backend="eager")
    loss = model(_x()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("policy", "blocks"),
    [
        *(("bf16", None), ("fp16", Block)),
        *variant_cases(("fp32", None), ("fp16", None), ("fp32", Block), ("bf16", Block)),
    ],
)
def test_a_recomputed_block_is_used_twice_under_autocast(policy, blocks):
    """Its weights are cast in each of its calls: what an earlier call has cast is not there in backward."""
    expected = _gradients_of_twice(policy, blocks, plain=True)
    limit = {"fp32": 0, "bf16": 2**-7, "fp16": 2**-10}[policy]  # the gradients of both calls are added in another order
    assert largest_difference(_gradients_of_twice(policy, blocks, plain=False), expected) <= limit


class _Divided(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(6, 4), nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))])

    def forward(self, tokens):
        return self.layers[0](self.embed(tokens))


def _of_two_axes(ctx):
    tokens, model = torch.arange(6).view(2, 3), _Divided().double()
    expected = model(tokens)
    model, ctx = weft.tensor_parallel(model, ctx, plan={"layers.*.0": "column", "layers.*.1": "row"})
    model, ctx = weft.fully_shard(model, ctx)
    with told("transforms/compile.py", "sharded over data and by layers") as it:
        weft.compile(model, ctx, backend="aot_eager")
    model = it.run(model=model, ctx=ctx)["model"]
    assert (model(tokens) - expected).abs().max() < 1e-12


@pytest.mark.slow
def test_a_whole_module_over_two_axes_is_compiled_by_blocks():
    run_ranks(_of_two_axes, 4, mesh={"data": 2, "tensor": 2})
