"""Count what the code of meshwise asks about the kind of a device, and what the answers were, in every process.

A question is an expression: a comparison with a kind (`device.type == "cpu"`), `has_streams(…)`,
`torch.….is_available()` and the like. As `sitecustomize` this file makes each process write down the first answer of
either kind to each question; bench/device_branches.py tells which were answered one way only.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

KINDS = {"cpu", "cuda", "xpu", "mps", "gpu", "nccl", "gloo"}
ASKING = {"has_streams", "computes_bf16", "lost_by_fork"}
OF_TORCH = {"is_available", "is_initialized", "is_bf16_supported", "is_built"}
ANSWERS = "MESHWISE_DEVICE_QUESTIONS"
RECORD = "__meshwise_asked__"


def is_question(node: ast.AST) -> bool:
    """Whether the expression asks what kind a device is, or whether there is one."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        each = [e for side in sides for e in (side.elts if isinstance(side, ast.Tuple) else [side])]
        return any(isinstance(e, ast.Constant) and e.value in KINDS for e in each if not _unhashable(e))
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) != "Tensor"
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id in ASKING
    if not isinstance(node.func, ast.Attribute):
        return False
    first = node.args[0] if node.args else None
    begins = node.func.attr == "startswith" and isinstance(first, ast.Constant) and str(first.value) in KINDS
    return begins or node.func.attr in ASKING or (node.func.attr in OF_TORCH and _of_a_device(node.func.value))


def _unhashable(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, str)


def _of_a_device(node: ast.expr) -> bool:
    return ast.unparse(node).startswith(("torch.cuda", "torch.accelerator", "torch.get_device_module", "known"))


def questions(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Those of one file, each with a name that stays when lines are moved: its text, and its number among such."""
    times: Counter[str] = Counter()
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.expr) and is_question(node)]:
        text = ast.unparse(node)
        times[text] += 1
        yield text if times[text] == 1 else f"{text} ({times[text]})", node


class _Recording(ast.NodeTransformer):
    def __init__(self, names: dict[ast.expr, str]) -> None:
        self._names = names

    def visit(self, node: ast.AST) -> ast.AST:
        name = self._names.get(node) if isinstance(node, ast.expr) else None
        self.generic_visit(node)
        if name is None:
            return node
        place = [ast.Constant(name), ast.Name("__file__", ast.Load())]
        return ast.copy_location(ast.Call(ast.Name(RECORD, ast.Load()), [*place, node], []), node)


def recording(source: str, path: str) -> CodeType:
    """The code of a file that tells its answers."""
    tree = ast.parse(source)
    names = {node: name for name, node in questions(tree)}
    return compile(ast.fix_missing_locations(_Recording(names).visit(tree)), path, "exec", dont_inherit=True)


def follow(answers: str) -> None:
    """From now on in this process, and in its forks: of modules that are imported after this."""
    usual, seen = importlib.machinery.SourceFileLoader.get_code, set[tuple[str, str, bool]]()

    def asked(name: str, path: str, answer: object) -> object:
        key = (name, path, bool(answer))
        if key not in seen:
            seen.add(key)
            words = f"{path.rpartition('/meshwise/')[2]}: {name}: {key[2]}\n"
            with Path(answers).open("a") as out:
                out.write(words)
        return answer

    def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if name.split(".")[0] != "meshwise":
            return usual(loader, name)
        path = loader.get_filename(name)
        return recording(Path(path).read_text(), path)

    setattr(builtins, RECORD, asked)
    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]


if os.environ.get(ANSWERS) and __name__ == "sitecustomize":
    follow(os.environ[ANSWERS])
