"""Tables by name: the first pattern that fits a part or parameter decides."""

import pytest
import torch
from torch import nn

import weft
from tests.fix_lines.told import told
from weft.contract.name_table import fits_in_table, parts_by_name, patterns_by_name
from weft.precision import PrecisionOffer
from weft.testing import run_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.mlp(self.attn(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net():
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("blocks.0.mlp.0.weight", "*", True),
        ("blocks.0.mlp.0.weight", "*.weight", True),
        ("blocks.0.mlp.0.weight", "blocks.*.mlp", True),
        ("blocks.0.mlp.0.weight", "blocks.*.weight", True),
        ("blocks.0.mlp.0.weight", "blocks.**.weight", True),
        ("blocks.weight", "blocks.**.weight", True),
        ("blocks.0.mlp.0.weight", "blocks.[1-9]", False),
        ("blocks.10.attn", "blocks.1", False),
        ("blocks.0.mlp.0.weight", "mlp", False),
        ("blocks.0.mlp.0.weight", "mlp.*", False),
        ("", "*", True),
        ("", "blocks", False),
    ],
)
def test_a_pattern_fits_a_name_and_all_that_lies_inside(name, pattern, fits):
    assert fits_in_table(name, pattern) is fits


def test_the_first_pattern_decides_whatever_fits_better():
    model = net()
    of = patterns_by_name("f", model.named_parameters(), {"*.bias": 1, "blocks.0": 2, "*.norm": 3, "*": 4})
    names = {name: of[id(p)] for name, p in model.named_parameters()}
    assert names["blocks.0.norm.bias"] == "*.bias"
    assert names["blocks.0.norm.weight"] == "blocks.0"
    assert names["blocks.1.norm.weight"] == "*.norm"
    assert names["head.weight"] == "*"


def test_of_a_tied_parameter_all_names_count():
    model = net()
    model.again = model.head
    of = patterns_by_name("f", model.named_parameters(remove_duplicate=False), {"again": 1, "*": 2})
    assert of[id(model.head.weight)] == "again"


def test_parts_inside_a_part_have_their_own_value():
    parts = parts_by_name("f", net(), {"*.norm": "a", "blocks": "b", "*": "c"})
    assert {name: value for name, (_, value) in parts.items()} == {
        "": "c",
        **{f"blocks.{i}": "b" for i in range(3)},  # the list itself is never called
        **{f"blocks.{i}.norm": "a" for i in range(3)},
    }
    assert list(parts)[:3] == ["", "blocks.0", "blocks.0.norm"]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"nothing": "bf16", "*": "bf16"}, "'nothing' decides about nothing"),
        ({"*.bias": "bf16"}, "'\\*.bias' decides about nothing"),  # parameters are no parts
        ({"blocks": "bf16", "blocks.0": "bf16"}, "is taken by patterns before it"),
        ({}, "the table is empty"),
        ({"blocks.0.mlp": "fp16", "*": "fp16"}, "already have a loss scale"),
        ({"blocks": "bf16", "*": "fp3"}, "policy = 'fp3' is unknown"),
    ],
)
def test_a_wrong_table_changes_nothing(table, text):
    model = net()
    with pytest.raises(ValueError, match=text):
        weft.with_precision(model, weft.local(), table)
    assert not any(part._forward_hooks or part._forward_pre_hooks or hasattr(part, "_weft") for part in model.modules())
    weft.with_precision(model, weft.local(), "bf16")


@pytest.mark.slow
def test_fix_lines():
    with told("contract/name_table.py", "is no pattern of names") as it:
        weft.with_precision(net(), weft.local(), {nn.Linear: "bf16"})
    weft.with_precision(net(), weft.local(), eval(it.fix.replace("...", "'bf16'").replace("*.bias", "*.norm")))
    with told("contract/name_table.py", "the table is empty") as it:
        weft.with_precision(net(), weft.local(), {})
    weft.with_precision(net(), weft.local(), eval(it.fix.replace("...", "'bf16'")))
    with told("contract/name_table.py", "decides about nothing") as it:
        weft.with_precision(net(), weft.local(), {"blocks": "bf16", "*.norm": "fp32"})
    assert it.fix.startswith("move '*.norm' up")
    weft.with_precision(net(), weft.local(), {"*.norm": "fp32", "blocks": "bf16"})
    with told("contract/name_table.py", "decides about nothing") as it:
        weft.with_precision(net(), weft.local(), {"block": "bf16", "*.norm": "fp32"})
    assert it.fix == "leave 'block' out, or correct it"
    weft.with_precision(net(), weft.local(), {"blocks": "bf16"})


def test_precision_by_name_is_that_set_by_hand():
    x = torch.ones(2, 16)
    model, ctx = weft.with_precision(net(), weft.local(), {"*.norm": "fp32", "blocks.1": "bf16-true", "*": "bf16"})
    hand, other = net(), weft.local()
    for name in ("blocks.0.norm", "blocks.1.norm", "blocks.2.norm"):
        _, other = weft.with_precision(hand.get_submodule(name), other, "fp32")
    _, other = weft.with_precision(hand.blocks[1], other, "bf16-true")
    _, other = weft.with_precision(hand, other, "bf16")
    assert {n: p.dtype for n, p in model.named_parameters()} == {n: p.dtype for n, p in hand.named_parameters()}
    assert model.blocks[1].attn.weight.dtype is torch.bfloat16
    assert model.blocks[1].norm.weight.dtype is torch.float32
    model.blocks[1], hand.blocks[1] = model.blocks[0], hand.blocks[0]  # float32 into bfloat16 weights is torch's error
    assert torch.equal(model(x), hand(x))
    assert ctx.applied[-1].name == "with_precision"
    assert weft.contract.offered(model, PrecisionOffer)[0].precision.compute is torch.bfloat16


def test_recomputed_blocks_by_name():
    saved = []

    class Noted(nn.Linear):
        def forward(self, x):
            saved.append(self)
            return super().forward(x)

    model = net()
    for block in model.blocks:
        block.attn = Noted(16, 16)
    table = {"blocks.0": False, "blocks.1": True, "blocks.*.attn": ["matmul"], "blocks.2.mlp": True, "*": None}
    model, _ = weft.recompute(model, weft.local(), blocks=table)
    model(torch.ones(2, 16)).sum().backward()
    assert [saved.count(block.attn) for block in model.blocks] == [1, 2, 2]
    with pytest.raises(ValueError, match="nested"):
        weft.recompute(net(), weft.local(), blocks={"blocks.0.mlp": False, "blocks.*": True})


def _units(ctx):
    model, ctx = weft.fully_shard(net(), ctx, units={"blocks.0": False, "blocks.1.mlp": None, "blocks.*": True})
    x = torch.ones(2, 16)
    out = model(x)
    whole = [type(p).__name__ for p in (model.blocks[0].attn.weight, model.blocks[1].attn.weight)]
    out.sum().backward()
    units = [name for name, part in model.named_modules() if type(part).__name__.startswith("FSDP")]
    return whole, units, weft.full_grads(model, ctx)


def test_units_by_name():
    model = net()
    model(torch.ones(2, 16)).sum().backward()
    for whole, units, grads in run_ranks(_units, 2):
        assert whole == ["Parameter", "DTensor"]  # the first is not freed after forward
        assert units == ["", "blocks.0", "blocks.1", "blocks.2"]
        assert all(torch.allclose(grads[name], p.grad) for name, p in model.named_parameters())
