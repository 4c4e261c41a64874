"""What a meeting costs at the store, and that it ends alike on all ranks; groups of ranks."""

import collections
import concurrent.futures
import math
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.variants import variants
from weft.context import World
from weft.peers import agreement
from weft.peers.agreement import agree, disagree, exchange
from weft.peers.liveness import announce
from weft.peers.store import RankStore
from weft.testing import run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")


def _counts(patch):
    """Count the requests of this process by name, and the bytes of what they send and get, those of its watch apart."""
    requests, moved, real = collections.Counter(), collections.Counter(), RankStore._request

    def size(value):
        if isinstance(value, (list, tuple)):
            return sum(map(size, value))
        return len(value) if isinstance(value, (str, bytes)) else 8

    def request(board, call, *arguments):
        found = real(board, call, *arguments)
        if threading.current_thread().name not in ("weft watch", "weft guard"):
            requests[call.__name__] += 1
            moved["bytes"] += size(arguments) + size(found)
        return found

    patch.setattr(RankStore, "_request", request)
    return requests, moved


def _in_threads(n, work, **options):
    """What `work(world)` returns or raises on each of n ranks, which are threads of this process."""
    store, ranks = dist.HashStore(), tuple(range(n))
    watch = types.SimpleNamespace(patience_s=math.inf)  # it alone reads what ranks that leave have said
    worlds = [
        World(ranks=ranks, rank=rank, store=RankStore(store, limit_s=5), watch=watch, **options) for rank in ranks
    ]
    for world in worlds:
        announce(world)
    with concurrent.futures.ThreadPoolExecutor(n) as threads:
        running = [threads.submit(work, world) for world in worlds]
    return [each.exception() or each.result() for each in running]


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_requests_of_a_meeting_grow_with_the_ranks_and_not_with_their_square(n, monkeypatch):
    facts = {"names": [f"layer.{number}.weight" for number in range(100)]}
    _in_threads(n, lambda world: agree(world, "first", facts))
    requests, moved = _counts(monkeypatch)
    assert _in_threads(n, lambda world: [agree(world, "a meeting", facts) for _ in range(4)]) == [[None] * 4] * n
    # Each announces itself, and makes a connection for its waits.
    assert sum(requests.values()) <= 4 * (4 * n + 3) + 2 * n
    assert moved["bytes"] <= 4 * 1000 * n


def _late(world):
    if world.rank == world.size - 1:
        time.sleep(1.2)
    agree(world, "a meeting")


def test_waiting_costs_no_requests(monkeypatch):
    requests, _ = _counts(monkeypatch)
    assert _in_threads(4, _late) == [None] * 4
    # Besides, each announces itself, and those that wait make a connection and read once who is near.
    assert sum(requests.values()) <= 4 * 4 + 3 + 4 + 3 + 3 * 2


def test_each_gets_what_all_have_brought():
    brought = [None, 1, 1, {"a": [1.5]}, 1, None, None, "x"]
    assert _in_threads(8, lambda world: exchange(world, "a", brought[world.rank])) == [brought] * 8
    found = _in_threads(8, lambda world: [exchange(world, "a", world.rank, to=each) for each in (3, 0)])
    everything = list(range(8))
    assert found == [[everything if rank == to else [] for to in (3, 0)] for rank in range(8)]


def test_facts_that_differ_are_named_alike_on_all_ranks():
    found = _in_threads(4, lambda world: agree(world, "save", {"step": 8 if world.rank == 2 else 7, "same": [1, 2]}))
    (text,) = {str(error) for error in found}
    assert "step: 7 on rank 0, 7 on rank 1, 8 on rank 2, 7 on rank 3" in text
    assert _in_threads(2, lambda world: agree(world, "a", {"x": 1.0 if world.rank else 1})) == [None, None]


def _does_not_come(world):
    if world.rank != 2:
        agree(world, "barrier")
    return "elsewhere"


def test_who_does_not_come_is_named_by_all():
    found = _in_threads(4, _does_not_come, timeout_s=0.7)
    assert found[2] == "elsewhere"
    for error in (found[0], found[1], found[3]):
        assert error.rank == 2 and "rank 2 of 4 did not arrive" in str(error) and "waited 0.7 s on rank" in str(error)


def test_who_comes_too_late_is_told_and_the_next_meeting_takes_place():
    has_left = threading.Event()

    def twice(world):
        if world.rank == 1:
            has_left.wait(60)
        try:
            agree(world, "barrier")
        except weft.errors.PeerError as error:
            has_left.set()
            world.timeout_s = 60
            return str(error), exchange(world, "next", world.rank)

    (first, met), (second, _) = _in_threads(2, twice, timeout_s=0.5)
    assert "rank 1 of 2 did not arrive" in first and "others waited for this rank, 1, and left" in second
    assert met == [0, 1]


def _fails(world):
    start = time.monotonic()
    if world.rank == 1:
        time.sleep(0.1)
        disagree(world, OSError("disk full"))
        return None
    try:
        agree(world, "save")
    except weft.errors.PeerError as error:
        return error.rank, error.text, time.monotonic() - start < 30


def test_a_failure_ends_the_wait_of_all():
    assert _in_threads(3, _fails, timeout_s=60) == [
        (1, "OSError: disk full", True),
        None,
        (1, "OSError: disk full", True),
    ]


def test_what_goes_wrong_while_the_last_one_reads_is_told(monkeypatch):
    monkeypatch.setattr(agreement, "_joined", lambda *_: 1 / 0)
    found = _in_threads(3, lambda world: agree(world, "save"), timeout_s=60)
    kinds = collections.Counter(type(error).__name__ for error in found)
    assert kinds == {"ZeroDivisionError": 1, "PeerError": 2}


# -- a job -------------------------------------------------------------------------------------------


def _job(ctx, folder):
    """Requests of this rank in each part of a job."""
    with pytest.MonkeyPatch.context() as patch:
        requests, _ = _counts(patch)
        parts = {}

        def note(name):
            parts[name] = sum(requests.values())
            requests.clear()

        requests.clear()
        ctx = weft.adopt(device="cpu", mesh={"replica": 2, "shard": -1})
        note("start")
        model, ctx = weft.replicate(nn.Linear(4, 4), ctx)
        optimizer = torch.optim.AdamW(model.parameters())
        loader, ctx = weft.shard_data(DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=1), ctx)
        state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
        note("transforms")
        for (x,), _ in zip(loader, range(3), strict=False):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        note("three steps")
        weft.barrier(ctx)
        note("barrier")
        weft.save(state, folder, 1, ctx)
        note("save")
        ctx.close()
        note("close")
    return parts


# How many meetings there are; adopting a group is one more than `start`, as it knows no hosts.
_MEETINGS = {"start": 2, "transforms": 3, "three steps": 4, "barrier": 1, "save": 6, "close": 2}


@pytest.mark.parametrize("n", [2, 4, *variants(8)])
def test_requests_of_a_job(n, tmp_path):
    found = run_ranks(_job, n, tmp_path)
    total = {name: sum(parts[name] for parts in found) for name in _MEETINGS}
    assert all(total[name] <= number * (6 * n + 10) for name, number in _MEETINGS.items()), total


# -- groups ------------------------------------------------------------------------------------------


def _makes_groups(ctx):
    made, real = [], dist.new_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", lambda ranks, **options: made.append(ranks) or real(ranks, **options))
        for _ in range(2):  # under names that were not there before
            with weft.adopt(device="cpu", mesh={"data": 2, "tensor": 2}) as ctx:
                sums = [
                    float(weft.reduce(torch.tensor([2.0**ctx.rank]), ctx.on(axis), "sum"))
                    for axis in ("data", "tensor")
                ]
    return made, sums


def test_a_rank_makes_one_group_for_each_axis():
    lines, columns = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    expected = [
        (2 * [line, column], [sum(2.0**rank for rank in ranks) for ranks in (line, column)])
        for line, column in [
            (lines[0], columns[0]),
            (lines[1], columns[0]),
            (lines[0], columns[1]),
            (lines[1], columns[1]),
        ]
    ]
    assert run_ranks(_makes_groups, 4) == expected


def _in_more_groups(ctx):
    """Rank 0 has made one group more than rank 2 when both make one."""
    three = ctx.subset([0, 1, 2])
    if not three.here:
        return None
    three.subset([0, 1])
    pair = three.subset([0, 2])
    return float(weft.reduce(torch.ones(1), pair, "sum")) if pair.here else None


def test_ranks_that_have_made_different_numbers_of_groups_make_one_together():
    assert run_ranks(_in_more_groups, 4, timeout_s=55) == [2.0, None, 2.0, None]


def _has_a_device(ctx):
    """gloo's group has a device, as one that is made for ranks that share a GPU; it cannot be split."""
    default = dist.group.WORLD
    default.bound_device_id = torch.device("cuda:0")
    try:
        with weft.adopt(device="cpu", mesh={"data": 2, "tensor": 2}) as ctx:
            found = float(weft.reduce(torch.ones(1), ctx.on("tensor"), "sum"))
            part = ctx.subset([0, 1])
            if part.here:
                part.subset([1])
        return found, default.bound_device_id
    finally:
        default.bound_device_id = None


def test_a_group_with_a_device_that_cannot_be_split():
    assert run_ranks(_has_a_device, 4, timeout_s=55) == [(2.0, torch.device("cuda:0"))] * 4
