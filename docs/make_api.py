"""Writes docs/api.md from the docstrings of the public names, and the exit codes and options in docs/failures.md from
what `meshwise run --help` says: python docs/make_api.py (or `make api`).

tests/docs/test_api.py fails while the pages are not what this makes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import meshwise as mw
from meshwise.cli import EXIT_CODES
from meshwise.spec.options import option_name, options_of
from meshwise.training.job.options import RunOptions

PAGE = Path(__file__).with_name("api.md")
HEAD = """# Public names

Made from the docstrings by `python docs/make_api.py`. Import them as `import meshwise as mw`. How to use them:
[README](../README.md); plans: [plans.md](plans.md).
"""
PARTS = {
    "In your own loop": (
        "meshwise.training.script",
        "meshwise.training.process",
        "meshwise.training.tracking",
        "meshwise.training.job",
        "meshwise.parallel",
    ),
    "Jobs, runs, checks, machines": (
        "meshwise.launcher",
        "meshwise.checker.check",
        "meshwise.planner",
        "meshwise.hardware.bench",
        "meshwise.hardware.machines",
        "meshwise.spec.plan",
        "meshwise.checker.races",
    ),
    "What they return": (
        "meshwise.reports",
        "meshwise.checker",
        "meshwise.hardware",
        "meshwise.training.prediction",
        "meshwise.spec.machine",
    ),
    "Tensors between devices": ("meshwise.transfer",),
    "NumPy on many devices": ("meshwise.arrays",),
    "Errors": ("meshwise.spec.errors",),
}
MOST_WIDE = 110
FAILURES = Path(__file__).with_name("failures.md")
OF_FAILURES = (
    *("save_every", "restarts", "hang_limit", "on_failure"),
    *("on_nan", "time_limit", "resume", "folder", "fault"),
)
"""The options of `meshwise run` that say what happens when something fails."""


def signature(name: str, thing: Any) -> str:
    """`mw.sum(value: Number) -> Number`, a parameter a line where it is long."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return f"mw.{name}"
    shown = [_plain(str(parameter)) for parameter in found.parameters.values()]
    kinds = [parameter.kind for parameter in found.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    is_function = found.return_annotation is not found.empty and not inspect.isclass(thing)
    returned = f" -> {_plain(inspect.formatannotation(found.return_annotation))}" if is_function else ""
    line = f"mw.{name}({', '.join(shown)}){returned}"
    if len(line) <= MOST_WIDE:
        return line
    return "\n".join([f"mw.{name}(", *(f"    {parameter}," for parameter in shown), f"){returned}"])


def _plain(text: str) -> str:
    """Without the modules of types, addresses, and quotes around annotations."""
    text = re.sub(r"<(?:[^<>]|<[^<>]*>)* at 0x[0-9a-f]+>", "...", text).replace("Ellipsis", "...")
    text = re.sub(r"""["']?Annotated\[(.*?), (?:(?:Option|Of\w+)\(.*\)|[A-Z]+)\]["']?""", r"\1", text)
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])", "", text)
    return re.sub(r"(^|: |-> )'([^']+)'(?=$| =)", r"\1\2", text)


def prose(docstring: str) -> str:
    """A docstring as Markdown: lines such as `value: what it is` as a list."""
    lines: list[str] = []
    for line in docstring.splitlines():
        named = re.match(r"((?:\w+, )*\w+): (.*)", line)
        if named and named[1][0].islower():
            lines += [""] * bool(lines and lines[-1] and not lines[-1].startswith(("- ", "  ")))
            lines.append(f"- `{named[1]}`: {named[2]}")
        elif line.startswith("    ") or not lines or not lines[-1].startswith(("- ", "  ")) or not line:
            lines.append(line)
        else:
            lines.append(f"  {line}" if line and line[0].islower() else line)
    return "\n".join(lines).strip()


def members(kind: type) -> Iterator[str]:
    """The public methods and properties of a class, with the first line of what they say."""
    for name, value in vars(kind).items():
        what = value.fget if isinstance(value, property) else value
        if name.startswith("_") or not (inspect.isfunction(what) or isinstance(value, classmethod)):
            continue
        first = (inspect.getdoc(what) or "").partition("\n")[0]
        if first:
            yield f"- `.{name}{'' if isinstance(value, property) else '()'}`: {first}"


def entry(name: str) -> str:
    """A public name: its signature, what it does, its members."""
    thing = getattr(mw, name)
    parts = [f"### mw.{name}", f"```python\n{signature(name, thing)}\n```", prose(inspect.getdoc(thing) or "")]
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        parts.append("\n".join(members(thing)))
    return "\n\n".join(part for part in parts if part)


def page() -> str:
    """The whole page. Raises KeyError for a public name that belongs to no part."""
    left = set(mw.__all__)
    parts = [HEAD.strip()]
    for title, modules in PARTS.items():
        names = sorted(name for name in left if getattr(mw, name).__module__.startswith(modules))
        left -= set(names)
        parts += [f"## {title}", *map(entry, names)]
    if left:
        raise KeyError(f"{sorted(left)}: give them a part in PARTS of docs/make_api.py")
    return "\n\n".join(parts) + "\n"


def failures(text: str) -> str:
    """The page of failures, with its tables as the command says it."""
    helps = {name: (option_name(name, option), option.help) for name, _, option in options_of(RunOptions)}
    codes = [("exit code", "meaning"), ("---", "---"), *EXIT_CODES.items()]
    options = [("option", "what it does"), ("---", "---"), *((f"`{helps[n][0]}`", helps[n][1]) for n in OF_FAILURES)]
    for mark, rows in (("EXIT_CODES", codes), ("OPTIONS", options)):
        table = "\n".join(f"| {left} | {right} |" for left, right in rows).replace("| --- | --- |", "|---|---|")
        before, _, behind = text.partition(f"<!-- {mark} -->\n")
        text = f"{before}<!-- {mark} -->\n{table}\n<!-- end -->{behind.partition('<!-- end -->')[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    FAILURES.write_text(failures(FAILURES.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written: {PAGE}, {FAILURES}")
