"""`weft estimate`: the sizes of a model and the memory of training it, without its weights."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checks import import_extra
from weft.errors import CheckpointError, ContextError, WeftError
from weft.rehearsal.estimate import OPTIMIZERS, STRATEGIES, TRAINABLE, WIDTHS, Estimate, estimate
from weft.weights.sources import from_path

_PLACE = "pkg.module:Class, a safetensors file or folder, a checkpoint, or a config.json of transformers"


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "estimate",
        help="print the sizes of a model and the memory of training it, without its weights",
        allow_abbrev=False,
        description="Print the parts of a model, and the memory of training it by dtype, optimizer, strategy and "
        "number of ranks, from shapes alone. A model is built on meta; of files only the heads are read. Activations "
        "depend on the program: `weft rehearse` measures them.",
    )
    sub.add_argument("model", metavar="MODEL", help=f'{_PLACE}; arguments as in "models:GPT(layers=12)"')
    sub.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="of the table by ranks (default adamw)")
    sub.add_argument("--dtype", choices=TRAINABLE, default="fp32", help="of the table by ranks (default fp32)")
    sub.add_argument("--ranks", default="1,8,64,1024", metavar="N,N", help="(default 1,8,64,1024)")
    sub.add_argument("--json", action="store_true", help="print the numbers, in bytes, as JSON")


def run(options: argparse.Namespace) -> int:
    """Print; returns 0, 2 if there is no such model."""
    try:
        ranks = tuple(int(each) for each in options.ranks.split(","))
        found = read_model(options.model)
        text = (
            json.dumps(_numbers(found, ranks, options), indent=1)
            if options.json
            else f"{found}\n\n{found.by_ranks(ranks, optimizer=options.optimizer, dtype=options.dtype)}"
        )
    except (CheckpointError, OSError, ValueError) as error:
        print(f"weft estimate: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(text)  # noqa: T201
    return 0


def read_model(place: str) -> Estimate:
    """Measure what a text names: a class with arguments, files of weights, or a configuration of transformers.

    Raises:
        CheckpointError: The files hold no weights that can be read.
        ContextError: There is no such class or file, or it cannot be built without memory.
        MissingExtra: transformers is needed and not installed.
    """
    path = Path(place)
    if path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        path = path / "config.json"
    if path.name.endswith(".json") and path.is_file() and not path.name.endswith(".index.json"):
        config = _transformers(f"{path} needs transformers").AutoConfig.from_pretrained(str(path))
        return estimate(_of_config(config), name=place)
    if path.exists():
        tensors = from_path("estimate", path, "model").tensors
        once = {stored.key: (name, stored) for name, stored in reversed(tensors.items())}
        meta = {
            name: torch.empty(stored.entry.shape, dtype=stored.dtype, device="meta")
            for name, stored in reversed(once.values())
        }
        return estimate(meta, name=place)
    return estimate(_of_class(place), name=place)


def _of_class(place: str) -> nn.Module:
    """Build "pkg.module:Class(...)" on meta; arguments are literals."""
    module_name, _, call = place.partition(":")
    try:
        parsed = ast.parse(call, mode="eval").body
        made = parsed if isinstance(parsed, ast.Call) else ast.Call(parsed, [], [])
        positional = [ast.literal_eval(each) for each in made.args]
        named = {str(each.arg): ast.literal_eval(each.value) for each in made.keywords}
    except (SyntaxError, ValueError) as error:
        raise _no_model(place, f"{error}" if call else "no such file, and no colon") from error
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        built: Any = importlib.import_module(module_name)
        for name in ast.unparse(made.func).split("."):
            built = getattr(built, name)
        with torch.device("meta"):
            model = built(*positional, **named)
    except Exception as error:  # whatever the user's code raises
        raise _no_model(place, f"{type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return model if isinstance(model, nn.Module) else _of_config(model)


def _transformers(problem: str) -> Any:
    return import_extra("transformers", f"estimate: {problem}", expected="the package transformers", extra="interop")


def _of_config(config: Any) -> nn.Module:
    """The model of a configuration of transformers, on meta: of the class it names, or without a head."""
    transformers = _transformers("this needs transformers")
    if not isinstance(config, transformers.PretrainedConfig):
        raise _no_model(type(config).__name__, f"a {type(config).__name__}")
    named = [getattr(transformers, name) for name in config.architectures or () if hasattr(transformers, name)]
    with torch.device("meta"):
        model: nn.Module = named[0](config) if named else transformers.AutoModel.from_config(config)
    return model


def _no_model(place: str, found: str) -> WeftError:
    return ContextError(
        f"estimate: {place} is not a model",
        found=found,
        expected=_PLACE,
        fix='weft estimate "torch.nn:TransformerEncoderLayer(512, 8)"',
    )


def _numbers(found: Estimate, ranks: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": found.name,
        "parameters": found.parameters,
        "buffers_bytes": found.buffers,
        "weights_bytes": {dtype: found.weights(dtype) for dtype in WIDTHS},
        "largest_bytes": {dtype: found.largest(dtype) for dtype in WIDTHS},
        "training_bytes": {
            dtype: {optimizer: found.training(optimizer, dtype).total for optimizer in OPTIMIZERS}
            for dtype in TRAINABLE
        },
        "per_rank_bytes": {
            number: {
                strategy: found.training(options.optimizer, options.dtype, strategy=strategy, ranks=number).total
                for strategy in STRATEGIES
            }
            for number in ranks
        },
        "blocks": [{"name": each.name, "count": each.count, "parameters": each.parameters} for each in found.blocks],
    }
