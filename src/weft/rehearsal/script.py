"""A script, unmodified, as one rank of many would run it: until it has made some steps."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from weft.context.rank_facts import on_nodes
from weft.errors import ContextError
from weft.peers.pretended import Mail
from weft.private_names import replaced
from weft.rehearsal.messages import Links
from weft.rehearsal.rehearse import one_rehearsal_at_a_time, simulated
from weft.rehearsal.result import Rehearsal
from weft.rehearsal.simulation.numbers import Endless
from weft.rehearsal.simulation.observe import ProgramObserver, observing
from weft.rehearsal.simulation.pretended_tensors import Assumed, Simulation

_MOST_CALLS = 5  # of a model in a step, if the program never ends; then it is batches that do not


class _Enough(BaseException):
    """The script has made its steps."""


def rehearse_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    ranks: int,
    mesh: Mapping[str, int] | None = None,
    rank: int = 0,
    steps: int = 2,
    links: Links = Links(),  # noqa: B008  (frozen)
    assume: Assumed | None = None,
    mail: Mail | None = None,
) -> Rehearsal:
    """As `weft.rehearse`, for a script as it is; `weft.start()` in it returns the pretended context.

    A step begins with the first call of a module, with gradients, after the optimizer has stepped; of several
    optimizers, the one that stepped first counts. When `steps` of them are done, the script is left. Of a script that
    ends before it begins another one, the last step ends with that of the optimizer, and no exchange of `local_steps`
    follows it.

    Changes: what the script changes, such as files that it writes; while it runs, functions of torch, for the whole
    process. Collectives: none.

    Args:
        script: Its path.
        arguments: Of its command line.
        ranks: As for `weft.rehearse`, as the following.
        mesh: Of the context, if the script names none.
        rank: Which one to be.
        steps: How many.
        links: Of the cluster.
        assume: What the script reads on the host.
        mail: What other ranks of the same job sent when they were rehearsed; they need not run again.

    Raises:
        ContextError: The script makes no step; or as `weft.rehearse`, such as that another rehearsal is running.
        BaseException: What the script raises.
    """

    def run(found: ProgramObserver, memory: contextlib.AbstractContextManager[Simulation]) -> Simulation:
        with memory as simulation, observing(found, simulation), _as_main(Path(script), arguments, links.per_node):
            found.begin("build")
            with _until(steps, found) as made:
                try:
                    runpy.run_path(str(script), run_name="__main__")
                except SystemExit as end:
                    if end.code not in (None, 0):
                        raise
                except Endless:
                    if made.calls < _MOST_CALLS:
                        raise
                    raise _too_few(script, made.steps, "batch after batch, and the optimizer does not step") from None
                if made.steps < min(steps, 2):
                    ends = "a script that ends after it" if made.steps else "no optimizer that steps"
                    raise _too_few(script, made.steps, ends)
                found.end_in_step(is_open=made.is_open)
        return simulation

    name = " ".join([str(script), *arguments])
    mail = Mail() if mail is None else mail
    with one_rehearsal_at_a_time():
        return simulated(name, run, ranks, mail, mesh=mesh, rank=rank, steps=steps, links=links, assume=assume)


def _too_few(script: str | Path, steps: int, found: str) -> ContextError:
    return ContextError(
        f"rehearse: {script} makes {['no step', 'one step'][steps] if steps < 2 else f'{steps} steps'}",
        found=found,
        expected="a script that trains, and at least two steps: what is held is seen between them",
        fix=f"python {script}  # does it train?",
    )


@dataclass
class _Made:
    """What a script has done so far.

    Attributes:
        steps: Of the optimizer.
        is_open: It has begun another one.
        calls: With gradients, of the module that was called first in that one.
    """

    steps: int = 0
    is_open: bool = False
    calls: int = 0


@contextlib.contextmanager
def _until(steps: int, found: ProgramObserver) -> Iterator[_Made]:
    """Tell steps apart, and leave the body after so many; yields what has been done."""
    leader: weakref.ref[torch.optim.Optimizer] | None = None
    first: weakref.ref[nn.Module] | None = None
    made = _Made()

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal leader
        leader = leader or weakref.ref(optimizer)
        if leader() is optimizer:
            made.steps, made.is_open = made.steps + 1, False
            found.stepped()

    def called(module: nn.Module, *_: Any) -> None:
        nonlocal first
        if not torch.is_grad_enabled():
            return
        if made.is_open:
            made.calls += first is not None and first() is module
            return
        first, made.is_open, made.calls = weakref.ref(module), True, 1
        if made.steps == steps:
            found.exchange()
            found.end()
            raise _Enough
        found.begin(f"step {made.steps + 1}")

    with (
        register_optimizer_step_post_hook(stepped),
        register_module_forward_pre_hook(called),
        contextlib.suppress(_Enough),
    ):
        yield made


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str], per_node: int) -> Iterator[None]:
    """As a launcher that starts `python script arguments` has it; what it prints goes to stderr."""
    place = on_nodes(dist.get_rank(), dist.get_world_size(), per_node)
    names = ("rank", "world_size", "local_rank", "local_world_size")
    os.environ.update({name.upper(): str(place[name]) for name in names})  # until the rehearsal is over
    path = [str(script.resolve().parent), *sys.path]
    with replaced(sys, argv=[str(script), *arguments], path=path), contextlib.redirect_stdout(sys.stderr):
        yield
