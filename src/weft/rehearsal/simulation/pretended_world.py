"""A default process group with pretended ranks, in place of the one that is there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import Backend
from torch.utils._python_dispatch import _disable_current_modes

from weft.peers.pretended import BACKEND, Mail, Note, PretendedGroup
from weft.tensors.dtensor import forget_groups

__all__ = ["pretended_world"]

_OF_GROUPS = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag")
_BY_LAUNCHED = ("init_process_group", "destroy_process_group")  # of programs that do it themselves: it is done
_FIRST_NAME = 10**9  # torch numbers its groups; a real one of the same name must not be lost


@contextlib.contextmanager
def pretended_world(size: int, rank: int, per_node: int, note: Note, mail: Mail) -> Iterator[PretendedGroup]:
    """Let torch.distributed see one rank of a pretended job; what there was is put back afterwards."""
    c10d: Any = dist.distributed_c10d
    before = {name: getattr(c10d, name) for name in (*_OF_GROUPS, "_tags_to_pg")}
    default, count = c10d._world.default_pg, c10d._world.group_count
    for name in _OF_GROUPS:  # threads may ask for real groups meanwhile
        setattr(c10d, name, dict(before[name]))
    c10d._tags_to_pg = {}
    c10d._world.group_count = _FIRST_NAME

    def create(options: Any, _: Any) -> PretendedGroup:
        return PretendedGroup(options.global_ranks_in_group, options.group_rank, per_node, note, mail)

    def to_tensor(*args: Any) -> Any:
        with _disable_current_modes():
            return pickled(*args)

    pickled, c10d._object_to_tensor = c10d._object_to_tensor, to_tensor
    torch_dist: Any = dist
    own = {name: getattr(dist, name) for name in _BY_LAUNCHED}
    for name in _BY_LAUNCHED:
        setattr(torch_dist, name, lambda *_, **__: None)
    mail.begin()
    Backend._plugins[BACKEND.upper()] = Backend._BackendPlugin(create, True)  # noqa: FBT003
    Backend.backend_list.append(BACKEND)
    Backend.backend_capability[BACKEND] = ["cpu"]
    Backend.backend_type_map[BACKEND] = dist.ProcessGroup.BackendType.CUSTOM
    try:
        group = PretendedGroup(range(size), rank, per_node, note, mail)
        store = dist.HashStore()
        names: dict[int, int] = {each: each for each in range(size)}
        c10d._update_default_pg(group)
        _register(group, store, names)
        yield group
    finally:
        for group_here, name in c10d._pg_names.items():
            if group_here not in before["_pg_names"]:
                c10d._unregister_process_group(name)
        for name, value in before.items():
            setattr(c10d, name, value)
        c10d._object_to_tensor = pickled
        for name, function in own.items():
            setattr(torch_dist, name, function)
        c10d._world.group_count = count
        c10d._update_default_pg(default)
        Backend.backend_list.remove(BACKEND)
        del Backend._plugins[BACKEND.upper()], Backend.backend_capability[BACKEND], Backend.backend_type_map[BACKEND]
        forget_groups()


def _register(group: PretendedGroup, store: dist.Store, ranks: dict[int, int]) -> None:
    """As `init_process_group` does."""
    c10d: Any = dist.distributed_c10d
    name = str(_FIRST_NAME - 1)
    group._set_group_name(name)
    group._set_group_desc("default_pg")
    c10d._world.pg_map[group] = (BACKEND, store)
    c10d._world.pg_names[group] = name
    c10d._world.pg_backend_config[group] = f"cpu:{BACKEND}"
    c10d._world.pg_group_ranks[group] = ranks
    c10d._world.tags_to_pg.setdefault("", []).append(group)
    c10d._world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    c10d._world.pg_to_tag[group] = f"ptd:{name}"
    c10d._register_process_group(name, group)
