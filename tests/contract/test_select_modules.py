"""Parts of a module are chosen by class, name, size, question or hand."""

import pytest
import torch
from torch import nn

import weft
from weft.contract.select_modules import select, select_apart


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)

    def forward(self, x):
        return self.two(self.one(x))


class WideBlock(Block):
    def __init__(self):
        super().__init__(8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)  # 40 parameters
        self.blocks = nn.ModuleList([Block(), Block(), WideBlock()])  # 2 x 20, 2 x 20, 2 x 72
        self.head = nn.Linear(4, 10)  # 50
        self.again = self.head


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (Block, BLOCKS),
        (WideBlock, ["blocks.2"]),
        ("blocks.*", BLOCKS),
        ("blocks.[01]", BLOCKS[:2]),
        ("blocks.**.two", [f"{name}.two" for name in BLOCKS]),
        ("**.two", [f"{name}.two" for name in BLOCKS]),
        ("blocks.0.**", ["blocks.0", "blocks.0.one", "blocks.0.two"]),
        ("blocks", ["blocks"]),
        ("again", ["head"]),
        ("*", ["embed", "blocks", "head"]),
        (21, ["embed", "blocks.0", "blocks.1", "blocks.2.one", "blocks.2.two", "head"]),
        (41, ["blocks.2.one", "blocks.2.two", "head"]),
        (73, ["blocks.2"]),
        (lambda name, part: name.endswith("1"), ["blocks.1"]),
        ([WideBlock, "embed", lambda name, part: name == "head"], ["embed", "blocks.2", "head"]),
        ([("head",), {"embed"}], ["embed", "head"]),
        ((name for name in ["head", "embed"]), ["embed", "head"]),
        ([Block, "blocks.0.one"], ["blocks.0", "blocks.0.one", "blocks.1", "blocks.2"]),
    ],
)
def test_parts_are_chosen_in_the_order_of_the_module(chosen, names):
    net = Net()
    got = select("f", net, chosen)
    assert list(got) == names
    assert all(net.get_submodule(name) is part for name, part in got.items())


def test_parts_may_be_given_themselves_and_only_so_the_whole():
    net = Net()
    assert list(select("f", net, [net.head, net.blocks[1]])) == ["blocks.1", "head"]
    assert list(select("f", net, net.blocks[1])) == ["blocks.1"]
    assert select("f", net, net) == {"": net}
    assert list(select("f", WideBlock(), [nn.Linear])) == ["one", "two"]
    assert "" not in select("f", WideBlock(), lambda name, part: True)
    with pytest.raises(ValueError, match="class Block"):
        select("f", WideBlock(), Block)


def test_parts_apart_from_each_other():
    net = Net()
    assert select_apart("f", net, Block) == select("f", net, Block)
    with pytest.raises(ValueError, match=r"found:    'blocks.0.one' in 'blocks.0'\n.*\n  fix:      choose \"blocks"):
        select_apart("f", net, [Block, "blocks.0.one"])
    with pytest.raises(ValueError, match=r"found:    'one' in 'the module itself'\n.*\n  fix:      choose \"one\""):
        select_apart("f", net.blocks[0], [net.blocks[0], "one"])


@pytest.mark.parametrize("chosen", ["blocks", nn.ModuleList, lambda name, part: name == "blocks"])
def test_parts_that_are_never_called_are_refused(chosen):
    with pytest.raises(ValueError, match=r"found:    'blocks' \(ModuleList\)\n.*\n  fix:      \"blocks\.\*\""):
        select_apart("f", Net(), chosen)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (nn.Conv2d, "class Conv2d"),
        ("layers.*", r"'layers\.\*'"),
        ("blocks.*.three", r"'blocks\.\*\.three'"),
        (1000, "1000 parameters or more"),
        (lambda name, part: False, "function <lambda>"),
        (nn.Linear(1, 1), "a given Linear"),
        ([], "an empty list"),
        ([Block, "layers"], "'layers'"),
    ],
)
def test_what_chooses_nothing_is_refused(chosen, said):
    with pytest.raises(ValueError, match=rf"^f: no part of Net is chosen by {said}\n") as caught:
        select("f", Net(), chosen)
    text = str(caught.value)
    assert "found:    classes: Embedding, ModuleList, Block, Linear, WideBlock; names: embed, blocks" in text
    assert "largest part: 224 parameters" in text
    assert 'fix:      "Embedding", or a pattern such as "embed"' in text


@pytest.mark.parametrize("chosen", [None, 1.5, True, 0, -3, int, [Block, None]])
def test_what_chooses_no_modules_is_refused(chosen):
    with pytest.raises(
        TypeError, match=r"chooses no parts of a module\n  found: .*\n  expected: .*\n  fix:      \"embed\""
    ):
        select("f", Net(), chosen)


def test_size_of_parameters_without_shape_is_refused():
    with pytest.raises(ValueError, match=r"have no shape yet\n  found:    0.weight, 0.bias\n.*\n  fix:      model\("):
        select("f", nn.Sequential(nn.LazyLinear(3)), 4)


def test_a_module_without_parts_chooses_nothing():
    with pytest.raises(
        ValueError, match=r"found:    classes: none; names: none; .*\n.*\n  fix:      the module itself"
    ):
        select("f", nn.Linear(1, 1), "blocks.*")


class Layer(nn.Sequential):
    pass


def test_a_class_may_be_given_by_its_name():
    model = nn.ModuleDict({"body": nn.Sequential(Layer(nn.Linear(2, 2)), nn.Linear(2, 2)), "Linear": nn.ReLU()})
    assert list(select("f", model, "Layer")) == ["body.0"] == list(select("f", model, Layer))
    assert list(select("f", model, ["Layer", "**.1"])) == ["body.0", "body.1"]
    assert list(select("f", model, "Linear")) == ["Linear"], "names of parts go first"
    assert list(select("f", model["body"], "Linear")) == ["0.0", "1"]
    with pytest.raises(ValueError, match="(?s)'NoSuchLayer'.*classes: .*Layer"):
        select("f", model, "NoSuchLayer")


@pytest.mark.parametrize(
    "call",
    [
        lambda model, ctx: weft.recompute(model, ctx, blocks="Layer"),
        lambda model, ctx: weft.compile(model, ctx, blocks="Layer", backend="eager"),
        lambda model, ctx: weft.fully_shard(model, ctx, units="Layer"),
        lambda model, ctx: weft.fully_shard(model, ctx, units=["Layer", "1"]),
        lambda model, ctx: weft.zero_partition(model, torch.optim.SGD(model.parameters()), ctx, stage=3, units="Layer")[
            ::2
        ],
    ],
)
def test_every_transform_takes_names_of_classes(call):
    model, ctx = call(nn.Sequential(Layer(nn.Linear(2, 2)), nn.Linear(2, 2)), weft.local())
    assert ctx.applied and model(torch.ones(1, 2)).shape == (1, 2)
