"""Which layer sets what: argument > environment > file > default, and where each value came from.

Nothing here reads `os.environ`; `start` hands the mapping over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist

from weft import torch_internals
from weft.engines.probes import PROBE_MODES, ProbeMode
from weft.environments.joined import JOINED_VARIABLE
from weft.errors import ContextError, listed
from weft.peers.replica_groups import REPLICA_VARIABLE
from weft.peers.store import SECRET_VARIABLE

NOT_DATA_AXES = frozenset(
    {"tensor", "context", "sequence", "pipeline", "tp", "cp", "sp", "pp"}
)  # along these every rank sees the same batch


class Settings(NamedTuple):
    """The values `start` works with, and the layer each one came from."""

    mesh: Mapping[str, int] | None
    data_axes: Sequence[str] | None
    device: str | None
    backend: str | None
    timeout_s: float
    seed: int
    debug: bool
    probes: ProbeMode
    sources: tuple[tuple[str, str], ...]


def parse_mesh(text: str) -> dict[str, int]:
    """The axes of "replica=2,shard=-1"."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        mesh[name.strip()] = int(size)
    return mesh


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _parse_bool(text: str) -> bool:
    truth = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.strip().lower() not in truth:
        raise ValueError(text)
    return truth[text.strip().lower()]


def is_flag(value: Any) -> bool:
    """Whether this is true or false."""
    return type(value) is bool


def is_text(value: Any) -> bool:
    """Whether this is a text that says something."""
    return isinstance(value, str) and value != ""


def _is_mesh(value: Any) -> bool:
    return isinstance(value, dict) and all(type(size) is int for size in value.values()) and bool(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


class Setting(NamedTuple):
    """One setting of `start`, or one option of `weft launch`, which has no variable.

    Attributes:
        fits: Whether a value of a configuration file can be used.
        expected: In words, of a file.
        default: Where nothing sets it.
        question: That `weft config` asks.
        variable: Of the environment.
        example: As text of the environment.
        parse: Makes a value of its text.
    """

    fits: Callable[[Any], bool]
    expected: str
    default: Any
    question: str
    variable: str = ""
    example: str = ""
    parse: Callable[[str], Any] = str


def _parse_probes(text: str) -> str:
    if text not in PROBE_MODES:
        raise ValueError(text)
    return text


SETTINGS = MappingProxyType({
    "mesh": Setting(
        _is_mesh, "a table such as { replica = 2, shard = -1 }", None, "mesh axes, as in replica=2,shard=-1",
        "WEFT_MESH", "replica=1,shard=-1", parse_mesh,
    ),
    "data_axes": Setting(
        _is_names, "a list of axis names", None, "axes along which batches differ",
        "WEFT_DATA_AXES", "replica,shard", _parse_names,
    ),
    "device": Setting(is_text, 'a device such as "cuda"', None, "device", "WEFT_DEVICE", "cuda:0"),
    "backend": Setting(is_text, 'a backend such as "gloo"', None, "backend", "WEFT_BACKEND", "gloo"),
    "timeout_s": Setting(_is_number, "seconds > 0", 600.0, "seconds until a timeout", "WEFT_TIMEOUT_S", "600", float),
    "seed": Setting(lambda v: type(v) is int, "a whole number >= 0", 0, "seed", "WEFT_SEED", "0", int),
    "debug": Setting(
        is_flag, "true or false", False, "compare collectives between the ranks",  # noqa: FBT003
        "WEFT_DEBUG", "1", _parse_bool,
    ),
    "probes": Setting(
        lambda v: v in PROBE_MODES, 'one of "auto", "every", "off"', "auto", "measure what transforms promise",
        "WEFT_PROBES", "auto", _parse_probes,
    ),
})  # fmt: skip
CONFIG_VARIABLE = "WEFT_CONFIG"  # names the file; `weft launch --config` sets it for the ranks


def resolve(
    arguments: Mapping[str, object],
    env: Mapping[str, str],
    place_source: str = "single",
    file: tuple[str, Mapping[str, Any]] = ("", {}),
) -> Settings:
    """Take each setting from its highest layer; an argument of None means "not given".

    Args:
        arguments: As passed to `start`.
        env: Environment variables; only those that begin with `WEFT_` are looked at.
        place_source: Where rank and world size came from, for the record.
        file: Path and values of a configuration file.

    Returns:
        All settings with their sources.

    Raises:
        ContextError: A variable cannot be read, is unknown, or a value is out of range.
    """
    known = {CONFIG_VARIABLE, SECRET_VARIABLE, *(setting.variable for setting in SETTINGS.values())}
    internal = {REPLICA_VARIABLE, JOINED_VARIABLE}
    unknown = sorted(name for name in env if name.startswith("WEFT_") and name not in known | internal)
    if unknown:
        raise ContextError(
            f"start: the environment has {listed(unknown)}, which has no effect",
            found=listed(unknown),  # without the values: one may be a secret
            expected="one of " + ", ".join(sorted(known)),
            fix=f"unset {' '.join(unknown[:5])}",
        )
    values, sources = layered(SETTINGS, ("argument", arguments), env, (f"file {file[0]}", file[1]))
    values["device"] = None if values["device"] is None else str(values["device"])
    _check_ranges(values)
    return Settings(**values, sources=(("rank, world_size", place_source), *sources.items()))


def layered(
    settings: Mapping[str, Setting],
    given: tuple[str, Mapping[str, Any]],
    env: Mapping[str, str],
    file: tuple[str, Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Take each setting from its highest layer.

    Args:
        settings: By name.
        given: The highest layer, and what it is called; None means "not given".
        env: Environment variables.
        file: What a configuration file has, and what it is called.

    Returns:
        The values by name, and where each came from.

    Raises:
        ContextError: A variable cannot be read.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, setting in settings.items():
        if given[1].get(name) is not None:
            sources[name], values[name] = given[0], given[1][name]
        elif env.get(setting.variable, "") != "":
            sources[name], values[name] = f"environment {setting.variable}", _parsed(setting, env[setting.variable])
        elif name in file[1]:
            sources[name], values[name] = file[0], file[1][name]
        else:
            sources[name], values[name] = "default", setting.default
    return values, sources


def _parsed(setting: Setting, text: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError as error:
        raise ContextError(
            f"start: {setting.variable} cannot be read",
            found=f"{setting.variable}={text!r}",
            expected=f"for example {setting.variable}={setting.example}",
            fix=f"export {setting.variable}={setting.example}",
        ) from error


def _check_ranges(values: Mapping[str, Any]) -> None:
    timeout_s, seed = values["timeout_s"], values["seed"]
    fits = isinstance(timeout_s, (int, float)) and 0 < timeout_s < math.inf
    wrong: tuple[str, str, str, object] | None
    wrong = None if fits else ("timeout_s", repr(timeout_s), "a finite number of seconds > 0", 600)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        wrong = ("seed", f"{type(seed).__name__} {seed!r}", "a whole number, 0 <= seed < 2**63", 0)
    if values["probes"] not in PROBE_MODES:
        wrong = ("probes", repr(values["probes"]), f"one of {', '.join(map(repr, PROBE_MODES))}", '"auto"')
    mesh = values["mesh"]
    if mesh is not None and not (isinstance(mesh, Mapping) and all(isinstance(name, str) for name in mesh)):
        wrong = ("mesh", repr(mesh), "names of axes with their sizes; a DeviceMesh is for weft.adopt", '{"data": -1}')
    if wrong is not None:
        name, found, expected, example = wrong
        problem, fix = f"start: {name} = {values[name]!r} cannot be used", f"weft.start({name}={example})"
        raise ContextError(problem, found=found, expected=expected, fix=fix)


def mesh_axes(
    mesh: Mapping[str, int] | None, data_axes: Sequence[str] | None, world_size: int
) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """Work out the sizes of the mesh axes, and which of them carry different data.

    Args:
        mesh: Axis names and sizes, outermost first; one size may be -1 for "the rest".
        data_axes: Axes that see different batches; by default all but tensor, context, sequence
            and pipeline axes (and their short forms tp, cp, sp, pp).
        world_size: What the sizes have to multiply to.

    Returns:
        `((name, size), ...)` and the names of the data axes.

    Raises:
        ContextError: The sizes do not multiply to `world_size`, or a name or size is wrong.

    Example:
        >>> mesh_axes({"replica": 2, "shard": -1}, None, 8)
        ((('replica', 2), ('shard', 4)), ('replica', 'shard'))
    """
    asked = dict(mesh) if mesh is not None else {"data": world_size}
    wild = [name for name, size in asked.items() if size == -1]
    bad = [f"{name}={size!r}" for name, size in asked.items() if not _is_size(size) or not name.isidentifier()]
    fixed = math.prod(size for size in asked.values() if size != -1) if not bad else 0
    if not bad and wild and len(wild) == 1 and fixed > 0 and world_size % fixed == 0:
        asked[wild[0]] = world_size // fixed
    if bad or not asked or len(wild) > 1 or math.prod(asked.values()) != world_size:
        raise ContextError(
            f"mesh = {dict(mesh or {})} does not fit a world of {world_size}",
            found=listed(bad) if bad else f"{dict(mesh or {})}: {' x '.join(map(str, (mesh or {}).values())) or '0'}",
            expected=f"names and sizes >= 1 that multiply to {world_size}; one size may be -1",
            fix='weft.start(mesh={"data": -1})',
        )
    chosen = tuple(data_axes) if data_axes is not None else tuple(name for name in asked if name not in NOT_DATA_AXES)
    is_text = isinstance(data_axes, str)
    strange = [f"the text {data_axes!r}"] if is_text else [name for name in chosen if name not in asked]
    if strange:
        raise ContextError(
            f"data_axes = {data_axes if is_text else list(chosen)!r} names axes that are not in the mesh",
            found=listed(strange),
            expected="some of " + ", ".join(asked),
            fix=f"data_axes={tuple(asked)!r}",
        )
    return tuple(asked.items()), chosen


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and (size >= 1 or size == -1)


def check_same_settings(group: dist.ProcessGroup, settings: Settings) -> None:
    """Check that no setting differs from what an adopted group was made with.

    Raises:
        ContextError: One does; the text has both values.
    """
    backend, timeout_s = dist.get_backend(group), timeout_of(group)
    sources = dict(settings.sources)
    wrong: list[str] = []
    if settings.backend is not None and settings.backend != backend:
        wrong.append(f"backend {backend!r} of the group, {settings.backend!r} asked for")
    if sources["timeout_s"] != "default" and timeout_s is not None and timeout_s != settings.timeout_s:
        wrong.append(f"timeout {timeout_s:g} s of the group, {settings.timeout_s:g} s asked for")
    if wrong:
        raise ContextError(
            "adopt: the process group already exists, with different settings",
            found="; ".join(wrong),
            expected="settings of the group, or none",
            fix="pass them to torch.distributed.init_process_group, or let weft.start() make the group",
        )


def timeout_of(group: dist.ProcessGroup) -> float | None:
    """Seconds after which a collective of `group` fails, if its backend has it."""
    backend_of = torch_internals.BACKEND_OF.of(group)
    for device in torch_internals.DEVICE_TYPES.of(group):
        try:
            options = backend_of(device).options
        except (RuntimeError, AttributeError):
            continue
        return float(torch_internals.OPTIONS_TIMEOUT.of(options).total_seconds())
    return None
