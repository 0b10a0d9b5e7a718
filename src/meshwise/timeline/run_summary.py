"""Hold a run's summary as plain data, for `mw.run` and `summary.json`.

Tested in tests/timeline/views/test_summary_text.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.records.metrics import Best


@dataclass(frozen=True)
class WholeRun:
    """All sessions of a resumed run together.

    steps: the number of steps. A step that was repeated counts once.
    seconds: the wall time of all sessions.
    """

    sessions: int
    epochs: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class RunSummary:
    """What a run did. For a resumed run, this is what its newest session did. In JSON (`json_value`), a non-finite
    metric is null.

    status: "finished" or "stopped".
    seconds: the total wall time.
    train_seconds: the wall time of training and evaluating.
    phases: the seconds of each phase, one mapping per rank. "communication" is the part that did not overlap with
        computing.
    memory: the peak bytes of each rank, or None if unknown.
    folder: the folder of the run's records, or "" if none are kept.
    verdict: what limited the run.
    best: the best evaluation, if the job defines one. Its parameters are in best.safetensors.
    whole: all sessions of a resumed run together.
    """

    job: str
    plan: str
    devices: tuple[str, ...]
    status: str
    epochs: int
    steps: int
    samples: int
    seconds: float
    train_seconds: float
    samples_per_second: float
    metrics: Mapping[str, float]
    phases: tuple[Mapping[str, float], ...]
    memory: tuple[int | None, ...]
    folder: str
    notes: tuple[str, ...]
    verdict: str = ""
    best: Best | None = None
    whole: WholeRun | None = None
