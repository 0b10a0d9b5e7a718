"""The plans of a job as a table: what is fastest and fits first, then what does not, and why.

Tested in tests/rehearsal/test_plan_text.py.
"""

from __future__ import annotations

from typing import Any

from rich.text import Text

from meshwise.rehearsal.estimate import FITS, TOO_CLOSE, TOO_LARGE, Estimate
from meshwise.spec.plan import Plan, changed
from meshwise.spec.units import bytes_text, percent_text, plural, seconds_text
from meshwise.terminal.table import table_lines

MOST_ROWS, MOST_REFUSED = 12, 4


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
    found, lines = plans.found, [Text()]
    first = found.estimates[0]
    lines += [Text(sentence) for sentence in sentences(first, one=plans.one)]
    for other in found.refused[: 0 if plans.one else MOST_REFUSED]:
        lines.append(Text(f"refused: {plan_words(other.plan)}: {other.why}", "dim"))
    more = len(found.refused) - MOST_REFUSED
    if more > 0:
        lines.append(Text(f"refused: {plural(more, 'more plan')}, most for the same reasons", "dim"))
    if found.left:
        lines.append(Text(f"not rehearsed, for want of time: {plural(len(found.left), 'plan')}. Use --seconds.", "dim"))
    lines += [Text(f"note: {warning}", "dim") for warning in plans.machine.warnings]
    return lines


def sentences(first: Estimate, *, one: bool) -> list[str]:
    """What the best plan, or the one that was asked about, comes to."""
    memory = first.memory
    need, low, high = (bytes_text(value) for value in (memory.total.value, memory.total.low, memory.total.high))
    of = "" if memory.capacity is None else f" of {bytes_text(memory.capacity)}"
    said = {
        FITS: f"fits: {low} to {high}{of}",
        TOO_CLOSE: f"too close to call: {low} to {high}{of}",
        TOO_LARGE: f"does not fit: {low} to {high}{of}",
    }.get(memory.verdict, f"needs {need}; what the device has is not known")
    which = plan_words(first.plan)
    split = ", ".join(
        f"{name} {bytes_text(size)}" for name, size in sorted(memory.categories.items(), key=lambda item: -item[1])
    )
    rest = f"allocated {bytes_text(memory.allocated)} on rank {memory.rank}: {split}"
    host = f"; in the host's memory {bytes_text(memory.host)}" if memory.host else ""
    found = [f"{which} {said}.", f"{rest}{host}."]
    if first.unknown:
        found.append(f"The time of a step is not known: {first.unknown}")
    if not one and memory.verdict == TOO_LARGE:
        found.append("No plan fits. Use more devices, a smaller --batch-size, or --allow precision.")
    return found
