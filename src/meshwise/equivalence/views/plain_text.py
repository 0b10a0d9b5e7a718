"""Show what a check of a plain script found, the verdict last.

Tested in tests/equivalence/test_plain_scripts.py.
"""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from meshwise.equivalence.plain.findings import Finding, PlainProof
from meshwise.spec.units import plural
from meshwise.terminal.screen import Drawn, Screen, spaced


def plain_text(proof: PlainProof, width: int | None = None) -> RenderableType:
    """Show the proof, at most `width` characters wide (None: as wide as the console)."""
    return Drawn(lambda screen: _lines(proof, screen), width)


def _lines(proof: PlainProof, screen: Screen) -> list[Text]:
    wrong = [finding for finding in proof.findings if finding.wrong]
    blocks = [screen.wrap(*_finding(each, "by design", "yellow")) for each in proof.findings if not each.wrong]
    blocks += [screen.wrap(*(Text(f"not judged: {text}", "yellow") for text in proof.not_judged))]
    blocks += [screen.wrap(*_finding(each, "wrong", "bold red")) for each in wrong]
    steps = f"{plural(proof.steps, 'step')} of {plural(proof.epochs, 'epoch')} on {proof.devices}"
    run = f"{steps}, beside one process on the same samples, in float64"
    if wrong:
        last = Text(f"different: {plural(len(wrong), 'finding')}, {run}", "bold red")
    elif proof.not_judged:
        last = Text(f"doubtful: nothing wrong is found, and not all is judged: {run}", "bold yellow")
    else:
        last = Text(f"equal: {run}; no gradient differs by more than {proof.largest:.1g}", "bold green")
    return spaced([*blocks, screen.wrap(last)], None)


def _finding(finding: Finding, word: str, style: str) -> list[Text]:
    places = ", ".join(finding.places)
    lines = [
        Text(f"{word}: {finding.kind}{f' ({places})' if places else ''}", style),
        Text(f"because   {finding.evidence}"),
    ]
    return [*lines, *([Text(f"instead   {finding.instead}")] if finding.instead else [])]
