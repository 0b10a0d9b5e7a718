"""How long one device would need for a step of several, estimated from what each of them computes and reads.

At most all of it, one after the other: it waits for no other rank, and larger batches do not compute slower. What all
ranks do alike, it does once: the optimizer's step, where every rank steps all parameters. At least what one rank
computes: it has all its samples, and more.

Measured against the truth by bench/speedup.py; tested in tests/timeline/test_findings.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwise.timeline.run_report import CollectiveReport
from meshwise.timeline.spans import KIND
from meshwise.timeline.step_table import StepTable

SAMPLES = [KIND[kind] for kind in ("forward", "backward", "data", "transfer")]
"""Kinds of time that go with the samples of a rank."""


def one_device_seconds(table: StepTable, collectives: Sequence[CollectiveReport]) -> tuple[float, float]:
    """The least and the most seconds of a step on one device: medians over the steady steps."""
    seconds = table.seconds[table.steady]  # (steps, ranks, kinds)
    samples, optimizer = seconds[:, :, SAMPLES].sum(axis=2), seconds[:, :, KIND["optimizer"]]
    divided = any(c.of == "parameters" or c.name == "reduce-scatter" for c in collectives)  # so are the steps
    steps = optimizer.sum(axis=1) if divided else optimizer.min(axis=1)
    idle = seconds[:, :, KIND["idle"]].min(axis=1)
    most = samples.sum(axis=1) + steps + idle
    least = samples.max(axis=1) + optimizer.max(axis=1)
    return float(np.median(np.minimum(least, most))), float(np.median(most))
