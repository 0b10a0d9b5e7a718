"""Find modules that a forward may skip on some ranks only.

Examples are experts without rows, and layers that are dropped at random.

A block that is gathered separately must be gathered by all ranks. The source of the class that calls the block shows
whether it is always called: either the call is under no condition, or the condition is the same on all ranks (it
depends on the module's settings, on loop counters, or on arguments that are flags).
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from meshwise.parallel.blocks import CONTAINERS
from meshwise.torch_compat.compiling import unwrapped

EXPERT = "expert"
SAME_AS_GIVEN = {"isinstance", "hasattr", "getattr", "callable", "int", "bool", "len", "min", "max"}
SAME_AS_GIVEN |= {"range", "enumerate", "zip", "reversed"}
SAME_EVERYWHERE = {"jit", "compiler", "is_grad_enabled", "is_autocast_enabled", "is_inference_mode_enabled"}
BINDS = (ast.For, ast.comprehension, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)


def may_be_skipped(root: nn.Module, name: str) -> str | None:
    """Return why the forward of `root` may call the module `name` on some ranks only, e.g. a source line as
    `file:line`. Return "" if all ranks call the module, or None if this is unknown."""
    why: str | None = ""
    for kind, attribute, child, entry in _on_the_way(root, name):
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and EXPERT in f"{attribute} {type(entry).__name__}".lower():
            return "they are experts"
        calls = _calls(kind, attribute)
        found = next((each.where for each in calls if each.where), "")
        if found and not is_of_a_library(kind):
            return found
        if found or not any(each.seen for each in calls):
            why = None
    return why


def _on_the_way(root: nn.Module, name: str) -> Iterator[tuple[Any, str, nn.Module, nn.Module]]:
    """Yield (caller's class, attribute, value of the attribute, called module) for each call on the way to a module."""
    owner, path = unwrapped(root), name.split(".")
    while path:
        kind, attribute = type(owner), path.pop(0)
        child = owner = getattr(owner, attribute)
        if kind is nn.Sequential:
            continue
        while path and isinstance(owner, CONTAINERS) and type(owner).__module__.startswith("torch.nn"):
            owner = getattr(owner, path.pop(0))
        yield kind, attribute, child, owner


def parameters_that_may_be_skipped(model: nn.Module, roots: Sequence[nn.Module]) -> set[str]:
    """Return the names of the parameters that some ranks may not use in a forward."""
    parts = [(root, *named) for root in roots for named in root.named_modules() if named[0]]
    skipped = {p for root, name, part in parts if may_be_skipped(root, name) for p in part.parameters(recurse=False)}
    return {name for name, p in model.named_parameters() if p in skipped}


def is_of_a_library(kind: Any) -> bool:
    """Return whether a class comes from an installed library rather than from the user's code."""
    places = tuple(sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib"))
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    return code is not None and code.co_filename.startswith(places)


def called_in_parts(root: nn.Module, name: str) -> bool:
    """Return whether code around the block `name` calls a submodule of the block directly."""
    called, block = list(_on_the_way(root, name))[-1:], root.get_submodule(name)
    texts = [text for kind, attribute, *_ in called for each in _calls(kind, attribute) for text in each.texts]
    whole = [text[: -len(part) - 1] for part, _ in block.named_modules() for text in texts if text.endswith(f".{part}")]
    return any(not re.search(r"\[\d+\]$", each) or each.endswith(f"[{name.split('.')[-1]}]") for each in whole)


@functools.cache
def _calls(kind: Any, attribute: str) -> list[_Calls]:
    """Return the calls of `self.attribute` in each method of a class."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    names = sorted({name for each in own for name in vars(each)} - {"__init__"})
    methods = [inspect.unwrap(each) for name in names if callable(each := getattr(kind, name, None))]
    return [_Calls(each, tree, attribute) for each in methods if inspect.isfunction(each) and (tree := _parsed(each))]


@functools.lru_cache(maxsize=32)
def _parsed(function: Any) -> ast.FunctionDef | None:
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):  # the code was typed at a prompt, or generated
        return None
    return found if isinstance(found, ast.FunctionDef) else None


class _Calls:
    """Finds the calls of `self.<attribute>`, or of its entries if it is a list, in a function."""

    def __init__(self, function: Any, tree: ast.FunctionDef, attribute: str) -> None:
        self._entries = {f"self.{attribute}"}  # later also names of the list's entries
        self._flags = {each.arg for each in ast.walk(tree.args) if isinstance(each, ast.arg)} - {"self"}
        self._varying = set[str]()  # names whose values differ between ranks
        for node in [*ast.walk(tree)] * 2:  # twice, because a loop's end may assign names that its start reads
            if isinstance(node, BINDS):
                self._note_names(node)
        code, left, self.seen, self.where, self.texts = function.__code__, False, False, "", set[str]()
        for statement in tree.body:
            every = list(self._with_guards(statement))
            calls = {node: guarded for node, guarded in every if isinstance(node, ast.Call) and self._entries_in(node)}
            exits = {type(node) for node, guarded in every if guarded} & {ast.Continue, ast.Break, ast.Return}
            lines = [call.lineno for call, guarded in calls.items() if guarded or exits or left]
            if lines and not self.where:
                self.where = f"{code.co_filename}:{code.co_firstlineno + min(lines) - 1}"
            self.texts |= {ast.unparse(call.func) for call in calls}
            self.seen, left = self.seen or bool(calls), left or ast.Return in exits

    def _note_names(self, node: Any) -> None:
        loop = isinstance(node, ast.For | ast.comprehension)
        value, targets = node.iter if loop else node.value, getattr(node, "targets", None) or [node.target]
        names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        over = loop and not ast.unparse(value).startswith("range(") and any(map(self._is_entry, ast.walk(value)))
        if over or self._is_entry(value):
            self._entries |= names
        if not over and value is not None and self._varies(value):
            self._varying |= names - self._flags

    def _is_entry(self, node: ast.AST | None) -> bool:
        """Return whether a node is the attribute, an entry of its list, or a part of either."""
        while isinstance(node, ast.Subscript | ast.Attribute) and ast.unparse(node) not in self._entries:
            node = node.value
        return node is not None and ast.unparse(node) in self._entries

    def _entries_in(self, call: ast.Call) -> list[ast.expr]:
        return [] if _is_same(call) else [each for each in [call.func, *call.args] if self._is_entry(each)]

    def _varies(self, node: ast.expr) -> bool:
        """Return whether a value may differ between ranks: a tensor in an argument may, a flag may not."""
        return any(map(self._differs, ast.walk(node)))

    def _differs(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(name):
                return name in self._varying
            case ast.Attribute(ast.Name(name)):
                return name in self._flags
            case ast.Subscript(ast.Name()) | ast.Call(ast.Name("len"), [ast.Name()]):
                return True
        return isinstance(node, ast.Call) and not _is_same(node)

    def _with_guards(self, node: ast.AST, guarded: bool = False) -> Iterator[tuple[ast.AST, bool]]:
        """Yield each node, and whether it is under a condition that may differ between ranks."""
        guarded = guarded or any(map(self._varies, self._conditions(node)))
        yield node, guarded
        for child in ast.iter_child_nodes(node):
            yield from self._with_guards(child, guarded)

    def _conditions(self, node: ast.AST) -> Sequence[ast.expr]:
        match node:
            case ast.If(test, body, orelse):
                return () if all(any(map(self._uses, each)) for each in (body, orelse)) else [test]
            case ast.IfExp(test) | ast.While(test):
                return [test]
            case ast.BoolOp(_, [first, *_]):
                return [first]
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return [test for each in node.generators for test in each.ifs]
        return self._entries_in(node) if isinstance(node, ast.Call) else ()

    def _uses(self, statement: ast.stmt) -> bool:
        return any(isinstance(node, ast.Call) and self._entries_in(node) for node in ast.walk(statement))


def _is_same(call: ast.Call) -> bool:
    """Return whether a call with the same arguments has the same result on all ranks."""
    text = ast.unparse(call.func)
    return text in SAME_AS_GIVEN or not SAME_EVERYWHERE.isdisjoint(text.split("."))
