"""to_device and place_module: values, modules and optimizers on the device of the context."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import weft
from weft.context.placement import check_place, place_module
from weft.engines.torch.device.prefetch import prefetch

# meta stands for an accelerator: tensors can be moved to it on any machine
META = replace(weft.local(), device=torch.device("meta"))
MPS = replace(weft.local(), device=torch.device("mps"))


class Pair(NamedTuple):
    left: object
    right: object


class Point(Pair):
    """A subclass of a named tuple."""


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    name: str


class Movable:
    def __init__(self, device="cpu"):
        self.device = torch.device(device)

    def to(self, device):
        return Movable(device)


def _batch():
    t = torch.ones(2)
    return {
        "list": [t, 1, "text", None],
        "tuple": (t, 2.5),
        "pair": Pair(t, t),
        "point": Point(t, 1),
        "user": UserDict(a=t),
        "ordered": OrderedDict(a=t, b=t),
        "default": defaultdict(list, a=t),
        "data": Batch(t, "n"),
        "movable": Movable(),
    }


def test_nested_values_move_and_keep_their_types():
    batch = _batch()
    moved = weft.to_device(batch, META)
    for key, old in batch.items():
        assert type(moved[key]) is type(old)
    assert moved["list"][0].is_meta and moved["list"][1:] == [1, "text", None]
    assert moved["tuple"][0].is_meta and moved["tuple"][1] == 2.5
    assert moved["pair"].left.is_meta and moved["pair"].right.is_meta
    assert moved["point"].left.is_meta and moved["point"].right == 1
    assert moved["user"]["a"].is_meta and list(moved["ordered"]) == ["a", "b"]
    assert moved["default"].default_factory is list and moved["default"]["a"].is_meta
    assert moved["data"].x.is_meta and moved["data"].name == "n"
    assert moved["movable"].device.type == "meta"
    assert batch["list"][0].device.type == "cpu" and batch["data"].x.device.type == "cpu"


def test_skipped_keys_stay_at_any_depth():
    batch = {"x": torch.ones(1), "deep": [{"keep": torch.ones(1), "y": torch.ones(1)}], "keep": [torch.ones(1)]}
    moved = weft.to_device(batch, META, skip_keys=["keep"])
    assert moved["x"].is_meta and moved["deep"][0]["y"].is_meta
    assert moved["deep"][0]["keep"].device.type == "cpu" and moved["keep"] is batch["keep"]


def test_nothing_is_copied_when_nothing_moves():
    batch = {"x": torch.ones(1), "more": [torch.ones(2), 3], "pair": Pair(torch.ones(1), None)}
    assert weft.to_device(batch, weft.local()) is batch
    for leaf in (3, "text", None, torch.ones(1)):
        assert weft.to_device(leaf, weft.local()) is leaf


def test_a_batch_moves_in_a_compiled_function():
    def double(x):
        return weft.to_device(x, weft.local()) * 2

    compiled = torch.compile(double, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    torch._dynamo.reset()


# -- modules -----------------------------------------------------------------------------------------


def test_a_module_moves_in_place_and_the_optimizer_stays_its_own():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parameters = list(model.parameters())
    assert weft.to_device(model, weft.local()) is model
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert weft.to_device(optimizer, weft.local()) is optimizer
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


def test_a_module_on_the_cpu_is_moved():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    check_place("here", model, META)
    assert all(p.device.type == "cpu" for p in model.parameters())  # checking moves nothing
    place_module("here", model, META)
    assert all(t.is_meta for t in model.state_dict().values())
    assert weft.to_device(nn.Sequential(nn.Tanh()), META) is not None  # no tensors at all


def test_a_module_elsewhere_raises_with_names_and_devices():
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(
        ValueError, match=r"(?s)Linear is not on cpu.*found:    weight on meta, bias on meta.*fix:      build"
    ):
        weft.to_device(model, weft.local())


def test_a_module_on_two_devices_raises_and_is_not_moved():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        ValueError, match=r"(?s)found:    1.weight on meta, 1.bias on meta.*expected: all .* on cpu.*fix:"
    ):
        place_module("here", model, weft.local())
    with pytest.raises(
        ValueError, match=r"(?s)here: Sequential is not on meta.*found:    0.weight on cpu, 0.bias on cpu"
    ):
        place_module("here", model, META)
    buffered = nn.Linear(2, 2)
    buffered.register_buffer("table", torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match=r"(?s)found:    table on meta.*fix:"):
        place_module("here", buffered, weft.local())
    assert buffered.weight.device.type == "cpu"


def test_many_strange_tensors_are_counted():
    model = nn.Sequential(*[nn.Linear(1, 1, device="meta") for _ in range(5)])
    with pytest.raises(ValueError, match=r"(?s)found:.*and 5 more"):
        place_module("here", model, weft.local())


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_float64_on_mps_is_refused_with_the_reason(what):
    model = nn.Linear(2, 2)
    if what == "parameter":
        model.double()
    else:
        model.register_buffer("table", torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"(?s)mps has no float64.*found:    (weight|table).*fix:      module.float"):
        weft.to_device(model, MPS)


# -- optimizers --------------------------------------------------------------------------------------


def test_an_optimizer_over_other_parameters_raises():
    optimizer = torch.optim.SGD(nn.Linear(3, 2, device="meta").parameters(), 0.1)
    with pytest.raises(
        ValueError, match=r"(?s)found:    group 0: a parameter of shape \(2, 3\) on meta.*fix: .*before"
    ):
        weft.to_device(optimizer, weft.local())


def test_state_left_behind_is_brought_along_except_step_counters():
    model = nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(p.shape), "note": "text"}
    weft.to_device(optimizer, META)
    for p in model.parameters():
        state = optimizer.state[p]
        assert state["exp_avg"].is_meta and state["step"].device.type == "cpu" and state["note"] == "text"


# -- ahead of use ----------------------------------------------------------------------------------------------------


class _Stream:
    """A stream that only says what is asked of it; an event is the number of copies before it."""

    def __init__(self, log):
        self.log = log

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def record_event(self):
        return _Event(sum(entry.startswith("copy") for entry in self.log), self.log)

    def wait_event(self, event):
        self.log.append(f"computing waits for {event.copies} copies")


class _Event:
    def __init__(self, copies, log):
        self.copies, self.log = copies, log

    def synchronize(self):
        self.log.append(f"the host waits for {self.copies} copies")


class _Batch:
    def __init__(self, log, number):
        self.log, self.number = log, number

    def to(self, device):
        self.log.append(f"copy {self.number}")
        return self

    def compute(self):
        self.log.append(f"compute {self.number}")


def test_computing_on_a_batch_does_not_wait_for_the_copy_of_the_next_one(monkeypatch):
    log = []
    monkeypatch.setattr(torch, "Stream", lambda device: _Stream(log))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: _Stream(log))
    for batch in prefetch([_Batch(log, number) for number in (1, 2, 3)], torch.device("meta")):
        batch.compute()
    assert log == [
        "copy 1", "the host waits for 1 copies",
        "copy 2", "computing waits for 1 copies", "compute 1", "the host waits for 2 copies",
        "copy 3", "computing waits for 2 copies", "compute 2", "the host waits for 3 copies",
        "computing waits for 3 copies", "compute 3",
    ]  # fmt: skip
