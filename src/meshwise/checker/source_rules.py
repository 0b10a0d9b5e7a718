"""Find mistakes in the source of a script, without running it.

source_rules.toml has the rules. A rule is silent where the source leaves a doubt, so a script without mistakes is not
proven to be right.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwise.checker.finding import Finding
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import place
from meshwise.training.slips.in_a_run import says_divided
from meshwise.training.slips.user_source import sources_in


def mistakes_in(script: Path) -> Iterator[Finding]:
    """Yield the mistakes in a script. Raises UsageError if it cannot be read."""
    try:
        lines = sorted(_lines(ast.parse(script.read_bytes())), key=lambda line: line[0])
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{script}: --static reads a Python file ({error}). Name one, such as train.py.") from None
    text = "".join(line for _, line in lines)
    table = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    for name, expression in tomllib.loads(table)["expressions"].items():
        table = table.replace(f"{{{name}}}", expression)
    for kind, rule in tomllib.loads(table)["rule"].items():
        for number in dict.fromkeys(_hits(rule, text)):
            at = place(str(script), int(lines[number][0]))
            yield Finding(kind, True, (at,), rule["evidence"], rule["instead"])
    for said in says_divided(sources_in(str(script))) if re.search(r"\b(?:mw|meshwise)\.distribute\(", text) else ():
        at, _, why = said.partition(": ")
        yield Finding("divided twice", True, (at,), why)


def _hits(rule: dict[str, Any], text: str) -> Iterator[int]:
    """Yield the numbers of the lines that have a mistake."""
    for block in re.finditer(rule["in"], text, re.M):
        for hit in re.finditer(rule["hit"], block["block"], re.M):
            names = {name: value or "(?!)" for name, value in hit.groupdict().items()}

            def has(where: str, pattern: str, names: dict[str, str] = names) -> bool:
                return re.search(pattern.format(**names), where, re.M) is not None

            lacks = rule.get("lacks", "(?!)")
            if all(has(text, each) for each in rule.get("needs", ())) and not has(block["block"], lacks):
                yield text.count("\n", 0, block.start("block") + hit.end())


def _lines(tree: ast.Module) -> Iterator[tuple[float, str]]:
    """Yield the line number and the first line, as Python writes it, of each statement that is no docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(getattr(node, "value", None), ast.Constant):
            indent = " " * node.col_offset
            yield node.lineno, f"{indent}{ast.unparse(node).partition(chr(10))[0]}\n"
            for first in getattr(node, "orelse", ())[:1]:
                yield first.lineno - 0.5, f"{indent}else:\n"
