"""A configuration of DeepSpeed: what the pipeline owns is filled in, the rest passes through as it is.

Pure functions over dicts. A key that the pipeline owns may be left out, be "auto", or have the value it has
here anyway; anything else is a contradiction, and all of them are reported at once.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.errors import type_error, value_error

_AUTO = "auto"


class Facts(NamedTuple):
    """What the pipeline knows.

    Attributes:
        stage: 1, 2 or 3.
        dtype: Of the trained parameters.
        ranks: Number of ranks that divide.
        optimizer: Name of the optimizer's class.
        options: Its options.
        bucket_bytes: Gradient bytes per message.
        reduce_dtype: In which gradients travel; None: their own.
        optimizer_place: "cpu", a directory, or None: where the optimizer's state is offloaded to.
        parameter_place: The same for parameters.
    """

    stage: int
    dtype: torch.dtype
    ranks: int
    optimizer: str
    options: Mapping[str, Any]
    bucket_bytes: int
    reduce_dtype: torch.dtype | None
    optimizer_place: str | None
    parameter_place: str | None


def read(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """A copy of a configuration, read from its file if it is one.

    Raises:
        TypeError: Neither a mapping nor a path.
        ValueError: The file is no JSON object.
        OSError: It cannot be read.
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, (str, os.PathLike)):
        raise type_error(
            "zero_partition: config is not a configuration",
            found=type(config).__name__,
            expected="a dict with DeepSpeed's keys, or the path of a JSON file with them",
            fix='config={"zero_optimization": {"reduce_bucket_size": 5e8}}',
        )
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8"))
        problem = f"a JSON {type(found).__name__}"
    except json.JSONDecodeError as error:
        found, problem = None, str(error)
    if not isinstance(found, dict):
        raise value_error(
            f"zero_partition: config = {str(config)!r} holds no configuration",
            found=problem,
            expected="a JSON object with DeepSpeed's keys",
            fix='{"zero_optimization": {"reduce_bucket_size": 5e8}}',
        )
    return found


def complete(config: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """Fill in what the pipeline owns.

    Raises:
        ValueError: Keys contradict the pipeline; the text lists all of them.
    """
    done = _without_auto(config)
    wrong: list[str] = []
    _own(done, _owned(facts), "", wrong)
    _check_optimizer(done, facts, wrong)
    wrong += _refused(done)
    done.setdefault("gradient_clipping", 0.0)  # DeepSpeed would clip at 1.0
    done.setdefault("train_micro_batch_size_per_gpu", _micro_batch(done.get("train_batch_size"), facts.ranks))
    done.setdefault("steps_per_print", None)
    zero = done["zero_optimization"]
    zero.setdefault("reduce_bucket_size", max(facts.bucket_bytes // facts.dtype.itemsize, 1))
    _offload(zero, "offload_optimizer", facts.optimizer_place, wrong)
    _offload(zero, "offload_param", facts.parameter_place, wrong)
    if wrong:
        raise value_error(
            f"zero_partition: {len(wrong)} key(s) of the configuration contradict the pipeline",
            found="; ".join(wrong),
            expected='these keys left out, or "auto": the pipeline fills them in',
            fix="config={...}  # without them",
        )
    return done


def _owned(facts: Facts) -> dict[str, Any]:
    low = facts.dtype == torch.bfloat16
    owned: dict[str, Any] = {
        "gradient_accumulation_steps": (1, "weft.accumulate_grads accumulates"),
        "managed_gradient_accumulation": (False, "every optimizer.step() is a step"),
        "zero_allow_untested_optimizer": (True, "the optimizer is yours"),
        "zero_force_ds_cpu_optimizer": (False, "the optimizer is yours"),
        "zero_optimization": {
            "stage": (facts.stage, f"stage={facts.stage}"),
            "memory_efficient_linear": (False, "it exchanges torch.nn.functional.linear for the whole process"),
        },
        "fp16": {"enabled": (False, "DeepSpeed cannot scale a loss that is not its own; use bf16")},
        "bf16": {"enabled": (low, f"the parameters are {str(facts.dtype).removeprefix('torch.')}")},
        "torch_autocast": {"enabled": (False, "weft.with_precision casts")},
        "amp": {"enabled": (False, "weft.with_precision casts")},
    }
    if facts.reduce_dtype is not None:
        name = {torch.bfloat16: "bfp16", torch.float16: "fp16"}.get(facts.reduce_dtype, "fp32")
        owned["communication_data_type"] = (name, "weft.with_precision chose it")
    return owned


def _own(config: dict[str, Any], owned: Mapping[str, Any], path: str, wrong: list[str]) -> None:
    for key, rule in owned.items():
        given = config.get(key)
        if not isinstance(rule, Mapping):
            value, why = rule
            if key in config and (given != value or isinstance(given, bool) != isinstance(value, bool)):
                wrong.append(f"{path}{key} = {given!r} (here {value!r}: {why})")
            config[key] = value
        elif key in config or key == "zero_optimization" or any(value for value, _ in rule.values()):
            if not isinstance(given, dict):
                wrong += [f"{path}{key} = {given!r} (a section is expected)"] if given is not None else []
                given = config[key] = {}
            _own(given, rule, f"{path}{key}.", wrong)


def _check_optimizer(config: dict[str, Any], facts: Facts, wrong: list[str]) -> None:
    """An optimizer in the configuration must be the one that was given; it is taken out."""
    section = config.pop("optimizer", None)
    if isinstance(section, dict):
        kind = section.get("type", facts.optimizer)
        if str(kind).lower() != facts.optimizer.lower():
            wrong.append(f"optimizer.type = {kind!r} (here {facts.optimizer!r}: the optimizer that was given)")
        for key, value in (section.get("params") or {}).items():
            here = facts.options.get(key, _AUTO)
            if (tuple(value) if isinstance(value, list) and isinstance(here, tuple) else value) != here:
                wrong.append(f"optimizer.params.{key} = {value!r} (here {here!r}: that of the optimizer)")
    elif section is not None:
        wrong.append(f"optimizer = {section!r} (a section is expected)")
    if config.pop("scheduler", None) is not None:
        wrong.append("scheduler (a scheduler of torch acts on the optimizer that was given)")


def _refused(config: Mapping[str, Any]) -> Iterator[str]:
    """Parts that take the loop over, and would not be under it here."""
    zero = config.get("zero_optimization") or {}
    if zero.get("zenflow") is not None:
        yield "zero_optimization.zenflow (it steps in the middle of backward, and needs engine.backward)"
    if (config.get("compile") or {}).get("deepcompile"):
        yield "compile.deepcompile (it needs engine.compile and engine.backward; use weft.compile)"


def _micro_batch(train_batch: Any, ranks: int) -> int:
    return train_batch // ranks if isinstance(train_batch, int) and train_batch % ranks == 0 else 1


def _offload(zero: dict[str, Any], key: str, place: str | None, wrong: list[str]) -> None:
    if place is None:
        return
    section = zero[key] = dict(zero.get(key) or {})
    settings = {"device": "cpu"} if place == "cpu" else {"device": "nvme", "nvme_path": place}
    for name, value in settings.items():
        given = section.setdefault(name, value)
        if given != value:
            wrong.append(f"zero_optimization.{key}.{name} = {given!r} (here {value!r}: offload)")


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the keys whose value is "auto": what is left to choose, by the pipeline or by DeepSpeed."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else copy.deepcopy(value)
        for key, value in section.items()
        if value != _AUTO
    }
