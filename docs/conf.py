"""Sphinx: `python -m sphinx -W -b html docs docs/_build/html`. Needs no network."""

import re
from typing import Any

import weft

project = "weft"
author = "the weft authors"
copyright = "the weft authors"
version = release = weft.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"weft {version}"
exclude_patterns = ["_build"]
myst_heading_anchors = 3

# Docstrings write names in single backticks; names of the API become links.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# A reference to a name of weft that does not exist is an error; other projects are not looked up.
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    ("py:.*", r"(?!weft\.).*"),
    # Type variables, and what is not public.
    ("py:class", r"weft\..*\.(_\w+|[A-Z]|WindowSplitter|WindowSync|MicroBatches|MemoryCopy)"),
    ("py:class", r"weft\..*\.(Engine|TorchEngine|World|ReplicaGroup)"),
]

_OWN_FIELDS = re.compile(r"(Changes|Collectives|Source): (.*)")
_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Example|Yields):$")
_NAME = re.compile(r"(?<![`:])`([^`]+)`(?!`)")


def _as_role(found: re.Match[str]) -> str:
    """A name as a link, code as code: napoleon would split code at a colon."""
    return f":py:obj:`{found[1]}`" if re.fullmatch(r"[\w.]+", found[1]) else f"``{found[1]}``"


def show_own_fields(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Turn `Changes:`, `Collectives:`, `Source:` into paragraphs with a bold word, indented lines into code."""
    shown: list[str] = []
    in_section = False
    for line in lines:
        in_section = in_section or _SECTION.match(line) is not None
        is_code = line.lstrip().startswith((">>>", "..."))
        parts = re.split(r"(?<=\.) (?=Collectives: )", line if is_code else _NAME.sub(_as_role, line))
        for part in parts:
            own = None if in_section else _OWN_FIELDS.match(part)
            starts_code = not in_section and part.startswith("    ") and bool(shown) and not shown[-1]
            if starts_code:
                shown += [f".. code-block:: {'text' if what == 'module' else 'python'}", "", part]
            else:
                shown += ["", f"**{own[1]}:** {own[2]}"] if own else [part]
    lines[:] = shown


def find_by_public_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Let a type in a signature, `weft.context.distcontext.DistContext`, link to `weft.DistContext`."""
    target = node.get("reftarget", "")
    package, name = target.split(".")[1:2], target.rpartition(".")[2]
    if node.get("refdomain") != "py" or not target.startswith("weft."):
        return None
    domain = env.get_domain("py")
    for public in (f"weft.{name}", f"weft.{'.'.join(package)}.{name}", f"weft.testing.laws.{name}"):
        if public != target:
            found = domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, content)
            if found is not None:
                return found
    return None


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", show_own_fields, priority=400)  # before napoleon
    app.connect("missing-reference", find_by_public_name)
