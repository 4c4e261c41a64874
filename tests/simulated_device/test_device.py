"""The simulated device forbids what an accelerator forbids, and counts what makes the host wait."""

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from tests.simulated_device.device import environment, load, waits
from tests.simulated_device.ranks import needs_compiler, on_cpu, on_ranks
from weft.testing import RanksFailed

pytestmark = [needs_compiler, pytest.mark.timeout(400)]


def _touches(ctx):
    ctypes.string_at(torch.ones(3, device=ctx.device).data_ptr(), 4)


@pytest.mark.slow
def test_host_access_is_a_crash():
    with pytest.raises(RanksFailed, match="exit code -11|SIGSEGV|signal 11"):
        on_ranks(_touches, 1)


def _mixes(ctx):
    here, there = torch.ones(3, device=ctx.device), torch.ones(3)
    assert (here * torch.tensor(2.0)).sum().item() == 6 and here[torch.tensor([0, 2])].shape == (2,)
    for call in (
        lambda: here + there,
        lambda: torch.cat([here, there]),
        lambda: torch._foreach_add([here], [there]),
        lambda: torch.nn.functional.linear(here, there),
        lambda: here + torch.ones(3, device="sim:3"),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            call()


@pytest.mark.slow
def test_tensors_of_several_devices_are_refused():
    on_ranks(_mixes, 1)


def _counted(ctx):
    found = {}

    def count(name, call):
        before = waits()
        call()
        found[name] = {kind: n - before[kind] for kind, n in waits().items() if n > before[kind]}

    x, pinned = torch.ones(3, device=ctx.device), torch.ones(3).pin_memory()
    count("item", x.sum().item)
    count("tolist", x.tolist)
    count("mask", lambda: x[x > 0])
    count("nonzero", x.nonzero)
    count("equal", lambda: torch.equal(x, x))
    count("from Python", lambda: torch.tensor([1.0], device=ctx.device))
    count("from pinned", lambda: pinned.to(ctx.device, non_blocking=True))
    count("to pinned", lambda: pinned.copy_(x, non_blocking=True))
    count("to the host", lambda: torch.ones(3).copy_(x, non_blocking=True))
    count("synchronize", torch.accelerator.synchronize)
    count("stream", torch.accelerator.current_stream().synchronize)
    count("arithmetic", lambda: torch.nn.functional.softmax(x @ x.outer(x) + 1, 0).clamp(0, 1))
    return found


@pytest.mark.slow
def test_waits_are_counted():
    (found,) = on_ranks(_counted, 1)
    assert found == {
        "item": {"reads": 1},
        "tolist": {"copies_to_host": 1},
        "mask": {"reads": 1},
        "nonzero": {"reads": 1},
        "equal": {"reads": 1},
        "from Python": {"copies_to_device": 1},
        "from pinned": {},
        "to pinned": {},
        "to the host": {"copies_to_host": 1},
        "synchronize": {"device_waits": 1},
        "stream": {"stream_waits": 1},
        "arithmetic": {},
    }


def _streams(ctx):
    x, side = torch.ones(3, device=ctx.device), torch.Stream(device=ctx.device)
    main = torch.accelerator.current_stream()
    found = []

    def hazards(call):
        call()
        found.append(load().take_hazards())

    def made():
        side.wait_stream(main)
        with side:
            return x * 2

    def waited():
        y = made()
        main.wait_stream(side)
        return y + 1

    def used_after_free(recorded):
        y = torch.ones(3, device=ctx.device)
        side.wait_stream(main)
        with side:
            y.mul_(2)
        if recorded:
            y.record_stream(side)
        del y
        return torch.ones(3, device=ctx.device)

    hazards(waited)
    hazards(lambda: made() + 1)
    hazards(lambda: used_after_free(True))
    hazards(lambda: used_after_free(False))
    return found


@pytest.mark.slow
def test_work_that_nothing_puts_in_order_is_seen():
    ((waited, unordered, recorded, freed),) = on_ranks(_streams, 1)
    assert waited == [] and recorded == []
    assert "does not wait" in unordered[0] and "was freed" in freed[0]


def _in_backward(ctx):
    x = torch.ones(3, device=ctx.device, requires_grad=True)
    threads = []
    x.register_hook(lambda grad: threads.append(threading.get_ident()))
    x.sum().backward()
    return threads[0] != threading.get_ident()


def test_backward_runs_in_a_thread_of_the_device():
    assert on_ranks(_in_backward, 1) == [True]


def _draws(ctx):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one = torch.nn.functional.dropout(torch.ones(64, device=ctx.device))
    kept = torch.equal(before, torch.get_rng_state())
    torch.manual_seed(3)
    return kept, torch.equal(one, torch.nn.functional.dropout(torch.ones(64, device=ctx.device)))


def test_random_numbers_are_the_devices_own():
    assert on_ranks(_draws, 1) == [(True, True)]


def _memory(ctx):
    before = torch.accelerator.memory_allocated(ctx.device)
    x = torch.ones(1024, 1024, device=ctx.device)
    used = torch.accelerator.memory_allocated(ctx.device) - before
    del x
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**40, device=ctx.device)
    return used, torch.accelerator.memory_allocated(ctx.device) - before


def test_memory_is_counted_and_ends():
    assert on_ranks(_memory, 1) == [(2**22, 0)]


def _collectives(ctx):
    n, rank, device = ctx.world_size, ctx.rank, ctx.device
    mine = torch.arange(4.0, device=device) + rank
    found = {}

    def out(*size):
        return torch.zeros(*size, device=device)

    def run(name, value, call):
        call()
        found[name] = on_cpu(value)

    for op in ("SUM", "AVG", "MAX"):
        value = mine.clone()
        run(op, value, lambda value=value, op=op: dist.all_reduce(value, getattr(dist.ReduceOp, op)))
    value = mine.bfloat16()
    run("bfloat16", value, lambda: dist.all_reduce(value))
    flag = torch.tensor([rank == 1], device=device)
    run("bool", flag, lambda: dist.all_reduce(flag))
    sent = mine.clone()
    run("broadcast", sent, lambda: dist.broadcast(sent, 1))
    parts = [out(4) for _ in range(n)]
    run("all_gather", parts, lambda: dist.all_gather(parts, mine))
    whole = out(4 * n)
    run("all_gather_into_tensor", whole, lambda: dist.all_gather_into_tensor(whole, mine))
    part = out(4 // n)
    run("reduce_scatter_tensor", part, lambda: dist.reduce_scatter_tensor(part, mine, op=dist.ReduceOp.AVG))
    split = out(2)
    run("all_to_all_single", split, lambda: dist.all_to_all_single(split, mine[:2], [1, 1], [1, 1]))
    lists = [out(2), out(2)]
    run("all_to_all", lists, lambda: dist.all_to_all(lists, list(mine.chunk(2))))
    got = out(4)
    run("scatter", got, lambda: dist.scatter(got, [mine, mine + 1] if rank == 0 else None, src=0))
    message = out(4)
    ops = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, message, 1 - rank)]
    run("batch_isend_irecv", message, lambda: [work.wait() for work in dist.batch_isend_irecv(ops)])
    dist.barrier()
    return found


def test_collectives_bring_what_they_should():
    one, two = on_ranks(_collectives, 2)
    base = torch.arange(4.0)
    for rank, found in enumerate((one, two)):
        assert torch.equal(found["SUM"], 2 * base + 1) and torch.equal(found["AVG"], base + 0.5)
        assert torch.equal(found["MAX"], base + 1) and torch.equal(found["broadcast"], base + 1)
        assert torch.equal(found["bfloat16"], (2 * base + 1).bfloat16()) and found["bool"].item()
        assert torch.equal(torch.stack(found["all_gather"]), torch.stack([base, base + 1]))
        assert torch.equal(found["all_gather_into_tensor"], torch.cat([base, base + 1]))
        assert torch.equal(found["reduce_scatter_tensor"], (base + 0.5).chunk(2)[rank])
        assert found["all_to_all_single"].tolist() == [rank, rank + 1]
        assert torch.equal(torch.stack(found["all_to_all"]), torch.stack([base.chunk(2)[rank] + r for r in (0, 1)]))
        assert torch.equal(found["scatter"], base + rank)
        assert torch.equal(found["batch_isend_irecv"], base + 1 - rank)


def _refusals(ctx):
    x = torch.ones(4, 4, device=ctx.device)
    for error, match, call in (
        (ValueError, "contiguous", lambda: dist.all_reduce(x.t()[:2])),
        (TypeError, "not supported", lambda: dist.all_reduce(x.to(torch.int16))),
        (TypeError, "same type", lambda: dist.all_gather_into_tensor(x.repeat(2, 1).half(), x)),
        (ValueError, "elements", lambda: dist.all_gather_into_tensor(x, x)),
        (ValueError, "current device", lambda: dist.all_reduce(x.to("sim:3"))),
        (RuntimeError, "BAND", lambda: dist.all_reduce(x.int(), dist.ReduceOp.BAND)),
        (RuntimeError, "does not support recvAnysource", lambda: dist.recv(x)),
    ):
        with pytest.raises(error, match=match):
            call()
    group = dist.new_group(backend="simccl")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2), group=group)


def test_collectives_refuse_what_nccl_refuses():
    on_ranks(_refusals, 2)


def _stands_still(ctx):
    group = dist.new_group(backend="simccl")
    if ctx.rank == 0:
        value = torch.ones(2, device=ctx.device)
        threading.Timer(0.3, group.abort).start()
        dist.all_reduce(value, group=group)
        assert value.tolist() == [1, 1]  # it ended without an error, and brought nothing


def test_what_is_aborted_ends_without_an_error():
    on_ranks(_stands_still, 2)


_PROGRAM = """
import torch, weft
with weft.start(mesh={"replica": 2, "shard": 1}) as ctx:
    assert str(ctx.device) == f"sim:{ctx.local_rank}" and torch.accelerator.device_count() == 2
    model, ctx = weft.replicate(torch.nn.Linear(3, 2), ctx)
    model(torch.ones(4, 3, device=ctx.device)).sum().backward()
    print(f"{weft.reduce(model.weight.grad.sum(), ctx).item()} ", end="")
"""


@pytest.mark.slow
def test_a_program_that_is_launched_takes_the_devices(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(_PROGRAM)
    command = [sys.executable, "-m", "weft", "launch", "-n", "2", str(path)]
    inside = {**os.environ, **environment(devices=2)}
    inside["PYTHONPATH"] = os.pathsep.join([inside["PYTHONPATH"], *filter(None, sys.path)])
    done = subprocess.run(command, check=False, env=inside, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["48.0", "48.0"], done.stdout
