"""The launcher proper: torch's agent, which starts the ranks, watches them and starts them again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.launcher.api import elastic_launch

from weft.cli.failures import PREEMPTED_TEXT, Ending, before, first_failure
from weft.cli.plan import Plan
from weft.cli.ranks import ROUND
from weft.context.reaching import interface_to, is_here
from weft.context.world import PREEMPTED

__all__ = ["supervise"]

_COUNTED = "weft-c10d"


def supervise(plan: Plan, target: Callable[..., None] | str, *arguments: Any, folder: Path) -> Ending:
    """Run `target` on all ranks of this node until they have ended, one way or the other.

    Args:
        plan: How many ranks and nodes.
        target: A function that can be imported, or a program.
        arguments: Of the target, the same for all ranks.
        folder: In which ranks leave their reports.

    Returns:
        How it ended; the text has the traceback of the rank that failed first.
    """
    # The agent logs every failure at length; the one that came first is told instead.
    for talker in (
        "distributed.elastic.multiprocessing.api",
        "distributed.elastic.agent.server.api",
        "multiprocessing.spawn",
    ):
        logging.getLogger(f"torch.{talker}").setLevel(logging.CRITICAL)
    config = plan.torch_config()
    if plan.most_nodes > 1 and config.rdzv_backend == "c10d":
        rendezvous_handler_registry.register(_COUNTED, partial(_counted, folder=folder))
        # torch takes the name of the machine, which other machines often cannot resolve.
        host = config.rdzv_endpoint.rpartition(":")[0]
        mine = host if is_here(host) else interface_to(host).rpartition(" ")[2]
        config = replace(config, rdzv_backend=_COUNTED, local_addr=mine)
    try:
        elastic_launch(config, target)(*arguments)
    except ChildFailedError as error:
        ending = first_failure(error, folder, attempt=plan.max_restarts)
    except SignalException as error:
        if len(list(folder.glob("*.preempted"))) >= plan.nproc:
            ending = Ending(PREEMPTED, PREEMPTED_TEXT)
        else:
            ending = Ending(128 + error.sigval, f"weft launch: ended by {error.sigval.name}")
    except RendezvousError as error:
        text = f"weft launch: the nodes did not meet at {plan.rdzv}: {error.__cause__ or error}"
        ending = Ending(1, f"{text}\n  fix:      weft doctor --rdzv {plan.rdzv}, on each node")
    else:
        ending = Ending()
    return ending._replace(text=(before(folder, ending.trace) + ending.text).rstrip())


def _counted(parameters: RendezvousParameters, folder: Path) -> RendezvousHandler:
    """The rendezvous of torch's agent, which also tells the ranks of this node how often the nodes have met."""
    # torch compares names to find out which node serves the store; a machine may have more addresses than names.
    host = parameters.endpoint.rpartition(":")[0]
    parameters.config["is_host"] = is_here(host)
    try:
        backend, store = create_backend(parameters)
    except RendezvousConnectionError:
        if not parameters.config["is_host"]:
            raise
        parameters.config["is_host"] = False  # another launcher on this machine was first
        backend, store = create_backend(parameters)
    handler = create_handler(store, backend, parameters)
    meet = handler.next_rendezvous

    def meet_and_tell() -> RendezvousInfo:
        found = meet()
        (folder / ROUND).write_text(str(handler._state_holder.state.round), encoding="utf-8")
        return found

    handler.next_rendezvous = meet_and_tell  # type: ignore[method-assign]
    # torch compares it with what was asked for.
    handler.get_backend = lambda: _COUNTED  # type: ignore[method-assign]
    return handler
