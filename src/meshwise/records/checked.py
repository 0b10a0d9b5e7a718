"""Remember whether a script's code was checked, and with which verdict.

Constants, comments and docstrings do not count: a check of `lr=0.1` also covers `lr=0.2`.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from meshwise.records.files import read_json, write_text

CHECKS = "checks.json"
"""A file beside the runs: the verdict of each code that was checked, or SAID."""
RUNS = Path("runs")
SAID = "said"
EMPTY = re.compile(r"Expr\(value=Constant\(value=0\)\)|, ")


def code_key(script: Path) -> str:
    """Return a hash of the syntax trees of a script and of the files beside it that it imports, without constants. The
    key is empty for a script without `view="rank"`, whose ranks all see whole batches."""
    trees, waiting, by_rank = dict[Path, str](), [script.resolve()], False
    while waiting:
        file = waiting.pop()
        if file in trees or not file.is_file():
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # the run says so
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "view":
                by_rank |= isinstance(node.value, ast.Constant) and node.value.value == "rank"
            elif isinstance(node, ast.Import | ast.ImportFrom):
                level, of = getattr(node, "level", 0), getattr(node, "module", "")
                folder = file.parents[level - 1] if level else script.resolve().parent
                for name in (of, *(f"{of or ''}.{each.name}" for each in node.names)):
                    path = folder / (name or "").strip(".").replace(".", "/")
                    waiting += [path.with_name(f"{path.name}.py"), path / "__init__.py"]
            elif isinstance(node, ast.Constant):
                node.value, node.kind = 0, None
        trees[file] = EMPTY.sub("", ast.dump(tree))
    return hashlib.sha256("".join(trees.values()).encode()).hexdigest()[:16] if by_rank else ""


def remember(folder: Path, key: str, verdict: str) -> None:
    """Write the verdict of a check beside the runs in `folder`. A folder that cannot be written is left as it is."""
    if key:
        with contextlib.suppress(OSError):
            write_text(folder / CHECKS, json.dumps({**read_json(folder / CHECKS), key: verdict}, indent=1) + "\n")


def unchecked(folder: Path, script: Path, arguments: Sequence[str]) -> str:
    """Return a note if a script's code was not checked, once, or if its last check found a difference.

    folder: where the run's folder lies.
    """
    key = code_key(script)
    verdict = {**read_json(folder / CHECKS), **read_json(RUNS / CHECKS)}.get(key, "")
    if not key or verdict not in ("", "different"):
        return ""
    if not verdict:
        remember(folder, key, SAID)
    what = "its last check found a difference" if verdict else "not checked on 2 devices since its code changed"
    return f"note: {what}: meshwise check {shlex.join([str(script), *arguments])}\n"
