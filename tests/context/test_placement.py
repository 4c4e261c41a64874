"""to_device and place_module: values, modules and optimizers on the device of the context."""

import re
import sys
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import weft
from tests.fix_lines.told import told
from weft.context.placement import check_place, place_module
from weft.engines.torch.device.devices import hardware_of
from weft.engines.torch.device.prefetch import prefetch
from weft.testing import run_ranks

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


# -- ranks that share a device -----------------------------------------------------------------------


class _Properties(NamedTuple):
    uuid: str


def _own_device(ctx, devices, hosts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_count", lambda: 3)
        module = SimpleNamespace(get_device_properties=lambda device: _Properties(devices[ctx.rank]))
        patch.setattr(torch, "get_device_module", lambda device: module)
        if hosts:
            patch.setenv("NCCL_HOSTID", hosts[ctx.rank])
        sys.modules["weft.context.start"]._check_own_device(ctx.world, ctx.world.store, torch.device("cuda:0"))


def _share_a_device(ctx):
    with told("context/start.py", "two ranks have the same device") as it:
        _own_device(ctx, ["GPU-1", "GPU-2", "GPU-1"], None)
    return it.fix, str(it.error)


@pytest.mark.slow
def test_ranks_that_share_a_device_are_told_on_all_ranks_before_nccl_is(monkeypatch):
    for fix, error in run_ranks(_share_a_device, 3):
        assert re.search("ranks (0 and 2|2 and 0) on cuda:0 GPU-1", error)
        assert fix.startswith("weft launch -n 3 for as many ranks as devices, without device=; or, ")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    engine = weft.engines.TorchEngine()
    assert [engine.device(None, rank, 3).index for rank in range(3)] == [0, 1, 2]
    assert fix.endswith('through the memory of the host, weft.start(backend="gloo")')  # NCCL is not asked then


def test_ranks_with_devices_of_their_own_or_on_other_hosts_for_nccl():
    run_ranks(_own_device, 3, ["GPU-1", "GPU-2", "GPU-3"], None)  # each sees one alone, as cuda:0
    run_ranks(_own_device, 3, ["GPU-1"] * 3, ["a", "b", "c"])


def test_what_tells_devices_apart(monkeypatch):
    for properties, name in [
        (_Properties("GPU-1"), "GPU-1"),
        (SimpleNamespace(pci_domain_id=0, pci_bus_id=25, pci_device_id=0), "0:25:0"),
        (SimpleNamespace(), ""),
    ]:
        module = SimpleNamespace(get_device_properties=lambda device, properties=properties: properties)
        monkeypatch.setattr(torch, "get_device_module", lambda device, module=module: module)
        assert hardware_of(torch.device("cuda:0")) == name
