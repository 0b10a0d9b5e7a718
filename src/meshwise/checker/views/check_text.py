"""Show a proof in a terminal: comparisons first, the verdict last.

The verdict says where the sides differ and why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from meshwise.checker.compare import Compared
from meshwise.checker.difference import LIMIT, Difference
from meshwise.checker.finding import Finding
from meshwise.checker.proof import PlainProof, Proof
from meshwise.spec.addresses import more
from meshwise.spec.units import count_text, plural
from meshwise.terminal.screen import Drawn, Screen, spaced
from meshwise.terminal.table import table_lines

OF_BAND = ("loss", "parameters", "evaluation")


def check_text(proof: Proof | PlainProof, width: int | None = None) -> RenderableType:
    """Return the result of a check as text for the terminal, in a form that rich can print."""
    if isinstance(proof, PlainProof):
        return Drawn(lambda screen: _plain_lines(proof, screen), width)
    return Drawn(lambda screen: _lines(proof, screen), width)


def _lines(proof: Proof, screen: Screen) -> list[Text]:
    rows = [_row(compared) for compared in proof.comparison.kinds]
    compared = table_lines(["compared", "how many", "differ", "largest", "where"], rows, screen.table_width)
    rounding = []
    if proof.rounding:
        sizes = [[r.kind, _size(r.one_device), _size(r.plan)] for r in proof.rounding]
        rounding = table_lines([f"in {proof.plan.precision}", "one device", "the plan"], sizes, screen.table_width)
        text = "rounding: the largest difference of each side from one device in float64"
        rounding += screen.wrap(Text(text, "dim"))
    notes = [*_not_compared(proof.comparison.left_out), *proof.notes]
    shown = screen.wrap(*(Text(text, "yellow") for text in notes))
    warned = screen.wrap(*(Text(f"warning: {text}", "yellow") for text in proof.warnings))
    return spaced([compared, rounding, shown, warned, screen.wrap(*verdict(proof))], None)


def _not_compared(left_out: Sequence[str]) -> list[str]:
    """Return at most one line on what was not compared."""
    if len(left_out) < 2:
        return [f"not compared: {text}" for text in left_out]
    return [f"not compared: {len(left_out)} items, which --json names; the first: {left_out[0]}"]


def verdict(proof: Proof) -> list[Text]:
    """Return the lines that say whether the plan computes what one device computes."""
    batches = ", ".join(map(str, proof.batches))
    run = f"{plural(len(proof.batches), 'step')} of {batches} samples"
    first = proof.comparison.first
    if first is None:
        word, style = ("not judged in all", "bold yellow") if proof.not_judged else ("equal", "bold green")
        text = f"{word}: {proof.plan} computes what one device computes, in {run}"
        return [
            Text(text, style),
            *(Text(f"but       {text}", "yellow") for text in proof.not_judged),
            Text(f"no difference above {_limit()} in float64, relative to the size of a tensor", "dim"),
            *_band(proof),
        ]
    where = f"step {first.step}" if first.step else "before the first step"
    name = f" in {first.name}" if first.name else ""
    size = "" if math.isinf(first.relative) else f", by {_size(first.relative)}"
    lines = [Text(f"different: {first.kind}{name}, {where}{size}", "bold red")]
    kind = proof.comparison.modules.get(proof.module, "")
    if proof.module or first.kind == "module outputs":
        lines.append(Text(f"module    {proof.module or 'the model'} ({kind})"))
    if proof.cause is not None:
        lines.append(Text(f"cause     {proof.cause.name}: {proof.cause.kind.meaning}"))
        lines.append(Text(f"because   {proof.cause.evidence}"))
        lines.append(Text(more(proof.cause.kind.address), "dim"))
    return lines


def _band(proof: Proof) -> list[Text]:
    """Return a line that says how much the results on one device change by rounding alone."""
    sizes = [f"{each.kind} {_size(each.one_device)}" for each in proof.rounding if each.kind in OF_BAND]
    if not sizes:
        return []
    steps, precision = plural(len(proof.batches), "step"), proof.plan.precision
    text = f"in {precision} rounding alone moves, in {steps} and on one device too: {', '.join(sizes)}"
    return [Text(f"{text}. It grows over an epoch, and is not a fault.", "dim")]


def _limit() -> str:
    return f"{LIMIT:.0e}".replace("e-0", "e-")


def _row(compared: Compared) -> list[str | Text]:
    """Return a table row about one kind of value, such as "gradients"."""
    largest = compared.largest
    style = "red" if compared.faults else ""
    return [
        compared.kind,
        count_text(compared.count),
        Text(count_text(compared.faults) if compared.faults else "–", style),
        Text(_size(largest.relative), style),
        _place(largest) if largest.relative > 0 else "",
    ]


def _place(d: Difference) -> str:
    step = f"step {d.step}" if d.step else "the start"
    return f"{step}, {d.name or 'the model'}"


def _size(relative: float) -> str:
    if relative == 0:
        return "0"
    return "missing" if math.isinf(relative) else f"{relative:.1e}"


def _plain_lines(proof: PlainProof, screen: Screen) -> list[Text]:
    wrong = [finding for finding in proof.findings if finding.wrong]
    blocks = [screen.wrap(*_finding(each, "by design", "yellow")) for each in proof.findings if not each.wrong]
    blocks += [screen.wrap(*(Text(f"not judged: {text}", "yellow") for text in proof.not_judged))]
    blocks += [screen.wrap(*_finding(each, "wrong", "bold red")) for each in wrong]
    steps = f"{plural(proof.steps, 'step')} of {plural(proof.epochs, 'epoch')} on {proof.devices}"
    run = f"{steps}, against one process on the same samples, in float64"
    if wrong:
        last = Text(f"different: {plural(len(wrong), 'finding')}, {run}", "bold red")
    elif proof.not_judged:
        last = Text(f"not judged in all: nothing wrong is found, {run}", "bold yellow")
    else:
        last = Text(f"equal: {run}; no value differs by more than {max(proof.largest, LIMIT):.0e}", "bold green")
    return spaced([*blocks, screen.wrap(last)], None)


def _finding(finding: Finding, word: str, style: str) -> list[Text]:
    places = ", ".join(finding.places)
    lines = [
        Text(f"{word}: {finding.kind}{f' ({places})' if places else ''}", style),
        Text(f"because   {finding.evidence}"),
    ]
    return [*lines, *([Text(f"instead   {finding.instead}")] if finding.instead else [])]
