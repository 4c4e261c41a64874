"""The house: importing has no effects, layers hold, one reader of the environment, the places of each name."""

import ast
import functools
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

import pytest

import weft
from tests.known_transforms import TRANSFORMS
from tests.laws.table import TABLE

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "src" / "weft"
FILES = sorted((ROOT / "src").rglob("*.py"))
NAMES = [path.relative_to(ROOT / "src").as_posix() for path in FILES]


@functools.cache
def _tree(name):
    return ast.parse((ROOT / "src" / name).read_text())


def _python(code, *arguments, env=None, limit_s=60):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=limit_s, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- importing has no effects ------------------------------------------------------------------------

EFFECTS = """
import json, logging, os, random, signal, sys, threading, warnings
import numpy, torch, torch.distributed as dist

def state():
    return {
        "environment": dict(os.environ),
        "threads": [t.name for t in threading.enumerate()],
        "group": dist.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
        "handlers": [repr(h) for h in logging.getLogger().handlers] + sorted(
            f"{name}: {logger.handlers} {logger.level}" for name, logger in logging.root.manager.loggerDict.items()
            if isinstance(logger, logging.Logger) and (logger.handlers or logger.level)),
        "default dtype": str(torch.get_default_dtype()),
        "torch threads": torch.get_num_threads(),
        "random": hash(random.getstate()),
        "torch random": torch.get_rng_state().tolist(),
        "numpy random": numpy.random.get_state()[1].tolist(),
        "signals": [repr(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "hooks": [repr(sys.excepthook), repr(threading.excepthook)],
        "filters": len(warnings.filters),
        "files": sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else [],
        "path": list(sys.path),
    }

before, modules = state(), set(sys.modules)
import weft
after = state()
new = sorted({name.partition(".")[0] for name in set(sys.modules) - modules})
print(json.dumps({"changed": [n for n in before if before[n] != after[n]], "new": new}))
"""

OPTIONAL = {
    "accelerate", "apex", "bitsandbytes", "cloudpickle", "deepspeed", "hypothesis", "lightning", "mlflow", "peft",
    "pytest", "ray", "rich", "safetensors", "tensorboard", "torch_xla", "torchao", "torchvision", "tqdm",
    "transformers", "wandb", "xxhash", "yaml",
}  # fmt: skip


def test_import_changes_nothing_and_imports_torch_alone():
    found = json.loads(_python(EFFECTS))
    assert found["changed"] == []
    assert set(found["new"]) & OPTIONAL == set()
    # Besides itself: nothing but the standard library.
    assert set(found["new"]) - {"weft", "torch"} <= set(sys.stdlib_module_names), found["new"]


COST = """
import gc, os, pathlib, sys, time
import torch
gc.collect()  # of torch's objects; else it is a matter of luck in whose import it is due
code = "from __future__ import annotations\\n" + "".join(f'''
class C{i}:
    "A class."
    def __init__(self, a: int, b: str = "x") -> None:
        self.a, self.b = a, b
    def f(self, x: float) -> float:
        "Add."
        return x + self.a
def f{i}(x: int, *, y: str = "") -> str:
    "Repeat."
    return y * x
''' for i in range(8))
folder = pathlib.Path(sys.argv[1], "other")
folder.mkdir()
for n in range(200):
    (folder / f"m{n}.py").write_text(code)
(folder / "__init__.py").write_text("".join(f"from other import m{n}\\n" for n in range(200)))
sys.path.insert(0, sys.argv[1])
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False  # with bytecode, as installed; the first run writes it
for _ in range(9):
    if os.fork() == 0:
        begin = time.process_time()
        import weft
        weft.start, weft.reduce, weft.compose, weft.Precision  # what every program needs, imported when it is asked for
        middle = time.process_time()
        import other
        print(middle - begin, time.process_time() - middle, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the cost is measured in forks of one import of torch")
def test_import_costs_less_than_50_ms_after_torch(tmp_path):
    """Where 200 modules with 8 small classes and functions each cost 31 ms, as on a quiet machine of 2026."""
    numbers = [*map(float, _python(COST, str(tmp_path)).split())]
    ratios = [cost / other for cost, other in zip(numbers[::2], numbers[1::2], strict=True)]
    # Each of a pair at one moment of the machine, and neither of the first pair, which writes bytecode, nor an outlier.
    assert statistics.median(ratios[1:]) < 50 / 31, numbers


TRAINING = """
import gc, sys, types
import torch, weft

def run(seed):
    ctx = weft.local(seed=seed)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    loader, ctx = weft.shard_data(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True), ctx)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model, ctx = weft.with_precision(model, ctx, "fp16")
    model, ctx = weft.sync_batch_norm(model, ctx)
    model, ctx = weft.replicate(model, ctx, flat=True)
    optimizer, ctx = weft.skip_nonfinite(torch.optim.AdamW(model.parameters()), ctx)
    optimizer, ctx = weft.fuse_step(optimizer, ctx)
    model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=2)
    for window in loader:
        for (x,) in window:
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weft.explain(ctx)

def size(value):
    if isinstance(value, (dict, list, set, tuple)):
        return len(value)
    if hasattr(value, "cache_info"):
        return value.cache_info().currsize
    return id(value)

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name == "weft" or name.startswith("weft."):
            for key, value in vars(module).items():
                if not key.startswith("__"):
                    found[f"{name}.{key}"] = size(value)
                    if isinstance(value, type) and value.__module__.startswith("weft"):
                        found.update({f"{name}.{key}.{k}": size(v) for k, v in vars(value).items()
                                      if not k.startswith("__") and k != "_abc_impl"})
    return found

run(0)
before = attributes()
for seed in range(1, 4):
    run(seed)
after = attributes()
print([name for name in {**before, **after} if before.get(name) != after.get(name)])
"""


@pytest.mark.slow
def test_no_module_or_class_attribute_changes_while_training():
    assert _python(TRAINING) == "[]\n"


# -- layers ------------------------------------------------------------------------------------------


def _lint_imports(folder):
    program = pathlib.Path(sys.executable).with_name("lint-imports")
    env = {**os.environ, "PYTHONPATH": str(folder / "src")}
    return subprocess.run(
        [program, "--config", folder / "pyproject.toml", "--no-cache"],
        cwd=folder, capture_output=True, text=True, env=env, timeout=300, check=False,
    )  # fmt: skip


def test_the_layers_hold():
    done = _lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line", "text"),
    [
        ("transforms/replicate.py", "from weft.transforms import fuse_step", r"replicate.*->.*fuse_step"),
        ("transforms/fuse_step.py", "import weft.cli", r"fuse_step -> weft\.cli \(l\.\d+\)"),
        ("errors.py", "from weft.tensors.nested import leaves", r"errors -> weft\.tensors\.nested \(l\.\d+\)"),
        (
            "engines/torch/reducing/flat_buffer.py",
            "from weft.context import DistContext",
            r"flat_buffer -> weft\.context \(l\.\d+\)",
        ),
        (
            "engines/torch/engine.py",
            "import weft.engines.deepspeed",
            r"engines\.torch\.engine -> weft\.engines\.deepspeed \(l\.\d+\)",
        ),
        (
            "interop/deepspeed_partition.py",
            "from weft.transforms import undo",
            r"deepspeed_partition -> weft\.transforms\.undo \(l\.\d+\)",
        ),
        ("testing/laws.py", "from weft.cli import main", r"laws -> weft\.cli \(l\.\d+\)"),
        ("cli/migrate.py", "import weft_migrate", r"weft\.cli\.migrate -> weft_migrate \(l\.\d+\)"),
        ("cli/launch.py", "from weft.testing import fake", r"launch -> weft\.testing\.fake \(l\.\d+\)"),
    ],
)
def test_a_planted_import_is_rejected_with_file_and_line(tmp_path, file, line, text):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "src" / "weft" / file
    path.write_text(path.read_text() + f"\n{line}\n")
    done = _lint_imports(tmp_path)
    assert done.returncode == 1 and re.search(text, done.stdout), done.stdout


def test_every_package_is_in_a_layer():
    import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {name for contract in contracts for line in contract.get("layers", []) for name in line.split(" | ")}
    layers = {".".join(name.split(".")[:2]) for name in layers}  # of engines, each part has its layer
    packages = {f"weft.{p.stem}" for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert packages - layers == {"weft.__init__", "weft.__main__"}
    apart = {module for contract in contracts for module in contract.get("modules", [])}
    assert apart == {"weft.transforms.*"}


# -- maps: what a docstring lists is there --------------------------------------------------------------

PACKAGES = [
    path.parent for path in FILES if path.name == "__init__.py" and path.parent not in (SOURCE, SOURCE / "transforms")
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.relative_to(ROOT / "src").as_posix())
def test_the_docstring_of_a_package_lists_its_files(package):
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    listed = set(re.findall(r"^([a-z_0-9]+(?:\.py|/))  ?", text, re.MULTILINE))
    files = {path.name for path in package.glob("*.py")} | {
        f"{path.parent.name}/" for path in package.glob("*/__init__.py")
    }
    assert listed == files - {"__init__.py"}


def _tested_by(package):
    """The tests that the last paragraph of a package's docstring names."""
    text = ast.get_docstring(_tree((package / "__init__.py").relative_to(ROOT / "src").as_posix())) or ""
    found = re.fullmatch(r"Tested by: (\S+(?:,\s+\S+)*)", text.rpartition("\n\n")[2])
    return [ROOT / name for name in re.split(r",\s+", found[1])] if found else []


def _imported(tree):
    """The modules and names that a file imports, with their packages."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {f"{node.module}.{alias.name}" for node in imports for alias in node.names}


def _needed(test):
    """What a file of tests names of the package, functions of the facade by their modules, and what those import."""
    text = test.read_text()
    names = {*re.findall(r"\bweft\w*(?:\.\w+)+", text), *_imported(ast.parse(text))}
    names |= {str(getattr(getattr(weft, name, None), "__module__", "")) for name in re.findall(r"\bweft\.(\w+)", text)}
    modules = {name for full in names for name in (full, full.rpartition(".")[0])} - {"", "weft"}
    files = {f"{name.replace('.', '/')}{end}" for name in modules for end in (".py", "/__init__.py")} & {*NAMES}
    return names.union(*(_imported(_tree(file)) for file in files))


@pytest.mark.parametrize(
    "package", [*PACKAGES, SOURCE / "transforms"], ids=lambda p: p.relative_to(ROOT / "src").as_posix()
)
def test_the_docstring_of_a_package_names_its_tests(package):
    named = _tested_by(package)
    tests = [[path] if path.is_file() else sorted(path.rglob("test_*.py")) for path in named]
    assert tests and all(tests), named
    name = ".".join(package.relative_to(ROOT / "src").parts)
    assert any(f"{one}.".startswith(f"{name}.") for files in tests for test in files for one in _needed(test))


def test_no_folder_is_a_pile():
    folders = {path.parent for path in FILES if path.parent.name != "transforms"}
    piles = {folder.name: len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: number for name, number in piles.items() if number > 12} == {}


def _classes():
    for file in NAMES:
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.ClassDef) and "Attributes:" in (ast.get_docstring(node) or ""):
                yield file, node


def _bases(node):
    """The classes of this package that a class extends, and those that they extend."""
    names = {base.id for base in node.bases if isinstance(base, ast.Name)}
    for file in NAMES:
        for found in _tree(file).body:
            if isinstance(found, ast.ClassDef) and found.name in names:
                yield found
                yield from _bases(found)


@pytest.mark.slow
def test_the_attributes_that_a_class_documents_exist():
    wrong = {f"{file}: {node.name}": missing for file, node in _classes() if (missing := _undefined_attributes(node))}
    assert not wrong


def _undefined_attributes(node):
    """What the docstring of a class names and its body, or that of a base, does not define."""
    text = (ast.get_docstring(node) or "").partition("Attributes:")[2]
    section = re.split(r"\n(?=\S)", text, maxsplit=1)[0]
    indent = min((len(line) - len(line.lstrip()) for line in section.splitlines() if line.strip()), default=0)
    documented = set(re.findall(rf"^ {{{indent}}}(\w+)(?: \([^)]*\))?:", section, re.MULTILINE))
    bases = list(_bases(node))
    there = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    for body in (node.body, *(base.body for base in bases)):
        there |= {n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        there |= {n.name for n in body if isinstance(n, ast.FunctionDef)}
        there |= {t.id for n in body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    return sorted(documented - there) if documented else ["a section of attributes without one"]


# -- one reader of the environment, one maker of groups, no globals ------------------------------------

ENVIRONMENT = {
    "weft/context/start.py",  # the reader
    "weft_command.py",  # sets OMP_NUM_THREADS for the ranks, before torch is there
    "weft/cli/launch.py",  # prepares what the ranks inherit, ...
    "weft/launching/callee.py",  # ... likewise, ...
    "weft/launching/rank_main.py",  # ... and there asks `topology` which rank it is
    "weft/cli/explain.py",  # tells what is in it
    "weft/cli/doctor.py",  # checks it
    "weft/engines/deepspeed/library.py",  # puts back what DeepSpeed changes, and lends what it reads
    "weft/context/shutdown.py",  # takes back the note for subprocesses that start.py left there
    "weft/rehearsal/script.py",  # sets what a launcher would, ...
    "weft/rehearsal/rehearse.py",  # ... and puts back what a program has set
    "weft/testing/laws.py",  # law 7 compares it
    "weft/testing/ranks.py",  # hands it to the ranks ...
    "weft/testing/rank_worker.py",  # ... which put it back before each job
}
GROUPS = {
    "weft/context/start.py",
    "weft/testing/rank_worker.py",  # worlds of tests
    "weft/rehearsal/simulation/pretended_world.py",  # one without other processes
}
PICKLES = {
    "weft/testing/laws.py", "weft/testing/ranks.py", "weft/testing/rank_worker.py",
    "weft/launching/launch_function.py", "weft/launching/callee.py",  # a function to its ranks, its results back
    "weft/interop/torch_files.py",  # by torch's loader of values alone, and an unpickler that knows no class
}  # fmt: skip


def _uses(*names):
    """Files in which one of these dotted names is read, called or imported."""
    found = set()
    for path in NAMES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in names:
                found.add(path)
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                found |= {path for alias in node.names if f"{node.module}.{alias.name}" in names}
    return found


def test_the_environment_is_read_in_one_place():
    assert _uses("os.environ", "os.getenv", "os.putenv", "os.environb") <= ENVIRONMENT


def test_process_groups_are_made_in_one_place():
    names = ["init_process_group", "distributed.init_process_group", "distributed_c10d.init_process_group"]
    assert _uses(*(f"{p}{n}" for p in ("", "dist.", "torch.", "torch.distributed.") for n in names)) == GROUPS


@pytest.mark.slow
def test_nothing_is_unpickled_but_between_processes_that_belong_together():
    names = ["pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "dill.loads", "cloudpickle.loads"]
    assert _uses(*names) == PICKLES
    objects = [f"dist.{n}" for n in ("all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list")]
    assert _uses(*objects) == set()


def test_no_global_statement_no_star_import_no_wide_except():
    wrong = [
        f"{path}:{node.lineno}: {ast.unparse(node).splitlines()[0]}"
        for path in NAMES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Global)
        or (isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names))
        or (isinstance(node, ast.ExceptHandler) and node.type is None)
    ]
    assert not wrong


def test_no_file_is_called_utils():
    names = {path.stem for path in FILES}
    assert not names & {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}


def test_wheel_and_facade_have_one_version():
    import tomllib

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == weft.__version__


# -- the places of each name -------------------------------------------------------------------------


def _transform_files():
    """Public functions that have a file of their own in transforms/."""
    return [n for n in weft.__all__ if getattr(getattr(weft, n), "__module__", "") == f"weft.transforms.{n}"]


def _mentions(folder, pattern, name):
    pages = [path for path in sorted((ROOT / folder).rglob(pattern)) if "_build" not in path.parts]
    return [path.name for path in pages if re.search(rf"\b{name}\b", path.read_text())]


def test_the_transforms_are_found():
    assert {"accumulate_grads", "replicate", "with_precision"} <= {*TRANSFORMS} < {*_transform_files()}


@pytest.mark.parametrize("name", _transform_files())
def test_a_transform_has_its_test(name):
    assert (SOURCE / "transforms" / f"{name}.py").is_file() or (SOURCE / "transforms" / name / "__init__.py").is_file()
    assert (ROOT / "tests" / "transforms" / f"test_{name}.py").is_file()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_has_its_row_in_the_laws(name):
    assert name in {row.name.partition("[")[0] for row in TABLE}


def _code_that_runs():
    """The examples, and the blocks of the pages that `test_docs.py` runs."""
    yield from (path.read_text() for path in sorted((ROOT / "examples").glob("*.py")))
    for page in sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "contributing.md"}):
        yield from re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", _transform_files())
def test_a_transform_is_shown_in_code_that_runs(name):
    own = ROOT / "examples" / f"{name}.py"
    assert any(f"weft.{name}(" in code for code in ([own.read_text()] if own.is_file() else _code_that_runs()))


def test_every_public_name_is_documented():
    assert [name for name in weft.__all__ if not _mentions("docs", "*.md", name)] == []


def test_no_room_without_a_name():
    rooms = {p.stem for p in (SOURCE / "transforms").iterdir() if not p.stem.startswith("__")}
    assert rooms == set(_transform_files())


def test_tests_of_transforms_bear_their_names():
    """What tests something else is in the folder that mirrors its package."""
    names = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "transforms").iterdir() if path.is_file()}
    assert names - {"__init__"} <= set(_transform_files())
