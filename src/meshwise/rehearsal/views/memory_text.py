"""Show a plan's memory as text: categories, phases, largest tensors.

It also shows the memory outside of tensors.

Tested in tests/rehearsal/test_memory_parts.py.
"""

from __future__ import annotations

from rich.text import Text

from meshwise.rehearsal.memory_parts import MemoryParts
from meshwise.rehearsal.work import CATEGORIES
from meshwise.spec.units import bytes_text, percent_text
from meshwise.terminal.table import Cell, columns_lines, table_lines


def memory_lines(found: MemoryParts, width: int) -> list[Text]:
    """Return the parts of a rank's memory as lines of at most `width` characters."""
    peak = found.peak
    at = ", ".join(part for part in (f"in {peak.phase}" if peak.phase else "", peak.module) if part)
    step = "its first step" if found.first else "a step"
    head = f"  {bytes_text(peak.bytes)} at the peak of {step}{', ' if at else ''}{at}"
    lines = [Text(), Text.assemble((f"Tensors of rank {found.rank}", "bold"), head), *_phases(found, width)]
    lines += [Text(), *columns_lines(largest_columns(found), width, left=("at the peak", "made by"))]
    if found.outside:
        told = ", ".join(f"{name} {bytes_text(size)}" for name, size in found.outside.items())
        lines += [Text(), Text(f"Memory beside tensors: {told}.")]
    if found.host:
        told = ", ".join(f"{name} {bytes_text(size)}" for name, size in found.host.items())
        lines.append(Text(f"In the host's memory: {told}."))
    return lines


def _phases(found: MemoryParts, width: int) -> list[Text]:
    """Return a table of bytes by category, with a row for the peak of each phase."""
    names = [name for name in CATEGORIES if any(name in split for split in found.phases.values())]
    most = max(sum(split.values()) for split in found.phases.values())
    rows: list[list[Cell]] = []
    for phase, split in found.phases.items():
        whole = sum(split.values())
        style = "bold" if whole == most else ""
        cells = [phase, *(bytes_text(split[name]) if name in split else "" for name in names), bytes_text(whole)]
        rows.append([Text(cell, style) for cell in cells])
    return table_lines(["the most in", *names, "all"], rows, width)


def largest_columns(found: MemoryParts) -> dict[str, list[Cell]]:
    """Return a table of the largest tensors at the peak, as a mapping from titles to columns."""
    return {
        "at the peak": [one.category for one in found.largest],
        "tensors": [str(one.times) for one in found.largest],
        "each": [bytes_text(one.size) for one in found.largest],
        "together": [bytes_text(one.size * one.times) for one in found.largest],
        "share": [percent_text(one.size * one.times / found.peak.bytes) for one in found.largest],
        "made by": [f"{one.maker}, {one.phase}" if one.maker else "there before the step" for one in found.largest],
    }
