"""Explain a step as text: its costs, its limits, its memory.

It shows the time by phase and kind, the most expensive launches, what limits the step, and why the runner-up is slower.
Of the memory, it shows the categories, the phases, the largest tensors, and what is outside of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from meshwise.planner.estimate import FITS, Estimate
from meshwise.planner.explain import IDLE, KINDS, LAUNCHES, TO_HOST, WAITING, Costly, Explanation
from meshwise.planner.memory import MemoryParts
from meshwise.planner.price import COMPUTE, MEMORY
from meshwise.planner.simulate import STEP
from meshwise.planner.work import CATEGORIES, PHASES
from meshwise.spec.plan_settings import settings_text
from meshwise.spec.units import bandwidth_text, bytes_text, flops_text, percent_text, seconds_text
from meshwise.terminal.table import Cell, columns_lines, table_lines

WORDS = {STEP: "effects that no estimate covers"}
LIMITS = {
    COMPUTE: "the rate at which the device multiplies matrices",
    MEMORY: "the rate of the device's memory",
    LAUNCHES: "the host, which launches operators too slowly: larger microbatches have fewer of them",
    WAITING: "waiting for other ranks, such as a pipeline's bubble: more microbatches make it smaller",
    TO_HOST: "the link between the device and its host",
    IDLE: "time in which nothing is ready to run",
}
"""A description of each limit of a step. Any other limit is the name of a link."""
OTHER_COLUMNS, LEAST_NAME = 72, 28
"""The total width of the columns beside an operator's name, and the minimum width of the name, in characters."""
WORTH_SAYING = 0.005
"""The explanation leaves out whatever takes less than this fraction of the step."""


def explain_lines(found: Explanation, width: int) -> list[Text]:
    """Return the explanation of a step as lines of at most `width` characters."""
    estimate = found.estimate
    assert estimate.seconds is not None
    step = seconds_text(estimate.seconds.value)
    lines = [
        Text(),
        Text.assemble((f"{settings_text(estimate.plan)} in detail", "bold"), f"  {step} on rank {found.time.rank}"),
    ]
    lines += [*_phases(found, width), Text(), *map(Text, limit_sentences(found))]
    for title, costly in (("operator", found.operators), ("collective", found.collectives)):
        if costly:
            lines += [Text(), *_costly(title, costly, estimate.seconds.value, width)]
    return [*lines, *map(Text, runner_up_sentences(estimate, found.runner_up))]


def _phases(found: Explanation, width: int) -> list[Text]:
    """Return a table of seconds with a row for each phase and a column for each kind of time."""
    kinds = [kind for kind in KINDS if found.time.kinds.get(kind)]
    rows: list[list[Cell]] = []
    for phase in PHASES:
        own = [found.time.phases.get((phase, kind), 0.0) for kind in kinds]
        if sum(own):
            rows.append([phase, *(seconds_text(value) if value else "" for value in own), seconds_text(sum(own))])
    whole = found.time.seconds
    shares = [
        f"{seconds_text(found.time.kinds[kind])}, {percent_text(found.time.kinds[kind] / whole)}" for kind in kinds
    ]
    return table_lines(["", *kinds, "all"], [*rows, ["all", *shares, seconds_text(whole)]], width)


def limit_sentences(found: Explanation) -> list[str]:
    """Return sentences that explain the time of a step."""
    whole, hidden = found.time.seconds, found.time.hidden
    first = next(iter(found.limits), IDLE)
    shares = [
        f"{name} {percent_text(part / whole)}" for name, part in found.limits.items() if part / whole >= WORTH_SAYING
    ]
    limit = LIMITS.get(first, f"the link ({first}): communication that does not overlap with computing")
    lines = [f"What limits it: {limit}.", f"Of the step: {', '.join(shares)}."]
    if hidden:
        shown = found.time.kinds["communication"]
        lines.append(f"Communication: {seconds_text(shown)} exposed, {seconds_text(hidden)} hidden under computing.")
    factors = sorted(((name, more) for name, more in found.factors.items() if more > 0), key=lambda one: -one[1])
    if factors:
        told = ", ".join(f"{WORDS.get(name, name)} +{seconds_text(more)}" for name, more in factors[:3])
        lines.append(f"The step may take longer than estimated because of: {told}.")
    return lines


def _costly(title: str, costly: Sequence[Costly], step: float, width: int) -> list[Text]:
    room = max(width - OTHER_COLUMNS, LEAST_NAME)
    columns = costly_columns(title, costly, step)
    columns[title] = [one.what if len(one.what) <= room else f"{one.what[: room - 1]}…" for one in costly]
    return columns_lines(columns, width, left=(title, "hangs on", "price"), less_needed=("each", "price", "hangs on"))


def costly_columns(title: str, costly: Sequence[Costly], step: float) -> dict[str, list[Cell]]:
    """Return a table of the most expensive launches, as a mapping from titles to columns."""
    return {
        title: [one.what for one in costly],
        "times": [str(one.times) for one in costly],
        "seconds": [seconds_text(one.seconds) for one in costly],
        "share": [percent_text(one.seconds / step) for one in costly],
        "each": [bytes_text(one.bytes) for one in costly],
        "at": [flops_text(one.rate) if one.limit == COMPUTE else bandwidth_text(one.rate) for one in costly],
        "hangs on": [one.limit for one in costly],
        "price": [one.origin for one in costly],
    }


def runner_up_sentences(best: Estimate, other: Estimate | None) -> list[str]:
    """Return sentences on why the plan `other` is worse than `best`: the differences in time, by part, and in
    memory."""
    if other is None:
        return []
    name = settings_text(other.plan)
    more = other.memory.total.value - best.memory.total.value
    memory = f"{bytes_text(abs(more))} {'more' if more > 0 else 'less'} memory" if more else "as much memory"
    if other.memory.verdict != best.memory.verdict and best.memory.verdict == FITS:
        return ["", f"Why not {name}: {other.memory.verdict}, {memory}."]
    if best.seconds is None or other.seconds is None:
        return ["", f"Why not {name}: its time is not known; {memory}."]
    longer = other.seconds.value - best.seconds.value
    parts = _differences(best.parts, other.parts, best.seconds.value)
    told = f" ({', '.join(parts)})" if parts else ""
    time = f"{seconds_text(abs(longer))} {'longer' if longer >= 0 else 'shorter'}{told}"
    return ["", f"Why not {name}: {time if longer else 'as long'}, {memory}."]


def _differences(best: Mapping[str, float], other: Mapping[str, float], step: float) -> list[str]:
    found = {name: other.get(name, 0.0) - best.get(name, 0.0) for name in {**best, **other}}
    worth = sorted(
        ((name, more) for name, more in found.items() if abs(more) > WORTH_SAYING * step), key=lambda one: -abs(one[1])
    )
    return [f"{name} {'+' if more > 0 else '-'}{seconds_text(abs(more))}" for name, more in worth]


def memory_lines(found: MemoryParts, width: int) -> list[Text]:
    """Return the parts of a rank's memory as lines of at most `width` characters."""
    peak = found.peak
    at = ", ".join(part for part in (f"in {peak.phase}" if peak.phase else "", peak.module) if part)
    step = "its first step" if found.first else "a step"
    head = f"  {bytes_text(peak.bytes)} at the peak of {step}{', ' if at else ''}{at}"
    lines = [Text(), Text.assemble((f"Tensors of rank {found.rank}", "bold"), head), *_memory_phases(found, width)]
    lines += [Text(), *columns_lines(largest_columns(found), width, left=("at the peak", "made by"))]
    if found.outside:
        told = ", ".join(f"{name} {bytes_text(size)}" for name, size in found.outside.items())
        lines += [Text(), Text(f"Memory besides tensors:  {told}.")]
    if found.host:
        told = ", ".join(f"{name} {bytes_text(size)}" for name, size in found.host.items())
        lines.append(Text(f"In the host's memory: {told}."))
    return lines


def _memory_phases(found: MemoryParts, width: int) -> list[Text]:
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
