"""Define when a run saves states, and how many it keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwise.spec.durations import seconds_of
from meshwise.spec.errors import UsageError

KEEP = 2
"""How many checkpoints are kept by default: the newest, and the previous one in case the newest is damaged."""


@dataclass(frozen=True)
class Saves:
    """When a run saves its state, and how many checkpoints it keeps.

    steps, seconds: after how many steps or seconds the state is saved. If both are None, it is saved in the background,
        at intervals that cost little time. It is also saved at the end, and when the run is stopped.
    keep: the number of checkpoints that are kept.
    """

    steps: int | None = None
    seconds: float | None = None
    keep: int = KEEP

    @property
    def in_background(self) -> bool:
        """Whether the state is saved in the background, since the user has not said when."""
        return self.steps is None and self.seconds is None


def read_saves(every: int | str | None, keep: int | None) -> Saves:
    """Parse `--save-every 500` or `10min`, and `--keep 3`. Raises UsageError for other values."""
    steps, seconds = None, None
    if isinstance(every, int) or (every is not None and re.fullmatch(r"\s*-?\d{1,18}\s*", every)):
        steps = int(every)
        if steps < 1:
            raise UsageError(f"--save-every {every}: must be at least 1 step.")
    elif every is not None:
        seconds = seconds_of(every, "--save-every")
    if keep is not None and keep < 1:
        raise UsageError(f"--keep {keep}: must be at least 1, because the newest state is always kept.")
    return Saves(steps, seconds, KEEP if keep is None else keep)
