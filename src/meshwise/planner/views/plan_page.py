"""Write a job's plans as one HTML page that works offline.

It has the table of plans, the predicted step as a Gantt chart, and the step's memory by category.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.planner.estimator import Rehearsed
from meshwise.planner.explain import explain
from meshwise.planner.memory import Curve, memory_curve, memory_parts, with_inside
from meshwise.planner.prediction import timeline_of
from meshwise.planner.simulate import Step
from meshwise.planner.views.explain_text import costly_columns, largest_columns, limit_sentences, runner_up_sentences
from meshwise.planner.views.plan_text import plan_columns, sentences, titles
from meshwise.planner.work import CATEGORIES, Launch
from meshwise.reports.analyse import report_of
from meshwise.reports.spans import Timeline
from meshwise.reports.views.html_page import page_of, report_dict
from meshwise.spec.units import bytes_text

POINTS = 600
"""The largest number of points of the memory curve to draw. Each is the highest in its section of the curve."""


def plan_page(plans: Any, first: Rehearsed) -> str:
    """Return an HTML page about the plans of `plan.Plans`."""
    found = plans.found
    title, counts = titles(plans)
    timeline = Timeline(source="predicted") if first.step is None else timeline_of(first, plans.job)
    values: dict[str, Any] = {
        "title": title,
        "counts": counts,
        "sentences": sentences(plans),
        "table": _table(plan_columns(plans), ("#", "step", "80 % of cases", "samples/s", "memory", "cost")),
        "limits": [],
        "costly": [],
        "memory": _memory(first),
    }
    if first.step is not None:
        runner_up = None if plans.one else next(iter(found.estimates[1:]), None)
        explained = explain(first.estimate, first.step, first.prices, runner_up)
        why = [sentence for sentence in runner_up_sentences(first.estimate, runner_up) if sentence]
        values["limits"] = [*limit_sentences(explained), *why]
        several = (("operator", explained.operators), ("collective", explained.collectives))
        right = ("times", "seconds", "share", "each", "at")
        values["costly"] = [
            _table(costly_columns(name, costly, first.step.seconds), right) for name, costly in several if costly
        ]
    return page_of({**report_dict(report_of(timeline)), "plan": values}, title)


def _table(columns: Mapping[str, Sequence[Any]], right: Sequence[str]) -> dict[str, Any]:
    """Return a table as JSON data: its titles, its rows as texts, and the indices of the columns to align left."""
    titles = list(columns)
    rows = [[str(cell) for cell in row] for row in zip(*columns.values(), strict=True)]
    return {"titles": titles, "rows": rows, "left": [at for at, title in enumerate(titles) if title not in right]}


def _memory(first: Rehearsed) -> dict[str, Any]:
    """Return the data of the memory curve to draw."""
    rank = first.estimate.memory.rank
    traced = next(each for each in first.traces if each.step.rank == rank)
    before, after = (with_inside(work, first.prices.inside) for work in (traced.first, traced.step))
    curve = memory_curve(after)
    rows = _thinned(curve)
    parts = memory_parts(before, after, first.prices.machine.devices[rank])
    outside = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.outside.items())
    told = [f"Tensors of rank {rank}, at most {bytes_text(parts.peak.bytes)}{' in its first step' * parts.first}."]
    told += [f"Memory besides tensors:  {outside}."] if outside else []
    return {
        "axis": "operators and collectives of the step" if first.step is None else "ms",
        "at": _times(curve, first.step, rank)[rows].tolist(),
        "categories": {
            name: curve.by_category[rows, column].tolist()
            for column, name in enumerate(CATEGORIES)
            if curve.by_category[:, column].any()
        },
        "note": " ".join(told),
        "largest": _table(largest_columns(parts), ("tensors", "each", "together", "share")),
    }


def _times(curve: Curve, step: Step | None, rank: int) -> NDArray[np.float64]:
    """Return the x coordinates of a memory curve: ms since the step began, or launches if times are unknown."""
    launched = np.cumsum([isinstance(event, Launch) for event in curve.work.events])
    number = np.where(curve.places < 0, 0, launched[np.maximum(curve.places, 0)])
    if step is None:
        return number.astype(np.float64)
    starts = [one.start for one in sorted(step.done[rank], key=lambda one: one.place)] + [step.seconds]
    return np.maximum.accumulate(np.array(starts)[number]) * 1e3


def _thinned(curve: Curve) -> list[int]:
    """Return the indices of the points of a curve to draw."""
    parts = np.array_split(np.arange(1, len(curve.places)), min(POINTS, max(len(curve.places) - 1, 1)))
    total = curve.total
    return [0, *(int(part[total[part].argmax()]) for part in parts if len(part))]
