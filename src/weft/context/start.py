"""Making a context: `start`, `adopt`, `local`.

The only file of the package that reads the environment or creates the default process group.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import logging
import multiprocessing.util
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft import torch_internals
from weft.context import shutdown
from weft.context.config import read_config
from weft.context.distcontext import DistContext
from weft.context.rank_facts import on_nodes, rank_groups
from weft.context.settings import (
    CONFIG_VARIABLE,
    SETTINGS,
    Settings,
    check_same_settings,
    mesh_axes,
    resolve,
    timeout_of,
)
from weft.context.sub_contexts import new_axis_group
from weft.engines import Engine, Spmd, engine_for
from weft.engines.probes import ProbeMode
from weft.engines.torch.device.devices import hardware_of
from weft.engines.torch.hooks.every_optimizer import before_every_step
from weft.environments import Topology, topology
from weft.environments.joined import is_inside_a_rank, note_joined
from weft.environments.topology import Place
from weft.errors import ContextError
from weft.peers.agreement import exchange
from weft.peers.connect import open_store, wait_for_listener
from weft.peers.liveness import announce, check_failed, machine_id
from weft.peers.pretended import PretendedGroup, check_not_pretended
from weft.peers.replica_groups import REPLICA_VARIABLE, STORE, ReplicaGroup
from weft.peers.store import SECRET_VARIABLE, RankStore
from weft.peers.straggler_watch import start_watching
from weft.peers.world import World
from weft.version import __version__, newer_torch

_MANY_RANKS = 256  # above, gloo beside another backend connects two ranks when they first need it, not all at once
_made_in: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # a fork has the group of its rank
_Mesh = tuple[tuple[tuple[str, int], ...], tuple[str, ...]]  # the axes with their sizes, and the names of the data axes


def start(
    *,
    mesh: Mapping[str, int] | None = None,
    data_axes: Sequence[str] | None = None,
    elastic: str | None = None,
    device: str | torch.device | None = None,
    backend: str | None = None,
    engine: Engine | None = None,
    timeout_s: float | None = None,
    seed: int | None = None,
    debug: bool | None = None,
    probes: ProbeMode | None = None,
    config: str | Path | None = None,
) -> DistContext:
    """Join the job this process was launched in, and return its context.

    Reads what torchrun, `weft launch`, SLURM, MPI or Ray Train set in the environment once, creates the process group,
    and returns the context that every transform takes. Without a launcher, there is one rank and no group. Except for
    `engine` and `elastic`, an argument that is not given may be set by an environment variable `WEFT_<NAME>`, or else
    by a TOML file, if you name one; `weft.explain(ctx)` shows which layer won.

    If the program initialised torch.distributed already, that group is adopted (see `adopt`).

    If torch is newer than the versions weft was tested with, rank 0 says so once, through `logging`.

    A process that a rank starts, such as an evaluation script, has the environment of the rank, and a context of its
    own: one rank, on the device of the rank that started it. The variable `WEFT_JOINED` says so, until the rank has
    left. What another launcher starts inside of a rank joins its own job.

    Changes: creates torch's default process group; makes the device of this rank, if it is an accelerator,
    the current one; sets `WEFT_JOINED` in `os.environ` until the context is closed, if there are several ranks; and
    `TORCH_GLOO_LAZY_INIT`, unless it is set, if there are more than 256 and their device is an accelerator.
    Collectives: the rendezvous; one group per mesh axis if there are several.

    Args:
        mesh: Axis names and sizes, outermost first, e.g. `{"replica": 2, "shard": -1}`; one size
            may be -1. Default: one axis "data" over all ranks.
        data_axes: Axes over which batches differ; default: all but tensor, context, sequence and
            pipeline axes.
        elastic: The outermost mesh axis, along which replicas may die and be replaced while the job continues; see
            `resilient`. The context then describes one replica, with the other mesh axes.
        device: "cpu", "cuda", "cuda:1", ...; default: this rank's accelerator if there is one. A
            device type without an index takes the local rank modulo the number of devices.
        backend: Of the process group; default: what fits the device ("gloo" on a CPU).
        engine: Who executes the transforms; default: plain torch.
        timeout_s: A collective or a meeting fails after so many seconds; default 600.
        seed: Of everything that draws random numbers on purpose; default 0.
        debug: Compare operation, shapes and dtypes over the ranks before each collective.
        probes: When to measure that the ranks compute together what one process computes; see `contract.Probe`.
            "auto" (default): in calls 1, 2, 4, 8, ..., 1,024 and in every 1,024th; "every": in all; "off": in none.
        config: A TOML file whose table [start] has any of these settings; default: the file that the
            variable `WEFT_CONFIG` names, else none.

    Returns:
        The context; use it as `with weft.start() as ctx:` so that the job ends cleanly.

    Raises:
        ContextError: The environment contradicts itself or the arguments, the file cannot be used, or this rank was
            started before.
        PeerError: Another rank did not arrive within `timeout_s`.

    Example:
        >>> import weft
        >>> with weft.start() as ctx:
        ...     print(ctx.rank, ctx.world_size, ctx.device.type)
        0 1 cpu
    """
    place = launched()
    rank = dist.get_rank() if _initialized() else place.rank
    if rank == 0 and not is_inside_a_rank(os.environ) and (newer := newer_torch(torch.__version__)):
        _log_once(newer)
    settings = _resolved(
        place.source, config, mesh=mesh, data_axes=data_axes, device=device, backend=backend,
        timeout_s=timeout_s, seed=seed, debug=debug, probes=probes,
    )  # fmt: skip
    if elastic is not None:
        if _initialized():
            check_not_pretended("start: an elastic job", dist.group.WORLD, 'weft.start(mesh={"replica": -1})')
        return _replica(place, settings, elastic, engine)
    if _initialized():
        return _adopted_context(dist.group.WORLD, None, settings, engine)
    chosen = _chosen_engine(engine, settings)
    where = chosen.device(settings.device, _in_environment().local_rank, place.world_size)
    chosen, mesh_of_ranks = _on_mesh(chosen, settings.mesh, settings.data_axes, place.world_size)
    chosen.select(where)
    world = World(ranks=tuple(range(place.world_size)), rank=place.rank, timeout_s=settings.timeout_s)
    if place.world_size > 1:
        _connect(world, place, chosen, where, settings)
    return _context(place, world, mesh_of_ranks, chosen, where, settings)


def adopt(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    data_axes: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    backend: str | None = None,
    engine: Engine | None = None,
    timeout_s: float | None = None,
    seed: int | None = None,
    debug: bool | None = None,
    probes: ProbeMode | None = None,
    config: str | Path | None = None,
) -> DistContext:
    """Join a program that initialised torch.distributed itself (Ray Train, Lightning, your code).

    The group is used, never destroyed. A setting that differs from the group's raises.

    Changes: makes the device of this rank, if it is an accelerator, the current one.
    Collectives: none over the group; one meeting of its ranks through the store.

    Args:
        group: A process group or a `DeviceMesh`; default: the default group.
        mesh: As for `start`; taken from the `DeviceMesh` if one is given.
        data_axes: As for `start`.
        device: As for `start`; default: the `device_id` that the group was made with, if it was.
        backend: Must be the group's, if given.
        engine: As for `start`.
        timeout_s: Must be the group's, if given.
        seed: As for `start`.
        debug: As for `start`.
        probes: As for `start`.
        config: As for `start`.

    Returns:
        The context of the group's ranks.

    Raises:
        ContextError: torch.distributed is not initialised, this process is not in the group, or
            an argument differs from what the group was made with; the text shows both values.

    Example:
        >>> import weft
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with weft.adopt(device="cpu") as ctx:
        ...     print(ctx.rank, ctx.world_size)
        0 1
        >>> dist.destroy_process_group()
    """
    if not _initialized():
        raise ContextError(
            "adopt: there is no process group to adopt",
            found="torch.distributed is not initialised in this process",
            expected="a program that called torch.distributed.init_process_group",
            fix="with weft.start() as ctx: ...",
        )
    settings = _resolved(
        "the adopted group", config, mesh=mesh, data_axes=data_axes, device=device, backend=backend,
        timeout_s=timeout_s, seed=seed, debug=debug, probes=probes,
    )  # fmt: skip
    if isinstance(group, DeviceMesh):
        return _adopted_mesh(group, settings, engine)
    return _adopted_context(group or dist.group.WORLD, None, settings, engine)


def local(
    *,
    device: str | torch.device | None = "cpu",
    engine: Engine | None = None,
    seed: int = 0,
    debug: bool = False,
    probes: ProbeMode = "auto",
) -> DistContext:
    """Return the context of one process alone: for unit tests, notebooks and laptops.

    Reads no environment and makes no process group; every transform works and changes no number.

    Changes: nothing. Collectives: none.

    Args:
        device: As for `start`; default "cpu", so that tests do not depend on the machine.
        engine: As for `start`.
        seed: As for `start`.
        debug: As for `start`.
        probes: As for `start`.

    Returns:
        A context of world size 1.

    Raises:
        ContextError: The seed or the device cannot be used.

    Example:
        >>> import weft
        >>> weft.local() == weft.local(seed=0)
        True
    """
    settings = resolve({"device": device, "seed": seed, "debug": debug, "probes": probes}, {}, "local")
    chosen = _chosen_engine(engine, settings)
    where = chosen.device(settings.device, 0, 1)
    chosen, mesh = _on_mesh(chosen, None, None, 1)
    world = World(ranks=(0,), rank=0, timeout_s=settings.timeout_s)
    return _context(Topology(), world, mesh, chosen, where, settings)


@functools.cache  # per process: a notebook starts many contexts
def _log_once(text: str) -> None:
    logging.getLogger("weft").warning("%s", text)  # no Python warning, which programs may have made an error


def launched() -> Topology:
    """The place of this process, as a launcher left it in the environment.

    Returns:
        One process alone, if there was no launcher, or a rank started this process.
    """
    place = _in_environment()
    if not is_inside_a_rank(os.environ):
        return place
    return Topology(source=f"a process that rank {place.rank} of {place.world_size} started")


def _in_environment() -> Topology:
    """What the environment says, of this process or the rank that started it."""
    return topology(os.environ, read_file=lambda path: Path(path).read_text(encoding="utf-8"))


def _initialized() -> bool:
    """Whether torch.distributed has a default group here; that of a rank which this process was forked from is not."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return _made_in.get(dist.group.WORLD, os.getpid()) == os.getpid()


def _replica(place: Topology, settings: Settings, axis: str, engine: Engine | None) -> DistContext:
    """The context of one replica, which finds the others through the launcher's store.

    Raises:
        ContextError: The axis is not the outermost one, or this is no launcher of such replicas.
    """
    axes, _ = mesh_axes(settings.mesh or {axis: -1}, settings.data_axes, place.world_size)
    if axes[0][0] != axis:
        inside = {name: size for name, size in axes if name != axis}
        raise ContextError(
            f"start: elastic = {axis!r} is not the outermost axis of the mesh",
            found=f"mesh {dict(axes)}",
            expected="the replica axis first, then the axes inside a replica",
            fix=f'weft.start(mesh={json.dumps({axis: -1} | inside)}, elastic="{axis}")',
        )
    most = axes[0][1]
    size = place.world_size // most
    facts = _replica_facts()
    board = _store_of_replicas(place, settings, size, facts) if place.world_size > 1 or facts else None
    chosen = _chosen_engine(engine, settings)
    where = chosen.device(settings.device, _in_environment().local_rank, place.world_size)
    inner = dict(axes[1:]) or {"data": 1}
    data_axes = None if settings.data_axes is None else [name for name in settings.data_axes if name != axis]
    chosen, mesh_of_ranks = _on_mesh(chosen, inner, data_axes, size)
    chosen.select(where)
    name = f"{place.rank // size}.{place.attempt}"
    one = replace(place, rank=place.rank % size, world_size=size)
    world = World(ranks=tuple(range(size)), rank=one.rank, timeout_s=settings.timeout_s)
    if size > 1:
        _connect(world, one, chosen, where, settings, file=f"{facts['folder']}/replica_{name}")
    on_cpu = world.group is None or dist.get_backend(world.group) == "gloo"
    device = torch.device("cpu") if on_cpu else where
    replicas = ReplicaGroup(board, name, most, world, device, facts)
    world.holders.add(replicas)
    world.on_close = replicas.part
    if facts:
        _mark_as_joined(world)
    multiprocessing.util.Finalize(None, shutdown.close_at_exit, args=(world,), exitpriority=0)
    return replace(_context(one, world, mesh_of_ranks, chosen, where, settings), replicas=replicas)


def _replica_facts() -> dict[str, Any]:
    """What the launcher of an elastic job has to say to this process; nothing, if that is no replica."""
    text = "" if is_inside_a_rank(os.environ) else os.environ.get(REPLICA_VARIABLE, "")
    return dict(json.loads(text)) if text else {}


def _store_of_replicas(place: Topology, settings: Settings, size: int, facts: Mapping[str, Any]) -> RankStore:
    """Where the replicas meet, each of so many ranks."""
    ranks = facts.get("ranks", 0)
    if ranks != size or not place.store_served:
        several = f" --replica-ranks {size}" if size > 1 else ""
        raise ContextError(
            "start: this launcher restarts other ranks as well when one fails",
            found=f"rank {place.rank} of {place.world_size}, started by {place.source}: "
            + (f"replicas of {ranks} ranks" if ranks else "all ranks"),
            expected=f"a launcher that starts each replica, of {size} ranks, again by itself",
            fix=f"weft launch -n {place.world_size} --min-replicas 1{several} --max-restarts 10 train.py",
        )
    return _rank_store(open_store(place, settings.timeout_s, serves=False), settings).below(STORE)


def _rank_store(store: dist.Store, settings: Settings, server: int = -1) -> RankStore:
    secret = os.environ.get(SECRET_VARIABLE, "")
    return RankStore(store, limit_s=settings.timeout_s, server=server, secret=secret)


def _resolved(place_source: str, config: str | Path | None, **arguments: object) -> Settings:
    """The settings of all layers: arguments, environment, and the file if one is named."""
    path = config if config is not None else os.environ.get(CONFIG_VARIABLE, "")
    found = read_config(path) if str(path) else None
    environment, of_file = dict(os.environ), {} if found is None else dict(found.start)
    if is_inside_a_rank(environment):
        for name in ("mesh", "data_axes"):  # those of the job
            environment.pop(SETTINGS[name].variable, None)
            of_file.pop(name, None)
    return resolve(arguments, environment, place_source, ("" if found is None else found.path, of_file))


def _store(place: Topology, settings: Settings, *, serves: bool) -> dist.Store:
    """The store at which all ranks of the job meet."""
    if _replica_facts():
        raise ContextError(
            "start: this launcher restarts a failed rank on its own, and the other ranks would never connect to it",
            found=f"weft launch --min-replicas, rank {place.rank} of {place.world_size}",
            expected="a program of replicas",
            fix='weft.start(elastic="replica"), or weft launch without --min-replicas',
        )
    if not serves:
        patient = dict(settings.sources)["timeout_s"] != "default"
        who = f"start: rank {place.rank} of {place.world_size} ({place.source})"
        wait_for_listener(place.master_addr, place.master_port, who=who, limit_s=settings.timeout_s, patient=patient)
    return open_store(place, settings.timeout_s, serves=serves)


def _connect(
    world: World, place: Topology, engine: Engine, device: torch.device, settings: Settings, file: str = ""
) -> None:
    """Create the default process group and the board beside it. The ranks of a replica, on one node, meet in a file."""
    limit = timedelta(seconds=settings.timeout_s)
    serves = place.rank == 0 and not place.store_served
    store = dist.FileStore(file, world.size) if file else _store(place, settings, serves=serves)
    store.set_timeout(limit)
    # Its functions keep the default group of the moment they are imported as a default argument, and with it
    # the connections; optimizers import it. Before there is a group, it is None.
    importlib.import_module("torch.distributed.nn.functional")
    # A restarted job must not read what the ranks before it wrote, and no other job what these write.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")  # of torchrun and `weft launch`
    board = _rank_store(store, settings, server=-1 if place.store_served else 0)
    board = board.below(f"weft/{run}/{place.attempt}")
    world.store = board.below("board")
    first = place.node_rank * place.local_world_size
    if first == place.rank - place.local_rank:  # else the nodes differ, or the ranks were dealt out one by one
        world.near = range(first, min(first + place.local_world_size, world.size))
    announce(world)
    start_watching(world)
    backend = settings.backend or engine.backend(device)
    if "nccl" in backend and device.index is not None:
        _check_own_device(world, world.store, device)
    if device.type != "cpu" and world.size > _MANY_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    with world.store.limited(2 * settings.timeout_s):  # torch waits for the ranks and then for their connections
        dist.init_process_group(
            backend=backend,
            store=board.for_torch("group"),
            rank=place.rank,
            world_size=place.world_size,
            timeout=limit,
            device_id=device if device.index is not None and _is_bound(backend, device.type) else None,
        )
    world.group = dist.group.WORLD
    world.owner = True
    world.serves_store = serves
    _mark_as_joined(world)
    atexit.register(shutdown.close_at_exit, world)


def _check_own_device(world: World, store: RankStore, device: torch.device) -> None:
    """Raise on all ranks if two of them have the same device: NCCL would, later, and without saying which."""
    # With other values of this, NCCL takes ranks for ranks of several machines, which it lets have the same device.
    host = os.environ.get("NCCL_HOSTID", machine_id())
    name = hardware_of(device)
    key = f"device/{host}/{name or device}"
    first = None if store.claim(key, str(world.rank)) else store.get(key).decode()
    found = [each for each in exchange(world, "start", first and [first, world.rank, f"{device} {name}"]) if each]
    if found:
        one, two, which = found[0]
        raise ContextError(
            "start: two ranks have the same device, which NCCL refuses",
            found=f"ranks {one} and {two} on {which.strip()}",
            expected="a device for each rank",
            fix=f"weft launch -n {torch.accelerator.device_count()} for as many ranks as devices, without device=; "
            'or, through the memory of the host, weft.start(backend="gloo")',
        )


def _is_bound(backend: str, device_type: str) -> bool:
    """Whether torch makes smaller groups on such devices by splitting the communicator; others must not be bound."""
    kinds = dict(each.split(":") for each in backend.split(",")) if ":" in backend else {device_type: backend}
    return kinds.get(device_type) in ("nccl", "xccl")


def _mark_as_joined(world: World) -> None:
    """Tell what this process starts, or what is forked from it, that its place in the job is taken."""
    if world.group is not None:
        _made_in[world.group] = os.getpid()
    note_joined(os.environ)
    world.joined = True


def _chosen_engine(engine: Engine | None, settings: Settings) -> Engine:
    """The engine that was given, or that of the device."""
    if engine is not None and not callable(getattr(engine, "backend", None)):
        raise ContextError(
            "start: engine is not an engine",
            found=f"{engine!r}",
            expected="an object with the methods of weft.engines.Engine, or none: plain torch, or XLA on its devices",
            fix="weft.start()",
        )
    return engine or engine_for(settings.device)


def _adopted_mesh(mesh: DeviceMesh, settings: Settings, engine: Engine | None) -> DistContext:
    names = mesh.mesh_dim_names or (("data",) if mesh.ndim == 1 else None)
    if names is None:
        raise ContextError(
            "adopt: the axes of the mesh have no names",
            found=f"a mesh of shape {tuple(mesh.shape)}",
            expected="a DeviceMesh with mesh_dim_names",
            fix='init_device_mesh(..., mesh_dim_names=("replica", "shard"))',
        )
    if mesh.get_coordinate() is None:
        raise ContextError(
            "adopt: this process is not in the mesh",
            found=f"global rank {dist.get_rank()}, a mesh of ranks {mesh.mesh.flatten().tolist()}",
            expected="a mesh this process belongs to",
            fix="if mesh.get_coordinate() is not None: ctx = weft.adopt(mesh)",
        )
    axes = dict(zip(names, mesh.shape, strict=True))
    if mesh.ndim == 1:
        return _adopted_context(mesh.get_group(), axes, settings, engine)
    ctx = _adopted_context(dist.group.WORLD, axes, settings, engine)
    ctx.world.meshes[ctx.axes] = mesh
    return ctx


def _adopted_context(
    group: dist.ProcessGroup | None, axes: Mapping[str, int] | None, settings: Settings, engine: Engine | None
) -> DistContext:
    """A context over a group that somebody else made and will destroy."""
    assert group is not None
    ranks = dist.get_process_group_ranks(group)
    me = dist.get_rank()
    if me not in ranks:
        raise ContextError(
            "adopt: this process is not a member of the group",
            found=f"global rank {me}, group of {ranks}",
            expected="a group this process belongs to",
            fix="if group is not dist.GroupMember.NON_GROUP_MEMBER: ctx = weft.adopt(group)",
        )
    chosen = _chosen_engine(engine, settings)
    pretended = group if isinstance(group, PretendedGroup) else None
    if pretended is None:
        check_same_settings(group, settings)
    timeout_s = timeout_of(group) or settings.timeout_s
    world = World(ranks=tuple(ranks), rank=ranks.index(me), group=group, timeout_s=timeout_s)
    asked_mesh = axes or settings.mesh or (None if pretended is None else pretended.axes)
    chosen, mesh = _on_mesh(chosen, asked_mesh, settings.data_axes, world.size)
    place = Topology(rank=world.rank, world_size=world.size)
    if pretended is not None:
        _check_pretended(pretended, dict(mesh[0]))
        place = Topology(**on_nodes(pretended.rank(), pretended.size(), pretended.per_node))
    elif world.size > 1:
        board = RankStore(torch_internals.default_store(), limit_s=timeout_s)
        board = board.below(f"weft/adopted/{ranks[0]}-{len(ranks)}")
        # Every adoption gets a board of its own; all members adopt in the same order.
        world.store = board.below(str(board.add(str(me), 1)))
        start_watching(world)
        _mark_as_joined(world)
        announce(world)
        place = _place_by_hosts(world)
    bound = getattr(group, "bound_device_id", None)  # init_process_group(device_id=...)
    asked = str(bound) if settings.device is None and bound is not None else settings.device
    asked = asked if pretended is None else "cpu"  # where there is no memory, devices are alike
    where = chosen.device(asked, place.local_rank, place.world_size)
    chosen.select(where)
    return _context(place, world, mesh, chosen, where, settings)


def _check_pretended(group: PretendedGroup, mesh: dict[str, int]) -> None:
    """Raise if the program makes another mesh than its rehearsal was asked for, which gets to know the one in use."""
    if group.axes is not None and group.axes != mesh:
        raise ContextError(
            "start: the rehearsal has a different mesh",
            found=f"{mesh} in the program, {group.axes} of the rehearsal",
            expected="one of them, or the same",
            fix=f"weft.rehearse(program, ranks, mesh={json.dumps(mesh)}), or --mesh "
            + ",".join(f"{name}={size}" for name, size in mesh.items()),
        )
    group.axes = mesh


def _place_by_hosts(world: World) -> Topology:
    """Local and node ranks from the host names of all ranks; an adopted group knows neither."""
    hosts: list[str] = exchange(world, "adopt", os.uname().nodename if hasattr(os, "uname") else "localhost")
    nodes = list(dict.fromkeys(hosts))
    mine = hosts[world.rank]
    world.near = [rank for rank, host in enumerate(hosts) if host == mine]
    return Topology(
        rank=world.rank,
        world_size=world.size,
        local_rank=hosts[: world.rank].count(mine),
        local_world_size=hosts.count(mine),
        node_rank=nodes.index(mine),
        num_nodes=len(nodes),
    )


def _context(
    place: Topology,
    world: World,
    mesh: _Mesh,
    engine: Engine,
    device: torch.device,
    settings: Settings,
) -> DistContext:
    axes, data_axes = mesh
    ctx = DistContext(
        **{each.name: getattr(place, each.name) for each in fields(Place)},
        device=device,
        axes=axes,
        data_axes=data_axes,
        seed=settings.seed,
        timeout_s=world.timeout_s,
        debug=settings.debug,
        probes="off" if world.pretended else settings.probes,  # there are no values
        ranks=world.ranks,
        sources=settings.sources,
        engine=engine,
        world=world,
    )
    if isinstance(engine, Spmd):
        world.holders.add(engine.begin(device, settings.seed))
    if world.group is not None:
        facts = {name: getattr(settings, name) for name in ("seed", "debug", "probes")}
        # Ranks of different versions meet in different collectives.
        versions = {"version of weft": __version__, "version of torch": torch.__version__}
        ctx.agree("start", {"mesh": dict(axes), "data_axes": list(data_axes), **facts, **versions})
        if not world.pretended:  # no optimizer, whose ever it is, steps on what an aborted collective left
            world.holders.add(before_every_step(world, lambda root, _: check_failed(root)))
        _make_axis_groups(ctx)
    return ctx


def _on_mesh(
    engine: Engine, mesh: Mapping[str, int] | None, data_axes: Sequence[str] | None, world_size: int
) -> tuple[Engine, _Mesh]:
    """The engine, which may be one of several devices, and the mesh of the ranks: its axes and data axes."""
    if not isinstance(engine, Spmd):
        return engine, mesh_axes(mesh, data_axes, world_size)
    axes, chosen = mesh_axes(mesh, data_axes, engine.num_devices())
    placed, rank_axes = engine.on_mesh(axes, chosen, world_size)
    return placed, (rank_axes, chosen)


def _make_axis_groups(ctx: DistContext) -> None:
    """Make this rank's group along each axis, and along all data axes together."""
    combinations: list[tuple[str, ...]] = [(name,) for name, _ in ctx.axes] if len(ctx.axes) > 1 else []
    data = tuple(name for name, size in ctx.axes if name in ctx.data_axes and size > 1)
    if len(data) > 1:
        combinations.append(data)
    for names in combinations:
        if len(rank_groups(ctx, names)) > 1:  # else that is the whole world, whose group exists
            new_axis_group(ctx, names, known=True)
