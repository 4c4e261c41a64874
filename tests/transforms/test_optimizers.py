"""optimizers: several by the names of parameters, as one."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import weft
from tests.contract.test_name_table import net
from tests.fix_lines.told import told
from tests.variants import variant_cases
from weft.testing import largest_difference, run_ranks

TABLE = {
    "*norm*": functools.partial(torch.optim.AdamW, lr=1e-2),
    "*.bias": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "head.*": functools.partial(torch.optim.Adam, lr=1e-2),
    "*": functools.partial(torch.optim.Muon, lr=1e-2),
}
ON_SHARDS = TABLE | {"*": functools.partial(torch.optim.RMSprop, lr=1e-3)}
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rates(optimizer):
    factors = [lambda step, place=place: 1 / (1 + step * place) for place in range(len(optimizer.param_groups))]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factors)


def train(ctx, how, table, folder=None):
    """Six steps; with a folder, the last three again from a checkpoint of the third."""
    model, mine = net().double(), X.chunk(ctx.world_size)[ctx.rank]
    optimizer = weft.optimizers(model, table, ctx) if how.startswith(("rebind", "zero")) else None
    if how.startswith("zero"):
        by = "owner" if "owner" in how else "all"
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(how[4]), by=by)
    elif how.startswith("replicate"):
        model, ctx = weft.replicate(model, ctx)
    elif how != "plain":
        model, ctx = weft.fully_shard(model, ctx, rebind=optimizer or ())
    optimizer = optimizer or weft.optimizers(model, table, ctx)
    if "gather" in how or "by owner" in how:
        optimizer, ctx = weft.gather_step(optimizer, ctx, by="owner" if "owner" in how else "all")
    scheduler = rates(optimizer)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state, ctx = weft.checkpointable(parts, ctx)

    def steps(first):
        for step in range(first, 6):
            model(mine * (1 + step)).square().mean().backward()
            weft.clip_grads(optimizer, ctx, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step == 2 and folder is not None and not first:
                weft.save(state, folder, 3, ctx)
        with weft.full_params(model, ctx):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    found = steps(0)
    if folder is not None:
        weft.restore(state, folder, ctx)
        assert all(torch.equal(p, found[name]) for name, p in steps(3).items()), how
    return found


def by_hand(table):
    """As torch's own optimizers, each over the parameters of its pattern."""
    model = net().double()
    of = {pattern: [] for pattern in table}
    for name, p in model.named_parameters():
        is_norm, is_bias, is_head = "norm" in name, name.endswith("bias"), name.startswith("head")
        of["*norm*" if is_norm else "*.bias" if is_bias else "head.*" if is_head else "*"].append(p)
    made = [build(of[pattern]) for pattern, build in table.items()]
    rates = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step, place=place: 1 / (1 + step * place))
        for place, one in enumerate(made)
    ]
    for step in range(6):
        model(X * (1 + step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one, rate in zip(made, rates, strict=True):
            one.step()
            rate.step()
            one.zero_grad()
    return dict(model.named_parameters())


def test_one_process_has_the_numbers_of_the_optimizers_by_themselves(tmp_path):
    expected = by_hand(TABLE)
    found = train(weft.local(), "plain", TABLE, tmp_path)
    assert largest_difference(found, expected) < 1e-15


def trained(ctx, hows, folder):
    return [train(ctx, how, ON_SHARDS if how == "sharded" else TABLE, f"{folder}/{how}") for how in hows]


FAST = ["replicate by owner", "gather", "zero1", "sharded"]
MORE = ["replicate", "by owner", "rebind gather", "rebind by owner", "zero1 owner", "zero2", "zero3", "zero3 owner"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "hows"), [(2, FAST), *variant_cases((2, MORE), (4, FAST + MORE))], ids=["2", "2-more", "4"]
)
def test_every_strategy_has_the_numbers_of_one_process(hows, ranks, tmp_path):
    expected = {table: by_hand(table_) for table, table_ in (("mixed", TABLE), ("on shards", ON_SHARDS))}
    for found in run_ranks(trained, ranks, hows, tmp_path, timeout_s=200):
        for how, one in zip(hows, found, strict=True):
            assert largest_difference(one, expected["on shards" if how == "sharded" else "mixed"]) < 1e-14, how


def _gathered(ctx):
    """Which groups have state in shards after a step by owners."""
    model, ctx = weft.fully_shard(net(), ctx)
    optimizer, ctx = weft.gather_step(weft.optimizers(model, TABLE, ctx), ctx, by="owner")
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    return {
        group["pattern"]: {type(v).__name__ for p in group["params"] for v in optimizer.state[p].values() if v.dim()}
        for group in optimizer.param_groups
    }


def test_only_groups_that_look_at_whole_tensors_are_gathered():
    for found in run_ranks(_gathered, 2):
        assert found["*norm*"] == found["head.*"] == {"DTensor"}
        assert found["*"] <= {"Tensor"}


def test_without_gather_step_on_shards_it_is_told():
    assert "Muon looks at whole tensors" in run_ranks(_not_gathered, 2)[0]


def _not_gathered(ctx):
    model, ctx = weft.fully_shard(net(), ctx)
    optimizer = weft.optimizers(model, TABLE, ctx)
    with pytest.raises(weft.errors.OrderError) as caught:
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    return str(caught.value)


def test_it_is_an_optimizer_like_any_other():
    model, ctx = net(), weft.local()
    optimizer = weft.optimizers(model, TABLE, ctx)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [group["pattern"] for group in optimizer.param_groups] == list(TABLE)
    assert optimizer.defaults["lr"] == 1e-2
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("step"))

    def closure():
        calls.append("closure")
        loss = model(torch.ones(2, 16)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None
    assert calls == ["step", "closure"]
    optimizer.zero_grad()
    copied = pickle.loads(pickle.dumps(optimizer))
    twin = copy.deepcopy((model, optimizer))
    for own, others in ((model, optimizer), twin):
        own(torch.ones(2, 16)).sum().backward()
        others.step()
    assert largest_difference(dict(model.named_parameters()), dict(twin[0].named_parameters())) == 0
    assert len(copied.state) == sum(len(group["params"]) for group in optimizer.param_groups)
    other = weft.optimizers(net(), TABLE, ctx)
    other.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in other.param_groups] == [1e-2] * 4


def test_frozen_parameters_and_those_left_to_others():
    model, ctx = net(), weft.local()
    model.head.weight.requires_grad_(requires_grad=False)
    optimizer = weft.optimizers(model, {"blocks.0": None, "*": torch.optim.SGD}, ctx)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert {name for name, p in model.named_parameters() if id(p) not in held} == {
        "head.weight",
        *(f"blocks.0.{name}" for name, _ in model.blocks[0].named_parameters()),
    }


def test_fp16_steps_are_skipped_as_one():
    model, ctx = weft.with_precision(net(), weft.local(), "fp16")
    optimizer, ctx = weft.skip_nonfinite(weft.optimizers(model, TABLE, ctx), ctx)
    before = copy.deepcopy(model.state_dict())
    (model(torch.ones(2, 16)) * float("inf")).sum().backward()
    optimizer.step()
    assert weft.was_skipped(optimizer)
    assert largest_difference(model.state_dict(), before) == 0


class Evaluated(torch.optim.SGD):
    def eval(self):
        pass


class OwnForm(torch.optim.SGD):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)


def test_fix_lines():
    model, ctx = net(), weft.local()
    with told("transforms/optimizers.py", "check_module") as it:
        weft.optimizers(model.parameters(), TABLE, ctx)
    exec(
        it.fix.replace("blocks.*.weight", "*.mlp.*.weight"), {"weft": weft, "torch": torch, "model": model, "ctx": ctx}
    )
    with told("transforms/optimizers.py", "there is nothing to build") as it:
        weft.optimizers(model, torch.optim.AdamW, ctx)
    shown = it.fix.replace("blocks.*.weight", "blocks.*.mlp.*.weight")
    assert "weft.optimizers(model, {" in shown
    exec(shown, {"weft": weft, "torch": torch, "model": model, "ctx": ctx})
    with told("transforms/optimizers.py", "trained parameters fit no pattern") as it:
        weft.optimizers(model, {"*.bias": torch.optim.SGD}, ctx)
    weft.optimizers(model, {"*.bias": torch.optim.SGD} | eval(it.fix.replace("..., ", ""), {"torch": torch}), ctx)
    with told("transforms/optimizers.py", "cannot be built") as it:
        weft.optimizers(model, {"*": torch.optim.Muon}, ctx)
    assert "Muon only supports 2D" in str(it.error)
    line = it.fix.replace("...", "'*.bias': torch.optim.AdamW, '*': torch.optim.Muon")
    weft.optimizers(model, eval(line, {"torch": torch}), ctx)
    for build, text in (
        (torch.optim.LBFGS, "couples all parameters"),
        (Evaluated, "outside of step"),
        (OwnForm, "a form of its own"),
        (torch.optim.SGD(model.parameters()), "builds no optimizer"),
        (lambda parameters: parameters, "what was built is no optimizer"),
        (lambda parameters: torch.optim.SGD(parameters[:1]), "holds other parameters"),
    ):
        with told("transforms/optimizers.py", "{pattern!r}: {problem}") as it:
            weft.optimizers(model, {"*": build}, ctx)
        assert text in str(it.error)
        exec(
            it.fix.replace("blocks.*.weight", "*.mlp.*.weight"),
            {"weft": weft, "torch": torch, "model": model, "ctx": ctx},
        )


def _differing(ctx):
    table = {"*.bias": torch.optim.SGD, "*": torch.optim.AdamW}
    weft.optimizers(net(), table if ctx.is_main else {"*": torch.optim.AdamW}, ctx)


def test_ranks_that_pass_other_tables_are_told():
    with pytest.raises(weft.testing.RanksFailed, match="optimizers"):
        run_ranks(_differing, 2)
