"""`find_tied` and `tie`."""

import copy

import pytest
import torch
from torch import nn

import weft
from weft.weights import find_tied, tie


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.block = nn.Linear(3, 3)
        self.again = self.block  # a whole layer, with two parameters
        self.middle = nn.Linear(3, 4, bias=False)
        self.head = nn.Linear(3, 4, bias=False)
        self.middle.weight = self.head.weight = self.embed.weight


def test_groups_of_two_of_three_and_a_whole_layer():
    expected = (
        ("embed.weight", "middle.weight", "head.weight"),
        ("block.weight", "again.weight"),
        ("block.bias", "again.bias"),
    )
    with torch.device("meta"):
        assert find_tied(_Net()) == expected
    assert find_tied(_Net()) == expected
    assert find_tied(nn.Linear(2, 2)) == ()


def test_what_came_apart_is_tied_again():
    model = _Net()
    groups = find_tied(model)
    for name, p in list(model.named_parameters(remove_duplicate=False)):
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, nn.Parameter(p.detach().clone()))
    model.again = copy.deepcopy(model.block)
    assert find_tied(model) == ()
    tie(model, groups)
    assert find_tied(model) == groups
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize(
    ("groups", "text"),
    [([("embed.weight", "nothing")], "'nothing'"), ([("embed.weight", "block.weight")], r"\(3, 3\)")],
)
def test_what_cannot_be_tied_is_refused_and_nothing_changes(groups, text):
    model = _Net()
    before = find_tied(model)
    with pytest.raises(ValueError, match=f"cannot be tied(?s:.*){text}"):
        weft.weights.tie(model, [("embed.weight", "head.weight"), *groups])
    assert find_tied(model) == before
