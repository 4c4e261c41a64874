"""Test worlds: real ranks from a warm pool, pretended ones, and laws that can fail."""

import contextlib
import os
import random
import signal
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.processes import is_alive
from weft.peers import straggler_watch
from weft.testing import RankPool, RanksFailed, assert_equivalent, fake, largest_difference, laws, run_ranks
from weft.testing.laws import Row

# -- run_ranks: results ------------------------------------------------------------------------------


def _where(ctx, *args, **kwargs):
    total = weft.reduce(torch.tensor(float(ctx.rank)), ctx, "sum")
    return ctx.rank, ctx.world_size, float(total), args, kwargs, os.getpid()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_results_come_in_rank_order_from_processes_of_their_own(n):
    found = run_ranks(_where, n, 1, "two", three=[3])
    assert [r[:5] for r in found] == [(rank, n, n * (n - 1) / 2, (1, "two"), {"three": [3]}) for rank in range(n)]
    assert len({r[5] for r in found} | {os.getpid()}) == n + 1


def test_the_same_processes_are_used_again():
    assert [r[5] for r in run_ranks(_where, 2)] == [r[5] for r in run_ranks(_where, 2)]


@pytest.mark.slow
def test_a_warm_call_costs_milliseconds():
    def used(ctx):
        weft.barrier(ctx)
        return time.thread_time()  # not what other threads of a long-lived process do

    def costs():
        begin, first = time.thread_time(), run_ranks(used, 2)
        for _ in range(9):
            run_ranks(used, 2)
        last = run_ranks(used, 2)
        here, there = time.thread_time() - begin, [end - start for start, end in zip(first, last, strict=True)]
        return max(here / 11, *(one / 10 for one in there))

    run_ranks(used, 2)
    least = min(costs() for _ in range(3))  # a busy machine makes the same work cost more now and then
    # 0.004 in a new process; more after thousands of tests, whose garbage is collected. A start takes seconds.
    assert least < 0.15, least


def test_closures_lambdas_and_local_classes_can_be_sent():
    offset = torch.tensor(10.0)

    class Local(nn.Linear):
        def extra(self):
            return 3

    def inner(ctx):
        return float(offset) + ctx.rank + Local(1, 1).extra()

    assert run_ranks(inner, 2) == [13.0, 14.0]
    assert run_ranks(lambda ctx: ctx.rank, 2) == [0, 1]


def test_options_reach_the_context():
    def axes(ctx):
        return dict(ctx.axes), ctx.data_axes, ctx.seed, ctx.debug, ctx.on("shard").world_size

    options = {"mesh": {"replica": 2, "shard": -1}, "data_axes": ["shard"], "seed": 5, "debug": True}
    assert run_ranks(axes, 4, **options) == [({"replica": 2, "shard": 2}, ("shard",), 5, True, 2)] * 4
    one = run_ranks(axes, 1, mesh={"replica": 1, "shard": 1}, seed=7)
    assert one == [({"replica": 1, "shard": 1}, ("replica", "shard"), 7, False, 1)]


@pytest.mark.parametrize("n", [0, -1, 65, 2.0, True, "2"], ids=repr)
def test_a_wrong_number_of_ranks_raises(n):
    with pytest.raises(ValueError, match=rf"(?s)run_ranks: n = .* cannot be used\n  found:    {n!r}\n.*fix: +run_r"):
        run_ranks(_where, n)


def test_what_cannot_be_sent_raises_here():
    with pytest.raises(TypeError, match=r"(?s)run_ranks: _where and its arguments cannot be sent.*found:.*lock.*fix:"):
        run_ranks(_where, 2, threading.Lock())


def test_what_cannot_be_sent_back_is_said():
    with pytest.raises(RanksFailed, match="the result cannot be sent back"):
        run_ranks(lambda ctx: threading.Lock(), 2)


def test_output_is_shown_by_rank(capfd):
    def speaks(ctx):
        print(f"hello from {ctx.rank}")
        os.write(2, b"from below\n")

    run_ranks(speaks, 2)
    expected = "[rank 0] hello from 0 [rank 0] from below [rank 1] hello from 1 [rank 1] from below"
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == sorted(expected.replace(" [rank", "\n[rank").splitlines())


# -- run_ranks: failures -----------------------------------------------------------------------------


def _raises_on_one(ctx, error):
    print("about to fail")
    if ctx.rank == 1:
        raise error
    weft.barrier(ctx)


def test_an_exception_is_shown_with_rank_and_traceback():
    with pytest.raises(
        RanksFailed, match=r"run_ranks: rank 1 failed first\n---- rank 1 of 3 ----\nTraceback"
    ) as caught:
        run_ranks(_raises_on_one, 3, KeyError("the key"))
    failure = caught.value
    assert failure.first == 1 and isinstance(failure.__cause__, KeyError)
    assert isinstance(failure.errors[0], weft.errors.PeerError) and failure.errors[0].rank == 1
    assert "in _raises_on_one" in failure.traces[1] and "about to fail" in failure.traces[1]
    assert "---- rank 0 of 3 ----" in str(failure) and "rank 1 failed: KeyError: 'the key'" in failure.traces[2]


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_exception_that_cannot_be_sent_still_has_its_traceback():
    def fails(ctx):
        raise Unpicklable("this", "that")

    with pytest.raises(RanksFailed, match="Unpicklable: this and that") as caught:
        run_ranks(fails, 2)
    assert set(caught.value.traces) == {0, 1}
    for rank, error in caught.value.errors.items():
        assert type(error) is RuntimeError and str(error) == caught.value.traces[rank]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_leaving_python_is_a_failure_too(kind):
    with pytest.raises(RanksFailed, match=kind.__name__):
        run_ranks(_raises_on_one, 2, kind(0))


@pytest.mark.parametrize(
    ("end", "code"),
    [(lambda: os.kill(os.getpid(), signal.SIGKILL), -9), (lambda: os._exit(7), 7)],
    ids=["kill", "exit"],
)
def test_a_rank_that_dies_is_named_with_its_exit_code(end, code):
    def dies(ctx):
        if ctx.rank == 0:
            end()
        weft.barrier(ctx)

    with pytest.raises(RanksFailed, match=f"rank 0 failed first.*\n.*\nended without an answer, exit code {code}") as e:
        run_ranks(dies, 2)
    assert isinstance(e.value.errors[1], weft.errors.PeerError) and e.value.errors[1].rank == 0
    assert e.value.first == 0 and str(e.value.errors[0]) == f"ended without an answer, exit code {code}"


def test_the_last_words_of_a_rank_that_crashes_are_shown():
    def crashes(ctx):
        print("just before")
        dist.all_reduce(torch.zeros(10 if ctx.rank else 200_000))

    with pytest.raises(RanksFailed, match="exit code -6") as caught:
        run_ranks(crashes, 2)
    words = str(caught.value)
    assert "just before" in words and "200000 vs" in words and "in crashes" in words
    assert "rank_worker" not in caught.value.traces[caught.value.first]


@pytest.mark.parametrize("n", [1, 2])
def test_a_hang_fails_when_the_time_is_over(n):
    def hangs(ctx):
        print("going to sleep")
        if ctx.rank == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
            time.sleep(100)

    begin = time.monotonic()
    with pytest.raises(
        RanksFailed, match=r"no answer within 0.3 s\n---- rank 0 of .*\nstill running when it was killed, here"
    ) as caught:
        run_ranks(hangs, n, timeout_s=0.3)
    assert time.monotonic() - begin < 20
    failure = caught.value
    assert failure.first == 0 and isinstance(failure.errors[0], TimeoutError)
    assert f'File "{__file__}", line {hangs.__code__.co_firstlineno + 4} in hangs' in failure.traces[0]
    assert "rank_worker" not in failure.traces[0] and str(failure.errors[0]) == failure.traces[0]


def test_the_rank_that_hangs_comes_before_those_that_waited_for_it(monkeypatch):
    def waits(ctx, how):
        if ctx.rank == 1 and how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif ctx.rank == 1:
            time.sleep(100)
        raise weft.errors.PeerError("rank 1 did not come", rank=1)

    monkeypatch.setattr("weft.testing.ranks._GRACE_S", 0.3)
    for how, said in (("sleep", "here"), ("stop", "and did not say where")):
        with pytest.raises(RanksFailed, match="rank 1 failed first") as caught:
            run_ranks(waits, 2, how)
        assert set(caught.value.errors) == {0, 1} and isinstance(caught.value.errors[1], TimeoutError)
        assert f"still running when it was killed, {said}" in caught.value.traces[1]


def test_a_failure_can_be_pickled():
    import pickle

    with pytest.raises(RanksFailed, match="rank 1 failed first") as caught:
        run_ranks(_raises_on_one, 2, ValueError("bad"))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value) and copied.first == 1 and isinstance(copied.errors[1], ValueError)


def test_the_pool_goes_on_after_any_failure():
    before = [r[5] for r in run_ranks(_where, 2)]
    for bad in (ValueError("bad"), SystemExit(1)):
        with pytest.raises(RanksFailed, match="rank 1 failed first"):
            run_ranks(_raises_on_one, 2, bad)
        after = run_ranks(_where, 2)
        assert [r[:3] for r in after] == [(0, 2, 1.0), (1, 2, 1.0)]
        assert not set(before) & {r[5] for r in after}


def test_a_rank_that_dies_between_two_calls_is_replaced():
    pids = [r[5] for r in run_ranks(_where, 2)]
    os.kill(pids[0], signal.SIGKILL)
    while is_alive(pids[0]) or len(list(Path(f"/proc/{pids[0]}/task").iterdir())) > 1:  # its threads end after it
        pass
    again = run_ranks(_where, 2)
    assert [r[:3] for r in again] == [(0, 2, 1.0), (1, 2, 1.0)] and not is_alive(pids[1])


def test_an_interrupted_call_leaves_no_ranks_behind(tmp_path):
    def reports(ctx, folder):
        (folder / str(ctx.rank)).write_text(str(os.getpid()))
        time.sleep(100)

    def interrupt(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        run_ranks(_where, 2)  # warm
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        with pytest.raises(KeyboardInterrupt):
            run_ranks(reports, 2, tmp_path)
    finally:
        signal.signal(signal.SIGALRM, old)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    end = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < end:
        pass
    assert len(pids) == 2 and not any(map(is_alive, pids))


@pytest.mark.slow
def test_a_pool_of_its_own_ends_with_close():
    pool = RankPool()
    pids = [r[5] for r in pool.run(_where, 2)]
    assert pids != [r[5] for r in run_ranks(_where, 2)]
    pool.close()
    assert not any(map(is_alive, pids))
    pool.close()
    assert len(pool.run(_where, 1)) == 1  # and can be used again
    pool.close()


# -- run_ranks: no job sees another ------------------------------------------------------------------


def _state():
    return {
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "path": list(sys.path),
        "dtype": torch.get_default_dtype(),
        "device": torch.empty(0).device,
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "draws": (torch.rand(2).tolist(), random.random(), np.random.random()),
        "filters": len(warnings.filters),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "python threads": [t.name for t in threading.enumerate()],
    }


def _leaves_everything(ctx):
    os.environ["LEFT_BEHIND"] = "1"
    os.environ.pop("PATH", None)
    os.chdir("/")
    sys.path.insert(0, "/nowhere")
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.set_autocast_enabled("cpu", True)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    random.seed(5)
    np.random.seed(5)
    warnings.simplefilter("ignore")
    torch.manual_seed(9)


@pytest.mark.parametrize("n", [1, 2])
def test_every_job_starts_in_the_same_state(n):
    first = run_ranks(lambda ctx: _state(), n)
    run_ranks(lambda ctx: _leaves_everything(ctx), n)
    again = run_ranks(lambda ctx: _state(), n)
    assert again == first
    assert first[0]["draws"] == first[-1]["draws"]


@pytest.mark.parametrize("what", ["group", "destroyed", "thread"])
def test_a_job_that_leaves_groups_or_threads_costs_its_ranks_only(what):
    def leaves(ctx):
        if what == "group":
            dist.new_group([0, 1])
        elif what == "destroyed":
            ctx.close()
            dist.destroy_process_group()
        else:
            threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        return os.getpid()

    old = run_ranks(leaves, 2)
    found = run_ranks(
        lambda ctx: (os.getpid(), ctx.world_size, _state()["groups"], "sleep" in str(_state()["python threads"])), 2
    )
    assert [f[1:] for f in found] == [(2, 1, False)] * 2 and not {f[0] for f in found} & set(old)


def _wait_in_vain(call, ctx):
    """Rank 0 waits for rank 1, which leaves; nobody fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(straggler_watch, "_PERIOD_S", 0.05)
        patch.setattr(straggler_watch, "_SURE_S", 0.1)
        with contextlib.suppress(RuntimeError, weft.errors.PeerError), weft.adopt() as inner:
            weft.reduce(torch.ones(1), inner)  # which asks for its shape once
            if ctx.rank == 0:
                call(inner)
    return os.getpid()


def _cuts_connections(ctx):
    return _wait_in_vain(lambda _: dist.all_reduce(torch.ones(1)), ctx)


def _abandons_a_collective(ctx):
    return _wait_in_vain(lambda inner: weft.reduce(torch.ones(1), inner), ctx)


def _is_ahead(ctx):
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    return os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize("job", [_cuts_connections, _abandons_a_collective, _is_ahead])
def test_ranks_that_could_not_meet_again_are_not_used_again(job):
    old = run_ranks(job, 2)
    new = run_ranks(lambda ctx: (os.getpid(), float(weft.reduce(torch.ones(1), ctx, "sum"))), 2)
    assert [total for _, total in new] == [2.0, 2.0] and not {pid for pid, _ in new} & set(old)


def test_the_callers_environment_and_folder_are_the_jobs(monkeypatch, tmp_path):
    monkeypatch.setenv("FOR_THE_JOB", "yes")
    monkeypatch.chdir(tmp_path)
    expected = [("yes", str(tmp_path), "1")] * 2
    assert (
        run_ranks(lambda ctx: (os.environ["FOR_THE_JOB"], str(Path.cwd()), os.environ["OMP_NUM_THREADS"]), 2)
        == expected
    )
    monkeypatch.delenv("FOR_THE_JOB")
    assert run_ranks(lambda ctx: "FOR_THE_JOB" in os.environ, 2) == [False, False]


def test_run_ranks_leaves_this_process_alone():
    before = _state()
    threads = threading.active_count()
    run_ranks(_where, 2)
    after = _state()
    before.pop("draws"), after.pop("draws")
    assert before == after and threading.active_count() == threads and not dist.is_initialized()


# -- fake --------------------------------------------------------------------------------------------


def test_a_fake_rank_knows_its_place_and_refuses_collectives():
    ctx = fake(rank=5, world_size=8, mesh={"replica": 2, "shard": 4}, seed=3, local_world_size=4)
    assert (ctx.local_rank, ctx.node_rank, ctx.num_nodes, ctx.seed) == (1, 1, 2, 3)
    assert ctx.coordinates == {"replica": 1, "shard": 1} and ctx.on("shard").ranks == (4, 5, 6, 7)
    with pytest.raises(weft.errors.ContextError, match=r"(?s)reduce: the context has no process group.*found:.*fix:"):
        weft.reduce(torch.ones(1), ctx)
    assert not dist.is_initialized()


def test_fake_ranks_share_out_data_without_processes():
    data = list(range(10))
    seen = []
    for rank in range(4):
        loader, _ = weft.shard_data(torch.utils.data.DataLoader(data, batch_size=2), fake(rank, 4), uneven="empty")
        seen += [int(x) for batch in loader for x in batch]
    assert sorted(seen) == data


@pytest.mark.parametrize("arguments", [(-1, 2), (2, 2), (0, 0), (0, 3, 2), (0, 2, 0)], ids=str)
def test_a_fake_that_cannot_be_raises(arguments):
    rank, size, *node = arguments
    with pytest.raises(weft.errors.ContextError, match=r"(?s)fake: rank .* cannot be\n  found:    rank=.*fix:"):
        fake(rank, size, local_world_size=node[0] if node else None)


def test_the_last_of_a_thousand_ranks():
    assert fake(1023, 1024, mesh={"replica": -1, "shard": 8}).coordinates == {"replica": 127, "shard": 7}


# -- assert_equivalent -------------------------------------------------------------------------------


def _mean(ctx, wrong=False):
    part = torch.arange(8.0).chunk(ctx.world_size)[ctx.rank]
    total = weft.reduce(part.sum(), ctx, "sum")
    return {"mean": total / (8 if not wrong else 8 / ctx.world_size), "size": 8, "name": "x"}


def test_equivalent_training_passes():
    assert_equivalent(_mean, (1, 2, 4))
    assert_equivalent(_mean, (2, 1), wrong=False)


def _at(ctx, one, other):
    return one if ctx.world_size == 1 else other


@pytest.mark.parametrize(
    ("fn", "args", "text"),
    [
        (_mean, (True,), r"world 2, rank 0, against world 1: mean\n"),
        (_at, (torch.ones(2), torch.ones(3)), r"world 2, rank 0.*(?s:.*)shape"),
        (_at, (torch.ones(2), torch.ones(2).double()), r"(?s)world 2, rank 0.*dtype"),
        (_at, ([1, 2], [1, 2, 3]), r"world 2, rank 0, against world 1: the result has 0, 1, 2, not 0, 1"),
        (_at, ({"a": 1}, {"b": 1}), r"world 2, rank 0, against world 1: the result has b, not a"),
        (_at, ("yes", "no"), r"the result is 'no', not 'yes'"),
        (_at, (True, False), r"the result is False, not True"),
        (_at, (1.0, float("nan")), r"(?s)world 2, rank 0.*the result"),
        (_at, (float("nan"), float("nan")), r"(?s)world 1, rank 0.*the result"),
        (_at, (None, None), r"the function returned nothing to compare"),
        (_at, ({}, {}), r"the function returned nothing to compare"),
        (lambda ctx: ctx.rank, (), r"world 2, rank 1, against world 1: the result\n"),
    ],
)
def test_a_difference_is_found_and_named(fn, args, text):
    with pytest.raises(AssertionError, match=text):
        assert_equivalent(fn, (1, 2), *args)


def test_tolerances_are_kept():
    assert_equivalent(_at, (1, 2), 1.0, 1.0 + 1e-6)
    with pytest.raises(AssertionError, match="the result"):
        assert_equivalent(_at, (1, 2), 1.0, 1.0 + 1e-6, rtol=1e-7, atol=0)


def test_a_failing_function_fails_with_its_own_error():
    with pytest.raises(RanksFailed, match="rank 1 failed first"):
        assert_equivalent(_raises_on_one, (2,), ValueError("bad"))


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ([torch.zeros(2)], [torch.tensor([0.0, 3.0])], 3.0),
        ({"a": torch.ones(1), "b": torch.zeros(0)}, {"a": torch.ones(1), "b": torch.zeros(0)}, 0.0),
        ([], [], 0.0),
        (torch.tensor(1.0), torch.tensor(1.0 + 1e-12, dtype=torch.float64), pytest.approx(1e-12, rel=1e-3)),
    ],
)
def test_the_largest_difference(one, two, expected):
    assert largest_difference(one, two) == expected


@pytest.mark.parametrize("place", [0, 1])
def test_a_nan_is_never_a_small_difference(place):
    values = [torch.zeros(3), torch.zeros(3)]
    values[place] = torch.tensor([0.0, float("nan"), 0.0])
    assert not largest_difference([torch.zeros(3)] * 2, values) <= 1e9


def test_values_of_other_shapes_or_structure_have_no_difference():
    with pytest.raises(ValueError, match=r"(?s)0 cannot be compared\n  found:    shapes \(2,\) and \(\)\n.*fix:"):
        largest_difference([torch.zeros(2)], [torch.tensor(0.0)])
    with pytest.raises(ValueError, match="zip"):
        largest_difference([torch.zeros(2)], [])


# -- every law can fail ------------------------------------------------------------------------------


def _rule(fn):
    """A transform on the module, with the contract's decorator around `fn`."""

    @weft.transform(collective=True)
    def planted(module, ctx):
        ctx.agree("planted")
        fn(module, ctx)
        return module, ctx

    def apply(parts, ctx):
        parts.module, ctx = planted(parts.module, ctx)
        return ctx

    return apply


def _bare(fn):
    """The same without the contract."""

    def apply(parts, ctx):
        fn(parts.module, ctx)
        return ctx

    return apply


def _nothing(module, ctx):
    pass


def _refuses(parts, ctx):
    raise ValueError("bad input")


GOOD = Row(name="good", apply=_rule(_nothing), break_input=None)


def test_a_transform_that_does_nothing_keeps_every_law():
    laws.check_laws(GOOD)


def _nudge(module, ctx):
    with torch.no_grad():
        module.head.weight.add_(1e-15)


def _rename(module, ctx):
    module.renamed = module._modules.pop("head")


def _untie(module, ctx):
    module.third.weight = nn.Parameter(module.second.weight.detach().clone())


def _forget(module, ctx):
    module.note = "yours"


def _add_key(module, ctx):
    module.register_buffer("extra", torch.zeros(()))


def _uncopyable(module, ctx):
    module.lock = threading.Lock()


def _changing_copy(module, ctx):
    module.register_forward_hook(lambda m, args, out: out + 1)


class _Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def _wrap(parts, ctx):
    parts.module = _Wrapper(parts.module)
    return ctx


def _unload(parts, ctx):
    parts.loader = list(parts.loader)
    return ctx


def _other_loader(parts, ctx):
    old = parts.loader
    parts.loader = torch.utils.data.DataLoader(old.dataset, batch_sampler=old.batch_sampler, collate_fn=list)
    return ctx


def _half_gradients(module, ctx):
    for p in module.parameters():
        p.register_hook(lambda g: g / 2)


def _mean_instead_of_sum(module, ctx):
    for p in module.parameters():
        p.register_hook(lambda g: weft.reduce(g, ctx, "mean") if ctx.world_size > 1 else g)


def _set_env(module, ctx):
    os.environ["LEAKED"] = "1"


def _draw(module, ctx):
    torch.rand(1)


def _draw_python(module, ctx):
    random.random()


def _draw_numpy(module, ctx):
    np.random.random()


def _default_dtype(module, ctx):
    torch.set_default_dtype(torch.float16)


def _thread(module, ctx):
    threading.Thread(target=threading.Event().wait, args=(1,), daemon=True).start()


def _group(module, ctx):
    if ctx.world_size > 1:
        dist.new_group(list(range(ctx.world_size)))


def _no_grad(module, ctx):
    torch.set_grad_enabled(False)


def _keep(module, ctx):
    import builtins

    builtins.kept = module


def _twice_destructive(parts, ctx):
    """Refuses the second time, after it changed the numbers."""
    if hasattr(parts.module, "done"):
        with torch.no_grad():
            parts.module.head.bias.add_(1)
        raise weft.errors.AlreadyApplied("planted\n  found:    x\n  expected: y\n  fix:      z")
    parts.module.done = True
    return ctx


def _hangs_on_the_others(parts, ctx):
    dist.barrier()  # the refusing rank never comes
    return ctx


def _changes_then_agrees(parts, ctx):
    with torch.no_grad():
        parts.module.head.bias.add_(1)
    ctx.agree("too late")
    return ctx


BROKEN = [
    ("one_rank_changes_nothing", GOOD, {"apply": _bare(_half_gradients)}, "on one rank parameters differ by"),
    ("one_rank_changes_nothing", GOOD, {"apply": _bare(_nudge)}, "on one rank parameters differ by"),
    ("names_stay", GOOD, {"apply": _bare(_rename)}, "AssertionError"),
    ("names_stay", GOOD, {"apply": _rule(_rename)}, "NameChanged"),
    ("names_stay", GOOD, {"apply": _bare(_add_key)}, "AssertionError"),
    ("names_stay", GOOD, {"apply": _bare(_untie)}, "AssertionError"),
    ("names_stay", GOOD, {"apply": _bare(_forget)}, "AssertionError"),
    ("names_stay", GOOD, {"apply": _bare(_uncopyable)}, "cannot pickle"),
    ("names_stay", GOOD, {"apply": _bare(_changing_copy)}, "the copy differs"),
    ("names_stay", GOOD, {"apply": _wrap}, "the class became"),
    ("names_stay", GOOD, {"apply": _unload}, "the loader became"),
    ("names_stay", GOOD, {"apply": _other_loader}, "the loader lost .*collate_fn"),
    ("twice_raises", GOOD, {"apply": _bare(_nothing)}, "a second application was accepted"),
    ("twice_raises", GOOD, {"apply": _twice_destructive}, "refused, but head.bias changed"),
    ("ranks_equal_reference", GOOD, {"apply": _bare(_nothing), "synchronizes": True}, "rank 0 of 2 differs by"),
    ("ranks_equal_reference", GOOD, {"apply": _bare(_mean_instead_of_sum), "synchronizes": True}, "differs by"),
    ("ranks_equal_reference", GOOD, {"apply": _bare(_half_gradients)}, "differs by"),
    ("leaves_no_trace", GOOD, {"apply": _bare(_set_env)}, "environment changed"),
    ("leaves_no_trace", GOOD, {"apply": _bare(_draw)}, "torch random state changed"),
    ("leaves_no_trace", GOOD, {"apply": _bare(_draw_python)}, "python random state changed"),
    ("leaves_no_trace", GOOD, {"apply": _bare(_draw_numpy)}, "numpy random state changed"),
    ("leaves_no_trace", GOOD, {"apply": _bare(_default_dtype)}, "default dtype changed"),
    ("leaves_no_trace", GOOD, {"apply": _bare(_thread)}, "threads changed"),
    ("leaves_no_trace", GOOD, {"apply": _bare(_group)}, "groups changed"),
    ("leaves_no_trace", GOOD, {"apply": _bare(_no_grad)}, "gradients changed"),
    ("leaves_no_trace", GOOD, {"apply": _bare(_keep)}, "still alive after del and one collection.*Model"),
    ("failure_reaches_all", GOOD, {"break_input": GOOD.apply}, "rank 0 did not notice"),
    (
        "failure_reaches_all",
        GOOD,
        {"apply": _hangs_on_the_others, "break_input": _refuses},
        "no answer|needed|left the job",
    ),
    ("failure_reaches_all", GOOD, {"apply": _changes_then_agrees, "break_input": _refuses}, "blames|changed|needed"),
]


def _title(case):
    law, _, _, text = case
    return f"{law}: {text}"


@pytest.mark.parametrize("case", BROKEN, ids=_title)
def test_a_broken_transform_breaks_its_law(case):
    law, row, changes, text = case
    options = {"limit_s": 1.5 if "no answer" in text else 10.0} if law == "failure_reaches_all" else {}
    with pytest.raises((AssertionError, RanksFailed), match=text):
        getattr(laws, law)(replace(row, name="planted", **changes), **options)


def test_a_pair_that_silently_differs_breaks_the_law():
    halves = replace(GOOD, name="halves", apply=_bare(_half_gradients))
    assert laws.pairs_agree(GOOD, replace(GOOD, name="other", apply=_bare(_nothing))) == "agrees"
    with pytest.raises(AssertionError, match="good, then halves: rank 0 differs by"):
        laws.pairs_agree(GOOD, halves)


def test_a_pair_that_is_refused_without_the_right_order_breaks_the_law():
    @weft.transform()
    def first(module, ctx):
        raise ValueError("no")

    @weft.transform()
    def second(module, ctx):
        raise weft.errors.OrderError("not like this")

    for wrong, kind, text in ((first, RanksFailed, "ValueError: no"), (second, AssertionError, "not like this")):
        row = replace(GOOD, name="wrong", apply=lambda parts, ctx, wrong=wrong: wrong(parts.module, ctx)[1])
        with pytest.raises(kind, match=text):
            laws.pairs_agree(GOOD, row)
