"""Sphinx: `python -m sphinx -W -b html docs docs/_build/html`. Needs no network."""

import re
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes

import weft

project = "weft"
author = "the weft authors"
copyright = "the weft authors"
version = release = weft.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks show the outputs that were committed

_ROOT = Path(__file__).parents[1].resolve()
_PYPROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
html_theme = "furo"
html_title = f"weft {version}"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "source_repository": _PYPROJECT["project"]["urls"]["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
}

# Docstrings write names in single backticks; names of the API become links.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autosummary_generate = False
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# A reference to a name of weft that does not exist is an error.
# Names of other projects are not looked up.
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    ("py:.*", r"(?!weft\.).*"),
    # Type variables, and what is not public.
    (
        "py:class",
        r"weft\..*\.(_\w+|[A-Z]|WindowSplitter|WindowSync|WindowBatches|MemoryCopy)",
    ),
    ("py:class", r"weft\..*\.(Engine|TorchEngine|World|ReplicaGroup|Held)"),
]

_OWN_FIELDS = re.compile(r"(Changes|Collectives|Source): (.*)")
_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Example|Yields):$")
_NAME = re.compile(r"(?<![`:])`([^`]+)`(?!`)")


def _as_role(found: re.Match[str]) -> str:
    """A name as a link, code as code: napoleon would split code at a colon."""
    return (
        f":py:obj:`{found[1]}`"
        if re.fullmatch(r"[\w.]+", found[1])
        else f"``{found[1]}``"
    )


def show_own_fields(
    app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Turn `Changes:` and the like into paragraphs, indented lines into code."""
    shown: list[str] = []
    in_section = False
    for line in lines:
        in_section = in_section or _SECTION.match(line) is not None
        is_code = line.lstrip().startswith((">>>", "..."))
        parts = re.split(
            r"(?<=\.) (?=Collectives: )", line if is_code else _NAME.sub(_as_role, line)
        )
        for part in parts:
            own = None if in_section else _OWN_FIELDS.match(part)
            starts_code = (
                not in_section
                and part.startswith("    ")
                and bool(shown)
                and not shown[-1]
            )
            if starts_code:
                shown += [
                    f".. code-block:: {'text' if what == 'module' else 'python'}",
                    "",
                    part,
                ]
            else:
                shown += ["", f"**{own[1]}:** {own[2]}"] if own else [part]
    lines[:] = shown


def hide_inherited_signature(
    app: Any, what: str, name: str, obj: Any, *rest: Any
) -> tuple[str, None] | None:
    """Leave out the constructors of torch's classes and of protocols."""
    made_in = getattr(obj.__init__, "__module__", "") if what == "class" else ""
    return ("", None) if made_in.startswith(("torch.", "typing")) else None


def list_names(app: Any, docname: str, source: list[str]) -> None:
    """Replace `.. names:: package` by the names of `weft.__all__` from there."""
    homes = {
        name: getattr(weft, name).__module__.split(".")[1]
        for name in weft.__all__
        if name != "errors"
    }

    def entries(found: re.Match[str]) -> str:
        names = [name for name, home in homes.items() if home in found[1].split()]
        return "\n".join(
            f".. autoclass:: weft.{name}\n   :members:\n   :inherited-members:"
            if isinstance(getattr(weft, name), type)
            else f".. autofunction:: weft.{name}"
            for name in names
        )

    source[0] = re.sub(r"^\.\. names:: (.+)$", entries, source[0], flags=re.MULTILINE)


def summarize(app: Any, docname: str, source: list[str]) -> None:
    """Begin an API page with tables: each name, and the first line of its docstring."""
    first = re.search(r"^```{eval-rst}$", source[0], re.MULTILINE)
    if not docname.startswith("api/") or first is None:
        return
    tables = ["```{eval-rst}"]
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE):
        title = section.partition("\n")[0]
        names = re.findall(r"^\.\. auto(?!module)\w+:: (\S+)$", section, re.MULTILINE)
        if names and not title.startswith("# "):
            tables.append(f".. rubric:: {title}\n")
        if names:
            tables.append(".. autosummary::\n   :nosignatures:\n")
            tables += [*(f"   ~{name}" for name in names), ""]
    at = first.start()
    source[0] = "\n".join([source[0][:at], *tables, "```\n", source[0][at:]])


def show_diffs(app: Any, document: nodes.document) -> None:
    """Name the files of a diff as the repository does; Sphinx writes absolute paths."""
    for block in document.findall(nodes.literal_block):
        if block.get("language") == "udiff":
            code = block.astext().replace(f"{_ROOT}/", "")
            block.rawsource, block[:] = code, [nodes.Text(code)]


def find_by_public_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Link `weft.context.distcontext.DistContext` in types to `weft.DistContext`."""
    target = node.get("reftarget", "")
    package, name = target.split(".")[1:2], target.rpartition(".")[2]
    if node.get("refdomain") != "py" or not target.startswith("weft."):
        return None
    domain = env.get_domain("py")
    for public in (
        f"weft.{name}",
        f"weft.{'.'.join(package)}.{name}",
        f"weft.testing.laws.{name}",
    ):
        if public != target:
            found = domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", public, node, content
            )
            if found is not None:
                return found
    return None


def setup(app: Any) -> None:
    # before napoleon, which has priority 500
    app.connect("autodoc-process-docstring", show_own_fields, priority=400)
    app.connect("autodoc-process-signature", hide_inherited_signature)
    app.connect("source-read", list_names)
    app.connect("source-read", summarize)
    app.connect("doctree-read", show_diffs)
    app.connect("missing-reference", find_by_public_name)
