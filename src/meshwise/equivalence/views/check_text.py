"""A proof in a terminal: the verdict first, where the sides part and why, then all that was compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from meshwise.equivalence.compare import Compared, Difference
from meshwise.equivalence.proof import Proof
from meshwise.equivalence.tolerance import LIMIT
from meshwise.spec.units import count_text
from meshwise.terminal.table import columns, wrap


def check_text(proof: Proof, width: int | None = None) -> RenderableType:
    """The proof, at most `width` characters wide (None: as wide as the console)."""
    return _CheckText(proof, width)


@dataclass(frozen=True)
class _CheckText:
    """Drawn when it is printed: only the console knows how wide it is."""

    proof: Proof
    width: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or options.max_width, options.max_width)
        lines = [line for text in verdict(self.proof) for line in wrap(text, width, console)]
        rows = [_row(compared) for compared in self.proof.comparison.kinds]
        lines += [Text(), *columns(["compared", "how many", "differ", "largest", "where"], rows, width)]
        if self.proof.rounding:
            rounding = [[Text(r.kind), Text(_size(r.one_device)), Text(_size(r.plan))] for r in self.proof.rounding]
            title = f"in {self.proof.plan.precision}"
            lines += [Text(), *columns([title, "one device", "the plan"], rounding, width)]
            text = "rounding: the largest difference of each side from one device in float64"
            lines += wrap(Text(text, "dim"), width, console)
        lines += _notes(self.proof, width, console)
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        yield from lines


def verdict(proof: Proof) -> list[Text]:
    """The answer in a few sentences."""
    batches = ", ".join(map(str, proof.batches))
    steps = len(proof.batches)
    said = f"{steps} step{'s' * (steps != 1)} of {batches} samples"
    first = proof.comparison.first
    if first is None:
        text = f"equal: {proof.plan} computes what one device computes, in {said}"
        return [
            Text(text, "bold green"),
            Text(f"no difference above {_limit()} in float64, relative to the size of a tensor", "dim"),
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
    return lines


def _limit() -> str:
    return f"{LIMIT:.0e}".replace("e-0", "e-")


def _row(compared: Compared) -> list[Text]:
    """kind, how many, how many are faults, the largest difference, where that is."""
    largest = compared.largest
    style = "red" if compared.faults else ""
    size = "" if largest is None else _size(largest.relative)
    where = _place(largest) if largest is not None and largest.relative > 0 else ""
    return [
        Text(compared.kind),
        Text(count_text(compared.count)),
        Text(count_text(compared.faults) if compared.faults else "–", style),
        Text(size, style),
        Text(where),
    ]


def _place(d: Difference) -> str:
    step = f"step {d.step}" if d.step else "the start"
    return f"{step}, {d.name or 'the model'}"


def _size(relative: float) -> str:
    if relative == 0:
        return "0"
    return "missing" if math.isinf(relative) else f"{relative:.1e}"


def _notes(proof: Proof, width: int, console: Console) -> list[Text]:
    texts: Sequence[str] = [f"not compared: {text}" for text in proof.comparison.left_out]
    texts = [*texts, *proof.notes]
    lines = [line for text in texts for line in wrap(Text(text, "yellow"), width, console)]
    return [Text(), *lines] if lines else []
