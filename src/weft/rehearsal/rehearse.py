"""`rehearse`: run a program as one rank of many would, in this process and without memory."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar, overload

import torch

from weft import torch_internals
from weft.context import DistContext, adopt
from weft.context.settings import mesh_axes
from weft.engines.torch.hooks.every_optimizer import remove_finished_hooks
from weft.errors import ContextError, value_error
from weft.peers.pretended import Mail, NotSent, PretendedGroup
from weft.rehearsal.both_ways import both_ways
from weft.rehearsal.distinct_ranks import distinct_ranks
from weft.rehearsal.messages import Links
from weft.rehearsal.result import Rehearsal
from weft.rehearsal.simulation.lines import line_in
from weft.rehearsal.simulation.numbers import Numbers
from weft.rehearsal.simulation.observe import ProgramObserver, observing
from weft.rehearsal.simulation.pretended_tensors import Assumed, Simulation, without_memory
from weft.rehearsal.simulation.pretended_world import pretended_world
from weft.rehearsal.simulation.shortcuts import fewer_fsdp_chunks, saves_counted

R = TypeVar("R")
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (random.getstate, random.setstate),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (os.getcwd, os.chdir),
)
_running = threading.Lock()
Program = Callable[[DistContext], Callable[[], object]]


@overload
def rehearse(
    program: Program,
    ranks: int,
    *,
    mesh: Mapping[str, int] | None = None,
    rank: int = 0,
    steps: int = 2,
    links: Links = ...,
    assume: Assumed | None = None,
) -> Rehearsal: ...


@overload
def rehearse(
    program: Program,
    ranks: int,
    *,
    mesh: Mapping[str, int] | None = None,
    rank: Literal["all distinct"],
    steps: int = 2,
    links: Links = ...,
    assume: Assumed | None = None,
) -> tuple[Rehearsal, ...]: ...


def rehearse(
    program: Program,
    ranks: int,
    *,
    mesh: Mapping[str, int] | None = None,
    rank: int | Literal["all distinct"] = 0,
    steps: int = 2,
    links: Links = Links(),  # noqa: B008  (frozen)
    assume: Assumed | None = None,
) -> Rehearsal | tuple[Rehearsal, ...]:
    """Run a program as one rank of a job would, and return what that rank holds and sends.

    The program is yours, with the transforms of weft. It runs in this process, on tensors that have shapes but no
    memory, with simulated peers: a model of any size on any number of ranks. Errors of a real run, such as heads that
    are not divisible by the ranks, are raised here too. Bytes at rest and messages are those of a real run; time is a
    model, see `Links`. The other ranks are assumed to send what this one sends.

    Operators are those of a CPU. Small tensors of integers have values (indices, tokens, sizes), no others. If your
    program reads a number from any other tensor, it runs twice: with small numbers that fall, and with large ones that
    rise. If both runs send the same, the one that needs more memory is returned, and `assumed` lists what was read. If
    not, the number decides what runs, and `assume` has to provide it. All numbers are finite. Build everything inside
    `program`: what lies outside it has values and memory, and would be changed by the transforms.

    Changes: nothing that lasts. Meanwhile the default process group is a pretended one, also inside a job that has
    another, and functions of torch are replaced for the whole process: other threads must not use torch, and a second
    rehearsal is refused. Collectives: none.

    Args:
        program: Takes a context, builds model, optimizer and so on, and returns a function that makes one step.
        ranks: How many the job has.
        mesh: As for `weft.start`.
        rank: Which rank to rehearse. Ranks differ if shards are uneven, and between stages of a pipeline: "all
            distinct" rehearses one of each kind and lists the others like it in `same_as`.
        steps: How many steps to make; what is reported is the last one. Optimizers make their state in the first. With
            `local_steps`, an exchange follows the last one, and is reported apart.
        links: Of the cluster, for the model of time, and how many ranks a node has.
        assume: What the program reads on the host: by line, `{"train.py:41": 0.5}`, or `{"values": 0.5}` for all lines.
            Which experts a router chooses: "balanced" at the line of its `topk`, or "choices" for all lines; or the
            number of the expert that all rows choose first.

    Returns:
        A value that prints as a table, compares, and becomes JSON; with "all distinct", several.

    Raises:
        ValueError: There is no such rank, or no step.
        ContextError: The mesh does not fit; or a number that is not known decides what runs, or how large a tensor is,
            at the line in the text; or another rehearsal is running in this process.
        BaseException: Whatever the program raises; a note has the line and the rank.

    Example:
        >>> import weft
        >>> def program(ctx):
        ...     model = torch.nn.Linear(1024, 1024)
        ...     model, ctx = weft.fully_shard(model, ctx)
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...
        ...     def step():
        ...         model(torch.ones(4, 1024)).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...
        ...     return step
        >>> found = weft.rehearse(program, ranks=64)
        >>> found.at_rest.parameters == (1024 + 16) * 1024 * 4 // 64
        False
    """

    def run(found: ProgramObserver, memory: contextlib.AbstractContextManager[Simulation]) -> Simulation:
        with adopt() as ctx:
            ctx.mesh  # noqa: B018  (made here: it is no part of the program)
            with memory as simulation:
                observe_steps(program, ctx, steps, found, simulation)
        return simulation

    name = getattr(program, "__qualname__", type(program).__name__)
    mail = Mail()

    def of(rank: int) -> Rehearsal:
        return simulated(name, run, ranks, mail, mesh=mesh, rank=rank, steps=steps, links=links, assume=assume)

    with one_rehearsal_at_a_time():
        return distinct_ranks(of) if rank == "all distinct" else of(rank)


@contextlib.contextmanager
def one_rehearsal_at_a_time() -> Iterator[None]:
    """Around all ranks of a rehearsal: while it runs, no other one begins, in whatever thread.

    Raises:
        ContextError: One is running.
    """
    if not _running.acquire(blocking=False):
        raise ContextError(
            "rehearse: another rehearsal is running in this process",
            found="a call inside the program of that one, or in another thread",
            expected="one at a time: a rehearsal replaces functions of torch for the whole process",
            fix="weft.rehearse(program, ranks)  # when the other one has returned, or in another process",
        )
    try:
        yield
    finally:
        _running.release()


def simulated(
    name: str,
    run: Callable[[ProgramObserver, contextlib.AbstractContextManager[Simulation]], Simulation],
    ranks: int,
    mail: Mail,
    *,
    mesh: Mapping[str, int] | None,
    rank: int,
    steps: int,
    links: Links,
    assume: Assumed | None,
) -> Rehearsal:
    """Call `run` as one rank of a pretended job; it enters what it is given, in which tensors have no memory.

    `mail` has what ranks sent that were run before, of the same job, and gets what is sent now.
    """
    asked = _checked(ranks, mesh, rank, steps)

    def of(numbers: Numbers) -> Rehearsal:
        def run_as(rank: int) -> tuple[ProgramObserver, Simulation, PretendedGroup]:
            found = ProgramObserver()
            note = found.traffic.note
            with (
                _state_restored(),
                pretended_world(ranks, rank, links.per_node, note, mail) as group,
                fewer_fsdp_chunks(),
            ):
                group.axes = None if mesh is None else asked
                with _located(rank, ranks), saves_counted(group):
                    simulation = run(found, without_memory(assume or {}, numbers))
                return found, simulation, group

        found, simulation, group = _with_peers(run_as, rank, mail)
        axes = group.axes or asked
        moments = found.moments()
        setup, messages, exchange = found.messages(axes, links.per_node)
        return Rehearsal(
            program=name,
            rank=rank,
            world_size=ranks,
            mesh=tuple(axes.items()),
            device="cpu",
            steps=sum(each.label.startswith("step") for each in moments),
            at_rest=moments[-1].at_rest,
            peak=max((each.peak for each in moments), key=lambda memory: memory.total),
            timeline=moments,
            setup=setup,
            messages=messages,
            exchange=exchange,
            saved=group.saved,
            assumed=tuple(simulation.assumed),
            links=links,
            same_as=(rank,),
        )

    return both_ways(of)


def _with_peers(run_as: Callable[[int], R], rank: int, mail: Mail, waiting: tuple[int, ...] = ()) -> R:
    """Run one rank; if it waits for numbers of another one, that one first, as far as it gets."""
    while True:
        known = len(mail)
        try:
            return run_as(rank)
        except NotSent as missing:
            if missing.source in waiting:
                raise  # it continues with what has been sent until here
            with contextlib.suppress(NotSent):
                _with_peers(run_as, missing.source, mail, (*waiting, rank))
            if len(mail) == known:
                raise ContextError(
                    f"rehearse: rank {rank} waits for integers that rank {missing.source} never sends",
                    found="a receive without a send",
                    expected="as many sends as receives of integers between two ranks",
                    fix="torch.distributed.send(tensor, dst) on the other rank",
                ) from None


def observe_steps(program: Program, ctx: DistContext, steps: int, found: ProgramObserver, *call: Any) -> None:
    """Run a program step by step, simulated or real, and note what it does; with an exchange of `local_steps` after."""
    with observing(found, *call):
        found.begin("build")
        step = program(ctx)
        if not callable(step):
            raise value_error(
                "rehearse: the program does not return a step",
                found=f"{type(step).__name__}",
                expected="a function without arguments that makes one step",
                fix="def program(ctx): ...; return step",
            )
        for number in range(1, steps + 1):
            found.begin(f"step {number}")
            step()
        found.exchange()
        found.end()


def _checked(ranks: int, mesh: Mapping[str, int] | None, rank: int, steps: int) -> dict[str, int]:
    if ranks < 1 or not 0 <= rank < ranks or steps < 1:
        raise value_error(
            f"rehearse: rank {rank} of {ranks} cannot make {steps} steps",
            found=f"ranks={ranks}, rank={rank}, steps={steps}",
            expected="0 <= rank < ranks, and at least one step",
            fix="weft.rehearse(program, 1024, rank=0, steps=2), or --ranks 1024 --rank 0 --steps 2",
        )
    return dict(mesh_axes(mesh, None, ranks)[0])


@contextlib.contextmanager
def _located(rank: int, ranks: int) -> Iterator[None]:
    """Let errors of the program name the rank, and the line of the program."""
    try:
        yield
    except Exception as error:
        line = line_in(error)
        error.add_note(f"weft: in the rehearsal of rank {rank} of {ranks}" + (f", at {line}" if line else ""))
        raise


@contextlib.contextmanager
def _state_restored() -> Iterator[None]:
    """Put back what a program draws and sets; it begins with gradients, as a job does."""
    numpy: Any = sys.modules.get("numpy")
    drawn = [(numpy.random.get_state, numpy.random.set_state)] if numpy else []
    before = [(put, get()) for get, put in (*_SETTINGS, *drawn)]
    environment, device = dict(os.environ), getattr(*torch_internals.current_device.home)
    backends: Any = torch_internals.backends.found if "torch._dynamo.eval_frame" in sys.modules else {}
    known = set(backends)
    try:
        with warnings.catch_warnings(), torch.inference_mode(mode=False), torch.enable_grad():
            yield
    finally:
        remove_finished_hooks()
        for put, value in before:
            put(value)
        if device != getattr(*torch_internals.current_device.home):
            torch.set_default_device(device)
        for backend in backends.keys() - known:
            del backends[backend]
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
