"""Decide whether an option after a script's name is the script's.

This is decided by the script's source. If the source does not declare the option, it may be meant for meshwise.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from meshwise.spec.errors import UsageError
from meshwise.spec.words import some

MOST_FILES = 200
_IMPORTS = re.compile(r"^[ \t]*(?:from\s+([.\w]+)\s+import\s+([\w, ]+)|import\s+([\w., ]+))", re.MULTILINE)
_GIVEN_AWAY = re.compile(r"(?<!def )\b(\w+)\(\s*(?:\w*parser\b|sys\.argv\b)")
"""Finds functions that are called with a parser or `sys.argv`. Such a function may declare options of the script."""


def check_options_behind(script: str, own: Sequence[str], known: Container[str]) -> None:
    """Check whether options for meshwise were written after a script's name by mistake. Options there go to the script.

    own: the words after the script's name.
    known: the options of meshwise.

    Raises UsageError if `own` has an option of meshwise that the script does not declare. If the script passes its
    parser to a library, the library may declare the option. A note is printed then instead of the error.
    """
    given = [word for word in own if word.startswith("--") and word.partition("=")[0] in known]
    if not given or not is_readable(Path(script)):  # one that is not there is told where it is run
        return
    texts = list(_texts_of(Path(script)))
    given = [word for word in given if not any(_declares(text, word.partition("=")[0]) for text in texts)]
    if not given:
        return
    whole = "\n".join(texts)
    if any(f"def {name}(" not in whole for name in _GIVEN_AWAY.findall(whole)):
        print(
            f"Note: {script} gets {some(given)}, because options after its name go to the script. Options of meshwise "
            f"stand before the script's name. To hide this note, write `{script} -- {given[0]} ...`.",
            file=sys.stderr,
        )
        return
    raise UsageError(
        f"{some(given)}: options after {script} go to the script, but the script does not declare this option. If "
        f"meshwise should read it, write it before {script}. If the script should, write {script} -- {given[0]}."
    )


def is_readable(path: Path) -> bool:
    """Return whether a path is a file. Return False if the path may not be accessed."""
    with contextlib.suppress(OSError):
        return path.is_file()
    return False


def _texts_of(script: Path) -> Iterator[str]:
    """Yield the text of a script, and of the files in or below its folder that it imports, directly or indirectly."""
    waiting, seen = [script], set[Path]()
    while waiting and len(seen) < MOST_FILES:
        path = waiting.pop()
        if path in seen or not is_readable(path):
            continue
        seen.add(path)
        text = path.read_text(encoding="utf-8", errors="replace")
        yield text
        for name in _modules_in(text):
            for folder in {script.parent, path.parent}:
                place = folder.joinpath(*filter(None, name.split(".")))
                waiting += [Path(f"{place}.py"), place / "__init__.py"]


def _modules_in(text: str) -> Iterator[str]:
    """Yield the names of modules that a source text may import. For `from a.b import c`, these are `a.b` and
    `a.b.c`."""
    for module, names, modules in _IMPORTS.findall(text):
        yield from re.findall(r"\w[\w.]*", modules) or [module, *(f"{module}.{n}" for n in re.findall(r"\w+", names))]


def _declares(text: str, option: str) -> bool:
    """Return whether a source text declares an option: as a string, or as a field or parameter that becomes an option.

    A bare word does not count, because the script's docstring may show how meshwise runs the script.
    """
    field = option.removeprefix("--").replace("-", "_")
    return (
        re.search(
            rf"[\"']{option}(?![\w-])|[\s(,]{field}\s*:\s*\w[^\n]*=|def \w+\([^)]*\b{field}\s*[=,)]"
            rf"|DEFINE_\w+\(\s*[\"']{field}[\"']",
            text,
        )
        is not None
    )
