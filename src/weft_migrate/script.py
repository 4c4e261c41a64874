"""What is what in a script: the accelerators and their settings, models, optimizers, schedulers, loaders and loops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from weft_migrate.library import LibraryRows

Expression = cst.BaseExpression

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


class Given(NamedTuple):
    """The arguments of a call."""

    args: list[Expression]
    keywords: dict[str, Expression]
    spread: list[Expression]


class AccumulateLoop(NamedTuple):
    """A loop with `accumulate` in it."""

    loop: cst.For
    block: cst.With
    models: tuple[str, ...]
    loader: str


def dotted(node: cst.CSTNode | None) -> str:
    """The text of a name with its attributes; empty for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr.value}"
    return ""


def named(node: cst.CSTNode) -> str:
    """The text of a name, or of `models[i]`; empty for anything else."""
    return code(node) if isinstance(node, cst.Subscript) and dotted(node.value) else dotted(node)


def code(node: cst.CSTNode) -> str:
    """The text of a node."""
    return cst.Module([]).code_for_node(node)


def inside(*nodes: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Nodes and all that is in them."""
    for node in nodes:
        yield node
        yield from inside(*node.children)


def given(call: cst.CSTNode | None) -> Given:
    """The arguments of a call; none of anything else."""
    found = Given([], {}, [])
    for each in call.args if isinstance(call, cst.Call) else ():
        if each.star:
            found.spread.append(each.value)
        elif each.keyword:
            found.keywords[each.keyword.value] = each.value
        else:
            found.args.append(each.value)
    return found


def is_part(name: cst.CSTNode, parent: cst.CSTNode) -> bool:
    """Whether a name is that of an attribute, a keyword, an import or a function, and no variable."""
    part = isinstance(parent, cst.Attribute) and parent.attr is name
    part |= isinstance(parent, cst.Arg) and parent.keyword is name
    return part or (isinstance(parent, (cst.FunctionDef, cst.ClassDef, cst.ImportAlias)) and parent.name is name)


def variables(node: cst.CSTNode) -> set[str]:
    """The names that a piece of code reads or assigns, without what its imports bind."""
    if isinstance(node, (cst.Import, cst.ImportFrom)):
        return set()
    if isinstance(node, cst.Name):
        return {node.value}
    return {name for child in node.children if not is_part(child, node) for name in variables(child)}


def aliases_of(library: LibraryRows, node: cst.CSTNode) -> list[cst.ImportAlias]:
    """What an import has of a library."""
    if not isinstance(node, (cst.Import, cst.ImportFrom)) or isinstance(node.names, cst.ImportStar):
        return []
    names = {alias: dotted(alias.name) for alias in node.names}
    if isinstance(node, cst.Import):
        return [alias for alias, name in names.items() if library.has(name)]
    return [alias for alias, name in names.items() if library.has(dotted(node.module), name)]


def bound(alias: cst.ImportAlias) -> str:
    """The name that an import binds."""
    return dotted(alias.asname.name if alias.asname else alias.name).partition(".")[0]


def targets(node: cst.Assign | cst.AnnAssign) -> list[Expression]:
    """What an assignment assigns to."""
    return [each.target for each in node.targets] if isinstance(node, cst.Assign) else [node.target]


def elements(node: cst.CSTNode | None) -> list[Expression]:
    """What is in a tuple, list or set; else the node itself."""
    if isinstance(node, (cst.Tuple, cst.List, cst.Set)):
        return [each.value for each in node.elements]
    return [node] if isinstance(node, Expression) else []


@dataclass
class Script:
    """What was found in a script, before anything is changed."""

    library: LibraryRows
    where: Mapping[cst.CSTNode, CodeRange]
    parents: dict[cst.CSTNode, cst.CSTNode]  # of all nodes, in the order of the text
    imported: dict[str, str] = field(default_factory=dict)  # local name -> name in the library
    modules: set[str] = field(default_factory=set)  # local names of the package and its modules
    holders: set[str] = field(default_factory=set)  # texts of the accelerators, as "accelerator" or "self.accelerator"
    constructors: list[cst.Call] = field(default_factory=list)
    settings: dict[str, Expression] = field(default_factory=dict)  # keywords of all constructors
    are_known: bool = True  # whether these are all
    late: set[cst.CSTNode] = field(default_factory=set)  # assignments that set them on an accelerator
    values: dict[str, Expression] = field(default_factory=dict)  # what names were assigned, the last one
    assigned: dict[str, list[cst.Assign | cst.AnnAssign]] = field(default_factory=dict)  # all of them
    changed: set[str] = field(default_factory=set)  # names that also change in other ways
    uncertain: set[str] = field(default_factory=set)  # settings that only some constructors, or some runs, have
    taken: set[cst.CSTNode] = field(default_factory=set)  # calls whose results are settings, in every run
    loops: list[AccumulateLoop] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    optimizers: set[str] = field(default_factory=set)  # as given to `prepare`
    wrapped: dict[str, str] = field(default_factory=dict)  # names of what the library returns, and their roles
    evaluated: set[str] = field(default_factory=set)  # loaders whose batches are gathered

    def line(self, node: cst.CSTNode) -> int:
        """The first line of a node."""
        return self.where[node].start.line

    def fresh(self, name: str) -> str:
        """A name that the script does not use."""
        return next(each for each in (name, f"weft_{name}", f"the_{name}", f"{name}_") if each not in self.used)

    def original(self, node: cst.CSTNode) -> str | None:
        """The name in the library of a name that comes from there."""
        text = dotted(node)
        first, _, rest = text.partition(".")
        if text in self.imported:
            return self.imported[text]
        return text.rpartition(".")[2] if first in self.modules and rest else None

    def _assignments(self, node: cst.CSTNode) -> list[cst.Assign | cst.AnnAssign]:
        """Those to a variable: in the function around a node, if there are any, or else all."""
        found = self.assigned.get(dotted(node), [])
        return [each for each in found if self.scope(each) is self.scope(node)] or found

    def value(self, node: cst.CSTNode) -> cst.CSTNode:
        """What a variable is in every run: its only assignment, under no condition; else the node itself."""
        name, found = dotted(node), self._assignments(node)
        around = inside(*(each.params for each in self.above(node) if isinstance(each, cst.FunctionDef)))
        is_parameter = any(isinstance(each, cst.Param) and each.name.value == name for each in around)
        if len(found) != 1 or name in self.changed or is_parameter or found[0].value is None:
            return node
        place = self.parents[found[0]]
        block = self.parents[place] if isinstance(place, cst.SimpleStatementLine) else place
        kept = "." in name and isinstance(self.parents.get(block), cst.FunctionDef)  # self.plugin = ..., in __init__
        return found[0].value if kept or isinstance(block, cst.Module) or block in self.above(node) else node

    def choices(self, node: cst.CSTNode, seen: frozenset[str] = frozenset()) -> list[cst.CSTNode]:
        """All values that an expression may have; what cannot be followed is one of them."""
        name, value = dotted(node), self.value(node)
        if isinstance(value, cst.IfExp):
            return [*self.choices(value.body, seen), *self.choices(value.orelse, seen)]
        found = [each.value for each in self._assignments(node) if each.value is not None]
        if not found or name in seen or name in self.changed:
            return [value]
        return [each for one in found for each in self.choices(one, seen | {name})]

    def made(self, node: cst.CSTNode | None) -> tuple[str, Given]:
        """The name in the library, and the arguments, of the call that a value or a variable comes from."""
        call = node and self.value(node)
        return (self.original(call.func) or "" if isinstance(call, cst.Call) else ""), given(call)

    def method(self, node: cst.CSTNode | None) -> str | None:
        """The name of an attribute of an accelerator."""
        return node.attr.value if isinstance(node, cst.Attribute) and dotted(node.value) in self.holders else None

    def of_wrapped(self, node: cst.CSTNode | None) -> tuple[str, str] | None:
        """What only objects of the library have: the name of such an object, and the text for it in weft."""
        text = dotted(node)
        found = [(name, f"{role}.{text[len(name) + 1 :]}") for name, role in self.wrapped.items()]
        fits = (pair for pair in found if text.startswith(f"{pair[0]}.") and pair[1] in self.library.wrapped)
        return next(((name, self.library.wrapped[key]) for name, key in fits), None)

    def calls(self, *names: str) -> Iterator[cst.Call]:
        """All calls of methods of an accelerator."""
        return (n for n in self.parents if isinstance(n, cst.Call) and self.method(n.func) in names)

    def has(self, node: cst.CSTNode, *names: str) -> bool:
        """Whether attributes of an accelerator are somewhere in a node."""
        return any(self.method(each) in names for each in inside(node))

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """What a node lies in, from the inside to the outside."""
        while (node := self.parents.get(node, node)) in self.parents:
            yield node

    @property
    def is_fabric(self) -> bool:
        """Whether the library is Fabric."""
        return self.library.name == "Fabric"

    def scope(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """The function a node lies in."""
        return next((each for each in self.above(node) if isinstance(each, cst.FunctionDef)), None)

    def role(self, node: Expression) -> str | None:
        """Model, optimizer, scheduler or loader: by its value if that tells, else by its name."""
        values = [self.values[dotted(node)]] if dotted(node) in self.values else []
        for each in [*values, node]:
            text = dotted(each.func if isinstance(each, cst.Call) else each)
            if isinstance(each, cst.Call) and text.endswith("from_pretrained"):
                return "model"
            last = text.rpartition(".")[2]
            if found := next((role for role, pattern in ROLES.items() if last and pattern.search(last)), None):
                return found
        return None

    def roles(self, call: cst.Call) -> list[str | None]:
        """The roles of the arguments of `prepare`, or of `setup`."""
        known = self.library.prepares.get(self.method(call.func) or "", ())
        args = given(call).args
        fixed = [known[min(n, len(known) - 1)] if known else "" for n in range(len(args))]
        return [role or self.role(each) for role, each in zip(fixed, args, strict=True)]

    def prepares(self) -> Iterator[cst.Call]:
        """All calls of `prepare`, or of `setup`."""
        return self.calls(*self.library.prepares)


def find(tree: cst.Module, library: LibraryRows) -> Script:
    """Look through a script."""
    parents: dict[cst.CSTNode, cst.CSTNode] = {}
    for node in inside(tree):
        parents |= dict.fromkeys(node.children, node)
    where = MetadataWrapper(tree, unsafe_skip_copy=True).resolve(PositionProvider)
    script = Script(library, where, {node: parents[node] for node in inside(tree) if node in parents})
    for node in script.parents:
        for alias in aliases_of(library, node):
            if isinstance(node, cst.ImportFrom):
                script.imported[bound(alias)] = dotted(alias.name)
            else:
                script.modules.add(bound(alias))
    script.used = {n.value for n in script.parents if isinstance(n, cst.Name) and not is_part(n, script.parents[n])}
    is_used = script.imported or script.modules
    for parameter in [n for n in script.parents if isinstance(n, cst.Param)] if is_used else []:
        typed = parameter.annotation and script.original(parameter.annotation.annotation) in library.classes
        if typed or parameter.name.value == library.variable:
            script.holders.add(parameter.name.value)
    _assigned(script)
    _settings(script)
    blocks = [node for node in script.parents if isinstance(node, cst.With)]
    script.loops = [loop for node in blocks if (loop := _loop(script, node))]
    for call in script.calls("gather_for_metrics"):
        around = next((each for each in script.above(call) if isinstance(each, cst.For)), None)
        script.evaluated |= {_loader_of(script, around.iter)} - {""} if around else set()
    return script


def _assigned(script: Script) -> None:
    assigned = [n for n in script.parents if isinstance(n, (cst.Assign, cst.AnnAssign)) and n.value is not None]
    for node in assigned:
        _holder(script, node)
    for node in assigned:
        made = isinstance(node.value, cst.Call) and script.method(node.value.func) in script.library.prepares
        for name in () if made else filter(None, map(dotted, targets(node))):
            script.values |= {name: node.value} if node.value else {}
            script.assigned.setdefault(name, []).append(node)
            script.changed.add(name.rpartition(".")[0])
    for other in script.parents:
        owner, _, method = dotted(other.func).rpartition(".") if isinstance(other, cst.Call) else ("", "", "")
        script.changed |= {owner} if method in ("append", "extend", "insert", "update") else set()
        if isinstance(other, (cst.AugAssign, cst.For, cst.NamedExpr)):
            script.changed |= set(map(dotted, elements(other.target)))
    script.changed.discard("")


def _holder(script: Script, node: cst.Assign | cst.AnnAssign) -> None:
    value = node.value
    values = [value.body, value.orelse] if isinstance(value, cst.IfExp) else [value]
    made = [v for v in values if isinstance(v, cst.Call) and script.original(v.func) in script.library.classes]
    if made or dotted(value) in script.holders:
        script.constructors += made
        script.holders |= {dotted(each) for each in targets(node) if dotted(each)}


def _take(script: Script, setting: cst.CSTNode) -> None:
    """Note the calls that make a setting, and what is given to them."""
    for each in elements(script.value(setting)):
        call = script.value(each)
        if isinstance(call, cst.Call) and script.original(call.func) in script.library.makers:
            script.taken.add(call)
            for argument in call.args:
                _take(script, argument.value)


def _own(script: Script, call: cst.Call) -> dict[str, Expression]:
    """The settings that a constructor gets."""
    args, keywords, spread = given(call)
    mine = dict(zip(script.library.positional, args, strict=False)) | keywords
    for each in spread:
        found = _spread(script, each)
        mine |= found or {}
        script.are_known &= found is not None
    return mine


def _settings(script: Script) -> None:
    of_all: list[dict[str, Expression]] = []
    for call in script.constructors:
        mine = _own(script, call)
        script.settings |= mine
        of_all += [mine] if script.original(call.func) == script.library.classes[0] else []
    for name in script.settings:
        texts = {code(script.value(each[name])) if name in each else "" for each in of_all}
        script.uncertain |= {name} if len(texts) > 1 else set()
    parents = script.parents
    names = [n for n in parents if named(n) and not is_part(n, parents[n])]
    read = {code(n) for n in names if not isinstance(parents[n], cst.AssignTarget)}
    loggers = [
        name
        for name in read & set(script.assigned)
        if name and script.made(script.assigned[name][0].value)[0].endswith("Logger")
    ]
    script.wrapped |= dict.fromkeys(loggers, "logger")
    for setting in [each for call in script.constructors for each in _own(script, call).values()]:
        _take(script, setting)
    for name in set(script.assigned) - read:
        for each in script.assigned[name]:
            _take(script, each.value or each)
    where = {script.scope(call) for call in script.prepares()}
    assigned = [node for node in script.parents if isinstance(node, cst.Assign) and script.scope(node) in where]
    for node in assigned:
        if script.method(targets(node)[0]) == "gradient_accumulation_steps":
            script.settings["gradient_accumulation_steps"] = node.value
            script.late.add(node)
    for call in script.prepares():
        whole = script.parents[call]
        bound_to = elements(targets(whole)[0]) if isinstance(whole, cst.Assign) else []
        script.wrapped |= {named(name): role or "" for name, role in zip(bound_to, script.roles(call), strict=False)}
        pairs = zip(given(call).args, script.roles(call), strict=True)
        script.optimizers |= {dotted(each) for each, role in pairs if role == "optimizer" and dotted(each)}


def _spread(script: Script, value: Expression) -> dict[str, Expression] | None:
    """The settings in `**options`, if the script makes them of a dict and of assignments with a literal as key."""
    made = script.values.get(dotted(value), value)
    if not isinstance(made, cst.Dict) or not all(isinstance(each, cst.DictElement) for each in made.elements):
        return None
    pairs = [(each.key, each.value) for each in made.elements if isinstance(each, cst.DictElement)]
    for use in [n for n in script.parents if isinstance(n, cst.Name) and n.value == dotted(value)]:
        parent = script.parents[use]
        target = script.parents[parent] if isinstance(parent, cst.Subscript) else None
        whole = script.parents[target] if isinstance(target, cst.AssignTarget) else None
        index = parent.slice[0].slice if isinstance(parent, cst.Subscript) else None
        if isinstance(whole, cst.Assign) and isinstance(index, cst.Index):
            pairs.append((index.value, whole.value))
            made_at = set(script.above(value))
            under = [each for each in script.above(whole) if isinstance(each, (cst.If, cst.For, cst.While, cst.Try))]
            if isinstance(index.value, cst.SimpleString) and not made_at.issuperset(under):
                script.uncertain.add(str(index.value.evaluated_value))
        elif not isinstance(parent, (cst.Arg, cst.AssignTarget)) or (isinstance(parent, cst.Arg) and not parent.star):
            return None  # it may be changed there
    keys = [key.evaluated_value if isinstance(key, cst.SimpleString) else None for key, _ in pairs]
    if not all(isinstance(key, str) for key in keys):
        return None
    return {str(key): value for key, (_, value) in zip(keys, pairs, strict=True)}


def _loader_of(script: Script, source: cst.CSTNode) -> str:
    """The loader behind what a loop iterates over."""
    wrappers = ("enumerate", "tqdm", "tqdm.tqdm")
    while isinstance(source, cst.Call) and dotted(source.func) in wrappers and source.args:
        source = source.args[0].value
    seen = set()
    while dotted(source) in script.values and dotted(source) not in seen:  # active = skip_first_batches(...)
        seen.add(dotted(source))
        value = script.values[dotted(source)]
        if isinstance(value, cst.Call) and script.method(value.func) == "skip_first_batches":
            value = value.args[0].value
        if not dotted(value):
            break
        source = value
    return dotted(source)


def _loop(script: Script, block: cst.With) -> AccumulateLoop | None:
    """`for ... in loader: ...; with accelerator.accumulate(model): ...`."""
    call, body = block.items[0].item, script.parents[block]
    loop = script.parents.get(body)
    if not (isinstance(call, cst.Call) and script.method(call.func) == "accumulate" and len(block.items) == 1):
        return None
    if not isinstance(loop, cst.For) or loop.orelse or not isinstance(block.body, cst.IndentedBlock):
        return None
    before = loop.body.body[: list(loop.body.body).index(block)]
    if any(isinstance(n, (cst.Break, cst.Continue)) for n in inside(*before, *block.body.body)):
        return None  # they would leave the inner loop only
    loader, args = _loader_of(script, loop.iter), given(call).args
    models = tuple(dotted(each) for each in (elements(args[0]) if len(args) == 1 else args))
    known = loader and models and all(models) and script.has(block, "backward")
    return AccumulateLoop(loop, block, models, loader) if known else None
