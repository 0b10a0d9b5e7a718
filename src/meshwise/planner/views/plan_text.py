"""Show a job's plans as a table, or as plain values.

The fastest plan is first. Plans that do not fit in memory follow, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from meshwise.planner.estimate import FITS, TOO_CLOSE, TOO_LARGE, Estimate, edits
from meshwise.planner.explain import Explanation
from meshwise.planner.views.explain_text import explain_lines, memory_lines
from meshwise.spec.json_values import json_value
from meshwise.spec.plan import AXES, Plan, changed
from meshwise.spec.plan_settings import setting_text, settings_text
from meshwise.spec.units import bytes_text, percent_text, plural, rate_text, seconds_text
from meshwise.spec.words import some
from meshwise.terminal.table import NO_LIMIT, Cell, columns_lines

LESS_NEEDED = ("samples/s", "most of it", "80 % of cases")
"""Columns of the table of plans that are left out on a narrow screen, in this order."""
MOST_ROWS, MOST_REASONS, MOST_EDITS, MOST_NAMED = 12, 6, 6, 5
HOST_WORTH_SAYING = 1 << 20  # host memory of at most this many bytes is not mentioned


def plans_text(plans: Any, width: int | None = None) -> Text:
    """Return the plans of `plan.Plans` as text for a terminal, at most `width` characters wide."""
    head, counts = titles(plans)
    columns = plan_columns(plans)
    left = [title for title in columns if title in ("plan", "most of it") or title.startswith(("in ", "fits"))]
    lines = [Text.assemble((head, "bold"), f"  {counts}"), Text()]
    lines += columns_lines(columns, width or NO_LIMIT, left=left, less_needed=LESS_NEEDED) + _below(plans)
    if plans.explained is not None:
        lines += explain_lines(plans.explained, width or NO_LIMIT)
    if plans.memory is not None:
        lines += memory_lines(plans.memory, width or NO_LIMIT)
    return Text("\n").join(lines)


def titles(plans: Any) -> tuple[str, str]:
    """Return two texts: what was planned, and how many plans were simulated."""
    head, dtype = f"{plans.job} on {plans.machine.name}, batch {plans.batch}", plans.found.estimates[0].dtype
    rehearsed = plural(len(plans.found.estimates), "plan")
    counts = f"{rehearsed} rehearsed in {seconds_text(plans.found.seconds)} of a processor"
    return f"{head}, computed in {dtype}" if dtype else head, counts


def first_text(plans: Any) -> str:
    """Return the likely best plans of `plan.Plans` as text, with costs guessed before any plan is simulated."""
    rows = [
        f"  {settings_text(plan)}: about {seconds_text(guess.seconds)}, {bytes_text(guess.memory)}"
        for plan, guess in plans.found.first
    ]
    return "\n".join([f"{plans.job} on {plans.machine.name}, guessed, not rehearsed yet:", *rows])


def worth_showing(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates to show, without plans that do not fit or that another plan on the same axes beats."""
    shown: list[Estimate] = []
    for each in estimates:  # sorted from best to worst
        nowhere = each.memory.verdict == TOO_LARGE and estimates[0].memory.verdict != TOO_LARGE
        if not nowhere and not any(_axes(other) == _axes(each) and _beats(other, each) for other in shown):
            shown.append(each)
    return shown


def _axes(estimate: Estimate) -> list[int]:
    return [getattr(estimate.plan, axis) for axis in AXES]


def _beats(one: Estimate, other: Estimate) -> bool:
    faster = other.seconds is None or (one.seconds is not None and one.seconds.value <= other.seconds.value)
    return faster and one.memory.total.value <= other.memory.total.value


def plan_columns(plans: Any) -> dict[str, list[Cell]]:
    """Return the columns of the table of plans, by title."""
    every = plans.found.estimates
    shown = every[:1] if plans.one else worth_showing(every)[:MOST_ROWS]
    room = {each.memory.capacity for each in shown if each.memory.capacity is not None}
    fits = f"in {bytes_text(room.pop())}" if len(room) == 1 else "fits"
    columns: dict[str, list[Cell]] = {"#": [] if plans.one else [str(every.index(each) + 1) for each in shown]}
    columns["plan"] = [settings_text(each.plan) for each in shown]
    columns["step"] = ["unknown" if each.seconds is None else seconds_text(each.seconds.value) for each in shown]
    columns["80 % of cases"] = [_interval(each) for each in shown]
    columns["samples/s"] = ["" if not each.rate else rate_text(each.rate) for each in shown]
    columns["memory"] = [bytes_text(each.memory.total.value) for each in shown]
    columns[fits] = [each.memory.verdict for each in shown]
    columns["most of it"] = [_parts(each) for each in shown]
    return {title: cells for title, cells in columns.items() if any(cells)}


def training_sentence(plans: Any) -> str:
    """Return a sentence on how long the whole training takes with the best plan, or "" if unknown."""
    first = plans.found.estimates[0]
    hours = plans.device_hours(first)
    if hours is None:
        return ""
    told = f"Training of {plural(plans.steps, 'step')}: {seconds_text(plans.steps * first.seconds.value)}"
    return f"{told}, {f'{hours:.2g}' if hours < 10 else f'{hours:,.0f}'} device hours."


def _interval(estimate: Estimate) -> str:
    seconds = estimate.seconds
    return "" if seconds is None else f"{seconds_text(seconds.low)} to {seconds_text(seconds.high)}"


def _parts(estimate: Estimate) -> str:
    """Return the two largest parts of the step as text, such as `computing 80 %, communication 15 %`."""
    total = sum(estimate.parts.values())
    largest = sorted(estimate.parts.items(), key=lambda part: -part[1])[:2]
    return ", ".join(f"{name} {percent_text(value / total)}" for name, value in largest if total and value)


def _below(plans: Any) -> list[Text]:
    found, first = plans.found, plans.found.estimates[0]
    lines = [Text(), *map(Text, sentences(plans)), *_edits(first, found.estimates[1:])]
    notes = [f"note: {note}" for note in (*plans.said, *first.notes, *plans.machine.warnings)]
    return lines + [Text(line, "dim") for line in (*(() if plans.one else _not_shown(found)), *notes)]


def _not_shown(found: Any) -> Iterator[str]:
    """Yield lines that say which plans are not in the table, one line for each reason."""
    guessed, shown = [plan for plan, _ in found.first], worth_showing(found.estimates)[:MOST_ROWS]
    reasons: dict[str, list[Plan]] = {}
    for each in found.estimates:
        if each not in shown:
            why = "does not fit" if each.memory.verdict == TOO_LARGE else "behind a row on the same axes"
            reasons.setdefault(why, []).append(each.plan)
    for other in sorted(found.refused, key=lambda other: other.plan not in guessed):
        if (why := f"refused: {other.why}") in reasons or len(reasons) < MOST_REASONS:
            reasons.setdefault(why, []).append(other.plan)
    reasons["not rehearsed, because the time was over (--seconds allows more)"] = [*found.left]
    reasons["not rehearsed, because it is likely slower"] = [*found.worse]
    for why, plans in reasons.items():
        if plans:
            names = map(settings_text, sorted(plans, key=lambda plan: plan not in guessed))
            yield f"{some([*names], MOST_NAMED)}: {why}"


def _edits(first: Estimate, others: Sequence[Estimate]) -> list[Text]:
    """Return lines on what small changes of the first plan would cost or save."""
    priced = list(edits(first, others))[:MOST_EDITS]
    lines = [Text(), Text("changed, it would be")] if priced else []
    for edit in priced:
        words = " ".join(setting_text(name, value) for name, value in edit.changes.items())
        more = "" if edit.seconds is None else f", {edit.seconds * 100:+.0f} % time"
        sign = "-" if edit.memory < 0 else "+"
        lines.append(Text(f"  {words}: {sign}{bytes_text(abs(edit.memory))}{more}; {edit.verdict}"))
    return [*lines, Text()] if lines else []


def sentences(plans: Any) -> list[str]:
    """Return sentences on the first plan: its memory, why it is the first, and what the whole training takes."""
    first, *others = plans.found.estimates
    memory = first.memory
    need, low, high = (bytes_text(value) for value in (memory.total.value, memory.total.low, memory.total.high))
    of = "" if memory.capacity is None else f" of {bytes_text(memory.capacity)}"
    said = {
        FITS: f"fits: {low} to {high}{of}",
        TOO_CLOSE: f"is too close to call: {low} to {high}{of}",
        TOO_LARGE: f"does not fit: {low} to {high}{of}",
    }.get(memory.verdict, f"needs {need}; the memory of the device is not known")
    host = f"; in the host's memory {bytes_text(memory.host)}" if memory.host > HOST_WORTH_SAYING else ""
    reserved = (
        f"; the allocator reserves {bytes_text(memory.reserved)} for them" if memory.reserved > memory.allocated else ""
    )
    found = [
        f"{settings_text(first.plan)} {said}.",
        f"Tensors on rank {memory.rank}: {bytes_text(memory.allocated)}: {_split(first)}{reserved}{host}.",
    ]
    if first.unknown:
        found.append(f"The time of a step is not known: {first.unknown}.")
    if not plans.one:
        found += _why_first(first, others)
    if training := training_sentence(plans):
        found.append(training)
    return found


def _split(estimate: Estimate) -> str:
    largest = sorted(estimate.memory.categories.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in largest)


def _why_first(first: Estimate, others: Sequence[Estimate]) -> list[str]:
    found = []
    if first.memory.verdict == TOO_LARGE:
        near = min((first, *others), key=lambda each: each.memory.total.value)
        over = near.memory.total.high - (near.memory.capacity or 0)
        narrower = "" if near.plan.dtypes.computed in ("bf16", "fp16") else ", or --allow precision"
        found.append(
            f"No plan fits. The nearest plan, {settings_text(near.plan)}, may need {bytes_text(over)} too much: "
            f"{_split(near)}. Use more devices{',' if narrower else ' or'} a smaller --batch-size{narrower}."
        )
    next_best = next((other for other in others if other.plan.devices != first.plan.devices), None)
    if next_best is not None and None not in (first.seconds, next_best.seconds):
        assert first.seconds is not None and next_best.seconds is not None
        if first.plan.devices < next_best.plan.devices and first.memory.verdict == FITS:
            found.append(
                f"{plural(first.plan.devices, 'device')}: a step takes {seconds_text(first.seconds.value)}; with "
                f"{settings_text(next_best.plan)} it takes {seconds_text(next_best.seconds.value)}."
            )
    unknown = next((other for other in others if other.unknown), None)
    if unknown is not None and not first.unknown:
        found.append(f"Some times are not known, such as that of {settings_text(unknown.plan)}: {unknown.unknown}.")
    return found


def plans_dict(plans: Any) -> dict[str, Any]:
    """Convert the result of a search (`plan.Plans`) to plain values. Times are in seconds, memory is in bytes."""
    found = plans.found
    return {
        "job": plans.job,
        "batch_size": plans.batch,
        "machine": plans.machine.name,
        "seconds": round(found.seconds, 3),
        "plans": [estimate_dict(each) | {"device_hours": plans.device_hours(each)} for each in found.estimates],
        "refused": [{"plan": json_value(changed(each.plan)), "why": each.why} for each in found.refused],
        "not_rehearsed": [json_value(changed(each)) for each in found.left],
        "likely_slower": len(found.worse),
        "training": {"steps": plans.steps},
        "explained": None if plans.explained is None else explanation_dict(plans.explained),
        "memory": json_value(plans.memory),
        "warnings": [*plans.said, *plans.machine.warnings],
    }


def estimate_dict(estimate: Estimate) -> dict[str, Any]:
    """Convert the estimate of one plan to plain values."""
    values: dict[str, Any] = json_value(estimate)
    values["plan"] = json_value(changed(estimate.plan))
    values["memory"]["verdict"] = estimate.memory.verdict
    values["samples_per_second"] = estimate.rate
    return values


def explanation_dict(explanation: Explanation) -> dict[str, Any]:
    """Convert the explanation of a step to plain values."""
    values: dict[str, Any] = json_value(explanation)
    phases: dict[str, dict[str, float]] = {}
    for (phase, kind), seconds in explanation.time.phases.items():
        phases.setdefault(phase, {})[kind] = seconds
    values["time"]["phases"] = phases
    del values["estimate"], values["runner_up"]
    return {"plan": json_value(changed(explanation.estimate.plan)), **values}
