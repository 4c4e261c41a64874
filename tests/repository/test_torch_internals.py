"""Private names of torch stand in one file, and are where it says."""

import ast
import collections
import re
from pathlib import Path

import pytest
import torch

from tests.fix_lines.told import told
from weft import torch_internals
from weft.errors import ContextError
from weft.private_names import Attribute, Private
from weft.version import TESTED_TORCH

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
    "_run_exitfuncs",
    "_option_string_actions",
    "_tp_plan",
    "_no_split_modules",
    "_keep_in_fp32_modules",
    "_per_s",
    "_bytes",
}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.partition("+")[0].split(".")[:2])


def test_names_are_where_they_are_said_to_be():
    here = _version(torch.__version__)
    expected = {
        key: (not name.since or here >= _version(name.since)) and (not name.until or here < _version(name.until))
        for key, name in NAMES.items()
    }
    assert {key: name.exists for key, name in NAMES.items()} == expected


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


def test_nothing_else_uses_private_names_of_torch():
    assert [use for path in FILES for use in private(path)] == []


def test_a_name_that_is_gone_names_versions_that_have_it():
    gone = Private(
        torch_internals.LIBRARY, "torch.distributed", "_of_yesterday", "a test", "2.9", "2.10", "that of today"
    )
    for use in (lambda: gone(), lambda: gone.found, lambda: gone.home, lambda: gone.base()):
        with told("private_names.py", "a version that weft is tested with") as it:
            use()
        assert it.fix == f"pip install 'torch=={TESTED_TORCH[-1]}'"
    gone = Attribute(torch_internals.LIBRARY, "torch:Tensor", "_of_yesterday", "a test")
    tensor = torch.zeros(1)
    for use in (lambda: gone.of(tensor), lambda: gone.get(tensor), lambda: gone.set(tensor, 1), lambda: gone.name):
        with pytest.raises(ContextError, match=rf"(?s)torch {re.escape(torch.__version__)} .*_of_yesterday"):
            use()
    assert not hasattr(tensor, "_of_yesterday")


class Lazy:
    def fill(self):
        self._later = 1

    @property
    def _raises(self):
        raise AttributeError


def test_an_object_may_lack_what_others_have():
    later = Attribute(torch_internals.LIBRARY, f"{__name__}:Lazy", "_later", "a test")
    lazy = Lazy()
    assert later.get(lazy) is None and later.exists
    lazy.fill()
    assert later.get(lazy) == 1
    with pytest.raises(ContextError):
        Attribute(torch_internals.LIBRARY, f"{__name__}:Lazy", "_raises", "a test").get(lazy)


def test_every_name_is_used():
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    words = collections.Counter(word for text in texts for word in set(re.findall(r"\w+", text)))
    own = collections.Counter(re.findall(r"\w+", (SOURCE / "torch_internals.py").read_text()))
    keys = [key for key in vars(torch_internals) if key in {name.partition(" ")[0] for name in NAMES}]
    assert [key for key in keys if words[key] < 2 and own[key] < 2] == []
