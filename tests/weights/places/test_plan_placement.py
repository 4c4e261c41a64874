"""module_sizes and plan_placement: arithmetic, the same on every machine."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weft.weights import PlacementPlan, module_sizes, plan_placement

KIB = 2**10


class Net(nn.Module):
    """An embedding that is tied to the head, a parameter and a buffer of its own, and blocks."""

    def __init__(self, layers=4, dim=16, vocabulary=40):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(layers)
        )
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(5), persistent=False)


def _bytes(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def _net(**sizes):
    with torch.device("meta"):
        return Net(**sizes)


# -- sizes -------------------------------------------------------------------------------------------


def test_sizes_count_tied_once_and_buffers_in_every_dtype():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False), "c": nn.BatchNorm1d(2)})
    model["b"].weight = model["a"].weight
    model["d"] = nn.Linear(4, 2, bias=False, dtype=torch.bfloat16)
    model["e"] = nn.ParameterList([nn.Parameter(torch.zeros(7, dtype=torch.float8_e4m3fn), requires_grad=False)])
    norm = 4 * 2 * 4 + 8
    assert module_sizes(model) == {"": 36 + norm + 16 + 7, "a": 36, "b": 36, "c": norm, "d": 16, "e": 7}


def test_sizes_of_meta_are_those_of_values():
    assert module_sizes(_net()) == module_sizes(Net())


def test_sizes_refuse_what_has_none():
    with pytest.raises(ValueError, match="(?s)found: .*fix: "):
        module_sizes(nn.LazyLinear(2))
    with pytest.raises(TypeError, match="(?s)found: .*fix: "):
        module_sizes(3)  # pyright: ignore[reportArgumentType]


# -- plans -------------------------------------------------------------------------------------------


def test_what_fits_is_streamed_nowhere():
    model = _net()
    plan = plan_placement(model, {"cuda:0": module_sizes(model)[""], "cpu": None})
    assert plan.streamed == () and plan.room == () and {unit.place for unit in plan.units} == {"cuda:0"}
    assert plan.used() == {"cuda:0": module_sizes(model)[""], "cpu": 0}


def test_tied_parts_lie_together_and_the_rest_stays():
    model = _net()
    model.again = model.layers[2]
    plan = plan_placement(model, {"cpu": "30KB", "disk": None})
    assert [unit.names for unit in plan.units][:2] == [("",), ("embed", "head")]
    assert plan.unit_of("again.0.weight") == plan.unit_of("layers.2") and plan.check(model) is None
    assert plan.units[0].num_bytes == 12 and plan.units[0].buffer_bytes == 20
    assert plan.place_of("scale") == plan.place_of("table") == "cpu"
    assert plan.place_of("embed.weight") == plan.place_of("head.weight")


def test_what_is_kept_is_not_streamed():
    model = _net(vocabulary=400)
    free = plan_placement(model, {"cpu": "45KB", "disk": None})
    kept = plan_placement(model, {"cpu": "45KB", "disk": None}, keep="head")
    assert (free.place_of("head"), kept.place_of("head")) == ("disk", "cpu") or free.place_of("head") == "cpu"
    assert (
        plan_placement(model, {"cpu": "60KB", "disk": None}, keep=["layers.0", "layers.1"]).place_of(
            "layers.1.2.weight"
        )
        == "cpu"
    )


def test_streamed_units_lie_evenly_among_those_that_stay():
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(9)))
    plan = plan_placement(model, {"cpu": 4 * KIB, "disk": None})  # a slot and three of nine
    assert [unit.place for unit in plan.units[1:]] == ["disk", "disk", "cpu"] * 3
    assert plan.used() == {"cpu": 4 * KIB, "disk": 6 * KIB}


def test_what_is_left_lets_the_next_unit_be_read_ahead():
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(9)))
    assert dict(plan_placement(model, {"cpu": 4 * KIB + 500, "disk": None}).room) == {"cpu": KIB + 500}
    assert dict(plan_placement(model, {"cuda:0": 2 * KIB, "cpu": 5 * KIB, "disk": None}).room)["cuda:0"] == KIB


@pytest.mark.parametrize(("balance", "wanted"), [("sequential", [6, 2, 0]), ("even", [3, 3, 2]), ("low_0", [0, 4, 4])])
def test_balances_spread_what_fits(balance, wanted):
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    plan = plan_placement(model, {f"cuda:{i}": 6 * KIB for i in range(3)}, balance=balance)
    assert [used // KIB for used in plan.used().values()] == wanted
    places = [unit.place for unit in plan.units[1:]]
    assert places == sorted(places)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    budgets=st.lists(st.integers(0, 2000), min_size=2, max_size=4),
    endless=st.booleans(),
    balance=st.sampled_from(["sequential", "even", "low_0"]),
)
def test_a_plan_keeps_within_its_budgets_or_names_the_number_that_does(sizes, budgets, endless, balance):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(size, 4) for size in sizes))
    names = ["cuda:0", "cuda:1", "cpu", "disk"] if len(budgets) == 4 else ["cuda:0", "cpu", "disk"][: len(budgets)]
    limits = dict(zip(names, budgets, strict=True))
    limits |= {names[-1]: None} if endless else {}
    try:
        plan = plan_placement(model, limits, balance=balance)
    except ValueError as error:
        needed = int(str(error).split("expected: ")[1].split()[0])
        assert needed > limits["cuda:0"]
        plan = plan_placement(model, limits | {"cuda:0": needed}, balance=balance)
        limits["cuda:0"] = needed
        with pytest.raises(ValueError, match=str(needed)):
            plan_placement(model, limits | {"cuda:0": needed - 1}, balance=balance)
    used = plan.used()
    assert all(limit is None or used[place] <= limit for place, limit in limits.items())
    assert sum(unit.num_bytes + unit.buffer_bytes for unit in plan.units) == module_sizes(model)[""]
    assert sorted(n for unit in plan.units for n in unit.names if n) == sorted(str(i) for i in range(len(sizes)))
    assert all(not plan.streamed or size for place, size in plan.room if place == "cuda:0")
    plan.check(model)
    assert PlacementPlan.from_json(plan.to_json()) == plan
    assert plan_placement(model, limits, balance=balance) == plan


# -- the value ---------------------------------------------------------------------------------------


def test_a_plan_prints_as_a_table():
    text = str(plan_placement(_net(), {"cpu": "20KiB", "disk": None}))
    assert "embed, head" in text and "(all else)" in text and "reserved for streamed units" in text


def test_check_names_what_does_not_fit():
    plan = plan_placement(_net(), {"cpu": None})
    plan.check(Net())
    for other, said in [
        (_net(layers=5), r"sizes: \(all else\): .* bytes, not 12"),
        (_net(layers=3), "no such part: layers.3"),
        (_net().half(), "embed, head: 1280 bytes, not 2560"),
    ]:
        with pytest.raises(ValueError, match=said):
            plan.check(other)
    apart = PlacementPlan.from_json(plan.to_json().replace('"embed", "head"', '"embed"'))
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    untied = plan_placement(tied, {"cpu": None})
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="tied, in two units: 1.weight and 0"):
        untied.check(tied)
    with pytest.raises(ValueError, match="tied, in two units|sizes"):
        apart.check(_net())


def test_check_sees_a_budget_that_is_exceeded():
    model = _net()
    plan = plan_placement(model, {"cpu": 10**6})
    with pytest.raises(ValueError, match="too much: cpu: .* of 100 bytes"):
        PlacementPlan.from_json(plan.to_json().replace("1000000", "100")).check(model)


def test_what_does_not_fit_names_smaller_units_and_what_they_need():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(16, 64), nn.LayerNorm(16), nn.Linear(64, 16)

        def forward(self, x):
            return self.down(self.up(self.norm(x)))

    model = nn.Sequential(*(Block() for _ in range(3)))
    with pytest.raises(ValueError, match=r"units=\['LayerNorm', 'Linear'\]: [0-9]+ bytes") as error:
        plan_placement(model, {"cpu": 100, "disk": None})
    needed = int(str(error.value).split("'Linear']: ")[1].split()[0])
    assert plan_placement(model, {"cpu": needed, "disk": None}, units=[nn.LayerNorm, "Linear"]).streamed
    with pytest.raises(ValueError, match=f"expected: {needed} bytes") as error:
        plan_placement(model, {"cpu": needed - 1, "disk": None}, units=[nn.LayerNorm, "Linear"])
    assert "smaller" not in str(error.value) and "units=[" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"units": [{"names": ["a"]}], "budgets": [], "room": []}'])
def test_from_json_refuses_what_is_no_plan(text):
    with pytest.raises(ValueError, match="found: .*\n.*expected: .*\n.*fix: "):
        PlacementPlan.from_json(text)


@pytest.mark.parametrize(
    "budgets",
    [
        {}, {"disk": None}, {"cpu": "20 apples"}, {"cpu": -1}, {"cpu": True}, {"cpu": 1.5}, {"nowhere": 1}, {0: 1},
        {"cpu": 1, "cuda:0": 1}, {"disk": None, "cpu": 1}, {"meta": 1}, {"cpu": "."},  {"cpu": "1.2.3GB"},
    ],
)  # fmt: skip
def test_budgets_that_cannot_be_used(budgets):
    with pytest.raises(ValueError, match="budgets cannot be used\n.*found: .*\n.*expected: .*\n.*fix: "):
        plan_placement(_net(), budgets)


def test_texts_are_bytes():
    texts = {"1KB": 1000, "1KiB": 1024, "1.5 mb": 1_500_000, "2GiB": 2**31, "8 B": 8, "1TB": 10**12}
    model = nn.Linear(1, 1)
    assert {text: plan_placement(model, {"cpu": text}).budgets[0][1] for text in texts} == texts


def test_units_may_be_chosen():
    model = _net()
    fine = plan_placement(model, {"cpu": None}, units=nn.Linear)
    assert ("layers.0.2",) in [unit.names for unit in fine.units]
    with pytest.raises(ValueError, match="chosen parts are nested"):
        plan_placement(model, {"cpu": None}, units=["layers.0", "layers.0.2"])
    with pytest.raises(ValueError, match="balance"):
        plan_placement(model, {"cpu": None}, balance="both")  # pyright: ignore[reportArgumentType]


def test_attention_that_reads_its_projection_stays_whole():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(1024, 2), "head": nn.Linear(4, 4)})
    names = list(itertools.chain(*(u.names for u in plan_placement(model, {"cpu": None}).units)))
    assert names == ["", "attention", "head"]
