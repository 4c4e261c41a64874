"""A default process group with pretended ranks, in place of the one that is there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import Backend

from weft import torch_internals
from weft.peers.pretended import BACKEND, Mail, Note, PretendedGroup
from weft.private_names import replaced
from weft.tensors.dtensor import forget_groups

_BY_LAUNCHED = ("init_process_group", "destroy_process_group")  # of programs that do it themselves: it is done
_FIRST_NAME = 10**9  # torch numbers its groups; a real one of the same name must not be lost


@contextlib.contextmanager
def pretended_world(size: int, rank: int, per_node: int, note: Note, mail: Mail) -> Iterator[PretendedGroup]:
    """Let torch.distributed see one rank of a pretended job; what there was is put back afterwards."""
    c10d: Any = dist.distributed_c10d
    names_of, tagged = torch_internals.GROUP_NAMES, torch_internals.TAGGED_GROUPS
    before = {each: each.of(c10d) for each in (*torch_internals.GROUP_TABLES, tagged)}
    world: Any = torch_internals.world.found
    default, count = world.default_pg, world.group_count
    for each in torch_internals.GROUP_TABLES:  # threads may ask for real groups meanwhile
        each.set(c10d, dict(before[each]))
    tagged.set(c10d, {})
    world.group_count = _FIRST_NAME

    def create(options: Any, _: Any) -> PretendedGroup:
        ranks = options.global_ranks_in_group or range(size)  # torch names none of the default group
        return PretendedGroup(ranks, options.group_rank, per_node, note, mail)

    def to_tensor(*args: Any) -> Any:
        with torch_internals.without_modes():
            return pickled(*args)

    sends, name_of_send = torch_internals.send_object.home
    pickled = getattr(sends, name_of_send)
    done = dict.fromkeys(_BY_LAUNCHED, lambda *_, **__: None)
    mail.begin()
    Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    try:
        torch_internals.use_group(None)
        with replaced(sys, excepthook=sys.excepthook):  # torch sets one of its own
            dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
        group: Any = dist.group.WORLD
        with replaced(sends, **{name_of_send: to_tensor}), replaced(dist, **done):
            yield group
    finally:
        for group_here, name in names_of.of(c10d).items():
            if group_here not in before[names_of]:
                torch_internals.forget_group(name)
        for each, value in before.items():
            each.set(c10d, value)
        world.group_count = count
        torch_internals.use_group(default)
        delattr(Backend, BACKEND.upper())
        Backend.backend_list.remove(BACKEND)
        del torch_internals.BACKENDS.of(Backend)[BACKEND.upper()]
        del Backend.backend_capability[BACKEND], Backend.backend_type_map[BACKEND]
        forget_groups()
