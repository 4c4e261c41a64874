"""The public surface: names, signatures, docstrings, types and errors, as one table each."""

import ast
import doctest
import importlib
import inspect
import operator
import pathlib
import pickle
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable

import pytest

import weft
from tests.known_transforms import TRANSFORMS
from weft import errors

ROOT = pathlib.Path(__file__).parents[2]

# What is public besides the facade, by module.
MODULES = {
    "checkpoint": "Checkpoint Restored RunningSave checkpointable latest restore save save_async verify",
    "collectives": "all_or_none all_to_all any_rank barrier broadcast gather gather_objects main_first on_rank "
    "pad_across reduce reduce_scatter scatter vocab_cross_entropy",
    "data": "BatchMath DataPlan Mixture SeekableStream ShardedLoader Window Windows batch_math find_batch_size "
    "length_batches mix pack_collate pad_collate padding_share split_between split_sequence",
    "environments": "Topology first_host topology",
    "grads": "NamedGrads add_noise centralize clip_norm clip_value grad_samples skip_nonfinite",
    "metrics": "SampleIds denominator gather_metrics weighted_mean",
    "rng": "Seeded Seeds keyed_normal keyed_uniform set_seed sync_rng worker_seeds",
    "interop": "Imported import_accelerate import_dcp import_deepspeed import_trainer",
    "weights": "LoadedWeights PlacedUnit PlacementPlan export find_tied load_weights module_sizes on_meta "
    "plan_placement tie",
}
PUBLIC = [*weft.__all__, *(f"{module}.{name}" for module, names in MODULES.items() for name in names.split())]
PUBLIC += [f"monitoring.{name}" for name in ("logger", "peak_memory", "profile", "throughput", "watch_health")]
PUBLIC += ["contract.no_sync", "contract.offered", "precision.autocast", "precision.creation_dtype"]
WHERE = {name.rpartition(".")[2]: name for name in reversed(PUBLIC)}  # in the facade, if it is there too


def _named(name):
    return operator.attrgetter(WHERE.get(name, name))(weft)


FUNCTIONS = [n for n in WHERE if callable(_named(n)) and not isinstance(_named(n), (type, types.ModuleType))]
ERRORS = [
    "AlreadyApplied", "CheckpointError", "CollectiveRefused", "ContextError", "ContractError", "MissingExtra",
    "NameChanged", "NotSynchronized", "OrderError", "PeerError", "ProbeFailed", "StaleContext", "UnusedParameters",
    "WeftError",
]  # fmt: skip
TYPES = [n for n in WHERE if isinstance(_named(n), type)]
PROTOCOLS = [f"contract.{name}" for name in ("GradSync", "ReducesIn", "Undoable")]
TESTING = ["check_element", "fake", "run_ranks", "assert_equivalent", "assert_rehearsed", "largest_difference"]


# -- names -------------------------------------------------------------------------------------------


def test_all_is_sorted_and_importable():
    assert weft.__all__ == sorted(weft.__all__)
    assert all(hasattr(weft, name) for name in weft.__all__)
    for module, names in MODULES.items():
        assert set(names.split()) <= set(operator.attrgetter(f"{module}.__all__")(weft))
    assert errors.__all__ == sorted([*ERRORS, "listed", "message", "type_error", "value_error", "warn"])


def test_type_checkers_see_what_programs_get():
    block = next(node for node in ast.parse(pathlib.Path(weft.__file__).read_text()).body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert {*seen} | {"errors"} == {*weft.__all__} | weft._SUBMODULES
    different = [n for n, m in seen.items() if getattr(weft, n) is not getattr(importlib.import_module(m), n)]
    assert different == []


def test_nothing_else_is_importable_from_the_facade():
    others = {
        name: value for name, value in vars(weft).items() if not name.startswith("_") and name not in weft.__all__
    }
    own = [n for n, value in others.items() if str(getattr(value, "__module__", "")).partition(".")[0] == "weft"]
    assert own == []


def test_names_of_testing():
    assert weft.testing.__all__ == sorted(weft.testing.__all__)
    assert set(weft.testing.__all__) == {*TESTING, "RankPool", "RanksFailed", "laws"}
    assert weft.testing.laws.__all__ == sorted(weft.testing.laws.__all__, key=lambda n: (n.upper() != n, n))
    assert all(hasattr(weft.testing.laws, name) for name in weft.testing.laws.__all__)


def test_every_module_lists_what_it_exports():
    for path in sorted((ROOT / "src" / "weft").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        if name in ("weft.__main__", "weft.launching.preload") or name.endswith("rank_server"):
            continue
        module = __import__(name, fromlist=["x"])
        source = path.read_text()
        if "__all__" in source:
            missing = [each for each in module.__all__ if not hasattr(module, each)]
            assert not missing, f"{name}.__all__ has {missing}"
            assert module.__all__ == sorted(module.__all__) or name == "weft.testing.laws" or _in_ruff_order(module)
        assert module.__doc__, f"{name} does not say what it does"


def _in_ruff_order(module):
    """CONSTANTS, then Classes, then functions: the order ruff keeps."""
    return module.__all__ == sorted(module.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))


# -- signatures --------------------------------------------------------------------------------------

# Every exception to "object first, ctx second, the rest keyword-only", with its reason.
POSITIONAL_OPTIONS = {
    "with_precision": ["policy"],  # the one thing everybody says: with_precision(model, ctx, "bf16")
    "quantized": ["scheme"],  # likewise: quantized(model, ctx, "nf4")
    "reduce_scatter": ["op"],
    "reduce": ["op"],  # as torch.distributed.all_reduce(tensor, op)
    "place": ["plan"],  # what everybody gives, often as a dict of budgets
    "on_rank": ["rank"],  # reads as "on rank 0"
    "log": ["trackers"],  # what, when, from where, to whom
    "profile": ["folder"],  # where to
    "grad_chain": ["elements"],  # a pipeline, as torch.nn.Sequential takes it
    "grad_samples": ["loss"],  # a function, and then its arguments
    "all_or_none": ["what"],  # a name for people, as in pytest.raises
}
NO_OBJECT = [
    "assemble",
    "barrier",
    "batch_math",
    "check",
    "explain",
    "main_first",
    "on_preemption",
    "profile",
    "sync_rng",
    "throughput",
    "all_or_none",
]  # about the context itself
WITH_PLACE = {name: ["state", "directory", "step"] for name in ("save", "save_async")} | {
    "offloaded": ["module", "optimizer"],
    "restore": ["state", "directory"],  # what, where, when
    "load_weights": ["module", "path"],
    "vocab_cross_entropy": ["logits", "target"],
    "balance_loss": ["probs", "chosen"],
    "balance_bias_": ["bias", "counts"],
    "log": ["values", "step"],
    "optimizers": ["module", "table"],
}


def _parameters(name):
    return list(inspect.signature(_named(name)).parameters.values())


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_takes_objects_then_ctx_then_options_by_name(name):
    parameters = _parameters(name)
    names = [p.name for p in parameters]
    place = names.index("ctx")
    assert place >= 1
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters[: place + 1])
    options = parameters[place + 1 :]
    assert [p.name for p in options if p.kind is not p.KEYWORD_ONLY] == POSITIONAL_OPTIONS.get(name, [])
    assert names[:place] in (
        ["module"],
        ["loader"],
        ["optimizer"],
        ["module", "optimizer"],
        ["module", "loader"],
        ["modules", "loader"],
    )


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - set(TRANSFORMS)))
def test_a_function_takes_its_object_then_ctx_and_the_rest_by_name(name):
    parameters = _parameters(name)
    names = [p.name for p in parameters]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if "ctx" not in names:
        by_two = (
            "export",
            "import_accelerate",
            "import_dcp",
            "import_deepspeed",
            "import_trainer",
            "launch_function",
            "offered",
            "padding_share",
            "plan_pipeline",
            "plan_placement",
            "rehearse",
            "tie",
        )
        assert len(positional) <= 2 and (len(positional) < 2 or name in by_two)
        return
    ctx = parameters[names.index("ctx")]
    assert ctx.default is ctx.empty
    before = len(WITH_PLACE.get(name, ["object"]))
    assert positional.index("ctx") == (0 if name in NO_OBJECT else before)
    assert positional[positional.index("ctx") + 1 :] == POSITIONAL_OPTIONS.get(name, [])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_function_takes_arguments_without_a_name(name):
    kinds = [p.kind for p in _parameters(name)]
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert inspect.Parameter.VAR_POSITIONAL not in kinds or name in (
        "compose",
        "grad_chain",
        "grad_samples",
        "launch_function",
    )


def test_same_thing_same_word():
    words = {p.name for name in FUNCTIONS if name not in ("check", "assemble") for p in _parameters(name)}
    assert not words & {"model", "net", "opt", "optim", "dataloader", "context", "group_name", "no_sync", "dist_ctx"}
    units = {w for w in words if re.search(r"timeout|bytes|seconds", w)}
    assert units == {"timeout_s", "bucket_bytes"}


# -- docstrings --------------------------------------------------------------------------------------

# Nothing they do can fail, apart from what Python itself or the parts raise.
NEVER_RAISES = ["centralize", "compose", "explain", "logger", "loss_scale", "offered", "progress"]


def _section(doc, title):
    found = re.search(rf"^{title}:\n((?:    .*(?:\n|$)|\n)+)", doc, re.MULTILINE)
    return found.group(1) if found else ""


def _public(name):
    return getattr(weft.testing, name) if name in TESTING else _named(name)


@pytest.mark.parametrize("name", [*FUNCTIONS, *TESTING])
def test_a_docstring_names_exactly_the_parameters(name):
    doc = inspect.getdoc(_public(name))
    documented = re.findall(r"^    (\w+): \S", _section(doc, "Args"), re.MULTILINE)
    assert documented == list(inspect.signature(_public(name)).parameters)


@pytest.mark.parametrize("name", [*FUNCTIONS, *TESTING])
def test_a_docstring_says_what_changes_what_is_sent_returned_and_raised(name):
    fn = _public(name)
    doc = inspect.getdoc(fn)
    assert re.match(r"[A-Z].*\.$", doc.splitlines()[0]), "one sentence first"
    missing = [field for field in ("Changes: ", "Collectives: ") if field not in doc]
    if "ctx" in inspect.signature(fn).parameters or name in ("compose", "transform", *TESTING):
        assert not missing
    returned = typing.get_type_hints(fn)["return"]
    returns = returned is not type(None) and typing.get_origin(returned) is not typing.get_origin(
        typing.Iterator[None]  # that of a context manager
    )
    assert bool(_section(doc, "Returns")) == returns
    assert bool(_section(doc, "Raises")) == (name not in NEVER_RAISES)


@pytest.mark.parametrize("name", [*FUNCTIONS, *TESTING])
def test_a_docstring_has_an_example(name):  # --doctest-modules runs it
    fn = inspect.unwrap(_public(name))
    assert "Example:" in inspect.getdoc(fn)
    tests = doctest.DocTestFinder(recurse=False).find(fn, name, globs=vars(inspect.getmodule(fn)).copy())
    assert tests and tests[0].examples
    assert not any(doctest.SKIP in example.options for test in tests for example in test.examples)


@pytest.mark.parametrize("name", [*(f"errors.{name}" for name in ERRORS), *TYPES, *PROTOCOLS])
def test_a_class_says_what_it_is_and_names_its_fields(name):
    cls = _named(name)
    doc = inspect.getdoc(cls)
    assert doc and doc != inspect.getdoc(cls.__mro__[1])
    fields = [f for f in getattr(cls, "__dataclass_fields__", {}) if f != "refs"]
    documented = re.findall(r"^    ([\w, ]+): \S", _section(doc, "Attributes"), re.MULTILINE)
    flat = [part.strip() for line in documented for part in line.split(",")]
    assert [f for f in fields if f not in flat] == []


@pytest.mark.parametrize(
    "cls", [weft.DistContext, weft.data.Window, weft.data.Windows, weft.testing.RankPool], ids=lambda cls: cls.__name__
)
def test_public_methods_are_documented(cls):
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if name.startswith("_") or method.__qualname__.split(".")[0] != cls.__name__:
            continue
        doc = inspect.getdoc(method)
        assert doc and doc.splitlines()[0].rstrip()[-1] in ".:;", f"{cls.__name__}.{name}"
        documented = re.findall(r"^    (\w+): \S", _section(doc, "Args"), re.MULTILINE)
        assert documented in ([], list(inspect.signature(method).parameters)[1:]), f"{cls.__name__}.{name}"


# -- types -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FUNCTIONS, *TESTING])
def test_types_are_complete_and_can_be_resolved(name):
    fn = _public(name)
    hints = typing.get_type_hints(fn)
    assert set(hints) == {*inspect.signature(fn).parameters, "return"}


def test_the_marker_for_type_checkers_is_there():
    assert (ROOT / "src" / "weft" / "py.typed").is_file()


TYPED = """
from functools import partial
from typing import Any
import torch
from torch import nn
from torch.utils.data import DataLoader
import weft

class Net(nn.Module):
    def own(self) -> int:
        return 3

ctx = weft.local()
net = Net()
loader: DataLoader[tuple[torch.Tensor, torch.Tensor]]
adam = torch.optim.AdamW(net.parameters())
def some() -> Any: ...
loader = some()
batches: list[int] = [1, 2]

reveal_type(weft.replicate(net, ctx))                       # tuple[Net, DistContext]
reveal_type(weft.sync_batch_norm(net, ctx))                 # tuple[Net, DistContext]
reveal_type(weft.with_precision(net, ctx, "bf16"))          # tuple[Net, DistContext]
reveal_type(weft.skip_nonfinite(adam, ctx))                 # tuple[AdamW, DistContext]
reveal_type(weft.fuse_step(adam, ctx))                      # tuple[AdamW, DistContext]
reveal_type(weft.shard_data(loader, ctx))                   # tuple[ShardedLoader[tuple[Tensor, Tensor]], DistContext]
reveal_type(weft.accumulate_grads(net, loader, ctx, steps=2)[1])  # Windows[tuple[Tensor, Tensor]]
shared, ctx = weft.shard_data(loader, ctx)
reveal_type(weft.accumulate_grads([net], shared, ctx, steps=2)[1])  # Windows[tuple[Tensor, Tensor]]
reveal_type(weft.accumulate_grads(net, batches, ctx, steps=2))  # tuple[Net, Windows[int], DistContext]
reveal_type(weft.compose(weft.replicate, weft.sync_batch_norm)(net, ctx))  # tuple[Net, DistContext]
reveal_type(weft.reduce(torch.ones(1), ctx))                # Tensor
reveal_type(weft.gather({"a": torch.ones(1)}, ctx))         # dict[str, Tensor]
reveal_type(weft.contract.offered(net, weft.contract.GradSync))               # list[GradSync]
reveal_type(weft.collectives.on_rank(net.own, ctx)())                   # int | None
parts, _ = weft.assemble(ctx, model=net, optimizer=lambda m: torch.optim.AdamW(m.parameters()), loader=loader)
reveal_type(parts.model)                                    # Net
reveal_type(parts.optimizer)                                # AdamW
reveal_type(weft.testing.run_ranks(lambda ctx: 3, 2))       # list[int]
reveal_type(weft.launch_function(len, 2, "ab"))             # list[int]
with weft.start() as started:
    reveal_type(started)                                    # DistContext

def pipeline(module: Net, ctx: weft.DistContext) -> tuple[Net, weft.DistContext]:
    module, ctx = weft.with_precision(module, ctx, "bf16")
    module, ctx = weft.replicate(module, ctx, bucket_bytes=1)
    module.own()
    return module, ctx

@weft.transform(before={"replicate"})
def mine(module: Net, ctx: weft.DistContext, *, size: int = 3) -> tuple[Net, weft.DistContext]:
    return module, ctx

reveal_type(mine(net, ctx, size=4))                         # tuple[Net, DistContext]
reveal_type(weft.compose(mine, pipeline)(net, ctx))         # tuple[Net, DistContext]

prepared: tuple[Net, weft.DistContext] = weft.compose(partial(weft.with_precision, policy="bf16"), mine)(net, ctx)
windowed = weft.compose(weft.accumulate_grads, weft.accumulate_grads)
"""

WRONG = """
import torch
import weft

net = torch.nn.Linear(2, 2)
ctx = weft.local()
weft.replicate(net)
weft.replicate(net, ctx, 3)
weft.replicate(net, ctx, bucket=3)
weft.replicate(net, ctx, unused="sometimes")
weft.with_precision(net, ctx)
weft.with_precision(net, ctx, "bfloat16")
weft.shard_data(torch.utils.data.DataLoader([1]), ctx, uneven="always")
weft.skip_nonfinite(torch.optim.SGD(net.parameters()), ctx, "bf16")
weft.fuse_step(net, ctx)
weft.shard_data([1, 2], ctx)
ctx.rank = 3
weft.reduce(torch.ones(1), ctx, "average")
weft.compose(weft.replicate, weft.accumulate_grads)
model: torch.nn.Linear = weft.replicate(net, ctx)
weft.replicate(net, ctx)[0].forward(torch.ones(1, 2)).share
weft.accumulate_grads(net, [1], ctx)
weft.fully_shard(net, ctx, unit=[torch.nn.Linear])
weft.gather(torch.ones(1))
weft.accumulate_grads(net, [torch.ones(1, 2)], ctx, steps=2)[1].share
torch.nn.functional.mse_loss(next(iter(weft.accumulate_grads(net, [torch.ones(1)], ctx, steps=2)[1])), torch.ones(1))
"""


def _revealed(output, pattern):
    """Line number to type, in one spelling for both checkers."""
    found = {}
    for line, kind in re.findall(pattern, output):
        # mypy: full module paths and unions in quotes; pyright: short names
        found[int(line)] = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", kind).replace("builtins.", "")
    return found


CHECKERS = {
    "mypy": (
        ["mypy", "--strict", "--no-error-summary"],
        r':(\d+): note: Revealed type is "(.*)"',
        r":(\d+): error:",
    ),
    "pyright": (
        ["pyright", "--pythonpath", sys.executable],
        r':(\d+):\d+ - information: Type of ".*" is "(.*)"',
        r":(\d+):\d+ - error:",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_see_what_users_get(checker, tmp_path):
    command, pattern, error = CHECKERS[checker]
    program = pathlib.Path(sys.executable).with_name(command[0])
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "wrong.py").write_text(WRONG)
    if checker == "mypy":  # the cache of the repository makes this seconds, not half a minute
        command = [*command, "--cache-dir", str(ROOT / ".mypy_cache"), "--python-version", "3.11"]
    done = subprocess.run(
        [program, *command[1:], tmp_path / "typed.py", tmp_path / "wrong.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    good = "\n".join(line for line in done.stdout.splitlines() if "typed.py" in line)
    bad = "\n".join(line for line in done.stdout.splitlines() if "wrong.py" in line)
    assert "error" not in good, good
    expected = {
        number: line.partition("# ")[2]
        for number, line in enumerate(TYPED.splitlines(), start=1)
        if "reveal_type" in line
    }
    assert _revealed(good, pattern) == expected, done.stdout
    wrong = {number for number, line in enumerate(WRONG.splitlines(), start=1) if line and number > 6}
    assert {int(number) for number in re.findall(error, bad)} == wrong, bad


# -- errors ------------------------------------------------------------------------------------------

PARENTS = {
    "ContextError": "WeftError",
    "CollectiveRefused": "ContextError",
    "ContractError": "WeftError",
    "AlreadyApplied": "ContractError",
    "OrderError": "ContractError",
    "StaleContext": "ContractError",
    "NameChanged": "ContractError",
    "NotSynchronized": "ContractError",
    "UnusedParameters": "ContractError",
    "PeerError": "WeftError",
    "ProbeFailed": "ContractError",
    "CheckpointError": "WeftError",
    "MissingExtra": "WeftError",
    "WeftError": "Exception",
}


def test_the_error_tree_is_as_drawn():
    assert {name: getattr(errors, name).__mro__[1].__name__ for name in ERRORS} == PARENTS
    assert issubclass(weft.errors.MissingExtra, ImportError) and issubclass(
        weft.testing.RanksFailed, weft.errors.WeftError
    )
    drawn = re.findall(r"^    [ |`-]*(\w+)", errors.__doc__, re.MULTILINE)
    assert sorted(drawn) == sorted(ERRORS)
    assert {n for n, o in vars(errors).items() if isinstance(o, type) and issubclass(o, Exception)} == set(ERRORS)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_survives_pickling(name):
    error = pickle.loads(pickle.dumps(getattr(errors, name)("text")))
    assert type(error).__name__ == name and str(error) == "text"


SOURCES = sorted((ROOT / "src" / "weft").rglob("*.py"))
MADE_BY = {"value_error": "ValueError", "type_error": "TypeError"}


def _raised():
    """Every `raise` of an error of ours or of a wrong argument, with the functions around it."""
    for path in SOURCES:
        functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
        for function in functions:
            for node in ast.walk(function):
                call = node.exc if isinstance(node, ast.Raise) else None
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                    yield path, function, call


@pytest.mark.slow
def test_every_error_of_the_package_has_the_three_lines():
    """But for the echo of another rank's text, and texts that become a line of their caller's."""
    plain = {
        path.name
        for path, _, call in _raised()
        if call.func.id in {*ERRORS, "ValueError", "TypeError"} - {"PeerError"}
        and not {"found", "expected", "fix"} <= {keyword.arg for keyword in call.keywords}
    }
    # objects: the echo of an error on another rank; settings, encoding: becomes a `found` line of its caller;
    # ranks: the output of a process that did not start; copies: the echo of what a rank found damaged; doctor: becomes
    # a verdict; the others: of `CheckpointError`, with the file's name; or of an error of `load_state_dict`.
    allowed = {"objects.py", "encoding.py", "settings.py", "ranks.py", "copies.py", "doctor.py", "packed_gather.py"}
    allowed |= {
        "plain_files.py",
        "apply.py",
        "manifest.py",
        "safetensors_read.py",
        "sources.py",
        "engine.py",
        "random_states.py",
        "rng_state.py",
        "sampler_state.py",
        "json_values.py",
        "containers.py",
        "torch_files.py",
    }
    assert plain <= allowed, plain - allowed


@pytest.mark.slow
def test_a_docstring_names_the_errors_that_are_raised():
    missing = []
    for path, function, call in _raised():
        doc = ast.get_docstring(function) or ""
        kind = MADE_BY.get(call.func.id, call.func.id)
        if len(doc.splitlines()) > 1 and kind in {*ERRORS, *MADE_BY.values()} and kind not in doc:
            missing.append(f"{path.name}: {function.name}: {kind}")
    assert missing == []


def test_message_and_listed():
    text = errors.message("f: n = -1 cannot be used", found="n = -1", expected="n >= 0", fix="f(0)")
    assert text.splitlines() == [
        "f: n = -1 cannot be used",
        "  found:    n = -1",
        "  expected: n >= 0",
        "  fix:      f(0)",
    ]
    assert errors.listed([]) == "" and errors.listed("abcde") == "a, b, c, d, e"
    assert errors.listed("abcdef") == "a, b, c, d, e and 1 more"


# -- values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["context.Applied", "DistContext", "precision.LossScaling", "precision.PowerSGD", "Precision", "Topology"]
)
def test_values_are_frozen_and_built_by_name(name):
    cls = _named(name)
    assert cls.__dataclass_params__.frozen and cls.__hash__ is not None
    assert all(f.kw_only for f in cls.__dataclass_fields__.values())


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_can_be_asked_for_and_are_documented(name):
    protocol = _named(name)
    assert typing.is_protocol(protocol) if hasattr(typing, "is_protocol") else protocol._is_protocol
    assert not isinstance(object(), protocol)


def test_functions_are_functions_and_know_their_home():
    for name in FUNCTIONS:
        fn = _named(name)
        assert isinstance(fn, types.FunctionType) and isinstance(fn, Callable) and fn.__name__ == name
        assert fn.__module__.startswith("weft.")
