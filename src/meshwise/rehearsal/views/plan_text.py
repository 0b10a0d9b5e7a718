"""The plans of a job as a table: what is fastest and fits first, then what does not, and why.

Tested in tests/rehearsal/test_plan_text.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from meshwise.rehearsal.edits import edits
from meshwise.rehearsal.estimate import FITS, TOO_CLOSE, TOO_LARGE, Estimate
from meshwise.spec.plan import Plan, changed
from meshwise.spec.units import bytes_text, percent_text, plural, seconds_text
from meshwise.spec.words import some
from meshwise.terminal.table import table_lines

MOST_ROWS, MOST_REFUSED, MOST_EDITS = 12, 4, 6
HOST_WORTH_SAYING = 1 << 20  # bytes


def plans_text(plans: Any, width: int | None = None) -> Text:
    """`api.plan.Plans` for a terminal."""
    found, machine = plans.found, plans.machine
    head = f"{plans.job} on {machine.name}, batch {plans.batch}"
    counts = f"{plural(len(found.estimates), 'plan')} rehearsed in {seconds_text(found.seconds)}"
    lines = [Text.assemble((head, "bold"), f"  {counts}"), Text()]
    rows = found.estimates[:MOST_ROWS]
    titles = ("", "plan", "step", "80 % of cases", "memory", "of", "", "most of it")
    lines += table_lines(titles, [_row(at, each) for at, each in enumerate(rows, 1)], left=(1, 6, 7), **_limit(width))
    lines += _below(plans)
    return Text("\n").join(lines)


def _limit(width: int | None) -> dict[str, int]:
    return {} if width is None else {"width": width}


def _row(at: int, estimate: Estimate) -> list[str]:
    memory, seconds = estimate.memory, estimate.seconds
    step = "unknown" if seconds is None else seconds_text(seconds.value)
    interval = "" if seconds is None else f"{seconds_text(seconds.low)} to {seconds_text(seconds.high)}"
    capacity = "" if memory.capacity is None else bytes_text(memory.capacity)
    return [
        str(at),
        plan_words(estimate.plan),
        step,
        interval,
        bytes_text(memory.total.value),
        capacity,
        memory.verdict,
        _parts(estimate),
    ]


def plan_words(plan: Plan) -> str:
    """`shard=8 accumulate=2`: what the plan says, as `--set` takes it."""
    return " ".join(f"{name}={_word(value)}" for name, value in changed(plan).items())


def _word(value: Any) -> str:
    return ",".join(value) + "," * (len(value) == 1) if isinstance(value, tuple) else str(value).lower()


def _parts(estimate: Estimate) -> str:
    """The two largest parts of the step, as shares of it."""
    total = sum(estimate.parts.values())
    largest = sorted(estimate.parts.items(), key=lambda part: -part[1])[:2]
    return ", ".join(f"{name} {percent_text(value / total)}" for name, value in largest if total and value)


def _below(plans: Any) -> list[Text]:
    found, first = plans.found, plans.found.estimates[0]
    lines = [Text(), *(Text(sentence) for sentence in sentences(found.estimates, one=plans.one))]
    lines += _edits(first, found.estimates[1:])
    reasons: dict[str, list[str]] = {}
    for other in () if plans.one else found.refused:
        reasons.setdefault(other.why, []).append(plan_words(other.plan))
    lines += [Text(f"refused: {some(which)}: {why}", "dim") for why, which in list(reasons.items())[:MOST_REFUSED]]
    if found.left:
        lines.append(Text(f"not rehearsed, for want of time: {plural(len(found.left), 'plan')}. Use --seconds.", "dim"))
    return lines + [Text(f"note: {note}", "dim") for note in (*first.notes, *plans.machine.warnings)]


def _edits(first: Estimate, others: Sequence[Estimate]) -> list[Text]:
    """What the first plan would be with one thing changed."""
    priced = edits(first, others)[:MOST_EDITS]
    lines = [Text(), Text("changed, it would be")] if priced else []
    for edit in priced:
        words = " ".join(f"{name}={_word(value)}" for name, value in edit.changes.items())
        more = "" if edit.seconds is None else f", {edit.seconds:+.0%} time"
        sign = "-" if edit.memory < 0 else "+"
        lines.append(Text(f"  {words}: {sign}{bytes_text(abs(edit.memory))}{more}; {edit.verdict}"))
    return [*lines, Text()] if lines else []


def sentences(estimates: Sequence[Estimate], *, one: bool) -> list[str]:
    """What the best plan, or the one that was asked about, comes to, and why it is the first."""
    first = estimates[0]
    memory = first.memory
    need, low, high = (bytes_text(value) for value in (memory.total.value, memory.total.low, memory.total.high))
    of = "" if memory.capacity is None else f" of {bytes_text(memory.capacity)}"
    said = {
        FITS: f"fits: {low} to {high}{of}",
        TOO_CLOSE: f"is too close to call: {low} to {high}{of}",
        TOO_LARGE: f"does not fit: {low} to {high}{of}",
    }.get(memory.verdict, f"needs {need}; what the device has is not known")
    split = ", ".join(
        f"{name} {bytes_text(size)}" for name, size in sorted(memory.categories.items(), key=lambda item: -item[1])
    )
    host = f"; in the host's memory {bytes_text(memory.host)}" if memory.host > HOST_WORTH_SAYING else ""
    reserved = f"; the allocator reserves {bytes_text(memory.reserved)} for it"
    found = [
        f"{plan_words(first.plan)} {said}.",
        f"Tensors on rank {memory.rank}: {bytes_text(memory.allocated)}: {split}{reserved}{host}.",
    ]
    if first.unknown:
        found.append(f"The time of a step is not known: {first.unknown}.")
    if not one:
        found += _why_first(first, estimates[1:])
    return found


def _why_first(first: Estimate, others: Sequence[Estimate]) -> list[str]:
    found = []
    if first.memory.verdict == TOO_LARGE:
        over = first.memory.total.low - (first.memory.capacity or 0)
        found.append(
            f"No plan fits: the nearest is {bytes_text(over)} over. Use more devices, a smaller --batch-size, or "
            "--allow precision."
        )
    next_best = next((other for other in others if other.plan.devices != first.plan.devices), None)
    if next_best is not None and None not in (first.seconds, next_best.seconds):
        assert first.seconds is not None and next_best.seconds is not None
        if first.plan.devices < next_best.plan.devices and first.memory.verdict == FITS:
            found.append(
                f"{plural(first.plan.devices, 'device')}: a step takes {seconds_text(first.seconds.value)}; with "
                f"{plan_words(next_best.plan)} it takes {seconds_text(next_best.seconds.value)}."
            )
    return found
