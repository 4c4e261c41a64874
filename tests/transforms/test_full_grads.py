"""full_grads: whole gradients under every strategy; DeepSpeed's are in test_deepspeed.py."""

import pytest
import torch
from torch import nn

import weft
from tests.transforms.test_full_params import STRATEGIES, _net
from weft.testing import run_ranks


def _gradients(ctx):
    found = {}
    for name, strategy in STRATEGIES.items():
        if name == "plain":
            continue
        model = _net()
        del model.number
        model[1].bias.requires_grad_(False)
        model, after = strategy(model, ctx)
        x = torch.arange(12.0).view(4, 3).chunk(ctx.world_size)[ctx.rank]
        model(x).square().mean().backward()
        found[name] = weft.full_grads(model, after)
        for gradient in found[name].values():
            assert type(gradient) is torch.Tensor
    return found


def test_gradients_are_whole_and_those_of_one_process():
    model = _net()
    model[1].bias.requires_grad_(False)
    model(torch.arange(12.0).view(4, 3)).square().mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert "1.bias" not in expected and len(expected) == 5
    for ranks in (1, 2):
        for found in run_ranks(_gradients, ranks):
            for name, gradients in found.items():
                assert list(gradients) == list(expected), name
                assert all(torch.allclose(gradients[n], expected[n]) for n in expected), name


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"full_grads: this is not a module\n  found:    int(.|\n)*fix:"):
        weft.full_grads(1, weft.local())


def test_a_module_without_gradients_has_none():
    assert weft.full_grads(nn.Linear(1, 1), weft.local()) == {}
