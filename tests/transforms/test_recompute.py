"""recompute: the same gradients, blocks run twice, and only what was chosen is kept."""

import copy
import pickle
from collections import Counter

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.variants import variant_cases
from weft.engines.torch.compute import activation_checkpoint
from weft.testing import largest_difference, run_ranks


class Block(nn.Module):
    def __init__(self, size=8, dropout=0.0):
        super().__init__()
        self.one = nn.Linear(size, 4 * size)
        self.drop = nn.Dropout(dropout)
        self.two = nn.Linear(4 * size, size)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return x + self.two(self.drop(torch.tanh(self.one(x))))


class Net(nn.Module):
    def __init__(self, size=8, depth=4, dropout=0.0):
        super().__init__()
        self.embed = nn.Linear(size, size)
        self.blocks = nn.ModuleList([Block(size, dropout) for _ in range(depth)])
        self.head = nn.Linear(size, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _net(dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options).to(dtype)


def _x(rank=0, rows=4, size=8, dtype=torch.float64):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def _gradients(model, x, seed=5):
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def _bitwise(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _runs(model):
    return [part.runs for part in model.modules() if isinstance(part, Block)]


# -- what is kept where ----------------------------------------------------------------------------


@pytest.mark.parametrize("save", [(), ["matmul"]])
def test_only_the_inputs_of_blocks_are_kept_on_the_cpu(monkeypatch, save):
    moved = []

    class SaveOnCpu(activation_checkpoint.save_on_cpu):
        def __init__(self, **options):
            super().__init__(**options)
            pack, self.pack_hook = self.pack_hook, lambda tensor: (moved.append(tensor), pack(tensor))[1]

    monkeypatch.setattr(activation_checkpoint, "save_on_cpu", SaveOnCpu)
    model, inputs = _net(), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model, _ = weft.recompute(model, weft.local(), blocks=Block, offload=True, save=save)
    model(_x()).sum().backward()
    assert [t.data_ptr() for t in moved] == [t.data_ptr() for t in inputs] and len(moved) == 4


def test_offloaded_inputs_are_refused_in_what_is_compiled():
    model, ctx = weft.recompute(_net(), weft.local(), blocks=Block, offload=True)
    with pytest.raises(ValueError, match="keep their inputs on the CPU"):
        weft.compile(model, ctx, backend="eager")


# -- same numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"every": 2},
        {"early_stop": False},
        {"determinism_check": "none"},
        {"keep_rng": False},
        {"offload": True},
        {"offload": True, "save": ["matmul"]},
        {"save": ["matmul"]},
        {"save": [torch.ops.aten.tanh, "aten.mm.default"]},
        {"save": lambda ctx, op, *args, **kwargs: op is torch.ops.aten.addmm.default},
    ],
    ids=lambda options: ",".join(options) or "default",
)
def test_gradients_are_the_same_bits(dtype, options):
    plain, x = _net(dtype), _x(dtype=dtype)
    model, _ = weft.recompute(copy.deepcopy(plain), weft.local(), blocks=Block, **options)
    assert _bitwise(_gradients(plain, x), _gradients(model, x))
    chosen = {"every": [2, 1, 2, 1]}.get(next(iter(options), ""), [2, 2, 2, 2])
    assert _runs(model) == chosen and _runs(plain) == [1] * 4


@pytest.mark.parametrize("save", [(), ["matmul"]])
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-true"])
def test_precision_is_the_same_in_the_second_run(policy, save):
    results = []
    for chosen in (False, True):
        model, ctx = weft.with_precision(_net(torch.float32), weft.local(), policy)
        if chosen:
            model, ctx = weft.recompute(model, ctx, blocks=Block, save=save)
        optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(model.parameters(), 0.1), ctx)
        for step in range(3):
            result = _gradients(model, _x(step, dtype=torch.float32))
            optimizer.step()
        results.append([*result, *(p.detach() for p in model.parameters())])
    assert _bitwise(*results)
    assert _runs(model) == [6] * 4


def test_accumulated_gradients_are_the_same_bits():
    results = []
    for chosen in (False, True):
        model, ctx = _net(), weft.local()
        if chosen:
            model, ctx = weft.recompute(model, ctx, blocks="blocks.*")
        model, windows, ctx = weft.accumulate_grads(model, [_x(i) for i in range(6)], ctx, steps=3)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for window in windows:
            for x in window:
                (model(x).square().mean() / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    assert _bitwise(*results)


def test_dropout_drops_the_same_only_with_the_random_state():
    plain = _net(dropout=0.5)
    expected, x = _gradients(plain, _x()), _x()
    state = torch.get_rng_state()
    kept, _ = weft.recompute(copy.deepcopy(plain), weft.local(), blocks=Block)
    assert _bitwise(expected, _gradients(kept, x))
    assert torch.equal(torch.get_rng_state(), state), "the second run moves the random state on"
    lost, _ = weft.recompute(copy.deepcopy(plain), weft.local(), blocks=Block, keep_rng=False)
    with pytest.raises(weft.errors.ProbeFailed, match="returned something else when it was computed again"):
        _gradients(lost, x)
    lost, _ = weft.recompute(copy.deepcopy(plain), weft.local(probes="off"), blocks=Block, keep_rng=False)
    assert not _bitwise(expected, _gradients(lost, x))


def test_inputs_that_need_gradients_or_not():
    for needs in (False, True):
        plain = _net()
        model, _ = weft.recompute(copy.deepcopy(plain), weft.local(), blocks=[Block, "embed"])
        x, y = (_x().requires_grad_(needs) for _ in range(2))
        assert _bitwise(_gradients(plain, x), _gradients(model, y))
        assert not needs or torch.equal(x.grad, y.grad)


def test_frozen_blocks_are_not_run_again():
    plain = _net()
    plain.embed.requires_grad_(False)
    plain.blocks[:2].requires_grad_(False)
    model, _ = weft.recompute(plain, weft.local(), blocks=Block)
    model(_x()).sum().backward()
    assert _runs(model) == [1, 1, 2, 2]


def test_a_module_that_is_a_block_itself_and_one_used_twice():
    plain = _net()
    model, _ = weft.recompute(copy.deepcopy(plain), weft.local(), blocks=lambda name, part: name == "blocks.1")
    model.blocks[2] = model.blocks[1]
    plain.blocks[2] = plain.blocks[1]
    assert _bitwise(_gradients(plain, _x()), _gradients(model, _x()))
    assert model.blocks[1].runs == 4
    block = Block().double()
    whole, _ = weft.recompute(copy.deepcopy(block), weft.local(), blocks=lambda name, part: True)
    assert _bitwise(_gradients(block, _x()), _gradients(whole, _x()))
    root = copy.deepcopy(block)
    root, _ = weft.recompute(root, weft.local(), blocks=root)
    assert _bitwise(_gradients(block, _x()), _gradients(root, _x()))


def test_casts_of_a_shared_block_are_not_remembered_from_one_run_to_the_next():
    results = []
    for save in ((), ["matmul"]):
        model = _net(torch.float32)
        model.blocks[1] = model.blocks[0]
        model, ctx = weft.with_precision(model, weft.local(), "bf16")
        model, ctx = weft.recompute(model, ctx, blocks=Block, save=save)
        results.append(_gradients(model, _x(dtype=torch.float32)))
        assert torch.is_autocast_cache_enabled()
    assert largest_difference(*results) < 0.01


# -- what passes through blocks ----------------------------------------------------------------------


class Odd(nn.Module):
    """Arguments and results of all kinds, with names that torch's own function has too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.seen = []

    def forward(self, x, mask=None, *more, debug=False, use_reentrant="yes", pair=None, scale=None):
        self.seen.append((mask, more, debug, use_reentrant))
        y = torch.sin(x * self.weight)
        if pair is not None:
            y = y + torch.exp(pair["a"][0]) * self.weight
        if scale is not None:
            y = y * torch.exp(scale)
        return {"y": y, "none": None, "size": 3, "both": (y * y, [x])}


def test_arguments_and_results_of_all_kinds_pass():
    model, _ = weft.recompute(nn.Sequential(Odd()), weft.local(), blocks=Odd)
    odd, plain = model[0], Odd()
    results = []
    for each in (odd, plain):
        x, a, scale = (torch.full((3,), v, requires_grad=True) for v in (0.5, 0.3, 0.2))
        arguments = {"debug": 7, "use_reentrant": None, "pair": {"a": [a]}, "scale": scale}
        out = each(x, None, "more", 4, **arguments)
        assert out["none"] is None and out["size"] == 3 and out["both"][1][0] is x
        (out["y"].sum() + out["both"][0].sum()).backward()
        results.append([out["y"], x.grad, a.grad, scale.grad, each.weight.grad])
    assert _bitwise(*results)
    assert odd.seen == [(None, ("more", 4), 7, None)] * 2 and len(plain.seen) == 1


def test_an_argument_that_is_changed_in_place_is_noticed():
    model, _ = weft.recompute(nn.Sequential(Odd()), weft.local(), blocks=Odd)
    scale = torch.zeros(3)
    y = model[0](torch.ones(3), scale=scale)["y"]
    scale += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_error_in_a_block_is_the_users_own():
    model, _ = weft.recompute(_net(), weft.local(), blocks=Block)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model.blocks[0](torch.ones(2, 3).double())
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        model.blocks[0](_x(), wrong=3)
    assert len(_gradients(model, _x())) == 1 + len(list(model.parameters()))


# -- less is kept, less is done ----------------------------------------------------------------------


def _kept_bytes(model, x):
    """Bytes held between forward and backward, seen from outside: tensors packed by autograd itself."""
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    owned = {t.untyped_storage().data_ptr() for t in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(size for pointer, size in held.items() if pointer not in owned)


def test_fewer_bytes_are_kept():
    x = _x(rows=64)
    kept = {}
    for name, options in {"all": None, "one in two": {"every": 2}, "none": {}}.items():
        model = _net()
        if options is not None:
            model, _ = weft.recompute(model, weft.local(), blocks=Block, **options)
        kept[name] = _kept_bytes(model, x)
    inside = 64 * 8 * 8 * (4 + 1)  # a block keeps tanh's result, and its input
    assert kept["all"] >= kept["one in two"] + 2 * inside * 4 // 5
    assert kept["one in two"] >= kept["none"] + 2 * inside * 4 // 5


class Attending(Block):
    def forward(self, x):
        y = super().forward(x)[None, None]
        return scaled_dot_product_attention(y, y, y)[0, 0]


class _Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen[op._opname] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("save", "runs"),
    [
        ((), {"addmm": 2, "tanh": 2, "attention": 2}),
        (["matmul"], {"addmm": 1, "tanh": 2, "attention": 2}),
        (["attention", "tanh"], {"addmm": 2, "tanh": 1, "attention": 1}),
        ([torch.ops.aten.addmm, torch.ops.aten.tanh.default], {"addmm": 1, "tanh": 1, "attention": 2}),
        (lambda ctx, op, *a, **k: torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE, {"addmm": 1, "tanh": 1}),
    ],
    ids=["none", "matmul", "attention,tanh", "ops", "policy"],
)
def test_saved_operations_are_not_done_again(save, runs):
    model = nn.Sequential(nn.Linear(8, 8), Attending()).double()
    model, _ = weft.recompute(model, weft.local(), blocks=Attending, save=save, early_stop=False)
    with _Counting() as forward:
        loss = model(_x()).sum()
    with _Counting() as backward:
        loss.backward()
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    for name, count in runs.items():
        op, once = (attention, 1) if name == "attention" else (name, 1)
        inside = forward.seen[op] - (op == "addmm")  # the linear layer in front
        per_run = 2 if op == "addmm" else once
        assert inside == per_run
        assert backward.seen[op] == per_run * (count - 1), name


def test_without_gradients_nothing_is_done():
    model, _ = weft.recompute(_net(), weft.local(), blocks=Block)
    plain = _net()
    with torch.no_grad():
        assert torch.equal(model(_x()), plain(_x()))
    with torch.inference_mode():
        assert torch.equal(model(_x()), plain(_x()))
    assert torch.equal(model.eval()(_x()), plain.eval()(_x()))
    assert _runs(model) == [3] * 4
    assert _bitwise(_gradients(model, _x()), _gradients(plain, _x()))


def test_second_derivatives_and_two_backwards():
    results = []
    for chosen in (False, True):
        model = _net()
        if chosen:
            model, _ = weft.recompute(model, weft.local(), blocks=Block)
        x = _x().requires_grad_()
        loss = model(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.square().sum().backward()
        again = model(x).sum()
        again.backward(retain_graph=True)
        again.backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert largest_difference(*results) < 1e-15


# -- state that forward changes ----------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = norm or nn.BatchNorm1d(8)

    def forward(self, x):
        return torch.relu(self.norm(self.layer(x)))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_move_once(momentum):
    plain = nn.Sequential(*[Normed(nn.BatchNorm1d(8, momentum=momentum)) for _ in range(2)]).double()
    model, _ = weft.recompute(copy.deepcopy(plain), weft.local(), blocks=Normed)
    shared = copy.deepcopy(plain)
    shared, _ = weft.recompute(nn.Sequential(*shared), weft.local(), blocks=[*shared, shared[0].norm][:2])
    for each in (plain, model, shared):
        for step in range(3):
            # Two calls before one backward: the statistics that autograd has saved are not disturbed.
            (each(_x(step)).sum() + each(_x(step + 1)).square().sum()).backward()
        each.eval()
        each(_x()).sum().backward()
    for each in (model, shared):
        assert _bitwise(plain.buffers(), each.buffers())
        assert _bitwise([p.grad for p in plain.parameters()], [p.grad for p in each.parameters()])
    assert plain[0].norm.num_batches_tracked == 6


class Counts(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.how = how
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.how == "in place":
            self.count += 1
        elif self.how == "anew":
            self.count = self.count + 1
        elif self.how == "cache":
            self.register_buffer("table", torch.ones(8), persistent=False)
        return torch.tanh(self.layer(x)) * self.count.clone()


@pytest.mark.parametrize("how", ["in place", "anew"])
def test_a_block_that_changes_other_buffers_is_refused(how):
    model, _ = weft.recompute(nn.Sequential(nn.Sequential(Counts(how))), weft.local(), blocks="0")
    with pytest.raises(
        weft.errors.ContractError, match=r"(?s)block '0' changes buffers.*found:    0.count\n.*name != \"0\""
    ):
        model(torch.ones(2, 8))
    with torch.no_grad():
        model(torch.ones(2, 8))


@pytest.mark.parametrize("how", ["not", "cache"])
def test_a_block_may_read_buffers_and_add_some(how):
    model, _ = weft.recompute(nn.Sequential(Counts(how)), weft.local(), blocks=Counts)
    model(torch.ones(2, 8)).sum().backward()


def test_a_second_run_that_differs_is_noticed():
    class Fickle(Block):
        def forward(self, x):
            y = super().forward(x)
            return y * y.sum(0) if self.runs % 2 else y * y.sum()

    model, _ = weft.recompute(nn.Sequential(Fickle()).double(), weft.local(), blocks=Fickle)
    with pytest.raises(weft.errors.ProbeFailed):
        model(_x()).sum().backward()
    model, _ = weft.recompute(nn.Sequential(Fickle()).double(), weft.local(probes="off"), blocks=Fickle)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
        model(_x()).sum().backward()


# -- no trace ----------------------------------------------------------------------------------------


def test_names_and_class_stay_and_copies_are_plain():
    plain = _net()
    model, _ = weft.recompute(copy.deepcopy(plain), weft.local(), blocks=Block)
    assert type(model) is Net and all(type(block) is Block for block in model.blocks)
    assert list(model.state_dict()) == list(plain.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert _bitwise(_gradients(other, _x()), _gradients(plain, _x()))
        assert _runs(other) == [1] * 4
        assert all(p is not q for p, q in zip(other.parameters(), model.parameters(), strict=True))
        again, _ = weft.recompute(other, weft.local(), blocks=Block)
        again(_x()).sum().backward()
        assert _runs(again) == [3] * 4


def test_undo_leaves_the_module_as_it_was():
    model = _net()
    before = [dict(part.__dict__) for part in model.modules()]
    model, _ = weft.recompute(model, weft.local(), blocks=Block)
    (offer,) = weft.contract.offered(model, weft.contract.Undoable)
    offer.undo()
    offer.undo()
    assert [dict(part.__dict__, _weft_marks=0) for part in model.modules()] == [dict(d, _weft_marks=0) for d in before]
    model(_x()).sum().backward()
    assert _runs(model) == [1] * 4


def test_hooks_of_a_block_run_once():
    model = _net()
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda *a: calls.append("before"))
    model, _ = weft.recompute(model, weft.local(), blocks=Block)
    model.blocks[0].register_forward_hook(lambda *a: calls.append("after"))
    model(_x()).sum().backward()
    assert calls == ["before", "after"] and _runs(model) == [2] * 4


# -- refused -----------------------------------------------------------------------------------------


def test_twice_is_refused():
    model, ctx = weft.recompute(_net(), weft.local(), blocks="blocks.0")
    with pytest.raises(weft.errors.AlreadyApplied, match=r"(?s)this Net already has this transform.*found:.*fix:"):
        weft.recompute(model, ctx, blocks="blocks.1")
    with pytest.raises(weft.errors.AlreadyApplied, match=r"(?s)found:    0\n.*fix:      model, ctx = weft.recompute"):
        weft.recompute(model.blocks, ctx, blocks="1")
    with pytest.raises(weft.errors.AlreadyApplied, match=r"(?s)found:    the module itself\n.*fix:"):
        weft.recompute(model.blocks[0], ctx, blocks="one")


def _torch_wrapper(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.blocks[1] = checkpoint_wrapper(model.blocks[1])


def _torch_hooks(model):
    from torch.distributed._composable import checkpoint

    checkpoint(model.blocks[1])


def _transformers_switch(model):
    model.blocks[1].gradient_checkpointing = True


@pytest.mark.parametrize("other", [_torch_wrapper, _torch_hooks, _transformers_switch])
def test_blocks_that_are_checkpointed_in_another_way_are_refused(other):
    model = _net()
    other(model)
    with pytest.raises(weft.errors.AlreadyApplied, match=r"(?s)found:    blocks.1\n.*fix:"):
        weft.recompute(model, weft.local(), blocks=Block)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"blocks": ["blocks.0", "blocks.0.one"]}, ValueError, r"found:    'blocks.0.one' in 'blocks.0'\n.*fix:"),
        ({"blocks": "blocks"}, ValueError, r"found:    'blocks' \(ModuleList\)\n.*fix:      \"blocks\.\*\""),
        ({"blocks": nn.Conv1d}, ValueError, "recompute: no part of Net is chosen by class Conv1d\n.*found:.*fix:"),
        ({"blocks": None}, TypeError, "recompute: None chooses no parts.*found:.*fix:"),
        ({"blocks": Block, "every": 0}, ValueError, "every = 0 cannot be used.*found:.*fix:"),
        ({"blocks": Block, "every": True}, ValueError, "every = True cannot be used.*found:.*fix:"),
        ({"blocks": Block, "determinism_check": "bits"}, ValueError, "found:    'bits'.*'default' or 'none'.*fix:"),
        ({"blocks": Block, "save": "matmul"}, TypeError, r"found:    'matmul'\n.*fix:.*save=\['matmul'\]"),
        (
            {"blocks": Block, "save": ["matmull"]},
            ValueError,
            r"not an operation of torch\n.*found:    'matmull'\n.*fix:",
        ),
        (
            {"blocks": Block, "save": ["weft.own"]},
            ValueError,
            r"not an operation of torch\n.*found:    'weft.own'.*fix:",
        ),
        ({"blocks": Block, "save": ["linear"]}, ValueError, "aten.linear.default cannot be saved.*found:.*fix:"),
        (
            {"blocks": Block, "save": [torch.ops.aten.matmul.default]},
            ValueError,
            "decomposes into others.*'matmul', 'attention', 'convolution'.*fix:",
        ),
        ({"blocks": Block, "save": [torch.matmul]}, TypeError, "is not an operation.*found:.*fix:"),
    ],
)
def test_arguments_that_cannot_be_used(options, error, text):
    model = _net()
    with pytest.raises(error, match=f"(?s){text}"):
        weft.recompute(model, weft.local(), **options)
    assert _runs(model) == [0] * 4 and "forward" not in model.blocks[0].__dict__


@pytest.mark.parametrize("later", ["replicate", "compile"])
def test_order(later):
    options = {"backend": "eager"} if later == "compile" else {}
    model, ctx = getattr(weft, later)(_net(), weft.local(), **options)
    with pytest.raises(weft.errors.OrderError, match=f"(?s)found:.*expected: recompute, then {later}\n.*fix:"):
        weft.recompute(model, ctx, blocks=Block)
    for earlier in (lambda m, c: weft.with_precision(m, c, "bf16"), weft.sync_batch_norm):
        model, ctx = weft.recompute(_net(), weft.local(), blocks=Block)
        with pytest.raises(weft.errors.OrderError, match=r"(?s)found:.*, then recompute\n.*fix:"):
            earlier(model, ctx)


# -- several ranks -----------------------------------------------------------------------------------


def _train(ctx, strategy, chosen, steps, policy=None, save=(), norms=False):
    from torch.distributed.fsdp import fully_shard

    model = _net(torch.float64 if policy is None else torch.float32, depth=2, dropout=0.0)
    if norms:
        model.blocks.append(Normed().double())
        model, ctx = weft.sync_batch_norm(model, ctx)
    if policy is not None:
        model, ctx = weft.with_precision(model, ctx, policy)
    if chosen:
        model, ctx = weft.recompute(model, ctx, blocks="blocks.*", save=save)
    x = [_x(i, dtype=next(model.parameters()).dtype) for i in range(4)]
    if strategy == "fully_shard":
        for block in model.blocks:
            fully_shard(block, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
    elif strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if policy is not None and strategy != "fully_shard":
        optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    if steps == 1:
        windows = [[rows] for rows in x]
    else:
        model, windows, ctx = weft.accumulate_grads(model, x, ctx, steps=steps)
    for window in windows:
        for rows in window:
            mine = rows.chunk(ctx.world_size)[ctx.rank]
            (model(mine).square().mean() / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [p.full_tensor() if strategy == "fully_shard" else p for p in model.parameters()]
    return [p.detach().clone() for p in values], _runs(model), [b.clone() for b in model.buffers()]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("replicate", {"policy": "fp16"}),
        ("replicate", {"norms": True}),
        ("fully_shard", {"save": ["matmul"]}),
        ("fully_shard", {"policy": "bf16"}),
        *variant_cases(("replicate", {}), ("replicate", {"save": ["matmul"]}), ("replicate", {"policy": "bf16"})),
        *variant_cases(("fully_shard", {})),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()) or "plain",
)
def test_two_ranks_give_the_same_bits_as_without(strategy, options):
    steps = 1 if strategy == "fully_shard" else 2  # torch's own fully_shard offers no switch
    without = run_ranks(_train, 2, strategy, False, steps, **options)
    found = run_ranks(_train, 2, strategy, True, steps, **options)
    for (expected, once, statistics), (values, runs, others) in zip(without, found, strict=True):
        assert _bitwise(expected, values) and _bitwise(statistics, others)
        assert runs == [2 * n for n in once] and once == [4] * len(once)
    if not options.get("policy"):
        alone = run_ranks(_train, 1, "none", False, steps, **options)
        assert largest_difference(alone[0][0], found[0][0]) < 1e-12


def _different(ctx):
    model = _net()
    errors = []
    for options in ({"every": 1 + ctx.rank}, {"every": -1 if ctx.rank else 1}):
        try:
            weft.recompute(model, ctx, blocks=Block, **options)
        except (weft.errors.WeftError, ValueError) as error:
            errors.append((type(error).__name__, str(error)))
    return errors, "forward" in model.blocks[0].__dict__


def test_ranks_that_differ_raise_everywhere():
    for rank, (errors, changed) in enumerate(run_ranks(_different, 2)):
        assert [kind for kind, _ in errors] == ["ContextError", "ValueError" if rank else "PeerError"]
        assert "blocks" in errors[0][1] and "every = -1" in errors[1][1] and not changed
