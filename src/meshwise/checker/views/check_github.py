"""Turn findings into annotations, which GitHub shows beside the lines.

See https://docs.github.com/actions/reference/workflow-commands-for-github-actions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from meshwise.checker.finding import Finding

PLACE = re.compile(r"([\w./-]+\.py):(\d+)")


def github_lines(findings: Iterable[Finding], not_judged: Iterable[str] = ()) -> Iterator[str]:
    """Yield a workflow command of GitHub Actions for each wrong finding, and for what was not judged."""
    for each in findings:
        if each.wrong:
            yield _command("error", each.kind, f"{each.evidence} {each.instead}", f"{each.places} {each.evidence}")
    for text in not_judged:
        yield _command("warning", "not judged", text, text)


def _command(level: str, title: str, text: str, places: str) -> str:
    """Format a workflow command. It names the first place, if there is one."""
    found = PLACE.search(places)
    where = f"file={found[1]},line={found[2]}," if found else ""
    text = text.strip().replace("%", "%25").replace("\n", "%0A")
    return f"::{level} {where}title=meshwise check, {title}::{text}"
