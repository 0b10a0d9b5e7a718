"""Find the requested trackers.

A tracker is a function that takes values by name, and a step. The named trackers are in integrations/trackers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from meshwise.spec.errors import UsageError, check_known

TRACKERS = ("tensorboard", "wandb", "mlflow")
WHERE = "meshwise.integrations.trackers"
"""The module that opens trackers by the names of their packages."""

Tracker: TypeAlias = Callable[[Mapping[str, float], int], object]
"""A function `tracker(values, step)` that records numbers of a run, by name."""


@dataclass(frozen=True)
class OpenTracker:
    """A tracker that is open."""

    name: str
    track: Tracker
    close: Callable[[], object] = lambda: None


def check_trackers(wanted: Sequence[str]) -> None:
    """Raise UsageError for an unknown tracker, or a tracker whose library is not installed."""
    for name in wanted:
        check_known("log", name, TRACKERS)
        if find_spec(name) is None:
            package = "'meshwise[tensorboard]'" if name == "tensorboard" else name
            raise UsageError(f"log={name}: {name} is not installed. Use pip install {package}.")


def open_tracker(wanted: str | Tracker, folder: Path, step: int) -> OpenTracker:
    """Open a tracker for the run in `folder`."""
    if not isinstance(wanted, str):
        return OpenTracker(getattr(wanted, "__name__", type(wanted).__name__), wanted)
    return import_module(WHERE).OPEN[wanted](folder, step)  # type: ignore[no-any-return]
