"""Layers that are cut over ranks: the numbers of one process, the memory and messages of the plan, and refusals."""

import ast
import collections
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.lm import LM, PLAN, WIDTH, difference, loss_of, model, optimizer_of, reference, samples, whole
from tests.variants import variant_cases, variants
from weft.errors import AlreadyApplied, ContextError, ContractError, OrderError, ProbeFailed
from weft.testing import largest_difference, run_ranks

ROWS, BATCH = 76, 8  # ten batches, of which the last has four rows


def train(ctx, sequence, steps, strategy=None):
    """Losses, norms and parameters of ten batches in windows."""
    module, ctx = weft.tensor_parallel(model(), ctx, plan=PLAN, sequence=sequence)
    optimizer = optimizer_of(module)
    if strategy == "replicate":
        module, ctx = weft.replicate(module, ctx)
    elif strategy == "fully_shard":
        module, ctx = weft.fully_shard(module, ctx, rebind=optimizer)
    elif strategy is not None:
        module, optimizer, ctx = weft.zero_partition(module, optimizer, ctx, stage=int(strategy[-1]))
    loader, ctx = weft.shard_data(DataLoader(TensorDataset(samples(ROWS)), batch_size=BATCH // ctx.data_size), ctx)
    module, loader, ctx = weft.accumulate_grads(module, loader, ctx, steps=steps)
    losses, norms = [], []
    for window in loader:
        total = 0.0
        for (rows,) in window:
            loss = loss_of(module, rows) * window.share
            loss.backward()
            total += float(loss.detach())
        losses.append(float(weft.reduce(torch.tensor(total, dtype=torch.float64), ctx, "mean")))
        norms.append(float(weft.clip_grads(module, ctx, max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: whole(p) for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "steps", "sequence"),
    [
        (2, 1, False),  # several micro-batches and a divided sequence: with a strategy, below
        *(pytest.param(*each, marks=pytest.mark.variant) for each in [(2, 3, True), (4, 1, True), (4, 3, False)]),
    ],
)
def test_training_is_that_of_one_process(ranks, steps, sequence):
    losses, norms, expected = reference(samples(ROWS), BATCH, steps)
    for found in run_ranks(train, ranks, sequence, steps, mesh={"tensor": ranks}, probes="auto"):
        assert difference(losses, found[0]) < 1e-12
        assert difference(norms, found[1]) < 1e-12
        assert difference(expected, found[2]) < 1e-12


@pytest.mark.parametrize(
    ("strategy", "steps", "sequence"),
    variant_cases(
        ("fully_shard", 1, True),
        ("replicate", 3, True),
        ("fully_shard", 3, False),
        ("zero1", 3, True),
        ("zero2", 3, False),
        ("zero3", 3, True),
    ),
)
def test_with_a_strategy_over_the_data_axes(strategy, steps, sequence):
    losses, norms, expected = reference(samples(ROWS), BATCH, steps)
    for found in run_ranks(train, 4, sequence, steps, strategy, mesh={"data": 2, "tensor": 2}, probes="auto"):
        assert difference(losses, found[0]) < 1e-12
        assert difference(norms, found[1]) < 1e-12
        assert difference(expected, found[2]) < 1e-12


# -- gradients of which each rank has a part ---------------------------------------------------------


def twice(ctx, sequence):
    """Gradients of two backward passes, a torn one in between."""
    module, ctx = weft.tensor_parallel(model(), ctx, plan=PLAN, sequence=sequence)
    first, second = samples(8).chunk(2)
    loss_of(module, first).backward()
    torn = loss_of(module, second)
    torn.register_hook(_raise)
    with pytest.raises(RuntimeError, match="torn"):
        torn.backward()
    loss_of(module, second).backward()
    return {name: whole(p.grad) for name, p in module.named_parameters()}


def _raise(_):
    raise RuntimeError("torn")


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [True, *variants(False)])
def test_a_second_backward_pass_adds_to_what_was_added_up(sequence):
    module = model()
    for rows in samples(8).chunk(2):
        loss_of(module, rows).backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    for found in run_ranks(twice, 2, sequence, mesh={"tensor": 2}):
        assert difference(expected, found) < 1e-12


def observed(ctx, early):
    """What a hook on a row layer sees."""
    module, seen = model(), []
    down = next(part for name, part in module.named_modules() if name.endswith("down"))
    for step in ("hook", "cut") if early else ("cut", "hook"):
        if step == "hook":
            down.register_forward_hook(lambda part, args, output: seen.append(output.detach().clone()))
        else:
            cut, _ = weft.tensor_parallel(module, ctx, plan=PLAN)
    cut(samples(4)[:, :-1])
    return [type(one) for one in seen], [one.sum() for one in seen]


@pytest.mark.parametrize("early", [True, *variants(False)])
def test_a_hook_on_a_row_layer_sees_what_one_process_returns(early):
    module, seen = model(), []
    next(part for name, part in module.named_modules() if name.endswith("down")).register_forward_hook(
        lambda part, args, output: seen.append(output.detach().clone())
    )
    module(samples(4)[:, :-1])
    for types, sums in run_ranks(observed, 2, early, mesh={"tensor": 2}):
        assert types == [torch.Tensor] and abs(sums[0] - seen[0].sum()) < 1e-12


def left(ctx):
    """Gradients of a window that was left after one of two batches, and of the one after it."""
    module, ctx = weft.tensor_parallel(model(), ctx, plan=PLAN, sequence=True)
    module, loader, ctx = weft.accumulate_grads(module, list(samples(16).chunk(4)), ctx, steps=2)
    for number, window in enumerate(loader):
        for rows in window:
            loss_of(module, rows).backward()
            if not number:
                break
    return {name: whole(p.grad) for name, p in module.named_parameters()}


def test_a_window_that_was_left_is_added_up_with_the_next():
    module = model()
    first, _, third, fourth = samples(16).chunk(4)
    for rows in (first, third, fourth):
        loss_of(module, rows).backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    for found in run_ranks(left, 2, mesh={"tensor": 2}):
        assert difference(expected, found) < 1e-12


def skipped(ctx, cut):
    module = model()
    if cut:
        module, ctx = weft.tensor_parallel(module, ctx, plan=PLAN, sequence=True)
    module, ctx = weft.replicate(module, ctx)
    mine = list(samples(16).chunk(ctx.data_size)[ctx.data_rank].chunk(2))
    module, loader, ctx = weft.accumulate_grads(module, mine, ctx, steps=2)
    for window in loader:
        for number, rows in enumerate(window):
            if not number or not ctx.data_rank:
                loss_of(module, rows).backward()
    return dict(weft.full_grads(module, ctx))


@pytest.mark.slow
def test_the_ranks_of_one_batch_may_skip_the_last_one_together():
    expected, _ = run_ranks(skipped, 2, False)
    for found in run_ranks(skipped, 4, True, mesh={"data": 2, "tensor": 2}):
        assert difference(expected, found) < 1e-12


def forgotten(ctx):
    plan = {pattern: style for pattern, style in PLAN.items() if pattern != "blocks.*.attn.norm"}
    module, ctx = weft.tensor_parallel(model(), ctx, plan=plan)
    with pytest.raises(ContractError) as error:
        loss_of(module, samples(4)).backward()
    return str(error.value)


def test_a_whole_part_between_columns_and_rows_that_no_style_names_is_noticed():
    for text in run_ranks(forgotten, 2, mesh={"tensor": 2}):
        assert "attn.norm.weight" in text and 'attn.norm": "replicate"' in text


# -- memory and messages -----------------------------------------------------------------------------


class Messages(TorchDispatchMode):
    """Counts collectives by kind."""

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = func.overloadpacket.__name__.strip("_").replace("_", "")
        for known in ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast"):
            if kind.startswith(known) and func.namespace in ("_c10d_functional", "c10d"):
                self.found[known] += 1
        return func(*args, **(kwargs or {}))


def count(ctx, sequence):
    module, ctx = weft.tensor_parallel(model(), ctx, plan=PLAN, sequence=sequence)
    held = {n: p.to_local().numel() if hasattr(p, "to_local") else p.numel() for n, p in module.named_parameters()}
    loss_of(module, samples(4)).backward()  # the first pass compares gradients
    forward, backward = Messages(), Messages()
    with forward:
        loss = loss_of(module, samples(4))
    with backward:
        loss.backward()
    return held, dict(forward.found), dict(backward.found)


BLOCKS = 2


@pytest.mark.parametrize(
    ("sequence", "forward", "backward"),
    [
        # The embedding, and two rows per block; the head's logits. The arguments of attention, `up` and head; the sum.
        (False, {"allreduce": 1 + 2 * BLOCKS, "allgather": 1}, {"allreduce": 2 * BLOCKS + 1 + 1}),
        # The embedding; per block two arguments are gathered and two results scattered; the end of the blocks; the
        # logits. In backward the other way round.
        (
            True,
            {"allreduce": 1, "allgather": 2 * BLOCKS + 1 + 1, "reducescatter": 2 * BLOCKS},
            {"allreduce": 1 + 1, "allgather": 2 * BLOCKS + 1, "reducescatter": 2 * BLOCKS},
        ),
    ],
)
def test_memory_and_messages_are_those_of_the_plan(sequence, forward, backward):
    plain = {name: p.numel() for name, p in model().named_parameters()}
    cut = {name for name in plain if re.search(r"emb|attn\.([qkv]\.|out\.w)|up|down\.weight", name)}
    for rank, (held, *messages) in enumerate(run_ranks(count, 2, sequence, mesh={"tensor": 2}, probes="off")):
        assert {name for name in plain if held[name] != plain[name]} == cut
        assert held["emb.weight"] == (17, 16)[rank] * WIDTH
        assert all(held[name] * 2 == plain[name] for name in cut - {"emb.weight"})
        assert messages == [forward, backward]


# -- what is refused ---------------------------------------------------------------------------------


class FixedHeads(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (y.view(batch, length, self.heads, -1).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.out = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.out(gate * up)


class Scaled(nn.Sequential):
    """A layer with an attribute that draws."""

    attention_dropout: float


def _heads(count):
    module = nn.Sequential(FixedHeads(count))
    return module


def _tied():
    module = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    module[1].weight = module[0].weight
    return module


MLP = {"0": "column", "2": "row"}


def mlp(width=8, between=None):
    return nn.Sequential(nn.Linear(4, width), between or nn.ReLU(), nn.Linear(width, 4))


ATTENTION = {"*.[qkv]": "column", "*.out": "row"}
REFUSED = {
    "heads": (lambda: _heads(3), ATTENTION, {}, ContextError, "heads of 0 is not divisible by the 2 ranks"),
    "features": (lambda: mlp(7), MLP, {}, ContextError, "7 features, 2 ranks"),
    "rows": (
        lambda: nn.Sequential(nn.Embedding(1, 4)),
        {"0": "vocab"},
        {},
        ContextError,
        "1 rows, 2 ranks: 1 for each of 1",
    ),
    "tied": (_tied, {"0": "vocab"}, {}, ValueError, "0.weight: 'vocab', 1.weight: whole"),
    "two styles": (mlp, {"0": "column", "*": "row"}, {}, (ValueError, TypeError), "two styles|cannot be cut"),
    "nothing": (mlp, {"nowhere.*": "column"}, {}, ValueError, "matches no part"),
    "parameter": (mlp, {"0.weight": "column"}, {}, ValueError, "names parameters: 0.weight"),
    "kind": (mlp, {"1": "column"}, {}, TypeError, "1 cannot be cut as 'column'"),
    "word": (mlp, {"0": "columns"}, {}, ValueError, "'columns'"),
    "renormalized": (
        lambda: nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)),
        {"0": "vocab"},
        {},
        TypeError,
        "max_norm=1.0",
    ),
    "no plan": (mlp, "auto", {}, ValueError, "plan={'0': 'column', '2': 'row'}"),
    "no such axis": (mlp, MLP, {"axis": "nowhere"}, ContextError, "nowhere"),
    "no blocks": (mlp, MLP, {"sequence": True}, ValueError, "needs one list of blocks"),
    "uncovered": (
        LM,
        {pattern: style for pattern, style in PLAN.items() if "norm?" not in pattern},
        {"sequence": True},
        ContractError,
        "blocks.0.norm1.weight",
    ),
}


def refuse(ctx):
    found = {}
    for name, (make, plan, options, kinds, text) in REFUSED.items():
        module = make()
        state = {key: value.clone() for key, value in module.state_dict().items()}
        with pytest.raises(kinds) as error:
            weft.tensor_parallel(module, ctx, plan=plan, **options)
        found[name] = (text, str(error.value))
        assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items()), name
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()), name
    return found


def test_what_cannot_be_exact_is_refused_before_anything_changes():
    for found in run_ranks(refuse, 2, mesh={"tensor": 2}):
        for name, (text, said) in found.items():
            assert re.search(re.escape(text).replace(r"\|", "|"), said), f"{name}: {said}"
            assert "expected:" in said, name


MEASURED = {
    "fixed heads": (lambda: _heads(4), ATTENTION, (2, 3, 16)),
    "taken apart": (lambda: nn.Sequential(Packed()), {"0.both": "column", "0.out": "row"}, (2, 3, 16)),
    "dropout": (lambda: mlp(8, nn.Dropout(0.1)), MLP, (64, 4)),
}


def measure(ctx):
    found = {}
    for name, (make, plan, shape) in MEASURED.items():
        module, _ = weft.tensor_parallel(make(), ctx, plan=plan)
        with pytest.raises(ProbeFailed) as error:
            module(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        found[name] = str(error.value)
    return found


def test_what_cannot_be_exact_is_found_in_the_first_call():
    for found in run_ranks(measure, 2, mesh={"tensor": 2}):
        for name, text in found.items():
            assert "the ranks do not compute together what" in text, f"{name}: {text}"


def along_data(ctx):
    with pytest.raises(ContextError, match="batches differ along 'data'"):
        weft.tensor_parallel(mlp(), ctx, plan=MLP, axis="data")


def test_an_axis_along_which_batches_differ_is_refused():
    run_ranks(along_data, 2)


def uneven_sequence(ctx):
    module, ctx = weft.tensor_parallel(model(), ctx, plan=PLAN, sequence=True)
    with pytest.raises(ValueError, match=r"shape \(4, 7, 16\), 2 ranks"):
        module(samples(4)[:, :7])


def test_a_sequence_that_cannot_be_cut_is_named():
    run_ranks(uneven_sequence, 2, mesh={"tensor": 2})


def orders(ctx):
    module = model()
    optimizer = optimizer_of(module)
    with pytest.raises(OrderError, match="rebind"):
        weft.tensor_parallel(module, ctx, plan=PLAN)
    module, ctx = weft.tensor_parallel(module, ctx, plan=PLAN, rebind=optimizer)
    with pytest.raises(AlreadyApplied):
        weft.tensor_parallel(module, ctx, plan=PLAN)
    with pytest.raises(OrderError):
        weft.with_precision(module, ctx, "bf16")


def test_order():
    run_ranks(orders, 2, mesh={"tensor": 2})


# -- there and back ----------------------------------------------------------------------------------


def step(module, optimizer, number, ctx=None):
    loss_of(module, samples(40).split(4)[number]).backward()
    optimizer.step()
    optimizer.zero_grad()


def there_and_back(ctx, sequence):
    module = model()
    optimizer = optimizer_of(module)
    step(module, optimizer, 0)
    module, ctx = weft.tensor_parallel(module, ctx, plan=PLAN, sequence=sequence, rebind=optimizer)
    step(module, optimizer, 1)
    step(module, optimizer, 2)
    module, ctx = weft.undo(module, ctx, rebind=optimizer)
    assert ctx.applied == () and not any(hasattr(p, "to_local") for p in module.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert module.head.weight is module.emb.weight
    step(module, optimizer, 3)
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("sequence", [True, *variants(False)])
def test_optimizers_go_along_and_undo_makes_everything_whole(sequence):
    module = model()
    optimizer = optimizer_of(module)
    for number in range(4):
        step(module, optimizer, number)
    expected = {name: p.detach() for name, p in module.named_parameters()}
    for found in run_ranks(there_and_back, 2, sequence, mesh={"tensor": 2}):
        assert difference(expected, found) < 1e-12


def from_meta(ctx, given):
    with torch.device("meta"):
        module = LM().double()
    state = dict(model().state_dict())
    asked = []

    def read():
        asked.append(ctx.rank)
        return state

    largest = []
    original = torch.empty_like

    def watched(*args, **kwargs):
        largest.append(args[0].numel())
        return original(*args, **kwargs)

    torch.empty_like = watched
    try:
        module, ctx = weft.tensor_parallel(module, ctx, plan=PLAN, weights=read if given else None)
    finally:
        torch.empty_like = original
    assert asked == ([ctx.rank] if given and ctx.rank == 0 else [])
    return {name: whole(p) for name, p in module.named_parameters()}


def test_a_module_on_meta_is_made_real_part_by_part():
    expected = {name: p.detach() for name, p in model().named_parameters()}
    for found in run_ranks(from_meta, 2, True, mesh={"tensor": 2}):
        assert difference(expected, found) == 0
    one, two = run_ranks(from_meta, 2, False, mesh={"tensor": 2})
    assert difference(one, two) == 0 and one["emb.weight"].std() > 0.5


def later(ctx, path):
    with torch.device("meta"):
        module = LM().double()
    module, ctx = weft.tensor_parallel(module, ctx, plan=PLAN, weights="later")
    assert all(p.is_meta for p in module.parameters())
    weft.load_weights(module, path, ctx)
    return {name: whole(p) for name, p in module.named_parameters()}


def written(ctx, path):
    module, ctx = weft.tensor_parallel(model(), ctx, plan=PLAN, sequence=True)
    state, ctx = weft.checkpointable({"model": module}, ctx)
    weft.save(state, path, 1, ctx)


def test_weights_are_exported_and_loaded_under_their_plain_names(tmp_path):
    run_ranks(written, 2, tmp_path / "run", mesh={"tensor": 2})
    weft.export(next((tmp_path / "run").glob("*1")), tmp_path / "out")
    expected = {name: p.detach() for name, p in model().named_parameters()}
    for found in run_ranks(later, 2, tmp_path / "out", mesh={"tensor": 2}):
        assert difference(expected, found) == 0


# -- checkpoints -------------------------------------------------------------------------------------


def part(ctx, path, first, last, cut):
    """Steps `first` to `last`, resumed from a checkpoint and saved to one."""
    module = model()
    if cut:
        module, ctx = weft.tensor_parallel(module, ctx, plan=PLAN, sequence=cut == "sequence")
    optimizer = optimizer_of(module)
    state, ctx = weft.checkpointable({"model": module, "optimizer": optimizer}, ctx)
    if first:
        assert weft.restore(state, path, ctx).step == first
    for number in range(first, last):
        step(module, optimizer, number)
    weft.save(state, path, last, ctx)
    return {name: whole(p) for name, p in module.named_parameters()}


@pytest.mark.slow
def test_a_checkpoint_is_restored_on_another_mesh(tmp_path):
    module = model()
    optimizer = optimizer_of(module)
    for number in range(6):
        step(module, optimizer, number)
    expected = {name: p.detach() for name, p in module.named_parameters()}
    run_ranks(part, 2, tmp_path, 0, 2, "whole", mesh={"tensor": 2}, probes="auto")
    run_ranks(part, 4, tmp_path, 2, 3, "sequence", mesh={"tensor": 4}, probes="auto")
    run_ranks(part, 1, tmp_path, 3, 4, "", mesh={"data": 1})
    for found in run_ranks(part, 2, tmp_path, 4, 6, "sequence", mesh={"tensor": 2}, probes="auto"):
        assert difference(expected, found) < 1e-12


# -- together with others ----------------------------------------------------------------------------


def together(ctx, sequence):
    """Precision, recompute, averages and a compiler; in float32."""
    module = model(torch.float32)
    module, ctx = weft.with_precision(module, ctx, "bf16")
    module, ctx = weft.recompute(module, ctx, blocks="blocks.*")
    module, ctx = weft.tensor_parallel(module, ctx, plan=PLAN, sequence=sequence)
    module, ctx = weft.average_weights(module, ctx, decay=0.5)
    module, ctx = weft.compile(module, ctx, backend="eager", blocks="blocks.*")
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-1)
    for number in range(2):
        step(module, optimizer, number)
        weft.averages(module).update()
    with weft.averages(module).swapped():
        return {name: whole(p) for name, p in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [True, *variants(False)])
def test_with_precision_recompute_averages_and_compile(sequence):
    module, ctx = weft.with_precision(model(torch.float32), weft.local(), "bf16")
    module, ctx = weft.average_weights(module, ctx, decay=0.5)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-1)
    for number in range(2):
        step(module, optimizer, number)
        weft.averages(module).update()
    with weft.averages(module).swapped():
        expected = {name: p.detach().clone() for name, p in module.named_parameters()}
    for found in run_ranks(together, 2, sequence, mesh={"tensor": 2}):
        assert difference(expected, found) < 2e-2


def divided_loss(ctx):
    module, ctx = weft.tensor_parallel(model(), ctx, plan={**PLAN, "head": "vocab"})
    rows = samples(4)
    loss = weft.collectives.vocab_cross_entropy(module(rows[:, :-1]), rows[:, 1:], ctx)
    loss.backward()
    return {name: whole(p.grad) for name, p in module.named_parameters()}


def test_the_loss_of_divided_logits():
    module = model()
    loss_of(module, samples(4)).backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    for found in run_ranks(divided_loss, 2, mesh={"tensor": 2}):
        assert difference(expected, found) < 1e-12


class _FourOfOneSize(nn.Module):
    """An attention as many write it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _proposed(ctx):
    model = nn.Sequential(_FourOfOneSize()).double()
    if ctx is not None:
        with pytest.raises(ValueError, match="has no plan for") as caught:
            weft.tensor_plan(model)
        plan = ast.literal_eval(str(caught.value).partition("plan=")[2].partition(")")[0])
        assert plan == {"*.k": "column", "*.o": "row", "*.q": "column", "*.v": "column"}, plan
        model, ctx = weft.tensor_parallel(model, ctx, plan=plan)
    x = torch.linspace(-1, 1, 2 * 3 * 8, dtype=torch.float64).view(2, 3, 8)
    model(x).square().sum().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def test_the_proposed_plan_for_an_attention_of_equal_layers_computes_as_one_process():
    for found in run_ranks(_proposed, 2, mesh={"tensor": 2}):
        assert largest_difference(found, _proposed(None)) < 1e-12
