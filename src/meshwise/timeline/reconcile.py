"""Compare a plan's predicted figures with the measured ones.

The kind of time that differs most is named.

Tested in tests/timeline/test_reconcile.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwise.spec.errors import PlanError
from meshwise.spec.plan_file import PREDICTED
from meshwise.spec.prediction import Prediction, prediction_of
from meshwise.spec.units import bytes_text, percent_text, seconds_text
from meshwise.timeline.run_report import OUTSIDE_STEPS, MemoryBeside, RankReport, Reconciled, TimeBeside
from meshwise.timeline.spans import KINDS
from meshwise.timeline.step_table import StepTable

WORTH_SAYING = 0.01
"""A kind of time is shown if it takes more than this share of a step, either as predicted or as measured."""


def reconciled(
    facts: Mapping[str, Any], table: StepTable, ranks: Sequence[RankReport]
) -> tuple[Reconciled | None, list[str]]:
    """Compare the time and the memory of a run's steps with the prediction of `meshwise plan`."""
    given = facts.get(PREDICTED)
    if given is None or not table.steady.any():
        return None, []
    if isinstance(given, str):
        return None, [given]
    try:
        prediction = prediction_of(given)
    except PlanError as error:
        return None, [f"The run's prediction cannot be read: {error}"]
    measured = float(np.median(table.step_seconds()[table.steady]))
    kinds = _kinds(prediction, table, measured)
    memory = _memory(prediction, ranks)
    sentence = " ".join(part for part in (_time(prediction, measured), _most(kinds), _memory_sentence(memory)) if part)
    told = (prediction.seconds, prediction.low, prediction.high)
    return Reconciled(prediction.machine, prediction.origin, sentence, *told, measured, kinds, memory), []


def _kinds(prediction: Prediction, table: StepTable, step: float) -> list[TimeBeside]:
    if prediction.seconds is None:
        return []
    middle = np.median(table.kind_seconds()[table.steady], axis=0)
    rows = [
        TimeBeside(kind, float(prediction.kinds.get(kind, 0.0)), float(value))
        for kind, value in zip(KINDS, middle, strict=True)
        if kind not in OUTSIDE_STEPS
    ]
    return [row for row in rows if max(row.predicted, row.measured) > WORTH_SAYING * max(step, prediction.seconds)]


def _memory(prediction: Prediction, ranks: Sequence[RankReport]) -> list[MemoryBeside]:
    """Compare the predicted bytes with the largest value on any rank, for each memory counter in the prediction, such
    as `allocated`. The measured value is None if no rank has this counter, as with CPU workers."""
    rows = []
    for name, value in prediction.memory.items():
        found = [rank.memory[name] for rank in ranks if name in rank.memory]
        rows.append(MemoryBeside(name, float(value), max(found) if found else None))
    return rows


def _time(prediction: Prediction, measured: float) -> str:
    if prediction.seconds is None or prediction.low is None or prediction.high is None:
        return f"A step takes {seconds_text(measured)}; no time was predicted on {prediction.machine}."
    inside = prediction.low <= measured <= prediction.high
    off = measured / prediction.seconds - 1 if prediction.seconds else 0.0
    more = f"{percent_text(abs(off))} {'more' if off >= 0 else 'less'} than predicted on {prediction.machine}"
    interval = f"{seconds_text(prediction.low)} to {seconds_text(prediction.high)}"
    origin = f"; prices: {prediction.origin}" if prediction.origin else ""
    return (
        f"A step takes {seconds_text(measured)}, {more} ({seconds_text(prediction.seconds)}, "
        f"{'inside' if inside else 'outside'} the 80 % interval of {interval}{origin})."
    )


def _most(kinds: Sequence[TimeBeside]) -> str:
    if not kinds:
        return ""
    most = max(kinds, key=lambda kind: abs(kind.measured - kind.predicted))
    return (
        f"What differs most is {most.name}: {seconds_text(most.measured)} were measured, "
        f"and {seconds_text(most.predicted)} were predicted."
    )


def _memory_sentence(memory: Sequence[MemoryBeside]) -> str:
    known = [row for row in memory if row.measured is not None]
    if not known:
        return "Memory is not compared: a CPU worker measures the memory of its process." if memory else ""
    told = ", ".join(
        f"{row.name} {bytes_text(row.measured or 0)} of {bytes_text(row.predicted)} predicted" for row in known
    )
    return f"Memory: {told}."
