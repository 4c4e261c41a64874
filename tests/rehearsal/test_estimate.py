"""Memory from shapes alone equals the closed forms of the ZeRO paper, and what torch allocates."""

import math

import pytest
import torch
from torch import nn

from weft.rehearsal.estimate import OPTIMIZERS, estimate

# hidden, inner, layers, vocabulary: the published shapes of Llama 2
LLAMAS = {"7B": (4096, 11008, 32, 32000), "13B": (5120, 13824, 40, 32000)}


def llama(hidden, inner, layers, vocabulary):
    def block():
        linear = [nn.Linear(hidden, hidden, bias=False) for _ in range(4)]
        return nn.Sequential(
            *linear,
            *(nn.Linear(hidden, inner, bias=False) for _ in range(2)),
            nn.Linear(inner, hidden, bias=False),
            nn.RMSNorm(hidden),
            nn.RMSNorm(hidden),
        )

    with torch.device("meta"):
        model = nn.Module()
        model.embed = nn.Embedding(vocabulary, hidden)
        model.layers = nn.ModuleList(block() for _ in range(layers))
        model.norm, model.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
    return model


@pytest.mark.parametrize("name", LLAMAS)
def test_a_llama_equals_the_closed_form_to_the_byte(name):
    hidden, inner, layers, vocabulary = LLAMAS[name]
    block = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden
    n = layers * block + 2 * vocabulary * hidden + hidden
    found = estimate(llama(*LLAMAS[name]))
    assert found.parameters == n
    assert [found.weights(dtype) for dtype in ("fp32", "bf16-true", "int8", "int4")] == [4 * n, 2 * n, n, n // 2]
    assert found.training("adamw").total == 16 * n
    assert found.training("adamw", "bf16-true").total == 8 * n
    assert found.training("sgd").total == 8 * n
    assert found.largest() == 4 * max(block, vocabulary * hidden)
    assert {(each.name, each.count, each.parameters) for each in found.blocks} >= {("layers.*", layers, block)}
    # The ZeRO paper; all first dimensions are multiples of 64.
    stages = {"replicate": 16 * n, "zero1": 8 * n + 8 * n // 64, "zero2": 4 * n + 12 * n // 64, "zero3": 16 * n // 64}
    for strategy, total in stages.items():
        assert found.training(strategy=strategy, ranks=64).total == total


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        ("momentum", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
        ("adamw", lambda parameters: torch.optim.AdamW(parameters, lr=0.1)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_torch_allocates(name, make, dtype):
    model = nn.Sequential(nn.Linear(13, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).to(dtype)
    optimizer = make(model.parameters())
    model(torch.randn(4, 13, dtype=dtype)).sum().backward()
    optimizer.step()
    found = estimate(model).training(name, {torch.float32: "fp32", torch.bfloat16: "bf16-true"}[dtype])
    state = [each for per in optimizer.state.values() for key, each in per.items() if key != "step"]

    def held(tensors):
        return sum(each.numel() * each.element_size() for each in tensors if each is not None)

    assert found.parameters == held(model.parameters())
    assert found.gradients == held(each.grad for each in model.parameters())
    assert found.optimizer == held(state)
    assert found.buffers == held(model.buffers())


def test_eight_bits_cost_one_byte_and_a_scale_per_block():
    found = estimate({"large": torch.empty(4097, device="meta"), "small": torch.empty(4095, device="meta")})
    assert found.training("adamw-8bit").optimizer == 2 * (4097 + 4 * 17) + 2 * 4 * 4095


def test_rows_that_do_not_divide_count_as_the_fullest_rank():
    found = estimate({"w": torch.empty(10, 3, device="meta"), "scale": torch.empty((), device="meta")})
    assert found.training("sgd", strategy="zero3", ranks=4).parameters == 4 * (3 * 3 + 1)
    assert found.training("sgd", strategy="zero3", ranks=1000).parameters == 4 * (1 * 3 + 1)


def test_tied_parameters_count_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert estimate(model).parameters == 64


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"optimizer": "lion9"}, "optimizer = 'lion9'"),
        ({"dtype": "int4"}, "dtype = 'int4'"),
        ({"strategy": "zero4"}, "strategy = 'zero4'"),
        ({"ranks": 0}, "ranks = 0"),
    ],
)
def test_what_is_not_known_is_refused(arguments, text):
    with pytest.raises(ValueError, match=rf"{text}(.|\n)*found:(.|\n)*fix:"):
        estimate(nn.Linear(2, 2)).training(**arguments)


def test_the_tables_name_parts_dtypes_and_strategies():
    found = estimate(llama(*LLAMAS["7B"]), name="llama")
    text = f"{found}\n{found.by_ranks((8, 64))}"
    for fact in (
        "llama: 6,738,415,616 parameters",
        "layers.*     32      202,383,360   24.1 GiB",
        "int4",
        *OPTIMIZERS,
    ):
        assert fact in text, text
    assert math.isclose(found.training(strategy="zero3", ranks=8).total / 2**30, 12.55, abs_tol=0.01)
    assert "12.6 GiB" in text
