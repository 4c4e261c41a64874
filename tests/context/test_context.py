"""The context is a value; making one, parts of one, and its sources."""

import logging
import os
import pickle
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

import weft
from weft.context.settings import resolve
from weft.errors import ContextError
from weft.testing import fake, run_ranks
from weft.version import TESTED_TORCH, newer_torch


def test_context_is_a_value():
    one, two = weft.local(seed=3), weft.local(seed=3)
    assert one == two and hash(one) == hash(two)
    assert one != weft.local(seed=4)
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AttributeError):
        one.rank = 1
    assert one.is_main and one.is_last and one.is_local_main and one.here


def test_start_without_launcher_makes_no_group(monkeypatch):
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    with weft.start(device="cpu") as ctx:
        assert (ctx.rank, ctx.world_size, ctx.group, ctx.mesh) == (0, 1, None, None)
        assert not dist.is_initialized()
    ctx.close()  # idempotent


def test_a_torch_newer_than_the_tested_ones_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr("torch.__version__", "99.0.0+cpu")
    for _ in range(2):
        weft.start(device="cpu").close()
    told = f"torch 99.0.0+cpu is newer than those weft was tested with, up to {TESTED_TORCH[-1]}: "
    assert [(r.name, r.levelname, r.message.startswith(told)) for r in caplog.records] == [("weft", "WARNING", True)]


@pytest.mark.parametrize("version", [*TESTED_TORCH, "2.8.1+cpu", "2.14.0.dev20261101+cu130"])
def test_no_torch_up_to_the_newest_tested_one_is_told(version):
    assert not newer_torch(version)


@pytest.mark.parametrize("version", ["2.14.2", "2.15.0", "2.15.0a0+git1234", "3.0.0+cpu"])
def test_any_later_torch_is_newer(version):
    assert newer_torch(version).startswith(f"torch {version} is newer")


def _warnings_of_a_newer_torch(ctx):
    told, log = [], logging.getLogger("weft")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.__version__", "98.0.0")
        patch.setattr(log, "warning", lambda form, text: told.append(text))
        weft.start(device="cpu")  # adopts the group
    return len(told)


def test_one_rank_tells_of_a_newer_torch():
    assert run_ranks(_warnings_of_a_newer_torch, 2) == [1, 0]


def test_applied_records_survive_pickling():
    model, ctx = weft.replicate(torch.nn.Linear(2, 2), weft.local())
    copied = pickle.loads(pickle.dumps(ctx))
    assert copied == ctx and [record.name for record in copied.applied] == ["replicate"]
    assert ctx.records(model) and not copied.records(model)


@pytest.mark.parametrize("name", ["mesh", "data_axes", "device", "backend", "timeout_s", "seed", "debug"])
def test_argument_beats_environment_beats_default(name):
    argument = {
        "mesh": {"data": -1},
        "data_axes": ("data",),
        "device": "cpu",
        "backend": "gloo",
        "timeout_s": 5.0,
        "seed": 7,
        "debug": True,
    }
    text = {
        "mesh": "replica=2,shard=-1",
        "data_axes": "replica",
        "device": "cuda:1",
        "backend": "nccl",
        "timeout_s": "9",
        "seed": "11",
        "debug": "1",
    }
    parsed = {
        "mesh": {"replica": 2, "shard": -1},
        "data_axes": ("replica",),
        "device": "cuda:1",
        "backend": "nccl",
        "timeout_s": 9.0,
        "seed": 11,
        "debug": True,
    }
    variable = f"WEFT_{name.upper()}"
    both = resolve({name: argument[name]}, {variable: text[name]})
    assert getattr(both, name) == argument[name] and dict(both.sources)[name] == "argument"
    environment = resolve({}, {variable: text[name]})
    assert getattr(environment, name) == parsed[name] and dict(environment.sources)[name] == f"environment {variable}"
    assert dict(resolve({}, {}).sources)[name] == "default"


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"WEFT_SEED": "many"}, "WEFT_SEED='many'"),
        ({"WEFT_SEDE": "1"}, "WEFT_SEDE"),
        ({"WEFT_TIMEOUT_S": "-1"}, "found:    -1.0"),
        ({"WEFT_DEBUG": "maybe"}, "WEFT_DEBUG='maybe'"),
        ({"WEFT_MESH": "data"}, "WEFT_MESH='data'"),
    ],
)
def test_bad_environment_is_named(env, text):
    with pytest.raises(ContextError, match=f"(?s){text}.*fix:"):
        resolve({}, env)


@pytest.mark.parametrize("seed", [-1, 1.5, True, 2**63])
def test_bad_seed(seed):
    with pytest.raises(ContextError, match="(?s)found:.*0 <= seed"):
        weft.local(seed=seed)


def test_explain_names_the_sources():
    _, ctx = weft.replicate(torch.nn.Linear(1, 1), weft.local(seed=5))
    text = weft.explain(ctx)
    assert "seed             5                    from argument" in text
    assert "1. replicate(Linear; axis=None" in text


# -- meshes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "world", "axes"),
    [
        (None, 4, (("data", 4),)),
        ({"replica": 2, "shard": -1}, 8, (("replica", 2), ("shard", 4))),
        ({"data": -1, "tensor": 2}, 6, (("data", 3), ("tensor", 2))),
        ({"data": 1}, 1, (("data", 1),)),
    ],
)
def test_mesh_sizes(mesh, world, axes):
    assert fake(0, world, mesh=mesh).axes == axes


@pytest.mark.parametrize(
    "mesh", [{"a": 3}, {"a": -1, "b": -1}, {"a": 0, "b": 4}, {"a": 2.0, "b": 2}, {"bad name": 4}, {}]
)
def test_bad_mesh(mesh):
    with pytest.raises(ContextError, match="(?s)found:.*fix:"):
        fake(0, 4, mesh=mesh)


def test_data_ranks_on_a_mesh():
    contexts = [fake(r, 8, mesh={"dp": 2, "tp": 2, "cp": 2}) for r in range(8)]
    assert [c.data_rank for c in contexts] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {c.data_size for c in contexts} == {2}
    assert contexts[5].coordinates == {"dp": 1, "tp": 0, "cp": 1}
    assert fake(5, 8, mesh={"dp": 2, "tp": 4}, data_axes=("tp",)).data_rank == 1


def test_unknown_axis():
    with pytest.raises(ContextError, match="(?s)axes 'data'.*fix:"):
        fake(0, 2).on("tensor")


def _axes(ctx):
    one, two = ctx.on("replica"), ctx.on("shard")
    value = torch.tensor([float(ctx.rank)])
    mesh = ctx.mesh
    assert mesh.mesh_dim_names == ("replica", "shard") and tuple(mesh.shape) == (2, 2)
    assert mesh["shard"].get_group() is two.group
    everyone = ctx.on(ctx.data_axes)
    assert everyone.world_size == 4
    return [weft.gather(value, c).tolist() for c in (one, two, everyone)] + [one.ranks]


def test_collectives_on_axes():
    found = run_ranks(_axes, 4, mesh={"replica": 2, "shard": 2})
    assert found[0] == [[0, 2], [0, 1], [0, 1, 2, 3], (0, 2)]
    assert found[3] == [[1, 3], [2, 3], [0, 1, 2, 3], (1, 3)]


def _three_axes(ctx):
    data = ctx.on(ctx.data_axes)
    return data.ranks, weft.gather(torch.tensor([ctx.rank]), data).tolist(), ctx.on("tensor").ranks


def test_data_axes_together_beside_a_tensor_axis():
    found = run_ranks(_three_axes, 4, mesh={"replica": 2, "shard": 1, "tensor": 2})
    assert found[0] == ((0, 2), [0, 2], (0, 1)) and found[3] == ((1, 3), [1, 3], (2, 3))


def _combinations(ctx):
    value = torch.tensor([ctx.rank])
    before = ctx.world.meetings
    plane = ctx.on(("context", "data"))  # of three axes; in the order of the mesh
    first = ctx.world.meetings - before
    again = ctx.on(("data", "context"))
    assert first and ctx.world.meetings == before + first and again.group is plane.group
    assert plane.axes == (("data", 2), ("context", 2))
    mesh = plane.mesh
    assert tuple(mesh.shape) == (2, 2) and mesh["context"].get_group() is ctx.on("context").group
    other = ctx.on(("data", "tensor"))
    gathered = [weft.gather(value, one).tolist() for one in (plane, other)]
    with pytest.raises(weft.errors.ContextError, match=r"(?s)the ranks do not agree.*on rank 0"):
        ctx.on(("context", "tensor")) if ctx.rank else ctx.subset([0, 1])
    return gathered, plane.coordinates


@pytest.mark.slow
def test_any_combination_of_axes_has_a_group():
    found = run_ranks(_combinations, 8, mesh={"data": 2, "context": 2, "tensor": 2})
    for rank, (gathered, coordinates) in enumerate(found):
        data, context, tensor = rank // 4, rank // 2 % 2, rank % 2
        assert gathered[0] == [tensor, 2 + tensor, 4 + tensor, 6 + tensor]
        assert gathered[1] == [2 * context, 2 * context + 1, 4 + 2 * context, 4 + 2 * context + 1]
        assert coordinates == {"data": data, "context": context}


def test_axes_of_a_smaller_context_are_in_the_order_of_the_mesh():
    ctx = fake(2, 8, mesh={"data": 2, "context": 2, "tensor": 2}).on(("context", "data"))
    assert ctx.axes == (("data", 2), ("context", 2)) and ctx.rank == 1 and ctx.coordinates == {"data": 0, "context": 1}


def _subset(ctx):
    sub = ctx.subset([2, 0])
    assert sub.here == (ctx.rank in (0, 2))
    if sub.here:
        return sub.rank, weft.gather(torch.tensor([ctx.rank]), sub).tolist()
    try:
        weft.barrier(sub)
    except weft.errors.CollectiveRefused as error:
        return str(error)
    return None


def test_subset_speaks_for_its_members_only():
    found = run_ranks(_subset, 3)
    assert found[0] == (0, [0, 2]) and found[2] == (1, [0, 2])
    assert "not one of the ranks" in found[1]


@pytest.mark.parametrize("ranks", [[], [0, 0], [5]])
def test_bad_subset(ranks):
    with pytest.raises(ContextError, match="(?s)found:.*fix:"):
        fake(0, 2).subset(ranks)


def _many_subsets(ctx):
    sums = [weft.reduce(torch.tensor(1), ctx.subset([0, 1])).item() for _ in range(3)]
    weft.barrier(ctx)
    return sums


def test_subsets_can_be_made_again():
    assert run_ranks(_many_subsets, 2) == [[2, 2, 2]] * 2


def test_only_names_both_lines():
    solo = weft.local().only(0)
    with pytest.raises(
        weft.errors.CollectiveRefused, match=r"(?s)test_context.py:\d+\n.*ctx.only\(0\) at .*test_context.py:\d+"
    ):
        weft.reduce(torch.ones(1), solo)
    assert solo.here
    with pytest.raises(ContextError, match="(?s)found:    3"):
        weft.local().only(3)


@pytest.mark.parametrize(
    "call",
    [
        weft.barrier,
        lambda ctx: weft.collectives.all_or_none(ctx).__enter__(),
        lambda ctx: weft.collectives.any_rank(True, ctx),
    ],
)
def test_every_collective_is_refused_for_one_rank(call):
    with pytest.raises(weft.errors.CollectiveRefused, match="fix:"):
        call(weft.local().only("main"))


def _refused_on_rank_0(ctx):
    solo = ctx.only(0)
    refused = []
    if solo.here:
        for call in (
            lambda: solo.subset([0]),
            lambda: weft.replicate(nn.Linear(1, 1), solo),
            lambda: weft.shard_data(DataLoader(range(4)), solo),
        ):
            with pytest.raises(weft.errors.CollectiveRefused, match=r"only\(0\)") as error:
                call()
            refused.append(str(error.value).partition(":")[0])
    weft.barrier(ctx)  # the other rank was not told of a failure, nor are the meetings out of step
    return refused


@pytest.mark.parametrize("n", [1, 2])
def test_a_refused_call_does_not_concern_the_other_ranks(n):
    assert run_ranks(_refused_on_rank_0, n)[0] == ["subset", "replicate", "shard_data"]


def test_only_means_the_same_rank_in_a_smaller_context():
    here = [fake(r, 4, mesh={"replica": 2, "shard": 2}).only(3).on("shard").here for r in range(4)]
    assert here == [False, False, False, True]


def test_fake_world_has_no_collectives():
    with pytest.raises(ContextError, match="no process group"):
        weft.reduce(torch.ones(1), fake(1, 2))


def test_merge_joins_the_records_of_two_contexts():
    base = weft.local()
    one, left = weft.replicate(torch.nn.Linear(1, 1), base)
    two, right = weft.replicate(torch.nn.Linear(1, 1), base)
    both = left.merge(right)
    assert both.records(one) and both.records(two) and len(both.merge(right).applied) == 2
    with pytest.raises(ContextError, match="different ranks"):
        base.merge(fake(0, 2))


# -- devices -----------------------------------------------------------------------------------------


def _pretend(monkeypatch, kind, count):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("kind", "count", "request_", "local_rank", "device"),
    [
        (None, 0, None, 0, "cpu"),
        ("cuda", 4, None, 2, "cuda:2"),
        ("cuda", 4, None, 5, "cuda:1"),
        ("cuda", 4, "cuda", 3, "cuda:3"),
        ("cuda", 4, "cpu", 3, "cpu"),
        ("xpu", 2, None, 1, "xpu:1"),
        ("mps", 1, None, 0, "mps"),
        (None, 0, "cuda:64", 0, "cuda:64"),
    ],
)
def test_device_of_a_rank(monkeypatch, kind, count, request_, local_rank, device):
    _pretend(monkeypatch, kind, count)
    assert str(weft.engines.TorchEngine().device(request_, local_rank, 1)) == device


@pytest.mark.parametrize(
    ("kind", "device", "chosen"), [("cuda", "cuda:3", [3]), ("cuda", "cpu", []), (None, "cpu", [])]
)
def test_start_makes_the_device_of_the_rank_the_current_one(monkeypatch, kind, device, chosen):
    _pretend(monkeypatch, kind, 4)
    selected = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", selected.append)
    with weft.start(device=device):
        assert selected == chosen


@pytest.mark.parametrize(
    ("kind", "request_", "world", "text"),
    [("mps", None, 2, "world size 2 on mps"), (None, "cuda", 1, "no accelerator"), (None, "fish", 1, "'fish'")],
)
def test_impossible_device(monkeypatch, kind, request_, world, text):
    _pretend(monkeypatch, kind, 1)
    with pytest.raises(ContextError, match=f"(?s){text}.*fix:"):
        weft.engines.TorchEngine().device(request_, 0, world)


# -- adopting ----------------------------------------------------------------------------------------


class _WithoutBackend(weft.engines.TorchEngine):
    def backend(self, device):
        raise AssertionError("the groups of axes have the backend of the group")


def _backends_of_axes(ctx):
    mine = weft.adopt(mesh={"a": 2, "b": 2}, device="cpu", engine=_WithoutBackend())
    lines = [mine.on("a"), mine.on("b"), mine.subset([0, 1, 2])]
    return {dist.get_backend(line.group) for line in lines if line.group is not None}


def test_groups_of_axes_and_subsets_have_the_backend_of_the_group():
    # ranks that share a device by gloo would ask NCCL for one device twice
    assert run_ranks(_backends_of_axes, 4) == [{"gloo"}] * 4


def test_adopt_takes_the_device_of_the_group_and_makes_it_the_current_one(monkeypatch):
    _pretend(monkeypatch, "cuda", 4)
    selected = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", selected.append)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.group.WORLD.bound_device_id = torch.device("cuda:2")
        assert weft.adopt().device == torch.device("cuda:2")
        assert weft.adopt(device="cuda:1").device == torch.device("cuda:1")
        assert selected == [2, 1]
    finally:
        dist.destroy_process_group()


def _adopt(ctx):
    again = weft.adopt(device="cpu")
    wrong = []
    for options in ({"timeout_s": 5.0}, {"backend": "nccl"}):
        try:
            weft.adopt(device="cpu", **options)
        except ContextError as error:
            wrong.append(str(error))
    total = weft.reduce(torch.tensor(1), again).item()
    again.close()
    assert dist.is_initialized()  # not ours to destroy
    half = dist.new_group([0], backend="gloo")
    alone = weft.adopt(half, device="cpu").world_size if ctx.rank == 0 else None
    started = weft.start(device="cpu")  # the group exists: adopted too
    return total, wrong, alone, (started.local_rank, started.local_world_size), weft.reduce(torch.tensor(1), ctx).item()


def test_adopt_uses_a_group_and_leaves_it():
    (total, wrong, alone, place, after), second = run_ranks(_adopt, 2)
    assert total == 2 and alone == 1 and place == (0, 2) and after == 2 and second[3] == (1, 2)
    assert "timeout 60 s of the group, 5 s asked for" in wrong[0]
    assert "backend 'gloo' of the group, 'nccl' asked for" in wrong[1]


def test_adopt_without_a_group():
    with pytest.raises(ContextError, match="(?s)not initialised.*weft.start"):
        weft.adopt()


def _adopt_mesh(ctx):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    mine = weft.adopt(mesh, device="cpu")
    return mine.axes, weft.gather(torch.tensor([ctx.rank]), mine.on("shard")).tolist()


def test_adopt_a_mesh():
    found = run_ranks(_adopt_mesh, 4)
    assert found[2] == ((("replica", 2), ("shard", 2)), [2, 3])


def _timeout(ctx):
    short = dist.new_group([0, 1], timeout=timedelta(seconds=3), backend="gloo")
    mine = weft.adopt(short, device="cpu")
    weft.reduce(torch.ones(1), mine)  # which asks for its shape once
    begin = time.monotonic()
    if ctx.rank == 1:
        time.sleep(4.5)
        return 3.0, ""
    try:
        weft.reduce(torch.ones(1), mine)
    except weft.errors.PeerError as error:
        return time.monotonic() - begin, str(error)
    return 0.0, ""


@pytest.mark.slow
def test_a_timeout_fires_and_names_who_is_missing():
    (seconds, text), _ = run_ranks(_timeout, 2)
    assert 2 < seconds < 20
    assert "rank 1 did not arrive within 3 s" in text


@pytest.mark.parametrize("mesh", [3, "data", ["data"], {1: 2}, DeviceMesh])
def test_a_mesh_is_names_and_sizes(mesh):
    with pytest.raises(ContextError, match="(?s)cannot be used.*names of axes with their sizes"):
        weft.start(mesh=mesh)
