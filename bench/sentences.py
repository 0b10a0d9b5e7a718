"""Draw sentences of docstrings and messages at random, for somebody to read who did not write them.

    python bench/sentences.py [--seed 0] [--count 20]
    python bench/sentences.py --source FOLDER       # of another package: a control, read in one mixed sheet

Half of them are docstrings of functions, classes and attributes, the other half messages of errors and notes: whole
texts of at least five words, each with its file, a docstring with the line of code that it is of. What stands in braces
is a value when the message is printed. Claim: 18 of 20 are plain at first reading; what readers said of a draw stands
in bench/results/sentences.json.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

LEAST = 5  # words
SOURCE = Path(__file__).parents[1] / "src" / "meshwise"


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings of functions, classes and attributes, each behind what it is of, as a reader sees it."""
    for node in ast.walk(tree):
        body = node.body if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else []
        owner: ast.AST = node
        for one in body[1:] if isinstance(node, ast.Module) else body:
            text = one.value.value if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) else None
            if isinstance(text, str) and len(text.split()) >= LEAST:
                head = next(line for line in ast.unparse(owner).splitlines() if not line.startswith("@"))
                yield f"{head.rstrip(':')}\n     {' '.join(text.split())}"
            owner = one


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield what raised errors say, with {what} for each value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            parts = [node.exc.args[0]]
            if isinstance(parts[0], ast.JoinedStr):
                parts = list(parts[0].values)
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else f"{{{value_of(p)}}}" for p in parts)
            if len(text.split()) >= LEAST:
                yield text


def value_of(part: ast.expr) -> str:
    """Return the name that the code gives to a value of a message; … if it is computed there."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    return value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else "…"


def drawn(source: Path, seed: int, count: int) -> list[tuple[str, str]]:
    """Draw half from each kind: (file, text)."""
    found: tuple[list[tuple[str, str]], ...] = ([], [])
    for path in sorted(source.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for texts, kind in zip((docstrings(tree), messages(tree)), found, strict=True):
            kind += [(str(path.relative_to(source)), text) for text in texts]
    draw = random.Random(seed)
    return [one for kind in found for one in draw.sample(kind, count // 2)]


def main() -> None:
    """Print the draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--source", type=Path, default=SOURCE)
    given = parser.parse_args()
    for number, (path, text) in enumerate(drawn(given.source, given.seed, given.count), 1):
        print(f"{number:3}. {path}\n     {text}\n")


if __name__ == "__main__":
    main()
