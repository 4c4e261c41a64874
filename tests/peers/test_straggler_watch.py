"""What the threads of a rank see: ranks that left or failed while others wait in torch's own collectives."""

import os
import pathlib
import re
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.variants import variants
from weft.context import World
from weft.peers import liveness, straggler_watch
from weft.peers.agreement import agree, exchange
from weft.peers.gloo_connections import listening_ports
from weft.peers.liveness import announce, check_failed, find_culprit, report_failure
from weft.peers.store import RankStore, StoreLost
from weft.testing import RanksFailed, run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")


def _train(ctx, steps, leave):
    """`leave(ctx, step)` says whether this rank ends after a step."""
    model, ctx = weft.replicate(nn.Linear(2, 2), ctx)
    for step in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        if leave(ctx, step):
            return "left"
    return "done"


@pytest.mark.parametrize("ranks", [2, *variants(4)])
def test_a_rank_that_ends_while_others_wait_in_a_backward_pass(ranks):
    run_ranks(_train, ranks, 1, lambda *_: False)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_train, ranks, 5, lambda ctx, step: ctx.rank == 0 and step == 2)
    assert time.monotonic() - start < 12
    errors = caught.value.errors
    assert set(errors) == set(range(1, ranks)), errors
    for error in errors.values():
        assert isinstance(error, weft.errors.PeerError) and error.rank == 0
        assert error.text.startswith("left the job while others still work; if it left a loop")


def _still_waits(ctx):
    """Gave up because of one rank, and still waits: for another one, which has left since."""
    world, watch = ctx.world, ctx.world.watch
    watch.release()
    world.notes = [{"ports": [1111]}, {"ports": [2222]}]
    world.failure = (1, "left the job")
    cuts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(straggler_watch, "_SURE_S", 0.0)
        ports = (1111, 2222, 3333)
        patch.setattr(straggler_watch, "close_connections", lambda which: cuts.append([which(5, p) for p in ports]))
        watch._look(world, world.store, "a backward pass")
    world.failure, world.notes = None, []
    return cuts


def test_a_rank_that_gave_up_is_cut_off_from_all_that_have_left():
    assert run_ranks(_still_waits, 2) == [[[True, True, False]]] * 2


def _raises_alike(ctx):
    """All ranks raise the same error, catch it and go on, one of them late."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.forward = lambda x, both: model[0](x) + (model[1](x) if both else 0)
    model, ctx = weft.replicate(model, ctx)
    for _ in range(2):
        with pytest.raises(weft.errors.UnusedParameters):
            model(torch.ones(1, 2), both=False).sum().backward()
    if ctx.rank == 0:
        time.sleep(4)
    model(torch.ones(1, 2), both=True).sum().backward()
    return ctx.world.failure


@pytest.mark.slow
def test_an_error_that_all_ranks_have_and_catch_ends_nobody():
    assert run_ranks(_raises_alike, 2) == [None, None]


def _goes_on(ctx):
    """One rank has told of an error, and comes to the collectives of the others after all."""
    value = torch.ones(1)
    dist.all_reduce(value)
    if ctx.rank == 0:
        report_failure(ctx.world, ValueError("it was nothing"))
        time.sleep(1)
    for _ in range(3):
        dist.all_reduce(value)
        time.sleep(1.2)
    check_failed(ctx.world)
    return float(value)


@pytest.mark.slow
def test_a_rank_that_goes_on_after_an_error_ends_nobody():
    assert run_ranks(_goes_on, 2) == [16.0, 16.0]


def _busy(ctx, seconds):
    """One rank works long for itself, the other waits for it in a collective."""
    if ctx.rank == 0:
        time.sleep(seconds)
    dist.all_reduce(torch.ones(1))
    return ctx.world.failure


@pytest.mark.slow
def test_a_rank_that_is_only_late_is_waited_for():
    assert run_ranks(_busy, 2, 5) == [None, None]


def _caught(ctx):
    dist.all_reduce(torch.ones(1))
    if ctx.rank == 1:
        report_failure(ctx.world, ValueError("bad data"))
        time.sleep(8)
        return
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))
    assert time.monotonic() - start < 7
    with pytest.raises(weft.errors.PeerError, match="rank 1 failed: ValueError: bad data"):
        weft.reduce(torch.ones(1), ctx)
    check_failed(ctx.world)


@pytest.mark.slow
def test_an_error_that_was_told_of_ends_the_wait_of_others():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_caught, 2)
    error = caught.value.errors[0]
    assert isinstance(error, weft.errors.PeerError) and error.rank == 1 and error.text == "ValueError: bad data"


def _meets_elsewhere(ctx):
    """Rank 1 leaves out a message, and meets the others in another collective."""
    weft.reduce(torch.ones(1), ctx)  # which asks for its shape once
    if ctx.rank == 1:
        return weft.reduce(torch.ones(1), ctx, "sum")
    everyone = torch.empty(2 * ctx.world_size)
    dist.all_gather_into_tensor(everyone, torch.ones(2), group=ctx.group)
    return everyone


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_in_different_collectives():
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_meets_elsewhere, 2)
    assert time.monotonic() - start < 50
    assert set(caught.value.errors) == {0, 1}
    for error in caught.value.errors.values():  # one of the two notices it first, and tells the other
        assert re.search("waits in .* at .*:[0-9]+, while rank [01] waits in ", str(error)), str(error)


def test_ports_at_which_this_process_listens():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert server.port in listening_ports()


# -- the store ---------------------------------------------------------------------------------------


def _pair():
    board = RankStore(dist.HashStore(), limit_s=1)
    worlds = [World(ranks=[0, 1], rank=rank, store=board, timeout_s=1) for rank in range(2)]
    for world in worlds:
        announce(world)
    return board, worlds[0]


@pytest.mark.parametrize("value", ["[1]", "3", "null", "no json", '{"host": 1}', "[" * 100_000, "\N{SNOWMAN}"])
@pytest.mark.parametrize("key", ["peer/1", "parted/1"])
def test_a_value_that_no_rank_has_written_is_one_clear_error(key, value):
    board, world = _pair()
    board.set(key, value)
    with pytest.raises(weft.errors.ContextError, match=f"(?s)no rank has written: {key}.*found:.*expected: JSON.*fix:"):
        find_culprit(world)


@pytest.mark.parametrize("value", ["[1]", "3", '{"no": 1}'])
def test_a_strange_value_at_a_meeting(value):
    board, world = _pair()
    board.set("meet/at/1", value)
    board.add("meet/1/count", 1)
    with pytest.raises(weft.errors.ContextError, match="no rank has written: meet/at/1"):
        agree(world, "a meeting")


def _comes_for_another_thing(ctx):
    what = "the end of a window" if ctx.rank == 1 else "a frozen layer"
    with pytest.raises(
        weft.errors.ContextError, match="(?s)'a frozen layer' on rank 0.*'the end of a window' on rank 1"
    ):
        exchange(ctx.world, what, ctx.rank)
    assert exchange(ctx.world, what, ctx.rank, kind="anything") == [0, 1]


def test_ranks_that_meet_for_different_things():
    run_ranks(_comes_for_another_thing, 2)


def test_a_store_that_is_gone_is_named():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    board = RankStore(dist.PrefixStore("a", client), limit_s=1, server=0)
    assert board.port == server.port
    board.below("b").write("key", [1])
    assert board.read("b/key") == [1] and not board.has("key")
    board.guard()  # nothing is asked
    del server
    with pytest.raises(StoreLost, match="rank 0 failed: the process that serves the store is gone") as caught:
        board.add("key", 1)
    assert caught.value.rank == 0


# -- who is alive ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "found"), [(liveness.machine_id(), 1), ("another", None)])
def test_a_process_id_says_nothing_of_another_machine_of_the_same_name(machine, found):
    board, world = _pair()
    board.write("peer/1", {"host": socket.gethostname(), "machine": machine, "pid": 2**22 + 1, "born": "1"})
    blamed = find_culprit(world)
    assert (blamed and blamed[0]) == found


def test_what_tells_machines_apart_may_be_missing(monkeypatch):
    assert liveness.machine_id.__wrapped__() == liveness.machine_id()
    monkeypatch.setattr(pathlib.Path, "read_text", _raise_not_found)
    monkeypatch.setattr(pathlib.Path, "readlink", _raise_not_found)
    alone = liveness.machine_id.__wrapped__()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert len({alone, liveness.machine_id(), liveness.machine_id.__wrapped__()}) == 3


def _raise_not_found(*_, **__):
    raise FileNotFoundError


class _NoGroup:
    group_name = "world"

    def _get_sequence_number_for_group(self):
        return 0


def _rank_of(store, rank):
    return World(ranks=[0, 1], rank=rank, store=RankStore(store, limit_s=5), group=_NoGroup())


@pytest.mark.parametrize("machine", ["this", "another"])
def test_a_rank_that_died_is_reported_once_by_its_neighbours(machine, monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = _rank_of(server, 0)
    announce(world)
    neighbours = liveness.Neighbours()
    name = {"this": liveness.machine_id(), "another": "another"}[machine]
    pid = os.fork()
    if pid == 0:
        os.closerange(3, 1024)  # a rank of another machine has no copies of the connections of this one
        monkeypatch.setattr(liveness, "machine_id", lambda: name)
        announce(_rank_of(dist.TCPStore("127.0.0.1", server.port, is_master=False), 1))
        time.sleep(60)
        os._exit(0)
    while not world.store.has("peer/1"):
        time.sleep(0.01)
    neighbours.report_dead(world, world.store)
    assert world.store.add("note/count", 0) == 0
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    while not world.store.has("note/1"):
        neighbours.report_dead(world, world.store)
        time.sleep(0.01)
    neighbours.report_dead(world, world.store)
    assert world.store.add("note/count", 0) == 1
    note = world.store.read("note/1")
    assert note["from"] == note["rank"] == 1 and note["over"] and note["error"].startswith("its process is gone")


# -- other things ------------------------------------------------------------------------------------


def _forks(ctx):
    """A child that leaves by sys.exit runs what the parent would run at its end."""
    pid = os.fork()
    if pid == 0:
        try:
            with ctx:
                sys.exit(0)
        finally:
            os._exit(3 if ctx.world.closed else 0)
    status = os.waitpid(pid, 0)[1]
    weft.barrier(ctx)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_does_not_leave_the_job():
    assert run_ranks(_forks, 2) == [0, 0]


def _other_version(ctx):
    torch.__version__ = f"2.{ctx.rank}"
    try:
        weft.adopt(device="cpu")
    except weft.errors.ContextError as error:
        return str(error)
    return "nothing raised"


def test_ranks_with_other_versions_are_told():
    with pytest.raises(RanksFailed):  # the ranks are not used again
        assert all(
            "version of torch: '2.0' on rank 0, '2.1' on rank 1" in text for text in run_ranks(_other_version, 2)
        )
        run_ranks(lambda _: 1 / 0, 2)


def _destroys_a_group_itself(ctx):
    group = dist.new_group(backend="gloo")
    world = World(ranks=(0, 1), rank=ctx.rank, group=group)
    before = straggler_watch._may_wait(world)
    dist.destroy_process_group(group)
    return before, straggler_watch._may_wait(world), straggler_watch._waited_in(world)


def test_nobody_waits_in_a_group_that_is_destroyed_without_close():
    assert run_ranks(_destroys_a_group_itself, 2) == [(True, False, {})] * 2
