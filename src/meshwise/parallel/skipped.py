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
from collections.abc import Sequence
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
    modules whose entries are called.

    where: the number of a line of the function. This is the line of the first call that some ranks may skip. None if
        there is no such call.
    """

    def __init__(self, function: ast.FunctionDef, attribute: str) -> None:
        self._attribute, self.seen = attribute, False
        self.where: int | None = None
        self.parts = set[tuple[str, str]]()  # of entries, by index and name, that are called by themselves
        given = function.args
        self._flags = {each.arg for each in [*given.posonlyargs, *given.args, *given.kwonlyargs]} - {"self"}
        self._entries = set[str]()  # names of entries
        self._varying = set[str]()  # names of what differs from rank to rank
        for _ in range(2):  # what the end of a loop assigns is there in its beginning
            for node in ast.walk(function):
                self._note_names(node)
        self._look(function.body, False)

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
        called = over.func if isinstance(over, ast.Call) else None
        if called is not None and isinstance(called, ast.Name) and called.id in ("enumerate", "zip", "reversed"):
            parts = [self._holds(argument) for argument in over.args]  # type: ignore[attr-defined]
            if any(parts):
                first = 1 if called.id == "enumerate" else 0
                self._entries |= {name for name, of in zip(names[first:], parts, strict=False) if of}
                return
        if self._holds(over):
            self._entries |= set(names[-1:])  # of items(), the key is the same on all ranks
        elif self._varies(over):
            self._varying |= set(names)

    def _holds(self, node: ast.expr) -> bool:
        """Return whether the node is `self.attribute`, a part of it, or a view of it such as
        `self.attribute.items()`."""
        while isinstance(node, ast.Call | ast.Subscript | ast.Attribute):
            if isinstance(node, ast.Attribute) and _is_self(node.value) and node.attr == self._attribute:
                return True
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                node = node.args[0] if node.args else node.func
            else:
                node = node.func if isinstance(node, ast.Call) else node.value
        return False

    def _is_entry(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._entries
        return isinstance(node, ast.Subscript | ast.Attribute) and self._holds(node)

    def _varies(self, node: ast.expr) -> bool:
        """Return whether the value of an expression may differ between ranks."""
        if isinstance(node, ast.Name):
            known = node.id in self._flags or hasattr(builtins, node.id) or node.id == "self"
            return node.id in self._varying and not known
        if isinstance(node, ast.Attribute):
            return _first_name(node) in self._varying | self._flags and not self._is_entry(node.value)
        if isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            if text == "len":
                return any(self._varies_inside(argument) for argument in node.args)
            if text in SAME_AS_GIVEN:
                return any(self._varies(argument) for argument in node.args)
            return not SAME_EVERYWHERE & set(text.split("."))
        if isinstance(node, ast.Subscript):
            return self._varies_inside(node.value) or self._varies(node.slice)
        return any(self._varies(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))

    def _varies_inside(self, node: ast.expr) -> bool:
        """Return whether the contents of a value may differ between ranks, such as the rows of an argument `x`. If so,
        `len(x)` may differ, too. `_varies(x)` is False in this example, because an argument by itself is taken for a
        flag."""
        if isinstance(node, ast.Name):
            return node.id != "self" and node.id not in self._entries and not hasattr(builtins, node.id)
        return self._varies(node)

    def _look(self, body: list[ast.stmt], guarded: bool) -> None:
        """Examine the statements of a block in order. guarded: whether some ranks may skip the block."""
        for statement in body:
            if isinstance(statement, ast.If):
                both = self._uses(statement.body) and self._uses(statement.orelse)
                varies = self._varies(statement.test) and not both
                self._look_at(statement.test, guarded)
                self._look(statement.body, guarded or varies)
                self._look(statement.orelse, guarded or varies)
                guarded = guarded or (varies and _leaves(statement))
                continue
            inner = guarded or (isinstance(statement, ast.While) and self._varies(statement.test))
            inner = inner or (isinstance(statement, ast.For | ast.While) and self._may_end_early(statement))
            for _, value in ast.iter_fields(statement):
                if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                    self._look(value, inner)
                else:
                    for each in value if isinstance(value, list) else [value]:
                        self._look_at(each, guarded)

    def _may_end_early(self, loop: ast.For | ast.While) -> bool:
        found = [n for statement in loop.body for n in ast.walk(statement) if isinstance(n, ast.If)]
        return any(_leaves(n, ast.Break | ast.Return) and self._varies(n.test) for n in found)

    def _uses(self, body: list[ast.stmt]) -> bool:
        return any(self._is_used_by(node) for statement in body for node in ast.walk(statement))

    def _is_used_by(self, node: ast.AST) -> bool:
        """Return whether an expression calls a module of the attribute, e.g. `self.layers[0](x)` for the attribute
        `layers`. A call that has such a module as an argument counts, too, e.g. `checkpoint(self.layers[0], x)`."""
        return isinstance(node, ast.Call) and any(self._is_entry(each) for each in [node.func, *node.args])

    def _look_at(self, node: object, guarded: bool) -> None:
        """Search an expression for calls of the modules of the attribute (see `_Calls`), and record them.

        guarded: whether the expression is evaluated under a condition that may differ between ranks.
        """
        if not isinstance(node, ast.AST):
            return
        if self._is_used_by(node):
            self._found(node, guarded)
        if isinstance(node, ast.Call):
            self._note_parts(node.func)
        inner = guarded
        if isinstance(node, ast.IfExp):
            inner = guarded or self._varies(node.test)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            inner = guarded or any(self._varies(test) for each in node.generators for test in each.ifs)
        elif isinstance(node, ast.BoolOp):
            inner = guarded or self._varies(node.values[0])
        for each in ast.iter_child_nodes(node):
            self._look_at(each, inner)

    def _note_parts(self, called: ast.expr) -> None:
        part = list[str]()
        while isinstance(called, ast.Attribute):
            part.insert(0, called.attr)
            called = called.value
            if self._is_entry(called):
                self.parts.add((ast.unparse(called.slice) if isinstance(called, ast.Subscript) else "", ".".join(part)))

    def _found(self, call: ast.AST, guarded: bool) -> None:
        self.seen = True
        entries = [each for each in [call.func, *call.args] if self._is_entry(each)]  # type: ignore[attr-defined]
        chosen = any(isinstance(each, ast.Subscript) and self._varies(each.slice) for each in entries)
        if (guarded or chosen) and self.where is None:
            self.where = call.lineno  # type: ignore[attr-defined]


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _first_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _leaves(statement: ast.If, by: Any = ast.Continue | ast.Break | ast.Return) -> bool:
    """Return whether a return, break or continue in the body of an `if` can skip the code after the `if`."""
    return any(isinstance(n, by) for each in statement.body for n in ast.walk(each))
