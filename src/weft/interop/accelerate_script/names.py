"""What is what in a script: the accelerators, its settings, the models, optimizers, schedulers and loaders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["ROLES", "Loop", "Names", "dotted", "find_names"]

# By the name of a variable, or of the function it comes from; the first that fits.
ROLES = MappingProxyType(
    {
        "scheduler": re.compile(r"sched|(^|_)lr$|LR$|warmup"),
        "optimizer": re.compile(r"optim|^opt(_|\d|$)|Adam|SGD|RMSprop|Adagrad|LBFGS|Lion", re.IGNORECASE),
        "loader": re.compile(r"loader|(^|_)dl(_|\d|$)", re.IGNORECASE),
        "model": re.compile(
            r"model|net|unet|vae|encoder|decoder|generator|discriminator|critic|actor|teacher|student|from_pretrained"
            r"|adapter|resnet|transformer|bert|gpt|linear|sequential",
            re.IGNORECASE,
        ),
    }
)


@dataclass(frozen=True)
class Loop:
    """A loop with `accumulate` in it."""

    loop: ast.For
    block: ast.With
    models: tuple[str, ...]
    loader: str


@dataclass
class Names:
    """What was found in a script, before anything is changed."""

    imported: dict[str, str] = field(default_factory=dict)  # local name -> name in Accelerate
    modules: set[str] = field(default_factory=set)  # local names of the package and its modules
    accelerators: set[str] = field(default_factory=set)  # their texts, as "accelerator" or "self.accelerator"
    constructors: list[ast.Call] = field(default_factory=list)
    settings: dict[str, ast.expr] = field(default_factory=dict)  # keywords of all constructors
    are_known: bool = True  # whether these are all
    late: set[ast.AST] = field(default_factory=set)  # statements that set them on an accelerator
    values: dict[str, ast.expr] = field(default_factory=dict)  # what names were assigned, the last one
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    optimizers: set[str] = field(default_factory=set)  # optimizers and schedulers, as given to `prepare`
    schedulers: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)

    def fresh(self, name: str) -> str:
        """A name that the script does not use."""
        return next(each for each in (name, f"weft_{name}", f"the_{name}", f"{name}_") if each not in self.used)

    def original(self, call: ast.expr) -> str | None:
        """The name in Accelerate of what is called, if it comes from there."""
        text = dotted(call)
        first, _, rest = text.partition(".")
        if text in self.imported:
            return self.imported[text]
        return text.rpartition(".")[2] if first in self.modules and rest else None

    def method(self, node: ast.AST) -> str | None:
        """The name of an attribute of an accelerator."""
        if isinstance(node, ast.Attribute) and dotted(node.value) in self.accelerators:
            return node.attr
        return None

    def calls(self, name: str) -> Iterator[ast.Call]:
        """All calls of a method of an accelerator."""
        return (n for n in self.parents if isinstance(n, ast.Call) and self.method(n.func) == name)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """What a node lies in, from the inside to the outside."""
        while (node := self.parents.get(node, node)) in self.parents:
            yield node

    def scope(self, node: ast.AST) -> ast.AST | None:
        """The function a node lies in."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return next((each for each in self.above(node) if isinstance(each, kinds)), None)

    def role(self, node: ast.expr) -> str | None:
        """Model, optimizer, scheduler or loader: by its value if that tells, else by its name."""
        values = [self.values[dotted(node)]] if dotted(node) in self.values else []
        for each in [*values, node]:
            if isinstance(each, ast.Call):
                text = dotted(each.func).rpartition(".")[2]
                if dotted(each.func).endswith("from_pretrained"):
                    return "model"
            else:
                text = dotted(each).rpartition(".")[2]
            found = next((role for role, pattern in ROLES.items() if text and pattern.search(text)), None)
            if found:
                return found
        return None


def dotted(node: ast.AST | None) -> str:
    """The text of a name with its attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def find_names(tree: ast.Module) -> Names:
    """Look through a script."""
    names = Names()
    names.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "accelerate":
            names.imported |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.Import):
            names.modules |= {a.asname or "accelerate" for a in node.names if a.name.partition(".")[0] == "accelerate"}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.functions.add(node.name)
    arguments = [n for n in ast.walk(tree) if isinstance(n, ast.arg)]
    names.used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {n.arg for n in arguments}
    if names.imported or names.modules:
        typed = {n.arg for n in arguments if dotted(n.annotation).rpartition(".")[2] == "Accelerator"}
        names.accelerators |= typed | {"accelerator"} & {n.arg for n in arguments}
    assigned = [n for n in ast.walk(tree) if isinstance(n, (ast.Assign, ast.AnnAssign)) and n.value is not None]
    for node in assigned:
        _find_accelerators(names, node)
    for node in assigned:
        if not (isinstance(node.value, ast.Call) and names.method(node.value.func) == "prepare"):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.values |= {dotted(each): node.value for each in targets if dotted(each) and node.value}
    _settings_and_roles(names)
    names.loops = [loop for node in ast.walk(tree) if isinstance(node, ast.With) and (loop := _loop(names, node))]
    return names


def _settings_and_roles(names: Names) -> None:
    for call in names.constructors:
        names.settings |= {each.arg: each.value for each in call.keywords if each.arg}
        spread = {id(each): _spread(names, each.value) for each in call.keywords if each.arg is None}
        names.settings |= {name: value for found in spread.values() for name, value in (found or {}).items()}
        names.are_known &= None not in spread.values()
        if call.args:  # device_placement comes first, and has no meaning here
            names.settings.setdefault("device_placement", call.args[0])
    where = {names.scope(call) for call in names.calls("prepare")}
    for node in names.parents:
        steps = isinstance(node, ast.Assign) and names.method(node.targets[0]) == "gradient_accumulation_steps"
        if isinstance(node, ast.Assign) and steps and names.scope(node) in where:
            names.settings["gradient_accumulation_steps"] = node.value
            names.late.add(node)
    for call in names.calls("prepare"):
        for each in call.args:
            role = names.role(each)
            target = {"optimizer": names.optimizers, "scheduler": names.schedulers, "model": names.models}.get(
                role or ""
            )
            if target is not None and dotted(each):
                target.add(dotted(each))


def _spread(names: Names, given: ast.expr) -> dict[str, ast.expr] | None:
    """The settings in `**options`, if the script makes them of a dict and of assignments with a literal as key."""
    made = names.values.get(dotted(given), given)
    if not isinstance(made, ast.Dict):
        return None
    uses = [n for n in names.parents if isinstance(n, ast.Name) and n.id == dotted(given)]
    pairs: list[tuple[ast.expr | None, ast.expr]] = list(zip(made.keys, made.values, strict=True))
    for use in uses:
        parent = names.parents[use]
        whole = names.parents[parent] if isinstance(parent, ast.Subscript) else None
        if isinstance(whole, ast.Assign) and isinstance(parent, ast.Subscript) and whole.targets == [parent]:
            pairs.append((parent.slice, whole.value))
        elif not isinstance(parent, (ast.keyword, ast.Assign)):
            return None  # it may be changed there
    if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key, _ in pairs):
        return None
    return {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}  # type: ignore[misc]


def _find_accelerators(names: Names, node: ast.Assign | ast.AnnAssign) -> None:
    value = node.value
    values = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    made = [v for v in values if isinstance(v, ast.Call) and names.original(v.func) in ("Accelerator", "PartialState")]
    if made or dotted(value) in names.accelerators:
        names.constructors += made
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names.accelerators |= {dotted(each) for each in targets if dotted(each)}


def _loop(names: Names, block: ast.With) -> Loop | None:
    """`for ... in loader: ...; with accelerator.accumulate(model): ...`."""
    call = block.items[0].context_expr
    loop = names.parents.get(block)
    if not (isinstance(call, ast.Call) and names.method(call.func) == "accumulate" and len(block.items) == 1):
        return None
    if not isinstance(loop, ast.For) or block not in loop.body or loop.orelse or loop.body[0].lineno == loop.lineno:
        return None
    inner = [*loop.body[: loop.body.index(block)], *block.body]
    if any(isinstance(n, (ast.Break, ast.Continue)) for node in inner for n in ast.walk(node)):
        return None  # they would leave the inner loop only
    if not any(names.method(n) == "backward" for n in ast.walk(block)):
        return None
    source = loop.iter
    while isinstance(source, ast.Call) and dotted(source.func) in ("enumerate", "tqdm", "tqdm.tqdm") and source.args:
        source = source.args[0]
    seen = set()
    while dotted(source) in names.values and dotted(source) not in seen:  # active = accelerator.skip_first_batches(...)
        seen.add(dotted(source))
        value = names.values[dotted(source)]
        if isinstance(value, ast.Call) and names.method(value.func) == "skip_first_batches":
            value = value.args[0]
        if not dotted(value):
            break
        source = value
    given = call.args[0].elts if len(call.args) == 1 and isinstance(call.args[0], (ast.List, ast.Tuple)) else call.args
    models = tuple(dotted(each) for each in given)
    return Loop(loop, block, models, dotted(source)) if dotted(source) and models and all(models) else None
