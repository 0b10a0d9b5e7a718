"""Decide whether an option after a script's name belongs to the script.

The script's source decides. If it does not declare the option, the option may be meant for meshwise.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Sequence
from pathlib import Path

from meshwise.spec.errors import UsageError
from meshwise.spec.words import some

MOST_FILES = 200
_IMPORTS = re.compile(r"^[ \t]*(?:from|import)\s+([.\w].*)", re.MULTILINE)
_GIVEN_AWAY = re.compile(r"(?<!def )\b(\w+)\(\s*(?:\w*parser\b|sys\.argv\b)")
"""Finds functions that are called with a parser or `sys.argv`. Such a function may declare options of the script."""


def check_options_behind(script: str, own: Sequence[str], known: Container[str]) -> None:
    """Check whether options for meshwise were written after a script's name by mistake. Options there go to the script.

    own: the words after the script's name.
    known: the options of meshwise.

    Raises UsageError if `own` has an option of meshwise that the script does not declare. If the script passes its
    parser to a library, the library may declare the option. In this case, a note is printed instead.
    """
    given = [word for word in own if word.startswith("--") and word.partition("=")[0] in known]
    texts = _texts_of(Path(script)) if given else {}
    text = "\n".join(texts.values())
    given = [word for word in given if not _declares(text, word.partition("=")[0])]
    if not texts or not given:  # a missing script is reported when it is run
        return
    advice = (
        f"{some(given)}: options after {script} go to the script. If meshwise should read them, write them before "
        f"{script}. If the script should, write {script} -- {given[0]}."
    )
    if all(f"def {name}(" in text for name in _GIVEN_AWAY.findall(text)):
        raise UsageError(advice)
    print(f"Note: {advice}", file=sys.stderr)


def _texts_of(script: Path) -> dict[Path, str]:
    """Return the text of a script, and of the files in or below its folder that it imports, directly or indirectly."""
    waiting, found = [script], dict[Path, str]()
    while waiting and len(found) < MOST_FILES:
        path = waiting.pop()
        if path in found:
            continue
        try:
            text = found[path] = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for line in _IMPORTS.findall(text):
            first, *others = re.findall(r"[.\w]+", line)
            for name in (first, *others, *(f"{first}.{other}" for other in others)):
                for folder in (script.parent, path.parent):
                    place = folder.joinpath(*filter(None, name.split(".")))
                    waiting += [Path(f"{place}.py"), place / "__init__.py"]
    return found


def _declares(text: str, option: str) -> bool:
    """Return whether a source text declares an option: as a string, or as a field or parameter that becomes an option.

    A bare word does not count, because the script's docstring may show how meshwise runs the script.
    """
    field = option.removeprefix("--").replace("-", "_")
    forms = (
        rf"[\"']{option}(?![\w-])",
        rf"[\s(,]{field}\s*:\s*\w[^\n]*=",
        rf"def \w+\([^)]*\b{field}\s*[=,)]",
        rf"DEFINE_\w+\(\s*[\"']{field}[\"']",
    )
    return any(re.search(form, text) for form in forms)
