"""Calls that a probe makes leave nothing behind, wherever forward keeps something."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import weft
from weft.engines.torch.probes.call_state import CallState
from weft.errors import ProbeFailed
from weft.testing import RanksFailed, run_ranks

CALLS = 0
SHARED = {"kept": []}


class Meter:
    """An object of the program, as of average losses."""

    total = 0  # of all meters

    def __init__(self):
        self.sums = [0.0]

    def update(self, value):
        self.sums[0] += value
        Meter.total += 1


def counting(history=[]):  # noqa: B006  (what it is about)
    history.append(1)
    return len(history)


counting.calls = 0


class Block(nn.Module):
    """Two layers, and in each call something that stays; `scale` says what of it is used."""

    def __init__(self, kind, box):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.nested = {"a": {"n": 0, "rows": torch.zeros(1)}}
        self.meter, self.pair = Meter(), (Meter(), [0])
        self.torch_draw = torch.Generator().manual_seed(3)
        self.numpy_draw = np.random.default_rng(3)
        self.array = np.zeros(2)
        self.kind = kind

        def in_closure(y):
            box["n"] += 1
            box["last"] = y
            return box["n"]

        self.in_closure = in_closure

    def forward(self, x):
        y = self.down(self.up(x).relu())
        return y * getattr(self, self.kind)(y)

    def closure(self, y):
        return self.in_closure(y)

    def global_number(self, y):
        global CALLS  # noqa: PLW0603
        CALLS += 1
        return CALLS

    def global_list(self, y):
        SHARED["kept"].append(y)
        return len(SHARED["kept"])

    def nested_dict(self, y):
        self.nested["a"]["n"] += 1
        self.nested["a"]["rows"].add_(len(y))
        return self.nested["a"]["n"] + self.nested["a"]["rows"].item() / 8

    def object(self, y):
        self.meter.update(1.0)
        return self.meter.sums[0]

    def class_attribute(self, y):
        Meter().update(1.0)
        return Meter.total

    def in_tuple(self, y):
        self.pair[1][0] += 1
        return self.pair[1][0]

    def default_argument(self, y):
        return counting()

    def function_attribute(self, y):
        counting.calls += 1
        return counting.calls

    def numpy_array(self, y):
        self.array += 1
        return float(self.array.sum())

    def torch_generator(self, y):
        return torch.rand((), generator=self.torch_draw).item()

    def numpy_generator(self, y):
        return float(self.numpy_draw.random())


KINDS = [name for name in vars(Block) if not name.startswith("_") and name != "forward"]


def trained(ctx, kind):
    """The bias after three steps whose loss reads what the last call has kept."""
    global CALLS
    CALLS, Meter.total, counting.calls = 0, 0, 0
    counting.__defaults__[0].clear()
    SHARED["kept"].clear()
    torch.manual_seed(0)
    box = {"n": 0, "last": None}
    model, x = nn.Sequential(Block(kind, box), nn.Linear(4, 4)).double(), torch.randn(8, 4, dtype=torch.float64)
    if ctx.world_size > 1:
        model, ctx = weft.tensor_parallel(model, ctx, plan={"0.up": "column", "0.down": "row"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = model(x).square().mean()
        kept = SHARED["kept"][-1] if kind == "global_list" else box["last"] if kind == "closure" else None
        (loss if kept is None else loss + kept.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model[1].bias.detach().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_what_forward_keeps_is_that_of_one_process(kind):
    expected = pytest.approx(trained(weft.local(), kind), rel=1e-12, abs=1e-14)
    assert run_ranks(trained, 2, kind, mesh={"tensor": 2}) == [expected, expected]


class Experts(nn.Module):
    """Experts in a list, whose forward runs twice."""

    def __init__(self, kind, box):
        super().__init__()
        self.router, self.kind, self.box, self.kept, self.scale = nn.Linear(4, 4), kind, [box], [], 1.0
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        probs = (self.router(x - self.mean) / self.scale).softmax(-1)
        weights, chosen = probs.topk(2, -1)
        self.kept.append(probs.square().mean())
        self.box[0]["aux"] = probs.square().mean()
        if self.kind == "number":
            self.scale = 0.5  # from the second call on
        if self.kind == "assigned":
            self.mean = x.detach().mean(0)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, place = torch.where(chosen == number)
            result = result.index_add(0, tokens, expert(x[tokens]) * weights[tokens, place, None])
        return x + result


def with_experts(ctx, kind):
    torch.manual_seed(0)
    box = {}
    model, x = nn.Sequential(nn.Linear(4, 4), Experts(kind, box)).double(), torch.randn(8, 4, dtype=torch.float64)
    layer, x = model[1], x.chunk(ctx.data_size)[ctx.data_rank]
    if ctx.world_size > 1:
        model, ctx = weft.expert_parallel(model, ctx)
        model, ctx = weft.replicate(model, ctx, unused="zero")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        layer.kept.clear()
        loss = model(x).square().mean()
        aux = {"list": sum(layer.kept), "dict": box["aux"]}.get(kind, 0.0)
        (loss + aux).backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer.router.weight.detach().flatten().tolist()


@pytest.mark.parametrize("probes", ["every", "off"])
@pytest.mark.parametrize("kind", ["list", "dict", "number"])
def test_experts_in_a_list_keep_what_one_call_keeps(kind, probes):
    expected = pytest.approx(with_experts(weft.local(), kind), rel=1e-12, abs=1e-14)
    assert run_ranks(with_experts, 2, kind, mesh={"expert": 2}, probes=probes) == [expected, expected]


def test_a_buffer_that_is_assigned_counts_as_one_that_is_changed():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(with_experts, 2, "assigned", mesh={"expert": 2})
    assert all("of the next call" in str(error) for error in failed.value.errors.values())


class Average(nn.Module):
    """Numbers minus their mean in earlier calls."""

    def __init__(self, *, reads):
        super().__init__()
        self.linear, self.reads = nn.Linear(4, 4), reads
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x)
        result = y - self.mean if self.reads else y
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.5)
        return result


def in_stages(ctx, *, reads):
    torch.manual_seed(0)
    model = nn.Sequential(Average(reads=reads), nn.Linear(4, 4)).double()
    model, ctx = weft.pipeline(model, ctx, loss=mse_loss, micro_batches=4)
    x = torch.randn(8, 4, dtype=torch.float64)
    return model(x, x).item()


def test_what_a_micro_batch_leaves_in_a_buffer_for_the_next_one_is_seen():
    assert len(set(run_ranks(in_stages, 2, reads=False, mesh={"pipeline": 2}))) == 1
    with pytest.raises(RanksFailed) as failed:
        run_ranks(in_stages, 2, reads=True, mesh={"pipeline": 2})
    assert all(isinstance(error, ProbeFailed) for error in failed.value.errors.values())


def test_what_is_new_goes_and_what_is_empty_stays():
    def forward():
        nonlocal_box.append(late)
        nonlocal_box[0].new = 1

    nonlocal_box = [Meter()]
    state = CallState()
    state.note([forward])
    late = 1
    forward()
    state.put_back()
    assert len(nonlocal_box) == 1 and vars(nonlocal_box[0]).keys() == {"sums"}
