"""Find modules that a forward may skip on some ranks only.

Examples are experts without rows, and layers that are dropped at random.

A block that is gathered separately must be gathered by all ranks. The source of the class that calls the block shows
whether it is always called: either the call is under no condition, or the condition is the same on all ranks (it
depends on the module's settings, on loop counters, or on arguments that are flags).

Tested in tests/parallel/test_skipped.py.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from torch import nn

from meshwise.compat.compiling import unwrapped
from meshwise.parallel.blocks import CONTAINERS

EXPERT = "expert"
SAME_AS_GIVEN = ("isinstance", "hasattr", "getattr", "range", "int", "bool", "callable", "min", "max")
SAME_EVERYWHERE = {"jit", "compiler", "is_grad_enabled", "is_autocast_enabled", "is_inference_mode_enabled"}


def may_be_skipped(root: nn.Module, name: str) -> str | None:
    """Return the reason why the forward of `root` may call the module `name` on some ranks only, e.g. a source line as
    `file:line`. Return an empty string if every rank calls it.

    Return None if the source code does not show this: it is missing, or it does not mention the module. Also return
    None if a library's code may skip the module, because that usually depends on a setting that all ranks share.
    """
    owner, path = unwrapped(root), name.split(".")
    why: str | None = ""
    while path:
        if type(owner) is nn.Sequential:
            owner = getattr(owner, path.pop(0))
            continue
        attribute = path.pop(0)
        child = getattr(owner, attribute)
        listed = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if listed and path and EXPERT in f"{attribute} {type(getattr(child, path[0])).__name__}".lower():
            return "they are experts"
        found = skips(type(owner), attribute)
        if found and not is_of_a_library(type(owner)):
            return found
        why = why if found == "" else None
        while path and isinstance(child, CONTAINERS) and type(child).__module__.startswith("torch.nn"):
            child = getattr(child, path.pop(0))
        owner = child
    return why


def parameters_that_may_be_skipped(model: nn.Module, roots: Sequence[nn.Module]) -> set[str]:
    """Return the names of the parameters that some ranks may not use in a forward. These parameters are in modules that
    the forward of one of `roots` may skip. The names are those of `model.named_parameters()`."""
    parts = [(root, *named) for root in roots for named in root.named_modules() if named[0]]
    skipped = {p for root, name, part in parts if may_be_skipped(root, name) for p in part.parameters(recurse=False)}
    return {name for name, p in model.named_parameters() if p in skipped}


def is_of_a_library(kind: Any) -> bool:
    """Return whether a class comes from an installed library rather than from the user's code."""
    places = tuple(sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib"))
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    return code is not None and code.co_filename.startswith(places)


def skips(kind: type, attribute: str) -> str | None:
    """Return the source line, as `file:line`, at which a method of the class `kind` may call the module
    `self.attribute` on some ranks only. If `self.attribute` is a list of modules, calls of its entries count as well.

    Return an empty string if no rank may skip such a call. Return None if no method mentions the attribute, or if the
    source is missing.
    """
    seen = False
    for code, calls in _calls(kind, attribute):
        if calls.where is not None:
            return f"{code.co_filename}:{code.co_firstlineno + calls.where - 1}"
        seen = seen or calls.seen
    return "" if seen else None


def called_in_parts(root: nn.Module, name: str) -> bool:
    """Return whether code calls a submodule of the block `name` directly, e.g. `self.blocks[0].norm(x)` for a block in
    `self.blocks`. Only the class that has the attribute `blocks` is searched."""
    path, block = name.split("."), root.get_submodule(name)
    place = len(path) - 1
    while place > 0 and isinstance(root.get_submodule(".".join(path[:place])), CONTAINERS):
        place -= 1
    kind: Any = type(unwrapped(root.get_submodule(".".join(path[:place]))))
    known, entry = dict(block.named_modules()), path[place + 1 :][:1]
    parts = {part for _, calls in _calls(kind, path[place]) for part in calls.parts}
    return any(part in known and ([index] == entry or not index.isdigit()) for index, part in parts)


@functools.cache
def _calls(kind: Any, attribute: str) -> list[tuple[CodeType, _Calls]]:
    """Return the calls of `self.attribute` in each method of a class, together with the code object of the method."""
    found, own = [], kind.__mro__[: list(kind.__mro__).index(nn.Module)]
    for name in sorted({name for each in own for name in vars(each)} - {"__init__"}):
        function: Any = inspect.unwrap(getattr(kind, name)) if callable(getattr(kind, name, None)) else None
        tree = _parsed(function) if inspect.isfunction(function) else None
        if tree is not None:
            found.append((function.__code__, _Calls(tree, attribute)))
    return found


def _parsed(function: Any) -> ast.FunctionDef | None:
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):  # written in a prompt, or made by code
        return None
    return found if isinstance(found, ast.FunctionDef) else None


class _Calls:
    """Finds the calls of `self.<attribute>` in the source of one function. The attribute is a module, or a list of
    modules whose entries are called. An entry counts as called where it is an argument, too: `checkpoint(layer, x)`.

    where: the line, in the function, of the first call that some ranks may skip. None if there is no such call.
    parts: the modules inside of entries that are called by themselves, each as (index of the entry, name).
    """

    def __init__(self, function: ast.FunctionDef, attribute: str) -> None:
        self._attribute, every = attribute, list(ast.walk(function))
        self._above = {child: node for node in every for child in ast.iter_child_nodes(node)}
        given = function.args
        self._flags = {each.arg for each in [*given.posonlyargs, *given.args, *given.kwonlyargs]} - {"self"}
        self._entries = set[str]()  # names of entries
        self._varying = set[str]()  # names of what differs from rank to rank
        for _ in range(2):  # what the end of a loop assigns is there in its beginning
            for node in every:
                self._note_names(node)
        self._used = {node for node in every if isinstance(node, ast.Call) and self._entries_in(node)}
        self.seen = bool(self._used)
        exits = [n for n in every if isinstance(n, ast.Continue | ast.Break | ast.Return) and self._is_guarded(n)]
        skipped = [
            call.lineno
            for call in self._used
            if self._is_guarded(call)
            or any(isinstance(e, ast.Subscript) and self._varies(e.slice) for e in self._entries_in(call))
            or any(self._ends(each, call) for each in exits)
        ]
        self.where: int | None = min(skipped, default=None)
        self.parts = {part for node in every if isinstance(node, ast.Call) for part in self._parts_in(node.func)}

    def _note_names(self, node: ast.AST) -> None:
        if isinstance(node, ast.For | ast.comprehension):
            self._note_loop(node.target, node.iter)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            if self._is_entry(node.value):
                self._entries |= names
            elif self._varies(node.value):
                self._varying |= names

    def _note_loop(self, target: ast.expr, over: ast.expr) -> None:
        names = [n.id for n in ast.walk(target) if isinstance(n, ast.Name)]
        held = [False] * (len(names) - 1) + [self._holds(over)]  # of items(), the key is the same on all ranks
        if isinstance(over, ast.Call) and ast.unparse(over.func) in ("enumerate", "zip", "reversed"):
            held = [False] * (ast.unparse(over.func) == "enumerate") + [self._holds(each) for each in over.args]
        if any(held):
            self._entries |= {name for name, of in zip(names, held, strict=False) if of}
        elif self._varies(over):
            self._varying |= set(names)

    def _holds(self, node: ast.expr) -> bool:
        """Return whether the node is `self.attribute`, or a part or view of it, e.g. `self.attribute.items()`."""
        while isinstance(node, ast.Call | ast.Subscript | ast.Attribute):
            if isinstance(node, ast.Attribute) and _is_self(node.value) and node.attr == self._attribute:
                return True
            if isinstance(node, ast.Call):
                plain = isinstance(node.func, ast.Name)
                node = node.func if not plain else node.args[0] if node.args else node.func
            else:
                node = node.value
        return False

    def _is_entry(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._entries
        return isinstance(node, ast.Subscript | ast.Attribute) and self._holds(node)

    def _entries_in(self, call: ast.Call) -> list[ast.expr]:
        return [each for each in [call.func, *call.args] if self._is_entry(each)]

    def _varies(self, node: ast.expr) -> bool:
        """Return whether the value of an expression may differ between ranks."""
        if isinstance(node, ast.Name):
            known = node.id in self._flags or hasattr(builtins, node.id) or node.id == "self"
            return node.id in self._varying and not known
        if isinstance(node, ast.Attribute):
            return _first_name(node) in self._varying | self._flags and not self._is_entry(node.value)
        if isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            if text == "len" or text in SAME_AS_GIVEN:
                return any(map(self._varies_inside if text == "len" else self._varies, node.args))
            return not SAME_EVERYWHERE & set(text.split("."))
        if isinstance(node, ast.Subscript):
            return self._varies_inside(node.value) or self._varies(node.slice)
        return any(self._varies(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))

    def _varies_inside(self, node: ast.expr) -> bool:
        """Return whether the contents of a value may differ between ranks, such as the rows of an argument `x`, and so
        `len(x)`. An argument by itself is taken for a flag."""
        if isinstance(node, ast.Name):
            return node.id != "self" and node.id not in self._entries and not hasattr(builtins, node.id)
        return self._varies(node)

    def _is_guarded(self, node: ast.AST) -> bool:
        """Return whether a condition that may differ between ranks decides whether a node is run."""
        while (up := self._above.get(node)) is not None:
            tests: Sequence[ast.expr] = ()
            if isinstance(up, ast.If | ast.IfExp | ast.While) and node is not up.test:
                both = isinstance(up, ast.If) and all(map(self._uses, (up.body, up.orelse)))
                tests = () if both else [up.test]
            elif isinstance(up, ast.BoolOp) and node is not up.values[0]:
                tests = up.values[:1]
            elif isinstance(up, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
                tests = [test for each in up.generators for test in each.ifs]
            if any(map(self._varies, tests)):
                return True
            node = up
        return False

    def _uses(self, body: Sequence[ast.stmt]) -> bool:
        return any(node in self._used for statement in body for node in ast.walk(statement))

    def _ends(self, end: ast.stmt, call: ast.Call) -> bool:
        """Return whether a call is not reached after this return, break or continue."""
        loops, around = self._loops(end), self._loops(call)
        if isinstance(end, ast.Return):
            return end.lineno < call.lineno or any(loop in around for loop in loops)
        return loops[0] in around and (isinstance(end, ast.Break) or end.lineno < call.lineno)

    def _loops(self, node: ast.AST) -> list[ast.AST]:
        """Return the loops around a node, the innermost first."""
        found = list[ast.AST]()
        while (up := self._above.get(node)) is not None:
            found += [up] if isinstance(up, ast.For | ast.While) else []
            node = up
        return found

    def _parts_in(self, called: ast.expr) -> Iterator[tuple[str, str]]:
        part = list[str]()
        while isinstance(called, ast.Attribute):
            part.insert(0, called.attr)
            called = called.value
            if self._is_entry(called):
                yield ast.unparse(called.slice) if isinstance(called, ast.Subscript) else "", ".".join(part)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _first_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
