"""Private names of torch stand in one file, and are where it says."""

import ast
from pathlib import Path

import pytest
import torch

from weft import torch_internals
from weft.private_names import Attribute, Private

SOURCE = Path(__file__).parents[2] / "src" / "weft"
TABLES = (
    "torch_internals.py",
    "data/datasets_internals.py",
    "engines/deepspeed/internals.py",
    "engines/xla/internals.py",
)


def names_in(table):
    """What a table has, by texts for the ids of tests."""
    return {
        f"{key} {one!r}": one
        for key, found in vars(table).items()
        for one in (found if isinstance(found, tuple) else (found,))
        if isinstance(one, (Private, Attribute))
    }


NAMES = names_in(torch_internals)
SPELLINGS = {name.spelling for name in NAMES.values()}
# Of Python and of model classes of transformers, and ends of names of metrics: no insides of torch.
OTHERS = {
    "_asdict",
    "_fields",
    "_replace",
    "_getframe",
    "_current_frames",
    "_exit",
    "_option_string_actions",
    "_tp_plan",
    "_no_split_modules",
    "_keep_in_fp32_modules",
    "_per_s",
    "_bytes",
}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.partition("+")[0].split(".")[:2])


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_is_where_it_is_said_to_be(name):
    here = _version(torch.__version__)
    expected = (not name.since or here >= _version(name.since)) and (not name.until or here < _version(name.until))
    assert name.exists == expected


def private(path: Path) -> list[str]:
    """Names with an underscore that a file uses and does not define itself."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    own = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))}
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {
        n.attr
        for n in nodes
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in ("self", "cls")
    }
    own |= {
        name
        for n in nodes
        if isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__slots__" for t in n.targets)
        for name in (ast.literal_eval(n.value) if not isinstance(n.value, ast.Name) else ())
    }
    pieces = {id(part) for n in nodes if isinstance(n, ast.JoinedStr) for part in n.values}  # of texts, not names
    found = []
    for n in nodes:
        names, known = [], own
        if isinstance(n, ast.Attribute):
            names = [n.attr]
            if ast.unparse(n.value) not in ("self", "cls"):
                known = own - SPELLINGS  # of another object, it is torch's, also where weft has one of this name
        elif isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in pieces:
            names = [n.value] if n.value.isidentifier() and not n.value.startswith("_weft") else []
        elif isinstance(n, ast.ImportFrom) and (n.module or "").startswith(("torch", "deepspeed")):
            names = [*(n.module or "").split("."), *(one.name for one in n.names)]
        elif isinstance(n, ast.Import):
            names = [part for one in n.names for part in one.name.split(".") if one.name.startswith("torch")]
        elif isinstance(n, ast.Call) and ast.unparse(n.func).endswith("import_module"):
            names = [p for a in n.args if isinstance(a, ast.Constant) for p in str(a.value).split(".")]
        found += [
            f"{path.name}:{n.lineno} {name}"
            for name in names
            if name.startswith("_") and not name.startswith("__") and name != "_" and name not in known | OTHERS
        ]
    return found


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).as_posix() not in TABLES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_nothing_else_uses_private_names_of_torch(path):
    assert not private(path)
