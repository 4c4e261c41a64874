"""What is what in a script: the accelerators and their settings, models, optimizers, schedulers, loaders and loops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, ParentNodeProvider, PositionProvider, Scope, ScopeProvider

from weft_migrate.library import LibraryRows

Expression = cst.BaseExpression
N = TypeVar("N", bound=cst.CSTNode)
M = TypeVar("M", bound=cst.CSTNode)
Place = tuple[str, Scope | None]  # a variable or an attribute of one, and where it is bound

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
_PASSED_ON = ("enumerate", "tqdm", "tqdm.tqdm")


class Given(NamedTuple):
    """The arguments of a call."""

    args: list[Expression]
    keywords: dict[str, Expression]
    spread: list[Expression]

    def named(self, *parameters: str) -> dict[str, Expression]:
        """The arguments by name, of a function with these parameters."""
        return dict(zip(parameters, self.args, strict=False)) | self.keywords


class AccumulateLoop(NamedTuple):
    """A loop with `accumulate` in it."""

    loop: cst.For
    block: cst.With
    source: Expression
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


_WHOLE = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.BaseNumber, cst.SimpleString, cst.List, cst.ListComp)


def operand(node: cst.CSTNode) -> str:
    """The text of an expression as a part of another one: in parentheses if it may need them and has none."""
    is_whole = isinstance(node, _WHOLE) or bool(getattr(node, "lpar", None))
    return code(node) if is_whole else f"({code(node)})"


def joined(*arguments: str) -> str:
    """The text of some arguments, without the empty ones."""
    return ", ".join(filter(None, arguments))


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
    match node:
        case cst.Import(names=names):
            return [alias for alias in names if library.has(alias.evaluated_name)]
        case cst.ImportFrom(module=module, names=[*names]):
            return [alias for alias in names if library.has(dotted(module), alias.evaluated_name)]
        case _:
            return []


def bound(alias: cst.ImportAlias) -> str:
    """The name that an import binds."""
    return (alias.evaluated_alias or alias.evaluated_name).partition(".")[0]


def parameters(function: cst.FunctionDef) -> set[str]:
    """The names of the parameters of a function."""
    return {each.name.value for each in inside(function.params) if isinstance(each, cst.Param)}


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
    scopes: Mapping[cst.CSTNode, Scope | None]
    imported: dict[str, str] = field(default_factory=dict)  # local name -> name in the library
    modules: set[str] = field(default_factory=set)  # local names of the package and its modules
    holders: set[str] = field(default_factory=set)  # texts of the accelerators, as "accelerator" or "self.accelerator"
    states: dict[str, str] = field(default_factory=dict)  # what has the same attributes: "accelerator.state"
    constructors: list[cst.Call] = field(default_factory=list)
    settings: dict[str, Expression] = field(default_factory=dict)  # keywords of all constructors
    are_known: bool = True  # whether these are all
    late: set[cst.CSTNode] = field(default_factory=set)  # assignments that set them on an accelerator
    values: dict[Place, list[Expression]] = field(default_factory=dict)  # what variables are assigned, in order
    changed: set[str] = field(default_factory=set)  # names that also change in other ways
    uncertain: set[str] = field(default_factory=set)  # settings that only some constructors, or some runs, have
    taken: set[cst.CSTNode] = field(default_factory=set)  # calls whose results are settings, in every run
    loops: list[AccumulateLoop] = field(default_factory=list)
    local_sgd: list[cst.Call] = field(default_factory=list)  # in `with LocalSGD(...) as local_sgd`
    used: set[str] = field(default_factory=set)
    wrapped: dict[str, str] = field(default_factory=dict)  # names of what the library returns, and their roles
    returned: set[Place] = field(default_factory=set)  # where they are
    evaluated: set[Place] = field(default_factory=set)  # loaders whose batches are gathered

    def every(self, kind: type[N], *others: type[M]) -> Iterator[N | M]:
        """All nodes of a kind, or of two, in the order of the text."""
        kinds: tuple[type[N | M], ...] = (kind, *others)
        return (node for node in self.parents if isinstance(node, kinds))

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

    def place(self, node: cst.CSTNode, at: cst.CSTNode | None = None) -> Place:
        """The variable that a text with names is, where it stands or where another node does."""
        text = dotted(node)
        root = text.partition(".")[0]
        scope = self.scopes.get(at or node)
        bound_in = next((each.scope for each in scope[root]), None) if scope else None
        return text, bound_in.parent if bound_in and root == "self" else bound_in

    def function(self, place: Place) -> cst.FunctionDef | None:
        """The function of which a variable is a parameter."""
        owner = getattr(place[1], "node", None)
        return owner if isinstance(owner, cst.FunctionDef) and place[0] in parameters(owner) else None

    def calls_of(self, function: cst.FunctionDef) -> list[cst.Call | None]:
        """The calls of a function of the script; None for a use that is no call."""
        # not where it is replaced by one of the library, as in `get_dataloaders = mocked_dataloaders`
        no_use = {each for n in self.every(cst.Assign) if dotted(n.value) in self.imported for each in targets(n)}
        no_use |= {function.name}
        uses = [n for n in self.parents if dotted(n).rpartition(".")[2] == function.name.value and n not in no_use]
        uses = [n for n in uses if not isinstance(self.parents[n], cst.Attribute)]
        return [up if isinstance(up := self.parents[n], cst.Call) and up.func is n else None for n in uses]

    def sees(self, value: Expression, node: cst.CSTNode) -> bool:
        """Whether the names in an expression mean the same where a node stands."""
        names = [each for each in inside(value) if isinstance(each, cst.Name) and each in self.parents]
        names = [each for each in names if not is_part(each, self.parents[each])]
        return all(self.place(each) == self.place(each, node) for each in names)

    def origins(
        self, source: Expression, through: Sequence[str] = (), seen: frozenset[Place] = frozenset()
    ) -> set[Place]:
        """The variables behind an expression: through other names, `skip_first_batches`, and calls of the function."""
        node = iterated(self, source, through)
        if isinstance(node, cst.IfExp):
            return self.origins(node.body, through, seen) | self.origins(node.orelse, through, seen)
        place, found = self.place(node), set[Place]()
        function, values = self.function(place), list(self.values.get(place, []))
        if place in seen or place in self.returned:
            return found if place in seen else {place}
        for call in self.calls_of(function) if function else ():
            names = [each.name.value for each in function.params.params] if function else []
            value = given(call).named(*names[names[:1] == ["self"] :]).get(place[0])
            values += [value] if value else []
            found |= set() if value else {("", None)}
        for value in values:
            found |= self.origins(value, through, seen | {place})
        return found or {place}

    def loop_around(self, node: cst.CSTNode) -> cst.For | None:
        """The loop that a node lies in."""
        return next((each for each in self.above(node) if isinstance(each, cst.For)), None)

    def read_by(self, call: cst.Call) -> set[Place]:
        """The loaders whose batches a call may get."""
        around = self.loop_around(call)
        return self.origins(around.iter, _PASSED_ON) if around else {("", None)}

    def last(self, node: Expression) -> Expression:
        """What a variable is assigned last; else the node itself."""
        return [node, *self.values.get(self.place(node), [])][-1]

    def value(self, node: cst.CSTNode) -> cst.CSTNode:
        """What a variable is in every run: its only assignment, under no condition; else the node itself."""
        place = self.place(node)
        found = self.values.get(place, [])
        if len(found) != 1 or place[0] in self.changed or self.function(place):
            return node
        block = next((each for each in self.above(found[0]) if isinstance(each, cst.BaseSuite)), None)
        if block is None or block in self.above(node):
            return found[0]
        kept = "." in place[0] and isinstance(self.parents[block], cst.FunctionDef)  # self.plugin = ..., in __init__
        return found[0] if kept else node

    def choices(self, node: cst.CSTNode, seen: frozenset[Place] = frozenset()) -> list[cst.CSTNode]:
        """All values that an expression may have; what cannot be followed is one of them."""
        place, value = self.place(node), self.value(node)
        if isinstance(value, cst.IfExp):
            return [*self.choices(value.body, seen), *self.choices(value.orelse, seen)]
        found = self.values.get(place, [])
        if not found or place in seen or place[0] in self.changed or self.function(place):
            return [value]
        return [each for one in found for each in self.choices(one, seen | {place})]

    def made(self, node: cst.CSTNode | None) -> tuple[str, Given]:
        """The name in the library, and the arguments, of the call that a value or a variable comes from."""
        call = node and self.value(node)
        return (self.original(call.func) or "" if isinstance(call, cst.Call) else ""), given(call)

    def method(self, node: cst.CSTNode | None) -> str | None:
        """The name of an attribute of an accelerator, or of its state."""
        match node:
            case cst.Attribute(of, cst.Name(name)) if dotted(of) in {*self.holders, *self.states}:
                return name
            case _:
                return None

    def of_wrapped(self, node: cst.CSTNode | None) -> tuple[str, str] | None:
        """What only objects of the library have: the name of such an object, and the text for it in weft."""
        text = dotted(node)
        for name, role in self.wrapped.items():
            row = self.library.wrapped.get(f"{role}.{text[len(name) + 1 :]}")
            if row is not None and text.startswith(f"{name}."):
                return name, row
        return None

    def calls(self, *names: str) -> Iterator[cst.Call]:
        """All calls of methods of an accelerator."""
        return (call for call in self.every(cst.Call) if self.method(call.func) in names)

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
        for each in (self.last(node), node):
            last = dotted(each.func if isinstance(each, cst.Call) else each).rpartition(".")[2]
            if isinstance(each, cst.Call) and last.endswith("from_pretrained"):
                return "model"
            if found := next((role for role, pattern in ROLES.items() if last and pattern.search(last)), None):
                return found
        return None

    def roles(self, call: cst.Call) -> list[str | None]:
        """The roles of the arguments of `prepare`, or of `setup`."""
        known = self.library.prepares[self.method(call.func) or ""]
        return [known[min(n, len(known) - 1)] or self.role(each) for n, each in enumerate(given(call).args)]

    def prepares(self) -> Iterator[cst.Call]:
        """All calls of `prepare`, or of `setup`."""
        return self.calls(*self.library.prepares)


def find(tree: cst.Module, library: LibraryRows) -> Script:
    """Look through a script."""
    metadata = MetadataWrapper(tree, unsafe_skip_copy=True)
    parents, where = metadata.resolve(ParentNodeProvider), metadata.resolve(PositionProvider)
    own = {node: parents[node] for node in inside(tree) if node is not tree}
    script = Script(library, where, own, metadata.resolve(ScopeProvider))
    for node in script.every(cst.Import, cst.ImportFrom):
        names = {bound(alias): alias.evaluated_name for alias in aliases_of(library, node)}
        if isinstance(node, cst.ImportFrom):
            script.imported |= names
        else:
            script.modules |= set(names)
    script.used = {n.value for n in script.every(cst.Name) if not is_part(n, parents[n])}
    for parameter in script.every(cst.Param) if script.imported or script.modules else ():
        typed = parameter.annotation and script.original(parameter.annotation.annotation) in library.classes
        if typed or parameter.name.value == library.variable:
            script.holders.add(parameter.name.value)
    _assigned(script)
    script.states = {f"{each}.state": each for each in script.holders}
    _settings(script)
    for block in script.every(cst.With):
        match block:
            case cst.With([cst.WithItem(cst.Call(func) as call, cst.AsName(cst.Name(name)))], cst.IndentedBlock()):
                script.wrapped |= {name: "local_sgd"} if script.original(func) == "LocalSGD" else {}
                script.local_sgd += [call] if script.original(func) == "LocalSGD" else []
    script.loops = [loop for block in script.every(cst.With) if (loop := _loop(script, block))]
    for call in script.calls("gather_for_metrics"):
        script.evaluated |= script.read_by(call)
    return script


def _assigned(script: Script) -> None:
    """Note the accelerators, what other names are assigned, and which change in other ways."""
    pairs = [(node, node.value) for node in script.every(cst.Assign, cst.AnnAssign) if node.value is not None]
    for node, value in pairs:
        values = [value.body, value.orelse] if isinstance(value, cst.IfExp) else [value]
        made = [v for v in values if isinstance(v, cst.Call) and script.original(v.func) in script.library.classes]
        if made or dotted(value) in script.holders:
            script.constructors += made
            script.holders |= set(map(dotted, targets(node))) - {""}
    for node, value in pairs:
        is_prepared = isinstance(value, cst.Call) and script.method(value.func) in script.library.prepares
        for target in () if is_prepared else filter(dotted, targets(node)):
            script.values.setdefault(script.place(target), []).append(value)
            script.changed.add(dotted(target).rpartition(".")[0])
    for call in script.every(cst.Call):
        owner, _, method = dotted(call.func).rpartition(".")
        script.changed |= {owner} if method in ("append", "extend", "insert", "update") else set()
    for other in script.parents:
        if isinstance(other, (cst.AugAssign, cst.For, cst.NamedExpr)):
            script.changed |= set(map(dotted, elements(other.target)))
    script.changed.discard("")


def _take(script: Script, setting: cst.CSTNode) -> None:
    """Note the calls that make a setting, and what is given to them."""
    for each in elements(script.value(setting)):
        call = script.value(each)
        if isinstance(call, cst.Call) and script.original(call.func) in script.library.makers:
            script.taken.add(call)
            for argument in call.args:
                _take(script, argument.value)


def _settings(script: Script) -> None:
    """Note the settings of the accelerators, and the objects that they give back."""
    of_all: list[dict[str, Expression]] = []
    names = [n for n in script.parents if named(n) and not is_part(n, script.parents[n])]
    read = {code(n) for n in names if not isinstance(script.parents[n], cst.AssignTarget)}
    for call in script.constructors:
        arguments = given(call)
        mine = arguments.named(*script.library.positional)
        for each in arguments.spread:
            mine |= _spread(script, each)
        script.settings |= mine
        of_all += [mine] if script.original(call.func) == script.library.classes[0] else []
        for value in mine.values():
            _take(script, value)
    for name in script.settings:
        texts = {code(script.value(each[name])) if name in each else "" for each in of_all}
        script.uncertain |= {name} if len(texts) > 1 else set()
    for (name, _), values in script.values.items():
        if name in read and script.made(values[0])[0].endswith("Logger"):
            script.wrapped[name] = "logger"
        for value in () if name in read else values:
            _take(script, value)
    where = {script.scope(call) for call in script.prepares()}
    for node in script.every(cst.Assign):
        if script.scope(node) in where and script.method(targets(node)[0]) == "gradient_accumulation_steps":
            script.settings["gradient_accumulation_steps"] = node.value
            script.late.add(node)
    for call in script.prepares():
        whole = script.parents[call]
        bound_to = elements(targets(whole)[0]) if isinstance(whole, cst.Assign) else []
        script.wrapped |= {named(name): role or "" for name, role in zip(bound_to, script.roles(call), strict=False)}
        script.returned |= set(map(script.place, filter(dotted, bound_to)))


def _spread(script: Script, options: Expression) -> dict[str, Expression]:
    """The settings in `**options`, if the script makes them of a dict and of assignments with a literal as key."""
    name, made = dotted(options), script.last(options)
    pairs = [(getattr(each, "key", None), each.value) for each in made.elements] if isinstance(made, cst.Dict) else []
    places, conditional = set[cst.CSTNode](), set[cst.CSTNode]()
    for node in script.every(cst.Assign):
        match targets(node)[0]:
            case cst.Subscript(cst.Name(of), slice=[cst.SubscriptElement(cst.Index(key))]) as place if of == name:
                pairs.append((key, node.value))
                places.add(place)
                under = [each for each in script.above(node) if isinstance(each, (cst.If, cst.For, cst.While, cst.Try))]
                conditional |= set() if set(script.above(made)).issuperset(under) else {key}
    uses = [script.parents[n] for n in script.every(cst.Name) if n.value == name]
    rest = [n for n in uses if n not in places and not isinstance(n, cst.AssignTarget) and not getattr(n, "star", "")]
    keys = [str(key.evaluated_value) if isinstance(key, cst.SimpleString) else "" for key, _ in pairs]
    if not isinstance(made, cst.Dict) or rest or not all(keys):
        script.are_known = False
        return {}
    script.uncertain |= {name for name, (key, _) in zip(keys, pairs, strict=True) if key in conditional}
    return {name: value for name, (_, value) in zip(keys, pairs, strict=True)}


def iterated(script: Script, source: Expression, through: Sequence[str]) -> Expression:
    """What a loop iterates over, without some functions, and `skip_first_batches`."""
    while isinstance(source, cst.Call) and source.args:
        name = script.method(source.func) or script.original(source.func)
        if dotted(source.func) not in through and name != "skip_first_batches":
            break
        source = source.args[0].value
    return source


def _loop(script: Script, block: cst.With) -> AccumulateLoop | None:
    """`for ... in loader: ...; with accelerator.accumulate(model): ...`."""
    body = script.parents[block]
    loop = script.parents.get(body)
    match block:
        case cst.With(items=[cst.WithItem(item=cst.Call() as call)], body=cst.IndentedBlock(body=lines)):
            is_accumulated = script.method(call.func) == "accumulate"
        case _:
            return None
    if not is_accumulated or not isinstance(loop, cst.For):
        return None
    before = loop.body.body[: list(loop.body.body).index(block)]
    if any(isinstance(n, (cst.Break, cst.Continue)) for n in inside(*before, *lines)):
        return None  # they would leave the inner loop only
    source, args = iterated(script, loop.iter, _PASSED_ON), given(call).args
    origins = [name for name, _ in script.origins(source)]
    loader = origins[0] if len(origins) == 1 else ""
    models = tuple(dotted(each) for each in (elements(args[0]) if len(args) == 1 else args))
    known = loader and models and all(models) and script.has(block, "backward")
    return AccumulateLoop(loop, block, source, models, loader) if known else None
